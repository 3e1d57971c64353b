"""Questions that have been prefilled, and what can be done from there: answer, and score answers.

Owns the step from sessions that stand behind their prompts to `Answer`s and `Score`s. How the
prompts got there is the caller's: agents.py with packets, a method of methods/ with hidden states
changed on the way.
"""

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvcomm._core import Session, Workspace
from kvcomm.generate import Decoding, Generation, Sampling, log_likelihoods
from kvcomm.packet import Packet
from kvcomm.turns import Answer, Score, Stats

if TYPE_CHECKING:
    from kvcomm.agents import Receiver


class Prefilled:
    """Prompts of a batch that have run; `answer` once, `score` before or after it.

    Parameters
    ----------
    receiver
        Whose model the sessions are of.
    workspace
        That ran the prompts; what it has counted goes to the receiver's counts.
    sessions, logits
        Per row a session with every layer behind the prompt, and float32 [n, vocab_size] the logits
        of the next token.
    stop_ids
        Per row, ids that end an answer; None: the model's.
    packets
        Per row what the session was given, for the account that an answer gives.
    started
        `time.perf_counter()` at the beginning of the call, which times count from; None: now.
    """

    def __init__(
        self,
        receiver: "Receiver",
        workspace: Workspace,
        sessions: Sequence[Session],
        logits: NDArray[np.float32],
        *,
        stop_ids: Sequence[frozenset[int]] | None = None,
        packets: Sequence[tuple[Packet, ...]] | None = None,
        started: float | None = None,
    ) -> None:
        self._model, self._workspace = receiver.model, workspace
        self._sessions, self.logits = list(sessions), logits
        self._tally = receiver.tally
        usual = frozenset(self._model.stop_ids)
        self._stop_ids = [usual] * len(self._sessions) if stop_ids is None else list(stop_ids)
        self._packets = [()] * len(self._sessions) if packets is None else list(packets)
        self._started = time.perf_counter() if started is None else started
        self._n_prompt = [session.lengths[0] for session in self._sessions]
        self._counted: dict[str, float] = {}
        self._count()

    def _count(self) -> None:
        now = self._workspace.counts
        self._tally.add({name: now[name] - self._counted.get(name, 0) for name in now})
        self._counted = now

    def decode(
        self,
        max_new_tokens: int,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        stop: str | Sequence[str] = (),
    ) -> Decoding:
        """The decode loop, to be iterated; its pieces are (row, text)."""
        return Decoding(
            self._workspace,
            self._sessions,
            self.logits,
            tokenizer=self._model.tokenizer,
            stop_ids=self._stop_ids,
            stop=stop,
            max_new_tokens=max_new_tokens,
            max_position=self._model.max_position,
            sampling=sampling,
            started=self._started,
        )

    def answer(
        self,
        max_new_tokens: int,
        sampling: Sampling = Sampling(),  # noqa: B008
        stop: str | Sequence[str] = (),
    ) -> list[Answer]:
        """Decode all rows; as `Receiver.answer`."""
        decoding = self.decode(max_new_tokens, sampling, stop)
        for _ in decoding:
            pass
        return self.answers(decoding)

    def answers(self, decoding: Decoding) -> list[Answer]:
        """What a decode loop that has ended has found."""
        self._count()
        rows = zip(decoding.results, self._packets, self._n_prompt, strict=True)
        return [self._answer(found, packets, n) for found, packets, n in rows]

    def _answer(self, found: Generation, packets: tuple[Packet, ...], n_prompt: int) -> Answer:
        stats = Stats(
            receiver_tokens=n_prompt,
            context_tokens=sum(p.context_len for p in packets),
            message_bytes=sum(p.nbytes for p in packets),
            cut_tokens=sum(p.cut_tokens for p in packets),
            forwarded_tokens=n_prompt + max(0, len(found.ids) - 1),
            first_token_seconds=found.first_token_seconds,
            total_seconds=found.total_seconds,
            call_tokens=int(self._counted["tokens"]),
            call_flops=self._counted["linear_flops"] + self._counted["attention_flops"],
        )
        return Answer(found.text, found.ids, found.stop_reason, stats)

    def pieces(self, decoding: Decoding) -> Iterator[str]:
        """The text of a decode loop over one row, piece by piece."""
        for _, piece in decoding:
            yield piece
        self._count()

    def follow(
        self, answers: Sequence[NDArray[np.int32] | None]
    ) -> Iterator[NDArray[np.float32] | None]:
        """Raw logits at every token of given answers, each given the tokens before it.

        Parameters
        ----------
        answers
            Per row ids [n], n >= 1, or None for a row that is passed over.

        Yields
        ------
        float32 [n, vocab_size] per row, one row at a time; None where there is no answer.
        """
        for row, (session, ids) in enumerate(zip(self._sessions, answers, strict=True)):
            if ids is None:
                yield None
                continue
            session.truncate(self._n_prompt[row])
            found = self.logits[row][None]
            if len(ids) > 1:
                rest, _ = self._workspace.forward(
                    [session], [ids[:-1]], output="logits", outputs="all"
                )
                found = np.concatenate([found, rest])
            self._count()
            yield found

    def score(self, answers: Sequence[Sequence[NDArray[np.int32]]]) -> list[Score]:
        """Likelihood of given answers, teacher-forced behind the prompt.

        Parameters
        ----------
        answers
            Per row alternative answers, ids [m], m >= 1; the likeliest counts.

        Raises
        ------
        NumericError
            A likelihood that is not a number.
        """
        for session, n_prompt in zip(self._sessions, self._n_prompt, strict=True):
            session.truncate(n_prompt)
        found = log_likelihoods(self._workspace, self._sessions, self.logits, answers)
        self._count()
        scores = []
        for likelihoods, ids in zip(found, answers, strict=True):
            totals = [float(-row.sum()) for row in likelihoods]
            best = int(np.argmin(totals))
            scores.append(Score(totals[best], -likelihoods[best], tuple(ids[best].tolist()), best))
        return scores
