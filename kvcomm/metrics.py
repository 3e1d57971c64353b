"""What an answer is worth: match, SQuAD F1 and EM, ROUGE-L, accuracy, and the share of likelihood
recovered.

Owns the scoring of one text against its accepted answers and of summed likelihoods against
each other. Everything works offline. Intervals are in `kvcomm.statistics`; which rule a data
set goes by is in `kvcomm.tasks`.

Three numbers that papers confuse are kept apart by name: `match` (the published "F1": 1 when
the F1 of two word *sets* is above one half), `f1` (SQuAD, token multisets) and `em`. ROUGE-L
comes in two forms that differ a lot: that of the library rouge-score, and `published_rouge_l`, what
the published code reports for TMATH and SAMSum.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from kvcomm import lexicon
from kvcomm.statistics import Interval, draws, interval

#: The measures that every record of a run has, each the best over its accepted answers.
NAMES = (
    "match", "f1", "em", "rouge_l_recall", "rouge_l_f", "published_rouge_l", "accuracy",
)  # fmt: skip

MATCH_ABOVE = 0.5  # strict: a set F1 of exactly one half is no match

# HotpotQA's script gives no partial credit when either side is one of these.
CLOSED_ANSWERS = ("yes", "no", "noanswer")

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
ASCII_PUNCTUATION = str.maketrans("", "", string.punctuation)

# Words the Treebank rules split. Only those without an apostrophe can be left in text whose
# punctuation is gone.
TREEBANK_PAIRS = re.compile(
    r"\b(?:(can)(not)|(gim)(me)|(gon)(na)|(got)(ta)|(lem)(me)|(wan)(na))\b", re.IGNORECASE
)


@dataclass(frozen=True)
class Score:
    """One answer against its accepted answers; each value is the best over them, in [0, 1].

    Attributes
    ----------
    match : 1.0 or 0.0, the published measure
    set_f1 : the F1 of word sets behind `match`
    f1, em : SQuAD's, by the rule of the data set
    rouge_l_recall, rouge_l_f : ROUGE-L of the library rouge-score
    published_rouge_l : ROUGE-L recall as the published code has it
    accuracy : 1.0 or 0.0; None where an answer is not one of a few choices
    """

    match: float
    set_f1: float
    f1: float
    em: float
    rouge_l_recall: float
    rouge_l_f: float
    published_rouge_l: float
    accuracy: float | None = None


@dataclass(frozen=True)
class Stripped:
    """An answer without its reasoning. `cut_off` says that the reasoning never ended."""

    text: str
    raw: str
    cut_off: bool


def score(
    prediction: str,
    answers: Sequence[str],
    *,
    closed: bool = False,
    choices: Sequence[str] = (),
) -> Score:
    """Score one answer.

    Parameters
    ----------
    prediction : the generated text; may be empty
    answers : the accepted answers, at least one
    closed : HotpotQA's rule for yes, no and noanswer, see `f1`
    choices : all that may be chosen from, where it is a few; for `accuracy`

    Raises
    ------
    TypeError : the prediction or an answer is not a string
    ValueError : no accepted answer is given
    """
    shared = best_set_f1(prediction, answers)
    recall, f = rouge_l(prediction, answers)
    return Score(
        match=float(shared > MATCH_ABOVE),
        set_f1=shared,
        f1=f1(prediction, answers, closed=closed),
        em=em(prediction, answers),
        rouge_l_recall=recall,
        rouge_l_f=f,
        published_rouge_l=published_rouge_l(prediction, answers),
        accuracy=accuracy(prediction, answers, choices) if choices else None,
    )


def match(prediction: str, answers: Sequence[str]) -> float:
    """The published measure: 1.0 when the best `set_f1` is above one half, else 0.0."""
    return float(best_set_f1(prediction, answers) > MATCH_ABOVE)


def best_set_f1(prediction: str, answers: Sequence[str]) -> float:
    """The F1 of the two sets of lemmatised words, the best over the accepted answers."""
    _check(prediction, answers)
    words = lemma_set(prediction)
    return max(_set_f1(words, lemma_set(answer)) for answer in answers)


def f1(prediction: str, answers: Sequence[str], *, closed: bool = False) -> float:
    """SQuAD F1 of token multisets, the best over the accepted answers.

    With `closed` (HotpotQA) it is 0 when either side normalises to yes, no or noanswer and
    the other side is not the same. A text that normalises to nothing shares no token: 0.
    """
    _check(prediction, answers)
    return max(_token_f1(prediction, answer, closed) for answer in answers)


def em(prediction: str, answers: Sequence[str]) -> float:
    """1.0 when the prediction equals an accepted answer after `normalise`, else 0.0.

    As in the published script, two texts that normalise to nothing are equal: "The The", "!!!"
    and an empty prediction. `is_blank` finds the accepted answers where that can happen.
    """
    _check(prediction, answers)
    own = normalise(prediction)
    return float(any(own == normalise(answer) for answer in answers))


def is_blank(answer: str) -> bool:
    """Whether nothing is left of an accepted answer after `normalise`: an article, a mark."""
    return not normalise(answer)


def rouge_l(prediction: str, answers: Sequence[str]) -> tuple[float, float]:
    """ROUGE-L recall and F of the library rouge-score, each the best over the accepted answers.

    The longest common subsequence of tokens over the answer's length, and the harmonic mean of that
    and the share of the prediction. Tokens are runs of a-z and 0-9 of the lower-cased text, without
    stemming: text in another script has none, and scores 0, as an empty text does.
    """
    _check(prediction, answers)
    scores = [_rouge_scorer().score(answer, prediction)["rougeL"] for answer in answers]
    return (
        float(max(one.recall for one in scores)),
        float(max(one.fmeasure for one in scores)),
    )


def published_rouge_l(prediction: str, answers: Sequence[str]) -> float:
    """ROUGE-L recall as the published code has it for TMATH and SAMSum, the best over the answers.

    It comes from another library than `rouge_l`, and no option of rouge-score gives it: words are
    what stands between blanks (case and punctuation count), texts are cut into sentences at every
    ".", and both sides are *sets*: per sentence of the answer the words on its longest common
    subsequences with the sentences of the prediction, all put together, over the number of
    different words of the answer. On the 16 recorded answers to TMATH its mean is 0.151 where that
    of `rouge_l` is 0.222, per answer 0.8 to 5.1 times as much. A text without a word scores 0.
    """
    _check(prediction, answers)
    return max(_published_recall(prediction, answer) for answer in answers)


def accuracy(prediction: str, answers: Sequence[str], choices: Sequence[str]) -> float:
    """1.0 when the first choice that the prediction names is an accepted answer, else 0.0.

    A choice is named where it stands by itself, spelled as given: the option letters A to D in
    "(B)", "B." or "The answer is B", not in "Because" or "b". That makes the article at the start
    of "A reason is" an A. Of choices that begin at one place the longest is meant.

    Raises
    ------
    TypeError : as in `score`
    ValueError : no choice, or no accepted answer
    """
    _check(prediction, answers)
    if isinstance(choices, str) or not choices:
        raise ValueError(f"choices: {choices!r}, expected a sequence of at least one")
    longest_first = sorted(choices, key=len, reverse=True)
    found = re.search(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)", prediction)
    return float(found is not None and found[0] in answers)


def normalise(text: str) -> str:
    """SQuAD's normalisation: lower case, no ASCII punctuation, no articles, single blanks."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(ASCII_PUNCTUATION)).split())


