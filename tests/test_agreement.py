"""Agreement with skyline's own answers: the measures by hand, and in a run."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

import kvcomm
from kvcomm import metrics, tasks
from kvcomm.agreement import MOST_TOKENS, Reference, compare, log_softmax
from kvcomm.evaluate import evaluate
from kvcomm.methods import Options, methods
from kvcomm.plan import divide
from kvcomm.records import RECORDS


def test_by_hand():
    # Two tokens over a vocabulary of two. Skyline: (3/4, 1/4) and (1/2, 1/2), it said 0 and 1.
    skyline = np.log(np.array([[3.0, 1.0], [1.0, 1.0]], np.float32))
    reference = Reference.of(np.array([0, 1], np.int32), skyline)
    own = np.log(np.array([[1.0, 3.0], [1.0, 3.0]], np.float32))  # (1/4, 3/4) twice
    found = compare(reference, own)
    first = 0.75 * math.log(3) + 0.25 * math.log(1 / 3)
    second = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert found.agreement == 0.5  # ranks 1 first at both, skyline said 1 at the second
    assert found.kl == pytest.approx((first + second) / 2, rel=1e-6)


def test_the_same_distribution_agrees_wholly():
    logits = np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32) * 4
    reference = Reference.of(logits.argmax(axis=1).astype(np.int32), logits)
    found = compare(reference, logits + np.float32(7))  # logits are free up to a constant
    assert found.agreement == 1.0
    assert abs(found.kl) < 1e-6


def test_log_softmax_of_large_logits():
    rows = np.array([[1e4, 1e4 - 1, -1e4]], np.float32)
    expected = -math.log(1 + math.exp(-1)), -1 - math.log(1 + math.exp(-1))
    np.testing.assert_allclose(log_softmax(rows)[0, :2], expected, rtol=1e-6)


@pytest.fixture(scope="module")
def model(tiny, device):
    return kvcomm.Model.load(tiny("llama"), device=device)


def run(model, out: Path, names=("baseline", "skyline", "kvcomm"), **options):
    task = tasks.find("countries")
    path = out / "data.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    records = [
        {
            "id": str(n),
            "prompt_A": f"Ann is at the tower {n}.",
            "prompt_B": "Where?",
            "country": "Italy",
        }
        for n in range(5)
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    plan = divide(task.load(path), n_calibration=1)
    chosen = methods(names, Options(ratios=("0.5",), strategies=("attention_gaussian", "all")))
    pair = kvcomm.Sender(model), kvcomm.Receiver(model)
    summary = evaluate(*pair, task, plan, chosen, out / "run", agreement=True, **options)
    lines = (out / "run" / RECORDS).read_text().splitlines()
    return summary, [json.loads(line) for line in lines]


def test_in_a_run(model, tmp_path):
    summary, lines = run(model, tmp_path)
    by = {one["label"]: one for one in summary["methods"]}
    assert by["skyline"]["agreement"]["value"] == 1.0
    assert abs(by["skyline"]["kl"]["value"]) < 1e-5
    assert by["baseline"]["kl"]["value"] > 1e-3
    assert summary["settings"]["agreement"] is True
    for line in lines:
        assert 0 <= line["agreement"] <= 1 and line["kl"] > -1e-5
    # By hand, of one record: skyline's answer under the receiver that was given nothing.
    skyline = next(one for one in lines if one["method"] == "skyline")
    mine = next(one for one in lines if (one["method"], one["id"]) == ("baseline", skyline["id"]))
    receiver = kvcomm.Receiver(model)
    ids = skyline["token_ids"][:MOST_TOKENS]
    prompt = "Where?" + tasks.countries.EXTRA
    first = receiver.logits(prompt).argmax()
    later = [
        receiver.logits(np.concatenate([prompt_ids(model, prompt), ids[:n]])).argmax()
        for n in range(1, len(ids))
    ]
    assert mine["agreement"] == pytest.approx(np.mean(np.array([first, *later]) == ids))


def prompt_ids(model, question):
    from kvcomm import prompts

    message = prompts.baseline_message(question)
    turn = [{"role": "user", "content": message}]
    return model.tokenizer.chat(turn, add_generation_prompt=True)


def test_does_not_depend_on_the_batch(model, tmp_path):
    _, alone = run(model, tmp_path / "1", batch_size=1)
    _, together = run(model, tmp_path / "4", batch_size=4)

    def key(line):
        return line["method"], str(line["settings"]), line["id"]

    values = [
        [(key(one), one["agreement"], one["kl"]) for one in sorted(lines, key=key)]
        for lines in (alone, together)
    ]
    assert values[0] == values[1]


def test_without_answers_there_is_nothing_to_agree_with(model, tmp_path):
    summary, lines = run(model, tmp_path, max_new_tokens=0)
    assert all("agreement" not in line for line in lines)
    assert all(one["agreement"] is None for one in summary["methods"])
    assert {line[name] for line in lines for name in metrics.NAMES} == {None}
