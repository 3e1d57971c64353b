"""Parity with the recordings of `ac`: default layers, first logits and greedy ids per rule.

parity.py runs these checks with all others, and says what an outcome is; tests/test_ac.py runs
them on one model.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from parity import LOGIT_TOLERANCE, NEAR_TIE, Outcome

import kvcomm
from kvcomm.methods import Bench
from kvcomm.methods.ac import AC, default_layer
from kvcomm.prefilled import Prefilled


def published_ac(
    model: kvcomm.Model, data: dict[str, Any], limit: int | None = None
) -> Iterator[Outcome]:
    """Every rule on the recorded items, each rule as one batch."""
    recorded = data["ac"]
    task = data["items"][recorded["task"]]
    default = default_layer(model.n_layers)
    ends = [recorded["k"], recorded["j"]]
    note = "" if ends == [default] * 2 else f"{default}, recorded {ends}"
    yield Outcome("layers", "ac default", not note, note=note)
    bench = Bench(kvcomm.Sender(model), kvcomm.Receiver(model), preset="reference")
    for rule, runs in recorded["runs"].items():
        runs = runs[:limit]
        items = [task["items"][run["item"]] for run in runs]
        contexts, questions = (
            [np.array(item[part]["ids"], np.int32) for item in items]
            for part in ("sender", "receiver")
        )
        prefilled, _ = AC(rule, *ends).prefill(bench, contexts, questions)
        answers = prefilled.answer(task["max_new_tokens"])
        for row, (run, answer) in enumerate(zip(runs, answers, strict=True)):
            case = f"ac {rule} item {run['item']}"
            ids, values = zip(*run["top20"], strict=True)
            error = float(np.abs(prefilled.logits[row, list(ids)] - np.array(values)).max())
            yield Outcome("first logits", case, error <= LOGIT_TOLERANCE, error)
            yield _compare_ids(prefilled, row, case, run, list(answer.ids))


def _compare_ids(
    prefilled: Prefilled, row: int, case: str, run: dict[str, Any], found: list[int]
) -> Outcome:
    recorded = run["ids"]
    if found == recorded:
        return Outcome("greedy ids", case, True)
    shorter = min(len(found), len(recorded))
    step = next((n for n in range(shorter) if found[n] != recorded[n]), shorter)
    if step == shorter:
        note = f"{len(found)} tokens, recorded {len(recorded)}"
        return Outcome("greedy ids", case, False, note=note)
    nlls = []
    for token in (found[step], recorded[step]):
        answers = [[np.zeros(1, np.int32)] for _ in prefilled.logits]
        answers[row] = [np.array([*found[:step], token], np.int32)]
        nlls.append(prefilled.score(answers)[row].token_nll[-1])
    gap, recorded_gap = float(nlls[1] - nlls[0]), run["gap"][step]
    note = (
        f"step {step}: {found[step]}, recorded {recorded[step]}; "
        f"recorded gap {recorded_gap:.2g}, logit difference here {gap:.2g}"
    )
    return Outcome("greedy ids", case, False, gap, note, max(gap, recorded_gap) < NEAR_TIE)
