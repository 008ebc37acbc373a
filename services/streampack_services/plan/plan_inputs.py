"""Read the lengths that ``streampack plan`` and ``report`` use, from their arguments and configurations.

The argument decides where lengths come from. A URL is a broker, a folder with a log is a state_dir, and a file of
numbers is lengths. Without an argument, the streams of producer.yaml are read and tokenized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from streampack.config.config_files import read_either
from streampack.config.daemon_settings import BrokerConfig, ProducerConfig, ProducerStream
from streampack.core.model.fields import LOSS_MASK
from streampack.core.model.rules import Rules
from streampack.errors import UserError
from streampack.sources import Source
from streampack_services.daemons.producer import import_from_here, open_sources
from streampack_services.forecast import run_lengths, sampling
from streampack_services.forecast.lengths import Workload, is_lengths, of_lengths, read_lengths
from streampack_services.forecast.run_lengths import Served
from streampack_services.http import http_client
from streampack_services.log.segments import segment_files
from streampack_services.plan.plan_options import PlanInputs, PlanOptions, base_of_broker, base_of_run, options_of
from streampack_services.plan.stage_plan import RunningFeed

TO_TOKENIZE = 20_000
"""Samples to tokenize of each stream, without ``--samples``."""
TO_PACK = 50_000
"""Lengths to pack, without ``--samples``."""
PARTITIONS = 4
"""Partitions of a stream, the default of broker.yaml."""


def read(args: PlanInputs) -> tuple[Workload, PlanOptions]:
    """Return the lengths and the grid of settings that the arguments of ``streampack plan`` ask for.

    Raises UserError for wrong arguments, SourceError for unreadable sources, Unreachable if no broker answers.
    """
    configs, source = list(args.configs), args.what
    if source is not None and source.endswith((".yaml", ".yml")):
        configs, source = [*configs, Path(source)], None
    broker, producer = _configs(configs)
    base = base_of_broker(broker, args.feed) if broker is not None else PlanOptions(Rules(window="auto", in_turn=True))
    if source is None and producer is not None:
        options = options_of(args, base)
        return _of_producer(args, producer, base), options
    if source is None:
        raise UserError(
            "There are no lengths to plan for. Pass a file of lengths, a broker's address, a state_dir or -c "
            "producer.yaml."
        )
    if producer is not None:
        raise UserError(f"Got both {source} and a producer.yaml to read lengths from. Pass only one of them.")
    run = _run(source, args.feed, args.timeout_s, waiting=True)
    if run is None:
        options = options_of(args, base.without_media())
        return _noted(_of_file(args, source), base), options
    if broker is None:
        base = base_of_run(run, other_mesh=bool(args.meshes))
    if run.media_sizes is None or not base.has_media:
        return _noted(run.workload(args.samples or TO_PACK), base), options_of(args, base.without_media())
    return run.workload(args.samples or TO_PACK, media=True), options_of(args, base)


def read_stage(args: PlanInputs) -> tuple[Workload, PlanOptions, RunningFeed]:
    """Return the lengths, the grid of settings and the feed for ``streampack plan --stage``.

    Raises UserError for wrong arguments, Unreachable if no broker answers.
    """
    if args.configs or args.packer or args.meshes or args.shapes or args.packs or args.batch or args.precision:
        raise UserError(
            "Got --stage with options for other rules or another mesh. A stage is planned for the running broker: pass "
            "its address, and --budget or --window at most."
        )
    if args.what is not None and not args.what.startswith(("http://", "https://", "file://")):
        raise UserError(f"Got --stage with {args.what}. Pass the address of a running broker, e.g. http://node0:7400.")
    status = http_client.read_status(args.what, args.timeout_s)
    run = run_lengths.from_status(status, args.feed, waiting=True)
    base = base_of_run(run, other_mesh=False).without_media()
    options = options_of(args, base)
    if (now := options.rules.budget) not in options.budgets:
        options = replace(options, budgets=(now, *options.budgets))
    options = replace(options, budgets=tuple(sorted(options.budgets, key=lambda budget: budget != now)))
    packers = {"exact_fill": ("exact_fill", "joint"), "joint": ("joint", "exact_fill")}
    own = options.packers[0]
    others = packers.get(own, (own,)) if run.rules.batch is None else (own,)
    name = args.feed or next(iter(status.feeds))
    feed = status.feeds[name]
    running = RunningFeed(
        status.endpoints.get("http", args.what or ""), run.rules, feed.steps.formed, feed.held_limit_tokens,
        sum(stream.overlong for stream in status.streams if stream.feed == name), run.mesh,
    )  # fmt: skip
    return _noted(run.workload(args.samples or TO_PACK), base), replace(options, packers=others), running


def run_of(source: str | None, feed: str | None, timeout_s: float) -> Served:
    """Return the run at a broker's address (None: the default address) or in a state_dir, for ``streampack report``.

    Raises UserError if ``source`` is neither, Unreachable if no broker answers.
    """
    run = _run(source, feed, timeout_s)
    if run is not None:
        return run
    if Path(str(source)).is_dir():
        raise UserError(f"{source} is a folder without a log. Pass a broker's state_dir or its address.")
    raise UserError(
        f"{source} is neither a broker's state_dir nor a broker's address. For a file of lengths, run 'streampack plan "
        f"{source}'."
    )


def _run(source: str | None, feed: str | None, timeout_s: float, *, waiting: bool = False) -> Served | None:
    """Return the run at a broker's address (None: the default address) or in a state_dir; None for anything else.

    ``waiting``: with the lengths of samples that are in no step yet.
    """
    if source is None or source.startswith(("http://", "https://", "file://")):
        return run_lengths.from_status(http_client.read_status(source, timeout_s), feed, waiting=waiting)
    if Path(source).is_dir() and segment_files(Path(source)):
        return run_lengths.from_ledger(Path(source), feed, waiting=waiting)
    return None


# Lengths


def _noted(workload: Workload, base: PlanOptions) -> Workload:
    """Return ``workload`` with a note if its samples have media, whose sizes are not known."""
    if not base.has_media:
        return workload
    note = (
        "the forecast counts tokens only: it knows neither the limits nor the cost of media. To forecast them, pass a "
        "state_dir or -c producer.yaml"
    )
    return replace(workload, notes=[*workload.notes, note])


def _of_producer(args: PlanInputs, producer: ProducerConfig, base: PlanOptions) -> Workload:
    """Read and tokenize samples of the streams in producer.yaml; return their lengths, and the sizes of their media."""
    import_from_here()
    declared = [field for field in base.rules.all_fields if field.of_media]
    media = {field.name for field in declared}
    partitions = {stream.name: stream.partitions for stream in base.rules.streams if stream.name in producer.streams}
    partitions = partitions or dict.fromkeys(producer.streams, PARTITIONS)
    streams, unread = dict[str, ProducerStream](), set[str]()
    for name in partitions:
        fields = producer.streams[name].fields
        streams[name] = msgspec.structs.replace(
            producer.streams[name], fields={field: key for field, key in fields.items() if field in media}
        )
        unread |= set(fields) - media - {LOSS_MASK}
    sources: Mapping[str, Source] = open_sources(msgspec.structs.replace(producer, streams=streams))
    names = ", ".join(partitions)
    if len(partitions) > 1 and not base.keep_budget:
        names += " (equal weights; pass -c broker.yaml for others)"
    workload = sampling.sample(names, sources, partitions, args.samples or TO_TOKENIZE, base.rules.seed, declared)
    if unread and not base.keep_budget:
        note = (
            f"the forecast counts tokens only: to read media in {', '.join(sorted(unread))}, pass -c broker.yaml, too"
        )
        workload = replace(workload, notes=[*workload.notes, note])
    return _with_total(workload, args)


def _of_file(args: PlanInputs, source: str) -> Workload:
    """Read a file of lengths. Raises UserError for any other path."""
    if is_lengths(Path(source)):
        return of_lengths(Path(source).name, read_lengths(Path(source)), args.samples or TO_PACK, args.total)
    if Path(source).is_dir():
        raise UserError(
            f"{source} is a folder without a log. Pass a broker's state_dir, its address, or a file of lengths."
        )
    raise UserError(
        f"{source} is not a file of lengths, a broker's address or a state_dir. To plan for your data, name the data "
        f"files in a producer.yaml and pass -c producer.yaml."
    )


def _with_total(workload: Workload, args: PlanInputs) -> Workload:
    """Return ``workload`` with the samples per pass of ``--total``. Raises UserError for an impossible number."""
    if args.total is None:
        return workload
    if len(workload.streams) > 1:
        raise UserError("Got --total and several streams, but --total needs exactly one stream. Leave --total out.")
    stream = workload.streams[0]
    if stream.whole or args.total < stream.num_samples:
        raise UserError(f"--total is {args.total:,} samples, but {stream.num_samples:,} samples were read"
                        f"{', the whole stream' if stream.whole else ''}. Leave --total out.")  # fmt: skip
    return replace(workload, streams=(replace(stream, total=float(args.total), shard_samples=None, every=None),))


def _configs(files: list[Path]) -> tuple[BrokerConfig | None, ProducerConfig | None]:
    """Read at most one broker.yaml and one producer.yaml. Raises UserError for a second file of one kind."""
    configs: dict[str, BrokerConfig | ProducerConfig] = {}
    for file in files:
        config = read_either(file)
        kind = "broker.yaml" if isinstance(config, BrokerConfig) else "producer.yaml"
        if kind in configs:
            raise UserError(f"{file} is a second {kind}. Pass at most one broker.yaml and one producer.yaml.")
        configs[kind] = config
    return configs.get("broker.yaml"), configs.get("producer.yaml")  # type: ignore[return-value]
