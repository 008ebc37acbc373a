"""The results of FORM: packs and steps, and their digests.

The packs of a step are flat: the handles of all samples in one array, and where each pack begins. A step has hundreds
of packs, and creating an object and an array for each pack would take longer than forming the packs. ``PlannedPack`` is
a single pack, made on request. The digest of a pack is a hash of its samples' identities, lengths, checksums and shared
tokens. The digest of a step is a hash of its packs' digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise

import msgspec
import numpy as np
from msgspec import Struct, UnsetType
from numpy.typing import NDArray

from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64

FIRST_CHAIN = bytes(16)
"""The chain digest before step 0."""
IDENTITY = np.dtype(
    [("stream", "<u4"), ("part", "<u4"), ("index", "<u8"), ("length", "<u4"), ("crc", "<u4")],
)
"""The values of each sample that a pack's digest covers."""


class BegunStage(Struct, frozen=True):
    """A stage that has begun, by its number and name.

    Attributes:
        number: Number of the changes of the rules that hold; 0 at the begin of the run.
        name: Name of the last of these changes; empty if it has none.
    """

    number: int = 0
    name: str = ""


FIRST_STAGE = BegunStage()


def pack_digests(
    rows: NDArray[np.void], bounds: I64, shares: bytes | UnsetType = msgspec.UNSET
) -> list[bytes]:  # fmt: skip
    """Return the packs' digests, 16 bytes each; pack i holds samples ``rows[bounds[i]:bounds[i + 1]]``.

    ``rows`` are ``samples.ROW`` [n], ``bounds`` int64 [packs + 1]. ``shares`` is the column ``shared`` in the form of
    ``SampleTable.extra``. The digest of a pack without trees does not depend on it.
    """
    identities = np.empty(len(rows), IDENTITY)
    for name in IDENTITY.names or ():
        identities[name] = rows[name]
    return digests_of(memoryview(identities.tobytes()), bounds, shares)


def digests_of(identities: memoryview, bounds: I64, shares: bytes | UnsetType = msgspec.UNSET) -> list[bytes]:
    """Return the packs' digests, as ``pack_digests`` does; ``identities`` are the samples as bytes of ``IDENTITY``."""
    spans = pairwise((bounds * IDENTITY.itemsize).tolist())
    if not shares:
        return [_digest(identities[begin:end]) for begin, end in spans]
    column = np.frombuffer(shares, "<u4")
    pack_depths = (column[begin:end] for begin, end in pairwise(bounds.tolist()))
    trees = [depths.tobytes() if depths.any() else b"" for depths in pack_depths]
    samples = (bytes(identities[begin:end]) for begin, end in spans)
    contents = (pack_samples + tree for pack_samples, tree in zip(samples, trees, strict=True))
    return list(map(_digest, contents))


_EMPTY = hashlib.blake2b(digest_size=16)


def _digest(content: bytes | memoryview) -> bytes:
    """Return the hash of ``content``, 16 bytes. To copy an empty hash takes less time than to make one."""
    digest = _EMPTY.copy()
    digest.update(content)
    return digest.digest()


def step_digest(number: int, num_loss_tokens: int, num_samples: int, packs: Iterable[bytes]) -> bytes:
    """Return a step's digest: a hash of its number, its denominators and the digests of its ``packs``."""
    head = f"{number}:{num_loss_tokens}:{num_samples}:".encode()
    return hashlib.blake2b(head + b"".join(packs), digest_size=16).digest()


def chain_digest(chain: bytes, digest: bytes) -> bytes:
    """Return the chain digest after a step: a hash of the ``chain`` before the step and the step's ``digest``."""
    return hashlib.blake2b(chain + digest, digest_size=16).digest()


class PlannedPack(Struct, frozen=True, eq=False):
    """One pack: the ``handles`` int64 [n] of its samples, empty for an empty pack, and sums over the samples.

    ``num_tokens`` counts real tokens, ``num_slot_tokens`` aligned tokens.
    """

    handles: I64
    num_tokens: int
    num_slot_tokens: int
    num_loss_tokens: int
    cost: int
    digest: bytes


