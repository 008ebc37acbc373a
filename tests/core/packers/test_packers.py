"""Every packer: nothing lost, nothing over budget, and the same packs however the stream is cut."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streampack.core.packers import PACKERS, Choice, Packer, make_packer, pack_lengths, parameters_of
from streampack.core.packers.blocks.tumbling import Tumbling
from streampack.core.packers.joint.joint import Joint
from streampack.core.packers.packer import I64, NO_EXTRA, BasePacker, Extra
from streampack.core.packers.registry import PackerName
from streampack.errors import ConfigError, SampleError
from tests.core.packers.oracles.exact_fill import exact_fill_oracle

FILES = (
    "exact_fill.exact_fill", "joint.joint", "sliding.sliding_ffd", "blocks.decreasing", "sliding.concatenative",
    "blocks.first_fit", "blocks.modified_first_fit", "blocks.best_fit", "blocks.knapsack", "blocks.karmarkar_karp",
    "sliding.buffer_first_fit", "blocks.unpacked", "closed", "registry",
)  # fmt: skip
ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class ExactFillOracle(BasePacker):
    """The oracle of exact_fill, held to the same rules as the packers."""

    name: str = "exact_fill oracle"

    def max_wait(self, window: int, held: int) -> int:
        return window + held

    def choose(
        self, lengths: I64, ages: I64, budget: int, count: int, closed: bool, *, window: int, sizes: I64 | None = None,
        extra: Extra = NO_EXTRA,
    ) -> Choice:  # fmt: skip
        return exact_fill_oracle(lengths, ages, budget, count, closed, window)


CAPPED = [
    make_packer(name, max_samples_per_pack=3) for name in PACKERS if "max_samples_per_pack" in parameters_of(name)
]
OTHERS = [
    make_packer("modified_first_fit_decreasing", leftovers="emptiest"), make_packer("first_fit_shuffle", seed=4),
    make_packer("none", micro_batch_size=3), Joint(group=2, patience=2), Joint(group=3, max_samples_per_pack=3),
]  # fmt: skip
EVERY: list[Packer] = [*PACKERS.values(), ExactFillOracle(), *OTHERS, *CAPPED]
every_packer = pytest.mark.parametrize("each", EVERY, ids=lambda each: f"{each.name}-{EVERY.index(each)}")
capped_packer = pytest.mark.parametrize("each", CAPPED, ids=lambda each: each.name)

budgets = st.integers(1, 40)


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[int], int]:
    """Lengths and a budget; some streams are mostly short, mostly long or mostly full."""
    budget = draw(budgets)
    short, long = st.integers(1, max(1, budget // 4)), st.integers(budget // 2 + 1, budget)
    some = draw(
        st.sampled_from([st.integers(1, budget), short, short | long, long | st.just(budget), short | st.just(budget)])
    )
    return draw(st.lists(some, max_size=80)), budget


def in_one_call(
    each: Packer, lengths: list[int], budget: int, window: int, sizes: list[int] | None = None
) -> list[list[int]]:
    of_each = None if sizes is None else as_array(sizes)
    ages = np.full(len(lengths), -1)
    return packs_of(each.choose(as_array(lengths), ages, budget, len(lengths), True, window=window, sizes=of_each))


def in_many_calls(
    each: Packer, lengths: list[int], budget: int, window: int, cuts: list[tuple[int, int]],
    sizes: list[int] | None = None,
) -> list[list[int]]:  # fmt: skip
    """The packs when ``cuts`` says how many samples arrive before each call, and how many packs it asks for."""
    packs: list[list[int]] = []
    names, ages, arrived = np.empty(0, np.int64), np.empty(0, np.int64), 0
    turn = 0
    while arrived < len(lengths) or len(names):
        more, count = cuts[turn % len(cuts)] if cuts else (1, 1)
        turn += 1
        if turn > len(cuts):  # whatever the cuts were, it ends
            more, count = max(more, 1), max(count, 1)
        new = np.arange(arrived, min(arrived + more, len(lengths)))
        arrived += len(new)
        names, ages = np.concatenate([names, new]), np.concatenate([ages, np.full(len(new), -1)])
        choice = each.choose(
            as_array(lengths)[names], ages, budget, count, arrived == len(lengths), window=window,
            sizes=None if sizes is None else as_array(sizes)[names],
        )  # fmt: skip
        assert len(choice.ages) == len(names)
        packs += [names[pack].tolist() for pack in packs_of(choice)]
        left = np.ones(len(names), np.bool_)
        left[choice.indices] = False
        names, ages = names[left], choice.ages[left]
    return packs


def packs_of(choice: Choice) -> list[list[int]]:
    assert choice.indices.dtype == choice.bounds.dtype == choice.ages.dtype == np.int64
    return [pack.tolist() for pack in np.split(choice.indices, choice.bounds[1:-1])] if len(choice.bounds) > 1 else []


def as_array(lengths: list[int]) -> I64:
    return np.array(lengths, np.int64)


@every_packer
@given(stream=streams(), window=st.integers(1, 20))
@settings(max_examples=50, deadline=None)
def test_every_sample_is_in_one_pack_and_no_pack_is_over_budget(
    each: Packer, stream: tuple[list[int], int], window: int
) -> None:
    lengths, budget = stream
    packs = in_one_call(each, lengths, budget, window)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in pack) <= budget for pack in packs)


@every_packer
@given(
    stream=streams(),
    window=st.integers(1, 20),
    cuts=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), max_size=12),
)
@example(stream=([3, 4, 4, 3], 4), window=3, cuts=[(3, 1), (0, 0)])  # a call that asks for no pack
@settings(max_examples=60, deadline=None)
def test_packs_do_not_depend_on_how_the_stream_is_cut(
    each: Packer, stream: tuple[list[int], int], window: int, cuts: list[tuple[int, int]]
) -> None:
    lengths, budget = stream
    assert in_many_calls(each, lengths, budget, window, cuts) == in_one_call(each, lengths, budget, window)


@capped_packer
@given(
    stream=streams(), window=st.integers(1, 20), data=st.data(),
    cuts=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), max_size=12),
)  # fmt: skip
@settings(deadline=None)
def test_no_pack_holds_more_samples_than_its_cap_and_groups_stay_whole(
    each: Packer, stream: tuple[list[int], int], window: int, cuts: list[tuple[int, int]], data: st.DataObject
) -> None:
    lengths, budget = stream
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=len(lengths), max_size=len(lengths)))
    packs = in_one_call(each, lengths, budget, window, sizes)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in pack) <= budget for pack in packs)
    assert all(sum(sizes[i] for i in pack) <= 3 for pack in packs)
    assert all(len(pack) <= 3 for pack in in_one_call(each, lengths, budget, window))
    assert in_many_calls(each, lengths, budget, window, cuts, sizes) == packs
    assert in_one_call(each, lengths, budget, window, [1] * len(lengths)) == in_one_call(each, lengths, budget, window)


@pytest.mark.parametrize("name", [each.name for each in CAPPED])
def test_a_cap_of_one_leaves_every_sample_alone_and_none_below_it_is_taken(name: str) -> None:
    packs = pack_lengths([2, 1, 3, 1, 2], 9, name, max_samples_per_pack=1)
    assert sorted(packs) == [[i] for i in range(5)]
    assert pack_lengths([1] * 6, 9, name, max_samples_per_pack=99) == pack_lengths([1] * 6, 9, name)
    with pytest.raises(ConfigError, match=r"max_samples_per_pack.*0, expected at least 1"):
        make_packer(name, max_samples_per_pack=0)


@every_packer
def test_a_long_stream_gives_the_same_packs_in_slices(each: Packer) -> None:
    rng = np.random.default_rng(3)
    lengths = np.clip(rng.lognormal(5, 1.3, 3000), 1, 1024).astype(np.int64).tolist()
    cuts = [(int(a), int(b)) for a, b in zip(rng.integers(0, 200, 40), rng.integers(0, 20, 40), strict=True)]
    assert in_many_calls(each, lengths, 1024, 128, cuts) == in_one_call(each, lengths, 1024, 128)


@pytest.mark.parametrize("each", [PACKERS["exact_fill"], ExactFillOracle()], ids=lambda e: e.name)
def test_the_window_holds_enough_samples_and_two_budgets_and_its_ages_say_so(each: Packer) -> None:
    lengths = as_array([1] * 40)
    choice = each.choose(lengths, np.full(40, -1), 8, 1, False, window=4)
    # 16 samples are two budgets; the 8 that left are replaced by the next call, whose window may have another size
    assert choice.indices.tolist() == list(range(8))
    assert choice.ages.tolist() == [*range(3, 19)] + [-1] * 24
    again = each.choose(lengths[8:], choice.ages[8:], 8, 1, False, window=4)
    assert again.ages.tolist()[8:16] == [*range(11, 19)]
    starved = each.choose(lengths[:15], np.full(15, -1), 8, 1, False, window=4)
    assert starved.indices.tolist() == []


@given(stream=streams())
def test_first_fit_decreasing_is_what_brute_force_says(stream: tuple[list[int], int]) -> None:
    lengths, budget = stream
    packs: list[list[int]] = []
    left = list(enumerate(lengths))
    while left:
        longest = max(left, key=lambda sample: (sample[1], sample[0]))  # ties: the later sample
        left.remove(longest)
        for pack in packs:
            if sum(lengths[i] for i in pack) + longest[1] <= budget:
                pack.append(longest[0])
                break
        else:
            packs.append([longest[0]])
    assert pack_lengths(lengths, budget, "first_fit_decreasing", window=max(1, len(lengths))) == packs


@given(stream=streams(), window=st.integers(1, 12))
def test_sliding_ffd_is_what_brute_force_says(stream: tuple[list[int], int], window: int) -> None:
    lengths, budget = stream
    packs, left = [], list(range(len(lengths)))
    while left:
        size = 0
        while size < len(left) and (size < window or sum(lengths[i] for i in left[:size]) < 2 * budget):
            size += 1
        pack = [left[0]]
        for i in sorted(left[1:size], key=lambda i: (-lengths[i], -i)):
            if sum(lengths[k] for k in pack) + lengths[i] <= budget:
                pack.append(i)
        packs.append(pack)
        left = [i for i in left if i not in pack]
    assert pack_lengths(lengths, budget, "sliding_ffd", window=window) == packs


def test_first_fit_decreasing_takes_the_later_of_two_equals_first() -> None:
    assert pack_lengths([2, 2, 2], 4, "first_fit_decreasing") == [[2, 1], [0]]


@pytest.mark.parametrize("name", [name for name, each in PACKERS.items() if isinstance(each, Tumbling)])
def test_a_closed_set_is_packed_whole_by_those_that_need_it_whole(name: str) -> None:
    lengths = [1 + i * i * 7919 % 97 for i in range(1500)]
    whole = pack_lengths(lengths, 128, name)
    assert whole == pack_lengths(lengths, 128, name, window=1500)
    blocks = pack_lengths(lengths, 128, name, window=1000)
    head = pack_lengths(lengths[:1000], 128, name)
    assert blocks[: len(head)] == head


def test_first_fit_decreasing_packs_whole_blocks_and_a_partial_one_only_when_closed() -> None:
    lengths, ages = as_array([3] * 10), np.full(10, -1)
    each = make_packer("first_fit_decreasing")
    assert packs_of(each.choose(lengths, ages, 4, 1, False, window=4)) == [[3], [2], [1], [0]]
    assert len(each.choose(lengths, ages, 4, 99, False, window=4).indices) == 8
    assert len(each.choose(lengths, ages, 4, 99, True, window=4).indices) == 10


@pytest.mark.parametrize(
    ("budget", "packs"),
    [(5, [[0, 1], [2, 3], [4, 5], [6], [7]]), (8, [[0, 1, 2], [3, 4, 5], [6], [7]])],
)
def test_concatenative_gives_the_golden_packs(budget: int, packs: list[list[int]]) -> None:
    assert pack_lengths([4, 1, 3, 2, 1, 3, 4, 5], budget, "concatenative") == packs


def test_concatenative_keeps_to_its_cap_on_samples() -> None:
    assert pack_lengths([1, 1, 1, 5, 1], 5, "concatenative", max_samples_per_pack=2) == [[0, 1], [2], [3], [4]]


def test_an_empty_stream_has_no_packs() -> None:
    for name in PACKERS:
        assert pack_lengths([], 8, name) == []
        assert pack_lengths(np.empty(0, np.int64), 8, name) == []


def test_lengths_are_rounded_up_to_the_alignment() -> None:
    assert pack_lengths([5, 4, 4, 3], 16, "concatenative", align=4) == [[0, 1, 2], [3]]
    with pytest.raises(SampleError, match=r"sample 1: got 13 tokens \(16 when aligned to 8\)"):
        pack_lengths([3, 13], 8, align=8)
    with pytest.raises(ConfigError, match="budget: got 20, expected a multiple of align, 8"):
        pack_lengths([3], 20, align=8)


@given(stream=streams(), align=st.integers(1, 8))
@settings(deadline=None)
def test_packing_in_units_of_the_alignment_fills_aligned_budgets(stream: tuple[list[int], int], align: int) -> None:
    lengths, budget = stream
    for name in PACKERS:
        packs = pack_lengths([n * align for n in lengths], budget * align, name, window=8, align=align)
        assert packs == pack_lengths(lengths, budget, name, window=8)


@pytest.mark.parametrize("wrong", [0, -4, 9, True, 2.0, "3", None, 2**70, np.bool_(True)])
def test_a_length_that_cannot_be_names_its_sample(wrong: object) -> None:
    with pytest.raises(ValueError, match="sample 2"):
        pack_lengths([1, 2, wrong], 8)  # type: ignore[list-item]


@pytest.mark.parametrize("dtype", [np.float64, np.bool_])
def test_arrays_that_hold_no_integers_are_refused(dtype: type) -> None:
    with pytest.raises(SampleError, match="expected integers"):
        pack_lengths(np.ones(3, dtype), 8)
    with pytest.raises(SampleError, match="shape"):
        pack_lengths(np.ones((2, 2), np.int64), 8)


def test_any_sequence_or_array_of_integers_will_do() -> None:
    for lengths in ((3, 5), range(3, 5), np.array([3, 5], np.uint16), [np.int32(3), np.uint64(5)]):
        assert pack_lengths(lengths, 8) == [[0, 1]]  # type: ignore[arg-type]
    with pytest.raises(SampleError, match="sample 0"):
        pack_lengths(np.array([2**63 + 5], np.uint64), 8)


def test_a_tensor_of_lengths_is_taken_as_an_array() -> None:
    class Tensor(list[object]):
        """As torch's: its items are tensors, too, and numpy knows how to read it."""

        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            return np.array([3, 5])

    assert pack_lengths(Tensor(["tensor(3)", "tensor(5)"]), 8) == [[0, 1]]  # type: ignore[arg-type]


