"""Safetensors files of a model folder: found, checked, mapped.

Owns: which files hold the weights (one, or shards by an index), every check of a file's header,
views of mapped tensors without a copy, and bfloat16 in NumPy. Does not know a model: which tensor
means what is checkpoint.py's.

The safetensors library validates each file. Checked here besides, before it: what it accepts and
we do not (duplicate names, empty names and names with NUL, extra fields, null metadata, files
without tensors), and what its messages do not tell (which tensor, how many bytes). Extra bytes,
holes and overlaps are refused, so two names never share data. `__metadata__`, where there is one,
must be an object of strings. Its entry "kvcomm.blocks", where `kvcomm convert` wrote one, is a JSON
object {tensor: [type, row length]}: such a tensor is stored as U8 [rows, bytes of a row] and holds
blocks of 32 values, q8_0, q4_0 or q4_1, byte for byte as GGUF has them. When an index is there, it
decides, and must agree with its shards tensor by tensor.
"""

import json
import math
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from kvcomm.errors import FormatError, UnsupportedError
from kvcomm.fields import AnyPath, check_pointer, quoted, read_json, shown

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

#: Longest header that is read, in bytes; the limit of the safetensors library.
HEADER_LIMIT = 100_000_000

#: Element types that can be read as values: safetensors name -> (core name, NumPy type).
FLOATS: dict[str, tuple[str, np.dtype[Any]]] = {
    "F32": ("f32", np.dtype("<f4")),
    "F16": ("f16", np.dtype("<f2")),
    "BF16": ("bf16", np.dtype("<u2")),
}

#: Types of 32 values of a row with a common scale: name -> (core name, bytes of a block).
BLOCKS: dict[str, tuple[str, int]] = {
    "Q8_0": ("q8_0", 34),
    "Q4_0": ("q4_0", 18),
    "Q4_1": ("q4_1", 20),
}
BLOCK = 32
BLOCKS_ENTRY = "kvcomm.blocks"

#: Every type a weight may have: name -> core name.
TYPES = {name: kind[0] for name, kind in (*FLOATS.items(), *BLOCKS.items())}

