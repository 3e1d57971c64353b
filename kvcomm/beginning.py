"""What prompts of one batch begin with alike: found, run once, and copied to each.

Prompts for one model start with the same words: a chat template's head, an instruction, examples.
Behind the same keys these give the same K and V, to the last bit, so they are run in a session of
their own and every prompt goes on from a copy of its tail. Owns that, and whose account it is on;
who may share (the same packets, no look-ahead) is the caller's to know.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvcomm import cost
from kvcomm._core import KV, Session, Workspace
from kvcomm.cost import Work
from kvcomm.shapes import Shape

Ids = NDArray[np.int32]
_Made = TypeVar("_Made")

#: Fewer tokens saved do not pay for a pass of their own, for which all weights are read.
LEAST_SAVED = 64


@dataclass(frozen=True, eq=False)
class Beginning:
    """The first n tokens of some prompts, run.

    tail: their K and V. payer: the first of these prompts, by its place in the batch, whose account
    they are on.
    """

    n: int
    tail: KV
    payer: int

    def begin(self, session: Session, n_prompt: int) -> None:
        """Put a new session, with what it is given, behind these tokens of a longer prompt."""
        session.reserve(n_prompt)
        session.resume(self.tail)


def once(prompts: Sequence[Ids], make: Callable[[list[Ids]], Sequence[_Made]]) -> list[_Made]:
    """What is made of each prompt, ids [n]; of equal ones once, as of two questions' one text."""
    distinct = {ids.tobytes(): ids for ids in prompts}
    found = dict(zip(distinct, make(list(distinct.values())), strict=True))
    return [found[ids.tobytes()] for ids in prompts]


def shared_length(prompts: Sequence[Ids]) -> int:
    """How many first tokens to run once for all prompts, ids [n] each; 0 where it does not pay.

    At least one token of every prompt is left to be run.
    """
    first = prompts[0]
    n = min(map(len, prompts)) - 1
    for other in prompts[1:]:
        unlike = np.flatnonzero(first[:n] != other[:n])
        n = int(unlike[0]) if unlike.size else n
    return n if n * (len(prompts) - 1) >= LEAST_SAVED else 0


def beginnings(
    workspace: Workspace,
    prompts: Sequence[Ids],
    groups: Sequence[Hashable],
    open_session: Callable[[int], Session],
    layers: tuple[int, int] | None = None,
) -> list[Beginning | None]:
    """Per prompt the beginning that it shares, once that has run; None: it runs whole.

    Parameters
    ----------
    groups
        Per prompt what it stands behind; prompts of one group may share, None is no group.
    open_session
        A new session for the prompt at this place, with what it is given.
    layers
        To run, as for `Workspace.forward`; None: all.
    """
    members: dict[Hashable, list[int]] = {}
    for number, group in enumerate(groups):
        if group is not None:
            members.setdefault(group, []).append(number)
    lengths = {key: shared_length([prompts[n] for n in some]) for key, some in members.items()}
    shared = [(some, lengths[key]) for key, some in members.items() if lengths[key]]
    sessions = [open_session(some[0]) for some, _ in shared]
    for session, (_, n) in zip(sessions, shared, strict=True):
        session.reserve(n)
    if shared:
        heads = [prompts[some[0]][:n] for some, n in shared]
        workspace.forward(sessions, heads, layers=layers)
    found: list[Beginning | None] = [None] * len(prompts)
    for session, (some, n) in zip(sessions, shared, strict=True):
        beginning = Beginning(n, session.freeze(), some[0])
        for number in some:
            found[number] = beginning
    return found


def account(
    shape: Shape, n: int, beginning: Beginning | None, number: int, **run: Any
) -> tuple[Work, int]:
    """The work that is on the account of the n tokens of prompt `number`, and how many of them are
    on another's; run: how it ran, as for `cost.forward`."""
    if beginning is None:
        return cost.forward(shape, n, **run), 0
    work = cost.forward(shape, n - beginning.n, before=beginning.n, **run)
    if number != beginning.payer:
        return work, beginning.n
    first = {name: run[name] for name in ("given", "layers") if name in run}
    return work + cost.forward(shape, beginning.n, **first), 0
