"""Tickets: how many samples may be generated now, so that none is too old when it is trained.

A program asks for a ticket before it generates a sample, and uses the ticket when it sends the sample. With a limit of
``lag`` policies and steps of N samples, at most (lag + 1) * N samples are open: being generated, or waiting to be
trained. Fewer would make the trainers wait for samples while programs wait for trainers. The sample that was begun
first is trained first. If an older sample is still being generated, a newer one may not take its place in a step. Else
the older sample would be too old for a later step.

The bound is that of AReaL (Fu et al., 2025, "AReaL: A Large-Scale Asynchronous Reinforcement Learning System").

A group gets all its tickets at once. Else several programs might each hold a part of their tickets, and wait for the
rest for ever. If the samples that are generated or wait do not fill a step, a group gets tickets beyond the bound.
Else trainers would wait for ever. This happens only with a lag of 0, or if a group is larger than a step.

A program reports its counts in full, so that a lost report does no harm, and a new broker learns them again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import UNSET

from streampack.core.protocol.producer_messages import Start

LEARN_S = 3.0
"""Seconds after its start in which a broker gives no tickets and forms no step: programs report their tickets."""


class InFlight(NamedTuple):
    """The samples of the oldest policy that are being generated: the policy, their number, and the program's name."""

    version: int
    samples: int
    producer: str


def fault(message: Start) -> str:
    """Return an error text if the counts of a report contradict each other; empty if they do not."""
    num_open = sum(count for _, count in message.open)
    if message.used <= message.granted <= message.asked and num_open <= message.granted - message.used:
        return ""
    return (
        f"got a report of {message.asked} tickets asked for, {message.granted} given, {message.used} used and "
        f"{num_open} open. Expected no count above the one before, and open tickets among those given and not used"
    )


@dataclass(slots=True)
class _Holder:
    """A program's tickets: ``report`` is its last report, ``granted`` the number that it was given in all."""

    producer: str
    report: Start
    granted: int = 0
    session: int = 0
    untold: deque[tuple[int, int, int]] = field(default_factory=deque)
    """(number of the last one, count, version of the newest policy then) of tickets that the program may not know."""

    @property
    def num_open(self) -> int:
        """Number of tickets that are not used."""
        return self.granted - self.report.used

    @property
    def num_wanted(self) -> int:
        """Number of tickets that the program gets at a time."""
        wanted = max(self.report.asked - self.granted, 0)
        return min(wanted, 1) if self.report.together is UNSET else wanted

    @property
    def num_idle(self) -> int:
        """Number of tickets with which the program begins nothing before it gets more."""
        wanted, together = self.report.asked - self.granted, self.report.together
        return 0 if together is UNSET or wanted <= 0 else max(together - wanted, 0)


@dataclass(slots=True)
class Tickets:
    """The tickets of one feed, by partition ``p``.

    Args:
        lag: Most policies by which a sample may be older than the policy that it trains.
        samples: Samples of a step.
    """

    lag: int
    samples: int
    _holders: dict[int, _Holder] = field(default_factory=dict)
    _turns: deque[int] = field(default_factory=deque)
    """Partitions, the one that was given a ticket last at the end."""

    def report(self, p: int, producer: str, message: Start, session: int = 0) -> None:
        """Take a program's report, unless it is older than the last one in this session."""
        holder = self._holders.get(p)
        if holder is None or holder.producer != producer:
            holder = self._holders[p] = _Holder(producer, message)
        elif holder.session == session and message.number < holder.report.number:
            return
        holder.session, holder.report = session, message
        holder.granted = max(holder.granted, message.granted)
        while holder.untold and holder.untold[0][0] <= message.granted:
            holder.untold.popleft()
        if p not in self._turns:
            self._turns.append(p)

    def leave(self, p: int) -> None:
        """Forget the tickets of a program that has left partition ``p``: what it was generating will not come."""
        if self._holders.pop(p, None) is not None:
            self._turns.remove(p)

    def hand_over(self, p: int, producer: str | None) -> None:
        """Forget the tickets of partition ``p``, unless ``producer``, which holds it now, was given them."""
        if p in self._holders and self._holders[p].producer != producer:
            self.leave(p)

    def granted(self, p: int) -> int | None:
        """Return the number of tickets that the holder of a partition was given; None if it has not asked."""
        return self._holders[p].granted if p in self._holders else None

    @property
    def num_open(self) -> int:
        """Number of tickets that are not used."""
        return sum(holder.num_open for holder in self._holders.values())

    def generated(self) -> Iterator[InFlight]:
        """Yield the samples that are being generated, or may be begun with a ticket that was given."""
        for holder in self._holders.values():
            yield from (InFlight(version, count, holder.producer) for version, count in holder.report.open if count)
            for last, count, version in holder.untold:
                yield InFlight(version, min(count, last - holder.report.granted), holder.producer)

    def in_the_way(
        self, candidate: int, incomplete: Iterable[InFlight], policy: int, filled: int, size: int = 1
    ) -> InFlight | None:  # fmt: skip
        """Return samples for which the next step keeps room, so that a newer sample must wait; None if there are none.

        A sample of policy v must be in the step that trains policy v + lag, or in an earlier one. The places
        up to that step must suffice for all samples of policy v or older. Else a newer sample may not take one.

        Args:
            candidate: Policy of the newer samples.
            incomplete: Samples that wait for values.
            policy: Version of the policy that the next step trains.
            filled: Samples that the next step has already.
            size: Number of the newer samples, which are admitted together.
        """
        before = sorted(older for older in (*self.generated(), *incomplete) if older.version < candidate)
        count = 0
        for older in before:
            count += older.samples
            if count + size > self.samples * (older.version + self.lag - policy + 1) - filled:
                return before[0]
        return None

    def grant(self, waiting: int, version: int) -> set[int]:
        """Give tickets in turn; return the partitions that got some.

        Args:
            waiting: Number of samples that wait to be trained.
            version: Version of the newest policy that programs are told; 0 if there is none.
        """
        used, most = waiting + self.num_open, (self.lag + 1) * self.samples
        running = used - sum(holder.num_idle for holder in self._holders.values())
        changed, idle = set[int](), 0
        while idle < len(self._turns):
            p = self._turns[0]
            holder = self._holders[p]
            count = holder.num_wanted
            if count > most - used and running >= self.samples:
                break  # the others wait, too: else small groups would take the place of a large one again and again
            self._turns.rotate(-1)
            if count <= 0:
                idle += 1
                continue
            running += count + holder.num_idle
            holder.granted += count
            holder.untold.append((holder.granted, count, version))
            used, idle = used + count, 0
            changed.add(p)
        return changed
