"""A log's lines by method, the layers they say were sent, and which records a report shows.

Owns what a report takes from the log besides means. Does not score: a line's metrics are what the
run wrote.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvcomm.records import Record
from kvcomm.report.tables import Summary, published_metric
from kvcomm.summary import row_key


def by_label(summary: Summary, records: Sequence[Record]) -> dict[str, list[Record]]:
    """The lines of each method of a run, by the method's label."""
    labels = {row_key(m["method"], m["settings"]): m["label"] for m in summary["methods"]}
    found: dict[str, list[Record]] = {m["label"]: [] for m in summary["methods"]}
    for record in records:
        label = labels.get(row_key(record["method"], record["settings"]))
        if label is not None:
            found[label].append(record)
    return found


def layer_shares(summary: Summary, records: Sequence[Record]) -> dict[str, list[float]]:
    """Per method that sends layers the share of its records that sent each, [n_layers] in [0, 1].

    Without the log only methods are in it that sent the same layers for all records.
    """
    n_layers = summary["settings"]["sender"]["n_layers"]
    lines = by_label(summary, records)
    shares = {}
    for method in summary["methods"]:
        sent = [r["settings"]["layers"] for r in lines[method["label"]] if "error" not in r]
        if method["layers"] is not None:
            sent = [method["layers"]]
        sent = [layers for layers in sent if layers]
        if sent:
            shares[method["label"]] = [
                sum(layer in layers for layers in sent) / len(sent) for layer in range(n_layers)
            ]
    return shares


@dataclass(frozen=True)
class Shown:
    """One record as a report shows it: its lines by label of the method, in the run's order.

    why: "failed", "differs" or "wrong", see `worth_showing`.
    """

    id: str
    why: str
    lines: dict[str, Record]


#: Reasons to show a record, the first that fits, and the order in which they are shown.
REASONS = {
    "failed": "a method failed",
    "differs": "methods differ",
    "wrong": "no method is right",
}


def worth_showing(summary: Summary, records: Sequence[Record]) -> list[Shown]:
    """Records on which a method failed, methods differ in the published metric, or all are wrong.

    In this order, and among equals in the data's. "Wrong" is less than all of the metric.
    """
    metric = published_metric(summary)
    found: dict[str, dict[str, Record]] = {}
    for label, lines in by_label(summary, records).items():
        for line in lines:
            found.setdefault(line["id"], {})[label] = line
    places = {r["id"]: r.get("index", n) for n, r in reversed(list(enumerate(records)))}
    shown = [
        Shown(name, why, lines)
        for name, lines in found.items()
        if (why := _why(metric, list(lines.values()))) is not None
    ]
    order = list(REASONS)
    return sorted(shown, key=lambda one: (order.index(one.why), places[one.id]))


def _why(metric: str, lines: Sequence[Record]) -> str | None:
    if any("error" in line for line in lines):
        return "failed"
    values = {line.get(metric) for line in lines}
    if len(values) > 1:
        return "differs"
    value = values.pop()
    return "wrong" if value is not None and value < 1 else None
