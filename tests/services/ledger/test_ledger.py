"""The ledger knows where every sample went, and says when anything is not as the log recorded it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from streampack_services.audit.verify import verify
from streampack_services.audit.why import why_step
from streampack_services.audit.why_sample import why_sample
from streampack_services.ledger import step_rows
from streampack_services.ledger.ledger import Ledger
from streampack_services.ledger.run_history import RunHistory

from streampack.core.journal.log_records import (
    Base,
    FeedEnded,
    FeedFacts,
    Record,
    RulesChanged,
    SamplesRejected,
    SnapshotTaken,
    SourceAccepted,
    StepFormed,
)
from streampack.core.model.rules import Align, Rules, RulesChange, StreamRules
from streampack.core.model.samples import MEDIA_ROW, ROW
from streampack.core.model.snapshot import MIXED
from streampack.errors import LedgerDamaged, UserError
from tests.services.recorded import FEED, Run, doubling, entries, ledger_of, resealed, rows_in, with_rows, without
from tests.world.live import Live

PACKERS = ("exact_fill", "sliding_ffd", "first_fit_decreasing", "concatenative")
Actions = list[tuple[str, int, int]]


def rules_of(packer: str = "exact_fill", **changes: Any) -> Rules:
    exhaust = changes.pop("on_exhaust", "renormalise")
    streams = (StreamRules("a", 0.7, 2, overlong="split", on_exhaust=exhaust), StreamRules("b", 0.3, 1))
    changes = {"align": Align(sample=2, pack=4), "streams": streams, "packer": packer, **changes}
    return Rules(budget=64, window=8, packs=3, **changes)


def run_of(rules: Rules, lengths: list[list[int]], actions: Actions, *, finish: bool = True) -> Run:
    run = Run(rules, [list(each) for each in lengths])
    for what, number, count in actions:
        if what == "feed":
            run.feed(number % 3, count)
        elif what == "snapshot":
            run.take_snapshot()
        else:
            run.begin_lineage(number, 3 + count)
    if finish:
        run.finish()
    return run


lengths = st.lists(st.integers(0, 150), max_size=50)
actions = st.lists(
    st.tuples(st.sampled_from(["feed", "feed", "feed", "snapshot", "lineage"]), st.integers(0, 9), st.integers(1, 25)),
    max_size=12,
)
runs = st.builds(
    run_of,
    st.builds(
        rules_of, st.sampled_from(PACKERS), tail=st.sampled_from(["pad", "drop"]),
        on_exhaust=st.sampled_from(["renormalise", "stop"]),
    ),
    st.tuples(lengths, lengths, lengths).map(list),
    actions,
    finish=st.booleans(),
)  # fmt: skip


def effective_steps(records: list[Record]) -> dict[int, StepFormed]:
    """By number; said again by a later lineage."""
    found: dict[int, StepFormed] = {}
    for record in records:
        if isinstance(record, StepFormed):
            found = {step: each for step, each in found.items() if step < record.step}
            found[record.step] = record
        elif hasattr(record, "lineage") and hasattr(record, "step"):
            found = {step: each for step, each in found.items() if step < record.step}
    return found


def an_ended_run() -> Run:
    """Some 20 steps, with rejected and split samples, snapshots and a second lineage from about the middle."""
    rng = np.random.default_rng(5)
    sizes = [rng.integers(0, 90, size).tolist() for size in (70, 60, 50)]
    script: Actions = [("feed", p, 6) for _ in range(5) for p in (0, 1, 2)] + [("snapshot", 0, 1)]
    script += [("feed", p, 6) for _ in range(3) for p in (0, 1, 2)] + [("lineage", 0, 4)]
    return run_of(rules_of(), sizes, script)


@settings(max_examples=50)
@given(runs)
def test_nothing_is_found_in_a_run_that_is_as_it_should_be(run: Run) -> None:
    with ledger_of(run.records) as ledger:
        found = verify(ledger)
    assert found["named"] == []
    assert found["good"]
    feed = found["feeds"][FEED]
    steps = effective_steps(run.records)
    assert feed["steps"] == len(steps)
    assert feed["ended"] == run.ended
    rows = np.concatenate([rows_in(step) for step in steps.values()]) if steps else np.zeros(0, ROW)
    heads = rows[rows["part"] == 0]
    assert [feed["streams"][name]["samples"] for name in "ab"] == [int((heads["stream"] == s).sum()) for s in (0, 1)]
    assert sum(feed["streams"][name]["tokens"] for name in "ab") == int(rows["length"].sum())


@given(runs)
def test_the_ledger_knows_where_every_sample_of_every_step_is(run: Run) -> None:
    with ledger_of(run.records) as ledger:
        for number, step in effective_steps(run.records).items():
            found = why_step(ledger, number, dp_size=3)
            assert found["digest"] == step.digest.hex()
            assert {pack["dp_rank"] for pack in found["packs"]} == {0, 1, 2}
            in_order = [s for pack in sorted(found["packs"], key=lambda p: int(p["pack"])) for s in pack["samples"]]
            named = [("ab"[row["stream"]], *row[["index", "part", "length", "crc"]].tolist()) for row in rows_in(step)]
            assert [(s["stream"], s["index"], s["part"], s["length"], s["crc"]) for s in in_order] == named
            for pack in found["packs"]:
                filled = 0
                for sample in pack["samples"]:
                    assert sample["offset"] == filled
                    filled += -(-sample["length"] // 2) * 2
            for sample in in_order[:5]:
                where = why_sample(ledger, f"{sample['stream']}:{sample['index']}")
                assert where["is"] == "step"
                places = [place for place in where["places"] if place["counts"] and place["part"] == sample["part"]]
                assert [(place["step"], place["offset"]) for place in places] == [(number, sample["offset"])]


@given(runs, st.lists(st.integers(0, 60), max_size=6), st.integers(0, 5))
def test_a_ledger_updated_in_pieces_that_overlap_is_the_one_made_at_once(
    run: Run, cuts: list[int], overlap: int
) -> None:
    log = entries(run.records)
    with ledger_of(run.records) as whole, Ledger(Path(":memory:")) as ledger:
        for cut in sorted(cuts):
            ledger.update(log[max(ledger.state.next_lsn - overlap, 0) : cut])
        assert ledger.update(log) == len(log) - max([0, *(min(cut, len(log)) for cut in cuts)])
        assert ledger.update(log) == 0
        assert ledger.fingerprints() == whole.fingerprints()
        assert ledger.state == whole.state


@given(runs, st.data())
def test_rows_that_are_not_what_was_formed_are_found_and_named(run: Run, data: st.DataObject) -> None:
    steps = [step for step in effective_steps(run.records).values() if len(step.rows)]
    if not steps:
        return
    step = data.draw(st.sampled_from(steps))
    rows = rows_in(step)
    row = data.draw(st.integers(0, len(rows) - 1))
    flipped = rows.copy()
    flipped["crc"][row] ^= 1 << data.draw(st.integers(0, 31))
    counts = np.frombuffer(step.counts_u32, "<u4")
    mutant = data.draw(
        st.sampled_from([without(step, row), doubling(step, rows[row : row + 1]), with_rows(step, flipped, counts)])
    )
    with ledger_of([mutant if record is step else record for record in run.records]) as ledger:
        found = verify(ledger)
    assert not found["good"]
    assert any(
        f"step {step.step}" in line and "from the rows, expected the recorded digest" in line for line in found["named"]
    )


@pytest.fixture(scope="module")
def ended() -> Run:
    return an_ended_run()


def test_a_sample_that_no_step_has_is_lost_and_named(ended: Run) -> None:
    """As a broker that forgets one would have written it: digests and chains agree."""
    for step in list(effective_steps(ended.records).values())[::2]:
        for row in range(0, len(rows_in(step)), 3):
            gone = rows_in(step)[row]
            mutant = [without(step, row) if record is step else record for record in ended.records]
            with ledger_of(resealed(mutant)) as ledger:
                found = verify(ledger)
                name, part = f"{'ab'[gone['stream']]}:{gone['index']}", int(gone["part"])
                if is_last_piece(ended, gone):
                    continue  # nobody knows how long it was
                assert found["lost"] == 1
                assert any(
                    line.startswith(f"{name}{f' part {part}' if part else ''} is lost") for line in found["named"]
                )
                if not part and not has_pieces(ended, gone):
                    assert why_sample(ledger, name)["is"] == "none"


def pieces_of(run: Run, row: np.void) -> list[int]:
    """The parts of a sample that are in steps that count."""
    rows = np.concatenate([rows_in(step) for step in effective_steps(run.records).values()])
    return sorted(rows["part"][(rows["stream"] == row["stream"]) & (rows["index"] == row["index"])].tolist())


def has_pieces(run: Run, row: np.void) -> bool:
    return len(pieces_of(run, row)) > 1


def is_last_piece(run: Run, row: np.void) -> bool:
    return has_pieces(run, row) and pieces_of(run, row)[-1] == row["part"]


def test_a_sample_that_is_in_two_steps_is_named_with_both(ended: Run) -> None:
    steps = effective_steps(ended.records)
    for first, second in ((2, 9), (12, 3), (5, 5)):
        row = rows_in(steps[first])[1:2]
        mutant = [doubling(step, row) if step is steps[second] else step for step in ended.records]
        with ledger_of(resealed(mutant)) as ledger:
            found = verify(ledger)
        assert (found["lost"], found["duplicated"]) == (0, 1)
        name = f"{'ab'[row['stream'][0]]}:{row['index'][0]}"
        line = next(line for line in found["named"] if line.startswith(name))
        assert f"is in step {min(first, second)}, pack" in line
        assert f"and in step {max(first, second)}, pack" in line


def test_a_step_that_is_not_there_is_named(ended: Run) -> None:
    step = effective_steps(ended.records)[7]
    with ledger_of([record for record in ended.records if record is not step]) as ledger:
        found = verify(ledger)
        assert f"feed {FEED}: step 7 is missing" in found["named"]
        assert found["findings"]["lost"] >= len(np.unique(rows_in(step)["index"])) - 2
        with pytest.raises(UserError, match="Step 7 of feed 'train' is in neither the log nor the ledger"):
            why_step(ledger, 7)


def test_an_end_that_does_not_agree_is_found(ended: Run) -> None:
    end = next(record for record in ended.records if isinstance(record, FeedEnded))
    for other, said in (
        (replace(end, num_steps=end.num_steps + 2), f"step {end.num_steps} is missing"),
        (
            replace(end, num_steps=end.num_steps - 1),
            f"got step {end.num_steps - 1}, expected steps below {end.num_steps - 1}",
        ),
        (replace(end, chain=bytes(16)), "the chain of the last step differs from the recorded final chain"),
    ):
        with ledger_of([other if record is end else record for record in ended.records]) as ledger:
            assert any(said in line for line in verify(ledger)["named"])


def test_a_sample_lost_before_a_snapshot_is_found_while_the_feed_goes_on(ended: Run) -> None:
    at = max(lsn for lsn, record in enumerate(ended.records) if isinstance(record, SnapshotTaken))
    taken = ended.records[at]
    assert isinstance(taken, SnapshotTaken)
    steps = [record for record in ended.records[:at] if isinstance(record, StepFormed)]
    assert len(steps) > 3
    row = next(i for i, each in enumerate(rows_in(steps[2])) if not has_pieces(ended, each))
    mutant = resealed([without(step, row) if step is steps[2] else step for step in ended.records[: at + 3]])
    with ledger_of(mutant) as ledger:
        found = verify(ledger)
    assert found["lost"] == 1
    with ledger_of(ended.records[: at + 3]) as ledger:
        assert verify(ledger)["good"]


def test_one_step_recorded_twice_with_other_rows_is_a_contradiction(ended: Run) -> None:
    step = effective_steps(ended.records)[3]
    with ledger_of([*ended.records, step]) as ledger:
        assert verify(ledger)["good"], "the same again is no harm"
        ledger.update(entries([*ended.records, step, without(step, 0)]))
        assert any("step 3 of lineage 0 is recorded twice" in line for line in verify(ledger)["named"])


def test_rejected_samples_are_said_to_be_with_their_reason(ended: Run) -> None:
    record = next(record for record in ended.records if isinstance(record, SamplesRejected))
    index = int(np.frombuffer(record.indices_u64, "<u8")[0])
    with ledger_of([*ended.records, record]) as ledger:
        found = why_sample(ledger, f"{record.stream}:{index}")
        assert (found["is"], found["why"]) == ("rejected", "empty")
        streams = verify(ledger)["feeds"][FEED]["streams"]
        said = [r for r in ended.records if isinstance(r, SamplesRejected)]
        for name in "ab":
            every = [np.frombuffer(r.indices_u64, "<u8") for r in said if r.stream == name]
            assert streams[name]["rejected"] == len(np.unique(np.concatenate(every)))


def test_a_wrong_question_is_answered_with_what_there_is(ended: Run) -> None:
    with ledger_of(ended.records) as ledger:
        for name, said in (("c:1", "expected one of: a, b"), ("a", "expected STREAM:INDEX"), ("a:-1", "STREAM:INDEX")):
            with pytest.raises(UserError, match=said):
                why_sample(ledger, name)
        with pytest.raises(UserError, match="the feed has ended"):
            why_step(ledger, 1000)
        with pytest.raises(UserError, match="expected one of: train"):
            why_step(ledger, 0, "valid")
        with pytest.raises(UserError, match="expected a divisor of"):
            why_step(ledger, 0, dp_size=2)
        assert "ended after 70 samples" in why_sample(ledger, "a:140")["why"]


@given(runs)
def test_a_log_that_begins_with_a_checkpoint_knows_what_came_before(run: Run) -> None:
    """As on another host: its first step is not 0."""
    if run.lineage or not run.snapshots:
        return
    taken = run.snapshots[0]
    first, log = taken.snapshot.step, [run.records[0], taken]
    log += [record for record in run.records[1:] if not isinstance(record, StepFormed) or record.step >= first]
    with ledger_of(log) as ledger:
        found = verify(ledger)
        assert found["named"] == []
        assert found["feeds"][FEED]["steps"] == 0 or found["feeds"][FEED]["first_step"] == first


def test_a_cut_log_is_said_not_to_know_what_came_before(ended: Run) -> None:
    """A broker that goes on from a checkpoint alone: no sample is called lost before its first snapshot."""
    rest = [r for r in ended.records if not isinstance(r, StepFormed) or r.step > 3]
    with ledger_of([r for r in rest if not isinstance(r, SnapshotTaken)]) as ledger:
        found = verify(ledger)
    assert (found["good"], found["lost"], found["feeds"][FEED]["all_known"]) == (True, 0, False)
    with ledger_of(rest) as ledger:
        found = verify(ledger)
    assert (found["named"], found["feeds"][FEED]["first_step"], found["feeds"][FEED]["all_known"]) == ([], 4, True)
    last = [r for r in rest if isinstance(r, StepFormed)][-2]
    row = next(i for i, each in enumerate(rows_in(last)) if not has_pieces(ended, each))
    with ledger_of([without(last, row) if r is last else r for r in rest]) as ledger:
        assert verify(ledger)["lost"] == 1


@given(st.integers(0, 999), st.sampled_from(PACKERS), st.sampled_from(["pad", "drop"]), st.data())
@settings(max_examples=20)
def test_steps_whose_records_a_log_lost_are_not_recorded_here_and_no_sample_is_called_lost(
    seed: int, packer: str, tail: str, data: st.DataObject
) -> None:
    """The end of the log went with the power; trainers resumed after it from a checkpoint, as ``taken`` says."""
    rng = np.random.default_rng(seed)
    script: Actions = [("feed", p, 6) for _ in range(data.draw(st.integers(3, 8))) for p in (0, 1, 2)]
    sizes = [rng.integers(0, 150, size).tolist() for size in (70, 60, 50)]
    run = run_of(rules_of(packer, tail=tail), sizes, [*script, ("snapshot", 0, 1)], finish=data.draw(st.booleans()))
    run.feed(0, 9)
    steps = [record for record in run.records if isinstance(record, StepFormed)]
    (taken,) = run.snapshots
    assert taken.snapshot.step
    first = data.draw(st.integers(0, taken.snapshot.step - 1))
    cut, back = run.records.index(steps[first]), run.records.index(taken)
    lost = run.records[cut:back]
    again = [record for record in lost if isinstance(record, SamplesRejected)]  # producers read from the floors on
    with ledger_of([*run.records[:cut], *run.records[back:], *again]) as ledger:
        found = verify(ledger)
        assert found["named"] == []
        assert found["feeds"][FEED]["not_recorded"] == [[first, taken.snapshot.step - 1]]
        said = f"one of steps {first} to {taken.snapshot.step - 1}, which are not recorded here"
        for step in (record for record in lost if isinstance(record, StepFormed)):
            with pytest.raises(UserError, match=said):
                why_step(ledger, step.step)
            for stream, index, part in rows_in(step)[["stream", "index", "part"]].tolist():
                found = why_sample(ledger, f"{'ab'[stream]}:{index}")
                assert part or said in found["why"] or found["is"] == "step"
        for step in (record for record in run.records[back:] if isinstance(record, StepFormed)):
            for stream, index in rows_in(step)[["stream", "index"]].tolist():
                assert why_sample(ledger, f"{'ab'[stream]}:{index}")["is"] == "step"


def test_a_real_broker_whose_trainers_resume_beyond_its_log_leaves_a_gap_that_is_named() -> None:
    rules = Rules(budget=32, packs=2, window=4, seed=3, streams=(StreamRules("web", 1.0, 1),))
    live = Live(rules, {"web": [[7, 3, 12, 9, 5, 16, 0, 2, 8] * 30]}, 4)
    live.read(30)
    state = live.state(30)
    assert state.snapshot is not None
    resumed = state.snapshot.step
    had = [record for record in live.records() if isinstance(record, StepFormed)]
    del live.disk.records[live.records().index(had[10]) :]
    live.start_broker()
    live.go_back(30, state)
    live.finish()
    with ledger_of(live.records()) as ledger:
        found = verify(ledger)
        assert (found["named"], found["good"]) == ([], True)
        feed = found["feeds"]["train"]
        assert (feed["not_recorded"], feed["ended"]) == ([[10, resumed - 1]], True)
        with pytest.raises(UserError, match=f"one of steps 10 to {resumed - 1}, which are not recorded here"):
            why_step(ledger, 12)
        for record in had:
            expected = "unrecorded" if 10 <= record.step < resumed else "step"
            for index in rows_in(record)["index"].tolist():
                assert why_sample(ledger, f"web:{index}")["is"] == expected


def test_a_change_of_rules_is_told_at_the_step_where_it_came_into_force() -> None:
    run = run_of(rules_of(), [[20] * 60, [20] * 60, [20] * 60], [("feed", p, 20) for p in (0, 1, 2)], finish=False)
    step = run.former.next_step
    rules = replace(run.rules, streams=(replace(run.rules.streams[0], weight=0.5), run.rules.streams[1]))
    asked = RulesChange(step=step, position=-1, rules=rules, note="a=0.5")
    run.records.append(RulesChanged(feed=FEED, change=asked))
    run.records.append(RulesChanged(feed=FEED, change=replace(asked, step=step + 1, position=40)))
    run.finish()
    with ledger_of(run.records) as ledger:
        assert verify(ledger)["good"]
        assert why_step(ledger, step)["changes"] == []
        changes = why_step(ledger, step + 1)["changes"]
    assert changes == [{"note": "a=0.5", "differences": ["streams.a.weight: 0.7 -> 0.5"]}]


# Damage


def answers(ledger: Ledger) -> list[Callable[[], Any]]:
    samples = [partial(why_sample, ledger, name) for name in ("a:3", "b:900")]
    return [partial(why_step, ledger, 2), *samples]


def test_every_flipped_byte_changes_nothing_or_is_noticed(ended: Run, tmp_path: Path) -> None:
    """Each answer is the right one, or an error or a finding that names the ledger's damage."""
    path = tmp_path / "ledger.sqlite"
    records = ended.records[:40]
    with ledger_of(records, path) as ledger:
        right = [verify(ledger), *(answer() for answer in answers(ledger))]
    whole = path.read_bytes()
    rng = np.random.default_rng(3)
    noticed = 0
    for at in rng.choice(len(whole), 400, replace=False).tolist():
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            with Ledger(path) as ledger:
                found = verify(ledger)
                if found != right[0]:
                    assert found["findings"].get("damaged"), (at, found["named"])
                    noticed += 1
                for answer, expected in zip(answers(ledger), right[1:], strict=True):
                    try:
                        assert answer() == expected
                    except LedgerDamaged:
                        assert found != right[0]
        except LedgerDamaged:
            noticed += 1
    assert noticed > 50


