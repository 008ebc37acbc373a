"""Packing with no network at all: the steps that a simulated run must serve, whatever happens to it.

Where weights and positions decide the order they are known beforehand (``reference``). Where arrival does, they follow
from the order that the log recorded, once the run is over (``packed``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from crc32c import crc32c
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from streampack.core.form.former import Former
from streampack.core.intake.overlong import apply_overlong, drop_some
from streampack.core.journal.log_records import BatchMarked, ChunkAdmitted, ChunkStaged, PartitionEnded
from streampack.core.merge.schedule import merge_of
from streampack.core.model.fields import Field
from streampack.core.model.keys.planning_keys import MediaLimits
from streampack.core.model.samples import I64, KEEPS, PACK, Keep, SampleTable
from streampack.core.model.steps import PlannedStep
from streampack.core.trees.shared_prefixes import cut_trees, fit_trees
from tests.simulation.data import BUDGET, Case, Id, Media, case
from tests.world.disk import Disk


@dataclass(frozen=True)
class Reference:
    """The steps of a case; ``rows[step][pack]`` are a pack's tokens [T], ``ids[step][pack]`` its samples; ``left``
    those of ``tail: drop``, ``rejected`` (stream, index) of those that are in no step.
    """

    steps: tuple[PlannedStep, ...]
    rows: tuple[NDArray[Any], ...]
    ids: tuple[tuple[list[Id], ...], ...]
    chain: bytes
    left: frozenset[Id]
    rejected: frozenset[tuple[int, int]]
    samples: Mapping[Id, NDArray[Any]]
    """The tokens of each."""
    shared: Mapping[Id, int]
    """How many of them each shares with the one before it in its pack."""
    values: Mapping[str, Mapping[Id, NDArray[Any]]]
    """The values of each by field, in a pack's order: those of axis ``token`` as they are beside its tokens."""
    follows: Mapping[Id, Id]
    """Of samples that are kept in one pack: which comes next there."""
    media: Mapping[Id, Media]
    """The media of each; empty in a run without media."""


