"""Losses on packs: what is written for one sample gives, packed, the loss and the gradients of a loop without packs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import streampack
from streampack.errors import UserError
from streampack.training.loss import reduce_metrics
from streampack.views.view import View
from tests.packs.cases import Case, cases
from tests.views.shown import steps_of, views_of

Learned = tuple[float, list[torch.Tensor]]
"""A loss, and the gradient of each parameter."""
TWO = Case([[[5, 6, 7], [8, 9]], [[3]]], align=4, budget=12, cp=2)


@given(cases())
def test_a_sample_is_what_the_rank_holds_of_its_real_tokens(case: Case) -> None:
    """Against the places of all tokens: nothing of padding, nothing of another sample, in order; from all ranks all."""
    for step, batches in zip(steps_of(case), views_of(case), strict=True):
        for pack, batch in zip(step, batches, strict=True):
            places = torch.from_numpy(pack.positions())
            cut = streampack.per_sample(torch.stack([places, -places], dim=1), batch)
            assert len(cut) == pack.num_samples
            starts = pack.cu_seqlens_padded[:-1].tolist()
            for start, length, one in zip(starts, np.diff(pack.cu_seqlens).tolist(), cut, strict=False):
                expected = places[(places >= start) & (places < start + length)]
                assert one.tolist() == torch.stack([expected, -expected], dim=1).tolist()


@given(cases())
def test_the_parts_of_all_ranks_are_the_sample(case: Case) -> None:
    tokens = [[] for _ in range(sum(map(len, case.packs)))]  # type: list[list[int]]
    for batches in views_of(case)[: case.ranks]:
        cut = [one for batch in batches for one in streampack.per_sample(batch.input_ids, batch)]
        for all_of_it, part in zip(tokens, cut, strict=True):
            all_of_it += part.tolist()
    assert [sorted(one) for one in tokens] == [sorted(sample) for pack in case.packs for sample in pack]


@settings(max_examples=30)
@given(cases().filter(lambda case: case.cp == 1))
def test_every_format_is_cut_alike_by_rows_or_by_tokens(case: Case) -> None:
    for format in ("hf_shifted", "megatron", "bshd", "torchtitan"):
        labels = "shift_labels" if format == "hf_shifted" else "labels"
        for one, other in zip(views_of(case)[0], views_of(case, format)[0], strict=True):
            outputs = torch.randn(len(one.input_ids), 3)
            expected = [each.tolist() for each in streampack.per_sample(outputs, one)]
            for shown in (outputs, outputs[None]):
                assert [each.tolist() for each in streampack.per_sample(shown, other)] == expected
            cut = streampack.per_sample(getattr(other, labels), other)
            assert [each.tolist() for each in cut] == [each.tolist() for each in streampack.per_sample(one.labels, one)]


def test_rows_of_padded_micro_batches_are_samples() -> None:
    samples = [list(range(100 * i, 100 * i + 1 + i * 7 % 20)) for i in range(30)]
    found: list[list[int]] = []
    with streampack.local(samples, budget=64, samples=10, padded=True, align=4) as loader:
        for batch in loader:
            assert batch.input_ids.dim() == 2
            cut = streampack.per_sample(batch.input_ids[..., None] + torch.arange(2), batch)
            assert [one[:, 1].tolist() for one in cut] == [(one[:, 0] + 1).tolist() for one in cut]
            found += [one[:, 0].tolist() for one in cut]
    assert sorted(found) == samples


def model() -> torch.nn.Module:
    """Of one token: what a loss does with packs does not depend on what attention does (``test_attention``)."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(2**16, 4), torch.nn.Linear(4, 32)).double()


def of_tokens(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, torch.where(labels < 0, labels, labels % 32), reduction="sum")


