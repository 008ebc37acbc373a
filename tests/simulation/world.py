"""One simulated run: a job, its processes, a bad network, and faults; everything a function of a seed.

``run(seed)`` returns when every rank has had every step and the end, and raises AssertionError if
anything that must hold did not, or if the job has not ended long after the faults have.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from streampack.core.model.mesh import Mesh
from streampack.core.protocol.events import FromBroker
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.producer_messages import Samples
from streampack.core.protocol.relay_messages import relay_of, relayed
from streampack.core.protocol.trainer_messages import Attach
from streampack.core.sessions.relaying.relay_events import ForReaders
from tests.simulation.broker import FIRST_EPOCH, BrokerProcess
from tests.simulation.client import Checkpoint, ClientProcess
from tests.simulation.data import MEDIA_CASES, NUM_CASES, WIDE, beside, case
from tests.simulation.faults import Faults
from tests.simulation.job import Job
from tests.simulation.network import Clock, Network, Weather
from tests.simulation.processes import Process, ProducerProcess
from tests.simulation.pushers import Births, PusherProcess
from tests.simulation.relay import Relays
from tests.world.disk import Disk

if TYPE_CHECKING:
    from tests.simulation.rl.scorers import ScorerProcess

PATIENCE_S = 120.0
"""Virtual time in which a job ends once its faults have."""
LONGEST_S = 600.0
"""A job that is started again and again because of its faults has ended by then, too."""
ISOLATED_S = 60.0
"""For so long a rank waits for a relay that has lost the broker."""
AnyProducer: TypeAlias = "ProducerProcess | PusherProcess | ScorerProcess"
ANSWER_S = 30.0
"""What a trainer asks is answered by then, whatever happened meanwhile."""


@dataclass(frozen=True)
class Outcome:
    """What a run came to: ``trace`` is a digest of all that happened, in order."""

    chain: bytes
    num_steps: int
    trace: str
    seconds: float
    events: int


@dataclass(frozen=True)
class Slow:
    """Links to a ``share`` of the trainers that carry ``bytes_per_s``, until the faults are over or ``for_good``."""

    bytes_per_s: float = 0.0
    share: float = 0.0
    for_good: bool = False


class World:
    """State of one run. ``rng`` decides all that the data does not."""

    client_kind: type[ClientProcess] = ClientProcess
    pusher_kind: type[PusherProcess] = PusherProcess
    outbids = True
    """A broker that starts may have a higher epoch than its peers, and no arbiter says which."""

    def __init__(
        self, seed: int, case_number: int | None = None, work_s: float | None = None, slow: Slow | None = None,
        relays: bool = False, standby: bool = False,
    ) -> None:  # fmt: skip
        self.standby = random.Random(f"{seed} standby") if standby else None
        """Decides when the standby of a broker has its log; None without standbys."""
        self.seed, self.rng, self.clock = seed, random.Random(seed), Clock()
        self.relays = Relays(self, wide=case_number in WIDE) if relays else None
        number = seed % NUM_CASES if case_number is None else case_number
        if self.relays is not None and case_number is None and seed % 11 == 0:
            number = WIDE[seed // 11 % 2]
        self.jobs = {job.feed: job for job in self._make_jobs(number)}
        for job in self.jobs.values():
            job.work_s = work_s or job.work_s
        self.case_of = {name: job.case for job in self.jobs.values() for name in job.case.names}
        self.dtype = self.jobs["train"].case.dtype
        """Of a token, in all feeds."""
        self.network = Network(self.clock, self.rng, self._weather() if slow is None else Weather())
        more = random.Random(f"{seed} and links")  # beside the other, whose seeds mean what they meant
        self.part_bytes = more.choice((1, 64, 300, 2 << 20))
        """Of a step's payload in one message, about."""
        least = (
            (1, 200) if self.network.weather.delay_s < 0.1 else (1000, 1000)
        )  # a part at a time to all ranks is slow
        self.leaving_bytes = more.choice((*least, 1000, 64 << 20))
        """That may be on their way to all readers of a feed."""
        self.pings_a_second = more.choice((1000.0, 1000.0, 2.0, 0.5))
        """Of all ranks of a feed together, before they ping less often than once a second."""
        self.claims_first = random.Random(f"{seed} ranks are claimed first").random() < 0.25
        """Clients take their ranks before they say where they begin."""
        self.brings_snapshots = random.Random(f"{seed} brings snapshots").random() < 0.2
        """Trainers save often, and go back to checkpoints that hold a snapshot."""
        if self.brings_snapshots:
            for job in self.jobs.values():
                job.saves = 0.5
        self.slow = (
            slow if slow is not None else Slow(more.choice((0.0, 0.0, 3000.0, 20_000.0)), more.choice((0.3, 1.0)))
        )
        self.read_s = self.rng.choice((0.005, 0.05))
        self.births = {
            (name, partition): Births(job.case, job.case.names.index(name), partition)
            for job in self.jobs.values()
            for name in job.case.pushed
            for partition in range(job.case.rules.streams[job.case.names.index(name)].partitions)
        }
        """What is pushed, by (stream, partition)."""
        self.rounds: dict[tuple[str, int, int], int] = {}
        """The iteration of each attempt: (feed, epoch, attempt)."""
        self.there: dict[tuple[str, int, int], dict[str, bool]] = {}
        """The processes that the broker knew of as it began, by name: does it hold its rank, or claim one?"""
        self._trace = hashlib.blake2b(digest_size=16)
        self._events = 0
        self._peers: dict[bytes, Process] = {}
        self._num_peers = self._num_names = 0
        self._sent_bytes: dict[tuple[int, str, int, int, str], int] = {}
        self.quiet_at = self.rng.uniform(1.0, 12.0)
        arrival = any(job.case.rules.merge == "arrival" for job in self.jobs.values())
        sync_s = self.rng.choice((0.02 if arrival else None, 0.0, 0.02, 0.3))
        self.disk = None if sync_s is None else Disk(sync_s)
        self.lost_disk = False
        """The log may begin at the step of a checkpoint that trainers brought."""
        self.producers: list[AnyProducer] = []
        self.faults = self._make_faults(slow is None)
        self.broker = BrokerProcess(self, FIRST_EPOCH, self.disk)
        if self.relays is not None:
            self.relays.start(list(self.jobs.values()))
        self._start()
        self.clock.after(0.0, self._calm)

    def run(self) -> Outcome:
        """To the end of the job."""
        last = 0.0
        jobs = list(self.jobs.values())
        while any(not job.over for job in jobs) or self.waits:
            self.clock.step()
            self._events += 1
            last = self.clock.now
            if last > min(self.quiet_at + PATIENCE_S, LONGEST_S):
                raise AssertionError(f"liveness: not ended at {last:.0f} s: {self._stuck()}")
        for job in self.jobs.values():
            job.check()
        for client in self.clients():
            waits = client.alive and client.asked_at is not None and not client.job.gave_up(client)
            since = client.asked_at if waits and client.asked_at is not None else self.clock.now
            most = ANSWER_S + (ISOLATED_S if self.relays is not None and self.relays.isolates else 0.0)
            assert self.clock.now - since < most, f"liveness: {client.name} has had no answer since {since:.0f} s"
        for births in self.births.values():
            assert self.disk is not None
            births.check(self.disk)
        train = self.jobs["train"].reference
        assert train is not None
        return Outcome(train.chain, len(train.steps), self._trace.hexdigest(), last, self._events)

    @property
    def waits(self) -> bool:
        """Must the run go on after its trainers have ended?"""
        return False

    def others(self) -> Sequence[Process]:
        """Processes that are neither trainers nor send samples."""
        return []

    def note(self, *what: object) -> None:
        """A line of the trace."""
        self._trace.update(repr((round(self.clock.now, 9), *what)).encode())

    # Links

    def connect(self, process: Process) -> bytes:
        """A new peer name for a process."""
        self._num_peers += 1
        peer = b"%d" % self._num_peers
        self._peers[peer] = process
        if (
            self.slow.bytes_per_s
            and process.kind in ("client", "relay")
            and self._num_peers % 10 < 10 * self.slow.share
        ):
            self.network.rates[b"<" + peer] = self.slow.bytes_per_s
        return peer

    def disconnect(self, process: Process) -> None:
        peer = getattr(process, "peer", None)
        if peer is not None:
            self._peers.pop(peer, None)

    def to_broker(self, process: Process, envelope: Envelope, reader: str | None = None) -> None:
        """Carry a message to the broker, of a process or of the ``reader`` of a relay."""
        message, link, is_producer = envelope.message, process.peer, process.kind == "producer"
        peer = link if reader is None else relayed(link, reader)
        if isinstance(message, Samples):
            self._check_credit(process, envelope, message)

        broker = self.broker

        def arrive(arrived: Envelope) -> None:
            if isinstance(message, Attach) and not envelope.epoch and broker is not self.broker:
                return  # the first thing said over a connection, which does not outlive the broker
            self.note("broker", peer, type(arrived.message).__name__, arrived.epoch, arrived.fence)
            self.broker_of(process).receive(peer, arrived, is_producer)

        self.network.carry(b">" + link, envelope, arrive)

    def broker_of(self, process: Process) -> BrokerProcess:
        """The broker to which a process is connected."""
        return self.broker

    def to_peer(self, peer: bytes, envelope: Envelope) -> bool:
        """Whether there is a connection; a message may be lost on it nevertheless."""
        at = relay_of(peer)
        link = peer if at is None else at[0]
        if link not in self._peers:
            return at is not None  # what was bundled for the readers of a relay is lost without a word

        def arrive(arrived: Envelope) -> None:
            process = self._peers.get(link)
            if process is not None:
                self.note(peer, type(arrived.message).__name__, arrived.epoch, arrived.fence)
                process.handle(FromBroker(arrived) if at is None else ForReaders(((at[1], arrived),)))

        self.network.carry(b"<" + link, envelope, arrive)
        return True

    def _check_credit(self, process: Process, envelope: Envelope, message: Samples) -> None:
        """R6: a producer sends no more than the broker that it speaks to ever granted its session."""
        if envelope.epoch != self.broker.epoch:
            return
        key = (envelope.epoch, message.stream, message.partition, envelope.fence, process.name)
        case = self.case_of[message.stream]
        tokens = len(envelope.payload[0]) // np.dtype(case.dtype).itemsize
        media = len(envelope.payload[-1]) if case.rules.media_fields else 0
        sent = self._sent_bytes[key] = self._sent_bytes.get(key, 0) + tokens * case.token_bytes + media
        seq, size = self.broker.checks.granted(message.stream, message.partition, envelope.fence)
        assert sent <= size, f"R6: {sent} bytes were sent on a grant of {size}"
        assert message.base_seq + len(message.lengths_u32) // 4 <= seq, "R6: a sample was sent beyond the grant"

    # Starting and stopping

    def _start(self) -> None:
        rng, names = self.rng, self.read_streams
        for number in range(rng.randint(1, 3) if names else 0):
            some = names if number == 0 else rng.sample(names, rng.randint(1, len(names)))
            late = rng.random() < 0.4
            self.clock.after(rng.uniform(0, 4) if late else rng.random() * 0.2, self.start_producer, list(some))
        for stream, partition in self.births:
            self.clock.after(rng.random(), self.start_pusher, stream, partition)
        for job in self.jobs.values():
            for mesh in job.meshes():
                delay = rng.uniform(0, 3) if rng.random() < 0.3 else rng.random() * 0.2
                self.clock.after(delay, self.start_client, job, mesh, Checkpoint(), job.life)

    def _make_faults(self, happen: bool) -> Faults:
        """What goes wrong in this run."""
        return Faults(self, happen)

    def _make_jobs(self, number: int) -> list[Job]:
        """Mostly one feed, read once; or it is iterated, or there is another beside it, which perhaps nobody reads."""
        again, more = self.rng.random() < 0.25, self.rng.random() < 0.25
        again = again and not case(number).pushed
        jobs = [Job(self, "train", number, self.rng.randint(2, 3) if again else 1)]
        if more:
            other = beside(number, self.rng.randint(0, 3))
            most = 1 if case(other).pushed else 3
            jobs.append(Job(self, "valid", other, self.rng.randint(0, most), "v."))
        return jobs

    def start_producer(self, streams: list[str], name: str = "") -> None:
        """A producer of some streams; with ``name`` in the place of one that had it."""
        self._num_names += 1
        self.producers.append(ProducerProcess(self, name or f"producer{self._num_names}", streams, self._num_names))

    def start_pusher(self, stream: str, partition: int, name: str = "") -> None:
        """A program that pushes a partition; with ``name`` in the place of one that had it."""
        self._num_names += 1
        name = name or f"pusher{self._num_names}"
        self.producers.append(self.pusher_kind(self, name, stream, partition, self._num_names))

    def start_again(self, producer: AnyProducer, name: str = "") -> None:
        """Another process for what a producer did, unless there is nothing left to do."""
        if isinstance(producer, ProducerProcess):
            self.start_producer(producer.streams, name)
        elif isinstance(producer, PusherProcess) and not any(
            isinstance(other, PusherProcess) and other.births is producer.births for other in self.alive_producers()
        ):
            self.start_pusher(producer.stream, producer.partition, name)

    def start_client(
        self, job: Job, mesh: Mesh, begin: Checkpoint, life: int, instead_of: ClientProcess | None = None
    ) -> None:
        """Start a rank's process, ``instead_of`` the one that it had, unless it has another since that was planned, or
        all ranks were started anew.
        """
        if life == job.life and job.clients.get(mesh.ranks) is instead_of:
            self._num_names += 1
            client = self.client_kind(job, f"reader{self._num_names}", mesh, begin)
            job.clients[mesh.ranks] = job.started[client.name] = client

    def start_broker(self, epoch: int) -> None:
        """The next broker, on the disk as the last one left it."""
        if self.disk is not None:
            self.disk.crash(self.rng)
        self.broker = BrokerProcess(self, epoch, self.disk)

    def clients(self) -> list[ClientProcess]:
        return [client for job in self.jobs.values() for client in job.clients.values()]

    @property
    def read_streams(self) -> list[str]:
        """Those that producers read, as often as is wanted."""
        return [name for name, case in self.case_of.items() if name not in case.pushed]

    def alive_producers(self) -> list[AnyProducer]:
        return [producer for producer in self.producers if producer.alive]

    @property
    def can_lose_disk(self) -> bool:
        """Nothing is on it that could not be had again."""
        return self.disk is not None and all(job.case.rules.merge == "schedule" for job in self.jobs.values())

    def dismissed(self, producer: ProducerProcess) -> None:
        """A producer was told that it may go: not before every rank has had every step. One is started again."""
        assert all(job.read_out for job in self.jobs.values()), "a producer was sent away too early"
        self.clock.after(1.0, self.start_producer, producer.streams)

    # Weather

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

    def _calm(self) -> None:
        """From ``quiet_at`` on the links are good."""
        if self.clock.now < self.quiet_at:
            self.clock.after(self.quiet_at - self.clock.now, self._calm)
            return
        self.network.weather = Weather(delay_s=self.network.weather.delay_s)
        if not self.slow.for_good:
            self.slow = Slow()
            self.network.rates.clear()

    def _stuck(self) -> str:
        waits = [
            f"{c.name}: {c.session.waiting_for()} (step {c.done} of iteration {c.iteration})"
            for c in self.clients()
            if c.alive
        ]
        held = [f"{p.name}: {p.session.waiting_for()}" for p in self.alive_producers()]
        return "; ".join([*waits, *held, str([feed.waiting_for() for feed in self.broker.core.feeds.values()])])


def run(
    seed: int, case_number: int | None = None, work_s: float | None = None, *, relays: bool = False,
    standby: bool = False,
) -> Outcome:  # fmt: skip
    """Run a seed, perhaps of another case, with ranks that work so long on a step, with relays, or with standbys.

    Raises AssertionError, with the seed, for whatever does not hold.
    """
    try:
        return World(seed, case_number, work_s, relays=relays, standby=standby).run()
    except Exception as error:
        name = "test_media" if case_number in MEDIA_CASES else "test_relays" if relays else "test_simulation"
        again = f"SIM_SEEDS={seed}:{seed + 1} .venv/bin/python -m pytest tests/simulation/{name}.py"
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}\nto run it alone: {again}") from error
