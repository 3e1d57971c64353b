"""`kvcomm doctor`: versions, devices, folders, and a check of the core."""

import argparse

from kvcomm.options.output import add_json, print_json
from kvcomm.options.pair import add_threads, set_threads

HELP = "print versions, devices and folders, and check the core"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_threads(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print what was found; the status says whether the check passed."""
    from kvcomm import _core, environment
    from kvcomm.convert import cache_folder

    set_threads(arguments)
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
        print_json(facts)
    else:
        for heading, values in facts.items():
            print(heading)
            for name, value in values.items():
                print(f"  {name:<12} {', '.join(value) if isinstance(value, list) else value}")
    return 0 if facts["self_check"]["passed"] else 1
