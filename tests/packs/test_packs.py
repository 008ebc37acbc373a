"""What a trainer gets, from the arena to the pack, against packs built one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from streampack_services.broker import arena as arena_module
from streampack_services.broker.arena_kernels import copy_slices, find_slices

from streampack.core.flops.model_flops import ModelFlops
from streampack.core.layout.labels import positions_of
from streampack.core.layout.shards import shard_slices
from streampack.core.model.mesh import Mesh
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.trainer_messages import Wait
from streampack.errors import WireError
from streampack.packs.kernel_loader import kernels
from streampack.packs.step import Step
from tests.packs.cases import (
    IGNORED,
    Case,
    built,
    cases,
    check_counts,
    check_fields,
    naive,
    parts,
    reassembled,
    u32,
)


def steps_of(case: Case, sizes: list[int]) -> list[Step]:
    return [
        built(parts(case, rank, sizes), case, Mesh(cp=case.cp, cp_rank=rank, dp=2, dp_rank=1, pp=3))
        for rank in range(case.ranks)
    ]


@pytest.fixture(params=["compiled", "python"])
def twins(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both twins of the kernels that cut shards and derive labels."""
    kernels.load()
    kernels.wait()
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "python":
            patch.setattr(arena_module, "copy_slices", copy_slices.plain)
            patch.setattr(arena_module, "find_slices", find_slices.plain)
            patch.setattr(kernels, "derive", None)
            patch.setattr(kernels, "lay_out", None)
        yield


@pytest.mark.usefixtures("twins")
@given(case=cases(), data=st.data())
def test_the_shards_of_all_ranks_are_the_pack_that_one_would_build_by_hand(case: Case, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(case.packs)), "first part")
    steps = steps_of(case, [size for size in (cut, len(case.packs) - cut) if size])
    for micro_batch, samples in enumerate(case.packs):
        found = reassembled(case, steps, micro_batch)
        assert found == naive(case, samples, micro_batch)
        for rank, step in enumerate(steps):
            check_counts(case, step[micro_batch], samples, micro_batch)
            check_fields(case, step[micro_batch], rank, micro_batch)


@given(cases())
def test_a_middle_stage_gets_boundaries_and_positions_alone(case: Case) -> None:
    for rank in range(case.ranks):
        mesh = Mesh(cp=case.cp, cp_rank=rank, dp=2, dp_rank=1, pp=3, pp_rank=1)
        envelopes = parts(case, rank, [len(case.packs)], stage=1)
        supplied = [field for field in case.fields if field.name == "position_ids"]
        assert [len(e.payload) for e in envelopes] == [len(supplied)]
        last = built(parts(case, rank, [len(case.packs)], stage=2), case, replace_mesh(mesh, pp_rank=2))
        for pack, other in zip(built(envelopes, case, mesh), last, strict=True):
            assert set(other) - set(pack) == {"input_ids", "labels", *other.fields}
            assert not set(pack.fields)
            for name in ("position_ids", "padding_mask", "cu_seqlens", "cu_seqlens_padded", "sample_ids", "slices"):
                assert np.array_equal(pack[name], other[name]), name
            with pytest.raises(KeyError):
                pack["labels"]


@given(cases())
def test_the_labels_that_count_are_the_pack_s_denominator(case: Case) -> None:
    steps = steps_of(case, [len(case.packs)])
    for micro_batch in range(len(case.packs)):
        counted = sum(int((step[micro_batch].labels != IGNORED).sum()) for step in steps)
        assert all(step[micro_batch].num_loss_tokens == counted for step in steps)
    counts = [pack.num_loss_tokens for pack in steps[0]]
    assert max(sum(counts), 1) == steps[0].num_loss_tokens, "a denominator, which is never 0"
    for step in steps:
        assert {(pack.step_num_loss_tokens, pack.num_micro_batches) for pack in step} == {
            (step.num_loss_tokens, len(step))
        }


@given(cases())
def test_positions_say_where_a_shard_lies_in_its_pack(case: Case) -> None:
    for rank, step in enumerate(steps_of(case, [len(case.packs)])):
        for pack in step:
            expected = positions_of(*shard_slices(pack.cu_seqlens_padded, case.ranks, rank, case.layout))
            assert pack.positions().tolist() == expected.tolist()


@given(cases())
def test_flops_are_those_of_the_real_tokens_of_whole_packs(case: Case) -> None:
    model = ModelFlops(token=7, pair=3, window_pair=2, window=5)
    lengths = [[len(sample) for sample in pack] for pack in case.packs]
    by_pack = [model.samples(np.array(pack, np.int64)) for pack in lengths]
    for step in steps_of(case, [len(case.packs)]):
        assert [pack.flops(model) for pack in step] == by_pack
        assert step.flops(model) == sum(by_pack)
        assert step.sum_squares == sum(length**2 for pack in lengths for length in pack)


