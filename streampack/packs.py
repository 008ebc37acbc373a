"""What a trainer gets: the canonical pack, built in the client from lengths and raw tokens.

Tokens and declared fields travel as they are, the fields that speak of targets shifted; positions,
masks, labels and boundaries are derived here, by the same ``core.layout`` that the broker cut the
shard with. Everything a framework wants is a view of this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from dataclasses import fields as dataclass_fields
from itertools import pairwise
from math import prod
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from streampack.core.fields import LABELS, LOSS_MASK, POSITION_IDS, Field, from_bfloat16
from streampack.core.frames import EDGES, INPUT_IDS, frames_for
from streampack.core.layout import Layouts, Slices, cut, derive_labels, derive_positions, layouts, positions_of
from streampack.core.messages import Attached, Envelope, Mesh, StepPart
from streampack.core.rules import Rules
from streampack.core.samples import I32, I64, IGNORE_INDEX
from streampack.errors import UserError, WireError
from streampack.forward_packs import ForwardPacks
from streampack.regrouping import Regrouping
from streampack.slabs import Slabs

_TOGETHER = 16
"""Packs derived in one go: enough to share numpy's cost by the call, few enough to stay in cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Pack(Mapping[str, Any]):
    """One micro-batch of one rank: attributes, and the same by key (``pack["input_ids"]``, ``**pack``).

    T is the pack's length, T' what this rank holds of it (T / cp, but for the layout ``whole``); boundaries are
    those of the whole pack. Declared fields are keys of their own. A middle stage of a pipeline gets boundaries and
    positions alone: there ``input_ids`` and ``labels`` are None, and no keys. A padded one has its rows one after
    another, slots of ``max_seqlen`` tokens: ``streampack.rows`` gives them.
    """

    input_ids: I64
    """[T'] tokens, 0 at padding."""
    labels: I64
    """[T'] the next token of the same sample, or the label sent with it; -100 at its last real token, at padding
    and where the loss mask is 0."""
    position_ids: NDArray[Any]
    """[T'] from 0 in each sample, and in the tail padding; or as supplied, [T'] or [3, T']."""
    padding_mask: NDArray[np.bool_]
    """[T'] True at padding."""
    cu_seqlens: I32
    """[num_segments + 1] boundaries of real tokens."""
    cu_seqlens_padded: I32
    """[num_segments + 1] boundaries of storage: what kernels that take one array need."""
    max_seqlen: int
    """The widest slot, in tokens."""
    num_samples: int
    num_segments: int
    """One more than samples where there is tail padding."""
    sample_ids: I64
    """[num_samples, 3] stream number, index, part."""
    num_loss_tokens: int
    """Labels that count, over the whole pack."""
    step: int
    micro_batch: int
    dp_rank: int
    pack: int
    """Its number in the step, the same on every mesh; but of padded ones micro_batch * dp + dp_rank."""
    slices: I64
    """[k, 2] the parts [start, stop) of the whole pack that this rank holds, in its order."""
    fields: Mapping[str, NDArray[Any]]
    """Declared fields by name: [T', ...] by token ([T, ...] where replicated; shifted where they speak of targets),
    [num_samples, ...] by sample. bfloat16 as float32."""
    layout: str
    """``zigzag``, ``zigzag_pack``, ``contiguous`` or ``whole``."""
    cp: int
    cp_rank: int

    __eq__ = object.__eq__  # a Mapping's would compare arrays
    __hash__ = object.__hash__

    def positions(self) -> I64:
        """[T'] where in the whole pack each token lies."""
        return positions_of(self.slices[:, 0], self.slices[:, 1])

    def __getitem__(self, key: str) -> Any:
        if key in self.fields:
            return self.fields[key]
        value = getattr(self, key) if key in _KEYS else None
        if value is None:
            raise KeyError(key)
        return value

    def __iter__(self) -> Iterator[str]:
        yield from (key for key in _KEYS if getattr(self, key) is not None)
        yield from self.fields

    def __len__(self) -> int:
        return sum(1 for _ in self)


