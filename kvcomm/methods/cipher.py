"""`cipher`: as `nld`, but what is passed are embeddings in place of words.

In the first phase a model never settles on a token: each step's "token" is the mean of the
embedding table, weighted with softmax(logits / T), which is also the next step's input, as
published. A message ends where the row of the table that is nearest to the mean, by cosine, is the
tokenizer's EOS. The vectors are spliced into the refine prompt as input embeddings, at the places
where nld has its texts.

The published code runs the whole sequence again for every step; here each vector is fed behind the
cache, which is the same up to rounding. Owns that loop and the splicing.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcomm import hidden
from kvcomm._core import Workspace
from kvcomm.agents import Receiver, Sender
from kvcomm.beginning import once
from kvcomm.errors import MismatchError
from kvcomm.methods import Bench, Item, Method, Options, Outcome, TokenIds
from kvcomm.methods.nld import NLD, phases
from kvcomm.prefilled import Prefilled
from kvcomm.prompts import refine_parts
from kvcomm.tokenizer import Tokenizer
from kvcomm.turns import check_room

#: T by preset; the published runs had 1.0, whatever the agent's default.
TEMPERATURES = {"paper": 0.7, "reference": 1.0}


@dataclass(frozen=True, eq=False)
class Written:
    """The steps of a message, that which ended it included.

    vectors: float32 [n, dim], as they enter layer 0. nearest: int32 [n], the nearest rows of the
    table. ended: whether the last is EOS.
    """

    vectors: NDArray[np.float32]
    nearest: NDArray[np.int32]
    ended: bool

    @property
    def message(self) -> NDArray[np.float32]:
        """What is passed on, [m, dim].

        Raises
        ------
        ValueError
            EOS at the first step, so that there is nothing; the published code skips the record.
        """
        kept = self.vectors[:-1] if self.ended else self.vectors
        if not len(kept):
            raise ValueError("message: the first vector is EOS, and nothing is left to pass on")
        return kept


@dataclass(frozen=True)
class Cipher(NLD):
    """At most `message_tokens` embeddings.

    Attributes
    ----------
    temperature
        T above; None: that of `TEMPERATURES` for the run's preset.
    """

    temperature: float | None = None

    name = "cipher"

    def __post_init__(self) -> None:
        super().__post_init__()
        t = self.temperature
        if t is not None and not (math.isfinite(t) and t > 0):
            raise ValueError(f"cipher_temperature: expected a number above 0, found {t}")

    @property
    def label(self) -> str:
        usual = super().label
        return usual if self.temperature is None else f"{usual} T={self.temperature:g}"

    @property
    def settings(self) -> Mapping[str, Any]:
        return {**super().settings, "temperature": self.temperature}

    def layers(self, bench: Bench) -> tuple[int, ...]:
        sender, receiver = (agent.model for agent in (bench.sender, bench.receiver))
        dims = [model.config.core["dim"] for model in (sender, receiver)]
        if dims[0] != dims[1]:
            raise MismatchError(
                f"sender {sender.name!r} has embeddings of {dims[0]} numbers, "
                f"receiver {receiver.name!r} of {dims[1]}"
            )
        for tokenizer in (bench.sender.tokenizer, receiver.tokenizer):
            _eos(tokenizer)
        return super().layers(bench)

    def run(self, bench: Bench, items: Sequence[Item]) -> list[Outcome]:
        receiver = bench.receiver
        dealt = self.sender_prompts(bench, items)
        started = time.perf_counter()
        written = once(
            [ids for parts, _ in dealt for ids in parts],
            lambda new: self.write(bench, bench.sender, new),
        )
        sent = iter(written)
        others = [[one.message for one in islice(sent, len(parts))] for parts, _ in dealt]
        arrived = time.perf_counter()
        own = once([i.receiver for i in items], lambda new: self.write(bench, receiver, new))
        texts = [
            bench.prompts.pieces(
                refine_parts(bench.prompts.question(item.example), len(messages)), "receiver"
            )
            for item, messages in zip(items, others, strict=True)
        ]
        vectors = [[first.message, *messages] for first, messages in zip(own, others, strict=True)]
        thought = time.perf_counter()
        prefilled = splice(bench, texts, vectors)
        replies = bench.replies(prefilled, items)
        return [
            Outcome.of(
                reply,
                (*parts, item.receiver, *pieces),
                message_bytes=sum(one.nbytes for one in messages),
                receiver_tokens=len(item.receiver) + reply.answer.stats.receiver_tokens,
                cut_tokens=sender_cut,
                seconds=phases(started, arrived, thought, reply.answer.stats),
            )
            for item, (parts, sender_cut), messages, pieces, reply in zip(
                items, dealt, others, texts, replies, strict=True
            )
        ]

    def write(
        self, bench: Bench, agent: Sender | Receiver, prompts: Sequence[TokenIds]
    ) -> list[Written]:
        """The messages that an agent makes of prompts, ids [n]; rows that have ended leave the
        batch, and none depends on the others."""
        model = agent.model
        tokenizer = agent.tokenizer if isinstance(agent, Sender) else model.tokenizer
        eos = _eos(tokenizer)
        temperature = self.temperature or TEMPERATURES[bench.preset]
        for ids in prompts:
            check_room(model, 0, len(ids))
        workspace = Workspace(model.core)
        sessions = hidden.open_sessions(model, len(prompts))
        vectors: list[list[NDArray[np.float32]]] = [[] for _ in prompts]
        nearest: list[list[int]] = [[] for _ in prompts]
        # The last vector is not fed: it needs no position.
        room = [min(self.message_tokens, model.max_position - len(ids) + 1) for ids in prompts]
        active = list(range(len(prompts)))
        logits, _ = workspace.forward(sessions, prompts, output="logits")
        while active:
            mixed = workspace.mix(logits, temperature)
            for row, vector, token in zip(active, mixed, workspace.nearest(mixed), strict=True):
                vectors[row].append(vector)
                nearest[row].append(int(token))
            active = [
                row for row in active if nearest[row][-1] != eos and len(nearest[row]) < room[row]
            ]
            if active:
                logits, _ = workspace.forward(
                    [sessions[row] for row in active],
                    [vectors[row][-1][None] for row in active],
                    layers=(0, model.n_layers),
                    output="logits",
                )
        agent.count(workspace)
        return [
            Written(np.stack(steps), np.array(tokens, np.int32), tokens[-1] == eos)
            for steps, tokens in zip(vectors, nearest, strict=True)
        ]


def splice(
    bench: Bench,
    texts: Sequence[Sequence[TokenIds]],
    vectors: Sequence[Sequence[NDArray[np.float32]]],
) -> Prefilled:
    """Prefill prompts in which vectors stand between texts.

    Parameters
    ----------
    texts
        Per row the ids [n] of every text.
    vectors
        Per row float32 [m, dim], as they enter layer 0, one fewer than texts.

    Raises
    ------
    ValueError
        A prompt that is too long: between vectors nothing can be cut.
    """
    started = time.perf_counter()
    model = bench.receiver.model
    workspace = Workspace(model.core)
    states = []
    for pieces, messages in zip(texts, vectors, strict=True):
        parts = [workspace.embed(pieces[0])]
        for message, piece in zip(messages, pieces[1:], strict=True):
            parts += [message, workspace.embed(piece)]
        bench.prompts.check_length(sum(map(len, parts)))
        states.append(np.concatenate(parts))
    sessions = hidden.open_sessions(model, len(states))
    logits, _ = workspace.forward(sessions, states, layers=(0, model.n_layers), output="logits")
    return Prefilled(bench.receiver, workspace, sessions, logits, started=started)


def _eos(tokenizer: Tokenizer) -> int:
    """The id that ends a message."""
    text = tokenizer.special_tokens.get("eos_token")
    ids = [] if text is None else tokenizer.encode(text, special=True)
    if len(ids) != 1:
        raise ValueError(f"tokenizer: expected one token for EOS, found {text!r}: {len(ids)}")
    return ids[0]


def variants(options: Options) -> list[Method]:
    """The one variant that the options make."""
    return [
        Cipher(
            options.message_tokens,
            options.sender_aware,
            options.senders,
            options.cipher_temperature,
        )
    ]
