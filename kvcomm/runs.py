"""The folder of a run: its settings, and how a later start is held against them.

    DIR/run.json          settings, written first; a run with other settings is refused
    DIR/records.jsonl     one line per record and method, written the moment it is done
    DIR/calibration.json  the layer scores, when a method needs some
    DIR/search.json       layers that methods searched for, with what each search went by
    DIR/summary.json      written at the end

Owns these names, and reading a run back. The log's form is records.py's, a run's course
evaluate.py's.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvcomm.errors import FormatError
from kvcomm.records import RECORDS, Record, dumps, read_log, write_json
from kvcomm.selection import LayerScores
from kvcomm.summary import MEANS, SECONDS, row_key

RUN = "run.json"
SUMMARY = "summary.json"
CALIBRATION = "calibration.json"
SEARCH = "search.json"


def read_settings(folder: Path) -> dict[str, Any]:
    """What run.json holds; errors as for `read_run`."""
    return _read_json(folder / RUN)


def read_run(folder: Path) -> tuple[dict[str, Any], list[Record]]:
    """A run's settings, with its calibration, and the records of its log, in the data's order.

    In the log a failed record that was done again stands at the end. Intervals draw records by
    their place, and are not to depend on where a run was interrupted.

    Raises
    ------
    OSError
        There is no run in the folder.
    FormatError
        run.json or the log is damaged.
    """
    run = read_settings(folder)
    if run.get("calibrated") and (folder / CALIBRATION).exists():
        scores = LayerScores.load(folder / CALIBRATION)
        run["calibration"] = {
            "preset": scores.preset,
            "n_samples": scores.n_samples,
            "mass": scores.mass.tolist(),
            "head_mass": scores.sample_mass.mean(axis=0).tolist(),
        }
    return run, sorted(_read_records(folder / RECORDS), key=lambda record: record["index"])


_NUMBER: tuple[type, ...] = (int, float, type(None))
#: Fields of a line of the log that a summary needs, and what each holds, by the field around them.
_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "": {
        "id": (str,), "index": (int,), "method": (str,), "settings": (dict,), "gold": (list,),
        **dict.fromkeys(MEANS, _NUMBER), "seconds": (dict,),
    },
    "settings": {"layers": (list, type(None))},
    "seconds": dict.fromkeys(SECONDS, _NUMBER),
}  # fmt: skip


def _read_records(path: Path) -> list[Record]:
    records = read_log(path) if path.exists() else []
    seen: set[tuple[str, str]] = set()
    for number, record in enumerate(records, 1):
        _check_line(f"{path} record {number}", record)
        key = record["id"], row_key(record["method"], record["settings"])
        if key in seen:
            raise FormatError(
                f"{path} record {number}: {record['method']} has answered {record['id']!r} before; "
                "the run's command mends that"
            )
        seen.add(key)
    return records


def _check_line(place: str, record: Record) -> None:
    for part, fields in _FIELDS.items():
        where, inside = (f"{place}, {part}", record[part]) if part else (place, record)
        for name, kinds in fields.items():
            if name not in inside:
                raise FormatError(f"{where}: no field {name!r}")
            if not isinstance(inside[name], kinds):
                expected = " or ".join(kind.__name__ for kind in kinds)
                found = type(inside[name]).__name__
                raise FormatError(f"{where}: field {name!r} is {found}, expected {expected}")
    if not all(isinstance(text, str) for text in record["gold"]):
        raise FormatError(f"{place}: field 'gold' is not a list of str")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise FormatError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict) or "settings" not in value:
        raise FormatError(f"{path}: expected an object with settings")
    return value


def enter(folder: Path, run: Mapping[str, Any]) -> bool:
    """Write run.json; one that is there has to have the same settings. Returns whether one was.

    Raises
    ------
    ValueError
        Settings that differ, each with both values; or a log without run.json.
    """
    path = folder / RUN
    resumed = path.exists()
    if resumed:
        first, now = _read_json(path), json.loads(dumps(run))
        differing = [
            f"{name} was {_brief(old)}, is {_brief(new)}"
            for part in ("settings", "methods")
            for name, old, new in _differences(first.get(part), now[part], part)
        ]
        if differing:
            raise ValueError(
                f"{folder} holds a run with other settings: {'; '.join(differing)} "
                "(take another folder, or the same settings to go on)"
            )
        run = {**run, "environment": _continued(first.get("environment"), run["environment"])}
    elif (folder / RECORDS).exists():
        raise ValueError(f"{folder} holds {RECORDS} without {RUN}: take another folder")
    write_json(path, run)
    return resumed


def _continued(first: Any, now: Mapping[str, Any]) -> dict[str, Any]:
    """Where a run goes on, with where it was "earlier", if that differs: its times are of both."""
    if not isinstance(first, dict):
        return dict(now)
    earlier = first.pop("earlier", [])
    if any(first.get(name) != value for name, value in now.items() if name != "command"):
        earlier = [*earlier, first]
    return {**now, "earlier": earlier} if earlier else dict(now)


def kept(folder: Path, name: str, asked: Mapping[str, Any], find: Callable[[], Any]) -> Any:
    """What an earlier start of a run has found by a search, else what `find` gives, kept for later.

    Parameters
    ----------
    name
        Of the search, one in the run.
    asked
        All that the result depends on and run.json does not hold.
    find
        Does the work; its result is kept, and given back, as JSON holds it.

    Raises
    ------
    ValueError
        An earlier start went by something else, with each difference.
    FormatError
        search.json is damaged.
    """
    path = folder / SEARCH
    entries = _read_searches(path) if path.exists() else {}
    now = json.loads(dumps(asked))
    if name in entries:
        differing = [
            f"{field} was {_brief(old)}, is {_brief(new)}"
            for field, old, new in _differences(entries[name]["asked"], now, "")
        ]
        if differing:
            raise ValueError(
                f"{path}: {name!r} was searched on other records: {'; '.join(differing)} "
                "(take another folder, or the same records to go on)"
            )
    else:
        entries[name] = {"asked": now, "found": json.loads(dumps(find()))}
        write_json(path, entries)
    return entries[name]["found"]


def _read_searches(path: Path) -> dict[str, Any]:
    try:
        entries = json.loads(path.read_bytes())
    except ValueError as error:
        raise FormatError(f"{path}: not JSON: {error}") from None
    if not isinstance(entries, dict) or not all(
        isinstance(entry, dict) and {"asked", "found"} <= entry.keys() for entry in entries.values()
    ):
        raise FormatError(f"{path}: expected an object of searches, each with asked and found")
    return entries


def _differences(old: Any, new: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _differences(old.get(key), new.get(key), f"{name}.{key}")
    elif old != new:
        yield name.removeprefix("settings.").lstrip("."), old, new


def _brief(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(one, dict) and "label" in one for one in value):
        value = ", ".join(one["label"] for one in value)
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
