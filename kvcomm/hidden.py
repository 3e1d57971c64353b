"""Prompts that stop between two layers: the hidden states there, read out.

Owns what the methods that pass or change hidden states (ac, prepend_hidden, token_importance) have
in common. What becomes of the states is theirs; they go on with `Workspace.forward` from the layer
where these stopped, in the same sessions.

    layer of n_layers      what enters it
    0                      embeddings
    1 .. n_layers - 1      what left the layer before
    n_layers               what the head gets: the final states, normalised
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvcomm._core import Session, Workspace
from kvcomm.agents import Sender
from kvcomm.handover import new_session

if TYPE_CHECKING:
    from kvcomm.model import Model

Ids = NDArray[np.int32]
States = NDArray[np.float32]


def open_sessions(model: "Model", n: int) -> list[Session]:
    """New timelines of a model, at position 0."""
    return [new_session(model) for _ in range(n)]


def check_layer(what: str, layer: int, last: int) -> None:
    """Refuse a layer that is not in 0 .. last; negative ones do not count from the end."""
    if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer <= last:
        raise ValueError(f"{what}: expected a layer in 0 .. {last}, found {layer!r}")


def entering(
    workspace: Workspace,
    sessions: Sequence[Session],
    prompts: Sequence[Ids],
    layer: int,
    n_layers: int,
    *,
    last: bool = False,
) -> list[States]:
    """Run prompts up to a layer; per row float32 [n, dim] that enters it.

    Parameters
    ----------
    sessions, prompts
        Per row a session and ids [n]. Afterwards the session holds the prompt in the layers below.
    last
        Only the last token's states, [1, dim].
    """
    if layer == 0:
        return [workspace.embed(ids[-1:] if last else ids) for ids in prompts]
    states, _ = workspace.forward(
        sessions,
        prompts,
        layers=(0, layer),
        output="normed" if layer == n_layers else "hidden",
        outputs="last" if last else "all",
    )
    ends = np.cumsum([1 if last else len(ids) for ids in prompts])
    return np.split(states, ends[:-1])


def read(sender: Sender, contexts: Sequence[Ids], layer: int, *, last: bool) -> list[States]:
    """What a sender hands over of its contexts: states that enter a layer, as of `entering`."""
    model = sender.model
    workspace = Workspace(model.core)
    sessions = open_sessions(model, len(contexts))
    states = entering(workspace, sessions, contexts, layer, model.n_layers, last=last)
    sender.count(workspace)
    return states
