"""Parity with the recordings of `nld` and `cipher`: every prompt, text, vector and answer.

Records come from the data files beside the recordings, and the methods run whole, in preset
reference. parity.py runs these checks with all others, and says what an outcome is;
tests/test_nld.py and tests/test_cipher.py run them on one model.

A step of cipher is the next one's input, so that rounding grows from step to step: on smollm2-135m
a double precision run leaves the recording at the very steps where this one does, and this one is
ten times closer to it than the recorded arithmetic is. So the first three vectors are held to a
tolerance, and what comes later to the drift, the largest relative deviation of the vectors' norms
so far: a nearest row that differs is a near-tie when the two cosines are closer than twice that,
and logits of the answer that differ are explained when their relative deviation is below it.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from parity import LOGIT_TOLERANCE, Outcome, Pair, Run, check_runs

import kvcomm
from kvcomm._core import Workspace
from kvcomm.methods import Bench
from kvcomm.methods.cipher import Cipher, Written, splice
from kvcomm.methods.nld import NLD
from kvcomm.plan import Plan, Prompts
from kvcomm.tasks import find

N_STRICT = 3  # steps of cipher before rounding has grown; as many as have components recorded
NORM_TOLERANCE = 1e-3  # relative, of these
COMPONENT_TOLERANCE = 2e-4  # absolute, of these


def bench_of(
    model: kvcomm.Model, data: dict[str, Any], recordings: Path, run: dict[str, Any]
) -> Bench:
    """One recorded run's record, as the only item of a bench."""
    task, recorded = find(run["task"]), data["items"][run["task"]]
    file = recordings.parent / Path(recorded["file"]).relative_to("shared")
    example = task.load(file)[run["record_index"]]
    bench = Bench(
        kvcomm.Sender(model),
        kvcomm.Receiver(model),
        preset="reference",
        max_new_tokens=recorded["max_new_tokens"],
    )
    bench.prompts = Prompts(bench, task, Plan((), (example,), {}), recorded["max_input_length"])
    bench.items = [bench.prompts.item(0, example)]
    return bench


def check_ids(case: str, found: Any, recorded: list[int]) -> Outcome:
    """Ids of a prompt, which have to be equal."""
    equal = [int(i) for i in found] == recorded
    note = "" if equal else f"{len(found)} ids, recorded {len(recorded)}"
    return Outcome("prompts", case, equal, note=note)


def published_nld(
    model: kvcomm.Model, data: dict[str, Any], recordings: Path, limit: int | None = None
) -> Iterator[Outcome]:
    """Prompts of both phases and the text passed on; greedy ids and first logits of all three
    answers."""
    recorded = data["nld"]
    method = NLD(recorded["phase1"], recorded["sender_aware"])
    pair = Pair(model, model)
    for run in recorded["runs"][:limit]:
        case = f"nld {run['task']} record {run['record_index']}"
        bench = bench_of(model, data, recordings, run)
        (outcome,) = method.run(bench, bench.items)
        for part, ids in zip(("sender", "receiver", "final"), outcome.prompts, strict=True):
            yield check_ids(f"{case} {part}", ids, run[f"{part}_prompt"]["ids"])
        text = model.tokenizer.decode(run["sender_answer"]["ids"])
        yield Outcome("texts", case, outcome.message == text, note=repr(outcome.message))
        phases = [
            Run(f"{case} {part}", run[f"{part}_answer"], run[f"{part}_prompt"]["ids"], None)
            for part in ("sender", "receiver")
        ]
        yield from check_runs(pair, phases, recorded["phase1"])
        last = [Run(f"{case} final", run, run["final_prompt"]["ids"], None)]
        yield from check_runs(pair, last, bench.max_new_tokens)
        equal = list(outcome.token_ids) == run["ids"]
        yield Outcome("greedy ids", f"{case} method", equal)


class _Watched(Cipher):
    """Keeps what was written, the sender's message first."""

    @cached_property
    def written(self) -> list[list[Written]]:
        return []

    def write(self, *arguments: Any) -> list[Written]:
        self.written.append(super().write(*arguments))
        return self.written[-1]


