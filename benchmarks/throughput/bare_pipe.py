"""Measure the bare pipe: the tokens/s that this machine moves without any guarantees.

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
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq

from benchmarks.processes import START_TIMEOUT_S, Processes
from benchmarks.traffic import MESSAGE_BYTES, NUM_PRODUCERS, PACK_TOKENS, WARM_UP_S, PipeResult, Traffic

Tokens = npt.NDArray[Any]  # int32 or uint16; tables travel in the same words
Offsets = npt.NDArray[np.int64]

FRAMES_PER_PRODUCER = 16  # distinct frames sent in turn: 2 x 16 MiB, as large as a common L3
WINDOW_FRAMES = 16  # samples of this many frames are gathered together
ARENA_FRAMES = 64  # 64 MiB
HIGH_WATER_MARK = 16  # messages of 1 MiB, for each end of each socket
STRIDE = 1_000_003  # a prime larger than any number of samples in a window: i * STRIDE % n visits each once


def run_bare_pipe(seconds: float, traffic: Traffic) -> PipeResult:
    """Run the bare pipe and time it for `seconds` after a warm-up.

    Raises RuntimeError when a process of the pipe fails or stalls. No process outlives the call.

        >>> run_bare_pipe(2.0, Traffic("tcp")).tokens_per_second
    """
    tcp = traffic.transport == "tcp"
    with tempfile.TemporaryDirectory(prefix="bare-pipe-") as folder, Processes() as processes:  # its mode is 0700
        bind = ["tcp://127.0.0.1:*"] * 2 if tcp else [f"ipc://{folder}/in", f"ipc://{folder}/out"]
        packer = processes.start("packer", _pack, traffic, *bind)
        frames_endpoint, packs_endpoint = processes.receive(packer, START_TIMEOUT_S)
        consumer = processes.start("consumer", _consume, traffic, packs_endpoint, seconds)
        for i in range(NUM_PRODUCERS):
            processes.start(f"producer-{i}", _produce, traffic, frames_endpoint, i)
        processes.receive(consumer, START_TIMEOUT_S)
        before = processes.cpu_seconds()
        tokens, elapsed = processes.receive(consumer, seconds + START_TIMEOUT_S)
        after, peaks = processes.cpu_seconds(), processes.peak_bytes()
    cpu = {name: round(after[name] - before[name], 2) for name in after}
    return PipeResult(tokens, elapsed, tokens / elapsed, cpu, peaks)


def _frame_words(traffic: Traffic) -> int:
    return MESSAGE_BYTES // traffic.token_bytes


def _packs_per_message(traffic: Traffic) -> int:
    return MESSAGE_BYTES // (PACK_TOKENS * traffic.token_bytes)


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


def make_frame(traffic: Traffic, seed: int) -> Tokens:
    """One full frame, words of the token type; the token at position p of a sample is p + 1."""
    words = _frame_words(traffic)
    drawn = traffic.draw(seed, words)
    words_after = 1 + np.cumsum(drawn + 1)  # a sample takes a word of the table, too
    n = int(np.searchsorted(words_after, words - 2, side="right"))
    rest = words - int(words_after[n - 1]) - 1  # the last sample fills the frame
    lengths = np.append(drawn[:n], rest)
    starts = np.cumsum(lengths) - lengths
    tokens = np.arange(1, int(lengths.sum()) + 1) - np.repeat(starts, lengths)
    frame = np.concatenate([[n + 1], lengths, tokens]).astype(traffic.tokens)
    frame.flags.writeable = False  # ZeroMQ reads it after send() has returned
    return frame


def _produce(report: Connection, traffic: Traffic, endpoint: str, producer: int) -> None:
    _keep_freed_memory()
    frames = [make_frame(traffic, producer * FRAMES_PER_PRODUCER + i) for i in range(FRAMES_PER_PRODUCER)]
    socket = _socket(zmq.DEALER)
    socket.connect(endpoint)
    while True:
        for frame in frames:
            socket.send(frame.data, copy=False)


# Packer: frames into the arena; out of it messages of
# [number of full packs | tokens of one that is not | what each pack begins with | the packs]


def _list_samples(
    arena: Tokens, frame_words: int, first_frame: int, num_frames: int, starts: Offsets, lengths: Offsets
) -> int:
    """Where the window's samples are in the arena, in scattered order; returns how many there are."""
    n = 0
    for f in range(first_frame, first_frame + num_frames):
        n += arena[f * frame_words]
    i = 0
    for f in range(first_frame, first_frame + num_frames):
        base = f * frame_words
        start = base + 1 + arena[base]
        for s in range(arena[base]):
            at = i * STRIDE % n
            starts[at] = start
            lengths[at] = arena[base + 1 + s]
            start += lengths[at]
            i += 1
    return n


