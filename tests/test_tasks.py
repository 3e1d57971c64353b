"""Data sets: the recorded items, HotpotQA and QASPER in every layout, broken files, folders, and
the shipped questions. The other data sets are in tests/tasks.
"""

import gzip
import json
import sys
from types import SimpleNamespace

import pytest

from kvcomm import metrics, prompts
from kvcomm.errors import FormatError, UnsupportedError
from kvcomm.tasks import SHIPPED, TASKS, find, qasper
from kvcomm.tasks.example import Example

HOTPOT = {
    "_id": "h1",
    "question": "Who built it?",
    "answer": "Ann",
    "supporting_facts": [["Ship", 1], ["Yard", 0], ["Ship", 9], ["Gone", 0]],
    "context": [
        ["Ship", ["A ship.", " Built at Yard."]],
        ["Yard", ["Ann's yard."]],
        ["Ship", ["Another.", " Also this."]],
    ],
}
HUB = {
    "id": "h1",
    "question": "Who built it?",
    "answer": "Ann",
    "supporting_facts": {"title": ["Ship", "Yard", "Ship", "Gone"], "sent_id": [1, 0, 9, 0]},
    "context": {
        "title": ["Ship", "Yard", "Ship"],
        "sentences": [["A ship.", " Built at Yard."], ["Ann's yard."], ["Another.", " Also this."]],
    },
}
GOLD = " Built at Yard.\n Also this.\nAnn's yard."
FULL = "Ship\nA ship. Built at Yard.\n\nYard\nAnn's yard.\n\nShip\nAnother. Also this."


