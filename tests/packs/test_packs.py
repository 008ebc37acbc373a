"""What a trainer gets, from the arena to the pack, against packs built one token at a time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from streampack_services.broker import arena as arena_module
from streampack_services.broker.arena import Arena
from streampack_services.broker.arena_kernels import copy_slices, find_slices

from streampack.core.layout.boundaries import Contents, round_up
from streampack.core.layout.labels import positions_of
from streampack.core.layout.shards import LAYOUTS, shard_slices
from streampack.core.layout.step_frames import frames_for
from streampack.core.model.fields import Field, from_bfloat16
from streampack.core.model.keys.field_keys import NumberType
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Align, Rules
from streampack.core.model.samples import I64
from streampack.core.model.shapes import Shape, Sizes
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.step_part import StepPart
from streampack.core.protocol.trainer_messages import Attached, Wait
from streampack.errors import WireError
from streampack.packs.build import build_step
from streampack.packs.kernel_loader import kernels
from streampack.packs.pack import Pack
from streampack.packs.slabs import Slabs
from streampack.packs.step import Step

IGNORED = -100
SLABS = Slabs()


@dataclass(frozen=True)
class Case:
    """A step to come: packs of samples of tokens, and how they are stored and shared."""

    packs: list[list[list[int]]]
    align: int
    budget: int
    cp: int
    layout: str = "zigzag"
    dtype: Literal["uint16", "int32"] = "int32"
    fields: tuple[Field, ...] = ()
    shape: Shape = "fixed"
    pp: int = 1

    @property
    def ranks(self) -> int:
        """Shards that differ."""
        return 1 if self.layout == "whole" else self.cp

    @property
    def align_pack(self) -> int:
        """What the length of a pack is a multiple of."""
        return self.align if self.layout in ("zigzag", "whole") else int(np.lcm(2 * self.cp, self.align))

    @property
    def widths(self) -> list[int]:
        """T of each pack: the first length of the shape that holds its samples; in a pipeline all the longest."""
        every = range(self.align_pack, self.budget + 1, self.align_pack)
        lengths = [self.budget] if self.shape == "fixed" else list(every)
        if isinstance(self.shape, Sizes):
            lengths = [n for n in lengths if self.shape.multiple and n % self.shape.multiple == 0]
            lengths = lengths or [*(self.shape.buckets or ()), self.budget]
        slots = [sum(round_up(len(sample), self.align) for sample in pack) for pack in self.packs]
        own = [next(length for length in lengths if length >= held) for held in slots]
        return [max(own)] * len(own) if self.pp > 1 else own

    def values(self, sample: int, field: Field) -> NDArray[Any]:
        """A field of one sample, by its number: [length, *shape] or [*shape], of the field's storage."""
        length = len([each for pack in self.packs for each in pack][sample])
        shape = field.shape if field.axis == "sample" else (length, *field.shape)
        draw = np.random.default_rng([sample, *field.name.encode()])
        if field.name == "labels":
            return np.where(draw.random(shape) < 0.3, IGNORED, draw.integers(0, 99, shape)).astype(field.storage)
        return draw.integers(0, 2 if field.dtype == "bool" or field.name == "loss_mask" else 120, shape).astype(
            field.storage
        )

    def counted(self, sample: int, length: int) -> int:
        """Labels of a sample that count."""
        kept = np.ones(length, np.bool_)
        for field in self.fields:
            if field.name in ("labels", "loss_mask"):
                kept &= self.values(sample, field) != (IGNORED if field.name == "labels" else 0)
        return int(kept[1:].sum())


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Random packs that hold the invariants: what the layout cuts a multiple of 2 * cp."""
    cp = draw(st.sampled_from([1, 2, 4]))
    layout = draw(st.sampled_from(LAYOUTS))
    unit = 2 * cp if cp > 1 and layout == "zigzag" else 1
    align = unit * draw(st.integers(1, 3))
    lengths = draw(st.lists(st.lists(st.integers(1, 40), max_size=5), min_size=1, max_size=4))
    fullest = max(sum(round_up(length, align) for length in pack) for pack in lengths)
    budget = round_up(max(fullest, 1), align) + align * draw(st.integers(0, 4))
    budget = budget if layout in ("zigzag", "whole") else round_up(budget, np.lcm(2 * cp, align).item())
    dtype: Literal["uint16", "int32"] = draw(st.sampled_from(["uint16", "int32"]))
    token = st.integers(0, np.iinfo(dtype).max)
    packs = [[draw(st.lists(token, min_size=n, max_size=n)) for n in pack] for pack in lengths]
    case = Case(packs, align, budget, cp, layout, dtype, draw(fields()))
    return replace(case, shape=draw(shapes(budget, case.align_pack)), pp=draw(st.sampled_from([1, 3])))


@st.composite
def shapes(draw: st.DrawFn, budget: int, align: int) -> Shape:
    """A shape that packs of ``budget`` tokens can have, of multiples of ``align``."""
    units = budget // align
    multiples = [n for n in range(1, units + 1) if units % n == 0]
    buckets = sorted(draw(st.sets(st.integers(1, units), min_size=1, max_size=4)))
    of_sizes = (
        Sizes(multiple=align * draw(st.sampled_from(multiples))),
        Sizes(buckets=tuple(align * n for n in buckets)),
    )
    return draw(st.sampled_from(["fixed", "exact", *of_sizes]))


@st.composite
def fields(draw: st.DrawFn) -> tuple[Field, ...]:
    """Some declared fields, those with a meaning among them."""
    found = []
    for i in range(draw(st.integers(0, 3))):
        axis: Literal["token", "sample"] = draw(st.sampled_from(["token", "sample"]))
        shape = draw(st.sampled_from([(), (3,), (2, 2)]))
        of_token: dict[str, Any] = {
            "align": draw(st.sampled_from(["token", "target"])), "cp": draw(st.sampled_from(["slice", "replicate"])),
            "pad": draw(st.sampled_from([0, 1])),
        }  # fmt: skip
        dtype = draw(st.sampled_from(get_args(NumberType)))
        found.append(Field(name=f"f{i}", dtype=dtype, axis=axis, shape=shape, **(of_token if axis == "token" else {})))
    if draw(st.booleans()):
        found.append(Field(name="loss_mask", dtype=draw(st.sampled_from(["bool", "uint8", "int32"])), align="target"))
    if draw(st.booleans()):
        found.insert(
            0, Field(name="labels", dtype=draw(st.sampled_from(["int32", "int64"])), align="target", pad=IGNORED)
        )
    if draw(st.booleans()):
        found.append(Field(name="position_ids", dtype="int64", shape=draw(st.sampled_from([(), (3,)])), pad=9))
    return tuple(found)


def u32(values: list[int]) -> bytes:
    return np.array(values, "<u4").tobytes()


def filled(case: Case) -> tuple[Arena, list[I64]]:
    """An arena that holds the samples, behind others, stored in another order; and each pack's handles."""
    samples = [sample for pack in case.packs for sample in pack]
    rules = attached(case).rules
    arena = Arena(4 * 4096 * rules.token_bytes, case.dtype, 4096, case.fields)
    size = np.dtype(case.dtype).itemsize
    others = tuple(bytes(field.value_bytes * (1 if field.axis == "sample" else 5)) for field in case.fields)
    zero = np.zeros(1, np.int64)
    arena.store(np.array([len(samples)]), zero, np.array([5]), zero, (bytes(5 * size), *others))
    for i in reversed(range(len(samples))):
        tokens = np.array(samples[i], case.dtype)
        frames = (tokens.tobytes(), *(case.values(i, field).tobytes() for field in case.fields))
        arena.store(np.array([i]), zero, np.array([len(tokens)]), zero, frames)
    ends = np.cumsum([len(pack) for pack in case.packs]).tolist()
    handles = [np.arange(end - len(pack), end) for end, pack in zip(ends, case.packs, strict=True)]
    return arena, handles


