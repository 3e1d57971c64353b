"""TMATH: problems of the MATH data set with a tutor's questions as hints.

Layout: `problem`, `solution` and `socratic_questions` (one text, the hints), as JSON Lines or,
as published, one record a file. The context is the hints, the accepted answer the whole solution.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcomm.tasks.example import Context, Parsed, Task
from kvcomm.tasks.rows import Row


def parse(row: Row, context: Context) -> Iterator[Parsed]:
    """The one problem of a record."""
    yield Parsed(
        row.name("id"),
        row.text("socratic_questions"),
        row.text("problem"),
        row.answers("solution"),
    )


TASK = Task(
    name="tmath",
    family="math",
    max_new_tokens=256,
    truncates=True,
    metric="published_rouge_l",
    closed=False,
    contexts=("full",),
    parse=parse,
    files=("tmath/*.json*", "tmath.json*", "TMATH/hint_*/hint_*.json"),
)
