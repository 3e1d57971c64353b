"""Records and recordings for the methods that pass texts or embeddings (nld, cipher).

Owns three short records with prompts of a real task, and the way to benchmarks/parity_text.py. Owns
no test.
"""

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from kvcomm.agents import Receiver, Sender
from kvcomm.methods import Bench, Method
from kvcomm.model import Model
from kvcomm.plan import Plan, Prompts
from kvcomm.tasks import Example, Task, find

N_NEW = 5
TASK = replace(find("hotpotqa"), max_new_tokens=N_NEW)
EXAMPLES = tuple(
    Example(f"r{number}", number, " ".join(pieces), question, answers, pieces, joint=" ")
    for number, (pieces, question, answers) in enumerate(
        (
            (("The red boat is on the lake.", "Ann rows it."), "Who rows?", ("Ann", "Ann does")),
            (("In the inn there is a stove.", "It is hot."), "What is hot?", ("the stove",)),
            (("Birds sing.", "One is a thrush.", "Two are not."), "Which bird sings?", ("thrush",)),
        )
    )
)


def bench_of(
    sender: Model,
    receiver: Model | None = None,
    *,
    task: Task = TASK,
    limit: int | None = None,
    examples: tuple[Example, ...] = EXAMPLES,
    **options: Any,
) -> Bench:
    """A bench with the items of the records."""
    receiver = sender if receiver is None else receiver
    bench = Bench(Sender(sender), Receiver(receiver), max_new_tokens=N_NEW, **options)
    bench.prompts = Prompts(bench, task, Plan((), examples, {}), limit)
    bench.items = [bench.prompts.item(number, one) for number, one in enumerate(examples)]
    return bench


def assert_alone_as_together(method: Method, bench: Bench) -> None:
    """An item's outcome is the one that it has alone, to the bit, in any order."""
    together = method.run(bench, bench.items)
    backwards = method.run(bench, bench.items[::-1])[::-1]
    for item, one, other in zip(bench.items, together, backwards, strict=True):
        (alone,) = method.run(bench, [item])
        for outcome in (one, other):
            assert outcome.nll == alone.nll
            assert outcome.token_ids == alone.token_ids
            assert outcome.message == alone.message
            assert outcome.message_bytes == alone.message_bytes
            assert [ids.tolist() for ids in outcome.prompts] == [
                ids.tolist() for ids in alone.prompts
            ]


def parity() -> ModuleType:
    """benchmarks/parity_text.py, which stands beside the package and not in it."""
    folder = str(Path(__file__).resolve().parent.parent / "benchmarks")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module("parity_text")


def assert_equal(outcomes: list[Any], n: int) -> None:
    """As many comparisons as there should be, all equal but for what is explained."""
    wrong = [one for one in outcomes if not one.equal and not one.near_tie]
    assert not wrong, "\n".join(f"{o.group} {o.case}: {o.error:.2e} {o.note}" for o in wrong)
    assert len(outcomes) == n
