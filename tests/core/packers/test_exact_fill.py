"""exact_fill: how full its packs are, how long samples wait, and that its kernel agrees with the oracle."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streampack
from benchmarks.lengths import SHIFTING, STATIONARY, file_lengths
from benchmarks.lengths import lengths_of as stream_of
from streampack.core.packers import PACKERS, pack_lengths, packer_kernels
from streampack.core.packers.blocks.decreasing import first_fit_decreasing
from streampack.core.packers.exact_fill import exact_fill_cases, exact_fill_kernels
from streampack.core.packers.exact_fill.exact_fill import NO_CAP
from streampack.core.packers.packer import I64
from tests.core.packers.oracles.exact_fill import exact_fill_oracle, fill_exactly
from tests.core.packers.uncompiled import uncompiled

UNCOMPILED = uncompiled("streampack.core.packers.exact_fill.exact_fill_kernels").exact_fill

BUDGETS = (2048, 8192, 32768)
KINDS = ("lognormal", "zipf", "uniform", "bimodal", "mostly_full", "short", "clipped")
#: Every pack needs a sample longer than half the budget, and there are just about as many as tokens allow.
CRITICAL = ("uniform", "mostly_full", "clipped")


def lengths_of(kind: str, budget: int, n: int = 49_152, seed: int = 0) -> I64:
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    chat = np.clip(rng.lognormal(5, 0.8, n), 1, budget)
    half = np.clip(rng.normal(budget / 2, budget / 16, n), 1, budget)
    uniform = rng.integers(1, budget + 1, n)
    return {
        "lognormal": np.clip(rng.lognormal(6.5, 1.2, n), 1, budget),
        "zipf": np.minimum(rng.zipf(1.5, n), budget),
        "uniform": uniform,
        "bimodal": np.where(rng.random(n) < 0.7, chat, half),
        "mostly_full": np.where(rng.random(n) < 0.6, budget, uniform),
        "short": np.full(n, 16),
        "clipped": np.clip(rng.lognormal(np.log(budget) + 1.2 * 0.2533, 1.2, n), 1, budget),
    }[kind].astype(np.int64)


def num_packs(lengths: I64, budget: int, window: int = 1024) -> int:
    choice = PACKERS["exact_fill"].choose(lengths, np.full(len(lengths), -1), budget, len(lengths), True, window=window)
    sums = np.add.reduceat(lengths[choice.indices], choice.bounds[:-1])
    assert len(choice.indices) == len(lengths)
    assert int(sums.sum()) == int(lengths.sum())
    assert int(sums.max()) <= budget
    return len(sums)


def test_packs_are_as_few_as_the_tokens_need_the_drain_included() -> None:
    over = {}
    for kind in KINDS[:6]:
        for budget in BUDGETS:
            lengths = lengths_of(kind, budget)
            fewest = -(-int(lengths.sum()) // budget)
            over[kind, budget] = num_packs(lengths, budget) / fewest - 1
    assert np.mean(list(over.values())) <= 0.0005, over
    assert max(over.values()) <= 0.002, over
    assert np.mean([share for (kind, _), share in over.items() if kind not in CRITICAL]) <= 0.0001, over


@pytest.mark.parametrize("kind", CRITICAL)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_critical_packs_are_nearly_as_few_as_if_all_samples_were_seen_before_the_first(kind: str, seed: int) -> None:
    """Chance may give critical lengths more long samples than the tokens need packs, and no packer can help that."""
    lengths = lengths_of(kind, 8192, seed=seed)
    assert num_packs(lengths, 8192) <= 1.0008 * len(first_fit_decreasing(lengths.tolist(), 8192))


@pytest.mark.parametrize("kind", KINDS)
def test_no_other_packer_needs_fewer_packs_with_the_same_window(kind: str) -> None:
    lengths = lengths_of(kind, 8192, n=8192)
    ours = num_packs(lengths, 8192, window=256)
    assert all(ours <= len(pack_lengths(lengths, 8192, name, window=256)) for name in PACKERS)


@st.composite
def streams(draw: st.DrawFn) -> tuple[I64, int]:
    budget = draw(st.integers(1, 300))
    some = draw(
        st.sampled_from(
            [
                st.integers(1, budget),
                st.integers(1, 1 + budget // 20),
                st.integers(1, 1 + budget // 8) | st.integers(budget // 2 + 1, budget),
                st.integers(1 + budget // 3, 1 + budget // 2) | st.just(budget),
            ]
        )
    )
    return np.array(draw(st.lists(some, max_size=120)), np.int64).clip(1, budget), budget


def num_planned(lengths: I64, budget: int) -> int:
    """Packs of first fit decreasing; compiled, for it is asked about a million lengths."""
    ordered, ones = np.argsort(-lengths, kind="stable"), np.ones(len(lengths), np.int64)
    planned: int = exact_fill_cases.first_fit(ordered, lengths, ones, budget, NO_CAP, np.empty_like(ordered))
    return planned


@given(stream=streams())
def test_the_compiled_plan_has_the_packs_of_first_fit_decreasing(stream: tuple[I64, int]) -> None:
    lengths, budget = stream
    assert num_planned(lengths, budget) == len(first_fit_decreasing(lengths.tolist(), budget))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", STATIONARY)
def test_lengths_that_stay_the_same_need_no_more_packs_than_all_of_them_at_once(kind: str, seed: int) -> None:
    for budget in BUDGETS:
        lengths = stream_of(kind, budget, seed=seed)
        assert num_packs(lengths, budget) <= num_planned(lengths, budget), budget


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", SHIFTING)
def test_lengths_that_shift_need_no_more_packs_than_blocks_of_two_windows(kind: str, seed: int) -> None:
    for budget in BUDGETS:
        lengths = stream_of(kind, budget, seed=seed)
        blocks = [lengths[at : at + 2048] for at in range(0, len(lengths), 2048)]
        assert num_packs(lengths, budget) <= sum(num_planned(block, budget) for block in blocks), budget


@pytest.mark.parametrize("seed", range(5))
def test_files_cut_into_pieces_need_no_more_packs_than_all_of_them_at_once(seed: int) -> None:
    """Four in five pieces are full; what is left of files is critical, with short ones to spare."""
    files = np.ceil(np.random.default_rng([7, seed]).choice(file_lengths(), 12_000)).astype(np.int64)
    pieces = np.minimum(2048, np.repeat(files, -(-files // 2048)))
    pieces[np.cumsum(-(-files // 2048)) - 1] = (files - 1) % 2048 + 1
    assert int(pieces.sum()) == int(files.sum())
    assert num_packs(pieces, 2048) <= num_planned(pieces, 2048)


@pytest.mark.parametrize("seed", range(6))
def test_a_short_stream_that_shifts_needs_no_more_packs_than_blocks_of_two_windows(seed: int) -> None:
    lengths = stream_of("curriculum", 8192, 6144, seed)
    assert num_packs(lengths, 8192) <= sum(num_planned(lengths[at : at + 2048], 8192) for at in range(0, 6144, 2048))


@given(stream=streams())
@settings(max_examples=100, deadline=None)
def test_a_window_that_holds_all_samples_needs_no_more_packs_than_first_fit_decreasing(stream: tuple[I64, int]) -> None:
    lengths, budget = stream
    fewest = len(first_fit_decreasing(lengths.tolist(), budget))
    assert len(pack_lengths(lengths, budget, window=len(lengths) + 1)) <= fewest


@pytest.mark.parametrize("kind", STATIONARY)
@pytest.mark.parametrize("cap", [1, 2, 4, 8, 16, 32, 64])
def test_packs_of_few_samples_are_no_more_than_first_fit_decreasing_makes_of_them(kind: str, cap: int) -> None:
    lengths = stream_of(kind, 8192, 8192)
    ours = pack_lengths(lengths, 8192, window=1024, max_samples_per_pack=cap)
    fewest = pack_lengths(lengths, 8192, "first_fit_decreasing", window=1024, max_samples_per_pack=cap)
    assert max(map(len, ours)) <= cap
    assert len(ours) <= len(fewest)


def assert_the_kernel_agrees(
    lengths: I64, budget: int, count: int, closed: bool, window: int, sizes: I64 | None = None, cap: int | None = None,
    in_turn: bool = False,
) -> None:  # fmt: skip
    compiled = exact_fill_kernels.exact_fill.dispatcher
    assert not UNCOMPILED.signatures
    ages = np.full(len(lengths), -1)
    sizes = np.ones(len(lengths), np.int64) if sizes is None else sizes
    unlimited = np.zeros((0, len(lengths)), np.int64), np.zeros(0, np.int64)
    for _ in range(3):  # the second and third call begin with ages
        expected = exact_fill_oracle(lengths, ages, budget, count, closed, window, sizes, cap, in_turn)
        for kernel in (compiled, UNCOMPILED):
            options = budget, count, closed, window, cap or NO_CAP
            indices, bounds, new_ages = kernel(lengths, sizes, ages, *options, *unlimited, in_turn)
            assert indices.tolist() == expected.indices.tolist()
            assert bounds.tolist() == expected.bounds.tolist()
            assert new_ages.tolist() == expected.ages.tolist()
        left = np.setdiff1d(np.arange(len(lengths)), indices)
        lengths, sizes, ages = lengths[left], sizes[left], new_ages[left]


@given(
    stream=streams(), count=st.integers(0, 20), closed=st.booleans(), window=st.integers(1, 40), in_turn=st.booleans()
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_the_kernel_compiled_or_not_and_its_oracle_agree(
    stream: tuple[I64, int], count: int, closed: bool, window: int, in_turn: bool
) -> None:
    assert_the_kernel_agrees(*stream, count, closed, window, in_turn=in_turn)


@given(
    stream=streams(), count=st.integers(0, 20), closed=st.booleans(), window=st.integers(1, 40), cap=st.integers(1, 9),
    seed=st.none() | st.integers(0, 99), in_turn=st.booleans(),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_the_kernel_compiled_or_not_and_its_oracle_agree_where_packs_hold_few_samples(
    stream: tuple[I64, int], count: int, closed: bool, window: int, cap: int, seed: int | None, in_turn: bool
) -> None:
    lengths, budget = stream
    sizes = None if seed is None else np.random.default_rng(seed).integers(1, cap + 1, len(lengths))
    assert_the_kernel_agrees(lengths, budget, count, closed, window, sizes, cap, in_turn)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_kernel_compiled_or_not_and_its_oracle_agree_on_real_kinds_of_lengths(kind: str, budget: int) -> None:
    lengths = lengths_of(kind, budget, n=4096 if kind == "short" else 1500, seed=1)
    for in_turn in (False, True):
        assert_the_kernel_agrees(lengths, budget, 40, True, 200, in_turn=in_turn)
    assert_the_kernel_agrees(lengths, budget, len(lengths), True, 200)


@given(stream=streams(), window=st.integers(1, 12), in_turn=st.booleans())
@settings(max_examples=150, deadline=None)
def test_no_sample_waits_more_than_the_window_in_packs_plus_those_held_when_it_came(
    stream: tuple[I64, int], window: int, in_turn: bool
) -> None:
    lengths, budget = stream
    left = list(range(len(lengths)))
    came: dict[int, tuple[int, int]] = {}
    for number, pack in enumerate(pack_lengths(lengths, budget, window=window, in_turn=in_turn)):
        held = tokens = 0
        for i in left:
            if held >= window and tokens >= 2 * budget:
                break
            came.setdefault(i, (number, held))
            held, tokens = held + 1, tokens + int(lengths[i])
        for i in pack:
            since, ahead = came[i]  # a KeyError here is a sample from behind the window
            assert number - since <= window + ahead
        left = [i for i in left if i not in pack]


@given(st.lists(st.integers(5, 19), min_size=8, max_size=12))
def test_where_no_sample_is_long_a_pack_is_the_fullest_that_holds_the_oldest(lengths: list[int]) -> None:
    budget = 40
    choice = exact_fill_oracle(np.array(lengths), np.full(len(lengths), -1), budget, 1, False, len(lengths))
    if len(choice.indices):  # else the window lacks two budgets
        rest = lengths[1:]
        sums = (lengths[0] + sum(some) for k in range(8) for some in combinations(rest, k))
        assert sum(lengths[i] for i in choice.indices) == max(s for s in sums if s <= budget)


def test_views_and_arrays_that_are_read_only_do_not_make_the_kernel_compile_again() -> None:
    lengths, ages = np.arange(1, 41)[::2], np.full(20, -1)
    ages.setflags(write=False)
    PACKERS["exact_fill"].choose(lengths, ages, 64, 2, True, window=4)
    assert len(exact_fill_kernels.exact_fill.signatures) == 1


def test_inside_a_pack_samples_are_in_age_order() -> None:
    for kind in KINDS:
        for pack in pack_lengths(lengths_of(kind, 2048, n=3000), 2048, window=128):
            assert pack == sorted(pack)


def test_full_samples_leave_at_once_but_the_oldest_goes_first_when_it_has_waited_a_window() -> None:
    packs = pack_lengths([5, 8, 8, 8, 8, 8, 8], 8, window=3)
    assert packs[:4] == [[1], [2], [3], [0]]


def test_lengths_that_share_a_factor_with_no_multiple_at_the_budget_are_packed_as_full_as_can_be() -> None:
    assert num_packs(np.full(3000, 17), 8192, window=64) == -(-3000 // (8192 // 17))


class Counted(int):
    """A length that counts how often a row of the bitset is shifted by it."""

    shifts = 0

    def __rrshift__(self, row: int) -> int:
        Counted.shifts += 1
        return row >> int(self)


@pytest.mark.parametrize("some", [[3000], [3000, 2800], [1], [4097], [16, 48, 640, 2048], [8192]])
def test_equal_lengths_are_tried_no_more_often_than_they_fit_and_once_again(some: list[int]) -> None:
    rest = [(i, some[i % len(some)]) for i in range(packer_kernels.MAX_TRIED)]
    room = 8191
    Counted.shifts = 0
    picks = fill_exactly([(i, Counted(length)) for i, length in rest], room)
    assert Counted.shifts <= sum(room // length + 1 for length in some)
    lengths, rows = np.array([length for _, length in rest]), np.empty((packer_kernels.MAX_TRIED + 1) * 129, np.uint64)
    widened = []

    def widen(*row: Any) -> Any:
        widened.append(row)
        return kernels_widen(*row)

    kernels_widen, packer_kernels._widen = packer_kernels._widen, widen
    try:
        fill = packer_kernels._fill_exactly.py_func
        indices = np.empty(len(rest), np.int64)
        end = fill(np.arange(len(rest)), len(rest), lengths, room, rows, np.zeros(8193, np.bool_), indices, 0)
    finally:
        packer_kernels._widen = kernels_widen
    assert indices[:end].tolist() == picks
    assert len(widened) == Counted.shifts


CACHED = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from streampack.core.packers.exact_fill.exact_fill_cases import closest_pair
one = np.ones(1, np.int64)
closest_pair(one, 0, 0, one, 1, one, 0)
assert closest_pair.py_func.__code__.co_filename.startswith(sys.argv[1])
print(sum(closest_pair.dispatcher.stats.cache_hits.values()))
"""


def test_a_cached_kernel_is_compiled_again_when_a_file_that_it_imports_kernels_from_has_changed(tmp_path: Path) -> None:
    package = Path(streampack.__file__).parent
    shutil.copytree(package, tmp_path / "streampack", ignore=shutil.ignore_patterns("__pycache__"))
    imported = tmp_path / "streampack/core/packers/packer_kernels.py"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def cache_hits() -> int:
        command = [sys.executable, "-c", CACHED, str(tmp_path)]
        return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)

    assert [cache_hits(), cache_hits()] == [0, 1]
    imported.write_text(imported.read_text() + "\n")
    assert cache_hits() == 0
