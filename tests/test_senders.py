"""kvcomm with several senders, other masses and other protocols: which layers, and what answer.

Expected answers are the receiver's to packets that are read here by hand, text by text.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from piece_bench import TEXTS, bench_of

from kvcomm.agents import Receiver, Sender
from kvcomm.methods import Bench, Options, methods
from kvcomm.methods.kvcomm import KVComm
from kvcomm.model import Model
from kvcomm.plan import Plan, Prompts
from kvcomm.search import search
from kvcomm.selection import LayerScores, calibrate
from kvcomm.tasks import find


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path], device: str) -> Model:
    return Model.load(tiny("llama"), device=device)


@pytest.fixture
def bench(model: Model) -> Bench:
    return bench_of(model)


def parts_of(number: int, senders: str) -> tuple[str, ...]:
    """Written out for the records of piece_bench: n // 2 pieces and the rest, or each piece."""
    pieces = TEXTS[number][0]
    if senders == "documents":
        return pieces
    return ("\n".join(pieces[:1]), "\n".join(pieces[1:]))


@pytest.mark.parametrize("positions", ["published", "sequential"])
@pytest.mark.parametrize("senders", ["split", "documents"])
@pytest.mark.parametrize("preset", ["paper", "reference"])
def test_the_answer_is_that_to_the_packets_of_all_senders(
    bench: Bench, preset: str, senders: str, positions: str
) -> None:
    bench.preset = preset
    method = KVComm("layers", given=(1, 3), senders=senders, positions=positions)
    outcomes = method.run(bench, bench.items)
    for number, (item, outcome) in enumerate(zip(bench.items, outcomes, strict=True)):
        contexts = parts_of(number, senders)
        packets = tuple(bench.sender.read(text, (1, 3), preset=preset) for text in contexts)
        options = {"positions": positions}
        answer = bench.receiver.answer(item.example.question, packets, 4, **options)
        score = bench.receiver.score(
            item.example.question, list(item.example.answers), packets, **options
        )
        assert outcome.token_ids == answer.ids
        assert outcome.nll == score.nll
        assert outcome.message_bytes == sum(packet.nbytes for packet in packets)
        assert [ids.tolist() for ids in outcome.prompts[:-1]] == [list(p.ids) for p in packets]
        assert outcome.prompts[-1].tolist() == item.receiver.tolist()


def test_one_sender_and_two_do_not_say_the_same(bench: Bench) -> None:
    one, split, moved = (
        KVComm("all", senders=senders, positions=positions).run(bench, bench.items)
        for senders, positions in (
            ("one", "published"), ("split", "published"), ("split", "sequential")
        )
    )  # fmt: skip
    for outcomes in zip(one, split, moved, strict=True):
        assert len({outcome.nll for outcome in outcomes}) == 3


@pytest.mark.parametrize("senders", ["split", "documents"])
def test_an_item_s_outcome_does_not_depend_on_the_batch(bench: Bench, senders: str) -> None:
    method = KVComm("layers", given=(0, 2), senders=senders)
    together = method.run(bench, bench.items)
    for item, expected in zip(bench.items, together, strict=True):
        bench.forget()
        (alone,) = method.run(bench, [item])
        assert (alone.nll, alone.token_ids) == (expected.nll, expected.token_ids)


def test_a_context_of_one_piece_cannot_be_dealt_out(model: Model) -> None:
    bench = bench_of(model, texts=((("One piece.",), "What?", ("one",)),))
    with pytest.raises(ValueError, match="1 pieces of context, expected at least 2"):
        KVComm("all", senders="split").run(bench, bench.items)


# ---- which layers ------------------------------------------------------------------------------


def best_two(scores: LayerScores) -> tuple[int, ...]:
    return tuple(sorted(np.argsort(-scores.mass, kind="stable")[:2].tolist()))


@pytest.mark.parametrize(
    ("senders", "positions"),
    [("split", "published"), ("split", "sequential"), ("documents", "published")],
)
@pytest.mark.parametrize("skip_first", [None, True])
def test_layers_are_chosen_with_the_same_senders(
    bench: Bench, senders: str, positions: str, skip_first: bool | None
) -> None:
    bench.calibration = bench.items[2:]
    bench.scores = LayerScores(np.arange(4.0).reshape(1, 4, 1), "paper", "", "")  # not to be used
    samples = [(parts_of(number, senders), TEXTS[number][1]) for number in (2, 3)]
    how = {"positions": positions, "skip_first": skip_first}
    expected = calibrate(bench.sender, bench.receiver, samples, **how)
    options = {"senders": senders, "positions": positions, "skip_first": skip_first}
    method = KVComm("attention", ratio="0.5", **options)
    np.testing.assert_allclose(method._scores(bench).mass, expected.mass, rtol=1e-12)
    assert method.layers(bench) == best_two(expected)
    assert {outcome.layers for outcome in method.run(bench, bench.items)} == {best_two(expected)}


