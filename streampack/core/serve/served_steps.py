"""The steps of one feed that ranks may read, and the number of steps that each rank has returned.

A step is kept until every rank has returned it. After a process was replaced, steps are kept until the other ranks send
a message: more processes may be replaced, and go back.

The class knows the numbers of steps and packs, and no tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from msgspec import UNSET

from streampack.core.deal.deal_stats import DealtFigures
from streampack.core.deal.dynamic_cp.cp_plan import GroupRequest
from streampack.core.deal.step_cache import KeptSteps
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64, SampleTable
from streampack.core.model.steps import PlannedStep
from streampack.core.protocol.effects import Release
from streampack.core.protocol.events import Effect
from streampack.core.protocol.trainer_messages import End, EndForMesh
from streampack.core.serve.progress import Progress
from streampack.core.serve.rank_reader import Ranks, Reader, Receiver
from streampack.core.serve.rank_registry import RankRegistry, rank_name
from streampack.core.stats.data_wait import Missing, NextWaits, Starvation

KEPT_CHAINS = 4096
"""Number of the last steps whose digests are remembered."""
SHOWN_EVERY_S = 5.0
"""Steps in which a text counts the seconds of a silence: people need not read each second."""
OUT = 1 << 62
"""Number of returned steps of a rank outside the iteration: more than any step, so that no step is kept for it."""


class RankProgress(NamedTuple):
    """The progress of one rank's reader, with the metrics of its client.

    Steps count in ``iteration``; ``silent_s`` is the seconds since the reader's last message. ``queued_bytes`` is 0
    if ``by_relay``: the parts are in flight to the relay.
    """

    ranks: Ranks
    where: str
    iteration: int
    done_upto: int
    have_upto: int
    queued_bytes: int
    silent_s: float
    stats: dict[str, float]
    starvation: Starvation | None
    by_relay: bool = False


class ServedSteps:
    """The steps of one feed, from the moment that they are formed until every rank has returned them."""

    def __init__(self, feed: str, rules: Rules, layout: str, table: SampleTable, registry: RankRegistry) -> None:
        self._feed, self._registry = feed, registry
        self.kept = KeptSteps(feed, rules, layout, table)
        self.returned = Progress()
        """Number of steps that each rank of the attempt has returned; empty before the first attempt."""
        self.unheard: set[Ranks] = set()
        """Ranks without a message since a process was replaced: all processes may be restarting."""
        self._heard: list[Ranks] = []
        """The other ranks of the attempt, if a process was replaced in it."""
        self._chains: dict[int, bytes] = {}
        """Digest of all steps before a step, by its number."""
        self.released_upto = 0
        """Every rank has returned the steps before this one, which are deleted."""
        self.formed_upto = 0
        """The steps before this one are formed."""
        self.end: End | None = None
        """The end of the feed, once it is known."""
        self.draining = False
        """True if the broker stops, and no further step is formed."""
        self.next_waits = NextWaits()
        """Data wait of all ranks, by cause, as they report it."""

    # Steps

    def request(self, step: PlannedStep) -> GroupRequest | None:
        """Return the request for the plan of a step on the mesh of the readers; None if no plan is needed ahead."""
        reader = next(iter(self._registry.held.values()), None)
        return None if reader is None or step.number < self.formed_upto else self.kept.request(step, reader.mesh)

    def keep(self, step: PlannedStep, skipped: bool, request: GroupRequest | None = None) -> None:
        """Keep the next step for readers, which get only its digests if it is ``skipped``; see ``KeptSteps.add``."""
        self.kept.add(step, skipped, request)
        self.formed_upto = step.number + 1

    def end_for(self, number: int, mesh: Mesh) -> EndForMesh | None:
        """Return the message that ``mesh`` gets no step from ``number`` on; None if it fits the step's rules.

        None as well if the step is not kept.
        """
        if not self.kept.has(number) or not (why := self.kept.refusal(number, mesh)):
            return None
        stage, chain = self.kept.stage_of(number), self.chain_of(number)
        return EndForMesh(
            feed=self._feed, lineage=self.kept.lineage, num_steps=number, chain=chain,
            name="0" if stage is UNSET else stage.text, detail=why[:2000],
        )  # fmt: skip

    def finish(self, num_steps: int, chain: bytes) -> None:
        """End the iteration after ``num_steps`` steps; ``chain`` is the digest of all these steps."""
        self.end = End(feed=self._feed, lineage=self.kept.lineage, num_steps=num_steps, chain=chain)

    def forget_all(self, step: int) -> list[Effect]:
        """Delete all steps; ``step`` is formed next."""
        effects = self._forget(self.formed_upto)
        self.released_upto = self.formed_upto = step
        self.end = None
        return effects

    def release(self) -> list[Effect]:
        """Delete the steps that every rank has returned, unless a rank may still request such a step again."""
        last = OUT if self.end is None else self.end.num_steps
        if not self.joined or any(self.returned[ranks] < last for ranks in self.unheard):
            return []
        least = self.returned.least  # no rank reads if all are outside the iteration
        return [] if least == OUT else self._forget(min(self.formed_upto, least))

    def _forget(self, upto: int) -> list[Effect]:
        """Delete the steps before ``upto``."""
        effects: list[Effect] = [Release(self.kept.forget(number)) for number in range(self.released_upto, upto)]
        self.released_upto = max(self.released_upto, upto)
        return effects

    def chain_of(self, step: int) -> bytes:
        """Return the digest of all steps before ``step``; empty for step 0 or if unknown."""
        return self._chains.get(step, b"")

    def note_chain(self, step: int, chain: bytes) -> None:
        """Record the digest of all steps before ``step``."""
        self._chains[step] = chain
        self._chains.pop(step - KEPT_CHAINS, None)

    def forget_chains(self, step: int) -> None:
        """Delete the digests of steps after ``step``, since different steps will follow."""
        self._chains = {at: chain for at, chain in self._chains.items() if at <= step}

    @property
    def dealt(self) -> DealtFigures:
        """Statistics of the dealt steps: load and padding of the ranks."""
        return self.kept.figures

    # The ranks of an attempt

    @property
    def joined(self) -> bool:
        """True if an attempt has begun with all ranks, even if some ranks have left since."""
        return bool(self.returned) and bool(self._registry.held)

    @property
    def all_there(self) -> bool:
        """True if an attempt has begun with all ranks, and none has left."""
        return self.joined and len(self._registry.held) == self._registry.num_ranks

    def end_attempt(self) -> None:
        """Forget the ranks of the attempt."""
        self.returned.clear()
        self.unheard.clear()
        self._heard.clear()

    def begin(self, ranks: Iterable[Ranks]) -> None:
        """Begin an attempt of these ranks; no steps are kept for a rank until ``enter``."""
        self.end_attempt()
        for rank in ranks:
            self.returned[rank] = OUT

    def enter(self, reader: Reader) -> None:
        """Keep the steps from a reader's first step on, because it takes part in the attempt."""
        self.returned[reader.mesh.ranks] = reader.first_step

    def leave_iteration(self, ranks: Ranks) -> None:
        """Stop keeping steps for a rank that asks for a later iteration."""
        self.returned[ranks] = OUT

    def await_others(self, ranks: Ranks) -> None:
        """Keep steps until every rank but ``ranks``, whose process was replaced, has sent a message."""
        if not self.returned:
            return
        if len(self.unheard) + len(self._heard) == len(self.returned):
            self.unheard.update(self._heard)  # thousands of processes may be replaced one after another
        else:
            self.unheard = set(self.returned)
        self.unheard.discard(ranks)
        self._heard = [ranks]

    def note_alive(self, reader: Reader) -> list[Effect]:
        """Record that a reader is alive and has not gone back; delete steps that were kept in case it had."""
        return self.release() if self._hears(reader.mesh.ranks) else []

    def _hears(self, ranks: Ranks) -> bool:
        """Record a message of a rank; return True if it is the first since a process was replaced."""
        if ranks not in self.unheard:
            return False
        self.unheard.remove(ranks)
        self._heard.append(ranks)
        return True

    def note_progress(self, reader: Reader, done_upto: int, have_upto: int) -> list[Effect]:
        """Record the steps that a reader has returned and received; delete steps that all ranks returned."""
        reader.have_upto = max(reader.have_upto, have_upto)
        return self.release() if self._has_returned(reader, done_upto) else []

    def note_all_done(self, relay: Receiver, done: tuple[tuple[str, int], ...]) -> list[Effect]:
        """Record that readers of a relay are alive and have returned steps; delete steps that all ranks returned."""
        changed = False
        for name, done_upto in done:
            if (reader := relay.readers.get(name)) is not None:
                reader.have_upto = max(reader.have_upto, done_upto)
                changed |= self._hears(reader.mesh.ranks)
                changed |= self._has_returned(reader, done_upto)
        return self.release() if changed else []

    def _has_returned(self, reader: Reader, done_upto: int) -> bool:
        """Record that a reader has returned the steps before ``done_upto``; return True if that is news."""
        done_upto = min(done_upto, reader.receiver.flow.ever_sent[0])
        if done_upto <= self.returned[reader.mesh.ranks]:
            return False
        self.returned[reader.mesh.ranks] = done_upto
        return True

    # Reports

    def note_figures(self, reader: Reader, stats: dict[str, float], starvation: Starvation | None) -> None:
        """Keep the metrics and the data wait that a reader reports."""
        reader.stats = stats
        if starvation is not None:
            self.next_waits.add(reader.starvation, starvation)
            reader.starvation = starvation

    def returned_by(self, part: int, parts: int) -> int:
        """Return how many steps the rank that reports part ``part`` of ``parts`` has returned; 0 if unknown."""
        ranks = self.rank_of(part, parts)
        return 0 if ranks is None else self.returned.get(ranks, 0)

    def rank_of(self, part: int, parts: int) -> Ranks | None:
        """Return the rank that reports part ``part`` of ``parts``; None if no rank of the present mesh does."""
        mesh = self._registry.reporter(part, parts)
        return None if mesh is None else mesh.ranks

    def samples_of(self, step: int, part: int, parts: int) -> I64 | None:
        """Return the ids of the samples that a rank may report for a step, int64 [n, 3]; None if they are unknown."""
        mesh = self._registry.reporter(part, parts)
        return None if mesh is None else self.kept.ids_of(step, mesh)

    @property
    def any_starved(self) -> bool:
        """True if an attached rank that wants to read has no step."""
        return any(
            reader.have_upto <= self.returned[ranks] < OUT if reader.entered else reader.ready
            for ranks, reader in self._registry.held.items()
        )

    def wait_for_ranks(self, reason: str, prefix: str = "") -> Missing:
        """Return a wait that names the rank that has returned the fewest steps, and says if that rank is lost."""
        holders, registry = self._registry.held, self._registry
        if not self.returned or not holders:
            return Missing(reason, f"{prefix}no rank is attached")
        done = self.returned.least
        last = [ranks for ranks, upto in self.returned.items() if upto == done]
        lost = (ranks for ranks in last if ranks not in holders or registry.silent_s(holders[ranks]))
        ranks = next(lost, None)
        if ranks is None:
            slowest = holders[last[0]]
            return Missing(reason, f"{prefix}rank {slowest.mesh} at {slowest.where} has returned {done} steps")
        when = "between two iterations" if done == OUT else f"after {done} steps"
        reader = registry.last_holder(ranks)
        text = f"{rank_name(ranks)} left {when}: restart all ranks from a checkpoint"
        if reader is not None and (reader.holds or reader.went_silent):
            silent_s = int((registry.now - reader.heard) // SHOWN_EVERY_S * SHOWN_EVERY_S)
            text = (
                f"rank {reader.mesh} at {reader.where} has been silent for {silent_s} s, {when}. "
                f"Training goes on when it is back. If its process has ended, restart all ranks from a checkpoint"
            )
        return Missing(reason, prefix + text, lost=True)

    def stats(self) -> list[RankProgress]:
        """Return the progress of each reader that holds a rank, in the order of the ranks."""
        return [self.progress_of(reader) for _, reader in sorted(self._registry.held.items())]

    def progress_of(self, reader: Reader) -> RankProgress:
        """Return the progress of a reader that holds its rank."""
        ranks = reader.mesh.ranks
        return RankProgress(
            ranks, reader.where, reader.iteration, self.returned[ranks] if reader.entered else 0, reader.have_upto,
            0 if reader.receiver.is_relay else reader.receiver.flow.queued_bytes,
            round(self._registry.now - reader.heard, 3), reader.stats, reader.starvation, reader.receiver.is_relay,
        )  # fmt: skip
