"""Decodes images and videos as the processor of a folder does: with that of transformers, and its settings.

The image processor is the one that ``AutoProcessor`` of the folder has in this environment. It needs transformers and
Pillow, and torch if torchvision is installed.
"""

from __future__ import annotations

import logging
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.media.references import Reference
from streampack.errors import ConfigError, StreampackError, UserError
from streampack.sources.files.image_files import BadImage, as_image, decoded
from streampack.sources.files.video_files import begins_as_video, frames_of, header_of
from streampack.tokenizers.processors.image_family import PIXELS, VideoSize
from streampack.tokenizers.processors.open_family import open_family

log = logging.getLogger("streampack.client")
_TRIED = "5.24.0"
"""Version of transformers whose processors look pixel values up."""


class ProcessorDecoder:
    """The function from the bytes of an image to its pixel values [rows, ...].

    Raises UserError if the folder has no processor of a known family, or transformers cannot load it.
    """

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder).expanduser()
        try:
            self._family, self._path = open_family(path), str(path)
            self._options = dict(self._family.options)
            self._processor = import_module("transformers").AutoImageProcessor.from_pretrained(str(path))
        except ConfigError as error:
            raise UserError(str(error).replace("tokenizer.processor", "processor of Media", 1)) from None
        except StreampackError:
            raise
        except Exception as error:
            raise UserError(
                f"processor of Media: the image processor in {path} cannot be loaded ({type(error).__name__}: "
                f"{' '.join(str(error).split())[:300]}). Run `pip install 'streampack[hf,images]'`, or correct the "
                "folder"
            ) from error
        self._tensors = "np" if type(self._processor).__name__.endswith("Pil") else "pt"
        if self._tensors == "np" and self._processor.do_rescale and self._processor.do_normalize:
            self._use_table()

    def __call__(self, data: bytes, reference: Reference) -> NDArray[Any]:
        """Return the pixel values of an image, or of a video's frames."""
        try:
            image = decoded(data)
        except BadImage as bad:
            if not self._family.video_token or bad.reason != "image_unreadable":
                raise
            try:
                return self._of_video(data)
            except (BadImage, ConfigError) as other:  # a damaged image, whose error needs no PyAV
                raise (other if begins_as_video(data) else bad) from None
        return self._pixels(image)

    def _of_video(self, data: bytes) -> NDArray[Any]:
        """Return the pixel values of the frames of a video that the processor samples."""
        size = header_of(data)
        sampled = self._family.frames_of_video(size)
        frames = np.stack(frames_of(data, size, sampled.places))
        if self._tensors == "pt":
            values = self._videos(videos=[frames[: sampled.num_frames]], do_sample_frames=False, return_tensors="pt")
            return np.asarray(values["pixel_values_videos"])
        group, side = sampled.settings["temporal_patch_size"], sampled.settings["patch_size"]
        scaled = [self._scaled(frame, sampled.height, sampled.width) for frame in frames]
        rows = np.asarray(self._frames(images=scaled, input_data_format="channels_last", return_tensors="np")[PIXELS])
        # Each row of an image has `group` copies of its patch. A row of a video has the patches of `group` frames.
        rows = rows.reshape(len(frames) // group, group, -1, 3, group, side * side)
        return np.stack([rows[:, at, :, :, at] for at in range(group)], axis=-2).reshape(-1, 3 * group * side * side)

    def _scaled(self, frame: NDArray[Any], height: int, width: int) -> Any:
        """Return a frame of another size, scaled by the image processor."""
        return as_image(frame).resize((width, height), self._frames.resample)

    @cached_property
    def _frames(self) -> Any:
        """The image processor for scaled frames."""
        sampled = self._family.frames_of_video(VideoSize(64, 64, 64, 1.0))
        processor = import_module("transformers").AutoImageProcessor.from_pretrained(
            self._path, do_resize=False, **sampled.settings
        )
        if "rescale" in vars(self._processor):  # its own table gave the right values
            _use_table(processor)
        return processor

    @cached_property
    def _videos(self) -> Any:
        """The video processor of transformers."""
        return import_module("transformers").AutoVideoProcessor.from_pretrained(self._path)

    def _use_table(self) -> None:
        """Let the processor look its values up, unless that changes the values of a bright or a dark image."""
        ramp = np.arange(3 * 64 * 64).astype(np.uint8).reshape(64, 64, 3)
        images = ramp, ramp // 2  # a value may depend on the brightest color
        expected = [self._pixels(image) for image in images]
        try:
            _use_table(self._processor)
            if all(map(np.array_equal, map(self._pixels, images), expected)):
                return
            why = "the values of a test image differ"
        except Exception as error:  # whatever other internals raise
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        for name in ("rescale", "normalize"):
            vars(self._processor).pop(name, None)
        log.warning(
            "%s of transformers %s cannot look pixel values up (%s). It computes each pixel, which takes more CPU. "
            "transformers %s was tried",
            type(self._processor).__name__, import_module("transformers").__version__, why, _TRIED,
        )  # fmt: skip

    def _pixels(self, image: Any) -> NDArray[Any]:
        """Return the pixel values of a decoded image."""
        # Images of 1 or 3 pixels in height would pass for images whose first axis is that of colors.
        values = self._processor(
            images=[image], return_tensors=self._tensors, input_data_format="channels_last", **self._options
        )
        pixels = np.asarray(values[PIXELS])
        return pixels[0] if pixels.ndim == 5 else pixels  # tiles of one image


def _use_table(processor: Any) -> None:
    """Let a processor of numpy look its values up: a value depends on the color's byte and its channel alone.

    The table has what the processor itself makes of each byte, so values are the same to the bit. The processor would
    compute each pixel in float64 first.
    """
    rescale, normalize = processor.rescale, processor.normalize
    factor, mean, std = processor.rescale_factor, processor.image_mean, processor.image_std
    every_byte = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(16, 16), (3, 16, 16))
    table = np.ascontiguousarray(normalize(rescale(every_byte, factor), mean, std).reshape(3, 256))

    def rescaled(image: NDArray[Any], *arguments: Any, **options: Any) -> NDArray[Any]:
        """Leave bytes [3, height, width] to ``normalized``."""
        return image if _is_of_bytes(image) else rescale(image, *arguments, **options)

    def normalized(image: NDArray[Any], *arguments: Any, **options: Any) -> NDArray[Any]:
        """Return the values of bytes; others are normalized as before."""
        if not _is_of_bytes(image):
            return np.asarray(normalize(image, *arguments, **options))
        values = np.empty(image.shape, table.dtype)
        for channel, row in enumerate(table):
            np.take(row, image[channel], out=values[channel], mode="clip")
        return values

    processor.rescale, processor.normalize = rescaled, normalized


def _is_of_bytes(image: Any) -> bool:
    """Return True for bytes [3, height, width]."""
    return image.dtype == np.uint8 and image.ndim == 3 and len(image) == 3
