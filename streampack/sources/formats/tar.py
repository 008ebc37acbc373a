"""Lists the members of a tar file: names, offsets and sizes.

Theory of operation. A tar file (POSIX.1-1988 ustar, POSIX.1-2001 pax, GNU) is a sequence of members. Each member is a
header of 512 bytes and its data. Two blocks of zeros end the file. The index is built from the headers alone. This
module parses common headers, several times faster than ``tarfile``. From the first uncommon header on (GNU long names,
global pax headers, base-256 numbers, links) ``tarfile`` continues. An archive must end in its zero blocks, and nothing
may follow them. Without that check, a truncated archive would pass for a shorter one, and samples would be lost.

A hard link is a member with the data of an earlier one. tar writes it for the second of two names of one file. Symbolic
links and other members without data of their own are refused: their samples would be lost.
"""

import io
import tarfile
import zlib
from collections.abc import Generator, Iterator
from typing import TypeAlias

from streampack.errors import DamagedFile, SourceError
from streampack.sources.files.byte_source import PositionedFile, ShardFile

Member: TypeAlias = tuple[str, int, int]  # (name, byte offset of the data, size in bytes) of a regular file

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
_AHEAD_BYTES = 1 << 16


def members(file: ShardFile) -> Iterator[Member]:
    """Yield (name, byte offset of the data, size in bytes) of every file in a tar, in the archive's order.

    A hard link has the offset and size of its target. Raises SourceError if the file is not a tar, or is truncated,
    damaged or changed, or has members that are neither files nor folders.
    """
    start = yield from _common_members(file)
    if start is not None:
        end = yield from _members_by_tarfile(file, start)
        _check_end(file, end)


