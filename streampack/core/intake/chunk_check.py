"""A chunk as it came, and what it must be: nothing that a producer sends is believed before it is checked.

It is checked against itself, against what the feed declares, and against the stream's terms. ``intake`` checks it
against the credits, and ``admission`` against samples that came before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from streampack.core.intake.admission_kernels import measure
from streampack.core.intake.lease_terms import StreamTerms
from streampack.core.model.bounded import MAX_CHUNK_SAMPLES
from streampack.core.model.samples import I64, U32, index_of
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.producer_messages import Samples

Unfit = tuple[str, str]
"""Why something cannot be taken: (code, detail)."""


@dataclass(frozen=True, slots=True)
class Received:
    """A chunk of n samples: what its message says of each, and in all.

    ``lengths`` int64 [n], ``crcs`` and ``loss_tokens`` uint32 [n]; ``longest`` in tokens, ``num_empty`` samples without
    any, ``wrong_loss`` samples with as many loss tokens as tokens.
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

    @property
    def stop_seq(self) -> int:
        """The number of the sample after its last."""
        return self.message.base_seq + len(self.lengths)


def received(envelope: Envelope, message: Samples) -> Received | str:
    """The chunk of a message; or why it is none."""
    columns = (message.lengths_u32, message.crcs_u32, message.loss_tokens_u32)
    count = len(message.lengths_u32) // 4
    if any(len(column) != 4 * count for column in columns):
        return f"got {[len(column) for column in columns]} bytes of lengths, crcs and loss tokens, expected 4 a sample"
    if not 0 < count <= MAX_CHUNK_SAMPLES:
        return f"got a chunk of {count} samples, expected 1 to {MAX_CHUNK_SAMPLES}"
    lengths, crcs, loss_tokens = (np.frombuffer(column, "<u4") for column in columns)
    return Received(
        envelope, message, lengths.astype(np.int64), crcs, loss_tokens, *map(int, measure(lengths, loss_tokens))
    )


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames of a feed's chunks: their ``names``, and the bytes of each by token and by sample."""

    names: Sequence[str]
    widths: Sequence[tuple[int, int]]


def malformed(chunk: Received, frames: Frames, max_sample_tokens: int, total: int | None) -> str:
    """What is wrong with a chunk of a partition of ``total`` samples, if that is known; empty if nothing."""
    count, payload, message = len(chunk.lengths), chunk.envelope.payload, chunk.message
    if total is not None and chunk.stop_seq > total:
        return f"got sample {chunk.stop_seq - 1} of a partition that ended after {total}"
    if len(payload) != len(frames.widths):
        return f"got {len(payload)} payload frames, expected {len(frames.widths)}: tokens and every field"
    if chunk.wrong_loss:
        return "got a sample with as many loss tokens as tokens, expected fewer: its last one has no next"
    for (by_token, by_sample), frame, name in zip(frames.widths, payload, frames.names, strict=True):
        got, expected = len(frame), chunk.num_tokens * by_token + count * by_sample
        if got != expected:
            return f"got {got} payload bytes of {name}, expected {expected} for the lengths given"
    if chunk.longest > max_sample_tokens:
        return f"got a sample of {chunk.longest} tokens, expected at most {max_sample_tokens}"
    rejected = sum(message.rejected.values())
    if rejected > chunk.num_empty:
        return f"got {rejected} rejected samples, expected at most the {chunk.num_empty} that are empty"
    return ""


def unwanted(chunk: Received, terms: StreamTerms) -> Unfit | None:
    """Why a stream does not take a chunk; None if it does."""
    message = chunk.message
    if message.policy_version is not msgspec.UNSET and not terms.pushed:
        return "malformed", f"got a policy's version with samples of stream {terms.name!r}, which is read"
    if message.keep and (wrong := _no_group(chunk, terms)):
        return "group", wrong
    if terms.overlong != "error" or chunk.longest <= terms.limit:
        return None
    at = int(np.argmax(chunk.lengths > terms.limit))
    index = index_of(message.base_seq + at, message.partition, terms.partitions)
    return "overlong", (
        f"sample {terms.name}:{index}: got {int(chunk.lengths[at])} tokens, expected at most the budget of "
        f"{terms.limit}: set rules.overlong, or the stream's, to truncate, split or drop, or raise rules.budget"
    )


def _no_group(chunk: Received, terms: StreamTerms) -> str:
    """Why a chunk cannot be kept together as it asks for; empty if it can, or is dropped."""
    message, lengths = chunk.message, chunk.lengths
    first, last = (index_of(seq, message.partition, terms.partitions) for seq in (message.base_seq, chunk.stop_seq - 1))
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
