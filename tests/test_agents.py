"""Sender and receiver: every variant of the method against the oracle, and what is refused."""

import threading

import fixtures
import numpy as np
import oracle
import pytest

import kvcomm
from kvcomm.cost import Work
from kvcomm.errors import MismatchError
from kvcomm.packet import Packet

CONTEXT = [5, 9, 31, 77, 200, 14, 3, 60, 61, 62, 7]
SECOND = [8, 8, 120, 44]
QUESTION = [10, 20, 30, 40, 50, 60]
ANSWER = [7, 8, 9]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "llama3", "yarn", "linear", "falcon3")


@pytest.fixture(scope="module")
def llama(load):
    _, model = load("llama")
    return kvcomm.Sender(model), kvcomm.Receiver(model)


def expected_of(reference, contexts, layers, *, preset, sequential=False, **rules):
    """What the oracle's exchange is given, and its rules."""
    runs = [oracle.read(reference, context) for context in contexts]
    given = oracle.send(reference, runs, layers, preset=preset, sequential=sequential)
    start = sum(map(len, contexts))
    return given, {"start": start, "layers": layers, "preset": preset} | rules


def check_exchange(folder, model, contexts, layers, *, positions="published", **rules):
    """Logits of all question tokens, greedy ids and likelihoods against the oracle's."""
    reference = oracle.read_folder(folder)
    sequential = positions == "sequential"
    given, rules = expected_of(reference, contexts, layers, sequential=sequential, **rules)
    preset = rules["preset"]
    packets = tuple(kvcomm.Sender(model).read(c, layers, preset=preset) for c in contexts)
    receiver = kvcomm.Receiver(model)
    options = {"shift_back": rules.get("shift_back", False), "positions": positions}
    run = oracle.exchange(reference, QUESTION, given, n_query=len(QUESTION), **rules)
    logits = receiver.logits(QUESTION, packets, all=True, **options)
    np.testing.assert_allclose(logits, run.logits, atol=1e-4, rtol=1e-4)
    nll = oracle.answer_nll(reference, QUESTION, ANSWER, given, **rules)
    found = receiver.score(QUESTION, ANSWER, packets, **options)
    np.testing.assert_allclose(found.token_nll, nll, atol=1e-4)
    ids = oracle.generate(reference, QUESTION, given, 4, **rules)
    assert list(receiver.answer(QUESTION, packets, 4, **options).ids) == ids


# ---- the method ----


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("preset", ["paper", "reference"])
@pytest.mark.parametrize("shift_back", [False, True])
@pytest.mark.parametrize("layers", [(), (1,), (0, 3), (1, 2, 3)])
def test_exchange(load, family, preset, shift_back, layers):
    folder, model = load(family)
    check_exchange(folder, model, [CONTEXT], layers, preset=preset, shift_back=shift_back)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 6, 7])
@pytest.mark.parametrize("preset", ["paper", "reference"])
def test_short_contexts(load, length, preset):
    """KV-086, and in reference a look-ahead shorter than the question."""
    folder, model = load("llama")
    check_exchange(folder, model, [CONTEXT[:length]], (2,), preset=preset)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "llama3", "yarn"])
@pytest.mark.parametrize("preset", ["paper", "reference"])
@pytest.mark.parametrize("positions", ["published", "sequential"])
def test_two_senders(load, family, preset, positions):
    folder, model = load(family)
    contexts = [CONTEXT, SECOND]
    for layers in ((1, 3), (0, 1, 2, 3)):
        check_exchange(folder, model, contexts, layers, preset=preset, positions=positions)


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@pytest.mark.parametrize("second", [SECOND, CONTEXT])
def test_two_senders_with_windows_in_sequence(load, family, second):
    folder, model = load(family)
    layers = (1, 2, 3)
    check_exchange(folder, model, [CONTEXT, second], layers, preset="paper", positions="sequential")


def test_three_senders_with_shift_back(load):
    folder, model = load("llama")
    contexts = [SECOND, CONTEXT, SECOND]
    check_exchange(folder, model, contexts, (1, 2), preset="paper", shift_back=True)


