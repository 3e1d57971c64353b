"""Strategy `search`: layers found by trying them, on a few records with gold answers.

Owns the search (forward greedy, optionally with a beam and a backward pass) over the summed nll of
the gold answers, and what candidates share. The paper has no such selection: it needs gold answers
and many trials, where the attention mass needs one pass. What it finds fits the records it searched
on better than any others, so its own numbers say nothing of new records.

Every context is read once; candidates share those keys. Below the lowest layer in which a candidate
differs from the set that it grew from, the receiver's states are that set's. They are kept, per
layer, and a candidate runs from that layer on: half the work on average, and the very same bits.

    layers of the receiver   0 .. d - 1                d .. L - 1
    candidate S + {d}        states of S, not run      runs, from the states that enter d under S
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcomm import prompts
from kvcomm._core import Session, Workspace
from kvcomm.agents import Call
from kvcomm.errors import MismatchError, NumericError
from kvcomm.generate import log_softmax
from kvcomm.packet import Packet, Preset, check_layer_map, check_preset
from kvcomm.selection import layer_count
from kvcomm.turns import Context, Question, Score, answer_ids, is_ids, prompt_ids

if TYPE_CHECKING:
    from kvcomm.agents import Positions, Receiver, Sender

#: Rows (candidates times questions) of one forward call.
BATCH = 32

Layers = tuple[int, ...]
States = list[NDArray[Any]]


class Sample(NamedTuple):
    """A record to search on.

    context, question: text or ids; a tuple of contexts stands for several senders. answers: one
    gold answer, or alternatives of which the likeliest counts. skyline: the prompt that holds both,
    as ids; None: made of context and question where these are texts.
    """

    context: Context | tuple[Context, ...]
    question: Question
    answers: Any
    skyline: Question | None = None


@dataclass(frozen=True)
class Step:
    """A set of layers on the way, ascending, and its nll: summed over the records, in nats."""

    layers: Layers
    nll: float


@dataclass(frozen=True)
class SearchResult:
    """What a search found. Every number is of the records that it searched on.

    Attributes
    ----------
    layers
        S, sender layers, ascending.
    steps
        The sets that led there, from none to S; a backward pass adds its own.
    baseline_nll, all_layers_nll, skyline_nll
        Of no message, of all layers, and of one prompt with context and question (None when there
        was no such prompt), summed as in `Step`.
    n_samples, n_evaluations
        Records, and candidate sets that were tried on all of them, here and not in `after`.
    preset, sender, receiver
        Whose rules it searched by, and the fingerprints of the two models.
    """

    layers: Layers
    steps: tuple[Step, ...]
    baseline_nll: float
    all_layers_nll: float
    skyline_nll: float | None
    n_samples: int
    n_evaluations: int
    preset: Preset
    sender: str
    receiver: str

    @property
    def nll(self) -> float:
        """Of `layers`, summed over the records searched on."""
        return self.steps[-1].nll

    @property
    def recovered(self) -> float | None:
        """(baseline - nll) / (baseline - skyline) on the records searched on, which flatters it.

        None without a skyline, or where that is no better than the baseline.
        """
        if self.skyline_nll is None or self.skyline_nll >= self.baseline_nll:
            return None
        return (self.baseline_nll - self.nll) / (self.baseline_nll - self.skyline_nll)


@dataclass(frozen=True, eq=False)
class _Tried:
    """A set of layers, what it scored, and the states under it that candidates begin with.

    prompts[l], answers[l]: what enters receiver layer l, float32 [n, dim], per question and per
    gold answer (ids for l = 0).
    """

    layers: Layers
    nll: float
    steps: tuple[Step, ...] = field(repr=False)
    prompts: list[States] = field(repr=False)
    answers: list[States] = field(repr=False)

    @property
    def order(self) -> tuple[float, Layers]:
        """Best first; ties to the lower layers."""
        return self.nll, self.layers


@dataclass(frozen=True, eq=False)
class _Gold:
    """One gold answer, ids [m]: of which question, and the how-many-th of its alternatives."""

    question: int
    turn: int
    ids: NDArray[np.int32]


class _Trials:
    """The nll of layer sets over all samples; `n_evaluations` counts the sets."""

    def __init__(
        self,
        receiver: "Receiver",
        samples: Sequence[Sample],
        packets: Sequence[tuple[Packet, ...]],
        target: Sequence[int],
        options: dict[str, Any],
    ) -> None:
        model = receiver.model
        self.receiver, self.packets, self.target, self.options = receiver, packets, target, options
        self.questions = [
            prompt_ids(model, model.tokenizer, one.question, prompts.receiver_message, "question")
            for one in samples
        ]
        self.golds = [
            _Gold(question, turn, ids)
            for question, one in enumerate(samples)
            for turn, ids in enumerate(answer_ids(model, one.answers))
        ]
        self.n_evaluations = 0

    def start(self) -> _Tried:
        """The empty set."""
        ids = [self.questions], [[gold.ids[:-1] for gold in self.golds]]
        return self.keep(_Tried((), 0.0, (), *ids), ())

    def keep(self, base: _Tried, layers: Layers) -> _Tried:
        """The set `layers`, grown from `base`, with its states."""
        first = self._first(base.layers, layers)
        states = base.prompts[: first + 1], base.answers[: first + 1]
        (nll,) = self._run(base, [layers], first, keep=states)
        return _Tried(layers, nll, (*base.steps, Step(layers, nll)), *states)

    def nlls(self, base: _Tried, sets: Sequence[Layers]) -> list[float]:
        """The nll of every candidate, each run from where it first differs from `base`."""
        self.n_evaluations += len(sets)
        together = max(1, BATCH // len(self.questions))
        of_first: dict[int, list[Layers]] = {}
        for one in sets:
            of_first.setdefault(self._first(base.layers, one), []).append(one)
        found: dict[Layers, float] = {}
        for first, same in of_first.items():
            for begin in range(0, len(same), together):
                batch = same[begin : begin + together]
                found |= zip(batch, self._run(base, batch, first), strict=True)
        return [found[one] for one in sets]

    def _first(self, one: Layers, two: Layers) -> int:
        """The lowest receiver layer that is given other keys."""
        return min((self.target[layer] for layer in {*one} ^ {*two}), default=0)

    def _run(
        self,
        base: _Tried,
        sets: Sequence[Layers],
        first: int,
        keep: tuple[list[States], list[States]] | None = None,
    ) -> list[float]:
        """The nll of sets that differ from `base` in layer `first` and above only.

        keep: takes what enters the layers above `first`, of one set.
        """
        model, n_questions = self.receiver.model, len(self.questions)
        packets = [
            tuple(packet.select(layers) for packet in row)
            for layers in sets
            for row in self.packets
        ]
        call = Call(self.receiver, self.questions * len(sets), packets, self.options)
        edges = range(first, model.n_layers + 1) if keep else (first, model.n_layers)
        logits, between = _through(
            call.workspace,
            call.sessions,
            base.prompts[first] * len(sets),
            edges,
            output="logits",
            slack=call.slack,
        )
        # Row and log-likelihoods [m] of every gold answer, candidate by candidate.
        rows = [start + gold.question for start in range(0, len(packets), n_questions)
                for gold in self.golds]  # fmt: skip
        golds = self.golds * len(sets)
        found = [
            np.full(len(gold.ids), log_softmax(logits[row])[gold.ids[0]])
            for row, gold in zip(rows, golds, strict=True)
        ]
        above: list[States] = [list(base.answers[first]) for _ in between]
        for turn in range(max(gold.turn for gold in self.golds) + 1):
            some = [n for n, gold in enumerate(golds) if gold.turn == turn and len(gold.ids) > 1]
            if not some:
                continue
            for n in some:
                call.sessions[rows[n]].truncate(len(self.questions[golds[n].question]))
            out, states = _through(
                call.workspace,
                [call.sessions[rows[n]] for n in some],
                [base.answers[first][n % len(self.golds)] for n in some],
                edges,
                output="logprob",
                outputs="all",
                targets=[golds[n].ids[1:] for n in some],
            )
            ends = np.cumsum([len(golds[n].ids) - 1 for n in some])[:-1]
            for n, piece in zip(some, np.split(out, ends), strict=True):
                found[n][1:] = piece
            for layer, entering in zip(above, states, strict=True):
                for n, piece in zip(some, entering, strict=True):
                    layer[n] = piece
        self.receiver.count(call.workspace)
        if keep:
            keep[0].extend(between)
            keep[1].extend(above)
        return self._sums(found)

    def _sums(self, found: Sequence[NDArray[np.float64]]) -> list[float]:
        """Per candidate the nll of every question's likeliest answer, summed."""
        sums = []
        for start in range(0, len(found), len(self.golds)):
            best = [math.inf] * len(self.questions)
            for gold, likelihoods in zip(self.golds, found[start:], strict=False):
                if not np.isfinite(likelihoods).all():
                    raise NumericError(f"log-likelihoods of sample {gold.question} are not finite")
                best[gold.question] = min(best[gold.question], float(-likelihoods.sum()))
            sums.append(sum(best))
        return sums


