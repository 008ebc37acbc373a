"""``streampack replay``: steps of real runs again, each equal to what a trainer got, or a line that says why not."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streampack_services.broker.authorization import new_key
from streampack_services.broker.service import BrokerService
from streampack_services.log.log import Log, read_entries

import streampack as sp
from streampack.config.config_files import read_broker
from streampack.core.journal.log_records import Base
from streampack.packs.step import Step
from streampack.wire.record_frames import decode_record, encode_record
from tests.integration.running import (
    Daemon,
    RunningBroker,
    folder,
    in_process,
    running,
    streampack,
    the_error,
    until,
    write,
    write_jsonl,
)
from tests.integration.samples.pushed_run import pushed_group, pushed_settings
from tests.soak.job import fixed_listen

STREAMS, PARTITIONS = ("web", "code"), (3, 1)
KILLED_AT, CHANGED_AT, SKIPPED = 25, 40, 60
TOKENIZER = """
import os, time
def encode(text):
    time.sleep(float(os.environ.get("TOKENIZER_SLEEPS", "0")))
    return list(text.encode())
"""


def ask(*arguments: str | Path) -> dict[str, Any]:
    """What the command says as JSON, and its exit code as ``exit``."""
    result = in_process("replay", *arguments, "--json")
    assert not result.stderr
    return {**json.loads(result.stdout), "exit": result.returncode}


def same(step: Step, path: Path) -> None:
    """The file holds what the trainer got, to the bit."""
    with np.load(path) as written:
        assert (str(written["digest"]), str(written["chain"])) == (step.digest, step.chain)
        assert int(written["num_loss_tokens"]) == step.num_loss_tokens
        names = set(written.files)
        for pack in step:
            for key, value in pack.items():
                name = f"dp{pack.dp_rank}.cp{pack.cp_rank}.{pack.micro_batch}.{key}"
                got, expected = written[name], np.asarray(value)
                assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
                assert got.tobytes() == expected.tobytes(), name
                names.remove(name)
        assert names == {"step", "lineage", "digest", "chain", "num_loss_tokens", "num_samples", "streams"}


def files_of(state_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in state_dir.glob("*.log")}


@dataclass
class Run:
    path: Path
    steps: dict[int, Step]
    where: tuple[str | Path, ...]
    rows: list[dict[str, str]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Read to its end, by one trainer, with keys; the broker was killed, weights were changed, a step was skipped."""
    rows = [{"text": "" if i % 50 == 7 else chr(97 + i % 26) * (5 + i * 37 % 300)} for i in range(1200)]
    with folder() as path, ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        (path / "tokenizer_of_replay.py").write_text(TOKENIZER)
        patch.syspath_prepend(path)
        patch.setenv("PYTHONPATH", str(path), prepend=os.pathsep)
        streams = {
            name: {
                "source": "jsonl",
                "shards": str(write_jsonl(path / f"{name}.jsonl", rows[begin::2])),
                "shuffle": False,
            }
            for begin, name in enumerate(STREAMS)
        }
        new_key(path / "keys", "trainers", "trainer", {})
        key_file = str(path / "keys" / "broker.key")
        settings = {
            "listen": {**fixed_listen(path), "keys": str(path / "keys")},
            "state_dir": str(path / "state"), "planned_mesh": {"dp": 2, "cp": 2},
            "rules": {"budget": 256, "window": {"samples": 32}, "step": {"packs": 8}, "overlong": "split",
                      "poison": "drop"},
            "streams": {"web": {"partitions": 3, "weight": 0.7}, "code": {"partitions": 1, "weight": 0.3}},
        }  # fmt: skip
        broker = RunningBroker(path, settings)
        stack.callback(lambda: broker.kill())
        config = {"broker": broker.producers, "key_file": key_file}
        config |= {"tokenizer": {"name": "tokenizer_of_replay:encode"}, "streams": streams}
        producer = write(path / "producer.yaml", config)
        where = ("-c", path / "broker.yaml", "-p", producer)
        found: dict[int, Step] = {}
        with (
            running("producer", "produce", "-c", producer),
            sp.connect(broker.trainers, format="numpy", prefetch=1, key_file=key_file) as loader,
        ):
            for step in loader.steps():
                found[step.index] = step
                if step.index == KILLED_AT:
                    broker.kill()
                    broker = RunningBroker(path, settings)
                if step.index == CHANGED_AT:
                    assert in_process("set", "weights", "code=0.6", "-e", broker.http).returncode == 0
                    assert in_process("skip", "--steps", str(SKIPPED), "-e", broker.http).returncode == 0
                    for number in (0, 11, CHANGED_AT):  # beside the broker, whose log goes on
                        again = ask("--step", str(number), *where, "-o", path / "running.npz")
                        assert (again["exit"], again["equal"]) == (0, True)
                        same(found[number], path / "running.npz")
        broker.kill()
        yield Run(path, found, where, rows)


