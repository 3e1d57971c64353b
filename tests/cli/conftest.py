"""The command line in this process, a tiny model, and a file of records."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_bench import record

from kvcomm.cli import main


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
