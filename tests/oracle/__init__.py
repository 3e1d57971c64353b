"""A slow, plain NumPy model and method that every kernel and every preset is judged by.

Shares no code with the product and is written to be read: whole score matrices, an explicit mask
per layer, an explicit position per layer and token, an explicit list of keys per layer, no cache
that grows. `architecture` reads a config.json, `rope` makes frequencies, `transformer` is the
forward pass, `method` is the exchange of KVComm on top of it. What transformers 5.24 computes for
each family is recorded in tests/vectors, and test_oracle.py holds the oracle to it.

    model = oracle.Model(config, weights)
    sender = model.run(context)
    given = [[sender.block(layer)] if layer in chosen else [] for layer in range(model.n_layers)]
    run = model.run(question, positions=len(context), given=given)
    run.logits[-1], run.weights[layer], run.keys[layer]
"""

from oracle.architecture import Architecture, architecture_of
from oracle.checkpoint import read_folder
from oracle.method import (
    answer_nll,
    attention_prior,
    chosen_layers,
    depth_map,
    exchange,
    generate,
    layer_count,
    layer_masses,
    layer_rules,
    mean_mass,
    normalised,
    published_weights,
    ranking,
    read,
    scores,
    send,
)
from oracle.rope import inverse_frequencies, rope_of
from oracle.transformer import Block, Model, Run

__all__ = [
    "Architecture",
    "Block",
    "Model",
    "Run",
    "answer_nll",
    "architecture_of",
    "attention_prior",
    "chosen_layers",
    "depth_map",
    "exchange",
    "generate",
    "inverse_frequencies",
    "layer_count",
    "layer_masses",
    "layer_rules",
    "mean_mass",
    "normalised",
    "published_weights",
    "ranking",
    "read",
    "read_folder",
    "rope_of",
    "scores",
    "send",
]
