"""Tables, the finding, the notes and the HTML file, against runs made by hand."""

import base64
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from made_runs import METHODS, N_LAYERS, interval, many, method, records, summary

from kvcomm import report
from kvcomm.report import answers, words

LABELS = [one[0] for one in METHODS]


# ---- tables --------------------------------------------------------------------------------


def test_the_table_has_every_column_with_values_by_hand() -> None:
    text = report.text_table(summary())
    heads, rule, *lines = text.splitlines()
    assert re.split(r"  +", heads) == [
        "method", "layers", "recovered", "nll", "match*", "F1", "EM", "message", "prefilled",
        "first token", "n",
    ]  # fmt: skip
    assert set(rule) == {"-"}
    row = next(line for line in lines if line.startswith("kvcomm 0.3"))
    assert re.split(r"  +", row) == [
        "kvcomm 0.3", "3/10", "0.50", "8.00", "0.33", "0.50", "0.25", "1.38 MB", "66", "14 ms", "3",
    ]  # fmt: skip
    below = lines[lines.index(row) + 1].split()
    assert below == ["0.40..0.60", "7.00..9.00", "0.23..0.43", "0.40..0.60", "0.15..0.35"]
    assert lines[-1] == (
        "hotpotqa, tiny <b>; data one.jsonl, two.jsonl; preset paper; default protocol: "
        "calibration records are not scored; * the published metric: match."
    )


def test_the_published_metric_comes_first_and_is_marked() -> None:
    fields = {"rouge_l_recall": interval(0.7), "rouge_l_f": interval(0.6)}
    changes = dict.fromkeys(LABELS, fields)
    run = summary(changes=changes, settings={"task": "hotpotqa"})
    headings = [column.heading for column in report.tables.columns(run)]
    assert headings[2:9] == [
        "recovered", "nll", "match*", "F1", "EM", "ROUGE-L recall", "ROUGE-L F",
    ]  # fmt: skip
    # A task that is not one of the project's is scored as most of the paper's are.
    assert report.tables.published_metric(summary(settings={"task": "mine"})) == "match"


def test_the_tasks_own_metric_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Task:
        metric = "rouge_l_recall"

    monkeypatch.setitem(report.tables.tasks.TASKS, "summaries", Task())
    changes = {label: {"rouge_l_recall": interval(0.7)} for label in LABELS}
    run = summary(changes=changes, settings={"task": "summaries"})
    headings = [column.heading for column in report.tables.columns(run)]
    assert headings[4:8] == ["ROUGE-L recall*", "match", "F1", "EM"]
    assert report.caption(run).endswith("* the published metric: ROUGE-L recall.")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"published_protocol": True, "preset": "reference"},
         "preset reference; published protocol: calibration records are scored too;"),
        ({"calibration": []}, "preset paper; default protocol: no calibration records;"),
        ({"calibration": [], "calibration_sha256": "0" * 64},
         "default protocol: calibration records are not scored;"),
        ({"published_protocol": None}, "preset paper; protocol not recorded;"),
        ({"receiver": {"model": "other", "n_layers": 10}}, "hotpotqa, tiny <b> to other; data one"),
        ({"data": "a_b.jsonl", "calibration_data": None}, "; data a_b.jsonl; preset paper;"),
        ({"data": "dev.jsonl", "calibration_data": "train.jsonl"},
         "; data dev.jsonl, calibrated by train.jsonl; preset paper;"),
        ({"data": None}, "; data not recorded; preset paper;"),
    ],
)  # fmt: skip
def test_every_table_names_models_data_and_protocol(settings: dict[str, Any], told: str) -> None:
    run = summary(settings=settings)
    assert told in report.text_table(run).splitlines()[-1]
    assert told.replace("<", r"\<") in report.markdown_table(run).splitlines()[-1]
    page = read(report.html_report(run, "a run"))
    assert told in page.texts("caption")[0]


