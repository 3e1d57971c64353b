"""Ids of the hub, with a library and a hub that stand in for the real ones; no network is used."""

import sys
import time
from types import SimpleNamespace

import pytest
from huggingface_hub.utils import RepositoryNotFoundError

from kvcomm.errors import FormatError, UnsupportedError
from kvcomm.tasks import TASKS, hub
from kvcomm.tasks.hub import Dataset

ROW = {"input": "q?", "context": "text", "answers": ["a"]}


@pytest.mark.parametrize(
    ("text", "dataset"),
    [
        ("org/name", Dataset("org/name")),
        ("org/name:config", Dataset("org/name", "config")),
        ("org-1/na.me_2:a-b:test", Dataset("org-1/na.me_2", "a-b", "test")),
        ("name", None),
        ("a/b/c", None),
        ("org/name:a:b:c", None),
        ("org/data.jsonl", None),
        ("org/data.json.gz", None),
        ("./name", None),
        ("../name", None),
        ("~/name", None),
        ("/org/name", None),
        ("org/na me", None),
        ("", None),
    ],
)
def test_ids(text, dataset):
    assert Dataset.of(text) == dataset


@pytest.fixture
def online(monkeypatch):
    """A hub that knows org/name, with the splits and rows of a made library."""
    calls = []

    def load_dataset(name, config, *, split):
        calls.append((name, config, split))
        if split == "nowhere":
            raise ValueError("Unknown split 'nowhere'.\nShould be one of ['test'].")
        if config == "script":
            raise RuntimeError("Dataset scripts are no longer supported, but found name.py")
        return [ROW, {**ROW, "input": "r?"}]

    made = SimpleNamespace(
        load_dataset=load_dataset,
        get_dataset_split_names=lambda name, config: {
            None: ["train", "test"], "valid": ["train", "validation"], "only": ["train"],
            "script": ["test"],
        }[config],
        calls=calls,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "datasets", made)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda self, name, timeout: None)
    return made


def test_rows_of_the_hub(online):
    examples = TASKS["multifieldqa_en"].load("org/name:valid:test")
    assert [(e.id, e.question, e.answers) for e in examples] == [
        ("0", "q?", ("a",)),
        ("1", "r?", ("a",)),
    ]
    assert online.calls == [("org/name", "valid", "test")]


@pytest.mark.parametrize(
    ("text", "split"), [("org/name", "test"), ("org/name:valid", "validation")]
)
def test_the_split_that_is_taken_by_itself(online, text, split):
    TASKS["multifieldqa_en"].load(text)
    assert online.calls[0][2] == split


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (
            "org/name:only",
            FormatError,
            "org/name: no split named test, validation, dev, found train; name one after the conf",
        ),
        (
            "org/name:valid:nowhere",
            FormatError,
            r"org/name: Unknown split 'nowhere'\. Should be one of \['test'\]\.",
        ),
        ("org/name:script", UnsupportedError, "org/name: Dataset scripts are no longer supported"),
    ],
)
def test_what_the_library_refuses_is_told_in_one_line(online, text, kind, message):
    with pytest.raises(kind, match=message) as caught:
        TASKS["multifieldqa_en"].load(text)
    assert "\n" not in str(caught.value)


def test_a_wrong_field_of_the_hub_has_a_place(online):
    with pytest.raises(FormatError, match="org/name test record 0: field 'prompt_A' is missing"):
        TASKS["countries"].load("org/name")


def test_a_local_path_comes_first(online, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name").write_text('{"input": "l?", "context": "c", "answers": ["a"]}')
    (example,) = TASKS["multifieldqa_en"].load("org/name")
    assert example.question == "l?"
    assert online.calls == []


def test_without_the_library_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UnsupportedError) as caught:
        TASKS["samsum"].load("org/name")
    assert str(caught.value) == (
        "org/name: no such file; reading it from the hub needs datasets, install it with: "
        "pip install datasets"
    )


def test_a_hub_that_does_not_answer_is_given_up(online, monkeypatch):
    monkeypatch.setattr(hub, "SECONDS", 0.1)
    monkeypatch.setattr(
        "huggingface_hub.HfApi.dataset_info", lambda self, name, timeout: time.sleep(5)
    )
    began = time.perf_counter()
    with pytest.raises(OSError, match="cannot be reached") as caught:
        TASKS["samsum"].load("org/name")
    assert time.perf_counter() - began < 3
    assert str(caught.value) == (
        "org/name: no such file, and the hub cannot be reached (no answer within 0.1 s); give a "
        "local file such as samsum.jsonl"
    )
    assert online.calls == []


def test_a_hub_that_cannot_be_reached(online, monkeypatch):
    def refuse(self, name, timeout):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", refuse)
    with pytest.raises(OSError, match=r"cannot be reached \(no route to host\)"):
        TASKS["samsum"].load("org/name")


def test_a_set_that_the_hub_does_not_know(online, monkeypatch):
    def refuse(self, name, timeout):
        raise RepositoryNotFoundError.__new__(RepositoryNotFoundError)

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", refuse)
    with pytest.raises(FileNotFoundError, match="no such file, and no such data set on the hub"):
        TASKS["samsum"].load("org/name")


def test_told_to_be_offline_the_hub_is_not_asked(online, monkeypatch):
    def refuse(self, name, timeout):
        raise AssertionError("asked")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", refuse)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert len(TASKS["multifieldqa_en"].load("org/name")) == 2  # what the library has kept
