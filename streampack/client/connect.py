"""The client: what a trainer iterates, and ``connect``, which makes it.

The work is done by a thread, in ``reader``, which knows no client: so a client that is dropped, as in
``for pack in connect(...): break``, gives its rank up like one that is closed.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, TypedDict, Unpack, overload

import msgspec

from streampack.client.prefetch import TWICE
from streampack.client.ranks import mesh_of
from streampack.client.reader import Reading
from streampack.core.model.mesh import Mesh, ReadBy
from streampack.core.model.rules import Rules
from streampack.core.sessions.patience import Patience
from streampack.errors import MeshError, StreampackError, UserError
from streampack.packs.batch_type import BatchT
from streampack.packs.pack import Pack
from streampack.packs.step import Step
from streampack.transport.keys import find_key
from streampack.transport.rendezvous import read_rendezvous
from streampack.views.formats import TorchFormat, Views
from streampack.views.view import View


class ConnectOptions(TypedDict, total=False):
    """Arguments of ``connect`` beside ``endpoint`` and ``format``, for type checkers."""

    feed: str
    mesh: Any
    order: str | None
    readers: Mapping[str, Sequence[int]] | None
    device: Any
    key_file: str | Path | None
    variable_lengths: bool
    verify: bool
    prefetch: int
    timeout_s: float
    stall_timeout_s: float
    join_timeout_s: float


# Without ``format`` packs are views where torch is installed: without torch, a type checker knows no tensors anyway.
@overload
def connect(
    endpoint: str | None = None, *, format: Literal["numpy"], **options: Unpack[ConnectOptions]
) -> Client[Pack]: ...
@overload
def connect(
    endpoint: str | None = None, *, format: TorchFormat | None = None, **options: Unpack[ConnectOptions]
) -> Client[View]: ...
@overload
def connect(
    endpoint: str | None = None, *, format: str | None, **options: Unpack[ConnectOptions]
) -> Client[Pack | View]: ...
def connect(
    endpoint: str | None = None,
    *,
    feed: str = "train",
    mesh: Any = None,
    order: str | None = None,
    readers: Mapping[str, Sequence[int]] | None = None,
    format: str | None = None,
    device: Any = None,
    key_file: str | Path | None = None,
    variable_lengths: bool = False,
    verify: bool = False,
    prefetch: int = 2,
    timeout_s: float = 60.0,
    stall_timeout_s: float = 300.0,
    join_timeout_s: float = 300.0,
) -> Client[Any]:
    """Attach to a broker and iterate its packs.

    ``endpoint``: the broker's trainers' address, ``tcp://host:port`` or ``ipc:///path``, or
    ``file://`` and its rendezvous file; by default the environment's STREAMPACK_ENDPOINT.
    ``mesh``: a torch DeviceMesh; or sizes and ranks, such as ``{"dp": 8, "dp_rank": 3}``; or sizes alone
    with the ``order`` in which RANK counts, such as ``"tp-cp-dp-pp"``; one rank by default.
    ``readers``: the tensor and pipeline ranks that read, equal on all of them, where not every rank of the mesh
    does: ``{"tp": [0], "pp": [0, -1]}`` for Megatron, whose first and last stages read on tensor rank 0 and
    broadcast. ``format``: ``thd``, the pack as torch tensors (default where torch is installed); ``hf`` or
    ``hf_shifted``, transformers' arguments; ``megatron``, ``bshd`` (NeMo AutoModel), ``torchtitan``: what those take;
    ``numpy``; of a feed of padded micro-batches ``padded``, the default there.
    ``key_file``: of 'streampack keys new', where the broker asks for a key; by default the environment's
    STREAMPACK_KEY_FILE.
    ``device``: where its tensors are copied ahead of use. ``variable_lengths``: the stages of a pipeline exchange
    micro-batches of any shape, as padded ones have.
    ``verify``: assert every invariant of every step. ``prefetch``: steps kept ready beyond the one in use.
    ``timeout_s``: how long a broker may take to answer, at first and to what is asked of it. ``stall_timeout_s``: how
    long a step may be waited for without a word of the broker, and ``join_timeout_s``: how long for ranks that have not
    joined, before DataStall is raised; below the time in which the trainer's collectives give up.

    A finite feed (no stream of it repeats) can be iterated again: each ``for`` and each ``steps()`` begins at its
    first step, once all ranks have come to it; on one that is infinite they go on.

    Raises UserError for arguments that cannot be; MeshError if the rules cannot serve this mesh or
    another holds the rank, Unreachable if nobody answers, Rejected if the broker does not let this key in. What happens
    later is raised where the next pack or step is asked for: DataStall, Rejected if another process has taken the rank
    over.

    >>> with connect("tcp://node0:7402", mesh={"dp": 2, "dp_rank": 0}) as loader:  # doctest: +SKIP
    ...     for pack in loader:
    ...         train(pack.input_ids, pack.labels, pack.position_ids)
    """
    if not isinstance(prefetch, int) or prefetch < 1:
        raise UserError(f"got prefetch={prefetch!r}, expected at least 1 step")
    limits = {"timeout_s": timeout_s, "stall_timeout_s": stall_timeout_s, "join_timeout_s": join_timeout_s}
    for name, seconds in limits.items():
        if not isinstance(seconds, int | float) or not seconds > 0:
            raise UserError(f"got {name}={seconds!r}, expected seconds, more than 0")
    place = mesh_of(mesh, order)
    views = Views(format, place, device, verify)
    introduce_to_torch(Client)
    patience, key = Patience(stall_timeout_s, join_timeout_s, timeout_s), find_key(key_file)
    at, read_by = _endpoint(endpoint, timeout_s), _readers(readers)
    return Client(Reading(at, feed, place, read_by, prefetch, patience, views, bool(variable_lengths), key))


def _readers(readers: Mapping[str, Sequence[int]] | None) -> ReadBy:
    try:
        return msgspec.convert(dict(readers or {}), ReadBy)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        raise MeshError(f"readers: {error}; expected ranks by name, such as {{'tp': [0], 'pp': [0, -1]}}") from None


def introduce_to_torch(kind: type) -> None:
    """A DataLoader takes loaders of this kind for the streams that they are. Raises UserError in one of several
    workers.
    """
    if "torch" not in sys.modules:
        return
    from torch.utils.data import IterableDataset, get_worker_info

    worker = get_worker_info()
    if worker is not None and worker.num_workers > 1:
        raise UserError(f"got one of {worker.num_workers} DataLoader workers, each of which {TWICE}")
    IterableDataset.register(kind)


def _endpoint(endpoint: str | None, timeout_s: float) -> str:
    found = endpoint or os.environ.get("STREAMPACK_ENDPOINT")
    if not found:
        raise UserError("got no endpoint, expected tcp://host:port, or STREAMPACK_ENDPOINT in the environment")
    if found.startswith("file://"):
        return read_rendezvous(Path(found.removeprefix("file://")), "trainers", timeout_s)
    return found


class Client(Generic[BatchT]):
    """An iterable of packs, and ``steps()`` of steps; a context manager. Made by ``connect``.

    One thread of the trainer uses it, in the process that made it.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._close = weakref.finalize(self, reading.close)

    def __iter__(self) -> Iterator[BatchT]:
        self._reading.begin()
        return self

    def __next__(self) -> BatchT:
        """The rank's next pack. Raises StopIteration at the end, on the same step on every rank."""
        pack: BatchT = self._reading.next_pack()
        return pack

    def steps(self) -> Iterator[Step[BatchT]]:
        """The rank's steps; a step is returned when the one after it is asked for.

        From the first one on, where the feed is finite and any of this iteration was had; else from the next; or from
        where a state that was loaded says.
        """
        self._reading.begin()
        return self._steps_of(self._reading.round)

    def _steps_of(self, round_: int) -> Iterator[Step[BatchT]]:  # of the client, which lives as long as its steps
        while round_ == self._reading.round and (step := self._reading.next_step()) is not None:
            yield step

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Return the loader's position, to save with the model: plain JSON, equal on all ranks, for any mesh.

        A step counts as used once all its packs were handed out. Between two steps this is the state after the last
        one. The call has no side effects; any rank may call it at any time. It waits for the broker's answer. If a
        broker without a ``state_dir`` restarts between two ranks' calls, their ``snapshot`` may differ; load either.

        Args:
            step: The last trained step. Pass it if steps are fetched ahead of training.

        Raises:
            UserError: The step was not handed out in this iteration.
            DataStall: The broker did not answer.
        """
        return self._reading.state(step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, as every rank must: the next pack, step or iteration begins there. The last one counts.

        Raises StateError, which names the key, for a state of another version, run, feed or other rules.
        """
        self._reading.load(state)

    def commit(self, step: int) -> None:
        """Report that the checkpoint after ``step`` is durable, so that data which only older ones need may be deleted.

        Any one rank calls this, once all ranks have stored their parts. Returns when the broker has noted it.

        Args:
            step: The last trained step.

        Raises:
            UserError: The step was not handed out.
            DataStall: The broker did not answer.
        """
        self._reading.commit(step)

    def stats(self) -> dict[str, float]:
        """Counts and times so far: ``steps``, ``packs``, ``tokens`` (real ones of this rank's packs), ``wait_s``,
        ``next_p50_ms``, ``next_p99_ms``, ``next_p999_ms`` of a step's wait, ``starved_fraction``: the share of
        the time since the third step was asked for that was spent waiting, and ``skipped_steps``.

        ``wait_s`` is the sum of ``starved_stream_s`` (samples were missing), ``starved_peers_s`` (ranks had not
        returned their steps), ``starved_join_s`` (ranks were not there), ``starved_memory_s`` (the arena was full),
        ``starved_forming_s`` (the packer was at work), ``starved_log_s`` (the disk was) and ``starved_network_s`` (the
        broker had sent the step, or was not heard). ``trainer_s``: how long the trainer had a step and did not ask for
        the next: its work and, of one that is fast, the making of packs. ``step_s``: from one step to the next, mean of
        the last ones, once there are two.
        """
        return self._reading.stats()

    def close(self) -> None:
        """Release the rank and end the thread; idempotent. A client without references is closed as well."""
        self._reading.close()

    def fail(self, error: StreampackError) -> None:
        """Raise ``error`` from the next request for a step, after the steps that are ready. Any thread may call it."""
        self._reading.fail(error)

    def __enter__(self) -> Client[BatchT]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        raise TypeError("the length of a stream is not known: iterate until it ends, or count steps")

    def __reduce__(self) -> str:
        raise UserError(f"got a client to pickle; another process {TWICE}")

    @property
    def rules(self) -> Rules:
        """The run's recorded rules for this feed."""
        return self._reading.rules

    @property
    def mesh(self) -> Mesh:
        """The trainers' mesh, and this rank's place in it."""
        return self._reading.mesh

    @property
    def format(self) -> str:
        """Name of the packs' format, as passed to ``connect``."""
        return self._reading.format
