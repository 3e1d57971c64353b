"""Lemmas of lone English words, as the published `match` metric takes them.

Owns the table `lemmas.json.gz` and its two lookups: the part of speech that an averaged
perceptron tagger gives a word standing alone, and WordNet's base form for that part of
speech. `build.py` makes the table; `LICENSE.txt` holds the terms of the two data sets it was
made from. Nothing is downloaded, and the table is read at the first use.

The table covers what can reach it: words without punctuation. Weights are whole thousandths
(as published, three decimals), so scores are exact and ties go to the later tag in
alphabetical order. It does not split or normalise text; that is `kvcomm.metrics`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

# First letter of a Penn Treebank tag -> WordNet part of speech; every other tag is a noun.
PARTS = {"J": "a", "N": "n", "V": "v", "R": "r"}

# WordNet's rules of detachment: ending -> replacement, tried in this order.
ENDINGS: Mapping[str, Sequence[tuple[str, str]]] = {
    "n": (
        ("s", ""),
        ("ses", "s"),
        ("ves", "f"),
        ("xes", "x"),
        ("zes", "z"),
        ("ches", "ch"),
        ("shes", "sh"),
        ("men", "man"),
        ("ies", "y"),
    ),
    "v": (
        ("s", ""),
        ("ies", "y"),
        ("es", "e"),
        ("es", ""),
        ("ed", "e"),
        ("ed", ""),
        ("ing", "e"),
        ("ing", ""),
    ),
    "a": (("er", ""), ("est", ""), ("er", "e"), ("est", "e")),
    "r": (),
}


@dataclass(frozen=True)
class Lexicon:
    """The table in memory.

    Attributes
    ----------
    words : mapping of part of speech to the set of base forms in WordNet 3.0
    irregular : mapping of part of speech to {inflected form: base forms}
    tags : the tagger's tags, in alphabetical order
    constant : score of each tag for any lone word, in thousandths [n_tags]
    suffix, first, word : {feature: (tag index, weight, tag index, weight, ...)} for the last
        three characters, the first character and the whole word
    known : {word: tag} of the words the tagger does not score
    """

    words: Mapping[str, frozenset[str]]
    irregular: Mapping[str, Mapping[str, Sequence[str]]]
    tags: Sequence[str]
    constant: Sequence[int]
    suffix: Mapping[str, Sequence[int]]
    first: Mapping[str, Sequence[int]]
    word: Mapping[str, Sequence[int]]
    known: Mapping[str, str]


@lru_cache(maxsize=1)
def load() -> Lexicon:
    """Read the table that travels with the package; the same object at every call."""
    packed = resources.files(__package__).joinpath("lemmas.json.gz").read_bytes()
    table = json.loads(gzip.decompress(packed))
    table["words"] = {part: frozenset(text.split()) for part, text in table["words"].items()}
    return Lexicon(**table)


def tag(word: str) -> str:
    """The Penn Treebank tag the averaged perceptron gives a word standing alone."""
    if not word:
        raise ValueError("word: empty, expected at least one character")
    lexicon = load()
    if word in lexicon.known:
        return lexicon.known[word]
    scores = list(lexicon.constant)
    features = (
        lexicon.suffix.get(word[-3:], ()),
        lexicon.first.get(word[0], ()),
        lexicon.word.get(_fold(word), ()),
    )
    for weights in features:
        for place in range(0, len(weights), 2):
            scores[weights[place]] += weights[place + 1]
    best = max(range(len(scores)), key=lambda index: (scores[index], index))
    return lexicon.tags[best]


def part_of_speech(word: str) -> str:
    """`a`, `n`, `v` or `r` for a word standing alone."""
    return PARTS.get(tag(word)[0], "n")


@lru_cache(maxsize=1 << 16)
def lemmatise(word: str) -> str:
    """The shortest WordNet base form of a lone word; the word itself where there is none."""
    lexicon = load()
    part = part_of_speech(word)
    bases = lexicon.irregular[part].get(word)
    if bases is None:
        bases = [
            word[: -len(ending)] + new for ending, new in ENDINGS[part] if word.endswith(ending)
        ]
    found = [form for form in (word, *bases) if form in lexicon.words[part]]
    return min(found, key=len) if found else word


def _fold(word: str) -> str:
    """The tagger's own spelling classes for numbers and compounds, else lower case."""
    if "-" in word and word[0] != "-":
        return "!HYPHEN"
    if word.isdigit() and len(word) == 4:
        return "!YEAR"
    if word[0].isdigit():
        return "!DIGITS"
    return word.lower()
