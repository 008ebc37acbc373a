"""What kernels say of a step that was dealt, compiled and as plain Python, against a pack at a time."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.deal.deal_kernels import lay_out, loads

TYPES = {"length": np.int32, "stream": np.int32, "index": np.int64, "part": np.int32}
"""Of a table's columns."""


@pytest.mark.parametrize("kernel", [lay_out.dispatcher, lay_out.plain])
@given(counts=st.lists(st.integers(0, 4), max_size=6), seed=st.integers(0, 2**32 - 1))
def test_packs_are_laid_out_in_the_order_of_their_numbers(
    kernel: Callable[..., Any], counts: list[int], seed: int
) -> None:
    rng, bounds = np.random.default_rng(seed), np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    columns = {name: rng.integers(0, 2**31, 40).astype(dtype) for name, dtype in TYPES.items()}
    columns["index"] <<= 20
    handles, numbers = rng.permutation(40)[: bounds[-1]], rng.permutation(len(counts))
    ends, laid = np.zeros(len(counts), np.int64), np.zeros(len(handles), np.int64)
    said = [np.zeros(len(handles), dtype) for dtype in ("<u4", "<u4", "<u8", "<u4")]
    kernel(numbers, handles, bounds, *columns.values(), ends, laid, *said)
    packs = [handles[bounds[number] : bounds[number + 1]].tolist() for number in numbers]
    assert laid.tolist() == [handle for pack in packs for handle in pack]
    assert ends.tolist() == np.cumsum([len(pack) for pack in packs], dtype=np.int64).tolist()
    for column, got in zip(columns.values(), said, strict=True):
        assert got.tolist() == column[laid].tolist()


@pytest.mark.parametrize("kernel", [loads.dispatcher, loads.plain])
@given(ranks=st.integers(1, 4), micro_batches=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_loads_are_the_sums_of_each_ranks_packs(
    kernel: Callable[..., Any], ranks: int, micro_batches: int, seed: int
) -> None:
    rng, count = np.random.default_rng(seed), ranks * micro_batches
    costs, tokens = rng.integers(0, 3, count) * rng.integers(1, 10**9, count), rng.integers(0, 8193, count)
    dealt = rng.permutation(count).reshape(micro_batches, ranks)
    sums, found = np.zeros((3, ranks), np.int64), np.zeros((3, 3), np.int64)
    ratios, rows = kernel(costs, tokens, dealt, sums, found)
    of_ranks = [costs[dealt].sum(axis=0), tokens[dealt].sum(axis=0), tokens.reshape(dealt.shape).sum(axis=0)]
    assert sums.tolist() == [each.tolist() for each in of_ranks]
    assert found.tolist() == [[each.min(), each.max(), each.sum()] for each in of_ranks]
    some = costs[dealt][costs[dealt].any(axis=1)]
    assert rows == len(some)
    assert ratios == pytest.approx((some.max(axis=1) / some.mean(axis=1)).sum())
