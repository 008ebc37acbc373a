"""The ``Packer`` protocol, and the types and helpers that all packers share.

A packer knows lengths, never tokens. Each call gets the remaining samples: the window, and the samples admitted after
the window. It returns the packs to remove, and keeps no state between calls. A pack depends only on the remaining
lengths, their order and ages, and on whether more samples may come. So packs are a function of the order of samples.
They do not depend on the number of packs requested at once, or on the progress of producers.

To add a packer, write one file with a class that keeps the ``Packer`` protocol. Then add one entry to ``registry``. A
parameter of its own is a key, and needs one line in ``model.keys.planning_keys``.
``Capped`` and ``blocks.tumbling.Tumbling`` are base classes for the common cases. A packer that keeps limits of other
units, such as those of media, sets ``keeps_limits``, and finds the limits in ``Extra``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Choice:
    """The packs that a packer takes out of ``lengths``.

    Attributes:
        indices: int64 [m], positions in ``lengths``, one pack after another, in the order inside the pack.
        bounds: int64 [p + 1]; pack i is ``indices[bounds[i]:bounds[i + 1]]``.
        ages: int64 [len(lengths)], the packer's state for each position: the sample's patience (see ``window``), or -1
            for positions that are not in the window yet. The caller drops the chosen positions and passes the other
            positions' ages to its next call.
    """

    indices: I64
    bounds: I64
    ages: I64


WHOLE = 1 << 20
"""A limit in shares, of which items take whole numbers."""


class Limited(NamedTuple):
    """Limits of a pack beside its budget, in other units than the budget's.

    Attributes:
        counts: int64 [k, n], the amount that each item has of each of k units, at most the limit.
        most: int64 [k], the limit of a pack for each unit.
    """

    counts: I64
    most: I64


class Extra(NamedTuple):
    """Facts about n items beside their lengths, for packers that use them.

    Attributes:
        limited: Limits of a pack in other units; None without limits. Only packers with ``keeps_limits`` get them.
        work: int64 [n], work of each item beside that of its tokens, at least 0, in the unit of a length squared; None
            if there is none.
    """

    limited: Limited | None = None
    work: I64 | None = None


NO_EXTRA = Extra()


class Packer(Protocol):
    """The interface of a packer: ``choose``, a pure function, and facts about the packer for the rest of the program.

    A packer is a frozen dataclass whose fields are its parameters; configuration sets them by name.
    """

    config_key: ClassVar[str]
    """The rule that selects this packer by its name: ``packer`` or ``balance.kind``."""
    max_budget: ClassVar[int | None]
    """The exclusive upper limit of the budget, in units of ``align.sample``; None: no limit."""
    keeps_limits: ClassVar[bool]
    """True if packs are within ``Extra.limited``."""
    takes_all: ClassVar[bool]
    """True if all items of a closed list may be its window, which leaves the least padding."""

    @property
    def name(self) -> str:
        """The packer's name in the configuration."""
        ...

    def max_wait(self, window: int, held: int) -> int | None:
        """Return the most packs that may be formed while one sample waits; None if there is no bound.

        ``window`` is the window's size in samples; ``held`` is the number of samples in the window when the sample
        came.
        """
        ...

    @property
    def wait_note(self) -> str:
        """A text for people about ``max_wait``; empty if there is nothing to say."""
        ...

    def num_outliers(self, lengths: I64, budget: int, extra: Extra = NO_EXTRA) -> int | None:
        """Return the number of items that wait for similar ones; None if the packer does not know outliers.

        ``lengths`` int64 [n] are the items in the window; ``budget`` is the capacity of a pack.
        """
        ...

    def choose(
        self, lengths: I64, ages: I64, budget: int, count: int, closed: bool, *, window: int, sizes: I64 | None = None,
        extra: Extra = NO_EXTRA,
    ) -> Choice:  # fmt: skip
        """Choose up to ``count`` packs from the head of ``lengths``.

        Args:
            lengths: int64 [n], each in 1..``budget``, oldest first: the window and the samples behind the window.
            ages: int64 [n], the ages that the last call returned; -1 for samples that no call has seen.
            budget: capacity of a pack, in the unit of ``lengths``.
            count: packs wanted. Packers that form several packs at once may return more.
            closed: True when no more samples will come. Then the window may become empty, and the last samples are
                packed, too.
            window: the window's size, in samples.
            sizes: int64 [n], samples in each item if items are groups; None means one sample per item. Only the
                parameter ``max_samples_per_pack`` uses them, and each is at most that cap.
            extra: Facts about the items beside their lengths.
        """
        ...


def check_cap(max_samples_per_pack: int | None) -> None:
    """Raise ValueError if ``max_samples_per_pack`` is below 1."""
    if max_samples_per_pack is not None and max_samples_per_pack < 1:
        raise ValueError(f"got max_samples_per_pack={max_samples_per_pack}, expected at least 1, or None for no cap")


class BasePacker:
    """Base of packers: no limits beside the budget, no bound on the wait, and no outliers."""

    __slots__ = ()
    config_key: ClassVar[str] = "packer"
    max_budget: ClassVar[int | None] = None
    keeps_limits: ClassVar[bool] = False
    takes_all: ClassVar[bool] = False

    def max_wait(self, window: int, held: int) -> int | None:
        """Return None: the wait has no bound."""
        return None

    @property
    def wait_note(self) -> str:
        """Empty: there is nothing to say about ``max_wait``."""
        return ""

    def num_outliers(self, lengths: I64, budget: int, extra: Extra = NO_EXTRA) -> int | None:
        """Return None: the packer does not know outliers."""
        return None


@dataclass(frozen=True, slots=True)
class Capped(BasePacker):
    """Base of packers whose only shared parameter is ``max_samples_per_pack``; None for no cap.

    Raises ValueError for a cap below 1.
    """

    max_samples_per_pack: int | None = None

    def __post_init__(self) -> None:
        check_cap(self.max_samples_per_pack)


def writable(array: I64) -> I64:
    """Return ``array`` as a contiguous, writable int64 array, as kernels take it; copy it only if needed."""
    contiguous: I64 = np.ascontiguousarray(array, np.int64)
    return contiguous if contiguous.flags.writeable else contiguous.copy()


def sample_counts(sizes: I64 | None, count: int) -> list[int]:
    """Return the number of samples in each item as a list; all 1 if ``sizes`` is None."""
    return [1] * count if sizes is None else sizes.tolist()


def choice_of(packs: Sequence[Sequence[int]], ages: I64) -> Choice:
    """Return a ``Choice`` of ``packs``, which are lists of positions."""
    bounds = np.fromiter(accumulate(map(len, packs), initial=0), np.int64, len(packs) + 1)
    return Choice(np.fromiter(chain.from_iterable(packs), np.int64, int(bounds[-1])), bounds, ages)
