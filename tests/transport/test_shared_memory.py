"""Frames lent through shared memory: what is held never changes, what is let go comes back, whatever is lost."""

from __future__ import annotations

import os
from collections import deque
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack.transport import shared_memory
from streampack.transport.shared_memory import LEAST_BYTES, MAGIC, Link
from streampack.transport.slots import NUM_SLOTS, SLOT_BYTES, Mapping, Name, Slots

NUM_TEST_SLOTS = 3


def frame(number: int, num_bytes: int) -> bytes:
    return bytes([number % 251]) * num_bytes


class Pair:
    """A sender and a receiver, and the messages between them, either way, which may be lost or come late."""

    def __init__(self) -> None:
        self.sender = Link(slots=Slots(NUM_TEST_SLOTS, LEAST_BYTES + 100))
        self.now = 0.0
        self.sent = 0
        self.under_way: deque[list[Any]] = deque()
        self.late: deque[list[Any]] = deque()
        self.answers: deque[bytes] = deque()
        self.by_reference = 0
        self.held: list[tuple[list[Any], list[bytes]]] = []
        self.restart()

    def restart(self) -> None:
        """The receiver is killed, and another one takes its place."""
        self.held.clear()
        self.late.clear()  # its connections have gone with it
        self.receiver = Link()
        self.known: Any = WeakValueDictionary()

    def ask(self) -> None:
        self.now += 10
        if (question := self.sender.question([frame(0, LEAST_BYTES)], self.now)) is not None:
            self.under_way.append([question])

    def send(self, sizes: list[int]) -> None:
        self.sent += 1
        plain = [frame(self.sent + i, size) for i, size in enumerate(sizes)]
        frames, _ = self.sender.outgoing(plain)
        self.under_way.append([*frames, plain])  # the last one is what the test compares with

    def deliver(self, late: bool = False) -> None:
        queue = self.late if late else self.under_way
        if not queue:
            return
        message = queue.popleft()
        expected = message.pop() if isinstance(message[-1], list) else None
        whole: list[Any] | None = message
        if message[0][:4] == MAGIC:
            whole, answer = self.receiver.incoming(memoryview(message[0]), message[1:], self.known)
            if answer is not None:
                self.answers.append(answer)
        if whole is not None and expected is not None:
            self.held.append((whole, expected))
            self.by_reference += message[0][:4] == MAGIC

    def reconnect(self) -> None:
        """What is under way on the old connection may be read after what is sent on the new one."""
        self.late.extend(self.under_way)
        self.under_way.clear()

    def tell(self) -> None:
        if self.receiver.mapping is not None:
            self.answers.append(self.receiver.answer())

    def hear(self) -> None:
        """The sender gets the oldest answer."""
        if self.answers:
            self.sender.incoming(memoryview(self.answers.popleft()), [], WeakValueDictionary())

    def agree(self) -> None:
        """Have the sender know that it may lend."""
        self.ask()
        self.deliver()
        self.hear()

    def check(self) -> None:
        for whole, expected in self.held:
            assert [bytes(each) for each in whole] == expected


sizes = st.lists(st.sampled_from([10, LEAST_BYTES, LEAST_BYTES + 100, LEAST_BYTES + 101]), min_size=1, max_size=2)
once = ["late", "lose", "unheard", "ask", "reconnect", "restart"]
actions = st.one_of(
    st.tuples(st.just("send"), sizes),
    st.tuples(st.just("send"), sizes),
    st.tuples(st.just("let_go"), st.integers(0, 9)),
    st.tuples(st.sampled_from([*once, *3 * ["deliver", "tell", "hear"]])),
)


def play(script: list[tuple[Any, ...]]) -> Pair:
    """Whatever happens, what is held is what was sent; and in the end every slot has come back."""
    pair = Pair()
    pair.agree()
    for name, *arguments in script:
        if name == "send":
            pair.send(*arguments)
        elif name == "let_go":
            if pair.held:
                pair.held.pop(arguments[0] % len(pair.held))
        elif name == "late":
            pair.deliver(late=True)
        elif name in ("lose", "unheard"):
            lost: deque[Any] = pair.under_way if name == "lose" else pair.answers
            if lost:
                lost.popleft()
        else:
            getattr(pair, name)()
        pair.check()
    while pair.under_way or pair.answers:
        pair.deliver()
        pair.held.clear()
        pair.hear()
    pair.held.clear()
    for _ in range(2):  # the second one where the first was not yet answered by this receiver
        pair.sender.lends = False
        pair.agree()
    assert pair.sender.slots is not None
    assert pair.sender.slots.num_free == NUM_TEST_SLOTS
    assert pair.sender.lends
    return pair


@settings(max_examples=100)
@given(st.lists(actions, max_size=60))
def test_held_memory_never_changes_and_all_comes_back_in_the_end(script: list[tuple[Any, ...]]) -> None:
    play(script)


def test_long_scripts_lend_a_lot_and_nothing_that_is_held_changes() -> None:
    by_reference = 0
    for seed in range(40):
        draw = np.random.default_rng(seed)
        names = draw.choice(
            ["send", "let_go", "deliver", "tell", "hear", *once], 300, p=[0.22, *4 * [0.18], *6 * [0.01]]
        )
        script = [
            (name, [LEAST_BYTES]) if name == "send" else (name, int(draw.integers(9))) if name == "let_go" else (name,)
            for name in names.tolist()
        ]
        by_reference += play(script).by_reference
    assert by_reference > 400


