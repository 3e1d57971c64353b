"""GGUF files to Hugging Face folders: a tiny model of every family, there and back.

A tiny GGUF file is written from the weights of fixtures.py with the permutation and the added
one that such files have; the folder made from it must hold the first weights again, to the bit
where the stored type is exact, and its configuration must mean the same.
"""

import json
import math
import multiprocessing
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fixtures
import gguf
import numpy as np
import pytest
from safetensors import safe_open

from kvcomm import convert
from kvcomm.config import read_config
from kvcomm.errors import FormatError, NumericError, UnsupportedError
from kvcomm.tokenizer import Tokenizer

ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}
NAMES = (
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("model.layers.", "blk."),
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
)
BF16_PATTERNS = {0x3F808000: 0x3F80, 0x3F818000: 0x3F82, 0x3F808001: 0x3F81, 0x3F80FFFF: 0x3F81}


def gguf_tensors(config: Mapping[str, Any], weights: fixtures.Weights) -> fixtures.Weights:
    """The tensors as a GGUF file has them."""
    gemma = config["model_type"] == "gemma3_text"
    tensors = {}
    for name, values in weights.items():
        # The same name means another norm where there are four of them.
        after = "post_attention_norm" if gemma else "ffn_norm"
        theirs = name.replace("post_attention_layernorm", after)
        for ours, other in NAMES:
            theirs = theirs.replace(ours, other)
        kind = next((k for k in ("q_proj", "k_proj") if k in name), None)
        if kind and config["model_type"] in ("llama", "mistral"):
            key = "num_attention_heads" if kind == "q_proj" else "num_key_value_heads"
            # Dimensions i and i + half of a head lie next to each other in the file.
            heads = np.split(values, config[key])
            half = len(heads[0]) // 2
            values = np.stack(
                [row for head in heads for i in range(half) for row in (head[i], head[i + half])]
            ).reshape(values.shape)
        tensors[theirs] = values + np.float32(1) if gemma and "norm" in theirs else values
    return tensors


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    weights: fixtures.Weights,
    *,
    types: Mapping[str, Any] | None = None,
    fields: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
) -> Path:
    """Write a GGUF file. `types`: tensor -> type to quantise it to; `fields` and `tensors`
    change what is written, None leaves it out."""
    arch = ARCHITECTURES.get(config["model_type"], config["model_type"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    model = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
        "rope.dimension_count": head_dim,
    }
    if config["model_type"] in ("mistral", "gemma3_text"):
        model["attention.sliding_window"] = config["sliding_window"]
    tokens = list(fixtures.tokenizer_json()["model"]["vocab"])
    tokens += [text for text, _ in fixtures.ADDED_TOKENS.values()]
    tokens += [f"[PAD{i}]" for i in range(len(tokens), config["vocab_size"])]
    kinds = [3 if special else 4 for _, special in fixtures.ADDED_TOKENS.values()]
    tokenizer = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [1] * 292 + kinds + [5] * (config["vocab_size"] - 300),
        "merges": [" ".join(pair) for pair in fixtures.MERGES],
        "bos_token_id": fixtures.BOS,
        "eos_token_id": fixtures.TURN_END,
    }
    content = {
        **{f"{arch}.{k}": v for k, v in model.items()},
        **{f"tokenizer.ggml.{k}": v for k, v in tokenizer.items()},
        "tokenizer.chat_template": fixtures.CHAT_TEMPLATE,
        **(fields or {}),
    }
    writer = gguf.GGUFWriter(path, content.pop("general.architecture", arch))
    for name, value in content.items():
        if value is None:
            continue
        kind = {str: "string", bool: "bool", int: "uint32", float: "float32", list: "array"}
        getattr(writer, f"add_{kind[type(value)]}")(name, value)
    for name, values in {**gguf_tensors(config, weights), **(tensors or {})}.items():
        if values is None:
            continue
        if types and name in types:
            raw = gguf.quantize(values, types[name])
            writer.add_tensor(name, raw, raw_dtype=types[name])
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_tensors(folder: Path) -> fixtures.Weights:
    with safe_open(folder / "model.safetensors", "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
    "yarn": {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
    },
    "gemma3": {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0},
}


def llama3_table(head_dim: int, theta: float, factor: float, original: int) -> np.ndarray:
    """Divisors of the frequencies, one band at a time: kept, divided, in between."""
    table = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        if wavelength < original / 4.0:
            table.append(1.0)
        elif wavelength > original / 1.0:
            table.append(factor)
        else:
            smooth = (original / wavelength - 1.0) / (4.0 - 1.0)
            table.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return np.array(table, np.float32)


