"""``why`` and ``ledger`` on a log on disk: while its broker runs, after it has ended, when it is damaged."""

from __future__ import annotations

import json
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from streampack_services.log.log import Log, read_entries

import streampack as sp
from streampack.core.journal.log_records import Record, StepFormed
from streampack.wire.record_frames import encode_record
from tests.integration.running import (
    RunningBroker,
    folder,
    in_process,
    running,
    streampack,
    the_error,
    write,
    write_jsonl,
)
from tests.services.recorded import Run, resealed, rows_in, two_lineages, without
from tests.soak.job import fixed_listen


def append(log: Log, records: list[Record]) -> None:
    for record in records:
        log.append(record.TYPE, encode_record(record))
    log.flush()


def open_log(folder: Path) -> Log:
    return Log.open(folder, durability="process", on_safe=lambda: None)


def ask(*arguments: str | Path) -> dict[str, Any]:
    """Return the JSON answer of a command, with its exit code as ``exit``."""
    result = in_process(*arguments, "--json")
    assert not result.stderr
    return {**json.loads(result.stdout), "exit": result.returncode}


@pytest.fixture(scope="module")
def run() -> Run:
    return two_lineages()


@pytest.fixture
def state_dir(run: Run, tmp_path: Path) -> Path:
    """Of a run that has ended."""
    log = open_log(tmp_path / "state")
    append(log, run.records)
    log.close()
    return tmp_path / "state"


def test_a_run_whose_broker_was_killed_is_in_the_ledger_as_the_trainer_got_it() -> None:
    """Real processes: every step, pack and sample id, while the broker runs, after its kill and at the end."""
    rows = [{"text": "" if i % 50 == 7 else "x" * (5 + i * 37 % 300)} for i in range(1200)]
    with folder() as path:
        sources = {
            name: {"source": "jsonl", "shards": str(write_jsonl(path / f"{name}.jsonl", rows[begin::2]))}
            for begin, name in enumerate(("web", "code"))
        }
        settings = {
            "listen": fixed_listen(path), "state_dir": str(path / "state"),
            "rules": {"budget": 256, "window": {"samples": 32}, "step": {"packs": 8}, "overlong": "split",
                      "poison": "drop"},
            "streams": {"web": {"partitions": 3, "weight": 0.7}, "code": {"partitions": 1, "weight": 0.3}},
        }  # fmt: skip
        where, steps = ("-c", path / "broker.yaml"), []
        with ExitStack() as stack:
            broker = RunningBroker(path, settings)
            stack.callback(lambda: broker.kill())
            producer = {"broker": broker.producers, "tokenizer": {"name": "bytes"}, "streams": sources}
            stack.enter_context(running("producer", "produce", "-c", write(path / "producer.yaml", producer)))
            with sp.connect(broker.trainers, format="numpy", prefetch=1) as loader:
                for step in loader.steps():
                    steps.append(step)
                    if step.index == 5:
                        assert ask("ledger", "verify", *where)["exit"] == 0
                    if step.index == 10:
                        broker.kill()
                        found = ask("ledger", "verify", *where)
                        assert (found["good"], found["feeds"]["train"]["ended"]) == (True, False)
                        broker = RunningBroker(path, settings)
            found = ask("ledger", "verify", *where)
        assert (found["good"], found["lost"], found["duplicated"], found["named"]) == (True, 0, 0, [])
        feed = found["feeds"]["train"]
        assert (feed["next_step"], feed["chain"], feed["ended"]) == (len(steps), steps[-1].chain, True)
        assert [(row["samples"], row["rejected"]) for row in feed["streams"].values()] == [(600, 0), (576, 24)]
        for step in steps[::7]:
            packs = ask("why", "--step", str(step.index), *where)["packs"]
            ids = {
                each["pack"]: [[("web", "code").index(s["stream"]), s["index"], s["part"]] for s in each["samples"]]
                for each in packs
            }
            assert ids == {pack.pack: pack.sample_ids.tolist() for pack in step}
            assert [each["offset"] for each in packs[3]["samples"]] == next(
                pack.cu_seqlens_padded[: pack.num_samples].tolist() for pack in step if pack.pack == 3
            )
        produce = ("-p", path / "producer.yaml")
        for line in (1, 101, 600):
            (found,) = ask("why", "--sample", f"web.jsonl:{line}", *where, *produce)["samples"]
            assert (found["is"], found["origin"]) == ("step", f"web.jsonl:line {line}")
            tokens = len(str(rows[2 * (line - 1)]["text"])) + 1
            assert sum(place["length"] for place in found["places"]) == tokens
            again = ask("why", "--sample", f"web:{found['index']}", *where, *produce)
            assert again["origin"] == f"web.jsonl:line {line}"
        found = ask("why", "--sample", "web:1", *where)
        assert (found["is"], found["origin"]) == ("none", None)
        assert "its sample n has index 3 * n + 1" in found["why"]
        said = the_error(in_process("why", "--sample", "web.jsonl:601", *where, *produce), 2)
        assert "The sources of the streams web, code have no row 'web.jsonl:601'" in said


def test_a_rank_of_a_mesh_is_shown_its_packs_alone(state_dir: Path) -> None:
    where = ("--state-dir", state_dir)
    every = ask("why", "--step", "3", "--dp-size", "4", *where)
    assert sorted(pack["pack"] for pack in every["packs"]) == list(range(8))
    for rank in range(4):
        packs = ask("why", "--step", "3", "--dp-size", "4", "--dp", str(rank), *where)["packs"]
        assert packs == [pack for pack in every["packs"] if pack["dp_rank"] == rank]
        assert [pack["micro_batch"] for pack in packs] == [0, 1]


