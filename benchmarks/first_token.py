"""The first context token's place in the attention mass: what it does to the choice of layers, and why.

The mass of a layer counts the weight on the first context token (preset paper) or leaves it out
(preset reference). Owns the study of that one switch: the share of the mass that the token holds, what
its K and V are worth, how the two rankings agree with what a layer is worth by itself, what either
choice recovers on records that nothing was chosen from, and whether rules that see calibration records
only pick the better one. Everything is teacher-forced, nothing is decoded.

    python benchmarks/first_token.py --data-dir data --models smollm2-135m,qwen2.5-coder-0.5b

Likelihoods are kept in --out as they come; a run that was stopped goes on where it was, and one with
more tasks or records adds to what is there.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import kvcomm
from kvcomm import environment, prompts, selection, statistics, tasks
from kvcomm._core import KV
from kvcomm.packet import Packet
from kvcomm.records import write_json

RATIOS = ("0.3", "0.5", "0.7")
ALPHAS = (1.0, 0.8)
VARIANTS = {"counted": False, "left out": True}

#: Per task the file with records to score and the one to calibrate on; the same file: its first
#: records calibrate and are not scored.
FILES = {
    "hotpotqa": ("hotpotqa/dev_distractor_100.jsonl", "hotpotqa/train_distractor_100.jsonl"),
    "musique": ("musique/musique_ans_dev_100.jsonl", "musique/musique_ans_train_100.jsonl"),
    "countries": ("countries/countries.jsonl",) * 2,
    "tipsheets": ("tipsheets/tipsheets.jsonl",) * 2,
}

N_CALIBRATION = 8  # records that the mass and the worth of single layers are measured on
N_RULE = 32  # calibration records that rules are tried on, in groups
BATCH = 16

Layers = tuple[int, ...]
Change = Callable[[Packet], Packet]


def load(task: str, folder: Path, limit: int) -> tuple[list[Any], list[Any]]:
    """(records to score, N_RULE calibration records) of a task, none in both."""
    scored, other = (tasks.find(task).load(folder / name) for name in FILES[task])
    if FILES[task][0] == FILES[task][1]:
        return scored[N_RULE : N_RULE + limit], scored[:N_RULE]
    return scored[:limit], other[:N_RULE]


# ---- messages ----


def send(layers: Iterable[int]) -> Change:
    """The packet of some layers."""
    chosen = tuple(layers)
    return lambda packet: packet.select(chosen)


def with_first(layers: Iterable[int]) -> Change:
    """Those layers, and of every other layer the first token."""
    chosen = tuple(layers)
    return lambda packet: replace(packet, kv=packet.kv.select(chosen, sink=True), layers=chosen)


def without_first(packet: Packet) -> Packet:
    """All layers without the first token, everything else at its position."""
    kv = packet.kv
    layers = {
        layer: [
            (np.ascontiguousarray(k[:, 1:]), np.ascontiguousarray(v[:, 1:]), position + 1, offset)
            for k, v, position, offset in kv.parts(layer)
        ]
        for layer in range(kv.n_layers)
    }
    shape = {"n_layers": kv.n_layers, "n_kv_heads": kv.n_kv_heads, "head_dim": kv.head_dim}
    rest = KV.from_arrays(layers, dtype=kv.dtype, next_position=kv.next_position, **shape)
    return replace(packet, kv=rest)


class Likelihoods:
    """The nll of gold answers, per set of records, message and record; measured once, kept in a file."""

    def __init__(self, model: kvcomm.Model, path: Path) -> None:
        self.sender, self.receiver = kvcomm.Sender(model), kvcomm.Receiver(model)
        self.path = path
        self.known: dict[str, dict[str, list[float]]] = (
            json.loads(path.read_text()) if path.exists() else {}
        )

    def of(
        self, name: str, examples: Sequence[Any], messages: Mapping[str, Change]
    ) -> dict[str, np.ndarray]:
        """[n] per message, in nats, and of "baseline" and "skyline"."""
        known = self.known.setdefault(name, {})
        wanted = {"baseline": None, "skyline": None, **messages}
        for start in range(0, len(examples), BATCH):
            batch = examples[start : start + BATCH]
            new = [key for key in wanted if len(known.get(key, ())) < start + len(batch)]
            if not new:
                continue
            packets = self.sender.read([one.context for one in batch])
            for key in new:
                found = self._score(key, batch, packets, wanted[key])
                known[key] = known.get(key, [])[:start] + [round(one.nll, 5) for one in found]
            write_json(self.path, self.known)
        return {key: np.array(known[key][: len(examples)]) for key in wanted}

    def _score(
        self, key: str, batch: Sequence[Any], packets: Sequence[Packet], change: Change | None
    ) -> list[Any]:
        questions, golds = [one.question for one in batch], [list(one.answers) for one in batch]
        if key == "baseline":
            return self.receiver.score(questions, golds)
        if key == "skyline":
            whole = [prompts.skyline_message(one.context, one.question) for one in batch]
            return self.receiver.score(whole, golds, message=str)
        return self.receiver.score(questions, golds, [change(packet) for packet in packets])


def recovered(nll: Mapping[str, np.ndarray], key: str) -> statistics.Interval:
    """Share of what reading the context would have given, sums over records."""
    below, mine, above = nll["baseline"], nll[key], nll["skyline"]
    gain, room = below - mine, below - above
    spread = [
        gain[rows].sum(axis=1) / room[rows].sum(axis=1) for rows in statistics.draws(len(gain))
    ]
    return statistics.interval(
        float(gain.sum() / room.sum()), np.concatenate(spread), len(gain), 0.95
    )


# ---- what is looked at ----


def masses(agents: Likelihoods, examples: Sequence[Any]) -> dict[str, selection.LayerScores]:
    """Per variant the calibration on these records."""
    samples = [(one.context, one.question) for one in examples]
    return {
        name: kvcomm.calibrate(agents.sender, agents.receiver, samples, skip_first=skip)
        for name, skip in VARIANTS.items()
    }


def norms(agents: Likelihoods, examples: Sequence[Any]) -> dict[str, list[float]]:
    """Per layer the first token's norm over the mean norm of the others, of K and of V."""
    ratios: dict[str, list[np.ndarray]] = {"k": [], "v": []}
    for packet in agents.sender.read([one.context for one in examples]):
        for name, read in (("k", packet.keys), ("v", packet.values)):
            size = [
                np.linalg.norm(read(n).astype(np.float64), axis=2) for n in range(packet.n_layers)
            ]
            ratios[name].append([(one[:, 0] / one[:, 1:].mean(axis=1)).mean() for one in size])
    return {name: np.mean(rows, axis=0).tolist() for name, rows in ratios.items()}


