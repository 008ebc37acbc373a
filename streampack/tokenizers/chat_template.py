"""Chat templates: Jinja as model authors write it, in a sandbox.

Theory of operation. Templates render as in transformers: ``trim_blocks``, ``lstrip_blocks``, loop controls, ``tojson``
without escapes for letters, ``raise_exception``, ``{% generation %}`` blocks. One thing differs: ``strftime_now``
returns a date from the settings, because the same data must give the same tokens tomorrow. Without a date in the
settings it is undefined. Many templates then use a date of their own; a template that needs the function raises
ConfigError.

A template is untrusted code. It runs in Jinja's immutable sandbox, and any exception rejects only the chat.
"""

import json
from collections.abc import Callable, Mapping
from datetime import date
from typing import Any, NoReturn

from jinja2 import TemplateSyntaxError, UndefinedError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from streampack.errors import ConfigError
from streampack.tokenizers.chat import BEGIN, END, TemplateError


class ChatTemplate:
    """A compiled chat template.

    ``source``: the template's text. ``variables``: values that it sees beside the messages, such as ``bos_token``. The
    date ``today`` is what ``strftime_now`` returns. Raises ConfigError if ``source`` is not a valid template.
    """

    def __init__(self, source: str, variables: Mapping[str, str], today: date | None) -> None:
        self._marking = False
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["mark_generation"] = self._generation
        if today is not None:
            environment.globals["strftime_now"] = lambda form: today.strftime(form)
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"tokenizer chat_template: line {error.lineno} of the template is not valid Jinja ({error}). Correct "
                "the template"
            ) from error
        self._variables = dict(variables)
        self.has_generation = any(
            isinstance(call.node, nodes.Name) and call.node.name == "mark_generation"
            for call in tree.find_all(nodes.Call)
        )
        self.header = self._find_header()
        self._takes_parts = self._probe_parts()

    def render(self, messages: list[dict[str, Any]], tools: Any, *, prompt: bool = False, mark: bool = False) -> str:
        """Return the text of a chat: see ``chat.Template``. Raises ConfigError if the template needs today's date."""
        if not self._takes_parts:
            messages = [_with_text_content(message) for message in messages]
        self._marking = mark
        try:
            return self._template.render(
                **self._variables, messages=messages, tools=tools, documents=None, add_generation_prompt=prompt
            )
        except UndefinedError as error:
            if "strftime_now" in str(error):
                raise ConfigError(
                    "tokenizer chat_template: the template asks for today's date (strftime_now), but the same data "
                    "must give the same tokens on every day. Set tokenizer.date to a fixed date"
                ) from error
            raise TemplateError(str(error)) from error
        except Exception as error:  # raised by the template's code or the sandbox
            raise TemplateError(f"{type(error).__name__}: {error}") from error

    def _generation(self, caller: Callable[[], str]) -> str:
        """Return the text of a generation block, between BEGIN and END while marking."""
        return BEGIN + caller() + END if self._marking else caller()

    def _find_header(self) -> str:
        """Return the text that the generation prompt adds after a message; empty if there is none."""
        question = [{"role": "user", "content": "x"}]
        self._takes_parts = True
        try:
            without, with_ = self.render(question, None), self.render(question, None, prompt=True)
        except TemplateError:
            return ""
        return with_[len(without) :] if with_.startswith(without) else ""

    def _probe_parts(self) -> bool:
        """Return whether the template renders a content that is a list of parts, instead of printing the list."""
        try:
            text = self.render([{"role": "user", "content": [{"type": "text", "text": "probe"}]}], None)
        except TemplateError:
            return False
        return "probe" in text and "'type'" not in text and '"type"' not in text


class _Generation(Extension):
    """Jinja extension for ``{% generation %}`` blocks, which mark text that the model generates."""

    tags = {"generation"}  # noqa: RUF012 - as Extension declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Turn a block into a call of ``mark_generation``."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = nodes.Call(nodes.Name("mark_generation", "load"), [], [], None, None)
        return nodes.CallBlock(call, [], [], body).set_lineno(line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return ``value`` as JSON: the filter ``tojson`` as transformers defines it."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    """Raise TemplateError. Templates call this function as ``raise_exception``."""
    raise TemplateError(message)


def _with_text_content(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is one text, joined from its parts."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}
