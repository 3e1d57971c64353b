"""Values out of records and verdicts on claims, on synthetic records with known answers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvcomm.reproduce import bill, claims, sweeps
from kvcomm.reproduce.claims import Claim, ahead, judged
from kvcomm.reproduce.measures import PUBLISHED, RECOVERED, Results, advantage
from kvcomm.reproduce.ranking import ALIKE, all_alike, kendall, likeness
from kvcomm.reproduce.verdict import EQUAL, FAILS, HOLDS, UNJUDGED, UNTOLD, Judged, enough, judge
from kvcomm.statistics import Interval
from kvcomm.tasks import find

TASK = find("hotpotqa")
N = 60


def results(rows: Mapping[str, Sequence[float]], metric: str | None = "match") -> Results:
    """Rows of nll; match is 1 where nll is below 3."""
    return Results(
        TASK,
        {
            row: {f"r{n}": {"nll": nll, "match": float(nll < 3)} for n, nll in enumerate(values)}
            for row, values in rows.items()
        },
        metric,
        ("dev.jsonl",),
    )


def noisy(mean: float, seed: int, n: int = N, spread: float = 1.0) -> list[float]:
    return list(mean + spread * np.random.default_rng(seed).standard_normal(n))


# ---- values --------------------------------------------------------------------------------


def test_recovered_takes_baseline_and_skyline_of_the_same_records() -> None:
    one = results({"baseline": [4, 6, 9], "skyline": [1, 2, 1], "x": [2, 4]})
    found = one.measured("x", RECOVERED)
    assert found is not None and found.n == 2
    assert found.value == pytest.approx((10 - 6) / (10 - 3))


def test_the_metric_is_a_mean_over_records_that_did_not_fail() -> None:
    one = results({"x": [2, 4, 1, 1]})
    rows = {"x": {**one.rows["x"], "r4": {"error": "ValueError: empty", "match": None}}}
    failed = replace(one, rows=rows)
    found = failed.measured("x", PUBLISHED)
    assert found is not None and (found.value, found.n) == (0.75, 4)
    assert failed.failed == {"x": ["ValueError: empty"]}
    assert failed.notes_of_failed == [
        "failed and left out: 1 of x on hotpotqa (ValueError: empty)."
    ]


def test_what_was_not_measured_is_none() -> None:
    one = results({"x": [1, 2]}, metric=None)
    assert one.measured("x", PUBLISHED) is None
    assert one.measured("x", RECOVERED) is None
    assert one.measured("y", RECOVERED) is None


def test_an_advantage_is_the_mean_over_tasks_with_equal_weight() -> None:
    low, high = [8.0] * 12, [1.0] * 12
    first = results({"baseline": low, "skyline": high, "a": [1.0] * 12, "b": [8.0] * 12})
    second = results({"baseline": low[:2], "skyline": high[:2], "a": [4.5, 4.5], "b": [4.5, 4.5]})
    found = advantage([first, second], "a", "b", RECOVERED)
    # 1 on the first (12 records), 0 on the second (2 records).
    assert found is not None
    assert found.interval.value == pytest.approx(0.5)
    assert found.interval.n == 14
    assert found.tasks == ("hotpotqa", "hotpotqa")


def test_a_task_where_reading_does_not_help_says_nothing() -> None:
    helpless = results({"baseline": noisy(5, 1), "skyline": noisy(5, 2), "a": [0.0] * N,
                        "b": [9.0] * N})  # fmt: skip
    assert not helpless.helps(RECOVERED)
    assert advantage([helpless], "a", "b", RECOVERED) is None


def test_a_task_without_context_is_judged_by_its_metric_only() -> None:
    """Skyline is the baseline there but for rounding, and a share of rounding is no share."""
    below = noisy(5, 1)
    mmlu = replace(
        results({"baseline": below, "skyline": [x - 1e-7 for x in below], "a": noisy(1, 2),
                 "b": noisy(9, 3)}, "match"),
        task=find("mmlu"),
    )  # fmt: skip
    assert ahead("a", "b")([mmlu], PUBLISHED).verdict == HOLDS
    assert ahead("a", "b")([mmlu], RECOVERED).verdict == UNJUDGED


def test_a_chunk_that_failed_on_records_is_not_the_likeliest_for_that() -> None:
    one = results({"0-0": [2.0, 2.0], "1-1": [3.0], "2-2": [1.0, 4.0]})
    chunks = {"0-0": (0,), "1-1": (1,), "2-2": (2,)}
    # Summed over what each has: 4, 3 and 5; on the record that all have: 2, 3 and 1.
    assert sweeps._best(one, chunks, [1]) == {1: "2-2"}


# ---- the rule ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "n", "at_least", "expected"),
    [
        (0.1, 0.3, 50, 0.0, HOLDS),
        (-0.3, -0.1, 50, 0.0, FAILS),
        (-0.1, 0.2, 50, 0.0, UNTOLD),
        (0.1, 0.3, 9, 0.0, UNTOLD),
        (-0.04, 0.1, 50, -0.05, HOLDS),
        (-0.2, -0.06, 50, -0.05, FAILS),
        (-0.2, 0.1, 50, -0.05, UNTOLD),
        (float("nan"), float("nan"), 50, 0.0, UNTOLD),
    ],
)
def test_the_rule(low: float, high: float, n: int, at_least: float, expected: str) -> None:
    assert judge(Interval((low + high) / 2, low, high, n), at_least, "match").verdict == expected


def rows(a: float, b: float, n: int = N) -> Results:
    """a and b stand between a baseline of 8 nats and a skyline of 1."""
    given = {"baseline": 8.0, "skyline": 1.0, "a": a, "b": b}
    return results(
        {row: noisy(mean, seed, n, 0.5) for seed, (row, mean) in enumerate(given.items())}
    )


@pytest.mark.parametrize(
    ("a", "b", "n", "as_good", "expected"),
    [
        (2, 5, N, False, HOLDS),
        (5, 2, N, False, FAILS),
        (4, 4, N, False, UNTOLD),
        (2, 5, 6, False, UNTOLD),
        (4, 4, N, True, HOLDS),
        (5, 2, N, True, FAILS),
    ],
)
def test_ahead_on_records(a: float, b: float, n: int, as_good: bool, expected: str) -> None:
    test = ahead("a", "b", as_good=as_good)
    assert test([rows(a, b, n)], RECOVERED).verdict == expected


def test_the_published_metric_is_judged_by_itself() -> None:
    # Both far above 3 nats: no answer matches, though a is the likelier by far.
    found = rows(4.9, 6.9)
    assert ahead("a", "b")([found], RECOVERED).verdict == HOLDS
    by_match = ahead("a", "b")([found], PUBLISHED)
    assert by_match.verdict == EQUAL
    assert by_match.difference is not None and by_match.difference.value == 0


def test_a_control_that_does_harm_is_told() -> None:
    found = results({"baseline": noisy(5, 1), "skyline": noisy(2, 2), "noise": noisy(9, 3),
                     "shuffled": [x - 0.01 for x in noisy(5, 1)]}, metric=None)  # fmt: skip
    verdicts = {one.name: one.judged[0].verdict for one in judged("extra-controls", [found])}
    assert verdicts["control-noise-better"] == HOLDS
    assert verdicts["control-noise-worse"] == FAILS
    assert verdicts["control-shuffled-better"] == verdicts["control-shuffled-worse"] == HOLDS
    assert verdicts["control-wrong-context-worse"] == UNJUDGED  # not run


def test_saving_more_than_claimed_is_no_fault() -> None:
    found = bill._reaches([1.43, 3.33], float, 3.0, "bytes sent", "x")
    assert (found.verdict, found.why) == (HOLDS, "1.43x to 3.33x, 3x to a tenth")
    assert bill._reaches([1.43, 2.7], float, 3.0, "bytes sent", "x").verdict == HOLDS
    assert bill._reaches([1.43, 2.69], float, 3.0, "bytes sent", "x").verdict == FAILS


def test_what_was_not_run_is_not_judged() -> None:
    found = ahead("a", "c")([rows(2, 5)], RECOVERED)
    assert (found.verdict, found.why) == (UNJUDGED, "not run")
    found = claims.small_region([rows(2, 5)], RECOVERED)
    assert (found.verdict, found.why) == (UNJUDGED, "not run")


@pytest.mark.parametrize(
    ("change", "as_good", "n", "expected"),
    [
        (0.0, False, N, EQUAL),
        (1e-6, False, N, EQUAL),  # as much as rounding makes, always the same way
        (-1e-6, False, N, EQUAL),
        (0.01, False, N, HOLDS),
        (-0.01, False, N, FAILS),
        (0.0, True, N, HOLDS),
        (0.0, False, 9, UNTOLD),
    ],
)
def test_rows_that_are_the_same(change: float, as_good: bool, n: int, expected: str) -> None:
    """A share of 7 nats: 0.01 nats are 0.0014 of it, 1e-6 are nothing."""
    one = rows(4, 4, n)
    same = {i: record | {"nll": record["nll"] + change} for i, record in one.rows["a"].items()}
    found = ahead("a", "b", as_good=as_good)(
        [replace(one, rows={**one.rows, "b": same})], RECOVERED
    )
    assert found.verdict == expected
    assert ("would tell" in found.why) == (expected == UNTOLD)


# ---- how many records would do ------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "low", "high", "n", "at_least", "expected"),
    [
        # Half an interval of 0.2 is to shrink to 0.1: four times the records.
        (0.1, -0.1, 0.3, 100, 0.0, "about n=400 would tell, if the value stays"),
        # The side towards what is wanted counts: 0.3 to 0.1 here, (0.3 / 0.1)^2 = 9.
        (0.1, -0.2, 0.15, 50, 0.0, "about n=450 would tell, if the value stays"),
        (-0.1, -0.15, 0.2, 50, 0.0, "about n=450 would tell, if the value stays"),
        # 0.05 from -0.05, half 0.11: 60 (0.11 / 0.05)^2 = 290.4, up to two digits.
        (0.0, -0.11, 0.2, 60, -0.05, "about n=300 would tell, if the value stays"),
        # 11 (0.11 / 0.1)^2 = 13.31
        (0.1, -0.01, 0.2, 11, 0.0, "about n=14 would tell, if the value stays"),
        # The end is above 0 already; a verdict asks for ten records all the same.
        (0.5, 0.4, 0.6, 4, 0.0, "about n=10 would tell, if the value stays"),
        # The end stands on 0, which is not above it: it takes more records than there are.
        (0.03, 0.0, 0.07, 40, 0.0, "about n=41 would tell, if the value stays"),
        (0.0, -0.1, 0.1, 100, 0.0, "no n up to 1000 times as large would tell, if the value stays"),
        (0.001, -0.1, 0.1, 99, 0.0, "no n up to 1000 times as large would tell, if the value"),
        (0.1, np.nan, np.nan, 50, 0.0, "the interval has no ends, so no n can be given"),
    ],
)
def test_how_many_records_would_tell(
    value: float, low: float, high: float, n: int, at_least: float, expected: str
) -> None:
    assert enough(Interval(value, low, high, n), at_least).startswith(expected)
    found = judge(Interval(value, low, high, n), at_least, "match")
    assert found.verdict == UNTOLD and found.why.split("; ")[1].startswith(expected)


def test_a_verdict_that_fell_asks_for_no_more_records() -> None:
    assert "would tell" not in judge(Interval(0.2, 0.1, 0.3, 50), 0.0, "match").why
    assert "would tell" not in judge(Interval(-0.2, -0.3, -0.1, 50), 0.0, "match").why


def test_the_number_given_does_tell() -> None:
    """A match that one of ten records gains and one of 20 loses, more and more often."""

    def found(n: int) -> Judged:
        a = [2.0 if k % 20 in (3, 13, 7) else 4.0 for k in range(n)]
        b = [2.0 if k % 20 in (5, 7) else 4.0 for k in range(n)]
        return ahead("a", "b")([results({"baseline": [9] * n, "skyline": [1] * n, "a": a, "b": b})],
                               PUBLISHED)  # fmt: skip

    few = found(60)
    assert few.verdict == UNTOLD
    told = int(few.why.split("about n=")[1].split()[0])
    assert 60 < told < 600
    assert found(2 * told).verdict == HOLDS


def test_where_reading_may_help_it_says_what_would_show_it() -> None:
    # A gain of about 0.2 nats, give or take 1.96 * 2 / sqrt(60) = 0.5.
    seems = results({"baseline": [5.4] * N, "skyline": noisy(5, 2, N, 2.0),
                     "a": [0.0] * N, "b": [9.0] * N})  # fmt: skip
    room = seems.room(RECOVERED)
    assert room is not None and room.low < 0 < room.value
    found = ahead("a", "b")([seems], RECOVERED)
    assert found.verdict == UNTOLD
    assert found.why == (
        "reading the context does not clearly help on any task; on hotpotqa " + enough(room, 0.0)
    )
    harms = replace(seems, rows={**seems.rows, "baseline": seems.rows["skyline"],
                                 "skyline": seems.rows["baseline"]})  # fmt: skip
    found = ahead("a", "b")([harms], RECOVERED)
    assert (found.verdict, found.why) == (
        UNTOLD, "reading the context does not clearly help on any task"
    )  # fmt: skip


def test_a_claim_is_one_line_by_every_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = Claim("x", "a is better than b", ("table-1",), ahead("a", "b"))
    monkeypatch.setattr(claims, "CLAIMS", (claim,))
    (verdict,) = judged("table-1", [rows(2, 5)])
    assert [one.measure for one in verdict.judged] == [PUBLISHED, RECOVERED]
    assert verdict.line.startswith("a is better than b: holds by published metric (+")
    assert "\n" not in verdict.line
    assert judged("table-2", [rows(2, 5)]) == []
    (unanswered,) = judged("table-1", [replace(rows(2, 5), metric=None)])
    assert [one.measure for one in unanswered.judged] == [RECOVERED]


def test_names_of_claims_and_the_exhibits_they_name() -> None:
    from kvcomm.reproduce.catalogue import EXHIBITS

    names = [claim.name for claim in claims.CLAIMS]
    assert len(set(names)) == len(names)
    assert {exhibit for claim in claims.CLAIMS for exhibit in claim.exhibits} <= set(EXHIBITS)


@pytest.mark.parametrize(("n_good", "expected"), [(1, HOLDS), (8, FAILS)])
def test_the_region_of_good_chunks(n_good: int, expected: str) -> None:
    means = {"baseline": 8.0, "skyline": 1.0, "0-9": 1.0}
    means |= {f"{n}-{n}": 2.0 if n < n_good else 7.5 for n in range(10)}
    found = results({row: noisy(m, seed, N, 0.2) for seed, (row, m) in enumerate(means.items())})
    verdict = claims.small_region([found], RECOVERED)
    assert verdict.verdict == expected
    # The chunk of all layers is good too: of 11 chunks n_good + 1.
    assert verdict.difference is not None
    assert verdict.difference.value == pytest.approx(0.25 - (n_good + 1) / 11)


# ---- Kendall's tau -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 2, 3, 4], [1, 2, 4, 3], 4 / 6),  # 5 pairs agree, 1 does not, of 6
        ([1, 1, 2], [1, 2, 3], 2 / np.sqrt(2 * 3)),  # one pair tied on one side
    ],
)
def test_kendall(first: list[int], second: list[int], expected: float) -> None:
    assert kendall(np.array(first, float), np.array(second, float)) == pytest.approx(expected)


def test_likeness_of_noisy_calibrations() -> None:
    draw = np.random.default_rng(3)
    mass = np.arange(10.0) + draw.standard_normal((16, 10)) * 0.1
    found = likeness(mass, mass + 0.01)
    assert found.value == 1.0
    assert found.n == 16
    single = likeness(mass[:1], mass[:1])
    assert single.value == 1.0 and single.low != single.low


def calibrations(noise: Mapping[str, float]) -> dict[str, np.ndarray]:
    """Mass [40, 10] that rises with the layer, each data set with noise of its own."""
    return {
        name: np.arange(10.0) + sd * np.random.default_rng(seed).standard_normal((40, 10))
        for seed, (name, sd) in enumerate(noise.items())
    }


def test_all_rankings_are_alike_only_when_every_pair_is() -> None:
    quiet = calibrations({"countries": 0.1, "tmath": 0.1, "qasper": 0.1})
    upside = quiet | {"qasper": quiet["qasper"][:, ::-1]}
    noisy = quiet | calibrations({"qasper": 12.0})
    few = {name: mass[:4] for name, mass in quiet.items()}
    for mass, expected in ((quiet, HOLDS), (upside, FAILS), (noisy, UNTOLD), (few, UNTOLD)):
        pairs = [("countries", "tmath"), ("countries", "qasper"), ("tmath", "qasper")]
        taus = {(a, b): likeness(mass[a], mass[b]) for a, b in pairs}
        found = all_alike(mass, taus)
        assert found.verdict == expected
        assert ("QASPER, of 3 pairs, wanted above 0.70" in found.why) == (
            expected != HOLDS and mass is not few
        )
        assert ("would tell" in found.why) == (expected == UNTOLD)


def test_one_low_pair_of_many_may_be_chance() -> None:
    """Below at 95%, not below at a level for 30 pairs: one in forty is so by chance alone."""
    rng = np.random.default_rng(0)
    names = [f"t{k}" for k in range(2)]
    for seed in range(400):
        rng = np.random.default_rng(seed)
        mass = {name: np.arange(10.0) + 6.0 * rng.standard_normal((16, 10)) for name in names}
        one = likeness(mass["t0"], mass["t1"])
        wide = likeness(mass["t0"], mass["t1"], level=1 - 0.05 / 30)
        if one.high < ALIKE <= wide.high:
            break
    else:
        pytest.fail("no such draw")
    others = {("t0", f"o{k}"): Interval(0.9, 0.8, 1.0, 16) for k in range(29)}
    found = all_alike(mass, {("t0", "t1"): one, **others})
    assert found.verdict == UNTOLD
    assert found.difference == wide
    assert all_alike(mass, {("t0", "t1"): one}).verdict == FAILS
