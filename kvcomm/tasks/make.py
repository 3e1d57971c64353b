"""Makes records of the kinds that need no data set: countries and tipsheets.

Owns the table of the kinds, the seeds and the form of the file. The same task, number and seed give
the same bytes. What the records say is in `places.py` and `tips.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from random import Random

from kvcomm.tasks import places, tips

Records = Callable[[int, Random], Iterator[dict[str, object]]]

#: Per task how its records are made and how many there can be.
KINDS: dict[str, tuple[Records, int]] = {
    "countries": (places.records, places.MOST),
    "tipsheets": (tips.records, tips.MOST),
}


def generate(task: str, n: int, seed: int) -> bytes:
    """A data file of n records, no two alike, as JSON Lines.

    Parameters
    ----------
    task : of `KINDS`
    n : at least 1
    seed : 0 or more

    Raises
    ------
    ValueError : a task that is not made here, or a number out of range
    """
    if task not in KINDS:
        raise ValueError(f"task: {task!r} is not made here, expected {' or '.join(KINDS)}")
    make, most = KINDS[task]
    if not 1 <= n <= most:
        raise ValueError(f"records: {n} is outside 1 .. {most}, the most that {task} has")
    if seed < 0:
        raise ValueError(f"seed: {seed}, expected 0 or more")
    # A seed of text does not depend on the version of Python, unlike hash().
    rng = Random(f"{task} {seed}")
    lines = [
        json.dumps({"id": f"{task}_{seed}_{number:05d}", **record}, ensure_ascii=False)
        for number, record in enumerate(make(n, rng))
    ]
    return "".join(line + "\n" for line in lines).encode()
