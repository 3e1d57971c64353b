"""`skyline`: the receiver reads context and question itself, in one prompt.

The part of the prompt that does not depend on the question is read into a packet of all layers,
once for all questions about a context; for one model that is the same as reading on (up to
rounding). Where it ends depends on the record alone, so a record's bits do not depend on others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvcomm.methods import Bench, Item, Method, Options, Outcome, Seconds
from kvcomm.prefilled import Prefilled


@dataclass(frozen=True)
class Skyline(Method):
    """Context and question in one prompt: what an exchange tries to come near. Nothing is sent."""

    name = "skyline"
    label = "skyline"

    def run(self, bench: Bench, items: Sequence[Item]) -> list[Outcome]:
        prefilled, seconds = prefill(bench, items)
        replies = bench.replies(prefilled, items)
        return [
            Outcome.of(
                reply,
                (item.skyline,),
                message_bytes=0,
                receiver_tokens=len(item.skyline),
                cut_tokens=item.skyline_cut,
                seconds=Seconds.of(reply.answer.stats, before=seconds),
            )
            for item, reply, seconds in zip(items, replies, seconds, strict=True)
        ]


def prefill(bench: Bench, items: Sequence[Item]) -> tuple[Prefilled, list[float]]:
    """The prompts, prefilled, and per item the seconds that its first part took."""
    read = bench.read_own([item.skyline[: item.skyline_shared] for item in items])
    prefilled = bench.receiver.prefill(
        [item.skyline[item.skyline_shared :] for item in items], [packet for packet, _ in read]
    )
    return prefilled, [seconds for _, seconds in read]


def variants(options: Options) -> list[Method]:
    """The one skyline."""
    return [Skyline()]