def spearman(one: Sequence[float], two: Sequence[float]) -> float:
    """Rank correlation; these values have no ties."""
    ranks = [np.argsort(np.argsort(values)) for values in (one, two)]
    return float(np.corrcoef(*ranks)[0, 1])


def key_of(layers: Sequence[int]) -> str:
    return "layers " + ",".join(map(str, layers))


def choices(scores: Mapping[str, selection.LayerScores]) -> dict[tuple[str, str, float], Layers]:
    """The layers of every variant, ratio and alpha."""
    return {
        (variant, ratio, alpha): scores[variant].top(ratio, alpha=alpha)
        for variant in VARIANTS
        for ratio in RATIOS
        for alpha in ALPHAS
    }


def worth(agents: Likelihoods, name: str, examples: Sequence[Any], n_layers: int) -> dict[str, Any]:
    """What single layers are worth on calibration records, in nats per record, and of the token."""
    everything = range(n_layers)
    messages = {key_of([n]): send([n]) for n in everything}
    rest = [[other for other in everything if other != n] for n in everything]
    messages |= {key_of(one): send(one) for one in rest}
    messages |= {key_of([]): send([]), key_of(everything): send(everything)}
    messages |= {"only first tokens": with_first([]), "no first tokens": without_first}
    nll = {key: values.mean() for key, values in agents.of(name, examples, messages).items()}
    return {
        "alone": [nll[key_of([])] - nll[key_of([n])] for n in everything],
        "left_out": [nll[key_of(one)] - nll[key_of(everything)] for one in rest],
        **{
            key: (nll["baseline"] - nll[message]) / (nll["baseline"] - nll["skyline"])
            for key, message in (
                ("all_layers", key_of(everything)),
                ("nothing", key_of([])),
                ("only_first_tokens", "only first tokens"),
                ("no_first_tokens", "no first tokens"),
            )
        },
    }


