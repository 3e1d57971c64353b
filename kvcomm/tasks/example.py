"""One question with its context, and what the program has to know of a data set.

Owns the types that every task shares, and how files, folders and hub ids become examples. The
readers of single rows are in the files of the data sets, file formats in `rows.py`, the hub in
`hub.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvcomm.errors import FormatError
from kvcomm.tasks.hub import Dataset, read_dataset
from kvcomm.tasks.rows import Row, read_rows

Context = Literal["gold", "full"]
Senders = Literal["split", "documents"]
Source = str | os.PathLike[str]


@dataclass(frozen=True)
class Example:
    """One record of a data set.

    Attributes
    ----------
    id : the data set's own, or the place in the file where it has none; unique in what was
        loaded
    index : 0-based place in the list of questions
    context, question : as a message takes them; the context is empty where a data set has none
    answers : the accepted answers; empty where the file has none, so that the record can be
        answered but not scored
    pieces : the parts that the context is made of, where it can be dealt out to several senders;
        preamble + joint.join(pieces) is the context
    preamble : text before the first piece, which every sender gets
    joint : what stands between two pieces
    choices : what an answer may be, where it is one of a few; `metrics.accuracy` looks for them
    group : part of the data set that a figure tells apart (mmlu)
    marked : whether the file tells which passages the answer is in; where it does not, the context
        is the whole text
    """

    id: str
    index: int
    context: str
    question: str
    answers: tuple[str, ...]
    pieces: tuple[str, ...] = ()
    preamble: str = ""
    joint: str = "\n"
    choices: tuple[str, ...] = ()
    group: str = ""
    marked: bool = True

    def split(self, how: Senders) -> tuple[str, ...]:
        """The contexts of several senders.

        Parameters
        ----------
        how : "split", two senders as published: the first n // 2 pieces and the rest;
            "documents", one sender a piece

        Raises
        ------
        ValueError : another way, or fewer than two pieces
        """
        if how not in ("split", "documents"):
            raise ValueError(f"senders: {how!r}, expected split or documents")
        n = len(self.pieces)
        if n < 2:
            raise ValueError(f"record {self.id!r}: {n} pieces of context, expected at least 2")
        if how == "split":
            parts = [self.pieces[: n // 2], self.pieces[n // 2 :]]
        else:
            parts = [(piece,) for piece in self.pieces]
        return tuple(self.preamble + self.joint.join(part) for part in parts)


@dataclass(frozen=True)
class Parsed:
    """What a data set's reader makes of one question; `id` is None where the file has none.

    The other fields are those of `Example`.
    """

    id: str | None
    context: str
    question: str
    answers: tuple[str, ...]
    pieces: tuple[str, ...] = ()
    preamble: str = ""
    joint: str = "\n"
    choices: tuple[str, ...] = ()
    group: str = ""
    marked: bool = True


@dataclass(frozen=True)
class Task:
    """A data set as an experiment uses it.

    Attributes
    ----------
    name : as given to `--task`
    family : of message texts, in `kvcomm.prompts.FAMILIES`
    max_new_tokens : limit of an answer, the published one where there is one
    truncates : whether a prompt that is too long may lose its middle
    metric : the published measure, in `kvcomm.metrics.NAMES`
    closed : whether F1 goes by HotpotQA's rule for yes and no
    contexts : what may be asked for, the default first
    parse : one row of the file to its questions
    files : where the data lies below a data folder: each entry is one or more glob patterns with
        blanks between; the first entry that finds anything is taken with all that it finds
    needs_context : whether a record without a context is an error
    """

    name: str
    family: str
    max_new_tokens: int
    truncates: bool
    metric: str
    closed: bool
    contexts: tuple[Context, ...]
    parse: Callable[[Row, Context], Iterable[Parsed]]
    files: tuple[str, ...]
    needs_context: bool = True

    def load(
        self, source: Source | Sequence[Source], context: Context | None = None
    ) -> list[Example]:
        """Read the records of a file, of several, of a data folder, or of a set on the hub.

        Parameters
        ----------
        source : a file (JSON, JSON Lines, CSV or Parquet; `.gz` is unpacked), a folder (see
            `find_files`), a list of these, or, where no such path exists, "org/name", optionally
            with ":config" and ":split". Of several files the records stand one after the other,
            and their ids begin with the file's name.
        context : "gold" or "full"; None is the published one, or the whole text of a record that
            marks no passages

        Raises
        ------
        ValueError : a context that this data set, or a record that marks no passages, does not
            have
        FormatError : a broken line, an unknown layout or a wrong field, each with its place;
            a file without a question; an id that occurs twice
        UnsupportedError : Parquet without pyarrow, a hub id without datasets
        OSError : a file cannot be read, a folder has none, the hub does not answer
        """
        wanted = self.contexts[0] if context is None else context
        if wanted not in self.contexts:
            raise ValueError(f"context: {wanted!r}, {self.name} has {' and '.join(self.contexts)}")
        given = [source] if isinstance(source, str | os.PathLike) else source
        found = [each for one in given for each in self._files(os.fspath(one))]
        examples: list[Example] = []
        for prefix, name in zip(prefixes(found), found, strict=True):
            seen: dict[str, str] = {}
            for row in self._rows(name):
                for parsed in self.parse(row, wanted):
                    if context == "gold" and not parsed.marked and "full" in self.contexts:
                        raise ValueError(f"{row.place}: context 'gold', but no passage is marked")
                    own = str(len(seen)) if parsed.id is None else parsed.id
                    if own in seen:
                        raise FormatError(f"{row.place}: id {own!r} occurs twice, also {seen[own]}")
                    seen[own] = row.place
                    fields = {**vars(parsed), "id": prefix + own}
                    examples.append(Example(index=len(examples), **fields))
            if not seen:
                raise FormatError(f"{name}: no question, expected at least one")
        return examples

    def find_files(self, folder: Source) -> tuple[Path, ...]:
        """The data files of this task below a folder, in the order of their names.

        Known are a folder that holds one of its own per data set, with the files as they are
        published, and files named `<task>.jsonl` (as in LongBench's data folder). Train files
        are passed over where there is a set to test on.

        Raises
        ------
        FileNotFoundError : none; the message says what was looked for
        NotADirectoryError : no such folder
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder}: no such folder")
        for entry in self.files:
            hits = {
                path
                for pattern in entry.split()
                for path in folder.glob(pattern)
                if path.is_file() and not path.name.startswith(".")
            }
            if hits:
                return tuple(sorted(hits, key=str))
        raise FileNotFoundError(
            f"{folder}: no file of {self.name}, expected one of {', '.join(self.files)}"
        )

    def _files(self, source: str) -> list[str]:
        if not Path(source).is_dir():
            return [source]
        return [str(path) for path in self.find_files(source)]

    def _rows(self, name: str) -> Iterator[Row]:
        path = Path(name)
        dataset = None if path.exists() else Dataset.of(name)
        if dataset is None:
            return read_rows(path)
        return read_dataset(dataset, hint=f"a local file such as {self.name}.jsonl")


def prefixes(names: Sequence[str]) -> list[str]:
    """What the ids of each file begin with: nothing for one file, else its name."""
    if len(names) < 2:
        return [""] * len(names)
    stems = [Path(name).name.split(".")[0] for name in names]
    return [f"{stem}:" for stem in (stems if len(set(stems)) == len(stems) else names)]
