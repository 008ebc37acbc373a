"""Questions of readers about checkpoints: the state of one, and whether its commit is durable."""

from __future__ import annotations

from streampack.core.protocol.events import Effect
from streampack.core.protocol.trainer_messages import Committed
from streampack.core.serve.rank_reader import Reader, ReaderLink
from streampack.core.serve.rank_registry import RankRegistry
from streampack.core.serve.step_source import StepSource


class CheckpointQuestions:
    """The questions about checkpoints that the feed ``source`` has not answered yet."""

    def __init__(self, link: ReaderLink, registry: RankRegistry, source: StepSource) -> None:
        self._link, self._registry, self._source = link, registry, source
        self._questions: dict[Reader, int] = {}
        """The step whose state each reader waits for."""
        self._commits: dict[Reader, int] = {}
        """The step of the checkpoint whose commit each reader waits for."""

    def ask_state(self, reader: Reader, step: int) -> list[Effect]:
        """Send a reader the state of a checkpoint, or return the effects that fetch the state first."""
        self._questions[reader] = step
        return self._tell_state(reader)

    def tell_states(self) -> list[Effect]:
        """Answer the readers that wait for a checkpoint's state, if the state is known now."""
        self.forget_gone()
        return [effect for reader in list(self._questions) for effect in self._tell_state(reader)]

    def _tell_state(self, reader: Reader) -> list[Effect]:
        state = self._source.state_of(self._questions[reader])
        if isinstance(state, list):
            return state
        del self._questions[reader]
        return self._link.send(reader, state)

    def commit(self, reader: Reader, step: int) -> list[Effect]:
        """Record that a reader's checkpoint is durable; the answer comes once the record is safe."""
        self._commits[reader] = step
        return self._source.commit(step)

    def committed(self, step: int) -> list[Effect]:
        """Tell readers with a checkpoint at or before ``step`` that the checkpoint is recorded as durable."""
        self.forget_gone()
        committed = [(reader, commit_step) for reader, commit_step in self._commits.items() if commit_step <= step]
        for reader, _ in committed:
            del self._commits[reader]
        return [
            e for reader, upto in committed for e in self._link.send(reader, Committed(feed=self._link.feed, step=upto))
        ]

    def forget_gone(self) -> None:
        """Forget the questions of readers that have left."""
        for questions in (self._questions, self._commits):
            for reader in [reader for reader in questions if self._registry.named(reader.name) is not reader]:
                del questions[reader]
