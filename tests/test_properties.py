"""What must hold of the whole: sharing is right, nothing peeks, batches change nothing.

Each property runs on a tiny random model of every family, most on a real model as well.
"""

import contextlib
import json
import os
import threading
from pathlib import Path

import numpy as np
import oracle
import pytest

import kvcomm
from kvcomm import _core
from kvcomm.agents import Call
from kvcomm.packet import Packet

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "llama3", "yarn", "linear", "falcon3")
EVERY = (*FAMILIES, "real")
WINDOWED = {"mistral", "gemma3"}


@pytest.fixture(scope="module")
def model_of(tiny, device, request):
    """model_of(family, dtype) -> model; "real" is SmolLM2-135M in f32, and as it is stored."""
    models = {}

    def get(family, dtype="auto"):
        if (family, dtype) not in models:
            if family == "real":
                found = request.getfixturevalue("real_model")
            elif family == "real, as stored":
                found = kvcomm.Model.load("smollm2-135m", device=device)
            else:
                found = kvcomm.Model.load(tiny(family), device=device, dtype=dtype)
            models[family, dtype] = found
        return models[family, dtype]

    return get


def ids_of(model, n, seed=0):
    return np.random.default_rng(seed).integers(3, min(model.vocab_size, 40000), n).tolist()


def close(found, expected):
    """Equal up to rounding of f32: the logits of these models are a few units large."""
    np.testing.assert_allclose(found, expected, atol=2e-4, rtol=2e-4)


# ---- sharing ----


@pytest.mark.parametrize(
    ("family", "n_context"),
    [(family, n) for family in FAMILIES for n in (1, 7, 8, 9, 30)] + [("real", 30)],
)
def test_all_layers_are_one_prompt(model_of, family, n_context):
    """All layers of the same model, laid out as one prompt: the prompt read in one go."""
    model = model_of(family)
    sender, receiver = kvcomm.Sender(model), kvcomm.Receiver(model)
    ids = ids_of(model, n_context + 9)
    packet = sender.read(ids[:n_context])
    whole = receiver.logits(ids, all=True)
    close(receiver.logits(ids[n_context:], packet, all=True), whole[n_context:])
    assert receiver.answer(ids[n_context:], packet, 5).ids == receiver.answer(ids, None, 5).ids


@pytest.mark.parametrize("family", EVERY)
def test_several_senders_in_sequence_hold_every_key(model_of, family):
    """Sequential positions: a sender's keys are those of its ids read at the later position."""
    model = model_of(family)
    first, second, question = ids_of(model, 12), ids_of(model, 5, 1), ids_of(model, 6, 2)
    sender, receiver = kvcomm.Sender(model), kvcomm.Receiver(model)
    session = _core.Session(model.core)
    session.set_position(len(first))
    _core.Workspace(model.core).forward([session], [second])
    moved = session.freeze()
    direct = _core.Session(model.core)
    direct.give(_core.KV.concat([sender.read(first, trim=False).kv, moved]))
    direct.set_position(len(first) + len(second))
    expected, _ = _core.Workspace(model.core).forward(
        [direct], [question], output="logits", outputs="all"
    )
    packets = (sender.read(first), sender.read(second))
    close(receiver.logits(question, packets, all=True, positions="sequential"), expected)


