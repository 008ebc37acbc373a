"""The size of an image from its first bytes, and the images that are not used.

Theory of operation. Pillow opens an image lazily: it reads the header, and no pixels. It reads through a file that
fetches 64 KiB at a time. A producer learns the size this way (``size_of``), and a client decodes all bytes later
(``decoded``). Both turn an image as its EXIF orientation says, and both refuse the same images. So a decoded image has
the size that the producer has announced.

The pixels of an image are not read here, so a damaged image may have a good header. The client raises for it.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from streampack.core.media.references import Reference
from streampack.errors import ConfigError, SourceError
from streampack.sources.files.read_bytes import WrongBytes, length_of, read_range
from streampack.sources.files.retries import Retries, kind_of, status_of, text_of

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 89_478_485
"""Pixels of an image, width times height. Pillow warns of a larger one: it may be a decompression bomb."""
_BLOCK_BYTES = 1 << 16
_ORIENTATION, _SIDEWAYS = 0x0112, (5, 6, 7, 8)
_KNOWN_SIZES = 1 << 16
_Header = TypeVar("_Header")


class ImageSize(NamedTuple):
    """Height and width of an upright image, in pixels."""

    height: int
    width: int


class BadImage(ValueError):
    """An image that cannot be used, for the reason ``reason``, one word; the message has the details."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def size_of(reference: Reference) -> ImageSize:
    """Return the size of the upright image that a reference names, from its first bytes.

    Raises:
        BadImage: There is no such image, or it cannot be used.
        SourceError: The bytes cannot be read, but perhaps later.
        ConfigError: A package is not installed.
    """
    return _size_of(reference) if reference.is_inline else _size_at(reference)


def decoded(data: bytes) -> Image:
    """Return the upright RGB image of all its bytes. Raises BadImage, or an error of Pillow for damaged bytes."""
    image = _opened(io.BytesIO(data))
    size = _checked(image)
    upright = _pillow("ImageOps").exif_transpose(image)
    rgb: Image = upright.convert("RGB")
    if (rgb.height, rgb.width) != size:
        raise BadImage(
            "image_unreadable", f"its header says {size.width} x {size.height}, its pixels {rgb.width} x {rgb.height}"
        )
    return rgb


def as_image(pixels: Any) -> Image:
    """Return an image of pixels [height, width, 3] in RGB."""
    image: Image = _pillow("Image").fromarray(pixels)
    return image


@lru_cache(maxsize=_KNOWN_SIZES)
def _size_at(reference: Reference) -> ImageSize:
    """Return the size of an image that is not in the reference itself."""
    return _size_of(reference)


def _size_of(reference: Reference) -> ImageSize:
    """Return the size of an image."""
    return read_header(reference, "image", lambda file: _checked(_opened(file)))


def read_header(reference: Reference, kind: str, read: Callable[[Any], _Header]) -> _Header:
    """Return what ``read`` returns for the open file of a reference, and try again after failures of a store.

    ``kind``: ``image`` or ``video``, for the reason of a BadImage. Raises SourceError if the store goes on failing.
    """
    retries = Retries(reference.shown)
    while True:
        try:
            try:
                return read(io.BufferedReader(_Bytes(reference), _BLOCK_BYTES))
            except _Failed as failed:
                raise failed.cause from None
        except (BadImage, ConfigError, MemoryError):
            raise
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            if kind_of(error) == "final" or status_of(error) is None:
                text = error.strerror or text_of(error)
                raise BadImage(f"{kind}_missing", f"{text}. Correct the path, or set image_folder") from error
            failure: Exception = error
        except WrongBytes as error:
            raise BadImage(f"{kind}_unreadable", str(error)) from error
        except Exception as error:  # each file system of fsspec has its own
            failure = error
        if not retries.again(failure):
            raise SourceError(
                f"{reference.shown}: the {kind} cannot be read: {text_of(failure)}. Check the store or the file"
            ) from failure


def _opened(file: Any) -> Image:
    """Return an image whose header is read. Raises BadImage, and errors of the file as they are."""
    try:
        image: Image = _pillow("Image").open(file)
    except _Failed as failed:
        raise failed.cause from None
    except ConfigError:
        raise
    except Warning as warning:  # where warnings are errors: the image has too many pixels
        raise BadImage("image_too_large", str(warning)) from None
    except Exception as error:
        name, text = type(error).__name__, " ".join(str(error).split())[:200]
        if name == "DecompressionBombError":
            raise BadImage("image_too_large", text) from None
        text = (
            "the bytes are no image that Pillow knows, or end too early" if name == "UnidentifiedImageError" else text
        )
        raise BadImage("image_unreadable", text) from None
    return image


def _checked(image: Image) -> ImageSize:
    """Return the size of an upright image of which only the header is read. Raises BadImage."""
    width, height = image.size
    if width < 1 or height < 1:
        raise BadImage("image_unreadable", f"it has {width} x {height} pixels")
    if width * height > MOST_PIXELS:
        raise BadImage("image_too_large", f"it has {width} x {height} pixels, more than {MOST_PIXELS:,}")
    if image.mode.startswith(("I", "F")):
        raise BadImage("image_depth", f"its mode is {image.mode}, with more than 8 bits for each pixel")
    try:
        frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)  # MPO: a photo and its previews
        # Pillow would read all pixels of a PNG to look for EXIF data behind them.
        exif = _pillow("Image").Image.getexif(image)
    except _Failed as failed:
        raise failed.cause from None
    except Exception as error:
        raise BadImage("image_unreadable", " ".join(str(error).split())[:200]) from None
    if frames > 1:
        raise BadImage("image_animated", f"it has {frames} frames")
    # Pillow turns the size of a TIFF itself.
    sideways = image.format != "TIFF" and exif.get(_ORIENTATION) in _SIDEWAYS
    return ImageSize(width, height) if sideways else ImageSize(height, width)


class _Failed(Exception):
    """Reading the bytes has failed with ``cause``; Pillow would take some errors for a damaged image."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _Bytes(io.RawIOBase):
    """The bytes of a reference as a file that fetches what is read."""

    def __init__(self, reference: Reference) -> None:
        self._reference, self._place = reference, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes into ``buffer``, and return their number."""
        try:
            data = read_range(self._reference, self._place, len(buffer))
        except Exception as error:
            raise _Failed(error) from error
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)

    def seek(self, place: int, whence: int = io.SEEK_SET) -> int:
        """Move to ``place``, from the beginning, from here or from the end."""
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._place}
        try:
            self._place = place + (begin[whence] if whence in begin else length_of(self._reference))
        except Exception as error:
            raise _Failed(error) from error
        return self._place

    def tell(self) -> int:
        """Return the current place."""
        return self._place


def _pillow(module: str) -> Any:
    """Return a module of Pillow. Raises ConfigError."""
    try:
        return import_module(f"PIL.{module}")
    except ImportError as error:
        raise ConfigError(
            f"tokenizer.processor: images need Pillow, which cannot be imported ({error}). Run `pip install "
            "'streampack[images]'`"
        ) from error
