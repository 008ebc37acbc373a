"""A reader of one rank, its phases, the connection that receives its steps, and the sender of messages to readers.

A *receiver* is a reader's own connection, or a relay's for the readers of its host. The readers keep their ranks, names
and progress; the parts of steps go to the relay once, for all of them together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from streampack.core.deal.node_parts import NodeRanks
from streampack.core.deal.part_flow import PartFlow
from streampack.core.model.mesh import Mesh, ReadBy
from streampack.core.model.phases import Phases
from streampack.core.model.rules import Rules
from streampack.core.model.snapshot import Snapshot
from streampack.core.protocol.effects import SendTrainer
from streampack.core.protocol.events import Effect, Report
from streampack.core.protocol.message import Envelope, Identity, Message, Reject
from streampack.core.protocol.trainer_messages import Attach
from streampack.core.stats.data_wait import Starvation

Ranks = tuple[int, int, int, int]
"""A rank of the mesh: (dp, cp, tp, pp)."""


@dataclass(slots=True, eq=False)
class Receiver:
    """One connection that receives parts of steps.

    Attributes:
        peer: Name of the connection.
        is_relay: True if the connection is a relay's.
        host: Host of a relay's readers, once one has attached; empty for a reader.
        fence: The attempt whose parts it receives.
        readers: The readers that take part in the attempt, by name.
        node: The ranks whose parts a relay gets; None until it asks for parts in this attempt.
        flow: The parts that were sent.
        heard: Time of a relay's last ping or request, in seconds.
    """

    peer: bytes
    is_relay: bool = False
    host: str = ""
    fence: int = 0
    readers: dict[str, Reader] = field(default_factory=dict)
    node: NodeRanks | None = None
    flow: PartFlow = field(default_factory=PartFlow)
    heard: float = 0.0

    @property
    def mesh(self) -> Mesh:
        """The mesh, with the rank of one of the readers; there must be one."""
        return next(iter(self.readers.values())).mesh

    def choose_ranks(self, rules: Rules, layout: str) -> None:
        """Fix the ranks of a relay's parts: those of the readers that take part now."""
        self.node = NodeRanks.of((reader.mesh for reader in self.readers.values()), rules.all_fields, layout)


class ReaderPhase(Enum):
    """The phases of a reader.

    ``holds``: the reader holds its rank. ``ready``: the broker knows its first step, and has the snapshot for it.
    """

    ATTACHING = ("the broker is checking the first message of the reader", False, False)
    CLAIMS = ("the reader waits for its rank", False, False)
    CLAIMS_SNAPSHOT = ("the reader waits for its rank and for the snapshot of its checkpoint", False, False)
    CLAIMS_READY = ("the reader is ready and waits until its rank is free", False, True)
    HOLDS = ("the reader has its rank but has not sent its first step", True, False)
    HOLDS_SNAPSHOT = ("the reader has its rank and waits for the snapshot of its checkpoint", True, False)
    HOLDS_READY = ("the reader has its rank and waits for an attempt to begin", True, True)
    ENTERED = ("the reader takes part in the attempt", True, True)
    GONE = ("the reader has left", False, False)

    def __init__(self, text: str, holds: bool, ready: bool) -> None:
        self.text, self.holds, self.ready = text, holds, ready


_PLACES = frozenset({ReaderPhase.CLAIMS_SNAPSHOT, ReaderPhase.CLAIMS_READY})
_HELD_PLACES = frozenset({ReaderPhase.HOLDS_SNAPSHOT, ReaderPhase.HOLDS_READY})
_WITH_RANK = {
    ReaderPhase.CLAIMS: ReaderPhase.HOLDS,
    ReaderPhase.CLAIMS_SNAPSHOT: ReaderPhase.HOLDS_SNAPSHOT,
    ReaderPhase.CLAIMS_READY: ReaderPhase.HOLDS_READY,
}
READER_PHASES = {
    ReaderPhase.ATTACHING: _PLACES | {ReaderPhase.CLAIMS},
    ReaderPhase.CLAIMS: _PLACES | {ReaderPhase.HOLDS, ReaderPhase.GONE},
    ReaderPhase.CLAIMS_SNAPSHOT: _PLACES | {ReaderPhase.HOLDS_SNAPSHOT, ReaderPhase.GONE},
    ReaderPhase.CLAIMS_READY: _PLACES | {ReaderPhase.HOLDS_READY, ReaderPhase.GONE},
    ReaderPhase.HOLDS: _HELD_PLACES | {ReaderPhase.GONE},
    ReaderPhase.HOLDS_SNAPSHOT: _HELD_PLACES | {ReaderPhase.GONE},
    ReaderPhase.HOLDS_READY: _HELD_PLACES | {ReaderPhase.ENTERED, ReaderPhase.GONE},
    ReaderPhase.ENTERED: _HELD_PLACES | {ReaderPhase.GONE},
    ReaderPhase.GONE: frozenset[ReaderPhase](),
}
"""The phases that may follow each. A reader begins anew (``HOLDS_READY``) for another iteration, or after a restart."""


