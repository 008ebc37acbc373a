"""Samples read many at once are the same as records of each: order, cursors, policies, fields, what is rejected."""

import contextlib
import doctest
import io
import json
import os
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from streampack.core.model.fields import Field
from streampack.core.protocol.producer_messages import Lease
from streampack.errors import SampleError, SourceError
from streampack.producer.chunk import TokenChunk
from streampack.producer.chunks import batches
from streampack.sources import Cursor, ManySource, RawSample, Records, Room, Source, SourceSettings, arrays, open_source
from streampack.sources.files import byte_source, listing
from streampack.sources.formats import webdataset
from streampack.sources.formats.huggingface import ArrowShard
from streampack.sources.formats.parquet import ParquetShard
from streampack.sources.formats.python import ItemShard
from streampack.sources.order import is_begin
from streampack.sources.walk import ShardedSource

MASK = Field(name="loss_mask", dtype="uint8", align="target")
LABELS = Field(name="labels", dtype="int32", align="target", pad=-100)
POSITIONS = Field(name="position_ids", dtype="int32", shape=(3,))
WEIGHT = Field(name="weight", dtype="float16", default=1)
REWARD = Field(name="reward", dtype="float32", axis="sample", default=2)
NEEDED = Field(name="seen", dtype="int32")
_CODES = {"u1": 1, "i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<u2": 8}


@dataclass(frozen=True)
class Singly:
    """A source without its ``read_many``: what is read from it are records."""

    source: Source

    @property
    def digest(self) -> str:
        return self.source.digest

    @property
    def num_shards(self) -> int:
        return self.source.num_shards

    @property
    def vocab_size(self) -> int | None:
        return self.source.vocab_size

    def read(self, *args: Any, **kwargs: Any) -> Iterator[RawSample]:
        return self.source.read(*args, **kwargs)


def write_megatron(folder: Path, samples: list[list[int]], dtype: str) -> SourceSettings:
    arrays = [np.array(ids, dtype) for ids in samples]
    raw = [ids.tobytes() for ids in arrays]
    offsets = np.cumsum([0, *map(len, raw)])[:-1].astype("<i8")
    (folder / "a.bin").write_bytes(b"".join(raw))
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, _CODES[dtype], len(samples), 0)
    sizes = np.array([len(ids) for ids in samples], "<i4")
    (folder / "a.idx").write_bytes(head + sizes.tobytes() + offsets.tobytes())
    return SourceSettings("megatron", path=str(folder / "a"))


def lease(**changes: Any) -> Lease:
    terms: dict[str, Any] = {
        "stream": "s", "partition": 0, "partitions": 1, "first_seq": 0, "cursor": None, "seed": 3, "passes": 2,
        "dtype": "int32", "fields": (), "overlong": "drop", "poison": "drop", "max_sample_tokens": 1000,
        "max_chunk_bytes": 1 << 20,
    }  # fmt: skip
    return Lease(**terms | changes)


Taken = tuple[list[Any], dict[str, int], int, dict[int, Cursor], list[int]]


def taken_apart(found: Iterator[TokenChunk]) -> Taken:
    """Samples with their fields and labels that count; what is rejected; lost tokens; cursors and ends of passes by
    the number of samples before them.
    """
    samples: list[Any] = []
    rejected: dict[str, int] = {}
    lost, cursors, ends = 0, {}, []
    for batch in found:
        at = 0
        for i, length in enumerate(batch.lengths.tolist()):
            own = {
                name: (value[i] if name == REWARD.name else value[at : at + length]).tolist()
                for name, value in batch.fields.items()
            }
            loss = None if batch.loss_tokens is None else int(batch.loss_tokens[i])
            samples.append((batch.tokens[at : at + length].tolist(), own, loss))
            at += length
        assert at == len(batch.tokens)
        for reason, count in batch.rejected.items():
            rejected[reason] = rejected.get(reason, 0) + count
        assert {reason for reason, _ in batch.examples} == set(batch.rejected)
        lost += batch.lost_tokens
        cursors[len(samples)] = batch.cursor
        if batch.pass_ended:
            ends.append(len(samples))
    return samples, rejected, lost, cursors, ends


def outcome(source: Source, terms: Lease) -> Taken | str:
    """What all its batches hold, or the error that ended them without the name of the place."""
    try:
        return taken_apart(batches(source, terms))
    except SampleError as error:
        return str(error).partition(": ")[2]


