"""Sample lengths that a run has served: from its log in their order, or from a broker's histogram.

A ledger lists samples by pack. To pack them again in that order would repeat the run's packs, so ``arrival_order`` puts
the samples back into the order of their streams.

A packer leaves samples that fit badly in its window. So the samples in steps alone look better than all samples. A
plan needs the samples that wait in the window, too (``waiting``). A broker's status has their lengths. A log has those
of its last snapshot, so only the steps before that snapshot are used with them.

Samples that the run kept apart stay apart (``Served.bounds``). A bound is the end of a batch or of a step with empty
packs. Only a mark of ``end_of_batch`` or the end of a pass makes empty packs. A batch that ends with a full step cannot
be told from the next one, unless steps are batches.

A broker's status has lengths in buckets (``length_histogram``) without their order. They are shuffled, so a forecast
from them holds for a stream that does not change over time. Batches are cut out of them with the mean size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from streampack.core.model.keys.stage_keys import Stage, StageBegin
from streampack.core.model.rule_changes import apply_change
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64, ROW
from streampack.core.stats.media_figures import MediaFigures
from streampack.errors import UserError
from streampack.sources.order import sample_order
from streampack_services.amounts import counted
from streampack_services.audit import why
from streampack_services.broker.serving.kept_hours import hours_of
from streampack_services.broker.status import BrokerStatus, FeedStatus
from streampack_services.forecast.lengths import STRETCHES, StreamLengths, Workload, by_length, stretches, stretches_of
from streampack_services.forecast.media_sizes import sizes_of_recorded
from streampack_services.forecast.rank_loads import PlanMesh
from streampack_services.forecast.run_order import RunOrder, latest_rows
from streampack_services.forecast.sharing import Sharing, sharing_of
from streampack_services.ledger.formed_by import FormingRules
from streampack_services.ledger.run_history import LATEST, NEVER, FeedHistory
from streampack_services.ledger.run_hours import FeedHours, read_hours
from streampack_services.ledger.state_dir import read_ledger, state_folder
from streampack_services.ledger.step_rows import StepRows

MOST = 500_000
"""Samples to take from a ledger or a histogram; of more samples, only a part is taken."""
WAITING = -1
"""In place of a record and of a pack, for samples that are in no step yet."""
IN_ORDER, SHUFFLED = "in the order of the streams", "in random order (3% buckets)"
UNKNOWN_WINDOW = (
    f"{IN_ORDER}; samples that wait in the window are not known, so large windows may look better than they are. Pass "
    f"the address of the running broker"
)


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """Samples and packs that a run's feed has served.

    ``what``: name of the run, for people; ``note``: how the lengths are ordered.
    ``lengths``: tokens per sample, or per part of a split sample, int64 [n]; all or some of the ``samples``. A plan has
    samples that wait, too.
    ``packs``: number of packs, with ``empty_packs``. ``tokens``: real tokens in them, shared ones once.
    ``pack_slots``: total length in tokens of the packs with samples, before DEAL (padded micro-batches: after it).
    ``bounds``: indices into ``lengths`` that no pack crosses, int64 [b + 1], from 0 to n.
    ``steps``: number of steps. ``ended``: the feed has ended.
    ``tokens_per_s``: real tokens per second that the run packs now; 0 if not known. ``ranks``: attached ranks.
    ``mesh``: mesh of the ranks; None until all are attached.
    ``shared_tokens``: tokens that samples share with samples before them. ``sharing``: the same of the groups in the
    log, also of those that were not sent as trees; None if it is not known.
    ``media``: what ``broker.status.MediaStatus`` has, of these packs; None for a run without media.
    ``media_sizes``: sizes of the samples' media, int64 [n, 4] (see ``media_sizes``); None if they are not known.
    ``hours``: hours that ranks trained and waited; None if they are not recorded.
    ``has_groups``: the feed has ``cp: dynamic``.
    ``order``: order of the samples, by parts of the steps: see ``run_order``.
    ``stages``: steps and packs by stage; empty if the rules did not change, or if it is not known.
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
    shared_tokens: int = 0
    sharing: Sharing | None = None
    media: dict[str, Any] | None = None
    media_sizes: I64 | None = None
    hours: FeedHours | None = None
    has_groups: bool = False
    order: list[dict[str, Any]] = field(default_factory=list)
    stages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def filled_packs(self) -> int:
        """Number of packs that hold samples."""
        return self.packs - self.empty_packs

    @property
    def share(self) -> float:
        """Share of the samples whose lengths are here, 0 to 1."""
        return len(self.lengths) / self.samples

    def workload(self, most: int, *, media: bool = False) -> Workload:
        """Return at most ``most`` of the lengths, taken in stretches over the whole run, as the input of a forecast.

        ``media``: with the sizes of their media.
        """
        lengths = stretches(self.lengths, most)
        whole = self.ended and len(lengths) == self.samples
        by_count = by_length(self.lengths) if self.ended and not whole and len(self.lengths) == self.samples else None
        used = f"the forecast uses {len(lengths):,} of the {self.samples:,} samples of the run, {self.note}"
        notes = [f"{used}; overlong samples count as the run truncated or split them"]
        if self.sharing is not None:
            sentence = self.sharing.sentence()
            notes.append(sentence[0].lower() + sentence[1:-1])
        if self.shared_tokens:
            notes.append("the forecast counts shared tokens for each sample that has them")
        sizes = (stretches(self.media_sizes, most),) if media and self.media_sizes is not None else None
        total = float(self.samples) if self.ended else None
        stream = StreamLengths("data", (lengths,), (whole,), total, every=by_count, media=sizes)
        return Workload(self.what, (stream,), notes)


