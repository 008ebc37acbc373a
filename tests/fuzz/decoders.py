"""Targets that read bytes of others: frames, records, files, what is shared. Each says no in its own words, or believes
what is sound; nothing else may be raised.
"""

from __future__ import annotations

import functools
import json
import os
import struct
import tempfile
import zlib
from pathlib import Path
from typing import Any

import msgspec
from crc32c import crc32c
from streampack_services.daemons import rendezvous
from streampack_services.ledger.ledger import Ledger
from streampack_services.log import segments
from streampack_services.log.log import LogEntry

from streampack.client import state as checkpoint
from streampack.config.config_files import read_either
from streampack.core.journal.log_records import ChunkCompleted, ChunkStaged, Record, ValuesReported
from streampack.core.model.fields import Field
from streampack.core.model.rules import Rules
from streampack.core.protocol.message import Bye, Envelope, Message, Reject
from streampack.core.protocol.producer_messages import (
    Amend,
    Amended,
    CommitWrite,
    Done,
    LateFields,
    Mark,
    ProducerPing,
    Sent,
    Start,
)
from streampack.core.protocol.relay_messages import Elsewhere, NodeGet, NodePart, NodePing, ReaderReport
from streampack.core.protocol.result_messages import AskResults, Noted, Publish, ReportValues, Results
from streampack.core.protocol.standby_messages import Follow, HandOver, Lead, LogRecords, Replaced
from streampack.core.protocol.step_part import StepPart
from streampack.core.protocol.trainer_messages import (
    AskMixture,
    AskSnapshot,
    AskState,
    Brought,
    Commit,
    Committed,
    EndForMesh,
    Fenced,
    Mixture,
    Probe,
    State,
)
from streampack.errors import LedgerDamaged, LogDamaged, StateError, StreampackError, Unreachable, UserError, WireError
from streampack.transport.rendezvous import read_rendezvous
from streampack.transport.shared_memory import MAGIC, SPEAKS, Known, Link
from streampack.transport.slots import Slots
from streampack.wire import frames as wire
from streampack.wire import record_frames
from streampack.wire.frames import ALL_MESSAGES
from tests.fuzz.engine import Target
from tests.fuzz.forms import JSON, MSGPACK, YAML, packed, unpacked
from tests.fuzz.machines import honest
from tests.fuzz.stage import READ, RUN