def same_samples(found: Taken | str, expected: Taken | str) -> bool:
    """But for where one batch ends and the next begins."""
    if isinstance(found, str) or isinstance(expected, str):
        return found == expected
    return found[:3] == expected[:3] and found[4] == expected[4]


def check_same(source: Source, terms: Lease, records: Source | None = None) -> None:
    """Many at once as one by one: ``records`` gives these, None: the source itself. Odd seeds mix the shards."""
    singly = Singly(records or source)
    if terms.cursor is None and terms.seed % 2 and isinstance(source, ShardedSource):
        terms = msgspec.structs.replace(terms, cursor=source.begin)
    start = Cursor(*terms.cursor or (0, 0, 0))
    cursors = [
        record.cursor
        for record in singly.read(
            terms.partition, terms.partitions, seed=terms.seed, passes=terms.passes, fields=terms.fields, start=start,
            skip=terms.first_seq if is_begin(start) else 0,
        )
    ]  # fmt: skip
    found, expected = outcome(source, terms), outcome(singly, terms)
    assert same_samples(found, expected)
    for some in (found, expected):
        assert isinstance(some, str) or all(cursors[count - 1] == cursor for count, cursor in some[3].items())


lengths = st.lists(st.integers(0, 9), min_size=1, max_size=150)
terms_of = st.fixed_dictionaries(
    {
        "overlong": st.sampled_from(["truncate", "drop", "split", "error"]),
        "poison": st.sampled_from(["drop", "drop", "error"]),
        "max_sample_tokens": st.sampled_from([1, 4, 7, 1000]),
        "max_chunk_bytes": st.sampled_from([8, 100, 400, 1 << 20]),
        "dtype": st.sampled_from(["int32", "uint16"]),
        "fields": st.sampled_from([(), (), (MASK,), (LABELS, POSITIONS), (WEIGHT, REWARD, MASK), (NEEDED,)]),
        "seed": st.integers(0, 3),
        "passes": st.sampled_from([1, 3]),
        "first_seq": st.integers(0, 60),
    }
)


@given(
    lengths, st.sampled_from(list(_CODES)), st.booleans(), st.integers(1, 3), terms_of, st.booleans(), st.integers(0)
)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_sequences_read_many_at_once_are_those_read_one_by_one(
    lengths: list[int], dtype: str, wild: bool, partitions: int, terms: dict[str, Any], shuffle: bool, salt: int
) -> None:
    rng = np.random.default_rng(salt)
    low, high = (np.iinfo(dtype).min, np.iinfo(dtype).max) if wild else (0, 100)
    samples = [rng.integers(low, high, length, endpoint=True).tolist() for length in lengths]
    with tempfile.TemporaryDirectory() as folder:
        written = write_megatron(Path(folder), samples, dtype)
        source = open_source(SourceSettings("megatron", path=written.path, shuffle=shuffle))
        for partition in range(partitions):
            leased = lease(**terms, partition=partition, partitions=partitions)
            check_same(source, leased)
            read = list(source.read(partition, partitions, seed=leased.seed, passes=leased.passes))
            if read:
                cursor = read[salt % len(read)].cursor
                check_same(source, lease(**terms | {"cursor": cursor}, partition=partition, partitions=partitions))
            if not shuffle:
                own = samples if partition == 0 else []  # one file is one partition's, in its order
                good = [ids if all(0 <= value < 2**31 for value in ids) else [] for ids in own]
                assert [record.tokens.tolist() for record in read] == good * terms["passes"]


def npy(ids: NDArray[Any], version: tuple[int, int] = (1, 0)) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, ids, version=version)
    return buffer.getvalue()


