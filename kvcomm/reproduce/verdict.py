"""What a verdict is, the rule that gives it, and how many records would do where it gives none.

Owns the rule that all claims are judged by: their 95% intervals against what is wanted of them.
Which claims there are, and what they compare, says claims.py.
"""

import math
from dataclasses import dataclass

from kvcomm.statistics import FEW, Interval

HOLDS, FAILS, UNTOLD = "holds", "does not hold", "cannot be told at this n"
EQUAL, UNJUDGED = "there is no difference on these records", "is not judged"

#: An estimate of more than so many times the records that there are is none.
MOST_TIMES = 1000


@dataclass(frozen=True)
class Judged:
    """A verdict by one measure, with the difference that it is by."""

    measure: str
    verdict: str
    difference: Interval | None
    why: str


@dataclass(frozen=True)
class Verdict:
    """A claim, and what each measure says of it."""

    name: str
    claim: str
    judged: tuple[Judged, ...]

    @property
    def line(self) -> str:
        """One line for people."""
        said = "; ".join(f"{one.verdict} by {one.measure} ({one.why})" for one in self.judged)
        return f"{self.claim}: {said or f'{UNJUDGED} (nothing was measured)'}"


def judge(
    difference: Interval, at_least: float, measure: str, about: str = "", sign: str = "+"
) -> Judged:
    """The rule that all claims are judged by. sign: how numbers are written."""
    verdict = verdict_of(difference, at_least)
    why = written(difference, at_least, about, sign)
    if verdict == UNTOLD:
        why += f"; {enough(difference, at_least)}"
    return Judged(measure, verdict, difference, why)


def verdict_of(difference: Interval, at_least: float) -> str:
    """HOLDS or FAILS where the whole interval is on one side of at_least, else UNTOLD."""
    if difference.n < FEW:
        return UNTOLD
    # An end that is not known is neither above nor below.
    return HOLDS if difference.low > at_least else FAILS if difference.high < at_least else UNTOLD


def written(found: Interval, at_least: float = 0.0, about: str = "", sign: str = "+") -> str:
    """A difference with its interval, n, and what was wanted of it where that is not 0."""
    value, low, high = (
        # Adding 0.0 turns the -0.0 that rounding may leave into 0.0.
        f"{round(x, 2) + 0.0:{sign}.2f}"
        for x in (found.value, found.low, found.high)
    )
    wanted = f", wanted above {at_least:{sign}.2f}" if at_least else ""
    return f"{value} [{low}, {high}], n={found.n}{about}{wanted}"


def enough(found: Interval, at_least: float) -> str:
    """About which n, over all tasks together, would tell whether a value is above at_least.

    With d from the value to at_least, and h from the value to the interval's end on that side, the
    end comes to stand at at_least at n (h / d)^2 records: h falls with the root of n. Rounded up to
    two digits; never below `FEW`. This takes the value for the true one: at that n a difference
    that truly is as large is told about every second time. Where d is 0, or so small that it takes
    more than `MOST_TIMES` n, no number of this size would do; where the end is not known, no number
    can be given.
    """
    d = found.value - at_least
    h = found.value - found.low if d > 0 else found.high - found.value
    if math.isnan(h):
        return "the interval has no ends, so no n can be given that would tell"
    ratio = math.inf if d == 0 else (h / d) ** 2
    if ratio > MOST_TIMES:
        return f"no n up to {MOST_TIMES} times as large would tell, if the value stays"
    n = max(FEW, found.n * ratio)
    if found.n >= FEW:
        n = max(n, found.n + 1)  # an end that stands on at_least itself is not above it
    digit = 10 ** max(0, math.floor(math.log10(n)) - 1)
    # A little off, so that a whole number stays one whatever rounding did to it.
    return f"about n={math.ceil(n / digit - 1e-9) * digit} would tell, if the value stays"
