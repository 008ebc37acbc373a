"""The chat templates that TRL installs, a tokenizer for each of them, and the chats that tests render with them."""

import re
from datetime import date
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

FOLDER = Path(str(import_module("trl").__file__)).parent / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
TODAY = date.today().isoformat()
# Tokens in the way that the tokenizers of these models spell them: <|x|>, <|x>, <x|>, <｜x｜>, [X], <x_of_y>.
_SPECIAL = re.compile(
    r"<[|｜][A-Za-z0-9_▁\"]+[|｜]?>|<[A-Za-z_\"]+\|>|\[/?(?:INST|gMASK)\]|<sop>|</?s>|</?think>"
    r"|<(?:start|end)_of_[a-z]+>|<image>"
)
_ADDED = re.compile(r"</?(?:tool_call|tool_response|arg_key|arg_value)>")
_TEXTS = [
    "system user assistant tool\n",
    "the quick brown fox jumps over the lazy dog\n\n",
    "def f(x):\n    return x\n",
]


def source_of(name: str) -> str:
    """The text of a template."""
    return (FOLDER / f"{name}.jinja").read_text()


@cache
def theirs(name: str) -> Any:
    """A tokenizer of transformers with a template of TRL and the special tokens that it writes."""
    source = source_of(name)
    special = ["<|bos|>", "<|eos|>", *sorted(set(_SPECIAL.findall(source)))]
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    library.train_from_iterator(_TEXTS * 5, trainer)
    library.add_tokens(sorted(set(_ADDED.findall(source)) - set(special)))
    kind: Any = import_module("transformers").PreTrainedTokenizerFast
    made = kind(tokenizer_object=library, bos_token="<|bos|>", eos_token="<|eos|>")
    made.chat_template = source
    return made


def say(role: str, content: Any = None, **more: Any) -> dict[str, Any]:
    """A message."""
    return {"role": role, **({} if content is None else {"content": content}), **more}


def turns(*texts: str) -> list[dict[str, Any]]:
    """A chat of questions and answers in turn."""
    return [say(("user", "assistant")[at % 2], text) for at, text in enumerate(texts)]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """A tool call."""
    return {"type": "function", "id": f"call_{name}", "function": {"name": name, "arguments": arguments}}


def tool(name: str) -> dict[str, Any]:
    """A tool."""
    properties = {"city": {"type": "string", "description": "A city"}}
    parameters = {"type": "object", "properties": properties, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "description": f"The {name}", "parameters": parameters}}


