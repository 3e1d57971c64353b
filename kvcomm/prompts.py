"""What is said to the models, and how a prompt that is too long is cut.

Owns the published message texts (of the paper's code), one user turn each, which models reason
before they answer and what their prompts are made to end in, and the published truncation rules as
pure functions on token ids. Does not know chat templates, tokenizers or data sets: a task names its
family, and extra sentences of a task are in its questions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

Ids = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class Family:
    """The texts of one kind of task. {context} and {question} are filled as they are.

    sender_aware: the instruction of a sender that writes (nld, cipher) and is told what for.
    """

    instruction: str
    sender_aware: str
    sender: str
    receiver: str
    baseline: str
    skyline: str


FAMILIES = {
    "qa": Family(
        instruction="Directly answer the question based on the context passage, "
        "no explanation is needed.",
        sender_aware="Summarize the context passage in a concise way, as it will be used by "
        "another agent to answer the question.",
        sender="Instruction: {instruction} Context: {context}",
        receiver="Instruction: {instruction} Question: {question}",
        baseline="Instruction: {instruction} Question: {question}",
        skyline="Instruction: {instruction} Context: {context} Question: {question}",
    ),
    "math": Family(
        instruction="Answer the math problem step by step.",
        sender_aware="Summarize the hint in a concise way, as it will be used by another agent to "
        "answer the question.",
        sender="Instruction: {instruction} Hint: {context}",
        receiver="Instruction: {instruction} Question: {question}",
        baseline="Instruction: {instruction} Question: {question}",
        skyline="Instruction: {instruction} Hint: {context} Question: {question}",
    ),
    "summary": Family(
        instruction="Summarize the following content concisely with one sentence.",
        sender_aware="Summarize the content in a concise way, as it will be used by another agent "
        "to understand the content.",
        sender="Instruction: {instruction} Content part 1: {context}",
        receiver="Instruction: {instruction} Content part 2: {question}",
        baseline="Instruction: {instruction} Content: {question}",
        skyline="Instruction: {instruction} Content part 1: {context} Content part 2: {question}",
    ),
    # Not published. Its tasks have no context, so that sender and skyline are seldom asked for.
    "choice": Family(
        instruction="This is a multiple choice question: answer with the letter of the right "
        "choice and nothing else.",
        sender_aware="Summarize the context in a concise way, as it will be used by another agent "
        "to answer a multiple choice question.",
        sender="Instruction: {instruction} Context: {context}",
        receiver="Instruction: {instruction} Question: {question}",
        baseline="Instruction: {instruction} Question: {question}",
        skyline="Instruction: {instruction} Context: {context} Question: {question}",
    ),
}

#: What stands before the answers that a receiver of texts is asked to revise, and behind them.
REFINE = {
    "own": "\nYour previous answer:\n",
    "one_other": "\nOther agents' answers (for your consideration):\n",
    "several_others": "\nAnother agent's answer (for your consideration):\n",
    "end": "\nIf needed, revise your answer. Your new answer is:",
}

#: Models that reason before they answer and are kept from it, as published.
THINK_MODELS = ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B",)

#: Control token that is taken out of a prompt that is read and not answered.
THINK = "<think>"

#: What every other prompt of such a model ends in, behind the chat template, by task.
THINK_SUFFIXES = {
    "countries": "</think>\n\nThe only country is:",
    "tipsheets": "</think>\n\n",
}
THINK_SUFFIX = "</think>\n\nThe answer is: "


def sender_message(context: str, family: str = "qa", *, aware: bool = False) -> str:
    """The user turn the sender reads; aware: with the instruction of one that writes."""
    texts = _family(family)
    instruction = texts.sender_aware if aware else texts.instruction
    return texts.sender.format(instruction=instruction, context=context)


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


def refine_parts(message: str, n_others: int) -> tuple[str, ...]:
    """The user turn that asks a receiver to revise its answer, cut where the answers stand.

    Parameters
    ----------
    message
        The turn that it has answered.
    n_others
        Agents whose answers it gets; published are one and two.

    Returns
    -------
    tuple of str
        n_others + 2 texts. The receiver's own answer is to stand behind the first, those of the
        others behind the next.
    """
    other = REFINE["one_other" if n_others == 1 else "several_others"]
    return (message + REFINE["own"], *[other] * n_others, REFINE["end"])


def refine_message(message: str, own: str, others: Sequence[str]) -> str:
    """The same turn with the answers in it, as they are."""
    parts = refine_parts(message, len(others))
    answers = (own, *others, "")
    return "".join(part + answer for part, answer in zip(parts, answers, strict=True))


def is_think_model(names: Iterable[object]) -> bool:
    """Whether a model of one of these names is in THINK_MODELS; folders go by their last part."""
    known = {name.rsplit("/", 1)[-1] for name in THINK_MODELS}
    return any(
        name.rstrip("/").rsplit("/", 1)[-1] in known for name in names if isinstance(name, str)
    )


def think_suffix(task: str) -> str:
    """What the prompts of a think model end in, for a task of that name."""
    return THINK_SUFFIXES.get(task, THINK_SUFFIX)


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


def cut_contexts(parts: Sequence[Ids], n_query: int, limit: int) -> list[tuple[Ids, int]]:
    """The prompts of any number of senders, as published for one and for two.

    Of three and more, those that are longer than their share lose their middle: all that are cut
    keep the same number of tokens (up to two), and those that are not leave them their room.

    Returns
    -------
    list of (ids, n_cut), one per sender

    Raises
    ------
    ValueError : the query leaves less than 2 tokens of room for each
    """
    if len(parts) == 1:
        return [cut_sender(parts[0], n_query, limit)]
    if len(parts) == 2:
        return list(cut_senders(parts[0], parts[1], n_query, limit))
    if sum(map(len, parts)) + n_query <= limit:
        return [(part, 0) for part in parts]
    left = limit - n_query
    if left < 2 * len(parts):
        raise ValueError(
            f"question: {n_query} tokens leave no room for {len(parts)} contexts within "
            f"{limit} tokens"
        )
    kept = list(parts)
    by_length = sorted(range(len(parts)), key=lambda number: len(parts[number]))
    for rank, number in enumerate(by_length):
        kept[number] = cut_middle(parts[number], left // (len(parts) - rank))
        left -= len(kept[number])
    return [(ids, len(part) - len(ids)) for ids, part in zip(kept, parts, strict=True)]


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
