"""`kvcomm score`: score a run's log again, or compare two of its methods, without running a model.

Owns judging recorded answers anew and the paired table of two methods. What a score is, is
metrics.py's; summary and report are made as `kvcomm report` makes them.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcomm.commands.report import remade
from kvcomm.options.output import show_run

if TYPE_CHECKING:
    from kvcomm.records import Record
    from kvcomm.statistics import Interval
    from kvcomm.tasks import Task

HELP = "score a run's log again, or compare two of its methods record by record"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("folder", metavar="DIR", help="the folder of the run")
    parser.add_argument(
        "--compare", nargs=2, metavar=("A", "B"),
        help="only print how method A differs from method B on the records that both answered: "
        "labels, as in the table",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(arguments: argparse.Namespace) -> int:
    """Score again, or compare; the status says whether records of the run had failed.

    Raises
    ------
    ValueError
        A label that the run does not have, or two methods without a record in common.
    FormatError
        run.json or the log is damaged; nothing is written.
    OSError
        There is no run in the folder, it cannot be written, or another run is writing there.
    """
    folder = Path(arguments.folder)
    if arguments.compare is not None:
        return _compare(folder, *arguments.compare, as_json=arguments.json)
    n_values, n_lines = rescore(folder)
    status = show_run(*remade(folder), arguments)
    words = "value differs" if n_values == 1 else "values differ"
    told = f"{n_values} {words} from the log, of {n_lines} answers scored again"
    print(told, file=sys.stderr if arguments.json else sys.stdout)
    return status


# ---- scoring again -------------------------------------------------------------------------


def rescore(folder: Path) -> tuple[int, int]:
    """Judge every answer of a log anew and write the log again, whole or not at all.

    Accuracy needs the choices; a line that does not hold them keeps what it has. A run that asked
    for no answers stays as it is.

    Returns
    -------
    n_values, n_lines
        How many values are other than they were, those that the log lacked included, and how many
        answers were judged.

    Raises
    ------
    FormatError, OSError
        As in `run`.
    """
    from kvcomm import runs, tasks
    from kvcomm.packet import write_whole
    from kvcomm.records import RECORDS, dumps, locked, read_log

    settings = runs.read_settings(folder)["settings"]
    task = tasks.find(settings.get("task"))
    if settings.get("max_new_tokens") == 0:
        return 0, 0
    path = folder / RECORDS
    with locked(folder):
        old = read_log(path)
        new = [_judge(path, number, line, task) for number, line in enumerate(old, 1)]
        if new != old:
            write_whole(path, b"".join(f"{dumps(line)}\n".encode() for line in new))
    return sum(map(_differences, old, new)), sum("error" not in line for line in old)


def _judge(path: Path, number: int, line: "Record", task: "Task") -> "Record":
    from kvcomm import metrics
    from kvcomm.errors import FormatError

    if "error" in line:
        return {**line, **{name: line.get(name) for name in metrics.NAMES}}
    try:
        stripped = metrics.strip_reasoning(
            line["answer"], opened=bool(line.get("reasoning_opened"))
        )
        choices = line.get("choices") or ()
        score = metrics.score(stripped.text, line["gold"], closed=task.closed, choices=choices)
    except KeyError as error:
        raise FormatError(f"{path} record {number}: no field {error}") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise FormatError(f"{path} record {number}: not an answer with its gold, {error}") from None
    judged = {name: getattr(score, name) for name in metrics.NAMES}
    if not choices:
        judged["accuracy"] = line.get("accuracy")
    marked = {name: value for name, value in line.items() if name != "reasoning_cut_off"}
    return {**marked, **judged, **({"reasoning_cut_off": True} if stripped.cut_off else {})}


def _differences(old: "Record", new: "Record") -> int:
    from kvcomm import metrics

    if "error" in old:
        return 0
    return sum(
        name not in old or old[name] != new[name]
        for name in metrics.NAMES
        if name in old or new[name] is not None
    )


# ---- comparing -----------------------------------------------------------------------------


def _compare(folder: Path, first: str, second: str, *, as_json: bool) -> int:
    from kvcomm.records import dumps
    from kvcomm.runs import read_run

    settings, lines = read_run(folder)
    found = compare(settings, lines, first, second)
    if as_json:
        print(dumps({"first": first, "second": second, "differences": found}, indent=1))
        return 0
    width = max(map(len, found))
    print(f"{first} minus {second}, on the records that both answered (nll: less is better)\n")
    print(f"{'':<{width}}  {'first':>8}  {'second':>8}  {'difference':>10}  95% interval         n")
    for name, row in found.items():
        gap: Mapping[str, Any] = row["difference"]
        ends = f"{gap['low']:+.3f} .. {gap['high']:+.3f}"
        print(
            f"{name:<{width}}  {row['first']:>8.3f}  {row['second']:>8.3f}  "
            f"{gap['value']:>+10.3f}  {ends:<18} {gap['n']:>3}"
        )
    return 0


def compare(
    settings: Mapping[str, Any], lines: "Sequence[Record]", first: str, second: str
) -> dict[str, dict[str, Any]]:
    """How two methods of a run differ, by the paired bootstrap (`statistics.difference`).

    Parameters
    ----------
    settings, lines
        From `runs.read_run`.
    first, second
        Labels of methods of the run.

    Returns
    -------
    dict
        Per metric that both have, and "nll": the means "first" and "second", and the "difference"
        first - second as {value, low, high, n} with the ends of its 95% interval.

    Raises
    ------
    ValueError
        A label that the run does not have, or no record in common.
    """
    from kvcomm import metrics, statistics

    left, right = (_answered(settings, lines, label) for label in (first, second))
    seed = settings["settings"]["seed"]
    found: dict[str, dict[str, Any]] = {}
    for name in (*metrics.NAMES, "nll"):
        pairs = [
            (one[name], right[key][name])
            for key, one in left.items()
            if key in right and one[name] is not None and right[key][name] is not None
        ]
        if not pairs:
            continue
        mine, other = zip(*pairs, strict=True)
        gap: Interval = statistics.difference(mine, other, seed=seed)
        found[name] = {
            "first": sum(mine) / len(pairs),
            "second": sum(other) / len(pairs),
            "difference": asdict(gap),
        }
    if not found:
        raise ValueError(f"{first} and {second} have no record in common")
    return found


def _answered(
    settings: Mapping[str, Any], lines: "Sequence[Record]", label: str
) -> "dict[str, Record]":
    """The lines of a method that did not fail, by the id of their record."""
    from kvcomm.summary import variant

    methods = {method["label"]: method for method in settings["methods"]}
    if label not in methods:
        raise ValueError(f"method: {label!r} is not in the run, expected {', '.join(methods)}")
    method = methods[label]
    return {
        line["id"]: line
        for line in lines
        if "error" not in line
        and line["method"] == method["method"]
        and variant(line["settings"]) == method["settings"]
    }
