"""Figure 14: how alike the layers of two data sets are ranked.

Owns Kendall's tau-b of the attention mass, and its interval over the calibration records.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvcomm import statistics
from kvcomm.reproduce import tables
from kvcomm.reproduce.claims import Judged, Verdict, judge
from kvcomm.reproduce.exhibit import HEADINGS, Built, Exhibit
from kvcomm.reproduce.runs import Runs
from kvcomm.reproduce.table import Cell, Table
from kvcomm.selection import SEED
from kvcomm.statistics import Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Calibration records of each data set.
RECORDS = 16

#: Resamples of these records for an interval.
RESAMPLES = 500

#: The lower end of the paper's colour scale.
ALIKE = 0.7


def kendall(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    """Kendall's tau-b along the last axis of [..., L]; NaN where all values of one are equal."""

    def signs(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.sign(values[..., :, None] - values[..., None, :])

    one, two = signs(first), signs(second)
    top = (one * two).sum(axis=(-2, -1))
    bottom = np.sqrt((one**2).sum(axis=(-2, -1)) * (two**2).sum(axis=(-2, -1)))
    with np.errstate(invalid="ignore"):
        return top / bottom


def likeness(first: NDArray[np.float64], second: NDArray[np.float64]) -> Interval:
    """Tau of two calibrations, mass [n, L] each, with an interval over their records."""
    value = float(kendall(first.mean(axis=0), second.mean(axis=0)))
    n = min(len(first), len(second))
    if n < 2:
        return Interval(value, float("nan"), float("nan"), n)
    spread = kendall(_resampled(first, SEED), _resampled(second, SEED + 1))
    return statistics.interval(value, spread, n)


def _resampled(mass: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    rows = np.concatenate(list(statistics.draws(len(mass), RESAMPLES, seed)))
    return mass[rows].mean(axis=1)


def build(runs: Runs, exhibit: Exhibit) -> Built:
    """The map of tau between all data sets."""
    mass = {}
    for found in runs.chosen(exhibit):
        scores = runs.scores(found, min(RECORDS, len(found.pool)))
        mass[found.task.name] = scores.sample_mass.mean(axis=2)
    names = tuple(mass)
    taus = {
        (first, second): likeness(mass[first], mass[second])
        for first in names
        for second in names
        if first != second
    }
    counts = ", ".join(f"{name} {len(rows)}" for name, rows in mass.items())
    title = (
        f"Figure 14. {exhibit.title}: Kendall's tau-b of the attention mass per layer. "
        f"{tables.models(runs)}; preset {runs.request.preset}."
    )
    notes = (
        f"calibration records: {counts}.",
        "Ranges: 95% bootstrap intervals over these records; the paper printed no numbers.",
    )
    cells = {place: Cell(tau) for place, tau in taus.items()}
    table = Table(title, "kendall tau", "task", names, names, cells, notes, headings=HEADINGS)

    def draw() -> "Figure":
        from kvcomm.reproduce.figures import Heat
        from kvcomm.reproduce.figures import draw as drawn

        shown = tuple(HEADINGS.get(name, name) for name in names)
        values = tuple(tuple(1.0 if a == b else taus[a, b].value for b in names) for a in names)
        heat = Heat("layers by attention", "", "", shown, shown, values, "Kendall's tau-b")
        return drawn([heat], f"Figure 14. {exhibit.title}", f"{tables.models(runs)}; {notes[0]}")

    return Built((table,), (), draw, _verdicts(taus, names))


def _verdicts(taus: dict[tuple[str, str], Interval], names: Sequence[str]) -> tuple[Verdict, ...]:
    verdicts = []
    if taus:
        least = min(taus.values(), key=lambda tau: tau.value)
        verdicts.append(_verdict("rankings-alike", "all data sets rank layers alike", least))
    if {"hotpotqa", "musique"} <= set(names):
        tau = taus["hotpotqa", "musique"]
        verdicts.append(_verdict("two-hop-alike", "HotpotQA and MuSiQue rank layers alike", tau))
    return tuple(verdicts)


def _verdict(name: str, claim: str, tau: Interval) -> Verdict:
    judged: Judged = judge(tau, ALIKE, "Kendall's tau", sign="")
    return Verdict(name, f"{claim} (tau above {ALIKE})", (judged,))
