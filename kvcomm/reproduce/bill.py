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
from kvcomm.reproduce.data import Data
from kvcomm.reproduce.exhibit import HEADINGS, Built, Exhibit, heading
from kvcomm.reproduce.runs import Runs
from kvcomm.reproduce.table import Cell, Table
from kvcomm.reproduce.verdict import FAILS, HOLDS, Judged, Verdict
from kvcomm.shapes import Shape
from kvcomm.statistics import Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = ("ac", "skyline", "kvcomm 0.3", "kvcomm 0.5", "kvcomm 0.7", "all layers")
KVCOMM = ROWS[2:5]

#: What the numbers are, for tables and figure.
ANALYTIC = "analytic, one record of the mean length of n, so no interval; every prefill in full"


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


@dataclass(frozen=True)
class Billed:
    """A task's sheet, how many records its lengths are means of, and the files of these."""

    sheet: Sheet
    n: int
    files: tuple[str, ...]


#: Those that are drawn.
DRAWN = ("whole run", "excess over AC", "receiver's memory, excess over AC")


def build(runs: Runs, exhibit: Exhibit) -> Built:
    """Figure 8 and the paper's claims about costs."""
    setting = cost.Setting(preset=runs.request.preset)
    bills = {found.task.name: _bill(runs, found, setting) for found in runs.chosen(exhibit)}
    about = (
        f"{tables.models(runs)}, {tables.preset(runs)}, weights in {setting.dtype}, K and V in "
        f"{setting.kv_dtype}"
    )
    made = tuple(_table(exhibit, bills, account, about) for account in ACCOUNTS)

    def draw() -> "Figure":
        from kvcomm.reproduce import figures

        parts = []
        for task, bill in bills.items():
            for table, account in zip(made, ACCOUNTS, strict=True):
                if account.name in DRAWN:
                    found = [table.cell(row, task).measured for row in ROWS]
                    values = tuple(None if one is None else one.value for one in found)
                    title = f"{heading(task)}, n = {bill.n}\n{account.name}"
                    unit = f"{account.unit} per record"
                    parts.append(figures.Bars(title, unit, ROWS, values))
        foot = f"{about}; {ANALYTIC}"
        return figures.draw(parts, f"{exhibit.label}. {exhibit.title}", foot)

    return Built(made, (), draw, _verdicts({task: bill.sheet for task, bill in bills.items()}))


def _bill(runs: Runs, found: Data, setting: cost.Setting) -> Billed:
    """The costs at the mean lengths of the scored records' prompts and gold answers, in tokens."""
    items = runs.items(found)
    lengths = cost.Lengths(
        context=round(fmean(len(item.sender) for item in items)),
        query=round(fmean(len(item.receiver) for item in items)),
        answer=round(fmean(len(item.gold[0]) for item in items)) + 1,
    )
    shape = Shape.of(runs.agents[1].model)
    sheet = cost_sheet.sheet(tables.models(runs), shape, lengths, setting=setting)
    return Billed(sheet, len(items), found.sources(item.example.id for item in items))


def _table(exhibit: Exhibit, bills: dict[str, Billed], account: Account, about: str) -> Table:
    nothing = float("nan")
    cells = {}
    for task, bill in bills.items():
        for label in ROWS:
            value = account.pick(bill.sheet.row(label))
            if value is not None:
                found = Interval(value / account.size, nothing, nothing, bill.n)
                cells[label, task] = Cell(found)
    lengths = "; ".join(
        f"{heading(task)} {of.context}, {of.query}, {of.answer}"
        for task, of in ((task, bill.sheet.lengths) for task, bill in bills.items())
    )
    return Table(
        title=f"{exhibit.label}. {exhibit.title}: {account.name}, {account.unit} per record. "
        f"{about}.",
        measure=account.name,
        corner="method",
        rows=ROWS,
        columns=tuple(bills),
        cells=cells,
        sources={task: bill.files for task, bill in bills.items()},
        notes=(
            f"tokens of context, query, answer (means of the n records, gold answers): {lengths}.",
            f"{ANALYTIC}. The paper printed no numbers.",
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
                f"KVComm computes 2.5 to 6 times less than Skyline on {heading(task)}",
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
                f"KVComm sends up to 3 times less than all layers on {heading(task)}",
                (_reaches(rows, less, 3.0, "bytes sent", "x"),),
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


def _reaches(
    rows: list[Row], pick: Callable[[Row], float], high: float, measure: str, unit: str
) -> Judged:
    """Whether the best of the rows comes up to a number, less a tenth; more is no fault."""
    values = [pick(row) for row in rows]
    why = f"{min(values):.2f}{unit} to {max(values):.2f}{unit}, {high:g}{unit} to a tenth"
    return Judged(measure, HOLDS if max(values) >= high * 0.9 else FAILS, None, why)
