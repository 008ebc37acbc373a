"""A dealer's addresses: one that answers is never left, one that does not is left in time, and each has its turn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.errors import UserError
from streampack.transport.endpoints import (
    CONNECT_S,
    HANDSHAKE_S,
    SILENT_S,
    Addresses,
    check_endpoint,
    split_endpoints,
)

EVENTS = st.lists(
    st.tuples(st.floats(0.0, 2.0), st.sampled_from(["accepted", "came", "ended", "heard", "leave", "look"]))
)
A, B, C = "tcp://a:1", "ipc:///b", "tcp://[::1]:3"


def take(addresses: Addresses, event: str, now: float) -> None:
    if event == "look":
        if addresses.is_move_due(now):
            addresses.move(now)
    elif event in ("accepted", "leave"):
        getattr(addresses, event)()
    else:
        getattr(addresses, event)(now)


@given(events=EVENTS)
def test_one_address_is_never_left(events: list[tuple[float, str]]) -> None:
    addresses, now = Addresses([A], 0.0), 0.0
    for passed, event in events:
        now += passed
        assert not addresses.is_move_due(now)
        take(addresses, event, now)
    assert addresses.current == A


@given(before=EVENTS, after=st.lists(st.tuples(st.floats(0.0, 1e4), st.sampled_from(["heard", "look"]))))
def test_an_address_with_a_connection_is_not_left_however_quiet_it_is(
    before: list[tuple[float, str]], after: list[tuple[float, str]]
) -> None:
    addresses, now = Addresses([A, B, C], 0.0), 0.0
    for passed, event in before:
        now += passed
        take(addresses, event, now)
    take(addresses, "look", now)
    addresses.came(now)
    current = addresses.current
    for passed, event in after:
        now += passed
        take(addresses, event, now)
    assert addresses.connected
    assert addresses.current == current


@given(before=EVENTS)
def test_without_a_connection_every_address_has_its_turn_for_ever(before: list[tuple[float, str]]) -> None:
    addresses, now = Addresses([A, B, C], 0.0), 0.0
    for passed, event in before:
        now += passed
        take(addresses, event, now)
    addresses.ended(now)
    turns = [addresses.current]
    for _ in range(7):
        began = now
        while not addresses.is_move_due(now):
            now += 0.1
        assert now - began <= HANDSHAKE_S + 0.2
        turns.append(addresses.move(now))
    first = addresses.given.index(turns[0])
    assert turns == [addresses.given[(first + turn) % 3] for turn in range(8)]


def test_a_connection_that_ends_may_come_back_within_a_second() -> None:
    addresses = Addresses([A, B], 0.0)
    addresses.came(0.1)
    addresses.heard(10.0)
    addresses.ended(10.0)
    assert not addresses.is_move_due(10.0 + CONNECT_S)
    addresses.came(10.0 + CONNECT_S)
    assert not addresses.is_move_due(100.0)


def test_a_connection_that_ends_after_seconds_of_silence_is_not_waited_for() -> None:
    addresses = Addresses([A, B], 0.0)
    addresses.came(0.1)
    addresses.heard(10.0)
    addresses.ended(10.1 + SILENT_S)
    addresses.accepted()  # a frozen process still takes connections
    assert addresses.is_move_due(10.1 + SILENT_S)


def test_a_process_that_takes_connections_has_time_to_admit_this_one() -> None:
    addresses = Addresses([A, B], 0.0)
    addresses.accepted()
    addresses.ended(0.5)
    assert not addresses.is_move_due(CONNECT_S + 1.0)
    assert addresses.is_move_due(HANDSHAKE_S + 0.1)


def test_only_the_first_connection_after_a_move_is_news() -> None:
    addresses = Addresses([A, B], 0.0)
    assert not addresses.came(0.0)
    addresses.ended(1.0)
    addresses.move(2.0)
    assert addresses.came(2.1)
    addresses.ended(2.5)
    assert not addresses.came(2.6)


def test_the_address_of_an_older_broker_is_left_at_once() -> None:
    addresses = Addresses([A, B], 0.0)
    addresses.came(0.1)
    addresses.leave()
    assert addresses.is_move_due(0.1)


def test_the_address_of_a_broker_that_hangs_is_left_but_not_as_soon_as_it_is_found() -> None:
    addresses = Addresses([A, B], 0.0)
    addresses.came(0.1)
    addresses.hangs(HANDSHAKE_S)
    assert not addresses.is_move_due(HANDSHAKE_S)
    addresses.hangs(HANDSHAKE_S + 0.2)
    assert addresses.is_move_due(HANDSHAKE_S + 0.2)


@given(st.lists(st.sampled_from([A, B, C]), min_size=1, unique=True))
def test_addresses_are_those_between_the_commas(given: list[str]) -> None:
    assert split_endpoints(",".join(given)) == given
    assert split_endpoints(", ".join(given)) == given


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("", "got endpoint '', expected tcp://host:port"),
        (f"{A},", "of which number 2 is empty, expected an address on both sides of each comma. Remove the comma"),
        (f",{A}", "of which number 1 is empty"),
        (f"{A},,{B}", "of which number 2 is empty"),
        (f"{A},{B},{A}", f"which name {A} twice, expected different addresses. Name each address once"),
        (f"{A},b:7402", "got endpoint 'b:7402', expected tcp://host:port"),
        (f"{A},tcp://*:7402", "expected a host and the port that the broker listens on"),
        (f"{A},file:///streampack.json", "got endpoint 'file:///streampack.json', expected tcp://host:port"),
    ],
)
def test_a_bad_list_is_refused_with_its_fault(given: str, says: str) -> None:
    with pytest.raises(UserError) as error:
        split_endpoints(given)
    assert says in str(error.value)


def test_a_socket_cannot_listen_on_several_addresses() -> None:
    with pytest.raises(UserError, match="expected one address without a comma"):
        check_endpoint(f"{A},{B}")
