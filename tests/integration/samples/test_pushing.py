"""``streampack.Producer`` over the real transport, against the smallest broker that keeps the protocol."""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crc32c import crc32c
from msgspec import UNSET

import streampack
from streampack.connection import session_thread
from streampack.core.model.fields import Field
from streampack.core.protocol.message import Bye, Reject
from streampack.core.protocol.producer_messages import Done, ProducerPing
from streampack.errors import DataStall, PeerError, Rejected, SampleError, Unreachable, UserError
from streampack.producer import push_thread
from tests.integration.running import PATIENCE_S, until
from tests.integration.small_broker import STREAM, SmallBroker

FIELDS = (
    Field(name="loss_mask", dtype="uint8", align="target"),
    Field(name="advantages", dtype="bfloat16", align="target", default=0),
    Field(name="group", dtype="int64", axis="sample", default=-1),
    Field(name="policy_version", dtype="int64", axis="sample", default=-1),
)


@pytest.fixture
def start() -> Iterator[Callable[..., SmallBroker]]:
    """Makes brokers, and ends them."""
    brokers: list[SmallBroker] = []

    def make(**settings: Any) -> SmallBroker:
        brokers.append(SmallBroker(**settings))
        return brokers[-1]

    yield make
    for broker in brokers:
        broker.stop()


def producer(broker: SmallBroker, **settings: Any) -> streampack.Producer:
    return streampack.Producer(broker.endpoint, stream=STREAM, partition=1, **{"timeout_s": PATIENCE_S} | settings)


def test_samples_come_as_they_were_given(start: Callable[..., SmallBroker]) -> None:
    """Lists, arrays and tensors, with fields of every kind; numbered from where the broker stands."""
    broker = start(first_seq=40, terms={"fields": FIELDS})
    with producer(broker) as rollouts:
        tensor = torch.tensor([1.0, -2.0, 0.5], dtype=torch.bfloat16, requires_grad=True)
        assert rollouts.send([7, 8, 9], loss_mask=[0, 1, 1], advantages=tensor) == 40
        assert rollouts.send({"input_ids": np.array([4, 5]), "loss_mask": torch.tensor([0, 1]), "uid": "x"}) == 41
        both = rollouts.send_many([{"input_ids": torch.arange(3), "policy_version": 6}, [1, 2]])
        assert both == range(42, 44)
        rollouts.flush()
        assert rollouts.stats()["durable_seq"] == 44
    until(lambda: broker.heard_of(Bye) > 0)
    assert [taken.message.base_seq for taken in broker.taken] == [40, 41, 42]
    assert [taken.lengths for taken in broker.taken] == [[3], [2], [3, 2]]
    assert [taken.column(0, "<i4") for taken in broker.taken] == [[7, 8, 9], [4, 5], [0, 1, 2, 1, 2]]
    assert [taken.column(1, "u1") for taken in broker.taken] == [[0, 1, 1], [0, 1], [1, 1, 1, 1, 1]]
    assert broker.taken[0].column(2, "<u2") == [0x3F80, 0xC000, 0x3F00]
    assert broker.taken[2].column(4, "<i8") == [6, -1]
    first = broker.taken[0]
    assert np.frombuffer(first.message.crcs_u32, "<u4").tolist() == [crc32c(b"".join(first.payload))]
    assert np.frombuffer(broker.taken[1].message.loss_tokens_u32, "<u4").tolist() == [1]
    assert broker.heard_of(Bye) == 1
    assert not broker.ended


def test_a_group_is_one_chunk_with_its_number_and_its_policys_version(start: Callable[..., SmallBroker]) -> None:
    broker = start(terms={"fields": FIELDS, "batches": True})
    group = [{"input_ids": [1] * (3 + i), "loss_mask": [1] * (3 + i)} for i in range(4)]
    with producer(broker) as rollouts:
        rollouts.send([5])
        assert rollouts.send_group(group, keep="step", policy_version=9) == range(1, 5)
        assert rollouts.send_group((each for each in group), keep="pack") == range(5, 9)
        rollouts.end_of_batch(9)
        rollouts.send([6])
    assert [taken.message.keep for taken in broker.taken] == [UNSET, "step", "pack", UNSET]
    assert [taken.lengths for taken in broker.taken] == [[1], [3, 4, 5, 6], [3, 4, 5, 6], [1]]
    assert [taken.column(3, "<i8") for taken in broker.taken] == [[-1], [1] * 4, [5] * 4, [-1]]
    assert [taken.column(4, "<i8") for taken in broker.taken] == [[-1], [9] * 4, [-1] * 4, [-1]]
    assert broker.marks == [(9, 9)]


