"""``streampack check``: list every value of a configuration, where it came from, and what follows from it.

The settings' structs give names, values and meanings; the YAML file gives the lines of its keys. Derived values come
from the broker's own planning. A producer's first rows are read, too. Nothing is started.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from inspect import cleandoc
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

import msgspec
import yaml
from msgspec import Meta, Struct
from rich.table import Table

from streampack.config.alignment import AlignSettings
from streampack.config.config_files import read_either
from streampack.config.daemon_settings import BrokerConfig, ProducerConfig
from streampack.config.stage_settings import StageSettings
from streampack.core.deal.assignment import packs_of_mesh
from streampack.core.deal.mesh_validation import mesh_refusal
from streampack.core.model.capacity import FeedPlan
from streampack.core.model.keys.key_groups import values_of
from streampack.core.model.keys.stream_keys import SamplePolicies
from streampack.core.model.mesh import DynamicCp, Mesh
from streampack.core.model.rules import Rules
from streampack.errors import UserError
from streampack.producer.first_rows import SORTED, FirstWarning, check_rows, known_keys
from streampack.sources import OpenedSource, open_tokenizer
from streampack.sources.row_keys import KNOWN, MEANINGS
from streampack.transport.endpoints import check_endpoint, split_endpoints
from streampack.transport.keys import find_key, load_key
from streampack_services.amounts import counted, size_text
from streampack_services.broker.authorization import BROKER
from streampack_services.broker.memory_peak import MEAN_TOKENS, PREFETCH, peak
from streampack_services.broker.memory_plan import Plan, plan
from streampack_services.check.compare import RunFiles, compare
from streampack_services.check.stage_columns import MAX_RANKS, stage_lines, stages_of
from streampack_services.check.summary import fitted, summary, warned
from streampack_services.daemons.producer import open_sources
from streampack_services.http.http_guard import parse_address
from streampack_services.terminal import new_console

Tree = dict[str, Any]


class Value(Struct, frozen=True):
    """One value of a configuration, and its meaning.

    ``path``: dotted path of its key. ``source``: ``file``, ``default`` or ``derived``. ``line``: its line in the file,
    from 1; None for other sources.
    """

    path: str
    value: Any
    source: str
    line: int | None
    meaning: str


def check(file: Path) -> Tree:
    """Check a broker.yaml or producer.yaml; return the ``values`` of its keys and what ``follows``, as ``Value`` trees.

    ``stages`` has the stages of each feed of a broker.yaml, beside the begin of the run.

    Also read the first rows of a producer's sources, and return the ``warnings`` about them. Raises ConfigError or
    UserError for wrong settings, SourceError for missing files or rows.
    """
    config, warnings, stages = read_either(file), list[FirstWarning](), dict[str, list[Tree]]()
    lines = key_lines(file.read_text(encoding="utf-8"))
    if isinstance(config, BrokerConfig):
        broker = plan(config)
        for endpoint in (config.listen.producers, config.listen.trainers):
            check_endpoint(endpoint)
        parse_address(config.listen.http)
        _check_keys(config.listen.keys)
        resolved: Struct = _resolved_broker(config, broker)
        follows = list(_follows(config, broker))
        stages = stages_of(config, broker)
    else:
        if not config.broker.startswith("file://"):
            split_endpoints(config.broker)
        find_key(config.key_file)
        resolved = _resolved_producer(config)
        follows = [
            value
            for name, source in open_sources(config).items()
            for value in _derived(f"streams.{name}", _of_source(config, name, source))
        ]
        warnings = check_rows(config)
    return {
        "file": str(file),
        "command": "broker" if isinstance(config, BrokerConfig) else "produce",
        "values": msgspec.to_builtins(list(_values(config, resolved, lines))),
        "follows": msgspec.to_builtins(follows),
        "stages": stages,
        "warnings": [warning._asdict() for warning in warnings],
    }


def check_all(files: Sequence[Path]) -> Tree:
    """Check files of one run, each by itself and with each other; return the results and warnings about them together.

    Raises UserError for two broker.yaml files, and the errors of ``check`` and ``compare``.
    """
    result = {"files": [check(file) for file in files], "warnings": list[str]()}
    configs = [(file, read_either(file)) for file in files]
    if len(files) == 1:
        return {"files": result["files"]}
    brokers = [(file, config) for file, config in configs if isinstance(config, BrokerConfig)]
    producers = [(file, config) for file, config in configs if isinstance(config, ProducerConfig)]
    if len(brokers) > 1:
        raise UserError(
            f"Got {len(brokers)} broker.yaml files: {', '.join(str(file) for file, _ in brokers)}. Pass one."
        )
    if brokers and producers:
        result["warnings"] = compare(RunFiles(*brokers[0], producers))
    return result


def _check_keys(folder: str | None) -> None:
    """Check the broker's own key in ``folder``, if there is one. Raises UserError if the broker could not use it."""
    if folder is None:
        return
    path = Path(folder) / f"{BROKER}.key"
    if not path.exists():
        raise UserError(f"listen.keys: {folder} has no {path.name}. Make one with 'streampack keys new {folder}'.")
    load_key(path)


