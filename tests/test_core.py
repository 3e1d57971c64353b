"""The binding kvcomm._core: what goes in and out, what is refused, who keeps what alive.

The arithmetic has its own tests against the oracle; here a tiny model with weights from a seed is
enough, and two ways through the same core must agree.
"""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import check_includes
import numpy as np
import pytest

from kvcomm import _core
from kvcomm.errors import DeviceError, MismatchError, NumericError

LAYERS, DIM, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB = 4, 32, 4, 2, 8, 48, 320


def config(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "n_layers": LAYERS,
        "dim": DIM,
        "hidden_dim": HIDDEN,
        "n_heads": HEADS,
        "n_kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "norm_eps": 1e-5,
        "norm_offset": 0.0,
        "embed_scale": 1.0,
        "attention_scale": HEAD_DIM**-0.5,
        "activation": "silu",
        "qkv_bias": False,
        "o_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "post_norms": False,
        "tied_head": True,
        "window": 0,
        "rope": [{"kind": "default", "theta": 10000.0, "rotary_dim": HEAD_DIM}],
    }
    return base | changes


def build(device: str, seed: int = 0, k_bias: float | None = None, **changes: Any) -> _core.Model:
    """A sealed llama with weights from a seed; with k_bias, every key gets it added."""
    settings = config(qkv_bias=k_bias is not None, **changes)
    model = _core.Model(settings, device=device)
    rng = np.random.default_rng(seed)
    vocab, width, kv_width = settings["vocab_size"], HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM

    def put(weight: str, layer: int, *shape: int) -> None:
        model.set(weight, layer, (rng.standard_normal(shape) * 0.3).astype(np.float32), "f32")

    put("embed", 0, vocab, DIM)
    put("final_norm", 0, DIM)
    for layer in range(LAYERS):
        put("attn_norm", layer, DIM)
        put("mlp_norm", layer, DIM)
        put("q", layer, width, DIM)
        put("k", layer, kv_width, DIM)
        put("v", layer, kv_width, DIM)
        put("o", layer, DIM, width)
        put("gate", layer, HIDDEN, DIM)
        put("up", layer, HIDDEN, DIM)
        put("down", layer, DIM, HIDDEN)
        if k_bias is not None:
            model.set("q_bias", layer, np.zeros(width, np.float32), "f32")
            model.set("k_bias", layer, np.full(kv_width, k_bias, np.float32), "f32")
            model.set("v_bias", layer, np.zeros(kv_width, np.float32), "f32")
    model.seal()
    return model


@pytest.fixture(scope="module")
def model(device: str) -> _core.Model:
    return build(device)


def logits(model: _core.Model, ids: Any, kv: _core.KV | None = None) -> np.ndarray:
    """Logits [vocab] after ids in a new session that may have been given a message."""
    session = _core.Session(model)
    if kv is not None:
        session.give(kv)
    out, mass = _core.Workspace(model).forward([session], [ids], output="logits")
    assert mass is None
    assert out is not None
    return out[0]


def read(model: _core.Model, ids: Any, **options: Any) -> _core.KV:
    session = _core.Session(model, **options)
    _core.Workspace(model).forward([session], [ids])
    return session.freeze()


# ---- ids ----


