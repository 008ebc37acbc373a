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
from typing import Any, TypeVar, cast, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import FieldInfo

Function = TypeVar("Function", bound=Callable[..., Any])
Options = TypeVar("Options", bound=Mapping[str, Any])
_WIDTH = 112


def defaults_of(options: Any) -> dict[str, Any]:
    """Return the default of each argument that the TypedDict ``options`` declares."""
    return {
        name: _field(name, declared).default if _is_struct(declared) else declared
        for name, (_, declared) in _lines(options).items()
    }


def keys_of_struct(options: Any, struct: type[Struct]) -> list[str]:
    """Return the names of the arguments that are keys of ``struct``."""
    return [name for name, (_, declared) in _lines(options).items() if declared is struct]


def documented(options: Any, rest: str = "") -> Callable[[Function], Function]:
    """Return a decorator that gives a function the signature and the docstring with the arguments of ``options``.

    In the docstring, the texts of keys take the place of the line ``options: ...``. The other arguments have their
    texts there. ``rest``: name of further keyword arguments.
    """

    def decorate(function: Function) -> Function:
        """Give ``function`` its signature and its docstring."""
        signature, hints = inspect.signature(function), {name: line[0] for name, line in _lines(options).items()}
        *own, variable = signature.parameters.values()
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
            for name, default in defaults_of(options).items()
        ]
        last = [variable.replace(name=rest)] if rest else []
        function.__signature__ = signature.replace(parameters=[*own, *added, *last])  # type: ignore[attr-defined]
        function.__annotations__ |= hints
        texts = [_text(name, struct) for name, (_, struct) in _lines(options).items() if _is_struct(struct)]
        lines = inspect.cleandoc(function.__doc__ or "").split("\n")
        places = [number for number, line in enumerate(lines) if line.startswith("    options: ")]
        for at in places:
            lines[at : at + 1] = texts
        function.__doc__ = "\n".join(lines)
        return function

    return decorate


def filled(options: type[Options], given: Mapping[str, Any], function: str) -> Options:
    """Return the arguments ``given`` in a call, and the defaults of the others. Raises TypeError for a wrong name."""
    defaults = defaults_of(options)
    for name in given.keys() - defaults.keys():
        raise TypeError(unexpected(name, defaults, function))
    return cast(Options, defaults | dict(given))


def unexpected(name: str, known: Iterable[str], function: str) -> str:
    """Return the error text for the argument ``name``, which ``function`` does not have, with the nearest known one."""
    import difflib  # only an error needs it

    near = difflib.get_close_matches(name, known, 1)
    meant = f". Did you mean {near[0]!r}?" if near else ""
    return f"{function}() got an unexpected keyword argument {name!r}{meant}"


@functools.cache
def _lines(options: Any) -> dict[str, tuple[Any, Any]]:
    """Return (type, default or struct) of each line of ``options``, by the argument's name."""
    return {name: get_args(hint)[:2] for name, hint in get_type_hints(options, include_extras=True).items()}


def _is_struct(declared: object) -> bool:
    """Return whether a struct's key declares an argument's default."""
    return isinstance(declared, type) and issubclass(declared, Struct)


def _text(name: str, struct: type[Struct]) -> str:
    """Return the docstring's lines about an argument that is a key of ``struct``."""
    parts = get_args(_field(name, struct).type)
    description = next(part.description for part in parts if isinstance(part, Meta) and part.description)
    text = f"{name}: {description}.".replace("`", "``")
    return textwrap.fill(text, _WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False)


def _field(name: str, struct: type[Struct]) -> FieldInfo:
    """Return the key ``name`` of a struct."""
    return _fields(struct)[name]


@functools.cache
def _fields(struct: type[Struct]) -> dict[str, FieldInfo]:
    """Return the keys of a struct by name."""
    return {field.name: field for field in msgspec.structs.fields(struct)}
