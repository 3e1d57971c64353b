"""Tokens out of sessions: the decode loop over a batch, and log-likelihoods of given tokens.

Owns stop rules (EOS ids, stop strings, length), sampling per row and streaming in whole
characters. Does not know senders, packets or presets: agents.py prepares the sessions. No row's
result depends on the other rows of its batch.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from kvcomm._core import Sampler, Session, Workspace
from kvcomm.errors import NumericError

if TYPE_CHECKING:
    from kvcomm.tokenizer import Tokenizer

StopReason = Literal["eos", "stop", "length", "limit"]


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
class Generation:
    """What one row produced.

    ids holds every generated token, a stop id included; text leaves the stop id out and ends
    before a stop string. stop_reason: "eos", "stop" (a stop string), "length" (max_new_tokens) or
    "limit" (the model's last position). Times are seconds since `Decoding.started`; first_token is
    None when there is no token.
    """

    ids: tuple[int, ...]
    text: str
    stop_reason: StopReason
    first_token_seconds: float | None
    total_seconds: float


class _Row:
    """One row while it runs."""

    def __init__(
        self,
        session: Session,
        sampler: Sampler,
        stop_ids: frozenset[int],
        stop: tuple[str, ...],
        tokenizer: "Tokenizer | None",
        room: int,
        full: StopReason,
    ) -> None:
        self.session = session
        self.sampler = sampler
        self.stop_ids = stop_ids
        self.stop = stop
        self.stream = tokenizer.stream() if tokenizer is not None else None
        self.room = room
        self.full = full
        self.ids: list[int] = []
        self.text = ""
        self.n_shown = 0  # characters of text handed to the caller
        self.reason: StopReason | None = full if room == 0 else None

    def take(self, token: int) -> None:
        """Adds a token and applies the stop rules."""
        self.ids.append(token)
        if token in self.stop_ids:
            self.reason = "eos"
        elif self.stream is not None:
            self._extend(self.stream.push(token))
        if self.reason is None and len(self.ids) == self.room:
            self.reason = self.full
        if self.reason is not None and self.reason != "stop" and self.stream is not None:
            self._extend(self.stream.finish())

    def _extend(self, piece: str) -> None:
        longest = max(map(len, self.stop), default=0)
        search_from = max(0, len(self.text) - longest + 1)
        self.text += piece
        found = [at for at in (self.text.find(s, search_from) for s in self.stop) if at >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.reason = "stop"

    def show(self) -> str:
        """New text that no stop string can take back any more."""
        end = len(self.text)
        if self.reason is None:
            end -= max((_overlap(self.text, s) for s in self.stop), default=0)
        piece = self.text[self.n_shown : end]
        self.n_shown = max(self.n_shown, end)
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends in."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0


class Decoding:
    """The decode loop over a batch of sessions.

    Iterating runs it and yields (row, text) pieces in whole characters, as they come; finished
    rows leave the batch. Afterwards `results` has a `Generation` per row.

    Parameters
    ----------
    sessions, logits
        Per row a session that stands behind its prompt, and float32 [n, vocab] the logits of the
        next token.
    tokenizer
        None: there is no text, and no stop strings.
    stop_ids
        Per row, the ids that end it.
    max_position
        Positions that the model has; a row stops when the next token would need one more.

    Raises
    ------
    ValueError
        A negative max_new_tokens, an empty stop string, sampling values out of range.
    """

    def __init__(
        self,
        workspace: Workspace,
        sessions: Sequence[Session],
        logits: NDArray[np.float32],
        *,
        tokenizer: "Tokenizer | None",
        stop_ids: Sequence[frozenset[int]],
        stop: str | Sequence[str],
        max_new_tokens: int,
        max_position: int,
        sampling: Sampling,
        started: float | None = None,
    ) -> None:
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int | np.integer):
            raise TypeError(f"max_new_tokens: expected an integer, found {max_new_tokens!r}")
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens: {max_new_tokens} is negative")
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(string, str) for string in strings):
            raise TypeError(f"stop: expected strings, found {stop!r}")
        if "" in strings:
            raise ValueError("stop: an empty string would stop everything")
        if strings and tokenizer is None:
            raise ValueError("stop: strings need a tokenizer, which the model lacks")
        self._workspace = workspace
        self._logits = logits
        self._greedy = sampling.temperature == 0
        self._started = time.perf_counter() if started is None else started
        self._rows = []
        for session, ids in zip(sessions, stop_ids, strict=True):
            left = max_position - session.next_position + 1
            self._rows.append(
                _Row(
                    session,
                    sampling.sampler(),
                    ids,
                    strings,
                    tokenizer,
                    min(max_new_tokens, left),
                    "length" if max_new_tokens <= left else "limit",
                )
            )
        self._first = [None] * len(self._rows)
        self._total = [0.0] * len(self._rows)

    def __iter__(self) -> Iterator[tuple[int, str]]:
        active = [number for number, row in enumerate(self._rows) if row.reason is None]
        tokens = [self._rows[number].sampler.sample(self._logits[number]) for number in active]
        while active:
            now = time.perf_counter() - self._started
            for number, token in zip(active, tokens, strict=True):
                row = self._rows[number]
                row.take(token)
                if self._first[number] is None:
                    self._first[number] = now
                self._total[number] = now
                piece = row.show()
                if piece:
                    yield number, piece
            active = [number for number in active if self._rows[number].reason is None]
            tokens = self._next([self._rows[number] for number in active]) if active else []

    def _next(self, rows: Sequence[_Row]) -> list[int]:
        out, _ = self._workspace.forward(
            [row.session for row in rows],
            [row.ids[-1:] for row in rows],
            output="argmax" if self._greedy else "logits",
        )
        if self._greedy:
            return [int(token) for token in out]
        return [row.sampler.sample(logits) for row, logits in zip(rows, out, strict=True)]

    @property
    def results(self) -> list[Generation]:
        """One per row, once the loop has run."""
        return [
            Generation(
                ids=tuple(row.ids),
                text=row.text,
                stop_reason=row.reason,
                first_token_seconds=first,
                total_seconds=total,
            )
            for row, first, total in zip(self._rows, self._first, self._total, strict=True)
        ]


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
