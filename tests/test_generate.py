"""The decode loop: stop rules, whole characters, sampling, limits, likelihoods."""

import json
import math

import fixtures
import numpy as np
import oracle
import pytest

import kvcomm
from kvcomm.errors import NumericError
from kvcomm.generate import Decoding, Rules, Start
from kvcomm.tokenizer import Tokenizer

A, B, C = b"ABC"  # the tiny tokenizer's first 256 ids are the bytes


class Script:
    """A workspace that 'predicts' given ids; counts the rows of every call."""

    def __init__(self, *rows: list[int]) -> None:
        self.rows = [list(row) for row in rows]
        self.sizes: list[int] = []

    def first_logits(self):
        """Logits that the prompts ended in: the best id is a row's first."""
        logits = np.zeros((len(self.rows), 320), np.float32)
        for row, ids in enumerate(self.rows):
            logits[row, ids.pop(0)] = 1.0
        return logits

    def forward(self, sessions, tokens, **options):
        assert options["output"] == "argmax"
        self.sizes.append(len(sessions))
        return np.array([self.rows[s.number].pop(0) for s in sessions], np.int32), None


class Line:
    """A session behind a prompt of three tokens."""

    next_position = 3

    def __init__(self, number: int) -> None:
        self.number = number


class Stub:
    """What a decode loop asks of a model."""

    def __init__(self, tokenizer, max_position) -> None:
        self.tokenizer, self.max_position = tokenizer, max_position


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return Tokenizer.load(tiny("llama"))


def decode(tokenizer, *rows, stop_ids=(), stop=(), max_new_tokens=100, max_position=1000):
    """Runs scripted rows; (pieces per row, results, sizes of the calls)."""
    script, stop_ids = Script(*rows), frozenset(stop_ids)
    starts = [
        Start(Line(n), stop_ids, logits=logits) for n, logits in enumerate(script.first_logits())
    ]
    decoding = Decoding(script, starts, Rules(max_new_tokens, stop), Stub(tokenizer, max_position))
    pieces = [[] for _ in rows]
    for number, piece in decoding:
        pieces[number].append(piece)
    unread = Script(*rows)
    starts = [
        Start(Line(n), stop_ids, logits=logits) for n, logits in enumerate(unread.first_logits())
    ]
    silent = Decoding(unread, starts, Rules(max_new_tokens, stop), Stub(tokenizer, max_position))
    assert [(r.ids, r.text, r.stop_reason) for r in silent.run()] == [
        (r.ids, r.text, r.stop_reason) for r in decoding.results
    ]
    return pieces, decoding.results, script.sizes


# ---- stop ids ----


@pytest.mark.parametrize("end", [301, 302, 303])
def test_any_stop_id_stops(tokenizer, end):
    """CF-045; the stop id is among the ids, not in the text."""
    _, (result,), _ = decode(tokenizer, [A, B, end, C], stop_ids=[301, 302, 303])
    assert result.ids == (A, B, end)
    assert (result.text, result.stop_reason) == ("AB", "eos")


def test_without_stop_ids_only_the_length_stops(tokenizer):
    _, (result,), _ = decode(tokenizer, [A, B, 302, C, A], max_new_tokens=4)
    assert result.ids == (A, B, 302, C)
    assert result.stop_reason == "length"


def test_a_stop_token_that_is_not_special_is_not_in_the_text(tokenizer):
    """TK-074: id 297 is an added token without the special flag."""
    ids = [*b"Paris", 297]
    _, (result,), _ = decode(tokenizer, ids, stop_ids=[297])
    assert result.text == "Paris"
    assert result.ids == tuple(ids)


def test_an_id_without_an_entry_gives_no_text(tokenizer):
    """CF-051: the head has more rows than the tokenizer has entries."""
    _, (result,), _ = decode(tokenizer, [A, 310, B], max_new_tokens=3)
    assert (result.text, result.ids) == ("AB", (A, 310, B))


