"""The harness: records through methods, in batches, into a log that a later run can go on from.

Owns the run's folder and the rules of an evaluation: which records calibrate and which are scored,
how prompts are cut, what a line of records.jsonl holds, when a run may go on where another
stopped, and that one record's failure is counted and does not end the run. Methods answer
(methods/), metrics.py judges, summary.py counts.

    DIR/run.json          settings, written first; a run with other settings is refused
    DIR/records.jsonl     one line per record and method, written the moment it is done
    DIR/calibration.json  the layer scores, when a method needs some
    DIR/summary.json      written at the end
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from kvcomm import environment, metrics, prompts, selection
from kvcomm.agents import Receiver, Sender
from kvcomm.errors import FormatError
from kvcomm.methods import Bench, Item, Method, Outcome
from kvcomm.packet import Preset, check_layer_map, check_preset
from kvcomm.records import RECORDS, Log, Record, dumps, locked, parse, write_json
from kvcomm.selection import LayerScores
from kvcomm.summary import summarise, variant
from kvcomm.tasks import Example, Task
from kvcomm.turns import prompt_ids

RUN = "run.json"
SUMMARY = "summary.json"
CALIBRATION = "calibration.json"

#: Longest prompt of the published experiment, in tokens.
MAX_INPUT_TOKENS = 64000


# ---- which records do what -----------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Which records do what.

    calibration: records that the layers are chosen from; scored: records that methods answer.
    excluded: ids of records left out, by reason.
    """

    calibration: tuple[Example, ...]
    scored: tuple[Example, ...]
    excluded: Mapping[str, tuple[str, ...]]


def divide(
    examples: Sequence[Example],
    *,
    calibration: Sequence[Example] | None = None,
    n_calibration: int = 1,
    limit: int | None = None,
    published: bool = False,
) -> Plan:
    """Divide records into those that calibrate and those that are scored.

    Parameters
    ----------
    examples
        The records of the data file.
    calibration
        Records of another file; its first `n_calibration` calibrate. None: the first of `examples`
        do.
    limit
        Score at most so many.
    published
        Score the calibration records too, as the published code does. Else a record with the
        context and question of one that calibrates is left out.

    Raises
    ------
    ValueError
        Nothing is left to score, or there are too few records to calibrate on.
    """
    if n_calibration < 0:
        raise ValueError(f"calibration records: {n_calibration} is negative")
    if limit is not None and limit < 1:
        raise ValueError(f"limit: expected 1 or more records, found {limit}")
    pool = examples if calibration is None else calibration
    chosen = tuple(pool[:n_calibration])
    if len(chosen) < n_calibration:
        raise ValueError(f"calibration records: expected {n_calibration}, found {len(chosen)}")
    taken = set() if published else {(one.context, one.question) for one in chosen}
    excluded: dict[str, list[str]] = {"calibration": [], "no gold answer": []}
    scored: list[Example] = []
    for example in examples:
        if (example.context, example.question) in taken:
            excluded["calibration"].append(example.id)
        elif not any(example.answers):
            excluded["no gold answer"].append(example.id)
        else:
            scored.append(example)
    if not scored:
        counts = ", ".join(f"{len(ids)} left out ({why})" for why, ids in excluded.items())
        raise ValueError(f"no record to score: of {len(examples)}, {counts}")
    return Plan(
        chosen, tuple(scored[:limit]), {why: tuple(ids) for why, ids in excluded.items()}
    )


# ---- prompts -------------------------------------------------------------------------------


