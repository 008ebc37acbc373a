"""``python dying.py STEP SCRIPT ...``: the script, killed by SIGKILL as soon as it has printed the line of that step.

By its own hand, since a killer outside might come late, when the script has long ended.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys

WRITE = sys.stdout.write


def write(text: str) -> int:
    """As before, and then the end."""
    count = WRITE(text)
    if text.startswith("{") and json.loads(text)["step"] == LAST:
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    return count


LAST = int(sys.argv[1])
sys.argv = sys.argv[2:]
sys.stdout.write = write  # type: ignore[method-assign]
runpy.run_path(sys.argv[0], run_name="__main__")
