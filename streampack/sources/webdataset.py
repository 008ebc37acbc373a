"""Tar shards as webdataset writes them, read in any order.

Theory of operation. A tar file (POSIX.1-1988 ustar, POSIX.1-2001 pax, GNU) is a row of members, each a header of
512 bytes and its data; two blocks of zeros end it. The index is made from the headers alone: plain ones are
taken apart here, which is several times faster than ``tarfile``; from the first that is not plain (GNU long names,
global pax headers, base-256 numbers) ``tarfile`` goes on. An archive must end in its zero blocks, and nothing may
follow them: ``tarfile`` alone would take a cut or damaged archive for a shorter one, and samples would be lost in
silence.

Consecutive members whose names agree up to the first dot of the file name are one sample; what follows that dot,
in lower case, says what the member is (https://github.com/webdataset/webdataset, ``base_plus_ext`` and
``group_by_keys`` in tariterators.py). Names without a dot, hidden files and ``__meta__`` names are passed over,
as there. Of each sample one member is read: see SourceSettings. A .npy is parsed here too (numpy.lib.format,
versions 1 and 2), never unpickled, and never trusted about its size.

The webdataset package itself is not needed.
"""

import functools
import io
import re
import tarfile
import zlib
from array import array
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeAlias

import numpy as np

from streampack.errors import ConfigError, SourceError
from streampack.sources import Shard, ShardFile, refuse_compressed
from streampack.sources.jsonl import Load, ids_of, open_row
from streampack.sources.tokenizers import Tokenizer, Tokens, as_tokens

Member: TypeAlias = tuple[str, int, int]  # name, offset of the data, size; of regular files only

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
_AHEAD_BYTES = 1 << 16
_SPLIT = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)$").match
_META = re.compile(r"__[^/]*__($|/)").match
_MISSING, _DUPLICATE = -1, -2


def format_(text_key: str | None, tokens_key: str | None, tokenizer: Tokenizer) -> Callable[[ShardFile], Shard]:
    """What open_source calls: a function from an open file to its index."""
    loads = _loads(text_key, tokens_key, tokenizer)
    return lambda file: TarShard(file, loads)


class TarShard:
    """An indexed tar shard; a key and 17 bytes are held for each sample."""

    def __init__(self, file: ShardFile, loads: dict[str, Load]) -> None:
        self._file = file
        self._loads = list(loads.values())
        self._keys: list[str] = []
        self._offsets, self._sizes, self._ranks = array("q"), array("q"), array("b")
        self._index({suffix: rank for rank, suffix in enumerate(loads)})

    def _index(self, ranks: dict[str, int]) -> None:
        seen: set[str] = set()
        key_now: str | None = None
        for name, offset, size in members(self._file):
            if name.startswith("__") and _META(name):
                continue
            split = _SPLIT(name)
            if split is None:
                continue
            key, suffix = split[1], split[2].lower()
            if key != key_now:
                key_now = key
                seen.clear()
                self._add(key)
            rank = ranks.get(suffix, _MISSING)
            if suffix in seen:
                self._ranks[-1] = _DUPLICATE
            elif rank != _MISSING and (self._ranks[-1] == _MISSING or 0 <= rank < self._ranks[-1]):
                self._offsets[-1], self._sizes[-1], self._ranks[-1] = offset, size, rank
            seen.add(suffix)

    def _add(self, key: str) -> None:
        self._keys.append(key)
        self._offsets.append(0)
        self._sizes.append(0)
        self._ranks.append(_MISSING)

    def __len__(self) -> int:
        return len(self._keys)

    def load(self, sample: int) -> Tokens | str:
        rank = self._ranks[sample]
        if rank < 0:
            return "missing" if rank == _MISSING else "duplicate"
        return self._loads[rank](self._file.pread(self._sizes[sample], self._offsets[sample]))

    def where(self, sample: int) -> str:
        return f"{self._file.name}:{self._keys[sample]}"


