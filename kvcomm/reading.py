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
from kvcomm.beginning import Beginning, account, beginnings
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
    sessions, shared = _run(sender, batch, top, alone) if batch else ([], [])
    seconds = time.perf_counter() - started
    shape = Shape.of(model)
    first = cost.forward(shape, int(alone), layers=(0, top), n_out=1)
    first += cost.forward(shape, int(alone), layers=(top, n_layers))
    packets = []
    for number, (session, full, ids) in enumerate(zip(sessions, contexts, batch, strict=True)):
        work, n_shared = account(shape, len(ids), shared[number], number, layers=(0, top))
        packet = Packet(
            kv=session.freeze(),
            layers=tuple(range(n_layers)),
            context_len=len(ids),
            ids=tuple(ids.tolist()),
            cut_tokens=len(full) - len(ids),
            preset=preset,
            origin=sender.origin,
            stats=Reading(len(ids), n_shared, top, work + first, seconds),
        )
        packets.append(packet.select(layers))
    return packets


def _run(
    sender: "Sender", batch: Sequence[Ids], top: int, alone: bool
) -> tuple[list[Session], list[Beginning | None]]:
    """Sessions that hold the prompts in the layers below `top`, and what they share; alone: the
    first tokens go on above."""
    model = sender.model
    sessions = [new_session(model) for _ in batch]
    if top == 0:
        for session, ids in zip(sessions, batch, strict=True):
            session.set_position(len(ids))
        return sessions, [None] * len(batch)
    workspace = Workspace(model.core)
    shared = beginnings(
        workspace, batch, [0] * len(batch), lambda number: new_session(model), (0, top)
    )
    rest = []
    for session, ids, one in zip(sessions, batch, shared, strict=True):
        if one is not None:
            one.begin(session, len(ids))
        rest.append(ids[session.lengths[0] :])
    workspace.forward(sessions, rest, layers=(0, top))
    if alone:
        states, _ = workspace.forward(
            [new_session(model) for _ in batch],
            [ids[:1] for ids in batch],
            layers=(0, top),
            output="hidden",
        )
        workspace.forward(sessions, [row[None] for row in states], layers=(top, model.n_layers))
    sender.count(workspace)
    return sessions, shared
