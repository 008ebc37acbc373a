"""A relay keeps and requests steps for the processes that hold ranks now, and for no others."""

from __future__ import annotations

from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Rules
from streampack.core.protocol.events import Send, Tick
from streampack.core.protocol.message import Envelope, Message
from streampack.core.protocol.relay_messages import NodeGet, NodePing
from streampack.core.protocol.trainer_messages import Attach, Attached, Get
from streampack.core.sessions.relaying.relay_events import ForReaders, FromReader, Moved
from streampack.core.sessions.relaying.relay_session import RelaySession


def said(message: Message, fence: int = 1) -> Envelope:
    return Envelope(run=7, epoch=1, fence=fence, message=message)


def attach(relay: RelaySession, reader: str, mesh: Mesh) -> None:
    """A process takes its rank in attempt 1, at step 0."""
    peer = reader.encode()
    relay.handle(
        FromReader(peer, said(Attach(feed="train", reader=reader, host="h", pid=1, mesh=mesh, next_step=0), 0))
    )
    answer = Attached(feed="train", reader=reader, lineage=0, next_step=0, rules=Rules(), layout="zigzag")
    relay.handle(ForReaders(((reader, said(answer)),)))


def get(relay: RelaySession, reader: str, step: int = 0) -> list[tuple[str, int]]:
    """A reader that has returned ``step`` steps wants the next; return what the relay's request says of its readers."""
    request = Get(feed="train", lineage=0, start=step, stop=step + 3, done_upto=step, request=0)
    effects = relay.handle(FromReader(reader.encode(), said(request)))
    messages = [effect.envelope.message for effect in effects if isinstance(effect, Send)]
    return [pair for message in messages if isinstance(message, NodeGet) for pair in message.done]


def test_a_process_that_was_replaced_holds_nobody_back() -> None:
    relay = RelaySession("node0")
    relay.handle(Tick(1.0))
    attach(relay, "old", Mesh(dp=2))
    attach(relay, "other", Mesh(dp=2, dp_rank=1))
    assert get(relay, "old") == [("old", 0), ("other", 0)]
    attach(relay, "new", Mesh(dp=2))
    get(relay, "other", 1)
    assert get(relay, "new", 1) == [("other", 1), ("new", 1)]


def test_a_relay_that_has_another_address_asks_at_once_who_is_there() -> None:
    """With thousands of ranks, its next ping might be 10 seconds away."""
    relay = RelaySession("node0")
    relay.handle(Tick(1.0))
    assert relay.handle(Moved()) == []
    attach(relay, "r0", Mesh(dp=2))
    relay.handle(Tick(2.0))
    (asked,) = relay.handle(Moved())
    assert isinstance(asked, Send)
    assert isinstance(asked.envelope.message, NodePing)
    assert [report.reader for report in asked.envelope.message.ranks] == ["r0"]
