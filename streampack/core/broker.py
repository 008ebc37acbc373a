"""The broker as a pure state machine: ``handle(event) -> effects``.

It joins the pieces and decides nothing of their own matters: ``leases`` takes samples in,
``merge`` orders them, ``form`` makes steps of them, ``readers`` hands steps out. After each event
it moves on as far as it can: merges what may be merged, asks for a step to be formed, widens the
credits that this frees. Time arrives as ``Tick``; nothing that is formed depends on it.

Memory: samples that wait for the merge are bounded by each partition's quota, those merged (in
the window, in packs, in steps that some rank has not returned) by ``merged_tokens``. The two
never borrow from each other, so the merge can always get the sample it waits for, and a full
arena cannot deadlock.
"""

from __future__ import annotations

from dataclasses import dataclass

from streampack.core.admission import terms_of
from streampack.core.effects import Drain, Form, Formed, FromProducer, FromTrainer, Release
from streampack.core.events import Effect, Event, Report, Tick
from streampack.core.form import Former, Step
from streampack.core.leases import Leases
from streampack.core.merge import merge_of
from streampack.core.messages import Envelope
from streampack.core.readers import Readers
from streampack.core.rules import Rules
from streampack.core.samples import SampleTable


@dataclass(frozen=True, slots=True)
class Capacity:
    """How the arena is shared out, in tokens but for the bytes of a message.

    ``quota_tokens`` for each partition's unmerged samples, ``merged_tokens`` for the rest.
    """

    quota_tokens: int
    merged_tokens: int
    max_sample_tokens: int
    max_chunk_bytes: int


def needed_tokens(rules: Rules, max_sample_tokens: int) -> int:
    """Merged tokens without which a step might never be whole: the window of longest samples,
    the step being formed, one being served, and a sample on its way."""
    return (rules.window + 2) * rules.budget + 2 * rules.packs * rules.budget + max_sample_tokens


@dataclass(slots=True)
class Totals:
    """What was formed, summed over all steps: for the figures of section 7 of the packing design."""

    steps: int = 0
    packs: int = 0
    empty_packs: int = 0
    samples: int = 0
    tokens: int = 0
    slot_tokens: int = 0
    square_tokens: int = 0
    dropped_samples: int = 0

    def add(self, step: Step) -> None:
        """Count a step."""
        self.steps += 1
        self.packs += len(step.packs)
        self.samples += step.num_samples
        for pack in step.packs:
            self.empty_packs += not len(pack.handles)
            self.tokens += pack.num_tokens
            self.slot_tokens += pack.num_slot_tokens
            self.square_tokens += pack.num_tokens**2