MOST_FRAMES = 80
_FOLDER = tempfile.TemporaryDirectory(prefix="streampack-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
_HERE = Path(_FOLDER.name)
"""For files that a target must have."""


def messages() -> list[Envelope]:
    """One of each type."""
    said = [envelope for heard in honest().stage.told.values() for envelope in heard]
    found = {type(envelope.message): envelope for envelope in said}
    for given in honest().said:
        if given[0] == "m":
            kind = next(kind for kind in ALL_MESSAGES if given[3] == kind.TYPE)
            message = msgspec.convert(given[7], type=kind, builtin_types=(bytes,))
            found.setdefault(
                kind, Envelope(run=RUN, epoch=7, fence=1, message=message, payload=tuple(given[8]))
            )  # fmt: skip
    state = honest().stage.core.feeds["train"].state_of(4)
    others: list[Message] = [
        Sent(stream="a", partition=0, next_seq=3), Mark(stream="p", partition=0, number=0, seq=3, batch=7),
        CommitWrite(stream="p", partition=0, write=0), Amended(number=3),
        Amend(stream="p", partition=0, number=3, process=7, seqs_u64=b"\2" + bytes(7), names=("reward",),
              crcs_u32=bytes(4)),
        Start(stream="p", partition=0, asked=4, granted=3, used=1, open=((2, 2),)),
        LateFields(stream="p", partitions=2, fields=(Field(name="reward", dtype="float32", late=True),),
                   max_chunk_bytes=1 << 20),
        Reject(code="mesh", detail="no"), Done(), AskState(feed="train", step=2), Commit(feed="train", step=2),
        Committed(feed="train", step=2), AskMixture(feed="train"),
        Mixture(feed="train", streams=honest().stage.core.feeds["train"].mixture()),
        Fenced(feed="train", detail="over"), Bye(reason="goodbye"),
        NodeGet(feed="train", lineage=0, start=2, stop=5, request=1, done=(("r", 2),)), Elsewhere(detail="it stops"),
        NodePing(feed="train", have_upto=3, ranks=(ReaderReport(reader="r", fence=1, done_upto=2, have_upto=3),)),
        Follow(name="b", process="b-1", log_epoch=7, have_upto=3, safe_upto=2, config_digest=b"d"),
        Lead(process="b-1", entry=2, is_member=True, first_lsn=0), Replaced(name="c"), HandOver(finished=True),
        LogRecords(first=3, kinds=b"\x07\x08", sizes_u32=(2).to_bytes(4, "little") * 2),
        Publish(feed="train", number=1, version=2, step=3, attempt=(7, 1)), Noted(number=1),
        ReportValues(feed="train", number=1, lineage=0, step=0, attempt=(7, 1), part=0, parts=1, names=("reward",),
                     streams_u32=bytes(4), indices_u64=bytes(8), parts_u32=bytes(4)),
        AskResults(feed="train", number=1, cursor=3), Results(feed="train", number=1, cursor=3),
        ProducerPing(producer="x"), Probe(feed="train"),
        EndForMesh(feed="train", lineage=0, num_steps=4, chain=b"c", name="long", detail="dp=3"),
        AskSnapshot(feed="train", digest=b"d"),
        *([state] if isinstance(state, State) else []),
    ]  # fmt: skip
    if isinstance(state, State) and state.snapshot is not None:
        others.append(Brought(feed="train", digest=state.snapshot.digest, snapshot=state.snapshot))
    part = next(envelope for envelope in said if isinstance(envelope.message, StepPart) and envelope.payload)
    whole = NodePart(**msgspec.structs.asdict(part.message), dp_ranks=(0,), cp_ranks=(0,))
    found[NodePart] = msgspec.structs.replace(part, message=whole)
    for message in others:
        found.setdefault(type(message), Envelope(run=RUN, epoch=7, fence=1, message=message))
    return list(found.values())


def _frames(tree: Any) -> list[bytes]:
    return [frame for frame in tree[:MOST_FRAMES] if isinstance(frame, bytes)] if isinstance(tree, list) else []


# Messages


def _frame_seeds() -> list[bytes]:
    return [packed([bytes(memoryview(frame)) for frame in wire.encode(envelope)]) for envelope in messages()]


def _run_frames(data: bytes) -> None:
    """Any frames: a message that was sent, or WireError."""
    tree = unpacked(data)
    frames = _frames(tree) if isinstance(tree, list) else [data]
    try:
        envelope = wire.decode(frames)
    except WireError:
        return
    assert len(frames[0]) == wire.HEADER_BYTES
    assert wire.decode(wire.encode(envelope)).message == envelope.message


def _typed_seeds() -> list[bytes]:
    found = []
    for envelope in messages():
        header, meta, *payload = (bytes(memoryview(frame)) for frame in wire.encode(envelope))
        found.append(packed([envelope.message.TYPE, unpacked(meta), payload, header[8:32]]))
    return found


def _run_typed(data: bytes) -> None:
    """A message under right checksums: a whole one of its type, or WireError."""
    tree = unpacked(data)
    kind, meta, payload, numbers = tree if isinstance(tree, list) and len(tree) == 4 else (2, data, [], b"")
    meta = meta if isinstance(meta, bytes) else packed(meta)
    payload = _frames(payload)
    numbers = (numbers if isinstance(numbers, bytes) else b"").ljust(24, b"\0")[:24]
    kind = kind % 256 if isinstance(kind, int) else 0
    crc, size = crc32c(b"".join([meta, *payload])), sum(map(len, payload))
    head = struct.pack("<4sBBH24sIIQI", b"SPK1", 1, kind, len(payload), numbers, len(meta), crc, size, 0)
    try:
        envelope = wire.decode([head + struct.pack("<I", crc32c(head)), meta, *payload])
    except WireError:
        return
    again = wire.decode(wire.encode(envelope))
    assert wire.encode(again)[:2] == wire.encode(envelope)[:2], "as bytes: a figure that is no number is not itself"


# The log


def _records() -> list[tuple[int, bytes]]:
    """Return records of the honest run, and some of samples that waited for late fields."""
    return [*honest().stage.disk.records, *map(_recorded, late_records())]


def _recorded(record: Record) -> tuple[int, bytes]:
    return record.TYPE, b"".join(bytes(part) for part in record_frames.encode_record(record))


def late_records() -> list[Record]:
    chunk: Any = {
        "stream": "p", "partition": 0, "base_seq": 900, "lengths_u32": b"\3\0\0\0" * 2, "crcs_u32": bytes(8),
        "loss_tokens_u32": bytes(8), "cursor": (0, 0, 0),
    }  # fmt: skip
    reported: Any = {
        "feed": "train", "lineage": 0, "step": 0, "attempt": (1, 1), "part": 0, "parts": 1, "names": ("loss",),
        "streams_u32": bytes(4), "indices_u64": bytes(8), "parts_u32": bytes(4), "values": [bytes(8)],
    }  # fmt: skip
    sent = b"".join(number.to_bytes(8, "little") for number in (3, 5))
    return [ChunkStaged(**chunk), ChunkCompleted(**chunk, sent_u64=sent), ValuesReported(**reported)]


def _record_seeds() -> list[bytes]:
    found = []
    for kind, body in dict(_records()).items():
        record, payload = record_frames.decode_record(kind, body)
        meta = msgspec.msgpack.encode(record)
        found.append(packed([kind, unpacked(meta), [bytes(frame) for frame in payload], b""]))
        found.append(packed([kind, body, [], b""]))
    return found


def _run_record(data: bytes) -> None:
    tree = unpacked(data)
    if not isinstance(tree, list) or len(tree) != 4 or not isinstance(tree[0], int):
        return
    kind, body, payload, more = tree
    if not isinstance(body, bytes):
        frames = _frames(payload)
        meta = packed(body)
        sizes = b"".join(len(frame).to_bytes(8, "little") for frame in frames)
        body = b"".join([struct.pack("<IH", len(meta), len(frames)), sizes, meta, *frames])
    body += more if isinstance(more, bytes) else b""
    try:
        found = record_frames.decode_record(kind, body)
    except WireError:
        return
    assert b"".join(bytes(part) for part in record_frames.encode_record(*found))


def _segment_seeds() -> list[bytes]:
    records = [[kind, body] for kind, body in _records()[:12]]
    return [packed([0, records, 12, []]), packed([5, records[:2], 0, [[20, b"\1"]]]), packed([0, [], 0, []])]


def _run_segments(data: bytes) -> None:
    """A folder with a segment, of records under right checksums, and some bytes of it written over."""
    tree = unpacked(data)
    if not isinstance(tree, list) or len(tree) != 4 or not isinstance(tree[1], list) or not isinstance(tree[3], list):
        return
    first, synced = (abs(number) % 2**40 if isinstance(number, int) else 0 for number in (tree[0], tree[2]))
    found = bytearray()
    at = []
    for lsn, given in enumerate(tree[1][:64], first):
        if not (isinstance(given, list) and len(given) == 2 and isinstance(given[1], bytes)):
            continue
        kind = given[0] % 256 if isinstance(given[0], int) else 0
        head = bytearray(segments.RECORD.pack(len(given[1]), 0, lsn, kind))
        segments.seal_record(head, [memoryview(given[1])])
        at.append(segments.START + len(found))
        found += head + given[1]
    end = at[min(synced, len(at) - 1)] if at else segments.START
    page = segments.encode_head(first, end, False).ljust(segments.PAGE, b"\0")
    whole = bytearray(page * 2 + found + bytes(4096))
    for patch in tree[3][:16]:
        if isinstance(patch, list) and len(patch) == 2 and isinstance(patch[0], int) and isinstance(patch[1], bytes):
            place = abs(patch[0]) % len(whole)
            whole[place : place + len(patch[1])] = patch[1]
    path = segments.segment_path(_HERE, first)
    path.write_bytes(whole)
    try:
        before = segments.recover(_HERE)[0]
        after = segments.recover(_HERE)[0]
        assert (before.next_lsn, before.end) == (after.next_lsn, after.end), "what was left is whole"
    except LogDamaged:
        pass
    finally:
        path.unlink()


@functools.cache
def _ledger() -> bytes:
    """The file of a ledger of that log."""
    path = _HERE / "whole.sqlite"
    with Ledger(path) as ledger:
        ledger.update([LogEntry(lsn, kind, memoryview(body)) for lsn, (kind, body) in enumerate(_records())])
    return path.read_bytes()


def _ledger_seeds() -> list[bytes]:
    return [
        packed([]),
        packed([[100, b"\1"]]),
        packed([[4096, bytes(64)], [20_000, b"\xff" * 8]]),
        packed([[-100, b"x"]]),
    ]


def _run_ledger(data: bytes) -> None:
    """A ledger's file with some bytes of it written over, opened and asked everything."""
    tree, whole = unpacked(data), bytearray(_ledger())
    for patch in tree[:16] if isinstance(tree, list) else []:
        if isinstance(patch, list) and len(patch) == 2 and isinstance(patch[0], int) and isinstance(patch[1], bytes):
            place = patch[0] % len(whole)
            whole[place : place + len(patch[1])] = patch[1]
    path = _HERE / "some.sqlite"
    path.write_bytes(whole)
    try:
        with Ledger(path) as ledger:
            ledger.check()
            for stream in ("a", "b", "p"):
                ledger.find(stream, 3)
                list(ledger.rejections(stream))
                ledger.admitted(stream)
                ledger.staged(stream)
                ledger.completion(stream, 0, 3)
                ledger.completion_of(stream, 0, 3)
                ledger.sent_twice(stream, 0)
            steps = list(ledger.steps("train"))
            assert len(steps) <= 64
            ledger.reported("train", 0, 0)
    except (LedgerDamaged, UserError):
        pass
    finally:
        for left in _HERE.glob("some.sqlite*"):
            left.unlink()


# Checkpoints


def _origin() -> checkpoint.Origin:
    return checkpoint.Origin(RUN, "train", READ)


def _state_seeds() -> list[bytes]:
    found = []
    for step in (0, 4, 8):
        state = honest().stage.core.feeds["train"].state_of(step)
        assert not isinstance(state, list)
        found.append(json.dumps(checkpoint.save(_origin(), 0, state)).encode())
    return found


def _run_state(data: bytes) -> None:
    tree = JSON.read(data)
    try:
        begin = checkpoint.load(tree, _origin())
    except StateError:
        return
    assert begin.next_step >= 0


def _snapshot_seeds() -> list[bytes]:
    state = honest().stage.core.feeds["train"].state_of(8)
    return [packed(msgspec.to_builtins(getattr(state, "snapshot", None), builtin_types=(bytes,)))]


def _run_snapshot(data: bytes) -> None:
    """What a trainer brings: it decodes or not, and a feed says what is wrong with it, or goes on from it."""
    for form in (data, zlib.compress(data, 1)):
        try:
            found = record_frames.decode_snapshot(form)
        except WireError:
            continue
        feed = _fresh_feed()
        wrong = feed.unfit(found.step, found)
        if wrong is None:
            feed.go_to(found.step, found)
            feed.advance()


def _fresh_feed() -> Any:
    from tests.fuzz.stage import Stage

    return Stage().core.feeds["train"]


# Files


def _rendezvous_seeds() -> list[bytes]:
    tree = {
        "run": "x",
        "producers": "tcp://a:1",
        "trainers": "tcp://a:2",
        "http": "http://a:3",
        "epoch": 5,
        "attempt": "",
    }
    return [json.dumps(tree).encode(), b'{"epoch": 5, "failed": "it broke"}', b"[" * 2000, b"{}"]


def _run_rendezvous(data: bytes) -> None:
    path = _HERE / "streampack.json"
    path.write_bytes(data)
    rendezvous.read(path)
    for side in ("producers", "trainers"):
        try:
            assert isinstance(read_rendezvous(path, side, 0.0), str)
        except Unreachable:
            continue


def _config_seeds() -> list[bytes]:
    broker = {
        "run": "x", "seed": 3, "memory": "64MiB", "limits": {"sample_tokens": 4096, "chunk": "16KiB", "peers": 10},
        "rules": {"budget": 256, "window": {"samples": 64}, "step": {"packs": 4}, "align": {"sample": 8, "pack": 8}},
        "streams": {"web": {"weight": 2, "partitions": 2, "passes": 3}, "code": {"pushed": True, "overlong": "drop"}},
        "fields": {"loss_mask": {}, "route": {"dtype": "int8", "shape": [2, 3]}},
        "feeds": {"train": {"streams": ["web"], "rules": {"budget": 512}}, "v": {"streams": ["code"]}},
        "listen": {"producers": "tcp://*:1", "http": "127.0.0.1:0"}, "planned_mesh": {"cp": 2},
    }  # fmt: skip
    batches = broker | {
        "rules": {"budget": 64, "step": {"samples": 8, "min_samples": 2}, "padded": True},
        "feeds": {"t": {}},
    }
    producer = {
        "broker": "tcp://a:1", "processes": 2, "tokenizer": {"name": "bytes"},
        "streams": {"web": {"source": "jsonl", "shards": ["a.jsonl"], "text_key": "text"}},
    }  # fmt: skip
    return [YAML.write(tree) for tree in (broker, batches, producer)] + [b"a: &a [*a]", b"[" * 500, b"a: 1\na: 2"]


def _run_config(data: bytes) -> None:
    path = _HERE / "some.yaml"
    path.write_bytes(data)
    try:
        found = read_either(path)
        for feed in getattr(found, "feeds", ()):
            assert isinstance(found.plan(feed), Rules)  # type: ignore[union-attr]
    except StreampackError as error:
        said = str(error)
    else:
        return
    assert "\n" not in said


# Shared memory

_TOKEN, _FD = b"\1" * 16, 0xFFFFFFF0
"""In an input: that of real memory."""


def _shared_seeds() -> list[bytes]:
    name = struct.pack("<16sIIHI", _TOKEN, 0, _FD, 4, 1 << 16)
    references = struct.pack("<HHHI", 2, 0, 1, 4096) + struct.pack("<HHI", 1, 2, 1 << 16)
    said = [
        SPEAKS, MAGIC + b"H" + name + struct.pack("<Q", 1), MAGIC + b"R" + name + struct.pack("<Q", 2) + references,
        MAGIC + b"A" + struct.pack("<16sQQ", _TOKEN, 9, 5), MAGIC + b"N" + _TOKEN,
    ]  # fmt: skip
    return [packed(said), packed([said[2]]), packed([said[0], said[3], said[1], said[4], said[2]])]


def _run_shared(data: bytes) -> None:
    """What a peer says of its memory and of ours, beside real memory that it may name."""
    tree = unpacked(data)
    slots, link, known = Slots(4, 1 << 16), Link(4, slots=Slots(4, 1 << 16)), Known()
    held = []
    try:
        for said in tree[:64] if isinstance(tree, list) else [data]:
            if not isinstance(said, bytes):
                continue
            mine = said[4:5] in b"AN"
            token = (link.slots or slots).name.token if mine else slots.name.token
            where = struct.pack("<II", os.getpid(), slots.name.fd)
            head = said.replace(_TOKEN, token).replace(struct.pack("<II", 0, _FD), where)
            frames, answer = link.incoming(memoryview(head), [b"head"], known)
            held.append(frames)
            assert answer is None or len(answer) < 64
            assert all(len(memoryview(frame)) <= 1 << 16 for frame in frames or ())
            assert link.slots is None or link.slots.num_free <= 4
    finally:
        slots.close()
        link.close()


TARGETS = (
    Target("frames", MSGPACK, _frame_seeds, _run_frames),
    Target("message", MSGPACK, _typed_seeds, _run_typed),
    Target("record", MSGPACK, _record_seeds, _run_record),
    Target("segment", MSGPACK, _segment_seeds, _run_segments),
    Target("ledger", MSGPACK, _ledger_seeds, _run_ledger),
    Target("state", JSON, _state_seeds, _run_state),
    Target("snapshot", MSGPACK, _snapshot_seeds, _run_snapshot),
    Target("rendezvous", JSON, _rendezvous_seeds, _run_rendezvous),
    Target("config", YAML, _config_seeds, _run_config),
    Target("shared_memory", MSGPACK, _shared_seeds, _run_shared),
)
