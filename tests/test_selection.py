"""Layer choice: numbers of layers, every strategy, scores and calibration against the oracle."""

import itertools
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import oracle
import pytest

import kvcomm
from kvcomm.selection import LayerScores, choose, layer_count

STRATEGIES_OF_MASS = ("attention", "attention_gaussian", "gaussian")


def scores_of(mass, preset="paper") -> LayerScores:
    """Scores as if one sample with one head had given this mass."""
    return LayerScores(np.asarray(mass, np.float64)[None, :, None], preset, "s", "r")


# ---- how many ----


@pytest.mark.parametrize(
    ("ratio", "n_layers", "paper", "reference"),
    [
        (0.7, 30, 21, 21),  # 20.999999999999996 in doubles, 21 as written
        (0.55, 20, 11, 11),  # 11.000000000000002 in doubles
        (0.3, 30, 9, 9),
        (0.3, 24, 8, 7),
        (0.7, 24, 17, 16),
        (0.3, 28, 9, 8),
        (0.5, 28, 14, 14),
        (0.7, 28, 20, 19),
        (0.3, 32, 10, 9),
        (0.7, 32, 23, 22),
        (1e-9, 4, 1, None),
        (1.0, 4, 4, 4),
    ],
)
def test_ratio(ratio, n_layers, paper, reference):
    assert layer_count(n_layers, ratio=ratio) == paper
    assert layer_count(n_layers, ratio=np.float64(ratio)) == paper
    if reference is None:
        with pytest.raises(ValueError, match="no layer in preset reference"):
            layer_count(n_layers, ratio=ratio, preset="reference")
    else:
        assert layer_count(n_layers, ratio=ratio, preset="reference") == reference


def test_ratio_zero_is_no_layer_in_paper_and_refused_in_reference():
    assert layer_count(30, ratio=0.0) == 0
    assert choose("gaussian", 30, ratio=0.0) == ()
    with pytest.raises(ValueError, match="no layer"):
        layer_count(30, ratio=0.03, preset="reference")


@pytest.mark.parametrize("ratio", [-0.1, 1.0001, math.nan, math.inf])
def test_ratio_out_of_range(ratio):
    with pytest.raises(ValueError, match=r"ratio: .* outside 0 \.\. 1"):
        layer_count(30, ratio=ratio)


def test_ratio_or_count():
    with pytest.raises(ValueError, match="either a ratio or a count"):
        layer_count(30)
    with pytest.raises(ValueError, match="either a ratio or a count"):
        layer_count(30, ratio=0.5, count=3)
    with pytest.raises(ValueError, match=r"count: 31 is outside 0 \.\. 30"):
        layer_count(30, count=31)


# ---- scores ----


@pytest.mark.parametrize("preset", ["paper", "reference"])
@pytest.mark.parametrize("n_layers", [1, 4, 5, 28, 30])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
def test_scores_and_choice_as_the_oracle(preset, n_layers, alpha):
    mass = np.random.default_rng(n_layers).random(n_layers)
    found = scores_of(mass, preset)
    expected = oracle.scores(mass, alpha=alpha, preset=preset)
    np.testing.assert_allclose(found.scores(alpha), expected, atol=2e-6)
    for strategy in STRATEGIES_OF_MASS:
        for count in range(1, n_layers + 1):
            chosen = found.top(count=count, alpha=alpha, strategy=strategy)
            assert len(chosen) == count
            if alpha > 0.0 and strategy != "gaussian":  # no ties
                assert list(chosen) == oracle.chosen_layers(
                    strategy, n_layers, mass=mass, count=count, preset=preset, alpha=alpha
                )


@pytest.mark.parametrize(("n_layers", "paper"), [(4, 1), (5, 1), (28, 13)])
def test_prior_peaks_where_documented(n_layers, paper):
    """mu = L / 2 - 1, a half goes to the lower of two equal layers; (L - 1) / 2 in reference."""
    mass = np.zeros(n_layers)
    paper_scores = scores_of(mass).scores(0.0, sigma=0.5)
    assert int(np.argmax(paper_scores)) == paper
    published = scores_of(mass, "reference").scores(0.0, sigma=0.5)
    np.testing.assert_allclose(published, published[::-1], atol=1e-7)
    assert scores_of(mass).ranking(0.0, mu=2.0, sigma=0.1)[0] == 2


def test_equal_masses_leave_the_choice_to_the_prior_and_ties_to_the_preset():
    mass = [0.3, 0.3, 0.3, 0.3]
    assert scores_of(mass).scores(1.0).tolist() == [0, 0, 0, 0]
    assert scores_of(mass).ranking(1.0) == [0, 1, 2, 3]
    assert scores_of(mass, "reference").ranking(1.0) == [3, 2, 1, 0]
    assert scores_of(mass).top(count=1, alpha=0.5) == (1,)
    assert scores_of([0.3]).scores(0.5).tolist() == pytest.approx(
        [0.5 * math.exp(-0.5 / 400)], 1e-3
    )


