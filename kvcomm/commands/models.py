"""`kvcomm models`: what the catalogue has."""

import argparse

from kvcomm.options.output import add_json, print_json

HELP = "list the models that can be fetched by name"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the catalogue."""
    from dataclasses import asdict

    from kvcomm.catalogue import CATALOGUE
    from kvcomm.report import size

    if arguments.json:
        print_json([{**asdict(e), "source": e.source} for e in CATALOGUE.values()])
        return 0
    for entry in CATALOGUE.values():
        print(f"{entry.name}\n  {entry.title}, {size(entry.n_bytes)}, {entry.licence}")
        print(f"  source  {entry.source}\n  sha256  {entry.sha256}")
    return 0
