"""The links of a socket to its peers: memory that both share, by ``shared_memory``.

A peer gets a ``Link`` once it has announced that it knows shared memory. Messages about shared memory are handled here,
and not passed on. Only the socket's thread uses this module.
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
from streampack.transport.shared_memory import ASK_S, Known, Link
from streampack.transport.slots import PeerGroup

MOST_LINKS = 256
"""The most peers that memory is shared with; other peers' frames go over the socket."""
PROBED = 2
"""Links that are probed whenever a link is added: more than are added, so that links of lost peers stay few."""


class Links:
    """The links of one socket, by peer.

    Args:
        send: Queues a message for a peer on the socket; returns False if it was dropped.
        num_slots: Slots of memory for each peer.
        peers: Peers that need not announce that they know shared memory.
    """

    def __init__(
        self, send: Callable[[bytes, Sequence[Any]], bool], num_slots: int, peers: Sequence[bytes] = ()
    ) -> None:
        self._raw_send, self._num_slots = send, num_slots
        self._by_peer = OrderedDict((peer, Link(num_slots)) for peer in peers)
        """The peer heard last is the last one."""
        self._known: Known = WeakValueDictionary()
        self._groups: WeakValueDictionary[bytes, PeerGroup] = WeakValueDictionary()
        """The groups of linked peers, by name."""

    def receive(self, peer: bytes, frames: list[Any]) -> list[Any] | None:
        """Return the frames of a received message, including the frames that came through shared memory.

        None if the message was only about shared memory, or is lost.
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
        """Queue a message for a peer, with large frames in shared memory; return False if the message was dropped."""
        link = self._by_peer.get(peer)
        if link is None:
            return self._raw_send(peer, frames)
        now = time.monotonic()
        if link.group is not None:
            self._ask_group(link.group, now)
        if (question := link.question(frames, now)) is not None:
            self._raw_send(peer, [question])
        frames, taken = link.outgoing(frames)
        sent = self._raw_send(peer, frames)
        if not sent:
            link.give_back(taken)
        return sent

    def share(self, peer: bytes, group: bytes) -> bool:
        """Put a peer into a group, as ``Router.share`` does."""
        link = self._by_peer.get(peer)
        return link is not None and link.join(self._groups.setdefault(group, PeerGroup()))

    def room(self, peer: bytes, num_bytes: int) -> NDArray[np.uint8] | None:
        """Return memory for a frame of the next message to a peer, uint8 [num_bytes], or None if none is free."""
        link = self._by_peer.get(peer)
        return link.room(num_bytes) if link is not None else None

    def send_news(self) -> None:
        """Tell all peers which of their slots this process has freed. Call this when idle: it visits every peer."""
        for peer, link in list(self._by_peer.items()):
            if (news := link.news()) is not None:
                self._raw_send(peer, [news])

    def forget(self, peer: bytes) -> None:
        """Remove the link of a peer that is gone."""
        if (link := self._by_peer.pop(peer, None)) is not None:
            link.close()

    def close(self) -> None:
        """Remove all links."""
        for peer in list(self._by_peer):
            self.forget(peer)

    def _ask_group(self, group: PeerGroup, now: float) -> None:
        """Ask all peers of a group which slots they hold, if no slot is free.

        The peer that holds them may be one that nothing else is sent to, because it is gone.
        """
        if group.slots is None or group.slots.num_free or now - group.asked_at < ASK_S:
            return
        group.asked_at = now
        for peer, link in list(self._by_peer.items()):
            if link.group is group and (question := link.question([], now)) is not None:
                self._raw_send(peer, [question])

    def _link(self, peer: bytes) -> Link | None:
        """Return the link of a peer that knows shared memory, adding it if needed; None if there are ``MOST_LINKS``."""
        if peer not in self._by_peer:
            self._forget_gone()
            if len(self._by_peer) >= MOST_LINKS:
                return None
            self._by_peer[peer] = Link(self._num_slots)
        self._by_peer.move_to_end(peer)
        return self._by_peer[peer]

    def _forget_gone(self) -> None:
        """Probe the links that were heard longest ago: sending to a peer that is gone fails, and removes its link."""
        for peer in list(itertools.islice(self._by_peer, PROBED)):
            self._raw_send(peer, [shared_memory.SPEAKS])
            if peer in self._by_peer:
                self._by_peer.move_to_end(peer)
