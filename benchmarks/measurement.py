"""What the benchmarks share: the options, rounds that alternate, and the line that is printed.

A benchmark is a function from a `Setup` to `Line`s. It names candidates, each a function that does
the same piece of work once and returns the seconds it took: "kvcomm", the peers by their names, and
"limit", the seconds that the machine would need for it by a limit measured right then. They run in
turn, A B A B, for at least five rounds after one that does not count. From these

    value          of the median of kvcomm's seconds
    spread         largest less smallest of them, over the median
    limit_share    median over the rounds of limit / kvcomm
    peers          per peer the median over the rounds of peer / kvcomm: above 1, kvcomm is faster

Ratios are taken within a round, because both sides of a round have the same neighbours. A peer is
stopped (as by SIGSTOP) whenever it is not its turn, so no thread of it waits at anyone's expense.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import limits
import random_weights
from peers import process

import kvcomm

if TYPE_CHECKING:
    from kvcomm.shapes import Shape

OURS, LIMIT = "kvcomm", "limit"
ROUNDS = 5

#: Prefix of a model that is a shape with random weights.
RANDOM = "random:"

#: Types that only a GGUF file can have: one is stored again in them.
OF_FILES = ("q4_0", "q4_1")

Times = dict[str, list[float]]
Slice = Callable[[], float]


@dataclass(frozen=True)
class Line:
    """One result. limit_share is None where no limit applies."""

    name: str
    model: str
    dtype: str
    threads: int
    value: float
    unit: str
    limit_share: float | None
    peers: dict[str, float]
    rounds: int
    spread: float

    def json(self) -> str:
        return json.dumps(asdict(self))

    def text(self) -> str:
        share = "" if self.limit_share is None else f", {self.limit_share:.0%} of the limit"
        peers = "".join(f", {ratio:.2f}x {name}" for name, ratio in self.peers.items())
        return (
            f"{self.model} {self.dtype} {self.name}: {self.value:.4g} {self.unit} "
            f"(spread {self.spread:.0%}){share}{peers}"
        )


def significant(value: float, digits: int = 4) -> float:
    """A number as it is printed."""
    return float(f"{value:.{digits}g}")


class Setup:
    """One model in one run: its options, and the peers that were asked for.

    Attributes
    ----------
    name : str
        The model as it is printed.
    source, load_dtype : str
        What `kvcomm.Model.load` takes: a name, a folder, or a GGUF file, and the weights' type.
        Random weights are written when it is first asked for, and gone when the setup is closed;
        for a type that only a file can have a folder is made of a GGUF file, and kept.
    shape : str or None
        The shape's name, of a model with random weights.
    dtype : str
        Of the weights as they are printed; after `load` what they are held in.
    threads, rounds, quick, options
        As asked for.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.shape = name[len(RANDOM) :] if name.startswith(RANDOM) else None
        self.name = Path(name).name if self.shape is None else f"{self.shape} (random)"
        self._named = self._source = name if self.shape is None else None
        self._stack = contextlib.ExitStack()
        self.dtype: str = options.dtype
        self.kv_dtype: str = options.kv_dtype
        self.threads: int = options.threads
        self.rounds: int = options.rounds
        self.quick: bool = options.quick
        self.options = options
        self._open: dict[str, process.Peer] = {}

    @property
    def source(self) -> str:
        if self._source is None:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory())
            self._source = str(random_weights.write(self.shape, Path(folder)))
        if self.options.dtype in OF_FILES and not Path(self._source).is_dir():
            self._source = str(kept(self, self._source))
        return self._source

    @property
    def load_dtype(self) -> str:
        return "auto" if self.options.dtype in OF_FILES else self.options.dtype

    def load(self) -> kvcomm.Model:
        """The model, on as many threads as asked for."""
        kvcomm.set_num_threads(self.threads)
        model = kvcomm.Model.load(self.source, dtype=self.load_dtype, kv_dtype=self.kv_dtype)
        self.dtype = self.options.dtype if self.options.dtype in OF_FILES else model.dtype
        return model

    def close(self) -> None:
        """End the peers, remove random weights."""
        self._open.clear()
        self._stack.close()

    # ---- peers ----

    def peers(self, operation: str, model: kvcomm.Model) -> dict[str, process.Peer]:
        """The peers asked for that can do this, each with the model loaded and stopped."""
        found = {}
        for name, interpreter in self.options.peers.items():
            kind = process.KINDS[name]
            if operation not in kind.operations:
                continue
            if name not in self._open:
                fields = self._fields(name, kind, model)
                if fields is None:
                    continue
                peer = process.Peer(name, interpreter, fields)
                self._stack.callback(peer.close)
                self._open[name] = peer
                say(f"{name}: {peer.about}")
            found[name] = self._open[name]
        return found

    def _fields(self, name: str, kind: process.Kind, model: kvcomm.Model) -> dict[str, Any] | None:
        """What a peer needs to load the model; None, and a line that says why, if it cannot."""
        as_stored = self.options.dtype == "auto" and kind.needs == "gguf"
        if self.dtype not in kind.dtypes and not as_stored:
            say(f"{name} left out: it has no weights in {self.dtype}")
            return None
        fields = {"dtype": self.dtype, "threads": self.threads}
        if kind.needs != "gguf":
            fields["folder"] = str(plain(model))
        if kind.needs == "gguf":
            path = gguf_file(self, self._named)
            if path is None:
                say(f"{name} left out: no GGUF file of {self.name} (--gguf FILE)")
                return None
            fields["gguf"] = str(path)
        if kind.needs == "published":
            fields["published"] = str(self.options.published)
        return fields

    # ---- rounds ----

    def alternate(self, candidates: Mapping[str, Slice]) -> Times:
        """Every candidate once a round; the first round does not count."""
        times: Times = {name: [] for name in candidates}
        for round_number in range(self.rounds + 1):
            for name, work in candidates.items():
                seconds = work()
                if round_number:
                    times[name].append(seconds)
        return times

    def line(
        self,
        name: str,
        times: Times,
        value: Callable[[float], float],
        unit: str,
        *,
        dtype: str | None = None,
    ) -> Line:
        """The result of rounds; value: of seconds, in `unit`."""
        ours = times[OURS]
        values = [value(seconds) for seconds in ours]
        ratios = {
            other: significant(statistics.median(b / a for a, b in zip(ours, theirs, strict=True)))
            for other, theirs in times.items()
            if other != OURS
        }
        middle = statistics.median(values)
        kv = "" if self.kv_dtype == "f32" else f", kv {self.kv_dtype}"
        return Line(
            name=name,
            model=self.name,
            dtype=dtype or self.dtype + kv,
            threads=self.threads,
            value=significant(middle),
            unit=unit,
            limit_share=ratios.pop(LIMIT, None),
            peers=ratios,
            rounds=len(ours),
            spread=significant((max(values) - min(values)) / middle if middle else 0.0, 3),
        )

    def single(self, name: str, value: float, unit: str, *, n: int) -> Line:
        """A result that is no rate of rounds: one value, out of n samples."""
        return Line(
            name, self.name, self.dtype, self.threads, significant(value), unit, None, {}, n, 0.0
        )

    # ---- limits ----

    def reads(self) -> limits.Reads:
        """The memory-read limit."""
        return limits.Reads(self.threads, most=(1 << 28) if self.quick else (1 << 30))

    def products(self, shape: "Shape") -> limits.Products:
        """The product limit on the shapes of this model."""
        return limits.Products(limits.matrices(shape), self.threads)


