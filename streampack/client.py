"""The client: what a trainer iterates. A thin shell around ``core.client_session``.

One thread owns the socket, keeps a few steps ready and turns them into packs; the trainer's
thread only takes them. Nothing waits silently: a wait of more than 5 s is logged with what it
waits for, and an error of the session is raised where the trainer asks for its next pack.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from streampack import wire
from streampack.core.client_session import Again, Broken, ClientSession, Deliver, Detach, Ended, Returned
from streampack.core.events import Effect, FromBroker, Send, Tick
from streampack.core.messages import Mesh, ReadBy
from streampack.core.rules import Rules
from streampack.errors import (
    InternalError,
    MeshError,
    PeerError,
    Rejected,
    StreampackError,
    Unreachable,
    UserError,
    WireError,
)
from streampack.formats import Views, real_tokens
from streampack.packs import Step, build_step
from streampack.ranks import mesh_of
from streampack.slabs import Slabs
from streampack.transport import Dealer, Poller, Waker, drain

log = logging.getLogger("streampack.client")

TICK_S = 0.2
SAY_S = 5.0
MAX_MESSAGE_BYTES = 1 << 30
STATS_S = 1.0
_WAITS_KEPT = 4096
_TWICE = (
    "would read everything again, expected the trainer's own process: connect there and take "
    "DataLoader(loader, batch_size=None, num_workers=0); the client prefetches by itself"
)


def connect(
    endpoint: str | None = None,
    *,
    feed: str = "train",
    mesh: Any = None,
    order: str | None = None,
    readers: Mapping[str, Sequence[int]] | None = None,
    format: str | None = None,
    device: Any = None,
    verify: bool = False,
    prefetch: int = 2,
    timeout_s: float = 60.0,
) -> Client:
    """Attach to a broker and iterate its packs.

    ``endpoint``: the broker's trainers' address, ``tcp://host:port`` or ``ipc:///path``, or
    ``file://`` and its rendezvous file; by default the environment's STREAMPACK_ENDPOINT.
    ``mesh``: a torch DeviceMesh; or sizes and ranks, such as ``{"dp": 8, "dp_rank": 3}``; or sizes alone
    with the ``order`` in which RANK counts, such as ``"tp-cp-dp-pp"``; one rank by default.
    ``readers``: the tensor and pipeline ranks that read, equal on all of them, where not every rank of the mesh
    does: ``{"tp": [0], "pp": [0, -1]}`` for Megatron, whose first and last stages read on tensor rank 0 and
    broadcast. ``format``: ``thd``, the pack as torch tensors (default where torch is installed); ``hf`` or
    ``hf_shifted``, transformers' arguments; ``numpy``. ``device``: where its tensors are copied ahead of use.
    ``verify``: assert every invariant of every step. ``prefetch``: steps kept ready beyond the one in use.
    ``timeout_s``: how long a broker may take to answer at first.

    A finite feed (no stream of it repeats) can be iterated again: each ``for`` and each ``steps()`` begins at its
    first step, once all ranks have come to it; on one that is infinite they go on.

    Raises UserError for arguments that cannot be; MeshError if the rules cannot serve this mesh or
    another holds the rank, Unreachable if nobody answers.

    >>> with connect("tcp://node0:7402", mesh={"dp": 2, "dp_rank": 0}) as loader:  # doctest: +SKIP
    ...     for pack in loader:
    ...         train(pack.input_ids, pack.labels, pack.position_ids)
    """
    if not isinstance(prefetch, int) or prefetch < 1:
        raise UserError(f"got prefetch={prefetch!r}, expected at least 1 step")
    place = mesh_of(mesh, order)
    views = Views(format, place, device, verify)
    _introduce_to_torch()
    return Client(_endpoint(endpoint, timeout_s), feed, place, _readers(readers), prefetch, timeout_s, views)


def _readers(readers: Mapping[str, Sequence[int]] | None) -> ReadBy:
    try:
        return msgspec.convert(dict(readers or {}), ReadBy)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        raise MeshError(f"readers: {error}; expected ranks by name, such as {{'tp': [0], 'pp': [0, -1]}}") from None


def _introduce_to_torch() -> None:
    """A DataLoader takes a client for the stream that it is. Raises UserError in one of several workers."""
    if "torch" not in sys.modules:
        return
    from torch.utils.data import IterableDataset, get_worker_info

    worker = get_worker_info()
    if worker is not None and worker.num_workers > 1:
        raise UserError(f"got one of {worker.num_workers} DataLoader workers, each of which {_TWICE}")
    IterableDataset.register(Client)


def _endpoint(endpoint: str | None, timeout_s: float) -> str:
    found = endpoint or os.environ.get("STREAMPACK_ENDPOINT")
    if not found:
        raise UserError("got no endpoint, expected tcp://host:port, or STREAMPACK_ENDPOINT in the environment")
    if found.startswith("file://"):
        return read_rendezvous(Path(found.removeprefix("file://")), "trainers", timeout_s)
    return found


def read_rendezvous(path: Path, side: str, timeout_s: float = 60.0) -> str:
    """The broker's address for ``side`` (``producers`` or ``trainers``) from its rendezvous file.

    Waits up to ``timeout_s`` for the file. Raises Unreachable without one.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return str(json.loads(path.read_text())[side])
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise Unreachable(
                    f"{path}: got no such file in {timeout_s:g} s, expected a broker's rendezvous file: "
                    f"is the broker running?"
                ) from None
            time.sleep(0.2)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Unreachable(f"{path}: is no rendezvous file of a broker: {error}") from None


