"""Keeps the steps of one feed, and sends them to the ranks of the attempt.

A step goes out whole, to every rank (R3). Reads are pure (R4): a reader that asks again for a step gets the same bytes.
The bytes that are sent and not confirmed are bounded, for each reader and for all together. So a slow link does not
fill the memory. A part is sent again only if the reader proves that it was lost.

A step is kept until every rank has returned it. After a process was replaced, steps are kept until the other ranks send
a message: more processes may be replaced, and go back.

The server knows the numbers of steps and packs, and no tokens.
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
"""Most steps that one ``Get`` may request."""

MOST_QUEUED = 8 << 20
"""Most bytes on their way to one reader: later messages wait behind them, for 8 s on a link of 1 MB/s."""
ACKS = 4
"""Confirmations that a reader sends while it receives as many bytes as may be on their way to it."""
KEPT_CHAINS = 4096
"""Number of the last steps whose digests are remembered."""
RESEND_S = 1.0
"""Least seconds between two times that parts are sent again to a reader that confirms nothing in between."""

OUT = 1 << 62
"""Number of returned steps of a rank outside the round: more than any step, so that no step is kept for it."""


class RankProgress(NamedTuple):
    """The progress of one rank's reader, with the metrics of its client.

    Steps count in iteration ``round``; ``silent_s`` is the seconds since the reader's last message.
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
    """Keeps steps, sends them to the readers of the attempt, and deletes each when every rank has returned it."""

    def __init__(
        self, link: ReaderLink, rules: Rules, layout: str, table: SampleTable, registry: RankRegistry,
        source: StepSource, leaving_bytes: int,
    ) -> None:  # fmt: skip
        self._link, self._rules, self._layout = link, rules, layout
        self._registry, self._source = registry, source
        self.kept = KeptSteps(link.feed, rules, layout, table)
        self.returned = Progress()
        """Number of steps that each rank of the attempt has returned; empty before the first attempt."""
        self.unheard: set[Ranks] = set()
        """Ranks without a message since a process was replaced: all processes may be restarting."""
        self._chains: dict[int, bytes] = {}
        """Digest of all steps before a step, by its number."""
        self._missing: Missing | None = None
        """Cause of the wait for the next step, computed once a tick for all readers."""
        self._starving: dict[str, Reader] = {}
        """Readers that have reported that they have no step to read, by name."""
        self._said: tuple[str, str | None] | None = None
        """(reason, stream) of the last ``Wait`` to these readers, if all got the same."""
        self.leaving_bytes = leaving_bytes
        """Most bytes that may be on their way to all readers together."""
        self.queued_bytes = 0
        """Bytes that are on their way to all readers together."""
        self.resent_bytes = 0
        """Bytes that were sent again because they were lost."""
        self._held_back: dict[str, Reader] = {}
        """Readers that get no part until others confirm theirs, the oldest first."""
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

    def finish(self, num_steps: int, chain: bytes) -> list[Effect]:
        """End the round after ``num_steps`` steps; ``chain`` is the digest of all these steps."""
        self.end = End(feed=self._link.feed, lineage=self.lineage, num_steps=num_steps, chain=chain)
        return self.serve_all()

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
    def lineage(self) -> int:
        """Number of the lineage of the steps that are served."""
        return self.kept.lineage

    @lineage.setter
    def lineage(self, lineage: int) -> None:
        self.kept.lineage = lineage

    @property
    def dealt(self) -> DealtFigures:
        """Statistics of the dealt steps: load and padding of the ranks."""
        return self.kept.figures

    @property
    def joined(self) -> bool:
        """True if an attempt has begun with all ranks, even if some ranks have left since."""
        return bool(self.returned) and bool(self._registry.held)

    @property
    def all_there(self) -> bool:
        """True if an attempt has begun with all ranks, and none has left."""
        return self.joined and len(self._registry.held) == self._registry.num_ranks

    @property
    def any_starved(self) -> bool:
        """True if an attached rank that wants to read has no step."""
        return any(
            reader.have_upto <= self.returned[ranks] < OUT if reader.entered else reader.ready
            for ranks, reader in self._registry.held.items()
        )

    @property
    def slowest(self) -> str:
        """A text that names the rank that has returned the fewest steps, and their number."""
        held = self._registry.held
        if not self.returned or not held:
            return "no rank is attached"
        ranks = min(self.returned, key=lambda ranks: (self.returned[ranks], ranks in held))
        if ranks not in held:
            when = "between two iterations" if self.returned[ranks] == OUT else f"after {self.returned[ranks]} steps"
            return f"{rank_name(ranks)} left {when}: start it again"
        return f"rank {held[ranks].mesh} at {held[ranks].where} has returned {self.returned[ranks]} steps"

    def stats(self) -> list[RankProgress]:
        """Return the progress of each reader that holds a rank, in the order of the ranks."""
        return [
            RankProgress(
                ranks, reader.where, reader.round, self.returned[ranks] if reader.entered else 0, reader.have_upto,
                reader.queued_bytes, round(self._registry.now - reader.heard, 3), reader.stats, reader.starvation,
            )
            for ranks, reader in sorted(self._registry.held.items())
        ]  # fmt: skip

    def skip(self, first: int, last: int) -> None:
        """Skip steps ``first`` to ``last``, including kept steps: readers get only the digests of these steps."""
        self.kept.skip(first, last)

    def keep(self, step: PlannedStep, skipped: bool) -> None:
        """Keep the next step for readers, which get only its digests if it is ``skipped``."""
        self._missing = None  # the step after it may wait for something else
        self.kept.add(step, skipped)
        self.formed_upto = step.number + 1

    def forget_all(self, step: int) -> list[Effect]:
        """Delete all steps; ``step`` is formed next."""
        gone = [self.kept.forget(number) for number in range(self.released_upto, self.formed_upto)]
        self.released_upto = self.formed_upto = step
        self.end = None
        return [Release(handles) for handles in gone]

    def note_alive(self, reader: Reader) -> list[Effect]:
        """Record that a reader is alive and has not gone back; delete steps that were kept in case it had."""
        if reader.mesh.ranks not in self.unheard:
            return []
        self.unheard.remove(reader.mesh.ranks)
        return self.release()

    def get(self, reader: Reader, message: Get) -> list[Effect]:
        """Answer a reader's request for steps: send parts, or tell the reader why its next step waits."""
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
        """Go back to the part that a reader requests, because its message proves that later parts are lost."""
        reader.resend, reader.resent_at = message.resend, self._registry.now
        self.forget_queue(reader)
        furthest = max(self.formed_upto, self.returned[reader.mesh.ranks])
        place = max((min(message.start, furthest), message.part), (self.released_upto, 0))
        reader.sent_upto, reader.sent_part = place

    def forget_missing(self) -> None:
        """Forget the cause of the wait for the next step, so that the cause is computed again."""
        self._missing = None

    def end_attempt(self) -> None:
        """Forget the ranks of the attempt."""
        self.returned.clear()
        self.unheard.clear()

    def begin(self, ranks: Iterable[Ranks]) -> None:
        """Begin an attempt of these ranks; no steps are kept for a rank until ``enter``."""
        self.end_attempt()
        for each in ranks:
            self.returned[each] = OUT

    def enter(self, reader: Reader) -> None:
        """Add a reader to the attempt, from the reader's first step on."""
        self.returned[reader.mesh.ranks] = reader.first_step
        self.forget_queue(reader)
        reader.sent_upto, reader.sent_part, reader.ever_sent = reader.first_step, 0, (reader.first_step, 0)
        reader.want_stop, reader.resend, reader.resent_at = 0, 0, -RESEND_S

    def await_others(self, ranks: Ranks) -> None:
        """Keep steps until every rank but ``ranks``, whose process was replaced, has sent a message."""
        if self.returned:
            self.unheard = self.returned.others(ranks)

    def leave_round(self, ranks: Ranks) -> None:
        """Stop keeping steps for a rank that asks for a later round."""
        self.returned[ranks] = OUT

    def leave(self, reader: Reader) -> None:
        """Forget a reader that has left, and the parts on their way to it."""
        self._starving.pop(reader.name, None)
        self.forget_queue(reader)

    def not_sent(self, peer: bytes, envelope: Envelope) -> None:
        """Record that a message for ``peer`` was dropped before it left; the part is sent again at the next message."""
        reader, message = self._registry.at(peer), envelope.message
        if reader is None or not isinstance(message, StepPart) or envelope.fence != reader.fence:
            return
        reader.unreached = True
        place = message.step, message.part
        if message.resend == reader.resend and place < (reader.sent_upto, reader.sent_part):
            while reader.queued and reader.queued[-1][:2] >= place:
                self._count_out(reader, reader.queued.pop()[2])
            reader.sent_upto, reader.sent_part = place

    def _confirm(self, reader: Reader, step: int, part: int) -> None:
        """Record that a reader has every part before ``part`` of ``step``."""
        while reader.queued and reader.queued[0][:2] < (step, part):
            self._count_out(reader, reader.queued.popleft()[2])
            reader.resent_at = -RESEND_S

    def _count_out(self, reader: Reader, num_bytes: int) -> None:
        """Subtract bytes from those that are on their way to a reader."""
        reader.queued_bytes -= num_bytes
        self.queued_bytes -= num_bytes

    def forget_queue(self, reader: Reader) -> None:
        """Forget the parts that are on their way to a reader, and do not count their bytes any more."""
        self._count_out(reader, reader.queued_bytes)
        reader.queued.clear()
        reader.unreached = False
        self._held_back.pop(reader.name, None)

    def _may_send(self, reader: Reader) -> bool:
        """Return whether another part may be sent to a reader, by the limits of bytes on their way."""
        if reader.unreached or (reader.queued and reader.queued_bytes >= self.most_queued):
            return False
        if self.queued_bytes >= self.leaving_bytes:
            self._held_back[reader.name] = reader
            return False
        return True

    @property
    def most_queued(self) -> int:
        """Most bytes that may be on their way to one reader."""
        return min(MOST_QUEUED, self.leaving_bytes // max(self._registry.num_ranks, 1))

    def serve_held_back(self) -> list[Effect]:
        """Send parts to the readers that had to wait until other readers confirmed their parts."""
        effects: list[Effect] = []
        while self._held_back and self.queued_bytes < self.leaving_bytes:
            effects += self.serve(self._held_back.pop(next(iter(self._held_back))))
        return effects

    def tell_starving(self, forming: bool = True) -> list[Effect]:
        """Tell the readers without a step the cause of their wait, if the cause has changed.

        If ``forming`` is False, readers get no message while the packer forms the step, which takes a moment.
        """
        if not self._starving:
            return []
        missing = self._source.waiting_for()
        if (missing.reason, missing.stream) == self._said or (missing.reason == "forming" and not forming):
            return []
        self._missing, self._said = missing, (missing.reason, missing.stream)
        return [e for reader in list(self._starving.values()) if reader.entered for e in self.wait_for_step(reader)]

    def ping(self, reader: Reader, message: ReaderPing) -> list[Effect]:
        """Handle a reader's ping, which reports its progress; answer with the cause of its wait."""
        reader.have_upto = max(reader.have_upto, message.have_upto)
        reader.unreached = False
        self._confirm(reader, message.have_upto, message.part)
        effects = self._note_done(reader, message.done_upto)
        return effects + self.serve_held_back() + self.wait_for_step(reader)

    def note_figures(self, reader: Reader, message: ReaderPing) -> None:
        """Keep the metrics and the data wait that a reader reports."""
        reader.stats = message.stats
        if message.starvation is not None:
            self.next_waits.add(reader.starvation, message.starvation)
            reader.starvation = message.starvation

    def _note_done(self, reader: Reader, done_upto: int) -> list[Effect]:
        """Record that a reader has returned the steps before ``done_upto``; delete steps that all ranks returned."""
        done_upto = min(done_upto, reader.sent_upto)
        if done_upto <= self.returned[reader.mesh.ranks]:
            return []
        self.returned[reader.mesh.ranks] = done_upto
        return self.release()

    def release(self) -> list[Effect]:
        """Delete the steps that every rank has returned, unless a rank may still request such a step again."""
        last = OUT if self.end is None else self.end.num_steps
        if not self.joined or any(self.returned[ranks] < last for ranks in self.unheard):
            return []
        least = self.returned.least
        # No rank reads if all are outside the round.
        upto = self.released_upto if least == OUT else min(self.formed_upto, least)
        effects: list[Effect] = [Release(self.kept.forget(n)) for n in range(self.released_upto, upto)]
        self.released_upto = max(self.released_upto, upto)
        return effects

    def serve_all(self) -> list[Effect]:
        """Send to every reader the steps that it wants."""
        return [e for reader in self._registry for e in self.serve(reader)]

    def serve(self, reader: Reader) -> list[Effect]:
        """Send to a reader the formed steps that it wants, then the end of the feed or a goodbye."""
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
        """Send the next parts of step ``number`` to a reader, as far as the limits allow."""
        effects: list[Effect] = []
        begin = reader.sent_part if reader.sent_upto == number else 0
        parts = self.kept.parts(number, reader.mesh, begin, reader.resend)
        while reader.sent_upto <= number and self._may_send(reader):
            effects.append(self._send_part(reader, *next(parts)))
        if effects:
            self._starving.pop(reader.name, None)
        return effects

    def _send_part(self, reader: Reader, plan: StepPart, packs: Contents) -> Effect:
        """Return the effect that sends a part to a reader, and count its bytes as on their way."""
        mesh, size, place = reader.mesh, self.kept.num_bytes(packs, reader.mesh), (plan.step, plan.part)
        if place < reader.ever_sent:
            self.resent_bytes += size
        whole = plan.part + 1 >= plan.parts
        reader.sent_upto, reader.sent_part = (plan.step + 1, 0) if whole else (plan.step, plan.part + 1)
        reader.ever_sent = max(reader.ever_sent, (reader.sent_upto, reader.sent_part))
        reader.queued.append((*place, size))
        self._count_out(reader, -size)
        envelope = self._link.envelope(plan, reader.fence)
        if not plan.micro_batches:
            return SendTrainer(reader.peer, envelope)
        return SendShard(reader.peer, envelope, packs, plan.frames, self._layout, mesh.cp, (mesh.cp_rank,))

    def _send_end(self, reader: Reader) -> list[Effect]:
        """Tell a reader that the feed has ended."""
        assert self.end is not None
        return self._link.send(reader, msgspec.structs.replace(self.end, resend=reader.resend))

    def wait_for_step(self, reader: Reader) -> list[Effect]:
        """Tell a reader the cause of its wait, if it has requested a step that it does not have."""
        wants = reader.sent_upto < reader.want_stop
        if not wants and not reader.queued:
            return []
        if wants and self.end is not None and reader.sent_upto >= self.end.num_steps:
            return self._send_end(reader)
        if wants and reader.sent_upto < self.formed_upto and (served := self.serve(reader)):
            return served
        if not wants or reader.sent_upto < self.formed_upto:
            detail = f"step {reader.sent_upto}: {reader.queued_bytes} bytes are on their way to this rank"
            return self._send_wait(reader, Missing("network", detail))
        if self._missing is None:
            self._missing = self._source.waiting_for()
        missing = self._missing
        if (missing.reason, missing.stream) != self._said:
            self._said = None
        return self._send_wait(reader, missing)

    def _send_wait(self, reader: Reader, missing: Missing) -> list[Effect]:
        """Send a reader the cause of its wait."""
        wait = Wait(
            feed=self._link.feed, step=reader.sent_upto, part=reader.sent_part, resend=reader.resend,
            reason=missing.reason, detail=missing.detail[:2000], stream=missing.stream, batch=missing.batch,
        )  # fmt: skip
        return self._link.send(reader, wait)
