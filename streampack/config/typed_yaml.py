"""Reads a YAML file and converts it to a typed struct, with errors of the form "path: got X, expected Y".

YAML would silently drop the first value of a key that is written twice, so such a key is an error. Then msgspec checks
the tree against a struct, and its messages are rewritten. The error for an unknown key lists the known ones. This
module does not know the keys of any file.
"""

from __future__ import annotations

import difflib
import os
import re
from decimal import Decimal
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import msgspec
import yaml

from streampack.errors import ConfigError

T = TypeVar("T")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*$")
_AMOUNTS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_AMOUNT = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+]?[0-9]{1,2})?)\s*([kKMGBT]?)\s*$")
_MAX_AMOUNT = 1 << 62
_MAX_BYTES = 1 << 62
_HOME = re.compile(r"(^|(?:^|,)(?:file|ipc)://)(~[^/,]*)(?=/)")
_TAB = re.compile(r" *\t")
_INDEX = re.compile(r"\[(\d+)\]")
_AT = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_MISSING = re.compile(r"Object missing required field `(.*)`")
_ENUM = re.compile(r"Invalid enum value (.*)")
_KIND = re.compile(r"Expected `([^`]*)`(.*?)(?:, got `(.*)`)?")
_WORDS = {"object": "a mapping", "array": "a list", "str": "text", "int": "a whole number", "float": "a number",
          "bool": "true or false", "null": "nothing"}  # fmt: skip
_IN_YAML = {None: "nothing", True: "true", False: "false"}
_UNKNOWN_VALUE = object()


