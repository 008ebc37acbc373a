"""Frames between two processes of one host by reference: written once into memory that the other has mapped.

A megabyte over a Unix socket is copied by the kernel twice, in pieces of the socket's buffer, with a thread woken at
each end for every piece. So on ``ipc://`` a large frame goes into a *slot* of the sender's memory, and the message says
which; what is small goes as ever, and so does everything where no slot is free, the other process cannot map the memory
(another user, another container), or is no streampack. Nothing depends on it: it is an optimization of ``transport``,
which is why it has states of its own and none that the sessions know.

The memory is a ``memfd``: it has no name that a killed process could leave behind, and the other side opens it through
``/proc``, which the kernel allows to processes of the same user. It is sealed: a peer that could shrink it would kill
who reads it. A random token at its head tells it from any other that has the same numbers.

Every message of this module stands before, or instead of, the frames of one of ``wire``'s::

    "SPM1" "R"  name  u64 number  u16 n  n * (u16 frame, u16 slot, u32 bytes)     these frames lie in slots
    "SPM1" "H"  name  u64 number                                                  this is my memory; can you read it?
    "SPM1" "A"  token  u64 number  u64 held                                       of yours I hold these slots
    "SPM1" "N"  token                                                             I cannot read it
    "SPM1" "S"                                                                    I know all this
    name: token, u32 pid, u32 fd, u16 slots, u32 bytes of a slot

What is said is a state, so that a lost message harms nothing: ``number`` counts the sender's messages, and an answer
"up to number 7 I hold slots 1 and 4" frees every other slot that was lent up to number 7. A receiver that was killed
holds nothing; the next one says so when it is asked. A message that comes after one of a higher number (from an earlier
connection of the same peer) is lost: what it refers to may be another's by now.
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
"""Frames below go over the socket: to lend one costs what it costs to send them."""
SLOT_BYTES = 2 << 20
"""What a chunk and a message of packs have at most, unless limits say otherwise; larger ones go over the socket. Of a
slot that less is written to the rest is no memory."""
NUM_SLOTS = 64
"""Of a router for each of its peers: steps that ranks ask for ahead, which lie there until packs are made of them. As
many as an answer has bits for; those that are not needed are never touched, and no memory."""
FEW_SLOTS = 8
"""Of a dealer: what a broker counts on for each producer that is ahead of it (``ARRIVING_BYTES``)."""
ASK_S = 1.0
"""Between two questions whether the other side can read, or what it holds."""
_CALLED = "streampack"
_TOKEN_BYTES = 16
_NAME = struct.Struct("<16sIIHI")
_NUMBER = struct.Struct("<Q")
_COUNT = struct.Struct("<H")
_REFERENCE = struct.Struct("<HHI")
_ANSWER = struct.Struct("<16sQQ")
_SEALS = 0 if not hasattr(fcntl, "F_SEAL_SHRINK") else fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Name(NamedTuple):
    """Where some memory is."""

    token: bytes
    pid: int
    fd: int
    num_slots: int
    slot_bytes: int


class Slots:
    """Memory of this process that one peer may read, and which parts of it are lent.

    Raises OSError where the system has none of the kind.
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
        """The last one that came back is lent first: it is still in cache."""
        self._lent: dict[int, int] = {}
        """Slot -> number of the message that it was lent in."""
        self._close = weakref.finalize(self, os.close, self._fd)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A slot to be written to; None where all are lent."""
        return self._free.pop() if self._free else None

    def memory(self, slot: int, num_bytes: int) -> NDArray[np.uint8]:
        """uint8 [num_bytes] of a slot."""
        return self._memory[slot, :num_bytes]

    def lend(self, slot: int, number: int) -> None:
        """A slot that was taken goes out in message ``number``."""
        self._lent[slot] = number

    def give_back(self, slot: int) -> None:
        """A slot that was taken is not sent after all."""
        self._lent.pop(slot, None)
        self._free.append(slot)

    def answered(self, upto: int, held: int) -> None:
        """Up to message ``upto`` the peer has what was not lost, and still holds the slots of the bits of ``held``."""
        for slot in [slot for slot, number in self._lent.items() if number <= upto and not held >> slot & 1]:
            self.give_back(slot)

    def close(self) -> None:
        """No peer can map it any more; those that have may go on reading."""
        self._close()


class Mapping:
    """A peer's memory. Raises OSError or ValueError where it cannot be read or is not what ``name`` says."""

    def __init__(self, name: Name) -> None:
        if not 0 < name.num_slots <= 64 or not 0 < name.slot_bytes <= SLOT_BYTES:  # what is read becomes our memory
            raise ValueError(f"got {name.num_slots} slots of {name.slot_bytes} bytes")
        size = mmap.PAGESIZE + name.num_slots * name.slot_bytes
        path = f"/proc/{name.pid}/fd/{name.fd}"
        if not os.readlink(path).startswith(f"/memfd:{_CALLED}"):
            raise ValueError("got a file that is no memory")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(fd).st_size != size:
                raise ValueError("got memory that its owner may take away")
            self._memory = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        if self._memory[:_TOKEN_BYTES] != name.token:
            raise ValueError("got other memory than was meant")
        self.name = name
        self.number = -1
        """The peer's last message that has come."""
        self._held: set[int] = set()
        self.num_released = 0
        """Since the last answer."""

    def view(self, slot: int, num_bytes: int) -> memoryview:
        """Bytes of a slot, read-only; it is held until nothing refers to them. Raises ValueError outside of it."""
        if not (slot < self.name.num_slots and num_bytes <= self.name.slot_bytes) or slot in self._held:
            raise ValueError(f"got {num_bytes} bytes of slot {slot}")
        lent = np.frombuffer(self._memory, np.uint8, num_bytes, mmap.PAGESIZE + slot * self.name.slot_bytes)
        self._held.add(slot)
        weakref.finalize(lent, self._release, slot).atexit = False
        return lent.data  # through which arrays refer to it, and not past it to the mapping

    def _release(self, slot: int) -> None:
        self._held.discard(slot)
        self.num_released += 1

    def answer(self) -> tuple[int, int]:
        """(the last message that has come, the slots held as bits)."""
        self.num_released = 0
        return self.number, sum(1 << slot for slot in list(self._held))


