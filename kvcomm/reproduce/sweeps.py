"""The paper's figures about which layers are sent: chunks, alpha, level, calibration size.

Each setting is turned into a set of layers, and only sets that differ are run. Owns these sets and
what the figures' axes are.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvcomm.methods.kvcomm import KVComm
from kvcomm.records import Record
from kvcomm.reproduce import groups, series, tables
from kvcomm.reproduce.data import Data
from kvcomm.reproduce.exhibit import Built, Exhibit
from kvcomm.reproduce.groups import RATIOS, Group
from kvcomm.reproduce.measures import Results
from kvcomm.reproduce.runs import Runs, digest
from kvcomm.reproduce.series import Curves, Map
from kvcomm.selection import LayerScores

Layers = tuple[int, ...]

ALPHAS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)

#: Sizes of the chunks of Figure 6, and of the level of Figure 7, as shares of the paper's depth.
CHUNKS = (10 / 32, 16 / 32)
LEVEL = 9 / 28

#: Most calibration records of Figure 11.
MOST = 128


def run_sets(
    runs: Runs, found: Data, name: str, sets: Mapping[str, Layers], n_calibration: int = 1
) -> Results:
    """The results of sets of layers by setting, with baseline and skyline; equal sets run once."""
    distinct = {layers: KVComm(strategy="layers", given=layers) for layers in sets.values()}
    # Another grid makes other sets, and they need a folder of their own.
    answers = runs.request.answers
    group = Group(
        f"{name}-{groups.mode(answers)}-{digest(sorted(distinct))}",
        {repr(layers): method for layers, method in distinct.items()},
        n_calibration=n_calibration,
        answers=answers,
    )
    ran = runs.results(found, [groups.base(runs.alpha), group])
    rows = {row: ran.rows[row] for row in ("baseline", "skyline")}
    rows |= {setting: ran.rows[repr(layers)] for setting, layers in sets.items()}
    return replace(ran, rows=rows)


def edges(runs: Runs) -> list[int]:
    """Ends of the blocks that a figure over layers is made of: 0 .. L."""
    n_layers = runs.n_layers
    n_blocks = min(runs.request.grid or n_layers, n_layers)
    return [round(place * n_layers / n_blocks) for place in range(n_blocks + 1)]


def steps(runs: Runs) -> str:
    """The grid as a part of a group's name."""
    n_blocks = len(edges(runs)) - 1
    return "all" if n_blocks == runs.n_layers else str(n_blocks)


def _selected(scores: LayerScores, count: int, alpha: float) -> Layers:
    return scores.top(count=count, alpha=alpha)


def contiguous(runs: Runs, exhibit: Exhibit) -> Built:
    """Figure 4: every chunk of layers, beside the selection at the same numbers of layers."""
    ends = edges(runs)
    chunks = {
        f"{first}-{last - 1}": tuple(range(first, last))
        for place, first in enumerate(ends)
        for last in ends[place + 1 :]
    }
    sizes = sorted({len(layers) for layers in chunks.values()})
    results = []
    for found in runs.chosen(exhibit):
        scores = runs.scores(found)
        chosen = {f"selection {n}": _selected(scores, n, runs.alpha) for n in sizes}
        one = run_sets(runs, found, "contiguous", chunks | chosen)
        results.append(_with_means(one, runs.n_layers, chunks, sizes))
    starts, stops = (tuple(map(str, one)) for one in (ends[:-1], [e - 1 for e in ends[1:]]))
    chunk_map = Map(
        "first layer", "last layer", starts, stops,
        lambda first, last: row if (row := f"{first}-{last}") in chunks else "",
    )  # fmt: skip

    def parts(one: Results) -> list[Curves | Map]:
        best = _best(one, chunks, sizes)
        return [
            chunk_map,
            Curves(
                "layers sent", tuple(map(float, sizes)), ("selection", "best chunk"),
                lambda name, n: f"selection {n:.0f}" if name == "selection" else best[int(n)],
            ),
        ]  # fmt: skip

    notes = ("best chunk: the likeliest of its size on these very records, which flatters it.",)
    return series.build(runs, exhibit, results, parts, notes)


