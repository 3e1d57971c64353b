"""Make `lemmas.json.gz` from WordNet 3.0 and the English averaged perceptron tagger.

    python -m kvcomm.lexicon.build WORDNET_FOLDER TAGGER_FOLDER OUTPUT

WORDNET_FOLDER holds `index.*` and `*.exc` of WordNet 3.0; TAGGER_FOLDER the three files
`averaged_perceptron_tagger_eng.{weights,tagdict,classes}.json`. Kept: base forms and
irregular forms that a word without punctuation can reach, and the tagger's features of a
word that has no neighbours; the features that are equal for all such words are summed into
one constant. The same input gives the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

FILES = {"n": "noun", "v": "verb", "a": "adj", "r": "adv"}
START, START_2, END, END_2 = "-START-", "-START2-", "-END-", "-END2-"
CONSTANT = (
    "bias",
    f"i-1 tag {START}",
    f"i-2 tag {START_2}",
    f"i tag+i-2 tag {START} {START_2}",
    f"i-1 word {START_2}",
    f"i-1 suffix {START_2[-3:]}",
    f"i-2 word {START}",
    f"i+1 word {END}",
    f"i+1 suffix {END[-3:]}",
    f"i+2 word {END_2}",
)
PREFIXES = {
    "i suffix ": "suffix",
    "i pref1 ": "first",
    "i word ": "word",
    f"i-1 tag+i word {START} ": "word",
}


def read_wordnet(folder: Path) -> dict[str, dict]:
    """Base forms and irregular forms of one-word entries without punctuation."""
    words: dict[str, str] = {}
    irregular: dict[str, dict[str, list[str]]] = {}
    for part, name in FILES.items():
        lines = (folder / f"index.{name}").read_text("utf-8").splitlines()
        entries = {line.split(" ", 1)[0] for line in lines if not line.startswith(" ")}
        words[part] = " ".join(sorted(entry for entry in entries if entry.isalnum()))
        lines = (folder / f"{name}.exc").read_text("utf-8").splitlines()
        pairs = (line.split() for line in lines)
        irregular[part] = {form: bases for form, *bases in pairs if form.isalnum()}
    return {"words": words, "irregular": irregular}


def read_tagger(folder: Path) -> dict[str, object]:
    """The tagger cut down to what a lone word can use, in whole thousandths."""

    def read(name: str) -> object:
        return json.loads((folder / f"averaged_perceptron_tagger_eng.{name}.json").read_text())

    weights, known, tags = read("weights"), read("tagdict"), sorted(read("classes"))
    index = {tag: place for place, tag in enumerate(tags)}
    constant = [0] * len(tags)
    for feature in CONSTANT:
        for tag, weight in weights.get(feature, {}).items():
            constant[index[tag]] += round(weight * 1000)
    tables: dict[str, dict] = {name: defaultdict(dict) for name in ("suffix", "first", "word")}
    for feature, row in weights.items():
        for prefix, name in PREFIXES.items():
            value = feature.removeprefix(prefix)
            if value == feature or not _reachable(value):
                continue
            sums = tables[name][value]
            for tag, weight in row.items():
                sums[index[tag]] = sums.get(index[tag], 0) + round(weight * 1000)
    return {
        "tags": tags,
        "constant": constant,
        **{name: _flatten(table) for name, table in tables.items()},
        "known": {word: known[word] for word in sorted(known) if _reachable(word)},
    }


def _reachable(value: str) -> bool:
    """Whether a lower-case word without punctuation can have this feature."""
    if value in ("!YEAR", "!DIGITS"):
        return True
    return value == value.lower() and value.isalnum()


def _flatten(table: Mapping[str, Mapping[int, int]]) -> dict[str, list[int]]:
    return {
        value: [number for pair in sorted(row.items()) for number in pair]
        for value, row in sorted(table.items())
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="make lemmas.json.gz")
    parser.add_argument("wordnet", type=Path)
    parser.add_argument("tagger", type=Path)
    parser.add_argument("output", type=Path)
    given = parser.parse_args()
    table = {**read_wordnet(given.wordnet), **read_tagger(given.tagger)}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=True)
    given.output.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
