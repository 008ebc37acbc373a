"""Static shapes: boundaries and samples' fields of one size in all packs, so that one compilation serves them.

A pack of a run with ``shape: fixed`` has budget tokens, but as many boundaries as samples. Here each pack has room for
``max_samples_per_pack`` samples and a tail. The segments that a pack lacks are empty, at its end: attention kernels
take boundaries that do not rise. ``max_seqlen`` is the budget, since a number that changes would also be compiled anew.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.columns.step_columns import IN_PACKS
from streampack.core.model.rules import Rules
from streampack.errors import UserError
from streampack.packs.columns import Column, Columns
from streampack.packs.columns import rows as rows_of

FORMATS = ("thd", "hf", "hf_shifted")
"""Formats that can have static shapes. The boundaries of the others go to code that does not expect empty segments."""


def check_static_shapes(format: str, rules: Rules) -> None:
    """Raise UserError for a format or for rules that cannot have static shapes."""
    if format not in FORMATS:
        raise UserError(f"got static_shapes with format {format!r}, expected one of: {', '.join(FORMATS)}")
    wrong = None
    if rules.padded:
        wrong = "`rules.padded`, expected packs"
    elif rules.shape != "fixed":
        wrong = f"`rules.shape: {rules.shape}`, expected `rules.shape: fixed`"
    elif rules.max_samples_per_pack is None:
        wrong = "a feed without `max_samples_per_pack`, expected the most samples of a pack, as room for boundaries"
    if wrong:
        raise UserError(f"got static_shapes for {wrong}. Change broker.yaml, or connect without static_shapes")


def with_static_shapes(columns: Columns, rules: Rules) -> Columns:
    """Return the same packs with boundaries and samples' fields of the sizes that the rules allow for.

    - ``cu_seqlens``, ``cu_seqlens_padded``: int32 [max_samples_per_pack + 2], the last value repeated.
    - ``max_seqlen``: the budget.
    - Fields of axis ``sample``: [max_samples_per_pack, ...], padded with the field's ``pad``.
    - Columns of samples (``IN_PACKS``) and ``cu_paths`` likewise, with 0 and with the last value. Values of paths [P]
      keep their sizes.
    """
    samples = rules.max_samples_per_pack
    assert samples is not None, "as check_static_shapes has found"
    attributes = dict(columns.attributes)
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        attributes[name] = _widened(columns.attributes[name], samples + 2, None)
    for name in attributes.keys() & IN_PACKS:
        attributes[name] = _widened(columns.attributes[name], samples, 0)
    if "cu_paths" in attributes:
        attributes["cu_paths"] = _widened(columns.attributes["cu_paths"], samples + 1, None)
    attributes["max_seqlen"] = [rules.budget] * columns.count
    pads = {field.name: field.pad for field in rules.fields if field.axis == "sample"}
    fields = {
        name: _widened(column, samples, pads[name]) if name in pads else column
        for name, column in columns.fields.items()
    }
    return replace(columns, attributes=attributes, fields=fields)


def _widened(column: Column | list[Any], size: int, pad: float | None) -> Column:
    """Return the rows of a column with ``size`` entries each, filled with ``pad`` or with each row's last entry."""
    rows: list[NDArray[Any]] = rows_of(column)
    values = np.empty((len(rows), size, *rows[0].shape[1:]), rows[0].dtype)
    for into, row in zip(values, rows, strict=True):
        into[: len(row)] = row
        into[len(row) :] = row[-1] if pad is None else pad
    return Column(values.reshape(-1, *values.shape[2:]), range(0, len(rows) * size + 1, size))