_KEYS = tuple(field.name for field in dataclass_fields(Pack) if field.name != "fields")


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer update's micro-batches for one rank, with the denominators of all ranks."""

    index: int
    packs: tuple[Any, ...]
    """Packs, or views of them, as ``connect``'s format says."""
    num_loss_tokens: int
    """Labels that count, over all ranks and micro-batches: divide the summed loss by it."""
    num_samples: int
    digest: str
    """32 hex digits: equal on all ranks, meshes and restarts for the same samples."""
    chain: str
    """Digest of this step and all before it."""
    regrouping: Regrouping | None = dataclass_field(default=None, repr=False, compare=False)
    """What ``regroup`` knows of it."""

    def regroup(self, budget: SupportsIndex, *, min_packs: SupportsIndex = 1) -> ForwardPacks:
        """Forward packs of up to ``budget`` tokens, in the step's format: its samples on this rank, in its order, for
        passes without gradients. ``ForwardPacks.tokens_back`` gives what was computed back to the micro-batches.

        With the run's budget or more, M micro-batches become ceil(M / (budget // the run's)) packs: as many on every
        rank. With less their number is each rank's own, and ranks that run collectives together give all the most that
        any of them has as ``min_packs``, which adds empty ones. ``micro_batch`` and ``pack`` are a forward pack's
        number on its rank; ``num_loss_tokens`` is -1 where it has a part of a pack whose labels other ranks hold, too.

        Raises UserError for a budget that does not hold every sample, for padded micro-batches, and for layouts whose
        parts of a joined pack this rank does not hold (``zigzag_pack``, ``contiguous``, with cp > 1).

        >>> forward = step.regroup(budget=32768)  # doctest: +SKIP
        >>> old = forward.tokens_back({pack: logprobs(pack) for pack in forward})  # doctest: +SKIP
        """
        if self.regrouping is None:
            raise UserError("got a step that no loader has made, expected one of loader.steps()")
        return self.regrouping.regroup(budget, min_packs)

    @property
    def sample_ids(self) -> I64:
        """[samples of this rank's packs, 3] stream number, index, part: for the trainer's own log."""
        return np.concatenate([np.zeros((0, 3), np.int64), *(np.asarray(pack.sample_ids) for pack in self.packs)])

    def __iter__(self) -> Iterator[Any]:
        return iter(self.packs)

    def __getitem__(self, micro_batch: int) -> Any:
        return self.packs[micro_batch]

    def __len__(self) -> int:
        return len(self.packs)


def build_step(parts: Sequence[Envelope], attached: Attached, mesh: Mesh, slabs: Slabs) -> Step:
    """A step from its parts, its arrays in memory of ``slabs``.

    Raises WireError if what the broker sent breaks an invariant.
    """
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
            packs += _build_packs(message, envelope.payload, attached, mesh, slabs)
        except ValueError as error:
            raise WireError(f"got step {message.step}, which cannot be laid out: {error}") from None
    if first is None or len(packs) != first.micro_batches:
        raise WireError(f"got {len(packs)} micro-batches, expected {first.micro_batches if first else 'some'}")
    return Step(
        first.step, tuple(packs), first.num_loss_tokens, first.num_samples, first.digest.hex(), first.chain.hex(),
        Regrouping(tuple(packs), attached.rules, mesh.pp),
    )  # fmt: skip


