"""What each benchmark line is to reach, and whether it does. Owns that table.

A line reaches its target when its share of the limit, its ratio to each peer that was measured, and
its value do, as far as it names them. What the limit of a line is, the script that prints it says.
Targets that were met with room have been raised; what was asked for at first stands with them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import cells

Row = dict[str, Any]

TRANSFORMERS = ("transformers", "transformers-4.53.3")


@dataclass(frozen=True)
class Target:
    """lines: names of lines. share: of the limit at least. peers: ratio at least. most: value."""

    what: str
    lines: tuple[str, ...]
    share: float | None = None
    peers: dict[str, float] = field(default_factory=dict)
    most: float | None = None

    def text(self) -> str:
        """What is wanted, in words."""
        wanted = [] if self.share is None else [f"{self.share:.0%} of the limit"]
        wanted += [f"{ratio:g}x {name}" for name, ratio in self.peers.items()]
        return ", ".join(wanted if self.most is None else [*wanted, f"at most {self.most:g}"])

    def missed(self, row: Row) -> list[str]:
        """What a line does not reach."""
        found = []
        if self.share is not None and row["limit_share"] < self.share:
            found.append("limit")
        found += [n for n, r in self.peers.items() if n in row["peers"] and row["peers"][n] < r]
        if self.most is not None and row["value"] > self.most:
            found.append("value")
        return found

    def verdict(self, row: Row) -> str:
        """Whether a line reaches it, and which peers nobody has asked."""
        missed = self.missed(row)
        parts = [f"not by {', '.join(missed)}" if missed else "yes"]
        unknown = [name for name in self.peers if name not in row["peers"]]
        return "; ".join(parts + ([f"{', '.join(unknown)} not measured"] if unknown else []))


TARGETS = (
    Target(
        "prefill, 512 tokens and more",
        ("prefill 512", "prefill 2048", "prefill 8192"),
        0.85,
        dict.fromkeys(TRANSFORMERS, 1.3) | {"llama.cpp": 1.2},
    ),
    Target("attention at 8192 tokens (first 60%)", ("attention 8192",), 0.80),
    Target(
        "decode, one sequence", ("decode after 128", "decode after 4096"), 0.85, {"llama.cpp": 1.0}
    ),
    Target(
        "decode, 4 / 16 / 64 sequences",
        ("batch 4 decode", "batch 16 decode", "batch 64 decode"),
        0.80,
    ),
    # Of 100 records, of which one may calibrate; of 20 where the published code would take hours.
    Target(
        "kvcomm eval, hotpotqa",
        ("evaluate 100", "evaluate 99", "evaluate 20"),
        peers={"published": 10.0},
    ),
    Target("first token with a packet", ("first token",), 1 / 1.2),
    Target("sender early exit (first 91%)", ("sender half",), 1.0),
    Target("calibration tap (first 95%)", ("tap 32", "tap 512"), 0.98),
    Target("merge, microseconds (first 100)", ("merge into 1", "merge into 10"), most=20.0),
    Target("memory", ("peak 2048",), 1 / 1.1),
    Target("load, 0.5B", ("load",), most=0.5),
)


def table(rows: Iterable[Row]) -> str:
    """A row per target, model, weights and line, as Markdown."""
    header = ("target", "wanted", "model", "weights", "line", "figure", "of limit", "peers", "met")
    rows, filled = list(rows), []
    for target in TARGETS:
        for row in (row for row in rows if row["name"] in target.lines):
            words = (target.what, target.text(), row["model"], row["dtype"], row["name"])
            found = (cells.figure(row), cells.share(row), cells.peers(row))
            filled.append((*words, *found, target.verdict(row)))
    return cells.markdown(header, filled)
