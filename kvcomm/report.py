"""Tables of a run as text and Markdown, and one HTML file that shows all of it.

Owns the form of results; every number comes from a summary (summary.py). The HTML file needs
nothing besides itself: styles are inside, plots are SVG inside, and it asks no network.
"""

import base64
import html
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcomm.packet import write_whole

Summary = Mapping[str, Any]
Method = Mapping[str, Any]

REPORT = "report.html"


# ---- cells ---------------------------------------------------------------------------------


def size(n_bytes: float | None) -> str:
    """Bytes for people, three digits: "1.38 MB" (1 MB is a million bytes)."""
    if n_bytes is None:
        return "-"
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= one:
            return f"{n_bytes / one:.3g} {unit}"
    return f"{n_bytes:.0f} B"


def seconds(value: float | None) -> str:
    """Seconds for people: "12 ms", "1.3 s"."""
    if value is None:
        return "-"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def _decimals(places: int) -> Callable[[float | None], str]:
    # Adding 0.0 turns the -0.0 that rounding may leave into 0.0.
    return lambda value: "-" if value is None else f"{round(value, places) + 0.0:.{places}f}"


#: Columns: heading, field of the summary, how a value is written, whether its interval is shown.
_COLUMNS: tuple[tuple[str, str, Callable[[float | None], str], bool], ...] = (
    ("recovered", "recovered", _decimals(2), True),
    ("nll", "nll", _decimals(2), True),
    ("match", "match", _decimals(2), True),
    ("F1", "f1", _decimals(2), True),
    ("EM", "em", _decimals(2), True),
    ("message", "message_bytes", size, False),
    ("prefilled", "receiver_tokens", _decimals(0), False),
    ("first token", "first_token", seconds, False),
)

HEADINGS = ("method", "layers", *(column[0] for column in _COLUMNS), "n")


def rows(summary: Summary) -> list[list[tuple[str, str]]]:
    """Per method the cells of the table, each a value and its interval ("" where there is none)."""
    n_layers = summary["settings"]["sender"]["n_layers"]
    table = []
    for method in summary["methods"]:
        layers = "-" if method["layers"] is None else f"{len(method['layers'])}/{n_layers}"
        cells = [(method["label"], ""), (layers, "")]
        for _, field, written, interval in _COLUMNS:
            value = method[field]
            if value is None:
                cells.append(("-", ""))
                continue
            known = interval and value["low"] is not None
            low_high = f"{written(value['low'])}..{written(value['high'])}" if known else ""
            cells.append((written(value["value"]), low_high))
        failed = f" ({method['failed']} failed)" if method["failed"] else ""
        cells.append((f"{method['done']}{failed}", ""))
        table.append(cells)
    return table


def notes(summary: Summary) -> list[str]:
    """What the columns mean, one line each."""
    settings, environment = summary["settings"], summary["environment"]
    rule = ", with HotpotQA's rule for yes and no" if settings["closed_answers"] else ""
    return [
        "recovered: share of what reading the context would have given, "
        "(nll baseline - nll) / (nll baseline - nll skyline), sums over records.",
        "nll: of the gold answer, nats, mean per record. match: set F1 of lemmas above 0.5 "
        f"(the paper's metric). F1, EM: SQuAD's{rule}. Ranges: 95% bootstrap intervals over "
        "records.",
        "message: K and V handed over, per record; skyline is one model, nothing is sent. "
        "prefilled: tokens of the receiver's prompt, per record.",
        "first token: wall time from the receiver's start to its first token, in batches of "
        f"{environment['batch_size']} on {environment['machine']['threads']} threads, mean; the "
        "sender's reading is not in it.",
        *(
            f"not scored ({reason}; {len(ids)}): {', '.join(ids[:3])}{', ...' * (len(ids) > 3)}"
            for reason, ids in summary["excluded"].items()
            if ids
        ),
        *(
            f"gold answers without a word but articles ({n}): an empty one has EM 1 and F1 0 there."
            for n in (summary["blank_golds"],)
            if n
        ),
    ]


# ---- text ----------------------------------------------------------------------------------


