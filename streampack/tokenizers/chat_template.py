"""Chat templates: Jinja as model authors write it, in a sandbox.

Theory of operation. Templates render as in transformers: ``trim_blocks``, ``lstrip_blocks``, loop controls, ``tojson``
without escapes for letters, ``raise_exception``, ``{% generation %}`` blocks. One thing differs: ``strftime_now``
returns a date from the settings, because the same data must give the same tokens tomorrow. Without a date in the
settings it is undefined. Many templates then use a date of their own; a template that needs the function raises
ConfigError.

A second rendering can mark which text a template writes for which message. Each loop of the template gets calls that
note its loop variable. If that is one of the messages, the text of the loop's body belongs to the message. In a loop
over numbers, the body's text belongs to the message with that number, or to the first that it sets a variable to.

A template is untrusted code. It runs in Jinja's immutable sandbox, and any exception rejects only the chat.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from functools import partial
from typing import Any, NoReturn

from jinja2 import Environment, TemplateSyntaxError, UndefinedError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from streampack.errors import ConfigError
from streampack.tokenizers.chat_marks import BEGIN, END, LEAVE, TemplateError, entering

_NO_MESSAGE = "messages"
"""A variable that does not hold a message."""


class ChatTemplate:
    """A compiled chat template.

    ``source``: the template's text. ``variables``: values that it sees beside the messages, such as ``bos_token``. The
    date ``today`` is what ``strftime_now`` returns. Raises ConfigError if ``source`` is not a valid template.

    - ``has_generation``: whether the template marks answers with ``{% generation %}`` blocks.
    - ``reads``: names of the variables that the template reads, such as ``tools`` and ``enable_thinking``.
    - ``searched``: texts that the template searches for in values, such as ``</think>``.
    - ``header``: text that the generation prompt adds after a question; may be empty.
    - ``eos_token``: the variable of this name; may be empty.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], today: date | None) -> None:
        self._marks: _Marks | None = None
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["mark_generation"] = self._generation
        for name in ("enter", "assign", "item", "leave"):
            environment.filters[f"mark_{name}"] = partial(self._mark, name)
        if today is not None:
            environment.globals["strftime_now"] = lambda form: today.strftime(form)
        try:
            template = environment.parse(source)
            self.reads = frozenset(meta.find_undeclared_variables(template))
            self.searched = frozenset(_searched(template))
            _mark_loops(template, environment)
            self._template = environment.from_string(template)
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"tokenizer chat_template: line {error.lineno} of the template is not valid Jinja ({error}). Correct "
                "the template"
            ) from error
        self._variables = dict(variables)
        self.eos_token = str(variables.get("eos_token") or "")
        self.has_generation = any(name.name == "mark_generation" for name in template.find_all(nodes.Name))
        self._content: Callable[[dict[str, Any]], dict[str, Any]] = _as_it_is
        self._content = self._find_content()
        self.header = self._find_header()

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: Any,
        variables: Mapping[str, Any] | None = None,
        *,
        prompt: bool = False,
        mark: bool = False,
    ) -> str:
        """Return the text of a chat.

        ``prompt``: append the generation prompt. ``mark``: write the marks of ``chat_marks``. Raises TemplateError, or
        ConfigError if the template needs today's date.
        """
        messages = [self._content(message) for message in messages]
        self._marks = _Marks(messages) if mark else None
        names = {**self._variables, "documents": None, **(variables or {})}
        try:
            return self._template.render(**names, messages=messages, tools=tools, add_generation_prompt=prompt)
        except TemplateError:
            raise
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
        return BEGIN + caller() + END if self._marks else caller()

    def _mark(self, name: str, *values: object) -> str:
        """Return the mark of a loop, see ``_Marks``; empty unless marking."""
        return str(getattr(self._marks, name)(*values)) if self._marks else ""

    def _find_header(self) -> str:
        """Return the text that the generation prompt adds after a message; empty if there is none."""
        question = [{"role": "user", "content": "x"}]
        try:
            without, with_ = self.render(question, None), self.render(question, None, prompt=True)
        except TemplateError:
            return ""
        return with_[len(without) :] if with_.startswith(without) else ""

    def _find_content(self) -> Callable[[dict[str, Any]], dict[str, Any]]:
        """Return how to pass a message: templates take its content as a text, as a list of parts, or as both."""
        if not self._writes([{"type": "text", "text": "probe"}]):
            return _with_text
        return _as_it_is if self._writes("probe") else _with_parts

    def _writes(self, content: object) -> bool:
        """Return whether the template writes the content ``probe`` of a question, instead of printing a list."""
        try:
            text = self.render([{"role": "user", "content": content}], None)
        except TemplateError:
            return False
        return "probe" in text and "'type'" not in text and '"type"' not in text


