"""Waste by cause, ranks' loads and waits: worked by hand, and the parts of the waste add up to the whole."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.deal.deal_stats import DealtFigures
from streampack.core.deal.step_cache import KeptSteps
from streampack.core.form.form_stats import FILL_BOUNDS, SAMPLES_BOUNDS, FormedFigures
from streampack.core.form.waits import Waits
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Align, Batch, Rules
from streampack.core.model.shapes import Shape, Sizes
from streampack.core.packers import make_packer
from streampack.core.stats.length_histogram import BUCKETS, bucket_of, least_of
from streampack.core.stats.padding import CAUSES, depends_on_mesh, padding_of
from tests.core.model.shape_cases import BUDGET, SHAPES, formed, rules_of_shape


@pytest.mark.parametrize(
    ("shape", "pack", "pp", "widths", "expected"),
    [
        # packs of 5, 16, 3 and no tokens, which take 8, 16, 4 and 0 aligned to 4
        ("fixed", 4, 1, [16, 16, 16, 16], {"alignment": 4, "pack_tail": 20, "empty_pack": 16}),
        ("fixed", 4, 2, [16, 16, 16, 16], {"alignment": 4, "pack_tail": 20, "empty_pack": 16}),
        ("exact", 4, 1, [8, 16, 4, 4], {"alignment": 4, "empty_pack": 4}),
        ("exact", 8, 1, [8, 16, 8, 8], {"alignment": 4, "pack_tail": 4, "empty_pack": 8}),
        ("exact", 8, 2, [16, 16, 16, 16], {"alignment": 4, "pack_tail": 4, "pipeline": 16, "empty_pack": 16}),
        (Sizes(multiple=8), 4, 1, [8, 16, 8, 8], {"alignment": 4, "shape": 4, "empty_pack": 8}),
        (Sizes(buckets=(12,)), 4, 1, [12, 16, 12, 12], {"alignment": 4, "shape": 12, "empty_pack": 12}),
        (
            Sizes(buckets=(12,)), 4, 2, [16, 16, 16, 16],
            {"alignment": 4, "shape": 12, "pipeline": 8, "empty_pack": 16},
        ),
    ],
)  # fmt: skip
def test_the_padding_of_a_step_is_counted_as_by_hand(
    shape: Shape, pack: int, pp: int, widths: list[int], expected: dict[str, int]
) -> None:
    rules = Rules(budget=16, align=Align(sample=4, pack=pack), shape=shape)
    tokens, slots = np.array([5, 16, 3, 0]), np.array([8, 16, 4, 0])
    found = rules.step_widths(slots, pp)
    assert found.tolist() == widths
    waste = dict(zip(CAUSES, padding_of(tokens, slots, found, rules).tolist(), strict=True))
    assert {cause: count for cause, count in waste.items() if count} == expected
    assert sum(waste.values()) == sum(widths) - 24


@given(
    st.lists(st.integers(1, BUDGET), min_size=1, max_size=40), st.sampled_from(SHAPES), st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2]), st.integers(0, 3), st.sampled_from([None, Batch(samples=7)]),
)  # fmt: skip
def test_the_parts_of_the_waste_add_up_to_what_was_delivered(
    lengths: list[int], shape: Shape, dp: int, pp: int, undealt: int, batch: Batch | None
) -> None:
    """Batches whose packs a mesh needs split, or empty ones beside, too; steps that nobody asked for yet count where no
    mesh has a say. Each step adds to what was counted before and takes nothing away, on another mesh neither.
    """
    rules = msgspec.structs.replace(rules_of_shape(shape), batch=batch)
    table, steps = formed(rules, lengths)
    kept, figures, delivered, real = KeptSteps("train", rules, "zigzag", table), FormedFigures(rules), 0, np.zeros(2)
    for step in steps:
        kept.add(step)
        figures.add(step, table)
    whole = figures.waste
    for step in steps:
        parts = []
        if step.number >= undealt:
            of_ranks = [kept.parts(step.number, Mesh(dp=dp, dp_rank=rank, pp=pp)) for rank in range(dp)]
            parts = [part for each in of_ranks for part, _ in each]
        if parts or not depends_on_mesh(rules):
            real += [step.packs.tokens.sum(), step.packs.slots.sum()]
            delivered += sum(int(part.widths(rules).sum()) for part in parts) or len(step.packs) * BUDGET
        list(kept.parts(step.number, Mesh(dp=dp + 1))) if parts and batch else ()
        assert (figures.waste + kept.figures.waste >= whole).all()
        whole = figures.waste + kept.figures.waste
    assert whole.min() >= 0
    assert real[0] + whole.sum() == delivered
    assert real[1] - real[0] == whole[CAUSES.index("alignment")]
    assert figures.totals.tokens == sum(lengths)
    assert kept.figures.delivered_tokens == (delivered if depends_on_mesh(rules) else 0)


@given(
    st.lists(st.integers(1, BUDGET), min_size=1, max_size=40), st.sampled_from(SHAPES), st.sampled_from(SHAPES),
    st.sampled_from([1, 2]),
)  # fmt: skip
def test_a_step_is_dealt_and_counted_by_the_rules_that_it_was_formed_under(
    lengths: list[int], first: Shape, later: Shape, pp: int
) -> None:
    """In a feed that began with other rules, steps are what they are in a feed that began with theirs."""
    began = msgspec.structs.replace(rules_of_shape(first), budget=2 * BUDGET, packs=4)
    rules = rules_of_shape(later)
    table, steps = formed(rules, lengths)
    of_feeds = []
    for of_feed in (began, rules):
        kept, figures = KeptSteps("train", of_feed, "zigzag", table), FormedFigures(of_feed)
        for step in steps:
            kept.add(step)
            figures.add(step, table)
        parts = [list(kept.parts(step.number, Mesh(dp=3, dp_rank=1, pp=pp))) for step in steps]
        delivered = figures.delivered_tokens + kept.figures.delivered_tokens
        waste = (figures.waste + kept.figures.waste).tolist()
        of_feeds.append(([part for each in parts for part, _ in each], waste, delivered, figures.fill.sum))
    assert of_feeds[0] == of_feeds[1]


def test_the_load_of_ranks_is_counted_as_by_hand() -> None:
    figures = DealtFigures()
    figures.add(np.array([9, 1, 8, 2]), np.array([9, 1, 8, 2]), np.array([[0, 2], [1, 3]]))
    assert figures.cost_max_over_mean == pytest.approx((9 / 8.5 + 2 / 1.5) / 2)
    assert figures.step_cost_max_over_mean == 1.0
    assert figures.rank_tokens() == {
        "before": {"min": 3.0, "max": 17.0, "mean": 10.0, "spread": 14.0},  # 9 + 8 and 1 + 2
        "after": {"min": 10.0, "max": 10.0, "mean": 10.0, "spread": 0.0},
    }
    figures.add(np.array([4, 0, 0, 0]), np.array([2, 0, 0, 0]), np.array([[0, 1], [2, 3]]))
    assert figures.cost_max_over_mean == pytest.approx((9 / 8.5 + 2 / 1.5 + 2) / 3), "a row without any is none"
    assert figures.step_cost_max_over_mean == pytest.approx((1.0 + 2.0) / 2)
    assert figures.rank_tokens()["after"] == {"min": 5.0, "max": 6.0, "mean": 5.5, "spread": 1.0}


def test_steps_that_were_never_dealt_have_no_figures() -> None:
    none = dict.fromkeys(("min", "max", "mean", "spread"), 0.0)
    assert DealtFigures().rank_tokens() == {"before": none, "after": none}


def test_tokens_of_skipped_steps_are_counted_once() -> None:
    rules = rules_of_shape("fixed")
    table, steps = formed(rules, [BUDGET] * 18)
    kept = KeptSteps("train", rules, "zigzag", table)
    for step in steps:
        kept.add(step, skipped=step.number == 0)
    kept.skip(0, 1)
    kept.skip(1, 1)
    assert kept.figures.skipped_tokens == 2 * 6 * BUDGET


@given(st.integers(0, 10**7))
def test_a_number_s_bucket_begins_at_most_a_32nd_below_it(number: int) -> None:
    bucket = int(bucket_of(np.array([number]))[0])
    assert least_of(bucket) <= number
    assert bucket == BUCKETS - 1 or number < least_of(bucket + 1)
    assert number - least_of(bucket) <= number // 32


def test_the_99th_and_the_longest_of_a_hundred_waits_are_told() -> None:
    waits, nothing = Waits(make_packer("exact_fill"), 1), np.zeros(0, np.int64)
    waits.window = 200
    assert waits.p99 == 0
    waits.chosen(np.zeros(98, np.int64), 100)
    waits.chosen(np.array([3]), 2)
    waits.chosen(np.array([7]), 1)
    assert (waits.p99, waits.longest(8, nothing)) == (3, 7)
    assert (waits.longest(8, np.array([-1, 2, 0])), waits.longest(8, np.array([-1]))) == (8, 7)
    assert waits.bound == 300


@given(
    st.lists(st.integers(1, BUDGET), min_size=1, max_size=40), st.sampled_from([None, Batch(samples=7)]),
    st.integers(1, 4),
)  # fmt: skip
def test_every_pack_is_counted_once_by_how_full_it_is(lengths: list[int], batch: Batch | None, counted: int) -> None:
    """However often someone asks meanwhile."""
    rules = msgspec.structs.replace(rules_of_shape("fixed"), batch=batch)
    table, steps = formed(rules, lengths)
    figures, shares = FormedFigures(rules), []
    for step in steps:
        figures.add(step, table)
        shares += [pack.num_tokens / rules.budget for pack in step.packs]
        if step.number % counted == 0:
            assert figures.fill.counts.sum() == figures.samples.counts.sum() == len(shares)
    of_each = [sum(low < share <= upto for share in shares) for low, upto in pairwise(FILL_BOUNDS)]
    assert figures.fill.counts.tolist() == [shares.count(0), *of_each, 0]
    assert figures.fill.sum == pytest.approx(sum(shares))
    held = [len(pack.handles) for step in steps for pack in step.packs]
    assert figures.samples.sum == sum(held)
    of_each = [sum(low < count <= upto for count in held) for low, upto in pairwise(SAMPLES_BOUNDS)]
    assert figures.samples.counts.tolist() == [held.count(0), *of_each, 0]
