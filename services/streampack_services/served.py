"""Lengths of what a run has served: from its log, in the order in which the samples came, or from a broker's counts.

A ledger has every sample by pack; packs are in the order in which they were filled, and to pack them again in that
order would find them full already. So samples are put back into the order of their streams, each sample where the
furthest of its stream's packs up to it is: one stream is in its own order, and several are mixed as they were.

A broker's status has lengths in buckets (``core.length_counts``). Their order is lost: they are shuffled, so what is
forecast from them holds for a stream that does not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from streampack.core.rules import Rules
from streampack.core.samples import I64
from streampack.errors import PeerError, UserError
from streampack.sources.order import sample_order
from streampack_services import audit
from streampack_services.lengths import STRETCHES, stretches_of
from streampack_services.on_mesh import PlanMesh
from streampack_services.run_history import NEVER
from streampack_services.state_dir import open_ledger, state_folder
from streampack_services.step_rows import StepRows

MOST = 500_000
"""Samples that are taken from a ledger or a broker's counts; more are thinned out."""


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """What a run's feed has served: ``lengths`` int64 [n] as they came, pieces of split samples each by itself.

    They are ``share`` of all ``samples`` in ``packs`` packs (empty ones among them) of ``tokens`` real tokens.
    ``tokens_per_s``: real tokens that the run packs now, for all of its attached ``ranks``; 0 where nobody knows.
    ``mesh``: theirs, once they are all there. ``padded_slots``: tokens computed, of padded micro-batches.
    """

    what: str
    lengths: I64
    rules: Rules
    samples: int
    packs: int
    empty_packs: int
    tokens: int
    slot_tokens: int
    steps: int
    ended: bool
    note: str
    tokens_per_s: float = 0.0
    ranks: int = 0
    mesh: PlanMesh | None = None
    padded_slots: int | None = None

    @property
    def filled_packs(self) -> int:
        """Packs that hold samples."""
        return self.packs - self.empty_packs

    @property
    def slots(self) -> int:
        """Tokens computed: the budget for every pack that holds samples, or what padded micro-batches have."""
        return self.filled_packs * self.rules.budget if self.padded_slots is None else self.padded_slots

    @property
    def share(self) -> float:
        return len(self.lengths) / self.samples


def from_ledger(state_dir: Path, feed: str | None) -> Served:
    """Of the steps that count in a state_dir's log, all in ``MOST`` samples, else some stretches of them.

    Raises UserError where there are none, LedgerDamaged.
    """
    with open_ledger(state_folder(state_dir, None)) as ledger:
        of = audit.feed_of(ledger, feed)
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
                sums += _sums(step, rules.align.sample)
        samples, packs, empty, tokens, slots = sums.tolist()
        if not samples:
            raise UserError(
                f"{state_dir}: got no step of feed {of.name!r}, expected some: wait until the run has begun"
            )
        wanted = max(MOST * len(numbers) // samples, STRETCHES)
        lengths = [
            _in_order([audit.recorded(ledger, of, number) for number in stretch.tolist()])
            for stretch in stretches_of(np.array(numbers), wanted)
        ]
    return Served(
        f"{run}, feed {of.name}, {len(numbers):,} steps", np.concatenate(lengths), rules, samples, packs, empty, tokens,
        slots, len(numbers), of.end is not None, "in the order of the streams",
    )  # fmt: skip


def _sums(step: StepRows, align: int) -> I64:
    """Samples, packs, empty ones of them, tokens and slots of a step."""
    lengths, counts = step.rows["length"].astype(np.int64), np.diff(step.bounds)
    slots = int((-(-lengths // align) * align).sum())
    return np.array([len(lengths), len(counts), int((counts == 0).sum()), int(lengths.sum()), slots])


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


def from_status(snapshot: dict[str, Any], feed: str | None) -> Served:
    """Of a broker's snapshot. Raises UserError for a feed that it does not have, or that has served nothing."""
    feeds = snapshot["feeds"]
    name = next(iter(feeds)) if feed is None else feed
    if name not in feeds:
        raise UserError(f"got feed {name!r}, expected one of: {', '.join(feeds)}")
    found = feeds[name]
    if "lengths" not in found:
        raise PeerError("got a status without lengths, expected a broker of this version: name its state_dir instead")
    totals, tree = found["totals"], {key: value for key, value in found["rules"].items() if key != "digest"}
    if not totals["samples"]:
        raise UserError(f"got a broker whose feed {name!r} has formed no step yet, expected one that has")
    rules = msgspec.convert(tree, Rules)
    lengths = spread(found["lengths"], rules.seed)
    return Served(
        f"{snapshot['run']}, feed {name}, {totals['steps']:,} steps", lengths, rules, totals["samples"],
        totals["packs"], totals["empty_packs"], totals["tokens"], totals["slot_tokens"], totals["steps"],
        found["state"] == "ended", "in no order: shuffled, and by buckets of 3 %", found["tokens_per_s"],
        len(found["readers"]), _mesh_of(found),
        found["dynamic_batching"]["actual_tokens"] if rules.padded else None,
    )  # fmt: skip


def _mesh_of(feed: dict[str, Any]) -> PlanMesh | None:
    """Of the ranks that are attached to a feed, if they are all of theirs."""
    if not feed["all_ranks_attached"] or not feed["readers"]:
        return None
    names = PlanMesh.__struct_fields__
    return PlanMesh(**{name: 1 + max(row[f"{name}_rank"] for row in feed["readers"]) for name in names})


def spread(buckets: list[list[int]], seed: int) -> I64:
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
