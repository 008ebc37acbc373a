"""Every chat template that TRL installs: the ids of transformers, the masks of TRL, and no learned prompt."""

import functools
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streampack.sources import TokenizerSettings, open_tokenizer
from streampack.tokenizers.base import Tokenizer
from streampack.tokenizers.chat_template import ChatTemplate
from streampack.tokenizers.token_ids import Because, Encoded
from tests.tokenizers.trl_templates import CHATS, NAMES, TODAY, theirs, turns

BASES = [name for name in NAMES if f"{name}_training" in NAMES]
TWINS = [name for name in NAMES if name.endswith("_training")]

# Differences from transformers, each with its reason.

PARTS_ONLY = ("idefics3", "llava_next", "smolvlm")
"""Templates that take a content as parts alone: transformers loses a text or raises. streampack passes it as a part."""
TEXT_ONLY = (
    "cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gptoss", "lfm2", "lfm2_v2", "llama3",
    "llama3_1", "llama3_2", "nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra",
    "phi3", "phi3_5", "qwen2_5", "qwen3", "qwen3_instruct_2507",
)  # fmt: skip
"""Templates that take a content as text alone: transformers prints the list, loses it, or raises. streampack joins the
parts."""
TAGS_STAY_TEXT = ("deepseek_r1_distill_training", "qwen3_8", "qwen3_8_training")
"""Templates that do not look for think tags in a content. If the tags are special tokens, they stay text."""

# Differences from TRL's masks.

CALL_END = "<|tool_response>"
"""Gemma 4 ends a call with this token if no result follows. TRL learns it nowhere, streampack there."""
HEADER_AFTER_RESULT = "<|turn>model\n"
"""DiffusionGemma writes this before an answer to a tool's result, but does not add it to the prompt there. It is not
learned, as by TRL."""


def base_of(name: str) -> str:
    """The template of a training twin, or ``name``."""
    return name.removesuffix("_training")


@functools.cache
def ours(name: str, folder: Path) -> Tokenizer:
    """The tokenizer of streampack for a template."""
    if not folder.is_dir():
        theirs(name).save_pretrained(folder)
    return open_tokenizer(TokenizerSettings(file=str(folder), date=TODAY))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trl")


def as_taken(name: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with a content of the kind that the template takes."""
    changed = []
    for message in messages:
        content = message.get("content")
        if base_of(name) in PARTS_ONLY and isinstance(content, str):
            content = [{"type": "text", "text": content}]
        elif base_of(name) in TEXT_ONLY and isinstance(content, list):
            content = "".join(part["text"] for part in content)
        changed.append(message if content is None else {**message, "content": content})
    return changed


def render(name: str, chat: dict[str, Any], size: int | None = None, **more: Any) -> Any:
    """Return the rendering by transformers of the first ``size`` messages of a chat."""
    messages = as_taken(name, chat["messages"])[:size]
    return theirs(name).apply_chat_template(messages, tools=chat.get("tools"), **chat.get("kwargs", {}), **more)


def encode(name: str, chat: dict[str, Any], folder: Path) -> Encoded | str:
    return ours(name, folder / name).encode_chat(chat["messages"], chat.get("tools"), chat.get("kwargs"))


def offsets(name: str, text: str) -> Any:
    return theirs(name)(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]


def is_left_out(reason: str, chat: dict[str, Any], text: str) -> bool:
    """Whether a reason names a message whose content is not in the text of transformers."""
    named = re.fullmatch(r"the template does not write message (\d+), whose role is .*", getattr(reason, "why", ""))
    return reason == "template" and named is not None and chat["messages"][int(named[1])]["content"] not in text


@pytest.mark.parametrize("name", NAMES)
def test_the_ids_are_those_of_transformers_or_the_reason_says_why(name: str, folder: Path) -> None:
    rendered = 0
    for title, chat in CHATS.items():
        found = encode(name, chat, folder)
        try:
            text = render(name, chat, tokenize=False)
        except Exception:  # the template rejects the chat, so streampack must, too
            assert isinstance(found, Because), title
            assert found.why, title
            continue
        if isinstance(found, str):
            assert isinstance(found, Because), (title, found)
            assert (found == "roles") == title.startswith(("an unknown role", "an answer of a model")), title
            assert found == "roles" or is_left_out(found, chat, text), (title, found.why)
            continue
        rendered += 1
        ids = render(name, chat, return_dict=True)["input_ids"]
        if name in TAGS_STAY_TEXT and "think tag" in title:
            assert ours(name, folder / name).decode(found.tokens) == text, title
            assert "special_tokens_as_text" in found.warnings, title
        else:
            assert found.tokens.tolist() == ids, title
    assert rendered >= 18, "most chats are compared"


@pytest.mark.parametrize("name", TWINS)
def test_the_masks_of_trls_training_templates_are_equal(name: str, folder: Path) -> None:
    for title, chat in CHATS.items():
        found = encode(name, chat, folder)
        if isinstance(found, str) or (name in TAGS_STAY_TEXT and "think tag" in title):
            continue
        expected = render(name, chat, return_dict=True, return_assistant_tokens_mask=True)["assistant_masks"]
        assert found.loss_mask is not None
        differ = np.flatnonzero(found.loss_mask != np.array(expected))
        if title == "unicode":  # of a character with many tokens, transformers leaves out all but the first
            text = render(name, chat, tokenize=False)
            spans = offsets(name, text)
            assert all(len(text[slice(*spans[at])].encode()) > 1 for at in differ), title
        else:
            assert differ.size == 0, title


@pytest.mark.parametrize("name", BASES)
def test_the_masks_are_those_of_the_training_template_but_for_prompts_and_white_space(name: str, folder: Path) -> None:
    compared = 0
    for title, chat in CHATS.items():
        found = encode(name, chat, folder)
        try:
            twin = render(f"{name}_training", chat, return_dict=True, return_assistant_tokens_mask=True)
        except Exception:  # the twin rejects the chat
            continue
        text = render(name, chat, tokenize=False) if isinstance(found, Encoded) else None
        if text != render(f"{name}_training", chat, tokenize=False) or (name in TAGS_STAY_TEXT and "think" in title):
            continue
        assert isinstance(found, Encoded)
        assert found.loss_mask is not None
        compared += 1
        spans, expected = offsets(name, text), np.array(twin["assistant_masks"])
        for begin, end in runs((found.loss_mask == 0) & (expected == 1)):
            written = text[spans[begin][0] : spans[end - 1][1]]
            after_end = not written.strip() and found.loss_mask[begin - 1] == 1
            assert after_end or written in prompts(name, chat), (title, written)
        for begin, end in runs((found.loss_mask == 1) & (expected == 0)):
            written = text[spans[begin][0] : spans[end - 1][1]]
            assert written == CALL_END or title == "unicode", (title, written)
    assert compared >= 1


def runs(mask: Any) -> Iterator[tuple[int, int]]:
    """The runs of true values, as (begin, end)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def prompts(name: str, chat: dict[str, Any]) -> str:
    """The texts that the template adds to ask for each answer, and what precedes the first message."""
    found = []
    for at, message in enumerate(chat["messages"]):
        if message["role"] == "assistant" and at:
            found.append(render(name, chat, at, tokenize=False, add_generation_prompt=True)[-60:])
    return "\n".join(found)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in TWINS])
