"""The paper in one file: a sender reads, a receiver answers from what the sender read.

    sender.read(context, layers) -> Packet       prefill, keep K and V of the chosen layers
    receiver.answer(question, packet) -> Answer   question behind them, then decode

Owns where the receiver's tokens stand and what they see, in presets "paper" (the text of the
paper) and "reference" (its published code); method.md sections 2, 3 and 5. In every layer

    keys a question token sees = [ what the layer was given ; own keys up to its own ]

    preset      given, selected    given, other    question starts at     other layers look ahead
    paper       whole context      nothing         C in every layer       no
    reference   whole, and layer   first token     C in every layer       C - 1 tokens, while the
                0 always                                                  question is prefilled

With several senders C is the sum of their lengths. Does not do arithmetic (the core's), choose
layers (selection.py) or hold the decode loop (generate.py).

turns.py says what contexts, questions and packets may be (text or ids, one or a list, packets of
one sender or a tuple from several) and what comes back. Calls may run in several threads at once.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvcomm import prompts
from kvcomm._core import KV, Session, Workspace
from kvcomm.errors import MismatchError, UnsupportedError
from kvcomm.generate import Sampling
from kvcomm.packet import (
    Origin,
    Packet,
    Preset,
    check_layer_map,
    check_preset,
    layer_set,
    whole_layers,
)
from kvcomm.prefilled import Prefilled
from kvcomm.turns import (
    Counted,
    Message,
    Packets,
    Question,
    Turn,
    answer_ids,
    common_preset,
    is_single,
    prompt_ids,
    turns_of,
)

if TYPE_CHECKING:
    from kvcomm.model import Model
    from kvcomm.tokenizer import Tokenizer

Positions = Literal["published", "sequential"]


def published_layer_map(n_sender: int, n_receiver: int) -> tuple[int, ...]:
    """The published code's receiver layer for each sender layer; halves go to the even layer."""
    return tuple(round((n + 0.5) * n_receiver / n_sender - 0.5) for n in range(n_sender))


# ---- sending -------------------------------------------------------------------------------


