"""Strategy `search` against the paper's choice, at equal numbers of layers, on unseen records.

For every model the search runs on a few records of one file. What it found, and what the attention
mass chooses after a calibration on the first of the same records, is measured on records of
another file, and on the records searched on, to show how far few records are fitted.
Teacher-forced, nothing is decoded.

    python benchmarks/search.py --data dev_distractor_100.jsonl \\
        --calibration train_distractor_100.jsonl --models smollm2-135m:6:0.3
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import kvcomm
from kvcomm import environment, prompts, statistics, tasks
from kvcomm.records import write_json
from kvcomm.search import SearchResult, Step, search

BATCH = 10

Layers = tuple[int, ...]


def likelihoods(
    sender: kvcomm.Sender,
    receiver: kvcomm.Receiver,
    examples: Sequence[Any],
    sets: Sequence[Layers],
) -> dict[Layers | str, np.ndarray]:
    """The nll [n] of the gold answers under each set of layers, the baseline and the skyline."""
    rows: dict[Layers | str, list[float]] = {key: [] for key in ("baseline", "skyline", *sets)}
    for start in range(0, len(examples), BATCH):
        batch = examples[start : start + BATCH]
        questions, golds = [one.question for one in batch], [list(one.answers) for one in batch]
        whole = [prompts.skyline_message(one.context, one.question) for one in batch]
        packets = sender.read([one.context for one in batch])
        scores = {
            "baseline": receiver.score(questions, golds),
            "skyline": receiver.score(whole, golds, message=str),
        }
        for layers in rows.keys() - scores.keys():
            scores[layers] = receiver.score(questions, golds, [p.select(layers) for p in packets])
        for key, found in scores.items():
            rows[key] += [one.nll for one in found]
    return {key: np.array(values) for key, values in rows.items()}


def recovered(nll: Mapping[Layers | str, np.ndarray], layers: Layers) -> dict[str, float]:
    """Share of what reading the context would have given, with its bootstrap interval."""
    gain, room = nll["baseline"] - nll[layers], nll["baseline"] - nll["skyline"]
    spread = np.concatenate(
        [gain[rows].sum(axis=1) / room[rows].sum(axis=1) for rows in statistics.draws(len(gain))]
    )
    return vars(statistics.interval(float(gain.sum() / room.sum()), spread, len(gain)))


def study(name: str, n_search: int, ratio: str, args: argparse.Namespace) -> dict[str, Any]:
    """One model, as JSON can hold it."""
    model = kvcomm.Model.load(name, dtype="f32")
    sender, receiver = kvcomm.Sender(model), kvcomm.Receiver(model)
    task = tasks.find("hotpotqa")
    seen = task.load(args.calibration)[:n_search]
    unseen = task.load(args.data)[: args.limit]
    start = time.perf_counter()

    def watch(step: Step) -> None:
        print(f"{name}: {step.layers} {step.nll:.3f}", file=sys.stderr, flush=True)

    found: SearchResult = search(
        sender,
        receiver,
        [(one.context, one.question, list(one.answers)) for one in seen],
        ratio=ratio,
        beam=args.beam,
        backward=args.backward,
        watch=watch,
    )
    seconds = time.perf_counter() - start
    flops = receiver.counts["linear_flops"] + receiver.counts["attention_flops"]
    samples = [(one.context, one.question) for one in seen[:1]]
    scores = kvcomm.calibrate(sender, receiver, samples)
    sizes = range(1, len(found.layers) + 1)
    choices = {f"search {len(step.layers)}": step.layers for step in found.steps[1:]}
    if args.backward:
        choices["search, backward"] = found.layers
    for n in (len(found.layers), *[n for n in sizes if n % 3 == 0]):
        choices[f"attention {n}"] = scores.top(count=n)
        choices[f"attention {n}, first token left out"] = scores.skipping(True).top(count=n)
    choices["all layers"] = tuple(range(model.n_layers))
    sets = sorted(set(choices.values()))
    new, old = (likelihoods(sender, receiver, records, sets) for records in (unseen, seen))
    attention = choices[f"attention {len(found.layers)}"]
    return {
        "model": name,
        "n_layers": model.n_layers,
        "search": asdict(found),
        "search_seconds": seconds,
        "search_flops": flops,
        "rows": {
            label: {
                "layers": layers,
                "unseen": recovered(new, layers),
                "seen": recovered(old, layers),
            }
            for label, layers in choices.items()
        },
        "nll_search_minus_attention": vars(
            statistics.difference(new[found.layers], new[attention])
        ),
    }


def table(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown of all models."""
    lines = ["| model | choice | layers | recovered, unseen | n | on the records searched on | n |"]
    lines += ["| --- | --- | --- | ---: | ---: | ---: | ---: |"]
    for document in documents:
        for label, row in document["rows"].items():
            cells = [document["model"], label]
            layers = " ".join(map(str, row["layers"]))
            cells.append("all" if len(row["layers"]) == document["n_layers"] else layers)
            for one in (row["unseen"], row["seen"]):
                cells.append(f"{one['value']:.0%} [{one['low']:.0%}..{one['high']:.0%}]")
                cells.append(str(one["n"]))
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "search N: the set after N steps. attention N: the paper's choice of N layers, calibrated",
        "on the first record searched on. recovered: share of what reading the context would have",
        "given; ranges: 95% bootstrap intervals over records.",
        "",
    ]
    for document in documents:
        gap = document["nll_search_minus_attention"]
        lines += [
            f"{document['model']}: {document['search']['n_evaluations']} candidates on "
            f"{document['search']['n_samples']} records in {document['search_seconds']:.0f} s, "
            f"{document['search_flops'] / 1e12:.1f} TFLOP. nll per unseen record, search - "
            f"attention at equal M: {gap['value']:+.2f} [{gap['low']:+.2f}..{gap['high']:+.2f}], "
            f"n = {gap['n']}.",
            "",
        ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument(
        "--models",
        default="smollm2-135m:6:0.3,qwen2.5-coder-0.5b:4:0.3",
        help="name:records to search on:ratio, comma separated",
    )
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for part in filter(None, args.models.split(",")):
        name, n_search, ratio = part.split(":")
        start = time.perf_counter()
        document = study(name, int(n_search), ratio, args)
        shown = [Path(part).name if "/" in part else part for part in sys.argv[1:]]
        document |= {
            "command": shlex.join(["python", "benchmarks/search.py", *shown]),
            "machine": environment.machine(),
            "seconds": time.perf_counter() - start,
        }
        write_json(args.out / f"search-{name}.json", document)
    documents = [json.loads(path.read_text()) for path in sorted(args.out.glob("search-*.json"))]
    lines = ["# Layers found by search", ""]
    for one in documents:
        lines += [f"    {one['command']}", ""]
        lines += [f"{json.dumps(one['machine'])}, {one['seconds']:.0f} s for {one['model']}.", ""]
    text = "\n".join([*lines, *table(documents)])
    (args.out / "search.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
