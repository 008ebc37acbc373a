"""The trainers' side of the broker: what each rank has had, and the attempts in which they read.

A reader takes its rank first (``attempts``) and says later that it is ready and where it begins. An
*attempt* begins when every rank of the mesh is ready, at the earliest step that one of them
asks for: steps that are gone are formed again. It is numbered, and what was said in another, or to
another broker, changes nothing. A process that takes a rank over in an attempt goes on in place, where
its steps are still kept: the others notice nothing. Where they are not, it waits until all ranks
ask for an earlier step, and so does who comes with another mesh until the old ranks are gone.

A step goes out whole, to every rank. Reads are pure: asking again for a step gives the same bytes; only
``done_upto`` moves, and only up. A step is kept until every rank has returned it. Knows steps and
packs by number, never tokens.

A feed may be iterated again and again: a reader names the *round* that it is in. One that asks
for a later round is out of the one that is served, and waits; when all ranks of the mesh do, that
round begins, in a new attempt. A rank that is gone but has not asked for it holds the others back: all
iterate the same number of times.
"""

from __future__ import annotations

from collections.abc import Callable

from streampack.core.attempts import CLAIM_S, RESTART_S, Ranks, Reader, Seats, clash, rank_name, refusal
from streampack.core.effects import Release, SendShard, SendTrainer
from streampack.core.events import Effect, Report
from streampack.core.form import Step
from streampack.core.kept import KeptSteps
from streampack.core.messages import (
    AskState,
    Attach,
    Attached,
    Bye,
    Commit,
    Committed,
    End,
    Envelope,
    Fenced,
    Get,
    Message,
    ReaderPing,
    Reject,
    State,
    Wait,
    Who,
)
from streampack.core.rules import Rules
from streampack.core.samples import SampleTable
from streampack.core.snapshot import Snapshot

TELL_S = 1.0
"""Readers that wait are told what for this often, and when they ping."""
SILENT_S = 15.0
"""A reader not heard of for so long has lost its rank."""
MAX_AHEAD = 64
"""Steps that one GET may ask for."""

OUT = 1 << 62
"""What a rank that is out of the round served counts as having returned: every step."""


