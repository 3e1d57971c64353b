"""The records of a reproduction: which are scored, and which may calibrate.

Owns finding and reading a task's files, and the pool of records to calibrate on. One division of
the records holds for all exhibits, so that any two runs of a task can be compared record by record.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvcomm.plan import Plan, divide
from kvcomm.tasks import Example, Task

#: Calibration may take this share of the scored records, when there are too few others; the runs
#: that do so score the rest.
BORROWED = 1 / 3


@dataclass(frozen=True)
class Data:
    """One task's records.

    files: that they come from. plan: one calibration record, and the scored ones. pool: records
    that may calibrate, in the order in which they are taken: the plan's, then those that are not
    scored, then some of the last scored ones. published: calibration records are scored too.
    """

    task: Task
    files: tuple[Path, ...]
    plan: Plan
    pool: tuple[Example, ...]
    published: bool

    def divided(
        self,
        n_calibration: int,
        keep: Callable[[Example], bool] | None = None,
        *,
        unseen: bool = False,
    ) -> Plan:
        """A plan with so many calibration records, or as many as there are.

        keep: which records it is for, scored ones and others. unseen: those that calibrate are not
        scored in the published protocol either.

        Raises
        ------
        ValueError
            No record is left to score.
        """
        usable = [one for one in self.pool if keep is None or keep(one)]
        calibration = tuple(usable[:n_calibration])
        published = self.published and not unseen
        taken = set() if published else {(one.context, one.question) for one in calibration}
        scored = tuple(
            one
            for one in self.plan.scored
            if (one.context, one.question) not in taken and (keep is None or keep(one))
        )
        if not scored:
            raise ValueError(
                f"{self.task.name}: no record is left to score, of {len(self.plan.scored)}"
            )
        return Plan(calibration, scored, self.plan.excluded, published)


def read(task: Task, folder: Path, limit: int | None, published: bool) -> Data | None:
    """A task's records below a folder; None when no file is there.

    Raises
    ------
    OSError, FormatError, ValueError
        As `Task.load` and `plan.divide`.
    """
    try:
        files = task.find_files(folder)
    except FileNotFoundError:
        return None
    examples = task.load(files)
    plan = divide(examples, n_calibration=1, limit=limit, published=published)
    if published:
        return Data(task, files, plan, tuple(examples), published)
    first = [*plan.calibration, *plan.scored]
    taken = {(one.context, one.question) for one in first}
    spare = [one for one in examples if (one.context, one.question) not in taken]
    borrowed = plan.scored[::-1][: int(BORROWED * len(plan.scored))]
    return Data(task, files, plan, (*plan.calibration, *spare, *borrowed), published)
