"""The paper's figures that are not about which layers are sent: other methods, over a setting.

Owns what NLD's length, online calibration, one token's hidden state and prepended hidden states are
run with, and the axes of their figures.
"""

import random
from dataclasses import replace

from kvcomm.methods import Options
from kvcomm.methods import methods as make
from kvcomm.methods.kvcomm import KVComm
from kvcomm.plan import Plan
from kvcomm.reproduce import groups, series, sweeps, tables
from kvcomm.reproduce.data import Data
from kvcomm.reproduce.exhibit import Built, Exhibit
from kvcomm.reproduce.groups import RATIOS, Group
from kvcomm.reproduce.measures import Results
from kvcomm.reproduce.runs import NoDataError, Runs
from kvcomm.reproduce.series import NO_ANSWERS, Curves, Map
from kvcomm.selection import SEED
from kvcomm.tasks.mmlu import GROUPS

#: Lengths of NLD's message in Figure 12, in tokens.
MESSAGES = (64, 128, 256, 512, 1024)

#: T of Figure 13, as far as there are records; the last is "once".
ONLINE = (1, 3, 10, 30, 100, 300, 1000)
MIXTURES = (("countries", "multifieldqa_en"), ("countries", "tipsheets"))

TOKENS = ("last", "first", "random", "none")


def message_length(runs: Runs, exhibit: Exhibit) -> Built:
    """Figure 12: NLD with longer and longer messages."""
    lengths = [
        Group(
            f"nld-{length}",
            {f"nld {length}": make(("nld",), Options(message_tokens=length))[0]},
        )
        for length in MESSAGES
    ]
    ran = [groups.base(runs.alpha), *lengths]
    results = [runs.results(one, ran) for one in runs.chosen(exhibit)]
    curves = Curves(
        "tokens of a message", tuple(map(float, MESSAGES)), ("nld",),
        lambda name, n: f"nld {n:.0f}", log=True,
    )  # fmt: skip
    return series.build(runs, exhibit, results, [curves], protocol=tables.preset)


# ---- online calibration --------------------------------------------------------------------


def online(runs: Runs, exhibit: Exhibit) -> Built:
    """Figure 13: the layers chosen again at every T-th record of two mixed data sets."""
    alpha, ratio = runs.alpha, RATIOS[0]
    results, x_of = [], {}
    for found in _mixed(runs, exhibit):
        n = len(found.plan.scored)
        every = [*(t for t in ONLINE if t < n), n]
        chosen = {f"T {t}": KVComm(ratio=ratio, alpha=alpha, online=t) for t in every}
        answers = runs.request.answers
        name = groups.at(f"online-{groups.mode(answers)}", alpha)
        group = Group(name, chosen, answers=answers)
        one = runs.results(found, [groups.base(alpha), group])
        results.append(replace(one, rows={**one.rows, "T once": one.rows[f"T {n}"]}))
        x_of[found.task.name] = tuple(map(float, every))

    def parts(one: Results) -> list[Curves | Map]:
        return [
            Curves(
                "T, records between two choices", x_of[one.task.name], (f"kvcomm {ratio}",),
                lambda name, t: f"T {t:.0f}", log=True,
            )
        ]  # fmt: skip

    notes = (
        "records of both sets in one random order; the last T chooses once.",
        "a record that chooses is answered with the chosen layers; in preset reference its first "
        "answer, with all layers, counts too.",
    )
    return series.build(runs, exhibit, results, parts, notes)


def _mixed(runs: Runs, exhibit: Exhibit) -> list[Data]:
    """The mixtures whose data sets are both there."""
    there = {one.task.name: one for one in runs.chosen(exhibit)}
    found = []
    for names in MIXTURES:
        if all(name in there for name in names):
            found.append(mix([there[name] for name in names]))
        else:
            runs.leave_out("+".join(names), "a data set of the mixture has no data file")
    if not found:
        raise NoDataError(f"{exhibit.name}: none of the mixtures has the data of both its sets")
    return found


def mix(parts: list[Data]) -> Data:
    """Records of several data sets in one seeded random order, as a data set of its own.

    Answers may be as long as the longest of the tasks allows.
    """
    scored = [
        replace(example, id=f"{one.task.name}:{example.id}")
        for one in parts
        for example in one.plan.scored
    ]
    random.Random(SEED).shuffle(scored)
    task = replace(
        parts[0].task,
        name="+".join(one.task.name for one in parts),
        max_new_tokens=max(one.task.max_new_tokens for one in parts),
        truncates=any(one.task.truncates for one in parts),
    )
    calibration = parts[0].plan.calibration
    plan = Plan(calibration, tuple(replace(one, index=n) for n, one in enumerate(scored)), {})
    files = tuple(path for one in parts for path in one.files)
    file_of = {
        f"{one.task.name}:{example}": name for one in parts for example, name in one.file_of.items()
    }
    return Data(task, files, file_of, plan, calibration, (), parts[0].published)


# ---- hidden states -------------------------------------------------------------------------


