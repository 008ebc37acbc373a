"""Steps and snapshots that no broker planned."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from streampack.core.model.rules import Rules
from streampack.core.model.snapshot import FormState, MergeState, Snapshot
from streampack.core.model.steps import PlannedPacks, PlannedStep


def digest_of(step: int) -> bytes:
    return hashlib.blake2b(b"step %d" % step, digest_size=16).digest()


def chain_of(step: int) -> bytes:
    """Of all steps before ``step``."""
    chain = bytes(16)
    for number in range(step):
        chain = hashlib.blake2b(chain + digest_of(number), digest_size=16).digest()
    return chain


def made_up_step(number: int) -> PlannedStep:
    sums = np.array([[0] * 4, [0] * 4, [0] * 4, range(4)], np.int64)
    packs = PlannedPacks(np.zeros(0, np.int64), np.zeros(5, np.int64), sums, [b""] * 4)
    return PlannedStep(number, packs, 10 * number, number, digest_of(number), chain_of(number + 1), Rules())


def snapshot_at(step: int) -> Snapshot:
    empty: Any = []
    merge = MergeState(empty, empty, empty, empty, empty, empty, empty, stopped=False)
    return Snapshot("", merge, FormState(step, b"", False, b"", [], b"", []))
