"""What goes wrong in a simulated run, and when: everything a function of the seed.

Faults come until ``World.quiet_at``; whatever they break must heal after that. A broker may also be killed the
moment after it has said something that must hold from then on: a step, an end, that samples are safe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from streampack.core.serve.rank_reader import Reader
from tests.simulation.client import ClientProcess
from tests.simulation.job import Job
from tests.simulation.processes import Process
from tests.world.disk import Disk

if TYPE_CHECKING:
    from tests.simulation.world import AnyProducer, World

LATEST_S = 30.0
"""Until then trainers that bring snapshots wait for a checkpoint that holds one before they go back."""
ZOMBIE_S = 17.0
"""So long a replaced process hangs before it wakes up, and its host is taken down a while later."""


class Faults:
    """The faults of one run, planned as it begins."""

    def __init__(self, world: World, happen: bool = True) -> None:
        self.world = world
        rng = world.rng
        self._crashes = 0
        self._buggify = 0.0
        if not happen:
            return
        self._buggify = rng.choice((0.0, 0.0, 0.002, 0.02))
        self._crashes = rng.randint(1, 5)
        """How often the broker may still be killed right after it spoke."""
        faults = [
            self.kill_producer, self.stop_producer, self.reconnect, self.outage, self.freeze, self.kill_client,
            self.replace_client, self.kill_broker, self.go_back,
        ]  # fmt: skip
        chosen = rng.sample(faults, rng.randint(0, 3))
        if rng.random() < 0.25 and self.kill_broker not in chosen:
            chosen.append(self.kill_broker)
        if rng.random() < 0.25 and self.go_back not in chosen:
            chosen.append(self.go_back)
        if rng.random() < 0.15 and world.can_lose_disk:
            chosen.append(self.lose_disk)
        if world.brings_snapshots and self.go_back not in chosen:
            chosen.append(self.go_back)
        for fault in chosen:
            for _ in range(rng.randint(1, 3)):
                world.clock.after(rng.uniform(0.1, world.quiet_at), fault)

    # Producers and links

    def kill_producer(self) -> None:
        self._replace_producer(lambda producer: producer.kill(), same_name=self.world.rng.random() < 0.5)

    def stop_producer(self) -> None:
        self._replace_producer(lambda producer: producer.leave())

    def _replace_producer(self, end: Callable[[AnyProducer], None], same_name: bool = False) -> None:
        world = self.world
        alive = world.alive_producers()
        if alive:
            producer = world.rng.choice(alive)
            world.note("ends", producer.name)
            end(producer)
            name = producer.name if same_name else ""
            world.clock.after(world.rng.uniform(0, 3), world.start_again, producer, name)

    def _any_process(self) -> Process | None:
        alive: list[Process] = [*self.world.alive_producers(), *(c for c in self.world.clients() if c.alive)]
        alive += [process for process in self.world.others() if process.alive]
        return self.world.rng.choice(alive) if alive else None

    def reconnect(self) -> None:
        process = self._any_process()
        if process is not None:
            self.world.note("reconnects", process.peer)
            process.reconnect()

    def outage(self) -> None:
        world, process = self.world, self._any_process()
        if process is not None:
            link = world.rng.choice((b"<", b">")) + process.peer
            world.note("outage", link)
            world.network.cut.add(link)
            seconds = world.rng.uniform(0.5, 18.0)
            world.quiet_at = max(world.quiet_at, world.clock.now + seconds)
            world.clock.after(seconds, world.network.cut.discard, link)

    def freeze(self) -> None:
        world, process = self.world, self._any_process()
        if process is not None and not process.frozen:
            seconds = world.rng.choice((2.0, 17.0))
            world.note("freezes", process.peer, seconds)
            world.quiet_at = max(world.quiet_at, world.clock.now + seconds)
            process.freeze(seconds)

    # Trainers

    def kill_client(self) -> None:
        """One rank is started again at once, where it was."""
        world = self.world
        alive = [client for client in world.clients() if client.alive and not client.job.ended]
        if alive:
            client = world.rng.choice(alive)
            world.note("kills", client.name)
            self._end(client)
            delay = world.rng.uniform(0, 0.5)
            world.clock.after(delay, world.start_client, client.job, client.mesh, client.state(), client.life, client)

    def _end(self, client: ClientProcess) -> None:
        if self.world.rng.random() < 0.5:
            client.leave()
        else:
            client.kill()

    def go_back(self) -> None:
        """All ranks of a job are started again from a checkpoint; one of the old may only seem to be dead."""
        world = self.world
        jobs = [job for job in world.jobs.values() if job.num_ranks and len(job.clients) == job.num_ranks]
        jobs = [job for job in jobs if not job.over]
        if world.brings_snapshots and not any(job.has_snapshot for job in jobs) and world.clock.now < LATEST_S:
            world.clock.after(0.5, self.go_back)
        elif jobs:
            self._go_back(world.rng.choice(jobs))

    def restart(self, job: Job, life: int) -> None:
        """A launcher gives up on this life of a job."""
        if job.life == life and len(job.clients) == job.num_ranks:
            self._go_back(job)
        elif job.life == life:
            self.world.clock.after(1.0, self.restart, job, life)

    def _go_back(self, job: Job) -> None:
        world = self.world
        begin = world.rng.choice(job.can_go_back())
        old = list(job.clients.values())
        for client in old:
            if client.alive and world.rng.random() < 0.1:
                self._hang(client, ZOMBIE_S)
            else:
                self._end(client)
        world.quiet_at = max(world.quiet_at, world.clock.now + 3.0)
        job.go_back(begin)

    def replace_client(self) -> None:
        """One that hangs is replaced, and wakes up later."""
        world = self.world
        alive = [client for client in world.clients() if client.alive and not client.frozen and not client.job.ended]
        if alive:
            client = world.rng.choice(alive)
            world.note("replaces", client.name)
            self._hang(client, world.rng.uniform(3.0, 9.0))
            delay = world.rng.uniform(0, 0.5)
            world.clock.after(delay, world.start_client, client.job, client.mesh, client.state(), client.life, client)

    def _hang(self, client: ClientProcess, seconds: float) -> None:
        world = self.world
        client.freeze(seconds)
        held = self._held(client)
        if held is not None and held.name == client.name:
            world.clock.after(seconds, self._wakes, client, world.broker.epoch)
        world.clock.after(seconds + 4.0, client.kill)
        world.quiet_at = max(world.quiet_at, world.clock.now + seconds + 4.0)

    def _held(self, client: ClientProcess) -> Reader | None:
        """Who holds a client's rank, as the broker sees it."""
        return self.world.broker.core.feeds[client.job.feed].readers.registry.held.get(client.mesh.ranks)

    def _wakes(self, client: ClientProcess, epoch: int) -> None:
        """A process that was replaced wakes up: it must hear that it has lost its rank, if the broker knew both."""
        held, now = self._held(client), client.job.clients.get(client.mesh.ranks)
        if held is not None and now is not None and held.name == now.name and epoch == self.world.broker.epoch:
            client.fenced_by = epoch

    # The broker

    def buggify(self) -> None:
        """The broker has just made a promise: a good moment to be killed."""
        world = self.world
        if self._crashes and world.clock.now < world.quiet_at and world.rng.random() < self._buggify:
            self._crashes -= 1
            self.kill_broker()

    def kill_broker(self) -> None:
        """Killed, or cut off and alive, and another started with a higher epoch and nothing else.

        Producers that are done start again.
        """
        world = self.world
        if not world.broker.alive or any(job.ended for job in world.jobs.values()):
            return
        world.note("kills the broker")
        if world.disk is not None or world.rng.random() < 0.5:
            world.broker.alive = False
        world.clock.after(world.rng.uniform(0.1, 2.0), self._restart_broker, world.broker.epoch + 1)

    def _restart_broker(self, epoch: int) -> None:
        world = self.world
        if epoch > world.broker.epoch:
            world.clock.after(8.0, world.broker.kill)
            world.start_broker(epoch)
        if world.read_streams:
            world.start_producer(world.read_streams)

    def lose_disk(self) -> None:
        """The broker comes back on an empty disk, and mostly everybody else anew from what the trainers have."""
        world = self.world
        if world.disk is None or any(job.ended for job in world.jobs.values()):
            return
        world.note("loses the disk")
        world.broker.alive = False
        world.disk, world.lost_disk = Disk(world.disk.sync_s), True
        for job in world.jobs.values():
            if job.num_ranks and len(job.clients) == job.num_ranks and world.rng.random() < 0.7:
                self._go_back(job)
        world.clock.after(world.rng.uniform(0.1, 2.0), self._restart_broker, world.broker.epoch + 1)
