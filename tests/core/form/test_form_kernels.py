"""What kernels do for each step, compiled and as plain Python, against lists and rows."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.form.form_kernels import describe, take_out
from streampack.core.model.keys.planning_keys import Balance
from streampack.core.model.samples import ROW, SampleTable
from streampack.core.model.steps import digests_of, pack_digests

GUARD = 7777
"""What outputs hold before."""


@pytest.mark.parametrize("kernel", [describe.dispatcher, describe.plain])
@given(
    counts=st.lists(st.integers(0, 4), max_size=6), seed=st.integers(0, 2**32 - 1), align=st.integers(1, 9),
    sliding=st.none() | st.tuples(st.integers(1, 2**21), st.integers(0, 4095)),
)  # fmt: skip
def test_packs_have_the_sums_and_the_digests_of_their_rows(
    kernel: Callable[..., Any], counts: list[int], seed: int, align: int, sliding: tuple[int, int] | None
) -> None:
    rng, bounds = np.random.default_rng(seed), np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    rows = np.zeros(int(bounds[-1]), ROW)
    for name in ROW.names or ():
        rows[name] = rng.integers(0, np.iinfo(ROW[name]).max, len(rows), endpoint=True)
    rows["length"] %= 2**20
    table = SampleTable(len(rows) + 3)
    table.take(3)
    handles = table.enter(rows)
    shared = rng.integers(0, rows["length"], endpoint=True) if align == 1 else np.zeros(len(rows), np.int64)
    media = rng.integers(0, 2**40, len(rows))
    sums, identities = np.full((4, len(counts)), GUARD), np.full((len(rows), 6), GUARD, np.uint32)
    balance = Balance(a=3, b=2, sliding=sliding)
    kernel(
        handles, bounds, table.stream, table.index, table.part, table.length, table.loss_tokens, table.crc,
        shared.astype(np.int64), media, align, *balance.factors, *balance.window_factors, sums, identities,
    )  # fmt: skip
    own = (rows["length"] - shared).tolist()
    slots = [-(-length // align) * align for length in own]
    every = zip(slots, shared.tolist(), media.tolist(), strict=True)
    costs = [3 * s + 2 * s * (2 * depth + s) + more for s, depth, more in every]
    if sliding is not None:
        costs = (balance.costs(np.array(slots, np.int64), shared) + media).tolist()
    columns = [own, slots, rows["loss_tokens"].tolist(), costs]
    spans = list(zip(bounds.tolist(), bounds[1:].tolist(), strict=False))
    assert sums.tolist() == [[sum(column[begin:end]) for begin, end in spans] for column in columns]
    assert digests_of(memoryview(identities.tobytes()), bounds) == pack_digests(rows, bounds)


@pytest.mark.parametrize("kernel", [take_out.dispatcher, take_out.plain])
@given(sizes=st.lists(st.integers(1, 3), max_size=8), data=st.data())
def test_chosen_samples_leave_in_their_order_and_the_rest_stays_in_its_own(
    kernel: Callable[..., Any], sizes: list[int], data: st.DataObject
) -> None:
    """Items of several samples, too; those behind what the packer was given are not seen, however old they are."""
    count, step = len(sizes), 7
    chosen = data.draw(st.permutations(range(count)))[: data.draw(st.integers(0, count))]
    given_count = data.draw(st.integers(max(chosen, default=-1) + 1, count))
    bounds = sorted({0, len(chosen), *data.draw(st.lists(st.integers(0, len(chosen))))})
    ages, since = (data.draw(st.lists(st.integers(-1, step), min_size=count, max_size=count)) for _ in range(2))
    new_ages = data.draw(st.lists(st.integers(-1, 9), min_size=given_count, max_size=given_count))
    ends = np.cumsum([0, *sizes]).tolist()
    of = [list(range(100 + begin, 100 + end)) for begin, end in pairwise(ends)]
    handles = np.array([handle for item in of for handle in item], np.int64)
    held = [np.array(each, np.int64) for each in (sizes, range(count), ages, since)]
    taken, taken_bounds = np.full(len(handles), GUARD), np.full(len(bounds), GUARD)
    waited = np.full(len(chosen), GUARD)
    choice = [np.array(each, np.int64) for each in (chosen, bounds, new_ages)]
    if chosen:  # of what is not held, or of one twice
        for wrong in (-1, count, chosen[0]):
            not_of_these = np.array([*chosen[:-1], wrong, chosen[-1]]), np.array([0, len(chosen) + 1]), choice[2]
            nothing = np.zeros(2 * len(handles), np.int64)
            assert kernel(*not_of_these, step, handles.copy(), *held, nothing, nothing.copy(), nothing.copy())[0] == -1
    items, samples, seen = kernel(*choice, step, handles, *held, taken, taken_bounds, waited)

    stay = [i for i in range(count) if i not in chosen]
    known = {i for i in range(given_count) if new_ages[i] >= 0} | set(chosen)
    expected = [[handle for i in chosen[begin:end] for handle in of[i]] for begin, end in pairwise(bounds)]
    assert [taken[begin:end].tolist() for begin, end in pairwise(taken_bounds.tolist())] == expected
    assert waited.tolist() == [step - since[i] if since[i] >= 0 else 0 for i in chosen]
    assert (items, samples, seen) == (len(stay), sum(sizes[i] for i in stay), len(known))
    assert handles[:samples].tolist() == [handle for i in stay for handle in of[i]]
    now = [
        (sizes[i], i, new_ages[i] if i < given_count else ages[i], step if i in known and since[i] < 0 else since[i])
        for i in stay
    ]
    assert list(zip(*(each[:items].tolist() for each in held), strict=True)) == now
