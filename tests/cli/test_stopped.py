"""Runs that are stopped, and output that nobody reads: processes of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cli_bench import evaluation, record

from kvcomm.records import RECORDS

ROOT = Path(__file__).resolve().parents[2]


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
