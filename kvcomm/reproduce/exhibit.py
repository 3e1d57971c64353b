"""What a table or a figure of a reproduction is, before and after it is made. Holds no numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcomm.reproduce.measures import Results
from kvcomm.reproduce.table import Table
from kvcomm.reproduce.verdict import Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvcomm.reproduce.runs import Runs

#: The eight tasks of the paper's main tables, in its order.
TASKS = (
    "countries", "tipsheets", "hotpotqa", "qasper", "musique", "multifieldqa_en", "2wikimqa",
    "tmath",
)  # fmt: skip

#: How the paper writes the names of tasks.
HEADINGS = {
    "countries": "Countries", "tipsheets": "Tipsheets", "hotpotqa": "HotpotQA",
    "qasper": "QASPER", "musique": "MuSiQue", "multifieldqa_en": "MultiFieldQA-en",
    "2wikimqa": "2WikiMQA", "tmath": "TMATH", "samsum": "SAMSum", "mmlu": "MMLU",
}  # fmt: skip


def heading(task: str) -> str:
    """How the paper writes a task's name, also that of a mixture or of a task's group."""
    names, blank, group = task.partition(" ")
    return " + ".join(HEADINGS.get(one, one) for one in names.split("+")) + blank + group


@dataclass(frozen=True)
class Built:
    """An exhibit that was made.

    tables: one per measure, never two measures in one. results: what the claims are judged by.
    draw: makes the figure, for a figure. verdicts: of claims that are not about rows of results.
    """

    tables: tuple[Table, ...]
    results: tuple[Results, ...] = ()
    draw: "Callable[[], Figure] | None" = None
    verdicts: tuple[Verdict, ...] = ()


@dataclass(frozen=True)
class Exhibit:
    """A numbered table or figure of the paper, or one of this project's own.

    name: "table-1". title: what the paper calls it. runs: what is run for it. tasks: those that it
    is about. build: makes it.
    """

    name: str
    title: str
    runs: str
    tasks: tuple[str, ...]
    build: "Callable[[Runs, Exhibit], Built]"

    @property
    def label(self) -> str:
        """What its titles begin with: "Table 1"."""
        return self.name.replace("-", " ").capitalize()
