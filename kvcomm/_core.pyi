"""Types of the compiled core (csrc/py). Arrays in, arrays out; the rules of kvcomm.h hold.

Errors: ValueError, TypeError, MemoryError, and MismatchError, UnsupportedError, NumericError,
DeviceError of kvcomm.errors; KeyboardInterrupt when the user asks to stop. After any error the
objects are as they were before the call. The GIL is released while the core works.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

DType = Literal["f32", "f16", "bf16"]
MatrixDType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1"]
Preset = Literal["paper", "reference"]

__version__: str

def set_num_threads(n: int) -> None:
    """Set the threads of the one pool; 0 goes back to the default. Waits for a forward call that
    runs, so not for a signal handler, which may have interrupted one."""

def get_num_threads() -> int: ...
def devices() -> list[dict[str, Any]]:
    """Every known device: {"name", "available", "description"}; description is the reason when
    it is not available."""

class Model:
    """Configuration and weights. Filled with `set`, usable after `seal`.

    config: the fields of kvc_config by name. Per layer lists "windowed" (bools) and
    "rope_of_layer" (0 or 1) may be absent. "rope": a list of one or two dicts with "kind"
    ("default", "linear", "llama3", "yarn"), "theta", "rotary_dim" and the fields of that kind
    ("factor", "low_freq_factor", "high_freq_factor", "original_length", "beta_fast", "beta_slow",
    "attention_factor", "truncate"). "activation": "silu" or "gelu_tanh". Every other field is
    required; an unknown key is a ValueError.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        device: str = "cpu",
        dtype: MatrixDType | Sequence[MatrixDType] = "f32",
    ) -> None: ...
    def set(self, weight: str, layer: int, array: NDArray[Any], dtype: MatrixDType) -> None:
        """Copy one tensor in (layer is 0 for embed, head, final_norm).

        weight: "embed", "head", "final_norm", "attn_norm", "q", "k", "v", "o", "q_bias", "k_bias",
        "v_bias", "o_bias", "q_norm", "k_norm", "post_attn_norm", "mlp_norm", "gate", "up", "down",
        "gate_bias", "up_bias", "down_bias", "post_mlp_norm". array: 1-D or 2-D, C-contiguous, of
        float32 (f32), float16 (f16) or uint16 (bf16), any byte alignment.
        """

    def read(
        self, file: int, tensors: Sequence[tuple[str, str, int, DType, int, int, int]]
    ) -> None:
        """Read tensors of an open file (its descriptor), in order; the GIL is released for all.

        Each is (name for messages, weight, layer, dtype, first byte, rows, columns); rows is 1 for
        a vector. After an error the tensors before the one it names are in. OSError: the bytes
        cannot be read.
        """

    def seal(self) -> None: ...
    def inv_freq(self, rope: int = 0) -> NDArray[np.float64]: ...
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def nbytes(self) -> int: ...

