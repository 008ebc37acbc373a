"""One run under fire, from its files to its end: what died is started again, until every rank has had its last step.

Trainers come back as torchelastic brings them: one that dies ends the others, and all go on from their last
common checkpoint; or, where the job says so, in place, alone. Time is read here and nowhere else.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field

from tests.integration.running import streampack
from tests.soak.fire import Fire
from tests.soak.job import Job
from tests.soak.links import Link, links_of
from tests.soak.members import OWN_PLACE, Member, last_checkpoint, members_of, reach, tell_trainer

TURN_S = 0.02
FINISH_S = 150.0
"""What a run may take to end once nobody shoots at it."""
PRODUCERS = 2
LAST = ("scorer", "subscriber")
"""Kinds of programs that end by themselves once they have done or read everything."""


class Unfinished(Exception):
    """A run did not end, or a process of it ended as none should."""


@dataclass
class Run:
    """``go`` until the end; ``collateral`` counts what the launcher ended because another rank had died."""

    job: Job
    fire: Fire
    fire_s: float
    collateral: int = 0
    attempts: int = 1
    seconds: float = 0.0
    members: list[Member] = field(default_factory=list)
    links: dict[str, Link] = field(default_factory=dict)
    """By the name of the member that reaches the broker over it; none of them but on TCP."""

    def go(self) -> None:
        """Raises Unfinished."""
        self.members = members_of(self.job, PRODUCERS)
        self.trainers = [member for member in self.members if member.kind == "trainer"]
        with links_of(self.job, self.members) as self.links:
            for member in self.members:
                if member.name in self.links:
                    reach(self.job, member, self.links[member.name].proxy.endpoint)
            self._go()

    def _go(self) -> None:
        burning = self.job.folder / "fire"
        burning.touch()
        for rank in range(len(self.trainers)):
            self._tell_trainer(rank, -1)
        began = time.monotonic()
        self.fire.wait(began + 1.0)
        try:
            while not self._over():
                now = time.monotonic()
                if now > began + self.fire_s:
                    burning.unlink(missing_ok=True)
                elif now > self.fire.next_at:
                    self.fire.act(self.members, now, list(dict.fromkeys(self.links.values())))
                self._supervise(now)
                if now > began + self.fire_s + FINISH_S:
                    raise Unfinished(f"not over {FINISH_S:.0f} s after the last shot")
                time.sleep(TURN_S)
            self.seconds = time.monotonic() - began
            self._end()
            self._verify()
        finally:
            for member in self.members:
                member.kill()

    def _over(self) -> bool:
        last = [*self.trainers, *(member for member in self.members if member.kind in LAST)]
        return all(not member.alive and member.start_at is None and member.codes[-1:] == [0] for member in last)

    def _tell_trainer(self, rank: int, resume: int) -> None:
        link = self.links.get(self.trainers[rank].name)
        tell_trainer(self.job, rank, resume, link.proxy.endpoint if link is not None else "")

    def _supervise(self, now: float) -> None:
        for link in self.links.values():
            link.look(now)
        for member in self.members:
            if member.start_at is not None and now >= member.start_at:
                member.start()
            if member.continue_at is not None and now >= member.continue_at and member.alive:
                member.signal(signal.SIGCONT)
                member.continue_at = None
            code = member.ended() if member.alive else None
            if code is None:
                continue
            if member.kind == "trainer":
                self._trainer_ended(member, code, now)
            elif member.kind not in ("flood", "changer", "pusher", *LAST) or code:
                if member.kind == "broker" and code != -signal.SIGKILL:
                    raise Unfinished(f"the broker ended with {code}")
                member.start_at = now + self.fire.delay()

    def _trainer_ended(self, member: Member, code: int, now: float) -> None:
        if code == 0:
            return
        if self.job.in_place:
            self._tell_trainer(self.trainers.index(member), OWN_PLACE)
            member.start_at = now + self.fire.delay()
            return
        for other in self.trainers:
            if other.alive:
                self.collateral += 1
                other.kill()
                other.ended()
        self.attempts += 1
        resume, start_at = last_checkpoint(self.job), now + self.fire.delay()
        for rank, other in enumerate(self.trainers):
            self._tell_trainer(rank, resume)
            other.start_at = start_at

    def _verify(self) -> None:
        """The ledger, made from the log alone, finds every sample exactly once. Raises Unfinished if not."""
        done = streampack("ledger", "verify", "-c", self.job.broker_config, timeout_s=120.0)
        if done.returncode:
            raise Unfinished(f"streampack ledger verify: {done.stdout} {done.stderr}")

    def _end(self) -> None:
        """Gently: nobody needs them any more. Raises Unfinished if one does not go, or fails."""
        for kind in ("flood", "changer", "pusher", "relay", "producer", "broker"):
            going = [member for member in self.members if member.kind == kind and member.alive]
            for member in going:
                member.signal(signal.SIGCONT)
                member.signal(signal.SIGTERM)
            until = time.monotonic() + 30.0
            while any(member.process is not None and member.process.poll() is None for member in going):
                if time.monotonic() > until:
                    raise Unfinished(f"the {kind} did not end in 30 s after SIGTERM")
                time.sleep(TURN_S)
            for member in going:
                code = member.ended()
                if code not in (0, -signal.SIGTERM if kind != "broker" else 0):  # it may be about to begin, or to end
                    raise Unfinished(f"the {kind} ended with {code} after SIGTERM: {member.said(400)}")
