"""The first context token's place in the attention mass, and what it does to the choice of layers.

The mass of a layer counts the weight on the first context token (preset paper) or leaves it out
(preset reference). Owns the study of that one switch, model by model: what share of the mass the
token holds, what its K and V are worth, whether the receiver keeps a first token of its own that
attention can rest on, how both rankings agree with what single layers are worth, what either choice
recovers on records that nothing was chosen from, and whether a rule that sees calibration records
only picks the better one. Everything is teacher-forced, nothing is decoded.

    python benchmarks/first_token.py --data-dir data --models smollm2-135m,qwen2.5-coder-0.5b

Likelihoods are kept in --out as they come; a run that was stopped goes on where it was, and one
with more tasks or records adds to what is there. The table is made of all models in --out.
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
from kvcomm._core import KV, Session, Workspace
from kvcomm.packet import Packet
from kvcomm.records import write_json
from kvcomm.turns import prompt_ids

VARIANTS = {"counted": False, "left out": True}

#: Per task the file with records to score and the one to calibrate on; the same file: its first
#: records calibrate and are not scored.
FILES = {
    "hotpotqa": ("hotpotqa/dev_distractor_100.jsonl", "hotpotqa/train_distractor_100.jsonl"),
    "musique": ("musique/musique_ans_dev_100.jsonl", "musique/musique_ans_train_100.jsonl"),
    "countries": ("countries/countries.jsonl",) * 2,
    "tipsheets": ("tipsheets/tipsheets.jsonl",) * 2,
}

BATCH = 16
DRAWS = 2000  # of N calibration records, for the rule

Layers = tuple[int, ...]
Change = Callable[[Packet], Packet]


def load(task: str, folder: Path, limit: int, n_rule: int) -> tuple[list[Any], list[Any]]:
    """(records to score, n_rule calibration records) of a task, none in both."""
    scored, other = (tasks.find(task).load(folder / name) for name in FILES[task])
    if FILES[task][0] == FILES[task][1]:
        return scored[n_rule : n_rule + limit], scored[:n_rule]
    return scored[:limit], other[:n_rule]


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
    """The nll of gold answers, per set of records and message; measured once, kept in a file."""

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


def recovered(nll: Mapping[str, np.ndarray], key: str) -> dict[str, float] | None:
    """Share of what reading the context would have given; None where it would not have helped."""
    gain, room = nll["baseline"] - nll[key], nll["baseline"] - nll["skyline"]
    if room.sum() <= 0:
        return None
    spread = np.concatenate(
        [gain[rows].sum(axis=1) / room[rows].sum(axis=1) for rows in statistics.draws(len(gain))]
    )
    return vars(statistics.interval(float(gain.sum() / room.sum()), spread, len(gain)))


# ---- what is looked at ----


def masses(agents: Likelihoods, examples: Sequence[Any]) -> dict[str, selection.LayerScores]:
    """Per variant the calibration on these records."""
    samples = [(one.context, one.question) for one in examples]
    return {
        name: kvcomm.calibrate(agents.sender, agents.receiver, samples, skip_first=skip)
        for name, skip in VARIANTS.items()
    }


def norms(agents: Likelihoods, examples: Sequence[Any]) -> dict[str, list[float]]:
    """Per layer the first context token's norm over the mean norm of the others, of K and of V."""
    ratios: dict[str, list[np.ndarray]] = {"k": [], "v": []}
    for packet in agents.sender.read([one.context for one in examples]):
        for name, read in (("k", packet.keys), ("v", packet.values)):
            size = [np.linalg.norm(read(n).astype(float), axis=2) for n in range(packet.n_layers)]
            ratios[name].append(
                np.array([(one[:, 0] / one[:, 1:].mean(axis=1)).mean() for one in size])
            )
    return {name: np.mean(rows, axis=0).tolist() for name, rows in ratios.items()}


