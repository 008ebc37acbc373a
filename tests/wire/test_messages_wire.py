"""Messages and their bytes: every one survives the trip, none is believed when anything is off."""

import struct
import tracemalloc
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, get_args

import msgpack
import msgspec
import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET, inspect
from msgspec.structs import replace

from streampack.core.model.fields import Field
from streampack.core.model.keys.field_keys import NumberType
from streampack.core.model.keys.stage_keys import Stage, StageBegin
from streampack.core.model.mesh import Mesh
from streampack.core.model.rule_changes import Reweigh, Scheduled, WholeRules
from streampack.core.model.rules import Align, Rules, StreamRules
from streampack.core.packers.registry import PackerName
from streampack.core.protocol.message import Envelope, Message, Reject, Who
from streampack.core.protocol.producer_messages import Eos, Flow, Hello, Lease, Offer, ProducerPing, Samples
from streampack.core.protocol.step_part import StepPart
from streampack.core.protocol.trainer_messages import Attach, ReaderPing
from streampack.errors import WireError
from streampack.wire import frames as wire
from streampack.wire.frames import ALL_MESSAGES

# Messages of any type, from what their fields are declared to hold


def values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    match kind:
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType():
            return st.integers(kind.ge or 0, 2**62 - 1 if kind.lt is None else kind.lt - 1)
        case inspect.FloatType():
            return st.floats(kind.ge, kind.le, allow_nan=False)
        case inspect.StrType():
            return st.text(min_size=kind.min_length or 0, max_size=min(kind.max_length or 20, 20))
        case inspect.BytesType():
            return st.binary(min_size=kind.min_length or 0, max_size=min(kind.max_length or 24, 24))
        case inspect.NoneType():
            return st.none()
        case inspect.Metadata():
            return values(kind.type)
        case inspect.LiteralType():
            return st.sampled_from(kind.values)
        case inspect.UnionType():
            return st.one_of([values(each) for each in kind.types])
        case inspect.ListType():
            return st.lists(values(kind.item_type), max_size=3)
        case inspect.DictType():
            return st.dictionaries(values(kind.key_type), values(kind.value_type), max_size=3)
        case inspect.TupleType():
            return st.tuples(*[values(each) for each in kind.item_types])
        case inspect.VarTupleType():
            return st.lists(values(kind.item_type), min_size=kind.min_length or 0, max_size=3).map(tuple)
        case inspect.StructType() if kind.cls is Field:
            return FIELDS
        case inspect.StructType():
            return structs(kind.cls)
    raise AssertionError(f"no values known for {kind}")


def structs(cls: Any) -> st.SearchStrategy[Any]:
    if cls is Mesh:
        return meshes()
    if cls is Rules:
        return rules()
    if cls is Scheduled:
        begins = st.integers(0, 2**62 - 1)
        at = st.builds(StageBegin, step=begins) | st.builds(StageBegin, tokens=begins)
        weights = st.dictionaries(st.text(max_size=5), st.floats(0, 1e9), max_size=3)
        asks = st.builds(Reweigh, weights) | st.builds(Stage, at=at, weights=weights, over=st.integers(0, 9))
        return st.builds(Scheduled, begins, asks | st.builds(WholeRules, rules()), at, st.text(max_size=9))
    return st.builds(
        cls, **{f.name: values(f.type) | st.just(UNSET) if left_out(f) else values(f.type) for f in fields(cls)}
    )


def left_out(field: inspect.Field) -> bool:
    """May it be absent from the meta, as in messages of before there was such a field?"""
    return not field.required and field.default is field.default_factory is msgspec.NODEFAULT


def fields(cls: Any) -> tuple[inspect.Field, ...]:
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    return info.fields


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    sizes = {name: draw(st.integers(1, 4096)) for name in ("dp", "cp", "tp", "pp")}
    ranks = {f"{name}_rank": draw(st.integers(0, size - 1)) for name, size in sizes.items()}
    return Mesh(**sizes, **ranks)


@st.composite
def rules(draw: st.DrawFn) -> Rules:
    sample, factor = draw(st.integers(1, 64)), draw(st.integers(1, 8))
    streams = st.builds(StreamRules, st.text(max_size=9), st.floats(0.1, 9), st.integers(1, 9))
    return Rules(
        budget=sample * factor * draw(st.integers(1, 10**6)), align=Align(sample=sample, pack=sample * factor),
        packer=draw(st.sampled_from(get_args(PackerName))), seed=draw(st.integers(0, 2**62 - 1)),
        streams=tuple(draw(st.lists(streams, max_size=3))),
    )  # fmt: skip


