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
from collections.abc import Callable
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
    window: int | None
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
    daemons = _Daemons(folder)
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        result = _run(options, daemons, console)
    finally:
        signal.signal(signal.SIGTERM, previous)
        daemons.stop()
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print(json.dumps(result))
    else:
        Console().print(_table(result, options))
    return 0 if result["ok"] else 1


def _run(options: DemoOptions, daemons: _Daemons, console: Console) -> dict[str, Any]:
    """Run broker, producers and ranks to the end of the source, and return the figures of the demo's table."""
    packs, folder = options.dp * MICRO_BATCHES, daemons.folder
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
    daemons.start("broker", "broker", "--exit-when-finished", config=broker)
    with console.status("starting the broker (the first start on a machine compiles kernels)"):
        daemons.wait_for("broker", rendezvous.exists)
    endpoint, http = read_rendezvous(rendezvous, "trainers"), read_rendezvous(rendezvous, "http")
    console.print(f"the broker serves its metrics at {http}/metrics")
    producer = {"broker": f"file://{rendezvous}", "key_file": key_file, "streams": {"text": source}}
    for i in range(PRODUCERS):
        daemons.start(f"producer-{i}", "produce", config=producer)
    relay = f"ipc://{folder}/relay" if options.relay else OFF
    if options.relay:
        key = ["--key-file", key_file] if key_file else []
        daemons.start("relay", "relay", "--broker", endpoint, "--listen", relay, "--log-json", *key)
        daemons.wait_for("relay", lambda: is_served(relay))
    with _bar(console) as bar:
        task = bar.add_task("reading and checking", total=steps)
        reports, seconds = _train(options, endpoint, key_file, relay, daemons, lambda n: bar.update(task, completed=n))
        bar.update(task, completed=max(report.steps for report in reports))
    console.print()
    result = judged(reports, expected, rules, Mesh(dp=options.dp, cp=options.cp, tp=options.tp), seconds)
    if options.relay:
        daemons.stop("relay")
        figures = json.loads(daemons.last_line("relay"))["figures"]
        result |= {f"relay_{key}": figures[key] for key in ("received_bytes", "sent_bytes")}
    return result | {"metrics": f"{http}/metrics"}


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
        "memory": "1GiB" if options.budget <= 65_536 and (options.window or 0) <= 4096 else "8GiB",
        "seed": SEED,
        "tokens": "uint16" if options.tokenizer is None else "int32",
        "planned_mesh": {"dp": options.dp, "cp": options.cp},
        "rules": {
            "packer": options.packer, "budget": options.budget,
            "window": "auto" if options.window is None else {"samples": options.window},
            "step": {"packs": packs}, "overlong": "truncate", "poison": "drop",
        },
        "streams": {"text": {"partitions": PARTITIONS}},
    }  # fmt: skip


class _Daemons:
    """Processes that run commands of streampack, by name, with their configurations and logs in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *command: str, config: dict[str, Any] | None = None) -> None:
        """Start ``streampack COMMAND``, which logs to ``NAME.log``; ``config`` is written to ``NAME.yaml``."""
        words = [sys.executable, "-P", "-m", "streampack", *command]
        if config is not None:
            file = self.folder / f"{name}.yaml"
            file.write_text(json.dumps(config))  # JSON is YAML
            words += ["-c", str(file)]
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def wait_for(self, name: str, is_ready: Callable[[], bool]) -> None:
        """Wait until a process is ready. Raises StreampackError if it ends, or does not start in START_TIMEOUT_S."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_ready():
            if self._processes[name].poll() is not None or time.monotonic() > deadline:
                raise StreampackError(f"The {name} did not start. Its last log line: {self.last_line(name)}")
            time.sleep(0.02)

    def check(self) -> None:
        """Raise StreampackError if a process has failed."""
        for name, process in self._processes.items():
            if process.poll() not in (None, 0):
                raise StreampackError(f"The process {name} failed. Its last log line: {self.last_line(name)}")

    def last_line(self, name: str) -> str:
        """Return the last line of a process's log."""
        return last_line(self.folder / f"{name}.log")

    def stop(self, *names: str) -> None:
        """Terminate processes, by default all; kill those that have not ended after 5 seconds."""
        processes = [self._processes[name] for name in names or self._processes]
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _train(
    options: DemoOptions, endpoint: str, key_file: str, relay: str, daemons: _Daemons, progress: Callable[[int], None]
) -> tuple[list[RankReport], float]:
    """Run a process per rank of the mesh; return the ranks' reports and the time from the first step on, in seconds.

    ``progress`` is called with the number of steps that a rank has read so far.
    """
    context = multiprocessing.get_context("spawn")
    ranks, pipes = [], []
    tp = options.tp
    for dp_rank, tp_rank in itertools.product(range(options.dp), range(tp)):
        links = [context.Pipe() for _ in range(options.cp - 1)]
        for cp_rank in range(options.cp):
            own_end, child_end = context.Pipe(duplex=False)
            mesh = Mesh(dp=options.dp, cp=options.cp, tp=tp, dp_rank=dp_rank, cp_rank=cp_rank, tp_rank=tp_rank)
            peers = [links[cp_rank - 1][1]] if cp_rank else [near for near, _ in links]
            arguments = (endpoint, key_file, relay, mesh, options.work_ms, peers, child_end)
            rank = context.Process(target=run_rank, args=arguments, daemon=True)
            rank.start()
            child_end.close()
            ranks.append(rank)
            pipes.append(own_end)
        for near, far in links:
            near.close()
            far.close()
    try:
        return _gather(pipes, daemons, progress)
    finally:
        for rank in ranks:
            rank.join(timeout=5)
            if rank.is_alive():
                rank.kill()


