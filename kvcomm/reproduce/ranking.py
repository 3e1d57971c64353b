"""Figure 14: how alike the layers of two data sets are ranked.

Owns Kendall's tau-b of the attention mass, and its interval over the calibration records.
"""

from collections.abc import Mapping
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvcomm import statistics
from kvcomm.layout import counted
from kvcomm.reproduce import tables
from kvcomm.reproduce.exhibit import HEADINGS, Built, Exhibit, heading
from kvcomm.reproduce.runs import Runs
from kvcomm.reproduce.table import Cell, Table
from kvcomm.reproduce.verdict import (
    FAILS,
    UNTOLD,
    Judged,
    Verdict,
    enough,
    judge,
    verdict_of,
    written,
)
from kvcomm.selection import SEED
from kvcomm.statistics import Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Calibration records of each data set.
RECORDS = 16

#: The lower end of the paper's colour scale, which all of its pairs of data sets are on.
ALIKE = 0.7

MEASURE = "Kendall's tau"

Mass = NDArray[np.float64]
Pair = tuple[str, str]


def kendall(first: Mass, second: Mass) -> Mass:
    """Kendall's tau-b along the last axis of [..., L]; NaN where all values of one are equal."""

    def signs(values: Mass) -> Mass:
        above, below = np.triu_indices(values.shape[-1], 1)
        return np.sign(values[..., above] - values[..., below])

    one, two = signs(first), signs(second)
    bottom = np.sqrt((one**2).sum(axis=-1) * (two**2).sum(axis=-1))
    with np.errstate(invalid="ignore"):
        return (one * two).sum(axis=-1) / bottom


def likeness(first: Mass, second: Mass, level: float = 0.95) -> Interval:
    """Tau of two calibrations, mass [n, L] each, with an interval over their records."""
    value = float(kendall(first.mean(axis=0), second.mean(axis=0)))
    n = min(len(first), len(second))
    if n < 2:
        return Interval(value, float("nan"), float("nan"), n)
    spread = kendall(_resampled(first, SEED), _resampled(second, SEED + 1))
    return statistics.interval(value, spread, n, level)


def _resampled(mass: Mass, seed: int) -> Mass:
    blocks = [mass[rows].mean(axis=1) for rows in statistics.draws(len(mass), seed=seed)]
    return np.concatenate(blocks)


def build(runs: Runs, exhibit: Exhibit) -> Built:
    """The map of tau between all data sets."""
    mass, sources = {}, {}
    for found in runs.chosen(exhibit):
        scores = runs.scores(found, min(RECORDS, len(found.pool)))
        mass[found.task.name] = scores.sample_mass.mean(axis=2)
        used = found.pool[: scores.n_samples]
        sources[found.task.name] = found.sources(one.id for one in used)
    names = tuple(mass)
    taus = {pair: likeness(*(mass[name] for name in pair)) for pair in combinations(names, 2)}
    counts = ", ".join(f"{heading(name)} {len(rows)}" for name, rows in mass.items())
    about = f"{tables.models(runs)}; {tables.preset(runs)}"
    title = (
        f"{exhibit.label}. {exhibit.title}: Kendall's tau-b of the attention mass per layer. "
        f"{about}."
    )
    notes = (
        f"calibration records: {counts}.",
        "Ranges: 95% bootstrap intervals over these records; the paper printed no numbers.",
    )
    cells = {place: Cell(tau) for pair, tau in taus.items() for place in (pair, pair[::-1])}
    table = Table(
        title, "kendall tau", "task", names, names, cells, sources, notes, headings=HEADINGS
    )

    def draw() -> "Figure":
        from kvcomm.plots import n_range
        from kvcomm.reproduce import figures

        shown = tuple(map(heading, names))
        values = tuple(
            tuple(1.0 if a == b else cells[a, b].measured.value for b in names) for a in names
        )
        heat = figures.Heat(
            f"layers by attention, {n_range(tau.n for tau in taus.values())} calibration records\n"
            f"{figures.widest(taus.values())}",
            "data set", "data set", shown, shown, values, "Kendall's tau-b, -1 to 1",
        )  # fmt: skip
        return figures.draw([heat], f"{exhibit.label}. {exhibit.title}", f"{about}; {notes[0]}")

    return Built((table,), (), draw, _verdicts(mass, taus))


def _verdicts(mass: Mapping[str, Mass], taus: Mapping[Pair, Interval]) -> tuple[Verdict, ...]:
    found = {}
    if taus:
        found["rankings-alike", "all data sets rank layers alike"] = all_alike(mass, taus)
    two_hop = [tau for pair, tau in taus.items() if set(pair) == {"hotpotqa", "musique"}]
    for tau in two_hop:
        judged = judge(tau, ALIKE, MEASURE, sign="")
        found["two-hop-alike", "HotpotQA and MuSiQue rank layers alike"] = judged
    return tuple(
        Verdict(name, f"{claim} (tau above {ALIKE})", (judged,))
        for (name, claim), judged in found.items()
    )


def all_alike(mass: Mapping[str, Mass], taus: Mapping[Pair, Interval]) -> Judged:
    """Whether every pair is alike, as on the paper's scale, which has all of them.

    Holds when every pair's interval is above `ALIKE`. Of many pairs one is easily low by chance, so
    one below counts only when its interval is below at a level that allows for their number
    (Bonferroni's). Told is the pair that decides.
    """
    low = {
        pair: likeness(*(mass[name] for name in pair), level=1 - 0.05 / len(taus))
        for pair, tau in taus.items()
        if verdict_of(tau, ALIKE) == FAILS
    }
    untold = {pair: tau for pair, tau in taus.items() if verdict_of(tau, ALIKE) == UNTOLD}
    pair, least = min((low or untold or taus).items(), key=lambda item: item[1].value)
    verdict = verdict_of(least, ALIKE)
    about = f", {' and '.join(map(heading, pair))}, of {counted(len(taus), 'pair')}"
    why = written(least, ALIKE, about, sign="")
    if verdict == UNTOLD:
        why += f"; {enough(least, ALIKE)}"
    return Judged(MEASURE, verdict, least, why)
