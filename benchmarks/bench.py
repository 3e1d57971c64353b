"""All benchmarks of the suite on all models, with their results, table and plots in one folder.

Runs each script as a process of its own, one after another, and keeps what it printed: for each
model and weight type `bench-MODEL-DTYPE.jsonl`, and from all of them `bench.md` (command, machine,
commit, what the scripts said of peers and of the machine, every line) and a plot per question,
`bench-NAME.svg`. A script that fails is named at the end and the status says so; what others
printed is kept.

    python benchmarks/bench.py                    # both models, f32 and bf16: hours
    python benchmarks/bench.py --quick            # every script in two minutes at most
    python benchmarks/bench.py --tables           # table and plots again, from what is there

Arguments after -- go to every script, such as -- --peers none.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SCRIPTS = (
    "limits", "prefill", "decode", "batch", "handover", "calibrate", "evaluate", "load", "memory",
)  # fmt: skip
MODELS = "smollm2-135m,qwen2.5-coder-0.5b"

#: Scripts of which a model with random weights, that has no tokenizer, is capable.
IDS_ONLY = tuple(name for name in SCRIPTS if name != "evaluate")

#: What the lines in a folder were made with, and how a script's own words begin.
ABOUT, NOTE = "bench.json", "benchmarks: "

Row = dict[str, Any]


def commit() -> str:
    """The commit that is measured, and whether the tree differs from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    found = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def run(
    script: str, model: str, dtype: str, arguments: Sequence[str]
) -> subprocess.CompletedProcess[str]:
    """Runs a script; shows what it printed."""
    command = [sys.executable, str(HERE / f"{script}.py"), "--model", model, "--dtype", dtype]
    command += ["--json", *arguments]
    print(shlex.join([f"benchmarks/{script}.py", *command[2:]]), flush=True)
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stderr, end="", file=sys.stderr, flush=True)
    print(done.stdout, end="", flush=True)
    return done


def file_of(out: Path, model: str, dtype: str) -> Path:
    return out / f"bench-{Path(model).name.replace(':', '-')}-{dtype}.jsonl"


