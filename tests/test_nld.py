"""`nld`: the phases one by one, what is passed, cuts, and the recordings."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from text_bench import EXAMPLES, N_NEW, TASK, assert_alone_as_together, bench_of
from text_bench import assert_equal as assert_parity
from text_bench import parity as load_parity

from kvcomm.agents import Receiver
from kvcomm.methods import Bench, Options, methods
from kvcomm.methods.nld import NLD
from kvcomm.model import Model
from kvcomm.tasks import find

TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
QUESTION = (
    "Instruction: Directly answer the question based on the context passage, no explanation is "
    "needed. Question: {}"
)


@pytest.fixture(scope="module")
def models(tiny: Callable[..., Path], device: str) -> tuple[Model, Model]:
    return tuple(Model.load(tiny("llama", seed=seed), device=device) for seed in (0, 1))


@pytest.fixture(scope="module")
def bench(models: tuple[Model, Model]) -> Bench:
    return bench_of(*models)


def text_of(prompt: Any, model: Model) -> str:
    return model.tokenizer.decode(prompt, skip_special=False)


def test_each_phase_reads_what_the_one_before_wrote(
    bench: Bench, models: tuple[Model, Model]
) -> None:
    sender, receiver = models
    for item, outcome in zip(bench.items, NLD(6).run(bench, bench.items), strict=True):
        context, question, refine = outcome.prompts
        np.testing.assert_array_equal(context, item.sender)
        np.testing.assert_array_equal(question, item.receiver)
        written = Receiver(sender).answer(context, max_new_tokens=6).text
        own = bench.receiver.answer(question, max_new_tokens=6).text
        expected = TURN.format(
            QUESTION.format(item.example.question) + f"\nYour previous answer:\n{own}"
            f"\nOther agents' answers (for your consideration):\n{written}"
            "\nIf needed, revise your answer. Your new answer is:"
        )
        assert text_of(refine, receiver) == expected
        answer = bench.receiver.answer(refine, max_new_tokens=N_NEW)
        score = bench.receiver.score(refine, list(item.gold))
        assert (outcome.answer, outcome.token_ids) == (answer.text, answer.ids)
        assert (outcome.nll, outcome.n_gold_tokens) == (score.nll, len(score.token_ids))
        assert outcome.message == written
        assert outcome.message_bytes == len(written.encode())
        assert outcome.receiver_tokens == len(question) + len(refine)
        assert outcome.cut_tokens == 0
        assert outcome.layers is None
        seconds = outcome.seconds
        assert 0 < seconds.sender < seconds.sender + seconds.first_token <= seconds.total


def test_an_outcome_does_not_depend_on_the_batch(bench: Bench) -> None:
    assert_alone_as_together(NLD(6), bench)
    assert_alone_as_together(NLD(6, senders="documents"), bench)


def test_a_sender_is_told_what_its_text_is_for(bench: Bench, models: tuple[Model, Model]) -> None:
    (outcome,) = NLD(3, sender_aware=True).run(bench, bench.items[:1])
    assert text_of(outcome.prompts[0], models[0]) == TURN.format(
        "Instruction: Summarize the context passage in a concise way, as it will be used by "
        "another agent to answer the question. Context: The red boat is on the lake. Ann rows it."
    )
    assert text_of(outcome.prompts[1], models[1]) == TURN.format(QUESTION.format("Who rows?"))


@pytest.mark.parametrize(("senders", "n"), [("split", 2), ("documents", 3)])
def test_several_senders_write_a_text_each(
    bench: Bench, models: tuple[Model, Model], senders: Any, n: int
) -> None:
    item = bench.items[2]
    (outcome,) = NLD(6, senders=senders).run(bench, [item])
    *contexts, question, refine = outcome.prompts
    assert [text_of(ids, models[0]).split("Context: ")[1].split("<")[0] for ids in contexts] == (
        list(EXAMPLES[2].split(senders))
    )
    texts = [Receiver(models[0]).answer(ids, max_new_tokens=6).text for ids in contexts]
    own = bench.receiver.answer(question, max_new_tokens=6).text
    others = "".join(
        f"\nAnother agent's answer (for your consideration):\n{text}" for text in texts
    )
    assert len(texts) == n
    assert text_of(refine, models[1]) == TURN.format(
        QUESTION.format("Which bird sings?") + f"\nYour previous answer:\n{own}{others}"
        "\nIf needed, revise your answer. Your new answer is:"
    )
    assert outcome.message == "\n\n".join(texts)
    assert outcome.message_bytes == sum(len(text.encode()) for text in texts)


def test_a_sender_may_have_nothing_to_say(
    models: tuple[Model, Model], tiny: Callable[..., Path], device: str
) -> None:
    item = bench_of(*models).items[0]
    first = Receiver(models[0]).answer(item.sender, max_new_tokens=1).ids[0]
    silent = Model.load(tiny("llama", eos_token_id=[first]), device=device)
    bench = bench_of(silent, models[1])
    (outcome,) = NLD(6).run(bench, bench.items[:1])
    assert outcome.message == ""
    assert outcome.message_bytes == 0
    assert "consideration):\n\nIf needed" in text_of(outcome.prompts[2], models[1])
    assert np.isfinite(outcome.nll)


def test_text_that_looks_like_a_control_token_stays_text(
    bench: Bench, models: tuple[Model, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models[0].tokenizer, "decode", lambda ids: "<|im_end|> done")
    (outcome,) = NLD(2).run(bench, bench.items[:1])
    control = models[1].tokenizer.encode("<|im_end|>", special=True)[0]
    assert outcome.prompts[2].tolist().count(control) == 1
    assert "):\n<|im_end|> done\nIf" in text_of(outcome.prompts[2], models[1])


def test_long_prompts_lose_their_middle(models: tuple[Model, Model]) -> None:
    whole = bench_of(*models)
    (free,) = NLD(6).run(whole, whole.items[:1])
    limit = 190
    bench = bench_of(*models, limit=limit)
    (outcome,) = NLD(6).run(bench, bench.items[:1])
    context, question, refine = outcome.prompts
    half = (limit - len(question)) // 2
    assert len(free.prompts[0]) > 2 * half
    np.testing.assert_array_equal(
        context, np.concatenate([free.prompts[0][:half], free.prompts[0][-half:]])
    )
    written = Receiver(models[0]).answer(context, max_new_tokens=6).text
    assert outcome.message == written
    own = bench.receiver.answer(question, max_new_tokens=6).text
    uncut = bench.prompts.ids(
        QUESTION.format("Who rows?") + f"\nYour previous answer:\n{own}"
        f"\nOther agents' answers (for your consideration):\n{written}"
        "\nIf needed, revise your answer. Your new answer is:",
        "receiver",
    )
    assert len(uncut) > limit
    half = limit // 2
    np.testing.assert_array_equal(refine, np.concatenate([uncut[:half], uncut[-half:]]))
    lost = [len(free.prompts[0]) - len(context), len(uncut) - len(refine)]
    assert outcome.cut_tokens == sum(lost)


def test_equal_sender_s_prompts_are_answered_once(models: tuple[Model, Model]) -> None:
    examples = (EXAMPLES[0], EXAMPLES[0].__class__("q", 1, EXAMPLES[0].context, "Why?", ("x",)))
    counts = []
    for n in (1, 2):
        bench = bench_of(*models, examples=examples)
        outcomes = NLD(6).run(bench, bench.items[:n])
        counts.append(bench.sender.counts["tokens"])
        assert len({outcome.message for outcome in outcomes}) == 1
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"message_tokens": 0}, "message_tokens: expected a number above 0, found 0"),
        ({"message_tokens": -3}, "message_tokens"),
        ({"message_tokens": 2.5}, "message_tokens"),
        ({"message_tokens": True}, "message_tokens"),
        ({"senders": "all"}, "senders: expected one of one, split, documents, found 'all'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        methods(("nld",), Options(**options))


def test_variants_are_told_apart() -> None:
    labels = [
        methods(("nld",), Options(sender_aware=aware, senders=senders))[0].label
        for aware in (False, True)
        for senders in ("one", "split", "documents")
    ]
    assert labels[0] == "nld"
    assert len(set(labels)) == 6
    (method,) = methods(("nld",), Options(message_tokens=7, sender_aware=True))
    expected = {"message_tokens": 7, "sender_aware": True, "senders": "one"}
    assert json.loads(json.dumps(method.settings)) == expected


def test_a_task_without_contexts_is_refused_before_the_run(models: tuple[Model, Model]) -> None:
    with pytest.raises(ValueError, match="'nld' hands a context over, and task 'mmlu' has none"):
        NLD().layers(bench_of(*models, task=find("mmlu")))
    assert NLD().layers(bench_of(*models, task=TASK)) == ()


def test_recorded_run(shared: Path, real_model: Model) -> None:
    """One of the two recorded runs; benchmarks/parity.py runs both, on two models."""
    recordings = shared / "reference"
    data = json.loads((recordings / "oracle_smollm2.json").read_text())
    assert_parity(list(load_parity().published_nld(real_model, data, recordings, 1)), 3 + 1 + 6 + 1)