def test_a_wide_table_loses_its_least_columns_and_says_so() -> None:
    run = summary(more=many(20))
    lines = report.text_table(run).splitlines()
    table = [line for line in lines if not line.startswith(("hotpotqa", "Left out"))]
    assert max(map(len, table)) <= 120
    assert all(f"a method of number {k} and its options" in "\n".join(table) for k in range(20))
    for heading in ("recovered", "nll", "match*", "message", "n"):
        assert f" {heading}" in table[0]
    assert lines[-1].startswith("Left out of a table this wide, in the report: ROUGE-L F, ROUGE-L")
    for heading in lines[-1].split(": ")[1].removesuffix(".").split(", "):
        assert f" {heading} " not in table[0]
        assert f" {heading} " in report.markdown_table(run).splitlines()[0]
    assert report.text_table(run, 10_000).splitlines()[-1].startswith("hotpotqa")


def test_markdown_holds_the_same_cells() -> None:
    *lines, blank, caption = report.markdown_table(summary()).splitlines()
    assert blank == "" and caption.startswith("hotpotqa")
    assert all(line.startswith("| ") and line.endswith(" |") for line in lines)
    assert len({line.count("|") for line in lines}) == 1
    assert "| kvcomm 0.3 | 3/10 | 0.50 [0.40..0.60] | 8.00 [7.00..9.00] |" in "\n".join(lines)


def test_markdown_marks_in_names_stay_text() -> None:
    run = summary(more=(method("a|b_*c*", "x", {}, None, 0, None, 9.0, 0.0, 0.1),))
    line = report.markdown_table(run).splitlines()[-3]
    assert line.startswith(r"| a\|b\_\*c\* | - | - | 9.00")


def test_failed_records_stand_in_the_table_and_the_notes() -> None:
    nothing = dict.fromkeys(
        (
            "recovered", "nll", "match", "f1", "em", "message_bytes", "receiver_tokens",
            "first_token", "sender", "transfer", "layers",
        )
    )  # fmt: skip
    run = summary(
        changes={
            "all layers": {"done": 0, "failed": 3, **nothing},
            "skyline": {"done": 2, "failed": 1},
        }
    )
    row = report.text_table(run, 200).splitlines()[-2]
    assert row.split() == ["all", "layers", "-", *["-"] * 8, "0", "(3", "failed)"]
    (note,) = [note for note in report.notes(run) if note.startswith("failed records")]
    assert note.startswith("failed records: skyline 1 of 3, all layers 3 of 3. They are in no mean")
    assert not any(note.startswith("failed") for note in report.notes(summary()))
    assert "2 (1 failed)" in read(report.html_report(run, "a run")).texts("td")


def test_layers_that_vary_are_called_so() -> None:
    run = summary(
        changes={"kvcomm 0.3": {"layers": None, "settings": {"strategy": "attention", "online": 2}}}
    )
    row = next(line for line in report.text_table(run).splitlines() if "kvcomm 0.3" in line)
    assert row.split()[2] == "varies"


def test_units() -> None:
    assert [report.size(n) for n in (0, 999, 1000, 1_384_448, 2e9, None)] == [
        "0 B", "999 B", "1 kB", "1.38 MB", "2 GB", "-",
    ]  # fmt: skip
    assert [report.seconds(s) for s in (0.0123, 0.9, 1.26, None)] == [
        "12.3 ms", "900 ms", "1.26 s", "-",
    ]  # fmt: skip


# ---- words ---------------------------------------------------------------------------------


def test_notes_tell_of_the_columns_that_there_are() -> None:
    text = "\n".join(report.notes(summary()))
    assert "with HotpotQA's rule for yes and no" in text
    assert "not scored (calibration; 1): c0" in text
    assert "ROUGE" not in text and "accuracy" not in text and "articles" not in text
    changes = {label: {"rouge_l_recall": interval(0.7)} for label in LABELS}
    run = summary(changes=changes, settings={"closed_answers": False})
    text = "\n".join(report.notes(run))
    assert "ROUGE-L" in text and "yes and no" not in text


