"""Loading: seconds until a model can be used, from files that the system has in memory already.

Window: `Model.load`, everything it does included (tokenizer, checks, the copy into the core), and
one token through the model: who maps a file has read nothing until then. The fingerprint is not in
it: it is taken when a message is saved. The first load, which reads the disk and may touch memory
that the machine never used before, does not count. Freeing the model is not in the window. Peers:
the same, of a second copy.

    load    seconds; limit: bytes of the tensors read once at the memory-read limit

    python benchmarks/load.py --model qwen2.5-coder-0.5b --dtype bf16 --json
"""

from collections.abc import Iterator
from time import perf_counter

from measurement import LIMIT, OURS, Line, Setup, main

import kvcomm
from kvcomm._core import Session, Workspace


def measure(setup: Setup) -> Iterator[Line]:
    model = setup.load()
    peers, reads = setup.peers("load", model), setup.reads()
    n_bytes, dtype = model.memory["files"], setup.load_dtype
    model.close()

    def ours() -> float:
        start = perf_counter()
        with kvcomm.Model.load(setup.source, dtype=dtype) as second:
            Workspace(second.core).forward([Session(second.core)], [[1]], output="argmax")
            return perf_counter() - start

    times = setup.alternate(
        {OURS: ours}
        | {name: lambda peer=peer: peer.seconds("load") for name, peer in peers.items()}
        | {LIMIT: lambda: n_bytes / reads.rate()}
    )
    yield setup.line("load", times, lambda seconds: seconds, "s")


if __name__ == "__main__":
    main(__doc__, measure)
