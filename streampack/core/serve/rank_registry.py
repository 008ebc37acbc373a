"""Who holds which rank of the trainers' mesh, and who wants one.

A reader is a process. Its name is its own for as long as it lives. It *holds* its rank while it is heard. Another
process that asks for that rank *claims* it. If the holder is heard after the claim came, two processes are alive, and
the second is refused. A holder that was silent for ``CLAIM_S`` has lost the rank and is *fenced*: the broker tells it
so, should it wake up.

Ranks of two meshes are never held at once, so a claim for another mesh is a claim for all ranks that are held. The
registry knows nothing of steps but where each reader begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice, product
from math import prod
from typing import Literal

from streampack.core.deal.mesh_validation import mesh_refusal
from streampack.core.model.mesh import Mesh, ReadBy
from streampack.core.model.phases import Phases
from streampack.core.model.rules import Rules
from streampack.core.model.snapshot import Snapshot
from streampack.core.protocol.events import Report
from streampack.core.protocol.trainer_messages import Attach
from streampack.core.stats.data_wait import Starvation

CLAIM_S = 3.0
"""A holder not heard of for so long loses its rank to one that claims it, where pings come every second."""
RESTART_S = 10.0
"""So long may the trainers of an attempt take to die when others come to begin a new one."""
MAX_RANKS = 1 << 17
"""Of a mesh: bounds what is believed of a peer."""

Ranks = tuple[int, int, int, int]


class ReaderPhase(Enum):
    """How far a reader is: with its rank, and with the place where it begins.

    ``holds``: its rank is its own. ``ready``: it has said where it begins, and all that it needs is here.
    """

    ATTACHING = ("its first message is being judged", False, False)
    CLAIMS = ("waits for its rank", False, False)
    CLAIMS_SNAPSHOT = ("waits for its rank and for its checkpoint's snapshot", False, False)
    CLAIMS_READY = ("waits for its rank, and is ready", False, True)
    HOLDS = ("has its rank, and has not said where it begins", True, False)
    HOLDS_SNAPSHOT = ("has its rank, and waits for its checkpoint's snapshot", True, False)
    HOLDS_READY = ("has its rank, and waits for an attempt", True, True)
    ENTERED = ("takes part in the attempt", True, True)
    GONE = ("has left", False, False)

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
"""The phases that may follow each. A reader begins anew (``HOLDS_READY``) for another round, or after a restart."""


@dataclass(slots=True, eq=False)
class Reader:
    """A trainer's process, and how far it was served."""

    name: str
    peer: bytes
    where: str
    mesh: Mesh
    readers: ReadBy
    heard: float
    since: float
    """When it began to wait for what it wants now: its rank, or an attempt to take part in."""
    phases: Phases[ReaderPhase] = field(init=False)
    round: int = 0
    first_step: int = 0
    chain: bytes = b""
    """Digest of the steps before ``first_step``, as the reader knows them; empty if it does not."""
    snapshot: Snapshot | None = None
    """Of the checkpoint that it begins with."""
    pending: Attach | None = None
    """What it said last, while the snapshot that it names is not here."""
    going_on: int = -1
    fence: int = 0
    """The attempt that it was last told of."""
    sent_upto: int = 0
    """Steps before are sent, and of this one the parts before ``sent_part``."""
    sent_part: int = 0
    ever_sent: tuple[int, int] = (0, 0)
    """The same of all that was ever sent in this attempt: what is sent below is sent again."""
    queued: deque[tuple[int, int, int]] = field(default_factory=deque)
    """(step, part, bytes) of what is sent and not confirmed, in order."""
    queued_bytes: int = 0
    unreached: bool = False
    """A part for it could not be sent: none is, until it is heard again."""
    want_stop: int = 0
    resend: int = 0
    resent_at: float = -1.0
    have_upto: int = 0
    probed: float = -1.0
    stats: dict[str, float] = field(default_factory=dict)
    starvation: Starvation | None = None

    def __post_init__(self) -> None:
        self.phases = Phases(f"reader {self.where} of rank {self.mesh}", READER_PHASES, ReaderPhase.ATTACHING)

    @property
    def phase(self) -> ReaderPhase:
        """How far it is."""
        return self.phases.now

    @property
    def holds(self) -> bool:
        """Its rank is its own."""
        return self.phases.now.holds

    @property
    def ready(self) -> bool:
        """It has said where it begins, and all that it needs is here."""
        return self.phases.now.ready

    @property
    def entered(self) -> bool:
        """It takes part in the attempt that is served."""
        return self.phases.now is ReaderPhase.ENTERED

    @property
    def host(self) -> str:
        return self.where.rpartition(":")[0]

    def report(self, level: Literal["info", "warning"], text: str, feed: str) -> Report:
        """A line for the log that is about it."""
        return Report(level, text, feed=feed, rank=self.mesh.rank, host=self.host, attempt=self.fence or None)

    def begin(self, message: Attach, now: float, snapshot: Snapshot | None, waits: bool) -> None:
        """Take what it says of where it begins. It ``waits`` where the snapshot that it names is not here."""
        self.round, self.first_step = message.round, message.next_step
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
        """Its rank is its own from now on."""
        self.phases.go(_WITH_RANK[self.phase])

    def enter(self, attempt: int) -> None:
        """Take part in an attempt."""
        self.phases.go(ReaderPhase.ENTERED)
        self.fence, self.snapshot = attempt, None


