"""A model folder's config.json as the configuration of the core.

Owns: the supported families with their defaults, and every rule by which a Hugging Face
configuration becomes the dict that `_core.Model` takes. A family is a row of `FAMILIES`; nothing
here branches on a family's name. Does not look at weights: their shapes are checked against the
result in weights.py.

Rules where files may contradict themselves; each case is a warning:
- `rope_parameters` (new spelling) wins over `rope_theta`, `rope_scaling`, `rope_local_base_freq`
  (old spelling); inside one dict `rope_type` wins over `type`.
- `dtype` wins over `torch_dtype`.
- YaRN's explicit `factor` wins over max_position_embeddings / original_max_position_embeddings.
A key that is absent takes the family's class default; EOS ids come from generation_config.json
when it states them, else from config.json.
"""

import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcomm.errors import FormatError, UnsupportedError
from kvcomm.fields import AnyPath, Fields, quoted, read_json, shown
from kvcomm.rope import FULL, SLIDING, read_ropes


@dataclass(frozen=True)
class Family:
    """Class defaults of one architecture, under the names of config.json, and what sets it apart.

    attention_biases: which projections have a bias: "flag" (all four when attention_bias),
    "qkv" (always those three) or "none". windows: which layers see a window only: "none", "all"
    (when sliding_window is set), "after" (from max_window_layers on, when use_sliding_window)
    or "pattern" (all but every sliding_window_pattern-th).
    """

    architectures: tuple[str, ...]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None
    max_position_embeddings: int
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    activation_key: str = "hidden_act"
    activation: str = "silu"
    attention_biases: str = "none"
    mlp_bias_flag: bool = False
    qk_norm: bool = False
    windows: str = "none"
    sliding_window: int | None = None
    rope_theta: float = 10000.0
    local_rope_theta: float | None = None  # set: windowed layers have a rope of their own
    gemma_norms: bool = False  # post-norms, norm weights stored minus one, scaled embeddings


_QWEN = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "windows": "after",
    "sliding_window": 4096,
}
_GEMMA3 = Family(
    architectures=(
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "Gemma3TextModel",
        "Gemma3Model",
    ),
    vocab_size=262208,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=131072,
    head_dim=256,
    tie_word_embeddings=True,
    activation_key="hidden_activation",
    activation="gelu_pytorch_tanh",
    attention_biases="flag",
    qk_norm=True,
    windows="pattern",
    sliding_window=4096,
    rope_theta=1e6,
    local_rope_theta=1e4,
    gemma_norms=True,
)

#: Every supported model_type. Llama covers Llama 2 and 3.x, SmolLM2 and Falcon3.
FAMILIES: dict[str, Family] = {
    "llama": Family(
        architectures=("LlamaForCausalLM", "LlamaModel"),
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=None,
        max_position_embeddings=2048,
        attention_biases="flag",
        mlp_bias_flag=True,
    ),
    "mistral": Family(
        architectures=("MistralForCausalLM", "MistralModel"),
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        windows="all",
        sliding_window=4096,
    ),
    "qwen2": Family(
        architectures=("Qwen2ForCausalLM", "Qwen2Model"), attention_biases="qkv", **_QWEN
    ),
    "qwen3": Family(
        architectures=("Qwen3ForCausalLM", "Qwen3Model"),
        attention_biases="flag",
        head_dim=128,
        qk_norm=True,
        **_QWEN,
    ),
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
}

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "auto": None}

#: Keys that change the arithmetic in a way that is not handled, with the values that do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (None, False),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
}


@dataclass(frozen=True)
class Config:
    """What a folder's config.json says.

    Attributes
    ----------
    family
        Key of `FAMILIES` ("gemma3" is reported as "gemma3_text").
    core
        The configuration for `_core.Model`: the fields of kvc_config by name.
    max_position
        Number of positions the model was made for (max_position_embeddings).
    eos_ids
        Stop ids that the files state; empty when they state none; None when they say nothing.
    tie
        Whether the output head is the embedding matrix.
    dtype
        "f32", "f16", "bf16": the type the file names; None when it names none or "auto".
    raw
        The parsed config.json.
    """

    family: str
    core: dict[str, Any]
    max_position: int
    eos_ids: tuple[int, ...] | None
    tie: bool
    dtype: str | None
    raw: dict[str, Any] = field(repr=False)


def read_config(folder: AnyPath) -> Config:
    """Read config.json (and the EOS ids of generation_config.json) of a model folder.

    Raises
    ------
    OSError
        config.json is missing or cannot be read.
    FormatError
        A file is not JSON, or a field has a wrong type or an impossible value.
    UnsupportedError
        The architecture, rope kind, activation or another named feature is not handled.
    """
    path = Path(os.fsdecode(folder)) / "config.json"
    return parse_config(read_json(path), _stated_eos(path.parent), where=shown(path))


