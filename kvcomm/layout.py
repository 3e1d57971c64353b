"""How numbers, counts and columns are written, in a terminal and in Markdown.

Owns the pieces that reports, plots and reproductions share. Knows no table and no measure.
"""

import re
from collections.abc import Sequence

#: What Markdown takes for a mark; a "_" inside of a word, as in a file's name, is none.
_MARKS = re.compile(r"[\\|*<]|(?<![^\W_])_|_(?![^\W_])")


def number(value: float | None, places: int) -> str:
    """A number with so many decimals; "-" for None and NaN."""
    if value is None or value != value:
        return "-"
    # Adding 0.0 turns the -0.0 that rounding may leave into 0.0.
    return f"{round(value, places) + 0.0:.{places}f}"


def counted(n: int, noun: str) -> str:
    """A count with its noun: "1 record", "2 records"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Cells as columns, the first one to the left, with a rule below the first line."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return [texts[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *texts[1:]]


def markdown_text(text: str) -> str:
    """Text that Markdown shows as it is."""
    return _MARKS.sub(lambda mark: "\\" + mark.group(), text)
