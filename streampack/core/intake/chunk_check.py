"""Checks of a chunk that a producer has sent: ``ChunkCheck.verdict`` makes them all.

They are against the chunk itself, the feed's fields, the stream's terms, the position in the partition, and credit.
Samples that are read again are compared with the samples that came first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from streampack.core.columns.chunk_body import optional_columns
from streampack.core.intake.admission_kernels import measure
from streampack.core.intake.intake import Intake
from streampack.core.journal.key_index import KEY_BYTES, KeyIndex
from streampack.core.layout.step_frames import INPUT_IDS
from streampack.core.media.media_counts import MediaOfChunk, media_of_chunk, over_limits
from streampack.core.model.bounded import MAX_CHUNK_SAMPLES, MOST_VERSION
from streampack.core.model.fields import Field
from streampack.core.model.keys.planning_keys import MediaLimits
from streampack.core.model.lease_terms import StreamTerms
from streampack.core.model.samples import I64, U32, SampleTable, index_of
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.producer_messages import Samples
from streampack.core.trees.chunk_trees import ChunkTree, tree_of

Unfit = tuple[str, str]
"""Reason that a chunk is rejected: (code of the error, its text)."""


class NotTaken(Enum):
    """Reason that a good chunk is not taken: it was taken before, or is not the next one that credit allows."""

    DUPLICATE = auto()
    OUT_OF_TURN = auto()


@dataclass(frozen=True, slots=True)
class ReceivedChunk:
    """A chunk of n samples, with the arrays of its message and their totals.

    Attributes:
        lengths: int64 [n], tokens of each sample.
        crcs: uint32 [n], checksum of each sample.
        loss_tokens: uint32 [n], labels of each sample that count in the loss.
        num_tokens: Tokens of all samples.
        longest: Tokens of the longest sample.
        num_empty: Number of samples without tokens.
        wrong_loss: Number of samples with at least as many loss tokens as tokens.
        columns: [n], columns of ``chunk_body.OF_TABLE`` that the chunk has, by their names in the table.
        tree: The tokens that the samples share; None without trees.
        media: The media of the samples; None if the feed has none.
    """

    envelope: Envelope
    message: Samples
    lengths: I64
    crcs: U32
    loss_tokens: U32
    num_tokens: int
    longest: int
    num_empty: int
    wrong_loss: int
    columns: Mapping[str, NDArray[Any]]
    tree: ChunkTree | None = None
    media: MediaOfChunk | None = None

    @property
    def frames(self) -> tuple[Any, ...]:
        """The payload frames without those of the media: the tokens and each field."""
        payload: tuple[Any, ...] = self.envelope.payload
        return payload if self.media is None else payload[:-2]

    @property
    def extra_bytes(self) -> int:
        """Bytes of the samples' media."""
        return 0 if self.media is None else int(self.media.bounds[-1])

    @property
    def own_tokens(self) -> int:
        """Tokens of all samples, each shared one once."""
        return self.num_tokens if self.tree is None else self.tree.own_tokens

    @property
    def stop_seq(self) -> int:
        """Number of the first sample after the chunk."""
        return self.message.base_seq + len(self.lengths)


def parse_chunk(envelope: Envelope, message: Samples, terms: StreamTerms | None = None) -> ReceivedChunk | str:
    """Return the chunk of a message, or an error text if its arrays do not fit together.

    ``terms``: terms of the stream; None stands for those of a stream without media.
    """
    columns = (message.lengths_u32, message.crcs_u32, message.loss_tokens_u32)
    count = len(message.lengths_u32) // 4
    if any(len(column) != 4 * count for column in columns):
        return (
            f"got {[len(column) for column in columns]} bytes of lengths, checksums and loss tokens, expected 4 bytes "
            f"per sample"
        )
    if not 0 < count <= MAX_CHUNK_SAMPLES:
        return f"got a chunk of {count} samples, expected 1 to {MAX_CHUNK_SAMPLES}"
    lengths, crcs, loss_tokens = (np.frombuffer(column, "<u4") for column in columns)
    whole = lengths.astype(np.int64)
    try:
        optional = optional_columns(message)
        tree = tree_of(optional, whole)
        media = media_of_chunk(envelope.payload, count, terms)
    except ValueError as error:
        return str(error)
    num_tokens, longest, num_empty, wrong_loss = map(int, measure(lengths, loss_tokens))
    return ReceivedChunk(
        envelope, message, whole, crcs, loss_tokens, num_tokens, longest, num_empty, wrong_loss, optional, tree, media
    )  # fmt: skip