class Packing:
    """A case being packed: ``enter`` its samples in any order that the merge allows, then ask for the ``steps``."""

    def __init__(self, this: Case) -> None:
        self.this, self.table, self.merge = this, SampleTable(), merge_of(this.rules)
        self._tokens: dict[int, NDArray[Any]] = {}
        self._values: dict[str, dict[Id, NDArray[Any]]] = {field.name: {} for field in this.rules.fields}
        self._expected: set[Id] = set()
        self._rejected: set[tuple[int, int]] = set()
        self._follows: dict[Id, Id] = {}
        self._media: dict[Id, Media] = {}
        self._kept_in_a_step: list[list[Id]] = []

    def place(self, stream: int, partition: int) -> int:
        """A partition's number in the merge."""
        return sum(each.partitions for each in self.this.rules.streams[:stream]) + partition

    def enter(
        self, stream: int, partition: int, base_seq: int, samples: list[NDArray[Any]],
        keep: Keep | UnsetType = UNSET, shared: I64 | None = None,
    ) -> None:  # fmt: skip
        """Samples of a partition from ``base_seq`` on, as they are pushed; a group if they are to ``keep`` together.

        ``shared``: tokens that each shares with the one before it, if they are a tree.
        """
        this, table = self.this, self.table
        lengths = np.array([len(sample) for sample in samples], np.int64)
        pieces = apply_overlong(lengths, BUDGET, this.overlong)
        media = list[Media]()
        if this.rules.media_fields:
            made = this.made(stream, partition)
            media = [this.media(stream, partition, made[sample.tobytes()]) for sample in samples]
            pieces = drop_some(pieces, _unfit_media(this, lengths, media, keep))
        partitions = this.rules.streams[stream].partitions
        handles = np.full(len(pieces.length), -1, np.int64)
        columns = (pieces.source.tolist(), pieces.offset.tolist(), pieces.length.tolist(), pieces.part.tolist())
        for i, (source, offset, length, part) in enumerate(zip(*columns, strict=True)):
            index = (base_seq + source) * partitions + partition
            if not length:
                self._rejected.add((stream, index))
                continue
            h = handles[i] = int(table.take(1)[0])
            whole = samples[source]
            self._tokens[h] = whole[offset : offset + length]
            table.stream[h], table.index[h], table.part[h] = stream, index, part
            table.length[h], table.loss_tokens[h] = length, length - 1
            table.crc[h] = crc32c(whole.tobytes())
            if media:
                self._enter_media(h, (stream, index, part), media[source])
            if this.rules.fields or media:
                seq = this.made(stream, partition)[whole.tobytes()]
                table.crc[h] = this.crc(stream, partition, seq)
                for field in this.rules.fields:
                    value = this.value(field, stream, partition, seq)
                    self._values[field.name][stream, index, part] = _piece(field, value, offset, length)
            elif this.is_staged:
                table.crc[h] = this.crc(stream, partition, this.made(stream, partition)[whole.tobytes()])
            assert (stream, index, part) not in self._expected, "conservation: a sample was admitted twice"
            self._expected.add((stream, index, part))
        kept = handles[handles >= 0]
        if keep and len(kept):
            table.keep[kept[:-1]] = KEEPS[keep]
            ids = self._identify(kept)
            if keep == "pack":
                self._follows |= dict(pairwise(ids))
            else:
                self._kept_in_a_step.append(ids)
        if shared is not None:
            tree = fit_trees(pieces.source, pieces.length, pieces.part, shared, None, None)
            if keep != "pack":
                most = this.rules.max_samples_per_pack
                tree = cut_trees(pieces.source, pieces.length, pieces.part, shared, BUDGET, most)
            table.put(kept, {"shared": tree.shared[handles >= 0]})
            joined = tree.joined[handles >= 0]
            table.keep[kept[joined]] = PACK
            ids = self._identify(kept)
            self._follows |= {ids[i]: ids[i + 1] for i in np.flatnonzero(joined).tolist()}
        self.merge.push(self.place(stream, partition), handles, pieces.length, pieces.part)

    def _enter_media(self, handle: int, one: Id, media: Media) -> None:
        table = self.table
        self._media[one], (items, patches) = media, media.counts
        columns = {"items": items, "patches": patches, "extra_bytes": len(media.data), "extra_cost": media.cost}
        table.put(np.array([handle]), {name: np.array([value]) for name, value in columns.items()})

    def steps(self) -> Reference:
        """Everything is entered; every sample is seen to be in exactly one place."""
        this, merge, former = self.this, self.merge, Former(self.this.rules, self.table)
        steps: list[PlannedStep] = []
        while not former.closed:
            taken = merge.take(1 << 40)
            former.admit(taken.handles, self.table.own_lengths(taken.handles))
            assert merge.closed or merge.between_passes, "a partition has not ended"
            former.closed = merge.closed or not former.too_few
            while (request := former.request()) is not None:
                steps += former.apply(request.choose())
            steps += former.cut()
            if merge.between_passes:
                merge.next_pass()
                former.closed = False
        assert former.finished
        ids = tuple(tuple(self._identify(pack.handles) for pack in step.packs) for step in steps)
        left = frozenset(self._identify(former.dropped))
        found = [one for packs in ids for pack in packs for one in pack] + list(left)
        found += self._identify(merge.drop())  # what a stream that stopped the rest has left
        assert len(found) == len(set(found)) == len(self._expected)
        assert set(found) == self._expected
        check_groups([pack for packs in ids for pack in packs], self._follows)
        of = {one: number for number, packs in enumerate(ids) for pack in packs for one in pack}
        for group in self._kept_in_a_step:
            assert len({of.get(one) for one in group}) == 1, f"groups: {group} is in several steps"
        samples = dict(zip(self._identify(np.array(list(self._tokens), np.int64)), self._tokens.values(), strict=True))
        rows = tuple(np.stack([self._row(this, pack.handles) for pack in step.packs]) for step in steps)
        shared = dict(zip(samples, self.table.shared[list(self._tokens)].tolist(), strict=True))
        return Reference(
            tuple(steps), rows, ids, former.chain, left, frozenset(self._rejected), samples, shared, self._values,
            self._follows, self._media,
        )  # fmt: skip

    def _identify(self, handles: I64) -> list[Id]:
        table = self.table
        return [(int(table.stream[h]), int(table.index[h]), int(table.part[h])) for h in handles]

    def _row(self, this: Case, handles: I64) -> NDArray[Any]:
        own = [self._tokens[h][int(self.table.shared[h]) :] for h in handles.tolist()]
        return row_of(this, own, this.rules.align.sample)


