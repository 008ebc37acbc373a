"""The signals that ask a daemon to end."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Collection, Iterator


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return SIGTERM, SIGINT, and SIGHUP, which a closed terminal sends, unless it is ignored, as ``nohup`` has it."""
    kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return signal.SIGTERM, signal.SIGINT, *(() if kept else (signal.SIGHUP,))


@contextlib.contextmanager
def on_ending_signals(act: Callable[[int], object], *, without: Collection[signal.Signals] = ()) -> Iterator[None]:
    """Call ``act`` with the number of each ending signal that comes in the block, except those in ``without``."""
    numbers = [number for number in ending_signals() if number not in without]
    before = {number: signal.signal(number, lambda number, _: act(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
