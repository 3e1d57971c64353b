"""What a caller hands to an agent and gets back.

Owns the rules by which arguments (text or ids, one or many, packets of one sender or several)
become checked token ids and `Turn`s, and the results `Answer` and `Score`. Does not run models.

A text goes into the chat template as one user turn; a sequence of integers is used as it is. A
list (of texts or of sequences) is a batch. Packets: None, a Packet, or a tuple of Packets from
several senders. With a batch of questions a list of packets has one of these per question; with
one question it stands for several senders, as a tuple does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvcomm.account import Prompt, Stats, stats
from kvcomm.errors import MismatchError
from kvcomm.generate import Generation, StopReason
from kvcomm.packet import Packet, Preset, check_preset

if TYPE_CHECKING:
    from kvcomm.model import Model
    from kvcomm.tokenizer import Tokenizer

Ids = Sequence[int] | NDArray[np.integer[Any]]
Context = str | Ids
Question = str | Ids
Packets = Packet | Sequence[Packet] | None
Message = Callable[[str], str]


@dataclass(frozen=True, eq=False)
class Turn:
    """One question, ids [Q], with the packets that it is asked about."""

    ids: NDArray[np.int32]
    packets: tuple[Packet, ...]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Answer:
    """A receiver's answer.

    ids: every generated token, a stop id included. text: without the stop id, and cut before a
    stop string; "" when the model has no tokenizer. stop_reason: "eos", "stop" (a stop string),
    "length" (max_new_tokens) or "limit" (the model's last position). stats: what it cost.
    """

    text: str
    ids: tuple[int, ...]
    stop_reason: StopReason
    stats: Stats

    @classmethod
    def of(cls, model: "Model", prompt: Prompt, found: Generation) -> "Answer":
        """What the decode loop has found behind a prompt, with its account."""
        return cls(found.text, found.ids, found.stop_reason, stats(model, prompt, found))


@dataclass(frozen=True, eq=False)
class Score:
    """Negative log-likelihood of a given answer, in nats.

    nll: sum over tokens. token_nll: float64 [n]. token_ids: the answer's ids. choice: which of
    the alternative answers this is, the likeliest; 0 when there was one.
    """

    nll: float
    token_nll: NDArray[np.float64]
    token_ids: tuple[int, ...]
    choice: int = 0


def is_ids(value: object) -> bool:
    """Whether a value is one sequence of token ids, rather than a text or a list of such."""
    if isinstance(value, np.ndarray):
        return value.ndim == 1
    return (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and all(isinstance(v, (int, np.integer)) for v in value)
    )


def is_single(value: object) -> bool:
    """Whether a context or question is one, rather than a batch."""
    return not isinstance(value, list) or is_ids(value)


def as_ids(value: object, vocab_size: int, what: str) -> NDArray[np.int32]:
    """Token ids of any integer type, checked, as int32 [n].

    Raises
    ------
    TypeError
        Not a sequence of integers; floats and bools are none.
    ValueError
        Empty, of more than one axis, or an id outside the vocabulary: its place and value.
    """
    array = np.asarray(value)
    if array.size == 0 and array.ndim <= 1:
        raise ValueError(f"{what} is empty")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{what}: expected text or integer ids, found {array.dtype} values")
    if array.ndim != 1:
        raise ValueError(f"{what}: expected one sequence of ids, found shape {array.shape}")
    outside = np.flatnonzero((array < 0) | (array >= vocab_size))
    if outside.size:
        place = int(outside[0])
        raise ValueError(
            f"{what}: id {int(array[place])} at place {place} is outside 0 .. {vocab_size - 1}"
        )
    return np.ascontiguousarray(array, np.int32)


def prompt_ids(
    model: "Model", tokenizer: "Tokenizer | None", value: object, message: Message, what: str
) -> NDArray[np.int32]:
    """A text as user turn `message(text)` with the generation prompt, as ids; ids as they are."""
    if isinstance(value, str):
        if not value:
            raise ValueError(f"{what} is empty")
        if tokenizer is None:
            raise ValueError(f"{what}: model {model.name!r} has no tokenizer: pass token ids")
        turn = {"role": "user", "content": message(value)}
        value = tokenizer.chat([turn], add_generation_prompt=True)
    return as_ids(value, model.vocab_size, what)


def answer_ids(model: "Model", answer: object) -> list[NDArray[np.int32]]:
    """The alternatives of a given answer, as ids: no space before, no EOS."""
    several = isinstance(answer, (list, tuple)) and not is_ids(answer)
    alternatives = []
    for one in answer if several else [answer]:
        if isinstance(one, str):
            if model.tokenizer is None:
                raise ValueError(f"answer: model {model.name!r} has no tokenizer: pass token ids")
            one = model.tokenizer.encode(one)
        alternatives.append(as_ids(one, model.vocab_size, "answer"))
    if not alternatives:
        raise ValueError("answer: the list of alternatives is empty")
    return alternatives


def turns_of(model: "Model", question: Any, packet: Any, message: Message) -> list[Turn]:
    """One turn per question.

    Raises
    ------
    ValueError
        An empty question, or a list of packets of another length than that of questions.
    TypeError
        Something that is no question or no packet.
    """
    if is_single(question):
        questions, rows = [question], [tuple(packet) if isinstance(packet, list) else packet]
    else:
        questions = question
        rows = packet if isinstance(packet, list) else [packet] * len(questions)
    if len(rows) != len(questions):
        raise ValueError(f"packet: {len(rows)} packets for {len(questions)} questions")
    turns = []
    for one, row in zip(questions, rows, strict=True):
        senders = () if row is None else row if isinstance(row, tuple) else (row,)
        for sender in senders:
            if not isinstance(sender, Packet):
                raise TypeError(f"packet: expected a Packet, found {type(sender).__name__}")
        turns.append(Turn(prompt_ids(model, model.tokenizer, one, message, "question"), senders))
    return turns


def common_preset(turns: Sequence[Turn], asked: Preset | None) -> Preset:
    """The preset of all packets of a call, which has to be the one asked for, if any was."""
    if asked is not None:
        check_preset(asked)
    found = {packet.preset for turn in turns for packet in turn.packets} or {asked or "paper"}
    if len(found) > 1 or (asked is not None and asked not in found):
        raise MismatchError(
            f"packets of preset {' and '.join(sorted(found))}, asked for "
            f"{asked or 'one answer from them'}: one call follows one preset"
        )
    return found.pop()


def check_room(model: "Model", n_context: int, n_own: int) -> None:
    """Refuse a prompt, or a receiver's behind a context, that passes the model's last position."""
    if n_context + n_own <= model.max_position:
        return
    if not n_context:
        raise ValueError(
            f"prompt: {n_own} tokens, model {model.name!r} has {model.max_position} positions"
        )
    raise ValueError(
        f"{n_context} tokens of context and {n_own} of the receiver's make "
        f"{n_context + n_own} positions, receiver {model.name!r} has {model.max_position}"
    )
