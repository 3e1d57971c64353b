"""The account of what answers and readings cost: tokens, FLOPs, bytes and seconds.

Owns what an account holds and how that of one answer is made from its own lengths alone, with the
formulas of cost.py, which count as the core does: so it is exact in any batch, and the accounts of
a call add up to what the core counted. Owns also an agent's tally, which is the core's own count of
all its calls. Measures nothing by itself.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcomm import cost
from kvcomm.cost import Runs, Work
from kvcomm.packet import Packet
from kvcomm.shapes import Shape

if TYPE_CHECKING:
    from kvcomm._core import Session, Workspace
    from kvcomm.generate import Generation
    from kvcomm.model import Model


@dataclass(frozen=True)
class Stats:
    """What one answer cost the receiver, by itself.

    Tokens, FLOPs and bytes are those of this answer whatever else was in its batch, but for what
    several questions begin with alike, which the first of them has on its account. Seconds are wall
    time that it waited for, work for the rest of its batch included: never to be summed.

    Attributes
    ----------
    context_tokens : int
        C, tokens of the senders' prompts; the receiver does not run them again.
    receiver_tokens : int
        Tokens of the receiver's prompt.
    generated_tokens : int
        Tokens of the answer, a stop id included.
    shared_tokens : int
        First tokens of the prompt that ran once for several questions of the call; they are on the
        account of the first of these.
    forwarded_tokens : int
        Tokens that ran for this answer: the prompt without those, and the answer but for its last
        token.
    cut_tokens : int
        Tokens that the senders' prompts lost.
    prefill, decode : Work
        FLOPs of matrix products ("linear") and of attention, as kvc_counts counts them. prefill
        is None where a method of methods/ ran the prompt in a way of its own.
    message_bytes : int
        K and V that the senders handed over.
    kv_bytes : int
        Most K and V that the receiver held for the answer, what it was given included.
    handover_seconds : float
        Merging the packets, where no question before had the same, and handing them over.
    prefill_seconds : float or None
        From when it entered a batch to its first token; None when it has no token.
    decode_seconds : float
        From there to its last token.
    first_token_seconds : float or None
        From the beginning of the call, tokenization and the wait for a place included.
    total_seconds : float
        From the beginning of the call to its last token.
    """

    context_tokens: int
    receiver_tokens: int
    generated_tokens: int
    shared_tokens: int
    forwarded_tokens: int
    cut_tokens: int
    prefill: Work | None
    decode: Work
    message_bytes: int
    kv_bytes: int
    handover_seconds: float
    prefill_seconds: float | None
    decode_seconds: float
    first_token_seconds: float | None
    total_seconds: float

    @property
    def flops(self) -> int | None:
        """Of prefill and decode together."""
        return None if self.prefill is None else (self.prefill + self.decode).flops


@dataclass(frozen=True)
class Reading:
    """What reading a context cost its sender.

    Attributes
    ----------
    tokens, shared_tokens : int
        Of the prompt; the first of them that ran once for several contexts of the call and are on
        the account of another.
    layers : int
        The first so many of the model's layers ran.
    work : Work
        FLOPs, without those of shared tokens.
    seconds : float
        Wall time of the batch that it was read in: not to be summed.
    """

    tokens: int
    shared_tokens: int
    layers: int
    work: Work
    seconds: float


@dataclass(frozen=True, eq=False)
class Prompt:
    """A receiver's prompt, as its account needs it.

    n: tokens. given: per receiver layer the keys given. given_bytes: of these keys and values.
    n_shared: first tokens that another prompt's account has. work: of running the rest. packets:
    what it was asked about. seconds: of the handover.
    """

    n: int
    given: Sequence[Runs]
    given_bytes: int
    n_shared: int = 0
    work: Work | None = None
    packets: tuple[Packet, ...] = ()
    seconds: float = 0.0

    @classmethod
    def of(cls, model: "Model", session: "Session") -> "Prompt":
        """Of a session that stands behind its prompt, however that was run."""
        given = session.given
        token_bytes = model.memory["kv_per_token"] // model.n_layers  # of one layer
        runs = [((-held, held),) if held else () for held in given]
        return cls(session.lengths[0], runs, sum(given) * token_bytes)


def stats(model: "Model", prompt: Prompt, found: "Generation") -> Stats:
    """The account of an answer."""
    ran = found.joined_seconds is not None
    n_new = len(found.ids)
    n_held = prompt.n + max(n_new - 1, 0) if ran else 0
    first = found.first_token_seconds
    return Stats(
        context_tokens=sum(packet.context_len for packet in prompt.packets),
        receiver_tokens=prompt.n,
        generated_tokens=n_new,
        shared_tokens=prompt.n_shared,
        forwarded_tokens=n_held - prompt.n_shared if ran else 0,
        cut_tokens=sum(packet.cut_tokens for packet in prompt.packets),
        prefill=prompt.work if ran else Work(),
        decode=cost.write(Shape.of(model), n_new, prompt.n, prompt.given),
        message_bytes=sum(packet.nbytes for packet in prompt.packets),
        kv_bytes=prompt.given_bytes + n_held * model.memory["kv_per_token"],
        handover_seconds=prompt.seconds,
        prefill_seconds=None if first is None else first - found.joined_seconds,
        decode_seconds=0.0 if first is None else found.total_seconds - first,
        first_token_seconds=first,
        total_seconds=found.total_seconds,
    )


# ---- of all calls --------------------------------------------------------------------------


class Tally:
    """What the core counted in all calls of an agent; may be added to from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {"tokens": 0.0, "linear_flops": 0.0, "attention_flops": 0.0}

    def add(self, counts: Mapping[str, float]) -> None:
        """Add the counts of a workspace, or of a part of its life."""
        with self._lock:
            for name, value in counts.items():
                self._counts[name] += value

    @property
    def counts(self) -> dict[str, float]:
        """{"tokens", "linear_flops", "attention_flops"} so far; see kvc_counts of kvcomm.h."""
        with self._lock:
            return dict(self._counts)


class Counted:
    """An agent that keeps account of what the core did for it.

    Attributes
    ----------
    tally : Tally
        Of all calls; agents that work as one may share it.
    """

    def __init__(self) -> None:
        self.tally = Tally()

    @property
    def counts(self) -> dict[str, float]:
        """Tokens and FLOPs that the core counted in all calls so far."""
        return self.tally.counts

    def count(self, workspace: "Workspace") -> None:
        """Add what a workspace that a method made for itself has counted, once it is done."""
        self.tally.add(workspace.counts)
