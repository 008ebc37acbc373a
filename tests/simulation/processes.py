"""The processes of a simulated run: the real state machines in shells that share one virtual world.

Each shell does what its daemon does (perform effects, feed events, tick) with the clock and the
links of its ``World``; none decides anything. What they see is checked in ``checks``.
"""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
from crc32c import crc32c
from streampack_services.arena import SLACK, Arena

from streampack import wire
from streampack.core.broker import Broker, Capacity
from streampack.core.client_session import Again, Broken, ClientSession, Deliver, Detach, Ended, Returned
from streampack.core.effects import (
    Append,
    Cut,
    Form,
    Formed,
    FromProducer,
    FromTrainer,
    Recall,
    Recalled,
    Release,
    Safe,
    SendProducer,
    SendShard,
    SendTrainer,
    Store,
    WasCut,
)
from streampack.core.events import Effect, Event, FromBroker, Report, Send, Tick
from streampack.core.feed import FeedPlan, needed_tokens
from streampack.core.journal import Journal
from streampack.core.messages import Envelope, Mesh, Offer
from streampack.core.producer_session import (
    Chunk,
    EndOfPartition,
    Finish,
    Forget,
    Key,
    Leave,
    ProducerSession,
    Read,
    Session,
)
from tests.simulation.checks import BrokerChecks
from tests.simulation.data import MAX_SAMPLE, Case

if TYPE_CHECKING:
    from tests.simulation.job import Job
    from tests.simulation.world import World

RUN = 77
TICK_S = 0.25
QUOTA = 2 * MAX_SAMPLE


class Disk:
    """A log's records as bytes, the first ``safe_upto`` of them synced; a crash loses some of the others."""

    def __init__(self, sync_s: float) -> None:
        self.records: list[tuple[int, bytes]] = []
        self.safe_upto = self.first_lsn = 0
        self.sync_s = sync_s
        """Mean time of a sync; 0: what is written is safe, as from a kill of the process."""

    def cut(self, lsn: int) -> None:
        """Forget records below ``lsn``; whoever reads one fails."""
        for gone in range(self.first_lsn, lsn):
            self.records[gone] = (0, b"")
        self.first_lsn = lsn

    def crash(self, rng: random.Random) -> None:
        """Lose what was not synced, or the end of it."""
        del self.records[rng.randint(self.safe_upto, len(self.records)) :]
        self.safe_upto = len(self.records)


