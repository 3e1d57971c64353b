"""`kvcomm calibrate`: layer scores of a pair of models on a kind of data."""

import argparse

from kvcomm.options.choice import FIRST_TOKEN, add_alpha, add_preset
from kvcomm.options.data import add_data
from kvcomm.options.output import add_json, print_json
from kvcomm.options.pair import add_models, layer_map_of, load_pair
from kvcomm.options.values import path

HELP = "measure which layers the receiver looks at"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_models(parser)
    add_data(parser)
    parser.add_argument(
        "--samples", type=int, default=1, metavar="N", help="first N records (default 1)"
    )
    parser.add_argument(
        "--first-token", choices=tuple(FIRST_TOKEN), metavar="HOW",
        help="count the first context token in the mass, skip it, or auto (default: as the preset "
        "does)",
    )  # fmt: skip
    add_preset(parser)
    add_alpha(parser, 1.0, "1")
    parser.add_argument(
        "--out", type=path, required=True, metavar="FILE", help="where the scores go"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure, write the scores, and print the ranking."""
    from kvcomm import tasks
    from kvcomm.layout import counted
    from kvcomm.methods import Bench
    from kvcomm.plan import Plan, Prompts
    from kvcomm.progress import on_terminal

    task = tasks.find(arguments.task)
    examples = task.load(arguments.data, arguments.context)
    if not 1 <= arguments.samples <= len(examples):
        raise ValueError(
            f"--samples: {arguments.samples} is outside 1 .. {len(examples)}, the records of "
            f"{arguments.data}"
        )
    if not 0 <= arguments.alpha <= 1:
        raise ValueError(f"alpha: {arguments.alpha:g} is outside 0 .. 1")
    sender, receiver = load_pair(arguments, arguments.preset)
    bench = Bench(
        sender,
        receiver,
        preset=arguments.preset,
        max_new_tokens=task.max_new_tokens,
        layer_map=layer_map_of(arguments, sender, receiver),
        bars=on_terminal(),
    )
    plan = Plan(tuple(examples[: arguments.samples]), (), {})
    bench.prompts = Prompts(bench, task, plan, None)
    samples = [(item.sender, item.receiver) for item in bench.prompts.calibration()]
    scores = bench.calibrate(samples, what="calibrating")
    scores = scores.skipping(FIRST_TOKEN.get(arguments.first_token))
    scores.save(arguments.out)
    ranking, mass = scores.ranking(arguments.alpha), scores.mass
    values = scores.scores(arguments.alpha)
    if arguments.json:
        print_json(
            {
                "records": [one.id for one in plan.calibration],
                "preset": scores.preset,
                "alpha": arguments.alpha,
                "skip_first": scores.skip_first,
                "first_share": scores.first_share,
                "mass": mass,
                "scores": values,
                "ranking": ranking,
                "file": arguments.out,
            }
        )
        return 0
    print("rank  layer  mass      score")
    for rank, layer in enumerate(ranking, 1):
        print(f"{rank:4d}  {layer:5d}  {mass[layer]:.6f}  {values[layer]:.4f}")
    first = "left out" if scores.skip_first else "counted"
    print(
        f"{counted(scores.n_samples, 'record')}, preset {scores.preset}; the first context token "
        f"is {first}, it holds {scores.first_share:.0%} of the mass in the upper half; written to "
        f"{arguments.out}"
    )
    return 0