ASK = say("user", "rain?")
RAIN = call("weather", city="Köln", days=2)
SUN = say("tool", '{"sun": true}', name="weather", tool_call_id="call_weather")
TOOLS = [tool("weather"), tool("time")]
THOUGHT = "<think>\nI think\n</think>\n\n"
CHATS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": turns("hi", "hello there")},
    "four turns": {"messages": turns("hi", "hello", "and?", "so", "why?", "because", "ok", "bye")},
    "many turns": {"messages": turns(*(f"turn {at}" for at in range(40)))},
    "system": {"messages": [say("system", "be kind"), *turns("hi", "hello", "and?", "so")]},
    "empty system": {"messages": [say("system", ""), *turns("hi", "hello")]},
    "late system": {"messages": [*turns("hi", "hello"), say("system", "be brief"), *turns("and?", "so")]},
    "developer": {"messages": [say("developer", "be kind"), *turns("hi", "hello")]},
    "system and developer": {
        "messages": [say("system", "be kind"), say("developer", "be brief"), *turns("hi", "hello")]
    },
    "reasoning_content": {"messages": [say("user", "hi"), say("assistant", "hello", reasoning_content="I think")]},
    "thinking": {"messages": [say("user", "hi"), say("assistant", "hello", thinking="I think")]},
    "reasoning": {"messages": [say("user", "hi"), say("assistant", "hello", reasoning="I think")]},
    "two names of reasoning": {
        "messages": [say("user", "hi"), say("assistant", "hello", thinking="one", reasoning_content="two")]
    },
    "null reasoning": {
        "messages": [say("user", "hi"), {**say("assistant", "hello", thinking="one"), "reasoning_content": None}]
    },
    "reasoning in each turn": {
        "messages": [
            say("user", "hi"), say("assistant", "hello", reasoning="first"),
            say("user", "and?"), say("assistant", "so", reasoning="second"),
        ]
    },
    "think tags": {"messages": turns("hi", f"{THOUGHT}hello")},
    "think tags in each turn": {"messages": turns("hi", f"{THOUGHT}hello", "and?", f"{THOUGHT}so")},
    "half a think tag": {"messages": turns("hi", "I think</think>hello", "and?", "<think>so")},
    "null content": {"messages": [ASK, {**say("assistant", tool_calls=[RAIN]), "content": None}], "tools": TOOLS},
    "no content": {"messages": [ASK, say("assistant", tool_calls=[RAIN])], "tools": TOOLS},
    "null tool calls": {"messages": [say("user", "hi"), {**say("assistant", "hello"), "tool_calls": None}]},
    "tools": {"messages": turns("hi", "hello"), "tools": TOOLS},
    "tools and a system": {"messages": [say("system", "be kind"), *turns("hi", "hello")], "tools": TOOLS},
    "a call and its result": {
        "messages": [ASK, say("assistant", "", tool_calls=[RAIN]), SUN, say("assistant", "no rain")], "tools": TOOLS,
    },
    "a call with words": {
        "messages": [ASK, say("assistant", "I look", tool_calls=[RAIN]), SUN, say("assistant", "no rain")],
        "tools": TOOLS,
    },
    "a call with reasoning": {
        "messages": [
            ASK, say("assistant", "", tool_calls=[RAIN], reasoning_content="I look"), SUN,
            say("assistant", "no rain", reasoning_content="sun"),
        ],
        "tools": TOOLS,
    },
    "calls one after another": {
        "messages": [
            say("system", "be kind"), ASK, say("assistant", "", tool_calls=[RAIN]), SUN,
            say("assistant", "", tool_calls=[call("time", city="Köln")]),
            say("tool", "noon", name="time", tool_call_id="call_time"),
            say("assistant", "no rain"), *turns("thanks", "welcome"),
        ],
        "tools": TOOLS,
    },
    "two calls at once": {
        "messages": [
            ASK, say("assistant", "", tool_calls=[RAIN, call("time", city="Köln")]), SUN,
            say("tool", "noon", name="time", tool_call_id="call_time"), say("assistant", "no rain"),
        ],
        "tools": TOOLS,
    },
    "arguments as text": {
        "messages": [
            ASK,
            say("assistant", "", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]),
            SUN, say("assistant", "no rain"),
        ]
    },
    "a tool result without a call": {"messages": [ASK, SUN, say("assistant", "no rain")]},
    "empty answer": {"messages": turns("hi", "")},
    "empty answer between": {"messages": turns("hi", "", "and?", "so")},
    "empty question": {"messages": turns("", "hello")},
    "white space": {"messages": turns("  hi\n", "\n hello \n\n", "\t", "  so  ")},
    "unicode": {"messages": turns("naïve 😀 日本", "größe é é 😀😀\u2028x", "e\u0301", "שלום")},
    "markup": {"messages": turns("<b>a & b</b>", "{{ x }} {% if y %} Assistant: <tools>")},
    "parts": {
        "messages": [say("user", [{"type": "text", "text": "hi"}]), say("assistant", [{"type": "text", "text": "a"}])]
    },
    "two parts": {
        "messages": [
            say("user", [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]),
            say("assistant", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
        ]
    },
    "two answers": {"messages": [*turns("hi", "hello"), say("assistant", "again")]},
    "two questions": {"messages": [say("user", "hi"), *turns("there", "hello")]},
    "begins with an answer": {"messages": [say("assistant", "hello"), *turns("hi", "you")]},
    "ends with a question": {"messages": turns("hi", "hello", "and?")},
    "the same text": {"messages": turns("same", "same", "same", "same")},
    "thinking off": {"messages": turns("hi", "hello", "and?", "so"), "kwargs": {"enable_thinking": False}},
    "thinking on": {
        "messages": [say("user", "hi"), say("assistant", "hello", reasoning_content="x")],
        "kwargs": {"enable_thinking": True},
    },
    "an unknown variable": {"messages": turns("hi", "hello"), "kwargs": {"no_such_variable": 1}},
    "an unknown role": {"messages": [say("user", "hi"), say("critic", "hm"), say("assistant", "hello")]},
    "an answer of a model": {"messages": [say("user", "hi"), say("model", "hello")]},
}  # fmt: skip
