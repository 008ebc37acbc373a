"""``python dying.py STEP SCRIPT ...``: the script, killed by SIGKILL as soon as it has printed the line of that step.

By its own hand, since a killer outside might come late, when the script has long ended.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys


def die_at(step: int) -> None:
    """Have this process killed behind the line of ``step``."""
    write = sys.stdout.write

    def written(text: str) -> int:
        count = write(text)
        if text.startswith("{") and json.loads(text)["step"] == step:
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return count

    sys.stdout.write = written  # type: ignore[method-assign]


if __name__ == "__main__":
    die_at(int(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
