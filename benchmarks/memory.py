"""Memory: the most that is resident while a model is loaded, reads a prompt and decodes.

Not a time: what is measured is bytes, in a process of its own each round, from before the model is
loaded (interpreter and libraries do not count) to after the last token. A prompt of random ids, the
head on its last row, then a few greedy steps. Peers: the same work, measured once; pages of mapped
files count, since they are resident too.

    peak    GB; limit: weights as stored and keys and values, nothing else

    python benchmarks/memory.py --model qwen2.5-coder-0.5b --dtype bf16 --json
"""

from collections.abc import Iterator

from measurement import LIMIT, OURS, Line, Setup, alone, main, run_alone, token_ids
from peers.process import Peer
from peers.wire import memory

TOKENS, QUICK = 2048, 256
STEPS = 8


def measure_alone(source: str, dtype: str, kv_dtype: str, threads: int, n: int) -> dict[str, int]:
    """Load, read n tokens and decode in this process; bytes."""
    import kvcomm
    from kvcomm._core import Session, Workspace

    kvcomm.set_num_threads(threads)
    before, _ = memory()
    model = kvcomm.Model.load(source, dtype=dtype, kv_dtype=kv_dtype)
    workspace, session = Workspace(model.core), Session(model.core, kv_dtype=kv_dtype)
    token, _ = workspace.forward([session], [token_ids(model, n)], output="argmax")
    for _ in range(STEPS):
        token, _ = workspace.forward([session], [token], output="argmax")
    least = model.nbytes + model.memory["kv_per_token"] * (n + STEPS)
    return {"peak": memory()[1] - before, "least": least}


def peer_peak(peer: Peer, ids: list[int]) -> float:
    peer.ask("context", rows=[ids])
    peer.ask("steps", n=STEPS)
    return float(peer.ask("peak")["bytes"])


def measure(setup: Setup) -> Iterator[Line]:
    with setup.load() as model:
        n = min(QUICK if setup.quick else TOKENS, model.max_position - STEPS)
        ids = token_ids(model, n)
        peers = {name: peer_peak(peer, ids) for name, peer in setup.peers("peak", model).items()}
    found = []

    def ours() -> float:
        found.append(alone(setup, __file__, n))
        return float(found[-1]["peak"])

    times = setup.alternate(
        {OURS: ours}
        | {name: lambda peak=peak: peak for name, peak in peers.items()}
        | {LIMIT: lambda: float(found[-1]["least"])}
    )
    yield setup.line(f"peak {n}", times, lambda n_bytes: n_bytes / 1e9, "GB")


if __name__ == "__main__" and not run_alone(measure_alone):
    main(__doc__, measure)
