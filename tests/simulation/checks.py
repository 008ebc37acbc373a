"""What must hold of a broker after every event, whatever its peers and the network do.

The checks read the books of the core; they never change them. Each names the rule that it guards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streampack.core.effects import FromProducer, FromTrainer, SendProducer, SendShard
from streampack.core.events import Effect, Event
from streampack.core.messages import Attach, Bye, Eos, Flow, Get, Hello, ReaderPing, Samples, StepPart
from streampack.core.readers import Readers

if TYPE_CHECKING:
    from tests.simulation.processes import BrokerProcess


class BrokerChecks:
    """The checks of one broker process."""

    def __init__(self, process: BrokerProcess) -> None:
        self._process = process
        self._core = process.core
        self._grants: dict[tuple[str, int, int], tuple[int, int]] = {}

    def before(self, event: Event) -> Any:
        """What a stale message must not change; None if the event is none."""
        core = self._core
        if isinstance(event, FromProducer):
            if self._is_stale(event):
                return self._leases(event)
        elif isinstance(event, FromTrainer) and not isinstance(event.envelope.message, Attach | Bye):
            readers = self._readers_of(event)
            reader = readers._seats.at(event.peer)
            if reader is None or (event.envelope.epoch, event.envelope.fence) != (core.epoch, reader.fence):
                return self._readers(readers)
        return None

    def after(self, event: Event, before: Any, effects: list[Effect]) -> None:
        """R3 (whole steps), R5 (fences), R6 (credits)."""
        if before is not None:
            now = self._leases(event) if isinstance(event, FromProducer) else self._readers(self._readers_of(event))
            assert now == before, f"R5: a stale message changed something: {event}"
        for effect in effects:
            if isinstance(effect, SendProducer) and isinstance(effect.envelope.message, Flow):
                self._flow(effect.envelope.fence, effect.envelope.message)
            elif isinstance(effect, SendShard):
                self._shard(effect)

    def memory(self) -> None:
        """Waiting, merged and live tokens are within their bounds, and the books agree with the arena."""
        core, process = self._core, self._process
        waiting = 0
        for intake in core.leases.intakes:
            tokens = intake.kept_tokens - intake.merged_tokens
            assert 0 <= tokens * intake.token_bytes <= intake.quota_bytes, "a partition is over its quota"
            waiting += tokens
        for feed in core.feeds.values():
            assert 0 <= feed.held_tokens <= feed.plan.merged_tokens, f"{feed.name} holds more than its share"
        held = sum(feed.held_tokens for feed in core.feeds.values())
        absent = sum(int(core.table.length[handle]) for handle in core.leases.books.absent)
        assert process.arena.live_tokens == waiting + held - absent, "the books differ from the arena"

    def granted(self, stream: str, partition: int, session: int) -> tuple[int, int]:
        """(samples, bytes) that this broker ever granted to a session."""
        return self._grants.get((stream, partition, session), (0, 0))

    def _is_stale(self, event: FromProducer) -> bool:
        message, envelope = event.envelope.message, event.envelope
        if isinstance(message, Samples | Eos):
            p = self._core.leases.books.partition(message.stream, message.partition)
            assert p is not None
            return (envelope.epoch, envelope.fence) != (self._core.epoch, self._core.leases.intakes[p].session)
        return envelope.epoch < self._core.epoch and not isinstance(message, Hello | Bye)

    def _leases(self, event: FromProducer) -> list[Any]:
        """The books, and for a message of an older broker also when producers were last heard."""
        leases = self._core.leases
        books = [(i.expected_seq, i.total, i.session, i.session_bytes, i.kept_tokens, i.cursor) for i in leases.intakes]
        old = event.envelope.epoch < self._core.epoch
        return [books, [producer.heard for producer in leases._producers.values()] if old else None]

    def _readers_of(self, event: Event) -> Readers:
        assert isinstance(event, FromTrainer)
        message = event.envelope.message
        assert isinstance(message, Get | ReaderPing)
        readers: Readers = self._core.feeds[message.feed].readers
        return readers

    def _readers(self, readers: Readers) -> list[Any]:
        rows = [(r.name, r.heard, r.sent_upto, r.want_stop) for r in readers._seats]
        return [readers.released_upto, dict(readers._returned), *rows]

    def _flow(self, session: int, flow: Flow) -> None:
        key = (flow.stream, flow.partition, session)
        seq, size = self._grants.get(key, (0, 0))
        assert flow.grant_seq >= seq, "R6: a grant of samples was taken back"
        assert flow.grant_bytes >= size, "R6: a grant of bytes was taken back"
        self._grants[key] = (flow.grant_seq, flow.grant_bytes)

    def _shard(self, effect: SendShard) -> None:
        message = effect.envelope.message
        assert isinstance(message, StepPart)
        readers, envelope = self._core.feeds[message.feed].readers, effect.envelope
        of = self._process.world.rounds.setdefault((message.feed, envelope.epoch, envelope.fence), readers.round)
        assert of == readers.round, f"R5: attempt {envelope.fence} is of iteration {of} and of {readers.round}"
        published, key = self._process.published, (message.feed, envelope.fence, message.step)
        if key not in published:
            here = len(readers._returned)
            there = self._process.world.jobs[message.feed].num_ranks
            assert here == there, "R3: a step went out before all ranks were there"
            published.add(key)
