"""The steps of one client: the parts that have arrived, whole steps, and the steps that its trainer is done with.

Parts that answer one request come in order. So a part before its turn shows that others are lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from streampack.core.protocol.message import Envelope
from streampack.core.protocol.step_part import StepPart


class _Assembly(Struct):
    """The parts of one step that have arrived, by number; every part below ``upto`` has arrived."""

    first: StepPart
    parts: dict[int, Envelope] = {}
    upto: int = 0

    def add(self, part: int, envelope: Envelope) -> None:
        """Add the part of this number."""
        self.parts[part] = envelope
        while self.upto in self.parts:
            self.upto += 1


@dataclass(slots=True)
class StepArrivals:
    """The steps that a client reads, from a first step and the digest of all steps before it.

    Attributes:
        have_upto: Every step before has arrived.
        chain: Digest of all steps before ``have_upto``.
        done_upto: The trainer is done with every step before.
        request: Number of the last request to send parts again.
        unconfirmed_bytes: Bytes that came since the last request.
        num_skipped: Steps that the run's record marks as skipped, and that were not delivered.
    """

    have_upto: int
    chain: bytes
    done_upto: int = 0
    request: int = 0
    unconfirmed_bytes: int = 0
    num_skipped: int = 0
    _next: tuple[int, int] = (0, 0)
    """(step, part) that is expected next of the parts that answer the last request."""
    _assembling: dict[int, _Assembly] = field(default_factory=dict)
    _skipped: set[int] = field(default_factory=set)
    _chains: dict[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.begin(self.have_upto, self.chain)

    def begin(self, step: int, chain: bytes) -> None:
        """Begin to read at ``step``; ``chain`` is the digest of all steps before."""
        self.have_upto = self.done_upto = step
        self.chain, self._chains = chain, {step: chain}
        self._skipped.clear()

    @property
    def place(self) -> tuple[int, int]:
        """(step, part) of the first part that is missing."""
        assembly = self._assembling.get(self.have_upto)
        return self.have_upto, assembly.upto if assembly is not None else 0

    @property
    def num_incomplete(self) -> int:
        """Number of steps with some, but not all, of their parts."""
        return len(self._assembling)

    def forget_incomplete(self) -> None:
        """Drop the parts of incomplete steps."""
        self._assembling.clear()

    def ask_again(self) -> None:
        """Note a request for every part from the first missing one on."""
        self.request += 1
        self._next = self.place

    def lacks_before(self, place: tuple[int, int]) -> bool:
        """Return whether a part is lost, if the broker has sent every part before ``place``."""
        return place > max(self._next, self.place)

    def is_in_turn(self, part: StepPart) -> bool:
        """Return whether all parts that were sent before ``part`` have arrived; expect the part after it."""
        place = part.step, part.part
        if part.request != self.request or place < self._next:
            return True
        in_turn, is_last = place <= max(self._next, self.place), part.part + 1 >= part.parts
        self._next = (part.step + 1, 0) if is_last else (part.step, part.part + 1)
        return in_turn

    def add(self, part: StepPart, envelope: Envelope) -> list[tuple[Envelope, ...]]:
        """Add a part; return the steps that it completes, except for skipped ones, each as its parts in order."""
        self.unconfirmed_bytes += sum(len(frame) for frame in envelope.payload)
        self._assembling.setdefault(part.step, _Assembly(part)).add(part.part, envelope)
        steps: list[tuple[Envelope, ...]] = []
        while (whole := self._assembling.get(self.have_upto)) is not None and len(whole.parts) >= whole.first.parts:
            del self._assembling[self.have_upto]
            if whole.first.micro_batches:
                steps.append(tuple(whole.parts[number] for number in sorted(whole.parts)))
            else:
                self._skipped.add(self.have_upto)
                self.num_skipped += 1
            self.have_upto += 1
            self.chain = self._chains[self.have_upto] = whole.first.chain
        self.note_returned(self.done_upto)
        return steps

    def note_returned(self, upto: int) -> None:
        """Record that the trainer is done with the steps before ``upto``, and with skipped steps that follow them."""
        before, self.done_upto = self.done_upto, max(self.done_upto, upto)
        while self.done_upto in self._skipped:
            self._skipped.remove(self.done_upto)
            self.done_upto += 1
        for step in range(before, self.done_upto):
            self._chains.pop(step, None)

    def chain_of(self, step: int) -> bytes:
        """Return the digest of all steps before ``step``; empty if it is not known."""
        return self._chains.get(step, b"")
