"""Dynamic batching: padded micro-batches with as many samples as fit a budget, for models that do not take packs.

The samples of one global batch are sorted by length (ties: the earlier first). Ranks take them in turn,
``sorted[i::dp]``, so that all ranks have similar lengths at every place. A micro-batch consists of consecutive places,
the same places on all ranks. Each sample is padded to the longest sample of the micro-batch on *all* ranks, rounded up,
so every rank has the same shapes. A micro-batch is closed before (count * padded length) would pass the budget. NeMo-RL
and ROLL do the same. ROLL's worked example has a micro-batch of 2 x 6 tokens for a budget of 10, and is corrected
below.

If more micro-batches are required (a multiple or a minimum), the one with most tokens is split in two, again and again,
shorter samples first. Then empty micro-batches are added. If dp does not divide the number of samples, some ranks have
no sample at one place. That place holds -1, and becomes a row of padding.

Use dynamic batching instead of packing, never together with packing. Every micro-batch has its own shape, and
``torch.compile`` would compile for each shape.

>>> found = padded_batches([7, 6, 8, 5, 1, 3, 8, 6], budget=10, dp=2, length_round=2)
>>> found.lengths.tolist(), found.figures.actual_tokens
([4, 6, 8, 8], 52)
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np

from streampack.core.layout.boundaries import round_up
from streampack.core.model.samples import I64
from streampack.errors import ConfigError, SampleError


@dataclass(frozen=True, slots=True)
class PaddedFigures:
    """Tokens of a batch over all ranks.

    Attributes:
        valid_tokens: Real tokens.
        original_tokens: Tokens of the batch if it were padded to the longest sample, or to the given width.
        actual_tokens: Tokens of the padded micro-batches.
    """

    valid_tokens: int = 0
    original_tokens: int = 0
    actual_tokens: int = 0

    @property
    def removed_padding_tokens(self) -> int:
        """Padding tokens that one padded batch would have, but the micro-batches do not have."""
        return self.original_tokens - self.actual_tokens

    @property
    def removed_padding_ratio(self) -> float:
        """Removed padding tokens over ``original_tokens``."""
        return self.removed_padding_tokens / self.original_tokens if self.original_tokens else 0.0


@dataclass(frozen=True, slots=True)
class PaddedBatches:
    """The padded micro-batches of a batch.

    Attributes:
        places: int64 [places, dp], sample numbers, shortest first; -1 for a row of padding.
        bounds: int64 [m + 1]; micro-batch i of a rank is ``places[bounds[i]:bounds[i + 1], rank]``.
        lengths: int64 [m], tokens of each row of a micro-batch.
        figures: Tokens over all ranks.
    """

    places: I64
    bounds: I64
    lengths: I64
    figures: PaddedFigures

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of each rank."""
        return len(self.lengths)