# ---- strategies ----


def test_random_is_pythons_own_draw():
    expected = random.Random(42).sample(range(30), 9)
    assert choose("random", 30, ratio=0.3) == tuple(sorted(expected))
    assert choose("random", 30, ratio=0.3, seed=7) != choose("random", 30, ratio=0.3, seed=8)


def test_contiguous_includes_both_ends():
    assert choose("contiguous", 30, first=5, last=15) == tuple(range(5, 16))
    assert choose("contiguous", 30, first=4, last=4) == (4,)
    with pytest.raises(ValueError, match="first: 5 is above last 4"):
        choose("contiguous", 30, first=5, last=4)
    with pytest.raises(ValueError, match=r"30 is outside 0 \.\. 29"):
        choose("contiguous", 30, first=5, last=30)
    with pytest.raises(ValueError, match="last: strategy 'contiguous' needs it"):
        choose("contiguous", 30, first=5)


def test_attention_level_takes_the_next_ranks():
    mass = [0.1, 0.9, 0.5, 0.7, 0.3]
    levels = [scores_of(mass).top(count=2, strategy="attention_level", level=n) for n in (0, 1)]
    assert levels == [(1, 3), (2, 4)]
    with pytest.raises(ValueError, match="level: 2 is outside 0 .. 1, of 2 layers each"):
        scores_of(mass).top(count=2, strategy="attention_level", level=2)


def test_layers_and_all():
    assert choose("layers", 4, layers=[3, 1, 1]) == (1, 3)
    assert choose("layers", 4, layers=[]) == ()
    assert choose("all", 4) == (0, 1, 2, 3)
    assert choose("layers", 4, layers=np.array([1, 3])) == (1, 3)


def test_unknown_strategy_and_missing_mass():
    with pytest.raises(ValueError, match="strategy: expected one of attention, "):
        choose("best", 30, ratio=0.5)
    with pytest.raises(ValueError, match=r"samples with gold answers.*search"):
        choose("search", 30, ratio=0.5)
    with pytest.raises(ValueError, match="mass: strategy 'attention' needs it"):
        choose("attention", 30, ratio=0.5)
    with pytest.raises(ValueError, match="alpha"):
        scores_of([0.1, 0.2]).top(0.5, alpha=1.5)


# ---- calibration ----


@pytest.fixture(scope="module")
def pair(tiny, device):
    """(folder, sender, receiver) of a tiny llama."""
    folder = tiny("llama")
    model = kvcomm.Model.load(folder, device=device)
    return folder, kvcomm.Sender(model), kvcomm.Receiver(model)


CONTEXTS = [[5, 9, 31, 77, 200, 14, 3], [8, 8, 120], [44]]
QUESTIONS = [[10, 20, 30, 40], [7, 1], [99, 98, 97, 96, 95]]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("preset", ["paper", "reference"])
def test_calibration_as_the_oracle(tiny, device, family, preset):
    folder = tiny(family)
    model = kvcomm.Model.load(folder, device=device)
    found = kvcomm.calibrate(
        kvcomm.Sender(model),
        kvcomm.Receiver(model),
        list(zip(CONTEXTS, QUESTIONS, strict=True)),
        preset=preset,
    )
    reference = oracle.read_folder(folder)
    expected = np.zeros(model.n_layers)
    for context, question in zip(CONTEXTS, QUESTIONS, strict=True):
        run = oracle.read(reference, context)
        given = oracle.send(reference, [run], range(model.n_layers), preset=preset)
        expected += oracle.layer_masses(
            reference, question, given, start=len(context), preset=preset
        )
    np.testing.assert_allclose(found.mass, expected / len(CONTEXTS), rtol=1e-4, atol=1e-7)
    assert found.sample_mass.shape == (3, model.n_layers, model.n_heads)
    assert (found.n_samples, found.n_layers) == (3, model.n_layers)


def test_skipping_the_first_token_is_its_own_switch(pair):
    """Windowed layers too: the first token is skipped, not the first one still in the window."""
    folder, sender, receiver = pair
    reference = oracle.read_folder(folder)
    context, question = CONTEXTS[0], QUESTIONS[0]
    given = oracle.send(reference, [oracle.read(reference, context)], range(4))
    run = oracle.exchange(reference, question, given, start=len(context), layers=range(4))
    for skip in (False, True):
        expected = [
            oracle.mean_mass(run.weights[layer], len(context), skip=int(skip)) for layer in range(4)
        ]
        found = kvcomm.calibrate(sender, receiver, [(context, question)], skip_first=skip)
        np.testing.assert_allclose(found.mass, expected, rtol=1e-4)
        assert found.skip_first is skip
        other = kvcomm.calibrate(sender, receiver, [(context, question)], skip_first=not skip)
        np.testing.assert_allclose(found.skipping(not skip).mass, other.mass, rtol=1e-12)
        assert found.skipping(not skip).skip_first is not skip
        assert found.skipping(skip) is found