class Readers:
    """One feed's readers and the steps kept for them.

    What the feed does for them: ``waiting_for`` says why the next step is not there, ``rewind`` has it go to a step,
    from a reader's snapshot if it has none that is nearer, ``state_of`` gives a checkpoint's state, or None where it
    does not know it yet, and ``commit`` notes that a checkpoint is durable and says so with ``committed``.
    """

    def __init__(
        self, run: int, epoch: int, feed: str, rules: Rules, layout: str, table: SampleTable,
        waiting_for: Callable[[], tuple[str, str]], rewind: Callable[[int, Snapshot | None], list[Effect]],
        state_of: Callable[[int], State | None], commit: Callable[[int], list[Effect]],
    ) -> None:  # fmt: skip
        self._run, self.epoch, self._feed = run, epoch, feed
        self._rules, self._layout = rules, layout
        self._waiting_for, self._rewind, self._state_of, self._commit = waiting_for, rewind, state_of, commit
        self._seats = Seats()
        self._returned: dict[Ranks, int] = {}  # steps returned in this attempt, by rank; of ranks that left, too
        self._unheard: set[Ranks] = set()  # ranks not heard since a process was replaced: it may be a restart of all
        self._steps = KeptSteps(feed, rules, layout, table)
        self._chains: dict[int, bytes] = {}
        self._commits: dict[bytes, int] = {}  # what a peer waits to hear that it is committed
        self._attempt = 0
        self._now = self._told = 0.0
        self._why: dict[str, tuple[str, str]] = {}  # what all that wait are told, worked out once a tick
        self.round = 0
        """The iteration that is served."""
        self.released_upto = 0
        """Steps below are returned by every rank and forgotten."""
        self.formed_upto = 0
        self.end: End | None = None
        self.draining = False
        self.refused = 0
        """Clients that were refused."""

    # What the feed adds

    def begin(self, step: int) -> None:
        """An earlier broker of this run had served the steps before ``step``."""
        self.released_upto = self.formed_upto = step

    def fail(self, code: str, detail: str) -> list[Effect]:
        """Nothing more can be served: tell every reader."""
        return [effect for reader in self._seats for effect in self._refuse(reader, code, detail)]

    def add(self, step: Step, skipped: bool = False) -> list[Effect]:
        """A step was formed: serve whoever waits for it; of one that is ``skipped``, that it is passed over."""
        self._steps.add(step, skipped)
        self.formed_upto = step.number + 1
        return self.check(self.formed_upto, step.chain) + self._release() + self._serve_all()

    def check(self, step: int, chain: bytes) -> list[Effect]:
        """All steps before ``step`` have this digest: refuse readers that begin there and had others."""
        self._chains[step] = chain
        self._chains.pop(step - 4096, None)
        astray = [reader for reader in self._seats if reader.ready and self._has_diverged(reader)]
        return [effect for reader in astray for effect in self._refuse(reader, "diverged", _diverged(reader))]

    def chain_of(self, step: int) -> bytes:
        """Digest of all steps before ``step``; empty where it is not known, and of step 0."""
        return self._chains.get(step, b"")

    def finish(self, num_steps: int, chain: bytes) -> list[Effect]:
        """No step follows in this round."""
        self.end = End(feed=self._feed, lineage=self.lineage, num_steps=num_steps, chain=chain)
        return self._serve_all()

    def committed(self, step: int) -> list[Effect]:
        """A checkpoint that begins at ``step``, and all before it, are noted as durable: tell whoever said so."""
        effects: list[Effect] = []
        for peer in [peer for peer, asked in self._commits.items() if asked <= step]:
            reader, asked = self._seats.at(peer), self._commits.pop(peer)
            if reader is not None:
                effects += self._send(reader, Committed(feed=self._feed, step=asked))
        return effects

    def drain(self) -> list[Effect]:
        """No further step will be formed: readers get what there is, then a farewell."""
        self.draining = True
        return [e for reader in self._seats for e in (self._serve(reader) if reader.entered else self._wait(reader))]

    # What comes in

    def receive(self, peer: bytes, envelope: Envelope, now: float) -> list[Effect]:
        """A client's message."""
        self._now = now
        message = envelope.message
        if isinstance(message, Attach):
            return self._attach(peer, message)
        reader = self._seats.at(peer)
        assert reader is not None
        if isinstance(message, Bye):
            return self.leave(peer, message.reason or "said goodbye")
        if isinstance(message, AskState):
            state = self._state_of(message.step)
            return [] if state is None else self._send(reader, state)
        if isinstance(message, Commit):
            self._commits[peer] = message.step
            return self._commit(message.step)
        if (envelope.epoch, envelope.fence) != (self.epoch, reader.fence):
            return self._answer(reader)
        reader.heard = now
        if not reader.entered:
            return self._wait_for_ready(reader) if isinstance(message, Get) else []
        effects: list[Effect] = []
        if reader.mesh.ranks in self._unheard:
            self._unheard.remove(reader.mesh.ranks)
            effects = self._release()
        if isinstance(message, Get):
            return effects + self._get(reader, message)
        if isinstance(message, ReaderPing):
            return effects + self._ping(reader, message)
        return self._reject(peer, "protocol", f"got {type(message).__name__} from a client")

    def leave(self, peer: bytes, why: str) -> list[Effect]:
        """A peer has gone, whether or not it was known."""
        reader = self._seats.at(peer)
        return [] if reader is None else self._leave(reader, why)

    def knows(self, peer: bytes) -> bool:
        """Has ``peer`` attached here?"""
        return self._seats.at(peer) is not None

    def tick(self, now: float) -> list[Effect]:
        """Drop readers that fell silent; decide claims; tell those that wait what they wait for."""
        self._now = now
        self._why.clear()
        effects: list[Effect] = []
        for reader in self._seats:
            if now - reader.heard > SILENT_S:
                effects += self._leave(reader, f"silent for {SILENT_S:.0f} s")
        effects += self._settle()
        if now - self._told >= TELL_S:
            self._told = now
            effects += [e for reader in self._seats for e in self._wait(reader)]
        return effects

    @property
    def lineage(self) -> int:
        """Of the steps that are served."""
        return self._steps.lineage

    @lineage.setter
    def lineage(self, lineage: int) -> None:
        self._steps.lineage = lineage

    @property
    def cost_max_over_mean(self) -> float:
        """Of the packs that run at the same moment, mean over the steps dealt."""
        return self._steps.cost_max_over_mean

    @property
    def num_readers(self) -> int:
        """Processes that hold or claim a rank."""
        return len(self._seats)

    @property
    def joined(self) -> bool:
        """An attempt is served: every rank that reads was ready for it; some may have left since."""
        return bool(self._returned) and bool(self._seats.held)

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
            row |= {"where": reader.where, "round": reader.round, "done_upto": done, "have_upto": reader.have_upto}
            rows.append(row | {"silent_s": round(self._now - reader.heard, 3), "stats": reader.stats})
        return rows

    # Taking a rank

    def _attach(self, peer: bytes, message: Attach) -> list[Effect]:
        if message.reader in self._seats.fenced:
            detail = self._seats.fenced[message.reader]
            return [SendTrainer(peer, self._envelope(Fenced(feed=self._feed, detail=detail), 0))]
        reader = self._seats.named(message.reader)
        if reader is not None and (reader.mesh, reader.readers) == (message.mesh, message.readers):
            return self._again(reader, peer, message)
        unfit = refusal(message, self._rules, self._layout)
        if unfit:
            return self._reject(peer, "mesh", unfit)
        effects = [] if reader is None else self._leave(reader, "it took another rank")
        effects += self.leave(peer, "its peer took another rank")
        reader = Reader(
            message.reader, peer, f"{message.host}:{message.pid}", message.mesh, message.readers, self._now, self._now
        )  # fmt: skip
        reader.begin(message, self._now)
        if self._has_diverged(reader):
            return effects + self._reject(peer, "diverged", _diverged(reader))
        self._seats.add(reader)
        return effects + (self._wait(reader) if self._seats.in_the_way(reader) else self._seat(reader))

    def _again(self, reader: Reader, peer: bytes, message: Attach) -> list[Effect]:
        """Said again, or it is ready now, or for another round; an older copy of what it said changes nothing."""
        if message.round < reader.round or (reader.ready and not message.ready):
            return []
        effects: list[Effect] = []
        if self._seats.at(peer) is not reader:
            effects += self.leave(peer, "its peer took another rank")
            self._seats.move(reader, peer)
        reader.heard = self._now
        if not message.ready or (reader.ready and message.round == reader.round):
            return effects + self._answer(reader)
        reader.begin(message, self._now)
        if self._has_diverged(reader):
            return effects + self._refuse(reader, "diverged", _diverged(reader))
        return effects + (self._arrive(reader) if reader.holds else self._wait(reader))

    def _seat(self, reader: Reader) -> list[Effect]:
        """A reader holds its rank; with that of another mesh the attempt of the one before is over."""
        if self._seats.seat(reader):
            self._returned.clear()
            self._unheard.clear()
        elif self._returned:
            self._unheard = self._returned.keys() - {reader.mesh.ranks}
        self._why.clear()
        took = Report("info", f"reader {reader.where} took rank {reader.mesh} of feed {self._feed!r}")
        return [took, *self._arrive(reader)]

    def _settle(self) -> list[Effect]:
        """Claims whose rank was given up go through; who finds others alive is refused."""
        effects: list[Effect] = []
        for reader in list(self._seats.claims.values()):
            others = self._seats.in_the_way(reader)
            heard = max((other.heard for other in others), default=0.0)
            if not others or (self._now - heard > CLAIM_S and self._now > reader.since):
                for other in others:
                    effects += self._leave(other, f"silent for {self._now - other.heard:.0f} s, taken over")
                effects += self._seat(reader)
            elif heard > reader.since + (RESTART_S if self._restarts(reader, others) else 0.0):
                effects += self._refuse(reader, *clash(reader, others[0]))
        entered = [reader for reader in self._seats.held.values() if reader.entered]
        heard = max((reader.heard for reader in entered), default=0.0)
        for reader in list(self._seats.held.values()):
            if self._is_late(reader) and not reader.entered and heard > reader.since + RESTART_S:
                effects += self._refuse(reader, *self._too_late(reader, entered))
        return effects

    def _restarts(self, reader: Reader, others: list[Reader]) -> bool:
        """Does a claim look like one of a restart of all, whose old trainers may still be about to die?"""
        late = self._is_late(reader) or self._seats.is_foreign(reader)
        return late and any(other.entered for other in others)

    def _leave(self, reader: Reader, why: str) -> list[Effect]:
        self._why.clear()
        self._seats.remove(reader)
        self._commits.pop(reader.peer, None)
        level = "info" if "goodbye" in why else "warning"
        return [Report(level, f"rank {reader.mesh} at {reader.where} left feed {self._feed!r}: {why}")]

    # Attempts

    def _arrive(self, reader: Reader) -> list[Effect]:
        """A reader has its rank and says where it begins, if it does: in the attempt that is served, or in the next."""
        self._why.clear()
        if not reader.ready:
            return self._answer(reader)
        if self._returned and reader.round == self.round and reader.first_step >= self.released_upto:
            return self._enter(reader) + self._release() + self._serve_all()
        if self._returned and reader.round > self.round:
            self._returned[reader.mesh.ranks] = OUT
        if self._seats.all_wait():
            return self._begin()
        return self._answer(reader) + self._release() + self._serve_all()

    def _begin(self) -> list[Effect]:
        """A new attempt, in the earliest round that a reader asks for; steps that are gone are formed again."""
        self._attempt += 1
        self._unheard.clear()
        readers = list(self._seats.held.values())
        self.round = min(reader.round for reader in readers)
        members = [reader for reader in readers if reader.round == self.round]
        self._returned = {reader.mesh.ranks: OUT for reader in readers}
        step = min(reader.first_step for reader in members)
        text = (
            f"attempt {self._attempt} of feed {self._feed!r} begins at step {step}: all {len(readers)} ranks are ready"
        )
        effects: list[Effect] = [Report("info", text)]
        if step < self.released_upto or (step > self.formed_upto and self.end is None):
            effects += self._go_to(step, [reader.snapshot for reader in members])
        for reader in readers:
            effects += self._enter(reader) if reader.round == self.round else self._wait(reader)
        return effects + self._release() + self._serve_all()

    def _go_to(self, step: int, snapshots: list[Snapshot | None]) -> list[Effect]:
        """Have the feed form from ``step`` on, with the nearest snapshot that a reader has brought."""
        gone = [self._steps.forget(number) for number in range(self.released_upto, self.formed_upto)]
        self.released_upto = self.formed_upto = step
        self.end = None
        fit = [snapshot for snapshot in snapshots if snapshot is not None and snapshot.step <= step]
        nearest = max(fit, key=lambda snapshot: snapshot.step, default=None)
        return [*(Release(handles) for handles in gone), *self._rewind(step, nearest)]

    def _enter(self, reader: Reader) -> list[Effect]:
        """A reader takes part in the attempt from its first step on."""
        reader.entered, reader.fence = True, self._attempt
        self._returned[reader.mesh.ranks] = reader.first_step
        reader.sent_upto, reader.want_stop, reader.resend = reader.first_step, 0, 0
        return self._send(reader, self._attached(reader))

    def _is_late(self, reader: Reader) -> bool:
        """Is what it asks for gone, so that it can only be served if all begin again?"""
        gone = (reader.round, reader.first_step) < (self.round, self.released_upto)
        return bool(self._returned) and reader.ready and gone

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
        known = self.chain_of(reader.first_step)
        return known != b"" and reader.chain not in (b"", known)

    def _attached(self, reader: Reader) -> Attached:
        return Attached(
            feed=self._feed, reader=reader.name, lineage=self.lineage, next_step=reader.first_step, rules=self._rules,
            layout=self._layout, round=reader.round,
        )  # fmt: skip

    def _answer(self, reader: Reader) -> list[Effect]:
        """Where it stands: in the attempt of its fence, or with its rank in none yet (0)."""
        if reader.entered:
            return self._send(reader, self._attached(reader))
        known = reader.holds and not reader.fence
        return (self._send(reader, self._attached(reader)) if known else []) + self._wait(reader)

    # Serving

    def _get(self, reader: Reader, message: Get) -> list[Effect]:
        reader.want_stop = max(reader.want_stop, min(message.stop, message.start + MAX_AHEAD))
        if message.resend > reader.resend:
            reader.resend = message.resend
            furthest = max(self.formed_upto, self._returned[reader.mesh.ranks])
            reader.sent_upto = max(min(message.start, furthest), self.released_upto)
        return self._note_done(reader, message.done_upto) + self._serve(reader)

    def _ping(self, reader: Reader, message: ReaderPing) -> list[Effect]:
        reader.have_upto = max(reader.have_upto, message.have_upto)
        reader.stats = message.stats
        return self._note_done(reader, message.done_upto) + self._wait(reader)

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
        least = min(self._returned.values())
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
            effects += self._send_step(reader, number)
            reader.sent_upto = number + 1
        if self.end is not None and reader.sent_upto >= self.end.num_steps:
            effects += self._send(reader, self.end)
        elif self.draining and reader.sent_upto >= self.formed_upto:
            effects += self._send(reader, Bye(reason="the broker is stopping"))
        return effects

    def _send_step(self, reader: Reader, number: int) -> list[Effect]:
        effects: list[Effect] = []
        mesh = reader.mesh
        for plan, packs in self._steps.parts(number, mesh):
            envelope = self._envelope(plan, reader.fence)
            shard = SendShard(
                reader.peer, envelope, packs, plan.frames, self._rules, self._layout, mesh.cp, mesh.cp_rank
            )  # fmt: skip
            effects.append(shard if plan.micro_batches else SendTrainer(reader.peer, envelope))
        return effects

    def _wait(self, reader: Reader) -> list[Effect]:
        """What the reader waits for, if it does."""
        if not reader.entered:
            return self._wait_to_enter(reader)
        if reader.sent_upto >= reader.want_stop:
            return []
        if self.end is not None and reader.sent_upto >= self.end.num_steps:
            return self._send(reader, self.end)
        if reader.sent_upto < self.formed_upto:
            return self._serve(reader)
        if "step" not in self._why:
            self._why["step"] = self._waiting_for()
        reason, detail = self._why["step"]
        return self._send(reader, Wait(feed=self._feed, step=reader.sent_upto, reason=reason, detail=detail[:2000]))

    def _wait_for_ready(self, reader: Reader) -> list[Effect]:
        """It asks for steps and is in no attempt: it waits for one, or has yet to say (again) where it begins."""
        return self._wait(reader) if reader.ready and not reader.fence else self._send(reader, Who())

    def _wait_to_enter(self, reader: Reader) -> list[Effect]:
        if self.draining:
            return self._send(reader, Bye(reason="the broker is stopping"))
        if reader.holds and not reader.ready:
            return []
        detail = self._missing(reader) if reader.holds else self._claimed(reader)
        wait = Wait(feed=self._feed, step=reader.first_step, reason="join", detail=detail[:2000])
        return self._send(reader, wait)

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
            self._why[key] = "join", text
        return self._why[key][1]

    # Words

    def _refuse(self, reader: Reader, code: str, detail: str) -> list[Effect]:
        """Refuse a reader that was let in."""
        return self._reject(reader.peer, code, detail) + self._leave(reader, "it was refused")

    def _reject(self, peer: bytes, code: str, detail: str) -> list[Effect]:
        self.refused += 1
        reject = SendTrainer(peer, self._envelope(Reject(code=code, detail=detail[:2000]), self._attempt))
        return [Report("warning", f"refused a client: {detail}"), reject]

    def _envelope(self, message: Message, fence: int) -> Envelope:
        return Envelope(run=self._run, epoch=self.epoch, fence=fence, message=message)

    def _send(self, reader: Reader, message: Message) -> list[Effect]:
        return [SendTrainer(reader.peer, self._envelope(message, reader.fence))]


def _diverged(reader: Reader) -> str:
    return (
        f"the steps before {reader.first_step} are not those that this run serves: the data, the rules or the seed "
        f"have changed, put them back or start a new run"
    )
