"""Admission: what a chunk must be, and how its samples enter the books.

Nothing that a producer sends is believed before it is checked against itself and against what it
was granted. Then the over-long policy acts, each piece gets a row in the table and its turn in the
merge, and the arena is told what to copy. Knows streams by number, partitions by number in their
stream, and tokens only as frames that it passes on; of a sample that is cut it counts the labels
that each piece keeps, which takes the loss mask or the labels sent.

A chunk may be a group (``keep``). One that is kept in a pack and that no pack holds is over-long as one: an error, or
dropped whole; there is no way to cut it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field as field_
from typing import Any

import msgspec
import numpy as np
from msgspec import UnsetType

from streampack.core.effects import Store
from streampack.core.events import Effect
from streampack.core.fields import LABELS, LOSS_MASK, Field
from streampack.core.frames import INPUT_IDS
from streampack.core.intake import Admitted, Intake, apply_overlong, rejected_whole
from streampack.core.merge import AnyMerge
from streampack.core.messages import MAX_CHUNK_SAMPLES, OVERLONG, Envelope, Samples
from streampack.core.rules import Rules
from streampack.core.samples import I64, IGNORE_INDEX, KEEPS, Keep, SampleTable, index_of

POLICY_LAG = "policy_lag"
"""Why samples are rejected whose policy was too old when they came."""
MAX_REASONS = 64
"""Reasons for rejecting samples that are counted apart, by stream."""


@dataclass(frozen=True, slots=True)
class StreamTerms:
    """What the broker asks of a stream's producers: the rules' part of a lease."""

    name: str
    partitions: int
    limit: int
    """Tokens over which a sample is over-long."""
    passes: int | None = 1
    overlong: str = "error"
    poison: str = "error"
    barriers: bool = False
    """Passes are kept apart."""
    pushed: bool = False
    align: int = 1
    """Tokens that samples are padded to a multiple of."""
    most: int | None = None
    """Samples that a pack holds."""
    batches: bool = False
    """Steps are batches."""
    padded: bool = False
    """Nothing is packed."""

    def admitted(self, every: I64, keep: Keep | UnsetType = msgspec.UNSET, skip: int = 0) -> Admitted:
        """What the policy makes of a chunk's samples from the ``skip``-th on; not where that is an error."""
        whole = keep != "pack" or self.fits(apply_overlong(every, self.limit, self.overlong).length)
        return apply_overlong(every[skip:], self.limit, self.overlong) if whole else rejected_whole(every[skip:])

    def fits(self, lengths: I64) -> bool:
        """Does a pack hold samples of these lengths, int64 [n], 0 being none?"""
        tokens = int((-(-lengths // self.align) * self.align).sum())
        return tokens <= self.limit and (self.most is None or int((lengths > 0).sum()) <= self.most)


def terms_of(rules: Rules) -> list[StreamTerms]:
    """The terms of every stream of some rules, in their order."""
    drain = rules.between_passes == "drain"
    return [
        StreamTerms(
            each.name, each.partitions, rules.budget, each.passes, each.overlong, each.poison, drain, each.pushed,
            rules.align.sample, rules.max_samples_per_pack, rules.batch is not None, rules.padded,
        )
        for each in rules.streams
    ]  # fmt: skip


@dataclass(slots=True)
class StreamCounts:
    """What became of a stream's samples, since the broker started."""

    samples: int = 0
    tokens: int = 0
    overlong: int = 0
    lost_tokens: int = 0
    """By the over-long policy."""
    stale_tokens: int = 0
    """Of samples whose policy was too old."""
    rejected: dict[str, int] = field_(default_factory=dict)


class Admission:
    """Takes a feed's chunks into ``table`` and ``merge``; ``streams`` in the order of the rules."""

    def __init__(
        self, streams: list[StreamTerms], tokens: str, fields: tuple[Field, ...], max_sample_tokens: int,
        table: SampleTable, merge: AnyMerge,
    ) -> None:  # fmt: skip
        self._streams, self._fields = streams, fields
        self._widths = [(np.dtype(tokens).itemsize, 0)] + [
            (field.value_bytes, 0) if field.axis == "token" else (0, field.value_bytes) for field in fields
        ]  # bytes a token and a sample, by frame
        self.token_bytes = sum(width for width, _ in self._widths)
        self._max_sample_tokens = max_sample_tokens
        self.table, self.merge = table, merge
        self.counts = [StreamCounts() for _ in streams]

    def extend(self, streams: list[StreamTerms]) -> None:
        """More streams, after those there are."""
        more = streams[len(self._streams) :]
        self._streams = [*self._streams, *more]
        self.counts += [StreamCounts() for _ in more]

    def refusal(self, stream: int, intake: Intake, envelope: Envelope, message: Samples) -> tuple[str, str] | None:
        """Why this chunk cannot be believed or is not wanted: (code, detail), or None."""
        wrong = self._malformed(message, envelope, intake.total)
        if wrong:
            return "malformed", wrong
        terms, lengths = self._streams[stream], lengths_of(message)
        changed = self._changed(stream, intake, message, lengths)
        if changed:
            return "source_changed", changed
        if message.policy_version is not msgspec.UNSET and not terms.pushed:
            return "malformed", f"got a policy's version with samples of stream {terms.name!r}, which is read"
        if wrong := self._no_group(terms, message, lengths):
            return "group", wrong
        if terms.overlong != "error" or int(lengths.max()) <= terms.limit:
            return None
        at = int(np.argmax(lengths > terms.limit))
        index = index_of(message.base_seq + at, message.partition, terms.partitions)
        return "overlong", (
            f"sample {terms.name}:{index}: got {int(lengths[at])} tokens, expected at most the budget of "
            f"{terms.limit}: set rules.overlong, or the stream's, to truncate, split or drop, or raise rules.budget"
        )

    def admit(
        self, stream: int, p: int, intake: Intake, envelope: Envelope, message: Samples, stale: bool = False
    ) -> tuple[list[Effect], I64]:
        """Enter the samples of a chunk that are not taken yet; ``p`` is the partition's number in the merge. Of a chunk
        that is ``stale`` none is kept.

        What to store, and the sequence numbers, int64 [n], of new samples that are in no step.
        """
        counts, every = self.counts[stream], lengths_of(message)
        stop, begin = message.base_seq + len(every), intake.expected_seq
        known = stop if intake.closed else min(max(intake.known_seq, begin), stop)
        effects = self._fill_in(stream, intake, envelope, message, every, begin, known)
        kept_tokens, rejected = 0, np.zeros(0, np.int64)
        if known < stop:
            skip = known - message.base_seq
            takes = self._streams[stream].admitted
            pieces = rejected_whole(every[skip:]) if stale else takes(every, message.keep, skip)
            store = self._enter(stream, p, envelope, message, every, skip, pieces)
            effects.append(store)
            if message.pass_ended and self._streams[stream].barriers:
                self.merge.end_pass(p)
            kept_tokens = int(pieces.length.sum())
            rejected = known + pieces.source[pieces.length == 0]
            counts.samples += stop - known
            counts.tokens += kept_tokens
            if stale:
                _count_reasons(counts, {POLICY_LAG: pieces.num_touched})
                counts.stale_tokens += pieces.lost_tokens
            else:
                counts.overlong += pieces.num_touched
                counts.lost_tokens += pieces.lost_tokens
        if message.base_seq == known < stop:
            counts.lost_tokens += message.lost_tokens
            _count_reasons(counts, message.rejected)
        num_bytes = int(every[begin - message.base_seq :].sum()) * self.token_bytes
        intake.accept(stop, num_bytes, kept_tokens, message.cursor)
        return effects, rejected

    def _enter(
        self, stream: int, p: int, envelope: Envelope, message: Samples, every: I64, skip: int, pieces: Admitted
    ) -> Store:
        """Give the ``pieces`` of a chunk's samples from its ``skip``-th on rows in the table and turns in the merge."""
        terms, table = self._streams[stream], self.table
        lengths, offsets = every[skip:], (np.cumsum(every) - every)[skip:]
        kept = pieces.length > 0
        source = pieces.source[kept]
        handles = table.take(len(source))
        table.stream[handles] = stream
        table.index[handles] = index_of(message.base_seq + skip + source, message.partition, terms.partitions)
        table.part[handles] = pieces.part[kept]
        table.length[handles] = pieces.length[kept]
        table.crc[handles] = np.frombuffer(message.crcs_u32, "<u4")[skip:][source]
        table.keep[handles] = KEEPS[message.keep] if message.keep else 0
        table.keep[handles[-1:]] = 0  # nothing of the group follows
        loss = np.frombuffer(message.loss_tokens_u32, "<u4")[skip:][source].astype(np.int64)
        starts, cut = offsets[source] + pieces.offset[kept], pieces.length[kept] != lengths[source]
        if cut.any():
            loss[cut] = self._loss_tokens(envelope.payload, starts[cut], pieces.length[kept][cut])
        table.loss_tokens[handles] = loss
        entries = np.full(len(pieces.length), -1, np.int64)
        entries[kept] = handles
        self.merge.push(p, entries, pieces.length, pieces.part)
        return Store(handles, starts, pieces.length[kept], skip + source, envelope.payload)

    def _no_group(self, terms: StreamTerms, message: Samples, lengths: I64) -> str:
        """Why a chunk cannot be kept together as it asks for; empty if it can, or is dropped."""
        if not message.keep:
            return ""
        first, last = (
            index_of(seq, message.partition, terms.partitions)
            for seq in (message.base_seq, message.base_seq + len(lengths) - 1)
        )
        group = f"samples {terms.name}:{first} to {last}"
        if not terms.pushed:
            return f"{group}: got a group of a stream that is read, expected one that is pushed"
        if message.keep == "step" and not terms.batches:
            return (
                f"{group}: got keep='step' with steps that are cut from a stream, expected keep='pack', or none: or "
                f"set rules.step to {{samples: N}} or {{end_of_batch: true}}"
            )
        if message.keep == "pack" and terms.padded:
            return f"{group}: got keep='pack' with rules.padded, expected keep='step', or none: nothing is packed"
        kept = np.minimum(lengths, terms.limit) if terms.overlong == "truncate" else lengths
        if message.keep == "step" or terms.overlong == "drop" or terms.fits(kept):
            return ""
        most = "" if terms.most is None else f" and max_samples_per_pack, {terms.most}"
        return (
            f"{group}: got a group kept in one pack of {int((kept > 0).sum())} samples, {int(kept.sum())} tokens "
            f"before each is padded to {terms.align}, expected at most the budget of {terms.limit}{most}, for it "
            f"cannot be cut: send smaller groups, raise rules.budget, or set overlong: drop"
        )

    def _awaited(self, intake: Intake, begin: int, stop: int) -> Iterator[tuple[int, int]]:
        """(sequence number, handle) of the samples from ``begin`` to ``stop`` whose payload is awaited."""
        if intake.awaited:
            for seq in range(begin, stop):
                for handle in intake.awaited.get(seq, ()):
                    yield seq, handle

    def _changed(self, stream: int, intake: Intake, message: Samples, lengths: I64) -> str:
        """What differs of a sample that was had before: its source gives other data the second time; or empty."""
        terms, table = self._streams[stream], self.table
        stop = min(intake.known_seq, message.base_seq + len(lengths))
        crcs = np.frombuffer(message.crcs_u32, "<u4")
        for seq, handle in self._awaited(intake, max(intake.expected_seq, message.base_seq), stop):
            at, part, held = seq - message.base_seq, int(table.part[handle]), int(table.length[handle])
            cut = int(lengths[at]) > terms.limit
            length = min(int(lengths[at]) - part * terms.limit, terms.limit) if cut else int(lengths[at])
            if (length, int(crcs[at])) != (held, int(table.crc[handle])):
                index = index_of(seq, message.partition, terms.partitions)
                return (
                    f"sample {terms.name}:{index}: got {length} tokens with checksum {int(crcs[at]):08x}, expected "
                    f"{held} with {int(table.crc[handle]):08x}, as the first time: put the data, the tokenizer and its "
                    f"settings back, or start a new run"
                )
        return ""

    def _fill_in(
        self, stream: int, intake: Intake, envelope: Envelope, message: Samples, every: I64, begin: int, stop: int
    ) -> list[Effect]:
        """Store the samples from ``begin`` to ``stop`` that were awaited."""
        found = list(self._awaited(intake, begin, stop))
        if not found:
            return []
        rows = np.array([seq - message.base_seq for seq, _ in found])
        handles = np.array([handle for _, handle in found])
        offsets = (np.cumsum(every) - every)[rows] + self.table.part[handles] * self._streams[stream].limit
        for seq, _ in found:
            intake.awaited.pop(seq, None)
        return [Store(handles, offsets, self.table.length[handles].astype(np.int64), rows, envelope.payload)]

    def _loss_tokens(self, payload: tuple[Any, ...], starts: I64, lengths: I64) -> I64:
        """Labels that count in pieces of a chunk, int64 [n]: all but each first token, where no field says less."""
        counts = True
        frames = dict(zip((field.name for field in self._fields), payload[1:], strict=True))
        for field in self._fields:
            if field.name in (LABELS, LOSS_MASK):
                values = np.frombuffer(frames[field.name], field.storage)
                counts = counts & (values != (IGNORE_INDEX if field.name == LABELS else 0))
        if counts is True:
            return lengths - 1
        upto = np.concatenate([[0], np.cumsum(counts)])
        found: I64 = upto[starts + lengths] - upto[starts + 1]
        return found

    def _malformed(self, message: Samples, envelope: Envelope, total: int | None) -> str:
        """What is wrong with a chunk of a partition of ``total`` samples, if that is known; empty if nothing."""
        columns = (message.lengths_u32, message.crcs_u32, message.loss_tokens_u32)
        count = len(message.lengths_u32) // 4
        if any(len(column) != 4 * count for column in columns):
            return (
                f"got {[len(column) for column in columns]} bytes of lengths, crcs and loss tokens, expected 4 a sample"
            )
        if not 0 < count <= MAX_CHUNK_SAMPLES:
            return f"got a chunk of {count} samples, expected 1 to {MAX_CHUNK_SAMPLES}"
        if total is not None and message.base_seq + count > total:
            return f"got sample {message.base_seq + count - 1} of a partition that ended after {total}"
        if len(envelope.payload) != len(self._widths):
            return f"got {len(envelope.payload)} payload frames, expected {len(self._widths)}: tokens and every field"
        lengths = lengths_of(message)
        if (np.frombuffer(message.loss_tokens_u32, "<u4") > np.maximum(lengths - 1, 0)).any():
            return "got a sample with as many loss tokens as tokens, expected fewer: its last one has no next"
        for (by_token, by_sample), frame, name in zip(self._widths, envelope.payload, self._names(), strict=True):
            got, expected = len(frame), int(lengths.sum()) * by_token + count * by_sample
            if got != expected:
                return f"got {got} payload bytes of {name}, expected {expected} for the lengths given"
        if int(lengths.max()) > self._max_sample_tokens:
            return f"got a sample of {int(lengths.max())} tokens, expected at most {self._max_sample_tokens}"
        rejected, empty = sum(message.rejected.values()), int((lengths == 0).sum())
        if rejected > empty:
            return f"got {rejected} rejected samples, expected at most the {empty} that are empty"
        return ""

    def _names(self) -> list[str]:
        """Of a chunk's frames."""
        return [INPUT_IDS, *(field.name for field in self._fields)]


def lengths_of(message: Samples) -> I64:
    """Tokens of each sample of a chunk, int64 [n]."""
    return np.frombuffer(message.lengths_u32, "<u4").astype(np.int64)


def _count_reasons(counts: StreamCounts, rejected: dict[str, int]) -> None:
    counted = counts.rejected
    for reason, count in rejected.items():
        if reason == OVERLONG:
            counts.overlong += count
            continue
        known = reason if reason in counted or len(counted) < MAX_REASONS else "other"
        counted[known] = counted.get(known, 0) + count
