"""The forward pass of one sequence, in full matrices.

One layer, with n own tokens, H query heads, G key heads, head size D:

    x [n, dim] -> norm -> q [H, n, D], k and v [G, n, D] -> (q/k norms) -> rope at the positions
    keys = given blocks ++ own keys; weights [H, n, all keys] = softmax where visible
    x += (post-norm) output projection;  x += (post-norm) gated MLP of the norm

Owns the arithmetic and the visibility rule. Knows nothing of senders, presets or selections.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from oracle.architecture import architecture_of
from oracle.rope import rope_of, rotate

Array = NDArray[Any]


@dataclass(frozen=True)
class Block:
    """Keys and values handed over in one layer; every own token may see them."""

    k: Array  # [G, n, D], after rope
    v: Array  # [G, n, D]
    positions: Array  # [n]; matter for windows only

    def first(self, n: int) -> "Block":
        """The first n tokens."""
        return Block(self.k[:, :n], self.v[:, :n], self.positions[:n])


@dataclass
class Run:
    """Everything that one forward pass computed."""

    hidden: dict[int, Array] = field(default_factory=dict)  # l -> [n, dim] entering layer l
    keys: dict[int, Array] = field(default_factory=dict)  # l -> [G, n, D], after rope
    values: dict[int, Array] = field(default_factory=dict)  # l -> [G, n, D]
    positions: dict[int, Array] = field(default_factory=dict)  # l -> [n]
    visible: dict[int, Array] = field(default_factory=dict)  # l -> bool [n, given + n]
    scores: dict[int, Array] = field(default_factory=dict)  # l -> [H, n, given + n], no mask
    weights: dict[int, Array] = field(default_factory=dict)  # l -> [H, n, given + n]
    final: Array | None = None  # [n, dim] after the final norm
    logits: Array | None = None  # [n, vocab]; None when a run stops before the last layer

    def block(self, layer: int) -> Block:
        """This run's own keys and values of one layer, to be handed over."""
        return Block(self.keys[layer], self.values[layer], self.positions[layer])