def write(folder, text, name="data.jsonl"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


# ---- items as recorded


RECORDED = ("hotpotqa", "countries", "tipsheets", "musique", "qasper", "tmath")


@pytest.mark.parametrize("name", ["oracle_smollm2", "oracle_qwen05"])
@pytest.mark.parametrize("task", RECORDED)
def test_items_equal_the_recorded_ones(shared, name, task):
    recorded = json.loads((shared / "reference" / f"{name}.json").read_text())["items"][task]
    examples = TASKS[task].load(shared.parent / recorded["file"])
    family = TASKS[task].family
    assert TASKS[task].max_new_tokens == recorded["max_new_tokens"]
    for item in recorded["items"]:
        example = examples[item["record_index"]]
        gold = [item["gold"]] if isinstance(item["gold"], str) else item["gold"]
        assert example.index == item["record_index"]
        assert (example.question, example.answers) == (item["question"], tuple(gold))
        assert prompts.receiver_message(example.question, family) in item["receiver"]["text"]
        sender = prompts.sender_message(example.context, family)
        if task == "qasper":  # recorded after its middle was cut out
            head, tail = item["sender"]["text"].split("user\n", 1)[1], item["sender"]["text"]
            assert head[:500] == sender[:500]
            assert sender[-500:] in tail
        else:
            assert sender in item["sender"]["text"]
            skyline = prompts.skyline_message(example.context, example.question, family)
            assert skyline in item["skyline"]["text"]


@pytest.mark.parametrize("name", ["oracle_smollm2", "oracle_qwen05"])
def test_the_two_senders_read_what_was_recorded(shared, name):
    recorded = json.loads((shared / "reference" / f"{name}.json").read_text())["two_senders"]
    examples = TASKS["hotpotqa"].load(shared / "data" / "hotpotqa" / "dev_distractor_100.jsonl")
    assert recorded["items"]
    for item in recorded["items"]:
        parts = examples[item["record_index"]].split("split")
        for part, sender in zip(parts, ("sender1", "sender2"), strict=True):
            assert prompts.sender_message(part) in item[sender]["text"]


def test_limits_equal_the_published_ones(shared):
    published = json.loads((shared / "reference" / "prompts.json").read_text())
    limits = published["limits"]
    for name, task in TASKS.items():
        if name == "mmlu":  # no limit of its own is published
            continue
        assert task.max_new_tokens == limits["max_new_tokens"][name]
        assert task.truncates == (name in limits["truncated_tasks"])
        assert name in published["families"][task.family]["tasks"]


def test_every_metric_is_one_there_is():
    assert {task.metric for task in TASKS.values()} <= set(metrics.NAMES)
    closed = [name for name, task in TASKS.items() if task.closed]
    assert closed == ["hotpotqa", "2wikimqa"]  # whose scripts have the rule for yes and no
    assert [name for name, task in TASKS.items() if not task.needs_context] == ["mmlu"]


@pytest.mark.parametrize(
    ("task", "file", "n"),
    [
        ("hotpotqa", "hotpotqa/dev_distractor_100.jsonl", 100),
        ("hotpotqa", "hotpotqa/train_distractor_100.jsonl", 100),
        ("hotpotqa", "hotpotqa/longbench_mini_hotpotqa.jsonl", 13),
        ("qasper", "qasper/hf_train_10_papers.jsonl", 51),
        ("qasper", "qasper/leval_scientific_qa.jsonl", 184),
        ("qasper", "qasper/longbench_mini_qasper.jsonl", 9),
        ("countries", "countries/countries.jsonl", 200),
        ("musique", "musique/musique_ans_dev_100.jsonl", 100),
        ("musique", "musique/musique_ans_train_100.jsonl", 100),
        ("musique", "musique/longbench_mini_musique.jsonl", 7),
        ("2wikimqa", "2wikimultihopqa/dev_80.jsonl", 80),
        ("2wikimqa", "2wikimultihopqa/longbench_mini_2wikimqa.jsonl", 13),
        ("multifieldqa_en", "multifieldqa_en/longbench_mini_multifieldqa_en.jsonl", 7),
        ("tipsheets", "tipsheets/tipsheets.jsonl", 500),
        ("tmath", "tmath/tmath.jsonl", 300),
    ],
)
def test_every_file_loads_whole(shared, task, file, n):
    examples = TASKS[task].load(shared / "data" / file)
    assert len(examples) == n
    assert all(e.question and e.context and e.answers for e in examples)
    assert all(
        e.preamble + e.joint.join(e.pieces) == e.context for e in examples if e.pieces
    )  # what several senders read together is what one reads
    assert [e.index for e in examples] == list(range(n))
    assert len({e.id for e in examples}) == n


# ---- layouts of hotpotqa


@pytest.mark.parametrize("record", [HOTPOT, HUB], ids=["original", "hub"])
@pytest.mark.parametrize("form", ["array", "indented", "lines", "gzip", "mark", "object"])
def test_hotpotqa_is_the_same_in_every_form(tmp_path, record, form):
    text = {
        "array": json.dumps([record]),
        "indented": json.dumps([record], indent=1),
        "lines": "\n" + lines(record) + " \n",
        "gzip": gzip.compress(json.dumps([record]).encode()),
        "mark": b"\xef\xbb\xbf" + json.dumps([record]).encode(),
        "object": json.dumps(record, indent=2),
    }[form]
    path = write(tmp_path, text, "data.json.gz" if form == "gzip" else "data.json")
    task = TASKS["hotpotqa"]
    lines_of = tuple(GOLD.split("\n"))
    assert task.load(path) == [Example("h1", 0, GOLD, "Who built it?", ("Ann",), lines_of)]
    full = task.load(path, "full")[0]
    assert full.context == FULL
    assert full.split("documents") == tuple(FULL.split("\n\n"))
    assert full.split("split") == (FULL.split("\n\n")[0], FULL.split("\n\n", 1)[1])


def test_longbench_text_is_the_whole_context(tmp_path):
    path = write(tmp_path, lines({"input": "q?", "context": "text", "answers": ["a", "b"]}))
    expected = Example("0", 0, "text", "q?", ("a", "b"), marked=False)
    for context in (None, "full"):
        assert TASKS["hotpotqa"].load(path, context) == [expected]


def test_parquet_needs_pyarrow_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UnsupportedError, match="pip install pyarrow"):
        TASKS["hotpotqa"].load(write(tmp_path, b"PAR1", "data.parquet"))


