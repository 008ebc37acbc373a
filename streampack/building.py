"""A step out of its messages: what packs hold is derived for a whole message at once, in long arrays.

Tokens and declared fields travel as they are, the fields that speak of targets shifted; positions,
masks, labels and boundaries are derived here, by the same ``core.layout`` that the broker cut the
shard with, and token by token in ``core.derived``, where it is compiled. A pack is a cut of these
columns, and so are a framework's tensors, which are made of them before they are cut (``formats``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.columns import Column, Columns, rows
from streampack.compiled import kernels
from streampack.core import layout as in_numpy
from streampack.core.fields import LABELS, LOSS_MASK, POSITION_IDS, Field, from_bfloat16
from streampack.core.frames import EDGES, INPUT_IDS, frames_for
from streampack.core.layout import Boundaries, Layouts, Slices, cut, derive_positions, layouts
from streampack.core.messages import Attached, Envelope, Mesh, StepPart
from streampack.core.rules import Rules
from streampack.core.samples import I32, I64
from streampack.errors import WireError
from streampack.packs import Pack, Step
from streampack.regrouping import Regrouping
from streampack.slabs import Slabs

_ATTRIBUTES = tuple(field.name for field in dataclass_fields(Pack))
_NO_EDGES, _ALL = np.zeros(0, np.int32), np.zeros(0, np.uint8)


def build_step(parts: Sequence[Envelope], attached: Attached, mesh: Mesh, slabs: Slabs) -> Step:
    """A step from its parts, its arrays in memory of ``slabs``.

    Raises WireError if what the broker sent breaks an invariant.
    """
    columns: list[Columns] = []
    packs: list[Pack] = []
    first: StepPart | None = None
    for envelope in parts:
        message = envelope.message
        if not isinstance(message, StepPart):
            raise WireError(f"got {type(message).__name__} among the parts of a step")
        first = first or message
        if (message.step, message.first) != (first.step, len(packs)):
            raise WireError(
                f"got step {message.step} from micro-batch {message.first} on, expected {first.step} from {len(packs)}"
            )
        try:
            columns.append(_columns(message, envelope.payload, attached, mesh, slabs))
        except ValueError as error:
            raise WireError(f"got step {message.step}, which cannot be laid out: {error}") from None
        packs += _packs(columns[-1])
    if first is None or len(packs) != first.micro_batches:
        raise WireError(f"got {len(packs)} micro-batches, expected {first.micro_batches if first else 'some'}")
    return Step(
        first.step, tuple(packs), first.num_loss_tokens, first.num_samples, first.digest.hex(), first.chain.hex(),
        Regrouping(tuple(packs), attached.rules, mesh.pp), tuple(columns),
    )  # fmt: skip


def _packs(columns: Columns) -> list[Pack]:
    names, held = list(columns.fields), [rows(column) for column in columns.fields.values()]
    fields = [dict(zip(names, row, strict=True)) for row in zip(*held, strict=True)] or [{}] * columns.count
    found = {name: rows(column) for name, column in columns.attributes.items()} | {"fields": fields}
    return [Pack(*row) for row in zip(*(found[name] for name in _ATTRIBUTES), strict=True)]


def _columns(part: StepPart, payload: Sequence[Any], attached: Attached, mesh: Mesh, slabs: Slabs) -> Columns:
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
    tokens, fields = _Payload(dict(zip(expected, payload, strict=True)), rules, laid, mine, parts, slabs).columns()
    ids = np.empty((num_samples, 3), np.int64)
    ids[:, 0] = _array(part.streams_u32, "<u4", num_samples)
    ids[:, 1] = _array(part.indices_u64, "<u8", num_samples)
    ids[:, 2] = _array(part.parts_u32, "<u4", num_samples)
    attributes: dict[str, Column | list[Any]] = {
        **tokens,
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
    return Columns(num_packs, attributes, fields)


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
class _Payload:
    """The arrays of one message by name, and where its tokens lie; the rank holds 1 / ``parts`` of each pack."""

    frames: Mapping[str, Any]
    rules: Rules
    laid: Layouts
    mine: Slices
    parts: int
    slabs: Slabs

    def columns(self) -> tuple[dict[str, Column | list[Any]], dict[str, Column | list[Any]]]:
        """(what every pack has of each token, declared fields), in memory of the slabs."""
        bounds = self._bounds(self.parts)
        size = bounds[-1]
        kernels.note(size)
        slab = self.slabs.take(25 * size)
        input_ids, labels, position_ids = np.frombuffer(slab, np.int64, 3 * size).reshape(3, size)
        padding_mask = np.frombuffer(slab, np.bool_, size, 24 * size)
        fields = {field.name: self._field(field) for field in self.rules.fields if field.name in self.frames}
        sent, supplied = fields.pop(LABELS, None), fields.pop(POSITION_IDS, None)
        tokens: dict[str, Column | list[Any]]
        if INPUT_IDS in self.frames:
            if sent is not None:
                labels[:] = sent.values
            counted = _ALL if LOSS_MASK not in fields else _flags(fields[LOSS_MASK].values)
            ids = _array(self.frames[INPUT_IDS], self.rules.tokens, size)
            (kernels.derive or in_numpy.derive)(
                ids, self._edges(), counted, *self._places(), sent is not None,
                input_ids, labels, position_ids, padding_mask,
            )  # fmt: skip
            tokens = {"input_ids": Column(input_ids, bounds), "labels": Column(labels, bounds)}
        else:
            derive_positions(*self._places(), position_ids, padding_mask)
            tokens = dict.fromkeys(("input_ids", "labels"), [None] * (len(bounds) - 1))
        tokens["position_ids"] = Column(position_ids, bounds) if supplied is None else _positions(supplied)
        return {**tokens, "padding_mask": Column(padding_mask, bounds)}, dict(fields)

    def _bounds(self, parts: int) -> list[int]:
        """Where the tokens of each pack begin, 1 / ``parts`` of them, and the end of the last one's."""
        widths = self.laid.stop[self.laid.first_segment[1:] - 1]
        return [0, *np.cumsum(widths // parts).tolist()]

    def _places(self) -> tuple[I64, I64, I64]:
        """Of each slice its place in its segment, its size, and the segment's real tokens; int64 [slices] each."""
        laid, mine = self.laid, self.mine
        return mine.start - laid.start[mine.segment], mine.stop - mine.start, laid.real[mine.segment]

    def _edges(self) -> I32:
        """The token after each slice; empty where slices are whole segments, or labels were sent."""
        return _array(self.frames[EDGES], "<i4", len(self.mine.start)) if EDGES in self.frames else _NO_EDGES

    def _field(self, field: Field) -> Column:
        """A copy that may be written to."""
        if field.axis == "sample":
            bounds = self.laid.first_sample.tolist()
        else:
            bounds = self._bounds(1 if field.cp == "replicate" else self.parts)
        shape = (bounds[-1], *field.shape)
        values = _array(self.frames[field.name], field.storage.str, prod(shape)).reshape(shape)
        if field.dtype == "bfloat16":
            return Column(from_bfloat16(values), bounds)
        if field.axis == "sample":
            return Column(values.copy(), bounds)
        kept = np.frombuffer(self.slabs.take(values.nbytes), values.dtype).reshape(shape)
        kept[...] = values
        return Column(kept, bounds)


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
