"""Checks that a peer's key allows a message, and the process or the rank in whose name the message comes."""

from __future__ import annotations

from collections.abc import Mapping

from streampack.core.feed.feed import Feed
from streampack.core.intake.producers import Producers
from streampack.core.protocol.effects import FromProducer, FromTrainer
from streampack.core.protocol.handlers import Handlers
from streampack.core.protocol.message import Message, forbidden
from streampack.core.protocol.producer_messages import Hello
from streampack.core.protocol.relay_messages import relay_of
from streampack.core.protocol.result_messages import ReportValues
from streampack.core.protocol.rights import Rights, key_of
from streampack.core.protocol.trainer_messages import Attach
from streampack.core.serve.rank_reader import Ranks


class Claims:
    """Checks the messages to a broker with these ``feeds`` and ``producers``."""

    def __init__(self, feeds: Mapping[str, Feed], producers: Producers) -> None:
        self._feeds, self._producers = feeds, producers

    def refusal(self, event: FromProducer | FromTrainer, rights: Rights) -> str:
        """Return an error text if the key of a message does not allow that message; empty if the key does."""
        message, for_rank = event.envelope.message, relay_of(event.peer) is not None
        why = forbidden(rights, message, "trainer" if isinstance(event, FromTrainer) else "producer", for_rank)
        return why or self._by_message[type(message)](self, message, event.peer, rights)

    _by_message = Handlers[[bytes, Rights], str]()

    @_by_message.of(Attach)
    def _claims_reader(self, message: Attach, peer: bytes, rights: Rights) -> str:
        """Check the name of a reader. A rank and the relay of its host may have different keys."""
        feed = self._feeds.get(message.feed)
        reader = None if feed is None else feed.readers.registry.named(message.reader)
        if reader is None:
            return ""
        by_relay = relay_of(peer) is not None or relay_of(reader.peer) is not None
        moves = by_relay and not rights.refuse_reader(message.feed, reader.mesh, reader.host)
        return "" if moves else _other_key(rights, reader.peer, peer)

    @_by_message.of(Hello)
    def _claims_producer(self, message: Hello, peer: bytes, rights: Rights) -> str:
        """Check the name of a producer."""
        producer = self._producers.named(message.producer)
        return "" if producer is None else _other_key(rights, producer.peer, peer)

    @_by_message.of(ReportValues)
    def _claims_rank(self, message: ReportValues, peer: bytes, rights: Rights) -> str:
        """Check the rank that reports values."""
        ranks = self.rank_of(message)
        return rights.refuse_rank(ranks) if ranks else ""

    @_by_message.of(Message)
    def _claims_nothing(self, message: Message, peer: bytes, rights: Rights) -> str:
        return ""

    def rank_of(self, message: ReportValues) -> Ranks | None:
        """Return the rank that reports values; None if no rank of the present mesh does."""
        feed = self._feeds.get(message.feed)
        return None if feed is None else feed.steps.rank_of(message.part, message.parts)


def _other_key(rights: Rights, key: bytes, peer: bytes) -> str:
    """Return an error text if the peer with this name, ``key``, has another key than ``peer``; empty if not."""
    if key_of(key) == key_of(peer):
        return ""
    return (
        f"key {rights.name!r}: got the name of a process that uses another key, expected a name that no other key uses"
    )
