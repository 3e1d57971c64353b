"""`kvcomm demo`: the shipped questions with and without kvcomm, random layers as a control.

The first records of the shipped file calibrate, the others are scored. Owns only this choice; the
run is evaluate.py's and the report report.py's.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcomm import report, tasks
from kvcomm.agents import Receiver, Sender
from kvcomm.evaluate import evaluate
from kvcomm.methods import Options, methods
from kvcomm.model import Model
from kvcomm.plan import divide
from kvcomm.records import RECORDS, locked
from kvcomm.runs import CALIBRATION, RUN, SUMMARY, read_run, read_settings

DATA = f"shipped questions, {tasks.SHIPPED.name}"
N_CALIBRATION = 8
BATCH_SIZE = 20
TITLE = "kvcomm: answers from another model's KV cache"
OPTIONS = Options(ratios=("0.3", "0.5", "0.7"), strategies=("attention_gaussian", "random", "all"))


def run(
    model_name: str,
    out: Path,
    *,
    limit: int | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> tuple[dict[str, Any], Path]:
    """Run the demo; returns its summary and the path of the HTML report.

    A demo that was interrupted in `out` goes on; a finished one there is made anew.

    Raises
    ------
    ValueError
        `out` holds another run.
    """
    task = tasks.find("hotpotqa")
    examples = task.load(tasks.SHIPPED)
    plan = divide(examples, n_calibration=N_CALIBRATION, limit=limit)
    note(f"loading {model_name} (fetched and converted once, then cached)")
    model = Model.load(model_name, progress=sys.stderr.isatty())
    note(
        f"{len(plan.scored)} questions; layers are chosen on {len(plan.calibration)} others; "
        f"{model.n_layers} layers"
    )
    _clear(out)
    summary = evaluate(
        Sender(model),
        Receiver(model),
        task,
        plan,
        methods(("baseline", "skyline", "kvcomm"), OPTIONS),
        out,
        batch_size=BATCH_SIZE,
        about={"data": DATA, "context": "gold"},
        command=("kvcomm", "demo", "--model", model_name)
        + (() if limit is None else ("--limit", str(limit))),
        progress=True,
        note=note,
    )
    return summary, report.write_report(summary, out, TITLE, read_run(out)[1])


def _clear(out: Path) -> None:
    """Take a finished demo out of a folder."""
    if not (out / SUMMARY).exists():
        return
    with locked(out):
        if read_settings(out)["settings"].get("data") != DATA:
            raise ValueError(f"{out} holds another run: take another folder")
        for name in (SUMMARY, RUN, RECORDS, CALIBRATION):
            (out / name).unlink(missing_ok=True)
