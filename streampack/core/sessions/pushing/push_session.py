"""A producer whose samples are pushed and exist once, as a pure state machine: ``handle(event) -> effects``.

One session serves one partition of one stream. Its samples cannot be read again. So ``push_buffer`` keeps each sample
until the broker reports it as safe (``durable_seq``, R1). After a gap, a new connection or a crash of the broker, the
session sends again what is missing. The buffer is bounded; the program that pushes waits for room.

The broker counts a partition's samples over all processes that ever pushed to it. A process numbers its samples from
that count on, but only once every earlier sample is safe. Otherwise a broker that lost some would count again from a
number that this process does not know. After that, a lease must begin within the samples of the buffer. A lease that
begins elsewhere is an error: the log was lost, or another process pushes to the same partition.

The session is in a ``PushPhase``, and the end of its partition in an ``EndPhase``. ``PUSH_PHASES`` and ``END_PHASES``
have the phases that may follow each. They are two machines, because the broker confirms the end for good, while leases
come and go.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from msgspec import UNSET

from streampack.core.columns.chunk_body import chunk_as
from streampack.core.model.phases import Phases
from streampack.core.model.snapshot import Cursor
from streampack.core.protocol.events import Effect, Event, Report
from streampack.core.protocol.handlers import Handlers
from streampack.core.protocol.message import Bye, Message, PartitionMessage
from streampack.core.protocol.producer_messages import (
    CommitWrite,
    Done,
    Eos,
    Flow,
    Lease,
    Mark,
    Offer,
    Revoke,
    Samples,
    Sent,
    Start,
)
from streampack.core.sessions.producer_base import SILENT, SILENT_TEXT, Chunk, Finish, Sender, SendWindow, Session
from streampack.core.sessions.pushing.push_buffer import KeptChunk, PushBuffer
from streampack.core.sessions.pushing.ticket_counts import TicketCounts

PUSHED = "pushed"
"""The source digest of a stream whose samples cannot be read again."""

KEYS_FULL = "keys_full"
"""Short name of the wait for room in the broker's index of keys."""


class Push(Event, frozen=True):
    """The program pushes a chunk, which must fit (``PushSession.room``); the broker admits all of it or nothing."""

    chunk: Chunk


class EndBatch(Event, frozen=True):
    """The program ends batch ``batch``."""

    batch: int


class WantTickets(Event, frozen=True):
    """The program wants to generate samples: it has asked for ``asked`` tickets in all."""

    asked: int


class BeginSamples(Event, frozen=True):
    """The program begins to generate ``count`` samples, with tickets that were given."""

    count: int


class GiveBack(Event, frozen=True):
    """The program will not send ``count`` of the samples that it began with policy ``version``."""

    count: int
    version: int | None


class EndPartition(Event, frozen=True):
    """The program ends the partition: no process will push to it again."""


class EndWrite(Event, frozen=True):
    """The program commits write ``write``: every sample of it is durable, and none will be pushed again."""

    write: int


class PushPhase(Enum):
    """The phases of a pushing process. In phases that are ``leased``, it holds the lease of its partition."""

    UNLEASED = ("the process has no lease", False)
    STOPPING = ("the broker has said goodbye, and no other has come yet", False)
    NUMBERING = ("samples of an earlier process are not safe, so the process's own samples have no numbers yet", True)
    SENDING = ("samples are sent; the next mark or end was not sent in this session", True)
    MARKED = ("the first mark that is not safe, or the end if there is no mark, was sent in this session", True)

    def __init__(self, text: str, leased: bool) -> None:
        self.text, self.leased = text, leased


_LEASE_LOST = frozenset({PushPhase.UNLEASED, PushPhase.STOPPING})
PUSH_PHASES = {
    PushPhase.UNLEASED: frozenset({PushPhase.NUMBERING, PushPhase.SENDING, PushPhase.STOPPING}),
    PushPhase.STOPPING: frozenset({PushPhase.UNLEASED}),
    PushPhase.NUMBERING: _LEASE_LOST | {PushPhase.NUMBERING, PushPhase.SENDING},
    PushPhase.SENDING: _LEASE_LOST | {PushPhase.SENDING, PushPhase.MARKED},
    PushPhase.MARKED: _LEASE_LOST | {PushPhase.SENDING},
}
"""The phases that may follow each. A new lease begins with ``NUMBERING`` or ``SENDING``."""


