"""Handing over: what it costs to give a packet to receivers, to store it, and to answer from it.

Contexts and questions are random ids; the packet holds every second layer, from the second on.

    merge into r   microseconds; window: r empty sessions each given the packet. Peers: transformers
                   copies its cache r times, since each receiver would write into it
    save, load     GB/s of keys and values; windows: Packet.save onto the file system, flushed to
                   the device; Packet.load of the same file, checks included. limit of load: the
                   bytes read once at the memory-read limit
    first token    seconds; window: Receiver.answer for one token, question behind the packet.
                   limit: skyline's seconds (context and question in one prompt, one token, in the
                   same round) times the packet's share of its FLOPs
    sender half    seconds; window: Sender.read of the lower half of the layers. limit: seconds of
                   reading all layers, in the same round, times the share of layers run

    python benchmarks/handover.py --model smollm2-135m --json
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from measurement import LIMIT, OURS, Line, Setup, Slice, main, token_ids

import kvcomm
from kvcomm._core import Session

CONTEXT, QUESTION = 2048, 32
QUICK_CONTEXT = 256
RECEIVERS = (1, 10)


def timed(work: Any) -> Slice:
    """Seconds of a call; what it returns is let go after the window."""

    def run() -> float:
        start = perf_counter()
        kept = work()
        seconds = perf_counter() - start
        del kept
        return seconds

    return run


def merge(model: kvcomm.Model, packet: kvcomm.Packet, n: int) -> Slice:
    """Seconds of giving a packet to n sessions that are there."""

    def run() -> float:
        sessions = [Session(model.core, kv_dtype=model.kv_dtype) for _ in range(n)]
        start = perf_counter()
        for session in sessions:
            session.give(packet.kv)
        return perf_counter() - start

    return run


def merges(setup: Setup, model: kvcomm.Model, packet: kvcomm.Packet) -> Iterator[Line]:
    peers = setup.peers("copies", model)
    for peer in peers.values():
        peer.ask("context", rows=[list(packet.ids)])
    for n in RECEIVERS:
        times = setup.alternate(
            {OURS: merge(model, packet, n)}
            | {
                name: lambda peer=peer, n=n: peer.seconds("copies", n=n)
                for name, peer in peers.items()
            }
        )
        yield setup.line(f"merge into {n}", times, lambda seconds: 1e6 * seconds, "us")


def files(setup: Setup, packet: kvcomm.Packet) -> Iterator[Line]:
    reads = setup.reads()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "packet.safetensors"
        saving = setup.alternate({OURS: timed(lambda: packet.save(path))})
        loading = setup.alternate(
            {
                OURS: timed(lambda: kvcomm.Packet.load(path)),
                LIMIT: lambda: packet.nbytes / reads.rate(),
            }
        )
    for name, times in (("save", saving), ("load", loading)):
        yield setup.line(f"{name} packet", times, lambda s: packet.nbytes / s / 1e9, "GB/s")


def flops(agent: Any, work: Any) -> float:
    """What the core counts while an agent does something."""
    before = sum(value for name, value in agent.counts.items() if name != "tokens")
    work()
    return sum(value for name, value in agent.counts.items() if name != "tokens") - before


def first_token(
    setup: Setup, receiver: kvcomm.Receiver, packet: kvcomm.Packet, question: list[int]
) -> Line:
    whole = [*packet.ids, *question]

    def ours() -> Any:
        return receiver.answer(question, packet, max_new_tokens=1)

    def skyline() -> Any:
        return receiver.answer(whole, max_new_tokens=1)

    share = flops(receiver, ours) / flops(receiver, skyline)
    run_skyline = timed(skyline)
    times = setup.alternate({OURS: timed(ours), LIMIT: lambda: share * run_skyline()})
    return setup.line("first token", times, lambda seconds: seconds, "s")


def early_exit(setup: Setup, sender: kvcomm.Sender, context: list[int]) -> Line:
    n_layers = sender.model.n_layers
    half = range(max(1, n_layers // 2))
    run_all = timed(lambda: sender.read(context))
    share = len(half) / n_layers
    times = setup.alternate(
        {OURS: timed(lambda: sender.read(context, layers=half)), LIMIT: lambda: share * run_all()}
    )
    return setup.line("sender half", times, lambda seconds: seconds, "s")


def measure(setup: Setup) -> Iterator[Line]:
    model = setup.load()
    sender, receiver = kvcomm.Sender(model), kvcomm.Receiver(model)
    length = QUICK_CONTEXT if setup.quick else CONTEXT
    context, question = token_ids(model, length), token_ids(model, QUESTION, seed=1)
    packet = sender.read(context, layers=range(1, model.n_layers, 2))
    yield from merges(setup, model, packet)
    yield from files(setup, packet)
    yield first_token(setup, receiver, packet, question)
    yield early_exit(setup, sender, context)


if __name__ == "__main__":
    main(__doc__, measure)