def attached(case: Case) -> Attached:
    rules = Rules(
        budget=case.budget, packs=len(case.packs), align=Align(sample=case.align, pack=case.align_pack),
        tokens=case.dtype, fields=case.fields, shape=case.shape,
    )  # fmt: skip
    return Attached(feed="train", reader="r", lineage=0, next_step=0, rules=rules, layout=case.layout)


def parts(case: Case, rank: int, sizes: list[int], stage: int = 0) -> list[Envelope]:
    """The messages of a step for one context-parallel rank of a pipeline's stage, in parts of ``sizes`` packs."""
    arena, handles = filled(case)
    assert sum(sizes) == len(case.packs)
    envelopes = []
    loss = [sum(map(case.counted, range(at, at + len(pack)), map(len, pack))) for at, pack in numbered(case)]
    for part, size in enumerate(sizes):
        first = sum(sizes[:part])
        mine = case.packs[first : first + size]
        rows = np.concatenate([*handles[first : first + size], np.zeros(0, np.int64)])
        mesh = Mesh(cp=case.cp, cp_rank=rank, pp=3, pp_rank=stage)
        names = frames_for(case.fields, mesh, case.layout)
        widths = np.array(case.widths[first : first + size], np.int64)
        counts = np.array([len(pack) for pack in mine], np.int64)
        packs = Contents(rows, counts, widths, np.full(size, case.align))
        arrays = arena.gather(packs, names, case.cp, (rank,), case.layout)
        flat = rows.tolist()
        message = StepPart(
            feed="train", lineage=0, step=3, part=part, parts=len(sizes), first=first, micro_batches=len(case.packs),
            digest=b"d" * 16, chain=b"c" * 16, num_samples=sum(len(pack) for pack in case.packs),
            num_loss_tokens=sum(loss), frames=names,
            packs_u32=u32([100 + first + i for i in range(size)]), counts_u32=u32([len(pack) for pack in mine]),
            loss_tokens_u32=u32(loss[first : first + size]),
            lengths_u32=u32([len(sample) for pack in mine for sample in pack]),
            streams_u32=u32([handle % 3 for handle in flat]),
            indices_u64=np.array([2**40 + handle for handle in flat], "<u8").tobytes(),
            parts_u32=u32([handle % 2 for handle in flat]),
            widths_u32=b"" if case.shape == "fixed" else u32(case.widths[first : first + size]),
        )  # fmt: skip
        payload = tuple(memoryview(array.tobytes()) for array in arrays)
        envelopes.append(Envelope(run=1, epoch=1, fence=1, message=message, payload=payload))
    return envelopes


