"""How the figures of a reproduction are drawn: curves with intervals, and heat maps.

Owns their look; every number comes from tables. Needs matplotlib, imported here and in plots.py,
whose colours these are; draws without a display.
"""

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvcomm.plots import COLOURS, MARKERS, named_levels
from kvcomm.statistics import Interval

#: More values of x than this are not all written below the axis.
MOST_TICKS = 12


@dataclass(frozen=True)
class Line:
    """One curve: values over x, None where there is none."""

    name: str
    x: tuple[float, ...]
    values: tuple[Interval | None, ...]


@dataclass(frozen=True)
class Panel:
    """One set of axes with curves.

    levels: horizontal lines with their names. log: x grows by factors.
    """

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    levels: tuple[tuple[float, str], ...] = ()
    log: bool = False


@dataclass(frozen=True)
class Heat:
    """One map: values [rows][columns], NaN where there is none."""

    title: str
    x_label: str
    y_label: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    bar_label: str


@dataclass(frozen=True)
class Bars:
    """One value per name, None where there is none."""

    title: str
    unit: str
    names: tuple[str, ...]
    values: tuple[float | None, ...]


def draw(parts: Sequence[Panel | Heat | Bars], title: str, foot: str) -> Figure:
    """All panels and maps of a figure, at most three in a row."""
    across = 2 if len(parts) == 4 else min(3, len(parts))
    down = math.ceil(len(parts) / across)
    figure = Figure(figsize=(1.2 + 4.4 * across, 1.3 + 3.7 * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).flatten()
    for place, part in zip(axes, parts, strict=False):
        _DRAWN[type(part)](place, part)
    for place in axes[len(parts) :]:
        place.set_visible(False)
    figure.suptitle(_wrapped(title, 62 * across), fontsize=10)
    figure.supxlabel(_wrapped(foot, 72 * across), fontsize=8, color="#555555")
    return figure


def widest(found: Iterable[Interval]) -> str:
    """What a map says of its intervals, which it has no room for."""
    reach = [max(one.high - one.value, one.value - one.low) for one in found if one.low == one.low]
    if not reach:
        return "no intervals"
    return f"95% intervals within ±{max(reach):.2f}, in the table"


def _wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width))


def _curves(axes: Axes, panel: Panel) -> None:
    for place, line in enumerate(panel.lines):
        known = [(x, v) for x, v in zip(line.x, line.values, strict=True) if v is not None]
        if not known:
            continue
        x, y = [_aside(panel, x, place) for x, _ in known], [v.value for _, v in known]
        below = [0.0 if v.low != v.low else max(0.0, v.value - v.low) for _, v in known]
        above = [0.0 if v.low != v.low else max(0.0, v.high - v.value) for _, v in known]
        axes.errorbar(
            x, y, yerr=[below, above], label=line.name, color=COLOURS[place % len(COLOURS)],
            marker=MARKERS[place % len(MARKERS)], markersize=5, linewidth=1.3, elinewidth=0.9,
            capsize=2,
        )  # fmt: skip
    named_levels(axes, panel.levels)
    ticks = sorted({x for line in panel.lines for x in line.x})
    if panel.log:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.minorticks_off()
    elif len(ticks) <= MOST_TICKS:
        axes.set_xticks(ticks)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(panel.x_label, fontsize=9)
    axes.set_ylabel(panel.y_label, fontsize=9)
    axes.set_title(panel.title, fontsize=10)
    axes.tick_params(labelsize=8)
    if len(panel.lines) > 1:
        # Below the axes: inside of them it hides points.
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=min(3, len(panel.lines)),
            fontsize=8, frameon=False,
        )  # fmt: skip


def _aside(panel: Panel, x: float, place: int) -> float:
    """x of a curve's point, a little beside those of the other curves, whose bars it would hide."""
    step = 0.08 * (place - (len(panel.lines) - 1) / 2)
    if panel.log:
        return x * 2**step
    ticks = sorted({x for line in panel.lines for x in line.x})
    apart = min((b - a for a, b in pairwise(ticks)), default=1.0)
    return x + step * apart


def _heat(axes: Axes, heat: Heat) -> None:
    values = np.array(heat.values, np.float64)
    shown = np.ma.masked_invalid(values)
    image = axes.imshow(shown, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(heat.columns)), heat.columns, fontsize=8)
    axes.set_yticks(range(len(heat.rows)), heat.rows, fontsize=8)
    axes.set_xlabel(heat.x_label, fontsize=9)
    axes.set_ylabel(heat.y_label, fontsize=9)
    axes.set_title(heat.title, fontsize=10)
    if values.size <= 150 and shown.count():
        middle = (shown.min() + shown.max()) / 2
        for (row, column), value in np.ndenumerate(values):
            if value == value:
                colour = "white" if value < middle else "black"
                axes.text(
                    column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour
                )
    bar = axes.figure.colorbar(image, ax=axes)
    bar.set_label(heat.bar_label, fontsize=8)
    bar.ax.tick_params(labelsize=8)


def _bars(axes: Axes, bars: Bars) -> None:
    known = [(name, v) for name, v in zip(bars.names, bars.values, strict=True) if v is not None]
    names, values = [name for name, _ in known], [value for _, value in known]
    drawn = axes.barh(names, values, color=COLOURS[0], height=0.65)
    # Three digits, all of a larger number: never 7.89e+03.
    texts = [f"{value:.3g}" if value < 1000 else f"{value:.0f}" for value in values]
    axes.bar_label(drawn, texts, fontsize=8, padding=2)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_xlabel(bars.unit, fontsize=9)
    axes.set_title(bars.title, fontsize=10)
    axes.tick_params(labelsize=8)


_DRAWN = {Panel: _curves, Heat: _heat, Bars: _bars}