def test_a_row_that_is_gone_or_changed_is_named(ended: Run, tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger_of(ended.records, path).close()
    for statement, said in (
        ("UPDATE steps SET step = 500 WHERE step = 4", "steps: the row with feed"),
        (
            "UPDATE spans SET hi = hi + 1 WHERE lo = (SELECT min(lo) FROM spans)",
            "spans: the row with stream",
        ),
        ("DELETE FROM spans WHERE lo = (SELECT min(lo) FROM spans)", "spans: got"),
        ("DELETE FROM rejected WHERE lsn = (SELECT min(lsn) FROM rejected)", "rejected: got"),
    ):
        whole = path.read_bytes()
        with sqlite3.connect(path) as db:
            db.execute(statement)
        db.close()
        with Ledger(path) as ledger:
            assert any(line.startswith(said) for line in verify(ledger)["named"]), statement
        path.write_bytes(whole)


def test_another_log_than_the_one_that_was_read_is_noticed(ended: Run) -> None:
    with ledger_of(ended.records[:30]) as ledger:
        with pytest.raises(LedgerDamaged, match="record 29 of the log differs from the record that"):
            ledger.update(entries([*ended.records[:29], ended.records[35], *ended.records[30:]], 29))
        with pytest.raises(LedgerDamaged, match="begins with record 33, but records 30 to 32 are not in the ledger"):
            ledger.update(entries(ended.records, 33))
        ledger.forget(10)
        ledger.update(entries(ended.records, 10))
        with ledger_of(ended.records) as whole:
            assert ledger.fingerprints() == whole.fingerprints()
            assert ledger.state == whole.state


# Rows

columns = st.tuples(
    st.integers(0, 3), st.integers(0, 2**62), st.integers(0, 2**31 - 1), st.integers(1, 2**31 - 1), st.integers(0, 1),
    st.integers(0, 2**32 - 1),
)  # fmt: skip


media_columns = st.tuples(
    st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1), st.integers(0, 2**62), st.integers(0, 2**62)
)  # fmt: skip


