"""A broker, its producers and every rank of a mesh in one process, for ``scale.py``: state machines, and nothing else.

The job's shell carries their messages in virtual time, and meters what the broker does with each: CPU seconds by what
it was for, and messages and bytes by way. Ranks take a step together, as trainers do.
"""

from __future__ import annotations

import gc
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import msgspec
import numpy as np

from benchmarks.traffic import MEAN_SAMPLE_TOKENS, SAMPLE_SIGMA
from streampack.core.broker import Broker
from streampack.core.journal.journal import Journal
from streampack.core.journal.log_effects import Append, Safe
from streampack.core.model.capacity import MAX_PEERS, Capacity, FeedPlan, needed_tokens
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Align, Rules, StreamRules
from streampack.core.protocol.effects import (
    Form,
    Formed,
    FromProducer,
    FromTrainer,
    Release,
    SendProducer,
    SendShard,
    SendTrainer,
)
from streampack.core.protocol.events import Effect, Event, FromBroker, Send, Tick
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.producer_messages import Offer
from streampack.core.sessions.client_events import Broken, Deliver, Returned
from streampack.core.sessions.client_session import ClientSession
from streampack.core.sessions.producer_base import Chunk
from streampack.core.sessions.producer_session import ProducerSession, Read
from streampack.wire import frames as wire
from streampack.wire import record_frames

C = 8192
TOKEN_BYTES = 4
CHUNK_TOKENS = (1 << 20) // TOKEN_BYTES
PRODUCERS, PARTITIONS = 4, 16
QUOTA_TOKENS = 4 * CHUNK_TOKENS
TICK_S = 0.2
CLAIM_S = 4.0
"""After so long a rank whose process was replaced is the new one's."""
STATS = {f"figure_{n}": 0.1 * n for n in range(8)}
"""As many figures as a client sends."""


@dataclass(frozen=True)
class Shape:
    """A mesh, and the packs that each data-parallel rank has of a step."""

    dp: int
    packs: int
    cp: int = 1
    pp: int = 1
    tp: int = 1

    @property
    def ranks(self) -> int:
        return self.dp * self.cp * self.pp * self.tp

    def meshes(self) -> Iterator[Mesh]:
        """The place of each rank; the ranks of one host come one after another."""
        sizes = {"dp": self.dp, "cp": self.cp, "tp": self.tp, "pp": self.pp}
        for dp, pp, cp, tp in product(range(self.dp), range(self.pp), range(self.cp), range(self.tp)):
            yield Mesh(**sizes, dp_rank=dp, cp_rank=cp, tp_rank=tp, pp_rank=pp)

    @property
    def step_tokens(self) -> int:
        return self.dp * self.packs * C

    def __str__(self) -> str:
        more = "".join(
            f" {name}={size}" for name, size in (("cp", self.cp), ("pp", self.pp), ("tp", self.tp)) if size > 1
        )
        return f"dp={self.dp}{more} x {self.packs}"


