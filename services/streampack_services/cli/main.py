"""The command ``streampack``: parses, calls, and turns errors into one line and an exit code.

Exit codes: 0 good, 1 failed, 2 misuse, 75 try again, 130 interrupted. What a command does is
elsewhere and imported when it runs, so that ``--help`` is quick. Only this module and the other
``cli_*`` print.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec.structs import replace

from streampack.core.packers.registry import PACKER_NAMES
from streampack.errors import InternalError, StreampackError, UserError
from streampack.version import __version__
from streampack_services import logs
from streampack_services.cli import cli_audit, cli_control, cli_export, cli_keys, cli_plan, cli_watch

app = typer.Typer(
    name="streampack", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)  # fmt: skip


def main() -> int:
    """Run the command line. Returns the exit code; only a bug of ours shows a traceback."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts jobs in the background with it ignored
    try:
        app()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except InternalError:
        return _our_bug()
    except StreampackError as error:
        print("streampack:", " ".join(str(error).split()), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception:
        return _our_bug()
    return 0


def _our_bug() -> int:
    traceback.print_exc()
    said = f"streampack: this is a bug of streampack {__version__}: please report it with the lines above"
    print(said, file=sys.stderr)
    return 1


# Options that several commands share

LogLevel = Annotated[logs.Level, typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error.")]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log one JSON object a line.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"streampack {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    r"""Tokens to GPUs with nothing wasted, nothing lost and nobody waiting.

    \b
    Producers stream tokenized samples to a broker; the broker packs them into
    steps; each rank of the trainers gets its shard. To see all of it at work:

    \b
        streampack demo

    Exit codes: 0 good, 1 failed, 2 misuse, 75 try again, 130 interrupted.
    """


@app.command()
def broker(
    config: Annotated[Path, typer.Option("--config", "-c", metavar="FILE", help="broker.yaml.")],
    http: Annotated[
        str | None,
        typer.Option("--http", metavar="HOST:PORT", help="Instead of listen.http; port 0 is any.", show_default=False),
    ] = None,
    exit_when_finished: Annotated[
        bool, typer.Option("--exit-when-finished", help="End once every step is delivered and all ranks have left.")
    ] = False,
    log_level: LogLevel = "info",
    log_json: LogJson = False,
) -> None:
    r"""Run the broker, until it is told to stop.

    SIGTERM or Ctrl-C drains: ranks get the steps that are formed, then it ends
    with 0. A second one ends it at once.

    \b
    Example:
        streampack broker -c broker.yaml --http 0.0.0.0:7400
    """
    from streampack.config.config_files import read_broker

    settings = read_broker(config)
    ring = logs.Ring(settings.run)
    logs.set_up(log_level, as_json=log_json, run=settings.run, ring=ring)
    if http is not None:
        settings = replace(settings, listen=replace(settings.listen, http=http))
    from streampack_services.daemons.broker import serve

    serve(settings, exit_when_finished=exit_when_finished, ring=ring)


@app.command()
def produce(
    config: Annotated[Path, typer.Option("--config", "-c", metavar="FILE", help="producer.yaml.")],
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", help="How long the broker may take to answer at first."),
    ] = 60.0,
    log_level: LogLevel = "info",
    log_json: LogJson = False,
) -> None:
    r"""Read, tokenize and send streams to a broker.

    Ends when all is delivered. A broker that falls silent later is waited for. Start as many of these as
    needed, here or elsewhere: results do not depend on how many there are.

    \b
    Example:
        streampack produce -c producer.yaml
    """
    from streampack.config.config_files import read_producer
    from streampack_services.daemons import producer

    logs.set_up(log_level, as_json=log_json)
    producer.import_from_here()
    producer.produce(read_producer(config), timeout_s=timeout, level=log_level, as_json=log_json)


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="What to run, and its arguments.")],
    config: Annotated[Path, typer.Option("--config", "-c", metavar="FILE", help="broker.yaml.")],
    produce: Annotated[
        list[Path] | None,
        typer.Option("--produce", "-p", metavar="FILE", help="producer.yaml; may be given again.", show_default=False),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option("--node-rank", metavar="N", min=0, show_default=False,
                     help="This host's number where it is not SLURM_PROCID, GROUP_RANK or NODE_RANK."),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option("--log-dir", metavar="FOLDER", help="The daemons' logs as files there.", show_default=False),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="How long node 0's broker may take to be there.")
    ] = 600.0,
) -> None:  # fmt: skip
    r"""Run a command with a broker, and producers, around it.

    The command finds the broker by STREAMPACK_ENDPOINT and STREAMPACK_PRODUCERS, and its status by STREAMPACK_HTTP.
    All of it ends together, and the exit code is the command's, or 1 if the broker or a producer failed. Ports that
    broker.yaml does not name are free ones. On several hosts, run the same on each, with a rendezvous in broker.yaml
    that all of them see: the first one starts the broker.

    \b
    Example:
        streampack run -c broker.yaml -p producer.yaml -- torchrun train.py
    """
    from streampack_services.run.command import RunOptions
    from streampack_services.run.command import run as run_all

    logs.set_up()
    raise typer.Exit(run_all(RunOptions(command, config, produce or [], node_rank, log_dir, timeout)))