OLD_HEADER = b"\x93NUMPY\1\0\x46\0" + b"{'descr': '<u2', 'fortran_order': False, 'shape': (2,), }".ljust(69) + b"\n"
MEMBERS: dict[str, Callable[[NDArray[Any]], dict[str, bytes]]] = {
    "u2": lambda ids: {"npy": npy(ids.astype("<u2"))},
    "i4": lambda ids: {"npy": npy(ids.astype("<i4"))},
    "i8": lambda ids: {"npy": npy(ids.astype("<i8"))},
    "big endian": lambda ids: {"npy": npy(ids.astype(">u2"))},
    "version 2": lambda ids: {"npy": npy(ids, (2, 0))},
    "below 0": lambda ids: {"npy": npy(-1 - ids.astype("<i4"))},
    "with another beside": lambda ids: {"cls": b"7", "npy": npy(ids.astype("<u2"))},
    "floats": lambda ids: {"npy": npy(ids.astype("<f4"))},
    "bools": lambda ids: {"npy": npy(ids > 3)},
    "no dimension": lambda ids: {"npy": npy(np.array(7))},
    "two dimensions": lambda ids: {"npy": npy(ids.reshape(1, -1))},
    "cut": lambda ids: {"npy": npy(ids.astype("<u2"))[:-1]},
    "too long": lambda ids: {"npy": npy(ids.astype("<u2")) + b"\0\0"},
    "another length": lambda ids: {"npy": npy(ids.astype("<u2"))[:-2]},
    "only a header": lambda ids: {"npy": npy(ids.astype("<u2"))[:128]},
    "no header": lambda ids: {"npy": b"\0" * 200},
    "old header": lambda ids: {"npy": OLD_HEADER + b"ab\0\1"},
    "with a mask": lambda ids: {"npy": npy(ids), "loss_mask.npy": npy((ids % 2).astype("u1"))},
    "with a wide mask": lambda ids: {"npy": npy(ids), "loss_mask.npy": npy(ids % 2)},
    "with a signed mask": lambda ids: {"npy": npy(ids), "loss_mask.npy": npy(-(ids % 2).astype("i1"))},
    "with a short mask": lambda ids: {"npy": npy(ids), "loss_mask.npy": npy((ids[1:] % 2).astype("u1"))},
    "with a cut mask": lambda ids: {"npy": npy(ids), "loss_mask.npy": npy((ids % 2).astype("u1"))[:-1]},
    "with a mask in json": lambda ids: {"npy": npy(ids), "json": json.dumps({"loss_mask": [1] * len(ids)}).encode()},
    "with both": lambda ids: {"npy": npy(ids), "json": b"{", "loss_mask.npy": npy((ids % 2).astype("u1"))},
    "with labels": lambda ids: {"npy": npy(ids), "labels.npy": npy(ids.astype("<i4")), "loss_mask.npy": npy(ids > 3)},
    "missing": lambda ids: {"cls": b"7"},
    "twice": lambda ids: {"npy": npy(ids), "NPY": npy(ids)},
}


def write_tar(path: Path, samples: list[tuple[str, int]]) -> Path:
    rng = np.random.default_rng(len(samples))
    with tarfile.open(path, "w") as archive:
        for i, (kind, length) in enumerate(samples):
            for suffix, raw in MEMBERS[kind](rng.integers(0, 30_000, length)).items():
                info = tarfile.TarInfo(f"{i}.{suffix}")
                info.size = len(raw)
                archive.addfile(info, io.BytesIO(raw))
    return path


def runs_of_kinds() -> st.SearchStrategy[list[tuple[str, int]]]:
    """Samples (kind, length), neighbors often of one kind."""

    def runs(kinds: list[str]) -> st.SearchStrategy[list[tuple[str, list[int]]]]:
        run = st.tuples(st.sampled_from(kinds), st.lists(st.integers(0, 12), min_size=1, max_size=12))
        return st.lists(run, min_size=1, max_size=8)

    masked = [kind for kind in MEMBERS if "mask" in kind and "json" not in kind]
    found = runs(list(MEMBERS)) | runs(masked).map(lambda runs: [("with a mask", [3]), *runs])
    return found.map(lambda runs: [(kind, length) for kind, lengths in runs for length in lengths])


