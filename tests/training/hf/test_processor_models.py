"""Packs of chats with images have the loss and the gradients of the chats alone, as the processor makes them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from streampack_services.daemons.producer import open_sources
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import streampack
from streampack.config.daemon_settings import ProducerConfig
from streampack.config.typed_yaml import convert
from streampack.core.media.references import Reference
from streampack.errors import UserError
from streampack.media.processor import ProcessorDecoder
from tests.docs.pages import ROOT
from tests.integration.running import producing_here, running_broker
from tests.tokenizers.processors.processor_folders import FOLDERS, folder_of, oracle_of
from tests.tokenizers.processors.random_chats import chat_for, processed, random_chat, video_chat
from tests.training.hf.processor_models import model_for
from tests.training.proofs.processes import on_ranks

CHATS = 7
PAGE = (ROOT / "docs/how-to/vision.md").read_text()


def of_page(kind: str) -> list[str]:
    """The code blocks of the page, for a model in a folder of the test, on the CPU."""
    blocks = re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)
    for text, other in (
        ("models/Qwen2-VL-2B-Instruct", "model"), (', dtype="bfloat16").cuda()', ")"), (', device="cuda"', ""),
        (", dtype=torch.bfloat16", ""), ("tcp://node0:7402", "ENDPOINT"),
    ):  # fmt: skip
        blocks = [block.replace(text, other) for block in blocks]
    return blocks


def loss_of(model: Any, labels: torch.Tensor, **inputs: Any) -> torch.Tensor:
    logits = model(**inputs).logits[0]
    return cross_entropy(logits[:-1], labels[0, 1:], reduction="sum")


@pytest.fixture
def only_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and eager attention of transformers compute in float32, which would round packs and samples differently."""
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda values, dim, dtype=None: softmax(values, dim))


@pytest.mark.usefixtures("only_float64")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FOLDERS)
def test_a_pack_is_its_chats_alone(family: str, attention: str, tmp_path: Path) -> None:
    folder = folder_of(family, tmp_path / family)
    model, oracle = model_for(family, folder, attention), oracle_of(folder)
    chats = [chat_for(family, tmp_path, 2 * seed)[0] for seed in range(CHATS)]
    together, counts, labels = torch.zeros(()).double(), list[int](), dict[int, Any]()
    with streampack.local(
        [{"messages": chat} for chat in chats], tokenizer={"processor": str(folder)}, budget=1024, format="hf",
        shuffle=False, prefetch=1,
    ) as loader:  # fmt: skip
        for batch in loader:
            counts.append(batch.num_samples)
            bounds = batch["cu_seq_lens_q"].tolist()
            for at, (_, number, *_) in enumerate(batch.sample_ids.tolist()):
                labels[number] = batch["labels"][:, bounds[at] : bounds[at + 1]].clone()
            pixels = batch["pixel_values"]
            batch["pixel_values"] = pixels if pixels is None else pixels.double()
            together = together + loss_of(model, **batch)
    assert max(counts) > 2
    gradients: Any = torch.autograd.grad(together, list(model.parameters()), allow_unused=True)
    alone = torch.zeros(()).double()
    for number, chat in enumerate(chats):
        arrays = processed(family, oracle, chat)
        others = ("attention_mask", "labels")
        inputs = {
            name: torch.as_tensor(value) for name, value in arrays.items() if name not in others and value is not None
        }
        if "pixel_values" in inputs:
            inputs["pixel_values"] = inputs["pixel_values"].double()
        else:
            inputs.pop("mm_token_type_ids", None)
        own = labels[number]
        own[:, 0] = -100
        alone = alone + loss_of(model, own, **inputs)
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)
    expected = torch.autograd.grad(alone, list(model.parameters()), allow_unused=True)
    for got, wanted in zip(gradients, expected, strict=True):
        if got is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("only_float64")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_pack_with_videos_is_its_chats_alone(attention: str, tmp_path: Path) -> None:
    folder = folder_of("qwen3_vl", tmp_path / "qwen3_vl")
    model, oracle = model_for("qwen3_vl", folder, attention), oracle_of(folder)
    chats = [video_chat(tmp_path, seed) for seed in range(4)]
    batch = one_batch(folder, [chat for chat, _ in chats], budget=4096)
    batch["pixel_values"] = batch["pixel_values"].double()
    together, decode, alone = loss_of(model, **batch), ProcessorDecoder(folder), torch.zeros(()).double()
    bounds, grids = batch["cu_seq_lens_q"].tolist(), iter(batch["image_grid_thw"])
    for at, (_, number, *_) in enumerate(batch.sample_ids.tolist()):
        ids, labels = (batch[key][:, bounds[at] : bounds[at + 1]].clone() for key in ("input_ids", "labels"))
        labels[:, 0] = -100
        types = (ids == oracle.image_token_id).int() + 2 * (ids == oracle.video_token_id).int()
        inputs = dict[str, Any](input_ids=ids, mm_token_type_ids=types)
        for part in chats[number][1]:
            rows = torch.tensor(decode(Path(part["path"]).read_bytes(), Reference("a"))).double()
            keys = (
                ("pixel_values", "image_grid_thw")
                if part["type"] == "image"
                else ("pixel_values_videos", "video_grid_thw")
            )
            for key, value in zip(keys, (rows, next(grids)[None]), strict=True):
                inputs[key] = torch.cat([inputs[key], value]) if key in inputs else value
        alone = alone + loss_of(model, labels, **inputs)
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)
    gradients: Any = (
        torch.autograd.grad(loss, list(model.parameters()), allow_unused=True) for loss in (together, alone)
    )
    for got, wanted in zip(*gradients, strict=True):
        if got is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def one_batch(folder: Path, chats: list[Any], budget: int = 1024) -> Any:
    """The first pack of some chats, in their order."""
    with streampack.local(
        [{"messages": chat} for chat in chats], tokenizer={"processor": str(folder)}, budget=budget, format="hf",
        shuffle=False, prefetch=1,
    ) as loader:  # fmt: skip
        return next(iter(loader))