class Model:
    """A model from a config.json dict and its tensors by checkpoint name.

    dtype: what is computed in. stored: "f32", "f16" or "bf16", the checkpoint's dtype; only
    Gemma's embedding scale depends on it, which is rounded to it.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, Array],
        *,
        dtype: DTypeLike = np.float64,
        stored: str = "f32",
    ) -> None:
        self.arch = architecture_of(config)
        self.dtype = np.dtype(dtype)
        self.stored = stored
        self._weights = {name: np.asarray(w).astype(self.dtype) for name, w in weights.items()}
        self._ropes = [rope_of(rope, self.arch.head_dim) for rope in self.arch.ropes]

    @property
    def n_layers(self) -> int:
        return self.arch.n_layers

    def embed(self, tokens: ArrayLike) -> Array:
        """Rows of the embedding table, scaled as the family does, [n, dim]."""
        scale = _round_to(self.arch.embedding_scale, self.stored)
        return self._weights["model.embed_tokens.weight"][np.asarray(tokens)] * scale

    def moved(self, block: Block, layer: int, offset: int) -> Block:
        """A block with its keys turned on by `offset` positions."""
        frequencies, _ = self._ropes[layer]
        turned = rotate(block.k, np.full(block.k.shape[1], offset), frequencies)
        return Block(turned, block.v, block.positions + offset)

    def run(
        self,
        tokens: ArrayLike | None = None,
        *,
        embeddings: Array | None = None,
        positions: int | Sequence[ArrayLike] = 0,
        given: Sequence[Sequence[Block]] | None = None,
        slack: Sequence[int] | None = None,
        n_prefill: int | None = None,
        layers: tuple[int, int] | None = None,
    ) -> Run:
        """Run tokens (or their hidden states entering the first layer) through the model.

        positions: the first token's, the same in every layer; or per layer one position per token.
        given: per layer the blocks that all tokens see (subject to the window).
        slack: per layer, how many tokens ahead a prefill token sees; 0 is causal.
        n_prefill: own tokens from here on are decoded ones: no slack, and hidden from earlier ones.
        layers: (first, end) of the layers to run; logits only when end is the last.
        """
        first, end = layers or (0, self.n_layers)
        x = self.embed(tokens) if embeddings is None else np.asarray(embeddings, self.dtype)
        n = len(x)
        run = Run()
        for layer in range(first, end):
            if isinstance(positions, int | np.integer):
                own_positions = positions + np.arange(n)
            else:
                own_positions = np.asarray(positions[layer])
            run.positions[layer] = own_positions
            run.hidden[layer] = x
            blocks = given[layer] if given else []
            own = own_visibility(n, slack[layer] if slack else 0, n_prefill)
            x = self._layer(run, layer, x, blocks, own)
        run.hidden[end] = x
        if end == self.n_layers:
            run.final = self._norm(x, "model.norm")
            head = "model.embed_tokens" if self.arch.tied else "lm_head"
            run.logits = self._linear(run.final, head)
        return run

    def _layer(self, run: Run, layer: int, x: Array, blocks: Sequence[Block], own: Array) -> Array:
        start = f"model.layers.{layer}."
        normed = self._norm(x, start + "input_layernorm")
        attended = self._attention(run, layer, normed, blocks, own)
        if self.arch.post_norms:
            x = x + self._norm(attended, start + "post_attention_layernorm")
            normed = self._norm(x, start + "pre_feedforward_layernorm")
            return x + self._norm(self._mlp(normed, start), start + "post_feedforward_layernorm")
        x = x + attended
        return x + self._mlp(self._norm(x, start + "post_attention_layernorm"), start)

    def _attention(
        self, run: Run, layer: int, x: Array, blocks: Sequence[Block], own: Array
    ) -> Array:
        arch, start = self.arch, f"model.layers.{layer}.self_attn."
        q = _heads(self._linear(x, start + "q_proj"), arch.n_heads)
        k = _heads(self._linear(x, start + "k_proj"), arch.n_kv_heads)
        v = _heads(self._linear(x, start + "v_proj"), arch.n_kv_heads)
        if start + "q_norm.weight" in self._weights:
            q, k = self._norm(q, start + "q_norm"), self._norm(k, start + "k_norm")
        positions = run.positions[layer]
        q, k = (rotate(part, positions, *self._ropes[layer]) for part in (q, k))
        run.keys[layer], run.values[layer] = k, v

        keys = np.concatenate([*(block.k.astype(self.dtype) for block in blocks), k], axis=1)
        values = np.concatenate([*(block.v.astype(self.dtype) for block in blocks), v], axis=1)
        key_positions = np.concatenate([*(block.positions for block in blocks), positions])
        n_given = keys.shape[1] - len(x)
        visible = np.concatenate([np.ones((len(x), n_given), bool), own], axis=1)
        if arch.windows[layer] is not None:
            visible &= positions[:, None] - key_positions[None, :] < arch.windows[layer]

        group = arch.n_heads // arch.n_kv_heads
        scores = np.empty((arch.n_heads, len(x), keys.shape[1]), self.dtype)
        weights = np.empty_like(scores)
        outputs = np.empty((len(x), arch.n_heads, arch.head_dim), self.dtype)
        for head in range(arch.n_heads):
            scores[head] = q[head] @ keys[head // group].T * arch.attention_scale
            weights[head] = softmax(np.where(visible, scores[head], -np.inf))
            outputs[:, head] = weights[head] @ values[head // group]
        run.visible[layer], run.scores[layer], run.weights[layer] = visible, scores, weights
        return self._linear(outputs.reshape(len(x), -1), start + "o_proj")

    def _mlp(self, x: Array, start: str) -> Array:
        gate = self._linear(x, start + "mlp.gate_proj")
        up = self._linear(x, start + "mlp.up_proj")
        return self._linear(ACTIVATIONS[self.arch.activation](gate) * up, start + "mlp.down_proj")

    def _linear(self, x: Array, name: str) -> Array:
        y = x @ self._weights[name + ".weight"].T
        bias = self._weights.get(name + ".bias")
        return y if bias is None else y + bias

    def _norm(self, x: Array, name: str) -> Array:
        weight = self._weights[name + ".weight"] + (1 if self.arch.one_plus_norms else 0)
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + self.arch.norm_eps) * weight


def own_visibility(n: int, slack: int = 0, n_prefill: int | None = None) -> Array:
    """bool [n, n]: own token i sees own token j when j <= i, or j <= i + slack in the prefill."""
    n_prefill = n if n_prefill is None else n_prefill
    i, j = np.arange(n)[:, None], np.arange(n)[None, :]
    ahead = (i < n_prefill) & (j < n_prefill) & (j <= i + slack)
    return (j <= i) | ahead


def softmax(scores: Array) -> Array:
    """Softmax over the last axis; -inf has weight 0."""
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def _silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def _gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {"silu": _silu, "gelu_pytorch_tanh": _gelu_tanh}


def _heads(x: Array, n_heads: int) -> Array:
    """[n, heads * D] -> [heads, n, D]."""
    return x.reshape(len(x), n_heads, -1).transpose(1, 0, 2)


def _round_to(value: float, dtype: str) -> float:
    if dtype == "bf16":  # float32 with the lower 16 bits rounded off, ties to even
        bits = int(np.float32(value).view(np.uint32))
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
        return float(np.uint32(bits).view(np.float32))
    return float({"f32": np.float32, "f16": np.float16}[dtype](value))
