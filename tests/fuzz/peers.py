"""A run with every role, into which valid messages with other values come: the broker goes on, and what it remembers is
bounded.

Producers, pushers, an amender, two ranks (one reads through a relay), a subscriber of results and a standby do their
work. Some of them say something else than they should, and strangers say what anyone may say, in every state: before
they are known and after, with values reported, with fields that are late, with a broker that was killed and reads its
log. An input is a seed, from which everything is drawn (``vary``).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import numpy as np
from crc32c import crc32c
from msgspec.structs import replace

from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Batch, Rules
from streampack.core.protocol.effects import Drain, FromTrainer
from streampack.core.protocol.events import Event, FromBroker, Send, Tick
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.producer_messages import Amend, Offer
from streampack.core.protocol.relay_messages import relayed
from streampack.core.protocol.result_messages import AskResults, Publish, ReportValues
from streampack.core.protocol.standby_messages import STANDBY_MESSAGES, Follow
from streampack.core.protocol.step_part import StepPart
from streampack.core.protocol.trainer_messages import AskState, Commit
from streampack.core.sessions.client_events import Ask, Begin, Broken, Deliver, Ended, Returned
from streampack.core.sessions.client_session import ClientSession
from streampack.core.sessions.producer_base import Chunk, Finish
from streampack.core.sessions.producer_session import ProducerSession, Read
from streampack.core.sessions.pushing.amend_session import AmendSession, GiveValues
from streampack.core.sessions.pushing.push_buffer import PushBuffer, size_of
from streampack.core.sessions.pushing.push_session import BeginSamples, EndBatch, Push, PushSession, WantTickets
from streampack.core.sessions.relaying.relay_events import ForReaders, FromReader, SendFor, SendReader
from streampack.core.sessions.relaying.relay_session import RelaySession
from streampack.core.sessions.telling_session import Tell, TellingSession
from streampack.core.standby.arbiter_entries import CreateEntry, Entry, EntryWritten, Newest, ReadNewest
from streampack.core.standby.log_shipper import LogShipper
from streampack.core.standby.standby_events import FromPeer, LogState, Over, SendPeer, Ship, Shipped
from tests.fuzz.decoders import messages
from tests.fuzz.engine import Target
from tests.fuzz.forms import BYTES
from tests.fuzz.stage import FEEDS, LATE, LENGTHS, PACED, PUSHED, QUOTA, RUN, SIDES, Stage, chunk_event, chunk_of
from tests.fuzz.vary import Vary

SCENES: dict[str, dict[str, Rules]] = {
    "read": FEEDS,
    "late": {"train": LATE},
    "paced": {"train": PACED},
    "marked": {"train": replace(PUSHED, batch=Batch())},
}
TURNS = 60
READER, RELAY = "rank 1", b"relay"
ROLES = {b"a": "producer", b"b": "producer", b"p": "pusher", b"q": "pusher", b"m": "amender", b"0": "trainer",
         RELAY: "relay", b"v": "trainer", b"w": "subscriber", b"f": "standby"}  # fmt: skip
COUNTS: Counter[tuple[str, str, str]] = Counter()
"""Changed messages, by kind, role and state of their sender."""


class World:
    """One run of a scene; what happens is drawn from ``rng``. All peers are honest unless it is ``hostile``."""

    def __init__(self, scene: str, rng: Random, hostile: bool = True) -> None:
        self.rng, self.vary = rng, Vary(rng)
        self.stage = Stage(SCENES[scene])
        self.relay = RelaySession("node")
        self.pool = deque(messages(), maxlen=400)
        for envelope in self.pool:
            self.vary.learn(envelope.message)
        self.evil = {peer: rng.choice((0.0, 0.0, 0.05, 0.3)) if hostile else 0.0 for peer in ROLES}
        self._most_strange = (0, 2, 6) if hostile else (0,)
        self.heard: dict[bytes, int] = {}
        self.asked = 0
        self.cursor: int | None = None
        self.sessions: dict[bytes, Any] = {peer: make() for peer, make in self._makers().items()}
        self.entry = Entry(number=1, epoch=self.stage.epoch, active="x", process="x-1", log_id="l", members=("x",))
        self.shipper = LogShipper(RUN, self.entry, 0, goes_on=True, lost_s=3.0, config_digest=b"d")
        self.shipped = 0

    def _makers(self) -> dict[bytes, Callable[[], Any]]:
        """How the session of each peer begins, and begins again once it is over."""
        offers = [Offer(stream=name, source_digest="data") for name in ("a", "b")]
        push: dict[str, Any] = {"run": 0, "host": "host", "stream": "p", "process": 1}
        rank: dict[str, Any] = {"run": 0, "feed": "train", "host": "host", "pid": 1, "prefetch": 2}

        def pusher(n: int) -> PushSession:
            return PushSession(producer=f"pusher{n}", pid=n, partition=n, buffer=PushBuffer(1 << 12), **push)

        def reader(n: int) -> ProducerSession:
            return ProducerSession(run=0, producer=f"reader{n}", host="host", pid=n, offers=offers)

        found: dict[bytes, Callable[[], Any]] = {b"p": partial(pusher, 0), b"q": partial(pusher, 1)}
        found |= {
            b"0": lambda: ClientSession(reader="rank 0", mesh=Mesh(dp=2), **rank),
            b"1": lambda: ClientSession(reader=READER, mesh=Mesh(dp=2, dp_rank=1), **rank),
            b"v": TellingSession, b"w": TellingSession,
        }  # fmt: skip
        if "a" in self.stage.core.leases.partitions.streams:
            found |= {b"a": partial(reader, 0), b"b": partial(reader, 1)}
        if self.stage.core.feeds["train"].rules.late_fields:
            found[b"m"] = lambda: AmendSession(run=0, producer="amender", host="host", pid=9, stream="p")
        return found

    def play(self) -> None:
        """The run, then its end."""
        for _ in range(TURNS):
            self.turn()
        if self.rng.random() < 0.3:
            self.stage.handle(Drain())
            self.turn()
        self.stage.tick(20.0)
        self.stage.check()

    def turn(self) -> None:
        """Time goes on, everybody says something, and hears what is said."""
        rng = self.rng
        self.stage.tick(rng.choice((0.25, 0.5, 0.5, 1.0, 4.0)) if rng.random() < 0.97 else 17.0)
        if rng.random() < 0.02:
            self.stage.restart()
            self.heard.clear()
        for peer in [*self.sessions]:
            self._act(peer, Tick(self.stage.now))
        self._relay(Tick(self.stage.now))
        self._work()
        self._follow()
        self._listen()
        for _ in range(rng.choice(self._most_strange)):
            self._strange()

    # Actions of honest peers

    def _work(self) -> None:
        """Samples, values and questions of programs."""
        rng, sessions = self.rng, self.sessions
        for peer in (b"p", b"q"):
            self._push(peer, sessions[peer])
        amends = sessions.get(b"m")
        if amends is not None and amends.terms is not None:
            for partition, peer in enumerate((b"p", b"q")):
                upto = sessions[peer].buffer.durable_seq
                seqs = list(range(max(0, upto - rng.randint(1, 8)), upto))
                if seqs:
                    self._act(b"m", _values(partition, seqs, amends.open.take_number()))
        client = sessions[b"0"]
        if client.reached and rng.random() < 0.2:
            message = rng.choice((AskState, Commit))(feed="train", step=rng.randrange(client.arrivals.have_upto + 1))
            self._act(b"0", Ask(message))
        if client.reached and rng.random() < 0.03:
            for peer in (b"0", b"1"):
                self._act(peer, Begin(iteration=sessions[peer].iteration + 1))
        if not sessions[b"w"].open:
            more = {} if self.cursor is None else {"cursor": rng.choice((self.cursor, 0))}
            self._tell(b"w", AskResults(feed="train", number=0, **more))

    def _push(self, peer: bytes, session: PushSession) -> None:
        if session.lease is not None and session.lease.paced is True:
            self._act(peer, WantTickets(session.tickets.asked + self.rng.randint(0, 3)))
            if session.tickets.granted > session.tickets.begun:
                self._act(peer, BeginSamples(session.tickets.granted - session.tickets.begun))
        lengths = [self.rng.choice(LENGTHS[:3]) for _ in range(self.rng.randint(1, 3))]
        chunk = _chunk(session, lengths)
        if session.room(size_of(chunk)) and session.buffer.num_bytes < 4 * QUOTA:
            self._act(peer, Push(chunk))
            if self.stage.core.feeds["train"].rules.batch == Batch():
                self._act(peer, EndBatch(session.buffer.next_mark))

    def _report(self, peer: bytes, delivered: Deliver) -> None:
        """Return the report of a rank for a step that it has."""
        client, parts = self.sessions[peer], [envelope.message for envelope in delivered.parts]
        first = parts[0]
        assert isinstance(first, StepPart)
        ids = {
            name: b"".join(getattr(part, name) for part in parts)
            for name in ("streams_u32", "indices_u64", "parts_u32")
        }
        attempt = client.epoch, client.attempt
        values = np.ones(len(ids["streams_u32"]) // 4, "<f8").tobytes()
        self._tell(b"v", ReportValues(
            feed="train", number=0, lineage=first.lineage, step=first.step, attempt=attempt, part=int(peer), parts=2,
            names=("score",), **ids,
        ), (values,))  # fmt: skip
        if peer == b"0":
            self._tell(b"v", Publish(feed="train", number=0, version=first.step, step=first.step, attempt=attempt))

    def _tell(self, peer: bytes, message: Any, payload: tuple[bytes, ...] = ()) -> None:
        session = self.sessions[peer]
        self._act(peer, Tell(replace(message, number=session.open.take_number()), payload))

    def _follow(self) -> None:
        """The standby copies the log."""
        follow = Follow(
            name="b", process="b-1", log_epoch=self.entry.epoch, have_upto=self.shipped, safe_upto=self.shipped,
            config_digest=b"d",
        )  # fmt: skip
        self._say(0, b"f", Envelope(run=RUN, epoch=self.stage.epoch, fence=0, message=follow))
        count = len(self.stage.disk.records)
        self._ship(LogState(self.stage.disk.first_lsn, count, count))
        self._ship(Tick(self.stage.now))

    def _ship(self, event: Event) -> None:
        waiting = deque([event])
        while waiting:
            for effect in self.shipper.handle(waiting.popleft()):
                if isinstance(effect, Ship):
                    self.shipped = min(effect.first + 3, len(self.stage.disk.records))
                    waiting.append(Shipped(self.shipped))
                elif isinstance(effect, CreateEntry):
                    waiting.append(EntryWritten(effect.entry, effect.entry if self.rng.random() < 0.7 else None))
                elif isinstance(effect, ReadNewest):
                    waiting.append(Newest(self.shipper.entry))
                else:
                    assert not isinstance(effect, Over)
                    if isinstance(effect, SendPeer):
                        self.pool.append(effect.envelope)

    # Sessions

    def _act(self, peer: bytes, event: Event) -> None:
        """An event of a session, and what it does then; one that is over begins again."""
        effects = deque(self.sessions[peer].handle(event))
        while effects:
            effect = effects.popleft()
            if isinstance(effect, Send) and peer == b"1":
                self._relay(FromReader(b"1", effect.envelope))
            elif isinstance(effect, Send):
                self._say(SIDES.index(FromTrainer) if peer in b"0vw" else 0, peer, effect.envelope)
            elif isinstance(effect, Read):
                effects += self.sessions[peer].handle(chunk_of(effect))
            elif isinstance(effect, Deliver):
                step = effect.parts[0].message
                assert isinstance(step, StepPart)
                self._report(peer, effect)
                effects += self.sessions[peer].handle(Returned(step.step + 1))
            elif isinstance(effect, Finish | Broken | Ended):
                self.sessions[peer] = self._makers()[peer]()
                return

    def _relay(self, event: Event) -> None:
        for effect in self.relay.handle(event):
            if isinstance(effect, Send):
                self._say(1, RELAY, effect.envelope)
            elif isinstance(effect, SendFor):
                self._say(1, relayed(RELAY, effect.reader), effect.envelope)
            elif isinstance(effect, SendReader):
                self._act(b"1", FromBroker(effect.envelope))

    def _listen(self) -> None:
        """Everybody hears what the broker has said to them."""
        for peer in [*self.stage.told]:
            news = self.stage.told[peer][self.heard.get(peer, 0) :]
            self.heard[peer] = self.heard.get(peer, 0) + len(news)
            for envelope in news[-20:]:
                self.pool.append(envelope)
                if peer == RELAY:
                    self._relay(FromBroker(envelope))
                elif peer.startswith(RELAY):
                    self._relay(ForReaders(((READER, envelope),)))
                elif peer in self.sessions:
                    self._act(peer, FromBroker(envelope))
        answers = self.sessions[b"w"].answers
        while answers:
            self.cursor = getattr(answers.popitem()[1].message, "cursor", self.cursor)
        self.sessions[b"v"].answers.clear()

    # Hostile messages

    def _say(self, side: int, peer: bytes, envelope: Envelope) -> None:
        """A message on its way to the broker; of some peers it is changed."""
        self.pool.append(envelope)
        self.vary.learn(envelope.message)
        if self.rng.random() < self.evil[peer.partition(b"\0")[0]]:
            changed = self.vary.envelope(envelope)
            if changed is not None:
                self._count(peer, changed)
                self._hear(side, peer, changed)
            if self.rng.random() < 0.5:
                return
        self._hear(side, peer, envelope)

    def _strange(self) -> None:
        """A stranger says something, and is known by what it said before."""
        rng = self.rng
        said = rng.choice(self.pool)
        changed = said if rng.random() < 0.2 else self.vary.envelope(said)
        if changed is None:
            return
        peer, message = b"s%d" % rng.randrange(4), changed.message
        side = rng.choice((0, 1, 1))
        if side and rng.random() < 0.3:
            peer = relayed(rng.choice((peer, RELAY)), rng.choice((READER, "rank 0", "x")))
        if rng.random() < 0.8:
            key = peer, getattr(message, "stream", None), getattr(message, "partition", None)
            fence = self.stage.fences.get(peer, self.stage.fences.get(key, changed.fence))
            changed = replace(changed, run=RUN, epoch=self.stage.epoch, fence=fence)
        self._count(peer, changed)
        self._hear(side, peer, changed)

    def _hear(self, side: int, peer: bytes, envelope: Envelope) -> None:
        if isinstance(envelope.message, STANDBY_MESSAGES) or peer == b"f":
            self._ship(FromPeer(envelope, peer))
        else:
            self.stage.hear(side, peer, envelope)

    def _count(self, peer: bytes, envelope: Envelope) -> None:
        role, core = ROLES.get(peer.partition(b"\0")[0], "stranger"), self.stage.core
        attached = core.leases.producers.at(peer) is not None or any(f.readers.knows(peer) for f in core.feeds.values())
        COUNTS[type(envelope.message).__name__, role, "known" if attached else "unknown"] += 1


def _chunk(session: PushSession, lengths: list[int]) -> Chunk:
    cursor = session.process, 0, session.buffer.next_seq + len(lengths)
    version = session.policy_version or 0
    return chunk_event(("p", session.partition), 0, lengths, cursor=cursor, policy_version=version)


def _values(partition: int, seqs: list[int], number: int) -> GiveValues:
    """Rewards of some samples."""
    column = np.array(seqs, "<f8")
    crcs = np.array([crc32c(value.tobytes()) for value in column], "<u4")
    return GiveValues(Amend(
        stream="p", partition=partition, number=number, process=1, seqs_u64=np.array(seqs, "<u8").tobytes(),
        names=("reward",), crcs_u32=crcs.tobytes(),
    ), (column.tobytes(),))  # fmt: skip


def _run_peers(data: bytes) -> None:
    rng = Random(data)
    World(rng.choice(list(SCENES)), rng).play()


TARGETS = (Target("peers", BYTES, lambda: [bytes([n]) for n in range(4)], _run_peers),)
