"""Build a step from its messages: check sizes and boundaries, and derive the arrays of many packs at once.

Messages carry tokens and declared fields unchanged, except fields aligned with labels, which come shifted. Positions,
masks, labels and boundaries are derived here, with the same ``core.layout`` with which the broker cut the shards. The
kernels in ``layout_kernels`` derive arrays by token, once they are compiled.

Boundaries are derived, and all sizes are checked, when a message arrives. Arrays by token are derived on request, for
a few packs at a time (``lazy``). A pack is a cut of these columns. The tensors of a framework are made from the columns
before they are cut (``formats``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from math import prod
from typing import Any

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from streampack.core.columns.step_columns import BY_RULES
from streampack.core.layout.boundaries import Boundaries, Layouts, layouts
from streampack.core.layout.labels import derive, derive_positions
from streampack.core.layout.shards import Slices, cut, cut_groups
from streampack.core.layout.step_frames import EDGES, INPUT_IDS, frames_for
from streampack.core.model.fields import LABELS, LOSS_MASK, MEDIA, POSITION_IDS, Field, from_bfloat16
from streampack.core.model.mesh import DynamicCp, Mesh
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I32, I64, IGNORE_INDEX
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.step_part import StepPart
from streampack.core.protocol.trainer_messages import Attached
from streampack.errors import WireError
from streampack.packs.columns import Column, Columns, part, rebased, rows
from streampack.packs.kernel_loader import kernels
from streampack.packs.lazy import LazyPacks, Show
from streampack.packs.pack import Pack
from streampack.packs.pack_media import MediaFetcher, PackMedia, pack_media
from streampack.packs.regroup import Regrouping
from streampack.packs.slabs import Slabs
from streampack.packs.step import Step
from streampack.packs.trees.tree_tokens import TreeTokens, depths_of

_NAMES = tuple(field.name for field in dataclass_fields(Pack))
_NO_EDGES, _ALL = np.zeros(0, np.int32), np.zeros(0, np.uint8)


def build_step(
    parts: Sequence[Envelope], attached: Attached, mesh: Mesh, slabs: Slabs, media: MediaFetcher | None = None
) -> Step:
    """Check the messages of a step and return the step, whose packs are made on request, in memory of ``slabs``.

    The rules of the step are those of ``attached``, unless the messages bring others. ``media`` fetches the media that
    samples refer to; without it, packs have the references.

    Raises WireError if a message breaks an invariant.
    """
    contents: list[Content] = []
    longest: list[I64] = []
    first: StepPart | None = None
    count = 0
    for envelope in parts:
        message = envelope.message
        if not isinstance(message, StepPart):
            raise WireError(f"got {type(message).__name__} among the parts of a step, expected only StepPart messages")
        first = first or message
        if message.deal != first.deal:
            raise WireError(f"got step {first.step} by the deals {first.deal} and {message.deal}, expected one deal")
        if (message.step, message.first) != (first.step, count):
            raise WireError(
                f"got step {message.step} from micro-batch {message.first} on, expected step {first.step} from "
                f"micro-batch {count} on"
            )
        try:
            contents.append(_content(message, envelope.payload, attached, mesh, slabs, media))
            of_places = message.longest(message.rules_of(attached.rules))
        except ValueError as error:
            raise WireError(f"got step {message.step} with packs that cannot be laid out: {error}") from None
        count += contents[-1].count
        longest += [] if of_places is None else [of_places]
    if first is None or count != first.micro_batches:
        raise WireError(f"got {count} micro-batches, expected {first.micro_batches if first else 'at least one'}")
    rules = first.rules_of(attached.rules)
    places = -(-first.num_samples // mesh.dp)
    lengths = np.concatenate([content.lengths for content in contents])
    depths = [content.depths for content in contents if content.depths is not None]
    sizes = [content.cp_sizes for content in contents if content.cp_sizes is not None]
    return Step(
        first.step, LazyPacks.of(contents), int(lengths.sum()), denominator(first),
        first.num_samples, first.digest.hex(), first.chain.hex(), "0" if first.stage is UNSET else first.stage.text,
        rules, Regrouping(rules, mesh.pp, places, np.concatenate(longest) if longest else None),
        lengths=lengths, shared=np.concatenate(depths) if depths else None,
        cp_sizes=np.concatenate(sizes) if sizes else None,
    )  # fmt: skip


def denominator(part: StepPart) -> int:
    """Return the denominator of a step's summed loss: its loss tokens, or 1 if it has none, since 0 / 0 is NaN."""
    return max(part.num_loss_tokens, 1)