class KV:
    """An immutable message: per layer a list of parts, each with its positions. Blocks are shared
    between messages and sessions, never copied."""

    @staticmethod
    def from_arrays(
        layers: Mapping[int, Sequence[tuple[NDArray[Any], NDArray[Any], int, int]]],
        *,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: DType,
        next_position: int,
        device: str = "cpu",
    ) -> KV:
        """layers[l]: parts (k, v, position, offset), k and v [n_kv_heads, n, head_dim] (bf16 as
        uint16)."""

    def parts(self, layer: int) -> list[tuple[NDArray[Any], NDArray[Any], int, int]]:
        """(k, v, position, offset) of each part; k and v [n_kv_heads, n, head_dim], read-only views
        of the KV's own memory (copies where the device's memory is not addressable)."""

    def select(self, layers: Sequence[int], *, sink: bool = False) -> KV:
        """Only these layers; with sink, also the first token of every other layer."""

    def trim(self, windowed: Sequence[bool], window: int) -> KV: ...
    @staticmethod
    def concat(
        kvs: Sequence[KV], *, sequential: bool = False, whole: Sequence[int] | None = None
    ) -> KV:
        """Several senders into one. whole: layers that take every sender's parts; the others keep
        the first sender's only (None: all layers)."""

    @property
    def n_layers(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def next_position(self) -> int: ...
    @property
    def lengths(self) -> list[int]:
        """Tokens held per layer."""
    @property
    def nbytes(self) -> int:
        """Bytes of K and V that a transfer carries."""

class Session:
    """One timeline: given keys, then own tokens."""

    def __init__(self, model: Model, *, kv_dtype: DType = "f32") -> None: ...
    def give(self, kv: KV, layer_map: Sequence[int] | None = None) -> None: ...
    def reserve(self, n: int) -> None: ...
    def set_position(self, position: int) -> None: ...
    def set_shift(self, shift: int, layers: Sequence[int]) -> None: ...
    def truncate(self, n: int) -> None: ...
    def freeze(self) -> KV: ...
    def resume(self, tail: KV) -> None:
        """Begin with a copy of the tail that another session froze after the same first tokens;
        `reserve` the whole prompt before. What follows has the bits that it has without this."""

    @property
    def given(self) -> list[int]: ...
    @property
    def lengths(self) -> list[int]: ...
    @property
    def next_position(self) -> int: ...

class Workspace:
    """Scratch for one forward call at a time; may be used again and again."""

    def __init__(self, model: Model) -> None: ...
    @property
    def counts(self) -> dict[str, float]:
        """{"tokens", "linear_flops", "attention_flops"} so far."""

    def forward(
        self,
        sessions: Sequence[Session],
        tokens: Sequence[NDArray[np.integer[Any]] | Sequence[int] | NDArray[np.float32]],
        *,
        output: Literal["none", "hidden", "normed", "logits", "argmax", "logprob"] = "none",
        outputs: Literal["last", "all"] | Sequence[Sequence[int]] = "last",
        targets: Sequence[Sequence[int]] | None = None,
        layers: tuple[int, int] | None = None,
        slack: Sequence[Sequence[int] | None] | None = None,
        mass: Literal["paper", "published"] | None = None,
        mass_skip: int = 0,
    ) -> tuple[NDArray[Any] | None, NDArray[np.float64] | None]:
        """One batch: row i runs tokens[i] in sessions[i].

        tokens[i]: ids (any integer dtype; floats and bools are a TypeError, ids outside the
        vocabulary a ValueError naming row, place and value), or float32 [n, dim] hidden states
        entering layers[0]. With output "none" the last layer computes K and V (and mass) and
        nothing else: this is the sender's early exit. Returns (out, mass): out stacked over rows -
        hidden float32 [n_out, dim] (normed: after the final norm), logits float32 [n_out,
        vocab_size], argmax int32 [n_out], logprob float32 [n_out] of `targets` - or None; mass
        float64 [n_rows, n_layers, n_heads] or None.
        """

    def embed(self, ids: NDArray[np.integer[Any]] | Sequence[int], /) -> NDArray[np.float32]:
        """What enters layer 0 for ids [n]: [n, dim]."""

    def mix(self, logits: NDArray[np.float32], temperature: float) -> NDArray[np.float32]:
        """The mean of the embedding table weighted with softmax(logits / temperature), as it
        enters layer 0: logits [n, vocab_size] to [n, dim]. A NumericError when a logit is not
        finite, a ValueError when the temperature is not a number above 0."""

    def nearest(self, vectors: NDArray[np.float32], /) -> NDArray[np.int32]:
        """Row of the embedding table nearest to each of vectors [n, dim] by cosine, ties to the
        lowest id: [n]."""

class Sampler:
    """temperature 0 is greedy; top_k 0 and top_p 1 keep everything. Out of range: ValueError."""

    def __init__(
        self, *, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0
    ) -> None: ...
    def sample(self, logits: NDArray[np.float32]) -> int:
        """logits [n]. NaN logits are a NumericError."""

def score(
    mass: NDArray[np.float64],
    *,
    alpha: float,
    sigma: float = 10.0,
    mu: float | None = None,
    preset: Preset = "paper",
) -> NDArray[np.float32]:
    """Layer scores float32 [n_layers]: attention mass, scaled to 0 .. 1, and Gaussian, blended."""

def rank(scores: NDArray[np.float32], *, preset: Preset = "paper") -> list[int]:
    """Layer indices, best first, with the preset's order of ties."""
