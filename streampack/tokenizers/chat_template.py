"""Chat templates: Jinja as model authors write it, in a sandbox.

Theory of operation. Compatible with what transformers does: ``trim_blocks``, ``lstrip_blocks``, loop controls,
``tojson`` that leaves letters alone, ``raise_exception``, ``{% generation %}`` blocks. One thing is not:
``strftime_now`` gives a date that is set, since the same data must give the same tokens tomorrow. Where none is set
it is undefined, for which many templates have a date of their own; a template that needs it is refused.

A template is code from a stranger: it runs in Jinja's immutable sandbox, and whatever it raises is this chat's.
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
    """A compiled template.

    ``variables``: what it sees beside the messages, such as ``bos_token``. ``today``: what ``strftime_now`` says.
    Raises ConfigError when ``source`` is no template.
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
            raise ConfigError(f"tokenizer chat_template: is no Jinja template: line {error.lineno}: {error}") from error
        self._variables = dict(variables)
        self.has_generation = any(
            isinstance(call.node, nodes.Name) and call.node.name == "mark_generation"
            for call in tree.find_all(nodes.Call)
        )
        self.header = self._find_header()
        self._takes_parts = self._probe_parts()

    def render(self, messages: list[dict[str, Any]], tools: Any, *, prompt: bool = False, mark: bool = False) -> str:
        """See chat.Template. Raises ConfigError when the template cannot do without today's date."""
        if not self._takes_parts:
            messages = [_flat(message) for message in messages]
        self._marking = mark
        try:
            return self._template.render(
                **self._variables, messages=messages, tools=tools, documents=None, add_generation_prompt=prompt
            )
        except UndefinedError as error:
            if "strftime_now" in str(error):
                raise ConfigError(
                    "tokenizer chat_template: asks for today's date (strftime_now), and the same data must give the "
                    "same tokens tomorrow: set tokenizer.date to the date that it shall see"
                ) from error
            raise TemplateError(str(error)) from error
        except Exception as error:  # a template's: its own raise_exception, a type, the sandbox
            raise TemplateError(f"{type(error).__name__}: {error}") from error

    def _generation(self, caller: Callable[[], str]) -> str:
        return BEGIN + caller() + END if self._marking else caller()

    def _find_header(self) -> str:
        question = [{"role": "user", "content": "x"}]
        self._takes_parts = True
        try:
            without, with_ = self.render(question, None), self.render(question, None, prompt=True)
        except TemplateError:
            return ""
        return with_[len(without) :] if with_.startswith(without) else ""

    def _probe_parts(self) -> bool:
        """Whether it walks a content that is a list of parts, instead of printing the list."""
        try:
            text = self.render([{"role": "user", "content": [{"type": "text", "text": "probe"}]}], None)
        except TemplateError:
            return False
        return "probe" in text and "'type'" not in text and '"type"' not in text


class _Generation(Extension):
    """``{% generation %}``: what the model itself wrote."""

    tags = {"generation"}  # noqa: RUF012 - as Extension declares it

    def parse(self, parser: Parser) -> nodes.Node:
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
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _flat(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}
