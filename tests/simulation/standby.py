"""Two hosts with a log and an arbiter, and what goes wrong with them: the real sides of a standby in a small shell.

The broker on top of the log is left out: all that it is told of the log is which records are safe, and everything that
it tells others follows from safe records. So the run has one history if all safe records, of all active brokers that
there ever were, are one sequence.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from streampack.core.protocol.events import Effect, Event, Report, Tick
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.standby_messages import LogRecords
from streampack.core.standby.arbiter_entries import CreateEntry, Entry, EntryWritten, Newest, ReadNewest
from streampack.core.standby.log_follower import LogFollower
from streampack.core.standby.log_shipper import LogShipper
from streampack.core.standby.standby_events import (
    CutBelow,
    Discard,
    FromPeer,
    LogState,
    Over,
    SendPeer,
    Ship,
    Shipped,
    TakeOver,
    WriteRecords,
)
from tests.simulation.network import Clock, Network, Weather

RUN = 7
TICK_S = 0.2
LOST_S = 3.0
BATCH = 5
"""Most records in one message."""
MORE = 40
"""Records that must become safe once all faults are over."""
PATIENCE_S = 120.0


class LogDisk:
    """The log of a host. A crash may lose what was not synced."""

    def __init__(self) -> None:
        self.epoch = 0
        """Epoch of the broker that wrote the log, or whose log it copies."""
        self.log_id = "none"
        self.records: dict[int, bytes] = {}
        self.first = self.next = self.synced = 0

    def append(self, body: bytes) -> None:
        self.records[self.next] = body
        self.next += 1

    def clear(self, first: int, epoch: int, log_id: str) -> None:
        self.epoch, self.log_id, self.records = epoch, log_id, {}
        self.first = self.next = self.synced = first

    def cut(self, lsn: int) -> None:
        for gone in range(self.first, min(lsn, self.synced)):
            del self.records[gone]
        self.first = max(self.first, min(lsn, self.synced))

    def crash(self, rng: random.Random) -> None:
        upto = rng.randint(self.synced, self.next)
        for gone in range(upto, self.next):
            del self.records[gone]
        self.next = self.synced = upto


class Arbiter:
    """Numbered entries, each of which can be written once."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def create(self, entry: Entry) -> Entry:
        """Write an entry unless its number is taken; return the entry that has this number."""
        assert entry.number <= len(self.entries) + 1, f"entry {entry.number} leaves a gap"
        if entry.number == len(self.entries) + 1:
            self.entries.append(entry)
        return self.entries[entry.number - 1]

    @property
    def newest(self) -> Entry | None:
        return self.entries[-1] if self.entries else None


