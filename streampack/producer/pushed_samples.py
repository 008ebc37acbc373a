"""Turn a program's samples into chunks, under the limits and policies of a lease.

A sample is a mapping with ``input_ids`` and the declared fields, or the token ids alone; values are arrays, tensors or
lists. The same rules apply as to a row of a file (``rows``, ``row_keys``, ``lease_limits``). Other undeclared keys are
ignored. The module knows samples and leases, not sockets, threads or files.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, SupportsIndex

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from streampack.connection.policy_versions import checked_version
from streampack.core.journal.key_index import KEY_BYTES
from streampack.core.layout.step_frames import INPUT_IDS
from streampack.core.model.fields import GROUP, POLICY_VERSION, Field
from streampack.core.model.samples import Keep, Share
from streampack.core.protocol.producer_messages import Lease
from streampack.core.sessions.producer_base import Chunk
from streampack.errors import SampleError, UserError
from streampack.producer.chunk import CHUNK_SAMPLES, TokenChunk
from streampack.producer.chunks import batches_of, chunk_of
from streampack.producer.tree_groups import Tree, check_share, tree_of
from streampack.sources.formats.rows import RowReader
from streampack.sources.order import Cursor
from streampack.sources.records import RawSample, why_of
from streampack.sources.settings import SourceSettings
from streampack.sources.tables import refuse_columns, refuse_tables
from streampack.tokenizers.bytes_tokenizer import BytesTokenizer
from streampack.tokenizers.token_ids import NO_TOKENS

_SETTINGS = SourceSettings("python", tokens_key=INPUT_IDS)
SampleKey = str | bytes | SupportsIndex
"""A sample's key in its stream."""
Given = Mapping[str, Any] | Sequence[int] | Any
"""A sample of the program: a mapping with ``input_ids``, or the ids alone as an array, a tensor or a list."""


def chunks_of(
    samples: Sequence[Given], lease: Lease, first_seq: int, policy_version: SupportsIndex | None = None
) -> list[Chunk]:
    """Return samples in as few chunks as the lease's limits allow, numbered from ``first_seq``.

    ``policy_version`` applies to all samples, and fills the field of this name if the run declares one. Raises
    SampleError for a sample that the lease's policies reject, and UserError for an invalid version.
    """
    batches, version = _batches(samples, lease, first_seq, policy_version)
    return [replace(chunk_of(batch, lease, (0, 0)), policy_version=version) for batch in batches]


def _batches(
    samples: Sequence[Given], lease: Lease, first_seq: int, policy_version: SupportsIndex | None
) -> tuple[list[TokenChunk], int | UnsetType]:
    """Return samples in as few batches as the lease's limits allow, and the version of their policy."""
    version = UNSET if policy_version is None else checked_version(policy_version, "policy_version")
    common = {POLICY_VERSION: version} if version is not UNSET and POLICY_VERSION in _by_sample(lease) else {}
    reader = _reader(lease.sent_fields)
    records = (_record(as_mapping(sample) | common, lease, first_seq + i, reader) for i, sample in enumerate(samples))
    return list(batches_of(records, lease)), version


def with_keys(chunks: Sequence[Chunk], keys: Sequence[SampleKey], count: int, write: int) -> list[Chunk]:
    """Return chunks of ``count`` samples in all with the samples' keys, as keys of write ``write``.

    Raises UserError if there is not one key for each sample, or a key is of another type.
    """
    if len(keys) != count:
        raise UserError(f"got {len(keys)} keys for {count} samples, expected one key for each sample")
    digests = [digest_of(key) for key in keys]
    keyed, at = [], 0
    for chunk in chunks:
        chunk_digests = b"".join(digests[at : at + chunk.num_samples])
        keyed.append(replace(chunk, keys=chunk_digests, write=write))
        at += chunk.num_samples
    return keyed


def digest_of(key: SampleKey) -> bytes:
    """Return the digest of a sample's key, 16 bytes. Raises UserError for a key of another type.

    >>> digest_of(7) != digest_of("7")
    True
    """
    if isinstance(key, str):
        text = b"s" + key.encode("utf-8", "surrogatepass")
    elif isinstance(key, bytes):
        text = b"b" + key
    else:
        try:
            text = b"i%d" % operator.index(key)
        except TypeError:
            raise UserError(
                f"got the key {key!r:.80} of type {type(key).__name__}, expected text, a whole number or bytes"
            ) from None
    return hashlib.blake2b(text, digest_size=KEY_BYTES).digest()


