"""What a simulated run reads: cases, and sources as functions of (stream, partition, seq).

``Case`` n is one of a few small jobs that between them use packers of each kind, every over-long policy, tail, shape
and order of merging.
Streams are read, as often as need be, or pushed once by programs that keep nothing; those say where batches end, and
which samples are a group.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import pairwise
from math import lcm
from typing import Any, NamedTuple

import msgspec
import numpy as np
from crc32c import crc32c
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from streampack.core.layout.step_frames import EDGES, INPUT_IDS, frames_for
from streampack.core.media.media_counts import MediaColumns
from streampack.core.media.media_format import check, encode
from streampack.core.model.fields import MEDIA, Field
from streampack.core.model.keys.planning_keys import Balance, MediaLimits
from streampack.core.model.keys.stream_keys import OnExhaust, Overlong, Poison
from streampack.core.model.mesh import DynamicCp, Mesh
from streampack.core.model.rules import Align, Batch, Rules, StreamRules
from streampack.core.model.samples import I64, Keep
from streampack.core.model.shapes import Shape, Sizes
from streampack.core.packers.registry import PackerName
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.step_part import StepPart

FIRST_ARRIVAL, FIRST_PUSHED, FIRST_BATCH, FIRST_READ_BATCH, FIRST_PADDED, NUM_CASES = 8, 10, 12, 14, 16, 18
WIDE = (NUM_CASES, NUM_CASES + 1)
"""Cases for meshes with eight data-parallel ranks, which no seed has of itself."""
"""Cases from the first on are merged in the order of arrival, from the second on pushed, that before the third in part.
Then steps are batches: of pushed samples, so many or up to marks, then of samples that are read, at last padded."""
MEDIA_CASES = range(30, 36)
"""Cases whose samples have media, which no seed has of itself: those of ``_MEDIA_BASES``, each with media."""
_MEDIA_BASES = (0, 5, 10, 11, 14, 13)
"""They are read by schedule (the first also cuts samples), pushed (the third and fourth), and batches. Every second one
has the same dtype of tokens.
"""
MEDIA_FIELDS = (
    Field(name="grid", dtype="int32", axis="item"),
    Field(name="image", dtype="reference", axis="item"),
    Field(name="pixels", dtype="uint8", axis="patch", shape=(4,)),
)
MEDIA_LIMITS = MediaLimits(patches=12, items=6)
MEDIA_BALANCE = Balance(a=10, patches=(40, 2), items=100)
MAX_MEDIA = 320
"""Bytes that the media of a sample stay below."""
TREES = (10, 12)
"""Cases of pushed samples that share their first tokens: one packs a stream of samples, one batches."""
BATCH = 13
"""Samples of a partition between two ends of batches."""
BUDGET = 64
MAX_SAMPLE = 128
_PACKERS: tuple[PackerName, ...] = ("exact_fill", "sliding_ffd", "first_fit_decreasing", "concatenative")
_JOINT = {7: Balance(kind="joint", group=2, patience=3), 8: Balance(kind="joint", group=4, patience=2)}
"""Cases whose packs are formed in groups: one with drained passes and alignment, one in order of arrival."""
_OVERLONG: tuple[Overlong, ...] = ("truncate", "split", "drop", "error")
_POISON: tuple[Poison, ...] = ("error", "drop")
_SHAPES: dict[int, Shape] = {
    1: "exact", 3: Sizes(multiple=16), 6: Sizes(buckets=(8, 24)), 8: "exact", 13: "exact", 15: Sizes(multiple=16),
}  # fmt: skip
_BATCHES = {
    12: Batch(samples=7), 13: Batch(min_samples=30, micro_batch_multiple=2), 14: Batch(samples=17, min_micro_batches=3),
    15: Batch(samples=11), 16: Batch(samples=19), 17: Batch(samples=10, micro_batch_multiple=2),
}  # fmt: skip

Id = tuple[int, int, int]
"""(stream, index, part)."""


class Media(NamedTuple):
    """The media of one sample: its bytes, as they are sent, and the patches of each item."""

    data: bytes = b""
    patches: tuple[int, ...] = ()

    @property
    def counts(self) -> tuple[int, int]:
        """Its items and its patches."""
        return len(self.patches), sum(self.patches)

    @property
    def cost(self) -> int:
        """Return the cost of the sample's media for a rank, by ``MEDIA_BALANCE``."""
        a, b, c = MEDIA_BALANCE.media_factors
        return sum(a * patches + b * patches * patches + c for patches in self.patches)


