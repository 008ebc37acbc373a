"""Every format: any cursor goes on exactly, every record once over any partitions, damage is one clear line."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from streampack.errors import ConfigError, SourceError
from streampack.sources import (
    OpenedSource,
    RawSample,
    Source,
    SourceSettings,
    open_source,
)
from streampack.sources.walk import ShardedSource
from tests.sources.writers import (
    EVERY,
    PLAIN,
    SIZES,
    WRITERS,
    megatron,
    texts_of,
    write_megatron,
    write_saved,
)

# Writers: a folder with files of texts, and the settings that read them.


@pytest.fixture(scope="module", params=list(WRITERS))
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenedSource:
    """The same texts in every format."""
    return open_source(WRITERS[request.param](tmp_path_factory.mktemp("files")), PLAIN)


def text_of(record: RawSample) -> str:
    return bytes(record.tokens.astype(np.uint8)).decode()


def as_data(record: RawSample) -> tuple[Any, ...]:
    return text_of(record), record.reason, record.where, record.cursor


def read(settings: SourceSettings, **more: Any) -> list[RawSample]:
    return list(open_source(settings, PLAIN).read(0, 1, seed=0, passes=1, **more))


@given(st.integers(1, 9), st.integers(0, 2**64), st.integers(0, 2))
def test_the_partitions_together_hold_every_record_once_a_pass(
    source: Source, partitions: int, seed: int, passes: int
) -> None:
    found = [text_of(r) for p in range(partitions) for r in source.read(p, partitions, seed=seed, passes=passes)]
    assert sorted(found) == sorted(EVERY * passes)


@given(st.integers(1, 4), st.integers(0, 5), st.integers(0, 300), st.integers(0, 200))
def test_going_on_from_any_cursor_gives_exactly_the_rest(
    source: Source, partitions: int, seed: int, at: int, skip: int
) -> None:
    partition = at % partitions
    whole = list(map(as_data, source.read(partition, partitions, seed=seed, passes=2)))
    at %= len(whole) + 1
    start = whole[at - 1][-1] if at else None
    rest = source.read(partition, partitions, seed=seed, passes=2, start=start, skip=skip)
    assert list(map(as_data, rest)) == whole[at + skip :]


def test_passes_differ_in_their_order_where_items_can_be_sought(
    source: OpenedSource, request: pytest.FixtureRequest
) -> None:
    first, second = _halves([text_of(r) for r in source.read(0, 1, seed=3, passes=2)])
    assert sorted(first) == sorted(second) == EVERY
    kept = request.node.callspec.params["source"] in ("python generator", "python iterable", "python divided")
    assert (first == second) == kept


@pytest.mark.parametrize("kind", ["megatron", "python object", "python list", "jsonl", "parquet"])
@pytest.mark.parametrize("partitions", [1, 3])
def test_files_that_are_not_shuffled_come_in_their_own_order(kind: str, partitions: int, tmp_path: Path) -> None:
    settings = msgspec.structs.replace(WRITERS[kind](tmp_path), shuffle=False)
    files = [EVERY] if kind.startswith("python") else [texts_of(count, file) for file, count in enumerate(SIZES)]
    source = open_source(settings, PLAIN)
    for partition in range(partitions):
        records = list(source.read(partition, partitions, seed=3, passes=1))
        assert [text_of(record) for record in records] == list(
            itertools.chain.from_iterable(files[partition::partitions])
        )
        assert isinstance(source, ShardedSource)
        for seq in range(0, len(records), 17):
            where = records[seq].where
            (place,) = source.locate(partition, partitions, seed=3, passes=1, seqs=[seq], reads=True)
            assert place.sample is not None
            assert (place.where, text_of(place.sample)) == (where, text_of(records[seq]))
            assert source.find(where.__eq__, partitions, seed=3, passes=1, upto=9) == [(partition, seq)]


def test_the_digest_tells_pieces_in_file_order_from_pieces_dealt_out(tmp_path: Path) -> None:
    settings = write_megatron(tmp_path)
    shuffled, in_order = (open_source(msgspec.structs.replace(settings, shuffle=each), PLAIN) for each in (True, False))
    assert shuffled.digest.startswith("aeeaf94f038bf46b"), "runs that shuffle go on"
    assert not in_order.digest.startswith("0aadcb083a74359b"), "the digest of when all partitions shared each file"


def _halves(items: list[str]) -> tuple[list[str], list[str]]:
    return items[: len(items) // 2], items[len(items) // 2 :]


def test_digests_and_numbers_of_files_are_those_of_the_source(
    source: OpenedSource, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.params["source"]
    files = {"megatron": 2 * len(SIZES), "file": len(EVERY)}.get(name, 0 if "python" in name else len(SIZES))
    assert source.num_files == files
    assert len(source.digest) == 64


# Bad files, one line each.


def message(settings: SourceSettings, **more: Any) -> str:
    """What is said of settings that cannot be read, or of the file among them that is damaged."""
    try:
        said = next(record.where for record in read(settings, **more) if record.reason == "damaged")
    except (SourceError, ConfigError) as error:
        said = str(error)
    assert "\n" not in said
    return said


@pytest.mark.parametrize("kind", ["parquet", "huggingface", "megatron"])  # tar: test_sources.py
def test_a_file_that_is_cut_anywhere_is_never_taken_for_a_shorter_one(kind: str, tmp_path: Path) -> None:
    settings = WRITERS[kind](tmp_path)
    path = sorted(tmp_path.glob("2.*") if kind != "huggingface" else tmp_path.glob("data-00002*"))[-1]
    whole = path.read_bytes()
    end = len(whole)
    for size in sorted({0, 1, 7, 8, 9, 33, 34, end - 9, end - 8, end - 1, *range(0, end, max(1, end // 40))}):
        path.write_bytes(whole[:size])
        assert f"{path}: " in message(settings) or f"{path.with_suffix('.bin')}: " in message(settings)
    path.write_bytes(whole)
    assert len(read(settings)) == len(EVERY)


@pytest.mark.parametrize(("kind", "expected"), [
    ("parquet", "got 0 bytes, expected a Parquet file"),
    ("huggingface", "got 0 bytes, expected an Arrow stream"),
    ("megatron", "got 0 bytes, expected at least 34"),
])  # fmt: skip
def test_a_file_of_0_bytes_is_named(kind: str, expected: str, tmp_path: Path) -> None:
    settings = WRITERS[kind](tmp_path)
    for path in tmp_path.iterdir():
        if path.suffix != ".json":
            path.write_bytes(b"")
    assert expected in message(settings)


@pytest.mark.parametrize("unit", ["line", "paragraph", "file"])
def test_an_empty_text_has_no_lines(unit: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    records = read(SourceSettings("text", path=str(tmp_path / "a.txt"), unit=unit))
    assert [record.reason for record in records] == (["empty"] if unit == "file" else [])


@pytest.mark.parametrize("unit", ["line", "paragraph", "file"])
def test_a_byte_order_mark_is_no_text(unit: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhi")
    (record,) = read(SourceSettings("text", path=str(tmp_path / "a.txt"), unit=unit))
    assert bytes(record.tokens[:2].tolist()) == b"hi"


@pytest.mark.parametrize("kind", ["parquet", "huggingface", "megatron"])
@given(data=st.data())
def test_a_damaged_file_is_refused_or_read_and_nothing_else(
    kind: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / f"damaged-{kind}"
    folder.mkdir(exist_ok=True)
    settings = WRITERS[kind](folder)
    path = data.draw(st.sampled_from(sorted(path for path in folder.iterdir() if path.suffix != ".json")))
    raw = bytearray(path.read_bytes() or b"\0")
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    with contextlib.suppress(SourceError):
        for record in read(settings):
            assert (len(record.tokens) > 0) == (record.reason is None)


@pytest.mark.parametrize("kind", ["text", "parquet", "huggingface", "megatron"])
def test_a_file_written_again_at_its_size_is_noticed(kind: str, tmp_path: Path) -> None:
    source = open_source(WRITERS[kind](tmp_path), PLAIN)
    for path in tmp_path.iterdir():
        os.utime(path, ns=(1, 1))
    with pytest.raises(SourceError, match="got a file that was written after the producer listed it"):
        list(source.read(0, 1, seed=0, passes=1))


# Parquet


def parquet(path: Path, columns: dict[str, Any], **more: Any) -> SourceSettings:
    pq.write_table(pa.table(columns), path, **more)
    return SourceSettings("parquet", path=str(path), shuffle=False)


def test_bad_rows_of_a_table_keep_their_places(tmp_path: Path) -> None:
    ids = pa.array([[1, 2], None, [], [3, None], [-1], [2**40], [7]], pa.list_(pa.int64()))
    records = read(parquet(tmp_path / "a.parquet", {"input_ids": ids}))
    assert [r.reason for r in records] == [None, "missing", "empty", "dtype", "range", "range", None]
    assert [r.tokens.tolist() for r in records if r.reason is None] == [[1, 2], [7]]
    assert records[3].where == "a.parquet:row 3"


@pytest.mark.parametrize(("column", "reason"), [
    (pa.nulls(2), "missing"),
    (pa.nulls(2, pa.string()), "missing"),
    (pa.array([1, 2]), "dtype"),
    (pa.array([[[1], [2, 3]], [[4], [5]]]), "ragged"),
    (pa.array([[1.5], [float("nan")]]), "dtype"),
    (pa.array([[True], [False]]), "dtype"),
    (pa.array([["a"], ["b"]]), "dtype"),
    (pa.array([b"\xff", b"\xfe"]), "dtype"),
])  # fmt: skip
def test_columns_of_wrong_types_reject_their_rows(tmp_path: Path, column: Any, reason: str) -> None:
    records = read(parquet(tmp_path / "a.parquet", {"tokens": column}))
    assert len(records) == 2
    assert {record.reason for record in records} <= {reason, "ragged"}
    assert records[0].reason == reason


@pytest.mark.parametrize("kind", [
    pa.list_(pa.int32()), pa.large_list(pa.uint16()), pa.list_(pa.int64(), 2), pa.list_(pa.uint8()),
])  # fmt: skip
def test_ids_may_be_lists_of_any_integers(tmp_path: Path, kind: Any) -> None:
    records = read(parquet(tmp_path / "a.parquet", {"tokens": pa.array([[1, 2], [3, 4], None], kind)}))
    assert [record.tokens.tolist() for record in records] == [[1, 2], [3, 4], []]


def test_a_text_that_is_no_utf8_is_rejected_alone(tmp_path: Path) -> None:
    raw = pa.array([b"ok", b"\xff\xff", b"yes"]).cast(pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    assert [r.reason for r in read(parquet(tmp_path / "a.parquet", {"text": texts}))] == [None, "encoding", None]


def test_a_table_without_a_sample_names_its_columns(tmp_path: Path) -> None:
    said = message(parquet(tmp_path / "a.parquet", {"body": ["x"], "id": [1]}))
    assert (
        "a.parquet: got the columns body, id, expected at least one of tokens, input_ids, text, messages, prompt"
        in said
    )
    settings = SourceSettings("parquet", path=str(tmp_path / "a.parquet"), text_key="body")
    assert [text_of(record) for record in read(settings)] == ["x"]


def test_only_the_columns_needed_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = parquet(tmp_path / "a.parquet", {"text": ["a"] * 9, "image": ["b"] * 9}, row_group_size=2)
    read_row_group, asked = pq.ParquetFile.read_row_group, []

    def spy(self: Any, group: int, columns: list[str], **more: Any) -> Any:
        asked.append((group, tuple(columns)))
        return read_row_group(self, group, columns=columns, **more)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", spy)
    read(SourceSettings("parquet", path=settings.path))
    assert sorted(asked) == [(group, ("text",)) for group in range(5)]  # each once, shuffled


# Saved datasets


def test_a_dataset_that_datasets_saved_is_read_in_its_order(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"text": f"row {i}", "meta": {"n": i}} for i in range(2500)]
    dataset = datasets.Dataset.from_list(rows)
    dataset.save_to_disk(str(tmp_path / "all"), num_shards=3)
    settings = SourceSettings("huggingface", path=str(tmp_path / "all"), shuffle=False)
    assert [text_of(record) for record in read(settings)] == [row["text"] for row in rows]
    dataset.shuffle(seed=1).select(range(100)).save_to_disk(str(tmp_path / "some"))
    got = [text_of(record) for record in read(SourceSettings("huggingface", f"{tmp_path}/some"))]
    assert sorted(got) == sorted(datasets.load_from_disk(str(tmp_path / "some"))["text"])
    datasets.DatasetDict(train=dataset, test=dataset).save_to_disk(str(tmp_path / "dict"))
    said = message(SourceSettings("huggingface", path=str(tmp_path / "dict")))
    assert "got a folder with the splits train, test, expected a single split. Give its folder" in said


def test_folders_that_are_no_saved_dataset_are_named(tmp_path: Path) -> None:
    settings = write_saved(tmp_path)
    state = json.loads((tmp_path / "state.json").read_text())
    for bad, expected in (
        ({**state, "_indices_data_files": [{"filename": "indices.arrow"}]}, "flatten_indices"),
        ({"_data_files": [{"filename": "../x"}]}, "is damaged"),
        ({"_data_files": []}, "got a dataset without data files"),
        ([], "is damaged"),
    ):
        (tmp_path / "state.json").write_text(json.dumps(bad))
        assert expected in message(settings)
    (tmp_path / "state.json").unlink()
    assert "got a folder without state.json" in message(settings)


def test_damaged_offsets_do_not_end_the_process(tmp_path: Path) -> None:
    settings = write_saved(tmp_path)
    path = tmp_path / "data-00002-of-00005.arrow"
    raw = path.read_bytes()
    offsets = struct.pack("<5i", 0, 3, 6, 9, 12)
    assert offsets in raw
    path.write_bytes(raw.replace(offsets, struct.pack("<5i", 0, 3, 6, 9, 2**30)))
    assert "The file is cut short, damaged or not an Arrow stream" in message(settings)


# Compressed files

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "gz of two members": lambda raw: gzip.compress(raw[:100]) + gzip.compress(raw[100:]),
    "zst": zstd.compress,
    "zst of two frames": lambda raw: zstd.compress(raw[:100]) + zstd.compress(raw[100:]),
}


def compress_all(folder: Path, packer: str) -> None:
    for path in list(folder.iterdir()):
        path.with_name(f"{path.name}.{packer.partition(' ')[0]}").write_bytes(PACKERS[packer](path.read_bytes()))
        path.unlink()


@pytest.mark.parametrize("kind", ["jsonl", "webdataset", "text", "paragraph", "file"])
@pytest.mark.parametrize("packer", list(PACKERS))
def test_compressed_files_are_read_in_the_order_of_the_plain_ones(kind: str, packer: str, tmp_path: Path) -> None:
    settings = WRITERS[kind](tmp_path)
    expected = list(map(as_data, open_source(settings, PLAIN).read(0, 1, seed=3, passes=2)))
    compress_all(tmp_path, packer)
    suffix = packer.partition(" ")[0]
    settings = msgspec.structs.replace(settings, shards=f"{settings.shards}.{suffix}")
    source = open_source(settings, PLAIN)

    def named(record: RawSample) -> tuple[Any, ...]:
        return (*as_data(record)[:2], record.where.replace(f".{suffix}:", ":"), record.cursor)

    assert list(map(named, source.read(0, 1, seed=3, passes=2))) == expected
    start = expected[len(expected) // 3][-1]
    rest = list(map(named, source.read(0, 1, seed=3, passes=2, start=start)))
    assert rest == expected[len(expected) // 3 + 1 :]


@pytest.mark.parametrize("packer", ["gz", "zst"])
def test_a_compressed_file_that_is_cut_or_damaged_is_never_a_shorter_one(packer: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    text = "".join(json.dumps({"text": f"{i * 7919 % 1000}"}) + "\n" for i in range(300)).encode()
    whole = PACKERS[packer](text)
    settings = SourceSettings("jsonl", path=str(path))
    for size in [*range(4, len(whole), 41), len(whole) - 1]:
        path.write_bytes(whole[:size])
        assert "a.jsonl: the file is cut short or damaged" in message(settings)
    path.write_bytes(whole + b"garbage")
    assert "a.jsonl: the file is cut short or damaged" in message(settings)
    path.write_bytes(whole)
    assert len(read(settings)) == 300


def test_a_compressed_file_needs_room_for_its_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n'))
    settings = SourceSettings("jsonl", path=str(path))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert len(read(settings)) == 1
    assert list(temporary.iterdir()) == [], "nothing is left behind"
    temporary.rmdir()
    assert f"cannot be decompressed into {temporary} (No such file" in message(settings)


def test_without_the_package_for_zstandard_its_name_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstd.compress(b'{"text": "a"}\n'))
    for module in ("backports.zstd", "compression.zstd"):
        monkeypatch.setitem(sys.modules, module, None)
    assert "pip install 'streampack[zstd]'" in message(SourceSettings("jsonl", path=str(path)))


# Megatron: golden bytes


def test_the_golden_bytes_of_a_megatron_index_are_read(tmp_path: Path) -> None:
    (tmp_path / "code.bin").write_bytes(bytes.fromhex("0100 0200 ffff 0700"))
    (tmp_path / "code.idx").write_bytes(
        bytes.fromhex(
            "4d4d49444944580000 0100000000000000 08 0300000000000000 0400000000000000"  # magic, 1, uint16, 3, 4
            "03000000 00000000 01000000"  # sizes
            "0000000000000000 0600000000000000 0600000000000000"  # pointers
            "0000000000000000 0100000000000000 0200000000000000 0300000000000000"  # documents
        )
    )
    for settings in (
        SourceSettings("megatron", path=str(tmp_path / "code"), shuffle=False),
        SourceSettings("megatron", f"{tmp_path}/*.bin", shuffle=False),
        SourceSettings("megatron", [f"{tmp_path}/code.idx"], shuffle=False),
    ):
        records = read(settings)
        assert [r.tokens.tolist() for r in records] == [[1, 2, 65535], [], [7]]
        assert [r.reason for r in records] == [None, "empty", None]
        assert records[2].where == "code.bin:sequence 2"


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 8])
def test_every_integer_dtype_is_read(code: int, tmp_path: Path) -> None:
    dtype = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}[code]
    megatron(tmp_path / "a", [np.array([1, 100], dtype).tobytes(), np.array([7], dtype).tobytes()], code)
    records = read(SourceSettings("megatron", path=str(tmp_path / "a"), shuffle=False))
    assert [record.tokens.tolist() for record in records] == [[1, 100], [7]]


@pytest.mark.parametrize(("at", "value", "expected"), [
    (0, b"XX", "got the file signature"),
    (9, struct.pack("<Q", 2), "version 2, expected"),
    (17, b"\x09", "got the dtype code 9, expected a code from 1 to 8"),
    (17, b"\x06", "got float64 data, expected integer token ids"),
    (18, struct.pack("<Q", 5), "for 5 sequences"),
    (18, struct.pack("<Q", 2**62), "for 4611686018427387904 sequences"),
    (34, struct.pack("<i", -1), "places sequence 0 (-1 ids of "),
    (34, struct.pack("<i", 3), "places sequence 0 (3 ids of 1 bytes) at byte 0 and the next at byte 2"),
    (38, struct.pack("<i", 99), "places sequence 1 (99 ids of "),
    (42, struct.pack("<q", -8), "places sequence 0"),
    (50, struct.pack("<q", 2**62), "places sequence 1"),
    (74, struct.pack("<q", 1), "got documents that end at sequence 1, expected sequence 2"),
])  # fmt: skip
def test_an_index_that_cannot_be_is_refused(at: int, value: bytes, expected: str, tmp_path: Path) -> None:
    megatron(tmp_path / "a", [b"ab", b"c"])
    raw = (tmp_path / "a.idx").read_bytes()
    (tmp_path / "a.idx").write_bytes(raw[:at] + value + raw[at + len(value) :])
    assert expected in message(SourceSettings("megatron", path=str(tmp_path / "a")))


SEQUENCES = [b"abcd", b"", b"efghijkl", b"mn", b"opqrst", b"uv"]


def permuted(prefix: Path, order: list[int]) -> None:
    """The sequences of ``prefix`` in another order in the .idx; the .bin stays."""
    raw = Path(f"{prefix}.idx").read_bytes()
    count = len(order)
    ends = 34 + 4 * count, 34 + 12 * count
    sizes, pointers = np.frombuffer(raw[34 : ends[0]], "<i4"), np.frombuffer(raw[ends[0] : ends[1]], "<i8")
    Path(f"{prefix}.idx").write_bytes(raw[:34] + sizes[order].tobytes() + pointers[order].tobytes() + raw[ends[1] :])


@given(st.permutations(range(len(SEQUENCES))))
def test_sequences_may_lie_in_another_order_than_the_index_has(
    tmp_path_factory: pytest.TempPathFactory, order: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("permuted")
    permuted(megatron(folder / "a", SEQUENCES, 8), order)
    records = read(SourceSettings("megatron", path=str(folder / "a"), shuffle=False))
    assert [r.tokens.astype("<u2").tobytes() for r in records] == [SEQUENCES[i] for i in order]


@given(
    st.sampled_from([1, 8, 4]),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), min_size=1, max_size=3),
)
def test_a_damaged_index_never_gives_wrong_ids(
    tmp_path_factory: pytest.TempPathFactory, code: int, moved: bool, changes: list[tuple[int, int]]
) -> None:
    sequences = [SEQUENCES[i] * 4 for i in (0, 1, 2, 3, 4, 5, 2, 0)]
    prefix = megatron(tmp_path_factory.mktemp("damaged") / "a", sequences, code)
    if moved:
        permuted(prefix, [3, 1, 0, 2, 7, 6, 5, 4])
    settings = SourceSettings("megatron", path=str(prefix), shuffle=False)
    before = [r.tokens.tolist() for r in read(settings)]
    raw = bytearray(Path(f"{prefix}.idx").read_bytes())
    begin, end = 34, 34 + 12 * len(sequences)  # sizes and pointers
    for at, value in changes:
        raw[begin + at % (end - begin)] = value
    Path(f"{prefix}.idx").write_bytes(raw)
    with contextlib.suppress(SourceError):
        after = [r.tokens.tolist() for r in read(settings)]
        assert sorted(after) == sorted(before), "sequences that swapped places are still the same samples"


@pytest.mark.parametrize(("size", "pointer"), [(1, 0), (1, 1)])  # an id is left out; ids of two halves
def test_a_sequence_that_lost_ids_or_is_not_aligned_is_refused(size: int, pointer: int, tmp_path: Path) -> None:
    megatron(tmp_path / "a", [b"abcd", b"efghij"], 8)
    raw = bytearray((tmp_path / "a.idx").read_bytes())
    raw[34:38], raw[42:50] = struct.pack("<i", size), struct.pack("<q", pointer)
    (tmp_path / "a.idx").write_bytes(raw)
    assert f"places sequence 0 ({size} ids of 2 bytes) at byte {pointer} and the next at byte 4" in message(
        SourceSettings("megatron", path=str(tmp_path / "a"))
    )


def multimodal(prefix: Path, modes: list[int]) -> None:
    megatron(prefix, SEQUENCES[: len(modes)])
    with open(f"{prefix}.idx", "ab") as index:
        index.write(bytes(modes))


def test_images_of_multimodal_data_are_not_trained_as_text(tmp_path: Path) -> None:
    multimodal(tmp_path / "a", [0, 0, 1, 0, 2])
    settings = SourceSettings("megatron", path=str(tmp_path / "a"), shuffle=False)
    assert "a.idx, which is multimodal" in message(settings)
    assert "for text, set `modes: [0]`" in message(settings)

    def found(modes: list[int]) -> dict[str, str]:
        records = read(msgspec.structs.replace(settings, modes=modes))
        return {r.where: bytes(r.tokens.astype(np.uint8)).decode() for r in records}

    assert found([0]) == {"a.bin:sequence 0": "abcd", "a.bin:sequence 1": "", "a.bin:sequence 3": "mn"}
    assert list(found([2, 1]).values()) == ["efghijkl", "opqrst"]
    assert found([7]) == {}
    assert "modes: got [], expected a list" in message(msgspec.structs.replace(settings, modes=[]))


def test_modes_are_part_of_the_digest_and_plain_indices_are_text(tmp_path: Path) -> None:
    megatron(tmp_path / "a", [b"ab", b"c"])
    settings = SourceSettings("megatron", path=str(tmp_path / "a"), shuffle=False)
    text, image, both = (msgspec.structs.replace(settings, modes=modes) for modes in ([0], [1], [1, 0]))
    assert [r.tokens.tolist() for r in read(text)] == [r.tokens.tolist() for r in read(settings)] == [[97, 98], [99]]
    assert read(image) == []
    digests = [open_source(each, PLAIN).digest for each in (settings, text, image, both)]
    assert len(set(digests)) == 4


def test_a_pair_without_its_other_half_is_named(tmp_path: Path) -> None:
    megatron(tmp_path / "a", [b"ab"])
    (tmp_path / "a.bin").unlink()
    assert "a.bin: the file cannot be read (No such file" in message(
        SourceSettings("megatron", path=str(tmp_path / "a"))
    )
    (tmp_path / "a.bin").write_bytes(b"a")
    assert "One of the two files is cut short" in message(SourceSettings("megatron", path=str(tmp_path / "a")))


# Python


def test_items_are_texts_rows_or_ids(tmp_path: Path) -> None:
    records = read(SourceSettings("python", path="tests.sources.writers:mixed", shuffle=False))
    assert [r.tokens.tolist() for r in records[:5]] == [[97], [98], [1, 2], [3, 4], [5]]
    assert [r.reason for r in records[5:]] == ["dtype", "dtype", "dtype", "missing", "empty"]


@pytest.mark.parametrize(("name", "expected"), [
    ("once", "which can be read only once. Name a list, or the function"),
    ("number", "is a int, expected a list"),
    ("wants", "takes (much: int) -> list[int], expected () or (partition, partitions)"),
    ("missing", "cannot be imported"),
    ("failing", "raised RuntimeError: the store is down. Correct the code"),
    ("THINGS", "is a dict, expected a list"),
])  # fmt: skip
def test_an_object_that_cannot_be_read_again_is_refused(name: str, expected: str) -> None:
    assert expected in message(SourceSettings("python", path=f"tests.sources.writers:{name}"))


# Settings


@pytest.mark.parametrize(("settings", "expected"), [
    (SourceSettings("text", "a", text_key="b"), "text_key: got a key that `source: text` does not support"),
    (SourceSettings("megatron", "a", fields={"a": "b"}), "fields: got a key that `source: megatron` does not support"),
    (SourceSettings("jsonl", "a", unit="line"), "unit: got a key that `source: jsonl` does not support"),
    (SourceSettings("python", "a:b"), "shards: got a key that `source: python` does not support"),
    (SourceSettings("jsonl"), "shards, path: got neither"),
    (SourceSettings("jsonl", "a", path="b"), "shards, path: got both"),
    (SourceSettings("jsonl", "a", text_key="a", prompt_key="b"), "text_key, prompt_key: got both"),
    (SourceSettings("jsonl", "a", text_key="a", completion_key="b"), "completion_key: got this key together with"),
])  # fmt: skip
def test_keys_that_mean_nothing_are_refused(settings: SourceSettings, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        open_source(settings)
    assert expected in str(error.value)
    assert isinstance(error.value, ValueError), "code that validates settings catches it as Python's own"
