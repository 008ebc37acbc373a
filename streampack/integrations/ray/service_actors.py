"""The actors of a service: their names, and questions to them.

A service with a standby has two actors with a broker, of which one is active at a time. ``active_broker`` finds it.
"""

from __future__ import annotations

import time
from typing import Any

import ray

NAMESPACE = "streampack"
"""Ray's namespace of all actors, so that jobs of any namespace find them."""
BROKER, STANDBY, RELAY = "broker", "standby", "relay"
"""Names in the service of its broker and the broker's standby; first part of the name of a relay."""
ANSWER_S = 10.0
"""Seconds for an actor's answer before it is asked again."""
OTHER_S = 1.0
"""Seconds in which the other broker may answer, too, once one has said that it is active."""


def actor_name(service: str, part: str) -> str:
    """Return the name of an actor of a service; ``part`` is ``broker``, ``producer-0`` and so on."""
    return f"streampack/{service}/{part}"


def parts_of(service: str) -> list[str]:
    """Return the names of a service's actors in the service, such as ``broker``."""
    begin = actor_name(service, "")
    return sorted(each.removeprefix(begin) for each in _actors() if each.startswith(begin))


def services() -> list[str]:
    """Return the names of the services that run."""
    return sorted({each.split("/")[1] for each in _actors() if each.count("/") == 2})


def ask(service: str, part: str, method: str) -> Any:
    """Call a method of an actor, and return the answer; None if there is no such actor, or it does not answer now."""
    try:
        actor = ray.get_actor(actor_name(service, part), NAMESPACE)
        return ray.get(getattr(actor, method).remote(), timeout=ANSWER_S)
    except (ValueError, ray.exceptions.RayError):
        return None


def active_broker(service: str) -> dict[str, Any] | None:
    """Return the state of a service's active broker; None if no broker says within ``ANSWER_S`` that it is ready.

    A broker that was frozen may still believe that it is active. The one with the highest epoch is.
    """
    waiting = []
    for part in (BROKER, STANDBY):
        try:
            waiting.append(ray.get_actor(actor_name(service, part), NAMESPACE).where.remote())
        except (ValueError, ray.exceptions.RayError):  # no such actor, or it is ending
            continue
    newest: dict[str, Any] | None = None
    until = time.monotonic() + ANSWER_S
    while waiting and (left := until - time.monotonic()) > 0:
        ready, waiting = ray.wait(waiting, timeout=left)
        for answer in ready:
            try:
                state = ray.get(answer)
            except ray.exceptions.RayError:
                continue
            if "trainers" in state and (newest is None or state["epoch"] > newest["epoch"]):
                newest = dict(state)
                until = min(until, time.monotonic() + OTHER_S)
    return newest


def _actors() -> list[str]:
    """Return the names of all actors in the namespace."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return [each["name"] for each in named if each["namespace"] == NAMESPACE]
