"""One simulated run: a job, its processes, a bad network, and faults; everything a function of a seed.

``run(seed)`` returns when every rank has had every step and the end, and raises AssertionError if
anything that must hold did not, or if the job has not ended long after the faults have.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

import numpy as np

from streampack.core.events import FromBroker
from streampack.core.messages import Envelope, Mesh, Samples, StepPart
from tests.simulation.data import NUM_CASES, case, reference, shards_of
from tests.simulation.network import Clock, Network, Weather
from tests.simulation.processes import BrokerProcess, ClientProcess, Process, ProducerProcess

PATIENCE_S = 120.0
"""Virtual time in which a job ends once its faults have."""


@dataclass(frozen=True)
class Outcome:
    """What a run came to: ``trace`` is a digest of all that happened, in order."""

    chain: bytes
    num_steps: int
    trace: str
    seconds: float
    events: int


class World:
    """State of one run. ``rng`` decides all that the data does not."""

    def __init__(self, seed: int, case_number: int | None = None) -> None:
        self.seed, self.rng, self.clock = seed, random.Random(seed), Clock()
        number = seed % NUM_CASES if case_number is None else case_number
        self.case, self.reference = case(number), reference(number)
        self.network = Network(self.clock, self.rng, self._weather())
        self.num_ranks = self.case.dp * self.case.cp
        self.prefetch = self.rng.randint(1, 3)
        self.read_s = self.rng.choice((0.005, 0.05))
        self.work_s = self.rng.choice((0.02, 0.1, 0.5))
        self.lockstep = self.rng.random() < 0.6
        self.early_leavers = self.rng.random() < 0.4
        self._trace = hashlib.blake2b(digest_size=16)
        self._events = 0
        self._peers: dict[bytes, Process] = {}
        self._num_peers = self._num_names = 0
        self._sent_bytes: dict[tuple[int, str, int, int, str], int] = {}
        self._dealt: dict[tuple[int, int], list[int]] = {}
        self._taken: dict[int, set[int]] = {}
        self._ended: dict[int, tuple[int, bytes]] = {}
        self.quiet_at = self.rng.uniform(1.0, 12.0)
        self.broker = BrokerProcess(self, epoch=5)
        self.producers: list[ProducerProcess] = []
        self.clients: dict[int, ClientProcess] = {}
        self._start()
        self._plan_faults()
        self.clock.after(0.0, self._calm)

    def run(self) -> Outcome:
        """To the end of the job."""
        last = 0.0
        while len(self._ended) < self.num_ranks:
            self.clock.step()
            self._events += 1
            last = self.clock.now
            if last > self.quiet_at + PATIENCE_S:
                raise AssertionError(f"liveness: not ended at {last:.0f} s: {self._stuck()}")
        for end in self._ended.values():
            assert end == (len(self.reference.steps), self.reference.chain), "ranks ended at different steps"
        for step, expected in enumerate(self.reference.steps):
            numbers = sorted(n for d in range(self.case.dp) for n in self._dealt[step, d])
            assert numbers == list(range(len(expected.packs))), f"step {step} was not dealt whole"
        dropped = self.broker.core.totals.dropped_samples
        assert dropped in (0, self.reference.num_dropped)
        return Outcome(self.reference.chain, len(self.reference.steps), self._trace.hexdigest(), last, self._events)

    def note(self, *what: object) -> None:
        """A line of the trace."""
        self._trace.update(repr((round(self.clock.now, 9), *what)).encode())

    # Links

    def connect(self, process: Process) -> bytes:
        """A new peer name for a process."""
        self._num_peers += 1
        peer = b"%d" % self._num_peers
        self._peers[peer] = process
        return peer

    def disconnect(self, process: Process) -> None:
        peer = getattr(process, "peer", None)
        if peer is not None:
            self._peers.pop(peer, None)

    def to_broker(self, process: Process, envelope: Envelope) -> None:
        message, peer, is_producer = envelope.message, process.peer, process.kind == "producer"
        if isinstance(message, Samples):
            self._check_credit(process, envelope, message)

        def arrive(arrived: Envelope) -> None:
            self.note("broker", peer, type(arrived.message).__name__, arrived.epoch, arrived.fence)
            self.broker.receive(peer, arrived, is_producer)

        self.network.carry(b">" + peer, envelope, arrive)

    def to_peer(self, peer: bytes, envelope: Envelope) -> None:
        def arrive(arrived: Envelope) -> None:
            process = self._peers.get(peer)
            if process is not None:
                self.note(peer, type(arrived.message).__name__, arrived.epoch, arrived.fence)
                process.handle(FromBroker(arrived))

        self.network.carry(b"<" + peer, envelope, arrive)

    def _check_credit(self, process: Process, envelope: Envelope, message: Samples) -> None:
        """R6: a producer sends no more than the broker that it speaks to ever granted its session."""
        if envelope.epoch != self.broker.epoch:
            return
        assert isinstance(process, ProducerProcess)
        key = (envelope.epoch, message.stream, message.partition, envelope.fence, process.name)
        sent = self._sent_bytes[key] = self._sent_bytes.get(key, 0) + len(envelope.payload[0])
        seq, size = self.broker.checks.granted(message.stream, message.partition, envelope.fence)
        assert sent <= size, f"R6: {sent} bytes were sent on a grant of {size}"
        assert message.base_seq + len(message.lengths_u32) // 4 <= seq, "R6: a sample was sent beyond the grant"

    # Trainers

    def delivered(self, client: ClientProcess, parts: tuple[Envelope, ...]) -> StepPart:
        """Exactly the reference's step: digests, samples, tokens, denominators; the same packs each time."""
        step = parts[0].message
        assert isinstance(step, StepPart)
        number, expected = step.step, self.reference.steps[step.step]
        assert step.digest == expected.digest, f"step {number} has another digest"
        assert step.chain == expected.chain, f"step {number} has another chain"
        assert (step.num_samples, step.num_loss_tokens) == (expected.num_samples, expected.num_loss_tokens)
        shards = shards_of(parts, self.case, client.mesh.cp_rank)
        for shard in shards:
            assert shard.ids == self.reference.ids[number][shard.number], "a pack has other samples"
            row = self.reference.rows[number][shard.number]
            assert np.array_equal(row[shard.positions], shard.tokens), "a pack has other tokens"
            assert shard.num_loss_tokens == expected.packs[shard.number].num_loss_tokens
        numbers = [shard.number for shard in shards]
        dealt = self._dealt.setdefault((number, client.mesh.dp_rank), numbers)
        assert dealt == numbers, f"step {number} was dealt otherwise the second time"
        self.note("step", client.name, number, step.digest)
        return step

    def take(self, client: ClientProcess, step: int) -> None:
        """A rank begins a step; with ``lockstep`` all ranks are done with it together, as collectives have it."""
        delay = self.rng.expovariate(1 / self.work_s)
        if not self.lockstep:
            self.clock.after(delay, client.work_done, step)
            return
        taken = self._taken.setdefault(step, set())
        complete = len(taken) == self.num_ranks
        taken.add(self._rank(client))
        if complete:
            self.clock.after(delay, client.work_done, step)
        elif len(taken) == self.num_ranks:
            for other in self.clients.values():
                self.clock.after(delay, other.work_done, step)

    def refused(self, client: ClientProcess) -> None:
        """The rank is still held by one that is gone: a launcher tries again."""
        client.kill()
        self.clock.after(3.0, self._start_client, client.mesh, *client.state())

    # Starting and stopping

    def _start(self) -> None:
        rng, names = self.rng, self.case.names
        for number in range(rng.randint(1, 3)):
            some = names if number == 0 else rng.sample(names, rng.randint(1, len(names)))
            late = rng.random() < 0.4
            self.clock.after(rng.uniform(0, 4) if late else rng.random() * 0.2, self._start_producer, list(some))
        for rank in range(self.num_ranks):
            mesh = Mesh(dp=self.case.dp, cp=self.case.cp, dp_rank=rank // self.case.cp, cp_rank=rank % self.case.cp)
            late = rng.random() < 0.3
            self.clock.after(rng.uniform(0, 3) if late else rng.random() * 0.2, self._start_client, mesh, 0, b"")

    def _start_producer(self, streams: list[str], name: str = "") -> None:
        self._num_names += 1
        self.producers.append(ProducerProcess(self, name or f"producer{self._num_names}", streams, self._num_names))

    def _start_client(self, mesh: Mesh, next_step: int, chain: bytes) -> None:
        self._num_names += 1
        client = ClientProcess(self, f"reader{self._num_names}", mesh, next_step, chain)
        self.clients[self._rank(client)] = client

    def _rank(self, client: ClientProcess) -> int:
        return client.mesh.dp_rank * self.case.cp + client.mesh.cp_rank

    # Faults

    def _weather(self) -> Weather:
        rng = self.rng
        if rng.random() < 0.2:
            return Weather()
        return Weather(
            lost=rng.choice((0.0, 0.02, 0.15)), repeated=rng.choice((0.0, 0.05)), reordered=rng.choice((0.0, 0.05)),
            delay_s=rng.choice((0.002, 0.02, 0.1)), late_s=rng.choice((0.05, 1.0, 5.0)),
        )  # fmt: skip

    def _plan_faults(self) -> None:
        faults = [
            self._kill_producer, self._stop_producer, self._reconnect, self._outage, self._freeze,
            self._kill_client, self._kill_broker,
        ]  # fmt: skip
        chosen = self.rng.sample(faults, self.rng.randint(0, 3))
        if self.rng.random() < 0.25 and self._kill_broker not in chosen:
            chosen.append(self._kill_broker)
        for fault in chosen:
            for _ in range(self.rng.randint(1, 3)):
                self.clock.after(self.rng.uniform(0.1, self.quiet_at), fault)

    def _calm(self) -> None:
        """From ``quiet_at`` on the links are good."""
        if self.clock.now < self.quiet_at:
            self.clock.after(self.quiet_at - self.clock.now, self._calm)
            return
        self.network.weather = Weather(delay_s=self.network.weather.delay_s)

    def _alive_producers(self) -> list[ProducerProcess]:
        return [producer for producer in self.producers if producer.alive]

    def _kill_producer(self) -> None:
        self._replace_producer(lambda producer: producer.kill(), same_name=self.rng.random() < 0.5)

    def _stop_producer(self) -> None:
        self._replace_producer(lambda producer: producer.leave())

    def _replace_producer(self, end: object, same_name: bool = False) -> None:
        alive = self._alive_producers()
        if alive:
            producer = self.rng.choice(alive)
            self.note("ends", producer.name)
            assert callable(end)
            end(producer)
            name = producer.name if same_name else ""
            self.clock.after(self.rng.uniform(0, 3), self._start_producer, producer.streams, name)

    def _any_process(self) -> Process | None:
        alive: list[Process] = [*self._alive_producers(), *(c for c in self.clients.values() if c.alive)]
        return self.rng.choice(alive) if alive else None

    def _reconnect(self) -> None:
        process = self._any_process()
        if process is not None:
            self.note("reconnects", process.peer)
            process.reconnect()

    def _outage(self) -> None:
        process = self._any_process()
        if process is not None:
            link = self.rng.choice((b"<", b">")) + process.peer
            self.note("outage", link)
            self.network.cut.add(link)
            seconds = self.rng.uniform(0.5, 18.0)
            self.quiet_at = max(self.quiet_at, self.clock.now + seconds)
            self.clock.after(seconds, self.network.cut.discard, link)

    def _freeze(self) -> None:
        process = self._any_process()
        if process is not None and not process.frozen:
            seconds = self.rng.choice((2.0, 17.0))
            self.note("freezes", process.peer, seconds)
            self.quiet_at = max(self.quiet_at, self.clock.now + seconds)
            process.freeze(seconds)

    def _kill_client(self) -> None:
        alive = [client for client in self.clients.values() if client.alive and client.ended is None]
        if alive:
            client = self.rng.choice(alive)
            self.note("kills", client.name)
            if self.rng.random() < 0.5:
                client.leave()
            else:
                client.kill()
            self.clock.after(self.rng.uniform(0.5, 3), self._start_client, client.mesh, *client.state())

    def _kill_broker(self) -> None:
        """Killed, or cut off and alive, and another started with a higher epoch and nothing else.

        Producers that are done start again.
        """
        if any(client.ended is not None for client in self.clients.values()):
            return
        self.note("kills the broker")
        if self.rng.random() < 0.5:
            self.broker.alive = False
        self.clock.after(self.rng.uniform(0.1, 2.0), self._restart_broker, self.broker.epoch + 1)

    def _restart_broker(self, epoch: int) -> None:
        if epoch > self.broker.epoch:
            self.clock.after(8.0, self.broker.kill)
            self.broker = BrokerProcess(self, epoch)
        self._start_producer(list(self.case.names))

    def finished(self, client: ClientProcess) -> None:
        """A rank has returned every step, and knows that it was the last; some close at once."""
        assert client.ended is not None
        self._ended[self._rank(client)] = client.ended
        attached = all(other.alive and other.session.attached is not None for other in self.clients.values())
        if self.early_leavers and self.clock.now > self.quiet_at and attached:
            client.leave()

    def _stuck(self) -> str:
        waits = [f"{c.name}: {c.session.waiting_for()} (step {c.done})" for c in self.clients.values() if c.alive]
        held = [f"{p.name}: {p.session.waiting_for()}" for p in self._alive_producers()]
        return "; ".join([*waits, *held, str(self.broker.core.waiting_for())])


def run(seed: int, case_number: int | None = None) -> Outcome:
    """Run a seed. Raises AssertionError, with the seed, for whatever does not hold."""
    try:
        return World(seed, case_number).run()
    except Exception as error:
        again = f"SIM_SEEDS={seed}:{seed + 1} .venv/bin/python -m pytest tests/simulation/test_simulation.py"
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}\nto run it alone: {again}") from error