class Broker:
    """One run's broker, for the feed ``feed``.

    ``epoch`` higher than that of any broker of this run before; ``steps_ahead`` bounds the steps
    formed and not yet returned by all ranks.
    """

    def __init__(
        self, *, run: int, epoch: int, feed: str, rules: Rules, capacity: Capacity, layout: str = "zigzag",
        steps_ahead: int = 8,
    ) -> None:  # fmt: skip
        self.run, self.epoch, self.feed, self.rules, self.capacity = run, epoch, feed, rules, capacity
        self.table = SampleTable()
        self._merge = merge_of(rules)
        self.leases = Leases(
            run, epoch, rules.seed, rules.tokens, rules.fields, terms_of(rules), capacity.quota_tokens,
            capacity.max_sample_tokens, capacity.max_chunk_bytes, self.table, self._merge,
        )  # fmt: skip
        self.readers = Readers(run, epoch, feed, rules, layout, self.table, self.waiting_for)
        self.former = Former(rules, self.table)
        self.totals = Totals()
        self._steps_ahead = steps_ahead
        self._forming = False
        self._blocked: int | None = None
        self._now = 0.0
        self.held_tokens = 0
        """Merged and not yet released."""
        self.draining = False
        self.foreign = 0
        """Messages of another run or broker."""

    def handle(self, event: Event) -> list[Effect]:
        """What to do about an event; never performs it."""
        return self._settled(self._dispatch(event)) + self._settled(self._advance())

    def _dispatch(self, event: Event) -> list[Effect]:
        if isinstance(event, (FromProducer, FromTrainer)):
            self._outbid(event.envelope)
            if event.envelope.run not in (0, self.run) or event.envelope.epoch > self.epoch:
                self.foreign += 1
                return [Report("warning", "dropped a message of another run or of a newer broker")]
            side = self.leases if isinstance(event, FromProducer) else self.readers
            return side.receive(event.peer, event.envelope, self._now)
        if isinstance(event, Formed):
            return self._formed(event)
        if isinstance(event, Tick):
            self._now = event.now
            return self.leases.tick(event.now) + self.readers.tick(event.now)
        if isinstance(event, Drain):
            self.draining = True
            return self.leases.drain() + self.readers.drain()
        return []

    def _outbid(self, envelope: Envelope) -> None:
        """A broker that has just started takes an epoch above the one that peers of its run still know."""
        new = not self.former.next_step and not self.readers.num_readers and not self.leases.num_producers
        if new and envelope.run == self.run and envelope.epoch > self.epoch:
            self.epoch = self.leases.epoch = self.readers.epoch = envelope.epoch + 1

    @property
    def finished(self) -> bool:
        """All steps are formed, and no reader is attached any more."""
        return self.readers.end is not None and not self.readers.num_readers

    def waiting_for(self) -> tuple[str, str]:
        """Why the next step is not there: (reason, detail)."""
        if self._forming:
            return "forming", "the step is being packed"
        if self.former.next_step >= self.readers.released_upto + self._steps_ahead:
            return "peers", self.readers.slowest
        if self._room() <= 0:
            return "memory", f"the arena is full: {self.readers.slowest}"
        if self._blocked is not None:
            return "stream", f"no sample has come from {self.leases.describe(self._blocked)}"
        return "forming", "the step is being packed"

    # Moving on

    def _advance(self) -> list[Effect]:
        if self.draining:
            return []
        effects: list[Effect] = []
        while self.readers.end is None:
            effects += self._fill()
            if self._forming or self.former.next_step >= self.readers.released_upto + self._steps_ahead:
                break
            request = self.former.request()
            if request is not None:
                self._forming = True
                effects.append(Form(self.feed, request))
                break
            if not self.former.closed:
                break
            effects += self._publish(self.former.cut())  # the feed has ended, or its next pass begins
        return effects

    def _fill(self) -> list[Effect]:
        """Merge while the next step may need more, and there is room."""
        rules = self.rules
        target = 2 * rules.packs * rules.budget
        effects: list[Effect] = []
        while (room := self._room()) > 0 and (self.former.queued_tokens < target or self.former.starved):
            taken = self._merge.take(min(room, target))
            self._blocked = taken.blocked
            if not len(taken.moved):
                break
            effects += self.leases.merged(taken.moved)
            self.former.admit(taken.handles, taken.lengths)
            self.held_tokens += int(taken.lengths.sum())
        closed = self._merge.closed or self._merge.between_passes
        if closed and not self.former.closed and self._merge.stopped:
            effects += self._stop()
        self.former.closed = closed
        return effects

    def _stop(self) -> list[Effect]:
        """A stream has stopped the feed: let go of what the others hold, and of their producers."""
        handles = self._merge.drop()
        self.held_tokens += int(self.table.length[handles].sum())  # what is released is taken off
        return [*([Release(handles)] if len(handles) else []), *self.leases.close()]

    def _room(self) -> int:
        return self.capacity.merged_tokens - self.held_tokens - self.capacity.max_sample_tokens

    def _formed(self, event: Formed) -> list[Effect]:
        self._forming = False
        return self._publish(self.former.apply(event.choice))

    def _publish(self, steps: list[Step]) -> list[Effect]:
        effects: list[Effect] = []
        for step in steps:
            self.totals.add(step)
            effects += self.readers.add(step)
        if self.former.finished and self.readers.end is None:
            dropped, self.former.dropped = self.former.dropped, self.former.dropped[:0]
            self.totals.dropped_samples += len(dropped)
            if len(dropped):
                effects.append(Release(dropped))
            if not self._merge.closed:
                self._merge.next_pass()
                self.former.closed = False
                return effects
            count = self.former.next_step
            effects.append(Report("info", f"feed {self.feed!r} has ended after {count} steps"))
            effects += self.readers.finish(count, self.former.chain)
        return effects

    def _settled(self, effects: list[Effect]) -> list[Effect]:
        """Take what is released off the books; effects are performed in order, so nobody still reads it."""
        for effect in effects:
            if isinstance(effect, Release):
                self.held_tokens -= int(self.table.length[effect.handles].sum())
                self.table.free(effect.handles)
        return effects