class PlannedPacks(Struct, frozen=True, eq=False):
    """An ordered list of packs in flat arrays; ``packs[i]`` is a ``PlannedPack``.

    Attributes:
        handles: int64 [n], handles of all samples; pack i holds ``handles[bounds[i]:bounds[i + 1]]``.
        bounds: int64 [packs + 1], from 0 to n.
        sums: int64 [4, packs]: the ``tokens``, ``slots`` (tokens with alignment), ``loss_tokens`` and ``costs``.
        digests: 16 bytes for each pack.
    """

    handles: I64
    bounds: I64
    sums: I64
    digests: list[bytes]

    @classmethod
    def empty(cls, count: int = 0) -> PlannedPacks:
        """Return ``count`` packs without samples."""
        digest = hashlib.blake2b(digest_size=16).digest()
        zeros = np.zeros((4, count), np.int64)
        return cls(np.zeros(0, np.int64), np.zeros(count + 1, np.int64), zeros, [digest] * count)

    @property
    def tokens(self) -> I64:
        """Real tokens of each pack, int64 [packs]."""
        tokens: I64 = self.sums[0]
        return tokens

    @property
    def slots(self) -> I64:
        """Aligned tokens of each pack, int64 [packs]."""
        slots: I64 = self.sums[1]
        return slots

    @property
    def loss_tokens(self) -> I64:
        """Tokens of each pack that count in the loss, int64 [packs]."""
        loss_tokens: I64 = self.sums[2]
        return loss_tokens

    @property
    def costs(self) -> I64:
        """Cost of each pack, as the rules' ``balance`` computes it, int64 [packs]."""
        costs: I64 = self.sums[3]
        return costs

    @property
    def counts(self) -> I64:
        """Number of samples of each pack, int64 [packs]."""
        return self.bounds[1:] - self.bounds[:-1]

    def __len__(self) -> int:
        return len(self.digests)

    def __getitem__(self, number: int) -> PlannedPack:
        begin, end = self.bounds[: len(self)][number], self.bounds[1:][number]
        tokens, slots, loss_tokens, cost = self.sums[:, number].tolist()
        return PlannedPack(self.handles[begin:end], tokens, slots, loss_tokens, cost, self.digests[number])

    def __iter__(self) -> Iterator[PlannedPack]:
        return map(self.__getitem__, range(len(self)))

    @classmethod
    def joined(cls, parts: Sequence[PlannedPacks]) -> PlannedPacks:
        """Return the packs of all ``parts``, one part after another."""
        filled = [part for part in parts if len(part)]
        if len(filled) < 2:
            return filled[0] if filled else cls.empty()
        before = accumulate((len(part.handles) for part in filled), initial=0)
        ends = [first + part.bounds[1:] for first, part in zip(before, filled, strict=False)]
        return cls(
            np.concatenate([part.handles for part in filled]),
            np.concatenate([filled[0].bounds[:1], *ends]),
            np.concatenate([part.sums for part in filled], axis=1),
            list(chain.from_iterable(part.digests for part in filled)),
        )

    def cut(self, count: int) -> tuple[PlannedPacks, PlannedPacks]:
        """Return the first ``count`` packs, and the remaining packs."""
        if count == len(self):
            return self, PlannedPacks.empty()
        at = self.bounds[count]
        return (
            PlannedPacks(self.handles[:at], self.bounds[: count + 1], self.sums[:, :count], self.digests[:count]),
            PlannedPacks(self.handles[at:], self.bounds[count:] - at, self.sums[:, count:], self.digests[count:]),
        )


class PlannedStep(Struct, frozen=True, eq=False):
    """The packs of one optimizer update, with the denominators of the whole step."""

    number: int
    packs: PlannedPacks
    num_loss_tokens: int
    num_samples: int
    digest: bytes
    chain: bytes
    """Digest of this step and all steps before it."""
    rules: Rules
    """The rules under which the step was formed."""
    stage: BegunStage = FIRST_STAGE
    """The stage to which the step belongs."""
