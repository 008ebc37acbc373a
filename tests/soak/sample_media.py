"""Media of the samples of a run: a function of the run's seed and of a sample's tokens, so that any change shows.

An item refers to a file in the folder ``images``, and its patches are also sent inline. Some samples have no items, and
some have more items than a pack may hold.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from streampack.core.intake.overlong import Pieces, drop_some
from streampack.core.media.media_format import encode
from streampack.core.media.references import Reference
from streampack.core.model.rules import Rules

FIELDS: dict[str, Any] = {
    "grid": {"dtype": "int32", "axis": "item", "shape": [2]},
    "image": {"dtype": "reference", "axis": "item"},
    "pixels": {"dtype": "uint8", "axis": "patch", "shape": [4]},
}
LIMITS = {"patches": 24, "items": 8}
ARRAYS = ("grid", "image", "pixels", "cu_items", "cu_patches")
NUM_IMAGES, WIDTH = 64, 8


class SampleMedia(NamedTuple):
    """The media of one sample: the numbers of its images, and the values of the other fields."""

    images: list[int]
    patches: list[int]
    grid: NDArray[np.int32]
    pixels: NDArray[np.uint8]


def image(seed: int, number: int) -> NDArray[np.uint8]:
    """An image of up to six patches, [patches, WIDTH]."""
    draw = np.random.default_rng([seed, number])
    return draw.integers(0, 256, (int(draw.integers(1, 7)), WIDTH), np.uint8)


def write_images(seed: int, folder: Path) -> None:
    """Write the images that samples refer to."""
    (folder / "images").mkdir()
    for number in range(NUM_IMAGES):
        (folder / "images" / str(number)).write_bytes(image(seed, number).tobytes())


def media_of(seed: int, tokens: Sequence[int]) -> SampleMedia:
    """Return the media of a sample with these tokens; a sample without tokens has none."""
    draw = random.Random(f"{seed} media {list(tokens)}")
    chance = draw.random() if len(tokens) else 0.0
    count = 0 if chance < 0.4 else draw.randint(1, 3) if chance < 0.96 else 9
    images = [draw.randrange(NUM_IMAGES) for _ in range(count)]
    patches = [len(image(seed, each)) for each in images]
    grid = np.array([draw.randint(0, 1 << 30) for _ in range(2 * count)], np.int32).reshape(-1, 2)
    pixels = np.frombuffer(draw.randbytes(4 * sum(patches)), np.uint8).reshape(-1, 4)
    return SampleMedia(images, patches, grid, pixels)


def _references(seed: int, folder: Path, media: SampleMedia) -> list[Reference]:
    data = [(each, image(seed, each).tobytes()) for each in media.images]
    return [Reference(str(folder / "images" / str(n)), size=len(one), crc32c=crc32c(one)) for n, one in data]


def given(seed: int, folder: Path, tokens: Sequence[int]) -> dict[str, Any]:
    """Return the values with which a sample is sent, or written to a file; none for a sample without media."""
    media = media_of(seed, tokens)
    if not media.images:
        return {}
    references = [
        {"uri": each.uri, "size": each.size, "crc32c": each.crc32c} for each in _references(seed, folder, media)
    ]
    return {
        "grid": media.grid.tolist(), "image": references, "pixels": media.pixels.tolist(), "patches": media.patches,
    }  # fmt: skip


def sample_crc(rules: Rules, seed: int, folder: Path, tokens: NDArray[Any]) -> int:
    """Return the checksum of a sample with its media."""
    media = media_of(seed, tokens.tolist())
    references = np.empty(len(media.images), object)
    references[:] = [each.encode() for each in _references(seed, folder, media)]
    values = {"grid": media.grid, "image": references, "pixels": media.pixels}
    data = encode(rules.media_fields, np.array(media.patches), values)
    counts = np.array([len(media.images), len(data)], "<u4").tobytes()
    return int(crc32c(data, crc32c(counts, crc32c(tokens.tobytes()))))


def drop_unfit(rules: Rules, pieces: Pieces, media: list[SampleMedia], samples: list[NDArray[Any]]) -> Pieces:
    """Return the pieces of samples without those that are dropped for their media: no pack holds them, or they are cut.

    Args:
        rules: The rules of the run.
        pieces: The pieces of the samples, by the policy for overlong ones.
        media: The media of each sample.
        samples: The tokens of each sample.
    """

    def is_unfit(each: SampleMedia, num_tokens: int) -> bool:
        over = len(each.images) > LIMITS["items"] or sum(each.patches) > LIMITS["patches"]
        return bool(each.images) and (over or num_tokens > rules.budget)

    pairs = zip(media, samples, strict=True)
    return drop_some(pieces, np.array([is_unfit(each, len(tokens)) for each, tokens in pairs], np.bool_))


def of_pack(seed: int, media: list[SampleMedia]) -> dict[str, NDArray[Any]]:
    """Return the arrays of a pack with these samples; without images there is no array of images."""
    patches = [count for each in media for count in each.patches]
    images = [image(seed, number) for each in media for number in each.images]
    return {
        "grid": np.concatenate([np.zeros((0, 2), np.int32), *(each.grid for each in media)]),
        "pixels": np.concatenate([np.zeros((0, 4), np.uint8), *(each.pixels for each in media)]),
        "cu_items": np.cumsum([0, *(len(each.images) for each in media)]).astype(np.int32),
        "cu_patches": np.cumsum([0, *patches]).astype(np.int32),
        **({"image": np.concatenate(images)} if images else {}),
    }


def decode(data: bytes, reference: Reference) -> NDArray[np.uint8]:
    """Return the patches of an image, as a trainer reads its file."""
    return np.frombuffer(data, np.uint8).reshape(-1, WIDTH)