@pytest.mark.parametrize("preset", ["paper", "reference"])
def test_skip_first_leaves_the_first_token_out_or_counts_it(bench: Bench, preset: str) -> None:
    bench.preset = preset
    sample = (bench.items[0].sender, bench.items[0].receiver)
    usual, skipped, counted = (
        calibrate(bench.sender, bench.receiver, [sample], preset=preset, skip_first=skip)
        for skip in (None, True, False)
    )
    bench.scores = usual
    for skip, expected in ((None, usual), (True, skipped), (False, counted)):
        found = KVComm("attention", ratio="0.5", skip_first=skip)._scores(bench)
        np.testing.assert_allclose(found.mass, expected.mass, rtol=1e-12)
    assert (skipped.mass < counted.mass).all()


def test_a_run_is_calibrated_once_for_each_way(bench: Bench) -> None:
    bench.calibration = bench.items[:1]
    first, second = (KVComm(ratio=ratio, senders="split") for ratio in ("0.25", "0.5"))
    scores = first._scores(bench)
    assert second._scores(bench) is scores
    assert KVComm(ratio="0.5", senders="documents")._scores(bench) is not scores


def test_without_calibration_records_there_is_no_choice_of_its_own(bench: Bench) -> None:
    message = r"calibration records: 0, and 'kvcomm 0.5 split' needs 1 or more"
    with pytest.raises(ValueError, match=message):
        KVComm(ratio="0.5", senders="split").layers(bench)
    bench.calibration = bench.items[:2]
    with pytest.raises(ValueError, match="2, and 'search 0.5 on 3' needs 3 or more"):
        KVComm("search", ratio="0.5", search_records=3).layers(bench)


@pytest.mark.parametrize("senders", ["one", "split"])
def test_search_is_that_of_the_first_calibration_records(bench: Bench, senders: str) -> None:
    bench.calibration = bench.items[:3]
    samples = [
        (
            ("\n".join(pieces),) if senders == "one" else parts_of(number, senders),
            question,
            list(answers),
        )
        for number, (pieces, question, answers) in enumerate(TEXTS[:2])
    ]
    expected = search(bench.sender, bench.receiver, samples, ratio="0.5").layers
    method = KVComm("search", ratio="0.5", search_records=2, senders=senders)
    assert method.calibrated
    assert method.layers(bench) == expected
    counted = bench.receiver.counts
    assert method.layers(bench) == expected
    assert bench.receiver.counts == counted  # searched once
    (outcome,) = method.run(bench, bench.items[3:])
    fixed = KVComm("layers", given=expected, senders=senders).run(bench, bench.items[3:])[0]
    assert (outcome.layers, outcome.nll) == (expected, fixed.nll)


def test_search_does_not_answer_what_it_has_seen(bench: Bench) -> None:
    bench.calibration = bench.items[:2]
    method = KVComm("search", ratio="0.25", search_records=1)
    assert len(method.run(bench, bench.items[1:])) == 3
    with pytest.raises(ValueError, match="record 'r0': 'search 0.25 on 1' has searched on it"):
        method.run(bench, bench.items)


def test_a_trial_measures_nothing(bench: Bench) -> None:
    level = LayerScores(np.zeros((1, 4, 1)), "paper", "", "")
    trial = replace(bench, scores=level, calibration=bench.items[:1], trial=True)
    counts = bench.receiver.counts
    for method in (KVComm(ratio="0.5", senders="split"), KVComm(ratio="0.5", skip_first=True)):
        assert method.layers(trial) == (0, 1)  # equal scores: the lower layers
    assert KVComm("search", ratio="0.5", search_records=1).layers(trial) == (0, 1, 2, 3)
    for strategy in ("attention", "search"):
        method = KVComm(strategy, ratio="1.5", senders="split", search_records=1)
        with pytest.raises(ValueError, match="ratio: 1.5 is outside"):
            method.layers(trial)
        with pytest.raises(ValueError, match="calibration records: 0"):
            method.layers(replace(trial, calibration=()))
    assert bench.receiver.counts == counts


@pytest.mark.parametrize("senders", ["one", "split"])
def test_online_chooses_again_at_every_such_record(bench: Bench, senders: str) -> None:
    method = KVComm("attention", ratio="0.5", online=3, senders=senders)
    expected = {}
    for start in (0, 3):
        contexts = ("\n".join(TEXTS[start][0]),) if senders == "one" else parts_of(start, "split")
        sample = (contexts, TEXTS[start][1])
        expected[start] = best_two(calibrate(bench.sender, bench.receiver, [sample]))
    outcomes = method.run(bench, bench.items)
    assert [o.layers for o in outcomes] == [expected[0], expected[0], expected[0], expected[3]]
    # A later batch, and the answer there, is the one to the layers of the record that it goes by.
    (alone,) = method.run(bench, bench.items[2:3])
    fixed = KVComm("layers", given=expected[0], senders=senders).run(bench, bench.items[2:3])[0]
    assert (alone.layers, alone.nll) == (expected[0], fixed.nll)


