"""Sources: every sample once whatever the partitions, exact resumption, and bad data that is named."""

import contextlib
import doctest
import io
import itertools
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.model.fields import Field
from streampack.core.model.snapshot import MIXED
from streampack.errors import ConfigError, SourceError, UserError
from streampack.sources import (
    Cursor,
    RawSample,
    Source,
    SourceSettings,
    TokenizerSettings,
    open_source,
    open_tokenizer,
    order,
    walk,
)
from streampack.sources.formats import jsonl, rows, tar, webdataset
from streampack.sources.formats import npy as npy_files
from streampack.tokenizers import open_tokenizer as opening

SIZES = (5, 0, 7, 1, 3, 4)  # samples a shard; the second has none
NUM_SAMPLES = sum(SIZES)
PLAIN = open_tokenizer(TokenizerSettings(append_eos=False))


def text_of(record: RawSample) -> str:
    return bytes(record.tokens.astype(np.uint8)).decode()


def npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(array), allow_pickle=True)
    return buffer.getvalue()


def write_tar(path: Path, members: list[tuple[str, bytes]], format_: int = tarfile.USTAR_FORMAT) -> Path:
    with tarfile.open(path, "w", format=format_) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module", params=["webdataset", "jsonl"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Six shards of texts ``shard.sample``, one of them without samples, in either format."""
    folder = tmp_path_factory.mktemp("shards")
    for shard, count in enumerate(SIZES):
        texts = [f"{shard}.{sample}" for sample in range(count)]
        if request.param == "jsonl":
            write_jsonl(folder / f"s-{shard}.jsonl", [{"text": text} for text in texts])
        else:
            write_tar(folder / f"s-{shard}.tar", [(f"k{i}.txt", text.encode()) for i, text in enumerate(texts)])
    return open_source(SourceSettings(request.param, str(folder / "s-*")), PLAIN)


def names(records: Iterator[RawSample]) -> list[str]:
    return [text_of(record) for record in records]


EVERY = sorted(f"{shard}.{sample}" for shard, count in enumerate(SIZES) for sample in range(count))


@given(st.integers(1, 9), st.integers(0, 2**64), st.integers(0, 3))
def test_the_partitions_together_hold_every_sample_once_a_pass(
    source: Source, partitions: int, seed: int, passes: int
) -> None:
    read = [names(source.read(p, partitions, seed=seed, passes=passes)) for p in range(partitions)]
    assert sorted(itertools.chain(*read)) == sorted(EVERY * passes)
    for partition, texts in enumerate(read):
        assert {int(text.split(".")[0]) % partitions for text in texts} <= {partition}


@given(st.integers(1, 4), st.integers(0, 5), st.integers(0, 100), st.integers(0, 60))
def test_going_on_from_any_cursor_gives_exactly_the_rest(
    source: Source, partitions: int, seed: int, at: int, skip: int
) -> None:
    partition = at % partitions
    whole = list(source.read(partition, partitions, seed=seed, passes=3))
    at %= len(whole) + 1
    start = whole[at - 1].cursor if at else None
    rest = list(source.read(partition, partitions, seed=seed, passes=3, start=start, skip=skip))
    assert list(map(as_data, rest)) == list(map(as_data, whole[at + skip :]))


def as_data(record: RawSample) -> tuple[Any, ...]:
    return record.tokens.tolist(), record.reason, record.where, record.cursor


def test_every_cursor_of_two_passes_resumes(source: Source) -> None:
    whole = list(map(as_data, source.read(0, 1, seed=1, passes=2)))
    assert len(whole) == 2 * NUM_SAMPLES
    for at, (*_, cursor) in enumerate(whole):
        assert list(map(as_data, source.read(0, 1, seed=1, passes=2, start=cursor))) == whole[at + 1 :]


@given(st.integers(0, 70), st.integers(0, 3))
def test_skipping_is_dropping(source: Source, skip: int, seed: int) -> None:
    whole = list(map(as_data, source.read(0, 1, seed=seed, passes=3)))
    assert list(map(as_data, source.read(0, 1, seed=seed, passes=3, skip=skip))) == whole[skip:]


