"""The include check: which layer of csrc/ may see which headers.

    csrc/py -> csrc/include    csrc/core -> csrc/include, backend.h    csrc/backend -> csrc/include

(and for the core dtype.h, which stands beside backend.h: arithmetic on single 16-bit values.)
Every #include is resolved to a file of the repository or to a system header by name. The core sees
no Python, NumPy, BLAS or CUDA and no address behind a backend's buffer; the backend knows no core.
Run as a program, or by tests/test_core.py; prints one line per fault.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "csrc"

# Headers of the system that a layer may include: the C library, and what its work needs beside it.
C_LIBRARY = {
    "assert.h", "errno.h", "float.h", "inttypes.h", "limits.h", "math.h", "stdalign.h", "stdarg.h",
    "stdatomic.h", "stdbool.h", "stddef.h", "stdint.h", "stdio.h", "stdlib.h", "string.h", "time.h",
}  # fmt: skip
MACHINE = {
    "pthread.h",
    "sched.h",
    "unistd.h",
    "immintrin.h",
    "arm_neon.h",
    "sys/mman.h",
    "sys/sysctl.h",
}
SYSTEM = {
    "include": C_LIBRARY,
    "core": C_LIBRARY,
    "backend": C_LIBRARY | MACHINE,
    "py": C_LIBRARY | {"unistd.h"},  # a file that it is handed, read for the core
}

# Headers of the repository that a layer may include, as paths below csrc/.
OWN = {
    "include": re.compile(r"include/.*"),
    "core": re.compile(r"core/.*|include/kvcomm\.h|backend/(backend|dtype)\.h"),
    "backend": re.compile(r"backend/.*|include/kvcomm\.h"),
    "py": re.compile(r"py/.*|include/kvcomm\.h"),
}

INCLUDE = re.compile(r'^\s*#\s*include\s+(?:"([^"]+)"|<([^>]+)>|(\S+))', re.MULTILINE)


def resolve(source: Path, name: str) -> str | None:
    """The path below csrc/ that a quoted include means, or None."""
    for folder in (source.parent, ROOT / "include"):
        path = (folder / name).resolve()
        if path.is_file() and path.is_relative_to(ROOT):
            return path.relative_to(ROOT).as_posix()
    return None


def faults() -> list[str]:
    """One line for every include that its layer must not have."""
    found: list[str] = []
    sources = sorted(p for p in ROOT.rglob("*") if p.suffix in {".c", ".h"})
    for source in sources:
        where = source.relative_to(ROOT)
        layer = where.parts[0]
        if layer not in OWN:
            found.append(f"csrc/{where}: not in a known layer ({', '.join(OWN)})")
            continue
        for quoted, system, computed in INCLUDE.findall(source.read_text()):
            if computed:
                found.append(f"csrc/{where}: include by macro {computed} cannot be checked")
            elif system and system not in SYSTEM[layer]:
                found.append(f"csrc/{where}: <{system}> is not for {layer}")
            elif quoted:
                target = resolve(source, quoted)
                if target is None or not OWN[layer].fullmatch(target):
                    found.append(f'csrc/{where}: "{quoted}" is not for {layer}')
    if not sources:
        found.append("csrc/ holds no sources")
    return found


if __name__ == "__main__":
    lines = faults()
    print("\n".join(lines) if lines else "includes: as they should be")
    sys.exit(1 if lines else 0)
