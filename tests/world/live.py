"""A feed that runs: the real broker with a log, producers that read, and one rank, in one thread and without a clock.

Messages keep their order on each link and nothing else: which link moves next is drawn. What its steps must be is
``planned``'s to say.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from streampack.core.broker import Broker
from streampack.core.journal.journal import Journal
from streampack.core.journal.log_effects import Cut, Safe
from streampack.core.journal.log_records import Record, RulesChanged
from streampack.core.model.capacity import Capacity, FeedPlan
from streampack.core.model.mesh import Mesh
from streampack.core.model.rule_changes import Ask
from streampack.core.model.rules import Rules, RulesChange
from streampack.core.model.snapshot import Snapshot
from streampack.core.protocol.effects import Answer, Change, Form, FromProducer, FromTrainer, SendProducer
from streampack.core.protocol.events import Event, FromBroker, Send, Tick
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.producer_messages import Offer
from streampack.core.protocol.step_part import StepPart
from streampack.core.protocol.trainer_messages import State
from streampack.core.sessions.client_events import Broken, Deliver, Detach, Ended, Returned
from streampack.core.sessions.client_session import ClientSession
from streampack.core.sessions.producer_base import Finish
from streampack.core.sessions.producer_session import EndOfPartition, ProducerSession, Read
from streampack.core.sessions.pushing.push_session import PushSession
from tests.world.chunks import chunk_of
from tests.world.disk import Disk
from tests.world.planned import Data, tokens_of
from tests.world.shell import RestoredHandles, Sending, Shell, chosen

RUN = 9
FORM = b"form"
"""The link from the packer."""


class Live(Shell):
    """One run over ``data``; ``seed`` draws what happens next. ``chains`` are of the steps that the rank has had, by
    lineage and step: had twice, a step must be the same.
    """

    def __init__(
        self, rules: Rules, data: Data, seed: int = 0, *, discards: bool = False, quota: int = 64,
        memory: int | None = None, slow_packer: bool = False, pass_samples: int | None = None,
        longest: int | None = None,
    ) -> None:  # fmt: skip
        self.longest = longest or rules.budget
        """The most tokens of a sample."""
        self.pass_samples = pass_samples
        """Samples of each partition's pass; None: all of them."""
        self.slow_packer = slow_packer
        """What is chosen comes when nothing else is on its way: by then as much is merged as may be."""
        self.rules, self.data, self.discards, self.quota = rules, data, discards, quota
        partitions = sum(stream.partitions for stream in rules.streams)
        self.memory = 40 * rules.budget * rules.packs + partitions if memory is None else memory
        self.rng = random.Random(seed)
        super().__init__(Disk())
        self._decoded: list[tuple[object, Record]] = []
        """The bytes of each record of the log when it was last read, and the record."""
        self.chains: dict[tuple[int, int], bytes] = {}
        self.skipped: set[int] = set()
        self._again: list[list[str]] = []
        self.refused: list[str] = []
        """What producers were told that offered a stream which is not known."""
        self.producers: dict[bytes, ProducerSession | PushSession] = {}
        self.ended: int | None = None
        self.begins, self.has_moved = 0, False
        """Where the log begins; whether the one before was lost."""
        self.now, self.epoch, self._names = 0.0, 1, 0
        self._at: dict[Any, int] = {}
        self._links: dict[bytes, deque[tuple[Callable[[Any], None], Any]]] = {}
        self.client: ClientSession | None = None
        self._peer = b""
        self.start_broker()
        self.start_producer([stream.name for stream in rules.streams])
        self.start_trainer()

    # Processes

    def start_broker(self, lost: bool = False) -> None:
        """Another broker in the place of the last, if there is one: killed, with all that was on its way."""
        self._links = {name: link for name, link in self._links.items() if name[:1] in b"r"}
        if lost:
            self.disk = Disk()
        self.epoch += 1
        plan = FeedPlan("train", self.rules, self.memory, discards=self.discards)
        core = Broker(
            run=RUN, epoch=self.epoch, feeds=[plan], capacity=Capacity(self.quota, self.longest, 1 << 20),
            steps_ahead=3, journal=Journal(keeps=True), run_name="live",
        )  # fmt: skip
        self.start(core, RestoredHandles())

    def start_producer(self, streams: list[str]) -> bytes:
        """A producer that reads some streams."""
        self._names += 1
        name, peer = f"producer{self._names}", b"p%d" % self._names
        offers = [Offer(stream=stream, source_digest="data") for stream in streams]
        self.producers[peer] = ProducerSession(run=0, producer=name, host="host", pid=self._names, offers=offers)
        self._to_producer(peer, Tick(self.now))
        return peer

    def start_trainer(self, step: int = 0, chain: bytes = b"", snapshot: Snapshot | None = None) -> None:
        """The rank begins at ``step``; the one before has said goodbye."""
        if self.client is not None:
            self._to_client(Detach())
        self._names += 1
        self.ended, self._peer = None, b"t%d" % self._names
        self.client = ClientSession(
            run=0, feed="train", reader=f"reader{self._names}", host="host", pid=1, mesh=Mesh(), prefetch=2,
            next_step=step, chain=chain, snapshot=snapshot,
        )  # fmt: skip
        self._to_client(Tick(self.now))

    # What a person and a trainer do

    def ask(self, ask: Ask, at_step: int | None = None) -> Answer:
        """A change, and what is said to it."""
        self.handle(Change(1, "train", ask, at_step))
        return self.answers.pop()

    def read(self, upto: int) -> None:
        """Have the rank return the steps before ``upto``, if there are so many."""
        self.until(lambda: self.had >= upto or self.ended is not None)

    def finish(self) -> list[bytes]:
        """To the end: the chain of every step, as the lineages have it."""
        self.until(lambda: self.ended is not None)
        assert self.ended is not None
        newest = {step: chain for (_, step), chain in sorted(self.chains.items())}
        return [newest[step] for step in range(self.ended)]

    def stop_trainer(self) -> None:
        """It says goodbye."""
        self._to_client(Detach())

    def go_back(self, step: int, state: State | None = None, chain: list[bytes] | None = None) -> None:
        """The trainer is started again at ``step``, of a checkpoint's ``state``, or after these steps."""
        if chain is not None:
            self.start_trainer(step, chain[step - 1] if step else b"")
            return
        lineage = self.feed.history.lineage
        if state is not None:
            self.start_trainer(state.step, state.chain, state.snapshot)
        else:
            before = next(
                (self.chains[n, step - 1] for n in range(lineage, -1, -1) if (n, step - 1) in self.chains), b""
            )
            self.start_trainer(step, before)

    def state(self, step: int) -> State:
        """What a checkpoint that begins at ``step`` holds, there and back."""
        states: list[State] = []

        def known() -> bool:
            state = self.feed.state_of(step)
            if isinstance(state, State):
                states.append(state)
            else:
                self.perform_all(state)
            return bool(states)

        self.until(known)
        return states[0]

    @property
    def feed(self) -> Any:
        return self.core.feeds["train"]

    @property
    def is_attached(self) -> bool:
        """The rank has its place with this broker."""
        return bool(self.feed.readers.steps.joined)

    @property
    def had(self) -> int:
        """Steps before are the rank's."""
        assert self.client is not None
        return self.client.arrivals.have_upto

    def recorded(self) -> Iterable[tuple[int, Record]]:
        return enumerate(self.records())

    def records(self) -> list[Record]:
        """The log; records that are there still are decoded once."""
        decoded, stored = self._decoded, self.disk.records
        same = itertools.takewhile(lambda pair: pair[0][0] is pair[1], zip(decoded, stored, strict=False))
        del decoded[sum(1 for _ in same) :]
        decoded += [(stored[lsn], self.disk.decode(lsn)[0]) for lsn in range(len(decoded), len(stored))]
        return [record for _, record in decoded]

    def changes(self) -> list[RulesChange]:
        """Those that hold, as the log has them."""
        return [r.change for r in self.records() if isinstance(r, RulesChanged) and r.change.position >= 0]

    # The world

    def until(self, done: Callable[[], bool], turns: int = 20_000) -> None:
        """Let things happen until ``done``."""
        for _ in range(turns):
            if done():
                return
            self.turn()
        raise AssertionError(f"nothing moves: {self.feed.waiting_for()}; {self.errors}")

    def turn(self) -> None:
        """Something that is on its way arrives, or time goes on."""
        ready = [link for name, link in self._links.items() if link and not (self.slow_packer and name == FORM)]
        if ready or (ready := [link for link in self._links.values() if link]):
            deliver, what = self.rng.choice(ready).popleft()
            deliver(what)
            return
        self.now += 0.25
        while self._again:
            self.start_producer(self._again.pop())
        self.handle(Tick(self.now))
        for peer in list(self.producers):
            self._to_producer(peer, Tick(self.now))
        self._to_client(Tick(self.now))

    def _post(self, name: bytes, deliver: Callable[[Any], None], what: Any) -> None:
        self._links.setdefault(name, deque()).append((deliver, what))

    def carry(self, effect: Sending, envelope: Envelope) -> bool:
        hear = self._hear if isinstance(effect, SendProducer) else self._said
        self._post(b"s" + effect.peer, partial(hear, effect.peer), envelope)
        return True

    def cut(self, cut: Cut) -> None:
        """Keep all records, so that trainers may go back to any step."""

    def form(self, form: Form) -> None:
        self._post(FORM, self.handle, chosen(form))

    def _from_producer(self, peer: bytes, envelope: Envelope) -> None:
        self.handle(FromProducer(peer, envelope))

    def _from_trainer(self, peer: bytes, envelope: Envelope) -> None:
        self.handle(FromTrainer(peer, envelope))

    # Producers

    def _hear(self, peer: bytes, envelope: Envelope) -> None:
        self._to_producer(peer, FromBroker(envelope))

    def _to_producer(self, peer: bytes, event: Event) -> None:
        producer = self.producers.get(peer)
        if producer is None:
            return
        for effect in producer.handle(event):
            if isinstance(effect, Send):
                self._post(b">" + peer, partial(self._from_producer, peer), effect.envelope)
            elif isinstance(effect, Read):
                self._post(b"r" + peer, partial(self._read, peer), effect)
            elif isinstance(effect, Finish):
                del self.producers[peer]
                if effect.code in ("unknown_stream", "done") and isinstance(
                    producer, ProducerSession
                ):  # what launched it does so again
                    self.refused += [effect.error] if effect.error else []
                    self._again.append([offer.stream for offer in producer.offers])
                    continue
                self.errors += [effect.error] if effect.error else []

    def _read(self, peer: bytes, read: Read) -> None:
        lease = read.lease
        key = (lease.stream, lease.partition)
        producer = self.producers.get(peer)
        reading = producer.held.get(key) if isinstance(producer, ProducerSession) else None
        if reading is None or reading.session != read.session or reading.ended:
            return
        lengths = self.data[lease.stream][lease.partition]
        if lease.cursor is not None:
            assert lease.cursor[0] == lease.first_seq, "a cursor that is not where the lease begins"
        stop = min(len(lengths), read.seq + self.rng.randint(1, 6))
        pass_samples = self.pass_samples or len(lengths)
        stop = min(stop, (read.seq // pass_samples + 1) * pass_samples)
        while stop > read.seq + 1 and sum(lengths[read.seq : stop]) > self.quota // 2:
            stop -= 1
        if read.seq >= len(lengths):
            self._to_producer(peer, EndOfPartition(key, read.session))
            return
        samples = [tokens_of(*key, seq, lengths[seq]) for seq in range(read.seq, stop)]
        cursor, ends = (stop, 0, 0), stop % pass_samples == 0
        self._to_producer(peer, chunk_of(key, samples, cursor, session=read.session, pass_ended=ends))

    # The trainer

    def _said(self, peer: bytes, envelope: Envelope) -> None:
        if peer == self._peer:
            self._to_client(FromBroker(envelope))

    def _return(self, peer: bytes, upto: int) -> None:
        """The trainer is done with the steps before ``upto``: later than it has them."""
        if peer == self._peer:
            self._to_client(Returned(upto))

    def _to_client(self, event: Event) -> None:
        assert self.client is not None
        peer = self._peer
        for effect in self.client.handle(event):
            if isinstance(effect, Send):
                self._post(b">t", partial(self._from_trainer, peer), effect.envelope)
            elif isinstance(effect, Deliver):
                step = effect.parts[0].message
                assert isinstance(step, StepPart)
                known = self.chains.setdefault((step.lineage, step.step), step.chain)
                assert known == step.chain, f"step {step.step} is another one the second time"
                self._post(b"rank", partial(self._return, peer), step.step + 1)
            elif isinstance(effect, Ended):
                self.ended = effect.num_steps
            else:
                assert isinstance(effect, Broken), effect
                raise AssertionError(f"{effect.code}: {effect.detail}")


class SlowDisk(Live):
    """The log is safe some time after it was written to. A broker that is killed loses the rest."""

    def start_broker(self, lost: bool = False) -> None:
        del self.disk.records[self.disk.safe_upto :]
        super().start_broker(lost)

    def sync(self) -> None:
        if self.disk.safe_upto < len(self.disk.records) and not self._links.get(b"disk"):
            self._post(b"disk", self._written, None)

    def _written(self, _: None) -> None:
        self.disk.safe_upto = self.rng.randint(self.disk.safe_upto + 1, len(self.disk.records))
        self.handle(Safe(self.disk.safe_upto))