def test_a_budget_that_no_subset_sum_fits_in_memory_for_is_refused() -> None:
    for budget in (2**40, 2**70):
        with pytest.raises(ConfigError, match=f"got {budget}, expected less than"):
            pack_lengths([1, 2], budget)


@pytest.mark.parametrize("arguments", [{"budget": 0}, {"budget": 8.0}, {"window": 0}, {"align": 0}, {"align": True}])
def test_rules_that_cannot_be_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        pack_lengths([1], **{"budget": 8, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PACKERS)
@pytest.mark.parametrize("wrong", [0, -1, 9])
def test_every_packer_refuses_a_length_that_no_pack_can_hold_and_names_its_sample(name: str, wrong: int) -> None:
    with pytest.raises(ValueError, match=f"sample 2: got {wrong} tokens .* expected 1 to 8, the budget"):
        pack_lengths([1, 2, wrong], 8, name)


def test_the_names_of_rules_are_those_of_the_packers() -> None:
    assert {*get_args(PackerName), "joint"} == set(PACKERS)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("first_fit_shuffle", {"seed": "x"}), ("first_fit_shuffle", {"seed": 1.5}), ("exact_fill", {"seed": None}),
        ("none", {"micro_batch_size": "4"}), ("karmarkar_karp", {"a": "x"}), ("joint", {"group": "8"}),
        ("joint", {"patience": None}), ("concatenative", {"max_samples_per_pack": True}),
        ("karmarkar_karp", {"equal_sizes": 1}),
    ],
)  # fmt: skip
def test_a_parameter_of_another_type_is_refused_naming_it(name: str, wrong: dict[str, Any]) -> None:
    ((key, value),) = wrong.items()
    with pytest.raises(ConfigError, match=f"{key}(=|: got ){value!r}, expected (an integer|true or false)"):
        pack_lengths([3, 4], 8, name, **wrong)


