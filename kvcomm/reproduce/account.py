"""OUT/README.md: what a folder of results is, what made it, how long it took, what is missing.

Owns the account only; results are in their own files. Names files and models, never paths of the
machine.
"""

import json
import shlex
from pathlib import Path
from typing import Any

from kvcomm import environment
from kvcomm.packet import write_whole
from kvcomm.records import write_json
from kvcomm.reproduce.catalogue import EXHIBITS, NOT_MADE
from kvcomm.reproduce.runs import WALL, Runs
from kvcomm.reproduce.write import VERDICTS

README = "README.md"

#: The commands that were given for a folder, in order.
COMMANDS = "commands.json"


def write(runs: Runs) -> Path:
    """Write the account; earlier commands for the same folder stay in it."""
    request, command = runs.request, runs.command
    out = request.out
    path = out / "runs" / COMMANDS
    path.parent.mkdir(exist_ok=True)
    commands: list[str] = json.loads(path.read_text()) if path.exists() else []
    shown = shlex.join([Path(word).name if "/" in word else word for word in command])
    if command and shown not in commands:
        commands.append(shown)
        write_json(path, commands)
    machine = environment.machine()
    versions = {name: v for name, v in environment.versions().items() if v is not None}
    lines = [
        "# Reproduction of KVComm",
        "",
        f"Models: {', '.join(Path(name).name for name in request.models)}; preset "
        f"{request.preset}.",
        "",
        *(f"    {line}" for line in commands),
        "",
        "Of paths only the last part is shown.",
        "",
        f"Machine: {_flat(machine)}.",
        f"Versions: {_flat(versions)}.",
        "",
        "## What is here",
        "",
        *(
            f"- `{name}`: {exhibit.title}. {exhibit.runs[0].upper()}{exhibit.runs[1:]}."
            for name, exhibit in EXHIBITS.items()
            if (out / f"{name}.txt").exists()
        ),
        "",
        "`kvcomm reproduce` writes each as text, CSV, Markdown and LaTeX, figures as PNG and SVG.",
        "",
        *_claims(out),
        "## Runs",
        "",
        *_seconds(out / "runs"),
        "",
        "## What was not run",
        "",
        *(f"- {what}: {why}." for what, why in sorted(runs.left_out.items())),
        *(f"- {name}: {why}." for name, why in NOT_MADE.items()),
    ]
    write_whole(out / README, ("\n".join(lines) + "\n").encode())
    return out / README


def _flat(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


#: How to read a difference.
_SIGN = (
    "A difference is in favour of its claim above 0: the claim's first row less its second; where",
    "the first is to be as good as the second, a little below 0 is enough (*wanted above*).",
)


def _claims(out: Path) -> list[str]:
    lines = []
    for name in EXHIBITS:
        path = out / VERDICTS / f"{name}.json"
        if path.exists():
            lines += [
                f"| {name} | {one['claim']} | {judged['measure']} | {judged['verdict']} | "
                f"{judged['why']} |"
                for one in json.loads(path.read_text())
                for judged in one["judged"]
            ]
    if not lines:
        return []
    head = ["| from | claim | by | verdict | difference |", "| --- | --- | --- | --- | --- |"]
    return ["## Claims", "", *_SIGN, "", *head, *lines, ""]


def _seconds(folder: Path) -> list[str]:
    found = {
        path.name.removesuffix(f".{WALL}"): float(json.loads(path.read_text())["seconds"])
        for path in sorted(folder.glob(f"*.{WALL}"))
    }
    lines = [f"| {name} | {seconds:.0f} |" for name, seconds in found.items()]
    total = f"| all | {sum(found.values()):.0f} |"
    return ["| run | wall time, s |", "| --- | ---: |", *lines, total]
