"""Every message of a run, damaged, cut and with wrong counts; and a producer and a rank that keep to nothing."""

from __future__ import annotations

import struct
from random import Random

import msgpack
import numpy as np
import pytest
from crc32c import crc32c
from msgspec.structs import replace

from streampack.core.intake.producers import CLAIM_S
from streampack.core.model.mesh import Mesh
from streampack.core.protocol.message import Envelope, Message, Reject
from streampack.core.protocol.producer_messages import Hello, LateFields, Offer, Samples, Start
from streampack.core.protocol.relay_messages import relayed
from streampack.core.protocol.trainer_messages import Attach, Get
from streampack.core.serve import rank_registry
from streampack.core.sessions.pushing.push_session import PUSHED
from streampack.core.staging.tickets import LEARN_S
from streampack.errors import WireError
from streampack.wire import frames as wire
from streampack.wire.frames import ALL_MESSAGES
from tests.fuzz.decoders import messages
from tests.fuzz.machines import honest
from tests.fuzz.stage import EPOCH, LATE, PACED, QUOTA, RUN, Stage, chunk_message, read_item

SAID = {type(envelope.message): envelope for envelope in messages()}
BITS = 400
"""Of a message's meta and payload, drawn; those of its header are all flipped."""


def frames_of(kind: type[Message]) -> list[bytes]:
    return [bytes(memoryview(each)) for each in wire.encode(SAID[kind])]


def test_every_type_is_among_those_that_are_damaged() -> None:
    assert set(SAID) == set(ALL_MESSAGES)


@pytest.mark.parametrize("kind", ALL_MESSAGES, ids=lambda kind: kind.__name__)
def test_a_flipped_bit_is_noticed_in_every_type_of_message(kind: type[Message]) -> None:
    frames, rng = frames_of(kind), Random(kind.TYPE)
    assert wire.decode(frames).message == SAID[kind].message
    places = [(0, bit) for bit in range(8 * wire.HEADER_BYTES)]
    rest = [(number, bit) for number, each in enumerate(frames[1:], 1) for bit in range(8 * len(each))]
    for number, bit in places + rng.sample(rest, min(BITS, len(rest))):
        damaged = bytearray(frames[number])
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            wire.decode([*frames[:number], bytes(damaged), *frames[number + 1 :]])


