"""Data sets of the Hugging Face hub, read with its library `datasets`.

Owns what an id looks like and how its rows are reached. Never runs code of a data set, and never
waits: whether the hub answers is asked once, for SECONDS, before anything is loaded. Local files
come first; that is `example.py`'s to see to.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from kvcomm.errors import FormatError, UnsupportedError
from kvcomm.tasks.rows import Row

# How long the hub may take to say that it knows a data set.
SECONDS = 8.0

# Taken where no split is named, the first that there is. Never the train set by itself.
SPLITS = ("test", "validation", "dev")

ID = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?(?::([\w.-]+))?")
FILE = re.compile(r"\.(?:json|jsonl|csv|parquet|gz|txt|zip|tsv)$")


@dataclass(frozen=True)
class Dataset:
    """`org/name`, `org/name:config` or `org/name:config:split`; what is not given is None."""

    name: str
    config: str | None = None
    split: str | None = None

    @classmethod
    def of(cls, text: str) -> Dataset | None:
        """The data set of an id; None where the text is no id, such as the name of a file."""
        found = ID.fullmatch(text)
        if found is None or FILE.search(text) or text.startswith((".", "~")):
            return None
        return cls(*found.groups())


def read_dataset(dataset: Dataset, hint: str) -> Iterator[Row]:
    """The rows of a split.

    Parameters
    ----------
    hint : what may be named instead, for the message when the hub cannot be reached

    Raises
    ------
    UnsupportedError : `datasets` is not installed, or the set needs code of its own to load
    FormatError : no such config or split
    OSError : the hub does not know the set, or does not answer within `SECONDS`
    """
    try:
        import datasets
    except ImportError:
        raise UnsupportedError(
            f"{dataset.name}: no such file; reading it from the hub needs datasets, install it "
            "with: pip install datasets"
        ) from None
    if not os.environ.get("HF_HUB_OFFLINE") and not os.environ.get("HF_DATASETS_OFFLINE"):
        _ask(dataset.name, hint)
    try:
        split = dataset.split or _default_split(
            dataset.name, datasets.get_dataset_split_names(dataset.name, dataset.config)
        )
        rows = datasets.load_dataset(dataset.name, dataset.config, split=split)
    except ConnectionError as error:
        raise _unreachable(dataset.name, hint, error) from None
    except RuntimeError as error:  # how the library refuses a set that is a script
        raise UnsupportedError(f"{dataset.name}: {_one_line(error)}") from None
    except ValueError as error:
        raise FormatError(f"{dataset.name}: {_one_line(error)}") from None
    for number, fields in enumerate(rows):
        yield Row(f"{dataset.name} {split} record {number}", fields)


def _default_split(name: str, found: list[str]) -> str:
    for split in SPLITS:
        if split in found:
            return split
    raise FormatError(
        f"{name}: no split named {', '.join(SPLITS)}, found {', '.join(found) or 'none'}; "
        "name one after the config"
    )


def _ask(name: str, hint: str) -> None:
    """Whether the hub knows a data set. In a thread, as looking up a host has no time limit."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import RepositoryNotFoundError

    answers: list[Exception | None] = []

    def ask() -> None:
        try:
            HfApi().dataset_info(name, timeout=SECONDS)
            answers.append(None)
        except Exception as error:
            answers.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(SECONDS)
    if not answers:
        raise _unreachable(name, hint, TimeoutError(f"no answer within {SECONDS:g} s"))
    (error,) = answers
    if isinstance(error, RepositoryNotFoundError):
        raise FileNotFoundError(f"{name}: no such file, and no such data set on the hub")
    if error is not None:
        raise _unreachable(name, hint, error)


def _unreachable(name: str, hint: str, error: Exception) -> OSError:
    return OSError(
        f"{name}: no such file, and the hub cannot be reached ({_one_line(error)}); give {hint}"
    )


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:200] or type(error).__name__
