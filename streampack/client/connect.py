"""``connect`` and the ``Client`` that it returns, which a trainer iterates.

``Client`` only forwards to ``reader.Reading``. The client's thread refers to ``Reading`` and never to ``Client``. A
client without references, as after ``for pack in connect(...): break``, therefore releases its rank.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Generic, Literal, Self, SupportsIndex, TypedDict, Unpack, overload

import msgspec

from streampack.client.prefetch import TWICE
from streampack.client.ranks import mesh_of
from streampack.client.reader import Reading
from streampack.client.reading_stats import TERA, UsefulFlops
from streampack.core.flops.model_flops import ModelFlops
from streampack.core.model.keys.keyword_arguments import documented, filled
from streampack.core.model.mesh import Mesh, ReadBy
from streampack.core.model.rules import Rules
from streampack.core.sessions.patience import Patience
from streampack.errors import MeshError, StreampackError, UserError
from streampack.media.media import Media
from streampack.packs.batch_type import BatchT
from streampack.packs.pack import Pack
from streampack.packs.step import Step
from streampack.transport.keys import find_key
from streampack.transport.relay_socket import ENVIRONMENT, broker_of, find_relay, is_served
from streampack.transport.rendezvous import endpoint_of
from streampack.views.formats import TorchFormat, Views
from streampack.views.view import View

log = logging.getLogger("streampack.client")

MODEL_CONFIG, PEAK_TFLOPS = "STREAMPACK_MODEL_CONFIG", "STREAMPACK_PEAK_TFLOPS"
"""Environment variables for useful FLOPs."""


class ConnectOptions(TypedDict, total=False):
    """Type and default of each keyword argument of ``connect`` except ``format``."""

    feed: Annotated[str, "train"]
    mesh: Annotated[Any, None]
    order: Annotated[str | None, None]
    readers: Annotated[Mapping[str, Sequence[int]] | None, None]
    device: Annotated[Any, None]
    masks: Annotated[Literal["flex"] | None, None]
    static_shapes: Annotated[bool, False]
    media: Annotated[Media | None, None]
    cp_groups: Annotated[Mapping[int, Any] | None, None]
    model: Annotated[Any, None]
    peak_tflops: Annotated[float | None, None]
    key_file: Annotated[str | Path | None, None]
    variable_lengths: Annotated[bool, False]
    verify: Annotated[bool, False]
    prefetch: Annotated[int, 2]
    timeout_s: Annotated[float, 60.0]
    stall_timeout_s: Annotated[float, 300.0]
    join_timeout_s: Annotated[float, 300.0]


# With format="numpy", the client yields packs.
@overload
def connect(
    endpoint: str | None = None, *, format: Literal["numpy"], **options: Unpack[ConnectOptions]
) -> Client[Pack]: ...
# Without ``format``, the overload assumes that torch is installed: without torch, a type checker knows no tensors.
@overload
def connect(
    endpoint: str | None = None, *, format: TorchFormat | None = None, **options: Unpack[ConnectOptions]
) -> Client[View]: ...
# For a format that is known only at run time, the type is the union.
@overload
def connect(
    endpoint: str | None = None, *, format: str | None, **options: Unpack[ConnectOptions]
) -> Client[Pack | View]: ...
@documented(ConnectOptions)
def connect(
    endpoint: str | None = None, *, format: str | None = None, **options: Unpack[ConnectOptions]
) -> Client[Any]:
    """Attach this rank to a broker and return a loader of the rank's packs.

    The loader prefetches in a thread of its own. Iterate it for packs, or iterate ``loader.steps()`` for steps.

    If a relay runs on this host ('streampack relay'), the loader reads through the relay. While the relay does not
    work, it reads from the broker itself. The environment variable STREAMPACK_RELAY names a relay's address, or
    ``off``.

    A finite feed can be iterated again: each ``for`` and each ``steps()`` begins at the first step, once all ranks have
    begun the same iteration. On an infinite feed, a new ``for`` goes on with the next step.

    Args:
        endpoint: Address of the broker for trainers: ``tcp://host:port``, ``ipc:///path``, or ``file:///path`` of the
            broker's rendezvous file. Addresses of a broker and of another one that may take over are separated by
            commas. Default: the environment variable STREAMPACK_ENDPOINT.
        format: Format of each pack:

            - ``"thd"``: a ``View`` with torch tensors [T]; the default if torch is installed.
            - ``"numpy"``: a ``Pack`` with numpy arrays [T]; the default without torch.
            - ``"hf"``, ``"hf_shifted"``: arguments for ``model(**batch)`` of transformers, [1, T].
            - ``"megatron"``, ``"bshd"``, ``"torchtitan"``: the batches of Megatron-LM, NeMo AutoModel and torchtitan.
            - ``"padded"``: rows of padded samples [B, S]; the default for a feed with ``rules.padded``.
        feed: Name of the feed in broker.yaml.
        mesh: This rank's place in the trainers' mesh. A ``Mesh``, a torch DeviceMesh, or a dict of sizes and ranks,
            such as ``{"dp": 8, "dp_rank": 3}``. With ``order``, a dict of sizes alone. Default: one rank.
        order: Axes of the mesh, joined by ``-``, beginning with the axis that varies fastest with RANK, such as
            ``"tp-cp-dp-pp"``. The ranks then follow from RANK and WORLD_SIZE in the environment.
        readers: Tensor and pipeline ranks that read, if not all ranks read; equal on all ranks. Negative ranks count
            from the last. Example: ``{"tp": [0], "pp": [0, -1]}`` if the first and the last stage read on tensor
            rank 0 and broadcast.
        device: torch device to which steps are copied ahead of use, such as ``"cuda"``. Default: tensors stay on the
            host.
        masks: ``"flex"`` for batches with ``block_mask``, the ``BlockMask`` of FlexAttention in blocks of 128. Its
            tables are computed with the pack and copied to ``device`` with it. Default: no masks.
        static_shapes: True for tensors of the same shape in all packs of the feed, so that one compilation serves them.
            Boundaries get empty segments at the end, and ``max_seqlen`` is the budget. Requires ``rules.shape: fixed``,
            ``max_samples_per_pack``, and the format ``thd``, ``hf`` or ``hf_shifted``.
        media: A ``Media``, which fetches and decodes the media that samples refer to. Without it, packs of the format
            ``numpy`` have the references, and other formats are refused.
        cp_groups: The process groups of this rank by size, from ``streampack.cp_groups``, for a feed with
            ``cp: dynamic``. Then ``batch.cp_group`` is the group of the ranks that share the batch.
        model: ``model.config`` of transformers, a dict with the keys of ``config.json``, or a ``ModelFlops``, to count
            useful FLOPs. ``stats`` then has ``useful_tflops``. Default: the ``config.json``, or its folder, that the
            environment variable STREAMPACK_MODEL_CONFIG names.
        peak_tflops: TFLOPs that one device can do in a second, dense, in the precision of the training; 989 for bf16
            on an H100 SXM. With it, ``stats``, the broker and ``streampack report`` show the useful MFU. Needs
            ``model``. Default: the environment variable STREAMPACK_PEAK_TFLOPS.
        key_file: Key file made by ``streampack keys new``, if the broker requires a key. Default: the environment
            variable STREAMPACK_KEY_FILE.
        variable_lengths: True if the pipeline's stages exchange micro-batches of any shape. Padded micro-batches on a
            mesh with pp > 1 require it.
        verify: Check every invariant of every step, as ``streampack.verify`` does. This costs about ten times the time
            to build a step.
        prefetch: Number of steps to keep ready beyond the step in use, at least 1.
        timeout_s: Seconds that the broker may take to answer the first message and each later request.
        stall_timeout_s: Seconds that a wait for a step may last without any message from the broker. Choose a value
            below the timeout of the trainer's collectives.
        join_timeout_s: Seconds that a wait may last for ranks that have not joined.

    Returns:
        A ``Client``. Its packs are ``View`` objects, or ``Pack`` objects with ``format="numpy"``.

    Raises:
        UserError: An argument is invalid, or the feed does not support the format.
        MeshError: The rules cannot serve this mesh, or another process holds the rank.
        Unreachable: No broker answered within ``timeout_s``, or ``stall_timeout_s`` if that is less.
        Rejected: The broker does not accept this client, for example its key. The loader raises this later, too, when
            another process has taken over the rank.
        DataStall: Raised by the loader after ``stall_timeout_s`` or ``join_timeout_s``.

    Example:
        >>> with connect("tcp://node0:7402", mesh={"dp": 2, "dp_rank": 0}) as loader:  # doctest: +SKIP
        ...     for pack in loader:
        ...         train(pack.input_ids, pack.labels, pack.position_ids)
    """
    chosen = filled(ConnectOptions, options, "connect")
    prefetch, verify, media, timeout_s = chosen["prefetch"], chosen["verify"], chosen["media"], chosen["timeout_s"]
    if not isinstance(prefetch, int) or prefetch < 1:
        raise UserError(f"got prefetch={prefetch!r}, expected at least 1 step")
    stall_s, join_s = chosen["stall_timeout_s"], chosen["join_timeout_s"]
    for name, seconds in {"timeout_s": timeout_s, "stall_timeout_s": stall_s, "join_timeout_s": join_s}.items():
        if not isinstance(seconds, int | float) or not seconds > 0:
            raise UserError(f"got {name}={seconds!r}, expected seconds, more than 0")
    place = mesh_of(chosen["mesh"], chosen["order"])
    if verify and media is not None and media.drops:
        raise UserError(
            "got verify=True with Media(on_error='drop'), expected one of them, because dropped samples have no labels"
        )
    views = Views(
        format, place, chosen["device"], verify, chosen["masks"], bool(chosen["static_shapes"]),
        None if media is None else media.open(place), chosen["cp_groups"],
    )  # fmt: skip
    _introduce_to_torch()
    patience, key = Patience(stall_s, join_s, timeout_s), find_key(chosen["key_file"])
    at, read_by = endpoint_of(endpoint, "trainers", timeout_s), _readers(chosen["readers"])
    relay, named = find_relay(at)
    if named and relay is not None:
        start = f"streampack relay --broker {at} --listen {relay}"
        if not is_served(relay):
            log.warning(
                "%s names %s, but no relay listens there. Start one on this host: %s", ENVIRONMENT, relay, start
            )
        elif (other := broker_of(relay)) not in (None, at):
            log.warning(
                "the relay at %s reads from %s, not from %s. Reading from the broker itself. Start another relay on "
                "this host: %s", relay, other, at, start,
            )  # fmt: skip
            relay = None
    return Client(
        Reading(
            at, chosen["feed"], place, read_by, prefetch, patience, views, bool(chosen["variable_lengths"]), key,
            relay, named, _useful(chosen["model"], chosen["peak_tflops"], place),
        )
    )  # fmt: skip


def _useful(model: Any, peak_tflops: float | None, mesh: Mesh) -> UsefulFlops | None:
    """Return how useful FLOPs count; None without a model. Raises UserError for invalid arguments.

    Adapters of frameworks do not pass a model, so the environment may name it.
    """
    if model is None and (path := os.environ.get(MODEL_CONFIG)):
        model = _config_in(Path(path))
    if peak_tflops is None and (text := os.environ.get(PEAK_TFLOPS)):
        try:
            peak_tflops = float(text)
        except ValueError:
            raise UserError(f"got {PEAK_TFLOPS}={text!r}, expected the TFLOPs of one device, such as 989") from None
    is_number = isinstance(peak_tflops, int | float) and 0 < peak_tflops < math.inf
    if peak_tflops is not None and (model is None or not is_number):
        raise UserError(
            f"got peak_tflops={peak_tflops!r} and {'no' if model is None else 'a'} model, expected a number above 0 "
            f"and the model whose FLOPs count. Pass model=model.config and the peak of one device, such as 989. Or set "
            f"{MODEL_CONFIG} to the model's config.json, and {PEAK_TFLOPS}"
        )
    if model is None:
        return None
    return UsefulFlops(ModelFlops.of(model), mesh.cp, mesh.tp * mesh.pp, (peak_tflops or 0.0) * TERA)


def _config_in(path: Path) -> Any:
    """Return the contents of a ``config.json``, or of that in a folder. Raises UserError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict)
    except (OSError, ValueError) as error:
        raise UserError(
            f"got {MODEL_CONFIG}={path}, expected the config.json of a model or its folder ({error}). Correct the path"
        ) from None


