"""Parity with the recordings: how many are equal, and every difference with its two logits.

Holds kvcomm against `oracle_*.json` (the published code, preset reference, token by token) and
`paper_*.json` (an independent implementation of preset paper, likelihoods). Prompts are fed as the
recorded ids (of nld and cipher they are made from the records), weights are f32. parity_hidden.py
has ac, parity_text.py nld and cipher. tests/test_parity.py runs the same checks on a part of them.

    python benchmarks/parity.py --recordings ../shared/reference --out results/parity.json

A greedy id that differs is listed with the recorded gap between the two best logits and with our
difference between the two tokens' logits at that step; below NEAR_TIE it is a near-tie.
"""

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

import kvcomm
from kvcomm import convert, environment
from kvcomm.records import dumps
from kvcomm.selection import choose

#: Catalogue name of a model -> its part in the names of the recordings.
MODELS = {"smollm2-135m": "smollm2", "qwen2.5-coder-0.5b": "qwen05"}

LOGIT_TOLERANCE = 2e-3  # of the first step's recorded logits
MASS_TOLERANCE = 1e-4  # relative
NLL_TOLERANCE = 1e-3  # per token
SAME_MASS = 1e-5  # layers closer than this may change places
NEAR_TIE = 1e-3  # logits closer than this may change places


@dataclass(frozen=True)
class Outcome:
    """One comparison. error: largest deviation, where there is a number."""

    group: str  # "greedy ids", "first logits", "mass", "ranking", "layers", "nll"
    case: str
    equal: bool
    error: float = 0.0
    note: str = ""
    near_tie: bool = False


class Pair:
    """A sender and a receiver, and packets of whole contexts read once."""

    def __init__(self, sender: kvcomm.Model, receiver: kvcomm.Model) -> None:
        self.sender = kvcomm.Sender(sender)
        self.receiver = kvcomm.Receiver(receiver)
        self._packets: dict[tuple[str, tuple[int, ...]], Any] = {}

    def packet(self, ids: list[int], layers: Iterable[int], preset: str) -> Any:
        key = (preset, tuple(ids))
        if key not in self._packets:
            self._packets[key] = self.sender.read(ids, preset=preset)
        return self._packets[key].select(layers)


@dataclass(frozen=True)
class Run:
    """A recorded greedy answer and how to repeat it."""

    case: str
    recorded: dict[str, Any]
    question: list[int]
    packets: Any  # None, or a tuple


def check_runs(pair: Pair, runs: list[Run], max_new_tokens: int, **options: Any) -> list[Outcome]:
    """Greedy ids and the logits of the first step, all runs as one batch."""
    questions, packets = [run.question for run in runs], [run.packets for run in runs]
    options |= {"preset": "reference"}
    answers = pair.receiver.answer(questions, packets, max_new_tokens, **options)
    firsts = pair.receiver.logits(questions, packets, **options)
    outcomes = []
    for run, answer, logits in zip(runs, answers, firsts, strict=True):
        ids, values = zip(*run.recorded["top20"], strict=True)
        error = float(np.abs(logits[list(ids)] - np.array(values)).max())
        outcomes.append(Outcome("first logits", run.case, error <= LOGIT_TOLERANCE, error))
        outcomes.append(_compare_ids(pair, run, list(answer.ids), options))
    return outcomes


def _compare_ids(pair: Pair, run: Run, found: list[int], options: dict[str, Any]) -> Outcome:
    recorded = run.recorded["ids"]
    if found == recorded:
        return Outcome("greedy ids", run.case, True)
    same = zip(found, recorded, strict=False)
    step = next((n for n, (a, b) in enumerate(same) if a != b), min(len(found), len(recorded)))
    if step == min(len(found), len(recorded)):
        note = f"{len(found)} tokens, recorded {len(recorded)}"
        return Outcome("greedy ids", run.case, False, note=note)
    ours, theirs = (
        pair.receiver.score(run.question, [*found[:step], token], run.packets, **options)
        for token in (found[step], recorded[step])
    )
    gap = float(theirs.token_nll[-1] - ours.token_nll[-1])
    recorded_gap = run.recorded["gap"][step]
    note = (
        f"step {step}: {found[step]}, recorded {recorded[step]}; "
        f"recorded gap {recorded_gap:.2g}, logit difference here {gap:.2g}"
    )
    near = max(gap, recorded_gap) < NEAR_TIE
    return Outcome("greedy ids", run.case, False, gap, note, near)


