"""The command line: `kvcomm demo · eval · calibrate · generate · convert · fetch · models · doctor
· report`.

Owns options, their help and what is printed. Exit status: 0 done; 1 done, but some records failed;
2 an error, told in one line (KVCOMM_DEBUG=1 shows the traceback); 130 stopped by Ctrl-C. Results
go to standard output, everything else to standard error. Each command imports what it needs when
it runs, so that help is instant.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from kvcomm.agents import Receiver, Sender
    from kvcomm.methods import Options
    from kvcomm.model import Model
    from kvcomm.selection import LayerScores

EPILOG = """\
exit status: 0 done; 1 done, but some records failed; 2 an error; 130 stopped by Ctrl-C.
KVCOMM_CACHE names the folder of fetched and converted models. KVCOMM_DEBUG=1 shows tracebacks.
"""


class _Parser(argparse.ArgumentParser):
    """Raises in place of printing usage and leaving, so that all errors look alike."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see `{self.prog} --help`)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    try:
        words = list(sys.argv[1:] if argv is None else argv)
        arguments = _parser().parse_args(words, argparse.Namespace(argv=words))
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("kvcomm: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has left; nothing more can be said on it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("KVCOMM_DEBUG", "0") not in ("", "0"):
            raise
        print(f"kvcomm: error: {_one_line(error)}", file=sys.stderr)
        return 2


def _one_line(error: Exception) -> str:
    from kvcomm.errors import KVCommError

    told = isinstance(error, KVCommError | ValueError | TypeError | OSError | MemoryError)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        text = f"{os.fsdecode(error.filename)}: {error.strerror.lower()}"
    else:
        text = " ".join(str(error).split())
    if not text or not told:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text


# ---- options -------------------------------------------------------------------------------


def _numbers(text: str) -> tuple[int, ...]:
    """"0,3,7-9" as (0, 3, 7, 8, 9)."""
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
        found += range(ends[0], ends[1] + 1)
    return tuple(found)


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
    group.add_argument("--seed", type=int, default=42, metavar="S", help="seed (default 42)")


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument("--task", required=True, help="hotpotqa, qasper or countries")
    group.add_argument("--data", required=True, metavar="FILE", help="the records: JSON or JSONL")
    group.add_argument(
        "--context", choices=("gold", "full"),
        help="what the sender reads: the supporting sentences only, or all there is (default: as "
        "published for the task)",
    )  # fmt: skip


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvcomm",
        description="One language model answers from another model's KV cache.",
        epilog=EPILOG,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=16),
    )
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    parser.set_defaults(run=_version_or_help(parser))
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")

    def command(name: str, run: Callable[[argparse.Namespace], int], help: str) -> _Parser:
        sub = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        sub.set_defaults(run=run)
        return sub

    demo = command("demo", _demo, "answer the shipped questions with every method, and report")
    demo.add_argument("--model", default="smollm2-135m", metavar="M", help="default smollm2-135m")
    demo.add_argument(
        "--out", default="kvcomm-demo", metavar="DIR", help="default ./kvcomm-demo"
    )
    demo.add_argument("--limit", type=int, metavar="N", help="score the first N questions only")
    _add_threads(demo)
    _add_json(demo)

    evaluate = command("eval", _eval, "compare methods on a data set, and report")
    _add_models(evaluate)
    _add_data(evaluate)
    evaluate.add_argument(
        "--methods", type=_words, default=("baseline", "skyline", "kvcomm"), metavar="LIST",
        help="default baseline,skyline,kvcomm",
    )  # fmt: skip
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
    evaluate.add_argument(
        "--online", type=int, metavar="T", help="choose layers again at every T-th record"
    )
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
        "--out", required=True, metavar="DIR",
        help="the run's folder; the same command again goes on where it stopped",
    )  # fmt: skip
    _add_json(evaluate)

    calibrate = command("calibrate", _calibrate, "measure which layers the receiver looks at")
    _add_models(calibrate)
    _add_data(calibrate)
    calibrate.add_argument(
        "--samples", type=int, default=1, metavar="N", help="first N records (default 1)"
    )
    calibrate.add_argument("--preset", default="paper", choices=("paper", "reference"))
    calibrate.add_argument("--alpha", type=float, default=1.0, metavar="A", help="default 1")
    calibrate.add_argument("--out", required=True, metavar="FILE", help="where the scores go")
    _add_json(calibrate)

    generate = command("generate", _generate, "answer one question from a context")
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

    convert = command("convert", _convert, "turn a GGUF file into a Hugging Face folder")
    convert.add_argument("gguf", metavar="model.gguf")
    convert.add_argument("folder", metavar="folder/")

    fetch = command("fetch", _fetch, "download and convert a model of the catalogue")
    fetch.add_argument("name", metavar="NAME")

    models = command("models", _models, "list the models that can be fetched by name")
    _add_json(models)

    doctor = command("doctor", _doctor, "print versions, devices and folders, and check the core")
    _add_threads(doctor)
    _add_json(doctor)

    report = command("report", _report, "make summary and report again from a run's log")
    report.add_argument("folder", metavar="DIR")
    report.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    _add_json(report)
    return parser


