"""Shared memory in slots: ``Slots`` of this process, which it lends, and a ``Mapping`` of another process's slots.

The memory is a ``memfd``, which has no name that a killed process could leave behind. The other side opens it through
``/proc``, which the kernel allows to processes of the same user. It is sealed: a peer that could shrink it would kill
its reader. A random token at its head tells it from other memory with the same numbers.

A slot may be lent to several peers, and is free again once each of them has given it back. Only an answer of the peer
gives a slot back. A peer that is gone may be a process that was frozen and still reads. If it has not given all slots
back, none of the memory is written to again. The memory is closed, and other memory takes its place.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import secrets
import weakref
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SLOT_BYTES = 2 << 20
"""Bytes of a slot: a whole chunk or message of packs by default. Larger frames go over the socket.

The unused rest of a slot takes no memory.
"""
NUM_SLOTS = 64
"""Slots of a router for each peer. They hold the steps that a rank prefetches, until packs are made of the steps.

It is the number of bits of an answer. Slots that are not used take no memory.
"""
FEW_SLOTS = 8
"""Slots of a dealer; a broker plans its memory for this number per producer (``ARRIVING_BYTES``)."""
TOKEN_BYTES = 16
_CALLED = "streampack"
_SEALS = 0 if not hasattr(fcntl, "F_SEAL_SHRINK") else fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Name(NamedTuple):
    """The identity of shared memory: its token, the owner's process and file descriptor, and its size."""

    token: bytes
    pid: int
    fd: int
    num_slots: int
    slot_bytes: int


class Slots:
    """Memory of this process that one or more peers may read, in slots, and how many peers have each slot.

    Raises OSError if the system has no sealed memory.
    """

    def __init__(self, num_slots: int = NUM_SLOTS, slot_bytes: int = SLOT_BYTES) -> None:
        size = mmap.PAGESIZE + num_slots * slot_bytes
        self._fd = os.memfd_create(_CALLED, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, size)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            memory = mmap.mmap(self._fd, size)
        except OSError:
            os.close(self._fd)
            raise
        self.name = Name(secrets.token_bytes(TOKEN_BYTES), os.getpid(), self._fd, num_slots, slot_bytes)
        memory[:TOKEN_BYTES] = self.name.token
        self._memory: NDArray[np.uint8] = np.frombuffer(memory, np.uint8, offset=mmap.PAGESIZE).reshape(num_slots, -1)
        self._free = list(range(num_slots - 1, -1, -1))
        """Free slots; the last one that came back is used first, as it is still in cache."""
        self._num_borrowers = [0] * num_slots
        """Peers that each slot is lent to, or reserved for."""
        self._frames: dict[int, NDArray[np.uint8]] = {}
        """Frames that were copied to slots in use. They are kept, so that no other frame gets their address."""
        self._slot_of: dict[tuple[int, int], int] = {}
        """Slot of each frame in ``_frames``, by address and bytes; the newest if there are several."""
        self.number = 0
        """Number of the last message about this memory to any peer.

        A process that connects again is another peer here. It has the same memory, and expects higher numbers.
        """
        self._close = weakref.finalize(self, os.close, self._fd)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """Reserve a slot to write to for one peer, and return its number; None if all are in use."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._num_borrowers[slot] = 1
        return slot

    def keep(self, slot: int, frame: NDArray[np.uint8]) -> None:
        """Keep a frame that was copied to a slot, so that ``find`` returns the slot as long as it is in use."""
        self._frames[slot] = frame
        self._slot_of[address(frame), frame.nbytes] = slot

    def find(self, frame: NDArray[np.uint8]) -> int | None:
        """Return the slot in use that holds a frame, or None."""
        return self._slot_of.get((address(frame), frame.nbytes))

    def is_used(self, slot: int) -> bool:
        """Return True if a slot is lent or reserved."""
        return self._num_borrowers[slot] > 0

    def memory(self, slot: int, num_bytes: int) -> NDArray[np.uint8]:
        """Return the first bytes of a slot, uint8 [num_bytes]."""
        return self._memory[slot, :num_bytes]

    def borrow(self, slot: int) -> None:
        """Count one more peer that has a slot in use."""
        self._num_borrowers[slot] += 1

    def give_back(self, slot: int) -> None:
        """Count one borrower less, and free the slot after the last borrower."""
        self._num_borrowers[slot] -= 1
        if self._num_borrowers[slot]:
            return
        self._free.append(slot)
        frame = self._frames.pop(slot, None)
        if frame is not None and self.find(frame) == slot:
            del self._slot_of[address(frame), frame.nbytes]

    def close(self) -> None:
        """Close the memory: a peer cannot map it any more, but a peer that has mapped it can still read it."""
        self._close()
        self._memory = self._memory[:0].copy()  # the mapping of this process goes with the last array of it
        self._frames.clear()
        self._slot_of.clear()


@dataclass(slots=True, weakref_slot=True, eq=False)
class PeerGroup:
    """Peers that get the same frames, and the memory that they share; None until a frame is sent to one of them."""

    slots: Slots | None = None
    asked_at: float = -math.inf
    """When all peers were last asked which slots they hold, in monotonic seconds."""

    def replace_memory(self) -> None:
        """Close the memory; the next frame goes to other memory."""
        if self.slots is not None:
            self.slots.close()
            self.slots = None


class Mapping:
    """A peer's memory, mapped to be read.

    Raises OSError or ValueError if the memory cannot be read, or does not match ``name``.
    """

    def __init__(self, name: Name) -> None:
        if not 0 < name.num_slots <= 64 or not 0 < name.slot_bytes <= SLOT_BYTES:  # a peer must not make us map more
            raise ValueError(f"got {name.num_slots} slots of {name.slot_bytes} bytes")
        size = mmap.PAGESIZE + name.num_slots * name.slot_bytes
        path = f"/proc/{name.pid}/fd/{name.fd}"
        if not os.readlink(path).startswith(f"/memfd:{_CALLED}"):
            raise ValueError("got a file that is not shared memory of streampack")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(fd).st_size != size:
                raise ValueError("got shared memory of another size, or without the seals that keep its size")
            self._memory = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        if self._memory[:TOKEN_BYTES] != name.token:
            raise ValueError("got shared memory with another token than the peer announced")
        self.name = name
        self.number = -1
        """Number of the last message received from the peer."""
        self._held: set[int] = set()
        self.num_released = 0
        """Number of slots released since the last answer."""

    def view(self, slot: int, num_bytes: int) -> memoryview:
        """Return the first bytes of a slot, read-only; the slot is held as long as the returned bytes are referenced.

        Raises ValueError for bytes outside of the slot, or a slot that is held already.
        """
        if not (slot < self.name.num_slots and num_bytes <= self.name.slot_bytes) or slot in self._held:
            raise ValueError(f"got {num_bytes} bytes of slot {slot}")
        lent = np.frombuffer(self._memory, np.uint8, num_bytes, mmap.PAGESIZE + slot * self.name.slot_bytes)
        self._held.add(slot)
        weakref.finalize(lent, self._release, slot).atexit = False
        return lent.data  # arrays made of this refer to ``lent``, not to the mapping

    def _release(self, slot: int) -> None:
        """Mark a slot as not held any more."""
        self._held.discard(slot)
        self.num_released += 1

    def answer(self) -> tuple[int, int]:
        """Return (number of the last message received, bits of the slots held), for the peer."""
        self.num_released = 0
        return self.number, sum(1 << slot for slot in list(self._held))


def address(values: NDArray[np.uint8]) -> int:
    """Return the address of an array's first byte."""
    return int(values.__array_interface__["data"][0])