FIELDS = st.builds(
    Field, name=st.sampled_from(["a", "b_2"]), dtype=st.sampled_from(get_args(NumberType)),
    shape=st.sampled_from([(), (3,), (2, 4)]), align=st.sampled_from(["token", "target"]), pad=st.sampled_from([0, 1]),
)  # fmt: skip
U64 = st.integers(0, 2**62 - 1)


def envelopes(message: st.SearchStrategy[Any]) -> st.SearchStrategy[Envelope]:
    payload = st.lists(st.binary(max_size=40), max_size=3).map(tuple)
    return st.builds(Envelope, run=U64, epoch=U64, fence=U64, message=message, payload=payload)


def as_bytes(frames: Sequence[Any]) -> list[bytes]:
    return [bytes(frame) for frame in frames]


@pytest.mark.parametrize("kind", ALL_MESSAGES, ids=lambda kind: kind.__name__)
@settings(max_examples=30)
@given(data=st.data())
def test_every_message_survives_the_trip(kind: type[Message], data: st.DataObject) -> None:
    sent = data.draw(envelopes(structs(kind)))
    frames = as_bytes(wire.encode(sent))
    got = wire.decode(frames)
    assert (got.run, got.epoch, got.fence, got.message) == (sent.run, sent.epoch, sent.fence, sent.message)
    assert type(got.message) is kind
    assert as_bytes(got.payload) == as_bytes(sent.payload)
    assert as_bytes(wire.encode(got)) == frames, "one message has one form"


@pytest.mark.parametrize("kind", ALL_MESSAGES, ids=lambda kind: kind.__name__)
@settings(max_examples=15)
@given(data=st.data())
def test_any_msgpack_library_reads_and_writes_the_meta(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(structs(kind))
    meta = bytes(wire.encode(Envelope(run=1, epoch=2, fence=3, message=message))[1])
    plain = msgpack.unpackb(meta)
    assert plain == msgpack.unpackb(msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,))))
    assert list(plain) == [field.encode_name for field in fields(kind) if getattr(message, field.name) is not UNSET]
    assert wire.decode(made(kind.TYPE, msgpack.packb(plain))).message == message


# Bytes held still


def made(
    kind: int, meta: bytes, payload: Sequence[bytes] = (), header: Mapping[str, int] = MappingProxyType({})
) -> list[bytes]:
    """Frames made without the code under test, from the layout that frames.py documents."""
    crc = crc32c(b"".join([meta, *payload]))
    found = {"frames": len(payload), "meta": len(meta), "payload": sum(map(len, payload)), "version": 1, "crc": crc}
    found.update(header)
    head = struct.pack(
        "<4sBBHQQQIIQI", b"SPK1", found["version"], kind, found["frames"], 11, 12, 13,
        found["meta"], found["crc"], found["payload"], 0,
    )  # fmt: skip
    return [head + struct.pack("<I", crc32c(head)), meta, *payload]


SMALL = Envelope(
    run=11, epoch=12, fence=13, payload=(b"\x01\x02\x03", b"\xff"), message=Eos(stream="web", partition=3, total=300)
)
GOLDEN = (
    "53504b31010302000b000000000000000c000000000000000d000000000000002000000096b53f6204000000000000000000000030606fce",
    "83a673747265616da3776562a9706172746974696f6e03a5746f74616ccd012c",
    "010203",
    "ff",
)


def test_golden_bytes_are_held_still() -> None:
    """A broker and a client of two releases must understand each other."""
    assert [bytes(frame).hex() for frame in wire.encode(SMALL)] == list(GOLDEN)
    assert as_bytes(wire.encode(SMALL)) == made(3, bytes.fromhex(GOLDEN[1]), [b"\x01\x02\x03", b"\xff"])
    assert wire.HEADER_BYTES == len(bytes.fromhex(GOLDEN[0])) == 56


ONE = Samples(
    stream="web", partition=3, base_seq=5, lengths_u32=b"\1\0\0\0", crcs_u32=b"\2\0\0\0", loss_tokens_u32=b"\0\0\0\0",
    cursor=(0, 0, 6),
)  # fmt: skip
# A map of 10 keys. Its header has 16 bits since the message has more than 15 attributes; versions before read both.
GOLDEN_OF_ONE = (
    "de000aa673747265616da3776562a9706172746974696f6e03a8626173655f73657105ab6c656e677468735f753332c40401000000a863726373"
    "5f753332c40402000000af6c6f73735f746f6b656e735f753332c40400000000a6637572736f7293000006a872656a656374656480ab6c6f"
    "73745f746f6b656e7300aa706173735f656e646564c2"
)


