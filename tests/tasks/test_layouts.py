"""The data sets besides HotpotQA and QASPER: each layout by hand, and each wrong field by name."""

import csv
import io
import json

import pytest

from kvcomm import prompts
from kvcomm.errors import FormatError
from kvcomm.tasks import TASKS, mmlu
from kvcomm.tasks.example import Example


def write(folder, *records, name="data.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


MUSIQUE = {
    "id": "2hop__1",
    "question": "Where does the river of Oldham end?",
    "answer": "Lake Brin",
    "answer_aliases": ["Brin", "Lake Brin", ""],
    "answerable": True,
    "paragraphs": [
        {"idx": 0, "title": "Elm", "paragraph_text": "A tree.", "is_supporting": False},
        {"idx": 1, "title": "Oldham", "paragraph_text": "On the Tarn.", "is_supporting": True},
        {"idx": 2, "title": "Tarn", "paragraph_text": "Ends in Brin.", "is_supporting": True},
    ],
}
WIKI = {
    "_id": "w1",
    "type": "comparison",
    "question": "Which pier is longer?",
    "answer": "Pier Two",
    "supporting_facts": [["Pier Two", 1], ["Pier One", 0]],
    "context": [
        ["Pier One", ["It has 30 m.", "It is old."]],
        ["Pier Two", ["It is new.", "It has 40 m."]],
        ["Gull", ["A bird."]],
    ],
}
LONGBENCH = {
    "_id": "lb1",
    "input": "Which pier?",
    "context": "Passage 1:\nPier One\nOld.\nPassage 2:\nPier Two\nNew, see Passage 1: above.",
    "answers": ["Pier Two", "Two", "Two"],
}
COUNTRY = {"id": "c1", "prompt_A": "Ida is at X.", "prompt_B": "Where is Ida?", "country": "Peru"}
TIP = {
    "prompt_A": "Ash up. Elm down.",
    "prompt_B": "Which?",
    "label": "Ash",
    "options": ["Ash", "Elm"],
}
MATH = {
    "problem": "1 + 1?",
    "solution": "It is $2$.",
    "socratic_questions": "1. What is 1?\n2. So?",
}
CHAT = {
    "id": "13",
    "dialogue": "Al: hi\r\nBo: yo\r\nAl: tea?\r\nBo: yes\r\nAl: ok",
    "summary": "Tea.",
}
HUB_MMLU = {
    "question": "Which is even?",
    "subject": "elementary_mathematics",
    "choices": ["1", "2", "3", "5"],
    "answer": 1,
}
GOOD = {
    "musique": MUSIQUE,
    "2wikimqa": WIKI,
    "multifieldqa_en": LONGBENCH,
    "countries": COUNTRY,
    "tipsheets": TIP,
    "tmath": MATH,
    "samsum": CHAT,
    "mmlu": HUB_MMLU,
}


# ---- musique


def columns(records):
    return {key: [record[key] for record in records] for key in records[0]}


@pytest.mark.parametrize("paragraphs", [MUSIQUE["paragraphs"], columns(MUSIQUE["paragraphs"])])
def test_musique(tmp_path, paragraphs):
    path = write(tmp_path, {**MUSIQUE, "paragraphs": paragraphs})
    (gold,) = TASKS["musique"].load(path)
    pieces = ("On the Tarn.", "Ends in Brin.")
    assert gold == Example(
        "2hop__1", 0, "\n".join(pieces), MUSIQUE["question"], ("Lake Brin", "Brin"), pieces
    )
    (full,) = TASKS["musique"].load(path, "full")
    assert full.context == "Elm\nA tree.\n\nOldham\nOn the Tarn.\n\nTarn\nEnds in Brin."
    assert full.split("split") == ("Elm\nA tree.", "Oldham\nOn the Tarn.\n\nTarn\nEnds in Brin.")


def test_a_question_that_cannot_be_answered_has_no_gold(tmp_path):
    (example,) = TASKS["musique"].load(write(tmp_path, {**MUSIQUE, "answerable": False}))
    assert example.answers == ()


# ---- 2wikimqa, and longbench


def test_2wikimqa_original(tmp_path):
    path = write(tmp_path, WIKI)
    (full,) = TASKS["2wikimqa"].load(path)
    passages = (
        "Passage 1:\nPier One\nIt has 30 m. It is old.",
        "Passage 2:\nPier Two\nIt is new. It has 40 m.",
        "Passage 3:\nGull\nA bird.",
    )
    assert full == Example("w1", 0, "\n".join(passages), WIKI["question"], ("Pier Two",), passages)
    assert full.split("split") == (passages[0], "\n".join(passages[1:]))
    (gold,) = TASKS["2wikimqa"].load(path, "gold")
    assert gold.context == "It has 40 m.\nIt has 30 m."
    hub = {
        **WIKI,
        "context": {"title": [t for t, _ in WIKI["context"]],
                    "content": [s for _, s in WIKI["context"]]},
        "supporting_facts": {"title": ["Pier Two", "Pier One"], "sent_id": [1, 0]},
    }  # fmt: skip
    assert TASKS["2wikimqa"].load(write(tmp_path, hub)) == [full]


@pytest.mark.parametrize("task", ["hotpotqa", "musique", "2wikimqa", "multifieldqa_en", "qasper"])
def test_longbench_is_one_layout_for_all(tmp_path, task):
    (example,) = TASKS[task].load(write(tmp_path, LONGBENCH))
    passages = ("Passage 1:\nPier One\nOld.", "Passage 2:\nPier Two\nNew, see Passage 1: above.")
    assert example == Example(
        "lb1", 0, LONGBENCH["context"], "Which pier?", ("Pier Two", "Two"), passages, marked=False
    )
    assert example.split("documents") == passages


@pytest.mark.parametrize("task", ["hotpotqa", "musique", "2wikimqa"])
def test_gold_passages_that_nobody_marked_are_refused(tmp_path, task):
    path = write(tmp_path, LONGBENCH)
    with pytest.raises(ValueError, match="context 'gold', but no passage is marked"):
        TASKS[task].load(path, "gold")
    assert TASKS[task].load(path, "full") == TASKS[task].load(path)


def test_what_stands_before_the_first_passage_goes_to_every_sender(tmp_path):
    context = "Read all.\n" + LONGBENCH["context"]
    (example,) = TASKS["2wikimqa"].load(write(tmp_path, {**LONGBENCH, "context": context}))
    first, second = example.split("split")
    assert first == "Read all.\nPassage 1:\nPier One\nOld."
    assert second == "Read all.\nPassage 2:\nPier Two\nNew, see Passage 1: above."


def test_one_long_text_cannot_be_split(tmp_path):
    path = write(tmp_path, {**LONGBENCH, "context": "A long text."})
    (example,) = TASKS["multifieldqa_en"].load(path)
    with pytest.raises(ValueError, match="record 'lb1': 0 pieces of context"):
        example.split("split")


# ---- countries, tipsheets, tmath, samsum


def test_small_layouts(tmp_path):
    def load(task):
        return TASKS[task].load(write(tmp_path, GOOD[task]))[0]

    extra = "You are required to extrapolate the country from the context."
    assert load("countries") == Example("c1", 0, "Ida is at X.", f"Where is Ida?{extra}", ("Peru",))
    assert load("tipsheets") == Example(
        "0", 0, "Ash up. Elm down.", "Which?", ("Ash",), choices=("Ash", "Elm")
    )
    assert load("tmath") == Example("0", 0, "1. What is 1?\n2. So?", "1 + 1?", ("It is $2$.",))
    assert load("samsum") == Example(
        "13", 0, "Al: hi\nBo: yo", "Al: tea?\nBo: yes\nAl: ok", ("Tea.",)
    )


def test_tipsheets_without_options_has_no_choices(tmp_path):
    record = {name: value for name, value in TIP.items() if name != "options"}
    assert TASKS["tipsheets"].load(write(tmp_path, record))[0].choices == ()


def test_tmath_as_published_is_one_record_a_file(tmp_path):
    for number in (1, 2):
        folder = tmp_path / "TMATH" / "hint_algebra"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"hint_{number}.json").write_text(json.dumps(MATH, indent=1))
    assert [example.id for example in TASKS["tmath"].load(tmp_path)] == ["hint_1:0", "hint_2:0"]


