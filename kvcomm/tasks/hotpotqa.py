"""HotpotQA: questions over two paragraphs, with the supporting sentences named.

Layouts: the original and the hub's copy (`paragraphs.py`), and LongBench (`longbench.py`).

Context "gold" is the published one: the supporting sentences, one a line. Context "full" is
every paragraph: its title, a line break, its sentences as stored; blank lines between
paragraphs. LongBench has one text, which serves as both.
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
    if context == "full":
        pieces = tuple(f"{title}\n{''.join(sentences)}" for title, sentences in paragraphs)
        joint = "\n\n"
    else:
        pieces, joint = supporting(row, paragraphs), "\n"
    yield Parsed(
        row.name("_id", "id"),
        joint.join(pieces),
        row.text("question"),
        row.answers("answer"),
        pieces=pieces,
        joint=joint,
    )


TASK = Task(
    name="hotpotqa",
    family="qa",
    max_new_tokens=48,
    truncates=True,
    metric="match",
    closed=True,
    contexts=("gold", "full"),
    parse=parse,
    files=(
        "hotpotqa/*dev*distractor*.json* hotpotqa/*validation*.parquet",
        "hotpotqa/*dev*.json*",
        "hotpotqa.json* hotpotqa.parquet",
        "hotpot_dev_distractor*.json*",
        "hotpotqa/longbench*.json*",
    ),
)