def _version_or_help(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        if not arguments.version:
            parser.print_help()
            return 0
        from kvcomm import _core

        print(f"kvcomm {_core.__version__}")
        return 0

    return run


# ---- what several commands share -----------------------------------------------------------


def _say(line: str) -> None:
    print(f"kvcomm: {line}", file=sys.stderr, flush=True)


def _print_json(value: Any) -> None:
    from kvcomm.records import dumps

    print(dumps(value, indent=1))


def _set_threads(arguments: argparse.Namespace) -> None:
    from kvcomm import _core

    if arguments.threads is not None:
        if arguments.threads < 1:
            raise ValueError(f"--threads: expected 1 or more, found {arguments.threads}")
        _core.set_num_threads(arguments.threads)


def _load_pair(arguments: argparse.Namespace, preset: str) -> "tuple[Sender, Receiver]":
    """The sender and the receiver of the options; one model serves as both unless told."""
    from kvcomm.agents import Receiver, Sender
    from kvcomm.model import Model

    _set_threads(arguments)

    def load(source: str) -> "Model":
        return Model.load(
            source,
            device=arguments.device,
            dtype=arguments.dtype,
            kv_dtype=arguments.kv_dtype,
            progress=sys.stderr.isatty(),
        )

    model = load(arguments.model)
    other = model if arguments.receiver is None else load(arguments.receiver)
    # The published code renders the sender's prompt with the receiver's tokenizer.
    tokenizer = other.tokenizer if preset == "reference" else None
    return Sender(model, tokenizer=tokenizer), Receiver(other)


def _resolve_layer_map(
    arguments: argparse.Namespace, sender: "Sender", receiver: "Receiver"
) -> tuple[int, ...] | None:
    from kvcomm.agents import published_layer_map

    if arguments.layer_map == "published":
        return published_layer_map(sender.model.n_layers, receiver.model.n_layers)
    return arguments.layer_map


def _options(arguments: argparse.Namespace) -> "Options":
    from kvcomm.methods import Options

    strategies = arguments.strategy
    if strategies is None:
        only_layers = arguments.layers is not None and arguments.ratio is None
        strategies = () if only_layers else ("attention_gaussian",)
    return Options(
        ratios=arguments.ratio or ("0.5",),
        strategies=strategies,
        layers=arguments.layers,
        alpha=arguments.alpha,
        level=arguments.level,
        shift_back=arguments.shift_back,
        online=getattr(arguments, "online", None),
        seed=arguments.seed,
    )


def _load_scores(
    arguments: argparse.Namespace, sender: "Sender", receiver: "Receiver"
) -> "LayerScores | None":
    """Layer scores of a file, if one was named; they must be of these two models."""
    from kvcomm.errors import MismatchError
    from kvcomm.selection import LayerScores

    if arguments.scores is None:
        return None
    scores = LayerScores.load(arguments.scores)
    for role, found, model in (
        ("sender", scores.sender, sender.model),
        ("receiver", scores.receiver, receiver.model),
    ):
        if found != model.fingerprint:
            raise MismatchError(
                f"{arguments.scores}: made with {role} {found[:12]}, the {role} here is "
                f"{model.name!r} ({model.fingerprint[:12]})"
            )
    if scores.preset != arguments.preset:
        raise MismatchError(
            f"{arguments.scores}: made with preset {scores.preset}, asked for {arguments.preset}"
        )
    return scores


def _show(summary: dict[str, Any], arguments: argparse.Namespace, report: Path) -> int:
    """Print a run's results; the status says whether records failed."""
    from kvcomm import report as reports

    if arguments.json:
        _print_json(summary)
    else:
        table = reports.markdown_table if getattr(arguments, "markdown", False) else None
        print((table or reports.text_table)(summary))
        print()
        for line in reports.notes(summary):
            print(line)
        print()
        print(reports.finding(summary))
        print(f"Report: {report}")
    failed = sum(method["failed"] for method in summary["methods"])
    if failed:
        attempted = sum(method["attempted"] for method in summary["methods"])
        _say(f"{failed} of {attempted} answers failed; the log says why")
    return 1 if failed else 0


# ---- commands ------------------------------------------------------------------------------


def _demo(arguments: argparse.Namespace) -> int:
    from kvcomm.demo import run

    _set_threads(arguments)
    out = Path(arguments.out)
    summary, report = run(arguments.model, out, limit=arguments.limit, note=_say)
    return _show(summary, arguments, report)


def _eval(arguments: argparse.Namespace) -> int:
    from kvcomm import report as reports
    from kvcomm import tasks
    from kvcomm.evaluate import evaluate
    from kvcomm.methods import methods
    from kvcomm.plan import divide

    task = tasks.find(arguments.task)
    chosen = methods(arguments.methods, _options(arguments))
    if arguments.published_protocol and (
        arguments.preset != "reference" or arguments.calibration is not None
    ):
        raise ValueError(
            "--published-protocol goes with --preset reference and without --calibration"
        )
    examples = task.load(arguments.data, arguments.context)
    other = None
    if arguments.calibration is not None:
        other = task.load(arguments.calibration, arguments.context)
    measured = any(method.calibrated for method in chosen) and arguments.scores is None
    plan = divide(
        examples,
        calibration=other,
        n_calibration=arguments.calibration_size if measured else 0,
        limit=arguments.limit,
        published=arguments.published_protocol,
    )
    sender, receiver = _load_pair(arguments, arguments.preset)
    about = {
        "data": Path(arguments.data).name,
        "context": arguments.context or task.contexts[0],
        "calibration_data": Path(arguments.calibration or arguments.data).name
        if measured
        else arguments.scores and Path(arguments.scores).name,
        "published_protocol": arguments.published_protocol,
    }
    out = Path(arguments.out)
    summary = evaluate(
        sender,
        receiver,
        task,
        plan,
        chosen,
        out,
        preset=arguments.preset,
        layer_map=_resolve_layer_map(arguments, sender, receiver),
        scores=_load_scores(arguments, sender, receiver),
        max_new_tokens=arguments.max_new_tokens,
        max_input_tokens=arguments.max_input_tokens,
        batch_size=arguments.batch_size,
        seed=arguments.seed,
        about=about,
        command=("kvcomm", *arguments.argv),
        progress=True,
        note=_say,
    )
    return _show(summary, arguments, reports.write_report(summary, out, _title(summary)))


def _title(summary: dict[str, Any]) -> str:
    settings = summary["settings"]
    names = [settings["sender"]["model"], settings["receiver"]["model"]]
    return f"{settings['task']}: {' to '.join(dict.fromkeys(names))}"


def _report(arguments: argparse.Namespace) -> int:
    from kvcomm import report as reports
    from kvcomm.records import dumps, write_json
    from kvcomm.runs import SUMMARY, read_run
    from kvcomm.summary import summarise

    folder = Path(arguments.folder)
    summary = json.loads(dumps(summarise(*read_run(folder))))
    write_json(folder / SUMMARY, summary)
    return _show(summary, arguments, reports.write_report(summary, folder, _title(summary)))


def _calibrate(arguments: argparse.Namespace) -> int:
    from kvcomm import tasks
    from kvcomm.evaluate import measure
    from kvcomm.methods import Bench
    from kvcomm.plan import Plan, Prompts

    task = tasks.find(arguments.task)
    examples = task.load(arguments.data, arguments.context)
    if not 1 <= arguments.samples <= len(examples):
        raise ValueError(
            f"--samples: {arguments.samples} is outside 1 .. {len(examples)}, the records of "
            f"{arguments.data}"
        )
    sender, receiver = _load_pair(arguments, arguments.preset)
    bench = Bench(
        sender,
        receiver,
        preset=arguments.preset,
        max_new_tokens=task.max_new_tokens,
        layer_map=_resolve_layer_map(arguments, sender, receiver),
    )
    plan = Plan(tuple(examples[: arguments.samples]), (), {})
    prompts = Prompts(bench, task, plan, None)
    scores = measure(bench, [prompts.item(n, one) for n, one in enumerate(plan.calibration)])
    scores.save(arguments.out)
    ranking, mass = scores.ranking(arguments.alpha), scores.mass
    values = scores.scores(arguments.alpha)
    if arguments.json:
        _print_json(
            {
                "records": [one.id for one in plan.calibration],
                "preset": scores.preset,
                "alpha": arguments.alpha,
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
    print(f"{arguments.samples} records, preset {scores.preset}; written to {arguments.out}")
    return 0


def _generate(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from kvcomm.methods import Bench
    from kvcomm.methods.kvcomm import variants
    from kvcomm.selection import calibrate

    found = variants(_options(arguments))
    if len(found) != 1:
        raise ValueError(f"one choice of layers is needed, found {[m.label for m in found]}")
    method = found[0]
    contexts = tuple(_context_text(text) for text in arguments.context)
    sender, receiver = _load_pair(arguments, arguments.preset)
    layer_map = _resolve_layer_map(arguments, sender, receiver)
    bench = Bench(sender, receiver, preset=arguments.preset, layer_map=layer_map)
    bench.scores = _load_scores(arguments, sender, receiver)
    if method.calibrated and bench.scores is None:
        # Without a calibration the exchange itself is the sample (the paper's Appendix L).
        bench.scores = calibrate(
            sender,
            receiver,
            [(contexts, arguments.question)],
            preset=arguments.preset,
            layer_map=layer_map,
            positions=arguments.positions,
        )
    layers = method.layers(bench)
    packets = tuple(
        sender.read(
            text, layers, preset=arguments.preset, cut="middle" if arguments.cut else None
        )
        for text in contexts
    )
    answer = receiver.answer(
        arguments.question,
        packets,
        arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        stop=arguments.stop,
        stream=None if arguments.json else lambda piece: print(piece, end="", flush=True),
        preset=arguments.preset,
        shift_back=arguments.shift_back,
        layer_map=layer_map,
        positions=arguments.positions,
    )
    if arguments.json:
        _print_json({**asdict(answer), "layers": layers})
        return 0
    print()
    stats = answer.stats
    _say(
        f"{len(layers)} of {sender.model.n_layers} layers, {stats.message_bytes} bytes for "
        f"{stats.context_tokens} tokens of context ({stats.cut_tokens} cut); the receiver "
        f"prefilled {stats.receiver_tokens} tokens"
    )
    return 0


def _context_text(argument: str) -> str:
    """The text of a file, or the argument itself when it is no file's name."""
    try:
        if os.path.isfile(argument):
            return Path(argument).read_text("utf-8")
    except (OSError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise ValueError(f"{argument}: not UTF-8 text (byte {error.start})") from None
        if isinstance(error, OSError):
            raise
    if not any(character.isspace() for character in argument) and Path(argument).suffix:
        raise FileNotFoundError(f"{argument}: no such file")
    return argument


def _convert(arguments: argparse.Namespace) -> int:
    from kvcomm.convert import convert

    print(convert(arguments.gguf, arguments.folder))
    return 0


def _fetch(arguments: argparse.Namespace) -> int:
    from kvcomm.catalogue import prepared

    def progress(text: str, done: int, total: int) -> None:
        _say(f"{text} ({done // 10**6} of {total // 10**6} MB)")

    print(prepared(arguments.name, progress=progress))
    return 0


def _models(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from kvcomm.catalogue import CATALOGUE
    from kvcomm.report import size

    if arguments.json:
        _print_json([{**asdict(e), "source": e.source} for e in CATALOGUE.values()])
        return 0
    for entry in CATALOGUE.values():
        print(f"{entry.name}\n  {entry.title}, {size(entry.n_bytes)}, {entry.licence}")
        print(f"  source  {entry.source}\n  sha256  {entry.sha256}")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from kvcomm import _core, environment
    from kvcomm.convert import cache_folder

    _set_threads(arguments)
    cache = cache_folder()
    models = cache / "models"
    facts = {
        "versions": environment.versions(),
        "machine": environment.machine(),
        "devices": {d["name"]: d["description"] for d in _core.devices()},
        "cache": {
            "folder": cache,
            "models": sorted(p.name for p in models.iterdir()) if models.is_dir() else [],
        },
        "self_check": environment.self_check(),
    }
    if arguments.json:
        _print_json(facts)
    else:
        for heading, values in facts.items():
            print(heading)
            for name, value in values.items():
                print(f"  {name:<12} {', '.join(value) if isinstance(value, list) else value}")
    return 0 if facts["self_check"]["passed"] else 1
