"""`nld`: the sender writes what it makes of the context, and the receiver reads that text.

Natural language, as published: the sender writes from its own prompt, the
receiver writes a first answer from the question alone, and then it is asked to refine that answer
with both texts before it. What is passed is text, so any two models will do.

Owns the two phases for texts; cipher.py has them for embeddings. The prompts' words are those of
prompts.py, cut as published by plan.py.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, get_args

from kvcomm.agents import Receiver
from kvcomm.beginning import once
from kvcomm.methods import Bench, Item, Method, Options, Outcome, Seconds, Senders, TokenIds
from kvcomm.prompts import refine_message
from kvcomm.tokenizer import Tokenizer
from kvcomm.turns import Stats


@dataclass(frozen=True)
class NLD(Method):
    """Text of at most so many tokens.

    Attributes
    ----------
    message_tokens
        Most tokens that sender and receiver each write in the first phase.
    sender_aware
        The sender's instruction says that its text is for another agent, as in the published
        option; else it is the receiver's.
    senders
        "one", or as for `Example.split`; each writes a text of its own.
    """

    message_tokens: int = 256
    sender_aware: bool = False
    senders: Senders = "one"

    name = "nld"

    def __post_init__(self) -> None:
        n = self.message_tokens
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"message_tokens: expected a number above 0, found {n!r}")
        known = get_args(Senders)
        if self.senders not in known:
            raise ValueError(f"senders: expected one of {', '.join(known)}, found {self.senders!r}")

    @property
    def label(self) -> str:
        parts = [self.name]
        if self.sender_aware:
            parts.append("aware")
        if self.senders != "one":
            parts.append(f"senders {self.senders}")
        return " ".join(parts)

    @property
    def settings(self) -> Mapping[str, Any]:
        return {
            "message_tokens": self.message_tokens,
            "sender_aware": self.sender_aware,
            "senders": self.senders,
        }

    def layers(self, bench: Bench) -> tuple[int, ...]:
        if bench.prompts is not None:
            bench.prompts.check_context(self.label)
        return ()

    def sender_prompts(
        self, bench: Bench, items: Sequence[Item]
    ) -> list[tuple[tuple[TokenIds, ...], int]]:
        """Per item the prompts that its senders answer, and how many tokens these lost."""
        return [
            bench.prompts.deal(item, self.senders, writes=True, aware=self.sender_aware)
            for item in items
        ]

    def run(self, bench: Bench, items: Sequence[Item]) -> list[Outcome]:
        prompts = bench.prompts
        dealt = self.sender_prompts(bench, items)
        started = time.perf_counter()
        writer = Receiver(bench.sender.model)
        writer.tally = bench.sender.tally
        written = once(
            [ids for parts, _ in dealt for ids in parts],
            lambda new: _texts(writer, bench.sender.tokenizer, new, self.message_tokens),
        )
        arrived = time.perf_counter()
        receiver = bench.receiver
        own = once(
            [item.receiver for item in items],
            lambda new: _texts(receiver, receiver.model.tokenizer, new, self.message_tokens),
        )
        texts = iter(written)
        others = [list(islice(texts, len(parts))) for parts, _ in dealt]
        refine = []
        for item, first, texts in zip(items, own, others, strict=True):
            message = refine_message(prompts.question(item.example), first, texts)
            refine.append(prompts.fit(prompts.ids(message, "receiver")))
        thought = time.perf_counter()
        prefilled = receiver.prefill([ids for ids, _ in refine])
        replies = bench.replies(prefilled, items)
        return [
            Outcome.of(
                reply,
                (*parts, item.receiver, ids),
                message_bytes=sum(len(text.encode()) for text in texts),
                receiver_tokens=len(item.receiver) + len(ids),
                cut_tokens=sender_cut + refine_cut,
                seconds=phases(started, arrived, thought, reply.answer.stats),
                message="\n\n".join(texts),
            )
            for item, (parts, sender_cut), texts, (ids, refine_cut), reply in zip(
                items, dealt, others, refine, replies, strict=True
            )
        ]


def phases(started: float, arrived: float, thought: float, stats: Stats) -> Seconds:
    """The sender's time up to `arrived`; the receiver's includes its own first answer, up to
    `thought`."""
    return Seconds.of(stats, sender=arrived - started, before=thought - arrived)


def _texts(
    writer: Receiver, tokenizer: Tokenizer, prompts: list[TokenIds], n_tokens: int
) -> list[str]:
    """Greedy answers to prompts, as the texts that a prompt can take up."""
    answers = writer.prefill(prompts).answer(n_tokens)
    return [
        tokenizer.decode(answer.ids[:-1] if answer.stop_reason == "eos" else answer.ids)
        for answer in answers
    ]


def variants(options: Options) -> list[Method]:
    """The one variant that the options make."""
    return [NLD(options.message_tokens, options.sender_aware, options.senders)]
