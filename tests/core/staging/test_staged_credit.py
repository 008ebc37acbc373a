"""Credit and memory of partitions whose samples wait for late fields, or for their turn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streampack.core.intake.intake import Intake
from streampack.core.journal.log_records import ChunkStaged
from streampack.core.protocol.events import Effect
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.producer_messages import Flow
from streampack.core.staging.staged_chunk import StagedChunk
from streampack.core.staging.staged_partition import StagedPartition
from tests.world.chunks import columns
from tests.world.late_rollouts import FIELDS, Late, check_late, value_of
from tests.world.paced_rollouts import Paced, check_paced
from tests.world.shell import Sending

STORIES = (
    [("push", 10), ("turns", 60)],
    [("push", 12), ("turns", 20), ("kill", 0), ("turns", 40)],
    [("push", 12), ("read", 6), ("back", 12), ("push", 6), ("turns", 30), ("back", 9), ("turns", 9)],
    [("push", 12), ("turns", 30), ("back", 12), ("turns", 6), ("kill", 0), ("turns", 20), ("back", 12)],
)


class CheckedCredit(Late):
    """A run in which no credit is taken back, and no partition has more memory than it may have."""

    def carry(self, effect: Sending, envelope: Envelope) -> bool:
        if isinstance(flow := envelope.message, Flow):
            key = envelope.epoch, flow.partition, envelope.fence
            before = self.granted.get(key, (0, 0))
            assert flow.grant_seq >= before[0], "a grant of samples was taken back"
            assert flow.grant_bytes >= before[1], "a grant of bytes was taken back"
            self.granted[key] = flow.grant_seq, flow.grant_bytes
        return super().carry(effect, envelope)

    def perform_all(self, effects: list[Effect]) -> None:
        super().perform_all(effects)
        for intake in self.core.leases.partitions.intakes:
            assert (intake.kept_tokens - intake.merged_tokens) * intake.token_bytes <= intake.quota_bytes

    @property
    def granted(self) -> dict[Any, tuple[int, int]]:
        """Credit of each session, as it was sent last."""
        found: dict[Any, tuple[int, int]] = self.__dict__.setdefault("_granted", {})
        return found


@pytest.mark.parametrize("story", STORIES, ids=range(len(STORIES)))
@pytest.mark.parametrize("seed", range(4))
def test_credit_is_never_taken_back_however_late_values_come(story: list[tuple[str, int]], seed: int) -> None:
    live = CheckedCredit(seed)
    live.play(story)
    check_late(live)


def chunk_of_ten() -> tuple[StagedChunk, StagedPartition]:
    """Ten samples of 4 tokens, and their partition."""
    record = ChunkStaged(stream="s", partition=0, base_seq=0, cursor=(1, 0, 10), **columns([4] * 10, [1] * 10))
    staged = StagedPartition("s", 0, FIELDS)
    chunk = StagedChunk(record, 5, 0.0, 0, staged.by_sample)
    chunk.read((np.arange(40, dtype="<i4").tobytes(), np.arange(40, dtype="<f4").tobytes()))
    staged.add_chunk(chunk)
    return chunk, staged


def test_the_memory_of_admitted_samples_is_freed_while_others_of_their_chunk_wait() -> None:
    chunk, staged = chunk_of_ten()
    for count, seq in enumerate([3, 0, 9, 4, 7, 5, 8, 1, 2], 1):
        for name in ("advantages", "reward"):
            chunk.put(name, seq, value_of(name, 0, seq), 1)
        staged.note(chunk)
        found = staged.take(count - 1)
        assert found is not None
        assert found.sent.tolist() == [seq]  # type: ignore[union-attr]
        payload = found.payload  # type: ignore[union-attr]
        assert np.frombuffer(payload[0], "<i4").tolist() == list(range(4 * seq, 4 * seq + 4))
        assert np.frombuffer(payload[1], "<f4").tolist() == list(range(4 * seq, 4 * seq + 4))
        assert payload[2:] == (value_of("advantages", 0, seq), value_of("reward", 0, seq))
        assert (staged.num_left, staged.tokens_left) == (10 - count, 40 - 4 * count)
        assert chunk.payload is not None
        assert len(chunk.payload[0]) <= 2 * 4 * 4 * (10 - count)
        assert not any(chunk.values["reward"])


def test_credit_is_never_negative() -> None:
    """Chunks that are read from the log again take memory beside the samples that wait for late fields."""
    _, staged = chunk_of_ten()
    intake = Intake(quota_bytes=48 * 4, token_bytes=4, staged=staged)
    intake.begin(1)
    assert intake.grant_bytes == 8 * 4
    intake.kept_tokens = 20
    assert intake.grant_bytes == 0
    assert not intake.fits(11, 4)


@pytest.mark.parametrize("seed", range(3))
def test_older_samples_of_a_paced_feed_get_credit_that_newer_ones_have_taken(seed: int) -> None:
    """Else the step waits for the older samples, and these wait for the step."""
    live = Paced(seed, 2, 5, wanted=40, quota=16)
    live.finish()
    check_paced(live, 2)
