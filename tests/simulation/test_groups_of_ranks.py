"""A simulated run with dynamic context parallelism: groups of ranks get the steps of static context parallelism.

Brokers, producers and ranks are killed and started again, also as another mesh, and messages are lost. A rank gets the
same bytes each time. Steps, digests, samples and tokens are those of the case with static context parallelism.
"""

from __future__ import annotations

from tests.simulation.data import FIRST_ARRIVAL, case, with_groups
from tests.simulation.job import Job
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
