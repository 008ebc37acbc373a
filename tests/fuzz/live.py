"""``python -m tests.fuzz.live``: messages that are valid by their types, on sockets, into a broker that runs.

Two jobs use one broker with keys: each pushes samples with late fields, reads steps, reports values and reads results.
Attackers hold a key of each role with the rights of the second job. They say what is said in such jobs (``peers``),
with other values (``vary``). The first job, whose rights they do not have, must go on as before. The broker must live.

The exit code is 1 if it did not. The last line has the changed messages by kind, role and state of the connection.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from msgspec.structs import replace
from streampack_services.broker.authorization import new_key

import streampack
from streampack.core.protocol.message import Bye, Envelope, Message, Reject
from streampack.core.protocol.producer_messages import (
    Amend,
    CommitWrite,
    Eos,
    Hello,
    Lease,
    Mark,
    ProducerPing,
    Samples,
    Sent,
    Start,
)
from streampack.core.protocol.relay_messages import NodeGet, NodePing
from streampack.core.protocol.result_messages import AskResults, Publish, ReportValues
from streampack.core.protocol.trainer_messages import (
    AskMixture,
    AskState,
    Attach,
    Attached,
    Brought,
    Commit,
    Fenced,
    Get,
    ReaderPing,
)
from streampack.errors import StreampackError, WireError
from streampack.transport.keys import load_key
from streampack.transport.sockets import Dealer, drain
from streampack.wire import bundles
from streampack.wire import frames as wire
from tests.fuzz.peers import READER, World
from tests.fuzz.vary import Vary
from tests.integration.running import PATIENCE_S, RunningBroker, executed, folder, until

SETTINGS: dict[str, Any] = {
    "run": "fuzzed",
    "merge": "arrival",
    "rules": {"budget": 64, "window": {"samples": 16}, "step": {"packs": 2}},
    "streams": {"v": {"pushed": True, "partitions": 2}, "p": {"pushed": True, "partitions": 2}, "a": {}, "b": {}},
    "feeds": {"victim": {"streams": ["v"]}, "train": {"streams": ["p"]}, "read": {"streams": ["a", "b"]}},
    "fields": {"reward": {"dtype": "float64", "axis": "sample", "late": True}},
    "limits": {"sample_tokens": 64, "chunk": "16KiB", "peers": 40},
}
ROLES = {"pusher": "producers", "reader": "producers", "trainer": "trainers", "relay": "trainers", "bundle": "trainers"}
_OF_PRODUCERS = (Hello, Samples, Eos, Sent, Mark, CommitWrite, Amend, Start, ProducerPing)
_OF_TRAINERS = (Attach, Get, ReaderPing, AskState, AskMixture, Commit, Brought, Publish, ReportValues, AskResults)
REQUESTS: dict[str, tuple[type[Message], ...]] = {
    "pusher": _OF_PRODUCERS, "reader": _OF_PRODUCERS, "trainer": _OF_TRAINERS,
    "relay": (NodeGet, NodePing, *_OF_TRAINERS), "bundle": tuple(kind for kind in (Bye, *_OF_TRAINERS) if kind.RELAYED),
}  # fmt: skip
STUCK_S = 20.0
"""Seconds without a step after which the first job counts as held up."""


class Job:
    """One job, in threads: it goes on until ``over``; ``steps`` counts the steps that its rank has had."""

    def __init__(self, broker: RunningBroker, keys: Path, feed: str, stream: str, owner: str) -> None:
        self.steps, self.errors = 0, list[BaseException]()
        self._over, self._read_all = threading.Event(), threading.Event()
        self._broker, self._keys, self._feed, self._stream, self._owner = broker, keys, feed, stream, owner
        self._pushes = threading.Thread(target=self._run, args=(self._push, self._read_all), daemon=True)
        self._reads = [
            threading.Thread(target=self._run, args=(work, self._over), daemon=True) for work in (self._read, self._ask)
        ]
        for thread in (self._pushes, *self._reads):
            thread.start()

    def stop(self) -> None:
        """The rank ends, then the pushers, so that none waits for the other."""
        self._over.set()
        for thread in self._reads:
            thread.join(PATIENCE_S)
        self._read_all.set()
        self._pushes.join(PATIENCE_S)

    def _run(self, work: Callable[[], None], over: threading.Event) -> None:
        while not over.is_set():  # attackers may take what the second job holds: it begins again
            try:
                work()
            except StreampackError as error:
                self.errors.append(error)
                time.sleep(0.2)

    def _key(self, role: str) -> Path:
        return self._keys / f"{self._owner}-{role}.key"

    def _push(self) -> None:
        producer = streampack.Producer(
            self._broker.producers, stream=self._stream, partition=0, timeout_s=10.0, key_file=self._key("producer")
        )
        with producer, streampack.Producer(
            self._broker.producers, stream=self._stream, partition=1, timeout_s=10.0, key_file=self._key("producer")
        ) as other:  # fmt: skip
            while not self._read_all.is_set():
                for each in (producer, other):
                    seqs = [each.send(np.arange(1, 2 + n % 9, dtype=np.int32)) for n in range(8)]
                    each.flush()
                    each.amend(seqs, reward=[1.0] * len(seqs))
                time.sleep(0.02)

    def _read(self) -> None:
        with streampack.connect(
            self._broker.trainers, feed=self._feed, format="numpy", stall_timeout_s=30.0, key_file=self._key("trainer")
        ) as loader:
            for step in loader.steps():
                self.steps += 1
                step.report({"score": np.ones(len(step.sample_ids))})
                loader.publish(self.steps)
                if self._over.is_set():
                    return

    def _ask(self) -> None:
        with streampack.results(
            self._broker.trainers, feed=self._feed, start="oldest", timeout_s=5.0, key_file=self._key("trainer")
        ) as results:
            for _ in results:
                if self._over.is_set():
                    return


class Attacker:
    """One connection of a role; it says changed messages, and learns what the broker tells it."""

    def __init__(self, broker: RunningBroker, keys: Path, role: str, pool: deque[Envelope], vary: Vary) -> None:
        self.role, self._pool, self._vary, self._rng = role, pool, vary, vary.rng
        self._own = [envelope for envelope in pool if isinstance(envelope.message, REQUESTS[role])]
        kind = {"pusher": "producer", "reader": "producer", "trainer": "trainer"}.get(role, "relay")
        key = load_key(keys / f"attacker-{kind}.key")
        self._dealer = Dealer(getattr(broker, ROLES[role]), 1 << 26, key=key)
        self._run = self._epoch = self._fence = 0
        self.state = "new"

    def close(self) -> None:
        self._dealer.close()

    def listen(self) -> bool:
        """Take the broker's answers; return False if the connection should begin again."""
        for frames in drain(self._dealer, 64):
            try:
                items = bundles.decode_bundle(frames) if bundles.is_bundle(frames) else [("", wire.decode(frames))]
            except WireError:
                continue
            for _, envelope in items:
                self._run, self._epoch = envelope.run, envelope.epoch
                if isinstance(envelope.message, Lease | Attached):
                    self._fence, self.state = envelope.fence, "attached"
                if isinstance(envelope.message, Reject | Fenced):
                    self.state = "rejected"
                self._vary.learn(envelope.message)
        return self._rng.random() < 0.99

    def say(self, counts: Counter[str]) -> None:
        """Send a message that is changed, or one that is not: only who is known gets far."""
        said = self._rng.choice(self._pool if self._rng.random() < 0.2 else self._own)
        changed = said if self._rng.random() < 0.25 else self._vary.envelope(said)
        if changed is None:
            return
        if self._rng.random() < 0.9:
            changed = replace(changed, run=self._run, epoch=self._epoch, fence=self._fence)
        counts[f"{type(changed.message).__name__} {self.role} {self.state}"] += 1
        names = READER, "rank 0", "reader0"
        with contextlib.suppress(WireError, ValueError):
            if self.role == "bundle":
                plain = replace(changed, payload=(), payload_crc=None)
                count = self._rng.choice((1, 1, 5))
                self._dealer.send(bundles.encode_bundle([(self._rng.choice(names), plain)] * count))
            else:
                self._dealer.send([bytes(memoryview(frame)) for frame in wire.encode(changed)])


