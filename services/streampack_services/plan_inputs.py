"""What ``streampack plan`` is asked: a workload and the options of the grid, out of arguments and configurations.

Where lengths come from follows from what is named: a URL is a broker, a folder with a log is a state_dir, a file of
numbers is lengths, and anything else is data to tokenize.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast, get_args

import msgspec
from rich.console import Console

from streampack.config import BrokerConfig, PlannedMesh, ProducerConfig
from streampack.config_files import read_either
from streampack.core.packers import PACKERS
from streampack.core.rules import Align, Balance, Overlong, Rules
from streampack.errors import UserError
from streampack.sources import Source
from streampack_services import http_client, sampling, served
from streampack_services.advisor import JOINT, PlanOptions, default_budgets, default_packers, default_windows
from streampack_services.forecast import with_packer
from streampack_services.lengths import (
    StreamLengths,
    Workload,
    counted,
    is_lengths,
    of_lengths,
    read_lengths,
    stretches,
)
from streampack_services.local import open_stream
from streampack_services.producer import import_from_here, open_sources
from streampack_services.savings import served_by
from streampack_services.segments import segment_files
from streampack_services.served import Served

TO_TOKENIZE = 20_000
TO_PACK = 50_000
"""Samples, where ``--samples`` does not say."""
PARTITIONS = 4
"""Of a stream, as in broker.yaml."""


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """The arguments of ``streampack plan``, as they were written."""

    what: str | None
    configs: list[Path] = field(default_factory=list)
    budget: str | None = None
    window: str | None = None
    packer: str | None = None
    meshes: list[str] = field(default_factory=list)
    packs: int | None = None
    overlong: str | None = None
    samples: int | None = None
    total: int | None = None
    tokenizer: str = "bytes"
    text_key: str | None = None
    tokens_key: str | None = None
    feed: str | None = None
    timeout_s: float = 5.0


@dataclass(frozen=True, slots=True)
class _Base:
    """What a configuration or a run gives to begin with; ``align`` None: it follows from the mesh."""

    rules: Rules
    align: Align | None = None
    joint: Balance = JOINT
    mesh: PlannedMesh | None = None
    layout: str = "zigzag"
    given: bool = True


def read(given: PlanInputs) -> tuple[Workload, PlanOptions]:
    """The lengths and the grid. Raises UserError for what cannot be, SourceError, Unreachable."""
    configs = list(given.configs)
    what = given.what
    if what is not None and what.endswith((".yaml", ".yml")):
        configs, what = [*configs, Path(what)], None
    broker, producer = _configs(configs)
    base = _base_of(broker, given.feed) if broker is not None else _Base(Rules(), given=False)
    if what is None and producer is not None:
        return _of_producer(given, producer, base), _options(given, base)
    if what is None:
        raise UserError(
            "got nothing to plan for, expected lengths, data, a broker's address, a state_dir or -c producer.yaml"
        )
    if producer is not None:
        raise UserError(f"got {what} and a producer.yaml, expected one of them to read")
    run = _run(what, given.feed, given.timeout_s)
    if run is None:
        return _of_file(given, what, base), _options(given, base)
    if broker is None:
        align, joint = (None, JOINT) if given.meshes else (run.rules.align, _joint_of(run.rules))
        base = _Base(run.rules, align, joint, run.mesh)
    return _of_run(run, given.samples or TO_PACK), _options(given, base)


def run_of(what: str | None, feed: str | None, budget: int, window: int, packer: str, timeout_s: float) -> Served:
    """What ``streampack report`` is about; the rules are for a file of lengths. Raises UserError, Unreachable."""
    if what is None:
        return served.from_status(http_client.fetch_status(None, timeout_s), feed)
    run = _run(what, feed, timeout_s)
    if run is not None:
        return run
    path = Path(what)
    if path.is_dir():
        raise UserError(f"{what}: got a folder without a log, expected a broker's state_dir, its address, or lengths")
    if path.is_file() and not is_lengths(path):
        raise UserError(f"{what}: got no lengths, expected a .npy or whole numbers; 'streampack plan' reads data")
    _check_packer(packer)
    rules = with_packer(Rules(budget=budget, window=window, packs=1), packer)
    lengths = read_lengths(path)
    some = stretches(lengths, served.MOST)
    part = f" ({len(some):,} of {len(lengths):,} lengths)" if len(some) < len(lengths) else ""
    return served_by(path.name + part, some, rules)


def _run(what: str, feed: str | None, timeout_s: float) -> Served | None:
    """A broker at an address, or a state_dir; None for anything else."""
    if what.startswith(("http://", "https://", "file://")):
        return served.from_status(http_client.fetch_status(what, timeout_s), feed)
    if Path(what).is_dir() and segment_files(Path(what)):
        return served.from_ledger(Path(what), feed)
    return None


@contextmanager
def saying() -> Iterator[Callable[[str], None]]:
    """Shows on a terminal's standard error what is being forecast."""
    console = Console(stderr=True, highlight=False, markup=False)
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with console.status("planning") as status:
        yield lambda text: status.update(f"planning: {text}")


