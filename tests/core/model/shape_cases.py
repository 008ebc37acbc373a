"""Steps of packs of every shape."""

from __future__ import annotations

import numpy as np
from msgspec import UNSET, UnsetType

from streampack.core.form.former import Former
from streampack.core.model.rules import Align, Rules
from streampack.core.model.samples import ROW, SampleTable
from streampack.core.model.shapes import Shape, Sizes
from streampack.core.model.steps import PlannedStep

BUDGET = 48


ALIGN = 4


SHAPES: list[Shape] = ["fixed", "exact", Sizes(multiple=8), Sizes(buckets=(12, 20)), Sizes(buckets=(48,))]


def rules_of_shape(shape: Shape) -> Rules:
    return Rules(budget=BUDGET, packs=6, window=8, align=Align(sample=ALIGN, pack=ALIGN), shape=shape)


def formed(rules: Rules, lengths: list[int], media: bytes | UnsetType = UNSET) -> tuple[SampleTable, list[PlannedStep]]:
    """The steps of samples of these lengths, in order; ``media`` are their columns of ``MEDIA_ROW``."""
    table = SampleTable(8)
    rows = np.zeros(len(lengths), ROW)
    rows["index"], rows["length"] = np.arange(len(lengths)), lengths
    former = Former(rules, table)
    former.admit(table.enter(rows, media=media), np.array(lengths, np.int64))
    former.closed = True
    steps: list[PlannedStep] = []
    while (request := former.request()) is not None:
        steps += former.apply(request.choose())
    return table, steps + former.cut()
