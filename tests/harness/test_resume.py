"""Runs that go on: what survives a kill, what is kept for a later start, what is refused."""

import errno
import json
import os
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eval_bench import (
    EXAMPLES,
    Fake,
    lines,
    timeless,
)

from kvcomm import search, template
from kvcomm.agents import Receiver, Sender
from kvcomm.errors import FormatError, MismatchError
from kvcomm.methods import Options, methods
from kvcomm.records import RECORDS, locked, parse
from kvcomm.report.words import notes
from kvcomm.runs import CALIBRATION, RUN, SEARCH, SUMMARY
from kvcomm.selection import LayerScores, choose


def test_a_stopped_run_goes_on_and_ends_in_the_same_log(run: Any, tmp_path: Path) -> None:
    whole = run([Fake("baseline"), Fake("mine")], batch_size=2, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run([Fake("baseline"), Fake("mine", stop_at=3)], batch_size=2)
    assert len(lines(tmp_path / "run")) == 6  # two of either, then baseline's next two
    assert not (tmp_path / "run" / SUMMARY).exists()
    notes: list[str] = []
    summary = run([Fake("baseline"), Fake("mine")], batch_size=2, note=notes.append)
    assert summary["methods"] == whole["methods"]
    assert (tmp_path / "run" / RECORDS).read_bytes() == (tmp_path / "whole" / RECORDS).read_bytes()
    assert notes == ["going on: 6 of 14 answers are there"]


def test_a_run_with_another_template_is_another_run(
    run: Any, pair: tuple[Sender, Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    run([Fake("mine")], EXAMPLES[:2])
    tokenizer = pair[1].model.tokenizer
    other = {name: text + " " for name, text in tokenizer.chat_templates.items()}
    monkeypatch.setattr(tokenizer, "chat_templates", other)
    with pytest.raises(ValueError, match=r"receiver\.tokenizer was \w+"):
        run([Fake("mine")], EXAMPLES[:2])


def test_a_run_goes_on_with_the_day_it_began_on(
    run: Any, pair: tuple[Sender, Receiver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = pair[1].model.tokenizer
    dated = {
        name: "{{ strftime_now('%d %b %Y %H:%M') }}" + text
        for name, text in tokenizer.chat_templates.items()
    }
    for agent in pair:
        monkeypatch.setattr(agent.model.tokenizer, "chat_templates", dated)
    monkeypatch.setattr(template, "_DAY", ContextVar("day", default=date(2024, 7, 26)))
    whole = run([Fake("mine")], out=tmp_path / "whole")
    assert whole["settings"]["prompt_day"] == "2024-07-26"
    with pytest.raises(KeyboardInterrupt):
        run([Fake("mine", stop_at=3)], batch_size=1)
    monkeypatch.setattr(template, "_DAY", ContextVar("day", default=date(2024, 7, 27)))
    run([Fake("mine")])
    assert (tmp_path / "run" / RECORDS).read_bytes() == (tmp_path / "whole" / RECORDS).read_bytes()
    with template.on_day(date(2024, 7, 26)):
        ids = tokenizer.chat([{"role": "user", "content": "Who?"}])
    assert tokenizer.decode(ids, skip_special=False).startswith("26 Jul 2024 00:00")


def test_a_run_that_goes_on_elsewhere_says_so(run: Any, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run([Fake("mine", stop_at=3)], batch_size=1)
    summary = run([Fake("mine")], batch_size=2)
    assert [one["batch_size"] for one in summary["environment"]["earlier"]] == [1]
    told = "in batches and on machines that changed when the run went on"
    assert any(told in note for note in notes(summary))
    again = run([Fake("mine")], batch_size=2)
    assert again["environment"] == summary["environment"]
    assert "earlier" not in run([Fake("mine")], out=tmp_path / "other")["environment"]


def test_scores_of_other_models_are_refused(run: Any, pair: tuple[Sender, Receiver]) -> None:
    made = [model.fingerprint for model in (pair[0].model, pair[1].model)]
    n_layers = pair[0].model.n_layers
    for scores, message in (
        (LayerScores(np.ones((1, n_layers, 4)), "paper", "0" * 64, made[1]), "with sender 0000"),
        (LayerScores(np.ones((1, n_layers, 4)), "reference", *made), "with preset reference"),
    ):
        with pytest.raises(MismatchError, match=message):
            run(methods(("kvcomm",), Options()), scores=scores)
    with pytest.raises(ValueError, match=r"mass: shape \[3\], expected \[4\] layers"):
        choose("attention", 4, mass=[1.0, 2.0, 3.0], ratio=0.5)


def test_a_log_cut_at_any_byte_of_its_end_is_repaired(run: Any, tmp_path: Path) -> None:
    run([Fake("mine")], EXAMPLES[:3])
    log = tmp_path / "run" / RECORDS
    whole = log.read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == 10]
    for cut in [*range(ends[1] - 2, ends[1] + 3), *range(ends[1] + 3, ends[2], 37), ends[2] - 1]:
        log.write_bytes(whole[:cut])
        again = Fake("mine")
        run([again], EXAMPLES[:3])
        assert log.read_bytes() == whole, cut
        # A line that lacks nothing but its end is whole.
        done = sum(end - 1 <= cut for end in ends)
        assert again.seen == [0, 1, 2][done:], cut


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data + b"\0" * 100,
        lambda data: data + b"\n\n  \n",
        lambda data: data.replace(b"}\n{", b"}{", 1),
        lambda data: data + b"[1, 2]\n",
        lambda data: data + b'{"id": "r0"}\n',
        lambda data: data + data[: data.index(b"\n") + 1],
        lambda data: data + b'{"id": "r0", "nll": NaN}\n',
        lambda data: data + b"[" * 100_000,
    ],
    ids=["nul", "blank", "joined", "list", "foreign", "twice", "nan", "deep"],
)
def test_a_damaged_log_keeps_its_good_records(
    run: Any, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    run([Fake("mine")], EXAMPLES[:3])
    log = tmp_path / "run" / RECORDS
    whole = log.read_bytes()
    log.write_bytes(damage(whole))
    again = Fake("mine")
    run([again], EXAMPLES[:3])
    assert log.read_bytes() == whole
    assert again.seen == []


def test_other_settings_are_refused_and_named(run: Any, tmp_path: Path) -> None:
    chosen = methods(("kvcomm",), Options())
    run(chosen, n_calibration=1)
    before = (tmp_path / "run" / RECORDS).read_bytes()
    with pytest.raises(ValueError, match="seed was 42, is 7"):
        run(chosen, n_calibration=1, seed=7)
    with pytest.raises(ValueError, match=r"n_records was 6, is 5.*calibration was .*r0.*r1"):
        run(chosen, n_calibration=2)
    with pytest.raises(ValueError, match="methods was kvcomm 0.5, is kvcomm 0.3"):
        run(methods(("kvcomm",), Options(ratios=("0.3",))), n_calibration=1)
    with pytest.raises(ValueError, match="data was None, is other.json"):
        run(chosen, n_calibration=1, about={"data": "other.json"})
    assert (tmp_path / "run" / RECORDS).read_bytes() == before
    run(chosen, n_calibration=1, batch_size=3)  # changes no result, so it is no such setting


def test_the_calibration_is_kept_for_a_later_start(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = methods(("kvcomm",), Options())
    run(chosen, n_calibration=1)
    log = tmp_path / "run" / RECORDS
    whole = log.read_bytes()
    log.write_bytes(b"\n".join(whole.split(b"\n")[:2]) + b"\n")

    def measured(*_: Any, **__: Any) -> None:
        raise AssertionError("calibrated again")

    monkeypatch.setattr("kvcomm.selection.calibrate", measured)
    run(chosen, n_calibration=1)
    assert timeless(lines(tmp_path / "run")) == timeless(parse(whole)[0])
    assert (tmp_path / "run" / CALIBRATION).exists()


def searching(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many records each search from now on goes by, and how many layers it begins with."""
    searched: list[tuple[int, int]] = []
    original = search.search

    def counted(sender: Sender, receiver: Receiver, samples: Any, **options: Any) -> Any:
        after = options["after"]
        searched.append((len(samples), len(after.layers) if after else 0))
        return original(sender, receiver, samples, **options)

    monkeypatch.setattr(search, "search", counted)
    return searched


SEARCHES = Options(strategies=("search",), ratios=("0.25", "0.5"), search_records=2)


def test_what_a_search_found_is_kept_for_a_later_start(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = searching(monkeypatch)
    chosen, folder = methods(("kvcomm",), SEARCHES), tmp_path / "run"
    run(chosen, n_calibration=2)
    assert searched == [(2, 0), (2, 1)]  # the second goes on from the first
    whole, data = timeless(lines(folder)), (folder / RECORDS).read_bytes()
    found = json.loads((folder / SEARCH).read_text())
    assert list(found) == ["search 0.25 on 2", "search 0.5 on 2"]
    sent = {line["settings"]["ratio"]: line["settings"]["layers"] for line in whole}
    assert [entry["found"]["layers"] for entry in found.values()] == [sent[0.25], sent[0.5]]
    for n_kept in (0, 1, 3):
        (folder / RECORDS).write_bytes(b"".join(data.splitlines(keepends=True)[:n_kept]))
        run(chosen, n_calibration=2)
        assert timeless(lines(folder)) == whole
    assert searched == [(2, 0), (2, 1)]
    # Killed in the second search: the first is not done again.
    del found["search 0.5 on 2"]
    (folder / SEARCH).write_text(json.dumps(found))
    (folder / RECORDS).write_bytes(b"")
    run(chosen, n_calibration=2)
    assert searched == [(2, 0), (2, 1), (2, 0)]
    assert timeless(lines(folder)) == whole


def test_a_search_on_other_records_is_not_gone_on_from(run: Any, tmp_path: Path) -> None:
    chosen, folder = methods(("kvcomm",), SEARCHES), tmp_path / "run"
    run(chosen, n_calibration=2)
    before = (folder / RECORDS).read_bytes()
    # The same ids, and another gold answer in one of the records that were searched on.
    other = [EXAMPLES[0], replace(EXAMPLES[1], answers=("lake",)), *EXAMPLES[2:]]
    with pytest.raises(ValueError, match=r"search\.json: 'search 0.25 on 2' was searched on other "
                       "records: records_sha256 was "):  # fmt: skip
        run(chosen, other, n_calibration=2)
    for text, message in (
        ("{", "not JSON"),
        ('{"search 0.25 on 2": {}}', "expected an object of searches"),
    ):
        (folder / SEARCH).write_text(text)
        with pytest.raises(FormatError, match=rf"search\.json: {message}"):
            run(chosen, n_calibration=2)
    assert (folder / RECORDS).read_bytes() == before


def test_kept_layers_that_are_none_are_refused(run: Any, tmp_path: Path) -> None:
    chosen, folder = methods(("kvcomm",), SEARCHES), tmp_path / "run"
    run(chosen, n_calibration=2)
    found = json.loads((folder / SEARCH).read_text())
    for layers in (None, [99], "x"):
        found["search 0.25 on 2"]["found"] = {"layers": layers}
        (folder / SEARCH).write_text(json.dumps(found))
        with pytest.raises(FormatError, match=r"search\.json: 'search 0.25 on 2' has no layers"):
            run(chosen, n_calibration=2)


def test_work_before_the_answers_is_a_bar_on_a_terminal_and_a_note_elsewhere(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = methods(("kvcomm",), replace(SEARCHES, strategies=("attention", "search")))
    notes: list[str] = []
    how = {"n_calibration": 2, "progress": True, "note": notes.append}
    run(chosen, out=tmp_path / "file", **how)
    assert notes[0] == "calibrating on 2 records"
    assert [note.split(" searched")[0] for note in notes[1:]] == [
        "search 0.25 on 2: 1 layer", "search 0.5 on 2: 1 layer", "search 0.5 on 2: 2 layers",
    ]  # fmt: skip
    assert "calibrating" not in capsys.readouterr().err
    notes.clear()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run(chosen, out=tmp_path / "terminal", **how)
    shown = capsys.readouterr().err
    assert notes == []
    for words in ("calibrating: 100%", "2/2", "search 0.25 on 2: 100%", "1/1", ", nll "):
        assert words in shown, words


def test_a_second_writer_is_refused(run: Any, tmp_path: Path) -> None:
    with locked(tmp_path / "run"), pytest.raises(OSError, match="another run is writing there"):
        run([Fake("mine")])
    run([Fake("mine")])


def test_a_folder_with_a_log_of_something_else_is_refused(run: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RECORDS).write_text("precious\n")
    with pytest.raises(ValueError, match="without run.json"):
        run([Fake("mine")])
    assert (tmp_path / "run" / RECORDS).read_text() == "precious\n"
    (tmp_path / "run" / RUN).write_text("[")
    with pytest.raises(ValueError, match=r"run\.json: not JSON"):
        run([Fake("mine")])


def test_a_full_disk_is_told_and_gone_on_from(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, room = os.write, [1500]

    def filling(file: int, data: Any) -> int:
        if room[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        n = write(file, bytes(data)[: room[0]])
        room[0] -= n
        return n

    with monkeypatch.context() as patched:
        patched.setattr("kvcomm.records.os.write", filling)
        with pytest.raises(OSError, match=f"No space left.*{RECORDS}"):
            run([Fake("mine")])
    log = tmp_path / "run" / RECORDS
    assert len(log.read_bytes()) == 1500
    assert not (tmp_path / "run" / SUMMARY).exists()
    run([Fake("mine")])
    run([Fake("mine")], out=tmp_path / "whole")
    assert log.read_bytes() == (tmp_path / "whole" / RECORDS).read_bytes()


def test_an_output_folder_that_cannot_be_made_is_an_os_error(run: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        run([Fake("mine")], out=tmp_path / "file" / "run")


def test_bad_settings_show_before_anything_is_written(run: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="outside 0 .. 1"):
        run(methods(("kvcomm",), Options(ratios=("1.5",))), n_calibration=1)
    with pytest.raises(ValueError, match="batch size"):
        run([Fake("mine")], batch_size=0)
    with pytest.raises(ValueError, match="max_new_tokens: expected 0 or more, found -1"):
        run([Fake("mine")], max_new_tokens=-1)
    with pytest.raises(ValueError, match="calibration size: 0 records"):
        run(methods(("kvcomm",), Options()), n_calibration=0)
    with pytest.raises(ValueError, match="layers: 9 is outside"):
        run(methods(("kvcomm",), Options(strategies=(), layers=(0, 9))))
    assert not (tmp_path / "run").exists()
