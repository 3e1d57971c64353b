"""What the paper printed: values of its tables, sizes of its data sets, its settings.

The values are in paper.json, which benchmarks/paper_values.py makes. Owns which of the paper's
pairs of models stands beside a user's pair. Figures of the paper have no printed numbers.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

#: Ending of the names of the larger sets of Tables 6 and 7.
LARGER = "-e"

#: Pairs of the paper by kind of model, closest first: (one model to itself, two fine-tunes).
CLOSEST = {
    "llama": (("2", "1", "6", "5", "9"), ("6", "5", "9", "2", "1")),
    "qwen": (("3", "7"), ("7", "3")),
    "falcon": (("4", "8"), ("8", "4")),
}


@cache
def _document() -> dict[str, Any]:
    text = Path(__file__).with_name("paper.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def records() -> dict[str, int]:
    """Number of records of each data set (Tables 4 and 7), by name of the task."""
    return dict(_document()["records"])


def settings() -> list[dict[str, Any]]:
    """The hyper-parameters of the appendices."""
    return [dict(one) for one in _document()["settings"]]


def pairs() -> dict[str, dict[str, str]]:
    """Sender and receiver of each pair (Table 5)."""
    return dict(_document()["pairs"])


def check_pair(pair: str) -> None:
    """Raises ValueError for a pair that the paper does not have."""
    if pair not in pairs():
        raise ValueError(f"paper pair: expected one of {', '.join(pairs())}, found {pair!r}")


def family(names: Sequence[str]) -> str:
    """The family of models, a key of `CLOSEST`, by their names and types."""
    text = " ".join(names).lower()
    return next((name for name in ("qwen", "falcon") if name in text), "llama")


def closest_pair(numbers: Sequence[str], names: Sequence[str], same_model: bool) -> str | None:
    """The pair whose values stand beside those of a user's models.

    numbers: of the tables looked at; names: of the user's models and their types. The pair of the
    same family that a table prints, of the same relation where there is one; else a Llama pair,
    which most tables have. None when the tables print neither.
    """
    printed = {pair for number in numbers for pair in _document()["tables"].get(number, {})}
    relation = 0 if same_model else 1
    order = (*CLOSEST[family(names)][relation], *CLOSEST["llama"][relation])
    return next((pair for pair in order if pair in printed), None)


def value(numbers: Sequence[str], pair: str | None, row: str, task: str) -> float | None:
    """A printed value; None where the tables have none.

    row: a name such as "kvcomm 0.3". A larger set of a task ("hotpotqa-e") stands for the task in
    the tables that have it.
    """
    for number in numbers:
        values = _document()["tables"].get(number, {}).get(pair, {}).get(row, {})
        for name in (task, f"{task}{LARGER}"):
            if name in values:
                return float(values[name])
    return None
