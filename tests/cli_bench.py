"""What tests of the command line share: records, and an evaluation's words."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def record(number: int) -> dict[str, Any]:
    """One record in HotpotQA's own layout."""
    return {
        "_id": f"q{number}",
        "question": f"Who owns the boat {number}?",
        "answer": ["Ann", "Bo", "yes"][number % 3],
        "supporting_facts": [["Boat", 0], ["Owner", 1]],
        "context": [
            ["Boat", [f"The boat {number} is red.", " It is old."]],
            ["Owner", ["Ann is a baker.", f" Ann owns boat {number}."]],
        ],
    }


def evaluation(
    model: str, data: Path, out: Path, ratios: Sequence[str] = ("--ratio", "0.5,1")
) -> list[Any]:
    return [
        "eval", "--model", model, "--task", "hotpotqa", "--data", data, *ratios,
        "--max-new-tokens", 3, "--out", out,
    ]  # fmt: skip
