"""Checksums of samples by the processor's instructions against the crc32c package, which is the oracle."""

from __future__ import annotations

import platform
import sys

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.typing import NDArray

import streampack
from streampack import wire
from streampack.checksums import Column, CrcsOf, compiled, plain
from streampack.chunks import Batch, chunk_of
from streampack.core.fields import Field
from streampack.core.messages import Envelope, Lease, Samples
from streampack.sources import Cursor

CRCS_OF = compiled()
pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the kernel is of x86-64's instructions")


def by_kernel() -> CrcsOf:
    assert CRCS_OF is not None
    return CRCS_OF


@st.composite
def columns(draw: st.DrawFn) -> list[Column]:
    """Up to three columns of the same samples, which may be empty in any of them; at any address."""
    samples = draw(st.integers(0, 12))
    found = []
    for _ in range(draw(st.integers(1, 3))):
        sizes = draw(st.lists(st.integers(0, 70), min_size=samples, max_size=samples))
        bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        shift = draw(st.integers(0, 7))
        data = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, shift + int(bounds[-1]), np.uint8)
        found.append((data[shift:], bounds))
    return found


@given(columns())
def test_the_kernel_gives_each_sample_the_checksum_that_the_package_gives(given_columns: list[Column]) -> None:
    crcs, whole = by_kernel()(given_columns)
    assert crcs.tolist() == plain(given_columns)[0].tolist()
    assert whole == wire.checksum([data.data for data, _ in given_columns])


@given(st.binary(max_size=50), st.binary(max_size=50), st.integers(0, 3))
def test_the_checksum_of_two_parts_follows_from_theirs(first: bytes, second: bytes, level: int) -> None:
    from streampack.crc_kernels import joined

    second += bytes((256**level - 1) * 5)  # so that every digit of the number of bytes counts
    assert joined(crc32c(first), crc32c(second), len(second)) == crc32c(first + second)


def random_batch(fields: tuple[Field, ...]) -> tuple[Batch, Lease]:
    rng = np.random.default_rng(1)
    lengths = np.array([5, 0, 400, 1, 2048, 77], np.uint32)
    total = int(lengths.sum())
    values: dict[str, NDArray[np.generic]] = {}
    for each in fields:
        count = len(lengths) if each.axis == "sample" else total
        values[each.name] = rng.integers(0, 100, (count, *each.shape)).astype(each.storage)
    lease = Lease(
        stream="s", partition=0, partitions=1, first_seq=0, cursor=None, seed=0, passes=1, dtype="uint16",
        fields=fields, overlong="error", poison="error", max_sample_tokens=4096, max_chunk_bytes=1 << 20,
    )  # fmt: skip
    tokens = rng.integers(0, 60_000, total).astype(np.uint16)
    return Batch(tokens, lengths, Cursor(0, 0, 6), {}, fields=values), lease


def test_a_chunk_is_the_same_message_whoever_computes_its_checksums() -> None:
    routes, reward = Field(name="routes", dtype="int16", shape=(2, 3)), Field(name="r", dtype="float32", axis="sample")
    batch, lease = random_batch((routes, reward))
    slow, fast = chunk_of(batch, lease, (1, 1)), chunk_of(batch, lease, (1, 1), by_kernel())
    assert slow.payload_crc is None
    assert fast.payload_crc is not None
    assert replace(fast, payload_crc=None) == slow
    frames = []
    for chunk in (slow, fast):
        samples = Samples(
            stream="s", partition=0, base_seq=0, lengths_u32=chunk.lengths_u32, crcs_u32=chunk.crcs_u32,
            loss_tokens_u32=chunk.loss_tokens_u32, cursor=chunk.cursor,
        )  # fmt: skip
        envelope = Envelope(
            run=1, epoch=2, fence=3, message=samples, payload=chunk.payload, payload_crc=chunk.payload_crc
        )
        frames.append([bytes(frame) for frame in wire.encode(envelope)])
    assert frames[0] == frames[1]


def test_bounds_that_are_not_the_data_s_are_refused_before_anything_is_read() -> None:
    data = np.zeros(16, np.uint8)
    for bounds in ([0, 17], [0, 8], [8, 16], [0, 24, 16], [0, -8, 16]):
        with pytest.raises(ValueError, match="bounds"):
            by_kernel()([(data, np.array(bounds))])


def test_without_numba_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "streampack.crc_kernels", None)
    monkeypatch.delattr(streampack, "crc_kernels", raising=False)
    assert compiled() is None