def _loads(text_key: str | None, tokens_key: str | None, tokenizer: Tokenizer) -> dict[str, Load]:
    """What reads a member of each extension; of several in one sample, the first here is taken."""

    def text(raw: bytes) -> Tokens | str:
        try:
            return ids_of(tokenizer.encode(raw.decode()))
        except UnicodeDecodeError:
            return "encoding"

    if text_key is None and tokens_key is None:
        return {"txt": text, "text": text, "npy": load_npy, "json": open_row(None, None, tokenizer)}
    suffix, _, field = (text_key or tokens_key or "").partition("/")
    suffix = suffix.removeprefix(".").lower()
    last = suffix.rpartition(".")[2]
    if text_key is not None and last == "json":
        return {suffix: open_row(field or "text", None, tokenizer)}
    if text_key is not None and suffix and not field:
        return {suffix: text}
    if text_key is None and last == "json":
        return {suffix: open_row(None, field or "tokens", tokenizer)}
    if text_key is None and last == "npy" and not field:
        return {suffix: load_npy}
    raise ConfigError(
        f"text_key, tokens_key: got {text_key!r}, {tokens_key!r}; expected an extension: for text such as 'txt' or "
        "'json/field', for tokens 'npy' or 'json/field'"
    )


def members(file: ShardFile) -> Iterator[Member]:
    """(name, offset of its data, size in bytes) of every regular file in a tar, in the archive's order.

    Raises SourceError for what is no tar, is cut short, is damaged, is compressed or changes meanwhile.
    """
    if file.size == 0:
        raise SourceError(f"{file.path}: got 0 bytes, expected a tar archive: write it again")
    offset, buffer, base = 0, b"", 0
    pax: dict[bytes, bytes] = {}  # what the pax header before this one says of it
    pax_offset = 0
    while True:
        if offset + _BLOCK > file.size:
            return _check_end(file, offset)  # raises
        if offset + _BLOCK > base + len(buffer):
            base, buffer = offset, file.pread(min(_AHEAD_BYTES, file.size - offset), offset)
        header = buffer[offset - base : offset - base + _BLOCK]
        if header == _ZEROS and not pax:
            return _check_end(file, offset)
        plain = _plain(header)
        if plain is None:
            break
        name, size = plain
        data, is_pax = offset + _BLOCK, header[156] == _PAX
        if is_pax and not pax and size <= _MAX_PAX_BYTES and data + size <= file.size:
            at = data - base
            pax = _pax(buffer[at : at + size] if at + size <= len(buffer) else file.pread(size, data))
            if not pax:
                break
            pax_offset = offset
        elif is_pax:
            break
        else:
            try:
                name, size = pax[b"path"].decode() if b"path" in pax else name, int(pax.get(b"size", size))
            except ValueError:
                break
            yield _checked(file, name, data, size)
            pax = {}
        offset = data + -(-size // _BLOCK) * _BLOCK
    end = yield from _members_by_tarfile(file, pax_offset if pax else offset)
    return _check_end(file, end)


_REGULAR, _PAX = b"0\0", ord("x")
_MAX_PAX_BYTES = 1 << 16
_ADLER = 65521


def _plain(header: bytes) -> tuple[str, int] | None:
    """(name, size) of a ustar, GNU or V7 header of a regular file, or of pax records; None for others and damage."""
    kind = header[156]
    if (kind not in _REGULAR and kind != _PAX) or header[257:262] not in (b"ustar", b"\0\0\0\0\0"):
        return None
    # The header's checksum is the sum of its bytes, its own field taken as blanks. The low half of adler32 is
    # that sum plus 1, modulo 65521, and costs a thirtieth of sum(): hence everything modulo that.
    field = header[148:156]
    total = (zlib.adler32(header) & 0xFFFF) - 1 - sum(field) + 8 * ord(" ")
    try:
        if (int(field.rstrip(b"\0 ") or b"x", 8) - total) % _ADLER:
            return None
        size = int(header[124:136].rstrip(b"\0 ") or b"0", 8)
        name = header[:100].partition(b"\0")[0].decode()
        if header[345]:
            if header[257:263] != b"ustar\0":  # GNU keeps other things there
                return None
            name = header[345:500].partition(b"\0")[0].decode() + "/" + name
    except ValueError:
        return None
    return None if size < 0 or not name or name.endswith("/") else (name, size)


def _pax(records: bytes) -> dict[bytes, bytes]:
    """pax records, each ``length keyword=value newline``; empty when there is one that tarfile should look at.

    webdataset.TarWriter writes such a header before every member, for the fraction of its time stamp.
    """
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(records):
        digits = records[at : at + 20].partition(b" ")[0]
        length = int(digits) if digits.isdigit() else 0
        keyword, equals, value = records[at + len(digits) + 1 : at + length - 1].partition(b"=")
        if length < 5 or not equals or records[at + length - 1 : at + length] != b"\n" or keyword not in _PAX_KEYWORDS:
            return {}
        found[keyword] = value
        at += length
    return found


_PAX_KEYWORDS = frozenset(b"path size mtime atime ctime uid gid uname gname comment".split())


def _members_by_tarfile(file: ShardFile, start: int) -> Generator[Member, None, int]:
    """The members from the header at ``start`` on; returns the offset of the block that ended them."""
    stream = io.BufferedReader(_Raw(file), _AHEAD_BYTES)
    stream.seek(start)
    at = start
    try:
        with tarfile.open(fileobj=stream, mode="r:", encoding="utf-8", errors="backslashreplace") as archive:
            while (member := archive.next()) is not None:
                at = archive.offset
                archive.members.clear()  # type: ignore[attr-defined]  # or they would all be held
                if member.issparse():
                    raise SourceError(
                        f"{file.path}: {member.name} is a sparse file: write the archive without --sparse"
                    )
                if member.isreg():
                    yield _checked(file, member.name, member.offset_data, member.size)
            return archive.offset
    except (tarfile.TarError, ValueError, OverflowError) as error:  # a damaged pax record raises any of these
        raise _broken(file, at, str(error), "a tar header") from error


class _Raw(io.RawIOBase):
    """A ShardFile as ``tarfile`` wants it, with a position of its own."""

    def __init__(self, file: ShardFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self._file.size - self._at))
        buffer[:size] = self._file.pread(size, self._at)
        self._at += size
        return size


