"""The packs of a step on one mesh, and the rank of each pack: a function of (step, mesh, rules).

In stream mode these are the packs that FORM made. In batch mode the number of FORM's packs depends on the samples, but
every rank must get the same number of packs (``num_packs``). So packs are split in two, then empty packs are added. A
split pack keeps its number and the costlier part of its samples; the other part gets a number behind all of FORM's.
Samples keep their order, so a part fits the budget that the whole pack fitted. A split never divides a group that is
kept in one pack.

With ``padded`` rules, FORM's packs are single samples, and DEAL makes micro-batches of rows from them: see
``dynamic_batches``. The m-th micro-batch of rank r has number m * dp + r.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from streampack.core.deal.deal import arrange, deal, num_packs, split_dearest
from streampack.core.deal.dynamic_batches import PaddedFigures, padded_batches
from streampack.core.model.items import samples_of
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64, PACK


def packs_of_mesh(rules: Rules, packs: int, dp: int, pp: int) -> int:
    """Return the number of packs that a step of ``packs`` packs has on a mesh of ``dp`` and ``pp``: a multiple of dp.

    >>> from streampack.core.model.rules import Batch
    >>> packs_of_mesh(Rules(batch=Batch(samples=64)), 9, 4, 2)
    16
    """
    batch = rules.batch
    if batch is None:
        return packs
    multiple = pp if batch.micro_batch_multiple is None else batch.micro_batch_multiple
    return num_packs(packs, dp, multiple, batch.min_micro_batches)


def split(bounds: I64, costs: I64, keeps: NDArray[np.uint8], count: int) -> tuple[list[I64], list[int]]:
    """Split a step's packs into ``count`` packs.

    Args:
        bounds: int64 [packs + 1]; pack i holds the samples from ``bounds[i]`` to ``bounds[i + 1]``.
        costs: int64 [n], the cost of each sample.
        keeps: uint8 [n], the samples' column ``keep``: see ``samples.KEEPS``.
        count: Packs wanted.

    Returns:
        The packs, as positions int64 [m] in ``costs``; and for each pack, the number of the FORM pack from which its
        samples come. An empty pack has its own number.
    """
    begins = np.flatnonzero(np.append(0, keeps[:-1]) != PACK)  # of the items
    first = np.searchsorted(begins, bounds)  # items of each pack
    item_costs = np.add.reduceat(costs, begins)
    sums = np.append(0, np.cumsum(item_costs))[first]
    # Only the costliest packs are split: as many as there are packs to add. Ties: the pack that comes first.
    can = np.flatnonzero(np.diff(first) > 1)
    dearest = np.sort(can[np.argsort(-np.diff(sums)[can], kind="stable")[: count - len(bounds) + 1]])
    spans = [range(first[pack], first[pack + 1]) for pack in dearest.tolist()]
    parts = split_dearest(spans, item_costs, len(dearest) + count - len(bounds) + 1)
    part_items = [np.array(part, np.int64) for part in parts]
    sizes = np.diff(begins, append=len(costs))
    taken = samples_of(sizes, np.concatenate(part_items)) if part_items else np.zeros(0, np.int64)
    ends = np.cumsum([sizes[part].sum() for part in part_items]).astype(np.int64)
    portions = np.split(taken, ends)[:-1]
    packs = np.split(np.arange(len(costs)), bounds[1:])[:-1]
    for number, pack in zip(dearest.tolist(), portions, strict=False):
        packs[number] = pack
    packs += portions[len(dearest) :]
    origins = np.searchsorted(bounds, [pack[0] if len(pack) else 0 for pack in packs], "right") - 1
    return packs, [
        int(origin) if len(pack) else number for number, (origin, pack) in enumerate(zip(origins, packs, strict=True))
    ]


@dataclass(frozen=True, slots=True)
class PaddedStep:
    """A step as padded micro-batches of all ranks; number m * dp + r is the m-th micro-batch of rank r.

    Attributes:
        packs: For each micro-batch, positions of its samples, int64 [samples].
        rows: int64 [packs], rows of each micro-batch; a row without a sample is padding.
        widths: int64 [packs], tokens of a row.
        figures: Tokens over all ranks.
    """

    packs: list[I64]
    rows: I64
    widths: I64
    figures: PaddedFigures


def deal_padded(rules: Rules, lengths: I64, dp: int, pp: int) -> PaddedStep:
    """Divide samples of ``lengths`` int64 [n], tokens without padding, into padded micro-batches.

    Every rank of a mesh of ``dp`` and ``pp`` gets the same number of micro-batches, with the same shapes.
    """
    batch = rules.batch
    assert batch is not None
    batches = padded_batches(
        lengths, rules.budget, dp, length_round=rules.align.pack, micro_batch_multiple=batch.micro_batch_multiple or 1,
        min_micro_batches=batch.min_micro_batches, pp=pp, variable_lengths=True,
    )  # fmt: skip
    spans = pairwise(batches.bounds.tolist())
    columns = [column for begin, end in spans for column in batches.places[begin:end].T]
    packs = [column[column >= 0] for column in columns]
    rows, widths = np.diff(batches.bounds), batches.lengths
    return PaddedStep(packs, np.repeat(rows, dp), np.repeat(widths, dp), batches.figures)


def deal_step(rules: Rules, costs: I64, dp: int) -> I64:
    """Deal a step's packs by the rules: return the pack numbers by [micro_batch, rank], int64 [packs / dp, dp].

    ``costs`` int64 [packs]. Raises ValueError if dp does not divide the number of packs.
    """
    balance = rules.balance
    kind = "karmarkar_karp" if rules.batch is not None and balance.kind == "deal" else balance.kind
    dealt = deal(costs, dp, kind)
    return dealt if balance.order is None else arrange(dealt, costs, balance.order)
