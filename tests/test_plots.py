"""Plots against summaries made by hand: what is drawn where, and that it can be read."""

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
from made_runs import METHODS, N_LAYERS, interval, many, method, summary
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kvcomm import plots

SHARES = {label: [float(n in (layers or ())) for n in range(N_LAYERS)]
          for label, _, _, layers, *_ in METHODS if layers}  # fmt: skip


def figures(run: dict[str, Any]) -> list[Figure]:
    shares = {
        m["label"]: [float(n in m["layers"]) for n in range(N_LAYERS)]
        for m in run["methods"]
        if m["layers"]
    }
    drawn = [
        plots.score_against_bytes(run),
        plots.layers_sent(run, shares),
        plots.mass_per_layer(run),
        plots.first_token(run),
    ]
    return [figure for figure in drawn if figure is not None]


def tick_labels(axes: Any) -> list[Any]:
    """Those that are seen: an axis has ticks beyond its ends too."""
    (left, right), (bottom, top) = axes.get_xlim(), sorted(axes.get_ylim())
    return [
        *(t for t in axes.get_xticklabels() if left <= t.get_position()[0] <= right),
        *(t for t in axes.get_yticklabels() if bottom <= t.get_position()[1] <= top),
    ]


def points(axes: Any) -> dict[str, list[tuple[float, float]]]:
    """Per family its points, as drawn."""
    return {c.get_label(): [(x, y) for x, y in c.lines[0].get_xydata()] for c in axes.containers}


def test_scores_stand_over_the_bytes_sent() -> None:
    run = summary(changes={"all layers": {"match": interval(0.75, n=2)}})
    recovered, match = plots.score_against_bytes(run).axes
    drawn = points(recovered)
    assert set(drawn) == {"kvcomm", "random", "all layers"}
    assert [drawn[name][0][1] for name in drawn] == pytest.approx([0.5, 0.0625, 0.9375])
    assert drawn["all layers"][0][0] == pytest.approx(4.6)
    # Two messages of one size stand side by side, around their place.
    left, right = drawn["kvcomm"][0][0], drawn["random"][0][0]
    assert left < 1.38 < right
    assert (left + right) / 2 == pytest.approx(1.38)
    assert points(match)["all layers"][0][1] == 0.75
    for axes, name, n in ((recovered, "recovered", "n = 3"), (match, "match", "n = 2 to 3")):
        assert axes.get_ylabel().startswith(f"{name}, ")
        assert axes.get_title().endswith(n)
        assert axes.get_xlabel().startswith("message, MB per record, mean\n")
        assert "95% bootstrap intervals" in axes.get_xlabel()
        assert [text.get_text() for text in axes.texts] == ["baseline", "skyline"]
        (top,) = axes.child_axes
        assert [tick.get_text() for tick in top.get_xticklabels()] == ["3", "10"]


def test_whiskers_are_the_intervals() -> None:
    run = summary(
        leave_out=("random 0.3",),
        changes={
            "kvcomm 0.3": {"recovered": {"value": 0.5, "low": 0.2, "high": 0.6, "n": 3}},
            "all layers": {"recovered": {"value": 0.9, "low": None, "high": None, "n": 1}},
        },
    )
    axes = plots.score_against_bytes(run).axes[0]
    ends = {
        c.get_label(): [(p[0][1], p[1][1]) for p in c.lines[2][0].get_segments()]
        for c in axes.containers
    }
    assert ends["kvcomm"] == [pytest.approx((0.2, 0.6))]
    assert ends["all layers"] == [pytest.approx((0.9, 0.9))]


def test_messages_of_very_different_size_need_a_logarithm() -> None:
    text = method("nld", "nld", {}, None, 460, 0.3, 9.0, 2.0, 0.02)
    axes = plots.score_against_bytes(summary(more=(text,))).axes[0]
    assert axes.get_xscale() == "log"
    assert points(axes)["nld"][0] == pytest.approx((0.00046, 0.3))
    assert "(logarithmic)" in axes.get_xlabel()
    assert plots.score_against_bytes(summary()).axes[0].get_xscale() == "linear"