def _checked(file: ShardFile, name: str, offset: int, size: int) -> Member:
    if not 0 <= size <= file.size - offset:
        got = f"member {name!r} of {size} bytes where {max(0, file.size - offset)} are left"
        raise _broken(file, offset, got, "all of it")
    return name, offset, size


def _check_end(file: ShardFile, offset: int) -> None:
    """An archive ends in blocks of zeros (two, says POSIX; one will do), and nothing else comes after them."""
    expected = "a tar header, or the blocks of zeros that end an archive"
    if offset + _BLOCK > file.size:
        raise _broken(file, offset, f"the end of the file ({file.size} bytes)", expected)
    first = file.pread(_BLOCK, offset)
    if first != _ZEROS:
        raise _broken(file, offset, f"{first[:8]!r}...", expected)
    for at in range(offset, file.size, _AHEAD_BYTES):
        block = file.pread(min(_AHEAD_BYTES, file.size - at), at)
        if block.count(0) != len(block):
            raise SourceError(
                f"{file.path}: got more data at byte {at} after the archive's end at byte {offset}, expected none; "
                "tar files that were joined with cat must be separate files, or joined with tar --concatenate"
            )


def _broken(file: ShardFile, offset: int, got: str, expected: str) -> SourceError:
    refuse_compressed(file, file.pread(min(file.size, 8), 0) if offset == 0 else b"")
    return SourceError(
        f"{file.path}: at byte {offset}: got {got}, expected {expected}; "
        "the file is cut short, damaged or no tar: copy or write it again"
    )


def load_npy(raw: bytes) -> Tokens | str:
    """The token ids [T] int32 in the bytes of a .npy file, or why there are none: ``npy``, or those of as_tokens.

    Never unpickles, and never allocates what a header claims: the data must have exactly the size that it says.

    >>> buffer = io.BytesIO(); np.save(buffer, np.array([5, 6], np.uint16)); load_npy(buffer.getvalue())
    array([5, 6], dtype=int32)
    """
    size = 10 + int.from_bytes(raw[8:10], "little") if raw[6:7] == b"\1" else 12 + int.from_bytes(raw[8:12], "little")
    if not raw.startswith(b"\x93NUMPY") or size > min(len(raw), _MAX_NPY_HEADER):
        return "npy"
    header = _npy_header(raw[:size])
    if isinstance(header, str):
        return header
    dtype, shape = header
    if dtype.kind not in "iu":
        return "dtype"
    if len(shape) != 1:
        return "ragged"
    if shape[0] * dtype.itemsize != len(raw) - size:
        return "npy"
    return as_tokens(np.frombuffer(raw, dtype, offset=size))


_MAX_NPY_HEADER = 10_000


@functools.lru_cache(maxsize=1024)  # headers differ by length only, and parsing one costs ten times the rest
def _npy_header(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...]] | str:
    stream = io.BytesIO(header)
    try:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        elif version == (2, 0):
            shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
        else:  # (3, 0) is for field names beyond latin-1: a structured array, no ids
            return "dtype"
    except Exception:  # the literal parser raises anything for hostile text
        return "npy"
    return dtype, shape
