"""The arbiter in a folder of a shared file system, or of an object store (S3, Google Cloud Storage and others).

A folder's entries are written to a file with a name of its own, which is then linked to the entry's name. ``link``
fails if that name exists, on local file systems and on NFS. In an object store the write has the condition that the
name does not exist. ``probe`` finds a store that ignores the condition, and would give a run two active brokers.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from streampack.core.standby.arbiter_entries import Entry
from streampack.errors import ConfigError, UserError
from streampack_services.standby.arbiter import ArbiterUnreachable

_NAME = re.compile(r"(\d{10})\.json")


class WriteOnceStore(Protocol):
    """A folder of small files; each file can be written only once."""

    def names(self) -> list[str]:
        """Return the names of all files. Raises OSError."""

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises OSError."""

    def create(self, name: str, content: bytes) -> bool:
        """Write a file; return False if it exists. Raises OSError if it may have been written or not."""

    def remove(self, name: str) -> None:
        """Remove a file. Raises OSError."""


class FileArbiter:
    """The entries of one run in a ``store``; ``where`` names it in texts."""

    def __init__(self, store: WriteOnceStore, where: str) -> None:
        self._store, self.where = store, where

    def newest(self) -> Entry | None:
        """Return the newest entry; None if there is none. Raises ArbiterUnreachable."""
        try:
            numbers = [int(match[1]) for name in self._store.names() if (match := _NAME.fullmatch(name))]
            return self._read(max(numbers)) if numbers else None
        except OSError as error:
            raise self._unreachable(error) from None

    def create(self, entry: Entry) -> Entry:
        """Write an entry unless one of its number exists; return the entry of that number.

        Raises ArbiterUnreachable.
        """
        try:
            written = self._store.create(_name(entry.number), msgspec.json.encode(entry))
            return entry if written else self._read(entry.number)
        except OSError as error:
            raise self._unreachable(error) from None

    def probe(self) -> None:
        """Prove that the store lets each name be written once. Raises UserError."""
        name = f"probe-{uuid.uuid4().hex}"
        try:
            twice = self._store.create(name, b"first") and self._store.create(name, b"second")
            kept = self._store.read(name)
            with contextlib.suppress(OSError):
                self._store.remove(name)
        except OSError as error:
            raise UserError(
                f"standby.arbiter: {self.where} cannot be used: {error}. Choose a folder or a bucket that both hosts "
                f"can write to"
            ) from None
        if twice or kept != b"first":
            raise UserError(
                f"standby.arbiter: {self.where} let the same name be written twice, so it could give the run two "
                f"active brokers. Choose a shared folder, or a store with conditional writes"
            )

    def _read(self, number: int) -> Entry:
        """Return the entry of this number. Raises OSError, UserError if it cannot be decoded."""
        content = self._store.read(_name(number))
        try:
            return msgspec.json.decode(content, type=Entry)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise UserError(
                f"standby.arbiter: entry {number} in {self.where} cannot be read: {error}. Each run needs a folder of "
                f"its own"
            ) from None

    def _unreachable(self, error: OSError) -> ArbiterUnreachable:
        """Return the error for a store that does not answer."""
        return ArbiterUnreachable(f"{self.where}: {error.strerror or error}")


class Folder:
    """A folder on a file system that both hosts share."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def names(self) -> list[str]:
        """Return the names of all files."""
        return os.listdir(self._path)

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        return (self._path / name).read_bytes()

    def create(self, name: str, content: bytes) -> bool:
        """Write a file; return False if it exists."""
        part = self._path / f".{name}.{uuid.uuid4().hex}"
        try:
            with part.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.link(part, self._path / name)
        except FileExistsError:
            return False
        finally:
            part.unlink(missing_ok=True)
        folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return True

    def remove(self, name: str) -> None:
        """Remove a file."""
        (self._path / name).unlink()


class ObjectStore:
    """A folder of an object store, through fsspec; ``url`` such as ``s3://bucket/run``."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec

            opened: tuple[Any, str] = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"standby.arbiter: {url} cannot be opened: {error}. Install the package that fsspec needs for it, or "
                f"name a shared folder"
            ) from None
        self._fs, self._path = opened

    def names(self) -> list[str]:
        """Return the names of all files."""
        self._fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError), _as_os_error():
            return [path.rpartition("/")[2] for path in self._fs.ls(self._path, detail=False)]
        return []

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        with _as_os_error():
            content: bytes = self._fs.cat_file(f"{self._path}/{name}")
        return content

    def create(self, name: str, content: bytes) -> bool:
        """Write a file; return False if it exists."""
        with contextlib.suppress(FileExistsError), _as_os_error():
            self._fs.pipe_file(f"{self._path}/{name}", content, mode="create")
            return True
        return False

    def remove(self, name: str) -> None:
        """Remove a file."""
        with _as_os_error():
            self._fs.rm_file(f"{self._path}/{name}")


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """Raise the errors of a store's library, which may be of any class, as OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from None


def _name(number: int) -> str:
    """Return the name of an entry's file."""
    return f"{number:010d}.json"
