"""The steps of one feed that are kept for its readers, and what each rank of the attempt has had of them.

A step goes out whole, to every rank. Reads are pure: a reader that asks again for a step gets the same bytes. Only
``done_upto`` moves, and only up. Bytes that are sent and not confirmed are bounded, for each reader and for all
together, so that a slow link fills no memory. Nothing is sent again unless the reader proves that it is lost.

A step is kept until every rank has returned it. It is kept longer while one process was replaced, because the
replacement may be the first of many processes that go back.

The server knows steps and packs by number, never tokens. It does not know how an attempt begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from streampack.core.deal.deal_stats import DealtFigures
from streampack.core.deal.step_cache import KeptSteps
from streampack.core.layout.boundaries import Contents
from streampack.core.model.rules import Rules
from streampack.core.model.samples import SampleTable
from streampack.core.model.steps import PlannedStep
from streampack.core.protocol.effects import Release, SendShard, SendTrainer
from streampack.core.protocol.events import Effect
from streampack.core.protocol.message import Bye, Envelope, Reject
from streampack.core.protocol.trainer_messages import End, Get, ReaderPing, StepPart, Wait
from streampack.core.serve.progress import Progress
from streampack.core.serve.rank_registry import RankRegistry, Ranks, Reader, rank_name
from streampack.core.serve.reader_link import ReaderLink
from streampack.core.serve.step_source import StepSource
from streampack.core.stats.data_wait import Missing, NextWaits, Starvation

MAX_AHEAD = 64
"""Steps that one ``Get`` may ask for."""

MOST_QUEUED = 8 << 20
"""Bytes on their way to one reader. What follows waits behind them: a second for each MB/s of a slow link."""
ACKS = 4
"""Times that a reader confirms while it receives as many bytes as may be on their way to it."""
KEPT_CHAINS = 4096
"""Steps back for which the digest of all steps before is remembered."""
RESEND_S = 1.0
"""Seconds between two proofs of loss that are believed of a reader that confirms nothing in between."""

OUT = 1 << 62
"""Steps that a rank outside the current round counts as having returned: all."""


class RankProgress(NamedTuple):
    """The progress of one reader and the figures that its client sent.

    Steps are those of iteration ``round``; ``silent_s`` is the time in seconds since the reader was heard.
    """

    ranks: Ranks
    where: str
    round: int
    done_upto: int
    have_upto: int
    queued_bytes: int
    silent_s: float
    stats: dict[str, float]
    starvation: Starvation | None


class StepServer:
    """Keep steps, send them to the readers of the attempt, and forget them when every rank has returned them."""

    def __init__(
        self, link: ReaderLink, rules: Rules, layout: str, table: SampleTable, registry: RankRegistry,
        source: StepSource, leaving_bytes: int,
    ) -> None:  # fmt: skip
        self._link, self._rules, self._layout = link, rules, layout
        self._registry, self._source = registry, source
        self.kept = KeptSteps(link.feed, rules, layout, table)
        self.returned = Progress()
        """Steps that each rank of the attempt has returned; empty before the first attempt."""
        self.unheard: set[Ranks] = set()
        """Ranks not heard since a process was replaced: all processes may be restarting."""
        self._chains: dict[int, bytes] = {}
        self._missing: Missing | None = None
        """Reason why the next step is missing, computed once a tick for all readers that wait."""
        self._starving: dict[str, Reader] = {}
        """Readers that have nothing to read, as they said, by name."""
        self._said: tuple[str, str | None] | None = None
        """(reason, stream) that all of them heard last, if it is the same for all."""
        self.leaving_bytes = leaving_bytes
        """Bytes that may be on their way to all readers together."""
        self.queued_bytes = 0
        """Bytes that are on their way to all readers together."""
        self.resent_bytes = 0
        """Bytes that were sent again because they were lost."""
        self._held_back: dict[str, Reader] = {}
        """Readers that wait until others confirm, the oldest first."""
        self.released_upto = 0
        """Steps below are returned by every rank and forgotten."""
        self.formed_upto = 0
        self.end: End | None = None
        self.draining = False
        self.next_waits = NextWaits()
        """Ranks' waiting times for steps, as they report them."""

    def finish(self, num_steps: int, chain: bytes) -> list[Effect]:
        """End the round: no step follows."""
        self.end = End(feed=self._link.feed, lineage=self.lineage, num_steps=num_steps, chain=chain)
        return self.serve_all()

    def chain_of(self, step: int) -> bytes:
        """Return the digest of all steps before ``step``; empty for step 0 and where it is not known."""
        return self._chains.get(step, b"")

    def note_chain(self, step: int, chain: bytes) -> None:
        """Remember the digest of all steps before ``step``."""
        self._chains[step] = chain
        self._chains.pop(step - KEPT_CHAINS, None)

    def forget_chains(self, step: int) -> None:
        """Forget the digests of steps after ``step``: other steps follow."""
        self._chains = {at: chain for at, chain in self._chains.items() if at <= step}

    @property
    def lineage(self) -> int:
        """The lineage of the steps that are served."""
        return self.kept.lineage

    @lineage.setter
    def lineage(self, lineage: int) -> None:
        self.kept.lineage = lineage

    @property
    def dealt(self) -> DealtFigures:
        """Load and padding of the ranks."""
        return self.kept.figures

    @property
    def joined(self) -> bool:
        """Whether an attempt has begun, with every rank ready for it. Some ranks may have left since."""
        return bool(self.returned) and bool(self._registry.held)

    @property
    def all_there(self) -> bool:
        """Whether an attempt has begun and no rank has left it."""
        return self.joined and len(self._registry.held) == self._registry.num_ranks

    @property
    def any_starved(self) -> bool:
        """Whether some attached rank that wants to read has no step ready."""
        return any(
            reader.have_upto <= self.returned[ranks] < OUT if reader.entered else reader.ready
            for ranks, reader in self._registry.held.items()
        )

    @property
    def slowest(self) -> str:
        """A text that names the rank that has returned the fewest steps."""
        held = self._registry.held
        if not self.returned or not held:
            return "no rank is attached"
        ranks = min(self.returned, key=lambda ranks: (self.returned[ranks], ranks in held))
        if ranks not in held:
            when = "between two iterations" if self.returned[ranks] == OUT else f"after {self.returned[ranks]} steps"
            return f"{rank_name(ranks)} left {when}: start it again"
        return f"rank {held[ranks].mesh} at {held[ranks].where} has returned {self.returned[ranks]} steps"

    def stats(self) -> list[RankProgress]:
        """Return one row for each reader, in the order of their ranks."""
        return [
            RankProgress(
                ranks, reader.where, reader.round, self.returned[ranks] if reader.entered else 0, reader.have_upto,
                reader.queued_bytes, round(self._registry.now - reader.heard, 3), reader.stats, reader.starvation,
            )
            for ranks, reader in sorted(self._registry.held.items())
        ]  # fmt: skip

    def skip(self, first: int, last: int) -> None:
        """Pass over steps ``first`` to ``last``, those that are kept, too."""
        self.kept.skip(first, last)

    def keep(self, step: PlannedStep, skipped: bool) -> None:
        """Keep the next step; readers get only the digests of one that is ``skipped``."""
        self._missing = None  # the step after it may wait for something else
        self.kept.add(step, skipped)
        self.formed_upto = step.number + 1

    def forget_all(self, step: int) -> list[Effect]:
        """Forget all steps; ``step`` is formed next."""
        gone = [self.kept.forget(number) for number in range(self.released_upto, self.formed_upto)]
        self.released_upto = self.formed_upto = step
        self.end = None
        return [Release(handles) for handles in gone]

    def heard(self, reader: Reader) -> list[Effect]:
        """Note that a reader is alive, so it has not gone back to an earlier step."""
        if reader.mesh.ranks not in self.unheard:
            return []
        self.unheard.remove(reader.mesh.ranks)
        return self.release()

    def get(self, reader: Reader, message: Get) -> list[Effect]:
        """Answer a reader that asks for steps."""
        reader.have_upto = max(reader.have_upto, message.start)
        reader.want_stop = max(reader.want_stop, min(message.stop, message.start + MAX_AHEAD))
        reader.unreached = False
        self._confirm(reader, message.start, message.part)
        if message.resend > reader.resend and self._registry.now >= reader.resent_at + RESEND_S:
            self._send_again(reader, message)
        effects = self._note_done(reader, message.done_upto)
        effects += self.serve_held_back()
        served = self.serve(reader)
        if served or message.start > message.done_upto:
            return effects + served
        self._starving[reader.name] = reader
        return effects + self.wait_for_step(reader)

    def _send_again(self, reader: Reader, message: Get) -> None:
        """Begin again at the place that a reader names: it has proven that what followed is lost."""
        reader.resend, reader.resent_at = message.resend, self._registry.now
        self.forget_queue(reader)
        furthest = max(self.formed_upto, self.returned[reader.mesh.ranks])
        place = max((min(message.start, furthest), message.part), (self.released_upto, 0))
        reader.sent_upto, reader.sent_part = place

    def look_again(self) -> None:
        """Look anew at what the next step waits for, when it is asked for."""
        self._missing = None

    def begin_nowhere(self) -> None:
        """Forget the attempt: ranks of another mesh have come."""
        self.returned.clear()
        self.unheard.clear()

    def begin(self, ranks: Iterable[Ranks]) -> None:
        """Begin an attempt of these ranks. Each is out of it until it is entered."""
        self.begin_nowhere()
        for each in ranks:
            self.returned[each] = OUT

    def enter(self, reader: Reader) -> None:
        """Have a reader take part from its first step on."""
        self.returned[reader.mesh.ranks] = reader.first_step
        self.forget_queue(reader)
        reader.sent_upto, reader.sent_part, reader.ever_sent = reader.first_step, 0, (reader.first_step, 0)
        reader.want_stop, reader.resend, reader.resent_at = 0, 0, -RESEND_S

    def await_others(self, ranks: Ranks) -> None:
        """Keep steps until all other ranks are heard: a process was replaced, and the others may follow."""
        if self.returned:
            self.unheard = self.returned.others(ranks)

    def leave_round(self, ranks: Ranks) -> None:
        """Count a rank as having returned all steps: it asks for a later round."""
        self.returned[ranks] = OUT

    def leave(self, reader: Reader) -> None:
        """Forget a reader that is gone."""
        self._starving.pop(reader.name, None)
        self.forget_queue(reader)

    def not_sent(self, peer: bytes, envelope: Envelope) -> None:
        """Note that a message was dropped before it left. It goes out again once the reader is heard."""
        reader, message = self._registry.at(peer), envelope.message
        if reader is None or not isinstance(message, StepPart) or envelope.fence != reader.fence:
            return
        reader.unreached = True
        place = message.step, message.part
        if message.resend == reader.resend and place < (reader.sent_upto, reader.sent_part):
            while reader.queued and reader.queued[-1][:2] >= place:
                self._let_go(reader, reader.queued.pop()[2])
            reader.sent_upto, reader.sent_part = place

    def _confirm(self, reader: Reader, step: int, part: int) -> None:
        """Note that the reader has every part before ``part`` of ``step``."""
        while reader.queued and reader.queued[0][:2] < (step, part):
            self._let_go(reader, reader.queued.popleft()[2])
            reader.resent_at = -RESEND_S

    def _let_go(self, reader: Reader, num_bytes: int) -> None:
        reader.queued_bytes -= num_bytes
        self.queued_bytes -= num_bytes

    def forget_queue(self, reader: Reader) -> None:
        """Forget what was on its way to a reader."""
        self._let_go(reader, reader.queued_bytes)
        reader.queued.clear()
        reader.unreached = False
        self._held_back.pop(reader.name, None)

    def _may_send(self, reader: Reader) -> bool:
        """Return whether another part may leave, for one reader and for all. Each reader may always have one part."""
        if reader.unreached or (reader.queued and reader.queued_bytes >= self.most_queued):
            return False
        if self.queued_bytes >= self.leaving_bytes:
            self._held_back[reader.name] = reader
            return False
        return True

    @property
    def most_queued(self) -> int:
        """Bytes that may be on their way to one reader."""
        return min(MOST_QUEUED, self.leaving_bytes // max(self._registry.num_ranks, 1))

    def serve_held_back(self) -> list[Effect]:
        """Serve the readers that waited until others confirmed."""
        effects: list[Effect] = []
        while self._held_back and self.queued_bytes < self.leaving_bytes:
            effects += self.serve(self._held_back.pop(next(iter(self._held_back))))
        return effects

    def tell_starving(self, forming: bool = True) -> list[Effect]:
        """Tell the readers that have nothing to read what they wait for, where they have not heard it yet.

        With ``forming`` false, a step that is being packed is not worth a message: it is there in a moment.
        """
        if not self._starving:
            return []
        missing = self._source.waiting_for()
        if (missing.reason, missing.stream) == self._said or (missing.reason == "forming" and not forming):
            return []
        self._missing, self._said = missing, (missing.reason, missing.stream)
        return [e for reader in list(self._starving.values()) if reader.entered for e in self.wait_for_step(reader)]

    def ping(self, reader: Reader, message: ReaderPing) -> list[Effect]:
        """Answer a reader that says how far it is."""
        reader.have_upto = max(reader.have_upto, message.have_upto)
        reader.unreached = False
        self._confirm(reader, message.have_upto, message.part)
        effects = self._note_done(reader, message.done_upto)
        return effects + self.serve_held_back() + self.wait_for_step(reader)

    def note_figures(self, reader: Reader, message: ReaderPing) -> None:
        """Keep the figures that a reader reports of itself."""
        reader.stats = message.stats
        if message.starvation is not None:
            self.next_waits.add(reader.starvation, message.starvation)
            reader.starvation = message.starvation

    def _note_done(self, reader: Reader, done_upto: int) -> list[Effect]:
        done_upto = min(done_upto, reader.sent_upto)
        if done_upto <= self.returned[reader.mesh.ranks]:
            return []
        self.returned[reader.mesh.ranks] = done_upto
        return self.release()

    def release(self) -> list[Effect]:
        """Forget the steps that every rank has returned, unless a rank may still ask for one again."""
        last = OUT if self.end is None else self.end.num_steps
        if not self.joined or any(self.returned[ranks] < last for ranks in self.unheard):
            return []
        least = self.returned.least
        upto = self.released_upto if least == OUT else min(self.formed_upto, least)  # where all are out, nobody reads
        effects: list[Effect] = [Release(self.kept.forget(n)) for n in range(self.released_upto, upto)]
        self.released_upto = max(self.released_upto, upto)
        return effects

    def serve_all(self) -> list[Effect]:
        """Serve every reader."""
        return [e for reader in self._registry for e in self.serve(reader)]

    def serve(self, reader: Reader) -> list[Effect]:
        """Send the steps that the reader wants and that are there."""
        if not reader.entered:
            return []
        effects: list[Effect] = []
        while reader.sent_upto < min(reader.want_stop, self.formed_upto):
            number = max(reader.sent_upto, self.released_upto)
            if unfit := self.kept.unfit(number, reader.mesh):
                return [*effects, *self._link.send(reader, Reject(code="too_few", detail=unfit))]
            effects += self._send_parts(reader, number)
            if reader.sent_upto <= number:
                return effects
        if self.end is not None and reader.sent_upto >= self.end.num_steps:
            effects += self._send_end(reader)
        elif self.draining and reader.sent_upto >= self.formed_upto:
            effects += self._link.send(reader, Bye(reason="the broker is stopping"))
        return effects

    def _send_parts(self, reader: Reader, number: int) -> list[Effect]:
        """Send the parts of a step that follow, as far as they may leave now."""
        effects: list[Effect] = []
        begin = reader.sent_part if reader.sent_upto == number else 0
        parts = self.kept.parts(number, reader.mesh, begin, reader.resend)
        while reader.sent_upto <= number and self._may_send(reader):
            effects.append(self._send_part(reader, *next(parts)))
        if effects:
            self._starving.pop(reader.name, None)
        return effects

    def _send_part(self, reader: Reader, plan: StepPart, packs: Contents) -> Effect:
        mesh, size, place = reader.mesh, self.kept.num_bytes(packs, reader.mesh), (plan.step, plan.part)
        if place < reader.ever_sent:
            self.resent_bytes += size
        whole = plan.part + 1 >= plan.parts
        reader.sent_upto, reader.sent_part = (plan.step + 1, 0) if whole else (plan.step, plan.part + 1)
        reader.ever_sent = max(reader.ever_sent, (reader.sent_upto, reader.sent_part))
        reader.queued.append((*place, size))
        self._let_go(reader, -size)
        envelope = self._link.envelope(plan, reader.fence)
        if not plan.micro_batches:
            return SendTrainer(reader.peer, envelope)
        return SendShard(reader.peer, envelope, packs, plan.frames, self._layout, mesh.cp, mesh.cp_rank)

    def _send_end(self, reader: Reader) -> list[Effect]:
        assert self.end is not None
        return self._link.send(reader, msgspec.structs.replace(self.end, resend=reader.resend))

    def wait_for_step(self, reader: Reader) -> list[Effect]:
        """Tell a reader what its next step waits for, if it asked for one that is not there."""
        wants = reader.sent_upto < reader.want_stop
        if not wants and not reader.queued:
            return []
        if wants and self.end is not None and reader.sent_upto >= self.end.num_steps:
            return self._send_end(reader)
        if wants and reader.sent_upto < self.formed_upto and (served := self.serve(reader)):
            return served
        if not wants or reader.sent_upto < self.formed_upto:
            detail = f"step {reader.sent_upto}: {reader.queued_bytes} bytes are on their way"
            return self._send_wait(reader, Missing("network", detail))
        if self._missing is None:
            self._missing = self._source.waiting_for()
        missing = self._missing
        if (missing.reason, missing.stream) != self._said:
            self._said = None
        return self._send_wait(reader, missing)

    def _send_wait(self, reader: Reader, missing: Missing) -> list[Effect]:
        wait = Wait(
            feed=self._link.feed, step=reader.sent_upto, part=reader.sent_part, resend=reader.resend,
            reason=missing.reason, detail=missing.detail[:2000], stream=missing.stream, batch=missing.batch,
        )  # fmt: skip
        return self._link.send(reader, wait)
