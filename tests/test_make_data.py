"""Made records: the same bytes for the same seed, no two alike, answers that the text gives."""

import json
import os
import subprocess
import sys

import pytest

from kvcomm.commands import make_data
from kvcomm.tasks import TASKS, places, tips
from kvcomm.tasks.make import KINDS, generate


def records(task, n=500, seed=1):
    return [json.loads(line) for line in generate(task, n, seed).decode().splitlines()]


def arguments(*words):
    import argparse

    parser = argparse.ArgumentParser()
    make_data.add_options(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize("task", list(KINDS))
def test_the_seed_decides_every_byte(task):
    assert generate(task, 200, 7) == generate(task, 200, 7)
    assert generate(task, 200, 7) != generate(task, 200, 8)
    more = [record["prompt_A"] for record in records(task, 300, 7)]
    assert more[:200] == [record["prompt_A"] for record in records(task, 200, 7)]


@pytest.mark.parametrize("task", list(KINDS))
def test_another_process_makes_the_same_bytes(task):
    code = (
        "import sys; from kvcomm.tasks.make import generate;"
        f"sys.stdout.buffer.write(generate({task!r}, 50, 3))"
    )
    made = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True,
        env={**os.environ, "PYTHONHASHSEED": "12345"},
    )  # fmt: skip
    assert made.stdout == generate(task, 50, 3)


@pytest.mark.parametrize("task", list(KINDS))
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_500_records_are_distinct(task, seed):
    made = records(task, 500, seed)
    assert len(made) == len({one["id"] for one in made}) == 500
    assert len({one["prompt_A"] for one in made}) == 500


@pytest.mark.parametrize("task", list(KINDS))
def test_the_task_reads_what_is_made(tmp_path, task):
    path = tmp_path / f"{task}.jsonl"
    path.write_bytes(generate(task, 20, 1))
    examples = TASKS[task].load(tmp_path)
    assert len(examples) == 20
    assert all(one.context and one.question and len(one.answers) == 1 for one in examples)


def test_countries_say_where_a_real_landmark_stands():
    where = {
        name.removeprefix("the "): country
        for country, names in places.LANDMARKS.items()
        for name in names
    }
    assert len(where) == sum(map(len, places.LANDMARKS.values()))  # no landmark twice
    assert where["Eiffel Tower"] == "France"
    assert where["Machu Picchu"] == "Peru"
    made = records("countries")
    for one in made:
        assert one["country"] == one["y"] == where[one["landmark"]]
        assert one["landmark"] in one["prompt_A"]
        assert one["prompt_A"].startswith(one["person"])
        assert one["person"] in one["prompt_B"]
        assert one["country"] not in one["prompt_A"]
    # Every landmark comes once before any comes again.
    assert len({one["landmark"] for one in made[: len(where)]}) == len(where)


def test_tipsheets_have_one_company_on_its_way_up():
    for one in records("tipsheets"):
        options = one["options"]
        assert 3 <= len(options) == len(set(options)) <= 4
        notes = dict(zip(options, one["prompt_A"].removesuffix(".").split(". "), strict=True))
        for name, note in notes.items():
            headings = tips.HEADINGS[one["attitudes"][name]]
            assert any(note.startswith(f"{name} {heading}") for heading in headings), note
        up = [name for name in options if one["attitudes"][name] == "positive"]
        assert up == [one["label"]]
        assert "negative" in one["attitudes"].values()
        assert all(name in one["prompt_B"] for name in options)
        assert one["prompt_B"].endswith("The company name is:")


def test_the_best_company_stands_in_every_place():
    found = [one["options"].index(one["label"]) for one in records("tipsheets")]
    assert set(found) == {0, 1, 2, 3}
    assert max(map(found.count, (0, 1, 2))) < 250  # no place to guess at


@pytest.mark.parametrize(
    ("task", "n", "seed", "message"),
    [
        ("hotpotqa", 1, 1, "task: 'hotpotqa' is not made here, expected countries or tipsheets"),
        ("countries", 0, 1, rf"records: 0 is outside 1 \.\. {places.MOST}, the most that countr"),
        ("countries", -1, 1, "records: -1 is outside 1"),
        ("countries", places.MOST + 1, 1, f"records: {places.MOST + 1} is outside"),
        ("tipsheets", tips.MOST + 1, 1, f"records: {tips.MOST + 1} is outside"),
        ("tipsheets", 1, -1, "seed: -1, expected 0 or more"),
    ],
)
def test_what_cannot_be_made(task, n, seed, message):
    with pytest.raises(ValueError, match=message):
        generate(task, n, seed)


def test_every_landmark_person_and_sentence_can_be_used_up():
    made = {one["prompt_A"] for one in records("countries", places.MOST)}
    assert len(made) == places.MOST


def test_the_command_writes_the_file(tmp_path, capsys):
    out = tmp_path / "made.jsonl"
    given = ("--task", "countries", "--records", "3", "--seed", "5", "--out", str(out))
    assert make_data.run(arguments(*given)) == 0
    assert out.read_bytes() == generate("countries", 3, 5)
    assert capsys.readouterr().out == f"3 records of countries written to {out}\n"


def test_a_bad_number_leaves_the_file_alone(tmp_path):
    out = tmp_path / "made.jsonl"
    out.write_text("mine")
    with pytest.raises(ValueError, match="records: 0"):
        make_data.run(arguments("--task", "countries", "--records", "0", "--out", str(out)))
    assert out.read_text() == "mine"
    assert os.listdir(tmp_path) == ["made.jsonl"]
