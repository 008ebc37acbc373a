"""Ranks go on in place while their relay is killed, frozen, stopped or gone, and return to it: the same bytes."""

from __future__ import annotations

import math
import signal
import time
from pathlib import Path

import pytest

from streampack.core.sessions import route
from tests.integration.relay.relayed import Ranks, Read, directly, job, return_soon
from tests.integration.running import RunningBroker, until

SIZES = {"dp": 2, "tp": 2, "cp": 2}
FEW = {"dp": 2, "cp": 2}
SOON_S = 3.0


@pytest.fixture(scope="module")
def golden() -> list[Read]:
    with pytest.MonkeyPatch.context() as patch:
        return directly(patch, SIZES)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    return_soon(monkeypatch)


def few(golden: list[Read]) -> list[Read]:
    """What the ranks of ``FEW`` get: tensor ranks get the same."""
    dp, tp, cp = SIZES.values()
    return [golden[(d * tp) * cp + c] for d in range(dp) for c in range(cp)]


def test_ranks_get_the_same_arrays_through_a_relay(golden: list[Read], monkeypatch: pytest.MonkeyPatch) -> None:
    with job(monkeypatch) as it, it.relaying(), Ranks(it.broker.trainers, SIZES) as ranks:
        ranks.allow(math.inf)
        assert ranks.all_by_relay()
    assert len(golden[0]) > 80
    assert len({crcs for _, crcs in (read[0] for read in golden)}) == 4, "each (dp, cp) rank has arrays of its own"
    assert [rank.read for rank in ranks.ranks] == golden


def test_a_killed_relay_costs_nothing_and_ranks_return(
    golden: list[Read], hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job(monkeypatch) as it:
        relay = it.start_relay()
        with Ranks(it.broker.trainers, SIZES, most=10) as ranks:
            ranks.allow(10)
            attempts = {rank.attempt for rank in ranks.ranks}
            relay.signal(signal.SIGKILL)
            killed = time.monotonic()
            until(ranks.none_by_relay)
            assert time.monotonic() - killed < SOON_S, "the end of the connection is noticed at once"
            ranks.allow(20)
            assert ranks.none_by_relay()
            with it.relaying():
                until(ranks.all_by_relay)
                ranks.allow(math.inf)
                assert ranks.all_by_relay()
            assert {rank.attempt for rank in ranks.ranks} == attempts
            assert len(attempts) == 1, "no rank was restarted"
    assert [rank.read for rank in ranks.ranks] == golden


def test_a_relay_that_stops_sends_its_ranks_to_the_broker_at_once(
    golden: list[Read], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with job(monkeypatch) as it, it.relaying() as relay, Ranks(it.broker.trainers, FEW, most=10) as ranks:
        ranks.allow(10)
        attempts = {rank.attempt for rank in ranks.ranks}
        relay.signal(signal.SIGTERM)
        assert relay.end(SOON_S) == 0
        until(ranks.none_by_relay, SOON_S)
        ranks.allow(math.inf)
        assert {rank.attempt for rank in ranks.ranks} == attempts
        assert relay.said.splitlines()[-1].endswith("they continue with the broker")
    moved = [line for line in caplog.messages if "reads from the broker itself" in line]
    assert len(moved) == 4
    assert all(line.endswith("the relay stops") for line in moved), moved
    assert [rank.read for rank in ranks.ranks] == few(golden)


def test_ranks_leave_a_frozen_relay_and_return_once_it_works(
    golden: list[Read], hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route, "RELAY_TIMEOUT_S", 2.0)
    with job(monkeypatch) as it, it.relaying() as relay, Ranks(it.broker.trainers, FEW, most=10) as ranks:
        ranks.allow(10)
        relay.signal(signal.SIGSTOP)
        until(ranks.none_by_relay)
        ranks.allow(20)
        assert ranks.none_by_relay()
        relay.signal(signal.SIGCONT)
        until(ranks.all_by_relay)
        ranks.allow(math.inf)
    assert [rank.read for rank in ranks.ranks] == few(golden)


def test_a_broker_that_is_started_again_serves_the_ranks_of_a_relay(
    golden: list[Read], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (
        job(monkeypatch, state_dir=tmp_path / "state") as it,
        it.relaying(),
        Ranks(it.broker.trainers, FEW, most=10) as ranks,
    ):
        ranks.allow(10)
        it.broker.kill()
        it.broker = RunningBroker(it.path, it.settings)
        ranks.allow(math.inf)
        assert ranks.all_by_relay()
    assert [rank.read for rank in ranks.ranks] == few(golden)
