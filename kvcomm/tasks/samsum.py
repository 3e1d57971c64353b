"""SAMSum: a sentence that sums up a chat, of which each agent has one half.

Layout: `dialogue`, `summary` and `id`, as in the published JSON arrays and in the hub's copies.
The sender reads the first half of the dialogue's lines (n // 2 of them), the receiver has the
others as its question. A dialogue of one line has no first half; its context is empty.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcomm.tasks.example import Context, Parsed, Task
from kvcomm.tasks.rows import Row


def parse(row: Row, context: Context) -> Iterator[Parsed]:
    """The one dialogue of a record."""
    lines = row.text("dialogue").replace("\r\n", "\n").split("\n")
    half = len(lines) // 2
    yield Parsed(
        row.name("id"), "\n".join(lines[:half]), "\n".join(lines[half:]), row.answers("summary")
    )


TASK = Task(
    name="samsum",
    family="summary",
    max_new_tokens=300,
    truncates=True,
    metric="published_rouge_l",
    closed=False,
    contexts=("full",),
    parse=parse,
    files=(
        "samsum/*test*.json* samsum/*test*.parquet",
        "samsum.json* samsum.parquet",
        "samsum/*.json*",
    ),
)
