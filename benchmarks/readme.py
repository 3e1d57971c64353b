"""Copies results into the README and this folder's: their numbers come from files in results/.

A block begins with `<!-- name ... -->` and ends with `<!-- end -->`; what is between is replaced.

    python benchmarks/readme.py          # --check: fail if a page is not up to date
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import bench
import cells

RESULTS = Path(__file__).with_name("results")
REPRODUCTION = RESULTS / "reproduce-qwen2.5-coder-0.5b"
PAGES = (Path(__file__).parents[1] / "README.md", Path(__file__).with_name("README.md"))


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


def trade(name: str) -> str:
    """What a run of hotpotqa.py sent and prefilled, beside what it recovered."""
    wanted = ("recovered", "message", "prefilled")
    rows = [line for line in table(RESULTS / f"{name}.md") if "random" not in line["method"]]
    return cells.markdown(
        ("method", *wanted), [(line["method"], *(line[key] for key in wanted)) for line in rows]
    )


def methods() -> str:
    """The first table of the reproduction's main table, as `match`; without n and paper's value."""
    text = (REPRODUCTION / "table-1.md").read_text(encoding="utf-8")
    rows = re.search(r"^\|.*?(?=\n\n)", text, flags=re.DOTALL | re.MULTILINE)[0]
    return re.sub(r" n=\d+| \(paper [^)]*\)", "", rows)


#: Lines of the suite that most people ask for, all in tokens/s, and what the page calls them.
HEADLINES = {
    "prefill 512": "prefill of 512",
    "decode after 128": "decode after 128",
    "decode after 4096": "after 4096",
    "batch 16 decode": "of 16 sequences",
}


def performance() -> str:
    """What bench.py has kept: a row per model and weight type, peers beside each figure."""
    return short_table(bench.lines_of(bench.read(RESULTS)))


def short_table(rows: Iterable[bench.Row]) -> str:
    """The lines of `HEADLINES` that were measured, as Markdown."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        if row["name"] in HEADLINES:
            parts = (f"{row['value']:.0f} ({cells.share(row)})", cells.peers(row, 1))
            held = found.setdefault((row["model"], row["dtype"]), {})
            held[row["name"]] = ", ".join(part for part in parts if part)
    measured = [name for name in HEADLINES if any(name in held for held in found.values())]
    return cells.markdown(
        ("model", "weights", *(HEADLINES[name] for name in measured)),
        [(*names, *(held.get(n, "-") for n in measured)) for names, held in found.items()],
    )


def phases() -> str:
    """What phases.py has sampled."""
    return bench.phases(bench.read(RESULTS))


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
    "trade": trade,
    "methods": methods,
    "performance": performance,
    "phases": phases,
    "parity": parity,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    check = parser.parse_args().check
    stale = [page for page in PAGES if not renew(page, check)]
    if stale:
        names = ", ".join(str(page.relative_to(PAGES[0].parent)) for page in stale)
        sys.exit(f"{names}: not what benchmarks/results has; run benchmarks/readme.py")


def renew(page: Path, check: bool) -> bool:
    """Fill the blocks of a page, or only look; False: looked, and it is not up to date."""
    text = page.read_text(encoding="utf-8")

    def fill(block: re.Match[str]) -> str:
        name, *arguments = block[1].split()
        return f"<!-- {block[1]} -->\n{MAKERS[name](*arguments)}\n<!-- end -->"

    filled = re.sub(r"<!-- ((?!end)[^>]*?) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL)
    if not check:
        page.write_text(filled, encoding="utf-8")
    return filled == text or not check


if __name__ == "__main__":
    main()
