"""Prefill: how fast a prompt of random ids goes through the model, by its length.

Window: one forward call of n ids in a fresh session, the head on the last row, its argmax. Not in
it: loading, tokens, making and freeing the session. Peers: the same call, the head on the last row
only; llama.cpp keeps keys and values in f16, transformers in the weights' type.

    prefill n    tokens/s; limit: all counted FLOPs (products and attention) at the product limit
    products     what is left of a token's time when attention is taken out; limit: FLOPs of the
                 products at the product limit
    attention    of the longest prompt, FLOPs of attention over its time; the same limit

The last two are solved from 512 tokens and the longest prompt of a round, each with its counted
FLOPs: seconds = products / a + attention / b. Norms, activations and the like thus count as time of
the products. They need a prompt long enough that attention shows, so --quick leaves them out.

    python benchmarks/prefill.py --model smollm2-135m --dtype bf16 --json
"""

import argparse
from collections.abc import Iterator, Mapping
from time import perf_counter

from measurement import LIMIT, OURS, Line, Setup, Slice, Times, main, token_ids
from peers.process import Peer

from kvcomm._core import Session, Workspace
from kvcomm.model import Model
from kvcomm.shapes import Shape

LENGTHS = (128, 512, 2048, 8192)
QUICK = (128, 512)
BASE = 512

Flops = Mapping[str, float]
Pair = tuple[float, float]


def prefill(model: Model, workspace: Workspace, ids: list[int]) -> Slice:
    """One prefill in a session of its own."""

    def work() -> float:
        session = Session(model.core, kv_dtype=model.kv_dtype)
        start = perf_counter()
        workspace.forward([session], [ids], output="argmax")
        return perf_counter() - start

    return work


def peer_prefill(peer: Peer, rows: list[list[int]]) -> Slice:
    return lambda: peer.seconds("prefill", rows=rows)


def counted(workspace: Workspace, work: Slice) -> Flops:
    """FLOPs of one slice, by kind."""
    before = workspace.counts
    work()
    return {name: value - before[name] for name, value in workspace.counts.items()}


def split(short: Flops, long: Flops, short_seconds: float, long_seconds: float) -> Pair:
    """(seconds of products, seconds of attention) of the long prompt."""
    a, b = short["linear_flops"], short["attention_flops"]
    c, d = long["linear_flops"], long["attention_flops"]
    # short_seconds = a * x + b * y, long_seconds = c * x + d * y
    determinant = a * d - b * c
    x = (short_seconds * d - long_seconds * b) / determinant
    y = (long_seconds * a - short_seconds * c) / determinant
    return c * x, d * y


def phases(setup: Setup, times: Mapping[int, Times], flops: Mapping[int, Flops]) -> Iterator[Line]:
    """The lines of products and attention, from a prompt of BASE tokens and the longest."""
    short, long = BASE, max(times)
    rows = [
        split(flops[short], flops[long], one, two)
        for one, two in zip(times[short][OURS], times[long][OURS], strict=True)
    ]
    whole = flops[long]["linear_flops"] + flops[long]["attention_flops"]
    limits = times[long][LIMIT]  # seconds of `whole` at the product limit
    for place, name, kind in (
        (0, f"products {long}", "linear_flops"),
        (1, f"attention {long}", "attention_flops"),
    ):
        work = flops[long][kind]
        part = {OURS: [row[place] for row in rows], LIMIT: [s * work / whole for s in limits]}
        yield setup.line(name, part, lambda seconds, work=work: work / seconds / 1e9, "GFLOP/s")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--longest", type=int, metavar="N", help="leave out longer prompts")
    parser.add_argument(
        "--peers-longest", type=int, metavar="N", help="leave peers out of longer prompts"
    )


def measure(setup: Setup) -> Iterator[Line]:
    model = setup.load()
    workspace, products = Workspace(model.core), setup.products(Shape.of(model))
    peers = setup.peers("prefill", model)
    times, flops = {}, {}
    for n in QUICK if setup.quick else LENGTHS:
        if n > min(model.max_position, setup.options.longest or n):
            continue
        ids = token_ids(model, n)
        ours = prefill(model, workspace, ids)
        flops[n] = counted(workspace, ours)
        whole = flops[n]["linear_flops"] + flops[n]["attention_flops"]
        asked = peers if n <= (setup.options.peers_longest or n) else {}
        times[n] = setup.alternate(
            {OURS: ours}
            | {name: peer_prefill(peer, [ids]) for name, peer in asked.items()}
            | {LIMIT: lambda whole=whole: whole / products.rate()}
        )
        yield setup.line(f"prefill {n}", times[n], lambda seconds, n=n: n / seconds, "tokens/s")
    if max(times, default=0) > BASE:
        yield from phases(setup, times, flops)


if __name__ == "__main__":
    main(__doc__, measure, add)
