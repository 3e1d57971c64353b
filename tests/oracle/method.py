"""KVComm's exchange, attention mass and layer choice, in presets "paper" and "reference".

`spec/method.md` sections 1 to 5; for "reference" what the published code was seen to do. Every rule
is written out per layer: which keys it is given, at which position its own tokens start, how far
ahead a prefill token sees. Nothing is cached: a decode step runs the whole sequence again.
"""

import math
import random
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from oracle.transformer import Array, Block, Model, Run, softmax

Given = list[list[Block]]  # per receiver layer, in the order of the senders


def read(model: Model, tokens: ArrayLike, *, position: int = 0) -> Run:
    """A sender's prefill."""
    return model.run(tokens, positions=position)


def depth_map(n_sender: int, n_receiver: int) -> list[int]:
    """The published map of layers between depths; halves go to the even neighbour."""
    return [round((layer + 0.5) * n_receiver / n_sender - 0.5) for layer in range(n_sender)]


def send(
    sender: Model,
    runs: Sequence[Run],
    layers: Collection[int],
    *,
    preset: str = "paper",
    sequential: bool = False,
    layer_map: Sequence[int] | None = None,
    n_receiver_layers: int | None = None,
) -> Given:
    """What every receiver layer is given of one or several senders' prefills.

    layers are the sender's. "reference" sends layer 0 whole as well, and of every other layer that
    is not chosen the first token of the first sender. sequential: a sender's keys are moved behind
    those of the senders before it.
    """
    layer_map = list(range(sender.n_layers)) if layer_map is None else list(layer_map)
    given: Given = [[] for _ in range(n_receiver_layers or sender.n_layers)]
    for layer, target in enumerate(layer_map):
        if layer in layers or (preset == "reference" and layer == 0):
            offset = 0
            for run in runs:
                block = run.block(layer)
                moved = sender.moved(block, layer, offset) if sequential else block
                given[target].append(moved)
                offset += len(block.positions)
        elif preset == "reference":
            given[target].append(runs[0].block(layer).first(1))
    return given


def layer_rules(
    given: Given, start: int, whole: Collection[int], *, preset: str, shift_back: bool
) -> tuple[list[int], list[int]]:
    """(first position, slack) of every receiver layer for the query's prefill.

    start: tokens of all contexts together. whole: receiver layers that hold the whole context.
    """
    positions, slacks = [], []
    for layer, blocks in enumerate(given):
        held = sum(len(block.positions) for block in blocks)
        if layer in whole:
            position, slack = start, 0
        elif preset == "paper":
            position, slack = (0 if shift_back else start), 0
        elif shift_back:
            position, slack = held, 0
        else:
            # One mask, made for a layer of `start` keys, is cut to a layer of `held` keys: own key
            # j is column held + j of it, and row i allows columns up to start + i.
            position, slack = start, start - held
        positions.append(position)
        slacks.append(slack)
    return positions, slacks


def exchange(
    receiver: Model,
    tokens: Sequence[int],
    given: Given,
    *,
    start: int,
    layers: Collection[int],
    preset: str = "paper",
    shift_back: bool = False,
    n_query: int | None = None,
) -> Run:
    """The receiver's run over its prompt and, from token n_query on, what it decoded since.

    layers are the receiver's chosen ones (m(S)); start is the sum of the context lengths.
    """
    whole = set(layers) | ({0} if preset == "reference" else set())
    first, slack = layer_rules(given, start, whole, preset=preset, shift_back=shift_back)
    positions = [position + np.arange(len(tokens)) for position in first]
    return receiver.run(tokens, positions=positions, given=given, slack=slack, n_prefill=n_query)


def generate(
    receiver: Model,
    query: Sequence[int],
    given: Given,
    n_new: int,
    *,
    stop: Collection[int] = (),
    **rules: Any,
) -> list[int]:
    """Greedy ids, the stop id included when it came; `rules` are those of `exchange`."""
    tokens = list(query)
    while len(tokens) < len(query) + n_new:
        run = exchange(receiver, tokens, given, n_query=len(query), **rules)
        tokens.append(int(np.argmax(run.logits[-1])))
        if tokens[-1] in stop:
            break
    return tokens[len(query) :]


def answer_nll(
    receiver: Model, query: Sequence[int], answer: Sequence[int], given: Given, **rules: Any
) -> NDArray[np.float64]:
    """Negative log-likelihood in nats of every answer token, teacher-forced after the query."""
    tokens = [*query, *answer]
    run = exchange(receiver, tokens, given, n_query=len(query), **rules)
    rows = run.logits[len(query) - 1 : -1].astype(np.float64)
    return -np.log(softmax(rows)[np.arange(len(answer)), list(answer)])