def _layers(runs: Runs) -> list[int]:
    """Layers that a figure goes through: the first of every block, and the last of all."""
    ends = sweeps.edges(runs)
    return [*ends[:-1], *([ends[-1] - 1] if ends[-1] - 1 not in ends else [])]


def _nearest(layers: list[int], share: float, n_layers: int) -> int:
    return min(layers, key=lambda layer: abs(layer - share * (n_layers - 1)))


def token_importance(runs: Runs, exhibit: Exhibit) -> Built:
    """Figures 2 and 9: one token's hidden state kept, or zeroed, on the output of layer l."""
    layers = _layers(runs)
    late = _nearest(layers, 0.75, runs.n_layers)
    chosen = {
        f"{effect} {token} {layer}": method
        for effect in ("keep", "zero")
        for token in TOKENS
        for layer, method in zip(
            layers,
            make(
                ("token_importance",),
                Options(tokens=(token,), effect=effect, at_layers=tuple(layers)),
            ),
            strict=True,
        )
    }
    names = tuple(chosen)
    results = []
    for found in runs.chosen(exhibit):
        answers = runs.request.answers or not found.task.needs_context
        name = f"token-{sweeps.steps(runs)}-{groups.mode(answers)}"
        group = Group(name, chosen, answers=answers)
        one = runs.results(found, [groups.base(runs.alpha), group])
        rows = {row: one.rows[row] for row in ("baseline", "skyline", *names)}
        rows |= {f"late {token}": rows[f"keep {token} {late}"] for token in TOKENS}
        metric = one.metric if answers else None
        results += _by_group(found, replace(one, rows=rows, metric=metric))

    x = tuple(map(float, layers))

    def curves(effect: str) -> Curves:
        return Curves(
            f"layer l ({effect} one token)", x, TOKENS,
            lambda token, layer: f"{effect} {token} {layer:.0f}",
        )  # fmt: skip

    notes = ("keep: all other tokens are zeroed behind layer l. zero: that one is.",)
    shown = [curves("keep"), curves("zero")]
    return series.build(runs, exhibit, results, shown, notes, tables.preset)


def _by_group(found: Data, one: Results) -> list[Results]:
    """The results by groups of the data set, as the figures of mmlu have them."""
    group_of = {example.id: example.group for example in found.plan.scored}
    known = [name for name in GROUPS if name in group_of.values() and name != "Other"]
    if not known:
        return [one]
    return [
        replace(
            one,
            task=replace(one.task, name=f"{one.task.name} {name}"),
            rows={
                row: {i: record for i, record in lines.items() if group_of.get(i) == name}
                for row, lines in one.rows.items()
            },
            files=found.sources(i for i, group in group_of.items() if group == name),
        )
        for name in known
    ]


def prepend_hidden(runs: Runs, exhibit: Exhibit) -> Built:
    """Figures 3 and 10: all hidden states of the context from layer k, put in at layer j."""
    layers = sweeps.edges(runs)[:-1]
    early, late = layers[min(1, len(layers) - 1)], _nearest(layers, 0.75, runs.n_layers)
    chosen = {
        f"{k},{j}": make(("prepend_hidden",), Options(from_layer=k, to_layer=j))[0]
        for k in layers
        for j in layers
    }
    answers = runs.request.answers
    name = f"prepend-{sweeps.steps(runs)}-{groups.mode(answers)}"
    group = Group(name, chosen, answers=answers)
    results = []
    for found in runs.chosen(exhibit):
        one = runs.results(found, [groups.base(runs.alpha), group])
        rows = dict(one.rows)
        for place, (k, j) in {
            "early, early": (early, early),
            "early, late": (early, late),
            "late, early": (late, early),
        }.items():
            rows[place] = rows[f"{k},{j}"]
        results.append(replace(one, rows=rows))
    shown = tuple(map(str, layers))
    grid = Map("sender layer k", "receiver layer j", shown, shown, lambda k, j: f"{k},{j}")
    return series.build(runs, exhibit, results, [grid], protocol=tables.preset)


# ---- ours ----------------------------------------------------------------------------------


def search(runs: Runs, exhibit: Exhibit) -> Built:
    """Layers searched by likelihood against the selection, on records that neither saw."""
    alpha, results, counts = runs.alpha, [], []
    for found in runs.chosen(exhibit):
        n_records = min(Options.search_records, len(found.apart().pool))
        if not n_records:
            runs.leave_out(f"{exhibit.name} on {found.task.name}", "no record is left to search on")
            continue
        ran = [groups.base(alpha), groups.search(alpha, n_records)]
        results.append(runs.results(found, ran))
        counts.append(f"{found.task.name} {n_records}")
    if not results:
        raise NoDataError(f"{exhibit.name}: no record is left to search on")
    rows = [f"{name} {ratio}" for ratio in RATIOS for name in ("search", "attention")]
    notes = (
        f"both choose on the same records, which are not scored: {', '.join(counts)}.",
        f"{NO_ANSWERS}.",
    )
    return Built(tables.compared(runs, exhibit, results, rows, notes=notes), tuple(results))
