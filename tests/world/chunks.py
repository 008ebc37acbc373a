"""Chunks, and messages with samples, made from what the samples are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from crc32c import crc32c

from streampack.core.model.snapshot import Cursor
from streampack.core.protocol.producer_messages import Samples
from streampack.core.sessions.producer_base import Chunk


def u32(values: Any) -> bytes:
    """A column of counts."""
    return np.asarray(values).astype("<u4").tobytes()


def columns(lengths: Sequence[int], crcs: Sequence[int]) -> dict[str, Any]:
    """The columns that every chunk has. All tokens but a sample's first count in the loss; an empty one is rejected."""
    empty = [*lengths].count(0)
    return {
        "lengths_u32": u32(lengths), "crcs_u32": u32(crcs), "loss_tokens_u32": u32([max(n - 1, 0) for n in lengths]),
        "rejected": {"empty": empty} if empty else {},
    }  # fmt: skip


def chunk_of(key: tuple[str, int], samples: Sequence[bytes], cursor: Cursor, **more: Any) -> Chunk:
    """Samples of int32 tokens of a partition, as a producer sends them; ``more`` replaces or adds columns."""
    of = columns([len(sample) // 4 for sample in samples], [crc32c(sample) for sample in samples])
    of |= {"session": (0, 0), "num_bytes": sum(map(len, samples)), "payload": (b"".join(samples),), **more}
    return Chunk(stream=key[0], partition=key[1], cursor=cursor, **of)


def message_of(key: tuple[str, int], base_seq: int, lengths: Sequence[int], **more: Any) -> Samples:
    """A message with samples of these lengths, whose checksums nobody checks; ``more`` replaces or adds columns."""
    of = columns(lengths, range(len(lengths))) | {"cursor": (0, 0, base_seq + len(lengths)), **more}
    return Samples(stream=key[0], partition=key[1], base_seq=base_seq, **of)