def read(out: Path) -> list[Row]:
    """All lines in the folder."""
    files = sorted(out.glob("bench-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


# ---- what is made of them ----


def table(rows: Iterable[Row]) -> str:
    """Every line, as Markdown."""
    header = ("model", "weights", "threads", "what", "figure", "of limit", "peers", "spread")
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    for row in rows:
        share = "" if row["limit_share"] is None else f"{row['limit_share']:.0%}"
        peers = ", ".join(f"{ratio:.2f}x {name}" for name, ratio in row["peers"].items())
        cells = (
            row["model"],
            row["dtype"],
            str(row["threads"]),
            row["name"],
            f"{row['value']:.4g} {row['unit']}",
            share,
            peers,
            f"{row['spread']:.0%}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


#: Lines of the short table.
HEADLINES = ("prefill 512", "decode after 128", "batch 16 decode")


def performance(rows: Iterable[Row]) -> str:
    """A row per model and weight type, as Markdown: the lines that most people ask for."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        if row["name"] in HEADLINES:
            peers = "".join(f", {ratio:.1f}x {name}" for name, ratio in row["peers"].items())
            cell = f"{row['value']:.4g} {row['unit']}, {row['limit_share']:.0%} of the limit{peers}"
            found.setdefault((row["model"], row["dtype"]), {})[row["name"]] = cell
    lines = ["| " + " | ".join(("model", "weights", *HEADLINES)) + " |"]
    lines.append("|" + " --- |" * (2 + len(HEADLINES)))
    for names, cells in found.items():
        lines.append("| " + " | ".join((*names, *(cells.get(n, "-") for n in HEADLINES))) + " |")
    return "\n".join(lines)


#: Plot -> (how the names of its lines begin, before the number on its axis; what that counts).
PLOTS = {
    "prefill": ("prefill ", "tokens of the prompt"),
    "decode": ("decode after ", "tokens of context"),
    "batch": ("batch ", "sequences"),
}


def points(rows: Iterable[Row], beginning: str) -> dict[str, list[tuple[int, Row]]]:
    """Series -> (number in the name, line)."""
    found: dict[str, list[tuple[int, Row]]] = {}
    for row in rows:
        if not row["name"].startswith(beginning):
            continue
        number, _, rest = row["name"].removeprefix(beginning).partition(" ")
        label = " ".join(word for word in (row["model"], row["dtype"], rest) if word)
        found.setdefault(label, []).append((int(number), row))
    return {label: sorted(pairs, key=lambda pair: pair[0]) for label, pairs in found.items()}


def plot(rows: Sequence[Row], beginning: str, axis: str) -> str | None:
    """An SVG: shares of the limit on the left, ratios to peers on the right."""
    from matplotlib.figure import Figure

    from kvcomm.plots import svg

    series = points(rows, beginning)
    if not series:
        return None
    figure = Figure(figsize=(10, 4), layout="constrained")
    shares, ratios = figure.subplots(1, 2)
    for label, pairs in series.items():
        numbers = [number for number, _ in pairs]
        shares.plot(numbers, [row["limit_share"] for _, row in pairs], "o-", label=label)
        for name in sorted({name for _, row in pairs for name in row["peers"]}):
            held = [(number, row["peers"][name]) for number, row in pairs if name in row["peers"]]
            ratios.plot(*zip(*held, strict=True), "o-", label=f"{label}, {name}")
    for axes, title in ((shares, "share of the machine's limit"), (ratios, "times as fast as")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel(axis)
        axes.set_ylabel(title)
        axes.axhline(1.0, color="#666666", linewidth=0.8)
        axes.set_ylim(bottom=0)
        if axes.lines[:-1]:
            axes.legend(fontsize=7)
    return svg(figure)


def describe(out: Path, words: Sequence[str], notes: Iterable[str]) -> None:
    """bench.json: what the lines in the folder were made with."""
    from kvcomm import environment

    # Paths say where files lie on one machine; their names say which they are.
    shown = [re.sub("[^,=]*/", "", word) for word in words]
    made = {
        "command": shlex.join(["python", "benchmarks/bench.py", *shown]),
        "commit": commit(),
        "machine": environment.machine(),
        "notes": list(dict.fromkeys(notes)),
    }
    (out / ABOUT).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def write(out: Path) -> None:
    """bench.md and the plots, from what is in the folder."""
    from kvcomm.packet import write_whole

    rows, made = read(out), json.loads((out / ABOUT).read_text(encoding="utf-8"))
    notes = "".join(f"- {note}\n" for note in made["notes"])
    text = (
        f"# Benchmarks\n\n    {made['command']}\n\ncommit {made['commit']}, "
        f"{json.dumps(made['machine'])}\n\n{notes}\n{table(rows)}\n"
    )
    write_whole(out / "bench.md", text.encode())
    for name, (beginning, axis) in PLOTS.items():
        drawn = plot(rows, beginning, axis)
        if drawn is not None:
            write_whole(out / f"bench-{name}.svg", drawn.encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=MODELS, help=f"by comma (default {MODELS})")
    parser.add_argument("--dtypes", default="f32,bf16", help="by comma (default f32,bf16)")
    parser.add_argument("--scripts", default=",".join(SCRIPTS), help="by comma (default all)")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:cut])
    further = [*(["--quick"] if arguments.quick else []), *words[cut + 1 :]]
    scripts = arguments.scripts.split(",")
    unknown = [name for name in scripts if name not in SCRIPTS]
    if unknown:
        parser.error(f"--scripts: {unknown[0]!r} is none of {', '.join(SCRIPTS)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    failed, notes = [], []
    for model in () if arguments.tables else arguments.models.split(","):
        for dtype in arguments.dtypes.split(","):
            able = IDS_ONLY if model.startswith("random:") else SCRIPTS
            lines = []
            for script in (name for name in scripts if name in able):
                done = run(script, model, dtype, further)
                lines.append(done.stdout)
                said = done.stderr.splitlines()
                notes += [line.removeprefix(NOTE) for line in said if line.startswith(NOTE)]
                if done.returncode:
                    failed.append(f"{script} {model} {dtype}: status {done.returncode}")
            file_of(arguments.out, model, dtype).write_text("".join(lines), encoding="utf-8")
    if not arguments.tables:
        describe(arguments.out, words, notes)
    write(arguments.out)
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
