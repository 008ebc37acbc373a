"""States of real loaders: what is saved in one place of a run goes on there, whatever was killed or changed between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import streampack
from streampack.config.typed_yaml import convert
from streampack.core.serve.readers import READER_SILENT_S
from streampack.errors import DataStall, PeerError, Rejected, StateError, UserError
from streampack.sources import SourceSettings, open_source
from tests.integration.running import PATIENCE_S, RunningBroker, producing_here, running_broker, until, write_jsonl

SAMPLES = 300
SETTINGS: dict[str, Any] = {
    "run": "checkpoints",
    "tokens": "uint16",
    "rules": {"budget": 256, "window": {"samples": 16}, "step": {"packs": 4}},
    "streams": {"text": {"partitions": 2}, "more": {}},
    "feeds": {"train": {"streams": ["text"]}, "valid": {"streams": ["more"]}},  # with several the producers stay
}
ONE = {"dp": 1}
Sample = tuple[int, int, int]


@contextmanager
def producing(broker: RunningBroker, folder: Path) -> Iterator[RunningBroker]:
    files = write_jsonl(folder / "text.jsonl", [{"text": "t" * (1 + i * 7 % 90)} for i in range(SAMPLES)])
    source = open_source(convert({"source": "jsonl", "shards": str(files)}, SourceSettings))
    with producing_here(broker.producers, {"text": source}):
        yield broker


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    """One for all tests that leave it running: no reader is left attached between them."""
    with running_broker(SETTINGS) as running, producing(running, tmp_path_factory.mktemp("data")):
        yield running


@pytest.fixture(scope="module")
def golden(broker: RunningBroker) -> list[str]:
    """Digests of the steps of a run that nothing disturbed."""
    with connect(broker) as loader:
        found = [step.digest for step in loader.steps()]
    assert len(found) > 10
    return found


def connect(broker: RunningBroker, **arguments: Any) -> streampack.Client:
    given: dict[str, Any] = {"format": "numpy", "verify": True, "mesh": ONE} | arguments
    return streampack.connect(broker.trainers, **given)


def impatient(loader: streampack.Client, **seconds: float) -> None:
    """Shorten its waits once it is served: what comes before them may take as long as the machine needs."""
    for name, value in seconds.items():
        assert hasattr(loader._reading._session.patience, name)
        setattr(loader._reading._session.patience, name, value)


def take(loader: Any, count: int) -> list[streampack.Step]:
    """Some steps with all their packs, one iteration left open."""
    steps = loader.steps()
    return [take_packs(next(steps)) for _ in range(count)]


def take_packs(step: streampack.Step) -> streampack.Step:
    """The step itself, once all its packs are taken."""
    for _ in step:
        pass
    return step


def state_after(broker: RunningBroker, count: int) -> dict[str, Any]:
    with connect(broker) as loader:
        take(loader, count)
        return loader.state_dict()


@pytest.mark.parametrize("at", [0, 1, 5, 9])
def test_a_new_client_goes_on_where_a_state_says(broker: RunningBroker, golden: list[str], at: int) -> None:
    state = json.loads(json.dumps(state_after(broker, at)))
    assert state["next_step"] == at
    with connect(broker) as loader:
        loader.load_state_dict(state)
        assert [step.digest for step in loader.steps()] == golden[at:]


def test_asking_moves_nothing(broker: RunningBroker, golden: list[str]) -> None:
    with connect(broker) as loader:
        found = []
        for step in loader.steps():
            found.append(step.digest)
            assert loader.state_dict()["next_step"] == step.index
            take_packs(step)
            first, second = loader.state_dict(), loader.state_dict()
            assert first == second
            assert (first["next_step"], first["chain"]) == (step.index + 1, step.chain)
        assert found == golden
        assert loader.state_dict()["next_step"] == len(golden)


def test_a_step_whose_packs_were_not_all_taken_comes_again(broker: RunningBroker, golden: list[str]) -> None:
    with connect(broker) as loader:
        places = []
        for _ in range(9):
            next(loader)
            places.append(loader.state_dict()["next_step"])
        assert places == [0, 0, 0, 1, 1, 1, 1, 2, 2]
        state = loader.state_dict()
    with connect(broker) as loader:
        loader.load_state_dict(state)
        assert next(loader.steps()).digest == golden[2]


def test_a_trainer_that_fetches_ahead_names_the_step_that_it_trained_last(
    broker: RunningBroker, golden: list[str]
) -> None:
    with connect(broker) as loader:
        take(loader, 6)
        states = [loader.state_dict(step) for step in range(-1, 6)]
        assert [state["next_step"] for state in states] == list(range(7))
        assert states[-1] == loader.state_dict()
        for wrong in (-2, 6, "3", 2.0):
            with pytest.raises(UserError, match="handed out \\(-1 to 5\\)"):
                loader.state_dict(wrong)  # type: ignore[arg-type]
    with connect(broker) as loader:
        loader.load_state_dict(states[3])
        assert next(loader.steps()).digest == golden[3]


def test_before_the_first_step_a_state_is_the_beginning_or_what_was_loaded(broker: RunningBroker) -> None:
    loaded = state_after(broker, 4)
    with connect(broker) as loader:
        assert (loader.state_dict()["next_step"], loader.state_dict()["snapshot"]) == (0, "")
        loader.load_state_dict(loaded)
        assert loader.state_dict() == loaded
        assert loader.state_dict(3) == loaded
        iter(loader)
        assert loader.state_dict() == loaded
        take(loader, 1)
        assert loader.state_dict()["next_step"] == 5


def test_the_last_state_that_was_loaded_counts(broker: RunningBroker, golden: list[str]) -> None:
    with connect(broker) as loader:
        take(loader, 6)
        states = [loader.state_dict(step) for step in range(6)]
    with connect(broker) as loader:
        loader.load_state_dict(states[5])
        loader.load_state_dict(states[2])
        assert next(loader.steps()).digest == golden[3]


def test_loading_in_the_middle_ends_the_iteration_that_is_on(broker: RunningBroker, golden: list[str]) -> None:
    with connect(broker) as loader:
        steps = loader.steps()
        assert [take_packs(next(steps)).digest for _ in range(4)] == golden[:4]
        early, late = loader.state_dict(0), loader.state_dict()
        next(steps)
        for state, at in ((early, 1), (late, 4), (early, 1)):
            loader.load_state_dict(state)
            assert next(steps, None) is None, "its iteration is over"
            steps = loader.steps()
            assert [next(steps).digest for _ in range(3)] == golden[at : at + 3]
        loader.load_state_dict(late)
        assert [pack.step for pack in loader][::4] == list(range(4, len(golden)))


def test_a_later_iteration_is_gone_on_with_and_one_that_has_ended_is_followed_by_the_next(
    broker: RunningBroker, golden: list[str]
) -> None:
    with connect(broker) as loader:
        assert len(list(loader.steps())) == len(golden)
        ended = loader.state_dict()
        take(loader, 3)
        second = loader.state_dict()
    assert (ended["round"], ended["next_step"]) == (second["round"] - 1, len(golden))
    for state, rest in ((second, golden[3:]), (ended, [])):
        with connect(broker) as loader:
            loader.load_state_dict(state)
            assert [step.digest for step in loader.steps()] == rest
            assert [step.digest for step in loader.steps()] == golden, "the iteration after it"


def read_rank(
    broker: RunningBroker, mesh: dict[str, int], state: dict[str, Any] | None, count: int
) -> tuple[list[str], set[Sample], dict[str, Any]]:
    """Digests, samples of its packs, and its state at the end, of up to ``count`` steps of one rank."""
    with connect(broker, mesh=mesh) as loader:
        if state is not None:
            loader.load_state_dict(state)
        digests: list[str] = []
        samples: list[Sample] = []
        steps = loader.steps()
        while len(digests) < count and (step := next(steps, None)) is not None:
            digests.append(take_packs(step).digest)
            samples += [tuple(row) for row in step.sample_ids.tolist()]
        assert len(set(samples)) == len(samples)
        return digests, set(samples), loader.state_dict()


def read_ranks(broker: RunningBroker, dp: int, state: dict[str, Any] | None, count: int = 1 << 30) -> Any:
    """The same for every rank of a mesh."""
    with ThreadPoolExecutor(dp) as pool:
        meshes = [{"dp": dp, "dp_rank": rank} for rank in range(dp)]
        return list(pool.map(lambda mesh: read_rank(broker, mesh, state, count), meshes))


def test_a_run_goes_on_with_other_numbers_of_ranks_and_has_every_sample_once(
    broker: RunningBroker, golden: list[str]
) -> None:
    state: dict[str, Any] | None = None
    digests: list[str] = []
    samples: list[Sample] = []
    for dp, count in ((2, 3), (4, 3), (1, 2), (2, 1 << 30)):
        ranks = read_ranks(broker, dp, state, count)
        state = ranks[0][2]
        assert all(rank[2] == state for rank in ranks), "equal on all ranks"
        assert all(rank[0] == ranks[0][0] for rank in ranks)
        digests += ranks[0][0]
        samples += [sample for rank in ranks for sample in rank[1]]
    assert digests == golden
    assert len(samples) == len(set(samples)) == SAMPLES


def test_a_checkpoint_that_is_durable_is_said_and_noted(broker: RunningBroker) -> None:
    with connect(broker) as loader:
        with pytest.raises(
            UserError, match="got step=0, expected the index of a step that was handed out \\(no step yet\\)"
        ):
            loader.commit(0)
        for step in loader.steps():
            if step.index % 5 == 0:
                loader.commit(step.index)
        with pytest.raises(UserError, match="got step=99, expected the index of a step that was handed out \\(0 to "):
            loader.commit(99)


def test_a_broker_without_the_disk_of_the_first_goes_on_from_the_trainers_state(
    broker: RunningBroker, golden: list[str], tmp_path: Path
) -> None:
    state = state_after(broker, 7)
    with running_broker(SETTINGS) as other, producing(other, tmp_path), connect(other) as loader:
        loader.load_state_dict(state)
        assert [step.digest for step in loader.steps()] == golden[7:]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"run": "another"}, "^run: got '.{16}', expected '.{16}'. The checkpoint belongs to another run"),
        (
            {"rules": {**SETTINGS["rules"], "budget": 512}},
            "^rules.budget: got 256, expected 512 as in the run. Restore the broker's rules",
        ),
        ({"seed": 5}, "^rules.seed: got 0, expected 5"),
        ({}, "^feed: got 'train', expected 'valid'. The checkpoint belongs to another feed"),
    ],
)
def test_a_state_of_another_run_rules_or_feed_is_refused_by_its_key_and_moves_nothing(
    broker: RunningBroker, changes: dict[str, Any], said: str
) -> None:
    state = state_after(broker, 2)
    feed = "train" if changes else "valid"
    with running_broker(SETTINGS | changes) as other, connect(other, feed=feed) as loader:
        with pytest.raises(StateError, match=said):
            loader.load_state_dict(state)
        assert loader.state_dict()["next_step"] == 0


def test_a_state_of_other_data_is_refused_before_anything_is_trained(broker: RunningBroker, golden: list[str]) -> None:
    state = state_after(broker, 4)
    state["chain"] = "00" * 16
    with connect(broker) as loader:
        loader.load_state_dict(state)
        with pytest.raises(Rejected, match="The data, the rules or the seed have changed"):
            next(loader.steps())


def test_a_local_loader_goes_on_as_well() -> None:
    texts = [f"{i} " * (1 + i % 17) for i in range(200)]
    with streampack.local(texts, budget=96, window=16, packs=2, format="numpy") as loader:
        whole = [step.digest for step in loader.steps()]
    with streampack.local(texts, budget=96, window=16, packs=2, format="numpy") as loader:
        take(loader, 6)
        state = json.loads(json.dumps(loader.state_dict()))
        loader.commit(5)
    with streampack.local(texts, budget=96, window=16, packs=2, format="numpy") as loader:
        loader.load_state_dict(state)
        assert [step.digest for step in loader.steps()] == whole[6:]
        with pytest.raises(StateError, match="got a list, expected a dict from state_dict"):
            loader.load_state_dict([])  # type: ignore[arg-type]


# Waits that end


def test_a_broker_that_is_stopped_is_a_stall_where_a_step_or_an_answer_is_waited_for(tmp_path: Path) -> None:
    with running_broker(SETTINGS) as broker, producing(broker, tmp_path), connect(broker) as loader:
        steps = loader.steps()
        next(steps)
        until(lambda: len(loader._reading._prefetching.ready) == 2)
        impatient(loader, stall_s=2)
        broker.signal(signal.SIGSTOP)
        time.sleep(3)  # what nobody waits for is no stall
        assert next(steps).index == 1
        assert next(steps).index == 2
        began = time.monotonic()
        with pytest.raises(
            DataStall, match=r"^tcp://.*: got no message from the broker for .* s, expected a message within 2 s"
        ):
            for _ in steps:
                pass
        assert 1.5 < time.monotonic() - began < 60, "what is asked for here, and not what is usual"
        broker.signal(signal.SIGCONT)


def test_a_state_that_nobody_answers_for_is_a_stall(tmp_path: Path) -> None:
    with running_broker(SETTINGS) as broker, producing(broker, tmp_path), connect(broker) as loader:
        take(loader, 1)
        impatient(loader, answer_s=2)
        broker.signal(signal.SIGSTOP)
        with pytest.raises(DataStall, match="got no answer from the broker, expected an answer within 2 s"):
            loader.state_dict()
        broker.signal(signal.SIGCONT)


@pytest.mark.parametrize("keeps_a_log", [False, True])
def test_a_state_asked_of_a_broker_that_was_killed_is_answered_by_the_next_one(
    tmp_path: Path, keeps_a_log: bool
) -> None:
    listen = {side: f"ipc://{tmp_path}/{side}" for side in ("producers", "trainers")}
    settings = SETTINGS | {"listen": listen | {"http": "127.0.0.1:0"}}
    settings |= {"state_dir": str(tmp_path / "state")} if keeps_a_log else {}
    with running_broker(settings) as broker, producing(broker, tmp_path), connect(broker) as loader:
        take(loader, 7)
        before = loader.state_dict()
        broker.kill()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(loader.state_dict)
            with running_broker(settings):
                after = asked.result(PATIENCE_S)
    assert after == before


def test_a_broker_that_comes_back_in_time_is_no_stall(tmp_path: Path) -> None:
    with running_broker(SETTINGS) as broker, producing(broker, tmp_path), connect(broker) as loader:
        take(loader, 1)
        broker.signal(signal.SIGSTOP)
        threading.Timer(3.0, broker.signal, [signal.SIGCONT]).start()
        assert loader.state_dict()["next_step"] == 1


def test_ranks_that_never_join_are_named_in_time(broker: RunningBroker) -> None:
    meshes = [{"dp": 4, "dp_rank": rank} for rank in (0, 2)]
    with ExitStack() as stack:
        loaders = [stack.enter_context(connect(broker, mesh=mesh, join_timeout_s=2)) for mesh in meshes]
        for loader in loaders:
            iter(loader)
        began = time.monotonic()
        with pytest.raises(DataStall, match=r"have not joined in 2 s \(.*dp=1.*dp=3.*\)"):
            next(loaders[0])
        assert time.monotonic() - began < 60, "what is asked for here, and not what is usual"


def test_each_wait_is_as_long_as_it_was_asked_to_be(broker: RunningBroker) -> None:
    with connect(broker, stall_timeout_s=70, join_timeout_s=80, timeout_s=90) as loader:
        patience = loader._reading._session.patience
        assert (patience.stall_s, patience.join_s, patience.answer_s) == (70, 80, 90)


READER = """
import sys, streampack
with streampack.connect(sys.argv[1], mesh={"dp": 1}, format="numpy") as loader:
    steps = loader.steps()
    print(next(steps).digest, flush=True)
    for line in sys.stdin:
        print(next(steps).digest, flush=True)
