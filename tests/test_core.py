"""The binding's model, sampler, scores and module: what goes in and out, what is refused.

The arithmetic has its own tests against the oracle; here two ways through the core must agree.
"""

import gc
from pathlib import Path
from typing import Any

import check_includes
import numpy as np
import pytest
from core_model import DIM, HEAD_DIM, HEADS, build, config, logits

from kvcomm import _core
from kvcomm.errors import DeviceError, MismatchError, NumericError


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"colour": 1}, ValueError, 'config: unknown field "colour"'),
        ({"dim": 2.5}, TypeError, "config.dim must be an integer, not float"),
        ({"dim": True}, TypeError, "config.dim must be an integer, not bool"),
        ({"dim": 2**40}, ValueError, "config.dim must be in"),
        ({"n_layers": 0}, ValueError, "config.n_layers is 0"),
        ({"qkv_bias": 1}, TypeError, "config.qkv_bias must be a bool, not int"),
        ({"norm_eps": "1"}, TypeError, "config.norm_eps must be a number, not str"),
        ({"activation": "relu"}, ValueError, "config.activation must be one of silu, gelu_tanh"),
        ({"activation": None}, TypeError, "config.activation must be a string"),
        ({"rope": []}, ValueError, "config.rope has 0 entries, expected 1 or 2"),
        ({"rope": [{"kind": "spiral"}]}, ValueError, r"config.rope\[0\].kind must be one of"),
        ({"rope": [{"kind": "linear", "theta": 1.0, "rotary_dim": 8}]}, ValueError, "factor is mi"),
        ({"windowed": [True]}, ValueError, "config.windowed has 1 entries, expected 4"),
        ({"rope_of_layer": [0, 1, 2, 0]}, ValueError, r"config.rope_of_layer must be in 0 \.\. 1"),
        ({"n_kv_heads": 3}, ValueError, "n_kv_heads"),
    ],
)
def test_bad_configs(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        _core.Model(config(**changes))


def test_config_round_trips(device: str) -> None:
    ropes = [
        {"kind": "default", "theta": 10000.0, "rotary_dim": 8},
        {
            "kind": "yarn",
            "theta": 1e6,
            "rotary_dim": 8,
            "factor": 4.0,
            "original_length": 4096.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "attention_factor": 1.25,
            "truncate": True,
        },
    ]
    given = config(
        rope=ropes, rope_of_layer=[0, 1, 0, 1], windowed=[True, False, True, False], window=7
    )
    found = _core.Model(given, device=device, dtype="bf16").config
    assert set(found) == set(given)
    for name, value in given.items():
        if isinstance(value, float):
            assert found[name] == pytest.approx(value, rel=1e-6)
        else:
            assert found[name] == value


def test_config_without_a_field() -> None:
    for name in config():
        with pytest.raises(ValueError, match=rf"config\.{name} is missing"):
            _core.Model({k: v for k, v in config().items() if k != name})
    with pytest.raises(TypeError, match="config must be a dict, not int"):
        _core.Model(3)  # type: ignore[arg-type]


def test_bad_weights(device: str) -> None:
    model = _core.Model(config(), device=device)
    norm = np.ones(DIM, np.float32)
    with pytest.raises(ValueError, match=r'weight must be one of .*embed.*not "nose"'):
        model.set("nose", 0, norm, "f32")
    with pytest.raises(ValueError, match=r"layer must be in 0 \.\. 3, not 4"):
        model.set("attn_norm", 4, norm, "f32")
    with pytest.raises(TypeError, match="weight attn_norm of layer 1: dtype is float64"):
        model.set("attn_norm", 1, norm.astype("f8"), "f32")
    with pytest.raises(MismatchError, match="attn_norm"):
        model.set("attn_norm", 1, norm[:5], "f32")
    with pytest.raises(ValueError, match="has 3 dimensions, expected 1 to 2"):
        model.set("attn_norm", 1, norm.reshape(1, 1, DIM), "f32")
    with pytest.raises(NumericError, match="attn_norm of layer 1"):
        model.set("attn_norm", 1, np.full(DIM, np.nan, np.float32), "f32")
    half = _core.Model(config(), device=device, dtype="f16")
    with pytest.raises(NumericError, match="q of layer 0"):
        half.set("q", 0, np.full((HEADS * HEAD_DIM, DIM), 7e4, np.float32), "f32")
    with pytest.raises(ValueError, match="missing"):
        model.seal()
    with pytest.raises(ValueError, match="sealed"):
        _core.Session(model)
    with pytest.raises(DeviceError, match="abacus"):
        _core.Model(config(), device="abacus")
    with pytest.raises(DeviceError, match="cuda"):
        _core.Model(config(), device="cuda")


def test_weights_of_a_file(tmp_path: Path, device: str) -> None:
    values = np.random.default_rng(5).standard_normal((HEADS * HEAD_DIM, DIM)).astype("<f4")
    file = tmp_path / "weights"
    file.write_bytes(b"abc" + values.tobytes() + np.ones(DIM, "<f2").tobytes())
    norm_at = 3 + values.nbytes
    matrix = ("m", "q", 0, "f32", 3, *values.shape)
    with open(file, "rb") as opened:
        descriptor = opened.fileno()
        model = _core.Model(config(), device=device)
        model.read(descriptor, [matrix, ("n", "attn_norm", 1, "f16", norm_at, 1, DIM)])
        for weight, layer in (("q", 0), ("attn_norm", 1)):
            with pytest.raises(ValueError, match=f"^m: {weight} of layer {layer} was set before"):
                model.read(descriptor, [("m", weight, layer, *matrix[3:])])
        faults: list[tuple[type[Exception], str, Any]] = [
            (OSError, "^n: attn_norm of layer 2: cannot be read",
             ("n", "attn_norm", 2, "f16", norm_at + 2, 1, DIM)),
            (MismatchError, "^m: q of layer 1: shape", ("m", "q", 1, "f32", 3, DIM + 1, DIM)),
            (ValueError, "weight must be one of", ("m", "nose", 0, "f32", 3, DIM, DIM)),
            (ValueError, "dtype must be one of", ("m", "q", 1, "f64", 3, DIM, DIM)),
            (ValueError, "m: a place or size below zero", ("m", "q", 1, "f32", -3, DIM, DIM)),
            (ValueError, "has 2 entries, expected 7", ("m", "q")),
            (TypeError, "must be a sequence, not int", 7),
        ]  # fmt: skip
        for error, message, entry in faults:
            with pytest.raises(error, match=message):
                model.read(descriptor, [entry])


def test_a_session_outlives_the_names_of_its_model(device: str) -> None:
    model = build(device)
    expected = logits(model, [1, 2, 3])
    session, workspace = _core.Session(model), _core.Workspace(model)
    del model
    gc.collect()
    out, _ = workspace.forward([session], [[1, 2, 3]], output="logits")
    assert out is not None
    np.testing.assert_array_equal(out[0], expected)


# ---- sampling and scores ----


def test_sampler_limits() -> None:
    for name, bad in {
        "temperature": [-1.0, float("nan"), float("inf")],
        "top_k": [-1],
        "top_p": [0.0, 1.5, float("nan")],
        "seed": [-1],
    }.items():
        for value in bad:
            with pytest.raises(ValueError, match=name):
                _core.Sampler(**{name: value})
    row = np.array([0.5, 2.0, 2.0, -1.0], np.float32)
    for options in ({}, {"temperature": 1e-8, "top_k": 1}, {"temperature": 1.0, "top_p": 1e-9}):
        assert _core.Sampler(**options).sample(row) == 1  # type: ignore[arg-type]
    assert _core.Sampler(temperature=1.0, top_k=10000).sample(row[:1]) == 0
    draws = [[_core.Sampler(temperature=2.0, seed=s).sample(row) for s in range(40)] for _ in "ab"]
    assert draws[0] == draws[1]
    assert len(set(draws[0])) > 1
    with pytest.raises(NumericError):
        _core.Sampler().sample(np.array([0, np.nan], np.float32))
    with pytest.raises(NumericError):
        _core.Sampler().sample(np.full(3, -np.inf, np.float32))
    with pytest.raises(TypeError, match="logits: dtype is float64"):
        _core.Sampler().sample(row.astype(np.float64))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no logits"):
        _core.Sampler().sample(row[:0])


def test_score_and_rank() -> None:
    scores = _core.score(np.array([0.2, 0.6, 0.4, 0.2]), alpha=1.0)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, [0, 1, 0.5, 0], atol=1e-7)
    prior = _core.score([0.2, 0.6, 0.4, 0.2], alpha=0.0, mu=2.0, sigma=1.0)  # type: ignore[arg-type]
    np.testing.assert_allclose(prior, np.exp(-np.array([4, 1, 0, 1]) / 2), rtol=1e-6)
    ties = np.array([1, 3, 1, 3], np.float32)
    assert _core.rank(ties) == [1, 3, 0, 2]
    assert _core.rank(ties, preset="reference") == [3, 1, 2, 0]
    with pytest.raises(ValueError, match='preset must be one of paper, reference, not "best"'):
        _core.rank(ties, preset="best")  # type: ignore[arg-type]
    with pytest.raises(NumericError, match="layer 1"):
        _core.score(np.array([1, np.nan]), alpha=0.5)


def test_module(device: str) -> None:
    by_name = {entry["name"]: entry for entry in _core.devices()}
    assert set(by_name) == {"cpu", "cuda", "guard"}
    assert by_name["cpu"]["available"]
    before = _core.get_num_threads()
    try:
        _core.set_num_threads(3)
        assert _core.get_num_threads() == 3
    finally:
        _core.set_num_threads(0)
    assert _core.get_num_threads() == before
    for bad in (-1, 2**40):
        with pytest.raises(ValueError, match=r"n must be|threads"):
            _core.set_num_threads(bad)
    with pytest.raises(TypeError, match="n must be an integer, not bool"):
        _core.set_num_threads(True)


def test_includes() -> None:
    assert check_includes.faults() == []
