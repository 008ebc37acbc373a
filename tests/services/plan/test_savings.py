"""What ``streampack report`` counts: golden numbers, and lengths back in the order in which they came."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from streampack_services.forecast.forecast import formed
from streampack_services.forecast.lengths import stretches_of
from streampack_services.forecast.run_lengths import Served, arrival_order, spread
from streampack_services.forecast.sharing import Sharing
from streampack_services.plan import savings
from streampack_services.plan.savings import packed_slots, padded_slots

from streampack import pack_lengths
from streampack.core.model.keys.planning_keys import Warmup
from streampack.core.model.rules import Align, Batch, Rules
from streampack.core.model.samples import I64
from streampack.core.stats.length_histogram import BUCKETS, LengthCounts, bucket_of
from streampack.errors import UserError

FIXTURES = Path(__file__).parents[2] / "fixtures" / "reports"
LENGTHS = np.array([4, 1, 3, 2, 1, 3, 4, 5])
RULES = Rules(budget=5, packs=1, window=8)


def served_by(what: str, lengths: I64, rules: Rules) -> Served:
    """What a run of one pass over samples of these ``lengths`` serves."""
    steps, _ = formed(lengths, rules)
    counts = np.concatenate([step.packs.counts for step in steps])
    slots = sum(int(rules.own_widths(step.packs.slots[step.packs.counts > 0]).sum()) for step in steps)
    batches = [0, *np.cumsum([step.num_samples for step in steps]).tolist()] if rules.batch else [0, len(lengths)]
    return Served(
        what, lengths, rules, len(lengths), len(counts), int((counts == 0).sum()), int(lengths.sum()), slots,
        np.array(batches), len(steps), True, "in their order",
    )  # fmt: skip


def test_padding_to_the_longest_of_a_micro_batch_is_counted() -> None:
    assert padded_slots(LENGTHS, 2, 1) == 2 * (4 + 3 + 3 + 5)
    assert padded_slots(LENGTHS, 3, 1) == 3 * 4 + 3 * 3 + 2 * 5
    assert padded_slots(LENGTHS, 3, 4) == 3 * 4 + 3 * 4 + 2 * 8
    assert padded_slots(LENGTHS, 100, 1) == 8 * 5


def test_the_report_of_a_worked_example_has_the_figures_by_hand() -> None:
    run = served_by("eight", LENGTHS, RULES)
    found = savings.savings(run, None, savings.Rate(2, 0.25, "as given"))
    assert found["run"]["slots"] == 25, "23 tokens take five packs at least"
    assert found["micro_batch"] == 2, "8 samples in 5 packs"
    padding, greedy, ffd = (found["others"][name] for name in ("padding", "greedy", "first_fit_decreasing"))
    assert (padding["slots"], padding["saved_slots"], padding["saved_share"]) == (30, 5, pytest.approx(1 / 6))
    assert (greedy["slots"], ffd["slots"]) == (25, 25)
    assert greedy["saved_share"] == 0.0
    assert padding["saved_gpu_hours"] == pytest.approx(5 / 0.25 / 3600)
    assert padding["saved_hours"] == pytest.approx(5 / 0.25 / 3600 / 2)


def test_batches_are_compared_batch_by_batch() -> None:
    batches = msgspec.structs.replace(RULES, batch=Batch(samples=3), warmup=Warmup(1, 9))
    bounds = np.array([0, 3, 6, 8])
    assert packed_slots(LENGTHS, batches, "concatenative", bounds) == 5 * (2 + 2 + 2), "4 1 | 3, 2 1 | 3 and 4 | 5"
    assert padded_slots(LENGTHS, 2, 1, bounds) == 4 * 2 + 3 + 2 * 2 + 3 + 5 * 2, "4 1, 3 | 2 1, 3 | 4 5"
    batches = msgspec.structs.replace(batches, warmup=None)
    found = savings.savings(served_by("eight", LENGTHS, batches), None, None)
    assert found["run"]["slots"] == 5 * 6
    assert (found["batches"], found["others"]["greedy"]["slots"]) == (3, 30)


def test_other_ways_of_batching_have_the_shape_of_the_run_s_packs() -> None:
    exact = msgspec.structs.replace(RULES, shape="exact")
    found = savings.savings(served_by("eight", LENGTHS, exact), None, None)
    assert found["run"]["slots"] == found["others"]["greedy"]["slots"] == 23, "no pack is padded"
    assert found["others"]["padding"]["slots"] == 30


def test_a_plan_of_fewer_slots_than_the_run_saves_nothing() -> None:
    """One short sample: padded it is itself, and the run computes a whole pack."""
    found = savings.savings(served_by("one", np.array([4]), RULES), None, None)
    assert found["others"]["padding"]["saved_slots"] == -1


def test_without_a_rate_there_are_no_hours() -> None:
    found = savings.savings(served_by("eight", LENGTHS, RULES), 4, None)
    assert "gpu_hours" not in found["run"]
    assert found["gpus"] is None


def test_the_printed_report_is_that_of_the_golden_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sample that a whole pack holds; batches of three samples; some lengths of a run with media and a rate."""
    monkeypatch.setenv("COLUMNS", "120")
    batches = msgspec.structs.replace(RULES, batch=Batch(samples=3))
    media = {"items": 7, "patches": 1200, "bound_by": {"tokens": 3, "patches": 2}}
    sharing = Sharing(2, 20, 5, 0)
    limited = replace(served_by("some", LENGTHS, RULES), samples=16, media=media, sharing=sharing, shared_tokens=5)
    for run, rate in (
        (served_by("one", np.array([4]), RULES), None),
        (served_by("eight", LENGTHS, batches), savings.Rate(1, 7.0, "as given")),
        (limited, savings.Rate(8, 9000.0, "as given")),
    ):
        savings.show_savings(savings.savings(run, None, rate))
    shown = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert shown + "\n" == (FIXTURES / "report.txt").read_text()


