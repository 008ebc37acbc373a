"""The commands to run before anything else: ``check`` for a configuration, ``demo`` for an installation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from streampack.core.packers.registry import PACKER_NAMES
from streampack.errors import UserError
from streampack_services.cli.cli_options import ADVANCED, AsJson, Cp, Dp


def check(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE...", help="A broker.yaml, the producer.yaml files of its run, or both."),
    ] = None,
    whole: Annotated[
        bool, typer.Option("--all", help="Show every value, where it comes from, and its meaning.")
    ] = False,
    samples: Annotated[
        int,
        typer.Option("--samples", metavar="N", min=0, help="Also show the first N samples of each stream as tokens."),
    ] = 0,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of both files, for editors. FILE is not needed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a configuration and say what follows from it.

    Run this command before you start a broker or producer; the command starts
    nothing. It prints the values that you set, and what follows: tokens per step,
    possible meshes, memory, and a producer's files. It reads the first rows of a
    producer's files. If you pass a broker.yaml and its producer.yaml files, it also
    checks that streams, fields and masks fit together. With --all, the command
    prints every value with its origin and its meaning. With --samples, it also
    prints the first samples, marks the tokens that count for the loss, and says
    where media are.

    \b
    Example:
        streampack check broker.yaml producer.yaml
        streampack check producer.yaml --samples 2
        streampack check --schema > streampack.schema.json
    """
    from streampack_services.check import check as checking
    from streampack_services.check import preview as previewing
    from streampack_services.daemons import producer

    if schema:
        print(json.dumps(checking.json_schema(), indent=2))
        return
    if not files:
        raise UserError("Got no FILE. Pass a broker.yaml, a producer.yaml or both, or --schema.")
    producer.import_from_here()
    report = checking.check_all(files)
    if samples:
        report["samples"] = previewing.preview(files, samples)
    if as_json:
        print(json.dumps(report if len(files) > 1 else {**report.pop("files")[0], **report}))
    else:
        checking.show_check(report, whole)
        previewing.show_preview(report.get("samples", {}))


def demo(
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Approximate number of steps.")] = 300,
    budget: Annotated[int, typer.Option("--budget", metavar="TOKENS", min=8, help="Tokens per pack.")] = 8192,
    dp: Dp = 2,
    cp: Cp = 2,
    source: Annotated[
        str | None,
        typer.Option("--source", metavar="FILES",
                     help="Your own .tar shards or .jsonl files. Default: text from the Python standard library."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", metavar="NAME|FILE",
                     help="bytes, a tokenizer.json, or the folder of a tokenizer.json. Chats need a tokenizer.json. "
                     "Default: bytes."),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option("--window", metavar="SAMPLES", min=1, rich_help_panel=ADVANCED,
                     help="Number of samples that the packer chooses from. Default: as many as 4 steps have."),
    ] = None,
    packer: Annotated[
        str,
        typer.Option("--packer", metavar="NAME", help=f"One of {', '.join(PACKER_NAMES)}.", rich_help_panel=ADVANCED),
    ] = "exact_fill",
    work_ms: Annotated[
        float,
        typer.Option("--work-ms", metavar="MS", min=0, rich_help_panel=ADVANCED,
                     help="Simulated compute time per pack, in milliseconds."),
    ] = 20.0,
    keys: Annotated[
        bool,
        typer.Option("--keys", help="Use encrypted TCP connections with keys, as a run on several hosts does.",
                     rich_help_panel=ADVANCED),
    ] = False,
    relay: Annotated[
        bool, typer.Option("--relay", help="Read through a relay, with two tensor-parallel ranks for each shard.")
    ] = False,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the result.")] = False,
) -> None:  # fmt: skip
    """Run the whole service on this machine and check every sample.

    Use this command to try streampack before you configure anything. The command
    starts a broker, two producers and the ranks of a mesh. The ranks verify each
    pack, and the command compares each sample with its source. The exit code is 0
    only if every sample arrived exactly once.

    \b
    Example:
        streampack demo --steps 50 --dp 2 --cp 2
    """
    from streampack_services.demo.demo import DemoOptions, run_demo

    options = DemoOptions(
        steps=steps, budget=budget, window=window, packer=packer, dp=dp, cp=cp, source=source,
        tokenizer=tokenizer, work_ms=work_ms, json=as_json, quiet=quiet, keys=keys, relay=relay,
    )  # fmt: skip
    raise typer.Exit(run_demo(options))
