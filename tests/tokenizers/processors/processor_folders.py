"""Folders of processors, made of their classes' defaults, a small tokenizer, and the chat templates of TRL."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from streampack.config.stream_settings import FieldSettings
from streampack.config.typed_yaml import convert
from streampack.core.model.fields import Field
from streampack.sources.formats.rows import RowReader
from streampack.sources.records import Sample
from streampack.sources.settings import SourceSettings
from streampack.tokenizers.base import Tokenizer, TokenizerSettings
from streampack.tokenizers.open_tokenizer import open_tokenizer
from tests.tokenizers.trl_templates import source_of

QWEN_TOKENS = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
QWEN = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
INTERNVL = """{% for message in messages %}<|im_start|>{{ message['role'] + '\n' }}\
{% if message['role'] == 'assistant' %}{% generation %}{% for part in message['content'] %}{{ part['text'] }}\
{% endfor %}<|im_end|>{% endgeneration %}{{ '\n' }}{% else %}\
{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}\
{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>{{ '\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"""
SMALL = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64}


def _rope(kind: str, **sizes: Any) -> Callable[[Path], Any]:
    """Return a function that gives the ``get_rope_index`` of a small model."""

    def rope(folder: Path) -> Any:
        transformers: Any = import_module("transformers")
        config = getattr(transformers, f"{kind}Config")(
            vision_config={"spatial_merge_size": 2, "patch_size": 14, **sizes}
        )
        return partial(
            _model_class(kind).get_rope_index,
            SimpleNamespace(
                config=config, get_vision_position_ids=partial(_model_class(kind).get_vision_position_ids, None)
            ),
        )

    return rope


def _model_class(kind: str) -> Any:
    """Return the class of a model."""
    return getattr(import_module("transformers"), f"{kind}Model")


FOLDERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "processor": "Qwen2VLProcessor", "image": "Qwen2VLImageProcessorPil", "template": "qwen2_5_vl",
        "special": QWEN, "settings": {"size": SMALL}, "model": _rope("Qwen2VL"),
    },
    "qwen2_5_vl": {
        "processor": "Qwen2_5_VLProcessor", "image": "Qwen2VLImageProcessorPil", "template": "qwen2_5_vl",
        "special": QWEN, "settings": {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 32}, "model": _rope("Qwen2_5_VL"),
    },
    "qwen3_vl": {
        "processor": "Qwen3VLProcessor", "image": "Qwen2VLImageProcessorPil", "template": "qwen3_vl",
        "special": QWEN, "settings": {"size": {"shortest_edge": 4096, "longest_edge": 65536}, "patch_size": 16},
        "model": _rope("Qwen3VL", patch_size=16),
        "video": {
            "video_processor_type": "Qwen3VLVideoProcessor", "size": {"shortest_edge": 4096, "longest_edge": 65536},
            "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "max_frames": 12,
        },
    },
    "internvl": {
        "processor": "InternVLProcessor", "image": "GotOcr2ImageProcessorPil", "template": INTERNVL,
        "special": ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"],
        "named": {
            "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        "settings": {"size": {"height": 32, "width": 32}, "max_patches": 6}, "keys": {"image_seq_length": 4},
    },
    "gemma3": {
        "processor": "Gemma3Processor", "image": "Gemma3ImageProcessorPil", "template": "gemma3",
        "special": [
            "<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>",
            "<image_soft_token>",
        ],
        "bos": "<bos>", "eos": "<eos>",
        "named": {
            "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>",
        },
        "settings": {"size": {"height": 32, "width": 32}}, "keys": {"image_seq_length": 4},
    },
    "llava_next": {
        "processor": "LlavaNextProcessor", "image": "LlavaNextImageProcessorPil", "template": "llava_next",
        "special": ["<s>", "</s>", "<pad>", "<image>"], "bos": "<s>", "eos": "</s>",
        "named": {"image_token": "<image>"},
        "settings": {
            "size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32},
            "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]],
        },
        "keys": {"patch_size": 8, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
    },
    "paligemma": {
        "processor": "PaliGemmaProcessor", "image": "SiglipImageProcessorPil", "template": "",
        "special": ["<bos>", "<eos>", "<pad>", "<image>"], "bos": "<bos>", "eos": "<eos>",
        "named": {"image_token": "<image>"}, "settings": {"size": {"height": 32, "width": 32}, "image_seq_length": 4},
    },
}  # fmt: skip
CHATS = int(os.environ.get("EXAMPLES", "12"))
"""Random chats of each family."""
_TEXTS = ["system user assistant\n", "what is this? a thing, a quick brown fox jumps over the lazy dog\n\n"]


def folder_of(name: str, folder: Path) -> Path:
    """Write the folder of a processor, and return it."""
    parts = FOLDERS[name]
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=parts["special"],
        show_progress=False,
    )  # fmt: skip
    library.train_from_iterator(_TEXTS * 5, trainer)
    transformers: Any = import_module("transformers")
    named = parts.get("named", {})
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library,
        eos_token=parts.get("eos", "<|im_end|>"),
        bos_token=parts.get("bos"),
        pad_token=parts["special"][2],
        extra_special_tokens=named,
    )
    tokenizer.save_pretrained(folder)
    getattr(transformers, parts["image"])(**parts["settings"]).save_pretrained(folder)
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": parts["processor"], **parts.get("keys", {})})
    )
    if "video" in parts:
        (folder / "video_preprocessor_config.json").write_text(json.dumps(parts["video"]))
    if parts["template"]:
        (folder / "chat_template.jinja").write_text(_template(parts["template"]))
    return folder


def training_template(name: str) -> str:
    """The chat template that marks the answers of the assistant."""
    return _template(FOLDERS[name]["template"], "_training")


def _template(named: str, suffix: str = "") -> str:
    """A template of TRL with this name, or a template itself."""
    return named if "{" in named else source_of(named + suffix)


def oracle_of(folder: Path) -> Any:
    """The processor of transformers in a folder. Its video processor needs torchvision, and is left out."""
    transformers: Any = import_module("transformers")
    config = json.loads((folder / "processor_config.json").read_text())
    kind = getattr(transformers, config.pop("processor_class"))

    class Oracle(kind):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    image = transformers.AutoImageProcessor.from_pretrained(folder)
    template = folder / "chat_template.jinja"
    return Oracle(
        image_processor=image, tokenizer=tokenizer, chat_template=template.read_text() if template.exists() else None,
        **config,
    )  # fmt: skip


def given_fields(tokenizer: Tokenizer) -> list[Field]:
    """The fields that a run declares for the images of a tokenizer."""
    return [convert(dict(keys), FieldSettings, name).declared(name) for name, keys in tokenizer.image_fields.items()]


def reader_of(folder: Path, **settings: Any) -> RowReader:
    """Read rows with the fields that the family needs."""
    tokenizer = open_tokenizer(TokenizerSettings(processor=str(folder)))
    return RowReader(SourceSettings("python", path="rows", **settings), tokenizer, given_fields(tokenizer))


def read(reader: RowReader, row: dict[str, Any]) -> Sample:
    sample = reader(row)
    assert isinstance(sample, Sample), (sample, getattr(sample, "why", ""))
    return sample