@given(
    st.lists(st.lists(columns, max_size=6), min_size=1, max_size=5), st.binary(min_size=16, max_size=16), st.data()
)  # fmt: skip
def test_a_step_comes_back_from_its_row(packs: list[list[Any]], digest: bytes, data: st.DataObject) -> None:
    """With and without shared tokens and media, which other steps have no columns for."""
    rows = np.array([row for pack in packs for row in pack], ROW)

    def drawn(values: Any, dtype: Any) -> tuple[Any, bytes | UnsetType]:
        """A column of a value for each sample, and how a record has it."""
        every = st.lists(values, min_size=len(rows), max_size=len(rows))
        found = np.array(data.draw(every), dtype) if data.draw(st.booleans()) else np.zeros(len(rows), dtype)
        has = found["items"] if found.dtype == MEDIA_ROW else found
        return found, found.tobytes() if has.any() else UNSET

    shared, shares = drawn(st.integers(0, 2**31 - 1), "<u4")
    counts, media = drawn(media_columns, MEDIA_ROW)
    step = StepFormed(
        feed=FEED, lineage=1, step=7, digest=digest, chain=digest[::-1], num_loss_tokens=2**40, num_samples=len(rows),
        counts_u32=np.array([len(pack) for pack in packs], "<u4").tobytes(), rows=rows.tobytes(), released=0,
        shares=shares, media=media,
    )  # fmt: skip
    before = step_rows.rows_of(step, 9)
    after = step_rows.decode(FEED, 1, 7, 9, step_rows.encode(before))
    assert after.rows.tobytes() == rows.tobytes()
    assert after.column("shared").tolist() == shared.tolist()
    of_media = after.extras[list(MEDIA_ROW.names or ())]
    assert of_media.tolist() == (counts if media else np.zeros(len(rows), MEDIA_ROW)).tolist()
    assert after.bounds.tolist() == before.bounds.tolist()
    assert (after.digest, after.chain, after.num_loss_tokens) == (digest, digest[::-1], 2**40)


