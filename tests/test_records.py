"""Strict JSON, and the objects of a log that was damaged."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvcomm.errors import FormatError
from kvcomm.records import dumps, parse, read_log


def test_json_is_strict() -> None:
    value = {
        "scalar": np.float32(0.5), "count": np.int64(3), "flag": np.bool_(True),
        "path": Path("a/b"), "array": np.array([1.0, np.inf]), "text": "\ud800 \u2028",
        "inner": {"nan": float("nan")},
    }  # fmt: skip
    text = dumps(value)
    assert text.isascii()
    assert "\n" not in text
    assert json.loads(text) == {
        "scalar": 0.5, "count": 3, "flag": True, "path": "a/b", "array": [1.0, None],
        "text": "\ud800 \u2028", "inner": {"nan": None},
        "notes": ["array[1] is inf", "inner.nan is nan"],
    }  # fmt: skip
    with pytest.raises(TypeError, match="inner.x: object has no JSON form"):
        dumps({"inner": {"x": object()}})


@pytest.mark.parametrize(
    ("data", "ids", "damaged"),
    [
        (b"", [], []),
        (b'{"id": 1}\n{"id": 2}\n', [1, 2], []),
        (b'{"id": 1}\n{"id": 2}', [1, 2], []),
        (b'{"id": 1}\n{"id": 2', [1], [2]),
        (b'{"id": 1}{"id": 2}\n{"id": 3}\n', [1, 2, 3], [1]),
        (b'{"id": 1}\n\0\0\0\n', [1], [2]),
        (b'{"id": 1}\n"text"\n{"id": Infinity}\n\xff\xfe\n{"id": 2}\n', [1, 2], [2, 3, 4]),
    ],
)
def test_whole_objects_of_a_log_are_kept(data: bytes, ids: list[int], damaged: list[int]) -> None:
    records, found = parse(data)
    assert [record["id"] for record in records] == ids
    assert found == damaged


def test_a_damaged_log_is_refused_with_the_record_s_number(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"id": 1}\n{"id": 2}\n')
    assert read_log(path) == [{"id": 1}, {"id": 2}]
    path.write_bytes(b'{"id": 1}\n{"id": \n{"id": 3}\n')
    with pytest.raises(FormatError, match=r"jsonl record 2: damaged, the run's command mends it$"):
        read_log(path)
    path.write_bytes(b'x\n{"id": 2}\ny\nz\n')
    with pytest.raises(FormatError, match="record 1 and 2 more: damaged, .* mends them$"):
        read_log(path)
