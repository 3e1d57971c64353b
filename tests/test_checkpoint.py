"""Checkpoints against configurations: what each tensor becomes, and what does not fit."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fixtures
import numpy as np
import pytest
from fixtures import ABSENT, build, write_folder, write_model

from kvcomm.checkpoint import Plan, match
from kvcomm.config import read_config
from kvcomm.errors import FormatError, MismatchError, UnsupportedError
from kvcomm.weights import open_weights

SINGLE = "model.safetensors"
Header = dict[str, Any]


def plan_of(folder: Path) -> Plan:
    with open_weights(folder) as weights:
        return match(weights, read_config(folder))


def entry(dtype: str, shape: list[int], begin: int, end: int) -> Header:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def edit(tmp_path: Path) -> Callable[..., Path]:
    """edit(change): tiny-llama with change(header, data) -> (header, data) done to its file."""
    folder = write_model(tmp_path / "llama", "llama")
    content = (folder / SINGLE).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")

    def edited(change: Callable[[Header, bytes], tuple[Header, bytes]]) -> Path:
        header, data = change(json.loads(content[8:end]), content[end:])
        text = json.dumps(header).encode()
        (folder / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + data)
        return folder

    return edited


def renamed(tmp_path: Path, family: str, rename: Callable[[str], str], **changes: Any) -> Path:
    config, weights = build(family, **changes)
    return write_folder(tmp_path, config, {rename(n): w for n, w in weights.items()})


@pytest.mark.parametrize("family", fixtures.FAMILIES)
def test_every_tensor_finds_its_place(tmp_path: Path, family: str) -> None:
    config, weights = build(family)
    plan = plan_of(write_folder(tmp_path, config, weights))
    assert sorted(item.tensor.name for item in plan.items) == sorted(weights)
    assert plan.unused == ()
    assert plan.tied == config["tie_word_embeddings"]
    places = {(item.weight, item.layer): item.tensor.name for item in plan.items}
    assert len(places) == len(plan.items)
    assert places["down", 2] == "model.layers.2.mlp.down_proj.weight"
    gemma = family == "gemma3"
    mlp_norm = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
    assert places["mlp_norm", 1] == f"model.layers.1.{mlp_norm}.weight"
    assert (("post_attn_norm", 0) in places) == gemma
    assert (("q_bias", 0) in places) == (family == "qwen2")


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.removeprefix("model."),
        lambda name: f"language_model.{name}",
        lambda name: f"model.language_model.{name}",
        lambda name: name.replace("model.", "model.language_model.", 1),
    ],
)
def test_known_prefixes(tmp_path: Path, rename: Callable[[str], str]) -> None:  # ST-020
    plan = plan_of(renamed(tmp_path, "llama", rename))
    original = {item.tensor.name for item in plan.items}
    assert original == {rename(name) for name in build("llama")[1]}
    assert len(original) == 39


def test_unknown_prefix(tmp_path: Path) -> None:  # ST-020
    folder = renamed(tmp_path, "llama", lambda name: f"transformer.{name}")
    message = r"missing model\.embed_tokens\.weight, .* more; not known: transformer\.lm_head"
    with pytest.raises(FormatError, match=message):
        plan_of(folder)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    config, weights = build("llama")
    del weights["model.layers.2.mlp.up_proj.weight"]
    with pytest.raises(FormatError, match=r"missing model\.layers\.2\.mlp\.up_proj\.weight$"):
        plan_of(write_folder(tmp_path, config, weights))


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("gemma3", {"tie_word_embeddings": ABSENT}),
        ("llama", {"tie_word_embeddings": ABSENT, "text_config": {"tie_word_embeddings": True}}),
    ],
)
def test_tied_without_a_head(tmp_path: Path, family: str, flags: Any) -> None:  # ST-017
    config, weights = build(family, **flags)
    weights.pop("lm_head.weight", None)
    plan = plan_of(write_folder(tmp_path, config, weights))
    assert plan.tied
    assert all(item.weight != "head" for item in plan.items)


def test_untied_without_a_head(tmp_path: Path) -> None:  # ST-019
    config, weights = build("llama")
    del weights["lm_head.weight"]
    message = r"missing lm_head\.weight \(tie_word_embeddings is false\)"
    with pytest.raises(FormatError, match=message):
        plan_of(write_folder(tmp_path, config, weights))


def test_tied_with_a_head(tmp_path: Path) -> None:
    config, weights = build("llama", tie_word_embeddings=True)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    plan = plan_of(write_folder(tmp_path / "equal", config, weights))
    assert plan.tied
    assert plan.unused == ("lm_head.weight",)
    weights["lm_head.weight"][0, 0] += 1
    with pytest.warns(UserWarning, match=r"lm_head\.weight differs from the embedding"):
        plan = plan_of(write_folder(tmp_path / "other", config, weights))
    assert not plan.tied


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("model.layers.0.mlp.up_proj.weight_scale_inv", "F32"),
        ("model.layers.0.mlp.up_proj.qweight", "I32"),
        ("model.layers.0.mlp.up_proj.g_idx", "I32"),
        ("model.layers.0.mlp.up_proj.SCB", "F32"),
        ("model.layers.0.mlp.up_proj.weight.absmax", "U8"),
        ("model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4", "U8"),
        ("model.layers.0.mlp.up_proj.weight2", "F8_E4M3"),
    ],
)
def test_quantised_names(edit: Callable[..., Path], name: str, dtype: str) -> None:  # ST-021
    size = 1 if dtype in ("U8", "F8_E4M3") else 4
    folder = edit(
        lambda header, data: (
            header | {name: entry(dtype, [1], len(data), len(data) + size)},
            data + bytes(size),
        )
    )
    with pytest.raises(UnsupportedError, match=f"quantised checkpoint not supported: {name}"):
        plan_of(folder)


def test_fp8_weights_without_scales(edit: Callable[..., Path]) -> None:  # ST-021
    name = "lm_head.weight"

    def change(header: Header, data: bytes) -> tuple[Header, bytes]:
        begin = header[name]["data_offsets"][0]
        size = 320 * 64
        return header | {name: entry("F8_E4M3", [320, 64], begin, begin + size)}, data[
            : begin + size
        ]

    with pytest.raises(UnsupportedError, match=r"quantised .*lm_head\.weight .F8_E4M3"):
        plan_of(edit(change))


def test_integer_weights(edit: Callable[..., Path]) -> None:
    folder = edit(
        lambda header, data: (
            header | {"lm_head.weight": header["lm_head.weight"] | {"dtype": "I32"}},
            data,
        )
    )
    with pytest.raises(UnsupportedError, match=r"lm_head\.weight: I32; supported: F32, F16, BF16"):
        plan_of(folder)


@pytest.mark.parametrize(
    ("family", "stored", "stated", "message"),
    [
        ("llama", {"num_key_value_heads": 2}, {"num_key_value_heads": ABSENT}, "k_proj"),
        ("llama", {"num_key_value_heads": 4}, {"num_key_value_heads": 2}, "k_proj"),
        ("qwen3", {"head_dim": 32}, {"head_dim": ABSENT}, "q_proj"),
        ("llama", {"vocab_size": 320}, {"vocab_size": 300}, "embed_tokens"),
        ("llama", {"intermediate_size": 128}, {"intermediate_size": 96}, "proj"),
    ],
)
def test_shapes_against_the_configuration(
    tmp_path: Path, family: str, stored: Any, stated: Any, message: str
) -> None:  # CF-042, CF-043
    _, weights = build(family, **stored)
    folder = write_folder(tmp_path, fixtures.config_of(family, **stated), weights)
    with pytest.raises(MismatchError, match=rf"{message}.*\.weight: shape \[.*expected \["):
        plan_of(folder)


def test_biases_against_the_flags(tmp_path: Path) -> None:  # CF-049
    both = {"attention_bias": True, "mlp_bias": True}
    config, weights = build("llama", **both)
    plan = plan_of(write_folder(tmp_path / "both", config, weights))
    assert {i.weight for i in plan.items if i.weight.endswith("_bias")} == {
        "q_bias", "k_bias", "v_bias", "o_bias", "gate_bias", "up_bias", "down_bias",
    }  # fmt: skip
    for flag, name in (("attention_bias", "self_attn.k_proj"), ("mlp_bias", "mlp.down_proj")):
        against = write_folder(tmp_path / flag, config | {flag: False}, weights)
        with pytest.raises(MismatchError, match=rf"layers\.0\.{name}\.bias has no place"):
            plan_of(against)
    without = write_folder(tmp_path / "without", config, build("llama")[1])
    with pytest.raises(FormatError, match=r"missing model\.layers\.0\.self_attn\.q_proj\.bias"):
        plan_of(without)


def test_layers_and_norms_that_would_be_dropped(tmp_path: Path) -> None:
    _, weights = build("qwen3")
    config = fixtures.config_of("qwen3", num_hidden_layers=3)
    with pytest.raises(MismatchError, match=r"layers\.3\..* qwen3 .*3 layers"):
        plan_of(write_folder(tmp_path / "deep", config, weights))
    as_llama = fixtures.config_of("llama", head_dim=32)
    with pytest.raises(MismatchError, match=r"layers\.0\.self_attn\.k_norm\.weight has no place"):
        plan_of(write_folder(tmp_path / "norms", as_llama, weights))


def test_harmless_extras_are_listed(tmp_path: Path) -> None:
    config, weights = build("llama")
    extras = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
        "vision_tower.embed.weight": np.ones((2, 2), np.float32),
    }
    plan = plan_of(write_folder(tmp_path, config, weights | extras))
    assert plan.unused == tuple(sorted(extras))


@pytest.mark.parametrize(
    ("copied", "copy"),
    [
        ("model.norm.weight", "norm.weight"),
        ("model.norm.weight", "language_model.model.norm.weight"),
        ("model.layers.1.mlp.up_proj.weight", "model.language_model.layers.1.mlp.up_proj.weight"),
        ("lm_head.weight", "language_model.lm_head.weight"),
    ],
)
def test_a_weight_under_two_prefixes_is_refused(tmp_path: Path, copied: str, copy: str) -> None:
    config, weights = build("llama")
    weights[copy] = weights[copied] + 1
    with pytest.raises(FormatError) as caught:
        plan_of(write_folder(tmp_path, config, weights))
    assert f"{copied} and {copy} are the same weight" in str(caught.value)
