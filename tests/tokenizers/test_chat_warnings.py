"""Warnings about samples of tokenizers: what a template leaves out, and special tokens that stay text."""

from collections.abc import Callable
from typing import Any

import pytest

from streampack.core.stats.sample_warnings import WARNINGS
from streampack.sources import SourceSettings, TokenizerSettings, open_tokenizer
from streampack.sources.formats.rows import RowReader
from streampack.tokenizers.base import Tokenizer
from streampack.tokenizers.token_ids import Encoded
from tests.tokenizers.trl_templates import ASK, NAMES, RAIN, SUN, TODAY, TOOLS, say, theirs, turns

Open = Callable[..., Tokenizer]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Open:
    def open_one(name: str, **more: Any) -> Tokenizer:
        folder = tmp_path_factory.mktemp(name)
        theirs(name).save_pretrained(folder)
        return open_tokenizer(TokenizerSettings(file=str(folder), date=TODAY, **more))

    return open_one


def warnings(tokenizer: Tokenizer, row: dict[str, Any]) -> tuple[str, ...]:
    found = RowReader(SourceSettings("python", path="x"), tokenizer).encode(row)
    assert isinstance(found, Encoded), found
    assert set(found.warnings) <= set(WARNINGS)
    return found.warnings


CHAT = {"messages": turns("hi", "hello")}
CALL = {"messages": [ASK, say("assistant", "", tool_calls=[RAIN]), SUN, say("assistant", "no rain")]}
THOUGHT = {"messages": [say("user", "hi"), say("assistant", "hello", thinking="I think")]}


def test_templates_whose_answers_end_without_a_token_are_named(opened: Open) -> None:
    named = {name for name in NAMES if "no_end_token" in warnings(opened(name), CHAT)}
    assert named == {"glm4moe"}


def test_a_plain_chat_has_no_other_warning(opened: Open) -> None:
    for name in NAMES:
        assert warnings(opened(name), CHAT) in ((), ("no_end_token",)), name


def test_an_answer_that_is_not_learned_needs_no_end(opened: Open) -> None:
    chat = [say("user", "hi"), say("assistant", "hello", train=False)]
    assert warnings(opened("glm4moe"), {"messages": chat}) == ()


def test_a_template_that_writes_no_tools_calls_or_reasoning_is_named(opened: Open) -> None:
    qwen3, llama3 = opened("qwen3"), opened("llama3")
    assert warnings(qwen3, {**CHAT, "tools": TOOLS}) == ()
    assert warnings(llama3, {**CHAT, "tools": TOOLS}) == ("tools_left_out",)
    assert warnings(qwen3, {**CALL, "tools": TOOLS}) == ()
    assert warnings(llama3, CALL) == ("tool_calls_left_out",)
    assert warnings(qwen3, THOUGHT) == ()
    assert warnings(llama3, THOUGHT) == ("reasoning_left_out",)
    two_turns = {"messages": [*THOUGHT["messages"], *turns("and?", "so")]}
    assert warnings(qwen3, two_turns) == (), "a template may drop the reasoning of earlier turns"


def test_a_variable_of_a_row_that_nothing_reads_is_named(opened: Open) -> None:
    for row in (CHAT, {"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}):
        found = warnings(opened("qwen3"), {**row, "chat_template_kwargs": {"enable_thinkin": False}})
        assert found == ("template_kwargs_left_out",)
        assert warnings(opened("qwen3"), {**row, "chat_template_kwargs": {"enable_thinking": False}}) == ()


@pytest.mark.parametrize("name", ["qwen3", "bytes"])
def test_tools_and_variables_beside_plain_texts_are_named(opened: Open, name: str) -> None:
    tokenizer = opened(name) if name != "bytes" else open_tokenizer(TokenizerSettings("bytes"))
    row = {"prompt": "a", "completion": "b", "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}}
    assert warnings(tokenizer, row) == ("tools_left_out", "template_kwargs_left_out")
    assert warnings(tokenizer, {"prompt": "a", "completion": "b"}) == ()


def test_chats_as_bytes_name_what_they_lack() -> None:
    tokenizer = open_tokenizer(TokenizerSettings("bytes"))
    assert warnings(tokenizer, CHAT) == ()
    assert warnings(tokenizer, {**CALL, "tools": TOOLS}) == ("tools_left_out", "tool_calls_left_out")
    assert warnings(tokenizer, THOUGHT) == ("reasoning_left_out",)


def test_text_that_a_template_wrote_is_named_and_its_bos_is_not_doubled(opened: Open) -> None:
    text = theirs("llama3").apply_chat_template(CHAT["messages"], tokenize=False)
    ids = theirs("llama3").apply_chat_template(CHAT["messages"], return_dict=True)["input_ids"]
    plain = opened("llama3", bos_token="<|bos|>")
    assert warnings(plain, {"text": text}) == ("special_tokens_as_text",)
    assert warnings(plain, {"prompt": text, "completion": "x"}) == ("special_tokens_as_text",)
    assert warnings(plain, {"messages": turns("hi", text)}) == ("special_tokens_as_text",)
    assert warnings(plain, {"text": "a < b <| c"}) == ()
    tokenizer = opened("llama3", bos_token="<|bos|>", allow_special=True, append_eos=False)
    assert warnings(tokenizer, {"text": text}) == ()
    found = tokenizer.encode(text)
    assert isinstance(found, Encoded)
    assert found.tokens.tolist() == ids
    pair = tokenizer.encode_pair(text, "x")
    assert isinstance(pair, Encoded)
    assert pair.tokens.tolist()[: len(ids)] == ids
    assert pair.loss_mask is not None
    assert pair.loss_mask.sum() == 1


def test_a_special_token_in_the_arguments_of_a_call_is_text(opened: Open) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"<|im_end|>": "<|im_end|>"}}}
    tokenizer = opened("qwen3")
    found = tokenizer.encode_chat([ASK, say("assistant", "", tool_calls=[call])])
    assert isinstance(found, Encoded)
    assert found.tokens.tolist().count(theirs("qwen3").convert_tokens_to_ids("<|im_end|>")) == 2
    assert found.warnings == ("special_tokens_as_text",)