def _build_packs(part: StepPart, payload: Sequence[Any], attached: Attached, mesh: Mesh, slabs: Slabs) -> list[Pack]:
    rules, layout = attached.rules, attached.layout
    expected = frames_for(rules.fields, mesh, layout)
    if part.frames != expected or len(payload) != len(expected):
        raise WireError(f"got payload frames {part.frames} ({len(payload)} of them), expected {expected}")
    frames = dict(zip(part.frames, payload, strict=True))
    num_packs = len(part.counts_u32) // 4
    counts = _array(part.counts_u32, "<u4", num_packs).astype(np.int64)
    num_samples = int(counts.sum())
    lengths = _array(part.lengths_u32, "<u4", num_samples).astype(np.int64)
    loss = _array(part.loss_tokens_u32, "<u4", num_packs).tolist()
    numbers = _array(part.packs_u32, "<u4", num_packs).tolist()
    columns = ((part.streams_u32, "<u4"), (part.indices_u64, "<u8"), (part.parts_u32, "<u4"))
    ids = np.stack([_array(data, dtype, num_samples).astype(np.int64) for data, dtype in columns], axis=1)
    widths, aligns = part.widths(rules), part.aligns(rules)
    reader = _Frames(frames, rules, widths, 1 if layout == "whole" else mesh.cp, num_samples)
    packs: list[Pack] = []
    last = 0
    for at in range(0, num_packs, _TOGETHER):
        stop = min(at + _TOGETHER, num_packs)
        first, last = last, last + int(counts[at:stop].sum())
        laid = layouts(lengths[first:last], counts[at:stop], aligns[at:stop], widths[at:stop])
        mine = cut(laid, mesh.cp, mesh.cp_rank, layout)
        arrays, fields = reader.read(at, stop, first, laid, mine, slabs)
        slices = np.stack([mine.start, mine.stop], axis=1)
        bounds, samples = mine.first.tolist(), (laid.first_sample + first).tolist()
        widest = np.maximum.reduceat(laid.stop - laid.start, laid.first_segment[:-1]).tolist()
        for i, pack in enumerate(laid.packs()):
            packs.append(
                Pack(
                    input_ids=arrays["input_ids"][i],
                    labels=arrays["labels"][i],
                    position_ids=arrays["position_ids"][i],
                    padding_mask=arrays["padding_mask"][i],
                    cu_seqlens=pack.cu_seqlens,
                    cu_seqlens_padded=pack.cu_seqlens_padded,
                    max_seqlen=widest[i],
                    num_samples=pack.num_samples,
                    num_segments=pack.num_segments,
                    sample_ids=ids[samples[i] : samples[i + 1]],
                    num_loss_tokens=loss[at + i],
                    step=part.step,
                    micro_batch=part.first + at + i,
                    dp_rank=mesh.dp_rank,
                    pack=numbers[at + i],
                    slices=slices[bounds[i] : bounds[i + 1]],
                    fields={name: rows[i] for name, rows in fields.items()},
                    layout=layout,
                    cp=mesh.cp,
                    cp_rank=mesh.cp_rank,
                )
            )
    return packs


