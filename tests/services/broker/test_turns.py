"""Turns are fair by time, whatever the number of connections and the cost of messages, and hold a bounded memory."""

from __future__ import annotations

from collections import Counter, defaultdict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streampack_services.broker.turns import MESSAGE_BYTES, REMEMBERED, Turns

MOST = 1 << 20
costs = st.floats(1e-6, 0.05)


@given(st.lists(st.tuples(costs, st.integers(1, 20)), min_size=2, max_size=5), st.integers(50, 200))
def test_keys_that_always_wait_get_the_same_time(keys: list[tuple[float, int]], turns_taken: int) -> None:
    """Their difference is at most one message of each, however many connections they have."""
    turns, spent = Turns(key_digits=1), Counter[bytes]()
    for number, (_, connections) in enumerate(keys):
        for connection in range(connections):
            peer = bytes([number, connection])
            turns.put(peer, peer, 1, MOST)
    for _ in range(turns_taken):
        peer = turns.take()
        cost = keys[peer[0]][0]
        spent[peer[:1]] += cost
        turns.put(peer, peer, 1, MOST)
        turns.give(cost)
    times = [spent[bytes([number])] for number in range(len(keys))]
    assert max(times) - min(times) <= 2 * max(cost for cost, _ in keys) + 1e-9


@given(st.integers(1, 1000), costs)
def test_a_key_that_was_idle_is_next_and_has_saved_no_time(connections: int, cost: float) -> None:
    turns = Turns(key_digits=1)
    for number in range(connections):
        turns.put(b"a%d" % number, "a", 1, MOST)
    for _ in range(min(connections, 20)):
        turns.take()
        turns.give(cost)
    turns.put(b"b", "b", 1, MOST)
    turns.put(b"b", "b", 1, MOST)
    for number in range(3):
        turns.put(b"a%d" % number, "a", 1, MOST)
    had = []
    for _ in range(3):
        had.append(turns.take())
        turns.give(cost)
    assert had.index("b") <= 1, "one message of the other key may be as old"
    assert "a" in had, "it is not ahead for the time in which it was idle"


@pytest.mark.parametrize("key_digits", [0, 4], ids=["without keys", "one key"])
@settings(max_examples=10)
@given(connections=st.integers(REMEMBERED + 1, 3 * REMEMBERED), cost=st.sampled_from([0.0, 1e-4]))
def test_more_connections_may_wait_than_are_remembered(key_digits: int, connections: int, cost: float) -> None:
    """Each has one message at the start, and one after all have had a turn."""
    turns, handled = Turns(key_digits), Counter[bytes]()
    peers = [b"same" * (key_digits > 0) + number.to_bytes(4) for number in range(connections)]
    for _ in range(2):
        for peer in peers:
            assert turns.put(peer, peer, 1, 1 << 30)
        for _ in peers:
            handled[turns.take()] += 1
            turns.give(cost)
        assert not turns.waiting
    assert handled == dict.fromkeys(peers, 2)


@pytest.mark.parametrize("key_digits", [0, 1])
@settings(max_examples=20)
@given(st.integers(1, 300), st.lists(st.integers(0, 9000), min_size=1, max_size=20))
def test_messages_of_all_connections_are_bounded_and_each_has_its_share(
    key_digits: int, connections: int, sizes: list[int]
) -> None:
    """Connections flood in turn. One that comes later has its messages taken."""
    turns, of_all = Turns(key_digits), 1 << 20
    peers = [bytes([number // 256 + 1, number % 256]) for number in range(connections)]
    for _ in range(-(-(3 << 20) // (connections * MESSAGE_BYTES))):
        for number, peer in enumerate(peers):
            turns.put(peer, peer, sizes[number % len(sizes)], of_all // 2, of_all)
    largest = MESSAGE_BYTES + max(sizes)
    assert turns.num_bytes <= 2 * of_all + connections * largest
    assert turns.put(b"\0\0", "honest", 1, of_all // 2, of_all)
    share = of_all // (len(peers if key_digits == 0 else {peer[:1] for peer in peers}) + 1)
    for waits in range(1, share // (MESSAGE_BYTES + 1)):
        assert turns.put(b"\0\0", "honest", 1, of_all // 2, of_all), waits


events = st.lists(
    st.tuples(st.sampled_from(["put", "take", "drop"]), st.integers(0, 2), st.integers(0, 3), st.integers(0, 3000))
)


@given(events)
def test_messages_of_a_connection_keep_their_order_and_those_of_a_key_are_bounded(
    actions: list[tuple[str, int, int, int]],
) -> None:
    turns, most = Turns(key_digits=1), 4000
    lines: dict[bytes, deque[tuple[bytes, int, int]]] = defaultdict(deque)

    def waiting(key: bytes) -> int:
        return sum(size + MESSAGE_BYTES for peer, line in lines.items() for _, _, size in line if peer[:1] == key)

    for number, (action, key, connection, size) in enumerate(actions):
        peer = bytes([key, connection])
        if action == "put":
            before = waiting(peer[:1])
            if turns.put(peer, (peer, number, size), size, most):
                lines[peer].append((peer, number, size))
                assert waiting(peer[:1]) <= max(most, size + MESSAGE_BYTES)
            else:
                assert before > 0, "a message that would wait alone is taken"
                assert before + size + MESSAGE_BYTES > most
                assert waiting(peer[:1]) == before
        elif action == "drop":
            turns.drop(peer)
            lines[peer].clear()
        elif turns.waiting:
            if (message := turns.take()) is not None:
                assert message == lines[message[0]].popleft()
            turns.give(0.001)
        assert turns.num_bytes == sum(waiting(bytes([each])) for each in range(3))
    while turns.waiting:
        if (message := turns.take()) is not None:
            assert message == lines[message[0]].popleft()
        turns.give(0.001)
    assert not any(lines.values()), "none is lost"
