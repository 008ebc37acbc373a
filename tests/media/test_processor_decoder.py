"""The decoder of a processor's folder, where transformers has other internals than the tried version."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoImageProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from streampack.core.media.references import Reference
from streampack.media import processor
from streampack.media.processor import ProcessorDecoder
from tests.tokenizers.processors.processor_folders import folder_of
from tests.tokenizers.processors.random_chats import video_file


@pytest.fixture
def image() -> bytes:
    data = io.BytesIO()
    Image.effect_noise((90, 60), 100).convert("RGB").save(data, "png")
    return data.getvalue()


class RenamedPil(Qwen2VLImageProcessorPil):
    """Normalizes with arguments of other names, and in a function of another name."""

    def normalize(self, image: Any, *, means: Any, stds: Any) -> Any:
        raise AssertionError

    def _preprocess(self, *images: Any, **options: Any) -> Any:
        return super()._preprocess(*images, **options | {"do_normalize": False})


class RelativePil(Qwen2VLImageProcessorPil):
    """Normalizes by the largest value of an image."""

    def normalize(self, image: Any, mean: Any, std: Any, **options: Any) -> Any:
        return image / image.max()


@pytest.mark.parametrize(("kind", "why"), [(RenamedPil, "TypeError"), (RelativePil, "values of a test image differ")])
def test_a_processor_with_other_internals_is_not_changed_and_one_warning_says_so(
    kind: Any, why: str, tmp_path: Path, image: bytes, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    folder = folder_of("qwen2_vl", tmp_path)
    monkeypatch.setattr(AutoImageProcessor, "from_pretrained", kind.from_pretrained)
    with caplog.at_level(logging.WARNING, "streampack.client"):
        decode = ProcessorDecoder(folder)
        values = decode(image, Reference("a.png"))
    assert len(caplog.records) == 1
    assert why in caplog.text
    expected = kind.from_pretrained(folder)(images=[Image.open(io.BytesIO(image))], return_tensors="np")["pixel_values"]
    np.testing.assert_array_equal(values, expected)


def test_frames_of_a_video_are_not_looked_up_where_the_table_of_images_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("av")
    folder, video = folder_of("qwen3_vl", tmp_path), video_file(tmp_path, np.random.default_rng(0), 0).read_bytes()
    monkeypatch.setattr(AutoImageProcessor, "from_pretrained", RelativePil.from_pretrained)
    values = ProcessorDecoder(folder)(video, Reference("a.mp4"))
    monkeypatch.setattr(processor, "_use_table", lambda _: None)
    np.testing.assert_array_equal(values, ProcessorDecoder(folder)(video, Reference("a.mp4")))
