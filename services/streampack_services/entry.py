"""The entry point of the command ``streampack``; ``main`` does the imports, so that Ctrl-C prints no traceback."""

from __future__ import annotations

import importlib


def main() -> int:
    """Run the command line and return its exit code."""
    try:
        code: int = importlib.import_module("streampack.__main__").main()
    except KeyboardInterrupt:
        return 130
    return code
