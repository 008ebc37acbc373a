"""The packers of other systems: their packs, and the definition of each in a few slow lines.

The golden packs were made by the systems' own code, as it was in November 2026 (NeMo-RL, AutoModel, TRL, LLaMA-Factory,
VeOmni, Axolotl); ROLL's are numpy's ``array_split``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack.core.packers import PACKERS, make_packer, pack_lengths, parameters_of
from streampack.errors import ConfigError

LENGTHS = [700, 100, 450, 300, 350, 120, 550, 450, 170, 260, 80, 330, 640, 170, 300, 90, 510, 40]
FFD = [[0, 14], [12, 4], [6, 7], [16, 2, 17], [11, 3, 9, 1], [13, 8, 5, 15, 10]]
GOLDEN: list[tuple[str, str, dict[str, Any], list[list[int]]]] = [
    ("NeMo-RL", "concatenative", {},
     [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9, 10, 11], [12, 13], [14, 15, 16, 17]]),
    ("NeMo-RL, max_sequences_per_bin=2", "concatenative", {"max_samples_per_pack": 2},
     [[i, i + 1] for i in range(0, 18, 2)]),
    ("NeMo-RL", "first_fit_decreasing", {}, FFD),
    ("LLaMA-Factory greedy_knapsack", "first_fit_decreasing", {}, FFD),
    ("NeMo-RL", "modified_first_fit_decreasing", {"leftovers": "emptiest"},
     [[0, 3], [12, 4], [6, 2], [16, 7, 17], [8, 13, 5, 1, 15, 10], [11, 14, 9]]),
    ("TRL bfd", "best_fit_decreasing", {}, [[0, 3], [12, 4], [6, 2], [16, 7, 17], [11, 14, 9, 1], [8, 13, 5, 15, 10]]),
    ("AutoModel", "greedy_knapsack", {}, [[0, 9], [12, 4], [6, 7], [16, 2], [11, 3, 14], [8, 13, 5, 1, 15, 10, 17]]),
    ("VeOmni, buffer_size=6", "buffer_first_fit", {"window": 6},
     [[0, 1, 5], [2, 3, 8], [4, 6, 10], [7, 9, 13], [11, 12], [14, 15, 16, 17]]),
    ("VeOmni, Axolotl", "buffer_first_fit", {},
     [[0, 1, 5, 10], [2, 3, 8, 17], [4, 6, 15], [7, 9, 13], [11, 12], [14, 16]]),
    ("Axolotl, bin_size=3", "buffer_first_fit", {"max_samples_per_pack": 3},
     [[0, 1, 5], [2, 3, 8], [4, 6, 10], [7, 9, 13], [11, 12], [14, 15, 16], [17]]),
]  # fmt: skip


@pytest.mark.parametrize(("whose", "name", "parameters", "packs"), GOLDEN, ids=[f"{g[1]}: {g[0]}" for g in GOLDEN])
def test_packs_are_those_of_the_system_whose_packer_it_is(
    whose: str, name: str, parameters: dict[str, Any], packs: list[list[int]]
) -> None:
    assert pack_lengths(LENGTHS, 1000, name, **parameters) == packs


def test_modified_first_fit_decreasing_packs_its_leftovers_as_it_is_told() -> None:
    large = [[0, 3], [12, 4], [6, 2], [16, 7, 17]]
    assert pack_lengths(LENGTHS, 1000, "modified_first_fit_decreasing") == [*large, [11, 14, 9, 1], [8, 13, 5, 15, 10]]
    # The smallest small sample and the largest that fits with it, by the packs from the last on: NeMo-RL's code again.
    for leftovers in ("decreasing", "emptiest"):
        mffd = {"packer": "modified_first_fit_decreasing", "leftovers": leftovers}
        assert pack_lengths([6, 2, 5, 2], 10, **mffd) == [[0, 1, 3], [2]]  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="leftovers='best', expected 'decreasing' or 'emptiest'"):
        make_packer("modified_first_fit_decreasing", leftovers="best")


def test_modified_first_fit_decreasing_is_now_and_then_better_and_now_and_then_worse() -> None:
    """Its better worst case is no promise: NeMo-RL's manual makes more of it than its packs do."""
    better, worse = [18, 12, 4, 9, 7, 4, 4, 5, 13], [6, 2, 7, 3, 3, 8, 8, 2]
    for lengths, budget, packs, of_ffd in ((better, 20, 4, 5), (worse, 10, 5, 4)):
        assert len(pack_lengths(lengths, budget, "modified_first_fit_decreasing")) == packs
        assert len(pack_lengths(lengths, budget, "first_fit_decreasing")) == of_ffd


