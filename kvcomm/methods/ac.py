"""`ac`: one hidden state of the sender goes into one of the receiver's.

The state of the context's last token that enters layer k of the sender is put into the state of the
question's last token that enters layer j of the receiver, while the question is prefilled. No K and
V are shared, and the receiver's positions start at 0.

The published code counts a negative k from the end and with a negative j injects nothing; here both
are refused.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcomm import hidden
from kvcomm._core import Workspace
from kvcomm.methods import (
    Bench,
    Item,
    Method,
    Options,
    Outcome,
    Readings,
    Seconds,
    TokenIds,
)
from kvcomm.prefilled import Prefilled
from kvcomm.turns import check_room

State = NDArray[np.float32]

#: What becomes of the receiver's components, [d], when the sender's are [d].
RULES: dict[str, Callable[[State, State], State]] = {
    "replace": lambda own, sent: sent,
    "sum": lambda own, sent: own + sent,
    "mean": lambda own, sent: np.float32(0.5) * (own + sent),
}


def default_layer(n_layers: int) -> int:
    """The published layer 26 of 32, scaled to a depth; halves go to the even layer."""
    return min(round(26 / 32 * n_layers), n_layers - 1)


@dataclass(frozen=True)
class AC(Method):
    """The last token's hidden state.

    Attributes
    ----------
    rule
        "replace", "sum" or "mean" of the two states. Where the widths differ, of their last d
        components, d the smaller width.
    from_layer, to_layer
        k, 0 .. n_layers of the sender (n_layers: the normalised final state), and j, a layer of the
        receiver. None: `default_layer`.
    """

    rule: str = "replace"
    from_layer: int | None = None
    to_layer: int | None = None

    name = "ac"

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"rule: expected one of {', '.join(RULES)}, found {self.rule!r}")

    @property
    def label(self) -> str:
        parts = [f"ac {self.rule}"]
        if self.from_layer is not None:
            parts.append(f"k={self.from_layer}")
        if self.to_layer is not None:
            parts.append(f"j={self.to_layer}")
        return " ".join(parts)

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"rule": self.rule, "from_layer": self.from_layer, "to_layer": self.to_layer}

    def layers(self, bench: Bench) -> tuple[int, ...]:
        self._ends(bench)
        if bench.prompts is not None:
            bench.prompts.check_context(self.label)
        return ()

    def _ends(self, bench: Bench) -> tuple[int, int]:
        """k and j."""
        n_sender, n_receiver = bench.sender.model.n_layers, bench.receiver.model.n_layers
        k = default_layer(n_sender) if self.from_layer is None else self.from_layer
        j = default_layer(n_receiver) if self.to_layer is None else self.to_layer
        hidden.check_layer("from_layer", k, n_sender)
        hidden.check_layer("to_layer", j, n_receiver - 1)
        return k, j

    def run(self, bench: Bench, items: Sequence[Item]) -> list[Outcome]:
        prefilled, seconds = self.prefill(
            bench, [item.sender for item in items], [item.receiver for item in items]
        )
        replies = bench.replies(prefilled, items)
        return [
            Outcome.of(
                reply,
                (item.sender, item.receiver),
                message_bytes=4 * _width(bench),
                receiver_tokens=len(item.receiver),
                cut_tokens=item.sender_cut,
                seconds=Seconds.of(reply.answer.stats, sender=seconds),
            )
            for item, reply in zip(items, replies, strict=True)
        ]

    def prefill(
        self, bench: Bench, contexts: Sequence[TokenIds], questions: Sequence[TokenIds]
    ) -> tuple[Prefilled, float]:
        """Questions with a state of their contexts in them, and the sender's seconds for these,
        which all rules share."""
        k, j = self._ends(bench)
        model, width = bench.receiver.model, _width(bench)
        for ids in questions:
            check_room(model, 0, len(ids))
        readings: Readings[hidden.States] = bench.once(("ac", k), Readings)
        messages = readings.read(contexts, lambda new: hidden.read(bench.sender, new, k, last=True))
        arrived = time.perf_counter()
        workspace = Workspace(model.core)
        sessions = hidden.open_sessions(model, len(questions))
        states = hidden.entering(workspace, sessions, questions, j, model.n_layers)
        for own, (message, _) in zip(states, messages, strict=True):
            part = own[-1, -width:]
            part[:] = RULES[self.rule](part, message[0, -width:])
        logits, _ = workspace.forward(sessions, states, layers=(j, model.n_layers), output="logits")
        published = bench.preset == "reference"
        stop_ids = frozenset(model.config_stop_ids if published else model.stop_ids)
        prefilled = Prefilled(
            bench.receiver,
            workspace,
            sessions,
            logits,
            stop_ids=[stop_ids] * len(questions),
            started=arrived,
        )
        return prefilled, max(seconds for _, seconds in messages)


def _width(bench: Bench) -> int:
    """d, how many components are exchanged."""
    return min(agent.model.config.core["dim"] for agent in (bench.sender, bench.receiver))


def variants(options: Options) -> list[Method]:
    """One variant per rule."""
    return [AC(rule, options.from_layer, options.to_layer) for rule in options.rules]
