"""The trainers' side of the broker: who reads which rank, and what each has had.

A step goes out whole, to every rank, once all ranks of the mesh are attached. Reads are pure:
asking again for a step gives the same bytes; only ``done_upto`` moves, and only up. A step is
kept until every rank has returned it. What was said in another attempt, or to another broker,
changes nothing. Knows steps and packs by number, never tokens.

A feed may be iterated again and again: a reader names the *round* that it is in. One that asks
for a later round is out of the one that is served, and waits; when all ranks of the mesh do, that
round begins, in a new attempt and at step 0. A rank that is gone but has not asked for it holds the
others back: all iterate the same number of times. With no rank attached nothing is being served,
so whoever attaches first says in which round the next attempt is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice, product
from math import prod

from streampack.core.effects import Release, SendShard, SendTrainer
from streampack.core.events import Effect, Report
from streampack.core.form import Step
from streampack.core.kept import LINEAGE, KeptSteps, mesh_refusal
from streampack.core.messages import (
    Attach,
    Attached,
    Bye,
    End,
    Envelope,
    Get,
    Mesh,
    Message,
    ReadBy,
    ReaderPing,
    Reject,
    Wait,
    Who,
)
from streampack.core.rules import Rules
from streampack.core.samples import SampleTable

TELL_S = 1.0
"""Readers that wait are told what for this often, and when they ping."""
SILENT_S = 15.0
"""A reader not heard of for so long has lost its rank."""
MAX_RANKS = 1 << 17
"""Of a mesh: bounds what is believed of a peer."""
MAX_AHEAD = 64
"""Steps that one GET may ask for."""

OUT = 1 << 62
"""What a rank that is out of the round served counts as having returned: every step."""

Ranks = tuple[int, int, int, int]


@dataclass(slots=True)
class _Reader:
    name: str
    peer: bytes
    where: str
    mesh: Mesh
    readers: ReadBy
    heard: float
    round: int
    first_step: int
    chain: bytes
    """Digest of the steps before ``first_step``, as the reader knows them; empty if it does not."""
    sent_upto: int = 0
    want_stop: int = 0
    resend: int = 0
    have_upto: int = 0
    stats: dict[str, float] = field(default_factory=dict)


class Readers:
    """One feed's readers and the steps kept for them; ``rewind`` has the feed begin again at its first sample."""

    def __init__(
        self, run: int, epoch: int, feed: str, rules: Rules, layout: str, table: SampleTable,
        waiting_for: Callable[[], tuple[str, str]], rewind: Callable[[], list[Effect]],
    ) -> None:  # fmt: skip
        self._run, self.epoch, self._feed = run, epoch, feed
        self._rules, self._layout = rules, layout
        self._waiting_for, self._rewind = waiting_for, rewind
        self._readers: dict[Ranks, _Reader] = {}
        self._by_peer: dict[bytes, Ranks] = {}
        self._returned: dict[Ranks, int] = {}  # steps returned in this round, by rank; of ranks that left, too
        self._steps = KeptSteps(feed, rules, layout, table)
        self._chains: dict[int, bytes] = {}
        self._attempt = 0
        self._now = self._told = 0.0
        self._why: tuple[str, str] | None = None  # what all that wait are told, worked out once a tick
        self.round = 0
        """The iteration that is served."""
        self.released_upto = 0
        """Steps below are returned by every rank and forgotten."""
        self.formed_upto = 0
        self.end: End | None = None
        self.draining = False
        self.refused = 0
        """Clients that were refused."""

    # What the broker adds

    def add(self, step: Step) -> list[Effect]:
        """A step was formed: serve whoever waits for it."""
        self._steps.add(step)
        self._chains[step.number + 1] = step.chain
        self._chains.pop(step.number - 4096, None)
        self.formed_upto = step.number + 1
        return self._check_chains(step) + self._release() + self._serve_all()

    def finish(self, num_steps: int, chain: bytes) -> list[Effect]:
        """No step follows in this round."""
        self.end = End(feed=self._feed, lineage=LINEAGE, num_steps=num_steps, chain=chain)
        return self._serve_all()

    def drain(self) -> list[Effect]:
        """No further step will be formed: readers get what there is, then a farewell."""
        self.draining = True
        return self._serve_all()

    # What comes in

    def receive(self, peer: bytes, envelope: Envelope, now: float) -> list[Effect]:
        """A client's message."""
        self._now = now
        message = envelope.message
        if isinstance(message, Attach):
            return self._attach(peer, message)
        if isinstance(message, Bye):
            return self.leave(peer, message.reason or "said goodbye")
        reader = self._readers[self._by_peer[peer]]
        if reader.round != self.round:  # it believes to be in a round that waits: have it ask again
            return self._send(peer, Who())
        if (envelope.epoch, envelope.fence) != (self.epoch, self._attempt):
            return self._send(peer, self._attached(reader))
        reader.heard = now
        if isinstance(message, Get):
            return self._get(reader, message)
        if isinstance(message, ReaderPing):
            return self._ping(reader, message)
        return self._reject(peer, "protocol", f"got {type(message).__name__} from a client")

    def leave(self, peer: bytes, why: str) -> list[Effect]:
        """A peer has gone, whether or not it was known."""
        return self._leave(self._by_peer[peer], why) if peer in self._by_peer else []

    def knows(self, peer: bytes) -> bool:
        """Has ``peer`` attached here?"""
        return peer in self._by_peer

    def tick(self, now: float) -> list[Effect]:
        """Drop readers that fell silent; tell those that wait what they wait for."""
        self._now = now
        effects: list[Effect] = []
        for ranks, reader in list(self._readers.items()):
            if now - reader.heard > SILENT_S:
                effects += self._leave(ranks, f"silent for {SILENT_S:.0f} s")
        self._why = None
        if now - self._told >= TELL_S:
            self._told = now
            effects += [e for reader in self._readers.values() for e in self._wait(reader)]
        return effects

    @property
    def cost_max_over_mean(self) -> float:
        """Of the packs that run at the same moment, mean over the steps dealt."""
        return self._steps.cost_max_over_mean

    @property
    def num_readers(self) -> int:
        return len(self._readers)

    @property
    def slowest(self) -> str:
        """The rank that has returned the fewest steps, for a person."""
        if not self._readers:
            return "no rank is attached"
        ranks = min(self._returned, key=lambda ranks: (self._returned[ranks], ranks in self._readers))
        if ranks not in self._readers:
            when = "between two iterations" if self._returned[ranks] == OUT else f"after {self._returned[ranks]} steps"
            return f"{_name(ranks)} left {when}: start it again"
        reader = self._readers[ranks]
        return f"rank {reader.mesh} at {reader.where} has returned {self._returned[ranks]} steps"

    def stats(self) -> list[dict[str, object]]:
        """One row a reader: rank, where, progress and its own figures."""
        rows: list[dict[str, object]] = []
        for ranks, reader in sorted(self._readers.items()):
            row: dict[str, object] = dict(zip(("dp_rank", "cp_rank", "tp_rank", "pp_rank"), ranks, strict=True))
            done = self._returned[ranks] if reader.round == self.round else 0
            row |= {"where": reader.where, "round": reader.round, "done_upto": done, "have_upto": reader.have_upto}
            rows.append(row | {"silent_s": round(self._now - reader.heard, 3), "stats": reader.stats})
        return rows

    @property
    def joined(self) -> bool:
        """Every rank that reads has attached in this attempt; some may have left since."""
        return bool(self._readers) and len(self._returned) == self._num_ranks()

    # Attaching

    def _attach(self, peer: bytes, message: Attach) -> list[Effect]:
        ranks, where = message.mesh.ranks, f"{message.host}:{message.pid}"
        held = self._readers.get(ranks)
        mine = held is not None and held.name == message.reader and held.mesh == message.mesh
        if mine and held is not None and message.round <= held.round:
            return self._again(held, peer) if message.round == held.round else []  # or an older copy
        refusal = self._refusal(message, held, where)
        if refusal:
            return self._reject(peer, *refusal)
        effects: list[Effect] = []
        if self._by_peer.get(peer, ranks) != ranks:
            effects += self._leave(self._by_peer[peer], "its peer took another rank")
        first = not self._readers
        if held is not None:
            self._by_peer.pop(held.peer, None)
        reader = self._readers[ranks] = _Reader(
            message.reader, peer, where, message.mesh, message.readers, self._now, message.round, message.next_step,
            message.chain,
        )  # fmt: skip
        self._by_peer[peer] = ranks
        self._why = None
        if held is None:
            effects.append(Report("info", f"reader {where} took rank {message.mesh} of feed {self._feed!r}"))
        if held is None and len(self._readers) == self._num_ranks():
            effects.append(Report("info", f"all ranks of feed {self._feed!r} are attached: {len(self._readers)}"))
        if first or message.round < self.round or self._all_ahead():
            effects += self._open()
        else:
            effects += self._enter(reader)
        return effects + (self._release() + self._serve_all() if self.joined else [])

    def _again(self, reader: _Reader, peer: bytes) -> list[Effect]:
        """Said again, or an older copy of it: what was returned since stays so."""
        effects: list[Effect] = []
        if self._by_peer.get(peer, reader.mesh.ranks) != reader.mesh.ranks:
            effects += self._leave(self._by_peer[peer], "its peer took another rank")
        self._by_peer.pop(reader.peer, None)
        reader.peer, reader.heard = peer, self._now
        self._by_peer[peer] = reader.mesh.ranks
        here = reader.round == self.round
        return effects + (self._send(peer, self._attached(reader)) if here else self._wait(reader))

    def _all_ahead(self) -> bool:
        """Does every rank ask for a later round?"""
        ahead = sum(reader.round > self.round for reader in self._readers.values())
        return ahead == self._num_ranks()

    def _open(self) -> list[Effect]:
        """A new attempt, in the earliest round that a reader asks for; steps that are gone are formed again."""
        self._attempt += 1
        self._returned.clear()
        self.round = min(reader.round for reader in self._readers.values())
        effects: list[Effect] = []
        members = [reader for reader in self._readers.values() if reader.round == self.round]
        if any(reader.first_step < self.released_upto for reader in members):
            gone = [self._steps.forget(number) for number in range(self.released_upto, self.formed_upto)]
            effects += [Release(handles) for handles in gone]
            self.released_upto = self.formed_upto = 0
            self.end = None
            effects += self._rewind()
        return effects + [e for reader in self._readers.values() for e in self._enter(reader)]

    def _enter(self, reader: _Reader) -> list[Effect]:
        """A reader takes part in this round from its first step on; or it is ahead, and holds nobody back."""
        here = reader.round == self.round
        self._returned[reader.mesh.ranks] = reader.first_step if here else OUT
        reader.sent_upto, reader.want_stop, reader.resend = reader.first_step, 0, 0
        return self._send(reader.peer, self._attached(reader)) if here else self._wait(reader)

    def _attached(self, reader: _Reader) -> Attached:
        return Attached(
            feed=self._feed, reader=reader.name, lineage=LINEAGE, next_step=reader.first_step, rules=self._rules,
            layout=self._layout, round=reader.round,
        )  # fmt: skip

    def _refusal(self, message: Attach, held: _Reader | None, where: str) -> tuple[str, str] | None:
        """Why this reader cannot have this rank: (code, detail), or None."""
        mesh = message.mesh
        if prod(mesh.sizes) > MAX_RANKS:
            return "mesh", f"got a mesh of {prod(mesh.sizes)} ranks, expected at most {MAX_RANKS}"
        unfit = mesh_refusal(mesh, self._rules, self._layout)
        if unfit:
            return "mesh", unfit
        try:
            tp, pp = message.readers.ranks(mesh)
        except ValueError as error:
            return "mesh", str(error)
        if mesh.tp_rank not in tp or mesh.pp_rank not in pp:
            return "mesh", f"got rank {mesh}, expected one of the readers that it declares: {message.readers}"
        other = next(iter(self._readers.values()), None)
        if other is not None and other.readers != message.readers:
            return "mesh", (
                f"got readers {message.readers}, expected {other.readers} as declared by {other.where}: "
                f"give every rank the same"
            )
        if other is not None and self._sizes() != mesh.sizes:
            return "mesh", (
                f"got a mesh of dp, cp, tp, pp = {mesh.sizes}, expected {self._sizes()} as attached by {other.where}: "
                f"give every rank the same mesh"
            )
        if held is not None and held.name != message.reader:
            return "rank_taken", (
                f"got rank {mesh} from {where}, which {held.where} holds: start one client a rank, or stop that one"
            )
        if message.round < self.round and self.joined:
            return "round_gone", (
                f"got iteration {message.round} of feed {self._feed!r}, expected {self.round}, which the other ranks "
                f"have begun: start all ranks again"
            )
        restarts = message.round != self.round or (not self._readers and not message.next_step)
        if message.next_step < self.released_upto and not restarts:
            return "step_gone", (
                f"got a request to start at step {message.next_step}, expected {self.released_upto} or later, "
                f"the oldest step kept: start all ranks at step 0, or restart the broker"
            )
        chain = self._chains.get(message.next_step)
        if message.chain and chain and chain != message.chain:
            return "diverged", _diverged(message.next_step)
        return None

    def _check_chains(self, step: Step) -> list[Effect]:
        """Refuse readers that come from an earlier broker and had other steps before the one that follows."""
        effects: list[Effect] = []
        for ranks, reader in list(self._readers.items()):
            if reader.first_step == step.number + 1 and reader.chain not in (b"", step.chain):
                effects += self._reject(reader.peer, "diverged", _diverged(reader.first_step))
                effects += self._leave(ranks, "it had other steps")
        return effects

    def _leave(self, ranks: Ranks, why: str) -> list[Effect]:
        self._why = None
        reader = self._readers.pop(ranks)
        self._by_peer.pop(reader.peer, None)
        level = "info" if "goodbye" in why else "warning"
        return [Report(level, f"rank {reader.mesh} at {reader.where} left feed {self._feed!r}: {why}")]

    def _sizes(self) -> tuple[int, int, int, int]:
        return next(iter(self._readers.values())).mesh.sizes

    def _reading(self) -> Iterator[Ranks]:
        """Every rank that reads."""
        reader = next(iter(self._readers.values()))
        dp, cp, _, _ = reader.mesh.sizes
        return product(range(dp), range(cp), *reader.readers.ranks(reader.mesh))

    def _num_ranks(self) -> int:
        reader = next(iter(self._readers.values()))
        return prod(map(len, reader.readers.ranks(reader.mesh)), start=reader.mesh.dp * reader.mesh.cp)

    # Serving

    def _get(self, reader: _Reader, message: Get) -> list[Effect]:
        reader.want_stop = max(reader.want_stop, min(message.stop, message.start + MAX_AHEAD))
        if message.resend > reader.resend:
            reader.resend = message.resend
            furthest = max(self.formed_upto, self._returned[reader.mesh.ranks])
            reader.sent_upto = max(min(message.start, furthest), self.released_upto)
        return self._note_done(reader, message.done_upto) + self._serve(reader)

    def _ping(self, reader: _Reader, message: ReaderPing) -> list[Effect]:
        reader.have_upto = max(reader.have_upto, message.have_upto)
        reader.stats = message.stats
        return self._note_done(reader, message.done_upto) + self._wait(reader)

    def _note_done(self, reader: _Reader, done_upto: int) -> list[Effect]:
        done_upto = min(done_upto, reader.sent_upto)
        if done_upto <= self._returned[reader.mesh.ranks]:
            return []
        self._returned[reader.mesh.ranks] = done_upto
        return self._release()

    def _release(self) -> list[Effect]:
        """Forget the steps that every rank has returned."""
        if not self.joined or (least := min(self._returned.values())) == OUT:  # where all are out, nobody reads
            return []
        upto = min(self.formed_upto, least)
        effects: list[Effect] = [Release(self._steps.forget(n)) for n in range(self.released_upto, upto)]
        self.released_upto = max(self.released_upto, upto)
        return effects

    def _serve_all(self) -> list[Effect]:
        return [e for reader in self._readers.values() for e in self._serve(reader)]

    def _serve(self, reader: _Reader) -> list[Effect]:
        """All that the reader wants and that is there."""
        if reader.round != self.round:
            return self._wait(reader) if self.draining else []
        if not self.joined:
            return []
        effects: list[Effect] = []
        while reader.sent_upto < min(reader.want_stop, self.formed_upto):
            number = max(reader.sent_upto, self.released_upto)
            mesh, layout = reader.mesh, self._layout
            for plan, packs in self._steps.parts(number, mesh):
                envelope = self._envelope(plan)
                effects.append(
                    SendShard(reader.peer, envelope, packs, plan.frames, self._rules, layout, mesh.cp, mesh.cp_rank)
                )
            reader.sent_upto = number + 1
        if self.end is not None and reader.sent_upto >= self.end.num_steps:
            effects += self._send(reader.peer, self.end)
        elif self.draining and reader.sent_upto >= self.formed_upto:
            effects += self._send(reader.peer, Bye(reason="the broker is stopping"))
        return effects

    def _wait(self, reader: _Reader) -> list[Effect]:
        """What the reader's next step waits for, if it asked for one that is not there."""
        if reader.round != self.round:
            wait = Wait(feed=self._feed, step=0, reason="join", detail=self._behind(reader))
            return self._send(reader.peer, Bye(reason="the broker is stopping") if self.draining else wait)
        if reader.sent_upto >= reader.want_stop and self.joined:
            return []
        if self.end is not None and reader.sent_upto >= self.end.num_steps:
            return self._send(reader.peer, self.end)
        if self.joined and reader.sent_upto < self.formed_upto:
            return self._serve(reader)
        if self._why is None:
            self._why = self._waiting_for() if self.joined else ("join", self._missing())
        reason, detail = self._why
        wait = Wait(feed=self._feed, step=reader.sent_upto, reason=reason, detail=detail[:2000])
        return self._send(reader.peer, wait)

    def _missing(self) -> str:
        absent = (ranks for ranks in self._reading() if ranks not in self._returned)
        count = self._num_ranks() - len(self._returned)
        return f"{count} of {self._num_ranks()} ranks are not attached: {_names(absent, count)}"

    def _behind(self, reader: _Reader) -> str:
        ahead = {ranks for ranks, other in self._readers.items() if other.round > self.round}
        count = self._num_ranks() - len(ahead)
        names = _names((ranks for ranks in self._reading() if ranks not in ahead), count)
        return f"iteration {reader.round}: {count} of {self._num_ranks()} ranks are still in the one before: {names}"

    def _reject(self, peer: bytes, code: str, detail: str) -> list[Effect]:
        self.refused += 1
        effects: list[Effect] = [Report("warning", f"refused a client: {detail}")]
        return effects + self._send(peer, Reject(code=code, detail=detail[:2000]))

    def _envelope(self, message: Message) -> Envelope:
        return Envelope(run=self._run, epoch=self.epoch, fence=self._attempt, message=message)

    def _send(self, peer: bytes, message: Message) -> list[Effect]:
        return [SendTrainer(peer, self._envelope(message))]


def _name(ranks: Ranks) -> str:
    return " ".join(f"{name}={rank}" for name, rank in zip(("dp", "cp", "tp", "pp"), ranks, strict=True))


def _names(absent: Iterator[Ranks], count: int) -> str:
    """The first of ``count`` ranks, for a person."""
    names = [_name(ranks) for ranks in islice(absent, 8)]
    return "; ".join(names) + (f" and {count - len(names)} more" if count > len(names) else "")


def _diverged(step: int) -> str:
    return (
        f"the steps before {step} are not those that this run serves: the data, the rules or the seed have changed, "
        f"put them back or start a new run"
    )
