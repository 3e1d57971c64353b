"""Layer scores from a file: whose they are, and what `kvcomm eval` takes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcomm.cli import main
from kvcomm.runs import RUN, SUMMARY
from kvcomm.selection import LayerScores

RECORDS = [
    {
        "id": f"m{number}", "question": f"Who owns boat {number}?", "answer": "Ann",
        "answer_aliases": [], "answerable": True,
        "paragraphs": [
            {"title": "Boat", "paragraph_text": f"Ann owns boat {number}.", "is_supporting": True}
        ],
    }
    for number in range(3)
]  # fmt: skip


@pytest.fixture
def run(
    tiny: Callable[..., Path], tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in RECORDS))
    pair = ("--model", tiny("llama"), "--data", data, "--device", device)

    def start(command: str, *words: Any) -> tuple[int, str, str]:
        status = main([str(word) for word in (command, *pair, *words)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return start


@pytest.fixture
def scores(run: Any, tmp_path: Path) -> Path:
    """Made on musique."""
    path = tmp_path / "scores.json"
    assert run("calibrate", "--task", "musique", "--out", path)[0] == 0
    return path


def evaluation(task: str, scores: Path, out: Path) -> list[Any]:
    return ["eval", "--task", task, "--scores", scores, "--out", out, "--methods", "kvcomm",
            "--max-new-tokens", 1]  # fmt: skip


def test_a_calibration_says_how_many_records_and_of_which_task(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "scores.json"
    words = ("calibrate", "--task", "musique", "--out", path)
    assert "\n1 record, preset paper; " in run(*words)[1]
    assert "\n3 records, preset paper; " in run(*words, "--samples", 3)[1]
    assert LayerScores.load(path).task == "musique"


def test_scores_of_the_run_s_own_task_are_taken(run: Any, scores: Path, tmp_path: Path) -> None:
    assert run(*evaluation("musique", scores, tmp_path / "run"))[0] == 0
    settings = json.loads((tmp_path / "run" / RUN).read_text())["settings"]
    assert settings["calibration_data"] == "scores.json"
    assert "scores_of" not in settings


def test_scores_of_another_task_are_refused_unless_they_are_wanted(
    run: Any, scores: Path, tmp_path: Path
) -> None:
    document = json.loads(scores.read_text()) | {"task": "qasper"}
    scores.write_text(json.dumps(document))
    out = tmp_path / "run"
    status, _, told = run(*evaluation("musique", scores, out))
    assert status == 2
    assert "made on task 'qasper', expected 'musique' (--scores-of qasper takes them" in told
    status, _, told = run(*evaluation("musique", scores, out), "--scores-of", "tmath")
    assert status == 2
    assert "made on task 'qasper', expected 'tmath'" in told
    assert not out.exists()
    status, _, told = run(*evaluation("musique", scores, out), "--scores-of", "qasper")
    assert status == 0
    assert "layers for musique are chosen by scores of qasper" in told
    assert json.loads((out / SUMMARY).read_text())["settings"]["scores_of"] == "qasper"
    page = (out / "report.html").read_text()
    assert "scores_of" in page and "qasper" in page


def test_scores_that_do_not_say_whose_they_are_are_taken(
    run: Any, scores: Path, tmp_path: Path
) -> None:
    document = json.loads(scores.read_text())
    del document["task"]
    scores.write_text(json.dumps(document))
    assert run(*evaluation("musique", scores, tmp_path / "run"))[0] == 0


def test_scores_of_goes_with_scores(run: Any, tmp_path: Path) -> None:
    words = ("eval", "--task", "musique", "--out", tmp_path / "run", "--scores-of", "qasper")
    status, _, told = run(*words)
    assert status == 2
    assert "--scores-of goes with --scores" in told
