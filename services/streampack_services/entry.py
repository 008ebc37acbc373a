"""Where the command ``streampack`` begins: nothing is imported yet, so that Ctrl-C is quiet while it is."""

from __future__ import annotations

import importlib


def main() -> int:
    """Run the command line. Returns the exit code."""
    try:
        code: int = importlib.import_module("streampack.__main__").main()
    except KeyboardInterrupt:
        return 130
    return code
