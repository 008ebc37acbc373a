"""The commands that change a running broker: ``set weights``, ``skip``. ``cli`` adds them to its own."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

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
    at_step: Annotated[
        int | None,
        typer.Option("--at-step", metavar="N", min=0, help="Default: the first that is not formed yet.",
                     show_default=False),
    ] = None,
    feed: Feed = None,
    note: Note = None,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
    timeout: Timeout = 15.0,
) -> None:  # fmt: skip
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


def _ask(
    path: str, body: dict[str, Any], feed: str | None, note: str | None, endpoint: str | None, timeout_s: float
) -> dict[str, Any]:
    from streampack_services import report

    given = {key: value for key, value in {**body, "feed": feed, "note": note}.items() if value is not None}
    return report.ask_change(endpoint, path, given, timeout_s)
