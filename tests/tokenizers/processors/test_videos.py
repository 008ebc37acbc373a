"""Chats with videos become what the processor of Qwen3-VL makes of them, and bad videos are rejected in one line.

The video processor of transformers needs torchvision, which these tests do without. Its frames and sizes are recorded.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from streampack.core.media.references import Reference
from streampack.core.stats.sample_warnings import VIDEO_AT_OTHER_RATE
from streampack.errors import ConfigError
from streampack.media.processor import ProcessorDecoder
from streampack.sources.files.image_files import BadImage
from streampack.sources.files.video_files import frames_of, header_of
from streampack.tokenizers.processors.image_family import VideoSize
from streampack.tokenizers.processors.open_family import open_family
from tests.tokenizers.processors.processor_folders import CHATS, FOLDERS, folder_of, oracle_of, read, reader_of
from tests.tokenizers.processors.random_chats import image_file, video_chat, video_file

RECORDED: list[Any] = [
    ((341, 257, 205, 8.0), 12, 1224, [64, 64]), ((128, 24, 31, 1.0), 12, 180, [160, 32]),
    ((76, 326, 260, 60.0), 8, 1036, [32, 160]), ((205, 245, 388, 29.97), 12, 2322, [64, 64]),
    ((255, 221, 224, 60.0), 8, 1004, [96, 64]), ((116, 327, 269, 1.0), 12, 1608, [32, 96]),
    ((43, 346, 10, 24.0), 4, 18, [32, 352]), ((39, 125, 193, 23.976), 12, 1152, [32, 128]),
    ((166, 19, 4, 5.0), 4, 6, [288, 32]), ((11, 270, 211, 25.0), 12, 1260, [32, 352]),
    ((188, 398, 322, 60.0), 10, 1605, [32, 96]), ((337, 277, 282, 23.976), 12, 1686, [64, 64]),
    ((339, 213, 151, 8.0), 12, 900, [64, 32]), ((173, 198, 288, 60.0), 10, 1579, [64, 64]),
    ((306, 161, 132, 60.0), 4, 262, [160, 64]), ((111, 97, 286, 25.0), 12, 1710, [64, 64]),
]  # fmt: skip
"""Videos (height, width, frames, frames a second) in transformers 5.24 with torchvision 0.29.1: the number of sampled
frames, the sum of their places, and the sides of the scaled frames."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of("qwen3_vl", tmp_path_factory.mktemp("processors"))


