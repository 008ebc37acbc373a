"""What DEAL makes of a step's packs on one mesh: which there are, and who has which. A function of (step, mesh, rules).

In stream mode there are those that FORM made. In batch mode their number is what came out, and is made one that every
rank has the same of (``num_packs``): packs are split in two, then empty ones follow. The first numbers stay FORM's; a
pack that was split keeps its number and the dearer part of its samples, what was split off has a number behind all of
FORM's. Samples keep their order, so a part fits the budget that the whole one fitted; a group that is kept in one pack
is in one part.

Where rules are ``padded``, FORM's packs are single samples, and what DEAL makes of them are micro-batches of rows:
see ``dynamic_batches``. Rank r's m-th is number m * dp + r.
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
    """How many packs a step of ``packs`` is dealt as, a multiple of ``dp``.

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
    """``count`` packs of the samples of a step, and for each the pack of FORM's that it is of.

    ``costs`` int64 [n] of each sample, and what it says of the next, ``keeps`` uint8 [n]; pack i is those from
    ``bounds[i]`` to ``bounds[i + 1]``. A pack is positions int64 [m] in ``costs``. Packs that are added empty are of
    their own number.
    """
    begins = np.flatnonzero(np.append(0, keeps[:-1]) != PACK)  # of the items
    first = np.searchsorted(begins, bounds)  # items of each pack
    item_costs = np.add.reduceat(costs, begins)
    sums = np.append(0, np.cumsum(item_costs))[first]
    # Only the dearest packs are split: as many as there are packs to add. Ties: the pack that comes first.
    can = np.flatnonzero(np.diff(first) > 1)
    dearest = np.sort(can[np.argsort(-np.diff(sums)[can], kind="stable")[: count - len(bounds) + 1]])
    spans = [range(first[pack], first[pack + 1]) for pack in dearest.tolist()]
    parts = split_dearest(spans, item_costs, len(dearest) + count - len(bounds) + 1)
    held = [np.array(part, np.int64) for part in parts]
    sizes = np.diff(begins, append=len(costs))
    taken = samples_of(sizes, np.concatenate(held)) if held else np.zeros(0, np.int64)
    ends = np.cumsum([sizes[part].sum() for part in held]).astype(np.int64)
    portions = np.split(taken, ends)[:-1]
    packs = np.split(np.arange(len(costs)), bounds[1:])[:-1]
    for number, pack in zip(dearest.tolist(), portions, strict=False):
        packs[number] = pack
    packs += portions[len(dearest) :]
    origins = np.searchsorted(bounds, [pack[0] if len(pack) else 0 for pack in packs], "right") - 1
    return packs, [
        int(of) if len(pack) else number for number, (of, pack) in enumerate(zip(origins, packs, strict=True))
    ]


@dataclass(frozen=True, slots=True)
class PaddedStep:
    """A step as padded micro-batches, those of all ranks by number.

    ``packs``: positions of each one's samples, int64 [samples]; ``rows`` int64 [packs] of each, one more than its
    samples where a rank is short; ``widths`` int64 [packs] tokens of a row.
    """

    packs: list[I64]
    rows: I64
    widths: I64
    figures: PaddedFigures


def deal_padded(rules: Rules, lengths: I64, dp: int, pp: int) -> PaddedStep:
    """Padded micro-batches of samples of ``lengths`` int64 [n], real tokens; as many for every rank, and alike."""
    batch = rules.batch
    assert batch is not None
    found = padded_batches(
        lengths, rules.budget, dp, length_round=rules.align.pack, micro_batch_multiple=batch.micro_batch_multiple or 1,
        min_micro_batches=batch.min_micro_batches, pp=pp, variable_lengths=True,
    )  # fmt: skip
    spans = pairwise(found.bounds.tolist())
    columns = [column for begin, end in spans for column in found.places[begin:end].T]
    packs = [column[column >= 0] for column in columns]
    rows, widths = np.diff(found.bounds), found.lengths
    return PaddedStep(packs, np.repeat(rows, dp), np.repeat(widths, dp), found.figures)


def deal_step(rules: Rules, costs: I64, dp: int) -> I64:
    """Pack numbers by [micro_batch, rank], int64 [packs / dp, dp]; ``costs`` int64 [packs].

    Raises ValueError if dp does not divide them.
    """
    balance = rules.balance
    kind = "karmarkar_karp" if rules.batch is not None and balance.kind == "deal" else balance.kind
    dealt = deal(costs, dp, kind)
    return dealt if balance.order is None else arrange(dealt, costs, balance.order)
