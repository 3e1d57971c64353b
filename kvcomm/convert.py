"""GGUF files made into Hugging Face folders, and such folders into others of another type.

Owns: reading a GGUF file, and writing the folder (config.json, model.safetensors,
tokenizer.json, tokenizer_config.json, generation_config.json, kvcomm.json), once, into a cache
if asked. Quantisation and undoing it belong to the `gguf` library, the layout of the tensor file
to `safetensors`, what becomes of a configuration and its tensors to gguf_families.py, the type of
each tensor to gguf_blocks.py, the tokenizer to gguf_vocabulary.py.

Everything is checked before anything is written; the folder is written aside and renamed.
Tensors pass a few at a time through a scratch file, so memory need hold no more than those that a
layer fuses, in f32.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvcomm import gguf_blocks, gguf_families
from kvcomm.checkpoint import match
from kvcomm.config import read_config
from kvcomm.errors import FormatError, NumericError, UnsupportedError
from kvcomm.fields import AnyPath, check_pointer, shown
from kvcomm.gguf_blocks import Stored
from kvcomm.gguf_families import Tensor
from kvcomm.gguf_vocabulary import rebuild
from kvcomm.weights import BLOCKS_ENTRY, open_weights

CONVERTER_VERSION = 2
"""Goes into kvcomm.json; raised when the same GGUF file would give another folder."""

DTYPES = ("f32", "f16", "bf16", "q8_0", "keep")

_TORCH_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_COPIED = ("generation_config.json", "tokenizer*", "*.jinja", "special_tokens_map.json")


def convert(source: AnyPath, folder: AnyPath, dtype: str = "f32") -> Path:
    """Make a Hugging Face folder from a GGUF file, or from another such folder.

    Parameters
    ----------
    source
        The GGUF file: architectures llama (with Mistral and Falcon3), qwen2, qwen3 or gemma3,
        every tensor type that the `gguf` library de-quantises. Or a folder.
    folder
        The folder to make. It must not exist, or be empty.
    dtype
        Type of the tensors written. ``"f32"``, ``"f16"`` or ``"bf16"``: all of them, values rounded
        to nearest even. ``"q8_0"``: matrices in blocks of 32 values with one scale, by GGUF's rule;
        norms and biases in f32. ``"keep"``: what the file has. Floats stay; Q8_0, Q4_0 and Q4_1
        matrices are carried over byte for byte; Q5_0 becomes q8_0 with the same scales and
        integers, and so does Q4_0 beside it in one of q, k, v or gate, up, both exact; any other
        type becomes the smallest of bf16, f16 and f32 that holds every value of the tensor.

    Returns
    -------
    Path
        The folder. Unless `dtype` is f32, its kvcomm.json says in "types" how many tensors have
        which type, and in "loss" the rms of what rounding changed, relative to the rms of the
        values, by kind of tensor.

    Raises
    ------
    FormatError
        The file is truncated, damaged, or lacks a field or tensor.
    UnsupportedError
        An architecture, tensor type, rope scaling, tokenizer or tensor that has no counterpart; a
        matrix for q8_0 whose rows are not a multiple of 32.
    NumericError
        A tensor holds values that are not finite, or too large for f16.
    ValueError
        `dtype` is none of the five.
    OSError
        The source cannot be read, or the folder exists or cannot be written.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype: {dtype!r} is none of {', '.join(DTYPES)}")
    path, target = Path(os.fsdecode(source)), Path(os.fsdecode(folder))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{shown(target)}: exists and is not an empty folder")
    with contextlib.ExitStack() as held:
        made = _of_folder(path, dtype, held) if path.is_dir() else _of_gguf(path, dtype)
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.parent / f".{target.name}-{uuid.uuid4().hex}"
        aside.mkdir()
        try:
            for name, content in made.files.items():
                _write(aside / name, content)
            record = {"source_sha256": made.sha256, "converter_version": CONVERTER_VERSION}
            record["dtype"] = dtype
            try:
                account = _write_tensors(aside, made.tensors)
            except (NumericError, UnsupportedError) as error:
                raise type(error)(f"{shown(path)}: {error}") from None
            if dtype != "f32":
                record |= account
            _write(aside / "kvcomm.json", _json(record))
            _sync(aside)
            aside.rename(target)
            _sync(target.parent)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    return target


