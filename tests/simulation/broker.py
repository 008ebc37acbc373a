"""A broker's process: the real core in a shell that shares one virtual world, with a real arena and a log on a disk.

It does what its daemon does (perform effects, feed events, tick) and decides nothing. What it sees is checked in
``checks``. It may be killed right after what it said went out, by ``World.buggify``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streampack.core.broker import Broker
from streampack.core.journal.journal import Journal
from streampack.core.journal.log_effects import Append, Safe
from streampack.core.model.capacity import Capacity, FeedPlan, wanted_tokens
from streampack.core.protocol.effects import Form, FromProducer, FromTrainer, SendProducer, SendShard, SendTrainer
from streampack.core.protocol.events import Effect, Event
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.producer_messages import Flow
from streampack.core.protocol.trainer_messages import Committed, End
from tests.simulation.checks import BrokerChecks
from tests.simulation.data import BATCH, BUDGET, MAX_MEDIA, MAX_SAMPLE, Case
from tests.simulation.processes import Mortal
from tests.world.disk import Disk
from tests.world.shell import Sending, Shell, arena_for, chosen, held_tokens

if TYPE_CHECKING:
    from tests.simulation.world import World

RUN, FIRST_EPOCH = 77, 5


def merged_tokens(this: Case) -> int:
    """Memory for what is merged: as little as will do; where marks close batches, what holds three of any.

    With media it is twice as much.
    """
    times = 2 if this.rules.media_fields else 1
    if this.rules.batch is None or this.rules.batch.samples is not None:
        return times * wanted_tokens(this.rules, MAX_SAMPLE)
    partitions = sum(stream.partitions for stream in this.rules.streams)
    return times * (3 * (BATCH * partitions + this.rules.batch.min_samples) * BUDGET + MAX_SAMPLE)


class BrokerProcess(Mortal, Shell):
    """A broker with a real arena, and a log on ``disk`` if there is one; ``Form`` takes a while."""

    def __init__(self, world: World, epoch: int, disk: Disk | None = None) -> None:
        Mortal.__init__(self, world)
        Shell.__init__(self, disk)
        self.is_replaced = False
        """A standby has taken over: nothing more is safe here."""
        train = world.jobs["train"].case
        quota = 2 * train.chunk_bytes // train.token_bytes
        plans = [
            FeedPlan(
                job.feed, job.case.rules, merged_tokens(job.case), job.case.layout, leaving_bytes=world.leaving_bytes,
                max_extra_bytes=MAX_MEDIA if job.case.rules.media_fields else 0,
            )
            for job in world.jobs.values()
        ]  # fmt: skip
        self.core = Broker(
            run=RUN, epoch=epoch, feeds=plans, capacity=Capacity(quota, MAX_SAMPLE, train.chunk_bytes),
            steps_ahead=train.steps_ahead, journal=Journal(disk is not None), run_name="sim",
            outbids=world.outbids,
        )  # fmt: skip
        for feed in self.core.feeds.values():
            feed.readers.attempts.pings_a_second = world.pings_a_second
            feed.readers.steps.kept.part_bytes = world.part_bytes
        self.published: set[tuple[str, int, int]] = set()
        self.arena = arena_for(held_tokens(plans, quota), MAX_SAMPLE, train.rules)
        self.checks = BrokerChecks(self)
        self._durable: dict[tuple[str, int], int] = {}
        self._syncing = self._waits_for_standby = False
        self.start(self.core, self.arena)
        self.epoch = self.core.epoch
        world.clock.after(0.0, self._tick)

    def begin_broker(self) -> None:
        if self.core.journal.keeps and self.world.standby is not None:
            self._waits_for_standby = True  # nothing is safe before a standby has the log, not even what was
            self.core.journal.safe_upto = 0
            self.world.clock.after(self.world.standby.uniform(0.0, 5.0), self._standby_came)
        super().begin_broker()

    def replace(self) -> None:
        """A standby takes over with the log, and this broker does not know it."""
        self.is_replaced, self.disk = True, self.disk.copy()

    def receive(self, peer: bytes, envelope: Envelope, from_producer: bool) -> None:
        kind = FromProducer if from_producer else FromTrainer
        self.handle(kind(peer, envelope))

    def handle(self, event: Event) -> None:
        if not self.acts_on(event):
            return
        effects = self.decide(event)
        self.perform_all(effects)
        self.checks.memory()
        self.checks.phases()
        if any(self._promises(effect) for effect in effects):
            self.world.faults.buggify()

    def decide(self, event: Event) -> list[Effect]:
        before = self.checks.before(event)
        effects = super().decide(event)
        self.checks.after(event, before, effects)
        return effects

    def _promises(self, effect: Effect) -> bool:
        """Does it say what must hold from now on: a step, an end, that something is safe?"""
        if isinstance(effect, SendProducer) and isinstance(flow := effect.envelope.message, Flow):
            key = flow.stream, flow.partition
            before, self._durable[key] = self._durable.get(key, 0), flow.durable_seq
            return flow.durable_seq > before
        ends = isinstance(effect, SendTrainer) and isinstance(effect.envelope.message, End | Committed)
        return ends or isinstance(effect, SendShard)

    def sync(self) -> None:
        if len(self.disk.records) > self.disk.safe_upto and not self._syncing:
            self._syncing = True
            delay = self.world.rng.expovariate(1 / self.disk.sync_s) if self.disk.sync_s else 0.0
            self.world.clock.after(delay, self._synced, len(self.disk.records))

    def _synced(self, upto: int) -> None:
        if self.alive and self.core.journal.keeps and not self.is_replaced:
            self._syncing = False
            self.disk.safe_upto = upto
            if not self._waits_for_standby:
                self.handle(Safe(upto))

    def _standby_came(self) -> None:
        if self.alive and self.core.journal.keeps and not self.is_replaced:
            self._waits_for_standby = False
            self.handle(Safe(self.disk.safe_upto))

    def carry(self, effect: Sending, envelope: Envelope) -> bool:
        is_connected = self.world.to_peer(effect.peer, envelope)
        if is_connected and isinstance(effect, SendShard):
            self.checks.sent(effect)
        return is_connected

    def append(self, effect: Append) -> None:
        self.checks.appended(len(self.disk.records), effect.record)
        super().append(effect)

    def form(self, form: Form) -> None:
        self.world.clock.after(self.world.rng.expovariate(20), self.handle, chosen(form))
