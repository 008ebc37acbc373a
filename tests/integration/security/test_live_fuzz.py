"""A few seconds of ``tests.fuzz.live``: no message of a key with rights ends the broker, or holds up another job."""

from __future__ import annotations

from tests.fuzz.live import ROLES, fuzz


def test_messages_that_are_valid_by_their_types_end_no_broker() -> None:
    result = fuzz(6.0, seed=7, tell=lambda _: None, least_steps=6)
    assert not result["failed"], result["failed"]
    assert {words.split()[1] for words in result["counts"]} == set(ROLES)
    assert len({words.split()[0] for words in result["counts"]}) > 30, "kinds of messages"
