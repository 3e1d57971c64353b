"""The harness: records through methods, in batches, into a log that a later run can go on from.

Owns a run's course: what is checked before anything is written, that each context is read once,
what a line of the log holds, and that one record's failure is counted and does not end the run.
Which records and prompts there are says plan.py; methods answer (methods/), metrics.py judges,
summary.py counts.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from kvcomm import environment, metrics, selection, template
from kvcomm.agents import Receiver, Sender
from kvcomm.layout import counted
from kvcomm.methods import Bench, Item, Method, Outcome
from kvcomm.model import Model
from kvcomm.packet import Preset, check_layer_map, check_preset
from kvcomm.plan import Plan, Prompts
from kvcomm.progress import Running, bar, on_terminal
from kvcomm.records import CALIBRATING, Log, Record, digest, dumps, locked, write_json
from kvcomm.runs import CALIBRATION, RUN, SUMMARY, enter, read_run, read_settings
from kvcomm.selection import LayerScores
from kvcomm.summary import row_key, summarise
from kvcomm.tasks import Example, Task

#: K and V that the prompts of one batch may take; longer contexts make smaller batches.
BATCH_BYTES = 1 << 30

#: Fields of a line of the log, in order. A record that failed has "error" besides; one whose prompt
#: ends in an opened block of reasoning has "reasoning_opened": true, and one whose answer is
#: reasoning that never ended, of which nothing is scored, "reasoning_cut_off"; one of a method that
#: passes text has it as "message"; "agreement" and "kl" are there where asked for.
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
        A calibration made before, with the first context token as each method's `skip_first` has
        it; None: calibrate on the plan's records, if a method needs it.
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
        Show a bar with the running score on standard error; on a terminal also of what precedes
        the answers.
    note
        Gets one line about anything unusual, such as a damaged log.

    Returns
    -------
    dict
        What summary.json holds; see `summary.summarise`.

    Raises
    ------
    ValueError
        Settings, or records searched on, that differ from those of the run in the folder (named);
        settings that do not fit.
    FormatError
        A file of the run in the folder is damaged, but for its log, which is mended.
    MismatchError
        A sender and a receiver that do not fit, or scores of others.
    OSError
        The folder cannot be written, or another run is writing there.
    """
    check_preset(preset)
    _check_arguments((sender.model, receiver.model), batch_size, max_new_tokens)
    day = _prompt_day((sender.model, receiver.model), out)
    with template.on_day(day):
        n_layers = (sender.model.n_layers, receiver.model.n_layers)
        bench = Bench(
            sender,
            receiver,
            preset=preset,
            max_new_tokens=task.max_new_tokens if max_new_tokens is None else max_new_tokens,
            layer_map=None if layer_map is None else check_layer_map(layer_map, *n_layers),
            scores=scores,
            agreement=agreement,
            bars=progress and on_terminal(),
            note=note,
        )
        if scores is not None:
            scores.check(sender.model, receiver.model, preset)
        bench.prompts = Prompts(bench, task, plan, max_input_tokens, think=think)
        bench.calibration = bench.prompts.calibration()
        _check_methods(methods, bench)
        run = {
            "settings": {**_settings(bench, methods, day), "seed": seed, **(about or {})},
            "environment": {
                "command": command,
                "batch_size": batch_size,
                "versions": environment.versions(),
                "machine": environment.machine(),
            },
            "excluded": plan.excluded,
            "methods": [
                {"label": m.label, "method": m.name, "settings": m.settings} for m in methods
            ],
            "calibrated": _calibrated(methods),
            "calibration": None,
        }
        with locked(out):
            resumed = enter(out, run)
            bench.folder = out
            if _calibrated(methods):
                bench.scores = _calibration(bench, resumed)
            bench.read_layers = _layers(methods, bench)
            _answer(bench, [_Row.of(method) for method in methods], batch_size, progress)
            summary: dict[str, Any] = json.loads(dumps(summarise(*read_run(out))))
            write_json(out / SUMMARY, summary)
        return summary


# ---- before anything is written ------------------------------------------------------------


def _check_arguments(models: Sequence[Model], batch_size: int, max_new_tokens: int | None) -> None:
    if batch_size < 1:
        raise ValueError(f"batch size: expected 1 or more, found {batch_size}")
    if max_new_tokens is not None and max_new_tokens < 0:
        raise ValueError(f"max_new_tokens: expected 0 or more, found {max_new_tokens}")
    for model in models:
        if model.tokenizer is None:
            raise ValueError(f"model {model.name!r} has no tokenizer, which an evaluation needs")


