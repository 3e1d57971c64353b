"""`kvcomm convert`: a GGUF file as a Hugging Face folder."""

import argparse

HELP = "turn a GGUF file into a Hugging Face folder"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("gguf", metavar="model.gguf")
    parser.add_argument("folder", metavar="folder/")


def run(arguments: argparse.Namespace) -> int:
    """Convert, and print the folder."""
    from kvcomm.convert import convert

    print(convert(arguments.gguf, arguments.folder))
    return 0
