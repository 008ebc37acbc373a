"""The command ``export``: write the files that a cluster needs to run streampack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from streampack_services.cli.cli_options import AsJson


def export(
    what: Annotated[
        str, typer.Argument(metavar="WHAT", help="One of k8s, compose, docker, systemd, slurm, dashboards, alerts.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write to.")],
    image: Annotated[
        str | None, typer.Option("--image", metavar="NAME", help="The container image to run.")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="NAME", help="Name of the run. Default: the name in --config."),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", metavar="NAME", help="The Kubernetes namespace.")
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option("--prefix", metavar="FOLDER",
                     help="Folder of the virtual environment on the hosts, for systemd and slurm. "
                     "Default: /opt/streampack."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="FILE",
                     help="Your broker.yaml, which replaces the example. Memory limits are derived from this file."),
    ] = None,
    produce: Annotated[
        Path | None,
        typer.Option("--produce", "-p", metavar="FILE", help="Your producer.yaml, which replaces the example."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite files with other contents, and keep each as NAME.old.")
    ] = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Write deployment files, dashboards or alert rules for a cluster.

    Use this command to deploy a broker and producers to a cluster, or to install
    dashboards and alert rules. Without changes, the files run on example data. With
    --config and --produce, the files use your own configuration. The command
    replaces only the addresses and folders of this configuration.

    \b
    Example:
        streampack export k8s DIR -c broker.yaml --image streampack:1.0
    """
    from streampack_services import export as exporting

    options = exporting.Options(image, run, namespace, prefix, config, produce)
    files, then, warnings = exporting.export(what, folder, options, force=force)
    if as_json:
        print(json.dumps({"files": [str(path) for path in files], "next": then, "warnings": warnings}))
        return
    for path in files:
        print(path)
    for warning in warnings:
        print(f"warning: {warning}")
    print(f"next: {then}")