@given(st.lists(st.integers(1, 32), min_size=1, max_size=60), st.sampled_from([1, 4]))
def test_others_are_packed_as_pack_lengths_does(lengths: list[int], align: int) -> None:
    rules = Rules(budget=32, packs=7, window=16, align=Align(align, align))
    for packer in ("concatenative", "first_fit_decreasing"):
        expected = 32 * len(pack_lengths(lengths, 32, packer, 16, align))
        assert packed_slots(np.array(lengths), rules, packer) == expected


@given(st.lists(st.integers(1, 64), min_size=1, max_size=100), st.sampled_from(["exact_fill", "first_fit_decreasing"]))
def test_one_stream_is_put_back_into_its_order_whatever_packed_it(lengths: list[int], packer: str) -> None:
    packs = pack_lengths(lengths, 64, packer, 16)
    index = np.array([i for pack in packs for i in pack])
    pack = np.repeat(np.arange(len(packs)), [len(each) for each in packs])
    order = arrival_order(np.zeros(len(index), int), index, np.zeros(len(index), int), pack)
    assert index[order].tolist() == list(range(len(lengths)))


def test_streams_are_mixed_as_they_were() -> None:
    stream, index = np.array([1, 0, 0, 1, 1, 0]), np.array([0, 0, 1, 2, 1, 2])
    order = arrival_order(stream, index, np.zeros(6, int), np.array([0, 0, 1, 1, 2, 2]))
    assert list(zip(stream[order].tolist(), index[order].tolist(), strict=True)) == [
        (0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (1, 2),
    ]  # fmt: skip


@given(st.lists(st.integers(1, 2**31 - 1) | st.integers(1, 2**14), min_size=1))
def test_buckets_are_in_order_and_narrow(lengths: list[int]) -> None:
    lengths = sorted(lengths)
    buckets = bucket_of(np.array(lengths)).tolist()
    assert buckets == sorted(buckets)
    assert buckets[-1] < BUCKETS
    assert buckets == [int(bucket_of(np.array([length]))[0]) for length in lengths], "one by one"
    for one, other, a, b in zip(lengths, lengths[1:], buckets, buckets[1:], strict=False):
        assert a != b or other - one <= max(one // 32, 0), "equal below 64, one part in 32 above"


@given(st.lists(st.lists(st.integers(1, 100_000), max_size=40), max_size=5))
def test_counts_keep_the_number_of_samples_and_of_tokens(steps: list[list[int]]) -> None:
    counts = LengthCounts()
    for step in steps:
        counts.add(np.array(step, np.int64))
    rows = counts.rows()
    every = [length for step in steps for length in step]
    assert (sum(row[0] for row in rows), sum(row[1] for row in rows)) == (len(every), sum(every))
    assert len(rows) <= len(every)
    if not every:
        return
    back = spread(msgspec.json.decode(msgspec.json.encode(rows)), 3)
    assert (len(back), int(back.sum())) == (len(every), sum(every))
    assert np.allclose(np.sort(back), np.sort(every), rtol=1 / 32, atol=0)


def test_a_rate_is_what_was_given_or_what_the_broker_packs_now() -> None:
    run = replace(served_by("eight", LENGTHS, RULES), tokens_per_s=230.0, ranks=5)
    assert savings.rate_of(run, 2, 7.0) == savings.Rate(2, 7.0, "as given")
    found = savings.rate_of(run, None, None)
    assert found is not None
    assert found.gpus == 5
    assert found.tokens_per_s == pytest.approx(230 * 25 / 23 / 5), "slots, of each rank"
    assert "the 5 attached ranks" in found.said
    found = savings.rate_of(run, 10, None)
    assert found is not None
    assert found.gpus == 10
    assert found.tokens_per_s == pytest.approx(25.0)
    assert savings.rate_of(replace(run, tokens_per_s=0.0), 4, None) is None
    with pytest.raises(UserError, match="--tokens-per-second is inf"):
        savings.rate_of(run, 2, float("inf"))
    assert savings.rate_of(replace(run, ranks=0), None, None) is None


def test_stretches_are_whole_runs_from_end_to_end() -> None:
    values = np.arange(1000)
    found = stretches_of(values, 160)
    assert [len(each) for each in found] == [10] * 16
    assert (found[0][0], found[-1][-1]) == (0, 999)
    assert all((np.diff(each) == 1).all() for each in found)
    assert np.concatenate(stretches_of(values, 1000)).tolist() == values.tolist()
    assert len(stretches_of(values, 3)) == 3