def parse_config(
    raw: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    *,
    where: str = "config.json",
) -> Config:
    """A configuration from the parsed config.json and, if any, generation_config.json."""
    name, values = _family_of(raw, where)
    family = FAMILIES[name]
    fields = Fields(values, where)
    _refuse_unhandled(raw, values, where)

    dim = fields.integer("hidden_size", family.hidden_size)
    n_layers = fields.integer("num_hidden_layers", family.num_hidden_layers)
    n_heads = fields.integer("num_attention_heads", family.num_attention_heads)
    n_kv_heads = _kv_heads(fields, family, n_heads)
    head_dim = _head_dim(fields, family, dim, n_heads)
    max_position = fields.integer("max_position_embeddings", family.max_position_embeddings)
    window, windowed = _windows(fields, family, n_layers)
    ropes = read_ropes(fields, family.rope_theta, family.local_rope_theta, head_dim, max_position)
    two_ropes = ropes[0] != ropes[1] and any(windowed)
    tie = _tie(raw, values, family, where)
    attention_bias = family.attention_biases == "flag" and fields.flag("attention_bias", False)
    scale = fields.number("query_pre_attn_scalar", 256) if family.gemma_norms else head_dim
    core = {
        "n_layers": n_layers,
        "dim": dim,
        "hidden_dim": fields.integer("intermediate_size", family.intermediate_size),
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "head_dim": head_dim,
        "vocab_size": fields.integer("vocab_size", family.vocab_size),
        "norm_eps": fields.number("rms_norm_eps", family.rms_norm_eps),
        "norm_offset": 1.0 if family.gemma_norms else 0.0,
        "embed_scale": math.sqrt(dim) if family.gemma_norms else 1.0,
        "attention_scale": 1.0 / math.sqrt(scale),
        "activation": _activation(fields, family),
        "qkv_bias": family.attention_biases == "qkv" or attention_bias,
        "o_bias": attention_bias,
        "mlp_bias": family.mlp_bias_flag and fields.flag("mlp_bias", False),
        "qk_norm": family.qk_norm,
        "post_norms": family.gemma_norms,
        "tied_head": tie,
        "window": window,
        "windowed": windowed,
        "rope_of_layer": [int(two_ropes and local) for local in windowed],
        "rope": list(ropes if two_ropes else ropes[:1]),
    }
    return Config(
        family="gemma3_text" if name == "gemma3" else name,
        core=core,
        max_position=max_position,
        eos_ids=_eos_ids(generation, values, raw, where),
        tie=tie,
        dtype=_dtype(raw, values, where),
        raw=dict(raw),
    )


def _family_of(raw: Mapping[str, Any], where: str) -> tuple[str, Mapping[str, Any]]:
    """Family name and the fields of its text model (those of text_config where there is one)."""
    supported = ", ".join(sorted(FAMILIES))
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(a, str) for a in architectures):
        raise FormatError(f"{where}: architectures is {quoted(architectures)}, expected names")
    name = raw.get("model_type")
    if name is None:  # rare; the architecture then tells the family
        by_architecture = {a: key for key, row in FAMILIES.items() for a in row.architectures}
        name = next((by_architecture[a] for a in architectures if a in by_architecture), None)
    if name not in FAMILIES:
        found = architectures[0] if architectures else "no architecture named"
        raise UnsupportedError(
            f"{where}: model_type {quoted(name)} ({found}) is not supported; supported: {supported}"
        )
    strange = [a for a in architectures if a not in FAMILIES[name].architectures]
    if strange:
        raise UnsupportedError(
            f"{where}: architecture {strange[0]} is not supported with model_type {name};"
            f" supported: {', '.join(FAMILIES[name].architectures)}"
        )
    nested = Fields(raw, where).object("text_config") if name == "gemma3" else None
    if nested is None:
        return name, raw
    if nested.get("model_type", "gemma3_text") != "gemma3_text":
        raise UnsupportedError(
            f"{where}: text_config has model_type {quoted(nested['model_type'])}, expected"
            " gemma3_text"
        )
    return name, nested


def _refuse_unhandled(raw: Mapping[str, Any], values: Mapping[str, Any], where: str) -> None:
    quantised = raw.get("quantization_config", values.get("quantization_config"))
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise UnsupportedError(
            f"{where}: quantised checkpoint not supported (quantization_config {quoted(method)});"
            " supported weights: F32, F16, BF16"
        )
    for key, neutral in _NEUTRAL.items():
        if values.get(key) not in neutral:
            raise UnsupportedError(f"{where}: {key} {quoted(values[key])} is not supported")


def _kv_heads(fields: Fields, family: Family, n_heads: int) -> int:
    """null means one per query head, an absent key the class default."""
    default = family.num_key_value_heads
    present = "num_key_value_heads" in fields.values
    if (fields.values["num_key_value_heads"] if present else default) is None:
        return n_heads
    count = fields.integer("num_key_value_heads", default)
    if n_heads % count:
        note = "" if present else " (class default, the key is absent)"
        raise FormatError(
            f"{fields.where}: num_attention_heads {n_heads} is not a multiple of"
            f" num_key_value_heads {count}{note}"
        )
    return count