def pool_of(rng: Random) -> deque[Envelope]:
    """Texts that such runs log."""
    found: deque[Envelope] = deque(maxlen=4000)
    for scene in ("late", "read"):
        world = World(scene, rng, hostile=False)
        world.pool = deque(world.pool, maxlen=2000)
        world.play()
        found += [envelope if scene == "late" else _renamed(envelope) for envelope in world.pool]
    return found


def _renamed(envelope: Envelope) -> Envelope:
    """The feed of the scene ``read`` has another name here."""
    if getattr(envelope.message, "feed", None) != "train":
        return envelope
    return replace(envelope, message=replace(envelope.message, feed="read"))


@contextlib.contextmanager
def attacked() -> Iterator[tuple[RunningBroker, Path]]:
    """A broker with keys of both owners."""
    limits = {"victim": (["v"], ["victim"]), "attacker": (["p", "a", "b"], ["train", "read"])}
    with executed(), folder() as path:
        for owner, (streams, feeds) in limits.items():
            new_key(path / "keys", f"{owner}-producer", "producer", {"streams": streams})
            for role in ("trainer", "relay"):
                new_key(path / "keys", f"{owner}-{role}", role, {"feeds": feeds})
        listen = dict.fromkeys(("producers", "trainers"), "tcp://127.0.0.1:*")
        settings = SETTINGS | {
            "state_dir": str(path / "state"), "listen": {**listen, "http": "127.0.0.1:0", "keys": str(path / "keys")},
        }  # fmt: skip
        broker = RunningBroker(path, settings)
        try:
            yield broker, path / "keys"
        finally:
            broker.kill()


