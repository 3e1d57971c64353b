"""What is shown on standard error while something runs: bars, and the score so far.

Owns no text that stays: what a run found is in its log and its summary.
"""

import sys
from collections.abc import Mapping, Sequence

from tqdm import tqdm

from kvcomm.records import Record
from kvcomm.summary import row_key


def on_terminal() -> bool:
    """Whether somebody may be watching."""
    return sys.stderr.isatty()


def bar(total: int, unit: str, *, shown: bool, done: int = 0, what: str | None = None) -> tqdm:
    """A bar over so many units, of which some are done; on a file it writes a line now and then."""
    return tqdm(
        total=total,
        initial=done,
        disable=not shown,
        desc=what,
        unit=unit,
        mininterval=0.5 if on_terminal() else 10.0,
        dynamic_ncols=True,
    )


class Running:
    """The score so far of the method that answered last, for the bar of a run.

    labels: of the methods, by the key of their lines. metric: the data set's.
    """

    def __init__(self, labels: Mapping[str, str], metric: str, records: Sequence[Record]) -> None:
        self._labels, self._metric = labels, metric
        self._nll: dict[str, dict[str, float]] = {label: {} for label in labels.values()}
        self._scores: dict[str, list[float]] = {label: [] for label in labels.values()}
        for record in records:
            self.add(record)

    def add(self, record: Record) -> str:
        """Count a record; returns the line to show."""
        label = self._labels[row_key(record["method"], record["settings"])]
        nll, scores = self._nll[label], self._scores[label]
        if "error" not in record:
            scores += [record[self._metric]] if record[self._metric] is not None else []
            if record["nll"] is not None:
                nll[record["id"]] = record["nll"]
        if not nll:
            return f"{label}: nothing done"
        share = self._recovered(nll)
        said = f"{self._metric} {sum(scores) / len(scores):.2f}, " if scores else ""
        return f"{label}: {said}nll {sum(nll.values()) / len(nll):.1f}" + (
            "" if share is None else f", recovered {share:.2f}"
        )

    def _recovered(self, nll: Mapping[str, float]) -> float | None:
        baseline, skyline = self._nll.get("baseline", {}), self._nll.get("skyline", {})
        ids = nll.keys() & baseline.keys() & skyline.keys()
        below, mine, above = (sum(values[i] for i in ids) for values in (baseline, nll, skyline))
        return None if below == above else (below - mine) / (below - above)
