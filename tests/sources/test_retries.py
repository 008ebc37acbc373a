"""Stores that fail for a while: every sample comes once, waits last as long as the store asks, 404 ends at once."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

import streampack
from streampack.errors import SourceError, StreampackError
from streampack.sources import SourceSettings, open_source
from streampack.sources.files import remote, retries
from streampack.sources.files.listing import expand, measure
from tests.integration.running import producing_here, running_broker, until
from tests.sources.faulty_store import BUSY, FaultyStore, faulty_store, in_a_second, plan

TEXTS = [f"sample {number} " + "x" * (number % 50) for number in range(240)]
_names = itertools.count()


@contextmanager
def store_in(folder: Path) -> Iterator[FaultyStore]:
    (folder / "web").mkdir(parents=True)
    for file in range(6):
        rows = TEXTS[file::6]
        (folder / "web" / f"{file}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    with faulty_store(folder) as found:
        yield found


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FaultyStore]:
    with store_in(tmp_path) as found:
        yield found


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits where the store asks for none; what it asks for lasts as long as it does."""
    monkeypatch.setattr(retries, "WAITS_S", (0.0, 0.01))
    monkeypatch.setattr(remote, "_BLOCK_BYTES", 512)


def samples_of(loader: Any) -> list[str]:
    found = []
    for pack in loader:
        for sample in range(len(pack.sample_ids)):
            start, length = pack.cu_seqlens_padded[sample], pack.cu_seqlens[sample + 1] - pack.cu_seqlens[sample]
            found.append(bytes(pack.input_ids[start : start + length - 1].tolist()).decode())
    return found


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("first", range(0, 20, 5))
def test_every_sample_comes_once_from_a_store_that_fails_at_every_kind_of_request(first: int, tmp_path: Path) -> None:
    """Five stores at a time: most of the time all wait as long as their stores ask."""

    def check(seed: int) -> None:
        with store_in(tmp_path / str(seed)) as store:
            check_that_every_sample_comes_once(store, seed)

    with ThreadPoolExecutor(5) as threads:
        list(threads.map(check, range(first, first + 5)))


def check_that_every_sample_comes_once(store: FaultyStore, seed: int) -> None:
    plan(store, seed)
    source = f"{store.url}/web/*.jsonl" if seed % 2 else [f"{store.url}/web/{file}.jsonl?key=1" for file in range(6)]
    streams = {"web": {"source": "jsonl", "shards": source}}
    with streampack.local(streams, budget=512, samples=16, format="numpy") as loader:
        found = samples_of(loader)
    assert sorted(found) == sorted(TEXTS)
    failed = {"HEAD", "range"} | ({"listing"} if seed % 2 else set())
    assert failed <= {kind for kind, count in store.failed.items() if count}, store.failed


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("headers", [
    lambda: BUSY, in_a_second, lambda: {"RateLimit": '"api";r=0;t=1'}, lambda: {"retry-after": "1"},
])  # fmt: skip
@pytest.mark.parametrize("kind", ["HEAD", "range", "listing"])
def test_a_wait_lasts_as_long_as_the_store_asks(kind: str, headers: Any, store: FaultyStore) -> None:
    if kind == "HEAD":
        store.faults["GET"].append((429, headers()))  # fsspec asks in both ways before it fails
    store.faults[kind].append((429, headers()))
    source = open_source(SourceSettings("jsonl", f"{store.url}/web/[0].jsonl"))
    assert len(list(source.read(0, 1, seed=0, passes=1))) == 40
    assert store.failed[kind] == 1
    gaps = [after - before for before, after in itertools.pairwise(store.times)]
    assert max(gaps) > 0.95, gaps


@pytest.mark.parametrize("kind", ["listing", "HEAD", "range"])
@pytest.mark.parametrize("status", [404, 410, 403])
def test_a_file_that_is_gone_or_forbidden_is_named_at_once(kind: str, status: int, store: FaultyStore) -> None:
    url = f"{store.url}/web/*.jsonl" if kind == "listing" else f"{store.url}/web/0.jsonl"
    began = time.monotonic()
    if kind == "range":
        source = open_source(SourceSettings("jsonl", path=url))
        next(source.read(0, 1, seed=0, passes=1))
        store.faults["range"].append(status)
    else:
        store.faults["GET"].append(status)
        store.faults[kind].append(status)
    with pytest.raises(SourceError) as error:
        list(open_source(SourceSettings("jsonl", url)).read(0, 1, seed=0, passes=1))
    assert url.partition("*")[0] in str(error.value)
    assert str(status) in str(error.value) or "not found" in str(error.value) or "no matching file" in str(error.value)
    assert time.monotonic() - began < 2.0


def test_a_missing_file_is_named_while_another_waits(store: FaultyStore) -> None:
    store.always["web/0.jsonl"] = (503, {"Retry-After": "300"})
    began = time.monotonic()
    with pytest.raises(SourceError, match=r"gone\.jsonl: the file cannot be read \(HTTP 404 Not Found\)"):
        measure([f"{store.url}/web/0.jsonl", f"{store.url}/web/gone.jsonl"])
    assert time.monotonic() - began < 10.0


@pytest.mark.usefixtures("quick")
def test_a_store_that_never_serves_is_an_error_with_its_status(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retries, "MOST_S", 0.3)
    store.always["web/0.jsonl"] = (503, {"Retry-After": "3600"})
    url = f"{store.url}/web/0.jsonl"
    with caplog.at_level(logging.WARNING), pytest.raises(SourceError) as error:
        measure([f"{url}?key=secret"])
    assert str(error.value) == (
        f"{url}: the file cannot be read in 2 tries (HTTP 503 Service Unavailable). Check the store"
    )
    assert "HTTP 503 Service Unavailable; try 2 follows after 0.3 s" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("status", [400, 401, 405, 416])
