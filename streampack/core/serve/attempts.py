"""Begins attempts of the trainers, at the right step and with all ranks.

A reader takes its rank first (``rank_registry``). Later it is ready, and reports the step at which it begins. An
*attempt* begins when every rank of the mesh is ready. No other process may claim a rank then, because the holder of a
claimed rank may be dead. The attempt begins at the earliest step that a rank asks for; deleted steps are formed again.
Attempts are numbered, and messages of another attempt or to another broker change nothing.

A process that takes a rank over goes on in the same attempt if its steps are still kept. The other ranks do not
notice. Otherwise it waits until all ranks ask for an earlier step. A process of another mesh waits until the old ranks
are gone.

A feed may be iterated repeatedly. A reader that asks for a later iteration waits outside the current one. The iteration
begins in a new attempt, once all ranks of the mesh ask for it. So all ranks iterate the same number of times.
"""

from __future__ import annotations

from enum import Enum

from streampack.core.deal.part_flow import ACKS
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Rules
from streampack.core.model.snapshot import Snapshot
from streampack.core.protocol.events import Effect, Report
from streampack.core.protocol.message import Bye
from streampack.core.protocol.trainer_messages import Attached, Probe, Wait
from streampack.core.serve.join_texts import JoinTexts
from streampack.core.serve.rank_reader import Ranks, Reader, ReaderLink
from streampack.core.serve.rank_registry import CLAIM_S, RESTART_S, RankRegistry, clash
from streampack.core.serve.receivers import Receivers
from streampack.core.serve.served_steps import ServedSteps
from streampack.core.serve.step_sender import StepSender
from streampack.core.serve.step_source import StepSource

PINGS_A_SECOND = 1000
"""Most pings of all ranks in a second: with more ranks, each pings less often."""
MOST_PING_S = 10.0
"""Longest time between two pings of a rank, in seconds."""
PROBE_S = 1.0
"""Seconds between two probes of a holder whose rank is claimed."""

NEWS_A_TICK = 16
"""Most times in a tick that the texts for waiting readers are composed: thousands of ranks may come at once."""


class Departure(Enum):
    """Reason that a reader was removed; the value is the text for the log."""

    GOODBYE = "it said goodbye"
    SILENT = "it was silent for {} s"
    TAKEN_OVER = "it was silent for {} s, and another process took over its rank"
    OTHER_RANK = "it took another rank"
    OTHER_FEED = "its peer took another feed"
    PEER_TOOK_RANK = "its peer took another rank"
    REFUSED = "it was refused"
    KEY_CHANGED = "its key was changed, or does not allow its messages"


