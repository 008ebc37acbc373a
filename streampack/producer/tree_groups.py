"""Turns a group of samples into a chunk that is a tree: tokens that samples share are in it once.

Tokens are the same if their ids are, and the values of every field with ``align: token``: the model reads these. Fields
with ``align: target``, such as labels, masks and advantages, keep a value for each token of each sample.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from streampack.core.model.samples import I64
from streampack.core.protocol.producer_messages import Lease
from streampack.core.sessions.producer_base import Chunk
from streampack.core.trees.shared_prefixes import prefix_order
from streampack.errors import UserError
from streampack.producer.chunk import TokenChunk
from streampack.producer.chunks import chunk_of


class Tree(NamedTuple):
    """A chunk that is a tree, and the place in it of each sample of the group, in the order given."""

    chunk: Chunk
    places: list[int]


def check_share(share: str | None, lease: Lease) -> None:
    """Raise UserError for a kind of sharing that there is not, or that the run does not declare."""
    if share not in (None, "prefix"):
        raise UserError(f"got share={share!r}, expected 'prefix' or None")
    if share is not None and lease.share is msgspec.UNSET:
        raise UserError(
            f"stream {lease.stream!r}: got share={share!r}, but the run does not let samples share tokens. Set "
            f"`share: prefix` under `rules` in broker.yaml"
        )


def tree_of(batch: TokenChunk, lease: Lease) -> Tree:
    """Return the samples of a group as a tree. Credit counts them as if they shared nothing."""
    bounds = np.append(0, np.cumsum(batch.lengths, dtype=np.int64))
    keys = _keys(batch, lease)
    order, depths = prefix_order([keys[a:b] for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)])
    ordered = _in_order(batch, np.array(order), bounds, lease)
    whole = chunk_of(replace(ordered, columns={**ordered.columns, "shared_u32": depths}), lease, (0, 0))
    lengths = batch.lengths[order].astype(np.int64)
    begins = np.cumsum(lengths) - lengths
    own = np.arange(bounds[-1]) - np.repeat(begins, lengths) >= np.repeat(depths, lengths)
    columns = [(True, batch.tokens.itemsize)]
    columns += [(field.axis == "token" and field.align == "token", field.value_bytes) for field in lease.fields]
    payload = tuple(
        _bytes_of(frame).reshape(-1, width)[own].reshape(-1).data if once else frame
        for (once, width), frame in zip(columns, whole.payload, strict=True)
    )
    places = np.argsort(order).tolist()
    return Tree(msgspec.structs.replace(whole, payload=payload, payload_crc=None), places)


def _keys(batch: TokenChunk, lease: Lease) -> NDArray[Any]:
    """Return a key of each token, with its aligned fields, to compare tokens: [tokens] or [tokens, bytes]."""
    read = [batch.fields[field.name] for field in lease.fields if field.axis == "token" and field.align == "token"]
    if not read:
        return batch.tokens
    count = len(batch.tokens)
    return np.concatenate([_bytes_of(values).reshape(count, -1) for values in (batch.tokens, *read)], axis=1)


def _in_order(batch: TokenChunk, order: I64, bounds: I64, lease: Lease) -> TokenChunk:
    """Return a batch with its samples in another order; ``bounds`` int64 [n + 1] are the samples' first tokens."""
    lengths = np.diff(bounds)[order]
    starts = np.cumsum(lengths) - lengths
    at = np.arange(bounds[-1]) + np.repeat(bounds[:-1][order] - starts, lengths)
    fields = {field.name: batch.fields[field.name][order if field.axis == "sample" else at] for field in lease.fields}
    loss = None if batch.loss_tokens is None else batch.loss_tokens[order]
    columns = {name: values[order] for name, values in batch.columns.items()}
    return replace(
        batch, tokens=batch.tokens[at], lengths=batch.lengths[order], fields=fields, loss_tokens=loss, columns=columns
    )  # fmt: skip


def _bytes_of(values: Any) -> NDArray[np.uint8]:
    """Return an array or a buffer as bytes, uint8 [n]."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
