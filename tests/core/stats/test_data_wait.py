"""Why a rank waits: every moment of a wait has one cause, from what the broker says to the sums in its snapshot."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.client.reading_stats import ReadingFigures, UsefulFlops
from streampack.core.flops.model_flops import ModelFlops
from streampack.core.serve.readers import READER_SILENT_S
from streampack.core.stats.data_wait import CAUSES, WAIT_BOUNDS_S, NextWaits, Starvation, bucket_of, cause_of
from tests.core.serve.desk import Desk, ping

# What a client adds up


def test_the_mfu_is_the_useful_flops_of_finished_steps_over_the_time_with_waits() -> None:
    now = 0.0
    figures = ReadingFigures(lambda: now, UsefulFlops(ModelFlops(token=1, pair=0), cp=1, others=1, peak=100.0))
    for flops in (60.0, 20.0, 1000.0):  # each step takes 1 s, after a wait of 1 s
        figures.begin_wait()
        now += 1.0
        figures.end_wait(True)
        figures.note_step(1, 1, flops)
        now += 1.0
    assert figures.stats(0)["mfu"] == pytest.approx((60 + 20) / (4.0 * 100))
    assert figures.starvation().useful_s == pytest.approx((60 + 20) / 100), "the last step is not done"


@pytest.mark.parametrize("useful", [None, UsefulFlops(ModelFlops(token=1, pair=0), cp=1, others=1, peak=0.0)])
def test_there_is_no_mfu_without_a_peak(useful: UsefulFlops | None) -> None:
    figures = ReadingFigures(useful=useful)
    for _ in range(3):
        figures.begin_wait()
        figures.end_wait(True)
    assert "mfu" not in figures.stats(0)
    assert figures.starvation().useful_s is None
    assert ("useful_tflops" in figures.stats(0)) == (useful is not None)


MOMENTS = st.lists(
    st.tuples(
        st.floats(0, 100),
        st.one_of(
            st.sampled_from(["ask", "got", "end", "look"]),
            st.tuples(st.sampled_from(CAUSES), st.sampled_from([None, "web", "code"])),
        ),
    )
)


@given(MOMENTS)
def test_every_second_is_of_one_cause_or_the_trainers_or_of_no_reading_at_all(
    moments: list[tuple[float, str | tuple[str, str | None]]],
) -> None:
    now = 0.0
    figures = ReadingFigures(lambda: now)
    expected, of_streams, mine, waits = dict.fromkeys(CAUSES, 0.0), dict[str, float](), 0.0, list[float]()
    state, began = "", 0.0
    cause: tuple[str, str | None] = ("network", None)
    for seconds, what in moments:
        passed, now = now + seconds - now, now + seconds  # as much as a clock shows of it
        if state == "wait":
            expected[cause[0]] += passed
            if cause[1] is not None:
                of_streams[cause[1]] = of_streams.get(cause[1], 0.0) + passed
        elif state == "work":
            mine += passed
        if isinstance(what, tuple):
            cause = what if what[0] == "stream" else (what[0], None)
            figures.set_cause(*cause)
        elif what == "ask" and state != "wait":
            state, began = "wait", now
            figures.begin_wait()
        elif what in ("got", "end") and state == "wait":
            state = "work" if what == "got" else ""
            waits.append(now - began)
            figures.end_wait(what == "got")
        else:
            figures.starvation()
    found = figures.starvation()
    assert found.causes_s == pytest.approx(expected)
    assert {k: v for k, v in found.streams_s.items() if v} == pytest.approx({k: v for k, v in of_streams.items() if v})
    assert sum(found.streams_s.values()) <= found.causes_s["stream"] + 1e-6
    assert found.trainer_s == pytest.approx(mine)
    assert sum(found.waits) == len(waits)
    assert figures.counts(0)["wait_s"] == pytest.approx(sum(expected.values()))
    stats = figures.stats(0)
    assert sum(stats[f"starved_{cause}_s"] for cause in CAUSES) == pytest.approx(stats["wait_s"])


def test_a_wait_that_lasts_is_seen_while_it_does() -> None:
    now = 0.0
    figures = ReadingFigures(lambda: now)
    figures.begin_wait()
    figures.set_cause("stream", "web")
    for now in (1.0, 60.0, 600.0):
        assert figures.starvation().streams_s["web"] == now
    figures.end_wait(True)
    now = 1000.0
    assert figures.starvation().trainer_s == 400.0, "a trainer that hangs, too"


def test_a_step_takes_lately_what_it_takes_from_one_to_the_next() -> None:
    now = 0.0
    figures = ReadingFigures(lambda: now)
    assert figures.starvation().step_s is None
    for took in [100.0] * 3 + [2.0] * 40:
        figures.begin_wait()
        now += took / 2
        figures.end_wait(True)
        now += took / 2
    assert figures.starvation().step_s == pytest.approx(2.0)


# Waits of all ranks


@given(st.floats(0, 1e6))
def test_a_wait_is_counted_in_the_first_bucket_that_holds_it(seconds: float) -> None:
    n = bucket_of(seconds)
    assert n == len(WAIT_BOUNDS_S) or seconds <= WAIT_BOUNDS_S[n]
    assert n == 0 or seconds > WAIT_BOUNDS_S[n - 1]
    assert all(a < b for a, b in pairwise(WAIT_BOUNDS_S))


@given(st.lists(st.lists(st.tuples(st.integers(0, 13), st.floats(0, 10)), max_size=4), max_size=6))
def test_waits_of_all_ranks_only_grow_and_count_each_once(lives: list[list[tuple[int, float]]]) -> None:
    """Each life is a client's: it says its sums again and again, and the next process of the rank begins at nothing."""
    total, counts, seconds = NextWaits(), np.zeros(14, np.int64), 0.0
    for life in lives:
        said, mine, waited = None, np.zeros(14, np.int64), 0.0
        for bucket, more in life:
            mine[bucket] += 1
            waited += more
            now = Starvation(causes_s={"stream": waited}, waits=mine.tolist())
            before = list(total.counts)
            total.add(said, now)
            total.add(now, now)
            assert all(a <= b for a, b in zip(before, total.counts, strict=True))
            said = now
        counts, seconds = counts + mine, seconds + waited
    assert total.counts == counts.tolist()
    assert total.sum == pytest.approx(seconds)