def test_by_default_a_group_is_kept_in_a_step_where_steps_are_batches_and_in_nothing_elsewhere(
    start: Callable[..., SmallBroker],
) -> None:
    stream, batches = start(), start(terms={"batches": True})
    for broker in (stream, batches):
        with producer(broker) as rollouts:
            rollouts.send_group([[1, 2], [3]])
            rollouts.send_group([[1, 2], [3]], keep="pack")
    assert [taken.message.keep for taken in stream.taken] == [UNSET, "pack"]
    assert [taken.message.keep for taken in batches.taken] == ["step", "pack"]


def test_a_group_to_be_kept_in_a_step_of_a_stream_is_refused_naming_the_key(start: Callable[..., SmallBroker]) -> None:
    broker = start()
    with producer(broker) as rollouts:
        with pytest.raises(UserError, match=r"got keep='step', but the run's steps are not batches, .* set `step: "):
            rollouts.send_group([[1, 2], [3]], keep="step")
        assert rollouts.send([1]) == 0, "and nothing of it was sent"


def test_a_policys_version_is_told_whether_or_not_it_is_a_field(start: Callable[..., SmallBroker]) -> None:
    plain, declared = start(), start(terms={"fields": FIELDS})
    for broker in (plain, declared):
        with producer(broker) as rollouts:
            rollouts.send([1], policy_version=np.int64(3))
            rollouts.send_many([[1], [2]], policy_version=4)
            rollouts.send_group([[1]], policy_version=5)
            rollouts.send([1])
            for wrong in (-1, 1.5, "7"):
                with pytest.raises(UserError, match=r"got policy_version=.*, expected an integer of at least 0"):
                    rollouts.send([1], policy_version=wrong)  # type: ignore[arg-type]
        assert [taken.message.policy_version for taken in broker.taken] == [3, 4, 5, UNSET]
    assert [taken.column(4, "<i8") for taken in declared.taken] == [[3], [4, 4], [5], [-1]]


def test_a_group_of_a_run_that_declares_neither_field_has_none(start: Callable[..., SmallBroker]) -> None:
    broker = start()
    with producer(broker) as rollouts:
        rollouts.send_group([[1, 2], [3]], policy_version=4)
    (taken,) = broker.taken
    assert [len(frame) for frame in taken.payload] == [12]


def test_a_group_that_no_chunk_holds_is_refused_whole(start: Callable[..., SmallBroker]) -> None:
    broker = start()
    with producer(broker) as rollouts:
        with pytest.raises(
            SampleError, match=r"a group of 5 samples that needs 2 chunks, expected one chunk\. A chunk holds at most"
        ):
            rollouts.send_group([[1] * 100] * 5)
        with pytest.raises(UserError, match="a group without samples"):
            rollouts.send_group([])
        with pytest.raises(UserError, match="got keep='batch', expected 'pack', 'step' or None"):
            rollouts.send_group([[1]], keep="batch")  # type: ignore[arg-type]
        assert rollouts.send([1]) == 0
        assert rollouts.send_many([[1] * 100] * 5) == range(1, 6)
    assert [taken.lengths for taken in broker.taken] == [[1], [100] * 4, [100]]


@pytest.mark.parametrize(
    ("sample", "why"),
    [
        ({"input_ids": []}, r"sample 0: got a sample that cannot be used \(empty\)"),
        ({"input_ids": [1.5]}, r"\(dtype\)"),
        ({"input_ids": [[1], [2]]}, r"\(ragged\)"),
        ({"text": "hello"}, r"\(missing\)"),
        ("hello", r"\(dtype\)"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, r"\(loss_mask: length\)"),
        ({"input_ids": [1, 2], "group": 1.5}, r"\(group: dtype\)"),
        ({"input_ids": [1] * 101}, "got a sample of 101 tokens, expected at most 100. Set `overlong` in `rules`"),
    ],
)
def test_a_bad_sample_is_an_error_where_it_is_given(sample: Any, why: str, start: Callable[..., SmallBroker]) -> None:
    broker = start(terms={"fields": FIELDS})
    with producer(broker) as rollouts:
        with pytest.raises(SampleError, match=why):
            rollouts.send(sample)
        with pytest.raises(SampleError, match="sample 1: "):
            rollouts.send_many([[1], sample])
        assert rollouts.send([1]) == 0
    assert [taken.lengths for taken in broker.taken] == [[1]]


