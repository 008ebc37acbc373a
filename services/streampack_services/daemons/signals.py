"""The signals that ask a daemon to end."""

from __future__ import annotations

import signal


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return SIGTERM, SIGINT, and SIGHUP, which a closed terminal sends, unless it is ignored, as ``nohup`` has it."""
    kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return signal.SIGTERM, signal.SIGINT, *(() if kept else (signal.SIGHUP,))
