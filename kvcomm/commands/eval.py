"""`kvcomm eval`: methods on a data set."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcomm.options.choice import add_layers, add_methods, options_of
from kvcomm.options.data import add_amount, add_data
from kvcomm.options.output import add_json, run_title, say, show_run
from kvcomm.options.pair import add_models, layer_map_of, load_pair, load_scores
from kvcomm.options.values import path

if TYPE_CHECKING:
    from kvcomm.plan import Plan
    from kvcomm.selection import LayerScores
    from kvcomm.tasks import Task

HELP = "compare methods on a data set, and report"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_models(parser)
    add_data(parser)
    add_methods(parser)
    add_layers(parser, several=True)
    parser.add_argument(
        "--calibration", metavar="FILE",
        help="records to calibrate on (default: the first of the data, which are then not scored)",
    )  # fmt: skip
    parser.add_argument(
        "--calibration-size",
        type=int,
        metavar="N",
        help="how many (default 1; with strategy search as many as it goes by)",
    )
    parser.add_argument(
        "--scores-of", metavar="TASK",
        help="with --scores: the other task that they were made on (default: the run's own)",
    )  # fmt: skip
    parser.add_argument(
        "--published-protocol", action="store_true",
        help="with --preset reference: calibrate on the first records of the data and score them "
        "too, as the published code does; with --online count also the answer that calibrates",
    )  # fmt: skip
    add_amount(parser)
    parser.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="of an answer (default: the task's)"
    )
    parser.add_argument(
        "--max-input-tokens", type=int, metavar="N",
        help="of a prompt; longer ones lose their middle (default 64000, or the model's)",
    )  # fmt: skip
    parser.add_argument(
        "--agreement", action="store_true",
        help="also compare every method with skyline's own answer, token by token: the share of "
        "tokens ranked first, and the KL divergence",
    )  # fmt: skip
    parser.add_argument(
        "--think", action=argparse.BooleanOptionalAction, default=None,
        help="the models think before they answer: prompts as published for such (default: what "
        "their names say)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=path, required=True, metavar="DIR",
        help="the run's folder; the same command again goes on where it stopped",
    )  # fmt: skip
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run it, and print its table."""
    from kvcomm import report, tasks
    from kvcomm.evaluate import evaluate
    from kvcomm.methods import methods
    from kvcomm.runs import read_run

    task = tasks.find(arguments.task)
    _check_options(arguments, task)
    chosen = methods(arguments.methods, options_of(arguments))
    measured = any(method.calibrated for method in chosen) and arguments.scores is None
    plan = _plan(arguments, task, measured=measured)
    sender, receiver = load_pair(arguments, arguments.preset)
    scores = load_scores(arguments, sender, receiver)
    if scores is not None:
        _check_task(scores, task, arguments)
    out = Path(arguments.out)
    summary = evaluate(
        sender,
        receiver,
        task,
        plan,
        chosen,
        out,
        preset=arguments.preset,
        layer_map=layer_map_of(arguments, sender, receiver),
        scores=scores,
        max_new_tokens=arguments.max_new_tokens,
        max_input_tokens=arguments.max_input_tokens,
        batch_size=arguments.batch_size,
        seed=arguments.seed,
        think=arguments.think,
        agreement=arguments.agreement,
        about=_about(arguments, task, plan, measured=measured),
        command=("kvcomm", *arguments.argv),
        progress=True,
        note=say,
    )
    written = report.write_report(summary, out, run_title(summary), read_run(out)[1])
    return show_run(summary, written, arguments)


def _check_options(arguments: argparse.Namespace, task: "Task") -> None:
    """Refuse options that go with others, or with other tasks, only."""
    if arguments.published_protocol and (
        arguments.preset != "reference" or arguments.calibration is not None
    ):
        raise ValueError(
            "--published-protocol goes with --preset reference and without --calibration"
        )
    if arguments.scores_of is not None and arguments.scores is None:
        raise ValueError("--scores-of goes with --scores")
    if arguments.max_input_tokens is not None and not task.truncates:
        raise ValueError(f"--max-input-tokens: prompts of task {task.name!r} are never cut")


def _plan(arguments: argparse.Namespace, task: "Task", *, measured: bool) -> "Plan":
    """Which records do what; measured: some are calibrated on."""
    from kvcomm.plan import divide

    examples = task.load(arguments.data, arguments.context)
    other = None
    if arguments.calibration is not None:
        other = task.load(arguments.calibration, arguments.context)
    n_searched = arguments.search_records if "search" in (arguments.strategy or ()) else 0
    n_calibration = n_searched or int(measured)
    if not n_calibration:
        for option in ("calibration", "calibration_size"):
            if getattr(arguments, option) is not None:
                name = option.replace("_", "-")
                raise ValueError(f"--{name}: no method of this run calibrates on records")
    elif arguments.calibration_size is not None:
        n_calibration = arguments.calibration_size
        if n_calibration < n_searched:
            raise ValueError(
                f"--calibration-size: {n_calibration}, and strategy 'search' goes by {n_searched} "
                "(--search-records); all strategies of a run calibrate on the same records"
            )
    return divide(
        examples,
        calibration=other,
        n_calibration=n_calibration,
        limit=arguments.limit,
        published=arguments.published_protocol,
        senders=arguments.senders,
    )


def _about(
    arguments: argparse.Namespace, task: "Task", plan: "Plan", *, measured: bool
) -> dict[str, Any]:
    """Where the data of the run is from, for its settings."""
    asked = arguments.context or task.contexts[0]
    contexts = {asked if one.marked else "full" for one in plan.scored}
    scores = arguments.scores
    given = Path(scores).name if scores else scores
    about = {
        "data": _names(arguments.data, task),
        "context": " and ".join(sorted(contexts)),
        "calibration_data": _names(arguments.calibration or arguments.data, task)
        if measured
        else given,
    }
    if arguments.scores_of is not None:
        about["scores_of"] = arguments.scores_of
    return about


def _names(data: str, task: "Task") -> str:
    """The names of data files, a folder's by the task; what is no path is a set on the hub."""
    place = Path(data)
    if place.is_dir():
        return ", ".join(file.name for file in task.find_files(place))
    return place.name if place.exists() else data


def _check_task(scores: "LayerScores", task: "Task", arguments: argparse.Namespace) -> None:
    """Refuse scores of another task than is asked for; older files do not say whose they are."""
    from kvcomm.errors import MismatchError

    wanted = arguments.scores_of or task.name
    if scores.task in (None, wanted):
        if wanted != task.name:
            say(f"layers for {task.name} are chosen by scores of {wanted}")
        return
    takes = "" if arguments.scores_of else f" (--scores-of {scores.task} takes them all the same)"
    raise MismatchError(
        f"{arguments.scores}: made on task {scores.task!r}, expected {wanted!r}{takes}"
    )
