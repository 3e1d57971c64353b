"""The attention mass with and without the first context token, from one pass of the question.

Owns that pass. A pass sums the mass one way only. So that not all of it runs twice, the question
goes from layer to layer, and only what a layer's mass depends on, queries, keys and attention, is
done a second time, in a second session; no layer's output and MLP is. What `Receiver.mass` gives,
to the last bit.

    states entering layer l  ->  session one: the whole layer, mass of all context tokens
                             ->  session two: no output,       mass without the first token
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvcomm.agents import Call

if TYPE_CHECKING:
    from kvcomm.agents import Receiver
    from kvcomm.turns import Packets, Question

Mass = NDArray[np.float64]


def both_masses(
    receiver: "Receiver", question: "Question", packets: "Packets", **options: Any
) -> tuple[Mass, Mass]:
    """Mass of the whole context and of all but its first token, float64 [n_layers, n_heads] each.

    Parameters and errors as for `Receiver.mass`, of one question.
    """
    whole, rest = (Call(receiver, question, packets, options) for _ in range(2))
    published = whole.preset == "reference"
    (turn,) = whole.turns
    if published and len(turn.ids) == 1:
        raise ValueError("question: one token is not measured in preset reference")
    kind = "published" if published else "paper"
    n_layers = receiver.model.n_layers
    found: tuple[list[Mass], list[Mass]] = ([], [])
    states: NDArray[Any] = turn.ids
    for layer in range(n_layers):
        last = layer == n_layers - 1
        passes = (
            # The second one first: its states are those that enter the layer.
            (rest, 1, "none"),
            (whole, 0, "none" if last else "hidden"),
        )
        out = None
        for call, skip, output in passes:
            out, mass = call.workspace.forward(
                call.sessions,
                [states],
                layers=(layer, layer + 1),
                output=output,
                outputs="all",
                slack=call.slack,
                mass=kind,
                mass_skip=skip,
            )
            found[skip].append(mass[0, layer])
        states = out
    for call in (whole, rest):
        receiver.count(call.workspace)
    return np.stack(found[0]), np.stack(found[1])