@pytest.mark.parametrize(("preset", "skipped"), [("paper", False), ("reference", True)])
def test_the_preset_decides_about_the_first_token(pair, preset, skipped):
    _, sender, receiver = pair
    sample = [(CONTEXTS[0], QUESTIONS[0])]
    found = kvcomm.calibrate(sender, receiver, sample, preset=preset)
    asked = kvcomm.calibrate(sender, receiver, sample, preset=preset, skip_first=skipped)
    assert found.skip_first is skipped
    assert found.sample_mass.tolist() == asked.sample_mass.tolist()
    assert (found.sample_first > 0).all()


def test_auto_leaves_the_first_token_out_unless_attention_rests_on_it(pair):
    """The share is that of the oracle's weights; a context of one token is all first token."""
    folder, sender, receiver = pair
    reference = oracle.read_folder(folder)
    for context, counted in ((CONTEXTS[0], False), (CONTEXTS[2], True)):
        sample = (context, QUESTIONS[0])
        found = kvcomm.calibrate(sender, receiver, [sample], skip_first="auto")
        given = oracle.send(reference, [oracle.read(reference, context)], range(4))
        run = oracle.exchange(reference, sample[1], given, start=len(context), layers=range(4))
        whole, rest = (
            sum(oracle.mean_mass(run.weights[n], len(context), skip=skip) for n in (2, 3))
            for skip in (0, 1)
        )
        assert found.first_share == pytest.approx((whole - rest) / whole, rel=1e-4)
        assert (found.first_share > 0.5) is counted
        assert found.skip_first is not counted
        asked = kvcomm.calibrate(sender, receiver, [sample], skip_first=not counted)
        np.testing.assert_allclose(found.mass, asked.mass, rtol=1e-12, atol=1e-15)
    assert (
        LayerScores(np.zeros((1, 2, 1)), "paper", "", "", False, np.zeros((1, 2, 1))).first_share
        == 0
    )
    with pytest.raises(ValueError, match="skip_first: expected true, false, 'auto' or nothing"):
        kvcomm.calibrate(sender, receiver, [sample], skip_first="maybe")


def test_a_share_that_is_not_known():
    with pytest.raises(ValueError, match="first_share: the share of the first token was not"):
        _ = scores_of([0.1]).first_share
    assert scores_of([0.1], "reference").skip_first is True
    assert scores_of([0.1]).skipping(False).mass.tolist() == [0.1]
    with pytest.raises(ValueError, match="share of the first token was not measured"):
        scores_of([0.1]).skipping(True)


def test_skip_first_with_windows(tiny, device):
    model = kvcomm.Model.load(tiny("mistral"), device=device)  # every layer sees 8 tokens
    sender, receiver = kvcomm.Sender(model), kvcomm.Receiver(model)
    context = list(range(20, 40))
    counted, skipped = (
        kvcomm.calibrate(sender, receiver, [(context, [1, 2])], skip_first=skip).mass
        for skip in (False, True)
    )
    assert counted.tolist() == skipped.tolist()  # the first token is out of sight anyway


def test_two_senders_and_layer_map(tiny, device):
    """A sender layer is scored by the receiver layer it lands on; all senders' tokens count."""
    deep = tiny("llama", num_hidden_layers=6, seed=3)
    small, large = (kvcomm.Model.load(f, device=device) for f in (tiny("llama"), deep))
    layer_map = kvcomm.published_layer_map(4, 6)
    assert layer_map == (0, 2, 3, 5)
    found = kvcomm.calibrate(
        kvcomm.Sender(small),
        kvcomm.Receiver(large),
        [((CONTEXTS[0], CONTEXTS[1]), QUESTIONS[0])],
        layer_map=layer_map,
    )
    sender, receiver = oracle.read_folder(tiny("llama")), oracle.read_folder(deep)
    runs = [oracle.read(sender, context) for context in CONTEXTS[:2]]
    given = oracle.send(sender, runs, range(4), layer_map=layer_map, n_receiver_layers=6)
    expected = oracle.layer_masses(receiver, QUESTIONS[0], given, start=10, layer_map=layer_map)
    np.testing.assert_allclose(found.mass, expected, rtol=1e-4)


