"""The readers that hold the ranks of the trainers' mesh, and the readers that claim a rank.

A reader is a process with a name that no other process has. It *holds* its rank as long as it sends messages. Another
process that asks for the rank *claims* it. If the holder sends a message after the claim, both processes are alive, and
the second is rejected. A holder that was silent for ``CLAIM_S`` loses the rank and is *fenced*: if it wakes up, the
broker tells it to end.

The ranks of two meshes are never held at the same time, so a claim for another mesh is a claim for all held ranks. The
registry knows the first step of each reader, and no other steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice, product
from math import prod

from msgspec.structs import replace

from streampack.core.deal.mesh_validation import AFTER_RAMPS, mesh_refusal
from streampack.core.model.mesh import Mesh, ReadBy
from streampack.core.model.rules import Rules
from streampack.core.protocol.trainer_messages import Attach
from streampack.core.serve.rank_reader import Ranks, Reader, ReaderPhase

CLAIM_S = 3.0
"""Seconds of silence after which a holder loses its rank to a claim, if pings come every second."""
SILENT_AFTER_S = 5.0
"""Seconds without a message after which a rank is called silent, if pings come every second."""
RESTART_S = 10.0
"""Seconds that the processes of an attempt may take to end when others come to begin a new one."""
MOST_CLAIMS = 8
"""Most readers that claim the same rank at a time."""
MAX_RANKS = 1 << 17
"""Most ranks of a mesh that a peer may claim to have."""


class RankRegistry:
    """The readers of one mesh at a time.

    Attributes:
        held: The readers that hold a rank, by rank.
        claims: The readers that claim a rank, by name, oldest first.
    """

    def __init__(self) -> None:
        self.now = 0.0
        """Time of the last event, in seconds."""
        self.silent_after_s = SILENT_AFTER_S
        """Seconds without a message after which a rank is called silent: several intervals between pings."""
        self.held: dict[Ranks, Reader] = {}
        self.claims: dict[str, Reader] = {}
        self._claims_of = defaultdict[Ranks, dict[str, Reader]](dict)
        """The readers that claim each rank, by name, oldest first."""
        self.fenced: dict[str, str] = {}
        """Reason that a process has lost its rank for good, by its name."""
        self.num_ranks = 0
        """Number of ranks that read, of the newest mesh."""
        self._mesh: tuple[Ranks, ReadBy] | None = None
        self._names: dict[str, Reader] = {}
        self._peers: dict[bytes, Reader] = {}
        self._all_held: list[Reader] | None = None
        self._last: dict[Ranks, Reader] = {}  # the last holder of each rank of this mesh

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[Reader]:
        """Yield every reader, with or without its rank."""
        return iter(list(self._names.values()))

    def named(self, name: str) -> Reader | None:
        """Return the reader of this name; None if there is none."""
        return self._names.get(name)

    def at(self, peer: bytes) -> Reader | None:
        """Return the reader of the connection ``peer``; None if there is none."""
        return self._peers.get(peer)

    def add(self, reader: Reader) -> None:
        """Add a new reader, which claims its rank."""
        self._names[reader.name] = self._peers[reader.peer] = self.claims[reader.name] = reader
        self._claims_of[reader.mesh.ranks][reader.name] = reader

    def is_claimed_by_many(self, ranks: Ranks) -> bool:
        """Return whether as many readers claim a rank as may do so at a time."""
        return len(self._claims_of.get(ranks, ())) >= MOST_CLAIMS

    def silent_claim(self, ranks: Ranks, silent_s: float) -> Reader | None:
        """Return the oldest claim of a rank whose reader was silent for ``silent_s`` seconds; None if there is none."""
        claims = self._claims_of.get(ranks, {}).values()
        return next((reader for reader in claims if self.now - reader.heard > silent_s), None)

    def _end_claim(self, reader: Reader) -> None:
        """Forget the claim of a reader, if it has one."""
        if self.claims.pop(reader.name, None) is not None:
            del self._claims_of[reader.mesh.ranks][reader.name]
            if not self._claims_of[reader.mesh.ranks]:
                del self._claims_of[reader.mesh.ranks]

    def held_last(self, name: str, ranks: Ranks) -> Reader | None:
        """Return the last reader of a rank if its name is ``name``; else None."""
        last = self._last.get(ranks)
        return last if last is not None and last.name == name else None

    def silent_s(self, reader: Reader) -> float:
        """Return for how many seconds a reader has been silent; 0 while its silence is normal."""
        silent_s = self.now - reader.heard
        return silent_s if silent_s >= self.silent_after_s else 0.0

    def last_holder(self, ranks: Ranks) -> Reader | None:
        """Return the last reader of a rank of this mesh; None if it never had one."""
        return self._last.get(ranks)

    def last_holders(self) -> list[Reader]:
        """Return the last reader of each rank of this mesh that ever had one. A rank keeps its index in the list."""
        return list(self._last.values())

    def move(self, reader: Reader, peer: bytes) -> None:
        """Record the new connection of a reader."""
        self._peers.pop(reader.peer, None)
        reader.peer, self._peers[peer] = peer, reader

    def remove(self, reader: Reader) -> None:
        """Remove a reader, and free its rank."""
        self._names.pop(reader.name, None)
        self._end_claim(reader)
        if self._peers.get(reader.peer) is reader:
            del self._peers[reader.peer]
        if self.held.get(reader.mesh.ranks) is reader:
            del self.held[reader.mesh.ranks]
            self._all_held = None
        reader.phases.go(ReaderPhase.GONE)

    def in_the_way(self, reader: Reader | Attach) -> list[Reader]:
        """Return the holders of the rank that a reader claims.

        If the reader's mesh differs, these are the holders of all ranks; all such claims share one list.
        """
        if self.is_foreign(reader):
            if self._all_held is None:
                self._all_held = list(self.held.values())
            return self._all_held
        holder = self.held.get(reader.mesh.ranks)
        return [] if holder is None else [holder]

    def is_foreign(self, reader: Reader | Attach) -> bool:
        """Return whether a reader's mesh, or its set of reading ranks, differs from that of the ranks' holders."""
        return bool(self.held) and self._mesh != (reader.mesh.sizes, reader.readers)

    def give_rank(self, reader: Reader) -> bool:
        """Give a reader its rank, which must be free, and fence the process that held it last.

        Returns:
            True if this reader is the first of another mesh.
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
        self._end_claim(reader)
        self.held[reader.mesh.ranks] = self._last[reader.mesh.ranks] = reader
        reader.take_rank()
        self._all_held = None
        return other

    def _fence(self, last: Reader, by: Reader) -> None:
        """Fence the process of ``last``, whose rank the reader ``by`` has taken, unless that process is connected."""
        if last.name in self._names:
            return
        self.fenced.pop(last.name, None)
        self.fenced[last.name] = (
            f"rank {last.mesh} at {last.where} was silent or had left, and the process {by.where} took over as rank "
            f"{by.mesh}. End the process {last.where}"
        )
        while len(self.fenced) > MAX_RANKS:
            del self.fenced[next(iter(self.fenced))]

    def all_wait(self) -> bool:
        """Return whether all ranks are ready for an attempt; False while a rank is claimed: its holder may be dead."""
        there = not self.claims and len(self.held) == self.num_ranks > 0
        return there and all(reader.ready and not reader.entered for reader in self.held.values())

    def reporter(self, part: int, parts: int) -> Mesh | None:
        """Return the mesh of the rank that reports part ``part`` of ``parts``; None if no rank of this mesh does.

        Ranks of the last pipeline stage report. Context-parallel ranks are one part, or have a part each.
        """
        reader = next(iter(self.held.values()), None)
        if reader is None or parts not in (reader.mesh.dp, reader.mesh.dp * reader.mesh.cp) or part >= parts:
            return None
        mesh = reader.mesh
        dp_rank, cp_rank = divmod(part, mesh.cp) if parts == mesh.dp * mesh.cp else (part, 0)
        return replace(mesh, dp_rank=dp_rank, cp_rank=cp_rank, tp_rank=0, pp_rank=mesh.pp - 1)

    def names_of(self, ranks: Iterable[Ranks], count: int) -> str:
        """Return a text that names the first 8 of ``count`` ranks, each with the host:pid of its last reader."""
        names = [self._describe(rank) for rank in islice(ranks, 8)]
        return "; ".join(names) + (f" and {count - len(names)} more" if count > len(names) else "")

    def _describe(self, ranks: Ranks) -> str:
        """Return a text that names a rank and the host:pid of its last reader."""
        name, last = rank_name(ranks), self._last.get(ranks)
        if ranks in self.held:
            return f"{name} at {self.held[ranks].where}"
        return f"{name}, which was at {last.where}" if last is not None else name

    def ranks(self) -> Iterator[Ranks]:
        """Yield every rank that reads, in order."""
        if self._mesh is None:
            return
        (dp, cp, tp, pp), read_by = self._mesh
        yield from product(range(dp), range(cp), *read_by.ranks(Mesh(dp=dp, cp=cp, tp=tp, pp=pp)))


