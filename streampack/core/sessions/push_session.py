"""The side of a producer that pushes samples which exist once, as a pure state machine: ``handle(event) -> effects``.

One session serves one partition of one stream. Nobody can read its samples again, so each is kept here
until the broker says that it is safe (``durable_seq``, R1), and sent again from wherever a new session
begins: after a gap, another connection, a broker that was killed and lost what it had not written. The
buffer is bounded; whoever gives samples waits for room.

The broker counts a partition's samples, over all processes that ever pushed to it. A process numbers its
own from there on, but only once every earlier one is safe: else a broker that lost some would count again
from a place that this process knows nothing of. After that ``first_seq`` must lie within what is kept, or
something is wrong that must be said: a log that was lost, or two that push to one partition.

What is kept, and in which order it goes out, is ``push_buffer``'s; what a chunk holds is the shell's business.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from streampack.core.model.snapshot import Cursor
from streampack.core.protocol.events import Effect, Event, Report
from streampack.core.protocol.message import Bye, Message, Reject, Who
from streampack.core.protocol.producer_messages import Done, Eos, Flow, Lease, Mark, Offer, Revoke, Samples, Sent
from streampack.core.sessions.producer_base import BROKER_SILENT_S, Chunk, Finish, Sender, SendWindow, Session
from streampack.core.sessions.push_buffer import Kept, PushBuffer

PUSHED = "pushed"
"""The source digest of a stream that nobody can read twice."""


class Push(Event, frozen=True):
    """Samples, numbered from ``next_seq`` on and admitted as one; only where there is ``room``."""

    chunk: Chunk


class EndBatch(Event, frozen=True):
    """The batch of this number ends here."""

    batch: int


class EndPartition(Event, frozen=True):
    """The partition ends here: no process will push to it again."""


@dataclass(slots=True, kw_only=True)
class PushSession(Sender):
    """State of one process that pushes to ``partition`` of ``stream``, from a ``buffer`` that bounds what it keeps.

    ``incarnation``, below 2**62, is a number that no other process has: it stands in each chunk's cursor, which the
    broker gives back with a lease, so that one that was stopped for long learns that another has pushed since.
    """

    incarnation: int
    stream: str
    partition: int
    buffer: PushBuffer
    lease: Lease | None = None
    """The newest lease, with the broker's requirements for samples."""
    begun: bool = False
    """Whether samples may be numbered: all earlier ones are safe."""
    first_seq: int = 0
    """Number of this process's first sample."""
    _ending: bool = False
    _ended_known: bool = False
    _session: Session | None = None
    _last_session: Session = (0, 0)
    _said: bool = False
    """The first mark, or where there is none the end, was sent in this session."""
    _window: SendWindow = field(default_factory=lambda: SendWindow(0))
    _stopping: bool = False

    def room(self, size: int) -> bool:
        """Return whether a chunk of ``size`` bytes may be pushed now."""
        return self.begun and self.buffer.room(size)

    @property
    def flushed(self) -> bool:
        """Whether all pushed samples are safe, and the end of the partition if there is one."""
        return self.buffer.empty and self._ended_known >= self._ending

    def waiting_for(self) -> str:
        """Return a text that names what keeps samples from being safe; empty if nothing does."""
        if not self.reached or self.silent_s > BROKER_SILENT_S:
            return "an answer of the broker"
        if self._stopping:
            return "another broker: the one there was is stopping"
        if self._session is None:
            return f"a lease of partition {self.partition}: another process holds it, or it has ended"
        if not self.begun:
            return "the broker's log: what an earlier process pushed is not safe yet"
        if self._last_words() is not None and self.buffer.marks:
            return f"the broker's log: the end of batch {self.buffer.marks[0].batch} is not safe yet"
        if not self.buffer.all_sent:
            batch = "every other partition has called end_of_batch too, or " if self.buffer.next_mark else ""
            return (
                f"credit: the broker holds all it may until {batch}trainers, other streams or its log move on: see its "
                f"status"
            )
        if not self.buffer.empty:
            first, last = self.buffer.durable_seq, self.buffer.next_seq - 1
            return f"the broker's log: samples {first} to {last} are not safe yet"
        return "" if self.flushed else "the broker's log: the end is not safe yet"

    # What comes in

    @property
    def _offered(self) -> list[Offer]:
        return [Offer(stream=self.stream, source_digest=PUSHED, partition=self.partition)]

    @property
    def _has_lease(self) -> bool:
        return self._session is not None

    def _given(self, event: Event) -> list[Effect]:
        if isinstance(event, Push):
            self.buffer.put(event.chunk)
        elif isinstance(event, EndBatch):
            self.buffer.end_batch(event.batch)
        elif isinstance(event, EndPartition):
            self._ending = True
        else:
            return []
        return self._move()

    def _forget_sessions(self) -> list[Effect]:
        self._session, self._stopping = None, False
        return []

    def _heard(self, message: Message, fence: int) -> list[Effect]:
        if isinstance(message, Lease | Flow | Revoke) and (message.stream, message.partition) != self._key:
            return []
        if isinstance(message, Lease):
            return self._lease(message, fence)
        if isinstance(message, Flow):
            return self._flow(message, fence)
        if isinstance(message, Revoke):
            self._session = None if self._session == (self.epoch, fence) else self._session
        elif isinstance(message, Who):
            return self._hello_again()
        elif isinstance(message, Bye):
            return self._stopped(message)
        elif isinstance(message, Reject):
            return self._end_session(message.detail, message.code)
        elif isinstance(message, Done):
            return [self._send(Bye(reason="goodbye")), *self._ended_early()]
        return []

    def _lease(self, lease: Lease, number: int) -> list[Effect]:
        if self._last_session >= (self.epoch, number):
            return []
        wrong = self._misplaced(lease.first_seq, lease.cursor)
        if wrong:
            return self._end_session(wrong, "sequence")
        self._last_session = self._session = (self.epoch, number)
        self.lease = lease
        self.buffer.go_to(lease.first_seq)
        self._window = SendWindow(lease.first_seq, lease.first_seq)
        self._said = self._ended_known = False
        return []  # nothing may be sent before there is credit

    def _flow(self, flow: Flow, number: int) -> list[Effect]:
        session = (self.epoch, number)
        if self._session != session or self.lease is None:
            return self._hello_again() if self._last_session < session else []
        if not self.begun and flow.durable_seq >= self.lease.first_seq:
            self.begun, self.first_seq = True, self.lease.first_seq
            self.buffer.number_from(self.first_seq, flow.durable_marks)
        self._window.widen(flow)
        return self._had(flow) if self.begun else []

    def _had(self, flow: Flow) -> list[Effect]:
        """Note which samples the broker has and which of them are safe."""
        buffer = self.buffer
        if max(flow.expected_seq, flow.durable_seq) > buffer.ever_sent_seq or flow.durable_marks > buffer.next_mark:
            return self._end_session(self._pushed_by_another(), "sequence")
        buffer.forget(flow.durable_seq)
        while buffer.marks and buffer.marks[0].number < flow.durable_marks:
            buffer.marks.popleft()
            self._said = False
        if flow.ended and (not self._ending or self._window.known_seq < buffer.next_seq or buffer.marks):
            return self._ended_early()
        self._ended_known = self._ended_known or flow.ended
        return self._move()

    def _stopped(self, message: Bye) -> list[Effect]:
        """Wait for the stopping broker to restart; samples that are not safe stay in the buffer."""
        first, self._stopping = not self._stopping, True
        self._session = None
        goodbye = self._send(Bye(reason="goodbye"))  # the broker waits for it
        return [Report("info", message.reason), goodbye] if first else [goodbye]

    def _end_session(self, error: str, code: str) -> list[Effect]:
        self._finished = True
        return [Finish(error, code)]

    def _ended_early(self) -> list[Effect]:
        self._ended_known = self._ending
        return self._end_session(
            f"{self._name}: got samples of a partition that has ended, or whose feed has, expected none: "
            f"the broker wants no more of it",
            "ended",
        )

    def _misplaced(self, seq: int, cursor: Cursor | None) -> str:
        """Return why no session can begin at sample ``seq``, after ``cursor``; empty if one can."""
        safe = self.buffer.durable_seq
        if not self.begun:
            return ""
        by_another = cursor is not None and cursor[2] == seq > self.first_seq and cursor[0] != self.incarnation
        if by_another or seq > self.buffer.ever_sent_seq:
            return self._pushed_by_another()
        if seq >= safe:
            return ""
        return (
            f"{self._name}: the broker asks for sample {seq}, which it had said was safe up to {safe}: "
            f"its log was lost or is another one; give it back its state_dir, or start a new run"
        )

    def _pushed_by_another(self) -> str:
        return (
            f"{self._name}: the broker has samples or marks that this process did not push: another one pushes to the "
            f"same partition; give each a partition of its own"
        )

    # Moving on

    def _move(self) -> list[Effect]:
        """Send the samples that credits and marks allow, then the next mark, or the end."""
        if self._session is None or not self.begun:
            return []
        effects: list[Effect] = []
        while (kept := self.buffer.next()) is not None and self._window.allows(kept.stop_seq, kept.chunk.num_bytes):
            self._window.sent_bytes += kept.chunk.num_bytes
            effects.append(self._send(self._samples(kept), self._session, kept.chunk))
            self.buffer.sent()
        if not self._said and (last := self._last_words()) is not None:
            self._said = True
            effects.append(self._send(last, self._session))
        return effects

    def _samples(self, kept: Kept) -> Samples:
        chunk = kept.chunk
        return Samples(
            stream=self.stream, partition=self.partition, base_seq=kept.base_seq, lengths_u32=chunk.lengths_u32,
            crcs_u32=chunk.crcs_u32, loss_tokens_u32=chunk.loss_tokens_u32, cursor=(self.incarnation, 0, kept.stop_seq),
            rejected=chunk.rejected, lost_tokens=chunk.lost_tokens, keep=chunk.keep,
            policy_version=chunk.policy_version,
        )  # fmt: skip

    def _last_words(self) -> Mark | Eos | None:
        """Return the mark or the end that follows the sent samples; None if more samples come first."""
        buffer = self.buffer
        if buffer.marks:
            mark = buffer.marks[0]
            if mark.seq > buffer.sent_seq:
                return None
            return Mark(
                stream=self.stream, partition=self.partition, number=mark.number, seq=mark.seq, batch=mark.batch
            )
        if not self._ending or not buffer.all_sent or self._ended_known:
            return None
        return Eos(stream=self.stream, partition=self.partition, total=self.buffer.next_seq)

    def _remind_all(self) -> list[Effect]:
        """Repeat messages that the broker may have missed: a mark, the end, or the number of sent samples."""
        if self._session is None or not self.begun:
            return []
        words: list[Message] = []
        if self._window.seems_lost(self.buffer.sent_seq):
            words.append(Sent(stream=self.stream, partition=self.partition, next_seq=self.buffer.sent_seq))
        if self._said and (last := self._last_words()) is not None:
            words.append(last)
        return [self._send(word, self._session) for word in words]

    @property
    def _key(self) -> tuple[str, int]:
        return self.stream, self.partition

    @property
    def _name(self) -> str:
        return f"stream {self.stream!r} partition {self.partition}"