@dataclass(slots=True, eq=False)
class Reader:
    """A process that reads the steps of one rank.

    Attributes:
        name: Name of the process; no other process has it.
        peer: Name of the connection; through a relay, its address there (``relay_messages.relayed``).
        receiver: The connection that receives its steps.
        route_changes: Times that it has changed its way to the broker, from its last ``Attach``.
        where: Host and process id, as host:pid.
        mesh: Sizes of the mesh, and the reader's rank.
        readers: The ranks of the mesh that read.
        heard: Time of its last message, in seconds.
        since: Time since which it waits for its rank, or for an attempt.
        phases: Its phase, and those before.
        iteration: Number of the iteration over the feed that it asks for.
        first_step: Step at which it begins.
        chain: Digest of the steps before ``first_step``, as the reader knows it; empty if it does not.
        snapshot: Snapshot of the checkpoint at which it begins.
        pending: Its last ``Attach``, while the snapshot for it is missing.
        going_on: Lineage to which the reader was attached before; -1 if it was not attached.
        fence: The last attempt that the reader knows.
        have_upto: Every step before this step has arrived.
        probed: Time of the last ``Probe``.
        stats: The client's metrics.
        starvation: Its data wait, by cause.
        knows_stages: True if it builds each step by the step's own rules.
        went_silent: True if it has lost its rank by its silence, so that it may come back.
    """

    name: str
    peer: bytes
    receiver: Receiver
    where: str
    mesh: Mesh
    readers: ReadBy
    heard: float
    since: float
    phases: Phases[ReaderPhase] = field(init=False)
    iteration: int = 0
    first_step: int = 0
    chain: bytes = b""
    snapshot: Snapshot | None = None
    pending: Attach | None = None
    going_on: int = -1
    fence: int = 0
    have_upto: int = 0
    probed: float = -1.0
    route_changes: int = 0
    stats: dict[str, float] = field(default_factory=dict)
    starvation: Starvation | None = None
    went_silent: bool = False
    knows_stages: bool = False

    def __post_init__(self) -> None:
        self.phases = Phases(f"reader {self.where} of rank {self.mesh}", READER_PHASES, ReaderPhase.ATTACHING)

    @property
    def phase(self) -> ReaderPhase:
        """The reader's phase now."""
        return self.phases.now

    @property
    def holds(self) -> bool:
        """True if the reader holds its rank."""
        return self.phases.now.holds

    @property
    def ready(self) -> bool:
        """True if the broker knows the reader's first step, and has the snapshot for it."""
        return self.phases.now.ready

    @property
    def entered(self) -> bool:
        """True if the reader takes part in the attempt."""
        return self.phases.now is ReaderPhase.ENTERED

    @property
    def host(self) -> str:
        """Name of the reader's host."""
        return self.where.rpartition(":")[0]

    def report(self, level: Literal["info", "warning"], text: str, feed: str) -> Report:
        """Return the effect that writes a line about this reader to the log."""
        return Report(level, text, feed=feed, rank=self.mesh.rank, host=self.host, attempt=self.fence or None)

    def begin(self, message: Attach, now: float, snapshot: Snapshot | None, waits: bool) -> None:
        """Take the first step, the iteration and the snapshot of an ``Attach``; it ``waits`` if that is missing."""
        self.iteration, self.first_step = message.iteration, message.next_step
        self.chain, self.snapshot, self.going_on = message.chain, snapshot, message.going_on
        self.pending = message if waits else None
        self.since = now
        if waits:
            self.phases.go(ReaderPhase.HOLDS_SNAPSHOT if self.holds else ReaderPhase.CLAIMS_SNAPSHOT)
        elif message.ready:
            self.phases.go(ReaderPhase.HOLDS_READY if self.holds else ReaderPhase.CLAIMS_READY)
        else:
            self.phases.go(ReaderPhase.CLAIMS)

    def take_rank(self) -> None:
        """Change to the phase of a reader that holds its rank."""
        self.phases.go(_WITH_RANK[self.phase])

    def enter(self, attempt: int) -> None:
        """Change to the phase of a reader that takes part in the attempt of this number."""
        self.phases.go(ReaderPhase.ENTERED)
        self.fence, self.snapshot = attempt, None


class ReaderLink:
    """Wraps messages to the readers of one feed as effects, with the run, the broker's epoch and the feed."""

    def __init__(self, identity: Identity, feed: str) -> None:
        self.feed, self._identity = feed, identity
        self.refused = 0
        """Number of clients that were rejected."""

    def envelope(self, message: Message, fence: int) -> Envelope:
        """Return an envelope for a message of attempt ``fence``."""
        return self._identity.envelope(message, fence)

    def send(self, reader: Reader, message: Message) -> list[Effect]:
        """Send a message to a reader, with the last attempt that the reader knows as the fence."""
        return [SendTrainer(reader.peer, self.envelope(message, reader.fence))]

    def send_to(self, receiver: Receiver, message: Message) -> list[Effect]:
        """Send a message about parts of steps to a reader or a relay."""
        return [SendTrainer(receiver.peer, self.envelope(message, receiver.fence))]

    def reject(
        self, peer: bytes, code: str, detail: str, attempt: int, rank: str | None = None, host: str | None = None
    ) -> list[Effect]:
        """Send a client a rejection with its reason, and log it; ``rank`` and ``host`` name the client, if known."""
        self.refused += 1
        reject = SendTrainer(peer, self.envelope(Reject(code=code, detail=detail[:2000]), attempt))
        return [Report("warning", f"refused a client: {detail}", feed=self.feed, rank=rank, host=host), reject]
