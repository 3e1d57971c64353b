"""All benchmarks of the suite on all models, with their results, table and plots in one folder.

Runs each script as a process of its own, one after another, and keeps what it printed at once, so
that one can stop and go on: `bench.json` has per run (script, model, weights) its command, commit,
machine, load, seconds, what was said of peers, and its lines. From it are made `bench.md`, which
has the targets of `targets.py` filled in, and a plot per question, `bench-NAME.svg`. A run takes
the place of an earlier one of the same script, model and weights. A script that fails is named at
the end and the status says so.

    python benchmarks/bench.py                    # both models, f32 and bf16: hours
    python benchmarks/bench.py --missing          # what is not there yet
    python benchmarks/bench.py --quick            # every script short, into build/quick
    python benchmarks/bench.py --tables           # table and plots again, from what is there

Arguments after -- go to every script, such as -- --peers none.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import cells

HERE = Path(__file__).resolve().parent
SCRIPTS = (
    "limits", "prefill", "decode", "batch", "handover", "calibrate", "evaluate", "load", "memory",
    "phases",
)  # fmt: skip
MODELS = "smollm2-135m,qwen2.5-coder-0.5b"

#: Scripts of which a model with random weights, that has no tokenizer, is capable.
IDS_ONLY = tuple(name for name in SCRIPTS if name != "evaluate")

#: The runs in a folder, and how a script's own words begin.
RUNS, NOTE = "bench.json", "benchmarks: "

Row = dict[str, Any]
Run = dict[str, Any]


def commit() -> str:
    """The commit that is measured, and whether the tree, less its results, differs from it."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=HERE.parent, capture_output=True, text=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + ("-dirty" if changed else "")


def measure(script: str, model: str, dtype: str, arguments: Sequence[str]) -> Run:
    """Runs a script; shows what it printed."""
    from kvcomm import environment

    words = ["--model", model, "--dtype", dtype, *arguments]
    command = f"python benchmarks/{script}.py {shown(words)}"
    print(command, flush=True)
    load, start = os.getloadavg()[0], time.perf_counter()
    done = subprocess.run(
        [sys.executable, str(HERE / f"{script}.py"), *words, "--json"],
        capture_output=True,
        text=True,
    )
    print(done.stderr, end="", file=sys.stderr, flush=True)
    print(done.stdout, end="", flush=True)
    said = done.stderr.splitlines()
    return {
        "script": script,
        "model": Path(model).name,
        "dtype": dtype,
        "command": command,
        "commit": commit(),
        "machine": environment.machine(),
        "load_before": round(load, 2),
        "seconds": round(time.perf_counter() - start),
        "status": done.returncode,
        "notes": [line.removeprefix(NOTE) for line in said if line.startswith(NOTE)],
        "lines": [json.loads(line) for line in done.stdout.splitlines()],
    }


def shown(words: Sequence[str]) -> str:
    """Arguments without folders, which say where files lie on one machine."""
    return shlex.join(re.sub("[^,=]*/", "", word) for word in words)


def key(run: Run) -> tuple[str, str, str]:
    return run["model"], run["dtype"], run["script"]


def read(out: Path) -> list[Run]:
    """The runs in a folder."""
    path = out / RUNS
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def keep(out: Path, run: Run) -> None:
    """Put a run into the folder, in place of an earlier one of its kind."""
    from kvcomm.packet import write_whole

    runs = {key(one): one for one in [*read(out), run]}
    text = json.dumps(list(runs.values()), indent=1) + "\n"
    write_whole(out / RUNS, text.encode())


def lines_of(runs: Iterable[Run]) -> list[Row]:
    """All lines."""
    return [line for run in runs for line in run["lines"]]


# ---- what is made of them ----