@pytest.mark.parametrize("family", EVERY)
def test_no_layers_are_the_baseline(model_of, family):
    """Rope is relative: positions that all moved by C change nothing but rounding."""
    model = model_of(family)
    sender, receiver = kvcomm.Sender(model), kvcomm.Receiver(model)
    packet = sender.read(ids_of(model, 21), [])
    question = ids_of(model, 12, 1)
    assert packet.nbytes == 0
    baseline = receiver.logits(question, all=True)
    close(receiver.logits(question, packet, all=True), baseline)
    back = receiver.logits(question, packet, all=True, shift_back=True)
    assert back.tolist() == baseline.tolist()  # here the positions are the same: bit for bit
    answer = receiver.answer(question, packet, 5, shift_back=True)
    assert answer.ids == receiver.answer(question, None, 5).ids


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("sizes", [(1,) * 13, (2,) * 6 + (1,), (7, 6), (4, 1, 8)])
def test_chunked_is_whole(model_of, family, sizes):
    """KV-083, NU-123: one call, several calls and single tokens behind given keys."""
    model = model_of(family)
    ids, context = ids_of(model, sum(sizes)), ids_of(model, 10, 1)
    kv = kvcomm.Sender(model).read(context).kv
    workspace = _core.Workspace(model.core)

    def run(lengths):
        session, at, rows = _core.Session(model.core), 0, []
        session.give(kv)
        for n in lengths:
            out, _ = workspace.forward(
                [session], [ids[at : at + n]], output="logits", outputs="all"
            )
            rows.append(out)
            at += n
        return np.concatenate(rows)

    close(run(sizes), run([len(ids)]))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_the_argmax_of_one_forward_pass(tiny, model_of, family):
    """NU-123: each decoded token against the oracle's whole pass over the final text."""
    model = model_of(family)
    reference = oracle.read_folder(tiny(family))
    for seed in range(4):
        prompt = ids_of(model, 5 + seed, seed)
        ids = list(kvcomm.Receiver(model).answer(prompt, None, 12).ids)
        logits = reference.run(prompt + ids).logits[len(prompt) - 1 : -1]
        best = logits.max(axis=1)
        assert (best - logits[np.arange(len(ids)), ids] < 1e-4).all()


@pytest.mark.parametrize("family", EVERY)
def test_saved_packets_answer_as_fresh_ones(model_of, tmp_path, family):
    """KV-103: fresh, in memory and from the file are the same bits."""
    model = model_of(family)
    sender, receiver = kvcomm.Sender(model), kvcomm.Receiver(model)
    context, question = ids_of(model, 15), ids_of(model, 6, 1)
    for preset in ("paper", "reference"):
        packet = sender.read(context, [1, 3], preset=preset)
        packet.save(tmp_path / preset)
        expected = receiver.logits(question, packet)
        for other in (
            Packet.load(tmp_path / preset, device=model.device),
            sender.read(context, preset=preset).select([1, 3]),
        ):
            assert receiver.logits(question, other).tolist() == expected.tolist()


@pytest.mark.parametrize(("kv_dtype", "bound"), [("f16", 5e-3), ("bf16", 4e-2)])
def test_packets_of_16_bits_are_close(tiny, device, kv_dtype, bound):
    """KV-103: half of 11 (8) bits of each key and value, a few layers deep."""
    models = [
        kvcomm.Model.load(tiny("llama"), device=device, kv_dtype=d) for d in ("f32", kv_dtype)
    ]
    context, question = ids_of(models[0], 40), ids_of(models[0], 6, 1)
    exact, rounded = (kvcomm.Sender(m).read(context) for m in models)
    assert rounded.nbytes * 2 == exact.nbytes
    receiver = kvcomm.Receiver(models[0])
    difference = receiver.logits(question, exact) - receiver.logits(question, rounded)
    assert 0 < np.abs(difference).max() < bound


# ---- nothing changes what it should not ----


