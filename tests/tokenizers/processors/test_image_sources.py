"""Producers of chats with images: what they ask a run for, and stores that fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from streampack.core.media.references import Reference
from streampack.errors import ConfigError, SourceError
from streampack.sources import TokenizerSettings, open_tokenizer
from streampack.sources.files import image_files, retries
from streampack.sources.files.image_files import ImageSize, size_of
from streampack.sources.files.read_bytes import read_range
from tests.integration.running import in_process
from tests.tokenizers.processors.processor_folders import folder_of


def test_check_names_the_fields_that_a_run_lacks_and_shows_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of("qwen2_vl", Path("model"))
    Image.new("L", (90, 60), 220).save("a.png")
    turns = [{"from": "human", "value": "<image>what?"}, {"from": "gpt", "value": "a fox"}]
    Path("a.jsonl").write_text(json.dumps({"conversations": turns, "image": "a.png"}))
    Path("producer.yaml").write_text(
        "tokenizer: {processor: model}\nstreams: {chats: {source: jsonl, path: a.jsonl, messages_key: conversations}}\n"
    )
    Path("broker.yaml").write_text("run: images\nrules: {budget: 512}\nstreams: {chats: {}}\n")
    refused = in_process("check", "producer.yaml", "broker.yaml")
    line = refused.stderr.partition("`fields: ")[2].partition("`")[0]
    assert "pixel_values: {dtype: reference, axis: item, placeholder: {tokens: [5], patches: 4}}" in line
    Path("broker.yaml").write_text(f"{Path('broker.yaml').read_text()}fields: {line}\n")
    for right, wrong, expected in (
        ("tokens: [5]", "tokens: [151655]", "expected `placeholder: {tokens: [5], patches: 4}`"),
        ("patches: 4", "patches: 1", "got `placeholder: {tokens: [5], patches: 1}` for the field pixel_values"),
        ("int64, axis: item, shape: [3]", "int64, axis: item, shape: [2]", "got `shape: [2]` for the field image_grid"),
    ):
        Path("wrong.yaml").write_text(Path("broker.yaml").read_text().replace(right, wrong))
        assert expected in in_process("check", "producer.yaml", "wrong.yaml").stderr
    assert in_process("check", "producer.yaml", "broker.yaml").returncode == 0
    shown = in_process("check", "producer.yaml", "--samples", "1").stdout
    assert "90 x 60 pixels, 6 tokens  |" + 32 * "█" + "|" in shown
    assert "<|image_pad|>(6 times)" in shown
    (sample,) = json.loads(in_process("check", "producer.yaml", "--samples", "1", "--json").stdout)["samples"]["chats"]
    assert sample["media"]["images"][0]["num_tokens"] == 6


def test_a_processor_of_an_unknown_family_is_named_with_those_there_are(tmp_path: Path) -> None:
    folder = folder_of("qwen2_vl", tmp_path / "model")
    (folder / "processor_config.json").write_text('{"processor_class": "NoSuchProcessor"}')
    with pytest.raises(ConfigError, match=r"NoSuchProcessor.*Qwen2VLProcessor.*streampack/tokenizers/processors/"):
        open_tokenizer(TokenizerSettings(processor=str(folder)))
    (folder / "processor_config.json").write_text('{"processor_class": "Gemma3Processor"}')
    with pytest.raises(ConfigError, match=r"has no token <.*>, which stands for images"):
        open_tokenizer(TokenizerSettings(processor=str(folder)))


def test_the_size_of_an_image_is_read_from_its_first_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.effect_noise((2000, 1500), 100).save(tmp_path / "large.jpg", quality=95)
    read: list[int] = []

    def counted(reference: Reference, place: int, count: int) -> bytes:
        read.append(count)
        return read_range(reference, place, count)

    monkeypatch.setattr(image_files, "read_range", counted)
    assert size_of(Reference(str(tmp_path / "large.jpg"))) == ImageSize(1500, 2000)
    assert sum(read) <= 65536 < (tmp_path / "large.jpg").stat().st_size // 10


def test_a_store_that_fails_is_waited_for_and_no_sample_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (90, 60)).save(tmp_path / "a.png")
    monkeypatch.setattr(retries, "WAITS_S", (0.01,))
    busy = type("ClientResponseError", (Exception,), {"status": 503})("busy")  # aiohttp's is no OSError
    failures: list[Exception] = [TimeoutError("slow"), ConnectionResetError("gone"), busy]

    def flaky(reference: Reference, place: int, count: int) -> bytes:
        if failures:
            raise failures.pop()
        return read_range(reference, place, count)

    monkeypatch.setattr(image_files, "read_range", flaky)
    assert size_of(Reference(str(tmp_path / "a.png"))) == ImageSize(60, 90)
    assert not failures
    failures += [OSError("broken")] * 9
    with pytest.raises(SourceError, match=r"b\.png: the image cannot be read: .*broken"):
        size_of(Reference(str(tmp_path / "b.png")))
