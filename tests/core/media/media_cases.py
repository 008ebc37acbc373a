"""Media of samples as hypothesis draws them: fields of axis item and patch, and their values."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from streampack.core.media.media_format import encode
from streampack.core.model.fields import Field

GRID = Field(name="grid", dtype="int32", axis="item", shape=(3,))
PIXELS = Field(name="pixels", dtype="uint8", axis="patch", shape=(2, 2))
WEIGHT = Field(name="weight", dtype="bfloat16", axis="patch")
SCORE = Field(name="score", dtype="float64", axis="item")


class DrawnMedia(NamedTuple):
    """The media of one sample: patches of each item, and values of each field in the dtype of its storage."""

    patches: NDArray[np.int64]
    values: dict[str, NDArray[Any]]

    def data(self, fields: tuple[Field, ...]) -> bytes:
        return encode(fields, self.patches, self.values)


@st.composite
def media_of_samples(draw: st.DrawFn) -> tuple[tuple[Field, ...], list[DrawnMedia]]:
    fields = tuple(draw(st.lists(st.sampled_from([GRID, PIXELS, WEIGHT, SCORE]), min_size=1, unique=True)))
    counts = draw(st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    found = []
    for patches in counts:
        rows = {"item": len(patches), "patch": sum(patches)}
        values = {
            field.name: rng.integers(0, 200, (rows[field.axis], *field.shape)).astype(field.storage) for field in fields
        }
        found.append(DrawnMedia(np.array(patches, np.int64), values))
    return fields, found
