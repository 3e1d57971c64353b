"""Strategy `search` against trying everything by hand, the plain way, through Receiver.score."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

import kvcomm
from kvcomm import search as module
from kvcomm.errors import MismatchError
from kvcomm.search import Sample, SearchResult, search
from kvcomm.selection import choose

N_LAYERS = 5
CONTEXTS = [[5, 9, 31, 77, 200, 14, 3], [8, 8, 120], [44]]
QUESTIONS = [[10, 20, 30, 40], [7, 1], [99, 98, 97, 96, 95]]
# Alternatives of different lengths; answers of one token, which need no pass of their own.
ANSWERS = [[[7, 8, 9], [4]], [50, 60], [[3], [12]]]
SAMPLES = list(zip(CONTEXTS, QUESTIONS, ANSWERS, strict=True))


def agents(folder, device):
    model = kvcomm.Model.load(folder, device=device)
    return kvcomm.Sender(model), kvcomm.Receiver(model)


@pytest.fixture(scope="module")
def pair(tiny, device):
    return agents(tiny("llama", num_hidden_layers=N_LAYERS), device)


def plain(pair, layers, samples=SAMPLES, preset="paper", **options) -> float:
    """The summed nll of a set of layers, sent alone and scored from layer 0."""
    sender, receiver = pair
    options |= {"preset": preset}
    return sum(
        receiver.score(
            question, answers, sender.read(context, layers, preset=preset), **options
        ).nll
        for context, question, answers in samples
    )


def grown(layers, n_layers=N_LAYERS):
    return [tuple(sorted((*layers, n))) for n in range(n_layers) if n not in layers]


def greedy(pair, count, **options) -> list[tuple[int, ...]]:
    """The sets that adding the best layer leads through, each tried the plain way."""
    path = [()]
    for _ in range(count):
        path.append(min(grown(path[-1]), key=lambda one: (plain(pair, one, **options), one)))
    return path


def test_one_layer_is_the_best_of_all_sets_of_one(pair):
    found = search(*pair, SAMPLES, 1)
    nll, layers = min((plain(pair, (n,)), (n,)) for n in range(N_LAYERS))
    assert (found.layers, found.nll) == (layers, nll)
    assert found.n_evaluations == N_LAYERS


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "mistral"])
@pytest.mark.parametrize("preset", ["paper", "reference"])
@pytest.mark.parametrize("shift_back", [False, True])
def test_greedy_as_by_hand_bit_for_bit(tiny, device, family, preset, shift_back):
    """Every nll on the way is the one that the plain way gives, to the last bit."""
    pair = agents(tiny(family, num_hidden_layers=N_LAYERS), device)
    options = {"preset": preset, "shift_back": shift_back}
    found = search(*pair, SAMPLES, 3, **options)
    assert [step.layers for step in found.steps] == greedy(pair, 3, **options)
    assert [step.nll for step in found.steps] == [
        plain(pair, step.layers, **options) for step in found.steps
    ]
    assert found.layers == found.steps[-1].layers
    assert found.n_evaluations == 5 + 4 + 3
    assert found.all_layers_nll == plain(pair, range(N_LAYERS), **options)


def test_every_candidate_has_the_plain_bits(pair):
    """Wherever a candidate begins, and however many run together."""
    sender, receiver = pair
    records = [Sample(*one) for one in SAMPLES]
    packets = [(sender.read(one.context),) for one in records]
    trials = module._Trials(receiver, records, packets, range(N_LAYERS), {})
    base = trials.keep(trials.keep(trials.start(), (1, 3)), (1, 2, 3))
    sets = [one for n in range(4) for one in itertools.combinations(range(N_LAYERS), n)]
    expected = [plain(pair, one) for one in sets]
    assert trials.nlls(base, sets) == expected
    assert [trials.nlls(base, [one])[0] for one in sets] == expected


def test_shared_layers_are_not_run_again(pair):
    """A step runs layers d .. L - 1 for the candidate that adds d: half the work, counted."""
    sender, receiver = pair
    records = [Sample([1, 2, 3], [4, 5, 6, 7], [8])]  # one answer token: prompts only
    trials = module._Trials(receiver, records, [(sender.read([1, 2, 3]),)], range(N_LAYERS), {})
    base = trials.start()
    before = receiver.counts["linear_flops"]
    trials.nlls(base, [(n,) for n in range(N_LAYERS)])
    shared = receiver.counts["linear_flops"] - before
    before = receiver.counts["linear_flops"]
    receiver.score([4, 5, 6, 7], [8])
    whole = receiver.counts["linear_flops"] - before
    c = receiver.model.config.core
    width = (2 * c["n_heads"] + 2 * c["n_kv_heads"]) * c["head_dim"] + 3 * c["hidden_dim"]
    layer = 2.0 * 4 * c["dim"] * width  # all four tokens through q, k, v, o and the gated MLP
    assert shared == N_LAYERS * whole - (0 + 1 + 2 + 3 + 4) * layer


def test_beam_holds_the_greedy_set_and_better_ones(pair):
    results = [search(*pair, SAMPLES, 3, beam=beam) for beam in (1, 2, 3, 50)]
    assert results[0].nll == plain(pair, greedy(pair, 3)[-1])
    assert all(one.nll <= results[0].nll for one in results)
    # A beam that holds every set is a search over all of them.
    every = itertools.combinations(range(N_LAYERS), 3)
    assert results[-1].layers == min(every, key=lambda one: (plain(pair, one), one))
    assert results[-1].nll == min(
        plain(pair, one) for one in itertools.combinations(range(N_LAYERS), 3)
    )


def test_a_search_goes_on_from_one_of_fewer_layers_or_more(pair):
    one, three = search(*pair, SAMPLES, 1), search(*pair, SAMPLES, 3)
    seen = []
    found = search(*pair, SAMPLES, 3, after=one, watch=seen.append)
    assert found == replace(three, n_evaluations=three.n_evaluations - one.n_evaluations)
    assert tuple(seen) == found.steps[1:]
    assert search(*pair, SAMPLES, 1, after=three) == replace(one, n_evaluations=0)
    back = search(*pair, SAMPLES, 3, after=one, backward=True)
    assert back.steps == search(*pair, SAMPLES, 3, backward=True).steps


def test_only_a_greedy_search_on_as_many_samples_is_gone_on_from(pair):
    one = search(*pair, SAMPLES, 1)
    with pytest.raises(ValueError, match="after: goes with no beam"):
        search(*pair, SAMPLES, 3, after=one, beam=2)
    with pytest.raises(ValueError, match="without a backward pass"):
        search(*pair, SAMPLES, 3, after=replace(one, steps=(*one.steps, one.steps[-1])))
    with pytest.raises(MismatchError, match=f"number of samples {len(SAMPLES)}, here 1"):
        search(*pair, SAMPLES[:1], 3, after=one)
    with pytest.raises(MismatchError, match="after: preset paper, here reference"):
        search(*pair, SAMPLES, 3, after=one, preset="reference")


def test_backward_drops_or_replaces_while_it_gains(pair):
    forward = search(*pair, SAMPLES, 3)
    found = search(*pair, SAMPLES, 3, backward=True)
    current = forward.layers
    while True:
        fewer = [tuple(n for n in current if n != gone) for gone in current]
        dropped = min(fewer, key=lambda one: (plain(pair, one), one))
        swaps = [one for one in grown(dropped) if one != current]
        best = min([dropped, *swaps], key=lambda one: plain(pair, one))
        if plain(pair, best) >= plain(pair, current):
            break
        current = best
    assert found.layers == current
    assert found.nll == plain(pair, current) <= forward.nll
    assert found.steps[: len(forward.steps)] == forward.steps
    falling = [step.nll for step in found.steps[len(forward.steps) - 1 :]]
    assert falling == sorted(falling, reverse=True)


def test_backward_changes_something_here(tiny, device):
    """The loop above is walked: with this seed a layer is replaced or dropped."""
    results = []
    for seed in range(4):
        pair = agents(tiny("llama", num_hidden_layers=N_LAYERS, seed=seed), device)
        both = [search(*pair, SAMPLES, 3, backward=back) for back in (False, True)]
        assert both[1].nll == plain(pair, both[1].layers)
        results.append(both[1].nll < both[0].nll)
    assert any(results)


def test_other_depths_and_several_senders(tiny, device):
    small, large = (agents(f, device) for f in (tiny("llama"), tiny("llama", num_hidden_layers=6)))
    pair = (small[0], large[1])
    layer_map = kvcomm.published_layer_map(4, 6)
    sample = ((CONTEXTS[0], CONTEXTS[1]), QUESTIONS[0], ANSWERS[0])
    options = {"layer_map": layer_map, "positions": "sequential"}
    found = search(*pair, [sample], 2, **options)

    def nll(layers):
        packets = tuple(pair[0].read(one, layers) for one in sample[0])
        return pair[1].score(sample[1], sample[2], packets, **options).nll

    first = min(((n,) for n in range(4)), key=nll)
    assert [step.layers for step in found.steps] == [(), first, min(grown(first, 4), key=nll)]
    assert [step.nll for step in found.steps] == [nll(step.layers) for step in found.steps]


def test_how_many_and_what_was_measured(pair):
    found = search(*pair, SAMPLES, ratio="0.5")
    assert len(found.layers) == 3  # ceil(2.5)
    assert len(search(*pair, SAMPLES, ratio=0.5, preset="reference").layers) == 2
    everything = search(*pair, SAMPLES, N_LAYERS, backward=False)
    assert everything.layers == tuple(range(N_LAYERS))
    assert everything.nll == found.all_layers_nll
    nothing = search(*pair, SAMPLES, 0)
    assert (nothing.layers, nothing.n_evaluations) == ((), 0)
    assert nothing.nll == pytest.approx(found.baseline_nll, rel=1e-5)  # rope is relative
    assert (found.n_samples, found.preset, found.recovered) == (3, "paper", None)
    assert found.sender == found.receiver == pair[0].model.fingerprint


def test_recovered_is_of_the_records_searched_on(pair):
    """Skyline prompts as ids; by hand from the three sums."""
    samples = [Sample(*one, skyline=[*one[0], *one[1]]) for one in SAMPLES]
    found = search(*pair, samples, 2)
    skyline = sum(pair[1].score(one.skyline, one.answers).nll for one in samples)
    baseline = sum(pair[1].score(one.question, one.answers).nll for one in samples)
    assert (found.skyline_nll, found.baseline_nll) == (skyline, baseline)
    expected = None if skyline >= baseline else (baseline - found.nll) / (baseline - skyline)
    assert found.recovered == expected
    numbers = {"layers": (1,), "steps": (module.Step((1,), 4.0),), "baseline_nll": 6.0}
    numbers |= {"all_layers_nll": 1.0, "skyline_nll": 2.0, "n_samples": 1, "n_evaluations": 1}
    assert SearchResult(**numbers, preset="paper", sender="s", receiver="r").recovered == 0.5


def test_texts_and_ids_are_the_same_search(tiny, device):
    pair = agents(tiny("llama"), device)
    tokenizer = pair[0].model.tokenizer
    texts = ("the cat sat on the mat", "where sat the cat", "mat")

    def ids(message):
        return tokenizer.chat([{"role": "user", "content": message}], add_generation_prompt=True)

    sample = Sample(
        ids(kvcomm.prompts.sender_message(texts[0])),
        ids(kvcomm.prompts.receiver_message(texts[1])),
        np.array(tokenizer.encode(texts[2])),
        ids(kvcomm.prompts.skyline_message(*texts[:2])),
    )
    of_texts, of_ids = search(*pair, [texts], 2), search(*pair, [sample], 2)
    assert of_texts == of_ids
    assert math.isfinite(of_texts.skyline_nll)


def test_watch_sees_every_step(pair):
    seen = []
    found = search(*pair, SAMPLES, 3, backward=True, watch=seen.append)
    assert tuple(seen) == found.steps[1:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": []}, "samples: a search needs at least one, with its gold answers"),
        ({"count": 6}, r"count: 6 is outside 0 \.\. 5"),
        ({"count": None}, "either a ratio or a count"),
        ({"ratio": 0.5}, "either a ratio or a count"),
        ({"count": None, "ratio": 1.5}, r"ratio: 1.5 is outside 0 \.\. 1"),
        ({"beam": 0}, "beam: expected a number of sets above 0, found 0"),
        ({"beam": 1.5}, "beam: expected a number of sets above 0, found 1.5"),
        ({"preset": "mine"}, "preset: expected one of"),
        ({"layer_map": [0]}, "layer_map: expected 5 entries, found 1"),
        ({"samples": [([1], [2], [])]}, "answer"),
        ({"samples": [([1], [], [3])]}, "question is empty"),
        ({"samples": [([], [2], [3])]}, "context is empty"),
        ({"samples": [([1], [2], [10**6])]}, "answer: id 1000000"),
    ],
)
def test_bad_arguments(pair, change, message):
    with pytest.raises(ValueError, match=message):
        search(*pair, **{"samples": SAMPLES, "count": 2, **change})


def test_a_sample_that_is_no_sample(pair):
    with pytest.raises(ValueError, match="samples: expected context, question and gold answers"):
        search(*pair, [([1], [2])], 2)


def test_answers_beyond_the_last_position(pair):
    room = pair[1].model.max_position
    with pytest.raises(ValueError, match=f"has {room}"):
        search(*pair, [([1, 2], [3], [4] * room)], 1)


def test_selection_knows_the_strategy(pair):
    found = search(*pair, SAMPLES, 2)
    assert choose("search", N_LAYERS, layers=found.layers) == found.layers
    with pytest.raises(ValueError, match=r"samples with gold answers.*kvcomm\.search\.search"):
        choose("search", N_LAYERS, count=2)