def test_bad_samples(pair):
    _, sender, receiver = pair
    with pytest.raises(ValueError, match="samples: a calibration needs at least one"):
        kvcomm.calibrate(sender, receiver, [])
    with pytest.raises(ValueError, match="context is empty"):
        kvcomm.calibrate(sender, receiver, [("", "question")])
    with pytest.raises(ValueError, match="question is empty"):
        kvcomm.calibrate(sender, receiver, [("context", "")])
    with pytest.raises(ValueError, match="one token is not measured"):
        kvcomm.calibrate(sender, receiver, [([1, 2, 3], [4])], preset="reference")


def test_mass_that_is_no_number(monkeypatch):
    broken = np.array([[[0.2, np.nan], [0.4, 0.6]]])

    class Agent:
        model = SimpleNamespace(n_layers=2, fingerprint="f")

        def read(self, *_args, **_options):
            return None

    monkeypatch.setattr("kvcomm.selection.both_masses", lambda *_, **__: (broken[0], broken[0]))
    found = kvcomm.calibrate(Agent(), Agent(), [([1], [2])], preset="reference")
    assert found.mass.tolist() == [0.0, 0.5]
    with pytest.raises(kvcomm.errors.NumericError, match="sample 0, layer 0"):
        kvcomm.calibrate(Agent(), Agent(), [([1], [2])])


# ---- on disk ----


def test_save_and_load(tmp_path: Path):
    mass = np.random.default_rng(1).random((3, 5, 2))
    scores = LayerScores(mass, "reference", "abc", "def", False, mass / 4, "musique")
    scores.save(tmp_path / "scores.json")
    again = LayerScores.load(tmp_path / "scores.json")
    assert again.sample_mass.tolist() == mass.tolist()
    assert (again.preset, again.sender, again.receiver) == ("reference", "abc", "def")
    assert (again.skip_first, again.task) == (False, "musique")
    assert again.sample_first.tolist() == (mass / 4).tolist()
    assert again.top(0.5, alpha=0.8) == scores.top(0.5, alpha=0.8)
    assert [p.name for p in tmp_path.iterdir()] == ["scores.json"]


@pytest.mark.parametrize(("preset", "skipped"), [("paper", False), ("reference", True)])
def test_load_version_1(tmp_path: Path, preset, skipped):
    """Written before the first token's place was recorded: it was the preset's."""
    path = tmp_path / "scores.json"
    fields = {"format": "kvcomm.layer_scores", "version": 1, "preset": preset}
    fields |= {"sender": "s", "receiver": "r", "mass": [0.5], "sample_mass": [[[0.5]]]}
    path.write_text(json.dumps(fields))
    again = LayerScores.load(path)
    assert (again.skip_first, again.sample_first, again.task) == (skipped, None, None)
    assert again.mass.tolist() == [0.5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3}, "version is 3, expected 1 or 2"),
        ({"skip_first": None}, "skip_first is None, expected true or false"),
        ({"sample_first": [[[1.0]]]}, r"sample_first has shape \(1, 1, 1\), expected \(1, 2, 1\)"),
        ({"format": "x"}, "format 'x', expected 'kvcomm.layer_scores'"),
        ({"sample_mass": [1.0]}, "sample_mass has shape"),
        ({"preset": "mine"}, "preset"),
        ({"task": 3}, "task is 3, expected a name"),
    ],
)
def test_load_refuses(tmp_path: Path, change, message):
    path = tmp_path / "scores.json"
    scores_of([0.1, 0.2]).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(kvcomm.errors.FormatError, match=message):
        LayerScores.load(path)
    for content, told in ((b"\xff\x00 not json", "not such a file"), (b"[1]", "list, expected an")):
        path.write_bytes(content)
        with pytest.raises(kvcomm.errors.FormatError, match=rf"scores\.json.*{told}"):
            LayerScores.load(path)


@pytest.mark.parametrize("value", [-1, -5])
def test_a_negative_number_of_first_tokens_is_refused(pair, value):
    _, sender, receiver = pair
    packet = sender.read([5, 6, 7])
    with pytest.raises(ValueError, match=f"skip_first: {value} is negative"):
        receiver.mass([8, 9], packet, skip_first=value)
    with pytest.raises(TypeError, match="skip_first: expected a number of tokens, found 'auto'"):
        receiver.mass([8, 9], packet, skip_first="auto")


def test_first_tokens_are_left_out_one_by_one(pair):
    _, sender, receiver = pair
    packet = sender.read([5, 6, 7])
    masses = [receiver.mass([8, 9], packet, skip_first=n) for n in range(4)]
    assert (masses[3] == 0).all()
    for more, less in itertools.pairwise(masses):
        assert (more > less).all()
    np.testing.assert_array_equal(masses[1], receiver.mass([8, 9], packet, skip_first=True))