def test_a_dialogue_of_one_line_leaves_nothing_for_the_sender(tmp_path):
    (example,) = TASKS["samsum"].load(write(tmp_path, {**CHAT, "dialogue": "Al: hi"}))
    assert (example.context, example.question) == ("", "Al: hi")


def test_samsum_as_published_is_an_array(tmp_path):
    path = tmp_path / "test.json"
    path.write_text(json.dumps([CHAT, {**CHAT, "id": "14"}]))
    assert [example.id for example in TASKS["samsum"].load(path)] == ["13", "14"]


# ---- mmlu

QUESTION = "Which is even?\nA. 1\nB. 2\nC. 3\nD. 5\nAnswer:"


def test_mmlu_hub(tmp_path):
    (example,) = TASKS["mmlu"].load(write(tmp_path, HUB_MMLU))
    assert example == Example(
        "0", 0, "", QUESTION, ("B",), choices=("A", "B", "C", "D"), group="STEM"
    )


def table(folder, *rows, name="elementary_mathematics_test.csv"):
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    path = folder / name
    path.write_text(text.getvalue())
    return path


CELLS = ("Which is even?", "1", "2", "3", "5", "B")


def test_mmlu_csv(tmp_path):
    # The original has no headings; copies of it do. A question may hold commas and line breaks.
    odd = ('Say "a, b"\nand c?', "1", "2", "3", "4", "D")
    headings = ("question", "A", "B", "C", "D", "answer")
    path = table(tmp_path, headings, CELLS, odd)
    first, second = TASKS["mmlu"].load(path)
    assert (first.question, first.answers, first.group) == (QUESTION, ("B",), "STEM")
    assert second.question.startswith('Say "a, b"\nand c?\nA. 1\n')
    assert second.answers == ("D",)


