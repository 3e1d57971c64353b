"""Writes an exhibit's files: tables as text, CSV, Markdown and LaTeX, a figure as PNG and SVG.

Every file appears whole or not at all, and is the same whenever the runs behind it are the same: it
holds no times.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kvcomm.packet import write_whole
from kvcomm.records import write_json
from kvcomm.reproduce import table
from kvcomm.reproduce.exhibit import Built, Exhibit
from kvcomm.reproduce.runs import Runs
from kvcomm.reproduce.verdict import Verdict

#: The verdicts of all exhibits, by exhibit, for the account of the folder.
VERDICTS = "claims"


def write(exhibit: Exhibit, built: Built, verdicts: Sequence[Verdict], runs: Runs) -> list[Path]:
    """Write all files of an exhibit; returns their paths."""
    out = runs.request.out
    forms = {
        ending: "\n".join(form(one) for one in built.tables) for ending, form in table.FORMS.items()
    }
    lines = [one.line for one in verdicts]
    if lines:
        forms["txt"] += "\nClaims\n\n" + "\n".join(lines) + "\n"
        forms["md"] += "\n#### Claims\n\n" + "\n".join(f"- {x}" for x in lines) + "\n"
        escaped = [f"{table.latex_text(line)}\\par" for line in lines]
        forms["tex"] += "\n" + "\n".join(escaped) + "\n"
    forms["csv"] = table.csv_text(exhibit.name, built.tables, runs.pair, runs.request.preset)
    written = []
    for ending, content in forms.items():
        written.append(out / f"{exhibit.name}.{ending}")
        write_whole(written[-1], content.encode())
    if built.draw is not None:
        written += _draw(built, out / exhibit.name)
    folder = out / VERDICTS
    folder.mkdir(exist_ok=True)
    write_json(folder / f"{exhibit.name}.json", [asdict(one) for one in verdicts])
    return written


def _draw(built: Built, path: Path) -> list[Path]:
    from kvcomm.plots import png, svg

    figure = built.draw()
    written = [path.with_name(f"{path.name}.png"), path.with_name(f"{path.name}.svg")]
    write_whole(written[0], png(figure))
    write_whole(written[1], svg(figure).encode())
    return written