def test_no_prompt_token_is_learned_and_every_answer_is(name: str, folder: Path) -> None:
    """An answer is what the chat up to it adds to the prompt before it, if both begin the whole text."""
    compared = 0
    for title, chat in CHATS.items():
        found = encode(name, chat, folder)
        if isinstance(found, str) or (name in TAGS_STAY_TEXT and "think tag" in title):
            continue
        text = render(name, chat, tokenize=False)
        answers = answers_of(name, chat, text)
        if answers is None:
            continue
        assert found.loss_mask is not None
        compared += 1
        learned = np.zeros(len(text), bool)
        for begin, end in answers:
            learned[begin:end] = True
        for (begin, end), mask in zip(offsets(name, text), found.loss_mask, strict=True):
            if not learned[begin:end].any():
                assert not mask, (title, text[begin:end])
            elif text[begin:end].strip() and text[begin:end] != CALL_END:
                assert mask, (title, text[begin:end])
    assert compared >= 1


def answers_of(name: str, chat: dict[str, Any], text: str) -> list[tuple[int, int]] | None:
    """The places of the answers by prefixes of the text, with transformers alone; None if they are no prefixes."""
    places = []
    for at, message in enumerate(chat["messages"]):
        if message["role"] != "assistant":
            continue
        try:
            prompt = render(name, chat, at, tokenize=False, add_generation_prompt=True)
            whole = text if at + 1 == len(chat["messages"]) else render(name, chat, at + 1, tokenize=False)
        except Exception:
            return None
        if not (whole.startswith(prompt) and text.startswith(whole)):
            return None
        has_header = name == "diffusion_gemma" and text.startswith(HEADER_AFTER_RESULT, len(prompt))
        places.append((len(prompt) + has_header * len(HEADER_AFTER_RESULT), len(whole)))
    return places


def test_a_message_is_rendered_a_few_times_however_long_the_chat_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0
    plain = ChatTemplate.render

    def counted(self: ChatTemplate, messages: list[dict[str, Any]], *values: Any, **more: Any) -> str:
        nonlocal count
        count += len(messages)
        return plain(self, messages, *values, **more)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    for name in NAMES:
        tokenizer = ours(name, folder / name)
        tokenizer.encode_chat(turns("hi", "hello"))
        for num_turns in (10, 100):
            count = 0
            chat = turns(*(f"turn {at}" for at in range(num_turns)))
            assert isinstance(tokenizer.encode_chat(chat), Encoded)
            assert count <= 5 * num_turns, (name, num_turns)


@pytest.mark.parametrize("name", ["qwen3", "llama3", "phi3_training", "gptoss"])
def test_the_time_grows_linearly_with_the_turns(name: str, folder: Path) -> None:
    tokenizer = ours(name, folder / name)

    def seconds_per_turn(num_turns: int) -> float:
        chat = turns(*(f"turn {at} of a chat" for at in range(num_turns)))
        times = []
        for _ in range(5):
            begin = time.process_time()
            assert isinstance(tokenizer.encode_chat(chat), Encoded)
            times.append(time.process_time() - begin)
        return min(times) / num_turns

    assert seconds_per_turn(400) < 2 * seconds_per_turn(10)
