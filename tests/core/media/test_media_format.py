"""The media of samples as bytes: what is encoded is decoded, and nothing else is taken."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.media.media_counts import MediaColumns, over_limits, read_media
from streampack.core.media.media_format import check, decode, encode, num_bytes
from streampack.core.model.fields import Field
from streampack.core.model.keys.planning_keys import MediaLimits
from tests.core.media.media_cases import GRID, PIXELS, WEIGHT, DrawnMedia, media_of_samples

Drawn = tuple[tuple[Field, ...], list[DrawnMedia]]


@given(media_of_samples())
def test_decoded_media_are_those_of_each_sample(drawn: Drawn) -> None:
    fields, samples = drawn
    data = [each.data(fields) for each in samples]
    items = np.array([len(each.patches) for each in samples], np.int64)
    for each, sent in zip(samples, data, strict=True):
        assert len(sent) == num_bytes(fields, len(each.patches), int(each.patches.sum()))
    found = decode(fields, data, items)
    assert found.patches.tolist() == [count for each in samples for count in each.patches.tolist()]
    for field in fields:
        parts = [each.values[field.name] for each in samples if len(each.patches)]
        expected = np.concatenate([np.zeros((0, *field.shape), field.storage), *parts])
        assert found.values[field.name].dtype == field.storage
        assert np.array_equal(found.values[field.name], expected)


@given(media_of_samples(), st.data())
def test_media_of_another_size_are_refused(drawn: Drawn, data: st.DataObject) -> None:
    fields, samples = drawn
    with_items = [each for each in samples if len(each.patches)]
    if not with_items:
        return
    media = data.draw(st.sampled_from(with_items))
    sent, items = media.data(fields), len(media.patches)
    assert check(fields, sent, items).tolist() == media.patches.tolist()
    for damaged, count in (
        (sent[:-1], items),
        (sent + b"\0", items),
        (b"", items),
        (sent, len(sent)),
        (sent, 2**16 + 1),
    ):
        with pytest.raises(ValueError, match="got "):
            check(fields, damaged, count)


def test_golden_bytes_of_media_are_held_still() -> None:
    values = {
        "grid": np.array([[1, 2, 1], [1, 1, 1]], "<i4"), "pixels": np.arange(12, dtype=np.uint8).reshape(3, 2, 2),
        "weight": np.array([0x3F80, 0, 0x4000], "<u2"),
    }  # fmt: skip
    found = encode((GRID, PIXELS, WEIGHT), np.array([2, 1]), values)
    assert found.hex() == (
        "0200000001000000"  # patches of two items
        "010000000200000001000000010000000100000001000000"  # grid
        "000102030405060708090a0b"  # pixels
        "803f00000040"  # weight
    )
    assert encode((GRID, PIXELS, WEIGHT), np.zeros(0, np.int64), values) == b""


@given(media_of_samples(), st.tuples(*[st.integers(0, 99)] * 3))
def test_a_chunk_is_counted_by_its_items(drawn: Drawn, factors: tuple[int, int, int]) -> None:
    fields, samples = drawn
    data = [each.data(fields) for each in samples]
    counts = np.array([[len(each.patches), len(sent)] for each, sent in zip(samples, data, strict=True)], "<u4")
    frames = (counts.tobytes(), b"".join(data))
    found = read_media(frames, len(samples), fields, factors)
    a, b, c = factors
    assert found.items.tolist() == [len(each.patches) for each in samples]
    assert found.patches.tolist() == [int(each.patches.sum()) for each in samples]
    assert found.costs.tolist() == [sum(a * p + b * p * p + c for p in each.patches.tolist()) for each in samples]
    assert np.diff(found.bounds).tolist() == list(map(len, data))
    limits = MediaLimits(items=2, patches=6)
    over = [len(each.patches) > 2 or each.patches.sum() > 6 for each in samples]
    assert over_limits(found, limits).tolist() == over
    columns = MediaColumns(*(column.tobytes() for column in counts.reshape(-1, 2).T))
    assert [each.tolist() for each in columns.arrays(len(samples))] == counts.reshape(-1, 2).T.tolist()
    for wrong in ((frames[0], frames[1] + b"x"), (frames[0] + b"x", frames[1]), frames[:1]):
        with pytest.raises(ValueError, match="got "):
            read_media(wrong, len(samples), fields, factors)


def test_bytes_without_items_are_refused() -> None:
    counts = np.array([[0, 4]], "<u4").tobytes()
    with pytest.raises(ValueError, match="got media of a sample without items"):
        read_media((counts, b"1234"), 1, (GRID,), (0, 0, 0))
    with pytest.raises(ValueError, match="got 5 and 4 bytes of media columns, expected 4"):
        MediaColumns(b"12345", b"1234").arrays(1)


def test_a_sample_of_more_patches_than_its_cost_can_count_is_refused() -> None:
    with pytest.raises(ValueError, match="got a sample with 4294967295 patches"):
        check((GRID,), np.array([2**32 - 1], "<u4").tobytes() + bytes(12), 1)
