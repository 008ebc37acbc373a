"""The command ``streampack``: parse the arguments, run the command, print an error in one line, return an exit code.

Exit codes: 0 success, 1 failure, 2 wrong usage, 75 try again, 130 interrupted. Each command imports the modules that do
its work when it runs, so that ``--help`` is quick.
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

from streampack.config.typed_yaml import with_home
from streampack.core.packers.registry import PACKER_NAMES
from streampack.errors import InternalError, StreampackError, UserError
from streampack.version import __version__
from streampack_services import logs
from streampack_services.cli import cli_audit, cli_control, cli_export, cli_kernels, cli_keys, cli_plan, cli_watch
from streampack_services.cli.cli_options import ADVANCED, AsJson, BrokerYaml, Command, Cp, Dp

app = typer.Typer(
    name="streampack", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)  # fmt: skip


def main() -> int:
    """Run the command line and return the exit code; only a bug of streampack prints a traceback."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
    try:
        app(_with_home(sys.argv[1:]))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except InternalError:
        return _report_bug()
    except StreampackError as error:
        print("streampack:", " ".join(str(error).split()), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception:
        return _report_bug()
    return 0


def _with_home(words: list[str]) -> list[str]:
    """Return the arguments with the home folder in place of ``~``, which shells leave in ``--option=~/file``.

    The words of a command that follows ``--`` stay as they are.
    """
    end = words.index("--") if "--" in words else len(words)
    pairs = [word.partition("=") if word.startswith("-") else ("", "", word) for word in words[:end]]
    return [name + equals + with_home(value) for name, equals, value in pairs] + words[end:]


def _report_bug() -> int:
    """Print the traceback of the current error and ask the user to report it; return the exit code."""
    traceback.print_exc()
    text = f"streampack: this is a bug in streampack {__version__}. Please report the bug with the lines above."
    print(text, file=sys.stderr)
    return 1


LogLevel = Annotated[
    logs.Level, typer.Option("--log-level", metavar="LEVEL", help="Lowest level to log: debug, info, warning or error.")
]
LogJson = Annotated[bool, typer.Option("--log-json", help="Write each log line as a JSON object.")]


def _version(wanted: bool) -> None:
    """Print the version and exit, if ``--version`` was given."""
    if wanted:
        print(f"streampack {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Pack tokenized samples into training steps and stream them to GPUs.

    Producers send tokenized samples to a broker. The broker packs the samples
    into steps. Each rank of the trainers reads its shard of every step.

    \b
    To see all of this on your machine:
        streampack demo

    Exit codes: 0 success, 1 failure, 2 wrong usage, 75 try again later, 130
    interrupted.
    """


@app.command(cls=Command)
def broker(
    config: BrokerYaml,
    http: Annotated[
        str | None,
        typer.Option("--http", metavar="HOST:PORT", show_default=False,
                     help="HTTP address, which replaces listen.http of broker.yaml. Port 0 picks a free port."),
    ] = None,
    exit_when_finished: Annotated[
        bool, typer.Option("--exit-when-finished", help="Exit when every step is delivered and all ranks have left.")
    ] = False,
    standby: Annotated[
        bool,
        typer.Option("--standby", help="Copy the log of the active broker on another host, and take over if that host "
                                       "is lost. Needs the section `standby` in broker.yaml."),
    ] = False,
    log_level: LogLevel = "info",
    log_json: LogJson = False,
) -> None:  # fmt: skip
    """Run a broker until it is stopped.

    Start one broker per run, before or after its producers and trainers. On
    SIGTERM or Ctrl-C the broker delivers the steps that are already formed, then
    exits with 0. A second signal stops the broker at once.

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

    serve(settings, exit_when_finished=exit_when_finished, ring=ring, standby=standby)


@app.command(cls=Command)
def produce(
    config: Annotated[Path, typer.Option("--config", "-c", metavar="FILE", help="The producer.yaml with the streams.")],
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", rich_help_panel=ADVANCED,
                     help="Seconds to wait for the broker's first answer."),
    ] = 60.0,
    log_level: LogLevel = "info",
    log_json: LogJson = False,
) -> None:  # fmt: skip
    """Read samples, tokenize them and send them to a broker.

    Start as many producers as you need, on any host. The number of producers does
    not change the steps. A producer exits when all of its samples are delivered. If
    the broker stops answering, the producer waits until the broker answers again.

    \b
    Example:
        streampack produce -c producer.yaml
    """
    from streampack.config.config_files import read_producer
    from streampack_services.daemons import producer

    logs.set_up(log_level, as_json=log_json)
    producer.import_from_here()
    producer.produce(read_producer(config), timeout_s=timeout, level=log_level, as_json=log_json)


@app.command(cls=Command)
def relay(
    broker: Annotated[
        str | None,
        typer.Option("--broker", metavar="ADDRESS", show_default=False,
                     help="The broker's address for trainers, tcp://host:port, or file:///path of its rendezvous file. "
                          "Addresses of two brokers are separated by commas. Default: STREAMPACK_ENDPOINT."),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option("--listen", metavar="ADDRESS", show_default=False,
                     help="Address for the ranks of this host, ipc:///path. Default: STREAMPACK_RELAY, or a socket "
                          "that ranks of this user find by the broker's address."),
    ] = None,
    memory: Annotated[
        str, typer.Option("--memory", metavar="SIZE", help="Most memory for steps. A step for this host must fit.")
    ] = "1GiB",
    key_file: Annotated[
        Path | None,
        typer.Option("--key-file", metavar="FILE", show_default=False,
                     help="Key file, if the broker requires a key. Default: STREAMPACK_KEY_FILE."),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", rich_help_panel=ADVANCED,
                     help="Seconds to wait for the broker's rendezvous file."),
    ] = 60.0,
    log_level: LogLevel = "info",
    log_json: LogJson = False,
) -> None:  # fmt: skip
    """Read from the broker once for all ranks of this host.

    Start one relay per trainer host, before its ranks. Each byte crosses the network
    once, and ranks that read the same data share one copy in memory. Ranks find
    the relay by themselves. If it stops, they continue with the broker at the same
    step, and return once it works again.

    \b
    Example:
        streampack relay --broker tcp://node0:7402
    """
    import os

    from streampack.config.typed_yaml import parse_size
    from streampack.transport.keys import find_key
    from streampack.transport.relay_socket import ENVIRONMENT, default_relay
    from streampack_services.daemons import relay as daemon

    logs.set_up(log_level, as_json=log_json)
    address = daemon.broker_address(broker, timeout)
    at = listen or os.environ.get(ENVIRONMENT) or default_relay(address)
    daemon.serve(address, at, parse_size(memory, "--memory"), find_key(key_file))


