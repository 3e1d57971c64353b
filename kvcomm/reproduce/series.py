"""From results to the tables and the drawing of a figure with curves or a map over settings.

Owns what all such figures share: a table per task and measure, with the same numbers as the panel
that is drawn of it. What is on the axes and what is run say sweeps.py and curves.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcomm.report.tables import METRICS
from kvcomm.reproduce import tables
from kvcomm.reproduce.exhibit import Built, Exhibit, heading
from kvcomm.reproduce.measures import MEASURES, PUBLISHED, RECOVERED, Results
from kvcomm.reproduce.runs import Runs
from kvcomm.reproduce.table import Cell, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvcomm.reproduce.figures import Heat, Panel

#: What a measure is called on an axis.
AXIS = {RECOVERED: "recovered, share (0 baseline, 1 skyline)"}

#: Said on every figure that needed no answers.
NO_ANSWERS = "from likelihoods of the gold answers, no answers generated"


@dataclass(frozen=True)
class Curves:
    """What is on the axes of a figure.

    x_label: what x is. x: its values. names: of the curves. row: the row of results that a curve
    has at x; "" for none. log: x grows by factors.
    """

    x_label: str
    x: tuple[float, ...]
    names: tuple[str, ...]
    row: Callable[[str, float], str]
    log: bool = False


@dataclass(frozen=True)
class Map:
    """A map over two settings: the row of results at (row, column), "" for none."""

    corner: str
    x_label: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    row: Callable[[str, str], str]


def build(
    runs: Runs,
    exhibit: Exhibit,
    results: Sequence[Results],
    parts: Sequence[Curves | Map] | Callable[[Results], Sequence[Curves | Map]],
    notes: Sequence[str] = (),
    protocol: Callable[[Runs], str] = tables.protocol,
) -> Built:
    """The tables and the figure of an exhibit: for every task and measure, every part.

    parts: the same for all tasks, or made for each. protocol: what titles say of how it was run.
    """
    about = f"{tables.models(runs)}; {protocol(runs)}"
    made: list[tuple[Results, str, Curves | Map, Table]] = []
    for measure in MEASURES:
        for one in results:
            if one.metric is None if measure == PUBLISHED else not one.task.needs_context:
                continue
            for part in parts(one) if callable(parts) else parts:
                called = f"{heading(one.task.name)}: {_called(one, measure)}"
                title = f"{exhibit.label}. {exhibit.title}, {called}. {about}."
                made.append((one, measure, part, _table(title, one, measure, part, notes)))

    def draw() -> "Figure":
        from kvcomm.reproduce import figures

        drawn = [_part(one, measure, part, table) for one, measure, part, table in made]
        answers = "" if any(one.metric for one in results) else f"; {NO_ANSWERS}"
        curves = any(isinstance(part, Curves) for _, _, part, _ in made)
        whiskers = ", whiskers: 95% bootstrap intervals" if curves else ""
        foot = f"{about}; n records{whiskers}{answers}"
        return figures.draw(drawn, f"{exhibit.label}. {exhibit.title}", foot)

    return Built(tuple(table for *_, table in made), tuple(results), draw)


def _called(results: Results, measure: str) -> str:
    return f"{_metric(results)} (published metric)" if measure == PUBLISHED else measure


def _metric(results: Results) -> str:
    """How reports write the task's metric."""
    return METRICS.get(results.metric or "", "no metric")


def _table(
    title: str, results: Results, measure: str, part: Curves | Map, notes: Sequence[str]
) -> Table:
    if isinstance(part, Curves):
        rows, columns = tuple(f"{x:g}" for x in part.x), part.names
        wanted = {(f"{x:g}", name): part.row(name, x) for x in part.x for name in part.names}
        corner = part.x_label
    else:
        rows, columns, corner = part.rows, part.columns, f"{part.corner} / {part.x_label}"
        wanted = {(y, x): part.row(y, x) for y in rows for x in columns}
    cells = {place: Cell(results.measured(row, measure)) for place, row in wanted.items() if row}
    how = [] if results.metric else [f"{NO_ANSWERS}."]
    shared = "Ranges: 95% bootstrap intervals over n records; the paper printed no numbers."
    helpless = (
        []
        if results.helps(measure)
        else ["reading the context does not clearly help here by this measure: no claim is judged."]
    )
    return Table(
        title,
        measure,
        corner,
        rows,
        columns,
        cells,
        {results.task.name: results.files},
        (*notes, *how, *helpless, *results.notes_of_failed, shared),
        headings={results.task.name: heading(results.task.name)},
    )


def _title_of(results: Results, measure: str, table: Table) -> str:
    """The task, how many records it is, and a warning where the measure says nothing."""
    from kvcomm.plots import n_range

    n = n_range(cell.measured.n for cell in table.cells.values() if cell.measured)
    helpless = "" if results.helps(measure) else "\n(reading the context does not clearly help)"
    return f"{heading(results.task.name)}, {n}{helpless}"


def _part(results: Results, measure: str, part: Curves | Map, table: Table) -> "Panel | Heat":
    from kvcomm.reproduce.figures import Heat, Line, Panel, widest

    title = _title_of(results, measure, table)
    label = AXIS.get(measure, f"{_metric(results)}, mean, 0 to 1")
    if isinstance(part, Map):
        values = tuple(
            tuple(
                float("nan") if (found := table.cell(y, x).measured) is None else found.value
                for x in part.columns
            )
            for y in part.rows
        )
        title += f"\n{widest(cell.measured for cell in table.cells.values() if cell.measured)}"
        return Heat(title, part.x_label, part.corner, part.rows, part.columns, values, label)
    lines = tuple(
        Line(name, part.x, tuple(table.cell(f"{x:g}", name).measured for x in part.x))
        for name in part.names
    )
    levels: dict[float, str] = {}
    for row in ("baseline", "skyline") if results.task.needs_context else ("baseline",):
        found = results.measured(row, measure)
        if found is not None:
            before = levels.get(found.value)
            levels[found.value] = row if before is None else f"{before}, {row}"
    return Panel(title, part.x_label, label, lines, tuple(levels.items()), part.log)
