"""A former that is fed and asked as a test likes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from streampack.core.form.former import Former
from streampack.core.model.rules import Rules
from streampack.core.model.samples import SampleTable
from streampack.core.model.steps import PlannedStep


class Forming(ABC):
    """A former, its table, and the steps that it has formed."""

    def __init__(self, rules: Rules, table: SampleTable) -> None:
        self.rules, self.table, self.former = rules, table, Former(rules, table)
        self.admitted = 0
        self.steps: list[PlannedStep] = []

    @abstractmethod
    def admit(self, count: int) -> None:
        """Admit the next samples."""

    def form(self, max_steps: int = 1, meanwhile: Callable[[], None] = lambda: None) -> bool:
        """Form steps, if there are enough samples."""
        request = self.former.request(max_steps)
        if request is None:
            return False
        choice = request.choose()
        meanwhile()
        self.steps += self.former.apply(choice)
        return True

    def close(self) -> list[bytes]:
        """Admit all samples that are left, and form all steps; return their digests."""
        self.admit(1 << 30)
        self.former.closed = True
        while self.form():
            pass
        self.steps += self.former.cut()
        assert self.former.finished
        return [step.digest for step in self.steps]
