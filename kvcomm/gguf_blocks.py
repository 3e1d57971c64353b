"""The type that each tensor of a converted folder has, and its bytes in that type.

Owns: what "keep" makes of every GGUF type, quantising to q8_0 (by the `gguf` library), rounding to
16 bits, what a type changes in the values, and the account of it. Reads and writes no file.

A GGUF matrix in Q8_0, Q4_0 or Q4_1 is a row of blocks: an f16 scale (for Q4_1 an f16 minimum too),
then 32 integers. Rows may change places; no block is taken apart.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcomm.checkpoint import Plan
from kvcomm.errors import NumericError, UnsupportedError
from kvcomm.gguf_families import Tensor, dequantize
from kvcomm.weights import BLOCK, BLOCKS, TYPES, Weights, bf16_from_f32, f32_from_bf16

_CARRIED = {"Q8_0": "q8_0", "Q4_0": "q4_0", "Q4_1": "q4_1"}
#: Types whose blocks are one f16 scale and 32 integers that a byte holds, so that q8_0 holds them.
_SCALED = ("Q4_0", "Q5_0")
#: Parts of a layer that the core holds as one matrix, of one type.
_FUSED = (
    ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
)


@dataclass(frozen=True)
class Stored:
    """One tensor of the folder: `data` holds `shape` values in type `kind`."""

    name: str
    kind: str  # "f32", "f16", "bf16" (as its bits), or a block type (uint8 [rows, bytes])
    shape: tuple[int, ...]
    data: NDArray[Any]
    error: float = 0.0  # sum of squares of what the type changed
    total: float = 0.0  # and of the values

    @property
    def stored_shape(self) -> tuple[int, ...]:
        if self.kind.upper() not in BLOCKS:
            return self.shape
        return (self.shape[0], self.shape[1] // BLOCK * BLOCKS[self.kind.upper()][1])

    @property
    def nbytes(self) -> int:
        item = {"f32": 4, "f16": 2, "bf16": 2}.get(self.kind, 1)
        return math.prod(self.stored_shape) * item


def account(tensors: list[Stored]) -> dict[str, Any]:
    """How many tensors have which type; rms of the change over rms of the values, by kind of
    tensor, where there is one."""
    kinds: dict[str, list[float]] = {}
    for tensor in tensors:
        sums = kinds.setdefault(tensor.name.split(".")[-2], [0.0, 0.0])
        sums[0] += tensor.error
        sums[1] += tensor.total
    loss = {kind: math.sqrt(error / total) for kind, (error, total) in kinds.items() if error}
    return {"types": dict(Counter(tensor.kind for tensor in tensors)), "loss": loss}


# ---- from a GGUF file --------------------------------------------------------------------------


def stored_of_gguf(
    tensors: Mapping[str, Tensor], sources: Mapping[str, Any], dtype: str
) -> Iterator[Stored]:
    """Every tensor of the folder, one after the other."""
    exact = {name for name in tensors if _needs_q8_0(name, tensors, sources)}
    for name, tensor in tensors.items():
        source = sources[tensor.source]
        kind = source.tensor_type.name
        matrix = len(tensor.shape) == 2
        if matrix and dtype in ("keep", _CARRIED.get(kind)) and kind in _CARRIED:
            raw = _q8_0_of(source) if name in exact else np.asarray(source.data)
            target = "q8_0" if name in exact else _CARRIED[kind]
            yield _carried(name, tensor, raw, target)
        elif matrix and dtype == "keep" and kind in _SCALED:
            yield _carried(name, tensor, _q8_0_of(source), "q8_0")
        else:
            values = _values(tensor, source)
            target = dtype
            if dtype == "keep":
                target = {"F32": "f32", "F16": "f16", "BF16": "bf16"}.get(kind) or _smallest(values)
            yield stored(name, values, target, tensor.source)


def _needs_q8_0(name: str, tensors: Mapping[str, Tensor], sources: Mapping[str, Any]) -> bool:
    """Is it Q4_0 beside parts that are, or become, q8_0, with nothing else among them?"""
    for parts in _FUSED:
        stem = next((name.removesuffix(part) for part in parts if name.endswith(part)), None)
        if stem is not None:
            kinds = {sources[tensors[stem + part].source].tensor_type.name for part in parts}
            return len(kinds) > 1 and kinds <= {"Q4_0", "Q5_0", "Q8_0"}
    return False


def _carried(name: str, tensor: Tensor, raw: NDArray[np.uint8], kind: str) -> Stored:
    blocks = raw.reshape(-1, BLOCKS[kind.upper()][1])
    n_heads = 2 if kind == "q4_1" else 1
    if ((blocks[:, 1 : 2 * n_heads : 2] & 0x7C) == 0x7C).any():
        raise NumericError(f"tensor {tensor.source}: holds values that are not finite")
    return Stored(name, kind, tensor.shape, _unpermuted(tensor, raw.reshape(tensor.shape[0], -1)))


def _q8_0_of(source: Any) -> NDArray[np.uint8]:
    """Blocks of a scale and small integers with the same scale and integers as q8_0."""
    import gguf

    raw = np.asarray(source.data)
    size = gguf.GGML_QUANT_SIZES[source.tensor_type][1]
    if source.tensor_type.name == "Q8_0":
        return raw
    blocks = raw.reshape(-1, size).copy()
    scales = blocks[:, :2].copy()
    blocks[:, :2] = (0x00, 0x3C)  # a scale of one: the values are the integers
    integers = gguf.dequantize(blocks, source.tensor_type).reshape(-1, BLOCK)
    made = np.concatenate([scales, integers.astype(np.int8).view(np.uint8)], axis=1)
    return made.reshape(len(raw), -1)


def _unpermuted(tensor: Tensor, values: NDArray[Any]) -> NDArray[Any]:
    """Rows of q and k in the order of the folder: halves of a head, not pairs."""
    if not tensor.heads:
        return values
    halves = (tensor.heads, tensor.shape[0] // tensor.heads // 2, 2, -1)
    return np.ascontiguousarray(values.reshape(halves).swapaxes(1, 2)).reshape(values.shape)


def _values(tensor: Tensor, source: Any) -> NDArray[np.float32]:
    """One tensor as the folder holds it, in f32 and dense."""
    values = dequantize(source).reshape(tensor.shape)
    if not np.isfinite(values).all():
        raise NumericError(f"tensor {tensor.source}: holds values that are not finite")
    values = _unpermuted(tensor, values)
    if tensor.minus_one:
        values = values - np.float32(1.0)
    return np.ascontiguousarray(values, np.float32)


# ---- from a folder -----------------------------------------------------------------------------


def stored_of_folder(weights: Weights, plan: Plan, dtype: str) -> Iterator[Stored]:
    """The wanted tensors of a folder in another type."""
    for item in plan.items:
        tensor = item.tensor
        kind, data = TYPES[tensor.dtype], weights.array(tensor.name)
        if kind == dtype or dtype == "keep":
            yield Stored(tensor.name, kind, tensor.shape, data)
        else:
            values = _widened(data, kind).reshape(tensor.shape)
            if not np.isfinite(values).all():
                raise NumericError(f"tensor {tensor.name}: holds values that are not finite")
            yield stored(tensor.name, values, dtype, tensor.name)
        del data
        weights.release(tensor.name)


def _widened(data: NDArray[Any], kind: str) -> NDArray[np.float32]:
    if kind in ("f32", "f16"):
        return data.astype(np.float32)
    if kind == "bf16":
        return f32_from_bf16(data)
    import gguf

    return gguf.dequantize(data, gguf.GGMLQuantizationType[kind.upper()])


# ---- into a type -------------------------------------------------------------------------------


def stored(name: str, values: NDArray[np.float32], dtype: str, label: str) -> Stored:
    """f32 values in a type, and what that changes. For "q8_0" vectors stay in f32."""
    kind = "f32" if dtype == "q8_0" and values.ndim == 1 else dtype
    if kind == "q8_0" and values.shape[1] % BLOCK:
        raise UnsupportedError(
            f"tensor {label}: rows of {values.shape[1]} values are not whole blocks of {BLOCK}, as"
            " q8_0 has"
        )
    data = _narrow(values, kind, label)
    made = Stored(name, kind, values.shape, data)
    if kind == "f32":
        return made
    change = _widened(data, kind).reshape(values.shape) - values
    return replace(
        made,
        error=sum(float(np.square(row, dtype=np.float64).sum()) for row in change),
        total=sum(float(np.square(row, dtype=np.float64).sum()) for row in values),
    )


def _narrow(values: NDArray[np.float32], kind: str, label: str) -> NDArray[Any]:
    """f32 values in the type to store, rounded to nearest even; bf16 as its bits in uint16."""
    if kind == "f32":
        return values
    if kind == "bf16":
        return bf16_from_f32(values)
    with np.errstate(over="ignore"):
        if kind == "f16":
            narrow = values.astype(np.float16)
            large = not np.isfinite(narrow).all()
        else:
            import gguf

            narrow = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            scales = narrow.reshape(-1, BLOCKS["Q8_0"][1])[:, 1]
            large = bool(((scales & 0x7C) == 0x7C).any())
    if large:
        most = "65504" if kind == "f16" else "65504 times 127"
        raise NumericError(
            f"tensor {label}: {np.abs(values).max():.6g} is too large for {kind} ({most})"
        )
    return narrow


def _smallest(values: NDArray[np.float32]) -> str:
    """The smallest float type that holds every value."""
    for kind in ("bf16", "f16"):
        with np.errstate(over="ignore"):
            narrow = bf16_from_f32(values) if kind == "bf16" else values.astype(np.float16)
        if np.array_equal(_widened(narrow, kind), values):
            return kind
    return "f32"