@dataclass(frozen=True)
class _Made:
    """What goes into a folder: texts by file name, and tensors one after the other."""

    files: dict[str, str | bytes]
    tensors: Iterator[Stored]
    sha256: str


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _of_gguf(path: Path, dtype: str) -> _Made:
    reader = _open(path)
    try:
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (UnicodeDecodeError, IndexError) as error:
        raise FormatError(f"{shown(path)}: metadata cannot be read: {error}") from None
    sources = {tensor.name: tensor for tensor in reader.tensors}
    try:
        family = gguf_families.family_of(fields)
        tokenizer, tokenizer_config = rebuild(fields)
        config = gguf_families.config_of(family, fields, sources)
        config["dtype"] = config["torch_dtype"] = _TORCH_NAMES.get(dtype, "float32")
        tensors = gguf_families.tensors_of(family, config, sources)
        _check_tensors(tensors, sources)
        tokenizer_config["model_max_length"] = config["max_position_embeddings"]
        files: dict[str, str | bytes] = {
            "config.json": _json(config),
            "generation_config.json": _json(
                gguf_families.generation_config_of(family, fields, config)
            ),
            "tokenizer_config.json": _json(tokenizer_config),
            "tokenizer.json": tokenizer,
        }
    except (FormatError, UnsupportedError) as error:
        raise type(error)(f"{shown(path)}: {error}") from None
    stored = gguf_blocks.stored_of_gguf(tensors, sources, dtype)
    return _Made(files, stored, _sha256(path))


def _of_folder(path: Path, dtype: str, held: contextlib.ExitStack) -> _Made:
    """A folder again, with other types; of its weights only what the configuration wants."""
    config = read_config(path)
    weights = held.enter_context(open_weights(path))
    plan = match(weights, config)
    raw = dict(config.raw)
    raw["torch_dtype"] = raw["dtype"] = _TORCH_NAMES.get(dtype, "float32")
    files: dict[str, str | bytes] = {"config.json": _json(raw)}
    for pattern in _COPIED:
        files |= {file.name: file.read_bytes() for file in sorted(path.glob(pattern))}
    digest = hashlib.sha256()
    for file in sorted({item.tensor.file for item in plan.items}):
        digest.update(bytes.fromhex(_sha256(file)))
    return _Made(files, gguf_blocks.stored_of_folder(weights, plan, dtype), digest.hexdigest())


def cache_folder(cache: AnyPath | None = None) -> Path:
    """Where fetched and converted models lie: `cache`, else $KVCOMM_CACHE, else kvcomm in
    $XDG_CACHE_HOME, else ~/.cache/kvcomm."""
    stated = os.fsdecode(cache) if cache is not None else os.environ.get("KVCOMM_CACHE")
    if stated:
        return Path(stated)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvcomm"


def prepared(gguf_path: AnyPath, cache: AnyPath | None = None) -> Path:
    """The folder of a GGUF file, as of `convert` with "keep", made in the cache when it is first
    asked for: the file's blocks where the core computes with them, and no value changed.

    The folder goes by the file's content: a moved or renamed file is found again, a changed one
    is converted anew. Errors are those of `convert`.
    """
    path = Path(os.fsdecode(gguf_path))
    name = f"{path.stem}-{_sha256(path)[:12]}"
    return convert_once(path, cache_folder(cache) / "models" / f"{name}-v{CONVERTER_VERSION}")


def convert_once(gguf_path: Path, folder: Path) -> Path:
    """`convert` with "keep", unless the folder is there; a folder that is there is whole."""
    if folder.is_dir():
        return folder
    try:
        return convert(gguf_path, folder, "keep")
    except OSError:
        # Another process may have been faster; its folder is as good.
        if folder.is_dir():
            return folder
        raise


# ---- reading ---------------------------------------------------------------------------------


