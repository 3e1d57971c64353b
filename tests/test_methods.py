"""The compared methods, against the likelihoods and bytes that their definitions give."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvcomm.agents import Receiver, Sender
from kvcomm.methods import Bench, Item, Method, Options, Outcome, methods
from kvcomm.methods.baseline import Baseline
from kvcomm.methods.kvcomm import KVComm
from kvcomm.methods.skyline import Skyline
from kvcomm.model import Model
from kvcomm.selection import calibrate
from kvcomm.tasks import Example


@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma3"])
def bench(request: pytest.FixtureRequest, tiny: Callable[..., Path], device: str) -> Bench:
    model = Model.load(tiny(request.param), device=device)
    layers = tuple(range(model.n_layers))
    return Bench(Sender(model), Receiver(model), max_new_tokens=5, read_layers=layers)


@pytest.fixture(scope="module")
def items() -> list[Item]:
    draw = np.random.default_rng(5)

    def ids(n: int) -> np.ndarray:
        return draw.integers(0, 250, n).astype(np.int32)

    made = []
    for number, (context, question) in enumerate(((30, 9), (17, 12), (44, 5))):
        one, other = ids(context), ids(question)
        gold = (ids(3), ids(4)) if number == 1 else (ids(3),)
        example = Example(str(number), number, "a context", "a question", ("an answer",))
        both = np.concatenate([one, other])
        made.append(Item(number, example, one, other, other, both, context, 0, 2, gold))
    return made


def run(method: Method, bench: Bench, items: list[Item]) -> list[Outcome]:
    bench.forget()
    return method.run(bench, items)


def nll_after(receiver: Receiver, prompt: np.ndarray, gold: np.ndarray) -> float:
    """From raw logits of one pass over prompt and answer, in double precision."""
    logits = receiver.logits(np.concatenate([prompt, gold]), all=True).astype(np.float64)
    rows = logits[len(prompt) - 1 : -1]
    rows = rows - rows.max(axis=1, keepdims=True)
    chosen = rows[np.arange(len(gold)), gold] - np.log(np.exp(rows).sum(axis=1))
    return float(-chosen.sum())


@pytest.mark.parametrize("method", [Baseline(), Skyline()], ids=["baseline", "skyline"])
def test_likelihood_and_answer_are_those_of_one_prompt(
    bench: Bench, items: list[Item], method: Method
) -> None:
    for item, outcome in zip(items, run(method, bench, items), strict=True):
        prompt = item.baseline if method.name == "baseline" else item.skyline
        expected = [nll_after(bench.receiver, prompt, gold) for gold in item.gold]
        assert outcome.nll == pytest.approx(min(expected), abs=1e-3)
        assert outcome.n_gold_tokens == len(item.gold[int(np.argmin(expected))])
        assert outcome.token_ids == bench.receiver.answer(prompt, max_new_tokens=5).ids
        assert outcome.receiver_tokens == len(prompt)
        assert outcome.message_bytes == 0
        assert outcome.layers is None
        assert outcome.cut_tokens == (2 if method.name == "skyline" else 0)
        np.testing.assert_array_equal(outcome.prompts[0], prompt)
        assert outcome.seconds.sender == 0.0
        assert 0 < outcome.seconds.first_token <= outcome.seconds.total


def test_kvcomm_is_the_receiver_s_answer_to_the_packet_of_those_layers(
    bench: Bench, items: list[Item]
) -> None:
    method = KVComm("layers", given=(0, 2))
    model = bench.sender.model
    for item, outcome in zip(items, run(method, bench, items), strict=True):
        packet = bench.sender.read(item.sender, (0, 2))
        answer = bench.receiver.answer(item.receiver, packet, 5)
        score = bench.receiver.score(item.receiver, list(item.gold), packet)
        assert outcome.token_ids == answer.ids
        assert outcome.nll == score.nll
        assert outcome.layers == (0, 2)
        assert outcome.receiver_tokens == len(item.receiver)
        window = model.config.core["window"]
        kept = [
            min(len(item.sender), window - 1) if model.config.core["windowed"][layer] else
            len(item.sender) for layer in (0, 2)
        ]  # fmt: skip
        assert outcome.message_bytes == sum(kept) * 2 * model.n_kv_heads * model.head_dim * 4
        seconds = outcome.seconds
        assert seconds.total >= seconds.sender + seconds.transfer + seconds.first_token


def test_all_layers_of_one_prompt_are_the_skyline(bench: Bench, items: list[Item]) -> None:
    whole = run(KVComm("all"), bench, items)
    skyline = run(Skyline(), bench, items)
    assert [o.token_ids for o in whole] == [o.token_ids for o in skyline]
    np.testing.assert_allclose([o.nll for o in whole], [o.nll for o in skyline], atol=1e-4)


def test_an_item_s_outcome_does_not_depend_on_the_batch(bench: Bench, items: list[Item]) -> None:
    for method in (Baseline(), Skyline(), KVComm("layers", given=(1, 3))):
        together = run(method, bench, items)
        for item, expected in zip(items, together, strict=True):
            (alone,) = run(method, bench, [item])
            assert alone.nll == expected.nll
            assert alone.token_ids == expected.token_ids


def test_preset_reference_sends_layer_0_and_first_tokens(
    tiny: Callable[..., Path], device: str, items: list[Item]
) -> None:
    model = Model.load(tiny("llama"), device=device)
    bench = Bench(Sender(model), Receiver(model), preset="reference", max_new_tokens=3)
    bench.read_layers = (2,)
    for item, outcome in zip(items, run(KVComm("layers", given=(2,)), bench, items), strict=True):
        tokens = 2 * len(item.sender) + 2 * 1  # layers 0 and 2 whole, the first token of 1 and 3
        assert outcome.message_bytes == tokens * 2 * model.n_kv_heads * model.head_dim * 4
        assert outcome.layers == (2,)


def test_strategies_choose_from_the_calibration(
    tiny: Callable[..., Path], device: str, items: list[Item]
) -> None:
    model = Model.load(tiny("llama"), device=device)
    bench = Bench(Sender(model), Receiver(model))
    bench.scores = calibrate(bench.sender, bench.receiver, [(items[0].sender, items[0].receiver)])
    order = np.argsort(-bench.scores.mass, kind="stable").tolist()
    assert KVComm("attention", ratio="0.5").layers(bench) == tuple(sorted(order[:2]))
    assert KVComm("attention_level", ratio="0.25", level=3).layers(bench) == (order[3],)
    assert KVComm("gaussian", ratio="0.5", alpha=1.0).layers(bench) == (0, 1)  # centre at 1
    assert KVComm("contiguous", given=(3, 1)).layers(bench) == (1, 2, 3)
    assert KVComm("all").layers(bench) == (0, 1, 2, 3)
    assert KVComm(ratio="0.5", online=2).layers(bench) == (0, 1, 2, 3)


def test_methods_by_name_and_their_labels() -> None:
    options = Options(
        ratios=("0.30", "1"), strategies=("attention_gaussian", "random", "all"), layers=(0, 3)
    )
    found = methods(("skyline", "kvcomm", "baseline"), options)
    assert [method.label for method in found] == [
        "skyline", "kvcomm 0.3", "kvcomm 1", "random 0.3", "random 1", "all layers",
        "layers 0,3", "baseline",
    ]  # fmt: skip
    assert [method.calibrated for method in found] == [False, True, True, *[False] * 5]
    seeds = [method.settings.get("seed") for method in found]
    assert seeds == [None, None, None, 42, 42, None, None, None]
    chosen = methods(("kvcomm",), replace(options, strategies=("contiguous",), shift_back=True))
    assert [method.label for method in chosen] == ["contiguous 0-3 shift back"]
    chosen = methods(("kvcomm",), Options(strategies=(), layers=(9, 0, 3, 7, 8, 3)))
    assert [method.label for method in chosen] == ["layers 0,3,7-9"]


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (("nonsense",), Options(), "expected one of baseline, skyline, kvcomm"),
        ((), Options(), "none is asked for"),
        (("baseline", "baseline"), Options(), "'baseline' is asked for 2 times"),
        (("kvcomm",), Options(ratios=("0.5", "0.50")), "'kvcomm 0.5' is asked for 2 times"),
        (("kvcomm",), Options(strategies=("best",)), "strategy: expected one of"),
        (("kvcomm",), Options(strategies=("contiguous",)), "'contiguous' needs a list"),
        (("kvcomm",), Options(online=0), "online"),
    ],
)
def test_what_makes_no_run_is_refused(
    names: tuple[str, ...], options: Options, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        methods(names, options)
