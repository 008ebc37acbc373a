"""Text that every machine has, as WebDataset shards: the Python standard library's sources and docs.

A document is what a module defines at its top level, a function or a class with what precedes it,
cut at line ends to a quarter of the budget at most, so that a pack holds several.
"""

from __future__ import annotations

import io
import sysconfig
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from streampack.errors import SourceError

SHARDS = 16
_DEFINES = ("def ", "class ", "async def ", "@")


def documents(max_bytes: int) -> Iterator[str]:
    """The standard library's modules, largest folders last, in pieces of ``max_bytes`` of UTF-8 at most."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    files.sort(key=lambda path: ("test" in path.parts, len(path.parts), path))
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        yield from _pieces(text, max_bytes)


def write_shards(folder: Path, num_tokens: int, max_bytes: int) -> tuple[str, int]:
    """Write tar shards with about ``num_tokens`` bytes of text; their brace pattern, and documents written.

    The text is gone through again if there is too little of it. Raises SourceError if there is none.
    """
    pattern = str(folder / f"text-{{00..{SHARDS - 1:02d}}}.tar")
    written = count = 0
    with ExitStack() as stack:
        paths = [folder / f"text-{i:02d}.tar" for i in range(SHARDS)]
        writers = [stack.enter_context(tarfile.open(path, "w")) for path in paths]
        while written < num_tokens:
            before = count
            for text in documents(max_bytes):
                if written >= num_tokens:
                    break
                content = text.encode()
                member = tarfile.TarInfo(f"{count:07d}.txt")
                member.size = len(content)
                writers[count % SHARDS].addfile(member, io.BytesIO(content))
                written += len(content) + 1
                count += 1
            if count == before:
                raise SourceError(
                    "got no Python sources on this machine, expected the standard library's: use --source"
                )
    return pattern, count


def _pieces(text: str, max_bytes: int) -> Iterator[str]:
    held: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        length = len(line.encode())
        if length > max_bytes:
            continue  # a table in one line, say: no place to cut it
        if held and (size + length > max_bytes or line.startswith(_DEFINES)):
            yield "".join(held)
            held, size = [], 0
        held.append(line)
        size += length
    if held:
        yield "".join(held)
