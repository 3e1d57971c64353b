"""Many questions: continuous batches change no bit, and every answer's account is its own."""

import weakref
from typing import ClassVar

import numpy as np
import pytest

import kvcomm
from kvcomm import handover
from kvcomm._core import Session, Workspace
from kvcomm.generate import JOINING_TOKENS, Decoding, Rules, Start
from kvcomm.packet import Packet

FAMILIES = ("llama", "mistral", "qwen3", "gemma3", "yarn")
NEW = 9


def ids_of(n, seed):
    return np.random.default_rng([n, seed]).integers(3, 300, n).tolist()


def mixed(model, preset, n=14):
    """Questions of 1 to 40 tokens; every fourth without a packet, others share one of four."""
    sender = kvcomm.Sender(model)
    rng = np.random.default_rng(5)
    packets = [None] + [
        sender.read(
            ids_of(int(rng.integers(1, 40)), seed),
            rng.permutation(model.n_layers)[: rng.integers(0, model.n_layers + 1)],
            preset=preset,
        )
        for seed in range(3)
    ]
    questions = [ids_of(int(rng.integers(1, 40)), 100 + row) for row in range(n)]
    return questions, [packets[row % 4] for row in range(n)]


def stopping(load, family, preset, n=14):
    """Questions, packets and a receiver that stops at ids it would draw: rows of all lengths."""
    _, model = load(family, eos_token_id=None)
    questions, packets = mixed(model, preset, n)
    free = kvcomm.Receiver(model)
    drawn = [free.answer(questions[row], packets[row], NEW).ids for row in (0, 3, 5)]
    _, model = load(family, eos_token_id=[ids[2 * n + 1] for n, ids in enumerate(drawn)])
    return kvcomm.Receiver(model), questions, packets


# ---- the bits ----


