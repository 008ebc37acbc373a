"""Tar shards as webdataset writes them, read in any order.

Theory of operation. Consecutive members whose names agree up to the first dot of the file name are one sample. The
rest after that dot, in lower case, is the member's extension (https://github.com/webdataset/webdataset,
``base_plus_ext`` and ``group_by_keys`` in tariterators.py). Names without a dot, hidden files and ``__meta__`` names
are skipped, as webdataset does. So are members that macOS and Windows add, such as ``a/._b.txt`` beside ``a/b.txt``.
The log says once that members were skipped. One member of each sample is read: the settings name its extension.
Without settings, the first of .txt, .text, .npy, .json that the sample has is read. A .json member is a row.

A declared field is read from the member KEY.npy, else from the row, else from the sample's .json member.

A field of references names extensions, such as ``jpg`` or ``jpg;png``. Each member of the sample with one of them is an
item (``7.jpg``, ``7.0.jpg``, ``7.left.png``), in the order of names, numbers by their value. The reference has the path
or URL of the tar, and the offset and size of the member. It has no checksum, because the bytes are not read here.
Members of a compressed tar have no offsets in the file, so they are an error.

The package webdataset is not needed.
"""

import logging
import re
from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from streampack.core.media.references import Reference
from streampack.core.model.fields import LOSS_MASK, Field
from streampack.core.stats.sample_warnings import SEVERAL_KEYS
from streampack.errors import ConfigError, DamagedFile, SourceError
from streampack.sources.files.byte_source import Head, ShardFile
from streampack.sources.files.compressed import Decompressed
from streampack.sources.files.listing import find
from streampack.sources.formats.jsonl import missing_in, open_row
from streampack.sources.formats.npy import load_npy
from streampack.sources.formats.npy_shard import Members, NpyShard, given_dtype
from streampack.sources.formats.rows import MISSING, RowReader, ids_of, missing_from
from streampack.sources.formats.tar import members
from streampack.sources.formats.text import encode
from streampack.sources.records import DAMAGED, AnyShard, Format, Sample
from streampack.sources.row_keys import KNOWN
from streampack.sources.settings import SourceSettings
from streampack.sources.walk import one_shard_a_file
from streampack.tokenizers.base import Tokenizer
from streampack.tokenizers.token_ids import Encoded

Row: TypeAlias = dict[str, Any]
Load: TypeAlias = Callable[[bytes, Row], tuple[Encoded, Row] | str]
Beside: TypeAlias = dict[str, tuple[int, int]]  # extension to (byte offset, size) of a sample's other members

_SPLIT = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)$").match
_JUNK = re.compile(r"(?:.*/|)(?:\._[^/]*|\.DS_Store|Thumbs\.db|desktop\.ini|__MACOSX/.*)$").match
_META = re.compile(r"__[^/]*__($|/)").match
_NUMBER = re.compile(r"(\d+)")
_MISSING, _DUPLICATE, _DAMAGED = -1, -2, -3
_REASONS = {_DUPLICATE: "duplicate", _DAMAGED: DAMAGED}
_JSON = "json"
_SHOWN = 16
_log = logging.getLogger(__name__)
_said_skipped: list[str] = []
"""The file whose skipped members were logged; empty before."""
_NOTHING_BESIDE: Beside = {}


def open_format(settings: SourceSettings, tokenizer: Tokenizer) -> Format:
    """Open tar files: check the keys, list the files, and return how to open each as a shard."""
    _loads(msgspec.structs.replace(settings, fields={}), tokenizer, ())  # raises now for wrong keys

    def index(fields: Sequence[Field]) -> Callable[[ShardFile], AnyShard]:
        """Return a function that indexes an open file as a shard, for the ``fields`` of a run."""
        loads = _loads(settings, tokenizer, fields)
        reader = RowReader(settings, tokenizer, fields)
        return lambda file: TarShard(file, loads, reader).as_arrays()

    return one_shard_a_file(find(settings.shards, settings.path), index, from_start=True)