@pytest.mark.parametrize("cp", [1, 2])
def test_many_packs_are_no_different_from_few(cp: int) -> None:
    """More than are derived in one go, empty ones and full ones among them."""
    draw = np.random.default_rng(5)
    lengths = [draw.integers(1, 12, draw.integers(0, 4)).tolist() for _ in range(37)] + [[8, 24, 8], [], [40]]
    packs = [[list(range(1, n + 1)) for n in pack] for pack in lengths]
    case = Case(packs, 4, 40, cp, dtype="uint16")
    steps = steps_of(case, [33, 7])
    for micro_batch, samples in enumerate(packs):
        assert reassembled(case, steps, micro_batch) == naive(case, samples, micro_batch)
        check_counts(case, steps[0][micro_batch], samples, micro_batch)


def test_parts_of_two_steps_are_refused() -> None:
    case = Case([[[1, 2, 3]], [[4]]], 4, 16, 2)
    one, two = parts(case, 0, [1, 1])
    built([one, two], case, Mesh(cp=2))
    for wrong in ([two, one], [one, changed(two, step=4)], [one], [one, one]):
        with pytest.raises(WireError):
            built(wrong, case, Mesh(cp=2))


# Golden packs


def test_a_pack_of_twelve_is_laid_out_as_automodel_does() -> None:
    """Positions run on through alignment padding; labels are AutoModel's shifted by one."""
    (step,) = steps_of(Case([[[1, 2, 3], [4, 5, 6, 7, 8]]], 4, 12, 1), [1])
    pack = step[0]
    assert pack.input_ids.tolist() == [1, 2, 3, 0, 4, 5, 6, 7, 8, 0, 0, 0]
    assert pack.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]
    assert np.diff(pack.cu_seqlens).tolist() == [3, 5]
    assert np.diff(pack.cu_seqlens_padded).tolist() == [4, 8]
    assert pack.labels.tolist() == [2, 3, *[IGNORED] * 2, 5, 6, 7, 8, *[IGNORED] * 4]
    assert pack.padding_mask.tolist() == [mark == "p" for mark in "...p.....ppp"]


def test_a_pack_over_two_ranks_is_cut_as_nemo_rl_does() -> None:
    """Lengths 5, 8, 1, 3; token 10 * i + j is token j of sample i, counted from 1."""
    samples = [[10 * i + j for j in range(1, n + 1)] for i, n in enumerate([5, 8, 1, 3], 1)]
    zero, one = (step[0] for step in steps_of(Case([samples], 4, 24, 2), [1]))
    assert zero.input_ids.tolist() == [11, 12, 0, 0, 21, 22, 27, 28, 31, 0, 41, 0]
    assert zero.labels.tolist() == [12, 13, *[IGNORED] * 2, 22, 23, 28, *[IGNORED] * 3, 42, IGNORED]
    assert zero.position_ids.tolist() == [0, 1, 6, 7, 0, 1, 6, 7, 0, 3, 0, 3]
    assert one.input_ids.tolist() == [13, 14, 15, 0, 23, 24, 25, 26, 0, 0, 42, 43]
    assert one.labels.tolist() == [14, 15, *[IGNORED] * 2, 24, 25, 26, 27, *[IGNORED] * 2, 43, IGNORED]
    assert one.position_ids.tolist() == [2, 3, 4, 5, 2, 3, 4, 5, 1, 2, 1, 2]


def test_positions_restart_in_the_tail_padding() -> None:
    (step,) = steps_of(Case([[[9, 9, 9]]], 2, 8, 1), [1])
    assert step[0].position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert step[0].cu_seqlens_padded.tolist() == [0, 4, 8]
    assert step[0].cu_seqlens.tolist() == [0, 3, 3]


# The mapping


def test_a_pack_is_a_mapping_of_its_fields() -> None:
    (step,) = steps_of(Case([[[1, 2]]], 1, 4, 1), [1])
    pack = step[0]
    assert {**pack}.keys() == set(pack) == set(pack.keys())
    assert len(pack) == len(list(pack))
    assert "fields" not in pack
    assert pack["labels"] is pack.labels
    for name in ("positions", "__len__", "label"):
        with pytest.raises(KeyError):
            pack[name]
    assert [pack is each for each in step] == [True]
    assert (len(step), step.index, step.digest, step.chain) == (1, 3, b"d".hex() * 16, b"c".hex() * 16)


# What a broker must not send


