"""`kvcomm score`: a log judged again, and two methods held against each other; no model is run."""

import argparse
import json
import os
import re

import made_runs
import pytest

from kvcomm import metrics
from kvcomm.commands import score
from kvcomm.commands.report import remade
from kvcomm.errors import FormatError
from kvcomm.records import dumps, locked
from kvcomm.runs import read_run

#: Per record the gold answer and what each method said, with match, f1 and em worked out by hand.
GOLD = (["Ann Lee"], ["yes"], ["1999", "the year 1999"])
SAID = {
    "baseline": [("Bob", 0, 0, 0), ("no", 0, 0, 0), ("1998", 0, 0, 0)],
    # "Lee" is one of two tokens: f1 2/3, and the set F1 of 2/3 is above one half.
    "skyline": [("Lee", 1, 2 / 3, 0), ("yes it is", 0, 0, 0), ("The 1999!", 1, 1, 1)],
}
NLL = {"baseline": [9.0, 5.0, 7.0], "skyline": [3.0, 4.0, 2.0]}


def line(label, n, **fields):
    text, match, f1, em = SAID[label][n]
    other = metrics.score(text, GOLD[n], closed=True)
    return {
        "id": f"r{n}", "index": n, "method": label, "settings": {"layers": None},
        "prompt_sha256": "0", "question": "Who?", "answer": text, "token_ids": [1], "gold": GOLD[n],
        **{name: getattr(other, name) for name in metrics.NAMES},
        "match": float(match), "f1": float(f1), "em": float(em),
        "nll": NLL[label][n], "n_gold_tokens": 2,
        "message_bytes": 0, "receiver_tokens": 5, "cut_tokens": 0,
        "seconds": {"sender": 0.0, "transfer": 0.0, "first_token": 0.1, "total": 0.2},
        **fields,
    }  # fmt: skip


def failed(label, n):
    blank = dict.fromkeys((*metrics.NAMES, "nll", "answer", "token_ids", "n_gold_tokens"))
    seconds = dict.fromkeys(("sender", "transfer", "first_token", "total"))
    return {**line(label, n), **blank, "seconds": seconds, "error": "MemoryError: full"}


def whole():
    return [line(label, n) for label in SAID for n in range(3)]


def make(folder, lines, task="hotpotqa"):
    """A run of baseline and skyline with this log."""
    run = made_runs.summary()
    run["methods"] = [{"label": one, "method": one, "settings": {}} for one in SAID]
    run["settings"]["task"] = task
    run.update(calibrated=False, calibration=None)
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "records.jsonl").write_text("".join(dumps(one) + "\n" for one in lines))
    return folder


def log(folder):
    return [json.loads(text) for text in (folder / "records.jsonl").read_text().splitlines()]


def command(*words):
    parser = argparse.ArgumentParser()
    score.add_options(parser)
    return score.run(parser.parse_args([str(word) for word in words]))


# ---- scoring again


def test_wrong_values_are_put_right(tmp_path, capsys):
    wrong = whole()
    wrong[3].update(match=0.0, f1=0.25)
    wrong[4].update(em=1.0)
    folder = make(tmp_path / "run", wrong)
    assert command(folder) == 0
    assert log(folder) == whole()
    out = capsys.readouterr().out
    assert out.endswith("3 values differ from the log, of 6 answers scored again\n")
    assert "skyline" in out and f"Report: {folder / 'report.html'}" in out
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["methods"][1]["match"]["value"] == pytest.approx(2 / 3)
    assert summary["methods"][1]["f1"]["value"] == pytest.approx((2 / 3 + 0 + 1) / 3)
    assert (folder / "report.html").stat().st_size > 1000


def test_a_right_log_stays_as_it_is(tmp_path, capsys):
    folder = make(tmp_path / "run", whole())
    before, written = (folder / "records.jsonl").read_bytes(), os.stat(folder / "records.jsonl")
    assert command(folder) == 0
    assert (folder / "records.jsonl").read_bytes() == before
    assert os.stat(folder / "records.jsonl").st_ino == written.st_ino
    assert "0 values differ from the log, of 6 answers" in capsys.readouterr().out


def test_json_is_the_summary_alone(tmp_path, capsys):
    folder = make(tmp_path / "run", whole())
    assert command(folder, "--json") == 0
    told = capsys.readouterr()
    assert [one["label"] for one in json.loads(told.out)["methods"]] == ["baseline", "skyline"]
    assert told.err.endswith("0 values differ from the log, of 6 answers scored again\n")


