"""A broker that was asked to stop gives its standby time to copy the log, and leaves at once if it has."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from streampack_services.broker.serving.stopping import Stopping


def stopping(**shipping: bool) -> Stopping:
    known: Any = SimpleNamespace(**shipping)
    return Stopping(10.0, known)


def test_a_broker_waits_half_of_its_time_for_a_standby_that_copies_the_log() -> None:
    ends = stopping(may_hand_over=False, lets_in=True)
    assert not ends.begins_to_drain(0.0), "nobody has asked"
    ends.ask()
    asked = time.monotonic()
    assert [ends.begins_to_drain(asked + after) for after in (0, 4.9, 5.1, 5.2)] == [False, False, True, False]
    assert not ends.is_over(num_readers=1)
    assert ends.is_over(num_readers=0)


def test_a_broker_leaves_at_once_to_a_standby_that_may_take_over_and_when_asked_twice() -> None:
    ends = stopping(may_hand_over=True, lets_in=True)
    ends.ask()
    assert not ends.begins_to_drain(1.0)
    assert ends.hands_over
    assert ends.is_over(num_readers=1)
    ends = stopping(may_hand_over=False, lets_in=True)
    ends.ask()
    ends.ask()
    assert ends.at_once
    assert ends.is_over(num_readers=1)
