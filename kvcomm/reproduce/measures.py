"""Values and 95% intervals out of the records of runs.

Owns the published metric of a task, `recovered` across runs (baseline and skyline may come from
another run of the same records) and paired differences between two rows, over one task or several.
Runs nothing and writes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvcomm import metrics, statistics
from kvcomm.records import Record
from kvcomm.selection import SEED
from kvcomm.statistics import Interval
from kvcomm.tasks import Task

#: The two measures: what the paper reports (match, for most tasks), and the share of likelihood
#: that needs no answers.
PUBLISHED = "published metric"
RECOVERED = "recovered"
MEASURES = (PUBLISHED, RECOVERED)

Rows = Mapping[str, Mapping[str, Record]]


@dataclass(frozen=True)
class Results:
    """What was measured on one data set: per row its records, by id.

    `rows` has "baseline" and "skyline" where they were run. metric: the published one; None when no
    answers were generated. files: names of the data files that the records are from.
    """

    task: Task
    rows: Rows
    metric: str | None
    files: tuple[str, ...]

    @property
    def failed(self) -> dict[str, list[str]]:
        """Errors of failed records by row, where there are some."""
        errors = {
            row: [str(one["error"]) for one in found.values() if "error" in one]
            for row, found in self.rows.items()
        }
        return {row: found for row, found in errors.items() if found}

    @property
    def notes_of_failed(self) -> list[str]:
        """What to say of them below a table."""
        return [
            f"failed and left out: {len(errors)} of {row} on {self.task.name} ({errors[0]})."
            for row, errors in self.failed.items()
        ]

    def values(self, row: str, field: str) -> dict[str, float]:
        """A field of every record of a row that has one, by id."""
        return {
            name: float(record[field])
            for name, record in self.rows.get(row, {}).items()
            if "error" not in record and record.get(field) is not None
        }

    def measured(self, row: str, measure: str) -> Interval | None:
        """A row by one of `MEASURES`; None when there are no records for it."""
        if measure == RECOVERED:
            return self._recovered(row)
        if self.metric is None:
            return None
        values = list(self.values(row, self.metric).values())
        return statistics.mean(values, seed=SEED) if values else None

    def room(self, measure: str) -> Interval | None:
        """How much better skyline is than baseline: by the metric, or in nats per record."""
        field = "nll" if measure == RECOVERED else self.metric
        if field is None:
            return None
        below, above = self.values("baseline", field), self.values("skyline", field)
        ids = [name for name in below if name in above]
        if not ids:
            return None
        low, high = [below[i] for i in ids], [above[i] for i in ids]
        first, second = (low, high) if measure == RECOVERED else (high, low)
        return statistics.difference(first, second, seed=SEED)

    def helps(self, measure: str) -> bool:
        """Whether reading the context clearly helps: the whole interval of `room` is above 0.

        Where a task has no context to read, skyline is the baseline: the metric is judged
        nevertheless, and no share of the nothing between the two.
        """
        if not self.task.needs_context:
            return measure == PUBLISHED
        found = self.room(measure)
        return found is not None and found.low > 0

    def _recovered(self, row: str) -> Interval | None:
        below, own, above = (self.values(one, "nll") for one in ("baseline", row, "skyline"))
        ids = [name for name in own if name in below and name in above]
        if not ids:
            return None
        columns = ([part[name] for name in ids] for part in (below, own, above))
        return metrics.recovered(*columns, seed=SEED)


@dataclass(frozen=True)
class Advantage:
    """How much more one row has than another, mean over tasks, each task with equal weight."""

    interval: Interval
    tasks: tuple[str, ...]


def advantage(
    results: Sequence[Results], first: str, second: str, measure: str
) -> Advantage | None:
    """first - second in a measure, record by record, over all tasks that have both.

    The interval is a paired bootstrap over the records of each task. A task where reading the
    context does not clearly help the skyline (`Results.room`) tells no message from another, and is
    left out. None when no task is left that has both.
    """
    parts: list[tuple[str, float, np.ndarray, int]] = []
    for place, one in enumerate(results):
        found = _difference(one, first, second, measure, seed=SEED + place)
        if found is not None:
            parts.append((one.task.name, *found))
    if not parts:
        return None
    value = float(np.mean([part[1] for part in parts]))
    spread = np.mean([part[2] for part in parts], axis=0)
    n = sum(part[3] for part in parts)
    return Advantage(statistics.interval(value, spread, n), tuple(part[0] for part in parts))


def _difference(
    results: Results, first: str, second: str, measure: str, seed: int
) -> tuple[float, np.ndarray, int] | None:
    """Value, its resamples and the number of records."""
    field = "nll" if measure == RECOVERED else results.metric
    if field is None:
        return None
    one, two = results.values(first, field), results.values(second, field)
    below, above = results.values("baseline", "nll"), results.values("skyline", "nll")
    ids = [name for name in one if name in two]
    if measure == RECOVERED:
        ids = [name for name in ids if name in below and name in above]
    if not ids or not results.helps(measure):
        return None
    gain = np.array([one[name] - two[name] for name in ids])
    if measure != RECOVERED:
        return float(gain.mean()), _resampled(gain, seed), len(ids)
    room = np.array([below[name] - above[name] for name in ids])
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = _resampled(-gain, seed) / _resampled(room, seed)
    return float(-gain.sum() / room.sum()), spread, len(ids)


def _resampled(values: np.ndarray, seed: int) -> np.ndarray:
    """Means of resamples, [n_resamples]; the same seed draws the same records."""
    blocks = [values[rows].mean(axis=1) for rows in statistics.draws(len(values), seed=seed)]
    return np.concatenate(blocks)
