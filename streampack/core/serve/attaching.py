"""Lets readers attach: a new reader gets or claims its rank, and a known one reports where it begins."""

from __future__ import annotations

from msgspec import UNSET

from streampack.core.model.rules import Rules
from streampack.core.protocol.effects import SendTrainer
from streampack.core.protocol.events import Effect
from streampack.core.protocol.trainer_messages import AskSnapshot, Attach, Brought, Fenced
from streampack.core.serve.attempts import AttemptCoordinator, Departure, diverged
from streampack.core.serve.rank_reader import Reader, ReaderLink
from streampack.core.serve.rank_registry import MOST_CLAIMS, RankRegistry, refusal
from streampack.core.serve.receivers import Receivers
from streampack.core.serve.served_steps import ServedSteps
from streampack.core.serve.snapshot_requests import TOO_MANY, SnapshotRequests
from streampack.core.serve.step_source import StepSource
from streampack.errors import StageEnds


class Attaching:
    """Handles ``Attach`` messages, and the snapshots of checkpoints that they name."""

    def __init__(
        self, link: ReaderLink, rules: Rules, layout: str, max_readers: int, registry: RankRegistry,
        receivers: Receivers, attempts: AttemptCoordinator, source: StepSource, steps: ServedSteps,
    ) -> None:  # fmt: skip
        self._link, self._feed, self._rules, self._layout = link, link.feed, rules, layout
        self._max_readers, self._registry, self._receivers = max_readers, registry, receivers
        self._attempts, self._source, self._steps = attempts, source, steps
        self.snapshots = SnapshotRequests(registry)

    def attach(self, message: Attach, peer: bytes) -> list[Effect]:
        """Add a new reader, which gets or claims its rank, or reject it; take the report of a known reader."""
        if message.reader in self._registry.fenced:
            fenced = Fenced(feed=self._feed, detail=self._registry.fenced[message.reader])
            return [SendTrainer(peer, self._link.envelope(fenced, 0))]
        reader = self._registry.named(message.reader)
        if reader is not None and (reader.mesh, reader.readers) == (message.mesh, message.readers):
            return self._attach_again(reader, peer, message)
        if message.dealt_by not in (UNSET, self._layout):
            return self._reject(peer, message, "mesh", (
                f"this attempt began with steps dealt by {message.dealt_by!r}, but feed {self._feed!r} has "
                f"{self._layout!r} now. Restart all trainers from a checkpoint, or undo the change in broker.yaml"
            ))  # fmt: skip
        unfit = [refusal(message, rules, self._layout) for rules in self._source.all_rules()]
        if all(unfit):
            return self._reject(peer, message, "mesh", unfit[0])
        effects: list[Effect] = []
        if reader is None:
            if self._is_full(message):
                return self._reject(peer, message, "too_many", (
                    f"got more than {self._max_readers} readers of feed {self._feed!r} at a time, expected at most "
                    f"{self._max_readers}. Stop other readers, or raise `limits.peers` in broker.yaml."
                ))  # fmt: skip
            if self._registry.is_claimed_by_many(message.mesh.ranks):
                effects = self._attempts.drop_silent_claim(message.mesh.ranks)
                if not effects:
                    return self._reject(peer, message, "too_many", (
                        f"got more than {MOST_CLAIMS} processes that ask for rank {message.mesh}, expected one. Start "
                        f"one process for each rank"
                    ))  # fmt: skip
        if unready := self._cannot_begin(message):
            return effects + self._reject(peer, message, *unready)
        effects += [] if reader is None else self._attempts.leave(reader, Departure.OTHER_RANK)
        effects += self._free(peer)
        return effects + self._add(message, peer, reader)

    def _reject(self, peer: bytes, message: Attach, code: str, detail: str) -> list[Effect]:
        """Reject a client that has no rank."""
        return self._attempts.reject(peer, code, detail, message.mesh, message.host)

    def _is_full(self, message: Attach) -> bool:
        """Return whether the limit of readers is reached.

        A process that claims a rank replaces its holder. So the limit holds separately for claims and for held ranks.
        """
        registry = self._registry
        there = registry.claims if registry.in_the_way(message) else registry.held
        return len(there) >= self._max_readers

    def _cannot_begin(self, message: Attach) -> tuple[str, str] | None:
        """Return why a reader cannot begin at its step, as (error code, error text); None if it can."""
        if message.knows_stages is not True and (key := _newer_key(self._rules)):
            return "version", (
                f"got a trainer with a version of streampack before 0.2, which cannot read the key {key} of this run's "
                f"rules. Install version 0.2 or later for this trainer"
            )
        if self.snapshots.misses(message):
            return ("snapshot", TOO_MANY) if self.snapshots.is_full(message.snapshot_digest) else None
        if not message.ready:
            return None
        end = self._steps.end_for(message.next_step, message.mesh)
        if end is not None and message.going_on < 0:  # one that goes on gets the end, and may still save
            return "mesh", str(StageEnds(end.num_steps, end.name, end.detail))
        return self._source.unfit(message.next_step, self.snapshots.of(message))

    def _free(self, peer: bytes) -> list[Effect]:
        """Remove the reader that had the connection ``peer`` before, if there is one."""
        reader = self._registry.at(peer)
        return [] if reader is None else self._attempts.leave(reader, Departure.PEER_TOOK_RANK)

    def _add(self, message: Attach, peer: bytes, before: Reader | None) -> list[Effect]:
        """Add a reader; ``before`` is the reader of its name that had another rank."""
        now, waits = self._registry.now, self.snapshots.misses(message)
        before = before or self._registry.held_last(message.reader, message.mesh.ranks)
        reader = Reader(
            message.reader, peer, self._receivers.receiver_of(peer, message.host), f"{message.host}:{message.pid}",
            message.mesh, message.readers, now, now, route_changes=message.route_changes,
            knows_stages=message.knows_stages is True,
        )  # fmt: skip
        reader.starvation = message.starvation  # counted since the process began, also with earlier brokers
        if before is not None:  # the rank's counts go on
            reader.stats, reader.starvation = before.stats, before.starvation
        reader.begin(message, now, self.snapshots.of(message), waits)
        if not waits and self._attempts.has_diverged(reader):
            return self._reject(peer, message, "diverged", diverged(reader, self._rules))
        self._registry.add(reader)
        effects = self._ask_for_snapshot(reader)
        if self._registry.in_the_way(reader):
            return effects + self._attempts.wait(reader)
        return effects + self._attempts.take_rank(reader)

    def _ask_for_snapshot(self, reader: Reader) -> list[Effect]:
        """Ask a reader for the snapshot that it waits for, unless another reader was asked."""
        digest = self.snapshots.should_ask(reader, self._registry.now)
        return [] if digest is None else self._link.send(reader, AskSnapshot(feed=self._feed, digest=digest))

    def take_snapshot(self, message: Brought, reader: Reader) -> list[Effect]:
        """Handle a requested snapshot; the readers that waited for this snapshot are ready now."""
        reader.heard = self._registry.now
        if not self.snapshots.expects(message.digest):
            return []
        if message.snapshot.digest != message.digest:
            text = "got a snapshot whose digest differs from the digest in the attach message, expected the same digest"
            return self._attempts.refuse(reader, "snapshot", text)
        waiting = self.snapshots.take(message.digest, message.snapshot)
        return [e for other, attach in waiting for e in self._attach_again(other, other.peer, attach)]

    def _attach_again(self, reader: Reader, peer: bytes, message: Attach) -> list[Effect]:
        """Handle an ``Attach`` of a known reader: a repetition, a report of readiness, or another iteration.

        An older ``Attach`` changes nothing.
        """
        earlier = message.iteration < reader.iteration or message.route_changes < reader.route_changes
        if earlier or (reader.ready and not message.ready):
            return []
        reader.route_changes, reader.knows_stages = message.route_changes, message.knows_stages is True
        effects: list[Effect] = []
        if self._registry.at(peer) is not reader:
            effects += self._free(peer)
            self._registry.move(reader, peer)
            self._receivers.move(reader, message.next_step, message.host)
        reader.heard = self._registry.now
        if not message.ready or (reader.ready and message.iteration == reader.iteration):
            if message.ready and not reader.entered and message.next_step > reader.first_step:
                return effects + self._move_on(reader, message)
            return effects + self._attempts.answer(reader)
        return effects + self._begin_anew(reader, message)

    def _begin_anew(self, reader: Reader, message: Attach) -> list[Effect]:
        """Take the first step of a reader that was not ready, or that asks for another iteration."""
        waits, before = self.snapshots.misses(message), reader.pending
        if waits and before is not None and _wants_same(before, message):
            return self._ask_for_snapshot(reader) + self._attempts.wait(reader)
        if unready := self._cannot_begin(message):
            return self._attempts.refuse(reader, *unready)
        self._receivers.leave(reader)  # it confirms no parts of that attempt any more
        reader.begin(message, self._registry.now, self.snapshots.of(message), waits)
        if waits:
            return self._ask_for_snapshot(reader) + self._attempts.wait(reader)
        return self._arrive(reader)

    def _move_on(self, reader: Reader, message: Attach) -> list[Effect]:
        """Take the later step of a reader outside the attempt, which has used steps of an earlier broker meanwhile."""
        if unfit := self._source.unfit(message.next_step, reader.snapshot):
            return self._attempts.refuse(reader, *unfit)
        reader.first_step, reader.chain, reader.going_on = message.next_step, message.chain, message.going_on
        return self._arrive(reader)

    def _arrive(self, reader: Reader) -> list[Effect]:
        """Let a reader with another first step join the attempt, or wait for its rank."""
        if self._attempts.has_diverged(reader):
            return self._attempts.refuse(reader, "diverged", diverged(reader, self._rules))
        return self._attempts.arrive(reader) if reader.holds else self._attempts.wait(reader)


def _newer_key(rules: Rules) -> str:
    """Return a key of the rules that clients of versions before 0.2 cannot read; empty if they can read all."""
    there = {
        "window": rules.window == "auto",
        "balance.sliding": rules.balance.sliding is not None,
        "warmup.begin": rules.warmup is not None and rules.warmup.begin > 0,
        "no_loss_tokens": any(stream.no_loss_tokens != "train" for stream in rules.streams),
        "paused": any(stream.paused for stream in rules.streams),
        **{key: bool(getattr(rules, key)) for key in ("in_turn", "stages", "packs_ramp", "weights_ramp")},
    }
    return next((key for key, is_there in there.items() if is_there), "")


def _wants_same(before: Attach, message: Attach) -> bool:
    """Return whether two messages ask for the same snapshot in the same iteration."""
    return (before.iteration, before.snapshot_digest) == (message.iteration, message.snapshot_digest)
