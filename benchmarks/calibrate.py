"""Calibration: what measuring the attention mass costs, in time and in memory.

Contexts and questions are random ids.

    tap q          seconds; window: one forward call of a question of q random ids behind a packet
                   of all layers, the head on its last row, mass measured. limit: the same call
                   without the mass, in the same round, so that a tap of 5% shows as 95% of it
    calibrate      seconds; window: kvcomm.calibrate on one sample: the context is read and the
                   question prefilled, both ways of counting the first token. limit: reading and
                   prefilling alone, in the same round
    mass memory n  MB that such a question of 32 ids takes at most besides the packet, which has n
                   tokens of random keys and values; in a process of its own each round; no limit

    python benchmarks/calibrate.py --model smollm2-135m --json
"""

from collections.abc import Iterator
from time import perf_counter

from handover import timed
from measurement import LIMIT, OURS, Line, Setup, Slice, alone, main, run_alone, token_ids
from peers.wire import memory, reset_peak

import kvcomm
from kvcomm._core import KV, Session, Workspace

CONTEXT, QUICK_CONTEXT = 2048, 256
QUESTIONS, QUICK_QUESTIONS = (32, 512), (32,)
LONG, QUICK_LONG = (8192, 32768), (1024, 4096)


def measure_alone(source: str, dtype: str, kv_dtype: str, threads: int, n: int) -> int:
    """Bytes that a tapped question takes behind n tokens, in this process."""
    kvcomm.set_num_threads(threads)
    model = kvcomm.Model.load(source, dtype=dtype, kv_dtype=kv_dtype)
    kv, ids = random_kv(model, n), token_ids(model, QUESTIONS[0])
    reset_peak()
    before, _ = memory()
    tap(model, kv, ids, "paper")()
    return memory()[1] - before


def random_kv(model: kvcomm.Model, n: int) -> KV:
    """Keys and values of n tokens in all layers, as many bytes as real ones."""
    import numpy as np

    values = np.random.default_rng(0).standard_normal(
        (model.n_kv_heads, n, model.head_dim), np.float32
    )
    if model.kv_dtype == "bf16":
        values = (values.view(np.uint32) >> 16).astype(np.uint16)
    elif model.kv_dtype == "f16":
        values = values.astype(np.float16)
    return KV.from_arrays(
        {layer: [(values, values, 0, 0)] for layer in range(model.n_layers)},
        n_layers=model.n_layers,
        n_kv_heads=model.n_kv_heads,
        head_dim=model.head_dim,
        dtype=model.kv_dtype,
        next_position=n,
    )


def tap(model: kvcomm.Model, kv: KV, ids: list[int], mass: str | None) -> Slice:
    """One question behind keys and values, with the mass or without."""
    workspace = Workspace(model.core)

    def work() -> float:
        session = Session(model.core, kv_dtype=model.kv_dtype)
        session.give(kv)
        start = perf_counter()
        workspace.forward([session], [ids], output="argmax", mass=mass)
        return perf_counter() - start

    return work


def memory_lines(setup: Setup) -> Iterator[Line]:
    for n in QUICK_LONG if setup.quick else LONG:
        times = setup.alternate({OURS: lambda n=n: float(alone(setup, __file__, n))})
        yield setup.line(f"mass memory {n}", times, lambda n_bytes: n_bytes / 1e6, "MB")


def time_lines(setup: Setup) -> Iterator[Line]:
    model = setup.load()
    sender, receiver = kvcomm.Sender(model), kvcomm.Receiver(model)
    context = token_ids(model, QUICK_CONTEXT if setup.quick else CONTEXT)
    kv = sender.read(context).kv
    for n in QUICK_QUESTIONS if setup.quick else QUESTIONS:
        ids = token_ids(model, n, seed=1)
        times = setup.alternate(
            {OURS: tap(model, kv, ids, "paper"), LIMIT: tap(model, kv, ids, None)}
        )
        yield setup.line(f"tap {n}", times, lambda seconds: seconds, "s")
    question = token_ids(model, QUESTIONS[0], seed=1)
    times = setup.alternate(
        {
            OURS: timed(lambda: kvcomm.calibrate(sender, receiver, [(context, question)])),
            LIMIT: timed(lambda: receiver.prefill(question, sender.read(context))),
        }
    )
    yield setup.line("calibrate", times, lambda seconds: seconds, "s")


def measure(setup: Setup) -> Iterator[Line]:
    yield from time_lines(setup)
    yield from memory_lines(setup)


if __name__ == "__main__" and not run_alone(measure_alone):
    main(__doc__, measure)