def test_golden_bytes_of_a_chunk_that_is_no_group_say_nothing_of_groups() -> None:
    plain = bytes(wire.encode(Envelope(run=1, epoch=1, fence=1, message=ONE))[1])
    assert plain.hex() == GOLDEN_OF_ONE
    grouped = bytes(wire.encode(Envelope(run=1, epoch=1, fence=1, message=replace(ONE, keep="pack")))[1])
    assert grouped == plain[:2] + bytes([plain[2] + 1]) + plain[3:] + b"\xa4keep\xa4pack"
    said = wire.decode(made(2, grouped)).message
    assert isinstance(said, Samples)
    assert said.keep == "pack"
    with pytest.raises(WireError, match="Invalid enum value 'batch'"):
        wire.decode(made(2, grouped[:-5] + b"\xa5batch"))


def test_golden_numbers_of_messages_are_held_still() -> None:
    numbers = {kind.__name__: kind.TYPE for kind in ALL_MESSAGES}
    assert len(set(numbers.values())) == len(numbers)
    assert numbers.items() >= {
        "Hello": 1, "Samples": 2, "Eos": 3, "ProducerPing": 4, "Bye": 5,
        "Lease": 10, "Flow": 11, "Revoke": 12, "Who": 13, "Reject": 14, "Done": 15,
        "Attach": 20, "Get": 21, "ReaderPing": 22,
        "Attached": 30, "StepPart": 31, "Wait": 32, "End": 33,
        "Follow": 50, "Lead": 51, "LogRecords": 52, "Replaced": 53, "HandOver": 54,
    }.items()  # fmt: skip


