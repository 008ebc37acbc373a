"""What a program gives as samples, made chunks: dicts or ids, arrays, tensors or lists, under a lease's terms.

A sample is a mapping with ``input_ids`` and the fields that the run declares, as a row of a file is, and is held to
the same rules (``rows``, ``chunks``): nothing here decides what a good sample is. Keys that the run does not
declare are passed over, but for a loss mask, without which prompts would be trained on. Knows samples and leases;
never sockets, threads or files.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, SupportsIndex

import numpy as np
from msgspec import UNSET
from msgspec.structs import replace

from streampack.core.layout.step_frames import INPUT_IDS
from streampack.core.model.fields import GROUP, LOSS_MASK, POLICY_VERSION, Field
from streampack.core.model.samples import Keep
from streampack.core.protocol.producer_messages import Lease
from streampack.core.sessions.producer_base import Chunk
from streampack.errors import SampleError, UserError
from streampack.producer.chunk import CHUNK_SAMPLES
from streampack.producer.chunks import batches_of, chunk_of
from streampack.sources.formats.rows import RowReader
from streampack.sources.order import Cursor
from streampack.sources.records import RawSample
from streampack.sources.settings import SourceSettings
from streampack.tokenizers.bytes_tokenizer import BytesTokenizer

_SETTINGS = SourceSettings("python", tokens_key=INPUT_IDS)
Given = Mapping[str, Any] | Sequence[int] | Any
"""A mapping with ``input_ids``, or the ids alone: an array, a tensor or a list."""


def chunks_of(
    samples: Sequence[Given], lease: Lease, first_seq: int, policy_version: SupportsIndex | None = None
) -> list[Chunk]:
    """Samples in as few chunks as the lease's limits allow; they will be numbered from ``first_seq``. All are of
    ``policy_version``, which is their field of this name, too, where the run declares it.

    Raises SampleError for what the lease's policies do not admit, naming the sample; UserError for no version.
    """
    version = UNSET if policy_version is None else _version(policy_version)
    common = {POLICY_VERSION: version} if version is not UNSET and POLICY_VERSION in _by_sample(lease) else {}
    reader = _reader(lease.fields)
    records = (_record(as_mapping(sample) | common, lease, first_seq + i, reader) for i, sample in enumerate(samples))
    chunks = [chunk_of(batch, lease, (0, 0)) for batch in batches_of(records, lease)]
    return [replace(chunk, policy_version=version) for chunk in chunks]


def chunk_of_group(
    samples: Sequence[Given], lease: Lease, first_seq: int, keep: Keep | None, policy_version: SupportsIndex | None
) -> Chunk:
    """A group in one chunk, with its fields ``group`` and ``policy_version`` where the run declares them.

    ``keep`` None: a step where the run's steps are batches, else nothing.

    Raises SampleError for a sample that the lease's policies do not admit, and for a group that no chunk holds;
    UserError for one to be kept in a step where steps are no batches.
    """
    if keep == "step" and not lease.batches:
        raise UserError(
            f"stream {lease.stream!r}: got keep='step' with steps that are cut from a stream, expected keep='pack', or "
            f"none: or set rules.step in broker.yaml to {{samples: N}} or {{end_of_batch: true}}"
        )
    common = {GROUP: first_seq} if GROUP in _by_sample(lease) else {}
    chunks = chunks_of([as_mapping(sample) | common for sample in samples], lease, first_seq, policy_version)
    if len(chunks) != 1:
        raise SampleError(
            f"stream {lease.stream!r}: got a group of {len(samples)} samples that fills {len(chunks)} chunks, expected "
            f"one of at most {lease.max_chunk_bytes} bytes and {CHUNK_SAMPLES} samples: send smaller groups, or raise "
            f"limits.chunk in broker.yaml"
        )
    return replace(chunks[0], keep=keep or ("step" if lease.batches else UNSET))


@lru_cache(maxsize=64)
def _reader(fields: tuple[Field, ...]) -> RowReader:
    return RowReader(_SETTINGS, BytesTokenizer(), fields)


def _by_sample(lease: Lease) -> set[str]:
    """Names of the fields that hold one value a sample."""
    return {field.name for field in lease.fields if field.axis == "sample"}


def _version(given: SupportsIndex) -> int:
    """A policy's, as an integer. Raises UserError."""
    try:
        found = operator.index(given)
    except TypeError:
        found = -1
    if not 0 <= found < 2**62:
        raise UserError(f"got policy_version={given!r}, expected an integer from 0 on")
    return found


def as_mapping(sample: Given) -> dict[str, Any]:
    """A sample by its keys."""
    return dict(sample) if isinstance(sample, Mapping) else {INPUT_IDS: sample}


def check_declared(names: Sequence[str], lease: Lease) -> None:
    """Raises SampleError for fields given by name that the run does not declare."""
    declared = [INPUT_IDS, *(field.name for field in lease.fields)]
    unknown = [name for name in names if name not in declared]
    if unknown:
        raise SampleError(
            f"stream {lease.stream!r}: got the field {unknown[0]!r}, expected one of {', '.join(declared)}: declare it "
            f"under 'fields' in broker.yaml, or leave it out"
        )


def _record(sample: Given, lease: Lease, seq: int, reader: RowReader) -> RawSample:
    """The sample as a source would give it."""
    given = as_mapping(sample)
    row = {key: _plain(given[key]) for key in (*reader.keys, LOSS_MASK) if key in given}
    where = f"stream {lease.stream!r} partition {lease.partition} sample {seq}"
    found, cursor = reader(row), Cursor(0, 0, seq + 1)
    if isinstance(found, str):
        return RawSample(np.zeros(0, np.int32), found, where, cursor)
    fields = found.fields
    if LOSS_MASK in row and LOSS_MASK not in fields:
        fields = {**fields, LOSS_MASK: np.asarray(row[LOSS_MASK])}  # not declared: what holds to the terms says so
    return RawSample(found.tokens, None, where, cursor, fields)


def _plain(value: Any) -> Any:
    """A torch tensor as an array of this host; anything else as it is. numpy has no bfloat16: float32 holds it."""
    if not hasattr(value, "detach"):
        return value
    tensor = value.detach().cpu()
    return (tensor.float() if "bfloat16" in str(tensor.dtype) else tensor).numpy()
