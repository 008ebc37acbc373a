"""Chats through real processes: what a trainer learns is the answers, and ``check --samples`` shows it before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import streampack
from tests.integration.running import Daemon, in_process, running_broker, the_error, write, write_jsonl

TEMPLATE = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
COUNT = 40


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def row(number: int) -> dict[str, Any]:
    if number % 4 == 3:
        return {"prompt": f"count to {number}: ", "completion": f"{number}"}
    texts = [f"{('question', 'answer')[i % 2]} {number}.{i}" for i in range(2 + 2 * (number % 3))]
    return {"messages": turns(*texts)}


def answers(number: int) -> str:
    if number % 4 == 3:
        return f"{number}<|eos|>"
    return "".join(f"answer {number}.{i}<|im_end|>" for i in range(1, 2 + 2 * (number % 3), 2))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    special = ["<|eos|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    library.train_from_iterator(["question answer user assistant"] * 3, trainer)
    (tmp_path / "tokenizer").mkdir()
    library.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eos|>"}))
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    write_jsonl(tmp_path / "chats.jsonl", [row(number) for number in range(COUNT)])
    return tmp_path


def config(folder: Path, **more: Any) -> dict[str, Any]:
    stream = {"source": "jsonl", "shards": str(folder / "chats.jsonl"), "shuffle": False}
    return {"tokenizer": {"file": str(folder / "tokenizer")}, "streams": {"chats": stream}, **more}


def test_a_trainer_learns_only_the_answers_of_chats_and_pairs(folder: Path) -> None:
    settings = {
        "rules": {"budget": 256, "window": {"samples": 8}, "step": {"packs": 2}},
        "memory": "64MiB",
        "tokens": "uint16",
        "streams": {"chats": {"partitions": 1}},
        "fields": {"loss_mask": {}},
    }
    library = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    learned: dict[int, str] = {}
    with running_broker(settings) as broker:
        path = write(folder / "producer.yaml", config(folder, broker=broker.producers, processes=2))
        producer = Daemon(folder, "producer", "produce", "-c", path)
        try:
            with streampack.connect(broker.trainers, format="numpy") as loader:
                for pack in loader:
                    places = pack.cu_seqlens_padded.tolist()
                    for (_, number, _), begin, end in zip(pack.sample_ids.tolist(), places, places[1:], strict=False):
                        labels = pack.labels[begin:end]
                        learned[number] = library.decode(labels[labels != -100].tolist(), skip_special_tokens=False)
            assert producer.end() == 0
        finally:
            producer.kill()
    assert learned == {number: answers(number) for number in range(COUNT)}


def test_check_shows_the_first_samples_and_what_is_learned(folder: Path) -> None:
    path = write(folder / "producer.yaml", config(folder))
    found = json.loads(in_process("check", path, "--samples", "4", "--json").stdout)["samples"]["chats"]
    assert [sample["reason"] for sample in found] == [None] * 4
    for number, sample in enumerate(found):
        assert "".join(part["text"] for part in sample["parts"] if part["learned"]) == answers(number)
        assert sample["num_learned"] < sample["num_tokens"]
    whole = "".join(part["text"] for part in found[0]["parts"])
    assert whole == "<|im_start|>user\nquestion 0.0<|im_end|>\n<|im_start|>assistant\nanswer 0.1<|im_end|>\n"
    shown = in_process("check", path, "--samples", "1").stdout
    assert "{{<|im_start|>}}assistant\n[[answer 0.1{{<|im_end|>}}]]" in shown
    assert in_process("check", path).stdout.splitlines()[-1].startswith("good: ")


def test_check_shows_special_tokens_apart_from_text_that_looks_like_them(folder: Path) -> None:
    text = "<|im_start|>user\nhi<|im_end|>"
    shards = str(write_jsonl(folder / "texts.jsonl", [{"text": text}]))
    streams = {"texts": {"source": "jsonl", "shards": shards}}
    path = write(folder / "producer.yaml", config(folder, streams=streams))
    for shown in (in_process("check", path, "--samples", "1").stdout, in_process("check", path).stdout):
        assert "tokenizer: {allow_special: true, append_eos: false}" in " ".join(shown.split())
    assert f"[[{text}{{{{<|eos|>}}}}]]" in in_process("check", path, "--samples", "1").stdout
    given = {"file": str(folder / "tokenizer"), "allow_special": True, "append_eos": False}
    shown = in_process("check", write(path, config(folder, streams=streams, tokenizer=given)), "--samples", "1").stdout
    assert "[[{{<|im_start|>}}user\nhi{{<|im_end|>}}]]" in shown
    assert "warning" not in shown


def test_check_says_why_a_chat_is_rejected(folder: Path) -> None:
    shards = str(write_jsonl(folder / "roles.jsonl", [{"messages": turns("hi", "hello")}, {"messages": [
        {"role": "user", "content": "hi"}, {"role": "model", "content": "hello"},
    ]}]))  # fmt: skip
    path = write(folder / "producer.yaml", config(folder, streams={"a": {"source": "jsonl", "shards": shards}}))
    shown = in_process("check", path, "--samples", "2").stdout
    assert "rejected: roles" in shown
    assert "set tokenizer: {roles: {model: assistant}}" in shown.lower()


UNNAMED = "streams.chats: tokenizer: got chats without a tokenizer, expected a tokenizer with a chat template. Set"


@pytest.mark.parametrize("row", [{"messages": turns("a", "b")}, {"prompt": turns("a"), "completion": "b"}, "tools"])
def test_chats_without_a_tokenizer_are_refused(tmp_path: Path, row: Any) -> None:
    row = {"messages": turns("a", "b"), "tools": []} if row == "tools" else row
    shards = str(write_jsonl(tmp_path / "chats.jsonl", [row]))
    tree = {"broker": "tcp://127.0.0.1:1", "streams": {"chats": {"source": "jsonl", "shards": shards}}}
    path = write(tmp_path / "producer.yaml", tree)
    assert UNNAMED in the_error(in_process("check", path), 2)
    assert UNNAMED in the_error(in_process("produce", "-c", path, "--timeout", "1"), 2), "no broker is asked for"
    tree["tokenizer"] = {"name": "bytes"}
    assert in_process("check", write(path, tree)).returncode == 0


def test_texts_and_pairs_of_texts_need_no_tokenizer(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"prompt": "a", "completion": "b"}]
    shards = str(write_jsonl(tmp_path / "texts.jsonl", rows))
    path = write(tmp_path / "producer.yaml", {"streams": {"a": {"source": "jsonl", "shards": shards}}})
    assert in_process("check", path).returncode == 0


def test_check_shows_the_mask_that_a_key_of_another_name_holds(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "ids.jsonl", [{"tokens": [97, 98, 99], "mask": [0, 1, 1], "reward": 1.0}])
    fields = {"loss_mask": "mask", "reward": "reward"}
    stream = {"source": "jsonl", "path": str(tmp_path / "ids.jsonl"), "fields": fields}
    path = write(tmp_path / "producer.yaml", {"streams": {"ids": stream}})
    assert "a[[bc]]" in in_process("check", path, "--samples", "1").stdout


def test_check_shows_why_a_sample_is_none(folder: Path) -> None:
    good = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    write_jsonl(folder / "chats.jsonl", [{"messages": [{"role": "user"}, 5]}, {"messages": good}])
    shown = in_process("check", write(folder / "producer.yaml", config(folder)), "--samples", "3").stdout
    assert "chats  chats.jsonl:line 1  rejected: messages" in shown


def test_a_broker_has_no_samples_to_show(tmp_path: Path) -> None:
    path = write(tmp_path / "broker.yaml", {"run": "a", "rules": {"budget": 64}, "streams": {"a": {}}})
    assert "only producers read samples" in the_error(in_process("check", path, "--samples", "1"), 2)