def _piece(field: Field, value: NDArray[Any], offset: int, length: int) -> NDArray[Any]:
    """The values of a piece of a sample in a pack; where a ``target`` field has no next token there is padding."""
    if field.axis == "sample":
        return value
    if field.align == "token":
        return value[offset : offset + length]
    shifted = np.full(length, field.pad, field.storage)
    shifted[:-1] = value[offset + 1 : offset + length]
    return shifted


def _unfit_media(this: Case, lengths: I64, media: list[Media], keep: Keep | UnsetType) -> NDArray[np.bool_]:
    """Samples of a chunk that are dropped for their media: those that no pack holds, and those that would be cut.

    If the samples are kept in one pack, none is left where all together are too much.
    """
    limits = this.rules.limits or MediaLimits()

    def is_over(items: int, patches: int) -> bool:
        return items > (limits.items or items) or patches > (limits.patches or patches)

    counts = [each.counts for each in media]
    if keep == "pack" and is_over(sum(items for items, _ in counts), sum(patches for _, patches in counts)):
        return np.ones(len(media), np.bool_)
    cut = (lengths > BUDGET).tolist()
    return np.array([items > 0 and (cut[i] or is_over(items, n)) for i, (items, n) in enumerate(counts)], np.bool_)


def check_groups(packs: list[list[Id]], follows: Mapping[Id, Id]) -> None:
    """In every pack each sample of a group is followed by the one that belongs behind it."""
    for pack in packs:
        after = dict(pairwise(pack))
        wrong = [one for one in pack if one in follows and after.get(one) != follows[one]]
        assert not wrong, f"groups: {wrong} are not followed in their pack by the rest of their groups"


