"""Kills a reproduction ten times at random moments, and compares what comes of it with one whole.

Makes Table 2 and Figure 7 of a small model twice: in one go, and killed (SIGKILL) whenever its logs
have grown past one of ten random sizes, and a moment more; each time the same command is given
again. Then every table, figure and claim has to have the same bytes, and every log the same lines
but for their times. Exit status 1 when anything differs.

    python benchmarks/kill_resume.py --data-dir data --out runs/kill
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kvcomm import environment

N_KILLS = 10

#: Not the same from run to run: the account with its times, and the runs themselves.
TIMED = {"README.md"}


def command_of(args: argparse.Namespace, out: Path) -> list[str]:
    """The reproduction as a user would type it."""
    command = ["kvcomm", "reproduce", "--table", "2", "--figure", "7", "--models", args.model]
    command += ["--data-dir", str(args.data_dir), "--tasks", "countries,hotpotqa"]
    command += ["--limit", str(args.limit), "--batch-size", "3", "--out", str(out)]
    return command


def start(args: argparse.Namespace, out: Path) -> subprocess.Popen[bytes]:
    """The reproduction as a process, silent."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-m", *command_of(args, out)], **quiet)


def size(out: Path) -> int:
    """Bytes of all logs."""
    return sum(path.stat().st_size for path in out.glob("runs/*/records.jsonl"))


def timeless(log: Path) -> list[dict[str, Any]]:
    """The lines of a log without their times."""
    lines = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def differences(whole: Path, torn: Path) -> list[str]:
    """Names of the files that differ."""
    found = []
    for path in sorted([*whole.glob("*.*"), *whole.glob("claims/*")]):
        other = torn / path.relative_to(whole)
        if path.name not in TIMED and other.read_bytes() != path.read_bytes():
            found.append(path.name)
    for log in sorted(whole.glob("runs/*/records.jsonl")):
        if timeless(torn / log.relative_to(whole)) != timeless(log):
            found.append(str(log.relative_to(whole)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder for the two reproductions")
    args = parser.parse_args()
    whole, torn = args.out / "whole", args.out / "torn"
    for folder in (whole, torn):
        shutil.rmtree(folder, ignore_errors=True)
    if start(args, whole).wait():
        sys.exit("the reproduction itself ends with an error")
    draw, total = random.Random(args.seed), size(whole)
    moments = sorted(draw.random() for _ in range(N_KILLS))
    killed = []
    for moment in moments:
        process = start(args, torn)
        while process.poll() is None and size(torn) <= moment * total:
            time.sleep(0.005)
        time.sleep(draw.random() * 0.3)
        if process.poll() is None:
            process.kill()
            killed.append(round(size(torn) / total, 3))
        process.wait()
    if start(args, torn).wait():
        sys.exit("the reproduction that was killed ends with an error")
    found = differences(whole, torn)
    n_lines = sum(len(timeless(log)) for log in whole.glob("runs/*/records.jsonl"))
    print(
        json.dumps(
            {
                "model": args.model,
                "records": args.limit,
                "lines": n_lines,
                "kills": len(killed),
                "killed_at": killed,
                "differing": found,
                "machine": environment.machine(),
            },
            indent=1,
        )
    )
    sys.exit(1 if found or len(killed) < N_KILLS else 0)


if __name__ == "__main__":
    main()
