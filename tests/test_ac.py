"""`ac`: against the oracle for any k, j and rule, and against the recordings."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fixtures
import hidden_bench
import numpy as np
import oracle
import pytest
from hidden_bench import LOGITS, bench_of, items
from oracle import hidden as reference

import kvcomm
from kvcomm.methods import Options, methods
from kvcomm.methods.ac import AC, default_layer
from kvcomm.model import Model

RULES = ("replace", "sum", "mean")


def logits(method: AC, bench: Any) -> np.ndarray:
    """First logits [3, vocab] of the three records."""
    three = items()
    prefilled, _ = method.prefill(
        bench, [item.sender for item in three], [item.receiver for item in three]
    )
    return prefilled.logits


def check(sender: Path, receiver: Path, device: str, method: AC, k: int, j: int) -> None:
    """First logits, answers and likelihoods of all records."""
    models = [Model.load(folder, device=device) for folder in (sender, receiver)]
    truths = [oracle.read_folder(folder) for folder in (sender, receiver)]
    bench = bench_of(*models)
    outcomes = method.run(bench, items())
    firsts = logits(method, bench)
    width = min(model.config.core["dim"] for model in models)
    for item, outcome, first in zip(items(), outcomes, firsts, strict=True):

        def expected(decoded: Any, item: Any = item) -> np.ndarray:
            return reference.ac(
                *truths, item.sender, item.receiver, decoded, k=k, j=j, rule=method.rule
            )

        np.testing.assert_allclose(first, expected(())[-1], rtol=0, atol=LOGITS)
        hidden_bench.check_outcome(outcome, item, expected, models[1])
        assert outcome.message_bytes == 4 * width
        assert outcome.receiver_tokens == len(item.receiver)
        assert outcome.cut_tokens == 3
        np.testing.assert_array_equal(outcome.prompts[0], item.sender)
        np.testing.assert_array_equal(outcome.prompts[1], item.receiver)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("k", range(5))
def test_every_pair_of_layers(tiny: Callable[..., Path], device: str, k: int, rule: str) -> None:
    for j in range(4):
        check(tiny("llama"), tiny("llama", seed=1), device, AC(rule, k, j), k, j)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "gemma3"])
def test_families(tiny: Callable[..., Path], device: str, family: str) -> None:
    folder = tiny(family)
    for k, j in ((0, 0), (2, 3)):
        check(folder, folder, device, AC("mean", k, j), k, j)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("widths", [(32, 64), (64, 32)])
def test_of_unequal_widths_the_last_components_are_exchanged(
    tiny: Callable[..., Path], device: str, widths: tuple[int, int], rule: str
) -> None:
    sender, receiver = (tiny("llama", hidden_size=width) for width in widths)
    check(sender, receiver, device, AC(rule, 2, 1), 2, 1)


def test_unequal_depths_and_their_default_layers(tiny: Callable[..., Path], device: str) -> None:
    deep = tiny("qwen2", num_hidden_layers=7)
    check(deep, tiny("llama"), device, AC(), 6, 3)  # 0.8125 * 7 = 5.7, 0.8125 * 4 = 3.25


def test_one_s_own_state_changes_nothing(tiny: Callable[..., Path], device: str) -> None:
    model = Model.load(tiny("llama"), device=device)
    bench = bench_of(model)
    ids = items()[0].sender
    plain = bench.receiver.logits(ids)
    for layer in range(model.n_layers):
        for rule, same in (("replace", True), ("mean", True), ("sum", False)):
            prefilled, _ = AC(rule, layer, layer).prefill(bench, [ids], [ids])
            assert np.array_equal(prefilled.logits[0], plain) == same


@pytest.mark.parametrize(
    ("n_layers", "layer"),
    [(32, 26), (30, 24), (24, 20), (28, 23), (16, 13), (4, 3), (2, 1), (1, 0)],
)
def test_default_layer_is_26_of_32(n_layers: int, layer: int) -> None:
    assert default_layer(n_layers) == layer


def test_a_record_s_outcome_does_not_depend_on_the_batch(
    tiny: Callable[..., Path], device: str
) -> None:
    bench = bench_of(Model.load(tiny("gemma3"), device=device))
    for method in (AC("sum", 3, 2), AC("mean", 7, 0)):
        hidden_bench.assert_alone_as_together(method, bench)


def test_the_published_answer_stops_at_the_config_s_eos_only(tmp_path: Path, device: str) -> None:
    config, weights = fixtures.build("llama")
    folder = fixtures.write_folder(tmp_path / "m", config, weights)
    free = AC().run(bench_of(Model.load(folder, device=device)), items())[0].token_ids
    assert len(free) == hidden_bench.N_NEW
    fixtures.write_tokenizer(folder, eos=[free[1]])  # of generation_config.json
    model = Model.load(folder, device=device)
    assert AC().run(bench_of(model), items())[0].token_ids == free[:2]
    assert AC().run(bench_of(model, preset="reference"), items())[0].token_ids == free


def test_both_agents_count_their_work(tiny: Callable[..., Path], device: str) -> None:
    bench = bench_of(Model.load(tiny("llama"), device=device))
    logits(AC("replace", 2, 1), bench)
    assert bench.sender.counts["tokens"] == 21 + 11 + 34
    assert bench.receiver.counts["tokens"] == 9 + 12 + 1
    one = bench.sender.counts["linear_flops"]
    logits(AC("replace", 0, 1), bench)
    assert bench.sender.counts["linear_flops"] == one  # embeddings cost no product


def test_a_context_of_several_questions_is_run_once(tiny: Callable[..., Path], device: str) -> None:
    bench = bench_of(Model.load(tiny("llama"), device=device))
    one, other, _ = items()
    again = replace(other, sender=one.sender)
    method = AC("sum", 2, 1)
    outcomes = method.run(bench, [one, other, again])
    assert bench.sender.counts["tokens"] == 21 + 11
    assert outcomes[2] == replace(method.run(bench, [again])[0], seconds=outcomes[2].seconds)
    AC("mean", 2, 1).run(bench, [one, other])
    assert bench.sender.counts["tokens"] == 21 + 11  # rules share what was read


def test_variants_and_what_they_are_called() -> None:
    chosen = methods(("ac",), Options(rules=RULES, from_layer=3))
    assert [method.label for method in chosen] == ["ac replace k=3", "ac sum k=3", "ac mean k=3"]
    assert chosen[1].settings == {"rule": "sum", "from_layer": 3, "to_layer": None}
    assert [AC().label, AC("mean", 4, 0).label] == ["ac replace", "ac mean k=4 j=0"]


@pytest.mark.parametrize(
    ("k", "j", "message"),
    [
        (-1, 0, "from_layer: expected a layer in 0 .. 4, found -1"),
        (5, 0, "from_layer: expected a layer in 0 .. 4, found 5"),
        (0, -1, "to_layer: expected a layer in 0 .. 3, found -1"),
        (0, 4, "to_layer: expected a layer in 0 .. 3, found 4"),
        (1.0, 1, "from_layer: expected a layer in 0 .. 4, found 1.0"),
    ],
)
def test_layers_that_do_not_exist_are_refused(
    tiny: Callable[..., Path], device: str, k: int, j: int, message: str
) -> None:
    bench = bench_of(Model.load(tiny("llama"), device=device))
    with pytest.raises(ValueError, match=message):
        AC("replace", k, j).layers(bench)
    with pytest.raises(ValueError, match=message):
        AC("replace", k, j).run(bench, items())


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="rule: expected one of replace, sum, mean, found 'max'"):
        methods(("ac",), Options(rules=("replace", "max")))


def test_a_question_that_passes_the_last_position_is_refused(
    tiny: Callable[..., Path], device: str
) -> None:
    model = Model.load(tiny("llama", max_position_embeddings=10), device=device)
    with pytest.raises(ValueError, match="prompt: 12 tokens, model .* has 10 positions"):
        AC().run(bench_of(model), items())


def test_published_answers(
    shared: Path, real_model: kvcomm.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy ids and first logits of every rule; two of the three recorded items."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    import parity_hidden

    data = json.loads((shared / "reference" / "oracle_smollm2.json").read_text())
    outcomes = list(parity_hidden.published_ac(real_model, data, limit=2))
    assert [o for o in outcomes if not o.equal and not o.near_tie] == []
    assert len(outcomes) == 1 + 3 * 2 * 2