class Frames(NamedTuple):
    """The payload frames of a feed's chunks.

    Attributes:
        names: Name of each frame.
        widths: Bytes (per token, per sample) of each frame.
        once: True for each frame that has the value of a shared token once.
    """

    names: Sequence[str]
    widths: Sequence[tuple[int, int]]
    once: Sequence[bool]


def _frames(tokens: str, fields: Sequence[Field]) -> Frames:
    """Return the payload frames of chunks with tokens of dtype ``tokens`` and these fields."""
    widths = [(np.dtype(tokens).itemsize, 0)] + [
        (field.value_bytes, 0) if field.axis == "token" else (0, field.value_bytes) for field in fields
    ]
    once = [True] + [field.axis == "token" and field.align == "token" for field in fields]
    return Frames([INPUT_IDS, *(field.name for field in fields)], widths, once)


class ChunkCheck:
    """Checks the chunks of one feed; ``table`` has the metadata of all samples."""

    def __init__(self, tokens: str, fields: Sequence[Field], max_sample_tokens: int, table: SampleTable) -> None:
        self.frames = _frames(tokens, fields)
        self._sent_frames = _frames(tokens, [field for field in fields if not field.late])
        self._max_sample_tokens, self._table = max_sample_tokens, table

    def verdict(
        self, envelope: Envelope, message: Samples, terms: StreamTerms, intake: Intake, keys: KeyIndex
    ) -> ReceivedChunk | NotTaken | Unfit:
        """Return the chunk of a message if it is good and the next one of ``intake``, else why it is not taken."""
        chunk = parse_chunk(envelope, message, terms)
        if isinstance(chunk, str):
            return "malformed", chunk
        if wrong := self._malformed(chunk, self._sent_frames if terms.late else self.frames, intake.total):
            return "malformed", wrong
        if intake.awaited and (changed := _changed(chunk, terms, intake, self._table)):
            return "source_changed", changed
        return _unwanted(chunk, terms) or _not_taken(chunk, intake, keys) or chunk

    def _malformed(self, chunk: ReceivedChunk, frames: Frames, total: int | None) -> str:
        """Return an error text if a chunk contradicts itself, its frames or the limits; empty if it does not.

        ``total``: samples of the partition, if its end is known.
        """
        count, payload, message = len(chunk.lengths), chunk.frames, chunk.message
        if total is not None and chunk.stop_seq > total:
            return f"got sample {chunk.stop_seq - 1}, but the partition ended after {total} samples"
        if len(payload) != len(frames.widths):
            return f"got {len(payload)} payload frames, expected {len(frames.widths)}, for the tokens and every field"
        if chunk.wrong_loss:
            return (
                "got a sample with as many loss tokens as tokens, expected fewer, because the last token has no next "
                "token"
            )
        columns = zip(frames.widths, payload, frames.names, frames.once, strict=True)
        for (by_token, by_sample), frame, name, once in columns:
            tokens = chunk.own_tokens if once else chunk.num_tokens
            num_bytes, expected = len(frame), tokens * by_token + count * by_sample
            if num_bytes != expected:
                return f"got {num_bytes} payload bytes of {name}, expected {expected} bytes for the given lengths"
        if chunk.longest > self._max_sample_tokens:
            return f"got a sample of {chunk.longest} tokens, expected at most {self._max_sample_tokens}"
        rejected = sum(message.rejected.values())
        if rejected > chunk.num_empty:
            return f"got {rejected} rejected samples, expected at most {chunk.num_empty}, the number of empty samples"
        return ""


