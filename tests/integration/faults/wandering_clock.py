"""``python -m tests.integration.faults.wandering_clock COMMAND...``: streampack where the wall clock jumps at every
look.

By up to a day, forth and back; what is monotonic stays so.
"""

from __future__ import annotations

import itertools
import sys
import time

from streampack.__main__ import main

_JUMPS_S = itertools.cycle((0.0, 86_400.0, -86_400.0, 3600.0, -1.0, 40_000.0, -3600.0))
_time, _time_ns = time.time, time.time_ns


def _wandering() -> float:
    return _time() + next(_JUMPS_S)


def _wandering_ns() -> int:
    return _time_ns() + int(next(_JUMPS_S)) * 10**9


if __name__ == "__main__":
    time.time, time.time_ns = _wandering, _wandering_ns
    sys.exit(main())