def token_ids(model: kvcomm.Model, n: int, seed: int = 0) -> list[int]:
    """Random ids, the same on every run."""
    return random.Random(seed).choices(range(1, model.vocab_size), k=n)


def in_use(seconds: float = 1.0) -> float:
    """Processors that others keep busy, as the system counts over that time; 0 if it does not."""
    before = _busy_ticks()
    time.sleep(seconds)
    return (_busy_ticks() - before) / os.sysconf("SC_CLK_TCK") / seconds


def _busy_ticks() -> int:
    try:
        first = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
    except OSError:
        return 0
    user, nice, system, _idle, _waiting, *others = map(int, first.split()[1:9])
    return user + nice + system + sum(others)


def say(line: str) -> None:
    """A line on standard error."""
    print(f"benchmarks: {line}", file=sys.stderr, flush=True)


def gguf_file(setup: Setup, name: str | None) -> Path | None:
    """The model as a GGUF file of the weights' type, made of the file that was named, or of the
    one that `name` is or stands for; None where there is none."""
    from kvcomm import catalogue

    source = setup.options.gguf
    if source is None and name is not None and name.endswith(".gguf"):
        source = Path(name)
    if source is None and name in catalogue.CATALOGUE:
        source = catalogue.fetch(name)
    if source is None or setup.options.dtype == "auto":
        return source
    from peers import gguf_types

    return gguf_types.prepared(Path(source), setup.dtype, process.ENVIRONMENTS / "gguf")


