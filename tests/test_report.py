"""Tables, the one-line finding, plots and the HTML file, from records made by hand."""

import base64
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvcomm import report
from kvcomm.records import Record
from kvcomm.summary import summarise

N_LAYERS = 10

#: label, method, settings, layers, bytes, nll of three records
METHODS: list[tuple[str, str, dict[str, Any], list[int] | None, int, tuple[float, ...]]] = [
    ("baseline", "baseline", {}, None, 0, (10.0, 12.0, 14.0)),
    ("skyline", "skyline", {}, None, 0, (4.0, 4.0, 4.0)),
    ("kvcomm 0.3", "kvcomm", {"strategy": "attention_gaussian", "ratio": 0.3}, [1, 4, 5],
     1_380_000, (7.0, 8.0, 9.0)),
    ("random 0.3", "kvcomm", {"strategy": "random", "ratio": 0.3}, [0, 2, 9],
     1_380_000, (9.0, 11.0, 14.5)),
    ("all layers", "kvcomm", {"strategy": "all", "ratio": None}, list(range(10)),
     4_600_000, (4.5, 4.5, 4.5)),
]  # fmt: skip


def made(
    *, nll: dict[str, tuple[float, ...]] | None = None, leave_out: tuple[str, ...] = (),
    failed: int = 0, name: str = "tiny <b>", gold: str = "Ann",
) -> dict[str, Any]:  # fmt: skip
    """A summary of a run of three records."""
    chosen = [method for method in METHODS if method[0] not in leave_out]
    model = {"model": name, "fingerprint": "f" * 64, "n_layers": N_LAYERS, "dtype": "f32"}
    run = {
        "settings": {
            "task": "hotpotqa", "closed_answers": True, "seed": 42, "preset": "paper",
            "sender": model, "receiver": model,
        },
        "environment": {
            "command": ["kvcomm", "eval", "--data", "a file.json"], "batch_size": 8,
            "machine": {"threads": 2, "processor": "a & b"},
        },
        "excluded": {"calibration": ["c0"], "no gold answer": []},
        "methods": [{"label": m[0], "method": m[1], "settings": m[2]} for m in chosen],
        "calibration": {
            "preset": "paper", "n_samples": 1, "mass": [0.1 * (1 + n % 4) for n in range(N_LAYERS)]
        },
    }  # fmt: skip
    records: list[Record] = []
    for label, method, settings, layers, n_bytes, values in chosen:
        for number, value in enumerate((nll or {}).get(label, values)):
            record: Record = {
                "id": f"r{number}", "method": method, "settings": {**settings, "layers": layers},
                "gold": [gold],
                "match": float(number == 0), "f1": 0.5, "em": 0.0, "nll": value,
                "n_gold_tokens": 3, "message_bytes": n_bytes, "receiver_tokens": 66,
                "cut_tokens": 0,
                "seconds": {"sender": 0.1, "transfer": 0.0, "first_token": 0.012, "total": 1.5},
            }  # fmt: skip
            if label == "all layers" and number < failed:
                record["error"] = "ValueError: broken"
            records.append(record)
    return summarise(run, records)


def test_the_table_has_every_column_with_values_by_hand() -> None:
    text = report.text_table(made())
    heads, rule, *lines = text.splitlines()
    assert heads.split() == [
        "method", "layers", "recovered", "nll", "match", "F1", "EM", "message", "prefilled",
        "first", "token", "n",
    ]  # fmt: skip
    assert set(rule) == {"-"}
    row = next(line for line in lines if line.startswith("kvcomm 0.3"))
    # recovered: (36 - 24) / (36 - 12); nll: 24 / 3; match: one of three.
    assert row.split()[2:] == [
        "3/10", "0.50", "8.00", "0.33", "0.50", "0.00", "1.38", "MB", "66", "12", "ms", "3",
    ]  # fmt: skip
    interval = lines[lines.index(row) + 1].split()
    assert interval[1] == "7.00..9.00"
    assert interval[3] == "0.50..0.50"
    assert max(map(len, text.splitlines())) <= 130


def test_markdown_holds_the_same_cells() -> None:
    lines = report.markdown_table(made()).splitlines()
    assert all(line.startswith("| ") and line.endswith(" |") for line in lines)
    assert len({line.count("|") for line in lines}) == 1
    assert "| kvcomm 0.3 | 3/10 | 0.50 [0.50..0.50] | 8.00 [7.00..9.00] |" in "\n".join(lines)


def test_failed_records_stand_in_the_table() -> None:
    row = next(
        line for line in report.text_table(made(failed=1)).splitlines() if "all layers" in line
    )
    assert row.endswith("2 (1 failed)")
    row = report.text_table(made(failed=3)).splitlines()[-1]
    assert row.split() == ["all", "layers", "-", *["-"] * 8, "0", "(3", "failed)"]


def test_blank_golds_are_told() -> None:  # EV-157
    assert not any("articles" in note for note in report.notes(made()))
    assert report.notes(made(gold="The !"))[-1] == (
        "gold answers without a word but articles (3): an empty one has EM 1 and F1 0 there."
    )


