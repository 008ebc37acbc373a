"""One feed's steps, and what the ranks of the attempt that is served have had of them.

A step goes out whole, to every rank. Reads are pure: asking again for a step gives the same bytes; only
``done_upto`` moves, and only up. Bytes that are sent and not confirmed are bounded, for each reader and for all
together, so that a slow link fills no memory; nothing is sent again unless the reader proves that it is lost. A step
is kept until every rank has returned it, and while a process that was
replaced may be one of many that go back. Knows steps and packs by number, never tokens, and
nothing of how an attempt comes about.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from streampack.core.dealt_figures import DealtFigures
from streampack.core.effects import Release, SendShard, SendTrainer
from streampack.core.events import Effect
from streampack.core.kept import KeptSteps
from streampack.core.layout import Contents
from streampack.core.messages import Bye, End, Envelope, Get, Message, ReaderPing, Reject, StepPart, Wait
from streampack.core.progress import Progress
from streampack.core.rules import Rules
from streampack.core.samples import SampleTable
from streampack.core.seats import Ranks, Reader, Seats, rank_name
from streampack.core.starvation import Missing, NextWaits
from streampack.core.steps import Step

MAX_AHEAD = 64
"""Steps that one GET may ask for."""

MOST_QUEUED = 8 << 20
"""Bytes on their way to one reader: what follows them waits behind, a second for each MB/s of a slow link."""
ACKS = 4
"""A reader confirms this many times while so many bytes as it may have on their way arrive."""
RESEND_S = 1.0
"""Between two proofs of loss that are believed of a reader which has confirmed nothing in between."""

OUT = 1 << 62
"""What a rank that is out of the round served counts as having returned: every step."""


class Serving:
    """The steps that are kept, and how far each rank is; ``waiting_for`` says why the next step is not there."""

    def __init__(
        self, run: int, epoch: int, feed: str, rules: Rules, layout: str, table: SampleTable,
        waiting_for: Callable[[], Missing], leaving_bytes: int,
    ) -> None:  # fmt: skip
        self._run, self.epoch, self._feed = run, epoch, feed
        self._rules, self._layout = rules, layout
        self._waiting_for = waiting_for
        self._seats = Seats()
        self._steps = KeptSteps(feed, rules, layout, table)
        self._chains: dict[int, bytes] = {}
        self._returned = Progress()
        self._unheard: set[Ranks] = set()  # ranks not heard since a process was replaced: it may be a restart of all
        self._why: dict[str, Missing] = {}  # what all that wait are told, worked out once a tick
        self._starving: dict[str, Reader] = {}  # those that have nothing to read, as they said, by their names
        self._said: tuple[str, str | None] | None = None  # what all of them heard last, if it is the same
        self._now = 0.0
        self.leaving_bytes = leaving_bytes
        """That may be on their way to all readers together."""
        self.queued_bytes = 0
        """That are."""
        self.resent_bytes = 0
        """Sent again, as they were lost."""
        self._held_back: dict[str, Reader] = {}  # those that wait until others confirm, the oldest first
        self.released_upto = 0
        """Steps below are returned by every rank and forgotten."""
        self.formed_upto = 0
        self.end: End | None = None
        self.draining = False
        self.next_waits = NextWaits()
        """How long ranks have waited for steps, as they say."""

    def finish(self, num_steps: int, chain: bytes) -> list[Effect]:
        """No step follows in this round."""
        self.end = End(feed=self._feed, lineage=self.lineage, num_steps=num_steps, chain=chain)
        return self._serve_all()

    def chain_of(self, step: int) -> bytes:
        """Digest of all steps before ``step``; empty where it is not known, and of step 0."""
        return self._chains.get(step, b"")

    @property
    def lineage(self) -> int:
        """Of the steps that are served."""
        return self._steps.lineage

    @lineage.setter
    def lineage(self, lineage: int) -> None:
        self._steps.lineage = lineage

    @property
    def dealt(self) -> DealtFigures:
        """How evenly the ranks are loaded, and what the mesh wastes."""
        return self._steps.figures

    @property
    def joined(self) -> bool:
        """An attempt is served: every rank that reads was ready for it; some may have left since."""
        return bool(self._returned) and bool(self._seats.held)

    @property
    def all_there(self) -> bool:
        """An attempt is served, and no rank has left it."""
        return self.joined and len(self._seats.held) == self._seats.num_ranks

    @property
    def any_starved(self) -> bool:
        """Whether an attached rank that wants to read has no step ready."""
        return any(
            reader.have_upto <= self._returned[ranks] < OUT if reader.entered else reader.ready
            for ranks, reader in self._seats.held.items()
        )

    @property
    def slowest(self) -> str:
        """The rank that has returned the fewest steps, for a person."""
        held = self._seats.held
        if not self._returned or not held:
            return "no rank is attached"
        ranks = min(self._returned, key=lambda ranks: (self._returned[ranks], ranks in held))
        if ranks not in held:
            when = "between two iterations" if self._returned[ranks] == OUT else f"after {self._returned[ranks]} steps"
            return f"{rank_name(ranks)} left {when}: start it again"
        return f"rank {held[ranks].mesh} at {held[ranks].where} has returned {self._returned[ranks]} steps"

    def stats(self) -> list[dict[str, object]]:
        """One row a reader: rank, where, progress and its own figures."""
        rows: list[dict[str, object]] = []
        for ranks, reader in sorted(self._seats.held.items()):
            row: dict[str, object] = dict(zip(("dp_rank", "cp_rank", "tp_rank", "pp_rank"), ranks, strict=True))
            done = self._returned[ranks] if reader.entered else 0
            row |= {"where": reader.where, "host": reader.where.rpartition(":")[0], "round": reader.round}
            row |= {"done_upto": done, "have_upto": reader.have_upto, "queued_bytes": reader.queued_bytes}
            row |= {"silent_s": round(self._now - reader.heard, 3), "stats": reader.stats}
            rows.append(row | {"starvation": reader.starvation})
        return rows

    def skip(self, first: int, last: int) -> None:
        """Steps that are kept, too, are passed over."""
        self._steps.skip(first, last)

    def _keep(self, step: Step, skipped: bool) -> None:
        self._why.pop("step", None)  # the next one may wait for something else
        self._steps.add(step, skipped)
        self.formed_upto = step.number + 1

    def _forget_all(self, step: int) -> list[Effect]:
        """Nothing is kept; ``step`` is the next to be formed."""
        gone = [self._steps.forget(number) for number in range(self.released_upto, self.formed_upto)]
        self.released_upto = self.formed_upto = step
        self.end = None
        return [Release(handles) for handles in gone]

    def _heard(self, reader: Reader) -> list[Effect]:
        """It lives, so it has not gone back."""
        if reader.mesh.ranks not in self._unheard:
            return []
        self._unheard.remove(reader.mesh.ranks)
        return self._release()

    def _get(self, reader: Reader, message: Get) -> list[Effect]:
        reader.have_upto = max(reader.have_upto, message.start)
        reader.want_stop = max(reader.want_stop, min(message.stop, message.start + MAX_AHEAD))
        reader.unreached = False
        self._confirm(reader, message.start, message.part)
        if message.resend > reader.resend and self._now >= reader.resent_at + RESEND_S:
            self._send_again(reader, message)
        effects = self._note_done(reader, message.done_upto)
        effects += self._serve_held_back()
        served = self._serve(reader)
        if served or message.start > message.done_upto:
            return effects + served
        self._starving[reader.name] = reader
        return effects + self._wait_for_step(reader)

    def _send_again(self, reader: Reader, message: Get) -> None:
        """What was sent from the place on that a reader names is lost."""
        reader.resend, reader.resent_at = message.resend, self._now
        self._forget_queue(reader)
        furthest = max(self.formed_upto, self._returned[reader.mesh.ranks])
        place = max((min(message.start, furthest), message.part), (self.released_upto, 0))
        reader.sent_upto, reader.sent_part = place

    def not_sent(self, peer: bytes, envelope: Envelope) -> None:
        """A message for a reader was dropped before it left: it goes out once the reader is heard again."""
        reader, message = self._seats.at(peer), envelope.message
        if reader is None or not isinstance(message, StepPart) or envelope.fence != reader.fence:
            return
        reader.unreached = True
        place = message.step, message.part
        if message.resend == reader.resend and place < (reader.sent_upto, reader.sent_part):
            while reader.queued and reader.queued[-1][:2] >= place:
                self._let_go(reader, reader.queued.pop()[2])
            reader.sent_upto, reader.sent_part = place

    def _confirm(self, reader: Reader, step: int, part: int) -> None:
        """The reader has every part before ``part`` of ``step``."""
        while reader.queued and reader.queued[0][:2] < (step, part):
            self._let_go(reader, reader.queued.popleft()[2])
            reader.resent_at = -RESEND_S

    def _let_go(self, reader: Reader, num_bytes: int) -> None:
        reader.queued_bytes -= num_bytes
        self.queued_bytes -= num_bytes

    def _forget_queue(self, reader: Reader) -> None:
        """Nothing is on its way to a reader any more."""
        self._let_go(reader, reader.queued_bytes)
        reader.queued.clear()
        reader.unreached = False
        self._held_back.pop(reader.name, None)

    def _may_send(self, reader: Reader) -> bool:
        """Are fewer bytes on their way than may be, to a reader and to all? At least one part for each in its turn."""
        if reader.unreached or (reader.queued and reader.queued_bytes >= self._most_queued):
            return False
        if self.queued_bytes >= self.leaving_bytes:
            self._held_back[reader.name] = reader
            return False
        return True

    @property
    def _most_queued(self) -> int:
        """Bytes on their way to one reader."""
        return min(MOST_QUEUED, self.leaving_bytes // max(self._seats.num_ranks, 1))

    def _serve_held_back(self) -> list[Effect]:
        """Others have confirmed: those that waited for it have their turn."""
        effects: list[Effect] = []
        while self._held_back and self.queued_bytes < self.leaving_bytes:
            effects += self._serve(self._held_back.pop(next(iter(self._held_back))))
        return effects

    def tell_starving(self, forming: bool = True) -> list[Effect]:
        """Tell those that have nothing what they wait for, where that is something else than what they heard last;
        unless it is ``forming``, of steps that are there in a moment as a rule."""
        if not self._starving:
            return []
        missing = self._waiting_for()
        if (missing.reason, missing.stream) == self._said or (missing.reason == "forming" and not forming):
            return []
        self._why["step"], self._said = missing, (missing.reason, missing.stream)
        return [e for reader in list(self._starving.values()) if reader.entered for e in self._wait_for_step(reader)]

    def _ping(self, reader: Reader, message: ReaderPing) -> list[Effect]:
        reader.have_upto = max(reader.have_upto, message.have_upto)
        reader.unreached = False
        self._confirm(reader, message.have_upto, message.part)
        effects = self._note_done(reader, message.done_upto)
        return effects + self._serve_held_back() + self._wait_for_step(reader)

    def _note_figures(self, reader: Reader, message: ReaderPing) -> None:
        """Of one that waits for others to join, too."""
        reader.stats = message.stats
        if message.starvation is not None:
            self.next_waits.add(reader.starvation, message.starvation)
            reader.starvation = message.starvation

    def _note_done(self, reader: Reader, done_upto: int) -> list[Effect]:
        done_upto = min(done_upto, reader.sent_upto)
        if done_upto <= self._returned[reader.mesh.ranks]:
            return []
        self._returned[reader.mesh.ranks] = done_upto
        return self._release()

    def _release(self) -> list[Effect]:
        """Forget the steps that every rank has returned; what one may still ask for again is kept."""
        last = OUT if self.end is None else self.end.num_steps
        if not self.joined or any(self._returned[ranks] < last for ranks in self._unheard):
            return []
        least = self._returned.least
        upto = self.released_upto if least == OUT else min(self.formed_upto, least)  # where all are out, nobody reads
        effects: list[Effect] = [Release(self._steps.forget(n)) for n in range(self.released_upto, upto)]
        self.released_upto = max(self.released_upto, upto)
        return effects

    def _serve_all(self) -> list[Effect]:
        return [e for reader in self._seats for e in self._serve(reader)]

    def _serve(self, reader: Reader) -> list[Effect]:
        """All that the reader wants and that is there."""
        if not reader.entered:
            return []
        effects: list[Effect] = []
        while reader.sent_upto < min(reader.want_stop, self.formed_upto):
            number = max(reader.sent_upto, self.released_upto)
            if unfit := self._steps.unfit(number, reader.mesh):
                return [*effects, *self._send(reader, Reject(code="too_few", detail=unfit))]
            effects += self._send_parts(reader, number)
            if reader.sent_upto <= number:
                return effects
        if self.end is not None and reader.sent_upto >= self.end.num_steps:
            effects += self._send_end(reader)
        elif self.draining and reader.sent_upto >= self.formed_upto:
            effects += self._send(reader, Bye(reason="the broker is stopping"))
        return effects

    def _send_parts(self, reader: Reader, number: int) -> list[Effect]:
        """The parts of a step that follow, as far as may be now."""
        effects: list[Effect] = []
        begin = reader.sent_part if reader.sent_upto == number else 0
        parts = self._steps.parts(number, reader.mesh, begin, reader.resend)
        while reader.sent_upto <= number and self._may_send(reader):
            effects.append(self._send_part(reader, *next(parts)))
        if effects:
            self._starving.pop(reader.name, None)
        return effects

    def _send_part(self, reader: Reader, plan: StepPart, packs: Contents) -> Effect:
        mesh, size, place = reader.mesh, self._steps.num_bytes(packs, reader.mesh), (plan.step, plan.part)
        if place < reader.ever_sent:
            self.resent_bytes += size
        whole = plan.part + 1 >= plan.parts
        reader.sent_upto, reader.sent_part = (plan.step + 1, 0) if whole else (plan.step, plan.part + 1)
        reader.ever_sent = max(reader.ever_sent, (reader.sent_upto, reader.sent_part))
        reader.queued.append((*place, size))
        self._let_go(reader, -size)
        envelope = self._envelope(plan, reader.fence)
        if not plan.micro_batches:
            return SendTrainer(reader.peer, envelope)
        return SendShard(reader.peer, envelope, packs, plan.frames, self._layout, mesh.cp, mesh.cp_rank)

    def _send_end(self, reader: Reader) -> list[Effect]:
        assert self.end is not None
        return self._send(reader, msgspec.structs.replace(self.end, resend=reader.resend))

    def _wait_for_step(self, reader: Reader) -> list[Effect]:
        """What the reader's next step waits for, if it asked for one that is not there."""
        wants = reader.sent_upto < reader.want_stop
        if not wants and not reader.queued:
            return []
        if wants and self.end is not None and reader.sent_upto >= self.end.num_steps:
            return self._send_end(reader)
        if wants and reader.sent_upto < self.formed_upto and (served := self._serve(reader)):
            return served
        if not wants or reader.sent_upto < self.formed_upto:
            detail = f"step {reader.sent_upto}: {reader.queued_bytes} bytes are on their way"
            return self._send_wait(reader, Missing("network", detail))
        if "step" not in self._why:
            self._why["step"] = self._waiting_for()
        missing = self._why["step"]
        if (missing.reason, missing.stream) != self._said:
            self._said = None
        return self._send_wait(reader, missing)

    def _send_wait(self, reader: Reader, missing: Missing) -> list[Effect]:
        wait = Wait(
            feed=self._feed, step=reader.sent_upto, part=reader.sent_part, resend=reader.resend, reason=missing.reason,
            detail=missing.detail[:2000], stream=missing.stream, batch=missing.batch,
        )  # fmt: skip
        return self._send(reader, wait)

    def _envelope(self, message: Message, fence: int) -> Envelope:
        return Envelope(run=self._run, epoch=self.epoch, fence=fence, message=message)

    def _send(self, reader: Reader, message: Message) -> list[Effect]:
        return [SendTrainer(reader.peer, self._envelope(message, reader.fence))]
