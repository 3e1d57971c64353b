"""Figure 8: what each method costs, from the analytic model of costs.

Owns which lengths and which accounts the figure has; the numbers are cost.py's. Whole runs and the
excess over AC are two tables, and never stand for each other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from kvcomm import cost, cost_sheet
from kvcomm.cost_sheet import Row, Sheet
from kvcomm.reproduce import tables
from kvcomm.reproduce.claims import FAILS, HOLDS, Judged, Verdict
from kvcomm.reproduce.data import Data
from kvcomm.reproduce.exhibit import HEADINGS, Built, Exhibit
from kvcomm.reproduce.runs import Runs
from kvcomm.reproduce.table import Cell, Table
from kvcomm.shapes import Shape
from kvcomm.statistics import Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = ("ac", "skyline", "kvcomm 0.3", "kvcomm 0.5", "kvcomm 0.7", "all layers")
KVCOMM = ROWS[2:5]


@dataclass(frozen=True)
class Account:
    """One table of the figure: its name, unit and divisor, and the number of a row."""

    name: str
    unit: str
    size: float
    pick: Callable[[Row], int | None]


ACCOUNTS = (
    Account("whole run", "GFLOPs", 1e9, lambda row: row.full.whole),
    Account("excess over AC", "GFLOPs", 1e9, lambda row: row.full.excess),
    Account(
        "excess over AC by the paper's formulas", "G operations", 1e9,
        lambda row: None if row.paper is None else row.paper.excess,
    ),
    Account("message", "MB", 1e6, lambda row: row.message_bytes),
    Account("receiver's memory with weights", "GB", 1e9, lambda row: row.memory.whole),
    Account("receiver's memory, excess over AC", "MB", 1e6, lambda row: row.memory.excess),
)  # fmt: skip

#: Those that are drawn.
DRAWN = ("whole run", "excess over AC", "receiver's memory, excess over AC")


def build(runs: Runs, exhibit: Exhibit) -> Built:
    """Figure 8 and the paper's claims about costs."""
    sheets = {}
    for found in runs.chosen(exhibit):
        shape = Shape.of(runs.agents[1].model)
        setting = cost.Setting(preset=runs.request.preset)
        lengths = _lengths(runs, found)
        sheets[found.task.name] = cost_sheet.sheet(
            tables.models(runs), shape, lengths, setting=setting
        )
    made = tuple(_table(runs, exhibit, sheets, account) for account in ACCOUNTS)

    def draw() -> "Figure":
        from kvcomm.reproduce import figures

        parts = []
        for task in sheets:
            for table, account in zip(made, ACCOUNTS, strict=True):
                if account.name in DRAWN:
                    found = [table.cell(row, task).measured for row in ROWS]
                    values = tuple(None if one is None else one.value for one in found)
                    title = f"{HEADINGS.get(task, task)}: {account.name}"
                    parts.append(figures.Bars(title, account.unit, ROWS, values))
        foot = f"{tables.models(runs)}; analytic, one record of mean length; every prefill in full"
        return figures.draw(parts, f"Figure 8. {exhibit.title}", foot)

    return Built(made, (), draw, _verdicts(sheets))


def _lengths(runs: Runs, found: Data) -> cost.Lengths:
    """Mean lengths of the scored records' prompts and gold answers, in tokens."""
    items = runs.items(found)
    return cost.Lengths(
        context=round(fmean(len(item.sender) for item in items)),
        query=round(fmean(len(item.receiver) for item in items)),
        answer=round(fmean(len(item.gold[0]) for item in items)) + 1,
    )


def _table(runs: Runs, exhibit: Exhibit, sheets: dict[str, Sheet], account: Account) -> Table:
    nothing = float("nan")
    cells = {}
    for task, sheet in sheets.items():
        n = len(runs.data(task).plan.scored)
        for label in ROWS:
            value = account.pick(sheet.row(label))
            if value is not None:
                cells[label, task] = Cell(Interval(value / account.size, nothing, nothing, n))
    lengths = "; ".join(
        f"{HEADINGS.get(task, task)} {one.lengths.context}, {one.lengths.query}, "
        f"{one.lengths.answer}"
        for task, one in sheets.items()
    )
    return Table(
        title=f"Figure 8. {exhibit.title}: {account.name}, {account.unit} per record. "
        f"{tables.models(runs)}.",
        measure=account.name,
        corner="method",
        rows=ROWS,
        columns=tuple(sheets),
        cells=cells,
        notes=(
            f"tokens of context, query, answer (means of the n records, gold answers): {lengths}.",
            "analytic, every prefill in full; weights and K and V in bf16. The paper printed no "
            "numbers.",
        ),
        decimals=3,
        headings=HEADINGS,
    )


# ---- claims --------------------------------------------------------------------------------


def _verdicts(sheets: dict[str, Sheet]) -> tuple[Verdict, ...]:
    def flops(row: Row) -> float | None:
        return None if row.paper is None else row.paper.excess_less

    parts = []
    for task, sheet in sheets.items():
        rows = [sheet.row(label) for label in KVCOMM]
        parts.append(
            Verdict(
                f"flops-{task}",
                f"KVComm computes 2.5 to 6 times less than Skyline on {HEADINGS.get(task, task)}",
                (
                    _within(rows, flops, 2.5, 6.0, "excess over AC, the paper's formulas", "x"),
                    _within(rows, lambda r: r.full.excess_less, 2.5, 6.0, "excess over AC, FLOPs",
                            "x"),
                    _within(rows, lambda r: r.full.whole_less, 2.5, 6.0, "whole runs, FLOPs", "x"),
                ),
            )
        )  # fmt: skip
        all_layers = sheet.row("all layers").message_bytes

        def less(row: Row, sent: int = all_layers) -> float:
            return sent / row.message_bytes

        parts.append(
            Verdict(
                f"bytes-{task}",
                f"KVComm sends up to 3 times less than all layers on {HEADINGS.get(task, task)}",
                (_within(rows, less, 1.0, 3.0, "bytes sent", "x"),),
            )
        )
    if "tipsheets" in sheets:
        sheet = sheets["tipsheets"]
        rows, skyline = [sheet.row(label) for label in KVCOMM], sheet.row("skyline").memory
        parts.append(
            Verdict(
                "memory",
                "KVComm needs 23% to 73% less memory than Skyline on Tipsheets",
                (
                    _within(rows, lambda r: 1 - r.memory.excess / skyline.excess, 0.23, 0.73,
                            "excess over AC", ""),
                    _within(rows, lambda r: 1 - r.memory.whole / skyline.whole, 0.23, 0.73,
                            "whole memory", ""),
                ),
            )
        )  # fmt: skip
    return tuple(parts)


def _within(
    rows: list[Row],
    pick: Callable[[Row], float | None],
    low: float,
    high: float,
    measure: str,
    unit: str,
) -> Judged:
    """Whether what the rows have lies within a range, to a tenth of its ends."""
    values = [value for row in rows if (value := pick(row)) is not None]
    if not values:
        return Judged(measure, FAILS, None, "KVComm or Skyline has no excess over AC")
    least, most = min(values), max(values)
    holds = low * 0.9 <= least and most <= high * 1.1
    why = f"{least:.2f}{unit} to {most:.2f}{unit}, ends to a tenth"
    return Judged(measure, HOLDS if holds else FAILS, None, why)
