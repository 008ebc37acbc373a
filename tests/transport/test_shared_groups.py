"""Peers of a group share one copy of a frame: whatever is lost, what a peer holds never changes, and all comes back."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack.transport import links, shared_memory
from streampack.transport.links import Links
from streampack.transport.shared_memory import ASK_S, LEAST_BYTES, MAGIC, SPEAKS, Link
from streampack.transport.slots import Mapping, Slots

NUM_TEST_SLOTS = 6
TP = b"tp0"
OTHER = b"tp1"
MIXED = [TP, TP, OTHER]


def zmq_frame(data: bytes) -> Any:
    return SimpleNamespace(buffer=memoryview(data))


class Message:
    """A message under way: its frames on the socket, and what they said when they were sent, if it is of the test."""

    def __init__(self, frames: Sequence[Any], expected: list[bytes] | None) -> None:
        self.frames = [bytes(frame) for frame in frames]
        self.expected = expected

    @property
    def is_reference(self) -> bool:
        return self.frames[0].startswith(MAGIC + b"R")


class Connection:
    """Messages of one connection between the router and a rank; after a reconnect they may still be read, late."""

    def __init__(self) -> None:
        self.down: deque[Message] = deque()
        self.up: deque[bytes] = deque()
        self.is_open = True


class Rank:
    """A process that receives: what it has mapped, and the messages that it holds."""

    def __init__(self) -> None:
        self.links = Links(self._queue, NUM_TEST_SLOTS, [b""])
        self.held: list[tuple[list[Any], list[bytes]]] = []
        self.can_map = True
        self.could_always_map = True
        self.has_read_late = False
        """True once a late message was read; it may be about memory that has been replaced, and unmap the present."""
        self.peer = b""
        self.connection = Connection()

    def _queue(self, _: bytes, frames: Sequence[Any]) -> bool:
        self.connection.up.append(bytes(frames[0]))
        return True

    def receive(self, message: Message, in_order: bool) -> bool:
        """Take a message; return True if frames of it came by reference."""
        self.has_read_late |= not in_order
        refuse = None if self.can_map else OSError
        with mock.patch.object(shared_memory, "Mapping", side_effect=refuse, wraps=Mapping):
            whole = self.links.receive(b"", [zmq_frame(frame) for frame in message.frames])
        if message.expected is None:
            return False
        assert whole is not None or self.has_read_late or not self.could_always_map  # no slot is refused
        if whole is not None:
            whole = [getattr(frame, "buffer", frame) for frame in whole]
            self.held.append((whole, message.expected))
            self.check()
        return whole is not None and message.is_reference

    def tell(self) -> None:
        link = self.links._by_peer[b""]
        if link.mapping is not None:
            self.connection.up.append(link.answer())

    def check(self) -> None:
        for whole, expected in self.held:
            assert [bytes(frame) for frame in whole] == expected


class Node:
    """A router, and ranks that connect to it, lose the connection, are killed, or cannot map memory."""

    def __init__(self, groups: Sequence[bytes]) -> None:
        self.now = 0.0
        self.router = Links(self._raw_send, NUM_TEST_SLOTS)
        self.connections: dict[bytes, Connection] = {}
        self.late: tuple[Rank, Connection, bytes] | None = None
        """The last rank that connected again, with its earlier connection."""
        self.is_queue_full = False
        self.by_reference = 0
        """Messages that came with frames by reference."""
        self.expected: list[bytes] | None = None
        """What the frames of the message say that is sent now."""
        self.groups = list(groups)
        self.ranks = [Rank() for _ in groups]
        self.frames: list[bytes] = [b""] * 4
        self.scratch = bytearray(LEAST_BYTES)
        self.num_made = 0
        for which in range(len(groups)):
            self._connect(which)
        self.make(0, LEAST_BYTES)

    def _connect(self, which: int) -> None:
        rank = self.ranks[which]
        rank.peer, rank.connection = b"peer %d" % len(self.connections), Connection()
        self.connections[rank.peer] = rank.connection
        assert self.router.receive(rank.peer, [zmq_frame(SPEAKS)]) is None
        assert self.router.share(rank.peer, self.groups[which])

    def _raw_send(self, peer: bytes, frames: Sequence[Any]) -> bool:
        """Queue a message, as a socket does."""
        if not self.connections[peer].is_open:
            self.router.forget(peer)
            return False
        is_question = bytes(memoryview(frames[0])[:5]) in (MAGIC + b"H", SPEAKS)
        if self.is_queue_full and not is_question:
            self.is_queue_full = False
            return False
        self.connections[peer].down.append(Message(frames, None if is_question else self.expected))
        return True

    def _send(self, peer: bytes, frames: Sequence[Any]) -> None:
        self.now += ASK_S / 10
        self.expected = [bytes(frame) for frame in frames]
        self.router.send(peer, frames)

    def _hear(self, peer: bytes) -> None:
        if answers := self.connections[peer].up:
            assert self.router.receive(peer, [zmq_frame(answers.popleft())]) is None

    # What may happen

    def make(self, place: int, num_bytes: int) -> None:
        """Make a frame; the earlier one of this place is freed, so that its address may be used again."""
        self.num_made += 1
        self.frames[place] = b""
        self.frames[place] = self.num_made.to_bytes(8, "little") * (num_bytes // 8) + bytes(num_bytes % 8)

    def send(self, which: int, places: list[int]) -> None:
        self._send(self.ranks[which].peer, [self.frames[place] for place in places])

    def send_all(self, place: int) -> None:
        for which in range(len(self.ranks)):
            self.send(which, [place])

    def send_scratch(self, which: int) -> None:
        """Send memory that is written to again."""
        self.num_made += 1
        self.scratch[:8] = self.num_made.to_bytes(8, "little")
        self._send(self.ranks[which].peer, [self.scratch])

    def send_any(self, number: int) -> None:
        """Send a frame to a peer that may be gone."""
        self._send(list(self.connections)[number % len(self.connections)], [self.frames[0]])

    def drop_next(self) -> None:
        self.is_queue_full = True

    def deliver(self, which: int) -> None:
        rank = self.ranks[which]
        if rank.connection.down:
            self.by_reference += rank.receive(rank.connection.down.popleft(), in_order=True)

    def tell(self, which: int) -> None:
        self.ranks[which].tell()

    def hear(self, which: int) -> None:
        self._hear(self.ranks[which].peer)

    def let_go(self, which: int, number: int) -> None:
        if held := self.ranks[which].held:
            held.pop(number % len(held))

    def lose(self, which: int) -> None:
        if under_way := self.ranks[which].connection.down:
            under_way.popleft()

    def lose_answer(self, which: int) -> None:
        if answers := self.ranks[which].connection.up:
            answers.popleft()

    def reconnect(self, which: int) -> None:
        """The process goes on, with all that it holds, and is another peer; the router notices it later."""
        self.notice()
        rank = self.ranks[which]
        self.late = rank, rank.connection, rank.peer
        self._connect(which)

    def notice(self) -> None:
        """The earlier connection turns out to be gone."""
        if self.late is not None:
            self.late[1].is_open = False

    def read_late(self, is_answer: bool) -> None:
        """A message of an earlier connection is read after one of the present connection."""
        if self.late is None:
            return
        rank, connection, peer = self.late
        if is_answer:
            self._hear(peer)
        elif connection.down and rank in self.ranks:
            rank.receive(connection.down.popleft(), in_order=False)

    def kill(self, which: int) -> None:
        self.ranks[which].connection.is_open = False
        self.ranks[which] = Rank()
        self._connect(which)

    def cannot_map(self, which: int, can: bool) -> None:
        rank = self.ranks[which]
        rank.can_map, rank.could_always_map = can, rank.could_always_map and can

    def move(self, which: int, group: bytes) -> None:
        if self.router.share(self.ranks[which].peer, group):
            self.groups[which] = group

    # Checks

    def link(self, which: int) -> Link:
        return self.router._by_peer[self.ranks[which].peer]

    def check(self) -> None:
        for rank in self.ranks:
            rank.check()

    def settle(self) -> None:
        """Have all that is under way arrive; ranks let go of messages at once."""
        for which, rank in enumerate(self.ranks):
            while rank.connection.down or rank.connection.up:
                self.deliver(which)
                rank.held.clear()
                self.hear(which)

    def ask(self) -> None:
        """Have every rank say which slots it holds."""
        self.now += 2 * ASK_S
        for which, rank in enumerate(self.ranks):
            link = self.link(which)
            link.lends = False
            if (question := link.question([self.scratch], self.now)) is not None:
                self._raw_send(rank.peer, [question])
        self.settle()

    def finish(self) -> None:
        """Once all is let go, and every peer that is gone is noticed, no slot is in use."""
        self.is_queue_full = False
        self.notice()
        for peer in self.connections:
            self._send(peer, [b"still there?"])
            self._raw_send(peer, [SPEAKS])
        for rank in self.ranks:
            rank.held.clear()
        self.settle()
        self.ask()
        for which, rank in enumerate(self.ranks):
            link = self.link(which)
            assert link.lends or not rank.could_always_map
            assert link.lends != link.refused
            assert not link._lent
            if link.slots is not None:
                assert link.slots.num_free == NUM_TEST_SLOTS
                assert not link.slots._frames
                assert not link.slots._slot_of


@contextmanager
def node_of(groups: Sequence[bytes]) -> Iterator[Node]:
    """A node whose ranks have all said that they can read."""
    node = Node(groups)
    with mock.patch.object(links, "time", SimpleNamespace(monotonic=lambda: node.now)):
        node.ask()
        yield node
        node.router.close()


def play(script: Sequence[tuple[Any, ...]]) -> int:
    """Return the number of messages that came by reference."""
    with node_of(MIXED) as node:
        for name, *arguments in script:
            getattr(node, name)(*arguments)
            node.check()
        node.finish()
        return node.by_reference


def num_taken() -> Any:
    """Count the slots that frames are copied to: the calls of the returned mock."""
    return mock.patch.object(Slots, "take", autospec=True, side_effect=Slots.take)


ranks = st.integers(0, len(MIXED) - 1)
places = st.integers(0, 3)
common = st.one_of(
    st.tuples(st.just("make"), places, st.sampled_from([10, LEAST_BYTES, LEAST_BYTES, LEAST_BYTES + 3])),
    st.tuples(st.just("send"), ranks, st.lists(places, min_size=1, max_size=2)),
    st.tuples(st.just("send_all"), places),
    st.tuples(st.sampled_from(["deliver", "hear", "tell"]), ranks),
    st.tuples(st.just("let_go"), ranks, st.integers(0, 9)),
)
rare = st.one_of(
    st.tuples(st.sampled_from(["lose", "lose_answer", "reconnect", "kill", "send_scratch"]), ranks),
    st.tuples(st.just("read_late"), st.booleans()),
    st.tuples(st.just("send_any"), st.integers(0, 9)),
    st.tuples(st.just("cannot_map"), ranks, st.booleans()),
    st.tuples(st.just("move"), ranks, st.sampled_from([TP, OTHER])),
    st.tuples(st.sampled_from(["drop_next", "notice"])),
)


@settings(max_examples=100)
@given(st.lists(st.one_of(common, common, common, rare), max_size=60))
def test_memory_held_by_peers_of_a_group_never_changes_and_all_comes_back_in_the_end(
    script: list[tuple[Any, ...]],
) -> None:
    play(script)


ODDS = {
    "make": 60, "send_all": 100, "send": 10, "deliver": 270, "hear": 200, "tell": 120, "let_go": 200, "reconnect": 4,
    "notice": 2, "kill": 4, "read_late": 8, "lose": 6, "lose_answer": 6, "send_any": 6, "send_scratch": 6,
}  # fmt: skip
"""How often each thing happens in a long script, in 1000."""


def long_script(seed: int) -> Iterator[tuple[Any, ...]]:
    draw = np.random.default_rng(seed)
    for name in draw.choice(list(ODDS), 400, p=np.array(list(ODDS.values())) / sum(ODDS.values())).tolist():
        rank, number = int(draw.integers(len(MIXED))), int(draw.integers(4))
        arguments: dict[str, tuple[Any, ...]] = {
            "make": (number, LEAST_BYTES), "send_all": (number,), "send": (rank, [number]), "notice": (),
            "let_go": (rank, number), "read_late": (number % 2 == 0,), "send_any": (number,),
        }  # fmt: skip
        yield name, *arguments.get(name, (rank,))


def test_long_scripts_share_a_lot_and_nothing_that_is_held_changes() -> None:
    assert sum(play(list(long_script(seed))) for seed in range(30)) > 800


@settings(max_examples=50)
@given(st.lists(st.sampled_from([LEAST_BYTES, LEAST_BYTES + 8, 2 * LEAST_BYTES]), max_size=20), st.integers(1, 8))
def test_peers_that_keep_pace_cost_one_copy_of_each_frame(sizes: list[int], num_ranks: int) -> None:
    with node_of([TP] * num_ranks) as node, num_taken() as taken:
        for number, size in enumerate(sizes):
            node.make(number % 4, size)
            node.send_all(number % 4)
            node.settle()
        assert taken.call_count == len(sizes)
        assert node.by_reference == len(sizes) * num_ranks
        node.finish()


def test_a_frame_that_is_sent_to_a_peer_again_is_copied_to_a_slot_that_the_peer_does_not_hold() -> None:
    with node_of([TP, TP]) as node, num_taken() as taken:
        for _ in range(2):
            node.send(0, [0])
            node.send(1, [0])
        assert taken.call_count == 2
        node.make(1, LEAST_BYTES)
        node.send(0, [1, 1])
        assert taken.call_count == 4
        while node.ranks[0].connection.down:
            node.deliver(0)
        assert [len(whole) for whole, _ in node.ranks[0].held] == [1, 1, 2]


def test_a_process_that_connects_again_is_not_lent_a_slot_that_it_holds() -> None:
    with node_of([TP, TP]) as node:
        node.send_all(0)
        node.deliver(0)
        node.reconnect(0)
        node.send(0, [0])  # a question, and the frame over the socket
        for _ in range(2):
            node.deliver(0)
        node.hear(0)
        assert node.link(0).lends
        assert len(node.link(0)._lent) == 1
        node.send(0, [0])
        node.deliver(0)
        assert node.by_reference == 2
        node.ranks[0].held.clear()
        node.tell(0)
        node.hear(0)
        assert not node.link(0)._lent
        assert node.link(0).group is node.link(1).group


def test_a_process_keeps_what_it_holds_after_the_router_gave_its_connection_up() -> None:
    with node_of([TP, TP]) as node:
        node.send_all(0)
        node.deliver(0)
        held = node.ranks[0].held
        node.ranks[0].connection.is_open = False
        node.send(0, [0])
        for number in range(3 * NUM_TEST_SLOTS):
            node.make(number % 4, LEAST_BYTES)
            node.send(1, [number % 4])
            node.deliver(1)
            node.hear(1)
            node.ranks[1].held.clear()
        assert node.by_reference > NUM_TEST_SLOTS
        node.check()
        assert node.ranks[0].held is held
        assert len(held) == 1


def test_an_answer_about_slots_that_are_free_changes_nothing() -> None:
    with node_of([TP, TP]) as node:
        slots = node.link(0).slots
        assert slots is not None
        for _ in range(2):
            answer = shared_memory._ANSWER.pack(slots.name.token, 99, 2**64 - 1)
            node.router.receive(node.ranks[0].peer, [zmq_frame(MAGIC + b"A" + answer)])
        assert not node.link(0)._lent
        assert slots.num_free == NUM_TEST_SLOTS


def test_slots_of_a_peer_that_then_says_that_it_cannot_read_are_not_written_to_again() -> None:
    with node_of([TP, TP]) as node:
        slots = node.link(0).slots
        assert slots is not None
        node.send_all(0)
        node.router.receive(node.ranks[0].peer, [zmq_frame(MAGIC + b"N" + slots.name.token)])
        for _ in range(2):
            node.make(1, LEAST_BYTES)
            node.send_all(1)
            node.deliver(0)
            node.deliver(1)
        assert node.link(0).refused
        assert node.link(0).group is None
        assert node.link(1).slots is not slots


def test_a_peer_that_cannot_read_leaves_and_the_others_go_on() -> None:
    with node_of([TP, TP]) as node:
        slots = node.link(1).slots
        node.send_all(0)
        node.kill(0)
        node.router.forget(b"peer 0")  # held a slot
        node.cannot_map(0, False)
        for _ in range(3):
            node.send_all(0)
            node.settle()
        assert node.link(0).refused
        assert not node.router.share(node.ranks[0].peer, TP)
        assert node.link(1).lends
        assert node.link(1).slots is not slots
        slots = node.link(1).slots
        before = node.by_reference
        for _ in range(3):
            node.make(1, LEAST_BYTES)
            node.send_all(1)
            node.settle()
        assert node.by_reference == before + 3
        assert node.link(1).slots is slots


def test_a_slow_peer_makes_others_get_frames_over_the_socket_until_it_gives_slots_back() -> None:
    with node_of([TP, TP]) as node:
        for _ in range(NUM_TEST_SLOTS + 2):
            node.make(0, LEAST_BYTES)
            node.send_all(0)
            for which in (0, 1):
                node.deliver(which)
                node.hear(which)
            node.ranks[1].held.clear()
        before = node.by_reference
        assert before == 2 * NUM_TEST_SLOTS
        node.ranks[0].held.clear()
        node.now += 2 * ASK_S
        node.send(1, [0])  # only this one is sent to; the slow peer is asked
        node.settle()
        node.send(1, [0])
        node.settle()
        assert node.by_reference == before + 1


def test_a_peer_that_is_gone_with_all_slots_does_not_starve_the_others() -> None:
    with node_of([TP, TP]) as node:
        for _ in range(NUM_TEST_SLOTS):
            node.make(0, LEAST_BYTES)
            node.send(0, [0])
        node.ranks[0].connection.is_open = False  # and nothing is sent to it any more
        node.ranks[0].connection.down.clear()
        node.now += 2 * ASK_S
        for _ in range(2):
            node.make(0, LEAST_BYTES)  # one that is in no slot
            node.send(1, [0])
            node.settle()
        assert node.by_reference == 1


def test_a_group_ends_with_its_last_peer() -> None:
    with node_of([TP, TP, OTHER]) as node:
        slots = node.link(0).slots
        assert slots is not None
        fd = slots.name.fd
        assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:streampack")
        node.move(0, OTHER)
        assert slots is node.link(1).slots
        del slots
        node.router.forget(node.ranks[1].peer)
        assert list(node.router._groups) == [OTHER]
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_only_a_peer_that_knows_shared_memory_is_in_a_group_and_its_frames_are_not_written_in_place() -> None:
    with node_of([TP]) as node:
        assert not node.router.share(b"stranger", TP)
        assert node.router.room(node.ranks[0].peer, LEAST_BYTES) is None


def test_memory_that_may_be_written_to_is_copied_each_time() -> None:
    with node_of([TP, TP]) as node, num_taken() as taken:
        for which in (0, 1):
            node.send_scratch(which)
        node.settle()
        assert taken.call_count == 2
        assert node.by_reference == 2
