"""The command ``streampack kernels``: compile kernels before a run."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from streampack.errors import UserError
from streampack_services.cli.cli_options import AsJson

COMMON: tuple[dict[str, Any], ...] = (
    {"tokens": "int32", "fields": {"loss_mask": {}}},
    {"tokens": "uint16", "merge": "arrival"},
    {"fields": {"labels": {}, "position_ids": {"dtype": "int32"}, "advantages": {"dtype": "float32", "default": 0}}},
    {"rules": {"balance": {"kind": "joint"}, "step": {"packs": 8}}},
    {"rules": {"step": {"samples": 8}}},
    {
        "rules": {"shape": "exact"},
        "feeds": {"train": {"cp": "dynamic", "rank_tokens": 8192}},
        "planned_mesh": {"cp": 8},
    },
)
"""Settings of which one or the other is in most broker.yaml files."""


def kernels(
    configs: Annotated[
        list[Path] | None,
        typer.Option("--config", "-c", metavar="FILE",
                     help="A broker.yaml, whose kernels are compiled, too. Repeat the option for several files."),
    ] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Compile streampack's kernels for this processor.

    Without this command, kernels are compiled in the background of the first run on
    a machine, which packs more slowly until then. Use it when you build an image,
    or once on each host of a cluster. Compiled kernels are kept beside the
    installation, or in the folder NUMBA_CACHE_DIR. A machine with another processor
    compiles its own.

    \b
    Example:
        streampack kernels
        NUMBA_CACHE_DIR=/shared/cache streampack kernels -c broker.yaml
    """
    from rich.progress import Progress

    from streampack.kernels import ahead
    from streampack_services.run.kernel_calls import calls_for

    began = time.monotonic()
    wanted = ahead.wanted_by(calls_for(configs or [], COMMON))
    try:
        missing = ahead.missing(wanted)
    except ImportError as error:
        raise UserError(f"Cannot compile: {error}. Run pip install 'streampack[service]'.") from None
    if any(not kernel.can_be_kept for kernel, _ in missing):
        raise UserError("Found no folder for compiled kernels that can be written. Set NUMBA_CACHE_DIR to one.")
    if missing and not as_json:
        print(f"compiling {len(missing)} kernels", file=sys.stderr)
    with Progress(disable=as_json or not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task("compiling", total=len(missing))
        errors = ahead.compile_all(missing, lambda _: progress.advance(task))
    if errors:
        raise UserError(f"{len(errors)} kernels cannot be compiled. The first: {errors[0]}")
    seconds = round(time.monotonic() - began, 1)
    folder = wanted[0][0].dispatcher.stats.cache_path
    if as_json:
        print(json.dumps({"kernels": len(wanted), "compiled": len(missing), "seconds": seconds, "folder": folder}))
    else:
        print(
            f"{len(wanted)} kernels are ready, {len(missing)} of them new ({seconds:.0f} s); the first is in {folder}"
        )
