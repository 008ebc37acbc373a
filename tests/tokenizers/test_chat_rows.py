"""Chats as rows hold them: template variables, roles, think tags that are special, and tokenizers of transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, processors

from streampack.errors import ConfigError
from streampack.sources import SourceSettings, TokenizerSettings, open_source, open_tokenizer
from streampack.sources.formats.rows import RowReader
from streampack.tokenizers.base import Tokenizer
from streampack.tokenizers.callable_tokenizer import CallableTokenizer
from streampack.tokenizers.token_ids import Because, Encoded
from streampack.tokenizers.transformers_tokenizer import from_transformers
from tests.tokenizers.trl_templates import THOUGHT, TOOLS, say, theirs, turns


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    theirs("qwen3").save_pretrained(folder)
    return folder


def opened(folder: Path, **more: Any) -> Tokenizer:
    return open_tokenizer(TokenizerSettings(file=str(folder), **more))


def text(tokenizer: Tokenizer, encoded: Encoded | str) -> str:
    assert isinstance(encoded, Encoded), encoded
    return tokenizer.decode(encoded.tokens)


def learned(tokenizer: Tokenizer, encoded: Encoded | str) -> list[str]:
    """The texts of the runs of learned tokens."""
    assert isinstance(encoded, Encoded), encoded
    assert encoded.loss_mask is not None
    edges = np.flatnonzero(np.diff(np.concatenate(([0], encoded.loss_mask.astype(np.int8), [0]))))
    return [tokenizer.decode(encoded.tokens[begin:end]) for begin, end in zip(edges[::2], edges[1::2], strict=True)]


# Variables of the template

CHAT = turns("hi", "hello")
GLM_OFF = {"enable_thinking": False}


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("glm4moe")
    theirs("glm4moe").save_pretrained(folder)
    return folder


def of_theirs(variables: dict[str, Any]) -> list[int]:
    ids: list[int] = theirs("glm4moe").apply_chat_template(CHAT, return_dict=True, **variables)["input_ids"]
    return ids


def row_of(kind: str, variables: Any) -> dict[str, Any]:
    chat = {"messages": CHAT} if kind == "messages" else {"prompt": CHAT[:1], "completion": CHAT[1:]}
    return {**chat, "chat_template_kwargs": variables}


@pytest.mark.parametrize("kind", ["messages", "pair"])
@pytest.mark.parametrize("variables", [GLM_OFF, json.dumps(GLM_OFF), {**GLM_OFF, "null": None}])
@pytest.mark.parametrize("source", ["jsonl", "parquet", "python"])
def test_the_variables_of_a_row_reach_the_template(
    glm: Path, tmp_path: Path, kind: str, variables: Any, source: str
) -> None:
    row, tokenizer = row_of(kind, variables), opened(glm)
    if source == "python":
        found = RowReader(SourceSettings("python", path="x"), tokenizer).encode(row)
        assert isinstance(found, Encoded)
        tokens = found.tokens
    else:
        path = tmp_path / f"rows.{source}"
        if source == "jsonl":
            path.write_text(json.dumps(row) + "\n")
        else:
            pq.write_table(pa.Table.from_pylist([row]), path)
        record = next(iter(open_source(SourceSettings(source, path=str(path)), tokenizer).read(0, 1, seed=0, passes=1)))  # type: ignore[arg-type]
        tokens = record.tokens
    assert tokens.tolist() == of_theirs(GLM_OFF) != of_theirs({})


def test_the_variables_of_the_settings_are_for_all_chats_and_those_of_a_row_override_them(glm: Path) -> None:
    tokenizer = opened(glm, chat_template_kwargs=GLM_OFF)
    assert text(tokenizer, tokenizer.encode_chat(CHAT)) == text(tokenizer, opened(glm).encode_chat(CHAT, None, GLM_OFF))
    again = tokenizer.encode_chat(CHAT, None, {"enable_thinking": True})
    assert isinstance(again, Encoded)
    assert again.tokens.tolist() == of_theirs({"enable_thinking": True}) != of_theirs(GLM_OFF)
    assert tokenizer.digest != opened(glm).digest


def test_a_variable_that_no_template_reads_is_refused_in_the_settings(glm: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"got enable_thinkin, but .* reads no such variable\. It reads: .*enable_thin"
    ):
        opened(glm, chat_template_kwargs={"enable_thinkin": False})
    with pytest.raises(ConfigError, match=r"tokenizer\.chat_template_kwargs: got messages, which streampack gives"):
        opened(glm, chat_template_kwargs={"messages": []})
    with pytest.raises(ConfigError, match=r"tokenizer\.chat_template_kwargs: got .* without tokenizer\.file"):
        open_tokenizer(TokenizerSettings("bytes", chat_template_kwargs={"x": 1}))


@pytest.mark.parametrize("variables", ["no JSON", [1], {"tools": []}, 5])
def test_variables_that_cannot_be_used_reject_the_row(glm: Path, variables: Any) -> None:
    found = RowReader(SourceSettings("python", path="x"), opened(glm)).encode(row_of("messages", variables))
    assert found == "chat_template_kwargs"
    assert isinstance(found, Because)
    assert found.why.startswith("chat_template_kwargs: got ")


def test_a_callable_does_not_lose_variables() -> None:
    def encode(text: str) -> list[int]:
        return [len(text)]

    encode.encode_chat = lambda messages, tools: ([len(messages)], [1])  # type: ignore[attr-defined]
    tokenizer = CallableTokenizer("mine", encode)
    assert isinstance(tokenizer.encode_chat(CHAT, None, {}), Encoded)
    assert tokenizer.encode_chat(CHAT, None, GLM_OFF) == "chat_template_kwargs"


def test_tools_beside_a_prompt_of_messages_reach_the_template(qwen3: Path) -> None:
    tokenizer = opened(qwen3)
    chat = RowReader(SourceSettings("python", path="x"), tokenizer).encode({"messages": CHAT, "tools": TOOLS})
    row = {"prompt": CHAT[:1], "completion": CHAT[1:], "tools": TOOLS}
    pair = RowReader(SourceSettings("python", path="x"), tokenizer).encode(row)
    assert text(tokenizer, pair) == text(tokenizer, chat)
    assert '"name": "weather"' in text(tokenizer, pair)


# Roles


@pytest.mark.parametrize("role", ["model", "bot", "gpt", "human", "ai", "ipython", "a role"])
def test_an_unknown_role_is_rejected_with_the_line_to_write(qwen3: Path, role: str) -> None:
    for tokenizer in (opened(qwen3), open_tokenizer(TokenizerSettings("bytes"))):
        found = tokenizer.encode_chat([say("user", "hi"), say(role, "hello")])
        assert found == "roles"
        assert isinstance(found, Because)
        name = repr(role) if " " in role else role
        assert f"message 1 has the role {name}, not system, " in found.why
        assert f"roles: {{{name}: {'user' if role == 'human' else 'assistant'}}}" in found.why


def test_roles_map_to_those_of_the_template(qwen3: Path) -> None:
    expected = opened(qwen3).encode_chat(CHAT)
    for role in ("model", "bot", "gpt"):
        tokenizer = opened(qwen3, roles={role: "assistant", "human": "user"})
        found = tokenizer.encode_chat([say("human", "hi"), say(role, "hello")])
        assert text(tokenizer, found) == text(tokenizer, expected)
        assert learned(tokenizer, found) == learned(tokenizer, expected) == ["<think>\n\n</think>\n\nhello<|im_end|>"]
        shared = tokenizer.encode_chat([{"from": "human", "value": "hi"}, {"from": role, "value": "hello"}])
        assert learned(tokenizer, shared) == learned(tokenizer, expected)
        assert tokenizer.digest != opened(qwen3).digest
    bytes_tokenizer = open_tokenizer(TokenizerSettings("bytes", roles={"model": "assistant"}))
    assert learned(bytes_tokenizer, bytes_tokenizer.encode_chat([say("user", "hi"), say("model", "yo")])) == ["yo<256>"]


def test_a_role_that_only_the_template_knows_is_a_prompt_if_it_is_named(tmp_path: Path) -> None:
    theirs("llama3").save_pretrained(tmp_path / "llama3")
    tokenizer = opened(tmp_path / "llama3", roles={"critic": "critic"})
    found = tokenizer.encode_chat([say("user", "hi"), say("critic", "hm"), say("assistant", "hello")])
    assert "<|start_header_id|>critic<|end_header_id|>\n\nhm" in text(tokenizer, found)
    assert learned(tokenizer, found) == ["hello<|eot_id|>"]


def test_every_role_may_be_trained_where_all_is(qwen3: Path) -> None:
    tokenizer = opened(qwen3, train_on="all")
    found = tokenizer.encode_chat([say("user", "hi"), say("assistant", "a"), say("critic", "hm")])
    assert isinstance(found, Encoded)
    assert found.loss_mask is None


def test_a_message_that_the_template_does_not_write_is_rejected_and_named(tmp_path: Path) -> None:
    theirs("phi3").save_pretrained(tmp_path / "phi3")
    chat = [say("developer", "be kind"), *CHAT]
    found = opened(tmp_path / "phi3").encode_chat(chat)
    assert found == "template"
    assert isinstance(found, Because)
    assert "does not write message 0, whose role is developer" in found.why
    mapped = opened(tmp_path / "phi3", roles={"developer": "system"})
    assert "<|system|>\nbe kind<|end|>" in text(mapped, mapped.encode_chat(chat))


# Think tags that are special tokens


@pytest.mark.parametrize("name", ["qwen3", "glm4moe", "lfm2_2_5", "nemotron_3_nano"])
def test_earlier_thinking_is_dropped_where_its_tags_are_special(name: str, tmp_path: Path) -> None:
    theirs(name).save_pretrained(tmp_path / name)
    added = theirs(name).added_tokens_decoder.values()
    assert {"<think>", "</think>"} <= {str(token) for token in added if token.special}
    tokenizer, chat = opened(tmp_path / name), turns("a", f"{THOUGHT}one", "b", f"{THOUGHT}two")
    found = tokenizer.encode_chat(chat)
    assert isinstance(found, Encoded)
    assert found.tokens.tolist() == theirs(name).apply_chat_template(chat, return_dict=True)["input_ids"]
    first, second = learned(tokenizer, found)
    assert "I think" not in first
    assert "I think" in second


def test_think_tags_of_a_user_stay_text(qwen3: Path) -> None:
    tokenizer = opened(qwen3)
    chat = turns("say </think>", "hello")
    found = tokenizer.encode_chat(chat)
    assert isinstance(found, Encoded)
    tag = theirs("qwen3").convert_tokens_to_ids("</think>")
    assert found.tokens.tolist().count(tag) == 1
    assert theirs("qwen3").apply_chat_template(chat, return_dict=True)["input_ids"].count(tag) == 2


# A tokenizer object of transformers


def with_bos() -> Any:
    """A tokenizer of words whose post-processor adds a BOS, and that has an added token."""
    words = {word: at for at, word in enumerate(["<unk>", "<s>", "</s>", "user", "assistant", "hi", "yes", ":"])}
    library = Library(models.WordLevel(words, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    library.add_tokens(["<think>"])
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_object=library, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.chat_template = "{% for m in messages %}{{ m.role }} : {{ m.content }} {{ eos_token }}{% endfor %}"
    return made


words = st.lists(st.sampled_from(["hi", "yes", "user", "<think>", "</s>", "<s>", "x", "é"]), min_size=1).map(" ".join)
rows = st.one_of(
    words.map(lambda word: {"text": word}),
    st.tuples(words, words).map(lambda pair: {"prompt": pair[0], "completion": pair[1]}),
    st.tuples(words, words).map(lambda pair: {"messages": turns(*pair)}),
    st.tuples(words, words).map(lambda pair: {"prompt": turns(pair[0]), "completion": pair[1]}),
)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Tokenizer]]:
    found = {}
    for name, tokenizer in (("words", with_bos()), ("qwen3", theirs("qwen3"))):
        folder = tmp_path_factory.mktemp(name)
        tokenizer.save_pretrained(folder)
        found[name] = from_transformers(tokenizer), opened(folder)
    return found


@given(rows, st.sampled_from(["words", "qwen3"]))
def test_an_object_of_transformers_encodes_as_its_folder_does(
    both: dict[str, tuple[Tokenizer, Tokenizer]], row: dict[str, Any], name: str
) -> None:
    found, expected = (RowReader(SourceSettings("python", path="x"), each).encode(row) for each in both[name])
    assert isinstance(found, Encoded)
    assert isinstance(expected, Encoded)
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert (found.loss_mask is None) == (expected.loss_mask is None)
    assert found.loss_mask is None or expected.loss_mask is None or (found.loss_mask == expected.loss_mask).all()


def test_a_text_of_an_object_ends_with_the_end_of_text_token_once() -> None:
    tokenizer = from_transformers(with_bos())
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.has_chat_template) == ("TokenizersBackend", 9, True)
    found = tokenizer.encode("hi yes")
    assert isinstance(found, Encoded)
    assert found.tokens.tolist() == [1, 5, 6, 2]
    without = with_bos()
    without.eos_token = None
    found = from_transformers(without).encode("hi yes")
    assert isinstance(found, Encoded)
    assert found.tokens.tolist() == [1, 5, 6]


def test_a_slow_tokenizer_ends_texts_too_and_refuses_chats() -> None:
    from transformers import ByT5Tokenizer

    given = ByT5Tokenizer()
    tokenizer = from_transformers(given)
    found = tokenizer.encode("hi")
    assert isinstance(found, Encoded)
    assert found.tokens.tolist() == [*given.encode("hi", add_special_tokens=False), given.eos_token_id]
    with pytest.raises(
        ConfigError, match=r"got a chat with the slow tokenizer ByT5Tokenizer, expected a fast tokenizer"
    ):
        tokenizer.encode_chat(CHAT)


def test_a_processor_is_refused_with_what_to_pass() -> None:
    from transformers import ProcessorMixin

    class Processor(ProcessorMixin):
        def __init__(self) -> None:
            self.chat_template = None

    with pytest.raises(ConfigError, match=r"got a .*Processor, expected a tokenizer\. Pass its attribute tokenizer"):
        from_transformers(Processor())
