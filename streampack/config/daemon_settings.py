"""The settings in broker.yaml and producer.yaml: one typed, frozen struct for each file.

Only ``streams`` has no default. From the settings ``BrokerConfig.plan`` makes the rules of a feed. Values of a wrong
type are errors in ``typed_yaml``, and values that contradict each other in ``config_validation``.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from streampack.config.alignment import Precision, derived_align
from streampack.config.rules_settings import STEP_KINDS, PlannedMesh, RulesSettings, StepSettings, WindowSettings
from streampack.config.service_settings import Limits, Listen, Retain, StandbySettings
from streampack.config.stage_settings import MeshTerms, StageSettings, with_stages
from streampack.config.stream_settings import FeedSettings, FieldSettings, StreamSettings
from streampack.config.typed_yaml import explained, overlaid
from streampack.core.model.bounded import Name
from streampack.core.model.keys.key_groups import Keys, values_of
from streampack.core.model.keys.planning_keys import PlanningKeys, RunKeys
from streampack.core.model.rules import LATE_TIMEOUT_S, Rules
from streampack.core.packers.registry import parameters_of
from streampack.errors import ConfigError
from streampack.sources.settings import SourceSettings
from streampack.tokenizers.base import TokenizerSettings

MEMORY = "1GiB"
"""Default size of a broker's arena."""


