"""2WikiMultihopQA: questions over two to four paragraphs of ten.

Layouts: the original and the hub's copy (`paragraphs.py`), and LongBench (`longbench.py`),
which the paper used.

Context "full" is the published one, the whole context; of the original layout it is written as
LongBench writes it: per paragraph a line "Passage N:", the title, and the sentences with blanks
between. Context "gold" is the supporting sentences, one a line; LongBench, which does not name
them, gives its one text for both.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcomm.tasks import longbench
from kvcomm.tasks.example import Context, Parsed, Task
from kvcomm.tasks.paragraphs import read_paragraphs, supporting
from kvcomm.tasks.rows import Row


def parse(row: Row, context: Context) -> Iterator[Parsed]:
    """The one question of a record."""
    if longbench.applies(row):
        yield from longbench.parse(row)
        return
    paragraphs = read_paragraphs(row)
    if context == "gold":
        pieces = supporting(row, paragraphs)
    else:
        pieces = tuple(
            f"Passage {number}:\n{title}\n{' '.join(sentences)}"
            for number, (title, sentences) in enumerate(paragraphs, start=1)
        )
    yield Parsed(
        row.name("_id", "id"),
        "\n".join(pieces),
        row.text("question"),
        row.answers("answer"),
        pieces=pieces,
    )


TASK = Task(
    name="2wikimqa",
    family="qa",
    max_new_tokens=32,
    truncates=True,
    metric="match",
    closed=True,
    contexts=("full", "gold"),
    parse=parse,
    files=(
        "2wikimultihop*/dev*.json* 2wikimultihop*/*validation*.parquet "
        "2wikimultihop*/*2wikimqa*.json*",
        "2wikimqa.json* 2wikimqa.parquet",
        "2wikimqa/*2wikimqa*.json* 2wikimqa/dev*.json*",
    ),
)
