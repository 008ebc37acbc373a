"""A loader for the workers of Ray Train: its rank, its broker's address, and its place in a checkpoint.

The rank is the worker's world rank, unless the program passes a mesh. A worker group of another size reads the same
steps from the checkpoint on, as after any change of the mesh. The loader's state is a file in each checkpoint.

A checkpoint is committed once Ray has stored every worker's part, because the broker may then delete what only older
checkpoints need. Ray Train knows this when it has registered the checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import ray.train

from streampack.client.connect import Client
from streampack.client.connect import connect as connect_client
from streampack.client.ranks import mesh_of
from streampack.core.model.mesh import Mesh
from streampack.errors import StateError, UserError
from streampack.integrations.ray.installed_version import check_ray
from streampack.integrations.ray.ray_service import start_relay, wait_for_broker
from streampack.integrations.ray.service_actors import active_broker, ask

log = logging.getLogger("streampack.ray")

STATE = "streampack.json"
"""File with the loader's state in a checkpoint."""
SILENT_S = 5.0
"""Seconds of a broker's silence after which a loader asks for its address."""
LOOK_S = 1.0


def connect(
    name: str, *, mesh: Any = None, order: str | None = None, relay: bool | None = None, timeout_s: float = 60.0,
    **options: Any,
) -> Client[Any]:  # fmt: skip
    """Return a loader of this worker's packs, from the broker of a service.

    The loader follows the broker to another address, if Ray restarts it on another node.

    Args:
        name: Name of the service, as passed to ``start``.
        mesh: This worker's place in the trainers' mesh, as for ``streampack.connect``. Default: only data parallelism,
            with the worker's world rank. Outside Ray Train: one rank.
        order: Axes of the mesh, such as ``"tp-cp-dp-pp"``, if ``mesh`` has sizes alone. The ranks follow from the
            world rank.
        relay: True if the workers of a node read through a relay there. Default: True if several workers are on the
            node, and the broker is on another node.
        timeout_s: Seconds to wait for the broker.
        options: Other keyword arguments of ``streampack.connect``.

    Returns:
        A loader, as ``streampack.connect`` returns it.

    Raises:
        UserError: There is no such service, or an argument is invalid.
        Unreachable: The broker was not ready within ``timeout_s``.
        MeshError: The rules cannot serve this mesh.

    Example:
        >>> def train_fn(config):  # doctest: +SKIP
        ...     with connect("sft-8b") as loader:
        ...         restore(loader, ray.train.get_checkpoint())
        ...         for step in loader.steps():
        ...             ...
    """
    check_ray()
    broker = wait_for_broker(name, timeout_s)
    place = _place(mesh, order)
    address = _offer_relay(name, relay, broker["node"], timeout_s) or broker["trainers"]
    loader = connect_client(address, mesh=place, timeout_s=timeout_s, **options)
    watch = threading.Thread(
        target=_follow, args=(weakref.ref(loader), name, address), name="streampack-follow", daemon=True
    )
    watch.start()
    return loader


def restore(loader: Client[Any], checkpoint: Any) -> bool:
    """Continue from the loader's state in a checkpoint of Ray Train.

    Args:
        loader: The loader that ``connect`` returned.
        checkpoint: The checkpoint that ``ray.train.get_checkpoint`` returned; None at the start of a run.

    Returns:
        True if there was a checkpoint.

    Raises:
        UserError: The checkpoint has no state of a loader.
        StateError: The state is of another run, feed or rules.

    Example:
        >>> packs.restore(loader, ray.train.get_checkpoint())  # doctest: +SKIP
        True
    """
    if checkpoint is None:
        return False
    with checkpoint.as_directory() as folder:
        path = Path(folder) / STATE
        if not path.exists():
            raise UserError(
                f"{checkpoint}: got a checkpoint without {STATE}, expected one that streampack's report() stored. Pass "
                f"a checkpoint of this run"
            )
        try:
            state = json.loads(path.read_text())
        except ValueError as error:
            raise StateError(f"{path}: got a file that is not JSON ({error}). Load another checkpoint") from None
    loader.load_state_dict(state)
    return True


def report(
    metrics: Mapping[str, Any], loader: Client[Any], checkpoint_dir: str | Path | None = None, **options: Any
) -> None:  # fmt: skip
    """Report metrics and a checkpoint to Ray Train, with the loader's state in the checkpoint.

    Every worker must call this, as ``ray.train.report``. When the checkpoint is durable, the first worker commits it.

    Args:
        metrics: Metrics of this worker.
        loader: The loader that ``connect`` returned.
        checkpoint_dir: Folder with this worker's part of the checkpoint. Default: no checkpoint.
        options: Other keyword arguments of ``ray.train.report``.

    Example:
        >>> packs.report({"loss": 2.5}, loader, checkpoint_dir)  # doctest: +SKIP
    """
    if checkpoint_dir is None:
        ray.train.report(dict(metrics), **options)
        return
    state = loader.state_dict()
    (Path(checkpoint_dir) / STATE).write_text(json.dumps(state))
    checkpoint = ray.train.Checkpoint.from_directory(str(checkpoint_dir))
    ray.train.report(dict(metrics), checkpoint=checkpoint, **options)
    if ray.train.get_context().get_world_rank() == 0 and state["next_step"]:
        ray.train.get_all_reported_checkpoints(consistency_mode=ray.train.CheckpointConsistencyMode.COMMITTED)
        loader.commit(state["next_step"] - 1)


def _place(mesh: Any, order: str | None) -> Mesh | Any:
    """Return this worker's place in the mesh, from the arguments or the context of Ray Train."""
    if mesh is not None and order is None:
        return mesh
    try:
        context = ray.train.get_context()
        rank, size = context.get_world_rank(), context.get_world_size()
    except RuntimeError:  # not in a worker of Ray Train
        rank, size = 0, 1
    return mesh_of(mesh, order or "dp", {"RANK": str(rank), "WORLD_SIZE": str(size)})


def _offer_relay(name: str, wanted: bool | None, broker_node: str, timeout_s: float) -> str | None:
    """Start a relay on this node if it saves bytes, and wait until it listens.

    Returns the broker's address with which readers find the relay; None without a relay.
    """
    node = ray.get_runtime_context().get_node_id()
    if wanted is None:
        try:
            several = ray.train.get_context().get_local_world_size() > 1
        except RuntimeError:
            several = False
        wanted = several and node != broker_node
    if not wanted:
        return None
    start_relay(name, node)
    stop = threading.Event()
    for _ in range(int(timeout_s / 0.2)):
        state = ask(name, f"relay-{node}", "where")
        if state is not None and "trainers" in state:
            return str(state["trainers"])
        stop.wait(0.2)
    log.warning("the relay of service %r on this node did not start; reading from the broker itself", name)
    return None


def _follow(client: weakref.ref[Client[Any]], name: str, known: str) -> None:
    """Body of a thread: while the broker is silent, ask for its address, and move the loader there."""
    pause = threading.Event()
    while not pause.wait(LOOK_S):
        loader = client()
        if loader is None or loader.is_closed:
            return
        if loader.silent_s > SILENT_S:
            broker = None
            with contextlib.suppress(Exception):  # Ray ends while a program ends
                broker = active_broker(name)
            if broker is not None and broker.get("trainers", known) != known:
                known = broker["trainers"]
                loader.move_to(known)
        del loader