def test_ids_grids_and_positions_of_videos_are_those_of_the_processor_and_the_model(
    folder: Path, tmp_path: Path
) -> None:
    torch: Any = import_module("torch")
    oracle, reader, rope = oracle_of(folder), reader_of(folder), FOLDERS["qwen3_vl"]["model"](folder)
    family, patch = open_family(folder), 16
    oracle.video_processor = SimpleNamespace(temporal_patch_size=2, merge_size=2)
    for seed in range(CHATS):
        messages, media = video_chat(tmp_path, seed)
        sample = read(reader, {"messages": messages})
        text = oracle.apply_chat_template([messages])[0]
        grids, of_videos = list[Any](), list[Any]()
        for part in media:
            if part["type"] == "image":
                grids.append(np.asarray(sample.fields["image_grid_thw"])[len(grids)])
                continue
            size = header_of(Path(part["path"]).read_bytes())
            frames = family.frames_of_video(size)
            grid = np.array([len(frames.places) // 2, frames.height // patch, frames.width // patch])
            grids.append(grid)
            of_videos.append(grid)
            metadata = SimpleNamespace(fps=size.fps, frames_indices=np.array(frames.places))
            inputs = {"video_grid_thw": [grid], "video_metadata": [metadata]}
            text = text.replace("<|video_pad|>", oracle.replace_video_token(inputs, 0).replace("pad", "PAD"), 1)
        images = [grid for grid, part in zip(grids, media, strict=True) if part["type"] == "image"]
        for grid in images:
            text = text.replace("<|image_pad|>", "<|image_PAD|>" * int(grid.prod() // 4), 1)
        expected = oracle.tokenizer(text.replace("PAD", "pad"), add_special_tokens=False)["input_ids"]
        assert sample.tokens.tolist() == expected
        assert np.array_equal(sample.fields["image_grid_thw"], grids)
        assert np.asarray(sample.fields["patches"]).tolist() == [int(grid.prod()) for grid in grids]
        ids = torch.tensor(sample.tokens)[None]
        image, video = oracle.image_token_id, oracle.video_token_id
        positions, _ = rope(
            ids, (ids == image).int() + 2 * (ids == video).int(),
            image_grid_thw=torch.tensor(np.array(images)) if images else None,
            video_grid_thw=torch.tensor(np.array(of_videos)),
        )  # fmt: skip
        assert np.array_equal(sample.fields["position_ids"], positions[:, 0].T)
        assert not np.asarray(sample.fields["loss_mask"])[(sample.tokens == image) | (sample.tokens == video)].any()


def test_frames_and_sizes_are_those_of_the_video_processor(folder: Path) -> None:
    family = open_family(folder)
    for size, count, total, sides in RECORDED:
        frames = family.frames_of_video(VideoSize(*size))
        assert (len(frames.places), sum(frames.places), [frames.height, frames.width]) == (count, total, sides), size


def test_pixels_of_a_video_are_those_of_the_image_processor_for_each_frame(folder: Path, tmp_path: Path) -> None:
    path = video_file(tmp_path, np.random.default_rng(3), 0)
    data, decode = path.read_bytes(), ProcessorDecoder(folder)
    size, transformers = header_of(data), import_module("transformers")
    sampled = open_family(folder).frames_of_video(size)
    pixels = decode(data, Reference(str(path)))
    assert pixels.shape == (len(sampled.places) // 2 * sampled.height * sampled.width // 256, 3 * 2 * 256)
    plain = transformers.AutoImageProcessor.from_pretrained(
        folder, image_mean=[0.5] * 3, image_std=[0.5] * 3, do_resize=False
    )
    frames = [
        Image.fromarray(frame).resize((sampled.width, sampled.height), Image.Resampling.BICUBIC)
        for frame in frames_of(data, size, sampled.places)
    ]
    alone = [plain(images=[frame], return_tensors="np")["pixel_values"].reshape(-1, 3, 2, 256) for frame in frames]
    pairs = [np.stack([one[:, :, 0], two[:, :, 1]], axis=2) for one, two in zip(alone[::2], alone[1::2], strict=True)]
    np.testing.assert_array_equal(pixels, np.concatenate(pairs).reshape(pixels.shape))


def test_a_video_of_fewer_frames_than_the_rate_asks_for_has_a_warning(folder: Path, tmp_path: Path) -> None:
    av: Any = import_module("av")
    for name, rate, frames in (("slow.mp4", 1, 8), ("fast.mp4", 8, 8)):
        with av.open(str(tmp_path / name), "w") as container:
            stream = container.add_stream("mpeg4", rate=rate)
            stream.height, stream.width, stream.pix_fmt = 32, 64, "yuv420p"
            for _ in range(frames):
                frame = av.VideoFrame.from_ndarray(np.zeros((32, 64, 3), np.uint8), format="rgb24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
    reader = reader_of(folder)
    slow, fast = (read(reader, chat_of(str(tmp_path / name))) for name in ("slow.mp4", "fast.mp4"))
    assert slow.warnings == (VIDEO_AT_OTHER_RATE,)
    assert fast.warnings == ()
    assert np.asarray(slow.fields["image_grid_thw"])[0, 0] == 4
    assert np.asarray(fast.fields["image_grid_thw"])[0, 0] == 2  # no fewer frames than `min_frames`


def chat_of(path: str) -> dict[str, Any]:
    """A chat with a mark, and a list of one video."""
    return {"messages": [{"role": "user", "content": "<video>what?"}, {"role": "assistant", "content": "a"}],
            "videos": [path]}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "reason", "said"),
    [
        ("missing.mp4", "video_missing", "video 0 .*missing.mp4.*No such file"),
        ("text.mp4", "video_unreadable", "no video that PyAV knows, or end too early"),
        ("short.mp4", "video_unreadable", "no video that PyAV knows, or end too early"),
        ("empty.mp4", "video_unreadable|video_frames", "no frames|0 frames|end too early"),
        ("one.mp4", "video_size", "samples 1 of its 1 frames, and needs 2"),
        ("a.mkv", "video_frames", "says 0 frames"),
    ],
)
def test_videos_that_cannot_be_used_are_rejected_with_a_reason(
    folder: Path, tmp_path: Path, name: str, reason: str, said: str
) -> None:
    av: Any = import_module("av")
    (tmp_path / "text.mp4").write_text("no video")
    whole = video_file(tmp_path, np.random.default_rng(0), 0)
    (tmp_path / "short.mp4").write_bytes(whole.read_bytes()[:-200])
    for other, frames in (("one.mp4", 1), ("empty.mp4", 0), ("a.mkv", 5)):
        with av.open(str(tmp_path / other), "w") as container:
            stream = container.add_stream("mpeg4", rate=8)
            stream.height, stream.width, stream.pix_fmt = 32, 32, "yuv420p"
            container.start_encoding()
            for _ in range(frames):
                frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
    rejected: Any = reader_of(folder)(chat_of(str(tmp_path / name)))
    assert re.fullmatch(reason, rejected), (rejected, rejected.why)
    assert re.search(said, rejected.why), rejected.why
    assert "\n" not in rejected.why


def test_damaged_headers_reject_a_video_whatever_error_pyav_has_for_them(folder: Path, tmp_path: Path) -> None:
    """PyAV raises errors of many classes, also EOFError and MemoryError; no damage is a failure of the store."""
    whole, reader = video_file(tmp_path, np.random.default_rng(0), 0).read_bytes(), reader_of(folder)
    moov, draw, reasons = whole.index(b"moov"), np.random.default_rng(1), set[str]()
    damaged = [whole[:length] for length in range(moov, len(whole), 19)]
    for _ in range(200):
        flipped = np.frombuffer(whole, np.uint8).copy()
        flipped[draw.integers(moov, len(whole), 3)] = draw.integers(0, 256, 3)
        damaged.append(flipped.tobytes())
    for data in damaged:
        row = {**chat_of(""), "videos": [data]}
        if isinstance(rejected := reader(row), str):
            reasons.add(str(rejected))
    assert reasons >= {"video_unreadable", "video_frames"}


def test_a_video_whose_tags_are_no_utf_8_is_read(folder: Path, tmp_path: Path) -> None:
    av: Any = import_module("av")
    path = tmp_path / "tags.mp4"
    with av.open(str(path), "w") as container:
        container.metadata["title"] = "TITLE"
        stream = container.add_stream("mpeg4", rate=8)
        stream.height, stream.width, stream.pix_fmt = 32, 32, "yuv420p"
        for _ in range(8):
            frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    data = path.read_bytes().replace(b"TITLE", b"T\xefTLE")
    path.write_bytes(data)
    sample = read(reader_of(folder), chat_of(str(path)))
    pixels = ProcessorDecoder(folder)(data, Reference(str(path)))
    assert len(pixels) == np.asarray(sample.fields["patches"]).sum()


def test_counts_of_videos_other_processors_and_a_missing_av_are_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(video_file(tmp_path, np.random.default_rng(0), 0))
    row, reader = chat_of(path), reader_of(folder)
    rejected: Any = reader({**row, "videos": [path, path]})
    assert (rejected, rejected.why) == (
        "video_count", "the row has 2 videos, and 1 places for videos in its messages"
    )  # fmt: skip
    rejected = reader_of(folder_of("gemma3", tmp_path / "gemma3"))(row)
    assert (rejected, rejected.why) == (
        "video_family",
        "Gemma3 reads no videos here. Processors that do: Qwen3VLProcessor",
    )
    other = video_file(tmp_path, np.random.default_rng(1), 1)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigError, match=r"videos need PyAV.*pip install av"):
        reader(chat_of(str(other)))


def test_a_video_that_ends_before_its_header_says_is_an_error_of_the_decoder(folder: Path, tmp_path: Path) -> None:
    data = bytearray(video_file(tmp_path, np.random.default_rng(0), 0).read_bytes())
    begin = data.index(b"mdat") + 4
    data[begin + 400 : data.index(b"moov") - 4] = bytes(data.index(b"moov") - 4 - begin - 400)
    with pytest.raises(ValueError, match=r"ends before frame \d+ of \d+|cannot be decoded"):
        ProcessorDecoder(folder)(bytes(data), Reference("a.mp4"))


@pytest.mark.parametrize("has_av", [True, False])
def test_a_damaged_image_is_named_an_image_and_a_video_without_pyav_is_an_error_of_the_machine(
    folder: Path, tmp_path: Path, has_av: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, video = ProcessorDecoder(folder), video_file(tmp_path, np.random.default_rng(0), 0).read_bytes()
    image = image_file(tmp_path, np.random.default_rng(6), 0).read_bytes()
    if not has_av:
        monkeypatch.setitem(sys.modules, "av", None)
    for damaged in (b"<html>not found</html>", image[:20]):
        with pytest.raises(BadImage) as bad:
            decode(damaged, Reference("a.png"))
        assert bad.value.reason == "image_unreadable"
    with pytest.raises(BadImage if has_av else ConfigError, match="PyAV"):
        decode(video[:-300], Reference("a.mp4"))