class Chunks:
    """Chunks of about 1 MiB, the same few for ever; the payload is zeros that are never touched."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        mu = np.log(MEAN_SAMPLE_TOKENS) - SAMPLE_SIGMA**2 / 2
        drawn = rng.lognormal(mu, SAMPLE_SIGMA, 1 << 16).astype(np.int64).clip(1, C)
        ends = np.cumsum(drawn)
        stops = np.searchsorted(ends, np.arange(1, ends[-1] // CHUNK_TOKENS + 1) * (CHUNK_TOKENS - C))
        zeros = memoryview(bytes(CHUNK_TOKENS * TOKEN_BYTES))
        self._made = [
            (lengths, zeros[: int(lengths.sum()) * TOKEN_BYTES])
            for lengths in np.split(drawn, stops)
            if 0 < lengths.sum() <= CHUNK_TOKENS
        ]
        self._next = 0

    def answer(self, read: Read) -> Chunk:
        """The next chunk, for whoever reads."""
        lengths, payload = self._made[self._next % len(self._made)]
        self._next += 1
        words = lengths.astype("<u4")
        return Chunk(
            stream=read.lease.stream, partition=read.lease.partition, session=read.session, lengths_u32=words.tobytes(),
            crcs_u32=bytes(4 * len(words)), loss_tokens_u32=(words - 1).tobytes(), num_bytes=len(payload),
            cursor=(0, 0, self._next), payload=(payload,),
        )  # fmt: skip


class Job:
    """A broker, its producers and every rank of a mesh; the broker's work is metered by what it was for."""

    def __init__(
        self, shape: Shape, window: int = 1024, max_readers: int = MAX_PEERS, leaving_bytes: int = 64 << 20
    ) -> None:
        self.shape = shape
        unit = 2 * shape.cp if shape.cp > 1 else 1
        rules = Rules(
            budget=C, packs=shape.dp * shape.packs, align=Align(sample=unit, pack=unit), window=window,
            streams=(StreamRules("web", partitions=PARTITIONS, passes=None, overlong="truncate"),),
        )  # fmt: skip
        merged = needed_tokens(rules, C + 1) + 2 * shape.step_tokens
        self.arena_bytes = TOKEN_BYTES * (merged + QUOTA_TOKENS * PARTITIONS)
        plan = FeedPlan("train", rules, merged, max_readers=max_readers, leaving_bytes=leaving_bytes)
        capacity = Capacity(QUOTA_TOKENS, C + 1, CHUNK_TOKENS * TOKEN_BYTES)
        self.core = Broker(run=1, epoch=1, feeds=[plan], capacity=capacity, journal=Journal(keeps=True))
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.messages: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.longest: defaultdict[str, float] = defaultdict(float)
        self.now = 0.0
        self.returned = 0
        self._inbox: deque[tuple[bool, bytes, Envelope]] = deque()
        self._outbox: deque[tuple[bytes, Envelope]] = deque()
        self._formed: deque[Formed] = deque()
        self._chunks = Chunks()
        self.clients: dict[bytes, ClientSession] = {}
        self.delivered: dict[bytes, int] = {}
        self.chains: dict[int, bytes] = {}
        self.producers: dict[bytes, ProducerSession] = {}
        self.samples_of_step = 0
        self._perform(self.core.begin())
        self._handle("tick", Tick(self.now))

    def produce(self) -> None:
        """Producers come, and steps are formed and read as far as they may be."""
        for n in range(PRODUCERS):
            offers = [Offer(stream="web", source_digest="x")]
            self.producers[b"p%d" % n] = ProducerSession(run=0, producer=f"p{n}", host="host", pid=n, offers=offers)
        self.tick()
        assert min(self.delivered.values()) > self.returned, "a rank was given no step"

    def forget_others(self) -> None:
        """Leave the broker alone."""
        for side in (self.clients, self.delivered, self.producers, self._inbox, self._outbox):
            side.clear()
        self._chunks = Chunks()
        gc.collect()

    def attach(self, life: int = 0) -> None:
        """Every rank comes, in its ``life``-th process: those before have died without a word."""
        shape, chain = self.shape, self.chains.get(self.returned - 1, b"")
        self.clients.clear()
        self.delivered.clear()
        for n, mesh in enumerate(shape.meshes()):
            name = b"%d.%d" % (life, n)
            self.clients[name] = ClientSession(
                run=1, feed="train", reader=name.decode(), host="host", pid=n, mesh=mesh, next_step=self.returned,
                chain=chain, stats=STATS,
            )  # fmt: skip
            self.delivered[name] = self.returned
        self.tick(CLAIM_S if life else 0.0)

    def step(self) -> None:
        """Every rank returns a step, and all that follows."""
        self.returned += 1
        for name, client in self.clients.items():
            self._of_client(name, client.handle(Returned(self.returned)))
        self.settle()
        assert min(self.delivered.values()) > self.returned, "a rank has nothing to go on with"

    def tick(self, seconds: float = 0.0) -> None:
        """Time passes, for all, and what follows from it."""
        stop = self.now + seconds
        while True:
            self._handle("tick", Tick(self.now))
            for name, client in self.clients.items():
                self._of_client(name, client.handle(Tick(self.now)))
            for name, producer in self.producers.items():
                self._of_producer(name, producer.handle(Tick(self.now)))
            self.settle()
            if self.now + TICK_S > stop:
                return
            self.now += TICK_S

    def settle(self) -> None:
        """Carry messages until there are none."""
        while self._inbox or self._outbox or self._formed or self.core.journal.safe_upto < self.core.journal.next_lsn:
            while self._formed:
                self._handle("Formed", self._formed.popleft())
            if self.core.journal.safe_upto < self.core.journal.next_lsn:
                self._handle("Safe", Safe(self.core.journal.next_lsn))
            for _ in range(len(self._inbox)):
                self._receive(*self._inbox.popleft())
            while self._outbox:
                peer, envelope = self._outbox.popleft()
                if peer in self.clients:
                    self._of_client(peer, self.clients[peer].handle(FromBroker(envelope)))
                elif peer in self.producers:
                    self._of_producer(peer, self.producers[peer].handle(FromBroker(envelope)))

    def clear(self) -> None:
        """Begin to count anew."""
        for counted in (self.seconds, self.messages, self.bytes, self.longest):
            counted.clear()

    def rows_ms(self) -> float:
        """CPU time of what ``/status`` says of ranks, made once."""
        began = time.thread_time()
        self.core.feeds["train"].readers.steps.stats()
        return 1000 * (time.thread_time() - began)

    # The broker's side

    def _timed(self, name: str, call: Callable[..., Any], *given: Any) -> Any:
        began = time.thread_time()
        result = call(*given)
        took = time.thread_time() - began
        if name == "Get" and any(isinstance(effect, Release) for effect in result):
            name = "merge"  # the last rank has returned a step: there is room for others
        self.seconds[name] += took
        self.longest[name] = max(self.longest[name], took)
        return result

    def _handle(self, name: str, event: Event) -> None:
        self._perform(self._timed(name, self.core.handle, event))

    def _receive(self, from_producer: bool, peer: bytes, envelope: Envelope) -> None:
        name = type(envelope.message).__name__
        bare = msgspec.structs.replace(envelope, payload=())
        frames = wire.encode(bare)
        decoded = self._timed("wire", wire.decode, frames)
        self._count("in", name, frames, sum(map(len, envelope.payload)))
        kind = FromProducer if from_producer else FromTrainer
        self._handle(name, kind(peer, msgspec.structs.replace(decoded, payload=envelope.payload)))

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SendShard | SendTrainer | SendProducer):
                frames = self._timed("wire", wire.encode, effect.envelope)
                packs = self.shape.packs if isinstance(effect, SendShard) else 0  # fit into one message
                payload = packs * C // self.shape.cp * TOKEN_BYTES
                self._count("out", type(effect.envelope.message).__name__, frames, payload)
                self._outbox.append((effect.peer, effect.envelope))
            elif isinstance(effect, Form):
                choice = self._timed("choose", effect.request.choose)
                self._formed.append(Formed(effect.feed, choice, effect.request))
            elif isinstance(effect, Append):
                record = self._timed("log", record_frames.encode_record, effect.record, effect.payload)
                kind = type(effect.record).__name__
                self.messages[kind] += 1
                self.bytes[kind] += sum(map(len, record))
                self.samples_of_step = getattr(effect.record, "num_samples", self.samples_of_step)

    def _count(self, way: str, name: str, frames: list[Any], payload: int) -> None:
        self.messages[f"{way} {name}"] += 1
        self.bytes[f"{way} {name}"] += sum(map(len, frames))
        self.bytes[f"payload {way}"] += payload

    # The others'

    def _of_client(self, name: bytes, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._inbox.append((False, name, effect.envelope))
            elif isinstance(effect, Deliver):
                part = cast("Any", effect.parts[0].message)
                assert (part.step, part.micro_batches) == (self.delivered[name], self.shape.packs)
                assert self.chains.setdefault(part.step, part.chain) == part.chain
                self.delivered[name] += 1
            elif isinstance(effect, Broken):
                raise AssertionError(effect)

    def _of_producer(self, name: bytes, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._inbox.append((True, name, effect.envelope))
            elif isinstance(effect, Read):
                self._of_producer(name, self.producers[name].handle(self._chunks.answer(effect)))