class _Prompts:
    """Turns records into items: user turns of the task, chat template, ids, cut.

    Sender's prompt and question have to fit the limit together; what is cut is the middle of the
    sender's prompt, never the question. In preset paper the skyline's prompt loses the very tokens
    that the sender's lost, so that both have read the same; in preset reference it loses the
    middle of the whole prompt, as published.
    """

    def __init__(self, bench: Bench, task: Task, plan: Plan, limit: int | None) -> None:
        self._bench, self._task = bench, task
        self._encode = bench.receiver.model.tokenizer.encode
        golds = [len(ids) for one in plan.scored for ids in self._gold(one)]
        # Behind the prompt there has to be room for an answer, the model's or a gold one.
        reserve = max([bench.max_new_tokens, *golds])
        models = (bench.sender.model, bench.receiver.model)
        room = min(model.max_position for model in models) - reserve
        self.limit = min(MAX_INPUT_TOKENS if limit is None else limit, room)
        if self.limit < 1:
            raise ValueError(
                f"prompts: {reserve} tokens of an answer leave {room} of the models' "
                f"{room + reserve} positions"
            )

    def item(self, number: int, example: Example) -> Item:
        """The prompts of one record.

        Raises
        ------
        ValueError
            An empty context or question, or a question that leaves no room for a context.
        """
        family = self._task.family
        sender, receiver = self._bench.sender, self._bench.receiver

        def ids(message: str) -> np.ndarray:
            return prompt_ids(receiver.model, receiver.model.tokenizer, message, str, "prompt")

        for what, text in (("context", example.context), ("question", example.question)):
            if not text.strip():
                raise ValueError(f"{what} is empty")
        message = prompts.sender_message(example.context, family)
        whole = prompt_ids(sender.model, sender.tokenizer, message, str, "context")
        question = ids(prompts.receiver_message(example.question, family))
        skyline = ids(prompts.skyline_message(example.context, example.question, family))
        cut, sender_cut, skyline_cut = whole, 0, 0
        if self._task.truncates:
            cut, sender_cut = prompts.cut_sender(whole, len(question), self.limit)
            if self._bench.preset == "reference":
                skyline, skyline_cut = prompts.cut_prompt(skyline, self.limit)
            elif sender_cut:
                head = len(cut) // 2
                skyline = np.concatenate([skyline[:head], skyline[head + sender_cut :]])
                skyline_cut = sender_cut
        return Item(
            number=number,
            sender=cut,
            receiver=question,
            baseline=ids(prompts.baseline_message(example.question, family)),
            skyline=skyline,
            sender_cut=sender_cut,
            skyline_cut=skyline_cut,
            gold=tuple(self._gold(example)),
        )

    def _gold(self, example: Example) -> list[np.ndarray]:
        return [np.array(self._encode(text), np.int32) for text in example.answers if text]


# ---- a run's folder ------------------------------------------------------------------------


def read_run(folder: Path) -> tuple[dict[str, Any], list[Record]]:
    """A run's settings, with its calibration, and the records of its log.

    Raises
    ------
    OSError
        There is no run in the folder.
    FormatError
        run.json is damaged.
    """
    run = _read_json(folder / RUN)
    if run.get("calibrated"):
        run["calibration"] = _shown(LayerScores.load(folder / CALIBRATION))
    log = folder / RECORDS
    return run, parse(log.read_bytes())[0] if log.exists() else []


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise FormatError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict) or "settings" not in value:
        raise FormatError(f"{path}: expected an object with settings")
    return value


def _shown(scores: LayerScores) -> dict[str, Any]:
    return {"preset": scores.preset, "n_samples": scores.n_samples, "mass": scores.mass.tolist()}


def _enter(folder: Path, run: Mapping[str, Any]) -> None:
    """Write run.json, or hold it against the one that is there.

    Raises
    ------
    ValueError
        Settings that differ, each with both values; or a log without run.json.
    """
    path = folder / RUN
    if path.exists():
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
    elif (folder / RECORDS).exists():
        raise ValueError(f"{folder} holds {RECORDS} without {RUN}: take another folder")
    write_json(path, run)