@pytest.mark.parametrize("eos", [[301, 302, 303], 302, [], None])
def test_stop_ids_of_the_generation_config(tmp_path, device, eos):
    """The greedy answer is cut at the stop id that it meets first."""
    free = fixtures.write_model(tmp_path / "free", "llama", eos_token_id=None)
    prompt = [3, 1, 4, 1, 5]
    long = kvcomm.Receiver(kvcomm.Model.load(free, device=device)).answer(prompt, max_new_tokens=12)
    assert (len(long.ids), long.stop_reason) == (12, "length")
    met = long.ids[3]
    first = long.ids.index(met)
    stated = [met, 319] if isinstance(eos, list) and eos else met if eos else eos
    folder = fixtures.write_model(tmp_path / "m", "llama", eos_token_id=stated)
    answer = kvcomm.Receiver(kvcomm.Model.load(folder, device=device)).answer(
        prompt, max_new_tokens=12
    )
    if eos:
        assert answer.ids == long.ids[: first + 1]
        assert answer.stop_reason == "eos"
    else:
        assert answer.ids == long.ids


def test_generation_config_does_not_change_greedy(tmp_path, device):
    """CF-047: sampling and penalties of the file are not applied unless asked for."""
    folder = fixtures.write_model(tmp_path / "m", "llama")
    receiver = kvcomm.Receiver(kvcomm.Model.load(folder, device=device))
    plain = receiver.answer([3, 1, 4], max_new_tokens=12).ids
    generation = {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1}
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | generation))
    again = kvcomm.Receiver(kvcomm.Model.load(folder, device=device))
    assert {again.answer([3, 1, 4], max_new_tokens=12).ids for _ in range(5)} == {plain}


# ---- stop strings and streaming ----


def test_text_ends_before_a_stop_string(tokenizer):
    pieces, (result,), _ = decode(tokenizer, [*b"one\nQuestion: two"], stop=["\nQuestion:", "zz"])
    assert (result.text, result.stop_reason) == ("one", "stop")
    assert result.ids == tuple(b"one\nQuestion:")
    assert "".join(pieces[0]) == "one"


def test_a_stop_string_is_found_across_and_inside_tokens(tokenizer):
    token = 256 + fixtures.MERGES.index(("Ġ", "the"))  # the token " the"
    _, (result,), _ = decode(tokenizer, [A, token, B], stop="th")
    assert (result.text, result.ids) == ("A ", (A, token))


def test_text_held_back_for_a_stop_string_comes_when_it_is_none(tokenizer):
    pieces, (result,), _ = decode(tokenizer, [*b"a--b"], stop="---", max_new_tokens=4)
    assert pieces[0] == ["a", "--b"]
    assert result.text == "a--b"
    pieces, (result,), _ = decode(tokenizer, [*b"a--"], stop="---", max_new_tokens=3)
    assert "".join(pieces[0]) == result.text == "a--"


@pytest.mark.parametrize("text", ["日本👩‍👩‍👧é", "\ufffd?", "x"])
def test_pieces_are_whole_characters(tokenizer, text):
    """TK-065: one byte per token."""
    ids = [*text.encode()]
    pieces, (result,), _ = decode(tokenizer, ids, max_new_tokens=len(ids))
    assert "".join(pieces[0]) == result.text == text == tokenizer.decode(ids)
    assert all("\ufffd" not in piece for piece in pieces[0]) or "\ufffd" in text


def test_an_answer_that_ends_inside_a_character(tokenizer):
    ids = [*"é".encode()][:1]
    pieces, (result,), _ = decode(tokenizer, ids, max_new_tokens=1)
    assert "".join(pieces[0]) == result.text == tokenizer.decode(ids)


def test_stop_strings_that_make_no_sense(tokenizer):
    with pytest.raises(ValueError, match="stop: an empty string"):
        decode(tokenizer, [A], stop=["x", ""])
    with pytest.raises(ValueError, match="stop: strings need a tokenizer"):
        decode(None, [A], stop="x")


