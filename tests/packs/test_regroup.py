"""A step under another budget: forward packs against packs built by hand of the same samples, and the way back."""

from __future__ import annotations

import copy
import doctest
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import streampack
from streampack.core.layout.boundaries import round_up
from streampack.core.model.fields import Field
from streampack.core.model.mesh import Mesh
from streampack.errors import UserError
from streampack.packs import regroup
from streampack.packs.pack import Pack
from streampack.packs.step import Step
from streampack.views.formats import FORMATS, Views, shown, view
from tests.packs.cases import Case, attached, built, cases, check_counts, check_fields, naive, parts, reassembled

REGROUPED = cases().filter(lambda case: case.cp == 1 or case.layout in ("zigzag", "whole"))
GOLDEN = Case([[[5, 6, 7], [8, 9]], [[3]], [], [[1, 2, 3, 4]], [[9]]], align=2, budget=8, cp=1)


@dataclass(frozen=True)
class ByHand(Case):
    """A step whose packs are of given lengths."""

    lengths: tuple[int, ...] = ()

    @property
    def widths(self) -> list[int]:
        return list(self.lengths)


def by_hand(case: Case, forward: Sequence[Pack]) -> ByHand:
    """The step's own samples, in order, as so many packs of so many samples and tokens."""
    samples, counts = [sample for pack in case.packs for sample in pack], [pack.num_samples for pack in forward]
    assert sum(counts) == len(samples), "every sample is in one forward pack"
    packs = [samples[end - count : end] for end, count in zip(accumulate(counts), counts, strict=True)]
    given = {name: getattr(case, name) for name in Case.__dataclass_fields__}
    return ByHand(**given | {"packs": packs, "lengths": tuple(map(width, forward))})


def width(pack: Any) -> int:
    return int(pack.cu_seqlens_padded[-1])


def slots_of(case: Case) -> list[list[int]]:
    return [[round_up(len(sample), case.align) for sample in pack] for pack in case.packs]


def steps_of(case: Case, stage: int = 0) -> list[Step]:
    """The step as each context-parallel rank gets it."""
    meshes = [Mesh(cp=case.cp, cp_rank=rank, dp=2, dp_rank=1, pp=case.pp, pp_rank=stage) for rank in range(case.ranks)]
    return [built(parts(case, mesh.cp_rank, [len(case.packs)], stage), case, mesh) for mesh in meshes]


def budgets(case: Case) -> st.SearchStrategy[int]:
    """Those that hold every sample, below and above the packs' own."""
    least = round_up(max([1, *(slot for pack in slots_of(case) for slot in pack)]), case.align_pack)
    return st.one_of(st.integers(least, case.budget), st.integers(case.budget, 4 * case.budget))


@given(REGROUPED, st.integers(1, 6), st.data())
def test_a_forward_pack_is_the_pack_that_one_would_build_by_hand_of_its_samples(
    case: Case, min_packs: int, data: st.DataObject
) -> None:
    budget = data.draw(budgets(case), "budget")
    ranks = [step.regroup(budget, min_packs=min_packs) for step in steps_of(case)]
    expected = by_hand(case, ranks[0])
    assert len(ranks[0]) >= min_packs
    for number, samples in enumerate(expected.packs):
        assert expected.widths[number] <= budget
        assert expected.widths[number] % case.align_pack == 0
        whole = naive(expected, samples, number)
        if not any(field.name == "position_ids" for field in case.fields):
            whole["position_ids"] = [place % case.budget for place in whole["position_ids"]]  # of a tail
        assert reassembled(expected, ranks, number) == whole
        for rank, forward in enumerate(ranks):
            pack = forward[number]
            if pack.num_loss_tokens == -1:
                assert case.ranks > 1, "else all labels are here"
                assert budget < case.budget, "else packs are joined whole"
                first = sum(map(len, expected.packs[:number]))
                loss = sum(case.counted(first + i, len(sample)) for i, sample in enumerate(samples))
                pack = replace(pack, num_loss_tokens=loss)
            check_counts(expected, replace(pack, pack=100 + pack.pack), samples, number)
            check_fields(expected, pack, rank, number)


