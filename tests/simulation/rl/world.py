"""One simulated RL loop: generators, scorers, trainers that report and publish, and subscribers, under all faults.

A broker may be frozen. A standby may take over from a broker that lives on, and to which processes still speak for a
while.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

from streampack.core.journal.log_records import SamplesAmended
from streampack.core.staging.tickets import LEARN_S
from tests.simulation.faults import Faults
from tests.simulation.job import Job
from tests.simulation.processes import TICK_S
from tests.simulation.rl.cases import PACED, PACED_LATE, RL_CASES, RL_MEDIA, rl_case
from tests.simulation.rl.generators import GeneratorProcess
from tests.simulation.rl.loop_checks import check_ages, check_results, check_staged, has_results
from tests.simulation.rl.scorers import ScorerProcess
from tests.simulation.rl.trainers import Kept, LoopTrainer, SubscriberProcess
from tests.simulation.world import AnyProducer, Outcome, World

if TYPE_CHECKING:
    from tests.simulation.broker import BrokerProcess
    from tests.simulation.processes import Process
    from tests.simulation.pushers import Births

ZOMBIE_S = 8.0
"""So long a broker lives after a standby has taken over."""


class LoopWorld(World):
    """State of one run; ``loop`` decides all that only these runs have."""

    client_kind = LoopTrainer
    pusher_kind = GeneratorProcess
    outbids = False

    def __init__(self, seed: int, number: int | None = None, relays: bool = False, standby: bool = False) -> None:
        self.loop = rng = random.Random(f"{seed} loop")
        self.number = RL_CASES[seed % len(RL_CASES)] if number is None else number
        self.score_s = rng.choice((0.005, 0.05))
        self.early = rng.choice((0.0, 0.1, 0.4))
        """Share of late values that are given to samples that are not safe."""
        self.strands = rng.randint(1, 4)
        """Samples or groups that a program generates at a time."""
        self.most_at_once = rng.choice((1, 1, 2, 4))
        """Samples for which a program asks at a time."""
        self.generate_s = rng.choice((0.02, 0.1))
        self.reports = rng.random() < 0.8
        self.publishes = RL_MEDIA.get(self.number, self.number) in (PACED, PACED_LATE) or rng.random() < 0.3
        self.reduces_same = rng.random() < 0.3
        self.kept: list[Kept] = []
        self.subscribers: list[SubscriberProcess] = []
        self.zombie: BrokerProcess | None = None
        self._moves_at: dict[Process, float] = {}
        """When each process that still speaks to the zombie notices that another broker is active."""
        self.forgotten = 0
        self.outcome: Outcome
        self.too_late: set[tuple[int, int, int]] = set()
        """Samples whose values came after they were dropped: stream, partition and number of each."""
        self._amended: set[tuple[str, int, int, str]] = set()
        self._amended_upto = 0
        self.began_at = 0.0
        """When the broker began."""
        super().__init__(seed, self.number, relays=relays, standby=standby)
        self.clock.after(0.0, self._watch)

    def run(self) -> Outcome:
        self.outcome = super().run()
        job = self.jobs["train"]
        assert self.disk is not None
        assert job.reference is not None
        check_staged(job.case, self.disk)
        self.forgotten = check_ages(job.case, self.births, self.disk, self.most_at_once)
        for kept in self.kept:
            check_results(job, kept, self.disk)
        return self.outcome

    @property
    def waits(self) -> bool:
        """Does a subscriber lack a step?"""
        if not self.reports:
            return False
        assert self.disk is not None
        job = self.jobs["train"]
        num_steps = max(end[0] for end in job.ended.values())
        return not all(has_results(kept, self.kept[0], num_steps, self.disk) for kept in self.kept)

    def is_amended(self, births: Births, seq: int, name: str) -> bool:
        """Is the value of a late field of a sample safe in the log?"""
        disk = self.disk
        assert disk is not None
        for lsn in range(self._amended_upto, disk.safe_upto):
            record, _ = disk.decode(lsn)
            if isinstance(record, SamplesAmended):
                seqs = np.frombuffer(record.seqs_u64, "<u8").tolist()
                self._amended |= {(record.stream, record.partition, one, of) for one in seqs for of in record.names}
        self._amended_upto = max(self._amended_upto, disk.safe_upto)
        return (births.case.names[births.stream], births.partition, seq, name) in self._amended

    def others(self) -> list[Process]:
        tellers = [client.teller for client in self.clients() if isinstance(client, LoopTrainer)]
        return [*self.subscribers, *(teller for teller in tellers if teller is not None and teller.alive)]

    def read_out(self, job: Job) -> bool:
        """Has every rank returned every step?"""
        return job.read_out

    def broker_of(self, process: Process) -> BrokerProcess:
        zombie = self.zombie
        if zombie is not None and zombie.alive and self.clock.now < self._moves_at.get(process, 0.0):
            return zombie
        return self.broker

    def _make_jobs(self, number: int) -> list[Job]:
        return [Job(self, "train", number, 1, this=rl_case(number, lag=self.loop.randint(0, 2)))]

    def _make_faults(self, happen: bool) -> Faults:
        return LoopFaults(self, happen)

    def _start(self) -> None:
        super()._start()
        rng, case = self.loop, self.jobs["train"].case
        names = [field.name for field in case.late_fields]
        parts = [names] if rng.random() < 0.4 else [names[:1], names[1:]] if rng.random() < 0.6 else [names, names[1:]]
        for stream in case.pushed if names else []:
            for part in parts:
                self.clock.after(rng.random(), self.start_scorer, stream, tuple(part))
        for start in (0, rng.choice((0, None))) if self.reports else ():
            self.kept.append(Kept(self, "train", start))
            self.clock.after(rng.uniform(0.0, 3.0), self.start_subscriber, self.kept[-1])

    def start_scorer(self, stream: str, names: tuple[str, ...]) -> None:
        """Start a program that gives values."""
        self._num_names += 1
        self.producers.append(ScorerProcess(self, f"scorer{self._num_names}", stream, names, self._num_names))

    def start_subscriber(self, kept: Kept) -> None:
        """Start a program that reads results from where the last one was."""
        self._num_names += 1
        self.subscribers.append(SubscriberProcess(self, f"subscriber{self._num_names}", kept))

    def start_again(self, producer: AnyProducer, name: str = "") -> None:
        if isinstance(producer, ScorerProcess):
            self.start_scorer(producer.stream, producer.names)  # no other process ever has the name of one that amends
        else:
            super().start_again(producer)  # nor of one that pushes

    def start_broker(self, epoch: int) -> None:
        super().start_broker(epoch)
        self.began_at = self.clock.now

    def take_over(self, epoch: int) -> None:
        """A standby becomes active, with at least what was safe. The old broker lives on for a while."""
        self.zombie = self.broker
        self.zombie.replace()
        processes = [*self.alive_producers(), *self.clients(), *self.others()]
        self._moves_at = {each: self.clock.now + self.loop.uniform(0.0, ZOMBIE_S) for each in processes}
        self.clock.after(ZOMBIE_S, self.zombie.kill)
        self.quiet_at = max(self.quiet_at, self.clock.now + ZOMBIE_S)
        self.start_broker(epoch)

    def _watch(self) -> None:
        """Note the samples in hand that a broker does not know of, after the time in which it learns of them."""
        tickets = self.broker.core.leases.staging.tickets.get("train")
        if tickets is not None and self.broker.alive and self.clock.now > self.began_at + LEARN_S - TICK_S:
            known = {each.producer for each in tickets.generated()}
            for each in self.alive_producers():
                if isinstance(each, GeneratorProcess) and each.name not in known:
                    each.forget()
        self.clock.after(TICK_S, self._watch)


class LoopFaults(Faults):
    """The faults of an RL loop: those of any run, and what happens to subscribers, brokers and standbys."""

    world: LoopWorld

    def __init__(self, world: LoopWorld, happen: bool = True) -> None:
        super().__init__(world, happen)
        rng = world.loop
        for fault in (self.kill_subscriber, self.freeze_broker, self.kill_broker):
            if happen and rng.random() < 0.3:
                for _ in range(rng.randint(1, 3)):
                    world.clock.after(rng.uniform(0.1, world.quiet_at), fault)

    def kill_subscriber(self) -> None:
        """A subscriber goes on from its cursor, or from an earlier one."""
        world, rng = self.world, self.world.loop
        alive = [each for each in world.subscribers if each.alive]
        if alive:
            subscriber = rng.choice(alive)
            world.note("kills", subscriber.name)
            subscriber.kill()
            kept = subscriber.kept
            if kept.order and rng.random() < 0.5:
                kept.cursor = rng.choice(kept.order)
            world.clock.after(rng.uniform(0, 3), world.start_subscriber, kept)

    def freeze_broker(self) -> None:
        """The broker hangs for a while."""
        world, seconds = self.world, self.world.loop.choice((1.0, 4.0, 17.0))
        world.note("freezes the broker", seconds)
        world.broker.freeze(seconds)
        world.quiet_at = max(world.quiet_at, world.clock.now + seconds)

    def kill_broker(self) -> None:
        world = self.world
        if world.loop.random() < 0.5:
            super().kill_broker()
        elif world.broker.alive and not any(job.ended for job in world.jobs.values()):
            world.note("loses the broker")
            if world.loop.random() < 0.5:
                world.broker.freeze(world.loop.uniform(1.0, ZOMBIE_S))
            self._take_over(world.broker.epoch + 1)

    def _take_over(self, epoch: int) -> None:
        self.world.take_over(epoch)


def run_loop(seed: int, number: int | None = None, *, relays: bool = False, standby: bool = False) -> Outcome:
    """Run a seed, perhaps of another case. Raises AssertionError, with the seed, for whatever does not hold."""
    return checked(LoopWorld(seed, number, relays=relays, standby=standby)).outcome


def checked(world: LoopWorld) -> LoopWorld:
    """Run a world. Raises AssertionError, with its seed, for whatever does not hold."""
    try:
        world.run()
    except Exception as error:
        seed = world.seed
        again = f"SIM_SEEDS={seed}:{seed + 1} .venv/bin/python -m pytest tests/simulation/rl/test_rl_loops.py"
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}\nto run it alone: {again}") from error
    return world
