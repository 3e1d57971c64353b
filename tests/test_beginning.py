"""What prompts begin with alike: it runs once, and no bit of what follows changes."""

import core_model
import numpy as np
import pytest

import kvcomm
from kvcomm import beginning
from kvcomm._core import KV, Session, Workspace
from kvcomm.beginning import LEAST_SAVED, shared_length
from kvcomm.errors import MismatchError

FAMILIES = ("llama", "mistral", "qwen3", "gemma3", "yarn")
HEAD = np.random.default_rng(7).integers(3, 300, 44).tolist()  # as long as real templates' are


def ids_of(n, seed):
    return np.random.default_rng([n, seed]).integers(3, 300, n).tolist()


def alike(n=5):
    """Questions of 46 to 66 tokens that begin with HEAD and go on differently."""
    return [[*HEAD, 3 + row, *ids_of(1 + 5 * row, row)] for row in range(n)]


@pytest.fixture
def apart(monkeypatch):
    """apart(run): what run gives where nothing is shared."""

    def run(work):
        with monkeypatch.context() as patch:
            patch.setattr(beginning, "LEAST_SAVED", 1 << 40)
            return work()

    return run


# ---- a session that goes on from another's tail ----


@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize(("n", "n_first"), [(2, 1), (9, 4), (65, 44), (65, 64), (130, 100)])
def test_what_follows_has_the_same_bits(device, kv_dtype, windowed, n, n_first):
    """Behind given keys, with a shift, over the end of a block; the prompt and ten steps."""
    changes = {"window": 16, "windowed": [True, False, True, False]} if windowed else {}
    model = core_model.build(device, **changes)
    workspace = Workspace(model)
    given = core_model.read(model, ids_of(30, 1), kv_dtype=kv_dtype)
    ids = np.array(ids_of(n, 2), np.int32)
    for shift in (0, -20):

        def opened(shift=shift):
            session = Session(model, kv_dtype=kv_dtype)
            session.give(given)
            session.set_shift(shift, [1, 2])
            return session

        whole, first, resumed = opened(), opened(), opened()
        workspace.forward([first], [ids[:n_first]])
        resumed.reserve(n)
        resumed.resume(first.freeze())
        assert resumed.lengths == [n_first] * 4
        assert resumed.next_position == first.next_position
        expected, _ = workspace.forward([whole], [ids], output="logits")
        found, _ = workspace.forward([resumed], [ids[n_first:]], output="logits")
        for _ in range(10):
            assert found.tobytes() == expected.tobytes()
            token = [int(expected.argmax())]
            expected, _ = workspace.forward([whole], [token], output="logits")
            found, _ = workspace.forward([resumed], [token], output="logits")


def test_a_tail_that_does_not_fit(device):
    """Refused, and the session is as it was."""
    model = core_model.build(device)
    shape = {"n_layers": 4, "n_kv_heads": 4, "head_dim": 8, "dtype": "f32", "next_position": 3}
    tail = core_model.read(model, [5, 6, 7])
    session = Session(model)
    with pytest.raises(TypeError, match="tail must be a KV"):
        session.resume([5])
    with pytest.raises(MismatchError, match="the KV is f16, the session f32"):
        session.resume(core_model.read(model, [5, 6, 7], kv_dtype="f16"))
    with pytest.raises(MismatchError, match="4 KV heads of 8, the receiver 2"):
        session.resume(KV.from_arrays({}, device=device, **shape))
    session.set_position(2)
    with pytest.raises(MismatchError, match="layer 0 .* at position 0, the session at 2"):
        session.resume(tail)
    session.set_position(0)
    assert session.lengths == [0] * 4
    session.resume(tail)
    assert session.lengths == [3] * 4
    with pytest.raises(ValueError, match="resume: the session has tokens of its own"):
        session.resume(tail)


# ---- how much is shared ----


def test_shared_length():
    first = np.arange(100)
    other, short = first.copy(), first[:80]
    other[90] = -1
    assert shared_length([first, other]) == 90
    assert shared_length([first, first]) == 99  # one token is left to run
    assert shared_length([first, short]) == 79
    assert shared_length([first, other, short]) == 79
    assert shared_length([first]) == 0
    other[LEAST_SAVED - 1] = -1
    assert shared_length([first, other]) == 0  # it would not pay
    assert shared_length([first, other, first]) == LEAST_SAVED - 1


# ---- questions ----


