"""Packs, flat: cut and put together again they are what they were."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.model.steps import PlannedPacks

COUNTS = st.lists(st.integers(0, 4), max_size=8)


def packs_of(counts: list[int], first: int = 0) -> PlannedPacks:
    """Packs of so many samples, whose handles count from ``first`` on; no two have the same sums or digest."""
    bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    sums = 1000 * first + np.arange(4 * len(counts), dtype=np.int64).reshape(4, -1)
    digests = [bytes([i]) * 16 for i in range(len(counts))]
    return PlannedPacks(first + np.arange(bounds[-1], dtype=np.int64), bounds, sums, digests)


def said(packs: PlannedPacks) -> list[tuple[Any, ...]]:
    return [
        (p.handles.tolist(), p.num_tokens, p.num_slot_tokens, p.num_loss_tokens, p.cost, p.digest) for p in packs
    ]  # fmt: skip


@given(COUNTS, COUNTS)
def test_packs_behind_others_follow_them(first: list[int], second: list[int]) -> None:
    one, other = packs_of(first), packs_of(second, 100)
    both = PlannedPacks.joined([one, other])
    assert said(both) == said(one) + said(other)
    assert len(both) == len(first) + len(second)
    assert both.counts.tolist() == first + second
    assert (both.bounds[0], both.bounds[-1]) == (0, len(both.handles))


@given(COUNTS, st.data())
def test_packs_that_are_cut_are_the_same_in_two(counts: list[int], data: st.DataObject) -> None:
    packs, at = packs_of(counts), data.draw(st.integers(0, len(counts)))
    before, behind = packs.cut(at)
    assert (said(before), said(behind)) == (said(packs)[:at], said(packs)[at:])
    assert said(PlannedPacks.joined([before, behind])) == said(packs)
    for part in (before, behind):
        assert (part.bounds[0], part.bounds[-1]) == (0, len(part.handles))


@given(COUNTS)
def test_one_of_them_is_the_pack_of_that_number(counts: list[int]) -> None:
    packs = packs_of(counts)
    rows = zip(packs.tokens, packs.slots, packs.loss_tokens, packs.costs, packs.digests, strict=True)
    sums = [(p.num_tokens, p.num_slot_tokens, p.num_loss_tokens, p.cost, p.digest) for p in packs]
    assert sums == [tuple(row) for row in rows]
    assert said(packs)[::-1] == [said(packs)[i] for i in range(-1, -len(packs) - 1, -1)]
    assert [packs[i].digest for i in range(-len(packs), 0)] == packs.digests


def test_an_empty_pack_holds_nothing_and_has_the_digest_of_nothing() -> None:
    assert said(PlannedPacks.empty(2)) == [([], 0, 0, 0, 0, bytes.fromhex("cae66941d9efbd404e4d88758ea67670"))] * 2
    assert not PlannedPacks.empty()
