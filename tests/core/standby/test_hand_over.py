"""A broker that has said that it ends is replaced at once, also if older messages of it come afterwards."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streampack.core.protocol.events import Effect, Tick
from streampack.core.protocol.message import Envelope, Message
from streampack.core.protocol.standby_messages import Follow, HandOver, Lead, LogRecords
from streampack.core.standby.arbiter_entries import CreateEntry, Entry, EntryWritten, Newest
from streampack.core.standby.log_follower import LogFollower
from streampack.core.standby.log_shipper import LogShipper
from streampack.core.standby.standby_events import FromPeer, LogState

RUN, EPOCH, TAKEOVER_S = 7, 3, 10.0
LEAD = Lead(process="p2", entry=1, is_member=True, first_lsn=0)
RECORDS = LogRecords(first=0, kinds=b"\x01", sizes_u32=(1).to_bytes(4, "little"))


def follower() -> LogFollower:
    """Return a standby that has every safe record of the active broker."""
    standby = LogFollower(
        RUN, "b", "p2", "tcp://127.0.0.1:2", log_epoch=EPOCH, log_id="copy", takeover_s=TAKEOVER_S, goes_on=True
    )
    entry = Entry(number=1, epoch=EPOCH, active="a", process="p1", log_id="log", members=("a", "b"))
    standby.handle(Tick(0.0))
    standby.handle(Newest(entry))
    return standby


def receive(standby: LogFollower, message: Message) -> list[Effect]:
    payload = (b"x",) if isinstance(message, LogRecords) else ()
    return standby.handle(FromPeer(Envelope(run=RUN, epoch=EPOCH, fence=0, message=message, payload=payload)))


def takes_over(standby: LogFollower, seconds: float, begin: float = 0.0) -> bool:
    """Return whether the standby asks to be active in the seconds from ``begin`` on."""
    ticks = range(1, int(seconds * 2) + 1)
    effects = [effect for tick in ticks for effect in standby.handle(Tick(begin + tick / 2))]
    return any(isinstance(effect, CreateEntry) for effect in effects)


@given(st.lists(st.sampled_from([LEAD, RECORDS]), max_size=6))
def test_late_messages_do_not_delay_the_takeover(late: list[Message]) -> None:
    standby = follower()
    receive(standby, LEAD)
    receive(standby, HandOver(finished=False))
    for message in late:
        receive(standby, message)
    assert takes_over(standby, 1.0)


def test_a_broker_that_has_not_ended_keeps_its_time() -> None:
    standby = follower()
    assert not takes_over(standby, TAKEOVER_S - 1)
    receive(standby, LEAD)
    assert not takes_over(standby, TAKEOVER_S - 1, TAKEOVER_S - 1)
    assert takes_over(standby, 3.0, 2 * TAKEOVER_S - 2)


def test_the_next_active_broker_gets_its_own_time() -> None:
    standby = follower()
    receive(standby, HandOver(finished=False))
    entry = Entry(number=2, epoch=EPOCH + 1, active="c", process="p3", log_id="log2", members=("c", "b"))
    standby.handle(Newest(entry))
    assert not takes_over(standby, TAKEOVER_S - 1)


def test_a_broker_tells_a_standby_that_copies_its_log_from_one_that_may_take_over() -> None:
    entry = Entry(number=1, epoch=EPOCH, active="a", process="p1", log_id="log", members=("a",))
    shipper = LogShipper(RUN, entry, 5, goes_on=True, lost_s=TAKEOVER_S)
    shipper.handle(LogState(0, 5, 5))

    def follows(safe_upto: int) -> list[Effect]:
        message = Follow(name="b", process="p2", log_epoch=EPOCH, have_upto=safe_upto, safe_upto=safe_upto)
        return shipper.handle(FromPeer(Envelope(run=RUN, epoch=EPOCH, fence=0, message=message), b"b"))

    assert not shipper.lets_in, "no standby"
    follows(0)
    assert (shipper.lets_in, shipper.may_hand_over) == (True, False)
    (written,) = [each.entry for each in follows(5) if isinstance(each, CreateEntry)]
    assert (shipper.lets_in, shipper.may_hand_over) == (True, False), "the arbiter has not answered"
    shipper.handle(EntryWritten(written, written))
    assert (shipper.lets_in, shipper.may_hand_over) == (False, True)
    for second in range(4):
        shipper.handle(Tick(float(second)))
    assert (shipper.lets_in, shipper.may_hand_over) == (False, False), "a silent standby"
