"""LongBench's layout, which several data sets share.

A row has `input` (the question), `context` (one text), `answers` (all that are accepted) and
mostly `_id`. The contexts of its multi-document sets are passages, each beginning with a line
"Passage N:"; these are the pieces that several senders share, and what stands before the first
goes to each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvcomm.tasks.example import Parsed
from kvcomm.tasks.rows import Row

FIELDS = ("input", "context")

# Between two passages stands a line break, which belongs to neither.
PASSAGE = re.compile(r"(?:\A|\n)(?=Passage \d+:)")


def applies(row: Row) -> bool:
    """Whether a row is in this layout: the original ones have another kind of context."""
    return "input" in row.fields and isinstance(row.fields.get("context"), str)


def parse(row: Row) -> Iterator[Parsed]:
    """The one question of a row."""
    text = row.text("context")
    preamble, pieces = passages(text)
    yield Parsed(
        row.name("_id", "id"),
        text,
        row.text("input"),
        row.answers("answers"),
        pieces=pieces,
        preamble=preamble,
        marked=False,
    )


def passages(text: str) -> tuple[str, tuple[str, ...]]:
    """The text before the first passage, and the passages, to be joined by line breaks again.

    A text without passages has no pieces.
    """
    head, *pieces = PASSAGE.split(text)
    if not pieces:
        return "", ()
    return (head + "\n" if head else ""), tuple(pieces)
