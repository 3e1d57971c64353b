"""`kvcomm fetch`: a model of the catalogue."""

import argparse

from kvcomm.options.output import say

HELP = "download and convert a model of the catalogue"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("name", metavar="NAME")


def run(arguments: argparse.Namespace) -> int:
    """Fetch, and print the folder."""
    from kvcomm.catalogue import prepared

    def progress(text: str, done: int, total: int) -> None:
        say(f"{text} ({done // 10**6} of {total // 10**6} MB)")

    print(prepared(arguments.name, progress=progress))
    return 0
