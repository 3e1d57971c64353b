"""Questions that have been prefilled, and what can be done from there: answer, and score answers.

Owns the step from sessions that stand behind their prompts to `Answer`s and `Score`s. How the
prompts got there is the caller's: handover.py with packets, a method of methods/ with hidden states
changed on the way.
"""

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvcomm._core import Session, Workspace
from kvcomm.account import Prompt
from kvcomm.generate import Decoding, Rules, Sampling, Start, log_likelihoods
from kvcomm.turns import Answer, Score

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
    prompts
        Per row what its answer's account is to say of the prompt; None: what the session knows.
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
        prompts: Sequence[Prompt] | None = None,
        started: float | None = None,
    ) -> None:
        self._model, self._workspace = receiver.model, workspace
        self._sessions, self.logits = list(sessions), logits
        self._tally = receiver.tally
        usual = frozenset(self._model.stop_ids)
        self._stop_ids = [usual] * len(self._sessions) if stop_ids is None else list(stop_ids)
        if prompts is None:
            prompts = [Prompt.of(self._model, session) for session in self._sessions]
        self._prompts = list(prompts)
        self._started = time.perf_counter() if started is None else started
        self._counted: dict[str, float] = {}
        self._count()

    def _count(self) -> None:
        now = self._workspace.counts
        self._tally.add({name: now[name] - self._counted.get(name, 0) for name in now})
        self._counted = now

    def _rewind(self) -> None:
        """Put every session behind its prompt; whatever was asked before has gone on from there."""
        for session, prompt in zip(self._sessions, self._prompts, strict=True):
            session.truncate(prompt.n)

    def answer(
        self,
        max_new_tokens: int,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        stop: str | Sequence[str] = (),
    ) -> list[Answer]:
        """Decode all rows; as `Receiver.answer`."""
        self._rewind()
        starts = [
            Start(session, stop_ids, logits=logits)
            for session, stop_ids, logits in zip(
                self._sessions, self._stop_ids, self.logits, strict=True
            )
        ]
        rules = Rules(max_new_tokens, stop, sampling)
        found = Decoding(self._workspace, starts, rules, self._model, started=self._started).run()
        self._count()
        return [
            Answer.of(self._model, prompt, one)
            for prompt, one in zip(self._prompts, found, strict=True)
        ]

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
            session.truncate(self._prompts[row].n)
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
        self._rewind()
        found = log_likelihoods(self._workspace, self._sessions, self.logits, answers)
        self._count()
        scores = []
        for likelihoods, ids in zip(found, answers, strict=True):
            totals = [float(-row.sum()) for row in likelihoods]
            best = int(np.argmin(totals))
            scores.append(Score(totals[best], -likelihoods[best], tuple(ids[best].tolist()), best))
        return scores