class Client:
    """An iterable of packs, and ``steps()`` of steps; a context manager. Made by ``connect``.

    One thread of the trainer uses it, in the process that made it.
    """

    def __init__(
        self, endpoint: str, feed: str, mesh: Mesh, readers: ReadBy, prefetch: int, timeout_s: float, views: Views
    ) -> None:
        self._endpoint, self._timeout_s, self._mesh, self._views = endpoint, timeout_s, mesh, views
        self._session = ClientSession(
            run=0, feed=feed, reader=uuid.uuid4().hex, host=socket.gethostname(), pid=os.getpid(), mesh=mesh,
            readers=readers, prefetch=prefetch,
        )  # fmt: skip
        self._pid = os.getpid()
        self._ready: deque[Step] = deque()
        self._told: deque[Returned | Again] = deque()
        self._round = 0
        self._delivered = False
        self._changed = threading.Condition()
        self._error: StreampackError | None = None
        self._ended = False
        self._attached = self._finite = False
        self._closing = False
        self._waits: deque[float] = deque(maxlen=_WAITS_KEPT)
        self._counts = {"steps": 0, "packs": 0, "tokens": 0, "wait_s": 0.0, "starved_s": 0.0}
        self._started = self._steady = time.monotonic()
        self._slabs = Slabs()
        self._in_use: int | None = None
        self._packs: Iterator[Any] = iter(())
        dealer = Dealer(endpoint, MAX_MESSAGE_BYTES, linger_ms=500)
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, args=(dealer,), name="streampack-client", daemon=True)
        self._thread.start()
        try:
            self._wait_for(lambda: self._attached)
        except BaseException:  # Ctrl-C too: an orphan would hold the rank
            self.close()
            raise

    # What a trainer uses

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        return self

    def __next__(self) -> Any:
        """The rank's next pack. Raises StopIteration at the end, on the same step on every rank."""
        while (pack := next(self._packs, None)) is None:
            step = self._next_step()
            if step is None:
                raise StopIteration
            self._packs = iter(step)
        return pack

    def steps(self) -> Iterator[Step]:
        """The rank's steps; a step is returned when the one after it is asked for.

        From the first one on, where the feed is finite and any of this iteration was had; else from the next.
        """
        self._begin()
        return self._steps_of(self._round)

    def _steps_of(self, round_: int) -> Iterator[Step]:
        while round_ == self._round and (step := self._next_step()) is not None:
            yield step

    def _begin(self) -> None:
        """Begin the next iteration of a finite feed, if the trainer has had anything of this one."""
        self._check_process()
        if not self._finite or not (self._delivered or self._ended):
            return
        with self._changed:
            self._round += 1
            self._delivered = self._ended = False
            self._ready.clear()
        self._in_use, self._packs = None, iter(())
        self._told.append(Again())
        self._waker.wake()

    def _next_step(self) -> Step | None:
        """The next step, or None after the last; the one before it has been returned, whoever asks."""
        self._check_process()
        if self._in_use is not None:
            self._told.append(Returned(self._in_use + 1))
            self._in_use = None
            self._waker.wake()
        began = time.perf_counter()
        self._wait_for(lambda: bool(self._ready) or self._ended)
        self._note_wait(time.perf_counter() - began)
        if not self._ready:
            return None
        step = self._views.arrive(self._ready.popleft())
        self._delivered = True
        self._in_use = step.index
        self._counts["steps"] += 1
        self._counts["packs"] += len(step)
        self._counts["tokens"] += sum(real_tokens(pack) for pack in step)
        return step

    def stats(self) -> dict[str, float]:
        """Counts and times so far: ``steps``, ``packs``, ``tokens`` (real ones of this rank's packs), ``wait_s``,
        ``next_p50_ms``, ``next_p99_ms``, ``next_p999_ms`` of a step's wait, and ``starved_fraction``: the share of
        the time since the third step was asked for that was spent waiting."""
        waits = np.array(self._waits) * 1000 if self._waits else np.zeros(1)
        p50, p99, p999 = np.percentile(waits, [50, 99, 99.9]).tolist()
        steady = max(time.monotonic() - self._steady, 1e-9)
        figures = {"next_p50_ms": p50, "next_p99_ms": p99, "next_p999_ms": p999}
        counts = {key: value for key, value in self._counts.items() if key != "starved_s"}
        return {**counts, **figures, "starved_fraction": min(1.0, self._counts["starved_s"] / steady)}

    def close(self) -> None:
        """Give the rank up and end the thread; idempotent."""
        if os.getpid() != self._pid:
            return
        self._closing = True
        self._waker.wake()
        self._thread.join(timeout=10)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        raise TypeError("the length of a stream is not known: iterate until it ends, or count steps")

    def __reduce__(self) -> str:
        raise UserError(f"got a client to pickle; another process {_TWICE}")

    @property
    def rules(self) -> Rules:
        """The run's recorded rules for this feed."""
        attached = self._session.attached
        assert attached is not None  # __init__ has waited for it
        return attached.rules

    # Waiting

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise PeerError(f"got a client of the parent process after the fork; a process of its own {_TWICE}")

    def _wait_for(self, condition: Any) -> None:
        """Until ``condition()``; raises the session's error; says every 5 s what it waits for."""
        with self._changed:
            while not condition():
                if self._error is not None:
                    raise self._error
                if self._closing:
                    raise UserError("the client is closed: connect again")
                if not self._changed.wait(timeout=SAY_S) and not condition():
                    log.warning("%s: waiting for %s", self._mesh, self._session.waiting_for())

    def _note_wait(self, seconds: float) -> None:
        self._counts["wait_s"] += seconds
        if self._counts["steps"] <= 2:
            self._steady = time.monotonic()
            return
        self._waits.append(seconds)
        self._counts["starved_s"] += seconds

    # The thread

    def _run(self, dealer: Dealer) -> None:
        poller = Poller([dealer], self._waker)
        ticked = counted = 0.0
        try:
            while not self._closing:
                poller.wait(TICK_S)
                for frames in drain(dealer, 64):
                    self._perform(dealer, self._receive(frames))
                self._tell(dealer)
                now = time.monotonic()
                if now - counted >= STATS_S:
                    counted = now
                    self._session.stats = self.stats()
                if now - ticked >= TICK_S:
                    ticked = now
                    self._perform(dealer, self._session.handle(Tick(now)))
                    self._check_reached(now)
            self._tell(dealer)
            self._perform(dealer, self._session.handle(Detach()))
        except StreampackError as error:
            self.fail(error)
        except Exception as error:  # a bug of ours must not leave the trainer waiting for a thread that is gone
            log.exception("the client's thread failed")
            self.fail(InternalError(f"the client's thread failed: {error!r}"))
        finally:
            dealer.close()
            self._waker.close()

    def _tell(self, dealer: Dealer) -> None:
        while self._told:
            self._perform(dealer, self._session.handle(self._told.popleft()))

    def _receive(self, frames: list[Any]) -> list[Effect]:
        try:
            return self._session.handle(FromBroker(wire.decode(frames)))
        except WireError as error:
            log.warning("dropped a message of the broker: %s", error)
            return []

    def _perform(self, dealer: Dealer, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                dealer.send(wire.encode(effect.envelope))
            elif isinstance(effect, Deliver):
                step = build_step(effect.parts, effect.attached, self._mesh, self._slabs)
                step = self._views.make(step, effect.attached.rules)
                with self._changed:
                    if self._session.round == self._round:  # the trainer may have begun another by now
                        self._ready.append(step)
                    self._changed.notify_all()
            elif isinstance(effect, Ended):
                with self._changed:
                    self._ended = self._session.round == self._round
                    self._changed.notify_all()
            elif isinstance(effect, Broken):
                self.fail(_error(effect))
        if self._session.attached is not None and not self._attached:
            with self._changed:
                self._finite = self._session.attached.rules.finite
                self._attached = True
                self._changed.notify_all()

    def _check_reached(self, now: float) -> None:
        if not self._session.reached and now - self._started > self._timeout_s:
            raise Unreachable(
                f"{self._endpoint}: got no answer in {self._timeout_s:g} s, expected a broker: "
                f"is 'streampack broker' running, and listening for trainers there?"
            )

    def fail(self, error: StreampackError) -> None:
        """Raise ``error`` where the next step is asked for, once what is ready is taken. Any thread may."""
        with self._changed:
            self._error = error
            self._changed.notify_all()


def _error(broken: Broken) -> StreampackError:
    if broken.code in ("mesh", "rank_taken"):
        return MeshError(broken.detail)
    if broken.code == "stopped":
        return PeerError(broken.detail)
    return Rejected(broken.code, broken.detail)
