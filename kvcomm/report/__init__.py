"""Tables of a run as text and Markdown, and one HTML file that shows all of it.

Owns the form of results; every number comes from a summary (summary.py), every answer from the log.

    tables.py   cells, columns, the table as text and as Markdown
    words.py    what the columns mean, and the line that says what the run shows
    answers.py  the log's lines by method, and which of them a report shows
    page.py     the HTML file: styles and plots are inside, it asks no network
"""

from collections.abc import Sequence
from pathlib import Path

from kvcomm.packet import write_whole
from kvcomm.records import Record
from kvcomm.report.page import html_report
from kvcomm.report.tables import Summary, caption, markdown_table, rows, seconds, size, text_table
from kvcomm.report.words import finding, notes

REPORT = "report.html"

__all__ = [
    "REPORT", "caption", "finding", "html_report", "markdown_table", "notes", "rows", "seconds",
    "size", "text_table", "write_report",
]  # fmt: skip


def write_report(
    summary: Summary, folder: Path, title: str, records: Sequence[Record] = ()
) -> Path:
    """Write report.html into a folder, whole or not at all; returns its path.

    Parameters
    ----------
    records
        Lines of the run's log; without them the report shows no answers.
    """
    path = folder / REPORT
    # A text of a data file may hold half of a surrogate pair, which UTF-8 does not have.
    write_whole(path, html_report(summary, title, records).encode("utf-8", "replace"))
    return path
