"""The trainers' side of the broker: what its readers say, and what the feed has to tell them.

A reader asks for a rank (``seats``), takes part in an attempt (``attempts``) and is served its steps (``serving``).
This module hears its messages and its silence, asks the feed for the state of a checkpoint, and tells when one is
noted as durable. It knows steps by number, never how they are formed.
"""

from __future__ import annotations

from collections.abc import Callable

from streampack.core.attempts import Attempts, diverged
from streampack.core.effects import SendTrainer
from streampack.core.events import Effect
from streampack.core.messages import (
    AskSnapshot,
    AskState,
    Attach,
    Brought,
    Bye,
    Commit,
    Committed,
    Envelope,
    Fenced,
    Get,
    ReaderPing,
    State,
    Who,
)
from streampack.core.plan import MAX_PEERS
from streampack.core.rules import Rules
from streampack.core.samples import SampleTable
from streampack.core.seats import Reader, refusal
from streampack.core.serving import RESEND_S
from streampack.core.snapshot import Snapshot
from streampack.core.starvation import Missing
from streampack.core.steps import Step

TELL_S = 1.0
"""Readers that wait are told what for this often, and when they ping; many are told less often."""
MOST_BROUGHT = 4
"""Snapshots of checkpoints, each of megabytes perhaps, that readers wait with: those of an attempt bring one."""
ASK_S = 2.0
"""One that was asked for its snapshot and attaches again after so long is asked again."""
TOO_MANY = (
    f"got a snapshot that differs from those of {MOST_BROUGHT} checkpoints that other readers have brought, expected "
    f"all ranks to bring the same: load one checkpoint on every rank"
)
SILENT_S = 15.0
"""A reader not heard of for so long has lost its rank."""
SILENT_PINGS = 3
"""Or for so many pings, where that is longer."""