def test_without_a_tokenizer_there_are_ids(tokenizer):
    pieces, (result,), _ = decode(None, [A, B], stop_ids=[B])
    assert (result.ids, result.text, pieces) == ((A, B), "", [[]])


# ---- lengths ----


def test_finished_rows_leave_the_batch(tokenizer):
    _, results, sizes = decode(tokenizer, [A, 301], [301], [A, A, A, 301], stop_ids=[301])
    assert sizes == [2, 1, 1]  # the prompts' logits gave the first tokens
    assert [len(r.ids) for r in results] == [2, 1, 4]


def test_no_new_tokens(tokenizer):
    _, (result,), sizes = decode(tokenizer, [A], max_new_tokens=0)
    assert (result.ids, result.text, result.stop_reason) == ((), "", "length")
    assert result.first_token_seconds is None
    assert sizes == []
    for odd in (1.5, "3", None, True):
        with pytest.raises(TypeError, match="max_new_tokens: expected an integer, found"):
            decode(tokenizer, [A], max_new_tokens=odd)
    with pytest.raises(TypeError, match=r"stop: expected strings, found \[5\]"):
        decode(tokenizer, [A], stop=[5])
    with pytest.raises(ValueError, match="max_new_tokens: -1 is negative"):
        decode(tokenizer, [A], max_new_tokens=-1)


def test_the_models_last_position_stops(tokenizer):
    """CF-050: 3 tokens of prompt and 8 positions leave room for 5 decoded tokens and one more."""
    _, (result,), _ = decode(tokenizer, [A] * 20, max_position=8)
    assert (len(result.ids), result.stop_reason) == (6, "limit")
    _, (result,), _ = decode(tokenizer, [A] * 20, max_position=8, max_new_tokens=6)
    assert (len(result.ids), result.stop_reason) == (6, "length")


# ---- sampling ----


@pytest.fixture(scope="module")
def receiver(tiny, device):
    return kvcomm.Receiver(kvcomm.Model.load(tiny("llama"), device=device))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": 0.0}, "top_p"),
    ],
)
def test_sampling_out_of_range(receiver, options, name):
    """NU-128; top_p 0 would keep nothing."""
    with pytest.raises(ValueError, match=name):
        receiver.answer([1, 2, 3], **({"temperature": 1.0} | options))


def test_temperature_zero_is_greedy_and_a_seed_repeats(receiver):
    greedy = receiver.answer([1, 2, 3], max_new_tokens=8).ids
    assert receiver.answer([1, 2, 3], max_new_tokens=8, temperature=0.0, seed=5).ids == greedy
    assert receiver.answer([1, 2, 3], max_new_tokens=8, temperature=1.0, top_k=1).ids == greedy
    draws = [
        receiver.answer([1, 2, 3], max_new_tokens=8, temperature=3.0, seed=seed).ids
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]


def test_every_row_draws_from_its_own_generator(receiver):
    questions = [[1, 2, 3], [4, 5], [1, 2, 3], [9]]
    options = {"max_new_tokens": 6, "temperature": 2.0, "top_p": 0.9, "seed": 11}
    together = receiver.answer(questions, **options)
    assert [a.ids for a in together] == [receiver.answer(q, **options).ids for q in questions]
    assert together[0].ids == together[2].ids


def test_first_draws_follow_the_distribution(receiver):
    """The draws of 400 seeds against softmax(logits / T) over the kept candidates."""
    logits = receiver.logits([1, 2, 3]).astype(np.float64)
    best = np.argsort(-logits)[:3]
    weights = np.exp((logits[best] - logits[best[0]]) / 0.5)
    expected = weights / weights.sum()
    draws = [
        receiver.answer([1, 2, 3], max_new_tokens=1, temperature=0.5, top_k=3, seed=s).ids[0]
        for s in range(400)
    ]
    shares = np.array([draws.count(token) for token in best]) / 400
    assert shares.sum() == 1.0
    np.testing.assert_allclose(shares, expected, atol=4 * 0.5 / math.sqrt(400))


