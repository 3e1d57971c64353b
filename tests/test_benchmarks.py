"""The benchmark suite: every script runs and prints what it promises, and how results are made.

No time is judged. Scripts run as a user would run them, on a tiny random model, without peers; the
pipe to a peer is tried with a program made here.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvcomm import shapes
from kvcomm.model import Model
from kvcomm.shapes import Shape

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"

FIELDS = {
    "name": str, "model": str, "dtype": str, "threads": int, "value": float, "unit": str,
    "limit_share": float | None, "peers": dict, "rounds": int, "spread": float,
}  # fmt: skip

#: Script -> (name, unit, whether a limit applies) of every line with --quick.
LINES = {
    "limits": [("products", "GFLOP/s", True), ("fma", "GFLOP/s", False), ("reads", "GB/s", False)],
    "prefill": [("prefill 128", "tokens/s", True), ("prefill 512", "tokens/s", True)],
    "decode": [("decode after 128", "tokens/s", True)],
    "batch": [
        ("batch 1 prefill", "tokens/s", True),
        ("batch 1 decode", "tokens/s", True),
        ("batch 4 prefill", "tokens/s", True),
        ("batch 4 decode", "tokens/s", True),
    ],
    "handover": [
        ("merge into 1", "us", False),
        ("merge into 10", "us", False),
        ("save packet", "GB/s", False),
        ("load packet", "GB/s", True),
        ("first token", "s", True),
        ("sender half", "s", True),
    ],
    "calibrate": [
        ("tap 32", "s", True),
        ("calibrate", "s", True),
        ("mass memory 1024", "MB", False),
        ("mass memory 4096", "MB", False),
    ],
    "evaluate": [("evaluate 2", "records/s", True)],
    "load": [("load", "s", True)],
    "memory": [("peak 256", "GB", True)],
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """script(name) -> a module of benchmarks/."""
    import importlib

    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


# ---- the scripts ----


@pytest.mark.parametrize("name", LINES)
def test_every_script_prints_its_lines(name: str, tiny: Callable[..., Path]) -> None:
    folder = tiny("llama")
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--model", str(folder), "--quick"]
    command += ["--json", "--peers", "none", "--threads", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    shown = [(row["name"], row["unit"], row["limit_share"] is not None) for row in rows]
    assert shown == LINES[name]
    for row in rows:
        assert list(row) == list(FIELDS)
        for field, kind in FIELDS.items():
            assert isinstance(row[field], kind), field
        assert (row["model"], row["dtype"], row["threads"]) == (folder.name, "f32", 1)
        assert row["peers"] == {} and row["rounds"] == 5
        assert math.isfinite(row["value"]) and math.isfinite(row["spread"])
        assert row["spread"] >= 0
        assert row["value"] > 0 or row["name"].startswith("mass memory")


def test_every_script_of_the_suite_is_tried(script: Callable[[str], ModuleType]) -> None:
    assert set(script("bench").SCRIPTS) == {*LINES, "phases"}


def test_fewer_than_five_rounds_are_refused(tiny: Callable[..., Path]) -> None:
    command = [sys.executable, str(BENCHMARKS / "decode.py"), "--rounds", "4"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert "expected 5 or more, found 4" in done.stderr


# ---- how a result is made ----


def setup_of(script: Callable[[str], ModuleType], **changes: Any) -> Any:
    options = {"dtype": "f32", "kv_dtype": "f32", "threads": 1, "rounds": 5, "quick": True}
    options |= {"peers": {}, "published": None, "gguf": None}
    return script("measurement").Setup("some/model", argparse.Namespace(**options | changes))


def test_candidates_take_turns_after_a_round_that_does_not_count(
    script: Callable[[str], ModuleType],
) -> None:
    calls = []

    def candidate(name: str) -> Callable[[], float]:
        def work() -> float:
            calls.append(name)
            return float(len(calls))

        return work

    times = setup_of(script).alternate({"kvcomm": candidate("A"), "limit": candidate("B")})
    assert "".join(calls) == "AB" * 6
    assert times == {"kvcomm": [3.0, 5, 7, 9, 11], "limit": [4.0, 6, 8, 10, 12]}


def test_a_line_is_made_of_medians(script: Callable[[str], ModuleType]) -> None:
    times = {
        "kvcomm": [1.0, 2.0, 4.0, 2.0, 2.0],  # median 2, from 1 to 4
        "limit": [0.5, 1.6, 2.0, 1.0, 1.8],  # ratios 0.5 0.8 0.5 0.5 0.9
        "other": [3.0, 3.0, 3.0, 3.0, 3.0],  # ratios 3 1.5 0.75 1.5 1.5
    }
    line = setup_of(script, kv_dtype="f16").line("it", times, lambda seconds: 8 / seconds, "x/s")
    assert json.loads(line.json()) == {
        "name": "it",
        "model": "model",
        "dtype": "f32, kv f16",
        "threads": 1,
        "value": 4.0,
        "unit": "x/s",
        "limit_share": 0.5,
        "peers": {"other": 1.5},
        "rounds": 5,
        "spread": 1.5,  # (8 - 2) / 4
    }
    assert line.text() == (
        "model f32, kv f16 it: 4 x/s (spread 150%), 50% of the limit, 1.50x other"
    )


def test_processors_in_use_are_counted_by_the_system(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    measurement, ticks = script("measurement"), os.sysconf("SC_CLK_TCK")
    read = iter([1000, 1000 + 3 * ticks // 20])  # a tenth of a second of one and a half
    monkeypatch.setattr(measurement, "_busy_ticks", lambda: next(read))
    assert measurement.in_use(0.1) == pytest.approx(1.5, abs=0.1)
    monkeypatch.undo()
    assert measurement._busy_ticks() > 0


def test_attention_is_told_apart_by_two_lengths(script: Callable[[str], ModuleType]) -> None:
    short = {"linear_flops": 4e9, "attention_flops": 1e9}
    long = {"linear_flops": 16e9, "attention_flops": 16e9}
    # 2 ns per 10 FLOP of products, 5 ns per 10 of attention
    products, attention = script("prefill").split(short, long, 0.8 + 0.5, 3.2 + 8.0)
    assert (products, attention) == (pytest.approx(3.2), pytest.approx(8.0))
    # The product limit is 10 GFLOP/s: 0.5 and 3.2 seconds for all FLOPs of each.
    times = {
        512: {"kvcomm": [1.3] * 5, "limit": [0.5] * 5},
        2048: {"kvcomm": [11.2] * 5, "limit": [3.2] * 5},
    }
    found = list(script("prefill").phases(setup_of(script), times, {512: short, 2048: long}))
    assert [(line.name, line.value, line.limit_share) for line in found] == [
        ("products 2048", 5.0, 0.5),  # 16 GFLOP in 3.2 s
        ("attention 2048", 2.0, 0.2),  # 16 GFLOP in 8 s
    ]


def test_decode_reads_weights_and_keys_and_values(
    script: Callable[[str], ModuleType], tiny: Callable[..., Path]
) -> None:
    # 4 layers, 2 KV heads of 16: K and V of a token are 4 * 2 * 2 * 16 floats.
    for tied, read_rows in ((True, 0), (False, 320 * 64)):
        with Model.load(tiny("llama", tie_word_embeddings=tied), dtype="f32") as model:
            expected = 4 * (Shape.of(model).parameters - read_rows + 10 * 256)
            assert script("decode").step_bytes(model, 10) == pytest.approx(expected, rel=0.02)


# ---- peers ----

PROGRAM = """
import sys, time
sys.path.insert(0, {folder!r})
from wire import memory, serve

