"""Groups of samples on their whole way: from a program's rows to the packs of a trainer, without sockets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from streampack_services.broker.arena import Arena

from streampack.core.broker import Broker
from streampack.core.columns.chunk_body import chunk_as
from streampack.core.model.capacity import Capacity, FeedPlan
from streampack.core.model.fields import Field
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Align, Batch, Rules, StreamRules
from streampack.core.model.samples import Keep
from streampack.core.protocol.effects import FromProducer
from streampack.core.protocol.message import Envelope, Message, Reject
from streampack.core.protocol.producer_messages import Eos, Hello, Lease, Offer, Samples
from streampack.core.protocol.trainer_messages import Attached
from streampack.packs.build import build_step
from streampack.packs.slabs import Slabs
from streampack.packs.step import Step
from streampack.producer.pushed_samples import chunk_of_group
from streampack.wire import frames as wire
from tests.world.shell import Shell

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


class Chain(Shell):
    """A program that pushes groups to a broker, and the steps as a rank gets them; messages are encoded on the way."""

    def __init__(self, rules: Rules, part_bytes: int = 1 << 20) -> None:
        super().__init__()
        self.rules, self.next_seq, self.sent_bytes = rules, 0, 0
        self.given: dict[int, Sample] = {}
        """Samples by their number in the partition."""
        plan, capacity = FeedPlan("train", rules, 1 << 30), Capacity(1 << 24, LONGEST, 1 << 20)
        core = Broker(run=1, epoch=1, feeds=[plan], capacity=capacity, steps_ahead=1 << 30)
        self.arena = Arena(64 * 4096 * rules.token_bytes, rules.tokens, 4096, rules.fields)
        self.start(core, self.arena)
        self.kept = core.feeds["train"].readers.steps.kept
        self.kept.part_bytes = part_bytes
        self._hello()

    def _hello(self) -> None:
        offer = Offer(stream="rollouts", source_digest="pushed", partition=0)
        self.said.clear()
        self._say(Hello(producer="p", host="h", pid=1, offers=[offer]))
        (self.lease,) = self.heard(b"p", Lease)

    def _say(self, message: Message, payload: Sequence[Any] = ()) -> None:
        fence = next((envelope.fence for _, envelope in self.said if isinstance(envelope.message, Lease)), 0)
        sent = wire.encode(Envelope(run=1, epoch=1, fence=fence, message=message, payload=tuple(payload)))
        self.handle(FromProducer(b"p", wire.decode([memoryview(bytes(frame)) for frame in sent])))

    def send(self, group: Sequence[Sample], keep: Keep | None = None, share: bool = True) -> list[int]:
        """Push a group; return its samples' numbers. AssertionError: the broker refused it."""
        first = self.next_seq
        chunk, places = chunk_of_group(group, self.lease, first, keep, None, *(("prefix",) if share else ()))
        payload: Sequence[Any] = chunk.payload
        self._say(chunk_as(Samples, chunk, base_seq=first), payload)
        if self.heard(b"p", Reject):
            self._hello()
            raise AssertionError
        self.sent_bytes += sum(memoryview(frame).nbytes for frame in payload)
        self.next_seq += chunk.num_samples
        numbers = [first + place for place in places]
        self.given |= dict(zip(numbers, group, strict=True))
        return numbers

    def steps(self, mesh: Mesh | None = None) -> list[Step]:
        """End the partition; return all steps as one rank gets them."""
        self._say(Eos(stream="rollouts", partition=0, total=self.next_seq))
        return [self.step(number, mesh or Mesh()) for number in range(self.core.feeds["train"].steps.formed_upto)]

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


def prompts(count: int, prompt: int = 30, answer: int = 10) -> list[Sample]:
    """Answers to one prompt."""
    draw = np.random.default_rng(count)
    start = draw.integers(1, 40, prompt)
    return [
        {
            "input_ids": np.concatenate([start, [i + 50], draw.integers(1, 40, answer - 1)]).astype(np.int32),
            "loss_mask": np.concatenate([np.zeros(prompt), np.ones(answer)]).astype(np.uint8),
            "advantage": draw.normal(size=prompt + answer), "segment": np.zeros(prompt + answer, np.int32),
            "reward": float(i),
        }
        for i in range(count)
    ]  # fmt: skip
