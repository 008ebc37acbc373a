"""Lengths of what a run has served: from its log, in the order in which the samples came, or from a broker's counts.

A ledger has every sample by pack; packs are in the order in which they were filled, and to pack them again in that
order would find them full already. So samples are put back into the order of their streams, each sample where the
furthest of its stream's packs up to it is: one stream is in its own order, and several are mixed as they were.

What was closed on the way stays apart: each batch, and of a stream what came before a step that was padded with empty
packs, at a mark of ``end_of_batch`` or the end of a pass. (A batch that filled its last step to the last pack is not
told from the next one; of steps that are batches each is known.)

A broker's status has lengths in buckets (``length_histogram``). Their order is lost: they are shuffled, so what is
forecast from them holds for a stream that does not change; batches are cut out of them as large as they were on the
average.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64
from streampack.errors import UserError
from streampack.sources.order import sample_order
from streampack_services.audit import why
from streampack_services.broker.status import BrokerStatus, FeedStatus
from streampack_services.forecast.lengths import STRETCHES, stretches_of
from streampack_services.forecast.rank_loads import PlanMesh
from streampack_services.ledger.run_history import NEVER
from streampack_services.ledger.state_dir import open_ledger, state_folder
from streampack_services.ledger.step_rows import StepRows

MOST = 500_000
"""Samples that are taken from a ledger or a broker's counts; more are thinned out."""


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """What a run's feed has served: ``lengths`` int64 [n] as they came, pieces of split samples each by itself.

    They are ``share`` of all ``samples`` in ``packs`` packs (empty ones among them) of ``tokens`` real tokens; those
    with samples are ``pack_slots`` tokens long, as FORM made them (padded micro-batches: as they are). Nothing was
    packed across ``bounds``, int64 [b + 1] in ``lengths``.
    ``tokens_per_s``: real tokens that the run packs now, for all of its attached ``ranks``; 0 where nobody knows.
    ``mesh``: theirs, once they are all there.
    """

    what: str
    lengths: I64
    rules: Rules
    samples: int
    packs: int
    empty_packs: int
    tokens: int
    pack_slots: int
    bounds: I64
    steps: int
    ended: bool
    note: str
    tokens_per_s: float = 0.0
    ranks: int = 0
    mesh: PlanMesh | None = None

    @property
    def filled_packs(self) -> int:
        """Packs that hold samples."""
        return self.packs - self.empty_packs

    @property
    def share(self) -> float:
        return len(self.lengths) / self.samples


