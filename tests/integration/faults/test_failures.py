"""Failures that a user may see, each with a test whose name says it.

Tests in other modules::

    producer killed or restarted, resends
      integration/commands/test_daemons: a_killed_producer_process_is_started_again_and_no_step_differs
      integration/steps/test_same_steps: a_producer_killed_in_the_middle_changes_nothing
      integration/samples/test_pushed: a_worker_that_is_killed_loses_nothing_that_it_flushed
    broker killed anywhere
      integration/samples/test_pushed: a_broker_that_is_killed_loses_no_rollout
      integration/faults/test_checkpoints: a_broker_without_the_disk_of_the_first_goes_on_from_the_trainers_state
    rank killed; trainers restart from step j
      training/proofs/test_restarts: ranks_of_which_one_is_killed_at_every_step_have_the_same_steps_and_end_together
      core/serve/test_attempts: a_process_that_takes_over_gets_the_same_steps_and_the_others_notice_nothing
    slow trainer
      integration/faults/test_memory: a_million_samples_through_slow_clients_leave_the_brokers_memory_alone
    a rank never joins; two claim one rank; wrong mesh; other configuration
      integration/faults/test_checkpoints: ranks_that_never_join_are_named_in_time
      integration/commands/test_bad_input: a_rank_that_is_held_and_another_mesh_are_refused
      integration/commands/test_bad_input: a_mesh_that_the_rules_cannot_serve_is_refused_with_those_they_can
      integration/faults/test_checkpoints: a_state_of_another_run_rules_or_feed_is_refused_by_its_key_and_moves_nothing
    broker stopped or hung
      integration/faults/test_checkpoints: a_broker_that_is_stopped_is_a_stall_where_a_step_or_an_answer_is_waited_for
    two brokers for one run
      services/log/test_log: a_second_broker_is_told_who_has_the_log
      integration/commands/test_bad_input: an_ipc_address_that_is_served_is_not_stolen
    disk full, fsync error
      integration/faults/test_log_disk: a_full_disk_is_waited_out_and_no_record_is_lost_or_moved
      integration/faults/test_log_disk: a_failed_sync_ends_the_process_and_is_never_tried_again
    bit rot in a log
      services/log/test_log: any_flipped_bit_gives_a_prefix_with_all_that_was_synced_or_a_refusal
    poison sample
      integration/samples/test_bad_data: with_drop_it_is_one_line_and_a_counter_and_nothing_else_is_lost
    corrupt or hostile message
      integration/commands/test_bad_input: a_flood_of_what_is_no_message_is_counted_and_told_in_a_line_or_two
    uneven tails
      training/proofs/test_restarts: ranks_of_which_one_is_killed_at_every_step_have_the_same_steps_and_end_together

Real processes; what they do to a network is ``proxy``'s, or network namespaces'.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import streampack as sp
from streampack.client.connect import Client
from streampack.errors import UserError
from tests.integration import running as running_module
from tests.integration.proxy import Proxy
from tests.integration.running import (
    Daemon,
    RunningBroker,
    executed,
    folder,
    in_process,
    running,
    streampack,
    the_error,
    until,
    write,
    write_jsonl,
)
from tests.soak.accounts import settle
from tests.soak.checksum import crc_of
from tests.soak.golden import Golden, pack_offline
from tests.soak.job import Job, fixed_listen, make_job
from tests.soak.partition import Link, link, run_apart

PAUSE_S = 5.0
"""What a started broker may take to the next step; benchmarks/recovery/recovery.py has the whole pause."""
KILLED_AT = (0, 12, 20)


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """Two streams in 10 files, one rank, over TCP: about 40 steps."""
    with folder() as path:
        yield make_job(7, path, number=0, rows=(90, 110))


@pytest.fixture(scope="module")
def golden(job: Job) -> Golden:
    found = pack_offline(job)
    assert len(found.steps) > 30
    return found


def settings_in(path: Path, job: Job, listen: dict[str, str]) -> dict[str, Any]:
    """The job's, for a broker with a state of its own in ``path``."""
    of_its_own = {"listen": listen, "state_dir": str(path / "state"), "rendezvous": str(path / "streampack.json")}
    return job.settings | of_its_own


@contextmanager
def served(job: Job) -> Iterator[RunningBroker]:
    """A broker of the job, with addresses that its successor has, too; and a producer."""
    with folder() as path:
        broker = RunningBroker(path, settings_in(path, job, fixed_listen(path)))
        try:
            with producing(job, path, broker.producers):
                yield broker
        finally:
            broker.kill()


