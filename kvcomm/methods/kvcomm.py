"""`kvcomm`: the receiver gets K and V of some of the sender's layers (the paper's section 3).

The strategies of selection.py are variants of this one method: the paper's choice, its ablations,
random layers as a control, and the search that the paper does not have. Further variants: positions
of KVComm-S, several senders, the first token's place in the mass, and layers chosen again every
T-th record. Owns also `exchange`, the last step, which control.py shares.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from kvcomm import progress, search, selection
from kvcomm.agents import Positions
from kvcomm.errors import FormatError
from kvcomm.layout import counted
from kvcomm.methods import Bench, Item, Method, Options, Outcome, Seconds, Senders, TokenIds
from kvcomm.packet import Packet, layer_set
from kvcomm.records import digest
from kvcomm.runs import SEARCH
from kvcomm.selection import LayerScores

#: The strategies that take no ratio.
_FIXED = ("contiguous", "layers", "all")

#: Those that choose by records.
_BY_RECORDS = selection.CALIBRATED | {"search"}

#: Calibration records that a search goes by, unless asked otherwise.
SEARCH_RECORDS = Options.search_records

#: What tables call a strategy, where that is not its name.
_SHORT = {"attention_gaussian": "kvcomm", "all": "all layers"}

#: What a label says of `skip_first`.
_FIRST = {None: None, True: "skip first", False: "count first", "auto": "auto first"}


@dataclass(frozen=True, eq=False)
class Message:
    """What one receiver is handed: a packet of `layers` of every sender.

    prompts: what the senders read, ids [C] each; cut_tokens of them were cut. reading, transfer:
    seconds that it took to read them, and to hand them over.
    """

    packets: tuple[Packet, ...]
    layers: tuple[int, ...]
    prompts: tuple[TokenIds, ...]
    cut_tokens: int
    reading: float
    transfer: float = 0.0


def exchange(
    bench: Bench,
    items: Sequence[Item],
    messages: Sequence[Message],
    *,
    shift_back: bool = False,
    positions: Positions = "published",
) -> list[Outcome]:
    """The receiver's answers to the questions of the items, a message in hand for each."""
    prefilled = bench.receiver.prefill(
        [item.receiver for item in items],
        [message.packets for message in messages],
        preset=bench.preset,
        shift_back=shift_back,
        layer_map=bench.layer_map,
        positions=positions,
    )
    replies = bench.replies(prefilled, items)
    return [
        Outcome.of(
            reply,
            (*message.prompts, item.receiver),
            message_bytes=reply.answer.stats.message_bytes,
            receiver_tokens=len(item.receiver),
            cut_tokens=message.cut_tokens,
            seconds=Seconds.of(
                reply.answer.stats, sender=message.reading, transfer=message.transfer
            ),
            layers=message.layers,
        )
        for item, message, reply in zip(items, messages, replies, strict=True)
    ]


