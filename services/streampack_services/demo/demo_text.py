"""Text for the demo: the Python standard library's modules, written as WebDataset tar shards.

A document is one function or class of a module's top level, with the lines before it. Long ones are cut at line ends to
a quarter of the budget, so that a pack holds several documents.
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
    """Yield the standard library's modules in pieces of at most ``max_bytes`` bytes of UTF-8.

    Modules in deep folders come late, and tests last.
    """
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
    """Write tar shards with ``num_tokens`` bytes of text or a little more, in documents of at most ``max_bytes`` bytes.

    If the standard library has less text, its documents are written again. Returns the shards' brace pattern and the
    number of documents. Raises SourceError if the machine has no sources of the standard library.
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
                    "This machine does not have the source files of the Python standard library. Pass your own files "
                    "with --source."
                )
    return pattern, count


def _pieces(text: str, max_bytes: int) -> Iterator[str]:
    """Yield a module's text, cut before each definition and after at most ``max_bytes`` bytes; drop longer lines."""
    lines: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        length = len(line.encode())
        if length > max_bytes:
            continue
        if lines and (size + length > max_bytes or line.startswith(_DEFINES)):
            yield "".join(lines)
            lines, size = [], 0
        lines.append(line)
        size += length
    if lines:
        yield "".join(lines)
