"""Tokens out of sessions: the decode loop over a batch, and log-likelihoods of given tokens.

Owns stop rules (EOS ids, stop strings, length), sampling per row, streaming in whole characters,
and which rows run together: a finished row leaves the batch at once and the next prompt that waits
takes its place, in the same forward call as the tokens of the others. Does not know senders,
packets or presets: handover.py prepares the sessions. No row's result depends on other rows.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from kvcomm._core import Sampler, Session, Workspace
from kvcomm.errors import NumericError

if TYPE_CHECKING:
    from kvcomm.model import Model
    from kvcomm.tokenizer import Tokenizer

StopReason = Literal["eos", "stop", "length", "limit"]

#: Most prompt tokens that join the decoding rows in one forward call, unless one prompt has more:
#: enough for products at full speed, few enough for one block of the core, which reads the weights
#: once for both.
JOINING_TOKENS = 256


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. The default is pure greedy: the best logit, ties to the lowest
    id, with no penalty; what a model's generation config says about sampling is not applied."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def sampler(self) -> Sampler:
        """A fresh generator; values out of range are a ValueError."""
        return Sampler(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed
        )


@dataclass(frozen=True)
class Rules:
    """How an answer is written: most tokens, strings that end it, and how tokens are drawn.

    Raises
    ------
    TypeError
        max_new_tokens that is no integer, stop strings that are none.
    ValueError
        A negative max_new_tokens, an empty stop string, sampling values out of range.
    """

    max_new_tokens: int
    stop: str | Sequence[str] = ()
    sampling: Sampling = Sampling()

    def __post_init__(self) -> None:
        n, stop = self.max_new_tokens, self.stop
        if isinstance(n, bool) or not isinstance(n, int | np.integer):
            raise TypeError(f"max_new_tokens: expected an integer, found {n!r}")
        if n < 0:
            raise ValueError(f"max_new_tokens: {n} is negative")
        if not all(isinstance(string, str) for string in self.strings):
            raise TypeError(f"stop: expected strings, found {stop!r}")
        if "" in self.strings:
            raise ValueError("stop: an empty string would stop everything")
        self.sampling.sampler()

    @property
    def strings(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


@dataclass(frozen=True, eq=False)
class Start:
    """Where a row begins.

    ids: int32 [n], n >= 1, that its session has to run first, with `slack` as for
    `Workspace.forward`; None: the prompt has run, and logits, float32 [vocab_size], are those of
    the next token. stop_ids end the row.
    """

    session: Session
    stop_ids: frozenset[int]
    ids: NDArray[np.int32] | None = None
    slack: Sequence[int] | None = None
    logits: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Generation:
    """What one row produced.

    ids holds every generated token, a stop id included; text leaves the stop id out and ends
    before a stop string. stop_reason: "eos", "stop" (a stop string), "length" (max_new_tokens) or
    "limit" (the model's last position). Times are seconds since the beginning of the call: of its
    joining the batch (0 for a prompt that had run; None for one that did not, as no token was
    asked for), of its first token (None when there is none) and of its last.
    """

    ids: tuple[int, ...]
    text: str
    stop_reason: StopReason
    joined_seconds: float | None
    first_token_seconds: float | None
    total_seconds: float


class _Row:
    """One row, from when it joins.

    feed: what its session runs next. stream: turns tokens into text as they come, where somebody
    reads along or a stop string is looked for; otherwise the text is made at the end.
    """

    def __init__(
        self, number: int, start: Start, rules: Rules, model: "Model", read_along: bool
    ) -> None:
        self.number = number
        self.session: Session | None = start.session
        self.stop_ids = start.stop_ids
        self.feed: Sequence[int] | NDArray[np.int32] = () if start.ids is None else start.ids
        self.slack = start.slack
        self.sampler = rules.sampling.sampler()
        self.strings = rules.strings
        self.tokenizer: Tokenizer | None = model.tokenizer
        self.stream = None
        if self.tokenizer is not None and (read_along or self.strings):
            self.stream = self.tokenizer.stream()
        left = model.max_position - start.session.next_position - len(self.feed) + 1
        self.room = min(rules.max_new_tokens, left)
        self.full: StopReason = "length" if rules.max_new_tokens <= left else "limit"
        self.ids: list[int] = []
        self.text = ""
        self.n_shown = 0  # characters of text handed to the caller
        self.reason: StopReason | None = self.full if self.room == 0 else None
        self.logits = start.logits
        self.joined = None if start.logits is None else 0.0
        self.first: float | None = None
        self.last = 0.0

    def take(self, token: int, now: float) -> None:
        """Adds a token and applies the stop rules."""
        self.ids.append(token)
        self.feed, self.slack, self.logits = (token,), None, None
        self.last = now
        if self.first is None:
            self.first = now
        if token in self.stop_ids:
            self.reason = "eos"
        elif self.stream is not None:
            self._extend(self.stream.push(token))
        if self.reason is None and len(self.ids) == self.room:
            self.reason = self.full
        if self.reason is not None:
            self._finish()

    def _finish(self) -> None:
        self.session = None  # its memory is free for the next row
        if self.stream is not None:
            if self.reason != "stop":
                self._extend(self.stream.finish())
        elif self.tokenizer is not None:
            self.text = _text(self.tokenizer, self.ids[:-1] if self.reason == "eos" else self.ids)

    def _extend(self, piece: str) -> None:
        longest = max(map(len, self.strings), default=0)
        search_from = max(0, len(self.text) - longest + 1)
        self.text += piece
        found = [at for at in (self.text.find(s, search_from) for s in self.strings) if at >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.reason = "stop"

    def show(self) -> str:
        """New text that no stop string can take back any more."""
        end = len(self.text)
        if self.reason is None:
            end -= max((_overlap(self.text, s) for s in self.strings), default=0)
        piece = self.text[self.n_shown : end]
        self.n_shown = max(self.n_shown, end)
        return piece

    def result(self) -> Generation:
        return Generation(
            tuple(self.ids), self.text, self.reason, self.joined, self.first, self.last
        )


def _text(tokenizer: "Tokenizer", ids: Sequence[int]) -> str:
    """The text of ids, as a stream of them gives it."""
    text = tokenizer.decode(ids)
    if "\ufffd" in text:  # where bytes are cut off, a stream may mark fewer of them
        stream = tokenizer.stream()
        text = "".join([*map(stream.push, ids), stream.finish()])
    return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends in."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0


class Decoding:
    """The decode loop over a batch of sessions.

    `run` runs it; iterating does, too, and yields (row, text) pieces in whole characters as they
    come. Afterwards `results` has a `Generation` per row, in the order of the starts.

    Parameters
    ----------
    workspace
        Of the model.
    starts
        Where rows begin; taken from as there is room, so that their sessions may be opened late.
    model
        Its tokenizer (None: there is no text) and its positions; a row stops when the next token
        would need one more than it has.
    batch_size
        Most rows at a time; None: all.
    started
        `time.perf_counter()` that times count from; None: now.

    Raises
    ------
    ValueError
        Stop strings for a model without a tokenizer, a batch_size below 1.
    """

    def __init__(
        self,
        workspace: Workspace,
        starts: Iterable[Start],
        rules: Rules,
        model: "Model",
        *,
        batch_size: int | None = None,
        started: float | None = None,
    ) -> None:
        if rules.strings and model.tokenizer is None:
            raise ValueError("stop: strings need a tokenizer, which the model lacks")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size: expected 1 or more, found {batch_size}")
        self._workspace = workspace
        self._starts = iter(starts)
        self._next = next(self._starts, None)
        self._rules, self._model = rules, model
        self._batch_size = batch_size
        self._greedy = rules.sampling.temperature == 0
        self._started = time.perf_counter() if started is None else started
        self._rows: list[_Row] = []

    def run(self) -> list[Generation]:
        """All rows to their ends."""
        for _ in self._loop(read_along=False):
            pass
        return self.results

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return self._loop(read_along=True)

    @property
    def ran(self) -> bool:
        """Whether any prompt ran: none does when no token is asked for."""
        return self._rules.max_new_tokens > 0

    @property
    def results(self) -> list[Generation]:
        """One per row, once the loop has run."""
        return [row.result() for row in self._rows]

    def _loop(self, read_along: bool) -> Iterator[tuple[int, str]]:
        running: list[_Row] = []
        while running or self._next is not None:
            fresh = self._join(len(running), read_along)
            ready = [row for row in fresh if row.logits is not None]
            tokens = [row.sampler.sample(row.logits) for row in ready]
            yield from self._take(ready, tokens, read_along)
            running = [row for row in running + fresh if row.reason is None]
            yield from self._take(running, self._step(running), read_along)
            running = [row for row in running if row.reason is None]

    def _join(self, n_running: int, read_along: bool) -> list[_Row]:
        """The rows that the batch has room for now."""
        fresh: list[_Row] = []
        n_tokens = 0
        room = None if self._batch_size is None else self._batch_size - n_running
        while self._next is not None and (room is None or len(fresh) < room):
            n_tokens += 0 if self._next.ids is None else len(self._next.ids)
            if fresh and n_tokens > JOINING_TOKENS:
                break
            row = _Row(len(self._rows), self._next, self._rules, self._model, read_along)
            self._rows.append(row)
            if row.reason is None:
                if row.logits is None:
                    row.joined = self._seconds()
                fresh.append(row)
            self._next = next(self._starts, None)
        return fresh

    def _step(self, rows: Sequence[_Row]) -> list[int]:
        """The next token of every row, in one forward call."""
        if not rows:
            return []
        slack = [row.slack for row in rows]
        out, _ = self._workspace.forward(
            [row.session for row in rows],
            [row.feed for row in rows],
            output="argmax" if self._greedy else "logits",
            slack=slack if any(slack) else None,
        )
        if self._greedy:
            return out.tolist()
        return [row.sampler.sample(logits) for row, logits in zip(rows, out, strict=True)]

    def _take(
        self, rows: Sequence[_Row], tokens: Sequence[int], read_along: bool
    ) -> Iterator[tuple[int, str]]:
        now = self._seconds()
        for row, token in zip(rows, tokens, strict=True):
            row.take(token, now)
            piece = row.show() if read_along else ""
            if piece:
                yield row.number, piece

    def _seconds(self) -> float:
        return time.perf_counter() - self._started


def log_likelihoods(
    workspace: Workspace,
    sessions: Sequence[Session],
    logits: NDArray[np.float32],
    answers: Sequence[Sequence[NDArray[np.int32]]],
) -> list[list[NDArray[np.float64]]]:
    """Log-probability of every token of every answer, teacher-forced after the prompt.

    Each answer runs in a causal call of its own behind the prompt, as decoding would.

    Parameters
    ----------
    sessions, logits
        As for `Decoding`. Afterwards a session holds the prompt and a part of an answer.
    answers
        Per row one or more alternative answers, ids [m] with m >= 1.

    Returns
    -------
    list
        Per row and answer float64 [m], in nats.

    Raises
    ------
    NumericError
        A likelihood that is not a number.
    """
    lengths = [session.lengths[0] for session in sessions]
    results: list[list[NDArray[np.float64]]] = [
        [np.empty(len(answer)) for answer in row] for row in answers
    ]
    for number, row in enumerate(results):
        after_prompt = log_softmax(logits[number])
        for result, answer in zip(row, answers[number], strict=True):
            result[0] = after_prompt[answer[0]]

    for turn in range(max(map(len, answers), default=0)):
        rows = [n for n, row in enumerate(answers) if len(row) > turn and len(row[turn]) > 1]
        if not rows:
            continue
        for number in rows:
            sessions[number].truncate(lengths[number])
        targets = [answers[number][turn][1:] for number in rows]
        out, _ = workspace.forward(
            [sessions[number] for number in rows],
            [answers[number][turn][:-1] for number in rows],
            output="logprob",
            outputs="all",
            targets=targets,
        )
        ends = np.cumsum([len(target) for target in targets])
        for number, piece in zip(rows, np.split(out, ends[:-1]), strict=True):
            results[number][turn][1:] = piece
    for number, row in enumerate(results):
        if not all(np.isfinite(result).all() for result in row):
            raise NumericError(f"log-likelihoods of row {number} are not finite")
    return results


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """[vocab] -> [vocab], in double precision."""
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