# Lengths


def _of_producer(given: PlanInputs, producer: ProducerConfig, base: _Base) -> Workload:
    import_from_here()
    names = [stream.name for stream in base.rules.streams if stream.name in producer.streams] or list(producer.streams)
    streams = {name: producer.streams[name] for name in names}
    sources: Mapping[str, Source] = open_sources(msgspec.structs.replace(producer, streams=streams))
    known = {stream.name: stream.partitions for stream in base.rules.streams}
    partitions = {name: known.get(name, PARTITIONS) for name in names}
    what = ", ".join(names)
    if len(names) > 1 and not base.given:
        what += " (of equal weights: -c broker.yaml says others)"
    return _with_total(sampling.sample(what, sources, partitions, given.samples or TO_TOKENIZE, base.rules.seed), given)


def _of_file(given: PlanInputs, what: str, base: _Base) -> Workload:
    if is_lengths(Path(what)):
        return of_lengths(Path(what).name, read_lengths(Path(what)), given.samples or TO_PACK, given.total)
    import_from_here()
    settings = {"text_key": given.text_key, "tokens_key": given.tokens_key}
    source, _ = open_stream("data", what, settings, given.tokenizer)
    most = given.samples or TO_TOKENIZE
    return _with_total(sampling.sample(what, {"data": source}, {"data": PARTITIONS}, most, base.rules.seed), given)


def _of_run(run: Served, most: int) -> Workload:
    lengths = stretches(run.lengths, most)
    whole = run.ended and len(lengths) == run.samples
    every = counted(run.lengths) if len(run.lengths) == run.samples and not whole and run.ended else None
    total = float(run.samples) if run.ended else None
    note = f"{len(lengths):,} of the {run.samples:,} samples served, {run.note}; over-long ones as they were left"
    return Workload(run.what, (StreamLengths("data", (lengths,), (whole,), total, every=every),), [note])


def _with_total(workload: Workload, given: PlanInputs) -> Workload:
    if given.total is None:
        return workload
    if len(workload.streams) > 1:
        raise UserError("got --total and several streams, expected one stream: whose samples would it count?")
    stream = workload.streams[0]
    if stream.whole or given.total < stream.num_samples:
        raise UserError(f"got a total of {given.total:,} samples, but {stream.num_samples:,} were read"
                        f"{', which are all' if stream.whole else ''}: leave --total out")  # fmt: skip
    known = StreamLengths(stream.name, stream.partitions, stream.ended, float(given.total))
    return replace(workload, streams=(known,))


# The grid


def _configs(files: list[Path]) -> tuple[BrokerConfig | None, ProducerConfig | None]:
    broker: BrokerConfig | None = None
    producer: ProducerConfig | None = None
    for file in files:
        found = read_either(file)
        if (broker if isinstance(found, BrokerConfig) else producer) is not None:
            raise UserError(
                f"{file}: got a second configuration of its kind, expected one broker.yaml and producer.yaml"
            )
        if isinstance(found, BrokerConfig):
            broker = found
        else:
            producer = found
    return broker, producer


