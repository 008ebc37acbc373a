"""The media of packs: fields of axis item and patch, and media that are fetched while the trainer works.

A sample whose media cannot be had may lose its loss instead of ending the trainer (``Media(on_error="drop")``). Zeros
then stand for the media, and the sample's labels do not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from streampack.core.layout.boundaries import Layouts
from streampack.core.media.media_format import decode
from streampack.core.media.references import Reference, decode_reference
from streampack.core.model.fields import CU_ITEMS, CU_PATCHES, from_bfloat16
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64
from streampack.core.protocol.step_part import StepPart
from streampack.packs.columns import Column, part, rebased


class PendingMedia(Protocol):
    """Media items of a message that are being fetched."""

    def take(self, first: int, stop: int) -> tuple[NDArray[Any], list[int]]:
        """Wait for items [first, stop). Return their values one after another, [patches, ...], and the dropped items.

        Dropped items, numbered from 0 in the message, could not be had; zeros stand for them.
        """


class MediaFetcher(Protocol):
    """Fetches the media that samples refer to."""

    def begin(
        self, field: str, references: Sequence[Reference], patches: Sequence[int], places: Sequence[str]
    ) -> PendingMedia:
        """Begin to fetch the items of a field: their references, their patches, and the samples they belong to."""

    def stats(self) -> dict[str, float]:
        """Return counts by name, for the loader's ``stats``."""

    def close(self) -> None:
        """End all work."""


@dataclass(frozen=True, slots=True)
class PackMedia:
    """The media of a message's packs.

    Attributes:
        received: Values of all packs by name: fields that came with the message, and boundaries.
        pending: Fields that are being fetched.
        items: [packs + 1], items before each pack.
        patches: [packs + 1], patches before each pack.
        item_sample: int64 [items], the sample of each item.
        spans: Function that returns the tokens of samples in the message, as begin and end, int64 [n, 2].
    """

    received: Mapping[str, Column]
    pending: Mapping[str, PendingMedia]
    items: list[int]
    patches: list[int]
    item_sample: I64
    spans: _Spans

    def columns(self, first: int, stop: int) -> tuple[dict[str, Column | list[Any]], list[tuple[int, int]]]:
        """Wait for the media of packs [first, stop). Return their values by name, and the tokens without loss.

        Tokens are counted from the first one of these packs, as begin and end.
        """
        columns: dict[str, Column | list[Any]] = {k: part(column, first, stop) for k, column in self.received.items()}
        dropped = set[int]()
        for name, pending in self.pending.items():
            values, lost = pending.take(self.items[first], self.items[stop])
            columns[name] = Column(values, rebased(self.patches, first, stop))
            dropped.update(lost)
        if not dropped:
            return columns, []
        return columns, self.spans.of(np.unique(self.item_sample[sorted(dropped)]), first)


class _Spans(NamedTuple):
    """Finds the tokens of samples: ``bounds`` [packs + 1] are the tokens before each pack."""

    laid: Layouts
    bounds: list[int]

    def of(self, samples: I64, first: int) -> list[tuple[int, int]]:
        """Return begin and end of some samples, counted from the first token of pack ``first``."""
        laid, spans = self.laid, list[tuple[int, int]]()
        packs = np.searchsorted(laid.first_sample, samples, "right") - 1
        for sample, pack in zip(samples.tolist(), packs.tolist(), strict=True):
            segment = int(laid.first_segment[pack]) + sample - int(laid.first_sample[pack])
            before = self.bounds[pack] - self.bounds[first]
            spans.append((before + int(laid.start[segment]), before + int(laid.stop[segment])))
        return spans


