"""The host of the active broker is lost with its disk: the standby goes on, and the ranks do not notice which broker.

``python -m tests.soak.host_loss 50`` does this many times, and has the figures.
"""

from __future__ import annotations

import pytest

from tests.soak.host_loss import TAKEOVER_S, lose_host, three_hosts


@pytest.mark.parametrize(("pushed", "on_loss"), [(False, "stall"), (True, "go_on")])
def test_a_standby_goes_on_with_the_same_steps_when_the_broker_s_host_is_lost(pushed: bool, on_loss: str) -> None:
    with three_hosts() as names:
        if names is None:
            pytest.skip("this machine allows no network namespaces")
        loss = lose_host(3, names, pushed=pushed, on_loss=on_loss)
    assert not loss.wrong, loss.wrong
    assert loss.pause_s < 2 * TAKEOVER_S + 10.0
