"""`skyline`: the receiver reads context and question itself, in one prompt.

The prompt is prefilled once for both the answer and the likelihoods: all tokens but the last are
read into a packet of all layers, which for one model is the same as reading on (up to rounding).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvcomm.agents import Sender
from kvcomm.methods import Bench, Item, Method, Options, Outcome, Seconds


@dataclass(frozen=True)
class Skyline(Method):
    """Context and question in one prompt: what an exchange tries to come near. Nothing is sent."""

    name = "skyline"
    label = "skyline"

    def run(self, bench: Bench, items: Sequence[Item]) -> list[Outcome]:
        receiver = bench.receiver
        started = time.perf_counter()
        read = Sender(receiver.model).read([item.skyline[:-1] for item in items])
        seconds = time.perf_counter() - started
        last = [item.skyline[-1:] for item in items]
        answers = receiver.answer(last, read, bench.max_new_tokens)
        scores = receiver.score(last, [list(item.gold) for item in items], read)
        return [
            Outcome.of(
                answer,
                score,
                (item.skyline,),
                message_bytes=0,
                receiver_tokens=len(item.skyline),
                cut_tokens=item.skyline_cut,
                seconds=Seconds(
                    0.0,
                    0.0,
                    None
                    if answer.stats.first_token_seconds is None
                    else seconds + answer.stats.first_token_seconds,
                    seconds + answer.stats.total_seconds,
                ),
            )
            for item, answer, score in zip(items, answers, scores, strict=True)
        ]


def variants(options: Options) -> list[Method]:
    """The one skyline."""
    return [Skyline()]
