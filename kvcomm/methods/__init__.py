"""The compared methods behind one small interface.

Owns what a method is given (`Bench`, `Item`) and what it gives back (`Outcome`), and the table of
methods by name. One file per method holds the method itself. Nothing here knows data sets, logs or
metrics: evaluate.py makes the items and scores the outcomes.

A method is a frozen dataclass with its settings as fields. For a batch of items it answers every
question greedily and gives the likelihood of the gold answers; what it reads of a context it takes
from the bench, which reads each context once for all methods of a run.
"""

import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvcomm import progress, runs, selection
from kvcomm.agents import Positions, Receiver, Sender
from kvcomm.agreement import MOST_TOKENS, Agreement, Reference, compare
from kvcomm.layout import counted
from kvcomm.packet import Packet, Preset
from kvcomm.prefilled import Prefilled
from kvcomm.selection import LayerScores
from kvcomm.tasks import Example
from kvcomm.turns import Answer, Score, Stats

if TYPE_CHECKING:
    from kvcomm.plan import Prompts

TokenIds = NDArray[np.int32]
_Read = TypeVar("_Read")
Senders = Literal["one", "split", "documents"]


@dataclass(frozen=True, eq=False)
class Item:
    """One record as the models get it: prompts in chat template, as ids, cut where too long.

    number: its place among the scored records of the run. example: the record, for methods that
    write prompts of their own. sender: ids [C] of the prompt with the context; receiver: ids [Q] of
    the one with the question, baseline: the same for a receiver that gets no message; skyline: of
    the one with both. skyline_shared: how many of its first ids do not depend on the question. cut:
    how many tokens the sender's and the skyline's prompt lost. gold: per accepted answer its ids.
    """

    number: int
    example: Example
    sender: TokenIds
    receiver: TokenIds
    baseline: TokenIds
    skyline: TokenIds
    skyline_shared: int
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

    @classmethod
    def of(
        cls, stats: Stats, *, sender: float = 0.0, transfer: float = 0.0, before: float = 0.0
    ) -> "Seconds":
        """From a receiver's answer; before: what the receiver did before the call that answered."""
        first = stats.first_token_seconds
        return cls(
            sender,
            transfer,
            None if first is None else before + first,
            sender + transfer + before + stats.total_seconds,
        )


