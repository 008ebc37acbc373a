"""Steps dealt to groups of ranks: the digests of static context parallelism on 8, 16 and 64 ranks, every sample once,
and the same messages each time.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from streampack.core.deal.step_cache import KeptSteps
from streampack.core.form.former import Former
from streampack.core.model.mesh import DynamicCp, Mesh
from streampack.core.model.rules import Align, Rules
from streampack.core.model.samples import ROW, SampleTable
from streampack.core.model.shapes import Shape, Sizes
from streampack.core.model.steps import PlannedStep
from streampack.core.protocol.step_part import StepPart

RULES = Rules(budget=2048, packs=64, shape="exact", align=Align(16, 16), window=256)
DYNAMIC = DynamicCp(rank_tokens=256, max_group=16, node=0.05, across=0.2)
MESHES = [Mesh(dp=2, cp=4), Mesh(dp=8), Mesh(dp=2, cp=8), Mesh(dp=4, cp=4), Mesh(dp=8, cp=8), Mesh(dp=64)]


def kept(layout: str, shape: Shape = "exact") -> KeptSteps:
    """The steps of 3,000 samples, of which some are as long as eight ranks have room for."""
    return formed(layout, shape)[0]


def formed(layout: str, shape: Shape = "exact") -> tuple[KeptSteps, list[PlannedStep]]:
    """The steps of ``kept``, also as FORM made them."""
    lengths = np.random.default_rng(5).lognormal(4.0, 1.3, 3000).astype(np.int64).clip(1, RULES.budget)
    rows = np.zeros(len(lengths), ROW)
    rows["index"], rows["length"], rows["loss_tokens"] = np.arange(len(lengths)), lengths, lengths - 1
    table = SampleTable(8)
    handles = table.enter(rows)
    rules = msgspec.structs.replace(RULES, shape=shape)
    former, steps, made = Former(rules, table), KeptSteps("train", rules, layout, table), list[PlannedStep]()
    former.admit(handles, lengths)
    former.closed = True
    while (request := former.request()) is not None:
        for step in former.apply(request.choose()):
            steps.add(step)
            made.append(step)
    return steps, made


def message(steps: KeptSteps, number: int, mesh: Mesh, rank: int) -> StepPart:
    """The message of a step for a rank of the dp x cp ranks."""
    own = msgspec.structs.replace(mesh, dp_rank=rank // mesh.cp, cp_rank=rank % mesh.cp)
    ((part, _),) = steps.parts(number, own)
    return part


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh.dp}x{mesh.cp}")
def test_digests_are_those_of_static_cp_and_each_sample_is_in_one_group(mesh: Mesh) -> None:
    static, dynamic, again = kept("zigzag"), kept(DYNAMIC.layout), kept(DYNAMIC.layout)
    ranks, sizes_of = mesh.dp * mesh.cp, set[int]()
    for number in range(3):
        expected = message(static, number, Mesh(), 0)
        ids: list[int] = []
        for rank in range(ranks):
            part = message(dynamic, number, mesh, rank)
            assert part == message(again, number, mesh, rank), "a step that is dealt again is dealt alike"
            for name in ("digest", "chain", "num_loss_tokens", "num_samples"):
                assert getattr(part, name) == getattr(expected, name)
            firsts, sizes = part.groups(DYNAMIC, ranks)
            counts = np.frombuffer(part.counts_u32, "<u4")
            owner = np.repeat(firsts == rank, counts)
            ids += np.frombuffer(part.indices_u64, "<u8")[owner].tolist()
            sizes_of |= {*sizes.tolist()}
            assert (np.frombuffer(part.widths_u32, "<u4") <= sizes * DYNAMIC.rank_tokens).all()
        assert sorted(ids) == sorted(np.frombuffer(expected.indices_u64, "<u8").tolist())
    assert {1, 8} <= sizes_of


@pytest.mark.parametrize("shape", ["exact", "fixed", Sizes(multiple=64)])
def test_the_padding_of_groups_is_what_their_ranks_get_beside_real_tokens(shape: Shape) -> None:
    mesh, dynamic = Mesh(dp=4, cp=4), kept(DYNAMIC.layout, shape)
    delivered = real = 0
    for number in range(2):
        for rank in range(16):
            part = message(dynamic, number, mesh, rank)
            firsts, sizes = part.groups(DYNAMIC, 16)
            delivered += int((np.frombuffer(part.widths_u32, "<u4") // sizes).sum())
            owner = np.repeat(firsts == rank, np.frombuffer(part.counts_u32, "<u4"))
            real += int(np.frombuffer(part.lengths_u32, "<u4")[owner].sum())
    figures = dynamic.figures
    assert figures.delivered_tokens == delivered
    assert figures.waste.sum() == delivered - real
    assert (figures.waste >= 0).all()
    assert (figures.waste[2] == 0) == (shape in ("exact", "fixed")), "padding to sizes is padding for the shape"


def test_the_plan_that_a_thread_made_is_the_plan_of_a_step_and_one_for_another_mesh_is_not_used() -> None:
    mesh, other = Mesh(dp=4, cp=2), Mesh(dp=8, cp=2)
    (source, _), (ahead, steps), static = formed(DYNAMIC.layout), formed(DYNAMIC.layout), kept("zigzag")
    step = steps[0]
    assert static.request(step, mesh) is None
    for asked in (mesh, other):
        request = ahead.request(step, asked)
        assert request is not None
        request.plan = request.choose()
        ahead.add(step, request=request)
        for rank in range(8):
            assert message(ahead, 0, mesh, rank) == message(source, 0, mesh, rank)
    assert ahead.request(step, Mesh()) is None, "the mesh is too small for the budget"


def test_figures_of_groups_are_sums_over_the_parts_that_ranks_get() -> None:
    mesh, dynamic = Mesh(dp=4, cp=4), kept(DYNAMIC.layout)
    groups = dict[int, int]()
    exchanged, padding = [0, 0], [0, 0]
    for number in range(2):
        lengths, sizes = list[int](), list[int]()
        for rank in range(16):
            part = message(dynamic, number, mesh, rank)
            firsts, of_packs = part.groups(DYNAMIC, 16)
            counts = np.frombuffer(part.counts_u32, "<u4")
            for size in of_packs[(firsts == rank) & (counts > 0)].tolist():
                groups[size] = groups.get(size, 0) + 1
            own = np.repeat(firsts == rank, counts)
            lengths += np.frombuffer(part.lengths_u32, "<u4")[own].tolist()
            sizes += np.repeat(of_packs, counts)[own].tolist()
        static = next(size for size in (1, 2, 4, 8, 16) if max(lengths) <= size * DYNAMIC.rank_tokens)
        for length, size in zip(lengths, sizes, strict=True):
            for k, ranks in enumerate((size, static)):
                unit = max(2 * ranks if ranks > 1 else 1, RULES.align.sample)
                exchanged[k] += (ranks - 1) * length
                padding[k] += -length % unit
    figures = dynamic.figures.groups
    assert figures is not None
    assert figures.groups == {str(size): count for size, count in sorted(groups.items())}
    assert list(figures.exchanged_tokens.values()) == exchanged
    assert list(figures.chunk_padding_tokens.values()) == padding
    assert figures.saved_exchange_ratio == 1 - exchanged[0] / exchanged[1]
    assert figures.saved_chunk_padding_ratio == 1 - padding[0] / padding[1]
    assert kept("zigzag").figures.groups is None
