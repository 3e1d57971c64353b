"""What is said to the models, and how a prompt that is too long is cut.

Owns the published message texts (method.md section 7), one user turn each, and the published
truncation rules as pure functions on token ids. Does not know chat templates, tokenizers or
data sets: a task names its family, and extra sentences of a task are in its questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Ids = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class Family:
    """The texts of one kind of task. {context} and {question} are filled as they are."""

    instruction: str
    sender: str
    receiver: str
    baseline: str
    skyline: str


FAMILIES = {
    "qa": Family(
        instruction="Directly answer the question based on the context passage, "
        "no explanation is needed.",
        sender="Instruction: {instruction} Context: {context}",
        receiver="Instruction: {instruction} Question: {question}",
        baseline="Instruction: {instruction} Question: {question}",
        skyline="Instruction: {instruction} Context: {context} Question: {question}",
    ),
    "math": Family(
        instruction="Answer the math problem step by step.",
        sender="Instruction: {instruction} Hint: {context}",
        receiver="Instruction: {instruction} Question: {question}",
        baseline="Instruction: {instruction} Question: {question}",
        skyline="Instruction: {instruction} Hint: {context} Question: {question}",
    ),
    "summary": Family(
        instruction="Summarize the following content concisely with one sentence.",
        sender="Instruction: {instruction} Content part 1: {context}",
        receiver="Instruction: {instruction} Content part 2: {question}",
        baseline="Instruction: {instruction} Content: {question}",
        skyline="Instruction: {instruction} Content part 1: {context} Content part 2: {question}",
    ),
}


def sender_message(context: str, family: str = "qa") -> str:
    """The user turn the sender reads."""
    texts = _family(family)
    return texts.sender.format(instruction=texts.instruction, context=context)


def receiver_message(question: str, family: str = "qa") -> str:
    """The user turn the receiver answers, with the sender's message in its cache."""
    texts = _family(family)
    return texts.receiver.format(instruction=texts.instruction, question=question)


def baseline_message(question: str, family: str = "qa") -> str:
    """The user turn of a receiver that gets no message."""
    texts = _family(family)
    return texts.baseline.format(instruction=texts.instruction, question=question)


def skyline_message(context: str, question: str, family: str = "qa") -> str:
    """The user turn of one model that reads context and question."""
    texts = _family(family)
    return texts.skyline.format(instruction=texts.instruction, context=context, question=question)


def cut_middle(ids: Ids, keep: int) -> Ids:
    """The first and the last `keep // 2` ids; all of them where there are no more than `keep`.

    An array gives an array, any other sequence a list. An odd `keep` leaves one id fewer, as
    published.

    Raises
    ------
    ValueError : keep is below 2, so that nothing would be left
    """
    if keep < 2:
        raise ValueError(f"keep: {keep} tokens, expected at least 2 to cut a middle out")
    if len(ids) <= keep:
        return ids if isinstance(ids, np.ndarray) else list(ids)
    half = keep // 2
    return _join(ids[:half], ids[len(ids) - half :])


def cut_prompt(ids: Ids, limit: int) -> tuple[Ids, int]:
    """A prompt of one model (baseline, skyline), cut in the middle of the whole prompt.

    Returns
    -------
    ids, n_cut : what is left, and how many tokens are gone
    """
    kept = cut_middle(ids, limit)
    return kept, len(ids) - len(kept)


def cut_sender(ids: Ids, n_query: int, limit: int) -> tuple[Ids, int]:
    """A sender's prompt that has to fit with a query of n_query tokens, which is never cut.

    Returns
    -------
    ids, n_cut : what is left, and how many tokens are gone

    Raises
    ------
    ValueError : the query alone takes the limit
    """
    room = _room(n_query, limit) if len(ids) + n_query > limit else len(ids)
    kept = cut_middle(ids, room) if len(ids) > room else ids
    return kept, len(ids) - len(kept)


def cut_senders(
    first: Ids, second: Ids, n_query: int, limit: int
) -> tuple[tuple[Ids, int], tuple[Ids, int]]:
    """Two senders' prompts: the first keeps its head, the second its tail, half the room each.

    Returns
    -------
    (ids, n_cut) of the first, (ids, n_cut) of the second

    Raises
    ------
    ValueError : the query alone takes the limit
    """
    if len(first) + len(second) + n_query <= limit:
        return (first, 0), (second, 0)
    half = _room(n_query, limit) // 2
    head, tail = first[:half], second[max(0, len(second) - half) :]
    return (head, len(first) - len(head)), (tail, len(second) - len(tail))


def _room(n_query: int, limit: int) -> int:
    # Published, half of no room is 0 and "the last 0 tokens" are all of them.
    if limit - n_query < 2:
        raise ValueError(
            f"question: {n_query} tokens leave no room for a context within {limit} tokens"
        )
    return limit - n_query


def _join(head: Ids, tail: Ids) -> Ids:
    if isinstance(head, np.ndarray):
        return np.concatenate([head, tail])
    return [*head, *tail]


def _family(name: str) -> Family:
    if name not in FAMILIES:
        raise ValueError(f"family: {name!r}, expected one of {', '.join(FAMILIES)}")
    return FAMILIES[name]
