"""The interface of a family of processors: what the size of an image becomes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streampack.tokenizers.folder_files import FolderFiles

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
PIXELS = "pixel_values"
"""The field of references to images, which becomes pixels at the client."""


class ImageTokens(NamedTuple):
    """Text, rows and values of one image.

    - ``text``: the text in the place of the template's placeholder. It has the family's ``token`` once for each number
      in ``repeats``, in place of that many.
    - ``rows``: rows of pixel values, which the processor makes of the image. They are the item's patches.
    - ``values``: values of fields of axis ``item`` by name.
    """

    text: str
    repeats: tuple[int, ...]
    rows: int
    values: Mapping[str, Any] = NO_OPTIONS


class VideoSize(NamedTuple):
    """Height and width of a video's frames, their number, and the frames of a second."""

    height: int
    width: int
    frames: int
    fps: float


class VideoFrames(NamedTuple):
    """The frames of a video that a processor samples.

    - ``places``: numbers of the frames, as many as ``temporal_patch_size`` divides; the last one may repeat.
    - ``num_frames``: number of the frames without those that repeat.
    - ``height``, ``width``: sides of the scaled frames.
    - ``settings``: settings of the image processor for frames: mean, deviation and sizes of patches.
    - ``at_other_rate``: True if the video gives fewer frames than the rate of the processor asks for.
    """

    places: list[int]
    num_frames: int
    height: int
    width: int
    settings: Mapping[str, Any]
    at_other_rate: bool


class ProcessorFiles(NamedTuple):
    """The settings in a processor's folder.

    - ``image``, ``video``: settings of the image processor and of the video processor.
    - ``processor``: those of the processor itself.
    - ``folder``: names of special tokens.
    """

    image: Mapping[str, Any]
    video: Mapping[str, Any]
    processor: Mapping[str, Any]
    folder: FolderFiles

    def number(self, key: str, default: int) -> int:
        """Return a setting of the image processor; ``default`` if the files leave it out."""
        value = self.image.get(key)
        return default if value is None else int(value)

    def token(self, key: str, default: str) -> str:
        """Return the text of a special token; ``default`` if the files do not name it."""
        return self.folder.token(key) or default


class ImageFamily(ABC):
    """A family of processors with the settings of one folder.

    - ``classes``: names of the processors' classes in transformers.
    - ``options``: arguments of the image processor that the processor passes on each call.
    - ``placeholder``: text that a chat template writes for an image.
    - ``token``: token that stands for a part of an image.
    - ``video_token``: placeholder of a video, and the token that stands for a part of it; empty if there are no videos.
    - ``template``: chat template in place of the folder's; empty for the folder's own.
    - ``has_prefix``: True if the one answer of a chat is encoded apart from the text before it.
    """

    classes: ClassVar[tuple[str, ...]]
    options: Mapping[str, Any] = NO_OPTIONS
    placeholder: str
    token: str
    video_token: str = ""
    template: ClassVar[str] = ""
    has_prefix: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, files: ProcessorFiles) -> None:
        """Read the settings. Raises ConfigError for settings that the family does not know."""

    @abstractmethod
    def tokens_of(self, height: int, width: int) -> ImageTokens:
        """Return what an image of this size becomes. Raises ValueError for an image that the processor rejects."""

    def tokens_of_video(self, video: VideoSize) -> ImageTokens:
        """Return what a video becomes. Raises ValueError for a video that the processor rejects."""
        raise NotImplementedError

    def frames_of_video(self, video: VideoSize) -> VideoFrames:
        """Return the frames of a video that the processor samples. Raises ValueError."""
        raise NotImplementedError

    def fields(self, tokens: list[int]) -> dict[str, dict[str, Any]]:
        """Return the fields that a run declares, as in broker.yaml.

        ``tokens``: the ids of ``token``, and of ``video_token`` if there is one.
        """
        return {"loss_mask": {}, PIXELS: {"dtype": "reference", "axis": "item"}}

    def values_of(
        self, is_image: NDArray[np.bool_], images: Sequence[ImageTokens], learned: NDArray[np.uint8]
    ) -> dict[str, NDArray[Any]]:
        """Return the values of a sample's fields of axis ``token``, by name.

        ``is_image``: True for each token of an image. ``images``: the images, in order. ``learned``: 1 for each token
        that is learned.
        """
        return {}
