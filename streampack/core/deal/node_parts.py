"""Messages for the readers of one host, and their split into the messages that each rank would get directly.

A ``NodePart`` has the packs of several data-parallel ranks and the shards of several context-parallel ranks, each once.
``split`` cuts its columns and payload. Nothing is copied except columns of a few bytes for each sample: payload is
returned as views. The bytes come from another process, so every size is checked before it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np

from streampack.core.columns.step_columns import PACK_BYTES, SAMPLE_BYTES, columns_of, fields_of
from streampack.core.columns.step_columns import cut as cut_columns
from streampack.core.layout.boundaries import layouts
from streampack.core.layout.shards import cut, cut_groups
from streampack.core.layout.step_frames import EDGES, INPUT_IDS, frames_for
from streampack.core.model.fields import MEDIA, Field
from streampack.core.model.mesh import DynamicCp, Mesh
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64
from streampack.core.protocol.relay_messages import MAX_READERS, NodePart
from streampack.core.protocol.step_part import StepPart

RankPart = tuple[tuple[int, int], StepPart, tuple[memoryview, ...]]
"""((dp rank, cp rank), the message that this rank would get directly, its payload)."""

_HEAD = [
    name for name in StepPart.__struct_fields__ if name not in {"part", "parts", "media", *PACK_BYTES, *SAMPLE_BYTES}
]
"""Fields of a message that the message of each rank has, too."""


_OF_SOME_PACKS = ("widths_u32", "rows_u32", "group_firsts_u32", "group_sizes_u32")
"""Columns of packs that only some runs have."""


class NodeRanks(NamedTuple):
    """The ranks of one host that messages are made for.

    Attributes:
        mesh: Mesh of any of the ranks; only its sizes matter.
        dp_ranks, cp_ranks: Ranks, as ``NodePart`` has them.
        frames: Names of the payload frames, with every frame that one of the ranks gets.
    """

    mesh: Mesh
    dp_ranks: tuple[int, ...]
    cp_ranks: tuple[int, ...]
    frames: list[str]

    @classmethod
    def of(cls, meshes: Iterable[Mesh], fields: tuple[Field, ...], layout: str) -> NodeRanks:
        """Return the ranks of a host's readers, from their ``meshes``, at least one.

        >>> NodeRanks.of([Mesh(dp=4, dp_rank=3), Mesh(dp=4, dp_rank=1)], (), "zigzag").dp_ranks
        (1, 3)
        """
        all_meshes = list(meshes)
        if DynamicCp.of(layout) is None:
            dp_ranks, cp_ranks = {mesh.dp_rank for mesh in all_meshes}, {mesh.cp_rank for mesh in all_meshes}
        else:
            dp_ranks, cp_ranks = {mesh.dp_cp_rank for mesh in all_meshes}, {all_meshes[0].cp}
        frames = max((frames_for(fields, mesh, layout) for mesh in all_meshes), key=len)
        return cls(all_meshes[0], tuple(sorted(dp_ranks)), tuple(sorted(cp_ranks)), frames)


def split(part: NodePart, payload: Sequence[Any], rules: Rules, layout: str) -> list[RankPart]:
    """Return the message of each pair of a dp rank and a cp rank, with all frames of the ``NodePart``.

    Payload is returned as views. ``for_frames`` keeps the frames of a rank that gets fewer. Raises ValueError if sizes
    do not fit.
    """
    dynamic = DynamicCp.of(layout)
    _check_ranks(part, dynamic)
    if len(part.frames) != len(set(part.frames)) or len(part.frames) != len(payload):
        raise ValueError(f"got {len(payload)} payload frames for the names {part.frames}, expected one for each name")
    counts, samples = _check_columns(part)
    ranks = len(part.dp_ranks)
    per_rank = len(counts) // ranks
    views = [_bytes_of(frame) for frame in payload]
    bounds = _byte_bounds(part, counts, samples, rules, layout) if per_rank else {}
    for name, view in zip(part.frames, views, strict=True):
        if name not in bounds:
            raise ValueError(f"got the payload frame {name!r}, expected input_ids, edges or a declared field")
        if view.nbytes != bounds[name][-1][-1]:
            raise ValueError(f"got {view.nbytes} bytes of {name}, expected {bounds[name][-1][-1]}")
    rank_parts: list[RankPart] = []
    for i, dp_rank in enumerate(part.dp_ranks):
        message = _message(part, i * per_rank, (i + 1) * per_rank, samples[i * per_rank], samples[(i + 1) * per_rank])
        for j, cp_rank in enumerate(part.cp_ranks):
            places = [bounds[name][j] for name in part.frames]
            rank_payload = tuple(view[at[i] : at[i + 1]] for view, at in zip(views, places, strict=True))
            pair = (dp_rank, cp_rank) if dynamic is None else divmod(dp_rank, part.cp)
            rank_parts.append((pair, message, rank_payload))
    return rank_parts


def for_frames(
    part: StepPart, payload: Sequence[memoryview], frames: list[str]
) -> tuple[StepPart, tuple[memoryview, ...]]:
    """Return a message of ``split`` with only ``frames``, those of its rank. Raises ValueError if one is missing."""
    if part.frames == frames or not part.micro_batches:
        return part, tuple(payload)
    by_name = dict(zip(part.frames, payload, strict=True))
    if not by_name.keys() >= set(frames):
        raise ValueError(f"got the payload frames {part.frames}, expected {frames} among them")
    return msgspec.structs.replace(part, frames=frames), tuple(by_name[name] for name in frames)


def _check_ranks(part: NodePart, dynamic: DynamicCp | None) -> None:
    """Raise ValueError if the ranks of a message, or its numbers, do not fit together."""
    for name, ranks in (("dp_ranks", part.dp_ranks), ("cp_ranks", part.cp_ranks)):
        if not ranks or any(a >= b for a, b in pairwise(ranks)):
            raise ValueError(f"got {name} {list(ranks[:8])}, expected at least one rank, in ascending order")
    if dynamic is not None:
        if not part.cp or part.cp_ranks != (part.cp,):
            raise ValueError(f"got cp_ranks {list(part.cp_ranks[:8])} and cp={part.cp} with groups, expected cp alone")
    elif part.cp_ranks[-1] >= part.cp:
        raise ValueError(f"got context-parallel rank {part.cp_ranks[-1]}, expected ranks below {part.cp}")
    if len(part.dp_ranks) * len(part.cp_ranks) > MAX_READERS:
        raise ValueError(
            f"got {len(part.dp_ranks)} dp ranks and {len(part.cp_ranks)} cp ranks, expected at most {MAX_READERS} pairs"
        )
    if part.part >= part.parts or part.rank_part >= part.rank_parts:
        raise ValueError(
            f"got part {part.part} of {part.parts}, which is part {part.rank_part} of {part.rank_parts} of a rank, "
            f"expected numbers below the numbers of parts"
        )


def _check_columns(part: NodePart) -> tuple[I64, list[int]]:
    """Check the sizes of a message's columns; raise ValueError for one that does not fit.

    Returns the samples of each pack, int64 [p], and [p + 1] the samples before each pack and in all packs.
    """
    count, left = divmod(len(part.counts_u32), 4 * len(part.dp_ranks))
    most = part.micro_batches - part.first
    if left or not min(part.micro_batches, 1) <= count <= most:
        raise ValueError(
            f"got {len(part.counts_u32)} bytes of counts for {len(part.dp_ranks)} ranks with {most} micro-batches "
            f"left, expected 4 bytes for each pack, and as many packs for each rank"
        )
    counts = np.frombuffer(part.counts_u32, "<u4").astype(np.int64)
    samples = [0, *np.cumsum(counts).tolist()]
    sizes = {name: width * len(counts) for name, width in PACK_BYTES.items()}
    sizes |= {name: width * samples[-1] for name, width in SAMPLE_BYTES.items()}
    absent = [name for name in sizes if getattr(part, name) is msgspec.UNSET]
    for name in {*absent, *(name for name in _OF_SOME_PACKS if not getattr(part, name))}:
        del sizes[name]
    if part.media is not msgspec.UNSET:
        part.media.arrays(samples[-1])
    for name, size in sizes.items():
        if len(getattr(part, name)) != size:
            raise ValueError(f"got {len(getattr(part, name))} bytes of {name}, expected {size}")
    return counts, samples


def _byte_bounds(
    part: NodePart, counts: I64, samples: list[int], rules: Rules, layout: str
) -> dict[str, list[list[int]]]:
    """Return for each frame, and each cp rank of the message, where the bytes of each dp rank begin and the last end.

    A frame that occurs once has the same bounds for all cp ranks.
    """
    per_rank, num_shards = len(counts) // len(part.dp_ranks), len(part.cp_ranks)
    widths, shares = _widths(part, len(counts), rules, layout)
    whole, shard = (np.append(0, np.cumsum(tokens))[::per_rank] for tokens in (widths, widths // shares))
    sharded = [shard] * num_shards if layout == "whole" else [shard + i * shard[-1] for i in range(num_shards)]
    once, by_sample = [whole] * num_shards, [np.array(samples)[::per_rank]] * num_shards
    lengths = np.frombuffer(part.lengths_u32, "<u4").astype(np.int64)
    whole_rows = np.append(0, np.cumsum(lengths))[np.array(samples)[::per_rank]]
    units = {INPUT_IDS: (sharded, np.dtype(rules.tokens).itemsize)}
    for field in rules.fields:
        by_token = once if field.cp == "replicate" else sharded
        if rules.share is not None and field.align == "target":
            by_token = [whole_rows] * num_shards
        units[field.name] = by_sample if field.axis == "sample" else by_token, field.value_bytes
    if MEDIA in part.frames:
        if part.media is msgspec.UNSET:
            raise ValueError("got the payload frame media without its columns, expected the columns, too")
        _, of_media = part.media.arrays(samples[-1])
        units[MEDIA] = [np.append(0, np.cumsum(of_media))[np.array(samples)[::per_rank]]] * num_shards, 1
    if EDGES in part.frames:
        units[EDGES] = _slices(part, counts, widths, shares, rules, layout), 4
    return {name: [(at * size).tolist() for at in units[name][0]] for name, (_, size) in units.items()}


def _widths(part: NodePart, count: int, rules: Rules, layout: str) -> tuple[I64, I64]:
    """Return the tokens T of each of ``count`` packs, and the number of ranks that share them, int64 [count] each."""
    if (dynamic := DynamicCp.of(layout)) is not None:
        columns = part.widths_u32, part.group_sizes_u32 or b""
        widths, sizes = (np.frombuffer(column, "<u4").astype(np.int64) for column in columns)
        if len(widths) != count or len(sizes) != count:
            raise ValueError(f"got {len(widths)} widths and {len(sizes)} groups for {count} packs, expected one each")
        dynamic.check_widths(widths, sizes, rules.shape, rules.align.pack)
        return widths, sizes
    widths, shares = part.widths(rules), 1 if layout == "whole" else part.cp
    if (widths % shares).any():
        raise ValueError(f"got packs of {widths.tolist()[:8]} tokens, expected multiples of {shares} tokens")
    return widths, np.full(count, shares)


def _slices(part: NodePart, counts: I64, widths: I64, shares: I64, rules: Rules, layout: str) -> list[I64]:
    """Return for each cp rank of a message where the slices of each dp rank begin in ``edges``, and the last end."""
    per_rank = len(counts) // len(part.dp_ranks)
    lengths = np.frombuffer(part.lengths_u32, "<u4").astype(np.int64)
    if (dynamic := DynamicCp.of(layout)) is not None:
        laid = layouts(lengths, counts, dynamic.aligns(shares, rules.align.sample), widths)
        return [cut_groups(laid, shares, np.zeros_like(shares)).first[::per_rank]]
    laid = layouts(lengths, counts, part.aligns(rules), widths)
    ranks = part.cp_ranks[:1] if layout == "zigzag" else part.cp_ranks  # zigzag gives every rank the same number
    firsts = [cut(laid, part.cp, rank, layout).first[::per_rank] for rank in ranks]
    firsts *= len(part.cp_ranks) // len(ranks)
    before = accumulate((int(first[-1]) for first in firsts), initial=0)
    return [first + start for first, start in zip(firsts, before, strict=False)]


def _message(part: NodePart, pack: int, pack_stop: int, sample: int, sample_stop: int) -> StepPart:
    """Return the message of one dp rank, which has these packs and samples of ``part``."""
    head = {name: getattr(part, name) for name in _HEAD}
    columns = fields_of(cut_columns(columns_of(part), (pack, pack_stop), (sample, sample_stop)))
    return StepPart(**head, part=part.rank_part, parts=part.rank_parts, **columns)


def _bytes_of(frame: Any) -> memoryview:
    """Return a one-dimensional buffer as a read-only view of its bytes, which several ranks may share."""
    view = memoryview(frame)
    return view.cast("B").toreadonly() if view.nbytes else memoryview(b"")