# ---- numbers that are none ----


def test_values_that_are_not_finite_are_an_error(tmp_path, device):
    """NU-116: never token 0 in silence, greedy or sampled."""
    config, weights = fixtures.build("llama")
    weights["model.layers.1.mlp.down_proj.weight"] *= np.float32(1e38)
    weights["model.layers.1.mlp.up_proj.weight"] *= np.float32(1e30)
    folder = fixtures.write_folder(tmp_path / "m", config, weights)
    receiver = kvcomm.Receiver(kvcomm.Model.load(folder, device=device))
    for options in ({}, {"temperature": 1.0}):
        with pytest.raises(NumericError):
            receiver.answer([1, 2, 3], **options)
    with pytest.raises(NumericError):
        receiver.score([1, 2, 3], [4, 5])


def test_large_activations_are_fine_in_16_bit_weights(tmp_path, device):
    """NU-116: a channel of 1e5 is beyond f16, but activations are f32."""
    config, weights = fixtures.build("llama")
    weights["model.layers.1.mlp.down_proj.weight"][0] *= np.float32(2e4)
    for dtype in ("f16", "bf16", "f32"):
        rounded = fixtures.rounded(weights, dtype)
        folder = fixtures.write_folder(tmp_path / dtype, config, weights, dtype=dtype)
        model = kvcomm.Model.load(folder, device=device)
        expected = oracle.Model(config, rounded).run([1, 2, 3]).logits[-1]
        np.testing.assert_allclose(kvcomm.Receiver(model).logits([1, 2, 3]), expected, atol=1e-3)


# ---- likelihoods ----


def test_likelihoods_as_the_oracle(tiny, receiver):
    question, answer = [10, 20, 30], [7, 8, 9, 10, 7]
    expected = oracle.answer_nll(
        oracle.read_folder(tiny("llama")), question, answer, [[]] * 4, start=0, layers=()
    )
    score = receiver.score(question, answer)
    np.testing.assert_allclose(score.token_nll, expected, atol=1e-4)
    assert score.nll == pytest.approx(expected.sum(), abs=3e-4)
    assert score.token_ids == tuple(answer)


def test_the_likeliest_alternative_counts(receiver):
    alternatives = [[7, 8, 9], [11], [12, 13]]
    single = [receiver.score([1, 2], one) for one in alternatives]
    best = min(range(3), key=lambda n: single[n].nll)
    score = receiver.score([1, 2], alternatives)
    assert score.choice == best
    assert score.token_ids == tuple(alternatives[best])
    assert score.nll == single[best].nll


def test_scores_of_a_batch_are_those_alone(receiver):
    questions, answers = [[1, 2, 3], [4], [5, 6]], [[7], [[8, 9], [10, 11, 12]], [13, 14]]
    together = receiver.score(questions, answers)
    for question, answer, score in zip(questions, answers, together, strict=True):
        alone = receiver.score(question, answer)
        assert alone.token_nll.tolist() == score.token_nll.tolist()


def test_answers_that_cannot_be_scored(receiver):
    for answer in ("", [], [[]], np.array([], np.int64)):
        with pytest.raises(ValueError, match="answer"):
            receiver.score([1, 2], answer)
    with pytest.raises(ValueError, match="id 320 at place 1"):
        receiver.score([1, 2], [5, 320])
    with pytest.raises(ValueError, match="answer: 1 for 2 questions"):
        receiver.score([[1, 2], [3]], [[4]])
    with pytest.raises(TypeError, match="answer: expected one per question"):
        receiver.score([[1, 2], [3]], "xy")


def test_text_answers_are_encoded_as_they_are(receiver):
    tokenizer = receiver.model.tokenizer
    score = receiver.score([1, 2], "the answer")
    assert score.token_ids == tuple(tokenizer.encode("the answer"))
