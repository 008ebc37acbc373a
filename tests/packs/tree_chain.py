"""Groups of samples on their whole way: from a program's rows to the packs of a trainer, without sockets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from streampack_services.broker.arena import Arena

from streampack.core.deal.step_cache import KeptSteps
from streampack.core.form.former import Former
from streampack.core.intake.admission import Admission
from streampack.core.intake.chunk_check import ReceivedChunk, parse_chunk
from streampack.core.intake.intake import Intake
from streampack.core.merge.feed_merge import FeedMerge
from streampack.core.model.fields import Field
from streampack.core.model.lease_terms import terms_of
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Align, Batch, Rules, StreamRules
from streampack.core.model.samples import Keep, SampleTable
from streampack.core.protocol.effects import Store
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.producer_messages import Lease, Samples
from streampack.core.protocol.trainer_messages import Attached
from streampack.core.sessions.producer_base import Chunk
from streampack.packs.build import build_step
from streampack.packs.slabs import Slabs
from streampack.packs.step import Step
from streampack.producer.pushed_samples import chunk_of_group
from streampack.wire import frames as wire

Sample = Mapping[str, Any]
LONGEST = 512
FIELDS = (
    Field(name="loss_mask", dtype="uint8", align="target"),
    Field(name="advantage", dtype="float64", align="target"),
    Field(name="segment", dtype="int32"),
    Field(name="reward", dtype="float64", axis="sample"),
)


def rules_of(budget: int = 96, batch: int | None = None, fields: tuple[Field, ...] = FIELDS, **more: Any) -> Rules:
    """Rules for pushed groups that are trees: a step of two packs, or a batch of some samples."""
    stream = StreamRules("rollouts", 1.0, 1, pushed=True, overlong=more.pop("overlong", "error"))
    return Rules(
        budget=budget, packs=2, batch=None if batch is None else Batch(samples=batch), align=Align(1, 1),
        window=8, merge="arrival", share="prefix", fields=fields, streams=(stream,), **more,
    )  # fmt: skip


def lease_of(rules: Rules) -> Lease:
    """The lease of the one partition."""
    return Lease(
        stream="rollouts", partition=0, partitions=1, first_seq=0, cursor=None, seed=0, passes=1, dtype=rules.tokens,
        fields=rules.fields, overlong=rules.streams[0].overlong, poison="error", max_sample_tokens=LONGEST,
        max_chunk_bytes=1 << 20, batches=rules.batch is not None, share="prefix",
    )  # fmt: skip


class Chain:
    """One feed, from ``send_group`` to steps; messages are encoded and decoded on the way."""

    def __init__(self, rules: Rules, part_bytes: int = 1 << 20) -> None:
        self.rules, self.table = rules, SampleTable(8)
        self.merge = FeedMerge(rules)
        self.admission = Admission(terms_of(rules), rules.tokens, rules.fields, LONGEST, self.table, self.merge)
        self.intake = Intake(1 << 40, self.admission.token_bytes)
        self.arena = Arena(64 * 4096 * rules.token_bytes, rules.tokens, 4096, rules.fields)
        self.former = Former(rules, self.table)
        self.kept = KeptSteps("train", rules, "zigzag", self.table)
        self.kept.part_bytes = part_bytes
        self.sent_bytes = 0
        self.given: dict[int, Sample] = {}
        """Samples by their number in the partition."""

    def send(self, group: Sequence[Sample], keep: Keep | None = None, share: bool = True) -> list[int]:
        """Push a group; return its samples' numbers."""
        first = self.intake.expected_seq
        how = ("prefix",) if share else ()
        chunk, places = chunk_of_group(group, lease_of(self.rules), first, keep, None, *how)
        message = Samples(
            stream="rollouts", partition=0, base_seq=first, lengths_u32=chunk.lengths_u32, crcs_u32=chunk.crcs_u32,
            loss_tokens_u32=chunk.loss_tokens_u32, cursor=(0, 0, first + chunk.num_samples), keep=chunk.keep,
            shared_u32=chunk.shared_u32,
        )  # fmt: skip
        sent = wire.encode(Envelope(run=1, epoch=1, fence=1, message=message, payload=chunk.payload))
        self.sent_bytes += chunk_bytes(chunk)
        envelope = wire.decode([memoryview(bytes(frame)) for frame in sent])
        assert isinstance(envelope.message, Samples)
        received = parse_chunk(envelope, envelope.message)
        assert isinstance(received, ReceivedChunk), received
        assert self.admission.refusal(0, self.intake, received) is None
        for effect in self.admission.admit(0, 0, self.intake, received)[0]:
            if isinstance(effect, Store):
                self.arena.store(effect.handles, effect.offsets, effect.lengths, effect.rows, effect.payload)
        numbers = [first + place for place in places]
        self.given |= dict(zip(numbers, group, strict=True))
        return numbers

    def steps(self, mesh: Mesh | None = None) -> list[Step]:
        """End the partition; return all steps as one rank gets them."""
        mesh, numbers = mesh or Mesh(), list[int]()
        self.merge.current.end(0)
        taken = self.merge.current.take(1 << 40)
        self.former.admit(taken.handles, self.table.own_lengths(taken.handles))
        self.former.closed = True
        while (request := self.former.request()) is not None:
            for step in [*self.former.apply(request.choose()), *self.former.cut()]:
                self.kept.add(step)
                numbers.append(step.number)
        return [self.step(number, mesh) for number in numbers]

    def step(self, number: int, mesh: Mesh) -> Step:
        """One step as a rank gets it."""
        envelopes = []
        for part, packs in self.kept.parts(number, mesh):
            arrays = self.arena.gather(packs, part.frames, mesh.cp, (mesh.cp_rank,), "whole")
            by_sample = {field.name for field in self.rules.fields if field.axis == "sample"}
            sizes = [array.nbytes for name, array in zip(part.frames, arrays, strict=True) if name not in by_sample]
            assert sum(sizes) == self.kept.num_bytes(packs, mesh, part.frames)
            payload = tuple(array.tobytes() for array in arrays)
            sent = wire.encode(Envelope(run=1, epoch=1, fence=1, message=part, payload=payload))
            envelopes.append(wire.decode([memoryview(bytes(frame)) for frame in sent]))
        attached = Attached(feed="train", reader="r", lineage=0, next_step=0, rules=self.rules, layout="whole")
        return build_step(envelopes, attached, mesh, Slabs())


