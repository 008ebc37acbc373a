"""What users write in broker.yaml and producer.yaml: one typed, frozen tree each.

A file is read whole and checked before anything starts: an unknown key, a wrong type or values
that contradict each other are a ``ConfigError`` that names file, path and what was expected.
Most lines have defaults; only ``streams`` must be given.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
import yaml
from msgspec import Meta, Struct

from streampack.core.fields import GROUP, LABELS, LOSS_MASK, POLICY_VERSION, POSITION_IDS, DType, Field
from streampack.core.rules import (
    MAX_WEIGHT_RATIO,
    Align,
    Balance,
    BetweenPasses,
    MergeOrder,
    OnExhaust,
    Overlong,
    PackerName,
    Poison,
    Positive,
    Rules,
    StreamRules,
    TokenType,
    WeightUnit,
)
from streampack.core.samples import IGNORE_INDEX
from streampack.errors import ConfigError
from streampack.sources import SourceSettings, TokenizerSettings

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*$")
_MAX_BYTES = 1 << 62
_MAX_CHUNK_BYTES = 256 << 20
"""A quarter of the payload that a message may have (``wire.MAX_PAYLOAD_BYTES``)."""
_MIN_LOG_BYTES = 256 << 20
"""Four files: one is written, one is ready, and only whole ones can go."""
T = TypeVar("T")
Name = Annotated[str, Meta(min_length=1, max_length=200)]
"""As long as a message can carry."""


class _Settings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings refuse what they do not know."""


class Listen(_Settings, frozen=True, kw_only=True):
    """Where the broker listens: ``tcp://host:port`` (``*`` for a free port) or ``ipc:///path``; http: ``host:port``.

    ``control``: who may change a run over HTTP, this machine (``loopback``) or whoever comes that far (``any``).
    """

    producers: str = "tcp://127.0.0.1:7401"
    trainers: str = "tcp://127.0.0.1:7402"
    http: str = "127.0.0.1:7400"
    control: Literal["loopback", "any"] = "loopback"


class Window(_Settings, frozen=True, kw_only=True):
    """How many samples the packer looks over."""

    samples: Positive = 1024


class StepSettings(_Settings, frozen=True, kw_only=True):
    """What one optimizer update eats: ``packs`` over all data-parallel ranks."""

    packs: Positive = 64


class PlannedMesh(_Settings, frozen=True, kw_only=True):
    """The mesh the run is planned for; the alignment is derived from it where none is given."""

    dp: Positive = 1
    cp: Positive = 1
    tp: Positive = 1


def derived_align(mesh: PlannedMesh, layout: str) -> Align:
    """The multiples that a mesh needs: 2 * cp where ranks hold two chunks, times tp, whose ranks share a shard.

    Layouts that cut the pack as one ask nothing of its samples.
    """
    chunks = (mesh.cp if layout == "contiguous" else 2 * mesh.cp) if mesh.cp > 1 else 1
    pack = chunks * mesh.tp
    return Align(sample=pack if layout in ("zigzag", "whole") else 1, pack=pack)


class RulesSettings(_Settings, frozen=True, kw_only=True):
    """The planning constants; ``core.rules`` explains each."""

    packer: PackerName = "exact_fill"
    budget: Positive = 8192
    window: Window = Window()
    align: Align | None = None
    step: StepSettings = StepSettings()
    balance: Balance = Balance()
    overlong: Overlong = "error"
    poison: Poison = "error"
    tail: Literal["pad", "drop"] = "pad"
    weight_unit: WeightUnit = "tokens"
    between_passes: BetweenPasses = "continue"


class StreamSettings(_Settings, frozen=True, kw_only=True):
    """A stream: its share, how often its data is gone over, over how many partitions, and its policies."""

    weight: Annotated[float, Meta(gt=0, le=1e9)] = 1.0
    passes: Positive = 1
    repeat: bool = False
    partitions: Annotated[int, Meta(ge=1, le=4096)] = 4
    on_exhaust: OnExhaust = "renormalise"
    overlong: Overlong | None = None
    poison: Poison | None = None
    pushed: bool = False


class FeedSettings(_Settings, frozen=True, kw_only=True):
    """What a trainer connects to: its streams, all where it is the only feed, and ``rules`` laid over the run's.

    ``on_rewind``: when trainers go back, pushed samples that came since are in the same steps again (``replay``), or
    dropped, and other steps follow (``discard``).
    """

    streams: tuple[str, ...] = ()
    merge: MergeOrder | None = None
    on_rewind: Literal["replay", "discard"] = "replay"
    cp_layout: Literal["zigzag", "zigzag_pack", "contiguous", "whole"] = "zigzag"
    rules: dict[str, Any] = {}