def test_best_fit_and_first_fit_decreasing_differ_as_in_trl_and_nemo() -> None:
    lengths = [8, 3, 2, 16, 2, 9]
    assert pack_lengths(lengths, 20, "best_fit_decreasing") == [[3, 2, 4], [5, 0, 1]]
    assert pack_lengths(lengths, 20, "first_fit_decreasing") == [[3, 1], [5, 0, 4], [2]]


def test_none_makes_the_packs_of_roll_and_heeds_the_budget_too() -> None:
    assert pack_lengths([1] * 10, 99, "none", micro_batch_size=3) == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert pack_lengths([1] * 2, 99, "none", micro_batch_size=3) == [[0, 1]]
    # ROLL would make one pack of 14 tokens of each four
    assert pack_lengths([7] * 4, 8, "none", micro_batch_size=4) == [[0], [1], [2], [3]]
    with pytest.raises(ConfigError, match="micro_batch_size=0, expected at least 1"):
        make_packer("none", micro_batch_size=0)


def test_the_shuffle_is_held_still_by_its_seed() -> None:
    packs = [[2, 8, 10, 1, 5, 17], [0, 9], [4, 12], [11, 3, 15, 13], [14, 16], [6, 7]]
    assert pack_lengths(LENGTHS, 1000, "first_fit_shuffle", seed=17) == packs
    assert pack_lengths(LENGTHS, 1000, "first_fit_shuffle", seed=2**64 + 17) == packs
    orders = {str(pack_lengths([1] * 30, 30, "first_fit_shuffle", seed=seed)) for seed in range(50)}
    assert len(orders) == 50


def test_a_parameter_that_a_packer_does_not_have_names_those_it_has() -> None:
    with pytest.raises(
        ConfigError,
        match="packer none: got the parameter 'leftovers', expected max_samples_per_pack or micro_batch_size",
    ):
        make_packer("none", leftovers="emptiest")
    for name in PACKERS:
        for key in parameters_of(name):
            assert make_packer(name, **{key: getattr(PACKERS[name], key)}) == PACKERS[name]


# Each once more, with no tree, heap or bitmap


@dataclass
class Slow:
    """Packs that hold a list, and look at all of it each time."""

    lengths: list[int]
    budget: int
    cap: int
    sizes: list[int]
    packs: list[list[int]] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)

    def tokens(self, pack: int) -> int:
        return sum(self.lengths[i] for i in self.packs[pack])

    def fits(self, i: int, pack: list[int]) -> bool:
        together = [*pack, i]
        tokens, samples = sum(self.lengths[k] for k in together), sum(self.sizes[k] for k in together)
        return tokens <= self.budget and samples <= self.cap

    def place(self, order: Iterable[int], best: Callable[[int], Any], among: int = 0) -> list[list[int]]:
        """Each into the pack, from number ``among`` on, for which ``best`` is least, of those that it fits into."""
        for turn, i in enumerate(order):
            fitting = [pack for pack in range(among, len(self.packs)) if self.fits(i, self.packs[pack])]
            if fitting:
                pack = min(fitting, key=best)
            else:
                pack = len(self.packs)
                self.packs.append([])
                self.turns.append(turn)
            self.packs[pack].append(i)
            self.turns[pack] = turn
        return self.packs

    def longest_first(self) -> list[int]:
        return sorted(range(len(self.lengths)), key=lambda i: (-self.lengths[i], i))

    def modified(self, leftovers: str) -> list[list[int]]:
        lengths, budget = self.lengths, self.budget
        left = self.longest_first()
        self.packs = [[left.pop(0)] for i in left[:] if 2 * lengths[i] > budget]
        self.turns = [0] * (large := len(self.packs))
        for pack in self.packs:
            medium = [i for i in left if 3 * lengths[i] > budget and self.fits(i, pack)]
            pack += medium[:1]
            left = [i for i in left if i not in pack]
        for pack in [pack for pack in reversed(self.packs) if len(pack) == 1]:
            small = sorted(
                (i for i in left if 6 * lengths[i] > budget >= 3 * lengths[i]), key=lambda i: (lengths[i], i)
            )
            if len(small) > 1 and self.fits(small[1], [*pack, small[0]]):
                pack.append(small.pop(0))
                pack.append([i for i in small if self.fits(i, pack)][-1])
            left = [i for i in left if i not in pack]
        for pack in self.packs:
            while fitting := [i for i in left if self.fits(i, pack)]:
                pack.append(fitting[0])
                left.remove(fitting[0])
        if leftovers == "decreasing":
            return self.place(left, lambda pack: pack, large)
        self.place(left, lambda pack: (self.tokens(pack), self.turns[pack]), large)
        emptiest = sorted(range(large, len(self.packs)), key=lambda pack: (self.tokens(pack), self.turns[pack]))
        return self.packs[:large] + [self.packs[pack] for pack in emptiest]


