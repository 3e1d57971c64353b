"""Evaluation: records per second of `kvcomm eval` with method kvcomm, on HotpotQA.

Window: kvcomm.evaluate.evaluate, all that `kvcomm eval` does between loading and printing:
calibration on the first record, answers, metrics, likelihoods of the gold answers, the log, the
summary. Greedy, at most 48 tokens an answer. Peer: the published code on the same records, weights
in f32; its window is calibration on the same record and the answers, without metrics. Preset
`reference` computes what the published code does; how many answers are the same, to the character,
is said on standard error.

    evaluate n    records/s; limit: all counted FLOPs at the product limit

    python benchmarks/evaluate.py --data dev.json --published DIR --model smollm2-135m --json

Without --data the questions that come with the package are used.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from measurement import LIMIT, OURS, Line, Setup, main, say
from peers.process import Peer

import kvcomm
from kvcomm import tasks
from kvcomm.evaluate import evaluate
from kvcomm.methods import Options, methods
from kvcomm.plan import divide
from kvcomm.records import RECORDS
from kvcomm.shapes import Shape

N_RECORDS, QUICK = 100, 2
MAX_NEW_TOKENS = 48


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, metavar="FILE", help="HotpotQA records")
    parser.add_argument("--ratio", default="0.5", help="share of the layers that are sent")
    parser.add_argument("--preset", default="reference", choices=("reference", "paper"))
    parser.add_argument("--batch-size", type=int, default=25)
    parser.add_argument("--limit", type=int, help="records that are scored")


def examples_of(setup: Setup) -> Sequence[tasks.Example]:
    """Records that are scored, and one before them to calibrate on."""
    examples = tasks.find("hotpotqa").load(setup.options.data or tasks.SHIPPED)
    n = setup.options.limit or (QUICK if setup.quick else N_RECORDS)
    return examples[: n + 1]


def measure(setup: Setup) -> Iterator[Line]:
    model, examples, options = setup.load(), examples_of(setup), setup.options
    sender, receiver = kvcomm.Sender(model), kvcomm.Receiver(model)
    products = setup.products(Shape.of(model))
    n, flops, answers = len(examples) - 1, [0.0], {}

    def ours() -> float:
        before = counted(sender) + counted(receiver)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            start = perf_counter()
            summary = evaluate(
                sender,
                receiver,
                tasks.find("hotpotqa"),
                divide(examples, n_calibration=1),
                methods(("kvcomm",), Options(ratios=(options.ratio,))),
                out,
                preset=options.preset,
                max_new_tokens=MAX_NEW_TOKENS,
                batch_size=options.batch_size,
            )
            seconds = perf_counter() - start
            lines = (out / RECORDS).read_text(encoding="utf-8").splitlines()
            answers[OURS] = [json.loads(line)["answer"] for line in lines]
        failed = sum(method["failed"] for method in summary["methods"])
        if failed:
            raise RuntimeError(f"{failed} of {n} records failed")
        flops[0] = counted(sender) + counted(receiver) - before
        return seconds

    def theirs(peer: Peer, request: dict[str, Any]) -> float:
        reply = peer.ask("evaluate", **request)
        answers[peer.name] = reply["answers"]
        return float(reply["seconds"])

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.json"
        records = [{"prompt_A": one.context, "prompt_B": one.question} for one in examples]
        path.write_text(json.dumps(records), encoding="utf-8")
        request = {
            "records": str(path),
            "ratio": float(options.ratio),
            "n_calibration": 1,
            "max_new_tokens": MAX_NEW_TOKENS,
        }
        times = setup.alternate(
            {OURS: ours}
            | {
                name: lambda peer=peer: theirs(peer, request)
                for name, peer in setup.peers("evaluate", model).items()
            }
            | {LIMIT: lambda: flops[0] / products.rate()}
        )
    for name in times:
        if name in answers and name != OURS:
            same = sum(a == b for a, b in zip(answers[OURS], answers[name], strict=True))
            say(f"{name}: {same} of {n} answers are the same")
    yield setup.line(f"evaluate {n}", times, lambda seconds: n / seconds, "records/s")


def counted(agent: kvcomm.Sender | kvcomm.Receiver) -> float:
    """FLOPs so far."""
    return sum(value for name, value in agent.counts.items() if name != "tokens")


if __name__ == "__main__":
    main(__doc__, measure, add)
