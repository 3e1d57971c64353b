"""GGUF files made into Hugging Face folders.

Owns: reading a GGUF file, and writing the folder (config.json, model.safetensors,
tokenizer.json, tokenizer_config.json, generation_config.json, kvcomm.json), once, into a cache
if asked. Undoing the quantisation belongs to the `gguf` library, the layout of the tensor file
to `safetensors`, what becomes of a configuration and its tensors to gguf_families.py, the tokenizer
to gguf_vocabulary.py.

Everything is checked before anything is written; the folder is written aside and renamed.
Tensors pass one at a time through a scratch file, so memory need hold no more than one in f32.
"""

import hashlib
import json
import math
import os
import shutil
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvcomm import gguf_families
from kvcomm.errors import FormatError, NumericError, UnsupportedError
from kvcomm.fields import AnyPath, check_pointer, shown
from kvcomm.gguf_families import Tensor, dequantize
from kvcomm.gguf_vocabulary import rebuild

CONVERTER_VERSION = 1
"""Goes into kvcomm.json; raised when the same GGUF file would give another folder."""

DTYPES = ("f32", "f16", "bf16")

_TORCH_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def convert(gguf_path: AnyPath, folder: AnyPath, dtype: str = "f32") -> Path:
    """Make a Hugging Face folder from a GGUF file.

    Parameters
    ----------
    gguf_path
        The GGUF file: architectures llama (with Mistral and Falcon3), qwen2, qwen3 or gemma3,
        every tensor type that the `gguf` library de-quantises.
    folder
        The folder to make. It must not exist, or be empty.
    dtype
        Type of all tensors written: ``"f32"``, ``"f16"`` or ``"bf16"``. De-quantised values are
        not all exact in 16 bits; they are rounded to nearest even.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    FormatError
        The file is truncated, damaged, or lacks a field or tensor.
    UnsupportedError
        An architecture, tensor type, rope scaling, tokenizer or tensor that has no counterpart.
    NumericError
        A tensor holds values that are not finite, or too large for f16.
    ValueError
        `dtype` is none of the three.
    OSError
        The file cannot be read, or the folder exists or cannot be written.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype: {dtype!r} is none of {', '.join(DTYPES)}")
    path, target = Path(os.fsdecode(gguf_path)), Path(os.fsdecode(folder))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{shown(target)}: exists and is not an empty folder")
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
        config["dtype"] = config["torch_dtype"] = _TORCH_NAMES[dtype]
        tensors = gguf_families.tensors_of(family, config, sources)
        _check_tensors(tensors, sources)
        tokenizer_config["model_max_length"] = config["max_position_embeddings"]
        texts = {
            "config.json": config,
            "generation_config.json": gguf_families.generation_config_of(family, fields, config),
            "tokenizer_config.json": tokenizer_config,
            "kvcomm.json": {
                "source_sha256": _sha256(path),
                "converter_version": CONVERTER_VERSION,
                "dtype": dtype,
            },
        }
    except (FormatError, UnsupportedError) as error:
        raise type(error)(f"{shown(path)}: {error}") from None
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.parent / f".{target.name}-{uuid.uuid4().hex}"
    aside.mkdir()
    try:
        for name, content in texts.items():
            _write(aside / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        _write(aside / "tokenizer.json", tokenizer)
        try:
            _write_tensors(aside, tensors, sources, dtype)
        except NumericError as error:
            raise NumericError(f"{shown(path)}: {error}") from None
        _sync(aside)
        aside.rename(target)
        _sync(target.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return target


def cache_folder(cache: AnyPath | None = None) -> Path:
    """Where fetched and converted models lie: `cache`, else $KVCOMM_CACHE, else kvcomm in
    $XDG_CACHE_HOME, else ~/.cache/kvcomm."""
    stated = os.fsdecode(cache) if cache is not None else os.environ.get("KVCOMM_CACHE")
    if stated:
        return Path(stated)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvcomm"


def prepared(gguf_path: AnyPath, cache: AnyPath | None = None) -> Path:
    """The folder of a GGUF file in f32, converted into the cache when it is first asked for.

    The folder goes by the file's content: a moved or renamed file is found again, a changed one
    is converted anew. Errors are those of `convert`.
    """
    path = Path(os.fsdecode(gguf_path))
    name = f"{path.stem}-{_sha256(path)[:12]}"
    return convert_once(path, cache_folder(cache) / "models" / f"{name}-v{CONVERTER_VERSION}")


def convert_once(gguf_path: Path, folder: Path) -> Path:
    """`convert` in f32, unless the folder is there; a folder that is there is whole."""
    if folder.is_dir():
        return folder
    try:
        return convert(gguf_path, folder)
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

    if path.is_dir():
        raise IsADirectoryError(f"{shown(path)}: is a folder, expected a gguf file")
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


def _values(tensor: Tensor, source: Any) -> np.ndarray:
    """One tensor as the folder holds it, in f32 and dense."""
    values = dequantize(source).reshape(tensor.shape)
    if not np.isfinite(values).all():
        raise NumericError(f"tensor {tensor.source}: holds values that are not finite")
    if tensor.heads:
        halves = (tensor.heads, tensor.shape[0] // tensor.heads // 2, 2, -1)
        values = values.reshape(halves).swapaxes(1, 2).reshape(tensor.shape)
    if tensor.minus_one:
        values = values - np.float32(1.0)
    return np.ascontiguousarray(values, np.float32)


def _narrow(values: np.ndarray, dtype: str, name: str) -> np.ndarray:
    """f32 values in the type to store, rounded to nearest even; bf16 as its bits in uint16."""
    if dtype == "f32":
        return values
    if dtype == "f16":
        with np.errstate(over="ignore"):
            narrow = values.astype(np.float16)
        if not np.isfinite(narrow).all():
            raise NumericError(
                f"tensor {name}: {np.abs(values).max():.6g} is too large for f16 (65504)"
            )
        return narrow
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)


def _write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], sources: Mapping[str, Any], dtype: str
) -> None:
    from safetensors import TensorSpec, serialize_file

    itemsize = 4 if dtype == "f32" else 2
    sizes = {name: math.prod(tensor.shape) * itemsize for name, tensor in tensors.items()}
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(sum(sizes.values()))
        scratch = np.memmap(file, np.uint8, "r+")
        specs, start = {}, 0
        for name, tensor in tensors.items():
            end = start + sizes[name]
            values = _narrow(_values(tensor, sources[tensor.source]), dtype, tensor.source)
            scratch[start:end] = values.reshape(-1).view(np.uint8)
            specs[name] = TensorSpec(
                dtype=_TORCH_NAMES[dtype],
                shape=list(tensor.shape),
                data_ptr=scratch[start:].ctypes.data,
                data_len=sizes[name],
            )
            start = end
        serialize_file(specs, str(folder / "model.safetensors"), {"format": "pt"})
    # The library makes the file readable for its owner only.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")
    _sync(folder / "model.safetensors")


# ---- writing ---------------------------------------------------------------------------------


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