def read_tree(path: str | Path) -> Any:
    """Return the unchecked contents of a YAML file. Raises ConfigError if it cannot be read or is not YAML."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path}: cannot be read: {reason}") from None
    return parse_tree(text, path)


def parse_tree(text: str, path: str | Path) -> Any:
    """Return the unchecked contents of YAML text; ``path`` is for messages. Raises ConfigError."""
    try:
        content = with_home(msgspec.yaml.decode(text))
        twice = _duplicate_key_error(yaml.compose(text, Loader=yaml.SafeLoader))
    except (msgspec.DecodeError, ValueError, yaml.YAMLError) as error:
        if tabbed := _tabbed_line(text):
            raise ConfigError(
                f"{path}: got a tab at the beginning of line {tabbed}, expected spaces. YAML allows no tabs there"
            ) from None
        first = " ".join(str(error).replace('in "<unicode string>", ', "at ").split())
        raise ConfigError(f"{path}: got text that is not valid YAML: {first}") from None
    except RecursionError:
        raise ConfigError(f"{path}: got keys that are nested too deeply, expected only a few levels") from None
    if twice:
        raise ConfigError(f"{path}: {twice}")
    return {} if content is None else content


def _tabbed_line(text: str) -> int:
    """Return the number of the line whose tab at the beginning makes the YAML text invalid; 0 if it is not a tab."""
    try:
        yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        marks = [mark.line for mark in (error.problem_mark, error.context_mark) if mark is not None]
        lines = text.splitlines()
        return next((n + 1 for n in marks if n < len(lines) and _TAB.match(lines[n])), 0)
    except (yaml.YAMLError, RecursionError):
        pass
    return 0


def with_home(content: Any) -> Any:
    """Return plain values with the home folder in place of ``~`` where a text begins with ``~/`` or ``~USER/``.

    A text may also be an address, such as ``file://~/run.json``. To name a folder ``~``, write ``./~/``.
    """
    if isinstance(content, str):
        return _HOME.sub(lambda match: match[1] + os.path.expanduser(match[2]), content)
    if isinstance(content, dict):
        return {key: with_home(value) for key, value in content.items()}
    return [with_home(value) for value in content] if isinstance(content, list) else content


def _duplicate_key_error(node: yaml.Node | None, path: str = "") -> str:
    """Return the error text for the first key that a mapping has twice; empty if there is none."""
    if not isinstance(node, yaml.MappingNode):
        return ""
    lines: dict[str, int] = {}
    for key, value in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in lines:
            seen = f"lines {lines[name]} and {line}"
            return f"{path}{name}: got this key twice, in {seen}, expected each key once. Merge the two entries"
        lines[name] = line
        if twice := _duplicate_key_error(value, f"{path}{name}."):
            return twice
    return ""


def convert(content: Any, kind: type[T], where: str = "configuration") -> T:
    """Convert plain dictionaries and lists to the struct ``kind``. Raises ConfigError with the path of the wrong key.

    ``where``: start of the error's text, such as the name of the file.
    """
    try:
        content = with_home(content)
        return msgspec.convert(content, kind)
    except RecursionError:
        raise ConfigError(f"{where}: got values that are nested too deeply, expected only a few levels") from None
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{where}: {explained(error, kind, content)}") from None


def explained(error: Exception, kind: Any, content: Any, within: str = "") -> str:
    """Rewrite an error of msgspec as "path: got X, expected Y".

    Args:
        error: The error of converting ``content`` to the struct ``kind``.
        kind: The struct.
        content: The plain dictionaries and lists.
        within: Path to put before the error's own.
    """
    text = str(error)
    at = _AT.search(text)
    path, problem = (_INDEX.sub(r".\1", at[1]), text[: at.start()]) if at else ("", text)
    if unknown := _UNKNOWN.fullmatch(problem):
        struct = _type_at(kind, path, mapping=True)
        keys = [field.encode_name for field in _fields(struct)]
        near = difflib.get_close_matches(unknown[1], keys, 1)
        hint = getattr(struct, "hints", {}).get(unknown[1]) or (near and f"Did you mean '{near[0]}'?")
        meant = f". {hint}" if hint else ""
        problem = f"got the unknown key '{unknown[1]}', expected one of: {', '.join(keys)}{meant}"
    elif missing := _MISSING.fullmatch(problem):
        problem = f"got no key '{missing[1]}', which is required. Add the key"
    elif enum := _ENUM.fullmatch(problem):
        problem = f"got {enum[1]}, expected one of: {', '.join(map(str, get_args(_type_at(kind, path))))}"
        if to_write := _OTHER_KEYS.get((path.rpartition(".")[2], enum[1].strip("'"))):
            problem += f". Write `{to_write}`"
    elif wrong := _KIND.fullmatch(problem):
        of_key = " in `$" in text
        value = _UNKNOWN_VALUE if of_key else _value_at(content, _with_entry_name(path, kind, content))
        problem = ("a key: " if of_key else "") + _wrong_kind(wrong, value, _EXAMPLES.get(path, ""))
        if wrong[1] == "object" and path and (to_write := _mapping_of(_type_at(kind, path, mapping=True), path, value)):
            problem += f". Write `{to_write}`"
    else:
        problem = problem[:1].lower() + problem[1:]
    place = ".".join(filter(None, (within, path and _with_list_names(_with_entry_name(path, kind, content), content))))
    return f"{place}: {problem}" if place else problem


_OTHER_KEYS = {("packer", "joint"): "balance: {kind: joint}"}
"""The line to write for a key and a value that belongs to another key."""
_EXAMPLES = {
    "listen.producers": "tcp://0.0.0.0:7401",
    "listen.trainers": "tcp://0.0.0.0:7402",
    "listen.http": "127.0.0.1:7400",
}
"""Example values for keys whose text is easily written as a number, by path."""


def _wrong_kind(match: re.Match[str], value: Any, example: str) -> str:
    """Return the text for a value of a wrong type, such as ``got '8k', expected a whole number``.

    ``match``: match of msgspec's message, with the type expected, its bound, and the type of the value if it differs.
    """
    expected = " or ".join(_WORDS.get(word, word) for word in match[1].split(" | "))
    if value is _UNKNOWN_VALUE or (match[3] and isinstance(value, dict | list)):
        got = f"got {_WORDS.get(match[3], match[3])}, " if match[3] else ""
    else:
        got = f"got {_IN_YAML[value] if value is None or isinstance(value, bool) else repr(value)[:80]}, "
    if example:
        return f"{got}expected text such as {example}"
    quote = ". Put the value in quotes" if match[1] == "str" and match[3] in ("int", "float", "bool") else ""
    return f"{got}expected {expected}{match[2]}{quote}"


def _mapping_of(kind: Any, path: str, value: Any) -> str:
    """Return the line to write where a mapping of type ``kind`` was expected for ``value``; empty if none is likely."""
    key = path.rpartition(".")[2]
    if isinstance(value, list):
        names = ", ".join(f"{name}: {{}}" for name in value if isinstance(name, str))
        return f"{key}: {{{names}}}" if names and get_origin(kind) is dict else ""
    if not isinstance(value, int | float | str) or isinstance(value, bool) or not hasattr(kind, "__struct_fields__"):
        return ""
    name = _fields(kind)[0].encode_name
    try:
        msgspec.convert({name: value}, kind)
    except (msgspec.ValidationError, ValueError):
        return ""
    return f"{key}: {{{name}: {value}}}"


def _value_at(content: Any, path: str) -> Any:
    """Return the value in ``content`` at a ``path`` of names that dots separate; ``_UNKNOWN_VALUE`` if it has none.

    A name that contains a dot is split, too, so its value is not known.
    """
    for name in filter(None, path.split(".")):
        if isinstance(content, list | tuple):
            content = dict(zip(map(str, range(len(content))), content, strict=True))
        content = content.get(name, _UNKNOWN_VALUE) if isinstance(content, dict) else _UNKNOWN_VALUE
    return content


def _with_list_names(path: str, content: Any) -> str:
    """Replace indices of lists in a path by the names of the entries, as in ``stages.long.rules``; else by ``[1]``."""
    shown = ""
    for name in path.split("."):
        is_list = isinstance(content, list | tuple)
        content = _value_at(content, name)
        named = content.get("name") if is_list and isinstance(content, dict) else None
        dot = "." if shown and (not is_list or isinstance(named, str)) else ""
        shown += dot + (named if isinstance(named, str) else f"[{name}]" if is_list else name)
    return shown


def _with_entry_name(path: str, kind: Any, content: Any) -> str:
    """Replace each ``[...]`` in a path of msgspec by the name of the wrong entry, as in ``streams.web.weight``."""
    field, dots, rest = path.partition("[...]")
    entries = _value_at(content, field)
    if not dots or not isinstance(entries, dict):
        return path
    entry = get_args(_type_at(kind, field))[-1]
    for key, value in entries.items():
        try:
            msgspec.convert(value, entry)
        except (msgspec.ValidationError, ValueError):
            return _with_entry_name(f"{field}.{key}{rest}", kind, content)
    return path


def _type_at(kind: Any, path: str, mapping: bool = False) -> Any:
    """Return the type of the value at ``path``, such as ``streams[...].weight``, without None.

    For a union, the result is the first type, or with ``mapping`` the struct.
    """
    steps = [step for step in path.replace("[...]", ".[]").split(".") if step]
    for left, step in zip(reversed(range(len(steps))), steps, strict=True):
        if step == "[]" or get_origin(kind) is dict:
            kind = get_args(kind)[-1]
        elif get_origin(kind) is tuple:
            kind = get_args(kind)[0]
        else:
            kind = next(field.type for field in _fields(kind) if field.encode_name == step)
        while get_origin(kind) in (Annotated, Union, UnionType):
            members = get_args(kind)
            trees = (part for part in members if hasattr(part, "__struct_fields__"))
            kind = next(trees, members[0]) if left or mapping else members[0]
    return kind


def _fields(kind: Any) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Return the fields of a struct type."""
    return msgspec.structs.fields(kind)


