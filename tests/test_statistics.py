"""Bootstrap intervals: fixed by their seed, and right where the answer is known."""

import numpy as np
import pytest

from kvcomm import statistics


def test_a_constant_has_no_spread():
    assert statistics.mean([0.5, 0.5, 0.5]) == statistics.Interval(0.5, 0.5, 0.5, 3)
    assert statistics.mean([2.0]) == statistics.Interval(2.0, 2.0, 2.0, 1)


def test_interval_of_a_share_is_the_binomial_one():
    # 40 of 100: the resampled mean has standard deviation sqrt(0.24 / 100) = 0.049.
    values = [1.0] * 40 + [0.0] * 60
    result = statistics.mean(values, resamples=20000)
    assert result.value == pytest.approx(0.4)
    assert result.low == pytest.approx(0.4 - 1.96 * 0.049, abs=0.011)
    assert result.high == pytest.approx(0.4 + 1.96 * 0.049, abs=0.011)


def test_the_same_seed_gives_the_same_interval():
    values = np.random.default_rng(3).normal(size=50)
    assert statistics.mean(values, seed=5) == statistics.mean(values, seed=5)
    assert statistics.mean(values, seed=5) != statistics.mean(values, seed=6)


def test_blocks_draw_what_one_block_would(monkeypatch):
    whole = np.concatenate(list(statistics.draws(7, 50, seed=1)))
    monkeypatch.setattr(statistics, "BLOCK", 20)
    blocks = list(statistics.draws(7, 50, seed=1))
    assert [len(block) for block in blocks] == [2] * 25
    assert np.array_equal(np.concatenate(blocks), whole)
    assert whole.shape == (50, 7)
    assert whole.min() == 0
    assert whole.max() == 6


def test_pairs_stay_together():
    # Records differ a lot, methods always by one: the difference has no spread.
    first = np.arange(20.0) * 10
    result = statistics.difference(first, first - 1.0)
    assert result == statistics.Interval(1.0, 1.0, 1.0, 20)


def test_difference_is_first_minus_second():
    # Differences 1, -1, 3, 1: the resampled mean has standard deviation sqrt(2 / 4).
    result = statistics.difference([2.0, 1.0, 3.0, 4.0], [1.0, 2.0, 0.0, 3.0])
    assert (result.value, result.n) == (1.0, 4)
    assert statistics.difference([1.0, 2.0, 0.0, 3.0], [2.0, 1.0, 3.0, 4.0]).value == -1.0
    assert -1.0 <= result.low < 1.0 < result.high <= 3.0


def test_interval_of_a_difference_is_the_normal_one_of_pairs():
    # 60 records better by 1, 40 worse by 1: mean 0.2, variance 0.96, of the mean 0.0096.
    first = np.array([1.0] * 60 + [0.0] * 40)
    result = statistics.difference(first, 1.0 - first, resamples=20000)
    assert result.value == pytest.approx(0.2)
    assert result.low == pytest.approx(0.2 - 1.96 * 0.0096**0.5, abs=0.022)
    assert result.high == pytest.approx(0.2 + 1.96 * 0.0096**0.5, abs=0.022)


def test_the_interval_of_a_difference_is_that_of_the_mean_of_differences():
    rng = np.random.default_rng(1)
    first, second = rng.normal(size=(2, 30))
    assert statistics.difference(first, second, seed=9) == statistics.mean(first - second, seed=9)


def test_one_pair_and_equal_methods_have_no_spread():
    assert statistics.difference([3.0], [1.0]) == statistics.Interval(2.0, 2.0, 2.0, 1)
    same = [0.0, 1.0, 0.5]
    assert statistics.difference(same, same) == statistics.Interval(0.0, 0.0, 0.0, 3)


def test_mean_is_of_items_not_of_those_above_a_threshold():
    assert statistics.mean([0.2, 0.6, 0.6]).value == pytest.approx(1.4 / 3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "at least one record"),
        ([[1.0]], r"shape \(1, 1\)"),
        ([1.0, np.nan], "record 1 is nan"),
        ([np.inf], "record 0 is inf"),
    ],
)
def test_what_has_no_mean_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        statistics.mean(values)


def test_arguments_are_checked():
    with pytest.raises(ValueError, match=r"level: 1\.0"):
        statistics.mean([1.0], level=1.0)
    with pytest.raises(ValueError, match="resamples: 0"):
        statistics.mean([1.0], resamples=0)
    with pytest.raises(ValueError, match="n: 0"):
        list(statistics.draws(0))
    with pytest.raises(ValueError, match="second: 1 record, expected 2 as in first"):
        statistics.difference([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="second: record 1 is nan, expected finite"):
        statistics.difference([1.0, 2.0], [1.0, np.nan])
    with pytest.raises(ValueError, match=r"first: shape \(0,\), expected \(n,\) with at least one"):
        statistics.difference([], [])
