"""What one key of broker.yaml alone cannot show: values that contradict each other, or a bound that needs arithmetic.

Everything that can be said before a broker starts is said here, but for what depends on the memory of its arena.
"""

from __future__ import annotations

from streampack.config.daemon_settings import BrokerConfig
from streampack.config.typed_yaml import parse_size
from streampack.core.deal.mesh_validation import batch_refusal, mesh_refusal
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import MAX_WEIGHT_RATIO, Rules
from streampack.errors import ConfigError, UserError
from streampack.transport.endpoints import check_endpoint

_MAX_CHUNK_BYTES = 256 << 20
"""A quarter of the payload that a message may have (``wire.frames.MAX_PAYLOAD_BYTES``)."""
_MIN_LOG_BYTES = 256 << 20
"""Four files: one is written, one is ready, and only whole ones can go."""


def checked(config: BrokerConfig) -> BrokerConfig:
    """``config`` itself. Raises ConfigError for what one key alone cannot show."""
    _check_feeds(config)
    for side in ("producers", "trainers"):
        endpoint = getattr(config.listen, side)
        try:
            check_endpoint(endpoint)
        except UserError as error:
            meant = "" if "://" in endpoint else f": write tcp://{endpoint}, if that is meant"
            raise ConfigError(f"listen.{side}: {error}{meant}") from None
    for name, stream in config.streams.items():
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
    for feed in config.feeds:
        _check_rules(config, config.plan(feed), config.feeds[feed].cp_layout)
    parse_size(config.memory, "memory")
    if parse_size(config.retain.bytes, "retain.bytes") < _MIN_LOG_BYTES:
        raise ConfigError(
            f"retain.bytes: got {config.retain.bytes}, expected at least {_MIN_LOG_BYTES >> 20}MiB: the log is in "
            f"files of 64 MiB, of which one is always ready"
        )
    if parse_size(config.limits.chunk, "limits.chunk") > _MAX_CHUNK_BYTES:
        raise ConfigError(f"limits.chunk: got {config.limits.chunk}, expected at most {_MAX_CHUNK_BYTES >> 20}MiB")
    return config


def _check_feeds(config: BrokerConfig) -> None:
    """Each stream belongs to exactly one feed. Raises ConfigError."""
    feed_of: dict[str, str] = {}
    for name, feed in config.feeds.items():
        if not feed.streams and len(config.feeds) > 1:
            raise ConfigError(
                f"feeds.{name}.streams: got none, expected some of {', '.join(config.streams)}: with several feeds "
                f"each names its own"
            )
        for stream in feed.streams:
            if stream not in config.streams:
                raise ConfigError(f"feeds.{name}.streams: got {stream!r}, expected one of: {', '.join(config.streams)}")
            other = feed_of.setdefault(stream, name)
            if other != name:
                raise ConfigError(
                    f"feeds.{name}.streams: got {stream!r}, which feed {other!r} has, expected a stream in one "
                    f"feed: give it to one, or read the same data as a stream of another name"
                )
    missing = [stream for stream in config.streams if feed_of and stream not in feed_of]
    if missing:
        raise ConfigError(
            f"streams.{missing[0]}: got no feed that reads it, expected one: add it to the streams of "
            f"{' or '.join(f'feeds.{name}' for name in config.feeds)}"
        )


def _check_rules(config: BrokerConfig, rules: Rules, layout: str) -> None:
    for stream in rules.streams:
        if not stream.pushed or (rules.merge == "arrival" and config.state_dir is not None):
            continue
        wrong = (
            "merge: got schedule, expected arrival"
            if rules.merge == "schedule"
            else "state_dir: got none, expected a folder for the log"
        )
        raise ConfigError(
            f"{wrong}: stream {stream.name!r} is pushed: its samples are taken as they come, and kept in the log, "
            f"since nobody can send them again"
        )
    if rules.max_policy_lag is not None and not any(stream.pushed for stream in config.streams.values()):
        raise ConfigError(
            f"rules.max_policy_lag: got {rules.max_policy_lag} with streams that are read, expected a pushed one: only "
            f"a program that pushes says of which policy its samples are"
        )
    heaviest = max(stream.weight for stream in rules.streams)
    for stream in rules.streams:
        if heaviest / stream.weight > MAX_WEIGHT_RATIO:
            raise ConfigError(
                f"streams.{stream.name}.weight: got {stream.weight:g}, expected at least "
                f"{heaviest / MAX_WEIGHT_RATIO:g}, a {MAX_WEIGHT_RATIO}th of the heaviest"
            )
    refusal = mesh_refusal(Mesh(cp=config.planned_mesh.cp), rules, layout)
    if refusal:
        raise ConfigError(f"planned_mesh: {refusal}")
    if rules.batch is not None:
        _check_batch(config, rules)
    elif rules.packs % config.planned_mesh.dp:
        raise ConfigError(
            f"planned_mesh.dp: got {config.planned_mesh.dp}, expected a divisor of the {rules.packs} packs of a step"
        )


def _check_batch(config: BrokerConfig, rules: Rules) -> None:
    """Batches that marks close need programs that say so, and the planned mesh must do."""
    read = [stream.name for stream in rules.streams if not stream.pushed]
    if read and rules.batch is not None and rules.batch.samples is None:
        raise ConfigError(
            f"rules.step: got end_of_batch with stream {read[0]!r}, which is read, expected pushed streams: only a "
            f"program that pushes says where a batch ends; for files say step: {{samples: N}}"
        )
    if wrong := batch_refusal(Mesh(dp=config.planned_mesh.dp), rules):
        raise ConfigError(f"planned_mesh: {wrong}")
