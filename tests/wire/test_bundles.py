"""Bundles: what goes in comes out, damage is noticed, and the form is held still."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.protocol.message import Bye, Envelope, Who
from streampack.core.protocol.trainer_messages import AskState, Commit
from streampack.errors import WireError
from streampack.wire import frames as wire
from streampack.wire.bundles import FULL_MESSAGES, decode_bundle, encode_bundle, encode_bundles, is_bundle

NUMBERS = st.integers(0, 2**62 - 1)
MESSAGES = st.one_of(
    st.builds(Who), st.builds(Bye, reason=st.text(max_size=20)),
    st.builds(Commit, feed=st.just("train"), step=st.integers(0, 2**40)),
    st.builds(AskState, feed=st.just("train"), step=st.integers(0, 2**40)),
)  # fmt: skip
ENVELOPES = st.builds(Envelope, run=NUMBERS, epoch=NUMBERS, fence=NUMBERS, message=MESSAGES)
NAMES = st.text("abcdef0123456789 -", min_size=1, max_size=40)
ITEMS = st.lists(st.tuples(NAMES, ENVELOPES), max_size=6)


@given(ITEMS)
def test_a_bundle_holds_the_messages_in_their_order(items: list[tuple[str, Envelope]]) -> None:
    frames = encode_bundle(items)
    assert is_bundle(frames)
    assert decode_bundle(frames) == items


@given(ENVELOPES)
def test_a_message_is_no_bundle(envelope: Envelope) -> None:
    assert not is_bundle(wire.encode(envelope))


@given(ITEMS.filter(bool), st.data())
def test_damage_is_noticed(items: list[tuple[str, Envelope]], data: st.DataObject) -> None:
    head, body = encode_bundle(items)
    at = data.draw(st.integers(0, len(body) - 1))
    for wrong in (body[:at], body + b"\0", body + body):
        with pytest.raises(WireError):
            decode_bundle([head, wrong])
    damaged = bytearray(body)
    damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = decode_bundle([head, bytes(damaged)])
    except WireError:
        return
    assert [envelope for _, envelope in found] == [envelope for _, envelope in items], "a name has no checksum"


@given(st.integers(0, 65535), st.binary(max_size=200))
def test_noise_is_an_error_or_nothing(count: int, body: bytes) -> None:
    if count:
        with pytest.raises(WireError):
            decode_bundle([b"SPB1" + count.to_bytes(2, "little"), body])


def test_golden_bytes_are_held_still() -> None:
    head, body = encode_bundle([("r1", Envelope(run=1, epoch=2, fence=3, message=Who()))])
    assert head.hex() == "535042310100"
    message = b"".join(wire.encode(Envelope(run=1, epoch=2, fence=3, message=Who())))
    assert body == bytes.fromhex("0200") + len(message).to_bytes(4, "little") + b"r1" + message


def test_a_name_that_could_be_taken_for_an_address_is_rejected() -> None:
    who = Envelope(run=1, epoch=2, fence=3, message=Who())
    with pytest.raises(WireError, match="reader's name"):
        decode_bundle(encode_bundle([("a\0relay\0b", who)]))


def test_a_bundle_with_more_messages_than_any_sender_puts_into_one_is_rejected() -> None:
    """A bundle of 4,096 messages counted as one."""
    who = Envelope(run=1, epoch=2, fence=3, message=Who())
    items = [(f"r{number}", who) for number in range(2 * FULL_MESSAGES + 1)]
    bundles = list(encode_bundles(items))
    assert [len(decode_bundle(frames)) for frames in bundles] == [FULL_MESSAGES, FULL_MESSAGES, 1]
    with pytest.raises(WireError, match=f"expected at most {FULL_MESSAGES}"):
        decode_bundle(encode_bundle(items[: FULL_MESSAGES + 1]))
