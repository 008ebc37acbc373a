"""One of several processes that write the same entries: prints the numbers that it has won."""

from __future__ import annotations

import sys
from pathlib import Path

from streampack_services.standby.file_arbiter import FileArbiter, Folder

from streampack.core.standby.arbiter_entries import Entry


def main(folder: str, name: str, numbers: int) -> None:
    arbiter = FileArbiter(Folder(Path(folder)), folder)
    sys.stdin.readline()
    for number in range(1, numbers + 1):
        entry = Entry(number=number, epoch=1, active=name, process=name, log_id=name, members=(name,))
        if arbiter.create(entry) == entry:
            print(number)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
