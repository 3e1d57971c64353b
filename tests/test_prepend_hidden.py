"""`prepend_hidden`: against the oracle for any k and j, and against reading it all in one go."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hidden_bench
import numpy as np
import oracle
import pytest
from hidden_bench import LOGITS, bench_of, items
from oracle import hidden as reference

from kvcomm.errors import MismatchError
from kvcomm.methods import Options, methods
from kvcomm.methods.baseline import Baseline
from kvcomm.methods.prepend_hidden import PrependHidden
from kvcomm.methods.skyline import Skyline
from kvcomm.model import Model


def logits(method: PrependHidden, bench: Any) -> np.ndarray:
    """First logits [3, vocab] of the three records."""
    three = items()
    prefilled, _ = method.prefill(
        bench, [item.sender for item in three], [item.receiver for item in three]
    )
    return prefilled.logits


def check(sender: Path, receiver: Path, device: str, k: int, j: int) -> None:
    """First logits, answers and likelihoods of all records."""
    models = [Model.load(folder, device=device) for folder in (sender, receiver)]
    truths = [oracle.read_folder(folder) for folder in (sender, receiver)]
    bench, method = bench_of(*models), PrependHidden(k, j)
    outcomes = method.run(bench, items())
    firsts = logits(method, bench)
    for item, outcome, first in zip(items(), outcomes, firsts, strict=True):

        def expected(decoded: Any, item: Any = item) -> np.ndarray:
            return reference.prepend_hidden(*truths, item.sender, item.receiver, decoded, k=k, j=j)

        np.testing.assert_allclose(first, expected(())[-1], rtol=0, atol=LOGITS)
        hidden_bench.check_outcome(outcome, item, expected, models[1])
        assert outcome.message_bytes == 4 * 64 * len(item.sender)
        assert outcome.receiver_tokens == len(item.sender) + len(item.receiver)
        assert outcome.cut_tokens == 3
        np.testing.assert_array_equal(outcome.prompts[0], item.sender)
        np.testing.assert_array_equal(outcome.prompts[1], item.receiver)


@pytest.mark.parametrize("k", range(5))
def test_every_pair_of_layers(tiny: Callable[..., Path], device: str, k: int) -> None:
    for j in range(4):
        check(tiny("llama"), tiny("llama", seed=1), device, k, j)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "gemma3"])
def test_families(tiny: Callable[..., Path], device: str, family: str) -> None:
    for k, j in ((0, 0), (1, 3), (3, 1)):
        check(tiny(family), tiny(family), device, k, j)


def test_unequal_depths(tiny: Callable[..., Path], device: str) -> None:
    check(tiny("llama", num_hidden_layers=6), tiny("llama", seed=1), device, 6, 2)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_embeddings_put_before_embeddings_are_one_prompt(
    tiny: Callable[..., Path], device: str, family: str
) -> None:
    bench = bench_of(Model.load(tiny(family), device=device))
    found = logits(PrependHidden(0, 0), bench)
    for item, row in zip(items(), found, strict=True):
        whole = np.concatenate([item.sender, item.receiver])
        np.testing.assert_allclose(row, bench.receiver.logits(whole), rtol=0, atol=LOGITS)


def test_a_record_s_outcome_does_not_depend_on_the_batch(
    tiny: Callable[..., Path], device: str
) -> None:
    bench = bench_of(Model.load(tiny("gemma3"), device=device))
    for method in (PrependHidden(0, 0), PrependHidden(2, 4)):
        hidden_bench.assert_alone_as_together(method, bench)


def test_both_agents_count_their_work(tiny: Callable[..., Path], device: str) -> None:
    bench = bench_of(Model.load(tiny("llama"), device=device))
    logits(PrependHidden(2, 1), bench)
    assert bench.sender.counts["tokens"] == 21 + 11 + 34
    assert bench.receiver.counts["tokens"] == 9 + 12 + 1  # that entered layer 0


def test_variants_and_what_they_are_called() -> None:
    chosen = methods(("prepend_hidden",), Options(from_layer=3))
    assert [method.label for method in chosen] == ["prepend hidden k=3 j=0"]
    assert chosen[0].settings == {"from_layer": 3, "to_layer": 0}
    assert PrependHidden().label == "prepend hidden k=0 j=0"


@pytest.mark.parametrize(
    ("k", "j", "message"),
    [
        (-1, 0, "from_layer: expected a layer in 0 .. 4, found -1"),
        (5, 0, "from_layer: expected a layer in 0 .. 4, found 5"),
        (0, -1, "to_layer: expected a layer in 0 .. 3, found -1"),
        (0, 4, "to_layer: expected a layer in 0 .. 3, found 4"),
    ],
)
def test_layers_that_do_not_exist_are_refused(
    tiny: Callable[..., Path], device: str, k: int, j: int, message: str
) -> None:
    bench = bench_of(Model.load(tiny("llama"), device=device))
    (method,) = methods(("prepend_hidden",), Options(from_layer=k, to_layer=j))
    with pytest.raises(ValueError, match=message):
        method.layers(bench)
    with pytest.raises(ValueError, match=message):
        method.run(bench, items())


def test_unequal_widths_are_refused(tiny: Callable[..., Path], device: str) -> None:
    models = [Model.load(tiny("llama", hidden_size=n), device=device) for n in (32, 64)]
    with pytest.raises(MismatchError, match="sender .* are 32 wide, of receiver .* 64"):
        PrependHidden().layers(bench_of(*models))


def test_what_passes_the_last_position_is_refused(tiny: Callable[..., Path], device: str) -> None:
    model = Model.load(tiny("llama", max_position_embeddings=34), device=device)
    with pytest.raises(ValueError, match="34 tokens of context and 1 of the receiver's make 35"):
        PrependHidden().run(bench_of(model), items())


def test_on_a_real_model_only_early_layers_work(shared: Path, real_model: Model) -> None:
    """Figure 3: k and j both early give most of what reading gives, one of them late not half."""
    bench = bench_of(real_model)
    bench.max_new_tokens = 0
    records = hidden_bench.recorded_items(shared, real_model, 2)
    baseline = hidden_bench.total_nll(Baseline(), bench, records)
    gain = baseline - hidden_bench.total_nll(Skyline(), bench, records)
    early, *late = (
        (baseline - hidden_bench.total_nll(PrependHidden(k, j), bench, records)) / gain
        for k, j in ((1, 1), (20, 1), (1, 20), (20, 20))
    )
    assert early > 0.8
    assert max(late) < 0.5
