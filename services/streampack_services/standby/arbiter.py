"""The arbiter: a place outside both hosts that keeps numbered entries, and lets each number be written once.

``open_arbiter`` opens one. ``file_arbiter`` keeps entries as files of a shared folder or an object store, and
``lease_arbiter`` in a Lease of a Kubernetes cluster.
"""

from __future__ import annotations

from typing import Protocol

from streampack.core.standby.arbiter_entries import Entry


class ArbiterUnreachable(OSError):
    """The arbiter does not answer. An entry that was being written may exist or not."""


class Arbiter(Protocol):
    """The entries of one run."""

    @property
    def where(self) -> str:
        """The place, for texts."""

    def newest(self) -> Entry | None:
        """Return the newest entry; None if there is none. Raises ArbiterUnreachable, UserError."""

    def create(self, entry: Entry) -> Entry:
        """Write an entry unless one of its number exists; return ``entry``, or the one that prevents it.

        Raises ArbiterUnreachable, UserError.
        """

    def probe(self) -> None:
        """Prove that each number can be written once. Raises UserError."""
