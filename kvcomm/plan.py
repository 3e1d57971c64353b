"""Before a run: which records do what, and the prompts that models get of them.

Owns the division into calibration and scored records, and how a record becomes an `Item`, or a
prompt that a method writes for itself becomes ids: user turns of the task, chat template, what a
think model's prompts end in, cut. Runs no model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from kvcomm import prompts
from kvcomm.methods import Bench, Item, Senders, TokenIds
from kvcomm.tasks import Example, Task
from kvcomm.turns import prompt_ids

Role = Literal["sender", "receiver"]

#: Longest prompt of the published experiment, in tokens.
MAX_INPUT_TOKENS = 64000


@dataclass(frozen=True)
class Plan:
    """Which records do what.

    calibration: records that the layers are chosen from; scored: records that methods answer.
    excluded: ids of records left out, by reason. published: whether calibration records are scored
    too, as in the published protocol.
    """

    calibration: tuple[Example, ...]
    scored: tuple[Example, ...]
    excluded: Mapping[str, tuple[str, ...]]
    published: bool = False


class TooFewError(ValueError):
    """The records do not suffice for what is asked of them."""


def divide(
    examples: Sequence[Example],
    *,
    calibration: Sequence[Example] | None = None,
    n_calibration: int = 1,
    limit: int | None = None,
    published: bool = False,
    senders: Senders = "one",
) -> Plan:
    """Divide records into those that calibrate and those that are scored.

    Parameters
    ----------
    examples
        The records of the data file.
    calibration
        Records of another file; its first `n_calibration` calibrate. None: the first of `examples`
        do.
    limit
        Score at most so many.
    published
        Score the calibration records too, as the published code does. Else a record with the
        context and question of one that calibrates is left out.
    senders
        Unless "one", records that cannot be dealt out to two senders are left out, as published.

    Raises
    ------
    TooFewError
        Nothing is left to score, or there are too few records to calibrate on.
    ValueError
        A limit or a number of records out of range.
    """
    if n_calibration < 0:
        raise ValueError(f"calibration records: {n_calibration} is negative")
    if limit is not None and limit < 1:
        raise ValueError(f"limit: expected 1 or more records, found {limit}")
    source = examples if calibration is None else calibration
    pool = _dealable(source, senders)
    chosen = tuple(pool[:n_calibration])
    if len(chosen) < n_calibration:
        left_out = len(source) - len(pool)
        why = f", {left_out} left out ({_ONE_PIECE})" if left_out else ""
        raise TooFewError(
            f"calibration records: expected {n_calibration}, found {len(chosen)} of "
            f"{len(source)}{why}"
        )
    taken = set() if published else {(one.context, one.question) for one in chosen}
    excluded: dict[str, list[str]] = {"calibration": [], "no gold answer": []}
    dealable = _dealable(examples, senders)
    if len(dealable) < len(examples):
        left = {one.id for one in dealable}
        excluded[_ONE_PIECE] = [one.id for one in examples if one.id not in left]
    scored: list[Example] = []
    for example in dealable:
        if (example.context, example.question) in taken:
            excluded["calibration"].append(example.id)
        elif not any(example.answers):
            excluded["no gold answer"].append(example.id)
        else:
            scored.append(example)
    if not scored:
        counts = ", ".join(f"{len(ids)} left out ({why})" for why, ids in excluded.items())
        raise TooFewError(f"no record to score: of {len(examples)}, {counts}")
    named = {why: tuple(ids) for why, ids in excluded.items()}
    return Plan(chosen, tuple(scored[:limit]), named, published)


_ONE_PIECE = "no context for two senders"


def _dealable(examples: Sequence[Example], senders: Senders) -> Sequence[Example]:
    """The records that have a context for each of the senders."""
    if senders == "one":
        return examples
    return [one for one in examples if len(one.pieces) > 1]


class Prompts:
    """Turns records into items: user turns of the task, chat template, ids, cut.

    Sender's prompt and question have to fit the limit together; what is cut is the middle of the
    sender's prompt, never the question. In preset paper the skyline's prompt loses the very tokens
    that the sender's lost, so that both have read the same; in preset reference it loses the
    middle of the whole prompt, as published.

    Parameters
    ----------
    limit
        Most tokens of a prompt; None: the published 64,000. Never more than the models have.
    think
        Whether the models reason before they answer and are to be kept from it, as published; None:
        each model that is in `prompts.THINK_MODELS` by the name it was loaded as or by its
        configuration's.

    Attributes
    ----------
    task, plan : Task, Plan
        As given.
    limit : int
        Most tokens of a prompt.
    think : dict of str to bool
        By "sender" and "receiver", whether it is taken for a think model.
    """

    def __init__(
        self,
        bench: Bench,
        task: Task,
        plan: Plan,
        limit: int | None,
        *,
        think: bool | None = None,
    ) -> None:
        self.task, self.plan = task, plan
        self._bench = bench
        self._encode = bench.receiver.model.tokenizer.encode
        models = {"sender": bench.sender.model, "receiver": bench.receiver.model}
        self._agents = {
            "sender": (bench.sender.model, bench.sender.tokenizer),
            "receiver": (bench.receiver.model, bench.receiver.model.tokenizer),
        }
        self.think = {
            role: prompts.is_think_model((model.name, model.config.raw.get("_name_or_path")))
            if think is None
            else think
            for role, model in models.items()
        }
        golds = [len(ids) for one in (*plan.calibration, *plan.scored) for ids in self._gold(one)]
        # Behind the prompt there has to be room for an answer, the model's or a gold one.
        reserve = max([bench.max_new_tokens, *golds])
        self._room = min(model.max_position for model in models.values()) - reserve
        if limit is not None and limit < 1:
            raise ValueError(f"max_input_tokens: expected 1 or more, found {limit}")
        self.limit = min(MAX_INPUT_TOKENS if limit is None else limit, self._room)
        if self.limit < 1:
            raise ValueError(
                f"prompts: {reserve} tokens of an answer leave {self._room} of the models' "
                f"{self._room + reserve} positions"
            )

    @property
    def settings(self) -> dict[str, Any]:
        """Every text that decides a prompt, as JSON can hold it."""
        suffix = prompts.think_suffix(self.task.name) if any(self.think.values()) else None
        return {
            **asdict(prompts.FAMILIES[self.task.family]),
            "refine": dict(prompts.REFINE),
            "think": dict(self.think),
            "think_suffix": suffix,
        }

    def check_context(self, label: str) -> None:
        """Refuse a method that hands a context over, for a task that has none."""
        if not self.task.needs_context:
            raise ValueError(
                f"method: {label!r} hands a context over, and task {self.task.name!r} has none: "
                "baseline and token_importance do without"
            )

    def calibration(self) -> list[Item]:
        """The items of the records that calibrate, numbered by themselves; errors as of `item`."""
        items = []
        for number, one in enumerate(self.plan.calibration):
            try:
                items.append(self.item(number, one))
            except ValueError as error:
                raise ValueError(f"calibration record {one.id!r}: {error}") from None
        return items

    def item(self, number: int, example: Example) -> Item:
        """The prompts of one record. A record without a context has an empty sender's prompt, and
        the baseline's for the skyline.

        Raises
        ------
        ValueError
            An empty question, an empty context where the task has contexts, or a question that
            leaves no room for a context.
        """
        family = self.task.family
        has_context = bool(example.context.strip())
        if not has_context and self.task.needs_context:
            raise ValueError("context is empty")
        if not example.question.strip():
            raise ValueError("question is empty")
        question = self.ids(self.question(example), "receiver")
        baseline = self.ids(prompts.baseline_message(example.question, family), "receiver")
        skyline, shared = self._skyline(example) if has_context else (baseline, 1)
        cut = whole = self.sender(example.context) if has_context else np.empty(0, np.int32)
        sender_cut, skyline_cut = 0, 0
        if self.task.truncates and has_context:
            cut, sender_cut = prompts.cut_sender(whole, len(question), self.limit)
            at = len(cut) // 2
            if self._bench.preset == "paper":
                skyline_cut = sender_cut
                skyline = np.concatenate([skyline[:at], skyline[at + sender_cut :]])
            else:
                skyline, skyline_cut = prompts.cut_prompt(skyline, self.limit)
                at = len(skyline) // 2
            if shared > at:
                shared = max(at, shared - skyline_cut)
        return Item(
            number=number,
            example=example,
            sender=cut,
            receiver=question,
            baseline=baseline,
            skyline=skyline,
            # One token at least on either side, since neither part of a prompt may be empty.
            skyline_shared=min(max(shared, 1), len(skyline) - 1),
            sender_cut=sender_cut,
            skyline_cut=skyline_cut,
            gold=tuple(self._gold(example)),
        )

    def _skyline(self, example: Example) -> tuple[TokenIds, int]:
        """The skyline's prompt, ids, and how many of the first ones any other question has too."""
        other = "!" if example.question.startswith("?") else "?"
        one, two = (
            self.ids(
                prompts.skyline_message(example.context, question, self.task.family), "receiver"
            )
            for question in (example.question, other)
        )
        n = min(len(one), len(two))
        differ = np.flatnonzero(one[:n] != two[:n])
        return one, int(differ[0]) if differ.size else n

    def _gold(self, example: Example) -> list[np.ndarray]:
        return [np.array(self._encode(text), np.int32) for text in example.answers if text]

    # ---- prompts that methods write ------------------------------------------------------------

    def question(self, example: Example) -> str:
        """The user turn that a receiver answers behind a message."""
        return prompts.receiver_message(example.question, self.task.family)

    def sender(self, context: str) -> TokenIds:
        """The prompt that a sender reads without answering it, whole, ids [C]."""
        ids = self._chat(prompts.sender_message(context, self.task.family), "sender")
        return self._without_think(ids) if self.think["sender"] else ids

    def deal(
        self, item: Item, how: Senders, *, writes: bool = False, aware: bool = False
    ) -> tuple[tuple[TokenIds, ...], int]:
        """The senders' prompts of an item, and how many tokens they lost together.

        Parameters
        ----------
        how
            "one" sender, or as for `Example.split`.
        writes
            The senders are to answer their prompts.
        aware
            Their instruction says what the answer is for.

        Raises
        ------
        ValueError
            A context that cannot be dealt out, or a question that leaves no room for it.
        """
        example, family = item.example, self.task.family
        contexts = (example.context,) if how == "one" else example.split(how)
        if writes:
            messages = [prompts.sender_message(one, family, aware=aware) for one in contexts]
            whole = [self.ids(message, "sender") for message in messages]
        else:
            whole = [self.sender(one) for one in contexts]
        if not self.task.truncates:
            return tuple(whole), 0
        parts = prompts.cut_contexts(whole, len(item.receiver), self.limit)
        return tuple(ids for ids, _ in parts), sum(n_cut for _, n_cut in parts)

    def ids(self, message: str, role: Role) -> TokenIds:
        """A user turn that a model is to answer: in its chat template, ids [n]; a think model's
        with what it has to end in."""
        return self._ended(self._chat(message, role), role)

    def pieces(self, parts: Sequence[str], role: Role) -> list[TokenIds]:
        """The same for a user turn with gaps, for something that is no text: ids of every part.

        Each part is tokenised by itself, the first with the beginning of the chat template and the
        last with its end. No text of a part can make a gap, nor a control token.

        Raises
        ------
        ValueError
            A chat template that does not print the turn once, as it is.
        """
        _, tokenizer = self._agents[role]
        gap = "\ue000gap"  # begins with a character for private use
        while any(gap in part for part in parts):
            gap += "p"
        turn = [{"role": "user", "content": gap.join(parts)}]
        found = tokenizer.render(turn).count(gap)
        if found != len(parts) - 1:
            raise ValueError(
                f"chat template: expected a turn's {len(parts) - 1} gaps, found {found}"
            )
        template = tokenizer.chat_templates["default"]
        pieces = [
            np.array(tokenizer.chat(turn, chat_template=_piece_of(template, gap, n)), np.int32)
            for n in range(len(parts))
        ]
        return [*pieces[:-1], self._ended(pieces[-1], role)]

    def fit(self, ids: TokenIds) -> tuple[TokenIds, int]:
        """A whole prompt that a method wrote, cut in its middle where the task allows it, and how
        many tokens are gone.

        Raises
        ------
        ValueError
            A prompt that is too long and may not be cut.
        """
        if self.task.truncates:
            return prompts.cut_prompt(ids, self.limit)
        self.check_length(len(ids))
        return ids, 0

    def check_length(self, n_tokens: int) -> None:
        """Refuse a prompt that cannot be cut and is too long for an answer behind it."""
        limit = self.limit if self.task.truncates else self._room
        if n_tokens > limit:
            raise ValueError(f"refine prompt: {n_tokens} tokens, {limit} are the limit")

    def _chat(self, message: str, role: Role) -> TokenIds:
        model, tokenizer = self._agents[role]
        return prompt_ids(model, tokenizer, message, str, "prompt")

    def _ended(self, ids: TokenIds, role: Role) -> TokenIds:
        if not self.think[role]:
            return ids
        _, tokenizer = self._agents[role]
        suffix = tokenizer.encode(prompts.think_suffix(self.task.name), special=True)
        return np.concatenate([ids, np.array(suffix, np.int32)])

    def _without_think(self, ids: TokenIds) -> TokenIds:
        _, tokenizer = self._agents["sender"]
        token = tokenizer.encode(prompts.THINK, special=True)
        return ids[ids != token[0]] if len(token) == 1 else ids


def _piece_of(template: str, gap: str, number: int) -> str:
    """A chat template that prints what `template` does, between two gaps.

    The signs at the block tags keep the white space beside them, and one line break at the very
    end belongs to no template.
    """
    source = template.removesuffix("\n").removesuffix("\r")
    return (
        "{% set whole_prompt +%}" + source + "{%+ endset %}"
        "{{ whole_prompt.split('" + gap + "')[" + str(number) + "] }}"
    )
