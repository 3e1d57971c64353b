"""Weights in blocks of 32 values: kept from a GGUF file, made of any source, loaded and run.

The `gguf` library says what blocks mean and how q8_0 is quantised; a model held in blocks must give
the very logits that it gives in f32 with the same values.
"""

import json
from pathlib import Path
from typing import Any

import fixtures
import gguf
import numpy as np
import pytest
from test_convert import add_raw, write_gguf

from kvcomm import convert
from kvcomm._core import Session, Workspace
from kvcomm.errors import FormatError, NumericError, UnsupportedError
from kvcomm.model import Model
from kvcomm.weights import SINGLE, open_weights

Q8_0, Q4_0, Q4_1, Q5_0, Q6_K = (
    gguf.GGMLQuantizationType[name] for name in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q6_K")
)
PARTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
IDS = np.arange(3, 43, dtype=np.int32)


def write_file(path: Path, types: dict[str, Any], family: str = "llama", **changes: Any) -> Path:
    """A GGUF file whose matrices have these types; `types` by part, "" for all others."""
    config, weights = fixtures.build(family, num_hidden_layers=2, **changes)
    names = ["token_embd.weight", "output.weight"]
    names += [f"blk.{layer}.{part}.weight" for layer in range(2) for part in PARTS]
    chosen = {name: types.get(name.split(".")[-2], types[""]) for name in names}
    return write_gguf(path, config, weights, types={n: t for n, t in chosen.items() if t})


def logits_of(folder: Path, dtype: str = "auto") -> np.ndarray:
    with Model.load(folder, dtype=dtype) as model:
        return forward(model, [IDS])


def forward(model: Model, rows: list[np.ndarray]) -> np.ndarray:
    sessions = [Session(model.core) for _ in rows]
    out, _ = Workspace(model.core).forward(sessions, rows, output="logits", outputs="all")
    return out


@pytest.mark.parametrize("kind", [Q8_0, Q4_0, Q4_1], ids=lambda kind: kind.name)
def test_blocks_are_carried_over_and_give_the_logits_of_their_values(
    tmp_path: Path, kind: Any
) -> None:
    path = write_file(tmp_path / "m.gguf", {"": kind})
    folder = convert.convert(path, tmp_path / "kept", "keep")
    wide = convert.convert(path, tmp_path / "wide", "f32")
    with open_weights(folder) as weights:
        tensor = weights.tensors["model.layers.1.mlp.down_proj.weight"]
        assert (tensor.dtype, tensor.shape) == (kind.name, (64, 128))
        raw = weights.array(tensor.name).tobytes()
    source = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_down.weight")
    assert raw == source.data.tobytes()
    with Model.load(folder) as model:
        assert model.dtype == kind.name.lower()
        size = gguf.GGML_QUANT_SIZES[kind][1]
        with Model.load(wide) as whole:
            assert model.nbytes < whole.nbytes * (size / 128 + 0.1)
            assert model.fingerprint != whole.fingerprint
    assert logits_of(folder).tobytes() == logits_of(wide).tobytes()
    assert logits_of(folder, "f32").tobytes() == logits_of(wide).tobytes()
    record = json.loads((folder / "kvcomm.json").read_text())
    assert (record["types"], record["loss"]) == ({kind.name.lower(): 16, "f32": 5}, {})


def test_a_gguf_file_is_loaded_as_it_is_stored(tmp_path: Path) -> None:
    path = write_file(tmp_path / "m.gguf", {"": Q4_1, "token_embd": Q8_0, "output": Q8_0})
    with Model.load(path, cache=tmp_path / "cache") as model:
        assert model.dtype == "mixed: q4_1, q8_0"
        found = forward(model, [IDS])
    wide = convert.convert(path, tmp_path / "wide", "f32")
    assert found.tobytes() == logits_of(wide).tobytes()


