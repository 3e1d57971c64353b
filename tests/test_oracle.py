"""The oracle is right: against recorded vectors of transformers, and against numbers made by hand.

Everything else in the suite is judged by the oracle, so nothing here uses the product's arithmetic.
"""

import json
import math
from pathlib import Path
from typing import Any

import fixtures
import numpy as np
import oracle
import pytest
from oracle import record_transformers as recorded
from oracle.transformer import own_visibility

# transformers rounds norms, rope angles and softmax to float32 even in a float64 model, which is
# 6e-8 per operation; over seven layers of a few such operations 1e-6 of the largest value was the
# most, in either dtype of the oracle. A wrong base, factor, window or norm moves logits by 1e-2.
TOLERANCE = 3e-6
# Frequencies are powers in float32 there: an exponent rounded at 2^-24 times ln(theta) < 14.
FREQUENCY_TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def vectors() -> dict[str, Any]:
    with np.load(recorded.VECTORS) as file:
        return dict(file)


def far(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference over the largest value."""
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("case", recorded.CASES)
def test_logits_and_hidden_states_are_those_of_transformers(
    case: str, dtype: type, vectors: dict[str, Any]
) -> None:
    family, changes = recorded.CASES[case]
    config, weights = fixtures.build(family, **changes)
    assert recorded.weights_sum(weights) == pytest.approx(vectors[f"{case}/weights"], rel=1e-12)
    model = oracle.Model(config, weights, dtype=dtype)
    run = model.run(recorded.token_ids())
    states = [*(run.hidden[layer] for layer in range(model.n_layers)), run.final]
    hidden = np.stack([state[-1, : recorded.N_VALUES] for state in states])
    assert far(run.logits[list(recorded.ROWS)], vectors[f"{case}/logits"]) < TOLERANCE
    assert far(hidden, vectors[f"{case}/hidden"]) < TOLERANCE


@pytest.mark.parametrize("case", recorded.CASES)
def test_rope_frequencies_are_those_of_transformers(case: str, vectors: dict[str, Any]) -> None:
    family, changes = recorded.CASES[case]
    arch = oracle.architecture_of(fixtures.config_of(family, **changes))
    for layer, rope in enumerate(arch.ropes):
        kind = ""
        if arch.one_plus_norms:
            kind = "full_attention_" if arch.windows[layer] is None else "sliding_attention_"
        frequencies, factor = oracle.rope_of(rope, arch.head_dim)
        expected = vectors[f"{case}/rope/{kind}inv_freq"]
        np.testing.assert_allclose(frequencies, expected, rtol=FREQUENCY_TOLERANCE)
        assert factor == pytest.approx(vectors[f"{case}/rope/{kind}attention_scaling"], rel=1e-9)


def test_the_recorded_cases_differ_where_they_should(vectors: dict[str, Any]) -> None:
    """A recording that an ignored option would not change proves nothing."""
    pairs = [
        ("llama", "llama-eps"),
        ("mistral", "mistral-no-window"),
        ("qwen2", "qwen2-window"),
        ("gemma3", "gemma3-new-rope"),
        ("llama", "linear"),
        ("yarn", "yarn-factor"),
        ("yarn", "yarn-betas"),
    ]
    for one, other in pairs:
        assert far(vectors[f"{one}/logits"], vectors[f"{other}/logits"]) > 1e-2, (one, other)


# Architecture


def test_gemma_windows_and_two_ropes() -> None:
    """Spec row CF-038: layers 0-4 and 6 local (1e4, no factor), layer 5 global (1e6, factor 8)."""
    arch = oracle.architecture_of(fixtures.config_of("gemma3"))
    assert arch.windows == (8, 8, 8, 8, 8, None, 8)
    for layer, rope in enumerate(arch.ropes):
        pair = 3  # its frequency is theta ** (-6 / 16)
        expected = 1e6 ** (-6 / 16) / 8 if layer == 5 else 1e4 ** (-6 / 16)
        assert oracle.inverse_frequencies(rope, 16)[pair] == pytest.approx(expected, rel=1e-12)


def test_absent_and_null_keys_take_the_family_defaults() -> None:
    """Spec rows CF-042 and CF-043."""
    absent = fixtures.ABSENT

    def arch(family: str, **changes: Any) -> oracle.Architecture:
        return oracle.architecture_of(fixtures.config_of(family, **changes))

    assert arch("llama", num_key_value_heads=absent).n_kv_heads == 4
    assert arch("mistral", num_key_value_heads=absent).n_kv_heads == 8
    assert arch("mistral", num_key_value_heads=None).n_kv_heads == 4
    assert arch("qwen2", num_key_value_heads=absent).n_kv_heads == 32
    assert arch("llama", head_dim=None).head_dim == 16
    assert arch("qwen3", head_dim=absent).head_dim == 128
    assert arch("gemma3", head_dim=absent).head_dim == 256
    assert arch("gemma3", tie_word_embeddings=absent).tied
    assert not arch("llama", tie_word_embeddings=absent).tied


def test_partial_rotary_turns_half_of_the_dimensions() -> None:
    """Spec row CF-039: 8 of 16 turn, with partners 4 apart; the rest stays."""
    from oracle.rope import rotate

    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    frequencies = oracle.inverse_frequencies(rope, 16)
    np.testing.assert_allclose(frequencies, [1, 100**-0.25, 0.1, 100**-0.75], rtol=1e-12)
    x = np.arange(1.0, 17.0)[None, None, :]
    turned = rotate(x, [3], frequencies)[0, 0]
    angle = 3 * 0.1  # pair (2, 6)
    assert turned[2] == pytest.approx(3 * math.cos(angle) - 7 * math.sin(angle), rel=1e-12)
    assert turned[6] == pytest.approx(7 * math.cos(angle) + 3 * math.sin(angle), rel=1e-12)
    np.testing.assert_array_equal(turned[8:], x[0, 0, 8:])


def test_gemma_embedding_scale_is_rounded_to_the_stored_type() -> None:
    config, weights = fixtures.build("gemma3", hidden_size=48, head_dim=16)
    table = weights["model.embed_tokens.weight"].astype(np.float64)
    # sqrt(48) = 6.9282: between 4 and 8 bfloat16 steps by 1/32, so 6.9375; float16 by 1/256.
    for stored, scale in (("bf16", 6.9375), ("f16", 6.9296875), ("f32", np.float32(48**0.5))):
        model = oracle.Model(config, weights, stored=stored)
        np.testing.assert_array_equal(model.embed([5]), table[[5]] * float(scale))


# The forward pass's own rules


@pytest.mark.parametrize("family", fixtures.FAMILIES)
def test_given_keys_of_all_layers_equal_one_prompt(family: str) -> None:
    model = oracle.Model(*fixtures.build(family))
    tokens = recorded.token_ids()
    whole = model.run(tokens)
    sender = oracle.read(model, tokens[:25])
    given = oracle.send(model, [sender], range(model.n_layers))
    run = model.run(tokens[25:], positions=25, given=given)
    np.testing.assert_allclose(run.logits, whole.logits[25:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", fixtures.FAMILIES)
def test_moved_keys_equal_keys_made_there(family: str) -> None:
    """Spec row KV-079; with a factor on cos and sin (yarn) the turn must not apply it twice."""
    model = oracle.Model(*fixtures.build(family))
    tokens = recorded.token_ids()[:6]
    here, there = model.run(tokens), model.run(tokens, positions=100)
    for layer in range(model.n_layers):
        moved = model.moved(here.block(layer), layer, 100)
        np.testing.assert_allclose(moved.k, there.keys[layer], rtol=0, atol=1e-12)
        np.testing.assert_array_equal(moved.positions, there.positions[layer])


def test_a_window_hides_far_keys_given_and_own() -> None:
    model = oracle.Model(*fixtures.build("mistral"))
    sender = oracle.read(model, range(10))
    run = model.run(
        range(4), positions=10, given=oracle.send(model, [sender], range(4)), slack=[0, 0, 0, 2]
    )
    expected = [[3 <= c <= 10, 4 <= c <= 11, 5 <= c <= 12, c >= 6] for c in range(14)]
    np.testing.assert_array_equal(run.visible[0].T, expected)
    for layer in range(4):
        assert np.all(run.weights[layer][:, ~run.visible[layer]] == 0)
        np.testing.assert_allclose(run.weights[layer].sum(-1), 1, rtol=1e-12)


def test_a_run_may_start_and_stop_between_layers() -> None:
    model = oracle.Model(*fixtures.build("gemma3"))
    whole = model.run(range(9))
    lower = model.run(range(9), layers=(0, 3))
    upper = model.run(embeddings=lower.hidden[3], layers=(3, 7))
    assert lower.logits is None
    assert sorted(lower.keys) == [0, 1, 2]
    np.testing.assert_array_equal(upper.logits, whole.logits)


# Masks and positions of the exchange: the tables of the published behaviour, by hand


def test_own_visibility_with_slack() -> None:
    expected = [
        [1, 1, 1, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
    ]
    np.testing.assert_array_equal(own_visibility(5, slack=2, n_prefill=3), expected)
    np.testing.assert_array_equal(own_visibility(5), np.tri(5))


@pytest.mark.parametrize(
    ("preset", "shift_back", "positions", "slacks"),
    [
        ("paper", False, [6, 6, 6, 6], [0, 0, 0, 0]),
        ("paper", True, [0, 0, 6, 0], [0, 0, 0, 0]),
        ("reference", False, [6, 6, 6, 6], [0, 5, 0, 5]),
        ("reference", True, [6, 1, 6, 1], [0, 0, 0, 0]),
    ],
)
def test_positions_and_slack_per_layer(
    preset: str, shift_back: bool, positions: list[int], slacks: list[int]
) -> None:
    """Context of 6, layer 2 chosen; "reference" holds layer 0 whole and one token elsewhere."""
    model = oracle.Model(*fixtures.build("llama"))
    given = oracle.send(model, [oracle.read(model, range(6))], [2], preset=preset)
    whole = {2} if preset == "paper" else {0, 2}
    rules = oracle.layer_rules(given, 6, whole, preset=preset, shift_back=shift_back)
    assert rules == (positions, slacks)
    run = oracle.exchange(
        model, range(4), given, start=6, layers=[2], preset=preset, shift_back=shift_back
    )
    held = {"paper": [0, 0, 6, 0], "reference": [6, 1, 6, 1]}[preset]
    for layer in range(4):
        assert run.visible[layer][:, : held[layer]].all()
        np.testing.assert_array_equal(
            run.positions[layer], np.arange(positions[layer], positions[layer] + 4)
        )
        own = [[j <= i + slacks[layer] for j in range(4)] for i in range(4)]
        np.testing.assert_array_equal(run.visible[layer][:, held[layer] :], own)


def test_decoded_tokens_see_all_before_them_and_are_unseen_by_the_query() -> None:
    model = oracle.Model(*fixtures.build("llama"))
    given = oracle.send(model, [oracle.read(model, range(3))], [2], preset="reference")
    rules = {"start": 3, "layers": [2], "preset": "reference"}
    query = oracle.exchange(model, range(4), given, **rules)
    longer = oracle.exchange(model, [*range(4), 9, 8], given, n_query=4, **rules)
    np.testing.assert_allclose(longer.logits[:4], query.logits, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(
        longer.visible[1],  # one context token, look-ahead of 2 inside the query
        [
            [1, 1, 1, 1, 0, 0, 0],
            [1, 1, 1, 1, 1, 0, 0],
            [1, 1, 1, 1, 1, 0, 0],
            [1, 1, 1, 1, 1, 0, 0],
            [1, 1, 1, 1, 1, 1, 0],
            [1, 1, 1, 1, 1, 1, 1],
        ],
    )


#: context length -> lowest query position that changed after layers 0, 1, 2, ... when only the last
#: of 12 query tokens was changed, as the published code was seen to behave (layers 4, 5, 9, 12).
LEAK = {
    12: [11, 0, 0],
    11: [11, 1, 0],
    6: [11, 6, 1, 0],
    3: [11, 9, 7, 5, 5, 5, 3, 1, 0],
    2: [11, 10, 9, 8, 8, 8, 7, 6, 5, 5, 4, 3, 3, 2, 1, 0],
    1: [11] * 18,
}


@pytest.mark.parametrize("n_context", LEAK)
@pytest.mark.parametrize("shift_back", [False, True])
def test_the_published_mask_leaks_as_recorded(n_context: int, shift_back: bool) -> None:
    model = oracle.Model(*fixtures.build("llama", num_hidden_layers=18))
    chosen = [4, 5, 9, 12]
    context = oracle.read(model, range(50, 50 + n_context))
    given = oracle.send(model, [context], chosen, preset="reference")
    rules = {"start": n_context, "layers": chosen, "preset": "reference", "shift_back": shift_back}
    one = oracle.exchange(model, range(12), given, **rules)
    other = oracle.exchange(model, [*range(11), 99], given, **rules)
    first = []
    for layer in range(len(LEAK[n_context])):
        changed = np.abs(one.hidden[layer + 1] - other.hidden[layer + 1]).max(-1) > 0
        first.append(int(np.argmax(changed)))
    assert first == ([11] * len(first) if shift_back else LEAK[n_context])


def test_several_senders() -> None:
    model = oracle.Model(*fixtures.build("llama"))
    runs = [oracle.read(model, range(5)), oracle.read(model, range(40, 43))]
    published = oracle.send(model, runs, [1, 3])
    assert [[len(b.positions) for b in blocks] for blocks in published] == [[], [5, 3], [], [5, 3]]
    assert [list(b.positions) for b in published[1]] == [[0, 1, 2, 3, 4], [0, 1, 2]]
    moved = oracle.send(model, runs, [1, 3], sequential=True)
    assert [list(b.positions) for b in moved[1]] == [[0, 1, 2, 3, 4], [5, 6, 7]]
    there = oracle.read(model, range(40, 43), position=5)
    np.testing.assert_allclose(moved[3][1].k, there.keys[3], rtol=0, atol=1e-12)

    reference = oracle.send(model, runs, [1, 3], preset="reference")
    lengths = [[len(b.positions) for b in blocks] for blocks in reference]
    assert lengths == [[5, 3], [5, 3], [1], [5, 3]]
    np.testing.assert_array_equal(reference[2][0].k, runs[0].keys[2][:, :1])


def test_depth_map() -> None:
    assert oracle.depth_map(4, 6) == [0, 2, 3, 5]
    assert sorted(set(range(32)) - set(oracle.depth_map(28, 32))) == [3, 11, 19, 27]
    assert oracle.depth_map(5, 5) == [0, 1, 2, 3, 4]


def test_layers_that_nothing_maps_to_have_no_keys() -> None:
    sender = oracle.Model(*fixtures.build("llama"))
    run = oracle.read(sender, range(5))
    layer_map = oracle.depth_map(4, 6)
    given = oracle.send(
        sender, [run], [2], preset="reference", layer_map=layer_map, n_receiver_layers=6
    )
    assert [sum(len(b.positions) for b in blocks) for blocks in given] == [5, 0, 1, 5, 0, 1]
    _, slack = oracle.layer_rules(given, 5, {0, 3}, preset="reference", shift_back=False)
    assert slack == [0, 5, 4, 0, 5, 4]


def test_no_layers_is_the_baseline_up_to_rounding() -> None:
    """Spec row KV-086 and the rule of rope: only distances matter."""
    for family in fixtures.FAMILIES:
        model = oracle.Model(*fixtures.build(family))
        given = oracle.send(model, [oracle.read(model, range(30))], [])
        run = oracle.exchange(model, range(9), given, start=30, layers=[])
        np.testing.assert_allclose(run.logits, model.run(range(9)).logits, rtol=0, atol=1e-12)


def test_generate_is_greedy_and_keeps_the_stop_id() -> None:
    model = oracle.Model(*fixtures.build("qwen3"))
    given = oracle.send(model, [oracle.read(model, range(6))], range(4))
    rules = {"start": 6, "layers": range(4)}
    ids = oracle.generate(model, [7, 8], given, 5, **rules)
    tokens = [*range(6), 7, 8]
    for token in ids:  # all layers of one model: the same as one prompt
        assert token == int(np.argmax(model.run(tokens).logits[-1]))
        tokens.append(token)
    stop = ids[2]
    assert (
        oracle.generate(model, [7, 8], given, 5, stop=[stop], **rules)
        == (ids[: ids.index(stop) + 1])
    )
    logits = model.run([*range(6), 7, 8, *ids[:1]]).logits[-2:]
    nll = [np.log(np.exp(row).sum()) - row[t] for row, t in zip(logits, ids[:2], strict=True)]
    np.testing.assert_allclose(
        oracle.answer_nll(model, [7, 8], ids[:2], given, **rules), nll, rtol=1e-10
    )


# Attention mass


def test_mean_mass_by_hand() -> None:
    """Spec row LS-112: context of 5, query of 3, one head of each kind."""
    weights = np.zeros((2, 3, 8))
    weights[0] = [1, 2, 3, 4, 5, 100, 0, 0]
    weights[1, :, 0] = [10, 20, 30]
    # Head 0: 15 in each row. Head 1: 10, 20, 30. Mean of 6 rows.
    assert oracle.mean_mass(weights, 5) == pytest.approx((45 + 60) / 6, rel=1e-15)
    # Without the first column: 14 in each row of head 0, nothing in head 1.
    assert oracle.mean_mass(weights, 5, skip=1) == pytest.approx(42 / 6, rel=1e-15)
    assert oracle.mean_mass(weights, 1, skip=1) == 0


def test_published_weights_by_hand() -> None:
    """A later column is damped by e, not hidden."""
    scores = np.log([[[2.0, 3.0, 1.0, 4.0], [2.0, 3.0, 1.0, 4.0]]])  # context of 2, query of 2
    visible = np.array([[1, 1, 1, 0], [1, 1, 1, 1]], bool)
    weights = oracle.published_weights(scores, visible)
    np.testing.assert_allclose(weights[0, 0], np.array([2, 3, 1, 4 / math.e]) / (6 + 4 / math.e))
    np.testing.assert_allclose(weights[0, 1], np.array([2, 3, 1, 4]) / 10)


@pytest.mark.parametrize("preset", ["paper", "reference"])
def test_layer_masses_count_what_is_stated(preset: str) -> None:
    """With keys of zeros all scores are equal, so the mass is a count of columns."""
    config, weights = fixtures.build("llama")
    for name in weights:
        if "k_proj" in name:
            weights[name] = np.zeros_like(weights[name])
    model = oracle.Model(config, weights)
    runs = [oracle.read(model, range(4)), oracle.read(model, range(3))]
    given = oracle.send(model, runs, range(4))
    masses = oracle.layer_masses(model, range(2), given, start=7, preset=preset)
    expected = {
        # 7 of 8 and 7 of 9 visible columns
        "paper": (7 / 8 + 7 / 9) / 2,
        # without the first sender's first token; the hidden column counts 1 / e
        "reference": (6 / (8 + 1 / math.e) + 6 / 9) / 2,
    }[preset]
    np.testing.assert_allclose(masses, [expected] * 4, rtol=1e-12)


# Scores and choice


def test_normalised() -> None:
    np.testing.assert_allclose(oracle.normalised([2.0, 4.0, 3.0]), [0, 1, 0.5], rtol=1e-15)
    reference = oracle.normalised([0.25, 0.75, 0.5], "reference")
    assert reference.dtype == np.float32
    np.testing.assert_allclose(reference, [0, 1, 0.5], rtol=1e-6)
    # A mass that is not a number counts as 0 there.
    np.testing.assert_allclose(oracle.normalised([np.nan, 1.0], "reference"), [0, 1], rtol=1e-6)


@pytest.mark.parametrize("preset", ["paper", "reference"])
def test_equal_masses_are_zeros_and_the_prior_decides(preset: str) -> None:
    """Spec row LS-114."""
    for mass in ([0.3] * 4, [0.3]):
        np.testing.assert_array_equal(oracle.normalised(mass, preset), np.zeros(len(mass)))
    best = oracle.ranking(oracle.scores([0.3] * 5, alpha=0.5, preset=preset), preset)[0]
    assert best == {"paper": 1, "reference": 2}[preset]  # mu = 1.5 (tie of 1 and 2) and 2


def test_prior_peak() -> None:
    """Spec row LS-115: mu counts layers from 0; the middle is L/2 - 1 and (L - 1)/2."""
    for n_layers, paper, reference in ((4, [1], [1, 2]), (5, [1, 2], [2]), (28, [13], [13, 14])):
        for preset, peak in (("paper", paper), ("reference", reference)):
            prior = oracle.attention_prior(n_layers, preset, sigma=0.5)
            assert np.flatnonzero(prior == prior.max()).tolist() == peak
    prior = oracle.attention_prior(28)
    assert prior[13] == 1
    assert prior[3] == pytest.approx(math.exp(-0.5), rel=1e-15)  # one sigma, 10 layers, away
    np.testing.assert_array_equal(prior[12::-1], prior[14:27])
    reference = oracle.attention_prior(28, "reference")
    assert reference.min() == 0
    assert reference.max() == pytest.approx(1, abs=1e-6)


def test_scores_by_hand() -> None:
    mass = [0.1, 0.3, 0.2]  # normalised 0, 1, 0.5; mu = 0.5
    prior = [math.exp(-0.25 / 200), math.exp(-0.25 / 200), math.exp(-2.25 / 200)]
    expected = [0.2 * prior[0], 0.8 + 0.2 * prior[1], 0.4 + 0.2 * prior[2]]
    np.testing.assert_allclose(oracle.scores(mass, alpha=0.8), expected, rtol=1e-12)


def test_ties() -> None:
    assert oracle.ranking([1.0, 2.0, 2.0, 1.0]) == [1, 2, 0, 3]
    assert oracle.ranking([1.0, 2.0, 2.0, 1.0], "reference") == [2, 1, 3, 0]


def test_layer_count() -> None:
    published = {24: (7, 12, 16), 30: (9, 15, 21), 28: (8, 14, 19), 32: (9, 16, 22)}
    for n_layers, counts in published.items():
        got = tuple(oracle.layer_count(ratio, n_layers, "reference") for ratio in (0.3, 0.5, 0.7))
        assert got == counts
    assert [oracle.layer_count(ratio, 28) for ratio in (0.3, 0.5, 0.7)] == [9, 14, 20]
    assert oracle.layer_count(0.3, 30) == 9
    assert oracle.layer_count(0.55, 20) == 11


def test_every_strategy_by_hand() -> None:
    mass = [0.5, 0.1, 0.9, 0.3, 0.7, 0.2]

    def choose(strategy: str, **rest: Any) -> list[int]:
        return oracle.chosen_layers(strategy, 6, **rest)

    assert choose("attention", mass=mass, count=2) == [2, 4]
    assert choose("attention_gaussian", mass=mass, count=3, alpha=1.0) == [0, 2, 4]
    assert choose("gaussian", count=3) == [1, 2, 3]  # mu = 2
    assert choose("gaussian", count=2, preset="reference") == [2, 3]  # mu = 2.5
    assert choose("attention_level", mass=mass, count=2, options={"level": 1}) == [0, 3]
    assert choose("contiguous", options={"first": 1, "last": 3}) == [1, 2, 3]
    assert choose("layers", options={"layers": [5, 0, 5]}) == [0, 5]
    assert choose("all") == [0, 1, 2, 3, 4, 5]
    assert len(set(choose("random", count=4))) == 4


# The recordings of the published code


def recording(shared: Path, name: str) -> dict[str, Any]:
    return json.loads((shared / "reference" / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["oracle_smollm2.json", "oracle_qwen05.json"])
def test_recorded_choices_follow_from_recorded_masses(shared: Path, name: str) -> None:
    record = recording(shared, name)
    n_layers = record["meta"]["layers"]
    for task in record["calibration"].values():
        for alpha, ranked in task["ranking"].items():
            got = oracle.ranking(
                oracle.scores(task["mass"], alpha=float(alpha), preset="reference"), "reference"
            )
            assert got == ranked
            for ratio, chosen in task["chosen"][alpha].items():
                count = oracle.layer_count(float(ratio), n_layers, "reference")
                assert ranked[:count] == chosen
    for ratio, layers in record["random_selection"]["layers"].items():
        count = oracle.layer_count(float(ratio), n_layers, "reference")
        assert oracle.chosen_layers("random", n_layers, count=count) == sorted(layers)


@pytest.mark.parametrize("name", ["paper_smollm2.json", "paper_qwen05.json"])
def test_recorded_choices_of_the_paper_preset(shared: Path, name: str) -> None:
    record = recording(shared, name)
    mass = record["calibration"]["mass"]
    seen = 0
    for label, layers in record["layers"].items():
        words = dict(word.split("=") for word in label.split() if "=" in word)
        if label.startswith("attention_gaussian"):
            count = oracle.layer_count(float(words["ratio"]), len(mass))
            got = oracle.chosen_layers(
                "attention_gaussian", len(mass), mass=mass, count=count, alpha=float(words["alpha"])
            )
            assert got == sorted(layers), label
            seen += 1
    assert seen == 6


def test_masses_of_a_real_model_are_the_recorded_ones(shared: Path, tmp_path: Path) -> None:
    """SmolLM2, record 0 of HotpotQA, both presets; float32 as recorded, so 1e-4 relative."""
    from kvcomm import catalogue, convert  # only where the model lies; the oracle shares no code

    try:
        folder = convert.convert(catalogue.fetch("smollm2-135m"), tmp_path / "model")
    except OSError as error:
        pytest.skip(f"smollm2-135m is not in the cache and cannot be fetched: {error}")
    model = oracle.read_folder(folder, dtype=np.float32)
    record = recording(shared, "oracle_smollm2.json")
    item = record["items"]["hotpotqa"]["items"][0]
    context, query = item["sender"]["ids"], item["receiver"]["ids"]
    given = oracle.send(model, [oracle.read(model, context)], range(model.n_layers))
    rules = {"start": len(context)}
    expected = record["calibration"]["hotpotqa"]
    reference = oracle.layer_masses(model, query, given, preset="reference", **rules)
    np.testing.assert_allclose(reference, expected["mass"], rtol=1e-4)
    paper = oracle.layer_masses(model, query, given, preset="paper", **rules)
    np.testing.assert_allclose(paper, expected["properly_masked_mass_all_context"], rtol=1e-4)
