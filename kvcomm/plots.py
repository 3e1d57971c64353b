"""The plots of a report: scores against bytes, layers sent, mass per layer, time to first token.

Owns how they look. Every plot says its unit, over how many records it is, and what its bars are.
Needs matplotlib, imported here and in reproduce/figures.py; draws without a display. A plot for
which the run has no numbers is None.
"""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from kvcomm.layout import counted

Method = Mapping[str, Any]
Interval = Mapping[str, Any]

#: Per family of variants, in the order in which they appear. One marker more than colours, so
#: that a colour comes again with another marker.
COLOURS = ("#1f5fa8", "#c8641e", "#2f8f5b", "#8a4fa3", "#7a6a58", "#b03a5b")
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
_GREY, _BLUE, _PALE = "#666666", "#1f5fa8", "#8fb3d9"

#: A message axis is logarithmic when the largest message is this many times the smallest.
_WIDE = 30
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1.0))
_INTERVALS = "95% bootstrap intervals"


def svg(figure: Figure) -> str:
    """The figure as an SVG document that needs no fonts and is the same on every run."""
    out = io.StringIO()
    # Without these the file would carry the time of drawing, an address and random ids.
    with rc_context({"svg.hashsalt": "kvcomm"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()


def png(figure: Figure) -> bytes:
    """The figure as a PNG file, at 150 dots per inch; the same on every run."""
    out = io.BytesIO()
    # Without this the file would name the version of the library that drew it.
    figure.savefig(out, format="png", dpi=150, metadata={"Software": None})
    return out.getvalue()


def n_range(counts: Iterable[int]) -> str:
    """Over how many records values are: "n = 100", or "n = 98 to 100"; of no value "n = 0"."""
    found = sorted(counts) or [0]
    return f"n = {found[0]}" if found[0] == found[-1] else f"n = {found[0]} to {found[-1]}"


def _bar(interval: Interval) -> tuple[float, float]:
    """Lengths of an error bar, down and up; none where the interval is not known."""
    value, low, high = interval["value"], interval["low"], interval["high"]
    return (0.0, 0.0) if low is None else (max(0.0, value - low), max(0.0, high - value))


def _known(method: Method, field: str) -> bool:
    return method.get(field) is not None and method[field]["value"] is not None


# ---- scores against bytes ------------------------------------------------------------------


def sent_families(methods: Sequence[Method]) -> dict[str, list[Method]]:
    """Methods that send something, by family: the variants that differ in the ratio only."""
    families: dict[str, list[Method]] = {}
    for method in methods:
        if _known(method, "message_bytes") and method["message_bytes"]["value"]:
            families.setdefault(_family(method), []).append(method)
    return families


def _family(method: Method) -> str:
    ratio = method["settings"].get("ratio")
    return method["label"] if ratio is None else method["label"].replace(f" {ratio:g}", "", 1)


def score_against_bytes(
    summary: Mapping[str, Any], metric: str = "match", heading: str = "match"
) -> Figure | None:
    """What each variant recovered over what it sent, and beside it a metric of its answers.

    Parameters
    ----------
    metric, heading
        A metric's field in the summary, and what its axis is called.
    """
    families = sent_families(summary["methods"])
    sent = [method for methods in families.values() for method in methods]
    fields = [
        (field, label)
        for field, label in (("recovered", "recovered"), (metric, heading))
        if any(_known(method, field) for method in sent)
    ]
    if not fields:
        return None
    # Side by side at 9 points stand some 150 characters, of which a line and marker take ten.
    across = max(1, min(4, 150 // (10 + max(map(len, families)))))
    height = 4.6 + 0.22 * math.ceil(len(families) / across)
    figure = Figure(figsize=(11, height), layout="constrained")
    panels = figure.subplots(1, len(fields), squeeze=False)[0]
    ruler = _Ruler([method["message_bytes"]["value"] for method in sent])
    handles: dict[str, Any] = {}
    for axes, (field, label) in zip(panels, fields, strict=True):
        ruler.apply(axes)
        for place, (name, methods) in enumerate(families.items()):
            drawn = [method for method in methods if _known(method, field)]
            drawn.sort(key=lambda m: m["message_bytes"]["value"])
            if not drawn:
                continue
            bars = [_bar(method[field]) for method in drawn]
            handles[name] = axes.errorbar(
                [ruler.place(method, sent) for method in drawn],
                [method[field]["value"] for method in drawn],
                yerr=list(zip(*bars, strict=True)), label=name,
                color=COLOURS[place % len(COLOURS)], marker=MARKERS[place % len(MARKERS)],
                markersize=6, linewidth=1.4, elinewidth=1.2, capsize=3,
            )  # fmt: skip
        scale = " (0 = baseline, 1 = skyline)" if field == "recovered" else ""
        over = n_range(m[field]["n"] for m in sent if _known(m, field))
        axes.set_title(f"{label}{scale}, {over}", fontsize=11)
        axes.set_ylabel(f"{label}, share" if field == "recovered" else f"{label}, mean, 0 to 1")
        axes.set_xlabel(
            f"message, {ruler.unit} per record, mean{' (logarithmic)' * ruler.wide}\n"
            f"whiskers: {_INTERVALS}; equal sizes stand side by side"
        )
        _reference_lines(axes, summary["methods"], field)
        _layer_ticks(axes, sent, ruler)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=across,
        frameon=False, fontsize=9,
    )  # fmt: skip
    return figure


class _Ruler:
    """Where a message of so many bytes stands on an axis, in one unit for all plots of a figure."""

    def __init__(self, sizes: Sequence[float]) -> None:
        smallest, largest = min(sizes), max(sizes)
        self.wide = largest > _WIDE * smallest
        self.unit, self.one = next((unit, one) for unit, one in _UNITS if largest >= one)
        ends = (smallest / 1.6, largest * 1.6) if self.wide else (0.0, largest * 1.12)
        self.low, self.high = (end / self.one for end in ends)

    def apply(self, axes: Axes) -> None:
        if self.wide:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlim(self.low, self.high)

    def share(self, value: float) -> float:
        """How far along the axis, 0 to 1, a value in its unit is."""
        if self.wide:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def place(self, method: Method, methods: Sequence[Method]) -> float:
        """In the axis's unit; variants of one size stand side by side, not on each other."""
        size = method["message_bytes"]["value"]
        same = [
            m["label"] for m in methods if abs(m["message_bytes"]["value"] - size) < 0.01 * size
        ]
        step = min(0.012, 0.04 / len(same))
        aside = step * (same.index(method["label"]) - (len(same) - 1) / 2)
        if self.wide:
            return size / self.one * (self.high / self.low) ** aside
        return size / self.one + aside * (self.high - self.low)


def _reference_lines(axes: Axes, methods: Sequence[Method], field: str) -> None:
    """Lines at what baseline and skyline score."""
    named_levels(
        axes,
        [
            (method[field]["value"], method["label"])
            for method in methods
            if method["label"] in ("baseline", "skyline") and _known(method, field)
        ],
    )


def named_levels(axes: Axes, levels: Sequence[tuple[float, str]]) -> None:
    """Up to two horizontal lines, each with its name at the right, outside; axes make room."""
    levels = sorted(levels)
    low, high = axes.get_ylim()
    low = min([low, *(level for level, _ in levels)])
    high = max([high, *(level for level, _ in levels)])
    room = 0.09 * (high - low or 1)
    axes.set_ylim(low - room, high + room)
    near = len(levels) == 2 and levels[1][0] - levels[0][0] < 0.05 * (high - low)
    for (level, name), side in zip(levels, ("top", "bottom"), strict=False):
        axes.axhline(level, color=_GREY, linewidth=1, linestyle="--", zorder=0)
        axes.annotate(
            name, (1, level), xycoords=("axes fraction", "data"), xytext=(4, 0),
            textcoords="offset points", ha="left", va=side if near else "center",
            color=_GREY, fontsize=9,
        )  # fmt: skip


def _layer_ticks(axes: Axes, methods: Sequence[Method], ruler: _Ruler) -> None:
    """How many layers a message of a size is, along the top; where ticks would touch, not all."""
    places = sorted(
        (method["message_bytes"]["value"] / ruler.one, f"{len(method['layers'])}")
        for method in methods
        if method["layers"]
    )
    shown: list[tuple[float, str]] = []
    for x, text in places:
        if not shown or ruler.share(x) - ruler.share(shown[-1][0]) > 0.05:
            shown.append((x, text))
    if shown:
        top = axes.secondary_xaxis("top")
        top.set_xticks([x for x, _ in shown], [text for _, text in shown], fontsize=9)
        top.minorticks_off()
        top.set_xlabel("layers sent", fontsize=9)


# ---- layers --------------------------------------------------------------------------------


def layers_sent(summary: Mapping[str, Any], shares: Mapping[str, Sequence[float]]) -> Figure | None:
    """A row per method and a cell per layer of the sender, the darker the more records sent it.

    Parameters
    ----------
    shares
        Per method's label, for each layer the share of records that sent it, [n_layers].
    """
    if not shares:
        return None
    n_layers = len(next(iter(shares.values())))
    varying = any(0 < share < 1 for row in shares.values() for share in row)
    figure = Figure(figsize=(11, 0.27 * len(shares) + 1.3), layout="constrained")
    axes = figure.add_subplot()
    colours = LinearSegmentedColormap.from_list("sent", ["#eef2f7", _BLUE])
    cells = axes.pcolormesh(
        [n - 0.5 for n in range(n_layers + 1)], [n - 0.5 for n in range(len(shares) + 1)],
        list(shares.values()), cmap=colours, vmin=0, vmax=1, edgecolors="white", linewidth=1.2,
    )  # fmt: skip
    axes.set_yticks(
        range(len(shares)),
        [f"{label}  ({_layer_count(row)})" for label, row in shares.items()],
        fontsize=9,
    )
    axes.set_ylim(len(shares) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    _layer_axis(axes, n_layers)
    over = n_range(m["done"] for m in summary["methods"] if m["label"] in shares)
    axes.set_title(f"Layers sent (in brackets: how many), {over}", fontsize=11)
    if varying:
        bar = figure.colorbar(cells, ax=axes, fraction=0.03, pad=0.01)
        bar.set_label("share of records", fontsize=9)
        bar.set_ticks([0, 0.5, 1])
    return figure


def _layer_count(row: Sequence[float]) -> str:
    """Layers per record; a mean where records differ."""
    return f"{sum(row):.3g}"


def _layer_axis(axes: Axes, n_layers: int) -> None:
    axes.set_xlabel("layer of the sender, from 0")
    axes.set_xlim(-0.5, n_layers - 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))


def mass_per_layer(summary: Mapping[str, Any]) -> Figure | None:
    """Attention mass on the context per sender layer; a dot per head where those were kept."""
    calibration = summary["calibration"]
    if not calibration or calibration.get("mass") is None:
        return None
    mass = calibration["mass"]
    heads = calibration.get("head_mass")  # [n_layers, n_heads]
    figure = Figure(figsize=(11, 4.0), layout="constrained")
    axes = figure.add_subplot()
    axes.bar(range(len(mass)), mass, width=0.8, color=_PALE, edgecolor="none")
    highest = max(mass)
    about = "bars: mean over heads, records and tokens of the question"
    if heads is not None:
        axes.scatter(
            [layer for layer, row in enumerate(heads) for _ in row],
            [value for row in heads for value in row],
            s=9, color=_BLUE, alpha=0.55, linewidths=0, zorder=3,
        )  # fmt: skip
        highest = max(highest, *(value for row in heads for value in row))
        about += f"; dots: {counted(len(heads[0]), 'head')}"
    axes.set_ylim(0, highest * 1.08 or 1)
    axes.set_ylabel("attention mass on the context, share")
    axes.set_title(
        f"Attention mass per layer, n = {counted(calibration['n_samples'], 'calibration record')}, "
        f"preset {calibration['preset']}\n{about}",
        fontsize=11,
    )
    _layer_axis(axes, len(mass))
    return figure


# ---- time ----------------------------------------------------------------------------------


def first_token(summary: Mapping[str, Any]) -> Figure | None:
    """Time to the first token per method, message in hand, and before that the sender's time."""
    timed = [method for method in summary["methods"] if _known(method, "first_token")]
    if not timed:
        return None
    receiver = [method["first_token"]["value"] for method in timed]
    sender = [
        sum(method[part]["value"] for part in ("sender", "transfer") if _known(method, part))
        for method in timed
    ]
    longest = max(sum(parts) for parts in zip(receiver, sender, strict=True))
    unit, one = ("s", 1.0) if longest >= 1 else ("ms", 1e-3)
    figure = Figure(figsize=(11, 0.3 * len(timed) + 1.9), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(timed))
    axes.barh(
        places, [value / one for value in receiver], height=0.62, color=_BLUE,
        xerr=[[length / one for length in side] for side in
              zip(*(_bar(method["first_token"]) for method in timed), strict=True)],
        error_kw={"elinewidth": 1.4, "capsize": 3, "ecolor": "#1d2733"},
        label="receiver, message in hand",
    )  # fmt: skip
    axes.barh(
        places, [value / one for value in sender], left=[value / one for value in receiver],
        height=0.62, color="#d5dfeb", label="sender: reading the context, writing, handing over",
        zorder=0,
    )  # fmt: skip
    axes.set_yticks(places, [method["label"] for method in timed], fontsize=9)
    axes.set_ylim(len(timed) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    environment = summary["environment"]
    axes.set_title(
        f"Time to the first token, {n_range(method['first_token']['n'] for method in timed)}, "
        f"in batches of {environment['batch_size']} on "
        f"{counted(environment['machine']['threads'], 'thread')}",
        fontsize=11,
    )
    axes.set_xlabel(
        f"wall time, {unit} per record, mean; whiskers: {_INTERVALS} of the receiver's part"
    )
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure
