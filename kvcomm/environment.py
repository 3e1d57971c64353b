"""What a result was made with: versions, machine, device and threads.

For logs, reports and `kvcomm doctor`, whose small check of the core is here too; decides nothing.
"""

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from kvcomm import _core

_PACKAGES = ("numpy", "safetensors", "tokenizers", "gguf", "jinja2")


def versions() -> dict[str, str | None]:
    """Versions by name: kvcomm, Python and the packages it stands on (None: not installed)."""
    found: dict[str, str | None] = {
        "kvcomm": _core.__version__,
        "python": platform.python_version(),
    }
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def machine() -> dict[str, Any]:
    """Processor, system, kernels of the core and threads of its pool."""
    cpu = next(d for d in _core.devices() if d["name"] == "cpu")
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "kernels": cpu["description"],
        "threads": _core.get_num_threads(),
    }


def _processor() -> str:
    """The processor's name where the system tells, else its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


#: A model small enough to be made of random weights in a moment.
_TINY: dict[str, Any] = {
    "n_layers": 2, "dim": 32, "hidden_dim": 48, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8,
    "vocab_size": 40, "norm_eps": 1e-6, "norm_offset": 0.0, "embed_scale": 1.0,
    "attention_scale": 8.0**-0.5, "activation": "silu", "qkv_bias": False, "o_bias": False,
    "mlp_bias": False, "qk_norm": False, "post_norms": False, "tied_head": True, "window": 0,
    "rope": [{"kind": "default", "theta": 10000.0, "rotary_dim": 8}],
}  # fmt: skip
_SHAPES = {
    "attn_norm": (32,), "q": (32, 32), "k": (16, 32), "v": (16, 32), "o": (32, 32),
    "mlp_norm": (32,), "gate": (48, 32), "up": (48, 32), "down": (32, 48),
}  # fmt: skip


def self_check() -> dict[str, Any]:
    """Read 12 tokens in one go, and 8 of them in another session whose K and V are handed over.

    Returns
    -------
    dict
        "difference": the largest between the two ways' logits; "passed": whether it is rounding.
    """
    draw = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray:
        return draw.standard_normal(shape, np.float32) * np.float32(0.2)

    model = _core.Model(_TINY)
    model.set("embed", 0, weight(40, 32), "f32")
    model.set("final_norm", 0, weight(32), "f32")
    for layer in range(2):
        for name, shape in _SHAPES.items():
            model.set(name, layer, weight(*shape), "f32")
    model.seal()
    ids = draw.integers(0, 40, 12)
    workspace = _core.Workspace(model)
    whole, sender, receiver = (_core.Session(model) for _ in range(3))
    expected, _ = workspace.forward([whole], [ids], output="logits")
    workspace.forward([sender], [ids[:8]])
    receiver.give(sender.freeze())
    found, _ = workspace.forward([receiver], [ids[8:]], output="logits")
    difference = float(np.abs(found - expected).max())
    return {"difference": difference, "passed": difference < 1e-4}
