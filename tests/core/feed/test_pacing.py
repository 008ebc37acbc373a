"""``on_exceed: wait``: no sample is too old when it is trained, none is dropped, and nobody waits for ever."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack.core.model.rules import Batch, Rules
from streampack.core.protocol.events import Tick
from streampack.core.protocol.producer_messages import Start
from streampack.core.sessions.pushing.push_session import (
    GiveBack,
)
from streampack.core.staging.tickets import InFlight, Tickets
from tests.world.paced_rollouts import Paced, check_paced
from tests.world.rollouts import pusher


@given(st.integers(0, 9999), st.integers(0, 3), st.integers(2, 9))
@settings(max_examples=12)
def test_no_sample_is_too_old_and_none_is_dropped(seed: int, lag: int, batch: int) -> None:
    live = Paced(seed, lag, batch)
    live.finish()
    check_paced(live, lag)


@given(st.integers(0, 9999), st.integers(0, 2), st.lists(st.integers(20, 900), max_size=3))
@settings(max_examples=10)
def test_a_broker_that_is_killed_goes_on_and_loses_nothing(seed: int, lag: int, kills: list[int]) -> None:
    live = Paced(seed, lag, 5)
    for turns in kills:
        for _ in range(turns):
            live.turn()
        live.start_broker()
    live.finish()
    check_paced(live, lag)


def test_a_program_that_dies_does_not_hold_up_the_others() -> None:
    live = Paced(5, 1, 4, wanted=30)
    live.until(lambda: len(live.generating[0]) > 1 and live.had > 2)
    del live.producers[b"push0"]  # with what it was generating
    live.until(lambda: live.pushers[1].buffer.next_seq >= live.wanted)


def test_a_program_that_takes_a_partition_over_gets_no_tickets_of_the_one_before() -> None:
    live = Paced(5, 1, 4, wanted=30)
    live.until(lambda: live.pushers[0].tickets.begun > 5 and live.had > 2)
    before = live.pushers[0]
    del live.producers[b"push0"]
    live.pushers[0] = live.producers[b"new0"] = pusher("another", 0, 99)
    live.generating[0].clear()
    live._to_producer(b"new0", Tick(live.now))
    live.until(lambda: live.pushers[0].begun and live.pushers[0].lease is not None)
    assert live.pushers[0].tickets.granted == 0 < before.tickets.granted
    assert live.feed._leases.staging.tickets["train"].num_open <= live.pushers[1].tickets.granted


def test_samples_that_will_not_be_sent_are_given_back() -> None:
    live = Paced(3, 0, 3, strands=3, wanted=200)
    live.until(lambda: len(live.generating[0]) >= 2)
    session, (_, version) = live.pushers[0], live.generating[0].pop()
    before, used = session.tickets.begun, session.tickets.used
    live.tell(0, GiveBack(1, version))
    live.begun[0] -= 1
    assert session.tickets.used == used + 1, "any program may get a ticket instead"
    live.until(lambda: session.tickets.begun > before + 3)


def start(asked: int, granted: int = 0, used: int = 0, *open_: tuple[int, int]) -> Start:
    return Start(stream="s", partition=0, asked=asked, granted=granted, used=used, open=open_)


def test_tickets_are_bounded_and_given_in_turn() -> None:
    tickets = Tickets(lag=1, samples=4)
    tickets.report(0, "a", start(100))
    tickets.report(1, "b", start(100))
    assert tickets.grant(2, 5) == {0, 1}
    assert sorted(tickets.generated()) == [(5, 1, "a")] * 3 + [(5, 1, "b")] * 3, (
        "they may begin with the policy of then"
    )
    assert [tickets.granted(p) for p in (0, 1)] == [3, 3], "(lag + 1) * samples, less those that wait"
    assert tickets.grant(2, 5) == set()
    tickets.report(0, "a", start(100, 3, 2, (7, 1)))
    assert tickets.grant(4, 7) == set(), "what was sent waits to be trained"
    tickets.report(1, "b", start(100, 3, 3))
    assert list(tickets.generated()) == [(7, 1, "a")]
    tickets.leave(0)
    assert not list(tickets.generated())
    assert tickets.granted(0) is None


def test_a_newer_sample_takes_no_place_that_an_older_one_needs() -> None:
    tickets = Tickets(lag=1, samples=4)
    tickets.report(0, "a", start(9, 9, 4, (2, 5)))
    assert tickets.in_the_way(2, [], 2, 0) is None, "it is as old"
    assert tickets.in_the_way(3, [], 2, 2) is None, "six places are left in two steps, for five"
    assert tickets.in_the_way(3, [], 2, 3) == (2, 5, "a")
    assert tickets.in_the_way(3, [InFlight(2, 1, "")], 2, 2) == (2, 1, ""), "nor one that waits for values"
    assert tickets.in_the_way(3, [], 3, 0) == (2, 5, "a")


def test_a_new_broker_learns_what_was_given() -> None:
    tickets = Tickets(lag=0, samples=4)
    tickets.report(0, "a", start(9, 4, 1, (2, 3)))
    assert tickets.num_open == 3
    assert tickets.grant(1, 2) == set()


@pytest.mark.parametrize("rules", [{}, {"max_policy_lag": 1}, {"batch": Batch()}, {"batch": Batch(samples=2)}])
def test_waiting_needs_a_lag_and_a_number_of_samples(rules: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected both keys"):
        Rules(paces=True, **rules)