def _unwanted(chunk: ReceivedChunk, terms: StreamTerms) -> Unfit | None:
    """Return the reason that a stream's terms reject a chunk; None if they accept it."""
    message = chunk.message
    if message.policy_version is not msgspec.UNSET and message.policy_version > MOST_VERSION:
        return "malformed", f"got policy version {message.policy_version} with samples, expected at most {MOST_VERSION}"
    if message.policy_version is not msgspec.UNSET and not terms.pushed:
        return (
            "malformed",
            f"got a policy version with samples of stream {terms.name!r}, expected a version only for pushed streams",
        )
    if chunk.tree is not None and not (terms.pushed and terms.share):
        return "malformed", (
            f"got samples of stream {terms.name!r} that share tokens, expected them only in pushed streams, with "
            f"`share: prefix` under `rules`"
        )
    if message.keys is not msgspec.UNSET and (wrong := _unfit_keys(chunk, terms)):
        return "malformed", wrong
    if message.keep and (wrong := _unfit_group(chunk, terms)):
        return "group", wrong
    if terms.overlong != "error":
        return None
    if chunk.media is not None and (over := np.flatnonzero(over_limits(chunk.media, terms.limits))).size:
        first = int(over[0])
        index = index_of(message.base_seq + first, message.partition, terms.partitions)
        return "overlong", (
            f"sample {terms.name}:{index}: got {int(chunk.media.items[first])} media items with "
            f"{int(chunk.media.patches[first])} patches, expected at most {_limits_text(terms.limits)} "
            f"(`rules.limits`). Set `overlong: drop`, or raise the limits."
        )
    if chunk.longest <= max(terms.limit, terms.later):
        return None
    at = int(np.argmax(chunk.lengths > terms.limit))
    index = index_of(message.base_seq + at, message.partition, terms.partitions)
    return "overlong", (
        f"sample {terms.name}:{index}: got {int(chunk.lengths[at])} tokens, expected at most "
        f"{terms.limit}, the budget. Set `overlong` of the rules or of the stream to truncate, split or drop, or raise "
        f"`rules.budget`."
    )


def _changed(chunk: ReceivedChunk, terms: StreamTerms, intake: Intake, table: SampleTable) -> str:
    """Return an error text if a sample that is read again differs from the sample admitted first; else empty."""
    message, lengths, crcs = chunk.message, chunk.lengths, chunk.crcs
    begin, stop = max(intake.expected_seq, message.base_seq), min(intake.known_seq, chunk.stop_seq)
    for seq, handle in intake.awaited_pieces(begin, stop):
        row, part, first_length = seq - message.base_seq, int(table.part[handle]), int(table.length[handle])
        limit = intake.limit_of(seq, terms.limit)
        is_cut = int(lengths[row]) > limit
        length = min(int(lengths[row]) - part * limit, limit) if is_cut else int(lengths[row])
        if (length, int(crcs[row])) != (first_length, int(table.crc[handle])):
            index = index_of(seq, message.partition, terms.partitions)
            return (
                f"sample {terms.name}:{index}: got {length} tokens with checksum {int(crcs[row]):08x}, expected "
                f"{first_length} tokens with checksum {int(table.crc[handle]):08x}, as in the first read. Restore the "
                f"data, the tokenizer and its settings, or start a new run."
            )
    return ""


