"""Methods that pass hidden states or lose some, on whole sequences: no cache, no session.

A decoded token is one more own token at the end of the sequence. Every function gives the logits
[n, vocab] of all own tokens, prompt first. Sources: spec/method.md section 6, and for `ac` what the
published code was seen to do.
"""

from collections.abc import Sequence

import numpy as np

from oracle.transformer import Array, Model

#: What becomes of the receiver's components `own` when the sender's are `sent`.
RULES = {
    "replace": lambda own, sent: sent,
    "sum": lambda own, sent: own + sent,
    "mean": lambda own, sent: 0.5 * (own + sent),
}


def entering(model: Model, tokens: Sequence[int], layer: int, *, position: int = 0) -> Array:
    """States [n, dim] that enter a layer; for the layer after the last, the normalised ones."""
    run = model.run(tokens, positions=position, layers=(0, layer))
    return run.final if layer == model.n_layers else run.hidden[layer]


def ac(
    sender: Model,
    receiver: Model,
    context: Sequence[int],
    question: Sequence[int],
    decoded: Sequence[int] = (),
    *,
    k: int,
    j: int,
    rule: str,
) -> Array:
    """The context's last state entering k, put into the question's last state entering j."""
    sent = entering(sender, context, k)[-1]
    own = entering(receiver, [*question, *decoded], j).copy()
    d = min(len(sent), own.shape[1])
    at = len(question) - 1
    own[at, -d:] = RULES[rule](own[at, -d:], sent[-d:])
    return receiver.run(embeddings=own, layers=(j, receiver.n_layers)).logits


def prepend_hidden(
    sender: Model,
    receiver: Model,
    context: Sequence[int],
    question: Sequence[int],
    decoded: Sequence[int] = (),
    *,
    k: int,
    j: int,
) -> Array:
    """All states of the context entering k, in front of the receiver's own from layer j on.

    Own tokens stand behind the context in every layer; below layer j they are alone.
    """
    sent = entering(sender, context, k)
    own = receiver.run([*question, *decoded], positions=len(context), layers=(0, j)).hidden[j]
    whole = np.concatenate([sent, own])
    return receiver.run(embeddings=whole, layers=(j, receiver.n_layers)).logits[len(context) :]


def token_importance(
    model: Model,
    prompt: Sequence[int],
    decoded: Sequence[int] = (),
    *,
    layer: int,
    token: int | None,
    keep: bool,
) -> Array:
    """On the output of a layer all prompt tokens but `token` are zeroed (keep), or only it is."""
    states = model.run([*prompt, *decoded], layers=(0, layer + 1)).hidden[layer + 1].copy()
    zeroed = [n for n in range(len(prompt)) if (n == token) != keep]
    states[zeroed] = 0
    return model.run(embeddings=states, layers=(layer + 1, model.n_layers)).logits
