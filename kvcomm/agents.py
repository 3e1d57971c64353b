"""The paper in one file: a sender reads, a receiver answers from what the sender read.

    sender.read(context, layers) -> Packet       prefill, keep K and V of the chosen layers
    receiver.answer(question, packet) -> Answer   question behind them, then decode

Owns what can be asked of the two, in presets "paper" (the text of the paper) and "reference" (its
published code). In every layer (the paper's section 3)

    keys a question token sees = [ what the layer was given ; own keys up to its own ]

    preset      given, selected    given, other    question starts at     other layers look ahead
    paper       whole context      nothing         C in every layer       no
    reference   whole, and layer   first token     C in every layer       C - 1 tokens, while the
                0 always                                                  question is prefilled

With several senders C is the sum of their lengths. Does not do arithmetic (the core's) or choose
layers (selection.py); reading.py reads, handover.py puts the table above into effect, generate.py
decodes, turns.py says what contexts, questions and packets may be. Calls may run in several threads
at once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvcomm import prompts, reading
from kvcomm.account import Counted
from kvcomm.generate import Rules, Sampling
from kvcomm.handover import Call, Positions
from kvcomm.packet import Origin, Preset, check_preset, layer_set
from kvcomm.prefilled import Prefilled
from kvcomm.turns import (
    Answer,
    Message,
    Packets,
    Question,
    answer_ids,
    check_room,
    is_single,
    prompt_ids,
)

if TYPE_CHECKING:
    from kvcomm.model import Model
    from kvcomm.tokenizer import Tokenizer

__all__ = ["Call", "Positions", "Receiver", "Sender", "published_layer_map"]


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
        (Preset reference wants the first token's K and V of the higher layers too.) What it cost
        stands in the packet's `stats`.

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
        ids = [
            prompt_ids(self.model, self.tokenizer, one, message, "context")
            for one in ([context] if single else context)
        ]
        packets = reading.read(self, ids, chosen, preset, limit=limit, cut=cut)
        packets = [packet.trim() for packet in packets] if trim else packets
        return packets[0] if single else packets


# ---- receiving -----------------------------------------------------------------------------


class Receiver(Counted):
    """A model that answers questions from the packets of senders.

    Every method takes these options besides its own.

    message
        Makes the user turn out of a question's text; default: the paper's for questions.
    preset
        "paper" or "reference"; None: the packets'.
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
        batch_size: int | None = None,
        **options: Any,
    ) -> Any:
        """Prefill a question behind the packet and decode an answer (the paper's section 3).

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
            0: an empty answer, and nothing runs.
        temperature, top_k, top_p, seed
            Sampling; temperature 0 is greedy, top_k 0 and top_p 1 keep every token.
        stop
            Strings that end the answer; the text ends before them.
        stream
            Called with every new piece of text, in whole characters: stream(text) for one
            question, stream(index, text) for a list.
        batch_size
            Most questions of a list at a time; None: all.
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
        rules = Rules(max_new_tokens, stop, Sampling(temperature, top_k, top_p, seed))
        call = Call(self, question, packet, options)
        decoding = call.decode(rules, batch_size)
        try:
            if stream is None:
                decoding.run()
            else:
                for number, piece in decoding:
                    stream(*((piece,) if call.single else (number, piece)))
        finally:
            self.count(call.workspace)
        return call.shaped(call.answers(decoding))

    def answer_many(
        self,
        questions: Iterable[Question],
        packets: Any = None,
        max_new_tokens: int = 64,
        *,
        batch_size: int = 32,
        **options: Any,
    ) -> list[Answer]:
        """Answer any number of questions, `batch_size` at a time.

        An answer that has ended makes room at once: the next question is prefilled beside the
        tokens of those that are being decoded. Only these hold K and V of their own; packets are
        shared, and what questions about the same packets begin with alike (a chat template's head)
        runs once. Answers are those of `answer` for each question alone, bit for bit.

        Parameters
        ----------
        questions
            Texts or ids, of any lengths.
        packets
            One for all (None, a Packet, or a tuple of Packets from several senders), or a list
            with one of these per question.
        max_new_tokens, **options
            As for `answer`.

        Returns
        -------
        list of Answer, in the order of the questions

        Raises
        ------
        TypeError, ValueError, MismatchError
            One question instead of several; else as for `answer`, before any question runs.
        """
        several = questions if isinstance(questions, str) else list(questions)
        if is_single(several):
            raise TypeError("questions: answer_many takes several, found one")
        return self.answer(several, packets, max_new_tokens, batch_size=batch_size, **options)

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
        """The text of `answer` for one question, piece by piece, in whole characters.

        Raises
        ------
        TypeError
            A list of questions.
        ValueError, MismatchError
            As for `answer`, at once; NumericError while the pieces come.
        """
        if not is_single(question):
            raise TypeError("question: stream takes one question, found a list")
        rules = Rules(max_new_tokens, stop, Sampling(temperature, top_k, top_p, seed))
        return self._pieces(Call(self, question, packet, options), rules)

    def _pieces(self, call: Call, rules: Rules) -> Iterator[str]:
        try:
            for _, piece in call.decode(rules):
                yield piece
        finally:
            self.count(call.workspace)

    def prefill(self, question: Any, packet: Any = None, **options: Any) -> Prefilled:
        """Prefill questions behind their packets, to answer them and to score given answers.

        `answer` and `score` from here cost no second one. Parameters and errors as for `answer`.
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
        for turn, given, ids in zip(call.turns, call.given, answers, strict=True):
            check_room(self.model, given.start, len(turn) + max(map(len, ids)) - 1)
        return call.shaped(call.prefill().score(answers))

    def logits(
        self, question: Any, packet: Any = None, *, all: bool = False, **options: Any
    ) -> Any:
        """Raw logits of the token after the question, float32 [vocab_size].

        all: of every token of the question's prompt, [Q, vocab_size]. A list of questions gives
        a list of arrays.

        Raises
        ------
        TypeError, ValueError, MismatchError, NumericError
            As for `answer`.
        """
        call = Call(self, question, packet, options)
        if not call.turns:
            return []
        out, _ = call.run(output="logits", outputs="all" if all else "last")
        if not all:
            return call.shaped(list(out))
        ends = np.cumsum([len(turn.ids) for turn in call.turns])
        return call.shaped(np.split(out, ends[:-1]))

    def mass(
        self, question: Any, packet: Any, *, skip_first: bool | int | None = None, **options: Any
    ) -> Any:
        """Attention that the question pays to the packet, float64 [n_layers, n_heads].

        Per layer and head of this model the weight on the context, mean over the question's
        tokens (the paper's section 3). Preset reference measures it with the published softmax and
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
        _, mass = call.run(
            mass="published" if published else "paper",
            mass_skip=int(published if skip_first is None else skip_first),
        )
        return call.shaped(list(mass))
