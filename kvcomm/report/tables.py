"""The table of a run: which columns it has, how a value is written, as text and as Markdown.

Owns columns and cells. A column that no method of the run has a value in is left out; the text
table leaves out more where it would be wider than a terminal, and says so.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvcomm import tasks
from kvcomm.layout import aligned, markdown_text, number
from kvcomm.packet import whole_layers

Summary = Mapping[str, Any]

#: Columns of characters that a text table may take.
WIDTH = 120


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


def decimals(places: int) -> Callable[[float | None], str]:
    """A way to write numbers with so many decimals."""
    return partial(number, places=places)


_HUNDREDTHS = decimals(2)

#: Metrics of an answer: field of summary and log, heading.
METRICS = {
    "match": "match",
    "f1": "F1",
    "em": "EM",
    "rouge_l_recall": "ROUGE-L recall",
    "rouge_l_f": "ROUGE-L F",
    "published_rouge_l": "published ROUGE-L",
    "accuracy": "accuracy",
}


@dataclass(frozen=True)
class Column:
    """field: of a method in the summary, None for what is not measured. interval: shown too.

    rank: columns of the highest rank are the first to go from a text table that is too wide; those
    of rank 0 stay.
    """

    heading: str
    field: str | None
    written: Callable[[float | None], str] = _HUNDREDTHS
    interval: bool = True
    rank: int = 0


_METRIC_RANKS = {
    "rouge_l_f": 9, "rouge_l_recall": 8, "published_rouge_l": 7, "accuracy": 6, "em": 3, "f1": 2,
    "match": 1,
}  # fmt: skip


def published_metric(summary: Summary) -> str:
    """The metric by which the paper scores the run's task; its name in the summary."""
    task = tasks.TASKS.get(summary["settings"]["task"])
    return "match" if task is None else task.metric


def columns(summary: Summary) -> list[Column]:
    """The columns that the run has values for, the published metric first among the metrics."""
    first = published_metric(summary)
    metrics = [first, *(name for name in METRICS if name != first)]
    found = [
        Column("recovered", "recovered"),
        Column("nll", "nll"),
        *(
            Column(
                METRICS[name] + "*" * (name == first),
                name,
                rank=0 if name == first else _METRIC_RANKS[name],
            )
            for name in metrics
        ),
        Column("agreement", "agreement", rank=6),
        Column("KL", "kl", rank=6),
        Column("message", "message_bytes", size, interval=False),
        Column("prefilled", "receiver_tokens", decimals(0), interval=False, rank=5),
        Column("first token", "first_token", seconds, interval=False, rank=4),
    ]
    known = [c for c in found if any(m.get(c.field) is not None for m in summary["methods"])]
    return [Column("method", None), Column("layers", None), *known, Column("n", None)]


def rows(summary: Summary, shown: Sequence[Column]) -> list[list[tuple[str, str]]]:
    """Per method the cells of the table, each a value and its interval ("" where there is none)."""
    return [[_cell(summary, method, column) for column in shown] for method in summary["methods"]]


def _cell(summary: Summary, method: Mapping[str, Any], column: Column) -> tuple[str, str]:
    if column.field is None:
        return _UNMEASURED[column.heading](summary, method), ""
    value = method.get(column.field)
    if value is None or (column.field == "recovered" and not reading_helps(summary)):
        return "-", ""
    known = column.interval and value["low"] is not None
    low_high = f"{column.written(value['low'])}..{column.written(value['high'])}" if known else ""
    return column.written(value["value"]), low_high


def reading_helps(summary: Summary) -> bool:
    """Whether the skyline is better than the baseline; if not, shares of that mean nothing."""
    nll = {m["label"]: m["nll"]["value"] for m in summary["methods"] if m["nll"]}
    return nll.get("skyline", 0.0) < nll.get("baseline", 1.0)


def _layers(summary: Summary, method: Mapping[str, Any]) -> str:
    if method["layers"] is not None:
        whole = whole_layers(method["layers"], summary["settings"]["preset"])
        return f"{len(whole)}/{summary['settings']['sender']['n_layers']}"
    return "varies" if method["settings"].get("online") and method["done"] else "-"


def _count(summary: Summary, method: Mapping[str, Any]) -> str:
    return f"{method['done']}" + (f" ({method['failed']} failed)" if method["failed"] else "")


#: Cells that are no mean over records, by heading.
_UNMEASURED: dict[str, Callable[[Summary, Mapping[str, Any]], str]] = {
    "method": lambda summary, method: method["label"],
    "layers": _layers,
    "n": _count,
}


def caption(summary: Summary) -> str:
    """What every table of the run has to say: task, models, data, preset, protocol, metric."""
    settings = summary["settings"]
    models = dict.fromkeys(settings[side]["model"] for side in ("sender", "receiver"))
    return (
        f"{settings['task']}, {' to '.join(models)}; {_data(settings)}; preset "
        f"{settings['preset']}; {_protocol(settings)}; * the published metric: "
        f"{METRICS[published_metric(summary)]}."
    )


def _data(settings: Mapping[str, Any]) -> str:
    """The files of the records, and those that the layers were chosen by where these are others."""
    scored, calibrating = settings.get("data"), settings.get("calibration_data")
    if scored is None:
        return "data not recorded"
    return f"data {scored}" + (
        f", calibrated by {calibrating}" if calibrating not in (None, scored) else ""
    )


def _protocol(settings: Mapping[str, Any]) -> str:
    published = settings.get("published_protocol")
    if published is None:
        return "protocol not recorded"
    if published:
        return "published protocol: calibration records are scored too"
    calibrated = settings.get("calibration") or settings.get("calibration_sha256")
    return "default protocol: " + (
        "calibration records are not scored" if calibrated else "no calibration records"
    )


def text_table(summary: Summary, width: int = WIDTH) -> str:
    """The table for a terminal; intervals stand below their values, the caption below all."""
    shown = columns(summary)
    lines = _lines(summary, shown)
    gone: list[str] = []
    while max(map(len, lines)) > width and any(column.rank for column in shown):
        least = max(shown, key=lambda column: column.rank)
        shown.remove(least)
        gone.append(least.heading)
        lines = _lines(summary, shown)
    lines.append(caption(summary))
    if gone:
        lines.append(f"Left out of a table this wide, in the report: {', '.join(gone)}.")
    return "\n".join(lines)


def _lines(summary: Summary, shown: Sequence[Column]) -> list[str]:
    """Heading, rule, and one or two lines per method, in columns."""
    lines: list[tuple[str, ...]] = [tuple(column.heading for column in shown)]
    for cells in rows(summary, shown):
        lines.append(tuple(value for value, _ in cells))
        if any(interval for _, interval in cells):
            lines.append(tuple(interval for _, interval in cells))
    return aligned(lines)


def markdown_table(summary: Summary) -> str:
    """The table in Markdown; intervals in brackets behind their values, a caption below."""
    shown = columns(summary)
    headings = [markdown_text(column.heading) for column in shown]
    lines = [" | ".join(headings), " | ".join(["---", *["---:"] * (len(shown) - 1)])]
    for cells in rows(summary, shown):
        lines.append(" | ".join(markdown_text(f"{v} [{i}]" if i else v) for v, i in cells))
    return "\n".join([*(f"| {line} |" for line in lines), "", markdown_text(caption(summary))])