@pytest.mark.parametrize(
    ("data", "crc"),
    [(bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (bytes(range(32)), 0x46DD794E), (b"123456789", 0xE3069283)],
)
def test_the_checksum_is_castagnoli_s(data: bytes, crc: int) -> None:
    """RFC 3720, appendix B.4; and over frames as if they were one."""
    assert wire.checksum([data]) == crc
    assert wire.checksum([data[:5], b"", data[5:]]) == crc


def test_arrays_travel_as_their_bytes() -> None:
    tokens, edges = np.arange(6, dtype="<u2").reshape(2, 3), np.zeros((0, 2), "<i4")
    tokens.flags.writeable = False
    frames = wire.encode(Envelope(run=1, epoch=1, fence=1, message=Who(), payload=(tokens, edges)))
    assert frames[2] is tokens, "not copied"
    for sent in (frames, as_bytes(frames)):
        got = wire.decode(sent)
        assert as_bytes(got.payload) == [tokens.tobytes(), b""]
        assert all(frame.format == "B" and frame.ndim == 1 for frame in got.payload)


def test_more_frames_than_fields_may_be_declared_are_not_sent() -> None:
    most = wire.MAX_PAYLOAD_FRAMES
    wire.decode(wire.encode(Envelope(run=1, epoch=1, fence=1, message=Who(), payload=(b"",) * most)))
    with pytest.raises(WireError, match=f"got {most + 1} payload frames, expected at most {most}"):
        wire.encode(Envelope(run=1, epoch=1, fence=1, message=Who(), payload=(b"",) * (most + 1)))


# Damage


def test_any_bit_flipped_is_noticed() -> None:
    frames = as_bytes(wire.encode(SMALL))
    assert wire.decode(frames).message == SMALL.message
    for number, frame in enumerate(frames):
        for bit in range(8 * len(frame)):
            damaged = bytearray(frame)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(WireError):
                wire.decode([*frames[:number], bytes(damaged), *frames[number + 1 :]])


def test_any_frame_cut_short_or_lengthened_is_noticed() -> None:
    frames = as_bytes(wire.encode(SMALL))
    for number, frame in enumerate(frames):
        for other in [*(frame[:size] for size in range(len(frame))), frame + b"\0", frame + frame]:
            with pytest.raises(WireError):
                wire.decode([*frames[:number], other, *frames[number + 1 :]])


def test_frames_missing_repeated_or_exchanged_are_noticed() -> None:
    frames = as_bytes(wire.encode(SMALL))
    wrong = [frames[:at] + frames[at + 1 :] for at in range(4)] + [[*frames, frames[at]] for at in range(4)]
    wrong += [frames[::-1], [frames[1], frames[0], *frames[2:]], [*frames[:2], frames[3], frames[2]], []]
    wrong += [[*frames, b"", b""], [frames[0]] * 9]
    for sent in wrong:
        with pytest.raises(WireError):
            wire.decode(sent)


@given(st.lists(st.binary(max_size=80), max_size=7))
def test_noise_is_no_message(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        wire.decode(frames)


# Hostile peers: a right checksum proves nothing


@settings(max_examples=100)
@given(st.sampled_from([kind.TYPE for kind in ALL_MESSAGES]), st.binary(max_size=60))
def test_noise_under_a_right_checksum_is_an_error_or_a_message(kind: int, meta: bytes) -> None:
    with suppress(WireError):
        assert isinstance(wire.decode(made(kind, meta)).message, Message)


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=4)
JUNK = st.recursive(
    SCALARS | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(ALL_MESSAGES), JUNK, st.data())
def test_a_field_of_another_type_is_an_error_or_allowed(kind: type[Message], junk: Any, data: st.DataObject) -> None:
    """Whatever decodes holds what its type declares, so that the state machines need not ask."""
    message = data.draw(structs(kind))
    plain = msgspec.to_builtins(message, builtin_types=(bytes,))
    if plain:
        plain[data.draw(st.sampled_from(sorted(plain)))] = junk
    try:
        got = wire.decode(made(kind.TYPE, msgpack.packb(plain))).message
    except WireError:
        return
    msgspec.convert(msgspec.to_builtins(got, builtin_types=(bytes,)), kind, builtin_types=(bytes,))


def test_a_message_may_have_the_header_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Envelope(run=1, epoch=2, fence=3, message=Reject(code="version", detail="because"))
    frames = wire.encode(sent, version=7)
    with pytest.raises(wire.OtherVersion) as error:
        wire.decode(frames)
    assert error.value.version == 7
    flipped = [bytes([*frames[0][:4], 6, *frames[0][5:]]), *frames[1:]]
    with pytest.raises(WireError, match="damaged header"):
        wire.decode(flipped)
    monkeypatch.setattr(wire, "VERSION", 7)
    assert wire.decode(frames).message == sent.message


@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_version_is_named(version: int) -> None:
    with pytest.raises(WireError, match=f"got protocol version {version}, expected 1\\. Install the same version"):
        wire.decode(made(13, b"\x80", header={"version": version}))


@pytest.mark.parametrize("kind", [0, 9, 90, 255])
def test_an_unknown_type_is_named(kind: int) -> None:
    with pytest.raises(WireError, match=f"got message type {kind}, expected one of"):
        wire.decode(made(kind, b"\x80"))


@pytest.mark.parametrize(
    "claim",
    [{"meta": 2**32 - 1}, {"payload": 2**64 - 1}, {"frames": 0}, {"frames": 65535}, {"meta": 0}, {"payload": 0},
     {"crc": 0}],
)  # fmt: skip
def test_a_header_that_claims_other_sizes_is_refused(claim: dict[str, int]) -> None:
    with pytest.raises(WireError):
        wire.decode(made(13, b"\x80", [b"abc"], claim))


def test_messages_over_the_limits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wire.decode(made(13, b"\x80", [bytes(8)]))
    monkeypatch.setattr(wire, "MAX_PAYLOAD_BYTES", 7)
    with pytest.raises(WireError, match="expected at most"):
        wire.decode(made(13, b"\x80", [bytes(8)]))
    monkeypatch.setattr(wire, "MAX_META_BYTES", 0)
    with pytest.raises(WireError, match="expected at most"):
        wire.decode(made(13, b"\x80"))


def pack(*items: Any) -> bytes:
    return b"".join(msgpack.packb(item) for item in items)


BOMBS = {
    "arrays in arrays": (Who.TYPE, b"\x81" + pack("x") + b"\x91" * 1_000_000 + b"\xc0"),
    "maps in maps": (Who.TYPE, b"\x81" + pack("x") + b"\x81\xa1a" * 500_000 + b"\xc0"),
    "arrays in a known field": (Hello.TYPE, b"\x81" + pack("offers") + b"\x91" * 100_000 + b"\xc0"),
    "an array of 4 billion": (Who.TYPE, b"\x81" + pack("x") + b"\xdd\xff\xff\xff\xff"),
    "a map of 4 billion": (Who.TYPE, b"\xdf\xff\xff\xff\xff"),
    "bytes of 4 GiB": (StepPart.TYPE, b"\x81" + pack("chain") + b"\xc6\xff\xff\xff\xff"),
    "text of 4 GiB": (ProducerPing.TYPE, b"\x81" + pack("failure") + b"\xdb\xff\xff\xff\xff"),
    "4 billion offers": (Hello.TYPE, b"\x81" + pack("offers") + b"\xdd\xff\xff\xff\xff"),
    "4 billion figures": (ReaderPing.TYPE, b"\x81" + pack("stats") + b"\xdf\xff\xff\xff\xff"),
    "4 billion streams": (30, b"\x81" + pack("rules") + b"\x81" + pack("streams") + b"\xdd\xff\xff\xff\xff"),
    "something after the end": (Who.TYPE, b"\x80\x80"),
    "a number for a key": (Who.TYPE, b"\x81\x01\xc0"),
    "no map": (Who.TYPE, b"\x93\x01\x02\x03"),
    "nothing": (Who.TYPE, b""),
    "no such opcode": (Who.TYPE, b"\xc1"),
    "text that is no UTF-8": (ProducerPing.TYPE, b"\x81" + pack("producer") + b"\xa2\xff\xfe"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_in_little_memory(bomb: str) -> None:
    kind, meta = BOMBS[bomb]
    frames = made(kind, meta)
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            wire.decode(frames)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def refused(kind: type[Message], **changes: Any) -> None:
    with pytest.raises(WireError, match="cannot be decoded"):
        wire.decode(made(kind.TYPE, msgpack.packb(changes)))


def plain_of(message: Message, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(message, builtin_types=(bytes,))
    return {**found, **changes}


LEASE = Lease(
    stream="s", partition=0, partitions=1, first_seq=0, cursor=(0, 1, 2), seed=1, passes=None, dtype="int32",
    overlong="drop", poison="drop", max_sample_tokens=10, max_chunk_bytes=100,
)  # fmt: skip
FLOW = Flow(stream="s", partition=0, expected_seq=0, grant_seq=1, grant_bytes=2, durable_seq=0)
HELLO = Hello(producer="p", host="h", pid=1, offers=[Offer(stream="s", source_digest="d")])
ATTACH = Attach(feed="f", reader="r", host="h", pid=1, mesh=Mesh(), next_step=0)
CHUNK = Samples(
    stream="s", partition=0, base_seq=0, lengths_u32=b"", crcs_u32=b"", loss_tokens_u32=b"", cursor=(0, 0, 0)
)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (FLOW, {"grant_bytes": -1}),
        (FLOW, {"grant_bytes": 2**62}),
        (FLOW, {"partition": 2**20}),
        (FLOW, {"stream": ""}),
        (FLOW, {"stream": "s" * 201}),
        (FLOW, {"expected_seq": 1.5}),
        (FLOW, {"expected_seq": True}),
        (FLOW, {"ended": 1}),
        (LEASE, {"cursor": [0, 1]}),
        (LEASE, {"cursor": [0, 1, -1]}),
        (LEASE, {"passes": "1"}),
        (HELLO, {"offers": [{"stream": "s", "source_digest": "d"}] * 1025}),
        (HELLO, {"offers": [{"stream": "s"}]}),
        (ATTACH, {"mesh": {"dp": 2, "dp_rank": 2}}),
        (ATTACH, {"mesh": {"dp": 0}}),
        (ATTACH, {"mesh": {"ep": 2}}),
        (CHUNK, {"rejected": {f"r{i}": 1 for i in range(65)}}),
        (CHUNK, {"rejected": {"long": -1}}),
        (CHUNK, {"lengths_u32": "text"}),
        (CHUNK, {"lengths_u32": [1, 2]}),
    ],
    ids=str,
)
def test_a_value_out_of_its_bounds_is_refused(message: Message, changes: dict[str, Any]) -> None:
    kind = type(message)
    assert wire.decode(made(kind.TYPE, msgpack.packb(plain_of(message)))).message == message
    refused(kind, **plain_of(message, **changes))


@pytest.mark.parametrize("message", [FLOW, LEASE, HELLO, ATTACH, CHUNK], ids=lambda message: type(message).__name__)
def test_a_missing_field_is_refused_and_an_unknown_one_passed_over(message: Message) -> None:
    plain = plain_of(message)
    for field in fields(type(message)):
        if field.required:
            refused(type(message), **{name: value for name, value in plain.items() if name != field.name})
    later = {**plain, "of_a_later_version": {"a": [1, {"b": b"c"}]}}
    assert wire.decode(made(message.TYPE, msgpack.packb(later))).message == message


def test_a_rank_outside_its_mesh_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="got cp_rank=2 with cp=2, expected cp_rank < cp"):
        Mesh(cp=2, cp_rank=2)
    assert str(Mesh(dp=4, dp_rank=3, tp=2)) == "dp=3/4 cp=0/1 tp=0/2 pp=0/1"
