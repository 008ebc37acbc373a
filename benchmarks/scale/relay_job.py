"""A broker, all ranks of a mesh and the relays of their hosts in one process, for ``relays.py``.

The broker is the real core. Every rank is a real ``ClientSession`` and every relay a real ``RelaySession``; none of
them is a process. Payload is the right number of zero bytes, all in one buffer, so that 30,000 ranks fit: nothing is
gathered or copied, and no checksum covers payload.

The shell between them does what the broker's shell does: it reads up to ``DRAIN_AT_MOST`` messages in a turn, and sends
the messages for the readers of a relay in one bundle at the end of the turn. Only the broker's work is timed, as CPU
time of this thread: each event in the core, and each message that is encoded or decoded.
"""

from __future__ import annotations

import gc
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import msgspec
from streampack_services.broker.memory_plan import LEAVING
from streampack_services.broker.serving.peer_messages import DRAIN_AT_MOST

from benchmarks.scale.scale_job import STATS, TICK_S, TOKEN_BYTES, C, Job, Shape
from streampack.core.journal.log_effects import Append, Recall, Recalled, Safe
from streampack.core.model.snapshot import Snapshot
from streampack.core.protocol.effects import FromTrainer, SendShard, SendTrainer
from streampack.core.protocol.events import Effect, FromBroker, Send, Tick
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.relay_messages import NodePart, relay_of, relayed
from streampack.core.protocol.trainer_messages import AskState, State
from streampack.core.sessions.client_events import Answered, Ask, Broken, Deliver, Waiting
from streampack.core.sessions.client_session import ClientSession
from streampack.core.sessions.relaying.relay_events import ForReaders, FromReader, SendFor, SendReader
from streampack.core.sessions.relaying.relay_session import RelaySession
from streampack.wire import bundles
from streampack.wire import frames as wire

OTHERS_S = 1.0
"""Virtual seconds between two ticks of ranks and relays; the broker has ``TICK_S``, as it has in a process."""
JOIN_AT_MOST_S = 60.0
"""Virtual seconds in which all ranks must be attached."""


@dataclass(frozen=True)
class Checkpoint:
    """The place from which ranks begin."""

    step: int
    chain: bytes
    snapshot: Snapshot | None


class KnownSnapshot(Snapshot, frozen=True):
    """A snapshot whose digest is computed once, not by each of 30,000 sessions."""

    known: bytes = b""

    @property
    def digest(self) -> bytes:
        return self.known