_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies: `nbytes` bytes from byte `begin` of `file`, row-major."""

    name: str
    dtype: str  # as safetensors names it: "F32", "F16", "BF16", "I64", ...; or one of BLOCKS
    shape: tuple[int, ...]
    file: Path
    begin: int
    nbytes: int


@dataclass
class Weights:
    """The mapped tensors of a folder. Close it, or use it in a with statement."""

    folder: Path
    tensors: dict[str, Tensor]
    _maps: dict[Path, mmap.mmap] = field(repr=False)

    def __enter__(self) -> "Weights":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def array(self, name: str) -> NDArray[Any]:
        """A read-only view of a tensor: float32, float16, bfloat16 as its bits in uint16, or blocks
        as uint8 [rows, bytes of a row].

        The view may start at any byte, so it need not be aligned.

        Raises
        ------
        UnsupportedError
            The tensor has another element type.
        """
        tensor = self.tensors[name]
        if tensor.dtype not in TYPES:
            raise UnsupportedError(
                f"{shown(tensor.file)}: {name} is {tensor.dtype}; supported: {', '.join(TYPES)}"
            )
        shape, dtype = tensor.shape, np.dtype(np.uint8)
        if tensor.dtype in BLOCKS:
            shape = (shape[0], row_bytes(TYPES[tensor.dtype], shape[1]))
        else:
            dtype = FLOATS[tensor.dtype][1]
        if tensor.nbytes == 0:
            return np.empty(shape, dtype)
        count = math.prod(shape)
        return np.frombuffer(self._maps[tensor.file], dtype, count, tensor.begin).reshape(shape)

    def release(self, name: str) -> None:
        """Let the system take back the memory of a tensor that has been read."""
        tensor = self.tensors[name]
        if tensor.nbytes and hasattr(mmap, "MADV_DONTNEED"):
            start = tensor.begin - tensor.begin % mmap.PAGESIZE
            self._maps[tensor.file].madvise(
                mmap.MADV_DONTNEED, start, tensor.begin + tensor.nbytes - start
            )

    def close(self) -> None:
        """Unmap the files, as soon as no view of them is left."""
        self._maps.clear()


def open_weights(folder: AnyPath) -> Weights:
    """Check and map the safetensors files of a model folder.

    Parameters
    ----------
    folder
        str, bytes or path; the files in it may be links (as in the hub's cache).

    Raises
    ------
    OSError
        The folder or a weight file is missing or cannot be read.
    FormatError
        A file is damaged, a Git-LFS pointer, or disagrees with the index.
    UnsupportedError
        The folder holds weights of another format only.
    """
    root = Path(os.fsdecode(folder))
    if not root.is_dir():
        kind = NotADirectoryError if root.exists() else FileNotFoundError
        raise kind(f"{shown(root)}: no such folder")
    if os.path.lexists(root / INDEX):
        tensors = _sharded(root)
    elif os.path.lexists(root / SINGLE):
        tensors = _read_header(root / SINGLE)
    else:
        raise _absent(root)
    by_name = {tensor.name: tensor for tensor in tensors}
    maps: dict[Path, mmap.mmap] = {}
    for path in dict.fromkeys(tensor.file for tensor in tensors):
        with open(path, "rb") as file:
            maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return Weights(root, by_name, maps)


def row_bytes(kind: str, length: int) -> int:
    """Bytes of a row of `length` values of a block type, by its core name."""
    return length // BLOCK * BLOCKS[kind.upper()][1]


def f32_from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The exact values of bfloat16 bits, infinities, NaN and signed zeros included."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def bf16_from_f32(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Float32 rounded to bfloat16 bits, to nearest even; NaN stays NaN, overflow gives infinity."""
    bits = np.array(values, np.float32, order="C").view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    quiet_nan = (bits >> 16) | 0x40
    return np.where(np.isnan(values), quiet_nan, nearest).astype(np.uint16)


# ---- which files ---------------------------------------------------------------------------


def _absent(root: Path) -> Exception:
    """Why a folder without model.safetensors and without an index cannot be loaded."""
    names = sorted(path.name for path in root.iterdir())
    safetensors = [name for name in names if name.endswith(".safetensors")]
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    if safetensors:
        return FileNotFoundError(
            f"{shown(root)}: no {SINGLE} and no {INDEX}, only {shown(safetensors[0])}"
            f" ({len(safetensors)} safetensors files)"
        )
    if pickled:
        return UnsupportedError(
            f"{shown(root)}: only safetensors is supported, found {shown(pickled[0])};"
            " save the model again with safe serialization"
        )
    return FileNotFoundError(f"{shown(root)}: no weights ({SINGLE} or {INDEX})")


def _sharded(root: Path) -> list[Tensor]:
    """The tensors of all shards that the index lists."""
    index = root / INDEX
    listed = _read_index(index)
    for name, expected in listed.items():
        path = root / name
        if not path.exists():
            beside = f"; {SINGLE} lies beside it" if (root / SINGLE).exists() else ""
            raise FileNotFoundError(
                f"{shown(path)}: missing, but {INDEX} lists {len(expected)} tensors in it{beside}"
            )
        if path.stat().st_size == 0:
            raise FormatError(
                f"{shown(path)}: empty, but {INDEX} lists {len(expected)} tensors in it"
            )
    tensors = []
    for name, expected in listed.items():
        held = _read_header(root / name)
        names = {tensor.name for tensor in held}
        for tensor_name in expected:
            if tensor_name not in names:
                raise FormatError(
                    f"{shown(root / name)}: no tensor {tensor_name}, which {INDEX} lists"
                )
        stray = sorted(names - set(expected))
        if stray:
            raise FormatError(
                f"{shown(root / name)}: holds {stray[0]}, which {INDEX} does not list there"
            )
        tensors += held
    return tensors


def _read_index(path: Path) -> dict[str, list[str]]:
    """Names of the tensors in each shard."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{shown(path)}: weight_map is {quoted(weight_map)}, expected file names")
    listed: dict[str, list[str]] = {}
    for tensor, name in weight_map.items():
        plain = isinstance(name, str) and name.endswith(".safetensors")
        if not plain or any(mark in name for mark in "/\\\0"):
            raise FormatError(
                f"{shown(path)}: {tensor} is in {quoted(name)}, expected the plain name of a"
                " .safetensors file in the same folder"
            )
        listed.setdefault(name, []).append(tensor)
    return listed


# ---- one file ------------------------------------------------------------------------------


def _read_header(path: Path) -> list[Tensor]:
    """The tensors of one file, in the order of their data, after every check."""
    if not path.exists():
        raise FileNotFoundError(f"{shown(path)}: a link to a file that is not there")
    check_pointer(path)
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8:
            raise FormatError(f"{shown(path)}: {size} bytes, expected at least 8: truncated")
        if length > HEADER_LIMIT:
            raise FormatError(
                f"{shown(path)}: not safetensors: a header of {length} bytes, the limit is"
                f" {HEADER_LIMIT}"
            )
        if 8 + length > size:
            raise FormatError(
                f"{shown(path)}: {size} bytes, expected at least {8 + length} for the header:"
                " truncated"
            )
        text = file.read(length)
    header = _parse_header(text, path)
    metadata = header.pop("__metadata__", {})
    tensors = [_tensor(name, entry, path, 8 + length) for name, entry in header.items()]
    if not tensors:
        raise FormatError(f"{shown(path)}: holds no tensors")
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.nbytes))
    _check_coverage(tensors, 8 + length, size)
    try:
        with safe_open(os.fsdecode(path), "np"):
            pass
    except SafetensorError as error:
        raise FormatError(f"{shown(path)}: {error}") from None
    return _with_blocks(tensors, metadata, path)


def _with_blocks(tensors: list[Tensor], metadata: dict[str, str], path: Path) -> list[Tensor]:
    """The tensors, those that hold blocks with the type and shape of their values."""
    text = metadata.get(BLOCKS_ENTRY)
    if text is None:
        return tensors
    where = f"{shown(path)}: {BLOCKS_ENTRY}"
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise FormatError(f"{where}: {quoted(entries)}, expected an object")
    stray = sorted(set(entries) - {tensor.name for tensor in tensors})
    if stray:
        raise FormatError(f"{where}: names {quoted(stray[0])}, which is not in the file")
    return [_as_blocks(t, entries[t.name], where) if t.name in entries else t for t in tensors]


def _as_blocks(tensor: Tensor, entry: Any, where: str) -> Tensor:
    kinds = {kind for kind, _ in BLOCKS.values()}
    if not isinstance(entry, list) or len(entry) != 2 or not _are_counts(entry[1:]):
        raise FormatError(f"{where}: {tensor.name} is {quoted(entry)}, expected [type, row length]")
    kind, length = entry
    if not isinstance(kind, str) or kind not in kinds:
        raise UnsupportedError(
            f"{where}: {tensor.name} is {quoted(kind)}; supported: {', '.join(sorted(kinds))}"
        )
    if length % BLOCK:
        raise FormatError(f"{where}: {tensor.name} has rows of {length}, not of whole blocks of 32")
    expected = row_bytes(kind, length)
    if tensor.dtype != "U8" or len(tensor.shape) != 2 or tensor.shape[1] != expected:
        raise FormatError(
            f"{where}: {tensor.name} is {tensor.dtype} {list(tensor.shape)}, expected U8 [rows,"
            f" {expected}] for {length} values a row in {kind}"
        )
    return replace(tensor, dtype=kind.upper(), shape=(tensor.shape[0], length))


def _parse_header(text: bytes, path: Path) -> dict[str, Any]:
    """The header's entries by tensor name, and __metadata__ when there is one."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise FormatError(f"{shown(path)}: {quoted(key)} stands twice in the header")
            found[key] = value
        return found

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{shown(path)}: the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise FormatError(f"{shown(path)}: the header is not a JSON object")
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError(
            f"{shown(path)}: __metadata__ is {quoted(metadata)}, expected an object of strings"
        )
    return header


def _tensor(name: str, entry: Any, path: Path, data_begin: int) -> Tensor:
    """One entry of a header, types and sizes checked."""
    where = f"{shown(path)}: tensor {quoted(name)}"
    if not name or "\0" in name:
        raise FormatError(f"{where}: not a name")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{where}: {quoted(entry)}, expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise UnsupportedError(f"{where}: dtype {quoted(dtype)} is not supported")
    if not _are_counts(shape):
        raise FormatError(f"{where}: shape is {quoted(shape)}, expected sizes")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError(f"{where}: data_offsets is {quoted(offsets)}, expected [begin, end]")
    begin, end = offsets
    expected = math.prod(shape) * _ITEM_BYTES[dtype]
    if end - begin != expected:
        raise FormatError(
            f"{where}: {dtype} {shape} is {expected} bytes, data_offsets span {end - begin}"
        )
    return Tensor(name, dtype, tuple(shape), path, data_begin + begin, expected)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**63 for item in value
    )


def _check_coverage(tensors: list[Tensor], data_begin: int, size: int) -> None:
    """The tensors, in order, fill the file from the header to its end."""
    last = max(tensors, key=lambda tensor: tensor.begin + tensor.nbytes)
    end = last.begin + last.nbytes
    where = shown(last.file)
    if end > size:
        raise FormatError(
            f"{where}: {size} bytes, expected {end} for tensor {quoted(last.name)}: truncated"
        )
    position, before = data_begin, "the header"
    for tensor in tensors:
        if tensor.begin != position:
            what = "a hole" if tensor.begin > position else "an overlap"
            raise FormatError(
                f"{where}: {what} of {abs(tensor.begin - position)} bytes between {before} and"
                f" tensor {quoted(tensor.name)}"
            )
        position, before = tensor.begin + tensor.nbytes, f"tensor {quoted(tensor.name)}"
    if position != size:
        raise FormatError(
            f"{where}: {size} bytes, expected {position}: {size - position} extra at the end"
        )
