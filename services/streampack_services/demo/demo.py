"""``streampack demo``: the whole service on this machine, checked sample by sample.

It starts what a user would start, the same commands with the same files: a broker, two producers,
and a mesh of client processes that check every pack (``demo_rank``). In the end it reads the
source once more, alone, and compares: each sample must have arrived exactly once, with its bytes.
"""

from __future__ import annotations

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
from streampack.transport.rendezvous import read_rendezvous
from streampack_services.broker.authorization import new_key
from streampack_services.demo.demo_rank import RankReport, run_rank
from streampack_services.demo.demo_text import write_shards
from streampack_services.demo.demo_verdict import expected_samples, judged
from streampack_services.run.child import last_line

PARTITIONS = 4
PRODUCERS = 2
MICRO_BATCHES = 2
SEED = 17
START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What ``streampack demo`` takes; ``steps`` sizes the text that is made, and ``source`` replaces it."""

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


def run_demo(options: DemoOptions) -> int:
    """Run it, show it, and return 0 only if every sample arrived exactly once and every check held."""
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
    packs = options.dp * MICRO_BATCHES
    broker = _broker_tree(options, folder, packs)
    rules = checked(convert(broker, BrokerConfig)).plan()
    pattern = options.source
    if pattern is None:
        tokens = int((options.steps - 0.5) * packs * options.budget)
        pattern, count = write_shards(folder, tokens, options.budget // 4)
        console.print(f"made {count:,} documents of the Python standard library's text, about {tokens:,} tokens")
    source = {"source": "jsonl" if pattern.endswith(".jsonl") else "webdataset", "shards": pattern}
    expected = expected_samples(source, options.budget, PARTITIONS, SEED)
    steps = -(-sum(length for _, length in expected.values()) // (packs * options.budget))

    rendezvous, key_file = folder / "streampack.json", ""
    if options.keys:
        new_key(folder / "keys", "demo", "trainer", {})
        key_file = str(folder / "keys" / "broker.key")
    _start(processes, folder, "broker", broker, "broker", "--exit-when-finished")
    with console.status("starting the broker (the first time on a machine it compiles its kernels)"):
        endpoint = _wait_for_broker(rendezvous, processes[0], folder)
    http = read_rendezvous(rendezvous, "http")
    console.print(f"broker with its live figures at {http}/metrics")
    producer = {"broker": f"file://{rendezvous}", "key_file": key_file, "streams": {"text": source}}
    for i in range(PRODUCERS):
        _start(processes, folder, f"producer-{i}", producer, "produce")
    with _bar(console) as bar:
        task = bar.add_task("training on nothing", total=steps)
        reports, seconds = _train(
            options, endpoint, key_file, processes, folder, lambda n: bar.update(task, completed=n)
        )
        bar.update(task, completed=max(report.steps for report in reports))
    console.print()
    found = judged(reports, expected, rules, options.dp, options.cp, seconds)
    return found | {"metrics": f"{http}/metrics"}


# The processes


def _broker_tree(options: DemoOptions, folder: Path, packs: int) -> dict[str, Any]:
    """broker.yaml of the demo: on sockets of this machine; with keys as on a network, encrypted."""
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
        "tokens": "uint16",
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
    config = folder / f"{name}.yaml"
    config.write_text(json.dumps(tree))  # JSON is YAML
    with (folder / f"{name}.log").open("wb") as log:
        words = [sys.executable, "-P", "-m", "streampack", command[0], "-c", str(config), *command[1:]]
        processes.append(subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL))


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
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
    deadline = time.monotonic() + START_TIMEOUT_S
    while not rendezvous.exists():
        if broker.poll() is not None or time.monotonic() > deadline:
            raise StreampackError(f"the broker did not start: {last_line(folder / 'broker.log')}")
        time.sleep(0.02)
    return read_rendezvous(rendezvous, "trainers")


def _train(
    options: DemoOptions, endpoint: str, key_file: str, daemons: list[subprocess.Popen[bytes]], folder: Path,
    progress: Any,
) -> tuple[list[RankReport], float]:  # fmt: skip
    """Run the mesh to its end; each rank's report, and the seconds it took."""
    context = multiprocessing.get_context("spawn")
    ranks, pipes = [], []
    for dp_rank in range(options.dp):
        links = [context.Pipe() for _ in range(options.cp - 1)]
        for cp_rank in range(options.cp):
            ours, theirs = context.Pipe(duplex=False)
            mesh = Mesh(dp=options.dp, cp=options.cp, dp_rank=dp_rank, cp_rank=cp_rank)
            peers = [links[cp_rank - 1][1]] if cp_rank else [near for near, _ in links]
            arguments = (endpoint, key_file, mesh, options.work_ms, peers, theirs)
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
                said = RankReport(error="a rank ended without a word")
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
            name = ["broker", *(f"producer-{i}" for i in range(PRODUCERS))][daemons.index(failed[0])]
            raise StreampackError(f"{name} failed: {last_line(folder / f'{name}.log')}")
    return reports, time.monotonic() - (first or began)


# What is seen


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(40), MofNCompleteColumn(), TextColumn("steps"), TimeElapsedColumn(),
        console=console, transient=False, disable=console.quiet,
    )  # fmt: skip


def _table(found: dict[str, Any], options: DemoOptions) -> Table:
    """Fits a terminal of 80 columns."""
    verdict = "every sample arrived exactly once" if found["ok"] else f"FAILED {found['error']}".strip()
    style = "bold green" if found["ok"] else "bold red"
    caption = f"while it ran, Prometheus could read {found['metrics']}"
    table = Table(title=f"streampack demo: {verdict}", title_style=style, caption=caption)
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("what it says", style="dim")
    percent = "{:.3%}".format
    waste = found["waste"]
    bad = ", ".join(str(found[f"samples_{what}"]) for what in ("lost", "duplicated", "damaged"))
    rows = [
        ("samples delivered", f"{found['samples_delivered']:,}", f"of {found['samples_produced']:,} in the source"),
        ("lost, repeated, damaged", bad, "by id and checksum"),
        ("steps", f"{found['steps']:,}", f"of {options.dp * MICRO_BATCHES} packs, same on all ranks"),
        ("packs", f"{found['packs']:,}", f"of {options.budget:,} tokens"),
        ("tokens", f"{found['tokens']:,}", "real ones, no padding"),
        ("utilization", percent(found["utilization"]), "tokens / (packs x budget)"),
        ("waste: alignment", percent(waste["alignment"]), f"samples padded for cp={options.cp}"),
        ("waste: tails of packs", percent(waste["pack_tail"]), "what no sample filled"),
        ("waste: empty packs", percent(waste["empty_packs"]), "they complete the last step"),
        ("packing efficiency", percent(found["packing_efficiency"]), "fewest possible packs / packs"),
        ("bin balance", f"{found['bin_balance']:.4f}", "1: all packs equally full"),
        ("cost max / mean", f"{found['cost_max_over_mean']:.4f}", "1: no rank waits for another"),
        ("tokens/s", f"{found['tokens_per_second']:,.0f}", f"while training {options.work_ms:g} ms a pack"),
        ("next() p50, p99", f"{found['next_p50_ms']:.3f}, {found['next_p99_ms']:.3f} ms", "after the second step"),
        ("starved", percent(found["starved_fraction"]), "of the hungriest rank's time"),
        ("shards verified", f"{found['shards_verified']:,}", "labels, positions, boundaries"),
    ]  # fmt: skip
    for row in rows:
        table.add_row(*row)
    return table
