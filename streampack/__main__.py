"""The command ``streampack``; its commands are the services'."""

from __future__ import annotations

import gc
import importlib
import sys


def main() -> int:
    """Run the command line, or say which extra is missing. Returns the exit code."""
    gc.set_threshold(50_000, 20, 50)  # what is imported stays: to look through it again and again is a sixth of a start
    try:
        cli = importlib.import_module("streampack_services.cli.main")
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] in ("streampack", "streampack_services"):
            raise
        missing = f"streampack: got no module {error.name!r}, expected the extra 'service'"
        sys.stderr.write(f"{missing}: pip install 'streampack[service]'\n")
        return 2
    code: int = cli.main()
    gc.freeze()  # nor are they looked through at the end, which took as long
    return code


if __name__ == "__main__":
    sys.exit(main())