def made_pyarrow(monkeypatch, read_table):
    made = SimpleNamespace(parquet=SimpleNamespace(read_table=read_table))
    monkeypatch.setitem(sys.modules, "pyarrow", made)


def test_rows_of_parquet(tmp_path, monkeypatch):
    table = SimpleNamespace(to_pylist=lambda: [HUB, {**HUB, "id": "h2"}])
    made_pyarrow(monkeypatch, lambda path: table)
    examples = TASKS["hotpotqa"].load(write(tmp_path, b"PAR1", "data.parquet"))
    assert [(e.id, e.context) for e in examples] == [("h1", GOLD), ("h2", GOLD)]


def test_a_damaged_parquet_file_is_named(tmp_path, monkeypatch):
    def refuse(path):
        raise ValueError("magic bytes not found\nin footer")

    made_pyarrow(monkeypatch, refuse)
    path = write(tmp_path, b"PAR1", "data.parquet")
    with pytest.raises(FormatError, match=f"{path}: damaged parquet file, magic bytes not found$"):
        TASKS["hotpotqa"].load(path)


@pytest.mark.parametrize("answer", [None, "", "missing"])
def test_a_missing_answer_leaves_nothing_to_score(tmp_path, answer):
    record = {**HOTPOT, "answer": answer}
    if answer == "missing":
        del record["answer"]
    (example,) = TASKS["hotpotqa"].load(write(tmp_path, lines(record)))
    assert example.answers == ()
    assert example.question == "Who built it?"


def test_text_may_hold_unusual_line_breaks(tmp_path):
    record = {**HOTPOT, "question": "a\u2028b\u0085c\x0cd"}
    path = write(tmp_path, json.dumps(record, ensure_ascii=False) + "\r\n")
    assert TASKS["hotpotqa"].load(path)[0].question == "a\u2028b\u0085c\x0cd"


# ---- files that are not right


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (lines(HOTPOT) + '{"_id": "h2", "ques', "line 2: not JSON"),
        (lines(HOTPOT) + "{}{}\n", "line 2: not JSON"),
        (lines(HOTPOT) + "\x00\x00\n", "line 2: not JSON"),
        ('[{"a": 1},\n{"b": }]', "line 2: not JSON"),
        ('{"a\n', "line 1: not JSON"),
        (b'{"a": "\xff"}\n', "line 1: not UTF-8, byte 7"),
        (gzip.compress(b"[]" * 50)[:-9], "damaged gzip"),
        ("[1]", "record 0: int, expected an object"),
        ("7\n", "line 1: int, expected an object"),
        ("", "no question, expected at least one"),
        ("[]", "no question, expected at least one"),
        (lines(HOTPOT, HOTPOT), "line 2: id 'h1' occurs twice"),
    ],
)
def test_a_broken_file_names_its_place(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(FormatError, match=message) as caught:
        TASKS["hotpotqa"].load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question": None}, "field 'question' is NoneType, expected str"),
        ({"question": 3}, "field 'question' is int, expected str"),
        ({"context": 3}, "field 'context' is int, expected list or dict"),
        ({"context": [["a"]]}, "field 'context' is list, expected a list of pairs"),
        ({"context": [["a", "text"]]}, "field 'context' is str, expected lists of sentences"),
        ({"context": {"title": ["a"]}}, "field 'sentences' is missing"),
        ({"context": [[1, ["text"]]]}, "field 'context' is int, expected titles"),
        ({"supporting_facts": [["Ship", True]]}, "field 'supporting_facts' is bool"),
        ({"answer": 0}, "field 'answer' is int, expected str or list of str"),
        ({"context": {"title": ["a"], "sentences": []}}, "as many sentences as title, 1"),
        ({"supporting_facts": [["Ship", "1"]]}, "field 'supporting_facts' is str"),
        ({"answer": 3}, "field 'answer' is int, expected str or list of str"),
    ],
)
def test_a_wrong_field_is_named(tmp_path, change, message):
    with pytest.raises(FormatError, match=message):
        TASKS["hotpotqa"].load(write(tmp_path, lines({**HOTPOT, **change})))