def key_lines(text: str) -> dict[str, int]:
    """Return the line of every key of a YAML text, from 1, by the key's path: ``streams.web.weight``."""
    lines: dict[str, int] = {}

    def walk(node: yaml.Node, path: str) -> None:
        """Add the lines of all keys below ``node``, whose own path is ``path``."""
        if isinstance(node, yaml.SequenceNode):
            for entry in node.value:
                pairs = entry.value if isinstance(entry, yaml.MappingNode) else []
                names = [value.value for key, value in pairs if key.value == "name"]
                walk(entry, f"{path}.{names[0]}" if names else path)
        if not isinstance(node, yaml.MappingNode):
            return
        for key, value in node.value:
            if key.value == "<<":  # merged keys belong to this node, but are written elsewhere
                for item in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    walk(item, path)
        for key, value in node.value:
            if key.value != "<<":
                here = f"{path}.{key.value}" if path else str(key.value)
                lines[here] = key.start_mark.line + 1
                walk(value, here)

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is not None:
        walk(root, "")
    return lines


# Every value


def _values(written: Any, resolved: Any, lines: dict[str, int], path: str = "") -> Iterator[Value]:
    """Yield the value of every key of a struct and of the structs in it.

    ``written``: the struct as read from the file. ``resolved``: the same with derived values filled in. ``lines``: line
    of each key in the file. ``path``: dotted path of the struct.
    """
    for name in resolved.__struct_fields__:
        here, value = f"{path}.{name}" if path else name, getattr(resolved, name)
        before = getattr(written, name, None)
        if isinstance(value, Struct):
            yield from _values(before, value, lines, here)
        elif isinstance(value, dict) and value and all(isinstance(entry, Struct) for entry in value.values()):
            for key, entry in value.items():
                yield from _values(before[key] if before else None, entry, lines, f"{here}.{key}")
        elif isinstance(value, tuple) and value and isinstance(value[0], StageSettings):
            for entry in value:
                yield from _written(entry, lines, f"{here}.{entry.name}")
        else:
            line = lines.get(here)
            source = "file" if line else "default" if value == before else "derived"
            origin = f" (from {_origin(here)})" if source == "derived" else ""
            yield Value(here, value, source, line, meaning_of(type(resolved), name) + origin)


def _written(struct: Any, lines: dict[str, int], path: str) -> Iterator[Value]:
    """Yield the values of a struct, and of the structs in it, that stand in the file."""
    for name in struct.__struct_fields__:
        key = struct.__struct_encode_fields__[struct.__struct_fields__.index(name)]
        here, value = f"{path}.{key}", getattr(struct, name)
        if isinstance(value, Struct):
            yield from _written(value, lines, here)
        elif (line := lines.get(here)) is not None:
            yield Value(here, value, "file", line, meaning_of(type(struct), name))


def _origin(path: str) -> str:
    """Return the key from which the value of the key ``path`` is derived."""
    parts = path.split(".")
    if parts[-1] == "merge":
        return "merge"
    if parts[0] == "rules" and parts[1] in ("packer", "micro_batch_size", "shape"):
        return "rules.padded"
    if parts[0] == "streams":
        return "tokenizer" if "tokenizer" in parts else f"rules.{parts[-1]}"
    given_by = {"rules": "planned_mesh", "feeds": "streams", "fields": "its name and dtype", "durability": "pushed"}
    return given_by[parts[0]]


def meaning_of(kind: type, name: str) -> str:
    """Return the description of a field of a settings struct; empty if its annotation has none."""
    return _descriptions(kind).get(name, "")


@cache
def _descriptions(kind: type) -> dict[str, str]:
    """Return the descriptions of a settings struct's fields, by name."""
    return {
        field.name: meta.description
        for field in msgspec.structs.fields(kind)
        for part in (field.type, *get_args(field.type))
        for meta in get_args(part)
        if isinstance(meta, Meta) and meta.description
    }


