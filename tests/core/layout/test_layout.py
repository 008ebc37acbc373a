"""Where tokens lie: boundaries, context-parallel shards, positions and labels, held to published vectors."""

from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.layout.boundaries import Layout, layout, round_up
from streampack.core.layout.labels import positions_of
from streampack.core.layout.shards import shard_slices
from tests.core.layout.transformer_engine import te_indices


def held(cu: list[int], cp: int, rank: int, kind: str = "zigzag") -> list[int]:
    held: list[int] = positions_of(*shard_slices(np.array(cu, np.int32), cp, rank, kind)).tolist()
    return held


def drawn(pack: Layout, cp: int, rank: int) -> str:
    """A shard as the design draws it: sample numbers, ``p`` for padding."""
    picture = ["p"] * pack.num_tokens
    for i, (start, length) in enumerate(zip(pack.cu_seqlens_padded[:-1].tolist(), pack.lengths.tolist(), strict=False)):
        picture[start : start + length] = [str(i)] * length
    return " ".join(picture[at] for at in held(pack.cu_seqlens_padded.tolist(), cp, rank))


@st.composite
def packs(draw: st.DrawFn, cp: int) -> tuple[Layout, int]:
    """A random pack whose segments cp ranks can share, and its sample alignment."""
    align = 2 * cp * draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, 60), max_size=8))
    used = sum(round_up(length, align) for length in lengths)
    total = used + 2 * cp * draw(st.integers(0 if used else 1, 5))
    return layout(np.array(lengths, np.int64), align, total), align


# Golden vectors


def test_two_samples_of_eight_are_cut_for_two_ranks_as_by_hand() -> None:
    assert held([0, 8, 16], 2, 0) == [0, 1, 6, 7, 8, 9, 14, 15]
    assert held([0, 8, 16], 2, 1) == [2, 3, 4, 5, 10, 11, 12, 13]


def test_stretches_of_a_sample_cost_ranks_6_and_15_where_zigzag_costs_them_alike() -> None:
    """ROLL's figure: causal attention of 6 tokens over two ranks, in cells of its triangle."""

    def cells(length: int, rank: int, kind: str) -> int:
        starts, stops = shard_slices(np.array([0, length], np.int32), 2, rank, kind)
        return int((positions_of(starts, stops) + 1).sum())

    assert [cells(6, rank, "contiguous") for rank in (0, 1)] == [6, 15]
    assert [cells(8, rank, "zigzag") for rank in (0, 1)] == [18, 18]


def test_nemo_rl_draws_lengths_5_8_1_3_so() -> None:
    pack = layout(np.array([5, 8, 1, 3]), 4, 24)
    assert drawn(pack, 2, 0) == "0 0 p p 1 1 1 1 2 p 3 p"
    assert drawn(pack, 2, 1) == "0 0 0 p 1 1 1 1 p p 3 3"


def test_roll_draws_lengths_2_4_6_1_so() -> None:
    pack = layout(np.array([2, 4, 6, 1]), 4, 20)
    assert pack.cu_seqlens_padded.tolist() == [0, 4, 8, 16, 20]
    assert drawn(pack, 2, 0) == "0 p 1 1 2 2 p p 3 p"
    assert drawn(pack, 2, 1) == "0 p 1 1 2 2 2 2 p p"


@pytest.mark.parametrize(
    ("lengths", "total", "cu"),
    [([4, 2], 8, [0, 4, 6, 8]), ([3, 2, 2], 10, [0, 3, 5, 7, 10]), ([4, 1], 8, [0, 4, 5, 8])],
)
def test_veomni_pads_behind_the_samples_with_one_segment(lengths: list[int], total: int, cu: list[int]) -> None:
    pack = layout(np.array(lengths), 1, total)
    assert pack.cu_seqlens_padded.tolist() == cu
    assert pack.cu_seqlens.tolist() == [*cu[:-1], cu[-2]], "the tail has no real token"
    assert pack.num_segments == pack.num_samples + 1


def test_automodel_stores_lengths_3_and_5_in_4_and_8() -> None:
    pack = layout(np.array([3, 5]), 4, 12)
    assert np.diff(pack.cu_seqlens).tolist() == [3, 5]
    assert np.diff(pack.cu_seqlens_padded).tolist() == [4, 8]


def test_the_other_layouts_cut_the_pack_as_one() -> None:
    cu = [0, 5, 8, 16]
    assert [held(cu, 2, rank, "contiguous") for rank in range(2)] == [list(range(8)), list(range(8, 16))]
    assert held(cu, 2, 0, "zigzag_pack") == [0, 1, 2, 3, 12, 13, 14, 15]
    assert held(cu, 2, 1, "zigzag_pack") == [4, 5, 6, 7, 8, 9, 10, 11]
    starts, stops = shard_slices(np.array(cu), 2, 1, "zigzag_pack")
    assert list(zip(starts.tolist(), stops.tolist(), strict=True)) == [(4, 5), (5, 8), (8, 12)], "cut at boundaries"


