"""Bootstrap intervals of means and of paired differences.

Owns the resampling: seeded, over records, percentile intervals. The same seed and number of
records draw the same records for every method, so intervals of one table belong together.
Knows nothing of metrics or methods.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvcomm.layout import counted

#: With fewer records than this an interval over them says little.
FEW = 10

# Indices held in memory at once, so that many records need no more room than few.
BLOCK = 1 << 20


@dataclass(frozen=True)
class Interval:
    """A value and its bootstrap interval over n records."""

    value: float
    low: float
    high: float
    n: int


def draws(n: int, resamples: int = 2000, seed: int = 0) -> Iterator[np.ndarray]:
    """Records drawn with replacement, in blocks of int64 [at most resamples, n].

    All blocks together have `resamples` rows of indices 0..n-1. The same arguments give the
    same rows.

    Raises
    ------
    ValueError : n or resamples is below 1
    """
    if n < 1:
        raise ValueError(f"n: {n}, expected at least one record")
    if resamples < 1:
        raise ValueError(f"resamples: {resamples}, expected at least 1")
    rng = np.random.default_rng(seed)
    rows = max(1, BLOCK // n)
    for start in range(0, resamples, rows):
        yield rng.integers(0, n, size=(min(rows, resamples - start), n))


def interval(value: float, spread: np.ndarray, n: int, level: float = 0.95) -> Interval:
    """The percentile interval of resampled values [resamples], around the value itself."""
    if not 0.0 < level < 1.0:
        raise ValueError(f"level: {level}, expected between 0 and 1")
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(spread, (tail, 1.0 - tail))
    return Interval(value, float(low), float(high), n)


def mean(
    values: Sequence[float] | np.ndarray,
    *,
    seed: int = 0,
    resamples: int = 2000,
    level: float = 0.95,
) -> Interval:
    """The mean of per-record values [n] with its percentile bootstrap interval.

    Raises
    ------
    ValueError : no value, a value that is not finite, or a level outside (0, 1)
    """
    numbers = _finite("values", values)
    n = numbers.size
    spread = [numbers[rows].mean(axis=1) for rows in draws(n, resamples, seed)]
    return interval(float(numbers.mean()), np.concatenate(spread), n, level)


def difference(
    first: Sequence[float] | np.ndarray,
    second: Sequence[float] | np.ndarray,
    *,
    seed: int = 0,
    resamples: int = 2000,
    level: float = 0.95,
) -> Interval:
    """The paired bootstrap: the mean of first - second, record by record, with its interval.

    Both are [n], the same records in the same order. Resampling whole records keeps the pairs
    together, so what makes a record easy for both methods cancels. An interval without 0 says
    that the methods differ by more than the choice of records explains, at `level` and for this
    one comparison; over many comparisons some will by chance. Few records make a percentile
    interval too narrow: with n below about 20 take it as a hint.

    Raises
    ------
    ValueError : lengths differ, or as in `mean`
    """
    one, two = _finite("first", first), _finite("second", second)
    if one.size != two.size:
        raise ValueError(f"second: {counted(two.size, 'record')}, expected {one.size} as in first")
    return mean(one - two, seed=seed, resamples=resamples, level=level)


def _finite(name: str, values: Sequence[float] | np.ndarray) -> np.ndarray:
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1 or numbers.size == 0:
        raise ValueError(f"{name}: shape {numbers.shape}, expected (n,) with at least one record")
    if not np.isfinite(numbers).all():
        place = int(np.flatnonzero(~np.isfinite(numbers))[0])
        raise ValueError(f"{name}: record {place} is {numbers[place]}, expected finite")
    return numbers
