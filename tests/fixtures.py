"""Tiny random models of every family, written as Hugging Face folders, and a tiny tokenizer.

Owns: configurations and seeded weights of the test models, and the files of their folders
(config.json, model.safetensors single or sharded, tokenizer.json and its companions). A weight's
values depend on the seed, its name and its shape only, so a model with one changed option keeps
all other weights. Does not load models and knows nothing of the product.

    config, weights = build("qwen3")                    # dicts; weights float32
    folder = write_model(tmp_path / "m", "llama", dtype="bf16", shards=3, attention_bias=True)
    folder = write_model(tmp_path / "m", "llama", head_dim=None, rope_theta=ABSENT)
"""

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Weights = dict[str, NDArray[np.float32]]

#: As a change: leave this key out of config.json (None writes null).
ABSENT = object()

VOCAB_SIZE = 320
#: Added tokens of the tiny tokenizer, id -> (text, special). Ids 0..255 are the bytes, then MERGES.
MERGES = (
    ("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("e", "r"), ("Ġ", "the"), ("o", "n"),
    ("r", "e"), ("Ġ", "a"), ("Ġ", "o"), ("Ġ", "i"), ("a", "t"), ("e", "n"), ("Ġ", "s"),
    ("Ġ", "w"), ("o", "u"), ("e", "s"), ("i", "s"), ("i", "t"), ("o", "r"), ("Ġ", "c"),
    ("e", "d"), ("Ġa", "n"), ("Ġan", "d"), ("in", "g"), ("Ġ", "p"), ("Ġo", "f"), ("a", "r"),
    ("l", "l"), ("Ġi", "s"), ("l", "e"), ("Ġ", "q"), ("u", "e"), ("s", "t"), ("c", "h"),
    ("er", "s"),
)  # fmt: skip
BOS, EOS, TURN_START, TURN_END, PAD = 292, 293, 294, 295, 296
ADDED_TOKENS = {
    BOS: ("<|bos|>", True),
    EOS: ("<|eos|>", True),
    TURN_START: ("<|im_start|>", True),
    TURN_END: ("<|im_end|>", True),
    PAD: ("<|pad|>", True),
    297: ("<tool>", False),
    298: ("</tool>", False),
    299: ("<|extra|>", True),
}
TOKENIZER_SIZE = 300
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": [EOS, TURN_END],
    "torch_dtype": "float32",
}


def _like_llama(*leave_out: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in (_LLAMA | changes).items() if key not in leave_out}


