"""A table of measured values, and its form as text, CSV, Markdown and LaTeX.

Owns what stands where, and LaTeX's escapes. Every cell carries its value, its 95% interval, how
many records it is of and what the paper printed, every table the data files. Nothing here measures
or judges.
"""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvcomm.layout import aligned, markdown_text, number
from kvcomm.statistics import Interval

#: Columns of the CSV form, one line per cell.
CSV_FIELDS = (
    "table", "measure", "row", "column", "value", "low", "high", "n", "paper", "models", "preset",
    "data",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One value; all of it may be unknown.

    measured: the value with its interval over n records, `low` and `high` NaN where it has none.
    paper: what the paper printed.
    """

    measured: Interval | None = None
    paper: float | None = None


@dataclass(frozen=True)
class Table:
    """Values by row and column.

    title: says what it is; measure: what the values are, one word; corner: what rows are. sources:
    by data set the names of the files that its records are from. decimals: places shown. notes:
    lines below.
    """

    title: str
    measure: str
    corner: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: Mapping[tuple[str, str], Cell]
    sources: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()
    decimals: int = 2
    headings: Mapping[str, str] = field(default_factory=dict)

    def cell(self, row: str, column: str) -> Cell:
        return self.cells.get((row, column), Cell())

    def heading(self, name: str) -> str:
        """How a row or a column is shown."""
        return self.headings.get(name, name)

    @property
    def lines(self) -> tuple[str, ...]:
        """All that stands below: the notes, and the data files."""
        listed = "; ".join(
            f"{self.heading(name)}: {', '.join(files)}" for name, files in self.sources.items()
        )
        return (*self.notes, f"data files: {listed or 'none'}.")

    def files(self, row: str, column: str) -> tuple[str, ...]:
        """Those behind a cell: of the data sets in its row or column, else of all."""
        named = [name for name in (row, column) if name in self.sources]
        found = [file for name in named or self.sources for file in self.sources[name]]
        return tuple(dict.fromkeys(found))


def _parts(cell: Cell, decimals: int) -> tuple[str, str, str]:
    """Value, interval with n, and the paper's value; "" for what is not there."""
    paper = "" if cell.paper is None else f"paper {number(cell.paper, min(decimals, 2))}"
    if cell.measured is None:
        return "-", "", paper
    found = cell.measured
    value = number(found.value, decimals)
    if found.low == found.low:
        low, high = number(found.low, decimals), number(found.high, decimals)
        return value, f"{low}..{high} n={found.n}", paper
    return value, f"n={found.n}", paper


def text(table: Table) -> str:
    """For a terminal: under each value its interval and n, and under these the paper's value."""
    lines: list[list[str]] = [[table.corner, *map(table.heading, table.columns)]]
    for row in table.rows:
        parts = [_parts(table.cell(row, column), table.decimals) for column in table.columns]
        lines.append([table.heading(row), *(part[0] for part in parts)])
        for place in (1, 2):
            if any(part[place] for part in parts):
                lines.append(["", *(part[place] for part in parts)])
    return "\n".join([table.title, "", *aligned(lines), "", *table.lines]) + "\n"


def markdown(table: Table) -> str:
    """A heading, a pipe table and the notes as a list."""

    def joined(cell: Cell) -> str:
        value, interval, paper = _parts(cell, table.decimals)
        return value + f" [{interval}]" * bool(interval) + f" ({paper})" * bool(paper)

    lines = [[table.corner, *map(table.heading, table.columns)]]
    lines += [
        [table.heading(row), *(joined(table.cell(row, column)) for column in table.columns)]
        for row in table.rows
    ]
    body = ["| " + " | ".join(map(markdown_text, line)) + " |" for line in lines]
    body.insert(1, "| --- |" + " ---: |" * len(table.columns))
    notes = [f"- {markdown_text(line)}" for line in table.lines]
    return "\n".join([f"### {markdown_text(table.title)}", "", *body, "", *notes]) + "\n"


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
}  # fmt: skip


def latex_text(value: str) -> str:
    """A text with every character that LaTeX takes for a command written out."""
    return "".join(_LATEX.get(character, character) for character in value)


def latex(table: Table) -> str:
    """A table environment that needs no package; the paper's value in parentheses."""

    def joined(cell: Cell) -> str:
        value, interval, paper = _parts(cell, table.decimals)
        shown = latex_text(value if value != "-" else "--")
        if interval:
            shown += rf" {{\scriptsize [{latex_text(interval)}]}}"
        return shown + f" ({latex_text(paper)})" * bool(paper)

    lines = [
        r"\begin{table}",
        rf"\caption{{{latex_text(table.title)}}}",
        rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}",
        r"\hline",
        " & ".join(latex_text(one) for one in (table.corner, *map(table.heading, table.columns)))
        + r" \\",
        r"\hline",
    ]
    for row in table.rows:
        cells = [joined(table.cell(row, column)) for column in table.columns]
        lines.append(" & ".join([latex_text(table.heading(row)), *cells]) + r" \\")
    lines += [r"\hline", r"\end{tabular}", r"\par\footnotesize"]
    lines += [latex_text(line) + r"\par" for line in table.lines]
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def csv_text(name: str, tables: Sequence[Table], models: str, preset: str) -> str:
    """All tables of an exhibit, a line per cell; an empty field is not known.

    models, preset: the pair and the protocol of the run, the same on every line.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_FIELDS)
    for table in tables:
        for row in table.rows:
            for column in table.columns:
                cell = table.cell(row, column)
                found = cell.measured
                values = (None,) * 4 if found is None else (
                    found.value, found.low, found.high, found.n
                )  # fmt: skip
                numbers = [
                    "" if one is None or one != one else repr(one) for one in (*values, cell.paper)
                ]
                files = "; ".join(table.files(row, column))
                writer.writerow([name, table.measure, row, column, *numbers, models, preset, files])
    return out.getvalue()


#: Forms by the ending of their file; CSV has all tables of an exhibit as one.
FORMS: dict[str, Callable[[Table], str]] = {"txt": text, "md": markdown, "tex": latex}