class RelayJob(Job):
    """A job whose ranks read through relays of ``node_ranks`` ranks each; 0: all ranks read directly."""

    def __init__(self, shape: Shape, node_ranks: int, window: int = 1024) -> None:
        self.node_ranks = node_ranks
        self.relays: dict[bytes, RelaySession] = {}
        self._relay_of: dict[bytes, bytes] = {}
        self._locals: deque[tuple[bytes, bytes, Envelope]] = deque()
        """Messages of ranks to their relays: (relay, rank, message)."""
        self._bundles_in: deque[tuple[bytes, list[tuple[str, Envelope]]]] = deque()
        self._from_relay: dict[bytes, list[tuple[str, Envelope]]] = {}
        self._bundled: dict[bytes, list[tuple[str, Envelope]]] = {}
        self._to_relay: deque[tuple[bytes, Envelope | tuple[tuple[str, Envelope], ...]]] = deque()
        self.events: Counter[str] = Counter()
        """Messages by kind that came in bundles."""
        self.zero_bytes = max(node_ranks, 1) * shape.packs * C * TOKEN_BYTES
        self._others_at = 0.0
        self._zeros = memoryview(bytes(self.zero_bytes))
        self._log: dict[int, tuple[Any, tuple[Any, ...]]] = {}
        self._lsn = 0
        self._state: State | None = None
        memory_bytes = 4 * shape.step_tokens * TOKEN_BYTES
        super().__init__(shape, window, max_readers=2 * shape.ranks, leaving_bytes=memory_bytes // LEAVING)

    # Ranks and relays

    def join(self, life: int = 0, place: Checkpoint | None = None) -> float:
        """Every rank comes in its ``life``-th process and begins at ``place``; returns the virtual seconds it took.

        Processes of earlier lives end without a word. Relays stay.
        """
        place = place or Checkpoint(0, b"", None)
        self.clients.clear()
        self.delivered.clear()
        for n, mesh in enumerate(self.shape.meshes()):
            name, relay = b"%d.%d" % (life, n), b"relay%d" % (n // self.node_ranks) if self.node_ranks else b""
            self.clients[name] = ClientSession(
                run=1, feed="train", reader=name.decode(), host=f"host{n // 8}", pid=n, mesh=mesh,
                next_step=place.step, chain=place.chain, snapshot=place.snapshot, stats=STATS,
            )  # fmt: skip
            self.delivered[name] = place.step
            if relay:
                self._relay_of[name] = relay
                if relay not in self.relays:
                    self.relays[relay] = RelaySession(relay.decode())
        began, self._others_at = self.now, self.now
        while True:
            self.tick()
            if all(client.attached is not None and client.attempt for client in self.clients.values()):
                return self.now - began
            assert self.now - began < JOIN_AT_MOST_S, "a rank has not joined"
            self.now += TICK_S

    def checkpoint(self) -> Checkpoint:
        """The checkpoint before the next step, as the broker tells a rank that asks for it."""
        name, client = next(iter(self.clients.items()))
        client.handle(Waiting(True))
        self._of_client(name, client.handle(Ask(AskState(feed="train", step=self.returned))))
        self.settle()
        client.handle(Waiting(False))
        assert self._state is not None, "the broker told no state"
        found, digest = self._state.snapshot, b""
        if found is not None:
            digest = found.digest
            found = KnownSnapshot(**{name: getattr(found, name) for name in Snapshot.__struct_fields__}, known=digest)
        return Checkpoint(self.returned, self._state.chain, found)

    def clear(self) -> None:
        """Begin to count anew."""
        super().clear()
        self.events.clear()

    def tick(self, seconds: float = 0.0) -> None:
        """Time passes, for all, and what follows from it. Ranks and relays notice it once a second."""
        stop = self.now + seconds
        while True:
            if self.now >= self._others_at:
                self._others_at = self.now + OTHERS_S - TICK_S / 2
                for name, relay in self.relays.items():
                    self._of_relay(name, relay.handle(Tick(self.now)))
                for name, client in self.clients.items():
                    self._of_client(name, client.handle(Tick(self.now)))
            for name, producer in self.producers.items():
                self._of_producer(name, producer.handle(Tick(self.now)))
            self._handle("tick", Tick(self.now))
            self.settle()
            if self.now + TICK_S / 2 > stop:
                return
            self.now += TICK_S

    def settle(self) -> None:
        """Carry messages until there are none; the broker reads ``DRAIN_AT_MOST`` in a turn."""
        journal = self.core.journal
        while (
            self._inbox or self._outbox or self._formed or self._locals or self._bundles_in or self._to_relay
            or self._bundled or journal.safe_upto < journal.next_lsn
        ):  # fmt: skip
            self._carry_local()
            while self._formed:
                self._handle("Formed", self._formed.popleft())
            if journal.safe_upto < journal.next_lsn:
                self._handle("Safe", Safe(journal.next_lsn))
            for _ in range(min(DRAIN_AT_MOST, len(self._inbox))):
                self._receive(*self._inbox.popleft())
            for _ in range(min(DRAIN_AT_MOST, len(self._bundles_in))):
                self._receive_bundle(*self._bundles_in.popleft())
            for relay in list(self._bundled):
                self._send_bundles(relay)
            while self._outbox:
                peer, envelope = self._outbox.popleft()
                if peer in self.clients:
                    self._of_client(peer, self.clients[peer].handle(FromBroker(envelope)))
                elif peer in self.producers:
                    self._of_producer(peer, self.producers[peer].handle(FromBroker(envelope)))

    def _carry_local(self) -> None:
        """Carry the messages between relays and ranks, which cost the broker nothing."""
        while self._to_relay:
            name, received = self._to_relay.popleft()
            event = ForReaders(received) if isinstance(received, tuple) else FromBroker(received)
            self._of_relay(name, self.relays[name].handle(event))
        while self._locals:
            name, rank, envelope = self._locals.popleft()
            self._of_relay(name, self.relays[name].handle(FromReader(rank, envelope)))
        for name in list(self._from_relay):
            self._flush(name)

    def _of_relay(self, name: bytes, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SendReader):
                if effect.peer in self.clients:  # it is not of an earlier life
                    self._of_client(effect.peer, self.clients[effect.peer].handle(FromBroker(effect.envelope)))
            elif isinstance(effect, SendFor):
                self._from_relay.setdefault(name, []).append((effect.reader, effect.envelope))
            elif isinstance(effect, Send):
                self._flush(name)
                self._inbox.append((False, name, effect.envelope))

    def _flush(self, relay: bytes) -> None:
        if found := self._from_relay.pop(relay, None):
            self._bundles_in.append((relay, found))

    def _of_client(self, name: bytes, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                if self.node_ranks:
                    self._locals.append((self._relay_of[name], name, effect.envelope))
                else:
                    self._inbox.append((False, name, effect.envelope))
            elif isinstance(effect, Deliver):
                part: Any = effect.parts[0].message
                assert (part.step, part.micro_batches) == (self.delivered[name], self.shape.packs)
                assert self.chains.setdefault(part.step, part.chain) == part.chain
                self.delivered[name] += 1
            elif isinstance(effect, Answered):
                assert isinstance(effect.message, State)
                self._state = effect.message
            elif isinstance(effect, Broken):
                raise AssertionError(effect)

    # The broker's side

    def _receive_bundle(self, relay: bytes, items: list[tuple[str, Envelope]]) -> None:
        for frames in bundles.encode_bundles(items):
            decoded = self._timed("wire", bundles.decode_bundle, frames)
            self._count("in", "bundle", frames, 0)
            for reader, envelope in decoded:
                self.events[type(envelope.message).__name__] += 1
                self._handle(type(envelope.message).__name__, FromTrainer(relayed(relay, reader), envelope))

    def _send_bundles(self, relay: bytes) -> None:
        items = self._bundled.pop(relay)
        for frames in self._timed("wire", lambda: list(bundles.encode_bundles(items))):
            self._count("out", "bundle", frames, 0)
            self._to_relay.append((relay, tuple(bundles.decode_bundle(frames))))

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SendShard):
                self._send_shard(effect)
            elif isinstance(effect, SendTrainer) and (at := relay_of(effect.peer)) is not None:
                self._bundled.setdefault(at[0], []).append((at[1], effect.envelope))
            elif isinstance(effect, SendTrainer) and effect.peer in self.relays:
                self._to_the_relay(effect.peer, effect.envelope, ())
            elif isinstance(effect, Recall):
                record, payload = self._log[effect.lsn]
                self._handle("recall", Recalled(effect.feed, effect.lsn, record, payload))
            else:
                if isinstance(effect, Append):
                    if type(effect.record).__name__ == "SnapshotTaken":
                        self._log[self._lsn] = effect.record, effect.payload
                    self._lsn += 1
                super()._perform([effect])

    def _send_shard(self, effect: SendShard) -> None:
        """Send a part with as many zero bytes as its packs have."""
        size = int(effect.contents.widths.sum()) // effect.cp * len(effect.cp_ranks) * TOKEN_BYTES
        assert effect.frames == ["input_ids"]
        if isinstance(effect.envelope.message, NodePart):
            self._to_the_relay(effect.peer, effect.envelope, (self._zeros[:size],))
            return
        frames = self._timed("wire", wire.encode, effect.envelope)
        self._count("out", type(effect.envelope.message).__name__, frames, size)
        self._outbox.append((effect.peer, msgspec.structs.replace(effect.envelope, payload=(self._zeros[:size],))))

    def _to_the_relay(self, relay: bytes, envelope: Envelope, payload: tuple[memoryview, ...]) -> None:
        if relay in self._bundled:  # connections keep the order of messages
            self._send_bundles(relay)
        frames = self._timed("wire", wire.encode, envelope)
        self._count("out", type(envelope.message).__name__, frames, sum(map(len, payload)))
        self._to_relay.append((relay, msgspec.structs.replace(envelope, payload=payload)))

    def forget_others(self) -> None:
        """Leave the broker alone."""
        for side in (self.relays, self._relay_of, self._locals, self._bundles_in, self._to_relay, self._log):
            side.clear()
        super().forget_others()
        gc.collect()
