"""The command line: `kvcomm COMMAND`, with one file per command in kvcomm/commands.

Owns the parser's top, and how a command ends. Exit status: 0 done; 1 done, but some records failed;
2 an error, told in one line (KVCOMM_DEBUG=1 shows the traceback); 130 stopped by Ctrl-C. Results go
to standard output, everything else to standard error.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from kvcomm.commands import COMMANDS
from kvcomm.options.output import say

EPILOG = """\
exit status: 0 done; 1 done, but some records failed; 2 an error; 130 stopped by Ctrl-C.
KVCOMM_CACHE names the folder of fetched and converted models. KVCOMM_DEBUG=1 shows tracebacks.
"""

#: Commands that go on where they were stopped.
RESUMED = ("eval", "demo", "reproduce")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments = _parser().parse_args(words, argparse.Namespace(argv=words))
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        resumed = bool(words) and words[0] in RESUMED
        say("stopped" + "; the same command goes on from here" * resumed)
        return 130
    except BrokenPipeError:
        # Whoever read the output has left; nothing more can be said on it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("KVCOMM_DEBUG", "0") not in ("", "0"):
            raise
        print(f"kvcomm: error: {_one_line(error)}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """Raises in place of printing usage and leaving, so that all errors look alike."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see `{self.prog} --help`)")


def _parser() -> argparse.ArgumentParser:
    """The whole command line; parsing gives a namespace whose `run` is the command's function."""
    top = _Parser(
        prog="kvcomm",
        description="One language model answers from another model's KV cache.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("-V", "--version", action="store_true", help="print the version and leave")
    top.set_defaults(run=_version_or_help(top))
    subs = top.add_subparsers(metavar="COMMAND", title="commands")
    for name in COMMANDS:
        command = importlib.import_module(f"kvcomm.commands.{name.replace('-', '_')}")
        text = command.HELP
        sub = subs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        sub.set_defaults(run=command.run)
        command.add_options(sub)
    return top


def _version_or_help(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        if not arguments.version:
            parser.print_help()
            return 0
        from kvcomm import _core

        print(f"kvcomm {_core.__version__}")
        return 0

    return run


def _one_line(error: Exception) -> str:
    from kvcomm.errors import KVCommError

    told = isinstance(error, KVCommError | ValueError | TypeError | OSError | MemoryError)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        text = f"{os.fsdecode(error.filename)}: {error.strerror.lower()}"
    else:
        text = " ".join(str(error).split())
    if not text or not told:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text