@contextmanager
def producing(job: Job, path: Path, endpoint: str) -> Iterator[Daemon]:
    tree = {"broker": endpoint, "processes": 1, "streams": job.streams}
    with running("producer", "produce", "-c", write(path / "producer.yaml", tree)) as producer:
        yield producer


def start_again(broker: RunningBroker) -> RunningBroker:
    """Kill a broker, and start its successor at once."""
    broker.kill()
    settings = json.loads((broker.log.parent / "broker.yaml").read_text())
    return RunningBroker(broker.log.parent, settings)


def connect(endpoint: str, **more: Any) -> Client:
    return sp.connect(endpoint, format="numpy", verify=True, **more)


def differing(golden: Golden, steps: list[sp.Step]) -> list[int]:
    """Steps of a lone rank that are not the golden run's, bit for bit."""
    names = [name for name in golden.crcs(0, 0, 1, 0) if name != "positions"]
    return [
        step.index
        for step in steps
        if (step.digest, step.chain) != (golden.steps[step.index].digest, golden.steps[step.index].chain)
        or any(
            crc_of(pack[name]) != golden.crcs(step.index, pack.pack, 1, 0)[name] for pack in step for name in names
        )
    ]  # fmt: skip


def the_golden_ones(golden: Golden, steps: list[sp.Step]) -> bool:
    """All steps, once each, in order."""
    return [step.index for step in steps] == list(range(len(golden.steps))) and not differing(golden, steps)


def test_the_tests_that_are_elsewhere_are_there() -> None:
    named = re.findall(r"^ +([\w/]+): (\w+)$", __doc__ or "", re.M)
    assert len(named) > 15
    for module, name in named:
        assert f"def test_{name}(" in (Path(__file__).parents[2] / f"{module}.py").read_text(), name


# Brokers


def test_a_broker_killed_anywhere_is_a_pause_and_the_same_bytes_and_states(job: Job, golden: Golden) -> None:
    with ExitStack() as stack:
        broker = stack.enter_context(served(job))
        steps, pauses = [], [0.0]
        with connect(broker.trainers, prefetch=1) as loader:
            for step in loader.steps():
                pauses[-1] = time.monotonic() - pauses[-1]
                steps.append(step)
                assert len(list(step)) == len(step)
                state = loader.state_dict()
                assert (state["next_step"], state["chain"]) == (step.index + 1, step.chain)
                if step.index in KILLED_AT:
                    broker = start_again(broker)
                    stack.callback(broker.kill)
                pauses.append(time.monotonic())
    assert the_golden_ones(golden, steps)
    of_kills = [pauses[at + 1] for at in KILLED_AT]
    assert sorted(of_kills)[1] < PAUSE_S, "one of three may have met a machine that is busy"


def test_a_stopped_broker_is_waited_for_and_goes_on(job: Job, golden: Golden) -> None:
    with served(job) as broker, connect(broker.trainers, prefetch=1) as loader:
        steps = []
        for step in loader.steps():
            steps.append(step)
            if step.index == 3:
                broker.signal(signal.SIGSTOP)
                threading.Timer(1.5, broker.signal, [signal.SIGCONT]).start()
    assert the_golden_ones(golden, steps)


def test_a_source_that_gives_other_data_the_second_time_stops_the_run_naming_stream_and_index(tmp_path: Path) -> None:
    """Its files have the sizes that they had, and so its digest."""
    shard = write_jsonl(tmp_path / "web.jsonl", [{"text": f"{i:06d} " * 9} for i in range(3000)])
    streams = {"web": {"source": "jsonl", "shards": str(shard), "shuffle": False}}
    rules = {"budget": 256, "window": {"samples": 16}, "step": {"packs": 2}}
    with folder() as path, ExitStack() as stack:
        settings = {
            "listen": fixed_listen(path), "state_dir": str(path / "state"), "rules": rules,
            "streams": {"web": {"partitions": 1}},
        }  # fmt: skip
        broker = RunningBroker(path, settings)
        stack.callback(broker.kill)
        tree = {"broker": broker.producers, "processes": 1, "streams": streams}
        config = write(path / "producer.yaml", tree)
        loader = stack.enter_context(connect(broker.trainers, prefetch=1))
        steps = loader.steps()
        with running("producer", "produce", "-c", config):
            had = [next(steps) for _ in range(20)]
            broker.kill()
        shard.write_text(shard.read_text().replace("00", "11"))
        broker = RunningBroker(path, settings)
        stack.callback(broker.kill)
        with running("other", "produce", "-c", config) as other:
            assert other.end() != 0
            assert re.search(r"sample web:\d+: got 64 tokens with checksum", other.said)
        until(lambda: "the tokenizer and its settings, or start a new run" in broker.feed()["waiting_for"]["detail"])
        assert "sample web:" in broker.feed()["waiting_for"]["detail"]
        assert "sample web:" in broker.said
    assert [step.index for step in had] == list(range(20))