def test_steps_of_a_run_that_has_ended_are_what_the_trainer_got(run: Run, tmp_path: Path) -> None:
    before, last = files_of(run.path / "state"), max(run.steps)
    for number in (0, 1, KILLED_AT, KILLED_AT + 1, CHANGED_AT + 10, SKIPPED + 1, last - 1, last):
        found = ask("--step", str(number), *run.where, "--out", tmp_path / "step.npz")
        step = run.steps[number]
        assert (found["exit"], found["equal"], found["digest"], found["chain"]) == (0, True, step.digest, step.chain)
        assert (found["num_samples"], found["num_loss_tokens"]) == (step.num_samples, step.num_loss_tokens)
        assert {pack["pack"]: pack["micro_batch"] for pack in found["packs"]} == {
            pack.pack: pack.micro_batch for pack in step
        }
        same(step, tmp_path / "step.npz")
    assert files_of(run.path / "state") == before, "the run's own log was touched"


def test_a_skipped_step_can_be_looked_at(run: Run) -> None:
    assert SKIPPED not in run.steps
    found = ask("--step", str(SKIPPED), *run.where)
    assert (found["equal"], found["skipped"], found["num_samples"] > 0) == (True, True, True)


def test_every_rank_of_a_mesh_gets_its_part_of_the_same_packs(run: Run, tmp_path: Path) -> None:
    shown = streampack("replay", "--step", "33", *run.where, "--dp", "4", "--cp", "2", "-o", tmp_path / "mesh.npz")
    assert shown.returncode == 0, shown.stderr
    assert not shown.stderr, "quiet where nobody looks"
    assert run.steps[33].digest in shown.stdout
    whole = {pack.pack: pack for pack in run.steps[33]}
    with np.load(tmp_path / "mesh.npz") as mesh:
        seen = []
        for dp, cp, micro_batch in np.ndindex(4, 2, 2):
            prefix = f"dp{dp}.cp{cp}.{micro_batch}"
            number = int(mesh[f"{prefix}.pack"])
            seen.append(number)
            places = np.concatenate([np.arange(*each) for each in mesh[f"{prefix}.slices"]])
            assert np.array_equal(mesh[f"{prefix}.input_ids"], whole[number].input_ids[places])
            assert np.array_equal(mesh[f"{prefix}.labels"], whole[number].labels[places])
    assert sorted(seen) == sorted([*whole, *whole])


