"""The two plots of a report, drawn from a summary: recovered against bytes, and mass per layer.

Owns how they look. Needs matplotlib, which is imported here and nowhere else; draws without a
display.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

#: Per family of variants, in the order in which they appear. One marker more than colours, so
#: that a colour comes again with another marker.
_COLOURS = ("#1f5fa8", "#c8641e", "#2f8f5b", "#8a4fa3", "#7a6a58", "#b03a5b")
_MARKERS = ("o", "s", "D", "^", "v", "P", "X")
_GREY = "#666666"


def svg(figure: Figure) -> str:
    """The figure as an SVG document that needs no fonts and is the same on every run."""
    out = io.StringIO()
    # Without these the file would carry the time of drawing and random ids.
    with rc_context({"svg.hashsalt": "kvcomm"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def sent_families(methods: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Methods that send something, by family: the variants that differ in the ratio only."""
    families: dict[str, list[Mapping[str, Any]]] = {}
    for method in methods:
        if method["message_bytes"] and method["message_bytes"]["value"]:
            families.setdefault(_family(method), []).append(method)
    return families


def _family(method: Mapping[str, Any]) -> str:
    ratio = method["settings"].get("ratio")
    return method["label"] if ratio is None else method["label"].replace(f" {ratio:g}", "", 1)


def recovered_against_bytes(summary: Mapping[str, Any]) -> Figure | None:
    """What each variant recovered over what it sent, with 95% intervals.

    None when nothing can be drawn: no baseline or no skyline in the run, or nothing was sent.
    """
    families = {
        name: [m for m in methods if m["recovered"] and m["recovered"]["value"] is not None]
        for name, methods in sent_families(summary["methods"]).items()
    }
    families = {name: methods for name, methods in families.items() if methods}
    if not families:
        return None
    figure = Figure(figsize=(8.6, 4.6), layout="constrained")
    axes = figure.add_subplot()
    everything = [m for methods in families.values() for m in methods]
    widest = max(m["message_bytes"]["value"] for m in everything)
    unit, size = _unit(widest)
    for place, (name, methods) in enumerate(families.items()):
        colour, marker = _COLOURS[place % len(_COLOURS)], _MARKERS[place % len(_MARKERS)]
        methods = sorted(methods, key=lambda m: m["message_bytes"]["value"])
        x = [(m["message_bytes"]["value"] + _aside(m, everything) * widest) / size for m in methods]
        y = [m["recovered"]["value"] for m in methods]
        bars = [_bar(m["recovered"]) for m in methods]
        axes.errorbar(
            x, y, yerr=list(zip(*bars, strict=True)), label=name, color=colour, marker=marker,
            markersize=6, linewidth=1.4, elinewidth=1.2, capsize=3,
        )  # fmt: skip
    for level, name in ((0.0, "baseline"), (1.0, "skyline")):
        axes.axhline(level, color=_GREY, linewidth=1, linestyle="--", zorder=0)
        axes.annotate(
            name, (1, level), xycoords=("axes fraction", "data"), xytext=(-4, 3),
            textcoords="offset points", ha="right", va="bottom", color=_GREY, fontsize=9,
        )  # fmt: skip
    axes.set_xlim(0, widest / size * 1.12)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, -0.08), max(high, 1.12))
    axes.set_ylabel("recovered (0 = baseline, 1 = skyline)")
    counts = {m["recovered"]["n"] for m in everything}
    n = f"n = {min(counts)}" if len(counts) == 1 else f"n = {min(counts)} to {max(counts)}"
    axes.set_title("Recovered against bytes sent", fontsize=11)
    axes.set_xlabel(
        f"message, {unit} per record (mean of {n} records; bars: 95% bootstrap intervals)"
    )
    _layer_ticks(axes, everything, size)
    figure.legend(
        loc="outside lower center", ncols=min(4, len(families)), frameon=False, fontsize=9
    )
    return figure


def _aside(method: Mapping[str, Any], methods: Sequence[Mapping[str, Any]]) -> float:
    """A step to the side, as a share of the axis: variants of one size stand side by side."""
    size = method["message_bytes"]["value"]
    same = [m["label"] for m in methods if abs(m["message_bytes"]["value"] - size) < 0.01 * size]
    return 0.014 * (same.index(method["label"]) - (len(same) - 1) / 2)


def _bar(interval: Mapping[str, Any]) -> tuple[float, float]:
    """Lengths of an error bar, down and up; none where the interval is not known."""
    value, low, high = interval["value"], interval["low"], interval["high"]
    return (0.0, 0.0) if low is None else (max(0.0, value - low), max(0.0, high - value))


def _layer_ticks(axes: Axes, methods: Sequence[Mapping[str, Any]], size: float) -> None:
    """How many layers a message of a size is, along the top; where ticks would touch, not all."""
    places = sorted(
        (m["message_bytes"]["value"] / size, f"{len(m['layers'])}")
        for m in methods
        if m["layers"] is not None
    )
    shown: list[tuple[float, str]] = []
    for x, text in places:
        if not shown or x - shown[-1][0] > 0.05 * axes.get_xlim()[1]:
            shown.append((x, text))
    if shown:
        top = axes.secondary_xaxis("top")
        top.set_xticks([x for x, _ in shown], [text for _, text in shown], fontsize=9)
        top.set_xlabel("layers sent", fontsize=9)


def _unit(n_bytes: float) -> tuple[str, float]:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= size:
            return unit, size
    return "bytes", 1.0


def mass_per_layer(summary: Mapping[str, Any]) -> Figure | None:
    """Attention mass per sender layer, and under it which layers each variant sends.

    None when the run neither calibrated nor sent fixed layers.
    """
    calibration = summary["calibration"]
    rows = [m for m in summary["methods"] if m["layers"]]
    n_layers = summary["settings"]["sender"]["n_layers"]
    mass = calibration["mass"] if calibration else None
    if mass is None and not rows:
        return None
    heights = ([3.0] if mass is not None else []) + ([0.26 * len(rows) + 0.1] if rows else [])
    figure = Figure(figsize=(8.6, sum(heights) + 1.3), layout="constrained")
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
    bars, strip = panels[0, 0], panels[-1, 0]
    if mass is not None:
        bars.bar(range(n_layers), mass, width=0.8, color="#8fb3d9", edgecolor="none")
        bars.set_ylabel("attention mass on the context")
        bars.set_ylim(0, max(mass) * 1.08 or 1)
        n = calibration["n_samples"]
        bars.set_title(
            f"Attention mass per layer ({n} calibration record{'s' * (n != 1)},"
            f" preset {calibration['preset']}){' and the layers sent' * bool(rows)}",
            fontsize=11,
        )
    else:
        bars.set_title("Layers sent", fontsize=11)
    if rows:
        families = list(sent_families(rows))
        for y, method in enumerate(rows):
            family = families.index(_family(method)) if _family(method) in families else 0
            strip.scatter(
                method["layers"], [y] * len(method["layers"]), marker="s", s=34,
                color=_COLOURS[family % len(_COLOURS)],
            )  # fmt: skip
            strip.axhline(y, color="#dddddd", linewidth=0.8, zorder=0)
        strip.set_yticks(range(len(rows)), [method["label"] for method in rows], fontsize=9)
        strip.set_ylim(len(rows) - 0.4, -0.6)
        strip.tick_params(axis="y", length=0)
        for side in ("top", "right", "left"):
            strip.spines[side].set_visible(False)
    panels[-1, 0].set_xlabel("layer of the sender, from 0")
    panels[-1, 0].set_xlim(-0.8, n_layers - 0.2)
    panels[-1, 0].xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    return figure
