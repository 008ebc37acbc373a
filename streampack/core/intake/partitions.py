"""The partitions of every stream: their numbers, and the intake of each.

A partition has a number ``p``, which counts the partitions of all feeds. The merge of a feed numbers only that feed's
partitions, from 0 (``Stream.number_in_feed``). A sequence number counts the samples of a partition. The module does not
know producers or the log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from streampack.core.intake.admission import Admission
from streampack.core.intake.intake import Intake
from streampack.core.journal.history import History
from streampack.core.journal.key_index import KeyIndex
from streampack.core.merge.feed_merge import FeedMerge
from streampack.core.model.capacity import MAX_KEYS
from streampack.core.model.lease_terms import StreamTerms
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64
from streampack.core.model.snapshot import Cursor
from streampack.core.staging.staging import Staging


class Granted(NamedTuple):
    """Credit of a stream, over its partitions that have not ended.

    Attributes:
        granted_tokens: Tokens that may wait for the merge.
        used_tokens: Tokens that wait for the merge.
        missing_samples: Samples that may be sent and have not come.
    """

    granted_tokens: int
    used_tokens: int
    missing_samples: int


@dataclass(slots=True, eq=False)
class Stream:
    """A stream of a feed, and where its samples go.

    Attributes:
        feed: Name of the feed.
        admission: Admits the feed's samples.
        merge: The feed's merge.
        rules: The feed's rules when the stream was added.
        history: The feed's history, from the log.
        number: Number of the stream in its feed.
        first: Number of the stream's first partition.
        first_in_feed: The feed's own number of the stream's first partition.
        keys: Keys of the stream's pushed samples.
    """

    feed: str
    admission: Admission
    merge: FeedMerge
    rules: Rules
    history: History
    number: int
    first: int
    first_in_feed: int
    keys: KeyIndex

    @property
    def terms(self) -> StreamTerms:
        """The rules that the stream's samples have to meet; a stage may change them."""
        return self.admission.terms[self.number]

    @property
    def in_order(self) -> bool:
        """True if the log records the order in which the stream's chunks came."""
        return self.rules.merge == "arrival"

    def number_in_feed(self, p: int) -> int:
        """Return the feed's own number of partition ``p``."""
        return self.first_in_feed + p - self.first


class Partitions:
    """The partitions of all feeds, by number ``p``.

    Args:
        quota_tokens: Tokens of each partition that may wait for the merge.
        staging: Holds the samples that wait for late fields.
        max_keys: The most keys of each pushed stream.
    """

    def __init__(self, quota_tokens: int, staging: Staging, max_keys: int = MAX_KEYS) -> None:
        self.quota_tokens, self._staging, self._max_keys = quota_tokens, staging, max_keys
        self.streams: dict[str, Stream] = {}
        self.stream_of: list[Stream] = []
        """The stream of each partition."""
        self.intakes: list[Intake] = []
        """The intake of each partition."""
        self.old_order: set[str] = set()
        """Streams that a snapshot of an earlier version has: their sources are read in the order of that version."""
        self.begins: dict[str, Cursor] = {}
        """Cursor of the first sample of each stream's source, where one is recorded, by stream."""
        self._of_feed: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self.intakes)

    def open(self, feed: str, rules: Rules, admission: Admission, merge: FeedMerge, history: History) -> None:
        """Add the new streams of ``feed``; their samples go to ``admission`` and ``merge``."""
        first_in_feed = len(self.of_feed(feed))
        for number, terms in enumerate(admission.terms):
            if terms.name in self.streams:
                continue
            keys = KeyIndex(self._max_keys)
            stream = Stream(feed, admission, merge, rules, history, number, len(self), first_in_feed, keys)
            self.streams[terms.name] = stream
            self.stream_of += [stream] * terms.partitions
            quota, size = self.quota_tokens * rules.token_bytes, rules.token_bytes
            self.intakes += [Intake(quota, size, pushed=terms.pushed) for _ in range(terms.partitions)]
            for p in range(stream.first, len(self)) if (rules.late_fields or rules.paces) and terms.pushed else ():
                self.intakes[p].staged = self._staging.open(feed, p, terms.name, p - stream.first, rules)
            self.of_feed(feed).extend(range(stream.first, len(self)))
            first_in_feed += terms.partitions

    def of_feed(self, feed: str) -> list[int]:
        """Return the numbers of the partitions of ``feed``, in the feed's own order."""
        return self._of_feed.setdefault(feed, [])

    def of_stream(self, stream: str) -> range:
        """Return the numbers of a stream's partitions."""
        first = self.streams[stream].first
        return range(first, first + self.streams[stream].terms.partitions)

    def streams_of(self, feed: str) -> list[Stream]:
        """Return the streams of ``feed``, in the order of its rules."""
        return [stream for stream in self.streams.values() if stream.feed == feed]

    def find(self, stream: str, partition: int) -> int | None:
        """Return the number ``p`` of a stream's partition; None if there is no such partition."""
        opened = self.streams.get(stream)
        if opened is None or not 0 <= partition < opened.terms.partitions:
            return None
        return opened.first + partition

    def name_of(self, p: int) -> str:
        """Return the name of the stream of partition ``p``."""
        return self.stream_of[p].terms.name

    def sent_as(self, feed: str, ids: I64) -> tuple[I64, I64]:
        """Return the partition of samples, and the number with which each was sent, int64 [n] each.

        ``ids`` int64 [n, 3]: stream number, index and part. The number is -1 for a sample that the log no longer has,
        if it has waited for late fields.
        """
        streams = self.streams_of(feed)
        partitions, seqs = np.zeros(len(ids), np.int64), np.full(len(ids), -1, np.int64)
        for number in np.unique(ids[ids[:, 0] < len(streams), 0]).tolist():
            stream, rows = streams[number], np.flatnonzero(ids[:, 0] == number)
            seqs[rows], partitions[rows] = np.divmod(ids[rows, 1], stream.terms.partitions)
            if self.intakes[stream.first].staged is not None:
                for row in rows.tolist():
                    seqs[row] = self._sent_as(stream.first + int(partitions[row]), int(seqs[row]))
        return partitions, seqs

    def _sent_as(self, p: int, seq: int) -> int:
        """Return the number with which sample ``seq`` of a partition with late fields was sent; -1 if it is lost."""
        place = self.intakes[p].recorded.place_of(seq)
        return -1 if place is None or place.sent is None else int(place.sent[seq - place.base_seq])

    def granted(self, stream: str) -> Granted:
        """Return the credit of a stream: tokens granted, tokens that wait for the merge, and samples still to come."""
        open_ = [intake for p in self.of_stream(stream) if not (intake := self.intakes[p]).ended]
        return Granted(
            self.quota_tokens * len(open_),
            sum(intake.waiting_tokens for intake in open_),
            sum(
                max(intake.grant_seq - (intake.sent_seq if intake.staged else intake.expected_seq), 0)
                for intake in open_
            ),
        )

    @property
    def ended(self) -> bool:
        """True if every partition has ended: all of its samples were taken, or no more are wanted."""
        return all(intake.ended for intake in self.intakes)