@pytest.mark.parametrize("family", ["llama", "gemma3", "real"])
def test_packets_are_not_changed_by_use(model_of, family):
    """KV-100: three uses, then two threads at once."""
    model = model_of(family)
    sender, receiver = kvcomm.Sender(model), kvcomm.Receiver(model)
    packet = sender.read(ids_of(model, 6))
    lengths = packet.kv.lengths
    before = [np.array(packet.keys(layer)) for layer in range(model.n_layers)]
    question = ids_of(model, 5, 1)
    answers = [receiver.answer(question, packet, 4).ids for _ in range(3)]
    threads = [
        threading.Thread(target=lambda: answers.append(receiver.answer(question, packet, 4).ids))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 5 and len(set(answers)) == 1
    assert packet.kv.lengths == lengths == [6] * model.n_layers
    for layer, keys in enumerate(before):
        np.testing.assert_array_equal(packet.keys(layer), keys)


@pytest.mark.parametrize("family", ["llama", "gemma3", "real"])
def test_questions_do_not_meet_each_other(model_of, family):
    """KV-101: many questions on one context, in any order, and as fresh runs."""
    model = model_of(family)
    sender, receiver = kvcomm.Sender(model), kvcomm.Receiver(model)
    context = ids_of(model, 20)
    packet = sender.read(context)
    questions = [ids_of(model, n, n) for n in (3, 8, 5)]
    fresh = [receiver.answer(q, sender.read(context), 4).ids for q in questions]
    assert [receiver.answer(q, packet, 4).ids for q in questions] == fresh
    assert [receiver.answer(q, packet, 4).ids for q in questions[::-1]] == fresh[::-1]
    assert [a.ids for a in receiver.answer(questions, packet, 4)] == fresh


def test_a_failed_call_leaves_everything_usable(model_of):
    model = model_of("llama")
    sender, receiver = kvcomm.Sender(model), kvcomm.Receiver(model)
    packet = sender.read([1, 2, 3])
    expected = receiver.answer([4, 5], packet, 4).ids

    def stop(_):
        raise RuntimeError("enough")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="enough"):
            receiver.answer([4, 5], packet, 4, stream=stop)
        with pytest.raises(ValueError, match="outside"):
            receiver.answer([[4, 5], [999999]], packet, 4)
        assert receiver.answer([4, 5], packet, 4).ids == expected
    assert packet.kv.lengths == [3] * 4


def test_memory_is_flat_in_long_loops(model_of):
    """KV-099: exchanges of changing sizes, and some that fail at the second token."""
    model = model_of("llama")
    sender, receiver = kvcomm.Sender(model), kvcomm.Receiver(model)

    def resident():
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def stop(_):
        raise RuntimeError("enough")

    sizes = np.random.default_rng(3).integers(50, 400, 300)
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc to read the memory in use")
    for turn, n in enumerate(sizes):
        if turn == 100:
            start = resident()
        packet = sender.read(ids_of(model, int(n)), [1, 3])
        receiver.answer([4, 5, 6], packet, 5)
        with contextlib.suppress(RuntimeError):
            receiver.answer([4, 5, 6], packet, 5, stream=stop)
    assert resident() - start < 20e6


# ---- batches and threads ----


@pytest.fixture
def threads():
    """Sets the number of threads and puts it back."""
    yield _core.set_num_threads
    _core.set_num_threads(0)


#: Every type of weights there is: SmolLM2's file holds Q4_1 and Q8_0; test_blocks.py has Q4_0.
TYPED = [(family, "auto") for family in (*EVERY, "real, as stored")]
TYPED += [(family, dtype) for family in ("llama", "gemma3") for dtype in ("f16", "bf16", "q8_0")]


@pytest.mark.parametrize(("family", "dtype"), TYPED)
def test_a_row_alone_and_in_any_batch_is_the_same_bits(model_of, family, dtype, threads):
    """At 1, 2, 3 and 7 threads; prompts, packets and presets of all kinds mixed."""
    model = model_of(family, dtype)
    sender, receiver = kvcomm.Sender(model), kvcomm.Receiver(model)
    n_layers, rng = model.n_layers, np.random.default_rng(5)
    n_rows, n_batches = (4, 1) if family.startswith("real") else (8, 3)
    for preset in ("paper", "reference"):
        questions, packets = [], []
        for row in range(n_rows):
            questions.append(ids_of(model, int(rng.integers(1, 24)), row))
            layers = rng.permutation(n_layers)[: rng.integers(0, n_layers + 1)]
            context = ids_of(model, int(rng.integers(1, 40)), 100 + row)
            packets.append(sender.read(context, layers, preset=preset) if row % 4 else None)
        threads(1)
        alone = [receiver.logits(q, p) for q, p in zip(questions, packets, strict=True)]
        answers = [receiver.answer(q, p, 3) for q, p in zip(questions, packets, strict=True)]
        for n_threads in (1, 2, 3, 7):
            threads(n_threads)
            for _ in range(n_batches):
                order = rng.permutation(n_rows)[: rng.integers(2, n_rows + 1)]
                batch = [questions[n] for n in order], [packets[n] for n in order]
                for n, logits in zip(order, receiver.logits(*batch), strict=True):
                    assert logits.tobytes() == alone[n].tobytes()
                for n, answer in zip(order, receiver.answer(*batch, 3), strict=True):
                    assert answer.ids == answers[n].ids