def lemma_set(text: str) -> frozenset[str]:
    """The set of words `match` compares.

    Normalised as `normalise` does, but without any Unicode punctuation, then lemmatised word
    by word; both steps are done twice over, as published.
    """
    for _ in range(2):
        text = " ".join(lexicon.lemmatise(word) for word in _split(text))
    return frozenset(text.split())


def strip_reasoning(text: str, *, opened: bool = False) -> Stripped:
    """Take the reasoning of a think model out of its answer.

    What stands before the last `</think>` goes, and what stands after an opening tag that is
    never closed. `cut_off` says that there was such a tag.

    Parameters
    ----------
    opened : the prompt itself ended inside a think block
    """
    _, closing, tail = text.rpartition("</think>")
    if opened and not closing:
        return Stripped("", text, cut_off=True)
    answer, opening, _ = tail.partition("<think>")
    return Stripped(answer.strip(), text, cut_off=bool(opening))


def recovered(
    baseline: Sequence[float] | np.ndarray,
    method: Sequence[float] | np.ndarray,
    skyline: Sequence[float] | np.ndarray,
    *,
    seed: int = 0,
    resamples: int = 2000,
    level: float = 0.95,
) -> Interval:
    """Share of what reading the context would have given, with a bootstrap over records.

    (sum of baseline - sum of method) / (sum of baseline - sum of skyline). May leave [0, 1].

    Parameters
    ----------
    baseline, method, skyline : [n] negative log-likelihood of each record's gold answer, in
        nats, summed over its tokens; the same records in the same order
    seed, resamples, level : of the bootstrap

    Returns
    -------
    Interval : `value` is NaN where baseline and skyline are equal, the interval is NaN where
        that happens in a resample

    Raises
    ------
    ValueError : lengths differ, nothing is given, or a value is not finite
    """
    rows = {"baseline": baseline, "method": method, "skyline": skyline}
    nll = {name: np.asarray(values, dtype=np.float64) for name, values in rows.items()}
    n = nll["baseline"].size
    for name, values in nll.items():
        if values.ndim != 1 or values.size != n or n == 0:
            raise ValueError(
                f"{name}: shape {values.shape}, expected ({n},) with at least one record"
            )
        if not np.isfinite(values).all():
            place = int(np.flatnonzero(~np.isfinite(values))[0])
            raise ValueError(f"{name}: record {place} has nll {values[place]}, expected finite")
    gain = nll["baseline"] - nll["method"]
    room = nll["baseline"] - nll["skyline"]
    spread = np.concatenate(
        [
            _ratio(gain[rows].sum(axis=1), room[rows].sum(axis=1))
            for rows in draws(n, resamples, seed)
        ]
    )
    return interval(float(_ratio(gain.sum(), room.sum())), spread, n, level)


