"""What must hold of a broker after every event, whatever its peers and the network do.

The checks read the books of the core; they never change them. Each names the rule that it guards.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from streampack.core.feed.feed import Feed
from streampack.core.journal.log_records import (
    ChunkAdmitted,
    ChunkCompleted,
    ChunkStaged,
    FeedEnded,
    Record,
    StepFormed,
)
from streampack.core.protocol.effects import FromProducer, FromTrainer, SendProducer, SendShard, SendTrainer
from streampack.core.protocol.events import Effect, Event
from streampack.core.protocol.message import Bye
from streampack.core.protocol.producer_messages import Eos, Flow, Hello, Mark, Samples, Sent
from streampack.core.protocol.relay_messages import NodeGet, NodePart, NodePing, relay_of, relayed
from streampack.core.protocol.result_messages import AskResults, Publish, ReportValues
from streampack.core.protocol.step_part import StepPart
from streampack.core.protocol.trainer_messages import AskState, Attach, Attached, Brought, Commit, End, Get, ReaderPing
from streampack.core.serve.rank_reader import Reader, ReaderPhase
from streampack.core.serve.readers import Readers

if TYPE_CHECKING:
    from tests.simulation.broker import BrokerProcess


NOT_FENCED = Attach | Brought | Bye | AskState | Commit | Publish | ReportValues | AskResults
"""What a trainer may say whatever attempt it is in."""


class BrokerChecks:
    """The checks of one broker process."""

    def __init__(self, process: BrokerProcess) -> None:
        self._process = process
        self._core = process.core
        self._grants: dict[tuple[str, int, int], tuple[int, int]] = {}
        self._steps: dict[tuple[str, int], tuple[int, bytes]] = {}
        """(record, chain) of each step in the log, be it safe or not."""
        self._ends: dict[str, int] = {}
        self._chunks: dict[tuple[str, int], list[tuple[int, int]]] = {}
        """(record, stop) of each chunk in the log, as its producer sent it."""
        self._completed: dict[tuple[str, int], list[tuple[int, int]]] = {}
        """The same of chunks that had all their late fields."""
        self._sent_packs: dict[tuple[bytes, int, str, int, int], set[int]] = {}
        """Packs that went to a relay: by its peer, attempt, feed, number of the request and step."""
        self._peers: dict[str, tuple[int, bytes]] = {}
        """The newest way of each reader: its number and its peer."""
        for lsn in range(len(process.disk.records)):
            self.appended(lsn, process.disk.decode(lsn)[0])

    def appended(self, lsn: int, record: Record) -> None:
        """A record is in the log: the end is there once and nothing follows it (R8), a step is what it was."""
        if isinstance(record, StepFormed):
            key, whole = (record.feed, record.step), not self._process.world.lost_disk
            assert record.feed not in self._ends or not whole, f"R8: step {record.step} is recorded after the end"
            assert key not in self._steps or not whole, f"R2: step {record.step} is recorded twice"
            assert (record.feed, record.step - 1) in self._steps or not whole or not record.step, (
                "R2: a step is missing"
            )
            before = self._steps.setdefault(key, (lsn, record.chain))
            assert before[1] == record.chain, f"immutability: step {record.step} is recorded with another chain"
        elif isinstance(record, FeedEnded):
            assert record.feed not in self._ends, "R8: the end is recorded twice"
            last = self._steps.get((record.feed, record.num_steps - 1), (0, bytes(16)))[1]
            assert last == record.chain, "R8: the end is recorded before the last step"
            self._ends[record.feed] = lsn
        elif isinstance(record, ChunkAdmitted | ChunkStaged):
            key, stop = (record.stream, record.partition), record.base_seq + len(record.lengths_u32) // 4
            of_kind = self._completed if isinstance(record, ChunkCompleted) else self._chunks
            known = of_kind.setdefault(key, [])
            assert record.base_seq == (known[-1][1] if known else 0), f"a gap in the log before a chunk of {key}"
            known.append((lsn, stop))

    def _is_safe(self, lsn: int) -> bool:
        return 0 <= lsn < self._process.disk.safe_upto

    def before(self, event: Event) -> Any:
        """What a stale message must not change; None if the event is none."""
        core = self._core
        if isinstance(event, FromProducer):
            if self._is_stale(event):
                return self._leases(event)
        elif isinstance(event, FromTrainer) and isinstance(event.envelope.message, NodeGet | NodePing):
            return self._others(event, event.envelope.message)
        elif isinstance(event, FromTrainer) and isinstance(event.envelope.message, Attach):
            return self._ways(event.envelope.message)
        elif isinstance(event, FromTrainer) and not isinstance(event.envelope.message, NOT_FENCED):
            readers = self._readers_of(event)
            reader = readers.registry.at(event.peer)
            if reader is None or (event.envelope.epoch, event.envelope.fence) != (core.epoch, reader.fence):
                return self._readers(readers)
        return None

    def after(self, event: Event, before: Any, effects: list[Effect]) -> None:
        """R3 (whole steps), R5 (fences), R6 (credits)."""
        if isinstance(before, dict):
            wrong = [name for name, was in before.items() if self._progress_of(event, name) not in (was, None)]
            assert not wrong, f"R5: a relay spoke for {wrong}: {event}"
        elif isinstance(before, Reader):
            assert before.peer == self._peers[before.name][1] or not before.entered, (
                f"R5: an old way of {before.name} was taken: {event}"
            )
        elif before is not None:
            now = self._leases(event) if isinstance(event, FromProducer) else self._readers(self._readers_of(event))
            assert now == before, f"R5: a stale message changed something: {event}"
        for effect in effects:
            if isinstance(effect, SendProducer) and isinstance(effect.envelope.message, Flow):
                self._flow(effect.envelope.fence, effect.envelope.message)
            elif isinstance(effect, SendShard):
                self._shard(effect)
            elif isinstance(effect, SendTrainer) and isinstance(effect.envelope.message, End):
                end = effect.envelope.message
                safe = not self._core.journal.keeps or self._is_safe(self._ends.get(end.feed, -1))
                assert safe, "R8: an end went out before the log had it"
            elif isinstance(effect, SendTrainer) and isinstance(effect.envelope.message, Attached):
                self._attached(effect)

    def _attached(self, effect: SendTrainer) -> None:
        message, envelope, world = effect.envelope.message, effect.envelope, self._process.world
        assert isinstance(message, Attached)
        seats = self._core.feeds[message.feed].readers.registry
        there = {reader.name: reader.holds for reader in seats}
        world.there.setdefault((message.feed, envelope.epoch, envelope.fence), there)
        if self._process is world.broker:
            world.jobs[message.feed].seated(message.reader)

    def phases(self) -> None:
        """A reader's phase agrees with what the registry and the attempt know of it."""
        for feed in self._core.feeds.values():
            registry, attempts, returned = feed.readers.registry, feed.readers.attempts, feed.readers.steps.returned
            for reader in registry:
                phase, ranks = reader.phase, reader.mesh.ranks
                assert phase not in (ReaderPhase.ATTACHING, ReaderPhase.GONE), reader.phases
                assert phase.holds == (registry.held.get(ranks) is reader), reader.phases
                assert phase.holds != (reader.name in registry.claims), reader.phases
                waits = phase in (ReaderPhase.CLAIMS_SNAPSHOT, ReaderPhase.HOLDS_SNAPSHOT)
                assert waits == (reader.pending is not None), reader.phases
                assert registry.at(reader.peer) is reader, f"{reader.name} has two peers"
                at = relay_of(reader.peer)
                assert reader.receiver.peer == (reader.peer if at is None else at[0]), f"{reader.name} has two peers"
                if phase is ReaderPhase.ENTERED:
                    self._returned(feed, reader)
                    assert reader.fence == attempts.number, f"{reader.name} is in attempt {reader.fence}"
                    assert reader.iteration == attempts.iteration, f"{reader.name} is in iteration {reader.iteration}"
                    assert ranks in returned, f"{reader.name} is not counted"

    def _returned(self, feed: Feed, reader: Reader) -> None:
        """What the broker believes that a rank has returned, its process has, and so no step is given up that it may
        ask for again.
        """
        steps, client = feed.readers.steps, self._process.world.jobs[feed.name].started[reader.name]
        if client.iteration == reader.iteration:
            believed = steps.returned[reader.mesh.ranks]
            assert believed <= client.done, f"R4: {reader.name} has returned {client.done} steps and not {believed}"
            assert steps.released_upto <= client.done, f"R4: {reader.name} has not returned {steps.released_upto} steps"

    def memory(self) -> None:
        """Waiting, merged and live tokens and media are within their bounds, and the books agree with the arena."""
        core, process = self._core, self._process
        waiting = waiting_extra = 0
        for intake in core.leases.partitions.intakes:
            tokens, media = intake.kept_tokens - intake.merged_tokens, intake.waiting_extra
            assert 0 <= tokens * intake.token_bytes <= intake.quota_bytes - media, "a partition is over its quota"
            assert tokens or not media, "a partition keeps media of no sample"
            waiting, waiting_extra = waiting + tokens, waiting_extra + media
        for feed in core.feeds.values():
            assert 0 <= feed.memory.held_tokens <= feed.plan.merged_tokens, f"{feed.name} holds more than its share"
            self._queues(feed.readers)
        held = sum(feed.memory.held_tokens for feed in core.feeds.values())
        table, away = core.table, [*core.leases.accounts.absent]
        merged = rounded = 0
        size = next(iter(core.feeds.values())).plan.rules.token_bytes
        if table.has("extra_bytes"):
            known = np.ones(table.capacity, np.bool_)
            known[table._first_free(table._num_free)] = False
            media, absent_media = int(table.extra_bytes[known].sum()), int(table.extra_bytes[away].sum())
            assert process.arena.media_bytes == media - absent_media, "the books differ from the media that are held"
            merged, rounded = media - waiting_extra, int((-table.extra_bytes[known] % size).sum())
        of_media = (waiting + held - int(table.length[away].sum()) - process.arena.live_tokens) * size
        assert merged <= of_media <= merged + rounded, "the books differ from the arena"

    def _queues(self, readers: Readers) -> None:
        """Bytes that are sent and not confirmed are within their bounds, but for one part."""
        receivers, largest, total = readers.receivers, 0, 0
        entered: dict[Any, set[str]] = {}
        for reader in readers.registry:
            entered.setdefault(reader.receiver, set()).update([reader.name] if reader.entered else [])
        for receiver, names in entered.items():
            flow = receiver.flow
            assert flow.queued_bytes == sum(size for _, _, size in flow.queued), "queues are not counted right"
            mine = max((size for _, _, size in flow.queued), default=0)
            most = receivers.most_queued(receiver) + mine
            assert flow.queued_bytes <= most or receiver.is_relay, f"{flow.queued_bytes} bytes are queued for one peer"
            largest, total = max(largest, mine), total + flow.queued_bytes
            assert receiver.readers.keys() == names, "a receiver has other readers than those of the attempt"
        assert receivers.flows.queued_bytes == total, "a queue is counted twice"
        assert total <= receivers.flows.leaving_bytes + largest, f"{total} bytes are queued"

    def _compare_bytes(self, effect: SendShard, message: NodePart, readers: list[Reader]) -> None:
        """What each reader of a relay would get directly is noted, to be compared with what it gets."""
        job, kept = self._process.world.jobs[message.feed], self._core.feeds[message.feed].readers.steps.kept
        for mesh in {(r.mesh.ranks[:2], r.mesh.pp_rank): r.mesh for r in readers}.values():
            rank = mesh.dp_rank if message.deal is msgspec.UNSET else mesh.dp_cp_rank
            if rank in message.dp_ranks:
                part, packs = next(kept.parts(message.step, mesh, message.rank_part))
                payload = self._process.arena.gather(packs, part.frames, mesh.cp, (mesh.cp_rank,), effect.layout)
                job.compare_bytes(mesh, msgspec.structs.replace(effect.envelope, message=part, payload=payload))

    def sent(self, effect: SendShard) -> None:
        """Every pack of a step goes to a relay once, unless it asks for lost parts."""
        message = effect.envelope.message
        if isinstance(message, NodePart):
            readers = self._core.feeds[message.feed].readers.receivers.relays[effect.peer].readers
            self._compare_bytes(effect, message, list(readers.values()))
            key = effect.peer, effect.envelope.fence, message.feed, message.request, message.step
            before = self._sent_packs.setdefault(key, set())
            packs = np.frombuffer(message.packs_u32, "<u4").tolist()
            if message.deal is not msgspec.UNSET:  # each rank of a group has its shard of the pack
                ranks = np.repeat(message.dp_ranks, len(packs) // len(message.dp_ranks)).tolist()
                packs = [*zip(ranks, packs, strict=True)]
            assert len(packs) == len(before | {*packs}) - len(before), f"bytes: packs {packs} went twice to a relay"
            before.update(packs)

    def granted(self, stream: str, partition: int, session: int) -> tuple[int, int]:
        """(samples, bytes) that this broker ever granted to a session."""
        return self._grants.get((stream, partition, session), (0, 0))

    def _is_stale(self, event: FromProducer) -> bool:
        message, envelope = event.envelope.message, event.envelope
        if isinstance(message, Samples | Eos | Mark | Sent):
            p = self._core.leases.partitions.find(message.stream, message.partition)
            assert p is not None
            session = self._core.leases.partitions.intakes[p].session
            return (envelope.epoch, envelope.fence) != (self._core.epoch, session)
        return envelope.epoch < self._core.epoch and not isinstance(message, Hello | Bye)

    def _leases(self, event: FromProducer) -> list[Any]:
        """The books, and for a message of an older broker also when producers were last heard."""
        leases = self._core.leases
        books = [
            (i.expected_seq, i.total, i.session, i.session_bytes, i.kept_tokens, i.cursor, i.recorded.num_marks)
            for i in leases.partitions.intakes
        ]
        old = event.envelope.epoch < self._core.epoch
        return [books, [producer.heard for producer in leases.producers] if old else None]

    def _readers_of(self, event: Event) -> Readers:
        assert isinstance(event, FromTrainer)
        message = event.envelope.message
        assert isinstance(message, Get | ReaderPing | NodeGet | NodePing)
        readers: Readers = self._core.feeds[message.feed].readers
        return readers

    def _readers(self, readers: Readers) -> list[Any]:
        flows = [(r.name, r.heard, r.receiver.flow) for r in readers.registry]
        rows = [(name, heard, flow.sent_upto, flow.want_stop) for name, heard, flow in flows]
        return [readers.steps.released_upto, dict(readers.steps.returned), *rows]

    def _ways(self, message: Attach) -> Any:
        """The reader that an ``Attach`` is about, if the reader has come by a newer way; it must not go back."""
        feed = self._core.feeds.get(message.feed)
        reader = feed.readers.registry.named(message.reader) if feed is not None else None
        path, _ = self._peers.get(message.reader, (0, b""))
        if reader is not None and reader.route_changes >= path:
            self._peers[message.reader] = reader.route_changes, reader.peer
        return reader if reader is not None and message.route_changes < reader.route_changes else None

    def _others(self, event: FromTrainer, message: NodeGet | NodePing) -> Any:
        """What a relay's message must not change: what is known of each reader that the relay does not speak for now;
        all, if it speaks for none.
        """
        readers, epoch, fence = self._readers_of(event), event.envelope.epoch, event.envelope.fence
        relay = readers.receivers.relays.get(event.peer)
        named = {report.reader: report.fence for report in message.ranks} if isinstance(message, NodePing) else {}
        if isinstance(message, NodeGet):
            named = {name: fence for name, _ in message.done}
        mine = {
            reader.name
            for reader in readers.registry
            if reader.peer == relayed(event.peer, reader.name)
            and epoch == self._core.epoch
            and named.get(reader.name) == reader.fence
        }
        current = relay is not None and (epoch, fence) == (self._core.epoch, relay.fence)
        if not mine and not current:
            return self._readers(readers)
        others = [reader.name for reader in readers.registry if reader.name not in mine]
        return {name: self._progress_of(event, name) for name in others}

    def _progress_of(self, event: Event, name: str) -> Any:
        """When a reader was heard, and what it has returned; None once it is gone."""
        readers = self._readers_of(event)
        reader = readers.registry.named(name)
        if reader is None:
            return None
        return reader.heard, readers.steps.returned[reader.mesh.ranks] if reader.entered else None

    def _flow(self, session: int, flow: Flow) -> None:
        key = (flow.stream, flow.partition, session)
        seq, size = self._grants.get(key, (0, 0))
        assert flow.grant_seq >= seq, "R6: a grant of samples was taken back"
        assert flow.grant_bytes >= size, "R6: a grant of bytes was taken back"
        safe = max((stop for lsn, stop in self._chunks.get(key[:2], []) if self._is_safe(lsn)), default=0)
        assert flow.durable_seq <= safe, f"R1: samples below {flow.durable_seq} are said to be safe, {safe} are"
        self._grants[key] = (flow.grant_seq, flow.grant_bytes)

    def _is_before_log(self, feed: str, step: int) -> bool:
        """Is ``step`` before all that the log has left of a feed, and was the log before this one lost?

        The lost log had recorded the step. This log began at a later step, from a checkpoint, and then lost its first
        records to a cut. A broker cannot tell such a step from one whose record was cut. It forms both again, and
        records neither. The digest of the first step that is recorded covers them.
        """
        disk, world = self._process.disk, self._process.world
        if not world.lost_disk or not disk.first_lsn:
            return False
        left = [number for (of, number), (lsn, _) in self._steps.items() if of == feed and lsn >= disk.first_lsn]
        return bool(left) and step < min(left)

    def _shard(self, effect: SendShard) -> None:
        message = effect.envelope.message
        assert isinstance(message, StepPart)
        readers, envelope = self._core.feeds[message.feed].readers, effect.envelope
        of = self._process.world.rounds.setdefault(
            (message.feed, envelope.epoch, envelope.fence), readers.attempts.iteration
        )
        assert of == readers.attempts.iteration, (
            f"R5: attempt {envelope.fence} is of iteration {of} and of {readers.attempts.iteration}"
        )
        lsn, _ = self._steps.get((message.feed, message.step), (-1, b""))
        safe = not self._core.journal.keeps or self._is_safe(lsn) or self._is_before_log(message.feed, message.step)
        assert safe, f"R2: step {message.step} went out before the log had it"
        if isinstance(message, NodePart):
            served = list(readers.receivers.relays[effect.peer].readers.values())
        else:
            served = [reader] if (reader := readers.registry.at(effect.peer)) is not None else []
        assert served
        for each in served:
            assert each.name not in readers.registry.fenced, f"R5: {each.name} is served, which lost its rank"
        published, key = self._process.published, (message.feed, envelope.fence, message.step)
        if key not in published:
            here = len(readers.steps.returned)
            there = prod(served[0].mesh.sizes)
            assert here == there, "R3: a step went out before all ranks were there"
            published.add(key)