class Sender(Counted):
    """A model that reads contexts and hands over its K and V.

    Parameters
    ----------
    model
        Shared, not changed.
    tokenizer
        Whose vocabulary and chat template contexts are put into (None: the model's own). The
        published code uses the receiver's.
    """

    def __init__(self, model: "Model", *, tokenizer: "Tokenizer | None" = None) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = model.tokenizer if tokenizer is None else tokenizer
        self.origin = Origin.of(model)

    def read(
        self,
        context: Any,
        layers: Iterable[int] | None = None,
        *,
        preset: Preset = "paper",
        message: Message = prompts.sender_message,
        max_tokens: int | None = None,
        cut: Literal["middle"] | None = None,
        trim: bool = True,
    ) -> Any:
        """Prefill a context at positions 0 .. C - 1 and keep K and V of some layers.

        Nothing is computed above the highest layer that is kept, and in that layer only K and V.
        (Preset reference wants the first token's K and V of the higher layers too: by causality
        that token runs on alone.)

        Parameters
        ----------
        context
            Text or ids; a list of them is read as one batch.
        layers
            S, layers of this model; None keeps all (for a calibration, or to `select` later).
        preset
            What is kept besides S; see `Packet`.
        message
            Makes the user turn out of a context's text.
        max_tokens
            Most tokens of the whole prompt; None, or more than the model has: the model's.
        cut
            "middle": a longer prompt loses its middle, and the packet says how many tokens. None:
            it is refused.
        trim
            Drop keys of windowed layers that no receiver can see (preset paper).

        Returns
        -------
        Packet or list of Packet

        Raises
        ------
        ValueError
            An empty or too long context, ids outside the vocabulary, layers that do not exist.
        TypeError
            A context that is neither text nor integer ids.
        """
        check_preset(preset)
        if cut not in (None, "middle"):
            raise ValueError(f"cut: expected 'middle' or None, found {cut!r}")
        n_layers = self.model.n_layers
        chosen = layer_set(range(n_layers) if layers is None else layers, n_layers)
        if max_tokens is not None and max_tokens < 2:
            raise ValueError(f"max_tokens: expected at least 2, found {max_tokens}")
        limit = min(max_tokens or self.model.max_position, self.model.max_position)
        single = is_single(context)
        whole = [
            prompt_ids(self.model, self.tokenizer, one, message, "context")
            for one in ([context] if single else context)
        ]
        batch = [_fit(ids, limit, cut, self.model.name) for ids in whole]
        packets = []
        for kv, full, ids in zip(self._prefill(batch, chosen, preset), whole, batch, strict=True):
            packet = Packet(
                kv=kv,
                layers=tuple(range(n_layers)),
                context_len=len(ids),
                ids=tuple(ids.tolist()),
                cut_tokens=len(full) - len(ids),
                preset=preset,
                origin=self.origin,
            ).select(chosen)
            packets.append(packet.trim() if trim else packet)
        return packets[0] if single else packets

    def _prefill(
        self, batch: Sequence[NDArray[np.int32]], layers: Sequence[int], preset: Preset
    ) -> list[KV]:
        """K and V up to the highest layer wanted; in preset reference of token 0 also above."""
        core, n_layers = self.model.core, self.model.n_layers
        top = max(whole_layers(layers, preset), default=-1) + 1
        sessions = [_session(self.model) for _ in batch]
        if top == 0:
            for session, ids in zip(sessions, batch, strict=True):
                session.set_position(len(ids))
        elif batch:
            workspace = Workspace(core)
            workspace.forward(sessions, batch, layers=(0, top))
            if preset == "reference" and top < n_layers:
                # A first token sees itself only: alone it gets the states it had in the context.
                firsts = [_session(self.model) for _ in batch]
                states, _ = workspace.forward(
                    firsts, [ids[:1] for ids in batch], layers=(0, top), output="hidden"
                )
                workspace.forward(sessions, [row[None] for row in states], layers=(top, n_layers))
            self.tally.add(workspace.counts)
        return [session.freeze() for session in sessions]


def _fit(
    ids: NDArray[np.int32], limit: int, cut: Literal["middle"] | None, name: str
) -> NDArray[np.int32]:
    if len(ids) <= limit:
        return ids
    if cut is None:
        raise ValueError(
            f"context has {len(ids)} tokens, sender {name!r} takes {limit}: "
            "shorten it, or ask for cut='middle'"
        )
    return np.asarray(prompts.cut_middle(ids, limit), np.int32)


# ---- receiving -----------------------------------------------------------------------------