def check_mass(case: str, found: np.ndarray, recorded: list[float]) -> Outcome:
    error = float(np.max(np.abs(found / np.array(recorded) - 1)))
    return Outcome("mass", case, error <= MASS_TOLERANCE, error)


def check_ranking(case: str, found: list[int], recorded: list[int], mass: list[float]) -> Outcome:
    apart = [abs(mass[a] - mass[b]) for a, b in zip(found, recorded, strict=True) if a != b]
    note = f"places that differ: {len(apart)}" if apart else ""
    return Outcome("ranking", case, all(a < SAME_MASS for a in apart), note=note)


def check_layers(case: str, found: Iterable[int], recorded: Iterable[int]) -> Outcome:
    found, recorded = sorted(found), sorted(recorded)
    note = "" if found == recorded else f"{found}, recorded {recorded}"
    return Outcome("layers", case, found == recorded, note=note)


def published_calibration(
    pair: Pair, case: str, recorded: dict[str, Any], sample: tuple[Any, Any]
) -> Iterator[Outcome]:
    """Masses, rankings and chosen layers of one recorded calibration."""
    scores = kvcomm.calibrate(pair.sender, pair.receiver, [sample], preset="reference")
    yield check_mass(case, scores.mass, recorded["mass"])
    masked = {
        "properly_masked_mass_all_context": False,
        "properly_masked_mass_without_first": True,
    }
    for name, skip in masked.items():
        if name in recorded:
            causal = kvcomm.calibrate(pair.sender, pair.receiver, [sample], skip_first=skip)
            yield check_mass(f"{case} {name}", causal.mass, recorded[name])
    rankings = recorded["ranking"]
    if isinstance(rankings, list):
        rankings = {"1.0": rankings}
    for alpha, ranking in rankings.items():
        found = scores.ranking(float(alpha))
        yield check_ranking(f"{case} alpha {alpha}", found, ranking, recorded["mass"])
    chosen = recorded.get("chosen", {"1.0": {"0.5": recorded.get("chosen_0_5")}})
    for alpha, by_ratio in chosen.items():
        for ratio, layers in by_ratio.items():
            found = scores.top(float(ratio), alpha=float(alpha))
            yield check_layers(f"{case} alpha {alpha} ratio {ratio}", found, layers)


def published_task(
    pair: Pair, data: dict[str, Any], task: str, limit: int | None = None
) -> list[Outcome]:
    """Baseline, skyline and kvcomm at every ratio, of one task's recorded items."""
    items, runs = data["items"][task], []
    for method, recorded in data["runs"][task].items():
        for run in recorded[:limit]:
            item = items["items"][run["item"]]
            question, packets = item["receiver"]["ids"], None
            if method == "skyline":
                question = item["skyline"]["ids"]
            elif method != "baseline":
                ratio = method.removeprefix("kvcomm_")
                every = range(data["meta"]["layers"])
                chosen = data["calibration"][task]["chosen"]["1.0"]
                layers = every if ratio == "all" else chosen[ratio]
                packets = (pair.packet(item["sender"]["ids"], layers, "reference"),)
            runs.append(Run(f"{task} {method} item {run['item']}", run, question, packets))
    return check_runs(pair, runs, items["max_new_tokens"])


