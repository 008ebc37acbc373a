"""Ray: streampack's daemons as actors, loaders in Ray Train, and a Datasink for Ray Data.

Ray places, names and restarts processes. ZeroMQ and shared memory carry the bytes, as without Ray.

- ``installed_version``: rejects a missing Ray, or another major version.
- ``ray_service``: ``start`` and ``shutdown`` of a named service, and its addresses.
- ``service_actors``: names of a service's actors, and questions to them.
- ``placement``: finds a node for each actor, and says which resource no node has.
- ``daemon_actor``: the actor. It runs one command in a child process, and starts the child again.
- ``repeated_metrics``: the broker's metrics through Ray, which Ray's Prometheus service discovery finds.
- ``daemon_child``: the child process, which ends with its actor.
- ``ray_training``: ``connect``, ``restore`` and ``report`` for the workers of Ray Train.
- ``ray_datasink``: writes a dataset of Ray Data to a pushed stream, each key once.
- ``dataset_files``: reads the files of a dataset of Ray Data in a recorded order instead.

A service is the broker of one run, its standby if it has one, and its producers. Its actors are detached and named
``streampack/SERVICE/broker`` and so on, in Ray's namespace ``streampack``. An actor that Ray restarts has no state of
its own: the broker's state is its log, and a producer's place is in the broker.
"""

from __future__ import annotations

from streampack.integrations.ray.dataset_files import source_of
from streampack.integrations.ray.ray_datasink import Datasink
from streampack.integrations.ray.ray_service import Service, shutdown, start
from streampack.integrations.ray.ray_training import connect, report, restore

__all__ = ["Datasink", "Service", "connect", "report", "restore", "shutdown", "source_of", "start"]