def mean_mass(weights: Array, n_context: int, *, skip: int = 0) -> float:
    """Weight on the context without its first `skip` tokens, mean over heads and query tokens.

    weights [H, Q, context + own].
    """
    return float(weights[:, :, skip:n_context].sum(-1).mean())


def published_weights(scores: Array, visible: Array) -> Array:
    """The softmax behind the published mass: a visible column gains 1, no column is hidden."""
    return softmax(scores + visible)


def layer_masses(
    receiver: Model,
    query: Sequence[int],
    given: Given,
    *,
    start: int,
    preset: str = "paper",
    layer_map: Sequence[int] | None = None,
) -> NDArray[np.float64]:
    """Attention mass of every sender layer, [L]; `given` must hold all layers whole."""
    layer_map = range(receiver.n_layers) if layer_map is None else layer_map
    run = exchange(receiver, query, given, start=start, layers=set(layer_map), preset=preset)
    masses = []
    for layer in layer_map:
        n_context = sum(len(block.positions) for block in given[layer])
        if preset == "paper":
            masses.append(mean_mass(run.weights[layer], n_context))
        else:
            weights = published_weights(run.scores[layer], run.visible[layer])
            masses.append(mean_mass(weights, n_context, skip=1))
    return np.array(masses)


def normalised(values: ArrayLike, preset: str = "paper") -> Array:
    """Min-max to [0, 1]; zeros when all are equal."""
    if preset == "paper":
        x = np.asarray(values, np.float64)
        spread = x.max() - x.min()
        return (x - x.min()) / spread if spread > 0 else np.zeros_like(x)
    x = np.nan_to_num(np.asarray(values, np.float32), nan=0.0)
    spread = x.max() - x.min()
    return (x - x.min()) / (spread + np.float32(1e-9)) if spread >= 1e-9 else np.zeros_like(x)


def attention_prior(
    n_layers: int, preset: str = "paper", *, mu: float | None = None, sigma: float = 10.0
) -> Array:
    """The Gaussian over depth, [L]; mu in layers counted from 0."""
    if mu is None:
        mu = n_layers / 2 - 1 if preset == "paper" else 0.5 * (n_layers - 1)
    prior = np.exp(-((np.arange(n_layers) - mu) ** 2) / (2 * sigma**2))
    return prior if preset == "paper" else normalised(prior, preset)


def scores(mass: ArrayLike, *, alpha: float = 1.0, preset: str = "paper", **prior: float) -> Array:
    """alpha * normalised mass + (1 - alpha) * prior, [L]."""
    attention = normalised(mass, preset)
    return alpha * attention + (1 - alpha) * attention_prior(len(attention), preset, **prior)


def ranking(score: ArrayLike, preset: str = "paper") -> list[int]:
    """Layers, best first; ties to the lower index in "paper", to the higher in "reference"."""
    score = np.asarray(score)
    sign = 1 if preset == "paper" else -1
    return sorted(range(len(score)), key=lambda layer: (-score[layer], sign * layer))


def layer_count(ratio: float, n_layers: int, preset: str = "paper") -> int:
    """M: the ceiling of ratio * L, with the ratio as written; the floor, in doubles, as published.

    As written: 0.55 of 20 layers are 11, although the double product is a little above 11.
    """
    if preset == "paper":
        return math.ceil(Fraction(str(ratio)) * n_layers)
    return int(ratio * n_layers)


def chosen_layers(
    strategy: str,
    n_layers: int,
    *,
    mass: ArrayLike | None = None,
    count: int = 0,
    preset: str = "paper",
    alpha: float = 1.0,
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """S of a strategy of spec/method.md section 4, sorted.

    options: "seed" (random), "first" and "last" (contiguous), "level" (attention_level: level k are
    the places k * M to (k + 1) * M - 1 of the ranking by mass), "layers" (layers).
    """
    options = options or {}

    def best(weight: float) -> list[int]:
        values = np.zeros(n_layers) if mass is None else mass
        return ranking(scores(values, alpha=weight, preset=preset), preset)

    choose = {
        "attention": lambda: best(1.0)[:count],
        "attention_gaussian": lambda: best(alpha)[:count],
        "gaussian": lambda: best(0.0)[:count],
        "attention_level": lambda: best(1.0)[options["level"] * count :][:count],
        "random": lambda: random.Random(options.get("seed", 42)).sample(range(n_layers), count),
        "contiguous": lambda: range(options["first"], options["last"] + 1),
        "layers": lambda: set(options["layers"]),
        "all": lambda: range(n_layers),
    }
    return sorted(choose[strategy]())
