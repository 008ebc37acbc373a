"""The tokens that lose their loss because a sample's media could not be had, wherever the sample is in a message."""

from __future__ import annotations

import numpy as np
import pytest

from streampack.core.layout.boundaries import layouts
from streampack.packs.pack_media import PackMedia, _Spans


class Lost:
    """Items of which one could not be had."""

    def __init__(self, lost: int) -> None:
        self.lost = lost

    def take(self, first: int, stop: int) -> tuple[np.ndarray, list[int]]:
        return np.zeros((stop - first, 2)), [self.lost] if first <= self.lost < stop else []


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("lost", range(5))
def test_tokens_count_from_the_first_pack_that_is_made(first: int, lost: int) -> None:
    """Three packs of ten tokens with two, one and two samples; each sample has one item of one patch."""
    laid = layouts(np.array([3, 4, 10, 5, 2]), np.array([2, 1, 2]), 1, np.array([10, 10, 10]))
    items = [0, 2, 3, 5]
    media = PackMedia({}, {"pixels": Lost(lost)}, items, items, np.arange(5), _Spans(laid, [0, 10, 20, 30]))
    begin, length = [(0, 3), (3, 4), (10, 10), (20, 5), (25, 2)][lost]
    expected = [(begin - 10 * first, begin - 10 * first + length)] if lost >= items[first] else []
    assert media.columns(first, 3)[1] == expected
