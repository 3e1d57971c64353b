"""Which tensor of a Hugging Face checkpoint is which weight of the core.

Owns: the names and shapes of every tensor that a configuration wants, the prefixes under which
they are found, and the refusal of checkpoints that do not fit: missing tensors, tensors of layers
or biases that the configuration does not have, wrong shapes, quantised weights. Reads no file.

What is not wanted and lies outside the layers (a vision tower, say), holds at most one element, or
is a rotary buffer, is ignored and listed in `Plan.unused`.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcomm.config import Config
from kvcomm.errors import FormatError, MismatchError, UnsupportedError
from kvcomm.fields import shown
from kvcomm.weights import TYPES, Tensor, Weights

#: Where the decoder may stand in a checkpoint, and where its head.
_PREFIXES = (
    "model.",
    "",
    "language_model.model.",
    "model.language_model.",
    "model.language_model.model.",
    "language_model.",
)
_HEADS = (
    "lm_head.weight",
    "language_model.lm_head.weight",
    "model.language_model.lm_head.weight",
    "model.lm_head.weight",
)

#: (weight of the core, name in a layer, sizes, part of the configuration that asks for it)
_LAYER_ROWS: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    ("attn_norm", "input_layernorm.weight", ("dim",), "always"),
    ("q", "self_attn.q_proj.weight", ("q_dim", "dim"), "always"),
    ("k", "self_attn.k_proj.weight", ("kv_dim", "dim"), "always"),
    ("v", "self_attn.v_proj.weight", ("kv_dim", "dim"), "always"),
    ("o", "self_attn.o_proj.weight", ("dim", "q_dim"), "always"),
    ("q_bias", "self_attn.q_proj.bias", ("q_dim",), "qkv_bias"),
    ("k_bias", "self_attn.k_proj.bias", ("kv_dim",), "qkv_bias"),
    ("v_bias", "self_attn.v_proj.bias", ("kv_dim",), "qkv_bias"),
    ("o_bias", "self_attn.o_proj.bias", ("dim",), "o_bias"),
    ("q_norm", "self_attn.q_norm.weight", ("head_dim",), "qk_norm"),
    ("k_norm", "self_attn.k_norm.weight", ("head_dim",), "qk_norm"),
    ("mlp_norm", "post_attention_layernorm.weight", ("dim",), "pre_norms_only"),
    ("post_attn_norm", "post_attention_layernorm.weight", ("dim",), "post_norms"),
    ("mlp_norm", "pre_feedforward_layernorm.weight", ("dim",), "post_norms"),
    ("post_mlp_norm", "post_feedforward_layernorm.weight", ("dim",), "post_norms"),
    ("gate", "mlp.gate_proj.weight", ("hidden_dim", "dim"), "always"),
    ("up", "mlp.up_proj.weight", ("hidden_dim", "dim"), "always"),
    ("down", "mlp.down_proj.weight", ("dim", "hidden_dim"), "always"),
    ("gate_bias", "mlp.gate_proj.bias", ("hidden_dim",), "mlp_bias"),
    ("up_bias", "mlp.up_proj.bias", ("hidden_dim",), "mlp_bias"),
    ("down_bias", "mlp.down_proj.bias", ("dim",), "mlp_bias"),
)

_QUANTISED_ENDINGS = (
    ".qweight",
    ".qzeros",
    ".scales",
    ".g_idx",
    ".SCB",
    ".weight_format",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".input_scale",
    ".absmax",
    ".quant_map",
)
_BUFFERS = (".rotary_emb.inv_freq", ".self_attn.masked_bias")


@dataclass(frozen=True)
class Item:
    """One tensor to load: the core's name of it, its layer (0 outside the layers), and where."""

    weight: str
    layer: int
    tensor: Tensor


@dataclass(frozen=True)
class Plan:
    """What to load from a checkpoint, in the order of the files.

    tied: the output head is the embedding matrix. unused: names that are left out.
    """

    items: tuple[Item, ...]
    tied: bool
    unused: tuple[str, ...]


def match(weights: Weights, config: Config) -> Plan:
    """Find every weight of the configuration in a checkpoint.

    A head that is stored although tie_word_embeddings is true is dropped when it equals the
    embedding; when it differs it is used, with a warning.

    Raises
    ------
    FormatError
        Tensors are missing, or a weight is there twice, under two of the known prefixes.
    MismatchError
        A tensor has another shape than the configuration says, or the layers hold tensors that
        the configuration has no place for.
    UnsupportedError
        The checkpoint is quantised by others than `kvcomm convert`, or a tensor is not F32, F16,
        BF16 or blocks.
    """
    where = shown(weights.folder)
    _refuse_quantised(weights, where)
    wanted = _wanted(config.core)
    prefix = max(_PREFIXES, key=lambda p: sum(p + name in weights for name, _ in wanted.values()))
    heads = [name for name in _HEADS if name in weights]
    if len(heads) > 1:
        raise FormatError(f"{where}: {heads[0]} and {heads[1]} are the same weight")
    head = heads[0] if heads else None
    found = {key: prefix + name for key, (name, _) in wanted.items()}
    shapes = {key: shape for key, (_, shape) in wanted.items()}
    missing = [name for name in found.values() if name not in weights]
    if head is None and not config.tie:
        missing.append("lm_head.weight")
    if missing:
        unknown = set(weights) - {*found.values(), head}
        raise FormatError(_missing_message(missing, unknown, where))

    tied = head is None or (config.tie and _same(weights, head, found["embed", 0]))
    if head is not None and not tied:
        found["head", 0], shapes["head", 0] = head, shapes["embed", 0]
        if config.tie:
            warnings.warn(
                f"{where}: {head} differs from the embedding although tie_word_embeddings is"
                " true; it is used",
                stacklevel=2,
            )
    for key, name in found.items():
        _check_tensor(weights.tensors[name], shapes[key], config.core)
    unused = sorted(set(weights) - set(found.values()))
    _refuse_duplicates(unused, prefix, {name for name, _ in wanted.values()}, where)
    for name in unused:
        _check_unused(weights.tensors[name], prefix, config)
    items = [Item(weight, layer, weights.tensors[n]) for (weight, layer), n in found.items()]
    items.sort(key=lambda item: (item.tensor.file, item.tensor.begin))
    return Plan(tuple(items), tied, tuple(unused))


