"""Rotary embeddings as config.json states them, old spelling and new, per kind of layer.

Owns: the rope kinds with their keys, and which of several statements wins. Does not compute a
frequency: the core does.
"""

import math
import warnings
from typing import Any

from kvcomm.errors import FormatError, UnsupportedError
from kvcomm.fields import Fields, quoted

#: Layer types as config.json names them.
FULL, SLIDING = "full_attention", "sliding_attention"

#: Keys that each rope kind may have, besides rope_type, type, rope_theta, partial_rotary_factor.
_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


def read_ropes(
    fields: Fields, theta: float, local_theta: float | None, head_dim: int, max_position: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ropes of full and of windowed layers, as the core takes them.

    theta: default base of the family. local_theta: default base of windowed layers in families
    that give them a rope of their own (a flat statement is then for the full layers only).
    """
    spellings = [key for key in ("rope_parameters", "rope_scaling") if fields.object(key)]
    found = []
    for key in spellings or ["rope_scaling"]:
        full, local = _split(fields, key, local_theta)
        base = _theta(full, fields, "rope_theta", theta)
        rope = _rope(full, fields, base, head_dim, max_position)
        if local is None:
            found.append((rope, rope))
            continue
        local_key = "rope_theta" if local_theta is None else "rope_local_base_freq"
        local_base = _theta(local, fields, local_key, local_theta or theta)
        found.append((rope, _rope(local, fields, local_base, head_dim, max_position)))
    if found[0] != found[-1]:
        warnings.warn(
            f"{fields.where}: rope_parameters and rope_scaling disagree; rope_parameters is used",
            stacklevel=2,
        )
    return found[0]


def _split(fields: Fields, key: str, local_theta: float | None) -> tuple[Fields, Fields | None]:
    """A rope dict by layer type: full layers, windowed layers (None: the same)."""
    where = f"{fields.where}: {key}"
    values = fields.object(key) or {}
    nested = Fields(values, where)
    full, local = values, None
    if FULL in values or SLIDING in values:
        full, local = nested.object(FULL) or {}, nested.object(SLIDING)
    if local is None and local_theta is not None:
        local = {}
    return Fields(full, where), None if local is None else Fields(local, where)


def _theta(inner: Fields, outer: Fields, key: str, default: float) -> float:
    """The base inside the rope dict, else the one outside it, else the class default."""
    outside = None if outer.values.get(key) is None else outer.number(key, above=1.0)
    if inner.values.get("rope_theta") is None:
        return default if outside is None else outside
    inside = inner.number("rope_theta", above=1.0)
    if outside is not None and outside != inside:
        warnings.warn(
            f"{inner.where}: rope_theta {inside:g} disagrees with {key} {outside:g};"
            f" {inside:g} is used",
            stacklevel=2,
        )
    return inside


def _kind(inner: Fields) -> str:
    new, old = inner.values.get("rope_type"), inner.values.get("type")
    if new is None and old is None:
        strange = sorted(set(inner.values) - _COMMON)
        if strange:
            raise FormatError(f"{inner.where}: has {strange[0]} but neither rope_type nor type")
        return "default"
    if new is not None and old is not None and new != old:
        warnings.warn(
            f"{inner.where}: rope_type {quoted(new)} and type {quoted(old)} disagree;"
            " rope_type is used",
            stacklevel=2,
        )
    kind = old if new is None else new
    if not isinstance(kind, str) or kind not in _KEYS:
        raise UnsupportedError(
            f"{inner.where}: rope kind {quoted(kind)} is not supported;"
            f" supported: {', '.join(_KEYS)}"
        )
    return kind


def _rope(
    inner: Fields, outer: Fields, theta: float, head_dim: int, max_position: int
) -> dict[str, Any]:
    kind = _kind(inner)
    unknown = sorted(set(inner.values) - _KEYS[kind] - _COMMON)
    if unknown:
        warnings.warn(f"{inner.where}: {unknown[0]} is not used by rope kind {kind}", stacklevel=2)
    rope: dict[str, Any] = {
        "kind": kind,
        "theta": theta,
        "rotary_dim": _rotary_dim(inner, outer, head_dim),
    }
    if kind != "default":
        rope["factor"] = inner.number("factor")
    if kind == "llama3":
        rope["low_freq_factor"] = inner.number("low_freq_factor")
        rope["high_freq_factor"] = inner.number("high_freq_factor", above=rope["low_freq_factor"])
        rope["original_length"] = inner.number("original_max_position_embeddings")
    if kind == "yarn":
        rope |= _yarn(inner, outer, rope["factor"], max_position)
    return rope


def _rotary_dim(inner: Fields, outer: Fields, head_dim: int) -> int:
    """The leading dimensions that rotate: partial_rotary_factor of the head, an even count."""
    fields = inner if inner.values.get("partial_rotary_factor") is not None else outer
    if fields.values.get("partial_rotary_factor") is None:
        share = 1.0
    else:
        share = fields.number("partial_rotary_factor")
    count = round(head_dim * share)
    if share > 1.0 or count < 2 or count % 2 or abs(head_dim * share - count) > 1e-6:
        raise FormatError(
            f"{fields.where}: partial_rotary_factor {share:g} of head_dim {head_dim} is"
            f" {head_dim * share:g} dimensions, expected an even count up to {head_dim}"
        )
    return count


def _yarn(inner: Fields, outer: Fields, factor: float, max_position: int) -> dict[str, Any]:
    key = "original_max_position_embeddings"
    given = inner if inner.values.get(key) is not None else outer
    original = given.number(key) if given.values.get(key) is not None else float(max_position)
    if not math.isclose(max_position / original, factor):
        warnings.warn(
            f"{inner.where}: yarn factor {factor:g} but max_position_embeddings {max_position} /"
            f" {key} {original:g} = {max_position / original:g}; factor {factor:g} is used",
            stacklevel=2,
        )
    optional = {name: value for name, value in inner.values.items() if value is not None}
    stated = Fields(optional, inner.where)
    beta_slow = stated.number("beta_slow", 1.0)
    if "attention_factor" in optional:
        attention = stated.number("attention_factor")
    elif optional.get("mscale") and optional.get("mscale_all_dim"):
        attention = _mscale(factor, stated.number("mscale")) / _mscale(
            factor, stated.number("mscale_all_dim")
        )
    else:
        attention = _mscale(factor, 1.0)
    return {
        "original_length": original,
        "beta_fast": stated.number("beta_fast", 32.0, above=beta_slow),
        "beta_slow": beta_slow,
        "attention_factor": attention,
        "truncate": stated.flag("truncate", True),
    }


def _mscale(factor: float, weight: float) -> float:
    """YaRN's magnitude correction 0.1 * weight * ln(factor) + 1."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0