def _through(
    workspace: Workspace,
    sessions: Sequence[Session],
    inputs: States,
    edges: Sequence[int],
    **wanted: Any,
) -> tuple[NDArray[np.float32], list[States]]:
    """Run layers edges[0] .. edges[-1]: what comes out, and what enters at every edge between."""
    ends = np.cumsum([len(one) for one in inputs])[:-1]
    entering = []
    for span in pairwise(edges[:-1]):
        between = wanted | {"output": "hidden", "outputs": "all", "targets": None}
        states, _ = workspace.forward(sessions, inputs, layers=span, **between)
        inputs = np.split(states, ends)
        entering.append(inputs)
    out, _ = workspace.forward(sessions, inputs, layers=(edges[-2], edges[-1]), **wanted)
    return out, entering


# ---- the search ----


def search(
    sender: "Sender",
    receiver: "Receiver",
    samples: Iterable[Sample | tuple[Any, ...]],
    count: int | None = None,
    ratio: float | Fraction | str | None = None,
    *,
    beam: int = 1,
    backward: bool = False,
    preset: Preset = "paper",
    layer_map: Sequence[int] | None = None,
    positions: "Positions" = "published",
    shift_back: bool = False,
    after: SearchResult | None = None,
    watch: Callable[[Step], None] = lambda step: None,
) -> SearchResult:
    """Find the layers to send by trying them on records with gold answers.

    From no layer on, the layer is added that lowers the summed nll of the gold answers most (or
    raises it least), until there are M; ties go to the lower layers. That takes about
    M * (L - M / 2) candidates, each half a prefill of every question.

    Parameters
    ----------
    samples
        `Sample`s, or tuples (context, question, gold answers) of the same; a handful. Few records
        are fitted closely: measure what was found on others.
    count, ratio
        M as a number or as a share of L (`selection.layer_count`).
    beam
        Sets that are kept at every step: the one that greedy search would have, and the best
        others, so that a beam never ends with a higher nll on these records than no beam.
    backward
        Afterwards, while that lowers the nll: drop the layer that is missed least, and put the best
        layer in its place if that is better still. May leave fewer than M layers.
    preset, layer_map, positions, shift_back
        As for `Receiver.answer`.
    after
        A search on the same samples with the same options but for M, without beam and backward
        pass, to go on from: greedy search finds its layers first. The same result, sooner.
    watch
        Called with the best set after every step.

    Returns
    -------
    SearchResult

    Raises
    ------
    ValueError
        No samples, an empty context, question or answer, a count or ratio out of range, a beam
        below 1, a beam with `after`, or prompts beyond the model's last position.
    MismatchError
        `after` is of other models, another preset or another number of samples.
    NumericError
        A likelihood that is not a number.
    """
    check_preset(preset)
    n_layers = sender.model.n_layers
    n_wanted = layer_count(n_layers, ratio=ratio, count=count, preset=preset)
    target = check_layer_map(layer_map, n_layers, receiver.model.n_layers)
    _check_beam(beam)
    records = _records(samples)
    known = () if after is None else _grown(after, sender, receiver, preset, len(records), beam)
    options = {
        "preset": preset,
        "layer_map": layer_map,
        "positions": positions,
        "shift_back": shift_back,
    }
    packets = [tuple(sender.read(_contexts(record), preset=preset)) for record in records]
    trials = _Trials(receiver, records, packets, target, options)
    best = _forward(trials, n_layers, n_wanted, beam, known, watch)
    if backward:
        best = _backward(trials, best, n_layers, watch)
    questions, golds = trials.questions, [one.answers for one in records]
    return SearchResult(
        layers=best.layers,
        steps=best.steps,
        baseline_nll=_summed(receiver.score(questions, golds)),
        all_layers_nll=_summed(receiver.score(questions, golds, packets, **options)),
        skyline_nll=_skyline(receiver, records),
        n_samples=len(records),
        n_evaluations=trials.n_evaluations,
        preset=preset,
        sender=sender.model.fingerprint,
        receiver=receiver.model.fingerprint,
    )


