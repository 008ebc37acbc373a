"""The test of the simulation with relays: take a rule of relays away, and some seed must fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from streampack.core.protocol.events import Tick
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.relay_messages import NodePart, relay_of
from streampack.core.protocol.trainer_messages import Attach
from streampack.core.serve.attaching import Attaching
from streampack.core.serve.rank_reader import Reader
from streampack.core.serve.rank_registry import RankRegistry
from streampack.core.serve.readers import Readers
from streampack.core.serve.receivers import Receivers
from streampack.core.sessions.relaying import relay_deliveries
from streampack.core.sessions.relaying.node_feed import NodeFeed
from streampack.core.sessions.relaying.relay_requests import RelayRequests
from streampack.core.sessions.relaying.relay_session import RelaySession
from streampack.core.sessions.route import Route
from tests.simulation.mutating import Patch, expect_failure, registry, wrap
from tests.simulation.relay import Relays
from tests.simulation.world import World, run

MUTANTS: list[Any] = []
mutant = registry(MUTANTS)


@pytest.mark.parametrize(("patch", "first"), MUTANTS)
def test_a_rule_of_relays_that_is_taken_out_is_missed(
    patch: Callable[[Patch], None], first: int, monkeypatch: Patch
) -> None:
    patch(monkeypatch)
    expect_failure(patch.__name__, first, lambda seed: run(seed, relays=True))


@mutant()
def a_relay_reports_the_steps_that_it_has_as_returned(patch: Patch) -> None:
    def report(original: Any, self: RelayRequests, feed: NodeFeed, *more: Any) -> Any:
        for reader in self._relay.readers.values():
            reader.done_upto = max(reader.done_upto, reader.have_upto)
        return original(self, feed, *more)

    wrap(patch, RelayRequests, "send_get", report)
    wrap(patch, RelayRequests, "ping", report)


@mutant()
def a_relay_says_that_it_returned_what_it_holds(patch: Patch) -> None:
    def report(original: Any, self: RelayRequests, feed: NodeFeed, *more: Any) -> Any:
        for reader in self._relay.readers.values():
            reader.done_upto = feed.first_missing(reader.done_upto, reader.share)
        return original(self, feed, *more)

    wrap(patch, RelayRequests, "send_get", report)


@mutant()
def an_attach_by_an_old_way_is_taken(patch: Patch) -> None:
    def again(original: Any, self: Attaching, reader: Reader, peer: bytes, message: Attach) -> Any:
        return original(
            self,
            reader,
            peer,
            msgspec.structs.replace(message, route_changes=max(reader.route_changes, message.route_changes)),
        )

    wrap(patch, Attaching, "_attach_again", again)


@mutant()
def a_relay_speaks_for_readers_that_have_left_it(patch: Patch) -> None:
    def at(original: Any, self: RankRegistry, peer: bytes) -> Any:
        by = relay_of(peer)
        return original(self, peer) or (None if by is None else self.named(by[1]))

    wrap(patch, RankRegistry, "at", at)


@mutant(7)
def a_relay_serves_the_steps_of_an_earlier_attempt(patch: Patch) -> None:
    def leave(self: NodeFeed) -> None:
        self.fence = 0

    patch.setattr(NodeFeed, "leave", leave)


@mutant()
def a_relay_does_not_ask_again_when_a_reader_joins(patch: Patch) -> None:
    patch.setattr(NodeFeed, "covers", lambda self, share: True)


@mutant(101)
def a_relay_hides_that_the_broker_is_silent(patch: Patch) -> None:
    def heard(original: Any, self: Route, broker_silent_s: float = 0.0) -> Any:
        return original(self)

    wrap(patch, Route, "heard", heard)


@mutant(10)
def a_client_waits_for_a_relay_that_is_silent(patch: Patch) -> None:
    wrap(patch, Route, "tick", lambda original, self, now, may: [] if self.by_relay else original(self, now, may))
    patch.setattr(Route, "lost", lambda self: [])


@mutant(39)
def a_relay_takes_parts_with_others_missing_before(patch: Patch) -> None:
    def take(original: Any, self: NodeFeed, envelope: Envelope, part: NodePart) -> bool:
        original(self, envelope, part)
        return True

    wrap(patch, NodeFeed, "take", take)


@mutant(7)
def every_rank_gets_the_frames_of_all(patch: Patch) -> None:
    patch.setattr(relay_deliveries, "for_frames", lambda part, payload, frames: (part, payload))


@mutant()
def a_reader_that_moves_keeps_its_old_connection(patch: Patch) -> None:
    patch.setattr(Receivers, "move", lambda self, reader, step, host: None)


@mutant()
def a_relay_is_believed_whatever_attempt_it_names(patch: Patch) -> None:
    def receive(original: Any, self: Readers, peer: bytes, envelope: Envelope, now: float) -> Any:
        relay = self.receivers.relays.get(peer)
        fence = envelope.fence if relay is None else relay.fence
        return original(self, peer, msgspec.structs.replace(envelope, epoch=self._identity.epoch, fence=fence), now)

    wrap(patch, Readers, "receive_node", receive)


@mutant(386)
def a_relay_requests_more_than_its_memory_holds(patch: Patch) -> None:
    def with_little_memory(original: Any, self: Relays, world: World, wide: bool) -> None:
        original(self, world, wide)
        self.memory_bytes = 300

    wrap(patch, Relays, "__init__", with_little_memory)

    def stop(self: RelayRequests, feed: NodeFeed) -> int:
        return max([feed.stop, *(reader.flow.want_stop for reader in self._relay.readers.taking_part(feed.name))])

    patch.setattr(RelayRequests, "_stop", stop)


@mutant(5)
def a_relay_does_not_ask_twice(patch: Patch) -> None:
    def tick(original: Any, self: RelaySession, event: Tick) -> Any:
        for feed in self.feeds.values():
            feed.again.answered(event.now)
        return original(self, event)

    wrap(patch, RelaySession, "_tick", tick)