def refusal(message: Attach, rules: Rules, layout: str) -> str:
    """Return an error text if the rules do not allow the mesh or rank of an ``Attach``; else empty."""
    mesh = message.mesh
    if prod(mesh.sizes) > MAX_RANKS:
        return f"got a mesh of {prod(mesh.sizes)} ranks, expected at most {MAX_RANKS}"
    if unfit := mesh_refusal(mesh, rules, layout, message.variable_lengths, AFTER_RAMPS):
        return unfit
    try:
        tp, pp = message.readers.ranks(mesh)
    except ValueError as error:
        return str(error)
    if mesh.tp_rank not in tp or mesh.pp_rank not in pp:
        return f"got rank {mesh}, expected one of the declared readers: {message.readers}"
    return ""


def clash(reader: Reader, other: Reader) -> tuple[str, str]:
    """Return why ``reader`` cannot have its rank because of the reader ``other``, as (error code, error text)."""
    if other.readers != reader.readers:
        return "mesh", (
            f"got readers {reader.readers}, expected {other.readers}, as the reader at {other.where} declared. "
            f"Declare the same readers on every rank"
        )
    if other.mesh.sizes != reader.mesh.sizes:
        return "mesh", (
            f"got a mesh of dp, cp, tp, pp = {reader.mesh.sizes}, expected {other.mesh.sizes}, the mesh of the reader "
            f"at {other.where}. Give every rank the same mesh"
        )
    return "rank_taken", (
        f"got rank {reader.mesh} from {reader.where}, but the process {other.where} holds this rank. Start one client "
        f"per rank, or stop the process {other.where}"
    )


def rank_name(ranks: Ranks) -> str:
    """Return a text for a rank, such as ``dp=1 cp=0 tp=0 pp=0``."""
    return " ".join(f"{name}={rank}" for name, rank in zip(("dp", "cp", "tp", "pp"), ranks, strict=True))
