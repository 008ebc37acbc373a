"""The members of a tar file: names, offsets, sizes.

Theory of operation. A tar file (POSIX.1-1988 ustar, POSIX.1-2001 pax, GNU) is a row of members, each a header of
512 bytes and its data; two blocks of zeros end it. The index is made from the headers alone: plain ones are
taken apart here, which is several times faster than ``tarfile``; from the first that is not plain (GNU long names,
global pax headers, base-256 numbers) ``tarfile`` goes on. An archive must end in its zero blocks, and nothing may
follow them: ``tarfile`` alone would take a cut or damaged archive for a shorter one, and samples would be lost in
silence.
"""

import io
import tarfile
import zlib
from collections.abc import Generator, Iterator
from typing import TypeAlias

from streampack.errors import DamagedFile, SourceError
from streampack.sources.files.byte_source import PositionedFile, ShardFile, refuse_compressed

Member: TypeAlias = tuple[str, int, int]  # name, offset of the data, size; of regular files only

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
_AHEAD_BYTES = 1 << 16


def members(file: ShardFile) -> Iterator[Member]:
    """(name, offset of its data, size in bytes) of every regular file in a tar, in the archive's order.

    Raises SourceError for what is no tar, is cut short, is damaged, is compressed or changes meanwhile.
    """
    if file.size == 0:
        raise DamagedFile(f"{file.path}: got 0 bytes, expected a tar archive: write it again")
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
    """Pax records, each ``length keyword=value newline``; empty when there is one that tarfile should look at.

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
    stream = io.BufferedReader(PositionedFile(file), _AHEAD_BYTES)
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


def _broken(file: ShardFile, offset: int, got: str, expected: str) -> DamagedFile:
    refuse_compressed(file, file.pread(min(file.size, 8), 0) if offset == 0 else b"")
    return DamagedFile(
        f"{file.path}: at byte {offset}: got {got}, expected {expected}; "
        "the file is cut short, damaged or no tar: copy or write it again"
    )
