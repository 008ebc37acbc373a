"""Media in tar, Parquet and Arrow files: the pixels of each sample are those that were written."""

from __future__ import annotations

import io
import itertools
import json
import tarfile
import threading
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
from awscrt.checksums import crc32c
from PIL import Image

import streampack
from streampack.core.media.references import reference_of
from streampack.errors import MediaError, SampleError, SourceError
from streampack.sources.files.read_bytes import WrongBytes, read_bytes
from tests.integration.running import in_process, the_error, write
from tests.sources.http_server import FileHandler, FileServer

SAMPLES, WIDTH = 12, 4
GRID = {"image_grid_thw": {"dtype": "int64", "axis": "item", "shape": [3]}}
FIELDS: dict[str, Any] = {**GRID, "pixel_values": {"dtype": "reference", "axis": "item"}}
IMAGES = {"fields": {"pixel_values": "png"}}


def pixels(number: int) -> np.ndarray:
    """An image of one to six rows of pixels; each row counts as a patch."""
    draw = np.random.default_rng(number)
    return draw.integers(0, 256, (int(draw.integers(1, 7)), WIDTH, 3), dtype=np.uint8)


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels(number)).save(buffer, "PNG")
    return buffer.getvalue()


def images_of(sample: int) -> list[int]:
    """Numbers of a sample's images; every fourth sample has none, and one has more than ten."""
    return [100 * sample + i for i in range(12 if sample == 6 else sample % 4)]


def sizes_of(images: list[int]) -> dict[str, Any]:
    rows = [len(pixels(each)) for each in images]
    return {"patches": rows, "image_grid_thw": [[1, each, 1] for each in rows]} if images else {}


def decode(data: bytes, reference: streampack.Reference) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data))).reshape(-1, WIDTH * 3)


def check(source: Any, expected: list[list[int]], settings: dict[str, Any] | None = None, **options: Any) -> None:
    """Check the pixels and grids of each sample of ``source``; ``expected``: the numbers of the images of each."""
    seen = []
    stream = {"source": source} | (settings or {})
    with streampack.local(
        {"images": stream}, budget=64, format="thd", shuffle=False, media=streampack.Media(decode, threads=2),
        fields=FIELDS, **options,
    ) as loader:  # fmt: skip
        for pack in loader:
            items, patches = pack["cu_items"].tolist(), pack["cu_patches"].tolist()
            for i, (_, number, _) in enumerate(pack["sample_ids"].tolist()):
                first, stop = items[i : i + 2]
                wanted = expected[number]
                assert stop - first == len(wanted)
                if wanted:
                    found = np.asarray(pack["pixel_values"][patches[first] : patches[stop]])
                    assert np.array_equal(
                        found, np.concatenate([pixels(each) for each in wanted]).reshape(len(found), -1)
                    )
                    assert pack["image_grid_thw"][first:stop].tolist() == sizes_of(wanted)["image_grid_thw"]
                seen.append(number)
    assert sorted(seen) == list(range(len(expected)))


def write_tar(path: Path, members: list[tuple[str, bytes]], mode: str = "w") -> str:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return str(path)


def members(sample: int, images: list[int]) -> list[tuple[str, bytes]]:
    """The members of a sample: images before and after its ids and sizes."""
    row = {"input_ids": [1, 2, sample]} | sizes_of(images)
    found = [(f"{sample:04d}.{i}.png", png(each)) for i, each in enumerate(images)]
    return [*found[::2], (f"{sample:04d}.json", json.dumps(row).encode()), *found[1::2]]


def test_members_of_a_tar_are_the_items_of_its_samples(tmp_path: Path) -> None:
    every = [each for sample in range(SAMPLES) for each in members(sample, images_of(sample))]
    check(write_tar(tmp_path / "images.tar", every), [images_of(sample) for sample in range(SAMPLES)], IMAGES)


