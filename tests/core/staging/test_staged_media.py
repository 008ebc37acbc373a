"""Media of samples that wait: each sample keeps its own, in any order of completion, and their memory is freed."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.journal.log_records import ChunkStaged, EndStaged, MarkStaged
from streampack.core.media.media_counts import read_media
from streampack.core.media.media_format import encode
from streampack.core.model.fields import Field
from streampack.core.staging.staged_partition import StagedPartition, time_out
from tests.world.chunks import columns

REWARD = Field(name="reward", dtype="float32", axis="sample", late=True)
MEDIA = (Field(name="dots", dtype="uint8", axis="patch"),)


def media_of(patches: list[int], seq: int) -> bytes:
    return encode(MEDIA, np.array(patches), {"dots": np.full(sum(patches), seq, np.uint8)}) if patches else b""


@given(
    st.lists(st.lists(st.integers(0, 30), max_size=3), min_size=1, max_size=9),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_each_sample_keeps_its_media_however_late_its_values_come(
    items: list[list[int]], random: Random, read_again: bool
) -> None:
    count = len(items)
    data = [media_of(patches, seq) for seq, patches in enumerate(items)]
    lengths = np.arange(1, count + 1, dtype="<u4")
    counts = np.array([[len(patches), len(each)] for patches, each in zip(items, data, strict=True)], "<u4")
    tokens = np.repeat(np.arange(count, dtype="<i4"), lengths)
    payload = (tokens.tobytes(), counts.tobytes(), b"".join(data))
    of = columns(lengths.tolist(), [1] * count)
    record = ChunkStaged(stream="s", partition=0, base_seq=0, cursor=(1, 0, count), **of)
    staged = StagedPartition("s", 0, (REWARD,), has_extra=True)
    chunk = staged.new_chunk(record, 5, 0.0)
    chunk.read(payload)
    staged.add_chunk(chunk)
    order = list(range(count))
    random.shuffle(order)
    left, base = set(order), 0
    while left:
        now = [order.pop() for _ in range(min(random.randint(1, 3), len(order)))]
        dropped = random.random() < 0.2
        if dropped:
            time_out(chunk, now)
        for seq in [] if dropped else now:
            chunk.put("reward", seq, np.float32(seq).tobytes(), 1)
        staged.note(chunk)
        if read_again and chunk.payload is not None and not dropped:  # as a broker that has just started
            chunk.read(payload)
        found = staged.take(base)
        assert not isinstance(found, MarkStaged | EndStaged | None)
        assert sorted(found.sent.tolist()) == sorted(now)
        media = read_media(found.payload[-2:], len(now), MEDIA, (1, 0, 0))
        for at, seq in enumerate(found.sent.tolist()):
            mine = bytes(found.payload[-1][media.bounds[at] : media.bounds[at + 1]])
            assert mine == (b"" if dropped else data[seq])
        assert len(found.payload) == 4
        base += len(now)
        left -= set(now)
        assert staged.extra_left == sum(len(data[seq]) for seq in left)
        if chunk.payload is not None:
            assert len(chunk.payload[-1]) <= 2 * staged.extra_left
    assert staged.extra_left == 0


def test_samples_that_the_producer_rejected_are_counted_with_themselves() -> None:
    """Not with the chunk's first sample, which may be admitted later and be dropped for another reason."""
    of = columns([3, 0], [3, 0])
    record = ChunkStaged(stream="s", partition=0, base_seq=0, cursor=(1, 0, 2), lost_tokens=5, **of)
    staged = StagedPartition("s", 0, (REWARD,))
    chunk = staged.new_chunk(record, 5, 0.0)
    chunk.read((np.arange(3, dtype="<i4").tobytes(),))
    staged.add_chunk(chunk)
    rejected = staged.take(0)
    chunk.put("reward", 0, np.float32(1).tobytes(), 1)
    staged.note(chunk)
    other = staged.take(1)
    assert not isinstance(rejected, MarkStaged | EndStaged | None)
    assert not isinstance(other, MarkStaged | EndStaged | None)
    assert (rejected.message.rejected, rejected.message.lost_tokens) == ({"empty": 1}, 0)
    assert (other.message.rejected, other.message.lost_tokens) == ({}, 5)