class TarShard:
    """A shard of one tar file; its index takes 17 bytes and a key per sample, and more per member of a field."""

    blocks = ()

    def __init__(self, file: ShardFile, loads: dict[str, Load], reader: RowReader) -> None:
        self._file = file
        self._arrays = [suffix.rpartition(".")[2] == "npy" for suffix in loads]
        self._loads = list(loads.values())
        self._fields = reader.fields
        named = [key for _, key in (*self._fields.keys, *self._fields.media_keys)]
        keys = [key for key in KNOWN if key in reader.fields.known.names]
        self._known = {f"{key}.npy": key for key in keys}
        """Known keys by the extensions of their members."""
        self._decode = open_row((*named, *keys))
        self._keys: list[str] = []
        self._offsets, self._sizes, self._ranks = array("q"), array("q"), array("b")
        self._members: list[Beside] = []
        wanted = {f"{key}.npy".lower() for key in named}
        self._has_fields = bool(named)
        self._endings = {key: _endings(key) for key in sorted(self._fields.reference_keys)}
        """Endings of the members that a key of references stands for."""
        self._images = reader.images
        if self._images is not None:
            self._endings[self._images.keys[0]] = _endings(self._images.endings)
        self._ambiguous = set[int]()
        """Samples with several members that may hold them."""
        self._damage = ""
        self._skipped: list[str] = []
        self._unread: dict[str, None] = {}
        """Some of the extensions that are not read, for messages."""
        try:
            self._index({suffix: rank for rank, suffix in enumerate(loads)}, {*wanted, *self._known, _JSON})
        except DamagedFile as error:
            self._end_at_damage(error)
        _warn_of_skipped(file.path, self._skipped)

    def _index(self, ranks: dict[str, int], wanted: set[str]) -> None:
        """Build the index from the tar's members.

        ``ranks``: extension to rank; the sample is the member with the lowest rank. ``wanted``: extensions of members
        that hold fields. Raises DamagedFile.
        """
        seen: set[str] = set()
        key_now: str | None = None
        endings = tuple(chain.from_iterable(self._endings.values()))
        holders = ranks.keys() - {_JSON}
        whole = self._file.whole if isinstance(self._file, Head) else self._file
        is_compressed = isinstance(whole, Decompressed)  # then members have other places in the file on the disk
        for name, offset, size in members(self._file):
            split = None if _JUNK(name) or _META(name) else _SPLIT(name)
            if split is None:
                self._skipped.append(name)
                continue
            key, suffix = split[1], split[2].lower()
            if key != key_now:
                key_now = key
                seen.clear()
                self._add_sample(key)
            rank = ranks.get(suffix, _MISSING)
            if rank == _MISSING and len(self._unread) < _SHOWN:
                self._unread[suffix] = None
            if suffix in holders and not holders.isdisjoint(seen - {suffix}):
                self._ambiguous.add(len(self._keys) - 1)
            if suffix in seen:
                self._ranks[-1] = _DUPLICATE
            elif rank != _MISSING and (self._ranks[-1] == _MISSING or 0 <= rank < self._ranks[-1]):
                self._offsets[-1], self._sizes[-1], self._ranks[-1] = offset, size, rank
            is_item = bool(endings) and f".{suffix}".endswith(endings)
            if is_item and is_compressed:
                raise SourceError(
                    f"{self._file.path}: got the member {name} of a compressed tar, expected an uncompressed tar, "
                    "because a reference is a range of bytes of the file. Decompress the shards"
                )
            if is_item or suffix in wanted:
                self._members[-1] = {**self._members[-1], suffix: (offset, size)}
            seen.add(suffix)

    def _end_at_damage(self, error: DamagedFile) -> None:
        """Keep the samples before the damage, and add one rejected sample for the rest. Raises if there are none."""
        if not self._keys:
            raise error
        self._damage = str(error)
        if self._has_fields or any(self._known.keys() & beside.keys() for beside in self._members):
            self._ranks[-1] = _DAMAGED  # some of its members may follow the damage
        else:
            self._add_sample("")
            self._ranks[-1] = _DAMAGED

    def _add_sample(self, key: str) -> None:
        """Append a sample without members to the index."""
        if self._members and self._members[-1] == {_JSON: (self._offsets[-1], self._sizes[-1])}:
            self._members[-1] = _NOTHING_BESIDE  # the sample itself
        self._keys.append(key)
        self._offsets.append(0)
        self._sizes.append(0)
        self._ranks.append(_MISSING)
        self._members.append(_NOTHING_BESIDE)

    def as_arrays(self) -> AnyShard:
        """Return an NpyShard over this shard if its samples and fields are .npy members; else the shard itself."""
        sizes, offsets = np.array(self._sizes, np.int64), np.array(self._offsets, np.int64)
        good = np.flatnonzero(np.array(self._ranks) >= 0)
        if not len(good) or not all(rank < 0 or self._arrays[rank] for rank in set(self._ranks)):
            return self
        sizes[np.array(self._ranks) < 0] = -1
        ids, fields = Members(self._file, sizes, offsets), dict[Field, Members]()
        if ids.dtype(int(good[0])) is None or (self._fields.media_keys and self._has_media()):
            return self
        if self._ambiguous or any(beside.keys() & {_JSON, *self._known} for beside in self._members if beside):
            return self  # known keys are applied sample by sample
        for field, key in self._fields.keys:
            places = [beside.get(f"{key}.npy".lower(), (0, -1)) for beside in self._members]
            members = Members(self._file, *np.array(places, np.int64).T[::-1])
            missing = members.sizes[good] < 0
            if field.name == LOSS_MASK and self._fields.needs_mask and missing.any():
                return self
            if missing.all():
                continue
            if (
                field.axis == "sample"
                or field.shape
                or missing.any()
                or members.dtype(int(good[0])) != given_dtype(field)
            ):
                return self
            fields[field] = members
        return NpyShard(ids, fields, self.load, self.where)

    def _has_media(self) -> bool:
        """Return whether samples may have media: members beside those of their fields by token or sample."""
        others = {f"{key}.npy".lower() for _, key in self._fields.keys}
        return any(not others.issuperset(beside) for beside in self._members)

    def __len__(self) -> int:
        return len(self._keys)

    def load(self, sample: int) -> Sample | str:
        """Read one sample from its members, or return the reason why it is rejected."""
        rank = self._ranks[sample]
        if rank == _MISSING:
            return missing_from(self._unread, "other members in its file:")
        if rank < 0:
            return _REASONS[rank]
        beside = self._members[sample]
        images = self._references(beside, self._images.keys[0]) if self._images is not None else []
        listed: Row = {self._images.keys[0]: images} if self._images is not None and images else {}
        member = self._loads[rank](self._file.pread(self._sizes[sample], self._offsets[sample]), listed)
        if isinstance(member, str):
            return member
        encoded, row = member
        if sample in self._ambiguous:
            encoded = encoded._replace(warnings=(*encoded.warnings, SEVERAL_KEYS))
        whole = self._with_members(sample, row) if self._has_fields or self._members[sample] else row
        return whole if isinstance(whole, str) else self._fields.add(encoded, whole)

    def _with_members(self, sample: int, row: Row) -> Row | str:
        """Return the row, extended by fields from other members, or the reason why media cannot be read.

        The value of a field of another axis is a reason (str) if it cannot be read.
        """
        beside = self._members[sample]
        other: Row | str = {}
        if _JSON in beside:
            offset, size = beside[_JSON]
            other = self._decode(self._file.pread(size, offset))
        values: Row = {key: other for _, key in self._fields.keys} if isinstance(other, str) else other
        values = {**values, **row}
        for suffix in self._known.keys() & beside.keys():
            values[self._known[suffix]] = array = self._array(beside[suffix])
            if isinstance(array, str):
                return f"{self._known[suffix]}: {array}"
        for _, key in self._fields.keys:
            if place := beside.get(f"{key}.npy".lower()):
                values[key] = self._array(place)
        for name, key in self._fields.media_keys:
            if references := self._references(beside, key):
                values[key] = references
            elif place := beside.get(f"{key}.npy".lower()):
                values[key] = array = self._array(place)
                if isinstance(array, str):
                    return f"{name}: {array}"
            elif isinstance(other, str) and key not in row:
                return f"{name}: {other}"
        return values

    def _array(self, place: tuple[int, int]) -> NDArray[Any] | str:
        """Return the array of the .npy member at (byte offset, size), or the reason why it cannot be read."""
        return load_npy(self._file.pread(place[1], place[0]))

    def _references(self, beside: Beside, key: str) -> list[Reference]:
        """Return the references to a sample's members that the key of a field stands for, in the order of names."""
        endings = self._endings.get(key, ())
        names = sorted((name for name in beside if f".{name}".endswith(endings)), key=_in_order)
        return [Reference(self._file.location, *beside[name]) for name in names]

    def where(self, sample: int) -> str:
        """Return the file and key of a sample, for messages; for a damaged sample, the text of the error."""
        return self._damage if self._ranks[sample] == _DAMAGED else f"{self._file.name}:{self._keys[sample]}"


