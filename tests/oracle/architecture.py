"""What a config.json says, with every default of its family filled in.

Owns the reading of sizes, windows and rope of the families llama, mistral, qwen2, qwen3 and gemma3
(text). Does not judge a configuration: faulty ones are the product's business to refuse.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Values that a family takes when config.json does not name the key.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "gemma3_text": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True)
class Architecture:
    """Sizes and per-layer rules of one model."""

    n_layers: int
    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str  # "silu" or "gelu_pytorch_tanh"
    attention_scale: float  # times q . k
    embedding_scale: float
    one_plus_norms: bool  # norms multiply by 1 + w
    post_norms: bool  # norms after attention and after the MLP, before the residual sum
    tied: bool  # the head is the embedding table
    windows: tuple[int | None, ...]  # per layer: a key is seen when q_pos - k_pos < window
    ropes: tuple[Mapping[str, Any], ...]  # per layer: rope_type, rope_theta and its fields


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a config.json; KeyError for a family it does not know."""
    outer = config
    if "text_config" in config:
        config = {"tie_word_embeddings": outer.get("tie_word_embeddings", True)}
        config |= outer["text_config"]
    family = {"gemma3": "gemma3_text"}.get(config["model_type"], config["model_type"])
    config = DEFAULTS[family] | dict(config)
    gemma = family == "gemma3_text"

    n_layers, n_heads = config["num_hidden_layers"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // n_heads
    windowed = _windowed_layers(family, config)
    scalar = config["query_pre_attn_scalar"] if gemma else head_dim
    return Architecture(
        n_layers=n_layers,
        dim=config["hidden_size"],
        n_heads=n_heads,
        n_kv_heads=config.get("num_key_value_heads") or n_heads,
        head_dim=head_dim,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        activation=config["hidden_activation"] if gemma else config.get("hidden_act", "silu"),
        attention_scale=scalar**-0.5,
        embedding_scale=config["hidden_size"] ** 0.5 if gemma else 1.0,
        one_plus_norms=gemma,
        post_norms=gemma,
        tied=config.get("tie_word_embeddings", False),
        windows=tuple(config["sliding_window"] if w else None for w in windowed),
        ropes=tuple(_rope(config, gemma, local=w) for w in windowed),
    )


def _windowed_layers(family: str, config: Mapping[str, Any]) -> list[bool]:
    """Which layers see a window only."""
    n_layers = config["num_hidden_layers"]
    if family == "mistral":
        return [config["sliding_window"] is not None] * n_layers
    if family == "llama":
        return [False] * n_layers
    qwen = family in ("qwen2", "qwen3")
    if qwen and not config.get("use_sliding_window", False):
        return [False] * n_layers
    if config.get("layer_types"):
        return [kind == "sliding_attention" for kind in config["layer_types"]]
    if qwen:
        return [layer >= config["max_window_layers"] for layer in range(n_layers)]
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    return [(layer + 1) % pattern != 0 for layer in range(n_layers)]


def _rope(config: Mapping[str, Any], gemma: bool, *, local: bool) -> dict[str, Any]:
    """Rope of a layer from rope_parameters (newer) or rope_theta and rope_scaling (older)."""
    stated = config.get("rope_parameters") or {}
    kind = "sliding_attention" if local else "full_attention"
    if kind in stated:
        rope = dict(stated[kind])
    elif gemma and local:
        rope = {}  # the scaling of a flat configuration belongs to the global layers
    else:
        rope = dict(config.get("rope_scaling") or {}) | dict(stated)
    base = config["rope_local_base_freq"] if gemma and local else config.get("rope_theta", 10000.0)
    rope.setdefault("rope_theta", base)
    rope.setdefault("rope_type", rope.get("type", "default"))
    if config.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    if rope.get("original_max_position_embeddings") is None:
        rope["original_max_position_embeddings"] = config.get("max_position_embeddings")
    return rope