def _best(one: Results, chunks: Mapping[str, Layers], sizes: Sequence[int]) -> dict[int, str]:
    """The likeliest chunk of each size, over the records that all chunks have answered."""
    nlls = {row: one.values(row, "nll") for row in chunks}
    ids = set.intersection(*(set(nll) for nll in nlls.values()))
    return {
        size: min(
            (row for row, layers in chunks.items() if len(layers) == size),
            key=lambda row: math.fsum(nlls[row][name] for name in ids),
        )
        for size in sizes
    }


def _with_means(
    one: Results, n_layers: int, chunks: Mapping[str, Layers], sizes: Sequence[int]
) -> Results:
    """Results with rows more, for the claims: per record the mean over several settings.

    "selection" and "best chunks" over all sizes but the whole; "middle chunks" and "outer chunks",
    in the middle third of the layers and not, over the sizes that have both.
    """
    smaller = [size for size in sizes if size < n_layers]
    best = _best(one, chunks, smaller)

    def in_middle(layers: Layers) -> bool:
        return n_layers / 3 <= (layers[0] + layers[-1] + 1) / 2 <= 2 * n_layers / 3

    kinds: dict[bool, list[str]] = {True: [], False: []}
    for size in smaller:
        of_size = {row: in_middle(at) for row, at in chunks.items() if len(at) == size}
        if len(set(of_size.values())) == 2:
            for row, middle in of_size.items():
                kinds[middle].append(row)
    rows = dict(one.rows)
    for name, parts in (
        ("selection", [f"selection {size}" for size in smaller]),
        ("best chunks", list(best.values())),
        ("middle chunks", kinds[True]),
        ("outer chunks", kinds[False]),
    ):
        if parts:
            rows[name] = _mean(one, parts)
    return replace(one, rows=rows)


def _mean(one: Results, parts: Sequence[str]) -> dict[str, Record]:
    """Per record the mean over several rows, where all of them have a value."""
    found: dict[str, Record] = {}
    for field in ("nll", *([one.metric] if one.metric else [])):
        values = [one.values(row, field) for row in parts]
        for name in values[0]:
            if all(name in of for of in values):
                mean = sum(of[name] for of in values) / len(values)
                found.setdefault(name, {})[field] = mean
    return found


def chunk_starts(runs: Runs, exhibit: Exhibit) -> Built:
    """Figure 6: a chunk of fixed size from every layer on, against the selection."""
    n_layers = runs.n_layers
    sizes = sorted({max(1, round(share * n_layers)) for share in CHUNKS})
    step = max(1, round(n_layers / runs.request.grid)) if runs.request.grid else 1
    starts = tuple(range(0, n_layers - sizes[0] + 1, step))
    chunks = {
        f"{size} from {start}": tuple(range(start, start + size))
        for size in sizes
        for start in starts
        if start + size <= n_layers
    }
    results = []
    for found in runs.chosen(exhibit):
        scores = runs.scores(found)
        chosen = {f"{n} selected": _selected(scores, n, runs.alpha) for n in sizes}
        results.append(run_sets(runs, found, "chunk-starts", chunks | chosen))
    names = tuple(f"{n} {kind}" for n in sizes for kind in ("in a chunk", "selected"))

    def row(name: str, start: float) -> str:
        size, _, kind = name.partition(" ")
        chunk = f"{size} from {start:.0f}"
        return f"{size} selected" if kind == "selected" else chunk if chunk in chunks else ""

    curves = Curves("first layer of the chunk", tuple(map(float, starts)), names, row)
    return series.build(runs, exhibit, results, [curves])


