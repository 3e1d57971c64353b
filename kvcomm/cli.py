"""The command line: `kvcomm demo · eval · calibrate · generate · convert · fetch · models · doctor
· report`.

Owns what the commands do and print; their options are in options.py. Exit status: 0 done; 1 done,
but some records failed; 2 an error, told in one line (KVCOMM_DEBUG=1 shows the traceback); 130
stopped by Ctrl-C. Results go to standard output, everything else to standard error. Each command
imports what it needs when it runs, so that help is instant.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcomm import options

if TYPE_CHECKING:
    from kvcomm.agents import Receiver, Sender
    from kvcomm.methods import Options
    from kvcomm.model import Model
    from kvcomm.selection import LayerScores


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments = options.parser(COMMANDS, _version_or_help).parse_args(
            words, argparse.Namespace(argv=words)
        )
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        resumable = bool(words) and words[0] in ("eval", "demo")
        _say("stopped" + "; the same command goes on from here" * resumable)
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


def _version_or_help(parser: argparse.ArgumentParser) -> options.Command:
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


#: Fields of `methods.Options` by the options that only `kvcomm eval` has.
_METHOD_OPTIONS = {
    "online": "online", "senders": "senders", "positions": "positions",
    "search_records": "search_records", "beam": "beam", "backward": "backward",
    "message_tokens": "message_tokens", "sender_aware": "sender_aware",
    "cipher_temperature": "cipher_temperature", "rules": "rule", "from_layer": "from_layer",
    "to_layer": "to_layer", "tokens": "token", "effect": "effect", "at_layers": "at_layer",
    "controls": "control",
}  # fmt: skip


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
        seed=arguments.seed,
        skip_first=arguments.skip_first,
        **{
            field: getattr(arguments, option)
            for field, option in (_METHOD_OPTIONS.items() if "methods" in arguments else ())
        },
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
    from kvcomm.runs import read_run

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
    n_calibration = arguments.calibration_size if measured else 0
    if "search" in (arguments.strategy or ()):
        n_calibration = max(n_calibration, arguments.search_records)
    plan = divide(
        examples,
        calibration=other,
        n_calibration=n_calibration,
        limit=arguments.limit,
        published=arguments.published_protocol,
    )
    sender, receiver = _load_pair(arguments, arguments.preset)
    about = {
        "data": Path(arguments.data).name if Path(arguments.data).exists() else arguments.data,
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
    report = reports.write_report(summary, out, _title(summary), read_run(out)[1])
    return _show(summary, arguments, report)


def _title(summary: dict[str, Any]) -> str:
    settings = summary["settings"]
    names = [settings["sender"]["model"], settings["receiver"]["model"]]
    return f"{settings['task']}: {' to '.join(dict.fromkeys(names))}"


def _report(arguments: argparse.Namespace) -> int:
    from kvcomm import report as reports
    from kvcomm.errors import FormatError
    from kvcomm.records import dumps, write_json
    from kvcomm.runs import SUMMARY, read_run
    from kvcomm.summary import summarise

    folder = Path(arguments.folder)
    run, records = read_run(folder)
    if not records:
        raise FormatError(f"{folder}: the run has no records yet")
    summary = json.loads(dumps(summarise(run, records)))
    write_json(folder / SUMMARY, summary)
    report = reports.write_report(summary, folder, _title(summary), records)
    return _show(summary, arguments, report)


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
        sender.read(text, layers, preset=arguments.preset, cut="middle" if arguments.cut else None)
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


COMMANDS: dict[str, options.Command] = {
    "demo": _demo,
    "eval": _eval,
    "calibrate": _calibrate,
    "generate": _generate,
    "convert": _convert,
    "fetch": _fetch,
    "models": _models,
    "doctor": _doctor,
    "report": _report,
}