@dataclass(frozen=True, slots=True)
class Content:
    """The checked content of one message, which makes the message's packs on request."""

    tokens: _Tokens | TreeTokens
    """Tokens and declared fields as received."""
    count: int
    """Number of packs."""
    rest: Mapping[str, Column | list[Any]]
    """Attributes of the packs by name, except those with a value per token and declared fields."""
    rows: Mapping[str, list[Any]]
    """The values of ``rest`` by pack."""
    lengths: I64
    """Real tokens of each sample of the whole packs, without shared ones, int64 [samples]."""
    depths: I64 | None
    """Tokens that each sample shares, int64 [samples]; None without ``share``."""
    cp_sizes: I64 | None
    """Ranks that share the pack of each sample, int64 [samples]; None without dynamic context parallelism."""

    def groups(self, num_tokens: int) -> list[tuple[int, int]]:
        """Return groups of packs as [first, stop), each of up to ``num_tokens`` tokens or of a single longer pack."""
        bounds, groups, first = self.tokens.bounds, list[tuple[int, int]](), 0
        while first < self.count:
            stop = max(bisect_right(bounds, bounds[first] + num_tokens) - 1, first + 1)
            groups.append((first, stop))
            first = stop
        return groups

    def make(self, first: int, stop: int, show: Show | None) -> Sequence[Any]:
        """Return packs [first, stop), or the views that ``show`` makes of them."""
        tokens, fields = self.tokens.columns(first, stop)
        names, values = list(fields), [rows(column) for column in fields.values()]
        own = [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)] or [{}] * (stop - first)
        by_name = {name: rows(column) for name, column in tokens.items()} | {"fields": own}
        by_name |= {name: values[first:stop] for name, values in self.rows.items()}
        none = [None] * (stop - first)
        packs = [Pack(*row) for row in zip(*(by_name.get(name, none) for name in _NAMES), strict=True)]
        if show is None:
            return packs
        rest = {name: part(column, first, stop) for name, column in self.rest.items()}
        return show(Columns(stop - first, {**tokens, **rest}, fields), packs)


