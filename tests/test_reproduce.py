"""A reproduction end to end on a tiny model: tables, figures, and going on after a kill.

What a cell should be is computed here from the logs of the runs, by the definitions.
"""

import argparse
import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcomm.commands import eval as eval_command
from kvcomm.commands import reproduce as reproduce_command
from kvcomm.errors import FormatError
from kvcomm.plan import TooFewError
from kvcomm.reproduce import curves, data
from kvcomm.reproduce.catalogue import EXHIBITS
from kvcomm.reproduce.course import reproduce
from kvcomm.reproduce.groups import Group
from kvcomm.reproduce.request import Request
from kvcomm.reproduce.runs import Runs
from kvcomm.tasks import find

ROOT = Path(__file__).resolve().parent.parent
COUNTRIES = ("Peru", "Chad", "Oman", "Laos")
Make = Callable[..., Path]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data files of two tasks, as they are published."""
    root = tmp_path_factory.mktemp("data")
    write(
        root / "countries" / "countries.jsonl",
        [
            {
                "id": f"c{n}",
                "prompt_A": f"Ann {n} is at the Tower of {COUNTRIES[n % 4]} {n}.",
                "prompt_B": f"Where is Ann {n}? ",
                "country": COUNTRIES[n % 4],
            }
            for n in range(13)
        ],
    )
    write(
        root / "tipsheets" / "tipsheets.jsonl",
        [
            {
                "prompt_A": f"Firm {n} is strong.",
                "prompt_B": f"Which firm {n}?",
                "options": ["A", "B"],
                "label": "AB"[n % 2],
                "attitudes": {},
            }
            for n in range(5)
        ],
    )
    return root


@pytest.fixture(scope="module")
def request_of(tiny: Make, folder: Path, device: str) -> Callable[..., Request]:
    def make(out: Path, **options: Any) -> Request:
        model = str(tiny("llama"))
        given = {"methods": ("kvcomm",), "grid": 2, "limit": 6} | options
        return Request(models=(model,), data=folder, out=out, device=device, **given)

    return make


@pytest.fixture(scope="module")
def made(request_of: Callable[..., Request], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reproduction of two tables and two figures."""
    out = tmp_path_factory.mktemp("made")
    names = ("table-1", "table-2", "figure-7", "figure-11")
    request = request_of(out, tasks=("countries", "tipsheets", "hotpotqa"))
    assert reproduce(names, request, command=("kvcomm", "reproduce")) == 0
    return out


def cells(out: Path, name: str) -> dict[tuple[str, str, str], dict[str, str]]:
    """The cells of an exhibit by measure, row and column."""
    with open(out / f"{name}.csv", newline="") as file:
        return {
            (line["measure"], line["row"], line["column"]): line for line in csv.DictReader(file)
        }


def logged(out: Path, part: str) -> list[dict[str, Any]]:
    """The records of the runs whose folder's name has a part in it."""
    return [
        json.loads(line)
        for path in sorted((out / "runs").glob(f"*{part}*/records.jsonl"))
        for line in path.read_text().splitlines()
    ]


# ---- tables --------------------------------------------------------------------------------


def test_a_cell_is_what_the_logs_say(made: Path) -> None:
    found = cells(made, "table-1")
    main = [r for r in logged(made, "countries-*-main") if r["settings"]["ratio"] == 0.5]
    kvcomm = [r for r in main if r["settings"]["strategy"] == "attention_gaussian"]
    published = found["published metric", "kvcomm 0.5", "countries"]
    assert len(kvcomm) == 6
    assert float(published["value"]) == sum(r["match"] for r in kvcomm) / 6
    assert published["n"] == "6"
    assert published["paper"] == "0.57"  # pair 6, the closest that Table 1 prints

    base = logged(made, "countries-*-base")
    below, above = (
        {r["id"]: r["nll"] for r in base if r["method"] == name} for name in ("baseline", "skyline")
    )
    gain = sum(below[r["id"]] - r["nll"] for r in kvcomm)
    room = sum(below[r["id"]] - above[r["id"]] for r in kvcomm)
    recovered = found["recovered", "kvcomm 0.5", "countries"]
    assert float(recovered["value"]) == pytest.approx(gain / room)
    assert recovered["paper"] == ""


