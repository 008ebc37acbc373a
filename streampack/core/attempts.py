"""How an attempt of the trainers comes about: when it begins, at which step, and who takes part.

A reader takes its rank first (``seats``) and says later that it is ready and where it begins. An
*attempt* begins when every rank of the mesh is ready and no other process claims one, as its holder
may be dead; at the earliest step that a rank asks for: steps that are gone are formed again. It is
numbered, and what was said in another, or to another broker, changes nothing. A process that takes a
rank over in an attempt goes on in place, where its steps are still kept: the others notice nothing.
Where they are not, it waits until all ranks ask for an earlier step, and so does who comes with
another mesh until the old ranks are gone.

A feed may be iterated again and again: a reader names the *round* that it is in. One that asks
for a later round is out of the one that is served, and waits; when all ranks of the mesh do, that
round begins, in a new attempt. A rank that is gone but has not asked for it holds the others back: all
iterate the same number of times.
"""

from __future__ import annotations

from collections.abc import Callable

from streampack.core.effects import SendTrainer
from streampack.core.events import Effect, Report
from streampack.core.messages import Attached, Bye, Mesh, Probe, Reject, Wait
from streampack.core.rules import Rules
from streampack.core.samples import SampleTable
from streampack.core.seats import CLAIM_S, RESTART_S, Reader, clash
from streampack.core.serving import ACKS, OUT, RESEND_S, Serving
from streampack.core.snapshot import Snapshot
from streampack.core.starvation import Missing

PINGS_A_SECOND = 1000
"""Of all ranks together: more ranks ping less often."""
MOST_PING_S = 10.0
PROBE_S = 1.0
"""Between two probes of a holder whose rank is claimed."""

NEWS_A_TICK = 16
"""What all that wait are told is worked out anew as ranks come and go, but not for each of thousands."""


