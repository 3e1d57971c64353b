"""Run the notebooks top to bottom, each in a fresh kernel, and store what they gave.

    python notebooks/run.py          all of them
    python notebooks/run.py 2 5      those whose names begin with these

Owns what a stored notebook is: its cells with their outputs, a digest of the code that gave them,
and nothing of the machine or the time. A notebook that fails, warns or names a folder of the
machine is not stored. Needs nbclient, nbformat and ipykernel.
"""

import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from kvcomm.packet import write_whole

HERE = Path(__file__).resolve().parent
KERNEL = "python3"

#: Seconds that one cell may take before the kernel is stopped.
CELL_SECONDS = 300


def notebooks() -> tuple[Path, ...]:
    """The notebooks in their order."""
    return tuple(sorted(HERE.glob("*.ipynb")))


def read(path: Path) -> NotebookNode:
    """A notebook as it is stored."""
    return nbformat.read(path, as_version=4)


def executed(notebook: NotebookNode) -> tuple[NotebookNode, float]:
    """A copy of a notebook that ran from top to bottom, and the seconds that took.

    The kernel starts in an empty folder, so that a notebook cannot lean on files beside it.

    Raises
    ------
    nbclient.exceptions.CellExecutionError
        A cell raised; the message shows it.
    ValueError
        A fault in what it gave; see `faults`.
    """
    fresh = nbformat.from_dict(notebook)
    for cell in _code(fresh):
        cell.outputs, cell.execution_count = [], None
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            fresh,
            timeout=CELL_SECONDS,
            kernel_name=KERNEL,
            resources={"metadata": {"path": folder}},
            record_timing=False,
            coalesce_streams=True,
            extra_arguments=["--log-level=ERROR"],
        ).execute()
    seconds = time.perf_counter() - started
    fresh.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": KERNEL},
        "language_info": {"name": "python"},
        "kvcomm": {"code_sha256": code_digest(fresh)},
    }
    found = faults(fresh)
    if found:
        raise ValueError("; ".join(found))
    return fresh, seconds


def code_digest(notebook: NotebookNode) -> str:
    """SHA-256 of the code cells, in order: outputs of other code than this are stale."""
    return hashlib.sha256("\0".join(cell.source for cell in _code(notebook)).encode()).hexdigest()


def faults(notebook: NotebookNode) -> list[str]:
    """What a stored notebook may not have, one line each with the number of the code cell."""
    found = []
    for number, cell in enumerate(_code(notebook), 1):
        if cell.execution_count != number:
            found.append(f"code cell {number}: ran as number {cell.execution_count}")
        for output in cell.outputs:
            if output.output_type == "error":
                found.append(f"code cell {number}: {output.ename}: {output.evalue}")
            if output.output_type == "stream" and output.name == "stderr":
                found.append(f"code cell {number}: wrote to stderr: {output.text.strip()}")
            for text in _texts(output):
                found += [
                    f"code cell {number}: names {place}" for place in _places() if place in text
                ]
    return found


def _code(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _texts(output: NotebookNode) -> Iterator[str]:
    yield output.get("text", "")
    for kind, data in output.get("data", {}).items():
        if kind.startswith("text/"):
            yield data


def _places() -> set[str]:
    """Folders of this machine that no output may name."""
    places = {tempfile.gettempdir(), str(Path.home()), str(HERE.parent), sys.prefix}
    places.add(os.environ.get("KVCOMM_CACHE", ""))
    return {place for place in places if len(place) > 1}


def main(beginnings: Sequence[str]) -> None:
    chosen = [path for path in notebooks() if not beginnings or path.name.startswith(beginnings)]
    if not chosen:
        raise SystemExit(f"no notebook begins with {' or '.join(beginnings) or 'anything'}")
    for path in chosen:
        notebook, seconds = executed(read(path))
        write_whole(path, nbformat.writes(notebook).encode() + b"\n")
        print(f"{path.name}: {seconds:.0f} s")


if __name__ == "__main__":
    main(tuple(sys.argv[1:]))