class Receiver(Counted):
    """A model that answers questions from the packets of senders.

    Every method takes these options besides its own.

    message
        Makes the user turn out of a question's text; default: the paper's for questions.
    preset
        "paper" or "reference"; None: the packets'. Without packets it decides which ids stop.
    shift_back
        The paper's KVComm-S: in layers that are not selected, the question's positions are not
        shifted by the context (Table 11). In preset paper these hold nothing of the context, and
        since rope is relative nothing changes but rounding.
    layer_map
        Receiver layer of each sender layer; needed when the depths differ.
    positions
        Of several senders: "published" keeps all keys at their own positions, which overlap;
        "sequential" moves the keys of a sender behind those of the senders before it.

    Parameters
    ----------
    model
        Shared, not changed.
    any_tokenizer
        Accept packets of a sender with another vocabulary or tokenizer.
    """

    def __init__(self, model: "Model", *, any_tokenizer: bool = False) -> None:
        super().__init__()
        self.model = model
        self.any_tokenizer = any_tokenizer
        self.origin = Origin.of(model)

    def answer(
        self,
        question: Any,
        packet: Any = None,
        max_new_tokens: int = 64,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        stream: Callable[..., None] | None = None,
        **options: Any,
    ) -> Any:
        """Prefill a question behind the packet and decode an answer (method.md section 2).

        Decoding is greedy unless a temperature is given; a model's generation config gives its
        EOS ids and nothing else. Each question of a list draws from a generator of its own with
        this seed, so that its answer is the one it gets alone, bit for bit.

        Parameters
        ----------
        question
            Text or ids, or a list of them.
        packet
            None (the baseline), a Packet, or a tuple of Packets from several senders; for a list
            of questions also a list with one of these per question.
        max_new_tokens
            0 gives an empty answer.
        temperature, top_k, top_p, seed
            Sampling; temperature 0 is greedy, top_k 0 and top_p 1 keep every token.
        stop
            Strings that end the answer; the text ends before them.
        stream
            Called with every new piece of text, in whole characters: stream(text) for one
            question, stream(index, text) for a list.
        **options
            See the class.

        Returns
        -------
        Answer or list of Answer

        Raises
        ------
        ValueError
            Empty question, ids outside the vocabulary, a prompt beyond the model's last
            position, or an argument out of range.
        MismatchError
            A packet that does not fit this model; the message names both sides.
        """
        sampling = Sampling(temperature, top_k, top_p, seed)
        call = Call(self, question, packet, options)
        prefilled = call.prefill()
        decoding = prefilled.decode(max_new_tokens, sampling, stop)
        for number, piece in decoding:
            if stream is not None:
                stream(*((piece,) if call.single else (number, piece)))
        return call.shaped(prefilled.answers(decoding))

    def stream(
        self,
        question: Question,
        packet: Packets = None,
        max_new_tokens: int = 64,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        **options: Any,
    ) -> Iterator[str]:
        """The text of `answer` for one question, piece by piece, in whole characters."""
        if not is_single(question):
            raise TypeError("question: stream takes one question, found a list")
        sampling = Sampling(temperature, top_k, top_p, seed)
        call = Call(self, question, packet, options)
        return _streamed(call, max_new_tokens, sampling, stop)

    def prefill(self, question: Any, packet: Any = None, **options: Any) -> Prefilled:
        """Prefill questions behind their packets, to answer them and to score given answers.

        `answer` and `score` from here cost no second prefill. Parameters and errors as for
        `answer`; one question is a batch of one.
        """
        return Call(self, question, packet, options).prefill()

    def score(self, question: Any, answer: Any, packet: Any = None, **options: Any) -> Any:
        """Likelihood of a given answer, teacher-forced after the question's prompt.

        Parameters
        ----------
        question, packet, **options
            As for `answer`.
        answer
            Text (its tokens as they are, no space before and no EOS) or ids; or a list of
            alternatives, of which the likeliest counts. For a list of questions, a list with one
            of these per question.

        Returns
        -------
        Score or list of Score

        Raises
        ------
        ValueError
            An empty answer or list, or as for `answer`.
        NumericError
            A likelihood that is not a number.
        """
        call = Call(self, question, packet, options)
        golds = [answer] if call.single else answer
        if not isinstance(golds, (list, tuple)):
            raise TypeError(f"answer: expected one per question, found {type(golds).__name__}")
        if len(golds) != len(call.turns):
            raise ValueError(f"answer: {len(golds)} for {len(call.turns)} questions")
        answers = [answer_ids(self.model, gold) for gold in golds]
        for turn, session, ids in zip(call.turns, call.sessions, answers, strict=True):
            self._check_room(session, len(turn.ids) + max(map(len, ids)) - 1)
        return call.shaped(call.prefill().score(answers))

    def logits(
        self, question: Any, packet: Any = None, *, all: bool = False, **options: Any
    ) -> Any:
        """Raw logits of the token after the question, float32 [vocab_size].

        all: of every token of the question's prompt, [Q, vocab_size]. A list of questions gives
        a list of arrays.
        """
        call = Call(self, question, packet, options)
        if not call.turns:
            return []
        out, _ = call.workspace.forward(
            call.sessions,
            [turn.ids for turn in call.turns],
            output="logits",
            outputs="all" if all else "last",
            slack=call.slack,
        )
        self.tally.add(call.workspace.counts)
        if not all:
            return call.shaped(list(out))
        ends = np.cumsum([len(turn.ids) for turn in call.turns])
        return call.shaped(np.split(out, ends[:-1]))

    def mass(
        self, question: Any, packet: Any, *, skip_first: bool | int | None = None, **options: Any
    ) -> Any:
        """Attention that the question pays to the packet, float64 [n_layers, n_heads].

        Per layer and head of this model the weight on the context, mean over the question's
        tokens (method.md section 4). Preset reference measures it with the published softmax and
        without the first context token; `skip_first` decides the latter in either preset, as the
        number of first context tokens that do not count (True is 1). A list of questions gives a
        list of arrays.

        Raises
        ------
        ValueError
            A negative number, or preset reference and a question of one token, which it takes for a
            decode step and does not measure.
        """
        if skip_first is not None and not isinstance(skip_first, int):
            raise TypeError(f"skip_first: expected a number of tokens, found {skip_first!r}")
        if skip_first is not None and skip_first < 0:
            raise ValueError(f"skip_first: {skip_first} is negative")
        call = Call(self, question, packet, options)
        if not call.turns:
            return []
        published = call.preset == "reference"
        if published and any(len(turn.ids) == 1 for turn in call.turns):
            raise ValueError("question: one token is not measured in preset reference")
        _, mass = call.workspace.forward(
            call.sessions,
            [turn.ids for turn in call.turns],
            slack=call.slack,
            mass="published" if published else "paper",
            mass_skip=int(published if skip_first is None else skip_first),
        )
        self.tally.add(call.workspace.counts)
        return call.shaped(list(mass))

    # -- how a call is prepared --

    def _stop_ids(self, turn: Turn, preset: Preset) -> frozenset[int]:
        """EOS ids of the generation config; the published kvcomm knows config.json's only."""
        if preset == "reference" and turn.packets:
            return frozenset(self.model.config_stop_ids)
        return frozenset(self.model.stop_ids)

    def _check_room(self, session: Session, n_tokens: int) -> None:
        end, limit = session.next_position + n_tokens, self.model.max_position
        if end > limit:
            raise ValueError(
                f"{session.next_position} tokens of context and {n_tokens} of the receiver's "
                f"make {end} positions, receiver {self.model.name!r} has {limit}"
            )

    def _open(
        self,
        turn: Turn,
        preset: Preset,
        *,
        shift_back: bool = False,
        layer_map: Sequence[int] | None = None,
        positions: Positions = "published",
    ) -> tuple[Session, list[int] | None]:
        """A session that holds the turn's packets, and the slack of its prefill per layer."""
        session = _session(self.model)
        slack = None
        if turn.packets:
            kv = self._joined(turn.packets, layer_map, positions)
            start, n_layers = kv.next_position, self.model.n_layers
            target = check_layer_map(layer_map, kv.n_layers, n_layers)
            session.give(kv, list(target))  # its positions begin at `start`, the sum of lengths
            whole = {target[layer] for packet in turn.packets for layer in packet.whole_layers}
            others = [layer for layer in range(n_layers) if layer not in whole]
            if preset == "reference":
                held = [start if n in whole else int(n in target) for n in range(n_layers)]
                slack = _published_slack(held, len(turn.ids), shift_back)
            if shift_back:
                session.set_shift(int(preset == "reference") - start, others)
        self._check_room(session, len(turn.ids))
        return session, slack

    def _joined(
        self,
        packets: tuple[Packet, ...],
        layer_map: Sequence[int] | None,
        positions: Positions,
    ) -> KV:
        """The packets of all senders as one, after checking that they fit this model."""
        for packet in packets:
            held = [n for n, length in enumerate(packet.kv.lengths) if length]
            packet.origin.check_receiver(
                self.origin, held, layer_map, any_tokenizer=self.any_tokenizer
            )
            if len(packets) > 1 and positions == "published":
                for layer in held:
                    if packet.origin.windowed[layer]:
                        raise UnsupportedError(
                            f"layer {layer} of sender {packet.origin.model!r} is windowed and the "
                            "senders' positions overlap: ask for positions='sequential'"
                        )
        if positions not in ("published", "sequential"):
            raise ValueError(
                f"positions: expected 'published' or 'sequential', found {positions!r}"
            )
        first = packets[0]
        if len(packets) == 1:
            return first.kv
        whole = None
        if first.preset == "reference":
            whole = first.whole_layers
            for packet in packets:
                if packet.layers != first.layers:
                    raise MismatchError(
                        f"senders chose layers {first.layers} and {packet.layers}: preset "
                        "reference takes the same layers of all"
                    )
        return KV.concat(
            [packet.kv for packet in packets],
            sequential=positions == "sequential",
            whole=whole,
        )