class Made:
    def open(self, folder, dtype, threads):
        print("noise on standard output")
        return {{"about": f"{{folder}} {{dtype}} {{threads}}"}}
    def prefill(self, rows):
        return {{"seconds": float(sum(map(len, rows)))}}
    def peak(self):
        return {{"bytes": memory()[1]}}
    def fail(self):
        raise ValueError("no such thing")
    def end(self):
        sys.exit(3)

serve(Made())
"""


@pytest.fixture
def peer(script: Callable[[str], ModuleType], tmp_path: Path) -> Any:
    """A peer that answers at once."""
    process = script("peers.process")
    program = tmp_path / "made.py"
    program.write_text(PROGRAM.format(folder=str(BENCHMARKS / "peers")))
    kind = process.Kind(str(program), "made", ("f32",), frozenset({"prefill"}))
    process.KINDS["made"] = kind
    fields = {"folder": "a", "dtype": "f32", "threads": 2}
    made = process.Peer("made", Path(sys.executable), fields)
    yield made
    made.close()
    del process.KINDS["made"]


def state_of(peer: Any) -> str:
    """The kernel's letter for a process's state."""
    stat = Path(f"/proc/{peer._process.pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0]


def test_a_peer_is_asked_by_lines(peer: Any) -> None:
    assert peer.about == "a f32 2"
    assert peer.seconds("prefill", rows=[[1, 2], [3]]) == 3.0
    assert peer.ask("peak")["bytes"] > 1 << 20
    with pytest.raises(RuntimeError, match="^peer made: fail: ValueError: no such thing$"):
        peer.ask("fail")
    assert peer.seconds("prefill", rows=[[1]]) == 1.0


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see a state")
def test_a_peer_is_stopped_between_requests(peer: Any) -> None:
    for _ in range(2):
        peer.seconds("prefill", rows=[[1]])
        deadline = time.monotonic() + 5
        while state_of(peer) != "T" and time.monotonic() < deadline:
            time.sleep(0.001)
        assert state_of(peer) == "T"


def test_a_peer_that_has_ended_is_named(peer: Any) -> None:
    with pytest.raises(RuntimeError, match="^peer made: ended with status 3$"):
        peer.ask("end")


def test_peers_are_chosen_by_name(script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    process = script("peers.process")
    assert process.chosen("none", None) == {}
    python = Path(sys.executable)
    assert process.chosen(f"llama.cpp={python}", None) == {"llama.cpp": python}
    with pytest.raises(ValueError, match="peer 'ollama' is unknown"):
        process.chosen("ollama", None)
    with pytest.raises(ValueError, match=f"peer transformers: no interpreter {tmp_path}/none"):
        process.chosen(f"transformers={tmp_path}/none", None)
    with pytest.raises(ValueError, match="peer published: needs --published DIR"):
        process.chosen(f"published={python}", None)


def test_a_peer_without_the_weight_type_is_left_out_aloud(
    script: Callable[[str], ModuleType],
    tiny: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup = setup_of(script, peers={"transformers": Path("/nowhere")})
    with Model.load(tiny("llama")) as model:
        setup.dtype = "q8_0"
        assert setup.peers("prefill", model) == {}
        assert "transformers left out: it has no weights in q8_0" in capsys.readouterr().err
        assert setup.peers("evaluate", model) == {}


# ---- models that are made ----


def test_random_weights_have_the_shape(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_weights = script("random_weights")
    made = {
        "tied": Shape(2, 32, 48, 4, 2, 8, 64, tied_head=True, windowed=(False,) * 2),
        "biased": Shape(3, 32, 48, 4, 1, 8, 64, qkv_bias=True, windowed=(False,) * 3),
    }
    for name, shape in made.items():
        monkeypatch.setitem(shapes.SHAPES, name, shape)
        (tmp_path / name).mkdir()
        folder = random_weights.write(name, tmp_path / name)
        with Model.load(folder) as model:
            assert Shape.of(model) == shape
            assert model.dtype == "bf16"
            assert model.memory["files"] == 2 * shape.parameters


def test_random_weights_that_do_not_fit_are_refused(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_weights = script("random_weights")
    monkeypatch.setattr(random_weights, "available_bytes", lambda: 1000)
    monkeypatch.setitem(shapes.SHAPES, "small", Shape(1, 32, 48, 4, 2, 8, 64, tied_head=True))
    with pytest.raises(MemoryError, match="1000 bytes of memory available"):
        random_weights.write("small", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_gguf_file_in_another_type_has_the_same_values(
    script: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    import gguf

    rng = np.random.default_rng(0)
    matrix, vector = rng.standard_normal((8, 64), np.float32), np.ones(64, np.float32)
    source = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_block_count(1)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("token_embd.weight", matrix)
    writer.add_tensor("output_norm.weight", vector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    gguf_types = script("peers.gguf_types")
    assert gguf_types.prepared(source, "f32", tmp_path / "made") == source
    for dtype, bound in (("f16", 2**-10), ("bf16", 2**-8), ("q8_0", 1 / 120)):
        path = gguf_types.prepared(source, dtype, tmp_path / "made")
        reader = gguf.GGUFReader(path)
        found = {t.name: t for t in reader.tensors}
        embedding = found["token_embd.weight"]
        assert embedding.tensor_type.name == dtype.upper()
        values = gguf.quants.dequantize(embedding.data, embedding.tensor_type)
        assert np.abs(values - matrix).max() <= bound * np.abs(matrix).max()
        assert found["output_norm.weight"].tensor_type.name == "F32"
        assert np.array_equal(found["output_norm.weight"].data, vector)
        assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
        assert reader.fields["llama.block_count"].contents() == 1
        assert gguf_types.prepared(source, dtype, tmp_path / "made") == path
    with pytest.raises(ValueError, match="'q2_k' is none of"):
        gguf_types.prepared(source, "q2_k", tmp_path / "made")


# ---- phases ----

#: What `perf script -F ip,sym` prints of three samples.
SAMPLES = """\
\t    7f21 gemm_f32+0x10
\t    7f22 linear_chunk+0x51
\t    7f23 worker_main

