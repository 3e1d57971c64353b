"""The binding under threads, signals and tight memory: no race, no leak, and Ctrl-C is answered."""

import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_model import HEAD_DIM, KV_HEADS, LAYERS, VOCAB, build, config, from_parts, logits, read

from kvcomm import _core


@pytest.fixture(scope="module")
def model(device: str) -> _core.Model:
    return build(device)


def test_bits_do_not_depend_on_threads_or_company(model: _core.Model) -> None:
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, VOCAB, n) for n in (1, 30, 7, 64)]
    alone = [logits(model, ids) for ids in rows]
    try:
        for n in (1, 2, 3, 7):
            _core.set_num_threads(n)
            sessions = [_core.Session(model) for _ in rows]
            out, _ = _core.Workspace(model).forward(sessions, rows, output="logits")
            np.testing.assert_array_equal(out, alone)
    finally:
        _core.set_num_threads(0)


@pytest.mark.parametrize(
    ("setting", "before", "n"),
    [
        ("3", "", 3),
        ("", "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})", 1),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="sets the affinity")
def test_threads_by_environment_and_affinity(setting: str, before: str, n: int) -> None:  # BL-131
    code = f"import os; {before}\nfrom kvcomm import _core\nprint(_core.get_num_threads())"
    environment = {name: v for name, v in os.environ.items() if name != "KVCOMM_NUM_THREADS"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    if setting:
        environment["KVCOMM_NUM_THREADS"] = setting
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, f"{n}\n"), run.stderr


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_processes_go_on() -> None:  # BL-130
    model, ids = build("cpu"), np.arange(64)
    context = multiprocessing.get_context("fork")

    def work(pipe: Any) -> None:
        pipe.send_bytes(logits(model, ids).tobytes())

    _core.set_num_threads(3)
    try:
        expected = logits(model, ids).tobytes()  # the pool is running now
        pipes = [context.Pipe(duplex=False) for _ in range(4)]
        children = [context.Process(target=work, args=(there,)) for _, there in pipes]
        for child in children:
            child.start()
        try:
            for here, _ in pipes:
                assert here.poll(30)
                assert here.recv_bytes() == expected
            for child in children:
                child.join(30)
                assert child.exitcode == 0
        finally:
            for child in children:
                child.kill()
        assert logits(model, ids).tobytes() == expected
    finally:
        _core.set_num_threads(0)


def test_many_python_threads(model: _core.Model) -> None:
    expected = logits(model, [1, 2, 3])
    wrong: list[Any] = []

    def work() -> None:
        try:
            if not np.array_equal(logits(model, [1, 2, 3]), expected):
                wrong.append("other bits")
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.fixture(scope="module")
def long_ids() -> np.ndarray:
    """A prompt whose prefill takes seconds."""
    return np.arange(60_000) % VOCAB


def in_background(call: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_what_is_in_use_is_refused(model: _core.Model) -> None:
    session, workspace, other = _core.Session(model), _core.Workspace(model), _core.Workspace(model)
    thread = in_background(lambda: workspace.forward([session], [np.arange(8000) % VOCAB]))
    started = time.monotonic()
    while time.monotonic() - started < 10:
        try:
            _ = session.lengths
        except ValueError:
            break
    calls: dict[str, Callable[[], Any]] = {
        "the session is in use": session.freeze,
        "the session is in use by": lambda: other.forward([session], [[1]]),
        "the workspace is in use": lambda: workspace.forward([_core.Session(model)], [[1]]),
        "the workspace is in use by another thread": lambda: workspace.counts,
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()
    assert thread.is_alive()
    thread.join()
    assert session.lengths == [8000] * LAYERS
    other.forward([session], [[1]])


def test_ctrl_c(model: _core.Model, long_ids: np.ndarray) -> None:
    workspace, session = _core.Workspace(model), _core.Session(model)
    workspace.forward([session], [[5, 6]])
    sent: list[float] = []

    def interrupt() -> None:
        time.sleep(0.3)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    in_background(interrupt)
    with pytest.raises(KeyboardInterrupt):
        workspace.forward([session], [long_ids])
    assert time.monotonic() - sent[0] < 1.0
    assert session.lengths == [2] * LAYERS
    out, _ = workspace.forward([session], [[7]], output="logits")
    assert out is not None
    fresh = _core.Session(model)
    workspace.forward([fresh], [[5, 6]])
    expected, _ = workspace.forward([fresh], [[7]], output="logits")
    np.testing.assert_array_equal(out, expected)


def test_an_exception_of_a_signal_handler_comes_through(
    model: _core.Model, long_ids: np.ndarray
) -> None:
    class Enough(Exception):
        pass

    def handler(number: int, frame: Any) -> None:
        raise Enough

    old = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Enough):
            _core.Workspace(model).forward([_core.Session(model)], [long_ids])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def test_huge_requests_are_memory_errors(model: _core.Model) -> None:
    session = _core.Session(model)
    for n in (2**40, 2**62, 2**63 - 1):
        with pytest.raises(MemoryError, match=r"\d"):
            session.reserve(n)
    workspace = _core.Workspace(model)
    workspace.forward([session], [[1]])
    assert session.lengths == [1] * LAYERS


TIGHT = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from core_model import VOCAB, _core, build
model = build(sys.argv[2], vocab_size=5000)
workspace, session = _core.Workspace(model), _core.Session(model)
workspace.forward([session], [[1, 2]])
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 100_000_000,) * 2)
try:
    workspace.forward([session], [np.arange(30_000) % VOCAB], output="logits", outputs="all")
