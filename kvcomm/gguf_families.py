"""What the GGUF architectures become: their configuration, and the names of their tensors.

Owns: which architectures can be expressed, the config.json and generation_config.json that
follow from a file's metadata, and for every tensor of the folder where it comes from. Nothing
here reads or writes a file; convert.py does.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcomm.errors import FormatError, UnsupportedError
from kvcomm.gguf_vocabulary import CONTROL


@dataclass(frozen=True)
class Family:
    """What one GGUF architecture becomes.

    `permuted`: q and k lie in the file with their rotary halves interleaved.
    `one_plus`: norm weights lie in the file with the one of (1 + w) already added.
    """

    model_type: str
    architecture: str
    activation: str = "silu"
    permuted: bool = False
    one_plus: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    ends: tuple[str, ...] = ()


FAMILIES = {
    "llama": Family(
        "llama",
        "LlamaForCausalLM",
        permuted=True,
        ends=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    ),
    "qwen2": Family(
        "qwen2", "Qwen2ForCausalLM", qkv_bias=True, ends=("<|im_end|>", "<|endoftext|>")
    ),
    "qwen3": Family(
        "qwen3", "Qwen3ForCausalLM", qk_norm=True, ends=("<|im_end|>", "<|endoftext|>")
    ),
    "gemma3": Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        activation="gelu_pytorch_tanh",
        one_plus=True,
        qk_norm=True,
        post_norms=True,
        ends=("<eos>", "<end_of_turn>"),
    ),
}
"""GGUF architecture -> family. `ends` are the texts that end a turn, where the vocabulary has
them as control tokens; they join the file's own EOS in generation_config.json."""

# Fields whose presence with a value that matters means a model that is not one of FAMILIES.
_REFUSED_FIELDS = (
    "expert_count",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "residual_scale",
    "embedding_scale",
    "logit_scale",
)

_CHUNK = 1 << 20  # values

_GEMMA3_PATTERN = 6
_GEMMA3_LOCAL_THETA = 10000.0
_GEMMA3_27B_LAYERS = 62


@dataclass(frozen=True)
class Tensor:
    """One tensor of the folder and where it comes from."""

    source: str
    shape: tuple[int, ...]
    heads: int = 0  # above 0: rows are un-permuted with this many heads
    minus_one: bool = False


