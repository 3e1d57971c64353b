"""Tables of a reproduction: every form holds the same hand-made numbers, and escapes what it must.

Also what the paper printed, and which of its pairs stands beside a user's.
"""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvcomm.layout import markdown_text
from kvcomm.reproduce import paper
from kvcomm.reproduce.table import Cell, Table, csv_text, latex, latex_text, markdown, text
from kvcomm.statistics import Interval

NAN = float("nan")

TABLE = Table(
    title="Table 1. Main results: match.",
    measure="match",
    corner="method",
    rows=("kvcomm 0.3", "all_layers"),
    columns=("countries", "tmath"),
    cells={
        ("kvcomm 0.3", "countries"): Cell(Interval(0.456, 0.361, 0.554, 99), 0.46),
        ("kvcomm 0.3", "tmath"): Cell(None, 0.35),
        ("all_layers", "countries"): Cell(Interval(-0.004, NAN, NAN, 7)),
    },
    sources={"countries": ("countries.jsonl",), "tmath": ("a_1.jsonl", "b|2.jsonl")},
    notes=("A note, 100% true.",),
    headings={"countries": "Countries"},
)


def test_text_has_the_interval_and_the_paper_below_each_value() -> None:
    assert text(TABLE).splitlines() == [
        "Table 1. Main results: match.",
        "",
        "method            Countries       tmath",
        "---------------------------------------",
        "kvcomm 0.3             0.46           -",
        "            0.36..0.55 n=99",
        "                 paper 0.46  paper 0.35",
        "all_layers             0.00           -",
        "                        n=7",
        "",
        "A note, 100% true.",
        "data files: Countries: countries.jsonl; tmath: a_1.jsonl, b|2.jsonl.",
    ]


def test_markdown_has_a_cell_per_value() -> None:
    assert markdown(TABLE).splitlines() == [
        "### Table 1. Main results: match.",
        "",
        "| method | Countries | tmath |",
        "| --- | ---: | ---: |",
        "| kvcomm 0.3 | 0.46 [0.36..0.55 n=99] (paper 0.46) | - (paper 0.35) |",
        "| all_layers | 0.00 [n=7] | - |",
        "",
        "- A note, 100% true.",
        r"- data files: Countries: countries.jsonl; tmath: a_1.jsonl, b\|2.jsonl.",
    ]


def test_latex_escapes_and_aligns() -> None:
    lines = latex(TABLE).splitlines()
    assert r"\begin{tabular}{lrr}" in lines
    assert (
        r"kvcomm 0.3 & 0.46 {\scriptsize [0.36..0.55 n=99]} (paper 0.46) & -- (paper 0.35) \\"
        in (lines)
    )
    assert r"all\_layers & 0.00 {\scriptsize [n=7]} & -- \\" in lines
    assert r"A note, 100\% true.\par" in lines
    files = r"data files: Countries: countries.jsonl; tmath: a\_1.jsonl, b\textbar{}2.jsonl.\par"
    assert files in lines


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a_b & c", r"a\_b \& c"),
        ("50% of $x#", r"50\% of \$x\#"),
        ("{\\}", r"\{\textbackslash{}\}"),
        ("~^<>|", r"\textasciitilde{}\textasciicircum{}\textless{}\textgreater{}\textbar{}"),
        ("plain 0.5", "plain 0.5"),
    ],
)
def test_latex_text(given: str, expected: str) -> None:
    assert latex_text(given) == expected


def test_csv_has_a_line_per_cell_with_full_numbers() -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text("table-1", [TABLE], "a to b", "paper"))))
    assert len(rows) == 4
    assert rows[0] == {
        "table": "table-1", "measure": "match", "row": "kvcomm 0.3", "column": "countries",
        "value": "0.456", "low": "0.361", "high": "0.554", "n": "99", "paper": "0.46",
        "models": "a to b", "preset": "paper", "data": "countries.jsonl",
    }  # fmt: skip
    assert (rows[1]["value"], rows[1]["paper"]) == ("", "0.35")
    assert rows[1]["data"] == "a_1.jsonl; b|2.jsonl"
    assert (rows[2]["value"], rows[2]["low"], rows[2]["n"]) == ("-0.004", "", "7")


def test_a_cell_that_is_about_no_one_data_set_has_the_files_of_all() -> None:
    assert TABLE.files("kvcomm 0.3", "tmath") == ("a_1.jsonl", "b|2.jsonl")
    assert TABLE.files("countries", "tmath") == ("countries.jsonl", "a_1.jsonl", "b|2.jsonl")
    assert TABLE.files("1", "ratio 0.3") == ("countries.jsonl", "a_1.jsonl", "b|2.jsonl")
    assert replace(TABLE, sources={}).lines[-1] == "data files: none."


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("dev_80.jsonl", "dev_80.jsonl"),
        ("_a_ b_", r"\_a\_ b\_"),
        ("a|b*c<d\\", r"a\|b\*c\<d" + "\\" * 2),
        ("é_ü", "é_ü"),
    ],
)
def test_markdown_text(given: str, expected: str) -> None:
    assert markdown_text(given) == expected


# ---- what the paper printed ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "pair", "row", "task", "expected"),
    [
        # The headline table of the specification.
        (("8",), "1", "skyline", "hotpotqa", 0.74),
        (("8",), "1", "kvcomm 0.7", "tmath", 0.38),
        (("1",), "6", "kvcomm 0.3", "countries", 0.46),
        (("2",), "6", "random 0.3", "musique", 0.01),
        (("1",), "1", "skyline", "hotpotqa", None),
        (("9",), "9", "random 0.3", "hotpotqa", None),
        # A larger set stands for its task.
        (("6",), "6", "skyline", "hotpotqa", 0.77),
        (("10",), "5", "kvcomm 0.7 two senders", "musique", 0.29),
        # Columns that look swapped in print are not held against anything.
        (("6",), "6", "skyline", "qasper", None),
    ],
)
def test_printed_values(
    numbers: tuple[str, ...], pair: str, row: str, task: str, expected: float | None
) -> None:
    assert paper.value(numbers, pair, row, task) == expected


def test_the_transcript_gives_the_same_values(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import paper_values

    transcript = json.loads((shared / "reference" / "paper_tables.json").read_text())
    assert paper_values.compact(transcript) == json.loads(paper_values.OUT.read_text())


@pytest.mark.parametrize(
    ("numbers", "names", "same", "expected"),
    [
        (("8",), ("smollm2-135m", "llama"), True, "2"),
        (("1",), ("smollm2-135m", "llama"), True, "6"),
        (("8",), ("qwen2.5-coder-0.5b", "qwen2"), True, "3"),
        (("1",), ("a", "b", "qwen2"), False, "7"),
        (("2",), ("qwen2.5-coder-0.5b", "qwen2"), True, "6"),
        (("1",), ("Falcon3-1B", "llama"), False, "8"),
        (("10",), ("x", "y", "llama"), False, "5"),
        ((), ("x",), True, None),
    ],
)
def test_the_closest_pair(
    numbers: tuple[str, ...], names: tuple[str, ...], same: bool, expected: str | None
) -> None:
    assert paper.closest_pair(numbers, names, same) == expected


def test_an_unknown_pair_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected one of 1, 2, 3, 4, 5, 6, 7, 8, 9, found '10'"):
        paper.check_pair("10")
