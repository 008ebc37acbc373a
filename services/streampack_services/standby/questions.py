"""Asks the arbiter in a thread of its own, because a shared folder or a store may take long to answer."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from streampack.core.standby.arbiter_entries import CreateEntry, EntryWritten, Newest, ReadNewest
from streampack.errors import UserError
from streampack_services.standby.arbiter import Arbiter, ArbiterUnreachable

log = logging.getLogger("streampack.standby")


class Questions:
    """The questions of one process to the arbiter; ``wake`` is called in the thread when there is an answer."""

    def __init__(self, arbiter: Arbiter, wake: Callable[[], None]) -> None:
        self._arbiter, self._wake = arbiter, wake
        self._requests: SimpleQueue[CreateEntry | ReadNewest | None] = SimpleQueue()
        self._answers: deque[EntryWritten | Newest] = deque()
        self._thread = threading.Thread(target=self._run, name="streampack-arbiter", daemon=True)
        self._thread.start()

    def ask(self, question: CreateEntry | ReadNewest) -> None:
        """Ask; the answer comes with a later ``take``."""
        self._requests.put(question)

    def take(self) -> list[EntryWritten | Newest]:
        """Return the answers that have come."""
        return [self._answers.popleft() for _ in range(len(self._answers))]

    def close(self) -> None:
        """End the thread once it has an answer to its last question; a thread that hangs is left behind."""
        self._requests.put(None)

    def _run(self) -> None:
        """Ask the arbiter, one question after another."""
        while (question := self._requests.get()) is not None:
            why = ""
            entry = None
            try:
                if isinstance(question, ReadNewest):
                    entry = self._arbiter.newest()
                else:
                    entry = self._arbiter.create(question.entry)
            except (ArbiterUnreachable, UserError) as error:
                why = str(error)
            except Exception as error:  # a store's library may raise anything
                log.exception("the arbiter failed")
                why = f"{type(error).__name__}: {error}"
            if isinstance(question, ReadNewest):
                self._answers.append(Newest(entry, why))
            else:
                self._answers.append(EntryWritten(question.entry, entry, why))
            self._wake()