class Attempts(Serving):
    """The attempt that is served and who waits for the next; ``unfit`` says why the feed cannot go to a step, or not
    with a reader's snapshot, ``rewind`` has it go there, from that if it has none that is nearer, for trainers that
    have gone back or go on.
    """

    def __init__(
        self, run: int, epoch: int, feed: str, rules: Rules, layout: str, table: SampleTable,
        waiting_for: Callable[[], Missing], unfit: Callable[[int, Snapshot | None], tuple[str, str] | None],
        rewind: Callable[[int, Snapshot | None, bool], list[Effect]], leaving_bytes: int,
    ) -> None:  # fmt: skip
        super().__init__(run, epoch, feed, rules, layout, table, waiting_for, leaving_bytes)
        self.pings_a_second: float = PINGS_A_SECOND
        self._unfit, self._rewind = unfit, rewind
        self._attempt = self._news = 0
        self._of_all: tuple[list[Reader], float, bool] = ([], 0.0, False)
        """Of those in the way of the claim that was decided last: when one was heard, and whether one takes part. All
        that claim ranks of another mesh have the same ones, and there may be thousands of both."""
        self.round = 0
        """The iteration that is served."""
        self.is_known: Callable[[Snapshot], bool] = lambda _: True
        """Whether the feed knows of all changes and skips that a checkpoint does."""
        self.refused = 0
        """Clients that were refused."""

    def fail(self, code: str, detail: str) -> list[Effect]:
        """Nothing more can be served: tell every reader."""
        return [effect for reader in self._seats for effect in self._refuse(reader, code, detail)]

    def check(self, step: int, chain: bytes) -> list[Effect]:
        """All steps before ``step`` have this digest: refuse readers that begin there and had others."""
        self._chains[step] = chain
        self._chains.pop(step - 4096, None)
        astray = [reader for reader in self._seats if reader.ready and self._has_diverged(reader)]
        return [
            effect for reader in astray for effect in self._refuse(reader, "diverged", diverged(reader, self._rules))
        ]

    @property
    def known_upto(self) -> int:
        """Steps before are formed, or some reader has had them from this broker or another."""
        return max([self.formed_upto, *(reader.first_step for reader in self._seats if reader.ready)])

    @property
    def ping_s(self) -> float:
        """Seconds between two pings of a reader: more where there are many."""
        return min(max(self._seats.num_ranks / self.pings_a_second, 1.0), MOST_PING_S)

    # Ranks that are given up, and taken

    def _seat(self, reader: Reader) -> list[Effect]:
        """A reader holds its rank; with that of another mesh the attempt of the one before is over."""
        if self._seats.seat(reader):
            self._returned.clear()
            self._unheard.clear()
        elif self._returned:
            self._unheard = self._returned.others(reader.mesh.ranks)
        self._has_news()
        took = reader.report(
            "info", f"reader {reader.where} took rank {reader.mesh} of feed {self._feed!r}", self._feed
        )
        return [took, *self._arrive(reader)]

    def _settle(self) -> list[Effect]:
        """Claims whose rank was given up go through; who finds others alive is refused."""
        self._of_all = ([], 0.0, False)
        effects = self._probe()
        effects += [effect for reader in list(self._seats.claims.values()) for effect in self._decide(reader)]
        entered = [reader for reader in self._seats.held.values() if reader.entered]
        heard = max((reader.heard for reader in entered), default=0.0)
        for reader in list(self._seats.held.values()):
            if self._is_late(reader) and heard > reader.since + RESTART_S:
                effects += self._refuse(reader, *self._too_late(reader, entered))
        return effects + (self._begin() if self._seats.all_wait() else [])  # a claim may have held them back

    def _probe(self) -> list[Effect]:
        """Ask those whose rank is claimed whether they are there: their next ping may be far away."""
        effects: list[Effect] = []
        asked = None
        for claim in self._seats.claims.values():
            others = self._seats.in_the_way(claim)
            if others is asked:  # all that claim ranks of another mesh have the same ones
                continue
            asked = others
            for other in others:
                if self._now >= max(other.heard, other.probed) + PROBE_S:
                    other.probed = self._now
                    effects += self._send(other, Probe(feed=self._feed))
        return effects

    @property
    def _claim_s(self) -> tuple[float, float]:
        """A holder loses its rank that was not heard for so long, and not for so long since it was claimed and
        probed."""
        more = self.ping_s - 1.0
        return CLAIM_S + more, min(CLAIM_S, more)

    def _decide(self, claim: Reader) -> list[Effect]:
        others = self._seats.in_the_way(claim)
        if self._of_all[0] is not others:
            heard = max((other.heard for other in others), default=0.0)
            self._of_all = others, heard, any(other.entered for other in others)
        _, heard, entered = self._of_all
        silent_s, probed_s = self._claim_s
        if not others or (self._now - heard > silent_s and self._now > claim.since + probed_s):
            effects = [e for other in others for e in self._leave(other, f"silent for {silent_s:.0f} s, taken over")]
            return effects + self._seat(claim)
        late, foreign = self._is_late(claim), self._seats.is_foreign(claim)
        restarts = (late or foreign) and entered  # the old ones may be about to die
        if heard <= claim.since + (RESTART_S if restarts else 0.0):
            return []
        return self._refuse(
            claim, *(self._too_late(claim, others) if restarts and not foreign else clash(claim, others[0]))
        )

    def _leave(self, reader: Reader, why: str) -> list[Effect]:
        self._has_news()
        self._seats.remove(reader)
        self._starving.pop(reader.name, None)
        self._forget_queue(reader)
        text = f"rank {reader.mesh} at {reader.where} left feed {self._feed!r}: {why}"
        return [reader.report("info" if "goodbye" in why else "warning", text, self._feed)]

    # Attempts

    def _arrive(self, reader: Reader) -> list[Effect]:
        """A reader has its rank and says where it begins, if it does: in the attempt that is served, or in the next."""
        self._has_news()
        if not reader.ready:
            return self._answer(reader)
        if self._returned and reader.round == self.round and reader.first_step >= self.released_upto:
            return self._enter(reader) + self._release() + self._serve(reader)
        if self._returned and reader.round > self.round:
            self._returned[reader.mesh.ranks] = OUT
        if self._seats.all_wait():
            return self._begin()
        return self._answer(reader) + self._release()

    def _begin(self) -> list[Effect]:
        """A new attempt, in the earliest round that a reader asks for; steps that are gone are formed again."""
        readers = list(self._seats.held.values())
        unfit = [(reader, gone) for reader in readers if (gone := self._unfit(reader.first_step, reader.snapshot))]
        if unfit:  # it was fit when it came
            return [effect for reader, gone in unfit for effect in self._refuse(reader, *gone)]
        self._attempt += 1
        self._unheard.clear()
        self.round = min(reader.round for reader in readers)
        members = [reader for reader in readers if reader.round == self.round]
        self._returned.clear()
        for reader in readers:
            self._returned[reader.mesh.ranks] = OUT
        step = min(reader.first_step for reader in members)
        text = (
            f"attempt {self._attempt} of feed {self._feed!r} begins at step {step}: all {len(readers)} ranks are ready"
        )
        effects: list[Effect] = [Report("info", text, feed=self._feed, attempt=self._attempt, step=step)]
        brought = [reader.snapshot for reader in members if reader.snapshot is not None]
        away = step < self.released_upto or (step > self.formed_upto and self.end is None)
        if away or not all(map(self.is_known, brought)):
            on = any(0 <= reader.going_on <= self.lineage for reader in members)
            effects += self._go_to(step, brought, step < self.released_upto and not on)
        for reader in (reader for reader in members if reader.holds):  # one may have been refused as diverged
            effects += self._enter(reader)
        self._why.clear()
        others = [reader for reader in readers if reader.holds and not reader.entered]
        return effects + [e for reader in others for e in self._wait(reader)] + self._release() + self._serve_all()

    def _go_to(self, step: int, snapshots: list[Snapshot], back: bool) -> list[Effect]:
        """Have the feed form from ``step`` on, with the nearest snapshot that a reader has brought. ``back``: it was
        returned, and no reader goes on where another broker has served it."""
        effects = self._forget_all(step)
        fit = [snapshot for snapshot in snapshots if snapshot.step <= step]
        nearest = max(fit, key=lambda snapshot: (snapshot.step, len(snapshot.changes)), default=None)
        return effects + self._rewind(step, nearest, back)

    def _enter(self, reader: Reader) -> list[Effect]:
        """A reader takes part in the attempt from its first step on."""
        reader.entered, reader.fence, reader.snapshot = True, self._attempt, None
        self._returned[reader.mesh.ranks] = reader.first_step
        self._forget_queue(reader)
        reader.sent_upto, reader.sent_part, reader.ever_sent = reader.first_step, 0, (reader.first_step, 0)
        reader.want_stop, reader.resend, reader.resent_at = 0, 0, -RESEND_S
        return self._send(reader, self._attached(reader))

    def _is_late(self, reader: Reader) -> bool:
        """Is what it asks for gone, so that it can only be served if all begin again?"""
        gone = (reader.round, reader.first_step) < (self.round, self.released_upto)
        return bool(self._returned) and reader.ready and not reader.entered and gone

    def _too_late(self, reader: Reader, others: list[Reader]) -> tuple[str, str]:
        """Why a reader cannot begin where it asks to: (code, detail)."""
        alive = self._seats.names_of((other.mesh.ranks for other in others), len(others))
        if reader.round < self.round:
            return "round_gone", (
                f"got iteration {reader.round} of feed {self._feed!r}, expected {self.round}, in which other ranks "
                f"still read: start all ranks again, or end {alive}"
            )
        return "step_gone", (
            f"got a request to start at step {reader.first_step}, expected {self.released_upto} or later, the oldest "
            f"step kept, while other ranks still read: start all ranks again, or end {alive}"
        )

    def _has_diverged(self, reader: Reader) -> bool:
        if reader.snapshot is not None and not self.is_known(reader.snapshot):
            return False  # other steps follow once its changes are known here, too
        known = self.chain_of(reader.first_step)
        return known != b"" and reader.chain not in (b"", known)

    def _attached(self, reader: Reader) -> Attached:
        return Attached(
            feed=self._feed, reader=reader.name, lineage=self.lineage, next_step=reader.first_step, rules=self._rules,
            layout=self._layout, round=reader.round, ping_s=self.ping_s, ack_bytes=self._most_queued // ACKS,
        )  # fmt: skip

    # What they are told

    def _answer(self, reader: Reader) -> list[Effect]:
        """Where it stands: in the attempt of its fence, or with its rank in none yet (0)."""
        if reader.entered:
            return self._send(reader, self._attached(reader))
        known = reader.holds and not reader.fence
        return (self._send(reader, self._attached(reader)) if known else []) + self._wait(reader)

    def _wait(self, reader: Reader) -> list[Effect]:
        """What the reader waits for, if it does."""
        return self._wait_for_step(reader) if reader.entered else self._wait_to_enter(reader)

    def _wait_to_enter(self, reader: Reader) -> list[Effect]:
        if self.draining:
            return self._send(reader, Bye(reason="the broker is stopping"))
        if reader.holds and not reader.ready and reader.pending is None:
            return []
        detail = "the checkpoint's snapshot, which one rank sends" if reader.pending is not None else ""
        detail = detail or self._missing(reader) if reader.holds else self._claimed(reader)
        wait = Wait(
            feed=self._feed, step=reader.first_step, reason="join", detail=detail[:2000], ping_s=self.ping_s
        )  # fmt: skip
        return self._send(reader, wait)

    def _has_news(self) -> None:
        """Others wait for something else now."""
        self._news += 1
        if self._news <= NEWS_A_TICK:
            self._why.clear()

    def _claimed(self, reader: Reader) -> str:
        others = self._seats.in_the_way(reader)
        names = self._seats.names_of((other.mesh.ranks for other in others), len(others))
        return f"rank {reader.mesh} is free when those that read are gone: {names}"

    def _missing(self, reader: Reader) -> str:
        """Ranks without which no attempt begins: the same for all readers that wait in a round."""
        held, count = self._seats.held, self._seats.num_ranks
        ahead = bool(self._returned) and reader.round > self.round
        key = f"round {reader.round}" if ahead else ""
        if key not in self._why:
            there = {r for r, other in held.items() if other.ready and not other.entered}
            names = self._seats.names_of((r for r in self._seats.ranks() if r not in there), count - len(there))
            of = f"{count - len(there)} of {count} ranks are"
            text = (
                f"iteration {reader.round}: {of} still in the one before: {names}"
                if ahead
                else f"{of} not ready: {names}"
            )
            if len(there) == count:
                claims = (f"{each.where} asks for rank {each.mesh}, too" for each in self._seats.claims.values())
                text = f"all ranks are ready: {next(claims, 'it begins')}"
            self._why[key] = Missing("join", text)
        return self._why[key].detail

    def _refuse(self, reader: Reader, code: str, detail: str) -> list[Effect]:
        """Refuse a reader that was let in."""
        left = self._leave(reader, "it was refused")
        return self._reject(reader.peer, code, detail, reader.mesh, reader.host) + left

    def _reject(
        self, peer: bytes, code: str, detail: str, mesh: Mesh | None = None, host: str | None = None
    ) -> list[Effect]:
        self.refused += 1
        reject = SendTrainer(peer, self._envelope(Reject(code=code, detail=detail[:2000]), self._attempt))
        rank = mesh.rank if mesh is not None else None
        return [Report("warning", f"refused a client: {detail}", feed=self._feed, rank=rank, host=host), reject]


def diverged(reader: Reader, rules: Rules) -> str:
    """What a reader hears that had other steps before the one where it begins."""
    pushed = any(stream.pushed for stream in rules.streams)
    lost = ", or the log that holds the pushed samples was lost or replaced (state_dir)" if pushed else ""
    return (
        f"the steps before {reader.first_step} are not those that this run serves: the data, the rules or the seed "
        f"have changed{lost}: put them back or start a new run"
    )
