"""A simulated run with dynamic context parallelism: groups of ranks get the steps of static context parallelism.

Brokers, producers and ranks are killed and started again, also as another mesh, and messages are lost. A rank gets the
same bytes each time. Steps, digests, samples and tokens are those of the case with static context parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from streampack.core.deal.step_cache import KeptSteps
from streampack.core.layout.boundaries import Contents
from streampack.core.protocol.relay_messages import NodePart
from tests.simulation.data import FIRST_ARRIVAL, case, with_groups
from tests.simulation.job import Job
from tests.simulation.mutating import wrap
from tests.simulation.seeds import of_seeds
from tests.simulation.world import World

CASES = [
    number for number in range(FIRST_ARRIVAL)
    if case(number).rules.batch is None and case(number).rules.shape in ("fixed", "exact")
]  # fmt: skip


class GroupsWorld(World):
    """A run of one feed whose dp x cp ranks form groups."""

    def _make_jobs(self, number: int) -> list[Job]:
        again = self.rng.random() < 0.25
        return [Job(self, "train", number, 2 if again else 1, this=with_groups(case(number)))]


@of_seeds("0:24", 8)
def test_groups_of_ranks_get_the_offline_steps_and_the_same_bytes_whatever_fails(seeds: range) -> None:
    sizes = set[int]()
    for seed in seeds:
        world = GroupsWorld(seed, CASES[seed % len(CASES)])
        world.run()
        sizes |= world.jobs["train"].ranks_of_packs
    assert sizes >= {1, 2, 4}, "ranks that shared a pack"


@of_seeds("0:4", 4)
def test_groups_of_ranks_behind_relays_get_the_same_bytes_whatever_fails(seeds: range) -> None:
    for seed in seeds:
        GroupsWorld(seed, CASES[seed % len(CASES)], relays=True).run()


def test_a_relay_that_gets_the_shards_of_one_rank_for_a_whole_group_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_the_first_rank(original: Any, self: KeptSteps, *arguments: Any) -> Iterator[tuple[NodePart, Contents]]:
        for part, packs in original(self, *arguments):
            yield part, packs if packs.ranks is None else packs._replace(ranks=np.zeros_like(packs.ranks))

    wrap(monkeypatch, KeptSteps, "node_parts", of_the_first_rank)
    with pytest.raises(AssertionError, match=r"bytes: part \d+ of step \d+ for .* differs"):
        GroupsWorld(0, CASES[0], relays=True).run()