"""


def test_a_process_that_was_taken_for_dead_is_told_that_its_rank_was_taken(
    broker: RunningBroker, golden: list[str]
) -> None:
    zombie = subprocess.Popen(
        [sys.executable, "-c", READER, broker.trainers], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=os.environ,
    )  # fmt: skip
    try:
        assert zombie.stdout is not None
        assert zombie.stdout.readline() == f"{golden[0]}\n"
        zombie.send_signal(signal.SIGSTOP)
        with connect(broker) as loader:
            began = time.monotonic()
            steps = loader.steps()
            assert next(steps).digest == golden[0], "in place, with the step that was in use"
            assert time.monotonic() - began < READER_SILENT_S, "before its silence alone would have ended it"
            zombie.send_signal(signal.SIGCONT)
            _, said = zombie.communicate("next\n" * len(golden), timeout=PATIENCE_S)
            assert "streampack.errors.Rejected: " in said
            assert "[fenced]" in said
            assert [step.digest for step in steps] == golden[1:], "and the one that reads notices nothing"
    finally:
        zombie.kill()
        zombie.communicate()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_state_is_refused_in_a_forked_child_as_packs_are(broker: RunningBroker) -> None:
    with connect(broker) as loader:
        pid = os.fork()
        if pid == 0:
            try:
                loader.state_dict()
            except PeerError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
