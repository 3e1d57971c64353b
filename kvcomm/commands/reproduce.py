"""`kvcomm reproduce`: the paper's tables and figures from the user's models and data.

Owns the options and what is printed; how exhibits are made is kvcomm/reproduce.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvcomm.options.choice import add_alpha, add_preset
from kvcomm.options.data import add_amount
from kvcomm.options.output import say
from kvcomm.options.pair import MODEL, add_device, add_dtype, set_threads
from kvcomm.options.values import path, words

if TYPE_CHECKING:
    from kvcomm.reproduce.exhibit import Built
    from kvcomm.reproduce.request import Request
    from kvcomm.reproduce.verdict import Verdict

HELP = "make the paper's tables and figures again"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    what = parser.add_argument_group("what to make")
    what.add_argument(
        "--table", type=words, default=(), metavar="N", help="numbered tables, by comma"
    )
    what.add_argument(
        "--figure", type=words, default=(), metavar="N", help="numbered figures, by comma"
    )
    what.add_argument(
        "--extra", type=words, default=(), metavar="NAME",
        help="what the paper does not have: controls, first-token, search",
    )  # fmt: skip
    what.add_argument("--all", action="store_true", help="all of them")
    what.add_argument("--list", action="store_true", help="say what can be made, and leave")
    what.add_argument("--tasks", type=words, metavar="LIST", help="only these tasks")
    what.add_argument(
        "--methods", type=words, metavar="LIST",
        help="of the main tables: kvcomm,nld,cipher,ac (default: all)",
    )  # fmt: skip
    given = parser.add_argument_group("models and data")
    given.add_argument("--models", type=words, metavar="SENDER[,RECEIVER]", help=MODEL)
    given.add_argument("--data-dir", type=path, metavar="DIR", help="the folder of the data files")
    add_amount(given, " per task")
    add_dtype(given)
    add_device(given)
    how = parser.add_argument_group("protocol")
    add_preset(
        how,
        " with its protocol: calibration on the first records of the data, which are scored too",
    )
    add_alpha(
        how, None,
        "the paper's for the family, 0.8 for Qwen and Falcon, else 1; in preset reference 1",
    )  # fmt: skip
    how.add_argument(
        "--score", default="recovered", choices=("recovered", "match"),
        help="what figures over settings show: recovered, which needs no answers (default), or the "
        "published metric too",
    )  # fmt: skip
    how.add_argument(
        "--grid", type=int, default=8, metavar="N",
        help="most steps of figures over layers (default 8; 0: every layer)",
    )  # fmt: skip
    how.add_argument(
        "--paper-pair", metavar="N", help="pair of the paper to stand beside (default: closest)"
    )
    parser.add_argument("--out", type=path, metavar="DIR", help="where results and their runs go")


def run(arguments: argparse.Namespace) -> int:
    """Make what was asked for; 1 when records failed."""
    from kvcomm.layout import counted
    from kvcomm.reproduce.catalogue import EXHIBITS
    from kvcomm.reproduce.course import check, reproduce

    if arguments.list:
        _print_list()
        return 0
    names = [f"table-{number}" for number in arguments.table]
    names += [f"figure-{number}" for number in arguments.figure]
    names += [f"extra-{name}" for name in arguments.extra]
    names = list(EXHIBITS) if arguments.all else names
    if not names:
        raise ValueError("nothing to make: --table N, --figure N, --extra NAME, --all or --list")
    if "table-5" in names:
        _print_settings()
        names.remove("table-5")
        if not names:
            return 0
    for name in names:
        check(name)
    request = _request(arguments)
    n_failed = reproduce(names, request, command=("kvcomm", *arguments.argv), note=say, tell=_tell)
    if n_failed:
        failed = f"{counted(n_failed, 'answer')} failed"
        say(f"{failed}; the logs below {request.out.name}/runs say why")
    return 1 if n_failed else 0


def _request(arguments: argparse.Namespace) -> "Request":
    from kvcomm.reproduce import paper
    from kvcomm.reproduce.request import CHOICES, Request

    for option in ("models", "data_dir", "out"):
        if not getattr(arguments, option):
            raise ValueError(f"--{option.replace('_', '-')} is needed")
    set_threads(arguments)
    if arguments.paper_pair is not None:
        paper.check_pair(arguments.paper_pair)
    data = Path(arguments.data_dir)
    if not data.is_dir():
        raise ValueError(f"--data-dir: {data} is not a folder")
    return Request(
        models=arguments.models,
        data=data,
        out=Path(arguments.out),
        tasks=arguments.tasks,
        methods=CHOICES if arguments.methods is None else arguments.methods,
        limit=arguments.limit,
        preset=arguments.preset,
        alpha=arguments.alpha,
        paper_pair=arguments.paper_pair,
        grid=arguments.grid,
        answers=arguments.score == "match",
        batch_size=arguments.batch_size,
        device=arguments.device,
        dtype=arguments.dtype,
        progress=True,
    )


def _print_list() -> None:
    from kvcomm.reproduce.catalogue import EXHIBITS, NOT_MADE

    for name, exhibit in EXHIBITS.items():
        print(f"{name:<18}{exhibit.title}\n{'':<18}  runs {exhibit.runs}")
    for name, why in NOT_MADE.items():
        print(f"{name:<18}not made: {why}")


def _print_settings() -> None:
    from kvcomm.reproduce import paper

    for number, pair in paper.pairs().items():
        print(f"pair {number}: {pair['sender']} to {pair['receiver']}")
    for one in paper.settings():
        print(", ".join(f"{name} {value}" for name, value in one.items()))


def _tell(built: "Built", verdicts: "Sequence[Verdict]", paths: Sequence[Path]) -> None:
    from kvcomm.reproduce.table import text

    for table in built.tables:
        print(text(table))
    for verdict in verdicts:
        print(verdict.line)
    print("Written:", ", ".join(path.name for path in paths), flush=True)
