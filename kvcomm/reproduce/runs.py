"""Runs what a reproduction lacks, and gives back the records.

Owns the run folders below OUT/runs, one per task, pair, preset, number of records and group of
methods; the calibrations, which are shared between them; and how long each run took, also when it
was killed on the way. What a run does is evaluate.py's.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kvcomm import environment, selection, tasks, template
from kvcomm.agents import Receiver, Sender
from kvcomm.evaluate import described, evaluate
from kvcomm.layout import counted
from kvcomm.methods import Bench, Item
from kvcomm.model import Model
from kvcomm.plan import Prompts, TooFewError
from kvcomm.records import RECORDS, Record, dumps, write_json
from kvcomm.reproduce import data, paper
from kvcomm.reproduce.data import Data
from kvcomm.reproduce.exhibit import Exhibit
from kvcomm.reproduce.groups import Group
from kvcomm.reproduce.measures import Results
from kvcomm.reproduce.request import Request
from kvcomm.runs import read_run
from kvcomm.selection import LayerScores
from kvcomm.summary import row_key
from kvcomm.tasks import Example, Task

#: Seconds of a run so far, and when the part that may be going on began.
WALL = "wall.json"

#: The day that prompts tell.
DAY = "day.json"

Note = Callable[[str], None]


class NoDataError(ValueError):
    """There are no records that an exhibit could be made from."""


class Runs:
    """The runs of one reproduction.

    command: how to make them again, for their reports.

    Attributes
    ----------
    left_out : dict
        What was not run, with the reason, for the account.
    """

    def __init__(
        self, request: Request, command: Sequence[str] = (), note: Note = lambda line: None
    ) -> None:
        self.request = request
        self.command = tuple(command)
        self.left_out: dict[str, str] = {}
        self._note = note
        self._data: dict[str, Data | None] = {}
        self._scores: dict[Path, LayerScores] = {}

    @cached_property
    def day(self) -> date:
        """The day that all prompts tell which tell one: that of the first start."""
        path = self.request.out / "runs" / DAY
        if path.exists():
            return date.fromisoformat(json.loads(path.read_text("utf-8")))
        path.parent.mkdir(exist_ok=True)
        write_json(path, template.today().isoformat())
        return template.today()

    # ---- models and data -------------------------------------------------------------------

    @cached_property
    def agents(self) -> tuple[Sender, Receiver]:
        """The pair of models, loaded when first needed."""
        loaded = [
            Model.load(name, device=self.request.device, dtype=self.request.dtype)
            for name in dict.fromkeys(self.request.models)
        ]
        # The published code renders the sender's prompt with the receiver's tokenizer.
        tokenizer = loaded[-1].tokenizer if self.request.preset == "reference" else None
        return Sender(loaded[0], tokenizer=tokenizer), Receiver(loaded[-1])

    @cached_property
    def names(self) -> list[str]:
        """What the models are called, and their types."""
        types = [str(agent.model.config.raw.get("model_type")) for agent in self.agents]
        return [*self.request.models, *types]

    @property
    def alpha(self) -> float:
        """Weight of the attention against the Gaussian."""
        if self.request.alpha is not None:
            return self.request.alpha
        return selection.ALPHA[paper.family(self.names)] if self.request.preset == "paper" else 1.0

    @property
    def n_layers(self) -> int:
        """L, layers of the sender."""
        return self.agents[0].model.n_layers

    @property
    def pair(self) -> str:
        """The pair of models as part of a file's name."""
        names = [Path(name).name or "model" for name in dict.fromkeys(self.request.models)]
        return "-to-".join("".join(c if c.isalnum() or c in ".-" else "_" for c in n)
                           for n in names)  # fmt: skip

    def wanted(self, exhibit: Exhibit) -> tuple[str, ...]:
        """The tasks of an exhibit that are asked for, whether they have data or not.

        A figure can be made of any task that is asked for and has contexts, a table only of its
        columns.
        """
        asked, table = self.request.tasks, exhibit.name.startswith("table")
        if asked is None:
            return exhibit.tasks
        return tuple(
            name
            for name in asked
            if name in exhibit.tasks or (tasks.find(name).needs_context and not table)
        )

    def chosen(self, exhibit: Exhibit, ran: Sequence[Group] = ()) -> list[Data]:
        """The tasks of an exhibit that have data, and records for some groups; others are told.

        Raises
        ------
        NoDataError
            None has, or a table has none of the tasks that are asked for.
        """
        names = self.wanted(exhibit)
        if not names:
            asked = ", ".join(self.request.tasks or ())
            raise NoDataError(f"{exhibit.name} has none of the tasks {asked}")
        there = [one for one in map(self.data, names) if one is not None]
        found = [one for one in there if self._suffices(exhibit, one, ran)]
        if not found:
            what = "records enough" if there else f"data file below {self.request.data.name}"
            raise NoDataError(f"{exhibit.name}: no {what} for {', '.join(names)}")
        return found

    def _suffices(self, exhibit: Exhibit, found: Data, ran: Sequence[Group]) -> bool:
        try:
            for group in ran:
                _records(found, group).divided(group.n_calibration, group.keep)
        except TooFewError as error:
            self.leave_out(f"{exhibit.name} on {found.task.name}", str(error))
            return False
        return True

    def data(self, name: str) -> Data | None:
        """The records of a task; None, and a note, when there is no file, or too few are in it.

        Raises
        ------
        OSError, FormatError, ValueError
            As `data.read`.
        """
        if name not in self._data:
            task = tasks.find(name)
            published = self.request.preset == "reference"
            try:
                found = data.read(task, self.request.data, self.request.limit, published)
                why = "no data file"
            except TooFewError as error:
                found, why = None, str(error)
            if found is None:
                self.leave_out(name, why)
            self._data[name] = found
        return self._data[name]

    def leave_out(self, what: str, why: str) -> None:
        """Tell once what is not run."""
        if self.left_out.get(what) != why:
            self._note(f"{what}: not run, {why}")
            self.left_out[what] = why

    # ---- calibrations ----------------------------------------------------------------------

    def scores(self, found: Data, n: int = 1) -> LayerScores:
        """Layer scores over the first n records of a task's pool; measured once, and kept."""
        n = min(n, len(found.pool))
        name = found.task.name
        path = self._folder(found, f"calibration-{digest([self._origin, found.pool])}.json")
        if path not in self._scores and path.exists():
            self._scores[path] = LayerScores.load(path)
        have = self._scores.get(path)
        while have is None or have.n_samples < n:
            done = 0 if have is None else have.n_samples
            # Kept at each doubling, so that a kill costs half of the work at most.
            upto = min(n, max(1, 2 * done))
            self._note(f"{name}: calibrating on {counted(upto, 'record')}")
            with self._timed(path.with_suffix("")):
                more = self._measure(found, found.pool[done:upto])
                have = more if have is None else _joined(have, more)
                have.save(path)
        self._scores[path] = have
        return _first(have, n)

    @cached_property
    def _origin(self) -> list[str]:
        """All that a calibration depends on but its records."""
        version = environment.versions()["kvcomm"] or ""
        models = [repr(described(agent.model)) for agent in self.agents]
        return [*models, self.request.preset, version]

    def _measure(self, found: Data, examples: Sequence[Example]) -> LayerScores:
        sender, receiver = self.agents
        bench = self._bench(found.task)
        plan = replace(found.plan, calibration=tuple(examples))
        items = Prompts(bench, found.task, plan, None).calibration()
        return selection.calibrate(
            sender,
            receiver,
            [(item.sender, item.receiver) for item in items],
            preset=self.request.preset,
        )

    def items(self, found: Data) -> list[Item]:
        """The prompts of a task's scored records; no model runs."""
        prompts = Prompts(self._bench(found.task), found.task, found.plan, None)
        items = []
        for number, one in enumerate(found.plan.scored):
            # A record whose prompts cannot be written fails in a run too, and is counted there.
            with suppress(ValueError):
                items.append(prompts.item(number, one))
        return items

    def _bench(self, task: Task) -> Bench:
        sender, receiver = self.agents
        return Bench(
            sender, receiver, preset=self.request.preset, max_new_tokens=task.max_new_tokens
        )

    # ---- runs ------------------------------------------------------------------------------

    def results(self, found: Data, groups: Iterable[Group]) -> Results:
        """The records of some groups, each run if it has to be; all rows as one."""
        groups = list(groups)
        rows: dict[str, dict[str, Record]] = {}
        for group in groups:
            rows |= self._run(found, group)
        answered = all(group.answers for group in groups)
        files = found.sources(record for lines in rows.values() for record in lines)
        return Results(found.task, rows, found.task.metric if answered else None, files)

    def _run(self, found: Data, group: Group) -> dict[str, dict[str, Record]]:
        task, request = found.task, self.request
        found = _records(found, group)
        plan = found.divided(group.n_calibration, group.keep)
        calibrated = any(method.calibrated for method in group.methods.values())
        folder = self._folder(found, group.name)
        size = f"{counted(len(plan.scored), 'record')}, {counted(len(group.methods), 'method')}"
        self._note(f"{folder.name}: {size}")
        scores = self.scores(found, group.n_calibration) if calibrated else None
        with self._timed(folder):
            evaluate(
                *self.agents,
                task,
                plan,
                list(group.methods.values()),
                folder,
                preset=request.preset,
                scores=scores,
                max_new_tokens=None if group.answers else 0,
                # One limit for all groups, so that all of them read the same prompts.
                max_input_tokens=self._prompt_limit(found),
                batch_size=request.batch_size,
                about={"data": ", ".join(path.name for path in found.files)},
                command=self.command,
                progress=request.progress,
                note=self._note,
            )
        return _by_row(group.methods, read_run(folder)[1])

    def _prompt_limit(self, found: Data) -> int:
        return Prompts(self._bench(found.task), found.task, found.plan, None).limit

    def _folder(self, found: Data, name: str) -> Path:
        request = self.request
        size = "all" if request.limit is None else str(request.limit)
        runs = request.out / "runs"
        runs.mkdir(parents=True, exist_ok=True)
        return runs / f"{found.task.name}-{self.pair}-{request.preset}-{size}-{name}"

    @contextmanager
    def _timed(self, folder: Path) -> Iterator[None]:
        """Count the wall time of a run, over all its parts.

        A part that was killed is counted up to the last record that it wrote.
        """
        path = folder.with_name(f"{folder.name}.{WALL}")
        before: dict[str, Any] = {"seconds": 0.0}
        if path.exists():
            before = json.loads(path.read_text())
            log = folder / RECORDS
            if "began" in before and log.exists():
                before["seconds"] += max(0.0, log.stat().st_mtime - before["began"])
        began, size = time.time(), _size(folder)
        write_json(path, {"seconds": before["seconds"], "began": began})
        total = before["seconds"]
        try:
            yield
        finally:
            # Looking whether anything is missing is not a part of the run.
            if size is None or _size(folder) != size:
                total += time.time() - began
            write_json(path, {"seconds": total})