def test_other_answers_are_tried_a_few_times(status: int, store: FaultyStore) -> None:
    store.always["web/0.jsonl"] = status
    with pytest.raises(SourceError, match=f"in 5 tries .HTTP {status} "):
        measure([f"{store.url}/web/0.jsonl"])
    assert store.failed["HEAD"] == store.failed["GET"] == retries.FEW_TRIES


def take_until_the_broker_ends(endpoint: str) -> None:
    with pytest.raises(StreampackError):
        list(streampack.connect(endpoint, format="numpy", timeout_s=3.0, stall_timeout_s=3.0, join_timeout_s=3.0))


def test_a_wait_is_in_the_status_of_the_broker(store: FaultyStore) -> None:
    source = open_source(SourceSettings("jsonl", path=f"{store.url}/web/0.jsonl?key=secret"))
    store.always["web/0.jsonl"] = (429, {"Retry-After": "600"})
    settings = {"rules": {"budget": 512, "step": {"packs": 1}}, "streams": {"web": {"partitions": 1}}}

    def detail() -> str:
        return str((broker.feed()["waiting_for"] or {}).get("detail"))

    with running_broker(settings) as broker, producing_here(broker.producers, {"web": source}):
        taker = threading.Thread(target=take_until_the_broker_ends, args=(broker.trainers,))
        taker.start()
        until(lambda: "HTTP 429 Too Many Requests" in detail())
        assert f"whose store does not serve {store.url}/web/0.jsonl: HTTP 429 Too Many Requests; try 2" in detail()
        assert "secret" not in detail()
    taker.join()


class ClientError(Exception):
    """An error as botocore raises it."""

    def __init__(self, status: int, code: str, headers: dict[str, str]) -> None:
        super().__init__(f"An error occurred ({code}) when calling the operation")
        metadata = {"HTTPStatusCode": status, "HTTPHeaders": headers}
        self.response = {"Error": {"Code": code}, "ResponseMetadata": metadata}


class S3Like(MemoryFileSystem):
    """A file system whose errors are those of s3fs: ClientError, translated to errors of the system."""

    protocol = "s3like"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    busy: ClassVar[list[str]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix(f"{cls.protocol}://").strip("/")

    def _maybe_fail(self, what: str) -> None:
        if what not in self.busy:
            return
        self.busy.remove(what)
        try:
            raise ClientError(503, "SlowDown", {"retry-after": "1"})
        except ClientError as error:
            raise OSError(errno.EBUSY, "Please reduce your request rate.") from error

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        self._maybe_fail(f"ls {path.strip('/').split('/')[-1]}")
        return super().ls(path, detail, **kwargs)

    def info(self, path: str, **kwargs: Any) -> Any:
        self._maybe_fail("info")
        return super().info(path, **kwargs)

    def cat_file(self, path: str, **kwargs: Any) -> Any:
        self._maybe_fail("cat")
        return super().cat_file(path, **kwargs)


@pytest.mark.usefixtures("quick")
def test_a_store_such_as_s3_is_asked_again_and_no_folder_is_left_out() -> None:
    fsspec.register_implementation("s3like", S3Like, clobber=True)
    bucket, files = f"bucket{next(_names)}", fsspec.filesystem("s3like")
    for folder, name in itertools.product("ab", "12"):
        files.pipe_file(f"/{bucket}/{folder}/{name}.jsonl", json.dumps({"text": folder + name}).encode())
    S3Like.busy[:] = ["ls a", "ls b", f"ls {bucket}", "info", "cat"]
    source = open_source(SourceSettings("jsonl", f"s3like://{bucket}/*/*.jsonl"))
    found = [bytes(record.tokens[:-1].tolist()).decode() for record in source.read(0, 1, seed=0, passes=1)]
    assert sorted(found) == ["a1", "a2", "b1", "b2"]
    assert S3Like.busy == []


def test_a_store_that_refuses_to_list_is_named() -> None:
    class Closed(S3Like):
        protocol = "closed"

        def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
            raise PermissionError("Access Denied") from ClientError(403, "AccessDenied", {})

    fsspec.register_implementation("closed", Closed, clobber=True)
    with pytest.raises(SourceError, match=r"closed:.*bucket: the file cannot be read .HTTP 403 Forbidden: Access"):
        expand("closed://bucket/*.jsonl")


class Answer(Exception):
    """An error of a library, with a status and headers."""

    def __init__(self, status: int, headers: dict[str, str]) -> None:
        super().__init__("it failed")
        self.status, self.headers = status, headers


@given(st.integers(400, 599), st.integers(0, 5), st.sampled_from([FileNotFoundError, OSError, RuntimeError, None]))
def test_the_status_decides_whatever_error_stands_before_it(status: int, depth: int, before: Any) -> None:
    error: Exception = Answer(status, {"Retry-After": "7"} if depth % 2 else {})
    for _ in range(depth if before else 0):
        made: Exception = before("path")
        made.__cause__ = error
        error = made
    assert retries.status_of(error) == status
    assert (retries.kind_of(error) == "final") == (status in (403, 404, 410))
    assert retries.asked_s(error) == (7.0 if depth % 2 else 0.0)
    assert retries.text_of(error).startswith(f"HTTP {status}")
