"""Groups: no pack, or step, splits one, whatever packs it, however it comes and whoever is killed."""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from streampack.core.deal.step_cache import KeptSteps
from streampack.core.form.former import Former
from streampack.core.intake.admission import Admission
from streampack.core.intake.chunk_check import ReceivedChunk, parse_chunk
from streampack.core.intake.intake import Intake
from streampack.core.intake.overlong import apply_terms
from streampack.core.journal.key_index import KeyIndex
from streampack.core.journal.log_records import (
    BatchMarked,
    ChunkAdmitted,
    LineageBegan,
    Record,
    SamplesRejected,
    StepFormed,
)
from streampack.core.media.media_format import encode
from streampack.core.merge.feed_merge import FeedMerge
from streampack.core.merge.schedule import merge_of
from streampack.core.model.fields import Field
from streampack.core.model.keys.planning_keys import Balance, MediaLimits
from streampack.core.model.keys.stream_keys import Overlong
from streampack.core.model.lease_terms import StreamTerms
from streampack.core.model.mesh import Mesh
from streampack.core.model.rule_changes import Restream
from streampack.core.model.rules import Align, Batch, Rules, StreamRules
from streampack.core.model.samples import KEEPS, ROW, Keep, SampleTable, index_of
from streampack.core.model.snapshot import FormState
from streampack.core.model.steps import PlannedStep
from streampack.core.packers.registry import PackerName
from streampack.core.protocol.effects import Store
from streampack.core.protocol.events import Tick
from streampack.core.protocol.message import Envelope
from streampack.core.sessions.producer_base import Chunk
from streampack.core.sessions.pushing.push_session import EndBatch, EndPartition
from tests.core.form.forming import Forming
from tests.world.chunks import message_of
from tests.world.planned import tokens_of
from tests.world.rollouts import PARTITIONS, Rollouts, Story, length_of, pusher, rollout_chunk, stories
from tests.world.rollouts import RULES as ROLLOUTS

Group = tuple[str, list[int]]
"""What it is kept in, "" for single samples, and the lengths of its samples."""
WITH_CAP = {"exact_fill", "sliding_ffd", "concatenative", "buffer_first_fit", "first_fit_decreasing", "karmarkar_karp"}


class Run(Forming):
    """A former fed with groups, as a merge gives them: any number of samples at a time."""

    def __init__(self, rules: Rules, groups: list[Group]) -> None:
        super().__init__(rules, SampleTable(8))
        self.samples = [
            (number, length, 0 if at == len(lengths) - 1 or not keep else KEEPS[keep])  # type: ignore[index]
            for number, (keep, lengths) in enumerate(groups)
            for at, length in enumerate(lengths)
        ]

    def admit(self, count: int) -> None:
        some = self.samples[self.admitted : self.admitted + count]
        rows = np.zeros(len(some), ROW)
        rows["index"] = np.arange(self.admitted, self.admitted + len(some))
        rows["length"] = [length for _, length, _ in some]
        rows["loss_tokens"], rows["crc"] = rows["length"] - 1, 7919 * rows["index"]
        handles = self.table.enter(rows, keeps=bytes(keep for _, _, keep in some))
        self.former.admit(handles, rows["length"].astype(np.int64))
        self.admitted += len(some)

    def packs(self, step: PlannedStep) -> list[list[int]]:
        """Sample numbers by pack."""
        return [self.table.index[pack.handles].tolist() for pack in step.packs]

    def places(self, number: int, packs: list[list[list[int]]]) -> tuple[set[tuple[int, int]], set[int], bool]:
        """(step, pack) and steps that a group's samples are in; whether they follow each other there."""
        mine = [sample for sample, (group, _, _) in enumerate(self.samples) if group == number]
        found = {(s, p): pack for s, step in enumerate(packs) for p, pack in enumerate(step) if {*mine} & {*pack}}
        whole = any(pack[at : at + len(mine)] == mine for pack in found.values() for at in range(len(pack)))
        return set(found), {s for s, _ in found}, whole