def of_a_sample(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return of_tokens(logits, labels) / max(int((labels >= 0).sum()), 1)


def gradients(net: torch.nn.Module) -> list[torch.Tensor]:
    return [each.grad if each.grad is not None else torch.zeros_like(each) for each in net.parameters()]


def labels_of(case: Case, number: int, tokens: list[int]) -> torch.Tensor:
    """Of a sample, by its number: of each token what comes next, or what was sent for that, where it is learned."""
    given = {field.name: case.values(number, field).astype(np.int64).tolist() for field in case.fields}
    learned = given.get("loss_mask", [1] * len(tokens))
    next_ones = zip(given.get("labels", tokens)[1:], learned[1:], strict=True)
    return torch.tensor([*(label if counts else -100 for label, counts in next_ones), -100])


def of_a_loop(case: Case, loss_fn: Any, denominator: int) -> Learned:
    """No packs: the samples one after another."""
    net, total = model(), 0.0
    for number, tokens in enumerate(sample for pack in case.packs for sample in pack):
        logits = net(torch.tensor(tokens) % 2**16)
        loss = loss_fn(logits, labels_of(case, number, tokens)) / max(denominator, 1)
        loss.backward()
        total += loss.item()
    return total, gradients(net)


def of_packs(case: Case, loss_fn: Any, denominator: int, ranks: list[int], **how: Any) -> Learned:
    net, total, all_views = model(), 0.0, views_of(case)
    for rank in ranks:
        for batch in all_views[rank]:
            logits = net(batch.input_ids % 2**16)
            loss = streampack.packed_loss(loss_fn, logits, batch, batch.labels, denominator=denominator, **how)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
    return total, gradients(net)


def same(one: Learned, other: Learned, times: float = 1) -> None:
    assert one[0] == pytest.approx(times * other[0], rel=1e-9, abs=1e-12)
    for got, expected in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(got, times * expected, rtol=1e-9, atol=1e-12)


@given(cases().filter(lambda case: case.cp == 1))
def test_packed_loss_and_gradients_are_those_of_a_loop_without_packs(case: Case) -> None:
    """A mean over tokens and a mean over samples, over ragged packs with gaps, tails, masks and empty ones."""
    step = steps_of(case)[0]
    for loss_fn, denominator in ((of_tokens, step.num_loss_tokens), (of_a_sample, step.num_samples)):
        same(of_packs(case, loss_fn, denominator, [0]), of_a_loop(case, loss_fn, denominator))


@settings(max_examples=30)
@given(cases())
def test_sums_over_tokens_add_up_over_the_ranks_that_share_a_sample(case: Case) -> None:
    """And where gradients are averaged over the ranks, ``averaged_over`` gives back what that takes."""
    denominator = steps_of(case)[0].num_loss_tokens
    whole = of_a_loop(case, of_tokens, denominator)
    ranks = list(range(case.ranks))
    same(of_packs(case, of_tokens, denominator, ranks, token_sum=True), whole)
    averaged = of_packs(case, of_tokens, denominator, ranks, token_sum=True, averaged_over=case.ranks)
    same(averaged, whole, times=case.ranks)


def test_a_loss_that_needs_whole_samples_is_refused_where_ranks_share_them() -> None:
    batch = views_of(TWO)[0][0]
    outputs = torch.zeros(len(batch.input_ids))
    with pytest.raises(
        UserError, match=r"\(cp=2, zigzag\), expected a loss that is a sum over tokens\. Pass token_sum"
    ):
        streampack.packed_loss(torch.sum, outputs, batch, denominator=1)


def test_a_denominator_may_be_a_sum_of_weights_below_1() -> None:
    batch = views_of(Case([[[5, 6, 7], [8]]], 1, 4, 1))[0][0]
    assert streampack.packed_loss(torch.sum, torch.ones(4), batch, denominator=0.5).item() == 8


def test_a_pack_that_every_rank_has_whole_is_not_shared() -> None:
    batch = views_of(replace(TWO, layout="whole"))[0][0]
    loss = streampack.packed_loss(torch.sum, torch.ones(len(batch.input_ids)), batch, denominator=1)
    assert loss.item() == 5


def test_a_sample_that_other_ranks_hold_is_passed_over() -> None:
    """A loss would make nan of none of its tokens."""
    batch = views_of(Case([[[5, 6, 7, 8], [9, 10, 11, 12]]], 1, 8, 2, "contiguous"))[0][0]
    loss = streampack.packed_loss(torch.mean, torch.ones(4), batch, denominator=1, token_sum=True)
    assert loss.item() == 1


def test_values_that_cannot_be_cut_or_summed_are_refused_in_a_line() -> None:
    batch = views_of(Case([[[5, 6, 7], [8]]], 1, 6, 1))[0][0]
    with pytest.raises(
        UserError, match=r"got outputs of shape \[5, 2\], expected shape \[6, \.\.\.\] or \[1, 6, \.\.\.\]"
    ):
        streampack.per_sample(torch.zeros(5, 2), batch)
    with pytest.raises(UserError, match=r"got a loss of shape \[3\] for one sample, expected one number"):
        streampack.packed_loss(lambda one: one, torch.zeros(6), batch, denominator=1)
    with pytest.raises(UserError, match="got averaged_over=0, expected at least 1"):
        streampack.packed_loss(torch.sum, torch.zeros(6), batch, denominator=1, averaged_over=0)
    for wrong in (-1, float("nan")):  # as a forward pack's num_loss_tokens may be
        with pytest.raises(UserError, match=f"got denominator={wrong}, expected at least 0"):
            streampack.packed_loss(torch.sum, torch.zeros(6), batch, denominator=wrong)
    with pytest.raises(UserError, match=r"of type View without its pack, expected a batch as the loader returned it"):
        streampack.per_sample(torch.zeros(6), View(batch))


def test_a_pack_of_one_token_is_cut_in_rows_too() -> None:
    (batch,) = views_of(Case([[[5]]], 1, 1, 1), "hf")[0]
    assert [tuple(one.shape) for one in streampack.per_sample(torch.zeros(1, 1, 7), batch)] == [(1, 7)]


def test_an_empty_pack_has_a_loss_of_0_and_gradients_of_0() -> None:
    """Ranks reduce gradients together; and what a model makes of padding alone, nan too, is nobody's."""
    (batch,) = views_of(Case([[]], 1, 4, 1))[0]
    outputs = torch.full((4, 3), torch.nan, requires_grad=True)
    loss = streampack.packed_loss(of_tokens, outputs, batch, batch.labels, denominator=0)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0
    assert outputs.grad is not None
    assert not outputs.grad.any()


def test_minima_and_maxima_are_reduced_as_such() -> None:
    found = reduce_metrics([
        {"ratio_min": torch.tensor(0.5, requires_grad=True), "ratio_max": 2.0, "clipped": torch.tensor(3)},
        {},
        {"ratio_min": 0.75, "ratio_max": 4.0, "clipped": 1},
    ])  # fmt: skip
    assert {name: value.item() for name, value in found.items()} == {"ratio_min": 0.5, "ratio_max": 4.0, "clipped": 4}
    assert not any(value.requires_grad for value in found.values())
