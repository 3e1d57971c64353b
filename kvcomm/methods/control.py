"""`control`: what a receiver makes of a message that should tell it nothing.

Four controls that no published code runs, each at the ratios of the run and in the very layers that
kvcomm's own choice (attention_gaussian, one sender) has at that ratio:

    wrong_context   K and V of another record's context, as long as that is
    shuffled        K and V of the right context, read with its tokens in another order
    noise           Gaussian noise with the norm of the right K and V, per layer, head and token
    random          the right K and V in other layers, drawn so that as many bytes are sent

A message that helps only by what it says leaves the first three at the baseline; `findings` says
which are not there. Bytes of a record are those of the right message but for a wrong context, which
has its own length; where all contexts of a run differ each is sent once, so that the run's bytes
are the right ones again, up to what is cut (the next question may leave less room).

With the same seed and preset paper, `random` is kvcomm's strategy "random" of the same ratio, digit
for digit: both are the same draw. It is another only where that draw happens to be the chosen
layers, or where layers differ in bytes (windowed ones, and layer 0 in preset reference), which
strategy "random" does not look at. A run needs one of the two.

Owns the four, and no other arithmetic on caches than drawing that noise: this is an experiment's
control and no part of the product's path, so float32 NumPy does.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcomm import selection
from kvcomm._core import KV
from kvcomm.methods import Bench, Item, Method, Options, Outcome, TokenIds
from kvcomm.methods.kvcomm import KVComm, Message, exchange
from kvcomm.packet import Packet
from kvcomm.prompts import cut_sender
from kvcomm.statistics import FEW
from kvcomm.weights import bf16_from_f32, f32_from_bf16

#: The controls, and what tables call them.
KINDS = {
    "wrong_context": "wrong context",
    "shuffled": "shuffled context",
    "noise": "noise",
    "random": "random layers",
}


@dataclass(frozen=True)
class Control(Method):
    """One control at one ratio.

    Attributes
    ----------
    kind
        A key of `KINDS`.
    choice
        The method whose layers are sent; "random" sends others, some of which may be among them.
    seed
        Of the order of tokens, the noise and the layers, with the item's number.
    """

    kind: str
    choice: KVComm
    seed: int = selection.SEED

    name = "control"
    shares_contexts = False  # shuffled and noise are each record's own

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"control: expected one of {', '.join(KINDS)}, found {self.kind!r}")

    @property
    def label(self) -> str:
        seed = "" if self.seed == selection.SEED else f" seed {self.seed}"
        return f"{KINDS[self.kind]} {self.choice.label.removeprefix('kvcomm ')}{seed}"

    @property
    def settings(self) -> Mapping[str, Any]:
        kept = ("ratio", "alpha", "shift_back", "skip_first")
        chosen = self.choice.settings
        seed = None if self.kind == "wrong_context" else self.seed
        return {"control": self.kind, "seed": seed} | {name: chosen[name] for name in kept}

    @property
    def calibrated(self) -> bool:
        return True

    def layers(self, bench: Bench) -> tuple[int, ...]:
        if bench.prompts is not None:
            bench.prompts.check_context(self.label)
        chosen = self.choice.layers(bench)
        return _other_layers(bench, chosen, self.seed) if self.kind == "random" else chosen

    def run(self, bench: Bench, items: Sequence[Item]) -> list[Outcome]:
        layers = self.layers(bench)
        sent = [self._sent(bench, item) for item in items]
        readings = bench.read_prompts([ids for ids, _ in sent])
        messages = []
        for item, (ids, cut), (packet, seconds) in zip(items, sent, readings, strict=True):
            packet = packet.select(layers)
            if self.kind == "noise":
                packet = noise(packet, (self.seed, item.number))
            messages.append(Message((packet,), layers, (ids,), cut, seconds))
        return exchange(bench, items, messages, shift_back=self.choice.shift_back)

    def _sent(self, bench: Bench, item: Item) -> tuple[TokenIds, int]:
        """What the sender reads, ids [C], and how many tokens it lost."""
        if self.kind == "wrong_context":
            other = _other_item(bench, item)
            if not bench.prompts.task.truncates:
                return other.sender, 0
            # The other record's question may have been shorter.
            ids, cut = cut_sender(other.sender, len(item.receiver), bench.prompts.limit)
            return ids, cut + other.sender_cut
        if self.kind == "shuffled":
            return shuffled(bench, item, self.seed), item.sender_cut
        return item.sender, item.sender_cut


# ---- another context ----------------------------------------------------------------------------


def _other_item(bench: Bench, item: Item) -> Item:
    """The next item of the run, from its end to its beginning, that has another context."""
    for other in (*bench.items[item.number + 1 :], *bench.items[: item.number]):
        if isinstance(other, Item) and other.example.context != item.example.context:
            return other
    raise ValueError("wrong context: no other record of the run has another context")


# ---- another order ------------------------------------------------------------------------------

#: Contexts that have no token in common: where prompts of both agree, there is the frame.
_PROBES = ("0", "x")


def shuffled(bench: Bench, item: Item, seed: int) -> TokenIds:
    """The sender's prompt with the context's tokens in another order, ids [C].

    What stands around the context, template and instruction, keeps its place: the beginning and the
    end that the prompt shares with prompts of the same task with other contexts.
    """
    probes = [bench.prompts.sender(probe) for probe in _PROBES]
    ids = item.sender.copy()
    head = min(_shared(ids, probe) for probe in probes)
    tail = min(_shared(ids[head:][::-1], probe[::-1]) for probe in probes)
    context = ids[head : len(ids) - tail]
    context[:] = np.random.default_rng((seed, item.number)).permutation(context)
    return ids


def _shared(one: TokenIds, other: TokenIds) -> int:
    """How many ids both begin with."""
    n = min(len(one), len(other))
    differ = np.flatnonzero(one[:n] != other[:n])
    return int(differ[0]) if differ.size else n


# ---- noise --------------------------------------------------------------------------------------


def noise(packet: Packet, seed: tuple[int, ...]) -> Packet:
    """A packet of the same shape whose every key and value has the norm of the one it stands for.

    Each layer has a generator of its own: its noise does not depend on which others are sent.
    """
    kv = packet.kv
    read, write = _CODECS[kv.dtype]

    def like(array: NDArray[Any], draw: np.random.Generator) -> NDArray[Any]:
        values = read(array)
        drawn = draw.standard_normal(values.shape, np.float32)
        norms = [np.linalg.norm(one, axis=-1, keepdims=True) for one in (values, drawn)]
        return write(drawn * (norms[0] / norms[1]))

    layers = {}
    for layer in range(kv.n_layers):
        draw = np.random.default_rng((*seed, layer))
        layers[layer] = [
            (like(k, draw), like(v, draw), position, offset)
            for k, v, position, offset in kv.parts(layer)
        ]
    drawn = KV.from_arrays(
        layers,
        n_layers=kv.n_layers,
        n_kv_heads=kv.n_kv_heads,
        head_dim=kv.head_dim,
        dtype=kv.dtype,
        next_position=kv.next_position,
        device=kv.device,
    )
    return replace(packet, kv=drawn)


_Codec = tuple[Callable[[NDArray[Any]], NDArray[np.float32]], Callable[..., NDArray[Any]]]

#: KV dtype -> to float32, and back.
_CODECS: dict[str, _Codec] = {
    "f32": (np.asarray, np.ascontiguousarray),
    "f16": (lambda array: array.astype(np.float32), lambda array: array.astype(np.float16)),
    "bf16": (f32_from_bf16, bf16_from_f32),
}


# ---- other layers -------------------------------------------------------------------------------


def _other_layers(bench: Bench, chosen: Sequence[int], seed: int) -> tuple[int, ...]:
    """A draw other than the chosen layers that sends as many bytes.

    As many layers of each kind are drawn as were chosen: windowed layers may be sent in part, and
    preset reference sends layer 0 anyhow.
    """
    windowed = bench.sender.origin.windowed
    kinds = [(window, bench.preset == "reference" and n == 0) for n, window in enumerate(windowed)]
    groups = [[n for n, own in enumerate(kinds) if own == kind] for kind in dict.fromkeys(kinds)]
    counts = [len(set(group) & set(chosen)) for group in groups]
    if all(count in (0, len(group)) for count, group in zip(counts, groups, strict=True)):
        raise ValueError(
            f"control: {len(chosen)} of {len(windowed)} layers are chosen, and no others make "
            "as many bytes"
        )
    draw = random.Random(seed)
    while True:
        drawn = sorted(
            n
            for group, count in zip(groups, counts, strict=True)
            for n in draw.sample(group, count)
        )
        if drawn != sorted(chosen):
            return tuple(drawn)


# ---- what they show -----------------------------------------------------------------------------


def findings(summary: Mapping[str, Any]) -> list[str]:
    """One line per control of a run: whether it scores like the baseline.

    The measure is the paired difference of the gold answers' nll on the same records, with its 95%
    bootstrap interval; see `summary.summarise`. Beside it stands the recovered share. Fewer
    than `statistics.FEW` records tell nothing.
    """
    found = []
    recovered = {method["label"]: method["recovered"] for method in summary["methods"]}
    controls = {m["label"] for m in summary["methods"] if m["method"] == "control"}
    for one in summary["comparisons"]:
        if one["method"] not in controls or one["control"] != "baseline":
            continue
        less, share = one["nll_less"], recovered[one["method"]]
        if less["n"] < FEW:
            says = "cannot be told from so few records"
        elif less["low"] <= 0 <= less["high"]:
            says = "scores like the baseline"
        elif less["low"] > 0:
            says = "does not score like the baseline but better"
        else:
            says = "does not score like the baseline but worse"
        sign, word = (1, "less") if less["value"] >= 0 else (-1, "more")
        low, high = sorted((sign * less["low"], sign * less["high"]))
        line = (
            f"{one['method']} {says}: {sign * less['value']:.2f} nats {word} per record "
            f"[{low:.2f}, {high:.2f}], n {less['n']}"
        )
        if share is not None and share["low"] is not None:
            line += f"; recovered {share['value']:.0%} [{share['low']:.0%}, {share['high']:.0%}]"
        found.append(line)
    return found


def variants(options: Options) -> list[Method]:
    """One variant per control and ratio."""
    return [
        Control(
            kind,
            KVComm(
                ratio=ratio,
                alpha=options.alpha,
                shift_back=options.shift_back,
                skip_first=options.skip_first,
            ),
            options.seed,
        )
        for kind in options.controls
        for ratio in options.ratios
    ]