def test_a_log_of_an_older_version_gets_what_it_lacks(tmp_path):
    lacking = ("rouge_l_recall", "rouge_l_f", "published_rouge_l", "accuracy")
    old = [{name: value for name, value in one.items() if name not in lacking} for one in whole()]
    folder = make(tmp_path / "run", old)
    # Three values in each of six lines; that there is no accuracy is no difference.
    assert score.rescore(folder) == (18, 6)
    assert log(folder) == [{**one, **{n: one[n] for n in lacking}} for one in whole()]
    assert len(read_run(folder)[1]) == 6


def test_the_rule_for_yes_and_no_is_that_of_the_task(tmp_path):
    folder = make(tmp_path / "run", whole(), task="musique")
    assert score.rescore(folder) == (1, 6)  # "yes it is" has one of three tokens
    (changed,) = [new for old, new in zip(whole(), log(folder), strict=True) if old != new]
    assert changed["answer"] == "yes it is"
    assert changed["f1"] == 0.5


def test_failed_answers_are_left_alone(tmp_path, capsys):
    lines = [*whole()[:5], failed("skyline", 2)]
    folder = make(tmp_path / "run", lines)
    assert command(folder) == 1
    assert log(folder) == lines
    told = capsys.readouterr()
    assert "0 values differ from the log, of 5 answers scored again" in told.out
    assert "1 of 6 answers failed; the log says why" in told.err


def test_reasoning_is_taken_out_and_marked(tmp_path):
    lines = [
        line("skyline", 0, answer="<think>Bob?</think>Ann Lee", match=0.0, f1=0.0, em=0.0),
        line("skyline", 1, answer="<think>yes", match=1.0, f1=1.0, em=1.0),
        line("skyline", 2, answer="1999", reasoning_cut_off=True),
    ]
    folder = make(tmp_path / "run", lines)
    score.rescore(folder)
    first, second, third = log(folder)
    assert (first["match"], first["f1"], first["em"]) == (1.0, 1.0, 1.0)
    assert "reasoning_cut_off" not in first
    assert (second["match"], second["em"], second["reasoning_cut_off"]) == (0.0, 0.0, True)
    assert "reasoning_cut_off" not in third


def test_answers_that_were_not_asked_for_get_no_scores(tmp_path):
    unasked = [{**one, "answer": "", **dict.fromkeys(metrics.NAMES)} for one in whole()]
    folder = make(tmp_path / "run", unasked)
    run = json.loads((folder / "run.json").read_text())
    run["settings"]["max_new_tokens"] = 0
    (folder / "run.json").write_text(json.dumps(run))
    before = (folder / "records.jsonl").read_bytes()
    assert score.rescore(folder) == (0, 0)
    assert (folder / "records.jsonl").read_bytes() == before


def test_intervals_do_not_depend_on_the_order_in_which_records_were_done(tmp_path):
    one, other = make(tmp_path / "one", whole()), make(tmp_path / "other", whole()[::-1])
    assert remade(one)[0] == remade(other)[0]


def test_accuracy_needs_the_choices_of_the_line(tmp_path):
    letters = ["A", "B", "C", "D"]
    lines = [
        line("skyline", 0, answer="B.", gold=["B"], choices=letters, accuracy=0.0),
        line("skyline", 1, answer="B.", gold=["B"], accuracy=1.0),
    ]
    folder = make(tmp_path / "run", lines, task="mmlu")
    score.rescore(folder)
    assert [one["accuracy"] for one in log(folder)] == [1.0, 1.0]