def plain(model: kvcomm.Model) -> Path:
    """A folder of the model that others can read, without blocks; made once."""
    from kvcomm import convert
    from kvcomm.weights import BLOCKS, open_weights

    with open_weights(model.path) as weights:
        if not any(tensor.dtype in BLOCKS for tensor in weights.tensors.values()):
            return model.path
    folder = process.ENVIRONMENTS / "plain" / model.path.name
    return folder if folder.exists() else convert.convert(model.path, folder)


def kept(setup: Setup, name: str) -> Path:
    """A folder with the blocks of that file as they are; made once.

    Raises
    ------
    ValueError
        There is no GGUF file.
    """
    from kvcomm import convert

    path = gguf_file(setup, name)
    if path is None:
        raise ValueError(f"weights in {setup.dtype}: no GGUF file of {setup.name} (--gguf FILE)")
    folder = process.ENVIRONMENTS / "gguf" / f"{path.stem}-kept"
    return folder if folder.exists() else convert.convert(path, folder, "keep")


# ---- a process of its own ------------------------------------------------------------------

ALONE = "--alone"


def alone(setup: Setup, script: str, n: int) -> Any:
    """What a script's `measure_alone` gives in a fresh process, since memory is a process's."""
    words = [setup.source, setup.load_dtype, setup.kv_dtype, str(setup.threads), str(n)]
    command = [sys.executable, script, ALONE, *words]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def run_alone(measure_alone: Callable[[str, str, str, int, int], Any]) -> bool:
    """In that process: measure and print. False where this is not it."""
    if ALONE not in sys.argv:
        return False
    source, dtype, kv_dtype, threads, n = sys.argv[sys.argv.index(ALONE) + 1 :]
    print(json.dumps(measure_alone(source, dtype, kv_dtype, int(threads), int(n))))
    return True


# ---- the command ---------------------------------------------------------------------------


def parser(doc: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument(
        "--model", default="smollm2-135m", metavar="M",
        help="names, folders or GGUF files, or random:SHAPE (kvcomm.shapes); several by comma",
    )  # fmt: skip
    made.add_argument(
        "--dtype",
        default="f32",
        help="of the weights: f32, f16, bf16, q8_0; q4_0, q4_1: a GGUF file stored again in it; "
        "auto: as stored",
    )
    made.add_argument("--kv-dtype", default="f32", help="of keys and values")
    made.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    made.add_argument("--rounds", type=int, default=ROUNDS, help=f"at least {ROUNDS}")
    made.add_argument("--quick", action="store_true", help="smaller work: two minutes at most")
    made.add_argument("--json", action="store_true", help="one JSON object per line")
    made.add_argument(
        "--peers", default="installed", metavar="P",
        help=f"of {', '.join(process.KINDS)}; NAME or NAME=INTERPRETER by comma, none, or "
        "installed: all that peers/make.py made an environment for (default)",
    )  # fmt: skip
    made.add_argument("--published", type=Path, metavar="DIR", help="folder of the published code")
    made.add_argument("--gguf", type=Path, metavar="FILE", help="the model for llama.cpp")
    return made


def main(
    doc: str,
    measure: Callable[[Setup], Iterator[Line]],
    add: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> None:
    """A benchmark as a command; add: further options."""
    made = parser(doc)
    add(made)
    options = made.parse_args()
    if options.rounds < ROUNDS:
        made.error(f"--rounds: expected {ROUNDS} or more, found {options.rounds}")
    try:
        options.peers = process.chosen(options.peers, options.published)
    except ValueError as error:
        made.error(str(error))
    busy = in_use()
    if busy > 0.2:
        say(f"the machine is busy ({busy:.1f} processors): times will not be worth much")
    for name in options.model.split(","):
        with contextlib.closing(Setup(name, options)) as setup:
            for line in measure(setup):
                print(line.json() if options.json else line.text(), flush=True)
