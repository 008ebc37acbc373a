"""The command ``export``: write the files that a cluster needs to run streampack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from streampack_services.cli.cli_options import AsJson


def export(
    what: Annotated[
        str, typer.Argument(metavar="WHAT", help="k8s, compose, docker, systemd, slurm, dashboards or alerts.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write to.")],
    image: Annotated[
        str | None, typer.Option("--image", metavar="NAME", help="The container image to run.", show_default=False)
    ] = None,
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="NAME", help="The run's name. Default: that of --config.", show_default=False),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", metavar="NAME", help="The Kubernetes namespace.", show_default=False)
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option("--prefix", metavar="FOLDER", show_default=False,
                     help="The virtual environment on the hosts, for systemd and slurm. Default: /opt/streampack."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="FILE", show_default=False,
                     help="Your broker.yaml, in place of the example's. Memory limits follow from it."),
    ] = None,
    produce: Annotated[
        Path | None,
        typer.Option("--produce", "-p", metavar="FILE", show_default=False,
                     help="Your producer.yaml, in place of the example's."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")] = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Write manifests, units or scripts to run streampack elsewhere.

    Use it to deploy a broker and producers to a cluster, or to install dashboards
    and alert rules. The files work as they are, on example data. With --config and
    --produce they run your own configuration; only addresses and folders are
    replaced.

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