def test_known_keys_of_a_sample_are_read_or_refused(start: Callable[..., SmallBroker]) -> None:
    mask = Field(name="loss_mask", dtype="uint8", align="target")
    broker = start(terms={"fields": (mask,)})
    padded = {"input_ids": torch.tensor([5, 6, 7, 0]), "attention_mask": torch.tensor([1, 1, 1, 0])}
    with producer(broker) as rollouts:
        assert rollouts.send(padded | {"labels": torch.tensor([-100, 6, 7, -100])}) == 0
        assert rollouts.send({"input_ids": [5, 6], "completion_mask": [0, 1], "assistant_masks": [1, 1]}) == 1
        for sample, why in (
            ({"input_ids": [5, 6], "seq_lengths": [1, 1]}, r"\(seq_lengths: packed\)"),
            ({"input_ids": [5, 6], "labels": [6, -100]}, r"\(labels: shifted\), expected labels that are not shifted"),
            ({"input_ids": [5, 6], "tool_mask": [0, 1]}, r"\(tool_mask: unread\)"),
        ):
            with pytest.raises(SampleError, match=why):
                rollouts.send(sample)
        with pytest.raises(UserError, match="got a dict with the keys input_ids, attention_mask, expected rows"):
            rollouts.send_many({"input_ids": [[5]], "attention_mask": [[1]]})
    assert [taken.lengths for taken in broker.taken] == [[3], [2]]
    assert [list(bytes(taken.payload[1])) for taken in broker.taken] == [[0, 1, 1], [0, 1]]


def test_a_field_that_the_run_does_not_declare_is_refused_where_it_is_named(start: Callable[..., SmallBroker]) -> None:
    with producer(start()) as rollouts:
        with pytest.raises(
            SampleError, match=r"got the field 'advantage', expected one of input_ids\. Declare the field under"
        ):
            rollouts.send([1, 2], advantage=[0.0, 1.0])
        with pytest.raises(SampleError, match="got a loss mask that the run does not declare"):
            rollouts.send({"input_ids": [1, 2], "loss_mask": torch.tensor([0, 1])})


def test_samples_that_policies_drop_or_cut_keep_their_numbers(start: Callable[..., SmallBroker]) -> None:
    broker = start(terms={"poison": "drop", "overlong": "truncate"})
    with producer(broker) as rollouts:
        assert rollouts.send([]) == 0
        assert rollouts.send_group([[1] * 120, [2], "x"]) == range(1, 4)
        stats = rollouts.stats()
    assert [taken.lengths for taken in broker.taken] == [[0], [100, 1, 0]]
    assert [taken.message.rejected for taken in broker.taken] == [{"empty": 1}, {"dtype": 1}]
    assert broker.taken[1].message.lost_tokens == 20
    assert (stats["samples"], stats["tokens"], stats["rejected"]) == (4, 101, 2)


def test_send_waits_for_room_and_says_what_for(
    start: Callable[..., SmallBroker], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session_thread, "SAY_S", 0.1)
    broker = start(safe=lambda taken: 0)
    with producer(broker, buffer="4KiB") as rollouts:
        for _ in range(2):
            rollouts.send([1] * 100)
        rollouts._pushing._timeout_s = 0.5  # now, that it is connected
        with pytest.raises(DataStall, match=r"waited 0\.5 s for room for 1436 bytes in its buffer of 4096 bytes"):
            rollouts.send([1] * 100)
        with pytest.raises(DataStall, match=r"for its samples to be durable. .* log to store samples 0 to 1"):
            rollouts.flush()
        assert "waiting for the broker's log to store samples 0 to 1" in caplog.text
        assert rollouts.stats()["buffered_bytes"] == 2 * 1436
        broker.safe = lambda taken: taken
        rollouts.flush(timeout_s=PATIENCE_S)
        assert rollouts.send([1] * 100) == 2


def test_a_broker_that_is_killed_gets_again_what_it_lost(start: Callable[..., SmallBroker]) -> None:
    first = start(safe=lambda taken: min(taken, 3))
    with producer(first) as rollouts:
        rollouts.send_many([[i] * 100 for i in range(6)])
        rollouts.send([9])
        until(lambda: first.expected == 7)
        until(lambda: rollouts.stats()["durable_seq"] == 3)
        first.stop()
        assert rollouts.send([10]) == 7
        again = start(endpoint=first.endpoint, epoch=2, first_seq=4)
        rollouts.flush()
    lengths = [length for taken in again.taken for length in taken.lengths]
    assert lengths == [100, 100, 1, 1]
    assert again.taken[0].column(0, "<i4") == [4] * 100 + [5] * 100


def test_threads_may_share_one(start: Callable[..., SmallBroker]) -> None:
    broker = start(terms={"fields": FIELDS})
    found: list[Sequence[int]] = []
    with producer(broker) as rollouts:

        def work() -> None:
            found.extend(rollouts.send_group([[1], [2], [3]]) for _ in range(20))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(each[0] for each in found) == list(range(0, 240, 3))
    assert [taken.column(3, "<i8") for taken in broker.taken] == [[3 * i] * 3 for i in range(80)]


