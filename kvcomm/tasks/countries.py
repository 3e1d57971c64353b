"""Countries: where a person is, from the name of a place.

Layout: JSON Lines with `prompt_A` (a sentence), `prompt_B` (the question) and `country`. The
published code adds a sentence to the question, without a space between. `places.py` makes records
of this kind.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcomm.tasks.example import Context, Parsed, Task
from kvcomm.tasks.rows import Row

EXTRA = "You are required to extrapolate the country from the context."


def parse(row: Row, context: Context) -> Iterator[Parsed]:
    """The one question of a record."""
    yield Parsed(
        row.name("id"), row.text("prompt_A"), row.text("prompt_B") + EXTRA, row.answers("country")
    )


TASK = Task(
    name="countries",
    family="qa",
    max_new_tokens=5,
    truncates=False,
    metric="match",
    closed=False,
    contexts=("gold",),
    parse=parse,
    files=("countries/*.json*", "countries.json*"),
)
