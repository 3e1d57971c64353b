"""Which methods and layers a command runs: the options, and `methods.Options` out of them."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvcomm.options.values import numbers, ratios, seed, words

if TYPE_CHECKING:
    from kvcomm.methods import Options
    from kvcomm.selection import SkipFirst


#: What `skip_first` is, by what may be written after `--first-token`.
FIRST_TOKEN = {"count": False, "skip": True, "auto": "auto"}


def add_layers(parser: argparse.ArgumentParser, *, several: bool) -> None:
    """Which layers are sent. several: ratios and strategies by comma."""
    many = ", several by comma" if several else ""
    group = parser.add_argument_group("layers to send")
    group.add_argument(
        "--ratio", type=ratios, metavar="R",
        help=f"share of the layers{many} (default 0.5)",
    )  # fmt: skip
    group.add_argument(
        "--layers", type=numbers, metavar="LIST", help="explicit layers, such as 0,3,7-9"
    )
    group.add_argument(
        "--strategy", type=words, metavar="S",
        help=f"how layers are chosen{many}: attention_gaussian (default), attention, gaussian, "
        "search, random, contiguous (the ends of --layers), attention_level (with --level), "
        "layers, all",
    )  # fmt: skip
    group.add_argument(
        "--first-token", choices=tuple(FIRST_TOKEN), metavar="HOW",
        help="count the first context token in the attention mass, skip it, or auto: count it "
        "where attention rests on it (default: as the preset does)",
    )  # fmt: skip
    add_alpha(group, 1.0, "1")
    group.add_argument(
        "--level", type=int, metavar="N",
        help="of attention_level: 0 for the layers of most attention, 1 for as many after them",
    )  # fmt: skip
    add_preset(group)
    group.add_argument(
        "--shift-back", action="store_true",
        help="in layers that are not sent, do not shift the question's positions (KVComm-S)",
    )  # fmt: skip
    group.add_argument(
        "--scores",
        metavar="FILE",
        help="layer scores that `kvcomm calibrate` wrote; without them generate chooses layers on "
        "the exchange itself, whose context is then read twice",
    )
    group.add_argument("--seed", type=seed, default=42, metavar="S", help="seed (default 42)")


def add_alpha(parser: Any, default: float | None, told: str) -> None:
    """`--alpha`. told: what the default is."""
    parser.add_argument(
        "--alpha", type=float, default=default, metavar="A",
        help=f"weight of the attention against the Gaussian over depth (default: {told})",
    )  # fmt: skip


def add_preset(parser: Any, more: str = "") -> None:
    """`--preset`. more: what "reference" means besides."""
    parser.add_argument(
        "--preset", default="paper", choices=("paper", "reference"),
        help=f"the paper's text (default), or its published code{more}",
    )  # fmt: skip


def add_methods(parser: argparse.ArgumentParser) -> None:
    """Which methods run, and what each takes."""
    group = parser.add_argument_group("methods")
    group.add_argument(
        "--methods", type=words, default=("baseline", "skyline", "kvcomm"), metavar="LIST",
        help="of baseline, skyline, kvcomm, nld, cipher, ac, prepend_hidden, token_importance, "
        "control (default baseline,skyline,kvcomm)",
    )  # fmt: skip
    group.add_argument(
        "--online", type=int, metavar="T", help="kvcomm: choose layers again at every T-th record"
    )
    group.add_argument(
        "--senders", default="one", choices=("one", "split", "documents"),
        help="kvcomm, nld, cipher: who reads the context: one sender (default), two with half of "
        "it each, or one per document",
    )  # fmt: skip
    group.add_argument(
        "--positions", default="published", choices=("published", "sequential"),
        help="of several senders' keys: overlapping (default) or one behind the other",
    )  # fmt: skip
    group.add_argument(
        "--search-records", type=int, default=6, metavar="N",
        help="strategy search: calibration records to go by (default 6)",
    )  # fmt: skip
    group.add_argument(
        "--beam", type=int, default=1, metavar="B", help="strategy search: sets kept (default 1)"
    )
    group.add_argument(
        "--backward", action="store_true", help="strategy search: try to drop and replace layers"
    )
    group.add_argument(
        "--message-tokens", type=int, default=256, metavar="N",
        help="nld, cipher: most tokens of what each agent writes first (default 256)",
    )  # fmt: skip
    group.add_argument(
        "--sender-aware", action="store_true",
        help="nld, cipher: tell the sender what its text is for",
    )  # fmt: skip
    group.add_argument(
        "--cipher-temperature", type=float, metavar="T",
        help="cipher: of the mean embedding (default 0.7; preset reference 1.0)",
    )  # fmt: skip
    group.add_argument(
        "--rule", type=words, default=("replace",), metavar="R",
        help="ac: replace (default), sum, mean, several by comma",
    )  # fmt: skip
    group.add_argument(
        "--from-layer", type=int, metavar="K", help="ac, prepend_hidden: layer of the sender"
    )
    group.add_argument(
        "--to-layer", type=int, metavar="J", help="ac, prepend_hidden: layer of the receiver"
    )
    group.add_argument(
        "--token", type=words, default=("last",), metavar="T",
        help="token_importance: first, last (default), random, none, several by comma",
    )  # fmt: skip
    group.add_argument(
        "--effect", default="keep", choices=("keep", "zero"),
        help="token_importance: keep only that token's hidden state (default), or zero it",
    )  # fmt: skip
    group.add_argument(
        "--at-layer", type=numbers, metavar="LIST", help="token_importance: layers (default L/2)"
    )
    group.add_argument(
        "--control", type=words, default=("wrong_context", "shuffled", "noise", "random"),
        metavar="C",
        help="control: wrong_context, shuffled, noise, random (default all); random draws the "
        "layers that strategy random draws with the same seed",
    )  # fmt: skip


#: Fields of `methods.Options` by the options that only `kvcomm eval` has.
_METHOD_OPTIONS = {
    "online": "online", "senders": "senders", "positions": "positions",
    "search_records": "search_records", "beam": "beam", "backward": "backward",
    "message_tokens": "message_tokens", "sender_aware": "sender_aware",
    "cipher_temperature": "cipher_temperature", "rules": "rule", "from_layer": "from_layer",
    "to_layer": "to_layer", "tokens": "token", "effect": "effect", "at_layers": "at_layer",
    "controls": "control",
}  # fmt: skip


#: Methods that an option is for, by its name; given without any of them it says nothing.
_TAKERS = {
    "ratio": ("kvcomm", "control"), "alpha": ("kvcomm", "control"),
    "first_token": ("kvcomm", "control"), "shift_back": ("kvcomm", "control"),
    "layers": ("kvcomm",), "level": ("kvcomm",), "strategy": ("kvcomm",),
    "scores": ("kvcomm", "control"),
    "online": ("kvcomm",), "beam": ("kvcomm",), "backward": ("kvcomm",),
    "search_records": ("kvcomm",),
    "senders": ("kvcomm", "nld", "cipher"), "positions": ("kvcomm",),
    "message_tokens": ("nld", "cipher"), "sender_aware": ("nld", "cipher"),
    "cipher_temperature": ("cipher",), "rule": ("ac",), "from_layer": ("ac", "prepend_hidden"),
    "to_layer": ("ac", "prepend_hidden"), "token": ("token_importance",),
    "effect": ("token_importance",), "at_layer": ("token_importance",), "control": ("control",),
}  # fmt: skip


#: Strategies that an option is for, by its name; `control` chooses by attention_gaussian.
_STRATEGIES = {
    "ratio": (
        "attention", "attention_gaussian", "gaussian", "attention_level", "random", "search",
    ),
    "alpha": ("attention_gaussian",),
    "first_token": ("attention", "attention_gaussian", "attention_level"),
    "online": ("attention", "attention_gaussian", "attention_level"),
    "scores": ("attention", "attention_gaussian", "attention_level"),
    "beam": ("search",), "backward": ("search",), "search_records": ("search",),
}  # fmt: skip

#: What an option is when it is not given; for those of `_METHOD_OPTIONS` as `methods.Options` says.
_UNSAID = {"alpha": 1.0, "shift_back": False}


def _check_taken(
    arguments: argparse.Namespace, strategies: Sequence[str], defaults: "Options"
) -> None:
    """Refuse an option that nothing in the run takes: a ValueError that names what would."""
    from kvcomm.methods import METHODS
    from kvcomm.selection import STRATEGIES

    methods = arguments.methods if "methods" in arguments else ("kvcomm",)
    if not set(methods) <= set(METHODS) or not set(strategies) <= set(STRATEGIES):
        return  # what is unknown is told first, where it is looked up
    fields = {option: field for field, option in _METHOD_OPTIONS.items()}
    chosen = {*(strategies if "kvcomm" in methods else ())}
    chosen |= {"attention_gaussian"} if "control" in methods else set()
    for option, takers in _TAKERS.items():
        unsaid = getattr(defaults, fields[option]) if option in fields else _UNSAID.get(option)
        if getattr(arguments, option, unsaid) == unsaid:
            continue
        name = f"--{option.replace('_', '-')}"
        if not set(takers) & set(methods):
            raise ValueError(
                f"{name}: no method of this run takes it, {' and '.join(takers)} would"
            )
        fitting = _STRATEGIES.get(option)
        if fitting and not chosen & set(fitting):
            raise ValueError(f"{name}: only strategy {' or '.join(map(repr, fitting))} takes it")


def options_of(arguments: argparse.Namespace) -> "Options":
    """What the methods of a run take; a command without `--methods` has fewer options.

    Raises
    ------
    ValueError
        An option that nothing in the run takes.
    """
    from kvcomm.methods import Options

    strategies = arguments.strategy
    if strategies is None:
        only_layers = arguments.layers is not None and arguments.ratio is None
        strategies = () if only_layers else ("attention_gaussian",)
    _check_taken(arguments, strategies, Options())
    return Options(
        ratios=arguments.ratio or ("0.5",),
        strategies=strategies,
        layers=arguments.layers,
        alpha=arguments.alpha,
        level=arguments.level,
        shift_back=arguments.shift_back,
        seed=arguments.seed,
        skip_first=_skip_first(arguments),
        **{
            field: getattr(arguments, option)
            for field, option in (_METHOD_OPTIONS.items() if "methods" in arguments else ())
        },
    )


def _skip_first(arguments: argparse.Namespace) -> "SkipFirst":
    """As asked for, else as the file of scores has it; None: as the preset has it."""
    from kvcomm.selection import LayerScores

    if arguments.first_token is not None or arguments.scores is None:
        return FIRST_TOKEN.get(arguments.first_token)
    scores = LayerScores.load(arguments.scores)
    return None if scores.skip_first == (scores.preset == "reference") else scores.skip_first