def published_variants(pair: Pair, data: dict[str, Any]) -> Iterator[Outcome]:
    """shift_back, contiguous layers, two senders, the random draw."""
    for name in ("shift_back", "contiguous"):
        variant = data[name]
        task = data["items"][variant["task"]]
        runs = []
        for run in variant["runs"]:
            item = task["items"][run["item"]]
            packet = pair.packet(item["sender"]["ids"], variant["layers"], "reference")
            question = item["receiver"]["ids"]
            runs.append(Run(f"{name} item {run['item']}", run, question, (packet,)))
        shift_back = name == "shift_back"
        yield from check_runs(pair, runs, task["max_new_tokens"], shift_back=shift_back)
    yield from _two_senders(pair, data["two_senders"], data["items"]["hotpotqa"]["max_new_tokens"])
    n_layers = data["meta"]["layers"]
    for ratio, layers in data["random_selection"]["layers"].items():
        found = choose("random", n_layers, ratio=float(ratio), preset="reference")
        yield check_layers(f"random ratio {ratio}", found, layers)


def _two_senders(pair: Pair, data: dict[str, Any], max_new_tokens: int) -> Iterator[Outcome]:
    def contexts(item: dict[str, Any]) -> list[list[int]]:
        return [item["sender1"]["ids"], item["sender2"]["ids"]]

    first = data["items"][0]
    sample = (tuple(contexts(first)), first["receiver"]["ids"])
    yield from published_calibration(pair, "two senders", data["calibration"], sample)
    n_layers = pair.sender.model.n_layers
    layers = {"kvcomm_0.5": data["calibration"]["chosen_0_5"], "kvcomm_all": range(n_layers)}
    runs = []
    for method, recorded in data["runs"].items():
        for run in recorded:
            item = data["items"][run["item"]]
            packets = tuple(pair.packet(c, layers[method], "reference") for c in contexts(item))
            case = f"two senders {method} item {run['item']}"
            runs.append(Run(case, run, item["receiver"]["ids"], packets))
    yield from check_runs(pair, runs, max_new_tokens)


def perturbed(model: kvcomm.Model, folder: Path) -> kvcomm.Model:
    """The receiver of `cross_perturbed`: every matrix times 1 + 0.02 z, as its recipe says."""
    made = convert.convert(model.path, folder / "perturbed")  # values of their own, no blocks
    weights = safetensors.numpy.load_file(made / "model.safetensors")
    noise = np.random.default_rng(0)
    for name in sorted(weights):
        if weights[name].ndim == 2:
            z = noise.standard_normal(weights[name].shape, dtype=np.float32)
            factor = np.float32(1) + np.float32(0.02) * z
            weights[name] = weights[name].astype(np.float32) * factor
    safetensors.numpy.save_file(weights, made / "model.safetensors")
    return kvcomm.Model.load(made, device=model.device, dtype="f32")


def published_cross(model: kvcomm.Model, data: dict[str, Any]) -> Iterator[Outcome]:
    """The original model sends, a perturbed one receives."""
    cross = data["cross_perturbed"]
    items = data["items"][cross["task"]]
    with tempfile.TemporaryDirectory() as folder, perturbed(model, Path(folder)) as receiver:
        pair = Pair(model, receiver)
        first = items["items"][cross["calibration"]["item"]]
        sample = (first["sender"]["ids"], first["receiver"]["ids"])
        yield from published_calibration(pair, "perturbed", cross["calibration"], sample)
        chosen = cross["calibration"]["chosen"]["1.0"]["0.5"]
        runs = []
        for method, recorded in cross["runs"].items():
            for run in recorded:
                item = items["items"][run["item"]]
                packets = None
                question = item["skyline" if method == "skyline" else "receiver"]["ids"]
                if method.startswith("kvcomm"):
                    packets = (pair.packet(item["sender"]["ids"], chosen, "reference"),)
                runs.append(Run(f"perturbed {method} item {run['item']}", run, question, packets))
        yield from check_runs(pair, runs, items["max_new_tokens"])