def _records(found: Data, group: Group) -> Data:
    """A task's records as a group divides them."""
    return found.apart() if group.unseen else found


def _joined(one: LayerScores, more: LayerScores) -> LayerScores:
    """One calibration over the samples of two."""
    first = None
    if one.sample_first is not None and more.sample_first is not None:
        first = np.concatenate([one.sample_first, more.sample_first])
    mass = np.concatenate([one.sample_mass, more.sample_mass])
    return replace(one, sample_mass=mass, sample_first=first)


def _first(scores: LayerScores, n: int) -> LayerScores:
    """The calibration over the first n samples of one."""
    first = None if scores.sample_first is None else scores.sample_first[:n]
    return replace(scores, sample_mass=scores.sample_mass[:n], sample_first=first)


def _size(folder: Path) -> int | None:
    """Of the log of a run."""
    log = folder / RECORDS
    return log.stat().st_size if log.exists() else None


def _by_row(methods: Mapping[str, Any], records: Sequence[Record]) -> dict[str, dict[str, Record]]:
    """Records by row and id; a row is known by its method's name and settings."""
    rows = {
        row_key(method.name, json.loads(dumps(method.settings))): row
        for row, method in methods.items()
    }
    found: dict[str, dict[str, Record]] = {row: {} for row in methods}
    for record in records:
        found[rows[row_key(record["method"], record["settings"])]][record["id"]] = record
    return found


def digest(value: Any) -> str:
    """Eight characters that tell values of other text apart, for names of folders."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]
