"""Steps to come, the messages that carry them, and the packs that one would build by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from streampack_services.broker.arena import Arena

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
from streampack.core.protocol.trainer_messages import Attached
from streampack.packs.build import build_step
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
        """The length of a pack is a multiple of this number of tokens."""
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
