"""Joint balance of samples with media: steps keep budgets and limits, and depend on samples and rules alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack.core.form.former import Former
from streampack.core.model.capacity import needed_tokens
from streampack.core.model.fields import Field
from streampack.core.model.keys.planning_keys import Balance, MediaLimits
from streampack.core.model.rules import Align, Rules
from streampack.core.model.samples import I64, MEDIA_ROW, PACK, ROW, SampleTable
from streampack.core.model.snapshot import FormState
from streampack.core.model.steps import PlannedStep

PIXELS = (Field(name="pixels", dtype="uint8", axis="patch"),)


@dataclass(frozen=True)
class Sample:
    """A sample's length, the patches of its items, and whether the next sample belongs to its pack."""

    length: int
    patches: list[int]
    kept: bool = False


@st.composite
def cases(draw: st.DrawFn) -> tuple[Rules, list[Sample]]:
    align, group = draw(st.sampled_from([1, 1, 4])), draw(st.integers(1, 4))
    units = draw(st.integers(8, 40))
    limit, balance = st.none() | st.integers(4, 30), st.integers(0, 4)
    factors = draw(st.none() | st.tuples(st.integers(0, 2**20), balance))
    rules = Rules(
        budget=align * units, packs=group * draw(st.integers(1, 2)), window=draw(st.integers(1, 12)),
        align=Align(sample=align, pack=align), tail=draw(st.sampled_from(["pad", "drop"])), media_fields=PIXELS,
        limits=MediaLimits(patches=draw(limit), items=draw(limit)),
        balance=Balance(
            "joint", a=draw(st.sampled_from([0, 3])), b=draw(st.sampled_from([0, 2])), group=group,
            patience=draw(st.integers(1, 3)), patches=factors, items=draw(st.none() | balance),
        ),
    )  # fmt: skip
    lengths = st.integers(1, rules.budget // 4) | st.integers(1, rules.budget)
    samples = st.builds(Sample, lengths, st.lists(st.integers(0, 4), max_size=4).filter(lambda each: sum(each) <= 4))
    drawn = draw(st.lists(samples, max_size=60))
    if draw(st.booleans()):  # pairs that share a pack
        half = rules.budget // 2 // align * align
        drawn = [
            Sample(min(each.length, half), [min(count, 2) for count in each.patches[:1]], at % 2 == 0)
            for at, each in enumerate(drawn[len(drawn) % 2 :])
        ]
    return rules, drawn


def media_cost(rules: Rules, sample: Sample) -> int:
    a, b = rules.balance.patches or (0, 0)
    return sum(a * p + b * p * p + (rules.balance.items or 0) for p in sample.patches)


def cost_of(rules: Rules, sample: Sample) -> int:
    slots = -(-sample.length // rules.align.sample) * rules.align.sample
    return rules.balance.a * slots + rules.balance.b * slots * slots + media_cost(rules, sample)


class Run:
    """A former fed as a test likes; ``numbers`` are the samples of each pack by step."""

    def __init__(self, rules: Rules, samples: list[Sample]) -> None:
        self.rules, self.samples, self.admitted = rules, samples, 0
        self.table = SampleTable(8)
        self.former = Former(rules, self.table)
        self.steps, self.numbers = list[PlannedStep](), list[list[list[int]]]()

    def admit(self, count: int) -> None:
        first = self.admitted
        chosen = self.samples[first : first + count]
        if not chosen:
            return
        self.admitted += len(chosen)
        rows, media = np.zeros(len(chosen), ROW), np.zeros(len(chosen), MEDIA_ROW)
        rows["index"], rows["length"] = np.arange(first, self.admitted), [sample.length for sample in chosen]
        for at, sample in enumerate(chosen):
            media[at] = len(sample.patches), sum(sample.patches), 0, media_cost(self.rules, sample)
        keeps = np.array([PACK if sample.kept else 0 for sample in chosen], np.uint8)
        handles = self.table.enter(rows, keeps=keeps.tobytes(), media=media.tobytes())
        self.former.admit(handles, rows["length"].astype(np.int64))

    def form(self, max_steps: int) -> bool:
        if (request := self.former.request(max_steps)) is None:
            return False
        self.add(self.former.apply(request.choose()))
        return True

    def add(self, steps: list[PlannedStep]) -> None:
        self.steps += steps
        self.numbers += [[self.table.index[pack.handles].tolist() for pack in step.packs] for step in steps]

    def restore(self) -> None:
        """Go on with another former and table, from the state as a checkpoint has it."""
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(self.former.state()), type=FormState)
        self.table = SampleTable(8)
        self.former = Former(self.rules, self.table)
        self.former.load(state)

    def close(self) -> None:
        self.admit(len(self.samples))
        self.former.closed = True
        while self.form(1):
            pass
        self.add(self.former.cut())
        assert self.former.finished


@settings(max_examples=60)
@given(cases(), st.data())
def test_steps_are_the_same_after_any_arrivals_and_snapshots(
    case: tuple[Rules, list[Sample]], data: st.DataObject
) -> None:
    golden, run = Run(*case), Run(*case)
    golden.close()
    for _ in range(data.draw(st.integers(0, 20))):
        what = data.draw(st.sampled_from(["admit", "form", "restore"]))
        if what == "admit":
            run.admit(data.draw(st.integers(0, 9)))
        elif what == "form":
            run.form(data.draw(st.integers(1, 3)))
        else:
            run.restore()
    run.close()
    assert run.numbers == golden.numbers
    assert run.former.chain == golden.former.chain


@settings(max_examples=60)
@given(cases())
def test_each_sample_is_in_one_pack_and_packs_keep_budget_limits_and_costs(case: tuple[Rules, list[Sample]]) -> None:
    rules, samples = case
    run = Run(rules, samples)
    run.close()
    dropped = run.table.index[run.former.dropped].tolist()
    assert sorted([number for step in run.numbers for pack in step for number in pack] + dropped) == list(
        range(len(samples))
    )
    limits = rules.limits or MediaLimits()
    for step, numbers in zip(run.steps, run.numbers, strict=True):
        for pack, held in zip(step.packs, [[samples[i] for i in pack] for pack in numbers], strict=True):
            assert pack.num_slot_tokens <= rules.budget
            assert limits.items is None or sum(len(sample.patches) for sample in held) <= limits.items
            assert limits.patches is None or sum(sum(sample.patches) for sample in held) <= limits.patches
            assert pack.cost == sum(cost_of(rules, sample) for sample in held)
    assert run.former.longest_wait <= (run.former.waits.bound or 0)


@pytest.mark.parametrize(
    ("balance", "align", "expected"),
    [
        (Balance("joint", group=1, a=5, b=2, patches=(1, 0)), 1, [0, 50, 2**56]),
        (Balance("joint", group=1, a=5, b=2, patches=(1, 0)), 4, [0, 3, 2**56]),
        (Balance("joint", group=1, a=5, b=0, patches=(1, 0)), 1, [0, 64 * 16 * 100 // 5, 2**56]),
        (Balance("joint", group=1, a=0, b=0, items=1), 1, [0, 64 * 16 * 100, 2**56]),
    ],
)
def test_the_work_of_media_is_in_pairs_of_tokens(balance: Balance, align: int, expected: list[int]) -> None:
    rules = Rules(budget=16, packs=1, balance=balance, align=Align(align, align), media_fields=PIXELS)
    costs: I64 = np.array([0, 100, 2**62])
    assert rules.media_work(costs).tolist() == expected


@pytest.mark.parametrize("b", [0, 1])
def test_packs_of_a_group_have_equal_costs_in_tokens_and_media(b: int) -> None:
    draw = np.random.default_rng(b)
    lengths, patches = draw.integers(16, 800, 8000), np.clip(draw.lognormal(4, 1, 8000), 1, 2000).astype(int)
    samples = [
        Sample(length, [count] if at % 3 else [])
        for at, (length, count) in enumerate(zip(lengths.tolist(), patches.tolist(), strict=True))
    ]

    def imbalance(**kind: Any) -> float:
        balance = Balance(a=100, b=b, patches=(4000, 2), **kind)
        rules = Rules(budget=16_384, packs=8, window=1024, tail="drop", media_fields=PIXELS, balance=balance)
        run = Run(rules, samples)
        run.close()
        costs = np.array([[pack.cost for pack in step.packs] for step in run.steps])
        return float((costs.max(axis=1) / costs.mean(axis=1)).mean())

    assert imbalance(kind="joint", group=8) < 1.07 < 1.2 < imbalance(kind="deal")


def test_joint_balance_of_media_needs_memory_for_long_samples_that_are_no_outliers() -> None:
    def needed(*, media: bool) -> int:
        balance = Balance("joint", group=2, patches=(1, 0) if media else None)
        return needed_tokens(Rules(budget=64, packs=4, window=32, balance=balance, media_fields=PIXELS), 64)

    assert needed(media=True) - needed(media=False) == 3 * (32 * 64 - 32 * 64 * 3 // 5)
