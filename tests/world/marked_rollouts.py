"""A run of rollouts in batches."""

from __future__ import annotations

import numpy as np

from streampack.core.journal.log_records import StepFormed
from streampack.core.model.rules import Batch
from streampack.core.model.samples import ROW
from streampack.core.sessions.pushing.push_session import EndBatch, EndPartition
from tests.world.rollouts import PARTITIONS, Rollouts, rollout_chunk, rules_with

Ids = set[tuple[int, int]]
"""(partition, sequence number) of samples."""


class Batches(Rollouts):
    """Each partition pushes ``sizes[b][partition]`` samples to batch b, marks its end where ``marks``, and is over at
    the end of the last. With ``waits`` nothing of batch b is pushed before the rank has had step b - 1.
    """

    def __init__(
        self, batch: Batch, sizes: list[tuple[int, int]], seed: int, *, marks: bool, waits: bool, quota: int = 64
    ) -> None:
        self.sizes, self.marks, self.waits = sizes, marks, waits
        super().__init__(seed, rules_with(batch=batch), discards=False, quota=quota)

    def work(self, partition: int) -> None:
        session, ends = self.pushers[partition], np.cumsum([size[partition] for size in self.sizes]).tolist()
        first = session.buffer.next_seq
        marked = session.buffer.next_mark if self.marks else sum(end <= first for end in ends)
        if not session.begun or session.end_requested or (self.waits and self.client is not None and marked > self.had):
            return
        if marked == len(ends):
            self.tell(partition, EndPartition())
        elif first < ends[marked]:
            self.push(partition, rollout_chunk(partition, first, min(first + self.rng.randint(1, 3), ends[marked])))
        elif self.marks:
            self.tell(partition, EndBatch(marked))

    def steps(self) -> list[Ids]:
        """The samples of each step, as the log has them."""
        by_step: dict[int, Ids] = {}
        for record in self.records():
            if isinstance(record, StepFormed):
                rows = np.frombuffer(record.rows, ROW)
                ids = [divmod(index, PARTITIONS)[::-1] for index in rows["index"].tolist()]
                assert len(set(ids)) == len(ids)
                assert by_step.setdefault(record.step, set(ids)) == set(ids), "the second time it is another"
        return [by_step[step] for step in range(len(by_step))]

    def batches(self) -> list[Ids]:
        """The samples of each batch, as they are marked."""
        ends = np.cumsum([(0, 0), *self.sizes], axis=0).tolist()
        return [
            {(p, seq) for p in range(PARTITIONS) for seq in range(ends[b][p], ends[b + 1][p])}
            for b in range(len(self.sizes))
        ]