def _common_members(file: ShardFile) -> Generator[Member, None, int | None]:
    """Yield the members up to the first uncommon header; return its offset, or None at the end of the archive."""
    if file.size == 0:
        raise DamagedFile(f"{file.path}: got 0 bytes, expected a tar archive. Write the file again")
    offset, buffer, base = 0, b"", 0
    pax: dict[bytes, bytes] = {}  # records of the pax header before the current header
    pax_offset = 0
    while True:
        if offset + _BLOCK > file.size:
            _check_end(file, offset)  # raises
        if offset + _BLOCK > base + len(buffer):
            base, buffer = offset, file.pread(min(_AHEAD_BYTES, file.size - offset), offset)
        header = buffer[offset - base : offset - base + _BLOCK]
        if header == _ZEROS and not pax:
            _check_end(file, offset)
            return None
        plain = _parse_header(header)
        if plain is None:
            break
        name, size = plain
        data, is_pax = offset + _BLOCK, header[156] == _PAX
        if is_pax and not pax and size <= _MAX_PAX_BYTES and data + size <= file.size:
            at = data - base
            pax = _parse_pax(buffer[at : at + size] if at + size <= len(buffer) else file.pread(size, data))
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
            yield _checked_member(file, name, data, size)
            pax = {}
        offset = data + -(-size // _BLOCK) * _BLOCK
    return pax_offset if pax else offset


_REGULAR, _PAX = b"0\0", ord("x")
_MAX_PAX_BYTES = 1 << 16
_ADLER = 65521


def _parse_header(header: bytes) -> tuple[str, int] | None:
    """Parse a 512-byte header of a regular file or of pax records to (name, size in bytes).

    Returns None for any other or damaged header, which ``tarfile`` then reads.
    """
    kind = header[156]
    if (kind not in _REGULAR and kind != _PAX) or header[257:262] not in (b"ustar", b"\0\0\0\0\0"):
        return None
    # A header's checksum is the sum of its bytes, with blanks in place of the checksum field. The low half of adler32
    # is that sum plus 1, modulo 65521, and is 30 times faster than sum(). So the comparison is modulo 65521.
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


def _parse_pax(records: bytes) -> dict[bytes, bytes]:
    """Parse pax records, each ``length keyword=value newline``, to a dict; empty if only ``tarfile`` can read them.

    The class webdataset.TarWriter writes such records before every member, for the fraction of its time stamp.
    """
    pax: dict[bytes, bytes] = {}
    at = 0
    while at < len(records):
        digits = records[at : at + 20].partition(b" ")[0]
        length = int(digits) if digits.isdigit() else 0
        keyword, equals, value = records[at + len(digits) + 1 : at + length - 1].partition(b"=")
        if length < 5 or not equals or records[at + length - 1 : at + length] != b"\n" or keyword not in _PAX_KEYWORDS:
            return {}
        pax[keyword] = value
        at += length
    return pax


_PAX_KEYWORDS = frozenset(b"path size mtime atime ctime uid gid uname gname comment".split())


def _members_by_tarfile(file: ShardFile, start: int) -> Generator[Member, None, int]:
    """Yield the members from the header at byte ``start`` on; return the offset of the block that ended them."""
    stream = io.BufferedReader(PositionedFile(file), _AHEAD_BYTES)
    stream.seek(start)
    at = start
    seen: dict[str, Member] = {}  # members from `start` on, by name
    before: dict[str, Member] | None = None  # members before `start`, once a link needs them
    try:
        with tarfile.open(fileobj=stream, mode="r:", encoding="utf-8", errors="backslashreplace") as archive:
            while (member := archive.next()) is not None:
                at = archive.offset
                archive.members.clear()  # type: ignore[attr-defined]  # the list would grow with every member
                if member.isdir() or member.type in _WITHOUT_DATA:
                    continue
                offset, size = member.offset_data, member.size
                if member.islnk():
                    before = {member[0]: member for member in _common_members(file)} if before is None else before
                    target = seen.get(member.linkname) or before.get(member.linkname)
                    if target is None:
                        raise _unreadable(file, member)
                    _, offset, size = target
                elif not member.isreg() or member.issparse():
                    raise _unreadable(file, member)
                seen[member.name] = _checked_member(file, member.name, offset, size)
                yield seen[member.name]
            return archive.offset
    except (tarfile.TarError, ValueError, OverflowError) as error:  # a damaged pax record raises any of these
        raise _broken(file, at, str(error), "a tar header") from error


_WITHOUT_DATA = (b"D", b"V")
"""Types of a GNU folder's list of names, and of a GNU volume's label."""
_REFUSED = {
    tarfile.SYMTYPE: ("symbolic link {0}, which has no data", "tar --dereference"),
    tarfile.LNKTYPE: ("hard link {0} to {1}, which is no earlier member", "tar --hard-dereference"),
    tarfile.GNUTYPE_SPARSE: ("sparse file {0}", "tar without --sparse"),
    b"M": ("rest of the file {0}, which began in another volume", "tar without --multi-volume"),
}
"""Types of members that are refused: what they are, and how to write the archive without them."""


def _unreadable(file: ShardFile, member: tarfile.TarInfo) -> SourceError:
    """Return the error for a member that is neither a plain file nor a hard link to one."""
    kind = tarfile.GNUTYPE_SPARSE if member.issparse() else member.type
    what, how = _REFUSED.get(kind, (f"member {{0}} of type {kind!r}", "tar, with files and folders alone"))
    return SourceError(
        f"{file.path}: got the {what.format(member.name, member.linkname)}, expected only plain files. Write the "
        f"archive with {how}"
    )


def _checked_member(file: ShardFile, name: str, offset: int, size: int) -> Member:
    """Return the member. Raises DamagedFile if its data would extend beyond the end of the file."""
    if not 0 <= size <= file.size - offset:
        got = f"only {max(0, file.size - offset)} bytes of member {name!r}, which has {size} bytes"
        raise _broken(file, offset, got, "the whole member")
    return name, offset, size


def _check_end(file: ShardFile, offset: int) -> None:
    """Raise SourceError unless the archive has zeros from byte ``offset`` to its end, at least one block of them."""
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
                f"{file.path}: got more data at byte {at} after the archive's end at byte {offset}, expected none. "
                "Join tar files with tar --concatenate, not with cat, or keep them separate"
            )


def _broken(file: ShardFile, offset: int, got: str, expected: str) -> DamagedFile:
    """Return the error for a tar file that is damaged at byte ``offset``."""
    return DamagedFile(
        f"{file.path}: at byte {offset}: got {got}, expected {expected}. The file is cut short, damaged or not a tar "
        "archive. Copy or write the file again"
    )
