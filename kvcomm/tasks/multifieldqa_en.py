"""MultiFieldQA, English: questions about one long text of some field.

Layout: LongBench's (`longbench.py`), the only one the data set was published in.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcomm.tasks import longbench
from kvcomm.tasks.example import Context, Parsed, Task
from kvcomm.tasks.rows import Row


def parse(row: Row, context: Context) -> Iterator[Parsed]:
    """The one question of a record; `context` is always the whole text."""
    yield from longbench.parse(row)


TASK = Task(
    name="multifieldqa_en",
    family="qa",
    max_new_tokens=64,
    truncates=True,
    metric="match",
    closed=False,
    contexts=("full",),
    parse=parse,
    files=(
        "multifieldqa_en/*.json* multifieldqa_en/*.parquet",
        "multifieldqa_en.json* multifieldqa_en.parquet",
    ),
)
