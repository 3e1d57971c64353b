"""What a model's size is made of: the numbers that decide its FLOPs, bytes and memory.

Owns `Shape`, where one comes from (a loaded model, a configuration, a folder with a config.json, a
name), and the shapes of the paper's models and of the catalogue's by name, from their published
configurations. Holds no weights and counts no work: cost.py does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder, under the names of kvc_config.

    window: keys that a windowed layer sees, own position included; 0: none. windowed: per layer
    whether it has the window; empty: no layer. The flags say which vectors there are.
    """

    n_layers: int
    dim: int
    hidden_dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_head: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    window: int = 0
    windowed: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an integer, found {value!r}")
            if value < 1:
                raise ValueError(f"{name}: expected 1 or more, found {value}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads: {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}"
            )
        if len(self.windowed) not in (0, self.n_layers):
            raise ValueError(f"windowed: {len(self.windowed)} layers, expected {self.n_layers}")

    @classmethod
    def of(cls, source: Any) -> "Shape":
        """The shape of a `Model`, a `Config`, or a mapping with the fields of kvc_config.

        Raises
        ------
        TypeError
            Something else.
        ValueError
            A field that is missing, or sizes that cannot be.
        """
        config = getattr(source, "config", source)
        values = getattr(config, "core", config)
        if not isinstance(values, Mapping):
            raise TypeError(
                f"shape: expected a model or a configuration, found {type(source).__name__}"
            )
        missing = [name for name in _SIZES if name not in values]
        if missing:
            raise ValueError(f"shape: the configuration has no {missing[0]}")
        known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        known["windowed"] = tuple(map(bool, known.get("windowed") or ()))
        return cls(**known)

    @property
    def q_width(self) -> int:
        """Columns of the query projection."""
        return self.n_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of the key projection, and of the value projection."""
        return self.n_kv_heads * self.head_dim

    @property
    def matrix_parameters(self) -> int:
        """Elements of all matrices; a tied head is the embedding table."""
        layer = 2 * self.dim * (self.q_width + self.kv_width) + 3 * self.dim * self.hidden_dim
        return self.n_layers * layer + (2 - self.tied_head) * self.vocab_size * self.dim

    @property
    def vector_parameters(self) -> int:
        """Elements of all norms and biases."""
        layer = (
            (2 + 2 * self.post_norms) * self.dim
            + self.qkv_bias * (self.q_width + 2 * self.kv_width)
            + self.o_bias * self.dim
            + self.mlp_bias * (2 * self.hidden_dim + self.dim)
            + self.qk_norm * 2 * self.head_dim
        )
        return self.n_layers * layer + self.dim

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        return self.matrix_parameters + self.vector_parameters

    def window_of(self, layer: int) -> int:
        """Keys that a token of this layer sees at most; 0: all."""
        return self.window if self.windowed and self.windowed[layer] else 0


_SIZES = (
    "n_layers", "dim", "hidden_dim", "n_heads", "n_kv_heads", "head_dim", "vocab_size",
)  # fmt: skip

#: The paper's models (its fine-tunes have the shapes of their bases) and the catalogue's.
SHAPES: dict[str, Shape] = {
    "llama-3.1-8b": Shape(32, 4096, 14336, 32, 8, 128, 128256),
    "llama-3.2-3b": Shape(28, 3072, 8192, 24, 8, 128, 128256, tied_head=True),
    "qwen2.5-7b": Shape(28, 3584, 18944, 28, 4, 128, 152064, qkv_bias=True),
    "falcon3-7b": Shape(28, 3072, 23040, 12, 4, 256, 131072),
    "qwen2.5-coder-0.5b": Shape(24, 896, 4864, 14, 2, 64, 151936, tied_head=True, qkv_bias=True),
    "qwen2.5-coder-1.5b": Shape(28, 1536, 8960, 12, 2, 128, 151936, tied_head=True, qkv_bias=True),
    "smollm2-135m": Shape(30, 576, 1536, 9, 3, 64, 49152, tied_head=True),
}


def find(name: str) -> Shape:
    """The shape of a name of `SHAPES`, or of a folder with a config.json.

    Raises
    ------
    ValueError
        Neither; the names are listed.
    OSError, FormatError, UnsupportedError
        A folder whose config.json is missing, damaged or of a kind not handled.
    """
    if name in SHAPES:
        return SHAPES[name]
    if Path(name).is_dir():
        from kvcomm.config import read_config

        return Shape.of(read_config(name))
    raise ValueError(f"model shape: {name!r} is neither a folder nor one of {', '.join(SHAPES)}")