def _check(prediction: object, answers: object) -> None:
    if not isinstance(prediction, str):
        raise TypeError(f"prediction: {type(prediction).__name__}, expected str")
    if isinstance(answers, str) or not isinstance(answers, Sequence):
        raise TypeError(f"answers: {type(answers).__name__}, expected a sequence of str")
    if not answers:
        raise ValueError("answers: none given, expected at least one")
    for place, answer in enumerate(answers):
        if not isinstance(answer, str):
            raise TypeError(f"answers[{place}]: {type(answer).__name__}, expected str")


@cache
def _rouge_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer  # takes a second, and not every use needs it

    return RougeScorer(["rougeL"], use_stemmer=False)


def _published_recall(prediction: str, answer: str) -> float:
    own, gold = _sentences(prediction), _sentences(answer)
    if not any(any(sentence) for sentence in own) or not gold:
        return 0.0
    words = {word for sentence in gold for word in sentence}
    found = {word for left in gold for right in own for word in _common(left, right)}
    return len(found) / len(words)


def _sentences(text: str) -> list[list[str]]:
    # What is between two dots and only blanks is, as published, a sentence of one empty word.
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _common(left: Sequence[str], right: Sequence[str]) -> list[str]:
    """The words of a longest common subsequence; of several, the one that the published code takes:
    walking back from the ends, `right` gets shorter first when both ways are equally good."""
    length = [[0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i, word in enumerate(left, start=1):
        above, row = length[i - 1], length[i]
        for j, other in enumerate(right, start=1):
            row[j] = above[j - 1] + 1 if word == other else max(above[j], row[j - 1])
    found: list[str] = []
    i, j = len(left), len(right)
    while i and j:
        if left[i - 1] == right[j - 1]:
            found.append(left[i - 1])
            i, j = i - 1, j - 1
        elif length[i - 1][j] > length[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found


def _split(text: str) -> list[str]:
    """Words of a text after the normalisation of `match` and the Treebank word rules."""
    kept = "".join(
        character
        for character in text.lower()
        if not unicodedata.category(character).startswith("P")
    )
    plain = normalise(kept)
    return TREEBANK_PAIRS.sub(
        lambda pair: " ".join(part for part in pair.groups() if part), plain
    ).split()


def _set_f1(own: frozenset[str], gold: frozenset[str]) -> float:
    shared = len(own & gold)
    return 2.0 * shared / (len(own) + len(gold)) if shared else 0.0


def _token_f1(prediction: str, answer: str, closed: bool) -> float:
    own, gold = normalise(prediction), normalise(answer)
    if closed and own != gold and (own in CLOSED_ANSWERS or gold in CLOSED_ANSWERS):
        return 0.0
    own_tokens, gold_tokens = own.split(), gold.split()
    shared = sum((Counter(own_tokens) & Counter(gold_tokens)).values())
    return 2.0 * shared / (len(own_tokens) + len(gold_tokens)) if shared else 0.0


def _ratio(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(bottom == 0.0, np.nan, top / bottom)
