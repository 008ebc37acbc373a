"""Records of the log, to bytes and back."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.journal.log_records import ALL_RECORDS, Base, ChunkAdmitted, FeedFacts, StreamFacts
from streampack.core.model.rules import Rules, RulesChange, StreamRules
from streampack.errors import WireError
from streampack.wire.record_frames import decode_record, encode_record

BASE = Base(
    run=7, run_name="sft", epoch=3,
    feeds={
        "train": FeedFacts(
            rules=Rules(streams=(StreamRules("web"),)), lineage=1, lineage_step=4,
            changes=[RulesChange(step=4, position=90, rules=Rules(budget=64))], skips=[(5, 6)], commits=[2],
        )
    },
    streams={"web": StreamFacts(source_digest="d", totals=[None, 7])}, released={"train": 3},
)  # fmt: skip
CHUNK = ChunkAdmitted(
    stream="web", partition=1, base_seq=2, lengths_u32=b"\x01\0\0\0", crcs_u32=b"\x02\0\0\0",
    loss_tokens_u32=b"\0\0\0\0", cursor=(0, 1, 2),
)  # fmt: skip


GOLDEN_CHUNK = (
    "8aa673747265616da3776562a9706172746974696f6e01a8626173655f73657102ab6c656e677468735f753332c40401000000a863726373"
    "5f753332c40402000000af6c6f73735f746f6b656e735f753332c40400000000a6637572736f7293000102a872656a656374656480ab6c6f"
    "73745f746f6b656e7300aa706173735f656e646564c2"
)
GROUP = msgspec.structs.replace(CHUNK, keep="step")


def body(record: msgspec.Struct, payload: tuple[bytes, ...] = ()) -> bytes:
    return b"".join(encode_record(record, payload))  # type: ignore[arg-type]


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_a_record_comes_back_with_its_payload(payload: list[bytes]) -> None:
    for record in (BASE, CHUNK, GROUP):
        found, frames = decode_record(record.TYPE, body(record, tuple(payload)))
        assert found == record
        assert [bytes(frame) for frame in frames] == payload


def test_golden_bytes_of_a_chunk_that_is_no_group_are_held_still() -> None:
    """Logs of before there were groups are read as they are, and are written so where there are none."""
    plain, grouped = msgspec.msgpack.encode(CHUNK), msgspec.msgpack.encode(GROUP)
    assert plain.hex() == GOLDEN_CHUNK
    assert grouped == bytes([plain[0] + 1]) + plain[1:] + b"\xa4keep\xa4step"


@given(st.integers(0, 200), st.binary(max_size=3))
def test_a_record_that_is_cut_or_longer_is_refused(keep: int, more: bytes) -> None:
    whole = body(CHUNK, (b"abc", b"de"))
    wrong = whole[: min(keep, len(whole) - 1)] if not more else whole + more
    with pytest.raises(WireError, match="record"):
        decode_record(CHUNK.TYPE, wrong)


def test_every_kind_of_record_has_a_number_of_its_own() -> None:
    assert sorted(kind.TYPE for kind in ALL_RECORDS) == list(range(1, len(ALL_RECORDS) + 1))
    with pytest.raises(WireError, match="got a record of type 99"):
        decode_record(99, b"")