class BrokerProcess:
    """A broker with a real arena, and a log on ``disk`` if there is one; ``Form`` takes a while."""

    def __init__(self, world: World, epoch: int, disk: Disk | None = None) -> None:
        self.world, self.epoch, self.alive, self.disk = world, epoch, True, disk
        size = np.dtype(world.dtype).itemsize
        plans = [
            FeedPlan(job.feed, job.case.rules, needed_tokens(job.case.rules, MAX_SAMPLE)) for job in world.jobs.values()
        ]
        self.core: Broker = Broker(
            run=RUN, epoch=epoch, feeds=plans, capacity=Capacity(QUOTA, MAX_SAMPLE, MAX_SAMPLE * size),
            steps_ahead=world.jobs["train"].case.steps_ahead, journal=Journal(disk is not None), run_name="sim",
        )  # fmt: skip
        partitions = sum(stream.partitions for plan in plans for stream in plan.rules.streams)
        self.live_tokens = sum(plan.merged_tokens for plan in plans) + QUOTA * partitions
        blocks = int(self.live_tokens * SLACK / MAX_SAMPLE) + 4
        self.arena = Arena(blocks * MAX_SAMPLE * size, world.dtype, MAX_SAMPLE)
        self.published: set[tuple[str, int, int]] = set()
        self.checks = BrokerChecks(self)
        self._events: deque[Event] = deque()
        self._syncing = False
        if disk is not None:
            for lsn, (kind, body) in enumerate(disk.records[disk.first_lsn :], disk.first_lsn):
                self.core.recover(lsn, wire.decode_record(kind, body)[0])
            self.core.journal.next_lsn = self.core.journal.safe_upto = len(disk.records)
        self._perform_all(self.core.begin())
        self.epoch = self.core.epoch
        world.clock.after(0.0, self._tick)

    def kill(self) -> None:
        self.alive = False

    def receive(self, peer: bytes, envelope: Envelope, from_producer: bool) -> None:
        kind = FromProducer if from_producer else FromTrainer
        self.handle(kind(peer, envelope))

    def handle(self, event: Event) -> None:
        if not self.alive:
            return
        before = self.checks.before(event)
        effects = self.core.handle(event)
        self.checks.after(event, before, effects)
        self._perform_all(effects)
        self.checks.memory()

    def _perform_all(self, effects: list[Effect]) -> None:
        for effect in effects:
            self._perform(effect)
        while self._events:
            event = self._events.popleft()
            effects = self.core.handle(event)
            self.checks.after(event, None, effects)
            for effect in effects:
                self._perform(effect)
        if self.disk is not None and len(self.disk.records) > self.disk.safe_upto and not self._syncing:
            self._syncing = True
            delay = self.world.rng.expovariate(1 / self.disk.sync_s) if self.disk.sync_s else 0.0
            self.world.clock.after(delay, self._synced, len(self.disk.records))

    def _synced(self, upto: int) -> None:
        if self.alive and self.disk is not None:
            self._syncing = False
            self.disk.safe_upto = upto
            self.handle(Safe(upto))

    def _tick(self) -> None:
        self.handle(Tick(self.world.clock.now))
        if self.alive:
            self.world.clock.after(TICK_S, self._tick)

    def _perform(self, effect: Effect) -> None:
        world = self.world
        if isinstance(effect, Store):
            self.arena.store(effect.handles, effect.offsets, effect.lengths, effect.rows, effect.payload)
        elif isinstance(effect, Release):
            self.arena.release(effect.handles)
        elif isinstance(effect, SendShard):
            rules, envelope = effect.rules, effect.envelope
            payload = self.arena.gather(
                effect.packs, effect.frames, rules.align.sample, rules.budget, effect.cp, effect.cp_rank, effect.layout
            )
            whole = Envelope(
                run=envelope.run, epoch=envelope.epoch, fence=envelope.fence, message=envelope.message,
                payload=payload,
            )  # fmt: skip
            world.to_peer(effect.peer, whole)
        elif isinstance(effect, SendProducer | SendTrainer):
            world.to_peer(effect.peer, effect.envelope)
        elif isinstance(effect, Append):
            assert self.disk is not None
            record = effect.record
            frames = [memoryview(part).tobytes() for part in wire.encode_record(record, effect.payload)]
            self.disk.records.append((record.TYPE, b"".join(frames)))
        elif isinstance(effect, Recall):
            assert self.disk is not None
            recalled, frames_ = wire.decode_record(*self.disk.records[effect.lsn])
            self._events.append(Recalled(effect.feed, effect.lsn, recalled, frames_, effect.generation))
        elif isinstance(effect, Cut):
            assert self.disk is not None
            self.disk.cut(effect.lsn)
            self._events.append(WasCut(self.disk.first_lsn))
        elif isinstance(effect, Form):
            choice = effect.request.choose()
            world.clock.after(world.rng.expovariate(20), self.handle, Formed(effect.feed, choice, effect.generation))
        else:
            assert isinstance(effect, Report), effect


