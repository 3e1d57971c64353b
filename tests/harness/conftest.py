"""A run in a folder of the test, of a tiny model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from eval_bench import EXAMPLES, TASK

from kvcomm.agents import Receiver, Sender
from kvcomm.evaluate import evaluate
from kvcomm.methods import Method
from kvcomm.model import Model
from kvcomm.plan import divide


@pytest.fixture(scope="module")
def pair(tiny: Callable[..., Path], device: str) -> tuple[Sender, Receiver]:
    model = Model.load(tiny("llama"), device=device)
    return Sender(model), Receiver(model)


@pytest.fixture
def run(pair: tuple[Sender, Receiver], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def start(chosen: Sequence[Method], examples: Any = EXAMPLES, **options: Any) -> dict[str, Any]:
        plan = options.pop("plan", None) or divide(
            examples, n_calibration=options.pop("n_calibration", 0)
        )
        out = options.pop("out", tmp_path / "run")
        return evaluate(*pair, options.pop("task", TASK), plan, chosen, out, **options)

    return start