def _sizes(core: dict[str, Any]) -> dict[str, int]:
    plain = {key: core[key] for key in ("dim", "hidden_dim", "head_dim", "vocab_size")}
    return plain | {
        "q_dim": core["n_heads"] * core["head_dim"],
        "kv_dim": core["n_kv_heads"] * core["head_dim"],
    }


def _wanted(core: dict[str, Any]) -> dict[tuple[str, int], tuple[str, tuple[int, ...]]]:
    """(weight, layer) -> (name without prefix, shape) of all but the head."""
    sizes = _sizes(core)
    asked = core | {"always": True, "pre_norms_only": not core["post_norms"]}
    wanted: dict[tuple[str, int], tuple[str, tuple[int, ...]]] = {
        ("embed", 0): ("embed_tokens.weight", (sizes["vocab_size"], sizes["dim"])),
        ("final_norm", 0): ("norm.weight", (sizes["dim"],)),
    }
    for layer in range(core["n_layers"]):
        for weight, name, dims, condition in _LAYER_ROWS:
            if asked[condition]:
                shape = tuple(sizes[dim] for dim in dims)
                wanted[weight, layer] = (f"layers.{layer}.{name}", shape)
    return wanted


def _refuse_quantised(weights: Weights, where: str) -> None:
    for name, tensor in weights.tensors.items():
        named = name.endswith(_QUANTISED_ENDINGS) or ".quant_state." in name
        if named or tensor.dtype.startswith("F8_"):
            raise UnsupportedError(
                f"{where}: quantised checkpoint not supported: {name} ({tensor.dtype});"
                f" supported: {', '.join(TYPES)}"
            )


def _refuse_duplicates(unused: list[str], prefix: str, wanted: set[str], where: str) -> None:
    """Which of two copies of a weight is meant cannot be known: they may differ."""
    for name in unused:
        for other in _PREFIXES:
            plain = name.removeprefix(other)
            if name == other + plain and plain in wanted:
                raise FormatError(f"{where}: {prefix}{plain} and {name} are the same weight")


def _missing_message(missing: list[str], unknown: set[str], where: str) -> str:
    def some(names: list[str]) -> str:
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    message = f"{where}: missing {some(missing)}"
    if missing == ["lm_head.weight"]:
        message += " (tie_word_embeddings is false)"
    return message + (f"; not known: {some(sorted(unknown))}" if unknown else "")


def _same(weights: Weights, head: str, embed: str) -> bool:
    a, b = weights.tensors[head], weights.tensors[embed]
    if (a.dtype, a.shape) != (b.dtype, b.shape) or a.dtype not in TYPES:
        return False
    bits = f"<u{weights.array(head).itemsize}"  # as bits: NaN is found later, with its name
    return np.array_equal(weights.array(head).view(bits), weights.array(embed).view(bits))


def _check_tensor(tensor: Tensor, shape: tuple[int, ...], core: dict[str, Any]) -> None:
    where = f"{shown(tensor.file)}: {tensor.name}"
    if tensor.shape != shape:
        heads = (
            f"{core['n_heads']} heads, {core['n_kv_heads']} kv heads, head_dim {core['head_dim']},"
            f" hidden_size {core['dim']}"
        )
        raise MismatchError(
            f"{where}: shape {list(tensor.shape)}, expected {list(shape)} by config.json ({heads})"
        )
    if tensor.dtype not in TYPES:
        raise UnsupportedError(f"{where}: {tensor.dtype}; supported: {', '.join(TYPES)}")


def _check_unused(tensor: Tensor, prefix: str, config: Config) -> None:
    """Refuse a tensor of the decoder's layers that would be dropped in silence."""
    harmless = math.prod(tensor.shape) <= 1 or tensor.name.endswith(_BUFFERS)
    if tensor.name.startswith(prefix + "layers.") and not harmless:
        raise MismatchError(
            f"{shown(tensor.file)}: {tensor.name} has no place in a {config.family} of this"
            f" config.json ({config.core['n_layers']} layers)"
        )
