"""The harness: records through methods, in batches, into a log that a later run can go on from.

Owns a run's course: what is checked before anything is written, that each context is read once,
what a line of the log holds, and that one record's failure is counted and does not end the run.
Which records and prompts there are says plan.py; methods answer (methods/), metrics.py judges,
summary.py counts.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from kvcomm import environment, metrics, selection
from kvcomm.agents import Receiver, Sender
from kvcomm.methods import Bench, Item, Method, Outcome
from kvcomm.model import Model
from kvcomm.packet import Preset, check_layer_map, check_preset
from kvcomm.plan import Plan, Prompts
from kvcomm.records import Log, Record, dumps, locked, write_json
from kvcomm.runs import CALIBRATION, SUMMARY, enter, read_run
from kvcomm.selection import LayerScores
from kvcomm.summary import row_key, summarise
from kvcomm.tasks import Example, Task

#: K and V that the prompts of one batch may take; longer records make smaller batches.
BATCH_BYTES = 1 << 30

#: Fields of a line of the log, in order. A record that failed has "error" besides; one whose answer
#: is reasoning that never ended, of which nothing is scored, has "reasoning_cut_off": true; one of
#: a method that passes text has it as "message"; "agreement" and "kl" are there where asked for.
FIELDS = (
    "id", "index", "method", "settings", "prompt_sha256", "question", "answer", "token_ids", "gold",
    *metrics.NAMES, "nll", "n_gold_tokens", "message_bytes", "receiver_tokens", "cut_tokens",
    "seconds",
)  # fmt: skip


def evaluate(
    sender: Sender,
    receiver: Receiver,
    task: Task,
    plan: Plan,
    methods: Sequence[Method],
    out: Path,
    *,
    preset: Preset = "paper",
    layer_map: Sequence[int] | None = None,
    scores: LayerScores | None = None,
    max_new_tokens: int | None = None,
    max_input_tokens: int | None = None,
    batch_size: int = 8,
    seed: int = selection.SEED,
    think: bool | None = None,
    agreement: bool = False,
    about: Mapping[str, Any] | None = None,
    command: Sequence[str] = (),
    progress: bool = False,
    note: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Answer and score every record with every method, and write the run's folder.

    A folder that holds an unfinished run with the same settings is gone on from: what its log has
    is not done again, but for records that failed. Results do not depend on `batch_size`, on
    threads, or on where a run was interrupted; times do.

    Parameters
    ----------
    plan
        From `plan.divide`.
    methods
        From `methods.methods`; they answer in this order.
    preset
        "paper" or "reference", for every method that sends K and V.
    scores
        A calibration made before; None: calibrate on the plan's records, if a method needs it.
    max_new_tokens
        Most tokens of an answer; None: the task's.
    max_input_tokens
        Most tokens of sender's prompt and question together; None: 64,000, or what the models have.
    seed
        Of the bootstrap; a method's own is in its settings.
    think
        Whether the models think before they answer, which changes prompts as published; None: what
        their names say (`prompts.THINK_MODELS`).
    agreement
        Hold every method against skyline's answers, token by token (`kvcomm.agreement`).
    about
        More settings to record and to compare, such as the data file.
    command
        How to make the run again, for the report.
    progress
        Show a bar with the running score on standard error.
    note
        Gets one line about anything unusual, such as a damaged log.

    Returns
    -------
    dict
        What summary.json holds; see `summary.summarise`.

    Raises
    ------
    ValueError
        Settings that differ from those of the run in the folder (named), or that do not fit.
    MismatchError
        A sender and a receiver that do not fit.
    OSError
        The folder cannot be written, or another run is writing there.
    """
    check_preset(preset)
    if batch_size < 1:
        raise ValueError(f"batch size: expected 1 or more, found {batch_size}")
    if max_new_tokens is not None and max_new_tokens < 0:
        raise ValueError(f"max_new_tokens: expected 0 or more, found {max_new_tokens}")
    for model in (sender.model, receiver.model):
        if model.tokenizer is None:
            raise ValueError(f"model {model.name!r} has no tokenizer, which an evaluation needs")
    n_layers = sender.model.n_layers
    if layer_map is not None:
        layer_map = check_layer_map(layer_map, n_layers, receiver.model.n_layers)
    bench = Bench(
        sender,
        receiver,
        preset=preset,
        max_new_tokens=task.max_new_tokens if max_new_tokens is None else max_new_tokens,
        layer_map=layer_map,
        scores=scores,
        agreement=agreement,
        note=note,
    )
    calibrated = any(method.calibrated for method in methods)
    if calibrated and scores is None and not plan.calibration:
        raise ValueError("calibration records: none, and a method needs one")
    writer = bench.prompts = Prompts(bench, task, plan, max_input_tokens, think=think)
    bench.calibration = writer.calibration()
    # Bad settings of a method have to show before anything is measured or written.
    level = LayerScores(np.zeros((1, n_layers, 1)), preset, "", "")
    read = _layers(methods, replace(bench, scores=level, trial=True))
    if read:
        sender.origin.check_receiver(
            receiver.origin, read, layer_map, any_tokenizer=receiver.any_tokenizer
        )
    run = {
        "settings": {
            **_settings(bench, task, plan, calibrated),
            "max_input_tokens": writer.limit,
            **({"agreement": True} if agreement else {}),
            "seed": seed,
            **(about or {}),
        },
        "environment": {
            "command": command,
            "batch_size": batch_size,
            "versions": environment.versions(),
            "machine": environment.machine(),
        },
        "excluded": plan.excluded,
        "methods": [{"label": m.label, "method": m.name, "settings": m.settings} for m in methods],
        "calibrated": calibrated,
        "calibration": None,
    }
    with locked(out):
        resumed = enter(out, run)
        if calibrated:
            bench.scores = _calibration(bench, out / CALIBRATION, resumed)
        bench.read_layers = _layers(methods, bench)
        _answer(bench, task, plan, methods, writer, out, batch_size, progress, note)
        summary: dict[str, Any] = json.loads(dumps(summarise(*read_run(out))))
        write_json(out / SUMMARY, summary)
    return summary


