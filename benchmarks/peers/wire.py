"""The peer's end of the pipe: a request a line, a reply a line. Standard library only.

Owns the loop, the process's own memory, and that nothing but replies gets onto standard output:
whatever a library prints goes to standard error. The public methods of an object are the
operations.
"""

import json
import os
import resource
import sys
import traceback
from typing import Any


def memory() -> tuple[int, int]:
    """(bytes resident now, most there ever were). Without /proc the first is the second."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            lines = dict(line.split(":", 1) for line in file)
        return tuple(int(lines[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))
    except (OSError, KeyError):
        unit = 1 if sys.platform == "darwin" else 1 << 10
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return peak, peak


def reset_peak() -> None:
    """Let the most there ever were begin anew at what is resident now.

    Raises
    ------
    OSError
        The system has no way to.
    """
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def serve(peer: Any) -> None:
    """Answer until standard input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = getattr(peer, request.pop("op"))(**request)
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
