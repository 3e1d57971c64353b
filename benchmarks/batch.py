"""Batches: how much more 1, 4, 16 and 64 sequences of mixed lengths get done together.

Contexts have 32 to 256 random ids, the same on every run. Two windows:

    batch b prefill   one forward call of all contexts in fresh sessions, argmax of each last row;
                      tokens/s; limit: all counted FLOPs at the product limit
    batch b decode    greedy steps of all sequences, one forward call each; tokens/s of all
                      together; limit: min(b times the rate of one such sequence, measured in the
                      same round; FLOPs of the products at the product limit)

Not in them: loading, making and freeing sessions. Peers: transformers pads to the longest,
llama.cpp runs one stream per sequence.

    python benchmarks/batch.py --model smollm2-135m --json
"""

import random
from collections.abc import Iterator
from time import perf_counter

from decode import Rows, peer_steps
from limits import Products
from measurement import LIMIT, OURS, Line, Setup, Slice, main, token_ids
from peers.process import Peer
from prefill import counted, peer_prefill

from kvcomm._core import Session, Workspace
from kvcomm.model import Model
from kvcomm.shapes import Shape

SIZES, QUICK = (1, 4, 16, 64), (1, 4)
SHORTEST, LONGEST = 32, 256
STEPS, QUICK_STEPS = 16, 4


def contexts_of(model: Model, n: int) -> list[list[int]]:
    """n contexts; the first are the same for every n."""
    draw = random.Random(1)
    return [token_ids(model, draw.randint(SHORTEST, LONGEST), seed) for seed in range(n)]


def prefill(model: Model, workspace: Workspace, contexts: list[list[int]]) -> Slice:
    """All contexts in one call."""

    def work() -> float:
        sessions = [Session(model.core, kv_dtype=model.kv_dtype) for _ in contexts]
        start = perf_counter()
        workspace.forward(sessions, contexts, output="argmax")
        return perf_counter() - start

    return work


def measure(setup: Setup) -> Iterator[Line]:
    model = setup.load()
    workspace, products = Workspace(model.core), setup.products(Shape.of(model))
    peers = setup.peers("steps", model)
    n = QUICK_STEPS if setup.quick else STEPS
    for size in QUICK if setup.quick else SIZES:
        contexts = contexts_of(model, size)
        total = sum(map(len, contexts))
        ours = prefill(model, workspace, contexts)
        flops = counted(workspace, ours)
        whole = flops["linear_flops"] + flops["attention_flops"]
        times = setup.alternate(
            {OURS: ours}
            | {name: peer_prefill(peer, contexts) for name, peer in peers.items()}
            | {LIMIT: lambda whole=whole: whole / products.rate()}
        )
        yield setup.line(
            f"batch {size} prefill", times, lambda s, total=total: total / s, "tokens/s"
        )
        yield decode_line(setup, model, workspace, contexts, n, peers, products)


def decode_line(
    setup: Setup,
    model: Model,
    workspace: Workspace,
    contexts: list[list[int]],
    n: int,
    peers: dict[str, Peer],
    products: Products,
) -> Line:
    """Decode of one batch."""
    rows = Rows(model, workspace, contexts)
    middle = sorted(contexts, key=len)[len(contexts) // 2]
    alone = Rows(model, workspace, [middle])
    flops = counted(workspace, lambda: rows.steps(n))["linear_flops"]
    times = setup.alternate(
        {OURS: lambda: rows.steps(n)}
        | {name: peer_steps(peer, contexts, n) for name, peer in peers.items()}
        | {LIMIT: lambda: max(alone.steps(n), flops / products.rate())}
    )
    size = len(contexts)
    return setup.line(f"batch {size} decode", times, lambda s: size * n / s, "tokens/s")


if __name__ == "__main__":
    main(__doc__, measure)
