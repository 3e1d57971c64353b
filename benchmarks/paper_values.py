"""Makes kvcomm/reproduce/paper.json, the paper's printed values, from a transcript of its tables.

The transcript is a JSON file with one object per table (columns, rows of pair, method and values).
Kept are the numbers, under this project's names of tasks and methods, and which pair they are of.
Two printed columns (QASPER-E and MuSiQuest-E of Table 6) are left out: they look swapped.

    python benchmarks/paper_values.py ../shared/reference/paper_tables.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

OUT = Path(__file__).parents[1] / "kvcomm" / "reproduce" / "paper.json"

#: A column or a data set of the paper: this project's name of it.
TASKS = {
    "Countries": "countries", "Tipsheets": "tipsheets", "HotpotQA": "hotpotqa",
    "QASPER": "qasper", "MuSiQuest": "musique", "MultiFieldQA-en": "multifieldqa_en",
    "2WikiMQA": "2wikimqa", "TMATH": "tmath", "HotpotQA-E": "hotpotqa-e",
    "QASPER-E": "qasper-e", "MuSiQuest-E": "musique-e", "SAMSum": "samsum",
}  # fmt: skip
DOUBTFUL = {("6", "qasper-e"), ("6", "musique-e")}
TABLES = ("1", "2", "6", "8", "9", "10", "11")


def row_name(row: dict[str, Any]) -> str:
    """A row of the paper under this project's name: "KVComm (0.3)" is "kvcomm 0.3"."""
    name = row["method"].lower().replace("kvcomm-s (", "shift back (")
    name = name.replace("(", "").replace(")", "")
    return f"{name} two senders" if row.get("senders_used") == "s1+s2" else name


def compact(document: dict[str, Any]) -> dict[str, Any]:
    """What paper.json holds."""
    tables = {table["table"]: table for table in document["tables"]}
    published: dict[str, Any] = {}
    for number in TABLES:
        table = tables[f"Table {number}"]
        by_pair: dict[str, dict[str, dict[str, float]]] = {}
        for row in table["rows"]:
            values = {TASKS[name]: value for name, value in row["values"].items()}
            kept = {k: v for k, v in values.items() if (number, k) not in DOUBTFUL}
            by_pair.setdefault(str(row["pair"]), {})[row_name(row)] = kept
        published[number] = by_pair
    settings = tables["Hyper-parameters (Appendix B.2, H, I)"]["rows"]
    return {
        "source": f"{document['paper']}; values as printed in its tables",
        "pairs": {
            number: {"sender": pair["sender"], "receiver": pair["receiver"]}
            for number, pair in document["pairs"].items()
        },
        "records": {
            TASKS[row["dataset"]]: row["values"]["size"] for row in tables["Tables 4 and 7"]["rows"]
        },
        "settings": [
            {"pairs": row["pair"], "method": row["method"], **row["values"]} for row in settings
        ],
        "tables": published,
    }


def layout(value: Any, depth: int = 0) -> str:
    """JSON with a line for each innermost object or list."""
    inner = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(inner, list) or not any(isinstance(one, dict | list) for one in inner):
        return json.dumps(value)
    names = [f"{json.dumps(name)}: " for name in value] if isinstance(value, dict) else [""] * 99
    pad = "\n" + " " * (depth + 1)
    lines = [pad + name + layout(one, depth + 1) for name, one in zip(names, inner, strict=False)]
    left, right = "{}" if isinstance(value, dict) else "[]"
    return f"{left}{','.join(lines)}\n{' ' * depth}{right}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("transcript", type=Path)
    document = compact(json.loads(parser.parse_args().transcript.read_text(encoding="utf-8")))
    OUT.write_text(layout(document) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
