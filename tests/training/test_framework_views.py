"""Views against the frameworks' own code: what NeMo AutoModel and Megatron-Core make of the same samples."""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from streampack.core.layout.boundaries import round_up
from streampack.core.model.fields import Field
from streampack.errors import UserError
from streampack.training.masks import block_causal_mask
from streampack.views.bshd import SENTINEL, stack, strip, thd_chunks
from streampack.views.megatron import packed_seq_params
from streampack.views.view import View
from tests.packs.cases import Case
from tests.views.shown import TWO, seen

IGNORED = -100


@pytest.fixture(scope="module")
def automodel() -> SimpleNamespace:
    """Imported where a test asks for it, as Megatron-Core is: both take seconds, which collecting need not."""
    with warnings.catch_warnings():  # without a GPU's libraries, both say so
        warnings.simplefilter("ignore")
        from nemo_automodel.components.datasets import utils
        from nemo_automodel.components.datasets.llm import packed_sequence
        from nemo_automodel.components.distributed import thd_utils
    return SimpleNamespace(**{**vars(utils), **vars(packed_sequence), **vars(thd_utils)})


@pytest.fixture(scope="module")
def megatron() -> SimpleNamespace:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import packed_seq_params, utils
    return SimpleNamespace(**{**vars(utils), **vars(packed_seq_params)})


def ragged(packs: int, align: int, budget: int = 48) -> Case:
    """Packs of some samples each, most with a tail, none empty: AutoModel knows no empty ones."""
    draw = random.Random(packs)
    found: list[list[list[int]]] = []
    for _ in range(packs):
        pack: list[list[int]] = []
        while True:
            sample = [draw.randrange(1, 99) for _ in range(draw.randrange(1, 16))]
            if sum(round_up(len(each), align) for each in [*pack, sample]) > budget:
                break
            pack.append(sample)
        found.append(pack)
    return Case(found, align, budget, 1)


