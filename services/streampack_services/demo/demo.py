"""``streampack demo``: run the whole service on this machine, check every sample, and print a table of figures.

The demo runs the commands that a user would run: a broker and two producers. It also starts a mesh of client processes
that check every pack (``demo_rank``). In the end ``demo_verdict`` reads the source once more and compares: each sample
must have arrived exactly once, with the same tokens.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from streampack.config.config_validation import checked
from streampack.config.daemon_settings import BrokerConfig
from streampack.config.typed_yaml import convert
from streampack.core.model.mesh import Mesh
from streampack.errors import StreampackError
from streampack.transport.relay_socket import OFF, is_served
from streampack.transport.rendezvous import read_rendezvous
from streampack_services.broker.authorization import new_key
from streampack_services.demo.demo_rank import RankReport, run_rank
from streampack_services.demo.demo_text import write_shards
from streampack_services.demo.demo_verdict import expected_samples, judged
from streampack_services.run.child import last_line

PARTITIONS = 4
PRODUCERS = 2
MICRO_BATCHES = 2
TP = 2
"""Tensor-parallel ranks with a relay."""
SEED = 17
START_TIMEOUT_S = 600.0
"""Limit for the broker's start, in seconds: a busy machine compiles the kernels for minutes."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of ``streampack demo``.

    The demo writes text for about ``steps`` steps, unless ``source`` names files to read instead. Their ``tokenizer``
    is ``bytes``, ``package.module:function``, a tokenizer.json, or its folder. Each rank pretends to compute for
    ``work_ms`` milliseconds per pack.
    """

    steps: int
    budget: int
    window: int
    packer: str
    dp: int
    cp: int
    source: str | None
    work_ms: float
    json: bool
    quiet: bool
    keys: bool = False
    relay: bool = False
    """Read through a relay, with ``TP`` tensor-parallel ranks for each shard."""
    tokenizer: str | None = None

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks that read the same data."""
        return TP if self.relay else 1


def run_demo(options: DemoOptions) -> int:
    """Run the demo and print its result; return 0 if every sample arrived exactly once and every check held, else 1."""
    quiet = options.json or options.quiet
    console = Console(stderr=quiet, quiet=quiet)
    folder = Path(tempfile.mkdtemp(prefix="streampack-demo-"))
    processes: list[subprocess.Popen[bytes]] = []
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        found = _run(options, folder, processes, console)
    finally:
        signal.signal(signal.SIGTERM, previous)
        _stop(processes)
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print(json.dumps(found))
    else:
        Console().print(_table(found, options))
    return 0 if found["ok"] else 1