def test_a_missing_field_is_named(tmp_path):
    record = {key: HOTPOT[key] for key in ("_id", "question", "context")}
    with pytest.raises(FormatError, match="line 1: field 'supporting_facts' is missing, found _id"):
        TASKS["hotpotqa"].load(write(tmp_path, lines(record)))
    with pytest.raises(FormatError, match="field 'prompt_A' is missing, found x"):
        TASKS["countries"].load(write(tmp_path, lines({"x": 1})))


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        TASKS["hotpotqa"].load(tmp_path / "nothing.json")
    with pytest.raises(FileNotFoundError, match="no file of hotpotqa, expected one of hotpotqa/"):
        TASKS["hotpotqa"].load(tmp_path)
    with pytest.raises(NotADirectoryError, match="nothing: no such folder"):
        TASKS["hotpotqa"].find_files(tmp_path / "nothing")


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match="task: 'trivia', expected one of hotpotqa, qasper"):
        find("trivia")
    with pytest.raises(ValueError, match="context: 'gold', qasper has full"):
        TASKS["qasper"].load(tmp_path, "gold")
    assert find("qasper") is qasper.TASK


# ---- several senders


def test_pieces_are_dealt_out_to_senders():
    example = Example("x", 0, "Head.\na|b|c", "q", ("a",), ("a", "b", "c"), "Head.\n", "|")
    assert example.split("split") == ("Head.\na", "Head.\nb|c")
    assert example.split("documents") == ("Head.\na", "Head.\nb", "Head.\nc")
    for pieces in ((), ("a",)):
        few = Example("x", 0, "a", "q", ("a",), pieces)
        message = f"record 'x': {len(pieces)} pieces of context, expected at least 2"
        with pytest.raises(ValueError, match=message):
            few.split("documents")
    with pytest.raises(ValueError, match="senders: 'one', expected split or documents"):
        example.split("one")


# ---- folders and several files


@pytest.mark.parametrize(
    ("task", "files"),
    [
        ("hotpotqa", ["hotpotqa/dev_distractor_100.jsonl"]),
        (
            "qasper",
            [
                "qasper/hf_train_10_papers.jsonl",
                "qasper/leval_scientific_qa.jsonl",
                "qasper/longbench_mini_qasper.jsonl",
            ],
        ),
        ("musique", ["musique/musique_ans_dev_100.jsonl"]),
        (
            "2wikimqa",
            ["2wikimultihopqa/dev_80.jsonl", "2wikimultihopqa/longbench_mini_2wikimqa.jsonl"],
        ),
        ("multifieldqa_en", ["multifieldqa_en/longbench_mini_multifieldqa_en.jsonl"]),
        ("countries", ["countries/countries.jsonl"]),
        ("tipsheets", ["tipsheets/tipsheets.jsonl"]),
        ("tmath", ["tmath/tmath.jsonl"]),
    ],
)
def test_files_of_the_data_folder(shared, task, files):
    folder = shared / "data"
    assert TASKS[task].find_files(folder) == tuple(folder / file for file in files)


@pytest.mark.parametrize("task", list(TASKS))
def test_files_of_a_plain_folder(tmp_path, task):
    for name in TASKS:  # LongBench-E's shorter copies lie beside
        write(tmp_path, "x", f"{name}.jsonl")
        write(tmp_path, "x", f"{name}_e.jsonl")
    assert TASKS[task].find_files(tmp_path) == (tmp_path / f"{task}.jsonl",)


