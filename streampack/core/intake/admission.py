"""Admission: enter the samples of a good chunk (``chunk_check``) into the sample table and the merge.

First the policy for overlong samples applies (``overlong``). Each piece gets a row in the table and its turn in the
merge, and ``Store`` asks the arena to copy its tokens. If a sample is cut, the loss tokens of each piece are counted
from the loss mask or the labels. Streams and partitions have the numbers of their feed.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field as field_
from typing import Any

import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from streampack.core.intake.admission_kernels import enter
from streampack.core.intake.chunk_check import ChunkCheck, ReceivedChunk
from streampack.core.intake.intake import Intake
from streampack.core.intake.overlong import Pieces, apply_terms, drop_chunk, drop_some, drop_unfit_media
from streampack.core.journal.key_index import REPEATED
from streampack.core.layout.loss_tokens import counting, loss_tokens
from streampack.core.media.media_counts import over_limits
from streampack.core.merge.feed_merge import FeedMerge
from streampack.core.model.fields import LABELS, LOSS_MASK, Field
from streampack.core.model.lease_terms import StreamTerms
from streampack.core.model.samples import I64, KEEPS, SampleTable, index_of
from streampack.core.protocol.effects import Store
from streampack.core.protocol.events import Effect
from streampack.core.protocol.producer_messages import OVERLONG
from streampack.core.staging.dropped_samples import POLICY_LAG
from streampack.core.stats.sample_warnings import NO_LOSS_TOKENS

MAX_REASONS = 64
"""Most reasons for rejection that are counted separately, for each stream."""
_NONE = np.zeros(0, np.int64)


@dataclass(slots=True)
class StreamCounts:
    """Counts of a stream's samples since the broker started.

    Attributes:
        samples: Samples that came, rejected ones too.
        tokens: Tokens that were admitted.
        overlong: Samples that were cut, split or dropped because they are overlong.
        lost_tokens: Tokens of overlong samples that were not admitted.
        stale_tokens: Tokens of samples whose policy was too old.
        rejected: Number of rejected samples by reason; after ``MAX_REASONS`` reasons, further ones count as "other".
        warnings: Number of samples by warning, a word of ``stats.sample_warnings``, bounded in the same way.
    """

    samples: int = 0
    tokens: int = 0
    overlong: int = 0
    lost_tokens: int = 0
    stale_tokens: int = 0
    rejected: dict[str, int] = field_(default_factory=dict)
    warnings: dict[str, int] = field_(default_factory=dict)

    def count_rejected(self, reasons: dict[str, int]) -> None:
        """Add rejected samples to the counts, by reason."""
        for reason, count in reasons.items():
            if reason == OVERLONG:
                self.overlong += count
                continue
            _add(self.rejected, reason, count)

    def count_warnings(self, warnings: dict[str, int] | UnsetType) -> None:
        """Add samples to the counts, by warning."""
        for word, count in warnings.items() if warnings is not UNSET else ():
            _add(self.warnings, word, count)


def _add(counts: dict[str, int], word: str, count: int) -> None:
    """Add to the count of a word, or of "other" for a new word where there are ``MAX_REASONS``."""
    counted_word = word if word in counts or len(counts) < MAX_REASONS else "other"
    counts[counted_word] = counts.get(counted_word, 0) + count


class Admission:
    """The admission of one feed: enters chunks into ``table`` and ``merge``; ``streams`` are in the rules' order."""

    def __init__(
        self, streams: list[StreamTerms], tokens: str, fields: tuple[Field, ...], max_sample_tokens: int,
        table: SampleTable, merge: FeedMerge,
    ) -> None:  # fmt: skip
        self.terms, self._fields = streams, fields
        self.check = ChunkCheck(tokens, fields, max_sample_tokens, table)
        self.token_bytes = sum(width for width, _ in self.check.frames.widths)
        self._table, self._merge = table, merge
        self.counts = [StreamCounts() for _ in streams]

    def extend(self, streams: list[StreamTerms]) -> None:
        """Add the streams that new rules contain; ``streams`` lists all streams, the existing ones first."""
        more = streams[len(self.terms) :]
        self.terms = [*self.terms, *more]
        self.counts += [StreamCounts() for _ in more]

    def change_terms(self, streams: list[StreamTerms]) -> None:
        """Let the samples that come from now on meet these terms; the last streams may lack."""
        self.terms = [*streams, *self.terms[len(streams) :]]

    def admit(
        self, stream: int, p: int, intake: Intake, chunk: ReceivedChunk, stale: bool = False,
        repeated: NDArray[np.bool_] | None = None,
    ) -> tuple[list[Effect], I64]:  # fmt: skip
        """Admit the samples of a chunk that were not admitted before; drop all samples of a ``stale`` chunk.

        Args:
            stream: Number of the stream in its feed.
            p: Number of the partition in the merge.
            intake: The intake of the partition.
            chunk: A good chunk.
            stale: True if the policy that made the samples is too old.
            repeated: bool [n], samples of the chunk to drop because of their keys; None for none.

        Returns:
            The effects that store tokens, and the sequence numbers of new samples that were dropped, int64 [n].
        """
        counts, message, lengths = self.counts[stream], chunk.message, chunk.lengths
        stop, begin = chunk.stop_seq, intake.expected_seq
        known_stop = stop if intake.closed else min(max(intake.known_seq, begin), stop)
        payload = chunk.frames
        if chunk.tree is not None:
            payload = chunk.tree.whole_rows(payload, self.check.frames.widths, self.check.frames.once)
        effects = self._fill_in(stream, intake, chunk, payload, begin, known_stop) if intake.awaited else []
        kept_tokens, kept_extra, rejected = 0, 0, _NONE
        if known_stop < stop:
            skip = known_stop - message.base_seq
            terms = self.terms[stream]
            pieces = (
                drop_chunk(lengths[skip:]) if stale else apply_terms(terms, lengths, message.keep, skip, chunk.tree)
            )
            if chunk.media is not None and not stale:
                if message.keep == "pack" and over_limits(chunk.media.total(), terms.limits).any():
                    pieces = drop_chunk(lengths[skip:])  # the whole group decides, also where a part of it is known
                else:
                    pieces = drop_unfit_media(pieces, lengths[skip:], chunk.media.after(skip), terms)
            if repeated is not None and not stale:
                pieces = drop_some(pieces, repeated[skip:])
                counts.count_rejected({REPEATED: int((repeated[skip:] & (lengths[skip:] > 0)).sum())})
            store, kept_tokens = self._enter(stream, p, chunk, payload, skip, pieces)
            effects.append(store)
            kept_extra = int(self._table.extra_bytes[store.handles].sum()) if chunk.media is not None else 0
            if message.pass_ended and self.terms[stream].barriers:
                self._merge.current.end_pass(p)
            if len(store.handles) < len(pieces.length):
                rejected = known_stop + pieces.source[pieces.length == 0]
            counts.samples += stop - known_stop
            counts.tokens += kept_tokens
            if stale:
                counts.count_rejected({POLICY_LAG: pieces.num_touched})
                counts.stale_tokens += pieces.lost_tokens
            else:
                counts.overlong += pieces.num_touched
                counts.lost_tokens += pieces.lost_tokens
        if message.base_seq == known_stop < stop:
            counts.lost_tokens += message.lost_tokens
            counts.count_rejected(message.rejected)
            counts.count_warnings(message.warnings)
        had = int(lengths[: begin - message.base_seq].sum()) if begin > message.base_seq else 0
        num_bytes = (chunk.num_tokens - had) * self.token_bytes
        if chunk.media is not None:
            num_bytes += chunk.extra_bytes - int(chunk.media.bounds[max(begin - message.base_seq, 0)])
        intake.accept(stop, num_bytes, kept_tokens, message.cursor, kept_extra)
        return effects, rejected

    def _enter(
        self, stream: int, p: int, chunk: ReceivedChunk, payload: tuple[Any, ...], skip: int, pieces: Pieces
    ) -> tuple[Store, int]:  # fmt: skip
        """Enter the pieces of a chunk's samples, from the ``skip``-th on, into the table and the merge.

        ``payload``: the chunk's frames, with the tokens of every sample.

        Returns:
            The effect that stores the tokens of the pieces, and their number.
        """
        terms, table, message = self.terms[stream], self._table, chunk.message
        handles = table.take(int(np.count_nonzero(pieces.length)))
        entries, stored = np.empty(len(pieces.length), np.int64), np.empty((3, len(pieces.length)), np.int64)
        first = int(index_of(message.base_seq, message.partition, terms.partitions))
        cut, tokens = enter(
            pieces.source, pieces.offset, pieces.length, pieces.part, chunk.lengths, chunk.crcs, chunk.loss_tokens,
            skip, first, terms.partitions, stream,
            KEEPS[message.keep] if message.keep else 0, handles,
            table.stream, table.index, table.part, table.length, table.loss_tokens, table.crc, table.keep,
            entries, stored,
        )  # fmt: skip
        starts, lengths, rows = stored[:, : len(handles)]
        columns = {name: column[rows] for name, column in chunk.columns.items()}
        if pieces.tree is not None:
            columns |= pieces.tree.enter(table, handles, pieces.length > 0)
        if chunk.media is not None:
            columns |= chunk.media.columns(rows)
        table.put(handles, columns)
        if cut:
            at = np.flatnonzero(lengths != chunk.lengths[rows])
            table.loss_tokens[handles[at]] = self._loss_tokens(payload, starts[at], lengths[at])
        if no_loss := int(np.count_nonzero(table.loss_tokens[handles] == 0)):
            self.counts[stream].count_warnings({NO_LOSS_TOKENS: no_loss})
        self._merge.current.push(p, entries, pieces.length, pieces.part)
        return _store(chunk, handles, starts, lengths, rows, payload), tokens

    def _fill_in(
        self, stream: int, intake: Intake, chunk: ReceivedChunk, payload: tuple[Any, ...], begin: int, stop: int
    ) -> list[Effect]:
        """Store the tokens of the awaited samples ``begin <= seq < stop``; ``payload`` as for ``_enter``."""
        awaited = list(intake.awaited_pieces(begin, stop))
        if not awaited:
            return []
        rows, lengths = np.array([seq - chunk.message.base_seq for seq, _ in awaited]), chunk.lengths
        handles = np.array([handle for _, handle in awaited])
        limits = np.array([intake.limit_of(seq, self.terms[stream].limit) for seq, _ in awaited])
        offsets = (np.cumsum(lengths) - lengths)[rows] + self._table.part[handles] * limits
        for seq, _ in awaited:
            intake.awaited.pop(seq, None)
        return [_store(chunk, handles, offsets, self._table.length[handles].astype(np.int64), rows, payload)]

    def _loss_tokens(self, payload: tuple[Any, ...], starts: I64, lengths: I64) -> I64:
        """Return the loss tokens of n pieces of a chunk, int64 [n].

        Args:
            payload: The chunk's frames.
            starts: int64 [n], tokens of the chunk before each piece.
            lengths: int64 [n], tokens of each piece.
        """
        frames = dict(zip((field.name for field in self._fields), payload[1:], strict=True))
        values = {
            field.name: np.frombuffer(frames[field.name], field.storage)
            for field in self._fields
            if field.name in (LABELS, LOSS_MASK)
        }
        return loss_tokens(counting(values), lengths, starts)


def _store(
    chunk: ReceivedChunk, handles: I64, offsets: I64, lengths: I64, rows: I64, payload: tuple[Any, ...]
) -> Store:  # fmt: skip
    """Return the effect that stores samples of a chunk; the arguments are the attributes of ``Store``."""
    if chunk.media is None:
        return Store(handles, offsets, lengths, rows, payload)
    bounds = np.stack([chunk.media.bounds[rows], chunk.media.bounds[rows + 1]])
    return Store(handles, offsets, lengths, rows, payload, chunk.envelope.payload[-1], bounds)