# ---- logs that are not right


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"answer": None}, "records.jsonl record 1: not an answer with its gold, "),
        ({"answer": 3}, "record 1: not an answer with its gold, "),
        ({"gold": []}, "record 1: not an answer with its gold, answers: none given"),
        ({"gold": "Ann"}, "record 1: not an answer with its gold, answers: str"),
        ({"gold": [1]}, r"record 1: not an answer with its gold, answers\[0\]: int"),
    ],
)
def test_a_line_that_cannot_be_scored_is_named(tmp_path, fields, message):
    folder = make(tmp_path / "run", [line("skyline", 0, **fields), *whole()[1:]])
    before = (folder / "records.jsonl").read_bytes()
    with pytest.raises(FormatError, match=message) as caught:
        command(folder)
    assert "\n" not in str(caught.value)
    assert (folder / "records.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["answer", "gold"])
def test_a_missing_field_is_named(tmp_path, name):
    lines = whole()
    del lines[1][name]
    with pytest.raises(FormatError, match=f"records.jsonl record 2: no field '{name}'"):
        command(make(tmp_path / "run", lines))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("id", 5, ": field 'id' is int, expected str"),
        ("index", "x", ": field 'index' is str, expected int"),
        ("nll", "x", ": field 'nll' is str, expected int or float or NoneType"),
        ("settings", [], ": field 'settings' is list, expected dict"),
        ("settings", {}, ", settings: no field 'layers'"),
        ("seconds", {"sender": 0.0}, ", seconds: no field 'transfer'"),
        ("gold", [1], ": field 'gold' is not a list of str"),
    ],
)
def test_a_field_of_another_kind_is_named_before_anything_is_written(
    tmp_path, name, value, message
):
    lines = whole()
    lines[1][name] = value
    folder = make(tmp_path / "run", lines)
    with pytest.raises(FormatError, match=re.escape(f"records.jsonl record 2{message}")):
        remade(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["records.jsonl", "run.json"]


def test_damaged_lines_are_not_dropped_by_scoring(tmp_path):
    folder = make(tmp_path / "run", whole())
    damaged = (folder / "records.jsonl").read_bytes()[:-20]
    (folder / "records.jsonl").write_bytes(damaged)
    with pytest.raises(FormatError, match="jsonl record 6: damaged, the run's command mends it"):
        command(folder)
    assert (folder / "records.jsonl").read_bytes() == damaged


def test_a_folder_without_a_run_is_left_alone(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"run\.json"):
        command(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    folder = make(tmp_path / "run", [])
    with pytest.raises(FormatError, match="the run has no records yet"):
        command(folder)
    (folder / "records.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"records\.jsonl"):
        command(folder)


def test_an_unknown_task_is_named(tmp_path):
    folder = make(tmp_path / "run", whole(), task="trivia")
    with pytest.raises(ValueError, match="task: 'trivia', expected one of hotpotqa"):
        command(folder)


def test_a_run_in_progress_is_not_scored(tmp_path):
    folder = make(tmp_path / "run", whole())
    with locked(folder), pytest.raises(OSError, match="another run is writing there"):
        command(folder)


def test_a_full_disk_leaves_the_old_log(tmp_path, monkeypatch):
    wrong = whole()
    wrong[0]["match"] = 1.0
    folder = make(tmp_path / "run", wrong)
    before = (folder / "records.jsonl").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        command(folder)
    assert (folder / "records.jsonl").read_bytes() == before
    assert sorted(os.listdir(folder)) == [".lock", "records.jsonl", "run.json"]


# ---- comparing


def test_two_methods_are_compared_record_by_record(tmp_path, capsys):
    folder = make(tmp_path / "run", whole())
    assert command(folder, "--compare", "skyline", "baseline", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["first"], told["second"]) == ("skyline", "baseline")
    found = told["differences"]
    assert list(found) == [name for name in (*metrics.NAMES, "nll") if name != "accuracy"]
    assert found["match"]["first"] == pytest.approx(2 / 3)
    assert found["match"]["second"] == 0.0
    assert found["match"]["difference"]["value"] == pytest.approx(2 / 3)
    gap = found["nll"]["difference"]
    assert gap["value"] == pytest.approx((-6 - 1 - 5) / 3)
    assert (gap["low"], gap["high"], gap["n"]) == (-6.0, -1.0, 3)  # the ends of three records
    assert sorted(os.listdir(folder)) == ["records.jsonl", "run.json"]  # nothing is written


def test_the_table_of_two_methods(tmp_path, capsys):
    command(make(tmp_path / "run", whole()), "--compare", "baseline", "skyline")
    out = capsys.readouterr().out.splitlines()
    assert out[0] == (
        "baseline minus skyline, on the records that both answered (nll: less is better)"
    )
    assert out[2].split() == ["first", "second", "difference", "95%", "interval", "n"]
    rows = {row.split()[0]: row.split()[1:] for row in out[3:]}
    assert rows["nll"] == ["7.000", "3.000", "+4.000", "+1.000", "..", "+6.000", "3"]
    assert rows["match"][:3] == ["0.000", "0.667", "-0.667"]
    assert len({len(row) for row in out[3:]}) == 1


def test_only_records_that_both_answered_count(tmp_path, capsys):
    lines = [*whole()[:3], line("skyline", 0), failed("skyline", 1)]
    command(make(tmp_path / "run", lines), "--compare", "skyline", "baseline", "--json")
    found = json.loads(capsys.readouterr().out)["differences"]
    assert found["nll"]["difference"] == {"value": -6.0, "low": -6.0, "high": -6.0, "n": 1}
    assert found["nll"]["second"] == 9.0  # of that record alone


def test_unknown_labels_are_refused_with_those_there_are(tmp_path):
    folder = make(tmp_path / "run", whole())
    message = "method: 'nld' is not in the run, expected baseline, skyline"
    for labels in (("nld", "skyline"), ("skyline", "nld")):
        with pytest.raises(ValueError, match=message):
            command(folder, "--compare", *labels)


def test_methods_without_a_common_record_are_refused(tmp_path):
    folder = make(tmp_path / "run", [line("baseline", 0), line("skyline", 1)])
    with pytest.raises(ValueError, match="skyline and baseline have no record in common"):
        command(folder, "--compare", "skyline", "baseline")
