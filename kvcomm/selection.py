"""Which layers to send: attention mass, scores and strategies (the paper's section 3).

Owns `calibrate` and its result `LayerScores`, the table of strategies, and the number of layers
that a ratio means in either preset. The arithmetic of scores is the core's; mass.py measures the
attention mass; search.py tries layers out. Does not run models itself.
"""

import json
import math
import os
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcomm import _core
from kvcomm.errors import FormatError, MismatchError, NumericError
from kvcomm.mass import both_masses
from kvcomm.packet import Preset, check_layer_map, check_preset, layer_set, write_whole
from kvcomm.turns import Context, Question, is_ids

if TYPE_CHECKING:
    from kvcomm.agents import Positions, Receiver, Sender
    from kvcomm.model import Model

#: Weight of the attention against the Gaussian, per family of models, as the paper set it;
#: `kvcomm reproduce` goes by it. The default elsewhere is 1.0, as the published code runs.
ALPHA = {"llama": 1.0, "qwen": 0.8, "falcon": 0.8}

#: Width of the Gaussian over depth, in layers.
SIGMA = 10.0

#: skip_first "auto" counts the first context token where it holds more than this share of the mass
#: in the upper half of the layers: smollm2-135m has 0.8 and is lost without the token,
#: qwen2.5-coder-0.5b has 0.1 and does not miss it (benchmarks/results/first_token-findings.md).
SINK_SHARE = 0.5

#: Seed of the published random selection.
SEED = 42

#: Version 1 did not say whether the first token was counted: as the preset has it, it is taken.
VERSION = 2
FORMAT = "kvcomm.layer_scores"


def layer_count(
    n_layers: int,
    *,
    ratio: float | Fraction | str | None = None,
    count: int | None = None,
    preset: Preset = "paper",
) -> int:
    """M, the number of layers that a ratio (or a plain count) means.

    In preset paper M = ceil(ratio * L), exactly, with the ratio as it is written: 0.7 is 7/10. In
    preset reference M = int(ratio * L) in double precision, as published.

    Raises
    ------
    ValueError
        Not exactly one of ratio and count; one outside 0 .. 1 or 0 .. L; or preset reference with
        no layer at all, where the published code cannot run.
    """
    check_preset(preset)
    if (ratio is None) == (count is None):
        raise ValueError("layers: expected either a ratio or a count")
    if count is not None:
        if not 0 <= count <= n_layers:
            raise ValueError(f"count: {count} is outside 0 .. {n_layers}")
        n_chosen = count
    else:
        if not math.isfinite(float(ratio)) or not 0 <= float(ratio) <= 1:
            raise ValueError(f"ratio: {ratio} is outside 0 .. 1")
        if preset == "reference":
            n_chosen = int(float(ratio) * n_layers)
        else:
            n_chosen = math.ceil(Fraction(str(ratio)) * n_layers)
    if preset == "reference" and n_chosen == 0:
        asked = f"count: {count}" if ratio is None else f"ratio: {ratio}"
        raise ValueError(f"{asked} of {n_layers} layers is no layer in preset reference")
    return n_chosen


@dataclass(frozen=True)
class _Choice:
    """What a strategy may look at. `best(alpha)` ranks all layers, best first."""

    strategy: str
    n_layers: int
    how_many: Callable[[], int]
    best: Callable[[float], list[int]]
    alpha: float
    seed: int
    level: int | None
    first: int | None
    last: int | None
    layers: Iterable[int] | None


def _attention_level(choice: _Choice) -> Sequence[int]:
    n_chosen, level = choice.how_many(), _needed(choice, "level")
    if level < 0 or (level + 1) * n_chosen > choice.n_layers:
        last = choice.n_layers // max(1, n_chosen) - 1
        raise ValueError(f"level: {level} is outside 0 .. {last}, of {n_chosen} layers each")
    return choice.best(1.0)[level * n_chosen : (level + 1) * n_chosen]


def _random(choice: _Choice) -> Sequence[int]:
    # The very draw of the published runs, which nothing precedes.
    return random.Random(choice.seed).sample(range(choice.n_layers), choice.how_many())


def _contiguous(choice: _Choice) -> Sequence[int]:
    first, last = _needed(choice, "first"), _needed(choice, "last")
    if first > last:
        raise ValueError(f"first: {first} is above last {last}")
    return range(first, last + 1)


def _search(choice: _Choice) -> Iterable[int]:
    if choice.layers is None:
        raise ValueError(
            "layers: strategy 'search' finds them on samples with gold answers: give it the layers "
            "of a SearchResult, from kvcomm.search.search"
        )
    return choice.layers


