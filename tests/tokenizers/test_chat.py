"""Chats to tokens: the same text and ids as transformers writes, and a mask of exactly the answers."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from streampack.errors import ConfigError
from streampack.sources import SourceSettings, TokenizerSettings, open_tokenizer
from streampack.sources.formats.rows import RowReader
from streampack.tokenizers.base import Tokenizer
from streampack.tokenizers.chat import read_messages
from streampack.tokenizers.token_ids import Because, Encoded
from streampack.tokenizers.transformers_tokenizer import from_transformers

SPECIAL = [
    "<|bos|>",
    "<|eos|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "[INST]",
    "[/INST]",
    "</s>",
    "<|call|>",
]
TEXTS = ["system user assistant tool", "the quick brown fox jumps over the lazy dog\n\n", "def f(x):\n    return x\n"]

CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"""
HEADERS = """{{- bos_token }}
{%- set day = "26 Jul 2024" %}
{%- if strftime_now is defined %}{%- set day = strftime_now("%d %b %Y") %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday: " + day + "\n\n" }}
{%- if messages[0]['role'] == 'system' %}
    {{- messages[0]['content'] | trim }}{%- set messages = messages[1:] %}
{%- endif %}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""
GENERATION = """{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{{ '\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}
"""
TOOLS = """{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- "# Tools\n" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "<|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
# Drops the thinking of all turns before the last question, and writes an empty one where the last has none.
THINKING = """{%- set ns = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
        {%- set thought = '' %}
        {%- if '</think>' in message.content %}
            {%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last %}{{- '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}
        {{- content + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
# No generation prompt; the system's words go before the last question; roles must alternate.
INST = """{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (system + '\n\n' if loop.index0 >= (messages | length) - 2 and system is defined else '') }}
        {{- message.content + '[/INST]' }}
    {%- else %}
        {{- ' ' + message.content | trim + '</s>' }}
    {%- endif %}
{%- endfor %}
"""
TEMPLATES = {
    "chatml": CHATML,
    "headers": HEADERS,
    "generation": GENERATION,
    "tools": TOOLS,
    "thinking": THINKING,
    "inst": INST,
}
END_OF_TURN = {"headers": "<|eot_id|>", "inst": "</s>"}


def byte_level() -> Library:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    library.train_from_iterator(TEXTS * 5, trainer)
    library.add_tokens(["<think>", "</think>"])  # added, not special
    library.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", 0)]),
        ]
    )
    return library


def sentencepiece() -> Library:
    library = Library(models.BPE(byte_fallback=True, unk_token="<unk>"))
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    special = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    library.train_from_iterator(
        TEXTS * 5, trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    )
    return library


def save(folder: Path, library: Library, template: str | None) -> Path:
    folder.mkdir(parents=True)
    library.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("tokenizers")
    library = byte_level()
    made = {name: save(base / name, library, template) for name, template in TEMPLATES.items()}
    return made | {"sentencepiece": save(base / "sentencepiece", sentencepiece(), CHATML)}


def opened(folder: Path, **more: Any) -> Tokenizer:
    return open_tokenizer(TokenizerSettings(file=str(folder), **more))


def theirs(folder: Path, messages: list[Any], **more: Any) -> Any:
    """What transformers makes of a chat."""
    kind: Any = import_module("transformers").PreTrainedTokenizerFast
    tokenizer = kind(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<|bos|>", eos_token="<|eos|>")
    tokenizer.chat_template = (folder / "chat_template.jinja").read_text()
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **more)


def learned(folder: Path, encoded: Encoded | str) -> list[str]:
    """The texts of the runs of learned tokens."""
    assert isinstance(encoded, Encoded), encoded
    assert encoded.loss_mask is not None
    assert encoded.loss_mask.shape == encoded.tokens.shape
    library = Library.from_file(str(folder / "tokenizer.json"))
    runs: list[list[int]] = []
    before = 0
    for token, mask in zip(encoded.tokens.tolist(), encoded.loss_mask.tolist(), strict=True):
        if mask:
            if not before:
                runs.append([])
            runs[-1].append(token)
        before = mask
    return [library.decode(run, skip_special_tokens=False) for run in runs]


def chat(*turns: str, system: str | None = None) -> list[dict[str, Any]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


CHATS = [
    chat("hi", "hello there"),
    chat("hi", "hello", "and?", "the quick brown fox", system="be kind"),
    chat("  spaces  ", "def f(x):\n    return x", "naïve 😀 日本", "größe é é 😀😀"),
]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALLS = [
    {"role": "user", "content": "rain?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "<b>sun</b>"},
    {"role": "assistant", "content": "no rain"},
]


@pytest.mark.parametrize("name", [*TEMPLATES, "sentencepiece"])
@pytest.mark.parametrize("number", range(len(CHATS)))
def test_the_ids_are_those_of_transformers(folders: dict[str, Path], name: str, number: int) -> None:
    folder, messages = folders[name], CHATS[number]
    if name == "headers":  # transformers gives its templates today's date
        folder = save(
            folder.parent / f"{name}-{number}", byte_level(), HEADERS.replace("strftime_now is", "nothing is")
        )
    encoded = opened(folder).encode_chat(messages)
    assert isinstance(encoded, Encoded), encoded
    expected = theirs(folder, messages)
    assert encoded.tokens.tolist() == expected["input_ids"]


def test_tools_are_written_as_transformers_writes_them(folders: dict[str, Path]) -> None:
    encoded = opened(folders["tools"]).encode_chat(CALLS, [TOOL])
    assert isinstance(encoded, Encoded)
    expected = theirs(folders["tools"], CALLS, tools=[TOOL])
    assert encoded.tokens.tolist() == expected["input_ids"]
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call><|im_end|>'
    assert learned(folders["tools"], encoded) == [call, "no rain<|im_end|>"]


@pytest.mark.parametrize("messages", CHATS)
def test_generation_blocks_give_the_mask_of_transformers(folders: dict[str, Path], messages: list[Any]) -> None:
    encoded = opened(folders["generation"]).encode_chat(messages)
    assert isinstance(encoded, Encoded)
    assert encoded.loss_mask is not None
    # transformers reads offsets that leave out blanks, so a token of blanks inside an answer is compared by text
    answers = [message["content"] + "<|im_end|>" for message in messages if message["role"] == "assistant"]
    assert learned(folders["generation"], encoded) == answers
    expected = theirs(folders["generation"], messages, return_assistant_tokens_mask=True)
    assert sum(encoded.loss_mask.tolist()) == sum(expected["assistant_masks"])


@pytest.mark.parametrize("name", [*TEMPLATES, "sentencepiece"])
@pytest.mark.parametrize("messages", CHATS)
def test_learned_are_exactly_the_answers_and_their_ends(
    folders: dict[str, Path], name: str, messages: list[Any]
) -> None:
    end = END_OF_TURN.get(name, "<|im_end|>")
    answers = [message["content"] + end for message in messages if message["role"] == "assistant"]
    if name == "thinking":
        answers[-1] = "<think>\n\n</think>\n\n" + answers[-1]
    if name == "inst":  # the model is asked after [/INST], so the space before its answer is the model's own
        answers = [" " + answer for answer in answers]
    assert learned(folders[name], opened_once(folders[name]).encode_chat(messages)) == answers


LOOP = "{%% for m in messages %%}{%% if m.role == 'user' %%}%s{%% else %%}%s{%% endif %%}{%% endfor %%}"


@pytest.mark.parametrize(("question", "answer", "expected"), [
    ("[INST] {{ m.content }}[/INST]", "{{ ' ' + m.content }}</s>", [" one </s>", " two</s>"]),
    ("[INST] {{ m.content }}[/INST] ", "{{ m.content }}</s>", ["one </s>", "two</s>"]),
    ("[INST] {{ m.content }}[/INST] ", "{{ ' ' + m.content }}</s>", [" one </s>", " two</s>"]),
    ("{{ m.content }}", "{{ ' ' + m.content }}</s>", [" one </s>", " two</s>"]),
    ("{{ m.content }}\n", "Answer:\n {{ m.content }}</s>", ["one </s>", "two</s>"]),
])  # fmt: skip
def test_white_space_is_learned_where_no_prompt_ends_with_it(
    tmp_path: Path, question: str, answer: str, expected: list[str]
) -> None:
    library = byte_level()
    library.pre_tokenizer = pre_tokenizers.Sequence(  # a blank is a token of its own
        [pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    folder = save(tmp_path / "blanks", library, LOOP % (question, answer))
    messages = chat("some ", "one ", "more  ", "two")
    assert learned(folder, opened(folder).encode_chat(messages)) == expected


@pytest.mark.parametrize(("written", "asked"), [
    ("\n    Answer:\n", "    Answer:\n"),
    ("Answer:\n", "\n\nAnswer:\n"),
    ("Answer: ", "Answer:"),
    ("<|bos|>Answer:\n", "Answer:\n"),
])  # fmt: skip
@pytest.mark.parametrize("answers", [("one", "two"), ("", "two"), ("one", "")])
def test_no_prompt_is_learned_where_white_space_before_it_differs(
    tmp_path: Path, written: str, asked: str, answers: tuple[str, str]
) -> None:
    source = LOOP % ("Question: {{ m.content }}", f"{{{{ {written!r} + m.content }}}}</s>")
    folder = save(
        tmp_path / "header", byte_level(), f"{source}{{% if add_generation_prompt %}}{{{{ {asked!r} }}}}{{% endif %}}"
    )
    got = learned(folder, opened(folder).encode_chat(chat("a", answers[0], "b", answers[1])))
    assert [text.strip() for text in got] == [f"{answer}</s>" for answer in answers]


NUMBERS = """{% for i in range(messages | length) %}SETTING
{{- '<|im_start|>' + messages[i]['role'] + '\n' + messages[i]['content'] + '<|im_end|>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


@pytest.mark.parametrize("setting", [
    "", "{% set message = messages[i] %}", "{% set next = messages[i + 1] %}", "{% if no %}{{ no[i] }}{% endif %}",
])  # fmt: skip
def test_a_template_may_count_its_messages(folders: dict[str, Path], setting: str) -> None:
    tokenizer = opened(folders["chatml"], chat_template=NUMBERS.replace("SETTING", setting))
    for messages in CHATS:
        found, expected = tokenizer.encode_chat(messages), opened_once(folders["chatml"]).encode_chat(messages)
        assert learned(folders["chatml"], found) == learned(folders["chatml"], expected)


def test_a_template_that_hides_its_messages_has_no_sample(folders: dict[str, Path]) -> None:
    source = "{% for i in range(messages | length) %}{{ messages[i + 0]['content'] }}<|eos|>{% endfor %}"
    assert opened(folders["chatml"], chat_template=source).encode_chat(CHATS[0]) == "template"
    source = "{% for i in range(messages | length) %}{{ messages[i + 0].tool_calls | tojson }}<|eos|>{% endfor %}"
    calls = [{"role": "user", "content": ""}, {"role": "assistant", "tool_calls": [CALL]}]
    source = source.replace(" | tojson", " and messages[i + 0].tool_calls | tojson")
    assert opened(folders["chatml"], chat_template=source).encode_chat(calls) == "template"


def test_an_end_that_the_template_writes_with_the_next_message_is_learned(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}{% if not loop.first %}{{ '</s>\n' }}{% endif %}"
        "{{ '[INST]' + m.role + ': ' + m.content }}{% endfor %}"
        "{{ '</s>' }}{% if add_generation_prompt %}{{ '\n[INST]assistant:' }}{% endif %}"
    )
    folder = save(tmp_path / "late", byte_level(), source)
    encoded = opened(folder).encode_chat(chat("a", "one", "b", "two"))
    assert learned(folder, encoded) == [" one</s>", " two</s>"]
    assert isinstance(encoded, Encoded)
    assert encoded.warnings == ()


texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cn"]), max_size=20)
pieces = st.sampled_from(["a", " ", "\n", "é", "assistant", "<|im_", "end|>", *SPECIAL])
spoofed = st.lists(pieces, max_size=8).map("".join)


@given(
    st.lists(st.tuples(texts | spoofed, texts | spoofed), min_size=1, max_size=4),
    st.sampled_from(["chatml", "generation", "tools"]),
)
@settings(max_examples=60)
def test_only_the_answers_of_a_chat_are_learned_whatever_the_data_contains(
    folders: dict[str, Path], turns: list[tuple[str, str]], name: str
) -> None:
    messages = chat(*(text for turn in turns for text in turn))
    encoded = opened_once(folders[name]).encode_chat(messages)
    got = learned(folders[name], encoded)
    assert len(got) == len(turns)
    for (_, answer), text in zip(turns, got, strict=True):
        # a token that holds both the header's newline and an answer's first blanks is the answer's
        joined = answer[:1].isspace() and text.startswith("\n" + answer)
        assert text.removeprefix("\n" if joined else "") == answer + "<|im_end|>"
    assert isinstance(encoded, Encoded)
    assert encoded.tokens.tolist().count(SPECIAL.index("<|im_end|>")) == len(messages), "the data's markers are text"


_OPENED: dict[Path, Tokenizer] = {}


def opened_once(folder: Path) -> Tokenizer:
    if folder not in _OPENED:
        _OPENED[folder] = opened(folder)
    return _OPENED[folder]


def test_a_turn_that_is_not_to_be_learned_is_not(folders: dict[str, Path]) -> None:
    messages = chat("a", "one", "b", "two", "c", "three")
    messages[1]["train"] = False
    messages[5]["weight"] = 0
    for name in ("chatml", "generation", "thinking", "inst"):
        got = learned(folders[name], opened_once(folders[name]).encode_chat(messages))
        assert [text.strip() for text in got] == ["two" + END_OF_TURN.get(name, "<|im_end|>")]


def test_all_of_a_chat_is_learned_where_that_is_asked_for(folders: dict[str, Path]) -> None:
    encoded = opened(folders["chatml"], train_on="all").encode_chat(CHATS[0])
    assert isinstance(encoded, Encoded)
    assert encoded.loss_mask is None


def test_thinking_that_a_template_drops_is_not_learned_and_the_last_is(folders: dict[str, Path]) -> None:
    thought = "<think>\nhm\n</think>\n\n"
    messages = chat("a", thought + "one", "b", thought + "two")
    tokenizer = opened_once(folders["thinking"])
    assert learned(folders["thinking"], tokenizer.encode_chat(messages)) == ["one<|im_end|>", thought + "two<|im_end|>"]


AMBIGUOUS = {
    "twice": "{% for m in messages %}{{ m.role }}: {{ m.content }}<|eos|>{% endfor %}{{ messages[-1].content }}",
    "never": "{% for m in messages %}{{ m.role }}<|eos|>{% endfor %}",
    "fails": "{{ raise_exception('no') }}",
    "first": "{{ messages[-1].content }}{% for m in messages %}{{ m.role }}: {{ m.content }}<|eos|>{% endfor %}",
    "undefined": "{{ nothing.at.all }}",
    "unsafe": "{{ messages.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_where_the_answers_are_not_clear_there_is_no_sample(
    folders: dict[str, Path], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    messages = chat("a question", "an answer of some length", "b", "two")
    tokenizer = opened(folders["chatml"], chat_template=AMBIGUOUS[name] + "\n")
    encoded = tokenizer.encode_chat(messages)
    assert encoded == "template"
    assert isinstance(encoded, Because)
    assert encoded.why
    assert len(caplog.records) == 1
    assert "\n" not in caplog.text.strip()


def test_an_error_of_a_template_is_one_short_line(folders: dict[str, Path]) -> None:
    source = "{{ raise_exception(messages[0].content) }}"
    encoded = opened(folders["chatml"], chat_template=source).encode_chat(chat("a\n<|im_end|>" + "x" * 1000, "b"))
    assert isinstance(encoded, Because)
    assert encoded.why == "a <|im_end|>" + "x" * 388


def test_a_marker_in_the_data_is_text_unless_it_may_be_special(folders: dict[str, Path]) -> None:
    text = "a<|im_end|>b"
    for allowed in (False, True):
        tokenizer = opened(folders["chatml"], allow_special=allowed)
        for encoded in (tokenizer.encode(text), tokenizer.encode_chat(chat(text)), tokenizer.encode_pair("q", text)):
            assert isinstance(encoded, Encoded)
            ends = encoded.tokens.tolist().count(SPECIAL.index("<|im_end|>"))
            assert ends - (encoded.loss_mask is not None and not encoded.loss_mask.any()) == allowed


def test_a_marker_that_cannot_be_text_exactly_rejects_the_chat(folders: dict[str, Path]) -> None:
    found = opened_once(folders["sentencepiece"]).encode_chat(chat("a", "b<|im_end|>c"))
    assert found == "special"
    assert isinstance(found, Because)
    assert "set tokenizer: {allow_special: true}" in found.why


@pytest.mark.parametrize("character", "\ufdd0\ufdd1\ufdd2\ufdd3")
def test_a_chat_with_a_character_of_ours_is_rejected(folders: dict[str, Path], character: str) -> None:
    assert opened_once(folders["chatml"]).encode_chat(chat("a", f"b{character}")) == "template"


def test_a_pair_of_chats_learns_the_completion_alone(folders: dict[str, Path]) -> None:
    tokenizer = opened_once(folders["chatml"])
    prompt, completion = chat("a", "earlier", "b"), [{"role": "assistant", "content": "later"}]
    encoded = tokenizer.encode_pair(prompt, completion)
    assert learned(folders["chatml"], encoded) == ["later<|im_end|>"]
    other = tokenizer.encode_pair(prompt, "later")
    assert isinstance(encoded, Encoded)
    assert isinstance(other, Encoded)
    assert other.tokens.tolist() == encoded.tokens.tolist()


@pytest.mark.parametrize("name", ["chatml", "tools", "generation"])
def test_a_tokenizer_of_transformers_writes_chats_as_its_files_do(folders: dict[str, Path], name: str) -> None:
    folder = folders[name]
    kind: Any = import_module("transformers").PreTrainedTokenizerFast
    given = kind(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<|bos|>", eos_token="<|eos|>")
    given.chat_template = (folder / "chat_template.jinja").read_text()
    tokenizer = from_transformers(given)
    assert tokenizer.has_chat_template
    for messages in CHATS:
        found, expected = tokenizer.encode_chat(messages), opened(folder).encode_chat(messages)
        assert isinstance(found, Encoded)
        assert isinstance(expected, Encoded)
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert found.loss_mask is not None
        assert expected.loss_mask is not None
        assert found.loss_mask.tolist() == expected.loss_mask.tolist()
    text = tokenizer.encode("a text")
    assert isinstance(text, Encoded)
    assert text.tokens.tolist() == [*given.encode("a text"), given.eos_token_id]
    given.chat_template = None
    bare = from_transformers(given)
    assert bare.digest != tokenizer.digest
    with pytest.raises(ConfigError, match="got a chat, but found no chat template"):
        bare.encode_chat(CHATS[0])


def test_the_date_of_a_template_is_set_or_its_own(folders: dict[str, Path]) -> None:
    library = Library.from_file(str(folders["headers"] / "tokenizer.json"))

    def text(**more: Any) -> str:
        encoded = opened(folders["headers"], **more).encode_chat(chat("a", "b"))
        assert isinstance(encoded, Encoded)
        return str(library.decode(encoded.tokens.tolist(), skip_special_tokens=False))

    assert "Today: 26 Jul 2024" in text()
    assert "Today: 31 Jan 2026" in text(date="2026-01-31")
    asking = "{{ strftime_now('%Y') }}{{ messages[0].content }}"
    with pytest.raises(ConfigError, match=r"today's date \(strftime_now\).* Set tokenizer\.date"):
        opened(folders["headers"], chat_template=asking)


def test_a_content_in_parts_is_its_text_where_the_template_takes_no_parts(folders: dict[str, Path]) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    walking = "{% for m in messages %}{{ m.role }}{% for p in m.content %}[{{ p.text }}]{% endfor %}<|eos|>{% endfor %}"
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": parts}]
    assert learned(folders["chatml"], opened_once(folders["chatml"]).encode_chat(messages)) == ["hello<|im_end|>"]
    messages[0]["content"] = [{"type": "text", "text": "x"}]
    encoded = opened(folders["chatml"], chat_template=walking).encode_chat(messages)
    assert isinstance(encoded, Encoded)
    library = Library.from_file(str(folders["chatml"] / "tokenizer.json"))
    assert (
        library.decode(encoded.tokens.tolist(), skip_special_tokens=False) == "user[x]<|eos|>assistant[hel][lo]<|eos|>"
    )


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "empty"),
        ("hi", "messages"),
        ([{"role": "user"}, "hi"], "messages"),
        ([{"content": "hi"}], "messages"),
        ([{"role": 1, "content": "hi"}], "messages"),
        ([{"role": "user", "content": 5}], "messages"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "messages"),
        ([{"role": "user", "content": "hi", "train": "no"}], "messages"),
        ([{"role": "user", "content": "hi", "weight": 0.5}], "messages"),
        ([{"role": "user", "content": "hi", "weight": np.array([0, 1])}], "messages"),
    ],
)
def test_a_row_that_is_no_chat_is_rejected_with_a_reason(messages: object, reason: str) -> None:
    assert read_messages(messages) == reason


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("content", "tools", "reason"),
    [
        ("half a pair \ud800", None, "encoding"),
        ("half a pair \ud800 beside <|im_end|>", None, "encoding"),
        ("hi", nested(5000), "template"),
        ("hi", '[{"name": "cut', "tools"),
        ("hi", "[" * 100_000, "tools"),
        ("hi", {"name": "f"}, "tools"),
    ],
)
def test_a_chat_that_cannot_be_written_is_rejected_and_ends_nothing(
    folders: dict[str, Path], content: str, tools: Any, reason: str
) -> None:
    reader = RowReader(SourceSettings("jsonl", path="x"), opened(folders["tools"]))
    assert reader({"messages": chat(content, "x"), "tools": tools}) == reason


@pytest.mark.parametrize("tools", [None, "", [], "[]", "null"])
def test_no_tools_are_none(folders: dict[str, Path], tools: Any) -> None:
    reader = RowReader(SourceSettings("jsonl", path="x"), opened(folders["tools"]))
    encoded = reader.encode({"messages": chat("hi", "x"), "tools": tools})
    assert learned(folders["tools"], encoded) == ["x<|im_end|>"]


def test_a_key_that_is_null_is_not_there() -> None:
    read = read_messages([{"role": "assistant", "content": None, "tool_calls": None, "train": None, "weight": None}])
    assert not isinstance(read, str)
    assert read[0].raw == {"role": "assistant"}
    assert read[0].train


def test_sharegpt_rows_are_chats(folders: dict[str, Path]) -> None:
    rows = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": None}]
    encoded = opened_once(folders["chatml"]).encode_chat(rows)
    assert learned(folders["chatml"], encoded) == ["b<|im_end|>"]


def test_a_broken_template_is_named_when_it_is_opened(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"^tokenizer chat_template: line 1 of the template is not valid Jinja"):
        opened(folders["chatml"], chat_template="{% for %}")


def test_a_chat_without_a_template_is_a_config_error(tmp_path: Path) -> None:
    folder = save(tmp_path / "bare", byte_level(), None)
    tokenizer = opened(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(ConfigError, match=r"no chat template in the tokenizer's folder\. Set tokenizer\.chat_template"):
        tokenizer.encode_chat(chat("a", "b"))
    as_text = opened(folder, chat_template=CHATML).encode_chat(CHATS[0])
    assert learned(folder, as_text) == ["hello there<|im_end|>"]
    (tmp_path / "mine.jinja").write_text(CHATML)
    assert learned(folder, opened(folder, chat_template=str(tmp_path / "mine.jinja")).encode_chat(CHATS[0]))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eos|>", "chat_template": CHATML}))
    assert learned(folder, opened(folder).encode_chat(CHATS[0])) == ["hello there<|im_end|>"]