def test_measures_are_tables_of_their_own_with_the_protocol_named(made: Path) -> None:
    text = (made / "table-1.txt").read_text()
    titles = [line for line in text.splitlines() if line.startswith("Table 1.")]
    assert len(titles) == 2
    assert "published metric" in titles[0] and "recovered" in titles[1]
    assert all("preset paper, calibrated on records that are not scored" in t for t in titles)
    assert "no data file for hotpotqa." in text
    assert cells(made, "table-1")["published metric", "skyline", "hotpotqa"]["value"] == ""
    for ending in ("md", "tex", "csv"):
        assert (made / f"table-1.{ending}").stat().st_size > 0


@pytest.mark.parametrize("name", ["table-1", "figure-11"])
def test_every_table_names_its_data_files_without_a_folder(made: Path, name: str) -> None:
    of = {"countries": "countries.jsonl", "tipsheets": "tipsheets.jsonl"}
    for ending in ("txt", "md", "tex"):
        tables = re.findall(r"^[- ]*data files: (.*?)\.(?:\\par)?$",
                            (made / f"{name}.{ending}").read_text(), re.MULTILINE)  # fmt: skip
        listed = [dict(part.split(": ") for part in one.split("; ")) for one in tables]
        both = {"Countries": "countries.jsonl", "Tipsheets": "tipsheets.jsonl"}
        # Table 1 is by two measures; Figure 11 has a table for each data set.
        assert listed == ([both] * 2 if name == "table-1" else [{k: v} for k, v in both.items()])
    with open(made / f"{name}.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    if name == "table-1":
        assert {(line["column"], line["data"]) for line in lines if line["value"]} == set(
            of.items()
        )
    else:
        assert {line["data"] for line in lines} == set(of.values())


def test_tables_share_their_runs(made: Path) -> None:
    first, second = cells(made, "table-1"), cells(made, "table-2")
    place = "recovered", "kvcomm 0.3", "tipsheets"
    assert first[place]["value"] == second[place]["value"] != ""
    assert len(list((made / "runs").glob("tipsheets-*-main"))) == 1
    # Three ratios of the selection; as many of random layers, and all layers; on four records.
    assert len(logged(made, "tipsheets-*-main")) == 3 * 4
    assert len(logged(made, "tipsheets-*-fixed")) == 4 * 4


def test_claims_are_told_below_and_kept(made: Path) -> None:
    verdicts = json.loads((made / "claims" / "table-2.json").read_text())
    assert [one["name"] for one in verdicts] == ["random-0.3", "random-0.5", "random-0.7"]
    # The tiny model's answers match nothing, with the context read or not; by likelihood it gains,
    # on too few records for any verdict, so that ten are named as the least that would do.
    told = {(j["measure"], j["verdict"]) for one in verdicts for j in one["judged"]}
    untold = "cannot be told at this n"
    assert told == {("published metric", untold), ("recovered", untold)}
    for one in verdicts:
        assert re.search(r"about n=\d+ would tell|no n up to", one["judged"][1]["why"])
    assert verdicts[0]["claim"] in (made / "table-2.txt").read_text()


def test_the_account_names_no_path(made: Path) -> None:
    text = (made / "README.md").read_text()
    assert "kvcomm reproduce" in text and "`figure-7`" in text
    assert "countries-" in text and "hotpotqa: no data file." in text
    assert str(made) not in text and str(ROOT) not in text


def test_the_same_again_runs_nothing_and_gives_the_same_bytes(
    made: Path, request_of: Callable[..., Request]
) -> None:
    before = {path: path.read_bytes() for path in made.glob("*.*") if path.name != "README.md"}
    sizes = {path: path.stat().st_size for path in made.glob("runs/*/records.jsonl")}
    names = ("table-2", "figure-7")
    reproduce(names, request_of(made, tasks=("countries", "tipsheets", "hotpotqa"), batch_size=3))
    assert {path: path.read_bytes() for path in before} == before
    assert {path: path.stat().st_size for path in sizes} == sizes


def test_the_published_protocol_scores_what_it_calibrates_on(
    request_of: Callable[..., Request], tmp_path: Path
) -> None:
    request = request_of(tmp_path, preset="reference", tasks=("tipsheets",), limit=None)
    reproduce(("table-2",), request)
    assert {one["id"] for one in logged(tmp_path, "main")} == {"0", "1", "2", "3", "4"}
    assert "preset reference, published protocol" in (tmp_path / "table-2.txt").read_text()
    # floor(0.7 * 4) = 2 layers, in place of 3.
    settings = [one["settings"] for one in logged(tmp_path, "fixed")]
    random = [one["layers"] for one in settings if one["strategy"] == "random"]
    assert {len(layers) for layers in random} == {1, 2}


# ---- figures -------------------------------------------------------------------------------


def test_a_sweep_runs_sets_that_differ_once(made: Path) -> None:
    records = logged(made, "countries-*-calibration-nll")
    runs = {tuple(r["settings"]["given"]) for r in records}
    assert len(records) == len(runs) * len({r["id"] for r in records})
    # Nine of the 13 records may calibrate, so that 8 do; one of them is then not scored.
    found = cells(made, "figure-11")
    assert {row for measure, row, _ in found if measure == "recovered"} == {"1", "2", "4", "8"}
    assert {r["id"] for r in records} == {"c1", "c2", "c3", "c4", "c5"}
    for (measure, _, ratio), cell in found.items():
        assert measure == "recovered" and ratio.startswith("ratio ") and cell["n"] in {"5", "3"}


def test_no_answers_are_generated_for_a_sweep_and_the_figure_says_so(made: Path) -> None:
    assert {tuple(r["token_ids"]) for r in logged(made, "level-nll")} == {()}
    assert "no answers generated" in (made / "figure-7.txt").read_text()
    svg = (made / "figure-7.svg").read_text()
    assert svg.startswith("<?xml") and str(ROOT) not in svg
    assert (made / "figure-7.png").read_bytes().startswith(b"\x89PNG")


def test_every_panel_says_what_it_is_over(made: Path) -> None:
    """Text is drawn as outlines; its words stand beside these in comments."""
    drawn = (made / "figure-11.svg").read_text()
    for words in (
        "Countries, n = 5", "Tipsheets, n = 3", "calibration records", "ratio 0.7",
        "recovered, share (0 baseline, 1 skyline)", "whiskers: 95% bootstrap intervals",
    ):  # fmt: skip
        assert f"<!-- {words}" in drawn or words in drawn, words


def test_the_bill_says_n_unit_dtype_and_that_it_has_no_interval(
    request_of: Callable[..., Request], tmp_path: Path
) -> None:
    reproduce(("figure-8",), request_of(tmp_path, tasks=("tipsheets",)))
    drawn = " ".join((tmp_path / "figure-8.svg").read_text().split())
    for words in (
        "Tipsheets, n = 4", "GFLOPs per record", "MB per record", "weights in bf16, K and V in",
        "so no interval", "preset paper",
    ):  # fmt: skip
        assert words in drawn, words
    for line in cells(tmp_path, "figure-8").values():
        assert (line["n"], line["low"], line["data"]) == ("4", "", "tipsheets.jsonl")
    told = (tmp_path / "figure-8.txt").read_text()
    assert told.count("weights in bf16, K and V in bf16.") == told.count("Figure 8. ")


def test_a_map_says_how_wide_its_intervals_are(
    request_of: Callable[..., Request], tmp_path: Path
) -> None:
    reproduce(("figure-14", "figure-4"), request_of(tmp_path, tasks=("countries", "tipsheets")))
    found = [line for line in cells(tmp_path, "figure-14").values() if line["value"]]
    assert len(found) == 2
    assert found[0]["data"] == "countries.jsonl; tipsheets.jsonl"
    # Likeness has no direction, and its interval none.
    assert [found[0][name] for name in ("value", "low", "high", "n")] == [
        found[1][name] for name in ("value", "low", "high", "n")
    ]
    value, low, high = (float(found[0][name]) for name in ("value", "low", "high"))
    drawn = (tmp_path / "figure-14.svg").read_text()
    assert f"95% intervals within ±{max(high - value, value - low):.2f}, in the table" in drawn
    assert f"n = {found[0]['n']} calibration records" in drawn
    assert "95% intervals within" in (tmp_path / "figure-4.svg").read_text()


def test_a_figure_says_of_the_protocol_what_it_has(
    made: Path, request_of: Callable[..., Request], tmp_path: Path
) -> None:
    # Every layer is as fine as it goes, so both are the same runs.
    for grid in (9, 0):
        reproduce(("figure-3",), request_of(tmp_path, tasks=("countries",), grid=grid))
    assert len(list((tmp_path / "runs").glob("countries-*-prepend-all-nll"))) == 1
    drawn = (tmp_path / "figure-3.svg").read_text()
    assert "preset paper; n records; from likelihoods" in " ".join(drawn.split())
    assert "alpha" not in drawn and "whiskers" not in drawn and "calibrated" not in drawn
    # The level looks at the attention alone.
    assert "alpha" not in (made / "figure-7.txt").read_text()
    assert "alpha 1" in (made / "figure-11.txt").read_text()


def test_levels_are_taken_from_the_ranking(made: Path) -> None:
    given = {tuple(r["settings"]["given"]) for r in logged(made, "countries-*-level")}
    assert given == {(layer,) for layer in range(4)}  # 9/28 of 4 layers is one layer a level


# ---- what is refused -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (("table-99",), {}, "table-99: not in the paper"),
        (("figure-1",), {}, "figure-1 is not made: it has no values"),
        (("table-1",), {"tasks": ("musique",)}, "no data file below .* for musique"),
        (("table-10",), {"tasks": ("countries",)}, "table-10 has none of the tasks countries"),
        (("table-4",), {"tasks": ("mmlu",)}, "table-4 has none of the tasks mmlu"),
        # A message needs a context, which mmlu has not.
        (("figure-4",), {"tasks": ("mmlu",)}, "figure-4 has none of the tasks mmlu"),
        (("figure-8",), {"tasks": ("mmlu",)}, "figure-8 has none of the tasks mmlu"),
        (("figure-2",), {"tasks": ("mmlu",)}, "no data file below .* for mmlu"),
        (("table-1",), {"tasks": ("tips",)}, "task: 'tips', expected one of hotpotqa"),
    ],
)
def test_what_cannot_be_made(
    request_of: Callable[..., Request],
    tmp_path: Path,
    names: tuple[str, ...],
    options: Mapping[str, Any],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        reproduce(names, request_of(tmp_path, **options))


def test_of_several_exhibits_those_without_data_are_left_out(
    request_of: Callable[..., Request], tmp_path: Path
) -> None:
    reproduce(("table-10", "table-4"), request_of(tmp_path))
    assert not (tmp_path / "table-10.txt").exists()
    found = cells(tmp_path, "table-4")
    assert found["records", "countries", "scored"]["value"] == "6.0"
    assert found["records", "countries", "scored"]["paper"] == "200.0"
    assert found["records", "hotpotqa", "scored"]["value"] == ""
    assert "- table-10: no data file" in (tmp_path / "README.md").read_text()


@pytest.fixture
def few(folder: Path, tmp_path: Path) -> Path:
    """Two records of countries, and one of tipsheets."""
    for name, n in (("countries", 2), ("tipsheets", 1)):
        part = tmp_path / "few" / name
        part.mkdir(parents=True)
        lines = (folder / name / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (part / f"{name}.jsonl").write_text("".join(lines[:n]))
    return tmp_path / "few"


def test_a_task_with_too_few_records_is_left_out(
    request_of: Callable[..., Request], few: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    request = replace(request_of(out, tasks=("countries", "tipsheets")), data=few)
    assert reproduce(("table-2",), request) == 0
    filled = {column for (_, _, column), cell in cells(out, "table-2").items() if cell["value"]}
    assert filled == {"countries"}
    account = (out / "README.md").read_text()
    assert "- tipsheets: no record to score: of 1, 1 left out (calibration)" in account


def test_a_search_without_records_leaves_the_rest_alone(
    request_of: Callable[..., Request], few: Path, tmp_path: Path
) -> None:
    """The published protocol scores both records, so that none of them may be searched on."""
    out = tmp_path / "out"
    request = replace(request_of(out, tasks=("countries",), preset="reference"), data=few)
    assert reproduce(("extra-search", "table-2"), request) == 0
    assert cells(out, "table-2")
    account = (out / "README.md").read_text()
    assert "- extra-search: no record is left to search on." in account
    assert "- extra-search on countries: no record is left to search on." in account


def test_a_search_shares_the_runs_that_it_is_compared_with(
    request_of: Callable[..., Request], tmp_path: Path
) -> None:
    """The published protocol scores what calibrates, but for the searched layers."""
    request = request_of(tmp_path, tasks=("countries",), preset="reference", limit=4)
    assert reproduce(("table-2", "extra-search"), request) == 0
    base, searched = logged(tmp_path, "4-base"), logged(tmp_path, "4-search")
    assert {one["id"] for one in base} == {one["id"] for one in searched} == {
        "c0", "c1", "c2", "c3",
    }  # fmt: skip
    found = json.loads(next(tmp_path.glob("runs/*4-search*/search.json")).read_text())
    assert next(iter(found.values()))["asked"]["records"] == [f"c{n}" for n in range(4, 10)]


def test_tasks_without_records_for_a_group_are_left_out(
    request_of: Callable[..., Request], tmp_path: Path
) -> None:
    runs = Runs(request_of(tmp_path, tasks=("countries", "tipsheets")))
    split = Group("split", {}, keep=lambda one: one.id.startswith("c"))
    found = runs.chosen(EXHIBITS["table-1"], [split])
    assert [one.task.name for one in found] == ["countries"]
    why = "tipsheets: no record is left to score, of 4"
    assert runs.left_out == {"table-1 on tipsheets": why}


def test_a_file_that_cannot_be_read_stops_before_anything_runs(
    request_of: Callable[..., Request], folder: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "data"
    shutil.copytree(folder, broken)
    with open(broken / "tipsheets" / "tipsheets.jsonl", "a") as file:
        file.write("{}\n")
    request = replace(request_of(tmp_path / "out", tasks=("countries", "tipsheets")), data=broken)
    with pytest.raises(FormatError, match=r"tipsheets\.jsonl line 6"):
        reproduce(("table-2",), request)
    assert not list((tmp_path / "out").glob("runs/*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": ()}, "expected SENDER"),
        ({"models": ("a", "b", "c")}, "found 3 names"),
        ({"methods": ("debate",)}, "methods: expected some of"),
        ({"limit": 0}, "limit: expected 1 or more"),
        ({"alpha": 1.5}, "alpha: 1.5 is outside 0 .. 1"),
        ({"grid": 1}, "grid: expected 0, or 2"),
        ({"batch_size": 0}, "batch size: expected 1"),
    ],
)
def test_requests_out_of_range(options: Mapping[str, Any], message: str) -> None:
    given = {"models": ("a",), "data": Path(), "out": Path()} | options
    with pytest.raises(ValueError, match=message):
        Request(**given)


def test_records_that_may_calibrate(folder: Path) -> None:
    found = data.read(find("countries"), folder, limit=6, published=False)
    assert found is not None
    assert [one.id for one in found.plan.scored] == ["c1", "c2", "c3", "c4", "c5", "c6"]
    # The plan's, those that are not scored, then a third of the scored ones from the end.
    spare = ["c7", "c8", "c9", "c10", "c11", "c12"]
    assert [one.id for one in found.pool] == ["c0", *spare, "c6", "c5"]
    plan = found.divided(8)
    assert [one.id for one in plan.calibration] == ["c0", *spare, "c6"]
    assert [one.id for one in plan.scored] == ["c1", "c2", "c3", "c4", "c5"]
    assert data.read(find("musique"), folder, limit=None, published=False) is None


def test_records_to_search_on_are_not_scored(folder: Path) -> None:
    """The published protocol scores those that calibrate; a search takes others."""
    published = data.read(find("countries"), folder, limit=6, published=True)
    assert published is not None
    assert [one.id for one in published.pool] == [f"c{n}" for n in range(13)]
    found = published.apart()
    plan = found.divided(6)
    assert [one.id for one in plan.calibration] == [f"c{n}" for n in range(6, 12)]
    assert [one.id for one in plan.scored] == [f"c{n}" for n in range(6)]
    assert not plan.published
    # Of all 13, there is a third at the end that can be taken.
    everything = data.read(find("countries"), folder, limit=None, published=True)
    assert everything is not None
    assert [one.id for one in everything.apart().pool] == ["c12", "c11", "c10", "c9"]
    paper = data.read(find("countries"), folder, limit=6, published=False)
    assert paper is not None
    assert paper.apart() is paper


def test_too_few_records_are_told_by_what_lacks_them(folder: Path) -> None:
    found = data.read(find("countries"), folder, limit=2, published=False)
    assert found is not None
    with pytest.raises(TooFewError, match="countries: no record is left to score, of 2"):
        found.divided(1, lambda one: one.id == "c0")
    with pytest.raises(TooFewError, match="no record is left to calibrate on, of 11"):
        found.divided(1, lambda one: one.id == "c1")


def test_files_are_those_of_the_records(tmp_path: Path) -> None:
    """Two files of three records: one calibrates, so two of the first are scored, then three."""
    for name, first in (("one_a", 0), ("two.b", 3)):
        write(
            tmp_path / "countries" / f"{name}.jsonl",
            [
                {"id": f"c{n}", "prompt_A": f"Ann {n}.", "prompt_B": f"Who {n}?", "country": "Peru"}
                for n in range(first, first + 3)
            ],
        )
    task = find("countries")
    found = data.read(task, tmp_path, limit=2, published=False)
    assert found is not None
    assert found.sources(one.id for one in found.plan.scored) == ("one_a.jsonl",)
    found = data.read(task, tmp_path, limit=3, published=False)
    assert found is not None
    assert found.sources(one.id for one in found.plan.scored) == ("one_a.jsonl", "two.b.jsonl")
    assert found.sources([]) == ()
    mixture = curves.mix([found, replace(found, task=find("tipsheets"))])
    ids = [one.id for one in mixture.plan.scored if one.id.startswith("tipsheets:two:")]
    assert len(ids) == 1
    assert mixture.sources(ids) == ("two.b.jsonl",)


def test_shared_options_are_told_alike() -> None:
    """What `eval` and `reproduce` both take, and means the same, has one text."""
    texts = []
    for command in (eval_command, reproduce_command):
        parser = argparse.ArgumentParser()
        command.add_options(parser)
        texts.append({action.option_strings[0]: action.help for action in parser._actions})
    first, second = texts
    for option in ("--dtype", "--device", "--threads", "--batch-size"):
        assert first[option] == second[option]
    for option in ("--limit", "--preset", "--alpha"):
        assert second[option].startswith(first[option].split(" (default")[0])


# ---- kills ---------------------------------------------------------------------------------


def test_a_run_that_was_killed_goes_on_to_the_same_tables(
    tiny: Make, folder: Path, device: str, tmp_path: Path
) -> None:
    def start(out: Path) -> subprocess.Popen[bytes]:
        words = ["reproduce", "--table", "2", "--tasks", "tipsheets"]
        words += ["--models", str(tiny("llama")), "--data-dir", str(folder), "--limit", "6"]
        words += ["--out", str(out), "--batch-size", "2", "--device", device]
        return subprocess.Popen(
            [sys.executable, "-m", "kvcomm", *words],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def size(out: Path) -> int:
        return sum(path.stat().st_size for path in out.glob("runs/*/records.jsonl"))

    whole, torn = tmp_path / "whole", tmp_path / "torn"
    assert start(whole).wait() == 0
    total, n_kills = size(whole), 0
    for share in (0.15, 0.5, 0.8):
        process = start(torn)
        while process.poll() is None and size(torn) < share * total:
            time.sleep(0.002)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            n_kills += 1
        process.wait()
    assert n_kills == 3
    assert start(torn).wait() == 0
    for path in sorted(whole.glob("*.*")):
        if path.name != "README.md":
            assert (torn / path.name).read_bytes() == path.read_bytes(), path.name
    logs = sorted(whole.glob("runs/*/records.jsonl"))
    assert logs
    for log in logs:
        assert timeless(torn / log.relative_to(whole)) == timeless(log)


def timeless(log: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, log.read_text().splitlines())
    return [{name: value for name, value in one.items() if name != "seconds"} for one in lines]