class Process:
    """What producers and clients share: a peer name, life and death, and freezing (SIGSTOP, a hung host)."""

    kind = ""

    def __init__(self, world: World, machine: ProducerSession | ClientSession) -> None:
        self.world, self._machine = world, machine
        self.alive, self.frozen = True, False
        self._inbox: list[Event] = []
        self.reconnect()
        world.clock.after(world.rng.random() * TICK_S, self._tick)

    def reconnect(self) -> None:
        """A new connection: what is on its way to the old one is lost, what came from it may still arrive."""
        self.world.disconnect(self)
        self.peer = self.world.connect(self)

    def kill(self) -> None:
        self.alive = False
        self.world.disconnect(self)

    def freeze(self, seconds: float) -> None:
        """Do nothing for a while; messages wait."""
        self.frozen = True
        self.world.clock.after(seconds, self._thaw)

    def handle(self, event: Event) -> None:
        if not self.alive:
            return
        if self.frozen:
            if not isinstance(event, Tick):
                self._inbox.append(event)
            return
        stale = isinstance(event, FromBroker) and event.envelope.epoch < self._machine.epoch
        before = repr(self._machine) if stale else ""
        effects = self._machine.handle(event)
        if stale:
            assert not effects, f"R5: a message of an older broker had effects {effects}"
            assert repr(self._machine) == before, "R5: a message of an older broker changed something"
        for effect in effects:
            if isinstance(effect, Send):
                self.world.to_broker(self, effect.envelope)
            else:
                self.perform(effect)

    def perform(self, effect: Effect) -> None:
        raise NotImplementedError

    def _tick(self) -> None:
        self.handle(Tick(self.world.clock.now))
        if self.alive:
            self.world.clock.after(TICK_S, self._tick)

    def _thaw(self) -> None:
        self.frozen = False
        waiting, self._inbox = self._inbox, []
        for event in waiting:
            self.handle(event)


class ProducerProcess(Process):
    """A producer of some streams, reading chunks of random sizes."""

    kind = "producer"

    def __init__(self, world: World, name: str, streams: list[str], pid: int) -> None:
        self.name, self.streams = name, streams
        self._at: dict[tuple[Key, Session], int] = {}
        self._leaving = False
        offers = [Offer(stream=stream, source_digest="data") for stream in streams]
        self.session = ProducerSession(run=0, producer=name, host="host", pid=pid, offers=offers)
        super().__init__(world, self.session)

    def leave(self) -> None:
        """Stop with a farewell."""
        self._leaving = True
        self.handle(Leave())

    def perform(self, effect: Effect) -> None:
        if isinstance(effect, Read):
            self.world.clock.after(self.world.rng.expovariate(1 / self.world.read_s), self._read, effect)
        elif isinstance(effect, Forget):
            self._at.pop((effect.key, effect.session), None)
        elif isinstance(effect, Finish):
            assert not effect.error, effect
            self.alive = False
            if not self._leaving and effect.code != "stopped":
                self.world.dismissed(self)
        else:
            assert isinstance(effect, Report), effect

    def _read(self, read: Read) -> None:
        lease, key = read.lease, (read.lease.stream, read.lease.partition)
        held = self.session.held.get(key)
        if not self.alive or held is None or held.session != read.session or held.ended:
            return
        case = self.world.case_of[lease.stream]
        stream = case.names.index(lease.stream)
        seq = self._at.get((key, read.session))
        if seq is None:
            seq = lease.cursor[0] if lease.cursor is not None else lease.first_seq
            assert seq == lease.first_seq, "a cursor that is not where the lease begins"
        assert seq == read.seq
        lengths = case.lengths(stream, lease.partition)
        if seq >= len(lengths):
            self.handle(EndOfPartition(key, read.session))
            return
        stop, pass_end = seq + 1, seq - seq % case.pass_samples + case.pass_samples
        room = lease.max_chunk_bytes // np.dtype(case.dtype).itemsize
        most = self.world.rng.randint(1, 12)
        while stop < min(len(lengths), pass_end) and stop - seq < most and int(lengths[seq : stop + 1].sum()) <= room:
            stop += 1
        self._at[key, read.session] = stop
        self.handle(chunk_of(case, key, read.session, seq, stop))


