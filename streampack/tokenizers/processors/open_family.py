"""Opens the family of a processor's folder, as Hugging Face writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from streampack.errors import ConfigError
from streampack.tokenizers.folder_files import FolderFiles, read_text
from streampack.tokenizers.processors.gemma3 import Gemma3
from streampack.tokenizers.processors.image_family import ImageFamily, ProcessorFiles
from streampack.tokenizers.processors.internvl import InternVL
from streampack.tokenizers.processors.llava_next import LlavaNext
from streampack.tokenizers.processors.paligemma import PaliGemma
from streampack.tokenizers.processors.qwen3_vl import Qwen3VL
from streampack.tokenizers.processors.qwen_vl import QwenVL

FAMILIES: tuple[type[ImageFamily], ...] = (QwenVL, Qwen3VL, InternVL, LlavaNext, Gemma3, PaliGemma)
_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
_VIDEO = "video_preprocessor_config.json"
_CLASS = "processor_class"


def open_family(folder: Path) -> ImageFamily:
    """Return the family of the processor in a folder. Raises ConfigError for a folder without one, or an unknown one.

    The class of the processor is in one of the files that ``save_pretrained`` writes. The settings of the image
    processor are in preprocessor_config.json, or in processor_config.json since transformers 5.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"tokenizer.processor: got {str(folder)!r}, which is no folder. Give the folder that `save_pretrained` of "
            "the processor has written, or that of the model"
        )
    processor, image, tokenizer, video = (_read(folder / name) for name in (*_FILES, _VIDEO))
    name = next((str(part[_CLASS]) for part in (processor, image, tokenizer) if part.get(_CLASS)), "")
    families = {name: family for family in FAMILIES for name in family.classes}
    if not name:
        raise ConfigError(
            f"tokenizer.processor: got the folder {folder}, but none of its files {', '.join(_FILES)} has the key "
            f"{_CLASS}. Give the folder that `save_pretrained` of the processor has written"
        )
    if name not in families:
        raise ConfigError(
            f"tokenizer.processor: got the processor {name} in {folder}, expected one of {', '.join(families)}. To add "
            "its family, write a file in streampack/tokenizers/processors/ as the docstring of that folder says. Or "
            "encode the samples in your program: docs/reference/media.md"
        )
    video = processor.get("video_processor") or video or image
    image = image | (processor.get("image_processor") or {})
    return families[name](ProcessorFiles(image, video, processor, FolderFiles(folder)))


def _read(path: Path) -> dict[str, Any]:
    """Return the contents of a JSON file; {} if there is none. Raises ConfigError."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except ValueError as error:
        raise ConfigError(f"tokenizer.processor: {path} is not valid JSON ({error}). Correct the file") from error
    if not isinstance(value, dict):
        raise ConfigError(f"tokenizer.processor: {path} is not a JSON object. Correct the file")
    return value