def test_one_of_two_brokers_of_a_run_serves_and_a_stale_one_that_wakes_up_changes_nothing(
    job: Job, golden: Golden
) -> None:
    """The first hangs, the second takes its place (its address is routed there); then the first wakes up, and
    the trainer's connection leads to it again for a while.
    """
    with served(job) as stale, Proxy(stale.trainers) as route, connect(route.endpoint, prefetch=1) as loader:
        steps = []
        all_steps = loader.steps()
        steps += [next(all_steps) for _ in range(5)]
        stale.signal(signal.SIGSTOP)
        with served(job) as second:
            lead_to(route, second.trainers)
            steps += [next(all_steps) for _ in range(10)]
            stale.signal(signal.SIGCONT)
            lead_to(route, stale.trainers)
            until(lambda: stale.status()["state"] != "" and route.connections > 2)
            time.sleep(1.0)  # what the stale one says is heard, and not taken
            lead_to(route, second.trainers)
            steps += all_steps
    assert the_golden_ones(golden, steps)


def test_a_second_broker_with_the_state_of_one_that_hangs_is_refused_and_served_once_that_is_gone(
    job: Job, golden: Golden
) -> None:
    with served(job) as broker, connect(broker.trainers, prefetch=1) as loader:
        all_steps = loader.steps()
        steps = [next(all_steps) for _ in range(5)]
        broker.signal(signal.SIGSTOP)
        said = the_error(streampack("broker", "-c", broker.log.parent / "broker.yaml"), 2)
        assert f":{broker.process.pid}" in said, "it names who has the log"
        second = start_again(broker)
        try:
            steps += all_steps
        finally:
            second.kill()
    assert the_golden_ones(golden, steps)


def lead_to(route: Proxy, target: str) -> None:
    route.target = target
    route.cut()


# The network


def test_connections_that_are_slow_cut_half_closed_or_silent_change_nothing(job: Job, golden: Golden) -> None:
    def half_a_second_of_silence(route: Proxy) -> None:
        route.down.held = route.up.held = True
        threading.Timer(0.5, partial(open_again, route)).start()

    faults: dict[int, Callable[[Proxy], Any]] = {
        3: lambda route: setattr(route.down, "delay_s", 0.02),
        6: Proxy.cut,
        9: lambda route: setattr(route.down, "delay_s", 0.0),
        12: Proxy.half_close,
        15: half_a_second_of_silence,
        20: lambda route: setattr(route.up, "bytes_per_s", 100_000),
        25: Proxy.cut,
    }
    with through_proxies(job) as (trainers, producers), connect(trainers.endpoint, prefetch=1) as loader:
        steps = []
        for step in loader.steps():
            steps.append(step)
            time.sleep(0.02)
            for route in (trainers, producers):
                faults.get(step.index, id)(route)
        until(lambda: min(trainers.connections, producers.connections) > 2)
    assert the_golden_ones(golden, steps)


def open_again(route: Proxy) -> None:
    route.down.held = route.up.held = False


def test_bytes_that_are_damaged_on_their_way_are_dropped_and_sent_again(job: Job, golden: Golden) -> None:
    with through_proxies(job, damage=2) as (trainers, producers), connect(trainers.endpoint, prefetch=1) as loader:
        trainers.down.damage = 2
        steps = list(loader.steps())
    assert the_golden_ones(golden, steps)
    assert trainers.down.damage == producers.up.damage == 0


@contextmanager
def damaged(proxy: Proxy, damage: int) -> Iterator[None]:
    proxy.up.damage = damage  # before anybody can have sent all there is
    yield