def own_sink(agents: Likelihoods, examples: Sequence[Any]) -> dict[str, list[float]]:
    """Per layer the norm of what enters it for the question's first token, over the median token's.

    A token that attention rests on has states tens of times longer than others (a "massive
    activation"). Whether the receiver's own first token becomes one depends on what it is sent.
    """
    model, n_layers = agents.receiver.model, agents.receiver.model.n_layers
    half = n_layers // 2
    sets = {"nothing": (), "all": range(n_layers), "lower half": range(half)}
    sets |= {"upper half": range(half, n_layers), "layer 0": (0,)}
    found = {}
    for name, layers in sets.items():
        rows = []
        for one in examples:
            session, workspace = Session(model.core), Workspace(model.core)
            session.give(agents.sender.read(one.context).select(layers).kv)
            text = prompts.receiver_message(one.question)
            states: Any = prompt_ids(model, model.tokenizer, text, str, "question")
            row = []
            for n in range(n_layers):
                states, _ = workspace.forward(
                    [session], [states], layers=(n, n + 1), output="hidden", outputs="all"
                )
                size = np.linalg.norm(states.astype(float), axis=1)
                row.append(size[0] / np.median(size))
            rows.append(row)
        found[name] = np.mean(rows, axis=0).tolist()
    return found


def spearman(one: Sequence[float], two: Sequence[float]) -> float:
    """Rank correlation; these values have no ties."""
    ranks = [np.argsort(np.argsort(values)) for values in (one, two)]
    return float(np.corrcoef(*ranks)[0, 1])


def key_of(layers: Sequence[int]) -> str:
    return "layers " + ",".join(map(str, layers))


def choices(
    scores: Mapping[str, selection.LayerScores], ratios: Sequence[str], alphas: Sequence[float]
) -> dict[tuple[str, str, float], Layers]:
    """The layers of every variant, ratio and alpha."""
    return {
        (variant, ratio, alpha): scores[variant].top(ratio, alpha=alpha)
        for variant in VARIANTS
        for ratio in ratios
        for alpha in alphas
    }


def singles(agents: Likelihoods, name: str, examples: Sequence[Any]) -> dict[str, list[float]]:
    """What each layer gains when it is sent alone, and costs when it alone is left out, in nats."""
    everything = range(agents.sender.model.n_layers)
    rest = [[other for other in everything if other != n] for n in everything]
    sets = [[n] for n in everything] + rest + [[], everything]
    nll = agents.of(name, examples, {key_of(one): send(one) for one in sets})
    mean = {key: float(values.mean()) for key, values in nll.items()}
    return {
        "alone": [mean[key_of([])] - mean[key_of([n])] for n in everything],
        "left_out": [mean[key_of(one)] - mean[key_of(everything)] for one in rest],
    }


def token_worth(agents: Likelihoods, name: str, examples: Sequence[Any]) -> dict[str, Any]:
    """What all layers recover with and without the first token, and that token alone."""
    everything = key_of(range(agents.sender.model.n_layers))
    messages = {
        everything: send(range(agents.sender.model.n_layers)),
        "no first tokens": without_first,
        "only first tokens": with_first([]),
    }
    nll = agents.of(name, examples, messages)
    return {
        label: recovered(nll, key)
        for label, key in zip(("all", "without", "only"), messages, strict=True)
    }


def right(counted: np.ndarray, left_out: np.ndarray, truth: float) -> dict[str, float]:
    """How often N calibration records, drawn at random, give the better variant the lower nll.

    counted, left_out: nll [n] of calibration records. truth: nll of left_out minus that of counted,
    over the scored records.
    """
    gap, rng = left_out - counted, np.random.default_rng(0)
    found = {}
    for n in (n for n in (1, 4, 8) if n <= len(gap)):
        sums = [gap[rng.choice(len(gap), n, replace=False)].sum() for _ in range(DRAWS)]
        found[str(n)] = float(np.mean(np.sign(sums) == np.sign(truth)))
    return found


