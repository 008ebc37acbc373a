"""Credits that cannot be overrun whatever is lost or repeated."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.intake.intake import MAX_UNMERGED, ROW_BYTES, Intake
from streampack.core.journal.history import ChunkPlace
from streampack.core.model.samples import MANY_HANDLES, SampleTable, index_of

# Credits


@given(st.data(), st.sampled_from([2, 4]), st.integers(100, 2000) | st.just(4_000_000))
def test_waiting_samples_never_exceed_the_quota_whatever_the_producer_sends(
    data: st.DataObject, token_bytes: int, quota: int
) -> None:
    """A producer that obeys any grant it ever got in its session, however old, is never refused, and the
    books never hold more than the quota; one that does not obey is refused.
    """
    intake = Intake(quota_bytes=quota, token_bytes=token_bytes)
    intake.begin(1)
    grants = [(intake.grant_seq, intake.grant_bytes)]
    sent = taken = kept = merged = 0
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["send", "send", "merge", "session", "batch"])):
            case "send":
                count, tokens = data.draw(st.integers(1, 6000)), data.draw(st.integers(0, 400))
                stop, num_bytes = intake.expected_seq + count, tokens * token_bytes
                seq, limit = data.draw(st.sampled_from(grants))
                obeys = stop <= seq and sent + num_bytes <= limit
                fits = intake.fits(stop, num_bytes)
                assert fits or not obeys, "a grant once given is never taken back"
                if fits:
                    kept_now = data.draw(st.integers(0, tokens))
                    intake.accept(stop, num_bytes, kept_now, (0, 0, stop))
                    sent, taken, kept = sent + num_bytes, taken + count, kept + kept_now
            case "merge":
                merged += data.draw(st.integers(0, kept - merged))
                intake.merged_tokens = merged
                intake.merged_seq = data.draw(st.integers(intake.merged_seq, taken))
            case "batch":
                intake.recorded.add_mark(ChunkPlace(0, taken, 0, 0, 0, mark=intake.recorded.num_marks))
            case "session":
                intake.begin(intake.session + 1)
                sent, grants = 0, []
        grants.append((intake.grant_seq, intake.grant_bytes))
        assert (kept - merged) * token_bytes <= quota
        assert taken - intake.merged_seq <= max(MAX_UNMERGED, quota // ROW_BYTES)
        assert intake.expected_seq == taken
        assert sorted(grants) == grants, "grants only grow within a session"
        assert [b for _, b in grants] == sorted(b for _, b in grants)


def test_a_new_session_is_granted_what_the_waiting_samples_leave() -> None:
    intake = Intake(quota_bytes=1000, token_bytes=4)
    intake.begin(1)
    assert intake.grant_bytes == 1000
    intake.accept(10, 800, 200, (0, 0, 10))
    assert intake.grant_bytes == 1000, "absolute: 800 are used"
    intake.begin(2)
    assert intake.grant_bytes == 200
    assert intake.fits(11, 200)
    assert not intake.fits(11, 201)
    intake.merged_tokens, intake.merged_seq = 100, 5
    assert intake.grant_bytes == 600
    assert intake.grant_seq == 5 + MAX_UNMERGED


def test_bytes_of_samples_that_were_dropped_are_granted_again() -> None:
    intake = Intake(quota_bytes=100, token_bytes=1)
    intake.begin(1)
    for turn in range(50):
        assert intake.fits(turn + 1, 100)
        intake.accept(turn + 1, 100, 0, (0, 0, turn))
    assert intake.session_bytes == 5000


def test_a_partition_has_ended_once_all_of_its_total_came() -> None:
    intake = Intake(quota_bytes=100, token_bytes=1)
    assert not intake.ended
    intake.total = 0
    found = [intake.ended]
    intake.total = 3
    found.append(intake.ended)
    intake.accept(3, 10, 10, (0, 0, 3))
    assert [*found, intake.ended] == [True, False, True], "an empty partition ends at once"


# Identities


@given(st.integers(1, 4096), st.lists(st.integers(0, 2**40), min_size=1, max_size=5))
def test_a_sample_s_index_tells_its_partition_and_its_place(partitions: int, seqs: list[int]) -> None:
    for partition in {0, partitions // 2, partitions - 1}:
        index = np.asarray(index_of(np.array(seqs, np.int64), partition, partitions))
        assert (index // partitions).tolist() == seqs
        assert (index % partitions == partition).all()
        assert [index_of(seq, partition, partitions) for seq in seqs] == index.tolist()


@given(st.data(), st.integers(1, 16))
def test_handles_in_use_are_distinct_and_their_rows_stay(data: st.DataObject, capacity: int) -> None:
    table = SampleTable(capacity)
    held: dict[int, int] = {}
    for turn in range(data.draw(st.integers(1, 25))):
        if data.draw(st.booleans()) and held:
            gone: list[int] = data.draw(st.lists(st.sampled_from(sorted(held)), unique=True))
            table.free(np.array(gone, np.int64))
            for handle in gone:
                del held[handle]
        else:
            handles = table.take(data.draw(st.integers(0, 20)))
            assert not set(handles.tolist()) & set(held)
            assert len(set(handles.tolist())) == len(handles)
            for column in (table.stream, table.index, table.part, table.length, table.loss_tokens, table.crc):
                column[handles] = turn
            held.update(dict.fromkeys(handles.tolist(), turn))
        assert len(table) == len(held)
        assert all(handle < table.capacity for handle in held)
        rows = np.array(list(held), np.int64)
        for column in (table.stream, table.index, table.part, table.length, table.loss_tokens, table.crc):
            assert column[rows].tolist() == list(held.values())


def test_handles_are_taken_again_in_the_order_of_their_numbers() -> None:
    """Those that went first, first: samples that come together have rows that lie together."""
    table = SampleTable(8)
    table.take(8)
    for gone in ([6, 1, 4], [7, 0, 2]):
        table.free(np.array(gone, np.int64))
    assert table.take(4).tolist() == [1, 4, 6, 0]
    table.free(np.array([5, 3], np.int64))
    assert table.take(5).tolist() == [2, 7, 3, 5, 8], "then those that it grew by"


@pytest.mark.parametrize("count", [100, MANY_HANDLES - 1, MANY_HANDLES, 3 * MANY_HANDLES])
@pytest.mark.parametrize("capacity", [16, 32 * MANY_HANDLES, 200 * MANY_HANDLES])
def test_many_handles_are_put_in_the_order_that_a_sort_gives(count: int, capacity: int) -> None:
    table, draw = SampleTable(capacity), np.random.default_rng(count)
    table.take(4 * count)
    table.take(table.capacity - len(table))
    for _ in range(2):
        gone = draw.permutation(table.capacity)[:count]
        table.free(gone)
        assert table.take(count).tolist() == sorted(gone.tolist())
