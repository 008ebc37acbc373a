"""Sorted data is mixed: several shards and row groups are read at a time, in an order that runs record."""

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streampack.core.model.snapshot import MIXED
from streampack.errors import ConfigError, SourceError
from streampack.sources import Cursor, SourceSettings, walk
from streampack.sources import open_source as opened
from streampack.sources.order import Part, group_order, sample_order, shard_groups, shard_order
from streampack.sources.settings import check_settings
from streampack.tokenizers.base import Tokenizer
from tests.sources.writers import PLAIN, arrow_stream, megatron, npy, write_members

CLASSES, SAMPLES, PACK = 8, 4096, 64
SMALL = st.integers(0, 10**6)


def open_source(settings: SourceSettings, tokenizer: Tokenizer) -> walk.ShardedSource:
    source = opened(settings, tokenizer)
    assert isinstance(source, walk.ShardedSource)
    return source


@given(st.lists(SMALL, max_size=40, unique=True).map(sorted), st.integers(1, 12), SMALL, SMALL)
def test_groups_hold_every_shard_once_and_no_more_shards_than_allowed(
    shards: list[int], most: int, seed: int, pass_: int
) -> None:
    groups = shard_groups(shards, most=most, seed=seed, pass_=pass_)
    assert sorted(itertools.chain(*groups)) == shards
    assert all(0 < len(group) <= most for group in groups)
    for begin in range(0, len(shards), max(len(groups), 1)):
        neighbors = set(shards[begin : begin + len(groups)])
        assert all(len(neighbors & set(group)) <= 1 for group in groups)


@given(st.lists(SMALL, max_size=40, unique=True).map(sorted), SMALL, SMALL)
def test_groups_of_one_shard_are_the_order_of_runs_before_groups(shards: list[int], seed: int, pass_: int) -> None:
    order = shard_order(shards, seed=seed, pass_=pass_)
    assert shard_groups(shards, most=1, seed=seed, pass_=pass_) == [[shard] for shard in order]


PARTS = st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 9), max_size=6)), min_size=1, max_size=5).map(
    lambda parts: [Part(i, sum(sizes), sizes if blocks else ()) for i, (blocks, sizes) in enumerate(parts)]
)


@given(PARTS, st.integers(1, 9), SMALL)
def test_a_window_mixes_whole_blocks_and_no_more_than_allowed(parts: list[Part], most: int, seed: int) -> None:
    order = group_order(parts, most=most, seed=seed, pass_=0)
    count = sum(part.num_samples for part in parts)
    assert sorted(order.samples.tolist()) == list(range(count))
    sizes = [size for part in parts for size in part.blocks or [part.num_samples]]
    starts, begin = np.cumsum([0, *sizes]), 0
    assert sorted(itertools.chain(*(blocks for _, blocks in order.windows))) == list(range(len(sizes)))
    for stop, blocks in order.windows:
        own = [sample for block in blocks for sample in range(starts[block], starts[block + 1])]
        assert sorted(order.samples[begin:stop].tolist()) == own
        assert 0 < len(blocks) <= most
        begin = stop
    if len(parts) == most == 1:
        old = sample_order(count, seed=seed, pass_=0, shard=0, blocks=parts[0].blocks)
        assert order.samples.tolist() == old.tolist()


def test_the_mixed_orders_are_held_still() -> None:
    """Recorded runs depend on these, as on the golden orders of ``test_order``."""
    assert shard_groups(range(10), most=4, seed=17, pass_=3) == GOLDEN_GROUPS
    order = group_order([Part(2, 5), Part(7, 6, [2, 4])], most=2, seed=17, pass_=3)
    assert (order.samples.tolist(), order.windows) == GOLDEN_ORDER


GOLDEN_GROUPS = [[8, 5, 2, 9], [3, 6, 0], [7, 4, 1]]
GOLDEN_ORDER = ([3, 9, 8, 0, 10, 7, 2, 1, 4, 5, 6], [(9, [0, 2]), (11, [1])])


# Files that are sorted by class, all samples of which hold the number of their class.