def _check_methods(methods: Sequence[Method], bench: Bench) -> None:
    """Refuse bad settings of a method, and a receiver that takes no such message."""
    if _calibrated(methods) and bench.scores is None and not bench.calibration:
        raise ValueError("calibration size: 0 records, and a method needs one")
    sender, receiver = bench.sender, bench.receiver
    level = LayerScores(np.zeros((1, sender.model.n_layers, 1)), bench.preset, "", "")
    read = _layers(methods, replace(bench, scores=level, trial=True))
    if read:
        sender.origin.check_receiver(
            receiver.origin, read, bench.layer_map, any_tokenizer=receiver.any_tokenizer
        )


def _calibrated(methods: Sequence[Method]) -> bool:
    return any(method.calibrated for method in methods)


def _prompt_day(models: Sequence[Model], out: Path) -> date | None:
    """The day that the run's prompts tell: that of its first start; None where they tell none."""
    if not any(model.tokenizer.asks_day for model in models):
        return None
    path = out / RUN
    first = read_settings(out)["settings"].get("prompt_day") if path.exists() else None
    return date.fromisoformat(first) if first else template.today()


def _settings(bench: Bench, methods: Sequence[Method], day: date | None) -> dict[str, Any]:
    """What decides a run's results, besides its methods."""
    task, plan = bench.prompts.task, bench.prompts.plan
    given = bench.scores if _calibrated(methods) else None
    return {
        "task": task.name,
        "metric": task.metric,
        "closed_answers": task.closed,
        "preset": bench.preset,
        "sender": described(bench.sender.model),
        "receiver": described(bench.receiver.model),
        "layer_map": bench.layer_map,
        "prompts": bench.prompts.settings,
        "max_new_tokens": bench.max_new_tokens,
        "n_records": len(plan.scored),
        "records_sha256": digest([asdict(one) for one in plan.scored]),
        "published_protocol": plan.published,
        "calibration": [one.id for one in plan.calibration],
        "calibration_sha256": None if given is None else digest(given.sample_mass),
        "kvcomm": environment.versions()["kvcomm"],
        "max_input_tokens": bench.prompts.limit,
        **({"agreement": True} if bench.agreement else {}),
        **({} if day is None else {"prompt_day": day.isoformat()}),
    }


def _layers(methods: Sequence[Method], bench: Bench) -> tuple[int, ...]:
    return tuple(sorted({layer for method in methods for layer in method.layers(bench)}))


def described(model: Model) -> dict[str, Any]:
    """What of a model decides results, and what it is called."""
    return {
        "model": model.name,
        "fingerprint": model.fingerprint,
        "tokenizer": None if model.tokenizer is None else model.tokenizer.fingerprint(),
        "stop_ids": model.stop_ids,
        "n_layers": model.n_layers,
        "dtype": model.dtype,
        "kv_dtype": model.kv_dtype,
        "device": model.device,
    }


# ---- the calibration, and the answers ------------------------------------------------------


def _calibration(bench: Bench, resumed: bool) -> LayerScores:
    """The layer scores of the run: those it began with, as given, or measured now and kept."""
    path = bench.folder / CALIBRATION
    if resumed and path.exists():
        return LayerScores.load(path)
    scores = bench.scores
    if scores is None:
        samples = [(item.sender, item.receiver) for item in bench.calibration]
        scores = bench.calibrate(samples, what="calibrating")
    scores.save(path)
    return scores


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


class _Left:
    """Which lines the log still lacks: `wanted` without `done`, each an id and a row's key."""

    def __init__(self, bench: Bench, rows: Sequence[_Row]) -> None:
        self._of = {
            (number, row.key): _ids(bench, number, row)
            for number in range(len(bench.items))
            for row in rows
        }
        self.wanted = {(name, key) for (_, key), names in self._of.items() for name in names}
        self.done: set[tuple[str, str]] = set()

    def keep(self, record: Record) -> bool:
        """Whether a line of an earlier start counts; it is then done."""
        if not record.keys() >= set(FIELDS) or "error" in record:
            return False
        key = record["id"], row_key(record["method"], record["settings"])
        if key not in self.wanted or key in self.done:
            return False
        self.done.add(key)
        return True

    def lacks(self, number: int, row: _Row) -> bool:
        """Whether a line of this item and method is missing."""
        return any((name, row.key) not in self.done for name in self._of[number, row.key])


def _ids(bench: Bench, number: int, row: _Row) -> list[str]:
    """Of the lines that an item has in the log, in order."""
    item, name = bench.items[number], bench.prompts.plan.scored[number].id
    twice = isinstance(item, Item) and row.method.repeats(bench, item)
    return [name + CALIBRATING, name] if twice else [name]