def from_ledger(state_dir: Path, feed: str | None, *, waiting: bool = False) -> Served:
    """Read the steps that count from a state_dir's log; only some stretches of steps, if above ``MOST`` samples.

    ``feed``: name of the feed, None for the first one. ``waiting``: ``lengths`` has samples that are in no step, too.
    Raises UserError if the feed has no steps, LedgerDamaged if the ledger is damaged.
    """
    with read_ledger(state_folder(state_dir, None)) as ledger:
        history = why.feed_of(ledger, feed)
        rules, run = history.rules_at(NEVER), ledger.state.run
        if rules.padded:
            raise UserError(
                f"{state_dir}: feed {history.name!r} is padded, so its batches depend on the mesh, which a log does "
                f"not record. Pass the address of the running broker."
            )
        numbers, sums, media, order = [], np.zeros(6, np.int64), MediaFigures(rules), RunOrder(history)
        forming, by_stage = FormingRules(ledger, history), dict[int, dict[str, Any]]()
        for step in ledger.steps(history.name):
            if history.effective(step.step) == step.lineage:
                numbers.append(step.step)
                order.add(step)
                own = forming.of(step).rules
                sums += (of_step := _sums(step, own))
                if (stage := history.stage_at(step.step, step.lsn)) is not None:
                    _count_stage(by_stage.setdefault(stage.number, {"name": stage.name}), step.step, of_step, own)
                if rules.has_extra_bytes:
                    items, patches, sizes = map(step.column, ("items", "patches", "extra_bytes"))
                    media.add(step.bounds, _slots(step, rules), items, patches, sizes, step.step)
        samples, packs, empty, tokens, slots, shared_tokens = sums.tolist()
        if not samples:
            raise UserError(
                f"{state_dir}: feed {history.name!r} has no step yet. Wait until the run has formed a step."
            )
        read, waits, note = numbers, None, IN_ORDER
        if waiting and history.end is None and rules.batch is None:
            waits = _waiting(history, numbers)
            note = UNKNOWN_WINDOW if waits is None else f"{IN_ORDER}; {waits.num_samples:,} of them were in no step yet"
        if waits is not None:
            read = [number for number in numbers if number < waits.step]
        stretches = stretches_of(np.array(read), max(MOST * len(numbers) // samples, STRETCHES))
        steps = [[why.recorded(ledger, history, number) for number in stretch.tolist()] for stretch in stretches]
        steps[-1] += [waits] if waits is not None else []
        lengths, sizes_of_media, bounds = _in_order(steps, rules)
    return Served(
        f"{run}, feed {history.name}, {counted(len(numbers), 'step')}", lengths, rules,
        samples + (0 if waits is None else waits.num_samples), packs, empty, tokens, slots, bounds, len(numbers),
        history.end is not None, note, shared_tokens=shared_tokens, sharing=sharing_of(state_dir, rules),
        media=media.counts() if rules.has_extra_bytes else None, media_sizes=sizes_of_media,
        hours=read_hours(state_dir).get(history.name), has_groups=bool(history.dealt_at(LATEST)[0]),
        order=order.rows(), stages=list(by_stage.values()),
    )  # fmt: skip


def _waiting(history: FeedHistory, numbers: list[int]) -> StepRows | None:
    """Return the samples that waited at the last snapshot as one step, with the snapshot's step as its number.

    None if there is no snapshot after at least half of the steps ``numbers``.
    """
    taken = history.snapshot(numbers[-1] + 1)
    if taken is None or 2 * sum(number < taken.step for number in numbers) < len(numbers):
        return None
    form = taken.form
    rows = np.concatenate([np.frombuffer(samples, ROW) for samples in (form.window, form.pending)])
    return StepRows(
        feed=history.name, lineage=taken.lineage, step=taken.step, lsn=WAITING, digest=b"", chain=b"",
        num_loss_tokens=0, num_samples=len(rows), bounds=np.array([0, len(rows)]), rows=rows,
        extras=form.extra_rows(len(rows)),
    )  # fmt: skip


def _in_order(stretches: list[list[StepRows]], rules: Rules) -> tuple[I64, I64 | None, I64]:
    """Return the lengths of samples in the order of their arrival, the sizes of their media, and ``Served.bounds``."""
    lengths, sizes, bounds = list[I64](), list[I64](), [0]
    for stretch in stretches:
        for steps in _separate_groups(stretch, rules):
            order = _order(steps)
            lengths.append(np.concatenate([step.rows["length"] for step in steps]).astype(np.int64)[order])
            if rules.has_extra_bytes:
                recorded = np.concatenate([step.extras for step in steps])[order]
                sizes.append(sizes_of_recorded(recorded, rules.balance))
            if _closes(steps[-1], rules):
                bounds.append(sum(map(len, lengths)))
    all_lengths = np.concatenate(lengths)
    return all_lengths, np.concatenate(sizes) if rules.has_extra_bytes else None, np.unique([*bounds, len(all_lengths)])


def _sums(step: StepRows, rules: Rules) -> I64:
    """Return figures of a step, int64 [6].

    These are samples, packs, empty packs, tokens, the total length of its other packs, and shared tokens.
    """
    lengths, counts = step.own_lengths, np.diff(step.bounds)
    widths = int(rules.own_widths(_slots(step, rules)[counts > 0]).sum())
    tokens = int(lengths.sum())
    shared_tokens = int(step.rows["length"].sum()) - tokens
    return np.array([len(lengths), len(counts), int((counts == 0).sum()), tokens, widths, shared_tokens])


def _count_stage(stage: dict[str, Any], step: int, sums: I64, rules: Rules) -> None:
    """Count a step with these ``_sums`` in the row of its stage."""
    samples, packs, _, tokens, *_ = sums.tolist()
    stage |= {"steps": [stage.get("steps", [step])[0], step], "budget": rules.budget}
    counts = {"samples": samples, "packs": packs, "tokens": tokens, "capacity": packs * rules.budget}
    stage |= {name: stage.get(name, 0) + count for name, count in counts.items()}


def _slots(step: StepRows, rules: Rules) -> I64:
    """Return the aligned tokens of each pack of a step, int64 [packs]."""
    ends = np.concatenate([[0], np.cumsum(-(-step.own_lengths // rules.align.sample) * rules.align.sample)])
    slots: I64 = ends[step.bounds[1:]] - ends[step.bounds[:-1]]
    return slots


def _separate_groups(steps: list[StepRows], rules: Rules) -> Iterator[list[StepRows]]:
    """Yield groups of consecutive steps; no sample could move between two groups."""
    group: list[StepRows] = []
    for step in steps:
        group.append(step)
        if _closes(step, rules):
            yield group
            group = []
    if group:
        yield group


def _closes(step: StepRows, rules: Rules) -> bool:
    """Return whether no sample after the step could have been in it: the step is a batch, or has empty packs."""
    return rules.batch is not None or bool((np.diff(step.bounds) == 0).any())


def _order(steps: list[StepRows]) -> I64:
    """Return the positions of the samples of consecutive steps, int64 [n], in the order of their arrival."""
    rows, counts = np.concatenate([step.rows for step in steps]), np.concatenate([np.diff(s.bounds) for s in steps])
    pack = np.repeat(np.arange(len(counts)), counts)
    pack[np.repeat([step.lsn == WAITING for step in steps], [len(step.rows) for step in steps])] = WAITING
    return arrival_order(rows["stream"], rows["index"], rows["part"], pack)


def arrival_order(stream: Any, index: Any, part: Any, pack: I64) -> I64:
    """Estimate the order in which samples arrived; return their positions in that order, int64 [n].

    ``stream``, ``index``, ``part``: id of each sample. ``pack``: number of the pack that holds it, -1 for no pack. Each
    stream keeps its own order. Across streams, samples are sorted by the highest pack number that the stream has
    reached with the sample. So a sample that waits (pack -1) comes right after the sample before it in its stream.
    """
    by_stream = np.lexsort((part, index, stream))
    streams, furthest = stream[by_stream], np.empty(len(pack), np.int64)
    cuts = np.flatnonzero(np.diff(streams)) + 1
    for run in np.split(np.arange(len(pack)), cuts):
        furthest[run] = np.maximum.accumulate(pack[by_stream[run]])
    order: I64 = by_stream[np.argsort(furthest, kind="stable")]
    return order


def from_status(status: BrokerStatus, feed: str | None, *, waiting: bool = False) -> Served:
    """Return the samples and packs that a broker's feed has served, from the broker's status.

    ``feed``: name of the feed, None for the first one. ``waiting``: ``lengths`` has samples that are in no step, too.

    Raises UserError for a feed that the broker does not have, or that has formed no step.
    """
    feeds = status.feeds
    name = next(iter(feeds)) if feed is None else feed
    if name not in feeds:
        raise UserError(f"got feed {name!r}, expected one of: {', '.join(feeds)}")
    served = feeds[name]
    totals, rules = served.totals, _rules_in_force(served)
    if not totals.samples:
        raise UserError(f"Feed {name!r} of the broker has no step yet. Wait until the broker has formed a step.")
    buckets, note, filled = [*served.lengths], SHUFFLED, totals.packs - totals.empty_packs
    if waiting and served.waiting_lengths:
        buckets += served.waiting_lengths
        note += f"; {sum(count for count, _ in served.waiting_lengths):,} of them are in no step yet"
    lengths, samples = spread(buckets, rules.seed), sum(count for count, _ in buckets)
    slots = rules.budget * filled
    if served.dynamic_batching is not None:
        slots = served.dynamic_batching.actual_tokens
    elif rules.shape != "fixed":
        slots = totals.tokens + sum(served.waste_tokens[cause] for cause in ("alignment", "pack_tail", "shape"))
    batches = max(round(totals.steps * len(lengths) / samples), 1) if rules.batch is not None else 1
    return Served(
        f"{status.run}, feed {name}, {counted(totals.steps, 'step')}", lengths, rules, samples, totals.packs,
        totals.empty_packs, totals.tokens, slots, np.linspace(0, len(lengths), batches + 1).astype(np.int64),
        totals.steps, served.state == "ended", note, served.tokens_per_s,
        served.ranks.attached, _mesh_of(served), shared_tokens=totals.shared_tokens,
        media=None if served.media is None else msgspec.to_builtins(served.media), hours=hours_of(status)[name],
        has_groups=served.groups is not None,
        order=latest_rows(served, [stream for stream in status.streams if stream.feed == name]),
    )  # fmt: skip


def _rules_in_force(feed: FeedStatus) -> Rules:
    """Return the rules with which a feed forms the next step; its streams are those with which it began."""
    now = feed.changes.in_force
    first = Rules(**{key: getattr(feed.rules, key) for key in Rules.__struct_fields__})
    at = StageBegin(step=now.since_step)
    return apply_change(first, Stage(at=at, rules=now.changed), now.since_step) if now.changed.keys else first


def _mesh_of(feed: FeedStatus) -> PlanMesh | None:
    """Return the mesh of the attached ranks; None if some are missing."""
    mesh = feed.ranks.mesh
    if not feed.all_ranks_attached or mesh is None:
        return None
    return PlanMesh(**{name: getattr(mesh, name) for name in PlanMesh.__struct_fields__})


def spread(buckets: Sequence[Sequence[int]], seed: int) -> I64:
    """Return lengths with the (samples, tokens) of each bucket, as equal as possible within a bucket, shuffled.

    At most about ``MOST`` lengths are returned, int64 [n], in proportion to the buckets. ``seed`` decides the order.

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
