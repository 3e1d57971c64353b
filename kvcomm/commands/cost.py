"""`kvcomm cost`: FLOPs, bytes sent and memory of every method, without weights.

Owns the options and what is printed; the numbers are cost.py's, the tables cost_sheet.py's.
"""

import argparse

HELP = "count FLOPs, bytes sent and memory of every method, without weights"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "--model-shape", required=True, metavar="NAME",
        help="a model of the paper or of the catalogue by name, such as llama-3.2-3b, or a folder "
        "with a config.json",
    )  # fmt: skip
    tokens = parser.add_argument_group("tokens, chat templates included")
    for name, what in (
        ("context", "the sender's prompt"),
        ("query", "the receiver's prompt"),
        ("answer", "that the receiver writes, an EOS included"),
    ):
        tokens.add_argument(f"--{name}", type=int, required=True, metavar="N", help=what)
    tokens.add_argument(
        "--message", type=int, default=256, metavar="N",
        help="that each agent of nld and cipher writes (default 256)",
    )  # fmt: skip
    how = parser.add_argument_group("how")
    how.add_argument(
        "--ratio", default="0.3,0.5,0.7", metavar="LIST",
        help="shares of the layers that kvcomm sends (default 0.3,0.5,0.7)",
    )  # fmt: skip
    how.add_argument("--preset", default="paper", choices=("paper", "reference"))
    for name, what in (("--dtype", "weights"), ("--kv-dtype", "K and V")):
        how.add_argument(
            name, default="bf16", choices=("f32", "f16", "bf16"),
            help=f"element type of {what} (default bf16)",
        )  # fmt: skip
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print all numbers as JSON")
    form.add_argument("--markdown", action="store_true", help="print the tables in Markdown")


def run(arguments: argparse.Namespace) -> int:
    """Print the tables."""
    from kvcomm import cost, cost_sheet, shapes
    from kvcomm.records import dumps

    made = cost_sheet.sheet(
        arguments.model_shape,
        shapes.find(arguments.model_shape),
        cost.Lengths(arguments.context, arguments.query, arguments.answer, arguments.message),
        ratios=_ratios(arguments.ratio),
        setting=cost.Setting(arguments.dtype, arguments.kv_dtype, preset=arguments.preset),
    )
    if arguments.json:
        print(dumps(made.as_dict(), indent=1))
        return 0
    parts = [t.markdown() if arguments.markdown else t.text() for t in cost_sheet.tables(made)]
    notes = "\n".join(f"- {note}" for note in cost_sheet.notes(made))
    print("\n\n".join([*parts, notes]))
    return 0


def _ratios(text: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    for part in parts:
        try:
            float(part)
        except ValueError:
            raise ValueError(f"--ratio: expected numbers such as 0.3,0.5, found {text!r}") from None
    if len(set(map(float, parts))) < len(parts):
        raise ValueError(f"--ratio: a number is written twice in {text!r}")
    return parts
