"""URLs: what is read through fsspec is what lies on the disk, with ranges, a bounded cache, and a few tries."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.errors import ConfigError, SourceError
from streampack.sources import RawSample, Source, SourceSettings, open_source
from streampack.sources.files import remote, retries
from streampack.sources.files.byte_source import File
from streampack.sources.files.listing import measure
from tests.sources.http_server import FileServer
from tests.sources.writers import PLAIN, WRITERS

KINDS = ["jsonl", "webdataset", "parquet", "text", "megatron", "huggingface"]
_ids = itertools.count()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FileServer]:
    pytest.importorskip("aiohttp")
    found = FileServer(tmp_path)
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield found
    found.shutdown()
    found.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "WAITS_S", (0.0, 0.01))


def settings_at(local: SourceSettings, folder: Path, url: str) -> SourceSettings:
    """The same files, one by one, at a URL."""
    if local.path is not None:
        return SourceSettings(local.source, path=url)
    names = sorted({f"{url}/{path.name}" for path in folder.iterdir() if path.suffix != ".idx"})
    return SourceSettings(local.source, names)


def records(source: Source, **more: Any) -> list[tuple[Any, ...]]:
    found: Iterator[RawSample] = source.read(0, 1, seed=5, passes=1, **more)
    return [(record.tokens.tolist(), record.reason, record.where, record.cursor) for record in found]


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_a_server_are_read_as_those_on_the_disk(kind: str, tmp_path: Path, server: FileServer) -> None:
    local = WRITERS[kind](tmp_path)
    here, there = open_source(local, PLAIN), open_source(settings_at(local, tmp_path, server.url), PLAIN)
    want = records(here)
    assert records(there) == want
    assert there.digest == here.digest
    for at in (1, len(want) // 2, len(want) - 1):
        assert records(there, start=want[at][-1]) == want[at + 1 :]


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_a_store_are_read_as_those_on_the_disk(kind: str, tmp_path: Path) -> None:
    local = WRITERS[kind](tmp_path)
    bucket = f"bucket{next(_ids)}"
    store = fsspec.filesystem("memory")
    for path in tmp_path.iterdir():
        store.pipe_file(f"/{bucket}/{path.name}", path.read_bytes())
    pattern = {"path": f"memory://{bucket}"} if local.path else {"shards": f"memory://{bucket}/*"}
    there = open_source(SourceSettings(local.source, **pattern), PLAIN)  # type: ignore[arg-type]
    here = open_source(local, PLAIN)
    assert records(there) == records(here)
    assert there.digest == here.digest


def test_braces_and_queries_are_urls_too(tmp_path: Path, server: FileServer) -> None:
    WRITERS["jsonl"](tmp_path)
    braces = open_source(SourceSettings("jsonl", server.url + "/{0..4}.jsonl?secret=1"), PLAIN)
    plain = open_source(SourceSettings("jsonl", str(tmp_path / "{0..4}.jsonl")), PLAIN)
    assert records(braces) == records(plain)
    assert braces.digest == plain.digest


@given(
    st.integers(1, 64), st.integers(1, 6), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 200)), max_size=12)
)
def test_any_reads_give_the_bytes_of_the_file_and_hold_few(
    block: int, blocks: int, reads: list[tuple[int, int]]
) -> None:
    data = bytes(i % 251 for i in range(400))
    fsspec.filesystem("memory").pipe_file("/cached/a", data)
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(remote, "_BLOCK_BYTES", block)
        patch.setattr(remote, "_BLOCKS", blocks)
        file = remote.RemoteFile(File("memory://cached/a", "a", len(data), None))
        for offset, size in reads:
            if offset + size > len(data):
                with pytest.raises(SourceError, match="ends at byte 400"):
                    file.pread(size, offset)
            else:
                assert file.pread(size, offset) == data[offset : offset + size]
            assert len(file._blocks) <= blocks


def test_a_shuffled_shard_crosses_the_network_once(
    tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_BLOCK_BYTES", 1000)
    size = (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "x" * 90}) + "\n" for _ in range(300)))
    source = open_source(SourceSettings("jsonl", path=f"{server.url}/a.jsonl"), PLAIN)
    assert len(records(source)) == 300
    assert sum(end - begin for begin, end in server.ranges) == size


def test_failures_that_pass_are_one_line_in_the_log(
    tmp_path: Path, server: FileServer, caplog: pytest.LogCaptureFixture
) -> None:
    WRITERS["jsonl"](tmp_path)
    settings = SourceSettings("jsonl", path=f"{server.url}/2.jsonl")
    want = records(open_source(settings, PLAIN))
    server.failures = 2
    with caplog.at_level(logging.WARNING, "streampack"):
        assert records(open_source(settings, PLAIN)) == want
    assert len(caplog.records) == 1
    assert "HTTP 503 Service Unavailable; try 2 follows" in caplog.text


def stop_message(settings: SourceSettings) -> str:
    with pytest.raises((SourceError, ConfigError)) as error:
        records(open_source(settings, PLAIN))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_url_that_cannot_be_read_is_refused_in_one_line(
    tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "MOST_S", 0.2)
    WRITERS["jsonl"](tmp_path)
    good = SourceSettings("jsonl", path=f"{server.url}/2.jsonl?key=secret")
    server.failures = 9999
    tried = (
        r"2\.jsonl: at byte 0: the file cannot be read in \d+ tries \(HTTP 503 Service Unavailable\)\. Check the store"
    )
    assert re.search(tried, stop_message(good))
    assert "secret" not in stop_message(good)
    server.failures = 0
    assert "gone.jsonl: the file cannot be read (HTTP 404 Not Found)" in stop_message(
        SourceSettings("jsonl", path=f"{server.url}/gone.jsonl")
    )
    server.sizeless = True
    assert "does not report the file's size" in stop_message(good)


def test_a_server_without_ranges_is_refused(
    tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_BLOCK_BYTES", 16)
    WRITERS["webdataset"](tmp_path)
    server.plain = True
    said = stop_message(SourceSettings("webdataset", path=f"{server.url}/2.tar"))
    assert "2.tar" in said
    assert "ranges" in said or "cannot be read" in said


def test_a_file_that_changes_is_noticed_when_its_turn_comes(tmp_path: Path, server: FileServer) -> None:
    WRITERS["jsonl"](tmp_path)
    source = open_source(SourceSettings("jsonl", path=f"{server.url}/2.jsonl"), PLAIN)
    (tmp_path / "2.jsonl").write_text("{}")
    with pytest.raises(SourceError, match=r"got 2 bytes, expected .* bytes as at the start"):
        records(source)


@pytest.mark.parametrize(("url", "expected"), [
    ("nosuch://bucket/a", "got a URL that fsspec cannot open"),
    ("memory://nothing/a.jsonl", "memory://nothing/a.jsonl: the file cannot be read"),
    ("memory://nothing/*.jsonl", "got no matching file, expected at least one"),
])  # fmt: skip
def test_urls_that_name_nothing_are_refused(url: str, expected: str) -> None:
    assert expected in stop_message(SourceSettings("jsonl", url))


def test_a_store_whose_package_is_missing_says_which() -> None:
    pytest.importorskip("fsspec")
    with contextlib.suppress(ImportError):
        __import__("s3fs")
        pytest.skip("s3fs is here")
    assert "s3fs" in stop_message(SourceSettings("jsonl", "s3://bucket/a.jsonl"))


def test_a_folder_is_no_file() -> None:
    fsspec.filesystem("memory").pipe_file("/folder/inner/a", b"x")
    with pytest.raises(SourceError, match=r"is not a file\. To read the files of a folder"):
        measure(["memory://folder/inner"])
