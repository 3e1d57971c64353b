"""What the machine itself can do: matrix products and memory reads, at a given thread count.

Owns the two yardsticks of every other benchmark. `matmul_gflops` is NumPy's OpenBLAS in float32
on the shapes of a model, 512 rows. `read_gbytes` reads a buffer of eight times the last-level
cache, at most 1 GiB, in 1, 2, 4 and 8 streams per thread; the best counts.

    python benchmarks/limits.py --threads 2
"""

import argparse
import ctypes
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

#: (outputs, inputs) of the matrices of a layer: fused qkv, output, gate and up, down.
SHAPES = {
    "smollm2-135m": ((960, 576), (576, 576), (3072, 576), (576, 1536)),
    "qwen2.5-coder-0.5b": ((1152, 896), (896, 896), (9728, 896), (896, 4864)),
    "qwen2.5-coder-1.5b": ((2048, 1536), (1536, 1536), (17920, 1536), (1536, 8960)),
}


def best_seconds(work: Callable[[], object], rounds: int = 7) -> float:
    """Least wall time of a few rounds after one that does not count."""
    work()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def matmul_gflops(shapes: Sequence[tuple[int, int]], rows: int = 512) -> float:
    """GFLOP/s of x [rows, in] @ w [out, in].T over all shapes in turn, weights of four layers."""
    import numpy as np

    rng = np.random.default_rng(0)
    weights = [rng.standard_normal(s, dtype=np.float32) for s in shapes for _ in range(4)]
    inputs = {s[1]: rng.standard_normal((rows, s[1]), dtype=np.float32) for s in shapes}
    flops = sum(2.0 * rows * w.size for w in weights)

    def work() -> None:
        for w in weights:
            inputs[w.shape[1]] @ w.T

    return flops / best_seconds(work) / 1e9


def last_level_cache() -> int:
    """Bytes of the largest cache of processor 0; 32 MiB where the system does not say."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) << {"K": 10, "M": 20}.get(text[-1], 0))
    return max(sizes, default=32 << 20)


def read_gbytes(threads: int) -> float:
    """GB/s of `threads` threads that read memory and do nothing else."""
    source = Path(__file__).with_name("limits.c")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "limits.so"
        flags = ["-O3", "-march=native", "-shared", "-fPIC"]
        subprocess.run(["cc", *flags, str(source), "-o", str(library)], check=True)
        read = ctypes.CDLL(str(library)).read_streams
    read.restype = ctypes.c_uint64
    each = min(8 * last_level_cache(), 1 << 30) // threads // 512 * 512
    memory = ctypes.create_string_buffer(b"", threads * each + 64)
    ctypes.memset(memory, 1, threads * each + 64)
    start = (ctypes.addressof(memory) + 63) // 64 * 64

    def work(streams: int) -> None:
        def one(place: int) -> None:
            mine = ctypes.c_void_p(start + place * each)
            read(mine, ctypes.c_size_t(each), ctypes.c_size_t(streams))

        workers = [threading.Thread(target=one, args=(place,)) for place in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    seconds = min(best_seconds(lambda s=s: work(s), 5) for s in (1, 2, 4, 8))
    return threads * each / seconds / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    threads = parser.parse_args().threads
    os.environ["OPENBLAS_NUM_THREADS"] = str(threads)  # read when NumPy is first imported
    print(f"memory reads, {threads} threads: {read_gbytes(threads):.1f} GB/s")
    for name, shapes in SHAPES.items():
        print(f"float32 products, {name}: {matmul_gflops(shapes):.0f} GFLOP/s")


if __name__ == "__main__":
    main()
