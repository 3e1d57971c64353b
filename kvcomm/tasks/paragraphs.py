"""Titled paragraphs with the supporting sentences named: what HotpotQA and its kin share.

Layouts: the original (`context` as [title, sentences] pairs, `supporting_facts` as
[title, sentence number] pairs) and the hub's copy (both as objects of lists by field name).
Owns reading these two fields; how they become a context is the data set's.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcomm.tasks.rows import Row

Paragraph = tuple[str, list[str]]


def read_paragraphs(row: Row) -> list[Paragraph]:
    """Titles with their sentences, in file order.

    Raises
    ------
    FormatError : the field is absent or of another shape
    """
    found = _pairs(row, "context", "title", ("sentences", "content"))
    for title, sentences in found:
        if not isinstance(title, str):
            raise row.wrong("context", title, "titles")
        if not isinstance(sentences, list) or not all(isinstance(s, str) for s in sentences):
            raise row.wrong("context", sentences, "lists of sentences")
    return found


def supporting(row: Row, paragraphs: Sequence[Paragraph]) -> tuple[str, ...]:
    """The supporting sentences as published: in the order of the facts, each as stored.

    A fact whose sentence does not exist is passed over; where a title occurs twice, the sentence
    of each paragraph is taken.

    Raises
    ------
    FormatError : the field is absent or of another shape
    """
    found = []
    for wanted, place in _pairs(row, "supporting_facts", "title", ("sent_id",)):
        if not isinstance(place, int) or isinstance(place, bool):
            raise row.wrong("supporting_facts", place, "sentence numbers")
        for title, sentences in paragraphs:
            if title == wanted and 0 <= place < len(sentences):
                found.append(sentences[place])
    return tuple(found)


def _pairs(row: Row, name: str, first: str, second: Sequence[str]) -> list:
    """A field of pairs, stored as a list of pairs or as an object of two lists.

    second : names that the second list may go by
    """
    value = row.take(name, (list, dict))
    if isinstance(value, list):
        if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value):
            raise row.wrong(name, value, "a list of pairs")
        return [tuple(pair) for pair in value]
    part = row.within(name, value)
    other = next((one for one in second if one in value), second[0])
    left, right = part.take(first, list), part.take(other, list)
    if len(left) != len(right):
        raise row.wrong(name, value, f"as many {other} as {first}, {len(left)}")
    return list(zip(left, right, strict=True))
