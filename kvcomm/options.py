"""The options of the command line, their values and their help.

Owns what can be written after `kvcomm`; what a command does is cli.py's. Imports nothing that
takes time, so that help is instant.
"""

import argparse
import importlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

Command = Callable[[argparse.Namespace], int]

#: Commands in files of their own, kvcomm/commands/NAME.py.
OWN_FILES = ("reproduce", "score", "cost", "make_data")

#: No model has more; a slip of the finger should not fill the memory.
_MOST_LAYERS = 9999

EPILOG = """\
exit status: 0 done; 1 done, but some records failed; 2 an error; 130 stopped by Ctrl-C.
KVCOMM_CACHE names the folder of fetched and converted models. KVCOMM_DEBUG=1 shows tracebacks.
"""


class _Parser(argparse.ArgumentParser):
    """Raises in place of printing usage and leaving, so that all errors look alike."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see `{self.prog} --help`)")


def _numbers(text: str) -> tuple[int, ...]:
    """(0, 3, 7, 8, 9) of "0,3,7-9"."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            ends = int(first), int(last if dash else first)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"expected numbers such as 0,3,7-9, found {text!r}"
            ) from None
        if ends[0] > ends[1]:
            raise argparse.ArgumentTypeError(f"{part.strip()} runs backwards")
        if ends[1] > _MOST_LAYERS:
            raise argparse.ArgumentTypeError(f"{ends[1]} is above {_MOST_LAYERS}")
        found += range(ends[0], ends[1] + 1)
    return tuple(found)


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number from 0 on, found {text!r}")
    return int(text)


def _path(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("expected a path, found nothing")
    return text


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _ratios(text: str) -> tuple[str, ...]:
    for part in _words(text):
        try:
            float(part)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"expected numbers such as 0.3,0.5, found {text!r}"
            ) from None
    return _words(text)


def _layer_map(text: str) -> str | tuple[int, ...]:
    return text if text == "published" else _numbers(text)


def _add_models(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    group = parser.add_argument_group("models")
    group.add_argument(
        "--model", required=required, metavar="M",
        help="the sender's model, and the receiver's: a folder, a .gguf file, a name of "
        "`kvcomm models`, or a hub id",
    )  # fmt: skip
    group.add_argument(
        "--receiver", metavar="M2", help="the receiver's model, if it is another (a fine-tune)"
    )
    group.add_argument(
        "--layer-map", type=_layer_map, metavar="MAP",
        help="receiver layer of each sender layer, for models of different depth: a list, or "
        "'published'",
    )  # fmt: skip
    group.add_argument(
        "--dtype", default="auto", choices=("auto", "f32", "f16", "bf16"),
        help="type of the weights in memory (auto: as stored)",
    )  # fmt: skip
    group.add_argument(
        "--kv-dtype", default="f32", choices=("f32", "f16", "bf16"),
        help="type of keys and values, in memory and in the message (default f32)",
    )  # fmt: skip
    group.add_argument("--device", default="cpu", help="cpu (default), cuda or guard")
    _add_threads(group)


def _add_threads(parser: Any) -> None:
    parser.add_argument(
        "--threads", type=int, metavar="N", help="threads (default: what the machine allows)"
    )


def _add_layers(parser: argparse.ArgumentParser, *, several: bool) -> None:
    many = ", several by comma" if several else ""
    group = parser.add_argument_group("layers to send")
    group.add_argument(
        "--ratio", type=_ratios, metavar="R",
        help=f"share of the layers{many} (default 0.5)",
    )  # fmt: skip
    group.add_argument(
        "--layers", type=_numbers, metavar="LIST", help="explicit layers, such as 0,3,7-9"
    )
    group.add_argument(
        "--strategy", type=_words, metavar="S",
        help=f"how layers are chosen{many}: attention_gaussian (default), attention, gaussian, "
        "random, contiguous (the ends of --layers), attention_level (with --level), layers, all",
    )  # fmt: skip
    group.add_argument(
        "--skip-first", dest="skip_first", action=argparse.BooleanOptionalAction, default=None,
        help="leave the first context token out of the attention mass, or count it (default: as "
        "the preset does)",
    )  # fmt: skip
    group.add_argument(
        "--alpha", type=float, default=1.0, metavar="A",
        help="weight of the attention against the Gaussian over depth (default 1)",
    )  # fmt: skip
    group.add_argument("--level", type=int, metavar="N", help="rank level of attention_level")
    group.add_argument(
        "--preset", default="paper", choices=("paper", "reference"),
        help="the paper's text (default), or its published code",
    )  # fmt: skip
    group.add_argument(
        "--shift-back", action="store_true",
        help="in layers that are not sent, do not shift the question's positions (KVComm-S)",
    )  # fmt: skip
    group.add_argument(
        "--scores", metavar="FILE", help="layer scores that `kvcomm calibrate` wrote"
    )
    group.add_argument("--seed", type=_seed, default=42, metavar="S", help="seed (default 42)")


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "--task", required=True,
        help="hotpotqa, qasper, musique, 2wikimqa, multifieldqa_en, countries, tipsheets, tmath, "
        "samsum or mmlu",
    )  # fmt: skip
    group.add_argument(
        "--data", required=True, metavar="FILE",
        help="the records: JSON, JSON lines, Parquet (for mmlu also CSV); where there is no such "
        "file, ORG/NAME[:CONFIG][:SPLIT] of the hub",
    )  # fmt: skip
    group.add_argument(
        "--context", choices=("gold", "full"),
        help="what the sender reads: the supporting sentences only, or all there is (default: as "
        "published for the task)",
    )  # fmt: skip