class StandbyWorld:
    """One seed: two hosts, ``a`` and ``b``, that start the same run."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng, self.clock = seed, random.Random(f"standby {seed}"), Clock()
        rng = self.rng
        self.network = Network(self.clock, rng, Weather(
            lost=rng.choice((0.0, 0.02, 0.2)), repeated=rng.choice((0.0, 0.05)), reordered=rng.choice((0.0, 0.1)),
            delay_s=rng.choice((0.002, 0.05)), late_s=rng.choice((0.1, 5.0)),
        ))  # fmt: skip
        self.goes_on = rng.random() < 0.5
        self.arbiter = Arbiter()
        self.hosts = {name: Host(self, name) for name in "ab"}
        self.history: dict[int, bytes] = {}
        """Every record that was ever safe: what trainers and producers may have been told."""
        self.quiet_at = rng.uniform(5.0, 40.0)
        self.quiet = False
        self.dead: str | None = None
        """A host that never comes back."""
        self._num_starts = 0
        self.in_flight = 0
        """Entries on their way to the arbiter, of processes that may be dead by now."""
        for host in self.hosts.values():
            self.clock.after(rng.uniform(0.0, 3.0), host.start)
        faults = [self.kill, self.power_cut, self.freeze, self.partition, self.arbiter_outage, self.lose_disk]
        for fault in rng.sample(faults, rng.randint(1, 4)):
            for _ in range(rng.randint(1, 3)):
                self.clock.after(rng.uniform(0.5, self.quiet_at), self._happens, fault)

    def process_name(self) -> str:
        self._num_starts += 1
        return f"process {self._num_starts}"

    def run(self) -> int:
        """Run to the end; return the number of safe records."""
        while self.clock.now < self.quiet_at:
            self.clock.step()
        self.network.weather, self.quiet = Weather(), True
        before, began = len(self.history), self.clock.now
        while len(self.history) < before + MORE:
            self.clock.step()
            if self.clock.now > began + PATIENCE_S:
                assert self._may_stall(), f"liveness: {[host.describe() for host in self.hosts.values()]}"
                break
        return len(self.history)

    def _may_stall(self) -> bool:
        """With ``stall``, nothing new is safe where the standby is gone for good and the active broker has said so."""
        alive = [host for host in self.hosts.values() if host.name != self.dead]
        newest = self.arbiter.newest
        if self.dead is None or self.goes_on or newest is None:
            return False
        return newest.active == alive[0].name and alive[0].shipper is not None and bool(alive[0].shipper.waits)

    def safe(self, host: Host, upto: int) -> None:
        """A host calls the records before ``upto`` safe."""
        for lsn in range(host.told, upto):
            if lsn in host.disk.records:
                body = host.disk.records[lsn]
                assert self.history.setdefault(lsn, body) == body, f"two histories: record {lsn} differs on {host.name}"
            else:
                known = lsn < host.disk.first and lsn in self.history
                assert known, f"record {lsn} is safe, and {host.name} lacks it"
        host.told = max(host.told, upto)

    # Faults

    def _happens(self, fault: Callable[[Host], None]) -> None:
        fault(self.hosts[self.rng.choice("ab")])

    def kill(self, host: Host) -> None:
        if host.shipper is not None and self.rng.random() < 0.3:
            for effect in host.shipper.leave(finished=False):
                host.perform(effect)
        host.kill()
        self._start_later(host)

    def power_cut(self, host: Host) -> None:
        host.kill()
        host.disk.crash(self.rng)
        self._start_later(host)

    def _start_later(self, host: Host) -> None:
        if self.dead is None and self.rng.random() < 0.15 and self._other_has_all(host):
            self.dead = host.name
        elif host.name != self.dead:
            self.clock.after(self.rng.choice((0.0, 1.0, 8.0)) * self.rng.random(), host.start)

    def _other_has_all(self, host: Host) -> bool:
        """Is the other host a member with its log, so that this one may be lost?"""
        newest, other = self.arbiter.newest, self.hosts["b" if host.name == "a" else "a"]
        return (
            newest is not None
            and not self.in_flight
            and other.name in newest.members
            and other.name != self.dead
            and other.disk.epoch == newest.epoch
        )

    def lose_disk(self, host: Host) -> None:
        """A host is lost with its disk, and another is started in its place."""
        if self._other_has_all(host):
            host.kill()
            host.disk = LogDisk()
            self._start_later(host)

    def freeze(self, host: Host) -> None:
        seconds = self.rng.choice((1.0, 5.0, 20.0))
        self.quiet_at = max(self.quiet_at, self.clock.now + seconds)
        host.freeze(seconds)

    def partition(self, _: Host) -> None:
        seconds = self.rng.uniform(0.5, 15.0)
        self.quiet_at = max(self.quiet_at, self.clock.now + seconds)
        for link in self.rng.choice(((b"a",), (b"b",), (b"a", b"b"))):
            self.network.cut.add(link)
            self.clock.after(seconds, self.network.cut.discard, link)

    def arbiter_outage(self, host: Host) -> None:
        seconds = self.rng.uniform(0.5, 15.0)
        self.quiet_at = max(self.quiet_at, self.clock.now + seconds)
        for each in self.rng.choice(([host], list(self.hosts.values()))):
            each.cut_off = True
            self.clock.after(seconds, setattr, each, "cut_off", False)


class Host:
    """A host: its disk, and the process that runs on it, which is a standby or the active broker."""

    def __init__(self, world: StandbyWorld, name: str) -> None:
        self.world, self.name, self.disk = world, name, LogDisk()
        self.follower: LogFollower | None = None
        self.shipper: LogShipper | None = None
        self.life = 0
        self.cut_off = False
        """True while the arbiter cannot be reached from here."""
        self.told = 0
        """The active broker on this host has called the records before this one safe."""
        self._frozen_until = 0.0
        self._inbox: list[tuple[int, Event]] = []
        self._sync_s = world.rng.choice((0.0, 0.02, 0.3))
        self._pace_s = world.rng.choice((0.05, 0.3))

    def describe(self) -> str:
        does = self.shipper.waits if self.shipper is not None else self.follower and self.follower.waits_for
        return f"{self.name} [{self.disk.first}, {self.disk.synced}, {self.disk.next}]: {does}"

    def start(self) -> None:
        """Start a process, which knows what is on the disk."""
        if self.follower is not None or self.shipper is not None or self.name == self.world.dead:
            return
        self.life += 1
        self._frozen_until = 0.0
        process = self.world.process_name()
        if self.disk.log_id == "none":
            self.disk.log_id = process
        self.follower = LogFollower(
            RUN, self.name, process, self.name, log_epoch=self.disk.epoch, log_id=self.disk.log_id,
            takeover_s=LOST_S, goes_on=self.world.goes_on, waits=self.name == "b",
        )  # fmt: skip
        self._log_state()
        self._tick(self.life)

    def kill(self) -> None:
        self.life += 1
        self.follower = self.shipper = None
        self._inbox.clear()

    def freeze(self, seconds: float) -> None:
        self._frozen_until = self.world.clock.now + seconds
        self.world.clock.after(seconds, self._thaw, self.life)

    def _thaw(self, life: int) -> None:
        waiting, self._inbox = self._inbox, []
        for life_, event in waiting:
            if life_ == self.life == life:
                self.handle(event)
        if life == self.life:
            self._log_state()

    @property
    def frozen(self) -> bool:
        return self.world.clock.now < self._frozen_until

    def handle(self, event: Event) -> None:
        if self.frozen:
            if not isinstance(event, LogState):
                self._inbox.append((self.life, event))
            return
        machine = self.shipper or self.follower
        if machine is None:
            return
        for effect in machine.handle(event):
            self.perform(effect)
        if self.shipper is not None:
            self.world.safe(self, self.shipper.safe_upto)

    def _tick(self, life: int) -> None:
        if life != self.life:
            return
        if not self.frozen:
            self.handle(Tick(self.world.clock.now))
        self.world.clock.after(TICK_S, self._tick, life)

    def _log_state(self) -> None:
        self.handle(LogState(self.disk.first, self.disk.next, self.disk.synced))

    def perform(self, effect: Effect) -> None:
        world = self.world
        if isinstance(effect, SendPeer):
            self._send(effect.envelope)
        elif isinstance(effect, CreateEntry | ReadNewest):
            world.in_flight += isinstance(effect, CreateEntry)
            world.clock.after(world.rng.expovariate(10.0), self._arbitrate, self.life, effect)
        elif isinstance(effect, Ship):
            upto = min(effect.first + BATCH, self.disk.next)
            bodies = [self.disk.records[lsn] for lsn in range(effect.first, upto)]
            sizes = b"".join(len(body).to_bytes(4, "little") for body in bodies)
            message = LogRecords(first=effect.first, kinds=bytes(len(bodies)), sizes_u32=sizes)
            assert self.shipper is not None
            epoch = self.shipper.entry.epoch
            self._send(Envelope(run=RUN, epoch=epoch, fence=0, message=message, payload=(b"".join(bodies),)))
            self.handle(Shipped(upto))
        elif isinstance(effect, Discard):
            self.disk.clear(effect.first, effect.epoch, effect.log_id)
        elif isinstance(effect, WriteRecords):
            assert effect.first == self.disk.next, f"{self.name} writes record {effect.first} as {self.disk.next}"
            at = 0
            for size in effect.sizes:
                self.disk.append(bytes(effect.bodies[at : at + size]))
                at += size
            self._sync_later()
        elif isinstance(effect, CutBelow):
            self.disk.cut(effect.lsn)
        elif isinstance(effect, TakeOver):
            self._become_active(effect.entry)
        elif isinstance(effect, Over):
            self.kill()
            world.clock.after(world.rng.uniform(0.1, 2.0), self.start)
        else:
            assert isinstance(effect, Report), effect

    def _send(self, envelope: Envelope) -> None:
        """Send a message to the other host, over a link that may be cut."""
        other, epoch = self.world.hosts["b" if self.name == "a" else "a"], envelope.epoch

        def arrive(arrived: Envelope) -> None:
            is_for_active = type(arrived.message).__name__ == "Follow"
            if (other.shipper is not None) == is_for_active and (not is_for_active or epoch == arrived.epoch):
                other.handle(FromPeer(arrived, self.name.encode()))

        self.world.network.carry(self.name.encode(), envelope, arrive)

    def _arbitrate(self, life: int, effect: CreateEntry | ReadNewest) -> None:
        """Carry a question to the arbiter, and its answer back; either may be lost."""
        world, rng = self.world, self.world.rng
        flaky = 0.1 if world.network.weather.lost else 0.0
        reached = not self.cut_off and rng.random() >= flaky
        answered = reached and rng.random() >= flaky
        why = "" if answered else "timed out"
        answer: Any
        if isinstance(effect, ReadNewest):
            answer = Newest(world.arbiter.newest if answered else None, why)
        else:
            world.in_flight -= 1
            found = world.arbiter.create(effect.entry) if reached else None
            answer = EntryWritten(effect.entry, found if answered else None, why)
        world.clock.after(rng.expovariate(10.0), self._answered, life, answer)

    def _answered(self, life: int, answer: Event) -> None:
        if life == self.life:
            self.handle(answer)

    # The active broker

    def _become_active(self, entry: Entry) -> None:
        self.follower = None
        self.disk.epoch = entry.epoch
        self.disk.synced = self.disk.next
        self.told = 0
        self.shipper = LogShipper(RUN, entry, self.disk.next, goes_on=self.world.goes_on, lost_s=LOST_S)
        self._log_state()
        self._append(self.life)

    def _append(self, life: int) -> None:
        """The broker decides something, now and then, and deletes what is old."""
        rng = self.world.rng
        if life != self.life or self.shipper is None:
            return
        if not self.frozen:
            for _ in range(rng.randint(1, 4)):
                body = msgspec.msgpack.encode(
                    (self.shipper.entry.epoch, self.disk.next, rng.randbytes(rng.randint(0, 9)))
                )
                self.disk.append(body)
            if rng.random() < 0.05:
                self.disk.cut(max(self.shipper.safe_upto - 20, 0))
            self._sync_later()
            self._log_state()
        self.world.clock.after(self._pace_s, self._append, life)

    def _sync_later(self) -> None:
        self.world.clock.after(self._sync_s, self._sync, self.life, self.disk, self.disk.next)

    def _sync(self, life: int, disk: LogDisk, upto: int) -> None:
        if life == self.life and disk is self.disk and upto <= disk.next:
            disk.synced = max(disk.synced, upto)
            self._log_state()


def run_standby(seed: int) -> int:
    """Run a seed; return the number of safe records. Raises AssertionError, with the seed, for what does not hold."""
    try:
        return StandbyWorld(seed).run()
    except Exception as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
