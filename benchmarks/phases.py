"""Phases: what the time of a prefill, of decode and of an evaluation is spent on.

A process of its own does one kind of work again and again; `perf` samples it for some seconds, all
threads, with call stacks, once it is warm. A sample belongs to the innermost function on its stack
that has a phase. So this tells shares of the threads' time, waiting for each other included, and no
rates. Without `perf` (Linux) nothing is measured, and that is said.

    WORK: PHASE    % of the samples; no limit, no peers

    python benchmarks/phases.py --model qwen2.5-coder-0.5b --dtype bf16 --json
"""

import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from measurement import Line, Setup, main, say, token_ids

from kvcomm.model import Model

#: Functions of the core by phase.
PHASES = {
    "products": ("linear_chunk",),
    "attention": ("attention_task", "split_task", "merge_task"),
    "norms, rotation, gates": ("norm_row", "rope_row", "gated_row", "add_row", "add_range"),
    "logits": ("argmax_row", "logprob_row", "nearest_chunk", "mix_chunk", "kvc_sample"),
    "keys and values": ("cpu_kv_append", "copy_part", "kvc_segment_create"),
    "waiting": ("cpu_parallel", "worker_main"),
    "rest of the core": ("kvc_forward", "py_workspace_forward"),
    "Python": ("_PyEval_EvalFrameDefault",),
}
OTHER = "other"
OF = {function: phase for phase, functions in PHASES.items() for function in functions}

WORKS = ("prefill 512", "decode after 128", "decode after 4096", "evaluate")
SECONDS, QUICK_SECONDS = 10, 2
RATE = 199  # samples a second and thread; no round number, so that nothing keeps step with it

#: First argument of the process that is sampled.
SAMPLED = "--sampled"


def work_of(name: str, source: str, dtype: str, kv_dtype: str) -> Callable[[], object]:
    """One slice of a kind of work."""
    import kvcomm

    model = kvcomm.Model.load(source, dtype=dtype, kv_dtype=kv_dtype)
    if name == "evaluate":
        return evaluation(model)
    from decode import Rows
    from prefill import prefill

    from kvcomm._core import Workspace

    workspace = Workspace(model.core)
    kind, _, n = name.rpartition(" ")
    ids = token_ids(model, int(n))
    if kind == "prefill":
        return prefill(model, workspace, ids)
    rows = Rows(model, workspace, [ids])
    return lambda: rows.steps(16)


def evaluation(model: Model) -> Callable[[], object]:
    """`kvcomm eval` on the questions of the package."""
    import kvcomm
    from kvcomm import tasks
    from kvcomm.evaluate import evaluate
    from kvcomm.methods import Options, methods
    from kvcomm.plan import divide

    sender, receiver = kvcomm.Sender(model), kvcomm.Receiver(model)
    examples = tasks.find("hotpotqa").load(tasks.SHIPPED)

    def work() -> None:
        with tempfile.TemporaryDirectory() as folder:
            evaluate(
                sender,
                receiver,
                tasks.find("hotpotqa"),
                divide(examples, n_calibration=1),
                methods(("kvcomm",), Options(ratios=("0.5",))),
                Path(folder) / "run",
                max_new_tokens=48,
                batch_size=25,
            )

    return work


def be_sampled() -> None:
    """In that process: load, warm up, say so, and work until the input ends."""
    import select

    import kvcomm

    name, source, dtype, kv_dtype, threads = sys.argv[2:]
    kvcomm.set_num_threads(int(threads))
    work = work_of(name, source, dtype, kv_dtype)
    work()
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        work()


def phase(stack: list[str]) -> str:
    """Of one sample, its functions from the innermost outwards."""
    return next((OF[function] for function in stack if function in OF), OTHER)


def stacks(text: str) -> Iterator[list[str]]:
    """What `perf script -F ip,sym` printed: a paragraph per sample, a line per function."""
    for paragraph in text.split("\n\n"):
        lines = [line.split() for line in paragraph.splitlines() if line.strip()]
        if lines:
            yield [words[1].split("+")[0] for words in lines if len(words) > 1]


def sample(setup: Setup, name: str) -> Counter[str]:
    """Samples by phase."""
    words = [name, setup.source, setup.load_dtype, setup.kv_dtype, str(setup.threads)]
    process = subprocess.Popen(
        [sys.executable, __file__, SAMPLED, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process, tempfile.TemporaryDirectory() as folder:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{name}: ended with status {process.wait()}")
        data = str(Path(folder) / "perf.data")
        seconds = str(QUICK_SECONDS if setup.quick else SECONDS)
        record = ["perf", "record", "-q", "-F", str(RATE), "--call-graph", "dwarf,4096"]
        subprocess.run(
            [*record, "-p", str(process.pid), "-o", data, "--", "sleep", seconds], check=True
        )
        process.stdin.close()
        script = ["perf", "script", "-i", data, "-F", "ip,sym"]
        done = subprocess.run(script, check=True, capture_output=True, text=True)
    return Counter(map(phase, stacks(done.stdout)))


def measure(setup: Setup) -> Iterator[Line]:
    if shutil.which("perf") is None:
        say("no perf here: phases are not measured")
        return
    setup.load().close()  # converted and checked, before anything is started
    for name in WORKS:
        if name == "evaluate" and setup.shape is not None:
            continue
        counts = sample(setup, name)
        total = sum(counts.values())
        for of in (*PHASES, OTHER):
            if counts[of]:
                share = 100 * counts[of] / total
                yield setup.single(f"{name}: {of}", share, "%", n=total)


if __name__ == "__main__":
    if sys.argv[1:2] == [SAMPLED]:
        be_sampled()
    else:
        main(__doc__, measure)
