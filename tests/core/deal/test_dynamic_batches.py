"""Dynamic batching: every rank the same shapes, none over budget, and the corrected example of ROLL's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.deal.dynamic_batches import PaddedBatches, padded_batches
from streampack.errors import ConfigError, SampleError


@st.composite
def asked(draw: st.DrawFn) -> tuple[list[int], dict[str, Any]]:
    length_round = draw(st.integers(1, 5))
    budget = length_round * draw(st.integers(1, 12))
    settings = {
        "budget": budget, "length_round": length_round, "dp": draw(st.integers(1, 5)),
        "micro_batch_multiple": draw(st.integers(1, 4)), "min_micro_batches": draw(st.integers(1, 6)),
    }  # fmt: skip
    return draw(st.lists(st.integers(1, budget), max_size=60)), settings


def micro_batches(found: PaddedBatches) -> list[list[list[int]]]:
    """Sample numbers, -1 for padding, by micro-batch and row, one for each rank."""
    return [found.places[start:stop].tolist() for start, stop in zip(found.bounds, found.bounds[1:], strict=False)]


@given(asked())
def test_every_sample_is_in_one_place_and_no_micro_batch_is_over_budget(
    asked: tuple[list[int], dict[str, Any]],
) -> None:
    lengths, settings = asked
    found = padded_batches(lengths, **settings)
    assert sorted(found.places[found.places >= 0].tolist()) == list(range(len(lengths)))
    assert found.num_micro_batches >= settings["min_micro_batches"]
    assert found.num_micro_batches % settings["micro_batch_multiple"] == 0
    assert (found.bounds[0], found.bounds[-1]) == (0, len(found.places))
    actual = 0
    for rows, width in zip(micro_batches(found), found.lengths.tolist(), strict=True):
        assert rows
        assert len(rows) * width <= settings["budget"]
        assert width % settings["length_round"] == 0
        longest = max((lengths[i] for row in rows for i in row if i >= 0), default=0)
        assert longest <= width < max(longest, 1) + settings["length_round"]
        actual += len(rows) * width * settings["dp"]
    assert found.figures.actual_tokens == actual
    assert found.figures.valid_tokens == sum(lengths)


@given(asked())
def test_samples_are_dealt_by_length_in_turn(asked: tuple[list[int], dict[str, Any]]) -> None:
    lengths, settings = asked
    found = padded_batches(lengths, **settings)
    by_length = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    for rank in range(settings["dp"]):
        column = found.places[:, rank]
        assert column[column >= 0].tolist() == by_length[rank :: settings["dp"]]


@given(asked())
def test_a_micro_batch_is_closed_only_when_the_next_sample_would_not_fit(
    asked: tuple[list[int], dict[str, Any]],
) -> None:
    lengths, settings = asked
    found = padded_batches(lengths, **settings | {"micro_batch_multiple": 1, "min_micro_batches": 1})
    for start, stop in zip(found.bounds[:-2].tolist(), found.bounds[1:-1].tolist(), strict=True):
        longest = max(lengths[i] for i in found.places[stop].tolist() if i >= 0)
        padded = -(-longest // settings["length_round"]) * settings["length_round"]
        assert (stop - start + 1) * padded > settings["budget"]


def test_the_example_of_roll_is_dealt_within_its_budget() -> None:
    """ROLL's documentation has three micro-batches, the first 2 x 6 = 12 tokens for a budget of 10, and 56 in all."""
    found = padded_batches([7, 6, 8, 5, 1, 3, 8, 6], budget=10, dp=2, length_round=2)
    assert found.lengths.tolist() == [4, 6, 8, 8]
    assert micro_batches(found) == [[[4, 5]], [[3, 1]], [[7, 0]], [[2, 6]]]
    assert (found.figures.valid_tokens, found.figures.original_tokens, found.figures.actual_tokens) == (44, 64, 52)
    assert found.figures.removed_padding_tokens == 12
    assert found.figures.removed_padding_ratio == 12 / 64


def test_figures_are_against_the_batch_as_wide_as_it_is() -> None:
    assert padded_batches([3, 5], 8, 1, width=16).figures.original_tokens == 32


def test_more_micro_batches_are_split_off_those_with_most_tokens_then_empty() -> None:
    """Places of 1, 1, 1, 1 and 8 tokens: 4 x 1 and 1 x 8; the 8 cannot be split, so the ones are, in half."""
    found = padded_batches([1, 1, 1, 1, 8], 8, 1, micro_batch_multiple=3)
    assert [len(rows) for rows in micro_batches(found)] == [2, 2, 1]
    found = padded_batches([2, 2], 8, 1, min_micro_batches=4)
    assert micro_batches(found) == [[[0]], [[1]], [[-1]], [[-1]]], "rows of padding, where there are no more samples"


def test_the_first_of_those_with_most_tokens_is_split_until_none_has_two_places() -> None:
    found = padded_batches([1] * 8, 8, 1, min_micro_batches=6)
    assert [len(rows) for rows in micro_batches(found)] == [1, 1, 1, 1, 2, 2]
    found = padded_batches([1] * 40_000, 40_000, 1, min_micro_batches=50_000)
    assert found.num_micro_batches == 50_000, "and so many take no minutes"
    assert found.figures.actual_tokens == 50_000


def test_a_pipeline_is_refused_unless_its_trainer_takes_any_length() -> None:
    with pytest.raises(ConfigError, match=r"pp: got 2, expected 1.*variable_lengths"):
        padded_batches([1, 2], 4, 1, pp=2)
    found = padded_batches([1, 2, 3], 4, 1, pp=2, micro_batch_multiple=3, variable_lengths=True)
    assert found.num_micro_batches == 6


def test_a_sample_that_does_not_fit_once_padded_is_named() -> None:
    with pytest.raises(SampleError, match=r"sample 1: got 9 tokens \(12 with padding\), expected 1 to 10"):
        padded_batches([4, 9], 10, 1, length_round=4)
    with pytest.raises(SampleError, match="sample 0: got 0 tokens"):
        padded_batches([0], 10, 1)
    with pytest.raises(SampleError, match="sample 0: got 7 tokens"):
        padded_batches([7], 10, 1, width=6)


@pytest.mark.parametrize("name", ["budget", "dp", "length_round", "micro_batch_multiple", "min_micro_batches", "pp"])
def test_numbers_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: got 0, expected at least 1"):
        padded_batches([1], **{"budget": 8, "dp": 1, name: 0})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="length_round: got 9"):
        padded_batches(np.array([1]), 8, 1, length_round=9)
