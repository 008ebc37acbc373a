"""The reader of the rendezvous file, to which a broker writes its addresses."""

from __future__ import annotations

import json
import time
from pathlib import Path

from streampack.errors import Unreachable

RENDEZVOUS = "streampack.json"
"""Name of the file in the broker's ``state_dir``, where 'streampack run' puts it if broker.yaml names none."""


def read_rendezvous(path: Path, side: str, timeout_s: float = 60.0) -> str:
    """Return the broker's address for ``side`` (``producers`` or ``trainers``) from its rendezvous file.

    Wait up to ``timeout_s`` seconds for the file, or for a new file if its run has ended. Raises Unreachable after that
    time, or if the file is not a rendezvous file.
    """
    deadline, path = time.monotonic() + timeout_s, path.expanduser()
    while True:
        missing = "no file"
        try:
            found = json.loads(path.read_text())
            if "failed" not in found:
                return str(found[side])
            missing = f"only the file of a run that has ended ({found['failed']})"
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise Unreachable(
                f"{path}: got a file that is not a broker's rendezvous file ({error}). Check the path"
            ) from None
        if time.monotonic() > deadline:
            raise Unreachable(
                f"{path}: got {missing} within {timeout_s:g} s, expected a broker's rendezvous file. Check that the "
                f"broker runs"
            )
        time.sleep(0.2)
