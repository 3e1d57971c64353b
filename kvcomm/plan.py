"""Before a run: which records do what, and the prompts that models get of them.

Owns the division into calibration and scored records, and how a record becomes an `Item`: user
turns of the task, chat template, ids, cut. Runs no model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvcomm import prompts
from kvcomm.methods import Bench, Item
from kvcomm.tasks import Example, Task
from kvcomm.turns import prompt_ids

#: Longest prompt of the published experiment, in tokens.
MAX_INPUT_TOKENS = 64000


@dataclass(frozen=True)
class Plan:
    """Which records do what.

    calibration: records that the layers are chosen from; scored: records that methods answer.
    excluded: ids of records left out, by reason.
    """

    calibration: tuple[Example, ...]
    scored: tuple[Example, ...]
    excluded: Mapping[str, tuple[str, ...]]


def divide(
    examples: Sequence[Example],
    *,
    calibration: Sequence[Example] | None = None,
    n_calibration: int = 1,
    limit: int | None = None,
    published: bool = False,
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

    Raises
    ------
    ValueError
        Nothing is left to score, or there are too few records to calibrate on.
    """
    if n_calibration < 0:
        raise ValueError(f"calibration records: {n_calibration} is negative")
    if limit is not None and limit < 1:
        raise ValueError(f"limit: expected 1 or more records, found {limit}")
    pool = examples if calibration is None else calibration
    chosen = tuple(pool[:n_calibration])
    if len(chosen) < n_calibration:
        raise ValueError(f"calibration records: expected {n_calibration}, found {len(chosen)}")
    taken = set() if published else {(one.context, one.question) for one in chosen}
    excluded: dict[str, list[str]] = {"calibration": [], "no gold answer": []}
    scored: list[Example] = []
    for example in examples:
        if (example.context, example.question) in taken:
            excluded["calibration"].append(example.id)
        elif not any(example.answers):
            excluded["no gold answer"].append(example.id)
        else:
            scored.append(example)
    if not scored:
        counts = ", ".join(f"{len(ids)} left out ({why})" for why, ids in excluded.items())
        raise ValueError(f"no record to score: of {len(examples)}, {counts}")
    return Plan(chosen, tuple(scored[:limit]), {why: tuple(ids) for why, ids in excluded.items()})


class Prompts:
    """Turns records into items: user turns of the task, chat template, ids, cut.

    Sender's prompt and question have to fit the limit together; what is cut is the middle of the
    sender's prompt, never the question. In preset paper the skyline's prompt loses the very tokens
    that the sender's lost, so that both have read the same; in preset reference it loses the
    middle of the whole prompt, as published.
    """

    def __init__(self, bench: Bench, task: Task, plan: Plan, limit: int | None) -> None:
        self.plan = plan
        self._bench, self._task = bench, task
        self._encode = bench.receiver.model.tokenizer.encode
        golds = [len(ids) for one in plan.scored for ids in self._gold(one)]
        # Behind the prompt there has to be room for an answer, the model's or a gold one.
        reserve = max([bench.max_new_tokens, *golds])
        models = (bench.sender.model, bench.receiver.model)
        room = min(model.max_position for model in models) - reserve
        self.limit = min(MAX_INPUT_TOKENS if limit is None else limit, room)
        if self.limit < 1:
            raise ValueError(
                f"prompts: {reserve} tokens of an answer leave {room} of the models' "
                f"{room + reserve} positions"
            )

    def item(self, number: int, example: Example) -> Item:
        """The prompts of one record.

        Raises
        ------
        ValueError
            An empty context or question, or a question that leaves no room for a context.
        """
        family = self._task.family
        sender, receiver = self._bench.sender, self._bench.receiver

        def ids(message: str) -> np.ndarray:
            return prompt_ids(receiver.model, receiver.model.tokenizer, message, str, "prompt")

        for what, text in (("context", example.context), ("question", example.question)):
            if not text.strip():
                raise ValueError(f"{what} is empty")
        message = prompts.sender_message(example.context, family)
        whole = prompt_ids(sender.model, sender.tokenizer, message, str, "context")
        question = ids(prompts.receiver_message(example.question, family))
        skyline = ids(prompts.skyline_message(example.context, example.question, family))
        cut, sender_cut, skyline_cut = whole, 0, 0
        if self._task.truncates:
            cut, sender_cut = prompts.cut_sender(whole, len(question), self.limit)
            if self._bench.preset == "reference":
                skyline, skyline_cut = prompts.cut_prompt(skyline, self.limit)
            elif sender_cut:
                head = len(cut) // 2
                skyline = np.concatenate([skyline[:head], skyline[head + sender_cut :]])
                skyline_cut = sender_cut
        return Item(
            number=number,
            sender=cut,
            receiver=question,
            baseline=ids(prompts.baseline_message(example.question, family)),
            skyline=skyline,
            sender_cut=sender_cut,
            skyline_cut=skyline_cut,
            gold=tuple(self._gold(example)),
        )

    def _gold(self, example: Example) -> list[np.ndarray]:
        return [np.array(self._encode(text), np.int32) for text in example.answers if text]