def _check_beam(beam: object) -> None:
    if isinstance(beam, bool) or not isinstance(beam, int) or beam < 1:
        raise ValueError(f"beam: expected a number of sets above 0, found {beam!r}")


def _grown(
    after: SearchResult,
    sender: "Sender",
    receiver: "Receiver",
    preset: Preset,
    n_samples: int,
    beam: int,
) -> list[Layers]:
    """The sets that a greedy search grew, one layer each; refuses any other."""
    sets = [step.layers for step in after.steps]
    if beam != 1 or [len(layers) for layers in sets] != list(range(len(sets))):
        raise ValueError("after: goes with no beam, and is of a search without a backward pass")
    for what, found, wanted in (
        ("sender", after.sender, sender.model.fingerprint),
        ("receiver", after.receiver, receiver.model.fingerprint),
        ("preset", after.preset, preset),
        ("number of samples", after.n_samples, n_samples),
    ):
        if found != wanted:
            raise MismatchError(f"after: {what} {found}, here {wanted}")
    return sets[1:]


def _records(samples: Iterable[Sample | tuple[Any, ...]]) -> list[Sample]:
    records = [_sample(one) for one in samples]
    if not records:
        raise ValueError("samples: a search needs at least one, with its gold answers")
    for number, record in enumerate(records):
        if len(record.answers) == 0:
            raise ValueError(f"sample {number}: has no gold answer")
    return records