@contextlib.contextmanager
def read_singly(shard: type[Any]) -> Iterator[None]:
    """Shards of this class load one sample at a time, as they do what is no array."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "as_arrays", lambda self: self)
        yield


FIELDS = st.sampled_from([(), (MASK,), (MASK, REWARD), (REWARD,), (LABELS, MASK)])


ALL_THERE = {"max_chunk_bytes": 1 << 20, "passes": 1, "first_seq": 0}


@given(runs_of_kinds(), terms_of, FIELDS, st.booleans())
@example([("with a mask", 9), ("with a signed mask", 9), ("with a mask", 9)], ALL_THERE, (MASK,), False)
@example([("with a mask", 9), ("with a cut mask", 9), ("with a mask", 9)], ALL_THERE, (MASK,), False)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_arrays_in_a_tar_read_many_at_once_are_those_read_one_by_one(
    samples: list[tuple[str, int]], terms: dict[str, Any], fields: tuple[Field, ...], shuffle: bool
) -> None:
    terms = terms | {"fields": fields}
    with tempfile.TemporaryDirectory() as folder:
        path = write_tar(Path(folder) / "a.tar", samples)
        source = open_source(SourceSettings("webdataset", path=str(path), tokens_key="npy", shuffle=shuffle))
        with read_singly(webdataset.TarShard):
            expected = outcome(Singly(source), lease(**terms))
        if not isinstance(expected, str):
            assert len(expected[0]) == max(0, len(samples) * terms["passes"] - terms["first_seq"])
        check_same(source, lease(**terms))
        assert same_samples(outcome(source, lease(**terms)), expected)


IDS: tuple[Any, ...] = (None, [], [7], [7, 8, 9], [1, 2, 3], [5, 6], [1, None], [-1, 2], [70_000], [2**31 - 1, 4])
MASKS: tuple[Any, ...] = (None, [], [1], [0, 1, 1], [1, 0, 1], [1, 1], [0], [1, None])
ROWS = st.lists(
    st.tuples(st.sampled_from(IDS), st.sampled_from(MASKS), st.sampled_from([1.5, -2.0, None])), min_size=1, max_size=60
)
KINDS = st.sampled_from(["int32", "int64", "int16", "uint8", "float32"])


@given(
    ROWS, KINDS, KINDS, st.booleans(), st.integers(1, 30), terms_of, st.booleans(),
    FIELDS, st.booleans(),
)  # fmt: skip
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_lists_in_columns_read_many_at_once_are_those_read_one_by_one(
    rows: list[Any], kind: str, mask_kind: str, plain: bool, group: int, terms: dict[str, Any], large: bool,
    fields: tuple[Field, ...], parquet: bool,
) -> None:  # fmt: skip
    limit = np.iinfo(kind).max if kind != "float32" else 2**31 - 1
    low = -1 if np.dtype(kind).kind != "u" else 0
    rows = [
        (
            ids
            and [
                value if value is None else max(low, min(value, int(limit) if kind != "float32" else 2**20))
                for value in ids
            ],
            mask,
            reward,
        )
        for ids, mask, reward in rows
    ]
    if plain:  # as most files are: a mask of as many, and no nulls
        rows = [([value or 0 for value in ids or [3]], None, reward or 0.0) for ids, _, reward in rows]
        rows = [(ids, [at % 2 for at in range(len(ids))], reward) for ids, _, reward in rows]
    of = pa.large_list if large else pa.list_
    table = pa.table(
        {
            "input_ids": pa.array([row[0] for row in rows], of(pa.type_for_alias(kind))),
            "loss_mask": pa.array([row[1] for row in rows], of(pa.type_for_alias(mask_kind))),
            "reward": pa.array([row[2] for row in rows], pa.float64()),
        }
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if parquet:
            pq.write_table(table, folder / "a.parquet", row_group_size=group)
            source = open_source(SourceSettings("parquet", path=str(folder / "a.parquet")))
        else:
            with pa.ipc.new_stream(folder / "a.arrow", table.schema) as writer:
                writer.write_table(table, max_chunksize=group)
            (folder / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
            source = open_source(SourceSettings("huggingface", path=name))
        leased = lease(**terms | {"fields": fields})
        with read_singly(ParquetShard if parquet else ArrowShard):
            expected = outcome(Singly(source), leased)
        if not isinstance(expected, str):
            assert len(expected[0]) == max(0, len(rows) * terms["passes"] - terms["first_seq"])
        check_same(source, leased)
        assert same_samples(outcome(source, leased), expected)


ITEMS: list[Any] = []
ITEM_KINDS = st.sampled_from(["<u2", "<i8", "f4", "list", "text", "none", "2-D"])
TABLE: NDArray[Any] = np.arange(600, dtype=np.uint16).reshape(100, 6)


@given(st.lists(st.tuples(ITEM_KINDS, st.integers(0, 9)), min_size=1), terms_of, st.booleans())
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_items_read_many_at_once_are_those_read_one_by_one(
    kinds: list[tuple[str, int]], terms: dict[str, Any], shuffle: bool
) -> None:
    others: dict[str, Callable[[int], Any]] = {
        "list": lambda length: [5] * length, "text": "a".__mul__, "none": lambda _: None,
        "2-D": lambda length: np.ones((length, 1), np.int32),
    }  # fmt: skip
    ITEMS[:] = [others[kind](n) if kind in others else np.arange(n).astype(kind) - (n == 8) for kind, n in kinds]
    source = open_source(SourceSettings("python", path=f"{__name__}:ITEMS", shuffle=shuffle))
    with read_singly(ItemShard):
        expected = outcome(Singly(source), lease(**terms))
    check_same(source, lease(**terms))
    assert same_samples(outcome(source, lease(**terms)), expected)


def test_the_rows_of_an_array_are_items() -> None:
    source = open_source(SourceSettings("python", path=f"{__name__}:TABLE", shuffle=False))
    (batch,) = batches(source, lease(passes=1))
    assert batch.tokens.tolist() == list(range(600))
    assert batch.lengths.tolist() == [6] * 100


def test_rows_that_are_read_many_at_once_are_seldom_read_one_by_one(tmp_path: Path) -> None:
    ids = [[5] * (1 + i % 7) for i in range(1000)]
    pq.write_table(pa.table({"input_ids": ids}), tmp_path / "a.parquet", row_group_size=250)
    write_tar(tmp_path / "a.tar", [("u2", 1 + i % 7) for i in range(1000)])
    write_tar(tmp_path / "mask.tar", [("with a mask", 1 + i % 7) for i in range(1000)])
    for name, sizes in (("a.parquet", [500] * 2), ("a.tar", [500] * 2), ("mask.tar", [500] * 2)):
        kind: Any = "parquet" if "parquet" in name else "webdataset"
        source = open_source(SourceSettings(kind, path=str(tmp_path / name), missing_mask="train"))
        assert isinstance(source, ManySource)
        found = list(source.read_many(0, 1, seed=0, passes=1, room=Room(500, 10_000), fields=(MASK,)))
        assert sorted(map(len, found)) == sizes


@given(lengths, st.integers(1, 20), st.integers(1, 60))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_more_is_read_at_once_than_there_is_room_for(lengths: list[int], most: int, tokens: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        written = write_megatron(Path(folder), [[7] * length for length in lengths], "<u2")
        source = open_source(written)
        assert isinstance(source, ManySource)
        found = list(source.read_many(0, 1, seed=0, passes=1, room=Room(most, tokens)))
        assert all(isinstance(each, Records) for each in found)
        assert all(len(each) == 1 or (len(each) <= most and len(each.samples.tokens) <= tokens) for each in found)  # type: ignore[union-attr]
        assert sum(map(len, found)) == len(lengths)


def test_a_file_that_is_cut_between_two_batches_is_named(tmp_path: Path) -> None:
    written = write_megatron(tmp_path, [[7] * 5000] * 64, "<u2")
    source = open_source(SourceSettings("megatron", path=written.path, shuffle=False))
    found = batches(source, lease(max_chunk_bytes=20_000))
    next(found)
    with (tmp_path / "a.bin").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(SourceError, match="got 1000 bytes, expected 640000 bytes as at the start"):
        list(found)


def test_a_file_that_cannot_be_mapped_is_read(tmp_path: Path) -> None:
    written = write_megatron(tmp_path, [[7, 8], [9]], "<i8")
    hole, count = 2**31 - 1, 6  # sequences of zeros that take no room on disk, about 100 GB together
    sizes, documents = np.array([2, 1, *[hole] * (count - 2)], "<i4"), np.arange(count + 1, dtype="<i8")
    ends = np.cumsum(sizes, dtype="<i8") * 8
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 5, count, count + 1)
    columns = sizes, np.append(0, ends[:-1]), documents
    (tmp_path / "a.idx").write_bytes(head + b"".join(column.tobytes() for column in columns))
    os.truncate(tmp_path / "a.bin", int(ends[-1]))
    code = (
        "import itertools, resource; resource.setrlimit(resource.RLIMIT_AS, (32 << 30, 32 << 30)); "
        "from streampack.sources import SourceSettings, open_source; "
        f"source = open_source(SourceSettings('megatron', path={written.path!r}, shuffle=False)); "
        "records = itertools.islice(source.read(0, 1, seed=0, passes=1), 2); "
        "print([record.tokens.tolist() for record in records])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[[7, 8], [9]]"


def test_examples_in_docstrings_of_array_sources_run() -> None:
    assert sum(doctest.testmod(module).failed for module in (arrays, byte_source, listing)) == 0