class AttemptCoordinator:
    """Begins attempts when all ranks are ready, and tells waiting readers why they wait."""

    def __init__(
        self, link: ReaderLink, rules: Rules, layout: str, registry: RankRegistry, steps: ServedSteps,
        receivers: Receivers, sender: StepSender, source: StepSource,
    ) -> None:  # fmt: skip
        self._link, self._feed, self._rules, self._layout = link, link.feed, rules, layout
        self._registry, self._steps, self._source = registry, steps, source
        self._receivers, self._sender, self._texts = receivers, sender, JoinTexts(registry)
        self.pings_a_second: float = PINGS_A_SECOND
        self.number = 0
        """The number of the attempt; 0 before the first."""
        self.iteration = 0
        """Number of the iteration over the feed that is served."""
        self._news = 0
        """Changes in this tick of what readers wait for."""
        self._of_all: tuple[list[Reader], float, bool] = ([], 0.0, False)
        """The holders that blocked the last decided claim, the time of their last message, and whether one takes part.
        All claims for ranks of another mesh share these, and there may be thousands of them."""

    def fail(self, code: str, detail: str) -> list[Effect]:
        """Reject every reader with an error: nothing more can be served."""
        return [effect for reader in self._registry for effect in self.refuse(reader, code, detail)]

    def check(self, step: int, chain: bytes) -> list[Effect]:
        """Record the digest of all steps before ``step``, and reject readers that begin there but had other steps."""
        self._steps.note_chain(step, chain)
        astray = [reader for reader in self._registry if reader.ready and self.has_diverged(reader)]
        return [
            effect for reader in astray for effect in self.refuse(reader, "diverged", diverged(reader, self._rules))
        ]

    @property
    def known_upto(self) -> int:
        """First step that is not formed, and that no reader has had from this broker or an earlier one."""
        return max([self._steps.formed_upto, *(reader.first_step for reader in self._registry if reader.ready)])

    @property
    def ping_s(self) -> float:
        """Seconds between two pings of a reader; more with many readers."""
        return min(max(self._registry.num_ranks / self.pings_a_second, 1.0), MOST_PING_S)

    # Ranks

    def take_rank(self, reader: Reader) -> list[Effect]:
        """Give a reader its free rank, and let it join the attempt if it is ready. Another mesh ends the attempt."""
        if self._registry.give_rank(reader):
            self._steps.end_attempt()
        else:
            self._steps.await_others(reader.mesh.ranks)
        self._has_news()
        took = reader.report(
            "info", f"reader {reader.where} took rank {reader.mesh} of feed {self._feed!r}", self._feed
        )
        return [took, *self.arrive(reader)]

    def settle(self) -> list[Effect]:
        """Decide claims and requests for deleted steps, and begin an attempt if all ranks are ready."""
        self._of_all = ([], 0.0, False)
        effects = self._probe()
        effects += [effect for reader in list(self._registry.claims.values()) for effect in self._decide(reader)]
        holders = self._registry.held.values()
        if late := [reader for reader in holders if not reader.entered and self._is_late(reader)]:
            entered = [reader for reader in holders if reader.entered]
            heard = max((reader.heard for reader in entered), default=0.0)
            for reader in late:
                if heard > reader.since + RESTART_S:
                    effects += self.refuse(reader, *self._too_late(reader, entered))
        return effects + (self._begin() if self._registry.all_wait() else [])  # a claim may have held the attempt back

    def _probe(self) -> list[Effect]:
        """Ask the holders of claimed ranks for a ping, because their next regular ping may be seconds away."""
        effects: list[Effect] = []
        wanted_step = None
        for claim in self._registry.claims.values():
            others = self._registry.in_the_way(claim)
            if others is wanted_step:  # claims for ranks of another mesh share one list
                continue
            wanted_step = others
            for other in others:
                if self._registry.now >= max(other.heard, other.probed) + PROBE_S:
                    other.probed = self._registry.now
                    effects += self._link.send(other, Probe(feed=self._feed))
        return effects

    @property
    def _claim_s(self) -> tuple[float, float]:
        """Limits after which a silent holder loses its rank, as (seconds of silence, seconds since the claim)."""
        more = self.ping_s - 1.0
        return CLAIM_S + more, min(CLAIM_S, more)

    def _decide(self, claim: Reader) -> list[Effect]:
        """Grant a claim if all holders are silent, reject the claim if a holder is alive, or leave the claim open."""
        others = self._registry.in_the_way(claim)
        if self._of_all[0] is not others:
            heard = max((other.heard for other in others), default=0.0)
            self._of_all = others, heard, any(other.entered for other in others)
        _, heard, entered = self._of_all
        silent_s, probed_s = self._claim_s
        if not others or (self._registry.now - heard > silent_s and self._registry.now > claim.since + probed_s):
            effects = [e for other in others for e in self.leave(other, Departure.TAKEN_OVER, silent_s)]
            return effects + self.take_rank(claim)
        if heard <= claim.since:
            return []
        late, foreign = self._is_late(claim), self._registry.is_foreign(claim)
        restarts = (late or foreign) and entered  # the old processes may be about to end
        if heard <= claim.since + (RESTART_S if restarts else 0.0):
            return []
        return self.refuse(
            claim, *(self._too_late(claim, others) if restarts and not foreign else clash(claim, others[0]))
        )

    def drop_silent_claim(self, ranks: Ranks) -> list[Effect]:
        """Remove the oldest claim of a rank whose process is silent; return no effects if there is none."""
        claim = self._registry.silent_claim(ranks, self._claim_s[0])
        return [] if claim is None else self.leave(claim, Departure.SILENT, self._registry.now - claim.heard)

    def leave(self, reader: Reader, why: Departure, silent_s: float = 0.0) -> list[Effect]:
        """Remove a reader, which was silent for ``silent_s`` seconds, for the reason ``why``; free its rank."""
        self._has_news()
        self._registry.remove(reader)
        self._receivers.leave(reader)
        reader.went_silent = why is Departure.SILENT
        text = f"rank {reader.mesh} at {reader.where} left feed {self._feed!r}: {why.value.format(round(silent_s))}"
        return [reader.report("info" if why is Departure.GOODBYE else "warning", text, self._feed)]

    def tick(self) -> None:
        """Forget the texts for waiting readers, so that new texts are composed."""
        self._news = 0
        self._forget_texts()

    # Attempts

    def arrive(self, reader: Reader) -> list[Effect]:
        """Let a reader with a rank join the attempt, begin a new attempt, or tell the reader why it waits."""
        self._has_news()
        if not reader.ready:
            return self.answer(reader)
        if (
            self._steps.returned
            and reader.iteration == self.iteration
            and reader.first_step >= self._steps.released_upto
        ):
            return self._enter(reader) + self._steps.release() + self._sender.serve(reader.receiver)
        if self._steps.returned and reader.iteration > self.iteration:
            self._steps.leave_iteration(reader.mesh.ranks)
        if self._registry.all_wait():
            return self._begin()
        return self.answer(reader) + self._steps.release()

    def _begin(self) -> list[Effect]:
        """Begin an attempt, in the earliest iteration and at the earliest step that readers ask for."""
        readers = list(self._registry.held.values())
        unfit = [(reader, why) for reader in readers if (why := self._source.unfit(reader.first_step, reader.snapshot))]
        if unfit:  # the snapshot was fit when the reader came
            return [effect for reader, why in unfit for effect in self.refuse(reader, *why)]
        self.number += 1
        self.iteration = min(reader.iteration for reader in readers)
        members = [reader for reader in readers if reader.iteration == self.iteration]
        self._steps.begin(reader.mesh.ranks for reader in readers)
        step = min(reader.first_step for reader in members)
        ready = f"all {len(readers)} ranks are ready" if len(readers) > 1 else "its only rank is ready"
        text = f"attempt {self.number} of feed {self._feed!r} begins at step {step}: {ready}"
        effects: list[Effect] = [Report("info", text, feed=self._feed, attempt=self.number, step=step)]
        brought = [reader.snapshot for reader in members if reader.snapshot is not None]
        away = step < self._steps.released_upto or (step > self._steps.formed_upto and self._steps.end is None)
        if away or not all(map(self._source.knows, brought)):
            on = any(0 <= reader.going_on <= self._steps.kept.lineage for reader in members)
            effects += self._go_to(step, brought, step < self._steps.released_upto and not on)
        for reader in (reader for reader in members if reader.holds):  # a reader may have been rejected as diverged
            effects += self._enter(reader)
        self._forget_texts()
        others = [reader for reader in readers if reader.holds and not reader.entered]
        effects += [e for reader in others for e in self.wait(reader)]
        return effects + self._steps.release() + self._sender.serve_all()

    def _go_to(self, step: int, snapshots: list[Snapshot], back: bool) -> list[Effect]:
        """Delete all steps, and form them again from ``step`` on, from the nearest of the readers' snapshots."""
        effects = self._steps.forget_all(step)
        fit = [snapshot for snapshot in snapshots if snapshot.step <= step]
        nearest = max(fit, key=lambda snapshot: (snapshot.step, len(snapshot.changes)), default=None)
        return effects + self._source.rewind(step, nearest, back)

    def _enter(self, reader: Reader) -> list[Effect]:
        """Add a reader to the attempt, from the reader's first step on."""
        reader.enter(self.number)
        self._steps.enter(reader)
        self._receivers.enter(reader, reader.first_step)
        return self._link.send(reader, self._attached(reader))

    def _is_late(self, reader: Reader) -> bool:
        """Return whether a reader asks for a deleted step, which only a new attempt of all ranks can serve."""
        is_deleted = (reader.iteration, reader.first_step) < (self.iteration, self._steps.released_upto)
        return bool(self._steps.returned) and reader.ready and not reader.entered and is_deleted

    def _too_late(self, reader: Reader, others: list[Reader]) -> tuple[str, str]:
        """Return why a reader cannot begin at the deleted step that it requests, as (error code, error text)."""
        alive = self._registry.names_of((other.mesh.ranks for other in others), len(others))
        if reader.iteration < self.iteration:
            return "round_gone", (
                f"got iteration {reader.iteration} of feed {self._feed!r}, expected iteration {self.iteration}, which "
                f"other ranks still read. Restart all ranks, or stop these ranks: {alive}"
            )
        return "step_gone", (
            f"got a request to start at step {reader.first_step}, expected step {self._steps.released_upto} or later, "
            f"because the broker has deleted earlier steps. Restart all ranks, or stop these ranks: {alive}"
        )

    def has_diverged(self, reader: Reader) -> bool:
        """Return whether a reader's steps before its first step differ from this run's steps."""
        if reader.snapshot is not None and not self._source.knows(reader.snapshot):
            return False  # its changes are not recorded yet, and other steps follow from them
        chain = self._steps.chain_of(reader.first_step)
        return chain != b"" and reader.chain not in (b"", chain)

    def _attached(self, reader: Reader) -> Attached:
        """Return the message that tells a reader that it has its rank."""
        return Attached(
            feed=self._feed, reader=reader.name, lineage=self._steps.kept.lineage, next_step=reader.first_step,
            rules=self._rules, layout=self._layout, iteration=reader.iteration, ping_s=self.ping_s,
            ack_bytes=self._receivers.most_queued(reader.receiver) // ACKS,
        )  # fmt: skip

    # Answers to readers

    def answer(self, reader: Reader) -> list[Effect]:
        """Tell a reader that it is part of the attempt, or that it has its rank and why it still waits."""
        if reader.entered:
            return self._link.send(reader, self._attached(reader))
        has_part = reader.holds and not reader.fence
        return (self._link.send(reader, self._attached(reader)) if has_part else []) + self.wait(reader)

    def wait(self, reader: Reader) -> list[Effect]:
        """If a reader waits, tell it the cause."""
        return self._sender.wait_for_step(reader.receiver) if reader.entered else self._wait_to_enter(reader)

    def _wait_to_enter(self, reader: Reader) -> list[Effect]:
        """Tell a reader outside the attempt the ranks or the snapshot for which it waits."""
        if self._steps.draining:
            return self._link.send(reader, Bye(reason="the broker is stopping"))
        if reader.holds and not reader.ready and reader.pending is None:
            return []
        if not reader.holds:
            detail = self._texts.claim(reader)
        elif reader.pending is not None:
            detail = "the checkpoint's snapshot, which one rank sends"
        else:
            ahead = bool(self._steps.returned) and reader.iteration > self.iteration
            detail = self._texts.join(reader.iteration if ahead else None)
        wait = Wait(
            feed=self._feed, step=reader.first_step, reason="join", detail=detail[:2000], ping_s=self.ping_s
        )  # fmt: skip
        return self._link.send(reader, wait)

    def _has_news(self) -> None:
        """Forget the texts for waiting readers, which may be outdated; at most ``NEWS_A_TICK`` times per tick."""
        self._news += 1
        if self._news <= NEWS_A_TICK:
            self._forget_texts()

    def _forget_texts(self) -> None:
        """Forget the texts for waiting readers."""
        self._texts.forget()
        self._sender.forget_missing()

    def refuse(self, reader: Reader, code: str, detail: str) -> list[Effect]:
        """Reject a reader with an error, and remove it."""
        left = self.leave(reader, Departure.REFUSED)
        return self.reject(reader.peer, code, detail, reader.mesh, reader.host) + left

    def reject(
        self, peer: bytes, code: str, detail: str, mesh: Mesh | None = None, host: str | None = None
    ) -> list[Effect]:
        """Reject a client that neither holds nor claims a rank."""
        return self._link.reject(peer, code, detail, self.number, mesh.rank if mesh is not None else None, host)


def diverged(reader: Reader, rules: Rules) -> str:
    """Return the error text for a reader whose steps before its first step differ from this run's steps."""
    pushed = any(stream.pushed for stream in rules.streams)
    lost = " Or the log with the pushed samples (in state_dir) was lost or replaced." if pushed else ""
    return (
        f"the steps before step {reader.first_step} differ from the steps of this run. The data, the rules or the seed "
        f"have changed.{lost} Undo the change, or start a new run."
    )
