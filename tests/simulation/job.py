"""A job of a simulated run: one feed, how often it is iterated, and what its ranks must get each time.

All its ranks may be killed and started again from a checkpoint, as another mesh: its *life* counts that. A feed
with a job that nobody reads is there to be in the way of the others, and must not be.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from crc32c import crc32c

from streampack.core.model.fields import Field
from streampack.core.model.keys.planning_keys import MediaLimits
from streampack.core.model.mesh import Mesh
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.step_part import StepPart
from streampack.core.protocol.trainer_messages import State
from streampack.core.serve.rank_reader import Ranks
from streampack.core.sessions.client_events import Broken
from tests.simulation.broker import FIRST_EPOCH
from tests.simulation.client import Checkpoint, ClientProcess
from tests.simulation.data import Case, Id, Shard, case, shards_of
from tests.simulation.log_checks import check_log
from tests.simulation.offline import Reference, check_groups, packed, reference, row_of

if TYPE_CHECKING:
    from tests.simulation.world import World

RESTART_S = 40.0
"""So long after all ranks were started anew one may be refused because of what is left of the old ones."""


def is_part(ids: list[Id], packs: tuple[list[Id], ...]) -> bool:
    """Are these some samples of one pack, in its order, or none?"""
    whole = next((pack for pack in packs if ids and ids[0] in pack), [])
    return ids == [one for one in whole if one in ids]


class Job:
    """What is known of one feed's ranks. ``breaks`` has the steps after which they break an iteration off."""

    def __init__(
        self, world: World, feed: str, number: int, rounds: int, prefix: str = "", this: Case | None = None
    ) -> None:  # fmt: skip
        rng = world.rng
        self.world, self.feed, self.rounds = world, feed, rounds
        self.case = case(number, prefix) if this is None else this
        self.reference: Reference | None = reference(number) if self.case.rules.merge == "schedule" else None
        """What must be served; known at the end, where arrival decides."""
        self._seen: dict[int, list[tuple[StepPart, list[Shard]]]] = {}
        """Deliveries that are still to be compared with it."""
        self.dp, self.cp = self.case.dp, self.case.cp
        self.tp = self.pp = 1
        self.prefetch = rng.randint(1, 3)
        self.work_s = rng.choice((0.02, 0.1, 0.5)) if rounds == 1 else 0.02
        self.lockstep = rng.random() < 0.6
        self.early_leavers = rng.random() < 0.4
        most = len(self.reference.steps) if self.reference is not None else 6
        self.breaks = {r: rng.randint(1, most) for r in range(rounds - 1) if rng.random() < 0.4}
        self.saves = rng.choice((0.0, 0.1, 0.3))
        self.commits = rounds == 1 and rng.random() < 0.7
        self.checkpoints: list[Checkpoint] = [Checkpoint()]
        self.life = 0
        self.restarted_at = -RESTART_S
        self.clients: dict[Ranks, ClientProcess] = {}
        self.started: dict[str, ClientProcess] = {}
        """Every process that there ever was, by name."""
        self._seated: dict[Ranks, ClientProcess] = {}
        """Who was told last that a rank is its own."""
        self.whole: set[Ranks] = set()
        """Ranks that have returned every step of some iteration."""
        self.ended: dict[Ranks, tuple[int, bytes]] = {}
        """How the last iteration ended, by rank."""
        self.through = rounds == 0
        """Every rank has returned every step of some iteration."""
        self._told: list[int] = []
        self._kept: list[int] = []
        self._given_up = 0
        """Checkpoints before this step were given up in an earlier life, and stay so."""
        self._returned_before = 0
        self._dealt: dict[tuple[int, int, int, int], list[tuple[int, list[Id]]]] = {}
        """By step, dp, pp and dp rank, of each pack its number and its samples."""
        self._shapes: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        """By step, dp and pp, of each padded micro-batch its tokens and those of a row."""
        self._bytes: dict[tuple[Any, ...], int] = {}
        """Checksum of each message of a step for the ranks of one pair of a dp rank and a cp rank."""
        self._had: dict[int, set[tuple[int, int, int]]] = {}
        self._taken: dict[tuple[int, int], set[Ranks]] = {}

    @property
    def num_ranks(self) -> int:
        return self.dp * self.cp * self.tp * self.pp if self.rounds else 0

    @property
    def over(self) -> bool:
        return len(self.ended) == self.num_ranks

    def choose_tp_and_pp(self) -> None:
        """With relays, several ranks may read the same packs; without, the simulation would show nothing new."""
        relays = self.world.relays
        if relays is not None:
            rng, few = relays.rng, self.dp * self.cp <= 4
            self.tp = 2 if relays.wide else rng.choice((1, 2, 2) if few else (1, 1, 2))
            staged = self.case.rules.shape == "fixed" and self.dp * self.cp * self.tp <= 4 and not self.case.dynamic
            self.pp = rng.choice((1, 1, 1, 2, 3)) if staged else 1

    def meshes(self) -> list[Mesh]:
        """Of every rank."""
        if not self.rounds:
            return []
        sizes = {"dp": self.dp, "cp": self.cp, "tp": self.tp, "pp": self.pp}
        return [
            Mesh(**sizes, dp_rank=dp, cp_rank=cp, tp_rank=tp, pp_rank=pp)
            for pp, dp, cp, tp in product(range(self.pp), range(self.dp), range(self.cp), range(self.tp))
        ]

    def check(self) -> None:
        """All ranks have ended alike, and every iteration was dealt whole, up to where it was broken off.

        What was served is the offline packing of the order that the log recorded, and so is what the log says of it.
        """
        if not self.rounds:
            return
        disk = self.world.disk
        if self.reference is None:
            self.reference = self._what_is_to_be_served()
            for seen in self._seen.values():
                for each, shards in seen:
                    self._compare(self.reference, each, shards)
        if disk is not None and not self.world.lost_disk:
            check_log(self.feed, self.case, self.reference, disk)
        for num_steps, chain in self.ended.values():
            end = num_steps, chain or bytes(16)  # a rank that had no step has no chain
            assert end == (len(self.reference.steps), self.reference.chain), "R8: ranks ended at different steps"
        for iteration in range(self.rounds):
            for step in range(min(self.breaks.get(iteration, 1 << 30), len(self.reference.steps))):
                had = self._had[iteration]
                whole = any(all((step, dp, rank) in had for rank in range(dp)) for dp, _ in self.case.meshes)
                assert whole, f"conservation: step {step} of iteration {iteration} was not dealt whole"
        for step, dp, pp, rank in self._dealt:
            if step >= len(self.reference.steps):
                raise AssertionError(f"R8: step {step} was served after the end")
            if rank == 0 and all((step, dp, pp, other) in self._dealt for other in range(dp)):
                self._check_dealt(self.reference, step, [self._dealt[step, dp, pp, d] for d in range(dp)])
        dropped, left = self.world.broker.core.feeds[self.feed].figures.totals.dropped_samples, len(self.reference.left)
        if self.rounds == 1 and not self.life:  # a broker counts what is cut from where it began
            counted = dropped == left if self.world.broker.epoch == FIRST_EPOCH else dropped <= left
            assert counted, f"tail: the broker counts {dropped} samples left over, expected {left}"

    def _what_is_to_be_served(self) -> Reference:
        if self.reference is not None:
            return self.reference
        assert self.world.disk is not None
        return packed(self.case, self.world.disk)

    @property
    def read_out(self) -> bool:
        """Has every rank returned every step, of an iteration before or of this one? It may not know that it was the
        last: the end may be on its way, to one that hangs or is killed.
        """
        return self.through or self._returned() >= len(self._what_is_to_be_served().steps)

    def _returned(self) -> int:
        """Steps that every rank has returned, now or in an earlier life: be it by a process that was replaced, and had
        woken up before it lost its rank.
        """
        if len(self.clients) < self.num_ranks:
            return self._returned_before
        best: dict[Ranks, tuple[int, int]] = {}
        for each in self.started.values():
            if each.life == self.life:
                best[each.mesh.ranks] = max(best.get(each.mesh.ranks, (0, 0)), (each.iteration, each.done))
        return max(self._returned_before, min(best.values())[1])

    def _check_dealt(self, reference: Reference, step: int, ranks: list[list[tuple[int, list[Id]]]]) -> None:
        """Every pack of a step has a number of its own, every sample is in one, and every rank has as many."""
        what, batch = f"step {step} was not dealt whole over dp={len(ranks)}", self.case.rules.batch
        packs = [pack for rank in ranks for pack in rank]
        if self.case.dynamic is not None:  # each rank of a group has the pack
            packs = [*dict(packs).items()]
        assert sorted(pack[0] for pack in packs) == list(range(len(packs))), f"conservation: {what}"
        ids = sorted(one for _, pack in packs for one in pack)
        assert ids == sorted(one for pack in reference.ids[step] for one in pack), f"conservation: {what}"
        check_groups([pack for _, pack in packs], reference.follows)
        if self.case.dynamic is not None:
            assert len({len(rank) for rank in ranks}) == 1, f"DEAL: {what}"
        elif batch is None:
            assert len(packs) == len(reference.steps[step].packs), f"conservation: {what}"
        else:
            (count,) = {len(rank) for rank in ranks}
            assert count % (batch.micro_batch_multiple or 1) == 0, f"DEAL: {what}"
            assert count >= batch.min_micro_batches, f"DEAL: {what}"

    @property
    def ranks_of_packs(self) -> set[int]:
        """How many ranks had the same pack of a step."""
        return set(Counter((*at[:3], number) for at, packs in self._dealt.items() for number, _ in packs).values())

    def delivered(self, client: ClientProcess, parts: tuple[Envelope, ...]) -> StepPart:
        """Exactly the reference's step: digests, samples, tokens, denominators; the same packs each time."""
        step = parts[0].message
        assert isinstance(step, StepPart)
        for part in parts:
            self.compare_bytes(client.mesh, part)
        number, dp, pp = step.step, client.mesh.dp, client.mesh.pp
        of = {self.world.rounds[self.feed, part.epoch, part.fence] for part in parts}
        assert of == {client.iteration}, (
            f"R5: step {number} of iterations {of} was taken in iteration {client.iteration}"
        )
        shards = shards_of(parts, self.case, client.mesh)
        if self.reference is not None:
            self._compare(self.reference, step, shards)
        else:
            seen = self._seen.setdefault(number, [])
            seen.append((step, shards))
            first = seen[0][0]
            assert (step.digest, step.chain) == (first.digest, first.chain), f"immutability: step {number} is another"
        numbers = [(shard.number, shard.ids) for shard in shards]
        line = (dp, client.mesh.dp_rank)
        if self.case.dynamic is not None:
            line = (dp * client.mesh.cp, client.mesh.dp_cp_rank)
        dealt = self._dealt.setdefault((number, line[0], pp, line[1]), numbers)
        assert dealt == numbers, f"R4: step {number} was dealt otherwise the second time"
        if self.case.rules.padded:
            shapes = [(shard.width, shard.align) for shard in shards]
            assert self._shapes.setdefault((number, dp, pp), shapes) == shapes, f"DEAL: step {number}: shapes differ"
        self._had.setdefault(client.iteration, set()).add((number, dp, client.mesh.dp_rank))
        if client.in_job:
            self._check_joined(client, parts[0])
        self.world.note("step", client.name, client.iteration, number, step.digest)
        return step

    def compare_bytes(self, mesh: Mesh, envelope: Envelope) -> None:
        """A message of a step is the same, byte for byte, each time and over each way: a rank gets through a relay what
        it would get directly.
        """
        part = envelope.message
        assert isinstance(part, StepPart)
        is_middle = 0 < mesh.pp_rank < mesh.pp - 1
        has_media = bool(self.case.rules.media_fields) and mesh.pp_rank == 0
        key = part.step, part.part, mesh.dp, mesh.cp, mesh.pp, mesh.dp_rank, mesh.cp_rank, is_middle, has_media
        crc = crc32c(msgspec.msgpack.encode(msgspec.structs.replace(part, request=0, lineage=0)))
        for frame in envelope.payload:
            crc = crc32c(memoryview(frame), crc)
        assert self._bytes.setdefault(key, crc) == crc, (
            f"bytes: part {part.part} of step {part.step} for {mesh} differs"
        )

    def _compare(self, reference: Reference, step: StepPart, shards: list[Shard]) -> None:
        number = step.step
        assert number < len(reference.steps), f"R8: step {number} was served after the end"
        expected = reference.steps[number]
        assert step.digest == expected.digest, f"immutability: step {number} has another digest"
        assert step.chain == expected.chain, f"immutability: step {number} has another chain"
        assert (step.num_samples, step.num_loss_tokens) == (expected.num_samples, expected.num_loss_tokens)
        for shard in shards:
            samples = [reference.samples[one] for one in shard.ids]
            if self.case.dynamic is not None:
                of_step = {one for pack in reference.ids[number] for one in pack}
                assert of_step.issuperset(shard.ids), "DEAL: a sample is of another step"
            elif self.case.rules.batch is None:
                assert shard.ids == reference.ids[number][shard.number], "immutability: a pack has other samples"
            elif self.case.rules.padded:
                assert all([one] in reference.ids[number] for one in shard.ids), "DEAL: a row is of another step"
            else:
                assert is_part(shard.ids, reference.ids[number]), "DEAL: a pack is no part of one that was formed"
            own = [reference.samples[one][reference.shared[one] :] for one in shard.ids]
            row = row_of(self.case, own, shard.align)
            assert shard.tokens is None or np.array_equal(row[shard.positions], shard.tokens), (
                "immutability: a pack has other tokens"
            )
            for field in self.case.rules.fields if shard.tokens is not None else ():
                self._compare_field(reference, field, shard)
            if self.case.rules.media_fields:
                self._compare_media(reference, shard)
            assert shard.num_loss_tokens == sum(len(sample) - 1 for sample in samples)

    def _compare_field(self, reference: Reference, field: Field, shard: Shard) -> None:
        """A rank gets the values that were given for its samples."""
        values = [reference.values[field.name][one] for one in shard.ids]
        if field.axis == "token":
            expected = row_of(self.case, values, shard.align, field)[shard.positions]
        else:
            expected = np.concatenate([*values, np.zeros(0, field.storage)])
        assert np.array_equal(expected, shard.values[field.name]), f"immutability: a pack has other {field.name}"

    def _compare_media(self, reference: Reference, shard: Shard) -> None:
        """A first stage of a pipeline gets the media of its samples, and no pack exceeds a limit."""
        media = [reference.media[one] for one in shard.ids]
        assert shard.media is None or shard.media == [each.data for each in media], "immutability: other media"
        items, patches = (sum(counts) for counts in zip((0, 0), *(each.counts for each in media), strict=True))
        limits = self.case.rules.limits or MediaLimits()
        assert items <= (limits.items or items), f"limits: a pack has {items} items"
        assert patches <= (limits.patches or patches), f"limits: a pack has {patches} patches"

    def _chain(self, step: int) -> bytes:
        """Digest of all steps before ``step``, as far as is known."""
        if not step:
            return bytes(16)
        if self.reference is not None:
            return self.reference.steps[step - 1].chain
        return self._seen[step - 1][0][0].chain

    def _check_joined(self, client: ClientProcess, part: Envelope) -> None:
        """Nobody is in an iteration while another rank is still in the one before, of which the broker could know."""
        there = self.world.there[self.feed, part.epoch, part.fence]
        behind = [other for other in self.clients.values() if other.alive and other.iteration < client.iteration]
        wrong = [other.name for other in behind if not self._is_hidden(other, there)]
        assert not wrong, f"iteration {client.iteration} is served while {wrong} were in the one before"

    def _is_hidden(self, client: ClientProcess, there: dict[str, bool]) -> bool:
        """Did one that all ranks were started anew without, and that was still heard, hold its rank as an attempt
        began, and had the process itself not come, or not come again after it was refused?
        """
        held = (self.started[name] for name, holds in there.items() if holds)
        old = any(other.life < self.life and other.mesh.ranks == client.mesh.ranks for other in held)
        return old and client.name not in there

    def take(self, client: ClientProcess, step: int) -> None:
        """A rank begins a step; with ``lockstep`` all ranks are done with it together, as collectives have it."""
        delay, clock, key = self.world.rng.expovariate(1 / self.work_s), self.world.clock, (client.iteration, step)
        if not self.lockstep:
            clock.after(delay, client.work_done, *key)
            return
        taken = self._taken.setdefault(key, set())
        complete = len(taken) == self.num_ranks
        taken.add(client.mesh.ranks)
        if complete:
            clock.after(delay, client.work_done, *key)
        elif len(taken) == self.num_ranks:
            for other in self.clients.values():
                clock.after(delay, other.work_done, *key)

    def returned(self, client: ClientProcess) -> bool:
        """Is a rank through with its iteration? If so it begins the next, or it was the last."""
        last = client.ended is not None and client.done >= client.ended[0]
        if last:
            self.whole.add(client.mesh.ranks)
            self.through = self.through or len(self.whole) == self.num_ranks
        if client.iteration + 1 < self.rounds:
            if not last and client.done < self.breaks.get(client.iteration, 1 << 30):
                return False
            self.world.clock.after(self.world.rng.expovariate(20), client.again, client.iteration)
        elif last:
            assert client.ended is not None
            self.ended[client.mesh.ranks] = client.ended
            if self.early_leavers and self.world.clock.now > self.world.quiet_at and self._all_attached():
                client.leave()
        return last or client.iteration + 1 < self.rounds

    def _all_attached(self) -> bool:
        """Is every rank known to a broker that is alive? One that is started after a rank has left waits for it."""
        broker = self.world.broker
        return broker.alive and all(
            other.alive and other.session.attached is not None and other.session.epoch == broker.epoch
            for other in self.clients.values()
        )

    # Going back

    def wants_checkpoint(self) -> bool:
        """Does a rank take a checkpoint here?"""
        return self.saves > 0 and self.world.rng.random() < self.saves

    def saved(self, client: ClientProcess, state: State) -> bool:
        """A rank has what its checkpoint must hold; is it one that all may begin from?"""
        assert state.chain == self._chain(state.step), f"R10: a checkpoint before step {state.step} holds another chain"
        taken = state.snapshot
        assert taken is None or taken.step <= state.step, "R10: a checkpoint holds a later snapshot"
        saved = client.in_job and client.done == state.step
        if saved:
            self.checkpoints.append(Checkpoint(client.iteration, state.step, state.chain, taken))
            self.world.note("saved", client.name, state.step, None if taken is None else taken.step)
        return saved

    @property
    def _slowest(self) -> tuple[int, int]:
        """What every rank has done: (iteration, steps)."""
        return min((client.iteration, client.done) for client in self.clients.values())

    def durable(self) -> int:
        """The newest checkpoint that every rank has come to, 0 if there is none: a part of one is none, and it is what
        a launcher may have to go back to once older ones are given up.
        """
        if len(self.clients) < self.num_ranks:
            return 0
        return max(each.step for each in self.checkpoints if (each.iteration, each.step) <= self._slowest)

    def tells(self, step: int) -> None:
        """A rank says that a checkpoint is durable."""
        self._told.append(step)

    def committed(self, step: int) -> None:
        """The broker has it."""
        self._kept.append(step)

    @property
    def has_snapshot(self) -> bool:
        """Can all ranks go back to a checkpoint that holds a snapshot?"""
        return len(self.clients) == self.num_ranks and any(each.snapshot is not None for each in self.can_go_back())

    def can_go_back(self) -> list[Checkpoint]:
        """Checkpoints that a launcher may start all ranks from: those not later than the slowest rank, and of those
        committed the last few (R7).
        """
        slowest, oldest = self._slowest, self._oldest()
        found = [each for each in self.checkpoints if (each.iteration, each.step) <= slowest and each.step >= oldest]
        if self.case.rules.merge == "schedule":  # any step is as good as one that was saved
            step = self.world.rng.randint(0, slowest[1])
            found.append(Checkpoint(slowest[0], step, self._chain(step) if step else b""))
        if self.world.brings_snapshots and any(each.snapshot is not None for each in found):
            return [each for each in found if each.snapshot is not None]
        assert found, f"R7: no checkpoint from {oldest} on is one that all ranks have come to, the slowest to {slowest}"
        return found

    def _oldest(self) -> int:
        """The first step that the broker may still have to begin from, by what it was told."""
        if self.case.rules.merge != "arrival" or not self._told:
            return self._given_up
        last = sorted(set(self._told))[-self.world.broker.core.feeds[self.feed].plan.keeps :][0]
        return max(self._given_up, last, min(self._kept) if self._kept else max(self._told))

    def gave_up(self, client: ClientProcess) -> bool:
        """Does a rank ask for a checkpoint that the job has given up since? A real rank cannot: it waits for the answer
        before it goes on, and so no later checkpoint is durable.
        """
        kept = sorted(set(self._told))[-self.world.broker.core.feeds[self.feed].plan.keeps :]
        return bool(kept) and client.asked_state < kept[0]

    def go_back(self, begin: Checkpoint) -> None:
        """All ranks are gone, and new ones are started from ``begin``, perhaps as another mesh."""
        rng, world = self.world.rng, self.world
        self._given_up, self._returned_before = self._oldest(), self._returned()
        self.life += 1
        self.restarted_at = world.clock.now
        self.checkpoints = [
            each for each in self.checkpoints if (each.iteration, each.step) <= (begin.iteration, begin.step)
        ]
        self._told = [step for step in self._told if step <= begin.step]
        self._kept = [step for step in self._kept if step <= begin.step]
        self.clients, self._taken = {}, {}
        self.whole.clear()
        self.ended.clear()
        if rng.random() < 0.5:
            self.dp, self.cp = rng.choice(self.case.meshes)
            self.choose_tp_and_pp()
        world.note("goes back", self.feed, begin.iteration, begin.step, self.dp, self.cp)
        for mesh in self.meshes():
            snapshot = begin.snapshot if rng.random() < 0.7 else None
            mine = Checkpoint(begin.iteration, begin.step, begin.chain, snapshot)
            world.clock.after(rng.uniform(0, 3), world.start_client, self, mesh, mine, self.life)

    def seated(self, name: str) -> None:
        """The broker has said to a process that its rank is its own."""
        client = self.started[name]
        if any(other.mesh.sizes != client.mesh.sizes for other in self._seated.values()):
            self._seated.clear()
        self._seated[client.mesh.ranks] = client

    def _is_overtaken(self, client: ClientProcess) -> bool:
        """Has a process that was replaced returned more, before it was known that it was?"""
        mine = [other for other in self.started.values() if other.mesh.ranks == client.mesh.ranks]
        return any(
            not other.in_job and (other.iteration, other.done) > (client.iteration, client.done) for other in mine
        )

    def refused(self, client: ClientProcess, broken: Broken) -> None:
        """The rank is still held by one that is gone, or that woke up and took it while this one hung: a launcher tries
        again, with all ranks where others have begun or gone on with that one. Of what was replaced nobody cares.
        """
        client.kill()
        if not client.in_job:
            fenced = client.fenced_by == self.world.broker.epoch
            assert broken.code == "fenced" or not fenced, f"R5: a replaced process was not told so: {broken}"
            return
        assert "the log still has" not in broken.detail, f"R7: a checkpoint cannot be gone back to: {broken.detail}"
        if broken.code == "fenced":
            taken = self._seated.get(client.mesh.ranks) or next(iter(self._seated.values()))
            assert not taken.in_job, f"R5: {client.name} has lost its rank, which none that it replaced has taken"
        lately = self.world.clock.now < max(self.restarted_at, self.world.quiet_at) + RESTART_S
        anew = (self.life and lately) or self._is_overtaken(client)
        assert broken.code in ("rank_taken", "fenced") or anew, broken
        assert broken.code in ("rank_taken", "fenced", "mesh", "step_gone", "round_gone"), broken
        if broken.code in ("rank_taken", "fenced"):
            self.world.clock.after(3.0, self.world.start_client, self, client.mesh, client.state(), self.life, client)
        else:
            self.world.clock.after(3.0, self.world.faults.restart, self, self.life)