def chunk_of_group(
    samples: Sequence[Given],
    lease: Lease,
    first_seq: int,
    keep: Keep | None,
    policy_version: SupportsIndex | None,
    share: Share | None = None,
) -> Tree:
    """Return a group of samples in one chunk, with the fields ``group`` and ``policy_version`` if declared.

    ``keep``: unit that must hold the whole group; None means a step if the run's steps are batches, else no unit.
    ``share``: what the samples share, if anything.

    Raises SampleError for a sample that the lease's policies reject, and for a group that exceeds a chunk. Raises
    UserError for ``keep`` or ``share`` that the run does not allow.
    """
    check_share(share, lease)
    if keep == "step" and not lease.batches:
        raise UserError(
            f"stream {lease.stream!r}: got keep='step', but the run's steps are not batches, expected keep='pack' or "
            "no keep. For batches, set `step: {samples: N}` or `step: {end_of_batch: true}` under `rules` in "
            "broker.yaml"
        )
    common = {GROUP: first_seq} if GROUP in _by_sample(lease) else {}
    rows = [as_mapping(sample) | common for sample in samples]
    batches, version = _batches(rows, lease, first_seq, policy_version)
    if len(batches) != 1:
        raise SampleError(
            f"stream {lease.stream!r}: got a group of {len(samples)} samples that needs {len(batches)} chunks, "
            f"expected one chunk. A chunk holds at most {lease.max_chunk_bytes} bytes and {CHUNK_SAMPLES} samples. "
            "Send smaller groups, or raise limits.chunk in broker.yaml"
        )
    if share is None:
        chunk_tree = Tree(chunk_of(batches[0], lease, (0, 0)), list(range(len(rows))))
    else:
        chunk_tree = tree_of(batches[0], lease)
    unit = keep or ("step" if lease.batches else UNSET)
    return chunk_tree._replace(chunk=replace(chunk_tree.chunk, policy_version=version, keep=unit))


@lru_cache(maxsize=64)
def _reader(fields: tuple[Field, ...]) -> RowReader:
    """Return a reader of pushed samples with these declared fields."""
    return RowReader(_SETTINGS, BytesTokenizer(), fields)


def _by_sample(lease: Lease) -> set[str]:
    """Return the names of the lease's fields with one value for each sample."""
    return {field.name for field in lease.fields if field.axis == "sample"}


def as_list(samples: Iterable[Given]) -> list[Given]:
    """Return samples as a list. Raises UserError for a table or a dict of columns."""
    if isinstance(samples, Mapping):
        refuse_columns(samples)
    refuse_tables(samples)
    return list(samples)


def as_mapping(sample: Given) -> dict[str, Any]:
    """Return a sample as a dict; token ids alone get the key ``input_ids``."""
    return dict(sample) if isinstance(sample, Mapping) else {INPUT_IDS: sample}


def check_declared(names: Sequence[str], lease: Lease) -> None:
    """Raise SampleError for names of fields that the run does not declare."""
    declared = [INPUT_IDS, *(field.name for field in lease.fields)]
    unknown = [name for name in names if name not in declared]
    if unknown:
        raise SampleError(
            f"stream {lease.stream!r}: got the field {unknown[0]!r}, expected one of {', '.join(declared)}. Declare "
            "the field under `fields` in broker.yaml, or leave the field out"
        )


def _record(sample: Given, lease: Lease, seq: int, reader: RowReader) -> RawSample:
    """Return sample number ``seq`` in the form in which sources yield samples."""
    mapping = as_mapping(sample)
    for late in lease.late_fields or ():
        if late.name in mapping:
            raise SampleError(
                f"stream {lease.stream!r}: got a value of {late.name} with a sample, expected none, because the field "
                f"is late. Give the value with Producer.amend once the sample was sent"
            )
    row = {key: plain(mapping[key]) for key in reader.keys if key in mapping}
    where = f"stream {lease.stream!r} partition {lease.partition} sample {seq}"
    read, cursor = reader(row), Cursor(0, 0, seq + 1)
    if isinstance(read, str):
        return RawSample(NO_TOKENS, str(read), where, cursor, why=why_of(read))
    return RawSample(read.tokens, None, where, cursor, read.fields, warnings=read.warnings)


def plain(value: Any) -> Any:
    """Return a torch tensor as a numpy array, bfloat16 as float32; also in a list. Return anything else unchanged."""
    if not hasattr(value, "detach"):
        return (
            [plain(item) for item in value]
            if isinstance(value, list) and value and hasattr(value[0], "detach")
            else value
        )
    tensor = value.detach().cpu()
    return (tensor.float() if "bfloat16" in str(tensor.dtype) else tensor).numpy()
