"""JSON files of a model folder, read with types checked.

Owns: reading a JSON object from a path that may be of any bytes, Git-LFS pointers, and `Fields`,
which takes typed values out of an object and names file, key and value in every error. Knows no
configuration.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcomm.errors import FormatError

AnyPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]


def shown(path: AnyPath) -> str:
    """A path as text that any terminal of this locale can print."""
    encoding = sys.getfilesystemencoding()
    return os.fsdecode(path).encode(encoding, "backslashreplace").decode(encoding)


def check_pointer(path: Path) -> None:
    """Raise FormatError when a file is only a Git-LFS pointer to what it should be."""
    with open(path, "rb") as file:
        start = file.read(64)
        size = os.fstat(file.fileno()).st_size
    if start.startswith(b"version https://git-lfs"):
        raise FormatError(
            f"{shown(path)}: a git-lfs pointer of {size} bytes, not the file itself;"
            " fetch the file with git lfs pull"
        )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises
    ------
    OSError
        The file is missing or cannot be read.
    FormatError
        It is a Git-LFS pointer, not JSON in UTF-8, or not an object.
    """
    if not path.exists():
        raise FileNotFoundError(f"{shown(path)}: no such file")
    check_pointer(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise FormatError(f"{shown(path)}: not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise FormatError(
            f"{shown(path)}: not JSON, line {error.lineno} column {error.colno}: {error.msg}"
        ) from None
    except RecursionError:
        raise FormatError(f"{shown(path)}: JSON nested too deeply") from None
    if not isinstance(value, dict):
        raise FormatError(f"{shown(path)}: expected a JSON object, found {type(value).__name__}")
    return value


class Fields:
    """Typed access to a JSON object; every error names the file, the key and what was found."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key, default)
        if value is None and key not in self.values:
            raise FormatError(f"{self.where}: {key} is missing")
        return value

    def integer(self, key: str, default: int | None = None, *, low: int = 1) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 2**31:
            raise FormatError(
                f"{self.where}: {key} is {quoted(value)}, expected an integer >= {low}"
            )
        return value

    def number(self, key: str, default: float | None = None, *, above: float = 0.0) -> float:
        value = self._value(key, default)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not above < value < float("inf"):
            raise FormatError(
                f"{self.where}: {key} is {quoted(value)}, expected a finite number > {above:g}"
            )
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise FormatError(f"{self.where}: {key} is {quoted(value)}, expected true or false")
        return value

    def object(self, key: str) -> Mapping[str, Any] | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise FormatError(f"{self.where}: {key} is {quoted(value)}, expected an object or null")
        return value


def quoted(value: Any) -> str:
    """A JSON value for a message, cut to 80 characters."""
    return json.dumps(value)[:80]
