"""`kvcomm`: the receiver gets K and V of some of the sender's layers (method.md sections 2 to 4).

The strategies of selection.py are variants of this one method: the paper's choice, its ablations,
and random layers as a control.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcomm import selection
from kvcomm.methods import Bench, Item, Method, Options, Outcome, Seconds
from kvcomm.selection import LayerScores

#: The strategies that take no ratio.
_FIXED = ("contiguous", "layers", "all")

#: What tables call a strategy, where that is not its name.
_SHORT = {"attention_gaussian": "kvcomm", "all": "all layers"}


@dataclass(frozen=True)
class KVComm(Method):
    """K and V of the layers that a strategy chooses.

    Attributes
    ----------
    strategy, ratio, alpha, level, seed
        As for `selection.choose`; ratio is kept as written.
    given
        The explicit layers of strategy "layers", and the first and last of "contiguous".
    shift_back
        As for `Receiver.answer`.
    online
        T: choose again at every T-th record, from that record, which is answered with the new
        choice (the paper's Appendix L). None: the run's calibration.
    """

    strategy: str = "attention_gaussian"
    ratio: str | None = None
    given: tuple[int, ...] | None = None
    alpha: float = 1.0
    level: int | None = None
    shift_back: bool = False
    online: int | None = None
    seed: int = selection.SEED

    name = "kvcomm"

    def __post_init__(self) -> None:
        if self.strategy not in selection.STRATEGIES:
            raise ValueError(
                f"strategy: expected one of {', '.join(selection.STRATEGIES)}, "
                f"found {self.strategy!r}"
            )
        if self.online is not None and self.online < 1:
            raise ValueError(f"online: expected a number of records above 0, found {self.online}")
        if self.strategy in ("layers", "contiguous") and not self.given:
            raise ValueError(f"layers: strategy {self.strategy!r} needs a list")

    @property
    def label(self) -> str:
        parts = [_SHORT.get(self.strategy, self.strategy)]
        if self.ratio is not None:
            parts.append(f"{float(self.ratio):g}")
        if self.strategy == "contiguous":
            parts.append(f"{min(self.given)}-{max(self.given)}")
        if self.strategy == "layers":
            parts.append(_ranges(self.given))
        if self.level is not None:
            parts.append(f"level {self.level}")
        if self.shift_back:
            parts.append("shift back")
        if self.online is not None:
            parts.append(f"online {self.online}")
        return " ".join(parts)

    @property
    def settings(self) -> Mapping[str, Any]:
        return {
            "strategy": self.strategy,
            "ratio": None if self.ratio is None else float(self.ratio),
            "alpha": self.alpha if self.strategy == "attention_gaussian" else None,
            "level": self.level,
            "seed": self.seed if self.strategy == "random" else None,
            "shift_back": self.shift_back,
            "online": self.online,
        }

    @property
    def calibrated(self) -> bool:
        return self.strategy in selection.CALIBRATED and self.online is None

    def layers(self, bench: Bench) -> tuple[int, ...]:
        n_layers = bench.sender.model.n_layers
        return tuple(range(n_layers)) if self.online else self._choose(bench, bench.scores)

    def _choose(self, bench: Bench, scores: LayerScores | None) -> tuple[int, ...]:
        given = self.given if self.strategy in ("layers", "contiguous") else None
        return selection.choose(
            self.strategy,
            bench.sender.model.n_layers,
            mass=None if scores is None else scores.mass,
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
            return [self._choose(bench, bench.scores)] * len(items)
        chosen = {}
        for start in {item.number - item.number % self.online for item in items}:
            guide = bench.items[start]
            if isinstance(guide, Exception):
                raise guide
            scores = selection.calibrate(
                bench.sender,
                bench.receiver,
                [(guide.sender, guide.receiver)],
                preset=bench.preset,
                layer_map=bench.layer_map,
            )
            chosen[start] = self._choose(bench, scores)
        return [chosen[item.number - item.number % self.online] for item in items]

    def run(self, bench: Bench, items: Sequence[Item]) -> list[Outcome]:
        layers = self._layers_of(bench, items)
        readings = bench.read(items)
        started = time.perf_counter()
        packets = [
            packet.select(chosen) for (packet, _), chosen in zip(readings, layers, strict=True)
        ]
        transfer = time.perf_counter() - started
        questions = [item.receiver for item in items]
        options = {
            "preset": bench.preset,
            "shift_back": self.shift_back,
            "layer_map": bench.layer_map,
        }
        answers = bench.receiver.answer(questions, packets, bench.max_new_tokens, **options)
        scores = bench.receiver.score(
            questions, [list(item.gold) for item in items], packets, **options
        )
        return [
            Outcome.of(
                answer,
                score,
                (item.sender, item.receiver),
                message_bytes=packet.nbytes,
                receiver_tokens=len(item.receiver),
                cut_tokens=item.sender_cut,
                seconds=Seconds(
                    seconds,
                    transfer,
                    answer.stats.first_token_seconds,
                    seconds + transfer + answer.stats.total_seconds,
                ),
                layers=chosen,
            )
            for item, answer, score, packet, chosen, (_, seconds) in zip(
                items, answers, scores, packets, layers, readings, strict=True
            )
        ]


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
        )
        for strategy in strategies
        for ratio in ((None,) if strategy in _FIXED else options.ratios)
    ]
