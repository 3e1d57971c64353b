"""From packets to sessions: how a receiver is given what senders have read.

Owns where the receiver's tokens stand and what they see of packets (the paper's section 3), and
`Call`: the questions of one call, each in a session of its own. agents.py says what can be asked;
generate.py and prefilled.py go on from the sessions.

Questions about the same packets share these: what is checked and merged is so once per call, and
sessions hold references to the senders' own memory.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvcomm import prompts
from kvcomm._core import KV, Session, Workspace
from kvcomm.account import Prompt
from kvcomm.beginning import Beginning, account, beginnings
from kvcomm.cost import Runs
from kvcomm.errors import MismatchError, UnsupportedError
from kvcomm.generate import Decoding, Rules, Start
from kvcomm.packet import Packet, Preset, check_layer_map
from kvcomm.prefilled import Prefilled
from kvcomm.shapes import Shape
from kvcomm.turns import Answer, Turn, check_room, common_preset, is_single, turns_of

if TYPE_CHECKING:
    from kvcomm.agents import Receiver
    from kvcomm.model import Model

Positions = Literal["published", "sequential"]


@dataclass(frozen=True, eq=False)
class Given:
    """What a question is asked behind.

    kv: K and V of all packets, None where there is none. start: position of the question's first
    token. target: receiver layer of each layer of kv. held: per receiver layer the tokens of the
    context that the published code reckons with. runs: per receiver layer, where given keys stand
    (see `cost.Runs`). others: layers that do not hold the whole context, moved by `shift` if at
    all. ahead: whether the published look-ahead applies.
    """

    kv: KV | None = None
    start: int = 0
    target: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    runs: tuple[Runs, ...] = ()
    others: tuple[int, ...] = ()
    shift: int = 0
    ahead: bool = False

    def open(self, model: "Model") -> Session:
        """A session that holds the packets."""
        session = new_session(model)
        if self.kv is not None:
            session.give(self.kv, self.target)
            if self.shift:
                session.set_shift(self.shift, self.others)
        return session

    def slack(self, n_query: int) -> list[int] | None:
        """How far ahead the published code lets a question token see, per layer; None: not at all.

        It makes one mask, for layer 0, and cuts it to every layer's own length. So where a layer
        holds held[n] keys of the context, token i sees own tokens j <= i + held[0] - held[n].
        """
        if not self.ahead:
            return None
        slack = [min(self.held[0] - n, n_query) for n in self.held]
        return slack if any(slack) else None


def give(
    receiver: "Receiver",
    packets: tuple[Packet, ...],
    preset: Preset,
    *,
    shift_back: bool = False,
    layer_map: Sequence[int] | None = None,
    positions: Positions = "published",
) -> Given:
    """The packets of one or several senders as one, once they are known to fit the receiver.

    Raises
    ------
    ValueError, TypeError
        A layer map or positions that are none.
    MismatchError, UnsupportedError
        Packets that do not fit the receiver, or each other.
    """
    n_layers = receiver.model.n_layers
    if positions not in ("published", "sequential"):
        raise ValueError(f"positions: expected 'published' or 'sequential', found {positions!r}")
    if not packets:
        return Given(runs=((),) * n_layers)
    _check_fit(receiver, packets, layer_map, positions)
    reference, sequential = preset == "reference", positions == "sequential"
    kv = packets[0].kv
    if len(packets) > 1:
        kv = KV.concat(
            [packet.kv for packet in packets],
            sequential=sequential,
            whole=packets[0].whole_layers if reference else None,
        )
    start = kv.next_position
    target = check_layer_map(layer_map, kv.n_layers, n_layers)
    whole = {target[layer] for packet in packets for layer in packet.whole_layers}
    held = tuple(start if n in whole else int(n in target) for n in range(n_layers))
    others = tuple(n for n in range(n_layers) if n not in whole)
    shift = int(reference) - start if shift_back else 0
    if reference:
        _check_look_ahead(held, shift_back)
    begin = [start + (shift if n in others else 0) for n in range(n_layers)]
    return Given(
        kv,
        start,
        target,
        held,
        _runs(packets, target, begin, sequential),
        others,
        shift,
        ahead=reference and not shift_back,
    )


def _check_fit(
    receiver: "Receiver",
    packets: tuple[Packet, ...],
    layer_map: Sequence[int] | None,
    positions: Positions,
) -> None:
    first = packets[0]
    for packet in packets:
        held = [n for n, length in enumerate(packet.kv.lengths) if length]
        packet.origin.check_receiver(
            receiver.origin, held, layer_map, any_tokenizer=receiver.any_tokenizer
        )
        for layer in held if len(packets) > 1 and positions == "published" else ():
            if packet.origin.windowed[layer]:
                raise UnsupportedError(
                    f"layer {layer} of sender {packet.origin.model!r} is windowed and the "
                    "senders' positions overlap: ask for positions='sequential'"
                )
        if first.preset == "reference" and packet.layers != first.layers:
            raise MismatchError(
                f"senders chose layers {first.layers} and {packet.layers}: preset reference "
                "takes the same layers of all"
            )


def _check_look_ahead(held: Sequence[int], shift_back: bool) -> None:
    if held[0] < max(held):
        raise UnsupportedError(
            f"preset reference needs the whole context in receiver layer 0, which is given "
            f"{held[0]} tokens of {max(held)}"
        )
    if shift_back and 0 in held:
        raise UnsupportedError(
            f"preset reference has no shift_back when receiver layer {held.index(0)} is given "
            "nothing"
        )


def _runs(
    packets: Sequence[Packet], target: Sequence[int], begin: Sequence[int], sequential: bool
) -> tuple[Runs, ...]:
    """Per receiver layer where its given keys stand, seen from `begin`, its first own position."""
    runs: list[list[tuple[int, int]]] = [[] for _ in begin]
    before = 0
    for packet in packets:
        for layer, n in enumerate(packet.kv.lengths):
            whole = layer in packet.whole_layers
            # Preset reference takes first tokens of the first sender only.
            if n and (whole or packet is packets[0]):
                at = before + (packet.context_len - n if whole else 0)
                runs[target[layer]].append((at - begin[target[layer]], n))
        before += packet.context_len if sequential else 0
    return tuple(map(tuple, runs))


# ---- a call --------------------------------------------------------------------------------


#: What every method of a receiver takes besides its own arguments.
OPTIONS = ("message", "preset", "shift_back", "layer_map", "positions")


class Call:
    """The questions of one call, checked, each behind its packets.

    Attributes
    ----------
    turns, given
        Per question its ids and packets, and what becomes of these.
    workspace
        Whose counts go to the receiver's with `count`.
    sessions, slack
        Per question a session that holds its packets, and what `Workspace.forward` takes; opened
        when they are first asked for.
    """

    def __init__(
        self, receiver: "Receiver", question: Any, packet: Any, options: dict[str, Any]
    ) -> None:
        self._started = time.perf_counter()
        for name in options:
            if name not in OPTIONS:
                raise TypeError(f"unknown option {name!r}: expected one of {', '.join(OPTIONS)}")
        options = dict(options)
        message = options.pop("message", prompts.receiver_message)
        preset = options.pop("preset", None)
        self.receiver, self.model = receiver, receiver.model
        self.single = is_single(question)
        self.turns = turns_of(self.model, question, packet, message)
        self.preset = common_preset(self.turns, preset)
        self.given: list[Given] = []
        self._seconds: list[float] = []  # of each question's handover
        merged: dict[tuple[int, ...], Given] = {}
        for turn in self.turns:
            began = time.perf_counter()
            key = tuple(map(id, turn.packets))
            if key not in merged:
                merged[key] = give(receiver, turn.packets, self.preset, **options)
            self.given.append(merged[key])
            self._seconds.append(time.perf_counter() - began)
            check_room(self.model, merged[key].start, len(turn))
        self.slack = [
            one.slack(len(turn)) for one, turn in zip(self.given, self.turns, strict=True)
        ]
        self.workspace = Workspace(self.model.core)

    @cached_property
    def sessions(self) -> list[Session]:
        return [self._open(number) for number in range(len(self.turns))]

    @cached_property
    def _beginnings(self) -> list[Beginning | None]:
        """What questions about the same packets begin with alike, unless they look ahead."""
        groups = [
            None if slack else id(given)
            for given, slack in zip(self.given, self.slack, strict=True)
        ]
        return beginnings(self.workspace, [turn.ids for turn in self.turns], groups, self._open)

    def _open(self, number: int) -> Session:
        began = time.perf_counter()
        session = self.given[number].open(self.model)
        self._seconds[number] += time.perf_counter() - began
        return session

    def _begun(self, number: int) -> tuple[Session, NDArray[np.int32]]:
        """A session behind what its question shares with others, and the rest of its ids."""
        session, ids = self._open(number), self.turns[number].ids
        beginning = self._beginnings[number]
        if beginning is None:
            return session, ids
        beginning.begin(session, len(ids))
        return session, ids[beginning.n :]

    def _stop_ids(self, turn: Turn) -> frozenset[int]:
        """EOS ids of the generation config; the published kvcomm knows config.json's only."""
        if self.preset == "reference" and turn.packets:
            return frozenset(self.model.config_stop_ids)
        return frozenset(self.model.stop_ids)

    def run(self, **asked: Any) -> tuple[NDArray[Any] | None, NDArray[np.float64] | None]:
        """All questions in one forward call; asked: as for `Workspace.forward`."""
        found = self.workspace.forward(
            self.sessions, [turn.ids for turn in self.turns], slack=self.slack, **asked
        )
        self.receiver.count(self.workspace)
        return found

    def prefill(self) -> Prefilled:
        """Run the questions, up to the logits of the next tokens."""
        logits = np.empty((0, self.model.vocab_size), np.float32)
        begun = [self._begun(number) for number in range(len(self.turns))]
        sessions = [session for session, _ in begun]
        if begun:
            logits, _ = self.workspace.forward(
                sessions, [ids for _, ids in begun], output="logits", slack=self.slack
            )
        return Prefilled(
            self.receiver,
            self.workspace,
            sessions,
            logits,
            stop_ids=[self._stop_ids(turn) for turn in self.turns],
            prompts=self._prompts(),
            started=self._started,
        )

    def decode(self, rules: Rules, batch_size: int | None = None) -> Decoding:
        """The loop that runs the questions and decodes their answers; sessions are its own."""
        return Decoding(
            self.workspace,
            self._starts(rules.max_new_tokens > 0),
            rules,
            self.model,
            batch_size=batch_size,
            started=self._started,
        )

    def _starts(self, run: bool) -> Iterator[Start]:
        for number, turn in enumerate(self.turns):
            session, ids = self._begun(number) if run else (self._open(number), turn.ids)
            yield Start(session, self._stop_ids(turn), ids, self.slack[number])

    def answers(self, decoding: Decoding) -> list[Answer]:
        """What a loop of `decode` that has ended has found."""
        found = zip(self._prompts(decoding.ran), decoding.results, strict=True)
        return [Answer.of(self.model, prompt, result) for prompt, result in found]

    def _prompts(self, ran: bool = True) -> list[Prompt]:
        """The account of the prompts; ran: a prompt that did not has nothing to share."""
        return [self._prompt(number, ran) for number in range(len(self.turns))]

    def _prompt(self, number: int, ran: bool) -> Prompt:
        turn, given, slack = self.turns[number], self.given[number], self.slack[number]
        shape, shared = Shape.of(self.model), self._beginnings[number] if ran else None
        work, n_shared = account(
            shape, len(turn), shared, number, given=given.runs, n_out=1, head=True, slack=slack
        )
        return Prompt(
            len(turn),
            given.runs,
            0 if given.kv is None else given.kv.nbytes,
            n_shared,
            work,
            turn.packets,
            self._seconds[number],
        )

    def shaped(self, results: list[Any]) -> Any:
        """One result for one question, a list for a list."""
        return results[0] if self.single else results


def new_session(model: "Model") -> Session:
    """A new timeline of a model, at position 0."""
    return Session(model.core, kv_dtype=model.kv_dtype)
