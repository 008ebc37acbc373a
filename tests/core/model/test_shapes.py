"""How long packs are: the least length of the shape that holds them, for one step and mesh always the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack import pack_lengths
from streampack.core.deal.mesh_validation import mesh_refusal
from streampack.core.deal.step_cache import KeptSteps
from streampack.core.intake.overlong import apply_overlong
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Align, Rules
from streampack.core.model.shapes import Shape, Sizes, check_widths, own_widths, step_widths, width_unit
from streampack.errors import ConfigError, SampleError
from tests.core.model.shape_cases import ALIGN, BUDGET, SHAPES, formed, rules_of_shape

SLOTS = st.lists(st.integers(0, BUDGET // ALIGN).map(lambda units: units * ALIGN), max_size=12)


def lengths_of(shape: Shape) -> list[int]:
    """Every T that a pack may have, by the shape's definition."""
    if isinstance(shape, Sizes) and shape.buckets:
        return sorted({*shape.buckets, BUDGET})
    every = ALIGN if shape == "exact" else shape.multiple if isinstance(shape, Sizes) else BUDGET
    assert every
    return list(range(every, BUDGET + 1, every))


def test_packs_have_the_lengths_by_hand() -> None:
    slots = np.array([0, 1, 12, 13, 40, 48])
    found = [own_widths(slots, shape, BUDGET, ALIGN).tolist() for shape in SHAPES]
    assert found == [[48] * 6, [4, 4, 12, 16, 40, 48], [8, 8, 16, 16, 40, 48], [12, 12, 12, 20, 48, 48], [48] * 6]


@given(SLOTS, st.sampled_from(SHAPES), st.integers(1, 3))
def test_a_pack_has_the_least_length_that_holds_it_and_in_a_pipeline_that_of_the_longest(
    slots: list[int], shape: Shape, pp: int
) -> None:
    widths = step_widths(np.array(slots, np.int64), shape, BUDGET, ALIGN, pp).tolist()
    own = [next(length for length in lengths_of(shape) if length >= held) for held in slots]
    assert widths == ([max(own)] * len(own) if pp > 1 and own else own)
    assert all(width % width_unit(shape, BUDGET, ALIGN) == 0 for width in widths)
    check_widths(np.array(widths, np.int64), shape, BUDGET, ALIGN)


@given(st.integers(-5, 60), st.sampled_from(SHAPES))
def test_no_other_length_is_believed(width: int, shape: Shape) -> None:
    if width in lengths_of(shape):
        check_widths(np.array([width]), shape, BUDGET, ALIGN)
    else:
        with pytest.raises(ValueError, match=f"got a pack of {width} tokens, expected a size of shape"):
            check_widths(np.array([BUDGET, width]), shape, BUDGET, ALIGN)


@given(st.lists(st.integers(1, BUDGET), min_size=1, max_size=40), st.sampled_from(SHAPES), st.data())
def test_lengths_follow_from_the_step_and_the_mesh_and_form_sees_nothing_of_them(
    lengths: list[int], shape: Shape, data: st.DataObject
) -> None:
    rules = rules_of_shape(shape)
    table, steps = formed(rules, lengths)
    assert [step.chain for step in steps] == [step.chain for step in formed(rules_of_shape("fixed"), lengths)[1]]
    kept = KeptSteps("train", rules, "zigzag", table)
    for step in steps:
        kept.add(step)
    for _ in range(3):  # other meshes in between change nothing
        dp, pp = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from([1, 2]))
        for step in steps:
            slots = np.array([pack.num_slot_tokens for pack in step.packs])
            expected = rules.step_widths(slots, pp)
            for rank in range(dp):
                for part, _ in kept.parts(step.number, Mesh(dp=dp, dp_rank=rank, pp=pp)):
                    assert part.widths(rules).tolist() == expected[np.frombuffer(part.packs_u32, "<u4")].tolist()
                    assert (part.widths_u32 == b"") == (shape == "fixed"), "nothing more travels than before"


@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=20), st.integers(1, 12), st.integers(1, 8),
    st.sampled_from(["drop", "truncate", "split", "error"]),
)  # fmt: skip
def test_the_overlong_policy_leaves_samples_that_fit_padded_and_changes_no_others(
    lengths: list[int], sample: int, units: int, policy: str
) -> None:
    rules = Rules(budget=2 * sample * units, align=Align(sample=sample, pack=2 * sample), shape="exact")
    lengths = [min(length, rules.budget) for length in lengths] if policy == "error" else lengths  # the others end it
    pieces = apply_overlong(np.array(lengths, np.int64), rules.budget, policy)
    slots = -(-pieces.length // sample) * sample
    assert (rules.own_widths(slots) <= rules.budget).all()
    for number, length in enumerate(lengths):
        found = pieces.length[pieces.source == number].tolist()
        whole = [length] if length <= rules.budget else {"drop": [0], "truncate": [rules.budget]}.get(policy)
        assert found == whole if whole else sum(found) == length


def test_a_budget_that_holds_a_sample_until_it_is_padded_is_refused() -> None:
    """Nine tokens in packs of ten, padded to twelve: an IndexError of AutoModel's, or a silent split."""
    with pytest.raises(ValueError, match=r"got budget 10, expected a multiple of align.pack, 4. Use 8"):
        Rules(budget=10, align=Align(sample=4, pack=4))
    with pytest.raises(ConfigError, match="budget: got 10, expected a multiple of align, 4"):
        pack_lengths([9], 10, align=4)
    with pytest.raises(SampleError, match=r"sample 0: got 9 tokens \(12 when aligned to 4\), expected 1 to 8"):
        pack_lengths([9], 8, align=4)


@pytest.mark.parametrize(
    ("shape", "layout", "cp", "refusal"),
    [
        ("exact", "zigzag", 2, ""),
        ("exact", "zigzag_pack", 2, ""),
        ("exact", "contiguous", 4, ""),
        ("exact", "whole", 64, ""),
        ("fixed", "zigzag_pack", 3, ""),
        ("fixed", "contiguous", 12, ""),
        (Sizes(multiple=24), "zigzag_pack", 3, ""),
        (Sizes(buckets=(12, 24)), "zigzag_pack", 3, ""),
        ("exact", "zigzag", 4, "got cp=4 with align.sample=4 and align.pack=4, expected multiples of 2 * cp = 8"),
        ("exact", "zigzag_pack", 4, "got cp=4 and pack widths in multiples of 4, expected a multiple of 2 * cp = 8"),
        (
            Sizes(multiple=8),
            "zigzag_pack",
            3,
            "got cp=3 and pack widths in multiples of 8, expected a multiple of 2 * cp",
        ),
        (
            Sizes(buckets=(16,)),
            "contiguous",
            3,
            "got cp=3 and pack widths in multiples of 16, expected a multiple of cp = 3",
        ),
        ("fixed", "contiguous", 5, "got cp=5 and a budget of 48, expected a multiple of cp = 5"),
    ],
)
def test_a_mesh_whose_needs_do_not_divide_every_length_is_refused_naming_both(
    shape: Shape, layout: str, cp: int, refusal: str
) -> None:
    found = mesh_refusal(Mesh(cp=cp), rules_of_shape(shape), layout)
    assert found.startswith(refusal)
    assert bool(found) == bool(refusal)