class _Marks:
    """Marks of one rendering: each method returns the text that a template writes to mark a message's text.

    ``messages``: the messages that the template gets. A value is one of them if it is the same object.
    """

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self._numbers = {id(message): number for number, message in enumerate(messages)}
        self._loops: list[bool] = []
        """For each running loop, outermost first: True if its body has entered a message."""

    def enter(self, item: object) -> str:
        """Begin the body of a loop whose variable is ``item``."""
        self._loops.append(False)
        return self.assign(item)

    def assign(self, item: object) -> str:
        """Set a variable to ``item`` in the body of a loop."""
        number = self._numbers.get(id(item))
        if number is None or self._loops[-1]:
            return ""
        self._loops[-1] = True
        return entering(number)

    def item(self, values: object, number: object) -> str:
        """Read ``values[number]`` in the body of a loop over numbers."""
        is_item = isinstance(values, list) and isinstance(number, int) and 0 <= number < len(values)
        return self.assign(values[number]) if is_item else ""  # type: ignore[index]

    def leave(self, _item: object) -> str:
        """End the body of a loop."""
        return LEAVE if self._loops.pop() else ""


class _Generation(Extension):
    """Jinja extension for ``{% generation %}`` blocks, which mark text that the model generates."""

    tags = {"generation"}  # noqa: RUF012 - as Extension declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Turn a block into a call of ``mark_generation``."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = nodes.Call(nodes.Name("mark_generation", "load"), [], [], None, None)
        return nodes.CallBlock(call, [], [], body).set_lineno(line)


def _mark_loops(template: nodes.Template, environment: Environment) -> None:
    """Make each loop that writes text write ``mark_enter``, ``mark_assign`` and ``mark_leave``, too: see ``_Marks``."""
    writing = (nodes.Output, nodes.CallBlock, nodes.FilterBlock)
    for loop in [loop for loop in template.find_all(nodes.For) if any(loop.find_all(writing))]:
        name = loop.target.name if isinstance(loop.target, nodes.Name) else _NO_MESSAGE
        items = [_mark_of("item", values, loop, name) for values in _indexed(loop, name)]
        marks = [_mark_of("enter", name, loop), *items]
        _mark_block(loop.body)
        loop.body[:0] = marks
        loop.body.append(_mark_of("leave", _NO_MESSAGE, loop))
    template.set_environment(environment)


def _indexed(loop: nodes.For, number: str) -> list[str]:
    """Return the names of ``values`` in ``values[number]``, where ``number`` is the variable of a loop."""
    indexings = [(item.node, item.arg) for item in loop.find_all(nodes.Getitem)]
    pairs = [
        (base.name, at.name) for base, at in indexings if isinstance(base, nodes.Name) and isinstance(at, nodes.Name)
    ]
    return sorted({name for name, at in pairs if at == number})


def _mark_block(body: list[nodes.Node]) -> None:
    """Add marks after assignments, and before ``continue`` and ``break``, in a block of a loop."""
    for node in list(body):
        place = body.index(node)
        if isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name):
            body.insert(place + 1, _mark_of("assign", node.target.name, node))
        elif isinstance(node, nodes.Continue | nodes.Break):
            body.insert(place, _mark_of("leave", _NO_MESSAGE, node))
        elif isinstance(node, nodes.If):
            for block in (node.body, node.else_, *(branch.body for branch in node.elif_)):
                _mark_block(block)


def _mark_of(kind: str, name: str, at: nodes.Node, *arguments: str) -> nodes.Node:
    """Return a node that writes a mark for a variable. It is a filter, because a row's variables cannot replace it."""
    value, *others = (nodes.Name(word, "load") for word in (name, *arguments))
    return nodes.Output([nodes.Filter(value, f"mark_{kind}", others, [], None, None)]).set_lineno(at.lineno)


def _searched(template: nodes.Template) -> Iterator[str]:
    """Yield texts that a template looks for: X in ``X in value``, ``value.split(X)`` and ``value | replace(X, Y)``."""
    for compare in template.find_all(nodes.Compare):
        if any(operand.op.endswith("in") for operand in compare.ops) and isinstance(compare.expr, nodes.Const):
            yield str(compare.expr.value)
    calls = [call.args for call in template.find_all(nodes.Call) if isinstance(call.node, nodes.Getattr)]
    filters = [node.args for node in template.find_all(nodes.Filter)]
    for values in (*calls, *filters):
        yield from (str(value.value) for value in values if isinstance(value, nodes.Const))


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


def _as_it_is(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message."""
    return message


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is one text, joined from its parts."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "".join(part.get("text", "") for part in content)}


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is a list of parts."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
