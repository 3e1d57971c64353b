"""`kvcomm demo`: the shipped questions with and without kvcomm."""

import argparse
from pathlib import Path

from kvcomm.options.output import add_json, say, show_run
from kvcomm.options.pair import add_threads, set_threads
from kvcomm.options.values import path

HELP = "answer the shipped questions with and without kvcomm, and report"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--model", default="smollm2-135m", metavar="M", help="default smollm2-135m")
    parser.add_argument(
        "--out", type=path, default="kvcomm-demo", metavar="DIR", help="default ./kvcomm-demo"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="score the first N questions only")
    add_threads(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run it, and print its table."""
    from kvcomm import demo

    set_threads(arguments)
    out = Path(arguments.out)
    summary, report = demo.run(arguments.model, out, limit=arguments.limit, note=say)
    return show_run(summary, report, arguments)
