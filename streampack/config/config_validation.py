"""Checks of broker.yaml that need more than one key: values that contradict each other, or bounds that are computed.

All errors that are known before a broker starts are raised here, except those that depend on the size of its arena.
"""

from __future__ import annotations

from streampack.config.daemon_settings import BrokerConfig
from streampack.config.typed_yaml import parse_size
from streampack.core.deal.mesh_validation import batch_refusal, mesh_refusal
from streampack.core.model.bounded import MAX_STREAMS
from streampack.core.model.mesh import DynamicCp, Mesh
from streampack.core.model.rule_changes import rules_of_stages
from streampack.core.model.rules import MAX_WEIGHT_RATIO, Rules
from streampack.errors import ConfigError, UserError
from streampack.transport.endpoints import check_endpoint

_MAX_CHUNK_BYTES = 256 << 20
"""A quarter of the largest payload of a message (``wire.frames.MAX_PAYLOAD_BYTES``)."""
MIN_LOG_BYTES = 256 << 20
"""Four files of the log: one is written, one is prepared, and only complete ones can be removed."""


def checked(config: BrokerConfig) -> BrokerConfig:
    """Return ``config`` unchanged if its values agree. Raises ConfigError for the first that do not."""
    _check_feeds(config)
    for side in ("producers", "trainers"):
        endpoint = getattr(config.listen, side)
        try:
            check_endpoint(endpoint)
        except UserError as error:
            meant = "" if "://" in endpoint else f". Did you mean tcp://{endpoint}?"
            raise ConfigError(f"listen.{side}: {error}{meant}") from None
    for name, stream in config.streams.items():
        if stream.repeat and stream.passes != 1:
            raise ConfigError(
                f"streams.{name}: got `repeat: true` and `passes: {stream.passes}`, expected only one of them. With "
                "`repeat`, passes never end, so remove one of the two keys"
            )
        if stream.repeat and stream.on_exhaust == "stop":
            raise ConfigError(
                f"streams.{name}: got `repeat: true` and `on_exhaust: stop`, expected only one of them. A stream that "
                "repeats is never exhausted, so remove one of the two keys"
            )
    _check_standby(config)
    for feed in config.feeds:
        rules = config.plan(feed)
        if (number := len(rules.streams)) > MAX_STREAMS:
            raise ConfigError(
                f"feed {feed!r}: got {number} streams, expected at most {MAX_STREAMS}. Read several of them as one "
                "stream, whose `shards` are the files of all"
            )
        _check_rules(config, rules, config.feeds[feed].layout)
        _check_stages(config, feed, rules)
    parse_size(config.memory, "memory")
    if parse_size(config.retain.bytes, "retain.bytes") < MIN_LOG_BYTES:
        raise ConfigError(
            f"retain.bytes: got {config.retain.bytes}, expected at least {MIN_LOG_BYTES >> 20}MiB, because the log "
            "needs at least four files of 64 MiB"
        )
    if parse_size(config.limits.chunk, "limits.chunk") > _MAX_CHUNK_BYTES:
        raise ConfigError(f"limits.chunk: got {config.limits.chunk}, expected at most {_MAX_CHUNK_BYTES >> 20}MiB")
    return config


def _check_feeds(config: BrokerConfig) -> None:
    """Raise ConfigError unless each stream belongs to exactly one feed."""
    feed_of: dict[str, str] = {}
    for name, feed in config.feeds.items():
        if not feed.streams and len(config.feeds) > 1:
            raise ConfigError(
                f"feeds.{name}.streams: got no streams, expected some of {', '.join(config.streams)}. If there are "
                "several feeds, each feed must list its streams"
            )
        for stream in feed.streams:
            if stream not in config.streams:
                raise ConfigError(f"feeds.{name}.streams: got {stream!r}, expected one of: {', '.join(config.streams)}")
            other = feed_of.setdefault(stream, name)
            if other != name:
                raise ConfigError(
                    f"feeds.{name}.streams: got {stream!r}, which feed {other!r} also lists, expected each stream in "
                    "only one feed. Remove the stream from one of the feeds, or read the same data as a stream with "
                    "another name"
                )
    missing = [stream for stream in config.streams if feed_of and stream not in feed_of]
    if missing:
        raise ConfigError(
            f"streams.{missing[0]}: got a stream that no feed lists, expected each stream in one feed. Add the stream "
            f"to {' or '.join(f'feeds.{name}.streams' for name in config.feeds)}"
        )