def pack_media(
    part: StepPart, data: Any, rules: Rules, laid: Layouts, bounds: list[int], fetcher: MediaFetcher | None
) -> PackMedia:
    """Check the frame ``data`` of a message's media, and begin to fetch what it refers to.

    ``bounds`` [packs + 1]: tokens before each pack. ``cu_items`` and ``cu_patches`` begin at 0 in each pack.

    Raises:
        ValueError: The media have another size than the message says.
    """
    first = laid.first_sample
    if part.media is msgspec.UNSET:
        raise ValueError("got media without their columns, expected the items and bytes of each sample")
    items, sizes = part.media.arrays(int(first[-1]))
    ends = np.cumsum(sizes)
    view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
    if len(view) != (int(ends[-1]) if len(ends) else 0):
        raise ValueError(f"got {len(view)} bytes of media, expected {int(ends[-1]) if len(ends) else 0}")
    each = [view[begin:end] for begin, end in zip((ends - sizes).tolist(), ends.tolist(), strict=True)]
    media = decode(rules.media_fields, each, items)
    of_items = np.concatenate([[0], np.cumsum(items)])
    of_patches = np.concatenate([[0], np.cumsum(media.patches)])
    at = {"item": of_items[first].tolist(), "patch": of_patches[of_items[first]].tolist()}
    received = {CU_ITEMS: _boundaries(of_items, first), CU_PATCHES: _boundaries(of_patches, of_items[first])}
    pending: dict[str, PendingMedia] = {}
    item_sample = np.repeat(np.arange(len(items)), items)
    for field in rules.media_fields:
        values = media.values[field.name]
        if field.is_reference:
            references = [decode_reference(value) for value in values]
            if fetcher is not None:
                places = _places(part, item_sample, rules)
                pending[field.name] = fetcher.begin(field.name, references, media.patches.tolist(), places)
                continue
            values[:] = references
        values = from_bfloat16(values) if field.dtype == "bfloat16" else values
        received[field.name] = Column(values, at[field.axis])
    return PackMedia(received, pending, at["item"], at["patch"], item_sample, _Spans(laid, bounds))


def _places(part: StepPart, item_sample: I64, rules: Rules) -> list[str]:
    """Return the sample of each media item as text, ``sample stream:index``."""
    streams, indices = np.frombuffer(part.streams_u32, "<u4"), np.frombuffer(part.indices_u64, "<u8")
    names = [stream.name for stream in rules.streams]
    return [
        f"sample {names[stream] if stream < len(names) else stream}:{index}"
        for stream, index in zip(streams[item_sample].tolist(), indices[item_sample].tolist(), strict=True)
    ]


def _boundaries(ends: I64, first: I64) -> Column:
    """Return int32 boundaries for each pack from 0, given ``ends`` of all packs, of which pack i has first[i] on."""
    spans = list(pairwise(first.tolist()))
    cut = [ends[begin : end + 1] - ends[begin] for begin, end in spans]
    bounds = np.concatenate([[0], np.cumsum([len(row) for row in cut])])
    return Column(np.concatenate(cut).astype(np.int32), bounds.tolist())


def regrouped_media(
    packs: Sequence[Mapping[str, NDArray[Any]]], bounds: I64, rules: Rules
) -> list[dict[str, NDArray[Any]]]:
    """Return the fields and boundaries of media for each forward pack; empty if the packs have no media.

    Args:
        packs: The fields of the packs.
        bounds: int64 [forward packs + 1]: forward pack i has samples bounds[i] to bounds[i + 1] of all packs.
        rules: The rules.
    """
    if CU_ITEMS not in packs[0]:
        return [{} for _ in bounds[1:]]
    of_items = np.append(0, np.cumsum(np.concatenate([np.diff(fields[CU_ITEMS]) for fields in packs])))
    of_patches = np.append(0, np.cumsum(np.concatenate([np.diff(fields[CU_PATCHES]) for fields in packs])))
    columns = {}
    for field in rules.media_fields:
        arrays = [fields[field.name] for fields in packs]
        values = np.concatenate([array for array in arrays if len(array)] or arrays[:1])
        columns[field.name] = values, field.axis == "patch" or (field.is_reference and values.dtype != object)
    forward_packs = []
    for begin, end in pairwise(bounds.tolist()):
        items = of_items[begin : end + 1]
        patches = of_patches[items[0] : items[-1] + 1]
        spans = {name: (values, patches if by_patch else items) for name, (values, by_patch) in columns.items()}
        forward_packs.append({
            CU_ITEMS: (items - items[0]).astype(np.int32), CU_PATCHES: (patches - patches[0]).astype(np.int32),
            **{name: values[span[0] : span[-1]].copy() for name, (values, span) in spans.items()},
        })  # fmt: skip
    return forward_packs