def test_a_source_whose_order_is_put_right_later_is_read_in_the_right_order() -> None:
    """A producer came before the checkpoint of an earlier version did, whose order then holds."""
    rules = Rules(streams=(StreamRules("a"),))
    history = RunHistory()
    history.add(0, Base(run=1, run_name="run", epoch=1, feeds={"train": FeedFacts(rules=rules)}, streams={}))
    first = SourceAccepted(stream="a", source_digest="data", begin=(MIXED, 0, 0))
    assert [history.add(1, first), history.add(2, first)] == [True, False]
    assert history.feeds["train"].begin_of("a") == (MIXED, 0, 0)
    assert history.add(3, SourceAccepted(stream="a", source_digest="data"))
    assert history.feeds["train"].begin_of("a") == (0, 0, 0)


def test_the_history_tells_which_settings_of_dynamic_cp_dealt_a_step() -> None:
    history = RunHistory()
    settings = ["dynamic rank_tokens=64 max_group=8", "", "", "dynamic rank_tokens=128 max_group=8"]
    for lsn, dealt_by in enumerate(settings):
        facts = FeedFacts(rules=Rules(), dealt_by=dealt_by or UNSET)
        is_new = history.add(10 * lsn, Base(run=1, run_name="r", epoch=lsn, feeds={"train": facts}, streams={}))
        assert is_new == (lsn != 2), "a fact that is repeated is not stored again"
    feed = history.feeds["train"]
    assert feed.dealt_at(5) == (settings[0], ["", settings[3]])
    assert feed.dealt_at(25) == ("", [settings[3]])
    assert feed.dealt_at(31) == (settings[3], [])