@pytest.mark.parametrize("preset", ["paper", "reference"])
def test_fine_tuned_receiver(load, preset):
    """Two models of one shape."""
    sender_folder, sender = load("llama")
    receiver_folder, receiver = load("llama", seed=1)
    given, rules = expected_of(oracle.read_folder(sender_folder), [CONTEXT], (1, 3), preset=preset)
    run = oracle.exchange(
        oracle.read_folder(receiver_folder), QUESTION, given, n_query=len(QUESTION), **rules
    )
    packet = kvcomm.Sender(sender).read(CONTEXT, (1, 3), preset=preset)
    logits = kvcomm.Receiver(receiver).logits(QUESTION, packet, all=True)
    np.testing.assert_allclose(logits, run.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("preset", ["paper", "reference"])
def test_deeper_receiver(load, preset):
    """In reference, receiver layers that nothing maps to look ahead by C0, one more than others."""
    sender_folder, sender = load("llama")
    receiver_folder, receiver = load("llama", num_hidden_layers=6, seed=3)
    layer_map = kvcomm.published_layer_map(4, 6)
    assert layer_map == (0, 2, 3, 5)
    chosen = (1, 3)
    source, target = oracle.read_folder(sender_folder), oracle.read_folder(receiver_folder)
    context, question = CONTEXT[:3], list(range(20, 30))
    given = oracle.send(
        source,
        [oracle.read(source, context)],
        chosen,
        preset=preset,
        layer_map=layer_map,
        n_receiver_layers=6,
    )
    run = oracle.exchange(
        target,
        question,
        given,
        start=3,
        layers=[layer_map[n] for n in chosen],
        preset=preset,
        n_query=10,
    )
    packet = kvcomm.Sender(sender).read(context, chosen, preset=preset)
    logits = kvcomm.Receiver(receiver).logits(question, packet, all=True, layer_map=layer_map)
    np.testing.assert_allclose(logits, run.logits, atol=1e-4, rtol=1e-4)


def test_published_layer_maps():
    """reference.md section 7: halves go to the even layer."""
    assert kvcomm.published_layer_map(4, 6) == (0, 2, 3, 5)
    wide = kvcomm.published_layer_map(28, 32)
    assert sorted(set(range(32)) - set(wide)) == [3, 11, 19, 27]
    assert kvcomm.published_layer_map(5, 5) == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("preset", ["paper", "reference"])
def test_one_token_question(load, preset):
    """Taken for a decode step in reference: it sees everything, as a prefill of one token does."""
    folder, model = load("llama")
    reference = oracle.read_folder(folder)
    given, rules = expected_of(reference, [CONTEXT], (2,), preset=preset)
    run = oracle.exchange(reference, [40], given, n_query=1, **rules)
    packet = kvcomm.Sender(model).read(CONTEXT, (2,), preset=preset)
    logits = kvcomm.Receiver(model).logits([40], packet)
    np.testing.assert_allclose(logits, run.logits[-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("preset", ["paper", "reference"])
def test_reading_less_gives_the_same_keys(load, preset):
    """Early exit: what is sent is bit for bit what reading all layers and selecting gives."""
    for family in ("llama", "gemma3"):
        _, model = load(family)
        sender = kvcomm.Sender(model)
        all_layers = sender.read(CONTEXT, preset=preset)
        for layers in ((), (0,), (2,), (0, 2), (1, 3)):
            packet, selected = (
                sender.read(CONTEXT, layers, preset=preset),
                all_layers.select(layers),
            )
            assert packet.kv.lengths == selected.kv.lengths
            assert packet.layers == selected.layers == layers
            for layer in range(model.n_layers):
                np.testing.assert_array_equal(packet.keys(layer), selected.keys(layer))
                np.testing.assert_array_equal(packet.values(layer), selected.values(layer))


def test_layers_of_several_lengths(load):
    """KV-080: each layer has its own length; layer 0 has no special role in paper."""
    _, model = load("llama")
    packet = kvcomm.Sender(model).read(CONTEXT, (1, 3))
    assert packet.kv.lengths == [0, 11, 0, 11]
    assert kvcomm.Sender(model).read(CONTEXT, (0,)).kv.lengths == [11, 0, 0, 0]


# ---- arguments ----


def test_texts_go_into_the_template(llama):
    sender, receiver = llama
    tokenizer = sender.model.tokenizer
    instruction = (
        "Directly answer the question based on the context passage, no explanation is needed."
    )
    text = f"Instruction: {instruction} Context: The cat is in the tree."
    packet = sender.read("The cat is in the tree.")
    assert list(packet.ids) == tokenizer.chat([{"role": "user", "content": text}])
    question = f"Instruction: {instruction} Question: Where is the cat?"
    ids = tokenizer.chat([{"role": "user", "content": question}])
    assert (
        receiver.answer("Where is the cat?", packet, 5).ids == receiver.answer(ids, packet, 5).ids
    )
    assert receiver.answer("Where is the cat?", packet, 5).stats.receiver_tokens == len(ids)


def test_other_messages(llama):
    sender, receiver = llama
    tokenizer = sender.model.tokenizer
    packet = sender.read("two and two", message=lambda text: f"Hint: {text}")
    hint = [{"role": "user", "content": "Hint: two and two"}]
    assert list(packet.ids) == tokenizer.chat(hint)
    ids = tokenizer.chat([{"role": "user", "content": "So?"}])
    logits = receiver.logits("So?", packet, message=lambda text: text)
    assert logits.tolist() == receiver.logits(ids, packet).tolist()


def test_the_receivers_tokenizer_for_both(llama):
    sender, _ = llama

    class Other:
        def chat(self, messages, *, add_generation_prompt):
            assert messages[0]["role"] == "user" and add_generation_prompt
            return [1, 2, 3]

    assert kvcomm.Sender(sender.model, tokenizer=Other()).read("text").ids == (1, 2, 3)


def test_lists_give_lists(llama):
    sender, receiver = llama
    packets = sender.read([CONTEXT, SECOND], (1,))
    assert [p.ids for p in packets] == [tuple(CONTEXT), tuple(SECOND)]
    questions = [QUESTION, QUESTION[:2]]
    answers = receiver.answer(questions, packets, 3)
    assert [a.ids for a in answers] == [
        receiver.answer(q, p, 3).ids for q, p in zip(questions, packets, strict=True)
    ]
    shared = receiver.answer(questions, packets[0], 3)
    assert [a.ids for a in shared] == [receiver.answer(q, packets[0], 3).ids for q in questions]
    both = receiver.answer(questions, tuple(packets), 3)
    assert [a.ids for a in both] == [receiver.answer(q, tuple(packets), 3).ids for q in questions]
    assert receiver.answer(QUESTION, packets, 3).ids == both[0].ids  # one question: two senders
    mixed = receiver.answer(questions, [None, tuple(packets)], 3)
    assert [a.ids for a in mixed] == [receiver.answer(QUESTION, None, 3).ids, both[1].ids]
    for method in (receiver.logits, receiver.mass):
        assert len(method(questions, packets)) == 2


def test_empty_batches(llama):
    sender, receiver = llama
    assert sender.read([]) == []
    assert receiver.answer([]) == receiver.logits([]) == receiver.score([], []) == []
    assert receiver.mass([], None) == []


@pytest.mark.parametrize("empty", ["", (), np.array([], np.int32), np.array([])])
def test_empty_prompts(llama, empty):
    """PY-141."""
    sender, receiver = llama
    packet = sender.read(CONTEXT)
    with pytest.raises(ValueError, match="context is empty"):
        sender.read(empty)
    for given in (None, packet):
        with pytest.raises(ValueError, match="question is empty"):
            receiver.answer(empty, given)
    with pytest.raises(ValueError, match="question is empty"):
        receiver.answer([[5], []], packet)


@pytest.mark.parametrize(
    "dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i4", ">i8", ">u2"]
)
def test_ids_of_every_integer_type(llama, dtype):
    """PY-137, PY-139."""
    sender, receiver = llama
    ids = np.array([5, 6, 7, 8, 9, 10], dtype)
    plain = receiver.logits([5, 6, 7, 8, 9, 10]).tolist()
    assert receiver.logits(ids).tolist() == plain
    assert receiver.logits(np.repeat(ids, 2)[::2]).tolist() == plain
    assert receiver.logits(ids[::-1][::-1]).tolist() == plain
    assert receiver.logits(tuple(ids)).tolist() == plain
    ids.flags.writeable = False
    assert sender.read(ids).ids == (5, 6, 7, 8, 9, 10)


@pytest.mark.parametrize(
    ("ids", "kind", "message"),
    [
        (np.array([5.0, 6.0]), TypeError, "found float64 values"),
        (np.array([True, False]), TypeError, "found bool values"),
        ([True, False], TypeError, "found bool values"),
        (np.array([5, 6], object), TypeError, "found object values"),
        ([1.5, 2.0], TypeError, "found float64 values"),
        (None, TypeError, "found object values"),
        ({"a": 1}, TypeError, "found object values"),
        (7, ValueError, "one sequence of ids"),
        (np.array([[1, 2], [3, 4]]), ValueError, r"shape \(2, 2\)"),
        ([2**32 + 5], ValueError, "id 4294967301 at place 0"),
        ([-1], ValueError, r"id -1 at place 0 is outside 0 \.\. 319"),
        ([0, 319, 320], ValueError, "id 320 at place 2"),
        ([5, -100], ValueError, "id -100 at place 1"),
        (np.array([2**31 - 1]), ValueError, "id 2147483647 at place 0"),
    ],
)
def test_ids_that_are_none(llama, ids, kind, message):
    """PY-139, PY-140; the objects are usable afterwards."""
    sender, receiver = llama
    with pytest.raises(kind, match=message):
        sender.read(ids)
    with pytest.raises(kind, match=message):
        receiver.answer(ids)
    with pytest.raises(kind, match=message):
        receiver.answer([QUESTION, ids])
    assert receiver.answer(QUESTION, sender.read(CONTEXT), 2).ids


def test_packets_that_are_none(llama):
    sender, receiver = llama
    packet = sender.read(CONTEXT)
    with pytest.raises(TypeError, match="packet: expected a Packet, found str"):
        receiver.answer(QUESTION, "packet")
    with pytest.raises(TypeError, match="packet: expected a Packet, found KV"):
        receiver.answer(QUESTION, packet.kv)
    with pytest.raises(TypeError, match="packet: expected a Packet, found NoneType"):
        receiver.answer(QUESTION, (packet, None))
    with pytest.raises(ValueError, match="packet: 1 packets for 2 questions"):
        receiver.answer([QUESTION, QUESTION], [packet])
    with pytest.raises(TypeError, match="unknown option 'shift'"):
        receiver.answer(QUESTION, packet, shift=True)


def test_presets_do_not_mix(llama):
    sender, receiver = llama
    paper, reference = (sender.read(CONTEXT, (1,), preset=p) for p in ("paper", "reference"))
    with pytest.raises(MismatchError, match="one call follows one preset"):
        receiver.answer(QUESTION, paper, preset="reference")
    with pytest.raises(MismatchError, match="one call follows one preset"):
        receiver.answer([QUESTION, QUESTION], [paper, reference])
    with pytest.raises(ValueError, match="preset: expected one of paper, reference, found 'x'"):
        receiver.answer(QUESTION, preset="x")
    with pytest.raises(ValueError, match="preset: expected one of"):
        sender.read(CONTEXT, preset="x")
    with pytest.raises(MismatchError, match="takes the same layers of all"):
        receiver.answer(QUESTION, (reference, sender.read(SECOND, (2,), preset="reference")))
    with pytest.raises(ValueError, match="positions: expected"):
        receiver.answer(QUESTION, paper, positions="mine")


def test_senders_may_choose_their_own_layers_in_paper(load):
    """Layer by layer the receiver gets what each sender sent there."""
    folder, model = load("llama")
    reference = oracle.read_folder(folder)
    runs = [oracle.read(reference, c) for c in (CONTEXT, SECOND)]
    given = [[], [runs[0].block(1)], [runs[1].block(2)], [runs[0].block(3), runs[1].block(3)]]
    run = reference.run(QUESTION, positions=15, given=given)
    sender = kvcomm.Sender(model)
    packets = (sender.read(CONTEXT, (1, 3)), sender.read(SECOND, (2, 3)))
    logits = kvcomm.Receiver(model).logits(QUESTION, packets, all=True)
    np.testing.assert_allclose(logits, run.logits, atol=1e-4, rtol=1e-4)


# ---- limits ----


def test_positions_beyond_the_model(load):
    """CF-050: what counts is the sum of context and question."""
    _, model = load("llama", max_position_embeddings=64)
    sender, receiver = kvcomm.Sender(model), kvcomm.Receiver(model)
    ids = list(range(1, 100))
    with pytest.raises(ValueError, match="context has 65 tokens, sender .* takes 64"):
        sender.read(ids[:65])
    packet = sender.read(ids[:40])
    with pytest.raises(
        ValueError, match="40 tokens of context and 30 .* 70 positions, receiver .* has 64"
    ):
        receiver.answer(ids[:30], packet)
    answer = receiver.answer(ids[:20], packet, 10, preset="paper")
    assert len(answer.ids) <= 5
    full = receiver.answer(ids[:60], None, 10)
    assert full.stop_reason in ("limit", "eos") and len(full.ids) <= 5
    assert receiver.answer(ids[:24], packet, 1).ids
    with pytest.raises(ValueError, match="66 positions"):
        receiver.score(ids[:24], [1, 2, 3], packet)
    assert len(receiver.score(ids[:24], [1], packet).token_ids) == 1


def test_cutting_the_middle_on_request(load):
    """EV-162: both ends survive, the middle goes, and the packet and the answer say so."""
    _, model = load("llama", max_position_embeddings=64)
    sender, receiver = kvcomm.Sender(model), kvcomm.Receiver(model)
    ids = list(range(1, 101))
    packet = sender.read(ids, cut="middle", max_tokens=40)
    assert packet.ids == tuple(ids[:20] + ids[-20:])
    assert (packet.cut_tokens, packet.context_len) == (60, 40)
    assert receiver.answer([1, 2], packet, 1).stats.cut_tokens == 60
    assert sender.read(ids, cut="middle").context_len == 64
    assert sender.read(ids[:40], cut="middle", max_tokens=41).cut_tokens == 0
    with pytest.raises(ValueError, match="cut: expected 'middle' or None"):
        sender.read(ids, cut="left")
    with pytest.raises(ValueError, match="max_tokens: expected at least 2, found 1"):
        sender.read(ids, cut="middle", max_tokens=1)


# ---- what it costs ----


def test_counted_tokens_are_the_truth(llama):
    """KV-104: with a packet the context is not forwarded again."""
    sender, receiver = llama
    packet = sender.read(CONTEXT, (1, 2))
    answer = receiver.answer(QUESTION, packet, 4)
    stats, n_new = answer.stats, len(answer.ids)
    assert (stats.receiver_tokens, stats.generated_tokens) == (6, n_new)
    assert stats.forwarded_tokens == 6 + n_new - 1
    assert (stats.context_tokens, stats.cut_tokens) == (11, 0)
    assert stats.message_bytes == packet.nbytes == 2 * 2 * 2 * 11 * 16 * 4
    assert stats.kv_bytes == packet.nbytes + 4 * 2 * 2 * (6 + n_new - 1) * 16 * 4
    qkv, rest, head = 2 * 64 * 128, 2 * 64 * (64 + 3 * 128), 2 * 64 * 320
    prefill = 6 * (4 * qkv + 3 * rest) + rest + head  # the last layer goes on for one row only
    step = 4 * (qkv + rest) + head
    pairs = sum(range(1, 7)) * 4 + 66 * 2
    assert stats.prefill == Work(prefill, 4 * 16 * 4 * pairs)
    pairs = sum(4 * n_own + 11 * 2 for n_own in range(7, 6 + n_new))
    assert stats.decode == Work((n_new - 1) * step, 4 * 16 * 4 * pairs)
    assert stats.flops == (stats.prefill + stats.decode).flops


def test_seconds_by_phase(llama):
    sender, receiver = llama
    stats = receiver.answer(QUESTION, sender.read(CONTEXT), 4).stats
    assert stats.handover_seconds > 0
    assert stats.prefill_seconds > 0
    assert stats.decode_seconds > 0
    assert stats.handover_seconds + stats.prefill_seconds <= stats.first_token_seconds
    assert stats.total_seconds == pytest.approx(stats.first_token_seconds + stats.decode_seconds)


def test_an_answer_of_no_tokens_costs_nothing(llama):
    _, receiver = llama
    before = receiver.counts
    stats = receiver.answer(QUESTION, None, 0).stats
    assert receiver.counts == before
    assert (stats.forwarded_tokens, stats.flops, stats.kv_bytes) == (0, 0, 0)
    assert (stats.prefill_seconds, stats.first_token_seconds) == (None, None)
    # What several questions begin with alike does not run either.
    before = receiver.counts
    alike = [[*range(5, 5 + 80), last] for last in (3, 4)]
    assert [a.stats.flops for a in receiver.answer(alike, None, 0)] == [0, 0]
    assert receiver.counts == before
    # A prompt that was run first did cost something.
    prefilled = receiver.prefill(QUESTION)
    ran = prefilled.answer(0)[0].stats
    assert ran.forwarded_tokens == ran.receiver_tokens > 0 and ran.prefill.flops > 0


def test_streaming(llama):
    sender, receiver = llama
    packet = sender.read(CONTEXT)
    pieces = []
    answer = receiver.answer(QUESTION, packet, 12, stream=pieces.append)
    assert "".join(pieces) == answer.text
    assert "".join(receiver.stream(QUESTION, packet, 12)) == answer.text
    by_row = [[], []]
    answers = receiver.answer(
        [QUESTION, SECOND], packet, 12, stream=lambda row, text: by_row[row].append(text)
    )
    assert ["".join(p) for p in by_row] == [a.text for a in answers]
    with pytest.raises(TypeError, match="stream takes one question"):
        receiver.stream([QUESTION, SECOND])


def test_reference_stops_at_the_ids_of_config_json_only(tmp_path, device):
    """reference.md section 6: the generation config's ids hold for the baseline only."""
    free = fixtures.write_model(tmp_path / "free", "llama", eos_token_id=None)
    receiver = kvcomm.Receiver(kvcomm.Model.load(free, device=device))
    packet = kvcomm.Sender(receiver.model).read(CONTEXT, (1,), preset="reference")
    ids = receiver.answer(QUESTION, packet, 6).ids
    baseline = receiver.answer(QUESTION, None, 6).ids
    folder = fixtures.write_model(tmp_path / "m", "llama", eos_token_id=319)
    fixtures.write_tokenizer(folder, eos=[ids[0], baseline[0]])
    receiver = kvcomm.Receiver(kvcomm.Model.load(folder, device=device))
    sender = kvcomm.Sender(receiver.model)
    assert receiver.answer(QUESTION, sender.read(CONTEXT, (1,), preset="reference"), 6).ids == ids
    assert len(receiver.answer(QUESTION, None, 6, preset="reference").ids) == 1


def test_threads_share_agents(llama):
    """KV-100, BL-135: the same packet in eight threads at once."""
    sender, receiver = llama
    packet = sender.read(CONTEXT, (1, 2))
    expected = receiver.answer(QUESTION, packet, 6).ids
    found = []

    def work():
        for _ in range(5):
            found.append(receiver.answer(QUESTION, packet, 6).ids)
            found.append(receiver.answer(QUESTION, sender.read(CONTEXT, (1, 2)), 6).ids)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80 and set(found) == {expected}


def test_packets_need_no_living_sender(load, device):
    folder, _ = load("llama")
    with kvcomm.Model.load(folder, device=device) as model:
        packet = kvcomm.Sender(model).read(CONTEXT)
    del model
    receiver = kvcomm.Receiver(kvcomm.Model.load(folder, device=device))
    assert isinstance(packet, Packet)
    assert receiver.answer(QUESTION, packet, 3).ids
