"""Reads broker.yaml and producer.yaml, and tells them apart: only the streams of a producer.yaml name a source.

A file of the wrong kind is one clear error, not an error for each unknown key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from streampack.config.config_validation import checked
from streampack.config.daemon_settings import BrokerConfig, ProducerConfig
from streampack.config.typed_yaml import convert, read_tree
from streampack.errors import ConfigError


def read_broker(path: str | Path) -> BrokerConfig:
    """Read and check a broker.yaml. Raises ConfigError."""
    content = read_tree(path)
    if _names_sources(content):
        raise ConfigError(
            f"{path}: got a producer.yaml file (its streams have the key `source`), expected a broker.yaml file"
        )
    config = convert(content, BrokerConfig, str(path))
    try:
        return checked(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_producer(path: str | Path) -> ProducerConfig:
    """Read a producer.yaml. Raises ConfigError."""
    config = read_tree(path)
    if isinstance(config, dict) and not _names_sources(config) and set(config) & _BROKER_KEYS:
        raise ConfigError(
            f"{path}: got a broker.yaml file (its streams lack the key `source`), expected a producer.yaml file"
        )
    return convert(config, ProducerConfig, str(path))


def read_either(path: str | Path) -> BrokerConfig | ProducerConfig:
    """Read a file that is a broker.yaml or a producer.yaml. Raises ConfigError."""
    return read_producer(path) if _names_sources(read_tree(path)) else read_broker(path)


_BROKER_KEYS = {field.encode_name for field in msgspec.structs.fields(BrokerConfig)} - {
    field.encode_name for field in msgspec.structs.fields(ProducerConfig)
}


def _names_sources(config: Any) -> bool:
    """Return whether a YAML tree is a producer.yaml: some of its streams name a source."""
    streams = config.get("streams") if isinstance(config, dict) else None
    named = list(streams.values()) if isinstance(streams, dict) else []
    return any(isinstance(stream, dict) and "source" in stream for stream in named)
