"""`kvcomm convert`: a GGUF file, or a folder, as a Hugging Face folder."""

import argparse

HELP = "turn a GGUF file, or a folder, into a Hugging Face folder"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("source", metavar="model.gguf")
    parser.add_argument("folder", metavar="folder/")
    parser.add_argument(
        "--dtype",
        default="f32",
        choices=("f32", "f16", "bf16", "q8_0", "keep"),
        help="f32, f16 or bf16 for all; q8_0 for matrices; keep: blocks of a GGUF file as they are",
    )


def run(arguments: argparse.Namespace) -> int:
    """Convert, and print the folder, its types, and what they changed."""
    import json

    from kvcomm.convert import convert

    folder = convert(arguments.source, arguments.folder, arguments.dtype)
    print(folder)
    record = json.loads((folder / "kvcomm.json").read_text(encoding="utf-8"))
    if "types" in record:
        print("tensors:", ", ".join(f"{n} {kind}" for kind, n in record["types"].items()))
        for kind, loss in record["loss"].items():
            print(f"{kind}: rms relative error {loss:.2e}")
    return 0