class _Frames:
    """The payload of one message, read a few packs at a time; ``widths`` int64 [packs] is T of each, of which the rank
    holds 1 / ``parts``."""

    def __init__(self, frames: dict[str, Any], rules: Rules, widths: I64, parts: int, num_samples: int) -> None:
        self._whole = np.concatenate([[0], np.cumsum(widths)])
        self._held = self._whole // parts
        self._tokens = self._edges = None
        if INPUT_IDS in frames:
            self._tokens = _array(frames[INPUT_IDS], rules.tokens, int(self._held[-1]))
        if EDGES in frames:
            self._edges = np.frombuffer(frames[EDGES], "<i4")
        self._edges_read = 0
        self._values = {}
        for field in rules.fields:
            if field.name not in frames:
                continue
            count = num_samples if field.axis == "sample" else int(self._bounds(field)[-1])
            flat = _array(frames[field.name], field.storage.str, count * prod(field.shape))
            self._values[field] = flat.reshape(count, *field.shape)

    def read(
        self, at: int, stop: int, first: int, laid: Layouts, mine: Slices, slabs: Slabs
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """(what every pack has, declared fields) of packs ``at`` to ``stop``, a row a pack, in memory of ``slabs``.

        They begin with sample ``first`` of the message; ``mine`` are the rank's slices of them.
        """
        count, held = stop - at, self._held[at : stop + 1] - self._held[at]
        begin, size = int(self._held[at]), int(held[-1])
        slab = slabs.take(25 * size)
        position_ids, input_ids, labels = np.frombuffer(slab, np.int64, 3 * size).reshape(3, size)
        padding_mask = np.frombuffer(slab, np.bool_, size, 24 * size)
        places = mine.start - laid.start[mine.segment], mine.stop - mine.start, laid.real[mine.segment]
        padding = derive_positions(*places, position_ids, padding_mask)
        fields = {field.name: self._field(field, at, stop, first, laid, slabs) for field in self._values}
        arrays: dict[str, Any] = {
            "input_ids": [None] * count, "labels": [None] * count,
            "position_ids": _rows(position_ids, held), "padding_mask": _rows(padding_mask, held),
        }  # fmt: skip
        if POSITION_IDS in fields:
            arrays[POSITION_IDS] = [np.ascontiguousarray(row.T, np.int64) for row in fields.pop(POSITION_IDS)]
        if self._tokens is not None:
            input_ids[:] = self._tokens[begin : begin + size]
            if LABELS in fields:
                for row, given in zip(_rows(labels, held), fields.pop(LABELS), strict=True):
                    row[:] = given
                labels[padding] = IGNORE_INDEX
            else:
                derive_labels(input_ids, *places, self._next_edges(len(mine.start)), padding, labels)
            for row, mask in zip(_rows(labels, held), fields.get(LOSS_MASK, ()), strict=LOSS_MASK in fields):
                row[mask == 0] = IGNORE_INDEX
            arrays["input_ids"], arrays["labels"] = _rows(input_ids, held), _rows(labels, held)
        return arrays, fields

    def _bounds(self, field: Field) -> I64:
        """Where each pack's rows of a field of axis ``token`` begin, and the last one's end, int64 [packs + 1]."""
        return self._whole if field.cp == "replicate" else self._held

    def _field(self, field: Field, at: int, stop: int, first: int, laid: Layouts, slabs: Slabs) -> list[NDArray[Any]]:
        """One field of each pack, a copy that may be written to."""
        bounds = self._bounds(field)[at : stop + 1] if field.axis == "token" else laid.first_sample + first
        values = self._values[field][bounds[0] : bounds[-1]]
        rows: NDArray[Any]
        if field.dtype == "bfloat16":
            rows = from_bfloat16(values)
        elif field.axis == "sample":
            rows = values.copy()
        else:
            rows = np.frombuffer(slabs.take(values.nbytes), values.dtype).reshape(values.shape)
            rows[...] = values
        return _rows(rows, bounds - bounds[0])

    def _next_edges(self, count: int) -> I32 | None:
        """The next ``count`` slices' edges. Raises ValueError if the message holds fewer."""
        if self._edges is None:
            return None
        found = self._edges[self._edges_read : self._edges_read + count]
        if len(found) < count:
            raise ValueError(f"got {len(self._edges)} edges, expected one a slice")
        self._edges_read += count
        return found


def _rows(values: NDArray[Any], bounds: I64) -> list[NDArray[Any]]:
    """``values`` of each pack: views from ``bounds[i]`` to ``bounds[i + 1]``."""
    return [values[begin:end] for begin, end in pairwise(bounds.tolist())]


def _array(data: Any, dtype: str, count: int) -> NDArray[Any]:
    """``data`` as [count] of ``dtype``, not copied. Raises ValueError for another size."""
    got, expected = memoryview(data).nbytes, count * np.dtype(dtype).itemsize
    if got != expected:
        raise ValueError(f"got {got} bytes, expected {count} numbers of {dtype}, {expected} bytes")
    return np.frombuffer(data, dtype)
