"""When a message without an answer is repeated: later each time, and not by all peers at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streampack.core.sessions.backoff import UNSENT_S, Backoff, spread


@given(st.text(max_size=20), st.floats(0.1, 4.0), st.floats(4.0, 60.0), st.integers(1, 60))
def test_each_delay_is_twice_the_one_before_up_to_the_most_and_a_quarter_off_at_most(
    name: str, first_s: float, most_s: float, tries: int
) -> None:
    again, now = Backoff(name, first_s, most_s), 100.0
    assert again.due(now)
    for number in range(tries):
        again.sent(now)
        delay = min(first_s * 2.0**number, most_s)
        assert not again.due(now + 0.74 * delay)
        assert again.due(now + 1.26 * delay)
        now += 1.26 * delay
    again.answered(now)
    assert not again.due(now + 0.74 * first_s)
    assert again.due(now + 1.26 * first_s), "short again"
    again.unsent(now)
    assert again.due(now + 1.26 * UNSENT_S), "what never left is tried again soon"


def test_a_thousand_peers_that_begin_together_do_not_repeat_together() -> None:
    times = sorted(spread(f"rank {n}", 0) for n in range(1000))
    tenths = [sum(n / 10 <= time < (n + 1) / 10 for time in times) for n in range(10)]
    assert min(tenths) > 60, tenths
    assert times == sorted(spread(f"rank {n}", 0) for n in range(1000)), "the same each time"