@pytest.mark.parametrize("family", EVERY)
def test_contexts_read_in_a_batch_are_the_same_bits(model_of, family, threads):
    model = model_of(family)
    sender, last = kvcomm.Sender(model), model.n_layers - 1
    contexts = [ids_of(model, n, n) for n in (1, 9, 33, 17)]
    threads(1)
    alone = [sender.read(c, preset="reference") for c in contexts]
    for n_threads in (1, 3):
        threads(n_threads)
        for layers in (None, [1]):
            for packet, one in zip(
                sender.read(contexts, layers, preset="reference"), alone, strict=True
            ):
                expected = one if layers is None else one.select(layers)
                for layer in (0, 1, last):
                    assert packet.keys(layer).tobytes() == expected.keys(layer).tobytes()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_masses_and_scores_do_not_depend_on_the_batch(model_of, family, threads):
    model = model_of(family)
    sender, receiver = kvcomm.Sender(model), kvcomm.Receiver(model)
    questions = [ids_of(model, n, n) for n in (2, 9, 5)]
    for preset in ("paper", "reference"):
        packets = sender.read([ids_of(model, n, n) for n in (12, 3, 20)], preset=preset)
        threads(1)
        mass = [receiver.mass(q, p) for q, p in zip(questions, packets, strict=True)]
        score = [receiver.score(q, [5, 6, 7], p) for q, p in zip(questions, packets, strict=True)]
        for n_threads in (1, 7):
            threads(n_threads)
            together = receiver.mass(questions, packets)
            assert [m.tobytes() for m in together] == [m.tobytes() for m in mass]
            scores = receiver.score(questions, [[5, 6, 7]] * 3, packets)
            assert [s.token_nll.tobytes() for s in scores] == [s.token_nll.tobytes() for s in score]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize(("n_context", "n_question"), [(1500, 3), (1500, 40), (300, 1200)])
def test_a_long_context_is_summed_in_chunks(tiny, device, threads, family, n_context, n_question):
    """1024 keys, given and own, are one running softmax; for few queries each is a task."""
    folder = tiny(family)
    model, reference = kvcomm.Model.load(folder, device=device), oracle.read_folder(folder)
    sender, receiver = kvcomm.Sender(model), kvcomm.Receiver(model)
    context, other = ids_of(model, n_context, 1), ids_of(model, 1100, 2)
    question = ids_of(model, n_question, 3)
    layers = list(range(1, model.n_layers))
    packet, short = sender.read([context, other], layers)
    given = oracle.send(reference, [oracle.read(reference, context)], layers)
    run = oracle.exchange(reference, question, given, start=len(context), layers=layers)
    threads(1)
    logits, mass = receiver.logits(question, packet), receiver.mass(question, packet)
    close(logits, run.logits[-1])
    expected = oracle.layer_masses(reference, question, given, preset="paper", start=len(context))
    close(mass.mean(axis=1)[layers], np.asarray(expected)[layers])
    answer = receiver.answer(question, packet, 4)
    rules = {"start": n_context, "layers": layers}
    assert list(answer.ids) == oracle.generate(reference, question, given, 4, **rules)
    for n_threads in (1, 2, 3, 7):
        threads(n_threads)
        assert receiver.logits(question, packet).tobytes() == logits.tobytes()
        assert receiver.mass(question, packet).tobytes() == mass.tobytes()
        together = receiver.logits([question[:2], question], [short, packet])
        assert together[1].tobytes() == logits.tobytes()