def test_close_ends_the_partition_only_when_asked(start: Callable[..., SmallBroker]) -> None:
    broker = start()
    rollouts = producer(broker)
    rollouts.send([1])
    rollouts.end_of_batch(0)
    rollouts.close(end=True)
    rollouts.close()
    until(lambda: broker.heard_of(Bye) > 0)
    assert broker.ended
    assert broker.marks == [(1, 0)]
    assert isinstance(broker.heard[-1], Bye)
    with pytest.raises(UserError, match="the producer is closed: make another"):
        rollouts.send([1])


def fail_after(_: int) -> None:
    raise ZeroDivisionError("no reward")


def test_a_pusher_that_fails_says_so_and_does_not_end_its_partition(
    start: Callable[..., SmallBroker], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(push_thread, "LEAVE_S", 0.3)
    broker = start(safe=lambda taken: 0)
    with pytest.raises(ZeroDivisionError), producer(broker) as rollouts:
        fail_after(rollouts.send([1]))
    until(lambda: broker.heard_of(Bye) == 1)
    failures = [message.failure for message in broker.heard if isinstance(message, ProducerPing) and message.failure]
    assert failures == ["ZeroDivisionError('no reward')"]
    assert "closed before all samples were durable" in caplog.text
    assert not broker.ended


def test_a_pusher_without_references_is_closed_once_its_samples_are_safe(start: Callable[..., SmallBroker]) -> None:
    broker = start()
    rollouts = producer(broker)
    rollouts.send([1, 2])
    del rollouts
    gc.collect()
    until(lambda: broker.heard_of(Bye) == 1)
    assert broker.expected == 1
    assert not any(thread.name == "streampack-push" for thread in threading.enumerate())


def test_a_refusal_is_raised_where_samples_are_given(start: Callable[..., SmallBroker]) -> None:
    broker = start()
    rollouts = producer(broker)
    broker.say.append(Reject(code="malformed", detail="got a bad chunk"))
    until(lambda: not rollouts._pushing._thread.is_alive())
    with pytest.raises(Rejected, match=r"got a bad chunk \[malformed\]"):
        rollouts.send([1])
    rollouts.close()  # nothing is lost by it


def test_a_feed_that_has_ended_is_an_error_only_where_samples_are_lost(start: Callable[..., SmallBroker]) -> None:
    broker = start(safe=lambda taken: min(taken, 1))
    rollouts = producer(broker)
    rollouts.send([1])
    rollouts.flush()
    broker.say.append(Done())
    until(lambda: broker.heard_of(Bye) == 1)
    rollouts.close(end=True)
    other = start(safe=lambda taken: min(taken, 1))
    rollouts = producer(other)
    rollouts.send_many([[1], [2]])
    other.say.append(Done())
    with pytest.raises(Rejected, match="The broker accepts no more samples of this partition"):
        rollouts.close()


def test_a_fork_must_make_its_own(start: Callable[..., SmallBroker]) -> None:
    with producer(start()) as rollouts:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                rollouts.send([1])
            except PeerError as error:
                os.write(write, str(error).encode())
            rollouts.close()
            os._exit(0)
        os.waitpid(pid, 0)
        assert b"got a producer that the parent process made before the fork" in os.read(read, 1000)
        os.close(read)
        os.close(write)
        assert rollouts.send([1]) == 0
    with pytest.raises(UserError, match="got a producer to pickle"):
        rollouts.__reduce__()


def test_the_address_is_found(
    start: Callable[..., SmallBroker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STREAMPACK_PRODUCERS", raising=False)
    with pytest.raises(UserError, match=r"got no endpoint, expected .* set STREAMPACK_PRODUCERS"):
        streampack.Producer(stream=STREAM)
    broker = start()
    file = tmp_path / "streampack.json"
    file.write_text(json.dumps({"producers": broker.endpoint, "trainers": "tcp://127.0.0.1:1"}))
    for found in (broker.endpoint, f"file://{file}"):
        monkeypatch.setenv("STREAMPACK_PRODUCERS", found)
        streampack.Producer(stream=STREAM, partition=1, timeout_s=PATIENCE_S).close()
    with pytest.raises(UserError, match="got partition=-1"):
        streampack.Producer(stream=STREAM, partition=-1)


def test_a_broker_that_does_not_answer_is_said(start: Callable[..., SmallBroker]) -> None:
    broker = start(silent=True)
    with pytest.raises(Unreachable, match=r"got no answer in 0\.3 s, expected an answer from a broker"):
        producer(broker, timeout_s=0.3)
    with pytest.raises(DataStall, match="to store the samples that an earlier process pushed"):
        producer(start(first_seq=1, safe=lambda taken: taken - 1), timeout_s=2.5)


def test_a_pusher_pings_while_the_program_does_nothing(start: Callable[..., SmallBroker]) -> None:
    broker = start()
    with producer(broker):
        before = broker.heard_of(ProducerPing)
        until(lambda: broker.heard_of(ProducerPing) - before >= 2)
