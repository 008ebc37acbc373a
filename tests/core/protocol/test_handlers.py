"""Handlers by kind: the nearest base class handles a kind, and a kind that nothing handles is an error."""

from __future__ import annotations

import pytest

from streampack.core.broker import Broker
from streampack.core.model.capacity import Capacity
from streampack.core.protocol.events import Event
from streampack.core.protocol.handlers import Handlers
from streampack.core.protocol.message import FeedMessage, Message
from streampack.core.protocol.trainer_messages import Commit, Question, ReaderMessage
from streampack.errors import InternalError


class Named:
    """Names the kind of class that handles a message."""

    handlers = Handlers[[], str]()

    @handlers.of(Message)
    def _of_any(self, message: Message) -> str:
        return "Message"

    @handlers.of(ReaderMessage)
    def _of_reader(self, message: ReaderMessage) -> str:
        return "ReaderMessage"


class Unknown(Event, frozen=True):
    """An event that no state machine knows."""


def test_the_nearest_base_class_handles_a_kind() -> None:
    commit = Commit(feed="train", step=1)
    assert Named.handlers[Commit](Named(), commit) == "ReaderMessage"
    assert Named.handlers[FeedMessage](Named(), commit) == "Message"
    inherited = Handlers(Named.handlers)
    inherited.of(Commit)(lambda self, message: "Commit")
    assert inherited[Commit](Named(), commit) == "Commit"
    assert Named.handlers[Commit](Named(), commit) == "ReaderMessage"


def test_a_kind_that_only_the_fallback_handles_is_named() -> None:
    Named.handlers.require([Commit, Question], unless=Message)
    with pytest.raises(InternalError, match="no method handles FeedMessage"):
        Named.handlers.require([Commit, FeedMessage], unless=Message)


def test_an_event_of_ours_that_nothing_handles_is_an_error() -> None:
    broker = Broker(run=1, epoch=1, feeds=[], capacity=Capacity(64, 16, 1 << 20))
    with pytest.raises(InternalError, match="got Unknown, expected one of: Change, Drain"):
        broker.handle(Unknown())
