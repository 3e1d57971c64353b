"""The demo."""

import json
from pathlib import Path
from typing import Any

import pytest
from cli_bench import evaluation

from kvcomm.records import RECORDS
from kvcomm.runs import SUMMARY


def test_demo_runs_every_method_and_reports(
    run: Any, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, printed, told = run("demo", "--model", model, "--limit", 2)
    assert status == 0
    out = tmp_path / "kvcomm-demo"
    for label in (
        "baseline", "skyline", "kvcomm 0.3", "kvcomm 0.5", "kvcomm 0.7", "random 0.3",
        "random 0.5", "random 0.7", "all layers",
    ):  # fmt: skip
        assert f"\n{label} " in printed
    summary = json.loads((out / SUMMARY).read_text())
    assert len(summary["settings"]["calibration"]) == 8
    assert not set(summary["settings"]["calibration"]) & {
        json.loads(line)["id"] for line in (out / RECORDS).read_text().splitlines()
    }
    assert (out / "report.html").exists()
    assert "layers are chosen on 8 others" in told
    # A finished demo is made anew.
    before = (out / RECORDS).stat().st_mtime_ns
    assert run("demo", "--model", model, "--limit", 1)[0] == 0
    assert (out / RECORDS).stat().st_mtime_ns > before


def test_a_demo_leaves_other_runs_alone(run: Any, model: str, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = [*evaluation(model, data, out, ()), "--methods", "baseline"]
    assert run(*words, on_device=True)[0] == 0
    before = {path: path.read_bytes() for path in out.iterdir()}
    status, _, told = run("demo", "--model", model, "--limit", 1, "--out", out)
    assert status == 2
    assert "holds another run: take another folder" in told
    assert {path: path.read_bytes() for path in before} == before


def test_the_shipped_questions_are_forty_and_eight() -> None:
    from kvcomm import tasks

    assert len(tasks.find("hotpotqa").load(tasks.SHIPPED)) >= 48
