"""The bare pipe: how many tokens/s this machine moves when nothing is promised.

Two producers send 1 MiB frames of tokens to a packer, which copies each frame into an arena, gathers scattered
samples out of it into packs and sends those on to a consumer. The bytes take the road they take through streampack
(the same sockets and frame sizes, one copy in, one copy out), and nothing else happens: no credits, checksums, log,
merge order or planning. Packs are filled in a fixed scattered order, and a sample is cut where its pack is full.
It is the ceiling that streampack's throughput is compared with, in the same run on the same machine.

Nothing is dropped: every queue is bounded, and DEALER and PUSH block when theirs is full, so a slow consumer holds
up the producers. Each message to the consumer says which token every pack must begin with; the packer knows it
from its table of samples, not from the tokens, so a pipe that tears, loses or overwrites samples fails.

It knows nothing of streampack.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import psutil
import zmq

Tokens = npt.NDArray[np.int32]
Offsets = npt.NDArray[np.int64]

NUM_PRODUCERS = 2
FRAME_WORDS = 1 << 18  # int32 words in a frame, its table of lengths included: 1 MiB
FRAMES_PER_PRODUCER = 16  # distinct frames sent in turn: 2 x 16 MiB, as large as a common L3
MEAN_SAMPLE_TOKENS = 500
SAMPLE_SIGMA = 1.0  # of the log of the length
PACK_TOKENS = 8192
PACKS_PER_MESSAGE = 32  # 32 x 8192 int32: 1 MiB
WINDOW_FRAMES = 16  # samples of this many frames are gathered together
ARENA_FRAMES = 64  # 64 MiB
HIGH_WATER_MARK = 16  # messages of 1 MiB, for each end of each socket
WARM_UP_S = 0.5
START_TIMEOUT_S = 60.0
STRIDE = 1_000_003  # a prime larger than any number of samples in a window: i * STRIDE % n visits each once


@dataclass(frozen=True)
class PipeResult:
    """What passed through a pipe between the first and the last token that were timed."""

    tokens: int
    seconds: float
    tokens_per_second: float
    cpu_seconds: dict[str, float]  # by process, user and system, over the same interval


def run_bare_pipe(seconds: float, endpoint_kind: str = "ipc") -> PipeResult:
    """Run the bare pipe and time it for `seconds` after a warm-up.

    `endpoint_kind` is `ipc` or `tcp` (127.0.0.1, a port that the system picks). Raises ValueError for another kind
    and RuntimeError when a process of the pipe fails or stalls. No process outlives the call.

        >>> run_bare_pipe(2.0, "tcp").tokens_per_second
    """
    if endpoint_kind not in ("ipc", "tcp"):
        raise ValueError(f"endpoint_kind is {endpoint_kind!r}; it must be 'ipc' or 'tcp'")
    with (
        tempfile.TemporaryDirectory(prefix="bare-pipe-") as folder,
        Processes() as processes,
    ):  # the folder's mode is 0700
        bind = ["tcp://127.0.0.1:*"] * 2 if endpoint_kind == "tcp" else [f"ipc://{folder}/in", f"ipc://{folder}/out"]
        packer = processes.start("packer", _pack, *bind)
        frames_endpoint, packs_endpoint = processes.receive(packer, START_TIMEOUT_S)
        consumer = processes.start("consumer", _consume, packs_endpoint, seconds)
        for i in range(NUM_PRODUCERS):
            processes.start(f"producer-{i}", _produce, frames_endpoint, i)
        processes.receive(consumer, START_TIMEOUT_S)
        before = processes.cpu_seconds()
        tokens, elapsed = processes.receive(consumer, seconds + START_TIMEOUT_S)
        after = processes.cpu_seconds()
    cpu = {name: round(after[name] - before[name], 2) for name in after}
    return PipeResult(tokens, elapsed, tokens / elapsed, cpu)


# The processes of a run, and how they end


class Processes:
    """The children of one run, each reporting to us on a pipe of its own; leaving the block kills them, by pid."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._running: dict[str, BaseProcess] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.join()

    def start(self, name: str, target: Callable[..., None], *args: object) -> Connection:
        """Run `target(report, *args)` in a fresh process; the other end of its pipe is returned."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_child, args=(target, theirs, *args), name=name, daemon=True)
        process.start()
        theirs.close()
        self._running[name] = process
        return ours

    def receive(self, reports: Connection, timeout_s: float) -> Any:
        """The next report; RuntimeError when a child ends, or the time is up, before it."""
        names = {process.sentinel: name for name, process in self._running.items()}
        ready = wait([reports, *names], timeout_s)
        if not ready:
            raise RuntimeError(f"the pipe stalled: no report within {timeout_s:.0f} s")
        dead = [name for sentinel, name in names.items() if sentinel in ready]
        if dead:
            raise RuntimeError(f"{' and '.join(dead)} ended early; the traceback, if it had one, is above")
        try:
            return reports.recv()
        except EOFError:
            raise RuntimeError("a process closed its reports and gave none: it is ending") from None

    def cpu_seconds(self) -> dict[str, float]:
        times = {name: psutil.Process(process.pid).cpu_times() for name, process in self._running.items()}
        return {name: t.user + t.system for name, t in times.items()}


def _child(target: Callable[..., None], report: Connection, *args: object) -> None:
    """Run `target`; leave Ctrl-C to the parent, and end when the parent does, however that was."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _keep_freed_memory()
    target(report, *args)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
    os._exit(1)