\t    7f21 gemm_f32+0x10
\t    7f24 attention_task
\t    7f25 cpu_parallel

\t    7f26 pause
\t    7f23 worker_main
"""


def test_a_sample_belongs_to_the_innermost_phase(script: Callable[[str], ModuleType]) -> None:
    phases = script("phases")
    found = [phases.phase(stack) for stack in phases.stacks(SAMPLES)]
    assert found == ["products", "attention", "waiting"]
    assert phases.phase(["memcpy"]) == phases.OTHER


def test_without_perf_it_is_said_that_nothing_is_measured(
    script: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", "")
    assert list(script("phases").measure(None)) == []
    assert "no perf here" in capsys.readouterr().err


# ---- what bench.py makes of it ----


def row(name: str, value: float, share: float | None, **peers: float) -> dict[str, Any]:
    return {
        "name": name, "model": "m", "dtype": "f32", "threads": 2, "value": value,
        "unit": "tokens/s", "limit_share": share, "peers": peers, "rounds": 5, "spread": 0.1,
    }  # fmt: skip


def run_of(script: str, *lines: dict[str, Any], model: str = "m", **fields: Any) -> dict[str, Any]:
    return {
        "script": script, "model": model, "dtype": "f32", "command": f"python {script}.py",
        "commit": "abc", "machine": {"threads": 2}, "load_before": 0.1, "seconds": 9, "status": 0,
        "notes": ["other: 1.0"], "lines": list(lines),
    } | fields  # fmt: skip


def test_tables_and_plots_are_made_from_runs(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = script("bench")
    fast = row("prefill 512", 1200.0, 0.8, other=2)
    bench.keep(tmp_path, run_of("prefill", row("prefill 128", 1000.0, 0.5, other=1.5), fast))
    bench.keep(tmp_path, run_of("batch", row("batch 4 decode", 90.0, 0.7), commit="def"))
    bench.keep(tmp_path, run_of("load", row("load", 0.25, None)))
    monkeypatch.setattr(sys, "argv", ["bench.py", "--tables", "--out", str(tmp_path)])
    bench.main()
    text = (tmp_path / "bench.md").read_text()
    assert "    python prefill.py    # 9 s, load before it 0.1\n" in text
    assert "commit abc, " in text and "commit def, " in text
    assert text.count("- other: 1.0\n") == 1
    assert "| m | f32 | 2 | prefill 512 | 1200 tokens/s | 80% | 2.00x other | 10% |" in text
    assert "| m | f32 | 2 | load | 0.25 tokens/s |  |  | 10% |" in text
    assert "m f32, other" in (tmp_path / "bench-prefill.svg").read_text()
    assert (tmp_path / "bench-batch.svg").exists()
    assert not (tmp_path / "bench-decode.svg").exists()


def test_a_run_takes_the_place_of_an_earlier_one_of_its_kind(
    script: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    bench = script("bench")
    bench.keep(tmp_path, run_of("load", row("load", 1.0, None)))
    bench.keep(tmp_path, run_of("load", row("load", 2.0, None), model="other"))
    bench.keep(tmp_path, run_of("load", row("load", 3.0, None)))
    runs = bench.read(tmp_path)
    assert [(run["model"], run["lines"][0]["value"]) for run in runs] == [
        ("m", 3.0),
        ("other", 2.0),
    ]


def test_missing_runs_only_what_is_not_there(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = script("bench")
    bench.keep(tmp_path, run_of("load", row("load", 1.0, None)))
    bench.keep(tmp_path, run_of("decode", status=1))
    measured = []

    def measure(name: str, model: str, dtype: str, further: list[str]) -> dict[str, Any]:
        measured.append((name, model, dtype, further))
        return run_of(name, model=model)

    monkeypatch.setattr(bench, "measure", measure)
    words = ["--scripts", "decode,load", "--models", "m,n", "--dtypes", "f32", "--missing"]
    monkeypatch.setattr(sys, "argv", ["bench.py", *words, "--out", str(tmp_path), "--", "--x"])
    bench.main()
    assert [one[:2] for one in measured] == [("decode", "m"), ("decode", "n"), ("load", "n")]
    assert measured[0][2:] == ("f32", ["--x"])


def test_targets_say_what_is_not_reached(script: Callable[[str], ModuleType]) -> None:
    rows = [
        row("prefill 512", 1200.0, 0.86, transformers=1.2) | {"dtype": "bf16"},
        row("prefill 2048", 1200.0, 0.84, transformers=1.4),
        row("load", 0.6, 0.9),
        row("load packet", 9.0, 0.1),
    ]
    lines = script("targets").table(rows).splitlines()[2:]
    assert [line.split(" | ")[4] for line in lines] == ["prefill 512", "prefill 2048", "load"]
    assert [line.rpartition(" | ")[2] for line in lines] == [
        "not by transformers; transformers-4.53.3, llama.cpp not measured |",
        "not by limit; transformers-4.53.3, llama.cpp not measured |",
        "not by value |",
    ]
    assert (
        "85% of the limit, 1.3x transformers, 1.3x transformers-4.53.3, 1.2x llama.cpp" in lines[0]
    )


def test_a_series_is_sorted_by_the_number_in_its_names(
    script: Callable[[str], ModuleType],
) -> None:
    rows = [row(name, 1.0, 1.0) for name in ("batch 16 decode", "batch 4 decode", "load")]
    series = script("bench").points(rows, "batch ")
    assert [(label, [n for n, _ in held]) for label, held in series.items()] == [
        ("m f32 decode", [4, 16])
    ]


def test_shares_of_time_have_a_table_of_their_own(
    script: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    bench = script("bench")
    bench.keep(tmp_path, run_of("prefill", row("prefill 512", 1200.0, 0.8)))
    bench.keep(tmp_path, run_of("phases", row("prefill 512: products", 84.4, None)))
    bench.write(tmp_path)
    text = (tmp_path / "bench.md").read_text(encoding="utf-8")
    assert "prefill 512: products" not in text
    assert "| work | model | weights | products |" in text
    assert "| prefill 512 | m | f32 | 84% |" in text


def test_the_short_table_has_a_row_per_model_and_type(
    script: Callable[[str], ModuleType],
) -> None:
    rows = [row("prefill 128", 9.0, 0.1), row("prefill 512", 1200.0, 0.8, other=2.04)]
    rows += [row("decode after 128", 48.0, 0.9)]
    assert script("readme").short_table(rows).splitlines()[2:] == [
        "| m | f32 | 1200 (80%), 2.0x other | 48 (90%) |"
    ]


def test_the_command_that_is_kept_names_no_folder(script: Callable[[str], ModuleType]) -> None:
    words = ["--model", "/a/b/model,other", "--peers", "x=/c/python,y=d/python"]
    assert script("bench").shown(words) == "--model model,other --peers x=python,y=python"
