"""Extensions of griffe, which reads the source: sections of examples, and arguments that a TypedDict declares."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Reads ``Example:`` as ``Examples:``; griffe would take it for a note, and its code for prose."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object before anyone parses it."""
        if isinstance(obj, griffe.Function) and any("documented(" in str(each.value) for each in obj.decorators):
            _take_arguments(obj)
        if obj.docstring:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)


def _take_arguments(function: griffe.Function) -> None:
    """Give a function the docstring and the arguments that it has once it is imported."""
    module, _, name = function.path.rpartition(".")
    imported = getattr(importlib.import_module(module), name)
    function.docstring = griffe.Docstring(imported.__doc__, parent=function, lineno=function.lineno)
    function.parameters = griffe.Parameters(*(
        griffe.Parameter(
            each.name,
            annotation=inspect.formatannotation(each.annotation).strip("'"),
            kind=griffe.ParameterKind[each.kind.name.lower()],
            default=None if each.default is each.empty else repr(each.default),
        )
        for each in inspect.signature(imported).parameters.values()
    ))  # fmt: skip