def _head_dim(fields: Fields, family: Family, dim: int, n_heads: int) -> int:
    """null means hidden_size / num_attention_heads, an absent key the class default."""
    if fields.values.get("head_dim", family.head_dim) is not None:
        return fields.integer("head_dim", family.head_dim)
    if dim % n_heads:
        raise FormatError(
            f"{fields.where}: hidden_size {dim} is not a multiple of num_attention_heads"
            f" {n_heads} and head_dim is not given"
        )
    return dim // n_heads


def _activation(fields: Fields, family: Family) -> str:
    name = fields.values.get(family.activation_key)
    name = family.activation if name is None else name
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise UnsupportedError(
            f"{fields.where}: {family.activation_key} {quoted(name)} is not supported;"
            f" supported: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _tie(raw: Mapping[str, Any], values: Mapping[str, Any], family: Family, where: str) -> bool:
    """The flag where it is stated: the top level first, then the nested text configuration."""
    nested = raw.get("text_config")
    inner = Fields(nested if isinstance(nested, dict) else values, where)
    return Fields(raw, where).flag(
        "tie_word_embeddings", inner.flag("tie_word_embeddings", family.tie_word_embeddings)
    )


def _dtype(raw: Mapping[str, Any], values: Mapping[str, Any], where: str) -> str | None:
    found = {}
    for key in ("dtype", "torch_dtype"):
        name = raw.get(key, values.get(key))
        if name is None:
            continue
        plain = name.removeprefix("torch.") if isinstance(name, str) else name
        if not isinstance(plain, str) or plain not in _DTYPES:
            raise UnsupportedError(
                f"{where}: {key} {quoted(name)} is not supported; supported: {', '.join(_DTYPES)}"
            )
        found[key] = _DTYPES[plain]
    if len(set(found.values())) > 1:
        warnings.warn(f"{where}: dtype and torch_dtype disagree; dtype is used", stacklevel=2)
    return next(iter(found.values()), None)


def _stated_eos(folder: Path) -> Mapping[str, Any] | None:
    path = folder / "generation_config.json"
    return read_json(path) if path.exists() else None


def _eos_ids(
    generation: Mapping[str, Any] | None,
    values: Mapping[str, Any],
    raw: Mapping[str, Any],
    where: str,
) -> tuple[int, ...] | None:
    sources = [source for source in (generation, raw, values) if source is not None]
    stated = next((source for source in sources if "eos_token_id" in source), None)
    if stated is None:
        return None
    found = stated["eos_token_id"]
    ids = [] if found is None else found if isinstance(found, list) else [found]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            file = where.replace("config.json", "generation_config.json")
            raise FormatError(
                f"{file if stated is generation else where}: eos_token_id is {quoted(found)},"
                " expected ids"
            )
    return tuple(dict.fromkeys(ids))


def _windows(fields: Fields, family: Family, n_layers: int) -> tuple[int, list[bool]]:
    """(window, per layer whether it has the window); window 0 when no layer has one."""
    window = fields.values.get("sliding_window", family.sliding_window)
    if family.windows == "none":
        rule = [False] * n_layers
        if window is not None:
            warnings.warn(
                f"{fields.where}: sliding_window is not used by this architecture", stacklevel=2
            )
    elif family.windows == "all":
        rule = [window is not None] * n_layers
    elif family.windows == "after":
        used = fields.flag("use_sliding_window", False) and window is not None
        first = fields.integer("max_window_layers", 28, low=0)
        rule = [used and layer >= first for layer in range(n_layers)]
    else:
        spelling = "_sliding_window_pattern"  # as newer files write it
        key = spelling if spelling in fields.values else spelling[1:]
        every = fields.integer(key, 6)
        rule = [(layer + 1) % every != 0 for layer in range(n_layers)]

    windowed = _layer_types(fields, n_layers, rule)
    if family.windows in ("none", "all") and windowed != rule:
        raise UnsupportedError(
            f"{fields.where}: layer_types asks for windows in other layers than this"
            " architecture has"
        )
    if not any(windowed):
        return 0, windowed
    if window is None or (
        family.windows == "after" and not fields.flag("use_sliding_window", False)
    ):
        raise FormatError(
            f"{fields.where}: layer_types has {SLIDING} layers but sliding_window is off"
        )
    return fields.integer("sliding_window", family.sliding_window), windowed


def _layer_types(fields: Fields, n_layers: int, rule: list[bool]) -> list[bool]:
    """The explicit list where there is one, else the family's rule."""
    types = fields.values.get("layer_types")
    if types is None:
        return rule
    if not isinstance(types, list) or len(types) != n_layers:
        count = f"{len(types)} entries" if isinstance(types, list) else quoted(types)
        raise FormatError(
            f"{fields.where}: layer_types has {count}, expected {n_layers} (num_hidden_layers)"
        )
    for kind in types:
        if kind not in (FULL, SLIDING):
            raise UnsupportedError(
                f"{fields.where}: layer type {quoted(kind)} is not supported;"
                f" supported: {FULL}, {SLIDING}"
            )
    return [kind == SLIDING for kind in types]
