"""The paper's tables: which rows they have, and where these come from.

Owns the tables that compare methods over tasks; the published metric and `recovered` are always two
tables. Figures are in sweeps.py and curves.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kvcomm.report.tables import METRICS
from kvcomm.reproduce import groups, paper
from kvcomm.reproduce.exhibit import HEADINGS, Built, Exhibit
from kvcomm.reproduce.groups import RATIOS, Group
from kvcomm.reproduce.measures import PUBLISHED, RECOVERED, Results
from kvcomm.reproduce.runs import Runs
from kvcomm.reproduce.table import Cell, Table
from kvcomm.selection import SEED
from kvcomm.statistics import Interval

_COMPARED = (
    "baseline", "skyline", "nld", "cipher", "ac mean", "ac replace", "ac sum", "kvcomm 0.3",
    "kvcomm 0.5", "kvcomm 0.7", "all layers",
)  # fmt: skip


def _pairs_of_rows(name: str) -> tuple[str, ...]:
    return tuple(row for ratio in RATIOS for row in (f"{name} {ratio}", f"kvcomm {ratio}"))


def preset(runs: Runs) -> str:
    """The preset, for the titles of what calibrates nothing."""
    return f"preset {runs.request.preset}"


def division(runs: Runs) -> str:
    """The preset, and how it divides the records, for titles."""
    how = (
        "published protocol: calibrated on the first records, which are scored too"
        if runs.request.preset == "reference"
        else "calibrated on records that are not scored"
    )
    return f"{preset(runs)}, {how}"


def protocol(runs: Runs) -> str:
    """`division` and alpha, for the titles of what has a selection in it."""
    return f"{division(runs)}, alpha {runs.alpha:g}"


def models(runs: Runs) -> str:
    """The pair, for titles."""
    sender, receiver = (agent.model.name for agent in runs.agents)
    return sender if runs.request.same_model else f"{sender} to {receiver}"


def compared(
    runs: Runs,
    exhibit: Exhibit,
    results: Sequence[Results],
    rows: Sequence[str],
    *,
    printed: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> tuple[Table, ...]:
    """The tables of an exhibit whose columns are tasks: published metric, then recovered.

    printed: numbers of the paper's tables whose values stand beside.
    """
    pair, note = _beside(runs, printed)
    found = {one.task.name: one for one in results}
    columns = [name for name in exhibit.tasks if not _unwanted(runs, name)]
    # What the paper does not have can be asked for on any task.
    columns += [name for name in found if name not in columns]
    failed = [note for one in results for note in one.notes_of_failed]
    helpless = {
        measure: [
            f"reading the context does not clearly help on {', '.join(names)} by this measure, so "
            "no claim is judged there."
        ]
        if (names := [one.task.name for one in results if not one.helps(measure)])
        else []
        for measure in (PUBLISHED, RECOVERED)
    }
    without = [name for name in columns if name not in found]
    missing = [f"no data file for {', '.join(without)}."] if without else []
    shared = [*notes, *failed, *missing]
    metrics = f"published metric: {_metrics(results)}."
    tables = []
    if all(one.metric is not None for one in results):
        tables.append(
            _table(
                runs, exhibit, found, rows, columns, PUBLISHED,
                [metrics, *note, *helpless[PUBLISHED], *shared],
                paper_of=lambda row, task: paper.value(printed, pair, row, task),
            )
        )  # fmt: skip
    about = (
        "recovered: share of what reading the context would have given, from likelihoods of the "
        "gold answers (0 baseline, 1 skyline); the paper does not have it."
    )
    kept = [row for row in rows if row not in ("baseline", "skyline")]
    tables.append(
        _table(
            runs, exhibit, found, kept, columns, RECOVERED, [about, *helpless[RECOVERED], *shared],
            paper_of=lambda row, task: None,
        )
    )  # fmt: skip
    return tuple(tables)


def _unwanted(runs: Runs, task: str) -> bool:
    return runs.request.tasks is not None and task not in runs.request.tasks


def _beside(runs: Runs, printed: Sequence[str]) -> tuple[str | None, list[str]]:
    """The paper's pair whose values stand beside, and a note that names it."""
    if not printed:
        return None, []
    request = runs.request
    pair = request.paper_pair
    if pair is None:
        pair = paper.closest_pair(printed, runs.names, request.same_model)
    if pair is None:
        return None, []
    names = paper.pairs()[pair]
    return pair, [
        f"paper: Table {' and '.join(printed)}, pair {pair} ({names['sender']} to "
        f"{names['receiver']}); other models than these, so only the order of rows compares."
    ]


def _metrics(results: Sequence[Results]) -> str:
    """Which metric is whose: "match for hotpotqa; published ROUGE-L for tmath"."""
    by_metric: dict[str, list[str]] = {}
    for one in results:
        by_metric.setdefault(METRICS.get(one.metric or "", "none"), []).append(one.task.name)
    if len(by_metric) == 1:
        return next(iter(by_metric))
    return "; ".join(f"{metric} for {', '.join(names)}" for metric, names in by_metric.items())


def _table(
    runs: Runs,
    exhibit: Exhibit,
    found: Mapping[str, Results],
    rows: Sequence[str],
    columns: Sequence[str],
    measure: str,
    notes: Sequence[str],
    *,
    paper_of: Callable[[str, str], float | None],
) -> Table:
    cells = {}
    for task in columns:
        for row in rows:
            measured = None
            if task in found:
                measured = found[task].measured(row, measure)
            cells[row, task] = Cell(measured, paper_of(row, task))
    return Table(
        title=f"{exhibit.label}. {exhibit.title}: {measure}. {models(runs)}; {protocol(runs)}.",
        measure=measure,
        corner="method",
        rows=tuple(rows),
        columns=tuple(columns),
        cells=cells,
        sources={task: one.files for task, one in found.items()},
        notes=(*notes, "Ranges: 95% bootstrap intervals over n records."),
        headings=HEADINGS,
    )


