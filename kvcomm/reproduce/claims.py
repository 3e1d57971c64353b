"""The paper's claims and some of our own as data, and whether a reproduction bears them out.

A claim says which exhibits show it, which two rows it compares (first against second) and how much
the first has to be ahead: 0 for "better", a little below 0 for "as good as". It holds when the
whole 95% interval of the difference is above that, does not hold when all of it is below, and
cannot be told at this number of records otherwise; then it says about which number would do
(verdict.py). Two rows that are the same but for rounding differ at no number of records. The
difference is paired, record by record, mean over the tasks on which reading the context clearly
helps: on others no message can be told from another.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvcomm.reproduce.groups import RATIOS
from kvcomm.reproduce.measures import MEASURES, PUBLISHED, RECOVERED, Results, advantage
from kvcomm.reproduce.verdict import (
    EQUAL,
    UNJUDGED,
    UNTOLD,
    Judged,
    Verdict,
    enough,
    judge,
    written,
)
from kvcomm.selection import SEED
from kvcomm.statistics import FEW, draws, interval

#: Differences up to this are of rounding; one record of ten thousand makes as much of a metric.
ROUNDING = 1e-4

#: How far behind still counts as "as good as", by measure; this project's choice.
AS_GOOD = {PUBLISHED: -0.05, RECOVERED: -0.10}

#: A small region: at most this share of the chunks.
SMALL = 0.25
RESAMPLES = 500

Test = Callable[[Sequence[Results], str], Judged]


@dataclass(frozen=True)
class Claim:
    """name: unlike any other. text: what is claimed. exhibits: that show it. test: by a measure."""

    name: str
    text: str
    exhibits: tuple[str, ...]
    test: Test


def ahead(first: str, second: str, *, as_good: bool = False) -> Test:
    """first is better than second, or as good as it."""

    def test(results: Sequence[Results], measure: str) -> Judged:
        return compare(results, first, second, measure, as_good=as_good)

    return test


def compare(
    results: Sequence[Results], first: str, second: str, measure: str, *, as_good: bool = False
) -> Judged:
    """first against second over all tasks, by one measure."""
    at_least = AS_GOOD[measure] if as_good else 0.0
    found = advantage(results, first, second, measure)
    if found is None:
        return _unjudged([r for r in results if first in r.rows and second in r.rows], measure)
    n_tasks = len(found.tasks)
    about = f" over {n_tasks} tasks" if n_tasks > 1 else f" on {found.tasks[0]}"
    ends = (found.interval.low, found.interval.high)
    if not as_good and found.interval.n >= FEW and all(abs(end) <= ROUNDING for end in ends):
        return Judged(measure, EQUAL, found.interval, written(found.interval, about=about))
    return judge(found.interval, at_least, measure, about)


def _unjudged(ran: Sequence[Results], measure: str) -> Judged:
    """Nothing to judge by: not run, no context to read, or nowhere does reading it clearly help.

    ran: the results that have the rows. Of the first task on which it seems to help, says about
    which n would show that it does.
    """
    if not ran:
        return Judged(measure, UNJUDGED, None, "not run")
    why = "reading the context does not clearly help on any task"
    for one in ran:
        room = one.room(measure)
        if one.task.needs_context and room is not None and room.value > 0 >= room.low:
            of = f"on {one.task.name} {enough(room, 0.0)}"
            return Judged(measure, UNTOLD, None, f"{why}; {of}")
    any_context = any(one.task.needs_context for one in ran)
    return Judged(measure, UNTOLD if any_context else UNJUDGED, None, why)


def _main() -> list[Claim]:
    exhibits = ("table-1", "table-8")
    claims = [
        Claim(
            "near-skyline",
            "KVComm with 0.7 of the layers is as good as reading the context (Skyline)",
            exhibits,
            ahead("kvcomm 0.7", "skyline", as_good=True),
        ),
        Claim(
            "few-layers-help",
            "KVComm with 0.3 of the layers is better than no message (Baseline)",
            exhibits,
            ahead("kvcomm 0.3", "baseline"),
        ),
        Claim(
            "more-layers",
            "KVComm with 0.7 of the layers is better than with 0.3",
            exhibits,
            ahead("kvcomm 0.7", "kvcomm 0.3"),
        ),
    ]
    for rival in ("nld", "cipher", "ac mean", "ac replace", "ac sum"):
        claims.append(
            Claim(
                f"better-than-{rival.replace(' ', '-')}",
                f"KVComm with 0.7 of the layers is better than {rival}",
                exhibits,
                ahead("kvcomm 0.7", rival),
            )
        )
    return claims


def _pairs(name: str, rival: str, text: str, exhibits: tuple[str, ...]) -> list[Claim]:
    return [
        Claim(f"{name}-{ratio}", text.format(ratio=ratio), exhibits,
              ahead(f"kvcomm {ratio}", f"{rival} {ratio}"))
        for ratio in RATIOS
    ]  # fmt: skip


def small_region(results: Sequence[Results], measure: str) -> Judged:
    """At most a quarter of the chunks give half of what all layers give, mean over tasks."""
    parts, n = [], 0
    for place, one in enumerate(results):
        chunks = _chunks(one)
        field = "nll" if measure == RECOVERED else one.metric
        if not chunks or field is None or not one.helps(measure):
            continue
        values = [one.values(row, field) for row in ("baseline", *chunks)]
        ids = [name for name in values[0] if all(name in of for of in values)]
        if not ids:
            continue
        gains = np.array([[of[name] - values[0][name] for name in ids] for of in values[1:]])
        gains = -gains if measure == RECOVERED else gains
        whole = gains[max(range(len(chunks)), key=lambda c: _width(chunks[c]))]
        share = _good(gains.mean(axis=1), whole.mean())
        spread = [
            _good(gains[:, drawn].mean(axis=1), whole[drawn].mean())
            for rows in draws(len(ids), RESAMPLES, SEED + place)
            for drawn in rows
        ]
        parts.append((share, np.array(spread)))
        n += len(ids)
    if not parts:
        return _unjudged([one for one in results if _chunks(one)], measure)
    value = SMALL - float(np.mean([share for share, _ in parts]))
    spread = SMALL - np.mean([of for _, of in parts], axis=0)
    return judge(interval(value, spread, n), 0.0, measure, f", {SMALL} less that share")


def _chunks(one: Results) -> list[str]:
    return [row for row in one.rows if re.fullmatch(r"\d+-\d+", row)]


def _width(chunk: str) -> int:
    first, last = chunk.split("-")
    return int(last) - int(first)


def _good(gains: np.ndarray, whole: float) -> float:
    return float(np.mean(gains >= whole / 2)) if whole > 0 else 1.0


def _controls() -> list[Claim]:
    """A message that holds nothing of use scores like none: neither better nor worse."""
    return [
        Claim(
            f"control-{name.replace(' ', '-')}-{than}",
            f"a message of {text} is no {than} than none",
            ("extra-controls",),
            ahead(*pair, as_good=True),
        )
        for name, text in (
            ("wrong context", "K and V of a wrong context"),
            ("shuffled", "K and V of shuffled tokens"),
            ("noise", "noise of the same norm"),
        )
        for than, pair in (("better", ("baseline", name)), ("worse", (name, "baseline")))
    ]


#: Every claim that is judged, in the order in which they are told.
CLAIMS: tuple[Claim, ...] = (
    *_main(),
    *_pairs(
        "random", "random", "at {ratio} of the layers the selection is better than random layers",
        ("table-2", "table-9"),
    ),
    *_pairs(
        "positions", "shift back",
        "at {ratio} of the layers shifted positions (KVComm) are better than KVComm-S",
        ("table-11",),
    ),
    *(
        Claim(
            f"two-senders-{ratio}",
            f"at {ratio} of the layers two senders are as good as one",
            ("table-10",),
            ahead(f"kvcomm {ratio} two senders", f"kvcomm {ratio}", as_good=True),
        )
        for ratio in RATIOS
    ),
    *_controls(),
    Claim(
        "control-random", "the selection is better than other layers of as many bytes",
        ("extra-controls",), ahead("kvcomm 0.5", "random"),
    ),
    *(
        Claim(
            f"search-{ratio}",
            f"at {ratio} of the layers searched ones are better than the selection, on new records",
            ("extra-search",), ahead(f"search {ratio}", f"attention {ratio}"),
        )
        for ratio in RATIOS
    ),
    Claim(
        "small-region",
        "a contiguous chunk does well only in a small region of (from, to): at most a quarter of "
        "the chunks give half of what all layers give",
        ("figure-4",), small_region,
    ),
    Claim(
        "beats-chunks", "at an equal number of layers the selection is as good as the best chunk",
        ("figure-4",), ahead("selection", "best chunks", as_good=True),
    ),
    Claim(
        "middle-chunks", "chunks of the middle layers are better than others of their size",
        ("figure-4",), ahead("middle chunks", "outer chunks"),
    ),
    Claim(
        "attention-level", "layers of high attention are better than layers of low attention",
        ("figure-7",), ahead("top", "bottom"),
    ),
    *(
        Claim(
            f"one-record-{ratio}",
            f"at {ratio} of the layers one calibration record does as well as the most there are",
            ("figure-11",), ahead(f"one {ratio}", f"most {ratio}", as_good=True),
        )
        for ratio in RATIOS
    ),
    Claim(
        "longer-messages", "NLD gains from 64 to 128 tokens of message", ("figure-12",),
        ahead("nld 128", "nld 64"),
    ),
    Claim(
        "long-enough", "NLD with 128 tokens of message is as good as with 1024", ("figure-12",),
        ahead("nld 128", "nld 1024", as_good=True),
    ),
    Claim(
        "online", "choosing layers at every record is better than once", ("figure-13",),
        ahead("T 1", "T once"),
    ),
    Claim(
        "last-token", "in late layers the last token's state matters more than the first's",
        ("figure-2", "figure-9"), ahead("late last", "late first"),
    ),
    *(
        Claim(
            f"early-{name.replace(', ', '-')}",
            f"prepended hidden states work with k and j early, not with {words}",
            ("figure-3", "figure-10"), ahead("early, early", name),
        )
        for name, words in (("early, late", "j late"), ("late, early", "k late"))
    ),
)  # fmt: skip


def judged(exhibit: str, results: Sequence[Results]) -> list[Verdict]:
    """The verdicts of all claims that an exhibit shows, by every measure that it has."""
    measures = [
        measure
        for measure in MEASURES
        if measure == RECOVERED or any(one.metric is not None for one in results)
    ]
    return [
        Verdict(claim.name, claim.text, tuple(claim.test(results, one) for one in measures))
        for claim in CLAIMS
        if exhibit in claim.exhibits and results
    ]
