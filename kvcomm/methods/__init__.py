"""The compared methods behind one small interface.

Owns what a method is given (`Bench`, `Item`) and what it gives back (`Outcome`), and the table of
methods by name. One file per method holds the method itself. Nothing here knows data sets, logs or
metrics: evaluate.py makes the items and scores the outcomes.

A method is a frozen dataclass with its settings as fields. For a batch of items it answers every
question greedily and gives the likelihood of the gold answers; what it reads of a context it takes
from the bench, which reads each context once for all methods of a run.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvcomm.agents import Answer, Receiver, Score, Sender
from kvcomm.packet import Packet, Preset

if TYPE_CHECKING:
    from kvcomm.selection import LayerScores

TokenIds = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Item:
    """One record as the models get it: prompts in chat template, as ids, cut where too long.

    number: its place among the scored records of the run. sender: ids [C] of the prompt with the
    context; receiver: ids [Q] of the one with the question, baseline: the same for a receiver that
    gets no message; skyline: of the one with both. cut: how many tokens the sender's and the
    skyline's prompt lost. gold: per accepted answer its ids.
    """

    number: int
    sender: TokenIds
    receiver: TokenIds
    baseline: TokenIds
    skyline: TokenIds
    sender_cut: int
    skyline_cut: int
    gold: tuple[TokenIds, ...]


@dataclass(frozen=True)
class Seconds:
    """Wall time that a record waited for, in the batch that it was in; never summed over a batch.

    sender: reading the context. It is read once for all variants, up to the highest layer that any
    of them needs, so a variant alone may need less. transfer: handing the message over in this
    process, which copies nothing. first_token: from the receiver's start, message in hand, to its
    first token; None when it wrote none. total: sender, transfer and the whole answer. Computing
    the likelihood of gold answers is in none of them.
    """

    sender: float
    transfer: float
    first_token: float | None
    total: float


@dataclass(frozen=True)
class Outcome:
    """What a method did with one item.

    nll: of the likeliest gold answer, in nats, summed over its n_gold_tokens tokens.
    message_bytes: handed to the receiver. receiver_tokens: prefilled by the receiver. cut_tokens:
    lost from the prompts. prompts: ids of every prompt that a model was given, sender first.
    layers: the layers sent, None where that means nothing.
    """

    answer: str
    token_ids: tuple[int, ...]
    nll: float
    n_gold_tokens: int
    message_bytes: int
    receiver_tokens: int
    cut_tokens: int
    seconds: Seconds
    prompts: tuple[TokenIds, ...] = field(repr=False)
    layers: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls, answer: Answer, score: Score, prompts: tuple[TokenIds, ...], **fields: Any
    ) -> "Outcome":
        """From a receiver's answer and its score of the gold answers."""
        return cls(
            answer=answer.text,
            token_ids=answer.ids,
            nll=score.nll,
            n_gold_tokens=len(score.token_ids),
            prompts=prompts,
            **fields,
        )


@dataclass(eq=False)
class Bench:
    """The pair of models and the settings that all methods of a run share.

    Attributes
    ----------
    read_layers
        Sender layers that some method of the run hands over.
    scores
        The calibration; None when no method needs one.
    items
        All items of the run, for methods that choose from an earlier one; in place of an item that
        could not be made stands its error.
    """

    sender: Sender
    receiver: Receiver
    preset: Preset = "paper"
    max_new_tokens: int = 64
    layer_map: tuple[int, ...] | None = None
    scores: "LayerScores | None" = None
    read_layers: tuple[int, ...] = ()
    items: Sequence[Item | Exception] = ()
    _readings: dict[int, tuple[Packet, float]] = field(default_factory=dict, repr=False)

    def read(self, items: Sequence[Item]) -> list[tuple[Packet, float]]:
        """Per item a packet of `read_layers` and the seconds that reading took; read once."""
        new = [item for item in items if item.number not in self._readings]
        if new:
            started = time.perf_counter()
            packets = self.sender.read(
                [item.sender for item in new], self.read_layers, preset=self.preset
            )
            seconds = time.perf_counter() - started
            for item, packet in zip(new, packets, strict=True):
                self._readings[item.number] = (packet, seconds)
        return [self._readings[item.number] for item in items]

    def forget(self) -> None:
        """Let the packets go that were read so far."""
        self._readings.clear()


class Method(ABC):
    """A way for a receiver to answer a question about a context that it may not have read."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def label(self) -> str:
        """Short and unlike that of any other method of a run; names the row of a table."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """What makes this variant, as JSON can hold it."""
        return {}

    @property
    def calibrated(self) -> bool:
        """Whether it needs `Bench.scores`."""
        return False

    def layers(self, bench: Bench) -> tuple[int, ...]:
        """Sender layers that it wants read; bad settings are a ValueError here, before any run."""
        return ()

    @abstractmethod
    def run(self, bench: Bench, items: Sequence[Item]) -> list[Outcome]:
        """One outcome per item. An item's outcome does not depend on the others (but for times)."""


@dataclass(frozen=True)
class Options:
    """What a user may say about the methods of a run; each method takes what it knows.

    ratios: shares of the layers, as written. strategies: of `selection.STRATEGIES`. layers: an
    explicit list (the ends of it for "contiguous"). online: choose again at every such record.
    """

    ratios: tuple[str, ...] = ("0.5",)
    strategies: tuple[str, ...] = ("attention_gaussian",)
    layers: tuple[int, ...] | None = None
    alpha: float = 1.0
    level: int | None = None
    shift_back: bool = False
    online: int | None = None
    seed: int = 42


def methods(names: Sequence[str], options: Options) -> list[Method]:
    """The methods of a run by name, in that order, each with all its variants.

    Raises
    ------
    ValueError
        An unknown or repeated name, or settings that make the same variant twice.
    """
    from kvcomm.methods import baseline, kvcomm, skyline

    known: dict[str, Callable[[Options], list[Method]]] = {
        "baseline": baseline.variants,
        "skyline": skyline.variants,
        "kvcomm": kvcomm.variants,
    }
    chosen: list[Method] = []
    for name in names:
        if name not in known:
            raise ValueError(f"method: expected one of {', '.join(known)}, found {name!r}")
        chosen += known[name](options)
    labels = [method.label for method in chosen]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"method: {label!r} is asked for {labels.count(label)} times")
    if not chosen:
        raise ValueError("method: none is asked for")
    return chosen
