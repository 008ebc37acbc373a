"""The policy for overlong samples: pieces within the limit, in order, with every token kept or counted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.intake.overlong import apply_overlong
from streampack.core.model.samples import I64

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=20).map(lambda lengths: np.array(lengths, np.int64))
POLICIES = st.sampled_from(["drop", "truncate", "split"])


@given(LENGTHS, st.integers(1, 50), POLICIES)
def test_pieces_are_within_the_limit_and_in_order(lengths: I64, limit: int, policy: str) -> None:
    found = apply_overlong(lengths, limit, policy)
    assert len(found.source) == len(found.offset) == len(found.length) == len(found.part)
    assert (found.length <= limit).all()
    ids = list(zip(found.source.tolist(), found.part.tolist(), strict=True))
    assert ids == sorted(set(ids)), "each piece once, in the order of the samples"
    assert set(found.source.tolist()) == set(range(len(lengths))), "a sample that gives nothing leaves a tombstone"
    assert found.num_touched == sum(length > limit for length in lengths.tolist())
    for source in range(len(lengths)):
        assert found.part[found.source == source].tolist() == list(range(int((found.source == source).sum())))


@given(LENGTHS, st.integers(1, 50), POLICIES)
def test_every_token_is_kept_or_counted(lengths: I64, limit: int, policy: str) -> None:
    found = apply_overlong(lengths, limit, policy)
    assert int(found.length.sum()) + found.lost_tokens == int(lengths.sum())
    tokens = [
        (source, offset + i)
        for source, offset, length in zip(
            *(c.tolist() for c in (found.source, found.offset, found.length)), strict=True
        )
        for i in range(length)
    ]
    assert len(set(tokens)) == len(tokens), "no token twice"
    for source, length in enumerate(lengths.tolist()):
        kept = [at for of, at in tokens if of == source]
        whole = {"drop": 0, "truncate": limit, "split": length}[policy] if length > limit else length
        assert kept == list(range(whole))


def test_the_policies_cut_lengths_as_by_hand() -> None:
    lengths = np.array([3, 10, 0, 4, 8])
    split = apply_overlong(lengths, 4, "split")
    assert split.source.tolist() == [0, 1, 1, 1, 2, 3, 4, 4]
    assert split.offset.tolist() == [0, 0, 4, 8, 0, 0, 0, 4]
    assert split.length.tolist() == [3, 4, 4, 2, 0, 4, 4, 4]
    assert split.part.tolist() == [0, 0, 1, 2, 0, 0, 0, 1]
    assert (split.num_touched, split.lost_tokens) == (2, 0)
    cut = apply_overlong(lengths, 4, "truncate")
    assert cut.length.tolist() == [3, 4, 0, 4, 4]
    assert (cut.num_touched, cut.lost_tokens) == (2, 10)
    dropped = apply_overlong(lengths, 4, "drop")
    assert dropped.length.tolist() == [3, 0, 0, 4, 0]
    assert (dropped.num_touched, dropped.lost_tokens) == (2, 18)


@pytest.mark.parametrize("policy", ["drop", "truncate", "split"])
def test_samples_within_the_limit_are_left_alone(policy: str) -> None:
    lengths = np.array([1, 0, 4])
    found = apply_overlong(lengths, 4, policy)
    assert found.length.tolist() == [1, 0, 4]
    assert found.offset.tolist() == found.part.tolist() == [0, 0, 0]
    assert (found.num_touched, found.lost_tokens) == (0, 0)