def alphas(runs: Runs, exhibit: Exhibit) -> Built:
    """Figures 5 and 15: the selection at several alpha, against the number of layers."""
    sizes = edges(runs)[1:]
    results = []
    for found in runs.chosen(exhibit):
        scores = runs.scores(found)
        sets = {f"{alpha:g} {n}": _selected(scores, n, alpha) for alpha in ALPHAS for n in sizes}
        results.append(run_sets(runs, found, "alpha", sets))
    curves = Curves(
        "layers sent", tuple(map(float, sizes)), tuple(f"alpha {alpha:g}" for alpha in ALPHAS),
        lambda name, n: f"{name.removeprefix('alpha ')} {n:.0f}",
    )  # fmt: skip
    return series.build(runs, exhibit, results, [curves], protocol=tables.division)


def levels(runs: Runs, exhibit: Exhibit) -> Built:
    """Figure 7: as many layers, taken from rank r of the attention on."""
    n_layers = runs.n_layers
    size = max(1, round(LEVEL * n_layers))
    starts = tuple(range(0, n_layers - size + 1, max(1, size // 3)))
    results = []
    for found in runs.chosen(exhibit):
        ranking = runs.scores(found).ranking(1.0)
        sets = {f"rank {r}": tuple(sorted(ranking[r : r + size])) for r in starts}
        # The ends by names that do not depend on the depth, for the claims.
        sets |= {"top": sets["rank 0"], "bottom": sets[f"rank {starts[-1]}"]}
        results.append(run_sets(runs, found, "level", sets))
    curves = Curves(
        f"rank of the first of {size} layers", tuple(map(float, starts)), ("recovered",),
        lambda name, r: f"rank {r:.0f}",
    )  # fmt: skip
    return series.build(runs, exhibit, results, [curves], protocol=tables.division)


def calibration(runs: Runs, exhibit: Exhibit) -> Built:
    """Figure 11: layers chosen on 1, 2, 4 .. 128 records, scored on none of them."""
    results, sizes_of = [], {}
    for found in runs.chosen(exhibit):
        most = min(MOST, len(found.pool))
        sizes = [2**power for power in range(most.bit_length()) if 2**power <= most]
        sets = {
            f"{ratio} {size}": runs.scores(found, size).top(ratio, alpha=runs.alpha)
            for ratio in RATIOS
            for size in sizes
        }
        sets |= {
            f"{end} {ratio}": sets[f"{ratio} {size}"]
            for ratio in RATIOS
            for end, size in (("one", sizes[0]), ("most", sizes[-1]))
        }
        sizes_of[found.task.name] = tuple(map(float, sizes))
        results.append(run_sets(runs, found, "calibration", sets, n_calibration=sizes[-1]))

    def parts(one: Results) -> list[Curves | Map]:
        return [
            Curves(
                "calibration records", sizes_of[one.task.name],
                tuple(f"ratio {ratio}" for ratio in RATIOS),
                lambda name, n: f"{name.removeprefix('ratio ')} {n:.0f}", log=True,
            )
        ]  # fmt: skip

    notes = ("the records that calibrate are not scored, in preset paper.",)
    return series.build(runs, exhibit, results, parts, notes)


def first_token(runs: Runs, exhibit: Exhibit) -> Built:
    """Ours: the first context token counted in the attention mass, or left out of it."""
    results = []
    for found in runs.chosen(exhibit):
        scores = runs.scores(found)
        sets = {
            f"{name} {ratio}": scores.skipping(skip).top(ratio, alpha=runs.alpha)
            for name, skip in (("counted", False), ("left out", True))
            for ratio in RATIOS
        }
        results.append(run_sets(runs, found, "first-token", sets))
    rows = [f"{name} {ratio}" for ratio in RATIOS for name in ("counted", "left out")]
    notes = ("counted, left out: the first context token, in the mass that layers are chosen by.",)
    return Built(tables.compared(runs, exhibit, results, rows, notes=notes), tuple(results))
