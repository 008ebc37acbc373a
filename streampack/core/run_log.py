"""The log of a run, as the broker uses it: recovers its records, and writes and cuts what a later broker needs."""

from __future__ import annotations

from collections.abc import Mapping

from streampack.core.feed.feed import Feed
from streampack.core.intake.leases import Leases
from streampack.core.journal.journal import Journal
from streampack.core.journal.log_effects import Cut
from streampack.core.journal.log_records import (
    Base,
    BatchMarked,
    ChunkAdmitted,
    ChunkStaged,
    EndStaged,
    KeysKept,
    LineageBegan,
    MarkStaged,
    PartitionEnded,
    Record,
    SamplesAmended,
    SamplesRejected,
    SourceAccepted,
    WriteCommitted,
)
from streampack.core.merge.queues import NOWHERE
from streampack.core.protocol.events import Effect
from streampack.core.protocol.message import Identity

OfStream = (
    SourceAccepted | ChunkAdmitted | SamplesRejected | BatchMarked | PartitionEnded | WriteCommitted | KeysKept
    | ChunkStaged | SamplesAmended | MarkStaged | EndStaged
)  # fmt: skip


class RunLog:
    """The log of one run, with the records of all ``feeds`` and of ``leases``."""

    def __init__(
        self, identity: Identity, run_name: str, feeds: Mapping[str, Feed], leases: Leases, journal: Journal
    ) -> None:  # fmt: skip
        self._identity, self._run_name = identity, run_name
        self._feeds, self._leases, self._journal = feeds, leases, journal
        self._base_lsn = self._cut = 0
        self._recovering = False
        self._early: list[tuple[int, OfStream]] = []
        """Records of streams that the rules do not have, until the ``Base`` that adds these streams."""

    def recover(self, lsn: int, record: Record) -> None:
        """Apply the next record, as ``Broker.recover`` does."""
        if not self._recovering:
            self._recovering, self._cut = True, lsn
            for feed in self._feeds.values():
                feed.history.is_cut = lsn > 0
        if isinstance(record, Base):
            self._recover_base(record)
        elif isinstance(record, OfStream):
            if record.stream in self._leases.partitions.streams:
                self._leases.records.recover(lsn, record)
            else:
                self._early.append((lsn, record))
        elif record.feed in self._feeds:  # type: ignore[attr-defined]  # every other record has a feed
            self._feeds[record.feed].recover(lsn, record)  # type: ignore[attr-defined]
            if isinstance(record, LineageBegan) and record.since is not None:
                self._leases.staging.discard(record.feed, record.since)

    def _recover_base(self, base: Base) -> None:
        """Apply the facts that replace deleted records, and check that these facts belong to this run."""
        if base.run != self._identity.run:
            raise ValueError(f"got run {self._run_name!r}, expected {base.run_name!r}, the run that wrote the log")
        if list(base.feeds) != list(self._feeds):
            raise ValueError(
                f"got feeds {', '.join(self._feeds)}, expected {', '.join(base.feeds)}, the feeds in the log"
            )
        self._identity.epoch = max(self._identity.epoch, base.epoch + 1)
        for name, facts in base.feeds.items():
            self._feeds[name].recover_facts(facts, base.released.get(name, 0))
        for stream, stream_facts in base.streams.items():
            self._leases.records.learn(stream, stream_facts)
        for lsn, record in self._early:
            self._leases.records.recover(lsn, record)
        for feed in self._feeds.values() if self._early else ():
            feed.history.order.sort(key=lambda place: place.lsn)
        self._early.clear()

    def base(self) -> Base:
        """Return the record of all facts that must survive when the earlier records are deleted."""
        return Base(
            run=self._identity.run, run_name=self._run_name, epoch=self._identity.epoch,
            feeds={name: feed.history.facts(feed.readers.steps.released_upto) for name, feed in self._feeds.items()},
            streams=self._leases.records.facts(),
            released={name: feed.readers.steps.released_upto for name, feed in self._feeds.items()},
        )  # fmt: skip

    def write_base(self) -> list[Effect]:
        """Write a new ``Base``."""
        self._base_lsn = self._journal.next_lsn
        return self._journal.append(self.base())

    def cut(self) -> list[Effect]:
        """Write a new ``Base``, then delete the older records that no kept checkpoint and no rank needs (R7)."""
        wanted = min(self._leases.staging.first_lsn, *(feed.wanted_lsn for feed in self._feeds.values()))
        wanted = self._base_lsn if wanted == NOWHERE else wanted
        if wanted <= self._cut or not self._journal.keeps:
            return []
        if self._base_lsn < wanted:
            return self._leases.records.keep_keys(wanted) + self.write_base()
        if self._base_lsn >= self._journal.safe_upto:
            return []
        self._cut = wanted
        return [Cut(wanted)]
