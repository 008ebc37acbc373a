"""A step out of its messages: what packs hold is derived for many at once, in long arrays.

Tokens and declared fields travel as they are, the fields aligned with labels shifted; positions,
masks, labels and boundaries are derived here, by the same ``core.layout`` that the broker cut the
shard with, and token by token in ``layout_kernels``, where it is compiled. Boundaries are, and every size is checked,
when a message has come; what is by token is derived a few packs at a time, when they are asked for (``lazy``). A pack
is a cut of these columns, and so are a framework's tensors, which are made of them before they are cut (``formats``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.layout.boundaries import Boundaries, Layouts, layouts
from streampack.core.layout.labels import derive, derive_positions
from streampack.core.layout.shards import Slices, cut
from streampack.core.layout.step_frames import EDGES, INPUT_IDS, frames_for
from streampack.core.model.fields import LABELS, LOSS_MASK, POSITION_IDS, Field, from_bfloat16
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I32, I64
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.trainer_messages import Attached, StepPart
from streampack.errors import WireError
from streampack.packs.columns import Column, Columns, part, rebased, rows
from streampack.packs.kernel_loader import kernels
from streampack.packs.lazy import LazyPacks, Show
from streampack.packs.pack import Pack
from streampack.packs.regroup import Regrouping
from streampack.packs.slabs import Slabs
from streampack.packs.step import Step

_OF_TOKENS = ("input_ids", "labels", "position_ids", "padding_mask")
_REST = tuple(field.name for field in dataclass_fields(Pack))[len(_OF_TOKENS) : -1]
_NO_EDGES, _ALL = np.zeros(0, np.int32), np.zeros(0, np.uint8)


def build_step(parts: Sequence[Envelope], attached: Attached, mesh: Mesh, slabs: Slabs) -> Step:
    """A step from its parts, checked; its packs are made when they are asked for (``lazy``), their arrays in memory
    of ``slabs``.

    Raises WireError if what the broker sent breaks an invariant.
    """
    contents: list[Content] = []
    first: StepPart | None = None
    count = 0
    for envelope in parts:
        message = envelope.message
        if not isinstance(message, StepPart):
            raise WireError(f"got {type(message).__name__} among the parts of a step")
        first = first or message
        if (message.step, message.first) != (first.step, count):
            raise WireError(
                f"got step {message.step} from micro-batch {message.first} on, expected {first.step} from {count}"
            )
        try:
            contents.append(_content(message, envelope.payload, attached, mesh, slabs))
        except ValueError as error:
            raise WireError(f"got step {message.step}, which cannot be laid out: {error}") from None
        count += contents[-1].count
    if first is None or count != first.micro_batches:
        raise WireError(f"got {count} micro-batches, expected {first.micro_batches if first else 'some'}")
    return Step(
        first.step, LazyPacks.of(contents), sum(content.num_tokens for content in contents), first.num_loss_tokens,
        first.num_samples, first.digest.hex(), first.chain.hex(), Regrouping(attached.rules, mesh.pp),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Content:
    """What a message holds, checked and laid out: ``tokens`` as they came, the ``rest`` of what its packs have."""

    tokens: _Tokens
    count: int
    rest: Mapping[str, Column | list[Any]]
    rows: Sequence[list[Any]]
    """Each of the ``rest`` by pack, in the order of a pack's attributes: those by token are the first, the fields the
    last."""
    num_tokens: int
    """Real ones of the whole packs."""

    def groups(self, num_tokens: int) -> list[tuple[int, int]]:
        """Packs [first, stop) of up to ``num_tokens`` tokens, or one of more, in turn."""
        bounds, found, first = self.tokens.bounds, list[tuple[int, int]](), 0
        while first < self.count:
            stop = max(bisect_right(bounds, bounds[first] + num_tokens) - 1, first + 1)
            found.append((first, stop))
            first = stop
        return found

    def make(self, first: int, stop: int, show: Show | None) -> Sequence[Any]:
        """Packs [first, stop), or what ``show`` makes of them."""
        tokens, fields = self.tokens.columns(first, stop)
        names, held = list(fields), [rows(column) for column in fields.values()]
        own = [dict(zip(names, row, strict=True)) for row in zip(*held, strict=True)] or [{}] * (stop - first)
        of_tokens = (rows(tokens[name]) for name in _OF_TOKENS)
        packs = [Pack(*row) for row in zip(*of_tokens, *(each[first:stop] for each in self.rows), own, strict=True)]
        if show is None:
            return packs
        rest = {name: part(column, first, stop) for name, column in self.rest.items()}
        return show(Columns(stop - first, {**tokens, **rest}, fields), packs)


def _content(part: StepPart, payload: Sequence[Any], attached: Attached, mesh: Mesh, slabs: Slabs) -> Content:
    """What a message says of its packs. Raises WireError or ValueError for what cannot be."""
    rules, layout = attached.rules, attached.layout
    expected = frames_for(rules.fields, mesh, layout)
    if part.frames != expected or len(payload) != len(expected):
        raise WireError(f"got payload frames {part.frames} ({len(payload)} of them), expected {expected}")
    num_packs = len(part.counts_u32) // 4
    counts = _array(part.counts_u32, "<u4", num_packs).astype(np.int64)
    if not num_packs:
        raise WireError("got a message without packs, expected at least one")
    num_samples = int(counts.sum())
    lengths = _array(part.lengths_u32, "<u4", num_samples).astype(np.int64)
    laid, bounds, widest = _lay_out(lengths, counts, part.aligns(rules), part.widths(rules))
    mine = cut(laid, mesh.cp, mesh.cp_rank, layout)
    parts = 1 if layout == "whole" else mesh.cp
    tokens = _tokens(dict(zip(expected, payload, strict=True)), rules, laid, mine, parts, slabs)
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
        "step_num_loss_tokens": [part.num_loss_tokens] * num_packs,
        "micro_batch": list(range(part.first, part.first + num_packs)),
        "num_micro_batches": [part.micro_batches] * num_packs,
        "dp_rank": [mesh.dp_rank] * num_packs,
        "pack": _array(part.packs_u32, "<u4", num_packs).tolist(),
        "slices": Column(np.stack([mine.start, mine.stop], axis=1), mine.first.tolist()),
        "layout": [layout] * num_packs,
        "cp": [mesh.cp] * num_packs,
        "cp_rank": [mesh.cp_rank] * num_packs,
    }
    by_pack = [rows(attributes[name]) for name in _REST]
    return Content(tokens, num_packs, attributes, by_pack, int(lengths.sum()))


def _lay_out(lengths: I64, counts: I64, aligns: I64, widths: I64) -> tuple[Layouts, Boundaries, I64]:
    """``layouts``, with boundaries and the widest slot of each pack; same errors."""
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
    laid = layouts(lengths, counts, aligns, widths)  # or says what cannot be
    return laid, laid.boundaries(), laid.widest()


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens and declared fields of one message as they came, and where its tokens lie."""

    input_ids: NDArray[Any] | None
    """None in the middle stages of a pipeline."""
    fields: Sequence[tuple[Field, Column]]
    bounds: list[int]
    """Where the tokens of each pack begin that the rank holds, and the end of the last one's."""
    first_slice: list[int]
    """Of each pack, and the number of all."""
    places: tuple[I64, I64, I64]
    """Of each slice its place in its segment, its size, and the segment's real tokens; int64 [slices] each."""
    edges: I32
    """The token after each slice; empty where slices are whole segments, or labels were sent."""
    slabs: Slabs

    def columns(self, first: int, stop: int) -> tuple[dict[str, Column | list[Any]], dict[str, Column | list[Any]]]:
        """(what packs [first, stop) have of each token, declared fields), in memory of the slabs."""
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
        return {**tokens, "padding_mask": Column(padding_mask, bounds)}, dict(fields)

    def _field(self, field: Field, came: Column) -> Column:
        """A copy that may be written to."""
        if field.dtype == "bfloat16":
            return Column(from_bfloat16(came.values), came.bounds)
        if field.axis == "sample":
            return Column(came.values.copy(), came.bounds)
        kept = np.frombuffer(self.slabs.take(came.values.nbytes), came.values.dtype).reshape(came.values.shape)
        kept[...] = came.values
        return Column(kept, came.bounds)


