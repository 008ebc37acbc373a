"""A run of rollouts that are generated as tickets allow, so that none is too old."""

from __future__ import annotations

from collections import Counter, deque

import msgspec
import numpy as np

from streampack.core.journal.log_records import ChunkCompleted, StepFormed
from streampack.core.model.rules import Batch
from streampack.core.model.samples import ROW, index_of
from streampack.core.protocol.effects import FromTrainer
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.result_messages import Publish
from streampack.core.sessions.pushing.push_session import BeginSamples, EndPartition, Push, WantTickets
from tests.world.rollouts import PARTITIONS, Rollouts, rollout_chunk, rules_with


class Paced(Rollouts):
    """Programs that generate several samples at a time, some of them for long, and a trainer that publishes a policy
    after each step.
    """

    def __init__(
        self, seed: int, lag: int, batch: int, *, strands: int = 4, wanted: int = 18, quota: int = 400
    ) -> None:  # fmt: skip
        self.strands = strands
        self.generating: dict[int, list[tuple[int, int | None]]] = {p: [] for p in range(PARTITIONS)}
        """Turns that each sample still takes, and the version of its policy."""
        self.made: dict[tuple[int, int], int | None] = {}
        self.begun, self.quit = Counter[int](), False
        self.unpublished = deque[int]()
        rules = rules_with(batch=Batch(samples=batch), max_policy_lag=lag, paces=True)
        super().__init__(seed, rules, discards=False, quota=quota)
        self.wanted, self.over = wanted, True

    def turn(self) -> None:
        super().turn()
        while self.unpublished and self.core.epoch == self.epoch:
            version = self.unpublished.popleft()
            message = Publish(feed="train", number=1, version=version, step=version, attempt=(1, 1))
            self.handle(FromTrainer(b"pub", Envelope(run=0, epoch=0, fence=0, message=message)))

    def work(self, partition: int) -> None:
        session, generating = self.pushers[partition], self.generating[partition]
        if not session.begun or b"push%d" % partition not in self.producers:
            return
        if self.begun[partition] < self.wanted and len(generating) < self.strands:
            self.begin_sample(partition)
        generating[:] = [(left - 1, version) for left, version in generating]
        for done in [sample for sample in generating if sample[0] <= 0][:1]:
            generating.remove(done)
            first = session.buffer.next_seq
            version = msgspec.UNSET if done[1] is None else done[1]
            self.made[partition, first] = done[1]
            chunk = rollout_chunk(partition, first, first + 1)
            self.tell(partition, Push(msgspec.structs.replace(chunk, policy_version=version)))
        if session.buffer.next_seq >= self.wanted and not session.end_requested:
            self.tell(partition, EndPartition())

    def begin_sample(self, partition: int) -> None:
        session = self.pushers[partition]
        tickets = session.tickets
        if tickets.granted > tickets.begun:
            long = self.rng.random() < 0.15
            turns = self.rng.randint(200, 600) if long else self.rng.randint(1, 30)
            self.generating[partition].append((turns, session.policy_version))
            self.begun[partition] += 1
            self.tell(partition, BeginSamples(1))
        elif tickets.asked <= tickets.begun:
            self.tell(partition, WantTickets(tickets.begun + 1))

    def _return(self, peer: bytes, upto: int) -> None:
        super()._return(peer, upto)
        self.unpublished.append(upto)


def check_paced(live: Paced, lag: int | None) -> None:
    """All that was made was trained once, the oldest first; with a ``lag``, none when it was older."""
    version_of: dict[int, int] = {}
    admitted = Counter[int]()
    trained = Counter[int]()
    for record in live.records():
        if isinstance(record, ChunkCompleted):
            seqs = np.frombuffer(record.sent_u64, "<u8").tolist()
            indices = np.asarray(index_of(record.base_seq + np.arange(len(seqs)), record.partition, PARTITIONS))
            for seq, index in zip(seqs, indices.tolist(), strict=True):
                version = live.made[record.partition, seq]
                version_of[index] = -1 if version is None else version
                admitted[record.partition] += 1
            assert not record.rejected
        elif isinstance(record, StepFormed):
            indices = np.frombuffer(record.rows, ROW)["index"]
            trained.update(indices.tolist())
            for index in indices.tolist():
                version = version_of[index]
                if lag is not None and version >= 0:
                    assert record.step - version <= lag, f"step {record.step} has a sample of policy {version}"
    assert set(admitted.values()) == {live.wanted}
    assert set(trained) == set(version_of)
    assert set(trained.values()) == {1}