class EndPhase(Enum):
    """The phases of the end of the partition."""

    OPEN = "the program may push more samples"
    REQUESTED = "the program has ended the partition, and the broker has not confirmed that in the newest session"
    CONFIRMED = "the broker has confirmed the end, or takes no more samples"


END_PHASES = {
    EndPhase.OPEN: frozenset({EndPhase.REQUESTED}),
    EndPhase.REQUESTED: frozenset({EndPhase.CONFIRMED}),
    EndPhase.CONFIRMED: frozenset({EndPhase.REQUESTED}),
}
"""The phases that may follow each. A new lease takes a confirmation back: the broker may have lost the end."""


@dataclass(slots=True, kw_only=True)
class PushSession(Sender):
    """State of one process that pushes to ``partition`` of ``stream``; ``buffer`` holds its unsafe samples.

    ``process`` is a number below 2**62 that no other process has. Each chunk's cursor holds it, and a lease brings the
    last chunk's cursor back. So a process that was stopped for long learns that another has pushed since.
    """

    process: int
    stream: str
    partition: int
    buffer: PushBuffer
    lease: Lease | None = None
    """The newest lease, with the broker's requirements for samples."""
    write: int = 0
    """Number of the stream's current write, as the broker has said in its newest message."""
    policy_version: int | None = None
    """Version of the newest policy that trainers have published, as far as the broker has said."""
    tickets: TicketCounts = field(default_factory=TicketCounts)
    """Tickets for samples, in a paced feed."""
    first_seq: int | None = None
    """Number of this process's first sample; None while samples of earlier processes are not safe."""
    ended: bool = False
    """The broker takes no more samples: a process has ended the partition, or its feed has ended."""
    phases: Phases[PushPhase] = field(init=False)
    end_phases: Phases[EndPhase] = field(init=False)
    _session: Session = (0, 0)
    """The newest session so far."""
    _window: SendWindow = field(default_factory=lambda: SendWindow(0))
    _sent: deque[tuple[int, int, int | None]] = field(default_factory=deque)
    """Samples that are not known to be safe: (number after the last one, count, version of the policy)."""
    _policy_number: int = 0
    """Number that the current broker has given to that policy."""
    _num_starts: int = 0
    """Number of the messages about tickets."""
    _ending_write: int = -1
    """Number of the write that the program commits, until the broker has said so; -1 for none."""

    def __post_init__(self) -> None:
        Sender.__post_init__(self)
        self.phases = Phases(f"the pushing process of {self._name}", PUSH_PHASES, PushPhase.UNLEASED)
        self.end_phases = Phases(f"the end of {self._name}", END_PHASES, EndPhase.OPEN)

    @property
    def begun(self) -> bool:
        """True once this process may push: every sample of earlier processes is safe, so its own have numbers."""
        return self.first_seq is not None

    @property
    def end_requested(self) -> bool:
        """True once the program has ended the partition."""
        return self.end_phases.now is not EndPhase.OPEN

    def room(self, size: int) -> bool:
        """Return whether a chunk of ``size`` bytes may be pushed now."""
        return self.begun and self.buffer.has_room(size)

    @property
    def flushed(self) -> bool:
        """True if all pushed samples are safe, and also the end of the partition or of a write that was asked for."""
        return self.buffer.empty and self.end_phases.now is not EndPhase.REQUESTED and self._ending_write < self.write

    @property
    def stall_code(self) -> str:
        """Short name of the cause of a wait: ``SILENT`` or ``KEYS_FULL``; empty for other causes."""
        if self.is_silent:
            return SILENT
        sends = self._has_lease and self.begun and self.phases.now is not PushPhase.STOPPING
        return KEYS_FULL if sends and self._window.keys_full and not self.buffer.all_sent else ""

    def waiting_for(self) -> str:
        """Return a text that names the reason that samples are not safe yet; empty if all are safe."""
        if self.is_silent:
            return SILENT_TEXT
        if self.phases.now is PushPhase.STOPPING:
            return "another broker, because the current broker is stopping"
        if not self._has_lease:
            return f"a lease of partition {self.partition}, which another process holds or which has ended"
        if not self.begun:
            return "the broker's log to store the samples that an earlier process pushed"
        if self._next_mark_or_end() is not None and self.buffer.marks:
            return f"the broker's log to store the end of batch {self.buffer.marks[0].batch}"
        if self.stall_code == KEYS_FULL:
            return (
                "room for keys, because the broker's index of keys is full. It forgets keys when the writing job "
                "commits. Raise limits.keys in broker.yaml, or write the data in several jobs"
            )
        if not self.buffer.all_sent:
            batch = " Or other partitions have not called end_of_batch yet." if self.buffer.next_mark else ""
            return (
                f"credit, because the broker is full until the trainers, other streams or its log progress.{batch} The "
                f"broker's status shows the cause"
            )
        if not self.buffer.empty:
            first, last = self.buffer.durable_seq, self.buffer.next_seq - 1
            return f"the broker's log to store samples {first} to {last}"
        if self._ending_write >= self.write:
            return f"the broker's log to store that write {self._ending_write} is complete"
        return "" if self.flushed else "the broker's log to store the end of the partition"

    # Events and messages

    @property
    def _offered(self) -> list[Offer]:
        """The partition that the hello offers."""
        return [Offer(stream=self.stream, source_digest=PUSHED, partition=self.partition)]

    @property
    def _has_lease(self) -> bool:
        """True if the process holds the lease of its partition."""
        return self.phases.now.leased

    _events = Handlers(Sender._events)
    _messages = Handlers(Sender._messages)

    @_events.of(Push)
    def _on_push(self, event: Push) -> list[Effect]:
        """Keep a chunk of the program, and send it if credit allows."""
        if self.ended:
            return self._ended_early()
        self.buffer.put(event.chunk)
        version = event.chunk.policy_version
        self._sent.append((self.buffer.next_seq, event.chunk.num_samples, None if version is UNSET else version))
        return self._send_allowed()

    @_events.of(EndBatch)
    def _on_end_of_batch(self, event: EndBatch) -> list[Effect]:
        """Mark the end of a batch."""
        if self.ended:
            return self._ended_early()
        self.buffer.end_batch(event.batch)
        return self._send_allowed()

    @_events.of(EndPartition)
    def _on_end_of_partition(self, event: EndPartition) -> list[Effect]:
        """End the partition, once all samples are sent."""
        if not self.end_requested:
            self.end_phases.go(EndPhase.REQUESTED)
        if self.ended:
            self._confirm_end()
        return self._send_allowed()

    @_events.of(EndWrite)
    def _on_end_of_write(self, event: EndWrite) -> list[Effect]:
        """Commit a write."""
        self._ending_write = event.write
        return self._commit_write()

    @_events.of(WantTickets)
    def _on_want(self, event: WantTickets) -> list[Effect]:
        """Ask for tickets."""
        self.tickets.asked = max(self.tickets.asked, event.asked)
        return self._tell_tickets()

    @_events.of(BeginSamples)
    def _on_begin(self, event: BeginSamples) -> list[Effect]:
        """Use tickets."""
        self.tickets.begin(event.count, self.policy_version)
        return self._tell_tickets()

    @_events.of(GiveBack)
    def _on_give_back(self, event: GiveBack) -> list[Effect]:
        """Give tickets back."""
        self.tickets.give_back(event.count, event.version)
        return self._tell_tickets()

    def _forget_sessions(self) -> list[Effect]:
        """Drop the lease of the previous broker; the buffer keeps its samples."""
        self._policy_number = 0
        if self.phases.now is not PushPhase.UNLEASED:
            self.phases.go(PushPhase.UNLEASED)
        return []

    @_messages.of(Revoke)
    def _on_revoke(self, message: Revoke, fence: int) -> list[Effect]:
        """Give up the lease, if it is of this session."""
        if self._is_own(message) and self._has_lease and self._session == (self.epoch, fence):
            self.phases.go(PushPhase.UNLEASED)
        return []

    @_messages.of(Lease)
    def _on_lease(self, lease: Lease, number: int) -> list[Effect]:
        """Begin session ``number``: the buffer sends again from the first sample of the lease."""
        if not self._is_own(lease):
            return []
        if self._session >= (self.epoch, number) or self.phases.now is PushPhase.STOPPING:
            return []
        wrong = self._misplaced(lease.first_seq, lease.cursor)
        if wrong:
            return self._end_session(wrong, "sequence")
        self._session, self.lease, self.ended = (self.epoch, number), lease, False
        self.buffer.resend_from(lease.first_seq)
        self._window = SendWindow(lease.first_seq, lease.first_seq)
        self.phases.go(PushPhase.SENDING if self.begun else PushPhase.NUMBERING)
        if self.end_phases.now is EndPhase.CONFIRMED:
            self.end_phases.go(EndPhase.REQUESTED)
        return []  # nothing may be sent before there is credit

    @_messages.of(Flow)
    def _on_flow(self, flow: Flow, number: int) -> list[Effect]:
        """Take the credit of session ``number``, and send the samples that it allows."""
        if not self._is_own(flow):
            return []
        session = (self.epoch, number)
        if not self._has_lease or self._session != session or self.lease is None:
            return self._hello_if_due() if self._session < session else []
        if self.phases.now is PushPhase.NUMBERING and flow.durable_seq >= self.lease.first_seq:
            self.first_seq = self.lease.first_seq
            self.buffer.number_from(self.first_seq, flow.durable_marks)
            self.phases.go(PushPhase.SENDING)
        self._window.widen(flow)
        self.write = max(self.write, flow.write)
        effects: list[Effect] = []
        before = self.policy_version, self.tickets.granted
        if flow.policy_version is not UNSET and flow.policy_number >= self._policy_number:
            self.policy_version, self._policy_number = flow.policy_version, flow.policy_number
        if flow.granted is not UNSET:
            self.tickets.granted = max(self.tickets.granted, flow.granted)
        if before != (self.policy_version, self.tickets.granted):
            effects += self._tell_tickets()
        return effects + (self._note_progress(flow) if self.begun else [])

    def _note_progress(self, flow: Flow) -> list[Effect]:
        """Record which samples the broker has and which samples are safe; return the effects that follow."""
        buffer = self.buffer
        if max(flow.expected_seq, flow.durable_seq) > buffer.ever_sent_seq or flow.durable_marks > buffer.next_mark:
            return self._end_session(self._pushed_by_another(), "sequence")
        buffer.drop_safe(flow.durable_seq)
        effects: list[Effect] = []
        while self._sent and self._sent[0][0] <= buffer.durable_seq:  # an unsafe sample may get lost, and come later
            _, count, version = self._sent.popleft()
            if self.tickets.open:
                self.tickets.use(count, version)
                effects = self._tell_tickets()
        while buffer.marks and buffer.marks[0].number < flow.durable_marks:
            buffer.marks.popleft()
            if self.phases.now is PushPhase.MARKED:
                self.phases.go(PushPhase.SENDING)
        if flow.ended:
            self.ended = True
            unsafe = not buffer.empty and not self.end_requested
            if unsafe or self._window.known_seq < buffer.next_seq or buffer.marks:
                return self._ended_early()
            self._confirm_end()
        return effects + self._send_allowed()

    @_messages.of(Bye)
    def _on_bye(self, message: Bye, fence: int) -> list[Effect]:
        """Answer the goodbye of a broker that stops, and wait for its restart; the buffer keeps its samples."""
        goodbye = self._send(Bye(reason="goodbye"))  # the broker waits for it
        if self.phases.now is PushPhase.STOPPING:
            return [goodbye]
        self.phases.go(PushPhase.STOPPING)
        return [Report("info", message.reason), goodbye]

    @_messages.of(Done)
    def _on_done(self, message: Done, fence: int) -> list[Effect]:
        """End the session, because no trainer needs samples; with an error if samples are left."""
        goodbye = self._send(Bye(reason="goodbye"))
        if not self.begun or not self.buffer.empty:
            return [goodbye, *self._ended_early()]
        self.ended = self._finished = True
        self._confirm_end()
        return [goodbye, Finish("", "ended")]

    def _ended_early(self) -> list[Effect]:
        """End the session with an error: the broker takes no more, but samples are left."""
        self._confirm_end()
        return self._end_session(self.end_text, "ended")

    @property
    def end_text(self) -> str:
        """Error text for samples after the end."""
        return (
            f"{self._name}: got samples after the end of the partition or of its feed. The broker accepts no more "
            f"samples of this partition, whose next sample would be {self.buffer.next_seq}. Check `Producer.ended` "
            f"before you send samples"
        )

    def _confirm_end(self) -> None:
        """Record that the end needs no further message, if the program has ended the partition."""
        if self.end_phases.now is EndPhase.REQUESTED:
            self.end_phases.go(EndPhase.CONFIRMED)

    def _misplaced(self, seq: int, cursor: Cursor | None) -> str:
        """Return an error text if a lease cannot begin at sample ``seq``, after ``cursor``; empty if it can."""
        safe = self.buffer.durable_seq
        if self.first_seq is None:
            return ""
        by_another = cursor is not None and cursor[2] == seq > self.first_seq and cursor[0] != self.process
        if by_another or seq > self.buffer.ever_sent_seq:
            return self._pushed_by_another()
        if seq >= safe:
            return ""
        return (
            f"{self._name}: the broker asks for sample {seq}, but its log already had all samples before {safe}. "
            f"The log was lost or replaced. Restore the broker's state_dir, or start a new run."
        )

    def _pushed_by_another(self) -> str:
        """Return the error text for a partition to which two processes push."""
        return (
            f"{self._name}: the broker has samples or marks that this process did not push. Another process pushes to "
            f"the same partition. Give each process a partition of its own."
        )

    # Sending

    @property
    def _may_send(self) -> bool:
        """True if the process holds a lease and its samples have numbers."""
        return self.phases.now in (PushPhase.SENDING, PushPhase.MARKED)

    def _send_allowed(self) -> list[Effect]:
        """Send the samples that credits and marks allow, then the next mark, or the end."""
        if not self._may_send:
            return []
        effects: list[Effect] = []
        while (kept := self.buffer.next_chunk()) is not None and self._window.allows(
            kept.stop_seq, kept.chunk.num_bytes
        ):
            self._window.sent_bytes += kept.chunk.num_bytes
            effects.append(self._send(self._samples(kept), self._session, kept.chunk))
            self.buffer.next_was_sent()
        if self.phases.now is PushPhase.SENDING and (last := self._next_mark_or_end()) is not None:
            self.phases.go(PushPhase.MARKED)
            effects.append(self._send(last, self._session))
        return effects

    def _samples(self, kept: KeptChunk) -> Samples:
        """Return the message for a chunk of the buffer."""
        return chunk_as(
            Samples, kept.chunk, stream=self.stream, partition=self.partition, base_seq=kept.base_seq,
            cursor=(self.process, 0, kept.stop_seq), pass_ended=False,
        )  # fmt: skip

    def _next_mark_or_end(self) -> Mark | Eos | None:
        """Return the mark or the end that follows the sent samples; None if samples come first, or neither is due."""
        buffer = self.buffer
        if buffer.marks:
            mark = buffer.marks[0]
            if mark.seq > buffer.sent_seq:
                return None
            return Mark(
                stream=self.stream, partition=self.partition, number=mark.number, seq=mark.seq, batch=mark.batch
            )
        if self.end_phases.now is not EndPhase.REQUESTED or not buffer.all_sent:
            return None
        return Eos(stream=self.stream, partition=self.partition, total=self.buffer.next_seq)

    def _repeat_unconfirmed(self) -> list[Effect]:
        """Repeat messages that the broker may have missed: a mark, the end, or the number of sent samples."""
        if not self._may_send:
            return []
        words: list[Message] = []
        if self._window.seems_lost(self.buffer.sent_seq):
            words.append(Sent(stream=self.stream, partition=self.partition, next_seq=self.buffer.sent_seq))
        if self.phases.now is PushPhase.MARKED and (last := self._next_mark_or_end()) is not None:
            words.append(last)
        return [self._send(word, self._session) for word in words] + self._commit_write() + self._tell_tickets()

    def _tell_tickets(self) -> list[Effect]:
        """Report the counts of tickets, if the program has ever asked for one."""
        counts = self.tickets
        if not self._may_send or not counts.asked:
            return []
        self._num_starts += 1
        start = Start(
            stream=self.stream, partition=self.partition, asked=counts.asked, granted=counts.granted, used=counts.used,
            open=counts.may_be_open(self.policy_version),
            together=counts.asked - counts.begun if counts.asked - counts.begun > 1 else UNSET,
            number=self._num_starts,
        )  # fmt: skip
        return [self._send(start, self._session)]

    def _commit_write(self) -> list[Effect]:
        """Send the commit of a write, if the program has asked for it and the broker has not confirmed it."""
        if not self._may_send or self._ending_write < self.write:
            return []
        commit = CommitWrite(stream=self.stream, partition=self.partition, write=self._ending_write)
        return [self._send(commit, self._session)]

    def _is_own(self, message: PartitionMessage) -> bool:
        """Return whether a message is about the partition of this process."""
        return (message.stream, message.partition) == (self.stream, self.partition)

    @property
    def _name(self) -> str:
        """Text that names the stream and the partition, for errors."""
        return f"stream {self.stream!r} partition {self.partition}"
