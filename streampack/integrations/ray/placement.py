"""Places for actors: a node that has the resources, or an error that says which resource is missing.

Ray lets an actor wait forever for resources that no node has. A broker whose log is on a local disk should come back to
its node. So the actor asks for one node, and Ray may choose another only if that node is gone.

A broker and its standby must not be lost together. A placement group keeps them on two nodes, also after a loss.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from streampack.errors import UserError

log = logging.getLogger("streampack.ray")

LEAST_CPUS = 0.001
"""CPUs that a placement group holds for an actor that needs no resources, since a group cannot hold none."""
PLACED_BY = ("scheduling_strategy", "label_selector")
"""Options with which a user places an actor."""


def wanted_resources(options: Mapping[str, Any]) -> dict[str, float]:
    """Return the resources that an actor with these options needs, by Ray's names."""
    named = {"CPU": options.get("num_cpus", 0), "GPU": options.get("num_gpus", 0), "memory": options.get("memory", 0)}
    amounts = named | (options.get("resources") or {})
    return {name: float(amount) for name, amount in amounts.items() if amount}


def placed(options: Mapping[str, Any], what: str, nodes: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return the options of an actor, with a node that has its resources. Prefers the node with the most CPUs.

    Args:
        options: Options of the actor, as for ``ray.remote``.
        what: Name of the actor's daemon, for the error.
        nodes: Nodes as ``ray.nodes`` returns them; default: those of the cluster.

    Raises:
        UserError: No node has the resources, however long the actor waits.
    """
    wanted = wanted_resources(options)
    alive = [node for node in (ray.nodes() if nodes is None else nodes) if node["Alive"]]
    able = [node for node in alive if all(node["Resources"].get(name, 0) >= need for name, need in wanted.items())]
    if not able:
        largest = {name: max((node["Resources"].get(name, 0) for node in alive), default=0) for name in wanted}
        most = ", ".join(f"{name} {amount:g}" for name, amount in largest.items())
        raise UserError(
            f"{what}: got a request for {_text(wanted)}, expected at most what one node has. The cluster has "
            f"{len(alive)} nodes; the most of each resource on a node is {most}. Ask for less, or add a node"
        )
    if any(name in options for name in PLACED_BY):
        return dict(options)
    best = max(able, key=lambda node: (node["Resources"].get("CPU", 0), node["NodeID"]))
    return dict(options) | {"scheduling_strategy": NodeAffinitySchedulingStrategy(best["NodeID"], soft=True)}


def placed_apart(options: Mapping[str, Any], group: str, what: str) -> list[dict[str, Any]]:
    """Return the options of two actors, each with a place of its own on a node of its own.

    Args:
        options: Options of each actor, as for ``ray.remote``.
        group: Name of the placement group, which is created unless it exists. ``release`` removes it.
        what: Name of the actors' daemons, for the error.

    Raises:
        UserError: No node has the resources, however long the actors wait.
    """
    alone = placed(options, what)
    if any(name in options for name in PLACED_BY):
        return [alone, alone]
    if sum(node["Alive"] for node in ray.nodes()) < 2:
        log.warning("%s: the cluster has one node, so both are on it. A standby needs a second node", what)
    nodes = _group(group)
    if nodes is None:
        bundle = wanted_resources(options) or {"CPU": LEAST_CPUS}
        nodes = ray.util.placement_group([bundle, bundle], strategy="SPREAD", name=group, lifetime="detached")
    return [dict(options) | {"scheduling_strategy": PlacementGroupSchedulingStrategy(nodes, i)} for i in range(2)]


def release(group: str) -> None:
    """Remove a placement group. One that does not exist is no error."""
    if (placement_group := _group(group)) is not None:
        remove_placement_group(placement_group)


def _group(name: str) -> PlacementGroup | None:
    """Return the placement group of this name, of any of Ray's namespaces; None if there is none."""
    for key, each in placement_group_table().items():
        if each["name"] == name and each["state"] != "REMOVED":
            return PlacementGroup(ray.PlacementGroupID(bytes.fromhex(key)))
    return None


def waiting_text(options: Mapping[str, Any], what: str) -> str:
    """Return why an actor has no place yet: the resources it needs, and those that are free."""
    wanted, free = wanted_resources(options), ray.available_resources()
    have = {name: free.get(name, 0.0) for name in wanted}
    return (
        f"{what}: got no place for {_text(wanted)}; free in the whole cluster: {_text(have)}. Stop other actors, add a "
        f"node, or ask for less"
    )


def _text(resources: Mapping[str, float]) -> str:
    """Return resources as text, such as ``CPU 0.5``."""
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items()) or "no resources"
