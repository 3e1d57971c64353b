"""Safetensors folders: what is read, what is refused and how the refusal reads.

Files are made by hand here, byte by byte where they are faulty; values are compared with what was
written.
"""

import json
import os
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fixtures
import numpy as np
import pytest
from fixtures import ABSENT, build, write_folder, write_model, write_safetensors

from kvcomm.checkpoint import Plan, match
from kvcomm.config import read_config
from kvcomm.errors import FormatError, UnsupportedError
from kvcomm.weights import bf16_from_f32, f32_from_bf16, open_weights

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
Header = dict[str, Any]


def plan_of(folder: Path) -> Plan:
    with open_weights(folder) as weights:
        return match(weights, read_config(folder))


def read_all(folder: Path) -> dict[str, np.ndarray]:
    """Copies of all float tensors; bf16 as its bits."""
    with open_weights(folder) as weights:
        floats = [n for n, t in weights.tensors.items() if t.dtype in ("F32", "F16", "BF16")]
        return {name: weights.array(name).copy() for name in floats}


def write_raw(folder: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """A weight file with exactly this header (an object, or bytes) and data."""
    folder.mkdir(exist_ok=True)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    (folder / SINGLE).write_bytes(struct.pack("<Q", size) + text + data)
    return folder


def split(path: Path) -> tuple[Header, bytes]:
    """Header and data of a weight file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def entry(dtype: str, shape: list[int], begin: int, end: int) -> Header:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_model(tmp_path / "llama", "llama")


@pytest.fixture
def edit(llama: Path) -> Callable[..., Path]:
    """edit(change): tiny-llama with change(header, data) -> (header, data) done to its file."""

    def edited(change: Callable[[Header, bytes], tuple[Header, bytes]]) -> Path:
        return write_raw(llama, *change(*split(llama / SINGLE)))

    return edited


# ---- what is read ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_values_are_those_written(tmp_path: Path, dtype: str, shards: int) -> None:
    _, weights = build("qwen2")
    read = read_all(write_model(tmp_path, "qwen2", dtype=dtype, shards=shards))
    assert read.keys() == weights.keys()
    stored = {"f32": np.float32, "f16": np.float16, "bf16": fixtures.bf16_bits}[dtype]
    for name, values in weights.items():
        expected = stored(values)
        assert read[name].dtype == expected.dtype
        np.testing.assert_array_equal(read[name], expected)


def test_arrays_are_views_of_the_file(llama: Path) -> None:
    with open_weights(llama) as weights:
        tracemalloc.start()
        arrays = [weights.array(name) for name in weights]
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert not any(array.flags.writeable for array in arrays)
    total = sum(array.nbytes for array in arrays)
    assert used < total / 10
    assert np.isfinite(arrays[0]).all()  # a view outlives the weights


def test_release_keeps_the_values(llama: Path) -> None:
    _, expected = build("llama")
    with open_weights(llama) as weights:
        for name in weights:
            first = weights.array(name).copy()
            weights.release(name)
            np.testing.assert_array_equal(weights.array(name), first)
            np.testing.assert_array_equal(first, expected[name])


@pytest.mark.parametrize("residue", range(8))
def test_data_at_any_address(tmp_path: Path, residue: int) -> None:  # ST-013
    config, weights = build("llama")
    folder = write_folder(tmp_path, config, weights)
    header, data = split(folder / SINGLE)
    text = json.dumps(header).encode()
    write_raw(folder, text + b" " * ((residue - len(text)) % 8), data)
    read = read_all(folder)
    for name, values in weights.items():
        np.testing.assert_array_equal(read[name], values)


def test_one_byte_in_front(edit: Callable[..., Path]) -> None:  # ST-013
    def change(header: Header, data: bytes) -> tuple[Header, bytes]:
        for name, tensor in header.items():
            if name != "__metadata__":
                tensor["data_offsets"] = [offset + 1 for offset in tensor["data_offsets"]]
        return header | {"flag": entry("U8", [1], 0, 1)}, b"\7" + data

    folder = edit(change)
    read = read_all(folder)
    for name, values in build("llama")[1].items():
        np.testing.assert_array_equal(read[name], values)
    assert plan_of(folder).unused == ("flag",)


@pytest.mark.parametrize("place", ["start", "middle", "end"])
def test_empty_and_scalar_tensors(edit: Callable[..., Path], place: str) -> None:  # ST-015
    def change(header: Header, data: bytes) -> tuple[Header, bytes]:
        names = [name for name in header if name != "__metadata__"]
        at = {"start": 0, "middle": len(names) // 2, "end": len(names)}[place]
        cut = header[names[at]]["data_offsets"][0] if at < len(names) else len(data)
        grown: Header = {}
        for number, name in enumerate([*names, None]):
            if number == at:
                grown["extra_empty"] = entry("F32", [0], cut, cut)
                grown["extra_wide"] = entry("F32", [0, 64], cut, cut)
                grown["extra_scalar"] = entry("F32", [], cut, cut + 4)
            if name is not None:
                shift = 4 if number >= at else 0
                begin, end = header[name]["data_offsets"]
                grown[name] = header[name] | {"data_offsets": [begin + shift, end + shift]}
        return grown, data[:cut] + struct.pack("<f", 1.5) + data[cut:]

    folder = edit(change)
    read = read_all(folder)
    assert read["extra_scalar"].shape == ()
    assert read["extra_scalar"] == 1.5
    assert read["extra_wide"].shape == (0, 64)
    for name, values in build("llama")[1].items():
        np.testing.assert_array_equal(read[name], values)
    assert plan_of(folder).unused == ("extra_empty", "extra_scalar", "extra_wide")


@pytest.mark.parametrize("metadata", [ABSENT, {}, {"format": "pt"}, {"format": "mlx"}])
def test_metadata(edit: Callable[..., Path], metadata: Any) -> None:  # ST-024
    def change(header: Header, data: bytes) -> tuple[Header, bytes]:
        header.pop("__metadata__")
        return header if metadata is ABSENT else {"__metadata__": metadata} | header, data

    assert read_all(edit(change)).keys() == build("llama")[1].keys()


@pytest.mark.parametrize("metadata", [{"a": 1}, None, [], "pt"])
def test_odd_metadata_is_refused(edit: Callable[..., Path], metadata: Any) -> None:  # ST-024
    folder = edit(lambda header, data: (header | {"__metadata__": metadata}, data))
    with pytest.raises(FormatError, match="__metadata__ is"):
        open_weights(folder)


def test_links_of_the_hub_cache(llama: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123abcd"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(llama.iterdir())):
        file.rename(blobs / f"blob{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/blob{number}")
    assert read_all(snapshot).keys() == build("llama")[1].keys()
    (snapshot / SINGLE).resolve().unlink()
    with pytest.raises(FileNotFoundError, match="a link to a file that is not there"):
        open_weights(snapshot)


@pytest.mark.parametrize("kind", [str, Path, os.fsencode])
def test_kinds_of_paths(tmp_path: Path, kind: Callable[[Any], Any]) -> None:  # ST-027
    folder = write_model(tmp_path / "modèle_模型 x", "llama")
    with open_weights(kind(folder)) as weights:
        assert len(weights.tensors) == len(build("llama")[1])


def test_any_bytes_in_any_locale(tmp_path: Path) -> None:  # ST-027
    folder = os.fsencode(write_model(tmp_path / "plain", "llama"))
    odd = os.fsencode(tmp_path) + "/modèle_模型".encode() + b"\xff x"
    os.rename(folder, odd)
    program = (
        "import os, sys; from kvcomm import config, weights, checkpoint\n"
        "folder = os.fsencode(sys.argv[1])\n"
        "w = weights.open_weights(folder)\n"
        "print(len(checkpoint.match(w, config.read_config(folder)).items))\n"
        "os.truncate(folder + b'/model.safetensors', 100)\n"
        "try: weights.open_weights(folder)\n"
        "except ValueError as error: print(error)\n"
    )
    for locale in ("C", "C.UTF-8"):
        write_safetensors(Path(os.fsdecode(odd)) / SINGLE, build("llama")[1])
        done = subprocess.run(
            [os.fsencode(sys.executable), b"-c", program.encode(), odd],
            env=os.environ
            | {"LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        count, message = done.stdout.splitlines()
        assert count == b"39"
        assert b"truncated" in message


# ---- bfloat16: ST-022 -----------------------------------------------------------------------


def test_bf16_values() -> None:
    bits = np.array([0x3F80, 0xC000, 0x4049, 0x7E96, 0x0001, 0x7F80, 0xFF80, 0x7FC0, 0x8000])
    values = f32_from_bf16(bits.astype(np.uint16))
    assert values.dtype == np.float32
    expected = [1.0, -2.0, 3.140625, 9.9692099683868690e37, 2.0**-133, np.inf, -np.inf]
    np.testing.assert_array_equal(values[:7], np.array(expected, np.float32))
    assert np.isnan(values[7])
    assert values[8] == 0
    assert np.signbit(values[8])
    np.testing.assert_array_equal(bf16_from_f32(values), bits)


def test_bf16_rounds_to_nearest_even() -> None:
    step = 2.0**-7  # between bf16 neighbours in [1, 2)
    values = np.array(
        [1 + step / 2, 1 + 3 * step / 2, 1 + step / 2 + 2**-20, 1 + step / 2 - 2**-20, 3.4e38],
        np.float32,
    )
    expected = np.array([1, 1 + 2 * step, 1 + step, 1, np.inf], np.float32)
    np.testing.assert_array_equal(f32_from_bf16(bf16_from_f32(values)), expected)


def test_bf16_nan_stays_nan() -> None:
    bits = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000], np.uint32)
    assert np.isnan(f32_from_bf16(bf16_from_f32(bits.view(np.float32)))).all()


def test_bf16_keeps_every_value() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    values = f32_from_bf16(bits)
    finite = ~np.isnan(values)
    np.testing.assert_array_equal(bf16_from_f32(values)[finite], bits[finite])
    assert bf16_from_f32(np.float32(1)).shape == ()


# ---- damaged files --------------------------------------------------------------------------


def test_truncated_files(llama: Path) -> None:  # ST-005
    path = llama / SINGLE
    content = path.read_bytes()
    header_end = 8 + int.from_bytes(content[:8], "little")
    full = len(content)
    needed = {
        4: 8,
        8: header_end,
        8 + (header_end - 8) // 2: header_end,
        header_end: full,
        header_end + (full - header_end) // 2: full,
        full - 1: full,
    }
    assert len(needed) == 6
    for size, expected in needed.items():
        path.write_bytes(content[:size])
        with pytest.raises(FormatError, match=rf"{SINGLE}: {size} bytes, expected .*{expected}"):
            open_weights(llama)
    path.write_bytes(content)
    assert len(read_all(llama)) == 39


@pytest.mark.parametrize("length", [0, 1, 57, 2**32, 2**63 - 1, 2**64 - 1])
def test_absurd_header_lengths(tmp_path: Path, length: int) -> None:  # ST-007
    folder = write_raw(tmp_path, b"{" * 56, length=length)
    message = "limit is 100000000" if length > 10**8 else "not JSON|expected at least 65"
    with pytest.raises(FormatError, match=message):
        open_weights(folder)


def test_header_over_the_limit_is_not_read(tmp_path: Path) -> None:  # ST-007
    folder = write_raw(tmp_path, b"{}", length=101_000_000)
    os.truncate(folder / SINGLE, 102_000_000)
    tracemalloc.start()
    with pytest.raises(FormatError, match="header of 101000000 bytes, the limit is 100000000"):
        open_weights(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


@pytest.mark.parametrize(("span", "shape"), [(64 * 32 * 4, [64, 64]), (64 * 64 * 8, [64, 64])])
def test_shape_against_bytes(tmp_path: Path, span: int, shape: list[int]) -> None:  # ST-009
    folder = write_raw(tmp_path, {"q_proj": entry("F32", shape, 0, span)}, bytes(span))
    message = rf'"q_proj": F32 \[64, 64\] is 16384 bytes, data_offsets span {span}'
    with pytest.raises(FormatError, match=message):
        open_weights(folder)


@pytest.mark.parametrize(
    "offsets",
    [[-4, 12], [16, 8], [0, 10**6], [0], [0, 4, 8], ["0", "4"], [0, 1e30], [0.5, 4], None, True,
     [False, True], [0, 2**64], [0, 10**30]],
)  # fmt: skip
def test_bad_offsets(tmp_path: Path, offsets: Any) -> None:  # ST-010
    header = {"w": {"dtype": "U8", "shape": [16], "data_offsets": offsets}}
    with pytest.raises(FormatError, match='tensor "w"'):
        open_weights(write_raw(tmp_path, header, bytes(16)))


def test_end_beyond_the_file(tmp_path: Path) -> None:  # ST-010
    header = {"w": entry("U8", [4096], 0, 4096)}
    with pytest.raises(FormatError, match=r'expected [0-9]+ for tensor "w": truncated'):
        open_weights(write_raw(tmp_path, header, bytes(16)))


@pytest.mark.parametrize("shape", [[-1], [1.0], "16", None, [True] * 2, [2**62, 4], [10**30]])
def test_bad_shapes(tmp_path: Path, shape: Any) -> None:
    header = {"w": {"dtype": "U8", "shape": shape, "data_offsets": [0, 16]}}
    with pytest.raises(FormatError, match='tensor "w"'):
        open_weights(write_raw(tmp_path, header, bytes(16)))


def test_holes_overlaps_and_tails(edit: Callable[..., Path], llama: Path) -> None:  # ST-012
    original = (llama / SINGLE).read_bytes()
    (llama / SINGLE).write_bytes(original + bytes(16))
    with pytest.raises(FormatError, match="16 extra at the end"):
        open_weights(llama)

    def hole(header: Header, data: bytes) -> tuple[Header, bytes]:
        names = [name for name in header if name != "__metadata__"]
        for name in names[1:]:
            header[name]["data_offsets"] = [o + 8 for o in header[name]["data_offsets"]]
        cut = header[names[0]]["data_offsets"][1]
        return header, data[:cut] + bytes(8) + data[cut:]

    (llama / SINGLE).write_bytes(original)
    with pytest.raises(FormatError, match=r"a hole of 8 bytes between tensor .*embed_tokens"):
        open_weights(edit(hole))

    def overlap(header: Header, data: bytes) -> tuple[Header, bytes]:
        begin = header["lm_head.weight"]["data_offsets"][0]
        header["lm_head.weight"] = dict(header["model.embed_tokens.weight"])
        return header, data[:begin]

    (llama / SINGLE).write_bytes(original)
    with pytest.raises(FormatError, match=r"an overlap of .*lm_head\.weight"):
        open_weights(edit(overlap))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "header is not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"\xff": 1}', "header is not JSON"),
        (b"[" * 200_000, "header is not JSON"),
        (b"{}", "holds no tensors"),
        (b'{"__metadata__": {"format": "pt"}}', "holds no tensors"),
        ({"": entry("U8", [16], 0, 16)}, 'tensor "": not a name'),
        ({"a\0b": entry("U8", [16], 0, 16)}, "not a name"),
        ({"w": entry("U8", [16], 0, 16) | {"more": 1}}, "expected dtype, shape and data_offsets"),
        ({"w": {"dtype": "U8", "shape": [16]}}, "expected dtype, shape and data_offsets"),
        ({"w": [1]}, "expected dtype, shape and data_offsets"),
        (
            b'{"w": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},'
            b' "w": {"dtype": "U8", "shape": [8], "data_offsets": [8, 16]}}',
            '"w" stands twice',
        ),
    ],
)
def test_damaged_headers(tmp_path: Path, header: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        open_weights(write_raw(tmp_path, header, bytes(16)))


def test_unknown_dtype(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match='tensor "w": dtype "Q4" is not supported'):
        open_weights(write_raw(tmp_path, {"w": entry("Q4", [16], 0, 16)}, bytes(16)))


def test_random_bytes_never_load(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    good = (write_model(tmp_path / "m", "llama") / SINGLE).read_bytes()
    header_end = 8 + int.from_bytes(good[:8], "little")
    folder = tmp_path / "m"
    for _ in range(200):
        content = bytearray(good)
        for place in rng.integers(0, header_end, 3):
            content[place] = rng.integers(256)
        (folder / SINGLE).write_bytes(content)
        try:
            tensors = open_weights(folder).tensors
        except (FormatError, UnsupportedError):
            continue
        assert sum(t.nbytes for t in tensors.values()) == len(good) - header_end


# ---- folders --------------------------------------------------------------------------------


def test_missing_and_empty_shards(tmp_path: Path) -> None:  # ST-001
    folder = write_model(tmp_path / "m", "llama", shards=3)
    shard = folder / "model-00002-of-00003.safetensors"
    shard.write_bytes(b"")
    with pytest.raises(FormatError, match=rf"{shard.name}: empty, but .* 13 tensors"):
        open_weights(folder)
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=rf"{shard.name}: missing, but .* 13 tensors"):
        open_weights(folder)


def test_index_that_names_other_files(llama: Path) -> None:  # ST-002 a
    names = dict.fromkeys(build("llama")[1], "model-00001-of-00002.safetensors")
    (llama / INDEX).write_text(json.dumps({"weight_map": names}))
    with pytest.raises(FileNotFoundError, match=f"00001-of-00002.*{SINGLE} lies beside it"):
        open_weights(llama)


def test_index_of_a_single_file(llama: Path) -> None:
    names = dict.fromkeys(build("llama")[1], SINGLE)
    (llama / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": names}))
    assert len(read_all(llama)) == 39


def test_index_that_misplaces_a_tensor(tmp_path: Path) -> None:  # ST-002 b
    folder = write_model(tmp_path, "llama", shards=2)
    index = json.loads((folder / INDEX).read_text())
    name = "model.layers.3.self_attn.q_proj.weight"
    assert index["weight_map"][name] == "model-00002-of-00002.safetensors"
    index["weight_map"][name] = "model-00001-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(FormatError, match=rf"model-00001-of-00002.safetensors: no tensor {name}"):
        open_weights(folder)
    del index["weight_map"][name]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(FormatError, match=rf"00002-of-00002.safetensors: holds {name}"):
        open_weights(folder)


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "/etc/x.safetensors", "sub/../../x", "sub/x.safetensors",
     "a\0.safetensors", "", "..", "x.bin", "..\\x.safetensors", 3, None],
)  # fmt: skip
def test_index_stays_in_the_folder(llama: Path, name: Any) -> None:  # ST-025
    (llama / SINGLE).rename(llama.parent / "secret.safetensors")
    names = dict.fromkeys(build("llama")[1], name)
    (llama / INDEX).write_text(json.dumps({"weight_map": names}))
    with pytest.raises(FormatError, match="expected the plain name"):
        open_weights(llama)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": []}])
def test_index_without_a_map(llama: Path, index: Any) -> None:
    (llama / INDEX).write_text(json.dumps(index))
    with pytest.raises(FormatError, match="weight_map"):
        open_weights(llama)


def test_git_lfs_pointer(llama: Path) -> None:  # ST-004
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 8\n"
    (llama / SINGLE).write_text(text)
    with pytest.raises(FormatError, match=rf"{SINGLE}: a git-lfs pointer of {len(text)} bytes"):
        open_weights(llama)


def test_pickled_weights_only(llama: Path) -> None:  # ST-029
    (llama / SINGLE).rename(llama / "pytorch_model.bin")
    message = r"only safetensors is supported, found pytorch_model\.bin"
    with pytest.raises(UnsupportedError, match=message):
        open_weights(llama)


def test_folders_without_weights(tmp_path: Path, llama: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such folder"):
        open_weights(tmp_path / "absent")
    with pytest.raises(NotADirectoryError, match="no such folder"):
        open_weights(llama / SINGLE)
    (llama / SINGLE).rename(llama / "model-00001-of-00002.safetensors")
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors and no .*00001-of-00002"):
        open_weights(llama)
    (llama / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no weights"):
        open_weights(llama)
