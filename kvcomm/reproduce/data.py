"""The records of a reproduction: which are scored, and which may calibrate.

Owns finding and reading a task's files, and the pool of records to calibrate on. One division of
the records holds for all exhibits, so that any two runs of a task can be compared record by record.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvcomm.plan import Plan, TooFewError, divide
from kvcomm.tasks import Example, Task
from kvcomm.tasks.example import prefixes

#: Calibration may take this share of the scored records, when there are too few others; the runs
#: that do so score the rest.
BORROWED = 1 / 3


@dataclass(frozen=True)
class Data:
    """One task's records.

    files: all that were read. file_of: the name of the file of each record, by id. plan: one
    calibration record, and the scored ones. pool: records that may calibrate, in the order in which
    they are taken: the plan's, then those that are not scored, then some of the last scored ones;
    all in the order of the file where published. spare: the same without the plan's. published:
    calibration records are scored too.
    """

    task: Task
    files: tuple[Path, ...]
    file_of: Mapping[str, str]
    plan: Plan
    pool: tuple[Example, ...]
    spare: tuple[Example, ...]
    published: bool

    def sources(self, ids: Iterable[str]) -> tuple[str, ...]:
        """Names of the files that some records are from, in the order of the files."""
        found = {self.file_of[one] for one in ids}
        return tuple(name for name in dict.fromkeys(self.file_of.values()) if name in found)

    def apart(self) -> "Data":
        """The same, but that no record that calibrates is scored in the published protocol
        either."""
        return replace(self, pool=self.spare, published=False) if self.published else self

    def divided(self, n_calibration: int, keep: Callable[[Example], bool] | None = None) -> Plan:
        """A plan with so many calibration records, or as many as there are.

        keep: which records it is for, scored ones and others.

        Raises
        ------
        TooFewError
            No record is left to score, or none to calibrate on.
        """
        usable = [one for one in self.pool if keep is None or keep(one)]
        calibration = tuple(usable[:n_calibration])
        taken = set() if self.published else {(one.context, one.question) for one in calibration}
        scored = tuple(
            one
            for one in self.plan.scored
            if (one.context, one.question) not in taken and (keep is None or keep(one))
        )
        if not scored or len(calibration) < min(1, n_calibration):
            what = "calibrate on" if scored else "score"
            of = len(self.pool if scored else self.plan.scored)
            raise TooFewError(f"{self.task.name}: no record is left to {what}, of {of}")
        return Plan(calibration, scored, self.plan.excluded, self.published)


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
    file_of = _file_of(files, examples)
    plan = divide(examples, n_calibration=1, limit=limit, published=published)
    first = [*plan.calibration, *plan.scored]
    taken = {(one.context, one.question) for one in first}
    spare = [one for one in examples if (one.context, one.question) not in taken]
    borrowed = plan.scored[::-1][: int(BORROWED * len(plan.scored))]
    others = (*spare, *borrowed)
    pool = tuple(examples) if published else (*plan.calibration, *others)
    return Data(task, files, file_of, plan, pool, others, published)


def _file_of(files: tuple[Path, ...], examples: list[Example]) -> dict[str, str]:
    """The file's name by the record's id, which begins with it where there are several."""
    known = list(zip(prefixes([str(path) for path in files]), files, strict=True))
    return {
        one.id: next(path.name for prefix, path in known if one.id.startswith(prefix))
        for one in examples
    }