def sorted_files(folder: Path, kind: str, files: int, samples: int, text: bool = False) -> SourceSettings:
    """The samples 0 to ``samples`` - 1, in their order; sample i is [its class + 1, i]."""
    ids = np.array([[CLASSES * i // samples + 1, i] for i in range(samples)], np.int32)
    values = [str(row.tolist()) for row in ids] if text else [row.tolist() for row in ids]
    key, parts = "text" if text else "input_ids", np.array_split(np.arange(samples), files)
    for number, part in enumerate(parts):
        own, path = [values[i] for i in part], folder / f"{number:02d}.{kind}"
        if kind == "jsonl":
            path.write_text("".join(json.dumps({key: value}) + "\n" for value in own))
        elif kind == "txt":
            path.write_text("".join(f"{values[i]}\n" for i in part))
        elif kind == "parquet":
            pq.write_table(pa.table({key: pa.array(own)}), path, row_group_size=max(1, samples // 64))
        elif kind == "arrow":
            arrow_stream(path, pa.table({key: pa.array(own)}), batch=max(1, samples // 64))
        elif kind == "tar":
            members = [(f"{i}.json", json.dumps({key: values[i]}).encode()) for i in part]
            write_members(path, members if text else [(f"{i}.npy", npy(ids[i])) for i in part])
        else:
            megatron(folder / f"{number:02d}", [ids[i].tobytes() for i in part], 4)
    if kind == "arrow":
        names = [{"filename": f"{number:02d}.arrow"} for number in range(files)]
        (folder / "state.json").write_text(json.dumps({"_data_files": names}))
        return SourceSettings("huggingface", path=str(folder))
    name: Any = {"tar": "webdataset", "txt": "text", "bin": "megatron"}.get(kind, kind)
    return SourceSettings(name, f"{folder}/*.{kind}")


KINDS = [
    ("jsonl", 8), ("txt", 8), ("tar", 8), ("parquet", 1), ("parquet", 8), ("arrow", 1), ("bin", 1), ("bin", 3),
]  # fmt: skip


def numbers(source: walk.ShardedSource, partitions: int, **options: Any) -> list[int]:
    """Numbers of the samples in the order of a run: the partitions take turns."""
    parts = [
        [int(record.tokens[1]) for record in source.read(p, partitions, seed=5, passes=1, **options)]
        for p in range(partitions)
    ]
    return [sample for turn in itertools.zip_longest(*parts) for sample in turn if sample is not None]


def classes(source: walk.ShardedSource, partitions: int, **options: Any) -> float:
    """Mean number of classes in 64 samples."""
    found = np.array(numbers(source, partitions, **options)) * CLASSES // SAMPLES
    assert len(found) == SAMPLES
    return float(np.mean([len(set(found[at : at + PACK].tolist())) for at in range(0, SAMPLES, PACK)]))


@pytest.mark.parametrize("partitions", [1, 4])
@pytest.mark.parametrize(("kind", "files"), [(kind, files) for kind, files in KINDS if kind != "txt"])
def test_data_sorted_by_class_gives_at_least_6_of_8_classes_in_64_samples(
    kind: str, files: int, partitions: int, tmp_path: Path
) -> None:
    source = open_source(sorted_files(tmp_path, kind, files, SAMPLES), PLAIN)
    assert classes(source, partitions) >= 6
    if files == 8 and partitions == 1 and kind != "parquet":
        assert classes(source, partitions, start=Cursor(0, 0, 0)) < 2  # as runs that began before


def test_row_groups_beyond_the_limit_of_memory_are_mixed_where_the_setting_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = sorted_files(tmp_path, "parquet", 1, SAMPLES)
    monkeypatch.setattr(walk, "BLOCK_BYTES", 1)
    assert classes(open_source(written, PLAIN), 1) < 2
    eight = SourceSettings("parquet", written.shards, open_shards=16)
    assert classes(open_source(eight, PLAIN), 1) >= 6


def test_files_beyond_the_limit_are_read_together_where_the_setting_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = sorted_files(tmp_path, "jsonl", 8, SAMPLES)
    size = max(file.stat().st_size for file in tmp_path.iterdir())
    monkeypatch.setattr(walk, "FILE_BYTES", 2 * size)
    assert 1.5 < classes(open_source(written, PLAIN), 1) <= 2
    eight = SourceSettings("jsonl", written.shards, open_shards=8)
    assert classes(open_source(eight, PLAIN), 1) >= 6


MIXES = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(sorted({kind for kind, _ in KINDS} - {"txt"})),
        "text": st.booleans(),
        "files": st.integers(1, 5),
        "samples": st.integers(5, 90),
        "open_shards": st.sampled_from([None, 1, 2, 3, 7, 100]),
        "partitions": st.integers(1, 4),
    }
)


@given(MIXES, st.integers(0, 5), SMALL, st.sampled_from([1, 40, 1 << 30]), st.integers(0, 9))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_every_sample_comes_once_a_pass_and_every_cursor_gives_exactly_the_rest(
    mix: dict[str, Any], seed: int, at: int, most_bytes: int, skip: int
) -> None:
    text = mix["text"] and mix["kind"] != "bin"
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk, "FILE_BYTES", most_bytes * 50)
        patch.setattr(walk, "BLOCK_BYTES", most_bytes)
        written = sorted_files(Path(folder), mix["kind"], mix["files"], mix["samples"], text)
        source = open_source(
            SourceSettings(written.source, written.shards, written.path, open_shards=mix["open_shards"]), PLAIN
        )
        seen = []
        for partition in range(mix["partitions"]):
            whole = list(source.read(partition, mix["partitions"], seed=seed, passes=2))
            seen += [record.tokens.tolist() for record in whole]
            cursors = [record.cursor for record in whole]
            assert cursors == sorted(set(cursors))
            start = cursors[at % len(cursors) - 1] if at % max(len(cursors), 1) else source.begin
            rest = list(source.read(partition, mix["partitions"], seed=seed, passes=2, start=start, skip=skip))
            first = (at % max(len(cursors), 1)) + skip
            expected = [(record.tokens.tolist(), record.where, record.cursor) for record in whole[first:]]
            assert [(record.tokens.tolist(), record.where, record.cursor) for record in rest] == expected
            seqs = sorted({at % max(len(whole), 1), len(whole) // 2})
            for found in source.locate(partition, mix["partitions"], seed=seed, passes=2, seqs=seqs, reads=True):
                assert found.sample is not None
                there = whole[found.seq]
                assert (found.where, found.sample.tokens.tolist()) == (there.where, there.tokens.tolist())
        assert len(seen) == 2 * mix["samples"]
        assert len(set(map(str, seen))) == mix["samples"]


def test_a_row_is_found_at_its_place_in_each_pass(tmp_path: Path) -> None:
    source = open_source(sorted_files(tmp_path, "jsonl", 5, 50), PLAIN)
    read = [list(source.read(p, 2, seed=3, passes=2)) for p in range(2)]
    for where in (read[0][3].where, read[1][0].where):
        expected = [(p, seq) for p in range(2) for seq, record in enumerate(read[p]) if record.where == where]
        found = source.find(where.__eq__, 2, seed=3, passes=2, upto=100)
        assert sorted(found) == expected
        assert len(expected) == 2


def test_a_cursor_of_a_mixed_run_is_refused_by_a_source_that_does_not_mix(tmp_path: Path) -> None:
    written = sorted_files(tmp_path, "jsonl", 2, 10)
    alone = open_source(SourceSettings("jsonl", written.shards, open_shards=1), PLAIN)
    assert alone.begin == Cursor(0, 0, 0)
    with pytest.raises(SourceError, match="The cursor was made with other files, other settings"):
        alone.read(0, 1, seed=0, passes=1, start=Cursor(MIXED, 0, 1))


def test_open_shards_is_part_of_the_digest_only_where_it_is_set(tmp_path: Path) -> None:
    written = sorted_files(tmp_path, "jsonl", 2, 10)
    digests = [
        open_source(SourceSettings("jsonl", written.shards, open_shards=number), PLAIN).digest
        for number in (None, 8, 9)
    ]
    assert len(set(digests)) == 3


def test_open_shards_without_shuffling_is_refused() -> None:
    with pytest.raises(ConfigError, match="got 8 together with `shuffle: false`"):
        check_settings(SourceSettings("jsonl", "a", shuffle=False, open_shards=8))