def parse_size(value: str | int, path: str) -> int:
    """Convert a size such as ``16GiB``, ``500MB`` or a number to bytes. Raises ConfigError naming ``path``.

    >>> parse_size("1.5KiB", "memory")
    1536
    """
    match = _SIZE.match(str(value))
    if not match or match[2] not in _UNITS:
        unit = f"{match[2].rstrip('bBi').upper()}iB" if match else ""
        to_write = f". Write {match[1]}{unit}" if match and unit in _UNITS else ""
        raise ConfigError(f"{path}: got {value!r}, expected a size such as 16GiB or 500MB{to_write}")
    size = float(match[1]) * _UNITS[match[2]]
    if size > _MAX_BYTES:
        raise ConfigError(f"{path}: got {str(value)[:40]}, expected at most {_MAX_BYTES} bytes")
    return int(size)


def parse_amount(value: str | float, path: str) -> int:
    """Convert a number, or an amount such as ``500M``, to a whole number. Raises ConfigError naming ``path``.

    >>> parse_amount("2.8T", "tokens")
    2800000000000
    """
    match = _AMOUNT.match(str(value)) if not isinstance(value, bool) else None
    amount = Decimal(match[1]) * _AMOUNTS[match[2]] if match else Decimal(-1)
    if amount != int(amount) or not 0 <= amount < _MAX_AMOUNT:
        raise ConfigError(
            f"{path}: got {str(value)[:40]!r}, expected a whole number, or text such as 500M, 20B or 2.8T"
        )
    return int(amount)


def overlaid(base: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the values of ``overlay`` in place of its own, key by key at every level."""
    both = {key for key, value in overlay.items() if isinstance(value, dict) and isinstance(base.get(key), dict)}
    return base | overlay | {key: overlaid(base[key], overlay[key]) for key in both}
