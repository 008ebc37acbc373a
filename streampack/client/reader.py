"""A rank's place at a broker as its trainer uses it: steps, packs, states, commits. The thread is ``prefetch``'s.

The rank is taken at once, steps are asked for when the trainer begins to iterate: where it begins may be said until
then, by a state. An iteration is known by its round, which only rises; loading a state ends the one that is on.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import operator
import os
import socket
import uuid
from collections import deque
from typing import Any

import msgspec

from streampack.client import state as checkpoint
from streampack.client.prefetch import Prefetching
from streampack.client.reading_stats import ReadingFigures
from streampack.core.model.mesh import Mesh, ReadBy
from streampack.core.model.rules import Rules
from streampack.core.protocol.trainer_messages import AskState, Commit, State
from streampack.core.sessions.client_events import Again, Begin, Returned
from streampack.core.sessions.client_session import ClientSession
from streampack.core.sessions.patience import Patience
from streampack.errors import StreampackError, UserError
from streampack.packs.lazy import LazyPacks
from streampack.packs.step import Step
from streampack.transport.keys import Key
from streampack.views.formats import Views

log = logging.getLogger("streampack.client")


class Reading:
    """A rank's place at a broker, from the attachment to ``close``: what has come, and where the trainer is.

    One thread of the trainer uses it, in the process that made it, beside its own. Raises what ``connect`` does.
    """

    def __init__(
        self, endpoint: str, feed: str, mesh: Mesh, readers: ReadBy, prefetch: int, patience: Patience, views: Views,
        variable_lengths: bool = False, key: Key | None = None,
    ) -> None:  # fmt: skip
        self._views = views
        self._session = ClientSession(
            run=0, feed=feed, reader=uuid.uuid4().hex, host=socket.gethostname(), pid=os.getpid(), mesh=mesh,
            readers=readers, variable_lengths=variable_lengths, prefetch=prefetch, ready=False, patience=patience,
        )  # fmt: skip
        self._figures = ReadingFigures()
        self._last_round = -1  # the last that was begun
        self._place = Begin()  # where the iteration begins
        self._loaded: dict[str, Any] | None = None  # the state that says so
        self._upto: int | None = None  # steps before it were handed out whole in this iteration; None: not one
        self._delivered = False
        self._in_use: int | None = None
        # What is left of step ``_packs_of``, where packs are asked for: some that are made, and groups after them.
        self._packs: deque[Any] = deque()
        self._source: LazyPacks | None = None
        self._group = self._left = self._packs_of = 0
        self._prefetching = Prefetching(endpoint, self._session, mesh, views, patience.answer_s, self._figures, key)
        try:
            self._prefetching.wait_for(lambda: self._prefetching.attached is not None)
            self._begin_as(views)
        except BaseException:  # Ctrl-C too: an orphan would hold the rank
            self.close()
            raise

    def _begin_as(self, views: Views) -> None:
        """Views of what this feed has. Raises UserError."""
        assert self._prefetching.attached is not None  # __init__ has waited for it
        views.fit(self.rules, self._prefetching.attached.layout)
        if self.rules.padded and not any(self._session.mesh.ranks):
            log.warning(
                "feed %s: micro-batches are padded, and each may have a shape of its own: torch.compile would compile "
                "each, unless its dimensions are marked as dynamic", self._session.feed,
            )  # fmt: skip

    @property
    def round(self) -> int:
        """The iteration that is on, or that begins next."""
        return self._prefetching.round

    # What a trainer uses

    def begin(self) -> None:
        """Begin to iterate; or the next iteration of a finite feed, if the trainer has had anything of this one."""
        self._prefetching.check_usable()
        if self._last_round != self.round:
            self._last_round = self.round
            self._prefetching.tell(self._place)
        elif self.rules.finite and (self._delivered or self._prefetching.ended):
            self._turn_to(Begin(round=self.round + 1))
            self._last_round = self.round
            self._prefetching.tell(Again())

    def next_step(self) -> Step | None:
        """The next step, or None after the last; the one before it has been returned, whoever asks."""
        step = self._take_step()
        if step is not None:
            self._upto = step.index + 1
        return step

    def next_pack(self) -> Any:
        """The rank's next pack. Raises StopIteration at the end, on the same step on every rank."""
        self._prefetching.check_usable()
        if not self._left:
            step = self._take_step()
            if step is None:
                raise StopIteration
            if isinstance(step.packs, LazyPacks):
                self._source, self._group = step.packs, 0
            else:
                self._packs.extend(step.packs)
            self._left, self._packs_of = len(step), step.index
        if not self._packs and self._source is not None:
            self._packs.extend(self._source.take(self._group))
            self._group += 1  # once it is there: who was interrupted may ask again
        pack = self._packs.popleft()
        self._left -= 1
        if not self._left:
            self._source = None
            self._upto = max(self._upto or 0, self._packs_of + 1)
        return pack

    def _take_step(self) -> Step | None:
        self._prefetching.check_usable()
        if self._last_round != self.round:
            self.begin()
        if self._in_use is not None:
            self._prefetching.tell(Returned(self._in_use + 1))
            self._in_use = None
        step = None
        self._figures.begin_wait()
        try:
            step = self._prefetching.take_step()
        finally:
            self._figures.end_wait(step is not None)
        if step is None:
            return None
        step = self._views.arrive(step)
        self._delivered = True
        self._in_use = step.index
        self._figures.note_step(len(step), step.num_tokens)
        return step

    # Checkpoints

    def state(self, step: int | None) -> dict[str, Any]:
        """The state after ``step``, by default the last that was handed out whole. Changes nothing."""
        self._prefetching.check_usable()
        begins = self._place.next_step
        upto = begins if self._upto is None else self._upto
        next_step = upto if step is None else _step(step, begins - 1, upto) + 1
        origin = self._origin
        if next_step > begins:
            found = self._prefetching.ask(AskState(feed=origin.feed, step=next_step))
            assert isinstance(found, State)
            return checkpoint.save(origin, self.round, found)
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        assert self._prefetching.attached is not None
        start = State(feed=origin.feed, lineage=self._prefetching.attached.lineage, step=0, chain=b"", snapshot=None)
        return checkpoint.save(origin, self.round, start)

    def load(self, state: Any) -> None:
        """The next iteration begins where ``state`` says; the one that is on has ended. Raises StateError."""
        self._prefetching.check_usable()
        place = checkpoint.load(state, self._origin)
        self._turn_to(msgspec.structs.replace(place, round=max(place.round, self._last_round + 1)))
        self._loaded = copy.deepcopy(state)

    def commit(self, step: int) -> None:
        """Returns when the broker has in its log that a checkpoint made after ``step`` is durable."""
        self._prefetching.check_usable()
        upto = self._place.next_step if self._upto is None else self._upto
        self._prefetching.ask(Commit(feed=self._origin.feed, step=_step(step, 0, upto)))

    def _turn_to(self, place: Begin) -> None:
        """Have nothing any more, and be about to begin at ``place``."""
        self._place, self._loaded, self._upto, self._delivered = place, None, None, False
        self._prefetching.turn_to(place.round)
        self._in_use = None
        self._packs.clear()
        self._source, self._left = None, 0

    @property
    def _origin(self) -> checkpoint.Origin:
        return checkpoint.Origin(self._session.run, self._session.feed, self.rules)

    def stats(self) -> dict[str, float]:
        """See ``Client.stats``."""
        return self._figures.stats(self._session.num_skipped)

    def close(self) -> None:
        """Give the rank up and end the thread; idempotent."""
        self._prefetching.close()

    @property
    def mesh(self) -> Mesh:
        return self._session.mesh

    @property
    def format(self) -> str:
        return self._views.format

    @property
    def rules(self) -> Rules:
        assert self._prefetching.attached is not None  # __init__ has waited for it
        return self._prefetching.attached.rules

    def fail(self, error: StreampackError) -> None:
        """Raise ``error`` where the next step is asked for, once what is ready is taken. Any thread may."""
        self._prefetching.fail(error)


def _step(given: Any, least: int, upto: int) -> int:
    """A step that was handed out. Raises UserError for another, or for what is none."""
    with contextlib.suppress(TypeError):
        if least <= operator.index(given) < upto:
            return operator.index(given)
    had = f"{least} to {upto - 1}" if least < upto else "none was yet"
    raise UserError(f"got step={given!r}, expected one that was handed out: {had}")