SLOW: dict[str, Callable[[Slow], list[list[int]]]] = {
    "first_fit_decreasing": lambda slow: slow.place(
        sorted(range(len(slow.lengths)), key=lambda i: (-slow.lengths[i], -i)), lambda pack: pack
    ),
    "best_fit_decreasing": lambda slow: slow.place(
        slow.longest_first(), lambda pack: (-slow.tokens(pack), slow.turns[pack])
    ),
    "greedy_knapsack": lambda slow: slow.place(slow.longest_first(), lambda pack: (slow.tokens(pack), pack)),
    "buffer_first_fit": lambda slow: slow.place(range(len(slow.lengths)), lambda pack: pack),
    "decreasing": lambda slow: slow.modified("decreasing"),
    "emptiest": lambda slow: slow.modified("emptiest"),
}


@pytest.mark.parametrize("name", SLOW)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_packs_are_what_the_definition_says_for_samples_and_for_groups(name: str, data: st.DataObject) -> None:
    budget = data.draw(st.integers(1, 40))
    of_class = st.sampled_from([1, 2, 3, 6]).flatmap(lambda part: st.integers(1, max(budget // part, 1)))
    lengths = data.draw(st.lists(of_class, max_size=40))
    cap = data.draw(st.none() | st.integers(1, 6))
    sizes = data.draw(st.none() | st.lists(st.integers(1, cap or 3), min_size=len(lengths), max_size=len(lengths)))
    expected = SLOW[name](Slow(lengths, budget, cap or 10**6, sizes or [1] * len(lengths)))
    parameters: dict[str, Any] = {"packer": name}
    if name in ("decreasing", "emptiest"):
        parameters = {"packer": "modified_first_fit_decreasing", "leftovers": name}
    found = pack_lengths(
        lengths, budget, window=max(len(lengths), 1), max_samples_per_pack=cap, sizes=sizes, **parameters
    )
    assert found == expected


# How many packs, and how fast

BOUNDS: dict[str, Callable[[int], float]] = {
    "first_fit_decreasing": lambda best: (11 * best + 6) / 9,
    "best_fit_decreasing": lambda best: 11 * best / 9 + 4,
    "modified_first_fit_decreasing": lambda best: 71 * best / 60 + 31 / 6,
    "first_fit_shuffle": lambda best: 1.7 * best,
    "buffer_first_fit": lambda best: 1.7 * best,
    "concatenative": lambda best: 2 * best - 1,
    "greedy_knapsack": lambda best: 2 * best,
    "sliding_ffd": lambda best: 2 * best,
    "exact_fill": lambda best: 2 * best,
}


@pytest.mark.parametrize("name", BOUNDS)
@given(data=st.data(), budget=st.integers(1, 60))
@settings(deadline=None)
def test_no_more_packs_are_taken_than_the_theorems_allow(name: str, data: st.DataObject, budget: int) -> None:
    """The best number is known: the samples are cut out of full packs."""
    cuts = data.draw(st.lists(st.sets(st.integers(1, max(budget - 1, 1)), max_size=5), min_size=1, max_size=12))
    edges = [[0, *sorted(cut - {budget}), budget] for cut in cuts]
    lengths = data.draw(st.permutations([int(n) for edge in edges for n in np.diff(edge)]))
    packs = pack_lengths(lengths, budget, name, window=len(lengths))
    assert len(cuts) <= len(packs) <= BOUNDS[name](len(cuts))


@pytest.mark.parametrize("name", [name for name in BOUNDS if name not in ("exact_fill", "concatenative")])
def test_thirty_thousand_samples_do_not_take_quadratic_time(name: str) -> None:
    """Each looking at half of the packs, they would take some minutes; it is a second."""
    lengths = np.random.default_rng(2).integers(1, 2**17 + 1, 30_000)
    begin = time.process_time()
    packs = pack_lengths(lengths, 2**17, name)
    assert time.process_time() - begin < 20
    assert 15_000 < len(packs) < 16_000
