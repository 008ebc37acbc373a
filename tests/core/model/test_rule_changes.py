"""The rules that come of what is asked of a running feed."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.broker import Broker
from streampack.core.merge.schedule import change_merge, merge_of
from streampack.core.model.capacity import Capacity, FeedPlan
from streampack.core.model.rule_changes import Ask, Restream, Reweigh, Skip, apply_change, describe_change
from streampack.core.model.rules import Rules, StreamRules
from streampack.core.protocol.effects import Answer, Change

RULES = Rules(streams=(StreamRules("web", 0.7, 2), StreamRules("code", 0.3, 1), StreamRules("old", 0.0, 1)))


def test_the_others_keep_their_weights_and_their_numbers() -> None:
    after = apply_change(RULES, Reweigh({"code": 0.5}))
    assert [(stream.name, stream.weight) for stream in after.streams] == [("web", 0.7), ("code", 0.5), ("old", 0.0)]
    assert msgspec.structs.replace(after, streams=RULES.streams) == RULES, "nothing else changes"


def test_streams_join_at_the_end_and_leave_in_place() -> None:
    after = apply_change(RULES, Restream((StreamRules("math", 2.0, 3),), ("web",)))
    assert [(stream.name, stream.weight) for stream in after.streams] == [
        ("web", 0.0), ("code", 0.3), ("old", 0.0), ("math", 2.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (Reweigh({"cod": 1.0}), "got stream 'cod', expected one of: web, code"),
        (Reweigh({"old": 1.0}), "got stream 'old', which was removed, expected one of: web, code"),
        (Reweigh({"web": -1.0}), "stream 'web': got weight -1, expected 0 to 1e\\+09. Weight 0 removes"),
        (Reweigh({"web": float("nan")}), "stream 'web': got weight nan"),
        (Reweigh({"web": 0.0, "code": 0.0}), "got a change that removes all streams"),
        (Reweigh({"web": 5000.0}), "stream 'code': got weight 0.3, expected at least 1.22"),
        (Restream((StreamRules("old", 1.0, 1),)), "got a new stream 'old', expected an unused name"),
        (
            Restream((StreamRules("a", 1.0, 1), StreamRules("a", 1.0, 1))),
            "got a new stream 'a', expected an unused name",
        ),
        (Restream((StreamRules("a", 0.0, 1),)), "stream 'a': got weight 0, expected a weight above 0"),
        (Restream((StreamRules("a", 1.0, 1, pushed=True),)), "got a pushed stream with `merge: schedule`"),
        (Restream(remove=("a",)), "got stream 'a', expected one of"),
    ],
)
def test_impossible_changes_are_refused(ask: Reweigh | Restream, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        apply_change(RULES, ask)


def test_weights_of_a_feed_that_takes_samples_as_they_come_are_refused() -> None:
    arrival = msgspec.structs.replace(RULES, merge="arrival")
    with pytest.raises(ValueError, match="got weight 2 with `merge: arrival`, expected 0"):
        apply_change(arrival, Reweigh({"web": 2.0}))
    assert [stream.weight for stream in apply_change(arrival, Reweigh({"web": 0.0})).streams] == [0.0, 0.3, 0.0]


@given(st.dictionaries(st.sampled_from(["web", "code", "x"]), st.floats(-1, 5000), max_size=3), st.data())
def test_a_merge_can_do_every_change_that_is_not_refused(weights: dict[str, float], data: st.DataObject) -> None:
    added = tuple(StreamRules("new", data.draw(st.floats(0.001, 9)), 2) for _ in range(data.draw(st.integers(0, 1))))
    rules = RULES
    for ask in (Reweigh(weights), Restream(added)):
        try:
            after = apply_change(rules, ask)
        except ValueError:
            continue
        merge = merge_of(rules)
        change_merge(merge, after)
        assert merge.state() == merge_of(after).state()
        rules = after


def test_a_change_is_described_in_words() -> None:
    asks: list[Ask] = [Reweigh({"a": 0.3, "b": 2}), Restream((StreamRules("c"),), ("a",)), Skip(120, 140)]
    assert [describe_change(ask) for ask in asks] == ["weights a=0.3 b=2", "streams +c -a", "skip steps 120-140"]


@pytest.mark.parametrize(("first", "last"), [(2, 1), (-1, 1)])
def test_steps_that_are_none_cannot_be_skipped(first: int, last: int) -> None:
    with pytest.raises(ValueError, match=f"got steps {first} to {last}, expected 0 <= first step <= last step"):
        Skip(first, last)


@pytest.mark.parametrize(
    ("feed", "ask", "expected"),
    [
        ("", Skip(1, 2), "got no feed, expected one of: 'train', 'valid'"),
        ("test", Skip(1, 2), "got feed 'test', expected one of: 'train', 'valid'"),
        ("train", Reweigh({"val": 1.0}), "got stream 'val', expected one of: web"),
        (
            "train",
            Restream((StreamRules("val"),)),
            "got a new stream 'val', expected an unused name, because feed 'valid' has",
        ),
    ],
)
def test_a_broker_says_what_it_cannot_change(feed: str, ask: Ask, expected: str) -> None:
    plans = [
        FeedPlan(name, Rules(budget=64, packs=1, window=4, streams=(StreamRules(stream, 1.0, 1),)), 4096)
        for name, stream in (("train", "web"), ("valid", "val"))
    ]
    broker = Broker(run=1, epoch=1, feeds=plans, capacity=Capacity(1024, 64, 4096))
    [answer] = broker.handle(Change(7, feed, ask))
    assert isinstance(answer, Answer)
    assert answer.token == 7
    assert expected in answer.refusal