def test_a_model_by_name_has_the_bits_of_its_f32_values(real_model: Any, device: str) -> None:
    """SmolLM2's GGUF file holds Q4_1 matrices and a Q8_0 table; 97 MB, 538 in f32."""
    with Model.load("smollm2-135m", device=device) as stored:
        assert stored.dtype == "mixed: q4_1, q8_0"
        assert stored.nbytes < 100e6 < 530e6 < real_model.nbytes
        for n in (1, 3, 40):  # one row, a few, and enough to be widened first
            rows = [np.arange(5, 5 + n, dtype=np.int32)]
            assert forward(stored, rows).tobytes() == forward(real_model, rows).tobytes()


def test_mixed_types(tmp_path: Path) -> None:
    """Q5_0, and Q4_0 beside it, become q8_0 exactly; a K type becomes f32; a group of several types
    is held in f32."""
    types = {"attn_v": Q5_0, "ffn_up": Q4_1, "ffn_down": Q5_0, "output": Q8_0, "": Q4_0}
    path = write_file(tmp_path / "m.gguf", types)
    folder = convert.convert(path, tmp_path / "kept", "keep")
    with open_weights(folder) as weights:
        found = {name: tensor.dtype for name, tensor in weights.tensors.items()}
    layer = "model.layers.0."
    assert found["model.embed_tokens.weight"] == found[layer + "self_attn.o_proj.weight"] == "Q4_0"
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"):
        assert found[f"{layer}{name}.weight"] == "Q8_0"
    assert (found[layer + "mlp.gate_proj.weight"], found[layer + "mlp.up_proj.weight"]) == (
        "Q4_0",
        "Q4_1",
    )
    with Model.load(folder) as model:
        assert model.dtype == "mixed: q4_0, q8_0, f32"
    wide = convert.convert(path, tmp_path / "wide", "f32")
    assert logits_of(folder).tobytes() == logits_of(wide).tobytes()