def _readers(readers: Mapping[str, Sequence[int]] | None) -> ReadBy:
    """Convert the argument ``readers``. Raises MeshError if it is invalid."""
    try:
        return msgspec.convert(dict(readers or {}), ReadBy)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        raise MeshError(
            f"readers: {error}. Pass lists of ranks by axis, such as {{'tp': [0], 'pp': [0, -1]}}"
        ) from None


def _introduce_to_torch() -> None:
    """Register ``Client`` as an IterableDataset, if torch is imported, so that torch's DataLoader accepts it.

    Raises UserError in one of several DataLoader workers, since each worker would read all data.
    """
    if "torch" not in sys.modules:
        return
    from torch.utils.data import IterableDataset, get_worker_info
    from torch.utils.data._utils.collate import default_collate_fn_map

    worker = get_worker_info()
    if worker is not None and worker.num_workers > 1:
        raise UserError(
            f"got a call in one of {worker.num_workers} DataLoader workers, expected a call in the trainer's own "
            f"process. Each worker {TWICE}"
        )
    IterableDataset.register(Client)
    default_collate_fn_map.update(dict.fromkeys((Pack, View), _refuse_to_collate))


def _refuse_accelerate() -> None:
    """Raise UserError if a DataLoader that Accelerate has prepared iterates: it reads on rank 0 only, for all ranks."""
    frame = sys._getframe(1) if "accelerate.data_loader" in sys.modules else None
    while frame is not None:
        if frame.f_globals.get("__name__") == "accelerate.data_loader" and "Dispatcher" in frame.f_code.co_qualname:
            raise UserError(
                "got a loader that accelerator.prepare would read on rank 0 alone, but each rank has packs of its own. "
                "Prepare only the model and the optimizer, and iterate the loader itself"
            )
        frame = frame.f_back


