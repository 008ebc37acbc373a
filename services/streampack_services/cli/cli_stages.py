"""The commands ``set stage`` and ``set rules``, which change the rules of a running broker, and ``set --list``."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import msgspec
import typer

from streampack.errors import ConfigError, UserError
from streampack_services.cli.cli_control import (
    AtStep,
    ChangedFeed,
    Config,
    Endpoint,
    Note,
    Target,
    Yes,
    begins,
    post_change,
    print_answer,
    streams,
    weights,
)
from streampack_services.cli.cli_options import AsJson, Command, Timeout

settings = typer.Typer(no_args_is_help=True, invoke_without_command=True, rich_markup_mode=None)
for _command in (weights, streams):
    settings.command(cls=Command)(_command)


@settings.callback()
def _set(
    context: typer.Context,
    listed: Annotated[
        bool, typer.Option("--list", help="List the changes that wait, that hold, and that held before.")
    ] = False,
    cancel: Annotated[
        int | None,
        typer.Option("--cancel", metavar="ID", min=0,
                     help="Cancel a change that has not begun, also a stage of broker.yaml. --list shows the numbers."),
    ] = None,
    feed: ChangedFeed = None,
    note: Note = None,
    endpoint: Endpoint = None,
    config: Config = None,
    yes: Yes = False,
    as_json: AsJson = False,
    timeout: Timeout = 15.0,
) -> None:  # fmt: skip
    """Change the rules or the mixture of a running broker.

    The options list and cancel changes.

    \b
    Example:
        streampack set weights code=0.3 web=0.7
        streampack set rules budget=32768 packs=128 --at-step 40000
        streampack set --list
        streampack set --cancel 2
    """
    target = Target(endpoint, config, yes, timeout)
    if context.invoked_subcommand is not None:
        if listed or cancel is not None:
            raise UserError(
                f"Got {'--list' if listed else '--cancel'} before '{context.invoked_subcommand}'. Pass one of the two."
            )
        if any(value for value in (feed, note, endpoint, config, yes, as_json)):
            raise UserError(
                f"Got options before '{context.invoked_subcommand}'. Pass them after it: streampack set "
                f"{context.invoked_subcommand} ..."
            )
    elif listed and cancel is not None:
        raise UserError("Got --list and --cancel. Pass one of the two.")
    elif listed:
        _list_changes(feed, target, as_json)
    elif cancel is not None:
        answer = post_change("/control/cancel", {"id": cancel}, feed, note, target)
        print_answer(answer, f"change {cancel} is canceled", as_json)
    else:
        raise UserError("Got neither a command nor --list nor --cancel. 'streampack set --help' lists the commands.")


@settings.command(cls=Command)
def stage(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="YAML file with one stage, as in `stages` of broker.yaml. -: stdin.")
    ],
    at_step: AtStep = None,
    at_tokens: Annotated[
        str | None,
        typer.Option("--at-tokens", metavar="TOKENS",
                     help="Begin after this many tokens in steps, such as 500M or 2T, in place of `at` in FILE."),
    ] = None,
    feed: ChangedFeed = None,
    note: Note = None,
    endpoint: Endpoint = None,
    config: Config = None,
    yes: Yes = False,
    as_json: AsJson = False,
    timeout: Timeout = 15.0,
) -> None:  # fmt: skip
    """Begin a stage: other rules, another mixture, or both.

    Use this command to change a run without a new start. --at-step and
    --at-tokens replace the begin in the file. Without a begin, the stage begins
    at the first step that is not formed yet.

    \b
    Example:
        streampack set stage long.yaml --at-step 40000
    """
    if at_step is not None and at_tokens is not None:
        raise UserError("Got --at-step and --at-tokens. Pass one of the two.")
    keys = _stage_tree(file)
    if at_step is not None:
        keys["at"] = {"step": at_step}
    if at_tokens is not None:
        from streampack.config.typed_yaml import parse_amount

        keys["at"] = {"tokens": parse_amount(at_tokens, "--at-tokens")}
    _check_stage(keys, "stdin" if file == "-" else file)
    answer = post_change("/control/stage", keys, feed, note, Target(endpoint, config, yes, timeout))
    name = f"stage {keys['name']}" if keys.get("name") else "stage"
    print_answer(answer, f"{name}, {begins(answer)}", as_json)


@settings.command(cls=Command)
def rules(
    values: Annotated[
        list[str],
        typer.Argument(metavar="KEY=VALUE...", help="Keys of `rules` in broker.yaml, such as budget=32768, packs=128, "
                       "window=auto, packer=..., balance.kind=joint. packs stands for step.packs."),
    ],
    at_step: AtStep = None,
    feed: ChangedFeed = None,
    note: Note = None,
    endpoint: Endpoint = None,
    config: Config = None,
    yes: Yes = False,
    as_json: AsJson = False,
    timeout: Timeout = 15.0,
) -> None:  # fmt: skip
    """Change rules from a step on, such as the budget.

    Steps that are already formed do not change. A value may grow evenly over
    steps: packs='{from: 64, to: 512, over: 2000}'.

    \b
    Example:
        streampack set rules budget=32768 packs=128 --at-step 40000
    """
    keys = _rules_tree(values)
    _check_stage({"rules": keys}, "KEY=VALUE")
    body = {"rules": keys, "at_step": at_step}
    answer = post_change("/control/rules", body, feed, note, Target(endpoint, config, yes, timeout))
    print_answer(answer, f"{' '.join(values)}, {begins(answer)}", as_json)


def _stage_tree(file: str) -> dict[str, Any]:
    """Return the YAML of a file with one stage; ``-`` reads the standard input. Raises ConfigError."""
    from streampack.config.typed_yaml import parse_tree, read_tree

    keys = parse_tree(sys.stdin.read(), "stdin") if file == "-" else read_tree(file)
    if not isinstance(keys, dict) or "stages" in keys or "streams" in keys:
        raise UserError(
            f"{file}: got {'a list' if isinstance(keys, list) else 'something else'}, expected one stage. Write, for "
            f"example, name: long, at: {{step: 40000}}, rules: {{budget: 32768}}, each on its own line."
        )
    return keys


_SHORT = {"packs": "step.packs"}
"""Keys of ``set rules`` that stand for longer ones."""


def _rules_tree(values: list[str]) -> dict[str, Any]:
    """Return the keys of ``budget=32768 balance.kind=joint``. Raises UserError."""
    keys: dict[str, Any] = {}
    for text in values:
        key, equals, value = text.partition("=")
        try:
            parsed: Any = msgspec.yaml.decode(value)
        except msgspec.DecodeError:
            parsed, equals = None, ""
        if not key or not equals:
            raise UserError(f"Got {text!r}. Pass a key of `rules` and its value, such as budget=32768.")
        if key == "window" and isinstance(parsed, int):
            parsed = {"samples": parsed}
        *above, last = _SHORT.get(key, key).split(".")
        place = keys
        for name in above:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise UserError(f"Got {text!r} after a value for {name}. Pass one of the two.")
        if last in place:
            raise UserError(f"Got two values for {key}. Pass one of the two.")
        place[last] = parsed
    return keys


def _check_stage(keys: dict[str, Any], where: str) -> None:
    """Raise ConfigError if a stage does not have the keys in ``keys``, or they have wrong types."""
    from streampack.config.stage_settings import StageSettings
    from streampack.config.typed_yaml import convert

    stage = convert(keys, StageSettings, where)
    try:
        _ = stage.at and stage.at.begin
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _list_changes(feed: str | None, target: Target, as_json: bool) -> None:
    """Print the changes of the feeds of a run."""
    from streampack_services.http import http_client

    snapshot = http_client.find_broker(target.endpoint, target.config, target.timeout_s).snapshot
    feeds = snapshot.get("feeds", {})
    if feed is not None and feed not in feeds:
        raise UserError(f"Got feed {feed!r}. Pass one of: {', '.join(feeds) or 'none'}.")
    changes = {name: status.get("changes", {}) for name, status in feeds.items() if feed in (None, name)}
    if as_json:
        print(json.dumps({"run": snapshot["run"], "feeds": changes}))
        return
    for name, feed_changes in changes.items():
        print(f"run {snapshot['run']}, feed {name}")
        show_changes(feed_changes)


def show_changes(changes: dict[str, Any]) -> None:
    """Print the changes of a feed, as ``/status`` has them, as a table."""
    past = changes.get("past", [])
    rows = [("id", "change", "begins at", "state")]
    rows += [(_number(change), change["name"], f"step {change['step']:,}", "begun") for change in past]
    for change in changes.get("coming", []):
        begin = f"step {change['step']:,}" if change["step"] is not None else f"{change['tokens']:,} tokens"
        if change["estimated_step"] is not None:
            begin += f", about step {change['estimated_step']:,}"
        rows.append((_number(change), change["what"], begin, "waits"))
    if len(rows) == 1:
        print("no changes")
        return
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print("  ".join([*(f"{text:<{width}}" for text, width in zip(row, widths, strict=False)), row[3]]))


def _number(change: dict[str, Any]) -> str:
    """Return the number of a change as text."""
    return "-" if change["id"] is None else str(change["id"])
