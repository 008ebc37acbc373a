"""Values of a step: complete once all parts are there, summed, delivered once to each subscriber, whoever restarts."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.journal.log_effects import Recall, Recalled
from streampack.core.journal.log_records import ValuesReported
from streampack.core.protocol.effects import FromTrainer, SendTrainer
from streampack.core.protocol.events import Report
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.result_messages import AskResults, Noted, Results
from streampack.core.results.pending_steps import MOST_NAMES
from streampack.core.results.step_ranges import StepRanges
from streampack.core.results.subscribers import KEPT_STEPS
from tests.core.results.values_desk import CP, DP, SAMPLES, STEPS, ValuesDesk, part_of
from tests.world.rollouts import Rollouts


@given(st.integers(0, 9999), st.booleans(), st.booleans())
def test_a_step_is_delivered_once_with_the_parts_of_one_attempt(seed: int, keeps: bool, killed: bool) -> None:
    rng, desk = Random(seed), ValuesDesk(keeps)
    parts = [(step, dp, cp) for step in range(STEPS) for dp in range(DP) for cp in range(CP)]
    first = rng.sample(parts, rng.randrange(len(parts)))  # then the trainers are started again, and report all
    again = [part_of(step, 2, dp, cp) for step, dp, cp in parts]
    for message, payload in [*(part_of(step, 1, dp, cp) for step, dp, cp in first), *rng.sample(again, len(again))]:
        for _ in range(rng.randint(1, 2)):
            desk.perform(desk.values.report(b"t", message, payload, 0, STEPS))
        if rng.random() < 0.3:
            desk.sync()
        if rng.random() < 0.3:
            desk.ask()
        if killed and keeps and rng.random() < 0.2:
            desk.start()
    for message, payload in again:  # what was not answered is repeated
        desk.perform(desk.values.report(b"t", message, payload, 0, STEPS))
    desk.sync()
    for _ in range(STEPS + 1):
        desk.ask()
    assert sorted(each.step for each, _ in desk.had) == list(range(STEPS)), "each step once"
    for found, values in desk.had:
        index = np.frombuffer(found.indices_u64, "<u8").astype(np.int64)
        assert index.tolist() == list(range(found.step * DP * SAMPLES, (found.step + 1) * DP * SAMPLES))
        attempt = (values[0] - 2 * index[0] - 1) / 2000
        assert attempt in (1, 2), "of one attempt"
        assert values == [2 * each + 2000 * attempt + 1 for each in index.tolist()], "context-parallel parts are added"
        assert np.frombuffer(found.seqs_u64, "<u8").tolist() == (index // 2).tolist()


def test_a_subscriber_gets_values_reported_from_then_on() -> None:
    desk = ValuesDesk(True)
    desk.report_step(0)
    desk.sync()
    (effect,) = desk.values.subscribers.ask(b"s", AskResults(feed="train", number=0), 0.0)
    assert isinstance(effect, SendTrainer)
    assert isinstance(effect.envelope.message, Results)
    desk.cursor = effect.envelope.message.cursor
    for step in (2, 1):
        desk.report_step(step)
        desk.sync()
        desk.ask()
    assert [message.step for message, _ in desk.had] == [2, 1], "in the order in which they were complete"


def test_one_step_at_a_time_is_read_for_a_subscriber() -> None:
    """A flood of requests takes the memory of one step, and the newest request is answered in the end."""
    desk = ValuesDesk(True)
    desk.report_step(0)
    desk.sync()
    flood = [AskResults(feed="train", number=number // 2, cursor=0) for number in range(100)]
    effects = [effect for each in flood for effect in desk.values.subscribers.ask(b"s", each, 0.0)]
    answers = list[Results]()
    for count in (DP * CP, DP * CP, 0):
        assert len(effects) == count, "the records of one step"
        reads, effects = effects, []
        for read in reads:
            assert isinstance(read, Recall)
            record = msgspec.msgpack.decode(desk.log[read.lsn], type=ValuesReported)
            for effect in desk.values.subscribers.recalled(Recalled("train", read.lsn, record)):
                if isinstance(effect, SendTrainer):
                    assert isinstance(effect.envelope.message, Results)
                    answers.append(effect.envelope.message)
                else:
                    effects.append(effect)
    assert [(each.number, each.step) for each in answers] == [(0, 0), (49, 0)]


def returned_by(done: set[int]) -> Callable[[int, int], int]:
    """Ranks whose parts are ``done`` have returned step 0."""
    return lambda part, parts: int(part in done and parts == DP * CP)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.parametrize("late", [True, False])
def test_a_part_counts_in_a_new_attempt_once_its_rank_is_done_with_the_step(
    keeps: bool, killed: bool, late: bool
) -> None:
    """The broker restarts while some ranks have reported a step, or while their reports are on their way."""
    desk, places = ValuesDesk(keeps), [(dp, cp) for dp in range(DP) for cp in range(CP)]
    reports = [(1, place) for place in places[:2]] + [(2, place) for place in places[2:]]
    for attempt, place in sorted(reports, reverse=late):
        desk.perform(desk.values.report(b"t", *part_of(0, attempt, *place), 0, STEPS))
    desk.sync()
    if killed and keeps:
        desk.start()
    desk.perform(desk.values.carry(returned_by({0})))
    desk.sync()
    desk.ask()
    assert not desk.had, "the rank of part 1 may train the step again"
    desk.perform(desk.values.carry(returned_by({0, 1})))
    desk.sync()
    if killed and keeps:
        desk.start()
    desk.ask()
    ((found, values),) = desk.had
    assert found.step == 0
    assert values == [2 * i + 1 + (2000 if i < SAMPLES else 4000) for i in range(DP * SAMPLES)]
    desk.perform(desk.values.carry(returned_by({0, 1})))
    desk.perform(desk.values.report(b"t", *part_of(0, 3, 0, 0), 0, STEPS))
    desk.sync()
    desk.ask()
    assert len(desk.had) == 1


def test_a_part_of_another_mesh_does_not_count_in_a_new_attempt() -> None:
    desk = ValuesDesk(True)
    message, payload = part_of(0, 1, 0, 0)
    desk.perform(desk.values.report(b"t", msgspec.structs.replace(message, parts=3), payload, 0, STEPS))
    for dp, cp in ((0, 1), (1, 0), (1, 1)):
        desk.perform(desk.values.report(b"t", *part_of(0, 2, dp, cp), 0, STEPS))
    desk.perform(desk.values.carry(lambda part, parts: 1))
    desk.sync()
    desk.ask()
    assert not desk.had


def test_a_broker_that_was_replaced_does_not_answer_a_report_about_a_step_of_its_successor() -> None:
    desk = ValuesDesk(True)
    message, payload = part_of(STEPS, 1, 0, 0)
    assert not desk.values.report(b"t", msgspec.structs.replace(message, attempt=(2, 1)), payload, 0, STEPS)
    assert not desk.log


def test_a_new_broker_takes_values_of_steps_that_an_earlier_one_has_served() -> None:
    live = Rollouts(3)
    live.wanted = 40
    live.until(lambda: live.had >= 4)
    live.start_broker()
    assert live.feed.steps.formed_upto < live.had, "the steps are not formed again yet"
    message, payload = part_of(live.had - 1, 1, 0, 0)
    told = Envelope(run=0, epoch=0, fence=0, message=message, payload=payload)
    answers = [
        effect.envelope.message for effect in live.core.handle(FromTrainer(b"pub", told))
        if isinstance(effect, SendTrainer) and effect.peer == b"pub"
    ]  # fmt: skip
    assert not any(isinstance(answer, Noted) and answer.refusal for answer in answers)


def test_steps_whose_records_were_deleted_are_skipped() -> None:
    desk = ValuesDesk(True)
    for step in range(STEPS):
        desk.report_step(step)
    desk.sync()
    desk.values.forget_below(6)
    for _ in range(STEPS):
        desk.ask()
    assert [message.step for message, _ in desk.had] == [2, 3]


def test_a_report_that_contradicts_itself_is_refused() -> None:
    desk = ValuesDesk(True)
    message, payload = part_of(0, 1, 0, 0)
    wrong = [
        (msgspec.structs.replace(message, streams_u32=b"\0\0"), payload),
        (msgspec.structs.replace(message, names=("a", "a")), payload * 2),
        (msgspec.structs.replace(message, names=()), ()),
        (message, (b"\0" * 8,)),
        (msgspec.structs.replace(message, part=9), payload),
        (msgspec.structs.replace(message, step=STEPS), payload),
        (msgspec.structs.replace(message, indices_u64=bytes(8 * SAMPLES)), payload),
    ]
    for each in wrong:
        (effect,) = desk.values.report(b"t", *each, 0, STEPS)
        assert isinstance(effect, SendTrainer)
        assert isinstance(effect.envelope.message, Noted)
        assert effect.envelope.message.refusal.startswith("got ")
    assert not desk.log


@pytest.mark.parametrize("keeps", [False, True])
def test_trainers_that_go_back_over_many_steps_do_not_deliver_a_step_again(keeps: bool) -> None:
    """More steps than a broker without a log keeps; with a log, the records of most steps were deleted."""
    desk, steps = ValuesDesk(keeps), KEPT_STEPS + 40
    for attempt in (1, 2):
        for step in range(steps + attempt):
            for dp in range(DP):
                for cp in range(CP):
                    desk.perform(desk.values.report(b"t", *part_of(step, attempt, dp, cp), 0, 2 * steps))
            desk.sync()
            desk.ask()
        if keeps:
            desk.values.forget_below(len(desk.log) - 8)
    desk.ask()
    assert [message.step for message, _ in desk.had] == list(range(steps + 2))
    assert len(desk.noted) == (2 * steps + 3) * DP * CP, "every report is answered"


@given(st.lists(st.integers(0, 40)))
def test_ranges_of_steps_are_a_set(steps: list[int]) -> None:
    ranges, known = StepRanges(), set[int]()
    for step in steps:
        ranges.add(step)
        known.add(step)
        assert [each for each in range(-1, 43) if each in ranges] == sorted(known)
    starts = sum(step - 1 not in known for step in known)
    assert ranges.num_ranges == starts, "steps that follow each other are one range"


def test_the_values_of_the_newest_steps_are_kept_however_large_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streampack.core.results.pending_steps.PENDING_BYTES", 1)
    desk = ValuesDesk(True)
    for step in range(40):
        message, payload = part_of(step, 1, 0, 0)
        desk.values.report(b"t", message, payload, 0, 40)
    assert sorted(desk.values.pending.steps) == list(range(24, 40))


def test_values_of_a_stream_that_does_not_exist_are_refused() -> None:
    """Also for a step whose samples are not known any more: subscribers of it failed."""
    desk = ValuesDesk(True)
    message, payload = part_of(0, 1, 0, 0)
    message = msgspec.structs.replace(message, streams_u32=np.full(SAMPLES, 1, "<u4").tobytes())
    (answer,) = desk.values.report(b"t", message, payload, 0, STEPS)
    assert isinstance(answer, SendTrainer)
    assert isinstance(answer.envelope.message, Noted)
    assert "got samples of stream number 1, expected a number below 1" in answer.envelope.message.refusal


def test_steps_that_are_never_complete_take_a_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that reported alone, or invented names, took gigabytes."""
    monkeypatch.setattr("streampack.core.results.pending_steps.PENDING_BYTES", 1500)
    desk = ValuesDesk(True)
    warned: list[str] = []
    for step in range(STEPS):
        for number in range(MOST_NAMES + 1):
            message, payload = part_of(step, 1, 0, 0)
            message = msgspec.structs.replace(message, names=(f"name{number}",))
            effects = desk.values.report(b"t", message, payload, 0, STEPS)
            warned += [effect.text for effect in effects if isinstance(effect, Report)]
            refused = [e.envelope.message for e in effects if isinstance(e, SendTrainer)]
            assert bool(refused) is (number == MOST_NAMES), "too many sets of names"
    assert (
        desk.values.pending.num_bytes == sum(parts.num_bytes for parts in desk.values.pending._steps.values()) <= 1500
    )
    assert "forgot the values of step 0 (name0), because not every rank reported them" in warned[0]
    assert min(desk.values.pending.steps) > 0, "the oldest are forgotten"
    desk.values.pending.branch(1)
    assert desk.values.pending.num_bytes == 0
