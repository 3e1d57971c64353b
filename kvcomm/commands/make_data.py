"""`kvcomm make-data`: write records of countries or tipsheets, for those who have no data.

Owns the command's options and what it prints; `kvcomm.tasks.make` makes the records.
"""

import argparse

HELP = "write seeded records of countries or tipsheets"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--task", required=True, metavar="T", help="countries or tipsheets")
    parser.add_argument(
        "--records", type=int, default=100, metavar="N", help="how many (default 100)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="seed (default 1)")
    parser.add_argument("--out", required=True, metavar="FILE", help="where to write: JSON Lines")


def run(arguments: argparse.Namespace) -> int:
    """Write the file, whole or not at all.

    Raises
    ------
    ValueError
        Another task, or a number out of range; nothing is written.
    OSError
        The file cannot be written.
    """
    from kvcomm.packet import write_whole
    from kvcomm.tasks.make import generate

    write_whole(arguments.out, generate(arguments.task, arguments.records, arguments.seed))
    print(f"{arguments.records} records of {arguments.task} written to {arguments.out}")
    return 0
