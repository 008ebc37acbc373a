"""Runs whose samples have media: ranks get exactly the media of their samples, whatever fails.

``SIM_SEEDS`` sets how many seeds run (``SIM_SEEDS=2000``) or which (``SIM_SEEDS=17:18``).
"""

from __future__ import annotations

import pytest

from tests.simulation.data import MEDIA_CASES, MEDIA_LIMITS, case
from tests.simulation.offline import reference
from tests.simulation.seeds import of_seeds
from tests.simulation.world import run


def _case_of(seed: int) -> int:
    return MEDIA_CASES[seed % len(MEDIA_CASES)]


@of_seeds("12", 6)
def test_ranks_get_exactly_the_media_of_their_samples_whatever_fails(seeds: range) -> None:
    for seed in seeds:
        run(seed, _case_of(seed))


@of_seeds("3", 6)
def test_ranks_behind_relays_get_exactly_the_media_of_their_samples(seeds: range) -> None:
    for seed in seeds:
        run(seed, _case_of(seed), relays=True)


@of_seeds("3", 6)
def test_a_broker_that_waits_for_its_standby_keeps_media(seeds: range) -> None:
    for seed in seeds:
        run(seed, _case_of(seed), standby=True)


@pytest.mark.parametrize("number", MEDIA_CASES)
def test_the_cases_have_samples_without_media_and_samples_over_a_limit(number: int) -> None:
    this = case(number)
    media = [
        this.media(stream, partition, seq)
        for stream, counts in enumerate(this.counts)
        for partition, count in enumerate(counts)
        for seq in range(count)
    ]
    assert sum(not each.data for each in media) > len(media) // 4
    assert any(each.counts[1] > (MEDIA_LIMITS.patches or 0) for each in media)


def test_limits_of_media_decide_about_packs() -> None:
    """Most packs of the first case have little room for more items or patches."""
    found = reference(MEDIA_CASES[0])
    packs = [[found.media[one].counts for one in pack] for step in found.ids for pack in step]
    counts = [[sum(column) for column in zip(*pack, strict=True)] for pack in packs if pack]
    assert sum(items >= 5 or patches >= 10 for items, patches in counts) > len(counts) // 2
