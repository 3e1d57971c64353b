"""Data sets: original files in, `Example` out.

Owns the types that the rest of the program sees and the table of tasks by name; one file per
data set knows its layouts, `rows.py` the file formats, `hub.py` the hub. `make.py` makes
records for users without data. Does not know models, prompts or scores.
"""

from __future__ import annotations

from pathlib import Path

from kvcomm.tasks import (
    countries,
    hotpotqa,
    mmlu,
    multifieldqa_en,
    musique,
    qasper,
    samsum,
    tipsheets,
    tmath,
    wikimqa,
)
from kvcomm.tasks.example import Example, Task

TASKS: dict[str, Task] = {
    module.TASK.name: module.TASK
    for module in (
        hotpotqa, qasper, musique, wikimqa, multifieldqa_en, countries, tipsheets, tmath, samsum,
        mmlu,
    )
}  # fmt: skip

# Two-hop questions about invented places and people, written for this project, in HotpotQA's
# original layout: the first 8 are meant for calibration, the other 40 for scoring.
SHIPPED = Path(__file__).parent.parent / "questions" / "multihop.json"

__all__ = ["SHIPPED", "TASKS", "Example", "Task", "find"]


def find(name: str) -> Task:
    """The task of that name.

    Raises
    ------
    ValueError : unknown name
    """
    if name not in TASKS:
        raise ValueError(f"task: {name!r}, expected one of {', '.join(TASKS)}")
    return TASKS[name]