class RankRegistry:
    """The ranks of one mesh at a time: those ``held``, by rank, and the claims to them, oldest first."""

    def __init__(self) -> None:
        self.now = 0.0
        """Time of the last event, in seconds."""
        self.held: dict[Ranks, Reader] = {}
        self.claims: dict[str, Reader] = {}
        self.fenced: dict[str, str] = {}
        """Why a process has lost its rank for good, by its name."""
        self.num_ranks = 0
        """That read, of the mesh whose ranks are held, or were last."""
        self._mesh: tuple[Ranks, ReadBy] | None = None
        self._names: dict[str, Reader] = {}
        self._peers: dict[bytes, Reader] = {}
        self._all_held: list[Reader] | None = None
        self._last: dict[Ranks, Reader] = {}  # who held each rank last, of this mesh

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[Reader]:
        """Every reader, whether or not it holds its rank."""
        return iter(list(self._names.values()))

    def named(self, name: str) -> Reader | None:
        return self._names.get(name)

    def at(self, peer: bytes) -> Reader | None:
        return self._peers.get(peer)

    def add(self, reader: Reader) -> None:
        """A process that was not known claims its rank."""
        self._names[reader.name] = self._peers[reader.peer] = self.claims[reader.name] = reader

    def held_last(self, name: str, ranks: Ranks) -> Reader | None:
        """What a process was that held this rank last, and has left it."""
        last = self._last.get(ranks)
        return last if last is not None and last.name == name else None

    def move(self, reader: Reader, peer: bytes) -> None:
        """It speaks over another connection now."""
        self._peers.pop(reader.peer, None)
        reader.peer, self._peers[peer] = peer, reader

    def remove(self, reader: Reader) -> None:
        """It is gone; its rank is free."""
        self._names.pop(reader.name, None)
        self.claims.pop(reader.name, None)
        if self._peers.get(reader.peer) is reader:
            del self._peers[reader.peer]
        if self.held.get(reader.mesh.ranks) is reader:
            del self.held[reader.mesh.ranks]
            self._all_held = None
        reader.phases.go(ReaderPhase.GONE)

    def in_the_way(self, reader: Reader | Attach) -> list[Reader]:
        """Those that hold what it claims: its rank, or any rank of another mesh; these are one list for all who do."""
        if self.is_foreign(reader):
            if self._all_held is None:
                self._all_held = list(self.held.values())
            return self._all_held
        holder = self.held.get(reader.mesh.ranks)
        return [] if holder is None else [holder]

    def is_foreign(self, reader: Reader | Attach) -> bool:
        """Is it of another mesh, or does it say that other ranks read, than those that hold theirs?"""
        return bool(self.held) and self._mesh != (reader.mesh.sizes, reader.readers)

    def give_rank(self, reader: Reader) -> bool:
        """Give a reader its rank, which nobody holds. Fence the process that held it last.

        Returns:
            Whether this reader is the first of another mesh.
        """
        mesh = (reader.mesh.sizes, reader.readers)
        other = self._mesh != mesh
        if other:
            for last in self._last.values():
                self._fence(last, reader)
            self._last.clear()
            tp, pp = reader.readers.ranks(reader.mesh)
            self._mesh, self.num_ranks = mesh, reader.mesh.dp * reader.mesh.cp * len(tp) * len(pp)
        if reader.mesh.ranks in self._last:
            self._fence(self._last[reader.mesh.ranks], reader)
        del self.claims[reader.name]
        self.held[reader.mesh.ranks] = self._last[reader.mesh.ranks] = reader
        reader.take_rank()
        self._all_held = None
        return other

    def _fence(self, last: Reader, by: Reader) -> None:
        if last.name in self._names:  # it is here itself, and no zombie
            return
        self.fenced.pop(last.name, None)
        self.fenced[last.name] = (
            f"rank {last.mesh} at {last.where} was silent or had left, and {by.where} has taken over as {by.mesh}: "
            f"end this process"
        )
        while len(self.fenced) > MAX_RANKS:
            del self.fenced[next(iter(self.fenced))]

    def all_wait(self) -> bool:
        """Does every rank that reads wait for an attempt to begin? Not while one is claimed: its holder may be dead."""
        there = not self.claims and len(self.held) == self.num_ranks > 0
        return there and all(reader.ready and not reader.entered for reader in self.held.values())

    def names_of(self, ranks: Iterable[Ranks], count: int) -> str:
        """The first of ``count`` ranks, and what is known of who holds or held them, for a person."""
        names = [self._describe(each) for each in islice(ranks, 8)]
        return "; ".join(names) + (f" and {count - len(names)} more" if count > len(names) else "")

    def _describe(self, ranks: Ranks) -> str:
        name, last = rank_name(ranks), self._last.get(ranks)
        if ranks in self.held:
            return f"{name} at {self.held[ranks].where}"
        return f"{name}, which was at {last.where}" if last is not None else name

    def ranks(self) -> Iterator[Ranks]:
        """Every rank that reads, in order."""
        if self._mesh is None:
            return
        (dp, cp, tp, pp), read_by = self._mesh
        yield from product(range(dp), range(cp), *read_by.ranks(Mesh(dp=dp, cp=cp, tp=tp, pp=pp)))