def _run(
    options: DemoOptions, folder: Path, processes: list[subprocess.Popen[bytes]], console: Console
) -> dict[str, Any]:
    """Run broker, producers and ranks to the end of the source, and return the figures of the demo's table.

    Append every process that is started to ``processes``, so that the caller can stop them.
    """
    packs = options.dp * MICRO_BATCHES
    broker = _broker_tree(options, folder, packs)
    rules = checked(convert(broker, BrokerConfig)).plan()
    pattern = options.source
    if pattern is None:
        tokens = int((options.steps - 0.5) * packs * options.budget)
        pattern, count = write_shards(folder, tokens, options.budget // 4)
        console.print(f"wrote {count:,} documents from the Python standard library, about {tokens:,} tokens")
    source: dict[str, Any] = {"source": "jsonl" if pattern.endswith(".jsonl") else "webdataset", "shards": pattern}
    if options.tokenizer is not None:
        is_name = options.tokenizer == "bytes" or ":" in options.tokenizer
        # Every token is learned: the ranks expect labels without a loss mask.
        source["tokenizer"] = {"name" if is_name else "file": options.tokenizer, "train_on": "all"}
    expected = expected_samples(source, options.budget, PARTITIONS, SEED)
    steps = -(-sum(length for _, length in expected.values()) // (packs * options.budget))

    rendezvous, key_file = folder / "streampack.json", ""
    if options.keys:
        new_key(folder / "keys", "demo", "trainer", {})
        key_file = str(folder / "keys" / "broker.key")
    _start(processes, folder, "broker", broker, "broker", "--exit-when-finished")
    with console.status("starting the broker (the first start on a machine compiles kernels)"):
        endpoint = _wait_for_broker(rendezvous, processes[0], folder)
    http = read_rendezvous(rendezvous, "http")
    console.print(f"the broker serves its metrics at {http}/metrics")
    producer = {"broker": f"file://{rendezvous}", "key_file": key_file, "streams": {"text": source}}
    for i in range(PRODUCERS):
        _start(processes, folder, f"producer-{i}", producer, "produce")
    relay = f"ipc://{folder}/relay" if options.relay else OFF
    if options.relay:
        words = ["--broker", endpoint, "--listen", relay, "--log-json", *(["--key-file", key_file] if key_file else [])]
        _start_words(processes, folder, "relay", "relay", *words)
        _wait_for_relay(relay, processes[-1], folder)
    with _bar(console) as bar:
        task = bar.add_task("reading and checking", total=steps)
        reports, seconds = _train(
            options, endpoint, key_file, relay, processes, folder, lambda n: bar.update(task, completed=n)
        )
        bar.update(task, completed=max(report.steps for report in reports))
    console.print()
    found = judged(reports, expected, rules, Mesh(dp=options.dp, cp=options.cp, tp=options.tp), seconds)
    if options.relay:
        _stop(processes[-1:])
        found |= _relayed(folder / "relay.log")
    return found | {"metrics": f"{http}/metrics"}


# The processes


def _broker_tree(options: DemoOptions, folder: Path, packs: int) -> dict[str, Any]:
    """Return the demo's broker.yaml: Unix sockets, or encrypted TCP with ``--keys``; ``packs`` packs per step."""
    any_port = "tcp://127.0.0.1:*"
    return {
        "run": "demo",
        "listen": {
            **{side: any_port if options.keys else f"ipc://{folder}/{side}" for side in ("producers", "trainers")},
            "http": "127.0.0.1:0",
            "keys": str(folder / "keys") if options.keys else None,
        },
        "rendezvous": str(folder / "streampack.json"),
        "memory": "1GiB" if options.budget <= 65_536 and options.window <= 4096 else "8GiB",
        "seed": SEED,
        "tokens": "uint16" if options.tokenizer is None else "int32",
        "planned_mesh": {"dp": options.dp, "cp": options.cp},
        "rules": {
            "packer": options.packer, "budget": options.budget, "window": {"samples": options.window},
            "step": {"packs": packs}, "overlong": "truncate", "poison": "drop",
        },
        "streams": {"text": {"partitions": PARTITIONS}},
    }  # fmt: skip


def _start(
    processes: list[subprocess.Popen[bytes]], folder: Path, name: str, tree: dict[str, Any], *command: str
) -> None:
    """Start ``streampack COMMAND`` with ``tree`` as its configuration; append the process to ``processes``.

    The configuration is ``NAME.yaml`` in ``folder``, and the process logs to ``NAME.log`` there.
    """
    config = folder / f"{name}.yaml"
    config.write_text(json.dumps(tree))  # JSON is YAML
    _start_words(processes, folder, name, command[0], "-c", str(config), *command[1:])


def _start_words(processes: list[subprocess.Popen[bytes]], folder: Path, name: str, *command: str) -> None:
    """Start ``streampack COMMAND``, which logs to ``NAME.log`` in ``folder``; append the process to ``processes``."""
    with (folder / f"{name}.log").open("wb") as log:
        words = [sys.executable, "-P", "-m", "streampack", *command]
        processes.append(subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL))


def _wait_for_relay(relay: str, process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait until the relay listens. Raises StreampackError if it ends, or does not start in time."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not is_served(relay):
        if process.poll() is not None or time.monotonic() > deadline:
            raise StreampackError(f"The relay did not start. Its last log line: {last_line(folder / 'relay.log')}")
        time.sleep(0.02)


def _relayed(log: Path) -> dict[str, int]:
    """Return the bytes that a stopped relay received from the broker, and those that its ranks got, from its log."""
    figures = json.loads(last_line(log))["figures"]
    return {"relay_received_bytes": figures["received_bytes"], "relay_sent_bytes": figures["sent_bytes"]}


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """Terminate all processes; kill those that have not ended after 5 seconds."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_broker(rendezvous: Path, broker: subprocess.Popen[bytes], folder: Path) -> str:
    """Wait until the broker has written its rendezvous file; return the trainers' endpoint from it.

    Raises StreampackError if the broker ends, or does not start within START_TIMEOUT_S seconds.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while not rendezvous.exists():
        if broker.poll() is not None or time.monotonic() > deadline:
            raise StreampackError(f"The broker did not start. Its last log line: {last_line(folder / 'broker.log')}")
        time.sleep(0.02)
    return read_rendezvous(rendezvous, "trainers")


def _train(
    options: DemoOptions, endpoint: str, key_file: str, relay: str, daemons: list[subprocess.Popen[bytes]],
    folder: Path, progress: Any,
) -> tuple[list[RankReport], float]:  # fmt: skip
    """Run a process per rank of the mesh; return the ranks' reports and the time from the first step on, in seconds.

    ``progress`` is called with the number of steps that a rank has read so far.
    """
    context = multiprocessing.get_context("spawn")
    ranks, pipes = [], []
    tp = options.tp
    for dp_rank, tp_rank in itertools.product(range(options.dp), range(tp)):
        links = [context.Pipe() for _ in range(options.cp - 1)]
        for cp_rank in range(options.cp):
            ours, theirs = context.Pipe(duplex=False)
            mesh = Mesh(dp=options.dp, cp=options.cp, tp=tp, dp_rank=dp_rank, cp_rank=cp_rank, tp_rank=tp_rank)
            peers = [links[cp_rank - 1][1]] if cp_rank else [near for near, _ in links]
            arguments = (endpoint, key_file, relay, mesh, options.work_ms, peers, theirs)
            rank = context.Process(target=run_rank, args=arguments, daemon=True)
            rank.start()
            theirs.close()
            ranks.append(rank)
            pipes.append(ours)
        for near, far in links:
            near.close()
            far.close()
    try:
        return _gather(pipes, daemons, folder, progress)
    finally:
        for rank in ranks:
            rank.join(timeout=5)
            if rank.is_alive():
                rank.kill()


def _gather(
    pipes: list[Connection], daemons: list[subprocess.Popen[bytes]], folder: Path, progress: Any
) -> tuple[list[RankReport], float]:
    """Receive the progress and the report of every rank; return the reports and the time in seconds.

    Return early if a rank reports an error. Raises StreampackError if a daemon fails.
    """
    reports: list[RankReport] = []
    open_ = list(pipes)
    began = time.monotonic()
    first: float | None = None
    while open_:
        for pipe in wait(open_, timeout=1.0):
            assert isinstance(pipe, Connection)
            try:
                said = pipe.recv()
            except EOFError:
                said = RankReport(error="a rank's process ended without a report")
            if isinstance(said, int):
                first = first or time.monotonic()
                progress(said)
                continue
            reports.append(said)
            open_.remove(pipe)
            if said.error:
                return reports, 0.0
        failed = [process for process in daemons if process.poll() not in (None, 0)]
        if failed:
            name = ["broker", *(f"producer-{i}" for i in range(PRODUCERS)), "relay"][daemons.index(failed[0])]
            raise StreampackError(f"The process {name} failed. Its last log line: {last_line(folder / f'{name}.log')}")
    return reports, time.monotonic() - (first or began)


# Output


def _bar(console: Console) -> Progress:
    """Return a progress bar that counts steps."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(40), MofNCompleteColumn(), TextColumn("steps"), TimeElapsedColumn(),
        console=console, transient=False, disable=console.quiet,
    )  # fmt: skip


def _table(found: dict[str, Any], options: DemoOptions) -> Table:
    """Return the demo's figures as a table that fits a terminal of 80 columns."""
    verdict = "every sample arrived exactly once" if found["ok"] else f"FAILED {found['error']}".strip()
    style = "bold green" if found["ok"] else "bold red"
    caption = f"The demo served its metrics for Prometheus at {found['metrics']}"
    table = Table(title=f"streampack demo: {verdict}", title_style=style, caption=caption)
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("meaning", style="dim")
    percent = "{:.3%}".format
    padding = found["waste"]
    bad = ", ".join(str(found[f"samples_{what}"]) for what in ("lost", "duplicated", "damaged"))
    rows = [
        ("samples delivered", f"{found['samples_delivered']:,}", f"of {found['samples_produced']:,} in the source"),
        ("lost, repeated, damaged", bad, "by id and checksum"),
        ("steps", f"{found['steps']:,}", f"{options.dp * MICRO_BATCHES} packs; same on all ranks"),
        ("packs", f"{found['packs']:,}", f"of {options.budget:,} tokens"),
        ("tokens", f"{found['tokens']:,}", "without padding"),
        ("utilization", percent(found["utilization"]), "tokens / (packs x budget)"),
        ("padding: alignment", percent(padding["alignment"]), f"samples padded for cp={options.cp}"),
        ("padding: pack tails", percent(padding["pack_tail"]), "space after the last sample"),
        ("padding: empty packs", percent(padding["empty_packs"]), "complete the last step"),
        ("packing efficiency", percent(found["packing_efficiency"]), "fewest possible packs / packs"),
        ("bin balance", f"{found['bin_balance']:.4f}", "1.0: all packs equally full"),
        ("load imbalance", f"{found['cost_max_over_mean']:.4f}", "max / mean cost; 1.0 is best"),
        ("tokens/s", f"{found['tokens_per_second']:,.0f}", f"each pack takes {options.work_ms:g} ms of work"),
        ("next() p50, p99", f"{found['next_p50_ms']:.3f}, {found['next_p99_ms']:.3f} ms", "after the second step"),
        ("data wait", percent(found["starved_fraction"]), "share of time, worst rank"),
        ("shards verified", f"{found['shards_verified']:,}", "labels, positions, boundaries"),
    ]  # fmt: skip
    if options.relay:
        received, sent = found["relay_received_bytes"], found["relay_sent_bytes"]
        rows.append(("bytes to the relay", f"{received / 1e6:,.1f} MB", "from the broker, each once"))
        rows.append(("bytes to the ranks", f"{sent / 1e6:,.1f} MB", f"{options.tp} tp ranks share a copy"))
    for row in rows:
        table.add_row(*row)
    return table
