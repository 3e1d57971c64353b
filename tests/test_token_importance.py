"""`token_importance`: against the oracle for any token, effect and layer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hidden_bench
import numpy as np
import oracle
import pytest
from hidden_bench import LOGITS, bench_of, items
from oracle import hidden as reference

from kvcomm.methods import Options, methods
from kvcomm.methods.token_importance import TokenImportance
from kvcomm.model import Model


def logits(method: TokenImportance, bench: Any) -> np.ndarray:
    """First logits [3, vocab] of the three records."""
    three = items()
    prompts, numbers = [item.skyline for item in three], [item.number for item in three]
    return method.prefill(bench, prompts, numbers).logits


def check(folder: Path, device: str, token: str, effect: str, layer: int) -> None:
    """First logits, answers and likelihoods of all records."""
    model, truth = Model.load(folder, device=device), oracle.read_folder(folder)
    bench, method = bench_of(model), TokenImportance(token, effect, layer)
    outcomes = method.run(bench, items())
    firsts = logits(method, bench)
    for item, outcome, first in zip(items(), outcomes, firsts, strict=True):
        at = {"first": 0, "last": len(item.skyline) - 1, "none": None}[token]

        def expected(decoded: Any, item: Any = item, at: Any = at) -> np.ndarray:
            return reference.token_importance(
                truth, item.skyline, decoded, layer=layer, token=at, keep=effect == "keep"
            )

        np.testing.assert_allclose(first, expected(())[-1], rtol=0, atol=LOGITS)
        hidden_bench.check_outcome(outcome, item, expected, model)
        assert outcome.message_bytes == 0
        assert outcome.receiver_tokens == len(item.skyline)
        assert outcome.cut_tokens == 2
        np.testing.assert_array_equal(outcome.prompts[0], item.skyline)


@pytest.mark.parametrize("effect", ["keep", "zero"])
@pytest.mark.parametrize("token", ["first", "last", "none"])
def test_every_layer(tiny: Callable[..., Path], device: str, token: str, effect: str) -> None:
    for layer in range(4):
        check(tiny("llama"), device, token, effect, layer)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "gemma3"])
def test_families(tiny: Callable[..., Path], device: str, family: str) -> None:
    for token, effect in (("last", "keep"), ("first", "zero")):
        check(tiny(family), device, token, effect, 1)


@pytest.mark.parametrize("effect", ["keep", "zero"])
def test_a_random_token_is_one_of_the_prompt_the_same_for_every_layer(
    tiny: Callable[..., Path], device: str, effect: str
) -> None:
    truth = oracle.read_folder(tiny("llama"))
    bench = bench_of(Model.load(tiny("llama"), device=device))
    found = set()
    for layer in (0, 1):
        rows = logits(TokenImportance("random", effect, layer, seed=3), bench)
        for item, row in zip(items(), rows, strict=True):
            every = [
                reference.token_importance(
                    truth, item.skyline, layer=layer, token=at, keep=effect == "keep"
                )[-1]
                for at in range(len(item.skyline))
            ]
            near = [at for at, one in enumerate(every) if np.abs(row - one).max() < LOGITS]
            assert len(near) == 1
            found.add((item.number, near[0]))
    assert len(found) == 3


def test_random_goes_by_the_seed_and_the_record_s_number(
    tiny: Callable[..., Path], device: str
) -> None:
    bench = bench_of(Model.load(tiny("llama"), device=device))
    ids = items()[2].skyline
    method = TokenImportance("random", "keep", 1)
    numbers = list(range(12))
    rows = method.prefill(bench, [ids] * 12, numbers).logits
    assert len({row.tobytes() for row in rows}) > 4  # 12 draws out of 35
    again = method.prefill(bench, [ids] * 12, numbers[::-1]).logits[::-1]
    np.testing.assert_array_equal(rows, again)
    other = TokenImportance("random", "keep", 1, seed=43).prefill(bench, [ids] * 12, numbers).logits
    assert not np.array_equal(rows, other)


def test_nothing_zeroed_is_the_plain_prompt(tiny: Callable[..., Path], device: str) -> None:
    bench = bench_of(Model.load(tiny("gemma3"), device=device))
    plain = np.stack([bench.receiver.logits(item.skyline) for item in items()])
    for layer in range(7):
        np.testing.assert_array_equal(logits(TokenImportance("none", "zero", layer), bench), plain)
    np.testing.assert_array_equal(logits(TokenImportance("last", "keep", 6), bench), plain)
    assert not np.array_equal(logits(TokenImportance("last", "keep", 5), bench), plain)


def test_a_last_token_zeroed_behind_the_last_layer_leaves_no_logits(
    tiny: Callable[..., Path], device: str
) -> None:
    bench = bench_of(Model.load(tiny("llama"), device=device))
    for token, effect in (("last", "zero"), ("none", "keep"), ("first", "keep")):
        method = TokenImportance(token, effect, 3)
        assert not logits(method, bench)[:2].any()
        for item, outcome in zip(items(), method.run(bench, items()), strict=True):
            assert outcome.token_ids[0] == 0  # of equal logits the lowest id
            assert outcome.nll >= np.log(320) - 1e-4  # the first gold token: one of 320
            assert len(outcome.token_ids) > 1
            np.testing.assert_array_equal(outcome.prompts[0], item.skyline)


def test_a_task_without_context_has_the_baseline_s_prompt(
    tiny: Callable[..., Path], device: str
) -> None:
    bench = bench_of(Model.load(tiny("llama"), device=device))
    bare = items(context="")
    for item, outcome in zip(bare, TokenImportance().run(bench, bare), strict=True):
        np.testing.assert_array_equal(outcome.prompts[0], item.baseline)
        assert outcome.receiver_tokens == 7


def test_a_record_s_outcome_does_not_depend_on_the_batch(
    tiny: Callable[..., Path], device: str
) -> None:
    bench = bench_of(Model.load(tiny("gemma3"), device=device))
    for method in (TokenImportance("random", "keep", 2), TokenImportance("last", "zero", 6)):
        hidden_bench.assert_alone_as_together(method, bench)


def test_the_receiver_counts_its_work(tiny: Callable[..., Path], device: str) -> None:
    bench = bench_of(Model.load(tiny("llama"), device=device))
    bench.receiver.logits(items()[0].skyline)
    plain = bench.receiver.counts
    three = items()[:1]
    TokenImportance("last", "keep", 1).prefill(bench, [item.skyline for item in three], [0])
    assert bench.sender.counts["tokens"] == 0
    for name, count in bench.receiver.counts.items():
        assert count == 2 * plain[name]  # the same products, in two parts


def test_variants_and_what_they_are_called() -> None:
    options = Options(tokens=("last", "random"), effect="zero", at_layers=(0, 3), seed=7)
    chosen = methods(("token_importance",), options)
    assert [method.label for method in chosen] == [
        "zero last token l=0", "zero last token l=3",
        "zero random token l=0", "zero random token l=3",
    ]  # fmt: skip
    assert chosen[1].settings == {"token": "last", "effect": "zero", "layer": 3, "seed": None}
    assert chosen[2].settings == {"token": "random", "effect": "zero", "layer": 0, "seed": 7}
    (plain,) = methods(("token_importance",), Options())
    assert plain.label == "keep last token"


def test_the_middle_layer_is_the_default(tiny: Callable[..., Path], device: str) -> None:
    bench = bench_of(Model.load(tiny("gemma3"), device=device))  # 7 layers
    np.testing.assert_array_equal(
        logits(TokenImportance("first", "keep"), bench),
        logits(TokenImportance("first", "keep", 3), bench),
    )


@pytest.mark.parametrize("layer", [-1, 4])
def test_layers_that_do_not_exist_are_refused(
    tiny: Callable[..., Path], device: str, layer: int
) -> None:
    bench = bench_of(Model.load(tiny("llama"), device=device))
    method = TokenImportance("last", "keep", layer)
    with pytest.raises(ValueError, match=f"at_layers: expected a layer in 0 .. 3, found {layer}"):
        method.layers(bench)
    with pytest.raises(ValueError, match=f"at_layers: expected a layer in 0 .. 3, found {layer}"):
        method.run(bench, items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(tokens=("middle",)), "token: expected one of first, last, random, none"),
        (Options(effect="drop"), "effect: expected one of keep, zero, found 'drop'"),
    ],
)
def test_unknown_tokens_and_effects_are_refused(options: Options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        methods(("token_importance",), options)


def test_a_prompt_that_passes_the_last_position_is_refused(
    tiny: Callable[..., Path], device: str
) -> None:
    model = Model.load(tiny("llama", max_position_embeddings=29), device=device)
    with pytest.raises(ValueError, match="prompt: 30 tokens, model .* positions"):
        TokenImportance().run(bench_of(model), items())


def test_on_a_real_model_the_last_token_matters_most_in_late_layers(
    shared: Path, real_model: Model
) -> None:
    """Figure 2: kept alone, it is enough behind a late layer, where no other token is."""
    bench = bench_of(real_model)
    bench.max_new_tokens = 0
    records = hidden_bench.recorded_items(shared, real_model, 2)
    nll = {
        (token, layer): hidden_bench.total_nll(
            TokenImportance(token, "keep", layer), bench, records
        )
        for token in ("last", "first", "random")
        for layer in (4, 28)
    }
    whole = hidden_bench.total_nll(TokenImportance("none", "zero", 28), bench, records)
    assert nll["last", 28] < 1.2 * whole
    others = [nll["first", 28], nll["random", 28], nll["last", 4], nll["first", 4]]
    assert min(others) > 2 * whole