def _content(
    part: StepPart, payload: Sequence[Any], attached: Attached, mesh: Mesh, slabs: Slabs, fetcher: MediaFetcher | None
) -> Content:
    """Check a message and lay out its packs. Raises WireError or ValueError for an invalid message."""
    rules, layout = part.rules_of(attached.rules), attached.layout
    expected = frames_for(rules.all_fields, mesh, layout)
    if part.frames != expected or len(payload) != len(expected):
        raise WireError(f"got {len(payload)} payload frames for the names {part.frames}, expected the names {expected}")
    num_packs = len(part.counts_u32) // 4
    counts = _array(part.counts_u32, "<u4", num_packs).astype(np.int64)
    if not num_packs:
        raise WireError("got a message without packs, expected at least one")
    num_samples = int(counts.sum())
    lengths = _array(part.lengths_u32, "<u4", num_samples).astype(np.int64)
    dynamic, parts = DynamicCp.of(layout), 1 if layout == "whole" else mesh.cp
    depths = depths_of(part, rules, parts)
    own = lengths if depths is None else lengths - depths
    groups: dict[str, list[Any]] = {}
    if dynamic is None:
        laid, bounds, widest = _lay_out(own, counts, part.aligns(rules), part.widths(rules))
        slices, shares = cut(laid, mesh.cp, mesh.cp_rank, layout), np.full(num_packs, parts)
        of_packs = [mesh.cp] * num_packs, [mesh.cp_rank] * num_packs
    else:
        firsts, shares, ranks, widths = _groups(part, dynamic, mesh, rules)
        laid, bounds, widest = _lay_out(own, counts, dynamic.aligns(shares, rules.align.sample), widths)
        slices, layout = cut_groups(laid, shares, ranks), "zigzag"
        of_packs = shares.tolist(), ranks.tolist()
        groups = {"cp_size": of_packs[0], "cp_ranks": list(zip(firsts.tolist(), of_packs[0], strict=True))}
    frames = dict(zip(expected, payload, strict=True))
    tokens: _Tokens | TreeTokens
    if depths is None:
        tokens = _tokens(frames, rules, laid, slices, shares, slabs)
        if MEDIA in frames:
            tokens = replace(tokens, media=pack_media(part, frames[MEDIA], rules, laid, tokens.bounds, fetcher))
    else:
        tokens = _tree_tokens(frames, rules, laid, depths)
    ids = np.empty((num_samples, 3), np.int64)
    ids[:, 0] = _array(part.streams_u32, "<u4", num_samples)
    ids[:, 1] = _array(part.indices_u64, "<u8", num_samples)
    ids[:, 2] = _array(part.parts_u32, "<u4", num_samples)
    attributes: dict[str, Column | list[Any]] = {
        "cu_seqlens": Column(bounds.real, bounds.first.tolist()),
        "cu_seqlens_padded": Column(bounds.padded, bounds.first.tolist()),
        "max_seqlen": widest.tolist(),
        "num_samples": counts.tolist(),
        "num_segments": np.diff(laid.first_segment).tolist(),
        "sample_ids": Column(ids, laid.first_sample.tolist()),
        "num_loss_tokens": _array(part.loss_tokens_u32, "<u4", num_packs).tolist(),
        "step": [part.step] * num_packs,
        "step_num_loss_tokens": [denominator(part)] * num_packs,
        "micro_batch": list(range(part.first, part.first + num_packs)),
        "num_micro_batches": [part.micro_batches] * num_packs,
        "dp_rank": [mesh.dp_rank] * num_packs,
        "pack": _array(part.packs_u32, "<u4", num_packs).tolist(),
        "slices": Column(np.stack([slices.start, slices.stop], axis=1), slices.first.tolist()),
        "layout": [layout] * num_packs,
        "cp": of_packs[0],
        "cp_rank": of_packs[1],
        **groups,
    }
    for name, optional in BY_RULES.items():
        if optional.in_packs is not None and optional.is_there(rules):
            values = _array(getattr(part, name) or bytes(4 * num_samples), "<u4", num_samples)
            attributes[optional.column] = Column(values.astype(optional.in_packs), laid.first_sample.tolist())
    by_pack = {name: rows(column) for name, column in attributes.items()}
    cp_sizes = None if dynamic is None else np.repeat(shares, counts)
    return Content(tokens, num_packs, attributes, by_pack, own, depths, cp_sizes)


def _groups(part: StepPart, dynamic: DynamicCp, mesh: Mesh, rules: Rules) -> tuple[I64, I64, I64, I64]:
    """Return of each pack's group the first rank, the size, the rank of this mesh in it, and the pack's tokens.

    All are int64 [packs]. Raises ValueError for groups without this rank, or tokens that no such pack has.
    """
    rank = mesh.dp_cp_rank
    firsts, sizes = part.groups(dynamic, mesh.dp * mesh.cp)
    if ((rank < firsts) | (rank >= firsts + sizes)).any():
        raise ValueError(f"got groups from ranks {firsts.tolist()[:8]} on, expected groups with rank {rank}")
    widths = _array(part.widths_u32, "<u4", len(sizes)).astype(np.int64)
    dynamic.check_widths(widths, sizes, rules.shape, rules.align.pack)
    return firsts, sizes, rank - firsts, widths