@dataclass(frozen=True)
class KVComm(Method):
    """K and V of the layers that a strategy chooses.

    Attributes
    ----------
    strategy, ratio, alpha, level, seed
        As for `selection.choose`; ratio is kept as written. "search" is `search.search`.
    given
        The explicit layers of strategy "layers", and the first and last of "contiguous".
    shift_back, positions
        As for `Receiver.answer`.
    online
        T: choose again at every T-th record, from that record, which is answered with the new
        choice (the paper's Appendix L). None: the run's calibration. The published code calibrates
        by answering that record with all layers and counts both answers: in a run of the published
        protocol the outcome has that answer as `calibrating`.
    senders
        Who reads the context: "one" sender; "split", two, as published; "documents", one for each
        piece of it. Layers are then chosen by what the question pays to all of them together.
    skip_first
        Leave the first context token out of the mass that layers are chosen by, as for
        `selection.calibrate`.
    search_records, beam, backward
        Of strategy "search": how many calibration records it goes by, and how it goes.
    """

    strategy: str = "attention_gaussian"
    ratio: str | None = None
    given: tuple[int, ...] | None = None
    alpha: float = 1.0
    level: int | None = None
    shift_back: bool = False
    online: int | None = None
    seed: int = selection.SEED
    senders: Senders = "one"
    positions: Positions = "published"
    skip_first: selection.SkipFirst = None
    search_records: int = SEARCH_RECORDS
    beam: int = 1
    backward: bool = False

    name = "kvcomm"

    def __post_init__(self) -> None:
        for field, known in (
            ("strategy", selection.STRATEGIES),
            ("senders", get_args(Senders)),
            ("positions", get_args(Positions)),
        ):
            value = getattr(self, field)
            if value not in known:
                raise ValueError(f"{field}: expected one of {', '.join(known)}, found {value!r}")
        selection.check_skip_first(self.skip_first)
        if self.online is not None and self.online < 1:
            raise ValueError(f"online: expected a number of records above 0, found {self.online}")
        if self.strategy in ("layers", "contiguous") and not self.given:
            raise ValueError(f"layers: strategy {self.strategy!r} needs a list")
        if self.positions != "published" and self.senders == "one":
            raise ValueError(f"positions: {self.positions!r} is about several senders, found one")
        if self.search_records < 1:
            raise ValueError(f"search records: expected 1 or more, found {self.search_records}")
        if self.beam < 1:
            raise ValueError(f"beam: expected 1 or more, found {self.beam}")

    @property
    def label(self) -> str:
        alpha = self.strategy == "attention_gaussian" and self.alpha != 1
        seed = self.strategy == "random" and self.seed != selection.SEED
        parts = [
            _SHORT.get(self.strategy, self.strategy),
            None if self.ratio is None else f"{float(self.ratio):g}",
            _ranges(self.given) if self.strategy == "layers" else None,
            f"{min(self.given)}-{max(self.given)}" if self.strategy == "contiguous" else None,
            None if self.level is None else f"level {self.level}",
            f"alpha {self.alpha:g}" if alpha else None,
            f"seed {self.seed}" if seed else None,
            *(self._search_label() if self.strategy == "search" else ()),
            _FIRST[self.skip_first],
            "shift back" if self.shift_back else None,
            None if self.online is None else f"online {self.online}",
            None if self.senders == "one" else self.senders,
            None if self.positions == "published" else self.positions,
        ]
        return " ".join(part for part in parts if part is not None)

    def _search_label(self) -> list[str | None]:
        return [
            None if self.search_records == SEARCH_RECORDS else f"on {self.search_records}",
            None if self.beam == 1 else f"beam {self.beam}",
            "backward" if self.backward else None,
        ]

    @property
    def settings(self) -> Mapping[str, Any]:
        searched, calibrated = self.strategy == "search", self.strategy in selection.CALIBRATED
        several = self.senders != "one"
        return {
            "strategy": self.strategy,
            "ratio": None if self.ratio is None else float(self.ratio),
            "given": None if self.given is None else list(self.given),
            "alpha": self.alpha if self.strategy == "attention_gaussian" else None,
            "level": self.level,
            "seed": self.seed if self.strategy == "random" else None,
            "shift_back": self.shift_back,
            "online": self.online,
            "senders": self.senders,
            "positions": self.positions if several else None,
            "skip_first": self.skip_first if calibrated else None,
            "search_records": self.search_records if searched else None,
            "beam": self.beam if searched else None,
            "backward": self.backward if searched else None,
        }

    @property
    def calibrated(self) -> bool:
        return self.strategy in _BY_RECORDS and self.online is None

    def layers(self, bench: Bench) -> tuple[int, ...]:
        if bench.prompts is not None:
            bench.prompts.check_context(self.label)
        if self.online is None:
            return self._chosen(bench)
        n_layers = bench.sender.model.n_layers
        self._choose(bench, np.zeros(n_layers))  # only to see whether it can
        return tuple(range(n_layers))

    def _chosen(self, bench: Bench) -> tuple[int, ...]:
        """The layers that the run's calibration leads to; what has to be measured is kept."""
        if self.strategy != "search":
            scores = self._scores(bench)
            return self._choose(bench, None if scores is None else scores.mass)
        if bench.trial:
            n_layers = bench.sender.model.n_layers
            for item in self._records(bench, self.search_records)[: self.search_records]:
                if not item.gold:
                    record = f"calibration record {item.example.id!r}"
                    raise ValueError(f"{record}: {self.label!r} needs a gold answer")
            selection.layer_count(n_layers, ratio=self.ratio, preset=bench.preset)
            return tuple(range(n_layers))
        return bench.once(self, lambda: self._searched(bench))

    def _scores(self, bench: Bench) -> LayerScores | None:
        """The run's scores, or those of the same records with other senders or another mass."""
        scores = bench.scores
        if not self.calibrated:
            return scores
        if self.senders != "one":
            records = self._records(bench, 1)
            if not bench.trial:
                key = ("scores", self.senders, self.positions)
                label = f"calibrating {self.senders}"
                scores = bench.once(key, lambda: self._measure(bench, records, label))
        return scores if bench.trial else self._weighed(scores)

    def _weighed(self, scores: LayerScores) -> LayerScores:
        return scores.skipping(self.skip_first)

    def _measure(self, bench: Bench, items: Sequence[Item], what: str | None = None) -> LayerScores:
        samples = [(deal(bench, item, self.senders)[0], item.receiver) for item in items]
        return bench.calibrate(samples, positions=self.positions, what=what)

    def _records(self, bench: Bench, at_least: int) -> Sequence[Item]:
        found = len(bench.calibration)
        if found < at_least:
            raise ValueError(
                f"calibration records: {found}, and {self.label!r} needs {at_least} or more (given "
                "scores do not replace them)"
            )
        return bench.calibration

    def _searched(self, bench: Bench) -> tuple[int, ...]:
        """The layers that a search finds, or that an earlier start of the run has found."""
        items = self._records(bench, self.search_records)[: self.search_records]
        samples = [
            search.Sample(
                deal(bench, item, self.senders)[0], item.receiver, list(item.gold), item.skyline
            )
            for item in items
        ]
        # The settings of the method, the models and the rest are in run.json.
        asked = {
            "records": [item.example.id for item in items],
            "records_sha256": digest(samples),
        }
        found = bench.kept(self.label, asked, lambda: asdict(self._search(bench, samples)))
        try:
            return layer_set(found["layers"], bench.sender.model.n_layers)
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{SEARCH}: {self.label!r} has no layers: {error}") from None

    def _search(self, bench: Bench, samples: Sequence[search.Sample]) -> search.SearchResult:
        n_layers = bench.sender.model.n_layers
        n_wanted = selection.layer_count(n_layers, ratio=self.ratio, preset=bench.preset)
        # Greedy search of more layers begins with those of fewer, whichever ratio comes first.
        greedy = self.beam == 1 and not self.backward
        grown: list[search.SearchResult] = bench.once(("grown", replace(self, ratio=None)), list)
        with progress.bar(n_wanted, "layer", shown=bench.bars, what=self.label) as bar:

            def watch(step: search.Step) -> None:
                if bench.bars:
                    bar.set_postfix_str(f"nll {step.nll:.2f}", refresh=False)
                    bar.update()
                    return
                layers = counted(len(step.layers), "layer")
                bench.note(f"{self.label}: {layers} searched, nll {step.nll:.2f}")

            found = search.search(
                bench.sender,
                bench.receiver,
                samples,
                ratio=self.ratio,
                beam=self.beam,
                backward=self.backward,
                preset=bench.preset,
                layer_map=bench.layer_map,
                positions=self.positions,
                shift_back=self.shift_back,
                after=grown[-1] if grown else None,
                watch=watch,
            )
        if greedy and (not grown or len(grown[-1].layers) < len(found.layers)):
            grown.append(found)
        return found

    def _check_unseen(self, bench: Bench, items: Sequence[Item]) -> None:
        """Refuse to answer a record that layers were searched on: that would flatter them."""
        seen = {
            (item.example.context, item.example.question)
            for item in bench.calibration[: self.search_records]
        }
        for item in items:
            if (item.example.context, item.example.question) in seen:
                raise ValueError(f"record {item.example.id!r}: {self.label!r} has searched on it")

    def _choose(self, bench: Bench, mass: NDArray[np.float64] | None) -> tuple[int, ...]:
        given = self.given if self.strategy in ("layers", "contiguous") else None
        return selection.choose(
            self.strategy,
            bench.sender.model.n_layers,
            mass=mass,
            ratio=None if self.strategy in _FIXED else self.ratio,
            preset=bench.preset,
            alpha=self.alpha,
            seed=self.seed,
            level=self.level,
            first=None if given is None else min(given),
            last=None if given is None else max(given),
            layers=given,
        )

    def _layers_of(self, bench: Bench, items: Sequence[Item]) -> list[tuple[int, ...]]:
        """The layers to send of every item."""
        if self.online is None:
            return [self._chosen(bench)] * len(items)
        starts = [self._start(item) for item in items]
        chosen = {start: self._chosen_at(bench, start) for start in dict.fromkeys(starts)}
        return [chosen[start] for start in starts]

    def _start(self, item: Item) -> int:
        """Number of the item that the layers of this one are chosen from online."""
        return item.number - item.number % self.online

    def _chosen_at(self, bench: Bench, start: int) -> tuple[int, ...]:
        """The layers that one record of the run leads to."""
        guide = bench.items[start]
        if isinstance(guide, Exception):
            record = bench.prompts.plan.scored[start].id
            raise ValueError(f"layers are chosen from record {record!r}: {guide}") from guide
        key = ("online", start, self.senders, self.positions)
        scores = bench.once(key, lambda: self._measure(bench, [guide]))
        return self._choose(bench, self._weighed(scores).mass)

    def repeats(self, bench: Bench, item: Item) -> bool:
        if self.online is None or not bench.published:
            return False
        return self._start(item) == item.number

    def run(self, bench: Bench, items: Sequence[Item]) -> list[Outcome]:
        if self.strategy == "search":
            self._check_unseen(bench, items)
        outcomes = self._outcomes(bench, items, self._layers_of(bench, items))
        again = [n for n, item in enumerate(items) if self.repeats(bench, item)]
        if again:
            every = [tuple(range(bench.sender.model.n_layers))] * len(again)
            calibrating = self._outcomes(bench, [items[n] for n in again], every)
            for n, other in zip(again, calibrating, strict=True):
                outcomes[n] = replace(outcomes[n], calibrating=other)
        return outcomes

    def _outcomes(
        self, bench: Bench, items: Sequence[Item], layers: Sequence[tuple[int, ...]]
    ) -> list[Outcome]:
        """The exchange with these layers sent of every item."""
        dealt = [deal(bench, item, self.senders) for item in items]
        readings = iter(bench.read_prompts([ids for parts, _ in dealt for ids in parts]))
        messages = []
        for chosen, (parts, cut) in zip(layers, dealt, strict=True):
            packets, seconds = zip(*islice(readings, len(parts)), strict=True)
            started = time.perf_counter()
            packets = tuple(packet.select(chosen) for packet in packets)
            messages.append(
                Message(
                    packets,
                    chosen,
                    parts,
                    cut,
                    reading=max(seconds),
                    transfer=time.perf_counter() - started,
                )
            )
        return exchange(
            bench, items, messages, shift_back=self.shift_back, positions=self.positions
        )


