"""What tests of the harness share: records, a fake method, a log as it was written."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvcomm.methods import Bench, Item, Method, Outcome, Seconds
from kvcomm.records import RECORDS
from kvcomm.tasks import Example, find

FIELDS = [
    "id", "index", "method", "settings", "prompt_sha256", "question", "answer", "token_ids", "gold",
    "match", "f1", "em", "rouge_l_recall", "rouge_l_f", "published_rouge_l", "accuracy", "nll",
    "n_gold_tokens", "message_bytes", "receiver_tokens", "cut_tokens", "seconds",
]  # fmt: skip

TASK = replace(find("hotpotqa"), max_new_tokens=4)


def example(number: int, context: str = "The red boat is on the lake") -> Example:
    return Example(f"r{number}", number, f"{context} {number}.", f"Which boat {number}?", ("boat",))


EXAMPLES = [example(n) for n in range(7)]


@dataclass(frozen=True)
class Fake(Method):
    """Says what it is told to; nll is a function of the item's number."""

    label: str = "fake"
    nll: Callable[[int], float] = lambda number: float(number)
    broken: frozenset[int] = frozenset()
    stop_at: int | None = None
    says: str = "boat"
    seen: list[int] = field(default_factory=list, compare=False)

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.label.split()[0]

    def run(self, bench: Bench, items: Sequence[Item]) -> list[Outcome]:
        outcomes = []
        for item in items:
            if item.number == self.stop_at:
                raise KeyboardInterrupt
            if item.number in self.broken:
                raise ArithmeticError(f"item {item.number}\nis broken")
            outcomes.append(
                Outcome(
                    answer=f"{self.says} {item.number}",
                    token_ids=(1, item.number),
                    nll=self.nll(item.number),
                    n_gold_tokens=2,
                    message_bytes=10 * item.number,
                    receiver_tokens=len(item.receiver),
                    cut_tokens=0,
                    seconds=Seconds(0.5, 0.0, None, 1.0),
                    prompts=(item.receiver,),
                )
            )
        self.seen.extend(item.number for item in items)
        return outcomes


def lines(folder: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (folder / RECORDS).read_text("ascii")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def timeless(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k != "seconds"} for record in records]


def variant_and_record(line: dict[str, Any]) -> tuple[str, float, str]:
    return line["method"], line["settings"].get("ratio") or 0.0, line["id"]