class ArrayOnly:
    """Another library's tensor, as NumPy sees it."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array([5, 6, 7])


class DLPackOnly:
    """One that NumPy does not see as an array."""

    def __init__(self) -> None:
        self.array = np.array([5, 6, 7])

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


INTEGERS = ["i1", "u1", "<i2", ">i2", "<u2", "<i4", ">i4", "<u4", "<i8", ">i8", "<u8", ">u8"]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_every_integer_dtype_gives_the_same(model: _core.Model, dtype: str) -> None:
    np.testing.assert_array_equal(
        logits(model, np.array([5, 6, 7], dtype)), logits(model, [5, 6, 7])
    )


@pytest.mark.parametrize(
    "ids", [(5, 6, 7), [np.int64(5), np.uint8(6), 7], ArrayOnly(), DLPackOnly(), range(5, 8)]
)
def test_sequences_and_foreign_arrays_give_the_same(model: _core.Model, ids: Any) -> None:
    np.testing.assert_array_equal(logits(model, ids), logits(model, [5, 6, 7]))


def test_views_equal_their_copies(model: _core.Model, tmp_path: Path) -> None:
    base = np.arange(20)
    raw = b"x" + np.arange(6, dtype=np.int64).tobytes()
    frozen = np.arange(4)
    frozen.flags.writeable = False
    np.arange(9, dtype=np.int32).tofile(tmp_path / "ids")
    views = {
        "strided": base[::2],
        "reversed": base[::-1],
        "column": base.reshape(5, 4)[:, 1],
        "broadcast": np.broadcast_to(np.int64(3), 5),
        "memory map": np.memmap(tmp_path / "ids", np.int32, "r"),
        "read-only": frozen,
        "misaligned": np.frombuffer(raw, np.int64, 6, 1),
    }
    for name, view in views.items():
        copy = np.array(view)
        np.testing.assert_array_equal(logits(model, view), logits(model, copy.tolist()), name)
        np.testing.assert_array_equal(view, copy, name)


@pytest.mark.parametrize(
    "ids",
    [
        np.array([5.0, 6.0], np.float32),
        [5.5],
        np.array([True, False]),
        [True],
        np.array([5, 6], object),
        ["5"],
        "567",
        None,
        [None],
        5,
        np.array([5 + 0j]),
    ],
)
def test_what_is_no_integer_is_a_type_error(model: _core.Model, ids: Any) -> None:
    session = _core.Session(model)
    with pytest.raises((TypeError, ValueError)) as caught:
        _core.Workspace(model).forward([session], [ids])
    if not (isinstance(ids, int) and not isinstance(ids, bool)):  # 5 has no dimension
        assert caught.type is TypeError
    assert "row 0" in str(caught.value)
    assert session.lengths == [0] * LAYERS


@pytest.mark.parametrize(
    ("ids", "place", "value"),
    [
        ([-1], 0, -1),
        ([VOCAB], 0, VOCAB),
        ([2**31 - 1], 0, 2**31 - 1),
        ([0, VOCAB - 1, VOCAB], 2, VOCAB),
        ([3, -100], 1, -100),
        ([2**32 + 5], 0, 2**32 + 5),
        (np.array([1, 2**64 - 1], np.uint64), 1, 2**64 - 1),
    ],
)
def test_ids_out_of_range_name_row_place_and_value(
    model: _core.Model, ids: Any, place: int, value: int
) -> None:
    first, second = _core.Session(model), _core.Session(model)
    workspace = _core.Workspace(model)
    with pytest.raises(
        ValueError, match=rf"row 1: id {value} at place {place} .*0 \.\. {VOCAB - 1}"
    ):
        workspace.forward([first, second], [[1], ids])
    assert first.lengths == second.lengths == [0] * LAYERS
    out, _ = workspace.forward([first], [[1, 2]], output="logits")  # still works
    assert out is not None
    np.testing.assert_array_equal(out[0], logits(model, [1, 2]))


def test_empty_input(model: _core.Model) -> None:
    workspace, session = _core.Workspace(model), _core.Session(model)
    for empty in ([], (), np.array([], np.int64), np.zeros((0, DIM), np.float32)):
        with pytest.raises(ValueError, match="row 0: no tokens"):
            workspace.forward([session], [empty])
    with pytest.raises(ValueError, match="row 1: no tokens"):
        workspace.forward([session, _core.Session(model)], [[5], []])
    out, mass = workspace.forward([], [], output="logits", mass="paper")
    assert out is not None
    assert out.shape == (0, VOCAB)
    assert mass is not None
    assert mass.shape == (0, LAYERS, HEADS)
    assert session.lengths == [0] * LAYERS


# ---- forward ----


def test_outputs_are_views_of_one_computation(model: _core.Model) -> None:
    ids, workspace = [3, 1, 4, 1, 5], _core.Workspace(model)

    def run(**options: Any) -> np.ndarray:
        out, _ = workspace.forward([_core.Session(model)], [ids], **options)
        assert out is not None
        return out

    every = run(output="logits", outputs="all")
    assert every.shape == (5, VOCAB)
    assert every.dtype == np.float32
    assert every.flags.c_contiguous
    assert every.flags.owndata
    np.testing.assert_array_equal(run(output="logits"), every[-1:])
    np.testing.assert_array_equal(run(output="logits", outputs=[[1, 3]]), every[[1, 3]])
    best = run(output="argmax", outputs="all")
    assert best.dtype == np.int32
    np.testing.assert_array_equal(best, every.argmax(-1))
    wide = every.astype(np.float64)
    shifted = wide - wide.max(-1, keepdims=True)
    expected = shifted[[0, 4], [7, 9]] - np.log(np.exp(shifted[[0, 4]]).sum(-1))
    found = run(output="logprob", outputs=[[0, 4]], targets=[[7, 9]])
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_layers_in_two_calls_equal_one(model: _core.Model) -> None:
    ids, workspace, session = [3, 1, 4], _core.Workspace(model), _core.Session(model)
    hidden, _ = workspace.forward([session], [ids], output="hidden", outputs="all", layers=(0, 2))
    assert hidden is not None
    assert hidden.shape == (3, DIM)
    assert session.lengths == [3, 3, 0, 0]
    strided = np.repeat(hidden, 2, axis=0)[::2].astype(">f4")
    out, _ = workspace.forward([session], [strided], output="logits", layers=(2, LAYERS))
    assert out is not None
    assert session.lengths == [3] * LAYERS
    np.testing.assert_array_equal(out[0], logits(model, ids))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"output": "probabilities"}, ValueError, "output must be one of none, hidden, logits"),
        ({"output": "logits", "outputs": "first"}, ValueError, "outputs must be one of last, all"),
        ({"output": "logits", "outputs": [[3]]}, ValueError, "row 0: output 3 at place 0"),
        ({"output": "logits", "outputs": [[0], [0]]}, ValueError, "outputs has 2 entries, expec"),
        ({"output": "logprob"}, ValueError, "targets go with output"),
        ({"output": "logits", "targets": [[1]]}, ValueError, "targets go with output"),
        ({"output": "logprob", "targets": [[VOCAB]]}, ValueError, "row 0: target 320 at place 0"),
        ({"output": "logprob", "targets": [[1, 2]]}, ValueError, "row 0: 2 targets for 1 output"),
        ({"layers": (0, 5)}, ValueError, r"layers\[1\] must be in 0 .. 4, not 5"),
        ({"layers": (2, 2)}, ValueError, "layers"),
        ({"layers": (True, 2)}, TypeError, r"layers\[0\] must be an integer, not bool"),
        ({"layers": 3}, TypeError, "layers must be a sequence, not int"),
        ({"mass": "all"}, ValueError, "mass must be one of paper, published"),
        ({"mass": "paper", "mass_skip": -1}, ValueError, "mass_skip must not be negative"),
        ({"slack": [[0, 0]]}, ValueError, "row 0: slack has 2 entries, expected 4"),
        ({"slack": [[0, 0, -1, 0]]}, ValueError, "row 0: slack -1 at place 2"),
        ({"nonsense": 1}, TypeError, "nonsense"),
    ],
)
def test_forward_refuses(
    model: _core.Model, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    session = _core.Session(model)
    with pytest.raises(kind, match=message):
        _core.Workspace(model).forward([session], [[1, 2, 3]], **options)
    assert session.lengths == [0] * LAYERS


def test_sessions_are_checked(model: _core.Model, device: str) -> None:
    workspace, session = _core.Workspace(model), _core.Session(model)
    with pytest.raises(ValueError, match="row 1: the session stands in row 0 already"):
        workspace.forward([session, session], [[1], [2]])
    with pytest.raises(ValueError, match="tokens has 2 entries, expected 1"):
        workspace.forward([session], [[1], [2]])
    with pytest.raises(TypeError, match="an entry of sessions must be a Session, not str"):
        workspace.forward(["x"], [[1]])  # type: ignore[list-item]
    with pytest.raises(MismatchError, match="row 0"):
        workspace.forward([_core.Session(build(device, seed=1))], [[1]])
    with pytest.raises(ValueError, match="row 0: hidden states have 5 columns, expected 32"):
        workspace.forward([session], [np.zeros((2, 5), np.float32)])
    workspace.forward([session], [[1]])  # nothing stayed claimed
    assert session.lengths == [1] * LAYERS


def test_counts(model: _core.Model) -> None:
    workspace = _core.Workspace(model)
    assert workspace.counts == {"tokens": 0, "linear_flops": 0.0, "attention_flops": 0.0}
    workspace.forward([_core.Session(model)], [[1, 2, 3]])
    assert workspace.counts["tokens"] == 3


# ---- messages ----


def test_views_are_zero_copy_read_only_and_keep_the_kv(model: _core.Model) -> None:
    kv = read(model, [5, 6, 7])
    ((k, v, position, offset),) = kv.parts(1)
    assert k.shape == v.shape == (KV_HEADS, 3, HEAD_DIM)
    assert k.dtype == np.float32
    assert (position, offset) == (0, 0)
    again = kv.parts(1)[0][0]
    assert np.shares_memory(k, again)
    assert np.shares_memory(k, kv.select([1]).parts(1)[0][0])
    for array in (k, v):
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0, 0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
    before = k.copy()
    del kv, again
    gc.collect()
    [read(model, [9, 9, 9]) for _ in range(20)]  # would reuse the memory if it were free
    np.testing.assert_array_equal(k, before)


def test_arrays_round_trip(model: _core.Model, device: str) -> None:
    kv = read(model, [5, 6, 7, 8])
    layers = {layer: kv.parts(layer) for layer in (0, 2)}
    made = _core.KV.from_arrays(
        layers,
        n_layers=LAYERS,
        n_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype="f32",
        next_position=4,
        device=device,
    )
    assert made.lengths == [4, 0, 4, 0]
    assert (made.n_layers, made.n_kv_heads, made.head_dim) == (LAYERS, KV_HEADS, HEAD_DIM)
    assert (made.dtype, made.device, made.next_position) == ("f32", device, 4)
    assert made.nbytes == 2 * 2 * 4 * KV_HEADS * HEAD_DIM * 4
    for ours, theirs in zip(made.parts(2)[0][:2], kv.parts(2)[0][:2], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not np.shares_memory(made.parts(2)[0][0], kv.parts(2)[0][0])
    np.testing.assert_array_equal(
        logits(model, [1, 2], made), logits(model, [1, 2], kv.select([0, 2]))
    )


def from_parts(device: str, parts: Any, dtype: Any = "f32", layer: Any = 0) -> _core.KV:
    return _core.KV.from_arrays(
        {layer: parts},
        n_layers=LAYERS,
        n_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=dtype,
        next_position=9,
        device=device,
    )


def test_arrays_of_any_order_and_endianness(device: str) -> None:
    k = np.arange(KV_HEADS * 3 * HEAD_DIM, dtype=np.float32).reshape(KV_HEADS, 3, HEAD_DIM)
    raw = np.frombuffer(b"x" + k.tobytes(), np.float32, k.size, 1).reshape(k.shape)
    for name, array in {
        "big-endian": k.astype(">f4"),
        "transposed": np.ascontiguousarray(k.transpose(2, 1, 0)).transpose(2, 1, 0),
        "misaligned": raw,
    }.items():
        kv = from_parts(device, [(array, array[:, ::-1], 2, 5)])
        found, reverse, position, offset = kv.parts(0)[0]
        np.testing.assert_array_equal(found, k, name)
        np.testing.assert_array_equal(reverse, k[:, ::-1], name)
        assert (position, offset) == (2, 5)
    half = from_parts(device, [(k.astype(">f2"), k.astype("<f2"), 0, 0)], "f16").parts(0)[0]
    np.testing.assert_array_equal(half[0], half[1])
    assert half[0].dtype == np.float16


GOOD_PART = np.zeros((KV_HEADS, 3, HEAD_DIM), np.float32)


@pytest.mark.parametrize(
    ("part", "kind", "message"),
    [
        ((GOOD_PART[:1], GOOD_PART, 0, 0), ValueError, r"k of layer 0, part 0 is \[1, 3, 8\]"),
        ((GOOD_PART, GOOD_PART[:, :2], 0, 0), ValueError, r"v of layer 0, part 0 is \[2, 2, 8\]"),
        ((GOOD_PART, GOOD_PART.astype("f8"), 0, 0), TypeError, "v of .* float64, expected float32"),
        ((GOOD_PART[0], GOOD_PART, 0, 0), ValueError, "k of .* has 2 dimensions, expected 3"),
        ((GOOD_PART, GOOD_PART, 0), ValueError, "a part has 3 entries, expected 4"),
        ((GOOD_PART, GOOD_PART, 0.5, 0), TypeError, "integer"),
        (7, TypeError, "a part must be a sequence, not int"),
    ],
)
def test_bad_parts(device: str, part: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        from_parts(device, [part])


def test_bad_layers_of_arrays(device: str) -> None:
    with pytest.raises(ValueError, match="4"):
        from_parts(device, [], layer=4)
    with pytest.raises(TypeError, match="not str"):
        from_parts(device, [], layer="0")
    with pytest.raises(ValueError, match='dtype must be one of f32, f16, bf16, not "f64"'):
        from_parts(device, [], dtype="f64")
    with pytest.raises(TypeError, match="cannot create"):
        _core.KV()


@pytest.mark.parametrize("layers", [[3, 1], [1, 1, 3], np.array([1, 3]), {1, 3}, (3, 1, 3)])
def test_layer_lists_are_sets(model: _core.Model, layers: Any) -> None:
    kv = read(model, [5, 6])
    assert kv.select(layers).lengths == [0, 2, 0, 2]
    np.testing.assert_array_equal(
        logits(model, [1], kv.select(layers)), logits(model, [1], kv.select([1, 3]))
    )


def test_layer_lists_are_checked(model: _core.Model) -> None:
    kv = read(model, [5, 6])
    assert kv.select([]).lengths == [0] * LAYERS
    assert kv.select([2], sink=True).lengths == [1, 1, 2, 1]
    for bad in ([-1], [LAYERS], [0, 2**70]):
        with pytest.raises(ValueError, match=r"layers must be in 0 \.\. 3, not"):
            kv.select(bad)
    mask = np.array([True, False, True, False])
    for wrong in (True, [True], mask, [1.0], "13", 1, None):
        with pytest.raises(TypeError, match="layers must be"):
            kv.select(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layer must be in"):
        kv.parts(LAYERS)


def test_concat_and_trim(model: _core.Model) -> None:
    a, b = read(model, [1, 2, 3]), read(model, [4, 5])
    joined = _core.KV.concat([a, b], sequential=True, whole=[0, 1])
    assert joined.lengths == [5, 5, 3, 3]
    assert joined.next_position == 5
    assert [part[2:] for part in joined.parts(0)] == [(0, 0), (0, 3)]
    trimmed = joined.trim([True, False, False, False], 4)
    assert trimmed.lengths == [3, 5, 3, 3]
    with pytest.raises(TypeError, match="an entry of kvs must be a KV, not int"):
        _core.KV.concat([a, 3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="no KV"):
        _core.KV.concat([])
    with pytest.raises(ValueError, match="windowed has 1 entries, expected 4"):
        a.trim([True], 4)


def test_layer_map(model: _core.Model) -> None:
    kv = read(model, [1, 2, 3])
    session = _core.Session(model)
    with pytest.raises(ValueError, match="layer_map has 2 entries, the KV has 4 layers"):
        session.give(kv, [0, 1])
    with pytest.raises(ValueError, match="receiver layer 4 at place 3"):
        session.give(kv, [0, 1, 2, 4])
    with pytest.raises(MismatchError, match="2"):
        session.give(kv, [0, 1, 2, 2])
    session.give(kv.select([0, 1]), np.array([3, 2, 1, 0]))
    assert session.given == [0, 0, 3, 3]


# ---- dtypes by value ----


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_a_16_bit_message_is_read_by_value(model: _core.Model, device: str, dtype: Any) -> None:
    kv = read(model, [5, 6, 7], kv_dtype=dtype)
    assert kv.dtype == dtype

    def widen(array: np.ndarray) -> np.ndarray:
        if dtype == "f16":
            return array.astype(np.float32)
        return (array.astype(np.uint32) << 16).view(np.float32)

    wide = _core.KV.from_arrays(
        {
            layer: [(widen(k), widen(v), at, offset) for k, v, at, offset in kv.parts(layer)]
            for layer in range(LAYERS)
        },
        n_layers=LAYERS,
        n_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype="f32",
        next_position=3,
        device=device,
    )
    np.testing.assert_allclose(
        wide.parts(0)[0][0], read(model, [5, 6, 7]).parts(0)[0][0], rtol=0.01
    )
    np.testing.assert_allclose(
        logits(model, [1, 2], kv), logits(model, [1, 2], wide), rtol=1e-5, atol=1e-5
    )


def test_keys_above_the_range_of_f16_are_refused_there_only(device: str) -> None:
    large = build(device, k_bias=1e5)
    for dtype in ("f32", "bf16"):
        assert np.isfinite(read(large, [1, 2], kv_dtype=dtype).parts(0)[0][0].astype("f4")).all()
    session = _core.Session(large, kv_dtype="f16")
    with pytest.raises(NumericError):
        _core.Workspace(large).forward([session], [[1, 2]])
    assert session.lengths == [0] * LAYERS


# ---- the model ----


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
    with pytest.raises(ValueError, match="has 3 dimensions, expected 1 or more"):
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


# ---- threads, signals, memory ----


def test_bits_do_not_depend_on_threads_or_company(model: _core.Model) -> None:
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, VOCAB, n) for n in (1, 30, 7, 64)]
    alone = [logits(model, ids) for ids in rows]
    try:
        for n in (1, 2, 3, 7):
            _core.set_num_threads(n)
            sessions = [_core.Session(model) for _ in rows]
            out, _ = _core.Workspace(model).forward(sessions, rows, output="logits")
            np.testing.assert_array_equal(out, alone)
    finally:
        _core.set_num_threads(0)


def test_many_python_threads(model: _core.Model) -> None:
    expected = logits(model, [1, 2, 3])
    wrong: list[Any] = []

    def work() -> None:
        try:
            if not np.array_equal(logits(model, [1, 2, 3]), expected):
                wrong.append("other bits")
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.fixture(scope="module")
def long_ids() -> np.ndarray:
    """A prompt whose prefill takes seconds."""
    return np.arange(60_000) % VOCAB


def in_background(call: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_what_is_in_use_is_refused(model: _core.Model) -> None:
    session, workspace, other = _core.Session(model), _core.Workspace(model), _core.Workspace(model)
    thread = in_background(lambda: workspace.forward([session], [np.arange(8000) % VOCAB]))
    started = time.monotonic()
    while time.monotonic() - started < 10:
        try:
            _ = session.lengths
        except ValueError:
            break
    calls: dict[str, Callable[[], Any]] = {
        "the session is in use": session.freeze,
        "the session is in use by": lambda: other.forward([session], [[1]]),
        "the workspace is in use": lambda: workspace.forward([_core.Session(model)], [[1]]),
        "the workspace is in use by another thread": lambda: workspace.counts,
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()
    assert thread.is_alive()
    thread.join()
    assert session.lengths == [8000] * LAYERS
    other.forward([session], [[1]])


def test_ctrl_c(model: _core.Model, long_ids: np.ndarray) -> None:
    workspace, session = _core.Workspace(model), _core.Session(model)
    workspace.forward([session], [[5, 6]])
    sent: list[float] = []

    def interrupt() -> None:
        time.sleep(0.3)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    in_background(interrupt)
    with pytest.raises(KeyboardInterrupt):
        workspace.forward([session], [long_ids])
    assert time.monotonic() - sent[0] < 1.0
    assert session.lengths == [2] * LAYERS
    out, _ = workspace.forward([session], [[7]], output="logits")
    assert out is not None
    fresh = _core.Session(model)
    workspace.forward([fresh], [[5, 6]])
    expected, _ = workspace.forward([fresh], [[7]], output="logits")
    np.testing.assert_array_equal(out, expected)


def test_an_exception_of_a_signal_handler_comes_through(
    model: _core.Model, long_ids: np.ndarray
) -> None:
    class Enough(Exception):
        pass

    def handler(number: int, frame: Any) -> None:
        raise Enough

    old = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Enough):
            _core.Workspace(model).forward([_core.Session(model)], [long_ids])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def test_huge_requests_are_memory_errors(model: _core.Model) -> None:
    session = _core.Session(model)
    for n in (2**40, 2**62, 2**63 - 1):
        with pytest.raises(MemoryError, match=r"\d"):
            session.reserve(n)
    workspace = _core.Workspace(model)
    workspace.forward([session], [[1]])
    assert session.lengths == [1] * LAYERS


TIGHT = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from test_core import VOCAB, _core, build
model = build(sys.argv[2], vocab_size=5000)
workspace, session = _core.Workspace(model), _core.Session(model)
workspace.forward([session], [[1, 2]])
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 100_000_000,) * 2)
try:
    workspace.forward([session], [np.arange(30_000) % VOCAB], output="logits", outputs="all")
except MemoryError as error:
    print(error)
print(session.lengths, workspace.forward([session], [[3]], output="argmax")[0].shape)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_logits_that_do_not_fit(device: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", TIGHT, str(Path(__file__).parent), device],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "out of memory: logits [30000, 5000] of 4 bytes each",
        "[2, 2, 2, 2] (1,)",
    ]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_leaks(model: _core.Model, device: str) -> None:
    ids, mask = np.array([1, 2, 3]), [True, False, True, False]
    part = np.zeros((KV_HEADS, 3, HEAD_DIM), np.float32)
    kv = read(model, ids)
    row = np.zeros(VOCAB, np.float32)
    mass = np.arange(LAYERS, dtype=np.float64)
    workspace, used = _core.Workspace(model), _core.Session(model)
    workspace.forward([used], [ids])
    settings = config(windowed=mask, window=3, rope_of_layer=[0] * LAYERS)

    def run(**options: Any) -> Any:
        return workspace.forward([_core.Session(model)], [ids], **options)

    calls: list[Callable[[], Any]] = [
        lambda: run(output="logits", outputs="all", mass="paper"),
        lambda: run(output="logprob", outputs=[[0, 2]], targets=[[1, 2]], slack=[[0] * LAYERS]),
        lambda: run(output="logprob", outputs=[[0, 2]], targets=[[1]]),
        lambda: run(output="logits", outputs=[[5]]),
        lambda: workspace.forward([used, used], [[1], [2]]),
        lambda: workspace.forward([used], [[VOCAB]]),
        lambda: workspace.forward([used], [[1.5]]),
        lambda: workspace.forward([used], [np.zeros((2, 3), np.float32)]),
        lambda: workspace.forward([1], [[1]]),  # type: ignore[list-item]
        lambda: workspace.forward([used], [[1]], nonsense=1),  # type: ignore[call-arg]
        lambda: _core.Session(model).give(kv, [3, 2, 1, 0]),
        lambda: used.give(kv),
        lambda: _core.Session(model).give(kv, [3, 2]),
        lambda: used.freeze().parts(1),
        lambda: kv.select([1, 3], sink=True).trim(mask, 2).lengths,
        lambda: kv.select([9]),
        lambda: kv.select([True]),
        lambda: _core.KV.concat([kv, kv], sequential=True, whole=[1]),
        lambda: _core.KV.concat([kv, 1]),  # type: ignore[list-item]
        lambda: from_parts(device, [(part, part, 0, 0)] * 2),
        lambda: from_parts(device, [(part, part, 0, 0), (part, part[:1], 0, 0)]),
        lambda: _core.Model(settings, device=device).config,
        lambda: _core.Model(settings | {"x": 1}),
        lambda: _core.Model(settings | {"windowed": [1]}),
        lambda: _core.Model(settings, device=device).set("q", 0, row, "f32"),
        lambda: model.inv_freq(),
        lambda: _core.Sampler(temperature=1.0, seed=3).sample(row),
        lambda: _core.Sampler().sample(row[:0]),
        lambda: _core.rank(_core.score(mass, alpha=0.5, mu=1.0)),
        lambda: _core.score(mass, alpha=7.0),
        lambda: _core.devices(),
        lambda: (workspace.counts, used.lengths, used.given, used.next_position, kv.nbytes),
    ]

    def round_of_calls() -> None:
        for call in calls:
            with contextlib.suppress(ValueError, TypeError, ArithmeticError):
                call()

    watched = [model, kv, used, workspace, ids, part, mass, row, np.dtype(np.float32), TypeError]
    for _ in range(30):
        round_of_calls()
    gc.collect()
    counts, memory = [sys.getrefcount(thing) for thing in watched], resident()
    for _ in range(300):
        round_of_calls()
    gc.collect()
    after = [sys.getrefcount(thing) for thing in watched]
    assert all(b - a <= 2 for a, b in zip(counts, after, strict=True)), (counts, after)
    assert resident() - memory < 3_000_000


def test_includes() -> None:
    assert check_includes.faults() == []
