"""Reads a model folder (config.json and its safetensors files) into an oracle model.

Owns its own few lines of the safetensors format, so that the product's reader is not trusted for
the weights it is compared on. Expects well-made files.
"""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from oracle.transformer import Model


def read_folder(folder: Path, dtype: DTypeLike = np.float64) -> Model:
    """The model of a Hugging Face folder; computes in `dtype`."""
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights: dict[str, NDArray[Any]] = {}
    stored = "F32"
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            stored = entry["dtype"]
            weights[name] = _values(data[begin:end], stored).reshape(entry["shape"])
    return Model(config, weights, dtype=dtype, stored=stored.lower())


def _values(data: bytes, dtype: str) -> NDArray[Any]:
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[dtype])