def test_mmlu_folder_of_subjects(tmp_path):
    (tmp_path / "mmlu" / "test").mkdir(parents=True)
    for subject in ("virology", "philosophy"):
        table(tmp_path / "mmlu" / "test", CELLS, name=f"{subject}_test.csv")
    examples = TASKS["mmlu"].load(tmp_path)
    assert [(e.id, e.group) for e in examples] == [
        ("philosophy_test:0", "Humanities"),
        ("virology_test:0", "Other"),
    ]


def test_mmlu_subjects_are_the_57_in_groups():
    # Counts of the data set's own table of categories.
    assert {group: len(subjects) for group, subjects in mmlu.GROUPS.items()} == {
        "Social Science": 12,
        "STEM": 18,
        "Humanities": 13,
        "Other": 14,
    }
    assert len(mmlu.GROUP) == 57
    assert mmlu.GROUP["sociology"] == "Social Science"
    assert mmlu.GROUP["prehistory"] == "Humanities"


@pytest.mark.parametrize(
    ("cells", "name", "message"),
    [
        (
            CELLS[:5],
            "virology_test.csv",
            "line 1: 5 cells, expected 6: question, A, B, C, D, answer; the subject is in the file",
        ),
        (
            ("question", "subject", "A", "B", "C", "D", "answer"),
            "mmlu.csv",
            "line 1: 7 cells, expected 6: question, A, B, C, D, answer; the subject is in the file",
        ),
        ((*CELLS[:5], "E"), "virology_test.csv", "line 1: answer 'E', expected one of A, B, C, D"),
        *(
            (
                CELLS,
                f"{name}.csv",
                f"line 1: file name '{name}', expected one of the 57 subjects "
                "of mmlu, as in virology_test.csv",
            )
            for name in ("cooking_test", "mmlu")
        ),
    ],
)
def test_mmlu_csv_that_is_not_right(tmp_path, cells, name, message):
    with pytest.raises(FormatError, match=message):
        TASKS["mmlu"].load(table(tmp_path, cells, name=name))


def test_mmlu_csv_that_is_no_csv(tmp_path):
    path = tmp_path / "virology_test.csv"
    path.write_text('"never closed,1,2,3,4,A\n')
    with pytest.raises(FormatError, match="line 1: not CSV, unexpected end of data"):
        TASKS["mmlu"].load(path)


# ---- fields that are not right


