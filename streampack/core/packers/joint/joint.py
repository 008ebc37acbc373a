"""``joint``: groups of packs that are full to the token and take equally long.

Theory of operation. Packs of equal tokens do not cost the same: attention costs the sum of squares of the
lengths in a pack, and where lengths have a heavy tail one long sample costs more than a whole pack of short ones. No
dealing mends that afterwards. So ``group`` packs (those that ranks run at the same moment) are formed together:

- *Outliers* are samples whose square alone is above 3/5 of a pack's work, as it would be without any outliers: from
  the longest down, as long as the square of the next is above 3/5 * budget * (sum of squares / sum of lengths) of it
  and all that are shorter. No outlier is longer than it must be and no other sample is longer than 3/5 of the budget.
- An outlier waits until there are ``group`` alike, one for each pack. Alike are neighbors by length, where the
  shortest with ordinary samples of 3/2 of the mean density (work for a token) comes to the work of the longest with
  those of the mean density. The longest such run goes, then the longest that fits beside it, and so on. Where an
  outlier has waited ``patience`` groups longer than it had to, the first is the run around the oldest such, with the
  least ratio of its longest to its shortest; where too many wait and none are alike, that with the least ratio.
- With them go the oldest others, as many as leave 3/32 of the packs open: longest first, each into the pack with the
  least work that keeps 1/16 of the budget open ("longest processing time": Graham, "Bounds on multiprocessing timing
  anomalies", SIAM J. Appl. Math. 17, 1969). A pack's work counts its open tokens as *short* samples, which are the
  shortest of the ordinary ones with 1/8 of their tokens, and which are what fills it.
- Each pack is filled exactly (``exact_fill``'s subset sum): with short samples in age order, others where these fail.

The window is ``window`` ordinary samples of at least two groups' tokens, and the outliers. These are too many, and end
the refill as well, from eight groups' tokens on if they have twice the tokens of the ordinary samples. So no more than
``held_tokens`` are held.

The bound on waiting. A sample is *late* from group g + 2 * patience + floor(t / (group * budget)) on, where it came
before group g and t tokens were held then. All older ones are late then, too: a group takes at most group * budget
tokens, so that g + t / (group * budget) never falls. The ``group`` oldest late ones are placed before all others, and
have a place: while fewer than ``group`` are placed there is an empty pack. So from then on each group takes the
``group`` oldest of the late, or all: with h samples held when it had come, it included, that is at most ceil(h / group)
groups. And t < h * budget: no sample is held for more than 2 * patience + 2 * ceil(h / group) groups (``max_wait``).

Once the stream is closed and the window runs dry nothing waits any more, and when all that is left fits ``group`` packs
it goes in the fewest that this placing finds.

A group is formed and returned whole, even when fewer packs are asked for: nothing is remembered between calls but each
sample's patience, in ``ages``, and the packs are a function of the order of samples alone. Samples that came in vain
(the window is not ready yet) count as unseen.

The steps grow alike inside and less alike among themselves: losses must be weighted by token, not by step.

It is not for lengths of which most tokens lie in samples near or above half of the budget: uniform in 1..budget, packs
are 95.2 % full (take ``exact_fill``). Otherwise ``benchmarks/balance.py`` has the figures.

Lengths and budget are in any one unit, the budget below 2**24, so that sums of squares stay within 64 bits.
``joint_kernels`` is how it is done, compiled where numba is installed.

>>> import numpy as np
>>> lengths = np.array([9, 1, 8, 2, 1, 3, 2, 2, 4, 9, 1, 3])
>>> choice = Joint(group=2).choose(lengths, np.full(12, -1), 12, 9, True, window=4)
>>> [lengths[pack].tolist() for pack in np.split(choice.indices, choice.bounds[1:-1])]
[[9, 2, 1], [1, 1, 9], [8, 2], [3, 2, 4, 3]]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from streampack.core.packers.joint import joint_bounds
from streampack.core.packers.joint.joint_bounds import PATIENCE
from streampack.core.packers.packer import I64, Choice
from streampack.errors import ConfigError

MAX_BUDGET = 2**24


@dataclass(frozen=True, slots=True)
class Joint:
    """``group`` packs at a time; outliers wait for others alike for about ``patience`` groups.

    ``max_samples_per_pack``: None for no cap. Inside a pack samples are in age order. ``choose`` is the Packer
    protocol's; it returns whole groups, so packs may come that were not asked for.
    """

    config_key: ClassVar[str] = "balance.kind"
    max_budget: ClassVar[int | None] = MAX_BUDGET

    name: str = "joint"
    group: int = 8
    patience: int = PATIENCE
    max_samples_per_pack: int | None = None

    def __post_init__(self) -> None:
        for name in ("group", "patience", "max_samples_per_pack"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"got {name}={value}, expected at least 1")

    def max_wait(self, window: int, held: int) -> int:
        """See ``Packer``; what ``joint_bounds`` promises in groups, in packs."""
        return self.group * joint_bounds.max_wait(self.group, self.patience, held)

    def choose(
        self, lengths: I64, ages: I64, budget: int, count: int, closed: bool, *, window: int, sizes: I64 | None = None
    ) -> Choice:
        """At least ``count`` packs."""
        if budget >= MAX_BUDGET:
            raise ConfigError(
                f"budget: got {budget}, expected less than {MAX_BUDGET} for joint: take align or exact_fill"
            )
        from streampack.core.packers.joint.joint_kernels import joint  # not before: numba takes a second

        sizes = np.ones(len(lengths), np.int64) if sizes is None else sizes
        lengths, ages, sizes = (np.require(array, np.int64, ["C", "W"]) for array in (lengths, ages, sizes))
        cap = self.max_samples_per_pack or int(sizes.sum()) + 1
        arguments = int(budget), int(count), bool(closed), int(window), self.group, self.patience, cap
        return Choice(*joint(lengths, ages, sizes, *arguments))