def _answer(bench: Bench, rows: Sequence[_Row], batch_size: int, shown: bool) -> None:
    """Write everything that the log lacks."""
    n_items = len(bench.prompts.plan.scored)
    bench.items = [_item_or_error(bench.prompts, number) for number in range(n_items)]
    left = _Left(bench, rows)
    with Log(bench.folder, left.keep) as log:
        _tell(bench, log, left)
        score = Running(
            {row.key: row.method.label for row in rows}, bench.prompts.task.metric, log.records
        )
        with bar(len(left.wanted), "answer", done=len(left.done), shown=shown) as answers:
            for record in _lacking(bench, rows, left, batch_size):
                answers.set_postfix_str(score.add(log.append(record)), refresh=False)
                answers.update()


def _lacking(bench: Bench, rows: Sequence[_Row], left: _Left, batch_size: int) -> Iterator[Record]:
    """The lines that the log lacks, in the order of batches, methods and records."""
    items, scored = bench.items, bench.prompts.plan.scored
    models = (bench.sender.model, bench.receiver.model)
    room = BATCH_BYTES // max(model.memory["kv_per_token"] for model in models)
    batches = list(_batches(items, range(len(items)), batch_size, room, shared=True))
    for batch, upcoming in zip(batches, [*batches[1:], []], strict=True):
        for row in rows:
            lacking = [number for number in batch if left.lacks(number, row)]
            shared = row.method.shares_contexts
            for todo in _batches(items, lacking, len(batch), room, shared=shared):
                for number, result in _attempt(row.method, bench, items, todo):
                    for record in _records(scored[number], row, result, bench):
                        if (record["id"], row.key) not in left.done:
                            yield record
        bench.forget([items[n] for n in upcoming if isinstance(items[n], Item)])


def _tell(bench: Bench, log: Log, left: _Left) -> None:
    """Note what was found of an earlier start."""
    if log.n_damaged:
        bench.note(
            f"{log.path}: dropped {counted(log.n_damaged, 'damaged line')} of an earlier run"
        )
    if log.n_dropped:
        again = counted(log.n_dropped, "failed, repeated or foreign record")
        bench.note(f"{log.path}: doing {again} again")
    if left.done:
        bench.note(f"going on: {len(left.done)} of {len(left.wanted)} answers are there")


def _batches(
    items: Sequence[Item | Exception],
    numbers: Iterable[int],
    batch_size: int,
    n_tokens: int,
    *,
    shared: bool,
) -> Iterator[list[int]]:
    """Numbers of successive items: batch_size of them, fewer when they hold more than n_tokens;
    shared: a context that several have is held once."""
    batch: list[int] = []
    for number in numbers:
        full = len(batch) == batch_size
        if batch and (full or _held([items[n] for n in (*batch, number)], shared) > n_tokens):
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def _held(items: Sequence[Item | Exception], shared: bool) -> int:
    """Tokens of a batch, of its longest prompts."""
    whole = [item for item in items if isinstance(item, Item)]
    if not shared:
        return sum(len(item.skyline) for item in whole)
    contexts = {item.skyline[: item.skyline_shared].tobytes(): item for item in whole}
    alone = sum(len(item.skyline) - item.skyline_shared for item in whole)
    return alone + sum(item.skyline_shared for item in contexts.values())


def _item_or_error(writer: Prompts, number: int) -> Item | ValueError:
    try:
        return writer.item(number, writer.plan.scored[number])
    except ValueError as error:
        return error


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


# ---- a line of the log ---------------------------------------------------------------------


def _records(
    example: Example, row: _Row, result: Outcome | Exception, bench: Bench
) -> list[Record]:
    """The lines of what a method did with an item, as `_ids` has them."""
    record = _record(example, row, result, bench)
    if isinstance(result, Exception) or result.calibrating is None:
        return [record]
    other = replace(example, id=example.id + CALIBRATING)
    return [_record(other, row, result.calibrating, bench), record]


def _record(example: Example, row: _Row, result: Outcome | Exception, bench: Bench) -> Record:
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
    task = bench.prompts.task
    opened = _opened(bench, result)
    stripped = metrics.strip_reasoning(result.answer, opened=opened)
    judged = metrics.score(
        stripped.text, example.answers, closed=task.closed, choices=example.choices
    )
    if opened:
        record["reasoning_opened"] = True
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
        "prompt_sha256": digest([ids.tolist() for ids in result.prompts]),
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


def _opened(bench: Bench, result: Outcome) -> bool:
    """Whether the prompt ends inside a block of reasoning, as some chat templates have it."""
    last = [i for i in result.prompts[-1][-8:].tolist() if i >= 0] if result.prompts else []
    end = bench.receiver.model.tokenizer.decode(last, skip_special=False)
    return end.rstrip().endswith("<think>")
