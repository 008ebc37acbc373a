"""Padded micro-batches served: from FORM's single samples over DEAL and the arena to rows in a trainer's words."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from streampack_services.broker.arena import Arena

import streampack
from streampack.config.config_files import read_broker
from streampack.core.deal.dynamic_batches import padded_batches
from streampack.core.deal.mesh_validation import mesh_refusal
from streampack.core.deal.step_cache import KeptSteps
from streampack.core.form.former import Former
from streampack.core.intake.overlong import apply_overlong
from streampack.core.model.fields import Field
from streampack.core.model.keys.planning_keys import Balance, Warmup
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Align, Batch, Rules
from streampack.core.model.samples import I64, ROW, SampleTable
from streampack.core.model.shapes import Sizes
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.step_part import StepPart
from streampack.core.protocol.trainer_messages import Attach, Attached
from streampack.core.serve.rank_registry import refusal
from streampack.core.stats.padding import CAUSES
from streampack.errors import InvariantError, UserError, WireError
from streampack.packs.build import build_step
from streampack.packs.pack import Pack
from streampack.packs.slabs import Slabs
from streampack.packs.step import Step
from streampack.views.formats import Views, view
from streampack.views.padded import rows
from streampack.wire import frames as wire

ROLL = [7, 6, 8, 5, 1, 3, 8, 6]
Key = tuple[int, int]
"""(dp rank, cp rank)."""


def rules_of(samples: int, budget: int = 10, align: int = 2, **batch: Any) -> Rules:
    return Rules(
        budget=budget, batch=Batch(samples=samples, **batch), align=Align(sample=align, pack=align), padded=True,
        packer="none", micro_batch_size=1, shape="exact", tokens="uint16",
    )  # fmt: skip


@dataclass
class Formed:
    """Samples of some lengths as steps, kept for readers, and their tokens: sample i is 100 * i + 1, + 2, ..."""

    rules: Rules
    lengths: list[int]
    layout: str = "zigzag"

    def __post_init__(self) -> None:
        count, ends = len(self.lengths), np.cumsum(self.lengths)
        table = SampleTable(8)
        found = np.zeros(count, ROW)
        found["index"], found["length"] = np.arange(count), self.lengths
        found["loss_tokens"] = found["length"] - 1
        handles = table.enter(found)
        self.arena = Arena(1 << 16, "uint16", 4096)
        tokens = np.concatenate([self.tokens(i) for i in range(count)]).astype(np.uint16)
        none = np.zeros(count, np.int64)
        lengths = np.array(self.lengths, np.int64)
        self.arena.store(handles, ends - lengths, lengths, none, (tokens.tobytes(),))
        former = Former(self.rules, table)
        former.admit(handles, np.array(self.lengths, np.int64))
        former.closed = True
        self.kept = KeptSteps("train", self.rules, self.layout, table)
        self.steps = []
        while (request := former.request()) is not None:
            self.steps += former.apply(request.choose())
        for step in self.steps:
            self.kept.add(step)

    def tokens(self, sample: int) -> I64:
        return 100 * sample + 1 + np.arange(self.lengths[sample])

    def parts(self, step: int, mesh: Mesh) -> list[Envelope]:
        found = []
        for plan, packs in self.kept.parts(step, mesh):
            assert packs.widths.tolist() == plan.widths(self.rules).tolist()
            assert packs.aligns.tolist() == plan.aligns(self.rules).tolist()
            arrays = self.arena.gather(packs, plan.frames, mesh.cp, (mesh.cp_rank,), self.layout)
            payload = tuple(memoryview(array.tobytes()) for array in arrays)
            found.append(Envelope(run=1, epoch=1, fence=1, message=plan, payload=payload))
        return found

    def built(self, step: int, mesh: Mesh) -> Step:
        attached = Attached(feed="train", reader="r", lineage=0, next_step=0, rules=self.rules, layout=self.layout)
        return build_step(self.parts(step, mesh), attached, mesh, Slabs())

    def ranks(self, step: int, dp: int, cp: int = 1, pp: int = 1) -> dict[Key, Step]:
        places = product(range(dp), range(cp))
        return {(d, c): self.built(step, Mesh(dp=dp, cp=cp, pp=pp, dp_rank=d, cp_rank=c)) for d, c in places}


def samples_of(pack: Any) -> list[int]:
    return [int(index) for index in pack.sample_ids[:, 1]]


def test_the_example_of_roll_is_served_within_its_budget() -> None:
    formed = Formed(rules_of(8), ROLL)
    ranks = formed.ranks(0, dp=2)
    assert [[len(pack.input_ids) for pack in step] for step in ranks.values()] == [[4, 6, 8, 8]] * 2
    assert [[samples_of(pack) for pack in step] for step in ranks.values()] == [
        [[4], [3], [7], [2]],
        [[5], [1], [0], [6]],
    ]
    one = formed.ranks(0, dp=1)[0, 0]
    assert [rows(pack, formed.rules)["input_ids"].shape for pack in one] == [(2, 4), *[(1, 6)] * 3, *[(1, 8)] * 3]
    assert rows(one[0], formed.rules)["input_ids"].tolist() == [[401, 0, 0, 0], [501, 502, 503, 0]]
    assert rows(one[0], formed.rules)["labels"].tolist() == [[-100] * 4, [502, 503, -100, -100]]
    assert {step.digest for step in (one, *ranks.values())} == {one.digest}, "FORM knows no mesh"


@st.composite
def served(draw: st.DrawFn) -> tuple[Formed, int, int, int]:
    """One step, and a mesh: dp, cp, pp."""
    cp = draw(st.sampled_from([1, 2]))
    align = 2 * cp * draw(st.integers(1, 2)) if cp > 1 else draw(st.integers(1, 3))
    budget = align * draw(st.integers(1, 8))
    lengths = draw(st.lists(st.integers(1, budget), min_size=1, max_size=25))
    multiple, least = draw(st.sampled_from([None, 1, 2, 3])), draw(st.integers(1, 3))
    rules = rules_of(len(lengths), budget, align, micro_batch_multiple=multiple, min_micro_batches=least)
    layout = draw(st.sampled_from(["zigzag", "whole"]))
    return Formed(rules, lengths, layout), draw(st.integers(1, 4)), cp, draw(st.sampled_from([1, 2]))


@given(served())
def test_every_sample_is_a_row_of_one_micro_batch_and_all_ranks_have_the_same_shapes(
    drawn: tuple[Formed, int, int, int],
) -> None:
    formed, dp, cp, pp = drawn
    rules, batch = formed.rules, formed.rules.batch
    assert batch is not None
    ranks = formed.ranks(0, dp, cp, pp)
    streampack.verify(list(ranks.values()), rules=rules)
    held = 1 if formed.layout == "whole" else cp
    shapes = {tuple(rows(pack, rules)["attention_mask"].shape for pack in step) for step in ranks.values()}
    assert len(shapes) == 1
    for num_rows, width in next(iter(shapes)):
        assert num_rows * width * held <= rules.budget
        assert width * held % rules.align.pack == 0
    count = len(ranks[0, 0])
    assert count >= batch.min_micro_batches
    assert count % np.lcm(batch.micro_batch_multiple or 1, pp) == 0
    found = [sample for (_, c), step in ranks.items() if c == 0 for pack in step for sample in samples_of(pack)]
    assert sorted(found) == list(range(len(formed.lengths)))
    if held == 1:
        for pack in (pack for step in ranks.values() for pack in step):
            for row, sample in zip(rows(pack, rules)["input_ids"], samples_of(pack), strict=False):
                assert row[: formed.lengths[sample]].tolist() == formed.tokens(sample).tolist()
                assert not row[formed.lengths[sample] :].any()


@given(served(), st.integers(1, 5))
def test_a_batch_is_the_same_on_any_mesh_and_reading_it_again_gives_the_same_bytes(
    drawn: tuple[Formed, int, int, int], other: int
) -> None:
    formed, dp, cp, pp = drawn
    mesh = Mesh(dp=dp, cp=cp, pp=pp, dp_rank=dp - 1)
    before = [(wire.encode(part)[1:], part.payload) for part in formed.parts(0, mesh)]
    elsewhere = formed.built(0, Mesh(dp=other))
    assert [(wire.encode(part)[1:], part.payload) for part in formed.parts(0, mesh)] == before
    mine = formed.built(0, mesh)
    for name in ("digest", "chain", "num_loss_tokens", "num_samples"):
        assert getattr(mine, name) == getattr(elsewhere, name)
    assert mine.num_loss_tokens == max(sum(length - 1 for length in formed.lengths), 1)


@given(served())
def test_the_causes_of_waste_and_the_real_tokens_are_all_that_is_computed(drawn: tuple[Formed, int, int, int]) -> None:
    formed, dp, _, pp = drawn
    steps = formed.ranks(0, dp, pp=pp).values()
    figures, real = formed.kept.figures, sum(formed.lengths)
    computed = sum(int(pack.cu_seqlens_padded[-1]) for step in steps for pack in step)
    waste = dict(zip(CAUSES, figures.waste.tolist(), strict=True))
    assert figures.padded is not None
    assert (figures.padded.valid_tokens, figures.padded.actual_tokens) == (real, computed)
    assert real + sum(waste.values()) == figures.delivered_tokens == computed
    empty_rows = sum(
        int(pack.cu_seqlens_padded[-1] - pack.cu_seqlens_padded[pack.num_samples]) for step in steps for pack in step
    )
    assert waste["empty_pack"] == empty_rows
    assert figures.cost_max_over_mean == 1.0, "ranks compute the same"


@given(served())
def test_the_broker_serves_the_steps_that_plan_step_plans(drawn: tuple[Formed, int, int, int]) -> None:
    formed, dp, _, pp = drawn
    rules, batch = formed.rules, formed.rules.batch
    assert batch is not None
    multiple = int(np.lcm(batch.micro_batch_multiple or 1, pp))
    plan = streampack.plan_step(
        formed.lengths, rules.budget, dp, mode="padded", align=rules.align.pack, order="packer", pp=pp,
        variable_lengths=True, min_micro_batches=batch.min_micro_batches, micro_batch_multiple=multiple,
    )  # fmt: skip
    found = [[samples_of(pack) for pack in step] for step in formed.ranks(0, dp, pp=pp).values()]
    assert found == [[list(samples) for samples in rank] for rank in plan.packs]
    assert plan.padded == formed.kept.figures.padded


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=20), st.integers(1, 12), st.integers(1, 8),
    st.sampled_from(["drop", "truncate", "split"]),
)  # fmt: skip
def test_samples_left_by_the_overlong_policy_are_padded_without_a_crash(
    lengths: list[int], align: int, units: int, policy: str
) -> None:
    left = apply_overlong(np.array(lengths, np.int64), align * units, policy).length
    if len(left := left[left > 0]):
        found = Formed(rules_of(len(left), align * units, align), left.tolist()).ranks(0, dp=2)
        assert sum(len(step.sample_ids) for step in found.values()) == len(left)


# What a message may say


def padded_part(**changes: Any) -> StepPart:
    (envelope,) = Formed(rules_of(8), ROLL).parts(0, Mesh(dp=2))
    assert isinstance(envelope.message, StepPart)
    return msgspec.structs.replace(envelope.message, **changes)


def u32(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def test_the_rows_of_a_message_are_held_still() -> None:
    part = padded_part()
    assert (part.widths_u32, part.rows_u32) == (u32(4, 6, 8, 8), u32(4, 6, 8, 8))
    (packed,) = Formed(rules_of(8), ROLL).parts(0, Mesh())
    assert isinstance(packed.message, StepPart)
    assert (packed.message.widths_u32, packed.message.rows_u32) == (u32(8, 6, 6, 6, 8, 8, 8), u32(4, 6, 6, 6, 8, 8, 8))


@pytest.mark.parametrize(
    "rows_of",
    [(4, 6, 8), (4, 6, 8, 0), (4, 6, 8, 7), (4, 6, 8, 4), (1, 6, 8, 8), (4, 6, 8, 16), (4, 3, 8, 8)],
)
def test_rows_that_cannot_be_are_not_believed(rows_of: tuple[int, ...]) -> None:
    """Too few; none; no multiple of the alignment; shorter than the sample; longer than all; and so on."""
    with pytest.raises(ValueError, match=r"bytes of rows|expected one row per sample"):
        padded_part(rows_u32=u32(*rows_of)).aligns(rules_of(8))


@pytest.mark.parametrize("longest", [(), (1, 3, 6), (1, 3, 6, 0, 7), (2, 6, 8, 9)])
def test_longest_samples_that_cannot_be_are_not_believed(longest: tuple[int, ...]) -> None:
    """None; too few; too many; longer than the row."""
    with pytest.raises(ValueError, match=r"longest samples"):
        padded_part(longest_u32=u32(*longest)).longest(rules_of(8))


def test_padded_steps_of_a_broker_of_version_0_1_are_read_and_not_regrouped() -> None:
    formed = Formed(rules_of(8), ROLL)
    replace, parts = msgspec.structs.replace, formed.parts(0, Mesh())
    old = [replace(part, message=replace(part.message, longest_u32=msgspec.UNSET)) for part in parts]
    formed.parts = lambda *_: old  # type: ignore[method-assign]
    step = formed.built(0, Mesh())
    assert sum(len(samples_of(pack)) for pack in step) == len(formed.lengths)
    with pytest.raises(UserError, match=r"got padded micro-batches of a broker of version 0\.1 to regroup"):
        step.regroup(24)


def test_a_trainer_refuses_a_padded_micro_batch_that_is_damaged() -> None:
    formed = Formed(rules_of(8), ROLL)
    envelopes = formed.parts(0, Mesh(dp=2))
    formed.parts = lambda *_: [msgspec.structs.replace(envelopes[0], message=padded_part(rows_u32=b""))]  # type: ignore[method-assign]
    with pytest.raises(WireError, match="got 0 bytes of rows, expected 16"):
        formed.built(0, Mesh(dp=2))


# Views


def first_of(formed: Formed) -> Pack:
    pack: Pack = formed.built(0, Mesh())[0]
    return pack


def test_views_by_row_hold_what_models_of_each_kind_take() -> None:
    formed = Formed(rules_of(8), ROLL)
    pack = first_of(formed)
    own, hf, shifted = (view(pack, name, formed.rules) for name in ("padded", "hf", "hf_shifted"))
    thd = view(pack, "thd", formed.rules)
    assert {name: value.tolist() for name, value in thd.items()} == {name: own[name].tolist() for name in own}
    assert list(own) == list(hf) == ["input_ids", "labels", "attention_mask", "position_ids"]
    assert list(shifted) == [*hf, "shift_labels"]
    assert own["attention_mask"].tolist() == [[1, 0, 0, 0], [1, 1, 1, 0]]
    assert own["position_ids"].tolist() == [[0, 1, 2, 3]] * 2
    assert own["labels"].tolist() == shifted["shift_labels"].tolist() == [[-100] * 4, [502, 503, -100, -100]]
    assert hf["labels"].tolist() == [[-100] * 4, [-100, 502, 503, -100]], "the model shifts"
    assert own.num_loss_tokens == 2
    assert own.cu_seqlens_padded.tolist() == [0, 4, 8]


def test_a_middle_stage_of_a_pipeline_gets_masks_and_positions_by_row() -> None:
    formed = Formed(rules_of(8), ROLL)
    first, middle = (formed.built(0, Mesh(pp=3, pp_rank=stage))[0] for stage in (0, 1))
    for name in ("padded", "hf", "hf_shifted"):
        found, whole = view(middle, name, formed.rules), view(first, name, formed.rules)
        assert list(found) == ["attention_mask", "position_ids"]
        assert all(found[key].tolist() == whole[key].tolist() for key in found)


def test_fields_by_token_are_rows_too_and_those_by_sample_are_not() -> None:
    declared = msgspec.convert(
        [
            {"name": "advantages", "dtype": "float32", "shape": [2]},
            {"name": "reward", "dtype": "float32", "axis": "sample"},
        ],
        type=tuple[Field, ...],
    )
    formed = Formed(rules_of(8), ROLL)
    values = {"advantages": np.arange(16, dtype=np.float32).reshape(8, 2), "reward": np.ones(2, np.float32)}
    found = view(
        replace(first_of(formed), fields=values), "padded", msgspec.structs.replace(formed.rules, fields=declared)
    )
    assert found.advantages.shape == (2, 4, 2)
    assert found.advantages[1, 0].tolist() == [8, 9]
    assert found.reward.shape == (2,)


@pytest.mark.parametrize("format", ["thd", "padded", "hf", "hf_shifted"])
def test_verify_reads_rows_back_and_sees_what_was_changed(format: str) -> None:
    formed = Formed(rules_of(8), ROLL)
    for at in range(7):
        streampack.verify(view(formed.built(0, Mesh())[at], format, formed.rules))
    for key in ("input_ids", "labels", "position_ids", *(["attention_mask"] if format != "thd" else [])):
        batch = view(first_of(formed), format, formed.rules)
        batch[key] = batch[key].clone()
        batch[key].view(-1)[6] += 1
        with pytest.raises(InvariantError):
            streampack.verify(batch)


def test_verify_sees_ranks_whose_shapes_differ() -> None:
    two, other = Formed(rules_of(8), ROLL).ranks(0, dp=2), Formed(rules_of(8), [7, 6, 8, 5, 1, 2, 8, 6]).ranks(0, dp=2)
    packs = tuple(replace(pack, step_num_loss_tokens=36) for pack in other[1, 0])
    mixed = replace(other[1, 0], packs=packs, digest=two[0, 0].digest, chain=two[0, 0].chain, num_loss_tokens=36)
    with pytest.raises(InvariantError, match=r"shape: step 0 of another rank: got \[\(2, 2\)"):
        streampack.verify([two[0, 0], mixed], rules=rules_of(8))


def test_a_feed_has_the_formats_of_its_kind() -> None:
    packed, padded = Rules(), rules_of(8)
    views = Views(None, Mesh())
    views.fit(padded)
    assert views.format == "padded"
    for name in ("numpy", "thd", "hf"):
        views = Views(name, Mesh())
        views.fit(padded)
        assert views.format == name
    with pytest.raises(UserError, match=r"got format 'padded' for a feed that packs, expected thd, hf"):
        Views("padded", Mesh()).fit(packed)
    with pytest.raises(UserError, match=r"got a pack, expected a micro-batch of a feed with rules\.padded"):
        rows(first_of(Formed(padded, ROLL)), packed)


# Under another budget


@given(served().filter(lambda drawn: drawn[0].layout == "whole" or drawn[2] == 1), st.data())
def test_regrouped_rows_are_those_that_the_same_samples_have_under_that_budget(
    drawn: tuple[Formed, int, int, int], data: st.DataObject
) -> None:
    formed, dp, cp, pp = drawn
    round = formed.rules.align.pack * data.draw(st.integers(1, 3), "round")
    budget = -(-max(formed.lengths) // round) * round + data.draw(st.integers(0, 60), "more")
    least = data.draw(st.integers(1, 6), "least")
    plan = padded_batches(formed.lengths, budget, dp, length_round=round, min_micro_batches=least)
    expected = list(zip(np.diff(plan.bounds).tolist(), plan.lengths.tolist(), strict=True))
    assert len(expected) >= least
    for (rank, _), step in formed.ranks(0, dp, cp, pp).items():
        forward = step.regroup(budget, min_packs=least, round=round)
        found = [rows(pack, formed.rules) for pack in forward]
        assert [each["attention_mask"].shape for each in found] == expected, "the same on all ranks"
        assert all(num_rows * width <= budget for num_rows, width in expected)
        places = [place[place >= 0].tolist() for place in np.split(plan.places[:, rank], plan.bounds[1:-1])]
        assert [samples_of(pack) for pack in forward] == places
        for pack, each in zip(forward, found, strict=True):
            for row, sample in zip(each["input_ids"], samples_of(pack), strict=False):
                assert row[: formed.lengths[sample]].tolist() == formed.tokens(sample).tolist()
                assert not row[formed.lengths[sample] :].any()
        assert forward[0].num_micro_batches == len(forward)
        assert sum(pack.num_loss_tokens for pack in forward) == sum(pack.num_loss_tokens for pack in step)


@given(served().filter(lambda drawn: drawn[0].layout == "whole" or drawn[2] == 1), st.integers(1, 6), st.booleans())
def test_the_way_back_from_regrouped_rows_is_the_identity(
    drawn: tuple[Formed, int, int, int], times: int, is_torch: bool
) -> None:
    formed, dp, cp, pp = drawn
    kind: Any = torch.from_numpy if is_torch else np.asarray
    for step in formed.ranks(0, dp, cp, pp).values():
        forward = step.regroup(times * formed.rules.budget)
        of_rows = forward.tokens_back([kind(rows(pack, formed.rules)["labels"] + 200) for pack in forward])
        flat = forward.tokens_back({pack: kind(np.stack([pack.input_ids + 1] * 3, axis=1)) for pack in forward})
        ids = forward.samples_back([pack.sample_ids for pack in forward])
        for pack, labels, inputs, of_samples in zip(step, of_rows, flat, ids, strict=True):
            real = ~pack.padding_mask
            assert np.array_equal(
                labels, rows(replace(pack, labels=(pack.labels + 200) * real), formed.rules)["labels"]
            )
            assert np.array_equal(inputs[:, 2], (pack.input_ids + 1) * real)
            assert np.array_equal(of_samples, pack.sample_ids)


@pytest.mark.parametrize("format", ["thd", "padded", "hf", "hf_shifted"])
def test_regrouped_rows_are_of_the_format_of_their_step_and_pass_its_check(format: str) -> None:
    formed = Formed(rules_of(8), ROLL)
    for rank in range(2):
        step = Views(format, Mesh(dp=2)).make(formed.built(0, Mesh(dp=2, dp_rank=rank)), formed.rules)
        forward = step.regroup(24)
        assert [tuple(batch["input_ids"].shape) for batch in forward] == [(3, 8), (1, 8)]
        for batch in forward:
            streampack.verify(batch)
        back = forward.tokens_back({batch: batch["input_ids"] for batch in forward})
        assert [row.tolist() for row in back] == [batch["input_ids"].tolist() for batch in step]


def test_rows_that_cannot_be_regrouped_are_refused_with_their_cause() -> None:
    step = Formed(rules_of(8), ROLL).built(0, Mesh(dp=2))
    with pytest.raises(UserError, match=r"got budget=7, expected at least 8, the tokens of this step's longest row"):
        step.regroup(7)
    with pytest.raises(UserError, match=r"got budget=14, expected at least 16"):
        step.regroup(14, round=16)
    with pytest.raises(UserError, match=r"got round=3, expected a multiple of 2, the value of align\.pack"):
        step.regroup(64, round=3)
    with pytest.raises(UserError, match=r"got values of shape \[4\] for forward pack 0, expected \[32, ...\]"):
        step.regroup(64).tokens_back([np.zeros(4)])
    zigzag = Formed(rules_of(8, budget=16, align=4), ROLL).built(0, Mesh(cp=2))
    with pytest.raises(UserError, match=r"`cp_layout: zigzag` and cp=2 to regroup, expected whole"):
        zigzag.regroup(64)


# What cannot be


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("batch", None), ("packer", "sliding_ffd"), ("max_samples_per_pack", 3), ("micro_batch_size", 2),
        ("window", 8), ("shape", Sizes(multiple=2)), ("shape", "fixed"), ("balance", Balance(order="largest_first")),
        ("warmup", Warmup(init=2, steps=4)),
    ],
)  # fmt: skip
def test_keys_about_packs_are_refused_beside_padded(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"got `{'padded: true` without batches' if key == 'batch' else key}"):
        msgspec.structs.replace(rules_of(8), **{key: value})


@pytest.mark.parametrize("name", ["attention_mask", "shift_labels"])
def test_a_field_of_a_name_that_rows_have_is_refused(name: str) -> None:
    fields = (Field(name=name, dtype="int32"),)
    with pytest.raises(ValueError, match=f"got the field {name} with `padded: true`, expected another name"):
        msgspec.structs.replace(rules_of(8), fields=fields)
    msgspec.structs.replace(Rules(), fields=fields)


def test_a_mesh_that_rows_cannot_serve_is_refused_when_it_attaches() -> None:
    rules = rules_of(8, budget=16, align=8)
    asked = Attach(feed="f", reader="r", host="h", pid=1, mesh=Mesh(pp=2), next_step=0)
    with_any_shape = msgspec.structs.replace(asked, variable_lengths=True)
    assert "got pp=2 for padded micro-batches" in refusal(asked, rules, "zigzag")
    assert "variable_lengths=True" in refusal(asked, rules, "zigzag")
    assert refusal(with_any_shape, rules, "zigzag") == ""
    assert refusal(asked, Rules(packs=8), "zigzag") == "", "packs are of one shape"
    for layout in ("zigzag_pack", "contiguous"):
        assert f"got cp=2 and `cp_layout: {layout}` with `padded: true`" in mesh_refusal(Mesh(cp=2), rules, layout)
    assert mesh_refusal(Mesh(cp=2), rules, "zigzag") == mesh_refusal(Mesh(cp=2), rules, "whole") == ""
    assert "got cp=8" in mesh_refusal(Mesh(cp=8), rules, "zigzag")


def test_ranks_without_a_sample_get_a_row_of_padding_or_all_stop() -> None:
    found = Formed(rules_of(3), [1, 2, 8]).ranks(0, dp=2)
    assert [[pack.num_samples for pack in step] for step in found.values()] == [[1, 1], [1, 0]]
    assert [pack.cu_seqlens_padded.tolist() for pack in found[1, 0]] == [[0, 2], [0, 8]]
    formed = Formed(rules_of(3, empty="error"), [1, 2, 8])
    assert formed.kept.unfit(0, Mesh()) == ""
    assert "got a batch of 3 samples for dp=2 with 2 micro-batches per rank, expected at least 4" in formed.kept.unfit(
        0, Mesh(dp=2)
    )


def test_a_broker_yaml_asks_for_it_with_one_key(tmp_path: Any) -> None:
    file = tmp_path / "broker.yaml"
    file.write_text("{streams: {web: {}}, rules: {padded: true, step: {samples: 8}, budget: 64, align: {lcm: 16}}}")
    rules = read_broker(file).plan()
    assert (rules.padded, rules.packer, rules.micro_batch_size, rules.shape) == (True, "none", 1, "exact")
    assert rules.align == Align(sample=16, pack=16)
    assert Rules().digest == Rules(padded=False).digest != rules.digest
