"""Processes of a group hold the same frames in one copy of the router's shared memory."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streampack.transport.slots import NUM_SLOTS
from streampack.transport.sockets import Dealer, Poller, Router

NUM_RANKS = 8
LARGE = 1 << 20
PATIENCE_S = 60.0


def until(condition: Callable[[], Any], sock: Router | Dealer) -> Any:
    poller, end = Poller([sock]), time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end
        poller.wait(0.05)
    return found


def content(number: int) -> bytes:
    return number.to_bytes(8, "little") * (LARGE // 8)


def hold_all(endpoint: str) -> None:
    """A process that holds all frames until the router has looked at its memory."""
    dealer = Dealer(endpoint, 1 << 24)
    dealer.send([b"hello"])
    held: list[Any] = []
    while len(held) < NUM_SLOTS:
        kind, *frames = until(dealer.receive, dealer)
        held += frames if bytes(kind) == b"step" else []
    for _ in range(2):
        assert all(bytes(memoryview(frame)) == content(number) for number, frame in enumerate(held))
        dealer.send([b"held", b"%d" % sum(isinstance(frame, memoryview) for frame in held)])
        until(dealer.receive, dealer)
    dealer.close()


def shared_bytes() -> int:
    """Shared memory that this process has touched."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssShmem:")[1].split()[0])


def test_eight_processes_of_a_group_hold_one_copy(tmp_path: Path) -> None:
    router = Router(f"ipc://{tmp_path}/socket", 1 << 24)
    assert router._links is not None
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=hold_all, args=(router.endpoint,), daemon=True) for _ in range(NUM_RANKS)]
    for process in processes:
        process.start()
    try:
        peers = [until(router.receive, router)[0].bytes for _ in processes]
        assert all(router.share(peer, b"tp group") for peer in peers)
        linked = [router._links._by_peer[peer] for peer in peers]
        for peer in peers:
            router.send(peer, [b"first", bytes(LARGE)])
        until(lambda: router.receive() or all(link.lends for link in linked), router)
        before = shared_bytes()
        for number in range(NUM_SLOTS):
            frame = content(number)
            assert all(router.send(peer, [b"step", frame]) for peer in peers)
        for _ in range(2):
            answers = [until(router.receive, router) for _ in peers]
            assert [bytes(frames[2]) for frames in answers] == [b"%d" % NUM_SLOTS] * NUM_RANKS
            assert NUM_SLOTS * LARGE <= shared_bytes() - before < 1.1 * NUM_SLOTS * LARGE
            for peer in peers:
                router.send(peer, [b"go on"])
        for process in processes:
            process.join(PATIENCE_S)
        assert [process.exitcode for process in processes] == [0] * NUM_RANKS
    finally:
        for process in processes:
            process.kill()
            process.join()
        router.close()