@pytest.mark.parametrize("family", fixtures.FAMILIES)
def test_every_family_there_and_back(tmp_path: Path, family: str) -> None:
    changes = {"query_pre_attn_scalar": 16} if family == "gemma3" else {}
    config, weights = fixtures.build(family, **changes)
    tensors = {}
    if family == "llama3":
        tensors["rope_freqs.weight"] = llama3_table(64, 500000.0, 8.0, 8192)
    path = write_gguf(
        tmp_path / "m.gguf", config, weights, fields=ROPES.get(family), tensors=tensors
    )
    folder = convert.convert(path, tmp_path / "out")
    found = read_tensors(folder)
    assert set(found) == set(weights)
    for name, values in weights.items():
        assert found[name].dtype == np.float32
        if family == "gemma3" and "norm" in name:
            # The one that the file adds costs the last bits.
            np.testing.assert_allclose(found[name], values, rtol=0, atol=1.2e-7)
        else:
            assert found[name].tobytes() == values.tobytes(), name
    original = fixtures.write_model(tmp_path / "first", family, **changes)
    assert read_config(folder).core == read_config(original).core
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "kvcomm.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_folder_of_a_qwen3(tmp_path: Path) -> None:
    config, weights = fixtures.build("qwen3")
    path = write_gguf(tmp_path / "m.gguf", config, weights)
    folder = convert.convert(path, tmp_path / "deep" / "out")
    stored = {p.stem: json.loads(p.read_text()) for p in folder.glob("*.json")}
    assert stored["config"]["architectures"] == ["Qwen3ForCausalLM"]
    assert stored["config"]["head_dim"] == 32
    assert stored["config"]["rms_norm_eps"] == 1e-6
    assert stored["config"]["tie_word_embeddings"] is False
    assert stored["generation_config"]["eos_token_id"] == fixtures.TURN_END
    assert stored["tokenizer_config"]["clean_up_tokenization_spaces"] is False
    assert stored["tokenizer_config"]["chat_template"] == fixtures.CHAT_TEMPLATE
    assert stored["kvcomm"]["converter_version"] == convert.CONVERTER_VERSION
    assert len(stored["kvcomm"]["source_sha256"]) == 64
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.stop_ids == (fixtures.TURN_END,)
    assert (len(tokenizer), config["vocab_size"]) == (300, 320)
    ids = tokenizer.chat([{"role": "user", "content": "hq"}], add_generation_prompt=False)
    assert ids[0] == fixtures.TURN_START
    assert ids[-2:] == [fixtures.TURN_END, ord("\n")]


def test_ends_of_a_turn_join_the_eos(tmp_path: Path) -> None:
    config, weights = fixtures.build("qwen2")
    tokens = list(fixtures.tokenizer_json()["model"]["vocab"])
    tokens += [text for text, _ in fixtures.ADDED_TOKENS.values()]
    tokens[299] = "<|endoftext|>"
    tokens += [f"[PAD{i}]" for i in range(300, 320)]
    fields = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eot_token_id": fixtures.EOS}
    path = write_gguf(tmp_path / "m.gguf", config, weights, fields=fields)
    folder = convert.convert(path, tmp_path / "out")
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [fixtures.TURN_END, fixtures.EOS, 299]
    assert Tokenizer.load(folder).stop_ids == (fixtures.EOS, fixtures.TURN_END, 299)


def test_biases_of_a_llama(tmp_path: Path) -> None:
    config, weights = fixtures.build("llama", attention_bias=True, mlp_bias=True)
    path = write_gguf(tmp_path / "m.gguf", config, weights)
    folder = convert.convert(path, tmp_path / "out")
    found = read_tensors(folder)
    assert set(found) == set(weights)
    assert all(found[name].tobytes() == weights[name].tobytes() for name in weights)
    stored = json.loads((folder / "config.json").read_text())
    assert (stored["attention_bias"], stored["mlp_bias"]) == (True, True)