def test_blank_golds_are_told() -> None:  # EV-157
    assert (
        "gold answers without a word but articles (3): an empty one has EM 1 and F1 0 there."
        in (report.notes(summary() | {"blank_golds": 3}))
    )


def test_the_controls_findings_are_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    control = ModuleType("kvcomm.methods.control")
    control.findings = lambda run: [f"noise: as the baseline, {len(run['methods'])} methods"]
    monkeypatch.setitem(sys.modules, "kvcomm.methods.control", control)
    monkeypatch.setattr("kvcomm.methods.control", control, raising=False)
    noise = method("noise 0.3", "control", {}, [1], 1000, 0.0, 12.0, 0.1, 0.1)
    assert report.notes(summary(more=(noise,)))[-1] == "noise: as the baseline, 6 methods"
    assert not any("noise" in note for note in report.notes(summary()))


def test_the_finding_follows_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert report.finding(summary()).endswith("3 records): too few to judge.")
    monkeypatch.setattr(words, "FEW", 3)
    good = report.finding(summary())
    assert good.startswith("kvcomm 0.3: K and V of 3 of 10 layers give 50% of what reading")
    assert "95% interval 40% to 60%" in good
    assert "clearly better in 1 of 1 comparison, clearly worse in 0" in good
    worse = {"method": "kvcomm 0.3", "control": "random 0.3", "nll_less": interval(-2.0)}
    run = summary(changes={"kvcomm 0.3": {"recovered": interval(-0.17)}})
    bad = report.finding(run | {"comparisons": [worse]})
    assert "give -17% of what" in bad
    assert "clearly better in 0 of 1 comparison, clearly worse in 1" in bad
    # Comparisons of other kinds, as a control's with the baseline, are not counted.
    other = {"method": "random 0.3", "control": "baseline", "nll_less": interval(3.5)}
    assert report.finding(summary() | {"comparisons": [other]}).endswith("3 records).")
    useless = report.finding(summary(changes={"skyline": {"nll": interval(13.0)}}))
    assert useless.startswith("Reading the context does not help this model here")
    assert "1.00 above" in useless
    nothing = summary(changes={label: {"recovered": None} for label in LABELS})
    assert "No shares to judge" in report.finding(nothing)
    assert "no layers chosen by attention" in report.finding(summary(leave_out=("kvcomm 0.3",)))


def test_the_best_of_several_is_called_that() -> None:
    other = method(
        "kvcomm 0.5", "kvcomm", {"strategy": "attention_gaussian", "ratio": 0.5}, [1, 2, 3, 4, 5],
        2_000_000, 0.7, 6.0, 0.1, 0.1,
    )  # fmt: skip
    assert report.finding(summary(more=(other,))).startswith(
        "kvcomm 0.5, the best of 2 here: K and V of 5 of 10 layers give 70%"
    )


# ---- the log -------------------------------------------------------------------------------


def test_records_are_shown_where_methods_fail_or_differ_or_all_are_wrong() -> None:
    run = summary()
    log = records(run)
    shown = answers.worth_showing(run, log)
    assert [(one.id, one.why) for one in shown] == [("r1", "differs"), ("r2", "wrong")]
    assert list(shown[0].lines) == LABELS
    log[-1]["error"] = "ValueError: broken"  # r2 of the last method
    log[-1]["match"] = None
    shown = answers.worth_showing(run, log)
    assert [(one.id, one.why) for one in shown] == [("r2", "failed"), ("r1", "differs")]
    assert answers.worth_showing(run, records(run, match=1.0)) == []


def test_lines_of_other_runs_are_nobodys() -> None:
    run = summary()
    log = records(run)
    log[0]["settings"] = {"ratio": 0.9, "layers": None}
    found = answers.by_label(run, log)
    assert [len(lines) for lines in found.values()] == [2, 3, 3, 3, 3]