def text_table(summary: Summary) -> str:
    """The table for a terminal; intervals stand below their values."""
    lines: list[tuple[str, ...]] = [HEADINGS]
    for cells in rows(summary):
        lines.append(tuple(value for value, _ in cells))
        if any(interval for _, interval in cells):
            lines.append(tuple(interval for _, interval in cells))
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    texts = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([texts[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *texts[1:]])


def markdown_table(summary: Summary) -> str:
    """The table in Markdown; intervals stand in brackets behind their values."""
    lines = [" | ".join(HEADINGS), " | ".join(["---", *["---:"] * (len(HEADINGS) - 1)])]
    for cells in rows(summary):
        lines.append(" | ".join(f"{v} [{i}]" if i else v for v, i in cells))
    return "\n".join(f"| {line} |" for line in lines)


#: With fewer records than this an interval over them says little.
FEW = 10


def finding(summary: Summary) -> str:
    """One line that says what the run shows, whichever way its numbers fall."""
    methods = {method["label"]: method for method in summary["methods"]}
    known = [m for m in methods.values() if m["recovered"] and m["recovered"]["value"] is not None]
    if not known:
        return "No shares to judge: the run has no record that baseline and skyline both finished."
    nats = methods["baseline"]["nll"]["value"] - methods["skyline"]["nll"]["value"]
    if nats <= 0:
        return (
            f"Reading the context does not help this model here (skyline's nll is {-nats:.2f} "
            "above the baseline's), so recovered shares mean nothing."
        )
    chosen = [m for m in known if m["settings"].get("strategy") == "attention_gaussian"]
    if not chosen:
        return "The run has no layers chosen by attention to judge."
    best = max(chosen, key=lambda m: m["recovered"]["value"])
    share = best["recovered"]
    n_layers = summary["settings"]["sender"]["n_layers"]
    layers = (
        "layers chosen online"
        if best["layers"] is None
        else (f"{len(best['layers'])} of {n_layers} layers")
    )
    line = (
        f"{best['label']}: K and V of {layers} give {share['value']:.0%} of what reading the "
        f"context would give (95% interval {_range(share)}, {share['n']} records)"
    )
    if share["n"] < FEW:
        return f"{line}: too few to judge."
    compared = summary["comparisons"]
    if compared:
        better = sum(_above(c["nll_less"]) for c in compared)
        worse = sum(_below(c["nll_less"]) for c in compared)
        line += (
            f"; against one draw of as many random layers, layers chosen by attention are clearly "
            f"better at {better} of {len(compared)} ratios, clearly worse at {worse}"
        )
    return line + "."


def _range(interval: Mapping[str, Any]) -> str:
    if interval["low"] is None:
        return "unknown"
    return f"{interval['low']:.0%} to {interval['high']:.0%}"


def _above(interval: Mapping[str, Any]) -> bool:
    """Whether the whole interval is above 0."""
    return interval["low"] is not None and interval["low"] > 0


def _below(interval: Mapping[str, Any]) -> bool:
    return interval["high"] is not None and interval["high"] < 0


# ---- HTML ----------------------------------------------------------------------------------

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2733; max-width: 70rem;
       margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
.lead { font-size: 1.05rem; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; text-align: right; vertical-align: top; white-space: nowrap; }
th { border-bottom: 2px solid #1d2733; } td { border-bottom: 1px solid #dde3ea; }
th:first-child, td:first-child { text-align: left; }
td small { display: block; color: #667; }
table.settings td { text-align: left; white-space: normal; padding: .15rem .7rem;
                    overflow-wrap: anywhere; }
table.settings td:first-child { color: #556; white-space: nowrap; }
img { max-width: 100%; } pre { background: #f2f5f8; padding: .8rem; overflow-x: auto; }
ul { color: #445; }
"""


def html_report(summary: Summary, title: str) -> str:
    """The whole report as one HTML document."""
    from kvcomm import plots

    parts = [f"<h1>{html.escape(title)}</h1>"]
    parts.append(f'<p class="lead">{html.escape(finding(summary))}</p>')
    parts += ["<h2>Results</h2>", _html_table(summary)]
    parts.append("<ul>" + "".join(f"<li>{html.escape(n)}</li>" for n in notes(summary)) + "</ul>")
    for heading, alt, figure in (
        (
            "What a message buys",
            "recovered share against message size, per variant",
            plots.recovered_against_bytes(summary),
        ),
        (
            "Where the receiver looks",
            "attention mass per layer and the layers sent",
            plots.mass_per_layer(summary),
        ),
    ):
        if figure is not None:
            data = base64.b64encode(plots.svg(figure).encode()).decode()
            parts.append(f"<h2>{heading}</h2>")
            parts.append(f'<img alt="{alt}" src="data:image/svg+xml;base64,{data}">')
    parts.append("<h2>To make it again</h2>")
    if summary["environment"]["command"]:
        command = shlex.join(summary["environment"]["command"])
        parts.append(f"<pre>{html.escape(command)}</pre>")
    parts.append(_html_settings(summary))
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _html_table(summary: Summary) -> str:
    lines = ["".join(f"<th>{html.escape(heading)}</th>" for heading in HEADINGS)]
    for cells in rows(summary):
        lines.append(
            "".join(
                f"<td>{html.escape(v)}{f'<small>{html.escape(i)}</small>' if i else ''}</td>"
                for v, i in cells
            )
        )
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table>\n{body}\n</table></div>'


def _html_settings(summary: Summary) -> str:
    shown = {"settings": summary["settings"], "environment": summary["environment"]}
    lines = [
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>"
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


def write_report(summary: Summary, folder: Path, title: str) -> Path:
    """Write report.html into a folder, whole or not at all; returns its path."""
    path = folder / REPORT
    write_whole(path, html_report(summary, title).encode())
    return path
