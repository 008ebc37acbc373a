"""Members of tars that are no plain files: links are resolved or refused; what macOS adds is skipped with a word."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.errors import SourceError
from streampack.sources import SourceSettings, open_source
from streampack.sources.formats import webdataset

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


def read(path: Path) -> dict[str, str | None]:
    """Each sample's text by its key; None for a rejected one."""
    records = list(open_source(SourceSettings("webdataset", path=str(path))).read(0, 1, seed=0, passes=1))
    found = {
        each.where.partition(":")[2]: None if each.reason else bytes(each.tokens[:-1].tolist()).decode()
        for each in records
    }
    assert len(found) == len(records)
    return found


def add(archive: tarfile.TarFile, name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "") -> None:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(data)
    archive.addfile(info, io.BytesIO(data))


@given(
    st.sampled_from(FORMATS),
    st.lists(st.tuples(st.sampled_from(["file", "link", "folder"]), st.text("abé", max_size=150), st.integers(0, 99)),
             max_size=12),
)  # fmt: skip
def test_hard_links_have_the_text_of_the_member_that_they_name(
    tmp_path_factory: pytest.TempPathFactory, format_: int, wanted: list[tuple[str, str, int]]
) -> None:
    """``tarfile`` is the oracle: what it extracts for each member is the sample."""
    path = tmp_path_factory.getbasetemp() / "links.tar"
    with tarfile.open(path, "w", format=format_) as archive:
        names: list[str] = []
        for number, (kind, text, target) in enumerate(wanted):
            name = f"{text[:60]}/{number}.txt" if format_ == tarfile.USTAR_FORMAT else f"{text}/{number}.txt"
            if kind == "folder":
                add(archive, f"folder{number}", kind=tarfile.DIRTYPE)
            elif kind == "link" and names:
                add(archive, name, kind=tarfile.LNKTYPE, link=names[target % len(names)])
                names.append(name)
            else:
                add(archive, name, f"{number} {text}".encode())
                names.append(name)
    with tarfile.open(path, encoding="utf-8") as archive:
        expected = {
            member.name.removesuffix(".txt"): archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive
            if not member.isdir()
        }
    assert read(path) == expected


def test_the_links_that_tar_writes_for_two_names_of_a_file_are_read(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for number in range(5):
        (tmp_path / "data" / f"{number}.txt").write_text(f"text {number}")
    os.link(tmp_path / "data" / "1.txt", tmp_path / "data" / "9.txt")
    command = ["tar", "--sort=name", "-cf", str(tmp_path / "a.tar"), "-C", str(tmp_path), "data"]
    subprocess.run(command, check=True)
    assert read(tmp_path / "a.tar") == {f"data/{name}": f"text {name % 8}" for name in (0, 1, 2, 3, 4, 9)}


@pytest.mark.parametrize(("kind", "link", "expected"), [
    (tarfile.SYMTYPE, "0.txt", "symbolic link 1.txt, which has no data, .*with tar --dereference"),
    (tarfile.LNKTYPE, "9.txt", "hard link 1.txt to 9.txt, which is no earlier member, .*with tar --hard-dereference"),
    (tarfile.LNKTYPE, "2.txt", "hard link 1.txt to 2.txt, which is no earlier member"),
    (tarfile.GNUTYPE_SPARSE, "", "sparse file 1.txt, .*with tar without --sparse"),
    (tarfile.CHRTYPE, "", "member 1.txt of type b'3', .*files and folders alone"),
    (tarfile.BLKTYPE, "", "member 1.txt of type b'4'"),
    (tarfile.FIFOTYPE, "", "member 1.txt of type b'6'"),
    (b"M", "", "rest of the file 1.txt, which began in another volume"),
    (b"Q", "", "member 1.txt of type b'Q'"),
])  # fmt: skip
@pytest.mark.parametrize("poison", ["error", "drop"])
def test_members_without_data_of_their_own_are_refused_with_advice(
    kind: bytes, link: str, expected: str, poison: str, tmp_path: Path
) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        add(archive, "0.txt", b"zero")
        add(archive, "1.txt", kind=kind, link=link)
        add(archive, "2.txt", b"two")
    with pytest.raises(SourceError, match=rf"a\.tar: got the {expected}"):
        read(tmp_path / "a.tar")


MAC = ["._data", "data/._0.txt", "data/.DS_Store", "__MACOSX/data/._1.txt", "data/._1.txt", "Thumbs.db"]


@pytest.mark.parametrize("format_", FORMATS)
def test_members_that_macos_adds_are_skipped_and_said_once(
    format_: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(webdataset, "_said_skipped", [])
    for file in "ab":
        with tarfile.open(tmp_path / f"{file}.tar", "w", format=format_) as archive:
            for number, name in enumerate(MAC):
                add(archive, name, b"\0\x05\x16\x07 not a sample")
                add(archive, f"data/{number}.txt", f"{file}{number}".encode())
                add(archive, f"data/._{number}.json", b"{}")
                add(archive, f"data/{number}.json", b"{}")
    with caplog.at_level(logging.WARNING):
        settings = SourceSettings("webdataset", str(tmp_path / "*.tar"), shuffle=False)
        records = list(open_source(settings).read(0, 1, seed=0, passes=1))
    assert [each.reason for each in records] == [None] * 12
    assert [bytes(each.tokens[:-1].tolist()).decode() for each in records] == [
        f"{f}{n}" for f in "ab" for n in range(6)
    ]
    assert len(caplog.records) == 1
    said = "a.tar: skipped 12 members whose names make no sample, such as ._data. macOS adds them; tar leaves them out"
    assert said in caplog.text


@pytest.mark.parametrize("names", [["a.txt", "a.TXT"], ["a.txt", "a.txt"]])
def test_a_sample_with_two_texts_is_rejected_as_a_duplicate(names: list[str], tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in names:
            add(archive, name, b"text")
        add(archive, "b.txt", kind=tarfile.LNKTYPE, link="a.txt")
    settings: Any = SourceSettings("webdataset", path=str(tmp_path / "a.tar"), shuffle=False)
    first, second = open_source(settings).read(0, 1, seed=0, passes=1)
    assert (first.reason, second.reason) == ("duplicate", None)
