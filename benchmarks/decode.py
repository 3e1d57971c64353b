"""Decode: how fast one sequence gets its next tokens, after a short and a long context.

Window: a run of greedy steps, one forward call each, its argmax fed to the next; the session is cut
back to its context afterwards. Not in it: the context's prefill, tokens, text. Peers: the same
steps, ids fed back in Python as here.

    decode after n   tokens/s; limit: bytes that a step has to read, at the memory-read limit: the
                     weights as stored (of an embedding table that is not the head one row) and the
                     keys and values of the context

A model that fits into the last-level cache can exceed that limit.

    python benchmarks/decode.py --model smollm2-135m --dtype bf16 --json
"""

from collections.abc import Iterator
from time import perf_counter

from measurement import LIMIT, OURS, Line, Setup, Slice, main, token_ids
from peers.process import Peer

from kvcomm._core import Session, Workspace
from kvcomm.model import Model
from kvcomm.shapes import Shape

CONTEXTS = (128, 4096)
QUICK = (128,)
STEPS, QUICK_STEPS = 32, 8


class Rows:
    """Sequences behind their contexts, that can take the same greedy steps again and again."""

    def __init__(self, model: Model, workspace: Workspace, contexts: list[list[int]]) -> None:
        self._workspace = workspace
        self._lengths = [len(ids) for ids in contexts]
        self._sessions = [Session(model.core, kv_dtype=model.kv_dtype) for _ in contexts]
        self._first, _ = workspace.forward(self._sessions, contexts, output="argmax")

    def steps(self, n: int) -> float:
        """Seconds of n steps of all rows."""
        tokens = self._first
        start = perf_counter()
        for _ in range(n):
            rows = tokens.reshape(-1, 1)
            tokens, _ = self._workspace.forward(self._sessions, list(rows), output="argmax")
        seconds = perf_counter() - start
        for session, length in zip(self._sessions, self._lengths, strict=True):
            session.truncate(length)
        return seconds


def peer_steps(peer: Peer, contexts: list[list[int]], n: int) -> Slice:
    """A peer's steps; its contexts are filled now."""
    peer.ask("context", rows=contexts)
    return lambda: peer.seconds("steps", n=n)


def step_bytes(model: Model, length: int) -> float:
    """Bytes that a step after `length` tokens has to read."""
    shape = Shape.of(model.core.config)
    embedding = 0 if shape.tied_head else shape.vocab_size * shape.dim
    weights = model.nbytes * (1 - embedding / shape.parameters)
    return weights + model.memory["kv_per_token"] * length


def measure(setup: Setup) -> Iterator[Line]:
    model = setup.load()
    workspace, reads = Workspace(model.core), setup.reads()
    peers = setup.peers("steps", model)
    n = QUICK_STEPS if setup.quick else STEPS
    for length in QUICK if setup.quick else CONTEXTS:
        if length + n > model.max_position:
            continue
        contexts = [token_ids(model, length)]
        rows, bytes_read = Rows(model, workspace, contexts), n * step_bytes(model, length + n // 2)
        times = setup.alternate(
            {OURS: lambda rows=rows: rows.steps(n)}
            | {name: peer_steps(peer, contexts, n) for name, peer in peers.items()}
            | {LIMIT: lambda bytes_read=bytes_read: bytes_read / reads.rate()}
        )
        yield setup.line(f"decode after {length}", times, lambda s: n / s, "tokens/s")


if __name__ == "__main__":
    main(__doc__, measure)