def _needed(choice: _Choice, name: str) -> Any:
    value = getattr(choice, name)
    if value is None:
        raise ValueError(f"{name}: strategy {choice.strategy!r} needs it")
    return value


#: Every strategy by its name.
STRATEGIES: dict[str, Callable[[_Choice], Iterable[int]]] = {
    "attention": lambda choice: choice.best(1.0)[: choice.how_many()],
    "attention_gaussian": lambda choice: choice.best(choice.alpha)[: choice.how_many()],
    "gaussian": lambda choice: choice.best(0.0)[: choice.how_many()],
    "random": _random,
    "contiguous": _contiguous,
    "attention_level": _attention_level,
    "layers": lambda choice: _needed(choice, "layers"),
    "all": lambda choice: range(choice.n_layers),
    "search": _search,
}

#: Those that look at the attention mass, and so need a calibration.
CALIBRATED = frozenset({"attention", "attention_gaussian", "attention_level"})


def choose(
    strategy: str,
    n_layers: int,
    *,
    mass: ArrayLike | None = None,
    ratio: float | Fraction | str | None = None,
    count: int | None = None,
    preset: Preset = "paper",
    alpha: float = 1.0,
    sigma: float = SIGMA,
    mu: float | None = None,
    seed: int = SEED,
    level: int | None = None,
    first: int | None = None,
    last: int | None = None,
    layers: Iterable[int] | None = None,
) -> tuple[int, ...]:
    """S, the layers of a strategy, ascending.

    Parameters
    ----------
    strategy
        A key of `STRATEGIES`: "attention" (alpha = 1), "attention_gaussian", "gaussian"
        (alpha = 0), "random" (without replacement, by `seed`), "contiguous" (`first` .. `last`,
        both included), "attention_level" (the M layers ranked level * M and after), "layers" (an
        explicit list), "all", "search" (those that `search.search` found, as `layers`).
    n_layers
        L, layers of the sender.
    mass
        Attention mass per layer [L]; needed by the strategies of `CALIBRATED`.
    ratio, count
        M as a share of L (see `layer_count`) or as a number.
    alpha, sigma, mu
        Weight of the attention against the Gaussian; the Gaussian's width and centre in layers,
        counted from 0 (None: the preset's centre).

    Raises
    ------
    ValueError
        An unknown strategy, an argument out of range, or one that the strategy needs and lacks.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy: expected one of {', '.join(STRATEGIES)}, found {strategy!r}")
    if strategy in CALIBRATED and mass is None:
        raise ValueError(f"mass: strategy {strategy!r} needs it")
    check_preset(preset)

    def best(weight: float) -> list[int]:
        values = np.zeros(n_layers) if mass is None else np.asarray(mass, np.float64)
        if values.shape != (n_layers,):
            raise ValueError(f"mass: shape {list(values.shape)}, expected [{n_layers}] layers")
        return _rank(values, weight, sigma, mu, preset)

    choice = _Choice(
        strategy=strategy,
        n_layers=n_layers,
        how_many=lambda: layer_count(n_layers, ratio=ratio, count=count, preset=preset),
        best=best,
        alpha=alpha,
        seed=seed,
        level=level,
        first=first,
        last=last,
        layers=layers,
    )
    return layer_set(STRATEGIES[strategy](choice), n_layers)


def _rank(
    mass: NDArray[np.float64], alpha: float, sigma: float, mu: float | None, preset: Preset
) -> list[int]:
    scores = _core.score(mass, alpha=alpha, sigma=sigma, mu=mu, preset=preset)
    return list(_core.rank(scores, preset=preset))


SkipFirst = bool | Literal["auto"] | None


def check_skip_first(value: object) -> None:
    """Refuse what says nothing about the first context token: ValueError."""
    if value is not None and value != "auto" and not isinstance(value, bool):
        raise ValueError(f"skip_first: expected true, false, 'auto' or nothing, found {value!r}")


@dataclass(frozen=True, eq=False)
class LayerScores:
    """What a calibration found about a pair of models on a kind of data.

    Attributes
    ----------
    sample_mass
        Attention mass of every sample, sender layer and receiver head, float64 [N, L, H]: the
        weight that a query token gives to the context, mean over the query's tokens.
    preset
        Whose rules measured it and choose by it.
    sender, receiver
        Fingerprints of the two models.
    skip_first
        Whether the first context token is left out of the mass; None: as the preset has it.
    sample_first
        The weight on that token alone, in either case, as `sample_mass`; None: not known.
    task
        The task whose records it was measured on; None: not known.
    """

    sample_mass: NDArray[np.float64] = field(repr=False)
    preset: Preset
    sender: str
    receiver: str
    skip_first: bool | None = None
    sample_first: NDArray[np.float64] | None = field(default=None, repr=False)
    task: str | None = None

    def __post_init__(self) -> None:
        if self.skip_first is None:
            object.__setattr__(self, "skip_first", self.preset == "reference")

    def check(self, sender: "Model", receiver: "Model", preset: Preset) -> None:
        """Refuse models or a preset that these are not of: MismatchError."""
        for role, made, model in (
            ("sender", self.sender, sender),
            ("receiver", self.receiver, receiver),
        ):
            if made != model.fingerprint:
                raise MismatchError(
                    f"scores: made with {role} {made[:12]}, the {role} here is {model.name!r} "
                    f"({model.fingerprint[:12]})"
                )
        if self.preset != preset:
            raise MismatchError(f"scores: made with preset {self.preset}, asked for {preset}")

    def skipping(self, first: SkipFirst) -> "LayerScores":
        """The same calibration with the first context token left out of the mass, or counted.

        first: None is the preset's way; "auto" counts the token where attention rests on it, by
        `SINK_SHARE`.

        Raises
        ------
        ValueError
            The calibration is the other one and does not know the token's share, or another value.
        """
        check_skip_first(first)
        if first is None:
            first = self.preset == "reference"
        elif first == "auto":
            first = self.first_share <= SINK_SHARE
        if first == self.skip_first:
            return self
        if self.sample_first is None:
            raise ValueError("skip_first: the share of the first token was not measured")
        change = -self.sample_first if first else self.sample_first
        return replace(self, sample_mass=self.sample_mass + change, skip_first=first)

    @property
    def mass(self) -> NDArray[np.float64]:
        """Attention mass per sender layer, [L]: mean over samples and heads."""
        return self.sample_mass.mean(axis=(0, 2))

    @property
    def n_samples(self) -> int:
        return self.sample_mass.shape[0]

    @property
    def n_layers(self) -> int:
        """L, layers of the sender."""
        return self.sample_mass.shape[1]

    @property
    def first_share(self) -> float:
        """The first context token's share of the mass (itself counted) in the upper half of layers.

        Raises
        ------
        ValueError
            It was not measured.
        """
        if self.sample_first is None:
            raise ValueError("first_share: the share of the first token was not measured")
        upper = self.n_layers // 2
        first = float(self.sample_first[:, upper:].sum())
        whole = float(self.skipping(False).sample_mass[:, upper:].sum())
        return first / whole if whole > 0 else 0.0

    def scores(
        self, alpha: float = 1.0, *, sigma: float = SIGMA, mu: float | None = None
    ) -> NDArray[np.float32]:
        """alpha * min-max mass + (1 - alpha) * Gaussian, float32 [L]."""
        return _core.score(self.mass, alpha=alpha, sigma=sigma, mu=mu, preset=self.preset)

    def ranking(
        self, alpha: float = 1.0, *, sigma: float = SIGMA, mu: float | None = None
    ) -> list[int]:
        """All layers, best first; ties as in the preset."""
        return _rank(self.mass, alpha, sigma, mu, self.preset)

    def top(
        self,
        ratio: float | Fraction | str | None = None,
        *,
        count: int | None = None,
        alpha: float = 1.0,
        strategy: str = "attention_gaussian",
        **options: Any,
    ) -> tuple[int, ...]:
        """S, the M layers of a strategy, ascending; options and errors are those of `choose`."""
        return choose(
            strategy,
            self.n_layers,
            mass=self.mass,
            ratio=ratio,
            count=count,
            preset=self.preset,
            alpha=alpha,
            **options,
        )

    def save(self, path: str | bytes | os.PathLike[str]) -> None:
        """Write as JSON; the file appears whole or not at all."""
        document = {
            "format": FORMAT,
            "version": VERSION,
            "preset": self.preset,
            "skip_first": self.skip_first,
            "sender": self.sender,
            "receiver": self.receiver,
            "task": self.task,
            "mass": self.mass.tolist(),
            "sample_mass": self.sample_mass.tolist(),
            "sample_first": None if self.sample_first is None else self.sample_first.tolist(),
        }
        write_whole(path, (json.dumps(document, allow_nan=False) + "\n").encode())

    @classmethod
    def load(cls, path: str | bytes | os.PathLike[str]) -> "LayerScores":
        """Read what `save` wrote.

        Raises
        ------
        FormatError
            Not such a file, or of another version.
        OSError
            The file cannot be read.
        """
        where = f"layer scores {os.fsdecode(path)!r}"
        try:
            document = json.loads(Path(os.fsdecode(path)).read_bytes())
            if not isinstance(document, dict):
                raise FormatError(f"{where}: {type(document).__name__}, expected an object")
            if document["format"] != FORMAT:
                raise FormatError(f"{where}: format {document['format']!r}, expected {FORMAT!r}")
            if document["version"] not in (1, VERSION):
                raise FormatError(
                    f"{where}: version is {document['version']}, expected 1 or {VERSION}"
                )
            check_preset(document["preset"])
            skip_first, first = document.get("skip_first"), document.get("sample_first")
            if document["version"] > 1 and not isinstance(skip_first, bool):
                raise FormatError(f"{where}: skip_first is {skip_first!r}, expected true or false")
            task = document.get("task")
            if task is not None and not isinstance(task, str):
                raise FormatError(f"{where}: task is {task!r}, expected a name")
            scores = cls(
                np.array(document["sample_mass"], np.float64),
                document["preset"],
                document["sender"],
                document["receiver"],
                skip_first,
                None if first is None else np.array(first, np.float64),
                task,
            )
        except FormatError:
            raise
        except KeyError as error:
            raise FormatError(f"{where}: no field {error}") from None
        except (ValueError, TypeError) as error:
            raise FormatError(f"{where} is not such a file: {error}") from None
        shape = scores.sample_mass.shape
        if len(shape) != 3 or 0 in shape:
            raise FormatError(f"{where}: sample_mass has shape {shape}, expected 3 axes")
        if scores.sample_first is not None and scores.sample_first.shape != shape:
            raise FormatError(
                f"{where}: sample_first has shape {scores.sample_first.shape}, expected {shape}"
            )
        return scores


def calibrate(
    sender: "Sender",
    receiver: "Receiver",
    samples: Iterable[tuple[Context | tuple[Context, ...], Question]],
    *,
    preset: Preset = "paper",
    layer_map: Sequence[int] | None = None,
    positions: "Positions" = "published",
    skip_first: SkipFirst = None,
) -> LayerScores:
    """Measure how much the receiver's question looks at the sender's context, layer by layer.

    For every sample the sender reads the context and hands over all layers; the receiver prefills
    the question, and the attention weight on the context is averaged over query tokens and heads
    (the paper's section 3). The matrix of weights never exists.

    Parameters
    ----------
    samples
        Pairs (context, question), each text or token ids; a tuple of contexts stands for several
        senders, whose tokens all count. One sample is as good as many, the paper found.
    preset
        "paper": a causal softmax, all context tokens count. "reference": the published softmax,
        without the first context token.
    layer_map
        Receiver layer of each sender layer; a sender layer is scored by the attention of the
        receiver layer it lands on.
    positions
        Of several senders, as in `Receiver.answer`.
    skip_first
        Leave the first context token out of the sum (None: the preset's way). "auto": unless
        attention rests on it, by `SINK_SHARE`; no answers are needed, but the bound is one between
        the few models that were measured.

    Returns
    -------
    LayerScores
        Mass over the sender's layers; `LayerScores.skipping` gives the other way without measuring
        again.

    Raises
    ------
    ValueError
        No samples, an empty context or question, a skip_first that is none of these.
    NumericError
        Preset paper and a mass that is not finite; preset reference takes it for 0.
    """
    check_preset(preset)
    target = check_layer_map(layer_map, sender.model.n_layers, receiver.model.n_layers)
    check_skip_first(skip_first)
    skip = preset == "reference" if skip_first in (None, "auto") else bool(skip_first)
    rows = []
    for context, question in samples:
        several = isinstance(context, tuple) and not is_ids(context)
        packets = tuple(
            sender.read(one, preset=preset, trim=False)
            for one in (context if several else (context,))
        )
        whole, rest = both_masses(
            receiver, question, packets, layer_map=layer_map, positions=positions
        )
        chosen = list(target)
        rows.append(((rest if skip else whole)[chosen], (whole - rest)[chosen]))
    if not rows:
        raise ValueError("samples: a calibration needs at least one")
    sample_mass, sample_first = (np.stack(values) for values in zip(*rows, strict=True))
    if not np.isfinite(sample_mass).all():
        if preset == "paper":
            sample, layer, _ = np.argwhere(~np.isfinite(sample_mass))[0]
            raise NumericError(f"attention mass of sample {sample}, layer {layer} is not finite")
        broken = ~np.isfinite(sample_mass).all(axis=2, keepdims=True)
        sample_mass, sample_first = (
            np.where(broken, 0.0, values) for values in (sample_mass, sample_first)
        )
    found = LayerScores(
        sample_mass,
        preset,
        sender.model.fingerprint,
        receiver.model.fingerprint,
        skip,
        sample_first,
    )
    return found.skipping("auto") if skip_first == "auto" else found