def refusal(message: Attach, rules: Rules, layout: str) -> str:
    """Why no reader can have this rank of this mesh, whoever else reads; empty if one can."""
    mesh = message.mesh
    if prod(mesh.sizes) > MAX_RANKS:
        return f"got a mesh of {prod(mesh.sizes)} ranks, expected at most {MAX_RANKS}"
    unfit = mesh_refusal(mesh, rules, layout)
    if unfit:
        return unfit
    if rules.padded and mesh.pp > 1 and not message.variable_lengths:
        return (
            f"got pp={mesh.pp} from a feed of padded micro-batches, whose shapes differ, expected connect(..., "
            f"variable_lengths=True), of stages that exchange any shape: say so, take pp=1, or pack"
        )
    try:
        tp, pp = message.readers.ranks(mesh)
    except ValueError as error:
        return str(error)
    if mesh.tp_rank not in tp or mesh.pp_rank not in pp:
        return f"got rank {mesh}, expected one of the readers that it declares: {message.readers}"
    return ""


def clash(reader: Reader, other: Reader) -> tuple[str, str]:
    """Why ``reader`` cannot have its rank while ``other`` holds its own: (code, detail)."""
    if other.readers != reader.readers:
        return "mesh", (
            f"got readers {reader.readers}, expected {other.readers} as declared by {other.where}: "
            f"give every rank the same"
        )
    if other.mesh.sizes != reader.mesh.sizes:
        return "mesh", (
            f"got a mesh of dp, cp, tp, pp = {reader.mesh.sizes}, expected {other.mesh.sizes} as attached by "
            f"{other.where}: give every rank the same mesh"
        )
    return "rank_taken", (
        f"got rank {reader.mesh} from {reader.where}, which {other.where} holds: start one client a rank, "
        f"or stop that one"
    )


def rank_name(ranks: Ranks) -> str:
    """A rank, for a person."""
    return " ".join(f"{name}={rank}" for name, rank in zip(("dp", "cp", "tp", "pp"), ranks, strict=True))
