"""The size, the rate and the number of frames of a video from its header, and its frames.

PyAV reads both (``pip install av``). A producer reads the header, and a client decodes the frames that the processor
samples (``frames_of``). A header without the number of frames, as those of mkv files, cannot be sampled.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.media.references import Reference
from streampack.errors import ConfigError
from streampack.sources.files.image_files import MOST_PIXELS, BadImage, read_header
from streampack.tokenizers.processors.image_family import VideoSize

MOST_FRAMES = 1 << 20
"""Frames of a video: 9 hours at 30 frames a second."""

_BEGIN = re.compile(rb".{4}(ftyp|moov|mdat|wide|free|skip)|RIFF.{4}AVI ", re.DOTALL)
"""The first bytes of mp4, mov and avi files."""


def video_of(reference: Reference) -> VideoSize:
    """Return what the header of a video says.

    Raises:
        BadImage: There is no such video, or it cannot be used.
        SourceError: The bytes cannot be read, but perhaps later.
        ConfigError: PyAV is not installed.
    """
    return _video_of(reference) if reference.is_inline else _video_at(reference)


def _video_of(reference: Reference) -> VideoSize:
    """Return what the header of a video says."""
    return read_header(reference, "video", _header)


@lru_cache(maxsize=1 << 12)
def _video_at(reference: Reference) -> VideoSize:
    """Return what the header of a video says that is not in the reference itself."""
    return _video_of(reference)


def frames_of(data: bytes, size: VideoSize, places: Sequence[int]) -> list[NDArray[np.uint8]]:
    """Return frames of a video [height, width, 3], in RGB: those at ``places``, which rise, and may repeat.

    Raises BadImage for a video that ends before them.
    """
    frames = dict[int, NDArray[np.uint8]]()
    wanted = set(places)
    with _opened(io.BytesIO(data)) as container:
        try:
            for number, frame in enumerate(container.decode(video=0)):
                if number in wanted:
                    frames[number] = frame.to_ndarray(format="rgb24")
                if number >= places[-1]:
                    break
        except Exception as error:
            if not _is_of_data(error):
                raise
            raise BadImage("video_unreadable", f"frame {len(frames)} cannot be decoded ({_text(error)})") from None
    if len(frames) < len(wanted):
        raise BadImage("video_unreadable", f"it ends before frame {places[-1]} of {size.frames}, as its header says")
    return [frames[place] for place in places]


def header_of(data: bytes) -> VideoSize:
    """Return what the header of a video says, of all its bytes. Raises BadImage."""
    return _header(io.BytesIO(data))


def begins_as_video(data: bytes) -> bool:
    """Return True for bytes that begin as the usual videos do, whose header has the number of frames."""
    return _BEGIN.match(data) is not None


def _header(file: Any) -> VideoSize:
    """Return what the header of an open video says. Raises BadImage."""
    with _opened(file) as container:
        if not container.streams.video:
            raise BadImage("video_unreadable", "it has no frames, only sound")
        stream = container.streams.video[0]
        if stream.codec_context is None:
            raise BadImage("video_unreadable", "PyAV has no decoder for its frames")
        size = VideoSize(stream.height, stream.width, stream.frames, float(stream.average_rate or 0))
    if size.frames < 1 or size.fps <= 0:
        raise BadImage("video_frames", f"its header says {size.frames} frames, at {size.fps:g} a second")
    if size.frames > MOST_FRAMES:
        raise BadImage("video_frames", f"it has {size.frames:,} frames, more than {MOST_FRAMES:,}")
    if size.height < 1 or size.width < 1 or size.height * size.width > MOST_PIXELS:
        raise BadImage("video_unreadable", f"its frames have {size.width} x {size.height} pixels")
    return size


def _opened(file: Any) -> Any:
    """Return an open video. Raises BadImage, ConfigError, and errors of the file as they are."""
    try:
        av = import_module("av")
    except ImportError as error:
        raise ConfigError(
            f"tokenizer.processor: videos need PyAV, which cannot be imported ({error}). Run `pip install av`"
        ) from error
    try:
        return av.open(file, metadata_errors="replace")
    except Exception as error:
        if not _is_of_data(error):
            raise
        raise BadImage(
            "video_unreadable", f"the bytes are no video that PyAV knows, or end too early ({_text(error)})"
        ) from None


def _is_of_data(error: Exception) -> bool:
    """Return True for an error of PyAV, which damaged data cause; the file raises its own errors."""
    return isinstance(error, import_module("av").error.FFmpegError)


def _text(error: Exception) -> str:
    """Return the message of an error of PyAV on one line."""
    return str(getattr(error, "strerror", None) or error)[:200]