class FieldSettings(_Settings, frozen=True, kw_only=True):
    """What a sample carries beside its token ids; ``core.fields`` explains each key.

    ``loss_mask``, ``labels``, ``position_ids``, ``group`` and ``policy_version`` have a meaning, and defaults of their
    own: ``{}`` declares them.
    """

    dtype: DType | None = None
    axis: Literal["token", "sample", "item", "patch"] | None = None
    shape: tuple[Positive, ...] = ()
    align: Literal["token", "target"] | None = None
    pad: int | float | None = None
    default: int | float | None = None
    cp: Literal["slice", "replicate"] = "slice"

    def declared(self, name: str) -> Field:
        """The field of this name. Raises ConfigError."""
        known = _KNOWN_FIELDS.get(name, {})
        given = {key: value for key, value in msgspec.structs.asdict(self).items() if value is not None}
        if "dtype" not in given | known:
            raise ConfigError(f"fields.{name}: got no key 'dtype', expected one of: {', '.join(get_args(DType))}")
        try:
            return Field(name=name, **(known | given))
        except ValueError as error:
            raise ConfigError(f"fields.{name}: {error}") from None


_KNOWN_FIELDS: dict[str, dict[str, Any]] = {
    LOSS_MASK: {"dtype": "uint8", "align": "target"},
    LABELS: {"dtype": "int32", "align": "target", "pad": IGNORE_INDEX},
    POSITION_IDS: {"dtype": "int32"},
    GROUP: {"dtype": "int64", "axis": "sample", "default": -1},
    POLICY_VERSION: {"dtype": "int64", "axis": "sample", "default": -1},
}


class Retain(_Settings, frozen=True, kw_only=True):
    """What the log keeps: so many committed checkpoints, that trainers can go back to, in so many bytes.

    Full, a log that nothing was committed to takes no more pushed samples, and says so.
    """

    checkpoints: Positive = 3
    bytes: str | int = "200GiB"


class Limits(_Settings, frozen=True, kw_only=True):
    """Bounds on what is believed of a producer."""

    sample_tokens: Positive = 262_144
    chunk: str | int = "1MiB"