def _published_slack(held: Sequence[int], n_query: int, shift_back: bool) -> list[int] | None:
    """How far ahead the published code lets a question token see, per layer; None: not at all.

    It makes one mask, for layer 0, and cuts it to every layer's own length. So where a layer
    holds held[n] keys of the context, token i sees own tokens j <= i + held[0] - held[n].
    """
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
    slack = [min(held[0] - n, n_query) for n in held]
    return None if shift_back or not any(slack) else slack


#: What every method of a receiver takes besides its own arguments.
_OPTIONS = ("message", "preset", "shift_back", "layer_map", "positions")


class Call:
    """The questions of one call, each in a session of its own behind its packets."""

    def __init__(
        self, receiver: Receiver, question: Any, packet: Any, options: dict[str, Any]
    ) -> None:
        self.started = time.perf_counter()
        for name in options:
            if name not in _OPTIONS:
                raise TypeError(f"unknown option {name!r}: expected one of {', '.join(_OPTIONS)}")
        options = dict(options)
        message = options.pop("message", prompts.receiver_message)
        preset = options.pop("preset", None)
        self.receiver = receiver
        self.single = is_single(question)
        self.turns = turns_of(receiver.model, question, packet, message)
        self.preset = common_preset(self.turns, preset)
        opened = [receiver._open(turn, self.preset, **options) for turn in self.turns]
        self.sessions = [session for session, _ in opened]
        slack = [row for _, row in opened]
        self.slack = slack if any(row is not None for row in slack) else None
        self.workspace = Workspace(receiver.model.core)

    def prefill(self) -> Prefilled:
        """Run the questions."""
        logits = np.empty((0, self.receiver.model.vocab_size), np.float32)
        if self.turns:
            logits, _ = self.workspace.forward(
                self.sessions,
                [turn.ids for turn in self.turns],
                output="logits",
                slack=self.slack,
            )
        return Prefilled(
            self.receiver,
            self.workspace,
            self.sessions,
            logits,
            stop_ids=[self.receiver._stop_ids(turn, self.preset) for turn in self.turns],
            packets=[turn.packets for turn in self.turns],
            started=self.started,
        )

    def shaped(self, results: list[Any]) -> Any:
        """One result for one question, a list for a list."""
        return results[0] if self.single else results


def _streamed(
    call: Call, max_new_tokens: int, sampling: Sampling, stop: str | Sequence[str]
) -> Iterator[str]:
    prefilled = call.prefill()
    yield from prefilled.pieces(prefilled.decode(max_new_tokens, sampling, stop))


def _session(model: "Model") -> Session:
    return Session(model.core, kv_dtype=model.kv_dtype)
