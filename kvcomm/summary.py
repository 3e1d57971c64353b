"""From the lines of a log to a summary: means, 95% bootstrap intervals, recovered, counts.

Owns what summary.json holds. Does not run anything: evaluate.py calls it at the end of a run, and
`kvcomm report` again for a run that was left unfinished.

An interval is {value, low, high, n}: over n records, low and high the ends of the 95% interval.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvcomm import metrics, statistics
from kvcomm.records import CALIBRATING, Record, dumps

#: Fields of a record whose means a summary has, and those of its "seconds".
MEANS = (
    *metrics.NAMES, "nll", "n_gold_tokens", "message_bytes", "receiver_tokens", "cut_tokens",
)  # fmt: skip
#: Fields that only the records of a run that asks for them have.
ASKED = ("agreement", "kl")
SECONDS = ("sender", "transfer", "first_token", "total")

Measured = dict[str, Any] | None


def summarise(run: Mapping[str, Any], records: Sequence[Record]) -> dict[str, Any]:
    """The summary of a run.

    Parameters
    ----------
    run
        What run.json holds, with its "calibration" filled in.
    records
        Lines of the log, failed records' among them (these have an "error").

    Returns
    -------
    dict
        `run`, and per method its settings; the layers sent (None when it sends none, or others for
        other records); the records that have an answer; attempted, done and failed answers, more
        where those that calibrate count, too; an interval of each of MEANS, ASKED and SECONDS,
        and of `recovered`. These are over done records only; None when there are none, `recovered`
        also without baseline or skyline. "blank_golds" counts the records whose accepted answers
        are all blank (`metrics.is_blank`). "comparisons" has how much less nll the first method of
        a pair has, record by record: each that chooses by attention against random layers and
        controls of the same ratio, and each control against the baseline.
    """
    seed = run["settings"]["seed"]
    lines = {m["label"]: _lines(m, records) for m in run["methods"]}
    done = {label: [r for r in found if "error" not in r] for label, found in lines.items()}
    nll = {
        label: {r["id"]: r["nll"] for r in found if r["nll"] is not None}
        for label, found in done.items()
    }
    methods = [
        {
            **method,
            "layers": _common_layers(done[label]),
            "records": sum(not r["id"].endswith(CALIBRATING) for r in lines[label]),
            "attempted": len(lines[label]),
            "done": len(done[label]),
            "failed": len(lines[label]) - len(done[label]),
            "recovered": _recovered(nll, label, seed),
            **{name: _mean([r[name] for r in done[label]], seed) for name in MEANS},
            **{name: _mean([r.get(name) for r in done[label]], seed) for name in ASKED},
            **{name: _mean([r["seconds"][name] for r in done[label]], seed) for name in SECONDS},
        }
        for label, method in ((m["label"], m) for m in run["methods"])
    ]
    blank = {
        r["id"].removesuffix(CALIBRATING) for r in records if all(map(metrics.is_blank, r["gold"]))
    }
    return {
        **run,
        "methods": methods,
        "blank_golds": len(blank),
        "comparisons": _comparisons(run["methods"], nll, seed),
    }


def variant(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a record's settings that tells variants of a method apart."""
    return {name: value for name, value in settings.items() if name != "layers"}


def row_key(method: str, settings: Mapping[str, Any]) -> str:
    """What all records of one variant of a method have in common."""
    return dumps([method, variant(settings)], sort_keys=True)


def _lines(method: Mapping[str, Any], records: Sequence[Record]) -> list[Record]:
    return [
        record
        for record in records
        if record["method"] == method["method"]
        and variant(record["settings"]) == method["settings"]
    ]


def _common_layers(records: Sequence[Record]) -> list[int] | None:
    first = records[0]["settings"]["layers"] if records else None
    return first if all(r["settings"]["layers"] == first for r in records) else None


def _mean(values: Sequence[float | None], seed: int) -> Measured:
    known = [value for value in values if value is not None]
    return asdict(statistics.mean(known, seed=seed)) if known else None


def _recovered(nll: Mapping[str, Mapping[str, float]], label: str, seed: int) -> Measured:
    """Over the records that baseline, skyline and the method all finished."""
    if "baseline" not in nll or "skyline" not in nll:
        return None
    ids = [i for i in nll[label] if i in nll["baseline"] and i in nll["skyline"]]
    if not ids:
        return None
    baseline, method, skyline = (
        [nll[name][i] for i in ids] for name in ("baseline", label, "skyline")
    )
    return asdict(metrics.recovered(baseline, method, skyline, seed=seed))


def _comparisons(
    methods: Sequence[Mapping[str, Any]], nll: Mapping[str, Mapping[str, float]], seed: int
) -> list[dict[str, Any]]:
    def with_strategy(strategy: str) -> list[Mapping[str, Any]]:
        return [m for m in methods if m["settings"].get("strategy") == strategy]

    def of_method(name: str) -> list[Mapping[str, Any]]:
        return [m for m in methods if m["method"] == name]

    pairs = [
        (method, control)
        for method in with_strategy("attention_gaussian")
        for control in (*with_strategy("random"), *of_method("control"))
        if method["settings"]["ratio"] == control["settings"]["ratio"]
    ]
    pairs += [(control, base) for control in of_method("control") for base in of_method("baseline")]
    found = []
    for method, control in pairs:
        mine, other = nll[method["label"]], nll[control["label"]]
        ids = [i for i in mine if i in other]
        if ids:
            less = statistics.difference([other[i] for i in ids], [mine[i] for i in ids], seed=seed)
            found.append(
                {"method": method["label"], "control": control["label"], "nll_less": asdict(less)}
            )
    return found