def _settings(bench: Bench, task: Task, plan: Plan, calibrated: bool) -> dict[str, Any]:
    """What decides a run's results, besides its methods."""
    given = bench.scores if calibrated else None
    return {
        "task": task.name,
        "metric": task.metric,
        "closed_answers": task.closed,
        "preset": bench.preset,
        "sender": _described(bench.sender.model),
        "receiver": _described(bench.receiver.model),
        "layer_map": bench.layer_map,
        "prompts": bench.prompts.settings,
        "max_new_tokens": bench.max_new_tokens,
        "n_records": len(plan.scored),
        "records_sha256": _digest([asdict(one) for one in plan.scored]),
        "published_protocol": plan.published,
        "calibration": [one.id for one in plan.calibration],
        "calibration_sha256": None if given is None else _digest(given.sample_mass),
        "kvcomm": environment.versions()["kvcomm"],
    }


def _layers(methods: Sequence[Method], bench: Bench) -> tuple[int, ...]:
    return tuple(sorted({layer for method in methods for layer in method.layers(bench)}))


def _described(model: Model) -> dict[str, Any]:
    return {
        "model": model.name,
        "fingerprint": model.fingerprint,
        "n_layers": model.n_layers,
        "dtype": model.dtype,
        "kv_dtype": model.kv_dtype,
        "device": model.device,
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(dumps(value, sort_keys=True).encode()).hexdigest()


def _calibration(bench: Bench, path: Path, resumed: bool) -> LayerScores:
    """The layer scores of the run: those it began with, as given, or measured now and kept."""
    if resumed and path.exists():
        return LayerScores.load(path)
    scores = bench.scores
    if scores is None:
        bench.note(f"calibrating on {len(bench.calibration)} records")
        scores = measure(bench, bench.calibration)
    scores.save(path)
    return scores


def measure(bench: Bench, items: Sequence[Item]) -> LayerScores:
    """Calibrate on records, with the prompts of the task."""
    return selection.calibrate(
        bench.sender,
        bench.receiver,
        [(item.sender, item.receiver) for item in items],
        preset=bench.preset,
        layer_map=bench.layer_map,
    )


@dataclass(frozen=True)
class _Row:
    """A method of the run, with what its lines of the log are known by."""

    method: Method
    settings: Mapping[str, Any]
    key: str

    @classmethod
    def of(cls, method: Method) -> "_Row":
        settings = json.loads(dumps(method.settings))
        return cls(method, settings, row_key(method.name, settings))


def _answer(
    bench: Bench,
    task: Task,
    plan: Plan,
    methods: Sequence[Method],
    writer: Prompts,
    out: Path,
    batch_size: int,
    progress: bool,
    note: Callable[[str], None],
) -> None:
    """Everything that the log lacks, batch by batch and method by method."""
    items = [_item_or_error(writer, number) for number in range(len(plan.scored))]
    bench.items = items
    rows = [_Row.of(method) for method in methods]
    wanted = {(example.id, row.key) for example in plan.scored for row in rows}
    done: set[tuple[str, str]] = set()

    def keep(record: Record) -> bool:
        if not record.keys() >= set(FIELDS) or "error" in record:
            return False
        key = record["id"], row_key(record["method"], record["settings"])
        if key not in wanted or key in done:
            return False
        done.add(key)
        return True

    with Log(out, keep) as log, _bar(len(wanted), len(done), progress) as bar:
        if log.n_damaged:
            damaged = f"{log.n_damaged} damaged line{'s' * (log.n_damaged > 1)}"
            note(f"{log.path}: dropped {damaged} of an earlier run")
        if log.n_dropped:
            note(f"{log.path}: doing {log.n_dropped} failed, repeated or foreign records again")
        if done:
            note(f"going on: {len(done)} of {len(wanted)} answers are there")
        score = _Running({row.key: row.method.label for row in rows}, task.metric, log.records)
        room = BATCH_BYTES // max(m.memory["kv_per_token"] for m in _models(bench))
        batches = list(_batches(items, batch_size, room))
        for batch, upcoming in zip(batches, [*batches[1:], []], strict=True):
            for row in rows:
                todo = [n for n in batch if (plan.scored[n].id, row.key) not in done]
                for number, result in _attempt(row.method, bench, items, todo):
                    record = log.append(_record(plan.scored[number], row, result, task, bench))
                    bar.set_postfix_str(score.add(record), refresh=False)
                    bar.update()
            bench.forget([items[n] for n in upcoming if isinstance(items[n], Item)])


def _models(bench: Bench) -> tuple[Model, Model]:
    return bench.sender.model, bench.receiver.model


def _batches(
    items: Sequence[Item | Exception], batch_size: int, n_tokens: int
) -> Iterator[list[int]]:
    """Numbers of successive items: batch_size of them, fewer when they pass n_tokens."""
    batch: list[int] = []
    tokens = 0
    for number, item in enumerate(items):
        more = 0 if isinstance(item, Exception) else len(item.skyline)
        if batch and (len(batch) == batch_size or tokens + more > n_tokens):
            yield batch
            batch, tokens = [], 0
        batch.append(number)
        tokens += more
    if batch:
        yield batch


def _item_or_error(writer: Prompts, number: int) -> Item | ValueError:
    try:
        return writer.item(number, writer.plan.scored[number])
    except ValueError as error:
        return error


def _bar(total: int, done: int, shown: bool) -> tqdm:
    return tqdm(
        total=total,
        initial=done,
        disable=not shown,
        unit="answer",
        mininterval=0.5 if sys.stderr.isatty() else 10.0,
        dynamic_ncols=True,
    )


def _attempt(
    method: Method, bench: Bench, items: Sequence[Item | Exception], numbers: Sequence[int]
) -> list[tuple[int, Outcome | Exception]]:
    """Outcomes of a batch. When it fails, each record is tried alone, to find the one at fault."""
    broken = [(n, items[n]) for n in numbers if isinstance(items[n], Exception)]
    if broken:
        whole = [n for n in numbers if not isinstance(items[n], Exception)]
        return sorted([*broken, *_attempt(method, bench, items, whole)], key=lambda pair: pair[0])
    if not numbers:
        return []
    try:
        outcomes = method.run(bench, [items[number] for number in numbers])
        return list(zip(numbers, outcomes, strict=True))
    except Exception as error:
        if len(numbers) == 1:
            return [(numbers[0], error)]
        return [pair for number in numbers for pair in _attempt(method, bench, items, [number])]


def _record(
    example: Example, row: _Row, result: Outcome | Exception, task: Task, bench: Bench
) -> Record:
    """A line of the log. A failed record has "error", and null for all that is not known; where no
    answers are asked for, scores of answers are not known."""
    record: Record = dict.fromkeys(FIELDS) | {
        "id": example.id,
        "index": example.index,
        "question": example.question,
        "method": row.method.name,
        "settings": {**row.settings, "layers": None},
        "gold": example.answers,
        "seconds": dict.fromkeys(("sender", "transfer", "first_token", "total")),
    }
    if isinstance(result, Exception):
        return record | {"error": f"{type(result).__name__}: {' '.join(str(result).split())}"}
    stripped = metrics.strip_reasoning(result.answer)
    judged = metrics.score(
        stripped.text, example.answers, closed=task.closed, choices=example.choices
    )
    if stripped.cut_off:
        record["reasoning_cut_off"] = True
    if result.message is not None:
        record["message"] = result.message
    if result.agreement is not None:
        record |= asdict(result.agreement)
    if example.choices:
        record["choices"] = example.choices
    return record | {
        "settings": {**row.settings, "layers": result.layers},
        "prompt_sha256": _digest([ids.tolist() for ids in result.prompts]),
        "answer": result.answer,
        "token_ids": result.token_ids,
        **({name: getattr(judged, name) for name in metrics.NAMES} if bench.max_new_tokens else {}),
        "nll": result.nll,
        "n_gold_tokens": result.n_gold_tokens,
        "message_bytes": result.message_bytes,
        "receiver_tokens": result.receiver_tokens,
        "cut_tokens": result.cut_tokens,
        "seconds": asdict(result.seconds),
    }


class _Running:
    """The score so far of the method that answered last, for the progress bar.

    labels: of the methods, by the key of their lines. metric: the data set's.
    """

    def __init__(self, labels: Mapping[str, str], metric: str, records: Sequence[Record]) -> None:
        self._labels, self._metric = labels, metric
        self._nll: dict[str, dict[str, float]] = {label: {} for label in labels.values()}
        self._scores: dict[str, list[float]] = {label: [] for label in labels.values()}
        for record in records:
            self.add(record)

    def add(self, record: Record) -> str:
        """Count a record; returns the line to show."""
        label = self._labels[row_key(record["method"], record["settings"])]
        nll, scores = self._nll[label], self._scores[label]
        if "error" not in record:
            scores += [record[self._metric]] if record[self._metric] is not None else []
            if record["nll"] is not None:
                nll[record["id"]] = record["nll"]
        if not nll:
            return f"{label}: nothing done"
        share = self._recovered(nll)
        said = f"{self._metric} {sum(scores) / len(scores):.2f}, " if scores else ""
        return f"{label}: {said}nll {sum(nll.values()) / len(nll):.1f}" + (
            "" if share is None else f", recovered {share:.2f}"
        )

    def _recovered(self, nll: Mapping[str, float]) -> float | None:
        baseline, skyline = self._nll.get("baseline", {}), self._nll.get("skyline", {})
        ids = nll.keys() & baseline.keys() & skyline.keys()
        below, mine, above = (sum(values[i] for i in ids) for values in (baseline, nll, skyline))
        return None if below == above else (below - mine) / (below - above)
