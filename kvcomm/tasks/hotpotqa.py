"""HotpotQA: questions over two paragraphs, with the supporting sentences named.

Layouts: the original (`context` as [title, sentences] pairs, `supporting_facts` as
[title, sentence] pairs), the hub's copy (both as lists by field name, `id` for `_id`), and
LongBench (`input`, `context` as one text, `answers`).

Context "gold" is the published one: the supporting sentences in the order of
`supporting_facts`, one a line, each as stored. A fact whose sentence does not exist is passed
over; where a title occurs twice, the sentence of each paragraph is taken. Context "full" is
every paragraph: its title, a line break, its sentences as stored; blank lines between
paragraphs. LongBench has one text, which serves as both.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcomm.tasks.example import Context, Parsed, Task
from kvcomm.tasks.rows import Row

Paragraphs = list[tuple[str, list[str]]]


def parse(row: Row, context: Context) -> Iterator[Parsed]:
    """The one question of a record."""
    if isinstance(row.fields.get("context"), str):
        yield Parsed(
            row.name("_id", "id"), row.text("context"), row.text("input"), row.answers("answers")
        )
        return
    paragraphs = _pairs(row, "context", "title", "sentences")
    for _, sentences in paragraphs:
        if not isinstance(sentences, list) or not all(isinstance(s, str) for s in sentences):
            raise row.wrong("context", sentences, "lists of sentences")
    if context == "full":
        text = "\n\n".join(f"{title}\n{''.join(sentences)}" for title, sentences in paragraphs)
    else:
        facts = _pairs(row, "supporting_facts", "title", "sent_id")
        text = "\n".join(_supporting(row, paragraphs, facts))
    yield Parsed(row.name("_id", "id"), text, row.text("question"), row.answers("answer"))


def _supporting(row: Row, paragraphs: Paragraphs, facts: list[tuple[str, int]]) -> Iterator[str]:
    for wanted, place in facts:
        if not isinstance(place, int):
            raise row.wrong("supporting_facts", place, "sentence numbers")
        for title, sentences in paragraphs:
            if title == wanted and 0 <= place < len(sentences):
                yield sentences[place]


def _pairs(row: Row, name: str, first: str, second: str) -> list:
    """A field of pairs, stored as a list of pairs or as an object of two lists."""
    value = row.take(name, (list, dict))
    if isinstance(value, list):
        if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value):
            raise row.wrong(name, value, "a list of pairs")
        return [tuple(pair) for pair in value]
    part = row.within(name, value)
    left, right = part.take(first, list), part.take(second, list)
    if len(left) != len(right):
        raise row.wrong(name, value, f"as many {second} as {first}, {len(left)}")
    return list(zip(left, right, strict=True))


TASK = Task(
    name="hotpotqa",
    family="qa",
    max_new_tokens=48,
    truncates=True,
    metric="match",
    closed=True,
    contexts=("gold", "full"),
    parse=parse,
)
