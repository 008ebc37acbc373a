"""``exact_fill`` within limits in other units than tokens, such as the patches of images."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack.core.form.former import Request
from streampack.core.model.fields import Field
from streampack.core.model.keys.planning_keys import MediaLimits
from streampack.core.model.rules import Rules
from streampack.core.packers import PACKERS
from streampack.core.packers.exact_fill.exact_fill import ExactFill
from streampack.core.packers.packer import I64, Extra, Limited
from streampack.core.packers.registry import PACKER_NAMES
from streampack.errors import InternalError


def pack_stream(lengths: I64, counts: I64, most: I64, budget: int, window: int, cap: int | None = None) -> list[I64]:
    """Pack a whole stream, with a few packs for each call, as FORM does; return the samples of each pack."""
    packer, left, ages = ExactFill(max_samples_per_pack=cap), np.arange(len(lengths)), np.full(len(lengths), -1)
    packs = list[I64]()
    while len(left):
        choice = packer.choose(
            lengths[left], ages, budget, 3, True, window=window, extra=Extra(Limited(counts[:, left], most))
        )  # fmt: skip
        packs += [left[choice.indices[a:b]] for a, b in zip(choice.bounds, choice.bounds[1:], strict=False)]
        assert len(choice.indices), "a closed stream is packed whole"
        kept = np.setdiff1d(np.arange(len(left)), choice.indices)
        left, ages = left[kept], choice.ages[kept]
    return packs


@st.composite
def streams(draw: st.DrawFn) -> tuple[I64, I64, I64, int]:
    budget = draw(st.integers(1, 64))
    most = np.array(draw(st.lists(st.integers(1, 40), min_size=1, max_size=2)), np.int64)
    rows = draw(
        st.lists(st.tuples(st.integers(1, budget), *(st.integers(0, int(each)) for each in most.tolist())), max_size=60)
    )
    table = np.array(rows, np.int64).reshape(len(rows), 1 + len(most))
    return table[:, 0], np.ascontiguousarray(table[:, 1:].T), most, budget


@settings(max_examples=60)
@given(streams(), st.integers(1, 16), st.one_of(st.none(), st.integers(1, 4)))
def test_no_pack_exceeds_a_limit_and_each_sample_is_in_one_pack(
    stream: tuple[I64, I64, I64, int], window: int, cap: int | None
) -> None:
    lengths, counts, most, budget = stream
    packs = pack_stream(lengths, counts, most, budget, window, cap)
    assert sorted(sample for pack in packs for sample in pack) == list(range(len(lengths)))
    for pack in packs:
        assert 0 < lengths[pack].sum() <= budget
        assert (counts[:, pack].sum(axis=1) <= most).all()
        assert cap is None or len(pack) <= cap


@settings(max_examples=40)
@given(streams(), st.integers(1, 16))
def test_no_sample_waits_longer_than_the_packer_says(stream: tuple[I64, I64, I64, int], window: int) -> None:
    lengths, counts, most, budget = stream
    packer, left, ages = ExactFill(), np.arange(len(lengths)), np.full(len(lengths), -1)
    allowed, formed = dict[int, int](), 0
    while len(left):
        limited = Limited(counts[:, left], most)
        choice = packer.choose(lengths[left], ages, budget, 1, True, window=window, extra=Extra(limited))
        for sample in sorted({*left[choice.indices].tolist(), *left[choice.ages >= 0].tolist()}):
            allowed.setdefault(sample, formed + packer.max_wait(window, len(allowed)))
        for sample in left[choice.indices].tolist():
            assert formed <= allowed.pop(sample)
        formed += 1
        kept = np.setdiff1d(np.arange(len(left)), choice.indices)
        left, ages = left[kept], choice.ages[kept]


def test_samples_that_take_more_than_half_of_a_limit_are_alone_with_it() -> None:
    """Every image takes 51% of the limit: one for each pack, and text fills the rest of the tokens."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(20, 400, 3000)
    counts = np.where(rng.random(3000) < 0.2, 51, 0)[None]
    packs = pack_stream(lengths, counts, np.array([100]), 2048, 256)
    assert max(counts[0, pack].sum() for pack in packs) == 51
    least = max(-(-int(lengths.sum()) // 2048), int((counts > 0).sum()))
    assert len(packs) <= 1.02 * least


@pytest.mark.parametrize("limit", [4096, 8192, 16384])
def test_packs_are_near_the_bound_of_the_unit_that_binds(limit: int) -> None:
    """Documents with images, in a long-tailed mix: tokens or patches decide how many packs are needed."""
    rng = np.random.default_rng(1)
    text = np.clip(rng.lognormal(5.5, 1.0, 4000), 16, 4096).astype(np.int64)
    patches = np.where(rng.random(4000) < 0.5, np.clip(rng.lognormal(6.5, 0.8, 4000), 64, 4096), 0).astype(np.int64)
    lengths = np.minimum(text + patches // 4, 8192)
    packs = pack_stream(lengths, patches[None], np.array([limit]), 8192, 512)
    least = max(-(-int(lengths.sum()) // 8192), -(-int(patches.sum()) // limit))
    assert len(packs) <= 1.02 * least


@pytest.mark.parametrize("name", PACKERS)
def test_a_packer_keeps_limits_or_is_refused_with_them(name: str) -> None:
    packer, lengths, count = PACKERS[name], np.full(40, 2, np.int64), 10**6
    extra = Extra(Limited(np.full((1, 40), 3, np.int64), np.array([7])))
    request = Request(packer, lengths, np.full(40, -1), 16, count, True, 40, None, extra)
    if packer.keeps_limits:
        choice = request.choose()
        assert sorted(choice.indices.tolist()) == list(range(40))
        assert np.diff(choice.bounds).max() == 2, "three have 9, the limit is 7"
        return
    with pytest.raises(InternalError, match="expected a packer that keeps limits"):
        request.choose()


@pytest.mark.parametrize("name", PACKER_NAMES)
def test_rules_accept_limits_for_packers_that_keep_them(name: str) -> None:
    pixels = Field(name="pixels", axis="patch", dtype="uint8")
    limits = MediaLimits(patches=7)
    if PACKERS[name].keeps_limits:
        Rules(budget=16, packer=name, media_fields=(pixels,), limits=limits)
        return
    with pytest.raises(ValueError, match="which alone keeps limits"):
        Rules(budget=16, packer=name, media_fields=(pixels,), limits=limits)
