"""A relay whose key does not allow it to read for a rank sends that rank to the broker."""

from __future__ import annotations

from streampack.core.model.mesh import Mesh
from streampack.core.protocol.events import Report, Tick
from streampack.core.protocol.message import Envelope, Message, Reject
from streampack.core.protocol.relay_messages import Elsewhere
from streampack.core.protocol.trainer_messages import Attach, ReaderPing
from streampack.core.sessions.relaying.relay_events import ForReaders, FromReader, SendReader
from streampack.core.sessions.relaying.relay_session import RelaySession


def said(message: Message) -> Envelope:
    return Envelope(run=7, epoch=1, fence=0, message=message)


def test_a_rank_that_the_key_does_not_cover_goes_to_the_broker_and_stays_there() -> None:
    relay = RelaySession("node0")
    relay.handle(Tick(1.0))
    attach = Attach(feed="train", reader="r", host="gpu0", pid=1, mesh=Mesh(), next_step=0)
    relay.handle(FromReader(b"1", said(attach)))
    report, elsewhere = relay.handle(ForReaders((("r", said(Reject(code="forbidden", detail="not its host"))),)))
    assert isinstance(report, Report)
    assert report.level == "error"
    assert "not its host" in report.text
    assert isinstance(elsewhere, SendReader)
    assert (elsewhere.peer, elsewhere.envelope.message) == (b"1", Elsewhere(detail="not its host"))
    assert relay.relay.is_connected
    ping = ReaderPing(feed="train", reader="r", done_upto=0, have_upto=0)
    assert relay.handle(FromReader(b"1", said(ping))) == [], "it would believe that the relay works for it"
    assert relay.handle(FromReader(b"2", said(ping))), "another rank of this host"


def test_other_rejections_go_to_the_rank() -> None:
    relay = RelaySession("node0")
    attach = Attach(feed="train", reader="r", host="gpu0", pid=1, mesh=Mesh(), next_step=0)
    relay.handle(FromReader(b"1", said(attach)))
    reject = said(Reject(code="diverged", detail="its steps differ"))
    assert relay.handle(ForReaders((("r", reject),))) == [SendReader(b"1", reject)]
