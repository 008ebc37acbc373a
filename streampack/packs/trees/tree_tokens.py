"""Derives the arrays of packs whose samples share tokens, as ``build`` does for other packs.

A message brings a value for each token that is computed, T, of ids and of fields with ``align: token``. It brings a
value for each token of each sample, P, of fields with ``align: target``. A loss needs P values, too: the token after a
shared one differs by sample. So labels have P values, and ``path_index`` has the place in the pack of each of them.

P is the sum of the samples' lengths, and one more if that would be T: then shapes alone tell values of both kinds
apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from streampack.core.layout.boundaries import Layouts
from streampack.core.layout.labels import derive_positions
from streampack.core.model.fields import LABELS, LOSS_MASK, POSITION_IDS, Field, from_bfloat16
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64, IGNORE_INDEX
from streampack.core.protocol.step_part import StepPart
from streampack.core.trees.shared_prefixes import check_shared, path_index
from streampack.packs.columns import Column, part, rebased


def depths_of(part: StepPart, rules: Rules, parts: int) -> I64 | None:
    """Return the tokens that each sample shares with the sample before it, int64 [n]; None if the run has no trees.

    ``parts``: this rank holds 1 / parts of each pack. Raises ValueError for a column that makes no tree.
    """
    if rules.share is None:
        if part.shared_u32 is not UNSET:
            raise ValueError("got samples that share tokens, expected none without `share: prefix`")
        return None
    if parts > 1:
        raise ValueError(f"got a shard of a pack whose samples share tokens (cp={parts}), expected whole packs")
    lengths = np.frombuffer(part.lengths_u32, "<u4").astype(np.int64)
    if part.shared_u32 is UNSET:
        return np.zeros(len(lengths), np.int64)
    if len(part.shared_u32) != len(part.lengths_u32):
        raise ValueError(f"got {len(part.shared_u32)} bytes of shared tokens, expected {len(part.lengths_u32)}")
    depths = np.frombuffer(part.shared_u32, "<u4").astype(np.int64)
    counts = np.frombuffer(part.counts_u32, "<u4").astype(np.int64)
    check_shared(depths, lengths, (np.cumsum(counts) - counts)[counts > 0])
    return depths


@dataclass(frozen=True, slots=True)
class TreeTokens:
    """Tokens and declared fields of one message as received, for packs whose samples share tokens."""

    input_ids: NDArray[Any] | None
    """Token ids of all packs; None in the middle stages of a pipeline."""
    fields: Sequence[tuple[Field, Column]]
    """Declared fields with their values of all packs, those with ``align: target`` by the samples' whole lengths."""
    bounds: list[int]
    """[packs + 1] index of each pack's first token, and the end of the last pack."""
    laid: Layouts
    """The layout of the packs, where a sample is as long as its own tokens."""
    depths: I64
    """int64 [samples] tokens that each sample shares with the sample before it."""
    positions: Callable[[Column], Column | list[Any]]
    """Turns supplied positions into the form that packs have."""

    @property
    def row_bounds(self) -> list[int]:
        """[packs + 1] number of the first of the samples' whole tokens in each pack, and the end of the last pack."""
        whole = np.append(0, np.cumsum(self.laid.lengths + self.depths))
        bounds: list[int] = whole[self.laid.first_sample].tolist()
        return bounds

    def columns(self, first: int, stop: int) -> tuple[dict[str, Column | list[Any]], dict[str, Column | list[Any]]]:
        """Return the derived arrays of packs [first, stop), and their declared fields, as columns by name."""
        laid, begin = self.laid, self.bounds[first]
        bounds = rebased(self.bounds, first, stop)
        position_ids, padding_mask = np.empty(bounds[-1], np.int64), np.empty(bounds[-1], np.bool_)
        span = slice(laid.first_segment[first], laid.first_segment[stop])
        before = self._before_segments()[span]
        derive_positions(before, (laid.stop - laid.start)[span], laid.real[span] + before, position_ids, padding_mask)
        paths = [self._path_of(pack) for pack in range(first, stop)]
        sizes = [len(path) for path in paths]
        extra = [size == high - low for size, (low, high) in zip(sizes, pairwise(bounds), strict=True)]
        extended = [np.append(path, 0) if more else path for path, more in zip(paths, extra, strict=True)]
        path_bounds = np.cumsum([0, *map(len, extended)]).tolist()
        places = np.concatenate(extended)
        of_samples = self._cu_paths(first, stop)
        fields = {field.name: self._field(field, part(column, first, stop), extra) for field, column in self.fields}
        sent, supplied = fields.pop(LABELS, None), fields.pop(POSITION_IDS, None)
        tokens: dict[str, Column | list[Any]] = {
            "position_ids": Column(position_ids, bounds) if supplied is None else self.positions(supplied),
            "padding_mask": Column(padding_mask, bounds),
            "path_index": Column(places, path_bounds),
            "cu_paths": of_samples,
        }
        if self.input_ids is None:
            return tokens | dict.fromkeys(("input_ids", "labels"), [None] * (stop - first)), dict(fields)
        ids = self.input_ids[begin : begin + bounds[-1]].astype(np.int64)
        labels = np.full(len(places), IGNORE_INDEX, np.int64)
        if sent is not None:
            labels[:] = sent.values
        else:
            whole = ids[places + np.repeat(bounds[:-1], np.diff(path_bounds))]
            labels[:-1] = whole[1:]
        ends = np.concatenate([
            low + rows[1:] - 1 for low, rows in zip(path_bounds, of_samples.rows(), strict=False)
        ])  # fmt: skip
        labels[ends] = IGNORE_INDEX
        labels[[high - 1 for high, more in zip(path_bounds[1:], extra, strict=True) if more]] = IGNORE_INDEX
        if LOSS_MASK in fields:
            labels[fields[LOSS_MASK].values == 0] = IGNORE_INDEX
        tokens |= {"input_ids": Column(ids, bounds), "labels": Column(labels, path_bounds)}
        return tokens, dict(fields)

    def _before_segments(self) -> I64:
        """Return the shared tokens before each segment, int64 [segments]; 0 for padding at the end of a pack."""
        laid = self.laid
        before = np.zeros(len(laid.real), np.int64)
        before[laid.real > 0] = self.depths
        return before

    def _path_of(self, pack: int) -> I64:
        """Return the place in a pack of each token of its samples, int64 [sum of lengths]."""
        laid = self.laid
        a, b, c = laid.first_sample[pack], laid.first_sample[pack + 1], laid.first_segment[pack]
        depths = self.depths[a:b]
        return path_index(depths, laid.lengths[a:b] + depths, laid.start[c : c + b - a])

    def _cu_paths(self, first: int, stop: int) -> Column:
        """Return ``cu_paths`` of packs [first, stop): [samples + 1] for each pack."""
        laid, at = self.laid, self.laid.first_sample[first : stop + 1]
        whole = laid.lengths[at[0] : at[-1]] + self.depths[at[0] : at[-1]]
        of_packs = pairwise((at - at[0]).tolist())
        sums = [np.append(0, np.cumsum(whole[a:b])).astype(np.int32) for a, b in of_packs]
        return Column(np.concatenate(sums), np.cumsum([0, *map(len, sums)]).tolist())

    def _field(self, field: Field, column: Column, extra: list[bool]) -> Column:
        """Return a writable copy of a declared field, bfloat16 as float32; a target gets the rows that make P."""
        values, bounds = column.values.copy(), np.array(column.bounds)
        if field.align == "target" and any(extra):
            values = np.insert(values, bounds[1:][extra], field.fill(field.pad), axis=0)
            bounds += np.append(0, np.cumsum(extra))
        if field.dtype == "bfloat16":
            values = from_bfloat16(values)
        return Column(values, bounds.tolist())
