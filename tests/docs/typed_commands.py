"""Commands of a page, typed into a shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.integration.running import PATIENCE_S

ENVIRON = os.environ | {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
}


def typed(code: str, folder: Path) -> str:
    """Return what a block of commands prints; each command must succeed."""
    done = subprocess.run(
        ["bash", "-e", "-c", code], cwd=folder, env=ENVIRON, capture_output=True, text=True, timeout=10 * PATIENCE_S
    )
    assert done.returncode == 0, f"{code}{done.stdout}{done.stderr}"
    return done.stdout