def test_frames_go_by_reference_once_the_peer_has_said_that_it_can_read() -> None:
    pair = Pair()
    pair.send([LEAST_BYTES])
    assert pair.under_way.pop()[0] == frame(1, LEAST_BYTES)
    pair.agree()
    pair.send([10, LEAST_BYTES, 20])
    head, *left, _ = pair.under_way[-1]
    assert head[:5] == MAGIC + b"R"
    assert [len(each) for each in left] == [10, 20]
    pair.deliver()
    pair.check()
    assert len(pair.held[-1][0][1]) == LEAST_BYTES


def test_an_answer_about_other_memory_frees_nothing() -> None:
    pair = Pair()
    pair.agree()
    pair.send([LEAST_BYTES])
    pair.sender.incoming(memoryview(MAGIC + b"A" + shared_memory._ANSWER.pack(bytes(16), 99, 0)), [], pair.known)
    assert pair.sender.slots is not None
    assert pair.sender.slots.num_free == NUM_TEST_SLOTS - 1


def test_a_frame_that_was_written_in_place_is_not_copied() -> None:
    pair = Pair()
    assert pair.sender.room(LEAST_BYTES) is None
    pair.agree()
    assert pair.sender.room(LEAST_BYTES - 1) is None
    for _ in range(2 * NUM_TEST_SLOTS):  # those that are never sent are not lost
        room = pair.sender.room(LEAST_BYTES)
    assert room is not None
    room[:] = 7
    frames, taken = pair.sender.outgoing([room.view(np.int32)])
    assert len(frames) == 1
    assert pair.sender.slots is not None
    assert pair.sender.slots.num_free == NUM_TEST_SLOTS - 1
    whole, _ = pair.receiver.incoming(memoryview(frames[0]), [], pair.known)
    assert whole is not None
    assert bytes(whole[0]) == b"\7" * LEAST_BYTES
    room[0] = 9  # the same memory
    assert whole[0][0] == 9
    pair.sender.give_back(taken)
    assert pair.sender.slots.num_free == NUM_TEST_SLOTS


def test_an_array_of_shared_memory_is_read_only_and_keeps_its_memory() -> None:
    pair = Pair()
    pair.agree()
    pair.send([LEAST_BYTES])
    pair.deliver()
    whole, _ = pair.held.pop()
    array = np.frombuffer(whole.pop(), np.uint8)[5:].view(np.uint8)[1:]
    assert not array.flags.writeable
    assert pair.receiver.news() is None
    del array
    assert pair.receiver.news() is not None


def test_a_peer_is_asked_where_a_large_frame_goes_to_it_and_not_at_once_again() -> None:
    link = Link()
    large = [frame(1, LEAST_BYTES)]
    assert link.question([b"small"], 5.0) is None
    assert link.question(large, 5.0) is not None
    assert link.question(large, 5.1) is None
    link.close()


def test_nothing_is_lent_where_the_system_has_no_such_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    link, large = Link(), [frame(1, LEAST_BYTES)]
    assert link.question(large, 5.0) is None
    assert link.outgoing(large) == (large, [])


def test_memory_that_cannot_be_read_is_refused_and_frames_go_as_ever() -> None:
    pair = Pair()
    assert pair.sender.slots is not None
    name = pair.sender.slots.name
    for wrong in (
        name._replace(fd=0), name._replace(pid=2**31), name._replace(token=bytes(16)), name._replace(num_slots=64),
        name._replace(num_slots=65), name._replace(slot_bytes=0),
    ):  # fmt: skip
        with pytest.raises((OSError, ValueError)):
            Mapping(wrong)
    pair.sender.slots.name = name._replace(token=bytes(16))
    pair.agree()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(name.fd)
    pair.ask()
    pair.send([LEAST_BYTES])
    assert [message[0][:4] for message in pair.under_way] == [frame(1, 4)]


def test_memory_that_its_owner_could_take_away_is_refused() -> None:
    fd = os.memfd_create("streampack")
    try:
        size = 4096 + NUM_SLOTS * SLOT_BYTES
        os.ftruncate(fd, size)
        os.pwrite(fd, b"t" * 16, 0)
        name = Name(b"t" * 16, os.getpid(), fd, NUM_SLOTS, SLOT_BYTES)
        with pytest.raises((OSError, ValueError)):
            Mapping(name)
    finally:
        os.close(fd)


@settings(max_examples=60)
@given(st.binary(max_size=120), st.sampled_from([b"R", b"H", b"A", b"N", b"S", b"?", b""]), st.booleans())
def test_garbage_is_lost_and_harms_nothing(body: bytes, kind: bytes, with_name: bool) -> None:
    pair = Pair()
    pair.agree()
    assert pair.sender.slots is not None
    head = MAGIC + kind + (shared_memory._NAME.pack(*pair.sender.slots.name) if with_name else b"") + body
    whole, _ = pair.receiver.incoming(memoryview(head), [b"x"], pair.known)
    assert whole is None or kind == b"R"
    link = Link(slots=pair.sender.slots)
    link.incoming(memoryview(head), [b"x"], WeakValueDictionary())