def row_of(
    this: Case, samples: list[NDArray[Any]], align: int, field: Field | None = None
) -> NDArray[Any]:  # fmt: skip
    """The tokens or values of a field [T] of a pack of these samples, each padded to a multiple of ``align``."""
    row = np.zeros(BUDGET, this.dtype) if field is None else np.full(BUDGET, field.pad, field.storage)
    at = 0
    for sample in samples:
        row[at : at + len(sample)] = sample
        at += -(-len(sample) // align) * align
    return row


@lru_cache
def reference(number: int) -> Reference:
    """Case ``number``, whose order is known, packed."""
    this = case(number)
    packing = Packing(this)
    for stream, partitions in enumerate(s.partitions for s in this.rules.streams):
        for partition in range(partitions):
            count, place = len(this.lengths(stream, partition)), packing.place(stream, partition)
            for start in range(0, count, this.pass_samples):
                seqs = range(start, min(start + this.pass_samples, count))
                packing.enter(stream, partition, start, [this.tokens(stream, partition, seq) for seq in seqs])
                if this.rules.between_passes == "drain":
                    packing.merge.end_pass(place)
            packing.merge.end(place)
    return packing.steps()


def packed(this: Case, disk: Disk) -> Reference:
    """A case packed in the order that its log recorded, out of what the log holds or the sources give."""
    packing = Packing(this)
    for lsn in range(len(disk.records)):
        record, payload = disk.decode(lsn)
        if not isinstance(record, ChunkAdmitted | BatchMarked | PartitionEnded) or record.stream not in this.names:
            continue
        stream = this.names.index(record.stream)
        place = packing.place(stream, record.partition)
        if isinstance(record, BatchMarked):
            packing.merge.end_pass(place)
        elif isinstance(record, PartitionEnded):
            packing.merge.end(place)
        else:
            shared = np.frombuffer(record.shared_u32, "<u4").astype(np.int64) if record.shared_u32 else None
            samples = samples_of(this, record, payload)
            packing.enter(stream, record.partition, record.base_seq, samples, record.keep, shared)
            if record.pass_ended and this.rules.between_passes == "drain":
                packing.merge.end_pass(place)
    return packing.steps()


def samples_of(this: Case, record: ChunkAdmitted | ChunkStaged, payload: tuple[memoryview, ...]) -> list[NDArray[Any]]:
    """The tokens of a recorded chunk's samples: its payload's, or what the source gives; their checksums agree."""
    stream = this.names.index(record.stream)
    lengths = np.frombuffer(record.lengths_u32, "<u4").astype(np.int64)
    if record.stream in this.pushed:
        found = whole_rows(np.frombuffer(payload[0], this.dtype), lengths, record.shared_u32 or b"")
    else:
        seqs = range(record.base_seq, record.base_seq + len(lengths))
        found = [this.tokens(stream, record.partition, seq) for seq in seqs]
    assert [len(sample) for sample in found] == lengths.tolist()
    if "late_timeout" in record.rejected and this.rules.late_timeout_s:
        assert not lengths.any(), "a dropped sample has tokens"
        return found
    crcs = [int(crc32c(sample.tobytes())) for sample in found]
    if this.is_staged:
        crcs = _check_values(this, stream, record, found, payload)
    elif this.rules.media_fields:
        made = this.made(stream, record.partition)
        crcs = [this.sent_crc(stream, record.partition, made[sample.tobytes()]) for sample in found]
    if payload and this.rules.media_fields:
        made = this.made(stream, record.partition)
        frames = this.media_frames(stream, record.partition, [made[sample.tobytes()] for sample in found])
        assert tuple(map(bytes, payload[-2:])) == frames, "the log has the media of other samples"
    assert crcs == np.frombuffer(record.crcs_u32, "<u4").tolist()
    return found


def _check_values(
    this: Case, stream: int, record: ChunkAdmitted | ChunkStaged, found: list[NDArray[Any]], payload: tuple[Any, ...]
) -> list[int]:
    """Return the checksum that each sample of a recorded chunk must have; its values must be those of the sample."""
    staged = isinstance(record, ChunkStaged)
    fields = this.sent_fields if staged else this.rules.fields
    seqs = [this.made(stream, record.partition)[sample.tobytes()] for sample in found]
    for field, frame in zip(fields, payload[1 : len(payload) - 2 * bool(this.rules.media_fields)], strict=True):
        values = [
            this.value(field, stream, record.partition, seq) for seq, tokens in zip(seqs, found, strict=True)
            if len(tokens) or field.axis == "token"
        ]  # fmt: skip
        got = np.frombuffer(frame, field.storage)
        if field.axis == "sample":
            got = got[[len(tokens) > 0 for tokens in found]]
        assert got.tobytes() == b"".join(value.tobytes() for value in values), f"{field.name}: the value of another"
    crc = this.sent_crc if staged else this.crc
    given = np.frombuffer(record.crcs_u32, "<u4").tolist()
    return [
        crc(stream, record.partition, seq) if len(tokens) else given[at]
        for at, (seq, tokens) in enumerate(zip(seqs, found, strict=True))
    ]


def whole_rows(tokens: NDArray[Any], lengths: I64, shared_u32: bytes) -> list[NDArray[Any]]:
    """The samples of a chunk whose tokens are given, the shared ones of a tree once."""
    shared = np.frombuffer(shared_u32, "<u4").tolist() or [0] * len(lengths)
    found, at = list[NDArray[Any]](), 0
    for length, count in zip(lengths.tolist(), shared, strict=True):
        own = tokens[at : at + length - count]
        found.append(np.concatenate([found[-1][:count], own]) if count else own)
        at += length - count
    assert at == len(tokens)
    return found
