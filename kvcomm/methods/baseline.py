"""`baseline`: the receiver gets the question only."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvcomm.methods import Bench, Item, Method, Options, Outcome, Seconds


@dataclass(frozen=True)
class Baseline(Method):
    """The question without any context: the floor of every comparison."""

    name = "baseline"
    label = "baseline"

    def run(self, bench: Bench, items: Sequence[Item]) -> list[Outcome]:
        prefilled = bench.receiver.prefill([item.baseline for item in items])
        replies = bench.replies(prefilled, items)
        return [
            Outcome.of(
                reply,
                (item.baseline,),
                message_bytes=0,
                receiver_tokens=len(item.baseline),
                cut_tokens=0,
                seconds=Seconds.of(reply.answer.stats),
            )
            for item, reply in zip(items, replies, strict=True)
        ]


def variants(options: Options) -> list[Method]:
    """The one baseline."""
    return [Baseline()]
