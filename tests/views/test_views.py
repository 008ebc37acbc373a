"""Views of other frameworks than transformers: against the pack itself, and against the frameworks' own code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from msgspec.structs import replace

import streampack
from streampack.core.model.fields import POSITION_IDS, Field
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Align, Rules
from streampack.core.model.shapes import Sizes
from streampack.errors import UserError
from streampack.packs.build import build_step
from streampack.packs.pack import Pack
from streampack.packs.slabs import Slabs
from streampack.views.formats import Views
from streampack.views.view import View
from tests.packs.cases import Case, attached, cases, equal, parts
from tests.views.shown import steps_of

IGNORED = -100
WHOLE = cases().filter(lambda case: case.cp == 1 or case.layout == "whole")
"""What frameworks that shard packs themselves are given."""


def of_all_ranks(case: Case, format: str) -> list[tuple[Pack, View]]:
    """Every context-parallel rank's packs, with their views, which keep every invariant."""
    found: list[tuple[Pack, View]] = []
    for rank, (step, same) in enumerate(zip(steps_of(case), steps_of(case), strict=True)):
        mesh, rules = Mesh(cp=case.cp, cp_rank=rank), attached(case).rules
        shown = Views(format, mesh).make(step, rules)
        streampack.verify(shown, replace(mesh, pp=case.pp), rules)
        found += zip(same, shown, strict=True)
    return found


def kinds(batch: View) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (value.dtype, tuple(value.shape)) for name, value in batch.items() if isinstance(value, torch.Tensor)}


def check_beside(case: Case, pack: Pack, batch: View) -> None:
    """What is no key is there as in thd, but for what a key hides, which is in ``rest``."""
    for name in ("padding_mask", "sample_ids", "slices", "cu_seqlens", *pack.fields):
        found, expected = batch.rest[name], pack[name]
        assert np.array_equal((found.float() if found.dtype == torch.bfloat16 else found).numpy(), expected), name
    assert (batch.num_loss_tokens, batch.step, batch.pack) == (pack.num_loss_tokens, pack.step, pack.pack)
    assert batch.input_ids.tolist() == [pack.input_ids.tolist()]
    assert batch.labels.tolist() == [pack.labels.tolist()]
    assert equal(batch.canonical, pack)


@given(WHOLE)
def test_megatron_has_the_keys_of_get_batch(case: Case) -> None:
    for pack, batch in of_all_ranks(case, "megatron"):
        total, edges = len(pack.input_ids), pack.num_segments + 1
        positions = (1, total) if pack.position_ids.ndim == 1 else (3, 1, total)
        assert kinds(batch) == {
            "tokens": (torch.int64, (1, total)), "labels": (torch.int64, (1, total)),
            "loss_mask": (torch.float32, (1, total)), "position_ids": (torch.int64, positions),
            "cu_seqlens": (torch.int32, (1, edges)), "cu_seqlens_padded": (torch.int32, (1, edges)),
            "max_seqlen": (torch.int32, (1,)),
        }  # fmt: skip
        assert len(batch) == 7
        assert batch["tokens"].tolist() == [pack.input_ids.tolist()]
        assert batch["loss_mask"].tolist() == [(pack.labels != IGNORED).astype(float).tolist()]
        assert batch["loss_mask"].sum() == pack.num_loss_tokens
        assert batch["position_ids"].squeeze(-2).tolist() == pack.position_ids.tolist()
        assert batch["cu_seqlens"] is batch["cu_seqlens_padded"], "else TransformerEngine looks for gaps"
        assert batch["cu_seqlens"].tolist() == [pack.cu_seqlens_padded.tolist()]
        assert batch["max_seqlen"].tolist() == [pack.max_seqlen] == np.diff(batch["cu_seqlens"]).max(1).tolist()
        check_beside(case, pack, batch)