def paper_records(pair: Pair, data: dict[str, Any], limit: int | None = None) -> Iterator[Outcome]:
    """Masses, layer choice and likelihoods of preset paper."""
    calibration = data["calibration"]
    sample = (calibration["sender_ids"], calibration["receiver_ids"])
    scores = kvcomm.calibrate(pair.sender, pair.receiver, [sample])
    yield check_mass("paper", scores.mass, calibration["mass"])
    for name, layers in data["layers"].items():
        if name.startswith("attention_gaussian"):
            ratio, alpha = (float(part.split("=")[1]) for part in name.split()[1:])
            yield check_layers(f"paper {name}", scores.top(ratio, alpha=alpha), layers)
    for record in data["records"][:limit]:
        names = list(record["nll"])
        questions = [
            record["skyline_ids" if name == "skyline" else "receiver_ids"] for name in names
        ]
        packets = [
            pair.packet(record["sender_ids"], data["layers"][name], "paper")
            if name in data["layers"]
            else None
            for name in names
        ]
        answers = [record["answer_ids"]] * len(names)
        for name, score in zip(
            names, pair.receiver.score(questions, answers, packets), strict=True
        ):
            error = float(np.abs(score.token_nll - np.array(record["nll"][name])).max())
            case = f"paper record {record['index']} {name}"
            yield Outcome("nll", case, error <= NLL_TOLERANCE, error)


def everything(model: kvcomm.Model, recordings: Path, part: str) -> Iterator[Outcome]:
    """All checks of one model."""
    pair = Pair(model, model)
    data = json.loads((recordings / f"oracle_{part}.json").read_text())
    for task, items in data["items"].items():
        recorded = data["calibration"][task]
        first = items["items"][recorded["item"]]
        sample = (first["sender"]["ids"], first["receiver"]["ids"])
        yield from published_calibration(pair, task, recorded, sample)
        yield from published_task(pair, data, task)
    yield from published_variants(pair, data)
    if "cross_perturbed" in data:
        yield from published_cross(model, data)
    # These two import this file, for what an outcome is.
    from parity_hidden import published_ac
    from parity_text import published_cipher, published_nld

    yield from published_ac(model, data)
    yield from published_nld(model, data, recordings)
    yield from published_cipher(model, data, recordings)
    yield from paper_records(pair, json.loads((recordings / f"paper_{part}.json").read_text()))


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """Per group how many are equal and the largest error, and every difference in full."""
    groups = {}
    for group in dict.fromkeys(outcome.group for outcome in outcomes):
        members = [outcome for outcome in outcomes if outcome.group == group]
        groups[group] = {
            "equal": sum(outcome.equal for outcome in members),
            "of": len(members),
            "largest_error": max(outcome.error for outcome in members),
        }
    differences = [asdict(outcome) for outcome in outcomes if not outcome.equal]
    return {"groups": groups, "differences": differences}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recordings", type=Path, default=Path("../shared/reference"))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--out", type=Path, help="JSON file for counts and differences")
    options = parser.parse_args()
    # Paths say where files lie on one machine; their names say which they are.
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    command = shlex.join(["python", "benchmarks/parity.py", *words])
    report = {"command": command, **environment.machine(), "models": {}}
    faults = 0
    for name in options.models.split(","):
        started = time.perf_counter()
        model = kvcomm.Model.load(name, dtype="f32")
        outcomes = list(everything(model, options.recordings, MODELS[name]))
        found = {"seconds": round(time.perf_counter() - started), **summary(outcomes)}
        report["models"][name] = found
        for outcome in outcomes:
            if not outcome.equal:
                kind = "near-tie" if outcome.near_tie else "DIFFERS"
                faults += not outcome.near_tie
                print(f"{kind:8} {outcome.case}: {outcome.note or f'{outcome.error:.2e}'}")
        print(f"{name}, {found['seconds']} s")
        for group, row in found["groups"].items():
            counts = f"{row['equal']:4} of {row['of']:4} equal"
            print(f"  {group:14}{counts}, largest error {row['largest_error']:.1e}", flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(dumps(report, indent=1) + "\n")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