def at_once(rules: Rules, groups: list[Group]) -> Run:
    run = Run(rules, groups)
    run.close()
    return run


@st.composite
def all_rules(draw: st.DrawFn) -> Rules:
    """Every packer; steps cut from a stream, or batches of so many samples, or of marks."""
    align, packs = draw(st.sampled_from([1, 1, 4])), draw(st.integers(1, 4))
    packer, balance = draw(st.sampled_from([*get_args(PackerName), "joint"])), Balance(a=3, b=2)
    batch = draw(st.sampled_from([None, None, Batch(samples=draw(st.integers(1, 9))), Batch()]))
    if packer == "joint":
        group = draw(st.sampled_from([group for group in range(1, packs + 1) if packs % group == 0]))
        packer, batch = "exact_fill", None
        balance = Balance("joint", a=3, b=2, group=group, patience=draw(st.integers(1, 3)))
    tail: Literal["pad", "drop"] = (
        "pad" if batch is not None and batch.samples is None else draw(st.sampled_from(["pad", "drop"]))
    )
    return Rules(
        budget=align * draw(st.integers(8, 40)), packs=packs, window=draw(st.integers(1, 12)), batch=batch,
        packer=packer, align=Align(align, align), tail=tail, balance=balance,
        max_samples_per_pack=draw(st.sampled_from([None, 3, 8])) if packer in WITH_CAP else None,
    )  # fmt: skip


