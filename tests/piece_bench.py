"""Records with real texts for the methods that write or change sender's prompts.

Owns four records of pieces, and a bench of one model with their items. Owns no test.
"""

from collections.abc import Sequence
from dataclasses import replace

from kvcomm.agents import Receiver, Sender
from kvcomm.methods import Bench
from kvcomm.model import Model
from kvcomm.plan import Plan, Prompts
from kvcomm.tasks import Example, find

TASK = replace(find("hotpotqa"), max_new_tokens=4)

#: Pieces of context, question, answers. The second and third record share their context.
TEXTS = (
    (("The red boat is on the lake.", "Ann owns it.", "It has a mast."), "Whose boat?", ("Ann",)),
    (("The inn is shut.", "Rain has come to the town."), "Is the inn open?", ("no", "not now")),
    (("The inn is shut.", "Rain has come to the town."), "What has come?", ("rain",)),
    (("Ten men ran.", "Two of the ten ran on, eight sat.", "Then one sat."), "How many?", ("one",)),
)


def example(number: int, texts: Sequence = TEXTS) -> Example:
    pieces, question, answers = texts[number]
    return Example(f"r{number}", number, "\n".join(pieces), question, answers, pieces=pieces)


def bench_of(model: Model, *, texts: Sequence = TEXTS, **options: object) -> Bench:
    """A bench of one model that reads all layers, with the records as its items."""
    bench = Bench(Sender(model), Receiver(model), max_new_tokens=TASK.max_new_tokens, **options)
    plan = Plan((), tuple(example(n, texts) for n in range(len(texts))), {})
    bench.prompts = Prompts(bench, TASK, plan, None)
    bench.items = [bench.prompts.item(n, one) for n, one in enumerate(plan.scored)]
    bench.read_layers = tuple(range(model.n_layers))
    return bench
