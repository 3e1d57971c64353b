"""A tiny llama on kvcomm._core with weights from a seed, for the tests of the binding."""

from typing import Any

import numpy as np

from kvcomm import _core

LAYERS, DIM, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB = 4, 32, 4, 2, 8, 48, 320


def config(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "n_layers": LAYERS,
        "dim": DIM,
        "hidden_dim": HIDDEN,
        "n_heads": HEADS,
        "n_kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "norm_eps": 1e-5,
        "norm_offset": 0.0,
        "embed_scale": 1.0,
        "attention_scale": HEAD_DIM**-0.5,
        "activation": "silu",
        "qkv_bias": False,
        "o_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "post_norms": False,
        "tied_head": True,
        "window": 0,
        "rope": [{"kind": "default", "theta": 10000.0, "rotary_dim": HEAD_DIM}],
    }
    return base | changes


def build(device: str, seed: int = 0, k_bias: float | None = None, **changes: Any) -> _core.Model:
    """A sealed llama with weights from a seed; with k_bias, every key gets it added."""
    settings = config(qkv_bias=k_bias is not None, **changes)
    model = _core.Model(settings, device=device)
    rng = np.random.default_rng(seed)
    vocab, width, kv_width = settings["vocab_size"], HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM

    def put(weight: str, layer: int, *shape: int) -> None:
        model.set(weight, layer, (rng.standard_normal(shape) * 0.3).astype(np.float32), "f32")

    put("embed", 0, vocab, DIM)
    put("final_norm", 0, DIM)
    for layer in range(LAYERS):
        put("attn_norm", layer, DIM)
        put("mlp_norm", layer, DIM)
        put("q", layer, width, DIM)
        put("k", layer, kv_width, DIM)
        put("v", layer, kv_width, DIM)
        put("o", layer, DIM, width)
        put("gate", layer, HIDDEN, DIM)
        put("up", layer, HIDDEN, DIM)
        put("down", layer, DIM, HIDDEN)
        if k_bias is not None:
            model.set("q_bias", layer, np.zeros(width, np.float32), "f32")
            model.set("k_bias", layer, np.full(kv_width, k_bias, np.float32), "f32")
            model.set("v_bias", layer, np.zeros(kv_width, np.float32), "f32")
    model.seal()
    return model


def logits(model: _core.Model, ids: Any, kv: _core.KV | None = None) -> np.ndarray:
    """Logits [vocab] after ids in a new session that may have been given a message."""
    session = _core.Session(model)
    if kv is not None:
        session.give(kv)
    out, mass = _core.Workspace(model).forward([session], [ids], output="logits")
    assert mass is None
    assert out is not None
    return out[0]


def read(model: _core.Model, ids: Any, **options: Any) -> _core.KV:
    session = _core.Session(model, **options)
    _core.Workspace(model).forward([session], [ids])
    return session.freeze()


def from_parts(device: str, parts: Any, dtype: Any = "f32", layer: Any = 0) -> _core.KV:
    return _core.KV.from_arrays(
        {layer: parts},
        n_layers=LAYERS,
        n_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=dtype,
        next_position=9,
        device=device,
    )
