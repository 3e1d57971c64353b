"""Makes the environments that the peers run in, under build/peers; each once.

    python benchmarks/peers/make.py                       # all
    python benchmarks/peers/make.py transformers          # one
    python benchmarks/peers/make.py transformers -- --extra-index-url URL   # arguments for pip

llama-cpp-python is compiled here, for this machine's processor (minutes; needs a C++ compiler and
cmake). torch comes as pip finds it; where a build without CUDA is wanted, pass pip where it is.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from process import ENVIRONMENTS, interpreter_of

#: Packages by environment. The published code imports tqdm.
ENVIRONMENT_PACKAGES = {
    "transformers": ("torch", "transformers>=5", "accelerate"),
    "transformers-4.53.3": ("torch", "transformers==4.53.3", "accelerate", "tqdm", "numpy"),
    "llama.cpp": ("numpy", "llama-cpp-python"),
}

#: Compile for the processor at hand, as a user who cares for speed would.
VARIABLES = {"llama.cpp": {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DCMAKE_BUILD_TYPE=Release"}}
ARGUMENTS = {"llama.cpp": ("--no-binary", "llama-cpp-python")}


def make(name: str, further: list[str]) -> None:
    """One environment; an unfinished one is removed first."""
    folder: Path = ENVIRONMENTS / name
    done = folder / "made"
    if done.exists():
        print(f"{name}: there")
        return
    if folder.exists():
        shutil.rmtree(folder)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    command = [str(interpreter_of(name)), "-m", "pip", "install", "--quiet"]
    command += [*ARGUMENTS.get(name, ()), *ENVIRONMENT_PACKAGES[name], *further]
    print(f"{name}: {shlex.join(command[1:])}", flush=True)
    subprocess.run(command, check=True, env={**os.environ, **VARIABLES.get(name, {})})
    done.touch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ENVIRONMENT_PACKAGES))
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    names = parser.parse_args(words[:cut]).names or list(ENVIRONMENT_PACKAGES)
    for name in names:
        if name not in ENVIRONMENT_PACKAGES:
            parser.error(f"{name!r} is none of {', '.join(ENVIRONMENT_PACKAGES)}")
        make(name, words[cut + 1 :])


if __name__ == "__main__":
    main()