def published_cipher(
    model: kvcomm.Model, data: dict[str, Any], recordings: Path, limit: int | None = None
) -> Iterator[Outcome]:
    """Prompts of both phases, vectors and nearest rows of all steps, first logits and greedy ids
    of the answer."""
    recorded = data["cipher"]
    for run in recorded["runs"][:limit]:
        case = f"cipher {run['task']} record {run['record_index']}"
        (temperature,) = set(run["temperature_used"])
        method = _Watched(recorded["phase1"], recorded["sender_aware"], temperature=temperature)
        bench = bench_of(model, data, recordings, run)
        (outcome,) = method.run(bench, bench.items)
        sender, receiver, *pieces = outcome.prompts
        yield check_ids(f"{case} sender", sender, run["sender_prompt_ids"])
        yield check_ids(f"{case} receiver", receiver, run["receiver_prompt_ids"])
        whole = [*pieces[0], run["self_id"], *pieces[1], run["others_id"], *pieces[2]]
        yield check_ids(f"{case} final", whole, run["final_prompt_ids_with_sentinels"])
        (sent,), (own,) = method.written
        for part, written in (("sender", sent), ("receiver", own)):
            yield from _check_written(model, f"{case} {part}", run, part, written)
        drift = max(_apart(sent, run, "sender").max(), _apart(own, run, "receiver").max())
        logits = splice(bench, [pieces], [[own.message, sent.message]]).logits[0]
        ids, values = zip(*run["top20"], strict=True)
        error = float(np.abs(logits[list(ids)] - np.array(values)).max())
        explained = error <= drift * max(values)
        note = f"relative {error / max(values):.2g}, norms of vectors up to {drift:.2g}"
        equal = error <= LOGIT_TOLERANCE
        yield Outcome("first logits", case, equal, error, note, explained)
        equal = list(outcome.token_ids) == run["ids"]
        note = "" if equal else f"{list(outcome.token_ids)}, recorded {run['ids']}"
        yield Outcome("greedy ids", case, equal, note=note)


def _apart(written: Written, run: dict[str, Any], part: str) -> np.ndarray:
    """Relative deviation of every vector's norm."""
    recorded = np.array(run["vector_norms"][part])
    return np.abs(np.linalg.norm(written.vectors, axis=1)[: len(recorded)] / recorded - 1)


def _check_written(
    model: kvcomm.Model, case: str, run: dict[str, Any], part: str, written: Written
) -> Iterator[Outcome]:
    n = run["embedding_steps"][part]
    found = len(written.message)
    yield Outcome("steps", case, found == n, note="" if found == n else f"{found}, recorded {n}")
    first, apart = np.array(run["vector_first4"][part]), _apart(written, run, part)
    error = float(apart[:N_STRICT].max())
    yield Outcome("vector norms", case, error <= NORM_TOLERANCE, error)
    error = float(np.abs(written.vectors[: len(first), :4] - first).max())
    yield Outcome("vector components", case, error <= COMPONENT_TOLERANCE, error)
    nearest, recorded = written.nearest.tolist(), run["nearest_ids"][part]
    if nearest == recorded:
        yield Outcome("nearest rows", case, True)
        return
    step = next(n for n, (a, b) in enumerate(zip(nearest, recorded, strict=True)) if a != b)
    rows = Workspace(model.core).embed([nearest[step], recorded[step]])
    cosines = rows @ written.vectors[step] / np.linalg.norm(rows, axis=1)
    gap = float(cosines[0] - cosines[1]) / float(np.linalg.norm(written.vectors[step]))
    drift = float(apart[: step + 1].max())
    note = (
        f"step {step}: {nearest[step]}, recorded {recorded[step]}; cosines {gap:.2g} apart, "
        f"norms up to {drift:.2g}"
    )
    yield Outcome("nearest rows", case, False, gap, note, gap < 2 * drift)
