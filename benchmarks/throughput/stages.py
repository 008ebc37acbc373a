"""Measure CPU milliseconds per million tokens of each stage between a source and a trainer.

The real producer sessions, broker service, arena and client sessions in one thread of one process, one message after
another, with no sockets: so what is measured does not depend on what else the machine does at that moment, as tokens
per second end to end do, and a change of one stage shows in one line. What sockets and threads cost is not here
(``throughput.py`` has it), and data is warmer in the caches than between processes: compare stages before and after,
not their sum with an end-to-end figure. A stage's time leaves out those that it calls.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import streampack_services.broker.service as broker_module
from streampack_services.broker.memory_plan import keep_freed_memory
from streampack_services.broker.service import BrokerService

from benchmarks.report import arguments, head, say
from benchmarks.throughput.streampack_pipe import MemorySource
from benchmarks.traffic import NUM_PRODUCERS, PACK_TOKENS, Traffic
from streampack.config.config_validation import checked
from streampack.config.daemon_settings import BrokerConfig
from streampack.config.typed_yaml import convert
from streampack.core.model.mesh import Mesh
from streampack.core.protocol.effects import FromProducer, FromTrainer
from streampack.core.protocol.events import Event, FromBroker, Send, Tick
from streampack.core.protocol.producer_messages import Offer
from streampack.core.sessions.client_events import Deliver, Returned
from streampack.core.sessions.client_session import ClientSession
from streampack.core.sessions.producer_session import ProducerSession, Read
from streampack.packs.build import build_step
from streampack.packs.kernel_loader import kernels
from streampack.packs.lazy import LazyPacks
from streampack.packs.slabs import Slabs
from streampack.producer.chunk import TokenChunk
from streampack.producer.chunks import chunk_of
from streampack.views.formats import Views
from streampack.wire import frames as wire
from streampack.wire.sample_checksums import compiled, plain

QUICK_TOKENS, FULL_TOKENS = 100e6, 400e6
WARM_TOKENS = 20e6
TURNS = 3


class Meter:
    """CPU seconds by stage, of the thread that calls; a stage within another one stops the outer one's clock."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._stack: list[str] = []
        self._last = time.thread_time()

    def timed(self, stage: str | Callable[..., str], call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, its time counted as ``stage``, or what that says of the arguments."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._turn(stage if isinstance(stage, str) else stage(*args))
            try:
                return call(*args, **kwargs)
            finally:
                self._turn(None)

        return run

    def _turn(self, stage: str | None) -> None:
        now = time.thread_time()
        self.seconds[self._stack[-1] if self._stack else "loop"] += now - self._last
        if stage is None:
            self._stack.pop()
        else:
            self._stack.append(stage)
        self._last = now


class Memory:
    """What stands for a broker's socket: what is sent lies in ``queues`` by peer."""

    endpoint = "memory"
    dropped = 0
    raw = sys.stderr.fileno()
    """Something to register in a poller that nobody asks."""
    _gate = None

    def __init__(self, *_: object) -> None:
        self.queues: dict[bytes, deque[list[Any]]] = defaultdict(deque)

    def send(self, peer: bytes, frames: list[Any]) -> bool:
        self.queues[peer].append(frames)
        return True

    def room(self, peer: bytes, num_bytes: int) -> None:
        """There is no memory to share."""

    def close(self) -> None:
        self.queues.clear()


class Service(BrokerService):
    """The broker's service without its sockets."""

    def __init__(self, config: BrokerConfig) -> None:
        router = "streampack_services.broker.serving.peer_sockets.Router"
        with mock.patch("streampack_services.broker.service.Poller"), mock.patch(router, Memory):
            super().__init__(config)


class Inline:
    """What stands for the thread that packs: done at once."""

    def submit(self, _: Any, form: Any) -> Future[Any]:
        """Choose the packs, and return them in a future that is done."""
        future: Future[Any] = Future()
        future.set_result(broker_module._form_step(form))
        return future


class Producer:
    """One producer's session and its reader."""

    def __init__(self, name: str, source: MemorySource, meter: Meter) -> None:
        self.peer = name.encode()
        self._source = source
        self._session = ProducerSession(
            run=0, producer=name, host="here", pid=1, offers=[Offer(stream="web", source_digest=source.digest)]
        )
        self._batches: dict[Any, Iterator[TokenChunk]] = {}
        self._chunk_of = meter.timed("producer: checksums of samples", chunk_of)
        self._crcs_of = compiled() or plain
        self.handle = meter.timed("producer: session", self._session.handle)

    def events(self, event: Event) -> Iterator[Any]:
        """Envelopes to be sent."""
        waiting = deque([event])
        while waiting:
            for effect in self.handle(waiting.popleft()):
                if isinstance(effect, Send):
                    yield effect.envelope
                elif isinstance(effect, Read):
                    lease = effect.lease
                    key = (lease.partition, effect.session)
                    if key not in self._batches:
                        self._batches[key] = self._source.batches(lease)
                    waiting.append(self._chunk_of(next(self._batches[key]), lease, effect.session, self._crcs_of))


def measure(tokens: float, packs: int, state_dir: str | None, format: str) -> dict[str, float]:
    """CPU ms per million tokens by stage, of a run of about so many tokens after a warm-up."""
    tree = {
        "listen": {"producers": "ipc:///unused/p", "trainers": "ipc:///unused/t"},
        "state_dir": state_dir,
        "memory": "256MiB",
        "rules": {"budget": PACK_TOKENS, "step": {"packs": packs}},
        "streams": {"web": {"repeat": True, "partitions": NUM_PRODUCERS}},
    }
    meter = Meter()
    run = Run(Service(checked(convert(tree, BrokerConfig))), meter, format)
    try:
        run.until(WARM_TOKENS)
        meter.seconds.clear()
        began = run.tokens
        run.until(run.tokens + tokens)
        return {stage: 1e9 * seconds / (run.tokens - began) for stage, seconds in meter.seconds.items()}
    finally:
        run.service.close()


class Run:
    """Producers, a broker and one client, whose messages are carried by hand."""

    def __init__(self, service: Service, meter: Meter, format: str) -> None:
        self.service, self.tokens = service, 0
        source = MemorySource(Traffic())
        self._producers = [Producer(f"producer-{i}", source, meter) for i in range(NUM_PRODUCERS)]
        self._mesh = Mesh()
        self._views = Views(format, self._mesh)
        self._slabs = Slabs()
        self._client = ClientSession(run=0, feed="train", reader="r", host="here", pid=1, mesh=self._mesh)
        self._meter = meter
        self._watch(meter)
        kernels.load()
        kernels.wait()
        service.warm_up()
        service._perform_all(service.core.begin())

    def _watch(self, meter: Meter) -> None:
        core, arena = self.service.core, self.service.arena
        self.service._packer = Inline()  # type: ignore[assignment]
        core.handle = meter.timed(_core_stage, core.handle)  # type: ignore[method-assign]
        for name, stage in (("store", "arena: store"), ("gather", "arena: gather"), ("release", "arena: release")):
            setattr(arena, name, meter.timed(stage, getattr(arena, name)))
        broker_module._form_step = meter.timed("packer's thread: choose", _original_choose)
        self._perform = meter.timed("broker: shell", self.service._handle)
        self._keep_log = meter.timed("broker: shell", self.service._keep_log)
        self._take_formed = meter.timed("broker: shell", self.service._take_formed)
        self._sent = {who: meter.timed(f"{who}: encode", _original_encode) for who in ("producer", "client")}
        self._got = {who: meter.timed(f"{who}: decode", wire.decode) for who in ("producer", "broker", "client")}
        wire.encode = meter.timed("broker: encode", _original_encode)  # which the service finds there
        self._handle = meter.timed("client: session", self._client.handle)
        self._build = meter.timed("client: check a step", build_step)
        self._make = meter.timed("client: check a step", self._views.make)
        self._take = meter.timed("client: make packs", LazyPacks.take)

    def until(self, tokens: float) -> None:
        """Go on until the client has had so many."""
        while self.tokens < tokens:
            now = Tick(time.monotonic())
            self._perform(now)
            for producer in self._producers:
                self._to_broker(producer, producer.events(now))
            self._client_does(now)
            for _ in range(64):
                self._carry()

    def _carry(self) -> None:
        service = self.service
        if service._forming:
            self._take_formed()
        self._keep_log()
        for frames in _drain(service._sockets.trainers.router, b"client"):
            self._client_does(FromBroker(self._got["client"](frames)))
        for producer in self._producers:
            for frames in _drain(service._sockets.producers.router, producer.peer):
                event = FromBroker(self._got["producer"](frames))
                self._to_broker(producer, producer.events(event))

    def _to_broker(self, producer: Producer, envelopes: Iterator[Any]) -> None:
        for envelope in envelopes:
            frames = self._sent["producer"](envelope)
            self._perform(FromProducer(producer.peer, self._got["broker"](frames)))

    def _client_does(self, event: Event) -> None:
        waiting = deque([event])
        while waiting:
            for effect in self._handle(waiting.popleft()):
                if isinstance(effect, Send):
                    envelope = self._got["broker"](self._sent["client"](effect.envelope))
                    self._perform(FromTrainer(b"client", envelope))
                elif isinstance(effect, Deliver):
                    step = self._build(effect.parts, effect.attached, self._mesh, self._slabs)
                    step = self._make(step, effect.attached.rules)
                    last = None
                    for number in range(step.packs.num_groups):
                        last = self._take(step.packs, number)[-1]  # which a trainer has while the next are made
                    del last
                    self.tokens += step.num_tokens
                    waiting.append(Returned(step.index + 1))


def _drain(router: Any, peer: bytes) -> Iterator[list[Any]]:
    queue = router.queues[peer]
    while queue:
        yield queue.popleft()


def _core_stage(event: Event) -> str:
    message = f" {type(event.envelope.message).__name__}" if isinstance(event, FromProducer | FromTrainer) else ""
    return f"core: {type(event).__name__}{message}"


_original_choose, _original_encode = broker_module._form_step, wire.encode


def main() -> None:
    parser = arguments(__doc__, f"{QUICK_TOKENS / 1e6:.0f}M tokens a turn (else {FULL_TOKENS / 1e6:.0f}M)")
    parser.add_argument("--packs", type=int, default=32, metavar="G", help="packs a step; default: %(default)s")
    parser.add_argument("--format", default="numpy", help="what the client makes; default: %(default)s")
    parser.add_argument("--log", action="store_true", help="keep a log, as brokers with a state_dir do")
    args = parser.parse_args()
    keep_freed_memory()
    report = head("stages", packs_per_step=args.packs, format=args.format, log=args.log)
    turns = [_turn(args) for _ in range(TURNS)]
    stages = {stage: statistics.median(turn.get(stage, 0.0) for turn in turns) for stage in turns[0]}
    for stage, ms in sorted(stages.items(), key=lambda item: (item[0].partition(":")[0], -item[1])):
        low, high = min(turn.get(stage, 0.0) for turn in turns), max(turn.get(stage, 0.0) for turn in turns)
        print(f"{stage:<36} {ms:7.3f} ms a million tokens  ({low:.3f} to {high:.3f})")
    print(f"{'all':<36} {sum(stages.values()):7.3f}")
    report["cpu_ms_per_million_tokens"] = {stage: round(ms, 4) for stage, ms in stages.items()}
    say(report, args.json)


def _turn(args: argparse.Namespace) -> dict[str, float]:
    tokens = QUICK_TOKENS if args.quick else FULL_TOKENS
    with tempfile.TemporaryDirectory(prefix="stages-") as folder:
        return measure(tokens, args.packs, folder if args.log else None, args.format)


if __name__ == "__main__":
    main()
