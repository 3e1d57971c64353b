"""`token_importance`: one model that loses hidden states on the way (Figures 2 and 9).

The receiver reads the skyline's prompt, or the baseline's where a task has no context. Once, on the
output of layer l, either all tokens of the prompt but one are set to zero ("keep"), or that one is
("zero"); the whole sequence goes on through the later layers. Tokens decoded afterwards are left
alone and see the caches as they are: whole in layers 0 .. l, changed above.

A row of zeros passes every norm as zeros, and gets something to say again from the attention of the
later layers. Behind the last layer there is none: a last token that is zeroed there leaves all
logits at 0.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvcomm import hidden, selection
from kvcomm._core import Workspace
from kvcomm.methods import Bench, Item, Method, Options, Outcome, Seconds, TokenIds
from kvcomm.prefilled import Prefilled
from kvcomm.turns import check_room

TOKENS = ("first", "last", "random", "none")
EFFECTS = ("keep", "zero")


@dataclass(frozen=True)
class TokenImportance(Method):
    """One token's hidden state kept, or zeroed.

    Attributes
    ----------
    token
        "first", "last", "random" (any of the prompt; one per record, the same for every layer) or
        "none".
    effect
        "keep": all others are zeroed. "zero": all others are kept.
    layer
        l; None: the middle, n_layers // 2.
    seed
        Of "random", which draws by this and the record's number.
    """

    token: str = "last"
    effect: Literal["keep", "zero"] = "keep"
    layer: int | None = None
    seed: int = selection.SEED

    name = "token_importance"
    shares_contexts = False

    def __post_init__(self) -> None:
        if self.token not in TOKENS:
            raise ValueError(f"token: expected one of {', '.join(TOKENS)}, found {self.token!r}")
        if self.effect not in EFFECTS:
            raise ValueError(f"effect: expected one of {', '.join(EFFECTS)}, found {self.effect!r}")

    @property
    def label(self) -> str:
        where = "" if self.layer is None else f" l={self.layer}"
        return f"{self.effect} {self.token} token{where}"

    @property
    def settings(self) -> Mapping[str, Any]:
        return {
            "token": self.token,
            "effect": self.effect,
            "layer": self.layer,
            "seed": self.seed if self.token == "random" else None,
        }

    def layers(self, bench: Bench) -> tuple[int, ...]:
        self._layer(bench)
        return ()

    def _layer(self, bench: Bench) -> int:
        n_layers = bench.receiver.model.n_layers
        layer = n_layers // 2 if self.layer is None else self.layer
        hidden.check_layer("at_layers", layer, n_layers - 1)
        return layer

    def _kept(self, number: int, n: int) -> NDArray[np.bool_]:
        """bool [n]: which tokens of the prompt of record `number` go on."""
        chosen = np.zeros(n, bool)
        if self.token == "random":
            chosen[np.random.default_rng([self.seed, number]).integers(n)] = True
        elif self.token != "none":
            chosen[0 if self.token == "first" else -1] = True
        return chosen if self.effect == "keep" else ~chosen

    def run(self, bench: Bench, items: Sequence[Item]) -> list[Outcome]:
        prompts = [_prompt(item) for item in items]
        prefilled = self.prefill(bench, prompts, [item.number for item in items])
        replies = bench.replies(prefilled, items)
        return [
            Outcome.of(
                reply,
                (prompt,),
                message_bytes=0,
                receiver_tokens=len(prompt),
                cut_tokens=item.skyline_cut,
                seconds=Seconds.of(reply.answer.stats),
            )
            for item, prompt, reply in zip(items, prompts, replies, strict=True)
        ]

    def prefill(
        self, bench: Bench, prompts: Sequence[TokenIds], numbers: Sequence[int]
    ) -> Prefilled:
        """Prompts that lose states behind the layer; numbers: of their records."""
        model = bench.receiver.model
        above = self._layer(bench) + 1
        for ids in prompts:
            check_room(model, 0, len(ids))
        started = time.perf_counter()
        kept = [self._kept(number, len(ids)) for number, ids in zip(numbers, prompts, strict=True)]
        workspace = Workspace(model.core)
        sessions = hidden.open_sessions(model, len(prompts))
        if above == model.n_layers:
            logits, _ = workspace.forward(sessions, prompts, output="logits")
            logits[[not rows[-1] for rows in kept]] = 0
        else:
            states = hidden.entering(workspace, sessions, prompts, above, model.n_layers)
            for state, rows in zip(states, kept, strict=True):
                state[~rows] = 0
            logits, _ = workspace.forward(
                sessions, states, layers=(above, model.n_layers), output="logits"
            )
        return Prefilled(
            bench.receiver,
            workspace,
            sessions,
            logits,
            started=started,
        )


def _prompt(item: Item) -> TokenIds:
    return item.skyline if item.example.context.strip() else item.baseline


def variants(options: Options) -> list[Method]:
    """One variant per token and layer."""
    return [
        TokenImportance(token, options.effect, layer, options.seed)
        for token in options.tokens
        for layer in options.at_layers or (None,)
    ]