class BrokerConfig(_Settings, frozen=True, kw_only=True):
    """broker.yaml. ``tokens`` is the dtype of token ids: uint16 halves every byte where the vocabulary allows.

    ``state_dir``: where the log is; without one a broker that is started again reads everything again.
    ``durability``: a record counts once it survives a power cut (``os``: an fsync every 20 ms; the default where
    samples are pushed), or the end of the broker's process (``process``).
    """

    run: Annotated[str, Meta(min_length=1, max_length=200)] = "streampack"
    listen: Listen = Listen()
    rendezvous: str | None = None
    memory: str | int = "1GiB"
    seed: Annotated[int, Meta(ge=0, lt=2**62)] = 0
    merge: MergeOrder = "schedule"
    state_dir: str | None = None
    durability: Literal["os", "process"] | None = None
    retain: Retain = Retain()
    tokens: TokenType = "int32"
    rules: RulesSettings = RulesSettings()
    planned_mesh: PlannedMesh = PlannedMesh()
    streams: Annotated[dict[Name, StreamSettings], Meta(min_length=1)]
    fields: dict[Name, FieldSettings] = msgspec.field(default_factory=dict)
    feeds: Annotated[dict[Name, FeedSettings], Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: {"train": FeedSettings()}
    )
    limits: Limits = Limits()
    steps_ahead: Annotated[int, Meta(ge=1, le=64)] = 8
    drain_timeout_s: Annotated[float, Meta(gt=0)] = 25.0

    @property
    def safely(self) -> Literal["os", "process"]:
        """``durability``, or its default."""
        return self.durability or ("os" if any(stream.pushed for stream in self.streams.values()) else "process")

    @property
    def run_id(self) -> int:
        """The number that stands for the run on the wire."""
        return int.from_bytes(hashlib.blake2b(self.run.encode(), digest_size=7).digest(), "little") or 1

    def plan(self, feed: str | None = None) -> Rules:
        """The rules of ``feed``, by default the first. Raises ConfigError where settings contradict each other."""
        feed = next(iter(self.feeds)) if feed is None else feed
        settings = self._rules_of(feed)
        align = settings.align or derived_align(self.planned_mesh, self.feeds[feed].cp_layout)
        fields = tuple(field.declared(name) for name, field in self.fields.items())
        streams = tuple(
            StreamRules(
                name, stream.weight, stream.partitions, None if stream.repeat else stream.passes,
                stream.overlong or settings.overlong, stream.poison or settings.poison, stream.on_exhaust,
                stream.pushed,
            )
            for name, stream in self.streams.items()
            if name in (self.feeds[feed].streams or self.streams)
        )  # fmt: skip
        try:
            return Rules(
                packer=settings.packer, budget=settings.budget, window=settings.window.samples, align=align,
                packs=settings.step.packs, balance=settings.balance, tail=settings.tail,
                weight_unit=settings.weight_unit, merge=self.feeds[feed].merge or self.merge,
                between_passes=settings.between_passes, seed=self.seed,
                tokens=self.tokens, fields=fields, streams=streams,
            )  # fmt: skip
        except ValueError as error:
            where = f"feeds.{feed}.rules" if self.feeds[feed].rules else "rules"
            raise ConfigError(f"{where}: {error}") from None

    def _rules_of(self, feed: str) -> RulesSettings:
        """The run's rules, with what a feed lays over them."""
        if not self.feeds[feed].rules:
            return self.rules
        tree = _laid_over(msgspec.to_builtins(self.rules), self.feeds[feed].rules)
        try:
            return msgspec.convert(tree, RulesSettings)
        except (msgspec.ValidationError, ValueError) as error:
            text = _explained(str(error), RulesSettings, tree)
            raise ConfigError(f"feeds.{feed}.rules{'.' if _AT.search(str(error)) else ': '}{text}") from None

    def check(self) -> BrokerConfig:
        """Raises ConfigError for what one key alone cannot show."""
        self._check_feeds()
        for name, stream in self.streams.items():
            if stream.repeat and stream.passes != 1:
                raise ConfigError(
                    f"streams.{name}: got repeat: true and passes: {stream.passes}, expected one of them: "
                    f"repeat goes over the data for ever"
                )
            if stream.repeat and stream.on_exhaust == "stop":
                raise ConfigError(
                    f"streams.{name}: got repeat: true and on_exhaust: stop, expected one of them: "
                    f"a stream that repeats is never exhausted"
                )
        for feed in self.feeds:
            self._check_rules(self.plan(feed))
        parse_size(self.memory, "memory")
        if parse_size(self.retain.bytes, "retain.bytes") < _MIN_LOG_BYTES:
            raise ConfigError(
                f"retain.bytes: got {self.retain.bytes}, expected at least {_MIN_LOG_BYTES >> 20}MiB: the log is in "
                f"files of 64 MiB, of which one is always ready"
            )
        if parse_size(self.limits.chunk, "limits.chunk") > _MAX_CHUNK_BYTES:
            raise ConfigError(f"limits.chunk: got {self.limits.chunk}, expected at most {_MAX_CHUNK_BYTES >> 20}MiB")
        return self

    def _check_feeds(self) -> None:
        """Each stream belongs to exactly one feed. Raises ConfigError."""
        feed_of: dict[str, str] = {}
        for name, feed in self.feeds.items():
            if not feed.streams and len(self.feeds) > 1:
                raise ConfigError(
                    f"feeds.{name}.streams: got none, expected some of {', '.join(self.streams)}: with several feeds "
                    f"each names its own"
                )
            for stream in feed.streams:
                if stream not in self.streams:
                    raise ConfigError(
                        f"feeds.{name}.streams: got {stream!r}, expected one of: {', '.join(self.streams)}"
                    )
                other = feed_of.setdefault(stream, name)
                if other != name:
                    raise ConfigError(
                        f"feeds.{name}.streams: got {stream!r}, which feed {other!r} has, expected a stream in one "
                        f"feed: give it to one, or read the same data as a stream of another name"
                    )
        missing = [stream for stream in self.streams if feed_of and stream not in feed_of]
        if missing:
            raise ConfigError(
                f"streams.{missing[0]}: got no feed that reads it, expected one: add it to the streams of "
                f"{' or '.join(f'feeds.{name}' for name in self.feeds)}"
            )

    def _check_rules(self, rules: Rules) -> None:
        for stream in rules.streams:
            if not stream.pushed or (rules.merge == "arrival" and self.state_dir is not None):
                continue
            wrong = (
                "merge: got schedule, expected arrival"
                if rules.merge == "schedule"
                else ("state_dir: got none, expected a folder for the log")
            )
            raise ConfigError(
                f"{wrong}: stream {stream.name!r} is pushed: its samples are taken as they come, and kept in the log, "
                f"since nobody can send them again"
            )
        heaviest = max(stream.weight for stream in rules.streams)
        for stream in rules.streams:
            if heaviest / stream.weight > MAX_WEIGHT_RATIO:
                raise ConfigError(
                    f"streams.{stream.name}.weight: got {stream.weight:g}, expected at least "
                    f"{heaviest / MAX_WEIGHT_RATIO:g}, a {MAX_WEIGHT_RATIO}th of the heaviest"
                )
        if rules.packs % self.planned_mesh.dp:
            raise ConfigError(
                f"planned_mesh.dp: got {self.planned_mesh.dp}, expected a divisor of the {rules.packs} packs of a step"
            )


