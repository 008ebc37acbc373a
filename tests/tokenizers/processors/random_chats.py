"""Random chats with images of random sizes and modes, as rows of data and as a processor of transformers reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

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


def _text(draw: np.random.Generator, seed: int) -> str:
    """One to eight words."""
    words = [*_WORDS, *_SPECIAL] if seed % 2 else _WORDS
    return " ".join(draw.choice(words, int(draw.integers(1, 9))))
