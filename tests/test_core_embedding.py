"""The core's tokens as vectors: embedded, mixed by a distribution, and found again by cosine."""

import core_model
import numpy as np
import pytest
from core_model import DIM, VOCAB

import kvcomm
from kvcomm import _core
from kvcomm.errors import NumericError

SEED, SCALE = 3, 1.75


def table(vocab: int = VOCAB) -> np.ndarray:
    """The embedding table that core_model draws first, [vocab, dim]."""
    return (np.random.default_rng(SEED).standard_normal((vocab, DIM)) * 0.3).astype(np.float32)


def workspace(device, **changes):
    return _core.Workspace(core_model.build(device, SEED, embed_scale=SCALE, **changes))


def softmax(x):
    e = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def test_embed_is_the_scaled_row(device):
    ids = np.array([5, 0, 319, 5, *range(70)])  # more than one group of 64
    np.testing.assert_array_equal(workspace(device).embed(ids), table()[ids] * np.float32(SCALE))


@pytest.mark.parametrize("vocab", [320, 301, 17])
@pytest.mark.parametrize("n", [1, 3, 4, 5, 70])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.05, 30.0])
def test_mix_is_the_weighted_mean(device, vocab, n, temperature):
    logits = np.random.default_rng(n).standard_normal((n, vocab)).astype(np.float32) * 5
    found = workspace(device, vocab_size=vocab).mix(logits, temperature)
    expected = softmax(logits / temperature) @ table(vocab).astype(np.float64) * SCALE
    np.testing.assert_allclose(found, expected, atol=3e-6)


@pytest.mark.parametrize("vocab", [320, 301, 17])
def test_nearest_by_cosine(device, vocab):
    rows = table(vocab)
    vectors = np.random.default_rng(1).standard_normal((70, DIM)).astype(np.float32)
    cosine = vectors @ (rows / np.linalg.norm(rows, axis=1, keepdims=True)).T
    found = workspace(device, vocab_size=vocab).nearest(vectors)
    np.testing.assert_array_equal(found, cosine.argmax(axis=1))
    # Length does not matter, and a row is nearest to itself.
    ws = workspace(device, vocab_size=vocab)
    np.testing.assert_array_equal(ws.nearest(rows * 1000), np.arange(vocab))
    np.testing.assert_array_equal(ws.nearest(rows * 1e-3), np.arange(vocab))


def test_ties_go_to_the_lowest_id(device):
    assert workspace(device).nearest(np.zeros((2, DIM), np.float32)).tolist() == [0, 0]


def test_a_certain_token_is_its_embedding_and_nearest_to_it(device):
    ws = workspace(device)
    logits = np.full((3, VOCAB), -200.0, np.float32)
    for row, token in enumerate((0, 16, 319)):
        logits[row, token] = 200.0
    mixed = ws.mix(logits, 1.0)
    np.testing.assert_array_equal(mixed, ws.embed([0, 16, 319]))
    assert ws.nearest(mixed).tolist() == [0, 16, 319]


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_a_row_has_its_bits_in_any_batch(device, threads):
    logits = np.random.default_rng(2).standard_normal((9, VOCAB)).astype(np.float32)
    kvcomm.set_num_threads(1)
    try:
        alone = [workspace(device).mix(row[None], 0.7) for row in logits]
        kvcomm.set_num_threads(threads)
        ws = workspace(device)
        together = ws.mix(logits, 0.7)
        assert [row.tobytes() for row in together] == [row.tobytes() for row in alone]
        nearest = [ws.nearest(row)[0] for row in alone]
        assert ws.nearest(together).tolist() == nearest
    finally:
        kvcomm.set_num_threads(0)


def test_counts(device):
    ws = workspace(device)
    ws.mix(np.zeros((5, VOCAB), np.float32), 1.0)
    assert ws.counts["linear_flops"] == 2 * 5 * VOCAB * DIM
    ws.nearest(np.ones((70, DIM), np.float32))
    assert ws.counts["linear_flops"] == 2 * 75 * VOCAB * DIM
    ws.embed([1, 2])
    assert ws.counts["linear_flops"] == 2 * 75 * VOCAB * DIM


def test_nothing_in_nothing_out(device):
    ws = workspace(device)
    assert ws.mix(np.zeros((0, VOCAB), np.float32), 1.0).shape == (0, DIM)
    assert ws.nearest(np.zeros((0, DIM), np.float32)).shape == (0,)


def test_normed_is_the_final_norm_of_hidden(device):
    model = core_model.build(device, SEED)
    ids = np.array([7, 8, 9, 10])

    def run(output):
        ws, session = _core.Workspace(model), _core.Session(model)
        return ws.forward([session], [ids], output=output, outputs="all")[0].astype(np.float64)

    hidden = run("hidden")
    norm = hidden / np.sqrt((hidden**2).mean(axis=1, keepdims=True) + 1e-5)
    rng = np.random.default_rng(SEED)
    rng.standard_normal((VOCAB, DIM))
    weight = rng.standard_normal(DIM).astype(np.float32).astype(np.float64) * 0.3
    np.testing.assert_allclose(run("normed"), norm * weight, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="needs the last layer, but layers end at 2 of 4"):
        _core.Workspace(model).forward(
            [_core.Session(model)], [ids], output="normed", layers=(0, 2)
        )


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf"), 1e-60])
def test_bad_temperature(device, temperature):
    with pytest.raises(ValueError, match=r"temperature .*, expected a number above 0"):
        workspace(device).mix(np.zeros((1, VOCAB), np.float32), temperature)


def test_bad_input(device):
    ws = workspace(device)
    with pytest.raises(ValueError, match="logits have 5 columns, expected 320"):
        ws.mix(np.zeros((1, 5), np.float32), 1.0)
    with pytest.raises(ValueError, match="vectors have 320 columns, expected 32"):
        ws.nearest(np.zeros((1, VOCAB), np.float32))
    with pytest.raises(TypeError, match="dtype is float64, expected float32"):
        ws.mix(np.zeros((1, VOCAB)), 1.0)
    with pytest.raises(ValueError, match="id 320 at place 1 is not in 0 .. 319"):
        ws.embed([3, 320])
    for value in (np.nan, np.inf):
        logits = np.zeros((2, VOCAB), np.float32)
        logits[1, 7] = value
        with pytest.raises(NumericError, match="logits: row 1 is not finite at place 7"):
            ws.mix(logits, 1.0)
        vectors = np.zeros((1, DIM), np.float32)
        vectors[0, 3] = value
        with pytest.raises(NumericError, match="vectors: row 0 is not finite at place 3"):
            ws.nearest(vectors)