def _differences(old: Any, new: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _differences(old.get(key), new.get(key), f"{name}.{key}")
    elif old != new:
        yield name.removeprefix("settings."), old, new


def _brief(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(one, dict) and "label" in one for one in value):
        value = ", ".join(one["label"] for one in value)
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# ---- one run -------------------------------------------------------------------------------


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
        From `divide`.
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
    )
    # Bad settings of a method have to show before anything is measured or written.
    level = LayerScores(np.zeros((1, n_layers, 1)), preset, "", "")
    read = _layers(methods, replace(bench, scores=level))
    sender.origin.check_receiver(
        receiver.origin, read, layer_map, any_tokenizer=receiver.any_tokenizer
    )
    writer = _Prompts(bench, task, plan, max_input_tokens)
    calibrated = any(method.calibrated for method in methods)
    if calibrated and scores is None and not plan.calibration:
        raise ValueError("calibration records: none, and a method needs one")
    run = {
        "settings": {
            "task": task.name,
            "closed_answers": task.closed,
            "preset": preset,
            "sender": _described(sender),
            "receiver": _described(receiver),
            "layer_map": layer_map,
            "prompts": asdict(prompts.FAMILIES[task.family]),
            "max_new_tokens": bench.max_new_tokens,
            "max_input_tokens": writer.limit,
            "seed": seed,
            "n_records": len(plan.scored),
            "records_sha256": _digest([asdict(one) for one in plan.scored]),
            "calibration": [one.id for one in plan.calibration] if calibrated else [],
            "calibration_sha256": None
            if scores is None or not calibrated
            else _digest(scores.sample_mass.tolist()),
            "kvcomm": environment.versions()["kvcomm"],
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
        _enter(out, run)
        if calibrated:
            bench.scores = _calibration(bench, plan, writer, out)
            run["calibration"] = _shown(bench.scores)
        bench.read_layers = _layers(methods, bench)
        _answer(bench, task, plan, methods, writer, out, batch_size, progress, note)
        summary: dict[str, Any] = json.loads(
            dumps(summarise(json.loads(dumps(run)), read_run(out)[1]))
        )
        write_json(out / SUMMARY, summary)
    return summary


def _layers(methods: Sequence[Method], bench: Bench) -> tuple[int, ...]:
    return tuple(sorted({layer for method in methods for layer in method.layers(bench)}))


def _described(agent: Sender | Receiver) -> dict[str, Any]:
    model = agent.model
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


def _calibration(bench: Bench, plan: Plan, writer: _Prompts, out: Path) -> LayerScores:
    """The layer scores of the run: of its folder, as given, or measured now and kept there."""
    path = out / CALIBRATION
    if path.exists():
        return LayerScores.load(path)
    scores = bench.scores
    if scores is None:
        items = [writer.item(place, one) for place, one in enumerate(plan.calibration)]
        scores = selection.calibrate(
            bench.sender,
            bench.receiver,
            [(item.sender, item.receiver) for item in items],
            preset=bench.preset,
            layer_map=bench.layer_map,
        )
    scores.save(path)
    return scores


def _answer(
    bench: Bench,
    task: Task,
    plan: Plan,
    methods: Sequence[Method],
    writer: _Prompts,
    out: Path,
    batch_size: int,
    progress: bool,
    note: Callable[[str], None],
) -> None:
    """Everything that the log lacks, batch by batch and method by method."""
    items: list[Item | Exception] = []
    for number, example in enumerate(plan.scored):
        try:
            items.append(writer.item(number, example))
        except ValueError as error:
            items.append(error)
    bench.items = items
    wanted = {
        (example.id, _key(m.name, json.loads(dumps(m.settings))))
        for example in plan.scored
        for m in methods
    }
    done: set[tuple[str, str]] = set()

    def keep(record: Record) -> bool:
        try:
            key = record["id"], _key(record["method"], variant(record["settings"]))
        except (KeyError, TypeError, AttributeError):
            return False
        fresh = key in wanted and key not in done and "error" not in record
        if fresh:
            done.add(key)
        return fresh

    with (
        Log(out, keep) as log,
        tqdm(
            total=len(wanted),
            initial=len(done),
            disable=not progress,
            unit="answer",
            mininterval=0.5,
            dynamic_ncols=True,
        ) as bar,
    ):
        if log.n_damaged:
            note(f"{log.path}: dropped {log.n_damaged} damaged lines of an earlier run")
        if log.n_dropped:
            note(f"{log.path}: doing {log.n_dropped} failed or foreign records again")
        if done:
            note(f"going on: {len(done)} of {len(wanted)} answers are there")
        score = _Running(log.records)
        for start in range(0, len(items), batch_size):
            for method in methods:
                settings = json.loads(dumps(method.settings))
                key = _key(method.name, settings)
                todo = [
                    number
                    for number in range(start, min(start + batch_size, len(items)))
                    if (plan.scored[number].id, key) not in done
                ]
                for number, result in _attempt(method, bench, items, todo):
                    record = _record(plan.scored[number], method.name, settings, result, task)
                    bar.set_postfix_str(
                        score.add(method.label, log.append(record)), refresh=False
                    )
                    bar.update()
            bench.forget()


def _key(method: str, settings: Mapping[str, Any]) -> str:
    return dumps([method, settings], sort_keys=True)


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
    example: Example,
    method: str,
    settings: Mapping[str, Any],
    result: Outcome | Exception,
    task: Task,
) -> Record:
    """A line of the log. A failed record has "error", and null for all that is not known."""
    record: Record = {
        "id": example.id,
        "index": example.index,
        "method": method,
        "settings": {**settings, "layers": None},
        "prompt_sha256": None,
        "answer": None,
        "token_ids": None,
        "gold": example.answers,
        **dict.fromkeys(("match", "f1", "em", "nll", "n_gold_tokens")),
        **dict.fromkeys(("message_bytes", "receiver_tokens", "cut_tokens")),
        "seconds": dict.fromkeys(("sender", "transfer", "first_token", "total")),
    }
    if isinstance(result, Exception):
        return record | {"error": f"{type(result).__name__}: {' '.join(str(result).split())}"}
    judged = metrics.score(
        metrics.strip_reasoning(result.answer).text, example.answers, closed=task.closed
    )
    return record | {
        "settings": {**settings, "layers": result.layers},
        "prompt_sha256": _digest([ids.tolist() for ids in result.prompts]),
        "answer": result.answer,
        "token_ids": result.token_ids,
        "match": judged.match,
        "f1": judged.f1,
        "em": judged.em,
        "nll": result.nll,
        "n_gold_tokens": result.n_gold_tokens,
        "message_bytes": result.message_bytes,
        "receiver_tokens": result.receiver_tokens,
        "cut_tokens": result.cut_tokens,
        "seconds": asdict(result.seconds),
    }


class _Running:
    """The score so far, for the progress bar: of the method that answered last."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._nll: dict[str, dict[str, float]] = {}
        self._match: dict[str, list[float]] = {}
        self._labels: dict[str, str] = {}
        for record in records:
            self._count(record)

    def add(self, label: str, record: Record) -> str:
        """Count a record; returns the line to show."""
        key = self._count(record)
        matches, nll = self._match[key], self._nll[key]
        if not matches:
            return f"{label}: nothing done"
        text = f"{label}: match {sum(matches) / len(matches):.2f}"
        if nll:
            text += f", nll {sum(nll.values()) / len(nll):.1f}"
        share = self._recovered(nll)
        return text if share is None else f"{text}, recovered {share:.2f}"

    def _count(self, record: Record) -> str:
        key = _key(record["method"], variant(record["settings"]))
        self._labels.setdefault(record["method"], key)
        matches, nll = self._match.setdefault(key, []), self._nll.setdefault(key, {})
        if record["match"] is not None:
            matches.append(record["match"])
        if record["nll"] is not None:
            nll[record["id"]] = record["nll"]
        return key

    def _recovered(self, nll: Mapping[str, float]) -> float | None:
        ends = [self._nll.get(self._labels.get(name, ""), {}) for name in ("baseline", "skyline")]
        ids = set(nll) & set(ends[0]) & set(ends[1])
        sums = [sum(values[i] for i in ids) for values in (ends[0], nll, ends[1])]
        return (sums[0] - sums[1]) / (sums[0] - sums[2]) if sums[0] != sums[2] else None
