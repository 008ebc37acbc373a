"""The arena: what went in comes out, wherever cleaning moved it, as long as the credits are kept."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from streampack_services.broker.arena import SLACK, Arena, arena_tokens

from streampack.core.layout.boundaries import Contents
from streampack.core.model.samples import I64
from streampack.errors import InternalError

BLOCK = 64
LONGEST = BLOCK // 8


def ints(*values: int) -> I64:
    return np.array(values, np.int64)


def read(arena: Arena, handles: list[int], width: int) -> NDArray[Any]:
    """Each sample alone in a pack of ``width``."""
    ones = np.ones(len(handles), np.int64)
    packs = Contents(ints(*handles), ones, width * ones, ones)
    return arena.gather(packs, ["input_ids"], 1, (0,), "zigzag")[0].reshape(-1, width)


@dataclass
class Twin:
    """An arena, and what it should hold as lists; handles are reused last-in first-out, as the table does."""

    arena: Arena
    promise: int
    held: dict[int, list[int]] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    next_token: int = 0

    def handle(self) -> int:
        return self.free.pop() if self.free else len(self.held)

    @property
    def room(self) -> int:
        return self.promise - sum(len(tokens) for tokens in self.held.values())

    def store(self, lengths: list[int], skip: set[int]) -> None:
        """One chunk; samples in ``skip`` are in the frame but not kept, as the over-long policy drops them."""
        total = sum(lengths)
        frame = np.arange(self.next_token, self.next_token + total, dtype=self.arena.dtype)
        self.next_token += total
        offsets = np.cumsum([0, *lengths]).tolist()
        kept = [i for i in range(len(lengths)) if i not in skip]
        handles = []
        for i in kept:
            handles.append(self.handle())
            self.held[handles[-1]] = frame[offsets[i] : offsets[i] + lengths[i]].tolist()
        self.arena.store(
            ints(*handles), ints(*[offsets[i] for i in kept]), ints(*[lengths[i] for i in kept]), ints(*kept),
            (frame.tobytes(),),
        )  # fmt: skip

    def release(self, handles: list[int]) -> None:
        self.arena.release(ints(*handles))
        for handle in handles:
            del self.held[handle]
            self.free.append(handle)

    def check(self) -> None:
        assert self.arena.live_tokens == sum(len(tokens) for tokens in self.held.values())
        rows = read(self.arena, list(self.held), BLOCK).tolist()
        for tokens, row in zip(self.held.values(), rows, strict=True):
            assert row == tokens + [0] * (BLOCK - len(tokens))


def twin(blocks: int, dtype: str = "int32") -> Twin:
    size = np.dtype(dtype).itemsize
    memory = blocks * BLOCK * size
    return Twin(Arena(memory, dtype, BLOCK), arena_tokens(memory, size, BLOCK))


@settings(max_examples=60)
@given(data=st.data(), blocks=st.integers(5, 12))
def test_no_sample_is_lost_or_changed_while_the_promise_is_kept(data: st.DataObject, blocks: int) -> None:
    both = twin(blocks)
    for _ in range(data.draw(st.integers(1, 40))):
        if data.draw(st.booleans()) or not both.held:
            lengths = data.draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=30))
            while sum(lengths) > both.room:
                lengths.pop()
            if lengths:
                both.store(lengths, data.draw(st.sets(st.integers(0, 29), max_size=3)))
        else:
            held = sorted(both.held)
            both.release(data.draw(st.lists(st.sampled_from(held), unique=True, max_size=len(held))))
    both.check()


@pytest.mark.parametrize("longest", [1, 3, LONGEST])
@pytest.mark.parametrize("blocks", [5, 9, 33])
@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_an_arena_that_is_always_full_keeps_its_promise(dtype: str, blocks: int, longest: int) -> None:
    """Random samples leave and others come, at the very bound, many times the arena's size over."""
    both = twin(blocks, dtype)
    draw = np.random.default_rng(blocks * longest)
    for turn in range(24):
        lengths: list[int] = []
        while (length := int(draw.integers(1, longest + 1))) + sum(lengths) <= both.room:
            lengths.append(length)
        both.next_token = turn * 7
        both.store(lengths, set())
        assert both.room < longest
        both.check()
        both.release(draw.permutation(sorted(both.held))[: len(both.held) // 3].tolist())
    assert both.arena.moved_tokens > 0, "the test must reach cleaning"


def test_one_sample_left_in_every_block_does_not_hang_a_chunk_as_large_as_a_block() -> None:
    both = twin(8)
    for _ in range(7):
        both.store([1] * BLOCK, set())
        both.release(sorted(both.held)[-(BLOCK - 1) :])
    both.store([LONGEST] * (BLOCK // LONGEST), set())
    both.check()


def test_blocks_are_used_again_without_a_copy_when_samples_leave_in_order() -> None:
    both = twin(6)
    for _ in range(100):
        both.store([4] * 16, set())
        if len(both.held) > 32:
            both.release(list(both.held)[:16])
        both.check()
    assert both.arena.moved_tokens == 0


def test_pieces_of_one_sample_are_stored_from_their_offsets() -> None:
    arena = Arena(4 * 4 * BLOCK, "int32", BLOCK)
    frame = np.arange(20, dtype=np.int32)
    arena.store(ints(3, 1), ints(10, 2), ints(5, 4), ints(0, 0), (frame.tobytes(),))
    assert read(arena, [3, 1], 6).tolist() == [[10, 11, 12, 13, 14, 0], [2, 3, 4, 5, 0, 0]]
    assert arena.live_tokens == 9


def test_a_chunk_without_its_head_is_stored_from_where_it_goes_on() -> None:
    arena = Arena(4 * 4 * BLOCK, "int32", BLOCK)
    arena.store(ints(0, 1), ints(6, 8), ints(2, 3), ints(1, 2), (np.arange(11, dtype=np.int32).tobytes(),))
    assert read(arena, [0, 1], 3).tolist() == [[6, 7, 0], [8, 9, 10]]


def test_a_chunk_larger_than_a_block_is_spread_over_several() -> None:
    both = twin(12)
    both.store([5] * 40, set())
    both.check()


def test_a_chunk_of_which_nothing_is_kept_stores_nothing() -> None:
    arena = Arena(4 * 4 * BLOCK, "int32", BLOCK)
    arena.store(ints(), ints(), ints(), ints(), (bytes(40),))
    assert arena.live_tokens == 0


def test_more_than_was_promised_is_an_error_not_a_loss() -> None:
    both = twin(6)
    both.store([LONGEST] * (both.promise // LONGEST), set())
    before = read(both.arena, list(both.held), LONGEST).tolist()
    count = 6 * BLOCK // LONGEST
    handles, each = np.arange(1000, 1000 + count), np.full(count, LONGEST)
    with pytest.raises(InternalError, match="the arena is full: producers sent more tokens than their credits allow"):
        both.arena.store(handles, np.cumsum(each) - each, each, handles, (np.ones(6 * BLOCK, np.int32),))
    assert read(both.arena, list(both.held), LONGEST).tolist() == before


def test_a_sample_longer_than_a_block_is_an_error() -> None:
    with pytest.raises(InternalError, match=f"got a sample of {BLOCK + 1} tokens, expected at most {BLOCK}"):
        twin(6).store([1, BLOCK + 1], set())


def test_a_sample_as_long_as_a_block_is_held() -> None:
    both = twin(8)
    both.store([3], set())
    both.store([BLOCK], set())
    both.check()


def test_a_released_sample_cannot_be_served() -> None:
    both = twin(6)
    both.store([2, 3], set())
    both.arena.release(ints(1))
    with pytest.raises(InternalError, match="one of its samples was released: got a sample of 0 tokens"):
        both.arena.gather(Contents(ints(0, 1), ints(2), ints(8), ints(1)), ["input_ids"], 1, (0,), "whole")


def test_a_sample_that_was_never_stored_cannot_be_served() -> None:
    """Compiled code would read whatever lies behind the last handle."""
    both = twin(6)
    both.store([2, 3], set())
    with pytest.raises(InternalError, match="one of its samples was released: got a sample of 0 tokens"):
        both.arena.gather(Contents(ints(0, 10**6), ints(2), ints(8), ints(1)), ["input_ids"], 1, (0,), "whole")


@pytest.mark.parametrize("cp", [1, 2])
def test_samples_that_do_not_fit_their_pack_are_not_written_beyond_it(cp: int) -> None:
    both = twin(6)
    both.store([5, 6], set())
    with pytest.raises(InternalError, match=r"got a pack of 16 tokens with padding, expected at most 12"):
        both.arena.gather(Contents(ints(0, 1), ints(2), ints(12), ints(4)), ["input_ids"], cp, (0,), "zigzag")


def test_the_promise_leaves_three_blocks_and_the_slack() -> None:
    assert arena_tokens(10 * BLOCK * 4, 4, BLOCK) == int(7 * BLOCK / SLACK)
    assert arena_tokens(3 * BLOCK * 4, 4, BLOCK) == arena_tokens(0, 4, BLOCK) == 0
