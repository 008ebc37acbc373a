"""The command ``export``; added to those of ``main``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def export(
    what: Annotated[
        str, typer.Argument(metavar="WHAT", help="k8s, compose, docker, systemd, slurm, dashboards or alerts.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write it.")],
    image: Annotated[
        str | None, typer.Option("--image", metavar="NAME", help="The container image.", show_default=False)
    ] = None,
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="NAME", help="The run's name; default: that of --config.", show_default=False),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", metavar="NAME", help="Of Kubernetes.", show_default=False)
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option("--prefix", metavar="FOLDER", show_default=False,
                     help="The virtual environment there, for systemd and slurm; default: /opt/streampack."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="FILE", show_default=False,
                     help="Your broker.yaml, in place of an example; containers' memory follows from it."),
    ] = None,
    produce: Annotated[
        Path | None,
        typer.Option("--produce", "-p", metavar="FILE", help="Your producer.yaml.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over files that are there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:  # fmt: skip
    r"""Write what a place to run in needs, filled in.

    Manifests, units, scripts, dashboards, alert rules: they work as they are, on example data. With --config and
    --produce they are of your run; only addresses and folders are the place's own.

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
        print(f"but: {warning}")
    print(f"next: {then}")