def test_the_share_of_records_that_sent_a_layer() -> None:
    run = summary(changes={"kvcomm 0.3": {"layers": None}, "random 0.3": {"layers": None}})
    log = records(run)
    sent = {"r0": [1, 2], "r1": [2], "r2": [2, 9]}
    for line in log:
        if line["settings"].get("strategy") == "attention_gaussian":
            line["settings"]["layers"] = sent[line["id"]]
    shares = answers.layer_shares(run, log)
    assert shares == {
        "kvcomm 0.3": pytest.approx([0, 1 / 3, 1, 0, 0, 0, 0, 0, 0, 1 / 3]),
        "all layers": [1.0] * N_LAYERS,
    }
    assert set(answers.layer_shares(run, [])) == {"all layers"}


# ---- the page ------------------------------------------------------------------------------


class Page(HTMLParser):
    """Elements of a page with their text, what it refers to; tags have to be balanced."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.found: list[tuple[str, list[str]]] = []
        self.inside: list[list[str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), name
            if name in ("src", "href", "action", "data", "srcset"):
                self.links.append(value or "")
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
            text: list[str] = []
            self.found.append((tag, text))
            self.inside.append(text)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.inside.pop()

    def handle_data(self, data: str) -> None:
        for text in self.inside:
            text.append(data)

    def texts(self, tag: str) -> list[str]:
        return ["".join(text) for name, text in self.found if name == tag]


def read(source: str) -> Page:
    page = Page()
    page.feed(source)
    page.close()
    assert page.open == []
    assert "script" not in page.tags and "link" not in page.tags and "iframe" not in page.tags
    return page


def test_the_html_file_needs_nothing_else(tmp_path: Path) -> None:
    run = summary()
    path = report.write_report(run, tmp_path, "a <title> & more", records(run))
    assert path == tmp_path / "report.html"
    source = path.read_text()
    page = read(source)
    assert len(page.links) == 4
    prefix = "data:image/svg+xml;base64,"
    assert all(link.startswith(prefix) for link in page.links)
    drawings = [base64.b64decode(link.removeprefix(prefix)).decode() for link in page.links]
    assert all("<svg" in drawing for drawing in drawings)
    for label, drawing in zip(
        ("all layers", "kvcomm 0.3  (3)", "attention mass", "message in hand"), drawings,
        strict=True,
    ):  # fmt: skip
        assert label in drawing
    assert not re.search(r"https?://|url\(|@import", source)
    assert page.texts("h1") == page.texts("title") == ["a <title> & more"]
    assert page.texts("h2") == [
        "Results", "What a message buys", "The layers sent", "Where the receiver looks",
        "Time to the first token", "Answers side by side", "To make it again",
    ]  # fmt: skip
    assert page.texts("pre") == ["kvcomm eval --data 'a file.json'"]
    cells = page.texts("td")
    for shown in ("tiny <b>", "f" * 64, "a & b", "7.8.9", "kvcomm 0.3", "1.38 MB"):
        assert shown in cells
    assert any(cell == "8.007.00..9.00" for cell in cells)  # the interval stands below
    again = report.write_report(run, tmp_path, "a <title> & more", records(run)).read_text()
    assert again == source


def test_answers_stand_side_by_side() -> None:
    run = summary()
    log = records(run, question="Who <i>built</i> it?")
    log[-1] |= {"message": "a <u>message</u>", "answer": "x" * 500}
    log[-2] |= {"error": "ValueError: <broken>", "answer": None, "match": None, "nll": None}
    log[-3] |= {"reasoning_cut_off": True}
    page = read(report.html_report(run, "a run", log))
    assert page.texts("h3") == ["r1: a method failed", "r2: no method is right"]
    text = " ".join(page.texts("body"))
    assert "Worth a look are 2 of 3 records (a method failed: 1, no method is right: 1)." in text
    assert text.count("Who <i>built</i> it?") == 2
    assert text.count("Gold Ann") == 2
    cells = page.texts("td")
    for label in LABELS[:4]:
        assert f"answer 1 of {label}" in cells and f"answer 2 of {label}" in cells
    assert "answer 0 of baseline" not in cells  # right everywhere
    assert "failed: ValueError: <broken>" in cells
    message, long = sorted(page.texts("details"), key=len)
    assert message == "message passeda <u>message</u>"
    assert long == "x" * 200 + "… (500 characters)" + "x" * 500
    # A record's row: method, answer, its metrics, nll.
    row = next(text for text in page.texts("tr") if text.startswith("skylineanswer 1"))
    assert row == "skylineanswer 1 of skyline1.000.500.004.00"


def test_reasoning_that_never_ended_is_told() -> None:
    run = summary(leave_out=tuple(LABELS[1:]))
    page = read(report.html_report(run, "a run", records(run, match=0.0, reasoning_cut_off=True)))
    assert sum("reasoning that never ended" in cell for cell in page.texts("td")) == 3


def test_no_more_than_25_records_are_shown() -> None:
    run = summary()
    log = [
        line | {"id": f"q{k}", "index": k, "match": 0.0}
        for k in range(30)
        for line in records(run)
        if line["index"] == 0
    ]
    page = read(report.html_report(run, "a run", log))
    assert page.texts("h3") == [f"q{k}: no method is right" for k in range(25)]
    assert "Worth a look are 30 of 30 records" in " ".join(page.texts("p"))
    assert "The first 25 of these:" in " ".join(page.texts("p"))


def test_a_run_that_is_right_everywhere_says_so() -> None:
    run = summary()
    text = " ".join(read(report.html_report(run, "a run", records(run, match=1.0))).texts("p"))
    assert "Every method answered all of 3 records right." in text
    assert "Answers" not in " ".join(read(report.html_report(run, "a run")).texts("h2"))


HOSTILE = "</td></table><script>alert(1)</script><img src=//evil.example onerror=x>&amp;\"'\ud800"


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    bad = method(HOSTILE[:-1], "x", {}, [1], 1000, 0.5, 8.0, 0.1, 0.1)
    settings = {"sender": {"model": HOSTILE, "fingerprint": HOSTILE, "n_layers": N_LAYERS}}
    run = summary(more=(bad,), settings=settings)
    log = records(
        run, answer=HOSTILE, gold=[HOSTILE], question=HOSTILE * 9, message=HOSTILE, id=HOSTILE,
        match=0.0,
    )  # fmt: skip
    log[0]["error"] = HOSTILE
    source = report.write_report(run, tmp_path, HOSTILE, log).read_text("utf-8")
    page = read(source)
    assert "<script" not in source
    assert page.tags.count("img") == 4 == len(page.links)
    assert HOSTILE[:60] in page.texts("h1")[0]


@pytest.mark.parametrize(
    "run",
    [
        summary(leave_out=tuple(LABELS[1:])),
        summary(leave_out=tuple(LABELS[2:])),
        summary(leave_out=("kvcomm 0.3", "random 0.3", "all layers")) | {"calibration": None},
        summary(more=many(20)),
    ],
    ids=["one method", "two", "nothing sent", "many"],
)
def test_any_run_has_a_page(run: dict[str, Any]) -> None:
    page = read(report.html_report(run, "a run", records(run)))
    table = page.texts("table")[0]
    for one in run["methods"]:
        assert one["label"] in table
    sends = any(one["message_bytes"]["value"] for one in run["methods"])
    assert ("What a message buys" in page.texts("h2")) == sends
    assert ("The layers sent" in page.texts("h2")) == sends


# ---- counts --------------------------------------------------------------------------------


def test_one_of_a_thing_is_not_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "FEW", 0)
    run = summary(
        leave_out=tuple(LABELS[3:]),
        changes={"kvcomm 0.3": {"recovered": interval(0.5, n=1)}},
        settings={"n_records": 1},
    )
    run["environment"]["machine"]["threads"] = 1
    assert "(95% interval 40% to 60%, 1 record)" in report.finding(run)
    assert any("in batches of 8 on 1 thread," in note for note in report.notes(run))
    one = [line for line in records(run, match=0.0) if line["index"] == 0]
    text = " ".join(read(report.html_report(run, "a run", one)).texts("p"))
    assert "Worth a look are 1 of 1 record (no method is right: 1)." in text