# ---- what a token sees ----


def hidden_states(receiver, question, packet, **options):
    """Hidden states leaving each layer, float32 [n_layers, Q, dim]; one layer at a time."""
    call = Call(receiver, question, packet, options)
    entering, states = call.turns[0].ids, []
    for layer in range(receiver.model.n_layers):
        entering, _ = call.workspace.forward(
            call.sessions,
            [entering],
            output="hidden",
            outputs="all",
            layers=(layer, layer + 1),
            slack=call.slack,
        )
        states.append(entering)
    return np.stack(states)


def first_changed(receiver, question, packet, **options):
    """Per layer the lowest place that changes when only the last question token is another."""
    other = [*question[:-1], question[-1] + 1]
    a, b = (hidden_states(receiver, q, packet, **options) for q in (question, other))
    return [int(np.flatnonzero((x != y).any(axis=1))[0]) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", [(), (0,), (1, 3), None])
@pytest.mark.parametrize("shift_back", [False, True])
def test_nothing_peeks_in_paper(model_of, family, layers, shift_back):
    model = model_of(family)
    receiver = kvcomm.Receiver(model)
    packet = kvcomm.Sender(model).read(ids_of(model, 14), layers)
    question = ids_of(model, 12, 1)
    places = first_changed(receiver, question, packet, shift_back=shift_back)
    assert places == [11] * model.n_layers


def published_leak(n_context, n_query, layers, n_layers):
    """What reference.md section 3 says: C - 1 tokens ahead in layers that are not sent whole."""
    places, place = [], n_query - 1
    for layer in range(n_layers):
        if layer != 0 and layer not in layers:
            place = max(0, place - (n_context - 1))
        places.append(place)
    return places


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - WINDOWED))
@pytest.mark.parametrize("n_context", [1, 2, 3, 6, 11, 12, 24])
def test_the_published_leak(model_of, family, n_context):
    model = model_of(family)
    receiver, sender = kvcomm.Receiver(model), kvcomm.Sender(model)
    question = ids_of(model, 12, 1)
    for layers in ((), (2,), (1, 3)):
        packet = sender.read(ids_of(model, n_context), layers, preset="reference")
        expected = published_leak(n_context, 12, layers, model.n_layers)
        assert first_changed(receiver, question, packet) == expected
        back = first_changed(receiver, question, packet, shift_back=True)
        assert back == [11] * model.n_layers
    every = sender.read(ids_of(model, n_context), preset="reference")
    assert first_changed(receiver, question, every) == [11] * model.n_layers


@pytest.mark.parametrize("n_context", [24, 11, 6, 3, 2, 1])
def test_the_published_leak_on_a_real_model(model_of, n_context):
    """The recorded probe's case: C tokens, Q = 12, layers 4, 5, 9 and 12."""
    model = model_of("real")
    packet = kvcomm.Sender(model).read(ids_of(model, n_context), [4, 5, 9, 12], preset="reference")
    receiver, question = kvcomm.Receiver(model), ids_of(model, 12, 1)
    expected = published_leak(n_context, 12, {4, 5, 9, 12}, 30)
    assert first_changed(receiver, question, packet) == expected


def test_the_leak_is_the_recorded_one(shared):
    """The rule above gives the probe of the published code, run by run."""
    for part, n_layers in (("smollm2", 30), ("qwen05", 24)):
        data = json.loads((shared / "reference" / f"oracle_{part}.json").read_text())
        for run in data["mask_probe"]["runs"]:
            expected = published_leak(run["C"], run["Q"], {4, 5, 9, 12}, n_layers)
            if run["shift"]:
                expected = [run["Q"] - 1] * n_layers
            assert run["earliest_changed"] == expected


def test_nothing_peeks_on_a_real_model(model_of):
    model = model_of("real")
    packet = kvcomm.Sender(model).read(ids_of(model, 24), [4, 5, 9, 12])
    places = first_changed(kvcomm.Receiver(model), ids_of(model, 12, 1), packet)
    assert places == [11] * 30
