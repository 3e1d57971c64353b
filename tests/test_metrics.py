"""Metrics: the published match against every recorded run, and hand-computed cases."""

import dataclasses
import json
import math
import os
import re
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
                assert metrics.match(run["text"], answers) == run["metric"], (task, run["text"])
                shared_words = metrics.best_set_f1(run["text"], answers)
                assert shared_words == pytest.approx(run["set_f1"], abs=1e-6), (task, run["text"])
                checked += 1
    assert checked == 144  # 24 items, six methods


def test_published_rouge_equals_every_recorded_run(shared):
    ours, published = [], []
    for name in ("oracle_smollm2", "oracle_qwen05"):
        oracle = json.loads((shared / "reference" / f"{name}.json").read_text())
        items = oracle["items"]["tmath"]["items"]
        for run in (run for runs in oracle["runs"]["tmath"].values() for run in runs):
            answers = [items[run["item"]]["gold"]]
            found = metrics.published_rouge_l(run["text"], answers)
            assert found == pytest.approx(run["metric"], abs=2e-6), run["text"]
            published.append(run["metric"])
            ours.append(metrics.rouge_l(run["text"], answers)[0])
    # What the docstring says of the difference to rouge-score's recall.
    assert len(published) == 16
    assert sum(published) / 16 == pytest.approx(0.151, abs=5e-4)
    assert sum(ours) / 16 == pytest.approx(0.222, abs=5e-4)
    ratios = [one / other for one, other in zip(ours, published, strict=True)]
    assert (round(min(ratios), 1), round(max(ratios), 1)) == (0.8, 5.1)


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
    best = metrics.score("Paris", ["Rome", "Paris"])
    assert best == metrics.Score(*[1.0] * 7, accuracy=None)
    picked = metrics.score("Paris", ["Rome", "Paris"], choices=["Rome", "Paris", "Oslo"])
    assert picked.accuracy == 1.0


def test_a_score_has_every_name():
    fields = {field.name for field in dataclasses.fields(metrics.Score)}
    rouge = ("rouge_l_recall", "rouge_l_f", "published_rouge_l")
    assert ("match", "f1", "em", *rouge, "accuracy") == metrics.NAMES
    assert set(metrics.NAMES) < fields


# ---- ROUGE-L and accuracy


@pytest.mark.parametrize(
    ("prediction", "answer", "recall", "f", "published"),
    [
        # Common subsequence "the cat sat": 3 of 6 tokens, 3 of 4 of the prediction.
        ("the black cat sat", "the cat sat on the mat", 0.5, 0.6, 3 / 5),
        ("The Cat, sat.", "the cat sat", 1.0, 1.0, 1 / 3),  # published, case and commas count
        ("b a", "a b", 0.5, 0.5, 0.5),  # of "b" and "a" one can be common
        # Sentences meet one by one, and their words are put together.
        ("two. one", "one. two", 0.5, 0.5, 1.0),
        ("a a a", "a", 1.0, 0.5, 1.0),
        ("a", "a a a", 1 / 3, 0.5, 1.0),  # sets
        ("x=2", "x=2", 1.0, 1.0, 1.0),
        ("x=2", "x = 2", 1.0, 1.0, 0.0),
        ("\u6771\u4eac", "\u6771\u4eac", 0.0, 0.0, 1.0),  # no a-z and 0-9
        ("", "paris", 0.0, 0.0, 0.0),
        (" \n", "paris", 0.0, 0.0, 0.0),
        ("paris", "...", 0.0, 0.0, 0.0),
        ("...", "paris", 0.0, 0.0, 0.0),
        (" . ", "paris . ", 0.0, 0.0, 0.0),
        ("\ud800", "paris", 0.0, 0.0, 0.0),
        ("\x00", "paris", 0.0, 0.0, 0.0),
    ],
)
def test_rouge(prediction, answer, recall, f, published):
    assert metrics.rouge_l(prediction, [answer]) == pytest.approx((recall, f))
    assert metrics.published_rouge_l(prediction, [answer]) == pytest.approx(published)


def test_rouge_takes_the_best_answer_for_each_value():
    answers = ["one two three four", "one"]
    # Recall: 1 of 4 and 1 of 1. F: 2 / (3 + 4) and 2 / (3 + 1).
    assert metrics.rouge_l("one x y", answers) == (1.0, 0.5)
    assert metrics.published_rouge_l("one x y", answers) == 1.0


LETTERS = ("A", "B", "C", "D")


@pytest.mark.parametrize(
    ("prediction", "right"),
    [
        ("B", 1.0),
        ("(B)", 1.0),
        ("B. Because A is odd", 1.0),
        ("The answer is **B**.", 1.0),
        ("Answer:B", 1.0),
        ("B\n\nC", 1.0),
        ("A or B", 0.0),  # the first one counts
        ("A better one is B", 0.0),  # an article reads as a letter
        ("Because", 0.0),
        ("b", 0.0),
        ("B2", 0.0),
        ("E", 0.0),
        ("", 0.0),
        (" \n", 0.0),
        ("\ud800", 0.0),
    ],
)
def test_accuracy_goes_by_the_first_letter_that_stands_alone(prediction, right):
    assert metrics.accuracy(prediction, ["B"], LETTERS) == right
    assert metrics.score(prediction, ["B"], choices=LETTERS).accuracy == right


def test_accuracy_by_names():
    choices = ["Ash", "Ash Foods", "Elm (North)"]
    assert metrics.accuracy("I take Ash Foods.", ["Ash Foods"], choices) == 1.0  # the longest
    assert metrics.accuracy("I take Ash.", ["Ash Foods"], choices) == 0.0
    assert metrics.accuracy("Elm (North), not Ash", ["Elm (North)"], choices) == 1.0
    assert metrics.accuracy("Elm (North), not Ash", ["Ash", "Elm (North)"], choices) == 1.0


@pytest.mark.parametrize("choices", [(), "ABCD"])
def test_accuracy_needs_choices(choices):
    with pytest.raises(ValueError, match=f"choices: {re.escape(repr(choices))}, expected a seq"):
        metrics.accuracy("A", ["A"], choices)


# ---- yes, no, and texts that are no words


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


@pytest.mark.parametrize(
    "measure",
    [
        metrics.match, metrics.f1, metrics.em, metrics.score, metrics.rouge_l,
        metrics.published_rouge_l, lambda *given: metrics.accuracy(*given, LETTERS),
    ],
)  # fmt: skip
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
        "assert 'rouge_score' not in sys.modules;"
        "kvcomm.metrics.match('a dog', ['dog']); assert l.load.cache_info().currsize == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))
