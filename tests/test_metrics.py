"""Metrics: the published match against every recorded run, and hand-computed cases."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from kvcomm import lexicon, metrics


@pytest.mark.parametrize("name", ["oracle_smollm2", "oracle_qwen05"])
def test_match_equals_every_recorded_run(shared, name):
    oracle = json.loads((shared / "reference" / f"{name}.json").read_text())
    checked = 0
    for task, methods in oracle["runs"].items():
        items = oracle["items"][task]["items"]
        for runs in methods.values():
            for run in runs:
                if "set_f1" not in run:
                    continue
                gold = items[run["item"]]["gold"]
                answers = [gold] if isinstance(gold, str) else gold
                scored = metrics.score(run["text"], answers)
                assert scored.match == run["metric"], (task, run["text"])
                assert scored.set_f1 == pytest.approx(run["set_f1"], abs=1e-6), (task, run["text"])
                checked += 1
    assert checked == 144  # 24 items, six methods


@pytest.mark.parametrize(
    ("word", "tag", "lemma"),
    [
        ("us", "PRP", "u"),  # WordNet has u, and a pronoun counts as a noun
        ("dogs", "NNS", "dog"),
        ("abaci", "NN", "abacus"),  # exception list
        ("said", "VBD", "say"),
        ("better", "RBR", "well"),  # exception list of adverbs
        ("hardrock", "NN", "hardrock"),  # not in WordNet
        ("1984", "CD", "1984"),
    ],
)
def test_lemma_of_a_lone_word(word, tag, lemma):
    # Values of the published lemmatiser with its full data.
    assert lexicon.tag(word) == tag
    assert lexicon.lemmatise(word) == lemma


def test_a_lone_word_must_be_one():
    with pytest.raises(ValueError, match="empty"):
        lexicon.tag("")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("U.S.", {"u"}),  # punctuation joins, then the lemma of us
        ("The cats cannot", {"cat", "can", "not"}),
        ("1990\u20131995", {"19901995"}),  # every Unicode dash is punctuation
        ("\u201cParis\u201d\u3002", {"paris"}),
        ("", set()),
        (" \n\u00a0", set()),
        ("The the a!", set()),
    ],
)
def test_words_compared(text, words):
    assert metrics.lemma_set(text) == words


def test_match_is_strict_about_one_half():
    # Sets {paris, france, red} and {paris}: 2 * 1 / (3 + 1) is exactly one half.
    assert metrics.best_set_f1("Paris France red", ["Paris"]) == 0.5
    assert metrics.match("Paris France red", ["Paris"]) == 0.0
    assert metrics.match("Paris France", ["Paris"]) == 1.0  # 2 / 3


def test_the_best_of_several_answers_counts():
    assert metrics.score("Paris", ["Rome", "Paris"]) == metrics.Score(1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("prediction", "answer", "closed", "plain"),
    [
        ("yes", "yes", 1.0, 1.0),
        ("Yes.", "yes", 1.0, 1.0),
        ("yes it is", "yes", 0.0, 0.5),
        ("no idea", "no", 0.0, 2 / 3),
        ("noanswer", "noanswer", 1.0, 1.0),
        ("yes", "no", 0.0, 0.0),
    ],
)
def test_yes_and_no(prediction, answer, closed, plain):
    assert metrics.f1(prediction, [answer], closed=True) == closed
    assert metrics.f1(prediction, [answer]) == pytest.approx(plain)


def test_f1_counts_tokens_not_sets():
    # "b b c" and "b c c": shared b, c; precision and recall 2 / 3.
    assert metrics.f1("b b c", ["b c c"]) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("prediction", "answer", "em", "f1"),
    [
        ("A", "A", 1.0, 0.0),
        ("B", "A", 0.0, 0.0),
        ("", "A", 1.0, 0.0),
        ("the band", "The The", 0.0, 0.0),
        ("", "!!!", 1.0, 0.0),
        ("", "Paris", 0.0, 0.0),
        (" ", "Paris", 0.0, 0.0),
        ("\n", "Paris", 0.0, 0.0),
    ],
)
def test_texts_that_normalise_to_nothing(prediction, answer, em, f1):
    assert metrics.em(prediction, [answer]) == em
    assert metrics.f1(prediction, [answer]) == f1
    assert metrics.match(prediction, [answer]) == 0.0


def test_answers_that_normalise_to_nothing_can_be_counted():
    assert [metrics.is_blank(text) for text in ("A", "The The", "!!!", "B", "a1")] == [
        True,
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("1990\u20131995", "1990-1995", 0.0),  # only ASCII punctuation goes
        ("Rock \u2019n\u2019 roll", "Rock 'n' roll", 0.0),
        ("\u00e9", "e\u0301", 0.0),
        ("New\u00a0York", "New York", 1.0),
        ("\uff11", "1", 0.0),
        ("Paris.", "Paris", 1.0),
        ("Paris\u3002", "Paris", 0.0),
    ],
)
def test_em_normalises_as_the_published_script(one, other, equal):
    assert metrics.em(one, [other]) == equal
    assert metrics.normalise("1990-1995") == "19901995"


@pytest.mark.parametrize("measure", [metrics.match, metrics.f1, metrics.em, metrics.score])
def test_what_is_no_answer_is_refused(measure):
    with pytest.raises(TypeError, match="prediction: NoneType"):
        measure(None, ["Paris"])
    with pytest.raises(TypeError, match="answers: str"):
        measure("Paris", "Paris")
    with pytest.raises(TypeError, match=r"answers\[1\]: int"):
        measure("Paris", ["Paris", 3])
    with pytest.raises(ValueError, match="none given"):
        measure("Paris", [])


@pytest.mark.parametrize(
    ("raw", "text", "cut_off"),
    [
        ("<think>x</think>Paris", "Paris", False),
        ("x</think> Paris", "Paris", False),
        ("<think>Paris", "", True),
        ("Paris<think>", "Paris", True),
        ("Paris", "Paris", False),
        ("<think>a</think>b<think>c</think>d", "d", False),
        ("", "", False),
    ],
)
def test_reasoning_is_taken_out(raw, text, cut_off):
    assert metrics.strip_reasoning(raw) == metrics.Stripped(text, raw, cut_off)


def test_reasoning_that_the_prompt_opened():
    assert metrics.strip_reasoning("still at it", opened=True).cut_off
    assert metrics.strip_reasoning("x</think>Paris", opened=True).text == "Paris"


def test_recovered_is_the_share_of_the_summed_gain():
    # Gains 4 + 2 of 8 + 4.
    result = metrics.recovered([10.0, 6.0], [6.0, 4.0], [2.0, 2.0])
    assert result.value == pytest.approx(0.5)
    # Both records recover one half, so every resample does.
    assert (result.low, result.high, result.n) == (0.5, 0.5, 2)


def test_recovered_may_leave_the_unit_interval_and_has_ends():
    assert metrics.recovered([4.0], [5.0], [2.0]).value == -0.5
    assert metrics.recovered([4.0], [1.0], [2.0]).value == 1.5
    assert metrics.recovered([4.0, 3.0], [4.0, 3.0], [2.0, 1.0]).value == 0.0


def test_recovered_without_a_gain_to_share_is_not_a_number():
    result = metrics.recovered([3.0], [2.0], [3.0])
    assert math.isnan(result.value)
    assert math.isnan(result.low)


def test_recovered_equals_the_recorded_one(shared):
    for name in ("paper_smollm2", "paper_qwen05"):
        paper = json.loads((shared / "reference" / f"{name}.json").read_text())
        total = {
            key: [sum(record["nll"][key]) for record in paper["records"]]
            for key in paper["records"][0]["nll"]
        }
        for key, value in paper["recovered"].items():
            result = metrics.recovered(total["baseline"], total[key], total["skyline"])
            assert result.value == pytest.approx(value, abs=1e-3), (name, key)
            assert result.low <= result.value <= result.high


def test_recovered_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"method: shape \(1,\), expected \(2,\)"):
        metrics.recovered([1.0, 2.0], [1.0], [0.0, 0.0])
    with pytest.raises(ValueError, match="skyline: record 1 has nll nan"):
        metrics.recovered([1.0, 2.0], [1.0, 1.0], [0.0, np.nan])
    with pytest.raises(ValueError, match="at least one record"):
        metrics.recovered([], [], [])


def test_the_lexicon_is_not_read_before_it_is_needed():
    code = (
        "import sys, kvcomm.metrics, kvcomm.lexicon as l;"
        "assert l.load.cache_info().currsize == 0; assert 'nltk' not in sys.modules;"
        "kvcomm.metrics.match('a dog', ['dog']); assert l.load.cache_info().currsize == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))