@pytest.mark.parametrize("kind", ALL_MESSAGES, ids=lambda kind: kind.__name__)
def test_a_short_message_is_refused_as_short_also_under_right_checksums(kind: type[Message]) -> None:
    header, meta, *payload = frames_of(kind)
    for size in sorted({0, 1, len(meta) // 2, len(meta) - 1} - {len(meta)}):
        with pytest.raises(WireError):
            wire.decode([sealed(kind.TYPE, meta[:size], payload), meta[:size], *payload])
    assert wire.decode([sealed(kind.TYPE, meta, payload), meta, *payload]).message == SAID[kind].message
    with pytest.raises(WireError):
        wire.decode([header[:-1], meta, *payload])


def sealed(kind: int, meta: bytes, payload: list[bytes], run: int = RUN, epoch: int = EPOCH, fence: int = 1) -> bytes:
    """A header that is right."""
    crc, size = crc32c(b"".join([meta, *payload])), sum(map(len, payload))
    head = struct.pack("<4sBBHQQQIIQI", b"SPK1", 1, kind, len(payload), run, epoch, fence, len(meta), crc, size, 0)
    return head + struct.pack("<I", crc32c(head))


NONE = (("going_on", -1), ("copies_from", -1))
"""Fields and the value that means that there is none."""


@pytest.mark.parametrize("value", [2**62, 2**63, 2**64 - 1, -1, -(2**63)])
@pytest.mark.parametrize("kind", ALL_MESSAGES, ids=lambda kind: kind.__name__)
def test_counts_beyond_what_is_counted_are_refused(kind: type[Message], value: int) -> None:
    """Of every whole number that a message has, so that no sum of two overflows 64 bits."""
    plain = msgpack.unpackb(frames_of(kind)[1])
    for name, found in plain.items():
        if isinstance(found, int) and not isinstance(found, bool) and (name, value) not in NONE:
            meta = msgpack.packb(plain | {name: value})
            with pytest.raises(WireError, match="cannot be decoded"):
                wire.decode([sealed(kind.TYPE, meta, []), meta])


@pytest.mark.parametrize("number", ["epoch", "fence"])
def test_fences_of_which_none_is_higher_are_refused(number: str) -> None:
    meta = frames_of(ALL_MESSAGES[0])[1]
    for value, fits in ((wire.MAX_FENCE - 1, True), (wire.MAX_FENCE, False), (2**64 - 1, False)):
        frames = [sealed(ALL_MESSAGES[0].TYPE, meta, [], **{number: value}), meta]
        if fits:
            wire.decode(frames)
            continue
        with pytest.raises(WireError, match="expected numbers below"):
            wire.decode(frames)


def test_a_key_twice_and_text_that_is_none_are_an_error_or_one_value() -> None:
    name, twice = msgpack.packb("producer"), b"\x82"
    meta = twice + (name + msgpack.packb("a")) + (name + msgpack.packb("b"))
    found = wire.decode([sealed(4, meta, []), meta]).message
    assert getattr(found, "producer", "") == "b"
    for body in (b"\xa2\xff\xfe", b"\xd9\x02\xc3\x28", b"\xa3\xed\xa0\x80", b"\xc7\x01\x05\x00", b"\xd6\xff\0\0\0\0"):
        meta = b"\x81" + name + body
        with pytest.raises(WireError):
            wire.decode([sealed(4, meta, []), meta])


# Those who keep to nothing


def leased(stage: Stage) -> int:
    """A producer of stream ``a`` is there; its session of partition 0."""
    hello = Hello(producer="x", host="h", pid=1, offers=[Offer(stream="a", source_digest="d")])
    stage.hear(0, b"x", Envelope(run=0, epoch=0, fence=0, message=hello))
    return stage.fences[b"x", "a", 0]


def test_samples_beyond_the_credit_are_not_taken() -> None:
    stage = Stage()
    leased(stage)
    tokens = 0
    for turn in range(200):
        chunk = chunk_message("a", 0, 4 * turn, [16, 16, 16, 16])
        session = stage.fences[b"x", "a", 0]
        stage.hear(0, b"x", replace(chunk, fence=session))
        tokens += 64
    assert stage.arena.live_tokens <= 2 * QUOTA < tokens
    stage.check()
    assert stage.core.leases.num_producers == 1, "it begins again where it was too fast"


@pytest.mark.parametrize(
    "wrong",
    [
        {"lengths_u32": np.array([3, 2**32 - 1], "<u4").tobytes()},
        {"lengths_u32": np.full(60_000, 2**32 - 1, "<u4").tobytes()},
        {"lengths_u32": b"\1\0\0"},
        {"lengths_u32": b""},
        {"loss_tokens_u32": np.array([2**32 - 1, 5], "<u4").tobytes()},
        {"crcs_u32": b""},
        {"base_seq": 2**62 - 1},
        {"rejected": {"empty": 2**62 - 1}},
        {"lengths_u32": np.array([3, 6], "<u4").tobytes()},
        {"policy_version": 2**62 - 1},
    ],
    ids=str,
)
def test_a_chunk_that_does_not_add_up_is_refused_and_costs_nothing(wrong: dict[str, object]) -> None:
    stage = Stage()
    session = leased(stage)
    chunk = chunk_message("a", 0, 0, [3, 5])
    assert isinstance(chunk.message, Samples)
    stage.hear(0, b"x", replace(chunk, fence=session, message=replace(chunk.message, **wrong)))
    assert stage.arena.live_tokens == 0
    stage.check()


def test_a_rank_that_asks_for_all_steps_there_will_ever_be_gets_those_there_are() -> None:
    stage, said = Stage(), honest().said
    for given in said:
        if given[0] == "m" and (read := read_item(given, stage.fences)) is not None and read[0] == 0:
            stage.hear(*read)
    attach = next(read_item(given, {}) for given in said if given[0] == "m" and given[3] == Attach.TYPE)
    assert attach is not None
    stage.hear(*attach)
    before = len(stage.told[b"2"])
    for request in range(50):
        get = Get(feed="train", lineage=0, start=0, stop=2**62 - 1, done_upto=0, request=request)
        stage.hear(1, b"2", Envelope(run=RUN, epoch=EPOCH, fence=1, message=get))
    assert 0 < len(stage.told[b"2"]) - before <= 51 * 2, "as many as may be ahead, each time"
    for done in (2**62 - 1, 0):
        get = Get(feed="train", lineage=2**62 - 1, start=2**62 - 2, stop=2**62 - 1, done_upto=done, request=99)
        stage.hear(1, b"2", Envelope(run=RUN, epoch=EPOCH, fence=1, message=get))
    stage.check()


def told(stage: Stage, peer: bytes) -> list[Reject]:
    """Return the reason why a peer was rejected."""
    return [each.message for each in stage.told.get(peer, []) if isinstance(each.message, Reject)]


@pytest.mark.parametrize("partition", [0, 1, 2, 2**20 - 1])
def test_a_producer_that_amends_names_no_partition_and_claims_none(partition: int) -> None:
    """A number beyond the stream's partitions ended the broker; a smaller one took a partition of another producer."""
    stage = Stage({"train": LATE})
    pushes = Hello(producer="x", host="h", pid=1, offers=[Offer(stream="p", source_digest=PUSHED, partition=0)])
    stage.hear(0, b"x", Envelope(run=RUN, epoch=EPOCH, fence=0, message=pushes))
    offer = Offer(stream="p", source_digest=PUSHED, partition=partition, amends=True)
    amends = Hello(producer="y", host="h", pid=2, offers=[offer])
    for _ in range(3):
        stage.hear(0, b"y", Envelope(run=RUN, epoch=EPOCH, fence=0, message=amends))
        stage.tick(1.5 * CLAIM_S)
    assert stage.core.leases.producers.holder == ["x", None]
    assert "from a producer that amends, expected no partition" in told(stage, b"y")[0].detail
    honest = replace(amends, offers=[replace(offer, partition=None)])
    stage.hear(0, b"y", Envelope(run=RUN, epoch=EPOCH, fence=0, message=honest))
    assert isinstance(stage.told[b"y"][-1].message, LateFields)


@pytest.mark.parametrize("kind", [kind for kind in ALL_MESSAGES if not kind.RELAYED], ids=lambda kind: kind.__name__)
def test_a_relay_passes_on_no_message_whose_answer_may_have_a_payload(kind: type[Message]) -> None:
    stage, address = Stage(), relayed(b"relay", "rank")
    envelope = replace(SAID[kind], run=RUN, epoch=EPOCH, fence=0)
    stage.hear(1, address, envelope)
    assert [reject.code for reject in told(stage, address)] == ["protocol"]


def test_few_processes_wait_for_the_same_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay's bundles made thousands of claims, each of which the broker decided and refused five times a second."""
    monkeypatch.setattr(rank_registry, "MOST_CLAIMS", 3)
    stage = Stage()
    for number in range(6):
        attach = Attach(feed="train", reader=f"x{number}", host="h", pid=number, mesh=Mesh(dp=2), next_step=0)
        address = relayed(b"relay", f"x{number}")
        stage.hear(1, address, Envelope(run=RUN, epoch=EPOCH, fence=0, message=attach))
    refused = [number for number in range(6) if told(stage, relayed(b"relay", f"x{number}"))]
    assert refused == [4, 5], "the first holds the rank"
    detail = told(stage, relayed(b"relay", "x4"))[0].detail
    assert "processes that ask for rank dp=0/2" in detail
    stage.tick(20.0)
    again = Attach(feed="train", reader="y", host="h", pid=9, mesh=Mesh(dp=2), next_step=0)
    stage.hear(1, b"y", Envelope(run=RUN, epoch=EPOCH, fence=0, message=again))
    assert not told(stage, b"y"), "claims that were decided do not count"


def test_a_process_that_starts_again_and_again_is_not_refused_for_its_dead_predecessors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each claims a rank of another mesh and dies. The old process may take ten seconds to end, so all claims wait."""
    monkeypatch.setattr(rank_registry, "MOST_CLAIMS", 3)
    stage = Stage()
    old = Attach(feed="train", reader="old", host="h", pid=99, mesh=Mesh(), next_step=0, ready=True)
    for number in range(6):
        stage.hear(1, b"old", Envelope(run=RUN, epoch=EPOCH, fence=0, message=old))
        attach = Attach(feed="train", reader=f"x{number}", host="h", pid=number, mesh=Mesh(dp=2), next_step=0)
        address = f"x{number}".encode()
        stage.hear(1, address, Envelope(run=RUN, epoch=EPOCH, fence=0, message=attach))
        assert not [reject for reject in told(stage, address) if reject.code == "too_many"]
        stage.tick(1.5)


def paced(stage: Stage) -> int:
    """A program of a paced stream is there; its session."""
    hello = Hello(producer="x", host="h", pid=1, offers=[Offer(stream="p", source_digest=PUSHED, partition=0)])
    stage.hear(0, b"x", Envelope(run=RUN, epoch=EPOCH, fence=0, message=hello))
    return stage.fences[b"x", "p", 0]


@pytest.mark.parametrize(
    "counts",
    [
        {"asked": 2, "granted": 1, "used": 2**61},
        {"asked": 2, "granted": 2**61, "used": 0},
        {"asked": 2, "granted": 1, "used": 0, "open": ((1, 2**61),)},
    ],
    ids=str,
)
def test_a_report_of_tickets_that_contradicts_itself_is_refused(counts: dict[str, object]) -> None:
    """More tickets used than given made the broker give tickets without end."""
    stage = Stage({"train": PACED})
    session = paced(stage)
    message = Start(stream="p", partition=0, **counts)  # type: ignore[arg-type]
    stage.hear(0, b"x", Envelope(run=RUN, epoch=EPOCH, fence=session, message=message))
    stage.tick(2 * LEARN_S)
    assert [reject.code for reject in told(stage, b"x")] == ["protocol"]
    assert all(each.num_open == 0 for each in stage.core.leases.staging.tickets.values())


def test_a_group_of_any_size_takes_no_memory() -> None:
    """A ticket took an entry, so one message took gigabytes."""
    stage = Stage({"train": PACED})
    session = paced(stage)
    message = Start(stream="p", partition=0, asked=2**61, granted=0, used=0, together=2**61)
    stage.hear(0, b"x", Envelope(run=RUN, epoch=EPOCH, fence=session, message=message))
    stage.tick(2 * LEARN_S)
    tickets = stage.core.leases.staging.tickets["train"]
    assert tickets.granted(0) == 2**61
    assert [(each.version, each.samples) for each in tickets.generated()] == [(0, 2**61)]
    stage.hear(0, b"x", Envelope(run=RUN, epoch=EPOCH, fence=session, message=replace(message, granted=2**61 - 3)))
    assert [each.samples for each in tickets.generated()] == [3], "those that the program may not know"
