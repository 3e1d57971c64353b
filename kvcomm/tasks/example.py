"""One question with its context, and what the program has to know of a data set.

Owns the two types that every task shares. The readers are in the files of the data sets.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvcomm.errors import FormatError
from kvcomm.tasks.rows import Row, read_rows

Context = Literal["gold", "full"]


@dataclass(frozen=True)
class Example:
    """One record of a data set.

    Attributes
    ----------
    id : the data set's own, or the place in the file where it has none; unique in a file
    index : 0-based place in the list of questions of the file
    context, question : as a message takes them
    answers : the accepted answers; empty where the file has none, so that the record can be
        answered but not scored
    """

    id: str
    index: int
    context: str
    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Parsed:
    """What a data set's reader makes of one question; `id` is None where the file has none."""

    id: str | None
    context: str
    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """A data set as an experiment uses it.

    Attributes
    ----------
    name : as given to `--task`
    family : of message texts, in `kvcomm.prompts.FAMILIES`
    max_new_tokens : published limit of an answer
    truncates : whether a prompt that is too long may lose its middle
    metric : the published measure
    closed : whether F1 goes by HotpotQA's rule for yes and no
    contexts : what may be asked for, the default first
    parse : one row of the file to its questions
    """

    name: str
    family: str
    max_new_tokens: int
    truncates: bool
    metric: str
    closed: bool
    contexts: tuple[Context, ...]
    parse: Callable[[Row, Context], Iterable[Parsed]]

    def load(self, path: str | os.PathLike[str], context: Context | None = None) -> list[Example]:
        """Read a data file.

        Parameters
        ----------
        path : JSON, JSON Lines or Parquet; `.gz` is unpacked
        context : "gold" or "full"; None is the published one

        Raises
        ------
        ValueError : a context this data set does not have
        FormatError : a broken line, an unknown layout or a wrong field, each with its place;
            no question at all; an id that occurs twice
        UnsupportedError : Parquet without pyarrow
        OSError : the file cannot be read
        """
        wanted = self.contexts[0] if context is None else context
        if wanted not in self.contexts:
            raise ValueError(f"context: {wanted!r}, {self.name} has {' and '.join(self.contexts)}")
        examples = list(self._number(Path(path), wanted))
        if not examples:
            raise FormatError(f"{path}: no question, expected at least one")
        return examples

    def _number(self, path: Path, context: Context) -> Iterator[Example]:
        seen: dict[str, str] = {}
        index = 0
        for row in read_rows(path):
            for parsed in self.parse(row, context):
                name = str(index) if parsed.id is None else parsed.id
                if name in seen:
                    raise FormatError(f"{row.place}: id {name!r} occurs twice, also {seen[name]}")
                seen[name] = row.place
                yield Example(name, index, parsed.context, parsed.question, parsed.answers)
                index += 1
