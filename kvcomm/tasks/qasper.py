"""QASPER: questions about a whole scientific paper.

Layouts: the original (an object of papers by id, or one paper a row) and the hub's copy of it
(lists by field name), L-Eval (`instructions`, `outputs`, `input`), LongBench (`input`,
`context`, `answers`) and SCROLLS (`input` with the question before the first blank line,
`output`).

The text of a paper in the first two layouts is: title, abstract, then every section as its
name and its paragraphs, one a line; blank lines between these parts. An annotation gives one
accepted answer in the official order: unanswerable, spans joined by ", ", free form, yes or
no; one that holds none of them gives none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvcomm.errors import FormatError
from kvcomm.tasks import longbench
from kvcomm.tasks.example import Context, Parsed, Task
from kvcomm.tasks.rows import Row

UNANSWERABLE = "Unanswerable"


def parse(row: Row, context: Context) -> Iterator[Parsed]:
    """The questions of one row; `context` is always the whole paper."""
    fields = row.fields
    for names, reader in LAYOUTS:
        if all(name in fields for name in names):
            yield from reader(row)
            return
    if fields and all(isinstance(paper, Mapping) and "qas" in paper for paper in fields.values()):
        for name in fields:
            yield from _paper(row.within(name, fields[name]))
        return
    expected = "; ".join("/".join(names) for names, _ in LAYOUTS)
    raise FormatError(
        f"{row.place}: unknown layout with fields {', '.join(fields) or 'none'}, "
        f"expected one of {expected}"
    )


def _paper(row: Row) -> Iterator[Parsed]:
    text = _paper_text(row)
    for qa in row.objects("qas"):
        answers = dict.fromkeys(
            answer for entry in qa.objects("answers") if (answer := _reference(entry)) is not None
        )
        yield Parsed(qa.name("question_id"), text, qa.text("question"), tuple(answers))


def _paper_text(row: Row) -> str:
    parts = [_optional(row, "title"), _optional(row, "abstract")]
    for section in row.objects("full_text"):
        name = _optional(section, "section_name")
        parts.append("\n".join([*([name] if name else []), *section.texts("paragraphs")]))
    return "\n\n".join(part.strip() for part in parts if part.strip())


def _optional(row: Row, name: str) -> str:
    return "" if row.fields.get(name) is None else row.text(name)


def _reference(entry: Row) -> str | None:
    """The accepted answer of one annotation, by the official order."""
    answer = entry.within("answer", entry.take("answer", dict))
    if answer.fields.get("unanswerable"):
        return UNANSWERABLE
    if answer.fields.get("extractive_spans"):
        return ", ".join(answer.texts("extractive_spans"))
    if answer.fields.get("free_form_answer"):
        return answer.text("free_form_answer")
    if answer.fields.get("yes_no") is None:
        return None
    return "Yes" if answer.take("yes_no", bool) else "No"


def _leval(row: Row) -> Iterator[Parsed]:
    text = row.text("input")
    questions, answers = row.take("instructions", list), row.take("outputs", list)
    if len(questions) != len(answers):
        raise row.wrong("outputs", answers, f"{len(questions)} answers, found {len(answers)}")
    for question, answer in zip(questions, answers, strict=True):
        part = row.within("instructions", {"question": question, "answer": answer})
        yield Parsed(None, text, part.text("question"), part.answers("answer"))


def _scrolls(row: Row) -> Iterator[Parsed]:
    question, blank, text = row.text("input").partition("\n\n")
    if not blank:
        raise FormatError(f"{row.place}: field 'input' has no blank line after the question")
    yield Parsed(row.name("pid", "id"), text.strip(), question.strip(), row.answers("output"))


LAYOUTS: tuple[tuple[tuple[str, ...], Any], ...] = (
    (("qas", "full_text"), _paper),
    (("instructions", "outputs", "input"), _leval),
    (longbench.FIELDS, longbench.parse),
    (("input", "output"), _scrolls),
)

TASK = Task(
    name="qasper",
    family="qa",
    max_new_tokens=128,
    truncates=True,
    metric="match",
    closed=False,
    contexts=("full",),
    parse=parse,
    files=(
        "qasper/*.json* qasper/*.parquet",
        "qasper.json* qasper.parquet",
        "qasper-test*.json*",
        "qasper-dev*.json*",
    ),
)