@dataclass(frozen=True, eq=False)
class Case:
    """One job: rules, sources' sizes ``counts[stream][partition]``, and the mesh that reads it."""

    number: int
    rules: Rules
    counts: tuple[tuple[int, ...], ...]
    dp: int
    cp: int
    steps_ahead: int
    pass_samples: int
    """Of a partition in one pass: what its producer says."""
    layout: str = "zigzag"
    """The layout of the feed; with dynamic context parallelism groups of the dp x cp ranks share packs."""

    @property
    def names(self) -> list[str]:
        return [stream.name for stream in self.rules.streams]

    @property
    def pushed(self) -> list[str]:
        """Streams whose samples exist once."""
        return [stream.name for stream in self.rules.streams if stream.pushed]

    @property
    def batch(self) -> int:
        """Samples of a pushed partition in a batch; the case that also reads has one batch."""
        return 1 << 30 if self.number == FIRST_BATCH - 1 else BATCH

    @property
    def dtype(self) -> str:
        """Of a token."""
        return self.rules.tokens

    @property
    def overlong(self) -> Overlong:
        """Of every stream."""
        return self.rules.streams[0].overlong

    @property
    def meshes(self) -> list[tuple[int, int]]:
        """(dp, cp) that may read it."""
        if self.dynamic is not None:
            return [(2, 2), (1, 4), (4, 1), (4, 2), (3, 2)]
        dps = (1, 2, 4, 8) if self.number in WIDE else (1, 2, 4)
        return [(dp, cp) for dp in dps for cp in (1, 2)[: self.cp]]

    @property
    def dynamic(self) -> DynamicCp | None:
        """The settings of dynamic context parallelism."""
        return DynamicCp.of(self.layout)

    def widths(self, counts: list[int], lengths: list[int]) -> list[int]:
        """Tokens of packs with so many samples each: the first length of the shape that holds them."""
        shape, align = self.rules.shape, self.rules.align
        sizes = [BUDGET] if shape == "fixed" else [*range(align.pack, BUDGET + 1, align.pack)]
        if isinstance(shape, Sizes):
            sizes = [*shape.buckets, BUDGET] if shape.buckets else [n for n in sizes if n % (shape.multiple or 1) == 0]
        ends = np.cumsum([0, *counts]).tolist()
        held = [sum(-(-n // align.sample) * align.sample for n in lengths[a:b]) for a, b in pairwise(ends)]
        return [next(size for size in sizes if size >= tokens) for tokens in held]

    def keep(self, stream: int, partition: int, start: int, stop: int) -> Keep | UnsetType:
        """What samples that are pushed as one are kept in: a pack, where one holds them, or a step, where it can be."""
        lengths, align = self.lengths(stream, partition)[start:stop], self.rules.align.sample
        slots = -(-lengths // align) * align
        if start % 3 < 2 and stop > start + 1 and slots.sum() <= BUDGET:
            return "pack"
        return "step" if start % 3 and self.rules.batch is not None else UNSET

    @lru_cache  # noqa: B019 - cases live as long as the tests
    def lengths(self, stream: int, partition: int) -> I64:
        """Tokens of each sample of a partition; 0 is one that its source rejects."""
        draw = np.random.default_rng([self.number, stream, partition])
        count = self.counts[stream][partition]
        lengths = np.minimum(draw.geometric(1 / 16, count), BUDGET).astype(np.int64)
        lengths[draw.random(count) < 0.05] = BUDGET
        if self.overlong != "error":
            lengths[draw.random(count) < 0.06] = draw.integers(BUDGET + 1, MAX_SAMPLE)
        if self.number % 2:
            lengths[draw.random(count) < 0.05] = 0
        return lengths

    @lru_cache  # noqa: B019
    def offsets(self, stream: int, partition: int) -> list[int]:
        """Tokens of a partition before each sample, and at last all of them."""
        return [0, *np.cumsum(self.lengths(stream, partition)).tolist()]

    @lru_cache  # noqa: B019
    def media(self, stream: int, partition: int, seq: int) -> Media:
        """The media of one sample. Some samples have none, and some exceed a limit of packs alone."""
        fields = self.rules.media_fields
        if not fields or not self.lengths(stream, partition)[seq]:
            return Media()
        draw = np.random.default_rng([self.number, stream, partition, seq])
        if draw.random() < 0.4:
            return Media()
        patches = draw.integers(0, 5, int(draw.integers(1, 4)))
        if draw.random() < 0.08:
            patches[0] += MEDIA_LIMITS.patches or 0
        values: dict[str, NDArray[Any]] = {
            "grid": draw.integers(1, 1 << 30, len(patches)), "image": np.empty(len(patches), object),
            "pixels": draw.integers(0, 256, (int(patches.sum()), 4), np.uint8),
        }  # fmt: skip
        values["image"][:] = [draw.bytes(4 * int(draw.integers(1, 5))) for _ in patches]
        return Media(encode(fields, patches, values), tuple(patches.tolist()))

    def media_frames(self, stream: int, partition: int, seqs: Iterable[int]) -> tuple[bytes, ...]:
        """The payload frames with the media of some samples; none in a run without media."""
        if not self.rules.media_fields:
            return ()
        media = [self.media(stream, partition, seq) for seq in seqs]
        counts = np.array([(len(each.patches), len(each.data)) for each in media], "<u4")
        return counts.tobytes(), b"".join(each.data for each in media)

    @lru_cache  # noqa: B019
    def byte_offsets(self, stream: int, partition: int) -> list[int]:
        """Bytes of a partition before each sample, as credit counts them, and at last all of them."""
        media = [len(self.media(stream, partition, seq).data) for seq in range(self.counts[stream][partition])]
        sizes = self.token_bytes * self.lengths(stream, partition) + np.array(media, np.int64)
        return [0, *np.cumsum(sizes).tolist()]

    @property
    def chunk_bytes(self) -> int:
        """The most bytes of a chunk: those of any sample."""
        return MAX_SAMPLE * self.token_bytes + (MAX_MEDIA if self.rules.media_fields else 0)

    def tokens(self, stream: int, partition: int, seq: int) -> NDArray[Any]:
        """The tokens of one sample, never 0. Where samples may share tokens, neighbors begin alike."""
        length = int(self.lengths(stream, partition)[seq])
        first, places = stream * 7919 + partition * 104_729 + seq * 31, np.arange(length)
        found = (first + places * (1 + seq % 7)) % 60_000 + 1
        if self.rules.share:
            alike = min(seq * 7 % 5 * 8, length - 1)
            found = np.where(places < alike, (partition + seq // 8 + places) % 50 + 1, found)
        return found.astype(self.dtype)

    @cache  # noqa: B019
    def value(self, field: Field, stream: int, partition: int, seq: int) -> NDArray[Any]:
        """The value of a field of one sample as it is stored: [tokens], or [1] for axis ``sample``."""
        size = int(self.lengths(stream, partition)[seq]) if field.axis == "token" else 1
        draw = np.random.default_rng([len(field.name), self.number, stream, partition, seq])
        return draw.normal(size=size).astype(field.storage)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token, with the values of all fields of axis ``token``."""
        fields = sum(field.value_bytes for field in self.rules.fields if field.axis == "token")
        return np.dtype(self.dtype).itemsize + fields

    @property
    def sent_fields(self) -> list[Field]:
        """Fields whose values come with the samples."""
        return [field for field in self.rules.fields if not field.late]

    @property
    def late_fields(self) -> list[Field]:
        """Fields whose values come later."""
        return [field for field in self.rules.fields if field.late]

    @property
    def is_staged(self) -> bool:
        """True if pushed samples wait in the log before they are admitted."""
        return self.rules.paces or bool(self.late_fields)

    def sent_crc(self, stream: int, partition: int, seq: int) -> int:
        """The checksum with which a sample is sent."""
        crc = int(crc32c(self.tokens(stream, partition, seq).tobytes()))
        for field in self.sent_fields:
            crc = int(crc32c(self.value(field, stream, partition, seq).tobytes(), crc))
        for frame in self.media_frames(stream, partition, [seq]):
            crc = int(crc32c(frame, crc))
        return crc

    def crc(self, stream: int, partition: int, seq: int) -> int:
        """The checksum of a sample that has all its late values."""
        crc = self.sent_crc(stream, partition, seq)
        if not self.is_staged:
            return crc
        late = [crc32c(self.value(field, stream, partition, seq).tobytes()) for field in self.late_fields]
        return zlib.crc32(np.array(late, "<u4").tobytes(), crc)

    @lru_cache  # noqa: B019
    def made(self, stream: int, partition: int) -> dict[bytes, int]:
        """The number of each sample of a partition, by its tokens; of samples without tokens the last one."""
        count = len(self.lengths(stream, partition))
        return {self.tokens(stream, partition, seq).tobytes(): seq for seq in range(count)}

    def shared(self, samples: list[NDArray[Any]]) -> I64:
        """Tokens that each sample shares with the one before it; the last one of each is its own."""
        found = np.zeros(len(samples), np.int64)
        for i, (one, other) in enumerate(pairwise(samples), 1):
            size = min(len(one), len(other))
            differ = np.flatnonzero(one[:size] != other[:size])
            found[i] = max(min(int(differ[0]) if len(differ) else size, len(other) - 1), 0)
        return found


def beside(number: int, steps: int) -> int:
    """The case of another feed of the run: one of the same dtype, ``2 * steps`` cases behind case ``number``."""
    cases = MEDIA_CASES if number in MEDIA_CASES else range(NUM_CASES)
    return cases[(number - cases.start + 2 * steps) % len(cases)]


@lru_cache
def case(number: int, prefix: str = "") -> Case:
    """Case ``number``; its streams' names begin with ``prefix``."""
    if number in MEDIA_CASES:
        return with_media(case(_MEDIA_BASES[MEDIA_CASES.index(number)], prefix))
    draw = np.random.default_rng([20, number])
    cp = 1 + number % 2
    counts = tuple(
        tuple(int(n) for n in draw.integers(20, 90, int(draw.integers(1, 4)))) for _ in range(1 + number % 3)
    )
    pushed = FIRST_PUSHED <= number < FIRST_READ_BATCH
    arrival = FIRST_ARRIVAL <= number < FIRST_READ_BATCH
    overlong, poison = _OVERLONG[(number + number // 4) % 4], _POISON[number % 2]
    exhaust: tuple[OnExhaust, ...] = ("renormalise", "stop" if number == 4 else "renormalise", "renormalise")
    streams = tuple(
        StreamRules(
            f"{prefix}s{s}", float(draw.integers(1, 5)), len(sizes), 1, overlong=overlong, poison=poison,
            on_exhaust=exhaust[s], pushed=pushed and (s > 0 or number != FIRST_BATCH - 1),
        )
        for s, sizes in enumerate(counts)
    )  # fmt: skip
    rules = Rules(
        budget=BUDGET, packs=8 if number in WIDE else 4, window=int(draw.integers(8, 17)), in_turn=number % 3 == 1,
        packer="exact_fill" if number in _JOINT else _PACKERS[number % 4], balance=_JOINT.get(number, Balance()),
        align=Align(2 * cp, 2 * cp) if cp > 1 else Align(), tokens="int32" if number % 2 else "uint16",
        tail="drop" if number in (5, 9, 15, 17) else "pad",
        between_passes="drain" if number in (5, 7, 15) else "continue", batch=_BATCHES.get(number),
        weight_unit="samples" if number in (2, 5) else "tokens", seed=number, streams=streams,
        merge="arrival" if arrival else "schedule", shape=_SHAPES.get(number, "fixed"),
        share="prefix" if number in TREES else None,
    )  # fmt: skip
    if FIRST_PADDED <= number < NUM_CASES:
        alone = {"packer": "none", "micro_batch_size": 1, "shape": "exact", "window": Rules().window}
        rules = msgspec.structs.replace(rules, padded=True, **alone)
    return Case(
        number, rules, counts, dp=8 if number in WIDE else (1, 2, 4)[number % 3], cp=cp,
        steps_ahead=int(draw.integers(2, 9)), pass_samples=23,
    )  # fmt: skip


def with_media(base: Case) -> Case:
    """A case whose samples have media. In the fifth case packs have no limits, in the others they have."""
    rules: dict[str, Any] = {"media_fields": MEDIA_FIELDS, "balance": MEDIA_BALANCE, "share": None}
    if base.number != FIRST_READ_BATCH:
        rules |= {"packer": "exact_fill", "limits": MEDIA_LIMITS}
    if base.pushed:  # so that a group over a limit may be pushed, and is dropped
        streams = base.rules.streams
        rules["streams"] = tuple(msgspec.structs.replace(stream, overlong="drop") for stream in streams)
    return replace(base, rules=msgspec.structs.replace(base.rules, **rules))


def with_groups(base: Case) -> Case:
    """The case with dynamic context parallelism: a rank has room for a quarter of the longest sample."""
    dynamic = DynamicCp(rank_tokens=BUDGET // 4, max_group=4, node=0.05, across=0.2, node_ranks=2)
    return replace(base, layout=dynamic.layout, dp=2, cp=2)


def _groups_of(part: StepPart, this: Case, mesh: Mesh, counts: list[int], lengths: list[int]) -> list[_Cut]:
    """How each pack of a rank's message is cut, by its group."""
    dynamic, align, rank = this.dynamic, this.rules.align, mesh.dp_cp_rank
    if dynamic is None:
        widths, aligns = this.widths(counts, lengths), [align.sample] * len(counts)
        assert part.widths_u32 == (b"" if this.rules.shape == "fixed" else np.array(widths, "<u4").tobytes())
        return [_Cut(width, unit, mesh.cp, mesh.cp_rank) for width, unit in zip(widths, aligns, strict=True)]
    found, at = [], 0
    columns = (part.group_firsts_u32 or b"", part.group_sizes_u32 or b"", part.widths_u32)
    for count, first, size, width in zip(counts, *(np.frombuffer(c, "<u4").tolist() for c in columns), strict=True):
        assert 0 <= rank - first < size <= dynamic.max_group, "a rank is in a group of others"
        assert size in (1, 2, 4)
        assert first % size == 0
        unit = lcm(align.sample, 2 * size) if size > 1 else align.sample
        tokens = sum(-(-length // unit) * unit for length in lengths[at : at + count])
        block = lcm(2, align.pack)
        exact = max(-(-tokens // (size * block)), 1) * block
        own = dynamic.rank_tokens if this.rules.shape == "fixed" else exact
        assert width == size * own
        assert tokens <= width <= size * dynamic.rank_tokens, "a rank has more tokens than fit"
        found.append(_Cut(width, unit, size, rank - first))
        at += count
    return found


class _Cut(NamedTuple):
    """A pack of ``width`` tokens, with samples padded to ``align``, that ``size`` ranks share, and one of them."""

    width: int
    align: int
    size: int
    rank: int


@dataclass(frozen=True)
class Shard:
    """What one rank got of one pack of T tokens, ``width``: tokens [T / cp] that lie at ``positions`` of the whole
    pack, whose samples are padded to multiples of ``align``. A middle stage of a pipeline gets no tokens.
    """

    number: int
    ids: list[Id]
    num_loss_tokens: int
    tokens: NDArray[Any] | None
    positions: I64
    width: int
    align: int
    values: dict[str, NDArray[Any]]
    """Each field: [T / cp] at ``positions``, or one for each sample."""
    media: list[bytes] | None
    """The media of each sample; None for a stage of a pipeline that gets none."""


def shards_of(parts: tuple[Envelope, ...], this: Case, mesh: Mesh) -> list[Shard]:
    """The shards in a delivered step, by micro-batch; positions are derived here and not by ``core.layout``."""
    shards: list[Shard] = []
    for envelope in parts:
        part = envelope.message
        assert isinstance(part, StepPart)
        assert len(shards) == part.first
        ids = list(zip(*(np.frombuffer(column, kind).tolist() for column, kind in (
            (part.streams_u32, "<u4"), (part.indices_u64, "<u8"), (part.parts_u32, "<u4"))), strict=True))  # fmt: skip
        shared = np.frombuffer(part.shared_u32, "<u4") if part.shared_u32 else 0
        lengths = (np.frombuffer(part.lengths_u32, "<u4").astype(np.int64) - shared).tolist()
        numbers = np.frombuffer(part.packs_u32, "<u4").tolist()
        loss = np.frombuffer(part.loss_tokens_u32, "<u4").tolist()
        counts = np.frombuffer(part.counts_u32, "<u4").tolist()
        if this.rules.padded:
            widths, aligns = (np.frombuffer(column, "<u4").tolist() for column in (part.widths_u32, part.rows_u32))
            assert all(t <= BUDGET and t // s - n in (0, 1) for t, s, n in zip(widths, aligns, counts, strict=True))
            packs = [_Cut(width, align, mesh.cp, mesh.cp_rank) for width, align in zip(widths, aligns, strict=True)]
        else:
            packs = _groups_of(part, this, mesh, counts, lengths)
        rows: list[Any] = [None] * len(counts)
        cuts = np.cumsum([pack.width // pack.size for pack in packs])[:-1]
        values: list[dict[str, Any]] = [{} for _ in counts]
        media: list[bytes] | None = None
        names = frames_for(this.rules.all_fields, mesh, this.layout)
        assert len(envelope.payload) == len(names)
        for name, frame in zip(names, envelope.payload, strict=True):
            if name == INPUT_IDS:
                rows = np.split(np.frombuffer(frame, this.dtype), cuts)
            elif name == MEDIA:
                media = _media_of(part, bytes(frame), this, ids)
            elif name != EDGES:
                (field,) = [field for field in this.rules.fields if field.name == name]
                ends = cuts if field.axis == "token" else np.cumsum(counts)[:-1]
                for into, given in zip(values, np.split(np.frombuffer(frame, field.storage), ends), strict=True):
                    into[name] = given
        at = 0
        for i, count in enumerate(counts):
            positions = _positions(lengths[at : at + count], packs[i])
            mine = ids[at : at + count]
            shards.append(Shard(
                numbers[i], mine, loss[i], rows[i], positions, packs[i].width, packs[i].align, values[i],
                None if media is None else media[at : at + count],
            ))  # fmt: skip
            at += count
    return shards


def _media_of(part: StepPart, frame: bytes, this: Case, ids: list[Id]) -> list[bytes]:
    """The media of each sample of a message."""
    assert isinstance(part.media, MediaColumns), "media have no columns"
    items, sizes = part.media.arrays(len(ids))
    ends = np.cumsum(sizes).tolist()
    found = [frame[end - size : end] for end, size in zip(ends, sizes.tolist(), strict=True)]
    assert b"".join(found) == frame, "media are longer than their columns say"
    for data, count in zip(found, items.tolist(), strict=True):
        check(this.rules.media_fields, data, count)
    return found


def _positions(lengths: list[int], pack: _Cut) -> I64:
    """Chunks r and 2W - 1 - r of each segment, padded to the alignment, the tail being one, too."""
    width, align, size_of_group, rank = pack
    pieces, start = 2 * size_of_group, 0
    segments = [-(-length // align) * align for length in lengths]
    positions: list[int] = []
    for size in [*segments, width - sum(segments)]:
        whole = np.arange(start, start + size)
        mine = whole.reshape(pieces, -1)[[rank, pieces - 1 - rank]] if size_of_group > 1 else whole
        positions += mine.ravel().tolist()
        start += size
    return np.array(positions, np.int64)
