"""Random chats with images of random sizes and modes, as rows of data and as a processor of transformers reads them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

MODES = ("RGB", "L", "RGBA", "P", "LA", "CMYK", "1")
_WORDS = ["what", "is", "this?", "a", "thing,", "the", "quick", "brown", "fox\n", "jumps", "over", "😀", "größe", "<b>"]
_SPECIAL = ["<|im_end|>", "<end_of_turn>", "<|image_pad|>", "<start_of_image>", "<IMG_CONTEXT>"]


def image_file(folder: Path, draw: np.random.Generator, number: int) -> Path:
    """Write an image of a random size, mode and orientation."""
    height, width = (int(side) for side in draw.integers(5, 200, 2))
    pixels = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
    mode = MODES[int(draw.integers(len(MODES)))]
    suffix = "jpg" if mode in ("RGB", "L", "CMYK") and draw.random() < 0.5 else "tif" if mode == "CMYK" else "png"
    exif = Image.Exif()
    if suffix == "jpg":
        exif[0x0112] = int(draw.integers(1, 9))
    path = folder / f"{number}.{suffix}"
    options: dict[str, Any] = {"exif": exif} if suffix == "jpg" else {}
    Image.fromarray(pixels).convert(mode).save(path, **options)
    return path


def random_chat(folder: Path, seed: int) -> tuple[list[dict[str, Any]], list[str]]:
    """A chat of one to three turns, with up to three images in its questions; and the paths of its images.

    Texts of odd seeds may have the text of a special token.
    """
    draw = np.random.default_rng(seed)
    images = [str(image_file(folder, draw, 100 * seed + at)) for at in range(int(draw.integers(4)))]
    turns = int(draw.integers(1, 4))
    of_turn = draw.integers(0, turns, len(images))
    messages: list[dict[str, Any]] = []
    order: list[str] = []
    for turn in range(turns):
        parts: list[dict[str, Any]] = [{"type": "text", "text": _text(draw, seed)}]
        for path in (path for path, number in zip(images, of_turn, strict=True) if number == turn):
            parts.insert(int(draw.integers(len(parts) + 1)), {"type": "image", "path": path})
        order += [part["path"] for part in parts if part["type"] == "image"]
        messages.append({"role": "user", "content": parts})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": _text(draw, seed)}]})
    return messages, order


def video_file(folder: Path, draw: np.random.Generator, number: int) -> Path:
    """Write a video of a random size, length and rate."""
    av: Any = import_module("av")
    height, width = (2 * int(side) for side in draw.integers(10, 60, 2))
    path = folder / f"{number}.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=int(draw.choice([1, 5, 8, 24, 30])))
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        first = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
        for at in range(int(draw.integers(2, 40))):
            frame = av.VideoFrame.from_ndarray(np.roll(first, 3 * at, axis=1), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def video_chat(folder: Path, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A chat of one turn with up to two images and one or two videos; and its images and videos, in order."""
    draw = np.random.default_rng(seed)
    media = [{"type": "video", "path": str(video_file(folder, draw, 100 * seed + at))} for at in range(1 + seed % 2)]
    media += [{"type": "image", "path": str(image_file(folder, draw, 100 * seed + 9 - at))} for at in range(seed % 3)]
    parts = [media[at] for at in draw.permutation(len(media))]
    parts.insert(int(draw.integers(len(parts) + 1)), {"type": "text", "text": _text(draw, 2 * seed)})
    answer = {"role": "assistant", "content": [{"type": "text", "text": _text(draw, 2 * seed)}]}
    return [{"role": "user", "content": parts}, answer], [part for part in parts if part["type"] != "text"]


def chat_for(family: str, folder: Path, seed: int) -> tuple[list[dict[str, Any]], list[str]]:
    """A random chat that the processor of a family reads: PaliGemma takes one question with images, and its answer."""
    messages, images = random_chat(folder, seed)
    if family != "paligemma":
        return messages, images
    images = images or [str(image_file(folder, np.random.default_rng(seed), 100 * seed))]
    parts: list[dict[str, Any]] = [{"type": "image", "path": path} for path in images]
    text = messages[0]["content"][-1] | {"type": "text", "text": "".join(map(text_of, messages[:1])) or "what?"}
    parts.insert(seed % len(parts), text)
    return [{"role": "user", "content": parts}, messages[1]], images


def text_of(message: dict[str, Any], image: str = "") -> str:
    """The text of a message, with ``image`` in the place of each image."""
    return "".join(part.get("text", image) for part in message["content"])


def processed(family: str, oracle: Any, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The inputs that a processor of transformers makes of a chat, as arrays."""
    if family != "paligemma":
        return dict(
            oracle.apply_chat_template(
                [messages], tokenize=True, return_dict=True, sanitize_control_tokens=True, return_tensors="np"
            )
        )
    paths = [part["path"] for part in messages[0]["content"] if part["type"] == "image"]
    images = [ImageOps.exif_transpose(Image.open(path)).convert("RGB") for path in paths]
    texts = {"text": [text_of(messages[0], "<image>")], "suffix": [text_of(messages[1])]}
    return dict(oracle(images=[images], **texts, return_tensors="np"))


def _text(draw: np.random.Generator, seed: int) -> str:
    """One to eight words."""
    words = [*_WORDS, *_SPECIAL] if seed % 2 else _WORDS
    return " ".join(draw.choice(words, int(draw.integers(1, 9))))