def _fill_packs(
    arena: Tokens, starts: Offsets, lengths: Offsets, num_samples: int, sample: int, cut: int, packs: int, out: Tokens
) -> tuple[int, int]:
    """Fill one message from token `cut` of sample `sample` on; returns the sample and cut at which the next begins."""
    head = 2 + packs
    filled = 0
    capacity = packs * PACK_TOKENS
    out[2:head] = 0
    while filled < capacity and sample < num_samples:
        if filled % PACK_TOKENS == 0:
            out[2 + filled // PACK_TOKENS] = cut + 1
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
    out[0] = filled // PACK_TOKENS
    out[1] = filled % PACK_TOKENS
    return sample, cut


def _pack(report: Connection, traffic: Traffic, frames_endpoint: str, packs_endpoint: str) -> None:
    import numba

    _keep_freed_memory()
    list_samples: Callable[..., int] = numba.njit(nogil=True)(_list_samples)
    fill_packs: Callable[..., tuple[int, int]] = numba.njit(nogil=True)(_fill_packs)
    words, packs_of = _frame_words(traffic), _packs_per_message(traffic)
    arena = np.zeros(ARENA_FRAMES * words, traffic.tokens)
    arena_bytes = arena.view(np.uint8).reshape(ARENA_FRAMES, MESSAGE_BYTES)
    starts = np.zeros(WINDOW_FRAMES * words // 2, np.int64)
    lengths = np.zeros_like(starts)
    message_words = 2 + packs_of * (1 + PACK_TOKENS)
    list_samples(arena, words, 0, 0, starts, lengths)  # compiled before the first frame
    fill_packs(arena, starts, lengths, 0, 0, 0, packs_of, np.empty(message_words, traffic.tokens))

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
            n = list_samples(arena, words, slot - WINDOW_FRAMES, WINDOW_FRAMES, starts, lengths)
            sample = cut = 0
            while sample < n:
                out = np.empty(message_words, traffic.tokens)
                sample, cut = fill_packs(arena, starts, lengths, n, sample, cut, packs_of, out)
                out.flags.writeable = False
                packs.send(out.data, copy=False)
            slot %= ARENA_FRAMES


# Consumer


def _consume(report: Connection, traffic: Traffic, endpoint: str, seconds: float) -> None:
    _keep_freed_memory()
    socket = _socket(zmq.PULL)
    socket.connect(endpoint)
    _receive_packs(socket, traffic)
    warm_at = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < warm_at:
        _receive_packs(socket, traffic)
    report.send("warm")
    start = now = time.perf_counter()
    tokens = 0
    while now - start < seconds:
        tokens += _receive_packs(socket, traffic)
        now = time.perf_counter()
    report.send((tokens, now - start))
    threading.Event().wait()  # until the parent has read our CPU time, and ends us


def _receive_packs(socket: zmq.Socket[bytes], traffic: Traffic) -> int:
    """The number of tokens in the next message, whose packs begin as the packer's table said they would."""
    message = np.frombuffer(socket.recv(copy=False).buffer, traffic.tokens)
    head = 2 + _packs_per_message(traffic)
    full, rest = int(message[0]), int(message[1])
    num_packs = full + (rest > 0)
    if not np.array_equal(message[head::PACK_TOKENS][:num_packs], message[2 : 2 + num_packs]):
        raise RuntimeError("a pack does not begin with the token that the packer's table names")
    return full * PACK_TOKENS + rest