def rule_by_nll(counted: np.ndarray, left_out: np.ndarray, truth: float) -> dict[str, float]:
    """How often N calibration records pick the variant that is better on the scored records.

    counted, left_out: nll [n] of the calibration records. truth: nll of left_out minus that of counted
    over the scored records. Groups of N are taken side by side.
    """
    found = {}
    for n in (1, 4, 8):
        groups = (left_out - counted)[: len(counted) // n * n].reshape(-1, n).sum(axis=1)
        found[str(n)] = float(np.mean(np.sign(groups) == np.sign(truth)))
    return found


def study(model_name: str, folder: Path, names: Sequence[str], limit: int, out: Path) -> dict:
    """Everything about one model, as JSON can hold it."""
    model = kvcomm.Model.load(model_name, dtype="f32")
    agents = Likelihoods(model, out / f"first_token-{model_name}-nll.json")
    result: dict[str, Any] = {"model": model_name, "n_layers": model.n_layers, "tasks": {}}
    for task in names:
        scored, calibration = load(task, folder, limit)
        scores = masses(agents, calibration[:N_CALIBRATION])
        counted, left_out = (scores[variant].mass for variant in VARIANTS)
        found: dict[str, Any] = {
            "counted": counted.tolist(),
            "first": (counted - left_out).tolist(),
            "norms": norms(agents, calibration[:N_CALIBRATION]),
            "mean_context_tokens": float(
                np.mean([p.context_len for p in agents.sender.read([e.context for e in scored])])
            ),
        }
        if task == names[0]:
            single = worth(agents, f"{task} {N_CALIBRATION}", calibration[:N_CALIBRATION], model.n_layers)
            found["worth"] = single | {
                f"spearman {what}, {variant}": spearman(mass, single[what])
                for what in ("alone", "left_out")
                for variant, mass in (("counted", counted), ("left out", left_out))
            }
        chosen = choices(scores)
        messages = {key_of(layers): send(layers) for layers in chosen.values()}
        everything = range(model.n_layers)
        messages[key_of(everything)] = send(everything)
        messages |= {
            "with first: " + key_of(layers): with_first(layers)
            for (_, ratio, alpha), layers in chosen.items()
            if alpha == 1.0 and ratio != "0.7"
        }
        nll = agents.of(f"{task} scored", scored, messages)
        plain = {key: one for key, one in messages.items() if not key.startswith("with")}
        calibrating = agents.of(f"{task} calibration", calibration, plain)
        found["all_layers"] = vars(recovered(nll, key_of(everything)))
        found["rows"] = []
        for ratio in RATIOS:
            for alpha in ALPHAS:
                row: dict[str, Any] = {"ratio": ratio, "alpha": alpha}
                keys = {v: key_of(chosen[v, ratio, alpha]) for v in VARIANTS}
                for variant, key in keys.items():
                    row[variant] = {"layers": chosen[variant, ratio, alpha]}
                    row[variant] |= {"recovered": vars(recovered(nll, key))}
                    if "with first: " + key in nll:
                        row[variant]["with_first"] = vars(recovered(nll, "with first: " + key))
                    row[variant]["calibration_nll"] = float(calibrating[key].sum())
                gap = nll[keys["left out"]] - nll[keys["counted"]]
                row["nll_gap"] = vars(statistics.mean(gap))
                row["right_by_nll"] = rule_by_nll(
                    *(calibrating[key] for key in keys.values()), float(gap.sum())
                )
                found["rows"].append(row)
        result["tasks"][task] = found
        print(f"{model_name} {task} done", file=sys.stderr, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--models", default="smollm2-135m,qwen2.5-coder-0.5b")
    parser.add_argument("--tasks", default="hotpotqa")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for model in args.models.split(","):
        start = time.perf_counter()
        found = study(model, args.data_dir, args.tasks.split(","), args.limit, args.out)
        shown = [Path(part).name if "/" in part else part for part in sys.argv]
        found |= {
            "command": shlex.join(["python", *shown]),
            "machine": environment.machine(),
            "seconds": time.perf_counter() - start,
        }
        write_json(args.out / f"first_token-{model}.json", found)


if __name__ == "__main__":
    main()
