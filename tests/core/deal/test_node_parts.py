"""Messages for the readers of one host: their split gives each rank what it would get directly, byte for byte."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from streampack_services.broker.arena import Arena

from streampack.core.deal.mesh_validation import mesh_refusal
from streampack.core.deal.node_parts import NodeRanks, for_frames, split
from streampack.core.deal.step_cache import NOTHING, KeptSteps
from streampack.core.form.former import Former
from streampack.core.layout.shards import LAYOUTS
from streampack.core.layout.step_frames import EDGES, INPUT_IDS, frames_for
from streampack.core.model.fields import MEDIA, Field
from streampack.core.model.mesh import DynamicCp, Mesh
from streampack.core.model.rules import Align, Batch, Rules
from streampack.core.model.samples import ROW, SampleTable
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.relay_messages import NodePart
from streampack.core.protocol.step_part import StepPart
from streampack.core.protocol.trainer_messages import Attached
from streampack.errors import WireError
from streampack.packs.build import build_step
from streampack.packs.slabs import Slabs
from tests.packs.cases import fields, shapes

Frames = tuple[bytes, ...]
Message = tuple[StepPart, Frames]


@dataclass
class Formed:
    """Samples of some lengths with random tokens and fields as steps, kept for readers on a mesh, and the arena."""

    rules: Rules
    lengths: list[int]
    layout: str
    mesh: Mesh
    part_bytes: int

    def __post_init__(self) -> None:
        count, draw = len(self.lengths), np.random.default_rng(len(self.lengths))
        table = SampleTable(8)
        found = np.zeros(count, ROW)
        found["index"], found["length"] = 2**40 + np.arange(count), self.lengths
        found["loss_tokens"] = draw.integers(0, found["length"])
        found["part"] = draw.integers(0, 3, count)
        handles, lengths = table.enter(found), np.array(self.lengths, np.int64)
        total = int(lengths.sum())
        values = [field.value_bytes * (total if field.axis == "token" else count) for field in self.rules.fields]
        frames = tuple(draw.bytes(size) for size in [total * np.dtype(self.rules.tokens).itemsize, *values])
        self.arena = Arena(8 * 4096 * self.rules.token_bytes, self.rules.tokens, 4096, self.rules.fields)
        self.arena.store(handles, np.cumsum(lengths) - lengths, lengths, np.arange(count), frames)
        if self.rules.media_fields:
            table.items[handles] = items = draw.integers(0, 3, count)
            table.extra_bytes[handles] = sizes = items * draw.integers(1, 40, count)
            ends = np.cumsum(sizes)
            self.arena.store_media(handles, np.stack([ends - sizes, ends]), draw.bytes(int(ends[-1])))
        former = Former(self.rules, table)
        former.admit(handles, lengths)
        former.closed = True
        self.kept = KeptSteps("train", self.rules, self.layout, table)
        self.kept.part_bytes = self.part_bytes
        self.steps: list[int] = []
        while (request := former.request()) is not None:
            for step in former.apply(request.choose()):
                self.kept.add(step)
                self.steps.append(step.number)

    def rank(self, dp_rank: int, cp_rank: int, pp_rank: int) -> Mesh:
        return msgspec.structs.replace(self.mesh, dp_rank=dp_rank, cp_rank=cp_rank, pp_rank=pp_rank)

    def direct(self, step: int, mesh: Mesh) -> list[Message]:
        """The messages that one rank gets without a relay."""
        found = []
        for part, packs in self.kept.parts(step, mesh, request=3):
            arrays = self.arena.gather(packs, part.frames, mesh.cp, (mesh.cp_rank,), self.layout)
            found.append((part, tuple(array.tobytes() for array in arrays)))
        return found

    def node(self, step: int, node: NodeRanks) -> list[tuple[NodePart, tuple[Any, ...]]]:
        """The messages that a relay gets for the ranks of a host."""
        found = []
        for part, packs in self.kept.node_parts(step, node, request=3):
            found.append((part, self.arena.gather(packs, part.frames, part.cp, part.cp_ranks, self.layout)))
        return found


@st.composite
def jobs(draw: st.DrawFn) -> Formed:
    """Steps of each kind, on a mesh that the rules fit: fixed and variable packs, packs of batches, padded batches."""
    kind: Literal["packs", "batch", "padded"] = draw(st.sampled_from(["packs", "packs", "packs", "batch", "padded"]))
    mesh = Mesh(dp=draw(st.integers(1, 8)), cp=draw(st.sampled_from([2, 3, 4, 1])), pp=draw(st.integers(1, 3)))
    layout = draw(st.sampled_from(["zigzag", "whole"] if kind == "padded" else LAYOUTS))
    unit = 2 * mesh.cp if mesh.cp > 1 and layout == "zigzag" else 1
    align = unit * draw(st.integers(1, 3))
    of_packs = align if layout in ("zigzag", "whole") else int(np.lcm(2 * mesh.cp, align))
    budget = of_packs * draw(st.integers(1, 6))
    longest = budget // align * align
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=40))
    own: dict[str, Any]
    if kind == "padded":
        batch = Batch(samples=len(lengths), micro_batch_multiple=draw(st.sampled_from([None, 1, 2])))
        own = {"batch": batch, "padded": True, "packer": "none", "micro_batch_size": 1, "shape": "exact"}
    else:
        of_batch = Batch(samples=len(lengths), min_micro_batches=draw(st.integers(1, 3)))
        own = {"batch": of_batch} if kind == "batch" else {"packs": mesh.dp * draw(st.integers(1, 4))}
        own["shape"] = draw(shapes(budget, of_packs))
    declared = draw(fields())
    media = (Field(name="image", dtype="uint8", axis="item"),) if kind != "padded" and draw(st.booleans()) else ()
    rules = Rules(
        budget=budget, align=Align(sample=align, pack=of_packs), fields=declared, media_fields=media,
        tokens=draw(st.sampled_from(["uint16", "int32"])), **own,
    )  # fmt: skip
    assert not mesh_refusal(mesh, rules, layout)
    pack_bytes = budget // (1 if layout == "whole" else mesh.cp) * rules.token_bytes
    part_bytes = draw(st.sampled_from([1, *(count * pack_bytes for count in (1, 2, 4, 9, 20, 40)), 1 << 20, 1 << 20]))
    return Formed(rules, lengths, layout, mesh, part_bytes)


@st.composite
def dynamic_jobs(draw: st.DrawFn) -> Formed:
    """Steps whose samples are dealt to groups of ranks."""
    mesh = Mesh(dp=draw(st.integers(1, 6)), cp=draw(st.sampled_from([2, 4, 3, 1])))
    align = draw(st.integers(1, 3))
    dynamic = DynamicCp(rank_tokens=2 * align * draw(st.integers(1, 8)), max_group=draw(st.sampled_from([1, 2, 4, 8])))
    group = dynamic.largest_group(mesh.dp * mesh.cp)
    dynamic = replace(dynamic, rank_tokens=group * dynamic.rank_tokens)
    budget = group * dynamic.rank_tokens
    lengths = draw(st.lists(st.integers(1, budget) | st.integers(1, dynamic.rank_tokens), min_size=1, max_size=40))
    media = (Field(name="image", dtype="uint8", axis="item"),) if draw(st.booleans()) else ()
    rules = Rules(
        budget=budget, align=Align(sample=align, pack=align), fields=draw(fields()), packs=draw(st.integers(1, 4)),
        shape=draw(st.sampled_from(["exact", "fixed"])), tokens=draw(st.sampled_from(["uint16", "int32"])),
        media_fields=media,
    )  # fmt: skip
    assert not mesh_refusal(mesh, rules, dynamic.layout)
    rank_bytes = dynamic.rank_tokens * rules.token_bytes
    part_bytes = draw(st.sampled_from([1, 1 << 20, *(count * rank_bytes for count in (1, 2, 9, 20))]))
    return Formed(rules, lengths, dynamic.layout, mesh, part_bytes)


@st.composite
def hosts(draw: st.DrawFn, of: st.SearchStrategy[Formed] = jobs()) -> tuple[Formed, list[Mesh]]:  # noqa: B008
    """Steps, and the ranks of a host: any dp, cp and pp ranks."""
    job = draw(of)
    held = []
    for size in (job.mesh.dp, job.mesh.cp, job.mesh.pp):
        absent = draw(st.one_of(st.just(set()), st.sets(st.integers(0, size - 1), max_size=size - 1)))
        held.append([rank for rank in range(size) if rank not in absent])
    return job, [job.rank(*ranks) for ranks in product(*held)]


def as_bytes(payload: tuple[memoryview, ...]) -> Frames:
    return tuple(bytes(view) for view in payload)


any_hosts = st.one_of(hosts(), hosts(), hosts(dynamic_jobs()))


@settings(max_examples=60)
@given(any_hosts)
def test_each_rank_of_a_host_gets_the_messages_that_it_gets_directly(host: tuple[Formed, list[Mesh]]) -> None:
    job, ranks = host
    node = NodeRanks.of(ranks, job.rules.all_fields, job.layout)
    for step in job.steps:
        found: dict[tuple[int, int], list[tuple[StepPart, tuple[memoryview, ...]]]] = {}
        for part, payload in job.node(step, node):
            for rank, message, views in split(part, payload, job.rules, job.layout):
                found.setdefault(rank, []).append((message, views))
        assert found.keys() == {(mesh.dp_rank, mesh.cp_rank) for mesh in ranks}
        for mesh in ranks:
            names = frames_for(job.rules.all_fields, mesh, job.layout)
            mine = [for_frames(*each, names) for each in found[mesh.dp_rank, mesh.cp_rank]]
            assert [(type(part), part, as_bytes(views)) for part, views in mine] == [
                (StepPart, part, payload) for part, payload in job.direct(step, mesh)
            ]


@given(hosts())
def test_a_host_gets_each_number_once(host: tuple[Formed, list[Mesh]]) -> None:
    """The shards of all cp ranks are the whole pack, and what is the same for all cp ranks comes once."""
    job, ranks = host
    node = NodeRanks.of(ranks, job.rules.all_fields, job.layout)
    kinds = {field.name: field for field in job.rules.fields}
    for step in job.steps:
        for part, payload in job.node(step, node):
            tokens, samples = int(part.widths(job.rules).sum()), len(part.lengths_u32) // 4
            held = tokens if job.layout == "whole" else tokens // part.cp * len(part.cp_ranks)
            for name, frame in zip(part.frames, payload, strict=True):
                if name == MEDIA:
                    assert part.media is not msgspec.UNSET
                    assert frame.nbytes == part.media.arrays(samples)[1].sum()
                elif name == INPUT_IDS:
                    assert frame.nbytes == held * np.dtype(job.rules.tokens).itemsize
                elif name in kinds:
                    field: Field = kinds[name]
                    by_token = tokens if field.cp == "replicate" else held
                    assert frame.nbytes == field.value_bytes * (samples if field.axis == "sample" else by_token)
                else:
                    assert name == EDGES
            views = [view for _, _, views in split(part, payload, job.rules, job.layout) for view in views]
            assert all(any(view.obj is frame for frame in payload) for view in views if view.nbytes), "no copy"


@given(hosts())
def test_the_arena_gives_the_shards_of_the_first_rank_then_of_the_next(host: tuple[Formed, list[Mesh]]) -> None:
    job, ranks = host
    node = NodeRanks.of(ranks, job.rules.all_fields, job.layout)
    once = {field.name for field in job.rules.fields if field.axis == "sample" or field.cp == "replicate"} | {MEDIA}
    for step in job.steps:
        for part, packs in job.kept.node_parts(step, node):
            found = job.arena.gather(packs, part.frames, part.cp, part.cp_ranks, job.layout)
            alone = [job.arena.gather(packs, part.frames, part.cp, (rank,), job.layout) for rank in part.cp_ranks]
            for i, name in enumerate(part.frames):
                expected = [each[i] for each in alone[: 1 if name in once or job.layout == "whole" else None]]
                assert found[i].tobytes() == np.concatenate(expected).tobytes()


@given(any_hosts, st.integers(0, 12))
def test_messages_of_a_host_are_numbered_by_part_then_group(host: tuple[Formed, list[Mesh]], begin: int) -> None:
    job, ranks = host
    node = NodeRanks.of(ranks, job.rules.all_fields, job.layout)
    for step in job.steps:
        found = list(job.kept.node_parts(step, node))
        parts = [part for part, _ in found]
        groups = [part.dp_ranks for part in parts if not part.rank_part]
        assert sum(groups, ()) == node.dp_ranks
        assert {len(group) for group in groups[:-1]} <= {len(groups[0])}
        assert [(part.rank_part, part.dp_ranks) for part in parts] == [*product(range(parts[0].rank_parts), groups)]
        assert [(part.part, part.parts) for part in parts] == [(i, len(parts)) for i in range(len(parts))]
        assert all(part.cp_ranks == node.cp_ranks for part in parts)
        shards = 1 if job.layout == "whole" else len(node.cp_ranks)
        shares = 1 if job.layout == "whole" else job.mesh.cp
        for part, packs in found:
            of_rank = packs.widths // (shares if packs.sizes is None else packs.sizes)
            num_bytes = int(of_rank.sum()) * shards * job.rules.token_bytes
            payload = job.arena.gather(packs, part.frames, part.cp, part.cp_ranks, job.layout)
            of_tokens = {INPUT_IDS, MEDIA, *(field.name for field in job.rules.fields if field.axis == "token")}
            sent = sum(frame.nbytes for name, frame in zip(part.frames, payload, strict=True) if name in of_tokens)
            assert job.kept.node_bytes(packs, node) == sent
            assert num_bytes <= job.part_bytes or len(groups[0]) == 1, "one dp rank alone may need more"
        rank_parts = [part.parts for part, _ in job.kept.parts(step, ranks[0])]
        assert rank_parts == [parts[0].rank_parts] * parts[0].rank_parts
        if job.part_bytes == 1 << 20 and not job.rules.media_fields:
            assert len(parts) == 1, "a small step is one message"
        again = [part for part, _ in job.kept.node_parts(step, node, begin)]
        assert again == (parts[begin:] if begin < len(parts) else parts)


@given(any_hosts)
@settings(max_examples=20)
def test_a_skipped_step_is_one_message_without_packs(host: tuple[Formed, list[Mesh]]) -> None:
    job, ranks = host
    node = NodeRanks.of(ranks, job.rules.all_fields, job.layout)
    for step in job.steps:
        job.kept.skip(step, step)
        ((part, packs),) = job.kept.node_parts(step, node, begin=1, request=5)
        assert packs is NOTHING
        for (dp_rank, cp_rank), message, payload in split(part, (), job.rules, job.layout):
            mesh = job.rank(dp_rank, cp_rank, 0)
            ((direct, _),) = job.kept.parts(step, mesh, request=5)
            assert for_frames(message, payload, ["input_ids"]) == (direct, ())


TUPLES = ("dp_ranks", "cp_ranks")
NUMBERS = ("part", "parts", "first", "micro_batches", "cp", "rank_part", "rank_parts")


@st.composite
def damaged(draw: st.DrawFn, part: NodePart, payload: tuple[Any, ...]) -> tuple[NodePart, tuple[memoryview, ...]]:
    """A message with some values changed, that still decodes."""
    frames = [memoryview(array.tobytes()) for array in payload]
    for _ in range(draw(st.integers(1, 2))):
        names = [name for name in part.__struct_fields__ if name.endswith(("_u32", "_u64"))]
        name = draw(st.sampled_from([*names, *names, *TUPLES, *NUMBERS, "frames", "payload"]))
        if name == "payload":
            if frames:
                at = draw(st.integers(0, len(frames) - 1))
                size = len(frames[at])
                frames[at] = memoryview(bytes(draw(st.integers(0, size + 9))))
        elif name == "frames":
            part = msgspec.structs.replace(part, frames=draw(st.lists(st.sampled_from([*part.frames, "x", EDGES]))))
        elif name in TUPLES:
            ranks = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
            part = msgspec.structs.replace(part, **{name: ranks})
        elif name in NUMBERS:
            part = msgspec.structs.replace(part, **{name: draw(st.integers(int(name == "cp"), 9))})
        else:
            column = bytearray(getattr(part, name) or b"")
            kind = draw(st.sampled_from(["flip", "cut", "grow", "number"]))
            if kind == "grow":
                column += draw(st.binary(min_size=1, max_size=9))
            elif kind == "cut":
                del column[draw(st.integers(0, len(column))) :]
            elif column:
                at = draw(st.integers(0, len(column) - 1))
                column[at] = draw(st.integers(0, 255)) if kind == "flip" else draw(st.integers(0, 9))
            part = msgspec.structs.replace(part, **{name: bytes(column)})
    return part, tuple(frames)


@settings(max_examples=100)
@given(any_hosts, st.data())
def test_damaged_messages_raise_value_error_or_give_messages_that_a_client_checks(
    host: tuple[Formed, list[Mesh]], data: st.DataObject
) -> None:
    job, ranks = host
    node = NodeRanks.of(ranks, job.rules.all_fields, job.layout)
    messages = [message for step in job.steps for message in job.node(step, node)]
    part, payload = data.draw(damaged(*data.draw(st.sampled_from(messages))))
    try:
        found = split(part, payload, job.rules, job.layout)
    except ValueError:
        return
    pairs = [*product(part.dp_ranks, part.cp_ranks)]
    if DynamicCp.of(job.layout) is not None:
        pairs = [divmod(rank, part.cp) for rank in part.dp_ranks]
    assert [rank for rank, *_ in found] == pairs
    attached = Attached(feed="train", reader="r", lineage=0, next_step=0, rules=job.rules, layout=job.layout)
    for (dp_rank, cp_rank), message, views in found:
        packs, samples = len(message.packs_u32) // 4, len(message.lengths_u32) // 4
        assert message.first + packs <= message.micro_batches
        assert {len(message.packs_u32), len(message.counts_u32), len(message.loss_tokens_u32)} == {4 * packs}
        assert samples == np.frombuffer(message.counts_u32, "<u4").sum()
        assert len(message.streams_u32) == len(message.parts_u32) == 4 * samples == len(message.indices_u64) // 2
        assert len(views) == len(message.frames)
        sizes = {"dp": max(job.mesh.dp, dp_rank + 1), "cp": part.cp, "dp_rank": dp_rank, "cp_rank": cp_rank}
        envelope = Envelope(run=1, epoch=1, fence=1, message=message, payload=views)
        try:
            build_step([envelope], attached, Mesh(**sizes), Slabs())
        except WireError:
            continue


def sample_part() -> tuple[Formed, NodePart, tuple[Any, ...]]:
    """A host of 2 dp ranks and 2 cp ranks, with 2 micro-batches each."""
    rules = Rules(budget=16, packs=4, align=Align(sample=4, pack=4), tokens="uint16")
    job = Formed(rules, [16, 12, 9, 8, 3, 2], "zigzag", Mesh(dp=2, cp=2), 1 << 20)
    node = NodeRanks.of([job.rank(d, c, 0) for d, c in product(range(2), range(2))], (), "zigzag")
    ((part, payload),) = job.node(0, node)
    return job, part, payload


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dp_ranks": (1, 0)}, r"got dp_ranks \[1, 0\], expected at least one rank, in ascending order"),
        ({"cp_ranks": ()}, r"got cp_ranks \[\], expected at least one rank"),
        ({"cp_ranks": (0, 2)}, "got context-parallel rank 2, expected ranks below 2"),
        ({"dp_ranks": tuple(range(1024))}, "got 1024 dp ranks and 2 cp ranks, expected at most 1024 pairs"),
        ({"rank_part": 1}, "got part 0 of 1, which is part 1 of 1 of a rank, expected numbers below"),
        ({"micro_batches": 1}, "got 16 bytes of counts for 2 ranks with 1 micro-batches left"),
        ({"micro_batches": 0}, "got 16 bytes of counts for 2 ranks with 0 micro-batches left"),
        ({"counts_u32": b""}, "got 0 bytes of counts for 2 ranks with 2 micro-batches left"),
        ({"indices_u64": b"12345678"}, "got 8 bytes of indices_u64, expected 48"),
        ({"widths_u32": b"1234"}, "got 4 bytes of widths_u32, expected 16"),
        ({"frames": ["x", "edges"]}, "got the payload frame 'x', expected input_ids, edges or a declared field"),
        ({"frames": ["edges", "edges"]}, r"got 2 payload frames for the names \['edges', 'edges'\]"),
        ({"frames": ["edges", "input_ids"]}, "got 128 bytes of edges, expected"),
        ({"cp": 3}, r"got packs of \[16, 16, 16, 16\] tokens, expected multiples of 3 tokens"),
    ],
)
def test_sizes_that_do_not_fit_are_named(change: dict[str, Any], text: str) -> None:
    job, part, payload = sample_part()
    with pytest.raises(ValueError, match=text):
        split(msgspec.structs.replace(part, **change), payload, job.rules, job.layout)


def test_a_rank_whose_frames_did_not_come_is_an_error() -> None:
    job, part, payload = sample_part()
    _, message, views = split(part, payload, job.rules, job.layout)[0]
    with pytest.raises(ValueError, match=r"got the payload frames \['input_ids', 'edges'\], expected \['mask'\] among"):
        for_frames(message, views, ["mask"])
