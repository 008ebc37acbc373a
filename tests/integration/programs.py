"""Programs that tests run and that are not Python: where ``make tools`` has put them."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def program(name: str) -> str:
    """The path of a program, beside this Python or on the PATH; a test never skips for want of one."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert found is not None, f"got no {name}, expected it on the PATH: run make tools"
    return found
