"""The number of forks between the process that imported this module and the current process.

Comparing this number for every pack costs less than asking the system for the process id.
"""

from __future__ import annotations

import os

passed = 0


def _count_fork() -> None:
    """Count a fork; runs in the child after each fork."""
    global passed
    passed += 1


os.register_at_fork(after_in_child=_count_fork)
