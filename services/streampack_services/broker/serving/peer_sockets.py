"""The broker's two sockets, and limits on the bytes that their peers send ahead and leave unread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from streampack.config.daemon_settings import BrokerConfig
from streampack.core.broker import Broker
from streampack.core.model.capacity import needed_tokens
from streampack.core.protocol.effects import FromProducer, FromTrainer, Withdrawn
from streampack.core.protocol.rights import key_of
from streampack.transport.curve import Door
from streampack.transport.sockets import Router
from streampack.transport.unread import STRANGERS_BYTES, Unread
from streampack.wire import frames as wire
from streampack_services.broker.memory_peak import peak
from streampack_services.broker.memory_plan import Plan
from streampack_services.broker.serving.allowed_keys import Allowed
from streampack_services.descriptors import num_free

TELL_REVOKED_S = 0.4
"""Seconds that peers of a revoked key have to read why they are rejected, before their connections are cut."""
ON_THE_WAY_BYTES = 8 << 20
"""Bytes that peers may send beyond their credits, for requests and repeated messages."""
UNREAD_ANSWERS_BYTES = 4 << 20
"""Most bytes of answers that wait for the connections of a key, beside the steps on their way."""


class PeerSide(NamedTuple):
    """Producers or trainers: their socket, the event of their messages, and the bytes that a peer may send ahead."""

    router: Router
    event: type[FromProducer] | type[FromTrainer]
    credit: Callable[[bytes], int]


class PeerSockets:
    """The socket for producers and the one for trainers.

    ``known_bytes`` returns the bytes of the process that limits on unread messages do not count. Raises UserError if an
    address cannot be used.
    """

    def __init__(
        self, config: BrokerConfig, plan: Plan, core: Broker, allowed: Allowed | None, known_bytes: Callable[[], int]
    ) -> None:
        self._core, self._allowed = core, allowed
        self._revoked: deque[tuple[float, bytes]] = deque()
        """Revoked keys whose connections are to be cut, and when."""
        door = Door(allowed.key.secret, allowed.admits) if allowed is not None else None
        expected, strangers = peak(config, plan), max(num_free() // 4, 1)  # of each address, and as many of HTTP

        def bound(
            event: type[FromProducer] | type[FromTrainer], address: str, largest: int, ahead: int, answers: int,
            credit: Callable[[bytes], int],
        ) -> PeerSide:  # fmt: skip
            """Bind a socket: frames of ``largest`` bytes, ``ahead`` bytes unread, ``answers`` bytes unsent."""
            unread = Unread(
                ahead + ON_THE_WAY_BYTES, STRANGERS_BYTES, known_bytes, expected.leaving + expected.tables, strangers,
                answers + UNREAD_ANSWERS_BYTES, credit,
            )  # fmt: skip
            return PeerSide(Router(address, largest, door, unread), event, credit)

        partitions = sum(stream.partitions for feed in plan.feeds for stream in feed.rules.streams)
        self._sent_bytes = plan.capacity.quota_tokens * plan.token_bytes * partitions
        self._snapshot_bytes = snapshot = (1 << 20) + _largest_snapshot(plan)
        chunk = max(plan.capacity.max_chunk_bytes, 2 << 20)
        self.producers = bound(
            FromProducer, config.listen.producers, chunk, 2 * self._sent_bytes, 0, self._credit_of_producer
        )
        try:
            self.trainers = bound(
                FromTrainer, config.listen.trainers, snapshot, 4 * snapshot, plan.leaving_bytes, self._credit_of_trainer
            )
        except Exception:
            self.producers.router.close()
            raise
        self.routers = [self.producers.router, self.trainers.router]
        """The sockets on which connections of revoked keys are cut."""

    @property
    def endpoints(self) -> dict[str, str]:
        """Addresses of the sockets, with ports, by ``producers`` and ``trainers``."""
        return {"producers": self.producers.router.endpoint, "trainers": self.trainers.router.endpoint}

    def _credit_of_producer(self, peer: bytes) -> int:
        """Return the bytes of samples that a producer, or the producers of a key, may send ahead: 0 without a lease."""
        key = self._key_of(peer)
        has_lease = any(producer.peer.startswith(key) for producer in self._core.leases.producers)
        return self._sent_bytes if has_lease else 0

    def _credit_of_trainer(self, peer: bytes) -> int:
        """Return the bytes of a snapshot if a trainer, or one with its key, was asked for one; else 0."""
        return self._snapshot_bytes if self._core.expects_snapshot_from(self._key_of(peer)) else 0

    def _key_of(self, peer: bytes) -> bytes:
        """Return the key of a peer; without keys the peer itself."""
        return key_of(peer) if self._allowed is not None else peer

    def withdrawals(self, now: float) -> Iterator[Withdrawn]:
        """Yield the keys whose rights have changed; cut connections of revoked keys once they were told."""
        if (allowed := self._allowed) is None:
            return
        for key in allowed.take_changed_keys():
            revoked = allowed.rights(key).role == "none"
            yield Withdrawn(key, revoked)
            if revoked:
                self._revoked.append((now + TELL_REVOKED_S, key))
        while self._revoked and self._revoked[0][0] <= now:
            _, key = self._revoked.popleft()
            if allowed.rights(key).role == "none":
                for router in self.routers:
                    router.cut_key(key)

    def close(self) -> None:
        """Close both sockets; idempotent."""
        self.producers.router.close()
        self.trainers.router.close()


def _largest_snapshot(plan: Plan) -> int:
    """Return the most bytes of a snapshot in a checkpoint: about 48 for each sample that a feed may hold."""
    sample = plan.capacity.max_sample_tokens
    samples = max(
        needed_tokens(feed.rules, sample) if feed.rules.batch is None else feed.merged_tokens for feed in plan.feeds
    )
    return min(48 * samples, wire.MAX_META_BYTES)
