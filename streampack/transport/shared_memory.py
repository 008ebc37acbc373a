"""Frames sent between two processes of one host by reference: written once, to memory that the receiver has mapped.

The kernel copies a megabyte over a Unix socket twice, in pieces of the socket's buffer. Every piece wakes a thread at
each end. So on ``ipc://`` a large frame is written to a *slot* of the sender's memory, and the message says
which. Small frames go over the socket. So do all frames when no slot is free, or the other process cannot map the
memory. (It may be of another user, in another container, or not streampack.) This is an optimization of ``transport``
only, so its states are its own, and the sessions do not know them.

Every message of this module stands before, or in place of, the frames of one of ``wire``'s::

    "SPM1" "R"  name  u64 number  u16 n  n * (u16 frame, u16 slot, u32 bytes)     these frames lie in slots
    "SPM1" "H"  name  u64 number                                                  this is my memory; can you read it?
    "SPM1" "A"  token  u64 number  u64 held                                       of yours I hold these slots
    "SPM1" "N"  token                                                             I cannot read it
    "SPM1" "S"                                                                    I know all this
    name: token, u32 pid, u32 fd, u16 slots, u32 bytes of a slot

Messages state facts, so that a lost message does no harm. ``number`` counts the messages about a memory, to any peer.
An answer "up to number 7 I hold slots 1 and 4" frees every other slot that was lent up to number 7. A receiver that was
killed holds nothing; the next one says so when it is asked. A message that comes after one of a higher number is from
an earlier connection of the same peer. It counts as lost, since its slots may hold another message by now.

Peers of a ``PeerGroup`` have one memory. A frame that is in use there is lent to the next peer without a copy. A peer
refuses a slot that it holds already, so a frame that is sent to it again is copied to another slot.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.transport.slots import NUM_SLOTS, TOKEN_BYTES, Mapping, Name, PeerGroup, Slots, address

MAGIC = b"SPM1"
SPEAKS = MAGIC + b"S"
LEAST_BYTES = 64 << 10
"""Smaller frames go over the socket: lending a slot costs as much as sending them."""
ASK_S = 1.0
"""Seconds between two questions to a peer: if it can read the memory, and which slots it holds."""
_NAME = struct.Struct("<16sIIHI")
_NUMBER = struct.Struct("<Q")
_COUNT = struct.Struct("<H")
_REFERENCE = struct.Struct("<HHI")
_ANSWER = struct.Struct("<16sQQ")


Known = weakref.WeakValueDictionary[bytes, Mapping]


@dataclass(slots=True)
class Link:
    """The shared memory between this process and one peer: ``slots`` of ours, and a ``mapping`` of the peer's.

    ``asked_at`` is when the peer was last asked, in monotonic seconds.
    """

    num_slots: int = NUM_SLOTS
    slots: Slots | None = None
    group: PeerGroup | None = None
    """The peers that ``slots`` are shared with, if any."""
    lends: bool = False
    """True once the peer has said that it can read ``slots``."""
    refused: bool = False
    """True if the peer cannot read ``slots``, or the system has no shared memory."""
    mapping: Mapping | None = None
    asked_at: float = -ASK_S
    _lent: dict[int, int] = field(default_factory=dict)
    """Number of the message in which each slot was lent to this peer; only an answer of the peer removes it."""
    _prepared: tuple[int, int] | None = None
    """(address, slot) of the frame that ``room`` returned memory for, to be sent next."""

    def join(self, group: PeerGroup) -> bool:
        """Share the memory of a group from now on; return False if the peer cannot read this process's memory."""
        if self.group is not group and not self.refused:
            self.close()
            self.group, self.asked_at = group, -ASK_S
        return not self.refused

    # Sending

    def room(self, num_bytes: int) -> NDArray[np.uint8] | None:
        """Return memory for a frame of the next message, uint8 [num_bytes]; a frame in it is not copied again.

        None if the frame would go over the socket, or the peer is in a group: its frames are made for several peers.
        """
        if not self.lends or self.slots is None or self.group is not None:
            return None
        if not LEAST_BYTES <= num_bytes <= self.slots.name.slot_bytes:
            return None
        if self._prepared is not None:
            self.slots.give_back(self._prepared[1])
        slot = self.slots.take()
        if slot is None:
            self._prepared = None
            return None
        memory = self.slots.memory(slot, num_bytes)
        self._prepared = address(memory), slot
        return memory

    def outgoing(self, frames: Sequence[Any]) -> tuple[list[Any], list[int]]:
        """Move large frames to slots; return the frames for the socket, and the slots used.

        Pass the slots to ``give_back`` if the message is not sent.
        """
        slots = self._present_slots()
        if not self.lends or slots is None:
            return list(frames), []
        left, references, taken = [], [], []
        for place, frame in enumerate(frames):
            size = memoryview(frame).nbytes
            slot = self._placed(frame, size, slots)
            if slot is None:
                left.append(frame)
                continue
            references.append(_REFERENCE.pack(place, slot, size))
            taken.append(slot)
            self._lent[slot] = slots.number + 1
        if not taken:
            return left, []
        slots.number += 1
        head = MAGIC + b"R" + _NAME.pack(*slots.name) + _NUMBER.pack(slots.number) + _COUNT.pack(len(references))
        return [head + b"".join(references), *left], taken

    def _present_slots(self) -> Slots | None:
        """Return the memory to lend; the peer is still to be asked about it if it is new in the group."""
        if self.group is not None and self.slots is not self.group.slots:
            self.slots, self.lends, self.asked_at = self.group.slots, False, -ASK_S
            self._lent.clear()
        return self.slots

    def _placed(self, frame: Any, size: int, slots: Slots) -> int | None:
        """Return the slot that holds a frame, after copying it there if needed; None if it goes over the socket."""
        if not LEAST_BYTES <= size <= slots.name.slot_bytes:
            return None
        data = np.frombuffer(frame, np.uint8)
        if self._prepared is not None and self._prepared[0] == address(data):
            slot, self._prepared = self._prepared[1], None
            return slot
        for_group = self.group is not None and not data.flags.writeable
        if for_group and (slot_in_use := slots.find(data)) is not None and slot_in_use not in self._lent:
            slots.borrow(slot_in_use)
            return slot_in_use
        free = slots.take()
        if free is not None:
            slots.memory(free, size)[:] = data
            if for_group:
                slots.keep(free, data)
        return free

    def give_back(self, taken: Sequence[int]) -> None:
        """Free the slots of a message that was not sent."""
        for slot in taken:
            if self._lent.pop(slot, None) is not None and self.slots is not None:
                self.slots.give_back(slot)

    def question(self, frames: Sequence[Any], now: float) -> bytes | None:
        """Return a question to send to the peer before ``frames``; None if no question is needed now.

        The question asks if the peer can read this process's memory or, when no slot is free, which slots the peer
        holds.
        """
        slots = self._present_slots()
        if self.refused or now - self.asked_at < ASK_S:
            return None
        if self.lends and slots is not None and slots.num_free:
            return None
        if slots is None:
            if not any(memoryview(frame).nbytes >= LEAST_BYTES for frame in frames):
                return None
            try:
                self.slots = slots = Slots(self.num_slots)
            except (OSError, AttributeError):
                self.refused = True
                return None
            if self.group is not None:
                self.group.slots = slots
        self.asked_at = now
        slots.number += 1
        return MAGIC + b"H" + _NAME.pack(*slots.name) + _NUMBER.pack(slots.number)

    # Receiving

    def incoming(self, head: memoryview, frames: list[Any], peer: Known) -> tuple[list[Any] | None, bytes | None]:
        """Handle a received message about shared memory: its first frame ``head``, and the ``frames`` after it.

        Returns the frames of the enclosed message, or None, and the answer to send, or None. A message that cannot be
        read is lost. ``peer`` are all mappings by token.
        """
        try:
            return self._incoming(bytes(head[len(MAGIC) : len(MAGIC) + 1]), head[len(MAGIC) + 1 :], frames, peer)
        except (struct.error, ValueError):
            return None, None

    def _incoming(
        self, kind: bytes, body: memoryview, frames: list[Any], peer: Known
    ) -> tuple[list[Any] | None, bytes | None]:
        """Handle a message of type ``kind``, as ``incoming`` does. Raises struct.error or ValueError."""
        slots = self._present_slots()
        if kind == b"A" and slots is not None:
            token, upto, held_slots = _ANSWER.unpack(body)
            if token == slots.name.token:
                self.lends = True
                self._hear_held(slots, upto, held_slots)
        elif kind == b"N" and slots is not None and bytes(body) == slots.name.token:
            self.refused = True
            self.close()
        elif kind in (b"R", b"H"):
            name = Name(*_NAME.unpack_from(body))
            (number,) = _NUMBER.unpack_from(body, _NAME.size)
            self.mapping = peer.get(name.token)
            if self.mapping is None:
                try:
                    self.mapping = peer[name.token] = Mapping(name)
                except (OSError, ValueError):
                    return None, _cannot_read(name.token)
            if number <= self.mapping.number:
                return None, None
            self.mapping.number = number
            if kind == b"R":
                return _whole(self.mapping, body[_NAME.size + _NUMBER.size :], frames), None
            return None, self.answer()
        return None, None

    def _hear_held(self, slots: Slots, upto: int, held_slots: int) -> None:
        """Free the slots lent up to message ``upto``, except those that the peer holds, the bits of ``held_slots``.

        A process of a group that connected again may hold slots that were lent over its earlier connection. They
        count as lent to this peer, too.
        """
        for slot in [slot for slot, number in self._lent.items() if number <= upto and not held_slots >> slot & 1]:
            del self._lent[slot]
            slots.give_back(slot)
        if self.group is None or not held_slots:
            return
        for slot in range(slots.name.num_slots):
            if held_slots >> slot & 1 and slot not in self._lent and slots.is_used(slot):
                self._lent[slot] = upto
                slots.borrow(slot)

    def news(self) -> bytes | None:
        """Return an answer for the peer once this process has freed a quarter of its slots; None before."""
        mapping = self.mapping
        if mapping is None or 4 * mapping.num_released < mapping.name.num_slots:
            return None
        return self.answer()

    def answer(self) -> bytes:
        """Return the message that tells the peer which of its slots this process holds."""
        assert self.mapping is not None
        return MAGIC + b"A" + _ANSWER.pack(self.mapping.name.token, *self.mapping.answer())

    def close(self) -> None:
        """Stop lending to the peer, and leave its group. Memory with slots that the peer may still hold is closed."""
        slots, group = self._present_slots(), self.group
        if slots is not None and group is None:
            slots.close()
        elif group is not None and self._lent:
            group.replace_memory()
        self.slots = self.group = self._prepared = None
        self.lends = False
        self._lent.clear()


def refusal(head: memoryview) -> bytes | None:
    """Return the answer to a message with this ``head`` from a peer without a link; None if it needs no answer."""
    kind, name = bytes(head[len(MAGIC) : len(MAGIC) + 1]), head[len(MAGIC) + 1 :]
    return _cannot_read(bytes(name[:TOKEN_BYTES])) if kind in (b"R", b"H") else None


def _cannot_read(token: bytes) -> bytes:
    """Return the message that says that the peer's memory with this token cannot be read."""
    return MAGIC + b"N" + token


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
