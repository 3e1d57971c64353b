"""What commands print: results on standard output, everything else on standard error."""

import argparse
import sys
from pathlib import Path
from typing import Any


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def say(line: str) -> None:
    """A line on standard error."""
    print(f"kvcomm: {line}", file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """A value as JSON on standard output."""
    from kvcomm.records import dumps

    print(dumps(value, indent=1))


def run_title(summary: dict[str, Any]) -> str:
    """What the report of a run is called."""
    settings = summary["settings"]
    names = [settings["sender"]["model"], settings["receiver"]["model"]]
    return f"{settings['task']}: {' to '.join(dict.fromkeys(names))}"


def show_run(summary: dict[str, Any], report: Path, arguments: argparse.Namespace) -> int:
    """Print a run's results; the status says whether records failed."""
    from kvcomm import report as reports
    from kvcomm.layout import counted

    if arguments.json:
        print_json(summary)
    else:
        table = reports.markdown_table if getattr(arguments, "markdown", False) else None
        print((table or reports.text_table)(summary))
        print()
        for line in reports.notes(summary):
            print(line)
        print()
        print(reports.finding(summary))
        print(f"Report: {report}")
    failed = sum(method["failed"] for method in summary["methods"])
    if failed:
        attempted = sum(method["attempted"] for method in summary["methods"])
        say(f"{failed} of {counted(attempted, 'answer')} failed; the log says why")
    return 1 if failed else 0