@st.composite
def inputs(draw: st.DrawFn) -> tuple[Rules, list[Group]]:
    rules, groups = draw(all_rules()), list[Group]()
    align = rules.align.sample
    units = st.integers(1, rules.budget // align)
    for keep in draw(st.lists(st.sampled_from(["", "", "pack", "pack", "step"]), max_size=25)):
        if keep == "pack":
            lengths, room = list[int](), rules.budget // align
            for length in draw(st.lists(st.integers(1, max(room // 3, 1)), min_size=1, max_size=6)):
                if length <= room and len(lengths) < (rules.max_samples_per_pack or 6):
                    lengths.append(length)
                    room -= length
        else:
            lengths = draw(st.lists(units, min_size=1, max_size=6 if keep else 1))
        groups.append((keep, [align * length - draw(st.integers(0, align - 1)) for length in lengths]))
    return rules, groups


@settings(max_examples=100)
@given(inputs())
def test_no_packer_tears_a_group_and_every_sample_is_in_one_pack(case: tuple[Rules, list[Group]]) -> None:
    rules, groups = case
    run = at_once(rules, groups)
    packs = [run.packs(step) for step in run.steps]
    left = run.table.index[run.former.dropped].tolist()
    assert sorted([one for step in packs for pack in step for one in pack] + left) == list(range(len(run.samples)))
    for step in run.steps:
        assert all(pack.num_slot_tokens <= rules.budget for pack in step.packs)
        assert all(len(pack.handles) <= (rules.max_samples_per_pack or 1 << 30) for pack in step.packs)
    for number, (keep, _) in enumerate(groups):
        places, steps, whole = run.places(number, packs)
        lost = any(run.samples[sample][0] == number for sample in left)
        if keep == "pack":
            assert (len(places), whole) == ((0, False) if lost else (1, True))
        elif keep == "step" and rules.batch is not None:
            assert len(steps) == (0 if lost else 1)


@settings(max_examples=100)
@given(inputs(), st.data())
def test_steps_do_not_depend_on_where_a_group_is_cut_as_it_comes(
    case: tuple[Rules, list[Group]], data: st.DataObject
) -> None:
    rules, groups = case
    expected, run = at_once(rules, groups), Run(rules, groups)
    for _ in range(data.draw(st.integers(0, 25))):
        if data.draw(st.booleans()):
            run.admit(data.draw(st.integers(0, 5)))
        else:
            run.form(data.draw(st.integers(1, 3)), lambda: run.admit(data.draw(st.integers(0, 5))))
    assert run.close() == [step.digest for step in expected.steps]
    assert [run.packs(step) for step in run.steps] == [expected.packs(step) for step in expected.steps]


@settings(max_examples=100)
@given(inputs(), st.integers(0, 90), st.integers(0, 9))
def test_a_former_restored_inside_a_group_goes_on_the_same(
    case: tuple[Rules, list[Group]], count: int, formed: int
) -> None:
    rules, groups = case
    run, again = Run(rules, groups), Run(rules, groups)
    run.admit(count)
    for _ in range(formed):
        run.form()
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(run.former.state()), type=FormState)
    again.former.load(state)
    again.admitted, before = run.admitted, len(run.steps)
    assert again.former.state() == state
    assert again.close() == run.close()[before:]
    assert again.former.chain == run.former.chain


@given(inputs(), st.integers(0, 90))
def test_more_is_admitted_until_the_next_step_has_all_that_it_needs(case: tuple[Rules, list[Group]], held: int) -> None:
    """A feed admits while its former is hungry: whatever it holds, it is never neither hungry nor able to form."""
    rules, groups = case
    run = Run(rules, groups)
    run.admit(held)
    while run.admitted < len(run.samples) and (run.form() or run.former.wants_samples):
        run.admit(1)
    if rules.batch is None or rules.batch.samples is not None:
        assert run.admitted == len(run.samples) or run.form()


def test_a_part_of_a_group_forms_no_pack_in_a_feed_with_limits_for_media() -> None:
    pixels = Field(name="pixels", dtype="uint8", axis="patch")
    rules = Rules(budget=8, packs=1, window=2, media_fields=(pixels,), limits=MediaLimits(patches=4))
    run = Run(rules, [("pack", [4, 4])])
    run.admit(1)
    assert not run.form() or not run.steps
    run.close()
    assert [run.packs(step) for step in run.steps] == [[[0, 1]]]


def test_a_group_is_packed_as_soon_as_its_last_sample_is_there() -> None:
    """Programs may wait for the step before they push what comes after."""
    run = Run(Rules(budget=64, batch=Batch(samples=4)), [("step", [3] * 6), ("pack", [5] * 5)])
    for count in (4, 1):
        run.admit(count)
        assert not run.form()
        assert run.former.wants_samples
    run.admit(1)
    assert run.form()
    run.admit(5)
    assert run.form()
    assert [run.packs(step) for step in run.steps] == [[[0, 1, 2, 3, 4, 5]], [[6, 7, 8, 9, 10]]]


def test_a_window_counts_a_group_kept_in_one_pack_as_one_sample() -> None:
    groups: list[Group] = [("pack", [4, 4])] * 4
    waiting = Run(Rules(budget=16, packs=1, window=4, packer="first_fit_decreasing"), groups)
    waiting.admit(7)
    assert not waiting.form() or not waiting.steps
    waiting.admit(1)
    assert waiting.form()
    assert [waiting.packs(step) for step in waiting.steps] == [[[6, 7, 4, 5]], [[2, 3, 0, 1]]]


def test_samples_that_no_pack_holds_together_are_no_group_and_nothing_breaks() -> None:
    """Nobody can push it; a snapshot that was made up may say so."""
    run = Run(Rules(budget=8, packs=1, window=2, batch=Batch(samples=3)), [("pack", [5, 5, 2]), ("", [1])])
    run.close()
    assert [sorted(one for pack in run.packs(step) for one in pack) for step in run.steps] == [[0, 1, 2], [3]]
    assert not run.table.keep.any()


@settings(max_examples=100)
@given(inputs(), st.sampled_from([(1, 1), (2, 1), (4, 1), (3, 2)]))
def test_deal_splits_packs_of_a_batch_between_groups_and_never_inside_one(
    case: tuple[Rules, list[Group]], mesh: tuple[int, int]
) -> None:
    rules, groups = case
    if rules.batch is None:
        return
    run, dp, pp = at_once(rules, groups), *mesh
    kept = KeptSteps("train", rules, "whole", run.table)
    for step in run.steps:
        kept.add(step)
        dealt = list[list[int]]()
        for rank in range(dp):
            for part, _ in kept.parts(step.number, Mesh(dp=dp, pp=pp, dp_rank=rank)):
                counts = np.frombuffer(part.counts_u32, "<u4")
                found = np.split(np.frombuffer(part.indices_u64, "<u8"), np.cumsum(counts)[:-1])
                dealt += [pack.tolist() for pack in found]
        assert len(dealt) % (dp * pp) == 0
        assert sorted(one for pack in dealt for one in pack) == sorted(one for pack in run.packs(step) for one in pack)
        for number, (keep, _) in enumerate(groups):
            if keep == "pack" and (places := run.places(number, [dealt])[0]):
                assert len(places) == 1
                assert run.places(number, [dealt])[2]


def test_a_rank_without_an_item_is_an_error_where_the_policy_says_so() -> None:
    """Two samples that cannot be parted are one rank's."""
    rules = Rules(budget=64, batch=Batch(samples=2, empty="error"))
    run = at_once(rules, [("pack", [5, 5])])
    kept = KeptSteps("train", rules, "whole", run.table)
    kept.add(run.steps[0])
    assert kept.unfit(0, Mesh(dp=1)) == ""
    assert "got a batch of 1 samples (a group kept in one pack counts once) for dp=2" in kept.unfit(0, Mesh(dp=2))


# What is admitted

PUSHED = StreamTerms("s", partitions=1, limit=64, overlong="error", pushed=True, align=4)


def refused(terms: StreamTerms, keep: Keep, lengths: list[int]) -> tuple[str, str] | None:
    """What is said to a chunk of samples of such lengths."""
    merge = FeedMerge(Rules(streams=(StreamRules("s", 1.0, 1, pushed=True),), merge="arrival"))
    admission = Admission([terms], "int32", (), 1000, SampleTable(), merge)
    chunk = message_of(("s", 0), 7, lengths, keep=keep)
    envelope = Envelope(run=1, epoch=1, fence=1, message=chunk, payload=(memoryview(bytes(4 * sum(lengths))),))
    intake = Intake(1 << 20, 4)
    intake.go_to((7, None), 0, 0)
    verdict = admission.check.verdict(envelope, chunk, terms, intake, KeyIndex(1))
    assert isinstance(verdict, ReceivedChunk | tuple)
    return verdict if isinstance(verdict, tuple) else None


@pytest.mark.parametrize(
    ("changes", "keep", "lengths", "why"),
    [
        ({}, "pack", [60, 4], ""),
        ({}, "pack", [61, 1], "samples s:7 to 8: got a group of 2 samples and 62 tokens to keep in one pack"),
        ({"overlong": "truncate"}, "pack", [80], ""),
        ({"overlong": "truncate"}, "pack", [80, 1], "of 2 samples and 65 tokens .* Such a group cannot be split. Send"),
        ({"overlong": "split"}, "pack", [80], "of 1 samples and 80 tokens"),
        ({"overlong": "drop"}, "pack", [80, 60, 60], ""),
        ({"most": 2}, "pack", [1, 1, 1], "64 tokens \\(the budget\\) and 2 samples \\(max_samples_per_pack\\). Such"),
        ({"most": 2, "overlong": "drop"}, "pack", [1, 1, 1], ""),
        ({"most": 2, "batches": True}, "step", [1, 1, 1], ""),
        ({}, "step", [1, 1], r"got keep='step' without batches, .* set `rules\.step` to"),
        ({"batches": True, "overlong": "split"}, "step", [80, 80], ""),
        ({"batches": True, "padded": True}, "pack", [1, 1], r"got keep='pack' with `rules\.padded: true`, expected"),
        ({"pushed": False}, "pack", [1, 1], "got a group in a stream that is not pushed, expected a pushed stream"),
    ],
)  # fmt: skip
def test_a_group_that_no_pack_or_step_holds_is_refused_and_says_why(
    changes: dict[str, Any], keep: Keep, lengths: list[int], why: str
) -> None:
    found = refused(replace(PUSHED, **changes), keep, lengths)
    if not why:
        assert found is None
        return
    assert found is not None
    assert found[0] == "group"
    assert re.search(why, found[1])


@pytest.mark.parametrize("known", range(3))
def test_a_group_over_a_limit_for_media_is_dropped_whole_if_a_broker_knows_a_part_of_it(known: int) -> None:
    """Three samples of two patches each are too much for a pack, but two of them would fit."""
    pixels = Field(name="pixels", dtype="uint8", axis="patch")
    terms = replace(PUSHED, overlong="drop", media_fields=(pixels,), limits=MediaLimits(patches=5))
    merge = FeedMerge(Rules(streams=(StreamRules("s", 1.0, 1, pushed=True),), merge="arrival"))
    admission = Admission([terms], "int32", (), 1000, SampleTable(), merge)
    media = encode((pixels,), np.array([2]), {"pixels": np.zeros(2)})
    message = message_of(("s", 0), 0, [4, 4, 4], keep="pack")
    payload = bytes(48), np.full((3, 2), (1, len(media)), "<u4").tobytes(), 3 * media
    chunk = parse_chunk(Envelope(run=1, epoch=1, fence=1, message=message, payload=payload), message, terms)
    assert isinstance(chunk, ReceivedChunk)
    intake = Intake(1 << 20, 4)
    intake.go_to((0, None), known, 0)
    (store,), rejected = admission.admit(0, 0, intake, chunk)
    assert isinstance(store, Store)
    assert not len(store.handles)
    assert rejected.tolist() == [*range(known, 3)]


@given(
    st.lists(st.integers(0, 90), min_size=1, max_size=6), st.sampled_from(["drop", "truncate", "split"]),
    st.sampled_from([None, 2]), st.integers(0, 5), st.sampled_from([UNSET, "pack", "step"]),
)  # fmt: skip
def test_the_rest_of_a_group_is_admitted_or_dropped_as_it_was_the_first_time(
    lengths: list[int], policy: Overlong, most: int | None, skip: int, keep: Any
) -> None:
    """It is read again from wherever the merge stood: a part of it that would fit is dropped with the whole."""
    every, terms = np.array(lengths, np.int64), replace(PUSHED, overlong=policy, most=most)
    whole, rest = apply_terms(terms, every, keep), apply_terms(terms, every, keep, skip)
    later = whole.source >= skip
    assert rest.length.tolist() == whole.length[later].tolist()
    assert (rest.source + skip).tolist() == whole.source[later].tolist()
    if keep == "pack" and policy == "drop":
        kept = whole.length[whole.length > 0]
        assert sum(-(-kept // 4) * 4) <= 64
        assert len(kept) <= (most or 6)


# A broker that runs


RULES = Rules(budget=64, packs=1, window=4)
SPARE = StreamRules("spare", 1.0, 1, pushed=True)


class Pushed(Rollouts):
    """Programs push groups of one to four samples, ``keeps`` by turns, over-long ones too; with ``marks`` they end a
    batch after every fifth group.
    """

    def __init__(self, rules: Rules, keeps: list[Keep | None], seed: int, *, discards: bool, marks: bool) -> None:
        self.keeps, self.marks = keeps, marks
        self.sent = [0] * PARTITIONS
        streams = tuple(msgspec.structs.replace(stream, overlong="drop") for stream in ROLLOUTS.streams)
        rules = msgspec.structs.replace(rules, merge="arrival", streams=streams + rules.streams)
        super().__init__(seed, rules, discards=discards)

    def work(self, partition: int) -> None:
        sent = self.sent[partition]
        session = self.pushers[partition]
        if session.begun and not session.end_requested and self.marks and session.buffer.next_mark < sent // 5:
            self.tell(partition, EndBatch(sent // 5))
        else:
            super().work(partition)

    def next_chunk(self, partition: int, first: int) -> Chunk:
        sent = self.sent[partition]
        chunk = rollout_chunk(partition, first, min(first + 1 + sent % 4, self.wanted))
        return msgspec.structs.replace(chunk, keep=self.keeps[sent % len(self.keeps)] or msgspec.UNSET)

    def push(self, partition: int, chunk: Chunk) -> bool:
        was_pushed = super().push(partition, chunk)
        self.sent[partition] += was_pushed
        return was_pushed

    def groups(self) -> list[tuple[ChunkAdmitted, list[int]]]:
        """Each chunk of the log and the indices of its samples."""
        found = []
        for record in self.records():
            if isinstance(record, ChunkAdmitted):
                seqs = record.base_seq + np.arange(len(record.lengths_u32) // 4)
                found.append((record, np.asarray(index_of(seqs, record.partition, PARTITIONS)).tolist()))
        return found

    def packs(self) -> dict[int, list[list[int]]]:
        """Indices of the samples by pack, of each step as it counts."""
        found = dict[int, list[list[int]]]()
        for record in self.records():
            if isinstance(record, LineageBegan):
                found = {step: packs for step, packs in found.items() if step < record.step}
            elif isinstance(record, StepFormed):
                counts = np.frombuffer(record.counts_u32, "<u4")
                index = np.frombuffer(record.rows, ROW)["index"]
                found[record.step] = [pack.tolist() for pack in np.split(index, np.cumsum(counts)[:-1])]
        return found

    def rejected(self) -> dict[int, set[str]]:
        """Why an index is in no step."""
        records = [record for record in self.records() if isinstance(record, SamplesRejected)]
        return {i: set(r.reasons) for r in records for i in np.frombuffer(r.indices_u64, "<u8").tolist()}


def planned(rules: Rules, records: list[Record]) -> list[bytes]:
    """Chains of the steps that follow from chunks, marks and groups in the order of the log, with no broker."""
    table, merge = SampleTable(64), merge_of(rules)
    former, chains = Former(rules, table), list[bytes]()
    for record in records:
        if isinstance(record, BatchMarked):
            merge.end_pass(record.partition)
        if not isinstance(record, ChunkAdmitted):
            continue
        p, lengths = record.partition, np.frombuffer(record.lengths_u32, "<u4").astype(np.int64)
        if record.keep == "pack" and slots_of(record, rules) > rules.budget:
            lengths = 0 * lengths
        seqs = np.flatnonzero(lengths) + record.base_seq
        rows = np.zeros(len(seqs), ROW)
        rows["index"], rows["length"] = index_of(seqs, p, PARTITIONS), lengths[lengths > 0]
        rows["loss_tokens"] = rows["length"] - 1
        rows["crc"] = [crc32c(tokens_of("rollouts", p, seq, length_of(p, seq))) for seq in seqs.tolist()]
        says = KEEPS[record.keep] if record.keep else 0
        handles = np.full(len(lengths), -1, np.int64)
        handles[lengths > 0] = table.enter(rows, keeps=bytes([says] * (len(seqs) - 1) + [0] * bool(len(seqs))))
        merge.push(p, handles, lengths, np.zeros(len(lengths), np.int64))
    for p in range(PARTITIONS):
        merge.end(p)
    while not former.closed or merge.between_passes:
        if merge.between_passes:
            merge.next_pass()
        taken = merge.take(1 << 40)
        former.admit(taken.handles, taken.lengths)
        former.closed = merge.closed or not former.too_few
        while (request := former.request()) is not None:
            chains += [step.chain for step in former.apply(request.choose())]
        chains += [step.chain for step in former.cut()]
        if merge.between_passes:
            former.closed = False
    return chains


def live_rules() -> st.SearchStrategy[Rules]:
    """Steps of a stream by every packer that streams, and batches."""
    packers: list[PackerName] = [
        "exact_fill",
        "sliding_ffd",
        "concatenative",
        "buffer_first_fit",
        "best_fit_decreasing",
    ]
    joint = Balance("joint", group=2, patience=2)
    stream = [Rules(budget=32, packs=2, window=4, packer=packer, align=Align(2, 2)) for packer in packers]
    batches = [Rules(budget=32, packs=2, window=4, batch=batch) for batch in (Batch(samples=3), Batch(samples=9))]
    marks = Rules(budget=32, packs=2, window=4, batch=Batch(min_samples=4))
    return st.sampled_from([*stream, Rules(budget=32, packs=2, window=4, balance=joint), *batches, marks])


@given(live_rules(), stories(), st.integers(0, 999), st.booleans())
def test_groups_that_are_pushed_are_never_torn_whoever_is_killed(
    rules: Rules, story: Story, seed: int, discards: bool
) -> None:
    keeps: list[Keep | None] = ["pack", None, "pack"] if rules.batch is None else ["pack", "step", None]
    marked = rules.batch is not None and rules.batch.samples is None
    live = Pushed(rules, keeps, seed, discards=discards, marks=marked or (rules.batch is None and seed % 2 == 0))
    chains = live.play([("push", 8), *story], torn=False)
    packs, rejected = live.packs(), live.rejected()
    assert sorted(packs) == list(range(len(chains)))
    places = {i: (s, p) for s, step in packs.items() for p, pack in enumerate(step) for i in pack}
    assert len(places) == sum(len(pack) for step in packs.values() for pack in step), "a sample is in two packs"
    assert places.keys() | rejected.keys() == set(range(PARTITIONS * live.wanted))
    for group, indices in live.groups():
        assert len({index in places for index in indices}) == 1, "a part of a group is in no step"
        if indices[0] not in places:
            assert all(rejected[index] in ({"overlong"}, {"discarded"}) for index in indices)
            assert "discarded" in rejected[indices[0]] or (
                group.keep == "pack" and slots_of(group, rules) > rules.budget
            )
        elif group.keep == "pack":
            ((s, p),) = {places[index] for index in indices}
            at = packs[s][p].index(indices[0])
            assert packs[s][p][at : at + len(indices)] == indices
        elif group.keep == "step" or marked:
            assert len({places[index][0] for index in indices}) == 1
    if not any("discarded" in why for why in rejected.values()):
        assert chains == planned(live.rules, live.records())


class Leaving(Pushed):
    """Beside these programs there is one that pushes nothing to a stream of its own, ``spare``."""

    def __init__(self, seed: int) -> None:
        self.spare = pusher("spare", 0, 99, "spare")
        rules = msgspec.structs.replace(RULES, streams=(SPARE,))
        super().__init__(rules, ["pack"], seed, discards=False, marks=False)

    def start_broker(self, lost: bool = False) -> None:
        self.quota = 400  # so that more waits than is merged at once
        super().start_broker(lost)

    def start_producer(self, streams: list[str]) -> bytes:
        self.producers[b"spare"] = self.spare
        self._to_producer(b"spare", Tick(self.now))
        return super().start_producer(streams)

    def turn(self) -> None:
        if self.over and self.spare.begun and not self.spare.end_requested:
            self._to_producer(b"spare", EndPartition())
        super().turn()


@given(st.integers(0, 999), st.integers(0, 400), st.integers(0, 400), st.booleans())
@settings(max_examples=20)
def test_a_stream_that_is_removed_leaves_no_part_of_a_group(seed: int, before: int, after: int, killed: bool) -> None:
    """What waits of it is dropped: the rules change between two groups, however many samples were merged at once."""
    live = Leaving(seed)
    live.wanted = 150
    for _ in range(before):
        live.turn()
    assert not live.ask(Restream(remove=("rollouts",))).refusal
    for _ in range(after):
        live.turn()
    if killed:
        live.start_broker()
    live.over = True
    live.finish()
    packs = [pack for step in live.packs().values() for pack in step]
    for _, indices in live.groups():
        mine = [pack for pack in packs if set(indices) & set(pack)]
        assert not mine or len(mine) == 1
        assert all(set(indices) <= set(pack) for pack in mine)


def slots_of(group: ChunkAdmitted, rules: Rules) -> int:
    """Tokens of a chunk in packs."""
    align = rules.align.sample
    return sum(-(-length // align) * align for length in np.frombuffer(group.lengths_u32, "<u4").tolist())
