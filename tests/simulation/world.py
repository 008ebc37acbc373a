"""One simulated run: a job, its processes, a bad network, and faults; everything a function of a seed.

``run(seed)`` returns when every rank has had every step and the end, and raises AssertionError if
anything that must hold did not, or if the job has not ended long after the faults have.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from streampack.core.events import FromBroker
from streampack.core.messages import Envelope, Mesh, Samples
from tests.simulation.data import NUM_CASES
from tests.simulation.job import Job
from tests.simulation.network import Clock, Network, Weather
from tests.simulation.processes import BrokerProcess, ClientProcess, Disk, Process, ProducerProcess

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
        self.jobs = {job.feed: job for job in self._make_jobs(number)}
        self.case_of = {name: job.case for job in self.jobs.values() for name in job.case.names}
        self.dtype = self.jobs["train"].case.dtype
        """Of a token, in all feeds."""
        self.network = Network(self.clock, self.rng, self._weather())
        self.read_s = self.rng.choice((0.005, 0.05))
        self.rounds: dict[tuple[str, int, int], int] = {}
        """The iteration of each attempt: (feed, epoch, attempt)."""
        self._trace = hashlib.blake2b(digest_size=16)
        self._events = 0
        self._peers: dict[bytes, Process] = {}
        self._num_peers = self._num_names = 0
        self._sent_bytes: dict[tuple[int, str, int, int, str], int] = {}
        self.quiet_at = self.rng.uniform(1.0, 12.0)
        sync_s = self.rng.choice((None, 0.0, 0.02, 0.3))
        self.disk = None if sync_s is None else Disk(sync_s)
        self.broker = BrokerProcess(self, epoch=5, disk=self.disk)
        self.producers: list[ProducerProcess] = []
        self._hung: list[ClientProcess] = []
        """Clients that others have replaced: they may wake up."""
        self._start()
        self._plan_faults()
        self.clock.after(0.0, self._calm)

    def run(self) -> Outcome:
        """To the end of the job."""
        last = 0.0
        while not all(job.over for job in self.jobs.values()):
            self.clock.step()
            self._events += 1
            last = self.clock.now
            if last > self.quiet_at + PATIENCE_S:
                raise AssertionError(f"liveness: not ended at {last:.0f} s: {self._stuck()}")
        for job in self.jobs.values():
            job.check()
        train = self.jobs["train"].reference
        return Outcome(train.chain, len(train.steps), self._trace.hexdigest(), last, self._events)

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

    def refused(self, client: ClientProcess) -> None:
        """The rank is still held by one that is gone: a launcher tries again."""
        client.kill()
        for hung in [other for other in self._hung if other.job is client.job and other.mesh == client.mesh]:
            hung.kill()
        self._relaunch(client, 3.0)

    # Starting and stopping

    def _start(self) -> None:
        rng, names = self.rng, list(self.case_of)
        for number in range(rng.randint(1, 3)):
            some = names if number == 0 else rng.sample(names, rng.randint(1, len(names)))
            late = rng.random() < 0.4
            self.clock.after(rng.uniform(0, 4) if late else rng.random() * 0.2, self._start_producer, list(some))
        for job in self.jobs.values():
            dp, cp = job.case.dp, job.case.cp
            for rank in range(job.num_ranks):
                mesh = Mesh(dp=dp, cp=cp, dp_rank=rank // cp, cp_rank=rank % cp)
                delay = rng.uniform(0, 3) if rng.random() < 0.3 else rng.random() * 0.2
                self.clock.after(delay, self._start_client, job, mesh, 0, 0, b"")

    def _make_jobs(self, number: int) -> list[Job]:
        """Mostly one feed, read once; or it is iterated, or there is another beside it, which perhaps nobody reads."""
        again, more = self.rng.random() < 0.25, self.rng.random() < 0.25
        jobs = [Job(self, "train", number, self.rng.randint(2, 3) if again else 1)]
        if more:
            other = (number + 2 * self.rng.randint(0, 3)) % NUM_CASES  # of the same dtype
            jobs.append(Job(self, "valid", other, self.rng.randint(0, 3), "v."))
        return jobs

    def _start_producer(self, streams: list[str], name: str = "") -> None:
        self._num_names += 1
        self.producers.append(ProducerProcess(self, name or f"producer{self._num_names}", streams, self._num_names))

    def _start_client(self, job: Job, mesh: Mesh, round_: int, next_step: int, chain: bytes) -> None:
        self._num_names += 1
        client = ClientProcess(job, f"reader{self._num_names}", mesh, round_, next_step, chain)
        job.clients[job.rank(client)] = client

    def _relaunch(self, client: ClientProcess, delay_s: float) -> None:
        """Another process in its place, unless all are begun anew before."""
        self._launch(client.job, client.mesh, delay_s, *client.state())

    def _launch(self, job: Job, mesh: Mesh, delay_s: float, round_: int, step: int, chain: bytes) -> None:
        launch = job.launch

        def start() -> None:
            if launch == job.launch:
                self._start_client(job, mesh, round_, step, chain)

        self.clock.after(delay_s, start)

    def _clients(self) -> list[ClientProcess]:
        return [client for job in self.jobs.values() for client in job.clients.values()]

    def dismissed(self, producer: ProducerProcess) -> None:
        """A producer was told that it may go: not before every rank has had every step. One is started again."""
        assert all(len(job.whole) == job.num_ranks for job in self.jobs.values()), "a producer was sent away too early"
        self.clock.after(1.0, self._start_producer, producer.streams)

    # Faults

    def _weather(self) -> Weather:
        rng = self.rng
        if rng.random() < 0.2:
            return Weather()
        often = (
            0.3 if any(job.rounds > 1 for job in self.jobs.values()) else 0.05
        )  # so that some come an iteration late
        return Weather(
            lost=rng.choice((0.0, 0.02, 0.15)), repeated=rng.choice((0.0, often)), reordered=rng.choice((0.0, 0.05)),
            delay_s=rng.choice((0.002, 0.02, 0.1)), late_s=rng.choice((0.05, 1.0, 5.0)),
        )  # fmt: skip

    def _plan_faults(self) -> None:
        faults = [
            self._kill_producer, self._stop_producer, self._reconnect, self._outage, self._freeze,
            self._kill_client, self._replace_client, self._restart_trainers, self._kill_broker,
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
        alive: list[Process] = [*self._alive_producers(), *(c for c in self._clients() if c.alive)]
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
        alive = [client for client in self._clients() if client.alive and not client.job.ended]
        if alive:
            client = self.rng.choice(alive)
            self.note("kills", client.name)
            if self.rng.random() < 0.5:
                client.leave()
            else:
                client.kill()
            self._relaunch(client, self.rng.uniform(0, 0.5))

    def _replace_client(self) -> None:
        """One that hangs is replaced, and wakes up later."""
        alive = [client for client in self._clients() if client.alive and not client.frozen and not client.job.ended]
        if alive:
            client, seconds = self.rng.choice(alive), self.rng.uniform(3.0, 9.0)
            self.note("replaces", client.name, seconds)
            self.quiet_at = max(self.quiet_at, self.clock.now + seconds)
            client.replaced = True
            client.freeze(seconds)
            self._hung.append(client)
            self._relaunch(client, self.rng.uniform(0, 0.5))

    def _restart_trainers(self) -> None:
        """All trainers of a job are killed, and begin again at an earlier step."""
        jobs = [job for job in self.jobs.values() if job.num_ranks == len(job.clients) > 0 and not job.ended]
        if not jobs:
            return
        job = self.rng.choice(jobs)
        job.launch += 1
        round_, done, _ = min(client.state() for client in job.clients.values())
        step = self.rng.randint(0, done)
        self.note("restarts", job.feed, round_, step)
        for client in [*job.clients.values(), *self._hung]:
            if client.job is job:
                client.kill()
        chain = job.reference.steps[step - 1].chain if step else b""
        for client in list(job.clients.values()):
            self._launch(job, client.mesh, self.rng.uniform(0, 1), round_, step, chain)

    def _kill_broker(self) -> None:
        """Killed, or cut off and alive, and another started with a higher epoch and nothing else.

        Producers that are done start again.
        """
        if any(job.ended for job in self.jobs.values()):
            return
        self.note("kills the broker")
        if self.disk is not None or self.rng.random() < 0.5:
            self.broker.alive = False
        self.clock.after(self.rng.uniform(0.1, 2.0), self._restart_broker, self.broker.epoch + 1)

    def _restart_broker(self, epoch: int) -> None:
        if epoch > self.broker.epoch:
            self.clock.after(8.0, self.broker.kill)
            if self.disk is not None:
                self.disk.crash(self.rng)
            self.broker = BrokerProcess(self, epoch, self.disk)
        self._start_producer(list(self.case_of))

    def _stuck(self) -> str:
        waits = [
            f"{c.name}: {c.session.waiting_for()} (step {c.done} of iteration {c.round})"
            for c in self._clients()
            if c.alive
        ]
        held = [f"{p.name}: {p.session.waiting_for()}" for p in self._alive_producers()]
        return "; ".join([*waits, *held, str([feed.waiting_for() for feed in self.broker.core.feeds.values()])])


def run(seed: int, case_number: int | None = None) -> Outcome:
    """Run a seed. Raises AssertionError, with the seed, for whatever does not hold."""
    try:
        return World(seed, case_number).run()
    except Exception as error:
        again = f"SIM_SEEDS={seed}:{seed + 1} .venv/bin/python -m pytest tests/simulation/test_simulation.py"
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}\nto run it alone: {again}") from error