def test_a_log_that_cannot_be_replayed_is_refused_in_one_line(run: Run, tmp_path: Path) -> None:
    last = max(run.steps)
    elsewhere = write(tmp_path / "other.yaml", json.loads(run.where[1].read_text()) | {"seed": 5})  # type: ignore[union-attr]
    for arguments, said in (
        (("--step", str(last + 1), *run.where), "the feed has ended"),
        (
            ("--step", "3", *run.where, "--lineage", "2"),
            "Step 3 of feed 'train' is not recorded in lineage 2. Lineages with this step: 0.",
        ),
        (("--step", "3", *run.where, "--feed", "valid"), "got feed 'valid', expected one of: train"),
        (("--step", "3", *run.where, "--dp", "3"), "got dp=3"),
        (("--step", "3", *run.where[:2]), "No producer.yaml has stream code, web"),
        (("--step", "3", "-c", elsewhere, *run.where[2:]), "seed"),
        (("--step", "3", *run.where, "-o", tmp_path / "no" / "step.npz"), "does not exist. Create the folder"),
        (("--step", "3", *run.where, "--state-dir", tmp_path), "has no log. Pass the state_dir"),
    ):
        assert said in the_error(in_process("replay", *arguments), 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_replay_that_is_told_to_stop_leaves_nothing_behind(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setenv("TOKENIZER_SLEEPS", "30")
    with folder() as temporary:
        monkeypatch.setenv("TMPDIR", str(temporary))
        daemon = Daemon(tmp_path, "replay", "replay", "--step", "3", *run.where)
        try:
            until(lambda: any(temporary.glob("*/trainers")))
            daemon.signal(number)
            assert daemon.end() == 128 + number
        finally:
            daemon.kill()
        assert not list(temporary.iterdir())
        assert not daemon.said


@pytest.mark.parametrize("number", [2, 33, 45])
def test_a_sample_that_has_changed_is_named(run: Run, tmp_path: Path, number: int) -> None:
    """As long as before: nothing but its checksum tells."""
    stream, index, _ = run.steps[number].sample_ids[-1].tolist()
    row = 2 * (index // PARTITIONS[stream]) + stream  # one file: it is of partition 0
    changed = [dict(each) for each in run.rows]
    changed[row]["text"] = changed[row]["text"].upper()
    assert changed[row] != run.rows[row]
    config = json.loads((run.path / "producer.yaml").read_text())
    for begin, name in enumerate(STREAMS):
        config["streams"][name]["shards"] = str(write_jsonl(tmp_path / f"{name}.jsonl", changed[begin::2]))
    where = ("-c", run.path / "broker.yaml", "-p", write(tmp_path / "producer.yaml", config))
    line = the_error(in_process("replay", "--step", str(number), *where), 1)
    assert f"{STREAMS[stream]}:{index}" in line
    write_jsonl(tmp_path / "web.jsonl", run.rows[:40])
    line = the_error(in_process("replay", "--step", str(number), *where), 1)
    assert "stream 'web': got source digest" in line


def test_a_replay_in_which_nothing_moves_gives_up(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZER_SLEEPS", "30")
    line = the_error(in_process("replay", "--step", "3", *run.where, "--timeout", "1"), 75)
    assert "step 3: no progress for 1 s: waiting for samples: the next sample has not come from stream" in line


def test_steps_of_pushed_samples_need_no_producer(tmp_path: Path) -> None:
    """Also of a lineage that counts no more: trainers went back, and what was pushed since was dropped."""
    with folder() as path:
        feeds = {"train": {"on_rewind": "discard"}}
        broker = RunningBroker(path, pushed_settings(path, feeds=feeds))
        first: dict[int, Step] = {}
        second: dict[int, Step] = {}
        try:
            with (
                sp.Producer(broker.producers, stream="rollouts", partition=0) as one,
                sp.Producer(broker.producers, stream="rollouts", partition=1) as two,
            ):

                def push(numbers: range) -> None:
                    for number in numbers:
                        one.send_group(pushed_group(number))
                        two.send_group(pushed_group(number + 100))
                    one.flush()
                    two.flush()

                push(range(20))  # six steps and a half
                state: dict[str, Any] = {}
                with sp.connect(broker.trainers, format="numpy") as loader:
                    for step in loader.steps():
                        first[step.index] = step
                        if step.index == 3:
                            list(step)
                            state = loader.state_dict()
                            push(range(20, 45))
                        if step.index == 9:
                            break
                with sp.connect(broker.trainers, format="numpy") as loader:
                    loader.load_state_dict(state)
                    steps = loader.steps()
                    until(lambda: broker.feed()["lineage"] == 1)  # or these are dropped, too
                    push(range(45, 90))
                    for step in steps:
                        second[step.index] = step
                        if step.index == 9:
                            break
        finally:
            broker.kill()
        where, out = ("-c", path / "broker.yaml"), tmp_path / "step.npz"
        for number, lineage, step in [
            (0, 0, first[0]), (3, 0, first[3]), (9, 0, first[9]), (4, 1, second[4]), (9, 1, second[9]),
        ]:  # fmt: skip
            found = ask("--step", str(number), "--lineage", str(lineage), *where, "-o", out)
            assert (found["equal"], found["counts"]) == (True, number < 4 or lineage == 1)
            same(step, out)
        assert first[9].digest != second[9].digest
        assert ask("--step", "9", *where)["digest"] == second[9].digest


def shortened(config: Path, into: Path, segments: int) -> Path:
    """A copy of a run's log, in ``into``, of short segments the first of which are cut; its broker.yaml."""
    settings = read_broker(config)
    where = {side: f"ipc://{into}/{side}" for side in ("producers", "trainers")}
    tree = json.loads(config.read_text()) | {"state_dir": str(into / "state")}
    copy = write(into / "broker.yaml", tree | {"listen": {**where, "http": "127.0.0.1:0"}})
    log = Log.open(into / "state", durability="process", segment_bytes=12 << 10, on_safe=lambda: None)
    broker = BrokerService(
        read_broker(write(into / "no.yaml", {**tree, "state_dir": str(into / "no"), "listen": where}))
    )
    broker.close()
    core, lsn = broker.core, 0
    for entry in read_entries(Path(settings.state_dir or "")):
        record, payload = decode_record(entry.kind, entry.body)
        lsn = log.append(entry.kind, encode_record(record, payload))
        log.flush()
        core.recover(lsn, record)
        if lsn % 7 == 6:  # as a broker says it again before it cuts
            core.journal.next_lsn = log.append(Base.TYPE, encode_record(core.base())) + 1
    log.close()
    files = sorted((into / "state").glob("*.log"))
    assert len(files) > segments + 2
    assert in_process("ledger", "rebuild", "-c", copy).returncode == 0
    for file in files[:segments]:
        file.unlink()
    return copy


def test_steps_that_only_the_ledger_still_has_are_formed_from_the_first_sample_on(run: Run, tmp_path: Path) -> None:
    with folder() as path:
        config = shortened(run.path / "broker.yaml", path, 2)
        for number in (2, 30, max(run.steps)):
            found = ask("--step", str(number), "-c", config, *run.where[2:], "-o", tmp_path / "step.npz")
            assert (found["exit"], found["equal"]) == (0, True)
            same(run.steps[number], tmp_path / "step.npz")


def test_the_oldest_step_is_named_where_the_log_has_lost_what_was_pushed(tmp_path: Path) -> None:
    with folder() as path, folder() as other:
        streams = {"rollouts": {"pushed": True, "partitions": 1}}
        broker = RunningBroker(path, pushed_settings(path, streams=streams))
        steps: dict[int, Step] = {}
        try:
            with sp.Producer(broker.producers, stream="rollouts") as rollouts:
                for number in range(200):
                    rollouts.send_group(pushed_group(number))
                rollouts.close(end=True)
            with sp.connect(broker.trainers, format="numpy") as loader:
                steps.update({step.index: step for step in loader.steps()})
        finally:
            broker.kill()
        config = shortened(path / "broker.yaml", other, 2)
        line = the_error(in_process("replay", "--step", "1", "-c", config), 2)
        found = re.search(r"Step 1 of feed 'train' cannot be formed again.* Pass step (\d+) or a later step", line)
        assert found, line
        oldest = int(found[1])
        assert 1 < oldest < max(steps)
        for number in (oldest, oldest + 1, max(steps)):
            assert ask("--step", str(number), "-c", config, "-o", tmp_path / "step.npz")["equal"]
            same(steps[number], tmp_path / "step.npz")
        line = the_error(in_process("replay", "--step", str(oldest - 1), "-c", config), 2)
        assert f"Pass step {oldest} or a later step" in line


def test_steps_around_a_stage_are_formed_again_by_its_rules(tmp_path: Path) -> None:
    """The budget is four times as large from step 4 on, and smaller again from step 7 on; long samples are split."""
    rows = [{"tokens": list(range(i, i + 5 + i * 37 % 300))} for i in range(600)]
    stages = [
        {"name": "long", "at": {"step": 4}, "rules": {"budget": 256, "step": {"packs": 2}}, "over": 3,
         "weights": {"web": 0.5, "code": 0.5}},
        {"name": "short", "at": {"step": 7}, "rules": {"budget": 32, "step": {"packs": 8}, "packer": "sliding_ffd"}},
    ]  # fmt: skip
    with folder() as path, ExitStack() as stack:
        streams = {name: {"source": "jsonl", "shards": str(write_jsonl(path / f"{name}.jsonl", rows[at::2]))}
                   for at, name in enumerate(STREAMS)}  # fmt: skip
        settings = {
            "listen": fixed_listen(path), "state_dir": str(path / "state"),
            "rules": {"budget": 64, "window": {"samples": 16}, "step": {"packs": 4}, "overlong": "split"},
            "streams": {"web": {"weight": 0.7}, "code": {"weight": 0.3}}, "stages": stages,
        }  # fmt: skip
        broker = RunningBroker(path, settings)
        stack.callback(broker.kill)
        producer = write(path / "producer.yaml", {"broker": broker.producers, "streams": streams})
        with (
            running("producer", "produce", "-c", producer),
            sp.connect(broker.trainers, format="numpy", prefetch=1) as loader,
        ):
            steps = loader.steps()
            found = [next(steps) for _ in range(20)]
        broker.kill()
        where = ("-c", path / "broker.yaml", "-p", producer)
        for number in (4, 8):
            again = ask("--step", str(number), *where, "-o", tmp_path / "step.npz")
            assert (again["exit"], again["equal"]) == (0, True), number
            same(found[number], tmp_path / "step.npz")
        shown = in_process("why", "--step", "0-19", *where, "--text", "--json")
        texts = json.loads(shown.stdout)["steps"]
    assert [texts[number]["stage"]["name"] for number in (3, 4, 7, 19)] == ["start", "long", "short", "short"]
    assert [(texts[n]["stage"]["budget"], texts[n]["num_packs"]) for n in (3, 4, 19)] == [(64, 4), (256, 2), (32, 8)]
    samples = [sample for step in texts for pack in step["packs"] for sample in pack["samples"]]
    assert any(sample["part"] > 1 for sample in samples)
    for sample in samples:
        assert len(sample["tokens"]) == sample["length"]
    assert all(sample["same"] for sample in samples), "each piece is cut by the limit of its time"
