"""MMLU: questions of 57 school and college subjects with four options each, without a context.

Layouts: the hub's rows (`question`, `subject`, `choices`, `answer` as the number of the right
option from 0 on) and the original CSV, a line of question, A, B, C, D and the letter, where the
file's name says the subject (`virology_test.csv`). A CSV with a column of subjects is neither.

The question ends with the options, one a line with its letter, and "Answer:". The accepted
answer is the letter. A record's group is that of Figures 2 and 9, by the data set's own table
of categories; "Other" holds the subjects that the figures leave out.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcomm.errors import FormatError
from kvcomm.tasks.example import Context, Parsed, Task
from kvcomm.tasks.rows import Row

LETTERS = ("A", "B", "C", "D")

GROUPS: dict[str, tuple[str, ...]] = {
    "Social Science": (
        "econometrics", "high_school_geography", "high_school_government_and_politics",
        "high_school_macroeconomics", "high_school_microeconomics", "high_school_psychology",
        "human_sexuality", "professional_psychology", "public_relations", "security_studies",
        "sociology", "us_foreign_policy",
    ),
    "STEM": (
        "abstract_algebra", "astronomy", "college_biology", "college_chemistry",
        "college_computer_science", "college_mathematics", "college_physics",
        "computer_security", "conceptual_physics", "electrical_engineering",
        "elementary_mathematics", "high_school_biology", "high_school_chemistry",
        "high_school_computer_science", "high_school_mathematics", "high_school_physics",
        "high_school_statistics", "machine_learning",
    ),
    "Humanities": (
        "formal_logic", "high_school_european_history", "high_school_us_history",
        "high_school_world_history", "international_law", "jurisprudence", "logical_fallacies",
        "moral_disputes", "moral_scenarios", "philosophy", "prehistory", "professional_law",
        "world_religions",
    ),
    "Other": (
        "anatomy", "business_ethics", "clinical_knowledge", "college_medicine", "global_facts",
        "human_aging", "management", "marketing", "medical_genetics", "miscellaneous",
        "nutrition", "professional_accounting", "professional_medicine", "virology",
    ),
}  # fmt: skip
GROUP = {subject: group for group, subjects in GROUPS.items() for subject in subjects}

#: Endings of the original files' names, after the subject.
SPLITS = ("_test", "_val", "_dev")

#: What a line of a CSV file holds.
CELLS = ("question", *LETTERS, "answer")


def parse(row: Row, context: Context) -> Iterator[Parsed]:
    """The one question of a record; none of a CSV file's line of headings."""
    if "cells" in row.fields:
        cells = row.texts("cells")
        if len(cells) != len(CELLS):
            raise FormatError(
                f"{row.place}: {len(cells)} cells, expected {len(CELLS)}: {', '.join(CELLS)}; the "
                "subject is in the file's name, as in virology_test.csv"
            )
        question, *options, answer = cells
        if (question.lower(), answer.lower()) == ("question", "answer"):
            return
        name = row.text("file")
        subject = name
        for ending in SPLITS:
            subject = subject.removesuffix(ending)
        if subject not in GROUP:
            raise FormatError(
                f"{row.place}: file name {name!r}, expected one of the {len(GROUP)} subjects of "
                "mmlu, as in virology_test.csv"
            )
        if answer.strip() not in LETTERS:
            raise FormatError(
                f"{row.place}: answer {answer!r}, expected one of {', '.join(LETTERS)}"
            )
        yield _parsed(row, subject, question, options, answer.strip())
        return
    options = row.texts("choices")
    if len(options) != len(LETTERS):
        raise row.wrong("choices", options, f"{len(LETTERS)} options, found {len(options)}")
    number = row.take("answer", int) if row.fields.get("answer") is not None else None
    if number is not None and not 0 <= number < len(LETTERS):
        raise FormatError(f"{row.place}: answer {number}, expected 0 to {len(LETTERS) - 1}")
    yield _parsed(
        row,
        row.text("subject"),
        row.text("question"),
        options,
        None if number is None else LETTERS[number],
    )


def _parsed(
    row: Row, subject: str, question: str, options: list[str], answer: str | None
) -> Parsed:
    if subject not in GROUP:
        raise FormatError(f"{row.place}: subject {subject!r} is none of the {len(GROUP)} of mmlu")
    lettered = [f"{letter}. {text}" for letter, text in zip(LETTERS, options, strict=True)]
    return Parsed(
        None,
        "",
        "\n".join([question, *lettered, "Answer:"]),
        () if answer is None else (answer,),
        choices=LETTERS,
        group=GROUP[subject],
    )


TASK = Task(
    name="mmlu",
    family="choice",
    max_new_tokens=10,
    truncates=False,
    metric="accuracy",
    closed=False,
    contexts=("full",),
    parse=parse,
    files=(
        "mmlu/test/*.csv mmlu/*test*.csv mmlu/*test*.json* mmlu/*test*.parquet "
        "mmlu/all/test*.parquet",
        "mmlu.json* mmlu.parquet",
        "mmlu/*.json* mmlu/*.parquet",
    ),
    needs_context=False,
)
