"""A job of a simulated run: one feed, how often it is iterated, and what its ranks must get each time.

A feed with a job that nobody reads is there to be in the way of the others, and must not be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from streampack.core.messages import Envelope, StepPart
from tests.simulation.data import case, reference, shards_of

if TYPE_CHECKING:
    from tests.simulation.processes import ClientProcess
    from tests.simulation.world import World


class Job:
    """What is known of one feed's ranks. ``breaks`` has the steps after which they break an iteration off."""

    def __init__(self, world: World, feed: str, number: int, rounds: int, prefix: str = "") -> None:
        rng = world.rng
        self.world, self.feed, self.rounds = world, feed, rounds
        self.case, self.reference = case(number, prefix), reference(number)
        self.num_ranks = self.case.dp * self.case.cp if rounds else 0
        self.prefetch = rng.randint(1, 3)
        self.work_s = rng.choice((0.02, 0.1, 0.5)) if rounds == 1 else 0.02
        self.lockstep = rng.random() < 0.6
        self.early_leavers = rng.random() < 0.4
        self.breaks = {r: rng.randint(1, len(self.reference.steps)) for r in range(rounds - 1) if rng.random() < 0.4}
        self.clients: dict[int, ClientProcess] = {}
        self.launch = 0
        """Counts how often all trainers were started."""
        self.whole: set[int] = set()
        """Ranks that have returned every step of some iteration."""
        self.ended: dict[int, tuple[int, bytes]] = {}
        """How the last iteration ended, by rank."""
        self._dealt: dict[tuple[int, int], list[int]] = {}
        self._had: dict[int, set[tuple[int, int]]] = {}
        self._taken: dict[tuple[int, int], set[int]] = {}

    @property
    def over(self) -> bool:
        return len(self.ended) == self.num_ranks

    def rank(self, client: ClientProcess) -> int:
        return client.mesh.dp_rank * self.case.cp + client.mesh.cp_rank

    def check(self) -> None:
        """All ranks have ended alike, and every iteration was dealt whole, up to where it was broken off."""
        for end in self.ended.values():
            assert end == (len(self.reference.steps), self.reference.chain), "ranks ended at different steps"
        for round_ in range(self.rounds):
            for step in range(self.breaks.get(round_, len(self.reference.steps))):
                had = {(step, d) for d in range(self.case.dp)}
                assert had <= self._had[round_], f"step {step} of iteration {round_} was not dealt whole"
        for step in range(len(self.reference.steps) if self.rounds else 0):
            numbers = sorted(n for d in range(self.case.dp) for n in self._dealt[step, d])
            assert numbers == list(range(len(self.reference.steps[step].packs))), f"step {step} was not dealt whole"
        dropped = self.world.broker.core.feeds[self.feed].totals.dropped_samples
        if self.rounds == 1 and not self.launch:  # else the tail may have been formed more than once
            assert dropped in (0, self.reference.num_dropped)

    def delivered(self, client: ClientProcess, parts: tuple[Envelope, ...]) -> StepPart:
        """Exactly the reference's step: digests, samples, tokens, denominators; the same packs each time."""
        step = parts[0].message
        assert isinstance(step, StepPart)
        number, expected = step.step, self.reference.steps[step.step]
        of = {self.world.rounds[self.feed, part.epoch, part.fence] for part in parts}
        assert of == {client.round}, f"R5: step {number} of iterations {of} was taken in iteration {client.round}"
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
        self._had.setdefault(client.round, set()).add((number, client.mesh.dp_rank))
        self._check_joined(client, number)
        self.world.note("step", client.name, client.round, number, step.digest)
        return step

    def _check_joined(self, client: ClientProcess, number: int) -> None:
        """Nobody is in an iteration while another rank is still in the one before."""
        behind = [other.name for other in self.clients.values() if other.round < client.round]
        assert not behind, f"step {number} of iteration {client.round} came while {behind} were in the one before"

    def take(self, client: ClientProcess, step: int) -> None:
        """A rank begins a step; with ``lockstep`` all ranks are done with it together, as collectives have it."""
        delay, clock, key = self.world.rng.expovariate(1 / self.work_s), self.world.clock, (client.round, step)
        if not self.lockstep:
            clock.after(delay, client.work_done, *key)
            return
        taken = self._taken.setdefault(key, set())
        complete = len(taken) == self.num_ranks
        taken.add(self.rank(client))
        if complete:
            clock.after(delay, client.work_done, *key)
        elif len(taken) == self.num_ranks:
            for other in self.clients.values():
                clock.after(delay, other.work_done, *key)

    def returned(self, client: ClientProcess) -> bool:
        """Is a rank through with its iteration? If so it begins the next, or it was the last."""
        last = client.ended is not None and client.done >= client.ended[0]
        if last:
            self.whole.add(self.rank(client))
        if client.round + 1 < self.rounds:
            if not last and client.done < self.breaks.get(client.round, 1 << 30):
                return False
            self.world.clock.after(self.world.rng.expovariate(20), client.again, client.round)
        elif last:
            assert client.ended is not None
            self.ended[self.rank(client)] = client.ended
            attached = all(other.alive and other.session.attached is not None for other in self.clients.values())
            if self.early_leavers and self.world.clock.now > self.world.quiet_at and attached:
                client.leave()
        return last or client.round + 1 < self.rounds
