"""Positions of samples with images: those on the page are the model's, and missing ones are refused, never made up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import streampack
from streampack.errors import SampleError
from tests.docs.pages import BLOCKS
from tests.integration.running import RunningBroker, running_broker, until

(CONFIG,) = [yaml.safe_load(each.code) for each in BLOCKS if each.code.startswith("# broker.yaml\nrun: vlm\n")]
IMAGE, START, END, VIDEO = 151655, 151652, 151653, 151656
TEXT: dict[str, Any] = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}


def code_with(text: str) -> str:
    (found,) = [each.code for each in BLOCKS if each.language == "python" and text in each.code]
    return found


def positions_of_model(ids: list[int], grid: Any) -> list[list[int]]:
    """What Qwen2-VL itself computes, [T, 3]."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    config = Qwen2VLConfig(
        text_config={"vocab_size": 151657, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
                     "num_attention_heads": 1, "num_key_value_heads": 1},
        vision_config={"depth": 1, "embed_dim": 8, "hidden_size": 8, "num_heads": 1, "spatial_merge_size": 2},
        image_token_id=IMAGE, vision_start_token_id=START, vision_end_token_id=END, video_token_id=VIDEO,
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = Qwen2VLForConditionalGeneration(config)
    rows = torch.tensor([ids])
    places, _ = model.model.get_rope_index(rows, (rows == IMAGE).int(), torch.tensor(grid), None, torch.ones_like(rows))
    found: list[list[int]] = places[:, 0].T.tolist()
    return found


def test_the_samples_of_the_page_have_the_positions_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code_with("webdataset.TarWriter"), "vision.md", "exec"), names)
    rows = [names["row"]]
    block = code_with("chats.send(sample)")
    exec(compile(block[: block.index("with streampack.Producer")], "vision.md", "exec"), names)
    rows.append(names["sample"])
    for row in rows:
        assert row["position_ids"] == positions_of_model(row["input_ids"], row["image_grid_thw"])


def pushed(broker: RunningBroker, *samples: dict[str, Any]) -> list[Any]:
    with streampack.Producer(broker.producers, stream="chats") as chats:
        for sample in samples:
            chats.send(sample)
        chats.close(end=True)
    with streampack.connect(broker.trainers, format="numpy") as loader:
        return [pack for pack in loader if pack.num_samples]


def in_memory(*samples: dict[str, Any], position_ids: dict[str, Any] | None = None, **more: Any) -> list[Any]:
    fields = CONFIG["fields"] | ({} if position_ids is None else {"position_ids": position_ids})
    with streampack.local(list(samples), budget=64, format="numpy", fields=fields, shuffle=False, **more) as loader:
        return [pack for pack in loader if pack.num_samples]


def page_sample() -> dict[str, Any]:
    names: dict[str, Any] = {}
    block = code_with("chats.send(sample)")
    exec(compile(block[: block.index("with streampack.Producer")], "vision.md", "exec"), names)
    found: dict[str, Any] = names["sample"]
    return found


def test_texts_beside_images_need_no_positions() -> None:
    (pack,) = in_memory(page_sample(), TEXT)
    expected = [*np.transpose(page_sample()["position_ids"]).T.tolist(), *[[i] * 3 for i in range(3)]]
    assert pack.position_ids.T[: len(expected)].tolist() == expected


def refused(call: Callable[[], Any]) -> None:
    with pytest.raises(SampleError, match=r"without position_ids, which the run declares with shape \[3\].*get_rope"):
        call()


def test_an_image_without_positions_is_refused_with_what_to_write(tmp_path: Path) -> None:
    bare = {name: value for name, value in page_sample().items() if name != "position_ids"}
    refused(lambda: in_memory(TEXT, bare))
    refused(lambda: in_memory(bare, position_ids={"dtype": "int32", "shape": [3], "default": 0}))
    with running_broker(CONFIG | {"state_dir": str(tmp_path / "state"), "memory": "256MiB"}) as broker:
        refused(lambda: pushed(broker, bare))


def test_an_image_without_positions_is_dropped_and_counted_where_the_policy_says_so(tmp_path: Path) -> None:
    bare = {name: value for name, value in page_sample().items() if name != "position_ids"}
    (pack,) = in_memory(bare, page_sample(), TEXT, poison="drop")
    assert pack.sample_ids[:, 1].tolist() == [1, 2], "it keeps its place"
    config = CONFIG | {"state_dir": str(tmp_path / "state"), "memory": "256MiB"}
    config = config | {"rules": config["rules"] | {"poison": "drop"}}
    with running_broker(config) as broker:
        (pack,) = pushed(broker, bare, page_sample())
        assert pack.sample_ids[:, 1].tolist() == [1]
        until(lambda: broker.status()["streams"][0]["rejected"] == {"position_ids: missing": 1})


def test_models_of_one_position_need_none_for_images() -> None:
    bare = {name: value for name, value in page_sample().items() if name != "position_ids"}
    (pack,) = in_memory(bare, position_ids={"dtype": "int32"})
    assert pack.position_ids[:6].tolist() == [0, 1, 2, 3, 4, 5]
