"""The controls: what is sent in the right message's place, and what a run says about them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import piece_bench
import pytest
from fixtures import TURN_END
from piece_bench import TEXTS, bench_of

from kvcomm.agents import Receiver, Sender
from kvcomm.evaluate import evaluate
from kvcomm.methods import Bench, Options, methods
from kvcomm.methods.control import KINDS, Control, findings, noise, shuffled
from kvcomm.methods.kvcomm import KVComm
from kvcomm.model import Model
from kvcomm.plan import divide
from kvcomm.selection import calibrate
from kvcomm.weights import f32_from_bf16


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tiny: Callable[..., Path], device: str) -> Model:
    return Model.load(tiny(request.param), device=device)


@pytest.fixture(params=["paper", "reference"])
def bench(request: pytest.FixtureRequest, model: Model) -> Bench:
    bench = bench_of(model, preset=request.param)
    item = bench.items[3]
    samples = [(item.sender, item.receiver)]
    bench.scores = calibrate(bench.sender, bench.receiver, samples, preset=request.param)
    return bench


def control(kind: str, ratio: str = "0.5", seed: int = 42) -> Control:
    return Control(kind, KVComm(ratio=ratio), seed)


def answers_to(bench: Bench, packets: list) -> tuple[list[float], list[tuple[int, ...]]]:
    """What the receiver makes of packets that were made by hand."""
    questions = [item.receiver for item in bench.items]
    scores = bench.receiver.score(questions, [list(item.gold) for item in bench.items], packets)
    answers = bench.receiver.answer(questions, packets, bench.max_new_tokens)
    return [score.nll for score in scores], [answer.ids for answer in answers]


def check(bench: Bench, kind: str, packets: list) -> None:
    outcomes = control(kind).run(bench, bench.items)
    found = [o.nll for o in outcomes], [o.token_ids for o in outcomes]
    assert found == answers_to(bench, packets)
    assert [o.message_bytes for o in outcomes] == [packet.nbytes for packet in packets]
    for outcome, item, packet in zip(outcomes, bench.items, packets, strict=True):
        assert outcome.layers == packet.layers
        sent, asked = outcome.prompts
        assert (tuple(sent), tuple(asked)) == (packet.ids, tuple(item.receiver))


def test_wrong_context_is_the_next_record_s_that_differs(bench: Bench) -> None:
    layers = KVComm(ratio="0.5").layers(bench)
    # Records 1 and 2 have one context, so 1 gets that of 3; after the last comes the first.
    packets = [
        bench.sender.read("\n".join(TEXTS[other][0]), layers, preset=bench.preset)
        for other in (1, 3, 3, 0)
    ]
    check(bench, "wrong_context", packets)


def test_wrong_context_passes_over_records_that_could_not_be_made(bench: Bench) -> None:
    broken = replace(bench, items=[bench.items[0], ValueError("empty"), *bench.items[2:]])
    (outcome,) = control("wrong_context").run(broken, broken.items[:1])
    assert outcome.prompts[0].tolist() == bench.items[2].sender.tolist()


def test_wrong_context_of_a_run_of_one_context_is_an_error(model: Model) -> None:
    for texts in (TEXTS[:1], TEXTS[1:3]):
        bench = bench_of(model, texts=texts)
        bench.scores = calibrate(
            bench.sender, bench.receiver, [(bench.items[0].sender, bench.items[0].receiver)]
        )
        with pytest.raises(ValueError, match="no other record of the run has another context"):
            control("wrong_context").run(bench, bench.items[:1])


def test_wrong_context_leaves_room_for_a_longer_question(bench: Bench) -> None:
    item, other = bench.items[0], bench.items[1]
    limit = len(other.sender) + len(item.receiver) - 6
    bench.prompts.limit = limit
    (outcome,) = control("wrong_context").run(bench, [item])
    sent, kept = outcome.prompts[0].tolist(), (limit - len(item.receiver)) // 2
    assert sent == [*other.sender[:kept], *other.sender[-kept:]]
    assert outcome.cut_tokens == len(other.sender) - 2 * kept


def test_wrong_context_is_not_cut_where_the_task_does_not(bench: Bench) -> None:
    item, other = bench.items[0], bench.items[1]
    bench.prompts.limit = len(other.sender) + len(item.receiver) - 6
    bench.prompts.task = replace(bench.prompts.task, truncates=False)
    (outcome,) = control("wrong_context").run(bench, [item])
    assert outcome.prompts[0].tolist() == other.sender.tolist()
    assert outcome.cut_tokens == 0


def test_wrong_contexts_of_a_run_have_the_bytes_of_the_right_ones(model: Model) -> None:
    bench = bench_of(model, texts=(TEXTS[0], *TEXTS[2:]))  # no two contexts alike
    item = bench.items[0]
    bench.scores = calibrate(bench.sender, bench.receiver, [(item.sender, item.receiver)])
    right, wrong = (
        sorted(outcome.message_bytes for outcome in method.run(bench, bench.items))
        for method in (KVComm(ratio="0.5"), control("wrong_context"))
    )
    assert wrong == right
    assert len(set(right)) == 3


def test_random_is_kvcomm_s_own_draw_in_preset_paper(
    tiny: Callable[..., Path], device: str
) -> None:
    bench = bench_of(Model.load(tiny("llama"), device=device))
    item = bench.items[0]
    bench.scores = calibrate(bench.sender, bench.receiver, [(item.sender, item.receiver)])
    own = KVComm("random", ratio="0.5").layers(bench)
    assert own != KVComm(ratio="0.5").layers(bench)
    assert control("random").layers(bench) == own


def test_shuffled_context_has_the_same_tokens_between_the_same_frame(bench: Bench) -> None:
    layers = KVComm(ratio="0.5").layers(bench)
    packets, moved = [], 0
    decode = bench.sender.tokenizer.decode
    for item in bench.items:
        ids = shuffled(bench, item, 42)
        assert sorted(ids.tolist()) == sorted(item.sender.tolist())
        right = item.sender.tolist()
        head = next(n for n in range(len(right)) if decode(right[:n]).endswith("Context:"))
        tail = right.index(TURN_END)
        assert ids[:head].tolist() == right[:head]
        assert ids[tail:].tolist() == right[tail:]
        moved += int((ids != item.sender).sum())
        packets.append(bench.sender.read(ids, layers, preset=bench.preset))
    assert moved > sum(len(item.sender) for item in bench.items) / 4
    check(bench, "shuffled", packets)


def test_shuffled_context_depends_on_the_item_and_the_seed_only(bench: Bench) -> None:
    item = bench.items[0]
    first = shuffled(bench, item, 42)
    assert first.tolist() == shuffled(bench, item, 42).tolist()
    assert first.tolist() != shuffled(bench, item, 43).tolist()
    assert first.tolist() != shuffled(bench, replace(item, number=1), 42).tolist()


@pytest.mark.parametrize(("dtype", "close"), [("f32", 1e-6), ("f16", 1e-3), ("bf16", 1e-2)])
def test_noise_has_the_norms_of_what_it_stands_for(
    tiny: Callable[..., Path], device: str, dtype: str, close: float
) -> None:
    model = Model.load(tiny("llama"), device=device, kv_dtype=dtype)
    right = Sender(model).read(piece_bench.example(0).context, (1, 3), preset="reference")
    drawn = noise(right, (42, 0))
    assert drawn.kv.dtype == dtype
    assert drawn.kv.lengths == right.kv.lengths
    assert (drawn.nbytes, drawn.layers, drawn.ids) == (right.nbytes, right.layers, right.ids)
    assert drawn.kv.next_position == right.kv.next_position

    def floats(array: np.ndarray) -> np.ndarray:
        return f32_from_bf16(array) if dtype == "bf16" else array.astype(np.float32)

    for layer in range(model.n_layers):  # in preset reference the others have their first token
        for mine, theirs in (
            (drawn.keys(layer), right.keys(layer)), (drawn.values(layer), right.values(layer))
        ):  # fmt: skip
            one, other = floats(mine), floats(theirs)
            norms = np.sqrt((one**2).sum(axis=-1)), np.sqrt((other**2).sum(axis=-1))
            np.testing.assert_allclose(*norms, rtol=close)
            cosines = (one * other).sum(axis=-1) / (norms[0] * norms[1])
            assert abs(cosines.mean()) < 0.3
    whole = drawn.keys(1)[0], drawn.values(1)[0], drawn.keys(3)[0]
    assert len({rows.tobytes() for rows in whole}) == 3


def test_noise_of_a_layer_does_not_depend_on_the_others_sent(bench: Bench) -> None:
    right = bench.sender.read(bench.items[0].sender)
    two, three = (noise(right.select(layers), (42, 0)) for layers in ((1, 3), (0, 1, 3)))
    np.testing.assert_array_equal(two.keys(1), three.keys(1))
    np.testing.assert_array_equal(two.values(3), three.values(3))


def test_noise_in_a_run(bench: Bench) -> None:
    layers = KVComm(ratio="0.5").layers(bench)
    packets = [
        noise(bench.sender.read(item.sender, layers, preset=bench.preset), (42, item.number))
        for item in bench.items
    ]
    check(bench, "noise", packets)


@pytest.mark.parametrize("ratio", ["0.3", "0.5", "0.7"])
@pytest.mark.parametrize("seed", range(5))
def test_random_layers_are_others_with_as_many_bytes(bench: Bench, ratio: str, seed: int) -> None:
    chosen = KVComm(ratio=ratio).layers(bench)
    method = control("random", ratio, seed)
    drawn = method.layers(bench)
    assert drawn != chosen
    assert drawn == method.layers(bench)
    items = bench.items[:1]
    (right,) = KVComm(ratio=ratio).run(bench, items)
    (other,) = method.run(bench, items)
    assert other.message_bytes == right.message_bytes
    layers = KVComm("layers", given=drawn)
    assert other.nll == layers.run(bench, items)[0].nll


def test_random_layers_are_not_all_the_same_draw(bench: Bench) -> None:
    assert len({control("random", seed=seed).layers(bench) for seed in range(20)}) > 1


def test_all_layers_have_no_others(bench: Bench) -> None:
    with pytest.raises(ValueError, match="no others make as many bytes"):
        control("random", "1").layers(bench)


@pytest.mark.parametrize("kind", KINDS)
def test_an_item_s_outcome_does_not_depend_on_the_batch(bench: Bench, kind: str) -> None:
    together = control(kind).run(bench, bench.items)
    for item, expected in zip(bench.items, together, strict=True):
        bench.forget()
        (alone,) = control(kind).run(bench, [item])
        assert (alone.nll, alone.token_ids) == (expected.nll, expected.token_ids)


def test_variants_and_their_labels() -> None:
    found = methods(("control", "kvcomm"), Options(ratios=("0.3", "0.5"), strategies=("random",)))
    assert [method.label for method in found] == [
        "wrong context 0.3", "wrong context 0.5", "shuffled context 0.3", "shuffled context 0.5",
        "noise 0.3", "noise 0.5", "random layers 0.3", "random layers 0.5",
        "random 0.3", "random 0.5",
    ]  # fmt: skip
    assert all(method.calibrated for method in found[:8])
    options = Options(controls=("noise",), alpha=0.8, skip_first=True, shift_back=True, seed=7)
    (one,) = methods(("control",), options)
    assert one.label == "noise 0.5 alpha 0.8 skip first shift back seed 7"
    assert one.settings == {
        "control": "noise", "seed": 7, "ratio": 0.5, "alpha": 0.8, "shift_back": True,
        "skip_first": True,
    }  # fmt: skip


def test_an_unknown_control_is_refused() -> None:
    with pytest.raises(ValueError, match="control: expected one of wrong_context, .* found 'none'"):
        methods(("control",), Options(controls=("none",)))


# ---- what they show ----------------------------------------------------------------------------


def test_findings_say_which_controls_are_not_at_the_baseline() -> None:
    def span(value: float | None, low: float | None, high: float | None) -> dict[str, float | None]:
        return {"value": value, "low": low, "high": high, "n": 20}

    summary = {
        "methods": [
            {"label": "baseline", "method": "baseline", "recovered": span(0, 0, 0)},
            {"label": "kvcomm 0.5", "method": "kvcomm", "recovered": span(0.5, 0.4, 0.6)},
            {"label": "noise 0.5", "method": "control", "recovered": span(-0.5, -0.9, -0.2)},
            {"label": "wrong context 0.5", "method": "control", "recovered": None},
            {"label": "shuffled 0.5", "method": "control", "recovered": span(0.2, 0.1, 0.3)},
            # What JSON makes of a share that is not a number.
            {"label": "random 0.5", "method": "control", "recovered": span(None, None, None)},
        ],
        "comparisons": [
            {"method": "kvcomm 0.5", "control": "random 0.5", "nll_less": span(1, 0.5, 2)},
            {"method": "noise 0.5", "control": "baseline", "nll_less": span(-4, -6, -2)},
            {"method": "wrong context 0.5", "control": "baseline", "nll_less": span(0.1, -1, 1)},
            {"method": "shuffled 0.5", "control": "baseline", "nll_less": span(2, 1.5, 3)},
            {"method": "random 0.5", "control": "baseline", "nll_less": span(0, -1, 1)},
        ],
    }  # fmt: skip
    assert findings(summary) == [
        "noise 0.5 does not score like the baseline but worse: 4.00 nats more per record "
        "[2.00, 6.00], n 20; recovered -50% [-90%, -20%]",
        "wrong context 0.5 scores like the baseline: 0.10 nats less per record [-1.00, 1.00], n 20",
        "shuffled 0.5 does not score like the baseline but better: 2.00 nats less per record "
        "[1.50, 3.00], n 20; recovered 20% [10%, 30%]",
        "random 0.5 scores like the baseline: 0.00 nats less per record [-1.00, 1.00], n 20",
    ]


def test_a_run_compares_every_control_with_the_baseline(
    tiny: Callable[..., Path], device: str, tmp_path: Path
) -> None:
    model = Model.load(tiny("llama"), device=device)
    examples = [piece_bench.example(number) for number in range(len(TEXTS))]
    chosen = methods(("baseline", "skyline", "kvcomm", "control"), Options())
    summary = evaluate(
        Sender(model), Receiver(model), piece_bench.TASK, divide(examples), chosen, tmp_path / "run"
    )
    assert [method["failed"] for method in summary["methods"]] == [0] * 7
    nll: dict[str, list[float]] = {}
    for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines():
        record = json.loads(line)
        nll.setdefault(record["settings"].get("control", record["method"]), []).append(
            record["nll"]
        )
    found = {
        (one["method"], one["control"]): one["nll_less"]["value"] for one in summary["comparisons"]
    }
    for kind, name in KINDS.items():
        label = f"{name} 0.5"
        against = {"baseline": (label, "baseline"), "kvcomm": ("kvcomm 0.5", label)}
        sign = {"baseline": -1, "kvcomm": 1}
        for other, pair in against.items():
            less = sign[other] * np.subtract(nll[kind], nll[other]).mean()
            assert found[pair] == pytest.approx(less, abs=1e-9)
    lines = findings(summary)
    assert [line.split(" 0.5")[0] for line in lines] == list(KINDS.values())
    assert all("n 3" in line and "recovered" in line for line in lines)
