"""A relay passes on messages of readers that it does not know, and their answers; it keeps all other messages back."""

from __future__ import annotations

from typing import ClassVar

import pytest

from streampack.core.model.mesh import Mesh
from streampack.core.protocol.events import FromBroker
from streampack.core.protocol.message import Envelope, FeedMessage, Message, Reject
from streampack.core.protocol.relay_messages import Elsewhere, NodeGet
from streampack.core.protocol.result_messages import AskResults
from streampack.core.protocol.trainer_messages import Attach, End, Question, ReaderAnswer
from streampack.core.sessions.client_events import Answered, Ask
from streampack.core.sessions.client_session import ClientSession
from streampack.core.sessions.relaying.relay_events import ForReaders, FromReader, SendFor, SendReader
from streampack.core.sessions.relaying.relay_session import RelaySession


class AskColor(Question, frozen=True, kw_only=True):
    """A question that no product file knows."""

    TYPE: ClassVar[int] = 250


class Color(ReaderAnswer, frozen=True, kw_only=True):
    """Its answer."""

    TYPE: ClassVar[int] = 251
    name: str

    def answers(self, question: Question) -> bool:
        """Return whether a color was asked for."""
        return isinstance(question, AskColor)


def said(message: Message) -> Envelope:
    return Envelope(run=7, epoch=1, fence=0, message=message)


def relay_of_one() -> RelaySession:
    relay = RelaySession("node0")
    attach = Attach(feed="train", reader="r", host="gpu0", pid=1, mesh=Mesh(), next_step=0)
    assert relay.handle(FromReader(b"1", said(attach))) == [SendFor("r", said(attach))]
    return relay


def test_a_question_that_the_relay_does_not_know_reaches_the_broker_and_its_answer_the_reader() -> None:
    relay = relay_of_one()
    client = ClientSession(run=7, feed="train", reader="r", host="gpu0", pid=1, mesh=Mesh())
    asked = said(AskColor(feed="train"))
    assert [each.envelope.message for each in client.handle(Ask(AskColor(feed="train")))] == [asked.message]  # type: ignore[attr-defined]
    assert relay.handle(FromReader(b"1", asked)) == [SendFor("r", asked)]
    answer = said(Color(feed="train", name="red"))
    assert relay.handle(ForReaders((("r", answer),))) == [SendReader(b"1", answer)]
    assert client.handle(FromBroker(answer)) == [Answered(answer.message)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "message",
    [
        AskResults(feed="train", number=1),
        End(feed="train", lineage=0, num_steps=1, chain=b""),
        NodeGet(feed="train", lineage=0, start=0, stop=1, request=0),
        FeedMessage(feed="train"),
        Elsewhere(),
        Reject(code="protocol", detail="of a reader"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_that_readers_do_not_send_through_relays_are_dropped(message: Message) -> None:
    assert relay_of_one().handle(FromReader(b"1", said(message))) == []


def test_a_question_of_a_stranger_is_not_passed_on() -> None:
    assert RelaySession("node0").handle(FromReader(b"1", said(AskColor(feed="train")))) == []