def test_two_senders_as_recorded(shared: Path, real_model: Model) -> None:
    """The published code's prompts, layers and first tokens, from the data file on."""
    data = json.loads((shared / "reference" / "oracle_smollm2.json").read_text())
    recorded, file = data["two_senders"], shared.parent / data["items"]["hotpotqa"]["file"]
    examples = find("hotpotqa").load(file)
    chosen = [examples[one["record_index"]] for one in recorded["items"]]
    bench = Bench(Sender(real_model), Receiver(real_model), "reference", max_new_tokens=8)
    bench.prompts = Prompts(bench, find("hotpotqa"), Plan((), tuple(chosen), {}), None)
    bench.items = [bench.prompts.item(n, one) for n, one in enumerate(chosen)]
    bench.calibration = bench.items[:1]
    method = KVComm(ratio="0.5", senders="split")
    bench.read_layers = method.layers(bench)
    assert list(bench.read_layers) == sorted(recorded["calibration"]["chosen_0_5"])
    outcomes = method.run(bench, bench.items[:2])
    rows = zip(outcomes, recorded["items"][:2], recorded["runs"]["kvcomm_0.5"][:2], strict=True)
    for outcome, item, run in rows:
        for ids, part in zip(outcome.prompts, ("sender1", "sender2", "receiver"), strict=True):
            assert ids.tolist() == item[part]["ids"]
        assert list(outcome.token_ids) == run["ids"][:8]


def test_online_settings_that_choose_nothing_show_before_a_run(bench: Bench) -> None:
    with pytest.raises(ValueError, match="ratio: 1.5 is outside"):
        KVComm(ratio="1.5", online=2).layers(bench)
    with pytest.raises(ValueError, match="level: 2 is outside 0 .. 1, of 2 layers each"):
        KVComm("attention_level", ratio="0.5", level=2, online=2).layers(bench)


# ---- labels and options ------------------------------------------------------------------------


def test_every_option_has_its_place_in_label_and_settings() -> None:
    changes = [
        {}, {"alpha": 0.8}, {"skip_first": True}, {"skip_first": False}, {"shift_back": True},
        {"online": 10}, {"senders": "split"}, {"senders": "documents"},
        {"senders": "split", "positions": "sequential"}, {"ratios": ("0.3",)},
    ]  # fmt: skip
    found = [methods(("kvcomm",), Options(**change))[0] for change in changes]
    assert [method.label for method in found] == [
        "kvcomm 0.5", "kvcomm 0.5 alpha 0.8", "kvcomm 0.5 skip first", "kvcomm 0.5 count first",
        "kvcomm 0.5 shift back", "kvcomm 0.5 online 10", "kvcomm 0.5 split",
        "kvcomm 0.5 documents", "kvcomm 0.5 split sequential", "kvcomm 0.3",
    ]  # fmt: skip
    settings = [repr(method.settings) for method in found]
    assert len(set(settings)) == len(settings)


def test_what_a_strategy_does_not_know_is_not_in_its_label() -> None:
    options = Options(strategies=("random", "gaussian", "all"), skip_first=True, alpha=0.8, seed=1)
    found = methods(("kvcomm",), options)
    assert [method.label for method in found] == ["random 0.5 seed 1", "gaussian 0.5", "all layers"]
    assert all(method.settings["skip_first"] is None for method in found)
    options = Options(strategies=("search",), search_records=4, beam=2, backward=True)
    (found,) = methods(("kvcomm",), options)
    assert found.label == "search 0.5 on 4 beam 2 backward"


def test_chunks_and_lists_of_one_run_differ_in_their_settings() -> None:
    chunks = [KVComm("contiguous", given=given) for given in ((0, 2), (0, 3))]
    assert chunks[0].settings != chunks[1].settings
    assert chunks[0].settings["given"] == [0, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"senders": "many"}, "senders: expected one of one, split, documents, found 'many'"),
        ({"positions": "mixed", "senders": "split"}, "positions: expected one of published"),
        ({"positions": "sequential"}, "is about several senders"),
        ({"search_records": 0}, "search records: expected 1 or more, found 0"),
        ({"beam": 0}, "beam: expected 1 or more, found 0"),
        ({"online": -1}, "online: expected a number of records above 0, found -1"),
    ],
)
def test_options_out_of_range(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        methods(("kvcomm",), Options(**options))
