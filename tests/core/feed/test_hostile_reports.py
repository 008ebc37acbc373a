"""Policies and values that a trainer cannot have: they are refused, and a log that has one is read without it."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from streampack.core.journal.log_effects import Append, Safe
from streampack.core.journal.log_records import PolicyPublished
from streampack.core.model.bounded import MOST_VERSION
from streampack.core.protocol.effects import FromTrainer
from streampack.core.protocol.message import Envelope, Message
from streampack.core.protocol.result_messages import Noted, Publish, ReportValues
from tests.fuzz.peers import World
from tests.fuzz.stage import RUN, Stage


def answer(stage: Stage, message: Message, payload: tuple[bytes, ...] = ()) -> Noted | None:
    """Return the answer of the broker to a message of a trainer; None without one."""
    stage.told.pop(b"z", None)
    stage.hear(1, b"z", Envelope(run=RUN, epoch=stage.epoch, fence=0, message=message, payload=payload))
    said = [each.message for each in stage.told.get(b"z", []) if isinstance(each.message, Noted)]
    return said[-1] if said else None


def running(scene: str = "late") -> World:
    """A run in which a step is kept that both ranks have been sent."""
    world = World(scene, Random(1), hostile=False)
    steps = world.stage.core.feeds["train"].steps
    for _ in range(60):
        world.turn()
        if any(steps.samples_of(step, 0, 2) is not None for step in range(steps.released_upto, steps.formed_upto)):
            return world
    raise AssertionError("no step is kept")


def test_values_of_another_ranks_samples_are_refused() -> None:
    """They were summed with those of the rank that has the samples."""
    stage = running().stage
    feed = stage.core.feeds["train"]
    step = next(n for n in range(feed.steps.released_upto, 99) if feed.steps.samples_of(n, 0, 2) is not None)
    own, others = feed.steps.samples_of(step, 0, 2), feed.steps.samples_of(step, 1, 2)
    assert own is not None
    assert others is not None
    rows = {tuple(row) for row in np.concatenate([own, others]).tolist()}
    assert len(rows) == len(own) + len(others), "each sample is one rank's"

    def report(ids: np.ndarray, part: int) -> Noted | None:
        return answer(stage, ReportValues(
            feed="train", number=part, lineage=feed.history.lineage, step=step,
            attempt=(stage.epoch, feed.readers.attempts.number), part=part, parts=2, names=("probe",),
            streams_u32=ids[:, 0].astype("<u4").tobytes(), indices_u64=ids[:, 1].astype("<u8").tobytes(),
            parts_u32=ids[:, 2].astype("<u4").tobytes(),
        ), (bytes(8 * len(ids)),))  # fmt: skip

    refused = report(others, 0)
    assert refused is not None
    assert f"got values for {len(others)} samples that this rank does not have in step {step}" in refused.refusal
    assert report(own, 0) == Noted(number=0)
    assert report(others[:1], 1) == Noted(number=1), "of some of its samples"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": 2**61}, "got policy version"),
        ({"attempt": (0, 2**61)}, "got attempt"),
        ({"attempt": (2**61, 2**61)}, None),
        ({"version": 3, "step": 1}, "but version 107 is published"),
        ({"version": 108, "step": 2**40}, "expected at most step"),
    ],
    ids=str,
)
def test_a_policy_that_trainers_cannot_have_is_refused(change: dict[str, object], why: str | None) -> None:
    """It was accepted for good, and later ones were ignored without a word."""
    stage = running().stage
    feed = stage.core.feeds["train"]
    attempt = stage.epoch, feed.readers.attempts.number
    publish = Publish(feed="train", number=5, version=107, step=0, attempt=attempt)
    assert answer(stage, publish) == Noted(number=5)
    wrong = replace(publish, number=6, **change)
    if wrong.attempt[0] == 0:
        wrong = replace(wrong, attempt=(stage.epoch, wrong.attempt[1]))
    refused = answer(stage, wrong)
    assert (refused is None) if why is None else (refused is not None and why in refused.refusal)
    assert feed.history.published is not None
    assert feed.history.published.version == 107
    assert answer(stage, replace(publish, number=8, version=108)) == Noted(number=8)


def test_a_rank_that_repeats_steps_publishes_their_versions_again() -> None:
    """A process that took its rank over, from an older checkpoint, was refused in the same attempt."""
    stage = running().stage
    feed = stage.core.feeds["train"]
    attempt = stage.epoch, feed.readers.attempts.number
    last = feed.readers.attempts.known_upto
    for number, step in enumerate([last, 0, last - 1, last]):
        publish = Publish(feed="train", number=number, version=100 + step, step=step, attempt=attempt)
        assert answer(stage, publish) == Noted(number=number)
        assert feed.history.published is not None
        assert feed.history.published.version == 100 + last, "a repeated version changes nothing"


def test_a_trainer_has_at_most_one_policy_that_waits_for_the_log() -> None:
    """Each took a record and an answer in memory, as fast as they came."""
    stage = running().stage
    attempt = stage.epoch, stage.core.feeds["train"].readers.attempts.number
    effects = []
    for version in range(107, 1107):  # no record becomes safe between them
        publish = Publish(feed="train", number=version, version=version, step=0, attempt=attempt)
        envelope = Envelope(run=RUN, epoch=stage.epoch, fence=0, message=publish)
        effects += stage.core.handle(FromTrainer(b"z", envelope))
    assert sum(isinstance(effect, Append) for effect in effects) == 1
    for effect in effects:
        stage.perform(effect)
    stage.handle(Safe(stage.core.journal.next_lsn))
    assert [each.message for each in stage.told[b"z"]][-1] == Noted(number=107)
    later = Publish(feed="train", number=1107, version=1107, step=0, attempt=attempt)
    assert answer(stage, later) == Noted(number=1107)


@pytest.mark.parametrize(
    "published", [{"version": 2**61, "attempt": (5, 1)}, {"version": 109, "attempt": (2**61, 2**61)}], ids=str
)
def test_a_log_with_a_policy_of_no_trainer_is_read_without_it(published: dict[str, object]) -> None:
    world = running()
    stage = world.stage
    good = replace(PolicyPublished(feed="train", version=107, step=0, attempt=(stage.epoch, 1)))
    stage.disk.append(good)
    stage.disk.append(replace(good, **published))
    stage.restart()
    feed = stage.core.feeds["train"]
    assert feed.history.published == good
    assert feed.history.facts(0).published == good, "nor do the facts have it, which replace the record"
    publish = Publish(feed="train", number=5, version=2, step=0, attempt=(stage.epoch, 0))
    assert answer(stage, publish) == Noted(number=5)
    assert feed.history.published.version == 2
    assert feed.history.published.version <= MOST_VERSION
