"""A peer as a process: started in its own environment, asked by lines of JSON, stopped in between.

Owns which peers there are, what each can do, and the pipe to them. wire.py is the other end. A
request is {"op": name, ...}, its reply {"seconds": s, ...} or {"error": text}. A peer loads the
model when it is started, and sleeps under SIGSTOP except while it has a request. What it says on
standard error is shown when something goes wrong.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE.parents[1] / "build" / "peers"

FLOATS = ("f32", "f16", "bf16")
MODEL_OPERATIONS = frozenset({"prefill", "context", "steps", "load", "peak"})


@dataclass(frozen=True)
class Kind:
    """program: in this folder. needs: what else it has to be given than a model's folder."""

    program: str
    environment: str
    dtypes: tuple[str, ...]
    operations: frozenset[str]
    needs: str = ""


KINDS = {
    "transformers": Kind(
        "transformers_peer.py", "transformers", FLOATS, MODEL_OPERATIONS | {"copies"}
    ),
    "transformers-4.53.3": Kind(
        "transformers_peer.py", "transformers-4.53.3", FLOATS, MODEL_OPERATIONS | {"copies"}
    ),
    "llama.cpp": Kind(
        "llama_peer.py",
        "llama.cpp",
        (*FLOATS, "q8_0", "q4_0", "q4_1"),
        MODEL_OPERATIONS,
        "gguf",
    ),
    "published": Kind(
        "published_peer.py", "transformers-4.53.3", ("f32",), frozenset({"evaluate"}), "published"
    ),
}


def interpreter_of(environment: str) -> Path:
    """Python of an environment that make.py makes."""
    return ENVIRONMENTS / environment / "bin" / "python"


def chosen(text: str, published: Path | None) -> dict[str, Path]:
    """Interpreter by peer, out of what may be written after --peers.

    Raises
    ------
    ValueError
        An unknown peer, one without an environment, or the published code without its folder.
    """
    if text == "none":
        return {}
    if text == "installed":
        found = {name: interpreter_of(kind.environment) for name, kind in KINDS.items()}
        return {
            name: path
            for name, path in found.items()
            if (path.parents[1] / "made").exists()
            and (KINDS[name].needs != "published" or published is not None)
        }
    peers = {}
    for entry in text.split(","):
        name, _, given = entry.partition("=")
        if name not in KINDS:
            raise ValueError(f"peer {name!r} is unknown; known are {', '.join(KINDS)}")
        path = Path(given) if given else interpreter_of(KINDS[name].environment)
        if not path.exists():
            raise ValueError(
                f"peer {name}: no interpreter {path}; "
                f"python benchmarks/peers/make.py {KINDS[name].environment}"
            )
        if KINDS[name].needs == "published" and published is None:
            raise ValueError(f"peer {name}: needs --published DIR")
        peers[name] = path
    return peers


class Peer:
    """A running peer with the model loaded.

    Attributes
    ----------
    about : str
        Its versions and settings, as it states them.
    """

    def __init__(self, name: str, interpreter: Path, fields: Mapping[str, Any]) -> None:
        self.name = name
        environment = dict(os.environ)
        environment.pop("OPENBLAS_NUM_THREADS", None)  # of this process's limits, not of a peer
        environment["OMP_NUM_THREADS"] = str(fields["threads"])
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - see close
        self._process = subprocess.Popen(
            [str(interpreter), str(HERE / KINDS[name].program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        try:
            self.about = str(self.ask("open", **fields)["about"])
        except BaseException:
            self.close()
            raise

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """One request; the reply.

        Raises
        ------
        RuntimeError
            What the peer says went wrong, or that it has ended.
        """
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"op": op, **fields}) + "\n")
            self._process.stdin.flush()
            text = self._process.stdout.readline()
        except BrokenPipeError:
            text = ""
        if not text:
            self._show_log()
            raise RuntimeError(f"peer {self.name}: ended with status {self._process.wait()}")
        self._process.send_signal(signal.SIGSTOP)
        reply = json.loads(text)
        if "error" in reply:
            self._show_log()
            raise RuntimeError(f"peer {self.name}: {op}: {reply['error']}")
        return reply

    def _show_log(self) -> None:
        """What the peer and its libraries have said so far."""
        self._log.seek(0)
        sys.stderr.write(self._log.read())

    def seconds(self, op: str, **fields: Any) -> float:
        """The time that the peer took, by its own clock."""
        return float(self.ask(op, **fields)["seconds"])

    def close(self) -> None:
        """End the process."""
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._log.close()
