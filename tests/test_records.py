"""Strict JSON, and the objects of a log that was damaged."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvcomm.records import dumps, parse


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
    ("data", "ids", "n_damaged"),
    [
        (b"", [], 0),
        (b'{"id": 1}\n{"id": 2}\n', [1, 2], 0),
        (b'{"id": 1}\n{"id": 2}', [1, 2], 0),
        (b'{"id": 1}\n{"id": 2', [1], 1),
        (b'{"id": 1}{"id": 2}\n{"id": 3}\n', [1, 2, 3], 1),
        (b'{"id": 1}\n\0\0\0\n', [1], 1),
        (b'{"id": 1}\n"text"\n{"id": Infinity}\n\xff\xfe\n{"id": 2}\n', [1, 2], 3),
    ],
)
def test_whole_objects_of_a_log_are_kept(data: bytes, ids: list[int], n_damaged: int) -> None:
    records, found = parse(data)
    assert [record["id"] for record in records] == ids
    assert found == n_damaged
