"""The commands that change the mixture or the steps of a running broker: ``set weights``, ``set streams``, ``skip``."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from streampack.errors import UserError
from streampack_services.cli.cli_options import ADVANCED, AsJson, Timeout

Endpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint", "-e", metavar="URL",
        help="The broker's HTTP address, or its rendezvous file as file://PATH. Default: the broker of --config, else "
        "STREAMPACK_HTTP, else the rendezvous file in STREAMPACK_ENDPOINT, else your broker on this host, else "
        "http://127.0.0.1:7400.",
    ),
]  # fmt: skip
Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE",
                 help="The broker.yaml of the run to change. The command finds the broker of this run and changes no "
                 "other run."),
]  # fmt: skip
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Change the run without asking for confirmation.")]
ChangedFeed = Annotated[
    str | None,
    typer.Option("--feed", metavar="NAME", rich_help_panel=ADVANCED,
                 help="Feed to change. Required for a run of several feeds."),
]  # fmt: skip
Note = Annotated[
    str | None,
    typer.Option("--note", metavar="TEXT", help="Reason for the change, which the log records."),
]
AtStep = Annotated[
    int | None,
    typer.Option("--at-step", metavar="N", min=0,
                 help="First step of the change. Default: the first step that is not formed yet."),
]  # fmt: skip
MANY_STEPS = 1000
"""Ask the user before a skip of more steps than this: a typing error could skip the rest of the run."""
FAR_AHEAD = 100_000
"""Ask the user before a change at a step that is more steps ahead than this."""


def weights(
    shares: Annotated[
        list[str], typer.Argument(metavar="STREAM=WEIGHT...", help="New weights. Other streams keep their weights.")
    ],
    at_step: AtStep = None,
    feed: ChangedFeed = None,
    note: Note = None,
    endpoint: Endpoint = None,
    config: Config = None,
    yes: Yes = False,
    as_json: AsJson = False,
    timeout: Timeout = 15.0,
) -> None:
    """Change the weights of streams from a step on.

    Use this command to change the mixture of a run without a restart. Steps that
    are already formed do not change. A weight of 0 removes a stream permanently.

    \b
    Example:
        streampack set weights code=0.3 web=0.7 --at-step 5000
    """
    body = {"weights": dict(_share(share) for share in shares), "at_step": at_step}
    answer = post_change("/control/weights", body, feed, note, Target(endpoint, config, yes, timeout))
    print_answer(answer, f"{' '.join(shares)} {begins(answer)}", as_json)


def streams(
    add: Annotated[
        list[str] | None,
        typer.Option("--add", metavar="NAME[={...}]",
                     help="Add a stream, with settings as in broker.yaml. Repeat the option for several streams."),
    ] = None,
    remove: Annotated[
        list[str] | None,
        typer.Option("--remove", metavar="NAME",
                     help="Remove a stream permanently. Repeat the option for several streams."),
    ] = None,
    at_step: AtStep = None,
    feed: ChangedFeed = None,
    note: Note = None,
    endpoint: Endpoint = None,
    config: Config = None,
    yes: Yes = False,
    as_json: AsJson = False,
    timeout: Timeout = 15.0,
) -> None:  # fmt: skip
    """Add streams to a feed, or remove streams from it.

    Use this command to bring new data into a run without a restart. Start the
    producers of a new stream after the command has succeeded.

    \b
    Example:
        streampack set streams --add math='{weight: 0.2, passes: 1}' --remove old
    """
    added, removed = dict(_stream(text) for text in add or []), remove or []
    if not added and not removed:
        raise UserError("Got neither --add nor --remove. Pass at least one of these options.")
    body = {"add": added, "remove": removed, "at_step": at_step}
    answer = post_change("/control/streams", body, feed, note, Target(endpoint, config, yes, timeout))
    changes = " ".join([*(f"+{name}" for name in added), *(f"-{name}" for name in removed)])
    print_answer(answer, f"{changes} {begins(answer)}", as_json)


def skip(
    steps: Annotated[
        str, typer.Option("--steps", metavar="A-B", help="First and last step to skip, or a single step.")
    ],
    feed: ChangedFeed = None,
    note: Note = None,
    endpoint: Endpoint = None,
    config: Config = None,
    yes: Yes = False,
    as_json: AsJson = False,
    timeout: Timeout = 15.0,
) -> None:
    """Skip steps on every rank.

    Use this command after a loss spike, before the trainers go back to a
    checkpoint. The steps after the skipped steps do not change.

    \b
    Example:
        streampack skip --steps 120-140
    """
    first, _, last = steps.partition("-")
    count = int(last) - int(first) + 1 if first.isdecimal() and last.isdecimal() else 1
    doubt = f"{count} steps ({first} to {last}) would be skipped permanently" if count > MANY_STEPS else ""
    answer = post_change("/control/skip", {"steps": steps}, feed, note, Target(endpoint, config, yes, timeout), doubt)
    print_answer(answer, f"{f'steps {steps} are' if last else f'step {steps} is'} skipped", as_json)


def _share(text: str) -> tuple[str, float]:
    """Return ``("code", 0.3)`` for ``code=0.3``. Raises UserError."""
    name, _, value = text.rpartition("=")
    try:
        weight = float(value)
    except ValueError:
        weight = math.nan
    if not name or not math.isfinite(weight):
        raise UserError(f"Got {text!r}. Pass a stream and its weight, such as code=0.3.")
    return name, weight


def _stream(text: str) -> tuple[str, dict[str, Any]]:
    """Return ``("math", {"weight": 0.2})`` for ``math={weight: 0.2}``, and ``("math", {})`` for ``math``.

    Raises UserError if the text has no name or invalid settings, and ConfigError if a stream does not have a setting.
    """
    from streampack.config.stream_settings import StreamSettings
    from streampack.config.typed_yaml import convert

    name, _, value = text.partition("=")
    try:
        content: Any = msgspec.yaml.decode(value) if value else {}
    except msgspec.DecodeError:
        content = None
    if not name or not isinstance(content, dict):
        raise UserError(f"Got {text!r}. Pass a stream and its settings, such as math='{{weight: 0.2}}'.")
    convert(content, StreamSettings, f"stream {name!r}")
    return name, content


class Target(NamedTuple):
    """The options that select the broker; ``yes``: change the run without asking the user."""

    endpoint: str | None
    config: Path | None
    yes: bool
    timeout_s: float


def post_change(
    path: str, body: dict[str, Any], feed: str | None, note: str | None, target: Target, doubt: str = ""
) -> dict[str, Any]:
    """Post a change to the broker's control ``path``; return the broker's answer and its ``run``.

    Ask the user to confirm first if ``doubt`` is not empty, if nothing named the broker, or if the step is far ahead.
    """
    from streampack_services.http import http_client

    broker = http_client.find_broker(target.endpoint, target.config, target.timeout_s)
    doubts = [doubt] if doubt else []
    if not broker.named:
        doubts.append(
            f"neither an option nor the environment names a broker, and {broker.base} serves run {broker.run!r}"
        )
    at = body.get("at") or {}
    at_step, formed = body.get("at_step") or at.get("step") or 0, _steps_formed(broker.snapshot)
    if at_step > formed + FAR_AHEAD:
        doubts.append(f"step {at_step} is {at_step - formed} steps ahead")
    if doubts and not target.yes:
        _confirm(doubts, broker.run)
    changes = {key: value for key, value in {**body, "feed": feed, "note": note}.items() if value is not None}
    return {"run": broker.run, **http_client.ask_change(broker.base, path, changes, target.timeout_s)}


def _steps_formed(snapshot: dict[str, Any]) -> int:
    """Return the number of steps that the feed with the most steps has formed."""
    return max((feed.get("steps", {}).get("formed", 0) for feed in snapshot.get("feeds", {}).values()), default=0)


def _confirm(doubts: list[str], run: str) -> None:
    """Ask the user to confirm the change of ``run``; raise UserError if the user declines or cannot be asked."""
    why = "; ".join(doubts)
    why = why[:1].upper() + why[1:]
    if not sys.stdin.isatty():
        raise UserError(
            f"{why}. To change run {run!r} anyway, pass --yes. To change another run, pass --endpoint or --config."
        )
    if not typer.confirm(f"{why}. Change run {run!r}?", err=True):
        raise UserError("You declined. Nothing was changed.")


def begins(answer: dict[str, Any]) -> str:
    """Return the begin and the number of a change as text, from the broker's answer."""
    step = answer["step"]
    begin = f"after {answer['tokens']:,} tokens in steps" if step is None else f"from step {step} on"
    return f"{begin} (change {answer['id']})" if "id" in answer else begin


def print_answer(answer: dict[str, Any], text: str, as_json: bool) -> None:
    """Print the broker's answer as JSON, or ``text`` with the names of the run and the feed."""
    print(json.dumps(answer) if as_json else f"run {answer['run']}, feed {answer['feed']}: {text}")
