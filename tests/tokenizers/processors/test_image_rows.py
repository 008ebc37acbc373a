"""Rows of all formats with the same images become the same samples."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
from PIL import Image

from streampack.core.media.references import inline_bytes
from streampack.sources import SourceSettings, TokenizerSettings, open_source, open_tokenizer
from streampack.sources.records import RawSample
from streampack.tokenizers.base import Tokenizer
from tests.tokenizers.processors.processor_folders import folder_of, given_fields

SIZES = ((70, 90), (200, 60))
QUESTION, ANSWER = "\nwhat is this? a fox", "a thing"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = folder_of("qwen2_vl", tmp_path_factory.mktemp("processor"))
    return open_tokenizer(TokenizerSettings(processor=str(folder)))


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    draw = np.random.default_rng(0)
    for number, size in enumerate(SIZES):
        Image.fromarray(draw.integers(0, 256, (*size, 3), dtype=np.uint8)).save(tmp_path / f"{number}.png")
    return [tmp_path / f"{number}.png" for number in range(len(SIZES))]


def chat(*images: Any, key: str = "path") -> dict[str, Any]:
    """Two images before a question, and its answer."""
    parts = [{"type": "image", **({} if image is None else {key: image})} for image in images]
    question = {"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}
    return {"messages": [question, {"role": "assistant", "content": ANSWER}]}


def marked(**more: Any) -> dict[str, Any]:
    """The same chat as ShareGPT has it."""
    turns = [{"from": "human", "value": f"<image><image>{QUESTION}"}, {"from": "gpt", "value": ANSWER}]
    return {"conversations": turns, **more}


def read(source: str, path: Path | str, tokenizer: Tokenizer, **keys: Any) -> list[RawSample]:
    opened = open_source(SourceSettings(source, path=str(path), shuffle=False, **keys), tokenizer)  # type: ignore[arg-type]
    return list(opened.read(0, 1, seed=0, passes=1, fields=given_fields(tokenizer)))


def read_rows(folder: Path, tokenizer: Tokenizer, rows: list[dict[str, Any]], **keys: Any) -> list[RawSample]:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return read("jsonl", path, tokenizer, **keys)


def same(sample: RawSample, expected: RawSample, images: list[Path]) -> None:
    assert sample.reason is None, sample.why
    assert sample.tokens.tolist() == expected.tokens.tolist()
    for name in ("loss_mask", "position_ids", "image_grid_thw", "patches"):
        assert np.array_equal(sample.fields[name], expected.fields[name])
    for reference, path in zip(sample.fields["pixel_values"], images, strict=True):
        if reference.is_inline:
            assert inline_bytes(reference) == path.read_bytes()
        elif reference.offset:
            data = Path(reference.uri).read_bytes()
            assert data[reference.offset : reference.offset + reference.size] == path.read_bytes()
        else:
            assert Path(reference.uri.removeprefix("file://")).read_bytes() == path.read_bytes()


def test_rows_of_json_lines_have_images_in_many_forms(tmp_path: Path, images: list[Path], tokenizer: Tokenizer) -> None:
    paths, data = list(map(str, images)), [path.read_bytes() for path in images]
    encoded = [base64.b64encode(each).decode() for each in data]
    urls = [f"data:image/png;base64,{each}" for each in encoded]
    rows = [
        chat(*paths),
        chat(*paths, key="image"),
        chat(*(f"file://{path}" for path in paths), key="url"),
        chat(*encoded, key="base64"),
        chat(*urls, key="url"),
        chat(None, None) | {"images": paths},
        chat(paths[0], None) | {"images": [{"path": paths[1], "bytes": None}]},
        marked(images=["0.png", "1.png"]) | {"messages": marked()["conversations"]},
    ]
    rows[4]["messages"][0]["content"][:2] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    expected, *others = read_rows(tmp_path, tokenizer, rows, image_folder=str(tmp_path))
    for sample in (expected, *others):
        same(sample, expected, images)
    keys = {"messages_key": "conversations", "image_folder": str(tmp_path)}
    (llava,) = read_rows(tmp_path, tokenizer, [marked(image=["0.png", "1.png"])], **keys)
    same(llava, expected, images)


def test_tars_and_tables_have_the_images_of_their_rows(
    tmp_path: Path, images: list[Path], tokenizer: Tokenizer
) -> None:
    (expected,) = read_rows(tmp_path, tokenizer, [chat(*map(str, images))])
    data = [path.read_bytes() for path in images]
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as shard:
        shard.write({"__key__": "0", "json": marked(), "0.png": data[0], "1.png": data[1], "txt": "a caption"})
    keys = {"messages_key": "conversations"}
    stored = [{"bytes": each, "path": None} for each in data]
    tables = {"structs": stored, "bytes": data, "paths": list(map(str, images))}
    samples = read("webdataset", tmp_path / "a.tar", tokenizer, **keys)
    for name, values in tables.items():
        pq.write_table(pa.Table.from_pylist([marked(pictures=values)]), tmp_path / f"{name}.parquet")
        samples += read("parquet", tmp_path / f"{name}.parquet", tokenizer, images_key="pictures", **keys)
    features = datasets.Features(
        {
            "conversations": [{"from": datasets.Value("string"), "value": datasets.Value("string")}],
            "images": [datasets.Image(decode=False)],
        }
    )
    saved = datasets.Dataset.from_list([marked(images=list(map(str, images)))], features=features)
    saved.save_to_disk(tmp_path / "saved")
    samples += read("huggingface", tmp_path / "saved", tokenizer, **keys)
    assert len(samples) == 5
    for sample in samples:
        same(sample, expected, images)


def test_a_prompt_and_its_completion_share_a_list_of_images(
    tmp_path: Path, images: list[Path], tokenizer: Tokenizer
) -> None:
    (expected,) = read_rows(tmp_path, tokenizer, [chat(*map(str, images))])
    question, answer = chat(None, None)["messages"]
    row = {"prompt": [question], "completion": [answer], "images": list(map(str, images))}
    (sample,) = read_rows(tmp_path, tokenizer, [row])
    same(sample, expected, images)


def picture(path: Path, mode: str = "RGB", size: tuple[int, int] = (40, 30), **options: Any) -> str:
    Image.new(mode, size).save(path, **options)
    return str(path)


@pytest.mark.parametrize(
    ("name", "reason", "said"),
    [
        ("missing.png", "image_missing", "image 0 .*missing.png.*No such file"),
        ("text.png", "image_unreadable", "no image that Pillow knows"),
        ("short.jpg", "image_unreadable", "short.jpg.*Truncated"),
        ("bomb.png", "image_too_large", "has 40000 x 30000 pixels|1200000000 pixels"),
        ("animated.gif", "image_animated", "has 3 frames"),
        ("deep.png", "image_depth", "mode is I;16"),
        ("thin.png", "image_size", "has 1 x 300 pixels, and its sides have a ratio of 300, more than 200"),
    ],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_images_that_cannot_be_used_are_rejected_with_a_reason(
    tmp_path: Path, tokenizer: Tokenizer, name: str, reason: str, said: str
) -> None:
    frames = [Image.new("L", (40, 30), shade) for shade in (10, 100, 200)]
    frames[0].save(tmp_path / "animated.gif", save_all=True, append_images=frames[1:])
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "short.jpg").write_bytes(Path(picture(tmp_path / "whole.jpg")).read_bytes()[:30])
    picture(tmp_path / "deep.png", "I;16")
    picture(tmp_path / "thin.png", size=(1, 300))
    if name == "bomb.png":  # which takes seconds to write
        picture(tmp_path / name, "1", (40_000, 30_000))
    good = chat(picture(tmp_path / "good.png"))
    rejected, sample = read_rows(tmp_path, tokenizer, [chat(str(tmp_path / name)), good])
    assert rejected.reason == reason
    assert not len(rejected.tokens)
    assert re.search(said, rejected.why), rejected.why
    assert sample.reason is None


def test_images_of_other_modes_and_orientations_are_those_of_the_processor(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = [
        picture(tmp_path / f"turned.{kind}", size=(200, 60), exif=exif) for kind in ("jpg", "png", "webp", "tiff")
    ]
    others = [
        picture(tmp_path / "cmyk.jpg", "CMYK"),
        picture(tmp_path / "dot.png", size=(1, 1)),
        picture(tmp_path / "one.gif", "P"),
    ]
    samples = read_rows(tmp_path, tokenizer, [chat(path) for path in turned + others])
    grids = [np.asarray(sample.fields["image_grid_thw"])[0].tolist() for sample in samples]
    assert grids[:4] == [[1, 14, 4]] * 4
    assert grids[4:] == [[1, 4, 6], [1, 4, 4], [1, 4, 6]]


@pytest.mark.parametrize(
    ("row", "number", "places"),
    [
        (marked(image="0.png"), 1, 2),
        (marked(images=["0.png"] * 3), 3, 2),
        (marked(images=[]), 0, 2),
        (marked(images=None), 0, 2),
        ({"conversations": chat()["messages"], "image": "0.png"}, 1, 0),
        ({"conversations": chat(None)["messages"]}, 0, 1),
    ],
)
def test_more_or_fewer_images_than_places_are_rejected_with_both_numbers(
    tmp_path: Path, images: list[Path], tokenizer: Tokenizer, row: dict[str, Any], number: int, places: int
) -> None:
    (sample,) = read_rows(tmp_path, tokenizer, [row], messages_key="conversations", image_folder=str(tmp_path))
    assert (sample.reason, sample.why) == (
        "image_count", f"the row has {number} images, and {places} places for images in its messages"
    )  # fmt: skip


def test_a_text_with_the_mark_is_text_where_rows_have_no_images(tmp_path: Path, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "a tag <image> of HTML"}, {"role": "assistant", "content": "yes"}]
    (sample,) = read_rows(tmp_path, tokenizer, [{"messages": messages}])
    assert sample.reason is None
    assert "<image>" in tokenizer.decode(sample.tokens)
    assert "pixel_values" not in sample.fields
