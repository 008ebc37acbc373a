"""The commands that watch a broker: ``status``, ``top``, ``health``; added to those of ``main``."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="How long to wait for an answer.")]
Endpoint = Annotated[
    str | None,
    typer.Argument(
        metavar="ENDPOINT", show_default=False,
        help="The broker's HTTP address, http://host:port, or file:// and its rendezvous file. "
        "Default: STREAMPACK_HTTP, else the rendezvous file in STREAMPACK_ENDPOINT, else http://127.0.0.1:7400.",
    ),
]  # fmt: skip


def status(endpoint: Endpoint = None, as_json: AsJson = False, timeout: Timeout = 5.0) -> None:
    r"""Show what a broker does, holds and waits for.

    \b
    Example:
        streampack status http://node0:7400
    """
    from streampack_services.http import http_client
    from streampack_services.watch import status_report

    snapshot = http_client.fetch_status(endpoint, timeout)
    if as_json:
        print(json.dumps(snapshot))
    else:
        status_report.show_status(http_client.understand(snapshot))


def top(
    endpoint: Endpoint = None,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, max=3600, help="How often to ask.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once, as where the output is no terminal.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a line instead.")] = False,
    timeout: Timeout = 5.0,
) -> None:
    r"""Watch a broker: throughput, waste, streams, ranks.

    Goes on until q or Ctrl-C. Of few ranks it shows a table, of many a map, a
    cell a rank, and the worst by name: how long each waits, and what for. Figures are of the last 10 seconds
    where they are not counts; with --once, from the start.

    \b
    Example:
        streampack top http://node0:7400
    """
    from streampack_services.watch import top as watching

    watching.top(endpoint, interval_s=interval, timeout_s=timeout, once=once, as_json=as_json)


def health(
    endpoint: Endpoint = None,
    live: Annotated[bool, typer.Option("--live/--ready", help="Whether its loop turns, or whether it serves.")] = False,
    as_json: AsJson = False,
    timeout: Timeout = 5.0,
) -> None:
    r"""Exit with 0 if a broker is ready, with 1 and why if not.

    For a container's health check and for probes that run a command: no curl is
    needed. A broker that starts or drains is alive, and not ready.

    \b
    Example:
        streampack health http://127.0.0.1:7400
    """
    from streampack_services.http import http_client

    good, said = http_client.fetch_health(endpoint, "/livez" if live else "/readyz", timeout)
    if as_json:
        print(json.dumps({"good": good, "asked": "live" if live else "ready", "said": said}))
    else:
        print(said, file=sys.stdout if good else sys.stderr)
    raise typer.Exit(0 if good else 1)