def replace_mesh(mesh: Mesh, **ranks: int) -> Mesh:
    return msgspec.structs.replace(mesh, **ranks)


def changed(envelope: Envelope, **fields: Any) -> Envelope:
    return msgspec.structs.replace(envelope, message=msgspec.structs.replace(envelope.message, **fields))


BROKEN: dict[str, Callable[[Envelope], Envelope]] = {
    "a sample too many": lambda e: changed(e, lengths_u32=u32([3, 2, 4, 1])),
    "a sample too few": lambda e: changed(e, lengths_u32=u32([3, 2])),
    "a sample of no tokens": lambda e: changed(e, lengths_u32=u32([3, 0, 4])),
    "samples that do not fit": lambda e: changed(e, lengths_u32=u32([3, 2, 400])),
    "ragged lengths": lambda e: changed(e, lengths_u32=bytes(11)),
    "ragged counts": lambda e: changed(e, counts_u32=bytes(9)),
    "counts that say more": lambda e: changed(e, counts_u32=u32([2, 2])),
    "counts of another step": lambda e: changed(e, counts_u32=u32([1, 1, 1])),
    "no packs": lambda e: changed(e, counts_u32=b"", packs_u32=b"", loss_tokens_u32=b""),
    "too few loss tokens": lambda e: changed(e, loss_tokens_u32=u32([1])),
    "too few numbers": lambda e: changed(e, packs_u32=u32([1])),
    "ids of fewer samples": lambda e: changed(e, streams_u32=u32([0])),
    "indices of fewer samples": lambda e: changed(e, indices_u64=bytes(8)),
    "parts of all ids missing": lambda e: changed(e, parts_u32=b"", streams_u32=b"", indices_u64=b""),
    "micro-batches that begin later": lambda e: changed(e, first=1),
    "a micro-batch too few": lambda e: changed(e, micro_batches=3),
    "no payload": lambda e: msgspec.structs.replace(e, payload=()),
    "no edges": lambda e: msgspec.structs.replace(e, payload=e.payload[:1]),
    "ragged tokens": lambda e: msgspec.structs.replace(e, payload=(bytes(63), e.payload[1])),
    "too few tokens": lambda e: msgspec.structs.replace(e, payload=(bytes(32), e.payload[1])),
    "ragged edges": lambda e: msgspec.structs.replace(e, payload=(e.payload[0], bytes(23))),
    "a frame too many": lambda e: msgspec.structs.replace(e, payload=(*e.payload, b"")),
    "frames of other names": lambda e: changed(e, frames=["edges", "input_ids"]),
    "too few edges": lambda e: msgspec.structs.replace(e, payload=(e.payload[0], bytes(16))),
    "a width that no pack is fixed to": lambda e: changed(e, widths_u32=u32([16, 12])),
    "ragged widths": lambda e: changed(e, widths_u32=bytes(7)),
    "another message": lambda e: msgspec.structs.replace(e, message=Wait(feed="f", step=1, reason="r", detail="")),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_step_that_breaks_an_invariant_is_refused(what: str) -> None:
    case = Case([[[1, 2, 3], [4, 5]], [[6, 7, 8, 9]]], 4, 16, 2)
    (envelope,) = parts(case, 0, [2])
    built([envelope], case, Mesh(cp=2))
    with pytest.raises(WireError):
        built([BROKEN[what](envelope)], case, Mesh(cp=2))


@pytest.mark.parametrize("widths", [[], [12], [12, 12, 12], [12, 13], [8, 12], [12, 0], [12, 20], [12, 16]])
def test_widths_that_are_not_of_the_shape_or_do_not_fit_are_refused(widths: list[int]) -> None:
    case = Case([[[1, 2, 3], [4, 5, 6, 7, 8]], [[6, 7, 8, 9]]], 4, 16, 1, shape="exact")
    (envelope,) = parts(case, 0, [2])
    assert [len(pack.input_ids) for pack in built([envelope], case, Mesh())] == case.widths == [12, 4]
    with pytest.raises(WireError):
        built([changed(envelope, widths_u32=u32(widths))], case, Mesh())


def test_rules_that_do_not_suit_the_mesh_are_refused() -> None:
    case = Case([[[1, 2, 3]]], 4, 12, 2)
    (envelope,) = parts(case, 0, [1])
    with pytest.raises(WireError):
        built([envelope], replace(case, align=3), Mesh(cp=2))
    with pytest.raises(WireError):
        built([envelope], replace(case, layout="spiral"), Mesh(cp=1))


def test_a_step_of_no_parts_is_refused() -> None:
    with pytest.raises(WireError, match="got 0 micro-batches"):
        built([], Case([[]], 1, 8, 1), Mesh())