# ---- the tables ----------------------------------------------------------------------------


def main(
    numbers: tuple[str, ...], remarks: tuple[str, ...] = ()
) -> Callable[[Runs, Exhibit], Built]:
    """Table 1 or 8: every method on every task."""

    def build(runs: Runs, exhibit: Exhibit) -> Built:
        alpha, wanted = runs.alpha, runs.request.methods
        ran = groups.standing(alpha)
        ran += [make(alpha) for name, make in groups.COMPARED.items() if name in wanted]
        results = [runs.results(one, ran) for one in runs.chosen(exhibit)]
        notes = list(remarks)
        notes += [f"{name}: not asked for." for name in groups.COMPARED if name not in wanted]
        return Built(
            compared(runs, exhibit, results, _COMPARED, printed=numbers, notes=notes),
            tuple(results),
        )

    return build


def over_main(
    rows: tuple[str, ...],
    numbers: tuple[str, ...] = (),
    more: Callable[[float], Group] | None = None,
    notes: tuple[str, ...] = (),
) -> Callable[[Runs, Exhibit], Built]:
    """A table of rows of the main group, and of one group more."""

    def build(runs: Runs, exhibit: Exhibit) -> Built:
        alpha = runs.alpha
        ran = groups.standing(alpha)
        ran += [] if more is None else [more(alpha)]
        results = [runs.results(one, ran) for one in runs.chosen(exhibit)]
        return Built(
            compared(runs, exhibit, results, rows, printed=numbers, notes=notes), tuple(results)
        )

    return build


LARGER_NOTES = (
    "the QASPER and MuSiQue columns of Table 6 look swapped in print and are not shown.",
)
RANDOM = ("baseline", "skyline", *_pairs_of_rows("random"))
RANDOM_NOTES = (f"random: one draw of layers, seed {SEED}, the same for all tasks.",)
SHIFT_BACK = ("baseline", "skyline", *_pairs_of_rows("shift back"))
SHIFT_BACK_NOTES = (
    "shift back (KVComm-S): positions of the receiver start at 0 in layers that are not sent.",
    "in preset paper these layers hold the receiver's own tokens only, whose distances do not "
    "change: rows are equal up to rounding at any n. Preset reference keeps the first context "
    "token there.",
)
CONTROLS = ("baseline", *(name.replace("_", " ") for name in groups.CONTROLS), "kvcomm 0.5")


def two_senders(runs: Runs, exhibit: Exhibit) -> Built:
    """Table 10: the context split between two senders, against one that has all of it."""
    request = runs.request
    wanted = [name for name in ("nld", "cipher") if name in request.methods]
    ran = [groups.base(runs.alpha), groups.main(runs.alpha)]
    ran += [groups.COMPARED[name](runs.alpha) for name in wanted]
    split = [groups.two_senders(name, runs.alpha) for name in (*wanted, "kvcomm")]
    alone = [*wanted, *(f"kvcomm {ratio}" for ratio in RATIOS)]
    rows = [row for name in alone for row in (name, f"{name} two senders")]
    results = []
    for found in runs.chosen(exhibit, split):
        both, single = runs.results(found, split), runs.results(found, ran)
        ids = set(next(iter(both.rows.values())))
        # Records that cannot be split have no second row to compare with.
        kept = {
            row: {name: one for name, one in lines.items() if name in ids}
            for row, lines in (single.rows | both.rows).items()
        }
        results.append(replace(single, rows=kept, files=found.sources(ids)))
    notes = [
        "two senders: each has one half of the context's pieces; only records that can be split.",
        "One model sends both halves.",
    ]
    rows = ["baseline", "skyline", *rows]
    return Built(
        compared(runs, exhibit, results, rows, printed=("10",), notes=notes), tuple(results)
    )


def sizes(runs: Runs, exhibit: Exhibit) -> Built:
    """Tables 4 and 7: records of each data set, here and in the paper; Table 7 has larger sets."""
    printed = paper.records()
    if exhibit.name == "table-7":
        printed |= {
            name.removesuffix(paper.LARGER): n
            for name, n in printed.items()
            if name.endswith(paper.LARGER)
        }
    there = {one.task.name: one for one in runs.chosen(exhibit)}
    names = [name for name in exhibit.tasks if not _unwanted(runs, name)]
    cells, sources = {}, {}
    for name in names:
        found = there.get(name)
        if found is not None:
            sources[name] = found.sources(one.id for one in found.plan.scored)
        for column, n in (
            ("scored", None if found is None else len(found.plan.scored)),
            ("calibrate", None if found is None else len(found.plan.calibration)),
        ):
            nothing = float("nan")
            measured = None if n is None else Interval(float(n), nothing, nothing, n)
            paper_n = float(printed[name]) if column == "scored" and name in printed else None
            cells[name, column] = Cell(measured, paper_n)
    title = f"{exhibit.label}. {exhibit.title}. {division(runs)}."
    table = Table(
        title, "records", "task", tuple(names), ("scored", "calibrate"), cells, sources,
        decimals=0, headings=HEADINGS,
    )  # fmt: skip
    return Built((table,))