def study_task(
    agents: Likelihoods, task: str, args: argparse.Namespace, single: bool
) -> dict[str, Any]:
    """Everything about one model on one task, as JSON can hold it."""
    scored, calibration = load(task, args.data_dir, args.limit, args.rule)
    few = calibration[: args.calibration]
    scores = masses(agents, few)
    counted, left_out = (scores[variant].mass for variant in VARIANTS)
    found: dict[str, Any] = {
        "n": len(scored),
        "n_calibration": len(few),
        "mass": counted.tolist(),
        "first": (counted - left_out).tolist(),
        "norms": norms(agents, few),
        "token": token_worth(agents, f"{task} {args.calibration}", few),
    }
    if single:
        found["own_sink"] = own_sink(agents, few[:4])
        found["singles"] = singles(agents, f"{task} {args.calibration}", few)
        found["spearman"] = {
            what: {"counted": spearman(counted, row), "left out": spearman(left_out, row)}
            for what, row in found["singles"].items()
        }
    alphas = [float(alpha) for alpha in args.alphas.split(",")]
    ratios = args.ratios.split(",")
    chosen = choices(scores, ratios, alphas)
    everything = range(agents.sender.model.n_layers)
    messages = {key_of(layers): send(layers) for layers in [*chosen.values(), everything]}
    sinks = {}
    if single:
        half = [scores[variant].top("0.5") for variant in VARIANTS]
        sinks = {"with first: " + key_of(layers): with_first(layers) for layers in half}
    nll = agents.of(f"{task} scored", scored, messages | sinks)
    tried = {key: one for key, one in messages.items() if key != key_of(everything)}
    guide = agents.of(f"{task} calibration", calibration, tried)
    found["all_layers"] = recovered(nll, key_of(everything))
    found["with_first"] = {
        variant: recovered(nll, key) for variant, key in zip(VARIANTS, sinks, strict=False)
    }
    found["rows"] = []
    for ratio in ratios:
        for alpha in alphas:
            keys = {variant: key_of(chosen[variant, ratio, alpha]) for variant in VARIANTS}
            gap = nll[keys["left out"]] - nll[keys["counted"]]
            found["rows"].append(
                {
                    "ratio": ratio,
                    "alpha": alpha,
                    "layers": {v: chosen[v, ratio, alpha] for v in VARIANTS},
                    "recovered": {v: recovered(nll, key) for v, key in keys.items()},
                    "gap": vars(statistics.mean(gap)),
                    "right": right(*(guide[key] for key in keys.values()), float(gap.sum())),
                }
            )
    return found


# ---- the table ----


def share(found: Mapping[str, Any]) -> float:
    """The first token's share of the mass in the upper half of the layers."""
    half = len(found["mass"]) // 2
    return sum(found["first"][half:]) / sum(found["mass"][half:])