@pytest.mark.usefixtures("only_float64")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FOLDERS)
def test_other_pixels_and_another_text_of_a_chat_do_not_move_its_neighbors(
    family: str, attention: str, tmp_path: Path
) -> None:
    folder = folder_of(family, tmp_path / family)
    model = model_for(family, folder, attention).eval()
    for number in range(3):
        Image.effect_noise((90, 60), 100).convert("RGB").save(tmp_path / f"{number}.png")

    def chat(number: int, text: str = "what is this?") -> list[dict[str, Any]]:
        asked = [{"type": "image", "path": str(tmp_path / f"{number}.png")}, {"type": "text", "text": text}]
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": [{"type": "text", "text": "ok"}]}]

    outputs = list[Any]()
    for changed in (False, True):
        chats = [chat(0), chat(1, "tahw is this?" if changed else "what is this?"), chat(2)]
        if changed:
            Image.new("RGB", (90, 60), (250, 3, 90)).save(tmp_path / "1.png")
        batch = one_batch(folder, chats)
        assert batch.num_samples == 3
        batch["pixel_values"] = batch["pixel_values"].double()
        with torch.no_grad():
            parts = streampack.per_sample(model(**batch).logits, batch)
        numbers = batch.sample_ids[:, 1].tolist()
        outputs.append(dict(zip(numbers, parts, strict=True)))
    before, after = outputs
    least = min(len(before[1]), len(after[1]))
    assert float((before[1][:least] - after[1][:least]).abs().max()) > 1e-4
    for number in (0, 2):
        torch.testing.assert_close(before[number], after[number], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("family", "other", "expected"),
    [
        ("qwen2_vl", "qwen3_vl", r"\[\d+, 1176\] for a model of the type qwen3_vl, expected \[patches, 1536\]"),
        ("gemma3", "qwen2_vl", r"\[1, 3, 32, 32\] for a model of the type qwen2_vl, expected \[patches, 1176\]"),
        ("qwen2_5_vl", "internvl", r"\[\d+, 1176\] for a model of the type internvl, expected \[images or tiles"),
    ],
)
def test_a_model_rejects_images_of_the_processor_of_another_model(
    family: str, other: str, expected: str, tmp_path: Path
) -> None:
    Image.new("RGB", (90, 60)).save(tmp_path / "a.png")
    asked = [{"type": "image", "path": str(tmp_path / "a.png")}, {"type": "text", "text": "what?"}]
    answer = [{"type": "text", "text": "ok"}]
    chat = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    batch = one_batch(folder_of(family, tmp_path / family), [chat])
    with pytest.raises(UserError, match=f"got pixel_values of shape {expected}"):
        model_for(other, folder_of(other, tmp_path / other), "sdpa")(**batch)


