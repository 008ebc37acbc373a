"""Which of the two files one is, and reading it: only the streams of a producer.yaml name a source.

Whoever gives the one for the other is told so, rather than of each key that the one has and the other has not.
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
        return checked(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