class Readers(Attempts):
    """One feed's readers and the steps kept for them.

    What the feed does for them: ``waiting_for`` says why the next step is not there, ``unfit`` and ``rewind`` are the
    attempts', ``state_of`` gives a checkpoint's state, or what is done to know it, which ends with ``tell_states``,
    and ``commit`` notes that a checkpoint is durable and says so with ``committed``.
    """

    def __init__(
        self, run: int, epoch: int, feed: str, rules: Rules, layout: str, table: SampleTable,
        waiting_for: Callable[[], Missing], unfit: Callable[[int, Snapshot | None], tuple[str, str] | None],
        rewind: Callable[[int, Snapshot | None, bool], list[Effect]],
        state_of: Callable[[int], State | list[Effect]], commit: Callable[[int], list[Effect]],
        max_readers: int = MAX_PEERS, leaving_bytes: int = 64 << 20,
    ) -> None:  # fmt: skip
        super().__init__(run, epoch, feed, rules, layout, table, waiting_for, unfit, rewind, leaving_bytes)
        self._state_of, self._commit, self._max_readers = state_of, commit, max_readers
        self._asked: dict[bytes, int] = {}  # a step whose state a peer waits for
        self._commits: dict[bytes, int] = {}  # what a peer waits to hear that it is committed
        self._brought: dict[bytes, Snapshot] = {}  # of checkpoints, each kept once, by digest
        self._asked_for: dict[bytes, tuple[bytes, float]] = {}  # of which peer a snapshot was asked, and when
        self._told = 0.0

    # What the feed adds

    def begin(self, step: int) -> None:
        """An earlier broker of this run had served the steps before ``step``."""
        self.released_upto = self.formed_upto = step

    def add(self, step: Step, skipped: bool = False) -> list[Effect]:
        """A step was formed: serve whoever waits for it; of one that is ``skipped``, that it is passed over."""
        self._keep(step, skipped)
        return self.check(self.formed_upto, step.chain) + self._release() + self._serve_all()

    def committed(self, step: int) -> list[Effect]:
        """A checkpoint that begins at ``step``, and all before it, are noted as durable: tell whoever said so."""
        effects: list[Effect] = []
        for peer in [peer for peer, asked in self._commits.items() if asked <= step]:
            reader, asked = self._seats.at(peer), self._commits.pop(peer)
            if reader is not None:
                effects += self._send(reader, Committed(feed=self._feed, step=asked))
        return effects

    def forget_chains(self, step: int) -> None:
        """Other steps follow from ``step`` on."""
        self._chains = {at: chain for at, chain in self._chains.items() if at <= step}

    def drain(self) -> list[Effect]:
        """No further step will be formed: readers get what there is, then a farewell."""
        self.draining = True
        return [e for reader in self._seats for e in (self._serve(reader) if reader.entered else self._wait(reader))]

    # What comes in

    def receive(self, peer: bytes, envelope: Envelope, now: float) -> list[Effect]:
        """A client's message."""
        self._now = now
        message = envelope.message
        if isinstance(message, Attach):
            return self._attach(peer, message)
        if isinstance(message, Bye):
            return self.leave(peer, message.reason or "said goodbye")
        reader = self._seats.at(peer)
        assert reader is not None
        if isinstance(message, Brought):
            return self._bring(reader, message)
        if isinstance(message, AskState):
            self._asked[peer] = message.step
            return self._tell_state(reader)
        if isinstance(message, Commit):
            self._commits[peer] = message.step
            return self._commit(message.step)
        if (envelope.epoch, envelope.fence) != (self.epoch, reader.fence):
            return self._answer(reader)
        reader.heard = now
        if isinstance(message, ReaderPing):
            self._note_figures(reader, message)
        if not reader.entered:
            return self._wait_for_ready(reader) if isinstance(message, Get) else []
        if isinstance(message, Get):
            return self._heard(reader) + self._get(reader, message)
        if isinstance(message, ReaderPing):
            return self._heard(reader) + self._ping(reader, message)
        return self._reject(peer, "protocol", f"got {type(message).__name__} from a client")

    def tell_states(self) -> list[Effect]:
        """What was not at hand may be now."""
        return [e for peer in list(self._asked) if (reader := self._seats.at(peer)) for e in self._tell_state(reader)]

    def _tell_state(self, reader: Reader) -> list[Effect]:
        state = self._state_of(self._asked[reader.peer])
        if isinstance(state, list):
            return state
        del self._asked[reader.peer]
        return self._send(reader, state)

    def leave(self, peer: bytes, why: str) -> list[Effect]:
        """A peer has gone, whether or not it was known."""
        reader = self._seats.at(peer)
        return [] if reader is None else self._leave(reader, why)

    def knows(self, peer: bytes) -> bool:
        """Has ``peer`` attached here?"""
        return self._seats.at(peer) is not None

    def peer_of(self, name: str) -> bytes | None:
        """Where the reader of this name speaks from."""
        reader = self._seats.named(name)
        return None if reader is None else reader.peer

    @property
    def peers(self) -> list[bytes]:
        """Where those that hold or claim a rank speak from."""
        return [reader.peer for reader in self._seats]

    def tick(self, now: float) -> list[Effect]:
        """Drop readers that fell silent; decide claims; tell those that wait what they wait for."""
        self._now = now
        self._news = 0
        self._why.clear()
        effects: list[Effect] = []
        ping_s = self.ping_s
        silent_s = max(SILENT_S, SILENT_PINGS * ping_s)
        for reader in self._seats:
            if now - reader.heard > silent_s:
                effects += self._leave(reader, f"silent for {silent_s:.0f} s")
        effects += self._settle() + self._serve_held_back()  # some that were waited for may have left
        if now - self._told >= max(TELL_S, ping_s):
            self._told = now
            return effects + [e for reader in self._seats if not self._is_behind(reader) for e in self._wait(reader)]
        return effects + self.tell_starving()

    def _is_behind(self, reader: Reader) -> bool:
        """Does it wait for bytes that are on their way? It is told of them when it pings."""
        return bool(reader.queued) and not self.formed_upto <= reader.sent_upto < reader.want_stop

    @property
    def num_readers(self) -> int:
        """Processes that hold or claim a rank."""
        return len(self._seats)

    @property
    def num_ranks(self) -> int:
        """Ranks of the mesh that read, whether they are there or not; 0 before the first one came."""
        return self._seats.num_ranks

    @property
    def absent(self) -> str:
        """The ranks that nobody holds, for a person; empty where there are none."""
        ranks = [each for each in self._seats.ranks() if each not in self._seats.held]
        names = self._seats.names_of(ranks, len(ranks))
        return f"{len(ranks)} of {self.num_ranks} ranks are not there: {names}" if ranks else ""

    # Taking a rank

    def _attach(self, peer: bytes, message: Attach) -> list[Effect]:
        if message.reader in self._seats.fenced:
            detail = self._seats.fenced[message.reader]
            return [SendTrainer(peer, self._envelope(Fenced(feed=self._feed, detail=detail), 0))]
        reader = self._seats.named(message.reader)
        if reader is not None and (reader.mesh, reader.readers) == (message.mesh, message.readers):
            return self._again(reader, peer, message)
        unfit = refusal(message, self._rules, self._layout)
        if unfit:
            return self._reject(peer, "mesh", unfit, message.mesh, message.host)
        if reader is None and self._is_full(message):
            return self._reject(peer, "too_many", (
                f"got one reader more than the {self._max_readers} that may read feed {self._feed!r} at a time, "
                f"expected no more: stop the others, or raise limits.peers in broker.yaml"
            ), message.mesh, message.host)  # fmt: skip
        waits, snapshot = self._awaits(message), self._brought.get(message.snapshot_digest)
        if waits and self._too_many(message.snapshot_digest):
            return self._reject(peer, "snapshot", TOO_MANY, message.mesh, message.host)
        if message.ready and not waits and (gone := self._unfit(message.next_step, snapshot)):
            return self._reject(peer, *gone, message.mesh, message.host)
        effects = [] if reader is None else self._leave(reader, "it took another rank")
        effects += self.leave(peer, "its peer took another rank")
        before = reader or self._seats.held_last(message.reader, message.mesh.ranks)
        reader = Reader(
            message.reader, peer, f"{message.host}:{message.pid}", message.mesh, message.readers, self._now, self._now
        )  # fmt: skip
        reader.starvation = message.starvation  # of its whole life, much of it at another broker perhaps
        if before is not None:  # its counts go on
            reader.stats, reader.starvation = before.stats, before.starvation
        reader.begin(message, self._now, snapshot, waits)
        if not waits and self._has_diverged(reader):
            return effects + self._reject(peer, "diverged", diverged(reader, self._rules), message.mesh, message.host)
        self._seats.add(reader)
        effects += self._ask_for_snapshot(reader)
        return effects + (self._wait(reader) if self._seats.in_the_way(reader) else self._seat(reader))

    def _is_full(self, message: Attach) -> bool:
        """May no other process come? One that claims a rank is to replace its holder, and is not one more: as many may
        claim ranks as may hold them."""
        seats = self._seats
        there = seats.claims if seats.in_the_way(message) else seats.held
        return len(there) >= self._max_readers

    def _awaits(self, message: Attach) -> bool:
        """Is the snapshot not here that a reader begins with?"""
        return message.ready and message.snapshot_digest not in (b"", *self._brought)

    def _too_many(self, digest: bytes) -> bool:
        """Do readers wait with ``MOST_BROUGHT`` other snapshots? Those that nobody waits with are forgotten."""
        held = {id(reader.snapshot) for reader in self._seats}
        self._brought = {known: snapshot for known, snapshot in self._brought.items() if id(snapshot) in held}
        pending = {reader.pending.snapshot_digest for reader in self._seats if reader.pending is not None}
        self._asked_for = {known: asked for known, asked in self._asked_for.items() if known in pending}
        return len({*self._brought, *pending} - {digest}) >= MOST_BROUGHT

    def _ask_for_snapshot(self, reader: Reader) -> list[Effect]:
        """Ask for the snapshot that a reader waits with: this reader, unless another of its peers was asked."""
        if reader.pending is None:
            return []
        digest = reader.pending.snapshot_digest
        peer, when = self._asked_for.get(digest, (reader.peer, -ASK_S))
        # One that was asked and attaches again later has sent nothing: connections keep the order of messages.
        late = peer == reader.peer and self._now >= when + ASK_S
        asked = self._seats.at(peer)
        if not late and asked is not None and asked.pending is not None:
            return []
        self._asked_for[digest] = reader.peer, self._now
        return self._send(reader, AskSnapshot(feed=self._feed, digest=digest))

    def _bring(self, reader: Reader, message: Brought) -> list[Effect]:
        """A snapshot has come: those that waited with it are ready now."""
        reader.heard = self._now
        if message.digest not in self._asked_for:
            return []
        if message.snapshot.digest != message.digest:
            return self._refuse(reader, "snapshot", "got a snapshot of another digest than it attached with")
        del self._asked_for[message.digest]
        self._brought[message.digest] = message.snapshot
        effects: list[Effect] = []
        for each in self._seats:
            if each.pending is not None and each.pending.snapshot_digest == message.digest:
                effects += self._again(each, each.peer, each.pending)
        return effects

    def _again(self, reader: Reader, peer: bytes, message: Attach) -> list[Effect]:
        """Said again, or it is ready now, or for another round; an older copy of what it said changes nothing."""
        if message.round < reader.round or (reader.ready and not message.ready):
            return []
        effects: list[Effect] = []
        if self._seats.at(peer) is not reader:
            effects += self.leave(peer, "its peer took another rank")
            self._seats.move(reader, peer)
            self._forget_queue(reader)  # it went with the connection
            reader.resent_at = -RESEND_S
        reader.heard = self._now
        if not message.ready or (reader.ready and message.round == reader.round):
            return effects + self._answer(reader)
        if self._awaits(message):
            before = reader.pending
            if before is None or (before.round, before.snapshot_digest) != (message.round, message.snapshot_digest):
                if self._too_many(message.snapshot_digest):
                    return effects + self._refuse(reader, "snapshot", TOO_MANY)
                self._forget_queue(reader)
                reader.begin(message, self._now, None, waits=True)
            return effects + self._ask_for_snapshot(reader) + self._wait(reader)
        snapshot = self._brought.get(message.snapshot_digest)
        if gone := self._unfit(message.next_step, snapshot):
            return effects + self._refuse(reader, *gone)
        self._forget_queue(reader)  # out of its attempt, it confirms nothing of that any more
        reader.begin(message, self._now, snapshot, waits=False)
        if self._has_diverged(reader):
            return effects + self._refuse(reader, "diverged", diverged(reader, self._rules))
        return effects + (self._arrive(reader) if reader.holds else self._wait(reader))

    def _leave(self, reader: Reader, why: str) -> list[Effect]:
        self._commits.pop(reader.peer, None)
        self._asked.pop(reader.peer, None)
        return super()._leave(reader, why)

    def _wait_for_ready(self, reader: Reader) -> list[Effect]:
        """It asks for steps and is in no attempt: it waits for one, or has yet to say (again) where it begins."""
        return self._wait(reader) if reader.ready and not reader.fence else self._send(reader, Who())
