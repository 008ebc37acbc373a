"""Changes that people ask for over HTTP: they wait for the broker's thread, which asks the core, and are answered."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from streampack.config.stage_settings import StageSettings
from streampack.core.model.keys.stage_keys import Stage
from streampack.core.model.rule_changes import Ask
from streampack.core.protocol.effects import Answer, Change

Asked = Ask | StageSettings
"""A change as a person asks for it. The rules in force complete the settings of a stage."""


class AskedChanges:
    """Changes that people ask for over HTTP, and the core's answers; ``wake`` is called for each change."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._tokens = itertools.count()
        self._requests: deque[tuple[int, str, Asked, int | None, str]] = deque()
        self._futures: dict[int, Future[Answer]] = {}
        """Futures of the changes without an answer, by token."""

    def ask(self, feed: str, ask: Asked, at_step: int | None, note: str) -> Future[Answer]:
        """Do the work of ``BrokerService.ask``; safe in any thread."""
        token = next(self._tokens)
        future = self._futures[token] = Future()
        self._requests.append((token, feed, ask, at_step, note))
        self._wake()
        return future

    def take(self, complete: Callable[[str, StageSettings], Stage]) -> Iterator[Change]:
        """Yield the changes that were asked for since the last call, and answer stages that are not possible.

        ``complete``: Returns a stage of a feed from its settings; raises ValueError if it is not possible.
        """
        while self._requests:
            token, feed, ask, at_step, note = self._requests.popleft()
            try:
                change = complete(feed, ask) if isinstance(ask, StageSettings) else ask
            except ValueError as error:
                self.answer(Answer(token, feed, refusal=str(error)))
            else:
                yield Change(token, feed, change, at_step, note)

    def answer(self, answer: Answer) -> None:
        """Give an answer of the core to the thread that waits for it."""
        future = self._futures.pop(answer.token)
        if future.set_running_or_notify_cancel():  # false if the caller has given up
            future.set_result(answer)

    def close(self) -> None:
        """Cancel the changes without an answer."""
        for future in list(self._futures.values()):
            future.cancel()
