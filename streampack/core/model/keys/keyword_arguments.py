"""Keyword arguments of public functions: a line of a TypedDict declares the type and the default of each.

Theory of operation. A function takes ``**options: Unpack[...]`` of the TypedDict, which type checkers and editors
read. The second part of a line is the default, or the struct with the configuration key of this name::

    packs: Annotated[int, 1]
    budget: Annotated[int, PlanningKeys]

A key also has the argument's text. ``documented`` gives the function the signature and the docstring that ``help``
shows. ``filled`` adds the defaults in a call.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar, cast, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct

Function = TypeVar("Function", bound=Callable[..., Any])
Options = TypeVar("Options", bound=Mapping[str, Any])
_WIDTH = 112


class Argument(NamedTuple):
    """A keyword argument: its type and default; if it is a key, also the key's struct and text."""

    kind: Any
    default: Any
    struct: type[Struct] | None = None
    text: str = ""


@functools.cache
def arguments_of(options: Any) -> dict[str, Argument]:
    """Return the arguments that the TypedDict ``options`` declares, by name."""
    lines = {name: get_args(hint)[:2] for name, hint in get_type_hints(options, include_extras=True).items()}
    structs = {part for _, part in lines.values() if isinstance(part, type) and issubclass(part, Struct)}
    keys = {(struct, key.name): key for struct in structs for key in msgspec.structs.fields(struct)}
    arguments = {}
    for name, (kind, part) in lines.items():
        arguments[name] = Argument(kind, part)
        if isinstance(part, type):
            key = keys[part, name]
            texts = (meta.description for meta in get_args(key.type) if isinstance(meta, Meta) and meta.description)
            arguments[name] = Argument(kind, key.default, part, next(texts).replace("`", "``"))
    return arguments


def defaults_of(options: Any) -> dict[str, Any]:
    """Return the default of each argument that the TypedDict ``options`` declares."""
    return {name: argument.default for name, argument in arguments_of(options).items()}


def documented(options: Any, rest: str = "") -> Callable[[Function], Function]:
    """Return a decorator that gives a function the signature and the docstring with the arguments of ``options``.

    In the docstring, the texts of keys take the place of the line ``options: ...``. The other arguments have their
    texts there. ``rest``: name of further keyword arguments.
    """

    def decorate(function: Function) -> Function:
        """Give ``function`` its signature and its docstring."""
        signature, arguments = inspect.signature(function), arguments_of(options)
        *own, variable = signature.parameters.values()
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=argument.default, annotation=argument.kind)
            for name, argument in arguments.items()
        ]
        last = [variable.replace(name=rest)] if rest else []
        function.__signature__ = signature.replace(parameters=[*own, *added, *last])  # type: ignore[attr-defined]
        function.__annotations__ |= {name: argument.kind for name, argument in arguments.items()}
        indents: Any = {"initial_indent": " " * 4, "subsequent_indent": " " * 8, "break_on_hyphens": False}
        texts = [
            textwrap.fill(f"{key}: {argument.text}.", _WIDTH, **indents)
            for key, argument in arguments.items()
            if argument.text
        ]
        lines = inspect.cleandoc(function.__doc__ or "").split("\n")
        for at in [number for number, line in enumerate(lines) if line.startswith("    options: ")]:
            lines[at : at + 1] = texts
        function.__doc__ = "\n".join(lines)
        return function

    return decorate


def filled(options: type[Options], values: Mapping[str, Any], function: str) -> Options:
    """Return the arguments ``values`` in a call, and the defaults of the others. Raises TypeError for a wrong name."""
    defaults = defaults_of(options)
    for name in values:
        if name not in defaults:
            raise TypeError(unexpected(name, defaults, function))
    return cast(Options, defaults | dict(values))


def unexpected(name: str, names: Iterable[str], function: str) -> str:
    """Return the error text for the argument ``name``, which ``function`` does not have, with the nearest known one."""
    import difflib  # only an error needs it

    near = difflib.get_close_matches(name, names, 1)
    meant = f". Did you mean {near[0]!r}?" if near else ""
    return f"{function}() got an unexpected keyword argument {name!r}{meant}"