@pytest.mark.parametrize("task", list(GOOD))
def test_an_empty_file_has_no_question(tmp_path, task):
    with pytest.raises(FormatError, match="no question, expected at least one"):
        TASKS[task].load(write(tmp_path))


@pytest.mark.parametrize("task", list(GOOD))
def test_an_unknown_layout_names_a_field(tmp_path, task):
    with pytest.raises(FormatError, match="line 1: field '\\w+' is missing, found colour"):
        TASKS[task].load(write(tmp_path, {"colour": "red"}))


ANSWER = {
    "musique": "answer", "2wikimqa": "answer", "multifieldqa_en": "answers",
    "countries": "country", "tipsheets": "label", "tmath": "solution", "samsum": "summary",
    "mmlu": "answer",
}  # fmt: skip


@pytest.mark.parametrize(
    ("task", "how"),
    [
        *((task, how) for task in GOOD for how in ("missing", None)),
        # An option's number cannot be empty.
        *((task, how) for task in GOOD if task != "mmlu" for how in ("", " ", [])),
    ],
)
def test_a_record_without_an_answer_can_be_asked_only(tmp_path, task, how):
    record = {name: value for name, value in GOOD[task].items() if name != "answer_aliases"}
    record[ANSWER[task]] = how
    if how == "missing":
        del record[ANSWER[task]]
    (example,) = TASKS[task].load(write(tmp_path, record))
    assert example.answers == ()
    assert example.question


@pytest.mark.parametrize(
    ("task", "change", "message"),
    [
        ("musique", {"paragraphs": "text"}, "field 'paragraphs' is str, expected list or dict"),
        ("musique", {"paragraphs": ["text"]}, r"'paragraphs\[0\]' is str, expected object"),
        (
            "musique",
            {"paragraphs": [{"is_supporting": 1}]},
            "'is_supporting' is int, expected bool",
        ),
        ("musique", {"paragraphs": [{"is_supporting": True}]}, "'paragraph_text' is missing"),
        ("musique", {"answer_aliases": [1]}, "'answer_aliases' is list, expected str or list of"),
        ("2wikimqa", {"context": [["a", "b"]]}, "field 'context' is str, expected lists of"),
        ("2wikimqa", {"question": 1}, "field 'question' is int, expected str"),
        ("multifieldqa_en", {"context": ["a"]}, "field 'context' is list, expected str"),
        ("multifieldqa_en", {"answers": {"a": 1}}, "field 'answers' is dict, expected str or list"),
        ("countries", {"prompt_B": None}, "field 'prompt_B' is NoneType, expected str"),
        ("tipsheets", {"options": "Ash"}, "field 'options' is str, expected list"),
        ("tipsheets", {"options": ["Ash", 2]}, "field 'options' is list, expected list of str"),
        ("tmath", {"socratic_questions": ["1"]}, "'socratic_questions' is list, expected str"),
        ("samsum", {"dialogue": ["Al: hi"]}, "field 'dialogue' is list, expected str"),
        ("mmlu", {"choices": ["a", "b"]}, "'choices' is list, expected 4 options, found 2"),
        ("mmlu", {"choices": "abcd"}, "field 'choices' is str, expected list"),
        ("mmlu", {"answer": 4}, "line 1: answer 4, expected 0 to 3"),
        ("mmlu", {"answer": -1}, "line 1: answer -1, expected 0 to 3"),
        ("mmlu", {"answer": "B"}, "field 'answer' is str, expected int"),
        ("mmlu", {"answer": True}, "field 'answer' is bool, expected int"),
        ("mmlu", {"subject": "cooking"}, "line 1: subject 'cooking' is none of the 57 of mmlu"),
    ],
)
def test_a_wrong_field_is_named(tmp_path, task, change, message):
    with pytest.raises(FormatError, match=message) as caught:
        TASKS[task].load(write(tmp_path, {**GOOD[task], **change}))
    assert "data.jsonl line 1" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("task", list(GOOD))
def test_every_task_has_its_message_texts(tmp_path, task):
    (example,) = TASKS[task].load(write(tmp_path, GOOD[task]))
    family = TASKS[task].family
    assert example.question in prompts.receiver_message(example.question, family)
    assert example.context in prompts.skyline_message(example.context, example.question, family)
