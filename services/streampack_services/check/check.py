"""``streampack check``: every value of a configuration, where it came from, and what follows from it.

Knows the configuration's structs by their fields alone, the YAML file by the lines of its keys,
asks the broker's own planning for what follows, and looks at a producer's first rows; starts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from inspect import cleandoc
from pathlib import Path
from typing import Any, get_args

import msgspec
import yaml
from msgspec import Meta, Struct
from rich.console import Console
from rich.table import Table

from streampack.config.alignment import AlignSettings
from streampack.config.config_files import read_either
from streampack.config.daemon_settings import BrokerConfig, ProducerConfig
from streampack.core.deal.assignment import packs_of_mesh
from streampack.core.deal.mesh_validation import mesh_refusal
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Rules
from streampack.core.packers.joint.joint import Joint
from streampack.errors import UserError
from streampack.producer.first_rows import check_rows
from streampack.sources import open_tokenizer
from streampack.transport.endpoints import check_endpoint
from streampack.transport.keys import find_key, load_key
from streampack_services.amounts import size_text
from streampack_services.broker.authorization import BROKER
from streampack_services.broker.memory_peak import MEAN_TOKENS, PREFETCH, peak
from streampack_services.broker.memory_plan import Plan, plan
from streampack_services.daemons.producer import open_sources
from streampack_services.http.http_guard import parse_address

MAX_RANKS = 64
"""Sizes of a mesh up to this are tried."""
Tree = dict[str, Any]


class Value(Struct, frozen=True):
    """One value: ``source`` is ``file`` (then ``line`` says where), ``default`` or ``derived``."""

    path: str
    value: Any
    source: str
    line: int | None
    meaning: str


def check(file: Path) -> Tree:
    """What a configuration file comes to: ``values`` of its keys, and what ``follows`` from them, each a ``Value``.

    Reads the first rows of a producer's sources. Raises ConfigError, and SourceError for shards that are not there.
    """
    config = read_either(file)
    lines = key_lines(file.read_text(encoding="utf-8"))
    if isinstance(config, BrokerConfig):
        found = plan(config)
        for endpoint in (config.listen.producers, config.listen.trainers):
            check_endpoint(endpoint)
        parse_address(config.listen.http)
        _check_keys(config.listen.keys)
        resolved: Struct = _resolved_broker(config, found)
        follows = list(_follows(config, found))
    else:
        if not config.broker.startswith("file://"):
            check_endpoint(config.broker, connects=True)
        find_key(config.key_file)
        resolved = _resolved_producer(config)
        follows = list(_follows_producer(config))
        check_rows(config)
    return {
        "command": "broker" if isinstance(config, BrokerConfig) else "produce",
        "values": msgspec.to_builtins(list(_values(config, resolved, lines))),
        "follows": msgspec.to_builtins(follows),
    }


def _check_keys(folder: str | None) -> None:
    """Raises UserError where the broker would not start for its keys."""
    if folder is None:
        return
    path = Path(folder) / f"{BROKER}.key"
    if not path.exists():
        raise UserError(f"listen.keys: {folder}: got no {path.name}, expected one of 'streampack keys new {folder}'")
    load_key(path)


def key_lines(text: str) -> dict[str, int]:
    """The line of every key of a YAML file, from 1, by its path: ``streams.web.weight``."""
    found: dict[str, int] = {}

    def walk(node: yaml.Node, path: str) -> None:
        if not isinstance(node, yaml.MappingNode):
            return
        for key, value in node.value:
            if key.value == "<<":  # what it merges in are keys of this node, written elsewhere
                for each in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    walk(each, path)
        for key, value in node.value:
            if key.value != "<<":
                here = f"{path}.{key.value}" if path else str(key.value)
                found[here] = key.start_mark.line + 1
                walk(value, here)

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is not None:
        walk(root, "")
    return found


# Every value


def _values(given: Any, resolved: Any, lines: dict[str, int], path: str = "") -> Iterator[Value]:
    """Every key of a struct and of those in it; ``resolved`` is ``given`` with what is derived filled in."""
    for name in resolved.__struct_fields__:
        here, value = f"{path}.{name}" if path else name, getattr(resolved, name)
        before = getattr(given, name, None)
        if isinstance(value, Struct):
            yield from _values(before, value, lines, here)
        elif isinstance(value, dict) and value and all(isinstance(each, Struct) for each in value.values()):
            for key, each in value.items():
                yield from _values(before[key] if before else None, each, lines, f"{here}.{key}")
        else:
            line = lines.get(here)
            source = "file" if line else "default" if value == before else "derived"
            origin = f" (from {_origin(here)})" if source == "derived" else ""
            yield Value(here, value, source, line, meaning_of(type(resolved), name) + origin)


def _origin(path: str) -> str:
    """Which key gives the value of one that is not given."""
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
    """Return the description of a field of a settings struct; empty where its annotation has none."""
    return _descriptions(kind).get(name, "")


@cache
def _descriptions(kind: type) -> dict[str, str]:
    return {
        field.name: meta.description
        for field in msgspec.structs.fields(kind)
        for meta in get_args(field.type)
        if isinstance(meta, Meta) and meta.description
    }


def json_schema() -> Tree:
    """Return the JSON schema of broker.yaml and producer.yaml, for editors."""
    kinds, definitions = msgspec.json.schema_components((BrokerConfig, ProducerConfig), ref_template="#/$defs/{name}")
    for each in definitions.values():
        each["description"] = cleandoc(each["description"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "broker.yaml or producer.yaml of streampack",
        "anyOf": list(kinds),
        "$defs": definitions,
    }


def _resolved_broker(config: BrokerConfig, found: Plan) -> BrokerConfig:
    replace, rules = msgspec.structs.replace, found.rules
    recorded = {stream.name: stream for feed in found.feeds for stream in feed.rules.streams}
    streams = {
        name: replace(stream, overlong=recorded[name].overlong, poison=recorded[name].poison)
        for name, stream in config.streams.items()
    }
    feeds = {
        name: replace(feed, streams=feed.streams or tuple(streams), merge=feed.merge or config.merge)
        for name, feed in config.feeds.items()
    }
    fields = {}
    for field in rules.fields:
        given = config.fields[field.name]
        keys = (key for key in given.__struct_fields__ if getattr(given, key) is None)
        fields[field.name] = replace(given, **{key: getattr(field, key) for key in keys})
    align = replace(config.rules.align or AlignSettings(), sample=rules.align.sample, pack=rules.align.pack)
    rules_settings = replace(config.rules, align=align, balance=rules.balance, **config.rules.packing)
    return replace(config, durability=config.safely, fields=fields, rules=rules_settings, streams=streams, feeds=feeds)


def _resolved_producer(config: ProducerConfig) -> ProducerConfig:
    replace = msgspec.structs.replace
    streams = {
        name: replace(each, tokenizer=each.tokenizer or config.tokenizer) for name, each in config.streams.items()
    }
    return replace(config, streams=streams)


# What follows


def _derived(path: str, value: Any, meaning: str) -> Value:
    return Value(path, value, "derived", None, meaning)


def _follows(config: BrokerConfig, found: Plan) -> Iterator[Value]:
    for feed in found.feeds:
        yield from _follows_feed(f"feeds.{feed.name}", config, feed.rules, feed.layout)
        if feed.rules.batch is not None:
            largest = feed.merged_tokens - found.capacity.max_sample_tokens
            yield _derived(f"feeds.{feed.name}.batch_tokens", largest, "the largest batch that fits in memory")
        if len(found.feeds) > 1:
            held = feed.merged_tokens * found.token_bytes
            yield _derived(f"feeds.{feed.name}.merged_bytes", held, "of memory: its share, which no other feed borrows")
    capacity, size = found.capacity, found.token_bytes
    partitions = sum(stream.partitions for stream in config.streams.values())
    merged, waiting = sum(feed.merged_tokens for feed in found.feeds) * size, partitions * capacity.quota_tokens * size
    share = "of memory: {}"
    yield _derived("memory.token_bytes", size, "of a token with all its fields")
    yield _derived("memory.merged_bytes", merged, share.format("the window, and steps until every rank has them"))
    yield _derived("memory.waiting_bytes", waiting, share.format("samples that wait for their stream's turn"))
    each = capacity.quota_tokens * size
    yield _derived("memory.partition_bytes", each, f"of those, for each of the {partitions} partitions")
    spare = found.memory_bytes - merged - waiting
    yield _derived("memory.spare_bytes", spare, share.format("room for cleaning up"))
    yield from _follows_peak(config, found)


def _follows_peak(config: BrokerConfig, found: Plan) -> Iterator[Value]:
    parts, most = peak(config, found), peak(config, found, None).total
    for part, meaning in {
        "libraries": "the interpreter, libraries, compiled kernels",
        "arena": "what of memory is written to",
        "arriving": f"chunks not taken in yet, up to {found.arriving} of each producer",
        "leaving": f"packs not sent yet: {PREFETCH + 1} steps of every rank",
        "tables": "what is known of each sample held",
    }.items():
        yield _derived(f"process.{part}_bytes", getattr(parts, part), meaning)
    full = f"of the broker's process, while trainers are slower than producers, at a mean of {MEAN_TOKENS} tokens"
    yield _derived("process.peak_bytes", parts.total, full)
    yield _derived("process.most_bytes", most, "the same of samples as long as they may be: a container's limit")


def _follows_feed(path: str, config: BrokerConfig, rules: Rules, layout: str) -> Iterator[Value]:
    mesh, align = config.planned_mesh, rules.align.sample
    yield _derived(f"{path}.digest", rules.digest, "names the rules: equal digests and samples, equal steps")
    dps = [dp for dp in range(1, MAX_RANKS + 1) if not mesh_refusal(Mesh(dp=dp), rules, layout)]
    if rules.batch is None:
        yield _derived(f"{path}.step_tokens", rules.packs * rules.budget, "tokens of a step: packs times budget")
        micro = rules.packs // mesh.dp
        yield _derived(f"{path}.micro_batches", micro, f"a rank and step, on the planned dp={mesh.dp}")
        yield _derived(f"{path}.dp", dps, f"what dp may be, up to {MAX_RANKS}: divisors of the packs of a step")
    else:
        least = packs_of_mesh(rules, 1, mesh.dp, 1) // mesh.dp
        yield _derived(f"{path}.micro_batches", least, f"a rank and step, at least, on the planned dp={mesh.dp}")
        how = "rows are dealt, and rows of padding" if rules.padded else "packs are split, and empty ones"
        said = f"what dp may be, up to {MAX_RANKS}: {how} added, until all have as many"
        yield _derived(f"{path}.dp", dps, said)
    cps = [cp for cp in range(1, MAX_RANKS + 1) if not mesh_refusal(Mesh(cp=cp), rules, layout)]
    why = f"what cp may be, up to {MAX_RANKS}, with samples aligned to {align}, packs to {rules.align.pack}"
    yield _derived(f"{path}.cp", cps, why)
    pad = (align - 1) / 2
    per_cent = f"{pad / (500 + pad):.1%} at a mean of 500 tokens"
    yield _derived(f"{path}.padding", pad, f"tokens a sample that alignment is expected to waste: {per_cent}")
    if rules.batch is None:
        packer = rules.new_packer()
        packs = packer.max_wait(rules.window, rules.window) or 2 * rules.window
        steps = -(-packs // rules.packs)
        waits = f"steps that a sample may wait, about: as many packs as the window of {rules.window} has samples, twice"
        if isinstance(packer, Joint):
            waits = (
                f"steps that a sample may wait, about: {packer.patience} groups of {packer.group} packs, twice, and "
            )
            waits += "as many packs as the window has samples, twice"
        yield _derived(f"{path}.patience", steps, waits)
    total = sum(stream.weight for stream in rules.streams)
    for stream in rules.streams:
        share = f"of the {rules.weight_unit}, while no stream of the feed has ended"
        yield _derived(f"{path}.share.{stream.name}", round(stream.weight / total, 6), share)
    partitions = sum(stream.partitions for stream in rules.streams)
    yield _derived(f"{path}.producers", partitions, "more producer processes than partitions have nothing to do")


def _follows_producer(config: ProducerConfig) -> Iterator[Value]:
    for name, source in open_sources(config).items():
        path = f"streams.{name}"
        yield _derived(f"{path}.files", source.num_files, "found")
        yield _derived(
            f"{path}.num_shards", source.num_shards, "files, or pieces of them; a partition without gives nothing"
        )
        yield _derived(f"{path}.digest", source.digest, "of names, sizes and tokenizer: the same on every host")
        tokenizer = open_tokenizer(config.streams[name].tokenizer or config.tokenizer)
        path += ".tokenizer"
        yield _derived(f"{path}.vocab_size", tokenizer.vocab_size, "ids are below it; up to 65536 go as tokens: uint16")
        yield _derived(f"{path}.end_of_text", tokenizer.eos_token, "ends texts, with append_eos")
        yield _derived(f"{path}.has_chat_template", tokenizer.has_chat_template, "whether it can write chats")


# For people


def show_check(found: Tree, file: Path) -> None:
    """Print what ``check`` found in ``file``; what does not fit the terminal is wrapped, never cut."""
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(_table("setting", found["values"]))
    console.print()
    console.print(_table("what follows", found["follows"]))
    console.print()
    console.print(f"good: {file.name} can be used by streampack {found['command']}", soft_wrap=True)


def _table(title: str, values: list[Tree]) -> Table:
    """Values as a tree by their paths; where they came from, unless all were derived; each meaning once."""
    with_source = any(each["source"] != "derived" for each in values)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column(title, no_wrap=True)
    table.add_column("value", overflow="fold", max_width=24)
    if with_source:
        table.add_column("from", no_wrap=True)
    table.add_column("meaning", ratio=1)
    shown: list[str] = []
    told: set[tuple[str, str]] = set()
    for each in values:
        parts = each["path"].split(".")
        for depth in range(len(parts) - 1):
            if shown[: depth + 1] != parts[: depth + 1]:
                shown = parts[: depth + 1]
                table.add_row("  " * depth + parts[depth], style="bold")
        shown = parts[:-1]
        source = [f"line {each['line']}" if each["line"] else each["source"]] if with_source else []
        name = "  " * (len(parts) - 1) + parts[-1].removesuffix("_bytes").replace("_", " " if not with_source else "_")
        meaning = "" if (name, each["meaning"]) in told else each["meaning"]  # each stream has the same keys
        told.add((name, each["meaning"]))
        table.add_row(name, _text(each["path"], each["value"]), *source, meaning)
    return table


def _text(path: str, value: Any) -> str:
    if path.endswith("_bytes"):
        return size_text(value)
    if path.endswith("digest"):
        return str(value)[:16]
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "-"}[value]
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "-"
    return f"{value:g}" if isinstance(value, float) else str(value)
