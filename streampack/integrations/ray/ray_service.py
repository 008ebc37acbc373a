"""``start`` and ``shutdown`` of a service: a broker and its producers as detached, named actors that Ray restarts."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from streampack.config.config_validation import checked
from streampack.config.daemon_settings import BrokerConfig, ProducerConfig
from streampack.config.typed_yaml import convert, read_tree, with_home
from streampack.errors import ConfigError, StreampackError, Unreachable, UserError
from streampack.integrations.ray.daemon_actor import HEALTH, DaemonActor
from streampack.integrations.ray.installed_version import check_ray
from streampack.integrations.ray.placement import placed, placed_apart, release, waiting_text
from streampack.integrations.ray.service_actors import (
    ANSWER_S,
    BROKER,
    NAMESPACE,
    RELAY,
    STANDBY,
    active_broker,
    actor_name,
    ask,
    parts_of,
    services,
)

POLL_S = 0.2
CALLS = {"max_restarts": -1, "max_task_retries": -1, "lifetime": "detached", "namespace": NAMESPACE}
Config = str | os.PathLike[str] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Service:
    """A service that was started: a broker with its producers.

    Example:
        >>> service = packs.start("sft-8b", "broker.yaml", "producer.yaml")  # doctest: +SKIP
        >>> service.where()["trainers"]  # doctest: +SKIP
        'tcp://10.0.0.7:21402'
        >>> service.states()["broker"]["failures"]  # doctest: +SKIP
        0
    """

    name: str
    """Name of the service."""

    def where(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """Return the addresses of the broker, as of now.

        Args:
            timeout_s: Seconds to wait until the broker is ready, as after a restart.

        Returns:
            ``producers`` and ``trainers``, addresses for programs without Ray. ``http``, the URL of status and metrics.
            ``pid`` and ``node``, the place of the broker's process. ``part``, ``broker`` or ``standby``. With a
            standby that has joined, addresses are two, separated by a comma, with that of the active broker first.

        Raises:
            UserError: There is no such service.
            Unreachable: The broker was not ready within ``timeout_s``.
        """
        return wait_for_broker(self.name, timeout_s)

    def states(self) -> dict[str, dict[str, Any]]:
        """Return the state of each of the service's actors that answers, by its name in the service.

        Returns:
            For each actor a dict with ``pid``, ``node``, ``failures``, ``failure`` and ``done``.
        """
        states = {}
        for part in parts_of(self.name):
            state = ask(self.name, part, "where")
            if state is not None:
                states[part] = state
        return states


def start(
    name: str,
    broker: Config,
    producers: Config | None = None,
    *,
    num_producers: int = 1,
    broker_options: Mapping[str, Any] | None = None,
    producer_options: Mapping[str, Any] | None = None,
    timeout_s: float = 300.0,
) -> Service:
    """Start a broker and its producers as actors, or find those of a service that runs; return once they are ready.

    Ray restarts the actors, and they outlive the job that started them. ``shutdown`` ends them. If the broker's
    settings have ``standby``, a second broker starts on another node, and takes over if the first one is lost.

    Args:
        name: Name of the service, by which ``connect`` and ``Datasink`` find it.
        broker: Path of broker.yaml, or its contents as a dict. Relative paths refer to the current folder. Addresses
            that it does not have under ``listen`` are chosen on the actor's node. Set ``state_dir`` to a folder that
            the nodes share, or set ``standby``, so that the log survives the loss of a node. With ``standby``, each
            broker uses a folder of its own in ``state_dir``, and ``standby`` needs the key ``arbiter`` alone.
        producers: Path of producer.yaml or its contents. Default: no producers, as for streams that are only pushed.
            The key ``broker`` is not needed.
        num_producers: Number of actors that produce. Ray spreads them over the nodes.
        broker_options: Options of the broker's actor and the standby's, as for ``ray.remote``, such as
            ``{"num_cpus": 2}``. Default: one CPU, on a node that Ray changes only if the node is gone.
        producer_options: Options of each producer's actor. Default: one CPU for each of its ``processes``.
        timeout_s: Seconds to wait until the broker is ready. The first start on a machine compiles kernels, which takes
            25 s or more.

    Returns:
        The service.

    Raises:
        ConfigError: The settings are invalid.
        UserError: A service of this name runs with other settings, or no node has the resources.
        Unreachable: The broker was not ready within ``timeout_s``, or its actor had no place.

    Example:
        >>> service = start("sft-8b", "broker.yaml", "producer.yaml")  # doctest: +SKIP
    """
    check_ray()
    if not name or "/" in name:
        raise UserError(f"got name={name!r}, expected a name without '/'. Choose another name")
    tree = _broker_tree(broker, name)
    parts = {BROKER: (BROKER, tree, {"num_cpus": 1} | dict(broker_options or {}))}
    if "standby" in tree:
        parts[STANDBY] = parts[BROKER]
    if producers is not None:
        produced = _tree(producers)
        processes = convert(produced, ProducerConfig, "producers").processes
        options = {"num_cpus": processes, "scheduling_strategy": "SPREAD"} | dict(producer_options or {})
        parts |= {f"producer-{i}": ("produce", produced, options) for i in range(num_producers)}
    if not ray.is_initialized():
        ray.init()
    places = {part: placed(options, f"the {part} of service {name!r}") for part, (_, _, options) in parts.items()}
    if STANDBY in parts:
        both = placed_apart(parts[BROKER][2], actor_name(name, BROKER), f"the broker and standby of service {name!r}")
        places |= dict(zip((BROKER, STANDBY), both, strict=True))
    begun: list[str] = []
    try:
        for part, (command, settings, _) in parts.items():
            if _begin(name, part, command, settings, places[part]):
                begun.append(part)
        for part, (_, _, options) in parts.items():
            _wait_until_ready(name, part, options, time.monotonic() + timeout_s)
    except BaseException:
        for part in begun:
            _end(name, part, gently=False)
        if BROKER in begun:
            release(actor_name(name, BROKER))
        raise
    return Service(name)


def shutdown(name: str) -> None:
    """End a service: its producers and relays, then its broker, which first delivers the steps that are formed.

    A standby ends before the broker that is active then, so that it does not take over.

    Args:
        name: Name of the service. A service that does not run is no error.

    Example:
        >>> packs.shutdown("sft-8b")  # doctest: +SKIP
    """
    check_ray()
    broker = active_broker(name)
    active = BROKER if broker is None else broker["part"]
    for part in sorted(parts_of(name), key=lambda part: (part in (BROKER, STANDBY), part == active)):
        _end(name, part, gently=True)
    release(actor_name(name, BROKER))


def start_relay(service: str, node_id: str) -> None:
    """Start a relay on a node, unless the service has one there."""
    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    part = f"{RELAY}-{node_id}"
    _begin(service, part, RELAY, {}, {"num_cpus": 0, "scheduling_strategy": where})


def wait_for_broker(service: str, timeout_s: float) -> dict[str, Any]:
    """Return the state of a service's broker once it is ready.

    Raises UserError if there is no such service, and Unreachable after ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        if (broker := active_broker(service)) is not None:
            return broker
        if not {BROKER, STANDBY} & set(parts_of(service)):
            raise UserError(
                f"got no service {service!r}, expected one of: {', '.join(services()) or 'none runs'}. Start it: "
                f"streampack.integrations.ray.start({service!r}, ...)"
            )
        if time.monotonic() > deadline:
            state = ask(service, BROKER, "where")
            why = f": {state['failure']}" if state and state["failure"] else ""
            raise Unreachable(f"service {service!r}: got no broker that is ready within {timeout_s:g} s{why}")
        time.sleep(POLL_S)


