"""Tipsheets: which of a few companies to invest in, from a paragraph of notes on them.

Layout: JSON Lines with `prompt_A` (the paragraph), `prompt_B` (the question), `label` (the name
of the best company) and mostly `options` (all the names). `tips.py` makes records of this kind.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcomm.tasks.example import Context, Parsed, Task
from kvcomm.tasks.rows import Row


def parse(row: Row, context: Context) -> Iterator[Parsed]:
    """The one question of a record."""
    yield Parsed(
        row.name("id"),
        row.text("prompt_A"),
        row.text("prompt_B"),
        row.answers("label"),
        choices=tuple(row.texts("options")) if "options" in row.fields else (),
    )


TASK = Task(
    name="tipsheets",
    family="qa",
    max_new_tokens=10,
    truncates=False,
    metric="match",
    closed=False,
    contexts=("full",),
    parse=parse,
    files=("tipsheets/*.json*", "tipsheets.json*"),
)
