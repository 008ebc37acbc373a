"""The samples that were dropped, in ranges: the same as a dict of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streampack.core.staging import dropped_samples
from streampack.core.staging.dropped_samples import DroppedSamples

DROPS = st.lists(st.tuples(st.lists(st.integers(0, 40), max_size=8), st.sampled_from(["a", "b"])), max_size=12)


@given(DROPS)
def test_ranges_know_what_a_dict_knows(drops: list[tuple[list[int], str]]) -> None:
    found, expected = DroppedSamples(), dict[int, str]()
    for seqs, reason in drops:
        before = len(expected)
        expected = dict.fromkeys(seqs, reason) | expected
        assert found.add(seqs, [reason]) == len(expected) - before
    assert {seq: found.reason(seq) for seq in range(42)} == {seq: expected.get(seq, "") for seq in range(42)}
    borders = [(first, stop) for first, stop, _ in found.ranges]
    assert borders == sorted(borders)
    for (_, stop, reason), (first, _, other) in zip(found.ranges, found.ranges[1:], strict=False):
        assert stop < first or (stop == first and reason != other), "ranges that could be one"


def test_the_lowest_ranges_are_forgotten_first() -> None:
    found = DroppedSamples()
    found.add(range(0, 4 * dropped_samples.MOST_RANGES, 2), ["a"])
    assert len(found.ranges) == dropped_samples.MOST_RANGES
    assert not found.reason(0)
    assert found.reason(4 * dropped_samples.MOST_RANGES - 2) == "a"


def test_several_reasons_and_none_have_a_word() -> None:
    found = DroppedSamples()
    found.add([1], {"dtype": 1, "empty": 2})
    found.add([3], {})
    assert (found.reason(1), found.reason(3)) == ("dtype or empty", "rejected")