def _keep_freed_memory() -> None:
    """Have malloc reuse the 1 MiB buffers: by default glibc returns many to the kernel, and each costs 256 page faults.

    310M -> 362M tokens/s (RESULTS.md). mallopt(3): M_MMAP_THRESHOLD is -3, M_TRIM_THRESHOLD -1.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc only
        libc.mallopt(-3, 32 << 20)
        libc.mallopt(-1, 256 << 20)


def _socket(kind: zmq.SocketType) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.set_hwm(HIGH_WATER_MARK)
    socket.linger = 0
    return socket


# Producer: frames of [number of samples | their lengths | their tokens]


def make_frame(rng: np.random.Generator) -> Tokens:
    """One full frame, [FRAME_WORDS] int32; the token at position p of a sample is p + 1."""
    mu = np.log(MEAN_SAMPLE_TOKENS) - SAMPLE_SIGMA**2 / 2
    drawn = rng.lognormal(mu, SAMPLE_SIGMA, FRAME_WORDS // 64).astype(np.int32).clip(1, PACK_TOKENS)
    words_after = 1 + np.cumsum(drawn.astype(np.int64) + 1)  # a sample takes a word of the table, too
    n = int(np.searchsorted(words_after, FRAME_WORDS - 2, side="right"))
    rest = FRAME_WORDS - int(words_after[n - 1]) - 1  # the last sample fills the frame
    lengths = np.append(drawn[:n], np.int32(rest))
    starts = np.cumsum(lengths) - lengths
    tokens = np.arange(1, int(lengths.sum()) + 1) - np.repeat(starts, lengths)
    frame = np.concatenate([[n + 1], lengths, tokens]).astype(np.int32)
    frame.flags.writeable = False  # ZeroMQ reads it after send() has returned
    return frame


def _produce(report: Connection, endpoint: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    frames = [make_frame(rng) for _ in range(FRAMES_PER_PRODUCER)]
    socket = _socket(zmq.DEALER)
    socket.connect(endpoint)
    while True:
        for frame in frames:
            socket.send(frame.data, copy=False)


# Packer: frames into the arena; out of it messages of [number of tokens | what each pack begins with | the packs]


def _list_samples(arena: Tokens, first_frame: int, num_frames: int, starts: Offsets, lengths: Offsets) -> int:
    """Where the window's samples are in the arena, in scattered order; returns how many there are."""
    n = 0
    for f in range(first_frame, first_frame + num_frames):
        n += arena[f * FRAME_WORDS]
    i = 0
    for f in range(first_frame, first_frame + num_frames):
        base = f * FRAME_WORDS
        start = base + 1 + arena[base]
        for s in range(arena[base]):
            at = i * STRIDE % n
            starts[at] = start
            lengths[at] = arena[base + 1 + s]
            start += lengths[at]
            i += 1
    return n


