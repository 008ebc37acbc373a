"""The page of commands: each command's help, usage and options, from the command line itself."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer
from streampack_services.cli.main import app


def page() -> str:
    """Return a table of the commands, then a section for each."""
    commands = list(_commands(typer.main.get_command(app), "streampack"))
    rows = [f"| [`{name}`](#{name.replace(' ', '-')}) | {_paragraphs(command)[0]} |" for name, command in commands]
    sections = [_section(name, command) for name, command in commands]
    return "\n".join(["| command | what it does |", "|---|---|", *rows, *sections])


def _commands(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    for below in group.commands.values():
        if hasattr(below, "commands"):
            if below.invoke_without_command:
                yield f"{name} {below.name}", below
            yield from _commands(below, f"{name} {below.name}")
        elif not below.hidden:
            yield f"{name} {below.name}", below


def _section(name: str, command: Any) -> str:
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option" and not param.hidden]
    context = command.context_class(command, info_name=name)
    usage = " ".join([name, *command.collect_usage_pieces(context)]).replace("...}...", "}...")
    parts = [f"\n## {name}\n", *_paragraphs(command), f"```text\n{re.sub('[{}]', '', usage)}\n```"]
    if arguments:
        records = [(param.get_help_record(context)[0].partition(" <")[0], param.help or "") for param in arguments]
        rows = [f"| `{names}` | {_prose(text)} |" for names, text in records]
        parts.append("\n".join(["| argument | meaning |", "|---|---|", *rows]))
    if options:
        rows = [_option(param, context) for param in options]
        parts.append("\n".join(["| option | default | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(parts)


def _option(param: Any, context: Any) -> str:
    names, text = param.get_help_record(context)
    shown, _, extra = text.partition("  [")
    default = re.search(r"default: ([^;\]]*)", extra)
    value = f"`{default[1]}`" if default else "required" if "required" in extra else ""
    return f"| `{names}` | {value} | {_prose(shown)} |"


def _paragraphs(command: Any) -> list[str]:
    """The help of a command as Markdown; ``Example:`` and its lines become a code block."""
    blocks = list[str]()
    for text in re.split(r"\n\s*\n", inspect.cleandoc(command.help or "").strip()):
        literal, text = text.startswith("\b"), text.removeprefix("\b").strip("\n")
        head, _, rest = text.partition("\n")
        if literal and re.fullmatch(r"Examples?:", head.strip()):
            blocks.append(f"{head.strip()}\n\n```bash\n{inspect.cleandoc(rest)}\n```")
        elif literal:
            blocks.append(f"```text\n{text}\n```")
        else:
            blocks.append(_prose(" ".join(text.split())))
    return blocks


def _prose(text: str) -> str:
    """Plain text as Markdown: options, variables and files become code, and nothing else has a meaning."""
    text = text.replace("<", "&lt;").replace("*", r"\*").replace("|", r"\|")
    return re.sub(
        r"(?<![\w`-])(--?[a-z][\w-]*|STREAMPACK_\w+|[\w-]+\.(?:ya?ml|toml|json|npz|npy|png))(?![\w`-])", r"`\1`", text
    )