def _open(path: Path) -> Any:
    import gguf

    class BoundedReader(gguf.GGUFReader):
        # The library slices past the end of a short file without a word, and would then read
        # counts of zero or run on for as long as a damaged count says.
        def _get(self, offset: int, dtype: Any, count: int = 1, *args: Any, **kw: Any) -> Any:
            end = int(offset) + np.dtype(dtype).itemsize * int(count)
            if end > len(self.data):
                raise FormatError(
                    f"truncated: expected at least {end} bytes, found {len(self.data)}"
                )
            return super()._get(offset, dtype, count, *args, **kw)

        def _get_tensor_info_field(self, offset: int) -> Any:
            field = super()._get_tensor_info_field(offset)
            kind = int(field.parts[4][0])
            if kind not in set(gguf.GGMLQuantizationType):
                raise UnsupportedError(f"tensor {field.name}: type {kind} is unknown")
            return field

    check_pointer(path)
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise FormatError(f"{shown(path)}: expected a gguf file, found {magic!r} at its start")
    try:
        return BoundedReader(path)
    except (FormatError, UnsupportedError) as error:
        raise type(error)(f"{shown(path)}: {error}") from None
    except (ValueError, KeyError, IndexError, OverflowError, MemoryError) as error:
        raise FormatError(f"{shown(path)}: {error}") from None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# ---- tensors ---------------------------------------------------------------------------------


def _check_tensors(tensors: Mapping[str, Tensor], sources: Mapping[str, Any]) -> None:
    missing = [t.source for t in tensors.values() if t.source not in sources]
    if missing:
        raise FormatError(f"{len(missing)} tensors are missing, the first {', '.join(missing[:3])}")
    # A tensor that nothing reads (a bias, an expert, a sink) would change the answers.
    extra = sorted(set(sources) - {t.source for t in tensors.values()} - {"rope_freqs.weight"})
    if extra:
        raise UnsupportedError(
            f"{len(extra)} tensors have no counterpart, the first {', '.join(extra[:3])}"
        )
    from gguf.quants import _type_traits

    for tensor in tensors.values():
        source = sources[tensor.source]
        shape = tuple(int(n) for n in reversed(source.shape))
        if shape != tensor.shape:
            raise FormatError(
                f"tensor {tensor.source}: expected shape {list(tensor.shape)}, found {list(shape)}"
            )
        kind = source.tensor_type
        if kind.name not in ("F32", "F16") and kind not in _type_traits:
            raise UnsupportedError(f"tensor {tensor.source}: type {kind.name} is not supported")


def _write_tensors(folder: Path, tensors: Iterator[Stored]) -> dict[str, Any]:
    """Write model.safetensors; returns the counts of types and the losses."""
    from safetensors import TensorSpec, serialize_file

    kept: list[tuple[Stored, int]] = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for tensor in tensors:
            kept.append((replace(tensor, data=tensor.data[:0]), file.tell()))
            file.write(np.ascontiguousarray(tensor.data).reshape(-1).view(np.uint8).data)
        file.flush()
        scratch = np.memmap(file, np.uint8, "r")
        specs = {
            tensor.name: TensorSpec(
                dtype=_TORCH_NAMES.get(tensor.kind, "uint8"),
                shape=list(tensor.stored_shape),
                data_ptr=scratch[start:].ctypes.data,
                data_len=tensor.nbytes,
            )
            for tensor, start in kept
        }
        blocks = {t.name: [t.kind, t.shape[1]] for t, _ in kept if t.kind not in _TORCH_NAMES}
        # One entry only: the library writes several in an order that changes from run to run.
        entry = json.dumps(blocks, sort_keys=True)
        metadata = {BLOCKS_ENTRY: entry} if blocks else {"format": "pt"}
        serialize_file(specs, str(folder / "model.safetensors"), metadata)
    # The library makes the file readable for its owner only.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")
    _sync(folder / "model.safetensors")
    return gguf_blocks.account([tensor for tensor, _ in kept])


# ---- writing ---------------------------------------------------------------------------------


def _write(path: Path, content: str | bytes) -> None:
    with path.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