def test_a_score_that_no_method_has_is_not_drawn() -> None:
    no_shares = {label: {"recovered": None} for label, *_ in METHODS}
    (axes,) = plots.score_against_bytes(summary(changes=no_shares)).axes
    assert axes.get_title() == "match, n = 3"
    (axes,) = plots.score_against_bytes(summary(), "accuracy", "accuracy").axes
    assert axes.get_title().startswith("recovered")
    sends = ("kvcomm 0.3", "random 0.3", "all layers")
    assert plots.score_against_bytes(summary(leave_out=sends)) is None


def test_the_strip_has_a_cell_per_method_and_layer() -> None:
    figure = plots.layers_sent(summary(), SHARES)
    (axes,) = figure.axes  # nothing varies, so no scale
    (cells,) = axes.collections
    assert cells.get_array().reshape(3, N_LAYERS).tolist() == list(SHARES.values())
    assert [tick.get_text() for tick in axes.get_yticklabels()] == [
        "kvcomm 0.3  (3)", "random 0.3  (3)", "all layers  (10)",
    ]  # fmt: skip
    assert axes.get_xlabel() == "layer of the sender, from 0"
    assert axes.get_title().endswith("n = 3")
    assert axes.get_xlim() == (-0.5, N_LAYERS - 0.5)
    assert plots.layers_sent(summary(), {}) is None


def test_layers_that_some_records_sent_have_a_scale() -> None:
    shares = {"kvcomm 0.3": [0.25, 1.0, 0.25] + [0.0] * 7}
    axes, scale = plots.layers_sent(summary(), shares).axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["kvcomm 0.3  (1.5)"]
    assert scale.get_ylabel() == "share of records"


def test_mass_is_a_bar_per_layer() -> None:
    (axes,) = plots.mass_per_layer(summary()).axes
    assert [bar.get_height() for bar in axes.patches] == pytest.approx(
        [0.1 * (1 + n % 4) for n in range(N_LAYERS)]
    )
    assert "n = 1 calibration record, preset paper" in axes.get_title()
    assert axes.get_ylabel() == "attention mass on the context, share"
    assert not axes.collections
    assert plots.mass_per_layer(summary() | {"calibration": None}) is None


def test_mass_per_head_is_a_dot_per_head() -> None:
    run = summary()
    heads = [[0.1, 0.2, 0.3 + 0.05 * layer] for layer in range(N_LAYERS)]
    run["calibration"] |= {"head_mass": heads, "n_samples": 8}
    (axes,) = plots.mass_per_layer(run).axes
    (dots,) = axes.collections
    assert sorted(map(tuple, dots.get_offsets().tolist())) == sorted(
        (float(layer), value) for layer, row in enumerate(heads) for value in row
    )
    assert "n = 8 calibration records" in axes.get_title()
    assert "dots: 3 heads" in axes.get_title()
    assert axes.get_ylim()[1] > 0.75


def test_time_to_first_token_is_the_receivers_and_the_senders() -> None:
    figure = plots.first_token(summary(changes={"random 0.3": {"first_token": None}}))
    (axes,) = figure.axes
    labels = [tick.get_text() for tick in axes.get_yticklabels()]
    assert labels == ["baseline", "skyline", "kvcomm 0.3", "all layers"]
    receiver, sender = axes.patches[:4], axes.patches[4:]
    assert [bar.get_width() for bar in receiver] == pytest.approx([12, 50, 14, 20])
    assert [bar.get_width() for bar in sender] == pytest.approx([0, 0, 100, 100])
    assert [bar.get_x() for bar in sender] == pytest.approx([12, 50, 14, 20])
    assert axes.get_xlabel().startswith("wall time, ms per record, mean")
    assert "95% bootstrap intervals of the receiver's part" in axes.get_xlabel()
    assert axes.get_title().endswith("n = 3, in batches of 8 on 2 threads")
    (whiskers,) = axes.collections
    assert whiskers.get_segments()[0][:, 0].tolist() == pytest.approx([10, 14])
    none = {label: {"first_token": None} for label, *_ in METHODS}
    assert plots.first_token(summary(changes=none)) is None


