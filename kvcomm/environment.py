"""What a result was made with: versions, machine, device and threads.

For logs, reports and `kvcomm doctor`; decides nothing.
"""

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from kvcomm import _core

_PACKAGES = ("numpy", "safetensors", "tokenizers", "gguf", "jinja2", "nltk", "rouge-score")


def versions() -> dict[str, str | None]:
    """Versions by name: kvcomm, Python and the packages it stands on (None: not installed)."""
    found: dict[str, str | None] = {
        "kvcomm": _core.__version__,
        "python": platform.python_version(),
    }
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def machine() -> dict[str, Any]:
    """Processor, system, kernels of the core and threads of its pool."""
    cpu = next(d for d in _core.devices() if d["name"] == "cpu")
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "kernels": cpu["description"],
        "threads": _core.get_num_threads(),
    }


def _processor() -> str:
    """The processor's name where the system tells, else its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
