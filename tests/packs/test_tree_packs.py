"""Packs whose samples share tokens: each sample can be read from its pack as it was pushed."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.batch_checks.step_check import verify
from streampack.core.flops.model_flops import ModelFlops
from streampack.core.model.mesh import Mesh
from streampack.core.model.samples import IGNORE_INDEX
from streampack.errors import InvariantError, UserError
from streampack.packs import regroup
from streampack.packs.pack import Pack
from streampack.producer.pushed_samples import chunk_of_group
from tests.packs.tree_chain import Chain, Sample, groups, prompts, rules_of


def check_sample(pack: Pack, i: int, given_: Sample, kept: int) -> None:
    """Sample i of a pack is the first ``kept`` tokens of one that was pushed, with its fields and labels."""
    assert pack.cu_paths is not None
    assert pack.path_index is not None
    begin, end = pack.cu_paths[i : i + 2].tolist()
    at = pack.path_index[begin:end]
    ids = np.asarray(given_["input_ids"])[:kept]
    assert pack.input_ids[at].tolist() == ids.tolist()
    assert pack.position_ids[at].tolist() == list(range(kept))
    assert pack.fields["segment"][at].tolist() == given_["segment"][:kept].tolist()
    assert not pack.padding_mask[at].any()
    mask = given_["loss_mask"][1:kept]
    assert pack.labels[begin:end].tolist() == [*np.where(mask == 0, IGNORE_INDEX, ids[1:]).tolist(), IGNORE_INDEX]
    assert pack.fields["advantage"][begin:end].tolist() == [*given_["advantage"][1:kept].tolist(), 0]
    assert pack.fields["reward"][i] == given_["reward"]


@given(
    given_=st.lists(st.tuples(groups(), st.booleans()), min_size=1, max_size=5), budget=st.sampled_from([64, 96, 400]),
    batch=st.none() | st.integers(1, 20), part_bytes=st.sampled_from([1, 1 << 20]), dp=st.integers(1, 2),
    most=st.none() | st.integers(1, 9),
)  # fmt: skip
def test_every_sample_is_in_a_pack_as_it_was_pushed(
    given_: list[tuple[list[Sample], bool]], budget: int, batch: int | None, part_bytes: int, dp: int, most: int | None
) -> None:
    chain = Chain(rules_of(budget, batch, max_samples_per_pack=most), part_bytes)
    for group, share in given_:
        numbers = chain.send(group, share=share)
        assert sorted(numbers) == list(range(min(numbers), min(numbers) + len(group)))
    found = set[int]()
    steps = chain.steps(Mesh(dp=dp))
    steps += [chain.step(step.index, Mesh(dp=dp, dp_rank=1)) for step in steps if dp == 2]
    for step in steps:
        for pack in step:
            assert pack.shared is not None
            assert pack.cu_paths is not None
            assert pack.path_index is not None
            assert pack.num_samples <= (most or 99)
            size = int(pack.cu_paths[-1])
            assert len(pack.labels) == len(pack.path_index) == size + (size == len(pack.input_ids))
            assert pack.labels[size:].tolist() == [IGNORE_INDEX] * (len(pack.labels) - size)
            assert int(pack.cu_seqlens[-1]) == size - int(pack.shared.sum()) == int((~pack.padding_mask).sum())
            assert pack.num_loss_tokens == int((pack.labels != IGNORE_INDEX).sum())
            for i, (_, number, part) in enumerate(pack.sample_ids.tolist()):
                assert part == 0
                assert number not in found
                found.add(number)
                check_sample(pack, i, chain.given[number], len(chain.given[number]["input_ids"]))
    assert found == set(chain.given)


def test_a_prompt_is_sent_and_computed_once() -> None:
    chain, plain = Chain(rules_of(96)), Chain(rules_of(96))
    chain.send(prompts(6), share=True)
    plain.send(prompts(6), share=False)
    (step,) = chain.steps()
    (pack, empty) = sorted(step, key=lambda pack: -pack.num_samples)
    assert (pack.num_samples, empty.num_samples) == (6, 0)
    assert int(pack.cu_seqlens[-1]) == 30 + 6 * 10
    assert chain.sent_bytes < plain.sent_bytes
    assert sum(pack.num_samples > 0 for step in plain.steps() for pack in step) == 3


def test_shared_tokens_cost_flops_once_and_the_others_see_them() -> None:
    chain = Chain(rules_of(96))
    chain.send(prompts(6), share=True)
    (step,) = chain.steps()
    model = ModelFlops(token=100, pair=1)
    flops = 100 * 90 + 30 * 31 // 2 + 6 * (10 * 30 + 55)  # a prompt of 30, and six answers of 10 that see it
    assert step.flops(model) == sum(pack.flops(model) for pack in step) == flops
    assert step.sum_squares == 30**2 + 6 * (40**2 - 30**2)


def test_a_tree_that_no_pack_holds_is_cut_into_trees_that_fit() -> None:
    chain = Chain(rules_of(64, 12))
    chain.send(prompts(12))
    (step,) = chain.steps()
    assert sorted((pack.num_samples, int(pack.cu_seqlens[-1])) for pack in step) == [(3, 60)] * 4


def test_a_tree_that_must_stay_in_one_pack_is_refused_or_dropped_if_none_holds_it() -> None:
    for overlong in ("error", "drop"):
        chain = Chain(rules_of(64, overlong=overlong))
        chain.send(prompts(3), keep="pack")
        if overlong == "error":
            with pytest.raises(AssertionError):
                chain.send(prompts(4), keep="pack")
        else:
            chain.send(prompts(4), keep="pack")
        assert sum(step.num_samples for step in chain.steps()) == 3


@given(groups(), st.sampled_from(["truncate", "split", "drop"]), st.sampled_from([4, 9, 20]))
def test_samples_of_a_tree_that_are_too_long_follow_the_policy(group: list[Sample], policy: Any, budget: int) -> None:
    chain = Chain(rules_of(budget, overlong=policy))
    chain.send(group)
    found = dict[int, int]()
    for step in chain.steps():
        for pack in step:
            assert pack.cu_paths is not None
            for i, (_, number, part) in enumerate(pack.sample_ids.tolist()):
                length = int(np.diff(pack.cu_paths)[i])
                found[number] = found.get(number, 0) + length
                if policy != "split":
                    check_sample(pack, i, chain.given[number], min(len(chain.given[number]["input_ids"]), budget))
                assert part == 0 or policy == "split"
    lengths = {number: len(sample["input_ids"]) for number, sample in chain.given.items()}
    of_long = {"truncate": dict.fromkeys(lengths, budget), "split": lengths, "drop": dict.fromkeys(lengths, 0)}[policy]
    kept = {number: n if n <= budget else of_long[number] for number, n in lengths.items()}
    assert found == {number: n for number, n in kept.items() if n}


def test_tokens_that_differ_in_a_field_that_the_model_reads_are_not_shared() -> None:
    alike = prompts(2)
    apart = [alike[0], {**alike[1], "segment": np.where(np.arange(40) < 5, 0, 1).astype(np.int32)}]
    sizes = []
    for group in (alike, apart):
        chain = Chain(rules_of(96))
        chain.send(group)
        sizes.append(sum(int(pack.cu_seqlens[-1]) for step in chain.steps() for pack in step))
    assert sizes == [50, 75]


def test_a_run_that_does_not_let_samples_share_refuses_trees() -> None:
    lease = msgspec.structs.replace(Chain(rules_of()).lease, share=msgspec.UNSET)
    with pytest.raises(UserError, match="Set `share: prefix` under `rules`"):
        chunk_of_group(prompts(2), lease, 0, None, None, "prefix")
    with pytest.raises(UserError, match="expected 'prefix' or None"):
        chunk_of_group(prompts(2), lease, 0, None, None, "suffix")  # type: ignore[arg-type]


@given(
    given_=st.lists(groups(), min_size=1, max_size=8), times=st.integers(1, 3), more=st.integers(0, 40),
    min_packs=st.integers(1, 4),
)  # fmt: skip
def test_forward_packs_join_trees_and_give_values_back(
    given_: list[list[Sample]], times: int, more: int, min_packs: int
) -> None:
    chain = Chain(rules_of(96, batch=sum(map(len, given_))))
    for group in given_:
        chain.send(group)
    for step in chain.steps():
        forward = step.regroup(96 * times + more, min_packs=min_packs)
        assert len(forward) >= min_packs
        found = []
        for pack in forward:
            verify(pack, rules=regroup._rules_of(len(pack.input_ids), chain.rules))
            for i, (_, number, _) in enumerate(pack.sample_ids.tolist()):
                check_sample(pack, i, chain.given[number], len(chain.given[number]["input_ids"]))
                found.append(number)
        assert found == [number for pack in step for _, number, _ in pack.sample_ids.tolist()]
        for name, back in (
            ("labels", forward.tokens_back([pack.labels for pack in forward])),
            ("input_ids", forward.tokens_back([pack.input_ids for pack in forward])),
        ):
            for pack, values in zip(step, back, strict=True):
                assert pack.cu_paths is not None
                size = int(pack.cu_paths[-1]) if name == "labels" else len(values)
                assert values[:size].tolist() == pack[name][:size].tolist()
        with pytest.raises(UserError, match="Such packs are joined, but not cut"):
            step.regroup(95)


@given(given_=st.lists(groups(), min_size=1, max_size=4), data=st.data())
def test_verify_passes_trees_and_finds_what_is_changed_in_them(given_: list[list[Sample]], data: st.DataObject) -> None:
    chain = Chain(rules_of(96, batch=sum(map(len, given_))))
    for group in given_:
        chain.send(group)
    (step,) = chain.steps()
    verify(step, Mesh(), chain.rules)
    pack = max(step, key=lambda pack: int(pack.shared.sum()))
    names = ["shared", "cu_paths", "path_index", "labels", "position_ids", "padding_mask", "cu_seqlens"]
    name = data.draw(st.sampled_from(names))
    at = data.draw(st.integers(0, len(pack[name]) - 1))
    changed = pack[name].copy()
    changed[at] = ~changed[at] if changed.dtype == bool else changed[at] + 1
    setattr(pack, name, changed)
    with pytest.raises(InvariantError):
        verify(pack, Mesh(), chain.rules)