@pytest.mark.parametrize("task", ["hotpotqa", "musique", "2wikimqa", "samsum", "mmlu"])
def test_a_train_file_is_passed_over(tmp_path, task):
    folder = {"2wikimqa": "2wikimultihopqa"}.get(task, task)
    names = {"hotpotqa": "hotpot_dev_distractor_v1.json", "musique": "musique_ans_v1.0_dev.jsonl"}
    wanted = names.get(task, {"2wikimqa": "dev.json"}.get(task, "test.json"))
    (tmp_path / folder).mkdir()
    for name in ("train.json", "musique_ans_v1.0_train.jsonl", ".dev.json", wanted):
        write(tmp_path / folder, "x", name)
    assert TASKS[task].find_files(tmp_path) == (tmp_path / folder / wanted,)


def test_records_of_several_files_stand_one_after_the_other(tmp_path):
    one = write(tmp_path, lines(HOTPOT), "one.jsonl")
    two = write(tmp_path, lines({**HOTPOT, "question": "Where?"}), "two.jsonl")
    examples = TASKS["hotpotqa"].load([one, two])
    assert [(e.id, e.index, e.question) for e in examples] == [
        ("one:h1", 0, "Who built it?"),
        ("two:h1", 1, "Where?"),
    ]
    (tmp_path / "sub").mkdir()
    same = write(tmp_path / "sub", lines(HOTPOT), "one.jsonl")
    ids = [example.id for example in TASKS["hotpotqa"].load([one, same])]
    assert ids == [f"{one}:h1", f"{same}:h1"]
    empty = write(tmp_path, "", "empty.jsonl")
    with pytest.raises(FormatError, match=f"{empty}: no question, expected at least one"):
        TASKS["hotpotqa"].load([one, empty])


def test_a_folder_is_read_whole(shared):
    examples = TASKS["2wikimqa"].load(shared / "data")
    assert len(examples) == 93
    assert len({example.id for example in examples}) == 93
    assert [example.index for example in examples] == list(range(93))


# ---- qasper


def annotation(**given):
    blank = {"unanswerable": False, "extractive_spans": [], "free_form_answer": "", "yes_no": None}
    return {"answer": {**blank, **given}}


ANSWERS = [
    annotation(unanswerable=True),
    annotation(extractive_spans=["x1", "y2"]),
    annotation(yes_no=False),
    annotation(),
    annotation(free_form_answer="words"),
    annotation(yes_no=True),
    annotation(unanswerable=True, extractive_spans=["ignored"]),
]
REFERENCES = ("Unanswerable", "x1, y2", "No", "words", "Yes")
PAPER = {
    "title": "T",
    "abstract": "Abs.",
    "full_text": [
        {"section_name": "Intro", "paragraphs": ["One.", "Two."]},
        {"section_name": None, "paragraphs": ["Three."]},
    ],
    "qas": [{"question": "Q1", "question_id": "q1", "answers": ANSWERS}],
}
HUB_PAPER = {
    "id": "p1",
    "title": "T",
    "abstract": "Abs.",
    "full_text": {"section_name": ["Intro", None], "paragraphs": [["One.", "Two."], ["Three."]]},
    "qas": {
        "question": ["Q1"],
        "question_id": ["q1"],
        "answers": [{"answer": [entry["answer"] for entry in ANSWERS], "worker_id": ["w"] * 7}],
    },
}


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"p1": PAPER}),
        json.dumps({"p1": PAPER}, indent=2),
        lines(PAPER),
        lines(HUB_PAPER),
    ],
    ids=["original", "indented", "paper a line", "hub"],
)
def test_qasper_papers(tmp_path, text):
    (example,) = TASKS["qasper"].load(write(tmp_path, text))
    assert example == Example("q1", 0, "T\n\nAbs.\n\nIntro\nOne.\nTwo.\n\nThree.", "Q1", REFERENCES)


