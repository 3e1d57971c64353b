"""How a line of the benchmarks is written in a table. Owns the words of its cells, and tables.

Standard library only: readme.py runs where nothing is installed.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def share(row: Mapping[str, Any]) -> str:
    """Of the limit; empty where there is none."""
    return "" if row["limit_share"] is None else f"{row['limit_share']:.0%}"


def peers(row: Mapping[str, Any], digits: int = 2) -> str:
    """Every peer's ratio."""
    return ", ".join(f"{ratio:.{digits}f}x {name}" for name, ratio in row["peers"].items())


def figure(row: Mapping[str, Any]) -> str:
    """The value and its unit."""
    return f"{row['value']:.4g} {row['unit']}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, *rows]
    head, *rest = ["| " + " | ".join(cells) + " |" for cells in lines]
    return "\n".join([head, "|" + " --- |" * len(header), *rest])