def dequantize(source: Any) -> np.ndarray:
    """The values of a tensor of the file in f32."""
    import gguf

    values = np.empty([int(n) for n in reversed(source.shape)], np.float32)
    # Some rows at a time: the library works with several copies of what it is given.
    n_rows = max(1, _CHUNK * len(values) // values.size) if values.size else 1
    for i in range(0, len(values), n_rows):
        values[i : i + n_rows] = gguf.dequantize(source.data[i : i + n_rows], source.tensor_type)
    return values


# ---- configuration ---------------------------------------------------------------------------


def family_of(fields: Mapping[str, Any]) -> Family:
    """The family that a file's metadata names.

    Raises
    ------
    FormatError
        The metadata names none.
    UnsupportedError
        An architecture that is not in FAMILIES, or one of them with something added.
    """
    name = fields.get("general.architecture")
    if name is None:
        raise FormatError("general.architecture: missing from the metadata")
    if name not in FAMILIES:
        raise UnsupportedError(
            f"architecture {name!r} is not supported; known are {', '.join(FAMILIES)}"
        )
    for field in _REFUSED_FIELDS:
        value = fields.get(f"{name}.{field}")
        if value:
            raise UnsupportedError(f"{name}.{field} = {value} is not supported")
    return FAMILIES[name]


def config_of(
    family: Family, fields: Mapping[str, Any], sources: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of config.json, in the keys that both old and new transformers read."""
    arch = fields["general.architecture"]

    def get(name: str, default: Any = None) -> Any:
        value = fields.get(f"{arch}.{name}", default)
        if value is None:
            raise FormatError(f"{arch}.{name}: missing from the metadata")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UnsupportedError(f"{arch}.{name}: differs between layers")
            value = value[0]
        return value

    hidden, heads = get("embedding_length"), get("attention.head_count")
    kv_heads = get("attention.head_count_kv", heads)
    for name, value in (("head_count", heads), ("head_count_kv", kv_heads)):
        if value < 1 or heads % value:
            raise FormatError(f"{arch}.attention.{name}: {value} does not fit {heads} heads")
    head_dim = get("attention.key_length", hidden // heads)
    value_dim = get("attention.value_length", head_dim)
    rotary = get("rope.dimension_count", head_dim)
    if value_dim != head_dim:
        raise UnsupportedError(f"head size {head_dim} of keys differs from {value_dim} of values")
    if rotary != head_dim:
        raise UnsupportedError(f"rope over {rotary} of {head_dim} dimensions is not supported")
    if "token_embd.weight" not in sources:
        raise FormatError("tensor token_embd.weight is missing")
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": int(sources["token_embd.weight"].shape[-1]),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": _shortest(get("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(get("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(arch, fields, sources, head_dim),
        "tie_word_embeddings": "output.weight" not in sources,
        "use_cache": True,
        "attention_dropout": 0.0,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
    }
    if family.model_type == "gemma3_text":
        config.update(_gemma3_config(arch, fields, config))
        return config
    config["hidden_act"] = family.activation
    window = fields.get(f"{arch}.attention.sliding_window") or None
    if family.model_type == "llama":
        if window:
            config.update(
                model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=window
            )
        else:
            config["attention_bias"] = "blk.0.attn_q.bias" in sources
            config["mlp_bias"] = "blk.0.ffn_gate.bias" in sources
    else:
        if window and window < config["max_position_embeddings"]:
            raise UnsupportedError(f"{arch}.attention.sliding_window = {window} is not supported")
        config["use_sliding_window"] = False
        if family.model_type == "qwen3":
            config["attention_bias"] = False
    return config


def _gemma3_config(
    arch: str, fields: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any]:
    n_layers = config["num_hidden_layers"]
    window = fields.get(f"{arch}.attention.sliding_window")
    if not window:
        raise FormatError(f"{arch}.attention.sliding_window: missing from the metadata")
    pattern = fields.get(f"{arch}.attention.sliding_window_pattern", _GEMMA3_PATTERN)
    # A list says for each layer whether it is a local one; a number, that every n-th is not.
    local = pattern if isinstance(pattern, list) else [(i + 1) % pattern for i in range(n_layers)]
    if len(local) != n_layers:
        raise FormatError(
            f"{arch}.attention.sliding_window_pattern: {len(local)} entries for {n_layers} layers"
        )
    scalar = config["head_dim"]
    if n_layers == _GEMMA3_27B_LAYERS:
        # The largest model divides by the width per head, which is not its head size; no
        # field of the file says so.
        scalar = config["hidden_size"] // config["num_attention_heads"]
    theta = fields.get(f"{arch}.rope.freq_base_swa", _GEMMA3_LOCAL_THETA)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": window,
        "layer_types": ["sliding_attention" if x else "full_attention" for x in local],
        "rope_local_base_freq": _shortest(theta),
        "query_pre_attn_scalar": scalar,
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


def _shortest(value: float) -> float:
    """The shortest decimal number that is the same f32: 1e-05, not 9.999999747e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(
    arch: str, fields: Mapping[str, Any], sources: Mapping[str, Any], head_dim: int
) -> dict[str, Any] | None:
    prefix = f"{arch}.rope.scaling."
    kind = fields.get(prefix + "type", "linear" if prefix + "factor" in fields else "none")
    factor = fields.get(prefix + "factor", fields.get(f"{arch}.rope.scale_linear", 1.0))
    if f"{arch}.rope.scale_linear" in fields and kind == "none":
        kind = "linear"
    for name in sources:
        if name.startswith("rope_factors_"):
            raise UnsupportedError(f"tensor {name}: this rope scaling (longrope) is not supported")
    if "rope_freqs.weight" in sources:
        if kind not in ("none", "llama3"):
            raise UnsupportedError(f"rope_freqs.weight together with rope scaling {kind!r}")
        return _llama3_scaling(arch, fields, sources["rope_freqs.weight"], head_dim)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": _shortest(factor)}
    if kind != "yarn":
        raise UnsupportedError(f"rope scaling {kind!r} is not supported; known are linear, yarn")
    original = fields.get(prefix + "original_context_length")
    if original is None:
        raise FormatError(f"{prefix}original_context_length: missing from the metadata")
    scaling = {
        "rope_type": "yarn",
        "factor": _shortest(factor),
        "original_max_position_embeddings": original,
    }
    if fields.get(prefix + "yarn_log_multiplier"):
        raise UnsupportedError(f"{prefix}yarn_log_multiplier is not supported")
    if (attention := fields.get(prefix + "attn_factor")) is not None:
        # The field multiplies the factor that yarn derives itself.
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    for name in ("beta_fast", "beta_slow"):
        if (beta := fields.get(f"{prefix}yarn_{name}")) is not None:
            scaling[name] = _shortest(beta)
    return scaling


def _llama3_scaling(
    arch: str, fields: Mapping[str, Any], tensor: Any, head_dim: int
) -> dict[str, Any] | None:
    """The llama3 parameters behind a table of divisors, one per frequency [head_dim / 2].

    The file holds only the table. The parameters are tried in the values that are in use, and
    taken if they give the table back.
    """
    table = dequantize(tensor).astype(np.float64).reshape(-1)
    if table.shape != (head_dim // 2,):
        raise FormatError(f"rope_freqs.weight: {table.size} values, expected {head_dim // 2}")
    if np.all(table == 1.0):
        return None
    theta = fields.get(f"{arch}.rope.freq_base", 10000.0)
    freqs = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    factor, low, high = float(table.max()), 1.0, 4.0
    stated = fields.get(f"{arch}.rope.scaling.original_context_length")
    for original in (stated,) if stated else (8192, 4096, 2048, 16384, 32768):
        turns = original * freqs / (2 * math.pi)
        smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
        if np.allclose(1.0 / ((1.0 - smooth) / factor + smooth), table, rtol=1e-4, atol=0.0):
            return {
                "rope_type": "llama3",
                "factor": _shortest(factor),
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise UnsupportedError("rope_freqs.weight: no llama3 parameters give this table")


def generation_config_of(
    family: Family, fields: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any]:
    tokens = fields.get("tokenizer.ggml.tokens", [])
    types = fields.get("tokenizer.ggml.token_type", [])
    ends = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    controls = {tokens[i]: i for i, kind in enumerate(types) if kind == CONTROL}
    ends += [controls.get(text) for text in family.ends]
    unique = list(dict.fromkeys(i for i in ends if i is not None))
    content = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": unique[0] if len(unique) == 1 else unique or None,
        "pad_token_id": config["pad_token_id"],
        "do_sample": False,
    }
    return {name: value for name, value in content.items() if value is not None}


# ---- tensors ---------------------------------------------------------------------------------


def tensors_of(
    family: Family, config: Mapping[str, Any], sources: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Every tensor the folder must hold, by its name there."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    inner, dim = config["intermediate_size"], config["head_dim"]
    q, kv = heads * dim, kv_heads * dim
    q_heads, k_heads = (heads, kv_heads) if family.permuted else (0, 0)
    # our suffix, file suffix, shape, heads of a permutation, whether it is a norm
    rows: list[tuple[str, str, tuple[int, ...], int, bool]] = [
        ("input_layernorm.weight", "attn_norm.weight", (hidden,), 0, True),
        ("self_attn.q_proj.weight", "attn_q.weight", (q, hidden), q_heads, False),
        ("self_attn.k_proj.weight", "attn_k.weight", (kv, hidden), k_heads, False),
        ("self_attn.v_proj.weight", "attn_v.weight", (kv, hidden), 0, False),
        ("self_attn.o_proj.weight", "attn_output.weight", (hidden, q), 0, False),
        ("mlp.gate_proj.weight", "ffn_gate.weight", (inner, hidden), 0, False),
        ("mlp.up_proj.weight", "ffn_up.weight", (inner, hidden), 0, False),
        ("mlp.down_proj.weight", "ffn_down.weight", (hidden, inner), 0, False),
    ]
    if family.post_norms:
        rows += [
            ("post_attention_layernorm.weight", "post_attention_norm.weight", (hidden,), 0, True),
            ("pre_feedforward_layernorm.weight", "ffn_norm.weight", (hidden,), 0, True),
            ("post_feedforward_layernorm.weight", "post_ffw_norm.weight", (hidden,), 0, True),
        ]
    else:
        rows.append(("post_attention_layernorm.weight", "ffn_norm.weight", (hidden,), 0, True))
    if family.qk_norm:
        rows += [
            ("self_attn.q_norm.weight", "attn_q_norm.weight", (dim,), 0, True),
            ("self_attn.k_norm.weight", "attn_k_norm.weight", (dim,), 0, True),
        ]
    if family.qkv_bias or config.get("attention_bias"):
        rows += [
            ("self_attn.q_proj.bias", "attn_q.bias", (q,), q_heads, False),
            ("self_attn.k_proj.bias", "attn_k.bias", (kv,), k_heads, False),
            ("self_attn.v_proj.bias", "attn_v.bias", (kv,), 0, False),
        ]
    if config.get("attention_bias"):
        rows.append(("self_attn.o_proj.bias", "attn_output.bias", (hidden,), 0, False))
    if config.get("mlp_bias"):
        rows += [
            ("mlp.gate_proj.bias", "ffn_gate.bias", (inner,), 0, False),
            ("mlp.up_proj.bias", "ffn_up.bias", (inner,), 0, False),
            ("mlp.down_proj.bias", "ffn_down.bias", (hidden,), 0, False),
        ]
    result = {"model.embed_tokens.weight": Tensor("token_embd.weight", (vocab, hidden))}
    for layer in range(config["num_hidden_layers"]):
        for ours, theirs, shape, n_heads, is_norm in rows:
            result[f"model.layers.{layer}.{ours}"] = Tensor(
                f"blk.{layer}.{theirs}", shape, n_heads, is_norm and family.one_plus
            )
    result["model.norm.weight"] = Tensor("output_norm.weight", (hidden,), minus_one=family.one_plus)
    if "output.weight" in sources:
        result["lm_head.weight"] = Tensor("output.weight", (vocab, hidden))
    return result
