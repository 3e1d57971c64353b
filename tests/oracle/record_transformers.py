"""Records what transformers computes for the tiny models, for test_oracle.py to compare with.

Needs torch and transformers beside NumPy; nothing else of the tests does. From the repository root:

    python tests/oracle/record_transformers.py

writes tests/vectors/transformers.npz: for every case of CASES the logits of two rows and a few
values of every hidden state over the same ids, in float64 where transformers computes in it (norms,
rope angles and softmax stay float32 there), the rope frequencies, and a sum over the weights that
says whether the same model was built.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

TESTS = Path(__file__).resolve().parent.parent
VECTORS = TESTS / "vectors" / "transformers.npz"
ROWS = (11, 39)  # the first beyond a window of 8, and the last
N_VALUES = 8  # of each hidden state of the last row

_ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_ROPE_GEMMA = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_GEMMA_LAYERS = ["full_attention", "sliding_attention", "sliding_attention"] * 2 + [
    "full_attention"
]

#: name -> (family of fixtures.py, changes to its configuration)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-eps": ("llama", {"rms_norm_eps": 0.5}),
    "mistral": ("mistral", {}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3", {}),
    "gemma3-new-rope": (
        "gemma3",
        {"rope_parameters": _ROPE_GEMMA, "rope_scaling": None, "layer_types": _GEMMA_LAYERS},
    ),
    "falcon3": ("falcon3", {}),
    "llama3": ("llama3", {}),
    "llama3-new-rope": ("llama3", {"rope_parameters": _ROPE_LLAMA3, "rope_scaling": None}),
    "linear": ("linear", {}),
    "yarn": ("yarn", {}),
    "yarn-factor": ("yarn", {"rope_scaling": _YARN | {"attention_factor": 1.0}}),
    "yarn-betas": (
        "yarn",
        {"rope_scaling": _YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}},
    ),
}


def token_ids() -> list[int]:
    """The 40 ids that every case runs on."""
    return [(7 * i * i + 13 * i + 5) % 320 for i in range(40)]


def weights_sum(weights: dict[str, np.ndarray]) -> float:
    """A number that changes with any weight."""
    return float(sum(np.abs(w.astype(np.float64)).sum() for w in weights.values()))


def record(family: str, changes: dict[str, Any]) -> dict[str, np.ndarray]:
    """Arrays of one case by name."""
    import fixtures
    import torch
    from transformers import AutoModelForCausalLM

    config, weights = fixtures.build(family, **changes)
    with tempfile.TemporaryDirectory() as folder:
        fixtures.write_folder(Path(folder), config, weights, tokenizer=False)
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", output_loading_info=True
        )
    faults = [name for group in ("missing_keys", "unexpected_keys") for name in info[group]]
    if faults:
        raise ValueError(f"{family}: tensors that transformers does not match: {faults}")
    model.eval()
    with torch.no_grad():
        out = model(torch.tensor([token_ids()]), output_hidden_states=True)
    # The last entry is behind the final norm; the others enter a layer.
    hidden = [h[0, -1, :N_VALUES].numpy() for h in out.hidden_states]
    arrays = {
        "logits": out.logits[0, list(ROWS)].numpy(),
        "hidden": np.stack(hidden),
        "weights": np.array(weights_sum(weights)),
    }
    rope = model.model.rotary_emb
    for name, buffer in rope.named_buffers():
        if name.endswith("inv_freq") and "original" not in name:
            arrays["rope/" + name] = buffer.numpy()
            factor = name.removesuffix("inv_freq") + "attention_scaling"
            arrays["rope/" + factor] = np.array(getattr(rope, factor))
    return arrays


def main() -> None:
    sys.path.insert(0, str(TESTS))
    arrays = {}
    for case, (family, changes) in CASES.items():
        for name, values in record(family, changes).items():
            # Floats of 32 bits: the comparison is no finer, see test_oracle.py.
            small = values if values.ndim == 0 else values.astype(np.float32)
            arrays[f"{case}/{name}"] = small
    VECTORS.parent.mkdir(exist_ok=True)
    np.savez_compressed(VECTORS, **arrays)
    print(f"{len(CASES)} cases, {VECTORS.stat().st_size} bytes")


if __name__ == "__main__":
    main()
