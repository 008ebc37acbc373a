"""The page that compares streampack with other systems: each test that it names exists, and worked examples hold.

The examples are those of the systems' documents that no test of a module has.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from streampack import pack_lengths, plan_step
from streampack.core.layout.boundaries import layout
from streampack.core.layout.labels import positions_of
from streampack.core.layout.shards import shard_slices
from streampack.core.model.mesh import Mesh
from streampack.packs.pack import Pack
from streampack.packs.step import Step
from tests.docs.pages import NAMED, PAGES, ROOT, names_in
from tests.packs.cases import Case, built, parts

COMPARISON = PAGES[ROOT / "docs/concepts/comparison.md"]
ROWS = [
    [cell.strip() for cell in row.strip("|").split("|")]
    for table in re.findall(r"^\| documented \|.*\n\|[-|]+\n((?:\|.*\n)+)", COMPARISON, re.MULTILINE)
    for row in table.splitlines()
]


def test_each_test_that_the_comparison_names_exists() -> None:
    named = {pair for row in ROWS for pair in NAMED.findall(row[-1])}
    assert len(named) > 100
    assert [f"{file}::{name}" for file, name in named if name not in names_in(file)] == []


def test_each_documented_feature_names_a_test_or_a_reason() -> None:
    assert {len(row) for row in ROWS} == {3}
    without = [row for row in ROWS if not NAMED.search(row[-1])]
    assert [row for row in without if not re.match(r"(Not here|Not measured|Declined): ", row[1])] == []


def wasted(lengths: list[int], width: int) -> float:
    """Return the share of padding in rows of ``width`` tokens with one sample each."""
    return 1 - sum(lengths) / (len(lengths) * width)


def test_nemo_rls_four_rows_are_one_pack_with_one_token_of_padding() -> None:
    assert wasted([3, 6, 2, 3], 6) == pytest.approx(0.42, abs=0.01)
    assert pack_lengths([3, 6, 2, 3], 15) == [[0, 1, 2, 3]]


def test_nemo_rls_six_rows_are_two_micro_batches_of_16_tokens_at_most() -> None:
    plan = plan_step([2, 4, 7, 6, 3, 4], 16, mode="padded")
    assert sorted(plan.shapes) == [(2, 7), (4, 4)]
    assert plan.padded is not None
    assert (plan.padded.original_tokens, plan.padded.actual_tokens) == (42, 30)


def test_rolls_rows_of_200_and_240_tokens_are_256_long() -> None:
    assert plan_step([200, 240], 512, mode="padded", align=64).shapes == [(2, 256)]


def test_rolls_micro_batch_of_two_rows_is_split_for_a_pipeline() -> None:
    """Its document leaves the row of one token 6 tokens long; here both parts get their own length."""
    lengths, rules = [7, 6, 8, 5, 1, 3, 8, 6], {"align": 2, "order": "packer"}
    three = plan_step(lengths, 12, 2, mode="padded", **rules)  # type: ignore[arg-type]
    assert three.shapes == [(2, 6), (1, 8), (1, 8)]
    assert three.padded is not None
    assert (three.padded.original_tokens, three.padded.actual_tokens) == (64, 56), "its 80 are rows of 10"
    four = plan_step(lengths, 12, 2, mode="padded", pp=2, variable_lengths=True, **rules)  # type: ignore[arg-type]
    assert four.shapes == [(1, 4), (1, 6), (1, 8), (1, 8)]


def test_automodels_samples_waste_61_and_37_percent_in_rows_and_6_in_a_pack() -> None:
    assert [round(100 * wasted([length], 128), 1) for length in (50, 80)] == [60.9, 37.5]
    assert pack_lengths([50, 30, 40], 128) == [[0, 1, 2]]
    assert wasted([50 + 30 + 40], 128) == pytest.approx(0.0625)


@pytest.mark.parametrize(("mean", "in_rows", "in_automodels_packs"), [(150, 0.71, 0.28), (200, 0.61, 0.20)])
def test_packs_waste_less_than_automodels_at_the_same_mean_length(
    mean: int, in_rows: float, in_automodels_packs: float
) -> None:
    lengths = np.random.default_rng(0).permutation(np.arange(mean - 130, mean + 131)).tolist()
    assert wasted(lengths, 512) == pytest.approx(in_rows, abs=0.01)
    packs = pack_lengths(lengths, 512)
    assert wasted([sum(lengths[i] for i in pack) for pack in packs], 512) < in_automodels_packs / 10


def test_equal_samples_as_long_as_a_pack_gain_nothing() -> None:
    assert pack_lengths([2048] * 5, 2048) == [[i] for i in range(5)]


def test_a_sample_of_a_million_tokens_is_a_pack_over_eight_ranks() -> None:
    tokens = 1 << 20
    assert pack_lengths([tokens], tokens) == [[0]]
    pack = layout(np.array([tokens]), 16, tokens)
    ranks = [positions_of(*shard_slices(pack.cu_seqlens_padded, 8, rank, "zigzag")) for rank in range(8)]
    assert {len(rank) for rank in ranks} == {tokens // 8}
    assert len({int((rank + 1).sum()) for rank in ranks}) == 1, "all have as many pairs of tokens"


def pack_of(samples: list[list[int]], length: int) -> Pack:
    """Return these samples as a pack of ``length`` tokens, as a trainer gets it."""
    case = Case([samples], 1, length, 1)
    step: Step[Pack] = built(parts(case, 0, [1]), case, Mesh())
    return step[0]


def test_veomnis_four_samples_are_one_pack_by_tokens_and_two_by_samples() -> None:
    assert pack_lengths([4, 2, 3, 1], 10) == [[0, 1, 2, 3]]
    assert pack_lengths([4, 2, 3, 1], 10, "none", micro_batch_size=2) == [[0, 1], [2, 3]]
    pack = pack_of([[1, 2, 3, 4], [5, 6], [7, 8, 9], [10]], 10)
    assert pack.input_ids.tolist() == list(range(1, 11))
    assert pack.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2, 0]


def test_veomnis_ranks_with_6_and_4_tokens_get_5_each() -> None:
    plan = plan_step([4, 2, 3, 1], 6, 2)
    assert (plan.before.difference, plan.after.difference) == (2, 0)


@pytest.mark.parametrize(
    ("samples", "length", "positions"),
    [
        ([4, 2], 8, [0, 1, 2, 3, 0, 1, 0, 1]),
        ([3, 2, 2], 10, [0, 1, 2, 0, 1, 0, 1, 0, 1, 2]),
        ([4, 1], 8, [0, 1, 2, 3, 0, 0, 1, 2]),
    ],
)
def test_veomnis_padded_packs_have_positions_that_restart_and_no_labels(
    samples: list[int], length: int, positions: list[int]
) -> None:
    """The document counts the tail of its third example on from the last sample, against its own boundaries."""
    pack = pack_of([[7] * n for n in samples], length)
    assert pack.position_ids.tolist() == positions
    assert pack.input_ids.tolist()[sum(samples) :] == [0] * (length - sum(samples))
    assert set(pack.labels.tolist()[sum(samples) :]) == {-100}
