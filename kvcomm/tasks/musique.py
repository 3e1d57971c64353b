"""MuSiQue: questions of two to four hops over twenty paragraphs, with aliases of the answer.

Layouts: the original (`paragraphs` with `title`, `paragraph_text` and `is_supporting`,
`answer`, `answer_aliases`), the hub's copies of it, and LongBench (`longbench.py`).

Context "gold" is the published one: the text of the supporting paragraphs, in order, one a
line, without titles. Context "full" is every paragraph: its title, a line break, its text;
blank lines between paragraphs. LongBench has one text, which serves as both. A question that the
data set says cannot be answered has no accepted answer.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcomm.tasks import longbench
from kvcomm.tasks.example import Context, Parsed, Task
from kvcomm.tasks.rows import Row


def parse(row: Row, context: Context) -> Iterator[Parsed]:
    """The one question of a record."""
    if longbench.applies(row):
        yield from longbench.parse(row)
        return
    paragraphs = row.objects("paragraphs")
    if context == "full":
        pieces = tuple(f"{one.text('title')}\n{one.text('paragraph_text')}" for one in paragraphs)
        joint = "\n\n"
    else:
        supporting = [one for one in paragraphs if one.take("is_supporting", bool)]
        pieces, joint = tuple(one.text("paragraph_text") for one in supporting), "\n"
    answers = row.answers("answer", "answer_aliases")
    yield Parsed(
        row.name("id", "_id"),
        joint.join(pieces),
        row.text("question"),
        () if row.fields.get("answerable") is False else answers,
        pieces=pieces,
        joint=joint,
    )


TASK = Task(
    name="musique",
    family="qa",
    max_new_tokens=48,
    truncates=True,
    metric="match",
    closed=False,
    contexts=("gold", "full"),
    parse=parse,
    files=(
        "musique/*ans*dev*.json* musique/*validation*.parquet",
        "musique.json* musique.parquet",
        "musique_ans*dev*.json*",
        "musique/longbench*.json*",
    ),
)
