"""A broker's process: the real core in a shell that shares one virtual world, with a real arena and a log on a disk.

It does what its daemon does (perform effects, feed events, tick) and decides nothing. What it sees is checked in
``checks``. It may be killed right after what it said went out, by ``World.buggify``.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from streampack_services.broker.arena import SLACK, Arena

from streampack.core.broker import Broker
from streampack.core.journal.journal import Journal
from streampack.core.journal.log_effects import Append, Cut, Recall, Recalled, Safe, WasCut
from streampack.core.model.capacity import Capacity, FeedPlan, wanted_tokens
from streampack.core.protocol.effects import (
    Form,
    Formed,
    FromProducer,
    FromTrainer,
    NotSent,
    Release,
    SendProducer,
    SendShard,
    SendTrainer,
    Store,
)
from streampack.core.protocol.events import Effect, Event, Report, Tick
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.producer_messages import Flow
from streampack.core.protocol.trainer_messages import Committed, End
from tests.simulation.checks import BrokerChecks
from tests.simulation.data import BATCH, BUDGET, MAX_MEDIA, MAX_SAMPLE, Case
from tests.simulation.disk import Disk

if TYPE_CHECKING:
    from tests.simulation.world import World

RUN, FIRST_EPOCH = 77, 5
TICK_S = 0.25


def merged_tokens(this: Case) -> int:
    """Memory for what is merged: as little as will do; where marks close batches, what holds three of any.

    With media it is twice as much.
    """
    times = 2 if this.rules.media_fields else 1
    if this.rules.batch is None or this.rules.batch.samples is not None:
        return times * wanted_tokens(this.rules, MAX_SAMPLE)
    partitions = sum(stream.partitions for stream in this.rules.streams)
    return times * (3 * (BATCH * partitions + this.rules.batch.min_samples) * BUDGET + MAX_SAMPLE)


class BrokerProcess:
    """A broker with a real arena, and a log on ``disk`` if there is one; ``Form`` takes a while."""

    def __init__(self, world: World, epoch: int, disk: Disk | None = None) -> None:
        self.world, self.epoch, self.alive, self.disk = world, epoch, True, disk
        self.is_replaced = False
        """A standby has taken over: nothing more is safe here."""
        self._frozen = False
        self._inbox: list[Event] = []
        train = world.jobs["train"].case
        size, quota = train.token_bytes, 2 * train.chunk_bytes // train.token_bytes
        plans = [
            FeedPlan(
                job.feed, job.case.rules, merged_tokens(job.case), leaving_bytes=world.leaving_bytes,
                max_extra_bytes=MAX_MEDIA if job.case.rules.media_fields else 0,
            )
            for job in world.jobs.values()
        ]  # fmt: skip
        self.core: Broker = Broker(
            run=RUN, epoch=epoch, feeds=plans, capacity=Capacity(quota, MAX_SAMPLE, train.chunk_bytes),
            steps_ahead=train.steps_ahead, journal=Journal(disk is not None), run_name="sim",
            outbids=world.outbids,
        )  # fmt: skip
        for feed in self.core.feeds.values():
            feed.readers.attempts.pings_a_second = world.pings_a_second
            feed.readers.steps.kept.part_bytes = world.part_bytes
        partitions = sum(stream.partitions for plan in plans for stream in plan.rules.streams)
        self.live_tokens = sum(plan.merged_tokens for plan in plans) + quota * partitions
        blocks = int(self.live_tokens * SLACK / MAX_SAMPLE) + 4
        self.arena = Arena(blocks * MAX_SAMPLE * size, world.dtype, MAX_SAMPLE, train.rules.fields)
        self.published: set[tuple[str, int, int]] = set()
        self.checks = BrokerChecks(self)
        self._events: deque[Event] = deque()
        self._durable: dict[tuple[str, int], int] = {}
        self._syncing = self._waits_for_standby = False
        if disk is not None:
            for lsn in range(disk.first_lsn, len(disk.records)):
                self.core.recover(lsn, disk.read(lsn)[0])
            self.core.journal.next_lsn = self.core.journal.safe_upto = len(disk.records)
            if world.standby is not None:  # nothing is safe before a standby has the log, not even what was
                self._waits_for_standby = True
                self.core.journal.safe_upto = 0
                world.clock.after(world.standby.uniform(0.0, 5.0), self._standby_came)
        self._perform_all(self.core.begin())
        self.epoch = self.core.epoch
        world.clock.after(0.0, self._tick)

    def kill(self) -> None:
        self.alive = False

    def freeze(self, seconds: float) -> None:
        """Do nothing for a while; messages wait."""
        self._frozen = True
        self.world.clock.after(seconds, self._thaw)

    def _thaw(self) -> None:
        self._frozen = False
        waiting, self._inbox = self._inbox, []
        for event in waiting:
            self.handle(event)

    def replace(self) -> None:
        """A standby takes over with the log, and this broker does not know it."""
        assert self.disk is not None
        self.is_replaced, self.disk = True, self.disk.copy()

    def receive(self, peer: bytes, envelope: Envelope, from_producer: bool) -> None:
        kind = FromProducer if from_producer else FromTrainer
        self.handle(kind(peer, envelope))

    def handle(self, event: Event) -> None:
        if not self.alive:
            return
        if self._frozen:
            if not isinstance(event, Tick):
                self._inbox.append(event)
            return
        before = self.checks.before(event)
        effects = self.core.handle(event)
        self.checks.after(event, before, effects)
        self._perform_all(effects)
        self.checks.memory()
        self.checks.phases()
        if any(self._promises(effect) for effect in effects):
            self.world.faults.buggify()

    def _promises(self, effect: Effect) -> bool:
        """Does it say what must hold from now on: a step, an end, that something is safe?"""
        if isinstance(effect, SendProducer) and isinstance(flow := effect.envelope.message, Flow):
            key = flow.stream, flow.partition
            before, self._durable[key] = self._durable.get(key, 0), flow.durable_seq
            return flow.durable_seq > before
        said = isinstance(effect, SendTrainer) and isinstance(effect.envelope.message, End | Committed)
        return said or isinstance(effect, SendShard)

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
        if self.alive and self.disk is not None and not self.is_replaced:
            self._syncing = False
            self.disk.safe_upto = upto
            if not self._waits_for_standby:
                self.handle(Safe(upto))

    def _standby_came(self) -> None:
        if self.alive and self.disk is not None and not self.is_replaced:
            self._waits_for_standby = False
            self.handle(Safe(self.disk.safe_upto))

    def _tick(self) -> None:
        self.handle(Tick(self.world.clock.now))
        if self.alive:
            self.world.clock.after(TICK_S, self._tick)

    def _perform(self, effect: Effect) -> None:
        world = self.world
        if isinstance(effect, Store):
            self.arena.store(effect.handles, effect.offsets, effect.lengths, effect.rows, effect.payload)
            if effect.media_bounds is not None:
                self.arena.store_media(effect.handles, effect.media_bounds, effect.media)
        elif isinstance(effect, Release):
            self.arena.release(effect.handles)
        elif isinstance(effect, SendShard):
            envelope = effect.envelope
            shard = self.arena.gather(effect.contents, effect.frames, effect.cp, effect.cp_ranks, effect.layout)
            whole = Envelope(
                run=envelope.run, epoch=envelope.epoch, fence=envelope.fence, message=envelope.message,
                payload=shard,
            )  # fmt: skip
            if not world.to_peer(effect.peer, whole):
                self._events.append(NotSent(effect.peer, effect.envelope))
            else:
                self.checks.sent(effect)
        elif isinstance(effect, SendProducer | SendTrainer):
            if not world.to_peer(effect.peer, effect.envelope) and isinstance(effect, SendTrainer):
                self._events.append(NotSent(effect.peer, effect.envelope))
        elif isinstance(effect, Append):
            assert self.disk is not None
            self.checks.appended(len(self.disk.records), effect.record)
            self.disk.append(effect.record, effect.payload)
        elif isinstance(effect, Recall):
            assert self.disk is not None
            recalled, payload = self.disk.read(effect.lsn)
            self._events.append(Recalled(effect.feed, effect.lsn, recalled, payload))
        elif isinstance(effect, Cut):
            assert self.disk is not None
            self.disk.cut(effect.lsn)
            self._events.append(WasCut(self.disk.first_lsn))
        elif isinstance(effect, Form):
            choice = effect.request.choose()
            world.clock.after(world.rng.expovariate(20), self.handle, Formed(effect.feed, choice, effect.request))
        else:
            assert isinstance(effect, Report), effect