def test_seconds_are_shown_where_a_time_reaches_one() -> None:
    run = summary(changes={"skyline": {"first_token": interval(1.5)}})
    (axes,) = plots.first_token(run).axes
    assert axes.get_xlabel().startswith("wall time, s per record")
    assert axes.patches[1].get_width() == 1.5


@pytest.mark.parametrize(
    "run",
    [
        summary(),
        summary(more=many(20)),
        summary(leave_out=("baseline", "skyline", "random 0.3", "all layers")),
        summary(changes={"skyline": {"match": interval(0.34)}}),
    ],
    ids=["five", "many", "one", "near"],
)
def test_texts_of_a_plot_neither_overlap_nor_are_cut(run: dict[str, Any]) -> None:
    for figure in figures(run):
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        renderer = canvas.get_renderer()
        texts = [
            text
            for axes in [a for one in figure.axes for a in (one, *one.child_axes)]
            for text in (
                axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts, *tick_labels(axes),
            )
        ]  # fmt: skip
        texts += [text for legend in figure.legends for text in legend.get_texts()]
        boxes = [
            (text.get_text(), text.get_window_extent(renderer))
            for text in texts
            if text.get_text() and text.get_visible()
        ]
        assert boxes
        for place, (one, box) in enumerate(boxes):
            assert box.x0 >= 0 and box.y0 >= 0, one
            assert box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height, one
            for other, second in boxes[place + 1 :]:
                # Boxes that share an edge are not on each other.
                inside = min(box.x1, second.x1) - max(box.x0, second.x0)
                across = min(box.y1, second.y1) - max(box.y0, second.y0)
                assert inside < 1 or across < 1, (one, other)


def test_a_drawing_holds_its_labels_and_no_address() -> None:
    run = summary()
    wanted = [
        ["kvcomm", "random", "all layers", "baseline", "skyline"],
        ["kvcomm 0.3", "random 0.3", "all layers"],
        ["layer of the sender, from 0"],
        ["baseline", "skyline", "kvcomm 0.3", "receiver, message in hand"],
    ]
    for figure, labels in zip(figures(run), wanted, strict=True):
        drawing = plots.svg(figure)
        # Text is drawn as outlines, so that no font is needed; its words stand beside it.
        for label in labels:
            assert label in drawing
        assert "<text" not in drawing
        assert "matplotlib.org" not in drawing
        tree = ElementTree.fromstring(drawing)
        assert tree.tag == "{http://www.w3.org/2000/svg}svg"
        references = [
            value for part in tree.iter() for name, value in part.items() if name.endswith("href")
        ]
        assert references and all(value.startswith("#") for value in references)


def test_drawings_are_the_same_every_time() -> None:
    first = [plots.svg(figure) for figure in figures(summary())]
    assert [plots.svg(figure) for figure in figures(summary())] == first
    pictures = [plots.png(figure) for figure in figures(summary())]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert pictures == [plots.png(figure) for figure in figures(summary())]


def test_a_method_of_unknown_size_is_not_drawn() -> None:
    run = summary(changes={"kvcomm 0.3": {"message_bytes": None}})
    assert set(points(plots.score_against_bytes(run).axes[0])) == {"random", "all layers"}


def test_one_thread_and_one_head_are_not_several() -> None:
    run = summary()
    run["environment"]["machine"]["threads"] = 1
    run["calibration"]["head_mass"] = [[0.1]] * N_LAYERS
    assert plots.first_token(run).axes[0].get_title().endswith("on 1 thread")
    assert plots.mass_per_layer(run).axes[0].get_title().endswith("dots: 1 head")