def _check_standby(config: BrokerConfig) -> None:
    """Raise ConfigError if a broker with these settings cannot have a standby."""
    if config.standby is not None and config.state_dir is None:
        raise ConfigError(
            "state_dir: got none, expected a folder for the log, because `standby` is set. The standby copies the log"
        )


def _check_rules(config: BrokerConfig, rules: Rules, layout: str) -> None:
    """Raise ConfigError if a feed's rules contradict the streams, the planned mesh or the ``layout`` of shards."""
    for stream in rules.streams:
        if not stream.pushed or (rules.merge == "arrival" and config.state_dir is not None):
            continue
        wrong = (
            "merge: got schedule, expected arrival"
            if rules.merge == "schedule"
            else "state_dir: got none, expected a folder for the log"
        )
        raise ConfigError(
            f"{wrong}, because stream {stream.name!r} is pushed. The broker packs pushed samples in order of arrival "
            "and keeps them in the log, because producers cannot send them again"
        )
    for_pushed = [
        ("rules.staleness.max_policy_lag", rules.max_policy_lag, "only pushed samples have a policy version"),
        ("rules.share", rules.share, "only groups that a program pushes can share tokens"),
        *((f"fields.{field.name}", "`late: true`", "only pushed samples can get values later")
          for field in rules.late_fields),
    ]  # fmt: skip
    for key, value, why in for_pushed:
        if value is not None and not any(stream.pushed for stream in config.streams.values()):
            raise ConfigError(
                f"{key}: got {value} without a pushed stream, expected at least one pushed stream, because {why}. "
                "Remove the key, or set `pushed: true` on a stream"
            )
    if rules.late_timeout_s is not None and not rules.late_fields:
        raise ConfigError(
            f"rules.late_timeout_s: got {rules.late_timeout_s} without a late field, expected a field with "
            "`late: true`. Remove the key, or declare such a field"
        )
    heaviest = max(stream.weight for stream in rules.streams)
    for stream in rules.streams:
        if heaviest / stream.weight > MAX_WEIGHT_RATIO:
            raise ConfigError(
                f"streams.{stream.name}.weight: got {stream.weight:g}, expected at least "
                f"{heaviest / MAX_WEIGHT_RATIO:g}, which is the largest weight divided by {MAX_WEIGHT_RATIO}"
            )
    dynamic, planned = DynamicCp.of(layout) is not None, config.planned_mesh
    refusal = mesh_refusal(Mesh(dp=planned.dp if dynamic else 1, cp=planned.cp), rules, layout)
    if refusal:
        raise ConfigError(f"planned_mesh: {refusal}")
    if dynamic:
        return
    if rules.batch is not None:
        _check_batch(config, rules)
    elif rules.packs % config.planned_mesh.dp:
        raise ConfigError(
            f"planned_mesh.dp: got {config.planned_mesh.dp}, expected a divisor of {rules.packs}, the number of packs "
            "in a step"
        )


def _check_stages(config: BrokerConfig, feed: str, rules: Rules) -> None:
    """Raise ConfigError for a stage that no planned mesh can read."""
    mesh, layout = config.planned_mesh, config.feeds[feed].layout
    for settings, stage, after in zip(config.stages_of(feed), rules.stages, rules_of_stages(rules)[1:], strict=True):
        path, mesh = f"stages.{stage.name}", settings.planned_mesh or mesh
        if config.feeds[feed].stages is not None:
            path = f"feeds.{feed}.{path}"
        if refusal := mesh_refusal(Mesh(dp=mesh.dp, cp=mesh.cp), after, layout):
            raise ConfigError(
                f"{path}: no planned mesh can read this stage: {refusal}. If trainers read the stage on another mesh, "
                "write `planned_mesh: {dp: N, cp: N, tp: N}` in it"
            )


def _check_batch(config: BrokerConfig, rules: Rules) -> None:
    """Raise ConfigError for ``end_of_batch`` with streams that are not pushed, or a mesh that does not fit batches."""
    read = [stream.name for stream in rules.streams if not stream.pushed]
    if read and rules.batch is not None and rules.batch.samples is None:
        raise ConfigError(
            f"rules.step: got `end_of_batch` with stream {read[0]!r}, which is not pushed, expected only pushed "
            "streams. Only a program that pushes samples can end a batch. For streams that are read from files, set "
            "`step: {samples: N}`"
        )
    if wrong := batch_refusal(Mesh(dp=config.planned_mesh.dp), rules):
        raise ConfigError(f"planned_mesh: {wrong}")
