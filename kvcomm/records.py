"""The log of an evaluation: records.jsonl, one line per record and method, and strict JSON.

Owns the file's form on disk: append-only, one JSON object a line, one writer at a time, repaired
when a run that was killed left a damaged end. Does not know what a record means: evaluate.py
says which fields a line has and which lines count.
"""

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvcomm.errors import FormatError
from kvcomm.packet import write_whole

RECORDS = "records.jsonl"
LOCK = ".lock"

#: Behind the id of a record: the line of an answer that layers were chosen from, which the
#: published protocol counts like any other.
CALIBRATING = " (calibrating)"

Record = dict[str, Any]


# ---- strict JSON ---------------------------------------------------------------------------


def plain(value: Any, where: str = "") -> tuple[Any, list[str]]:
    """A value as JSON can hold it, and a note on every number that JSON cannot.

    NumPy scalars and arrays become numbers and lists, paths become strings, and numbers that are
    not finite become null; each of these is noted as "path.to.field is nan".

    Raises
    ------
    TypeError
        A value of a kind that has no JSON form; the message names its field.
    """
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if value is None or isinstance(value, bool | int | str):
        return value, []
    if isinstance(value, float):
        return (value, []) if math.isfinite(value) else (None, [f"{where or 'value'} is {value}"])
    if isinstance(value, os.PathLike):
        return os.fsdecode(value), []
    if isinstance(value, Mapping):
        inside = [plain(v, f"{where}.{key}".lstrip(".")) for key, v in value.items()]
        pairs = zip(map(str, value), (v for v, _ in inside), strict=True)
        return dict(pairs), [note for _, notes in inside for note in notes]
    if isinstance(value, list | tuple):
        inside = [plain(v, f"{where}[{place}]") for place, v in enumerate(value)]
        return [v for v, _ in inside], [note for _, notes in inside for note in notes]
    raise TypeError(f"{where or 'value'}: {type(value).__name__} has no JSON form")


def dumps(value: Any, **options: Any) -> str:
    """Strict JSON in ASCII (so that lone surrogates and line separators are escaped).

    The notes of `plain` go into the field "notes" of a mapping.
    """
    value, notes = plain(value)
    if notes and isinstance(value, dict):
        value["notes"] = notes
    return json.dumps(value, allow_nan=False, **options)


def digest(value: Any) -> str:
    """SHA-256 of a value as JSON, in hexadecimal."""
    return hashlib.sha256(dumps(value, sort_keys=True).encode()).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON; the file appears whole or not at all."""
    write_whole(path, (dumps(value, indent=1) + "\n").encode())


# ---- the log -------------------------------------------------------------------------------


def parse(data: bytes) -> tuple[list[Record], list[int]]:
    """The objects of a log's bytes, in order, and the numbers of its damaged lines, from 1 on.

    Of a damaged line the whole objects at its start count (two writers may have joined theirs).
    """
    decoder = json.JSONDecoder(parse_constant=_refuse)
    records: list[Record] = []
    damaged: list[int] = []
    for number, line in enumerate(data.split(b"\n"), 1):
        text = line.decode("utf-8", "replace").strip()
        n_objects = 0
        try:
            while text:
                value, end = decoder.raw_decode(text)
                if not isinstance(value, dict):
                    raise ValueError("not an object")
                records.append(value)
                n_objects += 1
                text = text[end:].lstrip()
        except (ValueError, RecursionError):
            damaged.append(number)
        else:
            damaged += [number] * (n_objects > 1)
    return records, damaged


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def read_log(path: Path) -> list[Record]:
    """The records of a log that is whole.

    Raises
    ------
    FormatError
        Damaged lines; the message has the number of the first.
    OSError
        There is no log, or it cannot be read.
    """
    records, damaged = parse(path.read_bytes())
    if damaged:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        them = "them" if more else "it"
        raise FormatError(
            f"{path} record {damaged[0]}{more}: damaged, the run's command mends {them}"
        )
    return records


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder and keep every other process from writing a run there.

    The system lets go of the lock with the process, however that ends.

    Raises
    ------
    OSError
        The folder cannot be written, or another run is writing there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"{folder}: another run is writing there") from None
        yield
    finally:
        os.close(file)


class Log:
    """records.jsonl of a folder, open for appending; hold the folder's lock around it.

    Damaged lines and what `keep` does not want are dropped from the file, which is replaced in one
    step before anything is appended.

    Parameters
    ----------
    folder
        Where the log is, or will be.
    keep
        Which of the records found stay; called once for each, in order.

    Attributes
    ----------
    path : Path
        The file.
    records : list of dict
        What was found and kept, and what was appended since.
    n_damaged, n_dropped : int
        Damaged lines, and records that `keep` did not want.

    Raises
    ------
    OSError
        The log cannot be read or written.
    """

    def __init__(self, folder: Path, keep: Callable[[Record], bool]) -> None:
        self.path = folder / RECORDS
        data = self.path.read_bytes() if self.path.exists() else b""
        found, damaged = parse(data)
        self.n_damaged = len(damaged)
        self.records = [record for record in found if keep(record)]
        self.n_dropped = len(found) - len(self.records)
        whole = b"".join(map(_line, self.records))
        if whole != data:
            write_whole(self.path, whole)
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def append(self, record: Mapping[str, Any]) -> Record:
        """Write a record's line, at once and unbuffered; returns it as a reader would see it.

        Raises
        ------
        OSError
            The line is not, or not wholly, on the disk; a later start drops what is there of it.
        """
        line = _line(record)
        left = memoryview(line)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        written: Record = json.loads(line)
        self.records.append(written)
        return written


def _line(record: Mapping[str, Any]) -> bytes:
    return (dumps(record) + "\n").encode()
