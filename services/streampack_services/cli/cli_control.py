"""The commands that change a running broker: ``set weights``, ``set streams``, ``skip``; added to those of ``main``."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from streampack.errors import UserError

Endpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint", "-e", metavar="URL", show_default=False,
        help="The broker's HTTP address, or file:// and its rendezvous file. Default: that of --config, else "
        "STREAMPACK_HTTP, else the rendezvous file in STREAMPACK_ENDPOINT, else http://127.0.0.1:7400.",
    ),
]  # fmt: skip
Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", show_default=False,
                 help="broker.yaml of the run to change: its broker is found, and no other run is changed."),
]  # fmt: skip
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before the change.")]
Feed = Annotated[
    str | None, typer.Option("--feed", metavar="NAME", help="Needed where there are several.", show_default=False)
]
Note = Annotated[
    str | None, typer.Option("--note", metavar="TEXT", help="Why: it is recorded with it.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="How long to wait for an answer.")]
AtStep = Annotated[
    int | None,
    typer.Option("--at-step", metavar="N", min=0, help="Default: the first that is not formed yet.",
                 show_default=False),
]  # fmt: skip
MANY_STEPS = 1000
"""A skip of more steps is asked about: a slip of the finger ends the run."""
FAR_AHEAD = 100_000
settings = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@settings.callback()
def _set() -> None:
    r"""Change a run, from a step on.

    \b
    Example:
        streampack set weights code=0.3 web=0.7
    """


@settings.command()
def weights(
    shares: Annotated[list[str], typer.Argument(metavar="STREAM=WEIGHT...", help="The others keep theirs.")],
    at_step: AtStep = None,
    feed: Feed = None,
    note: Note = None,
    endpoint: Endpoint = None,
    config: Config = None,
    yes: Yes = False,
    as_json: AsJson = False,
    timeout: Timeout = 15.0,
) -> None:
    r"""Give streams other weights.

    What is formed stays as it is; shares follow the new weights from there on. A weight of 0 takes a stream out for
    good.

    \b
    Example:
        streampack set weights code=0.3 web=0.7 --at-step 5000
    """
    body = {"weights": dict(_share(each) for each in shares), "at_step": at_step}
    found = _ask("/control/weights", body, feed, note, _Target(endpoint, config, yes, timeout))
    _say(found, f"{' '.join(shares)} from step {found['step']} on", as_json)


@settings.command()
def streams(
    add: Annotated[
        list[str] | None,
        typer.Option("--add", metavar="NAME[={...}]", help="A stream and its settings as in broker.yaml; repeatable.",
                     show_default=False),
    ] = None,
    remove: Annotated[
        list[str] | None,
        typer.Option("--remove", metavar="NAME", help="Take a stream out for good; repeatable.", show_default=False),
    ] = None,
    at_step: AtStep = None,
    feed: Feed = None,
    note: Note = None,
    endpoint: Endpoint = None,
    config: Config = None,
    yes: Yes = False,
    as_json: AsJson = False,
    timeout: Timeout = 15.0,
) -> None:  # fmt: skip
    r"""Add streams to a feed, or take some out of it.

    Start the producers of a new stream after the answer.

    \b
    Example:
        streampack set streams --add math='{weight: 0.2, passes: 1}' --remove old
    """
    added, removed = dict(_stream(each) for each in add or []), remove or []
    if not added and not removed:
        raise UserError("got neither --add nor --remove, expected one")
    body = {"add": added, "remove": removed, "at_step": at_step}
    found = _ask("/control/streams", body, feed, note, _Target(endpoint, config, yes, timeout))
    changes = " ".join([*(f"+{name}" for name in added), *(f"-{name}" for name in removed)])
    _say(found, f"{changes} from step {found['step']} on", as_json)


def skip(
    steps: Annotated[str, typer.Option("--steps", metavar="A-B", help="The first and the last, or one.")],
    feed: Feed = None,
    note: Note = None,
    endpoint: Endpoint = None,
    config: Config = None,
    yes: Yes = False,
    as_json: AsJson = False,
    timeout: Timeout = 15.0,
) -> None:
    r"""Have every rank pass over some steps.

    After a loss spike, say, before the trainers go back. What follows stays as it is.

    \b
    Example:
        streampack skip --steps 120-140
    """
    first, _, last = steps.partition("-")
    count = int(last) - int(first) + 1 if first.isdecimal() and last.isdecimal() else 1
    doubt = f"{count} steps are skipped for good, {first} to {last}" if count > MANY_STEPS else ""
    found = _ask("/control/skip", {"steps": steps}, feed, note, _Target(endpoint, config, yes, timeout), doubt)
    _say(found, f"{f'steps {steps} are' if last else f'step {steps} is'} passed over", as_json)


def _share(text: str) -> tuple[str, float]:
    """``("code", 0.3)`` of ``code=0.3``. Raises UserError."""
    name, _, value = text.rpartition("=")
    try:
        weight = float(value)
    except ValueError:
        weight = math.nan
    if not name or not math.isfinite(weight):
        raise UserError(f"got {text!r}, expected a stream and its weight, such as code=0.3")
    return name, weight


def _stream(text: str) -> tuple[str, dict[str, Any]]:
    """``("math", {"weight": 0.2})`` of ``math={weight: 0.2}``; ``math`` alone has the defaults. Raises UserError."""
    from streampack.config.daemon_settings import StreamSettings
    from streampack.config.typed_yaml import convert

    name, _, value = text.partition("=")
    try:
        tree: Any = msgspec.yaml.decode(value) if value else {}
    except msgspec.DecodeError:
        tree = None
    if not name or not isinstance(tree, dict):
        raise UserError(f"got {text!r}, expected a stream and its settings, such as math='{{weight: 0.2}}'")
    convert(tree, StreamSettings, f"stream {name!r}")
    return name, tree


class _Target(NamedTuple):
    """Which broker to ask, and whether ``yes`` was said before the question."""

    endpoint: str | None
    config: Path | None
    yes: bool
    timeout_s: float


def _ask(
    path: str, body: dict[str, Any], feed: str | None, note: str | None, target: _Target, doubt: str = ""
) -> dict[str, Any]:
    """The broker's answer, and its ``run``. Ask the user first where ``doubt`` says why, where no broker was named, and
    where later changes would wait for a step that is far ahead.
    """
    from streampack_services.http import http_client

    broker = http_client.find_broker(target.endpoint, target.config, target.timeout_s)
    doubts = [doubt] if doubt else []
    if not broker.named:
        doubts.append(f"run {broker.run!r} at {broker.base} was not named by --endpoint, --config or the environment")
    at_step, formed = body.get("at_step") or 0, _formed(broker.snapshot)
    if at_step > formed + FAR_AHEAD:
        doubts.append(f"step {at_step} is {at_step - formed} steps ahead, and later changes wait for it")
    if doubts and not target.yes:
        _confirm(doubts, broker.run)
    given = {key: value for key, value in {**body, "feed": feed, "note": note}.items() if value is not None}
    return {"run": broker.run, **http_client.ask_change(broker.base, path, given, target.timeout_s)}


def _formed(snapshot: dict[str, Any]) -> int:
    """The furthest step of any feed."""
    return max((feed.get("steps", {}).get("formed", 0) for feed in snapshot.get("feeds", {}).values()), default=0)


def _confirm(doubts: list[str], run: str) -> None:
    """Raise UserError unless the user agrees."""
    why = "; ".join(doubts)
    if not sys.stdin.isatty():
        raise UserError(f"{why}: pass --yes to change run {run!r} without a question, or name another broker")
    if not typer.confirm(f"{why}. Change run {run!r}?", err=True):
        raise UserError("got no for an answer: nothing was changed")


def _say(found: dict[str, Any], said: str, as_json: bool) -> None:
    print(json.dumps(found) if as_json else f"run {found['run']}, feed {found['feed']}: {said}")
