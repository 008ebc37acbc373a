"""Frames sent between two processes of one host by reference: written once, to memory that the receiver has mapped.

The kernel copies a megabyte over a Unix socket twice, in pieces of the socket's buffer. Every piece wakes a thread at
each end. So on ``ipc://`` a large frame is written to a *slot* of the sender's memory, and the message says
which. Small frames go over the socket. So do all frames when no slot is free, or the other process cannot map the
memory. (It may be of another user, in another container, or not streampack.) This is an optimization of ``transport``
only, so its states are its own, and the sessions do not know them.

The memory is a ``memfd``, which has no name that a killed process could leave behind. The other side opens it through
``/proc``, which the kernel allows to processes of the same user. It is sealed: a peer that could shrink it would kill
its reader. A random token at its head tells it from other memory with the same numbers.

Every message of this module stands before, or in place of, the frames of one of ``wire``'s::

    "SPM1" "R"  name  u64 number  u16 n  n * (u16 frame, u16 slot, u32 bytes)     these frames lie in slots
    "SPM1" "H"  name  u64 number                                                  this is my memory; can you read it?
    "SPM1" "A"  token  u64 number  u64 held                                       of yours I hold these slots
    "SPM1" "N"  token                                                             I cannot read it
    "SPM1" "S"                                                                    I know all this
    name: token, u32 pid, u32 fd, u16 slots, u32 bytes of a slot

Messages state facts, so that a lost message does no harm. ``number`` counts the sender's messages. An answer "up to
number 7 I hold slots 1 and 4" frees every other slot that was lent up to number 7. A receiver that was killed holds
nothing; the next one says so when it is asked. A message that comes after one of a higher number is from an earlier
connection of the same peer. It counts as lost, since its slots may hold another message by now.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MAGIC = b"SPM1"
SPEAKS = MAGIC + b"S"
LEAST_BYTES = 64 << 10
"""Smaller frames go over the socket: lending a slot costs as much as sending them."""
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
ASK_S = 1.0
"""Seconds between two questions to a peer: if it can read the memory, and which slots it holds."""
_CALLED = "streampack"
_TOKEN_BYTES = 16
_NAME = struct.Struct("<16sIIHI")
_NUMBER = struct.Struct("<Q")
_COUNT = struct.Struct("<H")
_REFERENCE = struct.Struct("<HHI")
_ANSWER = struct.Struct("<16sQQ")
_SEALS = 0 if not hasattr(fcntl, "F_SEAL_SHRINK") else fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Name(NamedTuple):
    """The identity of shared memory: its token, the owner's process and file descriptor, and its size."""

    token: bytes
    pid: int
    fd: int
    num_slots: int
    slot_bytes: int


