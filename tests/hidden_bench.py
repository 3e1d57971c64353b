"""Records and checks for the methods that pass or lose hidden states.

Owns three records of token ids, and what an outcome has to be when the oracle says which logits
follow a prompt and what was decoded behind it. Owns no test.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from oracle.transformer import softmax

from kvcomm.agents import Receiver, Sender
from kvcomm.methods import Bench, Item, Method, Outcome
from kvcomm.model import Model
from kvcomm.tasks import Example

N_NEW = 5
#: Logits of f32 arithmetic against the oracle's f64.
LOGITS = 2e-5

#: decoded ids -> logits [n, vocab] of the prompt's and the decoded tokens.
Logits = Callable[[Sequence[int]], NDArray[np.float64]]


def bench_of(sender: Model, receiver: Model | None = None, **options: object) -> Bench:
    receiver = sender if receiver is None else receiver
    return Bench(Sender(sender), Receiver(receiver), max_new_tokens=N_NEW, **options)


def items(*, context: str = "some context") -> list[Item]:
    """Contexts of 21, 11 and 34 tokens, questions of 9, 12 and 1; the second has two answers."""
    draw = np.random.default_rng(5)

    def ids(n: int) -> NDArray[np.int32]:
        return draw.integers(0, 250, n).astype(np.int32)

    made = []
    for number, (n_context, n_question) in enumerate(((21, 9), (11, 12), (34, 1))):
        sender, receiver = ids(n_context), ids(n_question)
        made.append(
            Item(
                number=number,
                example=Example(str(number), number, context, "a question", ("an answer",)),
                sender=sender,
                receiver=receiver,
                baseline=ids(7),
                skyline=np.concatenate([sender, receiver]),
                skyline_shared=n_context,
                sender_cut=3,
                skyline_cut=2,
                gold=(ids(3), ids(4)) if number == 1 else (ids(3),),
            )
        )
    return made


def recorded_items(shared: Path, model: Model, n: int) -> list[Item]:
    """The first recorded HotpotQA records of SmolLM2, which is `model`."""
    data = json.loads((shared / "reference" / "oracle_smollm2.json").read_text())
    made = []
    for number, record in enumerate(data["items"]["hotpotqa"]["items"][:n]):
        sender, receiver, skyline = (
            np.array(record[part]["ids"], np.int32) for part in ("sender", "receiver", "skyline")
        )
        gold = (np.array(model.tokenizer.encode(record["gold"]), np.int32),)
        example = Example(str(number), number, "a context", record["question"], (record["gold"],))
        made.append(Item(number, example, sender, receiver, receiver, skyline, 1, 0, 0, gold))
    return made


def total_nll(method: Method, bench: Bench, records: Sequence[Item]) -> float:
    return sum(outcome.nll for outcome in method.run(bench, records))


def nll(logits: Logits, gold: NDArray[np.int32]) -> float:
    rows = logits(gold.tolist())[-len(gold) - 1 : -1]
    return float(-np.log(softmax(rows)[np.arange(len(gold)), gold]).sum())


def greedy(logits: Logits, stop_ids: Sequence[int]) -> tuple[int, ...]:
    found: list[int] = []
    while len(found) < N_NEW and not (found and found[-1] in stop_ids):
        found.append(int(np.argmax(logits(found)[-1])))
    return tuple(found)


def check_outcome(outcome: Outcome, item: Item, logits: Logits, model: Model) -> None:
    """Greedy ids and the likelihood of the likeliest gold answer."""
    assert outcome.token_ids == greedy(logits, model.stop_ids)
    expected = [nll(logits, gold) for gold in item.gold]
    assert abs(outcome.nll - min(expected)) < 1e-4
    assert outcome.n_gold_tokens == len(item.gold[int(np.argmin(expected))])
    assert outcome.layers is None
    assert outcome.seconds.total >= outcome.seconds.sender + (outcome.seconds.first_token or 0)


def assert_alone_as_together(method: Method, bench: Bench) -> None:
    """An item's outcome is the one that it has alone, to the bit, in any order."""
    together = method.run(bench, items())
    backwards = method.run(bench, items()[::-1])[::-1]
    for item, one, other in zip(items(), together, backwards, strict=True):
        (alone,) = method.run(bench, [item])
        assert alone.nll == one.nll == other.nll
        assert alone.token_ids == one.token_ids == other.token_ids
