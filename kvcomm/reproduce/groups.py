"""Which methods a reproduction runs, in groups that share a run.

A group is a fixed set of methods by the name of their row. It makes one run folder per task, so no
two exhibits run the same thing twice: whatever compares with baseline and skyline takes these from
the group "base", and the selection from "main".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvcomm.methods import Method, Options, methods
from kvcomm.tasks import Example

RATIOS = ("0.3", "0.5", "0.7")
RULES = ("mean", "replace", "sum")
CONTROLS = ("wrong_context", "shuffled", "noise", "random")


@dataclass(frozen=True)
class Group:
    """Methods of one run.

    name: of its folder. methods: by the name of their row. n_calibration: records that calibrate.
    answers: whether they generate answers, or only give likelihoods. keep: which records it is for.
    unseen: calibration records are not scored, whatever the protocol.
    """

    name: str
    methods: Mapping[str, Method]
    n_calibration: int = 1
    answers: bool = True
    keep: Callable[[Example], bool] | None = None
    unseen: bool = False


def _named(rows: Sequence[str], name: str, options: Options) -> dict[str, Method]:
    return dict(zip(rows, methods((name,), options), strict=True))


def _ratios(name: str) -> tuple[str, ...]:
    return tuple(f"{name} {ratio}" for ratio in RATIOS)


def mode(answers: bool) -> str:
    """What a group's name ends in, where it may generate answers or not."""
    return "answers" if answers else "nll"


def at(name: str, alpha: float) -> str:
    """The name of a group whose methods depend on alpha."""
    return name if alpha == 1 else f"{name}-alpha-{alpha:g}"


def base(alpha: float) -> Group:
    """What every comparison stands between."""
    rows = ("baseline", "skyline")
    return Group("base", dict(zip(rows, methods(rows, Options()), strict=True)))


def main(alpha: float) -> Group:
    """The selection."""
    options = Options(ratios=RATIOS, alpha=alpha)
    return Group(at("main", alpha), _named(_ratios("kvcomm"), "kvcomm", options))


def fixed(alpha: float) -> Group:
    """Layers that nothing is measured for: as many random ones, and all."""
    options = Options(ratios=RATIOS, strategies=("random", "all"))
    rows = (*_ratios("random"), "all layers")
    return Group("fixed", _named(rows, "kvcomm", options))


def standing(alpha: float) -> list[Group]:
    """What the main tables begin with."""
    return [base(alpha), main(alpha), fixed(alpha)]


def ac(alpha: float) -> Group:
    """Activation communication by its three rules."""
    return Group("ac", _named([f"ac {rule}" for rule in RULES], "ac", Options(rules=RULES)))


def nld(alpha: float) -> Group:
    """Natural language debate; the sender is asked for a summary, as the paper has it."""
    return Group("nld", _named(("nld",), "nld", Options(sender_aware=True)))


def cipher(alpha: float) -> Group:
    """CIPHER, with the same request to the sender."""
    return Group("cipher", _named(("cipher",), "cipher", Options(sender_aware=True)))


def shift_back(alpha: float) -> Group:
    """KVComm-S: positions of the receiver start at 0 where nothing is sent."""
    options = Options(ratios=RATIOS, alpha=alpha, shift_back=True)
    return Group(at("shift-back", alpha), _named(_ratios("shift back"), "kvcomm", options))


def two_senders(name: str, alpha: float) -> Group:
    """A method with the context split between two senders, on records that can be split."""
    options = Options(ratios=RATIOS, alpha=alpha, senders="split", sender_aware=True)
    rows = [f"{row} two senders" for row in (_ratios("kvcomm") if name == "kvcomm" else (name,))]
    group = f"{name}-two-senders"
    return Group(
        at(group, alpha) if name == "kvcomm" else group,
        _named(rows, name, options),
        keep=lambda example: len(example.pieces) > 1,
    )


def controls(alpha: float) -> Group:
    """Messages that hold nothing of use."""
    rows = [name.replace("_", " ") for name in CONTROLS]
    options = Options(controls=CONTROLS, alpha=alpha)
    return Group(at("controls", alpha), _named(rows, "control", options))


def search(alpha: float, n_records: int) -> Group:
    """Layers searched by likelihood, and chosen by attention on the very same records."""
    options = Options(ratios=RATIOS, strategies=("search",), search_records=n_records)
    plain = Options(ratios=RATIOS, alpha=alpha)
    return Group(
        at("search", alpha),
        {
            **_named(_ratios("search"), "kvcomm", options),
            **_named(_ratios("attention"), "kvcomm", plain),
        },
        n_calibration=n_records,
        answers=False,
        unseen=True,
    )


#: Groups that rows of the main tables come from, by the choice of the user that brings them in.
COMPARED: Mapping[str, Callable[[float], Group]] = {"nld": nld, "cipher": cipher, "ac": ac}
