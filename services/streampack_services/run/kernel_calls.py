"""The calls that a broker, its producers and its trainers make of compiled kernels, for ``streampack kernels``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from streampack.config.config_files import read_broker
from streampack.config.config_validation import checked
from streampack.config.daemon_settings import BrokerConfig
from streampack.config.typed_yaml import convert
from streampack.core.deal import balanced
from streampack.core.jit import Kernel
from streampack.core.layout import layout_kernels
from streampack_services.broker.memory_plan import plan, with_enough_memory
from streampack_services.broker.service import warm_up


def calls_for(configs: Iterable[Path], settings: Iterable[Mapping[str, Any]]) -> Iterator[Callable[[], object]]:
    """Yield calls of every kernel with the types of these runs.

    Args:
        configs: Paths of broker.yaml files.
        settings: Contents of broker.yaml, without names and streams.
    """
    bare: Mapping[str, Any] = {"run": "kernels", "streams": {"a": {}, "b": {}}}
    trees = [convert({**bare, **config}, BrokerConfig) for config in settings]
    for config in [*map(read_broker, configs), *map(checked, trees)]:
        yield partial(warm_up, plan(with_enough_memory(config)))
    yield balanced.warm_up
    yield _ask_for_tensors


def _ask_for_tensors() -> None:
    """Ask for the kernels of clients, whose types are declared."""
    for kernel in (layout_kernels.lay_out, layout_kernels.derive):
        if Kernel.when_missing is not None:
            Kernel.when_missing(kernel, kernel.keys)