@dataclass(frozen=True)
class Outcome:
    """What a method did with one item.

    nll: of the likeliest gold answer, in nats, summed over its n_gold_tokens tokens.
    message_bytes: handed to the receiver. receiver_tokens: prefilled by the receiver. cut_tokens:
    lost from the prompts. prompts: ids of every prompt that a model was given, sender first.
    layers: the layers sent, None where that means nothing. message: the text that was passed, where
    a method passes text. agreement: with skyline, when the run asks for it. calibrating: the answer
    of the same item that its layers were chosen from, where that one counts too.
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
    message: str | None = None
    agreement: Agreement | None = None
    calibrating: "Outcome | None" = None

    @classmethod
    def of(cls, reply: "Reply", prompts: tuple[TokenIds, ...], **fields: Any) -> "Outcome":
        """From what a receiver replied."""
        return cls(
            answer=reply.answer.text,
            token_ids=reply.answer.ids,
            nll=reply.score.nll,
            n_gold_tokens=len(reply.score.token_ids),
            prompts=prompts,
            agreement=reply.agreement,
            **fields,
        )


@dataclass(frozen=True)
class Reply:
    """A receiver's answer to one item, its score of the gold answers, and how it agrees with
    skyline when the run asks for that."""

    answer: Answer
    score: Score
    agreement: Agreement | None


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
    calibration
        The items of the calibration records.
    prompts
        What makes items out of records, for methods that write prompts of their own.
    agreement
        Whether methods are held against skyline's answers, token by token.
    trial
        Whether settings are only being checked: no model runs, and scores are without meaning.
    folder
        Of the run, where what a search has found is kept for a later start.
    bars
        Whether work that answers no record, such as a calibration, is shown as a bar; else it is
        noted.
    note
        Gets a line about such work, and about anything unusual.
    """

    sender: Sender
    receiver: Receiver
    preset: Preset = "paper"
    max_new_tokens: int = 64
    layer_map: tuple[int, ...] | None = None
    scores: LayerScores | None = None
    read_layers: tuple[int, ...] = ()
    items: Sequence[Item | Exception] = ()
    calibration: Sequence[Item] = ()
    prompts: "Prompts | None" = None
    agreement: bool = False
    trial: bool = False
    folder: Path | None = None
    bars: bool = False
    note: Callable[[str], None] = lambda line: None
    _references: dict[int, Reference | None] = field(default_factory=dict, repr=False)
    _made: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    _sent: "Readings[Packet]" = field(default_factory=lambda: Readings(), repr=False)
    _own: "Readings[Packet]" = field(default_factory=lambda: Readings(), repr=False)

    def replies(self, prefilled: Prefilled, items: Sequence[Item]) -> list[Reply]:
        """Answer the items from their prefilled prompts, and score what the run asks for."""
        answers = prefilled.answer(self.max_new_tokens)
        scores = prefilled.score([item.gold for item in items])
        agreements: list[Agreement | None] = [None] * len(answers)
        if self.agreement:
            references = self._skylines(items)
            followed = prefilled.follow([None if r is None else r.ids for r in references])
            agreements = [
                None if reference is None else compare(reference, logits)
                for reference, logits in zip(references, followed, strict=True)
            ]
        return list(map(Reply, answers, scores, agreements))

    def _skylines(self, items: Sequence[Item]) -> list[Reference | None]:
        """Skyline's answers to items; None for an empty one."""
        new = [item for item in items if item.number not in self._references]
        if new:
            from kvcomm.methods.skyline import prefill

            prefilled, _ = prefill(self, new)
            answers = prefilled.answer(min(MOST_TOKENS, self.max_new_tokens))
            ids = [np.array(answer.ids, np.int32) if answer.ids else None for answer in answers]
            for item, own, logits in zip(new, ids, prefilled.follow(ids), strict=True):
                found = None if own is None else Reference.of(own, logits)
                self._references[item.number] = found
        return [self._references[item.number] for item in items]

    @property
    def published(self) -> bool:
        """Whether the run counts what the published code counts."""
        return self.prompts is not None and self.prompts.plan.published

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` gives, made at the first call with this key and kept."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def kept(self, name: str, asked: Mapping[str, Any], make: Callable[[], Any]) -> Any:
        """What `make` gives, as JSON, kept in the run's folder for a later start; errors and
        parameters as for `runs.kept`."""
        return make() if self.folder is None else runs.kept(self.folder, name, asked, make)

    def calibrate(
        self,
        samples: Sequence[tuple[Any, TokenIds]],
        *,
        positions: Positions = "published",
        what: str | None = None,
    ) -> LayerScores:
        """Layer scores over pairs (sender's prompts, question), in the run's preset; what: shown
        with the bar, or noted."""
        shown = self.bars and what is not None
        if what is not None and not shown:
            self.note(f"{what} on {counted(len(samples), 'record')}")
        with progress.bar(len(samples), "record", shown=shown, what=what) as bar:

            def each() -> Iterable[tuple[Any, TokenIds]]:
                for sample in samples:
                    yield sample
                    bar.update()

            scores = selection.calibrate(
                self.sender,
                self.receiver,
                each(),
                preset=self.preset,
                layer_map=self.layer_map,
                positions=positions,
            )
        task = None if self.prompts is None else self.prompts.task.name
        return replace(scores, task=task)

    def read_prompts(self, prompts: Sequence[TokenIds]) -> list[tuple[Packet, float]]:
        """Per sender's prompt, ids [C], a packet of `read_layers` and the seconds that its batch
        took; prompts that are equal are read once."""
        return self._sent.read(
            prompts,
            lambda new: self.sender.read(new, self.read_layers, preset=self.preset),
        )

    def read_own(self, prompts: Sequence[TokenIds]) -> list[tuple[Packet, float]]:
        """Beginnings of prompts, ids [n], read by the receiver itself; equal ones once.

        A prompt that goes on behind such a packet of all layers is as good as read in one go (up to
        rounding), and a long context that many questions share is prefilled once.
        """
        reader = Sender(self.receiver.model)
        reader.tally = self.receiver.tally
        return self._own.read(prompts, lambda new: reader.read(new, trim=False))

    def forget(self, upcoming: Sequence[Item] = ()) -> None:
        """Let the packets go that were read so far, but for those that `upcoming` items read."""
        self._sent.keep(item.sender for item in upcoming)
        self._own.keep(item.skyline[: item.skyline_shared] for item in upcoming)
        self._references.clear()


class Readings(Generic[_Read]):
    """What was made of prompts by reading them, each once, with the seconds that its batch took."""

    def __init__(self) -> None:
        self._found: dict[bytes, tuple[_Read, float]] = {}

    def read(
        self,
        prompts: Sequence[TokenIds],
        reader: Callable[[list[TokenIds]], Sequence[_Read]],
    ) -> list[tuple[_Read, float]]:
        keys = [ids.tobytes() for ids in prompts]
        wanted = dict(zip(keys, prompts, strict=True))
        new = {key: ids for key, ids in wanted.items() if key not in self._found}
        if new:
            started = time.perf_counter()
            made = reader(list(new.values()))
            seconds = time.perf_counter() - started
            for key, one in zip(new, made, strict=True):
                self._found[key] = (one, seconds)
        return [self._found[key] for key in keys]

    def keep(self, prompts: Iterable[TokenIds]) -> None:
        kept = {ids.tobytes() for ids in prompts}
        self._found = {key: one for key, one in self._found.items() if key in kept}


class Method(ABC):
    """A way for a receiver to answer a question about a context that it may not have read."""

    name: ClassVar[str]

    #: Whether what it holds of a context is held once for all items of a batch that have it.
    shares_contexts: ClassVar[bool] = True

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

    def repeats(self, bench: Bench, item: Item) -> bool:
        """Whether an item's outcome is to have a `calibrating` one."""
        return False

    @abstractmethod
    def run(self, bench: Bench, items: Sequence[Item]) -> list[Outcome]:
        """One outcome per item. An item's outcome does not depend on the others (but for times)."""


@dataclass(frozen=True)
class Options:
    """What a user may say about the methods of a run; each method takes what it knows.

    Attributes
    ----------
    ratios, strategies, layers, alpha, level, shift_back, online, seed
        kvcomm: shares of the layers, as written; of `selection.STRATEGIES`; an explicit list (the
        ends of it for "contiguous"); choose again at every such record.
    skip_first
        kvcomm: leave the first context token out of the attention mass; None: the preset's way;
        "auto": by `selection.SINK_SHARE`.
    senders, positions
        kvcomm, nld, cipher: who reads the context: "one" sender, two ("split", as published) or one
        for each of its "documents"; where the keys of several stand, see `Receiver`.
    search_records, beam, backward
        Strategy "search": calibration records it goes by, and how it goes.
    rules, from_layer, to_layer
        ac: "replace", "sum", "mean". ac and prepend_hidden: layers k and j.
    tokens, effect, at_layers
        token_importance: "first", "last", "random", "none", which one to "keep" or "zero"; l.
    message_tokens, sender_aware, cipher_temperature
        nld, cipher: most tokens of the first phase; the sender is told what its text is for; T of
        the mean embedding (None: 0.7, and 1.0 in preset reference, as the published runs had it).
    controls
        control: "wrong_context", "shuffled", "noise", "random".
    """

    ratios: tuple[str, ...] = ("0.5",)
    strategies: tuple[str, ...] = ("attention_gaussian",)
    layers: tuple[int, ...] | None = None
    alpha: float = 1.0
    level: int | None = None
    shift_back: bool = False
    online: int | None = None
    seed: int = 42
    skip_first: bool | Literal["auto"] | None = None
    senders: Senders = "one"
    positions: Positions = "published"
    search_records: int = 6
    beam: int = 1
    backward: bool = False
    rules: tuple[str, ...] = ("replace",)
    from_layer: int | None = None
    to_layer: int | None = None
    tokens: tuple[str, ...] = ("last",)
    effect: str = "keep"
    at_layers: tuple[int, ...] | None = None
    message_tokens: int = 256
    sender_aware: bool = False
    cipher_temperature: float | None = None
    controls: tuple[str, ...] = ("wrong_context", "shuffled", "noise", "random")


#: The methods by name; each is the module of that name in this package.
METHODS = (
    "baseline", "skyline", "kvcomm", "nld", "cipher", "ac", "prepend_hidden", "token_importance",
    "control",
)  # fmt: skip


def methods(names: Sequence[str], options: Options) -> list[Method]:
    """The methods of a run by name, in that order, each with all its variants.

    Raises
    ------
    ValueError
        An unknown or repeated name, or settings that make the same variant twice.
    """
    chosen: list[Method] = []
    for name in names:
        if name not in METHODS:
            raise ValueError(f"method: expected one of {', '.join(METHODS)}, found {name!r}")
        chosen += importlib.import_module(f"kvcomm.methods.{name}").variants(options)
    labels = [method.label for method in chosen]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"method: {label!r} is asked for {labels.count(label)} times")
    if not chosen:
        raise ValueError("method: none is asked for")
    return chosen
