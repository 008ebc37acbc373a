"""The commands that watch a broker: ``status``, ``top`` and ``health``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from streampack_services.cli.cli_options import DEFAULT_BROKER, AsJson, Timeout, print_result

Endpoint = Annotated[
    str | None,
    typer.Argument(
        metavar="ENDPOINT",
        help=f"The broker's HTTP address, http://host:port, or its rendezvous file as file://PATH. {DEFAULT_BROKER}",
    ),
]  # fmt: skip


Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="The run's broker.yaml, in place of ENDPOINT."),
]  # fmt: skip
Node = Annotated[
    str | None,
    typer.Option(
        "--node", metavar="HOST", help="Show the ranks of this host only, or of the worst host with HOST in its name."
    ),
]


def status(
    endpoint: Endpoint = None, config: Config = None, node: Node = None, as_json: AsJson = False, timeout: Timeout = 5.0
) -> None:
    """Show the state of a broker once.

    Use this command to see the progress of a run, the memory in use, and the reason
    that the broker waits. With more than 1,024 ranks, it lists the worst hosts;
    --node shows the ranks of one host.

    \b
    Example:
        streampack status
        streampack status http://node0:7400
    """
    from streampack_services.http import http_client
    from streampack_services.watch import status_report

    endpoint = http_client.address(endpoint, config, timeout)
    snapshot = http_client.fetch_status(endpoint, timeout)
    if snapshot.get("state") == "standby":
        print_result(snapshot, as_json, status_report.show_standby)
        return
    if node is None:
        print_result(snapshot, as_json, lambda content: status_report.show_status(http_client.parse_status(content)))
        return
    pages = http_client.fetch_node(endpoint, snapshot["feeds"], node, timeout)
    print_result(
        pages, as_json,
        lambda node: status_report.show_status(http_client.of_node(http_client.parse_status(snapshot), node)),
    )  # fmt: skip


def top(
    endpoint: Endpoint = None,
    config: Config = None,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, max=3600, help="Time between two updates.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one update and exit.")] = False,
    node: Node = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per update, each on one line.")
    ] = False,
    timeout: Timeout = 5.0,
) -> None:
    """Watch throughput, padding, streams and ranks of a broker.

    Use this command to find out why a run is slow. The page updates until you press
    q or Ctrl-C. Without a terminal, the command prints the page once. A few ranks
    appear as a table, and many ranks appear as a map with one cell per rank. A list
    names the ranks with the longest data wait and the cause. More than 1,024 ranks
    appear as a table of the worst hosts; --node shows the ranks of one host. Rates
    cover the last 10 seconds. With --once, rates cover the time since the broker
    started.

    \b
    Example:
        streampack top
        streampack top http://node0:7400
    """
    from streampack_services.http import http_client
    from streampack_services.watch import top as watching

    endpoint = http_client.address(endpoint, config, timeout)
    watching.top(endpoint, interval_s=interval, timeout_s=timeout, once=once, as_json=as_json, node=node)


def health(
    endpoint: Endpoint = None,
    config: Config = None,
    live: Annotated[bool, typer.Option("--live/--ready", help="Check whether the broker is alive or ready.")] = False,
    as_json: AsJson = False,
    timeout: Timeout = 5.0,
) -> None:
    """Check if a broker is ready: exit with 0 if so, else with 1.

    Use this command as the health check of a container, or as a probe that runs a
    command; curl is not needed. If the check fails, the command prints the reason.
    A broker that is starting or draining is alive but not ready.

    \b
    Example:
        streampack health http://127.0.0.1:7400
    """
    from streampack.errors import Rejected
    from streampack_services.http import http_client

    try:
        endpoint = http_client.address(endpoint, config, timeout)
        good, answer = http_client.fetch_health(endpoint, "/livez" if live else "/readyz", timeout)
    except Rejected as error:
        good, answer = False, f"streampack: {error}"
    if as_json:
        print(json.dumps({"good": good, "asked": "live" if live else "ready", "said": answer}))
    else:
        print(answer, file=sys.stdout if good else sys.stderr)
    raise typer.Exit(0 if good else 1)