def _warn_of_skipped(path: str, names: list[str]) -> None:
    """Log the members of a tar that make no sample, the first time that a process finds some."""
    if names and not _said_skipped:
        _said_skipped.append(path)
        mac = ". macOS adds them; tar leaves them out with COPYFILE_DISABLE=1" if "._" in names[0] else ""
        _log.warning(
            "%s: skipped %d members whose names make no sample, such as %s%s. Other files are not named",
            path, len(names), names[0], mac,
        )  # fmt: skip


def _endings(key: str) -> tuple[str, ...]:
    """Return the endings that the key of a field of references stands for.

    >>> _endings("jpg;.PNG")
    ('.jpg', '.png')
    """
    words = (word.strip().removeprefix(".").lower() for word in key.split(";"))
    return tuple(f".{word}" for word in words if word)


def _in_order(name: str) -> list[str | int]:
    """Return what a name is sorted by: its texts, and its numbers by their value.

    >>> sorted(["10.jpg", "9.jpg"], key=_in_order)
    ['9.jpg', '10.jpg']
    """
    return [int(part) if place % 2 else part for place, part in enumerate(_NUMBER.split(name))]


def _loads(settings: SourceSettings, tokenizer: Tokenizer, fields: Sequence[Field]) -> dict[str, Load]:
    """Return the functions that read a member, by its extension; the first extension that a sample has is read.

    A function takes the member and the sample's images by their key.
    """

    def text(raw: bytes, images: Row) -> tuple[Encoded, Row] | str:
        """Read a text member; the row is empty."""
        encoded = encode(raw, tokenizer)
        return encoded if isinstance(encoded, str) else (encoded, {})

    def npy(raw: bytes, images: Row) -> tuple[Encoded, Row] | str:
        """Read a .npy member of token ids; the row is empty."""
        values = load_npy(raw)
        ids = values if isinstance(values, str) else ids_of(values)
        return ids if isinstance(ids, str) else (Encoded(ids, given=True), {})

    def row(text_key: str | None = None, tokens_key: str | None = None) -> Load:
        """Return a function that reads a .json member, whose sample is under the given key."""
        of_row = msgspec.structs.replace(settings, text_key=text_key, tokens_key=tokens_key)
        reader = RowReader(of_row, tokenizer, fields)
        decode = open_row(tuple(reader.keys))

        def load(raw: bytes, images: Row) -> tuple[Encoded, Row] | str:
            """Read a .json member to ids and its row, or return a reason. ``images``: members, by their key."""
            decoded = decode(raw)
            encoded = decoded if isinstance(decoded, str) else reader.encode({**decoded, **images})
            if encoded == MISSING:
                return missing_in(raw)
            return encoded if isinstance(encoded, str) else (encoded, decoded)  # type: ignore[return-value]

        return load

    if settings.messages_key is not None or settings.prompt_key is not None or settings.completion_key is not None:
        return {_JSON: row()}
    if settings.text_key is None and settings.tokens_key is None:
        return {"npy": npy, "txt": text, "text": text, _JSON: row()}
    key = settings.text_key if settings.text_key is not None else settings.tokens_key or ""
    suffix, _, inner = key.partition("/")
    suffix = suffix.removeprefix(".").lower()
    last = suffix.rpartition(".")[2]
    if settings.text_key is not None and last == _JSON:
        return {suffix: row(text_key=inner or "text")}
    if settings.text_key is not None and suffix and not inner:
        return {suffix: text}
    if settings.text_key is None and last == _JSON:
        return {suffix: row(tokens_key=inner or "tokens")}
    if settings.text_key is None and last == "npy" and not inner:
        return {suffix: npy}
    raise ConfigError(
        f"text_key, tokens_key: got {settings.text_key!r}, {settings.tokens_key!r}, expected file extensions. In tar "
        "files, text is under 'txt' or 'json/KEY', and tokens are under 'npy' or 'json/KEY'"
    )
