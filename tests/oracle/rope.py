"""Rotary position embedding: frequencies of every supported kind, and the rotation itself.

Frequencies and angles are float64; what is rotated keeps its dtype. Dimension i of the rotated part
is paired with i + rotary_dim / 2. References: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071,
sections 3.2 to 3.4), and the frequency bands of Llama 3.1.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def rope_of(rope: Mapping[str, Any], head_dim: int) -> tuple[NDArray[np.float64], float]:
    """(inverse frequencies [rotary_dim / 2], factor on cos and sin) of one layer's rope."""
    rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    plain = rope["rope_theta"] ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    kind = rope["rope_type"]
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / rope["factor"], 1.0
    if kind == "llama3":
        return _llama3(rope, plain), 1.0
    if kind == "yarn":
        return _yarn(rope, plain, rotary_dim), _yarn_attention_factor(rope)
    raise ValueError(f"rope kind {kind}")


def inverse_frequencies(rope: Mapping[str, Any], head_dim: int) -> NDArray[np.float64]:
    """Radians per position of every rotated pair, [rotary_dim / 2]."""
    return rope_of(rope, head_dim)[0]


def _llama3(rope: Mapping[str, Any], plain: NDArray[np.float64]) -> NDArray[np.float64]:
    """Short waves as they are, long waves divided by the factor, a straight blend in between."""
    length, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    scaled = []
    for frequency in plain:
        waves = length * frequency / (2 * math.pi)  # how many fit into the original length
        if waves > high:
            scaled.append(frequency)
        elif waves < low:
            scaled.append(frequency / factor)
        else:
            share = (waves - low) / (high - low)
            scaled.append(share * frequency + (1 - share) * frequency / factor)
    return np.array(scaled)


def _yarn(
    rope: Mapping[str, Any], plain: NDArray[np.float64], rotary_dim: int
) -> NDArray[np.float64]:
    """Pairs that turn often keep their frequency, pairs that turn seldom are interpolated."""
    length, base = rope["original_max_position_embeddings"], rope["rope_theta"]

    def pair_that_turns(rotations: float) -> float:
        return rotary_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    first = pair_that_turns(rope.get("beta_fast") or 32)
    last = pair_that_turns(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    if first == last:
        last += 0.001
    ramp = np.clip((np.arange(rotary_dim // 2) - first) / (last - first), 0, 1)
    return plain / rope["factor"] * ramp + plain * (1 - ramp)


def _yarn_attention_factor(rope: Mapping[str, Any]) -> float:
    """The factor on cos and sin (so its square on q . k)."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"])
    return magnitude(1.0)


def rotate(
    x: Array, positions: Sequence[int] | Array, frequencies: Array, factor: float = 1.0
) -> Array:
    """x [heads, n, head_dim] turned to `positions` [n]; dimensions beyond the rotated stay."""
    half = len(frequencies)
    angles = np.asarray(positions, np.float64)[:, None] * frequencies
    cos, sin = (np.cos(angles) * factor).astype(x.dtype), (np.sin(angles) * factor).astype(x.dtype)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)
