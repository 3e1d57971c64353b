"""HotpotQA: every method on the same records, one model as sender and receiver, both presets.

Runs `kvcomm eval` for each model and preset, calibrated on the first record of another file, and
writes for each run the table with its command, machine and wall time as Markdown into --out. A run
that was stopped goes on where it was; its wall time is then the sum of the parts, kept in the run's
folder. A run that is finished is not done again.

    python benchmarks/hotpotqa.py --data dev_distractor_100.jsonl \\
        --calibration train_distractor_100.jsonl --runs runs --out benchmarks/results
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

from kvcomm import environment, report
from kvcomm.records import write_json
from kvcomm.runs import read_run
from kvcomm.summary import summarise

RATIOS = "0.3,0.5,0.7"
STRATEGIES = "attention_gaussian,all,random"


def command_of(args: argparse.Namespace, model: str, preset: str, out: Path) -> list[str]:
    """The evaluation as a user would type it."""
    command = ["kvcomm", "eval", "--model", model, "--task", "hotpotqa", "--data", str(args.data)]
    command += ["--calibration", str(args.calibration), "--methods", "baseline,skyline,kvcomm"]
    command += ["--ratio", RATIOS, "--strategy", STRATEGIES, "--preset", preset, "--dtype", "f32"]
    command += ["--batch-size", str(args.batch_size), "--out", str(out)]
    return command + (["--limit", str(args.limit)] if args.limit else [])


def run(command: list[str], folder: Path) -> float:
    """Runs an evaluation; returns its wall time, to which parts of it that were stopped add theirs.

    A run with records that failed (status 1) still has a table, which counts them.
    """
    path = folder / "wall_seconds.json"
    before = json.loads(path.read_text()) if path.exists() else 0.0
    if (folder / "summary.json").exists():
        return before
    start, status = time.perf_counter(), None
    try:
        status = subprocess.run([sys.executable, "-m", *command]).returncode
    finally:
        total = before + time.perf_counter() - start
        if folder.is_dir():
            write_json(path, total)
    if status not in (0, 1):
        sys.exit(status)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--models", default="smollm2-135m,qwen2.5-coder-0.5b")
    parser.add_argument("--presets", default="paper,reference")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--batch-size", type=int, default=25)
    parser.add_argument("--runs", type=Path, required=True, help="folder for the runs themselves")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for model in args.models.split(","):
        for preset in args.presets.split(","):
            name = f"hotpotqa-{model}-{preset}"
            folder = args.runs / name
            command = command_of(args, model, preset, folder)
            seconds = run(command, folder)
            summary = summarise(*read_run(folder))
            # Paths say where the files lie on one machine; their names say which they are.
            shown = [Path(part).name if "/" in part else part for part in command]
            lines = [
                f"# {name}",
                "",
                f"    {shlex.join(shown)}",
                "",
                f"{json.dumps(environment.machine())}, {seconds:.0f} s in all.",
                "",
                report.markdown_table(summary),
                *(f"\n{note}" for note in report.notes(summary)),
                "",
                report.finding(summary),
            ]
            (args.out / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
