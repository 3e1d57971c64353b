"""The data of a command: its options."""

import argparse
from typing import Any


def add_data(parser: argparse.ArgumentParser) -> None:
    """The task, its records, and what of them the sender reads."""
    group = parser.add_argument_group("data")
    group.add_argument(
        "--task", required=True,
        help="hotpotqa, qasper, musique, 2wikimqa, multifieldqa_en, countries, tipsheets, tmath, "
        "samsum or mmlu",
    )  # fmt: skip
    group.add_argument(
        "--data", required=True, metavar="FILE",
        help="the records: JSON, JSON lines, Parquet (for mmlu also CSV); where there is no such "
        "file, ORG/NAME[:CONFIG][:SPLIT] of the hub",
    )  # fmt: skip
    group.add_argument(
        "--context", choices=("gold", "full"),
        help="what the sender reads: the supporting sentences only, or all there is (default: as "
        "published for the task)",
    )  # fmt: skip


def add_amount(parser: Any, each: str = "") -> None:
    """`--limit` and `--batch-size`. each: what has so many records at most."""
    parser.add_argument("--limit", type=int, metavar="N", help=f"score at most N records{each}")
    parser.add_argument(
        "--batch-size", type=int, default=8, metavar="B",
        help="records at a time (default 8); changes times, never results",
    )  # fmt: skip
