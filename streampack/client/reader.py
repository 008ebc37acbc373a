"""Hand out steps and packs to the trainer, and make and load checkpoint states, in the trainer's thread.

The constructor claims the rank. The first iteration requests steps, so a state may be loaded before and set the first
step. Each iteration has a number, which only grows. Loading a state ends the current iteration.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import operator
import os
import socket
import time
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, SupportsIndex

import msgspec

from streampack.client import state as checkpoint
from streampack.client.prefetch import Prefetching
from streampack.client.reading_stats import ReadingFigures, UsefulFlops
from streampack.client.reporting import Reporting
from streampack.core.deal.mesh_validation import mesh_refusal
from streampack.core.model.mesh import Mesh, ReadBy
from streampack.core.model.rule_changes import rules_of_stages
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64
from streampack.core.protocol.trainer_messages import AskMixture, AskState, Commit, Mixture, State
from streampack.core.sessions.client_events import Again, Begin, Returned
from streampack.core.sessions.client_session import ClientSession
from streampack.core.sessions.patience import Patience
from streampack.errors import StreampackError, UserError
from streampack.packs.lazy import LazyPacks
from streampack.packs.step import CountedPacks, Step
from streampack.transport.keys import Key
from streampack.views.formats import Views

log = logging.getLogger("streampack.client")

ADVISE_AFTER_STEPS = 50
"""Steps after which one rank logs what fewer readers would save."""


class Reading:
    """One rank's reading of a feed: its client thread, and the trainer's position in the feed.

    Use the object from one thread, in the process that made it. The constructor claims the rank and raises what
    ``connect`` raises.
    """

    def __init__(
        self, endpoint: str, feed: str, mesh: Mesh, readers: ReadBy, prefetch: int, patience: Patience, views: Views,
        variable_lengths: bool = False, key: Key | None = None, relay: str | None = None, insists: bool = False,
        useful: UsefulFlops | None = None,
    ) -> None:  # fmt: skip
        self.mesh = mesh
        """The trainers' mesh and this rank's place in the mesh."""
        self._views = views
        self._session = ClientSession(
            run=0, feed=feed, reader=uuid.uuid4().hex, host=socket.gethostname(), pid=os.getpid(), mesh=mesh,
            readers=readers, variable_lengths=variable_lengths, prefetch=prefetch, ready=False, patience=patience,
        )  # fmt: skip
        self._reporting = Reporting(endpoint, feed, mesh, patience.answer_s, key)
        self._figures, self._useful = ReadingFigures(useful=useful), useful
        self._last_iteration = -1  # the last iteration that has begun
        self._place = Begin()  # position where the iteration begins
        self._loaded: dict[str, Any] | None = None  # the loaded state that set ``_place``
        self._upto = 0  # the trainer has used the steps before, and may have used the one in use
        self._has_said = False  # once is enough for loops that always leave early
        self._rules: Rules | None = None  # of the last step that was handed out
        self._taken = False  # this iteration has handed out a step, or its end
        self._in_use: int | None = None
        self._counted = CountedPacks(())  # of the step in use
        self._num_taken, self._first_taken = 0, 0.0
        # Iterating packs: ``_left`` of ``_packs_of`` remain. ``_packs`` are made, later groups are not yet.
        self._packs: deque[Any] = deque()
        self._packs_of = self._counted
        self._source: LazyPacks | None = None
        self._group = self._left = 0
        self._prefetching = Prefetching(
            endpoint, self._session, mesh, views, patience.answer_s, self._figures, key, relay, insists
        )
        try:
            self._prefetching.wait_for(lambda: self._prefetching.attached is not None)
            self._begin_as(views)
        except BaseException:  # also Ctrl-C: an orphaned thread would keep the rank
            self.close()
            raise

    def _begin_as(self, views: Views) -> None:
        """Adapt ``views`` to the feed's rules; warn that padded micro-batches vary in shape. Raises UserError."""
        assert self._prefetching.attached is not None  # __init__ has waited for it
        self._stream_names = [stream.name for stream in self.rules.streams]
        views.fit(self.rules, self._prefetching.attached.layout)
        if not any(self.mesh.ranks):
            self._warn_of_stages(views, self._prefetching.attached.layout)
        if self.rules.padded and not any(self._session.mesh.ranks):
            log.warning(
                "feed %s: its micro-batches are padded and may differ in shape, so torch.compile compiles each shape "
                "separately. Mark the dimensions as dynamic to compile only once", self._session.feed,
            )  # fmt: skip

    def _warn_of_stages(self, views: Views, layout: str) -> None:
        """Warn of each stage of the run's first rules that this trainer cannot read."""
        stages = self.rules.stages
        for number, (stage, rules) in enumerate(zip(stages, rules_of_stages(self.rules)[1:], strict=True), 1):
            why = mesh_refusal(self.mesh, rules, layout, step=stage.at.step or 0)
            try:
                views.fit(rules, layout)
            except UserError as error:
                why = why or str(error)
            if why:
                log.warning(
                    "feed %s: training ends with StageEnds where stage %r begins (%s), unless it begins after that: %s",
                    self._session.feed, stage.name or str(number), stage.at, why,
                )  # fmt: skip

    @property
    def iteration(self) -> int:
        """Number of the current iteration, or of the next one if none has begun."""
        return self._prefetching.iteration

    # Called by ``Client``

    def begin(self) -> None:
        """Begin to iterate: the first time, or again on a finite feed once a step or the end was handed out.

        Prefetched steps do not count: a trainer that begins twice before it takes a step would lose them.
        """
        self._prefetching.check_usable()
        if self._last_iteration != self.iteration:
            self._last_iteration = self.iteration
            self._prefetching.tell(self._place)
        elif self.rules.finite and self._taken and self._prefetching.stage_ends is None:
            if not self._prefetching.ended and (used := self._used_upto) > self._place.next_step and not self._has_said:
                self._has_said = True
                log.warning(
                    "a new iteration begins at the first step, before the last one has ended. To go on with step %d, "
                    "call loader.load_state_dict(loader.state_dict()) first", used,
                )  # fmt: skip
            self._move_to(Begin(iteration=self.iteration + 1))
            self._last_iteration = self.iteration
            self._prefetching.tell(Again())

    def next_pack(self) -> Any:
        """Return the rank's next pack. Raises StopIteration after the feed's last step, which is equal on all ranks."""
        self._prefetching.check_usable()
        if not self._left:
            step = self.next_step()
            if step is None:
                raise StopIteration
            self._packs_of, packs = self._counted, self._counted.packs
            if isinstance(packs, LazyPacks):
                self._source, self._group = packs, 0
            else:
                self._packs.extend(packs)
            self._left = len(packs)
        if not self._packs and self._source is not None:
            self._packs.extend(self._source.take(self._group))
            self._group += 1  # only now: after an interrupt, the same group is taken again
        pack = self._packs.popleft()
        self._packs_of.note_taken(len(self._packs_of) - self._left)
        self._left -= 1
        if not self._left:
            self._source = None
        return pack

    def next_step(self) -> Step | None:
        """Wait for the next step and return the one before to the broker, as used; None at the end of the feed."""
        self._prefetching.check_usable()
        if self._last_iteration != self.iteration:
            self.begin()
        if self._in_use is not None:
            self._upto = self._in_use + 1
            self._prefetching.tell(Returned(self._upto))
            self._drop_step()
        step = None
        self._figures.begin_wait()
        try:
            step = self._prefetching.take_step()
        finally:
            self._figures.end_wait(step is not None)
        if step is None and not self._taken and not self._place.next_step:
            log.warning("feed %r has no steps, because its streams had too few samples, or none", self._session.feed)
        self._taken = True
        if step is None:
            return None
        step = self._views.arrive(step)
        self._in_use, self._counted = step.index, CountedPacks(step.packs)
        step = replace(step, packs=self._counted, reporting=self._report, naming=self._name_streams)
        self._rules = step.rules
        self._figures.note_step(len(step), step.num_tokens, 0.0 if self._useful is None else self._useful.of(step))
        self._advise()
        return step

    def _advise(self) -> None:
        """Log once, on the first rank, what it would save if fewer tensor-parallel ranks read from the broker."""
        self._num_taken += 1
        if self._num_taken == 1:
            self._first_taken = time.monotonic()
        if self._num_taken != ADVISE_AFTER_STEPS:
            return
        mesh, readers = self.mesh, self._session.readers
        if mesh.tp == 1 or readers.tp is not None or any(mesh.ranks) or self._prefetching.by_relay:
            return
        _, pp = readers.ranks(mesh)
        seconds = max(time.monotonic() - self._first_taken, 1e-3)
        saved = self._prefetching.received_bytes / seconds * (mesh.tp - 1) * mesh.dp * mesh.cp * len(pp)
        log.info(
            "feed %s: %d tensor-parallel ranks each read the same packs from the broker. A relay on each host "
            "('streampack relay') would save about %.1f MB/s. So would readers={'tp': [0]}, if the framework "
            "broadcasts batches", self._session.feed, mesh.tp, saved / 1e6,
        )  # fmt: skip

    # Streams

    def mixture(self) -> dict[str, dict[str, Any]]:
        """Return the feed's streams as the broker has them now; see ``Client.mixture``."""
        self._prefetching.check_usable()
        answer = self._prefetching.ask(AskMixture(feed=self._session.feed))
        assert isinstance(answer, Mixture)
        self._stream_names = [row.stream for row in answer.streams]
        return {row.pop("stream"): row for row in msgspec.to_builtins(answer.streams)}

    def _name_streams(self, numbers: I64) -> list[str]:
        """Return the names of streams, int64 [n]; ask the broker if a stream was added after the run began."""
        if len(numbers) and numbers.max() >= len(self._stream_names):
            self.mixture()
        names = self._stream_names
        return [names[number] for number in numbers.tolist()]

    # Results

    def publish(self, version: SupportsIndex) -> None:
        """Publish a policy's version; see ``Client.publish``."""
        self._prefetching.check_usable()
        step = self._in_use + 1 if self._in_use is not None else self._upto
        self._reporting.publish(version, step, self._session.last_attempt)

    def _report(self, step: Step[Any], values: Mapping[str, Any], reduce: str) -> None:
        """Report values of a step's samples; see ``Step.report``."""
        self._prefetching.check_usable()
        attached = self._prefetching.attached
        assert attached is not None  # a step has come
        place = step.index, attached.lineage, self._session.last_attempt
        self._reporting.report(*place, step.sample_ids, values, reduce, step.cp_sizes)  # type: ignore[arg-type]

    # Checkpoints

    def state(self, step: int | None) -> dict[str, Any]:
        """Return the state after ``step``, by default the last step whose packs were all taken."""
        self._prefetching.check_usable()
        begins = self._place.next_step
        next_step = self._used_upto if step is None else self._used_step(step, begins - 1) + 1
        origin = self._origin
        if next_step > begins:
            answer = self._prefetching.ask(AskState(feed=origin.feed, step=next_step))
            assert isinstance(answer, State)
            return checkpoint.save(origin, self.iteration, answer)
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        assert self._prefetching.attached is not None
        start = State(feed=origin.feed, lineage=self._prefetching.attached.lineage, step=0, chain=b"", snapshot=None)
        return checkpoint.save(origin, self.iteration, start)

    def load(self, state: Any) -> None:
        """End the current iteration, and begin the next one at the position in ``state``. Raises StateError."""
        self._prefetching.check_usable()
        place = checkpoint.load(state, self._origin)
        self._move_to(msgspec.structs.replace(place, iteration=max(place.iteration, self._last_iteration + 1)))
        self._loaded = copy.deepcopy(state)

    def commit(self, step: int) -> None:
        """Tell the broker that a checkpoint made after ``step`` is durable, and wait until the broker has logged it."""
        self._prefetching.check_usable()
        self._prefetching.ask(Commit(feed=self._origin.feed, step=self._used_step(step, 0)))

    @property
    def _used_upto(self) -> int:
        """Index of the first step that is not used: the next one, or the one in use while packs of it are left."""
        return self._in_use + 1 if self._in_use is not None and self._counted.all_taken else self._upto

    def _used_step(self, used: Any, least: int) -> int:
        """Return the step index ``used`` as an int. Raises UserError for a step below ``least`` or not handed out.

        The step in use may be named if the trainer has taken all of its packs, or none: others may train on it.
        """
        upto, in_the_middle = self._used_upto, ""
        if self._in_use is not None and not self._counted.all_taken:
            if self._counted.none_taken:
                upto = self._in_use + 1
            elif used == self._in_use:
                in_the_middle = (
                    f". The trainer is in the middle of step {used}. Call this after the loop over its micro-batches"
                )
        with contextlib.suppress(TypeError):
            if least <= operator.index(used) < upto:
                return operator.index(used)
        had = f"{least} to {upto - 1}" if least < upto else "no step yet"
        raise UserError(f"got step={used!r}, expected the index of a step that was handed out ({had}){in_the_middle}")

    def _move_to(self, place: Begin) -> None:
        """Drop all steps and packs of the current iteration; the next one begins at ``place``."""
        self._place, self._loaded, self._upto, self._taken = place, None, place.next_step, False
        self._prefetching.turn_to(place.iteration)
        self._drop_step()
        self._packs.clear()
        self._source, self._left = None, 0

    def _drop_step(self) -> None:
        """Drop the step in use, and with it the memory of its packs."""
        self._in_use, self._counted = None, CountedPacks(())

    @property
    def _origin(self) -> checkpoint.Origin:
        """The run, feed and rules that a state of this reader is valid for."""
        return checkpoint.Origin(self._session.run, self._session.feed, self._first_rules)

    def stats(self) -> dict[str, float]:
        """Return counts and times by name; see ``Client.stats``."""
        return self._figures.stats(self._session.num_skipped) | self._views.media_stats()

    def close(self) -> None:
        """Release the rank and end the client's thread; further calls have no effect."""
        self._reporting.close()
        self._prefetching.close()
        if self._views.media is not None:
            self._views.media.close()

    def move_to(self, endpoint: str) -> None:
        """Connect to the broker at another address, where it listens now. For any thread."""
        self._reporting.move_to(endpoint)
        self._prefetching.move_to(endpoint)

    @property
    def silent_s(self) -> float:
        """Seconds since the broker's last message."""
        return self._session.patience.silent_s

    def described(self) -> str:
        """Return feed, mesh, the number of the next step, and the packs, for a repr."""
        rules = self.rules
        packs = f"packs={rules.packs}, budget={rules.budget}" if rules.batch is None else f"budget={rules.budget}"
        rest = f"{packs}, format={self.format!r}{', closed' * self.is_closed}"
        return f"feed={self._session.feed!r}, mesh='{self.mesh}', steps={self._upto}, {rest}"

    @property
    def is_closed(self) -> bool:
        """True once the reading was closed."""
        return self._prefetching.is_closing

    @property
    def format(self) -> str:
        """Name of the packs' format, such as ``thd``."""
        return self._views.format

    @property
    def rules(self) -> Rules:
        """The rules of the last step that was handed out; before, those with which the run began."""
        return self._first_rules if self._rules is None else self._rules

    @property
    def _first_rules(self) -> Rules:
        """The rules with which the run began, and its stages."""
        assert self._prefetching.attached is not None  # __init__ has waited for it
        return self._prefetching.attached.rules

    def fail(self, error: StreampackError) -> None:
        """Raise ``error`` at the next request for a step, once the prefetched steps are used up. For any thread."""
        self._prefetching.fail(error)