def padded_batches(
    lengths: Sequence[int] | I64,
    budget: int,
    dp: int,
    *,
    length_round: int = 1,
    micro_batch_multiple: int = 1,
    min_micro_batches: int = 1,
    width: int | None = None,
    pp: int = 1,
    variable_lengths: bool = False,
) -> PaddedBatches:
    """Make padded micro-batches of at most ``budget`` tokens a rank, with the same shapes on all ranks.

    Args:
        lengths: Integers [n], real tokens of each sample.
        budget: The most tokens in a micro-batch of one rank, padding included.
        dp: Number of data-parallel ranks.
        length_round: Padded lengths are multiples of this; it must suit cp and tp.
        micro_batch_multiple: The number of micro-batches is a multiple of this.
        min_micro_batches: The fewest micro-batches.
        width: Tokens per row of the batch without micro-batches, for ``figures``; by default the length of the longest
            sample.
        pp: Pipeline stages. With more than one, micro-batches should have one shape, so ``pp`` above 1 is rejected
            unless the trainer takes ``variable_lengths``. Then the number of micro-batches is a multiple of ``pp``.
        variable_lengths: The pipeline takes micro-batches of different lengths.

    Raises:
        SampleError: A sample has less than 1 token, or more than the budget or the width. The error names the sample.
        ConfigError: A number is out of range.
    """
    for name, value in (
        ("budget", budget), ("dp", dp), ("length_round", length_round), ("pp", pp),
        ("micro_batch_multiple", micro_batch_multiple), ("min_micro_batches", min_micro_batches),
    ):  # fmt: skip
        if value < 1:
            raise ConfigError(f"{name}: got {value}, expected at least 1")
    if pp > 1 and not variable_lengths:
        raise ConfigError(
            f"pp: got {pp}, expected 1, because micro-batches differ in length. Pack the samples, or set "
            f"variable_lengths=True"
        )
    if length_round > budget:
        raise ConfigError(f"length_round: got {length_round}, expected at most {budget}, the budget")
    real = np.asarray(lengths, np.int64)
    padded = -(-real // length_round) * length_round
    width = int(padded.max(initial=0)) if width is None else width
    for i in np.flatnonzero((real < 1) | (padded > budget) | (real > width))[:1].tolist():
        raise SampleError(
            f"sample {i}: got {real[i]} tokens ({padded[i]} with padding), expected 1 to {min(budget, width)}. Drop or "
            "truncate the sample before batching"
        )
    multiple = int(np.lcm(micro_batch_multiple, pp))
    rows = -(-len(real) // dp)
    places = np.full((rows, dp), -1, np.int64)
    places.ravel()[: len(real)] = np.argsort(real, kind="stable")
    longest = np.append(padded, 0)[places].max(axis=1).tolist()
    stops, shapes = cut_places(longest, budget, length_round, min_micro_batches, multiple)
    places = np.concatenate([places, np.full((int(stops[-1]) - rows, dp), -1, np.int64)])
    actual = dp * int((shapes * np.diff(stops)).sum())
    return PaddedBatches(places, stops, shapes, PaddedFigures(int(real.sum()), len(real) * width, actual))


def cut_places(longest: list[int], budget: int, length_round: int, least: int, multiple: int = 1) -> tuple[I64, I64]:
    """Cut places into micro-batches of at most ``budget`` tokens: a multiple of ``multiple``, and at least ``least``.

    Args:
        longest: The padded length of each place over all ranks, rising, in multiples of ``length_round``.
        budget: The most tokens in a micro-batch of one rank.
        length_round: The length of the one row of an empty micro-batch, which makes up the number.
        least: The fewest micro-batches.
        multiple: The number of micro-batches is a multiple of this.

    Returns:
        The bounds of the micro-batches, int64 [m + 1], and the length of their rows, int64 [m].
    """
    bounds = _bounds(longest, budget)
    count = round_up(max(len(bounds) - 1, least), multiple)
    _split(bounds, longest, count)
    empty = count + 1 - len(bounds)
    shapes = np.array([*(longest[stop - 1] for stop in bounds[1:]), *[length_round] * empty], np.int64)
    return np.array([*bounds, *range(len(longest) + 1, len(longest) + empty + 1)], np.int64), shapes


def _bounds(longest: list[int], budget: int) -> list[int]:
    """Return the bounds of the micro-batches: consecutive places that fit the budget when padded to the longest.

    ``longest`` are the padded lengths of the places over all ranks, rising.
    """
    bounds = [0]
    for place, length in enumerate(longest):
        if (place + 1 - bounds[-1]) * length > budget:
            bounds.append(place)
    return [*bounds, len(longest)] if longest else bounds


def _split(bounds: list[int], longest: list[int], count: int) -> None:
    """Split micro-batches in two, in place in ``bounds``, until there are ``count`` or none has two places.

    The one with most tokens is split first.
    """
    stretches = [(-(stop - start) * longest[stop - 1], start, stop) for start, stop in pairwise(bounds)]
    heapify(stretches)
    while len(bounds) <= count and stretches:
        _, start, stop = heappop(stretches)
        if stop - start > 1:
            middle = start + (stop - start) // 2
            insort(bounds, middle)
            for begin, end in ((start, middle), (middle, stop)):
                heappush(stretches, (-(end - begin) * longest[end - 1], begin, end))