def test_a_rank_that_goes_on_elsewhere_brings_what_it_has_waited_and_no_wait_is_counted_twice() -> None:
    """A sum that began at nothing again would be, once it is there, a wait of hours within a second."""
    desk, before = Desk(), Starvation(causes_s={"peers": 3600.0}, waits=[0, 7])
    peer = desk.come("a0", dp=1, starvation=before)
    assert said_of(desk) == before
    desk.say(peer, ping("a0", starvation=Starvation(causes_s={"peers": 3601.5}, waits=[0, 8])))
    assert (desk.readers.steps.next_waits.sum, desk.readers.steps.next_waits.counts[1]) == (1.5, 1)
    desk.die("a0")
    desk.wait(READER_SILENT_S + 1)
    assert not desk.readers.steps.stats()
    now = Starvation(causes_s={"peers": 3602.0, "network": 20.0}, waits=[0, 8])
    desk.say(desk.come("a0", dp=1, starvation=now), ping("a0", starvation=now))
    assert said_of(desk) == now
    assert (desk.readers.steps.next_waits.sum, desk.readers.steps.next_waits.counts[1]) == (22.0, 1)


def test_a_rank_that_waits_for_others_says_so_before_they_are_there() -> None:
    desk, said = Desk(), Starvation(causes_s={"join": 60.0})
    desk.say(desk.come("a0", dp=2), ping("a0", starvation=said))
    assert said_of(desk) == said
    assert desk.readers.steps.next_waits.sum == 60.0


def said_of(desk: Desk) -> object:
    (row,) = desk.readers.steps.stats()
    return row.starvation


def test_a_cause_that_only_a_later_broker_knows_is_the_brokers_work() -> None:
    assert [cause_of(cause) for cause in CAUSES] == list(CAUSES)
    assert cause_of("another") == "forming"