@pytest.mark.timeout(180)
def test_the_two_files_and_the_loop_of_the_page_train_on_llava_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = model_for("qwen2_vl", folder_of("qwen2_vl", Path("model")), "sdpa").float()
    model.save_pretrained("model")
    Path("data/images").mkdir(parents=True)
    draw, rows = np.random.default_rng(0), []
    for number in range(12):
        Image.fromarray(draw.integers(0, 256, (60, 90, 3), dtype=np.uint8)).save(f"data/images/{number}.jpg")
        turns = [{"from": "human", "value": "<image>\nwhat is this?"}, {"from": "gpt", "value": "a fox"}]
        rows.append({"image": f"{number}.jpg", "conversations": turns} if number % 4 else {"conversations": turns[1:]})
    Path("data/llava-0.jsonl").write_text("\n".join(map(json.dumps, rows)))
    producer, broker = map(yaml.safe_load, of_page("yaml"))
    tokenizer = streampack.sources.open_tokenizer(streampack.sources.TokenizerSettings(processor="model"))
    needed = tokenizer.image_fields
    broker["fields"]["pixel_values"]["placeholder"] = needed["pixel_values"]["placeholder"]
    broker["rules"] |= {"step": {"packs": 1}, "budget": 512}
    loop, local, dummy = of_page("python")
    names: dict[str, Any] = {}
    config = convert(producer, ProducerConfig, "producer.yaml")
    settings = broker | {"state_dir": str(tmp_path / "state"), "memory": "256MiB"}
    with running_broker(settings) as running, producing_here(running.producers, open_sources(config)):
        exec(compile(loop.replace("ENDPOINT", running.trainers), "vision.md", "exec"), names)
    assert names["step"].index > 0
    assert all(value.isfinite().all() for value in names["model"].parameters())
    Path("chats.jsonl").write_text(json.dumps({"messages": rows[1]["conversations"], "images": "data/images/1.jpg"}))
    exec(compile(f"import streampack\n{local}", "vision.md", "exec"), names)
    question: Any = rows[0]["conversations"]
    text, before = one_batch(Path("model"), [[{**turn, "value": "a"} for turn in question]]), []
    for _ in range(2):
        names["batch"] = text
        before.append(names["model"](**text).loss)
        exec(compile(dummy.replace('device="cuda"', 'device="cpu"'), "vision.md", "exec"), names)
    assert before[0] == before[1]
    before[1].backward()
    assert all(value.grad is not None for value in names["model"].model.visual.patch_embed.parameters())


def sharded(rank: int, folder: Path, batches: list[Any]) -> tuple[Any, Any]:
    """The gradients of a model that two ranks share, one of them without images; and those of one process."""
    model, whole = (model_for("qwen2_vl", folder, "sdpa").float() for _ in range(2))
    for block in (*model.model.visual.blocks, *model.model.language_model.layers, model.model.visual, model):
        fully_shard(block)
    names: dict[str, Any] = {"torch": torch, "model": model, "batch": batches[rank]}
    exec(compile(of_page("python")[2].replace('device="cuda"', 'device="cpu"'), "vision.md", "exec"), names)
    for _ in range(2):
        model(**batches[rank]).loss.backward()
        for batch in batches:
            (whole(**batch).loss / 2).backward()
    gradients = [value.grad.full_tensor() for value in model.parameters()]
    return gradients, [value.grad for value in whole.parameters()]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_a_rank_without_images_goes_on_under_fsdp_with_the_image_of_the_page(tmp_path: Path) -> None:
    folder = folder_of("qwen2_vl", tmp_path / "qwen2_vl")
    text = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "a fox"}]
    images = random_chat(tmp_path, 0)[0]
    batches = [dict(one_batch(folder, [chat])) for chat in (images, text)]
    assert batches[0]["pixel_values"] is not None
    assert batches[1]["pixel_values"] is None
    for gradients, whole in on_ranks(2, sharded, folder, batches):
        for got, expected in zip(gradients, whole, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
