"""Fetching ahead of use: each item once, within a bound of memory, and in any case what someone waits for."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from streampack.core.media.references import Reference
from streampack.errors import ConfigError, MediaError
from streampack.media.fetcher import Fetcher
from tests.integration.running import until
from tests.sources.faulty_store import BUSY, faulty_store

SIZE = 1000


class Decoding:
    """A decoder that counts what it decodes; it waits while ``held`` is set."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.go = threading.Event()
        self.go.set()

    def __call__(self, data: bytes, reference: Reference) -> np.ndarray:
        self.go.wait(10)
        self.seen[reference.uri] += 1
        return np.frombuffer(data, np.uint8).reshape(1, -1)


@pytest.fixture
def files(tmp_path: Path) -> list[Reference]:
    found = []
    for number in range(20):
        (tmp_path / str(number)).write_bytes(bytes([number]) * SIZE)
        found.append(Reference(str(tmp_path / str(number))))
    return found


def begun(fetcher: Fetcher, items: list[Reference]) -> Any:
    return fetcher.begin("pixels", items, [1] * len(items), ["sample a:0"] * len(items))


def test_an_item_of_several_messages_is_fetched_once(files: list[Reference]) -> None:
    decode = Decoding()
    fetcher = Fetcher(decode, 2, 10.0, 1 << 20, SIZE)
    one, other = begun(fetcher, [files[0], files[1], files[0]]), begun(fetcher, [files[1], files[2]])
    assert one.take(0, 3)[0][:, 0].tolist() == [0, 1, 0]
    assert other.take(0, 1)[0][:, 0].tolist() == [1]
    assert other.take(1, 2)[0][:, 0].tolist() == [2]
    assert decode.seen == Counter(files[i].uri for i in range(3))
    assert one.take(0, 3)[0][:, 0].tolist() == [0, 1, 0], "a pack may be made again"
    del one, other
    gc.collect()
    again = begun(fetcher, [files[0]])  # nobody holds it any more
    assert again.take(0, 1)[0][:, 0].tolist() == [0]
    assert decode.seen[files[0].uri] == 2
    fetcher.close()


def test_no_more_is_fetched_ahead_than_the_memory_allows(files: list[Reference]) -> None:
    decode = Decoding()
    fetcher = Fetcher(decode, 2, 10.0, 6 * SIZE, SIZE)
    fetcher._mean_bytes = SIZE  # as after a while
    pending = begun(fetcher, files)
    until(lambda: fetcher.fetched >= 4)
    for at in range(len(files)):
        assert fetcher.fetched <= at + 6
        assert pending.take(at, at + 1)[0][0, 0] == at, "what someone waits for is fetched in any case"
    assert fetcher.fetched == 20
    fetcher.close()


def test_items_that_nobody_takes_leave_room(files: list[Reference]) -> None:
    decode = Decoding()
    fetcher = Fetcher(decode, 2, 10.0, 6 * SIZE, SIZE)
    fetcher._mean_bytes = SIZE
    pending = begun(fetcher, files[:10])
    until(lambda: fetcher.fetched >= 4)
    decode.go.clear()
    del pending  # a step of an iteration that has ended
    gc.collect()
    decode.go.set()
    last = begun(fetcher, files[10:14])
    until(lambda: all(decode.seen[each.uri] for each in files[10:14]))
    assert last.take(0, 4)[0][:, 0].tolist() == [10, 11, 12, 13]
    del last
    gc.collect()
    until(lambda: fetcher._held_bytes == 0)
    fetcher.close()


def test_an_error_is_raised_where_the_item_is_taken_and_the_others_come(files: list[Reference], tmp_path: Path) -> None:
    fetcher = Fetcher(Decoding(), 2, 10.0, 1 << 20, SIZE)
    pending = begun(fetcher, [files[0], Reference(str(tmp_path / "none")), files[1]])
    assert pending.take(0, 1)[0][0, 0] == 0
    for _ in range(2):
        with pytest.raises(MediaError, match=r"sample a:0: .*none"):
            pending.take(1, 2)
    assert pending.take(2, 3)[0][0, 0] == 1
    fetcher.close()