def chunk_of(case: Case, key: Key, session: Session, start: int, stop: int) -> Chunk:
    """Samples ``start`` to ``stop`` of a partition, as a producer sends them; the cursor is ``stop``."""
    stream, partition = case.names.index(key[0]), key[1]
    lengths = case.lengths(stream, partition)[start:stop]
    samples = [case.tokens(stream, partition, seq).tobytes() for seq in range(start, stop)]
    payload, empty = b"".join(samples), int((lengths == 0).sum())
    return Chunk(
        key=key, session=session, lengths_u32=lengths.astype("<u4").tobytes(),
        crcs_u32=np.array([crc32c(sample) for sample in samples], "<u4").tobytes(),
        loss_tokens_u32=np.maximum(lengths - 1, 0).astype("<u4").tobytes(), num_samples=len(samples),
        num_bytes=len(payload), cursor=(stop, 0, 0), rejected={"empty": empty} if empty else {}, payload=(payload,),
        pass_ended=stop % case.pass_samples == 0 or stop == len(case.lengths(stream, partition)),
    )  # fmt: skip


class ClientProcess(Process):
    """One rank's trainer: takes the steps in order, works on each for a while, and returns it; again for each round."""

    kind = "client"

    def __init__(self, job: Job, name: str, mesh: Mesh, round_: int, next_step: int, chain: bytes) -> None:
        self.job, self.name, self.mesh = job, name, mesh
        self.session = ClientSession(
            run=0, feed=job.feed, reader=name, host="host", pid=1, mesh=mesh, prefetch=job.prefetch,
            next_step=next_step, chain=chain, round=round_,
        )  # fmt: skip
        self.round, self.done, self.chain = round_, next_step, chain
        self.ended: tuple[int, bytes] | None = None
        self.refused = ""
        self.replaced = False
        """Another process has its rank: what it does is of no use, and must do no harm."""
        self._ready: deque[tuple[int, bytes]] = deque()
        self._working = self._through = False
        super().__init__(job.world, self.session)

    def leave(self) -> None:
        """Detach, as a client that is closed does."""
        self.handle(Detach())
        self.kill()

    def perform(self, effect: Effect) -> None:
        if isinstance(effect, Deliver):
            step = self.job.delivered(self, effect.parts)
            self._ready.append((step.step, step.chain))
            self._work()
        elif isinstance(effect, Ended):
            assert self.ended is None, "ended twice"
            self.ended = (effect.num_steps, effect.chain)
            self.world.note("ended", self.name, self.round, *self.ended)
            self._work()
        else:
            assert isinstance(effect, Broken), effect
            self.refused = effect.code
            zombie = ("fenced", "step_gone", "round_gone") if self.replaced else ()  # a new broker knows no fences
            assert effect.code in ("rank_taken", *zombie), effect
            if self.replaced:
                self.kill()
            else:
                self.world.refused(self)

    def _work(self) -> None:
        if self._working or self._through or self.replaced:
            return
        self._through = self.job.returned(self)
        if self._through or not self._ready:
            return
        self._working = True
        step, _ = self._ready[0]
        self.job.take(self, step)

    def work_done(self, round_: int, step: int) -> None:
        """``step`` is done with, if it is in hand; said by the job, which may have ranks wait for each other."""
        if not self.alive or not self._working or (round_, step) != (self.round, self.done):
            return
        if self.frozen:
            self.world.clock.after(TICK_S, self.work_done, round_, step)
            return
        self._working = False
        _, self.chain = self._ready.popleft()
        self.done = step + 1
        self.handle(Returned(self.done))
        self._work()

    def again(self, round_: int) -> None:
        """Begin the iteration after ``round_``, once."""
        if not self.alive or self.replaced or round_ != self.round:
            return
        if self.frozen:
            self.world.clock.after(TICK_S, self.again, round_)
            return
        self.round, self.done, self.chain, self.ended = round_ + 1, 0, b"", None
        self._ready.clear()
        self._through = False
        self.handle(Again())

    def state(self) -> tuple[int, int, bytes]:
        """What a checkpoint of the trainer holds: the iteration, the next step, and the digest of those before."""
        return self.round, self.done, self.chain