@pytest.mark.parametrize("preset", ["paper", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_questions_that_begin_alike(load, family, preset, apart):
    """Answers, likelihoods and first logits are those without it."""
    _, model = load(family)
    receiver, questions = kvcomm.Receiver(model), alike()
    packet = kvcomm.Sender(model).read(ids_of(20, 1), (1, 3), preset=preset)
    packets = [packet, None, packet, None, packet]

    def everything():
        many = receiver.answer_many(questions, packets, 6, batch_size=2)
        prefilled = receiver.prefill(questions, packets)
        scores = receiver.score(questions, [[5, 6, 7]] * 5, packets)
        ids = [answer.ids for answer in prefilled.answer(6)]
        return (
            [answer.ids for answer in many],
            ids,
            prefilled.logits.tobytes(),
            [score.token_nll.tobytes() for score in scores],
        )

    assert everything() == apart(everything)


def test_what_is_shared_runs_once(load):
    """Of five questions three are about one packet, two about none."""
    _, model = load("llama")
    receiver, questions = kvcomm.Receiver(model), alike()
    packet = kvcomm.Sender(model).read(ids_of(20, 1), (1, 3))
    packets = [packet, None, packet, packet, packet]
    answers = receiver.answer_many(questions, packets, 1)
    saved = 3 * len(HEAD)
    assert receiver.counts["tokens"] == sum(map(len, questions)) - saved
    stats = [answer.stats for answer in answers]
    assert [one.shared_tokens for one in stats] == [0, 0, 44, 44, 44]
    assert [one.receiver_tokens for one in stats] == [len(ids) for ids in questions]
    assert [one.forwarded_tokens for one in stats] == [
        len(ids) - one.shared_tokens for ids, one in zip(questions, stats, strict=True)
    ]


def test_another_packet_or_a_look_ahead_shares_nothing(load):
    _, model = load("llama")
    sender, receiver = kvcomm.Sender(model), kvcomm.Receiver(model)
    questions = alike()
    packets = sender.read([ids_of(20, seed) for seed in range(5)])
    ahead = sender.read(ids_of(20, 1), (1, 3), preset="reference")
    for given in (packets, ahead):
        before = receiver.counts["tokens"]
        receiver.answer_many(questions, given, 1)
        assert receiver.counts["tokens"] - before == sum(map(len, questions))


@pytest.mark.parametrize("shift_back", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_accounts_add_up(load, family, shift_back):
    _, model = load(family)
    receiver = kvcomm.Receiver(model)
    packet = kvcomm.Sender(model).read(ids_of(20, 1), (1, 3))
    answers = receiver.answer_many(alike(), packet, 5, shift_back=shift_back)
    stats, counts = [answer.stats for answer in answers], receiver.counts
    assert counts["tokens"] == sum(one.forwarded_tokens for one in stats)
    assert counts["linear_flops"] == sum(one.prefill.linear + one.decode.linear for one in stats)
    assert counts["attention_flops"] == sum(
        one.prefill.attention + one.decode.attention for one in stats
    )


def test_nothing_is_run_for_no_tokens(load):
    _, model = load("llama")
    receiver = kvcomm.Receiver(model)
    receiver.answer_many(alike(), None, 0)
    assert receiver.counts["tokens"] == 0


# ---- contexts ----


def contents(packet):
    """All that a receiver is given: parts with their places, to the byte."""
    parts = [packet.kv.parts(layer) for layer in range(packet.n_layers)]
    bits = [[(k.tobytes(), v.tobytes(), *at) for k, v, *at in some] for some in parts]
    return bits, packet.kv.next_position, packet.ids, packet.layers


@pytest.mark.parametrize("layers", [(), (1,), None])
@pytest.mark.parametrize("preset", ["paper", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_contexts_that_begin_alike(load, family, preset, layers):
    """Packets are those of contexts read one by one, to the byte; what they share is read once."""
    _, model = load(family)
    contexts = alike()
    together, apart = kvcomm.Sender(model), kvcomm.Sender(model)
    packets = together.read(contexts, layers, preset=preset)
    for context, packet in zip(contexts, packets, strict=True):
        alone = apart.read(context, layers, preset=preset)
        assert contents(packet) == contents(alone)
    work = [packet.stats.work for packet in packets]
    assert together.counts["linear_flops"] == sum(one.linear for one in work)
    assert together.counts["attention_flops"] == sum(one.attention for one in work)
    ran = preset == "reference" or layers != ()
    assert apart.counts["tokens"] - together.counts["tokens"] == 4 * len(HEAD) * ran
    assert [packet.stats.shared_tokens for packet in packets] == [0] + [44 * ran] * 4