def test_the_ledger_answers_from_records_of_a_running_broker(run: Run, tmp_path: Path) -> None:
    """Its lock is held; each question sees what came since the last."""
    folder = tmp_path / "state"
    config = write(tmp_path / "broker.yaml", {"state_dir": str(folder), "streams": {"web": {}, "code": {}}})
    log = open_log(folder)
    steps = [lsn for lsn, record in enumerate(run.records) if isinstance(record, StepFormed)]
    cuts = [0, steps[2], steps[5], len(run.records)]
    try:
        for begin, end in pairwise(cuts):
            append(log, run.records[begin:end])
            while len(list(read_entries(folder))) < end:
                pass
            found = ask("ledger", "verify", "-c", config)
            assert (found["exit"], found["good"], found["records"]) == (0, True, [0, end])
            formed = [record for record in run.records[:end] if isinstance(record, StepFormed)]
            assert found["feeds"]["train"]["next_step"] == (formed[-1].step + 1 if formed else 0)
    finally:
        log.close()
    assert found["feeds"]["train"]["ended"]


def test_a_lost_sample_is_named_and_the_exit_code_is_1(run: Run, tmp_path: Path) -> None:
    step = [r for r in run.records if isinstance(r, StepFormed) and r.lineage == 0][3]
    rows = rows_in(step)
    row = next(i for i in range(len(rows)) if rows[i]["length"] < 256 and rows[i]["part"] == 0)
    log = open_log(tmp_path / "state")
    append(log, resealed([without(step, row) if record is step else record for record in run.records]))
    log.close()
    result = streampack("ledger", "verify", "--state-dir", tmp_path / "state")
    assert result.returncode == 1
    name = f"{('web', 'code')[rows[row]['stream']]}:{rows[row]['index']}"
    assert "wrong: lost 1\n" in result.stdout
    assert f"  {name} is lost: the sample is in no step and was not rejected\n" in result.stdout
    assert ask("why", "--sample", name, "--state-dir", tmp_path / "state")["is"] == "none"


def test_a_damaged_ledger_is_refused_and_made_again_from_the_log(run: Run, state_dir: Path) -> None:
    right = ask("ledger", "verify", "--state-dir", state_dir)
    path = state_dir / "ledger.sqlite"
    good = path.read_bytes()
    step = next(r for r in run.records if isinstance(r, StepFormed) and r.step == 4)
    at = good.index(step.digest)
    path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
    line = the_error(streampack("why", "--step", "4", "--state-dir", state_dir), 1)
    assert "steps: the row with feed 'train', step 4" in line
    assert "Run 'streampack ledger rebuild'." in line
    assert ask("ledger", "verify", "--state-dir", state_dir)["findings"]["damaged"] == 1
    rebuilt = ask("ledger", "rebuild", "--state-dir", state_dir)
    assert (rebuilt["exit"], rebuilt["repaired"], rebuilt["gone"]) == (0, ["step 4 of train, lineage 0"], [])
    assert ask("ledger", "verify", "--state-dir", state_dir) == right
    again = ask("ledger", "rebuild", "--state-dir", state_dir)
    assert (again["repaired"], again["new"], again["kept"]) == ([], 0, again["rows"])
    path.write_bytes(b"no database at all" * 1000)
    assert "SQLite cannot read" in the_error(in_process("ledger", "verify", "--state-dir", state_dir), 1)
    assert len(ask("ledger", "rebuild", "--state-dir", state_dir)["damage"]) == 1
    assert ask("ledger", "verify", "--state-dir", state_dir) == right


def test_rebuilding_keeps_what_the_log_has_no_more(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    log = Log.open(folder, durability="process", segment_bytes=12 << 10, on_safe=lambda: None)
    for number, record in enumerate(run.records):
        for each in (record, run.records[0]) if number % 7 == 6 else (record,):  # as a broker says it again
            log.append(each.TYPE, encode_record(each))
            log.flush()
    log.close()
    right = ask("ledger", "verify", "--state-dir", folder)
    segments = sorted(folder.glob("*.log"))
    assert len(segments) > 3
    for segment in segments[:2]:
        segment.unlink()
    begin = int(segments[2].stem)
    rebuilt = ask("ledger", "rebuild", "--state-dir", folder)
    assert (rebuilt["log_begins"], rebuilt["gone"], rebuilt["new"]) == (begin, [], 0)
    assert ask("ledger", "verify", "--state-dir", folder) == right
    (folder / "ledger.sqlite").unlink()
    ask("ledger", "rebuild", "--state-dir", folder)
    found = ask("ledger", "verify", "--state-dir", folder)
    assert (found["exit"], found["good"]) == (1, False)


def test_a_step_or_sample_that_is_not_there_is_said_to_be_missing(run: Run, state_dir: Path, tmp_path: Path) -> None:
    where = ("--state-dir", state_dir)
    config = write(tmp_path / "broker.yaml", {"streams": {"web": {}}})
    for arguments, said in (
        (("why", *where), "Got neither --step nor --sample."),
        (("why", "--step", "1", "--sample", "web:1", *where), "Got both --step and --sample."),
        (("why", "--step", "1", "--dp", "1", *where), "Pass the number of data-parallel ranks as --dp-size."),
        (("why", "--step", "1"), "Got neither --state-dir nor --config."),
        (("why", "--step", "1", "-c", config), "has no state_dir, so its broker keeps no log"),
        (("why", "--step", "9999", *where), "the feed has ended"),
        (("ledger", "verify", "--state-dir", tmp_path), "has no log. Pass the state_dir of a broker"),
    ):
        assert said in the_error(in_process(*arguments), 2)