def test_other_types_become_the_smallest_float_that_holds_them(tmp_path: Path) -> None:
    config, weights = fixtures.build("llama", num_hidden_layers=1, intermediate_size=256)
    path = tmp_path / "m.gguf"
    write_gguf(path, config, weights)
    rng = np.random.default_rng(1)
    raw = {}
    for name, kind in (("ffn_down", Q6_K), ("ffn_up", gguf.GGMLQuantizationType.MXFP4)):
        rows, length = (64, 256) if name == "ffn_down" else (256, 64)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        data = rng.integers(1, 0x3C, (rows, length // block * size), np.uint8)
        if kind != Q6_K:
            data[:, ::size] = 120  # exponents of scales near one
        raw[f"blk.0.{name}.weight"] = (data, kind)
    add_raw(path, config, weights, raw)
    folder = convert.convert(path, tmp_path / "kept", "keep")
    with open_weights(folder) as stored:
        assert stored.tensors["model.layers.0.mlp.down_proj.weight"].dtype == "F32"
        assert stored.tensors["model.layers.0.mlp.up_proj.weight"].dtype == "BF16"
        bits = stored.array("model.layers.0.mlp.up_proj.weight").copy()
    expected = gguf.dequantize(*raw["blk.0.ffn_up.weight"])
    assert np.array_equal((bits.astype(np.uint32) << 16).view(np.float32), expected)


def test_q8_0_of_any_source(tmp_path: Path) -> None:
    """The library's quantiser is the judge of the file, and of quantising at load in the core."""
    source = fixtures.write_model(tmp_path / "m", "qwen2", dtype="bf16")
    folder = convert.convert(source, tmp_path / "out", "q8_0")
    with open_weights(source) as wide, open_weights(folder) as narrow:
        assert set(narrow.tensors) == set(wide.tensors)
        for name, tensor in narrow.tensors.items():
            values = (wide.array(name).astype(np.uint32) << 16).view(np.float32)
            if len(tensor.shape) == 2:
                expected = gguf.quantize(values, Q8_0)
                assert np.array_equal(narrow.array(name), expected)
            else:
                assert np.array_equal(narrow.array(name), values)
    record = json.loads((folder / "kvcomm.json").read_text())
    assert 2e-3 < record["loss"]["q_proj"] < 8e-3  # 1 / (127 sqrt 12) of a block's largest
    assert logits_of(folder).tobytes() == logits_of(source, "q8_0").tobytes()
    close = np.abs(logits_of(folder) - logits_of(source, "f32"))
    assert 0 < close.max() < 0.2
    again = convert.convert(folder, tmp_path / "again", "keep")
    assert (again / SINGLE).read_bytes() == (folder / SINGLE).read_bytes()
    assert Model.load(again).dtype == "q8_0"


def test_a_row_alone_has_the_bits_it_has_in_a_batch(tmp_path: Path) -> None:
    folder = convert.convert(write_file(tmp_path / "m.gguf", {"": Q4_1}), tmp_path / "out", "keep")
    with Model.load(folder) as model:
        rows = [IDS[:n] for n in (1, 7, 30, 40)]
        together = forward(model, rows)
        alone = np.concatenate([forward(model, [row]) for row in rows])
    assert together.tobytes() == alone.tobytes()


# ---- what is refused ---------------------------------------------------------------------------


def test_rows_that_are_not_whole_blocks(tmp_path: Path) -> None:
    source = fixtures.write_model(tmp_path / "m", "llama", intermediate_size=80)
    with pytest.raises(
        UnsupportedError, match=r"down_proj\.weight: rows of 80 values are not whole"
    ):
        convert.convert(source, tmp_path / "out", "q8_0")
    with pytest.raises(UnsupportedError, match="down of layer 0: 80 columns are not whole blocks"):
        Model.load(source, dtype="q8_0")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_scales_that_are_not_finite(tmp_path: Path) -> None:
    path = write_file(tmp_path / "m.gguf", {"": Q8_0})
    whole = bytearray(path.read_bytes())
    reader = gguf.GGUFReader(path)
    tensor = next(t for t in reader.tensors if t.name == "blk.1.ffn_up.weight")
    whole[tensor.data_offset + 34 * 5 : tensor.data_offset + 34 * 5 + 2] = b"\x00\x7c"
    path.write_bytes(whole)
    with pytest.raises(NumericError, match=r"tensor blk\.1\.ffn_up\.weight: holds values that"):
        convert.convert(path, tmp_path / "out", "keep")


def test_kv_is_never_in_blocks(tmp_path: Path) -> None:
    source = fixtures.write_model(tmp_path / "m", "llama")
    with pytest.raises(ValueError, match="kv_dtype is 'q8_0', expected one of f32, f16, bf16"):
        Model.load(source, kv_dtype="q8_0")
    with Model.load(source) as model, pytest.raises(ValueError, match="one of f32, f16, bf16, not"):
        Session(model.core, kv_dtype="q8_0")


@pytest.mark.parametrize(
    ("entries", "error", "message"),
    [
        ("{", FormatError, "kvcomm.blocks: not JSON"),
        ("[]", FormatError, "expected an object"),
        ({"x": ["q8_0", 64]}, FormatError, 'names "x", which is not in the file'),
        ({"w": ["q8_0"]}, FormatError, "expected .type, row length."),
        ({"w": ["q8_0", True]}, FormatError, "expected .type, row length."),
        ({"w": ["q3_k", 64]}, UnsupportedError, 'is "q3_k"; supported: q4_0, q4_1, q8_0'),
        ({"w": ["q8_0", 65]}, FormatError, "rows of 65, not of whole blocks of 32"),
        ({"w": ["q8_0", 96]}, FormatError, r"is U8 \[4, 68\], expected U8 \[rows, 102\] for 96"),
        ({"v": ["q8_0", 32]}, FormatError, r"is F32 \[34\], expected U8 \[rows, 34\] for 32"),
    ],
)
def test_damaged_metadata(
    tmp_path: Path, entries: Any, error: type[Exception], message: str
) -> None:
    from safetensors.numpy import save_file

    text = entries if isinstance(entries, str) else json.dumps(entries)
    tensors = {"w": np.zeros((4, 68), np.uint8), "v": np.zeros(34, np.float32)}
    save_file(tensors, tmp_path / SINGLE, {"kvcomm.blocks": text})
    with pytest.raises(error, match=message):
        open_weights(tmp_path)
