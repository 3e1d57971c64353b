"""`kvcomm report`: summary and report of a run, made again from its log."""

import argparse
import json
from pathlib import Path
from typing import Any

from kvcomm.options.output import add_json, run_title, show_run

HELP = "make summary and report again from a run's log"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Make them, and print the table."""
    return show_run(*remade(Path(arguments.folder)), arguments)


def remade(folder: Path) -> tuple[dict[str, Any], Path]:
    """Summary and report of a run, both written to its folder; the summary, and the report's path.

    Raises
    ------
    FormatError
        The run has no records yet, or is damaged.
    OSError
        There is no run in the folder, or it cannot be written.
    """
    from kvcomm import report
    from kvcomm.errors import FormatError
    from kvcomm.records import dumps, write_json
    from kvcomm.runs import SUMMARY, read_run
    from kvcomm.summary import summarise

    run, records = read_run(folder)
    if not records:
        raise FormatError(f"{folder}: the run has no records yet")
    summary = json.loads(dumps(summarise(run, records)))
    write_json(folder / SUMMARY, summary)
    return summary, report.write_report(summary, folder, run_title(summary), records)