def _tokens(frames: Mapping[str, Any], rules: Rules, laid: Layouts, mine: Slices, parts: int, slabs: Slabs) -> _Tokens:
    """Of a rank that holds 1 / ``parts`` of each pack. Raises ValueError for frames of another size."""
    widths = laid.stop[laid.first_segment[1:] - 1]
    whole, bounds = ([0, *np.cumsum(widths // share).tolist()] for share in (1, parts))
    kernels.note(bounds[-1])
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
        fields=fields, bounds=bounds, first_slice=mine.first.tolist(),
        places=(mine.start - laid.start[mine.segment], mine.stop - mine.start, laid.real[mine.segment]),
        edges=_array(frames[EDGES], "<i4", len(mine.start)) if EDGES in frames else _NO_EDGES, slabs=slabs,
    )  # fmt: skip


def _positions(supplied: Column) -> Column | list[Any]:
    """Positions that were sent, int64: [T'] of each pack, or [3, T'] where each token has three."""
    if supplied.values.ndim == 1:
        return Column(supplied.values.astype(np.int64, copy=False), supplied.bounds)
    return [np.ascontiguousarray(row.T, np.int64) for row in supplied.rows()]


def _flags(values: NDArray[Any]) -> NDArray[np.uint8]:
    """0 where ``values`` are, as bytes."""
    return (values if values.itemsize == 1 else values != 0).view(np.uint8)


def _array(data: Any, dtype: str, count: int) -> NDArray[Any]:
    """``data`` as [count] of ``dtype``, copied only to be aligned. Raises ValueError for another size."""
    got, expected = memoryview(data).nbytes, count * np.dtype(dtype).itemsize
    if got != expected:
        raise ValueError(f"got {got} bytes, expected {count} numbers of {dtype}, {expected} bytes")
    found = np.frombuffer(data, dtype)
    return found if found.flags.aligned else found.copy()