def test_after_close_a_wait_ends(files: list[Reference]) -> None:
    decode = Decoding()
    decode.go.clear()
    fetcher = Fetcher(decode, 1, 10.0, 1 << 20, SIZE)
    pending = begun(fetcher, files[:3])
    threading.Timer(0.2, fetcher.close).start()
    with pytest.raises(MediaError, match="because the loader was closed"):
        pending.take(2, 3)
    decode.go.set()


def test_dropped_items_are_zeros_and_counted_once_for_each_place(files: list[Reference], tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(b"x" * (SIZE + 1))
    (tmp_path / "bad").write_bytes(b"bad")

    def decode(data: bytes, reference: Reference) -> np.ndarray:
        if data == b"bad":
            raise RuntimeError("no image")
        return np.frombuffer(data, np.uint8).reshape(1, -1)

    fetcher = Fetcher(decode, 2, 10.0, 1 << 20, SIZE, drops=True)
    none, path = Reference(str(tmp_path / "none")), files[1].uri
    wrong = [none, Reference(str(tmp_path / "long")), Reference(str(tmp_path / "bad")), Reference(path, crc32c=1), none]
    pending = begun(fetcher, [files[3], *wrong, files[4]])
    for _ in range(2):
        values, dropped = pending.take(0, 7)
        assert dropped == [1, 2, 3, 4, 5]
        assert values[:, 0].tolist() == [3, 0, 0, 0, 0, 0, 4]
        assert values.shape == (7, SIZE)
    alone, dropped = pending.take(2, 3)
    assert (alone.shape, alone.any(), dropped) == ((1, SIZE), False, [2])
    counts = {name: count for name, count in fetcher.stats().items() if count}
    assert counts.pop("media_bytes") >= 2 * SIZE
    assert counts == {
        "media_items": 2, "media_dropped_missing": 2, "media_dropped_too_large": 1, "media_dropped_undecodable": 1,
        "media_dropped_wrong_bytes": 1,
    }  # fmt: skip
    fetcher.close()


def test_items_cannot_be_dropped_before_one_is_decoded(files: list[Reference], tmp_path: Path) -> None:
    fetcher = Fetcher(Decoding(), 2, 10.0, 1 << 20, SIZE, drops=True)
    with pytest.raises(MediaError, match="No item of pixels was decoded yet, so it cannot be dropped"):
        begun(fetcher, [Reference(str(tmp_path / "none"))]).take(0, 1)
    assert begun(fetcher, [files[1]]).take(0, 1)[1] == []
    assert begun(fetcher, [Reference(str(tmp_path / "none"))]).take(0, 1)[1] == [0]
    with pytest.raises(MediaError, match="nosuch://"):  # nothing of this kind could be opened
        begun(fetcher, [Reference("nosuch://host/x")]).take(0, 1)
    fetcher.close()


def test_an_item_that_is_late_is_dropped_and_used_where_it_comes_in_time(files: list[Reference]) -> None:
    decode = Decoding()
    fetcher = Fetcher(decode, 1, 0.3, 1 << 20, SIZE, drops=True)
    first = begun(fetcher, [files[1]])
    assert first.take(0, 1)[1] == []
    decode.go.clear()
    pending = begun(fetcher, [files[2], files[2]])
    assert pending.take(0, 1)[1] == [0]
    decode.go.set()
    until(lambda: decode.seen[files[2].uri] == 1)
    values, dropped = pending.take(1, 2)
    assert (values[0, 0], dropped) == (2, [])
    assert fetcher.dropped["late"] == 1
    fetcher.close()


@pytest.mark.parametrize("drops", [False, True])
def test_an_item_of_another_shape_is_named(files: list[Reference], drops: bool) -> None:
    """Also where items are dropped: the decoder is to blame, and might return another shape for all others."""

    def decode(data: bytes, reference: Reference) -> np.ndarray:
        return np.frombuffer(data, np.uint8).reshape(1, -1)[:, : 3 if data[0] == 2 else None]

    fetcher = Fetcher(decode, 1, 10.0, 1 << 20, SIZE, drops)
    pending = begun(fetcher, files[:4])
    assert pending.take(0, 2)[1] == []
    with pytest.raises(MediaError, match=r"sample a:0: .*/2: the decoder returned patches of uint8 \[3\], expected"):
        pending.take(2, 4)
    fetcher.close()


@pytest.mark.parametrize(
    "error",
    [MemoryError("no room"), ImportError("no PIL"), ConfigError("no PyAV"), OSError(24, "Too many open files")],
)
def test_no_item_is_dropped_for_an_error_of_the_machine(
    files: list[Reference], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(data: bytes, reference: Reference) -> np.ndarray:
        if data[0] == 1 and not isinstance(error, OSError):
            raise error
        return np.frombuffer(data, np.uint8).reshape(1, -1)

    def read(reference: Reference, largest: int) -> bytes:
        if reference == files[1] and isinstance(error, OSError):
            raise error
        return Path(reference.uri).read_bytes()

    monkeypatch.setattr("streampack.media.fetcher.read_bytes", read)
    monkeypatch.setattr("streampack.sources.files.retries.FEW_TRIES", 1)
    fetcher = Fetcher(decode, 1, 10.0, 1 << 20, SIZE, drops=True)
    pending = begun(fetcher, files[:2])
    assert pending.take(0, 1)[1] == []
    with pytest.raises(MediaError, match="sample a:0"):
        pending.take(1, 2)
    assert not any(fetcher.dropped.values())
    fetcher.close()


def test_dropped_items_do_not_keep_their_bytes(tmp_path: Path) -> None:
    def decode(data: bytes, reference: Reference) -> np.ndarray:
        if len(data) > 1:
            raise RuntimeError("no image")
        return np.zeros((1, 1), np.uint8)

    size, seen = 8 << 20, []
    (tmp_path / "good").write_bytes(b"x")
    fetcher = Fetcher(decode, 1, 10.0, 1 << 20, size, drops=True)
    gc.collect()
    gc.disable()
    try:
        for number in range(12):
            (tmp_path / str(number)).write_bytes(bytes(size))
            pending = begun(fetcher, [Reference(str(tmp_path / "good")), Reference(str(tmp_path / str(number)))])
            assert pending.take(0, 2)[1] == [1]
            del pending
            seen.append(psutil.Process().memory_info().rss)
    finally:
        gc.enable()
    assert seen[-1] - seen[1] < 4 * size
    fetcher.close()


def test_an_item_at_a_busy_store_comes_after_as_long_as_the_store_asks(tmp_path: Path) -> None:
    (tmp_path / "item").write_bytes(b"x" * SIZE)
    with faulty_store(tmp_path) as store:
        store.faults["range"].extend([503, (429, BUSY), "reset", "cut"])
        fetcher = Fetcher(Decoding(), 1, 30.0, 1 << 20, SIZE)
        began = time.monotonic()
        values, dropped = begun(fetcher, [Reference(f"{store.url}/item?key=secret")]).take(0, 1)
        assert (values.tobytes(), dropped) == (b"x" * SIZE, [])
        assert time.monotonic() - began > 0.95
        assert store.failed["range"] == 4
        fetcher.close()


@pytest.mark.parametrize(("status", "reason"), [(503, "late"), (404, "missing"), (403, "unreadable")])
def test_an_item_that_a_store_does_not_serve_is_named_with_its_status(
    status: int, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "good").write_bytes(b"x" * SIZE)
    with faulty_store(tmp_path) as store:
        store.always["bad"] = (status, {"Retry-After": "300"})
        fetcher = Fetcher(Decoding(), 2, 1.0, 1 << 20, SIZE, drops=True)
        assert begun(fetcher, [Reference(f"{store.url}/good")]).take(0, 1)[1] == []
        assert begun(fetcher, [Reference(f"{store.url}/bad?key=secret")]).take(0, 1)[1] == [0]
        assert fetcher.dropped[reason] == 1
        assert status == 404 or f"HTTP {status}" in caplog.text or f"{status}, message" in caplog.text
        assert "secret" not in caplog.text
        fetcher.close()
