"""Bytes at chained URLs: members of archives, and files that fsspec keeps on this machine."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from awscrt.checksums import crc32c

import streampack
from streampack.core.media.references import Reference
from streampack.errors import ConfigError, MediaError
from streampack.sources.files.read_bytes import WrongBytes, read_bytes
from tests.media.stored_images import FIELDS, decode, image, store

MEMBERS = 40


@pytest.fixture
def archives(tmp_path: Path) -> Path:
    """A folder with images.zip and images.tar, whose members are images."""
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as packed, tarfile.open(tmp_path / "images.tar", "w") as plain:
        for number in range(MEMBERS):
            packed.writestr(f"some/{number}", image(number), zipfile.ZIP_DEFLATED)
            info = tarfile.TarInfo(f"some/{number}")
            info.size = len(image(number))
            plain.addfile(info, io.BytesIO(image(number)))
    return tmp_path


@pytest.mark.parametrize("kind", ["zip", "tar"])
@pytest.mark.parametrize("place", ["{}", "file://{}"])
def test_members_of_an_archive_are_read_by_many_threads(archives: Path, kind: str, place: str) -> None:
    archive = place.format(archives / f"images.{kind}")
    with ThreadPoolExecutor(8) as threads:
        found = list(
            threads.map(
                lambda number: read_bytes(Reference(f"{kind}://some/{number % MEMBERS}::{archive}")),
                range(10 * MEMBERS),
            )
        )
    assert found == [image(number) for number in range(MEMBERS)] * 10


def test_an_archive_is_opened_once(archives: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: Counter[str] = Counter()
    init = zipfile.ZipFile.__init__

    def counted(self: zipfile.ZipFile, *args: Any, **others: Any) -> None:
        opened["zip"] += 1
        init(self, *args, **others)

    monkeypatch.setattr(zipfile.ZipFile, "__init__", counted)
    for number in range(MEMBERS):
        assert read_bytes(Reference(f"zip://some/{number}::{archives}/images.zip")) == image(number)
    assert opened["zip"] == 1


def test_ranges_and_checksums_are_those_of_the_member(archives: Path) -> None:
    uri, data = f"zip://some/3::{archives}/images.zip", image(3)
    assert read_bytes(Reference(uri, 2, 4, crc32c(data[2:6]))) == data[2:6]
    assert read_bytes(Reference(uri, 2)) == data[2:]
    with pytest.raises(WrongBytes, match="checksum"):
        read_bytes(Reference(uri, 2, 4, 1))
    with pytest.raises(WrongBytes, match="expected 999"):
        read_bytes(Reference(uri, 0, 999))


@pytest.mark.parametrize("cache", ["simplecache", "filecache"])
def test_a_cached_file_is_fetched_once(cache: str) -> None:
    asked: Counter[str] = Counter()
    with store(faulty=False, asked=asked) as place:
        for number in range(6):
            assert read_bytes(Reference(f"{cache}::{place}/{number}")) == image(number)
        first = asked.copy()
        for number in range(6):
            assert read_bytes(Reference(f"{cache}::{place}/{number}")) == image(number)
        assert read_bytes(Reference(f"{cache}::{place}/3", 2, 4)) == image(3)[2:6]
    assert asked == first


def test_a_cached_archive_has_members(archives: Path) -> None:
    uri = f"zip://some/5::simplecache::file://{archives}/images.zip"
    assert read_bytes(Reference(uri)) == image(5)
    assert read_bytes(Reference(f"simplecache::{uri}")) == image(5)


@pytest.mark.parametrize(
    ("uri", "error", "said"),
    [
        ("zip://none::{}/images.zip", FileNotFoundError, "none"),
        ("tar://none::{}/images.tar", FileNotFoundError, "none"),
        ("zip://some/1::{}/none.zip", FileNotFoundError, "none.zip"),
        ("zip://some/1::nosuch://x/y", ConfigError, "nosuch://, which cannot be opened"),
        ("nosuch::file://{}/images.zip", ConfigError, "nosuch://, which cannot be opened"),
        ("reference://some/1", ConfigError, "needs more than this URL says .* chain the URL"),
    ],
)
def test_a_missing_member_archive_or_protocol_is_named(
    archives: Path, uri: str, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        read_bytes(Reference(uri.format(archives)))


def test_two_colons_in_a_path_are_no_chain(tmp_path: Path) -> None:
    (tmp_path / "a::b").write_bytes(b"here")
    assert read_bytes(Reference(f"file://{tmp_path}/a::b")) == b"here"


def test_a_loader_reads_members_of_an_archive(archives: Path) -> None:
    sent = [
        {
            "input_ids": [1, 2, number],
            "pixel_values": [Reference(f"zip://some/{number}::{archives}/images.zip", crc32c=crc32c(image(number)))],
            "patches": [len(image(number)) // 8],
        }
        for number in range(12)
    ]  # fmt: skip
    options: dict[str, Any] = {"budget": 16, "format": "thd", "fields": FIELDS, "shuffle": False}
    with streampack.local(sent, media=streampack.Media(decode), **options) as loader:
        found = [np.asarray(pack["pixel_values"]).tobytes() for pack in loader]
    assert b"".join(found) == b"".join(map(image, range(12)))
    (archives / "images.zip").rename(archives / "other.zip")
    gone = sent[:1]
    gone[0]["pixel_values"] = [Reference(f"zip://some/0::{archives}/third.zip")]
    with (
        pytest.raises(MediaError, match=r"third\.zip"),
        streampack.local(gone, media=streampack.Media(decode), **options) as loader,
    ):
        list(loader)


def test_an_archive_may_have_a_relative_path(archives: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(archives)
    for kind in ("zip", "tar"):
        assert read_bytes(Reference(f"{kind}://some/3::images.{kind}")) == image(3)


def test_a_store_that_serves_no_ranges_is_named() -> None:
    """More bytes than a range has are no fault of the item, so it is neither asked for again nor dropped."""
    with store(faulty=False) as place, pytest.raises(ConfigError, match=r"expected a\s+store that\s+serves ranges"):
        read_bytes(Reference(f"{place}/4", 1, 2))
