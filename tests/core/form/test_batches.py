"""Batch mode: a step is its batch and nothing else, packed by itself, and every rank of any mesh gets as many packs."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack.core.deal.mesh_validation import mesh_refusal
from streampack.core.deal.step_cache import KeptSteps
from streampack.core.form.former import Former
from streampack.core.model.keys.planning_keys import Balance, Warmup
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Align, Batch, Rules
from streampack.core.model.samples import ROW, SampleTable
from streampack.core.model.steps import PlannedStep

PACKERS = [
    "exact_fill", "sliding_ffd", "first_fit_decreasing", "concatenative", "modified_first_fit_decreasing",
    "first_fit_shuffle", "best_fit_decreasing", "greedy_knapsack", "buffer_first_fit", "karmarkar_karp", "none",
]  # fmt: skip


class Run:
    """A former fed with ``samples``: each the lengths of its pieces, admitted whole as a merge does."""

    def __init__(self, rules: Rules, samples: list[list[int]]) -> None:
        self.samples, self.table, self.steps = samples, SampleTable(8), list[PlannedStep]()
        self.former, self.admitted = Former(rules, self.table), 0

    def admit(self, count: int) -> None:
        for index in range(self.admitted, min(self.admitted + count, len(self.samples))):
            rows = np.zeros(len(self.samples[index]), ROW)
            rows["index"], rows["part"], rows["length"] = index, np.arange(len(rows)), self.samples[index]
            rows["loss_tokens"], rows["crc"] = rows["length"] - 1, 7919 * index + rows["part"]
            self.former.admit(self.table.enter(rows), rows["length"].astype(np.int64))
            self.admitted += 1

    def form(self) -> None:
        while (request := self.former.request()) is not None:
            self.steps += self.former.apply(request.choose())
        if self.former.closed:
            self.steps += self.former.cut()

    def close(self) -> None:
        self.admit(len(self.samples))
        self.former.closed = True
        self.form()
        assert self.former.finished

    def ids(self, step: PlannedStep) -> list[list[tuple[int, int]]]:
        """(index, part) of each sample by pack."""
        index, part = self.table.index, self.table.part
        return [[(int(index[h]), int(part[h])) for h in pack.handles] for pack in step.packs]


@st.composite
def batches(draw: st.DrawFn) -> tuple[Rules, list[list[int]]]:
    align = draw(st.sampled_from([1, 4]))
    packer = draw(st.sampled_from(PACKERS))
    rules = Rules(
        budget=align * draw(st.integers(8, 40)), window=draw(st.integers(1, 12)), align=Align(align, align),
        packer=cast(Any, packer), micro_batch_size=1 if packer == "none" else None,
        batch=Batch(samples=draw(st.integers(1, 12))), tail=draw(st.sampled_from(["pad", "drop"])),
        balance=Balance(draw(st.sampled_from(["none", "deal"])), a=3, b=2),
    )  # fmt: skip
    piece = st.integers(1, rules.budget)
    sample = st.one_of(piece.map(lambda n: [n]), st.lists(piece, min_size=1, max_size=4))
    return rules, draw(st.lists(sample, max_size=50))


@settings(max_examples=60)
@given(batches(), st.lists(st.integers(0, 9), max_size=20))
def test_step_k_is_the_kth_batch_of_samples_whatever_comes_when(
    case: tuple[Rules, list[list[int]]], arrivals: list[int]
) -> None:
    rules, samples = case
    run, at_once = Run(rules, samples), Run(rules, samples)
    for count in arrivals:
        run.admit(count)
        run.form()
    run.close()
    at_once.close()
    assert rules.batch is not None
    size = rules.batch.samples
    assert size is not None
    whole = [(index, part) for index, pieces in enumerate(samples) for part in range(len(pieces))]
    num_steps = -(-len(samples) // size) if rules.tail == "pad" else len(samples) // size
    expected = [[(i, p) for i, p in whole if size * k <= i < size * (k + 1)] for k in range(num_steps)]
    assert [sorted(one for pack in run.ids(step) for one in pack) for step in run.steps] == expected
    left = len(samples) % size if rules.tail == "drop" else 0
    assert {int(run.table.index[h]) for h in run.former.dropped} == set(range(len(samples) - left, len(samples)))
    assert [step.digest for step in run.steps] == [step.digest for step in at_once.steps]
    for step in run.steps:
        assert all(0 < pack.num_slot_tokens <= rules.budget for pack in step.packs)
        assert step.num_loss_tokens == sum(pack.num_loss_tokens for pack in step.packs)


@settings(max_examples=50)
@given(batches(), st.integers(0, 60), st.booleans())
def test_a_former_restored_between_any_two_steps_goes_on_the_same(
    case: tuple[Rules, list[list[int]]], count: int, formed: bool
) -> None:
    rules, samples = case
    run = Run(rules, samples)
    run.admit(count)
    if formed:
        run.form()
    again = Run(rules, samples)
    again.former.load(msgspec.msgpack.decode(msgspec.msgpack.encode(run.former.state()), type=type(run.former.state())))
    again.admitted, before = run.admitted, len(run.steps)
    again.close()
    run.close()
    assert [step.digest for step in again.steps] == [step.digest for step in run.steps[before:]]
    assert again.former.chain == run.former.chain


def test_a_batch_is_packed_as_well_as_it_can_be_without_what_waits_behind_it() -> None:
    rules = Rules(budget=10, batch=Batch(samples=4), packer="first_fit_decreasing")
    run = Run(rules, [[6], [5], [3], [5], [1], [1]])
    run.admit(6)
    run.form()
    assert [sorted(pack) for pack in run.ids(run.steps[0])] == [[(0, 0), (2, 0)], [(1, 0), (3, 0)]]
    assert len(run.steps) == 1, "two samples are no batch"


# DEAL


def mesh_of(dp: int, rank: int = 0, pp: int = 1) -> Mesh:
    return Mesh(dp=dp, dp_rank=rank, pp=pp)


@settings(max_examples=60)
@given(
    batches(), st.integers(1, 9), st.integers(1, 3), st.sampled_from([None, 1, 2, 3]), st.integers(1, 3),
    st.sampled_from([None, "packer", "largest_first", "small_at_edges"]),
)  # fmt: skip
def test_every_rank_gets_as_many_packs_and_every_sample_is_dealt_once(
    case: tuple[Rules, list[list[int]]], dp: int, pp: int, multiple: int | None, least: int, order: Any
) -> None:
    rules, samples = case
    assert rules.batch is not None
    batch = msgspec.structs.replace(rules.batch, micro_batch_multiple=multiple, min_micro_batches=least)
    rules = msgspec.structs.replace(rules, batch=batch, balance=msgspec.structs.replace(rules.balance, order=order))
    run = Run(rules, samples)
    run.close()
    kept = KeptSteps("train", rules, "whole", run.table)
    for step in run.steps:
        kept.add(step)
        found = [part for rank in range(dp) for part in kept.parts(step.number, mesh_of(dp, rank, pp))]
        counts = {part.micro_batches for part, _ in found}
        (count,) = counts
        assert count % (multiple or pp) == 0
        assert count >= max(least, 1)
        packs = [pack for _, packs in found for pack in np.split(packs.handles, np.cumsum(packs.counts)[:-1])]
        assert len(packs) == dp * count
        held = np.concatenate(packs)
        formed = np.concatenate([pack.handles for pack in step.packs])
        assert sorted(held.tolist()) == sorted(formed.tolist())
        align = rules.align.sample
        assert all(int((-(-run.table.length[pack] // align) * align).sum()) <= rules.budget for pack in packs)
        numbers = np.concatenate([np.frombuffer(part.packs_u32, "<u4") for part, _ in found])
        assert sorted(numbers.tolist()) == list(range(len(packs))), "each has a number of its own"
        loss = sum(int(np.frombuffer(part.loss_tokens_u32, "<u4").sum()) for part, _ in found)
        assert loss == step.num_loss_tokens == found[0][0].num_loss_tokens
        if any(not len(pack) for pack in packs):
            assert max(map(len, packs)) == 1, "no pack is empty while another could be split"
        of = {h: n for n, pack in enumerate(step.packs) for h in pack.handles.tolist()}
        assert all(len({of[h] for h in pack.tolist()}) <= 1 for pack in packs), "packs are split, never mixed"
        for number, pack in zip(numbers.tolist(), packs, strict=True):
            if number < len(step.packs):
                assert {of[h] for h in pack.tolist()} == {number}, "FORM's packs keep their numbers"


def kept_step(rules: Rules, samples: list[list[int]]) -> KeptSteps:
    run = Run(rules, samples)
    run.close()
    kept = KeptSteps("train", rules, "whole", run.table)
    kept.add(run.steps[0])
    return kept


def test_packs_are_split_before_empty_ones_are_added() -> None:
    kept = kept_step(Rules(budget=8, batch=Batch(samples=3)), [[4], [2], [2]])
    packs = [packs for rank in range(4) for _, packs in kept.parts(0, mesh_of(4, rank))]
    assert sorted(packs.counts.tolist() for packs in packs) == [[0], [1], [1], [1]]
    assert (kept.figures.split_packs, kept.figures.empty_packs) == (2, 1)


def test_where_a_rank_may_not_be_without_a_sample_the_step_says_so() -> None:
    kept = kept_step(Rules(budget=8, batch=Batch(empty="error")), [[4], [2], [2]])
    assert kept.unfit(0, mesh_of(3)) == ""
    assert "step 0: got a batch of 3 samples for dp=4 with" in kept.unfit(0, mesh_of(4))


def test_any_dp_may_attach_but_where_ranks_would_have_no_sample_and_must() -> None:
    pads = Rules(batch=Batch(samples=6))
    assert [mesh_refusal(mesh_of(dp), pads, "whole") for dp in range(1, 12)] == [""] * 11
    strict = Rules(batch=Batch(samples=6, micro_batch_multiple=2, empty="error"))
    assert mesh_refusal(mesh_of(3), strict, "whole") == ""
    assert "got batches of 6 samples with dp=4" in mesh_refusal(mesh_of(4), strict, "whole")


def test_the_order_of_micro_batches_is_the_one_asked_for() -> None:
    def costs(order: Any) -> list[int]:
        rules = Rules(budget=8, packs=5, packer="concatenative", balance=Balance(a=1, b=0, order=order))
        kept = kept_step(rules, [[n] for n in (6, 8, 5, 7, 4)])
        return [int(n) for part, _ in kept.parts(0, Mesh()) for n in np.frombuffer(part.lengths_u32, "<u4")]

    assert costs(None) == costs("largest_first") == [8, 7, 6, 5, 4]
    assert costs("packer") == [6, 8, 5, 7, 4]
    assert costs("small_at_edges") == [4, 6, 8, 7, 5]


# The budget as it grows


def budgets(rules: Rules, steps: int) -> list[int]:
    return [rules.budget_at(step) for step in range(steps)]


def test_the_budget_grows_evenly_and_is_rounded_to_the_alignment() -> None:
    assert budgets(Rules(budget=100, warmup=Warmup(20, 4)), 6) == [20, 40, 60, 80, 100, 100]
    assert budgets(Rules(budget=96, align=Align(8, 16), warmup=Warmup(30, 4)), 5) == [16, 32, 48, 64, 96]


@pytest.mark.parametrize("init", [7, 97])
def test_a_warm_up_begins_between_the_alignment_and_the_budget(init: int) -> None:
    with pytest.raises(ValueError, match=f"got warmup.init {init}, expected 8 \\(align.pack\\) to 96"):
        Rules(budget=96, align=Align(8, 8), warmup=Warmup(init, 4))


@settings(max_examples=50)
@given(batches(), st.booleans(), st.integers(1, 8), st.data())
def test_packs_keep_to_the_budget_of_their_step_but_for_one_long_sample_alone(
    case: tuple[Rules, list[list[int]]], batched: bool, steps: int, data: st.DataObject
) -> None:
    rules, samples = case
    warmup = Warmup(data.draw(st.integers(rules.align.pack, rules.budget)), steps)
    batch = rules.batch if batched else None
    rules = msgspec.structs.replace(rules, warmup=warmup, batch=batch, packs=data.draw(st.integers(1, 4)), tail="pad")
    if not batched and rules.packer == "exact_fill" and data.draw(st.booleans()):
        rules = msgspec.structs.replace(rules, balance=Balance("joint", a=3, b=2, group=rules.packs))
    run, at_once = Run(rules, samples), Run(rules, samples)
    while run.admitted < len(samples):
        run.admit(data.draw(st.integers(1, 9)))
        run.form()
    run.close()
    at_once.close()
    assert [step.digest for step in run.steps] == [step.digest for step in at_once.steps]
    sliding = rules.packer in ("exact_fill", "sliding_ffd", "concatenative", "buffer_first_fit")
    for step in run.steps:
        for pack in step.packs:
            alone = len(pack.handles) == 1 and pack.num_slot_tokens <= rules.budget
            if batched or sliding:  # blocks are packed whole, by the budget of the step that they begin in
                assert pack.num_slot_tokens <= rules.budget_at(step.number) or alone
            assert pack.num_slot_tokens <= rules.budget
    packed = sorted(one for step in run.steps for pack in run.ids(step) for one in pack)
    assert packed == [(i, p) for i, pieces in enumerate(samples) for p in range(len(pieces))]


# What cannot be


def test_batches_that_marks_close_have_no_tail_to_drop() -> None:
    with pytest.raises(ValueError, match="got `tail: drop` with `end_of_batch`"):
        Rules(batch=Batch(), tail="drop")


def test_joint_balance_is_for_streams_and_batches_are_balanced_as_they_are_dealt() -> None:
    with pytest.raises(ValueError, match=r"got `balance.kind: joint` with batches"):
        Rules(batch=Batch(samples=4), balance=Balance("joint", group=4))


def test_a_least_number_of_samples_is_for_batches_that_marks_close() -> None:
    with pytest.raises(ValueError, match="got `min_samples: 2` with `samples: 4`"):
        Batch(samples=4, min_samples=2)


def test_batches_are_in_the_digest_of_the_rules_and_steps_of_packs_are_as_they_were() -> None:
    plain = Rules()
    assert len({plain.digest, Rules(batch=Batch()).digest, Rules(batch=Batch(samples=2)).digest}) == 3