def fuzz(seconds: float, seed: int, tell: Any = print, rate: float = 400.0, least_steps: int = 0) -> dict[str, Any]:
    """Attack a broker for so long, and until the first job has had ``least_steps``.

    ``rate``: changed messages a second.
    """
    rng, counts = Random(seed), Counter[str]()
    pool, vary = pool_of(rng), Vary(rng)
    for envelope in pool:
        vary.learn(envelope.message)
    with attacked() as (broker, keys):
        jobs = [Job(broker, keys, "victim", "v", "victim"), Job(broker, keys, "train", "p", "attacker")]
        until(lambda: all(job.steps > 3 for job in jobs))
        attackers = [Attacker(broker, keys, role, pool, vary) for role in ROLES for _ in range(2)]
        began = told = looked = time.monotonic()
        steps, moved, failed = jobs[0].steps, began, ""
        while not failed and ((now := time.monotonic()) - began < seconds or steps < least_steps):
            for at, attacker in enumerate(attackers):
                attacker.say(counts)
                if not attacker.listen():
                    attacker.close()
                    attackers[at] = Attacker(broker, keys, attacker.role, pool, vary)
            if jobs[0].steps > steps:
                steps, moved = jobs[0].steps, now
            if broker.process.poll() is not None:
                failed = "the broker ended:\n" + "\n".join(broker.said.splitlines()[-30:])
            elif now - moved > STUCK_S:
                failed = f"the first job got no step for {STUCK_S:.0f} s: {jobs[0].errors[-1:]}"
            elif now - looked > 1.0:
                looked = now
                broker.status(), broker.get("/metrics"), broker.get("/readyz")
            if now - told > 10.0:
                told = now
                tell(f"          live {now - began:6.0f} s {counts.total():9,} messages, {steps:,} steps beside them")
            time.sleep(max(0.0, began + counts.total() / rate - time.monotonic()))
        for attacker in attackers:
            attacker.close()
        errors = [str(error)[:200] for error in jobs[0].errors]
        for job in jobs if not failed else ():
            job.stop()
    return {
        "target": "live", "seed": seed, "failed": failed, "messages": counts.total(), "steps": steps,
        "errors": errors, "counts": dict(sorted(counts.items())),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.live", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--rate", type=float, default=400.0, help="changed messages a second")
    given = parser.parse_args()
    logging.disable()
    print(f"          live seed {given.seed}", flush=True)
    result = fuzz(given.minutes * 60, given.seed, rate=given.rate, tell=lambda line: print(line, flush=True))
    print(json.dumps(result), flush=True)
    return 1 if result["failed"] or result["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