@pytest.mark.parametrize("preset", ["paper", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_alone(load, family, preset):
    receiver, questions, packets = stopping(load, family, preset)
    alone = [receiver.answer(q, p, NEW) for q, p in zip(questions, packets, strict=True)]
    assert len({len(answer.ids) for answer in alone}) > 1
    for batch_size in (1, 3, 8, 64):
        many = receiver.answer_many(questions, packets, NEW, batch_size=batch_size)
        assert [(a.ids, a.text, a.stop_reason) for a in many] == [
            (a.ids, a.text, a.stop_reason) for a in alone
        ]


class Recorder:
    """A workspace that keeps the bits of all logits, by session; sessions in order of arrival."""

    rows: ClassVar[dict[int, list[bytes]]] = {}
    order: ClassVar[list[Session]] = []

    def __init__(self, core):
        self.workspace = Workspace(core)

    def forward(self, sessions, tokens, **options):
        out, mass = self.workspace.forward(sessions, tokens, **options)
        for session, logits in zip(sessions, out, strict=True):
            if id(session) not in self.rows:
                self.order.append(session)  # keeps it: its id stays its own
            self.rows.setdefault(id(session), []).append(logits.tobytes())
        return out, mass

    @property
    def counts(self):
        return self.workspace.counts


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_logits_are_those_alone(load, monkeypatch, threads):
    """Of every step, bit for bit, while rows come and go."""
    receiver, questions, packets = stopping(load, "gemma3", "paper", 8)
    monkeypatch.setattr(handover, "Workspace", Recorder)
    options = {"temperature": 1.5, "seed": 3}

    def logits(run):
        monkeypatch.setattr(Recorder, "rows", {})
        monkeypatch.setattr(Recorder, "order", [])
        run()
        return [Recorder.rows[id(session)] for session in Recorder.order]

    def one_by_one():
        for question, packet in zip(questions, packets, strict=True):
            receiver.answer(question, packet, NEW, **options)

    alone = logits(one_by_one)
    kvcomm.set_num_threads(threads)
    try:
        many = logits(
            lambda: receiver.answer_many(questions, packets, NEW, batch_size=3, **options)
        )
    finally:
        kvcomm.set_num_threads(0)
    assert len(alone) == len(questions)
    assert many == alone


def test_stop_strings_and_whole_characters(load):
    _, model = load("llama")
    receiver = kvcomm.Receiver(model)
    questions = [ids_of(5, row) for row in range(6)]
    text = receiver.answer(questions[0], None, 12).text
    stop = next(text[at : at + 2] for at in range(2, len(text)) if text[at : at + 2].isprintable())
    alone = [receiver.answer(q, None, 12, stop=stop) for q in questions]
    assert alone[0].stop_reason == "stop" and stop not in alone[0].text
    many = receiver.answer_many(questions, None, 12, batch_size=2, stop=stop)
    assert [(a.ids, a.text) for a in many] == [(a.ids, a.text) for a in alone]
    streamed = [""] * 6

    def show(row, piece):
        streamed[row] += piece

    receiver.answer(questions, None, 12, stop=stop, stream=show, batch_size=4)
    assert streamed == [a.text for a in alone]


# ---- what is asked ----


def test_questions_of_any_kind(load):
    _, model = load("llama")
    receiver, sender = kvcomm.Receiver(model), kvcomm.Sender(model)
    packets = (sender.read([5, 6, 7]), sender.read([8, 9]))
    questions = ["Where?", [4, 5], np.array([6, 7, 8])]
    many = receiver.answer_many(iter(questions), packets, 4, batch_size=2)
    assert [a.ids for a in many] == [receiver.answer(q, packets, 4).ids for q in questions]
    assert receiver.answer_many([], packets) == []
    for one in ("Where?", [4, 5], np.array([4, 5])):
        with pytest.raises(TypeError, match="questions: answer_many takes several, found one"):
            receiver.answer_many(one, packets)
    assert [a.ids for a in receiver.answer_many([[4, 5]], None, 0)] == [()]


def test_bad_questions_show_before_any_runs(load):
    _, model = load("llama", max_position_embeddings=64)
    receiver = kvcomm.Receiver(model)
    packet = kvcomm.Sender(model).read(list(range(1, 41)))
    before = receiver.counts
    for questions, message in (
        ([[4, 5], [4, 320]], "id 320 at place 1"),
        ([[4, 5], []], "question is empty"),
        ([[4, 5], list(range(1, 31))], "70 positions, receiver .* has 64"),
    ):
        with pytest.raises(ValueError, match=message):
            receiver.answer_many(questions, packet, 4, batch_size=1)
    with pytest.raises(ValueError, match="batch_size: expected 1 or more, found 0"):
        receiver.answer_many([[4, 5]], packet, 4, batch_size=0)
    with pytest.raises(ValueError, match="packet: 1 packets for 2 questions"):
        receiver.answer_many([[4, 5], [6]], [packet], 4)
    with pytest.raises(TypeError, match="unknown option 'shift'"):
        receiver.answer_many([[4, 5]], packet, 4, shift=True)
    assert receiver.counts == before


def test_a_full_row_ends_at_the_last_position(load):
    _, model = load("llama", max_position_embeddings=64, eos_token_id=None)
    receiver = kvcomm.Receiver(model)
    many = receiver.answer_many([ids_of(n, 1) for n in (60, 64, 3)], None, 10, batch_size=2)
    assert [len(a.ids) for a in many] == [5, 1, 10]
    assert [a.stop_reason for a in many] == ["limit", "limit", "length"]


# ---- who runs when ----


class Script:
    """A workspace that 'predicts' given ids per row; keeps the sizes of what every row runs."""

    def __init__(self, rows):
        self.rows = [list(row) for row in rows]
        self.sizes = []

    def forward(self, sessions, tokens, **options):
        self.sizes.append([len(ids) for ids in tokens])
        return np.array([self.rows[s.number].pop(0) for s in sessions], np.int32), None


class Line:
    """A new session."""

    next_position = 0

    def __init__(self, number):
        self.number = number


class Stub:
    tokenizer, max_position = None, 10_000


STOP = 99


def scripted(lengths, rows, batch_size):
    script = Script(rows)
    starts = (
        Start(Line(n), frozenset([STOP]), np.zeros(length, np.int32))
        for n, length in enumerate(lengths)
    )
    decoding = Decoding(script, starts, Rules(100), Stub, batch_size=batch_size)
    assert [list(found.ids) for found in decoding.run()] == [list(row) for row in rows]
    return script.sizes


def test_a_finished_row_makes_room_at_once():
    rows = [[1, STOP], [1, 2, 3, STOP], [STOP], [1, STOP]]
    sizes = scripted([10, 20, 30, 40], rows, 2)
    # Row 0 ends in the second call; row 2 is prefilled beside row 1 and ends with its first token.
    assert sizes == [[10, 20], [1, 1], [1, 30], [1, 40], [1]]


def test_prompts_join_within_a_budget():
    """So many tokens of prompts in one call, or one prompt that is longer."""
    n = JOINING_TOKENS
    sizes = scripted([n - 1, 1, 1, 2 * n, 5], [[1, STOP]] * 5, 8)
    assert sizes == [[n - 1, 1], [1, 1, 1], [1, 2 * n], [1, 5], [1]]


def test_a_row_that_has_ended_holds_no_session():
    """K and V of no more rows than run, and of the one that is next."""
    alive = weakref.WeakSet()
    most = []

    def starts():
        for n in range(12):
            line = Line(n)
            alive.add(line)
            most.append(len(alive))
            yield Start(line, frozenset(), np.zeros(3, np.int32))
            del line

    Decoding(Script([[1, 2]] * 12), starts(), Rules(2), Stub, batch_size=3).run()
    assert max(most) <= 4


# ---- the account ----


def spent(receiver, before):
    return {name: value - before[name] for name, value in receiver.counts.items()}


def check_accounts(receiver, questions, packets, n_new=5, **options):
    """Accounts in a batch are those alone, and add up to what the core has counted."""
    before = receiver.counts
    alone = [
        receiver.answer(q, p, n_new, **options).stats
        for q, p in zip(questions, packets, strict=True)
    ]
    found = spent(receiver, before)
    assert found["tokens"] == sum(one.forwarded_tokens for one in alone)
    assert found["linear_flops"] == sum(one.prefill.linear + one.decode.linear for one in alone)
    assert found["attention_flops"] == sum(
        one.prefill.attention + one.decode.attention for one in alone
    )
    before = receiver.counts
    many = receiver.answer_many(questions, packets, n_new, batch_size=3, **options)
    assert spent(receiver, before) == found
    exact = (
        "context_tokens", "receiver_tokens", "generated_tokens", "forwarded_tokens", "cut_tokens",
        "prefill", "decode", "flops", "message_bytes", "kv_bytes",
    )  # fmt: skip
    for one, answer in zip(alone, many, strict=True):
        for name in exact:
            assert getattr(answer.stats, name) == getattr(one, name), name
        assert 0 < answer.stats.prefill_seconds <= answer.stats.first_token_seconds
        assert answer.stats.first_token_seconds <= answer.stats.total_seconds


@pytest.mark.parametrize("shift_back", [False, True])
@pytest.mark.parametrize("preset", ["paper", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_accounts_are_what_the_core_counts(load, family, preset, shift_back):
    _, model = load(family)
    questions, packets = mixed(model, preset, 8)
    if model.max_position > 700:
        questions[3] = ids_of(600, 1)  # longer than what the core cuts a prompt into
    check_accounts(kvcomm.Receiver(model), questions, packets, shift_back=shift_back)


@pytest.mark.parametrize("preset", ["paper", "reference"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_accounts_of_several_senders(load, family, preset):
    """Windowed layers among them: what the question sees depends on where the keys stand."""
    _, model = load(family)
    sender = kvcomm.Sender(model)
    for lengths in ((12, 3), (2, 30), (1, 1)):
        packets = tuple(
            sender.read(ids_of(n, n), (1, 3), preset=preset, trim=trim)
            for n, trim in zip(lengths, (True, False), strict=True)
        )
        check_accounts(
            kvcomm.Receiver(model),
            [ids_of(n, 7) for n in (1, 9, 20)],
            [packets] * 3,
            positions="sequential",
        )


def test_accounts_of_senders_with_layers_of_their_own(load):
    """In a windowed layer that only one of them sent."""
    _, model = load("mistral")
    sender = kvcomm.Sender(model)
    packets = (sender.read(ids_of(9, 1), (1, 2)), sender.read(ids_of(4, 2), (2, 3)))
    questions = [ids_of(n, 7) for n in (1, 9, 20)]
    check_accounts(kvcomm.Receiver(model), questions, [packets] * 3, positions="sequential")


@pytest.mark.parametrize("preset", ["paper", "reference"])
def test_accounts_of_a_deeper_receiver(load, preset):
    _, model = load("llama")
    _, deeper = load("llama", num_hidden_layers=6, seed=3)
    packet = kvcomm.Sender(model).read(ids_of(12, 1), (1, 3), preset=preset)
    check_accounts(
        kvcomm.Receiver(deeper),
        [ids_of(n, 7) for n in (1, 9)],
        [packet] * 2,
        layer_map=kvcomm.published_layer_map(4, 6),
    )


@pytest.mark.parametrize("layers", [(), (0,), (2,), (1, 3)])
@pytest.mark.parametrize("preset", ["paper", "reference"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_accounts_of_readings(load, family, preset, layers):
    """Of each context alone; in a batch they add up to what the core has counted."""
    _, model = load(family)
    contexts = [ids_of(n, n) for n in (1, 9, 40, 530)]
    sender = kvcomm.Sender(model)
    packets = sender.read(contexts, layers, preset=preset)
    work = [packet.stats.work for packet in packets]
    n_layers = 1 + max(layers, default=0 if preset == "reference" else -1)
    assert sender.counts["linear_flops"] == sum(one.linear for one in work)
    assert sender.counts["attention_flops"] == sum(one.attention for one in work)
    for context, packet in zip(contexts, packets, strict=True):
        alone = kvcomm.Sender(model).read(context, layers, preset=preset).stats
        assert (alone.tokens, alone.layers) == (len(context), n_layers)
        assert (packet.stats.work, packet.stats.tokens) == (alone.work, len(context))
        assert packet.stats.seconds > 0
        assert Packet.from_bytes(packet.to_bytes(), device=model.device).stats is None


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16"])
def test_bytes(tiny, device, kv_dtype):
    """By hand: 4 layers of 2 heads of 16; 11 tokens of context in 2 layers."""
    model = kvcomm.Model.load(tiny("llama"), device=device, kv_dtype=kv_dtype)
    packet = kvcomm.Sender(model).read(ids_of(11, 1), (1, 2))
    stats = kvcomm.Receiver(model).answer_many([[4, 5, 6]], packet, 2)[0].stats
    token = 2 * 2 * 16 * (4 if kv_dtype == "f32" else 2)
    assert stats.message_bytes == 2 * 11 * token
    assert stats.kv_bytes == stats.message_bytes + 4 * (3 + stats.generated_tokens - 1) * token


def test_what_was_asked_of_a_prefilled_prompt_leaves_no_trace(load):
    _, model = load("llama")
    receiver = kvcomm.Receiver(model)
    questions, packets = mixed(model, "paper", 3)
    golds = [[np.array([5, 6, 7, 8], np.int32)]] * 3
    expected = [answer.ids for answer in receiver.prefill(questions, packets).answer(4)]
    prefilled = receiver.prefill(questions, packets)
    first = [score.nll for score in prefilled.score(golds)]
    assert [answer.ids for answer in prefilled.answer(4)] == expected
    assert [answer.ids for answer in prefilled.answer(4)] == expected
    assert [score.nll for score in prefilled.score(golds)] == first
    list(prefilled.follow([golds[0][0]] * 3))
    assert [answer.ids for answer in prefilled.answer(4)] == expected


def test_prefilled_prompts_have_the_same_account(load):
    _, model = load("llama")
    receiver = kvcomm.Receiver(model)
    questions, packets = mixed(model, "paper", 5)
    many = receiver.answer_many(questions, packets, 4)
    prefilled = receiver.prefill(questions, packets)
    for one, other in zip(many, prefilled.answer(4), strict=True):
        assert one.ids == other.ids
        for name in ("forwarded_tokens", "prefill", "decode", "message_bytes", "kv_bytes"):
            assert getattr(one.stats, name) == getattr(other.stats, name)
