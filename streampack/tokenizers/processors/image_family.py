"""The interface of a family of processors: what the size of an image becomes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streampack.tokenizers.folder_files import FolderFiles
from streampack.tokenizers.token_ids import Tokens

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


class ProcessorFiles(NamedTuple):
    """The settings in a processor's folder.

    - ``image``: settings of the image processor. ``processor``: those of the processor itself.
    - ``folder``: names of special tokens.
    """

    image: Mapping[str, Any]
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
    - ``template``: chat template in place of the folder's; empty for the folder's own.
    - ``has_prefix``: True if the one answer of a chat is encoded apart from the text before it.
    """

    classes: ClassVar[tuple[str, ...]]
    options: Mapping[str, Any] = NO_OPTIONS
    placeholder: str
    token: str
    template: ClassVar[str] = ""
    has_prefix: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, files: ProcessorFiles) -> None:
        """Read the settings. Raises ConfigError for settings that the family does not know."""

    @abstractmethod
    def tokens_of(self, height: int, width: int) -> ImageTokens:
        """Return what an image of this size becomes. Raises ValueError for an image that the processor rejects."""

    def fields(self, token: int) -> dict[str, dict[str, Any]]:
        """Return the fields that a run declares, as in broker.yaml; ``token`` is the id of ``token``."""
        return {"loss_mask": {}, PIXELS: {"dtype": "reference", "axis": "item"}}

    def values_of(
        self, tokens: Tokens, token: int, images: Sequence[ImageTokens], learned: NDArray[np.uint8]
    ) -> dict[str, NDArray[Any]]:
        """Return the values of a sample's fields of axis ``token``, by name.

        ``tokens``: the ids of the sample. ``token``: the id of ``token``. ``images``: the images, in order.
        ``learned``: 1 for each token that is learned.
        """
        return {}
