"""Copies results into the README: every number on that page comes from a file in results/.

A block begins with `<!-- name ... -->` and ends with `<!-- end -->`; what is between is replaced.

    python benchmarks/readme.py          # --check: fail if the page is not up to date
"""

import argparse
import json
import re
import sys
from pathlib import Path

import cells

RESULTS = Path(__file__).with_name("results")
REPRODUCTION = RESULTS / "reproduce-qwen2.5-coder-0.5b"
README = Path(__file__).parents[1] / "README.md"


def table(path: Path) -> list[dict[str, str]]:
    """The Markdown table of a file, a dict per row."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [[c.strip() for c in ln.strip("|").split("|")] for ln in lines if ln.startswith("|")]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def hotpotqa() -> str:
    """What every method recovered, a column for each run of hotpotqa.py."""
    runs = {path.stem: table(path) for path in sorted(RESULTS.glob("hotpotqa-*.md"), reverse=True)}
    names = [name.removeprefix("hotpotqa-").rpartition("-") for name in runs]
    rows = [["recovered", *(f"{model}, `{preset}`" for model, _, preset in names)]]
    for lines in zip(*runs.values(), strict=True):
        rows.append([lines[0]["method"], *(line["recovered"] for line in lines)])
    return cells.markdown(rows[0], rows[1:])


def methods() -> str:
    """The first table of the reproduction's main table, as `match`; without n and paper's value."""
    text = (REPRODUCTION / "table-1.md").read_text(encoding="utf-8")
    rows = re.search(r"^\|.*?(?=\n\n)", text, flags=re.DOTALL | re.MULTILINE)[0]
    return re.sub(r" n=\d+| \(paper [^)]*\)", "", rows)


def speed() -> str:
    """What speed.py printed with --json, a row per model and type."""
    header = ["model", "weights", "prefill, tokens/s", "of limit", "decode, tokens/s", "of limit"]
    found: dict[tuple[str, str], dict[str, dict]] = {}
    for line in (RESULTS / "speed.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found.setdefault((row["model"], row["dtype"]), {})[row["name"]] = row
    rows = [
        [model, dtype]
        + [f"{part[n][key]:{form}}" for n in ("prefill", "decode") for key, form in _SPEED]
        for (model, dtype), part in found.items()
    ]
    return cells.markdown(header, rows)


_SPEED = (("median", ".0f"), ("limit_share", ".0%"))


def decode() -> str:
    """What decode.py printed: a row per model and weight type, peers beside each figure."""
    runs = json.loads((RESULTS / "bench.json").read_text(encoding="utf-8"))
    names = ("decode after 128", "decode after 4096")
    rows = [["model", "weights", *(f"{name}, tokens/s" for name in names)]]
    for run in runs:
        lines = {line["name"]: line for line in run["lines"]}
        if all(name in lines for name in names):
            first = lines[names[0]]
            found = [_beside_peers(lines[name]) for name in names]
            rows.append([first["model"], first["dtype"], *found])
    return cells.markdown(rows[0], rows[1:])


def _beside_peers(line: dict) -> str:
    return f"{line['value']:.0f} ({cells.share(line)}), {cells.peers(line, 1)}"


def parity() -> str:
    """Counts that parity.py wrote, a row per kind of comparison."""
    results = json.loads((RESULTS / "parity.json").read_text(encoding="utf-8"))
    models = list(results["models"])
    groups = list(dict.fromkeys(g for m in models for g in results["models"][m]["groups"]))
    rows = [["compared", *models]]
    for group in groups:
        counts = [results["models"][m]["groups"].get(group) for m in models]
        rows.append(
            [group, *("-" if c is None else f"{c['equal']} of {c['of']} equal" for c in counts)]
        )
    return cells.markdown(rows[0], rows[1:])


MAKERS = {
    "hotpotqa": hotpotqa,
    "methods": methods,
    "speed": speed,
    "decode": decode,
    "parity": parity,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    check = parser.parse_args().check
    text = README.read_text(encoding="utf-8")

    def fill(block: re.Match[str]) -> str:
        name, *arguments = block[1].split()
        return f"<!-- {block[1]} -->\n{MAKERS[name](*arguments)}\n<!-- end -->"

    filled = re.sub(r"<!-- ((?!end)[^>]*?) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL)
    if check and filled != text:
        sys.exit("README.md: differs from benchmarks/results; run benchmarks/readme.py")
    if not check:
        README.write_text(filled, encoding="utf-8")


if __name__ == "__main__":
    main()