def _gather(
    pipes: list[Connection], daemons: _Daemons, progress: Callable[[int], None]
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
                message = pipe.recv()
            except EOFError:
                message = RankReport(error="a rank's process ended without a report")
            if isinstance(message, int):
                first = first or time.monotonic()
                progress(message)
                continue
            reports.append(message)
            open_.remove(pipe)
            if message.error:
                return reports, 0.0
        daemons.check()
    return reports, time.monotonic() - (first or began)


# Output


def _bar(console: Console) -> Progress:
    """Return a progress bar that counts steps."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(40), MofNCompleteColumn(), TextColumn("steps"), TimeElapsedColumn(),
        console=console, transient=False, disable=console.quiet,
    )  # fmt: skip


def _table(result: dict[str, Any], options: DemoOptions) -> Table:
    """Return the demo's figures as a table that fits a terminal of 80 columns."""
    verdict = "every sample arrived exactly once" if result["ok"] else f"FAILED {result['error']}".strip()
    style = "bold green" if result["ok"] else "bold red"
    caption = f"The demo served its metrics for Prometheus at {result['metrics']}"
    table = Table(title=f"streampack demo: {verdict}", title_style=style, caption=caption)
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("meaning", style="dim")
    percent = "{:.3%}".format
    padding = result["waste"]
    bad = ", ".join(str(result[f"samples_{kind}"]) for kind in ("lost", "duplicated", "damaged"))
    rows = [
        ("samples delivered", f"{result['samples_delivered']:,}", f"of {result['samples_produced']:,} in the source"),
        ("lost, repeated, damaged", bad, "by id and checksum"),
        ("steps", f"{result['steps']:,}", f"{options.dp * MICRO_BATCHES} packs; same on all ranks"),
        ("packs", f"{result['packs']:,}", f"of {options.budget:,} tokens"),
        ("tokens", f"{result['tokens']:,}", "without padding"),
        ("utilization", percent(result["utilization"]), "tokens / (packs x budget)"),
        ("padding: alignment", percent(padding["alignment"]), f"samples padded for cp={options.cp}"),
        ("padding: pack tails", percent(padding["pack_tail"]), "space after the last sample"),
        ("padding: empty packs", percent(padding["empty_packs"]), "complete the last step"),
        ("packing efficiency", percent(result["packing_efficiency"]), "fewest possible packs / packs"),
        ("bin balance", f"{result['bin_balance']:.4f}", "1.0: all packs equally full"),
        ("load imbalance", f"{result['cost_max_over_mean']:.4f}", "max / mean cost; 1.0 is best"),
        ("tokens/s", f"{result['tokens_per_second']:,.0f}", f"each pack takes {options.work_ms:g} ms of work"),
        ("next() p50, p99", f"{result['next_p50_ms']:.3f}, {result['next_p99_ms']:.3f} ms", "after the second step"),
        ("data wait", percent(result["starved_fraction"]), "share of time, worst rank"),
        ("shards verified", f"{result['shards_verified']:,}", "labels, positions, boundaries"),
    ]  # fmt: skip
    if options.relay:
        received, sent = result["relay_received_bytes"], result["relay_sent_bytes"]
        rows.append(("bytes to the relay", f"{received / 1e6:,.1f} MB", "from the broker, each once"))
        rows.append(("bytes to the ranks", f"{sent / 1e6:,.1f} MB", f"{options.tp} tp ranks share a copy"))
    for row in rows:
        table.add_row(*row)
    return table