class BrokerConfig(
    RunKeys, frozen=True, kw_only=True,
    listed="run listen rendezvous memory seed merge state_dir durability retain standby tokens",
):  # fmt: skip
    """The settings in broker.yaml."""

    run: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=200,
            description="Name of the run. The broker rejects producers and trainers of a run with another name",
        ),
    ] = "streampack"
    listen: Listen = Listen()
    rendezvous: Annotated[
        str | None,
        Meta(
            description="File on a shared file system where the broker writes its addresses. Producers and trainers "
            "then connect to `file://` followed by this path. Use this if the broker's host is not known in advance"
        ),
    ] = None
    memory: Annotated[
        str | int,
        Meta(
            description="Size of the arena, such as `16GiB`. The arena is the memory for samples that are not "
            "delivered yet; the broker reserves it at startup"
        ),
    ] = MEMORY
    state_dir: Annotated[
        str | None,
        Meta(
            description="Folder of the log, on a local disk. With a log, a restarted broker continues where it "
            "stopped. Default: no log, so a restarted broker reads the data again"
        ),
    ] = None
    durability: Annotated[
        Literal["os", "process"] | None,
        Meta(
            description="Failure that the log's records survive: a power failure (`os`, which calls fsync every 20 "
            "ms), or only a crash of the broker's process (`process`). Default: `os` if a stream is pushed, else "
            "`process`"
        ),
    ] = None
    retain: Retain = Retain()
    standby: Annotated[
        StandbySettings | None,
        Meta(
            description="Settings of a second broker on another host, which copies the log and takes over when this "
            "host is lost. Without it, a broker whose host is lost must be started again where its `state_dir` is"
        ),
    ] = None
    rules: RulesSettings = RulesSettings()
    planned_mesh: PlannedMesh = PlannedMesh()
    precision: Annotated[
        Precision | None,
        Meta(
            description="FP8 format of the model's matrix products. It sets the multiple of tokens that packs are "
            "padded to on each rank: 128 (`fp8_blockwise`), 32 (`mxfp8`) or 16 (`fp8`). Default: no FP8"
        ),
    ] = None
    streams: Annotated[dict[Name, StreamSettings], Meta(min_length=1)]
    fields: Annotated[
        dict[Name, FieldSettings],
        Meta(
            description="Fields by name. A field holds values that samples have in addition to their token ids, such "
            "as a loss mask"
        ),
    ] = msgspec.field(default_factory=dict)
    feeds: Annotated[dict[Name, FeedSettings], Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: {"train": FeedSettings()}
    )
    stages: Annotated[
        tuple[StageSettings, ...],
        Meta(
            description="Stages of the run, in order: parts with other rules or another mixture, each from a step on, "
            "or after a number of tokens. Default: one set of rules for the whole run"
        ),
    ] = ()
    limits: Limits = Limits()
    steps_ahead: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Maximum number of steps that the broker forms ahead of the slowest rank. A higher number "
            "hides longer delays of producers but uses more memory",
        ),
    ] = 8
    drain_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds after SIGTERM during which trainers can still fetch steps that are already formed. "
            "Keep this time below the scheduler's grace period, which is often 30 s",
        ),
    ] = 25.0

    @property
    def safely(self) -> Literal["os", "process"]:
        """The durability that applies: the key's value, or by default ``os`` with a pushed stream, else ``process``."""
        return self.durability or ("os" if any(stream.pushed for stream in self.streams.values()) else "process")

    @property
    def run_id(self) -> int:
        """Number that identifies the run in messages, a hash of its name."""
        return int.from_bytes(hashlib.blake2b(self.run.encode(), digest_size=7).digest(), "little") or 1

    @property
    def digest(self) -> bytes:
        """Digest of the settings that decide the steps, 16 bytes. Raises ConfigError if settings contradict."""
        rules = "\n".join(f"{feed} {self.plan(feed).digest}" for feed in self.feeds)
        return hashlib.blake2b(rules.encode(), digest_size=16).digest()

    def plan(self, feed: str | None = None) -> Rules:
        """Return the rules of ``feed``, by default the first feed. Raises ConfigError if settings contradict."""
        feed = next(iter(self.feeds)) if feed is None else feed
        settings = self.rules_of(feed)
        mesh, layout = self.planned_mesh, self.feeds[feed].layout
        align = derived_align(mesh.cp, mesh.tp, layout, self.precision, settings.align)
        declared = tuple(field.declared(name) for name, field in self.fields.items())
        fields = tuple(field for field in declared if not field.of_media)
        media_fields = tuple(field for field in declared if field.of_media)
        streams = tuple(
            stream.recorded(name, settings)
            for name, stream in self.streams.items()
            if name in (self.feeds[feed].streams or self.streams)
        )
        late_s = None if settings.late_timeout_s == LATE_TIMEOUT_S else settings.late_timeout_s
        keys = values_of(self, RunKeys) | values_of(settings, PlanningKeys) | settings.packing
        keys |= {"merge": self.feeds[feed].merge or self.merge, "balance": settings.balance.planned(mesh.dp)}
        try:
            batch, window = settings.step.batch, settings.window
            if window == "auto" and batch is not None:
                window = WindowSettings()  # the digest of batches has always had a window
            keys["window"] = window if window == "auto" else window.samples
            if batch is None:
                keys["in_turn"] = settings.in_turn and "in_turn" in parameters_of(settings.packer)
            rules = Rules(
                **keys, align=align, packs=settings.step.packs or Rules().packs, batch=batch,
                max_policy_lag=settings.staleness.max_policy_lag, paces=settings.staleness.on_exceed == "wait",
                late_timeout_s=late_s, fields=fields, media_fields=media_fields, streams=streams,
            )  # fmt: skip
        except ValueError as error:
            where = f"feeds.{feed}.rules" if self.feeds[feed].rules else "rules"
            raise ConfigError(f"{where}: {error}") from None
        stages = self.stages_of(feed)
        return with_stages(rules, stages, self.mesh_terms(feed), self._stages_path(feed)) if stages else rules

    def stages_of(self, feed: str) -> tuple[StageSettings, ...]:
        """Return the settings of a feed's stages: its own, or else the run's."""
        own = self.feeds[feed].stages
        return self.stages if own is None else own

    def _stages_path(self, feed: str) -> str:
        """Return the path of a feed's stages in the file."""
        return "stages" if self.feeds[feed].stages is None else f"feeds.{feed}.stages"

    def mesh_terms(self, feed: str) -> MeshTerms:
        """Return the settings from which the alignment and the groups of a feed's stages follow."""
        settings = self.rules_of(feed)
        return MeshTerms(
            self.planned_mesh, self.feeds[feed].layout, self.precision, settings.align, settings.balance.group
        )

    def rules_of(self, feed: str) -> RulesSettings:
        """Return the run's rules with a feed's own values in place of the run's."""
        if not self.feeds[feed].rules:
            return self.rules
        over = self.feeds[feed].rules
        values = msgspec.to_builtins(self.rules)
        if isinstance(over.get("step"), dict) and any(kind in over["step"] for kind in STEP_KINDS):
            values["step"] |= {kind: getattr(StepSettings(), kind) for kind in STEP_KINDS}
        values = overlaid(values, over)
        try:
            return msgspec.convert(values, RulesSettings)
        except (msgspec.ValidationError, ValueError) as error:
            raise ConfigError(explained(error, RulesSettings, values, f"feeds.{feed}.rules")) from None


class ProducerStream(SourceSettings, frozen=True, kw_only=True):
    """A source of one stream, and its tokenizer if it differs from that of the whole file."""

    tokenizer: TokenizerSettings | None = None


class ProducerConfig(Keys, frozen=True, kw_only=True):
    """The settings in producer.yaml."""

    broker: Annotated[
        str,
        Meta(
            description="The broker's address for producers (`listen.producers` in broker.yaml), or `file://` "
            "followed by the path of the broker's rendezvous file. Addresses of a broker and of another one that may "
            "take over are separated by commas"
        ),
    ] = "tcp://127.0.0.1:7401"
    key_file: Annotated[
        str | None,
        Meta(
            description="File with the producer's key, which is required if the broker sets `listen.keys`. Default: "
            "the path in the environment variable `STREAMPACK_KEY_FILE`"
        ),
    ] = None
    processes: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Number of processes that read and tokenize. Raise this number if trainers wait for data; "
            "the content of the steps does not change",
        ),
    ] = 1
    tokenizer: TokenizerSettings = TokenizerSettings()
    streams: Annotated[dict[Name, ProducerStream], Meta(min_length=1)]