def _begin(service: str, part: str, command: str, settings: dict[str, Any], options: dict[str, Any]) -> bool:
    """Create an actor, unless it exists; return whether it was created.

    Raises UserError if it exists with other settings.
    """
    wanted = json.dumps(settings, sort_keys=True)
    known = ask(service, part, "settings")
    if known is None:
        kind = ray.remote(concurrency_groups={HEALTH: 4})(DaemonActor)
        kind.options(**CALLS, **options, name=actor_name(service, part), get_if_exists=True).remote(
            service, part, command, wanted, os.getcwd()
        )
        return True
    if known != wanted:
        raise UserError(
            f"service {service!r}: its {part} runs with other settings: {_difference(json.loads(known), settings)}. "
            f"Choose another name, or end the running service: streampack.integrations.ray.shutdown({service!r})"
        )
    return False


def _wait_until_ready(service: str, part: str, options: Mapping[str, Any], deadline: float) -> None:
    """Wait until an actor answers, and a broker is ready. Raises the reason that it does not become ready."""
    what = f"the {part} of service {service!r}"
    while True:
        state = ask(service, part, "where")
        if state is not None and (part != BROKER or active_broker(service) is not None):
            return
        if state is not None and state["failures"] > 1:
            raise StreampackError(f"{what} cannot start: {state['failure']}")
        if time.monotonic() > deadline:
            late = f"{what}: got no broker that is ready in time. It still starts. Wait longer (timeout_s)"
            raise Unreachable(waiting_text(options, what) if state is None else late)
        time.sleep(POLL_S)


