"""How near a method's next tokens come to skyline's, on skyline's own answer.

Owns the two measures, and what of skyline they are held against. Neither needs a gold answer:
skyline answers greedily, and a method is asked at each of those tokens, given the ones before, what
it would have said. Running the models is the methods'.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: Most tokens of an answer that are compared; a vocabulary's worth of numbers is held for each.
MOST_TOKENS = 32


@dataclass(frozen=True, eq=False)
class Reference:
    """Skyline's greedy answer.

    ids: [n]. log_probs: of the whole vocabulary at each of its tokens, [n, vocab_size].
    """

    ids: NDArray[np.int32]
    log_probs: NDArray[np.float32]

    @classmethod
    def of(cls, ids: NDArray[np.int32], logits: NDArray[np.float32]) -> "Reference":
        """From raw logits [n, vocab_size]."""
        return cls(ids, log_softmax(logits))


@dataclass(frozen=True)
class Agreement:
    """Over the n tokens of a skyline's answer.

    agreement: share that the method ranks first as well. kl: divergence of the method's next-token
    distribution from skyline's, KL(skyline || method), in nats, mean.
    """

    agreement: float
    kl: float


def compare(reference: Reference, logits: NDArray[np.float32]) -> Agreement:
    """A method's raw logits [n, vocab_size] at the same tokens, held against skyline's."""
    own = log_softmax(logits)
    gaps = np.exp(reference.log_probs) * (reference.log_probs - own)
    return Agreement(
        agreement=float((own.argmax(axis=1) == reference.ids).mean()),
        kl=float(gaps.sum(axis=1, dtype=np.float64).mean()),
    )


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Row by row, [n, vocab_size]."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    total = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
    return shifted - np.log(total).astype(np.float32)
