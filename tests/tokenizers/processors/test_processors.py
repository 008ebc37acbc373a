"""Chats with images become what the processors of transformers make of them."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streampack.core.media.references import Reference
from streampack.media.processor import ProcessorDecoder
from tests.tokenizers.processors.processor_folders import (
    CHATS,
    FOLDERS,
    folder_of,
    oracle_of,
    read,
    reader_of,
    training_template,
)
from tests.tokenizers.processors.random_chats import chat_for, processed, random_chat


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processors")


@cache
def folder_in(family: str, folder: Path) -> Path:
    return folder_of(family, folder / family)


def pixels_of(family: str, values: Any, own: list[Any]) -> Any:
    """The pixels of all images, one after another: LLaVA-NeXT pads images to the tiles of the largest one."""
    if family != "llava_next":
        return values
    return np.concatenate([rows[: len(expected)] for rows, expected in zip(values, own, strict=True)])


@pytest.mark.parametrize("family", FOLDERS)
def test_ids_masks_grids_and_pixels_are_those_of_the_processor(family: str, folder: Path) -> None:
    place = folder_in(family, folder)
    oracle, reader, decode = oracle_of(place), reader_of(place), ProcessorDecoder(place)
    # The processor of InternVL takes the text of its token in the data for an image. transformers encodes such a text
    # apart from the line ends before it, which Gemma 3 writes after an image.
    for seed in range(0, CHATS, 1 if "qwen" in family else 2):
        messages, paths = chat_for(family, folder, seed)
        sample = read(reader, {"messages": messages})
        plain = processed(family, oracle, messages)
        assert sample.tokens.tolist() == plain["input_ids"][0].tolist()
        if family == "paligemma":
            assert sample.fields["loss_mask"].tolist() == plain["token_type_ids"][0].tolist()
        elif not seed % 2:  # the mask of transformers does not go with special tokens in the data
            masked = oracle.apply_chat_template(
                [messages], chat_template=training_template(family), tokenize=True, return_dict=True,
                return_assistant_tokens_mask=True,
            )  # fmt: skip
            learned = np.array(masked["assistant_masks"][0])
            spaces = [oracle.tokenizer.decode([token]).isspace() for token in sample.tokens]
            ends = np.isin(
                sample.tokens, oracle.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<end_of_turn>", "</s>"])
            )
            learned[1:][ends[:-1] & np.array(spaces[1:])] = 0  # white space after the end of an answer
            assert sample.fields["loss_mask"].tolist() == learned.tolist()
        if not paths:
            assert "pixel_values" not in sample.fields
            continue
        references: Any = sample.fields["pixel_values"]
        assert [reference.uri for reference in references] == paths
        pixels = [decode(Path(path).read_bytes(), Reference(path)) for path in paths]
        assert [len(rows) for rows in pixels] == np.asarray(sample.fields["patches"]).tolist()
        np.testing.assert_array_equal(np.concatenate(pixels), pixels_of(family, plain["pixel_values"], pixels))
        for name in sample.fields.keys() & plain.keys() - {"pixel_values", "position_ids"}:
            assert np.array_equal(sample.fields[name], plain[name][0] if name == "token_type_ids" else plain[name])


@pytest.mark.parametrize("family", [name for name, parts in FOLDERS.items() if "model" in parts])
def test_positions_are_those_of_the_model(family: str, folder: Path) -> None:
    torch: Any = import_module("torch")
    place = folder_in(family, folder)
    reader, rope = reader_of(place), FOLDERS[family]["model"](place)
    for seed in range(CHATS):
        messages, paths = random_chat(folder, seed)
        sample = read(reader, {"messages": messages})
        if paths:
            ids = torch.tensor(sample.tokens)[None]
            types = (ids == reader._tokenizer._image_ids[0]).int()  # type: ignore[attr-defined]
            expected, _ = rope(ids, types, image_grid_thw=torch.tensor(sample.fields["image_grid_thw"]))
            assert np.array_equal(sample.fields["position_ids"], expected[:, 0].T)
