"""The HTML file of a run: table, plots, answers side by side, and what makes the run again.

Owns the page. It needs nothing besides itself: styles are inside, plots are SVG inside, there is no
script, and it asks no network. All text that comes from files and models is escaped.
"""

import base64
import html
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvcomm.layout import counted
from kvcomm.records import Record
from kvcomm.report.answers import REASONS, Shown, layer_shares, worth_showing
from kvcomm.report.tables import (
    METRICS,
    Summary,
    caption,
    columns,
    decimals,
    published_metric,
    rows,
)
from kvcomm.report.words import finding, notes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Records shown with all answers, and characters of a text that are shown before one asks for more.
N_SHOWN = 25
CLIP = 200

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2733; max-width: 84rem;
       margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
h3 { font-size: 1rem; margin: 1.8rem 0 .3rem; }
.lead { font-size: 1.05rem; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { caption-side: bottom; text-align: left; color: #445; padding-top: .5rem; }
th, td { padding: .35rem .5rem; text-align: right; vertical-align: top; white-space: nowrap; }
th { border-bottom: 2px solid #1d2733; } td { border-bottom: 1px solid #dde3ea; }
th:first-child, td:first-child { text-align: left; }
td small { display: block; color: #667; }
table.settings td, td.text, th.text { text-align: left; white-space: normal; }
table.settings td { padding: .15rem .7rem; overflow-wrap: anywhere; }
table.settings td:first-child { color: #556; white-space: nowrap; }
td.text { min-width: 22rem; max-width: 40rem; overflow-wrap: anywhere; }
.record { margin: .2rem 0; overflow-wrap: anywhere; } .error { color: #a02020; }
summary { cursor: pointer; } .full { white-space: pre-wrap; background: #f2f5f8; padding: .5rem; }
img { max-width: 100%; } pre { background: #f2f5f8; padding: .8rem; overflow-x: auto; }
ul { color: #445; }
"""


def html_report(summary: Summary, title: str, records: Sequence[Record] = ()) -> str:
    """The whole report as one HTML document."""
    listed = "".join(f"<li>{html.escape(note)}</li>" for note in notes(summary))
    body = "\n".join(
        [
            f"<h1>{html.escape(title)}</h1>",
            f'<p class="lead">{html.escape(finding(summary))}</p>',
            f"<h2>Results</h2>\n{_table(summary)}\n<ul>{listed}</ul>",
            *_plots(summary, records),
            *_answers(summary, records),
            *_again(summary),
        ]
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _table(summary: Summary) -> str:
    shown = columns(summary)
    lines = ["".join(f"<th>{html.escape(column.heading)}</th>" for column in shown)]
    for cells in rows(summary, shown):
        lines.append(
            "".join(
                f"<td>{html.escape(v)}{f'<small>{html.escape(i)}</small>' if i else ''}</td>"
                for v, i in cells
            )
        )
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    about = f"<caption>{html.escape(caption(summary))}</caption>"
    return f'<div class="scroll"><table>{about}\n{body}\n</table></div>'


# ---- plots ---------------------------------------------------------------------------------


def _plots(summary: Summary, records: Sequence[Record]) -> list[str]:
    from kvcomm import plots

    metric = published_metric(summary)
    drawn: list[tuple[str, str, Figure | None]] = [
        (
            "What a message buys",
            "recovered share and published metric against message size, per variant",
            plots.score_against_bytes(summary, metric, METRICS[metric]),
        ),
        (
            "The layers sent",
            "layers that each variant sends",
            plots.layers_sent(summary, layer_shares(summary, records)),
        ),
        (
            "Where the receiver looks",
            "attention mass on the context per layer",
            plots.mass_per_layer(summary),
        ),
        (
            "Time to the first token",
            "time to the first token per method",
            plots.first_token(summary),
        ),
    ]
    parts = []
    for heading, alt, figure in drawn:
        if figure is not None:
            data = base64.b64encode(plots.svg(figure).encode()).decode()
            parts.append(f"<h2>{heading}</h2>")
            parts.append(f'<img alt="{alt}" src="data:image/svg+xml;base64,{data}">')
    return parts


# ---- answers -------------------------------------------------------------------------------


def _answers(summary: Summary, records: Sequence[Record]) -> list[str]:
    if not records:
        return []
    found = worth_showing(summary, records)
    n_records = counted(len({record["id"] for record in records}), "record")
    reasons = ", ".join(
        f"{text}: {n}"
        for why, text in REASONS.items()
        if (n := sum(one.why == why for one in found))
    )
    told = (
        f"Worth a look are {len(found)} of {n_records} ({reasons})."
        if found
        else f"Every method answered all of {n_records} right."
    )
    if len(found) > N_SHOWN:
        told += f" The first {N_SHOWN} of these:"
    parts = ["<h2>Answers side by side</h2>", f"<p>{told}</p>"]
    for one in found[:N_SHOWN]:
        parts += _record(summary, one)
    return parts


def _record(summary: Summary, one: Shown) -> list[str]:
    line = next(iter(one.lines.values()))
    gold = " / ".join(map(str, line["gold"]))
    parts = [f"<h3>{html.escape(one.id)}: {REASONS[one.why]}</h3>"]
    if line.get("question"):
        parts.append(f'<div class="record"><b>Question</b> {_clipped(line["question"])}</div>')
    parts.append(f'<div class="record"><b>Gold</b> {_clipped(gold)}</div>')
    named = {column.field: column.heading for column in columns(summary)}
    metrics = {name: heading for name, heading in named.items() if name in METRICS}
    heads = "".join(f"<th>{html.escape(text)}</th>" for text in (*metrics.values(), "nll"))
    body = [f'<tr><th>method</th><th class="text">answer</th>{heads}</tr>']
    for label, found in one.lines.items():
        values = "".join(f"<td>{decimals(2)(found.get(name))}</td>" for name in (*metrics, "nll"))
        body.append(
            f'<tr><td>{html.escape(label)}</td><td class="text">{_answer(found)}</td>{values}</tr>'
        )
    parts.append('<div class="scroll"><table>\n' + "\n".join(body) + "\n</table></div>")
    return parts


def _answer(line: Record) -> str:
    if "error" in line:
        return f'<span class="error">failed: {_clipped(line["error"])}</span>'
    text = _clipped(line["answer"]) if line["answer"] else "<i>nothing</i>"
    if line.get("reasoning_cut_off"):
        text += '<div class="error">reasoning that never ended: not scored</div>'
    if line.get("message") is not None:
        text += (
            "<details><summary>message passed</summary>"
            f'<div class="full">{html.escape(line["message"])}</div></details>'
        )
    return text


def _clipped(text: str) -> str:
    """Text of any length: its beginning, and all of it for whoever asks."""
    text = str(text)
    if len(text) <= CLIP:
        return html.escape(text)
    return (
        f"<details><summary>{html.escape(text[:CLIP])}… ({len(text)} characters)</summary>"
        f'<div class="full">{html.escape(text)}</div></details>'
    )


# ---- settings ------------------------------------------------------------------------------


def _again(summary: Summary) -> list[str]:
    """The command, the models and the versions; then every setting as it was recorded."""
    settings, environment = summary["settings"], summary["environment"]
    parts = ["<h2>To make it again</h2>"]
    if environment["command"]:
        parts.append(f"<pre>{html.escape(shlex.join(environment['command']))}</pre>")
    parts.append(_settings({"settings": settings, "environment": environment}))
    return parts


def _settings(shown: Mapping[str, Any]) -> str:
    lines = [
        f"<tr><td>{html.escape(name)}</td><td>{_clipped(value)}</td></tr>"
        for name, value in _flat(shown)
    ]
    return '<table class="settings">\n' + "\n".join(lines) + "\n</table>"


def _flat(value: Any, name: str = "") -> list[tuple[str, str]]:
    """A nested mapping as (dotted name, text) pairs."""
    if isinstance(value, Mapping):
        return [p for k, v in value.items() for p in _flat(v, f"{name}.{k}".lstrip("."))]
    if isinstance(value, Sequence) and not isinstance(value, str):
        if any(isinstance(one, Mapping) for one in value):
            return [p for k, v in enumerate(value) for p in _flat(v, f"{name}.{k}")]
        return [(name, ", ".join(map(str, value)))]
    return [(name, str(value))]
