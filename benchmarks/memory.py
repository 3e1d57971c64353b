"""Memory: the most that is resident while a model is loaded, reads a prompt and decodes.

Not a time: what is measured is bytes, in a process of its own each round, from before the model is
loaded (interpreter and libraries do not count) to after the last token. A prompt of random ids, the
head on its last row, then a few greedy steps. Peers: the same work, measured once; pages of mapped
files count, since they are resident too.

    peak    GB; limit: weights as stored and keys and values, nothing else

    python benchmarks/memory.py --model qwen2.5-coder-0.5b --dtype bf16 --json
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator

from measurement import LIMIT, OURS, Line, Setup, main, token_ids
from peers.process import Peer
from peers.wire import memory

TOKENS, QUICK = 2048, 256
STEPS = 8

#: First argument of the process that is measured.
ALONE = "--alone"


def alone(source: str, dtype: str, kv_dtype: str, threads: int, n: int) -> dict[str, int]:
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
    arguments = [setup.source, setup.options.dtype, setup.kv_dtype, str(setup.threads), str(n)]
    found = []

    def ours() -> float:
        command = [sys.executable, __file__, ALONE, *arguments]
        reply = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found.append(json.loads(reply.stdout))
        return float(found[-1]["peak"])

    times = setup.alternate(
        {OURS: ours}
        | {name: lambda peak=peak: peak for name, peak in peers.items()}
        | {LIMIT: lambda: float(found[-1]["least"])}
    )
    yield setup.line(f"peak {n}", times, lambda n_bytes: n_bytes / 1e9, "GB")


def measured_alone() -> None:
    """The process that is measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument(ALONE, nargs=5, required=True)
    source, dtype, kv_dtype, threads, n = parser.parse_args().alone
    print(json.dumps(alone(source, dtype, kv_dtype, int(threads), int(n))))


if __name__ == "__main__":
    if ALONE in sys.argv:
        measured_alone()
    else:
        main(__doc__, measure)