def equal(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype, name
            assert found[name].tolist() == value.tolist(), name
        else:
            assert found[name] == value, name


# NeMo AutoModel


def of_automodel(automodel: SimpleNamespace, case: Case) -> list[dict[str, Any]]:
    """What its own packer and collater make of each pack's samples."""
    found = []
    for pack in case.packs:
        rows = [{"input_ids": each, "labels": [*each[1:], IGNORED]} for each in pack]
        multiple = {"pad_to_multiple_of": case.align} if case.align > 1 else {}
        packed = automodel.pack_dataset(
            rows, split="train", packed_sequence_size=case.budget, padding_idx=0, **multiple
        )
        assert len(packed) == 1
        found.append(packed[0])
    return found


@pytest.mark.parametrize("align", [1, 4])
def test_bshd_is_what_automodels_packer_and_collater_make_of_the_samples(
    automodel: SimpleNamespace, align: int
) -> None:
    case = ragged(5, align)
    batches, rows = seen(case, "bshd"), of_automodel(automodel, case)
    for batch, row in zip(batches, rows, strict=True):
        equal(batch, automodel.packed_sequence_thd_collater([row]))
    equal(stack(batches), automodel.packed_sequence_thd_collater(rows))
    assert (stack(batches)["seq_lens"] == SENTINEL).any(), "rows have different numbers of samples"


def test_the_view_of_automodel_is_its_own_golden_pack() -> None:
    """Samples of 3 and 5 tokens in slots of 4 and 8."""
    batch = seen(Case([[[1, 2, 3], [4, 5, 6, 7, 8]]], align=4, budget=12, cp=1), "bshd")[0]
    assert batch["input_ids"].tolist() == [[1, 2, 3, 0, 4, 5, 6, 7, 8, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]]
    assert batch["seq_lens"].tolist() == [[3, 5]]
    assert batch["seq_lens_padded"].tolist() == [[4, 8]]


@pytest.mark.parametrize("align", [1, 4])
@pytest.mark.parametrize(("packs", "num_chunks"), [(6, 3), (5, 2), (4, 1)])
def test_chunks_of_a_pipeline_are_automodels_own_and_lose_no_row(
    automodel: SimpleNamespace, packs: int, num_chunks: int, align: int
) -> None:
    batch = stack(seen(ragged(packs, align), "bshd"))
    chunks = thd_chunks(batch, num_chunks)
    assert len(chunks) == num_chunks
    assert torch.cat([chunk["input_ids"] for chunk in chunks]).tolist() == batch["input_ids"].flatten().tolist()
    begin = 0
    for chunk in chunks:
        end = begin + len(chunk["input_ids"]) // 48
        rows = {name: value[begin:end] if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        own = automodel.process_input_for_thd(rows)
        own["cu_seqlens"] = own.pop("cu_seqlens_padded", own["cu_seqlens"])  # as make_cp_batch_for_te does
        own["max_seqlen"] = own["cu_seqlens"].diff().max()  # real lengths' there, of gaps too here
        equal(chunk, own)
        begin = end
    assert begin == packs


def test_three_positions_a_token_are_chunks_of_automodels_own_shape(automodel: SimpleNamespace) -> None:
    """M-RoPE: of a batch [3, B, S], of a chunk [3, 1, tokens]."""
    places = Field(name="position_ids", dtype="int64", shape=(3,), pad=9)
    batches = seen(replace(ragged(3, 4), fields=(places,)), "bshd")
    batch = stack(batches, multiple=2)
    assert batch["position_ids"].shape == (3, 4, 48)
    (chunk,) = thd_chunks(batch, 1)
    own = automodel.process_input_for_thd(batch)
    assert chunk["position_ids"].shape == (3, 1, 4 * 48)
    assert torch.equal(chunk["position_ids"], own["position_ids"])
    sent = np.concatenate([each.canonical.position_ids for each in batches], -1)
    assert chunk["position_ids"][:, 0, : 3 * 48].tolist() == sent.tolist()


def test_rows_of_padding_keep_automodels_own_split_from_losing_any(automodel: SimpleNamespace) -> None:
    batches = seen(ragged(5, 4), "bshd")
    lost, kept = (automodel.split_batch_into_thd_chunks(stack(batches, multiple), 2) for multiple in (1, 2))
    every = stack(batches)["input_ids"].flatten().tolist()
    assert lost["input_ids"].flatten().tolist() == every[: 4 * 48], "the fifth row is nowhere"
    assert kept["input_ids"].flatten().tolist() == [*every, *[0] * 48]
    assert kept["padding_mask"].flatten()[-48:].all()
    assert (kept["labels"].flatten()[-48:] == IGNORED).all()
    assert kept["padding_mask"].flatten()[:-48].tolist() == torch.cat([b.padding_mask for b in batches]).tolist()


def test_strip_takes_the_sentinel_out_of_lengths() -> None:
    batch = stack(seen(TWO, "bshd"))
    assert batch["seq_lens"].tolist() == [[3, 2], [1, SENTINEL]]
    assert [row.tolist() for row in strip(batch["seq_lens"])] == [[3, 2], [1]]
    assert [row.tolist() for row in strip(batch["seq_lens_padded"])] == [[4, 8], [12]]


def test_an_empty_pack_is_a_row_of_padding(automodel: SimpleNamespace) -> None:
    empty = seen(Case([[]], align=4, budget=8, cp=1), "bshd")[0]
    assert (empty["seq_lens"].tolist(), empty["seq_lens_padded"].tolist()) == ([[0]], [[8]])
    assert automodel.process_input_for_thd(empty)["padding_mask"].all()
    equal(stack([empty], 2), stack([empty, empty]))


def test_the_mask_that_eager_attention_adds_is_automodels_own(automodel: SimpleNamespace) -> None:
    full = Case([[[1, 2, 3], [4, 5, 6, 7, 8]], [[9] * 12]], align=4, budget=12, cp=1)  # its tail is the last sample's
    for batch in seen(full, "bshd"):
        about: dict[str, Any] = {"seq_length": 12, "dtype": torch.bfloat16, "device": torch.device("cpu")}
        own = automodel.build_block_causal_additive_mask(batch["seq_lens_padded"], **about)
        assert torch.equal(block_causal_mask(batch, torch.bfloat16), own)


def test_rows_and_chunks_that_cannot_be_are_refused() -> None:
    long, short = (seen(Case([[[1]]], align=1, budget=size, cp=1), "bshd")[0] for size in (8, 4))
    with pytest.raises(
        UserError, match=r"got packs of \[4, 8\] tokens, expected packs of one length\. Set `rules\.shape: fixed`"
    ):
        stack([long, short])
    with pytest.raises(UserError, match=r"got packs of \[\] tokens"):
        stack([])
    with pytest.raises(UserError, match="got multiple=0, expected at least 1"):
        stack([long], 0)
    with pytest.raises(
        UserError, match=r"got packs in another format, expected bshd\. Pass format='bshd' to connect\(\)"
    ):
        stack(seen(TWO, "hf"))
    with pytest.raises(UserError, match="got num_chunks=2 of 1 rows, expected 1 to 1"):
        thd_chunks(long, 2)


# Megatron-Core


@pytest.mark.parametrize("format", ["numpy", "thd", "hf", "megatron", "bshd", "torchtitan"])
def test_packed_seq_params_are_megatrons_whatever_the_format(megatron: SimpleNamespace, format: str) -> None:
    for batch, bounds, widest in zip(seen(TWO, format), ([0, 4, 8, 12], [0, 4, 12]), (4, 8), strict=True):
        found = megatron.PackedSeqParams(**packed_seq_params(batch))
        arrays = (found.cu_seqlens_q, found.cu_seqlens_kv, found.cu_seqlens_q_padded, found.cu_seqlens_kv_padded)
        for array in arrays:
            assert array is arrays[0], "else TransformerEngine looks for gaps"
            assert (array.dtype, array.tolist()) == (torch.int32, bounds)
        assert (found.qkv_format, found.max_seqlen_q, found.max_seqlen_kv) == ("thd", widest, widest)
        unset = {field.name for field in dataclasses.fields(found)} - set(packed_seq_params(batch))
        assert all(getattr(found, name) is None for name in unset)


def test_a_mapping_of_a_views_keys_has_no_packed_seq_params() -> None:
    with pytest.raises(UserError, match=r"got a batch of type .* without its pack"):
        packed_seq_params(View(dict(seen(TWO, "hf")[0])))


def test_megatron_core_takes_a_batch_as_a_loader_gives_it(megatron: SimpleNamespace) -> None:
    """As its trainer does of a packed batch: boundaries out, and the rest cut for the context-parallel rank."""
    for batch in seen(TWO, "megatron"):
        given = dict(batch)
        about = {name: given.pop(name) for name in ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")}
        mine, params = megatron.get_thd_batch_on_this_cp_rank(dict(given), **about, cp_size=1, cp_rank=0)
        equal(mine, given)
        assert params.max_seqlen_q == packed_seq_params(batch)["max_seqlen_q"]
        assert params.cu_seqlens_q.squeeze(0).tolist() == packed_seq_params(batch)["cu_seqlens_q"].tolist()
