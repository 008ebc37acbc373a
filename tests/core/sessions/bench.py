"""A broker of one feed for the tests of sessions and of rights: what each peer says, and what it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from streampack.core.broker import Broker
from streampack.core.model.capacity import Capacity, FeedPlan, needed_tokens
from streampack.core.model.keys.stage_keys import Stage
from streampack.core.model.keys.stream_keys import Overlong
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Rules, StreamRules
from streampack.core.protocol.effects import FromProducer, FromTrainer, Store
from streampack.core.protocol.events import Effect
from streampack.core.protocol.message import Envelope, Message
from streampack.core.protocol.producer_messages import Eos, Hello, Lease, Offer
from streampack.core.protocol.trainer_messages import Attach, Get
from streampack.wire import frames as wire
from tests.world.chunks import message_of
from tests.world.shell import Handles, Sending, Shell

RUN, EPOCH, BUDGET, QUOTA, MAX_SAMPLE = 9, 4, 16, 64, 32


class Bench(Shell):
    """A broker with streams ``a`` (2 partitions) and ``b`` (1)."""

    def __init__(
        self, *, overlong: Overlong = "error", merged: int = 0, more: Sequence[FeedPlan] = (),
        stages: tuple[Stage, ...] = (), rules: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.rules = Rules(
            budget=BUDGET, packs=4, window=4, stages=stages,
            streams=(StreamRules("a", 1.0, 2, overlong=overlong), StreamRules("b", 1.0, 1, overlong=overlong)),
        )  # fmt: skip
        self.rules = msgspec.structs.replace(self.rules, **(rules or {}))
        plan = FeedPlan("train", self.rules, merged or needed_tokens(self.rules, MAX_SAMPLE))
        super().__init__()
        self.stores: list[Store] = []
        self.handles = Handles()
        capacity = Capacity(QUOTA, MAX_SAMPLE, 4 * MAX_SAMPLE)
        self.start(Broker(run=RUN, epoch=EPOCH, feeds=[plan, *more], capacity=capacity), self.handles)
        self.feed = self.core.feeds["train"]

    def perform(self, effect: Effect) -> None:
        if isinstance(effect, Store):
            self.stores.append(effect)
        super().perform(effect)

    def carry(self, effect: Sending, envelope: Envelope) -> bool:
        wire.decode(wire.encode(envelope))
        return super().carry(effect, envelope)

    def produce(self, peer: bytes, message: Message, session: int = 0, payload: bytes | None = None) -> None:
        """A message of a producer."""
        frames = () if payload is None else (payload,)
        self.handle(FromProducer(peer, Envelope(run=RUN, epoch=EPOCH, fence=session, message=message, payload=frames)))

    def read(self, peer: bytes, message: Message, fence: int | None = None) -> None:
        """A message of a client."""
        fence = self.feed.readers.attempts.number if fence is None else fence
        self.handle(FromTrainer(peer, Envelope(run=RUN, epoch=EPOCH, fence=fence, message=message)))

    def sessions(self, peer: bytes) -> dict[tuple[str, int], int]:
        """The newest session of each partition that a producer was leased."""
        leases = [(e.message, e.fence) for to, e in self.said if to == peer and isinstance(e.message, Lease)]
        return {(lease.stream, lease.partition): session for lease, session in leases}

    def samples(self, peer: bytes, key: tuple[str, int], base: int, lengths: list[int], session: int) -> None:
        """A chunk whose tokens are their places in it."""
        self.produce(peer, message_of(key, base, lengths), session, np.arange(sum(lengths), dtype="<i4").tobytes())

    @property
    def taken(self) -> list[int]:
        return [intake.expected_seq for intake in self.core.leases.partitions.intakes]


def hello(name: str, *streams: str, digest: str = "same") -> Hello:
    offers = [Offer(stream=stream, source_digest=digest) for stream in streams]
    return Hello(producer=name, host=f"{name}-host", pid=1, offers=offers)


def attach(
    name: str,
    *,
    feed: str = "train",
    next_step: int = 0,
    chain: bytes = b"",
    iteration: int = 0,
    knows_stages: bool | UnsetType = UNSET,
    ready: bool = True,
    **mesh: int,
) -> Attach:
    return Attach(
        feed=feed, reader=name, host=f"{name}-host", pid=1, mesh=Mesh(**mesh), next_step=next_step, chain=chain,
        iteration=iteration, knows_stages=knows_stages, ready=ready,
    )  # fmt: skip


def get(stop: int, *, start: int = 0, done: int = 0, request: int = 0) -> Get:
    return Get(feed="train", lineage=0, start=start, stop=stop, done_upto=done, request=request)


def fill(bench: Bench, peer: bytes = b"p", chunks: int = 6) -> None:
    """Send chunks of every partition in turn, and the end of each: 288 tokens, 5 steps."""
    for n in range(chunks):
        for key, session in sorted(bench.sessions(peer).items()):
            bench.samples(peer, key, 4 * n, [4, 5, 3, 4], session)
    for key, session in sorted(bench.sessions(peer).items()):
        bench.produce(peer, Eos(stream=key[0], partition=key[1], total=4 * chunks), session)