@given(st.data())
def test_every_layout_shares_a_pack_out_whole(data: st.DataObject) -> None:
    cp = data.draw(st.sampled_from([1, 2, 3, 4]))
    pack, _ = data.draw(packs(cp))
    kind = data.draw(st.sampled_from(["zigzag", "zigzag_pack", "contiguous"]))
    shards = [held(pack.cu_seqlens_padded.tolist(), cp, rank, kind) for rank in range(cp)]
    assert {len(shard) for shard in shards} == {pack.num_tokens // cp}
    assert sorted(chain.from_iterable(shards)) == list(range(pack.num_tokens))
    if kind == "contiguous":
        assert list(chain.from_iterable(shards)) == list(range(pack.num_tokens))


@pytest.mark.parametrize(("kind", "parts"), [("zigzag_pack", 4), ("contiguous", 2)])
def test_a_pack_that_cannot_be_cut_evenly_is_refused(kind: str, parts: int) -> None:
    with pytest.raises(ValueError, match=f"got 7 tokens in pack 0, expected a multiple of {parts}"):
        shard_slices(np.array([0, 7]), 2, 0, kind)


# TransformerEngine as an oracle


@pytest.mark.parametrize("cp", [1, 2, 4, 8])
@given(data=st.data())
def test_shards_hold_what_transformer_engine_would_take(cp: int, data: st.DataObject) -> None:
    pack, _ = data.draw(packs(cp))
    cu = pack.cu_seqlens_padded.tolist()
    shards = [held(cu, cp, rank) for rank in range(cp)]
    assert shards == [te_indices(cu, cp, rank) for rank in range(cp)]
    assert sorted(at for shard in shards for at in shard) == list(range(cu[-1])), "the ranks share the pack exactly"


@pytest.mark.parametrize("cp", [2, 4])
@given(data=st.data())
def test_a_sample_lies_in_its_own_part_of_every_shard(cp: int, data: st.DataObject) -> None:
    """What a client relies on to cut a shard into samples: [cu[i] / W, cu[i + 1] / W)."""
    cu = data.draw(packs(cp))[0].cu_seqlens_padded.tolist()
    for rank in range(cp):
        mine = held(cu, cp, rank)
        for start, stop in pairwise(cu):
            assert all(start <= at < stop for at in mine[start // cp : stop // cp])


@given(packs(4), st.integers(0, 3))
def test_the_whole_layout_gives_every_rank_the_pack(drawn_pack: tuple[Layout, int], rank: int) -> None:
    cu = drawn_pack[0].cu_seqlens_padded.tolist()
    assert held(cu, 4, rank, "whole") == list(range(cu[-1]))


# Boundaries


@given(packs(2))
def test_boundaries_keep_the_invariants(drawn_pack: tuple[Layout, int]) -> None:
    pack, align = drawn_pack
    real, padded = pack.cu_seqlens.tolist(), pack.cu_seqlens_padded.tolist()
    assert pack.cu_seqlens.dtype == pack.cu_seqlens_padded.dtype == np.int32
    assert real[0] == padded[0] == 0
    assert all(stop > start for start, stop in pairwise(padded)), "storage rises strictly"
    assert padded[-1] == pack.num_tokens
    widths = [stop - start for start, stop in pairwise(padded)]
    lengths = [stop - start for start, stop in pairwise(real)]
    assert lengths[: pack.num_samples] == pack.lengths.tolist()
    assert widths[: pack.num_samples] == [round_up(length, align) for length in lengths[: pack.num_samples]]
    assert lengths[pack.num_samples :] in ([], [0])
    assert pack.num_segments == len(widths) == len(lengths)
    assert pack.max_seqlen == max(widths)


def test_an_empty_pack_is_one_segment_of_padding() -> None:
    pack = layout(np.zeros(0, np.int64), 4, 16)
    assert (pack.cu_seqlens.tolist(), pack.cu_seqlens_padded.tolist()) == ([0, 0], [0, 16])
    assert (pack.num_samples, pack.num_segments, pack.max_seqlen) == (0, 1, 16)
    assert held([0, 16], 2, 1) == list(range(4, 12))


@pytest.mark.parametrize("lengths", [[3, 0], [-1]])
def test_a_sample_without_tokens_is_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        layout(np.array(lengths), 1, 8)


def test_samples_that_fit_only_unpadded_are_refused() -> None:
    with pytest.raises(ValueError, match="got a pack of 12 tokens with padding, expected at most 10"):
        layout(np.array([5, 3]), 6, 10)


@pytest.mark.parametrize(("cu", "at"), [([0, 8, 14, 22], 1), ([0, 6], 0), ([0, 4, 8, 9], 2)])
def test_a_segment_that_the_ranks_cannot_share_is_named(cu: list[int], at: int) -> None:
    with pytest.raises(ValueError, match=f"got {cu[at + 1] - cu[at]} tokens in segment {at}, expected a multiple of"):
        held(cu, 2, 0)


@pytest.mark.parametrize(("cp", "rank"), [(2, 2), (2, -1), (1, 1), (0, 0)])
def test_a_rank_outside_its_group_is_refused(cp: int, rank: int) -> None:
    with pytest.raises(ValueError, match="expected 0 <= rank"):
        held([0, 8], cp, rank)


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of zigzag, zigzag_pack, contiguous, whole"):
        held([0, 8], 2, 0, "spiral")


@given(st.integers(0, 10**6), st.integers(1, 10**4))
def test_rounding_up_gives_the_least_multiple(value: int, multiple: int) -> None:
    assert 0 <= round_up(value, multiple) - value < multiple
    assert round_up(value, multiple) % multiple == 0