def phases(runs: Iterable[Run]) -> str:
    """Where the time goes, as Markdown: a row per work, model and weights, a column per phase."""
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in lines_of(run for run in runs if run["script"] == "phases"):
        work, _, phase = row["name"].partition(": ")
        held = found.setdefault((work, row["model"], row["dtype"]), {})
        held[phase] = f"{row['value']:.0f}%"
    columns = list(dict.fromkeys(phase for held in found.values() for phase in held))
    return cells.markdown(
        ("work", "model", "weights", *columns),
        [(*names, *(held.get(c, "") for c in columns)) for names, held in sorted(found.items())],
    )


def table(rows: Iterable[Row]) -> str:
    """Every line, as Markdown."""
    header = ("model", "weights", "threads", "what", "figure", "of limit", "peers", "spread")
    return cells.markdown(
        header,
        [
            (
                row["model"],
                row["dtype"],
                str(row["threads"]),
                row["name"],
                cells.figure(row),
                cells.share(row),
                cells.peers(row),
                f"{row['spread']:.0%}",
            )
            for row in rows
        ],
    )


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


def about(runs: Iterable[Run]) -> str:
    """Commands, commits, machines and what was said, as Markdown."""
    groups: dict[str, list[str]] = {}
    for run in runs:
        place = f"commit {run['commit']}, {json.dumps(run['machine'])}"
        load = f"load before it {run['load_before']}"
        line = f"    {run['command']}    # {run['seconds']} s, {load}"
        groups.setdefault(place, []).append(line)
    notes = dict.fromkeys(f"- {note}" for run in runs for note in run["notes"])
    parts = [f"{place}:\n\n" + "\n".join(lines) for place, lines in groups.items()]
    return "\n\n".join([*parts, "\n".join(notes)])


def write(out: Path) -> None:
    """bench.md and the plots, from what is in the folder."""
    import targets

    from kvcomm.packet import write_whole

    runs = read(out)
    rows = lines_of(run for run in runs if run["script"] != "phases")
    parts = [
        "# Benchmarks",
        "## Targets",
        targets.table(rows),
        "## Every line",
        table(rows),
        "## Shares of the threads' time",
        phases(runs),
        "## How it was made",
        about(runs),
    ]
    write_whole(out / "bench.md", ("\n\n".join(parts).strip() + "\n").encode())
    for name, (beginning, axis) in PLOTS.items():
        drawn = plot(rows, beginning, axis)
        if drawn is not None:
            write_whole(out / f"bench-{name}.svg", drawn.encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=MODELS, help=f"by comma (default {MODELS})")
    parser.add_argument("--dtypes", default="f32,bf16", help="by comma (default f32,bf16)")
    parser.add_argument("--scripts", default=",".join(SCRIPTS), help="by comma (default all)")
    parser.add_argument("--missing", action="store_true", help="only runs that are not there")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, help="default benchmarks/results, or build/quick")
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:cut])
    further = [*(["--quick"] if arguments.quick else []), *words[cut + 1 :]]
    scripts = arguments.scripts.split(",")
    unknown = [name for name in scripts if name not in SCRIPTS]
    if unknown:
        parser.error(f"--scripts: {unknown[0]!r} is none of {', '.join(SCRIPTS)}")
    if arguments.out is None:
        arguments.out = HERE.parent / "build" / "quick" if arguments.quick else HERE / "results"
    arguments.out.mkdir(parents=True, exist_ok=True)
    failed = []
    there = {key(run) for run in read(arguments.out) if not run["status"]}
    for model in () if arguments.tables else arguments.models.split(","):
        able = IDS_ONLY if model.startswith("random:") else SCRIPTS
        for dtype in arguments.dtypes.split(","):
            for script in (name for name in scripts if name in able):
                if arguments.missing and (Path(model).name, dtype, script) in there:
                    continue
                run = measure(script, model, dtype, further)
                keep(arguments.out, run)
                if run["status"]:
                    failed.append(f"{script} {model} {dtype}: status {run['status']}")
    write(arguments.out)
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