def test_qasper_scrolls(tmp_path):
    record = {"id": "s", "pid": "s_0", "input": "Q?\n\nTitle\n\nText. ", "output": "A"}
    (example,) = TASKS["qasper"].load(write(tmp_path, lines(record)))
    assert example == Example("s_0", 0, "Title\n\nText.", "Q?", ("A",))
    with pytest.raises(FormatError, match="field 'input' has no blank line"):
        TASKS["qasper"].load(write(tmp_path, lines({**record, "input": "Q? Text"})))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"title": 3}, "field 'title' is int, expected str"),
        ({"full_text": "text"}, "field 'full_text' is str, expected list or dict"),
        ({"full_text": [{"paragraphs": ["a", 1]}]}, r"full_text\[0\]: field 'paragraphs' is list"),
        ({"full_text": {"section_name": ["a"], "paragraphs": []}}, "expected lists of one length"),
        ({"qas": [{"question": "q", "answers": [{"answer": 1}]}]}, "field 'answer' is int"),
        (
            {"qas": [{"question": "q", "answers": [annotation(extractive_spans=[1])]}]},
            "field 'extractive_spans' is list, expected list of str",
        ),
        (
            {"qas": [{"question": "q", "answers": [annotation(free_form_answer=1)]}]},
            "field 'free_form_answer' is int, expected str",
        ),
        (
            {"qas": [{"question": "q", "answers": [annotation(yes_no="no")]}]},
            "field 'yes_no' is str, expected bool",
        ),
    ],
)
def test_a_wrong_field_of_a_paper_is_named(tmp_path, change, message):
    with pytest.raises(FormatError, match=message):
        TASKS["qasper"].load(write(tmp_path, lines({**PAPER, **change})))


def test_qasper_unknown_layouts_are_named(tmp_path):
    with pytest.raises(FormatError, match="unknown layout with fields a, b, expected one of qas"):
        TASKS["qasper"].load(write(tmp_path, lines({"a": 1, "b": 2})))
    record = {"instructions": ["a", "b"], "outputs": ["x"], "input": "t"}
    with pytest.raises(FormatError, match="2 answers, found 1"):
        TASKS["qasper"].load(write(tmp_path, lines(record)))


# ---- the questions that are shipped


def test_shipped_questions_are_two_hop_records():
    records = json.loads(SHIPPED.read_text("utf-8"))
    assert len(records) == 48
    assert len({r["_id"] for r in records}) == len({r["question"] for r in records}) == 48
    for record in records:
        paragraphs = dict(map(tuple, record["context"]))
        assert 6 <= len(paragraphs) == len(record["context"]) <= 10
        assert record["type"] in ("bridge", "comparison")
        assert record["level"]
        facts = [paragraphs[title][place] for title, place in record["supporting_facts"]]
        assert len({title for title, _ in record["supporting_facts"]}) == 2
        assert all(14 <= len(fact.split()) <= 30 for fact in facts), record["question"]
        assert 1 <= len(record["answer"].split()) <= 4
        if record["answer"] not in ("yes", "no"):
            assert record["answer"] in " ".join(facts), record["question"]
        if record["type"] == "bridge":  # the second hop holds the answer, the first does not
            assert record["answer"] in facts[1]
            assert record["answer"] not in facts[0]
            assert record["answer"].lower() not in record["question"].lower()
    answers = {r["answer"] for r in records if r["type"] == "comparison"}
    assert {"yes", "no"} < answers


def test_shipped_questions_load():
    examples = TASKS["hotpotqa"].load(SHIPPED)
    first = examples[0]
    assert first.question == "In which year was the founder of the Marrow Lane Bakery born?"
    assert first.answers == ("1871",)
    assert first.context.splitlines()[0].startswith("The Marrow Lane Bakery in Tilsbury")
    assert len(first.context.splitlines()) == 2