def _fill_packs(
    arena: Tokens, starts: Offsets, lengths: Offsets, num_samples: int, sample: int, cut: int, out: Tokens
) -> tuple[int, int]:
    """Fill one message from token `cut` of sample `sample` on; returns the sample and cut at which the next begins."""
    head = 1 + PACKS_PER_MESSAGE
    filled = 0
    capacity = PACKS_PER_MESSAGE * PACK_TOKENS
    out[1:head] = 0
    while filled < capacity and sample < num_samples:
        if filled % PACK_TOKENS == 0:
            out[1 + filled // PACK_TOKENS] = cut + 1
        n = min(lengths[sample] - cut, PACK_TOKENS - filled % PACK_TOKENS)
        into = out[head + filled : head + filled + n]
        piece = arena[starts[sample] + cut : starts[sample] + cut + n]
        for i in range(n):  # 2-3x faster than `into[:] = piece` in numba, which asks first whether they overlap
            into[i] = piece[i]
        filled += n
        cut += n
        if cut == lengths[sample]:
            sample += 1
            cut = 0
    out[0] = filled
    return sample, cut


def _pack(report: Connection, frames_endpoint: str, packs_endpoint: str) -> None:
    list_samples: Callable[..., int] = numba.njit(nogil=True)(_list_samples)
    fill_packs: Callable[..., tuple[int, int]] = numba.njit(nogil=True)(_fill_packs)
    arena = np.zeros(ARENA_FRAMES * FRAME_WORDS, np.int32)
    arena_bytes = arena.view(np.uint8).reshape(ARENA_FRAMES, FRAME_WORDS * 4)
    starts = np.zeros(WINDOW_FRAMES * FRAME_WORDS // 2, np.int64)
    lengths = np.zeros_like(starts)
    message_words = 1 + PACKS_PER_MESSAGE * (1 + PACK_TOKENS)
    list_samples(arena, 0, 0, starts, lengths)  # compiled before the first frame
    fill_packs(arena, starts, lengths, 0, 0, 0, np.empty(message_words, np.int32))

    frames, packs = _socket(zmq.ROUTER), _socket(zmq.PUSH)
    frames.bind(frames_endpoint)
    packs.bind(packs_endpoint)
    report.send((frames.getsockopt_string(zmq.LAST_ENDPOINT), packs.getsockopt_string(zmq.LAST_ENDPOINT)))
    poller = zmq.Poller()
    poller.register(frames, zmq.POLLIN)
    slot = 0
    while True:
        poller.poll()
        while True:
            try:
                _, frame = frames.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            arena_bytes[slot] = np.frombuffer(frame.buffer, np.uint8)
            slot += 1
            if slot % WINDOW_FRAMES:
                continue
            n = list_samples(arena, slot - WINDOW_FRAMES, WINDOW_FRAMES, starts, lengths)
            sample = cut = 0
            while sample < n:
                out = np.empty(message_words, np.int32)
                sample, cut = fill_packs(arena, starts, lengths, n, sample, cut, out)
                out.flags.writeable = False
                packs.send(out.data, copy=False)
            slot %= ARENA_FRAMES


# Consumer


def _consume(report: Connection, endpoint: str, seconds: float) -> None:
    socket = _socket(zmq.PULL)
    socket.connect(endpoint)
    _receive_packs(socket)
    warm_at = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < warm_at:
        _receive_packs(socket)
    report.send("warm")
    start = now = time.perf_counter()
    tokens = 0
    while now - start < seconds:
        tokens += _receive_packs(socket)
        now = time.perf_counter()
    report.send((tokens, now - start))
    threading.Event().wait()  # until the parent has read our CPU time, and ends us


def _receive_packs(socket: zmq.Socket[bytes]) -> int:
    """The number of tokens in the next message, whose packs begin as the packer's table said they would."""
    message = np.frombuffer(socket.recv(copy=False).buffer, np.int32)
    head, packs = message[: 1 + PACKS_PER_MESSAGE], message[1 + PACKS_PER_MESSAGE :].reshape(-1, PACK_TOKENS)
    num_tokens = int(head[0])
    num_packs = -(-num_tokens // PACK_TOKENS)
    if not np.array_equal(packs[:num_packs, 0], head[1 : 1 + num_packs]):
        raise RuntimeError("a pack does not begin with the token that the packer's table names")
    return num_tokens