@given(REGROUPED, st.integers(1, 6), st.integers(1, 6))
def test_with_a_budget_of_the_packs_or_more_every_rank_has_as_many_of_as_many_tokens(
    case: Case, times: int, min_packs: int
) -> None:
    """What another rank holds has no say: only how many micro-batches there are, and the shape, if it is fixed."""
    budget, count = times * case.budget + case.budget // 2, len(case.packs)
    other = replace(case, packs=[case.packs[0], *[[]] * (count - 1)])
    one, two = (steps_of(each)[0].regroup(budget, min_packs=min_packs) for each in (case, other))
    assert len(one) == len(two) == max(-(-count // times), min_packs)
    if case.shape == "fixed":
        lengths = [width(pack) for pack in one]
        assert lengths == [width(pack) for pack in two]
        assert sum(lengths) == max(count, len(one)) * case.budget or case.pp > 1, "no token is computed more"
        assert max(lengths) <= times * case.budget
    if case.pp > 1:
        assert len({width(pack) for pack in one}) == 1


@given(REGROUPED, st.integers(1, 6), st.data())
def test_the_way_back_is_the_identity(case: Case, min_packs: int, data: st.DataObject) -> None:
    budget = data.draw(budgets(case), "budget")
    for step in steps_of(case):
        forward = step.regroup(budget, min_packs=min_packs)
        ids = {pack: pack.input_ids + 1 for pack in forward}
        labels = [torch.from_numpy(np.stack([pack.labels, pack.labels + 1], axis=1)) for pack in forward]
        rowed = [value[None] for value in labels]
        found = zip(
            step, forward.tokens_back(ids), forward.tokens_back(labels), forward.tokens_back(rowed),
            forward.samples_back({pack: pack.sample_ids for pack in forward}), strict=True,
        )  # fmt: skip
        for pack, of_ids, of_labels, of_rows, of_samples in found:
            real = ~pack.padding_mask
            assert np.array_equal(of_ids, np.where(real, pack.input_ids + 1, 0))
            assert np.array_equal(of_labels[:, 0].numpy(), np.where(real, pack.labels, 0))
            assert np.array_equal(of_labels[:, 1].numpy(), np.where(real, pack.labels + 1, 0))
            assert of_rows.shape == (1, *of_labels.shape) or max(len(one) for one in labels) == 1
            assert np.array_equal(of_samples, pack.sample_ids)


def test_packs_of_eight_are_joined_by_two() -> None:
    """Five micro-batches are two packs of 16 and one of 8: as many of as many tokens on every rank."""
    (step,) = steps_of(GOLDEN)
    forward = step.regroup(budget=23)
    assert [pack.input_ids.tolist() for pack in forward] == [
        [5, 6, 7, 0, 8, 9, 3, 0, *[0] * 8], [1, 2, 3, 4, *[0] * 12], [9, *[0] * 7],
    ]  # fmt: skip
    assert [pack.cu_seqlens_padded.tolist() for pack in forward] == [[0, 4, 6, 8, 16], [0, 4, 16], [0, 2, 8]]
    assert [pack.cu_seqlens.tolist() for pack in forward] == [[0, 3, 5, 6, 6], [0, 4, 4], [0, 1, 1]]
    assert forward[1].position_ids.tolist() == [0, 1, 2, 3, *range(8), 0, 1, 2, 3], "none beyond those of training"
    assert [pack.num_loss_tokens for pack in forward] == [3, 3, 0]
    assert {(pack.num_micro_batches, pack.step_num_loss_tokens) for pack in forward} == {(3, 6)}
    back = forward.tokens_back([pack.position_ids + 1 for pack in forward])
    assert [row.tolist() for row in back] == [
        [1, 2, 3, 0, 1, 2, 0, 0], [1, *[0] * 7], [0] * 8, [1, 2, 3, 4, *[0] * 4], [1, *[0] * 7],
    ]  # fmt: skip


def test_a_smaller_budget_is_filled_in_order_and_padded_with_empty_packs() -> None:
    (step,) = steps_of(GOLDEN)
    forward = step.regroup(budget=7, min_packs=4)
    assert [pack.input_ids.tolist() for pack in forward] == [
        [5, 6, 7, 0, 8, 9], [3, 0, 1, 2, 3, 4], [9, *[0] * 5], [0] * 6,
    ]  # fmt: skip
    assert [pack.num_samples for pack in forward] == [2, 2, 1, 0]
    assert [pack.num_loss_tokens for pack in forward] == [3, 3, 0, 0]
    assert [pack.cu_seqlens_padded.tolist() for pack in forward[-2:]] == [[0, 2, 6], [0, 6]]
    assert len(step.regroup(budget=7)) == 3
    assert len(step.regroup(np.int64(7), min_packs=torch.tensor(4))) == 4, "as ranks have agreed on it"


def test_a_step_that_cannot_be_regrouped_is_refused_with_its_cause() -> None:
    (step,) = steps_of(GOLDEN)
    with pytest.raises(UserError, match=r"got a budget that holds 2 tokens, but sample \(0, 1099511627776, 0\) has 4 "):
        step.regroup(budget=3)
    for budget, min_packs, said in ((0, 1, "budget=0,"), ("8", 1, "budget='8',"), (8, 0, "min_packs=0,")):
        with pytest.raises(UserError, match=f"got {said} expected a whole number of at least 1"):
            step.regroup(budget, min_packs=min_packs)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"got round=2 for a step of packs, expected none, because packs keep"):
        step.regroup(16, round=2)
    (idle,) = steps_of(replace(GOLDEN, packs=[[], []]))  # a rank that has no sample
    for each in (step, idle):
        with pytest.raises(UserError, match=r"got budget=1, expected at least 2, the value of align\.pack"):
            each.regroup(budget=1)
    for layout in ("contiguous", "zigzag_pack"):
        (step, _) = steps_of(replace(GOLDEN, cp=2, layout=layout, align=4))
        with pytest.raises(UserError, match=f"`cp_layout: {layout}` and cp=2 to regroup, expected zigzag or whole"):
            step.regroup(budget=16)
    with pytest.raises(UserError, match="was not made by a loader"):
        replace(step, regrouping=None).regroup(budget=16)


def test_values_that_do_not_fit_are_refused() -> None:
    (step,) = steps_of(GOLDEN)
    forward = step.regroup(budget=16)
    with pytest.raises(UserError, match="got values for 2 packs, expected values for all 3 forward packs"):
        forward.tokens_back({pack: pack.labels for pack in forward[1:]})
    with pytest.raises(UserError, match=r"got values of shape \[15\] for forward pack 0, expected \[16, ...\]"):
        forward.tokens_back([pack.labels[1:] for pack in forward])
    with pytest.raises(
        UserError,
        match=r"got values of shape \[3\] for forward pack 1, expected \[1, ...\], with one value for each sample",
    ):
        forward.samples_back([np.zeros(3)] * 3)


@given(cases().filter(lambda case: case.cp == 1), st.data())
@settings(max_examples=30)
def test_forward_packs_are_of_the_format_of_their_step(case: Case, data: st.DataObject) -> None:
    (step,), rules = steps_of(case), attached(case).rules
    budget = data.draw(budgets(case), "budget")
    plain = step.regroup(budget)
    for format in FORMATS:
        forward = Views(format, Mesh()).make(steps_of(case)[0], rules).regroup(budget)
        assert len(forward) == len(plain)
        for pack, found in zip(plain, forward, strict=True):
            if format == "numpy":
                assert isinstance(found, Pack)
                continue
            expected = view(pack, format, rules)
            assert list(found) == list(expected)
            for key, value in expected.items():
                assert torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value
            streampack.verify(found)
        back = forward.tokens_back({batch: torch.as_tensor(batch.labels) for batch in forward})
        assert {row.ndim for row in back} == {forward[0].labels.ndim}


@given(REGROUPED)
def test_the_middle_of_a_pipeline_has_forward_packs_of_boundaries_and_positions(case: Case) -> None:
    case = replace(case, pp=3)
    budget = 2 * case.budget
    for middle, last in zip(steps_of(case, 1), steps_of(case, 2), strict=True):
        for pack, other in zip(middle.regroup(budget), last.regroup(budget), strict=True):
            assert set(other) - set(pack) == {"input_ids", "labels", *other.fields}
            for name in ("position_ids", "padding_mask", "cu_seqlens", "cu_seqlens_padded", "sample_ids", "slices"):
                assert np.array_equal(pack[name], other[name]), name


def test_forward_packs_lie_on_the_device_of_their_step() -> None:
    (step,) = steps_of(replace(GOLDEN, fields=(Field(name="value", dtype="bfloat16"),)))
    assert step.regrouping
    on_device = partial(shown, format="thd", device="meta")
    forward = replace(step, regrouping=replace(step.regrouping, show=on_device)).regroup(16)
    assert {tensor.device.type for batch in forward for tensor in batch.tensors().values()} == {"meta"}


def test_a_step_can_be_copied_and_pickled_with_what_regroups_it() -> None:
    (step,) = steps_of(GOLDEN)
    for again in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        assert [pack.input_ids.tolist() for pack in again.regroup(16)] == [
            pack.input_ids.tolist() for pack in step.regroup(16)
        ]


def test_the_example_in_its_docstring_holds() -> None:
    assert doctest.testmod(regroup).failed == 0