@given(WHOLE)
def test_bshd_has_a_row_whose_slots_are_all_of_it(case: Case) -> None:
    for pack, batch in of_all_ranks(case, "bshd"):
        total, samples = len(pack.input_ids), max(pack.num_samples, 1)
        positions = (1, total) if pack.position_ids.ndim == 1 else (3, 1, total)
        assert kinds(batch) == {
            "input_ids": (torch.int64, (1, total)), "labels": (torch.int64, (1, total)),
            "position_ids": (torch.int64, positions),
            "seq_lens": (torch.int64, (1, samples)), "seq_lens_padded": (torch.int64, (1, samples)),
        }  # fmt: skip
        assert batch["qkv_format"] == "thd"
        assert batch["seq_lens_padded"].sum() == total
        assert (
            batch["seq_lens"][0, : pack.num_samples].tolist() == np.diff(pack.cu_seqlens)[: pack.num_samples].tolist()
        )
        begins = np.cumsum([0, *batch["seq_lens_padded"][0].tolist()])[:-1]
        assert begins.tolist() == pack.cu_seqlens_padded[:samples].tolist()
        if not any(field.name == POSITION_IDS for field in case.fields):
            slots = batch["seq_lens_padded"][0].tolist()
            assert batch["position_ids"].tolist() == [[place for slot in slots for place in range(slot)]]
        check_beside(case, pack, batch)


@given(WHOLE)
def test_torchtitan_has_two_keys_and_labels_beside_them(case: Case) -> None:
    assume(all(field.name != POSITION_IDS for field in case.fields))
    for pack, batch in of_all_ranks(case, "torchtitan"):
        total = len(pack.input_ids)
        assert kinds(batch) == {"input": (torch.int64, (1, total)), "positions": (torch.int64, (1, total))}
        assert len(batch) == 2
        assert batch["positions"].tolist() == [pack.position_ids.tolist()]
        assert (batch["positions"][0] == 0).nonzero()[:, 0].tolist() == pack.cu_seqlens_padded[:-1].tolist()
        check_beside(case, pack, batch)


@given(WHOLE)
def test_a_middle_stage_of_a_pipeline_gets_megatrons_boundaries_and_positions(case: Case) -> None:
    sizes = [len(case.packs)]
    mesh = Mesh(cp=case.cp, pp=3, pp_rank=1)
    step, same = (build_step(parts(case, 0, sizes, stage=1), attached(case), mesh, Slabs()) for _ in range(2))
    for pack, batch in zip(same, Views("megatron", mesh).make(step, attached(case).rules), strict=True):
        assert list(batch) == ["position_ids", "cu_seqlens", "cu_seqlens_padded", "max_seqlen"]
        assert batch["cu_seqlens"].tolist() == [pack.cu_seqlens_padded.tolist()]
        streampack.verify(batch)


# What cannot be


@pytest.mark.parametrize(
    ("format", "mesh", "message"),
    [
        (
            "torchtitan",
            Mesh(pp=4, tp=2),
            r"got format 'torchtitan' with pp=4, expected pp of at most 2\. .* ranks instead: tp=8",
        ),
        (
            "bshd",
            Mesh(pp=3),
            r"got format 'bshd' with pp=3, expected pp of at most 2\. AutoModel reads tokens on every stage",
        ),
    ],
)
def test_a_mesh_that_a_framework_could_not_use_is_refused(format: str, mesh: Mesh, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Views(format, mesh)


EXACT = Rules(shape="exact", align=Align())
MULTIPLE = Rules(shape=Sizes(multiple=512))
PLACED = Rules(fields=(Field(name=POSITION_IDS, dtype="int64"),))


@pytest.mark.parametrize(
    ("format", "mesh", "rules", "layout", "message"),
    [
        (
            "megatron",
            Mesh(cp=2),
            Rules(),
            "zigzag",
            r"`cp_layout: zigzag`, expected `cp_layout: whole`, because Megatron's get_batch shards",
        ),
        (
            "bshd",
            Mesh(cp=2),
            Rules(),
            "contiguous",
            r"expected `cp_layout: whole`, because AutoModel's make_cp_batch_for_te shards packs",
        ),
        ("torchtitan", Mesh(cp=2), Rules(), "zigzag_pack", r"Set `cp_layout: whole` for the feed in broker\.yaml"),
        (
            "megatron",
            Mesh(),
            EXACT,
            "whole",
            r"`rules\.shape: exact`, expected `rules\.shape: fixed`\. .* Megatron's seq_length .* budget, 8192",
        ),
        (
            "torchtitan",
            Mesh(),
            MULTIPLE,
            "whole",
            r"expected `rules\.shape: fixed`\. .* torchtitan's training\.seq_len",
        ),
        (
            "torchtitan",
            Mesh(),
            PLACED,
            "whole",
            r"declares position_ids, expected no declared position_ids\. torchtitan takes each position 0",
        ),
    ],
)
def test_a_feed_that_a_framework_would_read_wrongly_is_refused(
    format: str, mesh: Mesh, rules: Rules, layout: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Views(format, mesh).fit(rules, layout)
