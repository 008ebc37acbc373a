"""What ``streampack plan`` predicts, against figures computed by hand and against the packing functions themselves."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from streampack_services.forecast.forecast import ALONE, Forecast, forecast, order_of, planned_rules, with_packer
from streampack_services.forecast.forecast import formed as steps_made
from streampack_services.forecast.lengths import StreamLengths, Workload, of_lengths

from streampack import pack_lengths
from streampack.core.deal.step_cache import KeptSteps
from streampack.core.form.form_stats import FormedFigures
from streampack.core.model.fields import Field
from streampack.core.model.keys.planning_keys import Balance, Warmup
from streampack.core.model.keys.stream_keys import Overlong
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Align, Batch, Rules, StreamRules
from streampack.core.model.samples import I64
from streampack.core.model.shapes import Shape
from streampack.core.packers import PACKERS
from streampack.core.stats.fill import Totals
from streampack.core.stats.padding import CAUSES
from streampack.errors import UserError
from tests.core.model.shape_cases import BUDGET, SHAPES, formed
from tests.core.model.shape_cases import rules_of_shape as rules_of_shape

GOLDEN = np.array([4, 1, 3, 2, 1, 3, 4, 5])
"""By next fit into 5: packs of 5, 5, 4, 4 and 5 tokens, with 17, 13, 10, 16 and 25 as sums of squares."""

NONE = dict.fromkeys(CAUSES, 0)


def rules_of(budget: int, packs: int, packer: str = "concatenative", **others: object) -> Rules:
    return msgspec.convert({"budget": budget, "packs": packs, "packer": packer, **others}, Rules)


def predicted(
    lengths: I64, rules: Rules, dp: int = 1, total: int | None = None, overlong: Overlong = "truncate", pp: int = 1
) -> Forecast:
    workload = of_lengths("lengths", np.asarray(lengths, np.int64), None, total)
    rules = planned_rules(rules, workload, overlong)
    return forecast(workload, order_of(workload, rules), rules, dp, pp)


def test_the_golden_packs_have_the_figures_that_a_hand_gets() -> None:
    got = predicted(GOLDEN, rules_of(5, 2, balance={"a": 0, "b": 1}), dp=2)
    assert (got.packs, got.steps, got.steps_low, got.steps_high) == (5, 3, 3, 3)
    assert got.utilization == got.slot_utilization == pytest.approx(23 / 30)
    assert got.waste == pytest.approx(NONE | {"pack_tail": 2 / 30, "empty_pack": 5 / 30})
    assert got.cost_max_over_mean == pytest.approx((17 / 15 + 16 / 13 + 2) / 3)
    assert got.attention_max_over_mean == got.step_cost_max_over_mean == got.cost_max_over_mean
    assert got.useful == pytest.approx((17 + 13 + 10 + 16) / (2 * (17 + 16))), "of the two steps without empty packs"


def test_padding_is_computed_like_tokens() -> None:
    got = predicted(GOLDEN, rules_of(5, 2, balance={"a": 3, "b": 0}), dp=2)
    assert got.useful == pytest.approx((5 + 5 + 4 + 4) / 20), "what a pack costs does not depend on how full it is"
    assert got.attention_max_over_mean == 1.0, "of nothing"


def test_alignment_is_waste_of_its_own() -> None:
    got = predicted(np.array([3, 5, 1]), rules_of(8, 1, align={"sample": 4, "pack": 4}))
    assert got.packs == 3
    assert got.waste == pytest.approx(NONE | {"alignment": (1 + 3 + 3) / 24, "pack_tail": 8 / 24})
    assert (got.utilization, got.slot_utilization) == pytest.approx((9 / 24, 16 / 24))


def test_packs_of_another_shape_waste_of_what_is_delivered() -> None:
    rules = rules_of(8, 2, align={"sample": 4, "pack": 4}, shape="exact")
    got = predicted(np.array([3, 5, 1]), rules)
    assert got.waste == pytest.approx(NONE | {"alignment": 7 / 20, "empty_pack": 4 / 20})


@pytest.mark.parametrize(
    ("policy", "tokens", "lost"), [("truncate", 12, 4 / 16), ("drop", 7, 9 / 16), ("split", 16, 0)]
)
def test_overlong_samples_are_cut_dropped_or_split_as_the_broker_does(
    policy: Overlong, tokens: int, lost: float
) -> None:
    got = predicted(np.array([3, 9, 4]), rules_of(5, 1), overlong=policy)
    assert got.packs is not None
    assert got.utilization == pytest.approx(tokens / (5 * got.packs))
    assert got.overlong == 1
    assert got.lost_share == pytest.approx(lost)


@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=80), st.sampled_from(sorted(PACKERS)), st.sampled_from([1, 4]),
    st.integers(1, 40), st.integers(1, 5),
)  # fmt: skip
def test_the_packs_are_those_of_pack_lengths(
    lengths: list[int], packer: str, align: int, window: int, packs: int
) -> None:
    rules = Rules(budget=64, packs=packs, packer=packer, window=window, align=Align(align, align))
    try:
        expected = pack_lengths(lengths, 64, packer, window, align)
    except UserError:
        with pytest.raises(UserError):
            predicted(np.array(lengths), rules)
        return
    got = predicted(np.array(lengths), rules)
    assert got.packs == len(expected)
    assert got.steps == -(-len(expected) // packs)
    assert sum(got.waste.values()) == pytest.approx(1 - got.utilization)
    assert got.utilization == pytest.approx(sum(lengths) / (64 * packs * got.steps))
    assert 0 < got.useful <= 1 + 1e-9


def test_streams_are_merged_by_their_weights() -> None:
    long, short = np.full(3000, 6), np.full(3000, 2)
    streams = tuple(StreamLengths(name, (lengths,), (True,), 3000.0) for name, lengths in (("a", long), ("b", short)))
    rules = Rules(budget=8, packs=1, streams=(StreamRules("a", 0.5, 9), StreamRules("b", 0.5)))
    workload = Workload("two", streams)
    order = order_of(workload, planned_rules(rules, workload, "truncate"))
    later = order.lengths[1000:3000].tolist()  # where a stream begins follows from the seed
    assert later.count(2) == pytest.approx(3 * later.count(6), abs=3), "as many tokens of each"
    assert sorted(order.lengths.tolist()) == [2] * 3000 + [6] * 3000


def test_a_sample_of_a_stream_ends_where_the_first_stream_is_missing() -> None:
    streams = (StreamLengths("a", (np.full(2000, 4),), (False,)), StreamLengths("b", (np.full(9000, 4),), (False,)))
    workload = Workload("two", streams)
    order = order_of(workload, planned_rules(Rules(budget=8, packs=1), workload, "truncate"))
    assert 4000 - 256 <= len(order.lengths) <= 4000 + 256, "equal shares, but for where they begin"
    assert not order.ended


def test_equal_samples_leave_no_doubt_about_the_steps_of_a_pass() -> None:
    got = predicted(np.full(100, 5), rules_of(10, 4, "exact_fill", window=8), total=1000)
    assert (got.packs, got.steps, got.steps_low, got.steps_high) == (500, 125, 125, 125)


def test_some_stretches_of_a_long_file_are_packed_and_all_its_tokens_are_counted() -> None:
    lengths = np.tile([5, 5, 5, 5, 9], 2000)
    workload = of_lengths("lengths", lengths, 1600)
    rules = planned_rules(rules_of(10, 4), workload, "truncate")
    order = order_of(workload, rules)
    assert (len(order.lengths), order.ended) == (1600, False)
    got = forecast(workload, order, rules, 1)
    assert got.packs == pytest.approx(3 * 2000, rel=0.02), "two of two fives, one of a nine, and a seam now and then"
    assert got.steps_low == pytest.approx(got.steps_high, rel=0.05)
    assert workload.notes == ["the forecast uses 1,600 of the 10,000 lengths (set --samples for more)"]
    assert workload.streams[0].share == 1.0, "every length was read"


@given(
    st.lists(st.integers(1, BUDGET), min_size=1, max_size=60), st.sampled_from(SHAPES), st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2]),
    st.sampled_from([None, Batch(samples=7), Batch(samples=5, micro_batch_multiple=2, min_micro_batches=3)]),
    st.sampled_from(["deal", "none"]), st.sampled_from([None, Warmup(8, 4)]),
)  # fmt: skip
def test_the_forecast_of_a_pass_is_what_a_broker_counts(
    lengths: list[int], shape: Shape, dp: int, pp: int, batch: Batch | None, kind: str, warmup: Warmup | None
) -> None:
    """Of whole steps on any mesh: batches whose packs are split or empty, too, shapes, and a budget that warms up."""
    balance = msgspec.convert({"kind": kind}, Balance)
    rules = msgspec.structs.replace(rules_of_shape(shape), batch=batch, balance=balance, warmup=warmup)
    got = predicted(np.array(lengths), rules, dp, pp=pp)
    table, steps = formed(rules, lengths)
    kept, totals, of_formed = KeptSteps("train", rules, "zigzag", table), Totals(), FormedFigures(rules)
    micro, delivered = [], 0
    for step in steps:
        kept.add(step)
        totals.add(step.packs)
        of_formed.add(step, table)
        for rank in range(dp):
            parts = [part for part, _ in kept.parts(step.number, Mesh(dp=dp, dp_rank=rank, pp=pp))]
            delivered += sum(int(part.widths(rules).sum()) for part in parts)
        micro.append(parts[0].micro_batches)
    figures = kept.figures
    assert got.steps == len(steps)
    assert got.waste == pytest.approx(dict(zip(CAUSES, (of_formed.waste + figures.waste) / delivered, strict=True)))
    assert got.filled == pytest.approx(sum(lengths) / delivered)
    assert got.utilization == pytest.approx(totals.tokens / (totals.packs * BUDGET))
    assert got.cost_max_over_mean == pytest.approx(figures.cost_max_over_mean)
    assert got.step_cost_max_over_mean == pytest.approx(figures.step_cost_max_over_mean)
    assert (got.micro_batches_low, got.micro_batches_high) == (min(micro), max(micro))
    assert got.micro_batches == pytest.approx(np.mean(micro))
    packs = dp * sum(micro)
    assert got.split_share == pytest.approx(figures.split_packs / packs)
    assert 0 < got.useful <= 1 + 1e-9


@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=80), st.sampled_from(sorted(PACKERS)), st.integers(1, 9),
    st.sampled_from([None, Batch(samples=7)]), st.sampled_from([None, Warmup(8, 4)]),
)  # fmt: skip
def test_steps_do_not_depend_on_how_many_samples_come_at_once(
    lengths: list[int], packer: str, at_once: int, batch: Batch | None, warmup: Warmup | None
) -> None:
    rules = Rules(budget=64, packs=2, window=9, batch=batch, warmup=warmup)
    try:
        rules = with_packer(rules, packer, ALONE)
        steps, full = steps_made(np.array(lengths), rules)
    except (UserError, ValueError):
        return
    others, full_too = steps_made(np.array(lengths), rules, at_once=at_once)
    assert [step.chain for step in steps] == [step.chain for step in others]
    assert full == full_too


def test_the_forecast_of_a_batch_is_the_one_by_hand() -> None:
    """Batches of 4 1 3 2 and 1 3 4 5 in packs of 5, on two ranks: the second is three packs, and 1 3 is split."""
    got = predicted(GOLDEN, rules_of(5, 2, balance={"a": 0, "b": 1}, batch={"samples": 4}), dp=2)
    assert (got.packs, got.steps, got.micro_batches_low, got.micro_batches_high) == (6, 2, 1, 2)
    assert got.utilization == pytest.approx(23 / 25), "of the five packs that are formed: 4 1, 3 2; 1 3, 4, 5"
    assert got.split_share == pytest.approx(1 / 6)
    assert got.waste == pytest.approx(NONE | {"pack_tail": 7 / 30})


def test_batches_with_too_few_samples_for_a_mesh_are_refused_where_they_are_an_error() -> None:
    rules = rules_of(5, 1, batch={"samples": 4, "empty": "error"})
    with pytest.raises(
        UserError, match="Got a batch of 4 samples with dp=5 and `empty: error`, expected at least 5 samples"
    ):
        predicted(GOLDEN, rules, dp=5)
    with pytest.raises(
        UserError, match="Got 8 samples, which do not fill a step, and `tail: drop` drops incomplete steps"
    ):
        predicted(GOLDEN, rules_of(5, 1, batch={"samples": 9}, tail="drop"))


def test_a_pass_has_as_many_batches_as_its_samples_make() -> None:
    lengths = np.tile([5, 5, 0, 9], 50)
    got = predicted(lengths, rules_of(10, 1, batch={"samples": 30}), total=4000)
    assert got.steps == 100, "three in four can be used"
    assert 90 < got.steps_low < 100 < got.steps_high < 110  # type: ignore[operator]
    dropped = predicted(lengths, rules_of(8, 1, batch={"samples": 30}, tail="drop"), total=4000, overlong="drop")
    assert dropped.steps == 2000 // 30
    split = predicted(lengths, rules_of(4, 1, batch={"samples": 30}), total=4000, overlong="split")
    assert split.steps == 100, "a split sample counts once"


@pytest.mark.parametrize(("first", "steps"), [(10, 125), (5, 130), (1, 134)])
def test_a_budget_that_warms_up_takes_more_steps(first: int, steps: int) -> None:
    warmup = {"init": first, "steps": 20}
    got = predicted(np.full(100, 1), rules_of(10, 4, "exact_fill", window=8, warmup=warmup), total=5000)
    grown = sum(4 * (first + (10 - first) * k / 20) for k in range(20))
    assert got.steps == steps
    assert got.steps == pytest.approx(20 + (5000 - grown) / 40, abs=1)
    assert got.utilization == 1.0, "in the long run"


def test_a_stream_of_unknown_size_has_no_number_of_steps() -> None:
    workload = Workload("some", (StreamLengths("a", (np.full(100, 5),), (False,)),))
    rules = planned_rules(rules_of(10, 4), workload, "truncate")
    got = forecast(workload, order_of(workload, rules), rules, 1)
    assert (got.packs, got.steps, got.steps_low, got.steps_high) == (None, None, None, None)
    assert got.utilization == 1.0


def test_the_interval_of_a_sample_holds_the_steps_of_the_whole() -> None:
    held = 0
    for seed in range(12):
        every = np.clip(np.random.default_rng(seed).lognormal(5, 1, 40_000), 1, 4096).astype(np.int64)
        rules = Rules(budget=4096, packs=8, packer="concatenative", seed=seed)
        whole = predicted(every, rules)
        part = predicted(every[:4000], rules, total=len(every))
        assert whole.steps is not None
        assert part.steps_low is not None
        assert part.steps_high is not None
        held += part.steps_low <= whole.steps <= part.steps_high
        assert part.steps_high - part.steps_low < 0.2 * whole.steps
        assert part.useful == pytest.approx(whole.useful, abs=0.03)
    assert held >= 10, "95 of 100 should"


def test_balance_by_cost_shows_in_the_forecast() -> None:
    lengths = np.clip(np.random.default_rng(1).lognormal(6.5, 1.2, 4000), 1, 32768).astype(np.int64)
    rules = Rules(budget=32768, packs=64, balance=Balance(a=0, b=1))
    dealt = predicted(lengths, rules, dp=8)
    in_order = predicted(lengths, msgspec.structs.replace(rules, balance=Balance("none", a=0, b=1)), dp=8)
    assert 1 < dealt.cost_max_over_mean < in_order.cost_max_over_mean
    assert dealt.useful > in_order.useful


# Media

PIXELS = Field(name="pixels", dtype="uint8", axis="patch")


def sizes_of(patches: list[list[int]]) -> I64:
    """The sizes of media whose items have these patches, [samples][items]; a byte for each patch."""
    return np.array([[len(each), sum(each), sum(p * p for p in each), sum(each)] for each in patches], np.int64)


def with_media(lengths: I64, sizes: I64, rules: Rules, total: int | None = None, dp: int = 2) -> Forecast:
    stream = StreamLengths("a", (lengths,), (total is None,), float(total or len(lengths)), media=(sizes,))
    workload = Workload("some", (stream,))
    rules = planned_rules(rules, workload, "drop")
    return forecast(workload, order_of(workload, rules), rules, dp)


def test_media_have_the_figures_that_a_hand_gets() -> None:
    balance = {"a": 1, "b": 0, "patches": [10, 1], "items": 5}
    rules = rules_of(8, 2, balance=balance, media_fields=(PIXELS,))
    got = with_media(np.array([4, 4, 2, 2]), sizes_of([[3], [], [1, 2], []]), rules)
    first, second = 8 + (30 + 9 + 5), 4 + (10 + 1 + 5) + (20 + 4 + 5)
    assert got.cost_max_over_mean == pytest.approx(first / ((first + second) / 2))
    assert got.attention_max_over_mean == 1.0, "of tokens alone"
    assert got.patches_max_over_mean == 1.0
    assert got.useful == pytest.approx((first + second) / (2 * (second + 4))), "four tokens of padding cost something"
    assert (got.bound_by, got.most_patches, got.most_items) == ({"tokens": 1.0}, 3, 2)


def test_packs_end_at_the_limit_that_binds() -> None:
    rules = rules_of(8, 1, "exact_fill", media_fields=(PIXELS,), limits={"patches": 4, "items": 2})
    lengths, patches = np.array([4, 4, 4, 4, 8, 2, 2]), [[4], [4], [1], [1], [], [1, 1], []]
    got = with_media(lengths, sizes_of(patches), rules, dp=1)
    assert got.packs == 5, "4 and 4 patches in two packs; the two others together; 8 tokens; two items and none"
    assert got.bound_by == {"tokens": 0.4, "patches": 0.4, "items": 0.2}
    assert (got.most_patches, got.most_items, got.unfit) == (4, 2, 0)
    got = with_media(np.array([4, 4]), sizes_of([[5], [1, 1, 1]]), rules_of(8, 1, media_fields=(PIXELS,)), dp=1)
    assert (got.packs, got.unfit) == (1, 0), "without limits"
    with pytest.raises(UserError):
        with_media(np.array([4, 4]), sizes_of([[5], [1, 1, 1]]), rules, dp=1)


@pytest.mark.parametrize("limit", [130, 150, 1000])
def test_a_part_of_a_pass_forecasts_packs_that_patches_fill(limit: int) -> None:
    """Samples with many patches wait in the window. The first steps have fewer of them, and are no measure."""
    draws = np.random.default_rng(1)
    lengths = np.clip(draws.lognormal(4.3, 1.0, 8000), 1, 500).astype(np.int64)
    sizes = sizes_of([draws.integers(1, 31, number % 5).tolist() for number in range(8000)])
    rules = rules_of(512, 4, "exact_fill", window=1024, media_fields=(PIXELS,), limits={"patches": limit})
    whole, part = with_media(lengths, sizes, rules), with_media(lengths[:3000], sizes[:3000], rules, 8000)
    assert whole.steps is not None
    assert part.steps_low is not None
    assert part.steps_high is not None
    assert part.steps_low <= whole.steps <= part.steps_high
    assert part.filled == pytest.approx(whole.filled, abs=0.03)
    assert part.bound_by == pytest.approx(whole.bound_by, abs=0.08)


@pytest.mark.parametrize("window", [16, 256, 1024, 4096])
@pytest.mark.parametrize("count", [1500, 6000])
def test_a_large_window_gets_no_advantage_from_what_it_leaves_out(window: int, count: int) -> None:
    """Nine of ten samples fill 70% of a pack, and no two of them fit together: no window changes that."""
    draws = np.random.default_rng(1)
    lengths = np.where(draws.random(20 * count) < 0.9, draws.integers(600, 760, 20 * count), 300)
    rules = rules_of(1000, 4, "exact_fill", window=window)
    got = predicted(lengths[:count], rules, total=20 * count)
    run = predicted(lengths, rules)
    assert got.utilization == pytest.approx(run.utilization, rel=0.015)
    assert got.packs == pytest.approx(run.packs, rel=0.03)
