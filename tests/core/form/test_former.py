"""FORM: steps depend on what was admitted and on the rules, never on how it came."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack.core.form import auto_window
from streampack.core.form.former import Former
from streampack.core.model.keys.planning_keys import Balance, Warmup
from streampack.core.model.rules import Align, Rules
from streampack.core.model.samples import I64, ROW, SampleTable
from streampack.core.model.steps import PlannedStep
from streampack.core.packers.joint.joint_bounds import held_tokens
from streampack.core.packers.registry import PackerName
from tests.core.form.forming import Forming

PACKERS = get_args(PackerName)


@pytest.fixture(scope="module", autouse=True)
def small_windows() -> Iterator[None]:
    """Automatic windows of 2 to 16 samples, so that short streams have several."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (("LEAST", 2), ("FIRST", 4), ("MAX_WINDOW", 16)):
            patch.setattr(auto_window, name, size)
        yield


@dataclass(frozen=True)
class Sample:
    """What the table knows of one."""

    stream: int
    index: int
    part: int
    length: int
    loss_tokens: int
    crc: int


def samples_of(lengths: list[int]) -> list[Sample]:
    return [Sample(i % 3, i // 3, i % 2, n, n - 1, 7919 * i + 1) for i, n in enumerate(lengths)]


class Run(Forming):
    """A former and its table, fed as a test likes; handles differ from sample numbers on purpose."""

    def __init__(self, rules: Rules, samples: list[Sample]) -> None:
        super().__init__(rules, SampleTable(len(samples) + 3))
        self.samples = samples
        self.table.take(3)
        self.handles = self.table.take(len(samples))[::-1].copy()
        for name in ("stream", "index", "part", "length", "loss_tokens", "crc"):
            getattr(self.table, name)[self.handles] = [getattr(sample, name) for sample in samples]

    def admit(self, count: int) -> None:
        handles = self.handles[self.admitted : self.admitted + count]
        self.former.admit(handles, self.table.length[handles].astype(np.int64))
        self.admitted += len(handles)

    def numbers(self, step: PlannedStep) -> list[list[int]]:
        """Sample numbers by pack."""
        of = {handle: number for number, handle in enumerate(self.handles.tolist())}
        return [[of[handle] for handle in pack.handles.tolist()] for pack in step.packs]


def at_once(rules: Rules, samples: list[Sample]) -> Run:
    run = Run(rules, samples)
    run.close()
    return run


@st.composite
def all_rules(draw: st.DrawFn) -> Rules:
    align = draw(st.sampled_from([1, 1, 4]))
    packer, packs = draw(st.sampled_from([*PACKERS, "joint"])), draw(st.integers(1, 4))
    balance = Balance(a=3, b=2)
    if packer == "joint":
        group = draw(st.sampled_from([group for group in range(1, packs + 1) if packs % group == 0]))
        packer, balance = "exact_fill", Balance("joint", a=3, b=2, group=group, patience=draw(st.integers(1, 3)))
    return Rules(
        budget=align * draw(st.integers(8, 40)), packs=packs, window=draw(st.integers(1, 12) | st.just("auto")),
        in_turn=draw(st.booleans()), packer=packer, align=Align(sample=align, pack=align),
        tail=draw(st.sampled_from(["pad", "drop"])), balance=balance,
    )  # fmt: skip


@st.composite
def inputs(draw: st.DrawFn) -> tuple[Rules, list[Sample]]:
    rules = draw(all_rules())
    short = st.integers(1, max(rules.budget // 6, 1))
    lengths = draw(st.lists(st.one_of(short, st.integers(1, rules.budget)), max_size=60))
    return rules, samples_of(lengths)


@settings(max_examples=60)
@given(inputs(), st.data())
def test_steps_do_not_depend_on_arrivals_or_on_how_many_are_asked_for(
    case: tuple[Rules, list[Sample]], data: st.DataObject
) -> None:
    rules, samples = case
    expected = at_once(rules, samples)
    run = Run(rules, samples)

    def some_come() -> None:
        run.admit(data.draw(st.integers(0, 9)))
        if run.admitted == len(samples) and data.draw(st.booleans()):
            run.former.closed = True

    for _ in range(data.draw(st.integers(0, 25))):
        if data.draw(st.booleans()):
            some_come()
        else:
            run.form(data.draw(st.integers(1, 3)), some_come)
    run.close()
    assert [step.digest for step in run.steps] == [step.digest for step in expected.steps]
    assert [run.numbers(step) for step in run.steps] == [expected.numbers(step) for step in expected.steps]
    assert run.former.chain == expected.former.chain
    assert sorted(run.former.dropped.tolist()) == sorted(expected.former.dropped.tolist())


@pytest.mark.parametrize("packer", ["exact_fill", "sliding_ffd", "buffer_first_fit", "first_fit_decreasing"])
def test_steps_do_not_depend_on_arrivals_when_the_automatic_window_shrinks(packer: Any) -> None:
    """The window was refilled after a step's last pack: to the size of that step, if the samples were there by then."""
    rules = Rules(budget=20, packs=2, window="auto", in_turn=packer == "exact_fill", packer=packer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_window, "FIRST", 16)
        patch.setattr(auto_window, "MAX_WINDOW", 32)
        for seed in range(50, 60):
            rng = random.Random(seed)
            lengths = [rng.choice([rng.randint(1, 4), rng.randint(1, 20), rng.randint(8, 20)]) for _ in range(60)]
            run = Run(rules, samples_of(lengths))
            while run.admitted < len(lengths):
                run.admit(rng.randint(1, 9))
                run.form(1)
            run.close()
            assert run.former.chain == at_once(rules, samples_of(lengths)).former.chain


@given(inputs())
def test_every_sample_is_in_one_pack_and_no_pack_is_over_its_budget(case: tuple[Rules, list[Sample]]) -> None:
    rules, samples = case
    run = at_once(rules, samples)
    seen = [number for step in run.steps for pack in run.numbers(step) for number in pack]
    of = {handle: number for number, handle in enumerate(run.handles.tolist())}
    dropped = [of[handle] for handle in run.former.dropped.tolist()]
    assert sorted(seen + dropped) == list(range(len(samples)))
    assert [step.number for step in run.steps] == list(range(run.former.next_step))
    for step in run.steps:
        assert len(step.packs) == rules.packs
        assert all(pack.num_slot_tokens <= rules.budget for pack in step.packs)
    if rules.tail == "pad":
        assert not dropped
        assert all(len(pack.handles) for step in run.steps[:-1] for pack in step.packs)
    else:
        assert all(len(pack.handles) for step in run.steps for pack in step.packs)
    assert run.former.queued_tokens == 0


@given(inputs(), st.integers(1, 3), st.data())
def test_packs_of_other_rules_are_taken_apart_and_their_samples_come_first(
    case: tuple[Rules, list[Sample]], steps: int, data: st.DataObject
) -> None:
    rules, samples = case
    run = Run(rules, samples)
    run.admit(len(samples))
    while len(run.steps) < steps and (request := run.former.request()) is not None:
        run.steps += run.former.apply(request.choose())
    if run.former.begun or not run.former.held().size:
        return
    state = run.former.state()
    packer = data.draw(st.sampled_from(["exact_fill", "concatenative", "first_fit_decreasing"]))
    units = data.draw(st.integers(40, 60))
    other = Rules(budget=units * rules.align.sample, packs=data.draw(st.integers(1, 4)), window=3, packer=packer)
    assert run.former.fits(other)
    run.former.change(other)
    run.close()
    table = SampleTable(8)
    rows = np.frombuffer(state.pending + state.window, ROW)
    fresh = Former(other, table)
    handles = table.enter(rows)
    fresh.admit(handles, table.length[handles].astype(np.int64))
    fresh.next_step, fresh.chain, fresh.closed = state.next_step, state.chain, True
    expected: list[PlannedStep] = []
    while (request := fresh.request()) is not None:
        expected += fresh.apply(request.choose())
    expected += fresh.cut()
    assert [step.digest for step in run.steps[-len(expected) :]] == [step.digest for step in expected]


@given(inputs())
def test_denominators_are_sums_over_the_samples(case: tuple[Rules, list[Sample]]) -> None:
    rules, samples = case
    run = at_once(rules, samples)
    for step in run.steps:
        packs = [[samples[number] for number in pack] for pack in run.numbers(step)]
        for pack, held in zip(step.packs, packs, strict=True):
            slots = [-(-sample.length // rules.align.sample) * rules.align.sample for sample in held]
            assert pack.num_tokens == sum(sample.length for sample in held)
            assert pack.num_slot_tokens == sum(slots)
            assert pack.num_loss_tokens == sum(sample.loss_tokens for sample in held)
            assert pack.cost == sum(3 * slot + 2 * slot**2 for slot in slots)
        assert step.num_loss_tokens == sum(sample.loss_tokens for held in packs for sample in held)
        assert step.num_samples == sum(map(len, packs))


@given(inputs())
def test_digests_are_those_of_the_written_down_form(case: tuple[Rules, list[Sample]]) -> None:
    """Another implementation could check them: blake2b of little-endian rows, of packs, of steps."""
    rules, samples = case
    run, chain = at_once(rules, samples), bytes(16)
    for step in run.steps:
        packs = []
        for held in run.numbers(step):
            rows = [samples[number] for number in held]
            row = b"".join(struct.pack("<IIQII", s.stream, s.part, s.index, s.length, s.crc) for s in rows)
            packs.append(hashlib.blake2b(row, digest_size=16).digest())
        head = f"{step.number}:{step.num_loss_tokens}:{step.num_samples}:".encode()
        digest = hashlib.blake2b(head + b"".join(packs), digest_size=16).digest()
        chain = hashlib.blake2b(chain + digest, digest_size=16).digest()
        assert [pack.digest for pack in step.packs] == packs
        assert (step.digest, step.chain) == (digest, chain)


RULES = Rules(budget=16, packs=2, window=4)


@pytest.mark.parametrize("field", ["stream", "index", "part", "length", "crc", "loss_tokens"])
def test_the_digest_changes_with_every_field_of_a_sample(field: str) -> None:
    samples = samples_of([5, 4, 7, 6, 3, 9])
    chain = at_once(RULES, samples).former.chain
    for at in range(len(samples)):
        changed = list(samples)
        values: dict[str, Any] = {**vars(samples[at])}
        values[field] += 1 if field != "length" else -1
        changed[at] = Sample(**values)
        assert at_once(RULES, changed).former.chain != chain


def test_the_digest_changes_with_the_order() -> None:
    samples = samples_of([4, 4, 4, 4, 4, 4])
    swapped = [samples[1], samples[0], *samples[2:]]
    one, other = at_once(RULES, samples), at_once(RULES, swapped)
    assert one.steps[0].digest != other.steps[0].digest


def test_the_chain_holds_every_step_before() -> None:
    lengths = [16] * 8
    run, longer = at_once(RULES, samples_of(lengths)), at_once(RULES, samples_of([*lengths, 16]))
    assert len({step.chain for step in longer.steps}) == len(longer.steps) == 5
    assert [step.chain for step in longer.steps[:4]] == [step.chain for step in run.steps]


def test_golden_digests_are_held_still() -> None:
    """Recorded runs are compared by these."""
    run = at_once(RULES, samples_of([5, 4, 7, 6, 3, 9, 16, 2]))
    assert [run.numbers(step) for step in run.steps] == GOLDEN_PACKS
    assert run.former.chain.hex() == GOLDEN_CHAIN


GOLDEN_PACKS = [[[0, 1, 2], [6]], [[3, 5], [4, 7]]]
GOLDEN_CHAIN = "ba3cca95948e31b9464227dbc3de8d11"


def test_golden_digests_of_joint_balance_are_held_still() -> None:
    rules = msgspec.structs.replace(RULES, balance=Balance("joint", a=3, b=2, group=2, patience=1))
    run = at_once(rules, samples_of([5, 4, 7, 6, 3, 13, 1, 12, 2, 5, 4, 3, 13, 2, 1, 6, 3, 2]))
    assert [run.numbers(step) for step in run.steps] == GOLDEN_JOINT
    assert run.former.chain.hex() == GOLDEN_JOINT_CHAIN


GOLDEN_JOINT = [[[5, 6, 8], [12, 13, 14]], [[1, 7], [0, 2, 10]], [[3, 9, 17], [4, 11, 15, 16]]]
GOLDEN_JOINT_CHAIN = "3683c557fc65575de36d6f21d7a9295f"


@given(inputs())
def test_no_sample_waits_more_steps_than_the_bound_says_and_the_longest_wait_is_told(
    case: tuple[Rules, list[Sample]],
) -> None:
    """Step by step; waits are counted anew from ages, as a request gives them and its choice returns them."""
    rules, samples = case
    run = Run(rules, samples)
    run.admit(len(samples))
    run.former.closed = True
    since: dict[int, int] = {}
    longest = 0
    while (request := run.former.request()) is not None:
        step, handles = run.former.next_step, run.former.held()[: len(request.lengths)]
        choice = request.choose()
        gone = set(choice.indices.tolist())
        for i in np.flatnonzero((choice.ages >= 0) | np.isin(np.arange(len(handles)), choice.indices)).tolist():
            since.setdefault(int(handles[i]), step)
        longest = max(longest, *(step - since[int(handles[i])] for i in gone), 0)
        run.steps += run.former.apply(choice)
        held = run.former.held()[: run.former.num_samples].tolist()
        waits = [run.former.next_step - since[handle] for handle in held if handle in since]
        assert run.former.longest_wait == max([longest, *waits])
        bound = run.former.waits.bound
        assert (bound is None) == (rules.packer != "exact_fill")
        assert bound is None or longest <= bound
        assert (run.former.num_outliers is None) == (rules.balance.kind != "joint")


@settings(max_examples=50)
@given(st.data())
def test_joint_packs_of_a_budget_that_grows_depend_on_no_arrivals_and_no_more_is_held_than_promised(
    data: st.DataObject,
) -> None:
    budget, window, group = data.draw(st.integers(8, 40)), data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3))
    rules = Rules(
        budget=budget, packs=group * data.draw(st.integers(1, 2)), window=window,
        warmup=Warmup(init=data.draw(st.integers(1, budget)), steps=data.draw(st.integers(1, 6))),
        balance=Balance("joint", group=group, patience=data.draw(st.integers(1, 3))),
    )  # fmt: skip
    samples = samples_of(data.draw(st.lists(st.integers(1, budget), max_size=60)))
    run = Run(rules, samples)
    for _ in range(data.draw(st.integers(0, 25))):
        if data.draw(st.booleans()):
            run.admit(data.draw(st.integers(0, 9)))
        else:
            run.form(data.draw(st.integers(1, 3)))
        state = run.former.state()
        seen = np.array(state.ages, np.int64) >= 0
        assert np.frombuffer(state.window, ROW)["length"][seen].sum() <= held_tokens(budget, group, window)
        bound = run.former.waits.bound
        assert bound is not None
        assert run.former.longest_wait <= bound
    run.close()
    assert run.former.chain == at_once(rules, samples).former.chain


# The tail


def test_a_padded_tail_is_filled_with_empty_packs() -> None:
    run = at_once(Rules(budget=8, packs=4, window=2), samples_of([8, 8, 8, 8, 8]))
    assert [[len(pack.handles) for pack in step.packs] for step in run.steps] == [[1, 1, 1, 1], [1, 0, 0, 0]]
    empty = run.steps[1].packs[1]
    assert (empty.num_tokens, empty.num_slot_tokens, empty.num_loss_tokens, empty.cost) == (0, 0, 0, 0)
    assert len(run.former.dropped) == 0


def test_a_dropped_tail_is_named() -> None:
    run = at_once(Rules(budget=8, packs=4, window=2, tail="drop"), samples_of([8, 8, 8, 8, 8, 3]))
    assert len(run.steps) == 1
    assert run.former.dropped.tolist() == run.handles[4:].tolist()


@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_a_feed_without_samples_ends_without_a_step(tail: Any) -> None:
    run = Run(Rules(tail=tail), [])
    assert run.former.request() is None
    run.close()
    assert (run.steps, run.former.chain, run.former.next_step) == ([], bytes(16), 0)


def test_a_full_last_step_is_followed_by_none() -> None:
    run = at_once(Rules(budget=8, packs=2, window=2), samples_of([8] * 4))
    assert [step.num_samples for step in run.steps] == [2, 2]


# Asking


def test_nothing_is_asked_again_until_something_new_could_come_of_it() -> None:
    run = Run(Rules(budget=8, packs=2, window=4), samples_of([4] * 40))
    assert not run.form(), "nothing is held"
    run.admit(2)
    assert run.form()
    assert run.former.lacks_samples
    assert not run.form(), "two samples are no window, and none has come since"
    run.admit(0)
    assert not run.form()
    run.admit(1)
    assert run.form()


def test_held_samples_are_asked_for_until_they_give_no_more_steps() -> None:
    run = Run(Rules(budget=8, packs=2, window=4), samples_of([4] * 40))
    run.admit(40)
    while run.form():
        pass
    assert len(run.steps) == 9, "a window of 4 stays behind, all else is formed without new arrivals"


@pytest.mark.parametrize("max_steps", [1, 2, 30])
def test_a_sample_that_waits_grows_older_from_one_request_to_the_next(max_steps: int) -> None:
    """Full samples overtake it until it has waited as many packs as the window has samples."""
    run = Run(Rules(budget=8, packs=1, window=3), samples_of([3, *[8] * 20]))
    run.admit(21)
    while run.form(max_steps):
        pass
    assert [run.numbers(step) for step in run.steps[:5]] == [[[1]], [[2]], [[3]], [[0]], [[4]]]


def test_queued_samples_are_counted_in_real_tokens() -> None:
    rules = Rules(budget=16, packs=1, window=1, align=Align(sample=8, pack=8))
    run = Run(rules, samples_of([3, 9, 16]))
    run.admit(2)
    assert (run.former.queued_tokens, run.former.num_samples) == (12, 2)
    run.close()
    assert sorted(step.packs[0].num_slot_tokens for step in run.steps) == [8, 16, 16]
    assert run.former.queued_tokens == 0


def test_lengths_and_budget_reach_the_packer_in_units_of_the_alignment() -> None:
    run = Run(Rules(budget=64, packs=3, window=5, align=Align(sample=16, pack=32)), samples_of([1, 16, 17]))
    run.admit(3)
    request = run.former.request(2)
    assert request is not None
    found: tuple[I64, int, int, bool, int] = (
        request.lengths, request.budget, request.count, request.closed, request.window
    )  # fmt: skip
    assert found[0].tolist() == [1, 1, 2]
    assert found[1:] == (4, 6, False, 5)
    assert request.ages.tolist() == [-1, -1, -1]


@pytest.mark.parametrize("packs", [1, 8, 64])
@pytest.mark.parametrize("at_once", [1, 1000])
def test_admitted_samples_are_enough_for_a_step_in_one_choice(packs: int, at_once: int) -> None:
    """A small step, too, whose samples are few beside the window."""
    rng = np.random.default_rng(packs)
    run = Run(Rules(budget=512, packs=packs, window=256), samples_of(rng.integers(1, 64, 20_000).tolist()))
    choices = 0
    while run.admitted < len(run.samples):
        while run.former.wants_samples and run.admitted < len(run.samples):
            run.admit(at_once)
        choices += run.form()
    assert len(run.steps) * packs > 700
    assert choices <= len(run.steps) + 1
