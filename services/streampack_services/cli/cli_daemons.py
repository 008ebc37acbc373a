"""The commands that start processes of a run: ``broker``, ``produce``, ``relay`` and ``run``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from streampack_services import logs
from streampack_services.cli.cli_options import ADVANCED, BrokerYaml

LogLevel = Annotated[
    logs.Level, typer.Option("--log-level", metavar="LEVEL", help="Lowest level to log: debug, info, warning or error.")
]
LogJson = Annotated[bool, typer.Option("--log-json", help="Write each log line as a JSON object.")]


def broker(
    config: BrokerYaml,
    http: Annotated[
        str | None,
        typer.Option("--http", metavar="HOST:PORT",
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


def relay(
    broker: Annotated[
        str | None,
        typer.Option("--broker", metavar="ADDRESS",
                     help="The broker's address for trainers, tcp://host:port, or file:///path of its rendezvous file. "
                          "Addresses of two brokers are separated by commas. Default: STREAMPACK_ENDPOINT."),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option("--listen", metavar="ADDRESS",
                     help="Address for the ranks of this host, ipc:///path. Default: STREAMPACK_RELAY, or a socket "
                          "that ranks of this user find by the broker's address."),
    ] = None,
    memory: Annotated[
        str, typer.Option("--memory", metavar="SIZE", help="Most memory for steps. A step for this host must fit.")
    ] = "1GiB",
    key_file: Annotated[
        Path | None,
        typer.Option("--key-file", metavar="FILE",
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
    from streampack.config.typed_yaml import parse_size
    from streampack.transport.keys import find_key
    from streampack.transport.relay_socket import ENVIRONMENT, default_relay
    from streampack_services.daemons import relay as daemon

    logs.set_up(log_level, as_json=log_json)
    address = daemon.broker_address(broker, timeout)
    at = listen or os.environ.get(ENVIRONMENT) or default_relay(address)
    daemon.serve(address, at, parse_size(memory, "--memory"), find_key(key_file))


def run(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The command to run, with its arguments.")],
    config: BrokerYaml,
    produce: Annotated[
        list[Path] | None,
        typer.Option("--produce", "-p", metavar="FILE",
                     help="Start a producer with this producer.yaml. Repeat the option for several producers."),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option("--node-rank", metavar="N", min=0, rich_help_panel=ADVANCED,
                     help="Number of this host, from 0. Default: SLURM_PROCID, GROUP_RANK or NODE_RANK."),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option("--log-dir", metavar="FOLDER",
                     help="Write the logs of the broker and the producers to files in this folder."),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", rich_help_panel=ADVANCED,
                     help="Seconds to wait until the broker on host 0 has started."),
    ] = 600.0,
    relay: Annotated[
        bool | None,
        typer.Option("--relay/--no-relay",
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
