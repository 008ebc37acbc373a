"""The command ``streampack``. The services define its subcommands."""

from __future__ import annotations

import gc
import importlib
import sys


def main() -> int:
    """Run the command line and return its exit code: 2, with a hint, if the extra ``service`` is missing."""
    gc.set_threshold(50_000, 20, 50)  # imports create only lasting objects; collecting them takes 1/6 of the start
    try:
        cli = importlib.import_module("streampack_services.cli.main")
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] in ("streampack", "streampack_services"):
            raise
        missing = f"streampack: got no module {error.name!r}, expected the extra 'service'"
        sys.stderr.write(f"{missing}: pip install 'streampack[service]'\n")
        return 2
    code: int = cli.main()
    gc.freeze()  # the collection at exit would take as long
    return code


if __name__ == "__main__":
    sys.exit(main())