def _lay_out(lengths: I64, counts: I64, aligns: I64, widths: I64) -> tuple[Layouts, Boundaries, I64]:
    """Return the layouts of packs, their boundaries and the longest slot of each; compiled if the kernel is loaded.

    ``lengths``: real tokens of all samples. ``counts``: samples of each pack. Raises ValueError as ``layouts`` does.
    """
    if kernels.lay_out is not None:
        samples, packs = len(lengths), len(counts)
        real, start, stop = np.empty((3, samples + packs), np.int64)
        first_sample, first_segment = np.empty((2, packs + 1), np.int64)
        widest, bounds = np.empty(packs, np.int64), np.empty((2, samples + 2 * packs), np.int32)
        count = kernels.lay_out(
            lengths, counts, aligns, widths, real, start, stop, first_sample, first_segment, widest, *bounds
        )
        if count >= 0:
            laid = Layouts(lengths, real[:count], start[:count], stop[:count], first_sample, first_segment)
            real, padded = bounds[:, : count + packs]
            return laid, Boundaries(real, padded, first_segment + np.arange(packs + 1)), widest
    laid = layouts(lengths, counts, aligns, widths)  # also raises the error that the kernel found
    return laid, laid.boundaries(), laid.widest()


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Tokens and declared fields of one message as received, and the positions of its tokens in the packs."""

    input_ids: NDArray[Any] | None
    """Token ids of all packs; None in the middle stages of a pipeline."""
    fields: Sequence[tuple[Field, Column]]
    """Declared fields with their values of all packs."""
    bounds: list[int]
    """[packs + 1] index of each pack's first token that this rank holds, and the end of the last pack."""
    first_slice: list[int]
    """[packs + 1] index of each pack's first slice, and the number of slices."""
    places: tuple[I64, I64, I64]
    """For each slice: its offset in its segment, its size, and the segment's real tokens; int64 [slices] each."""
    edges: I32
    """int32 [slices] token after each slice; empty if slices are whole segments, or if labels were sent."""
    slabs: Slabs
    """Memory for the packs' arrays."""
    media: PackMedia | None = None
    """Fields of axis item and patch; None if the run has none, or if this rank does not get them."""

    def columns(self, first: int, stop: int) -> tuple[dict[str, Column | list[Any]], dict[str, Column | list[Any]]]:
        """Return the derived arrays by token of packs [first, stop), and their declared fields, as columns by name."""
        bounds = rebased(self.bounds, first, stop)
        size, begin = bounds[-1], self.bounds[first]
        span = slice(self.first_slice[first], self.first_slice[stop])
        offset, sizes, real = self.places
        places = offset[span], sizes[span], real[span]
        slab = self.slabs.take(25 * size)
        input_ids, labels, position_ids = np.frombuffer(slab, np.int64, 3 * size).reshape(3, size)
        padding_mask = np.frombuffer(slab, np.bool_, size, 24 * size)
        fields = {field.name: self._field(field, part(column, first, stop)) for field, column in self.fields}
        sent, supplied = fields.pop(LABELS, None), fields.pop(POSITION_IDS, None)
        tokens: dict[str, Column | list[Any]]
        if self.input_ids is not None:
            if sent is not None:
                labels[:] = sent.values
            counted = _ALL if LOSS_MASK not in fields else _flags(fields[LOSS_MASK].values)
            edges = self.edges[span] if len(self.edges) else self.edges
            (kernels.derive or derive)(
                self.input_ids[begin : begin + size], edges, counted, *places, sent is not None,
                input_ids, labels, position_ids, padding_mask,
            )  # fmt: skip
            tokens = {"input_ids": Column(input_ids, bounds), "labels": Column(labels, bounds)}
        else:
            derive_positions(*places, position_ids, padding_mask)
            tokens = dict.fromkeys(("input_ids", "labels"), [None] * (stop - first))
        tokens["position_ids"] = Column(position_ids, bounds) if supplied is None else _positions(supplied)
        media, without_loss = self.media.columns(first, stop) if self.media is not None else ({}, [])
        for begin, end in without_loss:
            labels[begin:end] = IGNORE_INDEX
            if LOSS_MASK in fields:
                fields[LOSS_MASK].values[begin:end] = 0
        return {**tokens, "padding_mask": Column(padding_mask, bounds)}, {**fields, **media}

    def _field(self, field: Field, column: Column) -> Column:
        """Return a writable copy of a declared field, bfloat16 as float32."""
        if field.dtype == "bfloat16":
            return Column(from_bfloat16(column.values), column.bounds)
        if field.axis == "sample":
            return Column(column.values.copy(), column.bounds)
        kept = np.frombuffer(self.slabs.take(column.values.nbytes), column.values.dtype).reshape(column.values.shape)
        kept[...] = column.values
        return Column(kept, column.bounds)