Known = weakref.WeakValueDictionary[bytes, Mapping]


@dataclass(slots=True)
class Link:
    """What one peer, which knows this module's messages, and this process lend each other."""

    num_slots: int = NUM_SLOTS
    slots: Slots | None = None
    lends: bool = False
    """The peer has said that it can read ``slots``."""
    refused: bool = False
    mapping: Mapping | None = None
    number: int = 0
    asked_at: float = -ASK_S
    _prepared: tuple[int, int] | None = None
    """(where in memory, its slot) of a frame that is being written, to be sent next."""

    # Sending

    def room(self, num_bytes: int) -> NDArray[np.uint8] | None:
        """Memory to write a frame of the next message into, uint8 [num_bytes], which then need not be copied; None
        where it would go over the socket.
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
        """``frames`` as they go over the socket, and the slots that hold the rest, to ``give_back`` if not sent."""
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
        """The slot that a frame lies in; None where it goes over the socket."""
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
        """Of a message that was not sent."""
        for slot in taken:
            assert self.slots is not None
            self.slots.give_back(slot)

    def question(self, frames: Sequence[Any], now: float) -> bytes | None:
        """What to ask the peer first, if ``frames`` are to be sent: whether it can read, or what it still holds."""
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
        """A message that began with ``head``, before its other ``frames``: the frames of the message it stands for, if
        any, and what to answer, if anything. One that cannot be read is lost. ``known``: what is mapped by token.
        """
        try:
            return self._incoming(bytes(head[len(MAGIC) : len(MAGIC) + 1]), head[len(MAGIC) + 1 :], frames, known)
        except (struct.error, ValueError):
            return None, None

    def _incoming(
        self, kind: bytes, body: memoryview, frames: list[Any], known: Known
    ) -> tuple[list[Any] | None, bytes | None]:
        if kind == b"A" and self.slots is not None:
            token, upto, held = _ANSWER.unpack(body)
            if token == self.slots.name.token:
                self.lends = True
                self.slots.answered(upto, held)
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
        """What the peer should know of its slots that came free here, once they are a quarter: it is woken by it."""
        mapping = self.mapping
        if mapping is None or 4 * mapping.num_released < mapping.name.num_slots:
            return None
        return self.answer()

    def answer(self) -> bytes:
        assert self.mapping is not None
        return MAGIC + b"A" + _ANSWER.pack(self.mapping.name.token, *self.mapping.answer())

    def close(self) -> None:
        """Lend nothing any more."""
        if self.slots is not None:
            self.slots.close()


def refusal(head: memoryview) -> bytes | None:
    """What to answer to a message that began with ``head``, of a peer that nothing is shared with."""
    kind, name = bytes(head[len(MAGIC) : len(MAGIC) + 1]), head[len(MAGIC) + 1 :]
    return _cannot_read(bytes(name[:_TOKEN_BYTES])) if kind in (b"R", b"H") else None


def _cannot_read(token: bytes) -> bytes:
    return MAGIC + b"N" + token


def _address(values: NDArray[np.uint8]) -> int:
    return int(values.__array_interface__["data"][0])


def _whole(mapping: Mapping, body: memoryview, left: list[Any]) -> list[Any]:
    """The frames of a message, those that are ``left`` of it and those that lie in slots. Raises ValueError."""
    (count,) = _COUNT.unpack_from(body)
    frames = list(left)
    for i in range(count):
        place, slot, size = _REFERENCE.unpack_from(body, _COUNT.size + i * _REFERENCE.size)
        frames.insert(place, mapping.view(slot, size))
    return frames
