"""How the command line tells of errors."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_bench import evaluation, record

from kvcomm.cli import main

ERRORS: dict[str, tuple[Sequence[Any], str]] = {
    "no such command": (["answer"], "invalid choice: 'answer'"),
    "a missing option": (["eval", "--task", "hotpotqa"], "required: --model, --data, --out"),
    "no such model": (["{eval}", "--model", "no/such/folder"], "no/such/folder"),
    "no such task": (["{eval}", "--task", "trivia"], "task: 'trivia', expected one of"),
    "no such data": (["{eval}", "--data", "none.json"], "none.json"),
    "no such method": (["{eval}", "--methods", "magic"], "method: expected one of baseline"),
    "a ratio that nothing takes": (
        ["{eval}", "--methods", "baseline,skyline"],
        "--ratio: no method of this run takes it, kvcomm and control would",
    ),
    "an alpha that nothing takes": (
        ["{eval}", "--strategy", "random", "--alpha", "0.5"],
        "--alpha: only strategy 'attention_gaussian' takes it",
    ),
    "a search that is not asked for": (
        ["{eval}", "--search-records", "2"],
        "--search-records: only strategy 'search' takes it",
    ),
    "a calibration that nothing needs": (
        ["{eval}", "--strategy", "random", "--calibration-size", "2"],
        "--calibration-size: no method of this run calibrates on records",
    ),
    "fewer records than a search goes by": (
        ["{eval}", "--strategy", "attention,search", "--calibration-size", "1"],
        "--calibration-size: 1, and strategy 'search' goes by 6",
    ),
    "a search without records": (
        [
            "generate",
            "--model",
            "{model}",
            "--context",
            "a text",
            "--question",
            "Who?",
            "--strategy",
            "search",
        ],
        "strategy 'search' needs records with answers",
    ),
    "a ratio out of range": (["{eval}", "--ratio", "1.5"], "ratio: 1.5 is outside 0 .. 1"),
    "a ratio that is no number": (["{eval}", "--ratio", "half"], "found 'half'"),
    "a layer that is not there": (["{eval}", "--layers", "0,99"], "99 is outside 0 .. 3"),
    "layers that are no numbers": (["{eval}", "--layers", "x"], "found 'x'"),
    "layers that run backwards": (["{eval}", "--layers", "3-1"], "3-1 runs backwards"),
    "a layer that is named again": (["{eval}", "--layers", "1,0-2"], "1 is there twice"),
    "a strategy that is not there": (["{eval}", "--strategy", "best"], "found 'best'"),
    "fewer than no tokens": (
        ["{eval}", "--max-new-tokens", "-1"],
        "max_new_tokens: expected 0 or more, found -1",
    ),
    "a seed below 0": (["{eval}", "--seed", "-1"], "--seed: expected a number from 0 on"),
    "no folder": (["{eval}", "--out", ""], "--out: expected a path, found nothing"),
    "no threads": (["{eval}", "--threads", "0"], "--threads: expected 1 or more, found 0"),
    "a device that is not there": (["{eval}", "--device", "tpu"], "tpu"),
    "no report": (["report", "nowhere"], "nowhere"),
    "no such entry": (["fetch", "gpt-5"], "gpt-5"),
    "no such gguf": (["convert", "none.gguf", "folder"], "none.gguf"),
    "no context": (
        ["generate", "--model", "{model}", "--context", "none.txt", "--question", "Who?"],
        "none.txt: no such file",
    ),
    "an empty question": (
        ["generate", "--model", "{model}", "--context", "a text", "--question", ""],
        "question is empty",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_is_one_line_and_status_2(
    run: Any, model: str, data: Path, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVCOMM_DEBUG", raising=False)
    words, message = ERRORS[case]
    if words[0] == "{eval}":
        words = [*evaluation(model, data, tmp_path / "run"), *words[1:]]
    status, printed, told = run(*(model if word == "{model}" else word for word in words))
    assert status == 2
    assert printed == ""
    assert told.startswith("kvcomm: error: ")
    assert told.count("\n") == 1
    assert message in told
    assert list(tmp_path.iterdir()) == []


def test_a_report_of_a_damaged_log_is_refused(
    run: Any, model: str, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert run(*evaluation(model, data, out), on_device=True)[0] == 0
    log = out / "records.jsonl"
    good, page = log.read_text(), (out / "report.html").read_bytes()
    lines = good.splitlines(keepends=True)
    for text, message in (
        (lines[0] + "{" + "".join(lines[1:]), "record 2: damaged"),
        (lines[0] + lines[1].replace('"nll"', '"nxx"') + "".join(lines[2:]), "record 2: no field"),
        ("", "no records yet"),
    ):
        log.write_text(text)
        status, _, told = run("report", out)
        assert status == 2
        assert message in told
        assert (out / "report.html").read_bytes() == page
    log.write_text(good)
    assert run("report", out)[0] == 0


def test_a_broken_line_of_data_is_named(run: Any, model: str, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(record(0)) + "\n" + json.dumps(record(1))[:-9] + "\n")
    status, _, told = run(*evaluation(model, path, tmp_path / "run"))
    assert status == 2
    assert "records.jsonl" in told
    assert "line 2" in told
    path.write_text("")
    assert run(*evaluation(model, path, tmp_path / "run"))[0] == 2
    assert not (tmp_path / "run").exists()


def test_other_settings_in_the_same_folder_are_refused(
    run: Any, model: str, data: Path, tmp_path: Path
) -> None:
    words = [*evaluation(model, data, tmp_path / "run"), "--limit", 1]
    assert run(*words, on_device=True)[0] == 0
    status, _, told = run(*words, "--alpha", "0.5", "--preset", "reference", on_device=True)
    assert status == 2
    assert "preset was paper, is reference" in told
    assert told.splitlines()[-1].startswith("kvcomm: error: ")


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOMM_DEBUG", "1")
    with pytest.raises(FileNotFoundError):
        main(["report", "nowhere"])


def test_a_fault_of_the_program_names_its_kind(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcomm.environment.versions", lambda: {}["x"])
    assert run("doctor") == (2, "", "kvcomm: error: KeyError: 'x'\n")
