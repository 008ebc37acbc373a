"""Decodes images as the processor of a folder does: with the image processor of transformers, and its settings.

The image processor is the one that ``AutoProcessor`` of the folder has in this environment. It needs transformers and
Pillow, and torch if torchvision is installed.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.media.references import Reference
from streampack.errors import ConfigError, StreampackError, UserError
from streampack.sources.files.image_files import decoded
from streampack.tokenizers.processors.image_family import PIXELS
from streampack.tokenizers.processors.open_family import open_family


class ProcessorDecoder:
    """The function from the bytes of an image to its pixel values [rows, ...].

    Raises UserError if the folder has no processor of a known family, or transformers cannot load it.
    """

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder).expanduser()
        try:
            self._options = dict(open_family(path).options)
            self._processor = import_module("transformers").AutoImageProcessor.from_pretrained(str(path))
        except ConfigError as error:
            raise UserError(str(error).replace("tokenizer.processor", "processor of Media", 1)) from None
        except StreampackError:
            raise
        except Exception as error:
            raise UserError(
                f"processor of Media: the image processor in {path} cannot be loaded ({type(error).__name__}: "
                f"{' '.join(str(error).split())[:300]}). Run `pip install 'streampack[hf]' pillow`, or correct the "
                "folder"
            ) from error
        self._tensors = "np" if type(self._processor).__name__.endswith("Pil") else "pt"

    def __call__(self, data: bytes, reference: Reference) -> NDArray[Any]:
        """Return the pixel values of an image."""
        image = decoded(data)
        # Images of 1 or 3 pixels in height would pass for images whose first axis is that of colors.
        values = self._processor(
            images=[image], return_tensors=self._tensors, input_data_format="channels_last", **self._options
        )
        return np.asarray(values[PIXELS])
