"""How many forks lie between the process that imported this and this one: to ask the system for the process's number
at every pack is dearer.
"""

from __future__ import annotations

import os

passed = 0


def _forked() -> None:
    global passed
    passed += 1


os.register_at_fork(after_in_child=_forked)