def _refuse_to_collate(batch: Any, **_: Any) -> Any:
    """Raise UserError where torch's DataLoader would make a batch of packs."""
    raise UserError(
        f"got {len(batch)} packs to collate, but a pack is a batch already. Write DataLoader(loader, batch_size=None, "
        f"num_workers=0), or iterate the loader itself, which prefetches"
    )


class Client(Generic[BatchT]):
    """Loader of one rank's packs, returned by ``connect``.

    Iterate a client for packs, or ``steps()`` for steps. A client is a context manager that releases the rank at the
    end. Use a client from one thread, in the process that called ``connect``.

    Args:
        reading: The rank's connection to the broker. Call ``connect`` instead of this constructor.

    Raises:
        DataStall: While iterating, no step came within the time limits of ``connect``.
        StageEnds: While iterating, the feed goes on with a stage that this trainer cannot read.
        Rejected: While iterating, another process took over the rank.

    Example:
        >>> loader = streampack.connect("tcp://node0:7402")  # doctest: +SKIP
        >>> for step in loader.steps():  # doctest: +SKIP
        ...     for pack in step:
        ...         loss = summed_loss(pack) / step.num_loss_tokens
        ...         loss.backward()
        ...     optimizer.step()
        ...     saved = loader.state_dict()  # for the checkpoint; loader.load_state_dict(saved) goes on from it
        ...     loader.commit(step.index)  # once the checkpoint is durable
        ...     loader.publish(step.index + 1)  # once RL workers can load the policy
        >>> loader.stats()["wait_s"]  # doctest: +SKIP
        0.031
        >>> loader.close()  # doctest: +SKIP

        From another thread, which watches over the run:

        >>> loader.move_to("tcp://node1:7402")  # doctest: +SKIP
        >>> loader.fail(DataStall("the run was canceled"))  # doctest: +SKIP
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._close = weakref.finalize(self, reading.close)

    def __iter__(self) -> Iterator[BatchT]:
        if self.mesh.dp > 1:
            _refuse_accelerate()
        self._reading.begin()
        return self

    def __next__(self) -> BatchT:
        """Return the rank's next pack. Raises StopIteration after the feed's last step, which is equal on all ranks.

        Raises StageEnds, at each call, if the feed goes on with a stage that this trainer cannot read.
        """
        pack: BatchT = self._reading.next_pack()
        return pack

    def steps(self) -> Iterator[Step[BatchT]]:
        """Iterate the rank's steps.

        Requesting the next step marks the current one as used, and the broker may forget it. The first step is the one
        of a loaded state. Otherwise, if the feed is finite and the iteration before has handed out a step or its end,
        it is the feed's first step. In all other cases it is the next step.

        Returns:
            An iterator of steps. It ends at the end of the feed, or when another iteration begins.

        Raises:
            DataStall: While iterating, no step came within the time limits of ``connect``.
            StageEnds: While iterating, the feed goes on with a stage that this trainer cannot read. Each further call
                raises it again. Save a checkpoint, and start the trainer again as the error says.
        """
        self._reading.begin()
        return _Steps(self)

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Return the loader's position, to save with the model; equal on all ranks, valid for any mesh.

        Until the trainer has taken the last micro-batch of a step, the state is the one before that step, then the one
        after it. This holds for every way to iterate. A step resumes as a whole, from its first micro-batch. Save after
        the optimizer's update, as gradients are not in a checkpoint.

        A loop over a step that has micro-batches left counts, even if an earlier loop took all of them. ``list(step)``
        takes all at once. ``Step.regroup``, ``Step.sample_ids`` and ``verify`` take none. A request for the next step
        marks the step before as used.

        The call has no side effects and waits for the broker's answer; any rank may call it at any time. If a broker
        without a ``state_dir`` restarts between two ranks' calls, their ``snapshot`` may differ. Both are valid.

        Args:
            step: Index of the last trained step. Pass it if steps or micro-batches are fetched ahead of training.
                Default: the last step whose micro-batches were all taken.

        Returns:
            A dict that holds only what JSON can hold.

        Raises:
            UserError: The step was not handed out in this iteration, or the trainer is in the middle of it.
            DataStall: The broker did not answer.
        """
        return self._reading.state(step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state: the next pack, step or iteration begins there.

        Call it on every rank with the same state, before iterating or in the middle of an iteration. If the method is
        called several times, the last state counts.

        Args:
            state: The dict that ``state_dict`` returned, on any rank and any mesh.

        Raises:
            StateError: The state is of another version, run, feed or rules; the message names the key.
        """
        self._reading.load(state)

    def commit(self, step: int) -> None:
        """Report that the checkpoint after ``step`` is durable.

        The broker may then delete data that only older checkpoints need. Call it on one rank, once all ranks have
        stored their parts of the checkpoint. It returns when the broker has recorded the commit.

        Args:
            step: Index of the last trained step in the checkpoint.

        Raises:
            UserError: The step was not handed out, or the trainer is in the middle of it.
            DataStall: The broker did not answer.
        """
        self._reading.commit(step)

    def publish(self, version: SupportsIndex) -> None:
        """Tell the programs that push samples that a new policy is ready, and wait until that is durable.

        One rank calls it, once generators can load the policy. ``Producer.policy_version`` and ``Producer.wait_for``
        then return the version. ``max_policy_lag`` counts from it.

        Args:
            version: Version of the policy, at least the last one. It may be lower after trainers went back to a
                checkpoint.

        Raises:
            UserError: The version is lower than the last one, or not an integer from 0 to 2**53.
            Rejected: A higher version is published in this attempt, or the key is not for rank 0 of every axis.
            DataStall: The version was not durable in time.
        """
        self._reading.publish(version)

    def stats(self) -> dict[str, float]:
        """Return this rank's counts and times since ``connect``. ``mixture`` has figures by stream, over all ranks.

        Returns:
            A dict of numbers by name:

            - ``steps``, ``packs``: steps and packs handed out.
            - ``tokens``: real tokens in those packs.
            - ``skipped_steps``: steps that the run's record says to skip.
            - ``wait_s``: data wait in seconds, the sum of the ``starved_*_s``.
            - ``starved_stream_s``: seconds of wait for samples of a stream.
            - ``starved_peers_s``: seconds of wait for other ranks to return their steps.
            - ``starved_join_s``: seconds of wait for ranks that had not joined.
            - ``starved_memory_s``: seconds of wait for space in the broker's memory.
            - ``starved_forming_s``: seconds of wait for the packer.
            - ``starved_log_s``: seconds of wait for the broker's disk.
            - ``starved_network_s``: seconds of wait for the network, or for a silent broker.
            - ``starved_relay_s``: seconds of wait for the relay of this host.
            - ``starved_fraction``: data wait as a share of the time since the third step arrived, 0 to 1.
            - ``next_p50_ms``, ``next_p99_ms``, ``next_p999_ms``: percentiles of the wait for a step, in milliseconds.
            - ``trainer_s``: seconds between a step's arrival at the trainer and the request for the next step.
            - ``step_s``: mean seconds from one step to the next, over the last 32 steps; missing before the second.
            - ``useful_tflops``: useful FLOPs per second of this device over the last 32 steps, in TFLOPs; with
              ``model``. Waits count as time.
            - ``mfu``: the same as a share of ``peak_tflops``, 0 to 1; missing without it.
            - ``media_items``, ``media_bytes``: media items that were fetched, and their bytes; with ``media``.
            - ``media_dropped_REASON``: items that were dropped, by reason; with ``Media(on_error="drop")``. Reasons are
              ``missing``, ``too_large``, ``wrong_bytes``, ``undecodable``, ``late`` and ``unreadable``.
        """
        return self._reading.stats()

    def mixture(self) -> dict[str, dict[str, Any]]:
        """Return how the feed's streams are mixed, over all ranks, as the broker has it now.

        Any rank may call it at any time. The call waits for the broker's answer, and takes no step.

        Returns:
            For each stream, by name, a dict:

            - ``weight``: its latest weight; 0 after its removal.
            - ``share``: share of the next tokens (or samples, with ``weight_unit: samples``) that the weights in force
              give it. Weights of ended streams go to the others. None with ``merge: arrival``.
            - ``ended``: True after all its samples are merged.
            - ``passes``: whole passes over its data that producers have sent; None for a pushed stream.
            - ``trained_samples``, ``trained_tokens``: its samples and tokens in the steps that every rank has returned.
              Each recorded step counts once, over the life of the run's log, also if it is read again. A step is
              returned when its trainer asks for the next one.
            - ``trained_share``: its share of the trained tokens; None before the first.
            - ``rejected``: bad samples that were dropped since the broker started, by reason.

        Raises:
            DataStall: The broker did not answer.

        Example:
            >>> loader.mixture()["web"]["trained_share"]  # doctest: +SKIP
            0.3001
        """
        return self._reading.mixture()

    def close(self) -> None:
        """Release the rank and end the client's thread.

        Further calls have no effect. A client without references is closed as well.
        """
        self._reading.close()

    def fail(self, error: StreampackError) -> None:
        """Raise ``error`` at the trainer's next request for a step, once the prefetched steps are used up.

        Any thread may call it.

        Args:
            error: The exception to raise in the trainer's thread.
        """
        self._reading.fail(error)

    def move_to(self, endpoint: str) -> None:
        """Go on with the same broker at another address, as after its restart on another host.

        Any thread may call it. The loader does not lose its place.

        Args:
            endpoint: The broker's new address for trainers.
        """
        self._reading.move_to(endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __bool__(self) -> bool:
        """Return True: a loader has no length, so ``bool`` would fail."""
        return True

    def __repr__(self) -> str:
        """Describe the loader in one line: feed, mesh, steps and format of the packs."""
        return f"{type(self).__name__}({self._reading.described()})"

    def __len__(self) -> int:
        raise TypeError(
            "the client has no length, because the length of its feed is not known. Iterate until the feed ends, or "
            "count steps"
        )

    def __reduce__(self) -> str:
        raise UserError(
            f"got a client to pickle, expected the client to stay in its process. A client in another process {TWICE}"
        )

    @property
    def silent_s(self) -> float:
        """Seconds since the broker's last message."""
        return self._reading.silent_s

    @property
    def is_closed(self) -> bool:
        """True once the loader was closed."""
        return self._reading.is_closed

    @property
    def rules(self) -> Rules:
        """The rules of the step that was handed out last; before the first, those with which the run began.

        Weights and streams are those of the begin; ``mixture`` has them as they are now.
        """
        return self._reading.rules

    @property
    def mesh(self) -> Mesh:
        """The sizes of the trainers' mesh and this rank's place in the mesh."""
        return self._reading.mesh

    @property
    def format(self) -> str:
        """Name of the packs' format, as passed to ``connect``."""
        return self._reading.format


class _Steps(Iterator[Step[BatchT]]):
    """The steps of one iteration. A generator would end with the first error; each call raises StageEnds again.

    The iterator refers to the client, and so keeps it open.
    """

    def __init__(self, client: Client[BatchT]) -> None:
        self._client = client
        self._iteration = client._reading.iteration

    def __next__(self) -> Step[BatchT]:
        reading = self._client._reading
        step = reading.next_step() if self._iteration == reading.iteration else None
        if step is None:
            raise StopIteration
        return step
