"""What the machine itself can do: matrix products and memory reads, at a given thread count.

Owns the two yardsticks of every other benchmark, which measure them again in each of their rounds.
Each is threads that work on ranges of their own; the window is from the first one's start to the
last one's end.

    products    float32, x [512, in] @ w [out, in].T by NumPy's OpenBLAS, one single-threaded call
                per thread on its own columns, all matrices of a model's layer, of several layers in
                turn, into memory that was touched before
    reads       a buffer of eight times the last-level cache, at most 1 GiB, touched before, read in
                1, 2, 4 and 8 streams per thread; the best counts (--quick: at most 256 MiB, which a
                large cache can hold)
    fma         multiply-adds on registers alone, printed beside: what no product can exceed

    python benchmarks/limits.py --model smollm2-135m --threads 2
"""

import ctypes
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from measurement import Line, Setup

# Read when NumPy is first imported, which therefore is inside of functions here.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

ROWS = 512

#: Weights of as many layers are held as fit here, but of four at most.
WEIGHT_BYTES = 256 << 20


def matrices(shape: Any) -> tuple[tuple[int, int], ...]:
    """(outputs, inputs) of a layer of a `kvcomm.shapes.Shape`: fused qkv, output, gate and up,
    down."""
    qkv = shape.q_width + 2 * shape.kv_width
    gate_up = 2 * shape.hidden_dim
    inner = ((qkv, shape.dim), (shape.dim, shape.q_width), (gate_up, shape.dim))
    return (*inner, (shape.dim, shape.hidden_dim))


class Threads:
    """Runs one function per thread and takes the time of all."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._pool = ThreadPoolExecutor(n)

    def seconds(self, work: Callable[[int], object]) -> float:
        """Wall time of work(0), work(1), ..., each in a thread of its own."""
        start = time.perf_counter()
        for done in [self._pool.submit(work, place) for place in range(self.n)]:
            done.result()
        return time.perf_counter() - start


class Products:
    """The matrix-product limit on the shapes of one model."""

    def __init__(self, shapes: Sequence[tuple[int, int]], threads: int, rows: int = ROWS) -> None:
        import numpy as np

        rng = np.random.default_rng(0)
        layer_bytes = sum(4 * out * inner for out, inner in shapes)
        n_layers = max(1, min(4, WEIGHT_BYTES // layer_bytes))
        self._threads = Threads(threads)
        self._inputs = {
            inner: rng.standard_normal((rows, inner), dtype=np.float32) for _, inner in shapes
        }
        self._parts: list[list[tuple[Any, Any, Any]]] = []
        for place in range(threads):
            parts = []
            for out, inner in [shape for _ in range(n_layers) for shape in shapes]:
                width = out * (place + 1) // threads - out * place // threads
                weight = rng.standard_normal((width, inner), dtype=np.float32)
                parts.append((self._inputs[inner], weight.T, np.ones((rows, width), np.float32)))
            self._parts.append(parts)
        self.flops = 2.0 * rows * n_layers * sum(out * inner for out, inner in shapes)

    def rate(self, least: float = 0.05) -> float:
        """FLOP/s of the best pass of those that `least` seconds hold, three or more."""
        import numpy as np

        def work(place: int) -> None:
            for x, weight, out in self._parts[place]:
                np.matmul(x, weight, out=out)

        passes: list[float] = []
        while len(passes) < 3 or sum(passes) < least:
            passes.append(self._threads.seconds(work))
        return self.flops / min(passes)


@cache
def _library() -> ctypes.CDLL:
    """limits.c, compiled for this machine."""
    source = Path(__file__).with_name("limits.c")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "limits.so"
        flags = ["-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC"]
        subprocess.run(["cc", *flags, str(source), "-o", str(path)], check=True)
        library = ctypes.CDLL(str(path))
    library.read_streams.restype = ctypes.c_uint64
    library.multiply_add.restype = ctypes.c_float
    return library


def last_level_cache() -> int:
    """Bytes of the largest cache of processor 0; 32 MiB where the system does not say."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) << {"K": 10, "M": 20}.get(text[-1], 0))
    return max(sizes, default=32 << 20)


class Reads:
    """The memory-read limit."""

    def __init__(self, threads: int, most: int = 1 << 30) -> None:
        self._threads = Threads(threads)
        self._each = min(8 * last_level_cache(), most) // threads // 512 * 512
        n_bytes = threads * self._each + 64
        self._memory = ctypes.create_string_buffer(n_bytes)
        ctypes.memset(self._memory, 1, n_bytes)
        self._start = (ctypes.addressof(self._memory) + 63) // 64 * 64

    def rate(self) -> float:
        """Bytes/s of the best number of streams."""
        read = _library().read_streams

        def work(place: int, streams: int) -> None:
            mine = ctypes.c_void_p(self._start + place * self._each)
            read(mine, ctypes.c_size_t(self._each), ctypes.c_size_t(streams))

        best = min(self._threads.seconds(lambda p, s=s: work(p, s)) for s in (1, 2, 4, 8))
        return self._threads.n * self._each / best


def fma_rate(threads: int, steps: int = 1_000_000, passes: int = 10) -> float:
    """FLOP/s of multiply-adds that touch no memory, of the best pass."""
    counts = [ctypes.c_double() for _ in range(threads)]

    def work(place: int) -> None:
        _library().multiply_add(ctypes.c_size_t(steps), ctypes.byref(counts[place]))

    pool = Threads(threads)
    seconds = min(pool.seconds(work) for _ in range(passes))
    return sum(count.value for count in counts) / seconds


def measure(setup: "Setup") -> "Iterator[Line]":
    """Both limits, and the product limit's share of the registers' rate."""
    from measurement import LIMIT, OURS

    from kvcomm import convert
    from kvcomm.shapes import find

    source = setup.shape or setup.source
    shape = find(str(convert.prepared(source)) if source.endswith(".gguf") else source)
    reads, products = setup.reads(), setup.products(shape)
    times = setup.alternate(
        {
            "products": lambda: 1e9 / products.rate(),
            "fma": lambda: 1e9 / fma_rate(setup.threads),
            "reads": lambda: 1e9 / reads.rate(),
        }
    )
    of_registers = {OURS: times["products"], LIMIT: times["fma"]}
    for name, part, unit in (
        ("products", of_registers, "GFLOP/s"),
        ("fma", {OURS: times["fma"]}, "GFLOP/s"),
        ("reads", {OURS: times["reads"]}, "GB/s"),
    ):
        yield setup.line(name, part, lambda seconds: 1 / seconds, unit, dtype="f32")


def main() -> None:
    import measurement

    measurement.main(__doc__, measure)


if __name__ == "__main__":
    main()
