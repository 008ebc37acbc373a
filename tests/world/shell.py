"""Perform a broker's effects in one thread, and feed it the events that follow from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace
from streampack_services.broker.arena import SLACK, Arena

from streampack.core.broker import Broker
from streampack.core.journal.log_effects import Append, Cut, Recall, Recalled, Safe, WasCut
from streampack.core.journal.log_records import Record
from streampack.core.layout.boundaries import Contents
from streampack.core.model.capacity import FeedPlan
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64
from streampack.core.protocol.effects import (
    Answer,
    Form,
    Formed,
    NotSent,
    Release,
    SendProducer,
    SendShard,
    SendTrainer,
    Store,
)
from streampack.core.protocol.events import Effect, Event, Report
from streampack.core.protocol.message import Envelope, Message
from tests.world.disk import Disk

M = TypeVar("M", bound=Message)
Sending = SendProducer | SendTrainer | SendShard


class Handles:
    """In the place of an arena: the handles of the samples that it would hold. Steps have no payload."""

    def __init__(self) -> None:
        self.live: set[int] = set()

    def store(self, handles: I64, offsets: I64, lengths: I64, rows: I64, payload: Sequence[Any]) -> None:
        """Hold samples that no other has the handles of."""
        new = set(handles.tolist())
        assert not self.live & new, "a handle was given out twice"
        assert (offsets >= 0).all()
        assert ((offsets + lengths) * 4 <= len(payload[0])).all()
        self.live |= new

    def release(self, handles: I64) -> None:
        """Free samples that are held."""
        freed = set(handles.tolist())
        assert freed <= self.live, "a sample was released twice"
        self.live -= freed

    def gather(self, contents: Contents, *how: Any) -> tuple[()]:
        """Only held samples are in a step."""
        assert self.live.issuperset(contents.handles.tolist()), "no payload is there"
        return ()


class RestoredHandles(Handles):
    """Handles of a run that goes back: samples of a snapshot may be released before their payload has come again."""

    def release(self, handles: I64) -> None:
        """Free samples, as an arena does: those without a payload change nothing."""
        self.live.difference_update(handles.tolist())


class Shell:
    """A broker, and a disk for its log if it keeps one.

    A subclass overrides ``carry`` (where messages go), ``form`` (when packs are chosen) and ``sync`` (when the log is
    safe).
    """

    core: Broker
    sample_memory: Arena | Handles

    def __init__(self, disk: Disk | None = None) -> None:
        self.disk = disk or Disk()
        self.said: list[tuple[bytes, Envelope]] = []
        """Messages of the broker, with their peers."""
        self.answers: list[Answer] = []
        self.errors: list[str] = []
        """Texts of reported errors."""
        self.warnings: list[str] = []
        """Texts of reported warnings."""
        self._events: deque[Event] = deque()

    def start(self, core: Broker, samples: Arena | Handles | None = None) -> None:
        """Let ``core`` take the place of the broker before. It reads the log and begins."""
        self.core, self.sample_memory = core, samples or Handles()
        self._events.clear()
        for lsn, record in self.recorded() if core.journal.keeps else ():
            core.recover(lsn, record)
        if core.journal.keeps:
            core.journal.next_lsn = core.journal.safe_upto = len(self.disk.records)
        self.begin_broker()

    def begin_broker(self) -> None:
        """Begin with what the log had."""
        self.perform_all(self.core.begin())

    def records(self) -> list[Record]:
        """Every record that was written, and is not lost."""
        return [self.disk.decode(lsn)[0] for lsn in range(len(self.disk.records))]

    def recorded(self) -> Iterable[tuple[int, Record]]:
        """Records of the log, with their numbers."""
        return ((lsn, self.disk.read(lsn)[0]) for lsn in range(self.disk.first_lsn, len(self.disk.records)))

    def handle(self, event: Event) -> None:
        """Handle an event, and all that follows from it."""
        self.perform_all(self.decide(event))

    def decide(self, event: Event) -> list[Effect]:
        """Let the broker handle an event."""
        return self.core.handle(event)

    def perform_all(self, effects: list[Effect]) -> None:
        """Perform effects, then those of the events that follow."""
        for effect in effects:
            self.perform(effect)
        while self._events:
            for effect in self.decide(self._events.popleft()):
                self.perform(effect)
        self.sync()

    def perform(self, effect: Effect) -> None:
        """Perform one effect. An event that follows waits until all effects are performed."""
        if isinstance(effect, SendProducer | SendTrainer | SendShard):
            envelope = effect.envelope
            if isinstance(effect, SendShard):
                how = effect.frames, effect.cp, effect.cp_ranks, effect.layout
                envelope = replace(envelope, payload=self.sample_memory.gather(effect.contents, *how))
            if not self.carry(effect, envelope) and not isinstance(effect, SendProducer):
                self._events.append(NotSent(effect.peer, effect.envelope))
        elif isinstance(effect, Store):
            self.sample_memory.store(effect.handles, effect.offsets, effect.lengths, effect.rows, effect.payload)
            if effect.media_bounds is not None:
                assert isinstance(self.sample_memory, Arena)
                self.sample_memory.store_media(effect.handles, effect.media_bounds, effect.media)
        elif isinstance(effect, Release):
            self.sample_memory.release(effect.handles)
        elif isinstance(effect, Form):
            self.form(effect)
        elif isinstance(effect, Append):
            self.append(effect)
        elif isinstance(effect, Recall):
            self._events.append(Recalled(effect.feed, effect.lsn, *self.disk.read(effect.lsn)))
        elif isinstance(effect, Cut):
            self.cut(effect)
        elif isinstance(effect, Answer):
            self.answers.append(effect)
        else:
            assert isinstance(effect, Report), effect
            self.errors += [effect.text] if effect.level == "error" else []
            self.warnings += [effect.text] if effect.level == "warning" else []

    # What subclasses do otherwise

    def carry(self, effect: Sending, envelope: Envelope) -> bool:
        """Bring a message to its peer. Return False if there is no connection."""
        self.said.append((effect.peer, envelope))
        return True

    def form(self, form: Form) -> None:
        """Choose packs, now or later."""
        self._events.append(chosen(form))

    def sync(self) -> None:
        """Make the log safe after all effects."""
        if self.core.journal.keeps and self.core.journal.safe_upto < len(self.disk.records):
            self.disk.safe_upto = len(self.disk.records)
            self.handle(Safe(self.disk.safe_upto))

    def append(self, effect: Append) -> None:
        """Write a record."""
        self.disk.append(effect.record, effect.payload)

    def cut(self, cut: Cut) -> None:
        """Forget records."""
        self.disk.cut(cut.lsn)
        self._events.append(WasCut(self.disk.first_lsn))

    # What was said

    def heard(self, peer: bytes, kind: type[M]) -> list[M]:
        """Messages of a kind that ``peer`` was sent, oldest first."""
        return [e.message for to, e in self.said if to == peer and isinstance(e.message, kind)]


def chosen(form: Form) -> Formed:
    """The packer's answer."""
    return Formed(form.feed, form.request.choose(), form.request)


def held_tokens(plans: Iterable[FeedPlan], quota_tokens: int) -> int:
    """Tokens that a broker of these feeds may hold at a time."""
    return sum(plan.merged_tokens + quota_tokens * sum(s.partitions for s in plan.rules.streams) for plan in plans)


def arena_for(tokens: int, longest: int, rules: Rules) -> Arena:
    """An arena for so many tokens, of samples of at most ``longest``."""
    blocks = int(tokens * SLACK / longest) + 4
    return Arena(blocks * longest * rules.token_bytes, rules.tokens, longest, rules.fields)