def _add_methods(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("methods")
    group.add_argument(
        "--methods", type=_words, default=("baseline", "skyline", "kvcomm"), metavar="LIST",
        help="of baseline, skyline, kvcomm, nld, cipher, ac, prepend_hidden, token_importance, "
        "control (default baseline,skyline,kvcomm)",
    )  # fmt: skip
    group.add_argument(
        "--online", type=int, metavar="T", help="kvcomm: choose layers again at every T-th record"
    )
    group.add_argument(
        "--senders", default="one", choices=("one", "split", "documents"),
        help="kvcomm, nld, cipher: who reads the context: one sender (default), two with half of "
        "it each, or one per document",
    )  # fmt: skip
    group.add_argument(
        "--positions", default="published", choices=("published", "sequential"),
        help="of several senders' keys: overlapping (default) or one behind the other",
    )  # fmt: skip
    group.add_argument(
        "--search-records", type=int, default=6, metavar="N",
        help="strategy search: calibration records to go by (default 6)",
    )  # fmt: skip
    group.add_argument(
        "--beam", type=int, default=1, metavar="B", help="strategy search: sets kept (default 1)"
    )
    group.add_argument(
        "--backward", action="store_true", help="strategy search: try to drop and replace layers"
    )
    group.add_argument(
        "--message-tokens", type=int, default=256, metavar="N",
        help="nld, cipher: most tokens of what each agent writes first (default 256)",
    )  # fmt: skip
    group.add_argument(
        "--sender-aware", action="store_true",
        help="nld, cipher: tell the sender what its text is for",
    )  # fmt: skip
    group.add_argument(
        "--cipher-temperature", type=float, metavar="T",
        help="cipher: of the mean embedding (default 0.7; preset reference 1.0)",
    )  # fmt: skip
    group.add_argument(
        "--rule", type=_words, default=("replace",), metavar="R",
        help="ac: replace (default), sum, mean, several by comma",
    )  # fmt: skip
    group.add_argument(
        "--from-layer", type=int, metavar="K", help="ac, prepend_hidden: layer of the sender"
    )
    group.add_argument(
        "--to-layer", type=int, metavar="J", help="ac, prepend_hidden: layer of the receiver"
    )
    group.add_argument(
        "--token", type=_words, default=("last",), metavar="T",
        help="token_importance: first, last (default), random, none, several by comma",
    )  # fmt: skip
    group.add_argument(
        "--effect", default="keep", choices=("keep", "zero"),
        help="token_importance: keep only that token's hidden state (default), or zero it",
    )  # fmt: skip
    group.add_argument(
        "--at-layer", type=_numbers, metavar="LIST", help="token_importance: layers (default L/2)"
    )
    group.add_argument(
        "--control", type=_words, default=("wrong_context", "shuffled", "noise", "random"),
        metavar="C", help="control: wrong_context, shuffled, noise, random (default all)",
    )  # fmt: skip


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def parser(
    commands: Mapping[str, Command], without_command: Callable[[argparse.ArgumentParser], Command]
) -> argparse.ArgumentParser:
    """The whole command line; parsing gives a namespace whose `run` is the command's function.

    commands: by name. without_command: given the parser, what runs when no command is named.
    """
    top = _Parser(
        prog="kvcomm",
        description="One language model answers from another model's KV cache.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("-V", "--version", action="store_true", help="print the version and leave")
    top.set_defaults(run=without_command(top))
    subs = top.add_subparsers(metavar="COMMAND", title="commands")

    def command(name: str, help: str) -> argparse.ArgumentParser:
        sub = subs.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        sub.set_defaults(run=commands[name])
        return sub

    demo = command("demo", "answer the shipped questions with every method, and report")
    demo.add_argument("--model", default="smollm2-135m", metavar="M", help="default smollm2-135m")
    demo.add_argument(
        "--out", type=_path, default="kvcomm-demo", metavar="DIR", help="default ./kvcomm-demo"
    )
    demo.add_argument("--limit", type=int, metavar="N", help="score the first N questions only")
    _add_threads(demo)
    _add_json(demo)

    evaluate = command("eval", "compare methods on a data set, and report")
    _add_models(evaluate)
    _add_data(evaluate)
    _add_methods(evaluate)
    _add_layers(evaluate, several=True)
    evaluate.add_argument(
        "--calibration", metavar="FILE",
        help="records to calibrate on (default: the first of the data, which are then not scored)",
    )  # fmt: skip
    evaluate.add_argument(
        "--calibration-size", type=int, default=1, metavar="N", help="how many (default 1)"
    )
    evaluate.add_argument(
        "--published-protocol", action="store_true",
        help="with --preset reference: calibrate on the first records of the data and score them "
        "too, as the published code does",
    )  # fmt: skip
    evaluate.add_argument("--limit", type=int, metavar="N", help="score at most N records")
    evaluate.add_argument(
        "--batch-size", type=int, default=8, metavar="B",
        help="records at a time (default 8); changes times, never results",
    )  # fmt: skip
    evaluate.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="of an answer (default: the task's)"
    )
    evaluate.add_argument(
        "--max-input-tokens", type=int, metavar="N",
        help="of a prompt; longer ones lose their middle (default 64000, or the model's)",
    )  # fmt: skip
    evaluate.add_argument(
        "--out", type=_path, required=True, metavar="DIR",
        help="the run's folder; the same command again goes on where it stopped",
    )  # fmt: skip
    _add_json(evaluate)

    calibrate = command("calibrate", "measure which layers the receiver looks at")
    _add_models(calibrate)
    _add_data(calibrate)
    calibrate.add_argument(
        "--samples", type=int, default=1, metavar="N", help="first N records (default 1)"
    )
    calibrate.add_argument("--preset", default="paper", choices=("paper", "reference"))
    calibrate.add_argument("--alpha", type=float, default=1.0, metavar="A", help="default 1")
    calibrate.add_argument(
        "--out", type=_path, required=True, metavar="FILE", help="where the scores go"
    )
    _add_json(calibrate)

    generate = command("generate", "answer one question from a context")
    _add_models(generate)
    generate.add_argument(
        "--context", required=True, action="append", metavar="TEXT",
        help="a text, or a file of text; given several times: several senders",
    )  # fmt: skip
    generate.add_argument("--question", required=True, metavar="TEXT")
    _add_layers(generate, several=False)
    generate.add_argument(
        "--positions", default="published", choices=("published", "sequential"),
        help="of several senders: overlapping (default) or one behind the other",
    )  # fmt: skip
    generate.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="default 64")
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T")
    generate.add_argument("--top-k", type=int, default=0, metavar="K")
    generate.add_argument("--top-p", type=float, default=1.0, metavar="P")
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT")
    generate.add_argument(
        "--cut", action="store_true", help="cut the middle out of a context that is too long"
    )
    _add_json(generate)

    for name in OWN_FILES:
        module = importlib.import_module(f"kvcomm.commands.{name}")
        sub = subs.add_parser(
            name.replace("_", "-"),
            help=module.HELP,
            description=module.HELP[0].upper() + module.HELP[1:] + ".",
        )
        sub.set_defaults(run=module.run)
        module.add_options(sub)

    convert = command("convert", "turn a GGUF file into a Hugging Face folder")
    convert.add_argument("gguf", metavar="model.gguf")
    convert.add_argument("folder", metavar="folder/")

    fetch = command("fetch", "download and convert a model of the catalogue")
    fetch.add_argument("name", metavar="NAME")

    models = command("models", "list the models that can be fetched by name")
    _add_json(models)

    doctor = command("doctor", "print versions, devices and folders, and check the core")
    _add_threads(doctor)
    _add_json(doctor)

    report = command("report", "make summary and report again from a run's log")
    report.add_argument("folder", metavar="DIR")
    report.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    _add_json(report)
    return top
