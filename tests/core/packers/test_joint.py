"""joint: packs of a group cost the same, none is over budget, and nobody waits beyond the bound."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lengths import lengths_of
from streampack.core.packers.joint.joint import Joint
from streampack.core.packers.joint.joint_bounds import MAX_MEDIA, held_tokens, max_wait, num_outliers, work_of
from streampack.core.packers.joint.joint_kernels import joint
from streampack.core.packers.packer import I64, Choice, Extra, Limited
from streampack.errors import ConfigError
from tests.core.packers.oracles.joint import View, joint_oracle
from tests.core.packers.uncompiled import uncompiled

UNCOMPILED = uncompiled("streampack.core.packers.joint.joint_kernels").joint


@dataclass(frozen=True)
class Stream:
    """What a packer is asked about, but for ages and counts."""

    lengths: list[int]
    sizes: list[int]
    budget: int
    window: int
    group: int
    patience: int
    cap: int
    media: list[int] | None
    limited: Limited | None


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    """Some with heavy tails, some of one length or two, some of groups of samples under a cap; some with media."""
    budget = draw(st.integers(1, 60))
    anything, short = st.integers(1, budget), st.integers(1, max(1, budget // 6))
    few = st.sampled_from([draw(anything), draw(anything)])
    lengths = draw(st.lists(draw(st.sampled_from([anything, short, short | anything, few, few | short])), max_size=120))
    cap = draw(st.sampled_from([3, 10_000]))
    sizes = draw(st.lists(st.integers(1, 3), min_size=len(lengths), max_size=len(lengths)))
    small = st.integers(1, 5)
    window, group, patience = draw(st.integers(1, 20)), draw(small), draw(small)
    count, media, limited = len(lengths), None, None
    if draw(st.booleans()):
        heavy = st.just(0) | st.integers(0, budget * budget) | st.integers(0, 2**48)
        media = draw(st.lists(heavy, min_size=count, max_size=count))
    if draw(st.booleans()):
        most = draw(st.lists(st.integers(1, 40), min_size=1, max_size=2))
        columns = [draw(st.lists(st.integers(0, each), min_size=count, max_size=count)) for each in most]
        limited = Limited(np.array(columns, np.int64), array(most))
    return Stream(lengths, sizes, budget, window, group, patience, cap, media, limited)


def limits_of(stream: Stream) -> Limited:
    """The limits with that of samples first, as kernels take them."""
    samples = Limited(array(stream.sizes)[None], array([stream.cap]))
    if stream.limited is None:
        return samples
    return Limited(*(np.concatenate(each) for each in zip(samples, stream.limited, strict=True)))


def check_limits(stream: Stream, pack: list[int]) -> None:
    limited = limits_of(stream)
    assert 0 < sum(stream.lengths[i] for i in pack) <= stream.budget
    assert (limited.counts[:, pack].sum(axis=1) <= limited.most).all()


def array(values: list[int]) -> I64:
    return np.array(values, np.int64)


def vars_of(choice: Choice) -> tuple[I64, I64, I64]:
    return choice.indices, choice.bounds, choice.ages


def packs_of(indices: I64, bounds: I64) -> list[list[int]]:
    return [pack.tolist() for pack in np.split(indices, bounds[1:-1])] if len(bounds) > 1 else []


@given(stream=streams(), count=st.integers(1, 30), closed=st.booleans(), data=st.data())
@settings(max_examples=100)
def test_the_kernel_forms_what_the_oracle_forms_compiled_or_not(
    stream: Stream, count: int, closed: bool, data: st.DataObject
) -> None:
    seen = data.draw(st.lists(st.integers(0, 6), max_size=len(stream.lengths)))
    ages = array(seen + [-1] * (len(stream.lengths) - len(seen)))
    given_ages = ages.copy()
    lengths = array(stream.lengths)
    work = work_of(lengths, None if stream.media is None else array(stream.media))
    asked = (
        lengths, work, ages, *limits_of(stream), stream.budget, count, closed, stream.window, stream.group,
        stream.patience,
    )  # fmt: skip
    expected, compiled, plain = joint_oracle(*asked), joint(*asked), UNCOMPILED(*asked)
    assert not UNCOMPILED.signatures
    for found in (compiled, plain):
        for one, other in zip(expected, found, strict=True):
            assert one.dtype == other.dtype == np.int64
            assert one.tolist() == other.tolist()
    assert ages.tolist() == given_ages.tolist(), "what it was given is left alone"
    for pack in packs_of(*compiled[:2]):
        assert pack == sorted(pack)
        check_limits(stream, pack)


@given(stream=streams())
@settings(max_examples=100)
def test_no_sample_waits_beyond_the_bound_and_no_more_is_held_than_promised(stream: Stream) -> None:
    """Group by group: ages tell which samples a group has seen, and so how many were held when each had come."""
    each = Joint(group=stream.group, patience=stream.patience, max_samples_per_pack=stream.cap)
    names, ages = np.arange(len(stream.lengths)), np.full(len(stream.lengths), -1)
    lengths, sizes = array(stream.lengths), array(stream.sizes)
    media = None if stream.media is None else array(stream.media)
    most_held = held_tokens(stream.budget, stream.group, stream.window, stream.media is not None)
    came: dict[int, tuple[int, int]] = {}
    waited: dict[int, int] = {}
    groups = 0
    while len(names):
        choice = each.choose(
            lengths[names], ages, stream.budget, 1, True, window=stream.window, sizes=sizes[names],
            extra=Extra(
                stream.limited and Limited(stream.limited.counts[:, names], stream.limited.most),
                None if media is None else media[names],
            ),
        )  # fmt: skip
        assert 0 < len(choice.bounds) - 1 <= stream.group
        seen = choice.ages >= 0
        assert lengths[names[seen]].sum() <= most_held
        for pack in packs_of(names[choice.indices], choice.bounds):
            check_limits(stream, pack)
        for place in np.flatnonzero(seen & (ages < 0)).tolist():
            came[int(names[place])] = (groups, place + 1)
        left = np.ones(len(names), np.bool_)
        left[choice.indices] = False
        for name in names[~left].tolist():
            group, held = came[name]
            waited[name] = groups - group
            assert waited[name] <= max_wait(stream.group, stream.patience, held)
        names, ages = names[left], choice.ages[left]
        groups += 1
    assert len(waited) == len(stream.lengths)


@given(lengths=st.lists(st.integers(1, 60), max_size=80), data=st.data())
def test_outliers_are_counted_as_they_are_told_apart(lengths: list[int], data: st.DataObject) -> None:
    count = len(lengths)
    media = data.draw(st.none() | st.lists(st.integers(0, 2**40), min_size=count, max_size=count))
    work = [n * n + (min(media[i], n * MAX_MEDIA) if media else 0) for i, n in enumerate(lengths)]
    view = View(lengths, work, [0] * count, [[1]] * count, [99], 60, 8, 2, 2)
    assert num_outliers(array(lengths), 60, None if media is None else array(media)) == view.num_outliers


def test_an_outlier_that_finds_no_others_goes_when_its_patience_is_over() -> None:
    """2,000 short samples and one long: with 8 to a group of 2 packs, and about 2 groups held, it goes after 5 more."""
    lengths = np.full(2000, 2)
    lengths[3] = 7
    choice = Joint(group=2, patience=5).choose(lengths, np.full(2000, -1), 8, 2000, False, window=16)
    pack = int(np.searchsorted(choice.bounds, np.flatnonzero(choice.indices == 3)[0], side="right")) - 1
    assert pack // 2 == 5
    two = lengths.copy()
    two[9] = 7
    choice = Joint(group=2, patience=5).choose(two, np.full(2000, -1), 8, 2, False, window=16)
    assert [two[pack].max() for pack in np.split(choice.indices, choice.bounds[1:-1])] == [7, 7], "two go at once"


@given(stream=streams(), count=st.integers(1, 9))
def test_media_that_cost_nothing_change_no_pack(stream: Stream, count: int) -> None:
    each, lengths, ages = Joint(group=stream.group), array(stream.lengths), np.full(len(stream.lengths), -1)
    without, free = (
        each.choose(lengths, ages, stream.budget, count, True, window=stream.window, extra=Extra(work=media))
        for media in (None, np.zeros(len(lengths), np.int64))
    )
    assert all(np.array_equal(*pair) for pair in zip(vars_of(without), vars_of(free), strict=True))


def figures(lengths: I64, group: int, budget: int) -> tuple[float, float]:
    """Max over mean of the sums of squares in a group, mean over groups; and utilization."""
    choice = Joint(group=group).choose(lengths, np.full(len(lengths), -1), budget, len(lengths), False, window=4096)
    taken, starts = lengths[choice.indices], choice.bounds[:-1]
    squares = np.add.reduceat(taken.astype(np.float64) ** 2, starts).reshape(-1, group)
    return float((squares.max(axis=1) / squares.mean(axis=1)).mean()), float(taken.sum() / len(starts) / budget)


@pytest.mark.parametrize("kind", ["rl_rollouts", "source_code"])
@pytest.mark.parametrize(("group", "samples"), [(8, 60_000), (64, 120_000)])
def test_packs_of_heavy_tailed_lengths_cost_the_same_and_are_full(kind: str, group: int, samples: int) -> None:
    ratio, utilization = figures(lengths_of(kind, 32768, samples), group, 32768)
    assert ratio <= 1.05
    assert utilization >= 0.995


def images(count: int, seed: int) -> tuple[I64, I64, I64]:
    """Lengths, patches and media work of chats, of which 40% have no image; the costs are those of Qwen2-VL 7B."""
    rng = np.random.default_rng(seed)
    patches = np.where(rng.random(count) < 0.6, np.clip(rng.lognormal(7.5, 1.2, count), 64, 40_000), 0).astype(np.int64)
    lengths = np.minimum(np.clip(rng.lognormal(6, 1, count), 16, 8192).astype(np.int64) + patches // 4, 16_384)
    return lengths, patches, 3600 * patches + patches * patches // 2


@pytest.mark.parametrize(("group", "most"), [(8, None), (8, 49_152), (64, 49_152)])
def test_packs_with_media_cost_the_same_and_are_full(group: int, most: int | None) -> None:
    lengths, patches, media = images(60_000, group)
    limited = None if most is None else Limited(patches[None], array([most]))
    choice = Joint(group=group).choose(
        lengths, np.full(len(lengths), -1), 16_384, 2000, False, window=4096, extra=Extra(limited, media)
    )
    taken, starts = choice.indices, choice.bounds[:-1]
    work = np.add.reduceat((lengths**2 + media)[taken].astype(np.float64), starts).reshape(-1, group)
    assert (work.max(axis=1) / work.mean(axis=1)).mean() <= 1.08
    assert lengths[taken].sum() / len(starts) / 16_384 >= 0.995
    assert most is None or np.add.reduceat(patches[taken], starts).max() <= most


def test_the_last_samples_go_in_few_packs() -> None:
    lengths = array([5, 5, 5, 5, 5, 5])
    choice = Joint(group=4).choose(lengths, np.full(6, -1), 10, 9, True, window=64)
    assert packs_of(choice.indices, choice.bounds) == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("wrong", [{"group": 0}, {"patience": 0}, {"max_samples_per_pack": 0}])
def test_parameters_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=0, expected at least 1"):
        Joint(**wrong)  # type: ignore[arg-type]


def test_a_budget_whose_squares_do_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="budget: got 16777216, expected less"):
        Joint().choose(array([1]), array([-1]), 2**24, 1, True, window=4)