@pytest.mark.parametrize("ids", ["npy", "txt"])
def test_ids_and_sizes_may_be_members_beside_the_images(tmp_path: Path, ids: str) -> None:
    with webdataset.TarWriter(str(tmp_path / "images.tar")) as writer:
        for number in range(SAMPLES):
            images = images_of(number)[:1]
            row: dict[str, Any] = {"__key__": str(number), ids: np.array([1, 2, number]) if ids == "npy" else "words"}
            row |= {"left.png": png(images[0])} if images else {}
            if images and number % 2:
                row |= {"json": sizes_of(images)}
            elif images:
                row |= {f"{name}.npy": np.array(value) for name, value in sizes_of(images).items()}
            writer.write(row)
    check(str(tmp_path / "images.tar"), [images_of(number)[:1] for number in range(SAMPLES)], IMAGES)


def test_a_field_may_name_several_extensions(tmp_path: Path) -> None:
    every = [("a.json", json.dumps({"input_ids": [1], **sizes_of([4, 5, 6])}).encode())]
    every += [("a.10.png", png(6)), ("a.9.IMG", png(5)), ("a.1.png", png(4)), ("a.3.gif", b"not an item")]
    check(write_tar(tmp_path / "images.tar", every), [[4, 5, 6]], {"fields": {"pixel_values": "png;.img"}})


def test_the_rows_of_a_tar_may_name_files(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(4))
    row = {"pixel_values": [str(tmp_path / "a.png")]} | sizes_of([4])
    every = [("a.txt", b"words"), ("a.json", json.dumps(row).encode())]
    check(write_tar(tmp_path / "images.tar.gz", every, "w:gz"), [[4]], IMAGES | {"fields": {}})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"a.0.png": None}, "media: items"),
        ({"a.0.png": None, "a.1.png": None}, "pixel_values: missing"),
        ({"a.0.png": b""}, "pixel_values: reference"),
        ({"a.json": None}, "image_grid_thw: missing"),
        ({"a.json": b"{"}, "image_grid_thw: json"),
        ({"a.image_grid_thw.npy": b"no array"}, "image_grid_thw: npy"),
    ],
)
def test_members_that_are_missing_or_wrong_are_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    every = {
        "a.txt": b"words", "a.0.png": png(4), "a.1.png": png(5), "a.json": json.dumps(sizes_of([4, 5])).encode()
    } | changed  # fmt: skip
    path = write_tar(tmp_path / "images.tar", [(name, data) for name, data in every.items() if data is not None])
    with pytest.raises(SampleError, match=said):
        check(path, [[4, 5]], IMAGES)


def test_members_of_a_compressed_tar_cannot_be_referred_to(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "images.tar.gz", members(0, [4]), "w:gz")
    with pytest.raises(SourceError, match=r"images.tar.gz: got the member 0000.0.png of a compressed tar, expected an"):
        check(path, [[4]], IMAGES)


def test_a_sample_whose_images_a_damaged_tar_may_lack_is_refused(tmp_path: Path) -> None:
    path = Path(write_tar(tmp_path / "images.tar", [*members(0, [4]), *members(1, [5, 6])]))
    with tarfile.open(path) as archive:
        end = archive.getmembers()[-1].offset
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(SourceError, match=f"images.tar: at byte {end}: .* damaged or not a tar archive"):
        check(str(path), [[4]], IMAGES)
    check(str(path), [[4]], IMAGES, poison="drop")


class Signed(FileHandler):
    """Serves files only to those who know the key."""

    def do_GET(self) -> None:
        self.path = self.path if self.path.endswith("?key=secret") else "/missing"
        super().do_GET()


