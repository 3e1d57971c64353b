"""What tells models apart: a hash of the configuration and every weight, taken when asked for.

Owns: the files of a loaded model, held open and known by size and time of change, and the
fingerprint, which is SHA-256 over the core's configuration and a SHA-256 of every loaded tensor
as stored. So it does not depend on the folder, on sharding, on name prefixes or on the dtype
loaded to, and differs when one weight or the rope differs. Reads tensors as bytes only; what they
mean is checkpoint.py's.

Hashing costs more than all the rest of loading, and most programs never ask: a model that answers
needs no fingerprint, a message that is saved does. The files stay open until then, so a folder
that is moved, replaced or deleted meanwhile does no harm; a file that is written to does, and is
an error.
"""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any

from kvcomm._core import get_num_threads
from kvcomm.checkpoint import Item
from kvcomm.fields import shown
from kvcomm.weights import Tensor

#: Bytes that are read and hashed at a time.
_SLICE = 1 << 18


class Files:
    """Weight files held open; closed when nobody refers to this object any more.

    Raises
    ------
    OSError
        A file cannot be opened.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._open: dict[Path, tuple[FileIO, tuple[int, int]]] = {}
        for path in paths:
            file = FileIO(os.fspath(path), "rb")
            self._open[path] = file, _state(file)

    def descriptor(self, path: Path) -> int:
        """What to read `path` with; valid as long as this object."""
        return self._open[path][0].fileno()

    def check(self) -> None:
        """Raise OSError, with its name, for a file that changed since it was opened."""
        for path, (file, known) in self._open.items():
            found = _state(file)
            if found != known:
                raise OSError(
                    f"{shown(path)}: changed since it was opened: {found[0]} bytes, written at"
                    f" {found[1]} ns, expected {known[0]} at {known[1]}; load the model again"
                )

    def digest(self, tensor: Tensor) -> str:
        """SHA-256 (hex) of a tensor's bytes."""
        digest, file = hashlib.sha256(), self.descriptor(tensor.file)
        place, end = tensor.begin, tensor.begin + tensor.nbytes
        while place < end:
            part = os.pread(file, min(_SLICE, end - place), place)
            if not part:
                raise OSError(f"{shown(tensor.file)}: {place} bytes, expected at least {end}")
            digest.update(part)
            place += len(part)
        return digest.hexdigest()


def _state(file: FileIO) -> tuple[int, int]:
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns


class Fingerprint:
    """A fingerprint that is taken when it is first asked for, once.

    Equal when the values are; two names of one object are compared without taking it.

    Parameters
    ----------
    take
        Gives the value; called at most once with success, and let go then.
    """

    def __init__(self, take: Callable[[], str]) -> None:
        self._take: Callable[[], str] | None = take
        self._value = ""
        self._lock = threading.Lock()

    @classmethod
    def known(cls, value: str) -> "Fingerprint":
        """One whose value is there already."""
        return cls(lambda: value)

    @property
    def value(self) -> str:
        """64 hex digits; "" for a thing that is not there."""
        with self._lock:
            if self._take is not None:
                self._value, self._take = self._take(), None
            return self._value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fingerprint):
            return NotImplemented
        return self is other or self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return "Fingerprint(not taken)" if self._take else f"Fingerprint({self._value[:12]!r})"


def of_weights(files: Files, config: Mapping[str, Any], items: Iterable[Item]) -> Fingerprint:
    """The fingerprint of a configuration of the core and the tensors loaded for it.

    Its value raises OSError when a file was changed since it was opened.
    """
    items = tuple(items)

    def take() -> str:
        files.check()
        # Longest first: a tensor is hashed on one thread, and the last to finish decides.
        order = sorted(items, key=lambda item: -item.tensor.nbytes)
        with ThreadPoolExecutor(get_num_threads()) as pool:
            digests = pool.map(lambda item: files.digest(item.tensor), order)
            rows = [
                [item.weight, item.layer, item.tensor.dtype, digest]
                for item, digest in zip(order, digests, strict=True)
            ]
        files.check()
        text = json.dumps([dict(config), sorted(rows)], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    return Fingerprint(take)
