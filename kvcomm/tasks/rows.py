"""Rows of a data file, each with its place, and checked access to their fields.

Owns the file formats (JSON arrays and objects, JSON Lines, CSV, Parquet; gzip and byte-order
marks). Knows no data set.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcomm.errors import FormatError, UnsupportedError


@dataclass(frozen=True)
class Row:
    """One record as it stands in the file. `place` names file and line or record."""

    place: str
    fields: Mapping[str, Any]

    def text(self, name: str) -> str:
        """A field that must be there and be text."""
        return self.take(name, str)

    def take(self, name: str, kind: type | tuple[type, ...]) -> Any:
        """A field that must be there and be of a kind.

        Raises
        ------
        FormatError : absent, or of another type
        """
        if name not in self.fields:
            raise FormatError(
                f"{self.place}: field {name!r} is missing, found {', '.join(self.fields) or 'none'}"
            )
        value = self.fields[name]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kind) or (isinstance(value, bool) and bool not in kinds):
            raise self.wrong(name, value, " or ".join(one.__name__ for one in kinds))
        return value

    def wrong(self, name: str, value: object, expected: str) -> FormatError:
        """The error of a field that has another shape than expected."""
        return FormatError(
            f"{self.place}: field {name!r} is {type(value).__name__}, expected {expected}"
        )

    def within(self, name: str, fields: object) -> Row:
        """A part of this row as a row of its own.

        Raises
        ------
        FormatError : the part is not an object
        """
        if not isinstance(fields, Mapping):
            raise self.wrong(name, fields, "object")
        return Row(f"{self.place}, {name}", fields)

    def objects(self, name: str) -> list[Row]:
        """A field of objects as rows: stored as a list of objects or as an object of lists.

        Raises
        ------
        FormatError : absent, of another type, or lists that differ in length
        """
        value = self.take(name, (list, dict))
        if isinstance(value, dict):
            columns = {key: column for key, column in value.items() if isinstance(column, list)}
            length = max(map(len, columns.values()), default=0)
            if any(len(column) != length for column in columns.values()):
                raise self.wrong(name, value, f"lists of one length, {length}")
            value = [{key: column[k] for key, column in columns.items()} for k in range(length)]
        return [self.within(f"{name}[{k}]", entry) for k, entry in enumerate(value)]

    def texts(self, name: str) -> list[str]:
        """A field that must be there and be a list of texts."""
        value = self.take(name, list)
        if not all(isinstance(text, str) for text in value):
            raise self.wrong(name, value, "list of str")
        return value

    def answers(self, *names: str) -> tuple[str, ...]:
        """Accepted answers in fields of one text or a list of texts, each once; none from a field
        that is absent, null or empty."""
        found: list[str] = []
        for name in names:
            value = self.fields.get(name)
            texts = [value] if isinstance(value, str) else [] if value is None else value
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                raise self.wrong(name, value, "str or list of str")
            found += texts
        return tuple(dict.fromkeys(text for text in found if text.strip()))

    def name(self, *names: str) -> str | None:
        """The first of these fields that is there, as an id."""
        for name in names:
            if self.fields.get(name) is not None:
                return str(self.fields[name])
        return None


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a data file, in file order.

    A JSON array gives its elements, an object that spans the file itself, JSON Lines one row a
    line (blank lines are passed over). CSV gives per line an object of "cells", a list of text,
    and "file", the file's name without suffixes.

    Raises
    ------
    FormatError : broken JSON (with its line), text that is not UTF-8, a damaged gzip file, a
        row that is not an object
    UnsupportedError : Parquet, and pyarrow is not installed
    OSError : the file cannot be read
    """
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
        return
    text = _read_text(path)
    if ".csv" in path.suffixes:
        yield from _read_csv(path, text)
        return
    if text.lstrip().startswith("["):
        values = _parse_document(path, text)
        yield from (_row(f"{path} record {place}", value) for place, value in enumerate(values))
        return
    # Not splitlines(): that also breaks at U+2028 and others, which JSON text may hold.
    lines = [
        (number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()
    ]
    document = _spanning_object(text, lines)
    if document is not None:
        yield _row(f"{path} record 0", document)
        return
    for number, line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{path} line {number}: not JSON, {error}") from None
        yield _row(f"{path} line {number}", value)


def _read_text(path: Path) -> str:
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise FormatError(f"{path}: damaged gzip file, {error}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise FormatError(f"{path} line {line}: not UTF-8, byte {error.start}") from None


def _read_csv(path: Path, text: str) -> Iterator[Row]:
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    name = path.name.split(".")[0]
    try:
        for cells in lines:
            if cells:
                yield Row(f"{path} line {lines.line_num}", {"cells": cells, "file": name})
    except csv.Error as error:
        raise FormatError(f"{path} line {lines.line_num}: not CSV, {error}") from None


def _parse_document(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise FormatError(f"{path} line {error.lineno}: not JSON, {error.msg}") from None
    except RecursionError:
        raise FormatError(f"{path}: not JSON, nested too deep") from None


def _spanning_object(text: str, lines: list[tuple[int, str]]) -> Any:
    """The object that the lines of a file make together; None where each stands alone."""
    if len(lines) < 2:
        return None
    try:
        json.loads(lines[0][1])
    except (ValueError, RecursionError):
        pass
    else:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _row(place: str, value: object) -> Row:
    if not isinstance(value, Mapping):
        raise FormatError(f"{place}: {type(value).__name__}, expected an object")
    return Row(place, value)


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise UnsupportedError(
            f"{path}: reading parquet needs pyarrow, install it with: pip install pyarrow"
        ) from None
    try:
        values = parquet.read_table(path).to_pylist()
    except ValueError as error:  # what pyarrow raises for a damaged file
        raise FormatError(f"{path}: damaged parquet file, {str(error).splitlines()[0]}") from None
    for place, value in enumerate(values):
        yield _row(f"{path} record {place}", value)
