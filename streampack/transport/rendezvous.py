"""Find the broker's address: in an argument, in the environment, or in the rendezvous file that a broker writes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Literal

from streampack.errors import Unreachable, UserError

RENDEZVOUS = "streampack.json"
"""Name of the file in the broker's ``state_dir``, where 'streampack run' puts it if broker.yaml names none."""
VARIABLES = {"trainers": "STREAMPACK_ENDPOINT", "producers": "STREAMPACK_PRODUCERS"}
"""Environment variables that name the broker's address, by the side that it is for."""


def endpoint_of(endpoint: str | None, side: Literal["trainers", "producers"], timeout_s: float) -> str:
    """Return the broker's address for ``side``, from the argument, the environment or a rendezvous file.

    Raises UserError if there is none, and Unreachable if the rendezvous file does not come within ``timeout_s``.
    """
    address = endpoint or os.environ.get(VARIABLES[side])
    if not address:
        raise UserError(
            f"got no endpoint, expected an address such as tcp://host:port. Pass the endpoint, or set "
            f"{VARIABLES[side]} in the environment"
        )
    if address.startswith("file://"):
        return read_rendezvous(Path(address.removeprefix("file://")), side, timeout_s)
    return address


def read_rendezvous(path: Path, side: str, timeout_s: float = 60.0) -> str:
    """Return the broker's address for ``side`` (``producers`` or ``trainers``) from its rendezvous file.

    Wait up to ``timeout_s`` seconds for the file, or for a new file if its run has ended. Raises Unreachable after that
    time, or if the file is not a rendezvous file.
    """
    deadline, path = time.monotonic() + timeout_s, path.expanduser()
    while True:
        missing = "no file"
        try:
            content = json.loads(path.read_text())
            if "failed" not in content:
                return str(content[side])
            missing = f"only the file of a run that has ended ({content['failed']})"
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