def test_tied_head(tmp_path: Path) -> None:
    config, weights = fixtures.build("llama", tie_word_embeddings=True)
    path = write_gguf(tmp_path / "m.gguf", config, weights)
    folder = convert.convert(path, tmp_path / "out")
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in read_tensors(folder)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_rounding(tmp_path: Path, dtype: str) -> None:
    config, weights = fixtures.build("llama", num_hidden_layers=1)
    ties = np.array(list(BF16_PATTERNS), np.uint32).view(np.float32)
    weights["model.norm.weight"][: len(ties)] = ties
    path = write_gguf(tmp_path / "m.gguf", config, weights)
    raw = (convert.convert(path, tmp_path / "out", dtype) / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    bits = {}
    for name in weights:
        start, end = (8 + length + n for n in header[name]["data_offsets"])
        assert header[name]["dtype"] == dtype.upper()
        bits[name] = np.frombuffer(raw[start:end], np.uint16)
    for name, values in weights.items():
        expected = values.astype(np.float16).view(np.uint16)
        if dtype == "bf16":
            expected = fixtures.bf16_bits(values)
        assert np.array_equal(bits[name], expected.reshape(-1)), name
    if dtype == "bf16":
        assert bits["model.norm.weight"][: len(ties)].tolist() == list(BF16_PATTERNS.values())


def test_f16_overflow_is_refused(tmp_path: Path) -> None:
    config, weights = fixtures.build("llama", num_hidden_layers=1)
    weights["lm_head.weight"][3, 3] = 7e4
    path = write_gguf(tmp_path / "m.gguf", config, weights)
    with pytest.raises(NumericError, match=r"m\.gguf: tensor output\.weight: 70000 is too large"):
        convert.convert(path, tmp_path / "out", "f16")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def quantised_types() -> list[str]:
    from gguf.quants import _type_traits

    return sorted(kind.name for kind in _type_traits)


@pytest.mark.parametrize("name", quantised_types())
def test_every_type_that_can_be_dequantised(tmp_path: Path, name: str) -> None:
    """One row of blocks of each type, of bytes that decode to finite numbers."""
    kind = gguf.GGMLQuantizationType[name]
    config, weights = fixtures.build("llama", num_hidden_layers=1, intermediate_size=256)
    values = weights["model.layers.0.mlp.down_proj.weight"]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    # Bytes below 0x3c give no infinite f16 scale, wherever in the block the scale lies.
    raw = np.random.default_rng(1).integers(1, 0x3C, (64, 256 // block * size), np.uint8)
    path = tmp_path / "m.gguf"
    write_gguf(path, config, weights, tensors={"blk.0.ffn_down.weight": None})
    expected = gguf.dequantize(raw, kind)
    assert expected.shape == values.shape
    assert np.isfinite(expected).all()
    writer_tensors = {"blk.0.ffn_down.weight": (raw, kind)}
    add_raw(path, config, weights, writer_tensors)
    found = read_tensors(convert.convert(path, tmp_path / "out"))
    assert np.array_equal(found["model.layers.0.mlp.down_proj.weight"], expected)


def add_raw(
    path: Path, config: Mapping[str, Any], weights: fixtures.Weights, raw: Mapping[str, Any]
) -> None:
    """Write the file again with tensors of given bytes and type."""
    path.unlink()
    add_tensor = gguf.GGUFWriter.add_tensor

    class Writer(gguf.GGUFWriter):
        def write_header_to_file(self, *args: Any, **kw: Any) -> None:
            for name, (values, kind) in raw.items():
                add_tensor(self, name, values, raw_dtype=kind)
            super().write_header_to_file(*args, **kw)

    first = gguf.GGUFWriter
    gguf.GGUFWriter = Writer
    try:
        write_gguf(path, config, weights, tensors=dict.fromkeys(raw))
    finally:
        gguf.GGUFWriter = first


def test_values_against_a_formula(tmp_path: Path) -> None:
    """Q8_0 by hand: 32 signed bytes times an f16 scale."""
    config, weights = fixtures.build("llama", num_hidden_layers=1)
    name = "model.layers.0.mlp.up_proj.weight"
    kind = gguf.GGMLQuantizationType.Q8_0
    path = write_gguf(tmp_path / "m.gguf", config, weights, types={"blk.0.ffn_up.weight": kind})
    blocks = weights[name].reshape(-1, 32)
    scales = np.abs(blocks).max(axis=1, keepdims=True) / 127
    expected = np.round(blocks / scales) * scales.astype(np.float16).astype(np.float32)
    found = read_tensors(convert.convert(path, tmp_path / "out"))[name]
    np.testing.assert_allclose(found, expected.reshape(found.shape), rtol=0, atol=1e-6)


def test_same_file_gives_the_same_bytes(tmp_path: Path) -> None:
    config, weights = fixtures.build("qwen2", num_hidden_layers=1)
    path = write_gguf(tmp_path / "m.gguf", config, weights)
    first, second = (convert.convert(path, tmp_path / name) for name in "ab")
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes(), file.name


# ---- what is refused -------------------------------------------------------------------------

BAD_FIELDS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"general.architecture": "mixtral"}, UnsupportedError, "architecture 'mixtral' is not"),
    ({"llama.expert_count": 8}, UnsupportedError, "llama.expert_count = 8"),
    ({"llama.block_count": None}, FormatError, "llama.block_count: missing"),
    ({"llama.embedding_length": None}, FormatError, "llama.embedding_length: missing"),
    ({"llama.attention.layer_norm_rms_epsilon": None}, FormatError, "rms_epsilon: missing"),
    ({"llama.attention.head_count_kv": 3}, FormatError, "head_count_kv: 3 does not fit 4 heads"),
    ({"llama.attention.head_count_kv": [2, 2, 1, 2]}, UnsupportedError, "differs between layers"),
    ({"llama.rope.dimension_count": 8}, UnsupportedError, "rope over 8 of 16 dimensions"),
    ({"llama.attention.value_length": 8}, UnsupportedError, "16 of keys differs from 8"),
    ({"llama.rope.scaling.type": "longrope"}, UnsupportedError, "rope scaling 'longrope'"),
    ({"llama.rope.scaling.type": "yarn"}, FormatError, "original_context_length: missing"),
    ({"llama.attention.key_length": 32, "llama.attention.value_length": 32,
      "llama.rope.dimension_count": 32}, FormatError,
     r"tensor blk\.0\.attn_q\.weight: expected shape \[128, 64\], found \[64, 64\]"),
    ({"llama.block_count": 5}, FormatError, "9 tensors are missing, the first blk.4.attn_norm"),
    ({"llama.block_count": 3}, UnsupportedError, "9 tensors have no counterpart, the first blk.3"),
    ({"tokenizer.ggml.pre": "gpt-4o"}, UnsupportedError, "pre: 'gpt-4o' is not supported"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "error", "message"), BAD_FIELDS)