def _laid_over(tree: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    """``tree`` with the values of ``overlay`` in place of its own, key by key at every level."""
    both = {key: _laid_over(tree[key], value) for key, value in overlay.items() if _are_trees(tree.get(key), value)}
    return tree | overlay | both


def _are_trees(one: Any, other: Any) -> bool:
    return isinstance(one, dict) and isinstance(other, dict)


class ProducerStream(SourceSettings, frozen=True, kw_only=True):
    """A stream to read, and its tokenizer where it differs from the file's."""

    tokenizer: TokenizerSettings | None = None


class ProducerConfig(_Settings, frozen=True, kw_only=True):
    """producer.yaml. ``broker`` is the producers' endpoint, or ``file://`` and the rendezvous file."""

    broker: str = "tcp://127.0.0.1:7401"
    processes: Annotated[int, Meta(ge=1, le=1024)] = 1
    tokenizer: TokenizerSettings = TokenizerSettings()
    streams: Annotated[dict[Name, ProducerStream], Meta(min_length=1)]


def parse_size(value: str | int, path: str) -> int:
    """Bytes of ``16GiB``, ``500MB`` or a number. Raises ConfigError naming ``path``.

    >>> parse_size("1.5KiB", "memory")
    1536
    """
    match = _SIZE.match(str(value))
    if not match or match[2] not in _UNITS:
        raise ConfigError(f"{path}: got {value!r}, expected a size such as 16GiB or 500MB")
    size = float(match[1]) * _UNITS[match[2]]
    if size > _MAX_BYTES:
        raise ConfigError(f"{path}: got {str(value)[:40]}, expected at most {_MAX_BYTES} bytes")
    return int(size)


def read_broker(path: str | Path) -> BrokerConfig:
    """broker.yaml. Raises ConfigError."""
    tree = read_tree(path)
    if _names_sources(tree):
        raise ConfigError(f"{path}: got a producer's configuration, expected a broker.yaml: its streams have no source")
    return _checked(convert(tree, BrokerConfig, str(path)), path)


def read_producer(path: str | Path) -> ProducerConfig:
    """producer.yaml. Raises ConfigError."""
    tree = read_tree(path)
    if isinstance(tree, dict) and not _names_sources(tree) and set(tree) & _BROKERS_ALONE:
        raise ConfigError(f"{path}: got a broker's configuration, expected a producer.yaml: its streams name a source")
    return convert(tree, ProducerConfig, str(path))


def read_either(path: str | Path) -> BrokerConfig | ProducerConfig:
    """broker.yaml or producer.yaml, whichever it is. Raises ConfigError."""
    return read_producer(path) if _names_sources(read_tree(path)) else read_broker(path)


_BROKERS_ALONE = {field.encode_name for field in msgspec.structs.fields(BrokerConfig)} - {
    field.encode_name for field in msgspec.structs.fields(ProducerConfig)
}


def _names_sources(tree: Any) -> bool:
    """Whether this is a producer's configuration: only its streams name a source."""
    streams = tree.get("streams") if isinstance(tree, dict) else None
    named = list(streams.values()) if isinstance(streams, dict) else []
    return any(isinstance(stream, dict) and "source" in stream for stream in named)


def _checked(config: BrokerConfig, path: str | Path) -> BrokerConfig:
    try:
        return config.check()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def convert(tree: Any, kind: type[T], where: str = "configuration") -> T:
    """A typed tree of plain dictionaries and lists. Raises ConfigError with the path of what is wrong."""
    try:
        return msgspec.convert(tree, kind)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{where}: {_explained(str(error), kind, tree)}") from None


_AT = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_MISSING = re.compile(r"Object missing required field `(.*)`")
_ENUM = re.compile(r"Invalid enum value (.*)")
_KIND = re.compile(r"Expected `([^`]*)`(.*?)(?:, got `(.*)`)?")
_WORDS = {"object": "a mapping", "array": "a list", "str": "text", "int": "a whole number", "float": "a number",
          "bool": "true or false", "null": "nothing"}  # fmt: skip
_IN_YAML = {None: "nothing", True: "true", False: "false"}
_UNKNOWN_VALUE = object()


def _explained(text: str, kind: Any, tree: Any) -> str:
    """msgspec's words in ours: the path first, what was got, what was expected."""
    at = _AT.search(text)
    path, what = (at[1], text[: at.start()]) if at else ("", text)
    if unknown := _UNKNOWN.fullmatch(what):
        known = [field.encode_name for field in _fields(_type_at(kind, path))]
        near = difflib.get_close_matches(unknown[1], known, 1)
        meant = f"'{near[0]}' perhaps, or another" if near else "one"
        what = f"got the unknown key '{unknown[1]}', expected {meant} of: {', '.join(known)}"
    elif missing := _MISSING.fullmatch(what):
        what = f"got no key '{missing[1]}', expected one: add it"
    elif enum := _ENUM.fullmatch(what):
        what = f"got {enum[1]}, expected one of: {', '.join(map(str, get_args(_type_at(kind, path))))}"
    elif wrong := _KIND.fullmatch(what):
        of_key = " in `$" in text
        value = _UNKNOWN_VALUE if of_key else _value_at(tree, _named(path, kind, tree))
        what = ("a key: " if of_key else "") + _wrong_kind(wrong, value)
    else:
        what = what[:1].lower() + what[1:]
    return f"{_named(path, kind, tree)}: {what}" if path else what


def _wrong_kind(said: re.Match[str], value: Any) -> str:
    """``got '8k', expected a whole number``; ``said`` is msgspec's: type, bound and, if another, type given."""
    expected = " or ".join(_WORDS.get(word, word) for word in said[1].split(" | "))
    if value is _UNKNOWN_VALUE or (said[3] and isinstance(value, dict | list)):
        got = f"got {_WORDS.get(said[3], said[3])}, " if said[3] else ""
    else:
        got = f"got {_IN_YAML[value] if value is None or isinstance(value, bool) else repr(value)[:80]}, "
    quote = ": put it in quotes" if said[1] == "str" and said[3] in ("int", "float", "bool") else ""
    return f"{got}expected {expected}{said[2]}{quote}"


def _value_at(tree: Any, path: str) -> Any:
    """What ``path`` names, if that can be told: a name may hold dots."""
    for step in filter(None, path.split(".")):
        tree = tree.get(step, _UNKNOWN_VALUE) if isinstance(tree, dict) else _UNKNOWN_VALUE
    return tree


def _named(path: str, kind: Any, tree: Any) -> str:
    """``streams[...].weight`` as ``streams.web.weight``: msgspec does not say in which of them it is."""
    field, dots, rest = path.partition("[...]")
    if not dots or "." in field:
        return path
    each = get_args(_type_at(kind, field))[-1]
    for key, value in tree[field].items():
        try:
            msgspec.convert(value, each)
        except (msgspec.ValidationError, ValueError):
            return f"{field}.{key}{rest}"
    return path


def _type_at(kind: Any, path: str) -> Any:
    """The type of what ``path`` names, such as ``streams[...].weight``; for an optional one the type itself."""
    for step in filter(None, path.replace("[...]", ".[]").split(".")):
        if step == "[]":
            kind = get_args(kind)[-1]
        else:
            kind = next(field.type for field in _fields(kind) if field.encode_name == step)
        while get_origin(kind) in (Annotated, Union, UnionType):
            kind = get_args(kind)[0]
    return kind


def _fields(kind: Any) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(kind)


def read_tree(path: str | Path) -> Any:
    """What a YAML file says, unchecked. Raises ConfigError for one that cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path}: cannot be read: {reason}") from None
    try:
        tree = msgspec.yaml.decode(text)
        twice = _written_twice(yaml.compose(text, Loader=yaml.SafeLoader))
    except (msgspec.DecodeError, ValueError, yaml.YAMLError) as error:
        first = " ".join(str(error).replace('in "<unicode string>", ', "at ").split())
        raise ConfigError(f"{path}: is not YAML: {first}") from None
    if twice:
        raise ConfigError(f"{path}: {twice}")
    return {} if tree is None else tree


def _written_twice(node: yaml.Node | None, path: str = "") -> str:
    """What to say of a key that a mapping has twice, of which YAML drops the first; empty if there is none."""
    if not isinstance(node, yaml.MappingNode):
        return ""
    lines: dict[str, int] = {}
    for key, value in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in lines:
            return f"{path}{name}: got it twice, in lines {lines[name]} and {line}, expected it once: put them together"
        lines[name] = line
        if twice := _written_twice(value, f"{path}{name}."):
            return twice
    return ""