def _not_taken(chunk: ReceivedChunk, intake: Intake, keys: KeyIndex) -> NotTaken | None:
    """Return the reason that a good chunk is not taken now; None if it is the next one, and credit allows it."""
    message, next_seq = chunk.message, intake.next_seq
    if chunk.stop_seq <= next_seq:
        return NotTaken.DUPLICATE
    num_bytes = chunk.num_tokens * intake.token_bytes + chunk.extra_bytes
    if message.base_seq > next_seq or intake.behind or not intake.fits(chunk.stop_seq, num_bytes):
        return NotTaken.OUT_OF_TURN
    if intake.pushed and message.base_seq < next_seq:
        return NotTaken.OUT_OF_TURN  # the log has a part of the chunk
    if message.keys and message.write == keys.write and len(chunk.lengths) > keys.room:
        return NotTaken.OUT_OF_TURN  # it may come again with credit for the keys that the index has room for
    return None


def _unfit_keys(chunk: ReceivedChunk, terms: StreamTerms) -> str:
    """Return an error text if the keys of a chunk's samples are not as ``Samples`` describes them; else empty."""
    message, count = chunk.message, len(chunk.lengths)
    if not terms.pushed:
        return f"got keys with samples of stream {terms.name!r}, expected keys only for pushed streams"
    if len(message.keys or b"") != KEY_BYTES * count or message.write is msgspec.UNSET:
        return f"got {len(message.keys or b'')} bytes of keys for {count} samples, expected {KEY_BYTES} bytes a sample"
    if terms.late:
        return f"got keys with samples of stream {terms.name!r}, which has late fields, expected no keys"
    if message.keep or chunk.tree is not None:
        return "got keys with a group of samples to keep together, expected keys only for single samples"
    return ""


def _unfit_group(chunk: ReceivedChunk, terms: StreamTerms) -> str:
    """Return an error text if the samples of a chunk cannot stay together as ``keep`` demands; else empty."""
    message, lengths = chunk.message, chunk.lengths
    first, last = (index_of(seq, message.partition, terms.partitions) for seq in (message.base_seq, chunk.stop_seq - 1))
    group = f"samples {terms.name}:{first} to {last}"
    if not terms.pushed:
        return f"{group}: got a group in a stream that is not pushed, expected a pushed stream"
    if message.keep == "step" and not terms.batches:
        return (
            f"{group}: got keep='step' without batches, expected keep='pack' or no keep. To use keep='step', set "
            f"`rules.step` to `{{samples: N}}` or `{{end_of_batch: true}}`."
        )
    if message.keep == "pack" and terms.padded:
        return (
            f"{group}: got keep='pack' with `rules.padded: true`, expected keep='step' or no keep, because padded "
            f"micro-batches are not packed"
        )
    kept = np.minimum(lengths, terms.limit) if terms.overlong == "truncate" else lengths
    if message.keep == "step" or terms.overlong == "drop":
        return ""
    if chunk.media is not None and over_limits(chunk.media.total(), terms.limits).any():
        total = chunk.media.total()
        return (
            f"{group}: got a group of {int(total.items[0])} media items with {int(total.patches[0])} patches to keep "
            f"in one pack, expected at most {_limits_text(terms.limits)} (`rules.limits`). Such a group cannot be "
            f"split. Send smaller groups, raise the limits, or set `overlong: drop`."
        )
    if chunk.tree is not None:
        kept = chunk.tree.own_lengths(kept)
    if terms.fits(kept):
        return ""
    most = "" if terms.most is None else f" and {terms.most} samples (max_samples_per_pack)"
    return (
        f"{group}: got a group of {int((kept > 0).sum())} samples and {int(kept.sum())} tokens to keep in one pack, "
        f"before each sample is padded to a multiple of {terms.align}. Expected at most {terms.limit} tokens (the "
        f"budget){most}. Such a group cannot be split. Send smaller groups, raise `rules.budget`, or set "
        f"`overlong: drop`."
    )


def _limits_text(limits: MediaLimits) -> str:
    """Return the limits of a pack for media as text.

    >>> _limits_text(MediaLimits(patches=64))
    '64 patches'
    """
    units = {"items": limits.items, "patches": limits.patches}
    return " and ".join(f"{most} {name}" for name, most in units.items() if most is not None)