@contextmanager
def through_proxies(job: Job, damage: int = 0) -> Iterator[tuple[Proxy, Proxy]]:
    """Trainers and producers each come to a broker by a proxy, which damages some of what the producers send first."""
    with folder() as path:
        listen = fixed_listen(path)
        broker = RunningBroker(path, settings_in(path, job, listen))
        try:
            with (
                Proxy(listen["trainers"]) as trainers,
                Proxy(listen["producers"]) as producers,
                damaged(producers, damage),
                producing(job, path, producers.endpoint),
            ):
                yield trainers, producers
        finally:
            broker.kill()


@pytest.fixture(scope="module")
def between() -> Iterator[Link]:
    with link() as found:
        if found is None:
            pytest.skip("no network namespaces here: they need root, ip, and a kernel that has veth")
        yield found


def test_a_partition_of_1_and_5_seconds_and_one_way_goes_on_exactly(between: Link) -> None:
    with folder() as path:
        job = make_job(11, path, number=1, rows=(150, 160))
        golden = pack_offline(job)
        faults: list[Callable[[], Any]] = [between.down, between.down]
        faults += [partial(between.one_way, deaf) for deaf in (between.near, between.far)]
        run_apart(job, between, faults, (1.0, 5.0, 1.0, 1.0))
        account = settle(job, golden, [])
    assert not account.wrong
    assert account.compared >= len(job.meshes) * len(golden.steps)


# Trainers


def test_a_slow_trainer_leaves_memory_bounded_and_is_named_in_the_status(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "web.jsonl", [{"tokens": [7] * (1 + 31 * i % 97)} for i in range(500)])
    settings: dict[str, Any] = {
        "steps_ahead": 3, "rules": {"budget": 256, "window": {"samples": 64}, "step": {"packs": 4}},
        "streams": {"web": {"partitions": 1, "repeat": True}},
    }  # fmt: skip
    streams = {"web": {"source": "jsonl", "shards": str(tmp_path / "web.jsonl")}}
    with folder() as path:
        with executed():
            broker = RunningBroker(path, settings)
        tree = {"broker": broker.producers, "processes": 1, "streams": streams}
        try:
            with (
                running("producer", "produce", "-c", write(path / "p.yaml", tree)),
                Proxy(broker.trainers) as thin,
                ExitStack() as ranks,
            ):
                for rank, endpoint in enumerate((broker.trainers, thin.endpoint)):
                    loader = ranks.enter_context(connect(endpoint, mesh={"dp": 2, "dp_rank": rank}))
                    thread = threading.Thread(target=read_on, args=(loader,))
                    ranks.callback(thread.join, 20)
                    ranks.callback(loader.close)
                    thread.start()
                until(lambda: broker.feed()["steps"]["formed"] > 100)
                thin.down.bytes_per_s = 4000
                late = "Messages come late to rank dp=1 on "
                until(lambda: late in " ".join(in_process("status", broker.http).stdout.split()))
                until(partial(producers_wait, broker))
                memory = psutil.Process(broker.process.pid).memory_info
                early = memory().rss
                time.sleep(1.5)
                steps = broker.feed()["steps"]
                thin.down.bytes_per_s = 0
                assert memory().rss <= 1.02 * early + 2**20
                assert steps["formed"] - steps["returned"] <= 3 + 1
        finally:
            broker.kill()


def producers_wait(broker: RunningBroker) -> bool:
    """Hardly anything has come for a second: what the broker takes is what it has room for."""
    before = broker.status()["streams"][0]["samples"]
    time.sleep(1.0)
    return bool(broker.status()["streams"][0]["samples"] - before < 50)


def read_on(loader: Client) -> None:
    with suppress(UserError):  # closed
        for _ in loader.steps():
            continue


# The machine


def test_a_wall_clock_that_jumps_changes_nothing(job: Job, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    wandering = (sys.executable, "-m", "tests.integration.faults.wandering_clock")
    monkeypatch.setattr(running_module, "STREAMPACK", wandering)
    with executed(), served(job) as broker, connect(broker.trainers) as loader:
        steps = list(loader.steps())
    assert the_golden_ones(golden, steps)


def test_the_golden_run_delivers_its_samples(golden: Golden) -> None:
    """The yardstick itself: tokens of every pack are those of its samples, within the budget."""
    for step in golden.steps:
        for pack in step.packs:
            assert len(pack.ids) == len(pack.tokens)
            assert sum(map(len, pack.tokens)) <= golden.rules.budget
    assert sum(step.num_samples for step in golden.steps) == len(golden.expected)
    assert np.concatenate(golden.steps[0].packs[0].tokens).min() > 0