def test_units() -> None:
    assert [report.size(n) for n in (0, 999, 1000, 1_384_448, 2e9, None)] == [
        "0 B", "999 B", "1 kB", "1.38 MB", "2 GB", "-",
    ]  # fmt: skip
    assert [report.seconds(s) for s in (0.0123, 0.9, 1.26, None)] == [
        "12.3 ms", "900 ms", "1.26 s", "-",
    ]  # fmt: skip


def test_the_finding_follows_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert report.finding(made()).endswith("3 records): too few to judge.")
    monkeypatch.setattr(report, "FEW", 3)
    good = report.finding(made())
    assert good.startswith("kvcomm 0.3: K and V of 3 of 10 layers give 50% of what reading")
    assert "clearly better at 1 of 1 ratios, clearly worse at 0" in good
    bad = report.finding(made(nll={"kvcomm 0.3": (11.0, 13.0, 16.0), "random 0.3": (5.0,) * 3}))
    assert "give -17% of what" in bad
    assert "clearly better at 0 of 1 ratios, clearly worse at 1" in bad
    useless = report.finding(made(nll={"skyline": (11.0, 13.0, 15.0)}))
    assert useless.startswith("Reading the context does not help this model here")
    assert "1.00 above" in useless
    assert "No shares to judge" in report.finding(made(leave_out=("skyline",)))
    assert "no layers chosen by attention" in report.finding(made(leave_out=("kvcomm 0.3",)))


class _Page(HTMLParser):
    """What a page refers to, its text, and whether its tags are balanced."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_html_file_needs_nothing_else(tmp_path: Path) -> None:
    path = report.write_report(made(), tmp_path, "a <title> & more")
    assert path == tmp_path / "report.html"
    source = path.read_text()
    page = _Page()
    page.feed(source)
    assert page.open == []
    assert len(page.links) == 2
    for link in page.links:
        prefix = "data:image/svg+xml;base64,"
        assert link.startswith(prefix)
        drawing = ElementTree.fromstring(base64.b64decode(link.removeprefix(prefix)))
        assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
    text = " ".join(page.text)
    assert not re.search(r"https?://", source)
    assert "<script" not in source
    for shown in (
        "a <title> & more", "tiny <b>", "a & b", "kvcomm 0.3", "1.38 MB", "7.00..9.00",
        "kvcomm eval --data 'a file.json'", "not scored (calibration; 1): c0",
    ):  # fmt: skip
        assert shown in text
    first = source
    assert report.write_report(made(), tmp_path, "a <title> & more").read_text() == first


def test_recovered_is_plotted_over_bytes() -> None:
    from kvcomm import plots

    figure = plots.recovered_against_bytes(made())
    assert figure is not None
    axes = figure.axes[0]
    drawn = {c.get_label(): c.lines[0].get_xydata()[0] for c in axes.containers}
    assert set(drawn) == {"kvcomm", "random", "all layers"}
    assert drawn["kvcomm"][0] == pytest.approx(1.38, abs=0.05)
    assert drawn["random"][0] != drawn["kvcomm"][0]  # side by side
    assert drawn["all layers"][0] == pytest.approx(4.6)
    assert [drawn[name][1] for name in drawn] == pytest.approx([0.5, 1.5 / 24, 22.5 / 24])
    assert "MB" in axes.get_xlabel()
    assert "n = 3 records" in axes.get_xlabel()
    assert plots.recovered_against_bytes(made(leave_out=("baseline",))) is None


def test_mass_is_plotted_with_the_layers_sent() -> None:
    from kvcomm import plots

    figure = plots.mass_per_layer(made())
    assert figure is not None
    bars, strip = figure.axes
    assert [bar.get_height() for bar in bars.patches] == pytest.approx(
        [0.1 * (1 + n % 4) for n in range(N_LAYERS)]
    )
    marked = {
        label.get_text(): [int(x) for x, _ in points.get_offsets()]
        for label, points in zip(strip.get_yticklabels(), strip.collections, strict=True)
    }
    assert marked["kvcomm 0.3"] == [1, 4, 5]
    assert marked["random 0.3"] == [0, 2, 9]
    summary = made() | {"calibration": None}
    assert len(plots.mass_per_layer(summary).axes) == 1


def test_no_texts_of_a_plot_overlap() -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from kvcomm import plots

    for figure in (plots.recovered_against_bytes(made()), plots.mass_per_layer(made())):
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        boxes = [
            (text.get_text(), text.get_window_extent(canvas.get_renderer()))
            for axes in figure.axes
            for text in (
                axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts,
                *axes.get_xticklabels(), *axes.get_yticklabels(),
            )
            if text.get_text() and text.get_visible()
        ]  # fmt: skip
        for place, (one, box) in enumerate(boxes):
            for other, second in boxes[place + 1 :]:
                assert not box.overlaps(second), (one, other)
