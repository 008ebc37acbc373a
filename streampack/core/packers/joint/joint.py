"""``joint``: groups of packs that are full to the token and take equally long.

Theory of operation. Packs of equal tokens do not cost the same: attention costs the sum of squares of the lengths in a
pack. Where lengths have a heavy tail, one long sample costs more than a whole pack of short ones, and no dealing can
mend that afterwards. So ``group`` packs (those that ranks run at the same moment) are formed together. A sample's
*work* is its length squared, plus the work of its media.

- *Outliers* are samples whose work alone is above 3/5 of a pack's work without outliers. They are taken from the most
  work down. A sample is an outlier if its work is above 3/5 * budget * (sum of work / sum of lengths) of itself and all
  samples with less work. Without media, no other sample is longer than 3/5 of the budget.
- An outlier waits until there are ``group`` similar ones, one for each pack. Similar outliers are neighbors by work
  with nearly the same work in their packs. Beside the one with most work, ordinary samples have the mean density (work
  for a token); beside the one with least work, 3/2 of it. The first one's pack then has at most the work of the last
  one's. The run with most work goes, then the next run that fits beside it, and so on.
- An outlier that waits ``patience`` groups longer than it had to goes next. Its run is the one around the oldest such
  outlier with the least ratio of most to least work. Where too many outliers wait and none are similar, the run with
  the least ratio goes.
- The oldest other samples go with them, and leave 3/32 of the packs open. They are placed one by one, each into the
  pack with the least work that keeps 1/16 of the budget open. This is "longest processing time": Graham, "Bounds on
  multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969. The largest go first. A sample's size is its work or,
  if more, its tokens' work at mean density, so that long samples with little work find room, too.
- A pack's work counts its open tokens as *short* samples, since these fill the pack. Short samples are the ordinary
  ones with least work that have 1/8 of the ordinary tokens.
- Each pack is filled exactly (``exact_fill``'s subset sum): with short samples in age order, others where these fail.
- Limits (``Limited``) are kept as the budget is: a sample goes only into a pack that has room for it in each unit. If
  the samples that fill a pack exceed a limit together, the longest that fit are taken instead.

The window is ``window`` ordinary samples of at least two groups' tokens, and the outliers. Outliers are too many if
they have eight groups' tokens and twice the tokens of the ordinary samples. That ends the refill as well, so no more
than ``held_tokens`` are held.

The bound on waiting. Take a sample that came before group g, when t tokens were held. It is *late* from group g + 2 *
patience + floor(t / (group * budget)) on. All older samples are late then, too: a group takes at most group * budget
tokens, so g + t / (group * budget) never falls. The ``group`` oldest late samples are placed before all others, and
have a place: while fewer than ``group`` are placed there is an empty pack. Each alone is within limits. So from then on
each group takes the ``group`` oldest late samples, or all of them. With h samples held when the sample had come, itself
included, that is at most ceil(h / group) groups. And t < h * budget. So no sample is held for more than 2 * patience +
2 * ceil(h / group) groups (``max_wait``).

Once the stream is closed and the window runs dry, no sample waits. When all that is left fits ``group`` packs, it goes
into the fewest packs that this placing finds.

A group is formed and returned whole, even when fewer packs are requested. Only each sample's patience, in ``ages``, is
kept between calls, so packs are a function of the order of samples alone. Samples that were admitted when the window
did not become ready count as unseen.

Packs inside a step become more alike, and steps less alike. So weight losses by token, not by step.

Do not use it where most tokens lie in samples near or above half of the budget. On lengths uniform in 1..budget, packs
are 95.2 % full; use ``exact_fill``. ``benchmarks/packing/balance.py`` has the figures for other lengths.

Lengths and budget are in any one unit. The budget is below 2**24, so that sums of squares stay within 64 bits. The work
of media counts up to 2**32 for each token of its sample. ``joint_kernels`` has the implementation, compiled where numba
is installed.

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

from streampack.core.packers.joint import joint_bounds, joint_kernels
from streampack.core.packers.joint.joint_bounds import MAX_BUDGET, PATIENCE, work_of
from streampack.core.packers.packer import I64, NO_EXTRA, BasePacker, Choice, Extra, writable
from streampack.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Joint(BasePacker):
    """Packer that forms ``group`` packs of equal cost at a time; inside a pack samples are oldest first.

    An outlier waits for similar outliers for about ``patience`` groups. ``max_samples_per_pack`` is None for no cap.
    """

    config_key: ClassVar[str] = "balance.kind"
    max_budget: ClassVar[int | None] = MAX_BUDGET
    keeps_limits: ClassVar[bool] = True

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
        """Return the most packs that may be formed while one sample waits.

        ``held`` is the number of samples in the window when the sample came, itself included.
        """
        return self.group * joint_bounds.max_wait(self.group, self.patience, held)

    @property
    def wait_note(self) -> str:
        """The groups that ``max_wait`` adds for outliers, in words."""
        return f" plus the packs of {2 * self.patience} groups ({self.group} packs each)"

    def num_outliers(self, lengths: I64, budget: int, extra: Extra = NO_EXTRA) -> int:
        """Return the number of outliers, which wait for similar items."""
        return joint_bounds.num_outliers(lengths, budget, extra.work)

    def choose(
        self, lengths: I64, ages: I64, budget: int, count: int, closed: bool, *, window: int, sizes: I64 | None = None,
        extra: Extra = NO_EXTRA,
    ) -> Choice:  # fmt: skip
        """Choose at least ``count`` packs, as in ``Packer.choose``, in whole groups of ``group`` packs."""
        if budget >= MAX_BUDGET:
            raise ConfigError(
                f"budget: got {budget}, expected less than {MAX_BUDGET} for joint. Set align, or use exact_fill"
            )
        sizes = np.ones(len(lengths), np.int64) if sizes is None else sizes
        lengths, ages, sizes = writable(lengths), writable(ages), writable(sizes)
        counts, most = sizes[None], np.array([self.max_samples_per_pack or int(sizes.sum()) + 1])
        if extra.limited is not None:
            counts, most = np.vstack([counts, extra.limited.counts]), np.concatenate([most, extra.limited.most])
        arguments = int(budget), int(count), bool(closed), int(window), self.group, self.patience
        return Choice(*joint_kernels.joint(lengths, work_of(lengths, extra.work), ages, counts, most, *arguments))