def deal(bench: Bench, item: Item, senders: Senders) -> tuple[tuple[TokenIds, ...], int]:
    """What each sender reads of an item, ids [C], and how many tokens they lost together."""
    if senders == "one":
        return (item.sender,), item.sender_cut
    return bench.prompts.deal(item, senders)


def _ranges(layers: Sequence[int]) -> str:
    """Layers as people write them: (0, 3, 7, 8, 9) is "0,3,7-9"."""
    runs: list[list[int]] = []
    for layer in sorted(set(layers)):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def variants(options: Options) -> list[Method]:
    """One variant per strategy and ratio, and one for an explicit list of layers."""
    strategies = list(options.strategies)
    if options.level is not None and "attention_level" not in strategies:
        raise ValueError("level: only strategy 'attention_level' has levels")
    if options.layers is not None and not {"layers", "contiguous"} & set(strategies):
        strategies.append("layers")
    return [
        KVComm(
            strategy=strategy,
            ratio=ratio,
            given=options.layers if strategy in ("layers", "contiguous") else None,
            alpha=options.alpha,
            level=options.level if strategy == "attention_level" else None,
            shift_back=options.shift_back,
            online=options.online if strategy in selection.CALIBRATED else None,
            seed=options.seed,
            senders=options.senders,
            positions=options.positions,
            skip_first=options.skip_first if strategy in selection.CALIBRATED else None,
            search_records=options.search_records,
            beam=options.beam,
            backward=options.backward,
        )
        for strategy in strategies
        for ratio in ((None,) if strategy in _FIXED else options.ratios)
    ]