def _tokens(
    frames: Mapping[str, Any], rules: Rules, laid: Layouts, slices: Slices, shares: I64, slabs: Slabs
) -> _Tokens:
    """Check the payload frames of a message and return its tokens.

    ``laid``: layout of the packs. ``slices``: those that this rank holds. ``shares`` int64 [packs]: the ranks that hold
    a part of each pack. Raises ValueError for frames of another size.
    """
    widths = laid.stop[laid.first_segment[1:] - 1]
    whole, bounds = ([0, *np.cumsum(tokens).tolist()] for tokens in (widths, widths // shares))
    kernels.count_tokens(bounds[-1])
    fields = []
    for field in rules.fields:
        if field.name in frames:
            of_tokens = whole if field.cp == "replicate" else bounds
            at = laid.first_sample.tolist() if field.axis == "sample" else of_tokens
            shape = (at[-1], *field.shape)
            values = _array(frames[field.name], field.storage.str, prod(shape)).reshape(shape)
            fields.append((field, Column(values, at)))
    return _Tokens(
        input_ids=_array(frames[INPUT_IDS], rules.tokens, bounds[-1]) if INPUT_IDS in frames else None,
        fields=fields, bounds=bounds, first_slice=slices.first.tolist(),
        places=(slices.start - laid.start[slices.segment], slices.stop - slices.start, laid.real[slices.segment]),
        edges=_array(frames[EDGES], "<i4", len(slices.start)) if EDGES in frames else _NO_EDGES, slabs=slabs,
    )  # fmt: skip


def _tree_tokens(frames: Mapping[str, Any], rules: Rules, laid: Layouts, depths: I64) -> TreeTokens:
    """Check the payload frames of a message whose samples may share tokens, and return its tokens.

    ``laid``: layout of the packs. ``depths``: int64 [samples]. Raises ValueError for frames of another size.
    """
    bounds = [0, *np.cumsum(laid.stop[laid.first_segment[1:] - 1]).tolist()]
    tokens = TreeTokens(None, [], bounds, laid, depths, _positions)
    at = {"sample": laid.first_sample.tolist(), "token": bounds, "target": tokens.row_bounds}
    fields = []
    for field in rules.fields:
        if field.name in frames:
            row_bounds = at["sample" if field.axis == "sample" else field.align]
            shape = (row_bounds[-1], *field.shape)
            values = _array(frames[field.name], field.storage.str, prod(shape)).reshape(shape)
            fields.append((field, Column(values, row_bounds)))
    ids = _array(frames[INPUT_IDS], rules.tokens, bounds[-1]) if INPUT_IDS in frames else None
    return replace(tokens, input_ids=ids, fields=fields)


def _positions(supplied: Column) -> Column | list[Any]:
    """Return supplied positions as an int64 column; for three positions per token, a list of int64 [3, tokens]."""
    if supplied.values.ndim == 1:
        return Column(supplied.values.astype(np.int64, copy=False), supplied.bounds)
    return [np.ascontiguousarray(row.T, np.int64) for row in supplied.rows()]


def _flags(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Return ``values`` as bytes that are 0 where ``values`` are 0."""
    return (values if values.itemsize == 1 else values != 0).view(np.uint8)


def _array(data: Any, dtype: str, count: int) -> NDArray[Any]:
    """Return ``data`` as an array [count]; copy it if it is not aligned. Raises ValueError for another size."""
    num_bytes, expected = memoryview(data).nbytes, count * np.dtype(dtype).itemsize
    if num_bytes != expected:
        raise ValueError(f"got {num_bytes} bytes, expected {count} numbers of {dtype}, {expected} bytes")
    values = np.frombuffer(data, dtype)
    return values if values.flags.aligned else values.copy()
