"""A sender's prompts read into packets: how deep, what is kept, and what it costs.

Owns the prefill of contexts, which stops in the highest layer that is wanted, and its account.
agents.py says what may be asked; packet.py what a packet is.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from kvcomm import cost, prompts
from kvcomm._core import Session, Workspace
from kvcomm.account import Reading
from kvcomm.handover import new_session
from kvcomm.packet import Packet, Preset, whole_layers
from kvcomm.shapes import Shape

if TYPE_CHECKING:
    from kvcomm.agents import Sender

Ids = NDArray[np.int32]


def fit(ids: Ids, limit: int, cut: Literal["middle"] | None, name: str) -> Ids:
    """A prompt of at most `limit` tokens; one that is longer loses its middle, or is refused."""
    if len(ids) <= limit:
        return ids
    if cut is None:
        raise ValueError(
            f"context has {len(ids)} tokens, sender {name!r} takes {limit}: "
            "shorten it, or ask for cut='middle'"
        )
    return np.asarray(prompts.cut_middle(ids, limit), np.int32)


def read(
    sender: "Sender",
    contexts: Sequence[Ids],
    layers: tuple[int, ...],
    preset: Preset,
    *,
    limit: int,
    cut: Literal["middle"] | None,
) -> list[Packet]:
    """Packets of these layers, untrimmed, of prompts that are cut to `limit` tokens."""
    started = time.perf_counter()
    model, n_layers = sender.model, sender.model.n_layers
    batch = [fit(ids, limit, cut, model.name) for ids in contexts]
    top = max(whole_layers(layers, preset), default=-1) + 1
    # In preset reference the first token is wanted of the layers above, too. It sees itself only:
    # alone it has the states that it has in the context.
    alone = preset == "reference" and top < n_layers
    sessions = _run(sender, batch, top, alone) if batch else []
    seconds = time.perf_counter() - started
    shape = Shape.of(model)
    first = cost.forward(shape, int(alone), layers=(0, top), n_out=1)
    first += cost.forward(shape, int(alone), layers=(top, n_layers))
    return [
        Packet(
            kv=session.freeze(),
            layers=tuple(range(n_layers)),
            context_len=len(ids),
            ids=tuple(ids.tolist()),
            cut_tokens=len(full) - len(ids),
            preset=preset,
            origin=sender.origin,
            stats=Reading(
                len(ids), top, cost.forward(shape, len(ids), layers=(0, top)) + first, seconds
            ),
        ).select(layers)
        for session, full, ids in zip(sessions, contexts, batch, strict=True)
    ]


def _run(sender: "Sender", batch: Sequence[Ids], top: int, alone: bool) -> list[Session]:
    """Sessions that hold the prompts in the layers below `top`; alone: the first tokens above."""
    model = sender.model
    sessions = [new_session(model) for _ in batch]
    if top == 0:
        for session, ids in zip(sessions, batch, strict=True):
            session.set_position(len(ids))
        return sessions
    workspace = Workspace(model.core)
    workspace.forward(sessions, batch, layers=(0, top))
    if alone:
        states, _ = workspace.forward(
            [new_session(model) for _ in batch],
            [ids[:1] for ids in batch],
            layers=(0, top),
            output="hidden",
        )
        workspace.forward(sessions, [row[None] for row in states], layers=(top, model.n_layers))
    sender.count(workspace)
    return sessions