@app.command(cls=Command, context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The command to run, with its arguments.")],
    config: BrokerYaml,
    produce: Annotated[
        list[Path] | None,
        typer.Option("--produce", "-p", metavar="FILE", show_default=False,
                     help="Start a producer with this producer.yaml. Repeat the option for several producers."),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option("--node-rank", metavar="N", min=0, show_default=False, rich_help_panel=ADVANCED,
                     help="Number of this host, from 0. Default: SLURM_PROCID, GROUP_RANK or NODE_RANK."),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option("--log-dir", metavar="FOLDER", show_default=False,
                     help="Write the logs of the broker and the producers to files in this folder."),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", rich_help_panel=ADVANCED,
                     help="Seconds to wait until the broker on host 0 has started."),
    ] = 600.0,
    relay: Annotated[
        bool | None,
        typer.Option("--relay/--no-relay", show_default=False,
                     help="Start a relay for the ranks of this host, or none. Default: start one if the broker is on "
                          "another host and torchrun's --nproc-per-node is more than 1."),
    ] = None,
) -> None:  # fmt: skip
    """Run a training command together with its broker and producers.

    Use this command to launch a whole run. COMMAND finds the broker's addresses in
    the variables STREAMPACK_ENDPOINT, STREAMPACK_PRODUCERS and STREAMPACK_HTTP. If
    broker.yaml does not set ports, the broker uses free ports, and port 7400 for
    HTTP if it is free. 'streampack top' in another terminal finds the broker.

    All processes end together. The exit code is the exit code of COMMAND, or 1 if
    the broker or a producer failed. For several hosts, set a rendezvous file in
    broker.yaml that all hosts can read, and run the same command on each host. Host
    0 starts the broker.

    On other hosts than the broker's, this command also starts a relay if COMMAND
    starts several ranks there. Ranks find it in STREAMPACK_RELAY. If the relay ends,
    it is started again, and its ranks read from the broker meanwhile.

    \b
    Example:
        streampack run -c broker.yaml -p producer.yaml -- torchrun train.py
    """
    from streampack_services.run.command import RunOptions
    from streampack_services.run.command import run as run_all

    logs.set_up()
    raise typer.Exit(run_all(RunOptions(command, config, produce or [], node_rank, log_dir, timeout, relay)))


@app.command(cls=Command)
def check(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE...", show_default=False, help="A broker.yaml, the producer.yaml files of its run, or both."
        ),
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
    found = checking.check_all(files)
    if samples:
        found["samples"] = previewing.preview(files, samples)
    if as_json:
        print(json.dumps(found if len(files) > 1 else {**found.pop("files")[0], **found}))
    else:
        checking.show_check(found, whole)
        previewing.show_preview(found.get("samples", {}))


@app.command(cls=Command)
def demo(
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Approximate number of steps.")] = 300,
    budget: Annotated[int, typer.Option("--budget", metavar="TOKENS", min=8, help="Tokens per pack.")] = 8192,
    dp: Dp = 2,
    cp: Cp = 2,
    source: Annotated[
        str | None,
        typer.Option("--source", metavar="FILES", show_default=False,
                     help="Your own .tar shards or .jsonl files. Default: text from the Python standard library."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", metavar="NAME|FILE", show_default=False,
                     help="bytes, a tokenizer.json, or the folder of a tokenizer.json. Chats need a tokenizer.json. "
                     "Default: bytes."),
    ] = None,
    window: Annotated[
        int,
        typer.Option("--window", metavar="SAMPLES", min=1, rich_help_panel=ADVANCED,
                     help="Number of samples that the packer chooses from."),
    ] = 1024,
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
    module: Any = importlib.import_module("streampack_services.demo.demo")
    options = module.DemoOptions(
        steps=steps, budget=budget, window=window, packer=packer, dp=dp, cp=cp, source=source,
        tokenizer=tokenizer, work_ms=work_ms, json=as_json, quiet=quiet, keys=keys, relay=relay,
    )  # fmt: skip
    raise typer.Exit(module.run_demo(options))


app.command(cls=Command)(cli_watch.status)
app.command(cls=Command)(cli_watch.top)
app.command(cls=Command)(cli_watch.health)
app.command(cls=Command)(cli_plan.plan)
app.command(cls=Command)(cli_plan.report)
app.command(cls=Command)(cli_audit.why)
app.command(cls=Command)(cli_audit.replay)
app.add_typer(cli_audit.ledger, name="ledger")
app.add_typer(cli_control.settings, name="set")
app.command(cls=Command)(cli_control.skip)
app.command(cls=Command)(cli_export.export)
app.command(cls=Command)(cli_kernels.kernels)
app.add_typer(cli_keys.keys, name="keys")
