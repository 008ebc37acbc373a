"""Apply a lease's limits, policies and declared fields to records.

The run's policies decide about an invalid record. Either the record keeps its place, with no tokens and a counted
reason, or the producer ends with an error that names the record. Records that come together in arrays stay together,
except those about which a policy decides. A sample is cut here only if the sample exceeds the broker's limit
(``limits.sample_tokens``). The broker applies ``rules.overlong`` to all other samples (``core/intake``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from streampack.core.layout.loss_tokens import counting, loss_tokens
from streampack.core.model.fields import LABELS, LOSS_MASK, MEDIA, POSITION_IDS, Field
from streampack.core.protocol.producer_messages import OVERLONG, Lease
from streampack.core.stats.sample_warnings import NO_LOSS_MASK, NO_LOSS_TOKENS
from streampack.errors import DamagedFile, SampleError
from streampack.producer.chunk import CHUNK_SAMPLES, TOKENS, Gathered, MediaChunk, TokenChunk, Values
from streampack.producer.media_values import media_of
from streampack.sources.arrays import Records, Room
from streampack.sources.formats.rows import NO_MASK
from streampack.sources.order import Cursor
from streampack.sources.reasons import describe
from streampack.sources.records import DAMAGED, RawSample

NO_POSITIONS = f"{POSITION_IDS}: missing"
"""Reason of a sample with media that lacks positions of three axes, which only the model can compute."""

SHORT_S = 0.05
"""Least seconds after which a batch ends: a process that others interrupt reads some samples in this time."""


class LeaseLimits:
    """The limits of one lease, applied to single samples and to batches of samples."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._dtype = np.dtype(lease.dtype)
        self._largest = int(np.iinfo(self._dtype).max)
        self._masked = any(field.name == LOSS_MASK for field in lease.fields)
        self._needs_mask = any(field.name == LOSS_MASK and field.default is None for field in lease.fields)
        self._budget = lease.max_sample_tokens if lease.budget is UNSET else lease.budget
        self._of_media = tuple(field for field in lease.sent_fields if field.of_media)
        self._has_grids = any(field.name == POSITION_IDS and field.shape for field in lease.fields)
        self._rejected = {
            field.name: np.zeros((int(is_by_sample(field)), *field.shape), field.storage) for field in lease.fields
        }
        self._rejected[TOKENS] = np.zeros(0, self._dtype)
        fields = (*lease.fields, *(lease.late_fields or ()))
        token_bytes = self._dtype.itemsize + sum(field.value_bytes for field in fields if not is_by_sample(field))
        self._token_bytes = token_bytes
        self.room = lease.max_chunk_bytes // token_bytes
        """Largest number of tokens in a batch."""
        sample_bytes = sum(field.value_bytes for field in lease.fields if is_by_sample(field))
        self.most = min(CHUNK_SAMPLES, max(lease.max_chunk_bytes // max(sample_bytes, 1), 1))
        """Largest number of samples in a batch, so that no frame of a field by sample exceeds ``max_chunk_bytes``."""

    def warnings_of(self, record: RawSample | Records) -> tuple[str, ...]:
        """Return the words of the warnings about each sample of the records."""
        samples = record.samples if isinstance(record, Records) else record
        if self._needs_mask and LOSS_MASK not in samples.fields:
            return (*samples.warnings, NO_LOSS_MASK)
        return samples.warnings

    def split(self, records: Records) -> Iterator[RawSample | Records]:
        """Yield the records in order, in arrays; each record about which a policy must decide comes alone."""
        tokens, lengths, _, fields, _ = records.samples
        odd = (lengths == 0) | (lengths > self._lease.max_sample_tokens)
        if tokens.dtype != np.uint16 and self._largest < 2**31 - 1:
            outside = tokens > self._largest
            if outside.any():
                odd[np.repeat(np.arange(len(lengths)), lengths)[outside]] = True
        columns = self._columns(tokens, fields, lengths)
        if (LOSS_MASK in fields and not self._masked) or isinstance(columns, str):
            odd[:] = True
        elif self._lease.no_loss_tokens is not UNSET:
            loss = loss_tokens(counting(columns), lengths.astype(np.int64))
            odd |= (lengths > self._budget) | (loss == 0)
        return records.apart(odd) if odd.any() else iter((records,))

    def apply_policies(self, record: RawSample | Records) -> tuple[Values, str | None]:
        """Return a record's tokens and fields, and None; or empty values and the reason if a policy drops the record.

        The policies are the lease's ``poison``, for samples that cannot be used, and ``overlong``. ``Records`` hold
        only valid samples, because ``split`` has yielded all others one by one. Raises SampleError or DamagedFile if
        the policy is ``error``, and SampleError for a loss mask that the run does not declare.
        """
        if isinstance(record, Records):
            tokens, lengths, _, fields, _ = record.samples
            columns = self._columns(tokens, fields, lengths)
            assert not isinstance(columns, str), "records that stay together after split have all fields"
            return columns, None
        lease, tokens = self._lease, record.tokens
        reason = record.reason
        if reason is None and self._largest < 2**31 - 1 and int(tokens.max()) > self._largest:
            reason = "range"
        if reason is None and not self._masked and LOSS_MASK in record.fields:
            self._reject_mask(record)
        sample: Values | str = reason or self._values(record)
        if isinstance(sample, dict) and self._of_media:
            media = media_of(record.fields, self._of_media, tokens)
            sample = media if isinstance(media, str) else sample | media
            if MEDIA in sample and self._has_grids and POSITION_IDS not in record.fields:
                sample = NO_POSITIONS
        if isinstance(sample, dict) and lease.no_loss_tokens is not UNSET and not self._learned(sample):
            if lease.no_loss_tokens == "drop":
                return self._rejected, NO_LOSS_TOKENS
            raise SampleError(
                f"{record.place}: got a sample of which no token counts in the loss, but the run has `no_loss_tokens: "
                "error`. Check its labels and masks, and whether truncation cuts off its answer. Or set "
                "`no_loss_tokens` in `rules` or in the stream to `drop`, or to `train`"
            )
        if isinstance(sample, str):
            if lease.poison == "error" and sample == DAMAGED:
                raise DamagedFile(
                    f"{record.where}. Or set `poison: drop` to count the damaged data and continue with the rest"
                )
            if lease.poison == "error" and sample == NO_MASK:
                raise SampleError(
                    f"{record.where}: got a sample without a loss_mask, but the run declares this field. Add the "
                    "mask, or set `missing_mask: train` in producer.yaml to train on all tokens of such samples. Or "
                    "set `poison: drop` in `rules` or in the stream to drop and count such samples"
                )
            if lease.poison == "error" and sample == NO_POSITIONS:
                raise SampleError(
                    f"{record.place}: got a sample with media but without position_ids, which the run declares with "
                    "shape [3]. Its media need positions in time, height and width, so 0 to n - 1 would be wrong. Add "
                    "`position_ids`, as get_rope_index of your model returns them (docs/reference/media.md). Or set "
                    "`poison: drop` in `rules` or in the stream to drop and count such samples"
                )
            if lease.poison == "error":
                raise SampleError(
                    f"{describe(record, sample, lease.dtype)}. Or set `poison: drop` in `rules` or in the stream to "
                    "drop and count such samples"
                )
            return self._rejected, sample
        if len(tokens) <= lease.max_sample_tokens:
            return sample, None
        if lease.overlong == "truncate" and not (MEDIA in sample and len(sample[MEDIA])):  # media cannot be cut
            for field in lease.fields:
                if not is_by_sample(field):
                    sample[field.name] = sample[field.name][: lease.max_sample_tokens]
            sample[TOKENS] = tokens[: lease.max_sample_tokens]
            return sample, None
        if lease.overlong in ("drop", "truncate"):
            return self._rejected, OVERLONG
        what_to_do = (
            "Set `overlong` in `rules` or in the stream to truncate, split or drop, or raise rules.budget"
            if lease.overlong == "error"
            else "Raise limits.sample_tokens"
        )
        raise SampleError(
            f"{record.where}: got a sample of {len(tokens)} tokens, expected at most {lease.max_sample_tokens}. "
            f"{what_to_do}"
        )

    def _learned(self, sample: Values) -> bool:
        """Return whether a token of the sample counts in the loss, also once the broker has cut it to the budget.

        The first token of each piece does not count.
        """
        length = len(sample[TOKENS])
        counts = counting(sample)
        is_kept = np.ones(length, np.bool_) if counts is None else counts.copy()
        is_kept[:: self._budget] = False
        if self._lease.overlong == "truncate":
            is_kept = is_kept[: self._budget]
        return bool(is_kept.any())

    def _values(self, record: RawSample) -> Values | str:
        """Return a record's tokens and stored fields, or the reason why the record is invalid."""
        if not self._lease.fields:
            return {TOKENS: record.tokens}
        by_sample = {field.name for field in self._lease.fields if is_by_sample(field)}
        values = record.fields
        fields = {field.name: np.asarray(values[field.name]) for field in self._lease.fields if field.name in values}
        fields |= {name: value[np.newaxis] for name, value in fields.items() if name in by_sample}
        return self._columns(record.tokens, fields, np.array([len(record.tokens)]))

    def _columns(
        self, tokens: NDArray[Any], fields: Mapping[str, NDArray[Any]], lengths: NDArray[np.int64]
    ) -> Values | str:
        """Return the tokens and stored fields of n samples, end to end, or the reason why a field is invalid.

        ``lengths`` int64 [n]: tokens of each sample. Missing fields get their defaults.
        """
        columns: Values = {TOKENS: tokens}
        for field in self._lease.fields:
            shape = (len(lengths) if is_by_sample(field) else len(tokens), *field.shape)
            value = fields.get(field.name)
            if value is None:
                default = _default(field, tokens, lengths, shape)
                if default is None:
                    return f"{field.name}: missing"
                columns[field.name] = default
                continue
            if value.shape != shape:
                return f"{field.name}: length" if value.ndim == len(shape) else f"{field.name}: shape"
            stored = field.stored(value)
            if stored is None:
                return f"{field.name}: dtype"
            columns[field.name] = stored
        return columns

    def _reject_mask(self, record: RawSample) -> None:
        """Raise SampleError for a loss mask that the run does not declare, unless the mask is 1 everywhere."""
        if np.asarray(record.fields[LOSS_MASK]).all():
            return
        raise SampleError(
            f"{record.where}: got a loss mask that the run does not declare, so the model would be trained on "
            "prompts. Add `fields: {loss_mask: {}}` to broker.yaml, or fields={'loss_mask': {}} to streampack.local"
        )

    def full(self, gathered: Gathered, sample: Values, chunk_s: float, share: float) -> bool:
        """Return True if ``sample`` does not fit the batch, or gathering has taken more than ``chunk_s`` seconds.

        The batch has a ``share`` of these seconds, but at least ``SHORT_S``, and of the lease's limits.
        """
        tokens, count = gathered.tokens + len(sample[TOKENS]), len(gathered.lengths)
        if self._lease.has_extra_bytes:
            extra = gathered.extra_bytes + len(sample.get(MEDIA, ()))
            if tokens * self._token_bytes + extra > self._lease.max_chunk_bytes:
                return True
        taken_s = time.monotonic() - gathered.began
        return tokens > self.room * share or count >= self.most * share or taken_s > max(chunk_s * share, SHORT_S)

    def update_room(self, room: Room, gathered: Gathered, share: float) -> None:
        """Set ``room`` to the samples and tokens that a batch of this ``share`` of the limits can still take.

        If less than an eighth is left, set it to a whole batch, since each part of an array costs a copy.
        """
        samples, tokens = max(int(self.most * share), 1), max(int(self.room * share), 1)
        room.samples, room.tokens = samples - len(gathered.lengths), tokens - gathered.tokens
        if room.samples <= samples // 8 or room.tokens <= tokens // 8:
            room.samples, room.tokens = samples, tokens

    def batch(self, gathered: Gathered, cursor: Cursor, pass_ended: bool) -> TokenChunk:
        """Return the gathered samples as a batch; ``cursor`` is the position after the last."""

        def joined(name: str) -> NDArray[Any]:
            """Return the values called ``name`` of all gathered samples, end to end."""
            parts = [part[name] for part in gathered.parts]
            return np.concatenate(parts) if len(parts) > 1 else parts[0]

        lengths = np.array(gathered.lengths, np.uint32)
        fields = {field.name: joined(field.name) for field in self._lease.fields}
        media = None
        if self._lease.has_extra_bytes:
            items, sizes = np.zeros((2, len(lengths)), np.uint32)
            for at, count, data in gathered.media:
                items[at], sizes[at] = count, len(data)
            media = MediaChunk(items, sizes, b"".join(data.data for _, _, data in gathered.media))
        loss = loss_tokens(counting(fields), lengths.astype(np.int64))
        gathered.warn_of(NO_LOSS_TOKENS, (lengths > 0) & (loss == 0))
        return TokenChunk(
            joined(TOKENS).astype(self._dtype, copy=False), lengths, cursor, gathered.rejected,
            tuple(gathered.examples), gathered.lost, fields, loss, pass_ended,
            gathered.warnings, gathered.warned, media,
        )  # fmt: skip


def is_by_sample(field: Field) -> bool:
    """Return whether the field has one value for each sample, not for each token."""
    return field.axis == "sample"


def _default(
    field: Field, tokens: NDArray[Any], lengths: NDArray[np.int64], shape: tuple[int, ...]
) -> NDArray[Any] | None:
    """Return the values, of ``shape``, of a field that samples lack; None if the field is required."""
    if field.default is not None:
        return np.broadcast_to(field.fill(field.default), shape)
    if field.name == LOSS_MASK:  # all tokens are trained on
        return np.ones(shape, field.storage)
    if field.name == LABELS:
        return tokens.astype(field.storage)
    if field.name == POSITION_IDS:  # a text has equal positions along each axis
        begins = np.repeat(np.cumsum(lengths) - lengths, lengths)
        positions = (np.arange(len(tokens)) - begins).astype(field.storage)
        return np.broadcast_to(positions.reshape(-1, *(1 for _ in field.shape)), shape)
    return None