def test_fields_that_cannot_be_expressed(
    tmp_path: Path, fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    config, weights = fixtures.build("llama")
    path = write_gguf(tmp_path / "m.gguf", config, weights, fields=fields)
    with pytest.raises(error, match=rf"m\.gguf: .*{message}"):
        convert.convert(path, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ({"output_norm.weight": None}, FormatError, "1 tensors are missing.* output_norm.weight"),
        ({"token_embd.weight": None}, FormatError, "token_embd.weight is missing"),
        ({"blk.1.attn_q.bias": np.ones(64, np.float32)}, UnsupportedError, "blk.1.attn_q.bias"),
        ({"blk.0.attn_sinks.weight": np.ones(4, np.float32)}, UnsupportedError, "attn_sinks"),
        ({"rope_factors_long.weight": np.ones(8, np.float32)}, UnsupportedError, "longrope"),
        (
            {"rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)},
            UnsupportedError,
            "rope_freqs.weight: no llama3 parameters",
        ),
        ({"output_norm.weight": np.ones(64, np.int32)}, UnsupportedError, "type I32 is not"),
        ({"output_norm.weight": np.full(64, np.nan, np.float32)}, NumericError, "not finite"),
    ],
)
def test_tensors_that_cannot_be_taken(
    tmp_path: Path, tensors: dict[str, Any], error: type[Exception], message: str
) -> None:
    config, weights = fixtures.build("llama")
    path = write_gguf(tmp_path / "m.gguf", config, weights, tensors=tensors)
    with pytest.raises(error, match=rf"m\.gguf: .*{message}"):
        convert.convert(path, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_neutral_rope_table_is_no_scaling(tmp_path: Path) -> None:
    config, weights = fixtures.build("llama", num_hidden_layers=1)
    tensors = {"rope_freqs.weight": np.ones(8, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", config, weights, tensors=tensors)
    folder = convert.convert(path, tmp_path / "out")
    assert json.loads((folder / "config.json").read_text())["rope_scaling"] is None


def test_truncated_files(tmp_path: Path) -> None:
    config, weights = fixtures.build("llama", num_hidden_layers=1)
    whole = write_gguf(tmp_path / "m.gguf", config, weights).read_bytes()
    path = tmp_path / "cut.gguf"
    for n in (5, 12, 30, 200, 5000, len(whole) // 2, len(whole) - 64):
        path.write_bytes(whole[:n])
        with pytest.raises(FormatError, match=rf"cut\.gguf: truncated: .* found {n}$"):
            convert.convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_counts_are_refused_at_once(tmp_path: Path) -> None:
    config, weights = fixtures.build("llama", num_hidden_layers=1)
    whole = bytearray(write_gguf(tmp_path / "m.gguf", config, weights).read_bytes())
    at = whole.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 8
    whole[at : at + 8] = struct.pack("<Q", 2**60)  # the length of the list
    path = tmp_path / "bad.gguf"
    path.write_bytes(whole)
    with pytest.raises(FormatError, match=r"bad\.gguf: "):
        convert.convert(path, tmp_path / "out")
    start = whole.index(b"output_norm.weight") + len(b"output_norm.weight")
    first = bytearray((tmp_path / "m.gguf").read_bytes())
    first[start + 12 : start + 16] = struct.pack("<I", 999)  # the tensor's type
    path.write_bytes(first)
    with pytest.raises(UnsupportedError, match=r"tensor output_norm\.weight: type 999 is unknown"):
        convert.convert(path, tmp_path / "out")


def test_files_that_are_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    for content, message in (
        (b"", "expected a gguf file, found b''"),
        (b"PK\x03\x04 a zip", "expected a gguf file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a git-lfs pointer"),
    ):
        path.write_bytes(content)
        with pytest.raises(FormatError, match=rf"x\.gguf: {message}"):
            convert.convert(path, tmp_path / "out")
    with pytest.raises(FileNotFoundError):
        convert.convert(tmp_path / "none.gguf", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        convert.convert(tmp_path / "empty", tmp_path / "out")
    with pytest.raises(ValueError, match="dtype: 'f8' is none of f32, f16, bf16, q8_0, keep"):
        convert.convert(path, tmp_path / "out", "f8")


def test_folder_in_the_way(tmp_path: Path) -> None:
    config, weights = fixtures.build("llama", num_hidden_layers=1)
    path = write_gguf(tmp_path / "m.gguf", config, weights)
    (tmp_path / "out").mkdir()
    convert.convert(path, tmp_path / "out")  # an empty folder is filled
    with pytest.raises(FileExistsError, match="out: exists and is not an empty folder"):
        convert.convert(path, tmp_path / "out")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    config, weights = fixtures.build("llama", num_hidden_layers=1)
    path = write_gguf(tmp_path / "m.gguf", config, weights)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    with pytest.raises(PermissionError):
        convert.convert(path, closed / "out")


# ---- the cache -------------------------------------------------------------------------------


def test_prepared_converts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, weights = fixtures.build("llama", num_hidden_layers=1)
    path = write_gguf(tmp_path / "m.gguf", config, weights)
    folder = convert.prepared(path, cache=tmp_path / "cache")
    assert folder.parent == tmp_path / "cache" / "models"
    moved = path.rename(tmp_path / "cache" / "m.gguf")
    monkeypatch.setattr(convert, "convert", None)
    assert convert.prepared(moved, cache=tmp_path / "cache") == folder


def _prepare(path: Path, cache: Path) -> str:
    return str(convert.prepared(path, cache=cache))


def test_many_processes_prepare_one_model(tmp_path: Path) -> None:
    config, weights = fixtures.build("llama", num_hidden_layers=1)
    path = write_gguf(tmp_path / "m.gguf", config, weights)
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        folders = pool.starmap(_prepare, [(path, tmp_path / "cache")] * 6)
    assert len(set(folders)) == 1
    found = read_tensors(Path(folders[0]))
    assert all(found[name].tobytes() == weights[name].tobytes() for name in weights)
    assert [p.name for p in (tmp_path / "cache" / "models").iterdir()] == [Path(folders[0]).name]


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVCOMM_CACHE", "/k")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("HOME", "/h")
    assert convert.cache_folder(tmp_path) == tmp_path
    assert convert.cache_folder() == Path("/k")
    monkeypatch.delenv("KVCOMM_CACHE")
    assert convert.cache_folder() == Path("/x/kvcomm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert convert.cache_folder() == Path("/h/.cache/kvcomm")