@given(seed=st.integers(0, 99), partitions=st.integers(1, 5), passes=st.integers(1, 3))
@hypothesis.settings(max_examples=15)
def test_a_sample_and_its_row_are_found_by_each_other(source: Source, seed: int, partitions: int, passes: int) -> None:
    assert isinstance(source, walk.ShardedSource)
    for partition in range(partitions):
        records = list(source.read(partition, partitions, seed=seed, passes=passes))
        every = range(len(records) + 2)
        places = list(source.locate(partition, partitions, seed=seed, passes=passes, seqs=every, reads=True))
        assert [place.seq for place in places] == list(range(len(records))), "without those that do not exist"
        for seq, (record, place) in enumerate(zip(records, places, strict=True)):
            assert place.sample is not None
            assert (place.where, place.pass_) == (record.where, seq * passes // len(records))
            assert (place.sample.where, place.sample.reason) == (record.where, record.reason)
            assert place.sample.tokens.tolist() == record.tokens.tolist()
            found = source.find(record.where.__eq__, partitions, seed=seed, passes=passes, upto=len(records))
            assert (partition, seq) in found
            assert len(found) == passes


def test_rows_are_found_where_a_run_has_fields(tmp_path: Path) -> None:
    field = Field(name="advantages", dtype="float32")
    rows = [{"text": f"{i}", "adv": [0.5] * len(f"{i}")} for i in range(20)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    members = [
        (f"{i}.{suffix}", npy(np.ones(2, dtype)))
        for i in range(4)
        for suffix, dtype in (("npy", "u1"), ("adv.npy", "f4"))
    ]
    cut = write_tar(tmp_path / "a.tar", members)
    cut.write_bytes(cut.read_bytes()[:3000])
    write_tar(tmp_path / "b.tar", members)
    for settings in (
        SourceSettings("jsonl", str(tmp_path / "a.jsonl"), fields={"advantages": "adv"}),
        SourceSettings("webdataset", f"{tmp_path}/*.tar", fields={"advantages": "adv"}),
    ):
        for fields in ([field], [field, Field(name="loss_mask", dtype="uint8", align="target")]):
            source = open_source(settings, PLAIN)
            assert isinstance(source, walk.ShardedSource)
            records = list(source.read(0, 1, seed=3, passes=1, fields=fields))
            assert len(records) > 5
            fresh = open_source(settings, PLAIN)
            assert isinstance(fresh, walk.ShardedSource)
            for seq, record in enumerate(records):
                (place,) = fresh.locate(0, 1, seed=3, passes=1, seqs=[seq], fields=fields)
                assert (place.where, place.sample) == (record.where, None)
                assert fresh.find(record.where.__eq__, 1, seed=3, passes=1, upto=9, fields=fields) == [(0, seq)]


def test_skipped_samples_are_not_tokenized(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    for shard in (jsonl.JsonlShard, webdataset.TarShard):
        load: Callable[..., Any] = shard.load
        monkeypatch.setattr(shard, "load", lambda self, i, load=load: load(self, loaded.append(i) or i))  # type: ignore[func-returns-value]
    list(source.read(0, 1, seed=0, passes=1, skip=NUM_SAMPLES - 2))
    assert len(loaded) == 2


def test_passes_hold_the_same_samples_in_different_orders(source: Source) -> None:
    passes = [names(source.read(0, 1, seed=9, passes=n + 1, start=Cursor(n, 0, 0))) for n in range(5)]
    assert len({tuple(texts) for texts in passes}) == 5
    assert all(sorted(texts) == EVERY for texts in passes)


def test_no_limit_of_passes_is_for_ever(source: Source) -> None:
    some = list(itertools.islice(source.read(0, 1, seed=9, passes=None), 10 * NUM_SAMPLES))
    assert sorted(map(text_of, some)) == sorted(EVERY * 10)
    assert some[-1].cursor == Cursor(MIXED + 10, 0, 0)


def test_the_order_is_the_same_in_every_process(source: Source, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": f"{i}"} for i in range(40)])
    program = (
        "import sys; from streampack.sources import *; s = open_source(SourceSettings('jsonl', sys.argv[1])); "
        "print(s.digest, [(r.where, r.cursor) for r in s.read(0, 1, seed=4, passes=2)]); "
        "assert not {'webdataset', 'numba', 'torch'} & set(sys.modules)"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "a.jsonl")],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(["", *sys.path])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "31337")
    }
    assert len(outputs) == 1
    assert outputs.pop().count("a.jsonl:line") == 80


def test_without_shuffle_samples_come_as_they_lie(tmp_path: Path) -> None:
    for shard in range(3):
        write_jsonl(tmp_path / f"{shard}.jsonl", [{"text": f"{shard}.{i}"} for i in range(4)])
    plain = open_source(SourceSettings("jsonl", str(tmp_path / "*.jsonl"), shuffle=False), PLAIN)
    want = [f"{shard}.{i}" for shard in (0, 2) for i in range(4)]
    assert names(plain.read(0, 2, seed=8, passes=2)) == want * 2


def test_a_partition_without_samples_yields_nothing_even_for_ever(source: Source, tmp_path: Path) -> None:
    assert source.num_shards == len(SIZES)
    assert list(source.read(6, 7, seed=0, passes=None)) == []
    assert list(source.read(1, 6, seed=0, passes=None)) == []  # its one shard is empty
    (tmp_path / "empty.jsonl").touch()
    empty = open_source(SourceSettings("jsonl", str(tmp_path / "empty.jsonl")))
    assert list(empty.read(0, 1, seed=0, passes=None)) == []


def test_cursors_come_after_one_another(source: Source) -> None:
    cursors = [(r.cursor.pass_, r.cursor.shard, r.cursor.sample) for r in source.read(0, 1, seed=2, passes=3)]
    assert cursors == sorted(set(cursors))
    assert cursors[-1] == (MIXED + 3, 0, 0) or cursors[-1][0] == MIXED + 2


def test_a_source_that_cannot_be_read_is_refused_at_once(source: Source) -> None:
    with pytest.raises(UserError, match=r"partition: got 2 with 2 partitions, expected a number from 0 to 1"):
        source.read(2, 2, seed=0, passes=1)
    with pytest.raises(UserError, match="got skip=-1"):
        source.read(0, 2, seed=0, passes=1, skip=-1)
    with pytest.raises(SourceError, match="does not exist in 3 shards"):
        source.read(0, 2, seed=0, passes=1, start=Cursor(0, 4, 0))
    with pytest.raises(SourceError, match="The cursor was made with other files"):
        list(source.read(0, 1, seed=0, passes=1, start=Cursor(0, 0, 8)))


# Bad samples keep their places.


TAR_POISON: dict[str, tuple[list[tuple[str, bytes]], str | None]] = {
    "good": ([("txt", b"ok")], None),
    "number": ([("npy", npy(np.arange(3)))], None),
    "row": ([("json", b'{"text": "hi"}')], None),
    "ids": ([("json", b'{"input_ids": [4, 5]}')], None),
    "upper": ([("TXT", b"ok")], None),
    "both": ([("json", b"{"), ("txt", b"text comes first")], None),
    "latin": ([("txt", b"caf\xe9")], "encoding"),
    "blank": ([("txt", b"")], "empty"),
    "image": ([("jpg", b"xx"), ("cls", b"3")], "missing"),
    "twice": ([("txt", b"a"), ("TXT", b"b")], "duplicate"),
    "broken": ([("json", b"{")], "json"),
    "float": ([("npy", npy([1.0, 2.0]))], "dtype"),
    "nan": ([("npy", npy([float("nan")]))], "dtype"),
    "bool": ([("npy", npy([True]))], "dtype"),
    "object": ([("npy", npy(np.array([{}], object)))], "dtype"),
    "table": ([("npy", npy(np.ones((2, 2), np.int64)))], "ragged"),
    "scalar": ([("npy", npy(np.int64(5)))], "ragged"),
    "none": ([("npy", npy(np.zeros(0, np.int64)))], "empty"),
    "below": ([("npy", npy([3, -1]))], "range"),
    "above": ([("npy", npy([2**31]))], "range"),
    "cut": ([("npy", npy(np.arange(9))[:-1])], "npy"),
    "pickle": ([("npy", b"\x80\x04N.")], "npy"),
    "nothing": ([("npy", b"")], "npy"),
    "bomb": ([("npy", npy(np.arange(9)).replace(b"(9,)", b"(9**99,)"))], "npy"),
}


@pytest.mark.parametrize("format_", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_bad_sample_in_a_tar_has_its_reason_and_its_place(tmp_path: Path, format_: int) -> None:
    members = [(f"dir/{key}.{ext}", data) for key, (parts, _) in TAR_POISON.items() for ext, data in parts]
    path = write_tar(tmp_path / "web-0.tar", members, format_)
    source = open_source(SourceSettings("webdataset", str(path), shuffle=False))
    records = list(source.read(0, 1, seed=0, passes=1))
    want = [(f"web-0.tar:dir/{key}", reason) for key, (_, reason) in TAR_POISON.items()]
    assert [(record.where, record.reason) for record in records] == want
    assert_consistent(records)
    assert records[1].tokens.tolist() == [0, 1, 2]
    assert records[3].tokens.tolist() == [4, 5]


def assert_consistent(records: list[RawSample]) -> None:
    for place, record in enumerate(records, 1):
        assert record.tokens.dtype == np.int32
        assert (len(record.tokens) > 0) == (record.reason is None)
        assert record.cursor == (Cursor(0, 0, place) if place < len(records) else Cursor(1, 0, 0))


JSONL_POISON: list[tuple[bytes, str | None]] = [
    (b'{"text": "ok"}', None),
    (b'{"id": [1, {"a": null}], "tokens": [1, 2]}', None),
    (b'{"input_ids": [7]}', None),
    (b'{"text": "ok", "tokens": "unused"}', None),
    (b'{"text": null, "tokens": [1]}', None),
    (b'{"text": "ok"', "json"),
    (b"not json", "json"),
    (b"   ", "json"),
    (b"[1, 2]", "json"),
    (b"[" * 100_000, "json"),
    (b'{"text": "\xff"}', "encoding"),
    (b'{"text": "\\ud800"}', "json"),
    (b'{"text": ""}', "empty"),
    (b'{"text": 5}', "dtype"),
    (b'{"tokens": 5}', "dtype"),
    (b'{"tokens": []}', "empty"),
    (b'{"tokens": [1.5]}', "dtype"),
    (b'{"tokens": [1, true]}', "dtype"),
    (b'{"tokens": ["1"]}', "dtype"),
    (b'{"tokens": [[1], [2, 3]]}', "ragged"),
    (b'{"tokens": [-1]}', "range"),
    (b'{"tokens": [2147483648]}', "range"),
    (b'{"tokens": [99999999999999999999999]}', "range"),
    (b'{"other": 1}', "missing"),
    (b"{}", "missing"),
]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("begin", [b"", b"\xef\xbb\xbf"])
def test_a_bad_line_has_its_reason_and_its_place(tmp_path: Path, newline: bytes, begin: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(begin + newline.join(line for line, _ in JSONL_POISON))
    source = open_source(SourceSettings("jsonl", str(path), shuffle=False))
    records = list(source.read(0, 1, seed=0, passes=1))
    want = [(f"a.jsonl:line {number}", reason) for number, (_, reason) in enumerate(JSONL_POISON, 1)]
    assert [(record.where, record.reason) for record in records] == want
    assert_consistent(records)


@pytest.mark.parametrize(("line", "why"), [
    (b'{"text": "torn', "Input data was truncated"),
    (b"   ", "the line is blank"),
    (b'{"text": NaN}', "invalid character (byte 9): NaN is not JSON"),
    (b'{"x": [1, -Infinity], "text": "a"}', "invalid character (byte 11): Infinity is not JSON"),
    (b'{"text": "a"} {}', "trailing characters (byte 15)"),
    (b"[1]", "Expected `object`, got `array`"),
    (b'{"other": ' + b"[" * 100_000, "nested too deeply"),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["jsonl", "tar"])
def test_a_bad_line_is_shown_with_the_words_of_the_parser(tmp_path: Path, kind: str, line: bytes, why: str) -> None:
    if kind == "jsonl":
        (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n' + line + b"\n")
        settings = SourceSettings("jsonl", str(tmp_path / "a.jsonl"), shuffle=False)
    else:
        write_tar(tmp_path / "a.tar", [("0.json", b'{"text": "good"}'), ("1.json", line)])
        settings = SourceSettings("webdataset", str(tmp_path / "a.tar"), shuffle=False)
    good, bad = open_source(settings).read(0, 1, seed=0, passes=1)
    assert (good.place, bad.reason, bad.why) == (good.where, "json", why)
    assert type(bad.reason) is str
    assert bad.place == f"{bad.where} ({why})"


def test_shuffled_poison_keeps_the_numbers_of_the_others(tmp_path: Path) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", [{"text": f"{i}"} for i in range(30)])
    rows = good.read_bytes().split(b"\n")
    rows[11] = b"{"
    (tmp_path / "bad.jsonl").write_bytes(b"\n".join(rows))
    pair = [
        [
            (r.tokens.tolist(), r.cursor)
            for r in open_source(SourceSettings("jsonl", str(path))).read(0, 1, seed=3, passes=1)
        ]
        for path in (good, tmp_path / "bad.jsonl")
    ]
    differ = [(a, b) for a, b in zip(*pair, strict=True) if a != b]
    assert len(differ) == 1
    assert differ[0][1] == ([], differ[0][0][1])


# JSON lines: the index.


@given(st.lists(st.sampled_from([b"\n", b"\r\n", b"\r", b"a", b"bc", b" ", b"\n\n"]), max_size=40), st.integers(1, 9))
def test_lines_are_those_that_splitting_gives(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], block: int
) -> None:
    data = b"".join(parts)
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_bytes(data)
    kept = jsonl._BLOCK_BYTES
    jsonl._BLOCK_BYTES = block
    source = open_source(SourceSettings("jsonl", str(path)))
    try:
        with source._reader(())(0) as shard:  # type: ignore[attr-defined]
            got = [(shard.where(i), shard._file.pread(shard._sizes[i], shard._offsets[i])) for i in range(len(shard))]
    finally:
        jsonl._BLOCK_BYTES = kept
    lines = [line.removesuffix(b"\r") for line in data.split(b"\n")]
    assert got == [(f"lines.jsonl:line {number}", line) for number, line in enumerate(lines, 1) if line]


def test_keys_of_json_lines_are_configurable(tmp_path: Path) -> None:
    path = str(write_jsonl(tmp_path / "a.jsonl", [{"my text": "a", "text": "b", "my-ids": [3], "tokens": [4]}]))

    def only(**keys: Any) -> list[int]:
        (record,) = open_source(SourceSettings("jsonl", path, **keys), PLAIN).read(0, 1, seed=0, passes=1)
        return record.tokens.tolist()  # type: ignore[no-any-return]

    assert only() == [4]
    assert only(text_key="text") == [ord("b")]
    assert only(text_key="my text") == [ord("a")]
    assert only(tokens_key="my-ids") == [3]
    with pytest.raises(ConfigError, match="text_key, tokens_key: got both"):
        only(text_key="a", tokens_key="b")


# Tar shards: the same samples as the webdataset package.


def by_webdataset(path: Path) -> list[tuple[str, dict[str, bytes]]]:
    """What wds.WebDataset is made of; itself it leaves its files to the garbage collector to close, with a warning."""
    tariterators = pytest.importorskip("webdataset.tariterators")
    with path.open("rb") as stream:
        files = ({**file, "__url__": str(path)} for file in tariterators.tar_file_iterator(stream))
        samples = list(tariterators.group_by_keys(files))
    return [(s["__key__"], {k: v for k, v in s.items() if not k.startswith("__")}) for s in samples]


def by_us(path: Path) -> list[tuple[str, str | None, str]]:
    source = open_source(SourceSettings("webdataset", str(path), shuffle=False), PLAIN)
    return [(r.where.split(":", 1)[1], r.reason, text_of(r)) for r in source.read(0, 1, seed=0, passes=1)]


def test_a_tar_of_tarwriter_is_read_as_webdataset_reads_it(tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset")
    path = tmp_path / "web.tar"
    with wds.TarWriter(str(path)) as writer:
        for i in range(300):
            fields = {
                "txt": f"text {i} é" * (i % 50 + 1),
                "json": {"text": "other"},
                "cls": i,
                "seg.png": b"\0" * (i * 7),
            }
            writer.write({"__key__": f"train/part-{i // 100}/{i:06d}", **fields})
    theirs = by_webdataset(path)
    assert len(theirs) == 300
    assert by_us(path) == [(key, None, fields["txt"].decode()) for key, fields in theirs]
    ids = open_source(SourceSettings("webdataset", str(path), text_key="json"), PLAIN)
    assert {text_of(record) for record in ids.read(0, 1, seed=0, passes=1)} == {"other"}


NAMES = st.text("ab.é/_Z", min_size=1, max_size=12).filter(lambda name: not name.endswith("/"))


@given(
    st.lists(
        st.tuples(NAMES, st.sampled_from(["", "x" * 90, "d" * 90 + "/" + "y" * 60, "z" * 300 + "/"])), max_size=12
    ),
    st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    st.booleans(),
)
def test_members_are_grouped_as_webdataset_groups_them(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[str, str]], format_: int, dots: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "grouped.tar"
    members = [
        (("./" if dots else "") + long + name + ".txt", f"{i}".encode() * i) for i, (name, long) in enumerate(parts)
    ]
    write_tar(path, members, format_)
    ours = by_us(path)
    # webdataset makes a sample of what macOS adds in folders
    write_tar(path, [member for member in members if not member[0].rpartition("/")[2].startswith("._")], format_)
    if "duplicate" in {reason for _, reason, _ in ours}:
        with pytest.raises(ValueError, match="duplicate file name"):
            by_webdataset(path)
        return
    theirs = by_webdataset(path)
    assert [key for key, _, _ in ours] == [key for key, _ in theirs]
    for (_, reason, text), (_, fields) in zip(ours, theirs, strict=True):
        assert text == fields.get("txt", b"").decode()
        assert (reason == "missing") == ("txt" not in fields)


def test_the_fast_index_is_that_of_tarfile(tmp_path: Path) -> None:
    """Ustar prefixes, pax and GNU long names, links, folders, big numbers, time stamps: one archive of each kind."""
    for format_ in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        path = tmp_path / f"{format_}.tar"
        with tarfile.open(path, "w", format=format_, pax_headers={"comment": "global"}) as archive:
            for i in range(60):
                info = tarfile.TarInfo(f"d{i}/" + "n" * (i * 2) + f"/{i}.txt")
                info.type = {50: tarfile.DIRTYPE, 51: tarfile.LNKTYPE, 52: tarfile.AREGTYPE}.get(i, tarfile.REGTYPE)
                info.linkname = "d3/nnnnnn/3.txt" if i == 51 else ""
                info.size = 0 if i in (50, 51) else i * 37
                info.mtime = i if format_ == tarfile.USTAR_FORMAT else i + 0.5
                info.uid = 2**40 if format_ != tarfile.USTAR_FORMAT and i == 55 else 0
                archive.addfile(info, io.BytesIO(bytes(info.size)))
        with tarfile.open(path) as archive:
            places = {m.name: (m.offset_data, m.size) for m in archive}
            want = [(m.name, *places[m.linkname or m.name]) for m in archive if not m.isdir()]
        assert len(want) == 59
        source = open_source(SourceSettings("webdataset", str(path)))
        with source._reader(())(0) as shard:  # type: ignore[attr-defined]
            assert list(tar.members(shard._file)) == want


def test_keys_of_tar_members_are_configurable(tmp_path: Path) -> None:
    members = [
        ("a.md", b"m"),
        ("a.meta.json", b'{"text": "t", "body": "b", "tokens": [1], "ids": [2]}'),
        ("a.x.npy", npy([3])),
        ("a.npy", npy([4])),
    ]
    path = str(write_tar(tmp_path / "a.tar", members))

    def only(**keys: Any) -> list[int]:
        (record,) = open_source(SourceSettings("webdataset", path, **keys), PLAIN).read(0, 1, seed=0, passes=1)
        assert record.reason is None
        return record.tokens.tolist()  # type: ignore[no-any-return]

    assert only() == [4]
    assert only(text_key="md") == only(text_key=".MD") == [ord("m")]
    assert only(text_key="meta.json") == [ord("t")]
    assert only(text_key="meta.json/body") == [ord("b")]
    assert only(tokens_key="meta.json") == [1]
    assert only(tokens_key="meta.json/ids") == [2]
    assert only(tokens_key="x.npy") == [3]
    for bad in ({"tokens_key": "md"}, {"tokens_key": "npy/a"}, {"text_key": "md/field"}, {"text_key": ""}):
        with pytest.raises(ConfigError, match="expected file extensions"):
            only(**bad)


# Bad files stop the reader, and say why in one line.


def stop_message(kind: Any, path: Path | str | list[str]) -> str:
    """What is said of files that cannot be read, or of the one that is damaged."""
    shards = path if isinstance(path, list) else str(path)
    try:
        records = open_source(SourceSettings(kind, shards)).read(0, 1, seed=0, passes=1)
        (message,) = {record.where for record in records if record.reason == "damaged"}
    except (SourceError, ConfigError) as error:
        message = str(error)
    assert "\n" not in message
    return message


def test_a_tar_that_is_cut_anywhere_is_never_taken_for_a_shorter_one(tmp_path: Path) -> None:
    for format_ in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        members = [(f"{'n' * (120 if i == 1 else 1)}/{i}.txt", bytes(300 * i)) for i in range(4)]
        whole = write_tar(tmp_path / "whole.tar", members, format_).read_bytes()
        path = tmp_path / "cut.tar"
        with tarfile.open(tmp_path / "whole.tar") as archive:
            end = max(m.offset_data + -(-m.size // 512) * 512 for m in archive)
        for size in {*range(0, end + 512, 256), 1, 511, end - 1, end + 1, end + 511} - {end + 512}:
            path.write_bytes(whole[:size])
            message = stop_message("webdataset", path)
            assert message.startswith(str(path))
        path.write_bytes(b"")
        assert "got 0 bytes, expected a tar archive. Write the file again" in stop_message("webdataset", path)


@given(st.integers(0, 9999), st.booleans())
def test_samples_before_a_cut_and_in_the_next_file_are_read(
    tmp_path_factory: pytest.TempPathFactory, cut: int, shuffle: bool
) -> None:
    """A damaged file keeps its place: it loses what is behind the damage, counted once, and no other file anything."""
    folder = tmp_path_factory.mktemp("cut")
    files = [
        write_tar(folder / f"{n}.tar", [(f"{n}{i}.txt", f"{n}{i}".encode() * 90) for i in range(5)]) for n in range(3)
    ]
    settings = SourceSettings("webdataset", str(folder / "*.tar"), shuffle=shuffle)
    whole = [as_data(record) for record in open_source(settings).read(0, 1, seed=1, passes=1)]
    size = cut % (5 * 1024 + 512)
    os.truncate(files[1], size)
    records = list(open_source(settings).read(0, 1, seed=1, passes=1))
    damaged = [record for record in records if record.reason == "damaged"]
    assert len(damaged) == 1
    assert str(files[1]) in damaged[0].where
    kept = {f"1{i}" for i in range(5) if size >= 1024 * i + 512 + 180}  # padding to a block may be gone
    good = [record for record in records if record.reason is None]
    assert {record.where[-2:] for record in good} == kept | {f"{n}{i}" for n in (0, 2) for i in range(5)}
    before = {data[2]: data[0] for data in whole}
    assert all(record.tokens.tolist() == before[record.where] for record in good)
    for at, record in enumerate(records):
        rest = open_source(settings).read(0, 1, seed=1, passes=1, start=record.cursor)
        assert [r.where for r in rest] == [r.where for r in records[at + 1 :]]


def test_a_cut_tar_names_the_place_and_the_member(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("a.txt", b"1"), ("b.txt", bytes(5000))])
    os.truncate(path, 2000)
    message = stop_message("webdataset", path)
    assert message == (
        f"{path}: at byte 1536: got only 464 bytes of member 'b.txt', which has 5000 bytes, expected the whole member. "
        "The file is cut short, damaged or not a tar archive. Copy or write the file again"
    )


@given(st.data())
def test_a_damaged_tar_is_refused_or_read_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    format_ = data.draw(st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
    path = tmp_path_factory.getbasetemp() / "damaged.tar"
    write_tar(path, [("a.txt", b"1"), ("b" * 99 + "/é.txt", b"22"), ("c.npy", npy([1, 2]))], format_)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, 4608))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    with contextlib.suppress(SourceError):
        for record in open_source(SourceSettings("webdataset", str(path))).read(0, 1, seed=0, passes=1):
            assert (len(record.tokens) > 0) == (record.reason is None)


@given(st.binary(max_size=200), st.integers(0, 200), st.integers(0, 255))
def test_any_bytes_as_npy_are_ids_or_a_reason(raw: bytes, at: int, value: int) -> None:
    assert isinstance(npy_files.load_npy(raw), str)
    damaged = bytearray(npy(np.arange(40, dtype=np.int16)))
    damaged[at] = value
    got = npy_files.load_npy(bytes(damaged))
    assert isinstance(got, str) or got.dtype.kind in "biuf"


def test_garbage_and_damage_say_where(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(b"garbage!" * 1000)
    assert "at byte 0: got" in stop_message("webdataset", path)
    assert "expected a tar header" in stop_message("webdataset", path)
    write_tar(path, [("a.txt", b"1"), ("b.txt", b"2")])
    raw = bytearray(path.read_bytes())
    raw[1024] ^= 1
    path.write_bytes(raw)
    assert "at byte 1024: got b'c.txt" in stop_message("webdataset", path)


def test_members_after_the_end_of_a_tar_are_not_lost_in_silence(tmp_path: Path) -> None:
    one = write_tar(tmp_path / "one.tar", [("a.txt", b"1")]).read_bytes()
    (tmp_path / "two.tar").write_bytes(one + one)
    assert "after the archive's end at byte 1024" in stop_message("webdataset", tmp_path / "two.tar")


@pytest.mark.parametrize("kind", ["webdataset", "jsonl"])
@pytest.mark.parametrize(("magic", "name"), [(b"\xfd7zXZ\0", "xz"), (b"BZh9", "bzip2")])
def test_a_compressed_file_is_named_as_such(tmp_path: Path, kind: str, magic: bytes, name: str) -> None:
    for size in (20, 5000):
        (tmp_path / "a").write_bytes(magic + b"1" * size)
        assert f"a: got a file compressed with {name}, expected a plain, gzip" in stop_message(kind, tmp_path / "a")


def test_a_sparse_member_is_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("a.txt")
    info.type = tarfile.GNUTYPE_SPARSE
    (tmp_path / "a.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    assert "got the sparse file a.txt" in stop_message("webdataset", tmp_path / "a.tar")


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a-0.jsonl", [])
    assert "a-1.jsonl: the file cannot be read (No such file or directory)" in stop_message(
        "jsonl", tmp_path / "a-{0..2}.jsonl"
    )
    assert "b-*.jsonl: got no matching file, expected at least one" in stop_message("jsonl", tmp_path / "b-*.jsonl")
    assert "is not a regular file" in stop_message("jsonl", tmp_path)
    assert "a-0.jsonl from two patterns" in stop_message("jsonl", [str(tmp_path / "a-*"), str(tmp_path / "a-0.jsonl")])
    assert "expected at least one path" in stop_message("jsonl", [])
    assert "with unmatched braces" in stop_message("jsonl", tmp_path / "a-{0..2.jsonl")
    assert "expected files, because the output of a command cannot be read" in stop_message(
        "webdataset", "pipe:cat a.tar"
    )


@pytest.mark.parametrize("kind", ["webdataset", "jsonl"])
@pytest.mark.parametrize("by", [-700, 1])
@pytest.mark.parametrize("during", [False, True])
def test_a_file_that_changes_size_stops_the_reader(tmp_path: Path, kind: Any, by: int, during: bool) -> None:
    path = tmp_path / "a"
    if kind == "jsonl":
        write_jsonl(path, [{"text": f"{i}" * 90} for i in range(50)])
    else:
        write_tar(path, [(f"{i}.txt", b"x") for i in range(50)])
    source = open_source(SourceSettings(kind, str(path)))
    records = source.read(0, 1, seed=0, passes=1)
    if during:
        next(records)
    size = path.stat().st_size
    os.truncate(path, size + by)
    with pytest.raises(
        SourceError, match=rf"got {size + by} bytes, expected {size} bytes as at the start\. A file must not"
    ):
        list(records)


def test_a_file_that_is_gone_when_its_turn_comes_is_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    source = open_source(SourceSettings("jsonl", str(path)))
    path.unlink()
    with pytest.raises(SourceError, match=r"a\.jsonl: the file cannot be opened \(No such file or directory\)"):
        list(source.read(0, 1, seed=0, passes=1))


# Names, settings, digests.


def test_patterns_expand_in_a_fixed_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b1", "a2", "a10", "c[1]", "c1"):
        write_jsonl(tmp_path / name, [{"text": name}])

    def found(shards: str | list[str]) -> list[str]:
        return names(open_source(SourceSettings("jsonl", shards, shuffle=False), PLAIN).read(0, 1, seed=0, passes=1))

    assert found("{b1,a2,a10}") == ["b1", "a2", "a10"]
    assert found("[ab]*") == ["a10", "a2", "b1"]
    assert found(["b1", "{a*,c1}"]) == ["b1", "a10", "a2", "c1"]
    assert found("c[1]") == ["c[1]"]


def test_digests_name_the_data_and_not_the_folder(tmp_path: Path) -> None:
    def digest(folder: str, kind: Any = "jsonl", eos: bool = True, **settings: Any) -> str:
        tokenizer = open_tokenizer(TokenizerSettings(append_eos=eos))
        return open_source(SourceSettings(kind, str(tmp_path / folder / "**" / "*.j"), **settings), tokenizer).digest

    for folder in ("here", "there", "longer", "renamed"):
        for name in ("x/0.j", "y/0.j" if folder != "renamed" else "z/0.j"):
            (tmp_path / folder / name).parent.mkdir(parents=True)
            write_jsonl(tmp_path / folder / name, [{"text": "a" * (2 if folder == "longer" else 1)}])
    assert digest("here") == digest("there")
    different = [
        digest("here"),
        digest("longer"),
        digest("renamed"),
        digest("here", eos=False),
        digest("here", shuffle=False),
        digest("here", text_key="text"),
        digest("here", tokens_key="text"),
        digest("here", kind="webdataset", text_key="text"),
    ]
    assert len(set(different)) == len(different)


def test_settings_refuse_what_they_do_not_know() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `shard`"):
        msgspec.convert({"source": "jsonl", "shards": "a", "shard": "b"}, SourceSettings)
    with pytest.raises(msgspec.ValidationError, match=r"\$\.source"):
        msgspec.convert({"source": "csv", "shards": "a"}, SourceSettings)
    assert msgspec.convert({"source": "jsonl", "shards": ["a"]}, SourceSettings).shuffle


def test_no_file_stays_open_when_a_reader_is_dropped(source: Source) -> None:
    before = len(os.listdir("/proc/self/fd"))
    readers = [source.read(0, 1, seed=0, passes=None) for _ in range(5)]
    for reader in readers:
        next(reader)
    assert len(os.listdir("/proc/self/fd")) == before + 5 * len(SIZES)
    del reader, readers
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("module", [order, opening, jsonl, npy_files, rows, walk])
def test_the_examples_in_the_docstrings_hold(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
