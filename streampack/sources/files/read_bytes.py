"""Reads the bytes that a reference names, from a file, through fsspec or from a ``data:`` URL, and checks them.

A URL may be chained, as fsspec calls it: ``zip://a.png::s3://bucket/x.zip``, ``simplecache::https://host/a.png``. File
systems are kept by all of the URL but the item's own path. So an archive is opened once for many items, and a cache of
files is one cache. Threads read an archive in turn, since its file has one position.
"""

from __future__ import annotations

import importlib
import re
import threading
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from awscrt.checksums import crc32c

from streampack.core.media.references import Reference, inline_bytes
from streampack.errors import ConfigError

LARGEST = 256 << 20
"""Bytes that an item may have, by default."""
_CHAINED = re.compile(r"::(/|[A-Za-z][A-Za-z0-9+.-]*(://|::))").search
"""Finds a further link of a chained URL: a protocol or an absolute path. A host such as ``[::1]`` is none."""
_ARCHIVES = ("zip", "tar", "libarchive")
"""Protocols of archives, whose URLs are always chained."""
_KEPT = 64
"""File systems to keep; each archive is one of them, with an open file."""


class WrongBytes(ValueError):
    """The bytes are not those that the reference describes: fewer of them, or others."""


class TooLarge(ValueError):
    """The item has more bytes than are allowed."""


def read_bytes(reference: Reference, largest: int = LARGEST) -> bytes:
    """Return the bytes of a reference.

    Args:
        reference: Where the bytes are.
        largest: Bytes that it may have.

    Raises:
        TooLarge: It has more bytes.
        OSError: They cannot be read.
        WrongBytes: They have another size or checksum than the reference says, or the ``data:`` URL is not valid.
        ConfigError: fsspec, or a package that it needs for the URL, is not installed.
    """
    begin, size = reference.offset, reference.size
    if size is not None and size > largest:
        raise TooLarge(f"got an item of {size} bytes, expected at most {largest}. Raise `largest` of `Media`")
    end = begin + (largest + 1 if size is None else size)
    data = _read(reference, begin, end)
    if size is None and len(data) > largest:
        raise TooLarge(f"got an item of more than {largest} bytes. Raise `largest` of `Media`")
    if size is not None and len(data) > size:
        raise ConfigError(
            f"media: got {len(data)} bytes for a range of {size} bytes of {reference.shown}, expected a store that "
            f"serves ranges. Use another store, or a file for each item"
        )
    if size is not None and len(data) != size:
        raise WrongBytes(f"got {len(data)} bytes, expected {size}")
    if reference.crc32c is not None and (checksum := crc32c(data)) != reference.crc32c:
        raise WrongBytes(f"got the checksum {checksum:08x}, expected {reference.crc32c:08x}")
    return data


def read_range(reference: Reference, place: int, count: int) -> bytes:
    """Return up to ``count`` bytes of an item from its byte ``place`` on, fewer at its end; see ``read_bytes``."""
    count = count if reference.size is None else min(count, reference.size - place)
    begin = reference.offset + place
    return _read(reference, begin, begin + count) if count > 0 else b""


def _read(reference: Reference, begin: int, end: int) -> bytes:
    """Return the bytes [begin, end) of the file of a reference, as far as it has them."""
    if reference.is_inline:
        try:
            return inline_bytes(reference)[begin:end]
        except ValueError as error:
            raise WrongBytes(str(error)) from None
    if "://" in reference.uri:
        return _fetch(reference.uri, begin, end)
    with Path(reference.uri).open("rb") as file:
        file.seek(begin)
        return file.read(end - begin)


def length_of(reference: Reference) -> int:
    """Return the number of bytes of an item."""
    if reference.size is not None:
        return reference.size
    if reference.is_inline:
        return len(inline_bytes(reference)) - reference.offset
    if "://" not in reference.uri:
        return Path(reference.uri).stat().st_size - reference.offset
    opened, path = _filesystem(reference.uri)
    with opened.lock:
        return int(opened.files.size(path)) - reference.offset


class _Opened(NamedTuple):
    """An fsspec file system, and the lock that threads take to read from it."""

    files: Any
    lock: AbstractContextManager[Any]


def _fetch(uri: str, begin: int, end: int) -> bytes:
    """Return the bytes [begin, end) of a URL that fsspec reads, as far as it has them."""
    opened, path = _filesystem(uri)
    with opened.lock:
        try:
            data: bytes = opened.files.cat_file(path, start=begin, end=end)
        except KeyError as error:  # from an archive
            raise FileNotFoundError(str(error.args[0] if error.args else error)) from None
    return data


def _filesystem(uri: str) -> tuple[_Opened, str]:
    """Return the file system for a URL, and the path in it. Raises ConfigError, or an error of the file system."""
    links = uri.split("::") if _is_chained(uri) else [uri]
    at = next((at for at, link in enumerate(links) if link.partition("://")[2]), 0)
    before, (protocol, _, path), after = links[:at], links[at].partition("://"), links[at + 1 :]
    # The file system of the last link depends on its host at most; that of an archive on all links behind it.
    root = f"{protocol}://" if after else f"{protocol}://{path.partition('/')[0]}/"
    opened = _open("::".join([*before, root, *after]))
    return opened, _class_of(protocol)._strip_protocol(links[at])


def _is_chained(uri: str) -> bool:
    """Return whether a URL has further links; those of an archive may be relative paths."""
    return bool(_CHAINED(uri)) or ("::" in uri and uri.partition("://")[0] in _ARCHIVES)


@lru_cache(maxsize=_KEPT)
def _open(root: str) -> _Opened:
    """Return the file system for a URL without the path of an item."""
    if not _is_chained(root):
        kind = _class_of(root.partition("://")[0])
        try:
            return _Opened(kind(**kind._get_kwargs_from_urls(root)), nullcontext())
        except TypeError as error:
            raise ConfigError(
                f"media: got a URL with {root}, which needs more than this URL says ({error}). Configure fsspec, or "
                f"chain the URL, as in zip://a.png::/data/images.zip"
            ) from None
    links = root.split("::")
    for link in links:
        if "://" in link or link is not links[-1]:
            _class_of(link.partition("://")[0])
    files, _ = importlib.import_module("fsspec.core").url_to_fs(root)
    is_archive = any(link.endswith("://") for link in links)
    return _Opened(files, threading.Lock() if is_archive else nullcontext())


def _class_of(protocol: str) -> Any:
    """Return the class of a protocol's file system. Raises ConfigError."""
    try:
        return importlib.import_module("fsspec").get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(
            f"media: got a URL with {protocol}://, which cannot be opened ({text}). Run `pip install "
            f"'streampack[remote]'`, or what fsspec needs for this protocol"
        ) from None