def chunk_bytes(chunk: Chunk) -> int:
    """Bytes of a chunk's payload."""
    payload: tuple[Any, ...] = chunk.payload
    return sum(memoryview(frame).nbytes for frame in payload)


@st.composite
def groups(draw: st.DrawFn, max_rows: int = 16, vocabulary: int = 40) -> list[Sample]:
    """Samples that branch off each other up to six deep, among them equal ones and ones that begin another."""
    rows: list[list[int]] = [draw(st.lists(st.integers(1, vocabulary - 1), min_size=1, max_size=12))]
    depths = [0]
    for _ in range(draw(st.integers(0, max_rows - 1))):
        of = draw(st.integers(0, len(rows) - 1))
        of = of if depths[of] < 6 else 0
        kept = rows[of][: draw(st.integers(0, len(rows[of])))]
        more = draw(st.lists(st.integers(1, 3), min_size=0 if kept else 1, max_size=8))
        if len(kept + more) <= 64:
            rows.append(kept + more)
            depths.append(depths[of] + 1)
    draws = np.random.default_rng(draw(st.integers(0, 99)))
    apart = draw(st.booleans())  # a field that the model reads differs before the ids do
    return [
        {
            "input_ids": np.array(row, np.int32),
            "loss_mask": draws.integers(0, 2, len(row)).astype(np.uint8),
            "advantage": draws.normal(size=len(row)),
            "segment": np.full(len(row), draws.integers(0, 2) if apart else 0, np.int32),
            "reward": float(draws.normal()),
        }
        for row in draw(st.permutations(rows))
    ]