class Slots:
    """Memory of this process that one peer may read, in slots, and the slots that are lent to the peer.

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
        self.name = Name(secrets.token_bytes(_TOKEN_BYTES), os.getpid(), self._fd, num_slots, slot_bytes)
        memory[:_TOKEN_BYTES] = self.name.token
        self._memory: NDArray[np.uint8] = np.frombuffer(memory, np.uint8, offset=mmap.PAGESIZE).reshape(num_slots, -1)
        self._free = list(range(num_slots - 1, -1, -1))
        """Free slots; the last one that came back is used first, as it is still in cache."""
        self._lent: dict[int, int] = {}
        """Number of the message in which each lent slot was sent."""
        self._close = weakref.finalize(self, os.close, self._fd)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """Reserve a slot to write to, and return its number; None if all are in use."""
        return self._free.pop() if self._free else None

    def memory(self, slot: int, num_bytes: int) -> NDArray[np.uint8]:
        """Return the first bytes of a slot, uint8 [num_bytes]."""
        return self._memory[slot, :num_bytes]

    def lend(self, slot: int, number: int) -> None:
        """Mark a reserved slot as lent in message ``number``."""
        self._lent[slot] = number

    def give_back(self, slot: int) -> None:
        """Free a slot, reserved or lent."""
        self._lent.pop(slot, None)
        self._free.append(slot)

    def free_answered(self, upto: int, held: int) -> None:
        """Free the slots lent up to message ``upto``, except those that the peer holds, the bits of ``held``."""
        for slot in [slot for slot, number in self._lent.items() if number <= upto and not held >> slot & 1]:
            self.give_back(slot)

    def close(self) -> None:
        """Close the memory: a peer cannot map it any more, but a peer that has mapped it can still read it."""
        self._close()


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
        if self._memory[:_TOKEN_BYTES] != name.token:
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


Known = weakref.WeakValueDictionary[bytes, Mapping]


@dataclass(slots=True)
class Link:
    """The shared memory between this process and one peer: ``slots`` of ours, and a ``mapping`` of the peer's.

    ``number`` counts the messages sent to the peer; ``asked_at`` is when it was last asked, in monotonic seconds.
    """

    num_slots: int = NUM_SLOTS
    slots: Slots | None = None
    lends: bool = False
    """True once the peer has said that it can read ``slots``."""
    refused: bool = False
    """True if the peer cannot read ``slots``, or the system has no shared memory."""
    mapping: Mapping | None = None
    number: int = 0
    asked_at: float = -ASK_S
    _prepared: tuple[int, int] | None = None
    """(address, slot) of the frame that ``room`` returned memory for, to be sent next."""

    # Sending

    def room(self, num_bytes: int) -> NDArray[np.uint8] | None:
        """Return memory for a frame of the next message, uint8 [num_bytes]; a frame in it is not copied again.

        None if the frame would go over the socket.
        """
        if not self.lends or self.slots is None or not LEAST_BYTES <= num_bytes <= self.slots.name.slot_bytes:
            return None
        if self._prepared is not None:
            self.slots.give_back(self._prepared[1])
        slot = self.slots.take()
        if slot is None:
            self._prepared = None
            return None
        found = self.slots.memory(slot, num_bytes)
        self._prepared = _address(found), slot
        return found

    def outgoing(self, frames: Sequence[Any]) -> tuple[list[Any], list[int]]:
        """Move large frames to slots; return the frames for the socket, and the slots used.

        Pass the slots to ``give_back`` if the message is not sent.
        """
        if not self.lends or self.slots is None:
            return list(frames), []
        left, references, taken = [], [], []
        for place, frame in enumerate(frames):
            size = memoryview(frame).nbytes
            slot = self._placed(frame, size)
            if slot is None:
                left.append(frame)
                continue
            references.append(_REFERENCE.pack(place, slot, size))
            taken.append(slot)
        if not taken:
            return left, []
        self.number += 1
        for slot in taken:
            self.slots.lend(slot, self.number)
        head = MAGIC + b"R" + _NAME.pack(*self.slots.name) + _NUMBER.pack(self.number) + _COUNT.pack(len(references))
        return [head + b"".join(references), *left], taken

    def _placed(self, frame: Any, size: int) -> int | None:
        """Return the slot that holds a frame, after copying it there if needed; None if it goes over the socket."""
        assert self.slots is not None
        if not LEAST_BYTES <= size <= self.slots.name.slot_bytes:
            return None
        data = np.frombuffer(frame, np.uint8)
        if self._prepared is not None and self._prepared[0] == _address(data):
            slot, self._prepared = self._prepared[1], None
            return slot
        free = self.slots.take()
        if free is not None:
            self.slots.memory(free, size)[:] = data
        return free

    def give_back(self, taken: Sequence[int]) -> None:
        """Free the slots of a message that was not sent."""
        for slot in taken:
            assert self.slots is not None
            self.slots.give_back(slot)

    def question(self, frames: Sequence[Any], now: float) -> bytes | None:
        """Return a question to send to the peer before ``frames``; None if no question is needed now.

        The question asks if the peer can read this process's memory or, when no slot is free, which slots the peer
        holds.
        """
        if self.refused or now - self.asked_at < ASK_S:
            return None
        if self.lends and self.slots is not None and self.slots.num_free:
            return None
        if self.slots is None:
            if not any(memoryview(frame).nbytes >= LEAST_BYTES for frame in frames):
                return None
            try:
                self.slots = Slots(self.num_slots)
            except (OSError, AttributeError):
                self.refused = True
                return None
        self.asked_at = now
        self.number += 1
        return MAGIC + b"H" + _NAME.pack(*self.slots.name) + _NUMBER.pack(self.number)

    # Receiving

    def incoming(self, head: memoryview, frames: list[Any], known: Known) -> tuple[list[Any] | None, bytes | None]:
        """Handle a received message about shared memory: its first frame ``head``, and the ``frames`` after it.

        Returns the frames of the enclosed message, or None, and the answer to send, or None. A message that cannot be
        read is lost. ``known`` are all mappings by token.
        """
        try:
            return self._incoming(bytes(head[len(MAGIC) : len(MAGIC) + 1]), head[len(MAGIC) + 1 :], frames, known)
        except (struct.error, ValueError):
            return None, None

    def _incoming(
        self, kind: bytes, body: memoryview, frames: list[Any], known: Known
    ) -> tuple[list[Any] | None, bytes | None]:
        """Handle a message of type ``kind``, as ``incoming`` does. Raises struct.error or ValueError."""
        if kind == b"A" and self.slots is not None:
            token, upto, held = _ANSWER.unpack(body)
            if token == self.slots.name.token:
                self.lends = True
                self.slots.free_answered(upto, held)
        elif kind == b"N" and self.slots is not None and bytes(body) == self.slots.name.token:
            self.refused, self.lends = True, False
            self.close()
            self.slots = self._prepared = None
        elif kind in (b"R", b"H"):
            name = Name(*_NAME.unpack_from(body))
            (number,) = _NUMBER.unpack_from(body, _NAME.size)
            self.mapping = known.get(name.token)
            if self.mapping is None:
                try:
                    self.mapping = known[name.token] = Mapping(name)
                except (OSError, ValueError):
                    return None, _cannot_read(name.token)
            if number <= self.mapping.number:
                return None, None
            self.mapping.number = number
            if kind == b"R":
                return _whole(self.mapping, body[_NAME.size + _NUMBER.size :], frames), None
            return None, self.answer()
        return None, None

    def news(self) -> bytes | None:
        """Return an answer for the peer once a quarter of its slots are no longer held here; None before."""
        mapping = self.mapping
        if mapping is None or 4 * mapping.num_released < mapping.name.num_slots:
            return None
        return self.answer()

    def answer(self) -> bytes:
        """Return the message that tells the peer which of its slots are held here."""
        assert self.mapping is not None
        return MAGIC + b"A" + _ANSWER.pack(self.mapping.name.token, *self.mapping.answer())

    def close(self) -> None:
        """Close the memory that is lent to the peer."""
        if self.slots is not None:
            self.slots.close()


def refusal(head: memoryview) -> bytes | None:
    """Return the answer to a message with this ``head`` from a peer without a link; None if it needs no answer."""
    kind, name = bytes(head[len(MAGIC) : len(MAGIC) + 1]), head[len(MAGIC) + 1 :]
    return _cannot_read(bytes(name[:_TOKEN_BYTES])) if kind in (b"R", b"H") else None


def _cannot_read(token: bytes) -> bytes:
    """Return the message that says that the peer's memory with this token cannot be read."""
    return MAGIC + b"N" + token


def _address(values: NDArray[np.uint8]) -> int:
    """Return the address of an array's first byte."""
    return int(values.__array_interface__["data"][0])


def _whole(mapping: Mapping, body: memoryview, left: list[Any]) -> list[Any]:
    """Return a message's frames in order: frames ``left`` came from the socket, ``body`` lists the frames in slots.

    Raises ValueError or struct.error for a body that is not valid.
    """
    (count,) = _COUNT.unpack_from(body)
    frames = list(left)
    for i in range(count):
        place, slot, size = _REFERENCE.unpack_from(body, _COUNT.size + i * _REFERENCE.size)
        frames.insert(place, mapping.view(slot, size))
    return frames
