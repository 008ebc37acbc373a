"""Snapshots of the checkpoints at which readers begin: those that have come, and requests for others.

An ``Attach`` names a snapshot by its digest. The broker asks one of the readers with the same digest for the snapshot,
and keeps it for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from streampack.core.model.snapshot import Snapshot
from streampack.core.protocol.trainer_messages import Attach
from streampack.core.serve.rank_reader import Reader
from streampack.core.serve.rank_registry import RankRegistry

MOST_BROUGHT = 4
"""Most different snapshots of waiting readers: each may have megabytes. All ranks of an attempt have the same one."""
ASK_S = 2.0
"""Seconds after which a reader that was asked for its snapshot, and attaches again, is asked again."""
TOO_MANY = (
    f"got a snapshot that differs from {MOST_BROUGHT} other snapshots, which other readers sent. Expected the same "
    f"snapshot from all ranks. Load the same checkpoint on every rank."
)


class SnapshotRequests:
    """The snapshots that readers of one feed have sent, by digest, and the requests for others."""

    def __init__(self, registry: RankRegistry) -> None:
        self._registry = registry
        self._here: dict[bytes, Snapshot] = {}
        self._requests: dict[bytes, tuple[bytes, float]] = {}
        """(peer that was asked, time) of each request, by digest."""

    def of(self, message: Attach) -> Snapshot | None:
        """Return the snapshot that an ``Attach`` names; None if it has not come."""
        return self._here.get(message.snapshot_digest)

    def misses(self, message: Attach) -> bool:
        """Return whether an ``Attach`` names a snapshot that has not come."""
        return message.ready and message.snapshot_digest not in (b"", *self._here)

    def is_full(self, digest: bytes) -> bool:
        """Return whether readers use ``MOST_BROUGHT`` snapshots besides ``digest``, after forgetting unused ones."""
        if digest in self._requests and len(self._here.keys() | self._requests.keys()) <= MOST_BROUGHT:
            return False  # thousands of readers attach with one snapshot before it comes
        used = {id(reader.snapshot) for reader in self._registry}
        self._here = {key: snapshot for key, snapshot in self._here.items() if id(snapshot) in used}
        pending = {reader.pending.snapshot_digest for reader in self._registry if reader.pending is not None}
        self._requests = {key: request for key, request in self._requests.items() if key in pending}
        return len({*self._here, *pending} - {digest}) >= MOST_BROUGHT

    def should_ask(self, reader: Reader, now: float) -> bytes | None:
        """Return the digest of the snapshot to request from a reader; None if it has come or is requested already."""
        if reader.pending is None:
            return None
        digest = reader.pending.snapshot_digest
        peer, when = self._requests.get(digest, (reader.peer, -ASK_S))
        # A reader that was asked and attaches again later has sent nothing: connections keep the order of messages.
        late = peer == reader.peer and now >= when + ASK_S
        rank = self._registry.at(peer)
        if not late and rank is not None and rank.pending is not None:
            return None
        self._requests[digest] = reader.peer, now
        return digest

    def expects(self, digest: bytes) -> bool:
        """Return whether the snapshot of this digest was requested from a reader and has not come."""
        return digest in self._requests

    def expects_from(self, key: bytes) -> bool:
        """Return whether a reader whose connection begins with ``key`` was asked for a snapshot and still waits."""
        readers = [self._registry.at(peer) for peer, _ in self._requests.values() if peer.startswith(key)]
        return any(reader is not None and reader.pending is not None for reader in readers)

    def take(self, digest: bytes, snapshot: Snapshot) -> Iterable[tuple[Reader, Attach]]:
        """Keep a snapshot that has come; return the readers that waited for it, each with its ``Attach``."""
        del self._requests[digest]
        self._here[digest] = snapshot
        return [
            (reader, reader.pending)
            for reader in self._registry
            if reader.pending is not None and reader.pending.snapshot_digest == digest
        ]
