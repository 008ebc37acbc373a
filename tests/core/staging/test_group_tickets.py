"""Tickets of programs that generate groups: each gets all of its tickets or none, and nobody waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.protocol.events import FromBroker
from streampack.core.protocol.message import Envelope, Message
from streampack.core.protocol.producer_messages import Flow, Lease, Start
from streampack.core.sessions.pushing.push_buffer import PushBuffer
from streampack.core.sessions.pushing.push_session import PushSession
from streampack.core.staging.tickets import InFlight, Tickets


def start(asked: int, granted: int = 0, used: int = 0, *open_: tuple[int, int], number: int = 0) -> Start:
    """A report of a program that waits for all the tickets it has asked for; it has begun all that it could."""
    return Start(
        stream="s", partition=0, asked=asked, granted=granted, used=used, open=open_, together=asked - granted,
        number=number,
    )  # fmt: skip


def test_a_group_gets_all_its_tickets_at_once_and_smaller_ones_do_not_pass_it() -> None:
    tickets = Tickets(lag=1, samples=4)
    for p, (name, asked) in enumerate([("a", 3), ("b", 3), ("c", 3), ("d", 1)]):
        tickets.report(p, name, start(asked))
    assert tickets.grant(0, 1) == {0, 1}
    assert [tickets.granted(p) for p in range(4)] == [3, 3, 0, 0], "two of eight are left, too few for the third group"
    tickets.report(0, "a", start(3, 3, 3))
    assert tickets.grant(3, 1) == set()
    assert tickets.grant(0, 1) == {2, 3}, "trained samples make room"


@given(st.integers(1, 6), st.integers(0, 2), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 999))
def test_programs_with_groups_of_any_size_never_wait_for_ever(
    samples: int, lag: int, groups: list[int], seed: int
) -> None:
    """Programs begin, send and give back whole groups; a step trains when there are samples for it."""
    tickets, waiting, trained = Tickets(lag, samples), 0, 0
    asked = dict.fromkeys(range(len(groups)), 0)
    used, began = dict(asked), dict(asked)
    for turn in range(400):
        p = (turn + seed) % len(groups)
        if began[p] > used[p]:  # it sends its group, or gives a part of it back
            sent = groups[p] - (seed + turn) % 3 % groups[p]
            used[p], waiting = began[p], waiting + sent
        elif asked[p] == began[p]:
            asked[p] += groups[p]
        if (tickets.granted(p) or 0) >= asked[p]:
            began[p] = asked[p]
        for each, size in enumerate(groups):
            count = asked[each] - began[each]
            tickets.report(each, str(each), Start(
                stream="s", partition=each, asked=asked[each], granted=tickets.granted(each) or 0, used=used[each],
                together=count if count > 1 else 0, open=((1, began[each] - used[each]),) if began[each] > used[each]
                else (),
            ))  # fmt: skip
            assert size
        tickets.grant(waiting, 1)
        assert waiting + tickets.num_open < max((lag + 1) * samples + 1, samples + sum(groups))
        if waiting >= samples:
            waiting, trained = waiting - samples, trained + 1
    assert trained > 3


def test_a_ticket_that_waits_for_others_of_its_group_does_not_hold_up_a_step() -> None:
    tickets = Tickets(lag=0, samples=4)
    begun_one_of_three = Start(stream="s", partition=0, asked=5, granted=3, used=2, together=3, open=((1, 1),))
    tickets.report(0, "a", begun_one_of_three)
    assert tickets.num_open == 1
    assert tickets.grant(3, 1) == {0}, "three samples wait, the fourth is never begun else"
    assert tickets.granted(0) == 5
    assert tickets.grant(3, 1) == set()


def test_a_group_takes_no_place_that_an_older_sample_needs() -> None:
    tickets = Tickets(lag=1, samples=4)
    tickets.report(0, "a", Start(stream="s", partition=0, asked=2, granted=2, used=0, open=((6, 2),)))
    assert tickets.in_the_way(7, [], 7, 0, 2) is None, "of four places in the last step for policy 6, two are left"
    assert tickets.in_the_way(7, [], 7, 0, 3) == InFlight(6, 2, "a")
    assert tickets.in_the_way(7, [], 7, 1, 2) == InFlight(6, 2, "a")


def test_a_report_that_comes_after_a_later_one_is_ignored() -> None:
    tickets = Tickets(lag=1, samples=4)
    tickets.report(0, "a", start(3, 3, 1, (5, 2), number=7), 2)
    tickets.report(0, "a", start(3, 3, 0, (4, 3), number=6), 2)
    assert list(tickets.generated()) == [(5, 2, "a")]
    tickets.report(0, "a", start(3, 3, 2, (5, 1), number=1), 3)
    assert list(tickets.generated()) == [(5, 1, "a")], "messages are numbered in their session"


def session_with_lease() -> PushSession:
    session = PushSession(
        run=0, producer="p", process=5, host="host", pid=1, stream="s", partition=0, buffer=PushBuffer(1 << 20)
    )
    hear(session, Lease(
        stream="s", partition=0, partitions=1, first_seq=0, cursor=None, seed=0, passes=None, dtype="int32",
        overlong="error", poison="error", max_sample_tokens=64, max_chunk_bytes=1 << 10, paced=True,
    ))  # fmt: skip
    return session


def hear(session: PushSession, message: Message, epoch: int = 3) -> None:
    session.handle(FromBroker(Envelope(run=1, epoch=epoch, fence=1, message=message)))


def flow(version: int, number: int) -> Flow:
    return Flow(
        stream="s", partition=0, expected_seq=0, grant_seq=9, grant_bytes=99, durable_seq=0, policy_version=version,
        policy_number=number,
    )  # fmt: skip


def test_a_program_does_not_go_back_to_an_older_policy_because_a_message_was_late() -> None:
    session = session_with_lease()
    hear(session, flow(8, 1))
    hear(session, flow(9, 2))
    hear(session, flow(8, 1))
    assert session.policy_version == 9
    hear(session, flow(4, 3))
    assert session.policy_version == 4, "trainers may go back"


@pytest.mark.parametrize("number", [0, 1])
def test_a_new_broker_numbers_policies_anew(number: int) -> None:
    session = session_with_lease()
    hear(session, flow(9, 2))
    lease = session.lease
    assert lease is not None
    hear(session, lease, epoch=4)
    hear(session, flow(5, number), epoch=4)
    assert session.policy_version == 5