def _first_sentence(meaning: str) -> str:
    """Return the first sentence of a meaning, with the key that it is derived from."""
    first, stop, rest = meaning.partition(". ")
    origin = rest.rpartition(" (from ")[2] if rest.endswith(")") and " (from " in rest else ""
    return f"{first} (from {origin}" if stop and origin else first


def json_schema() -> Tree:
    """Return the JSON schema of broker.yaml and producer.yaml, for editors."""
    kinds, definitions = msgspec.json.schema_components((BrokerConfig, ProducerConfig), ref_template="#/$defs/{name}")
    for definition in definitions.values():
        definition["description"] = cleandoc(definition["description"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "broker.yaml or producer.yaml of streampack",
        "anyOf": list(kinds),
        "$defs": definitions,
    }


def _resolved_broker(config: BrokerConfig, broker: Plan) -> BrokerConfig:
    """Return a broker's settings with all derived values filled in."""
    replace, rules = msgspec.structs.replace, broker.rules
    recorded = {stream.name: stream for feed in broker.feeds for stream in feed.rules.streams}
    streams = {
        name: replace(stream, **values_of(recorded[name], SamplePolicies)) for name, stream in config.streams.items()
    }
    feeds = {
        name: replace(feed, streams=feed.streams or tuple(streams), merge=feed.merge or config.merge)
        for name, feed in config.feeds.items()
    }
    fields = {}
    for field in rules.fields:
        written = config.fields[field.name]
        keys = (key for key in written.__struct_fields__ if getattr(written, key) is None)
        fields[field.name] = replace(written, **{key: getattr(field, key) for key in keys})
    align = replace(config.rules.align or AlignSettings(), sample=rules.align.sample, pack=rules.align.pack)
    rules_settings = replace(config.rules, align=align, balance=rules.balance, **config.rules.packing)
    return replace(config, durability=config.safely, fields=fields, rules=rules_settings, streams=streams, feeds=feeds)


def _resolved_producer(config: ProducerConfig) -> ProducerConfig:
    """Return a producer's settings with the tokenizer of each stream filled in."""
    replace = msgspec.structs.replace
    streams = {
        name: replace(stream, tokenizer=stream.tokenizer or config.tokenizer) for name, stream in config.streams.items()
    }
    return replace(config, streams=streams)


# Derived values

Row = tuple[str, Any, str]
"""Last part of a path, value and meaning of a derived value."""


def _derived(path: str, rows: Iterable[Row]) -> Iterator[Value]:
    """Yield derived values below ``path``; they have no line in the file."""
    for name, value, meaning in rows:
        yield Value(f"{path}.{name}", value, "derived", None, meaning)


def _follows(config: BrokerConfig, broker: Plan) -> Iterator[Value]:
    """Yield what follows from a broker's settings: figures of each feed, the parts of memory, the process's memory."""
    for feed in broker.feeds:
        yield from _derived(f"feeds.{feed.name}", _of_feed(config, broker, feed))
    yield from _derived("memory", _of_memory(config, broker))
    yield from _derived("process", _of_process(config, broker))


def _of_memory(config: BrokerConfig, broker: Plan) -> Iterator[Row]:
    """Yield the parts of the arena."""
    size, partition_bytes = broker.token_bytes, broker.capacity.quota_tokens * broker.token_bytes
    partitions = sum(stream.partitions for stream in config.streams.values())
    merged, waiting = sum(feed.merged_tokens for feed in broker.feeds) * size, partitions * partition_bytes
    share = "part of memory: {}".format
    yield "token_bytes", size, "size of one token with all its fields"
    step_tokens = [feed.rules.packs * feed.rules.budget for feed in broker.feeds if feed.rules.batch is None]
    if step_tokens:
        meaning = "tokens of a whole step; the option --memory of a relay must hold its host's share"
        yield "step_bytes", max(step_tokens) * size, meaning
    yield "merged_bytes", merged, share("the window, and steps that some rank has not returned yet")
    yield "waiting_bytes", waiting, share("samples that wait for their turn in the merge")
    yield "partition_bytes", partition_bytes, f"memory for waiting samples of each of the {partitions} partitions"
    yield "spare_bytes", broker.memory_bytes - merged - waiting, share("room to move samples together")


def _of_process(config: BrokerConfig, broker: Plan) -> Iterator[Row]:
    """Yield the parts of the broker process's memory at its peak, and their sum."""
    parts, most = peak(config, broker), peak(config, broker, None).total
    yield "libraries_bytes", parts.libraries, "the interpreter, libraries and compiled kernels"
    yield "arena_bytes", parts.arena, "the part of memory that is in use"
    arriving = f"chunks that are not admitted yet, up to {broker.arriving} per producer"
    yield "arriving_bytes", parts.arriving, arriving
    yield "leaving_bytes", parts.leaving, f"packs that are not sent yet, up to {PREFETCH + 1} steps per rank"
    yield "tables_bytes", parts.tables, "metadata of the samples in memory"
    full = f"peak of the process if trainers are slower than producers and a sample has {MEAN_TOKENS} tokens on average"
    yield "peak_bytes", parts.total, full
    yield "most_bytes", most, "peak of the process with the longest samples; set this size as a container's limit"


def _of_feed(config: BrokerConfig, broker: Plan, feed: FeedPlan) -> Iterator[Row]:
    """Yield the figures of one feed: tokens per step, possible meshes, padding, delays, shares of streams."""
    rules, dp, align = feed.rules, config.planned_mesh.dp, feed.rules.align.sample
    dynamic = DynamicCp.of(feed.layout)
    yield "digest", rules.digest, "digest of the rules; runs with equal digests and samples form equal steps"
    dps = [size for size in range(1, MAX_RANKS + 1) if not mesh_refusal(Mesh(dp=size), rules, feed.layout)]
    sizes = f"possible sizes of dp, up to {MAX_RANKS}"
    if rules.batch is None:
        yield "step_tokens", rules.packs * rules.budget, "tokens per step: packs times budget"
        if dynamic is None:
            micro, sizes = rules.packs // dp, f"{sizes}: the divisors of the packs per step"
            yield "micro_batches", micro, f"micro-batches per rank and step with the planned dp={dp}"
        else:
            yield from _of_groups(rules, dynamic, dp * config.planned_mesh.cp)
    else:
        least = packs_of_mesh(rules, 1, dp, 1) // dp
        yield "micro_batches", least, f"fewest micro-batches per rank and step with the planned dp={dp}"
        how = "rows of padding are added" if rules.padded else "packs are split and empty packs are added"
        sizes = f"{sizes}; {how} until all ranks have the same number"
    yield "dp_sizes", dps, sizes
    cps = [size for size in range(1, MAX_RANKS + 1) if not mesh_refusal(Mesh(cp=size), rules, feed.layout)]
    why = f"possible sizes of cp, up to {MAX_RANKS}; samples align to {align} tokens and packs to {rules.align.pack}"
    yield "cp_sizes", cps, why
    pad = (align - 1) / 2
    per_cent = f"{pad / (500 + pad):.1%} if a sample has 500 tokens on average"
    yield "padding", pad, f"expected padding tokens per sample for alignment ({per_cent})"
    if rules.batch is None:
        packer = rules.new_packer()
        packs = packer.max_wait(rules.max_window, rules.max_window) or 2 * rules.max_window
        waits = "a sample waits at most about this many steps; the limit in packs is twice the largest window "
        waits += f"({rules.max_window})"
        yield "patience", -(-packs // rules.packs), waits + packer.wait_note
        early = (
            f"a sample leaves at most about this many steps before its turn: the window ({rules.max_window}) / packs"
        )
        yield "early_steps", -(-rules.max_window // rules.packs), early
    total = sum(stream.weight for stream in rules.streams)
    for stream in rules.streams:
        share = f"share of the feed's {rules.weight_unit} from this stream, until a stream of the feed ends"
        yield f"share.{stream.name}", round(stream.weight / total, 6), share
    partitions = sum(stream.partitions for stream in rules.streams)
    yield "producers", partitions, "largest useful number of producer processes: one per partition"
    if rules.batch is not None:
        largest = feed.merged_tokens - broker.capacity.max_sample_tokens
        yield "batch_tokens", largest, "largest batch that fits in memory, in tokens"
    if len(broker.feeds) > 1:
        yield "merged_bytes", feed.merged_tokens * broker.token_bytes, "part of memory that this feed can use"


def _of_groups(rules: Rules, dynamic: DynamicCp, ranks: int) -> Iterator[Row]:
    """Yield the figures of a feed whose ``ranks`` dp x cp ranks form groups."""
    full = rules.packs * rules.budget / (ranks * dynamic.rank_tokens)
    count = max(math.ceil(full), 1)
    meaning = f"fewest micro-batches of full steps on the {ranks} planned ranks, which fill them to {full / count:.2f}"
    advice = (
        ". Above 0.95, each step adds a nearly empty one: change `step.packs`" if full / count > MOST_FILLED else ""
    )
    yield "micro_batches", count, meaning + advice
    if rules.shape == "fixed":
        why = "tokens that each rank computes in every micro-batch, with padding, because of `shape: fixed`. Set "
        yield "rank_width", dynamic.rank_tokens, f"{why}`shape: exact` for the gain of groups"


MOST_FILLED = 0.95
"""Part of the ranks' tokens that a step may fill, so that groups have room."""


def _of_source(config: ProducerConfig, name: str, source: OpenedSource) -> Iterator[Row]:
    """Yield what follows from the settings of a producer's stream: files, shards, digest and tokenizer."""
    yield "files", source.num_files, "files found"
    shards = "number of files or parts of files; set at most this number of partitions"
    yield "num_shards", source.num_shards, shards
    yield "digest", source.digest, "digest of file names, file sizes and tokenizer; the same on every host"
    for kind, keys in groupby(known_keys(config.streams[name]), KNOWN.__getitem__):
        yield f"keys.{kind}", list(keys), MEANINGS[kind]
    tokenizer = open_tokenizer(config.streams[name].tokenizer or config.tokenizer)
    ids = "number of token ids; `tokens: uint16` holds up to 65536"
    yield "tokenizer.vocab_size", tokenizer.vocab_size, ids
    yield "tokenizer.end_of_text", tokenizer.eos_token, "token after each text, with append_eos"
    yield "tokenizer.has_chat_template", tokenizer.has_chat_template, "whether it can encode chats"


# Output


def show_check(result: Tree, whole: bool) -> None:
    """Print the result of ``check_all`` in a few lines, or with ``whole`` every value."""
    console = new_console()
    lines = []
    for file in result["files"]:
        if whole:
            console.print(_table("setting", file["values"]))
            console.print()
            console.print(_table("what follows", file["follows"]))
            console.print()
        else:
            lines += summary(file)
        lines += stage_lines(file["stages"], several_feeds=len(file["stages"]) > 1)
    of_rows = [_warned(warning) for file in result["files"] for warning in file["warnings"]]
    warnings = [line for text in [*of_rows, *result.get("warnings", ())] for line in warned(text)]
    names = " and ".join(Path(file["file"]).name for file in result["files"])
    uses = " and ".join(dict.fromkeys(file["command"] for file in result["files"]))
    last = f"good: streampack {uses} can use {names}"
    if not whole:
        lines = fitted([*lines, "--all shows every value and its meaning"], len(warnings) + 1)
    for line in lines:
        console.print(line, soft_wrap=True, style="bold" if not line.startswith(" ") else "")
    for line in warnings:
        console.print(line, style="yellow", soft_wrap=True)
    console.print(last, soft_wrap=True)


def _warned(warning: Tree) -> str:
    """Return a warning about the first rows of a stream as text."""
    if warning["word"] == SORTED:
        return f"streams.{warning['stream']}: {warning['meaning']}"
    rows = f"{warning['samples']} of the first {counted(warning['rows'], 'row')}, such as {warning['where']}"
    return f"streams.{warning['stream']}: {warning['meaning']}. Concerns {rows}"


def _table(title: str, values: list[Tree]) -> Table:
    """Return a table of values, indented by their paths, with their sources unless all are derived.

    Print each meaning once, because every stream has the same keys.
    """
    with_source = any(row["source"] != "derived" for row in values)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column(title, no_wrap=True)
    table.add_column("value", overflow="fold", max_width=24)
    if with_source:
        table.add_column("from", no_wrap=True)
    table.add_column("meaning", ratio=1, overflow="fold")
    shown: list[str] = []
    explained: set[tuple[str, str]] = set()
    for row in values:
        parts = row["path"].split(".")
        for depth in range(len(parts) - 1):
            if shown[: depth + 1] != parts[: depth + 1]:
                shown = parts[: depth + 1]
                table.add_row("  " * depth + parts[depth], style="bold")
        shown = parts[:-1]
        source = [f"line {row['line']}" if row["line"] else row["source"]] if with_source else []
        name = "  " * (len(parts) - 1) + parts[-1].removesuffix("_bytes").replace("_", " " if not with_source else "_")
        meaning = "" if (name, row["meaning"]) in explained else row["meaning"]
        explained.add((name, row["meaning"]))
        table.add_row(name, _text(row["path"], row["value"]), *source, _first_sentence(meaning))
    return table


def _text(path: str, value: Any) -> str:
    """Return a value as text; the path tells whether the value is a size in bytes or a digest."""
    if path.endswith("_bytes"):
        return size_text(value)
    if path.endswith("digest"):
        return str(value)[:16]
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "-"}[value]
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "-"
    return f"{value:g}" if isinstance(value, float) else str(value)
