"""Block masks: the tables of ``create_block_mask``, without its mask, and one compilation for all packs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import streampack
from streampack.core.model.mesh import Mesh
from streampack.core.trees.prefix_tree import build_tree
from streampack.errors import UserError
from streampack.packs.block_tables import BlockTables, fill_block_tables
from streampack.training.masks import block_causal_mask, block_causal_mask_mod
from streampack.views.formats import Views
from tests.core.trees.prefix_groups import groups
from tests.packs.cases import Case, attached
from tests.views.shown import TWO, seen, steps_of

COUNTS = ["kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"]
LENGTHS = [700, 1, 33, 128, 128, 5, 500, 129]
LONG = Case([[[7] * length for length in LENGTHS], [[9] * 2040]], align=8, budget=2048, cp=1)


def same_tables(found: BlockMask, expected: BlockMask) -> None:
    """Compare all eight tables; the first ``num_blocks`` entries of each row of indices count."""
    assert found.seq_lengths == expected.seq_lengths
    assert found.BLOCK_SIZE == expected.BLOCK_SIZE
    for name in COUNTS:
        numbers, others = getattr(found, name), getattr(expected, name)
        assert torch.equal(numbers, others), name
        assert numbers.dtype == others.dtype
        indices, theirs = (getattr(each, name.replace("num_blocks", "indices")) for each in (found, expected))
        assert indices.shape == theirs.shape
        counts = torch.arange(indices.shape[-1]) < numbers[..., None]
        assert torch.equal(indices[counts], theirs[counts]), name
        assert indices.sort(-1).values.tolist() == torch.arange(indices.shape[-1]).expand_as(indices).tolist()


def evaluated(batch: Any, block_size: int) -> BlockMask:
    """The block mask that torch makes by evaluating the mask."""
    _, _, queries, keys = block_causal_mask(batch).shape
    return create_block_mask(
        block_causal_mask_mod(batch), None, None, queries, keys, device="cpu", BLOCK_SIZE=block_size
    )


@st.composite
def packs(draw: st.DrawFn) -> Case:
    """Packs of up to 1,024 tokens for one to four context-parallel ranks."""
    cp, align = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 8, 16]))
    unit = np.lcm(align, 2 * cp)
    lengths = draw(st.lists(st.integers(1, 300), max_size=12))
    budget, total, kept = int(unit * draw(st.integers(1, 1024 // unit))), 0, []
    for length in lengths:
        total += int(-(-length // unit) * unit)
        if total <= budget:
            kept.append([7] * length)
    return Case([kept], align=int(unit), budget=budget, cp=cp)


@settings(max_examples=60)
@given(packs(), st.sampled_from([16, 64, 128]))
def test_tables_are_those_of_the_evaluated_mask_on_every_rank(case: Case, block_size: int) -> None:
    for step in steps_of(case):
        for batch in step:
            same_tables(streampack.block_mask(batch, block_size), evaluated(batch, block_size))


@settings(max_examples=60)
@given(st.lists(groups(), min_size=1, max_size=4), st.sampled_from([1, 30]), st.sampled_from([16, 64, 128]))
def test_tables_of_trees_are_those_of_the_evaluated_mask(
    of_pack: list[list[NDArray[Any]]], times: int, block_size: int
) -> None:
    """Several trees in a pack; ``times`` makes segments longer than blocks."""
    lengths, parents = list[int](), list[int]()
    for rows in of_pack:
        tree = build_tree(rows)
        parents += [parent + len(lengths) if parent >= 0 else -1 for parent in tree.parents.tolist()]
        lengths += (times * tree.lengths).tolist()
    bounds, above = np.cumsum([0, *lengths], dtype=np.int32), np.array(parents, np.int32)
    total = int(bounds[-1])
    if not total:
        return
    layout = BlockTables.of(total, total, block_size, trees=True)
    flat = np.empty(layout.size, np.int32)
    fill_block_tables(flat, bounds, np.arange(total), block_size, above)
    arrays: dict[str, torch.Tensor] = layout.cut(torch.from_numpy(flat))
    tin, tout = (arrays[name].long() for name in ("documents", "ends"))

    def sees(_b: Any, _h: Any, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return (tin[kv] <= tin[q]) & (tin[q] < tout[kv]) & (kv <= q)

    expected = create_block_mask(sees, None, None, total, total, device="cpu", BLOCK_SIZE=block_size)
    names = [name for name in arrays if name.endswith(("_num_blocks", "_indices"))]
    tables: dict[str, Any] = {name: arrays[name][None, None] for name in names}
    same_tables(BlockMask((total, total), BLOCK_SIZE=(block_size, block_size), mask_mod=sees, **tables), expected)


@pytest.mark.parametrize("format", ["thd", "hf", "hf_shifted", "megatron", "bshd", "torchtitan"])
def test_every_format_brings_its_mask_on_request(format: str) -> None:
    for batch in Views(format, Mesh(), masks="flex").make(steps_of(LONG)[0], attached(LONG).rules):
        same_tables(batch.block_mask, evaluated(batch, 128))
        same_tables(streampack.block_mask(batch, 64), evaluated(batch, 64))
        tables = batch.rest["block_tables"]
        assert streampack.block_mask(batch).kv_indices.untyped_storage().data_ptr() == tables.data_ptr(), "not again"
        assert batch.to("meta").block_mask.kv_indices.device.type == "meta"
        assert "block_tables" not in batch
    assert all("block_tables" not in batch.rest for batch in seen(TWO, format))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_one_compilation_serves_all_packs() -> None:
    """Fifty packs of changing samples: tables, boundaries and masks change, shapes do not."""
    from torch._dynamo.testing import CompileCounter  # takes a second

    counter = CompileCounter()
    torch._dynamo.reset()

    @torch.compile(backend=counter, fullgraph=True, dynamic=False)
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask) -> Any:
        return flex_attention(q, k, v, block_mask=mask)

    rng = np.random.default_rng(0)
    samples = [[7] * int(length) for length in rng.integers(1, 120, 400)]
    with streampack.local(samples, budget=256, masks="flex", tail="drop") as loader:
        q, k, v = (torch.randn(1, 1, 256, 8) for _ in range(3))
        seen = 0
        for batch in loader:
            found = attend(q, k, v, batch.block_mask)
            if seen % 10 == 0:
                expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=block_causal_mask(batch))
                torch.testing.assert_close(found, expected)
            seen += 1
            if seen == 50:
                break
    assert (seen, counter.frame_count) == (50, 1)


def test_block_masks_that_cannot_be_are_refused() -> None:
    with pytest.raises(UserError, match="got masks='dense', expected one of: flex, or None"):
        Views("thd", Mesh(), masks="dense")
    with pytest.raises(UserError, match="got masks='flex' with format 'numpy', expected a format with tensors"):
        Views("numpy", Mesh(), masks="flex")
    with pytest.raises(UserError, match="got block_size=0, expected at least 1"):
        streampack.block_mask(seen(TWO, "thd")[0], 0)
    with (
        pytest.raises(UserError, match=r"got masks='flex' for a feed with rules.padded, expected no masks"),
        streampack.local([[1, 2]], padded=True, samples=1, budget=16, masks="flex") as loader,
    ):
        next(loader)
    with pytest.raises(AttributeError, match="got attribute 'block_mask', expected one of: input_ids"):
        _ = seen(TWO, "thd")[0].block_mask
