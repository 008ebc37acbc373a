"""The commands that change a running broker: ``set weights``, ``set streams``, ``skip``; added to those of ``cli``."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import msgspec
import typer

from streampack.errors import UserError

Endpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint", "-e", metavar="URL", show_default=False,
        help="The broker's HTTP address, or file:// and its rendezvous file. Default: STREAMPACK_HTTP of the "
        "environment, else http://127.0.0.1:7400.",
    ),
]  # fmt: skip
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
settings = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@settings.callback()
def _set() -> None:
    """Change a run, from a step on.

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
    as_json: AsJson = False,
    timeout: Timeout = 15.0,
) -> None:
    """Give streams other weights.

    What is formed stays as it is; shares follow the new weights from there on. A weight of 0 takes a stream out for
    good.

    \b
    Example:
        streampack set weights code=0.3 web=0.7 --at-step 5000
    """
    body = {"weights": dict(_share(each) for each in shares), "at_step": at_step}
    found = _ask("/control/weights", body, feed, note, endpoint, timeout)
    said = f"feed {found['feed']}: {' '.join(shares)} from step {found['step']} on"
    print(json.dumps(found) if as_json else said)


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
    as_json: AsJson = False,
    timeout: Timeout = 15.0,
) -> None:  # fmt: skip
    """Add streams to a feed, or take some out of it.

    Start the producers of a new stream after the answer.

    \b
    Example:
        streampack set streams --add math='{weight: 0.2, passes: 1}' --remove old
    """
    added, removed = dict(_stream(each) for each in add or []), remove or []
    if not added and not removed:
        raise UserError("got neither --add nor --remove, expected one")
    body = {"add": added, "remove": removed, "at_step": at_step}
    found = _ask("/control/streams", body, feed, note, endpoint, timeout)
    changes = " ".join([*(f"+{name}" for name in added), *(f"-{name}" for name in removed)])
    print(json.dumps(found) if as_json else f"feed {found['feed']}: {changes} from step {found['step']} on")


def skip(
    steps: Annotated[str, typer.Option("--steps", metavar="A-B", help="The first and the last, or one.")],
    feed: Feed = None,
    note: Note = None,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
    timeout: Timeout = 15.0,
) -> None:
    """Have every rank pass over some steps.

    After a loss spike, say, before the trainers go back. What follows stays as it is.

    \b
    Example:
        streampack skip --steps 120-140
    """
    found = _ask("/control/skip", {"steps": steps}, feed, note, endpoint, timeout)
    said = f"steps {steps} are" if "-" in steps else f"step {steps} is"
    print(json.dumps(found) if as_json else f"feed {found['feed']}: {said} passed over")


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
    from streampack.config import StreamSettings
    from streampack.typed_tree import convert

    name, _, value = text.partition("=")
    try:
        tree: Any = msgspec.yaml.decode(value) if value else {}
    except msgspec.DecodeError:
        tree = None
    if not name or not isinstance(tree, dict):
        raise UserError(f"got {text!r}, expected a stream and its settings, such as math='{{weight: 0.2}}'")
    convert(tree, StreamSettings, f"stream {name!r}")
    return name, tree


def _ask(
    path: str, body: dict[str, Any], feed: str | None, note: str | None, endpoint: str | None, timeout_s: float
) -> dict[str, Any]:
    from streampack_services import http_client

    given = {key: value for key, value in {**body, "feed": feed, "note": note}.items() if value is not None}
    return http_client.ask_change(endpoint, path, given, timeout_s)