def numbered(case: Case) -> Iterator[tuple[int, list[list[int]]]]:
    """Each pack behind the number of its first sample."""
    at = 0
    for pack in case.packs:
        yield at, pack
        at += len(pack)


def naive_field(case: Case, micro_batch: int, field: Field) -> NDArray[Any]:
    """A field of axis token over the whole pack [T, *shape], shifted if it is aligned with labels."""
    at, pack = list(numbered(case))[micro_batch]
    row = np.full((case.widths[micro_batch], *field.shape), field.fill(field.pad), field.storage)
    to = 0
    for number, sample in enumerate(pack, at):
        values = case.values(number, field)
        shifted = values[1:] if field.align == "target" else values
        row[to : to + len(shifted)] = shifted
        to += round_up(len(sample), case.align)
    return from_bfloat16(row) if field.dtype == "bfloat16" else row


def naive(case: Case, pack: list[list[int]], micro_batch: int = 0) -> dict[str, list[int]]:
    """The whole pack: one sample after the other, one token after the other."""
    ids: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    padding: list[int] = []
    for sample in pack:
        slot = 0
        while slot < len(sample) or slot % case.align:
            real = slot < len(sample)
            ids.append(sample[slot] if real else 0)
            labels.append(sample[slot + 1] if slot + 1 < len(sample) else IGNORED)
            padding.append(not real)
            positions.append(slot)
            slot += 1
    tail = case.widths[micro_batch] - len(ids)
    labels += [IGNORED] * tail
    by_name = {field.name: naive_field(case, micro_batch, field) for field in case.fields if field.axis == "token"}
    if "labels" in by_name:
        labels = by_name["labels"].tolist()
    if "loss_mask" in by_name:
        labels = np.where(by_name["loss_mask"] == 0, IGNORED, labels).tolist()
    positions += list(range(tail))
    return {
        "input_ids": ids + [0] * tail,
        "labels": labels,
        "position_ids": by_name["position_ids"].tolist() if "position_ids" in by_name else positions,
        "padding_mask": padding + [True] * tail,
    }