def _end(service: str, part: str, gently: bool) -> None:
    """End an actor and its daemon; if ``gently``, the daemon ends by itself first."""
    try:
        actor = ray.get_actor(actor_name(service, part), NAMESPACE)
    except ValueError:
        return
    if gently:
        with contextlib.suppress(ray.exceptions.RayError):  # the actor has no place, or its node is gone
            ray.get(actor.stop.remote(), timeout=60.0)
    ray.kill(actor, no_restart=True)
    deadline = time.monotonic() + ANSWER_S
    while part in parts_of(service) and time.monotonic() < deadline:
        time.sleep(POLL_S / 4)


def _difference(known: dict[str, Any], given: dict[str, Any], path: str = "") -> str:
    """Return the first key whose value differs, with both values."""
    for key in sorted(known.keys() | given.keys()):
        one, other = known.get(key), given.get(key)
        if one != other:
            if isinstance(one, dict) and isinstance(other, dict):
                return _difference(one, other, f"{path}{key}.")
            return f"{path}{key} is {one!r} there and {other!r} here"
    return "they do not differ"


def _tree(given: Config) -> dict[str, Any]:
    """Return the contents of a YAML file or a mapping as plain values. Raises ConfigError."""
    tree = dict(given) if isinstance(given, Mapping) else read_tree(Path(given))
    if not isinstance(tree, dict):
        raise ConfigError(f"{given}: got a {type(tree).__name__}, expected keys and values")
    plain: dict[str, Any] = with_home(msgspec.to_builtins(tree))
    return plain


def _broker_tree(given: Config, name: str) -> dict[str, Any]:
    """Return the settings of a broker, checked, with absolute paths and the service's name as its run."""
    tree = {"run": name} | _tree(given)
    config = checked(convert(tree, BrokerConfig, "broker"))
    for key in ("state_dir", "rendezvous"):
        if tree.get(key):
            tree[key] = str(Path(tree[key]).absolute())
    if config.standby is None:
        tree.pop("standby", None)
        return tree
    if "rendezvous" in tree:
        raise ConfigError(
            "rendezvous: got a path, expected none with `standby` on Ray, because two brokers would write it. Clients "
            "find the service by its name"
        )
    if "://" not in config.standby.arbiter:
        tree["standby"] |= {"arbiter": str(Path(config.standby.arbiter).absolute())}
    return tree
