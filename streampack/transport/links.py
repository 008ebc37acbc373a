"""The memory that a socket shares with its peers: what is lent to each, and what they say of it.

A peer is known once it has said that it speaks of shared memory; messages about it never come further than here. Used
by the socket's thread alone.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from streampack.transport import shared_memory
from streampack.transport.shared_memory import Known, Link

MOST_LINKS = 256
"""Peers that memory is shared with; the others' frames go over the socket."""
PROBED = 2
"""Links that are looked at whenever one is made: more than are made, so that those of peers that are gone stay few."""


class Links:
    """Of a socket whose ``send(peer, frames)`` says whether a message was queued; ``peers`` are known already."""

    def __init__(
        self, send: Callable[[bytes, Sequence[Any]], bool], num_slots: int, peers: Sequence[bytes] = ()
    ) -> None:
        self._raw_send, self._num_slots = send, num_slots
        self._by_peer = OrderedDict((peer, Link(num_slots)) for peer in peers)
        """The last one heard last."""
        self._known: Known = WeakValueDictionary()

    def received(self, peer: bytes, frames: list[Any]) -> list[Any] | None:
        """The frames of a message, those that lie in shared memory put in their places; None where it was about that
        memory, or is lost.
        """
        head = frames[0].buffer if frames else memoryview(b"")
        if head[: len(shared_memory.MAGIC)] != shared_memory.MAGIC:
            return frames
        link = self._link(peer)
        if link is None:
            whole, answer = None, shared_memory.refusal(head)
        else:
            whole, answer = link.incoming(head, frames[1:], self._known)
            answer = answer or link.news()
        if answer is not None:
            self._raw_send(peer, [answer])
        return whole

    def send(self, peer: bytes, frames: Sequence[Any]) -> bool:
        """Queue a message, its large frames in memory that the peer can read; False if it was dropped instead."""
        link = self._by_peer.get(peer)
        if link is None:
            return self._raw_send(peer, frames)
        if (question := link.question(frames, time.monotonic())) is not None:
            self._raw_send(peer, [question])
        frames, taken = link.outgoing(frames)
        sent = self._raw_send(peer, frames)
        if not sent:
            link.give_back(taken)
        return sent

    def room(self, peer: bytes, num_bytes: int) -> NDArray[np.uint8] | None:
        """Memory for a frame of the next message to a peer, uint8 [num_bytes]; None where there is none."""
        link = self._by_peer.get(peer)
        return link.room(num_bytes) if link is not None else None

    def tell(self) -> None:
        """Say what has come free here: where nothing has come, as it costs by how many peers there are."""
        for peer, link in list(self._by_peer.items()):
            if (news := link.news()) is not None:
                self._raw_send(peer, [news])

    def forget(self, peer: bytes) -> None:
        """A peer is gone."""
        if (link := self._by_peer.pop(peer, None)) is not None:
            link.close()

    def close(self) -> None:
        """Nothing is lent any more."""
        for peer in list(self._by_peer):
            self.forget(peer)

    def _link(self, peer: bytes) -> Link | None:
        """Of a peer that has said that it knows shared memory; None where there are as many already as may be."""
        if peer not in self._by_peer:
            self._forget_gone()
            if len(self._by_peer) >= MOST_LINKS:
                return None
            self._by_peer[peer] = Link(self._num_slots)
        self._by_peer.move_to_end(peer)
        return self._by_peer[peer]

    def _forget_gone(self) -> None:
        """Nothing says that a peer is gone but a message to it; one that was heard lately need not be asked."""
        for peer in list(itertools.islice(self._by_peer, PROBED)):
            self._raw_send(peer, [shared_memory.SPEAKS])
            if peer in self._by_peer:
                self._by_peer.move_to_end(peer)