#: The configuration of every family, in the older spelling (rope_theta, rope_scaling).
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _like_llama(
        "attention_bias",
        "mlp_bias",
        architectures=["MistralForCausalLM"],
        model_type="mistral",
        sliding_window=8,
    ),
    "qwen2": _like_llama(
        "attention_bias",
        "mlp_bias",
        "head_dim",
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        use_sliding_window=False,
        sliding_window=8,
        max_window_layers=2,
    ),
    "qwen3": _like_llama(
        "mlp_bias",
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        head_dim=32,
        use_sliding_window=False,
        sliding_window=None,
        max_window_layers=4,
    ),
    "gemma3": _like_llama(
        "mlp_bias",
        "hidden_act",
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        num_hidden_layers=7,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=24,
        sliding_window=8,
        sliding_window_pattern=6,
        rope_theta=1000000.0,
        rope_local_base_freq=10000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        tie_word_embeddings=True,
    ),
    "falcon3": _like_llama(head_dim=32, rope_theta=1000042.0),
    "llama3": _like_llama(
        head_dim=64,
        rope_theta=500000.0,
        max_position_embeddings=131072,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "yarn": _like_llama(
        max_position_embeddings=256,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "linear": _like_llama(rope_scaling={"rope_type": "linear", "factor": 2.0}),
}
FAMILIES = tuple(CONFIGS)

#: (ending of the name, mean, standard deviation), first match; 0.05 around 0 otherwise. Norms and
#: biases are far from neutral and attention far from uniform, so that a fault in either shows.
_SCALES = (
    ("norm.weight", 1.0, 0.2),
    (".bias", 0.0, 1.0),
    ("q_proj.weight", 0.0, 0.15),
    ("k_proj.weight", 0.0, 0.15),
)


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a family as a dict, with `changes` (ABSENT removes a key)."""
    merged = CONFIGS[family] | changes
    return {key: value for key, value in merged.items() if value is not ABSENT}


def shapes_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this configuration holds."""
    family = config["model_type"]
    dim, hidden = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or dim // heads
    attention_bias = config.get("attention_bias", False)
    linears = {
        "self_attn.q_proj": (heads * head_dim, dim, attention_bias or family == "qwen2"),
        "self_attn.k_proj": (kv_heads * head_dim, dim, attention_bias or family == "qwen2"),
        "self_attn.v_proj": (kv_heads * head_dim, dim, attention_bias or family == "qwen2"),
        "self_attn.o_proj": (dim, heads * head_dim, attention_bias),
        "mlp.gate_proj": (hidden, dim, config.get("mlp_bias", False)),
        "mlp.up_proj": (hidden, dim, config.get("mlp_bias", False)),
        "mlp.down_proj": (dim, hidden, config.get("mlp_bias", False)),
    }
    norms = {"input_layernorm": dim, "post_attention_layernorm": dim}
    if family in ("qwen3", "gemma3_text"):
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
    if family == "gemma3_text":
        norms |= {"pre_feedforward_layernorm": dim, "post_feedforward_layernorm": dim}

    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], dim)}
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{start}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{start}{name}.bias"] = (rows,)
        for name, size in norms.items():
            shapes[f"{start}{name}.weight"] = (size,)
    shapes["model.norm.weight"] = (dim,)
    if not config.get("tie_word_embeddings", family == "gemma3_text"):
        shapes["lm_head.weight"] = (config["vocab_size"], dim)
    return shapes


def weights_of(config: Mapping[str, Any], seed: int = 0) -> Weights:
    """Seeded float32 weights of every tensor of `shapes_of`."""
    one_plus = config["model_type"] == "gemma3_text"
    weights = {}
    for name, shape in shapes_of(config).items():
        plain = ("", 0.0, 0.05)
        ending, mean, deviation = next((s for s in _SCALES if name.endswith(s[0])), plain)
        if one_plus and ending == "norm.weight":
            mean = 0.0
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        weights[name] = (mean + deviation * rng.standard_normal(shape)).astype(np.float32)
    return weights


def build(family: str, *, seed: int = 0, **changes: Any) -> tuple[dict[str, Any], Weights]:
    """(config, weights) of a tiny model; `changes` go into the configuration."""
    config = config_of(family, **changes)
    return config, weights_of(config, seed)


def bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Finite float32 values rounded to bfloat16, nearest even, as their bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def rounded(weights: Mapping[str, NDArray[np.float32]], dtype: str) -> Weights:
    """The float32 values that remain when the weights are stored as "f32", "f16" or "bf16"."""
    if dtype == "bf16":
        return {
            name: (bf16_bits(w).astype(np.uint32) << 16).view(np.float32)
            for name, w in weights.items()
        }
    storage = {"f32": np.float32, "f16": np.float16}[dtype]
    return {name: w.astype(storage).astype(np.float32) for name, w in weights.items()}