def test_an_unknown_packer_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'best'.*exact_fill, joint, sliding_ffd"):
        pack_lengths([1], 8, "best")
    assert all(make_packer(name).name == name for name in PACKERS)


@pytest.mark.parametrize("name", ["packers", "stats.fill", "shuffle", *(f"packers.{name}" for name in FILES)])
def test_the_examples_in_the_docstrings_hold(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"streampack.core.{name}")).failed == 0


DIGEST = """
import hashlib, sys
{before}
import streampack.core.packers as packers
assert sys.modules.get("numba") is None, "numba was imported before the first pack"
lengths = [1 + i * i * 7919 % 97 for i in range(600)]
packs = [packers.pack_lengths(lengths, 128, name, window=64) for name in packers.PACKERS]
print(hashlib.sha256(repr(packs).encode()).hexdigest(), "numba" in sys.modules and sys.modules["numba"] is not None)
"""


def digest(hash_seed: str, before: str = "") -> list[str]:
    environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    code = [sys.executable, "-c", DIGEST.format(before=before)]
    return subprocess.run(code, env=environment, capture_output=True, text=True, check=True).stdout.split()


def test_packs_depend_neither_on_the_hash_seed_nor_on_numba() -> None:
    with_numba, again = digest("0"), digest("4242")
    without = digest("7", before='sys.modules["numba"] = None')
    assert with_numba == again
    assert (with_numba[1], without[1]) == ("True", "False")
    assert with_numba[0] == without[0]


WITHOUT_NUMBA = """
import sys, time
sys.modules["numba"] = None
import numpy as np
from streampack.core.packers import PACKERS, pack_lengths
drawn = np.random.default_rng(0)
chat, any_length = np.clip(drawn.lognormal(6, 1.2, 20_000), 1, 8192).astype(int), drawn.integers(1, 8193, 20_000)
for name, lengths in [*((name, chat) for name in PACKERS), ("exact_fill", any_length)]:
    begun = time.process_time()
    packs = pack_lengths(lengths, 8192, name, window=1024)
    assert sorted(i for pack in packs for i in pack) == list(range(20_000))
    print(name, time.process_time() - begun)
"""


def test_20000_lengths_are_packed_within_3_s_by_each_packer_without_numba() -> None:
    environment = {"PYTHONPATH": str(ROOT)}
    code = [sys.executable, "-c", WITHOUT_NUMBA]
    told = subprocess.run(code, env=environment, capture_output=True, text=True, check=True).stdout.split()
    taken = list(zip(told[::2], map(float, told[1::2]), strict=True))
    assert len(taken) == len(PACKERS) + 1
    assert all(seconds < 3 for _, seconds in taken), taken