def _forward(
    trials: _Trials,
    n_layers: int,
    n_wanted: int,
    width: int,
    known: Sequence[Layers],
    watch: Callable[[Step], None],
) -> _Tried:
    """The best set of so many layers, grown from none, one layer at a time; known: the first."""
    best = trials.start()
    for layers in known[:n_wanted]:
        best = trials.keep(best, layers)
        watch(best.steps[-1])
    beams = [best]
    for _ in range(n_wanted - len(best.layers)):
        beams = _widened(trials, beams, n_layers, width)
        best = min(beams, key=lambda one: one.order)
        watch(best.steps[-1])
    return best


def _backward(
    trials: _Trials, best: _Tried, n_layers: int, watch: Callable[[Step], None]
) -> _Tried:
    """A set with layers dropped and replaced for as long as that lowers the nll."""
    while best.layers:
        better = _swapped(trials, best, n_layers)
        if better.nll >= best.nll:
            break
        best = better
        watch(best.steps[-1])
    return best


def _widened(trials: _Trials, beams: Sequence[_Tried], n_layers: int, width: int) -> list[_Tried]:
    """The next beam: the best set that grows from its first one, then the best others."""
    grown: list[tuple[float, Layers, _Tried]] = []
    for number, base in enumerate(beams):
        known = {layers for _, layers, _ in grown}
        sets = [_with(base.layers, n) for n in range(n_layers) if n not in base.layers]
        sets = [one for one in sets if one not in known]
        grown += [(nll, one, base) for nll, one in zip(trials.nlls(base, sets), sets, strict=True)]
        if number == 0:
            greedy = min(grown, key=lambda one: one[:2])
    others = sorted((one for one in grown if one is not greedy), key=lambda one: one[:2])
    return [trials.keep(base, layers) for _, layers, base in [greedy, *others[: width - 1]]]


def _swapped(trials: _Trials, base: _Tried, n_layers: int) -> _Tried:
    """The set without the layer that it misses least, or with the best other in its place."""
    fewer = [_without(base.layers, layer) for layer in base.layers]
    dropped = trials.keep(base, min(zip(trials.nlls(base, fewer), fewer, strict=True))[1])
    swaps = [_with(dropped.layers, n) for n in range(n_layers) if n not in base.layers]
    if not swaps:
        return dropped
    nll, layers = min(zip(trials.nlls(dropped, swaps), swaps, strict=True))
    if nll >= dropped.nll:
        return dropped
    swapped = trials.keep(dropped, layers)
    return replace(swapped, steps=(*base.steps, swapped.steps[-1]))


def _with(layers: Layers, layer: int) -> Layers:
    return tuple(sorted((*layers, layer)))


def _without(layers: Layers, layer: int) -> Layers:
    return tuple(one for one in layers if one != layer)


def _sample(one: Sample | tuple[Any, ...]) -> Sample:
    if not isinstance(one, tuple) or len(one) not in (3, 4):
        raise ValueError("samples: expected context, question and gold answers of each")
    return Sample(*one)


def _contexts(record: Sample) -> list[Context]:
    several = isinstance(record.context, tuple) and not is_ids(record.context)
    return list(record.context) if several else [record.context]


def _summed(scores: Sequence[Score]) -> float:
    return sum(score.nll for score in scores)


def _skyline(receiver: "Receiver", records: Sequence[Sample]) -> float | None:
    """Of the prompts with both; None where one is neither given nor made of texts."""
    whole = []
    for record in records:
        skyline = record.skyline
        if skyline is None and isinstance(record.context, str) and isinstance(record.question, str):
            skyline = prompts.skyline_message(record.context, record.question)
        if skyline is None:
            return None
        whole.append(skyline)
    return _summed(receiver.score(whole, [one.answers for one in records], message=str))