def write_safetensors(
    path: Path, weights: Mapping[str, NDArray[np.float32]], dtype: str = "f32"
) -> None:
    """One safetensors file; dtype "f32", "f16" or "bf16" is what the file stores."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in weights.items():
        storage = {"f32": np.dtype("<f4"), "f16": np.dtype("<f2"), "bf16": np.dtype("<u2")}[dtype]
        stored = bf16_bits(values) if dtype == "bf16" else values
        chunk = stored.astype(storage).tobytes()
        header[name] = {
            "dtype": dtype.upper(),
            "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + len(chunk)],
        }
        data += chunk
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_weights(
    folder: Path,
    weights: Mapping[str, NDArray[np.float32]],
    *,
    dtype: str = "f32",
    shards: int = 1,
) -> None:
    """model.safetensors, or `shards` files with model.safetensors.index.json."""
    if shards == 1:
        write_safetensors(folder / "model.safetensors", weights, dtype)
        return
    names = list(weights)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        write_safetensors(folder / file, {name: weights[name] for name in part}, dtype)
        weight_map |= dict.fromkeys(part, file)
    size = sum(w.size for w in weights.values()) * (4 if dtype == "f32" else 2)
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in a byte-level BPE vocabulary, by byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = iter(range(256, 512))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]


def tokenizer_json(*, bos: bool = True, pair_merges: bool = True, **model: Any) -> dict[str, Any]:
    """tokenizer.json of the tiny byte-level BPE tokenizer, 300 entries.

    bos: encoding with special tokens puts BOS in front. pair_merges: merges as [a, b] pairs, else
    as "a b" strings. Further arguments are set in the "model" section (ignore_merges=True, ...).
    """
    tokens = [*_byte_alphabet(), *("".join(pair) for pair in MERGES)]
    bos_text = ADDED_TOKENS[BOS][0]
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": bos_text, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [
            {"SpecialToken": {"id": bos_text, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {bos_text: {"id": bos_text, "ids": [BOS], "tokens": [bos_text]}},
    }
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": special,
            }
            for token_id, (text, special) in ADDED_TOKENS.items()
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": template if bos else byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [list(pair) if pair_merges else " ".join(pair) for pair in MERGES],
        }
        | model,
    }


def write_tokenizer(
    folder: Path,
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    eos: int | Sequence[int] | None = (EOS, TURN_END),
    bos: bool = True,
    generation_config: Mapping[str, Any] | None = None,
) -> None:
    """tokenizer.json, tokenizer_config.json, special_tokens_map.json, generation_config.json.

    eos: the stop ids that generation_config.json states; further keys by `generation_config`.
    """
    specials = {
        "bos_token": ADDED_TOKENS[BOS][0],
        "eos_token": ADDED_TOKENS[TURN_END][0],
        "pad_token": ADDED_TOKENS[PAD][0],
    }
    added = {
        str(token_id): {
            "content": text,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
            "special": special,
        }
        for token_id, (text, special) in ADDED_TOKENS.items()
    }
    tokenizer_config = specials | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    if chat_template is not None:
        tokenizer_config["chat_template"] = chat_template
    generation = {
        "bos_token_id": BOS,
        "eos_token_id": list(eos) if isinstance(eos, Sequence) else eos,
        "pad_token_id": PAD,
    }
    _write_json(folder / "tokenizer.json", tokenizer_json(bos=bos))
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "special_tokens_map.json", specials)
    _write_json(folder / "generation_config.json", generation | dict(generation_config or {}))


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, NDArray[np.float32]],
    *,
    dtype: str = "f32",
    shards: int = 1,
    tokenizer: bool = True,
) -> Path:
    """A model folder of the given configuration and weights; returns the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stored = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[dtype]
    if "torch_dtype" in config:
        config = dict(config) | {"torch_dtype": stored}
    _write_json(folder / "config.json", config)
    write_weights(folder, weights, dtype=dtype, shards=shards)
    if tokenizer:
        write_tokenizer(folder, eos=config.get("eos_token_id"))
    return folder


def write_model(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: str = "f32",
    shards: int = 1,
    tokenizer: bool = True,
    **changes: Any,
) -> Path:
    """A tiny model of a family as a folder; `changes` go into config.json. Returns the folder."""
    config, weights = build(family, seed=seed, **changes)
    return write_folder(folder, config, weights, dtype=dtype, shards=shards, tokenizer=tokenizer)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")
