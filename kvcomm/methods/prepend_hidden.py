"""`prepend_hidden`: hidden states of the whole context, put before the receiver's (Figures 3, 10).

The context's states that enter layer k of the sender enter layer j of the receiver, in front of the
question's own:

    receiver's layers      sequence                         positions
    0 .. j - 1             question                         C .. C + Q - 1
    j .. n_layers - 1      [context states ; question]      0 .. C + Q - 1

The paper does not give positions. A token has one in every layer here, as in KVComm, so that the
context stands where its sender read it; with k = j = 0 and one model this is reading both as one
sequence.

The context stands before the question and is causal: its states do not depend on it. So they run
through layers j and up alone, and their K and V there are given to the session that reads the
question, which is then an ordinary one.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcomm import hidden
from kvcomm._core import Workspace
from kvcomm.beginning import once
from kvcomm.errors import MismatchError
from kvcomm.methods import Bench, Item, Method, Options, Outcome, Seconds, TokenIds
from kvcomm.prefilled import Prefilled
from kvcomm.turns import check_room


@dataclass(frozen=True)
class PrependHidden(Method):
    """All hidden states of the context. The receiver prefills them with its question.

    Attributes
    ----------
    from_layer, to_layer
        k, 0 .. n_layers of the sender (n_layers: the normalised final states), and j, a layer of
        the receiver. The paper sweeps both and finds that early ones work.
    """

    from_layer: int = 0
    to_layer: int = 0

    name = "prepend_hidden"
    shares_contexts = False

    @property
    def label(self) -> str:
        return f"prepend hidden k={self.from_layer} j={self.to_layer}"

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"from_layer": self.from_layer, "to_layer": self.to_layer}

    def layers(self, bench: Bench) -> tuple[int, ...]:
        sender, receiver = bench.sender.model, bench.receiver.model
        hidden.check_layer("from_layer", self.from_layer, sender.n_layers)
        hidden.check_layer("to_layer", self.to_layer, receiver.n_layers - 1)
        widths = sender.config.core["dim"], receiver.config.core["dim"]
        if widths[0] != widths[1]:
            raise MismatchError(
                f"hidden states of sender {sender.name!r} are {widths[0]} wide, of receiver "
                f"{receiver.name!r} {widths[1]}"
            )
        if bench.prompts is not None:
            bench.prompts.check_context(self.label)
        return ()

    def run(self, bench: Bench, items: Sequence[Item]) -> list[Outcome]:
        prefilled, seconds = self.prefill(
            bench, [item.sender for item in items], [item.receiver for item in items]
        )
        replies = bench.replies(prefilled, items)
        return [
            Outcome.of(
                reply,
                (item.sender, item.receiver),
                message_bytes=4 * bench.sender.model.config.core["dim"] * len(item.sender),
                receiver_tokens=len(item.sender) + len(item.receiver),
                cut_tokens=item.sender_cut,
                seconds=Seconds.of(reply.answer.stats, sender=seconds),
            )
            for item, reply in zip(items, replies, strict=True)
        ]

    def prefill(
        self, bench: Bench, contexts: Sequence[TokenIds], questions: Sequence[TokenIds]
    ) -> tuple[Prefilled, float]:
        """Questions behind the states of their contexts, and the sender's seconds for these."""
        self.layers(bench)
        model = bench.receiver.model
        for context, question in zip(contexts, questions, strict=True):
            check_room(model, len(context), len(question))
        started = time.perf_counter()
        states = once(
            contexts, lambda new: hidden.read(bench.sender, new, self.from_layer, last=False)
        )
        arrived = time.perf_counter()
        workspace = Workspace(model.core)
        before = hidden.open_sessions(model, len(contexts))
        workspace.forward(before, states, layers=(self.to_layer, model.n_layers))
        sessions = hidden.open_sessions(model, len(questions))
        for session, context in zip(sessions, before, strict=True):
            session.give(context.freeze())
        logits, _ = workspace.forward(sessions, questions, output="logits")
        prefilled = Prefilled(
            bench.receiver,
            workspace,
            sessions,
            logits,
            started=arrived,
        )
        return prefilled, arrived - started


def variants(options: Options) -> list[Method]:
    """One variant for the two layers."""
    return [PrependHidden(options.from_layer or 0, options.to_layer or 0)]