except MemoryError as error:
    print(error)
print(session.lengths, workspace.forward([session], [[3]], output="argmax")[0].shape)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_logits_that_do_not_fit(device: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", TIGHT, str(Path(__file__).parent), device],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "out of memory: logits [30000, 5000] of 4 bytes each",
        "[2, 2, 2, 2] (1,)",
    ]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_leaks(model: _core.Model, device: str) -> None:
    ids, mask = np.array([1, 2, 3]), [True, False, True, False]
    part = np.zeros((KV_HEADS, 3, HEAD_DIM), np.float32)
    kv = read(model, ids)
    row = np.zeros(VOCAB, np.float32)
    mass = np.arange(LAYERS, dtype=np.float64)
    workspace, used = _core.Workspace(model), _core.Session(model)
    workspace.forward([used], [ids])
    settings = config(windowed=mask, window=3, rope_of_layer=[0] * LAYERS)

    def run(**options: Any) -> Any:
        return workspace.forward([_core.Session(model)], [ids], **options)

    calls: list[Callable[[], Any]] = [
        lambda: run(output="logits", outputs="all", mass="paper"),
        lambda: run(output="logprob", outputs=[[0, 2]], targets=[[1, 2]], slack=[[0] * LAYERS]),
        lambda: run(output="logprob", outputs=[[0, 2]], targets=[[1]]),
        lambda: run(output="logits", outputs=[[5]]),
        lambda: workspace.forward([used, used], [[1], [2]]),
        lambda: workspace.forward([used], [[VOCAB]]),
        lambda: workspace.forward([used], [[1.5]]),
        lambda: workspace.forward([used], [np.zeros((2, 3), np.float32)]),
        lambda: workspace.forward([1], [[1]]),  # type: ignore[list-item]
        lambda: workspace.forward([used], [[1]], nonsense=1),  # type: ignore[call-arg]
        lambda: _core.Session(model).give(kv, [3, 2, 1, 0]),
        lambda: used.give(kv),
        lambda: _core.Session(model).give(kv, [3, 2]),
        lambda: used.freeze().parts(1),
        lambda: kv.select([1, 3], sink=True).trim(mask, 2).lengths,
        lambda: kv.select([9]),
        lambda: kv.select([True]),
        lambda: _core.KV.concat([kv, kv], sequential=True, whole=[1]),
        lambda: _core.KV.concat([kv, 1]),  # type: ignore[list-item]
        lambda: from_parts(device, [(part, part, 0, 0)] * 2),
        lambda: from_parts(device, [(part, part, 0, 0), (part, part[:1], 0, 0)]),
        lambda: _core.Model(settings, device=device).config,
        lambda: _core.Model(settings | {"x": 1}),
        lambda: _core.Model(settings | {"windowed": [1]}),
        lambda: _core.Model(settings, device=device).set("q", 0, row, "f32"),
        lambda: model.inv_freq(),
        lambda: _core.Sampler(temperature=1.0, seed=3).sample(row),
        lambda: _core.Sampler().sample(row[:0]),
        lambda: _core.rank(_core.score(mass, alpha=0.5, mu=1.0)),
        lambda: _core.score(mass, alpha=7.0),
        lambda: _core.devices(),
        lambda: (workspace.counts, used.lengths, used.given, used.next_position, kv.nbytes),
    ]

    def round_of_calls() -> None:
        for call in calls:
            with contextlib.suppress(ValueError, TypeError, ArithmeticError):
                call()

    watched = [model, kv, used, workspace, ids, part, mass, row, np.dtype(np.float32), TypeError]
    for _ in range(30):
        round_of_calls()
    gc.collect()
    counts, memory = [sys.getrefcount(thing) for thing in watched], resident()
    for _ in range(300):
        round_of_calls()
    gc.collect()
    after = [sys.getrefcount(thing) for thing in watched]
    assert all(b - a <= 2 for a, b in zip(counts, after, strict=True)), (counts, after)
    assert resident() - memory < 3_000_000
