"""A model of a named shape with random weights, as a Hugging Face folder in bf16, for timing only.

Owns the configuration and the tensor file; `kvcomm.shapes` has the shapes. Every matrix repeats one
block of normal values: times do not depend on them, and no value is denormal, infinite or NaN. The
model takes ids only. The file is written tensor by tensor, so memory holds one block.
"""

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np

from kvcomm.shapes import Shape, find

BLOCK = 1 << 22
MAX_POSITION = 131072


def tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor, under the names of the llama and qwen2 families."""
    linears = {
        "self_attn.q_proj": (shape.q_width, shape.dim),
        "self_attn.k_proj": (shape.kv_width, shape.dim),
        "self_attn.v_proj": (shape.kv_width, shape.dim),
        "self_attn.o_proj": (shape.dim, shape.q_width),
        "mlp.gate_proj": (shape.hidden_dim, shape.dim),
        "mlp.up_proj": (shape.hidden_dim, shape.dim),
        "mlp.down_proj": (shape.dim, shape.hidden_dim),
    }
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, shape.dim)}
    for layer in range(shape.n_layers):
        start = f"model.layers.{layer}."
        for name, (rows, columns) in linears.items():
            found[f"{start}{name}.weight"] = (rows, columns)
            if shape.qkv_bias and name[-6:] in ("q_proj", "k_proj", "v_proj"):
                found[f"{start}{name}.bias"] = (rows,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{start}{name}.weight"] = (shape.dim,)
    found["model.norm.weight"] = (shape.dim,)
    if not shape.tied_head:
        found["lm_head.weight"] = (shape.vocab_size, shape.dim)
    return found


def config(shape: Shape) -> dict[str, Any]:
    """config.json: qwen2 where there are biases, else llama."""
    family = "qwen2" if shape.qkv_bias else "llama"
    return {
        "architectures": [{"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}[family]],
        "model_type": family,
        "hidden_size": shape.dim,
        "intermediate_size": shape.hidden_dim,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": MAX_POSITION,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "tie_word_embeddings": shape.tied_head,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }


def available_bytes() -> int | None:
    """Memory that can be had without swapping; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next(int(ln.split()[1]) << 10 for ln in lines if ln.startswith("MemAvailable"))


def write(name: str, folder: Path) -> Path:
    """Write the model of a named shape into an existing folder; returns the folder.

    Raises
    ------
    ValueError
        An unknown shape, or one with vectors that these families do not have.
    MemoryError, OSError
        Less memory, or less room on the disk, than its weights take.
    """
    shape = find(name)
    if shape.post_norms or shape.qk_norm or shape.o_bias or shape.mlp_bias or shape.window:
        raise ValueError(f"shape {name!r}: neither a llama nor a qwen2")
    n_bytes = 2 * shape.parameters
    free, memory = shutil.disk_usage(folder).free, available_bytes()
    if free < 1.05 * n_bytes:
        raise OSError(f"{folder}: {free} bytes free, the weights of {name} take {n_bytes}")
    if memory is not None and memory < 1.2 * n_bytes:
        raise MemoryError(
            f"{memory} bytes of memory available, the weights of {name} are {n_bytes}"
        )
    names = tensors(shape)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for tensor, size in names.items():
        end = place + 2 * int(np.prod(size))
        header[tensor] = {"dtype": "BF16", "shape": list(size), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    values = np.random.default_rng(0).standard_normal(BLOCK, np.float32) * np.float32(0.02)
    block = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    one = np.full(1, 0x3F80, "<u2").tobytes()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor, size in names.items():
            left = 2 * int(np.prod(size))
            if tensor.endswith("norm.weight"):
                file.write(one * (left // 2))
                continue
            for _ in range(0, left, len(block)):
                file.write(block[: min(left, len(block))])
                left -= min(left, len(block))
        file.flush()
        os.fsync(file.fileno())
    (folder / "config.json").write_text(json.dumps(config(shape), indent=1), encoding="utf-8")
    return folder