def test_members_of_a_tar_at_a_url_are_ranges_of_it(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    every = [each for sample in range(4) for each in members(sample, images_of(sample))]
    write_tar(tmp_path / "images.tar", every)
    with FileServer(tmp_path) as server:
        server.RequestHandlerClass = Signed
        threading.Thread(target=server.serve_forever, daemon=True).start()
        shards = {"shards": f"{server.url}/images.tar?key=secret"}
        check("webdataset", [images_of(sample) for sample in range(4)], shards | IMAGES)
        server.shutdown()
    sizes = {len(png(each)) for sample in range(4) for each in images_of(sample)}
    assert sizes <= {end - begin for begin, end in server.ranges}, "each image is fetched alone"


IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
TYPES = {
    "binary": pa.binary(), "large": pa.large_binary(), "struct": IMAGE, "path": pa.string(),
    "binaries": pa.list_(pa.binary()), "structs": pa.list_(IMAGE), "paths": pa.list_(pa.string()),
}  # fmt: skip


def write_parquet(path: Path, values: list[Any], kind: pa.DataType, images: list[list[int]]) -> str:
    sizes = [sizes_of(each) for each in images]
    columns = {
        "input_ids": pa.array([[1, 2, number] for number in range(len(values))]), "image": pa.array(values, kind),
        "patches": pa.array([each.get("patches") for each in sizes], pa.list_(pa.int32())),
        "image_grid_thw": pa.array([each.get("image_grid_thw") for each in sizes], pa.list_(pa.list_(pa.int64()))),
    }  # fmt: skip
    pq.write_table(pa.table(columns), path, row_group_size=5)
    return str(path)


@pytest.mark.parametrize("name", list(TYPES))
def test_a_column_of_a_table_has_the_images_or_their_paths(tmp_path: Path, name: str) -> None:
    many = name.endswith("s")
    images = [images_of(number)[: None if many else 1] for number in range(SAMPLES)]

    def stored(image: int) -> Any:
        """An image inline, in a file, or in a struct: by its path, as bytes, or as bytes with a name."""
        path = tmp_path / f"{image}.png"
        if name.startswith("path") or (name.startswith("struct") and image % 3 == 0):
            path.write_bytes(png(image))
        if not name.startswith("struct"):
            return str(path) if name.startswith("path") else png(image)
        return {"bytes": png(image) if image % 3 else None, "path": [str(path), None, "name.png"][image % 3]}

    values = [[stored(each) for each in mine] if many else stored(mine[0]) if mine else None for mine in images]
    path = write_parquet(tmp_path / "images.parquet", values, TYPES[name], images)
    check(path, images, {"fields": {"pixel_values": "image"}})


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("kept", ["saved", "parquet", "in memory"])
def test_images_of_a_dataset_of_hugging_face_are_delivered(tmp_path: Path, kept: str, many: bool) -> None:
    images = [images_of(number)[: None if many else 1] for number in range(SAMPLES)]
    for image in itertools.chain(*images):
        (tmp_path / f"{image}.png").write_bytes(png(image))
    paths = [[str(tmp_path / f"{image}.png") for image in each] for each in images]
    kind = datasets.Image(decode=kept != "in memory")
    features = datasets.Features(
        {
            "input_ids": datasets.List(datasets.Value("int32")), "image": datasets.List(kind) if many else kind,
            "patches": datasets.List(datasets.Value("int32")),
            "image_grid_thw": datasets.List(datasets.List(datasets.Value("int64"))),
        }
    )  # fmt: skip
    rows = [
        {"input_ids": [1, 2, number], "image": mine if many else mine[0] if mine else None, "patches": None}
        | {"image_grid_thw": None}
        | sizes_of(each)
        for number, (mine, each) in enumerate(zip(paths, images, strict=True))
    ]
    made = datasets.Dataset.from_list(rows, features=features)
    if kept == "saved":
        made.save_to_disk(tmp_path / "saved")
    elif kept == "parquet":
        made.to_parquet(tmp_path / "made.parquet")
    if kept == "saved":
        for path in tmp_path.glob("*.png"):
            path.unlink()  # a saved dataset has the images inline
    source = {"saved": str(tmp_path / "saved"), "parquet": str(tmp_path / "made.parquet"), "in memory": made}[kept]
    check(source, images, {"fields": {"pixel_values": "image"}})


@pytest.mark.parametrize(
    ("value", "kind", "said"),
    [
        ({"bytes": None, "path": None}, IMAGE, "pixel_values: reference"),
        ({"bytes": b"", "path": "a.png"}, IMAGE, "pixel_values: reference"),
        ([None], TYPES["structs"], "pixel_values: reference"),
        (b"", pa.binary(), "pixel_values: reference"),
        (7, pa.int64(), "pixel_values: reference"),
        ([7], pa.list_(pa.int64()), "pixel_values: reference"),
        ("a" * 8193, pa.string(), "pixel_values: reference"),
        ([png(4), png(4)], TYPES["binaries"], "media: items"),
        (None, pa.binary(), "pixel_values: missing"),
        (np.random.default_rng(0).bytes(1 << 21), pa.binary(), "raise limits.chunk"),
    ],
)
def test_columns_that_are_no_images_are_refused(tmp_path: Path, value: Any, kind: pa.DataType, said: str) -> None:
    path = write_parquet(tmp_path / "images.parquet", [value], kind, [[4]])
    with pytest.raises(SampleError, match=said):
        check(path, [[4]], {"fields": {"pixel_values": "image"}})


def test_bytes_that_are_no_image_end_the_trainer_with_the_place_and_without_the_bytes(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "images.parquet", [b"no image"], pa.binary(), [[4]])
    with pytest.raises(MediaError, match=r"sample .*:0: data:;base64: the decoder raised"):
        check(path, [[4]], {"fields": {"pixel_values": "image"}})


def test_inline_bytes_are_cut_and_checked_like_those_of_files() -> None:
    data = png(4)
    whole = reference_of(data)
    assert whole.shown == "data:;base64"
    assert read_bytes(whole) == read_bytes(reference_of({"bytes": data, "path": "a.png"})) == data
    part = {"uri": whole.uri, "offset": 2, "size": 5, "crc32c": crc32c(data[2:7])}
    assert read_bytes(reference_of(part)) == data[2:7]
    assert read_bytes(reference_of({"uri": "data:image/png;base64,QUJD", "offset": 1})) == b"BC"
    for value in ({"bytes": "text", "path": "a.png"}, {"path": data}, {"bytes": None}, {}, b"", bytearray(), None, 7):
        with pytest.raises(ValueError, match=r"expected the bytes|not valid"):
            reference_of(value)
    for wrong, said in (
        (part | {"offset": len(data) - 4}, "got 4 bytes, expected 5"),
        (part | {"crc32c": 1}, "got the checksum"),
        ({"uri": "data:,abc"}, "got the URL data:, expected data:;base64,"),
        ({"uri": "data:;base64,@@@@"}, "wrong base64"),
        ({"uri": "data:;base64,QUI"}, "wrong base64"),
    ):
        with pytest.raises(WrongBytes, match=said):
            read_bytes(reference_of(wrong))


def producer_yaml(folder: Path, kind: str, path: str, fields: dict[str, str]) -> Path:
    return write(folder / "producer.yaml", {"streams": {"images": {"source": kind, "shards": path, "fields": fields}}})


def previewed(path: Path) -> list[dict[str, Any]]:
    """What ``streampack check --samples`` says of each sample."""
    result = in_process("check", path, "--samples", "99", "--json")
    assert result.returncode == 0, result.stderr
    found: list[dict[str, Any]] = json.loads(result.stdout)["samples"]["images"]
    return found


def test_check_shows_the_members_of_a_tar_that_are_media(tmp_path: Path) -> None:
    every = [each for sample in range(SAMPLES) for each in members(sample, images_of(sample))]
    tar = write_tar(tmp_path / "images.tar", every)
    path = producer_yaml(tmp_path, "webdataset", tar, {"pixel_values": "png", "loss_mask": "mask"})
    row = json.dumps({"input_ids": [1, 2], "mask": [1, 1]}).encode()
    write_tar(tmp_path / "images.tar", [*every, ("last.json", row)])
    found = {sample["where"]: sample for sample in previewed(path)}
    data = Path(tar).read_bytes()
    for sample in range(SAMPLES):
        images, media = images_of(sample), found[f"images.tar:{sample:04d}"]["media"]
        if not images:
            assert media is None
            continue
        assert (media["items"], media["patches"]) == (len(images), sum(sizes_of(images)["patches"]))
        for image, place in zip(images, media["places"]["pixel_values"], strict=True):
            assert place["uri"] == tar
            assert data[place["offset"] : place["offset"] + place["size"]] == png(image)
    shown = in_process("check", path, "--samples", "99").stdout
    patches = sum(sizes_of(images_of(6))["patches"])
    assert f"images.tar:0006  3 tokens, 3 in the loss, 12 media items with {patches} patches" in shown
    assert f"  pixel_values: {tar} at byte " in shown
    assert "  pixel_values: 8 more" in shown


@pytest.mark.parametrize("name", list(TYPES))
def test_check_shows_the_images_of_a_column(tmp_path: Path, name: str) -> None:
    many = name.endswith("s")
    images = [images_of(number)[: None if many else 1] for number in range(4)]

    def stored(image: int) -> Any:
        if name.startswith("struct"):
            return {"bytes": None, "path": "a.png"} if image % 2 else {"bytes": png(image), "path": None}
        return f"{image}.png" if name.startswith("path") else png(image)

    values = [[stored(each) for each in mine] if many else stored(mine[0]) if mine else None for mine in images]
    write_parquet(tmp_path / "images.parquet", values, TYPES[name], images)
    path = producer_yaml(tmp_path, "parquet", str(tmp_path / "images.parquet"), {"pixel_values": "image"})
    seen = {sample["where"]: sample["media"] for sample in previewed(path)}
    for mine, media in zip(images, (seen[key] for key in sorted(seen)), strict=True):
        assert (media is None) == (not mine)
        for image, place in zip(mine, media["places"]["pixel_values"] if media else (), strict=True):
            inline = name in ("binary", "large", "binaries") or (name.startswith("struct") and not image % 2)
            assert place["size"] == (len(png(image)) if inline else None)
            assert (place["uri"] is None) == inline
    assert ("in the sample, " in in_process("check", path, "--samples", "4").stdout) == (not name.startswith("path"))


def test_check_rejects_images_that_do_not_fit_their_sizes(tmp_path: Path) -> None:
    every = [("a.json", json.dumps({"input_ids": [1], "patches": [3]}).encode()), ("a.0.png", b"x"), ("a.1.png", b"x")]
    tar = write_tar(tmp_path / "images.tar", every)
    path = producer_yaml(tmp_path, "webdataset", tar, {"pixel_values": "png"})
    assert previewed(path)[0]["reason"] == "media: items"
    assert "images.tar:a  rejected: media: items" in in_process("check", path, "--samples", "1").stdout


@pytest.mark.parametrize("arguments", [(), ("--samples", "2")])
def test_check_names_shard_and_member_of_a_compressed_tar(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    tar = write_tar(tmp_path / "images.tar.gz", members(0, [4]), "w:gz")
    path = producer_yaml(tmp_path, "webdataset", tar, {"pixel_values": "png"})
    line = the_error(in_process("check", path, *arguments), 1)
    assert f"streams.images.fields.pixel_values: {tar}: got the member 0000.0.png of a compressed tar" in line
    assert "Decompress the shards" in line


def test_check_names_a_field_that_no_member_has(tmp_path: Path) -> None:
    tar = write_tar(tmp_path / "images.tar", members(0, [4]))
    path = producer_yaml(tmp_path, "webdataset", tar, {"pixel_values": "jpg"})
    line = the_error(in_process("check", path), 2)
    assert "streams.images.fields.pixel_values: got the key 'jpg', but no row has this key" in line
