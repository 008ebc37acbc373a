"""The client as a trainer holds it: errors come out where packs do, and nothing waits for what is gone."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streampack
from streampack.client import prefetch
from streampack.config.typed_yaml import convert
from streampack.errors import InternalError, MeshError, PeerError, Unreachable, UserError
from streampack.sources import SourceSettings, open_source
from streampack.transport.rendezvous import read_rendezvous
from tests.integration.running import PATIENCE_S, RunningBroker, producing_here, running_broker, until, write_jsonl

SETTINGS: dict[str, Any] = {
    "tokens": "uint16",
    "rules": {"budget": 256, "align": {"sample": 1, "pack": 4}, "window": {"samples": 16}, "step": {"packs": 2}},
    "streams": {"text": {"partitions": 2}, "more": {}},  # of two feeds: with several the producers stay
    "feeds": {"train": {"streams": ["text"], "cp_layout": "contiguous"}, "valid": {"streams": ["more"]}},
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    """A broker and a producer of 400 samples; no test leaves a reader attached."""
    files = write_jsonl(
        tmp_path_factory.mktemp("data") / "text.jsonl", [{"text": "t" * (1 + i * 7 % 90)} for i in range(400)]
    )
    source = open_source(convert({"source": "jsonl", "shards": str(files)}, SourceSettings))
    with running_broker(SETTINGS) as running, producing_here(running.producers, {"text": source}):
        yield running


def test_packs_come_one_by_one_or_by_the_step(broker: RunningBroker) -> None:
    with streampack.connect(broker.trainers, format="numpy") as loader:
        steps = loader.steps()
        first = next(steps)
        rest = [pack for step in steps for pack in step]
        assert loader.stats()["steps"] == 1 + len(rest) // 2
    packs = [*first, *rest]
    assert [pack.micro_batch for pack in packs] == [0, 1] * (len(packs) // 2)
    assert sum(pack.num_samples for pack in packs) == 400
    assert sum(int((pack.labels != -100).sum()) for pack in first) == first.num_loss_tokens
    pack = packs[0]
    assert set(pack) >= {"input_ids", "labels", "position_ids", "cu_seqlens_padded"}
    assert pack["input_ids"] is pack.input_ids
    assert pack.input_ids.dtype == np.int64
    with pytest.raises(TypeError, match="length of its feed is not known"):
        len(loader)


def test_arrays_stay_what_they_were_while_the_trainer_holds_them(broker: RunningBroker) -> None:
    with streampack.connect(broker.trainers, format="numpy") as loader:
        packs = list(loader)
    again = [(pack.input_ids.copy(), pack.labels.copy()) for pack in packs]
    assert all((pack.input_ids[:-1][pack.labels[:-1] >= 0] == ord("t")).all() for pack in packs)
    assert all((pack.input_ids == ids).all() for pack, (ids, _) in zip(packs, again, strict=True))
    assert len({pack.input_ids.__array_interface__["data"][0] for pack in packs}) == len(packs)


def test_a_bug_in_the_clients_thread_is_raised_where_the_trainer_waits(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(prefetch, "build_step", broken)
    with streampack.connect(broker.trainers, format="numpy") as loader, pytest.raises(InternalError, match="a bug"):
        next(iter(loader))


def test_a_closed_client_says_so(broker: RunningBroker) -> None:
    loader = streampack.connect(broker.trainers, format="numpy")
    next(iter(loader))
    loader.close()
    loader.close()
    with pytest.raises(UserError, match="is closed"):
        for _ in loader:
            pass


def test_steps_that_were_ready_are_not_given_after_close(broker: RunningBroker) -> None:
    for taken in (1, 2):  # in the middle of a step, and between two
        loader = streampack.connect(broker.trainers, format="numpy")
        for _ in range(taken):
            next(loader)
        until(lambda loader=loader: len(loader._reading._prefetching.ready) == 2)  # type: ignore[misc]
        loader.close()
        with pytest.raises(UserError, match="is closed"):
            next(loader)


def test_a_thread_that_waits_is_told_at_once_of_a_close(broker: RunningBroker) -> None:
    loader = streampack.connect(broker.trainers, mesh={"dp": 2, "dp_rank": 0}, format="numpy")  # rank 1 never comes
    said: list[UserError] = []

    def wait() -> None:
        try:
            next(loader)
        except UserError as error:
            said.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.3)
    began = time.monotonic()
    loader.close()
    thread.join(PATIENCE_S)
    assert "is closed" in str(said)
    assert time.monotonic() - began < 20, "and not when ranks have been waited for long enough"


def test_a_client_that_nobody_holds_gives_its_rank_up(broker: RunningBroker) -> None:
    """Else a notebook's cell could be run once: the process itself would hold the rank."""
    for _ in range(10):
        for pack in streampack.connect(broker.trainers, format="numpy"):
            assert pack.step == 0
            break
    assert not [thread for thread in threading.enumerate() if thread.name == "streampack-client"]
    steps = streampack.connect(broker.trainers, format="numpy").steps()
    assert sum(pack.num_samples for step in steps for pack in step) == 400


