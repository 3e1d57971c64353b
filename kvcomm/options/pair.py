"""The two models of a command: options that name them, and loading them."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from kvcomm.options.values import layer_map

if TYPE_CHECKING:
    from kvcomm.agents import Receiver, Sender
    from kvcomm.model import Model
    from kvcomm.selection import LayerScores


#: What may name a model.
MODEL = "a folder, a .gguf file, a name of `kvcomm models`, or a hub id"


def add_models(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Models, their types, and the device."""
    group = parser.add_argument_group("models")
    group.add_argument(
        "--model", required=required, metavar="M",
        help=f"the sender's model, and the receiver's: {MODEL}",
    )  # fmt: skip
    group.add_argument(
        "--receiver", metavar="M2", help="the receiver's model, if it is another (a fine-tune)"
    )
    group.add_argument(
        "--layer-map", type=layer_map, metavar="MAP",
        help="receiver layer of each sender layer, for models of different depth: a list, or "
        "'published'",
    )  # fmt: skip
    add_dtype(group)
    group.add_argument(
        "--kv-dtype", default="f32", choices=("f32", "f16", "bf16"),
        help="type of keys and values, in memory and in the message (default f32)",
    )  # fmt: skip
    add_device(group)


def add_dtype(parser: Any) -> None:
    """`--dtype`."""
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "f32", "f16", "bf16", "q8_0"),
        help="type of the weights in memory (default auto: as stored)",
    )  # fmt: skip


def add_device(parser: Any) -> None:
    """`--device` and `--threads`."""
    parser.add_argument(
        "--device",
        default="cpu",
        help="cpu (default), or guard: the CPU, and an address misused is found",
    )
    add_threads(parser)


def add_threads(parser: Any) -> None:
    """`--threads`."""
    parser.add_argument(
        "--threads", type=int, metavar="N", help="threads (default: what the machine allows)"
    )


def set_threads(arguments: argparse.Namespace) -> None:
    """Follow `--threads`."""
    from kvcomm import _core

    if arguments.threads is not None:
        if arguments.threads < 1:
            raise ValueError(f"--threads: expected 1 or more, found {arguments.threads}")
        _core.set_num_threads(arguments.threads)


def load_pair(arguments: argparse.Namespace, preset: str) -> "tuple[Sender, Receiver]":
    """The sender and the receiver of the options; one model serves as both unless told."""
    from kvcomm.agents import Receiver, Sender
    from kvcomm.model import Model

    set_threads(arguments)

    def load(source: str) -> "Model":
        return Model.load(
            source,
            device=arguments.device,
            dtype=arguments.dtype,
            kv_dtype=arguments.kv_dtype,
            progress=sys.stderr.isatty(),
        )

    model = load(arguments.model)
    other = model if arguments.receiver is None else load(arguments.receiver)
    # The published code renders the sender's prompt with the receiver's tokenizer.
    tokenizer = other.tokenizer if preset == "reference" else None
    return Sender(model, tokenizer=tokenizer), Receiver(other)


def layer_map_of(
    arguments: argparse.Namespace, sender: "Sender", receiver: "Receiver"
) -> tuple[int, ...] | None:
    """The layer map asked for; None where none was."""
    from kvcomm.agents import published_layer_map

    if arguments.layer_map == "published":
        return published_layer_map(sender.model.n_layers, receiver.model.n_layers)
    return arguments.layer_map


def load_scores(
    arguments: argparse.Namespace, sender: "Sender", receiver: "Receiver"
) -> "LayerScores | None":
    """Layer scores of a file, if one was named; they must be of these two models."""
    from kvcomm.errors import MismatchError
    from kvcomm.selection import LayerScores

    if arguments.scores is None:
        return None
    scores = LayerScores.load(arguments.scores)
    try:
        scores.check(sender.model, receiver.model, arguments.preset)
    except MismatchError as error:
        raise MismatchError(f"{arguments.scores}: {error}") from None
    return scores