@app.command()
def check(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="broker.yaml or producer.yaml.", show_default=False)
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", metavar="N", min=0, help="Show a producer's first samples of each stream, too.")
    ] = 0,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of both files, for editors; needs no FILE.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    r"""Check a configuration and explain it.

    Prints every value, the line or default that it came from and what it means;
    then what follows: tokens a step, meshes that it can serve, how memory is
    shared out, the files of a producer. Reads a producer's first rows and refuses
    keys that none of them has. With --samples, shows what its first samples are as
    tokens, and which of them are learned. Starts nothing.

    \b
    Example:
        streampack check broker.yaml
        streampack check producer.yaml --samples 2
        streampack check --schema > streampack.schema.json
    """
    from streampack_services.check import check as checking
    from streampack_services.check import preview as previewing
    from streampack_services.daemons import producer

    if schema:
        print(json.dumps(checking.json_schema(), indent=2))
        return
    if file is None:
        raise UserError("got no FILE, expected broker.yaml or producer.yaml")
    producer.import_from_here()
    found = checking.check(file)
    if samples:
        found["samples"] = previewing.preview(file, samples)
    if as_json:
        print(json.dumps(found))
    else:
        checking.show_check(found, file)
        previewing.show_preview(found.get("samples", {}))


@app.command()
def demo(
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Optimizer steps of text to make.")] = 300,
    budget: Annotated[int, typer.Option("--budget", metavar="TOKENS", min=8, help="Tokens a pack.")] = 8192,
    window: Annotated[
        int, typer.Option("--window", metavar="SAMPLES", min=1, help="Samples that the packer looks over.")
    ] = 1024,
    packer: Annotated[str, typer.Option("--packer", metavar="NAME", help=f"{', '.join(PACKER_NAMES)}.")] = "exact_fill",
    dp: Annotated[int, typer.Option("--dp", metavar="N", min=1, help="Data-parallel ranks.")] = 2,
    cp: Annotated[int, typer.Option("--cp", metavar="N", min=1, help="Context-parallel ranks of each.")] = 2,
    source: Annotated[
        str | None,
        typer.Option(
            "--source",
            metavar="FILES",
            show_default=False,
            help="Your own .tar shards or .jsonl files, whole, instead of the text that is made.",
        ),
    ] = None,
    work_ms: Annotated[
        float, typer.Option("--work-ms", metavar="MS", min=0, help="What a client pretends to compute for a pack.")
    ] = 20.0,
    keys: Annotated[bool, typer.Option("--keys", help="As on a network: over TCP, with keys, encrypted.")] = False,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the result alone.")] = False,
) -> None:
    r"""See the whole service at work on this machine.

    A broker, two producers and a mesh of clients, on text that every machine has: the Python standard library's
    own. Every pack is put together again, every sample is compared with the source. Ends with 0 only if each
    arrived exactly once.

    \b
    Example:
        streampack demo --steps 50 --dp 2 --cp 2
    """
    module: Any = importlib.import_module("streampack_services.demo.demo")
    options = module.DemoOptions(
        steps=steps, budget=budget, window=window, packer=packer, dp=dp, cp=cp, source=source, work_ms=work_ms,
        json=as_json, quiet=quiet, keys=keys,
    )  # fmt: skip
    raise typer.Exit(module.run_demo(options))


app.command()(cli_watch.status)
app.command()(cli_watch.top)
app.command()(cli_watch.health)
app.command()(cli_plan.plan)
app.command()(cli_plan.report)
app.command()(cli_audit.why)
app.command()(cli_audit.replay)
app.add_typer(cli_audit.ledger, name="ledger")
app.add_typer(cli_control.settings, name="set")
app.command()(cli_control.skip)
app.command()(cli_export.export)
app.add_typer(cli_keys.keys, name="keys")
