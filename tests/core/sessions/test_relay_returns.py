"""A relay that was started again: it learns of the broker through the readers that ask whether it works."""

from __future__ import annotations

from streampack.core.protocol.events import Send, Tick
from streampack.core.protocol.message import Envelope, Who
from streampack.core.protocol.relay_messages import NodePing
from streampack.core.protocol.trainer_messages import ReaderPing
from streampack.core.sessions.relaying.relay_events import ForReaders, FromReader, SendReader
from streampack.core.sessions.relaying.relay_session import RelaySession
from streampack.core.sessions.relaying.relay_state import BROKER_SILENT_S

PING = Envelope(
    run=7, epoch=3, fence=1, message=ReaderPing(feed="train", reader="r1", done_upto=4, have_upto=6)
)  # fmt: skip
WHO = Envelope(run=7, epoch=3, fence=0, message=Who())


def test_a_relay_without_readers_asks_the_broker_before_it_says_that_it_works() -> None:
    relay = RelaySession("relay")
    relay.handle(Tick(1.0))
    (asked,) = relay.handle(FromReader(b"1", PING))
    assert isinstance(asked, Send)
    assert isinstance(asked.envelope.message, NodePing)
    assert relay.handle(ForReaders((("r1", WHO),))) == []
    (answer,) = relay.handle(FromReader(b"1", PING))
    assert isinstance(answer, SendReader)
    assert (answer.peer, answer.envelope) == (b"1", WHO)


def test_a_relay_whose_broker_is_silent_does_not_say_that_it_works() -> None:
    relay = RelaySession("relay")
    relay.handle(ForReaders((("r1", WHO),)))
    for second in range(1, int(BROKER_SILENT_S) + 3):
        relay.handle(Tick(float(second)))
    assert not any(isinstance(effect, SendReader) for effect in relay.handle(FromReader(b"1", PING)))