def _base_of(broker: BrokerConfig, feed: str | None) -> _Base:
    name = next(iter(broker.feeds)) if feed is None else feed
    if name not in broker.feeds:
        raise UserError(f"got feed {name!r}, expected one of: {', '.join(broker.feeds)}")
    rules = broker.plan(name)
    given = broker.rules.align is not None or "align" in broker.feeds[name].rules or broker.precision is not None
    own = broker.feeds[name].rules.get("balance", {})
    grouped = broker.rules.balance.group is not None or "group" in own
    joint = _joint_of(rules)
    joint = joint if grouped else msgspec.structs.replace(joint, group=None)
    return _Base(rules, rules.align if given else None, joint, broker.planned_mesh, broker.feeds[name].cp_layout)


def _joint_of(rules: Rules) -> Balance:
    """What joint packs are formed by."""
    return Balance("joint", group=rules.balance.group, patience=rules.balance.patience)


def _options(given: PlanInputs, base: _Base) -> PlanOptions:
    rules, meshes = base.rules, tuple(map(_mesh, given.meshes)) or (base.mesh or PlannedMesh(),)
    if rules.batch is not None:
        raise UserError(
            "got rules whose steps are batches, expected step: {packs: N}: plan forecasts the packs of a stream; "
            "give it the lengths alone, or plan one batch with streampack.plan_step"
        )
    packer, rules = rules.new_packer().name, with_packer(rules, rules.packer)
    if given.packs is not None:
        rules = msgspec.structs.replace(rules, packs=given.packs)
    axes: dict[str, Any] = {}
    for axis, around in (("budget", default_budgets), ("window", default_windows)):
        asked = _numbers(getattr(given, axis), axis)
        axes[axis] = asked if len(asked) > 1 else around(asked[0] if asked else getattr(rules, axis))
    names = _words(given.packer)
    for name in names:
        _check_packer(name)
    packers = names if len(names) > 1 else default_packers(names[0] if names else packer)
    overlong = given.overlong if given.overlong is not None else _overlong_of(rules)
    if overlong is not None and overlong not in get_args(Overlong):
        raise UserError(f"--overlong: got {overlong!r}, expected one of: {', '.join(get_args(Overlong))}")
    return PlanOptions(
        rules, base.layout, axes["budget"], axes["window"], packers, meshes, base.align, base.joint,
        cast("Overlong | None", overlong), base.given or given.budget is not None, given.overlong is not None,
    )  # fmt: skip


def _check_packer(name: str) -> None:
    if name not in PACKERS:
        raise UserError(f"--packer: got {name!r}, expected one of: {', '.join(PACKERS)}")


def _overlong_of(rules: Rules) -> str | None:
    """The policy of all streams where they share one that lets a run go on; None where it is ``error``."""
    policies = {stream.overlong for stream in rules.streams} - {"error"}
    return policies.pop() if len(policies) == 1 else None


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in (text or "").split(",") if word.strip()))


def _numbers(text: str | None, name: str) -> tuple[int, ...]:
    words = _words(text)
    if any(not word.isascii() or not word.isdigit() or not 0 < int(word) < 2**31 for word in words):
        raise UserError(f"--{name}: got {text!r}, expected whole numbers above 0, such as 4096,8192")
    return tuple(map(int, words))


def _mesh(text: str) -> PlannedMesh:
    """``dp=8,cp=2``."""
    sizes: dict[str, int] = {}
    for word in _words(text):
        name, _, size = word.partition("=")
        if name not in ("dp", "cp", "tp") or not size.isascii() or not size.isdigit() or not 0 < int(size) < 2**20:
            raise UserError(f"--mesh: got {text!r}, expected sizes of dp, cp and tp, such as dp=8,cp=2")
        sizes[name] = int(size)
    return PlannedMesh(**sizes)
