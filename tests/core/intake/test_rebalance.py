"""Leases are shared out evenly whoever comes and goes, and a departure is logged by its reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.intake.admission import Admission
from streampack.core.intake.leases import Leases
from streampack.core.intake.producers import ProducerDeparture
from streampack.core.journal.history import History
from streampack.core.journal.journal import Journal
from streampack.core.merge.feed_merge import FeedMerge
from streampack.core.model.capacity import Capacity
from streampack.core.model.lease_terms import terms_of
from streampack.core.model.rules import Rules, StreamRules
from streampack.core.model.samples import SampleTable
from streampack.core.protocol.effects import SendProducer
from streampack.core.protocol.events import Report
from streampack.core.protocol.message import Identity
from streampack.core.protocol.producer_messages import Hello, Lease, Offer

READ, PUSHED = StreamRules("read", 1.0, 7), StreamRules("pushed", 1.0, 3, pushed=True)
NAMES = ["one", "two", "three", "four"]


def producers_side(*streams: StreamRules) -> Leases:
    """Return the producers' side of a broker with these streams."""
    rules, table, journal = Rules(merge="arrival", streams=streams), SampleTable(), Journal(keeps=True)
    leases, merge = Leases(Identity(1, 1), Capacity(64, 16, 1 << 20), table, journal), FeedMerge(rules)
    admission = Admission(terms_of(rules), rules.tokens, rules.fields, 16, table, merge)
    leases.open("train", rules, admission, merge, History(rules, 10))
    return leases


def hello(name: str, *offers: Offer) -> Hello:
    return Hello(producer=name, host="host", pid=NAMES.index(name), offers=list(offers))


reads = st.tuples(st.just("read"), st.sampled_from(NAMES))
pushes = st.tuples(st.just("push"), st.sampled_from(NAMES))
leaves = st.tuples(st.just("leave"), st.sampled_from(NAMES))


def test_the_first_partitions_of_all_streams_are_leased_first() -> None:
    leases = producers_side(*(StreamRules(name, 1.0, 3) for name in NAMES))
    effects = leases.rebalancer.join(
        b"one", hello("one", *(Offer(stream=name, source_digest="d") for name in NAMES)), 0.0
    )
    sent = [effect.envelope.message for effect in effects if isinstance(effect, SendProducer)]
    leased = [(message.partition, message.stream) for message in sent if isinstance(message, Lease)]
    assert leased == [(partition, name) for partition in range(3) for name in NAMES]


@given(st.lists(reads | pushes | leaves, max_size=20))
def test_open_partitions_are_held_evenly_and_each_move_begins_a_session(story: list[tuple[str, str]]) -> None:
    leases = producers_side(READ, PUSHED)
    producers, partitions = leases.producers, leases.partitions
    for what, name in story:
        holders, sessions = list(producers.holder), [intake.session for intake in partitions.intakes]
        known = producers.named(name)
        if what == "leave":
            if known is not None:
                leases.rebalancer.leave(known, ProducerDeparture.GOODBYE)
        elif known is None and (what == "read" or name != "four"):
            pushed = Offer(stream="pushed", source_digest="", partition=NAMES.index(name))
            offer = Offer(stream="read", source_digest="d") if what == "read" else pushed
            leases.rebalancer.join(name.encode(), hello(name, offer), 0.0)
        able = [producer.name for producer in producers.offering("read")]
        held = [producers.holder[p] for p in partitions.of_stream("read")]
        counts = [held.count(name) for name in able]
        assert sum(counts) == (READ.partitions if able else 0)
        assert not able or max(counts) - min(counts) <= 1
        for p, owner in zip(partitions.of_stream("pushed"), NAMES, strict=False):
            there = owner in [producer.name for producer in producers.offering("pushed")]
            assert producers.holder[p] == (owner if there else None)
        for before, after, session, intake in zip(holders, producers.holder, sessions, partitions.intakes, strict=True):
            assert after in (None, before) or intake.session > session, "a partition moved within a session"


@pytest.mark.parametrize("why", ProducerDeparture)
def test_a_departure_is_logged_and_counted_by_its_reason(why: ProducerDeparture) -> None:
    leases = producers_side(READ, PUSHED)
    leases.rebalancer.join(b"one", hello("one", Offer(stream="read", source_digest="d")), 0.0)
    producer = leases.producers.named("one")
    assert producer is not None
    report = leases.rebalancer.leave(producer, why, "goodbye")[0]
    assert isinstance(report, Report)
    assert report.level == ("info" if why is ProducerDeparture.GOODBYE else "warning")
    silent = (ProducerDeparture.SILENT, ProducerDeparture.TAKEN_OVER)
    assert leases.rebalancer.vanished == (1 if why in silent else 0)
    assert leases.num_producers == 0
