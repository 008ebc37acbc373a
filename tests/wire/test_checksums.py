"""CRC-32C against a table that goes byte by byte and RFC 3720; and the kernel's checksums of samples."""

from __future__ import annotations

import platform
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.typing import NDArray

from streampack.core.columns.chunk_body import chunk_as
from streampack.core.model.fields import Field
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.producer_messages import Lease, Samples
from streampack.producer.chunk import TokenChunk
from streampack.producer.chunks import chunk_of
from streampack.sources import Cursor
from streampack.wire import frames as wire
from streampack.wire.checksums import Column, CrcsOf, crc32c
from streampack.wire.sample_checksums import compiled, plain

CRCS_OF = compiled()
of_the_kernel = pytest.mark.skipif(platform.machine() != "x86_64", reason="the kernel is of x86-64's instructions")


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


TABLE = [_entry(byte) for byte in range(256)]
READ_COMMAND = (
    "01c000000000000000000000000000001400000000000400000000140000001828000000000000000200000000000000"
)  # fmt: skip


def bytewise(data: bytes) -> int:
    """The oracle, CRC-32C by its definition."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (bytes(32), "aa36918a"),
        (b"\xff" * 32, "43aba862"),
        (bytes(range(32)), "4e79dd46"),
        (bytes(range(31, -1, -1)), "5cdb3f11"),
        (bytes.fromhex(READ_COMMAND), "563a96d9"),
        (b"123456789", "839206e3"),  # the check value of catalogs of CRCs
    ],
)
def test_checksums_are_those_of_rfc_3720_appendix_b_4(data: bytes, expected: str) -> None:
    assert [crc.to_bytes(4, "little").hex() for crc in (crc32c(data), bytewise(data))] == [expected] * 2


@given(st.integers(0, 9000), st.integers(0, 70), st.integers(0, 9000), st.integers(0, 99))
def test_a_checksum_is_the_table_s_in_one_part_or_two(size: int, shift: int, cut: int, seed: int) -> None:
    """At any address, of any length, of memory that may be written to and of memory that may not."""
    data = np.random.default_rng(seed).integers(0, 256, shift + size, np.uint8)[shift:]
    expected = bytewise(data.tobytes())
    assert crc32c(data.data) == crc32c(data.tobytes()) == crc32c(data.data.toreadonly()) == expected
    assert crc32c(data[cut:].data, crc32c(data[:cut].data)) == expected


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


def bytes_of(given_columns: list[Column]) -> list[bytes]:
    """The bytes of each sample in all columns."""
    samples = [b""] * (len(given_columns[0][1]) - 1)
    for data, bounds in given_columns:
        for i in range(len(samples)):
            samples[i] += data[bounds[i] : bounds[i + 1]].tobytes()
    return samples


@given(columns())
def test_each_sample_has_the_checksum_of_its_bytes_in_all_columns(given_columns: list[Column]) -> None:
    assert plain(given_columns)[0].tolist() == [bytewise(sample) for sample in bytes_of(given_columns)]


@of_the_kernel
@given(columns())
def test_the_kernel_gives_the_checksums_of_each_sample_and_of_the_whole(given_columns: list[Column]) -> None:
    crcs, whole = by_kernel()(given_columns)
    assert crcs.tolist() == [bytewise(sample) for sample in bytes_of(given_columns)]
    assert whole == bytewise(b"".join(data.tobytes() for data, _ in given_columns))


@of_the_kernel
@given(st.binary(max_size=50), st.binary(max_size=50), st.integers(0, 3))
@settings(max_examples=30)
@example(b"a", b"b", 3)
def test_the_checksum_of_two_parts_follows_from_theirs(first: bytes, second: bytes, level: int) -> None:
    from streampack.wire.crc_kernels import joined

    second += bytes((256**level - 1) * 5)  # so that every digit of the number of bytes counts
    assert joined(crc32c(first), crc32c(second), len(second)) == crc32c(first + second)


def random_batch(fields: tuple[Field, ...]) -> tuple[TokenChunk, Lease]:
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
    return TokenChunk(tokens, lengths, Cursor(0, 0, 6), {}, fields=values), lease


@of_the_kernel
def test_a_chunk_is_the_same_message_whoever_computes_its_checksums() -> None:
    routes, reward = Field(name="routes", dtype="int16", shape=(2, 3)), Field(name="r", dtype="float32", axis="sample")
    batch, lease = random_batch((routes, reward))
    slow, fast = chunk_of(batch, lease, (1, 1)), chunk_of(batch, lease, (1, 1), by_kernel())
    assert slow.payload_crc is None
    assert fast.payload_crc is not None
    assert replace(fast, payload_crc=None) == slow
    frames = []
    for chunk in (slow, fast):
        envelope = Envelope(
            run=1, epoch=2, fence=3, message=chunk_as(Samples, chunk), payload=chunk.payload,
            payload_crc=chunk.payload_crc,
        )  # fmt: skip
        frames.append([bytes(frame) for frame in wire.encode(envelope)])
    assert frames[0] == frames[1]


@of_the_kernel
def test_bounds_that_are_not_the_data_s_are_refused_before_anything_is_read() -> None:
    data = np.zeros(16, np.uint8)
    for bounds in ([0, 17], [0, 8], [8, 16], [0, 24, 16], [0, -8, 16]):
        with pytest.raises(ValueError, match="bounds"):
            by_kernel()([(data, np.array(bounds))])


def test_without_numba_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "streampack.wire.crc_kernels", None)
    monkeypatch.delattr("streampack.wire.crc_kernels", raising=False)
    assert compiled() is None
