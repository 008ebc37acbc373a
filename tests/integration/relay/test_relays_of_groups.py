"""Ranks of a feed with ``cp: dynamic`` behind two relays: groups cross hosts, and each rank gets its own bytes.

``KILLS=100 pytest tests/integration/relay/test_relays_of_groups.py`` kills relays and the broker 100 times.
"""

from __future__ import annotations

import os
import random
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.relay.relayed import SETTINGS, Job, Ranks, Read, directly, job, return_soon
from tests.integration.running import Daemon, RunningBroker, until

KILLS = int(os.environ.get("KILLS", "3"))
STEPS = 6 + 4 * KILLS
EIGHT = {"dp": 2, "cp": 4}
GROUPS = SETTINGS | {
    "rules": SETTINGS["rules"] | {"shape": "exact"},
    "streams": {"web": {"partitions": 2, "repeat": True}},
    "feeds": {"train": {"cp": "dynamic", "rank_tokens": 32, "max_group": 8, "exchange": {"node": 0.05, "across": 0.2}}},
    "planned_mesh": EIGHT,
}


@pytest.fixture(scope="module")
def golden() -> list[Read]:
    with pytest.MonkeyPatch.context() as patch:
        return directly(patch, EIGHT, GROUPS, STEPS)


class TwoRelays:
    """Two relays of a job, each of which may be killed and started again."""

    def __init__(self, it: Job) -> None:
        self._job = it
        self.addresses = [f"ipc://{it.path}/relay{number}" for number in range(2)]
        self._running = [self._start(number) for number in range(2)]

    def _start(self, number: int) -> Daemon:
        return self._job.start_relay(name=f"relay{number}", listen=self.addresses[number])

    def kill(self, number: int) -> None:
        self._running[number].kill()

    def start_again(self, number: int) -> None:
        self._running[number] = self._start(number)

    def end(self) -> None:
        for relay in self._running:
            relay.kill()


def test_relays_and_brokers_that_are_killed_cost_groups_of_ranks_no_byte(
    golden: list[Read], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    return_soon(monkeypatch)
    draw = random.Random(KILLS)
    with job(monkeypatch, GROUPS, state_dir=tmp_path / "state") as it, ExitStack() as ends:
        relays = TwoRelays(it)
        ends.callback(relays.end)
        ranks = ends.enter_context(Ranks(it.broker.trainers, EIGHT, most=2, relays=relays.addresses))
        ranks.allow(2)
        for kill in range(KILLS):
            until(ranks.all_by_relay)
            relay = kill % 3
            dies = threading.Timer(
                draw.uniform(0, 0.1), it.broker.kill if relay == 2 else relays.kill, [relay][relay // 2 :]
            )
            dies.start()
            if relay == 2:
                dies.join()
                it.broker = RunningBroker(it.path, it.settings)
            ranks.allow(2 + 4 * (kill + 1))
            dies.join()
            if relay < 2:
                relays.start_again(relay)
        ranks.allow(STEPS)
        reads = [rank.read for rank in ranks.ranks]
    assert [read[:STEPS] for read in reads] == [read[:STEPS] for read in golden]
    assert len({read[0][1] for read in golden}) == 8, "each rank has bytes of its own"


def test_sixteen_ranks_behind_relays_have_the_steps_of_eight(
    golden: list[Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    with job(monkeypatch, GROUPS) as it, ExitStack() as ends:
        relays = TwoRelays(it)
        ends.callback(relays.end)
        with Ranks(it.broker.trainers, {"dp": 4, "cp": 4}, most=3, relays=relays.addresses) as ranks:
            ranks.allow(6)
            assert ranks.all_by_relay()
    digests = [digest for digest, _ in golden[0][:6]]
    assert [[digest for digest, _ in rank.read[:6]] for rank in ranks.ranks] == [digests] * 16
