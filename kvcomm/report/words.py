"""What a run's numbers mean, in sentences: notes on the columns, and the finding.

Owns the judgement, which follows the numbers whichever way they fall. Does not count: every number
is the summary's.
"""

from collections.abc import Mapping
from typing import Any

from kvcomm.layout import counted
from kvcomm.report.tables import Summary, columns
from kvcomm.statistics import FEW

#: What a column of an answer's metric means, by field.
_METRICS = {
    "match": "match: set F1 of lemmas above 0.5.",
    "f1": "F1, EM: SQuAD's{rule}.",
    "rouge_l_recall": "ROUGE-L: longest common subsequence of words, recall and F.",
    "published_rouge_l": "published ROUGE-L: recall as the paper's code counts it.",
    "agreement": "agreement, KL: share of skyline's own tokens that a method ranks first as well, "
    "and the divergence of its next token from skyline's there, nats.",
    "accuracy": "accuracy: the choice that the answer names is the gold one.",
}


def notes(summary: Summary) -> list[str]:
    """What the columns mean and what of the run is unusual, one line each."""
    settings, environment = summary["settings"], summary["environment"]
    shown = {column.field for column in columns(summary)}
    rule = ", with HotpotQA's rule for yes and no" if settings["closed_answers"] else ""
    meanings = [text.format(rule=rule) for name, text in _METRICS.items() if name in shown]
    found = []
    if "recovered" in shown:
        found.append(
            "recovered: share of what reading the context would have given, "
            "(nll baseline - nll) / (nll baseline - nll skyline), sums over records."
        )
    found += [
        " ".join(
            [
                "nll: of the gold answer, nats, mean per record.", *meanings,
                "Ranges: 95% bootstrap intervals over records.",
            ]
        ),
        "message: what was handed over, per record; skyline is one model, nothing is sent. "
        "prefilled: tokens of the receiver's prompt, per record.",
        "first token: wall time from the receiver's start to its first token, "
        f"{_batches(environment)}, mean; the sender's reading is not in it.",
    ]  # fmt: skip
    for reason, ids in summary["excluded"].items():
        if ids:
            first = ", ".join(ids[:3]) + ", ..." * (len(ids) > 3)
            found.append(f"not scored ({reason}; {len(ids)}): {first}")
    if summary["blank_golds"]:
        found.append(
            f"gold answers without a word but articles ({summary['blank_golds']}): "
            "an empty one has EM 1 and F1 0 there."
        )
    return [
        *found,
        *_cuts(summary),
        *_unfinished(summary),
        *_failures(summary),
        *_controls(summary),
    ]


def _batches(environment: Mapping[str, Any]) -> str:
    if environment.get("earlier"):
        return "in batches and on machines that changed when the run went on"
    n_threads = environment["machine"]["threads"]
    return f"in batches of {environment['batch_size']} on {counted(n_threads, 'thread')}"


def _cuts(summary: Summary) -> list[str]:
    """That contexts were too long is a part of what every method was given."""
    cuts = [m["cut_tokens"]["value"] for m in summary["methods"] if m["cut_tokens"]]
    if not cuts or max(cuts) == 0:
        return []
    settings = summary["settings"]
    limit = settings.get("max_input_tokens")
    # The published skyline is cut in the middle of the whole prompt, not of the context.
    who = "no method" if settings["preset"] == "reference" else "no method, skyline included,"
    return [
        f"cut: prompts beyond {limit} tokens lost the middle of their context, {max(cuts):.0f} "
        f"tokens per record on average; {who} has read that part."
    ]


def _unfinished(summary: Summary) -> list[str]:
    there = sum(method["records"] for method in summary["methods"])
    wanted = summary["settings"]["n_records"] * len(summary["methods"])
    if there >= wanted:
        return []
    return [f"unfinished: {there} of {wanted} answers are there; the run's command goes on."]


def _failures(summary: Summary) -> list[str]:
    failed = {m["label"]: f"{m['failed']} of {m['attempted']}" for m in summary["methods"]}
    failed = {
        label: count
        for (label, count), method in zip(failed.items(), summary["methods"], strict=True)
        if method["failed"]
    }
    if not failed:
        return []
    listed = ", ".join(f"{label} {count}" for label, count in failed.items())
    return [
        f"failed records: {listed}. They are in no mean, so means of methods that failed on "
        "different records are not over the same records; recovered compares each method with "
        "baseline and skyline on records that all three finished."
    ]


def _controls(summary: Summary) -> list[str]:
    if not any(method["method"] == "control" for method in summary["methods"]):
        return []
    from kvcomm.methods import control

    return list(control.findings(summary))


# ---- the finding ---------------------------------------------------------------------------


def finding(summary: Summary) -> str:
    """One line that says what the run shows, whichever way its numbers fall."""
    methods = {method["label"]: method for method in summary["methods"]}
    known = [m for m in methods.values() if m["recovered"] and m["recovered"]["value"] is not None]
    if not known:
        return "No shares to judge: the run has no record that baseline and skyline both finished."
    if any(m["records"] < summary["settings"]["n_records"] for m in methods.values()):
        return "The run is not finished, so there is nothing to judge yet."
    nats = methods["baseline"]["nll"]["value"] - methods["skyline"]["nll"]["value"]
    if nats <= 0:
        return (
            f"Reading the context does not help this model here (skyline's nll is {-nats:.2f} "
            "above the baseline's), so recovered shares mean nothing."
        )
    chosen = [m for m in known if _strategy(m) == "attention_gaussian"]
    if not chosen:
        return "The run has no layers chosen by attention to judge."
    best = max(chosen, key=lambda m: m["recovered"]["value"])
    share = best["recovered"]
    n_layers = summary["settings"]["sender"]["n_layers"]
    layers = (
        "layers chosen online"
        if best["layers"] is None
        else f"{len(best['layers'])} of {counted(n_layers, 'layer')}"
    )
    picked = f", the best of {len(chosen)} here" if len(chosen) > 1 else ""
    line = (
        f"{best['label']}{picked}: K and V of {layers} give {share['value']:.0%} of what reading "
        f"the context would give (95% interval {_range(share)}, {counted(share['n'], 'record')})"
    )
    if share["n"] < FEW:
        return f"{line}: too few to judge."
    compared = [
        one
        for one in summary["comparisons"]
        if _strategy(methods.get(one["method"], {})) == "attention_gaussian"
        and _strategy(methods.get(one["control"], {})) == "random"
    ]
    if compared:
        better = sum(_above(c["nll_less"]) for c in compared)
        worse = sum(_below(c["nll_less"]) for c in compared)
        line += (
            "; against one draw of as many random layers, layers chosen by attention are clearly "
            f"better in {better} of {counted(len(compared), 'comparison')}, "
            f"clearly worse in {worse}"
        )
    return line + "."


def _strategy(method: Mapping[str, Any]) -> str | None:
    return method.get("settings", {}).get("strategy")


def _range(interval: Mapping[str, Any]) -> str:
    if interval["low"] is None:
        return "unknown"
    return f"{interval['low']:.0%} to {interval['high']:.0%}"


def _above(interval: Mapping[str, Any]) -> bool:
    """Whether the whole interval is above 0."""
    return interval["low"] is not None and interval["low"] > 0


def _below(interval: Mapping[str, Any]) -> bool:
    return interval["high"] is not None and interval["high"] < 0