def reassembled(case: Case, steps: Sequence[Sequence[Pack] | Step], micro_batch: int) -> dict[str, list[int]]:
    """A pack from the shards of all its ranks; every position must be filled exactly once."""
    names = ("input_ids", "labels", "position_ids", "padding_mask")
    total = case.widths[micro_batch]
    whole = {name: np.full(total, -7, np.int64) for name in names}
    if any(field.name == "position_ids" and field.shape for field in case.fields):
        whole["position_ids"] = np.full((total, 3), -7, np.int64)
    times = np.zeros(total, np.int64)
    for rank, step in enumerate(steps):
        pack = step[micro_batch]
        at = positions_of(*shard_slices(pack.cu_seqlens_padded, case.ranks, rank, case.layout))
        times[at] += 1
        for name in names:
            assert pack[name].shape[-1] == total // case.ranks
            assert pack[name].dtype == (np.bool_ if name == "padding_mask" else np.int64)
            whole[name][at] = pack[name].T
    assert (times == 1).all(), "no token is lost, none is there twice"
    return {name: array.tolist() for name, array in whole.items()}


def equal(pack: Pack | None, other: Pack) -> bool:
    """The same in all they have."""
    assert pack is not None
    return list(pack) == list(other) and all(
        np.array_equal(pack[name], value) and np.asarray(pack[name]).dtype == np.asarray(value).dtype
        for name, value in other.items()
    )


def built(parts: list[Envelope], case: Case, mesh: Mesh) -> Step:
    return build_step(parts, attached(case), mesh, SLABS)


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
@settings(max_examples=60)
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


def check_fields(case: Case, pack: Pack, rank: int, micro_batch: int) -> None:
    """Every declared field is there, of its dtype, and holds what its samples came with."""
    at, samples = list(numbered(case))[micro_batch]
    assert set(pack.fields) == {field.name for field in case.fields} - {"labels", "position_ids"}
    for field in case.fields:
        if field.name not in pack.fields:
            continue
        found = pack[field.name]
        assert found.dtype == (np.float32 if field.dtype == "bfloat16" else field.storage)
        if field.axis == "sample":
            values = np.array([case.values(number, field) for number in range(at, at + len(samples))], field.storage)
            expected = values.reshape(len(samples), *field.shape)
            assert np.array_equal(found, from_bfloat16(expected) if field.dtype == "bfloat16" else expected)
        else:
            whole = naive_field(case, micro_batch, field)
            places = positions_of(*shard_slices(pack.cu_seqlens_padded, case.ranks, rank, case.layout))
            assert np.array_equal(found, whole if field.cp == "replicate" else whole[places])
        found[...] = 0  # it is the trainer's to write to


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


def check_counts(case: Case, pack: Pack, samples: list[list[int]], micro_batch: int) -> None:
    """Everything of a pack that is no array over its tokens: section 3's invariants among them."""
    lengths = [len(sample) for sample in samples]
    before = sum(len(pack) for pack in case.packs[:micro_batch])
    handles = range(before, before + len(samples))
    slots = [round_up(length, case.align) for length in lengths]
    tail = case.widths[micro_batch] - sum(slots)
    assert pack.cu_seqlens_padded[0] == 0
    assert np.diff(pack.cu_seqlens_padded).tolist() == slots + [tail] * (tail > 0)
    assert np.diff(pack.cu_seqlens).tolist() == lengths + [0] * (tail > 0)
    assert pack.cu_seqlens.dtype == pack.cu_seqlens_padded.dtype == np.int32
    assert pack.cu_seqlens_padded[-1] == case.widths[micro_batch]
    assert pack.max_seqlen == max([*slots, tail])
    assert (pack.num_samples, pack.num_segments) == (len(lengths), len(lengths) + (tail > 0))
    assert pack.num_loss_tokens == sum(map(case.counted, handles, lengths))
    assert pack.sample_ids.tolist() == [[handle % 3, 2**40 + handle, handle % 2] for handle in handles]
    assert (pack.step, pack.micro_batch, pack.pack, pack.dp_rank) == (3, micro_batch, 100 + micro_batch, 1)


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