def from_ledger(state_dir: Path, feed: str | None) -> Served:
    """Of the steps that count in a state_dir's log, all in ``MOST`` samples, else some stretches of them.

    Raises UserError where there are none, LedgerDamaged.
    """
    with open_ledger(state_folder(state_dir, None)) as ledger:
        of = why.feed_of(ledger, feed)
        rules, run = of.rules_at(NEVER), ledger.state.run
        if rules.padded:
            raise UserError(
                f"{state_dir}: got feed {of.name!r}, which is padded, expected one that packs: a log knows no mesh, so "
                f"name the running broker"
            )
        numbers, sums = [], np.zeros(5, np.int64)
        for step in ledger.steps(of.name):
            if of.effective(step.step) == step.lineage:
                numbers.append(step.step)
                sums += _sums(step, rules)
        samples, packs, empty, tokens, slots = sums.tolist()
        if not samples:
            raise UserError(
                f"{state_dir}: got no step of feed {of.name!r}, expected some: wait until the run has begun"
            )
        wanted = max(MOST * len(numbers) // samples, STRETCHES)
        lengths, bounds = list[I64](), [0]
        for stretch in stretches_of(np.array(numbers), wanted):
            for steps in _apart([why.recorded(ledger, of, number) for number in stretch.tolist()], rules):
                lengths.append(_in_order(steps))
                if _closes(steps[-1], rules):
                    bounds.append(sum(map(len, lengths)))
    every = np.concatenate(lengths)
    return Served(
        f"{run}, feed {of.name}, {len(numbers):,} steps", every, rules, samples, packs, empty, tokens,
        slots, np.unique([*bounds, len(every)]), len(numbers), of.end is not None, "in the order of the streams",
    )  # fmt: skip


def _sums(step: StepRows, rules: Rules) -> I64:
    """Samples, packs, empty ones of them, tokens, and how long the others are together, of a step."""
    lengths, counts = step.rows["length"].astype(np.int64), np.diff(step.bounds)
    ends = np.concatenate([[0], np.cumsum(-(-lengths // rules.align.sample) * rules.align.sample)])
    slots = (ends[step.bounds[1:]] - ends[step.bounds[:-1]])[counts > 0]
    widths = int(rules.own_widths(slots).sum())
    return np.array([len(lengths), len(counts), int((counts == 0).sum()), int(lengths.sum()), widths])


def _apart(steps: list[StepRows], rules: Rules) -> Iterator[list[StepRows]]:
    """Consecutive steps that may share what waits in the window."""
    found: list[StepRows] = []
    for step in steps:
        found.append(step)
        if _closes(step, rules):
            yield found
            found = []
    if found:
        yield found


def _closes(step: StepRows, rules: Rules) -> bool:
    """Is nothing packed across its end?"""
    return rules.batch is not None or bool((np.diff(step.bounds) == 0).any())


def _in_order(steps: list[StepRows]) -> I64:
    """Lengths of the samples of consecutive steps, int64 [n], as they came."""
    rows, counts = np.concatenate([step.rows for step in steps]), np.concatenate([np.diff(s.bounds) for s in steps])
    pack = np.repeat(np.arange(len(counts)), counts)
    order = arrival_order(rows["stream"], rows["index"], rows["part"], pack)
    lengths: I64 = rows["length"].astype(np.int64)[order]
    return lengths


def arrival_order(stream: Any, index: Any, part: Any, pack: I64) -> I64:
    """Positions of samples in the order in which they came, int64 [n], from what pack each is in."""
    by_stream = np.lexsort((part, index, stream))
    streams, furthest = stream[by_stream], np.empty(len(pack), np.int64)
    cuts = np.flatnonzero(np.diff(streams)) + 1
    for run in np.split(np.arange(len(pack)), cuts):
        furthest[run] = np.maximum.accumulate(pack[by_stream[run]])
    found: I64 = by_stream[np.argsort(furthest, kind="stable")]
    return found


def from_status(status: BrokerStatus, feed: str | None) -> Served:
    """Return what a broker's feed has served, by default its first.

    Raises UserError for a feed that the broker does not have, or that has formed no step.
    """
    feeds = status.feeds
    name = next(iter(feeds)) if feed is None else feed
    if name not in feeds:
        raise UserError(f"got feed {name!r}, expected one of: {', '.join(feeds)}")
    found = feeds[name]
    totals, rules = found.totals, Rules(**{key: getattr(found.rules, key) for key in Rules.__struct_fields__})
    if not totals.samples:
        raise UserError(f"got a broker whose feed {name!r} has formed no step yet, expected one that has")
    lengths, filled = spread(found.lengths, rules.seed), totals.packs - totals.empty_packs
    slots = rules.budget * filled
    if found.dynamic_batching is not None:
        slots = found.dynamic_batching.actual_tokens
    elif rules.shape != "fixed":
        slots = totals.tokens + sum(found.waste_tokens[cause] for cause in ("alignment", "pack_tail", "shape"))
    batches = max(round(totals.steps * len(lengths) / totals.samples), 1) if rules.batch is not None else 1
    return Served(
        f"{status.run}, feed {name}, {totals.steps:,} steps", lengths, rules, totals.samples, totals.packs,
        totals.empty_packs, totals.tokens, slots, np.linspace(0, len(lengths), batches + 1).astype(np.int64),
        totals.steps, found.state == "ended", "in no order: shuffled, and by buckets of 3 %", found.tokens_per_s,
        len(found.readers), _mesh_of(found),
    )  # fmt: skip


def _mesh_of(feed: FeedStatus) -> PlanMesh | None:
    """Return the mesh of the ranks that are attached, if all are."""
    if not feed.all_ranks_attached or not feed.readers:
        return None
    names = PlanMesh.__struct_fields__
    return PlanMesh(**{name: 1 + max(getattr(row, f"{name}_rank") for row in feed.readers) for name in names})


def spread(buckets: Sequence[Sequence[int]], seed: int) -> I64:
    """Lengths, int64 [n], as (samples, tokens) of ``buckets`` say: each bucket's as equal as can be, shuffled.

    >>> sorted(spread([[2, 6], [2, 201]], 0).tolist())
    [3, 3, 100, 101]
    """
    samples, tokens = np.array(buckets, np.int64).reshape(-1, 2).T
    thin = max(1.0, int(samples.sum()) / MOST)
    kept = np.maximum(np.round(samples / thin), 1).astype(np.int64)
    tokens = np.where(kept == samples, tokens, np.round(tokens / samples * kept)).astype(np.int64)
    least, more = tokens // kept, tokens % kept
    number = np.arange(int(kept.sum())) - np.repeat(np.cumsum(kept) - kept, kept)
    lengths = np.repeat(least, kept) + (number < np.repeat(more, kept))
    shuffled: I64 = lengths[sample_order(len(lengths), seed=seed, pass_=0, shard=0)]
    return shuffled
