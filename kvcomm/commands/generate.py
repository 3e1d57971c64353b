"""`kvcomm generate`: one question about one context."""

import argparse
import os
from pathlib import Path

from kvcomm.options.choice import add_layers, options_of
from kvcomm.options.output import add_json, print_json, say
from kvcomm.options.pair import add_models, layer_map_of, load_pair, load_scores

HELP = "answer one question from a context"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_models(parser)
    parser.add_argument(
        "--context", required=True, action="append", metavar="TEXT",
        help="a text, or a file of text; given several times: several senders",
    )  # fmt: skip
    parser.add_argument("--question", required=True, metavar="TEXT", help="what to answer")
    add_layers(parser, several=False)
    parser.add_argument(
        "--positions", default="published", choices=("published", "sequential"),
        help="of several senders: overlapping (default) or one behind the other",
    )  # fmt: skip
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="default 64")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T",
        help="of sampling (default 0: the likeliest token)",
    )  # fmt: skip
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K",
        help="sample among the K likeliest tokens (default 0: all)",
    )  # fmt: skip
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P",
        help="and among those that make up this share (default 1)",
    )  # fmt: skip
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT",
        help="end before this text; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--cut", action="store_true", help="cut the middle out of a context that is too long"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Answer, in pieces as they come."""
    from dataclasses import asdict

    from kvcomm.methods import Bench
    from kvcomm.methods.kvcomm import variants
    from kvcomm.selection import calibrate

    found = variants(options_of(arguments))
    if len(found) != 1:
        raise ValueError(f"one choice of layers is needed, found {[m.label for m in found]}")
    method = found[0]
    if method.strategy == "search":
        raise ValueError("strategy 'search' needs records with answers: `kvcomm eval` has them")
    contexts = tuple(_context_text(text) for text in arguments.context)
    sender, receiver = load_pair(arguments, arguments.preset)
    layer_map = layer_map_of(arguments, sender, receiver)
    bench = Bench(sender, receiver, preset=arguments.preset, layer_map=layer_map)
    bench.scores = load_scores(arguments, sender, receiver)
    if method.calibrated and bench.scores is None:
        # Without a calibration the exchange itself is the sample (the paper's Appendix L).
        bench.scores = calibrate(
            sender,
            receiver,
            [(contexts, arguments.question)],
            preset=arguments.preset,
            layer_map=layer_map,
            positions=arguments.positions,
        )
    layers = method.layers(bench)
    packets = tuple(
        sender.read(text, layers, preset=arguments.preset, cut="middle" if arguments.cut else None)
        for text in contexts
    )
    answer = receiver.answer(
        arguments.question,
        packets,
        arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        stop=arguments.stop,
        stream=None if arguments.json else lambda piece: print(piece, end="", flush=True),
        preset=arguments.preset,
        shift_back=arguments.shift_back,
        layer_map=layer_map,
        positions=arguments.positions,
    )
    if arguments.json:
        print_json({**asdict(answer), "layers": layers})
        return 0
    print()
    stats = answer.stats
    say(
        f"{len(layers)} of {sender.model.n_layers} layers, {stats.message_bytes} bytes for "
        f"{stats.context_tokens} tokens of context ({stats.cut_tokens} cut); the receiver "
        f"prefilled {stats.receiver_tokens} tokens"
    )
    return 0


def _context_text(argument: str) -> str:
    """The text of a file, or the argument itself when it is no file's name."""
    try:
        if os.path.isfile(argument):
            return Path(argument).read_text("utf-8")
    except (OSError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise ValueError(f"{argument}: not UTF-8 text (byte {error.start})") from None
        if isinstance(error, OSError):
            raise
    if not any(character.isspace() for character in argument) and Path(argument).suffix:
        raise FileNotFoundError(f"{argument}: no such file")
    return argument