def percent(interval: Mapping[str, float] | None) -> str:
    if interval is None:
        return "-"
    return f"{interval['value']:.0%} [{interval['low']:.0%}..{interval['high']:.0%}]"


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown of all models."""
    every = [(one["model"], *pair) for one in documents for pair in one["tasks"].items()]
    looked = [(model, found) for model, _, found in every if "singles" in found]
    lines = [
        line(("model", "task", "share", "V", "all layers", "without first", "only first", "n")),
        line(("---", "---", *["---:"] * 6)),
    ]
    for model, task, found in every:
        token, upper = found["token"], len(found["mass"]) // 2
        cells = [model, task, f"{share(found):.0%}", f"{np.mean(found['norms']['v'][upper:]):.2f}"]
        cells += [percent(token[key]) for key in ("all", "without", "only")]
        lines.append(line([*cells, str(found["n_calibration"])]))
    lines += [
        "",
        "Share: the first context token's, of the mass in the upper half of the layers. V: norm",
        "of its values there over the mean of other tokens'. Then what is recovered on",
        "calibration records by all layers, by all layers without their first token, and by the",
        "first token of all layers; - where reading the context does not help at all.",
        "",
        line(("model", "task", "ratio", "alpha", "counted", "left out", "nll, left out - counted",
              "right, N = 1", "4", "8", "n")),
        line(("---", "---", *["---:"] * 9)),
    ]  # fmt: skip
    for model, task, found in every:
        for row in found["rows"]:
            gap, same = row["gap"], row["layers"]["counted"] == row["layers"]["left out"]
            cells = [model, task, row["ratio"], f"{row['alpha']:g}"]
            cells += [percent(row["recovered"][variant]) for variant in VARIANTS]
            cells.append(f"{gap['value']:+.2f} [{gap['low']:+.2f}..{gap['high']:+.2f}]")
            for n in ("1", "4", "8"):
                known = f"{row['right'][n]:.0%}" if n in row["right"] else "-"
                cells.append("same" if same else known)
            lines.append(line([*cells, str(found["n"])]))
    lines += [
        "",
        "Counted, left out: recovered on records that nothing was chosen from, by the layers",
        "chosen with the first token counted and left out. Right, N: how often N calibration",
        "records give the lower summed nll to the variant that is better on the scored records.",
        "",
        line(("model", *(f"{v}{what}" for v in VARIANTS for what in ("", " and first tokens")))),
        line(("---", *["---:"] * 4)),
    ]
    for model, found in looked:
        half = next(row for row in found["rows"] if row["ratio"] == "0.5")["recovered"]
        pairs = [(half[variant], found["with_first"][variant]) for variant in VARIANTS]
        lines.append(line([model, *(percent(one) for pair in pairs for one in pair)]))
    lines += [
        "",
        "Recovered at ratio 0.5, and when the first token of every other layer is sent as well.",
        "",
        line(("model", "counted, alone", "left out, alone", "counted, missed", "left out, missed")),
        line(("---", *["---:"] * 4)),
    ]
    for model, found in looked:
        ranks = [
            f"{found['spearman'][what][v]:+.2f}" for what in found["singles"] for v in VARIANTS
        ]
        lines.append(line([model, *ranks]))
    lines += [
        "",
        "Rank correlation of the mass with what a layer gains when it is sent alone, and costs",
        "when it is the one left out.",
        "",
        line(("model", "nothing sent", "all", "lower half", "upper half", "layer 0")),
        line(("---", *["---:"] * 5)),
    ]
    for model, found in looked:
        lines.append(line([model, *(f"{max(row):.0f}" for row in found["own_sink"].values())]))
    lines += [
        "",
        "Norm of the hidden state of the question's first token over the median token's, in the",
        "layer where that is largest, by what the receiver is sent.",
    ]
    for model, task, found in every:
        machine = f"{json.dumps(found['machine'])}, {found['seconds']:.0f} s for {model}, {task}."
        lines += ["", f"    {found['command']}", "", machine]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--models", default="smollm2-135m,qwen2.5-coder-0.5b")
    parser.add_argument("--tasks", default="hotpotqa")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--ratios", default="0.3,0.5,0.7")
    parser.add_argument("--alphas", default="1.0,0.8")
    parser.add_argument("--calibration", type=int, default=8, help="records to measure mass on")
    parser.add_argument("--rule", type=int, default=16, help="records to try the rule on")
    parser.add_argument("--singles", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--dtype", default="f32")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in filter(None, args.models.split(",")):
        path = args.out / f"first_token-{name}.json"
        known = json.loads(path.read_text()) if path.exists() else {"model": name, "tasks": {}}
        model = kvcomm.Model.load(name, dtype=args.dtype)
        agents = Likelihoods(model, args.out / f"first_token-{name}-nll.json")
        shown = [Path(part).name if "/" in part else part for part in sys.argv[1:]]
        for task in args.tasks.split(","):
            start = time.perf_counter()
            found = study_task(agents, task, args, args.singles and task == "hotpotqa")
            known["tasks"][task] = found | {
                "command": shlex.join(["python", "benchmarks/first_token.py", *shown]),
                "machine": environment.machine(),
                "seconds": time.perf_counter() - start,
            }
        known["n_layers"] = model.n_layers
        write_json(path, known)
    documents = [
        json.loads(path.read_text())
        for path in sorted(args.out.glob("first_token-*.json"))
        if not path.stem.endswith("-nll")
    ]
    text = "\n".join(["# The first context token's place in the mass", "", *table(documents)])
    (args.out / "first_token.md").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