def use(loader: streampack.Client, said: Any) -> None:
    try:
        next(iter(loader))
    except PeerError as error:
        said.put(str(error))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_client_inherited_through_a_fork_is_refused(broker: RunningBroker) -> None:
    fork = multiprocessing.get_context("fork")
    said = fork.SimpleQueue()
    with streampack.connect(broker.trainers, format="numpy") as loader:
        child = fork.Process(target=use, args=(loader, said))
        child.start()
        child.join(PATIENCE_S)
        assert child.exitcode == 0
        assert "before the fork" in said.get()
        assert sum(pack.num_samples for pack in loader) == 400


def test_steps_are_returned_whoever_asks_for_the_next(broker: RunningBroker) -> None:
    """Steps and packs in turns, of one iteration."""
    with streampack.connect(broker.trainers, format="numpy") as loader:
        found: list[streampack.Pack] = []
        steps = loader.steps()
        while (step := next(steps, None)) is not None:
            found += step
            pack = next(loader, None)
            if pack is not None:
                found += [pack, next(loader)]
    assert sum(pack.num_samples for pack in found) == 400
    assert len(found) > 2 * 20


def test_a_finite_feed_begins_again_each_time_it_is_iterated(broker: RunningBroker) -> None:
    with streampack.connect(broker.trainers, format="numpy") as loader:
        begun = loader.state_dict()["round"]
        first = [step.digest for step in loader.steps()]
        broken_off = loader.steps()
        assert [next(broken_off).digest for _ in range(3)] == first[:3]
        packs = list(loader)
        assert next(broken_off, None) is None, "its iteration is over"
        assert len(packs) == 2 * len(first)
        assert sum(pack.num_samples for pack in packs) == 400
        assert [step.digest for step in loader.steps()] == first
        assert loader.state_dict()["round"] == begun + 3


def test_an_iterator_that_was_not_begun_begins_nothing(broker: RunningBroker) -> None:
    with streampack.connect(broker.trainers, format="numpy") as loader:
        begun = loader.state_dict()["round"]
        loader.steps()
        iter(loader)
        assert next(loader.steps()).index == 0
        assert loader.state_dict()["round"] == begun


def test_a_trainer_that_was_started_again_reads_from_the_beginning(broker: RunningBroker) -> None:
    with streampack.connect(broker.trainers, format="numpy") as loader:
        first = [step.digest for step, _ in zip(loader.steps(), range(12), strict=False)]
    with streampack.connect(broker.trainers, format="numpy") as loader:
        assert [step.digest for step in loader.steps()][:12] == first


def test_readers_must_be_ranks_of_the_mesh(broker: RunningBroker) -> None:
    with pytest.raises(MeshError, match=r"readers with tp ranks \[4\], expected tp ranks from -2 to 1"):
        streampack.connect(broker.trainers, mesh={"tp": 2, "tp_rank": 0}, readers={"tp": [4]})
    with pytest.raises(MeshError, match="expected one of the declared readers: tp=\\[0\\]"):
        streampack.connect(broker.trainers, mesh={"tp": 2, "tp_rank": 1}, readers={"tp": [0]})
    with pytest.raises(MeshError, match=r"readers: .*unknown field"):
        streampack.connect(broker.trainers, readers={"dp": [0]})
    with streampack.connect(
        broker.trainers,
        mesh={"tp": 2, "tp_rank": 0, "pp": 3, "pp_rank": 0},
        readers={"tp": [0], "pp": [0]},
        format="numpy",
    ) as loader:
        assert sum(pack.num_samples for pack in loader) == 400


def test_a_framework_that_shards_packs_itself_is_refused_their_shards(broker: RunningBroker) -> None:
    with pytest.raises(
        UserError,
        match="`cp_layout: contiguous`, expected `cp_layout: whole`, because Megatron's get_batch shards packs",
    ):
        streampack.connect(broker.trainers, mesh={"cp": 2, "cp_rank": 1}, format="megatron")


def test_the_word_that_a_failed_run_leaves_is_no_broker_and_the_next_run_s_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "streampack.json"
    file.write_text('{"epoch": 1, "failed": "the command failed there"}')
    with pytest.raises(Unreachable, match=r"of a run that has ended \(the command failed there\) within 0.1"):
        read_rendezvous(file, "trainers", 0.1)
    new = tmp_path / "new"
    new.write_text('{"epoch": 2, "trainers": "tcp://127.0.0.1:7"}')
    later = threading.Timer(0.3, new.replace, [file])
    later.start()
    assert read_rendezvous(file, "trainers", 20.0) == "tcp://127.0.0.1:7"
    later.join()


@pytest.mark.parametrize("limits", [{"timeout_s": 0.5}, {"stall_timeout_s": 0.5}], ids=str)
def test_a_wait_for_a_broker_that_is_not_there_ends_with_the_smaller_time_out(limits: dict[str, Any]) -> None:
    """``stall_timeout_s`` did not count before the first answer, so a wait of 8 s took 60 s."""
    began = time.monotonic()
    with pytest.raises(Unreachable, match=r"got no answer in 0\.5 s, expected an answer from a broker"):
        streampack.connect("tcp://127.0.0.1:9", format="numpy", **limits)
    assert time.monotonic() - began < 20.0


def test_a_wait_in_vain_names_the_address_of_the_environment_that_was_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMPACK_ENDPOINT", "ipc:///run/trainers")
    with pytest.raises(Unreachable, match="STREAMPACK_ENDPOINT names ipc:///run/trainers, which is not used"):
        streampack.connect("tcp://127.0.0.1:9", format="numpy", timeout_s=0.5)
